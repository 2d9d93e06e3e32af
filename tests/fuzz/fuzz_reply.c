/*
 * Answers of models: the first byte chooses the convention and what is told apart, the rest is the
 * answer. What must hold: it is told the same all at once and byte by byte, calls are of functions that
 * were offered, and their arguments are JSON objects.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "model/reply.h"

static const char *const TEMPLATES[] = {"<tool_call>",
                                        "<function=",
                                        "<arg_key>",
                                        "<|tool_call|>",
                                        "[TOOL_CALLS]",
                                        "[TOOL_CALLS][ARGS]",
                                        "\"parameters\"<|eot_id|>",
                                        "func_name1(params_name1",
                                        "<｜tool▁sep｜>",
                                        "<｜tool▁sep｜>```json",
                                        "<|channel|><|message|>",
                                        ""};
enum { N_TEMPLATES = sizeof(TEMPLATES) / sizeof(TEMPLATES[0]) };

struct told {
    struct bytes all[2]; /* text, reasoning */
    struct bytes names, arguments;
    uint32_t n;
};

static void check_arguments(const struct bytes *b)
{
    json_t *v = json_loadb(b->data ? b->data : "", b->len, JSON_ALLOW_NUL, NULL);
    if (!json_is_object(v))
        abort();
    json_decref(v);
}

static void take(struct told *t, struct reply *r)
{
    const struct reply_delta *d = reply_delta(r);
    bytes_append(&t->all[0], d->text.data ? d->text.data : "", d->text.len);
    bytes_append(&t->all[1], d->reasoning.data ? d->reasoning.data : "", d->reasoning.len);
    for (size_t i = 0; i < d->n_calls; i++) {
        if (d->calls[i].index != t->n++ || (strcmp(d->calls[i].name.data, "f") && strcmp(d->calls[i].name.data, "g")))
            abort();
        check_arguments(&d->calls[i].arguments);
        bytes_append(&t->names, d->calls[i].name.data, d->calls[i].name.len);
        bytes_append(&t->arguments, d->calls[i].arguments.data, d->calls[i].arguments.len);
    }
    reply_clear(r);
}

static struct told tell(const struct reply_params *p, const char *answer, size_t len, size_t piece)
{
    struct told t = {0};
    struct reply *r = reply_open(p);
    for (size_t at = 0; at < len; at += piece) {
        reply_feed(r, answer + at, piece < len - at ? piece : len - at);
        take(&t, r);
    }
    reply_end(r);
    take(&t, r);
    reply_close(r);
    return t;
}

static void check_same(struct bytes *a, struct bytes *b)
{
    if (a->len != b->len || (a->len && memcmp(a->data, b->data, a->len)))
        abort();
    bytes_free(a);
    bytes_free(b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static json_t *tools;
    if (!tools)
        tools = json_loads(
            "[{\"function\":{\"name\":\"f\",\"parameters\":{\"properties\":{\"a\":{\"type\":\"string\"},\"b\":{"
            "\"type\":\"integer\"}}}}},{\"name\":\"g\"}]",
            0, NULL);
    if (!size || size > 4096)
        return 0;
    const char *source = TEMPLATES[data[0] % 16 % N_TEMPLATES];
    const struct reply_params p = {.convention = convention_of(source, strlen(source)),
                                   .tools = tools,
                                   .has_reasoning = data[0] & 16,
                                   .begins_reasoning = data[0] & 32};
    struct told whole = tell(&p, (const char *)data + 1, size - 1, size),
                bytes = tell(&p, (const char *)data + 1, size - 1, 1);
    if (whole.n != bytes.n)
        abort();
    check_same(&whole.all[0], &bytes.all[0]);
    check_same(&whole.all[1], &bytes.all[1]);
    check_same(&whole.names, &bytes.names);
    check_same(&whole.arguments, &bytes.arguments);
    return 0;
}
