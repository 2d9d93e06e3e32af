/*
 * Reads one HTTP/1.1 request after another from the bytes of a connection.
 *
 * Bounds are checked while bytes come: a head or a body that is too long is refused before it is kept. What
 * can't be read is refused with the status to answer (400, 413, 431, 501, 505) and a text that says why, and
 * the connection ends after that answer, because nobody knows where the next request begins.
 *
 * The syntax (RFC 9112) is http-parser's concern. HTTP/1.0 is understood. Upgrades are ignored, as RFC 9110,
 * 7.8 allows. Trailers are dropped.
 *
 * Threads: one at a time. Errors: HTTP_REFUSED, see above.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <http_parser.h>

#include "base/mem.h"

enum { HTTP_HEADERS_MOST = 100, HTTP_HEAD_MOST = 1 << 20 };

struct http_limits {
    size_t max_head_bytes, max_body_bytes; /* a head: at most HTTP_HEAD_MOST */
};

struct http_reader {
    http_parser parser;
    const struct http_limits *limits; /* borrowed */
    struct bytes target;              /* of the request line: "/v1/models?x=1" */
    struct bytes headers;             /* name NUL value NUL ... */
    struct bytes body;
    uint32_t n_headers;
    bool is_in_value;    /* the last bytes of headers are a value's */
    bool has_begun;      /* some bytes of a request are here */
    bool has_head;       /* its head is here */
    bool wants_continue; /* the client waits for "100 Continue" before it sends the body */
    bool keeps_alive;    /* another request may follow on this connection */
    int status;          /* of a refused request */
    char why[128];
};

enum http_step { HTTP_MORE, HTTP_WHOLE, HTTP_REFUSED };

/* Once in a process, before the first reader: http-parser's own bound, which is less, holds otherwise. */
void http_reader_setup(void);
void http_reader_init(struct http_reader *r, const struct http_limits *limits);
void http_reader_free(struct http_reader *r);
/*
 * Takes bytes until one request is whole. *used_out: how many were taken; the rest belongs to the next
 * request. HTTP_WHOLE: the request can be looked at until http_reader_next(). After HTTP_REFUSED nothing more
 * may be fed.
 */
enum http_step http_reader_feed(struct http_reader *r, const void *data, size_t len_bytes, size_t *used_out);
void http_reader_next(struct http_reader *r); /* forgets the request and its memory */

const char *http_reader_method(const struct http_reader *r); /* "GET" */
/* The value of the first header with that name, in any case; NULL: there is none. */
const char *http_reader_header(const struct http_reader *r, const char *name);
bool http_reader_is_old(const struct http_reader *r); /* HTTP/1.0, which has no chunks */
