/*
 * The client API. Methods run on rpc threads: they check sizes and hand over, and never
 * wait or take long.
 *
 * Chats are rendered and texts tokenized or detokenized on the text threads. The two rpc threads complete
 * sends: if they tokenized, 40 prompts of 3.9 MB would delay every client's tokens for seconds.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "router/router_internal.h"

/* Logs a Generate that ends before it is a request, under its client's id; other methods have none. */
static void log_refused(const struct router *r, const ProtobufCMessage *message, enum rpc_code code, const char *text)
{
    char req[LOG_WORD_BYTES];
    if (message->descriptor != &tandem__v1__generate_request__descriptor)
        return;
    const Tandem__V1__GenerateRequest *m = (const Tandem__V1__GenerateRequest *)message;
    log_debug(&r->log, "request refused req=%s code=%s text='%s'", log_word(m->request_id.data, m->request_id.len, req),
              rpc_code_name(code), text);
}

static void refuse_call(struct router *r, struct rpc_call *call, enum td_status s, const struct td_error *e)
{
    metrics_inc(r->counters, ROUTER_INVALID, 1);
    rpc_call_finish(call, rpc_code_of_status(s), e->text, 0);
}

void api_on_open(struct rpc_call *call, void *router)
{
    rpc_call_set_user(call, router);
}

void api_on_end(struct rpc_call *call, enum rpc_code code, const char *text)
{
    (void)call, (void)code, (void)text;
}

/*
 * Pushes a client's note to the owner thread, which may be busy: at most --max-calls notes of --text-bytes
 * together may wait, or the call is refused. A note counts until it is handled, even if its call has ended,
 * so clients that open calls and leave at once can't fill memory.
 */
void api_tell_owner(struct router *r, struct note *note, struct rpc_call *call, uint64_t bytes)
{
    note->bytes = bytes + sizeof(*note);
    uint64_t n = atomic_fetch_add(&r->n_notes, 1), all = atomic_fetch_add(&r->note_bytes, note->bytes);
    if (n < (uint64_t)r->options.max_calls && (!n || all + note->bytes <= (uint64_t)r->options.text_bytes)) {
        mailbox_push(&r->mailbox, &note->mail);
        return;
    }
    atomic_fetch_sub(&r->n_notes, 1);
    atomic_fetch_sub(&r->note_bytes, note->bytes);
    metrics_inc(r->counters, ROUTER_NOTES_REFUSED, 1);
    uint32_t retry_after_ms = 1 + (uint32_t)(n * atomic_load(&r->note_ns) / NS_PER_MS);
    if (note->request)
        request_refuse(note->request, "too many calls wait to be looked at", retry_after_ms);
    else
        rpc_call_finish(call, RPC_RESOURCE_EXHAUSTED, "too many calls wait to be looked at", retry_after_ms);
    rpc_call_unref(note->call);
    if (note->params)
        params_free(note->params);
    free(note->params);
    free(note);
}

/* ---------------------------------------------------------------- API keys */

static const char NO_KEY[] = "authorization: no API key, or none that is known; it is sent as 'Bearer KEY'";

/* False: the call was refused, because it has no key and needs one. *key_out: NULL where nobody needs one. */
static bool admit(struct router *r, struct rpc_call *call, struct api_key **key_out)
{
    *key_out = r->keys ? keys_find(r->keys, rpc_call_header(call, "authorization")) : NULL;
    if (!r->keys || *key_out)
        return true;
    metrics_inc(r->counters, ROUTER_KEYLESS, 1);
    rpc_call_finish(call, RPC_UNAUTHENTICATED, NO_KEY, 0);
    return false;
}

/* Whether the model may be named in the answer to this key. */
static bool may_use(struct router *r, const struct api_key *key, const char *lora)
{
    struct td_error e;
    return !key || !keys_allow(r->keys, key, r->model_name, lora, &e);
}

/* params_model(), and whether the key is for it. */
static enum td_status check_model(struct router *r, const struct api_key *key, ProtobufCBinaryData model,
                                  struct td_error *e)
{
    enum td_status s = params_model(r, model, e);
    return s || !key ? s : keys_allow(r->keys, key, r->model_name, NULL, e);
}

/* False: the call was refused, because its key has asked for too many texts in this minute. */
static bool take_text(struct router *r, struct rpc_call *call, struct api_key *key)
{
    struct td_error e;
    uint32_t retry_after_ms;
    if (!key || !keys_take_text(r->keys, key, clock_now(&r->clock), &retry_after_ms, &e))
        return true;
    metrics_inc(r->counters, ROUTER_RATED, 1);
    rpc_call_finish(call, RPC_RESOURCE_EXHAUSTED, e.text, retry_after_ms);
    return false;
}

/* Who shares the text threads with others: a tenant, or a connection where there are no keys. */
static uint64_t text_owner(struct router *r, const struct rpc_call *call, const struct api_key *key)
{
    struct key_terms terms;
    if (!key)
        return rpc_call_connection(call);
    keys_terms(r->keys, key, &terms);
    return terms.tenant_id;
}

/* The tenant is the key's, whatever the request says of it. */
static enum td_status take_key(struct router *r, struct rpc_call *call, struct params *p, struct td_error *e)
{
    struct key_terms terms;
    char lora[ASK_MAX_LABEL_BYTES + 1];
    if (!r->keys)
        return TD_OK;
    p->key = keys_find(r->keys, rpc_call_header(call, "authorization"));
    if (!p->key)
        return td_fail(e, TD_ERR_AUTH, "%s", NO_KEY);
    keys_terms(r->keys, p->key, &terms);
    size_t n = strlen(terms.tenant);
    if (p->tenant.len && (p->tenant.len != n || memcmp(p->tenant.data, terms.tenant, n) != 0))
        return td_fail(e, TD_ERR_FORBIDDEN, "tenant: leave it empty; the key is another tenant's");
    bytes_clear(&p->tenant);
    bytes_append(&p->tenant, terms.tenant, n);
    snprintf(lora, sizeof(lora), "%.*s", (int)p->lora.len, p->lora.len ? p->lora.data : "");
    return keys_allow(r->keys, p->key, r->model_name, lora, e);
}

/* Takes the header "traceparent" if it is one: 00-TRACE-PARENT-FLAGS, in hex. Others are ignored: W3C. */
static void take_trace(const struct rpc_call *call, struct params *p)
{
    static const char FORM[] = "00-hhhhhhhhhhhhhhhhhhhhhhhhhhhhhhhh-hhhhhhhhhhhhhhhh-hh";
    const char *trace = rpc_call_header(call, "traceparent");
    if (!trace || strlen(trace) != sizeof(FORM) - 1)
        return;
    for (size_t i = 0; FORM[i]; i++)
        if (FORM[i] == 'h' ? !strchr("0123456789abcdef", trace[i]) : trace[i] != FORM[i])
            return;
    memcpy(p->trace, trace, sizeof(FORM));
}

/* params_parse(), and whose request it is. *out is to be freed only if this succeeds. */
static enum td_status parse_of(struct router *r, struct rpc_call *call, const Tandem__V1__GenerateRequest *m,
                               int64_t remaining_ms, struct params *out, struct td_error *e)
{
    enum td_status s = params_parse(r, m, remaining_ms, out, e);
    if (s)
        return s;
    take_trace(call, out);
    s = take_key(r, call, out, e);
    if (s)
        params_free(out);
    return s;
}

/* --------------------------------------------------------------- long work */

struct call_arrival {
    uint64_t ns;
    int64_t remaining_ms; /* until gRPC's deadline */
};
typedef void text_handler(struct rpc_call *call, const ProtobufCMessage *message, const struct call_arrival *at);

/*
 * A call whose message is handled by a text thread. The job owns the message and one reference of the call.
 */
struct text_job {
    struct job job; /* first member */
    struct rpc_call *call;
    ProtobufCMessage *message;
    text_handler *handle;
    struct call_arrival at;
};

static void text_run(struct job *job)
{
    struct text_job *t = (struct text_job *)job;
    struct router *r = rpc_call_user(t->call);
    if (!rpc_call_over(t->call))
        t->handle(t->call, t->message, &t->at);
    protobuf_c_message_free_unpacked(t->message, NULL);
    rpc_call_unref(t->call);
    free(t);
    atomic_fetch_sub(&r->n_texts, 1);
}

static void text_later(struct rpc_call *call, const struct api_key *key, const ProtobufCMessage *message,
                       text_handler *handle)
{
    struct router *r = rpc_call_user(call);
    struct text_job *t = mem_zalloc(sizeof(*t));
    uint32_t retry_after_ms;
    t->job =
        (struct job){.run = text_run, .owner = text_owner(r, call, key), .cost_bytes = rpc_call_message_bytes(call)};
    t->at = (struct call_arrival){clock_now(&r->clock), rpc_call_remaining_ms(call)};
    t->handle = handle;
    t->call = rpc_call_ref(call);
    t->message = rpc_call_take(call, message);
    atomic_fetch_add(&r->n_texts, 1);
    if (jobs_submit(r->texts, &t->job, &retry_after_ms))
        return;
    atomic_fetch_sub(&r->n_texts, 1);
    metrics_inc(r->counters, ROUTER_TEXTS_REFUSED, 1);
    log_refused(r, t->message, RPC_RESOURCE_EXHAUSTED, "too many texts wait to be tokenized");
    rpc_call_finish(call, RPC_RESOURCE_EXHAUSTED, "too many texts wait to be tokenized", retry_after_ms);
    protobuf_c_message_free_unpacked(t->message, NULL);
    rpc_call_unref(t->call);
    free(t);
}

/* --------------------------------------------------------------- Generate */

static void generate(struct rpc_call *call, const ProtobufCMessage *base, const struct call_arrival *at)
{
    struct router *r = rpc_call_user(call);
    struct td_error e = {{0}};
    struct params p;
    enum td_status s = parse_of(r, call, (const Tandem__V1__GenerateRequest *)base, at->remaining_ms, &p, &e);
    if (s) {
        log_refused(r, base, rpc_code_of_status(s), e.text);
        refuse_call(r, call, s, &e);
        return;
    }
    struct request *q = mem_zalloc(sizeof(*q));
    q->router = r;
    q->call = rpc_call_ref(call);
    q->p = p;
    q->arrived_ns = at->ns;
    parts_begin(q);
    s = answer_resume(q, &e);
    if (s) {
        log_refused(r, base, rpc_code_of_status(s), e.text);
        refuse_call(r, call, s, &e);
        request_free(q);
        return;
    }
    q->tokenized_ns = clock_now(&r->clock);
    char req[LOG_WORD_BYTES], tenant[LOG_WORD_BYTES];
    log_debug(&r->log, "request received req=%s tenant=%s prompt_tokens=%u resumed_tokens=%u trace=%s",
              request_log_id(q, req), log_word(p.tenant.data, p.tenant.len, tenant), p.sampling.n_prompt, p.n_resumed,
              *p.trace ? p.trace : "-");
    struct note *note = note_new(NOTE_REQUEST);
    note->request = q;
    api_tell_owner(r, note, call, q->p.n_ids * sizeof(*q->p.ids) + q->p.echo.len);
}

static void on_generate(struct rpc_call *call, const ProtobufCMessage *base)
{
    struct router *r = rpc_call_user(call);
    struct td_error e = {{0}};
    struct api_key *key;
    if (!admit(r, call, &key))
        return;
    if (atomic_load(&r->stopping)) {
        log_refused(r, base, RPC_UNAVAILABLE, "router is draining");
        rpc_call_finish(call, RPC_UNAVAILABLE, "router is draining", 1000);
        return;
    }
    enum td_status s = params_fits(r, (const Tandem__V1__GenerateRequest *)base, &e);
    if (s) {
        log_refused(r, base, rpc_code_of_status(s), e.text);
        refuse_call(r, call, s, &e);
    } else {
        text_later(call, key, base, generate);
    }
}

static void on_generate_end(struct rpc_call *call, enum rpc_code code, const char *text)
{
    (void)text;
    struct router *r = rpc_call_user(call);
    if (code == RPC_OK)
        return;
    struct note *note = note_new(NOTE_REQUEST_GONE);
    note->call = rpc_call_ref(call);
    note->bytes = sizeof(*note); /* counted in note_bytes, but never refused */
    atomic_fetch_add(&r->n_notes, 1);
    atomic_fetch_add(&r->note_bytes, note->bytes);
    mailbox_push(&r->mailbox, &note->mail);
}

/* ------------------------------------------------- Tokenize and Detokenize */

static void tokenize(struct rpc_call *call, const ProtobufCMessage *base, const struct call_arrival *at)
{
    (void)at;
    struct router *r = rpc_call_user(call);
    const Tandem__V1__TokenizeRequest *m = (const Tandem__V1__TokenizeRequest *)base;
    Tandem__V1__TokenizeResponse answer = TANDEM__V1__TOKENIZE_RESPONSE__INIT;
    struct token_ids ids = {0};
    struct bytes text = {0};
    struct td_error e = {{0}};
    enum td_status s = TD_OK;
    if (m->input_case == TANDEM__V1__TOKENIZE_REQUEST__INPUT_CHAT) {
        s = params_chat(r, m->chat, &text, NULL, &e);
        if (!s)
            s = params_text_fits(r, "chat", text.len, &e);
        if (!s)
            s = tokenizer_encode(r->tokenizer, text.data ? text.data : "", text.len, false, &ids, &e);
    } else if (m->input_case == TANDEM__V1__TOKENIZE_REQUEST__INPUT_TEXT) {
        s = tokenizer_encode(r->tokenizer, (const char *)m->text.data, m->text.len,
                             !m->has_add_special_tokens_case || m->add_special_tokens, &ids, &e);
    } else {
        s = td_fail(&e, TD_ERR_INVALID, "input: neither text nor chat is given");
    }
    if (s) {
        refuse_call(r, call, s, &e);
    } else {
        answer.ids = ids.ids;
        answer.n_ids = ids.n;
        answer.text = (ProtobufCBinaryData){text.len, (uint8_t *)text.data};
        s = rpc_call_send(call, &answer.base);
        rpc_call_finish(call, s ? RPC_RESOURCE_EXHAUSTED : RPC_OK, s ? "answer too large" : "", 0);
    }
    token_ids_free(&ids);
    bytes_free(&text);
}

static void on_tokenize(struct rpc_call *call, const ProtobufCMessage *base)
{
    struct router *r = rpc_call_user(call);
    const Tandem__V1__TokenizeRequest *m = (const Tandem__V1__TokenizeRequest *)base;
    struct td_error e = {{0}};
    struct api_key *key;
    if (!admit(r, call, &key))
        return;
    enum td_status s = check_model(r, key, m->model, &e);
    if (!s && m->input_case == TANDEM__V1__TOKENIZE_REQUEST__INPUT_CHAT)
        s = params_chat_fits(r, m->chat, &e);
    else if (!s && m->input_case == TANDEM__V1__TOKENIZE_REQUEST__INPUT_TEXT)
        s = params_text_fits(r, "text", m->text.len, &e);
    if (s)
        refuse_call(r, call, s, &e);
    else if (take_text(r, call, key))
        text_later(call, key, base, tokenize);
}

static void detokenize(struct rpc_call *call, const ProtobufCMessage *base, const struct call_arrival *at)
{
    (void)at;
    struct router *r = rpc_call_user(call);
    const Tandem__V1__DetokenizeRequest *m = (const Tandem__V1__DetokenizeRequest *)base;
    Tandem__V1__DetokenizeResponse answer = TANDEM__V1__DETOKENIZE_RESPONSE__INIT;
    struct td_error e = {{0}};
    struct bytes text = {0};
    for (size_t i = 0; i < m->n_ids; i++)
        if (m->ids[i] >= r->config.vocab_size) {
            refuse_call(r, call,
                        td_fail(&e, TD_ERR_INVALID, "ids[%zu]: %u is not in the vocabulary of %u", i, m->ids[i],
                                r->config.vocab_size),
                        &e);
            return;
        }
    tokenizer_decode(r->tokenizer, m->ids, m->n_ids, m->skip_special_tokens, &text);
    answer.text = (ProtobufCBinaryData){text.len, (uint8_t *)text.data};
    enum td_status s = rpc_call_send(call, &answer.base);
    rpc_call_finish(call, s ? RPC_RESOURCE_EXHAUSTED : RPC_OK, s ? "answer too large" : "", 0);
    bytes_free(&text);
}

static void on_detokenize(struct rpc_call *call, const ProtobufCMessage *base)
{
    struct router *r = rpc_call_user(call);
    const Tandem__V1__DetokenizeRequest *m = (const Tandem__V1__DetokenizeRequest *)base;
    struct td_error e = {{0}};
    struct api_key *key;
    if (!admit(r, call, &key))
        return;
    enum td_status s = check_model(r, key, m->model, &e);
    if (!s && m->n_ids > params_context(r))
        s = td_fail(&e, TD_ERR_INVALID, "ids: %zu, at most the context of %u", m->n_ids, params_context(r));
    if (s)
        refuse_call(r, call, s, &e);
    else if (take_text(r, call, key))
        text_later(call, key, base, detokenize);
}

/* ------------------------------------------------------------- ListModels */

static void on_list_models(struct rpc_call *call, const ProtobufCMessage *base)
{
    const Tandem__V1__ListModelsRequest *m = (const Tandem__V1__ListModelsRequest *)base;
    struct router *r = rpc_call_user(call);
    struct api_key *key;
    if (!admit(r, call, &key))
        return;
    Tandem__V1__ListModelsResponse answer = TANDEM__V1__LIST_MODELS_RESPONSE__INIT;
    Tandem__V1__ModelInfo info = TANDEM__V1__MODEL_INFO__INIT, *list[] = {&info};
    char hex[33] = "", numerics[32];
    ProtobufCBinaryData loras[MAX_ADAPTERS];
    pthread_mutex_lock(&r->hello_lock);
    if (r->known)
        block_key_hex(&r->fingerprint, hex);
    for (uint32_t i = 0; i < r->n_adapters; i++) /* the names never change once they are known */
        if (may_use(r, key, r->adapters[i].name))
            loras[info.n_loras++] = rpc_data(r->adapters[i].name);
    info.loras = loras;
    memcpy(numerics, r->numerics, sizeof(numerics));
    pthread_mutex_unlock(&r->hello_lock);
    info.name = rpc_data(r->model_name);
    info.max_context_tokens = atomic_load(&r->max_context);
    info.vocab_size = r->config.vocab_size;
    info.block_tokens = atomic_load(&r->block_tokens);
    info.fingerprint = rpc_data(hex);
    info.numerics = rpc_data(numerics);
    info.max_stop_strings = ASK_MAX_STOP_STRINGS;
    info.max_stop_bytes = ASK_MAX_STOP_BYTES;
    info.max_message_bytes = (uint32_t)r->options.max_message_bytes;
    info.chat = chat_template_present(r->chat);
    if (m->want_template) {
        info.chat_template = rpc_data(chat_template_source(r->chat));
        info.bos_token = rpc_data(chat_template_special(r->chat, "bos_token"));
        info.eos_token = rpc_data(chat_template_special(r->chat, "eos_token"));
    }
    answer.n_models = may_use(r, key, NULL);
    answer.models = list;
    rpc_call_send(call, &answer.base);
    rpc_call_finish(call, RPC_OK, "", 0);
}

/* ---------------------------------------------------------- Pin and Flush */

/* Pin and Flush: validates the prefix like a Generate request, then hands it to the owner thread. */
static void ask_about_prefix(struct rpc_call *call, const Tandem__V1__GenerateRequest *prefix, enum note_kind kind,
                             uint32_t ttl_ms, const struct call_arrival *at)
{
    struct router *r = rpc_call_user(call);
    struct td_error e = {{0}};
    struct params p;
    enum td_status s = TD_OK;
    if (!prefix)
        s = td_fail(&e, TD_ERR_INVALID, "prefix: missing");
    else if (prefix->bypass_cache)
        s = td_fail(&e, TD_ERR_INVALID, "prefix.bypass_cache: then nothing is cached");
    else if (ttl_ms > MAX_PIN_MS)
        s = td_fail(&e, TD_ERR_INVALID, "ttl_ms: %u is more than a day, %u", ttl_ms, MAX_PIN_MS);
    if (!s)
        s = parse_of(r, call, prefix, at->remaining_ms, &p, &e);
    if (s) {
        refuse_call(r, call, s, &e);
        return;
    }
    struct note *note = note_new(kind);
    note->params = mem_dup(&p, sizeof(p));
    note->number = ttl_ms;
    note->call = rpc_call_ref(call);
    api_tell_owner(r, note, call, p.n_ids * sizeof(*p.ids));
}

static void pin(struct rpc_call *call, const ProtobufCMessage *base, const struct call_arrival *at)
{
    const Tandem__V1__PinRequest *m = (const Tandem__V1__PinRequest *)base;
    ask_about_prefix(call, m->prefix, NOTE_PIN, m->ttl_ms, at);
}

static void flush(struct rpc_call *call, const ProtobufCMessage *base, const struct call_arrival *at)
{
    ask_about_prefix(call, ((const Tandem__V1__FlushRequest *)base)->prefix, NOTE_FLUSH, 0, at);
}

static void prefix_later(struct rpc_call *call, const ProtobufCMessage *base, const Tandem__V1__GenerateRequest *prefix,
                         text_handler *handle)
{
    struct router *r = rpc_call_user(call);
    struct td_error e = {{0}};
    struct api_key *key;
    if (!admit(r, call, &key))
        return;
    enum td_status s = prefix ? params_fits(r, prefix, &e) : TD_OK;
    if (s)
        refuse_call(r, call, s, &e);
    else if (take_text(r, call, key))
        text_later(call, key, base, handle);
}

static void on_pin(struct rpc_call *call, const ProtobufCMessage *base)
{
    prefix_later(call, base, ((const Tandem__V1__PinRequest *)base)->prefix, pin);
}

static void on_flush(struct rpc_call *call, const ProtobufCMessage *base)
{
    prefix_later(call, base, ((const Tandem__V1__FlushRequest *)base)->prefix, flush);
}

void router_answer_simple(struct rpc_call *call, const ProtobufCMessage *answer, enum td_status status,
                          const struct td_error *e)
{
    if (!status)
        rpc_call_send(call, answer);
    rpc_call_finish(call, rpc_code_of_status(status), status ? e->text : "", 0);
    rpc_call_unref(call);
}

const struct rpc_method ROUTER_METHODS[] = {
    {"/tandem.v1.Tandem/Generate",
     &tandem__v1__generate_request__descriptor,
     {on_generate, NULL, on_generate_end},
     api_on_open,
     true,
     .has_queue = true},
    {"/tandem.v1.Tandem/Tokenize",
     &tandem__v1__tokenize_request__descriptor,
     {on_tokenize, NULL, api_on_end},
     api_on_open,
     true},
    {"/tandem.v1.Tandem/Detokenize",
     &tandem__v1__detokenize_request__descriptor,
     {on_detokenize, NULL, api_on_end},
     api_on_open,
     true},
    {"/tandem.v1.Tandem/ListModels",
     &tandem__v1__list_models_request__descriptor,
     {on_list_models, NULL, api_on_end},
     api_on_open,
     true},
    {"/tandem.v1.Tandem/Pin", &tandem__v1__pin_request__descriptor, {on_pin, NULL, api_on_end}, api_on_open, true},
    {"/tandem.v1.Tandem/Flush",
     &tandem__v1__flush_request__descriptor,
     {on_flush, NULL, api_on_end},
     api_on_open,
     true},
};
const uint32_t N_ROUTER_METHODS = sizeof(ROUTER_METHODS) / sizeof(ROUTER_METHODS[0]);
