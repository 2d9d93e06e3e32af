/*
 * Chat templates: the Jinja that model templates use, as transformers renders them (trim_blocks, lstrip_blocks, an immutable
 * sandbox; tojson without ASCII escapes; raise_exception, strftime_now; break and continue; the generation tag).
 *
 * A template is parsed once into a tree. What this interpreter does not know - a statement, filter, test or method - is one error
 * then, with line and column. Rendering is bounded: steps, depth, memory and output (TEMPLATE_MAX_*), whatever the template does.
 *
 * Values come from JSON. A method that would change a list or a dict is refused, as the sandbox does it. What a template sees of
 * Python - how numbers, lists and texts are written, compared and sliced - is as Python has it.
 *
 * Not there: include, import, extends, block, raw, recursive loops, %-formats, async; text methods beyond those of TEMPLATE_METHODS in
 * template_methods.c.
 *
 * Threads: immutable after parsing; rendering may run on several threads at once.
 */
#pragma once

#include <jansson.h>
#include <stddef.h>
#include <time.h>

#include "base/mem.h"
#include "base/status.h"

#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION /* libFuzzer's name: the limits are met often, and soon */
enum { TEMPLATE_MAX_STEPS = 5000, TEMPLATE_MAX_OUTPUT = 16 << 10, TEMPLATE_MAX_MEMORY = 1 << 20 };
#else
enum {
    TEMPLATE_MAX_STEPS = 20 * 1000 * 1000, /* nodes of the tree visited, elements written */
    TEMPLATE_MAX_OUTPUT = 16 << 20,
    TEMPLATE_MAX_MEMORY = 128 << 20,
};
#endif
enum {
    TEMPLATE_MAX_SOURCE = 1 << 20,
    TEMPLATE_MAX_DEPTH = 150, /* of the tree, and of macros calling macros */
};

struct template;

/* TD_ERR_UNSUPPORTED or TD_ERR_CORRUPT: "line 3, column 14: ..." */
enum td_status template_parse(const char *source, size_t len_bytes, struct template **out, struct td_error *error_out);
void template_close(struct template *t); /* NULL is fine */

/*
 * variables: a JSON object. now: what strftime_now shows; 0: the present. Appends to out. TD_ERR_INVALID: the template raised, or
 * does what its values don't allow (the line is named); TD_ERR_NO_SPACE: a limit.
 */
enum td_status template_render(const struct template *t, json_t *variables, time_t now, struct bytes *out,
                               struct td_error *error_out);
