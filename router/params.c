/*
 * Validation: every field of a GenerateRequest is checked here, before anything is allocated for the request.
 * Each refusal names the field. Workers check again.
 */
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/options.h"
#include "base/random.h"
#include "grammar/grammar.h"
#include "router/router_internal.h"

static bool within(float v, float min, float max)
{
    return v >= min && v <= max; /* false for NaN */
}

static enum td_status range(const char *field, float v, float min, float max, struct td_error *e)
{
    if (within(v, min, max))
        return TD_OK;
    return td_fail(e, TD_ERR_INVALID, "%s: %g is not in %g .. %g", field, (double)v, (double)min, (double)max);
}

/* Parses JSON of this type from a field; NULL, with an error: it is something else. */
static json_t *field_json(ProtobufCBinaryData b, const char *field, json_type type, struct td_error *e)
{
    json_error_t je;
    json_t *v = json_loadb((const char *)b.data, b.len, JSON_ALLOW_NUL, &je);
    if (v && json_typeof(v) == type)
        return v;
    td_fail(e, TD_ERR_INVALID, "%s: %s", field, v ? "another type of value is expected" : je.text);
    json_decref(v);
    return NULL;
}

static json_t *message_json(const Tandem__V1__ChatMessage *m, size_t i, struct td_error *e)
{
    char field[64];
    snprintf(field, sizeof(field), "chat.messages[%zu].json", i);
    if (m->json.len)
        return field_json(m->json, field, JSON_OBJECT, e);
    json_t *role = json_stringn(m->role.len ? (const char *)m->role.data : "", m->role.len),
           *content = json_stringn(m->content.len ? (const char *)m->content.data : "", m->content.len);
    if (role && content)
        return json_pack("{s:o, s:o}", "role", role, "content", content);
    td_fail(e, TD_ERR_INVALID, "chat.messages[%zu].%s: not UTF-8", i, role ? "content" : "role");
    json_decref(role);
    json_decref(content);
    return NULL;
}

enum td_status params_chat(struct router *r, const Tandem__V1__ChatPrompt *chat, struct bytes *text_out,
                           json_t **tools_out, struct td_error *e)
{
    struct chat_request q = {.messages = json_array(), .add_generation_prompt = !chat->no_generation_prompt};
    bool good = true;
    for (size_t i = 0; i < chat->n_messages && good; i++) {
        json_t *m = message_json(chat->messages[i], i, e);
        good = m && !json_array_append_new(q.messages, m);
    }
    if (good && chat->tools.len)
        good = (q.tools = field_json(chat->tools, "chat.tools", JSON_ARRAY, e)) != NULL;
    if (good && chat->variables.len)
        good = (q.variables = field_json(chat->variables, "chat.variables", JSON_OBJECT, e)) != NULL;
    enum td_status s = good ? chat_template_render(r->chat, &q, text_out, e) : TD_ERR_INVALID;
    if (tools_out && !s)
        *tools_out = json_incref(q.tools);
    json_decref(q.messages);
    json_decref(q.tools);
    json_decref(q.variables);
    return s;
}

/* --------------------------------------------------------------- bounds before any work */

static bool is_model(const struct router *r, ProtobufCBinaryData name)
{
    return !name.len || (name.len == strlen(r->model_name) && !memcmp(name.data, r->model_name, name.len));
}

enum td_status params_model(struct router *r, ProtobufCBinaryData name, struct td_error *e)
{
    if (is_model(r, name) || adapters_has(r, name))
        return TD_OK;
    return td_fail(e, TD_ERR_NOT_FOUND, "model: this cluster serves '%s'", r->model_name);
}

uint32_t params_context(const struct router *r)
{
    uint32_t context = atomic_load(&r->max_context);
    return context ? context : r->config.max_positions;
}

enum td_status params_text_fits(struct router *r, const char *field, size_t len_bytes, struct td_error *e)
{
    uint64_t context = params_context(r), most = context * tokenizer_max_token_bytes(r->tokenizer);
    if (len_bytes <= most)
        return TD_OK;
    return td_fail(e, TD_ERR_INVALID, "%s: %zu bytes can't fit the context of %u tokens, which are %llu bytes at most",
                   field, len_bytes, (uint32_t)context, (unsigned long long)most);
}

/* JSON may take six bytes for one character. Parts of a chat that the template may leave out count, too. */
enum td_status params_chat_fits(struct router *r, const Tandem__V1__ChatPrompt *chat, struct td_error *e)
{
    size_t sum = (chat->tools.len + chat->variables.len) / 6;
    enum td_status s = params_text_fits(r, "chat.tools and chat.variables", sum, e);
    for (size_t i = 0; i < chat->n_messages && !s; i++) {
        const Tandem__V1__ChatMessage *m = chat->messages[i];
        char field[64];
        snprintf(field, sizeof(field), "chat.messages[%zu].%s", i, m->json.len ? "json" : "content");
        sum += m->json.len ? m->json.len / 6 : m->role.len + m->content.len;
        s = params_text_fits(r, field, sum, e);
    }
    return s;
}

enum td_status params_fits(struct router *r, const Tandem__V1__GenerateRequest *m, struct td_error *e)
{
    switch (m->prompt_case) {
    case TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT:
        return params_text_fits(r, "text", m->text.len, e);
    case TANDEM__V1__GENERATE_REQUEST__PROMPT_TOKENS:
        if (m->tokens->n_ids > params_context(r) && !m->truncate_prompt)
            return td_fail(e, TD_ERR_INVALID, "prompt: tokens.ids: %zu leave no room in the context of %u",
                           m->tokens->n_ids, params_context(r));
        return TD_OK;
    case TANDEM__V1__GENERATE_REQUEST__PROMPT_CHAT:
        return params_chat_fits(r, m->chat, e);
    default:
        return TD_OK; /* params_parse says what is missing */
    }
}

/* --------------------------------------------------------------- prompt */

/*
 * Tokenizes; stops soon after the context is full, however long the text is. Of a text that is truncated the
 * last tokens count, so all are needed, up to a bound.
 */
static enum td_status encode_prompt(struct router *r, const char *text, size_t len, bool add_special, bool truncates,
                                    struct token_ids *ids, struct td_error *e)
{
    enum { TRUNCATED_CONTEXTS = 4 };
    ids->limit = (size_t)params_context(r) * (truncates ? TRUNCATED_CONTEXTS : 1);
    enum td_status s = tokenizer_encode(r->tokenizer, text, len, add_special, ids, e);
    if (s == TD_ERR_NO_SPACE)
        s = td_fail(e, TD_ERR_INVALID, "prompt: more than %zu tokens leave no room in the context of %zu", ids->limit,
                    ids->limit);
    return s;
}

/* Drops the first tokens of a prompt that is longer than asked for, or than max_tokens leaves room for. */
static void truncate_prompt(struct router *r, const Tandem__V1__GenerateRequest *m, struct token_ids *ids)
{
    uint32_t context = params_context(r), most = m->truncate_prompt;
    uint32_t answer = m->stopping && m->stopping->has_max_tokens_case ? m->stopping->max_tokens : 1;
    if (!most)
        return;
    if (answer < context && most > context - answer)
        most = context - answer;
    if (ids->n <= most)
        return;
    memmove(ids->ids, ids->ids + ids->n - most, most * sizeof(*ids->ids));
    ids->n = most;
}

static enum td_status parse_prompt(struct router *r, const Tandem__V1__GenerateRequest *m, struct params *p,
                                   struct td_error *e)
{
    struct token_ids ids = {0};
    struct bytes text = {0};
    enum td_status s = TD_OK;
    if (m->add_special_tokens && m->prompt_case != TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT)
        return td_fail(e, TD_ERR_INVALID, "add_special_tokens: only for text; ids and chats have theirs");
    switch (m->prompt_case) {
    case TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT:
        s = encode_prompt(r, (const char *)m->text.data, m->text.len,
                          !m->has_add_special_tokens_case || m->add_special_tokens, m->truncate_prompt, &ids, e);
        break;
    case TANDEM__V1__GENERATE_REQUEST__PROMPT_TOKENS:
        for (size_t i = 0; i < m->tokens->n_ids && !s; i++) {
            if (m->tokens->ids[i] >= r->config.vocab_size)
                s = td_fail(e, TD_ERR_INVALID, "tokens.ids[%zu]: %u is not in the vocabulary of %u", i,
                            m->tokens->ids[i], r->config.vocab_size);
            else
                token_ids_push(&ids, m->tokens->ids[i]);
        }
        break;
    case TANDEM__V1__GENERATE_REQUEST__PROMPT_CHAT:
        s = params_chat(r, m->chat, &text, m->raw_answer ? NULL : &p->tools, e);
        if (!s)
            s = params_text_fits(r, "chat", text.len, e);
        if (!s)
            s = encode_prompt(r, text.data ? text.data : "", text.len, false, m->truncate_prompt, &ids, e);
        break;
    default:
        s = td_fail(e, TD_ERR_INVALID, "prompt: none of text, tokens, chat is given");
    }
    if (!s && !ids.n)
        s = td_fail(e, TD_ERR_INVALID, "prompt: empty");
    size_t n_all = ids.n;
    if (!s)
        truncate_prompt(r, m, &ids);
    if (m->echo && !s && ids.n < n_all)
        tokenizer_decode(r->tokenizer, ids.ids, ids.n, false, &p->echo);
    else if (m->echo && !s && m->prompt_case == TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT)
        bytes_append(&p->echo, m->text.data, m->text.len);
    else if (m->echo && !s && text.len)
        bytes_append(&p->echo, text.data, text.len);
    else if (m->echo && !s)
        tokenizer_decode(r->tokenizer, ids.ids, ids.n, false, &p->echo);
    p->wants_parts = m->prompt_case == TANDEM__V1__GENERATE_REQUEST__PROMPT_CHAT && !m->raw_answer;
    p->begins_reasoning =
        p->wants_parts && text.len && convention_ends_in_reasoning(r->convention, text.data, text.len);
    bytes_free(&text);
    p->ids = ids.ids;
    p->n_ids = (uint32_t)ids.n;
    return s;
}

static void add_bias(struct params *p, uint32_t id, float bias)
{
    size_t i = p->sampling.n_logit_bias++;
    tandem__worker__v1__bias__init(&p->bias[i]);
    p->bias[i].id = id;
    p->bias[i].bias = bias;
    p->bias_list[i] = &p->bias[i];
}

/* The request's biases, then those for ids that the model suppresses. */
static enum td_status parse_bias(struct router *r, const Tandem__V1__Sampling *m, struct params *p, struct td_error *e)
{
    const struct model_generation *g = &r->config.generation;
    if (m->n_logit_bias > ASK_MAX_BIASES)
        return td_fail(e, TD_ERR_INVALID, "sampling.logit_bias: %zu entries, at most %d", m->n_logit_bias,
                       ASK_MAX_BIASES);
    p->bias = mem_array(m->n_logit_bias + g->n_suppressed_ids, sizeof(*p->bias));
    p->bias_list = mem_array(m->n_logit_bias + g->n_suppressed_ids, sizeof(*p->bias_list));
    p->sampling.logit_bias = p->bias_list;
    for (size_t i = 0; i < m->n_logit_bias; i++) {
        const Tandem__V1__LogitBias *b = m->logit_bias[i];
        if (b->id >= r->config.vocab_size || !within(b->bias, -ASK_MAX_BIAS, ASK_MAX_BIAS))
            return td_fail(e, TD_ERR_INVALID, "sampling.logit_bias[%zu]: id %u or bias %g out of range", i, b->id,
                           (double)b->bias);
        add_bias(p, b->id, b->bias);
    }
    for (uint32_t i = 0; i < g->n_suppressed_ids; i++)
        add_bias(p, g->suppressed_ids[i], -INFINITY);
    return TD_OK;
}

static enum td_status parse_allowed(struct router *r, const Tandem__V1__Sampling *m, struct params *p,
                                    struct td_error *e)
{
    if (m->n_allowed_ids > ASK_MAX_ALLOWED)
        return td_fail(e, TD_ERR_INVALID, "sampling.allowed_ids: %zu entries, at most %d", m->n_allowed_ids,
                       ASK_MAX_ALLOWED);
    for (size_t i = 0; i < m->n_allowed_ids; i++)
        if (m->allowed_ids[i] >= r->config.vocab_size)
            return td_fail(e, TD_ERR_INVALID, "sampling.allowed_ids[%zu]: %u is not in the vocabulary of %u", i,
                           m->allowed_ids[i], r->config.vocab_size);
    p->allowed = mem_dup(m->allowed_ids, m->n_allowed_ids * sizeof(*p->allowed));
    p->sampling.allowed_ids = p->allowed;
    p->sampling.n_allowed_ids = m->n_allowed_ids;
    return TD_OK;
}

static enum td_status check_utf8(const char *field, ProtobufCBinaryData b, struct td_error *e)
{
    json_t *v = json_stringn(b.len ? (const char *)b.data : "", b.len); /* NULL: it is not */
    json_decref(v);
    return v ? TD_OK : td_fail(e, TD_ERR_INVALID, "%s: not UTF-8", field);
}

/* Adds a list of bad ids. */
static void add_bad(struct params *p, const uint32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++)
        token_ids_push(&p->bad, ids[i]);
    p->bad_lengths = mem_resize(p->bad_lengths, p->sampling.n_bad_lengths + 1, sizeof(*p->bad_lengths));
    p->bad_lengths[p->sampling.n_bad_lengths++] = (uint32_t)n;
}

/* The word's tokens at the beginning of a text, and behind a space. */
static enum td_status parse_bad_word(struct router *r, ProtobufCBinaryData word, struct params *p, struct td_error *e)
{
    struct bytes text = {0};
    struct token_ids first = {0}, behind = {0};
    bytes_append(&text, " ", 1);
    bytes_append(&text, word.data, word.len);
    enum td_status s = tokenizer_encode(r->tokenizer, text.data + 1, word.len, false, &first, e);
    if (!s)
        s = tokenizer_encode(r->tokenizer, text.data, text.len, false, &behind, e);
    if (!s && first.n)
        add_bad(p, first.ids, first.n);
    if (!s && behind.n && (behind.n != first.n || memcmp(first.ids, behind.ids, first.n * sizeof(*first.ids))))
        add_bad(p, behind.ids, behind.n);
    token_ids_free(&first);
    token_ids_free(&behind);
    bytes_free(&text);
    return s;
}

static enum td_status parse_bad_words(struct router *r, const Tandem__V1__Sampling *m, struct params *p,
                                      struct td_error *e)
{
    enum td_status s = TD_OK;
    char field[64];
    if (m->n_bad_words > ASK_MAX_BAD_WORDS)
        return td_fail(e, TD_ERR_INVALID, "sampling.bad_words: %zu texts, at most %d", m->n_bad_words,
                       ASK_MAX_BAD_WORDS);
    for (size_t i = 0; i < m->n_bad_words && !s; i++) {
        ProtobufCBinaryData word = m->bad_words[i];
        snprintf(field, sizeof(field), "sampling.bad_words[%zu]", i);
        if (!word.len || word.len > ASK_MAX_STOP_BYTES)
            return td_fail(e, TD_ERR_INVALID, "%s: %zu bytes, expected 1 to %d", field, word.len, ASK_MAX_STOP_BYTES);
        s = check_utf8(field, word, e);
        if (!s)
            s = parse_bad_word(r, word, p, e);
    }
    p->sampling.bad_ids = p->bad.ids;
    p->sampling.n_bad_ids = p->bad.n;
    p->sampling.bad_lengths = p->bad_lengths;
    return s;
}

static enum td_status parse_sampling(struct router *r, const Tandem__V1__Sampling *m, struct params *p,
                                     struct td_error *e)
{
    Tandem__Worker__V1__SamplingParams *s = &p->sampling;
    const Tandem__V1__Sampling none = TANDEM__V1__SAMPLING__INIT;
    const struct model_generation *g = &r->config.generation;
    m = m ? m : &none;
    s->temperature = m->has_temperature_case ? m->temperature : g->temperature;
    s->top_k = m->has_top_k_case ? m->top_k : g->top_k;
    s->top_p = m->has_top_p_case ? m->top_p : g->top_p;
    s->min_p = m->has_min_p_case ? m->min_p : g->min_p;
    s->typical_p = m->has_typical_p_case ? m->typical_p : g->typical_p;
    s->presence_penalty = m->presence_penalty;
    s->frequency_penalty = m->frequency_penalty;
    s->repetition_penalty = m->has_repetition_penalty_case ? m->repetition_penalty : g->repetition_penalty;
    s->seed = m->has_seed_case ? m->seed : random_u64() >> 11; /* 53 bits: exact in every reader of JSON */
    p->n_choices = m->n ? m->n : 1;
    if (m->n > ASK_MAX_CHOICES)
        return td_fail(e, TD_ERR_INVALID, "sampling.n: %u choices, at most %d", m->n, ASK_MAX_CHOICES);
    if (s->top_k > ASK_MAX_TOP_K)
        return td_fail(e, TD_ERR_INVALID, "sampling.top_k: %u is absurd", s->top_k);
    enum td_status status = range("sampling.temperature", s->temperature, 0, ASK_MAX_TEMPERATURE, e);
    if (!status)
        status = range("sampling.top_p", s->top_p, ASK_LEAST_TOP_P, 1, e);
    if (!status)
        status = range("sampling.min_p", s->min_p, 0, 1, e);
    if (!status)
        status = range("sampling.typical_p", s->typical_p, 0, 1, e);
    if (!status)
        status = range("sampling.presence_penalty", s->presence_penalty, -ASK_MAX_PENALTY, ASK_MAX_PENALTY, e);
    if (!status)
        status = range("sampling.frequency_penalty", s->frequency_penalty, -ASK_MAX_PENALTY, ASK_MAX_PENALTY, e);
    if (!status)
        status =
            range("sampling.repetition_penalty", s->repetition_penalty, ASK_LEAST_REPETITION, ASK_MAX_REPETITION, e);
    if (!status)
        status = parse_bias(r, m, p, e);
    if (!status)
        status = parse_bad_words(r, m, p, e);
    return status ? status : parse_allowed(r, m, p, e);
}

static enum td_status parse_stop_ids(struct router *r, const Tandem__V1__Stopping *m, struct params *p,
                                     struct td_error *e)
{
    if (m->n_stop_ids > ASK_MAX_STOP_IDS)
        return td_fail(e, TD_ERR_INVALID, "stopping.stop_ids: %zu entries, at most %d", m->n_stop_ids,
                       ASK_MAX_STOP_IDS);
    p->stop_ids = mem_array(m->n_stop_ids + MODEL_MAX_EOS, sizeof(*p->stop_ids));
    uint32_t n = 0;
    for (; n < m->n_stop_ids; n++) {
        if (m->stop_ids[n] >= r->config.vocab_size)
            return td_fail(e, TD_ERR_INVALID, "stopping.stop_ids[%u]: %u is not in the vocabulary of %u", n,
                           m->stop_ids[n], r->config.vocab_size);
        p->stop_ids[n] = m->stop_ids[n];
    }
    for (uint32_t i = 0; i < r->config.n_eos_ids && !m->ignore_eos; i++)
        p->stop_ids[n++] = r->config.eos_ids[i];
    p->sampling.stop_ids = p->stop_ids;
    p->sampling.n_stop_ids = n;
    return TD_OK;
}

static bool is_among(const uint32_t *ids, size_t n, uint32_t id)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

/* Checks that some id can be drawn: allowed, not suppressed, and not an end while min_tokens forbids one. */
static enum td_status check_drawable(const struct router *r, const struct params *p, struct td_error *e)
{
    const Tandem__Worker__V1__SamplingParams *s = &p->sampling;
    const struct model_generation *g = &r->config.generation;
    for (size_t i = 0; i < s->n_allowed_ids; i++)
        if (!is_among(g->suppressed_ids, g->n_suppressed_ids, s->allowed_ids[i]) &&
            !(s->min_tokens && is_among(s->stop_ids, s->n_stop_ids, s->allowed_ids[i])))
            return TD_OK;
    if (!s->n_allowed_ids)
        return TD_OK;
    return td_fail(e, TD_ERR_INVALID,
                   "sampling.allowed_ids: each of them ends the answer before stopping.min_tokens, or is suppressed by "
                   "generation_config.json");
}

/*
 * max_tokens of a request that gives none: the model's default, but at least min_tokens and at most `room`.
 */
static uint32_t default_max_tokens(const struct router *r, const Tandem__V1__Stopping *m, uint32_t room)
{
    uint32_t max = r->config.generation.max_tokens;
    max = max > m->min_tokens ? max : m->min_tokens;
    return r->config.generation.max_tokens && max < room ? max : room;
}

static enum td_status parse_lengths(struct router *r, const Tandem__V1__Stopping *m, struct params *p,
                                    struct td_error *e)
{
    uint32_t context = params_context(r);
    if (p->n_ids > context || (p->n_ids == context && !p->want_prompt_logprobs))
        return td_fail(e, TD_ERR_INVALID, "prompt: %u tokens leave no room in the context of %u", p->n_ids, context);
    p->max_tokens_given = m->has_max_tokens_case;
    uint32_t max = m->has_max_tokens_case ? m->max_tokens : default_max_tokens(r, m, context - p->n_ids);
    if (!max && !p->want_prompt_logprobs)
        return td_fail(e, TD_ERR_INVALID, "stopping.max_tokens: 0 is only for prompt log-probabilities");
    if ((uint64_t)p->n_ids + max > context)
        return td_fail(e, TD_ERR_INVALID, "stopping.max_tokens: %u after a prompt of %u is over the context of %u", max,
                       p->n_ids, context);
    if (!max && p->n_choices > 1)
        return td_fail(e, TD_ERR_INVALID, "sampling.n: %u choices of no tokens", p->n_choices);
    if (m->min_tokens > max)
        return td_fail(e, TD_ERR_INVALID, "stopping.min_tokens: %u is more than max_tokens %u", m->min_tokens, max);
    p->sampling.max_tokens = max;
    p->sampling.min_tokens = m->min_tokens;
    p->sampling.n_prompt = p->n_ids;
    return TD_OK;
}

static enum td_status parse_stopping(struct router *r, const Tandem__V1__Stopping *m, struct params *p,
                                     struct td_error *e)
{
    const Tandem__V1__Stopping none = TANDEM__V1__STOPPING__INIT;
    m = m ? m : &none;
    p->include_stop = m->include_stop;
    if (m->n_stop > ASK_MAX_STOP_STRINGS)
        return td_fail(e, TD_ERR_INVALID, "stopping.stop: %zu strings, at most %d", m->n_stop, ASK_MAX_STOP_STRINGS);
    for (size_t i = 0; i < m->n_stop; i++) {
        if (!m->stop[i].len || m->stop[i].len > ASK_MAX_STOP_BYTES)
            return td_fail(e, TD_ERR_INVALID, "stopping.stop[%zu]: %zu bytes, expected 1 to %d", i, m->stop[i].len,
                           ASK_MAX_STOP_BYTES);
        bytes_append(&p->stop[p->n_stop++], m->stop[i].data, m->stop[i].len);
        char field[64];
        snprintf(field, sizeof(field), "stopping.stop[%zu]", i);
        if (check_utf8(field, m->stop[i], e))
            return TD_ERR_INVALID;
    }
    enum td_status s = parse_stop_ids(r, m, p, e);
    if (!s)
        s = parse_lengths(r, m, p, e);
    return s ? s : check_drawable(r, p, e);
}

static enum td_status label(const char *field, ProtobufCBinaryData b, struct bytes *out, struct td_error *e)
{
    if (b.len > ASK_MAX_LABEL_BYTES)
        return td_fail(e, TD_ERR_INVALID, "%s: %zu bytes, at most %d", field, b.len, ASK_MAX_LABEL_BYTES);
    bytes_append(out, b.data, b.len);
    return check_utf8(field, b, e);
}

/*
 * A limit in milliseconds: the exact field if it is set, otherwise the integer field, which older clients
 * send.
 */
static enum td_status limit(const char *field, uint32_t whole_ms, double exact_ms, double *out, struct td_error *e)
{
    if (!(exact_ms >= 0 && exact_ms <= ASK_MAX_LIMIT_MS) || (exact_ms > 0 && exact_ms < OPTIONS_LEAST_MS))
        return td_fail(e, TD_ERR_INVALID, "slo.%s: %g is not 0, nor in %g .. 1e12", field, exact_ms, OPTIONS_LEAST_MS);
    *out = exact_ms > 0 ? exact_ms : whole_ms;
    return TD_OK;
}

static enum td_status parse_rest(struct router *r, const Tandem__V1__GenerateRequest *m, int64_t grpc_remaining_ms,
                                 struct params *p, struct td_error *e)
{
    enum td_status s = params_model(r, m->model, e);
    if (!s && (m->priority < -ASK_MAX_PRIORITY || m->priority > ASK_MAX_PRIORITY))
        s = td_fail(e, TD_ERR_INVALID, "priority: %d is not in %d .. %d", m->priority, -ASK_MAX_PRIORITY,
                    ASK_MAX_PRIORITY);
    if (!s)
        s = label("tenant", m->tenant, &p->tenant, e);
    if (!s)
        s = label("cache_salt", m->cache_salt, &p->salt, e);
    if (!s)
        s = label("workflow_id", m->workflow_id, &p->workflow, e);
    if (!s)
        s = label("request_id", m->request_id, &p->label, e);
    bool is_adapter = !is_model(r, m->model), has_both = is_adapter && m->lora.len;
    if (!s && has_both && (m->lora.len != m->model.len || memcmp(m->lora.data, m->model.data, m->model.len)))
        s = td_fail(e, TD_ERR_INVALID, "lora: model names another adapter");
    if (!s)
        s = label("lora", is_adapter ? m->model : m->lora, &p->lora, e);
    if (!s)
        s = adapters_ask(r, p, e);
    p->remaining_ms = grpc_remaining_ms;
    if (m->slo) {
        if (!s)
            s = limit("exact_ttft_ms", m->slo->ttft_ms, m->slo->exact_ttft_ms, &p->ttft_ms, e);
        if (!s)
            s = limit("exact_tpot_ms", m->slo->tpot_ms, m->slo->exact_tpot_ms, &p->tpot_ms, e);
        if (m->slo->deadline_ms && m->slo->deadline_ms < p->remaining_ms)
            p->remaining_ms = m->slo->deadline_ms;
    }
    p->priority = m->priority;
    p->workflow_deadline_ms = m->workflow_deadline_ms;
    p->workflow_steps_left = m->workflow_steps_left;
    p->want_ids = m->want_ids;
    p->want_pieces = m->want_pieces;
    p->want_logprobs = m->want_logprobs;
    p->want_prompt_logprobs = m->want_prompt_logprobs;
    p->bypass_cache = m->bypass_cache;
    p->skip_special = !m->has_skip_special_tokens_case || m->skip_special_tokens;
    p->sampling.top_logprobs = m->top_logprobs;
    if (!s && m->top_logprobs > ASK_MAX_TOP_LOGPROBS)
        s = td_fail(e, TD_ERR_INVALID, "top_logprobs: %u, at most %d", m->top_logprobs, ASK_MAX_TOP_LOGPROBS);
    return s;
}

/* The tokens that another router sent follow the prompt. The rest of the request was read before. */
static enum td_status parse_resume(struct router *r, const Tandem__V1__GenerateRequest *m, struct params *p,
                                   struct td_error *e)
{
    const Tandem__V1__Resume *u = m->resume;
    if (!u)
        return TD_OK;
    if (p->n_choices > 1)
        return td_fail(e, TD_ERR_INVALID, "sampling.n: %u, but resume is for one choice", p->n_choices);
    if (p->sampling.temperature > 0 && !(m->sampling && m->sampling->has_seed_case))
        return td_fail(e, TD_ERR_INVALID, "resume: sampling.seed is missing; another one draws other tokens");
    if (u->choice >= ASK_MAX_CHOICES)
        return td_fail(e, TD_ERR_INVALID, "resume.choice: %u, at most %d", u->choice, ASK_MAX_CHOICES - 1);
    if (u->prompt_tokens && u->prompt_tokens != p->n_ids)
        return td_fail(e, TD_ERR_INVALID, "resume.prompt_tokens: %u, but the prompt has %u", u->prompt_tokens,
                       p->n_ids);
    if (u->n_ids > p->sampling.max_tokens)
        return td_fail(e, TD_ERR_INVALID, "resume.ids: %zu, more than max_tokens %u", u->n_ids, p->sampling.max_tokens);
    for (size_t i = 0; i < u->n_ids; i++)
        if (u->ids[i] >= r->config.vocab_size)
            return td_fail(e, TD_ERR_INVALID, "resume.ids[%zu]: %u is not in the vocabulary of %u", i, u->ids[i],
                           r->config.vocab_size);
    p->ids = mem_resize(p->ids, p->n_ids + u->n_ids, sizeof(*p->ids));
    if (u->n_ids)
        memcpy(p->ids + p->n_ids, u->ids, u->n_ids * sizeof(*p->ids));
    p->n_ids += (uint32_t)u->n_ids;
    p->n_resumed = (uint32_t)u->n_ids;
    p->resumed_bytes = u->text_bytes;
    p->sampling.choice = u->choice;
    p->ttft_ms = p->tpot_ms = 0; /* they were promised by the router that was lost */
    return TD_OK;
}

/* ----------------------------------------------------------------- structured output */

/* Where the text of each kind is, and what it is called. */
struct structured_kind {
    enum grammar_kind kind;
    const char *field;
    size_t at; /* in Tandem__V1__Structured */
};

static const struct structured_kind *kind_of(const Tandem__V1__Structured *m)
{
#define KIND(case_name, kind, field)                                                                                   \
    [TANDEM__V1__STRUCTURED__KIND_##case_name] = { kind, #field, offsetof(Tandem__V1__Structured, field) }
    static const struct structured_kind KINDS[] = {
        KIND(JSON_SCHEMA, GRAMMAR_SCHEMA, json_schema), KIND(JSON_OBJECT, GRAMMAR_JSON, json_object),
        KIND(REGEX, GRAMMAR_REGEX, regex), KIND(EBNF, GRAMMAR_EBNF, ebnf), KIND(CHOICE, GRAMMAR_CHOICE, choice)};
#undef KIND
    size_t i = (size_t)m->kind_case;
    return i < sizeof(KINDS) / sizeof(KINDS[0]) && KINDS[i].field ? &KINDS[i] : NULL;
}

/* Compiles it once, to find out whether workers can. */
static enum td_status check_grammar(struct router *r, const Tandem__V1__GenerateRequest *m, const struct params *p,
                                    const char *field, struct td_error *e)
{
    struct grammar *g = NULL;
    struct td_error why = {{0}};
    if (!r->config.n_eos_ids || (m->stopping && m->stopping->ignore_eos))
        return td_fail(e, TD_ERR_INVALID,
                       "%s: the answer must be able to end: not with ignore_eos, nor by a model without an end token",
                       field);
    if (grammar_compile(NULL, (enum grammar_kind)p->grammar_kind, p->grammar.data, p->grammar.len, &g, &why))
        return td_fail(e, TD_ERR_INVALID, "%s: %s", field, why.text);
    grammar_unref(g);
    return TD_OK;
}

static enum td_status parse_structured(struct router *r, const Tandem__V1__GenerateRequest *m, struct params *p,
                                       struct td_error *e)
{
    const Tandem__V1__Structured *u = m->structured;
    const struct structured_kind *k = u ? kind_of(u) : NULL;
    if (!k || (k->kind == GRAMMAR_JSON && !u->json_object))
        return TD_OK;
    const ProtobufCBinaryData *text = (const void *)((const char *)u + k->at);
    if (k->kind == GRAMMAR_JSON)
        bytes_printf(&p->grammar, "{}"); /* it is not looked at */
    else if (text->len)
        bytes_append(&p->grammar, text->data, text->len);
    p->grammar_kind = k->kind;
    if (!p->grammar.len)
        return td_fail(e, TD_ERR_INVALID, "structured.%s: is empty", k->field);
    char field[64];
    snprintf(field, sizeof(field), "structured.%s", k->field);
    return check_grammar(r, m, p, field, e);
}

/* Calls that must be made are a structure, in the convention of the model's template. */
static enum td_status parse_calls(struct router *r, const Tandem__V1__GenerateRequest *m, struct params *p,
                                  struct td_error *e)
{
    bool is_chat = m->prompt_case == TANDEM__V1__GENERATE_REQUEST__PROMPT_CHAT;
    const Tandem__V1__ChatPrompt *chat = is_chat ? m->chat : NULL;
    const char *field = chat && chat->function.len ? "chat.function" : "chat.must_call";
    if (!chat || (!chat->must_call && !chat->function.len))
        return TD_OK;
    if (!json_array_size(p->tools) || (m->structured && kind_of(m->structured)))
        return td_fail(e, TD_ERR_INVALID, "%s: needs tools, and neither raw_answer nor structured", field);
    if (chat->function.len && !reply_tool(p->tools, (const char *)chat->function.data, chat->function.len))
        return td_fail(e, TD_ERR_INVALID, "chat.function: it is not in tools");
    char *only = chat->function.len ? mem_zalloc(chat->function.len + 1) : NULL;
    if (only)
        memcpy(only, chat->function.data, chat->function.len);
    json_t *structure =
        convention_structure(r->convention, p->tools, only, !chat->one_call, r->has_reasoning, p->begins_reasoning);
    free(only);
    if (!structure)
        return td_fail(e, TD_ERR_INVALID, "%s: calls in the convention of this model (%s) can't be enforced", field,
                       convention_name(r->convention));
    char *text = json_dumps(structure, JSON_COMPACT);
    bytes_append(&p->grammar, text, strlen(text));
    free(text);
    json_decref(structure);
    p->grammar_kind = GRAMMAR_STRUCTURE;
    p->is_strict = true;
    return check_grammar(r, m, p, field, e);
}

static enum td_status check_scores(const struct params *p, struct td_error *e)
{
    uint32_t most = MAX_PROMPT_SCORES / (2 + p->sampling.top_logprobs);
    most = most < MAX_PROMPT_LOGPROBS ? most : MAX_PROMPT_LOGPROBS;
    if (!p->want_prompt_logprobs || p->n_ids <= most)
        return TD_OK;
    return td_fail(e, TD_ERR_INVALID, "want_prompt_logprobs: with top_logprobs %u for prompts of at most %u tokens",
                   p->sampling.top_logprobs, most);
}

enum td_status params_parse(struct router *r, const Tandem__V1__GenerateRequest *m, int64_t grpc_remaining_ms,
                            struct params *out, struct td_error *error_out)
{
    struct params p = {.remaining_ms = INT64_MAX};
    tandem__worker__v1__sampling_params__init(&p.sampling);
    enum td_status s = parse_rest(r, m, grpc_remaining_ms, &p, error_out);
    if (!s)
        s = parse_sampling(r, m->sampling, &p, error_out);
    if (!s)
        s = parse_prompt(r, m, &p, error_out);
    if (!s)
        s = parse_stopping(r, m->stopping, &p, error_out);
    if (!s)
        s = check_scores(&p, error_out);
    if (!s)
        s = parse_structured(r, m, &p, error_out);
    if (!s)
        s = parse_calls(r, m, &p, error_out);
    if (!s)
        s = parse_resume(r, m, &p, error_out);
    if (!s && !p.label.len)
        bytes_printf(&p.label, "%016" PRIx64, random_u64());
    p.sampling.logprobs = p.want_logprobs;
    p.sampling.prompt_logprobs = p.want_prompt_logprobs;
    if (s) {
        params_free(&p);
        return s;
    }
    *out = p;
    return TD_OK;
}

static void copy_bytes(struct bytes *b)
{
    struct bytes copy = {0};
    if (b->len)
        bytes_append(&copy, b->data, b->len);
    *b = copy;
}

struct params params_copy(const struct params *of)
{
    struct params p = *of;
    Tandem__Worker__V1__SamplingParams *s = &p.sampling;
    p.n_ids = s->n_prompt; /* without tokens generated since then */
    p.ids = mem_dup(of->ids, p.n_ids * sizeof(*p.ids));
    p.bias = mem_dup(of->bias, s->n_logit_bias * sizeof(*p.bias));
    p.bias_list = mem_array(s->n_logit_bias, sizeof(*p.bias_list));
    for (size_t i = 0; i < s->n_logit_bias; i++)
        p.bias_list[i] = &p.bias[i];
    p.stop_ids = mem_dup(of->stop_ids, s->n_stop_ids * sizeof(*p.stop_ids));
    p.allowed = mem_dup(of->allowed, s->n_allowed_ids * sizeof(*p.allowed));
    s->logit_bias = p.bias_list;
    s->stop_ids = p.stop_ids;
    s->allowed_ids = p.allowed;
    p.bad = (struct token_ids){.ids = mem_dup(of->bad.ids, of->bad.n * sizeof(*of->bad.ids)), .n = of->bad.n};
    p.bad_lengths = mem_dup(of->bad_lengths, s->n_bad_lengths * sizeof(*p.bad_lengths));
    s->bad_ids = p.bad.ids;
    s->bad_lengths = p.bad_lengths;
    for (uint32_t i = 0; i < p.n_stop; i++)
        copy_bytes(&p.stop[i]);
    copy_bytes(&p.echo);
    copy_bytes(&p.tenant);
    copy_bytes(&p.salt);
    copy_bytes(&p.label);
    copy_bytes(&p.workflow);
    copy_bytes(&p.lora);
    copy_bytes(&p.grammar);
    json_incref(p.tools);
    return p;
}

void params_free(struct params *p)
{
    free(p->ids);
    free(p->bias);
    free(p->bias_list);
    free(p->stop_ids);
    free(p->allowed);
    free(p->bad_lengths);
    token_ids_free(&p->bad);
    bytes_free(&p->echo);
    for (uint32_t i = 0; i < p->n_stop; i++)
        bytes_free(&p->stop[i]);
    bytes_free(&p->tenant);
    bytes_free(&p->salt);
    bytes_free(&p->label);
    bytes_free(&p->workflow);
    bytes_free(&p->lora);
    bytes_free(&p->grammar);
    json_decref(p->tools);
}
