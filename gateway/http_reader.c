#include "gateway/http_reader.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

static struct http_reader *reader_of(http_parser *p)
{
    return p->data;
}

/* Returns what makes the parser stop. */
static int refuse(struct http_reader *r, int status, const char *why)
{
    r->status = status;
    snprintf(r->why, sizeof(r->why), "%s", why);
    return -1;
}

static bool head_fits(const struct http_reader *r, size_t more)
{
    return r->target.len + r->headers.len + more <= r->limits->max_head_bytes;
}

static int refuse_head(struct http_reader *r)
{
    char why[96];
    snprintf(why, sizeof(why), "request line and headers: over %zu bytes (max-head-bytes)", r->limits->max_head_bytes);
    return refuse(r, 431, why);
}

static int refuse_body(struct http_reader *r)
{
    char why[96];
    snprintf(why, sizeof(why), "body: over %zu bytes (max-body-bytes)", r->limits->max_body_bytes);
    return refuse(r, 413, why);
}

static int refuse_many(struct http_reader *r)
{
    char why[96];
    snprintf(why, sizeof(why), "headers: more than %d", HTTP_HEADERS_MOST);
    return refuse(r, 431, why);
}

static int on_begin(http_parser *p)
{
    reader_of(p)->has_begun = true;
    return 0;
}

static int on_target(http_parser *p, const char *at, size_t n)
{
    struct http_reader *r = reader_of(p);
    if (!head_fits(r, n))
        return refuse_head(r);
    bytes_append(&r->target, at, n);
    return 0;
}

/* White space behind a value is none of it (RFC 9110, 5.5). */
static void end_value(struct http_reader *r)
{
    struct bytes *h = &r->headers;
    while (h->len && (h->data[h->len - 1] == ' ' || h->data[h->len - 1] == '\t'))
        h->len--;
    bytes_append(h, "", 1);
}

static int on_name(http_parser *p, const char *at, size_t n)
{
    struct http_reader *r = reader_of(p);
    if (r->has_head) /* a trailer */
        return 0;
    if (r->is_in_value)
        end_value(r);
    if (r->is_in_value || !r->n_headers)
        r->n_headers++;
    r->is_in_value = false;
    if (r->n_headers > HTTP_HEADERS_MOST)
        return refuse_many(r);
    if (!head_fits(r, n))
        return refuse_head(r);
    bytes_append(&r->headers, at, n);
    return 0;
}

static int on_value(http_parser *p, const char *at, size_t n)
{
    struct http_reader *r = reader_of(p);
    if (r->has_head)
        return 0;
    if (!head_fits(r, n))
        return refuse_head(r);
    if (!r->is_in_value)
        bytes_append(&r->headers, "", 1);
    r->is_in_value = true;
    bytes_append(&r->headers, at, n);
    return 0;
}

static int on_head(http_parser *p)
{
    struct http_reader *r = reader_of(p);
    if (r->is_in_value)
        end_value(r);
    r->has_head = true;
    if (p->http_major != 1)
        return refuse(r, 505, "only HTTP/1.1 and HTTP/1.0 are spoken here");
    if (p->method == HTTP_CONNECT)
        return refuse(r, 501, "CONNECT is not served here");
    p->upgrade = 0; /* or the body would not be read */
    if (p->content_length != UINT64_MAX && p->content_length > r->limits->max_body_bytes)
        return refuse_body(r);
    const char *expects = http_reader_header(r, "expect");
    r->wants_continue = expects && !strcasecmp(expects, "100-continue");
    return 0;
}

static int on_body(http_parser *p, const char *at, size_t n)
{
    struct http_reader *r = reader_of(p);
    if (r->body.len + n > r->limits->max_body_bytes)
        return refuse_body(r);
    bytes_append(&r->body, at, n);
    return 0;
}

static int on_whole(http_parser *p)
{
    reader_of(p)->keeps_alive = http_should_keep_alive(p);
    http_parser_pause(p, 1);
    return 0;
}

static const http_parser_settings CALLBACKS = {.on_message_begin = on_begin,
                                               .on_url = on_target,
                                               .on_header_field = on_name,
                                               .on_header_value = on_value,
                                               .on_headers_complete = on_head,
                                               .on_body = on_body,
                                               .on_message_complete = on_whole};

static void start(struct http_reader *r)
{
    http_parser_init(&r->parser, HTTP_REQUEST);
    r->parser.data = r;
}

void http_reader_setup(void)
{
    http_parser_set_max_header_size(2 * HTTP_HEAD_MOST);
}

void http_reader_init(struct http_reader *r, const struct http_limits *limits)
{
    *r = (struct http_reader){.limits = limits};
    start(r);
}

void http_reader_free(struct http_reader *r)
{
    bytes_free(&r->target);
    bytes_free(&r->headers);
    bytes_free(&r->body);
}

enum http_step http_reader_feed(struct http_reader *r, const void *data, size_t n, size_t *used_out)
{
    *used_out = http_parser_execute(&r->parser, &CALLBACKS, data, n);
    enum http_errno error = HTTP_PARSER_ERRNO(&r->parser);
    if (error == HPE_PAUSED)
        return HTTP_WHOLE;
    if (error == HPE_OK)
        return HTTP_MORE;
    if (error == HPE_HEADER_OVERFLOW)
        refuse_head(r);
    if (!r->status) {
        char why[96];
        snprintf(why, sizeof(why), "not HTTP: %s", http_errno_description(error));
        refuse(r, 400, why);
    }
    return HTTP_REFUSED;
}

void http_reader_next(struct http_reader *r)
{
    const struct http_limits *limits = r->limits;
    http_reader_free(r);
    http_reader_init(r, limits);
}

const char *http_reader_method(const struct http_reader *r)
{
    return http_method_str((enum http_method)r->parser.method);
}

const char *http_reader_header(const struct http_reader *r, const char *name)
{
    if (!r->n_headers)
        return NULL;
    const char *at = r->headers.data, *end = at + r->headers.len;
    for (uint32_t i = 0; i < r->n_headers && at < end; i++) {
        const char *value = at + strlen(at) + 1;
        if (value > end)
            break;
        if (!strcasecmp(at, name))
            return value;
        at = value + strlen(value) + 1;
    }
    return NULL;
}

bool http_reader_is_old(const struct http_reader *r)
{
    return r->parser.http_minor == 0;
}
