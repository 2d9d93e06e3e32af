#include "replay/trace.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"

static const uint32_t MAX_TOKENS = 1u << 30; /* of a prompt or an answer */
static const double MAX_TIMESTAMP_MS = 1e12; /* 30 years: below 2^63 ns */
static const char AZURE_HEADER[] = "TIMESTAMP,ContextTokens,GeneratedTokens";

struct parser {
    struct trace *trace;
    uint64_t cap_requests, cap_blocks;
    uint64_t line; /* from 1 */
    struct td_error *error_out;
};

#define FAIL(p, ...) td_fail((p)->error_out, TD_ERR_INVALID, __VA_ARGS__)

/* The request is added at once, at its time in the file's own terms; blocks follow by add_block. */
static struct trace_request *add_request(struct parser *p, uint64_t arrival_ns, uint32_t n_prompt, uint32_t n_output)
{
    struct trace *t = p->trace;
    if (t->n_requests == p->cap_requests) {
        p->cap_requests = p->cap_requests ? 2 * p->cap_requests : 256;
        t->requests = mem_resize(t->requests, p->cap_requests, sizeof(*t->requests));
    }
    struct trace_request *r = &t->requests[t->n_requests++];
    *r = (struct trace_request){
        .arrival_ns = arrival_ns, .n_prompt = n_prompt, .n_output = n_output, .first_block = t->n_blocks};
    return r;
}

static void add_block(struct parser *p, uint64_t id)
{
    struct trace *t = p->trace;
    if (t->n_blocks == p->cap_blocks) {
        p->cap_blocks = p->cap_blocks ? 2 * p->cap_blocks : 1024;
        t->blocks = mem_resize(t->blocks, p->cap_blocks, sizeof(*t->blocks));
    }
    t->blocks[t->n_blocks++] = id;
}

/* ---------------------------------------------------------------- Mooncake */

static enum td_status get_tokens(struct parser *p, const json_t *object, const char *name, uint32_t least,
                                 uint32_t *out)
{
    const json_t *v = json_object_get(object, name);
    json_int_t n = json_integer_value(v);
    if (!json_is_integer(v) || n < least || n > MAX_TOKENS)
        return FAIL(p, "line %" PRIu64 ": %s must be a whole number from %u to %u", p->line, name, least, MAX_TOKENS);
    *out = (uint32_t)n;
    return TD_OK;
}

static enum td_status get_blocks(struct parser *p, const json_t *object, struct trace_request *r)
{
    const json_t *ids = json_object_get(object, "hash_ids");
    size_t n = json_array_size(ids);
    if (!json_is_array(ids) || n > r->n_prompt)
        return FAIL(p, "line %" PRIu64 ": hash_ids must be an array of at most input_length ids", p->line);
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(ids, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0)
            return FAIL(p, "line %" PRIu64 ": hash_ids[%zu] must be a whole number from 0 on", p->line, i);
        add_block(p, (uint64_t)json_integer_value(id));
    }
    r->n_blocks = (uint32_t)n;
    return TD_OK;
}

static enum td_status get_request(struct parser *p, const json_t *object)
{
    uint32_t n_prompt, n_output;
    const json_t *at = json_object_get(object, "timestamp");
    double ms = json_number_value(at);
    if (!json_is_number(at) || !(ms >= 0 && ms <= MAX_TIMESTAMP_MS))
        return FAIL(p, "line %" PRIu64 ": timestamp must be milliseconds from 0 on", p->line);
    enum td_status s = get_tokens(p, object, "input_length", 1, &n_prompt);
    if (!s)
        s = get_tokens(p, object, "output_length", 0, &n_output);
    if (s)
        return s;
    uint64_t ns =
        json_is_integer(at) ? (uint64_t)json_integer_value(at) * NS_PER_MS : (uint64_t)llround(ms * NS_PER_MS);
    return get_blocks(p, object, add_request(p, ns, n_prompt, n_output));
}

static enum td_status mooncake_line(struct parser *p, const char *text, size_t len)
{
    json_error_t e;
    json_t *object = json_loadb(text, len, JSON_REJECT_DUPLICATES, &e);
    if (!object)
        return FAIL(p, "line %" PRIu64 ": %s at byte %d", p->line, e.text, e.position);
    enum td_status s =
        json_is_object(object) ? get_request(p, object) : FAIL(p, "line %" PRIu64 ": no JSON object", p->line);
    json_decref(object);
    return s;
}

/* ------------------------------------------------------------------- Azure */

/* Reads 1 to max_digits digits; *at moves behind them. */
static bool get_number(const char **at, const char *end, int max_digits, uint64_t *out)
{
    const char *p = *at;
    uint64_t n = 0;
    while (p < end && p - *at < max_digits && *p >= '0' && *p <= '9')
        n = 10 * n + (uint64_t)(*p++ - '0');
    bool any = p > *at;
    *at = p;
    *out = n;
    return any;
}

static bool get_char(const char **at, const char *end, char c)
{
    return *at < end && *(*at)++ == c;
}

/* Days since 1970-01-01 of a day of the Gregorian calendar; years from March on, so that the leap day is the last. */
static uint64_t days_of(uint64_t year, uint64_t month, uint64_t day)
{
    uint64_t y = month > 2 ? year : year - 1, m = (month + 9) % 12;
    return 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1 - 719468;
}

/* "2023-11-16 18:15:46.6805900", with 0 to 9 digits of a fraction. */
static bool get_time(const char **at, const char *end, uint64_t *ns_out)
{
    uint64_t year, month, day, hour, minute, second, fraction = 0;
    bool ok = get_number(at, end, 4, &year) && get_char(at, end, '-') && get_number(at, end, 2, &month) &&
              get_char(at, end, '-') && get_number(at, end, 2, &day) && get_char(at, end, ' ') &&
              get_number(at, end, 2, &hour) && get_char(at, end, ':') && get_number(at, end, 2, &minute) &&
              get_char(at, end, ':') && get_number(at, end, 2, &second);
    if (!ok || year < 1970 || year > 2200 || month < 1 || month > 12 || day < 1 || day > 31 || hour > 23 ||
        minute > 59 || second > 60)
        return false;
    if (*at < end && **at == '.') {
        const char *first = ++*at;
        if (!get_number(at, end, 9, &fraction))
            return false;
        for (long n = *at - first; n < 9; n++)
            fraction *= 10;
    }
    *ns_out = (((days_of(year, month, day) * 24 + hour) * 60 + minute) * 60 + second) * NS_PER_S + fraction;
    return true;
}

static enum td_status azure_line(struct parser *p, const char *text, size_t len)
{
    const char *at = text, *end = text + len;
    uint64_t ns, n_prompt, n_output;
    if (p->line == 1)
        return TD_OK; /* the header, by which the format was told */
    if (!get_time(&at, end, &ns) || !get_char(&at, end, ','))
        return FAIL(p, "line %" PRIu64 ": TIMESTAMP must be like 2023-11-16 18:15:46.6805900", p->line);
    if (!get_number(&at, end, 10, &n_prompt) || n_prompt < 1 || n_prompt > MAX_TOKENS || !get_char(&at, end, ','))
        return FAIL(p, "line %" PRIu64 ": ContextTokens must be from 1 to %u", p->line, MAX_TOKENS);
    if (!get_number(&at, end, 10, &n_output) || n_output > MAX_TOKENS || at != end)
        return FAIL(p, "line %" PRIu64 ": GeneratedTokens must be up to %u, and end the line", p->line, MAX_TOKENS);
    add_request(p, ns, (uint32_t)n_prompt, (uint32_t)n_output);
    return TD_OK;
}

/* ------------------------------------------------------------------- files */

static bool is_blank(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (text[i] != ' ' && text[i] != '\t')
            return false;
    return true;
}

static enum td_status parse_lines(struct parser *p, const char *data, size_t size)
{
    size_t header = sizeof(AZURE_HEADER) - 1;
    bool is_azure = size >= header && !memcmp(data, AZURE_HEADER, header);
    for (size_t at = 0; at < size;) {
        const char *text = data + at, *newline = memchr(text, '\n', size - at);
        size_t len = newline ? (size_t)(newline - text) : size - at;
        at += len + 1;
        p->line++;
        if (len && text[len - 1] == '\r')
            len--;
        if (is_blank(text, len))
            continue;
        enum td_status s = is_azure ? azure_line(p, text, len) : mooncake_line(p, text, len);
        if (s)
            return s;
    }
    return p->trace->n_requests ? TD_OK : FAIL(p, "there is no request in it");
}

/* By arrival; in the order of the file where equal, which first_block tells only with blocks, hence a merge sort. */
static void sort_by_arrival(struct trace_request *r, struct trace_request *room, uint64_t n)
{
    if (n < 2)
        return;
    uint64_t half = n / 2;
    sort_by_arrival(r, room, half);
    sort_by_arrival(r + half, room, n - half);
    memcpy(room, r, half * sizeof(*r));
    for (uint64_t a = 0, b = half, to = 0; a < half; to++)
        r[to] = b < n && r[b].arrival_ns < room[a].arrival_ns ? r[b++] : room[a++];
}

static void settle_arrivals(struct trace *t)
{
    struct trace_request *room = mem_array(t->n_requests / 2 + 1, sizeof(*room));
    sort_by_arrival(t->requests, room, t->n_requests);
    free(room);
    uint64_t first = t->requests[0].arrival_ns;
    for (uint64_t i = 0; i < t->n_requests; i++)
        t->requests[i].arrival_ns -= first;
}

enum td_status trace_parse(const char *data, size_t size, struct trace **out, struct td_error *error_out)
{
    struct parser p = {.trace = mem_zalloc(sizeof(*p.trace)), .error_out = error_out};
    enum td_status s = parse_lines(&p, data, size);
    if (s) {
        trace_close(p.trace);
        return s;
    }
    settle_arrivals(p.trace);
    *out = p.trace;
    return TD_OK;
}

enum td_status trace_read(const char *path, size_t max_bytes, struct trace **out, struct td_error *error_out)
{
    char *data;
    size_t len;
    enum td_status s = file_read(path, max_bytes, &data, &len, error_out);
    if (s)
        return s;
    struct td_error e = {{0}};
    s = trace_parse(data, len, out, &e);
    free(data);
    return s ? td_fail(error_out, s, "%s: %.180s", path, e.text) : TD_OK;
}

void trace_close(struct trace *t)
{
    if (!t)
        return;
    free(t->requests);
    free(t->blocks);
    free(t);
}
