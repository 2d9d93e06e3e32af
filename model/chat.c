#include "model/chat.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/*
 * The ChatML templates that published models have, without white space outside of their texts. The second begins with a
 * system message where the conversation has none.
 */
struct known_template {
    const char *source;
    const char *default_system;
};

static const struct known_template KNOWN[] = {
    {"{%formessageinmessages%}{{'<|im_start|>'+message['role']+'\\n'+message['content']+'<|im_end|>'+'\\n'}}{%endfor%}"
     "{%ifadd_generation_prompt%}{{'<|im_start|>assistant\\n'}}{%endif%}",
     NULL},
    {"{%formessageinmessages%}{%ifloop.firstandmessages[0]['role']!='system'%}{{'<|im_start|>system\\nYouareahelpful"
     "assistant.<|im_end|>\\n'}}{%endif%}{{'<|im_start|>'+message['role']+'\\n'+message['content']+'<|im_end|>'+'\\n'}}"
     "{%endfor%}{%ifadd_generation_prompt%}{{'<|im_start|>assistant\\n'}}{%endif%}",
     "You are a helpful assistant."},
};

struct chat_template {
    const struct known_template *known; /* NULL: none, or another */
    bool present;
    char begins[48]; /* of a template that we don't render */
};

/* Drops spaces and writes line feeds as \n, as they may stand either way inside the template's texts. */
static void squeeze(const char *in, size_t len, struct bytes *out)
{
    for (size_t i = 0; i < len; i++) {
        if (in[i] == '\n')
            bytes_append(out, "\\n", 2);
        else if (in[i] != ' ' && in[i] != '\t' && in[i] != '\r')
            bytes_append(out, &in[i], 1);
    }
}

static void recognise(struct chat_template *c, const char *source, size_t len)
{
    struct bytes b = {0};
    squeeze(source, len, &b);
    c->present = true;
    snprintf(c->begins, sizeof(c->begins), "%.44s", source);
    for (size_t i = 0; i < sizeof(KNOWN) / sizeof(KNOWN[0]); i++)
        if (b.len == strlen(KNOWN[i].source) && !memcmp(b.data, KNOWN[i].source, b.len))
            c->known = &KNOWN[i];
    bytes_free(&b);
}

enum td_status chat_template_open(const char *dir, struct chat_template **out, struct td_error *error_out)
{
    char path[4096], *data = NULL;
    size_t len = 0;
    struct chat_template *c = mem_zalloc(sizeof(*c));
    snprintf(path, sizeof(path), "%s/chat_template.jinja", dir);
    if (!file_read(path, 16 << 20, &data, &len, NULL)) {
        recognise(c, data, len);
        free(data);
        *out = c;
        return TD_OK;
    }
    snprintf(path, sizeof(path), "%s/tokenizer_config.json", dir);
    enum td_status s = file_read(path, 64 << 20, &data, &len, error_out);
    if (s && s != TD_ERR_NOT_FOUND) {
        free(c);
        return s;
    }
    if (!s) {
        json_error_t je;
        json_t *root = json_loadb(data, len, JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, &je),
               *t = json_object_get(root, "chat_template"); /* model_max_length may be 10^30 */
        ;
        free(data);
        if (!json_is_object(root)) {
            json_decref(root);
            free(c);
            return td_fail(error_out, TD_ERR_CORRUPT, "tokenizer_config.json: line %d: %s", je.line, je.text);
        }
        if (json_is_string(t))
            recognise(c, json_string_value(t), json_string_length(t));
        json_decref(root);
    }
    *out = c;
    return TD_OK;
}

void chat_template_close(struct chat_template *c)
{
    free(c);
}

static enum td_status check(const struct chat_template *c, const struct chat_message *m, size_t n, struct td_error *e)
{
    if (!c->present)
        return td_fail(e, TD_ERR_UNSUPPORTED, "chat: the model has no chat template");
    if (!c->known)
        return td_fail(e, TD_ERR_UNSUPPORTED, "chat: the model's template is not ChatML; it begins '%s'", c->begins);
    if (!n)
        return td_fail(e, TD_ERR_INVALID, "chat.messages: empty");
    for (size_t i = 0; i < n; i++) {
        static const char *const ROLES[] = {"system", "user", "assistant"};
        bool known = false;
        for (int r = 0; r < 3; r++)
            known |= !strcmp(m[i].role, ROLES[r]);
        if (!known)
            return td_fail(e, TD_ERR_INVALID, "chat.messages[%zu].role: '%.20s' is none of system, user, assistant", i,
                           m[i].role);
        for (size_t at = 0; at < m[i].content_len_bytes;) {
            utf8proc_int32_t ch;
            utf8proc_ssize_t step = utf8proc_iterate((const utf8proc_uint8_t *)m[i].content + at,
                                                     (utf8proc_ssize_t)(m[i].content_len_bytes - at), &ch);
            if (step < 1)
                return td_fail(e, TD_ERR_INVALID, "chat.messages[%zu].content: not UTF-8 at byte %zu", i, at);
            at += (size_t)step;
        }
    }
    return TD_OK;
}

static void turn(struct bytes *out, const char *role, const char *content, size_t len)
{
    bytes_printf(out, "<|im_start|>%s\n", role);
    bytes_append(out, content, len);
    bytes_printf(out, "<|im_end|>\n");
}

enum td_status chat_template_render(const struct chat_template *c, const struct chat_message *messages,
                                    size_t n_messages, bool add_generation_prompt, struct bytes *out,
                                    struct td_error *error_out)
{
    enum td_status s = check(c, messages, n_messages, error_out);
    if (s)
        return s;
    const char *system = c->known->default_system;
    if (system && strcmp(messages[0].role, "system"))
        turn(out, "system", system, strlen(system));
    for (size_t i = 0; i < n_messages; i++)
        turn(out, messages[i].role, messages[i].content, messages[i].content_len_bytes);
    if (add_generation_prompt)
        bytes_printf(out, "<|im_start|>assistant\n");
    return TD_OK;
}
