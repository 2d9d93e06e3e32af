/* Fuzz targets of what clients send to the gateway, one for each program (-DTARGET=...): see fuzz.c. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/gateway_internal.h"
#include "gateway/http_reader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void look_at(const struct http_reader *r)
{
    const char *host = http_reader_header(r, "host");
    if (r->headers.len > 2048 || r->target.len > 2048 || r->body.len > 1024 || (host && strlen(host) > 2048) ||
        r->n_headers > HTTP_HEADERS_MOST || !*http_reader_method(r))
        abort();
}

/* Requests of one connection, in pieces of a size that the first byte says. */
static void http(const uint8_t *data, size_t size)
{
    static const struct http_limits LIMITS = {2048, 1024};
    struct http_reader r;
    size_t piece = size ? 1 + data[0] : 1, at = 1;
    enum http_step step = HTTP_MORE;
    http_reader_init(&r, &LIMITS);
    while (at < size && step != HTTP_REFUSED) {
        size_t n = size - at < piece ? size - at : piece, used = 0;
        step = http_reader_feed(&r, data + at, n, &used);
        if (used > n || (step == HTTP_MORE && used != n) || (step == HTTP_REFUSED && (r.status < 400 || !*r.why)))
            abort();
        at += used;
        if (step == HTTP_WHOLE) {
            look_at(&r);
            http_reader_next(&r);
        }
    }
    http_reader_free(&r);
}

/* Whatever a model says is valid inside of JSON, and valid UTF-8 stays what it is. */
static void escape(const uint8_t *data, size_t size)
{
    struct bytes out = {0};
    json_t *plain = json_stringn(size ? (const char *)data : "", size), *as_value;
    bytes_append(&out, "\"", 1);
    ask_text_escape(&out, data, size);
    bytes_append(&out, "\"", 1);
    json_t *back = json_loadb(out.data, out.len, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    as_value = ask_text_json(data, size);
    if (!back || !as_value || !json_equal(back, as_value) || (plain && !json_equal(back, plain)))
        abort();
    json_decref(plain);
    json_decref(back);
    json_decref(as_value);
    bytes_free(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    TARGET(data, size);
    (void)http, (void)escape;
    return 0;
}
