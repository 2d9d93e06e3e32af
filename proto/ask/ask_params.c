#include "proto/ask/ask_params.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/options.h"
#include "proto/ask/ask_bounds.h"
#include "proto/ask/ask_message_parts.h"

#define AT(place)            .at = offsetof(struct ask_message, place)
#define CASE(place, value)   .case_at = offsetof(struct ask_message, place), .present = value
#define STRUCTURED(NAME)     CASE(structured.kind_case, TANDEM__V1__STRUCTURED__KIND_##NAME)
#define SAMPLING(name, NAME) CASE(sampling.has_##name##_case, TANDEM__V1__SAMPLING__HAS_##NAME##_##NAME)

const struct ask_param ASK_PARAMS[ASK_N_PARAMS] = {
    {"id", ASK_LABEL, .help = "label that comes back with the answer", AT(m.request_id)},
    /* One prompt. */
    {"prompt", ASK_TEXT, .group = ASK_PROMPTS, .help = "the prompt's text", AT(m.text)},
    {"prompt_ids", ASK_IDS, .group = ASK_PROMPTS, .help = "the prompt's token ids", AT(tokens.n_ids)},
    {"messages", ASK_MESSAGES, .group = ASK_PROMPTS, .help = "a chat: {role, content, ...}", AT(chat)},
    {"add_special_tokens", ASK_BOOL, .needs = "prompt", .is_switch = true, .is_on = true,
     .help = "text prompt: adds the model's first token", AT(m.add_special_tokens),
     CASE(m.has_add_special_tokens_case, TANDEM__V1__GENERATE_REQUEST__HAS_ADD_SPECIAL_TOKENS_ADD_SPECIAL_TOKENS)},
    {"tools", ASK_LIST, .needs = "messages", .holder = "JSON", .help = "chat: list of tools for the template",
     AT(chat.tools)},
    {"must_call", ASK_BOOL, .needs = "tools", .is_switch = true,
     .help = "chat: the answer calls functions of the tools", AT(chat.must_call)},
    {"function", ASK_TEXT, .needs = "tools", .holder = "NAME", .help = "chat: the answer calls this function",
     AT(chat.function)},
    {"one_call", ASK_BOOL, .needs = "tools", .is_switch = true, .help = "chat: with these, only once",
     AT(chat.one_call)},
    {"variables", ASK_OBJECT, .needs = "messages", .holder = "JSON",
     .help = "chat: further variables for the template, as {\"enable_thinking\": false}", AT(chat.variables)},
    {"add_generation_prompt", ASK_BOOL, .needs = "messages", .is_switch = true, .is_on = true,
     .help = "chat: the template ends with the beginning of the answer", AT(generation_prompt)},
    {"truncate_prompt", ASK_WHOLE, 0, UINT32_MAX, .holder = "N",
     .help = "keeps only the last N tokens of the prompt, and leaves room for max_tokens; 0: all",
     AT(m.truncate_prompt)},
    {"model", ASK_TEXT, .help = "the model's name", AT(m.model)},
    {"lora", ASK_TEXT, 0, ASK_MAX_LABEL_BYTES, .holder = "NAME", .help = "the adapter to answer with", AT(m.lora)},
    /* Sampling. */
    {"greedy", ASK_BOOL, .group = ASK_TEMPERATURES, .is_switch = true,
     .help = "takes the most probable token each time", AT(greedy)},
    {"temperature", ASK_NUMBER, 0, ASK_MAX_TEMPERATURE, ASK_TEMPERATURES, .holder = "X",
     .help = "temperature; 0: greedy; default: the model's own", AT(sampling.temperature),
     SAMPLING(temperature, TEMPERATURE)},
    {"top_k", ASK_WHOLE, 0, ASK_MAX_TOP_K, .holder = "N",
     .help = "number of most probable tokens to draw from; 0: all; default: the model's own", AT(sampling.top_k),
     SAMPLING(top_k, TOP_K)},
    {"top_p", ASK_NUMBER, (double)ASK_LEAST_TOP_P, 1, .holder = "X",
     .help = "total probability of the most probable tokens to draw from; default: the model's own", AT(sampling.top_p),
     SAMPLING(top_p, TOP_P)},
    {"min_p", ASK_NUMBER, 0, 1, .holder = "X",
     .help = "least probability, as a share of the most probable token's; default: the model's own", AT(sampling.min_p),
     SAMPLING(min_p, MIN_P)},
    {"typical_p", ASK_NUMBER, 0, 1, .holder = "X",
     .help = "total probability of the most typical tokens to draw from; 0: all; default: the model's own",
     AT(sampling.typical_p), SAMPLING(typical_p, TYPICAL_P)},
    {"presence_penalty", ASK_NUMBER, -ASK_MAX_PENALTY, ASK_MAX_PENALTY, .holder = "X",
     .help = "penalty for tokens that were generated", AT(sampling.presence_penalty)},
    {"frequency_penalty", ASK_NUMBER, -ASK_MAX_PENALTY, ASK_MAX_PENALTY, .holder = "X",
     .help = "penalty for each time that a token was generated", AT(sampling.frequency_penalty)},
    {"repetition_penalty", ASK_NUMBER, (double)ASK_LEAST_REPETITION, ASK_MAX_REPETITION, .holder = "X",
     .help = "factor against repetition; 1: none; default: the model's own", AT(sampling.repetition_penalty),
     SAMPLING(repetition_penalty, REPETITION_PENALTY)},
    {"logit_bias", ASK_BIASES, -ASK_MAX_BIAS, ASK_MAX_BIAS, .holder = "JSON",
     .help = "numbers added to logits: {\"ID\": BIAS, ...}", AT(sampling.n_logit_bias)},
    {"allowed_ids", ASK_IDS, 0, ASK_MAX_ALLOWED, .holder = "ID,...", .help = "only these tokens are drawn",
     AT(sampling.n_allowed_ids)},
    {"bad_words", ASK_TEXTS, 0, ASK_MAX_BAD_WORDS, .holder = "TEXT", .help = "text that the answer must not have",
     AT(sampling.n_bad_words)},
    {"seed", ASK_SEED, .holder = "N", .help = "seed of the draws; default: a random one, which is shown",
     AT(sampling.seed), SAMPLING(seed, SEED)},
    {"n", ASK_WHOLE, 1, ASK_MAX_CHOICES, .holder = "N", .help = "number of answers to the prompt, in JSON",
     AT(sampling.n)},
    /* Where it ends. */
    {"max_tokens", ASK_WHOLE, 0, UINT32_MAX, .holder = "N",
     .help = "most tokens of the answer; default: the model's own, or as many as fit; 0: only with prompt_logprobs",
     AT(stopping.max_tokens), CASE(stopping.has_max_tokens_case, TANDEM__V1__STOPPING__HAS_MAX_TOKENS_MAX_TOKENS)},
    {"min_tokens", ASK_WHOLE, 0, UINT32_MAX, .holder = "N", .help = "least tokens of the answer",
     AT(stopping.min_tokens)},
    {"stop", ASK_TEXTS, 0, ASK_MAX_STOP_STRINGS, .holder = "TEXT", .help = "text that ends the answer and is not shown",
     AT(stopping.n_stop)},
    {"stop_ids", ASK_IDS, 0, ASK_MAX_STOP_IDS, .holder = "ID,...", .help = "tokens that end the answer",
     AT(stopping.n_stop_ids)},
    {"include_stop", ASK_BOOL, .is_switch = true, .help = "shows the text that ended the answer",
     AT(stopping.include_stop)},
    {"ignore_eos", ASK_BOOL, .is_switch = true, .help = "goes on after the end token", AT(stopping.ignore_eos)},
    /* What it must be. */
    {"json_schema", ASK_OBJECT, .group = ASK_STRUCTURES, .holder = "JSON", .help = "the answer is JSON of this schema",
     AT(structured.json_schema), STRUCTURED(JSON_SCHEMA)},
    {"json_object", ASK_BOOL, .group = ASK_STRUCTURES, .is_switch = true, .help = "the answer is a JSON object",
     AT(structured.json_object), STRUCTURED(JSON_OBJECT)},
    {"regex", ASK_TEXT, .group = ASK_STRUCTURES, .holder = "TEXT", .help = "the answer matches this regular expression",
     AT(structured.regex), STRUCTURED(REGEX)},
    {"grammar", ASK_TEXT, .group = ASK_STRUCTURES, .holder = "TEXT",
     .help = "the answer follows these rules, as GBNF or Lark have them", AT(structured.ebnf), STRUCTURED(EBNF)},
    {"choice", ASK_LIST, .group = ASK_STRUCTURES, .holder = "JSON", .help = "the answer is one of these texts",
     AT(structured.choice), STRUCTURED(CHOICE)},
    /* What is told. */
    {"logprobs", ASK_BOOL, .is_switch = true, .help = "includes log-probabilities, in JSON", AT(m.want_logprobs)},
    {"top_logprobs", ASK_WHOLE, 0, ASK_MAX_TOP_LOGPROBS, .holder = "N",
     .help = "includes the N most probable tokens beside each token, in JSON", AT(m.top_logprobs)},
    {"prompt_logprobs", ASK_BOOL, .is_switch = true,
     .help = "includes log-probabilities of the prompt's tokens, in JSON", AT(m.want_prompt_logprobs)},
    {"skip_special_tokens", ASK_BOOL, .is_switch = true, .is_on = true, .help = "leaves special tokens out of the text",
     AT(m.skip_special_tokens),
     CASE(m.has_skip_special_tokens_case, TANDEM__V1__GENERATE_REQUEST__HAS_SKIP_SPECIAL_TOKENS_SKIP_SPECIAL_TOKENS)},
    {"raw_answer", ASK_BOOL, .needs = "messages", .is_switch = true,
     .help = "chat: reasoning and calls of functions stay in the text, as the model says them", AT(m.raw_answer)},
    {"echo", ASK_BOOL, .is_switch = true, .help = "begins the text with the prompt", AT(m.echo)},
    /* How it is served. */
    {"ttft_ms", ASK_LIMIT_MS, 0, ASK_MAX_LIMIT_MS, .holder = "TIME",
     .help = "limit of the time to the first token; 0: none", AT(ttft_ms)},
    {"tpot_ms", ASK_LIMIT_MS, 0, ASK_MAX_LIMIT_MS, .holder = "TIME",
     .help = "limit of the time for each further token; 0: none", AT(tpot_ms)},
    {"deadline_ms", ASK_MS, 0, UINT32_MAX, .holder = "TIME", .help = "limit of the time for the whole answer; 0: none",
     AT(slo.deadline_ms)},
    {"priority", ASK_WHOLE, -ASK_MAX_PRIORITY, ASK_MAX_PRIORITY, .holder = "N", .help = "priority; higher goes first",
     AT(m.priority)},
    {"tenant", ASK_TEXT, 0, ASK_MAX_LABEL_BYTES, .holder = "NAME", .help = "tenant of the request", AT(m.tenant)},
    {"cache_salt", ASK_TEXT, 0, ASK_MAX_LABEL_BYTES, .holder = "TEXT",
     .help = "shares cached prefixes only with requests of the same salt", AT(m.cache_salt)},
    {"workflow_id", ASK_TEXT, 0, ASK_MAX_LABEL_BYTES, .holder = "TEXT", .help = "label for logs and tandem explain",
     AT(m.workflow_id)},
    {"workflow_deadline_ms", ASK_MS, 0, UINT32_MAX, .holder = "TIME",
     .help = "time limit for this and all further steps of a workflow; 0: none", AT(m.workflow_deadline_ms)},
    {"workflow_steps_left", ASK_WHOLE, 0, UINT32_MAX, .holder = "N",
     .help = "number of the workflow's steps after this one", AT(m.workflow_steps_left)},
    {"bypass_cache", ASK_BOOL, .is_switch = true, .help = "finds no cached prefix and leaves none", AT(m.bypass_cache)},
};

const struct ask_param *ask_param_find(const char *name)
{
    for (int i = 0; i < ASK_N_PARAMS; i++)
        if (!strcmp(ASK_PARAMS[i].name, name))
            return &ASK_PARAMS[i];
    return NULL;
}

const char *ask_param_rival(const json_t *request, const struct ask_param *p)
{
    for (const struct ask_param *q = ASK_PARAMS; q < ASK_PARAMS + ASK_N_PARAMS && p->group; q++) {
        const json_t *v = json_object_get(request, q->name);
        if (q != p && q->group == p->group && v && !json_is_false(v))
            return q->name;
    }
    return NULL;
}

/* ------------------------------------------------------------------ values */

static enum td_status check_whole(const struct ask_param *p, const char *name, const json_t *v, struct td_error *e)
{
    json_int_t n = json_integer_value(v);
    if (json_is_integer(v) && (double)n >= p->min && (double)n <= p->max)
        return TD_OK;
    return td_fail(e, TD_ERR_INVALID, "%s: must be a whole number from %.0f to %.0f", name, p->min, p->max);
}

static enum td_status check_number(const struct ask_param *p, const char *name, const json_t *v, struct td_error *e)
{
    double x = json_number_value(v);
    if (json_is_number(v) && x >= p->min && x <= p->max)
        return TD_OK;
    return td_fail(e, TD_ERR_INVALID, "%s: must be a number from %g to %g", name, p->min, p->max);
}

static enum td_status check_limit(const struct ask_param *p, const char *name, const json_t *v, struct td_error *e)
{
    double ms = json_number_value(v);
    if (json_is_number(v) && ms >= 0 && ms <= p->max && (ms <= 0 || ms >= OPTIONS_LEAST_MS))
        return TD_OK;
    return td_fail(e, TD_ERR_INVALID, "%s: must be 0, or milliseconds from %g to %g", name, OPTIONS_LEAST_MS, p->max);
}

/* Parses digits only, no sign and no blank; false also if the number is above max. */
static bool parse_digits(const char *text, uint64_t max, uint64_t *out)
{
    size_t n = strspn(text, "0123456789");
    errno = 0;
    *out = strtoull(text, NULL, 10);
    return n && !text[n] && !errno && *out <= max;
}

static enum td_status check_seed(const char *name, const json_t *v, struct td_error *e)
{
    uint64_t seed;
    bool good = json_is_integer(v) ? json_integer_value(v) >= 0
                                   : json_is_string(v) && parse_digits(json_string_value(v), UINT64_MAX, &seed);
    return good ? TD_OK
                : td_fail(e, TD_ERR_INVALID, "%s: must be a whole number from 0 to 2^64 - 1, over 2^63 - 1 in quotes",
                          name);
}

static enum td_status check_text(const struct ask_param *p, const char *name, const json_t *v, struct td_error *e)
{
    if (!json_is_string(v))
        return td_fail(e, TD_ERR_INVALID, "%s: must be a text", name);
    if (p->max > 0 && (double)json_string_length(v) > p->max)
        return td_fail(e, TD_ERR_INVALID, "%s: %zu bytes, at most %.0f", name, json_string_length(v), p->max);
    return TD_OK;
}

static bool is_stop(const json_t *v)
{
    return json_is_string(v) && json_string_length(v) && json_string_length(v) <= ASK_MAX_STOP_BYTES;
}

static bool is_id(const json_t *v)
{
    return json_is_integer(v) && json_integer_value(v) >= 0 && json_integer_value(v) <= UINT32_MAX;
}

static enum td_status check_list(const struct ask_param *p, const char *name, const json_t *list,
                                 bool (*is_good)(const json_t *), const char *what, struct td_error *e)
{
    size_t i;
    json_t *v;
    if (!json_is_array(list))
        return td_fail(e, TD_ERR_INVALID, "%s: must be a list of %s", name, what);
    if (p->max > 0 && (double)json_array_size(list) > p->max)
        return td_fail(e, TD_ERR_INVALID, "%s: %zu entries, at most %.0f", name, json_array_size(list), p->max);
    json_array_foreach(list, i, v) if (!is_good(v)) return td_fail(e, TD_ERR_INVALID, "%s: entry %zu is not one of %s",
                                                                   name, i, what);
    return TD_OK;
}

static enum td_status check_texts(const struct ask_param *p, const char *name, const json_t *v, struct td_error *e)
{
    static const char WHAT[] = "texts of 1 to 256 bytes";
    _Static_assert(ASK_MAX_STOP_BYTES == 256, "WHAT says so");
    if (!json_is_string(v))
        return check_list(p, name, v, is_stop, WHAT, e);
    return is_stop(v) ? TD_OK : td_fail(e, TD_ERR_INVALID, "%s: must be one or a list of %s", name, WHAT);
}

static enum td_status check_biases(const struct ask_param *p, const char *name, const json_t *biases,
                                   struct td_error *e)
{
    const char *key;
    json_t *v;
    uint64_t id;
    if (!json_is_object(biases) || json_object_size(biases) > ASK_MAX_BIASES)
        return td_fail(e, TD_ERR_INVALID, "%s: must be an object of at most %d members", name, ASK_MAX_BIASES);
    json_object_foreach((json_t *)(uintptr_t)biases, key, v)
    {
        char member[64];
        if (!parse_digits(key, UINT32_MAX, &id))
            return td_fail(e, TD_ERR_INVALID, "%s: '%.40s' is no token id", name, key);
        snprintf(member, sizeof(member), "%.24s: '%.24s'", name, key);
        enum td_status s = check_number(p, member, v, e);
        if (s)
            return s;
    }
    return TD_OK;
}

static bool is_object(const json_t *v)
{
    return json_is_object(v);
}

enum td_status ask_param_check(const struct ask_param *p, const char *name, const json_t *v, struct td_error *e)
{
    switch (p->type) {
    case ASK_BOOL:
        return json_is_boolean(v) ? TD_OK : td_fail(e, TD_ERR_INVALID, "%s: must be true or false", name);
    case ASK_WHOLE:
    case ASK_MS:
        return check_whole(p, name, v, e);
    case ASK_NUMBER:
        return check_number(p, name, v, e);
    case ASK_LIMIT_MS:
        return check_limit(p, name, v, e);
    case ASK_SEED:
        return check_seed(name, v, e);
    case ASK_TEXT:
        return check_text(p, name, v, e);
    case ASK_TEXTS:
        return check_texts(p, name, v, e);
    case ASK_IDS:
        return check_list(p, name, v, is_id, "token ids", e);
    case ASK_BIASES:
        return check_biases(p, name, v, e);
    case ASK_MESSAGES:
        return check_list(p, name, v, is_object, "objects", e);
    case ASK_LIST:
        return json_is_array(v) ? TD_OK : td_fail(e, TD_ERR_INVALID, "%s: must be a list", name);
    case ASK_OBJECT:
        return json_is_object(v) ? TD_OK : td_fail(e, TD_ERR_INVALID, "%s: must be an object", name);
    case ASK_LABEL:
        return TD_OK;
    }
    return TD_ERR_INVALID;
}

/* ------------------------------------------------------------ command line */

static json_t *parse_number(const char *text)
{
    char *end;
    double x = strtod(text, &end);
    return end == text || *end || !isfinite(x) ? NULL : json_real(x);
}

static json_t *parse_whole(const char *text)
{
    char *end;
    errno = 0;
    long long n = strtoll(text, &end, 10);
    return end == text || *end || errno ? NULL : json_integer(n);
}

static json_t *parse_ms(const char *text, bool fractions)
{
    double ms;
    if (!options_duration_ms(text, &ms))
        return NULL;
    /* 0.29s are 290 ms, although a double can't hold that exactly. */
    bool whole = fabs(ms - round(ms)) < 1e-6 && fabs(ms) < 1e15;
    return fractions ? json_real(ms) : whole ? json_integer((json_int_t)round(ms)) : NULL;
}

static json_t *parse_ids(const char *text)
{
    struct bytes list = {0};
    bytes_printf(&list, "[%s]", text);
    json_t *v = json_loads(list.data, 0, NULL);
    bytes_free(&list);
    return v;
}

static json_t *parse_value(const struct ask_param *p, const char *text)
{
    uint64_t seed;
    switch (p->type) {
    case ASK_WHOLE:
        return parse_whole(text);
    case ASK_MS:
    case ASK_LIMIT_MS:
        return parse_ms(text, p->type == ASK_LIMIT_MS);
    case ASK_NUMBER:
        return parse_number(text);
    case ASK_SEED:
        return parse_digits(text, UINT64_MAX, &seed) ? ask_seed_json(seed) : NULL;
    case ASK_IDS:
        return parse_ids(text);
    case ASK_BOOL:
    case ASK_BIASES:
    case ASK_MESSAGES:
    case ASK_LIST:
    case ASK_OBJECT:
        return json_loads(text, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL);
    case ASK_TEXT:
    case ASK_TEXTS:
    case ASK_LABEL:
        break;
    }
    return json_string(text);
}

enum td_status ask_param_parse(const struct ask_param *p, const char *name, const char *text, json_t **value_out,
                               struct td_error *e)
{
    json_t *v = parse_value(p, text);
    enum td_status s =
        v ? ask_param_check(p, name, v, e)
          : td_fail(e, TD_ERR_INVALID, "%s: '%.100s' is not %s", name, text, p->holder ? p->holder : "JSON");
    if (s) {
        json_decref(v);
        return s;
    }
    *value_out = v;
    return TD_OK;
}

json_t *ask_seed_json(uint64_t seed)
{
    char digits[24];
    snprintf(digits, sizeof(digits), "%" PRIu64, seed);
    return seed <= INT64_MAX ? json_integer((json_int_t)seed) : json_string(digits);
}

uint64_t ask_seed_value(const json_t *v)
{
    return json_is_string(v) ? strtoull(json_string_value(v), NULL, 10) : (uint64_t)json_integer_value(v);
}
