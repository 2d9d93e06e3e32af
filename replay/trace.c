#include "replay/trace.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>
#include <zstd.h>

#include "base/clock.h"
#include "replay/trace_internal.h"

static const char *const NAMES[TRACE_FORMATS] = {"mooncake", "bailian", "tandem", "azure", "burstgpt"};

const char *trace_format_name(enum trace_format format)
{
    return NAMES[format];
}

/* ---------------------------------------------------------------- building */

struct trace *trace_open(void)
{
    struct trace *t = mem_zalloc(sizeof(*t));
    t->block_tokens = 512;
    trace_tenant(t, NULL, "");
    return t;
}

struct trace_request *trace_add_request(struct trace *t, uint64_t *cap, const struct trace_request *r)
{
    if (t->n_requests == *cap) {
        *cap = *cap ? 2 * *cap : 256;
        t->requests = mem_resize(t->requests, *cap, sizeof(*t->requests));
    }
    struct trace_request *to = &t->requests[t->n_requests++];
    *to = *r;
    to->first_block = t->n_blocks;
    return to;
}

void trace_add_block(struct trace *t, uint64_t *cap, uint64_t id)
{
    if (t->n_blocks == *cap) {
        *cap = *cap ? 2 * *cap : 1024;
        t->blocks = mem_resize(t->blocks, *cap, sizeof(*t->blocks));
    }
    t->blocks[t->n_blocks++] = id;
}

uint32_t trace_tenant(struct trace *t, json_t *by_name, const char *name)
{
    const json_t *known = *name ? json_object_get(by_name, name) : NULL;
    if (known)
        return (uint32_t)json_integer_value(known);
    if (!*name && t->n_tenants)
        return 0;
    t->tenants = mem_resize(t->tenants, t->n_tenants + 1, sizeof(*t->tenants));
    t->tenants[t->n_tenants] = mem_strdup(name);
    if (by_name)
        json_object_set_new_nocheck(by_name, name, json_integer(t->n_tenants));
    return t->n_tenants++;
}

/* Merge sort by arrival. It must be stable, because a request does not contain its position in the list. */
static void sort_by_arrival(const struct trace_request *r, uint64_t *order, uint64_t *room, uint64_t n)
{
    if (n < 2)
        return;
    uint64_t half = n / 2;
    sort_by_arrival(r, order, room, half);
    sort_by_arrival(r, order + half, room, n - half);
    memcpy(room, order, half * sizeof(*order));
    for (uint64_t a = 0, b = half, to = 0; a < half; to++)
        order[to] = b < n && r[order[b]].arrival_ns < r[room[a]].arrival_ns ? order[b++] : room[a++];
}

void trace_sort(struct trace *t)
{
    uint64_t n = t->n_requests, *order = mem_array(2 * n, sizeof(*order)), *rank = order + n;
    struct trace_request *old = t->requests;
    for (uint64_t i = 0; i < n; i++)
        order[i] = i;
    sort_by_arrival(old, order, rank, n);
    t->requests = mem_array(n, sizeof(*t->requests));
    for (uint64_t i = 0; i < n; i++) {
        t->requests[i] = old[order[i]];
        rank[order[i]] = i;
    }
    uint64_t first_ns = n ? t->requests[0].arrival_ns : 0;
    for (uint64_t i = 0; i < n; i++) {
        struct trace_request *r = &t->requests[i];
        r->arrival_ns -= first_ns;
        if (r->follows)
            r->follows = 1 + rank[r->follows - 1];
    }
    free(old);
    free(order);
}

/* ----------------------------------------------------------------- parsing */

static bool is_blank(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (text[i] != ' ' && text[i] != '\t')
            return false;
    return true;
}

static enum td_status parse_lines(struct trace_parser *p, const char *data, size_t size)
{
    bool is_csv = size && (*data == 'T' || *data == 't'), is_first = true;
    for (size_t at = 0; at < size;) {
        const char *text = data + at, *newline = memchr(text, '\n', size - at);
        size_t len = newline ? (size_t)(newline - text) : size - at;
        at += len + 1;
        p->line++;
        if (len && text[len - 1] == '\r')
            len--;
        if (is_blank(text, len))
            continue;
        enum td_status s = !is_csv    ? trace_json_line(p, text, len)
                           : is_first ? trace_csv_header(p, text, len)
                                      : trace_csv_line(p, text, len);
        if (s)
            return s;
        is_first = false;
    }
    return p->trace->n_requests ? TD_OK : TRACE_FAIL(p, "there is no request in it");
}

static enum td_status check_order(struct trace_parser *p)
{
    const struct trace *t = p->trace;
    if ((double)t->requests[t->n_requests - 1].arrival_ns > TRACE_MAX_TIMESTAMP_MS * NS_PER_MS)
        return TRACE_FAIL(p, "the first and the last arrival are more than 30 years apart");
    for (uint64_t i = 0; i < t->n_requests; i++)
        if (t->requests[i].follows > i)
            return TRACE_FAIL(p, "request %" PRIu64 " by arrival follows one that arrives later", i);
    return TD_OK;
}

enum td_status trace_parse(const char *data, size_t size, struct trace **out, struct td_error *error_out)
{
    struct trace_parser p = {.trace = trace_open(),
                             .ids = json_object(),
                             .sessions = json_object(),
                             .tenants = json_object(),
                             .error_out = error_out};
    enum td_status s = parse_lines(&p, data, size);
    if (!s) {
        trace_sort(p.trace);
        s = check_order(&p);
    }
    json_decref(p.ids);
    json_decref(p.sessions);
    json_decref(p.tenants);
    if (s)
        trace_close(p.trace);
    else
        *out = p.trace;
    return s;
}

/* ------------------------------------------------------------------- files */

enum { PIECE_BYTES = 1 << 18 };

/* Adds a piece. False: more than max_bytes. */
static bool add_piece(struct bytes *out, const void *piece, size_t n, size_t max_bytes)
{
    if (n > max_bytes - out->len)
        return false;
    bytes_append(out, piece, n);
    return true;
}

/* Unpacks one or several gzip members, one after the other. */
static enum td_status unpack_gzip(const char *data, size_t size, size_t max_bytes, struct bytes *out,
                                  struct td_error *e)
{
    z_stream z = {.next_in = (Bytef *)(uintptr_t)data};
    unsigned char *piece = mem_array(PIECE_BYTES, 1);
    size_t left = size;
    enum td_status s = TD_OK;
    int code = inflateInit2(&z, 16 + MAX_WBITS);
    while (!s && code == Z_OK && (left || z.avail_in)) {
        if (!z.avail_in) {
            z.avail_in = left < PIECE_BYTES ? (uInt)left : PIECE_BYTES;
            left -= z.avail_in;
        }
        z.next_out = piece;
        z.avail_out = PIECE_BYTES;
        code = inflate(&z, Z_NO_FLUSH);
        if (!add_piece(out, piece, PIECE_BYTES - z.avail_out, max_bytes))
            s = td_fail(e, TD_ERR_NO_SPACE, "unpacked it is larger than %zu bytes", max_bytes);
        if (code == Z_STREAM_END && (left || z.avail_in))
            code = inflateReset(&z);
    }
    inflateEnd(&z);
    free(piece);
    return s ? s : code == Z_STREAM_END ? TD_OK : td_fail(e, TD_ERR_INVALID, "gzip: damaged, or cut short");
}

static enum td_status unpack_zstd(const char *data, size_t size, size_t max_bytes, struct bytes *out,
                                  struct td_error *e)
{
    ZSTD_DStream *z = ZSTD_createDStream();
    ZSTD_inBuffer in = {data, size, 0};
    char *piece = mem_array(PIECE_BYTES, 1);
    enum td_status s = TD_OK;
    size_t code = 1;
    for (bool full = false; !s && (in.pos < in.size || full);) {
        ZSTD_outBuffer to = {piece, PIECE_BYTES, 0};
        code = ZSTD_decompressStream(z, &to, &in);
        full = to.pos == to.size;
        if (ZSTD_isError(code))
            s = td_fail(e, TD_ERR_INVALID, "zstd: %s", ZSTD_getErrorName(code));
        else if (!add_piece(out, piece, to.pos, max_bytes))
            s = td_fail(e, TD_ERR_NO_SPACE, "unpacked it is larger than %zu bytes", max_bytes);
    }
    ZSTD_freeDStream(z);
    free(piece);
    return s ? s : code ? td_fail(e, TD_ERR_INVALID, "zstd: cut short") : TD_OK;
}

enum td_status trace_unpack(const char *data, size_t size, size_t max_bytes, char **out, size_t *size_out,
                            struct td_error *error_out)
{
    struct bytes b = {0};
    enum td_status s = TD_OK;
    if (size >= 2 && !memcmp(data, "\x1f\x8b", 2))
        s = unpack_gzip(data, size, max_bytes, &b, error_out);
    else if (size >= 4 && !memcmp(data, "\x28\xb5\x2f\xfd", 4))
        s = unpack_zstd(data, size, max_bytes, &b, error_out);
    else
        bytes_append(&b, data, size);
    if (s) {
        bytes_free(&b);
        return s;
    }
    bytes_append(&b, "", 0); /* makes data non-NULL for an empty file, too */
    *out = b.data;
    *size_out = b.len;
    return TD_OK;
}

enum td_status trace_read(const char *path, size_t max_bytes, struct trace **out, struct td_error *error_out)
{
    char *packed, *data;
    size_t len;
    enum td_status s = file_read(path, max_bytes, &packed, &len, error_out);
    if (s)
        return s;
    struct td_error e = {{0}};
    s = trace_unpack(packed, len, max_bytes, &data, &len, &e);
    free(packed);
    if (!s) {
        s = trace_parse(data, len, out, &e);
        free(data);
    }
    return s ? td_fail(error_out, s, "%s: %.180s", path, e.text) : TD_OK;
}

void trace_close(struct trace *t)
{
    if (!t)
        return;
    for (uint32_t i = 0; i < t->n_tenants; i++)
        free(t->tenants[i]);
    free(t->tenants);
    free(t->requests);
    free(t->blocks);
    free(t);
}
