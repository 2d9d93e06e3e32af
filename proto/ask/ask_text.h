/*
 * Text of models and clients as JSON. It may contain bytes that are not UTF-8: each becomes U+FFFD.
 *
 * Threads: any. Errors: none.
 */
#pragma once

#include <jansson.h>
#include <stddef.h>

#include "base/mem.h"

json_t *ask_text_json(const void *text, size_t len_bytes); /* a JSON string */
/* Appends a value as JSON, and frees it. */
void ask_json_append(struct bytes *out, json_t *value);
/* Appends the text as the inside of a JSON string. */
void ask_text_escape(struct bytes *out, const void *text, size_t len_bytes);
