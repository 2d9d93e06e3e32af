/*
 * Chat messages to prompt text. ChatML is rendered by hand; a model whose chat template is anything else is refused with a
 * clear error when a chat is asked for (text and ids prompts still work).
 *
 *   <|im_start|>ROLE\nCONTENT<|im_end|>\n ... <|im_start|>assistant\n
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/mem.h"
#include "base/status.h"

struct chat_message {
    const char *role;    /* NUL-terminated: "system", "user", "assistant" */
    const char *content; /* bytes, may hold U+0000 */
    size_t content_len_bytes;
};

struct chat_template; /* what tokenizer_config.json (or chat_template.jinja) holds */

/* Reads DIR; a model without a template, or with another than ChatML, still opens: rendering then says why not. */
enum td_status chat_template_open(const char *dir, struct chat_template **out, struct td_error *error_out);
void chat_template_close(struct chat_template *c);

/* TD_ERR_UNSUPPORTED (what the template is), TD_ERR_INVALID (role, not UTF-8, no messages). Appends to out. */
enum td_status chat_template_render(const struct chat_template *c, const struct chat_message *messages,
                                    size_t n_messages, bool add_generation_prompt, struct bytes *out,
                                    struct td_error *error_out);
