/* Requests with one short answer: models, tokenize, detokenize (the latter two as vLLM has them). */
#include <stdlib.h>
#include <string.h>

#include "gateway/members.h"

/* ------------------------------------------------------------------ models */

/* Decodes %XX; the caller frees it. */
static char *decode(const char *text, size_t n)
{
    static const char HEX[] = "0123456789abcdef";
    char *out = mem_zalloc(n + 1), *to = out;
    for (size_t i = 0; i < n; i++) {
        const char *high = i + 2 < n && text[i] == '%' && text[i + 1] ? strchr(HEX, text[i + 1] | 0x20) : NULL,
                   *low = high && text[i + 2] ? strchr(HEX, text[i + 2] | 0x20) : NULL;
        *to++ = low ? (char)((high - HEX) << 4 | (low - HEX)) : text[i];
        i += low ? 2 : 0;
    }
    return out;
}

static enum td_status read_models(struct gw_task *t, json_t *body, struct td_error *e)
{
    static const char PREFIX[] = "/v1/models/";
    Tandem__V1__ListModelsRequest m;
    const char *target = http_target(t->conn);
    (void)body, (void)e;
    tandem__v1__list_models_request__init(&m);
    if (!strncmp(target, PREFIX, strlen(PREFIX)))
        t->model = decode(target + strlen(PREFIX), strcspn(target + strlen(PREFIX), "?"));
    gw_task_calls(t, 1);
    gw_task_request(t, 0, &m.base);
    return TD_OK;
}

static json_t *model_json(const struct gw_task *t, ProtobufCBinaryData name, ProtobufCBinaryData parent,
                          const Tandem__V1__ModelInfo *info)
{
    json_t *root = parent.len ? ask_text_json(parent.data, parent.len) : ask_text_json(name.data, name.len);
    return json_pack("{s:o, s:s, s:I, s:s, s:o, s:o, s:i}", "id", ask_text_json(name.data, name.len), "object", "model",
                     "created", (json_int_t)t->created_s, "owned_by", "tandem", "root", root, "parent",
                     parent.len ? ask_text_json(parent.data, parent.len) : json_null(), "max_model_len",
                     (int)info->max_context_tokens);
}

static json_t *list_models(const struct gw_task *t, const Tandem__V1__ListModelsResponse *m)
{
    json_t *list = json_array();
    for (size_t i = 0; i < m->n_models; i++) {
        const Tandem__V1__ModelInfo *info = m->models[i];
        json_array_append_new(list, model_json(t, info->name, (ProtobufCBinaryData){0}, info));
        for (size_t k = 0; k < info->n_loras; k++)
            json_array_append_new(list, model_json(t, info->loras[k], info->name, info));
    }
    return list;
}

static void whole_models(struct gw_task *t, struct bytes *out)
{
    json_t *list = list_models(t, (const Tandem__V1__ListModelsResponse *)t->calls[0].response), *found = NULL, *v;
    size_t i;
    if (!t->model) {
        ask_json_append(out, json_pack("{s:s, s:o}", "object", "list", "data", list));
        return;
    }
    json_array_foreach(list, i, v) if (!strcmp(json_string_value(json_object_get(v, "id")), t->model)) found = v;
    if (found)
        ask_json_append(out, json_incref(found));
    else
        gw_task_fail(t, 404, "model: there is no such model");
    json_decref(list);
}

const struct gw_api GW_MODELS = {.path = "/v1/models",
                                 .rpc = "/tandem.v1.Tandem/ListModels",
                                 .response = &tandem__v1__list_models_response__descriptor,
                                 .read = read_models,
                                 .whole = whole_models};

/* As vLLM has it: what clients need that render chats and count tokens themselves. */
static enum td_status read_info(struct gw_task *t, json_t *body, struct td_error *e)
{
    Tandem__V1__ListModelsRequest m;
    (void)body, (void)e;
    tandem__v1__list_models_request__init(&m);
    m.want_template = true;
    gw_task_calls(t, 1);
    gw_task_request(t, 0, &m.base);
    return TD_OK;
}

static json_t *text_or_null(ProtobufCBinaryData text)
{
    return text.len ? ask_text_json(text.data, text.len) : json_null();
}

static void whole_info(struct gw_task *t, struct bytes *out)
{
    const Tandem__V1__ListModelsResponse *m = (const Tandem__V1__ListModelsResponse *)t->calls[0].response;
    const Tandem__V1__ModelInfo *info = m->n_models ? m->models[0] : NULL;
    if (!info) {
        gw_task_fail(t, 404, "model: there is none that this key may use");
        return;
    }
    ask_json_append(out, json_pack("{s:o, s:o, s:o, s:I}", "bos_token", text_or_null(info->bos_token), "eos_token",
                                   text_or_null(info->eos_token), "chat_template", text_or_null(info->chat_template),
                                   "model_max_length", (json_int_t)info->max_context_tokens));
}

const struct gw_api GW_TOKENIZER_INFO = {.path = "/tokenizer_info",
                                         .rpc = "/tandem.v1.Tandem/ListModels",
                                         .response = &tandem__v1__list_models_response__descriptor,
                                         .read = read_info,
                                         .whole = whole_info};

/* ---------------------------------------------------------------- tokenize */

static const struct gw_member TOKENIZE[] = {
    {"model", "model", NULL},
    {"prompt", "prompt", NULL},
    {"messages", "messages", gw_member_messages},
    {"add_special_tokens", "add_special_tokens", NULL},
    {"add_generation_prompt", "add_generation_prompt", NULL},
    {"chat_template_kwargs", "variables", NULL},
    {"return_token_strs", NULL, gw_member_false},
    {NULL, NULL, NULL},
};

/* Reads the members by the table. The message borrows from *ask_out; the caller frees both, in any case. */
static enum td_status read_by(struct gw_task *t, const struct gw_member *table, json_t *body, json_t **ask_out,
                              struct ask_message **out, struct td_error *e)
{
    struct gw_reading r = {.task = t, .ask = *ask_out = json_object(), .table = table};
    enum td_status s = gw_members_read(&r, body, e);
    return s ? s : ask_message_make(r.ask, out, e);
}

void gw_task_tokenize(struct gw_task *t, const Tandem__V1__GenerateRequest *m)
{
    Tandem__V1__TokenizeRequest q;
    tandem__v1__tokenize_request__init(&q);
    q.model = m->model;
    if (m->prompt_case == TANDEM__V1__GENERATE_REQUEST__PROMPT_CHAT) {
        q.input_case = TANDEM__V1__TOKENIZE_REQUEST__INPUT_CHAT;
        q.chat = m->chat;
    } else {
        q.input_case = TANDEM__V1__TOKENIZE_REQUEST__INPUT_TEXT;
        q.text = m->text;
    }
    if (m->has_add_special_tokens_case) {
        q.has_add_special_tokens_case = TANDEM__V1__TOKENIZE_REQUEST__HAS_ADD_SPECIAL_TOKENS_ADD_SPECIAL_TOKENS;
        q.add_special_tokens = m->add_special_tokens;
    }
    gw_task_calls(t, 1);
    gw_task_request(t, 0, &q.base);
}

static enum td_status read_tokenize(struct gw_task *t, json_t *body, struct td_error *e)
{
    struct ask_message *m = NULL;
    json_t *ask;
    enum td_status s = read_by(t, TOKENIZE, body, &ask, &m, e);
    if (!s)
        gw_task_tokenize(t, ask_message_get(m));
    ask_message_free(m);
    json_decref(ask);
    return s;
}

static void whole_tokenize(struct gw_task *t, struct bytes *out)
{
    const Tandem__V1__TokenizeResponse *m = (const Tandem__V1__TokenizeResponse *)t->calls[0].response;
    bytes_printf(out, "{\"count\":%zu,\"tokens\":[", m->n_ids);
    for (size_t i = 0; i < m->n_ids; i++)
        bytes_printf(out, "%s%u", i ? "," : "", m->ids[i]);
    bytes_printf(out, "]}");
}

const struct gw_api GW_TOKENIZE = {.path = "/tokenize",
                                   .rpc = "/tandem.v1.Tandem/Tokenize",
                                   .response = &tandem__v1__tokenize_response__descriptor,
                                   .read = read_tokenize,
                                   .whole = whole_tokenize};

/* -------------------------------------------------------------- detokenize */

static const struct gw_member DETOKENIZE[] = {
    {"model", "model", NULL},
    {"tokens", "prompt_ids", NULL},
    {"skip_special_tokens", "skip_special_tokens", NULL},
    {NULL, NULL, NULL},
};

static enum td_status read_detokenize(struct gw_task *t, json_t *body, struct td_error *e)
{
    Tandem__V1__DetokenizeRequest q;
    struct ask_message *m = NULL;
    json_t *ask;
    if (!json_object_get(body, "tokens"))
        return td_fail(e, TD_ERR_INVALID, "tokens: is missing");
    enum td_status s = read_by(t, DETOKENIZE, body, &ask, &m, e);
    if (!s) {
        const Tandem__V1__GenerateRequest *g = ask_message_get(m);
        tandem__v1__detokenize_request__init(&q);
        q.model = g->model;
        q.ids = g->tokens->ids;
        q.n_ids = g->tokens->n_ids;
        q.skip_special_tokens = g->skip_special_tokens;
        gw_task_calls(t, 1);
        gw_task_request(t, 0, &q.base);
    }
    ask_message_free(m);
    json_decref(ask);
    return s;
}

static void whole_detokenize(struct gw_task *t, struct bytes *out)
{
    const Tandem__V1__DetokenizeResponse *m = (const Tandem__V1__DetokenizeResponse *)t->calls[0].response;
    bytes_printf(out, "{\"prompt\":\"");
    ask_text_escape(out, m->text.data, m->text.len);
    bytes_printf(out, "\"}");
}

const struct gw_api GW_DETOKENIZE = {.path = "/detokenize",
                                     .rpc = "/tandem.v1.Tandem/Detokenize",
                                     .response = &tandem__v1__detokenize_response__descriptor,
                                     .read = read_detokenize,
                                     .whole = whole_detokenize};
