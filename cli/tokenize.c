/*
 * tandem tokenize: text to ids and back, with a directory's tokenizer.json or through a router.
 *
 * --jsonl answers each line of input with one line. The members of a line say what is asked for:
 *   {"id", "text" or "text_base64", "add_special_tokens"}   -> {"id", "ids"}
 *   {"id", "ids", "skip_special_tokens"}                     -> {"id", "text"}
 *   {"id", "ids", "skip_special_tokens", "stream": true}     -> {"id", "pieces"}: the text that each id
 *                                                            releases, then the rest at the end
 *   {"id", "messages", "tools", "variables", "add_generation_prompt"} -> {"id", "ids", "text"}
 * A line that can't be answered gets {"id", "error", "line"}.
 */
#include <openssl/evp.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "model/chat.h"
#include "model/tokenizer.h"

struct tokenize_options {
    const char *tokenizer, *router, *api_key, *chat_template;
    bool jsonl, json, special;
};

#define AT(member) offsetof(struct tokenize_options, member)
static const struct option TABLE[] = {
    {"tokenizer", OPT_STRING, AT(tokenizer), NULL, "DIR", 0, 0,
     "directory with tokenizer.json; default: ask the router"},
    {"router", OPT_ADDRESS, AT(router), NULL, "HOST:PORT", 0, 0, "default: $TANDEM_ROUTER, else " CLI_DEFAULT_ROUTER},
    CLI_API_KEY_OPTION(AT(api_key)),
    {"chat-template", OPT_STRING, AT(chat_template), NULL, "FILE", 0, 0,
     "with --tokenizer: template instead of the model's own; none: no template"},
    {"add-special-tokens", OPT_BOOL, AT(special), "true", NULL, 0, 0,
     "adds the tokens that the model puts around a text"},
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "prints ids as JSON"},
    {"jsonl", OPT_BOOL, AT(jsonl), NULL, NULL, 0, 0, "reads requests from standard input, one JSON object a line"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

struct local_tokenizer {
    struct tokenizer *tokenizer;
    struct chat_template *chat;
    bool special; /* whether special tokens are added if a request does not say */
};

static json_t *json_ids(const uint32_t *ids, size_t n)
{
    json_t *a = json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(a, json_integer(ids[i]));
    return a;
}

static enum td_status input_text(json_t *request, struct bytes *out, struct td_error *e)
{
    json_t *text = json_object_get(request, "text"), *base64 = json_object_get(request, "text_base64");
    if (json_is_string(text)) {
        bytes_append(out, json_string_value(text), json_string_length(text));
        return TD_OK;
    }
    if (text)
        return td_fail(e, TD_ERR_INVALID, "text: must be a text");
    if (!json_is_string(base64))
        return td_fail(e, TD_ERR_INVALID, "text_base64: must be a text");
    size_t len = json_string_length(base64);
    unsigned char *raw = mem_zalloc(len + 4);
    int n = EVP_DecodeBlock(raw, (const unsigned char *)json_string_value(base64), (int)len);
    for (size_t i = len; n > 0 && i-- > 0 && json_string_value(base64)[i] == '=';)
        n--;
    if (n >= 0)
        bytes_append(out, raw, (size_t)n);
    free(raw);
    return n < 0 ? td_fail(e, TD_ERR_INVALID, "text_base64: not base64") : TD_OK;
}

static enum td_status answer_encode(struct local_tokenizer *l, json_t *request, json_t *answer, struct td_error *e)
{
    struct bytes text = {0};
    struct token_ids ids = {0};
    json_t *said = json_object_get(request, "add_special_tokens");
    enum td_status s = input_text(request, &text, e);
    if (!s)
        s = tokenizer_encode(l->tokenizer, text.data, text.len, said ? json_is_true(said) : l->special, &ids, e);
    if (!s)
        json_object_set_new(answer, "ids", json_ids(ids.ids, ids.n));
    token_ids_free(&ids);
    bytes_free(&text);
    return s;
}

static enum td_status answer_chat(struct local_tokenizer *l, json_t *request, json_t *answer, struct td_error *e)
{
    struct bytes text = {0};
    struct token_ids ids = {0};
    const struct chat_request q = {.messages = json_object_get(request, "messages"),
                                   .tools = json_object_get(request, "tools"),
                                   .variables = json_object_get(request, "variables"),
                                   .add_generation_prompt =
                                       json_is_true(json_object_get(request, "add_generation_prompt"))};
    enum td_status s = chat_template_render(l->chat, &q, &text, e);
    if (!s)
        s = tokenizer_encode(l->tokenizer, text.data ? text.data : "", text.len, false, &ids, e);
    if (!s) {
        json_object_set_new(answer, "ids", json_ids(ids.ids, ids.n));
        json_object_set_new(answer, "text", ask_text_json(text.data, text.len));
    }
    token_ids_free(&ids);
    bytes_free(&text);
    return s;
}

static json_t *pieces_of(struct local_tokenizer *l, const struct token_ids *ids, bool skip)
{
    struct token_stream *stream = token_stream_open(l->tokenizer, skip);
    struct bytes piece = {0};
    json_t *pieces = json_array();
    for (size_t i = 0; i <= ids->n; i++) {
        bytes_clear(&piece);
        if (i < ids->n)
            token_stream_push(stream, ids->ids[i], &piece);
        else
            token_stream_flush(stream, &piece);
        json_array_append_new(pieces, ask_text_json(piece.data, piece.len));
    }
    bytes_free(&piece);
    token_stream_close(stream);
    return pieces;
}

static enum td_status answer_decode(struct local_tokenizer *l, json_t *request, json_t *answer, struct td_error *e)
{
    json_t *v;
    bool skip = json_is_true(json_object_get(request, "skip_special_tokens"));
    struct token_ids ids = {0};
    struct bytes text = {0};
    enum td_status s = TD_OK;
    size_t i;
    if (!json_is_array(json_object_get(request, "ids")))
        s = td_fail(e, TD_ERR_INVALID, "ids: must be a list");
    json_array_foreach(json_object_get(request, "ids"), i, v)
    {
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > UINT32_MAX)
            s = td_fail(e, TD_ERR_INVALID, "ids[%zu]: not an id", i);
        else
            token_ids_push(&ids, (uint32_t)json_integer_value(v));
    }
    if (!s && json_is_true(json_object_get(request, "stream"))) {
        json_object_set_new(answer, "pieces", pieces_of(l, &ids, skip));
    } else if (!s) {
        tokenizer_decode(l->tokenizer, ids.ids, ids.n, skip, &text);
        json_object_set_new(answer, "text", ask_text_json(text.data, text.len));
    }
    token_ids_free(&ids);
    bytes_free(&text);
    return s;
}

/* False: the line is no request. A request that fails, such as a text that can't be tokenized, still counts
 * as answered. */
static bool answer_line(struct local_tokenizer *l, const struct bytes *line, uint64_t number)
{
    json_error_t je;
    struct td_error e = {{0}};
    json_t *request = json_loadb(line->data, line->len, JSON_ALLOW_NUL, &je), *answer = json_object();
    enum td_status s = TD_OK;
    if (!json_is_object(request))
        s = td_fail(&e, TD_ERR_INVALID, "not a JSON object: %s", je.text);
    else if (json_object_get(request, "messages"))
        s = answer_chat(l, request, answer, &e);
    else if (json_object_get(request, "ids"))
        s = answer_decode(l, request, answer, &e);
    else if (json_object_get(request, "text") || json_object_get(request, "text_base64"))
        s = answer_encode(l, request, answer, &e);
    else
        s = td_fail(&e, TD_ERR_INVALID, "text, text_base64, ids or messages is missing");
    bool is_request = json_object_get(request, "messages") || json_object_get(request, "ids") ||
                      json_object_get(request, "text") || json_object_get(request, "text_base64");
    if (json_object_get(request, "id"))
        json_object_set(answer, "id", json_object_get(request, "id"));
    if (s)
        json_object_set_new(answer, "error", ask_text_json(e.text, strlen(e.text)));
    if (s)
        json_object_set_new(answer, "line", json_integer((json_int_t)number));
    cli_print_json(answer);
    json_decref(request);
    if (!is_request)
        cli_fail("tokenize", "line %" PRIu64 ": %s", number, e.text);
    return is_request;
}

static int run_jsonl(struct local_tokenizer *l)
{
    struct bytes line = {0};
    bool good = true;
    for (uint64_t number = 1; !ferror(stdout) && cli_read_line(&line); number++)
        if (line.len)
            good &= answer_line(l, &line, number);
    bytes_free(&line);
    return good ? 0 : 1;
}

static int print_ids(const uint32_t *ids, size_t n, bool json)
{
    if (json) {
        json_t *o = json_object();
        json_object_set_new(o, "ids", json_ids(ids, n));
        cli_print_json(o);
        return 0;
    }
    for (size_t i = 0; i < n; i++)
        printf("%s%u", i ? " " : "", ids[i]);
    putchar('\n');
    return 0;
}

static int by_router(const struct tokenize_options *o, const char *text)
{
    struct rpc_client *c = cli_connect("tokenize", cli_router(o->router), o->api_key);
    struct td_error e = {{0}};
    ProtobufCMessage *m = NULL;
    Tandem__V1__TokenizeRequest request = TANDEM__V1__TOKENIZE_REQUEST__INIT;
    if (!c)
        return 1;
    request.input_case = TANDEM__V1__TOKENIZE_REQUEST__INPUT_TEXT;
    request.text = (ProtobufCBinaryData){strlen(text), (uint8_t *)(uintptr_t)text};
    request.has_add_special_tokens_case = TANDEM__V1__TOKENIZE_REQUEST__HAS_ADD_SPECIAL_TOKENS_ADD_SPECIAL_TOKENS;
    request.add_special_tokens = o->special;
    enum rpc_code code = rpc_unary(c, "/tandem.v1.Tandem/Tokenize", &request.base,
                                   &tandem__v1__tokenize_response__descriptor, 10000, &m, &e);
    int exit_code;
    if (code) {
        exit_code = cli_rpc_fail("tokenize", cli_router(o->router), code, e.text);
    } else {
        const Tandem__V1__TokenizeResponse *answer = (const Tandem__V1__TokenizeResponse *)m;
        exit_code = print_ids(answer->ids, answer->n_ids, o->json);
        protobuf_c_message_free_unpacked(m, NULL);
    }
    rpc_client_close(c);
    return exit_code;
}

static int by_directory(const struct tokenize_options *o, const char *text)
{
    struct local_tokenizer l = {.special = o->special};
    struct td_error e = {{0}};
    struct token_ids ids = {0};
    enum td_status s = tokenizer_open(o->tokenizer, &l.tokenizer, &e);
    if (!s)
        s = chat_template_open(o->tokenizer, o->chat_template, &l.chat, &e);
    if (!s && !o->jsonl)
        s = tokenizer_encode(l.tokenizer, text, strlen(text), o->special, &ids, &e);
    int exit_code = s          ? cli_fail("tokenize", "%s", e.text)
                    : o->jsonl ? run_jsonl(&l)
                               : print_ids(ids.ids, ids.n, o->json);
    token_ids_free(&ids);
    chat_template_close(l.chat);
    tokenizer_close(l.tokenizer);
    return exit_code;
}

int cli_tokenize(int argc, char **argv)
{
    struct tokenize_options o = {0};
    const char **rest = mem_array((size_t)argc, sizeof(*rest));
    int n_rest, exit_code;
    if (!cli_options("tokenize", "[options] [TEXT]", "Turns text into token ids.", TABLE, argc, argv, &o, rest, &n_rest,
                     &exit_code)) {
        free(rest);
        return exit_code;
    }
    struct bytes text = {0};
    for (int i = 0; i < n_rest; i++)
        bytes_printf(&text, "%s%s", i ? " " : "", rest[i]);
    free(rest);
    if (o.jsonl && !o.tokenizer)
        exit_code = cli_usage("tokenize", "--jsonl needs --tokenizer DIR");
    else if (!o.jsonl && !n_rest)
        exit_code = cli_usage("tokenize", "give a TEXT, or --jsonl");
    else
        exit_code = o.tokenizer ? by_directory(&o, text.data ? text.data : "") : by_router(&o, text.data);
    bytes_free(&text);
    return exit_code;
}
