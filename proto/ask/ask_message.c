#include "proto/ask/ask_message.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "proto/ask/ask_bounds.h"
#include "proto/ask/ask_message_parts.h"
#include "proto/ask/ask_params.h"

static ProtobufCBinaryData bytes_of(const json_t *v)
{
    return (ProtobufCBinaryData){json_string_length(v), (uint8_t *)(uintptr_t)json_string_value(v)};
}

/* A list or object of the request as text. */
static ProtobufCBinaryData dumped(struct ask_message *b, const json_t *v)
{
    b->dumps = mem_resize(b->dumps, b->n_dumps + 1, sizeof(*b->dumps));
    char *text = json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY);
    b->dumps[b->n_dumps++] = text;
    return (ProtobufCBinaryData){strlen(text), (uint8_t *)text};
}

/* ------------------------------------------------------------------ values */

static void put_ids(struct ask_ids *to, const json_t *list)
{
    size_t i;
    json_t *v;
    to->n = json_array_size(list);
    to->ids = mem_array(to->n, sizeof(*to->ids));
    json_array_foreach(list, i, v) to->ids[i] = (uint32_t)json_integer_value(v);
}

static void put_texts(struct ask_texts *to, const json_t *texts)
{
    size_t i;
    json_t *v;
    to->n = json_is_string(texts) ? 1 : json_array_size(texts);
    to->texts = mem_array(to->n, sizeof(*to->texts));
    if (json_is_string(texts))
        to->texts[0] = bytes_of(texts);
    json_array_foreach(texts, i, v) to->texts[i] = bytes_of(v);
}

static void put_biases(struct ask_message *b, const json_t *biases)
{
    size_t n = json_object_size(biases), i = 0;
    const char *key;
    json_t *v;
    b->bias = mem_array(n, sizeof(*b->bias));
    b->bias_list = mem_array(n, sizeof(*b->bias_list));
    json_object_foreach((json_t *)(uintptr_t)biases, key, v)
    {
        tandem__v1__logit_bias__init(&b->bias[i]);
        b->bias[i].id = (uint32_t)strtoul(key, NULL, 10);
        b->bias[i].bias = (float)json_number_value(v);
        b->bias_list[i] = &b->bias[i];
        i++;
    }
    b->sampling.n_logit_bias = n;
    b->sampling.logit_bias = b->bias_list;
}

static void put_messages(struct ask_message *b, const json_t *list)
{
    size_t n = json_array_size(list), i;
    json_t *v;
    b->messages = mem_array(n, sizeof(*b->messages));
    b->message_list = mem_array(n, sizeof(*b->message_list));
    json_array_foreach(list, i, v)
    {
        bool plain = json_object_size(v) == 2 && json_is_string(json_object_get(v, "role")) &&
                     json_is_string(json_object_get(v, "content"));
        tandem__v1__chat_message__init(&b->messages[i]);
        if (plain) {
            b->messages[i].role = bytes_of(json_object_get(v, "role"));
            b->messages[i].content = bytes_of(json_object_get(v, "content"));
        } else {
            b->messages[i].json = dumped(b, v);
        }
        b->message_list[i] = &b->messages[i];
    }
    b->chat.n_messages = n;
    b->chat.messages = b->message_list;
}

/* The label that is returned is the client's own. The server's label is for logs; a part of it is enough. */
static void put_label(ProtobufCBinaryData *to, const json_t *v)
{
    *to = bytes_of(v);
    if (to->len > ASK_MAX_LABEL_BYTES)
        to->len = ASK_MAX_LABEL_BYTES;
}

static void put_param(struct ask_message *b, const struct ask_param *p, const json_t *v)
{
    void *at = (char *)b + p->at;
    if (p->case_at)
        memcpy((char *)b + p->case_at, &p->present, sizeof(p->present));
    switch (p->type) {
    case ASK_BOOL:
        *(protobuf_c_boolean *)at = json_is_true(v);
        break;
    case ASK_WHOLE:
    case ASK_MS:
        *(uint32_t *)at = (uint32_t)json_integer_value(v); /* also priority: an int32 with the same bits */
        break;
    case ASK_NUMBER:
        *(float *)at = (float)json_number_value(v);
        break;
    case ASK_LIMIT_MS:
        *(double *)at = json_number_value(v);
        break;
    case ASK_SEED:
        *(uint64_t *)at = ask_seed_value(v);
        break;
    case ASK_TEXT:
        *(ProtobufCBinaryData *)at = bytes_of(v);
        break;
    case ASK_TEXTS:
        put_texts(at, v);
        break;
    case ASK_IDS:
        put_ids(at, v);
        break;
    case ASK_BIASES:
        put_biases(b, v);
        break;
    case ASK_MESSAGES:
        put_messages(b, v);
        break;
    case ASK_LIST:
    case ASK_OBJECT:
        *(ProtobufCBinaryData *)at = dumped(b, v);
        break;
    case ASK_LABEL:
        put_label(at, v);
        break;
    }
}

/* ----------------------------------------------------------------- message */

/* A router that does not know fractions gets the limit rounded up; rounded down, a short limit would
 * become 0, which is none. */
static uint32_t rounded_up(double ms)
{
    return (uint32_t)fmin(ceil(ms), UINT32_MAX);
}

void ask_limits(Tandem__V1__Slo *slo, double ttft_ms, double tpot_ms)
{
    slo->ttft_ms = rounded_up(ttft_ms);
    slo->tpot_ms = rounded_up(tpot_ms);
    slo->exact_ttft_ms = ttft_ms;
    slo->exact_tpot_ms = tpot_ms;
}

static struct ask_message *new_message(void)
{
    struct ask_message *b = mem_zalloc(sizeof(*b));
    tandem__v1__generate_request__init(&b->m);
    tandem__v1__token_prompt__init(&b->tokens);
    tandem__v1__chat_prompt__init(&b->chat);
    tandem__v1__sampling__init(&b->sampling);
    tandem__v1__stopping__init(&b->stopping);
    tandem__v1__slo__init(&b->slo);
    tandem__v1__structured__init(&b->structured);
    b->m.sampling = &b->sampling;
    b->m.stopping = &b->stopping;
    b->m.slo = &b->slo;
    b->m.want_ids = true;
    b->generation_prompt = true;
    return b;
}

static enum td_status put_member(struct ask_message *b, const json_t *request, const char *name, const json_t *v,
                                 struct td_error *e)
{
    const struct ask_param *p = ask_param_find(name);
    if (!p)
        return td_fail(e, TD_ERR_INVALID, "%.100s: no such member", name);
    enum td_status s = ask_param_check(p, name, v, e);
    const char *rival = json_is_false(v) ? NULL : ask_param_rival(request, p);
    if (!s && rival)
        s = td_fail(e, TD_ERR_INVALID, "%s: can't be given together with %s", name, rival);
    if (!s && p->needs && !json_object_get(request, p->needs))
        s = td_fail(e, TD_ERR_INVALID, "%s: has a meaning only together with %s", name, p->needs);
    if (!s)
        put_param(b, p, v);
    return s;
}

static enum td_status choose_prompt(struct ask_message *b, const json_t *request, struct td_error *e)
{
    b->chat.no_generation_prompt = !b->generation_prompt;
    if (json_object_get(request, "prompt_ids")) {
        b->m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TOKENS;
        b->m.tokens = &b->tokens;
    } else if (json_object_get(request, "messages")) {
        b->m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_CHAT;
        b->m.chat = &b->chat;
    } else if (json_object_get(request, "prompt")) {
        b->m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT;
    } else {
        return td_fail(e, TD_ERR_INVALID, "prompt: none of prompt, prompt_ids, messages is there");
    }
    return TD_OK;
}

enum td_status ask_message_make(json_t *request, struct ask_message **out, struct td_error *e)
{
    struct ask_message *b = new_message();
    enum td_status s = TD_OK;
    const char *name;
    json_t *v;
    json_object_foreach(request, name, v) if ((s = put_member(b, request, name, v, e))) break;
    if (!s)
        s = choose_prompt(b, request, e);
    if (s) {
        ask_message_free(b);
        return s;
    }
    if (b->greedy) {
        b->sampling.has_temperature_case = TANDEM__V1__SAMPLING__HAS_TEMPERATURE_TEMPERATURE;
        b->sampling.temperature = 0;
    }
    if (b->structured.kind_case)
        b->m.structured = &b->structured;
    ask_limits(&b->slo, b->ttft_ms, b->tpot_ms);
    *out = b;
    return TD_OK;
}

Tandem__V1__GenerateRequest *ask_message_get(struct ask_message *b)
{
    return &b->m;
}

void ask_message_free(struct ask_message *b)
{
    if (!b)
        return;
    for (size_t i = 0; i < b->n_dumps; i++)
        free(b->dumps[i]);
    free(b->dumps);
    free(b->tokens.ids);
    free(b->messages);
    free(b->message_list);
    free(b->bias);
    free(b->bias_list);
    free(b->sampling.allowed_ids);
    free(b->sampling.bad_words);
    free(b->stopping.stop);
    free(b->stopping.stop_ids);
    free(b);
}
