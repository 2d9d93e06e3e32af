/* Reads traces with one JSON object a line: Mooncake, Qwen-Bailian, tandem's own. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/options.h"
#include "replay/trace_internal.h"

static enum td_status get_whole(struct trace_parser *p, const json_t *object, const char *name, int64_t least,
                                int64_t most, int64_t *out)
{
    const json_t *v = json_object_get(object, name);
    json_int_t n = json_integer_value(v);
    if (!json_is_integer(v) || n < least || n > most)
        return TRACE_FAIL(p, "line %" PRIu64 ": %s must be a whole number from %" PRId64 " to %" PRId64, p->line, name,
                          least, most);
    *out = n;
    return TD_OK;
}

static enum td_status get_blocks(struct trace_parser *p, const json_t *object, struct trace_request *r)
{
    const json_t *ids = json_object_get(object, "hash_ids");
    size_t n = json_array_size(ids);
    if (!ids && p->trace->format == TRACE_TANDEM)
        return TD_OK;
    if (!json_is_array(ids) || n > r->n_prompt)
        return TRACE_FAIL(p, "line %" PRIu64 ": hash_ids must be an array of at most input_length ids", p->line);
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(ids, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0)
            return TRACE_FAIL(p, "line %" PRIu64 ": hash_ids[%zu] must be a whole number from 0 on", p->line, i);
        trace_add_block(p->trace, &p->cap_blocks, (uint64_t)json_integer_value(id));
    }
    r->n_blocks = (uint32_t)n;
    return TD_OK;
}

static enum td_status get_time(struct trace_parser *p, const json_t *object, uint64_t *ns_out)
{
    const json_t *at = json_object_get(object, "timestamp");
    bool seconds = p->trace->format == TRACE_BAILIAN;
    double ms = json_number_value(at) * (seconds ? 1e3 : 1);
    if (!json_is_number(at) || !(ms >= 0 && ms <= TRACE_MAX_TIMESTAMP_MS))
        return TRACE_FAIL(p, "line %" PRIu64 ": timestamp must be %s from 0 on", p->line,
                          seconds ? "seconds" : "milliseconds");
    *ns_out = json_is_integer(at) ? (uint64_t)json_integer_value(at) * (seconds ? NS_PER_S : NS_PER_MS)
                                  : (uint64_t)llround(ms * NS_PER_MS);
    return TD_OK;
}

/* -------------------------------------------------- what only tandem's have */

/* *out is NULL if the member is missing. */
static enum td_status get_text(struct trace_parser *p, const json_t *object, const char *name, const char **out)
{
    const json_t *v = json_object_get(object, name);
    if (v && (!json_is_string(v) || !json_string_length(v) || json_string_length(v) > 64))
        return TRACE_FAIL(p, "line %" PRIu64 ": %s must be a text of 1 to 64 bytes", p->line, name);
    *out = json_string_value(v);
    return TD_OK;
}

static enum td_status get_optional(struct trace_parser *p, const json_t *object, const char *name, int64_t least,
                                   int64_t most, int64_t *out)
{
    return json_object_get(object, name) ? get_whole(p, object, name, least, most, out) : TD_OK;
}

/* A limit in ms. 0: none. Fractions are kept. */
static enum td_status get_limit(struct trace_parser *p, const json_t *object, const char *name, double *out)
{
    const json_t *v = json_object_get(object, name);
    double ms = json_number_value(v);
    if (v && (!json_is_number(v) || !(ms >= 0 && ms <= 1e9) || (ms > 0 && ms < OPTIONS_LEAST_MS)))
        return TRACE_FAIL(p, "line %" PRIu64 ": %s must be 0, or milliseconds from %g to 1e9", p->line, name,
                          OPTIONS_LEAST_MS);
    *out = ms;
    return TD_OK;
}

static enum td_status get_names(struct trace_parser *p, const json_t *object, struct trace_request *r)
{
    const char *tenant, *session, *id, *follows;
    enum td_status s = get_text(p, object, "tenant", &tenant);
    if (!s)
        s = get_text(p, object, "session", &session);
    if (!s)
        s = get_text(p, object, "id", &id);
    if (!s)
        s = get_text(p, object, "follows", &follows);
    if (s)
        return s;
    r->tenant = trace_tenant(p->trace, p->tenants, tenant ? tenant : "");
    if (session && !json_object_get(p->sessions, session))
        json_object_set_new(p->sessions, session, json_integer((json_int_t)json_object_size(p->sessions) + 1));
    if (session)
        r->session = (uint64_t)json_integer_value(json_object_get(p->sessions, session));
    if (follows && !json_object_get(p->ids, follows))
        return TRACE_FAIL(p, "line %" PRIu64 ": follows must be the id of a line before it", p->line);
    if (follows)
        r->follows = 1 + (uint64_t)json_integer_value(json_object_get(p->ids, follows));
    if (id && json_object_get(p->ids, id))
        return TRACE_FAIL(p, "line %" PRIu64 ": id stands in a line before it too", p->line);
    if (id)
        json_object_set_new(p->ids, id, json_integer((json_int_t)p->trace->n_requests));
    return TD_OK;
}

/* Refuses unknown members, so that a misspelt one is not taken for missing. */
static enum td_status check_members(struct trace_parser *p, const json_t *object)
{
    static const char *const NAMES[] = {"timestamp", "input_length", "output_length", "hash_ids", "tenant",
                                        "session",   "id",           "follows",       "priority", "ttft_ms",
                                        "tpot_ms",   "delay_ms"};
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)object, key, v)
    {
        size_t i = 0, n = sizeof(NAMES) / sizeof(NAMES[0]);
        while (i < n && strcmp(NAMES[i], key))
            i++;
        if (i == n)
            return TRACE_FAIL(p, "line %" PRIu64 ": %.100s: no such member", p->line, key);
    }
    return TD_OK;
}

static enum td_status get_more(struct trace_parser *p, const json_t *object, struct trace_request *r)
{
    const int64_t most_ms = 1000000000;
    int64_t priority = 0, delay = 0;
    enum td_status s = check_members(p, object);
    if (!s)
        s = get_names(p, object, r);
    if (!s)
        s = get_optional(p, object, "priority", -10, 10, &priority);
    if (!s)
        s = get_limit(p, object, "ttft_ms", &r->ttft_ms);
    if (!s)
        s = get_limit(p, object, "tpot_ms", &r->tpot_ms);
    if (!s)
        s = get_optional(p, object, "delay_ms", 0, most_ms, &delay);
    r->priority = (int32_t)priority;
    r->delay_ms = (uint32_t)delay;
    return s;
}

/* The turns of a chat are a session, which is that of the parent chat if the trace has it. */
static void get_chat(struct trace_parser *p, const json_t *object, struct trace_request *r)
{
    char chat[32], parent[32];
    const char *type = json_string_value(json_object_get(object, "type"));
    snprintf(chat, sizeof(chat), "%" JSON_INTEGER_FORMAT, json_integer_value(json_object_get(object, "chat_id")));
    snprintf(parent, sizeof(parent), "%" JSON_INTEGER_FORMAT,
             json_integer_value(json_object_get(object, "parent_chat_id")));
    const json_t *session = json_object_get(p->sessions, parent);
    r->session = session ? (uint64_t)json_integer_value(session) : p->trace->n_requests + 1;
    json_object_set_new(p->sessions, chat, json_integer((json_int_t)r->session));
    r->tenant = trace_tenant(p->trace, p->tenants, type && strlen(type) <= 64 ? type : "");
}

/* ------------------------------------------------------------------- lines */

static enum td_status get_request(struct trace_parser *p, const json_t *object)
{
    struct trace_request r = {0};
    int64_t n_prompt = 0, n_output = 0;
    enum td_status s = get_time(p, object, &r.arrival_ns);
    if (!s)
        s = get_whole(p, object, "input_length", 1, TRACE_MAX_TOKENS, &n_prompt);
    if (!s)
        s = get_whole(p, object, "output_length", 0, TRACE_MAX_TOKENS, &n_output);
    if (!s && p->trace->format == TRACE_TANDEM)
        s = get_more(p, object, &r);
    if (s)
        return s;
    if (p->trace->format == TRACE_BAILIAN)
        get_chat(p, object, &r);
    r.n_prompt = (uint32_t)n_prompt;
    r.n_output = (uint32_t)n_output;
    return get_blocks(p, object, trace_add_request(p->trace, &p->cap_requests, &r));
}

static enum td_status get_header(struct trace_parser *p, const json_t *object)
{
    int64_t version, block_tokens = 512;
    enum td_status s = get_whole(p, object, "tandem_trace", 1, 1, &version);
    if (!s)
        s = get_optional(p, object, "block_tokens", 1, 1 << 20, &block_tokens);
    p->trace->format = TRACE_TANDEM;
    p->trace->block_tokens = (uint32_t)block_tokens;
    return s;
}

static enum td_status get_object(struct trace_parser *p, const json_t *object)
{
    struct trace *t = p->trace;
    if (!json_is_object(object))
        return TRACE_FAIL(p, "line %" PRIu64 ": no JSON object", p->line);
    if (!t->n_requests && t->format != TRACE_TANDEM) {
        if (json_object_get(object, "tandem_trace"))
            return get_header(p, object);
        if (json_object_get(object, "chat_id")) {
            t->format = TRACE_BAILIAN;
            t->block_tokens = 16;
        }
    }
    return get_request(p, object);
}

enum td_status trace_json_line(struct trace_parser *p, const char *text, size_t len)
{
    json_error_t e;
    json_t *object = json_loadb(text, len, JSON_REJECT_DUPLICATES, &e);
    if (!object)
        return TRACE_FAIL(p, "line %" PRIu64 ": %s at byte %d", p->line, e.text, e.position);
    enum td_status s = get_object(p, object);
    json_decref(object);
    return s;
}
