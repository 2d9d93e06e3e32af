/*
 * The front door: everything in a GenerateRequest is checked here, before anything is allocated for the request anywhere.
 * Each refusal names the field. Workers check again at their own door.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "router/router_internal.h"

enum { MAX_BIAS = 1024, MAX_STOP_IDS = 56 };

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

enum td_status params_chat(struct router *r, const Tandem__V1__ChatPrompt *chat, struct bytes *text_out,
                           struct td_error *e)
{
    struct chat_message *messages = mem_array(chat->n_messages, sizeof(*messages));
    char(*roles)[32] = mem_array(chat->n_messages, sizeof(*roles));
    enum td_status s = chat->n_messages ? TD_OK : td_fail(e, TD_ERR_INVALID, "chat.messages: empty");
    for (size_t i = 0; i < chat->n_messages && !s; i++) {
        const Tandem__V1__ChatMessage *m = chat->messages[i];
        if (m->role.len >= sizeof(roles[i]) || memchr(m->role.data ? m->role.data : (uint8_t *)"", 0, m->role.len))
            s = td_fail(e, TD_ERR_INVALID, "chat.messages[%zu].role: too long, or holds U+0000", i);
        else if (m->role.len)
            memcpy(roles[i], m->role.data, m->role.len);
        messages[i] = (struct chat_message){roles[i], (const char *)m->content.data, m->content.len};
    }
    if (!s)
        s = chat_template_render(r->chat, messages, chat->n_messages, true, text_out, e);
    free(messages);
    free(roles);
    return s;
}

static enum td_status parse_prompt(struct router *r, const Tandem__V1__GenerateRequest *m, struct params *p,
                                   struct td_error *e)
{
    struct token_ids ids = {0};
    struct bytes text = {0};
    enum td_status s = TD_OK;
    switch (m->prompt_case) {
    case TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT:
        s = tokenizer_encode(r->tokenizer, (const char *)m->text.data, m->text.len, m->add_special_tokens, &ids, e);
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
        s = params_chat(r, m->chat, &text, e);
        if (!s)
            s = tokenizer_encode(r->tokenizer, text.data, text.len, false, &ids, e);
        bytes_free(&text);
        break;
    default:
        s = td_fail(e, TD_ERR_INVALID, "prompt: none of text, tokens, chat is given");
    }
    if (!s && !ids.n)
        s = td_fail(e, TD_ERR_INVALID, "prompt: empty");
    p->ids = ids.ids;
    p->n_ids = (uint32_t)ids.n;
    return s;
}

static enum td_status parse_bias(struct router *r, const Tandem__V1__Sampling *m, struct params *p, struct td_error *e)
{
    if (m->n_logit_bias > MAX_BIAS)
        return td_fail(e, TD_ERR_INVALID, "sampling.logit_bias: %zu entries, at most %d", m->n_logit_bias, MAX_BIAS);
    p->bias = mem_array(m->n_logit_bias, sizeof(*p->bias));
    p->bias_list = mem_array(m->n_logit_bias, sizeof(*p->bias_list));
    for (size_t i = 0; i < m->n_logit_bias; i++) {
        const Tandem__V1__LogitBias *b = m->logit_bias[i];
        if (b->id >= r->config.vocab_size || !within(b->bias, -100, 100))
            return td_fail(e, TD_ERR_INVALID, "sampling.logit_bias[%zu]: id %u or bias %g out of range", i, b->id,
                           (double)b->bias);
        tandem__worker__v1__bias__init(&p->bias[i]);
        p->bias[i].id = b->id;
        p->bias[i].bias = b->bias;
        p->bias_list[i] = &p->bias[i];
    }
    p->sampling.n_logit_bias = m->n_logit_bias;
    p->sampling.logit_bias = p->bias_list;
    return TD_OK;
}

static enum td_status parse_sampling(struct router *r, const Tandem__V1__Sampling *m, struct params *p,
                                     struct td_error *e)
{
    Tandem__Worker__V1__SamplingParams *s = &p->sampling;
    const Tandem__V1__Sampling none = TANDEM__V1__SAMPLING__INIT;
    m = m ? m : &none;
    s->temperature = m->has_temperature_case ? m->temperature : r->config.default_temperature;
    s->top_k = m->has_top_k_case ? m->top_k : r->config.default_top_k;
    s->top_p = m->has_top_p_case ? m->top_p : r->config.default_top_p;
    s->min_p = m->has_min_p_case ? m->min_p : 0;
    s->presence_penalty = m->presence_penalty;
    s->frequency_penalty = m->frequency_penalty;
    s->repetition_penalty = m->has_repetition_penalty_case ? m->repetition_penalty : 1;
    s->seed = m->has_seed_case ? m->seed : random_u64();
    if (m->n > 1)
        return td_fail(e, TD_ERR_UNSUPPORTED, "sampling.n: %u choices; this version answers one", m->n);
    if (s->top_k > 1u << 30)
        return td_fail(e, TD_ERR_INVALID, "sampling.top_k: %u is absurd", s->top_k);
    enum td_status status = range("sampling.temperature", s->temperature, 0, 100, e);
    if (!status)
        status = range("sampling.top_p", s->top_p, 1e-6f, 1, e);
    if (!status)
        status = range("sampling.min_p", s->min_p, 0, 1, e);
    if (!status)
        status = range("sampling.presence_penalty", s->presence_penalty, -2, 2, e);
    if (!status)
        status = range("sampling.frequency_penalty", s->frequency_penalty, -2, 2, e);
    if (!status)
        status = range("sampling.repetition_penalty", s->repetition_penalty, 1e-3f, 10, e);
    return status ? status : parse_bias(r, m, p, e);
}

static enum td_status parse_stop_ids(struct router *r, const Tandem__V1__Stopping *m, struct params *p,
                                     struct td_error *e)
{
    if (m->n_stop_ids > MAX_STOP_IDS)
        return td_fail(e, TD_ERR_INVALID, "stopping.stop_ids: %zu entries, at most %d", m->n_stop_ids, MAX_STOP_IDS);
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

static enum td_status parse_lengths(struct router *r, const Tandem__V1__Stopping *m, struct params *p,
                                    struct td_error *e)
{
    uint32_t context = atomic_load(&r->max_context);
    if (!context)
        context = r->config.max_positions; /* no worker yet; admission will say so */
    if (p->n_ids > context || (p->n_ids == context && !p->want_prompt_logprobs))
        return td_fail(e, TD_ERR_INVALID, "prompt: %u tokens leave no room in the context of %u", p->n_ids, context);
    p->max_tokens_given = m->has_max_tokens_case;
    uint32_t max = m->has_max_tokens_case ? m->max_tokens : context - p->n_ids;
    if (!max && !p->want_prompt_logprobs)
        return td_fail(e, TD_ERR_INVALID, "stopping.max_tokens: 0 is only for prompt log-probabilities");
    if ((uint64_t)p->n_ids + max > context)
        return td_fail(e, TD_ERR_INVALID, "stopping.max_tokens: %u after a prompt of %u is over the context of %u", max,
                       p->n_ids, context);
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
    if (m->n_stop > MAX_STOP_STRINGS)
        return td_fail(e, TD_ERR_INVALID, "stopping.stop: %zu strings, at most %d", m->n_stop, MAX_STOP_STRINGS);
    for (size_t i = 0; i < m->n_stop; i++) {
        if (!m->stop[i].len || m->stop[i].len > MAX_STOP_BYTES)
            return td_fail(e, TD_ERR_INVALID, "stopping.stop[%zu]: %zu bytes, expected 1 to %d", i, m->stop[i].len,
                           MAX_STOP_BYTES);
        bytes_append(&p->stop[p->n_stop++], m->stop[i].data, m->stop[i].len);
    }
    enum td_status s = parse_stop_ids(r, m, p, e);
    return s ? s : parse_lengths(r, m, p, e);
}

static enum td_status label(const char *field, ProtobufCBinaryData b, struct bytes *out, struct td_error *e)
{
    if (b.len > MAX_LABEL_BYTES)
        return td_fail(e, TD_ERR_INVALID, "%s: %zu bytes, at most %d", field, b.len, MAX_LABEL_BYTES);
    bytes_append(out, b.data, b.len);
    return TD_OK;
}

static enum td_status parse_rest(struct router *r, const Tandem__V1__GenerateRequest *m, int64_t grpc_remaining_ms,
                                 struct params *p, struct td_error *e)
{
    if (m->model.len && (m->model.len != strlen(r->model_name) || memcmp(m->model.data, r->model_name, m->model.len)))
        return td_fail(e, TD_ERR_NOT_FOUND, "model: this cluster serves '%s'", r->model_name);
    if (m->lora.len)
        return td_fail(e, TD_ERR_UNSUPPORTED, "lora: adapters are not supported by this version");
    if (m->priority < -10 || m->priority > 10)
        return td_fail(e, TD_ERR_INVALID, "priority: %d is not in -10 .. 10", m->priority);
    enum td_status s = label("tenant", m->tenant, &p->tenant, e);
    struct bytes workflow = {0};
    if (!s)
        s = label("cache_salt", m->cache_salt, &p->salt, e);
    if (!s)
        s = label("workflow_id", m->workflow_id, &workflow, e);
    if (!s)
        s = label("request_id", m->request_id, &p->label, e);
    bytes_free(&workflow);
    p->remaining_ms = grpc_remaining_ms;
    if (m->slo) {
        p->ttft_ms = m->slo->ttft_ms;
        p->tpot_ms = m->slo->tpot_ms;
        if (m->slo->deadline_ms && m->slo->deadline_ms < p->remaining_ms)
            p->remaining_ms = m->slo->deadline_ms;
    }
    p->priority = m->priority;
    p->workflow_deadline_ms = m->workflow_deadline_ms;
    p->workflow_steps_left = m->workflow_steps_left;
    p->want_ids = m->want_ids;
    p->want_logprobs = m->want_logprobs;
    p->want_prompt_logprobs = m->want_prompt_logprobs;
    return s;
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
    if (!s && p.want_prompt_logprobs && p.n_ids > MAX_PROMPT_LOGPROBS)
        s = td_fail(error_out, TD_ERR_INVALID, "want_prompt_logprobs: for prompts of at most %d tokens",
                    MAX_PROMPT_LOGPROBS);
    p.sampling.logprobs = p.want_logprobs;
    p.sampling.prompt_logprobs = p.want_prompt_logprobs;
    if (s) {
        params_free(&p);
        return s;
    }
    *out = p;
    return TD_OK;
}

void params_free(struct params *p)
{
    free(p->ids);
    free(p->bias);
    free(p->bias_list);
    free(p->stop_ids);
    for (uint32_t i = 0; i < p->n_stop; i++)
        bytes_free(&p->stop[i]);
    bytes_free(&p->tenant);
    bytes_free(&p->salt);
    bytes_free(&p->label);
}
