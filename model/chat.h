/*
 * Chat messages to prompt text, by the model's own template (template.h): chat_template.jinja, or
 * chat_template of tokenizer_config.json, as transformers' apply_chat_template does it. In a list of
 * templates, tool_use is the one for requests with tools.
 *
 * A template sees messages, tools, documents, add_generation_prompt, the tokenizer's special tokens
 * (bos_token, ...), and variables that the request adds (enable_thinking, ...).
 *
 * Threads: immutable after opening.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/mem.h"
#include "base/status.h"

struct chat_template;

/*
 * Reads DIR. file: a template to use instead of the model's; "none": no template; NULL: the model's own. A
 * model without a template still opens: rendering then fails. TD_ERR_UNSUPPORTED, TD_ERR_CORRUPT: the
 * template is not understood, with line and column.
 */
enum td_status chat_template_open(const char *dir, const char *file, struct chat_template **out,
                                  struct td_error *error_out);
void chat_template_close(struct chat_template *c); /* NULL is fine */
bool chat_template_present(const struct chat_template *c);
/* The text of the template for requests with tools, or of the only one; "": there is none. */
const char *chat_template_source(const struct chat_template *c);
/* The text of a special token by its name in tokenizer_config.json, such as "eos_token"; "": none. */
const char *chat_template_special(const struct chat_template *c, const char *name);

/* Borrowed. Texts are UTF-8, as jansson keeps them. */
struct chat_request {
    json_t *messages;  /* a list of objects with at least a role */
    json_t *tools;     /* a list of objects; NULL: none */
    json_t *variables; /* an object; NULL: none */
    bool add_generation_prompt;
};

/*
 * Appends to out. TD_ERR_UNSUPPORTED: there is no template. TD_ERR_INVALID: a field is wrong, or the template
 * raised an error, with its text.
 */
enum td_status chat_template_render(const struct chat_template *c, const struct chat_request *request,
                                    struct bytes *out, struct td_error *error_out);
