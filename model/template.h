/*
 * Chat templates: the part of Jinja that model templates use, as transformers renders them (trim_blocks,
 * lstrip_blocks, an immutable sandbox; tojson without ASCII escapes; raise_exception, strftime_now; break and
 * continue; the generation tag).
 *
 * A template is parsed once into a tree. A statement, filter, test or method that this interpreter does not
 * know is an error of parsing, with line and column. Rendering is bounded in steps, depth, memory and output
 * (TEMPLATE_MAX_*), whatever the template does.
 *
 * Values come from JSON. A method that would change a list or a dict is refused, as in the sandbox. Numbers,
 * lists and texts are written, compared and sliced as in Python.
 *
 * Not supported: include, import, extends, block, raw, recursive loops, %-formats, async; methods of texts
 * beyond TEMPLATE_METHODS in template_methods.c.
 *
 * Threads: immutable after parsing; rendering may run on several threads at once.
 */
#pragma once

#include <jansson.h>
#include <stddef.h>
#include <time.h>

#include "base/mem.h"
#include "base/status.h"

/* Defined by libFuzzer: small limits, so that they are met often. */
#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION
enum { TEMPLATE_MAX_STEPS = 5000, TEMPLATE_MAX_OUTPUT = 16 << 10, TEMPLATE_MAX_MEMORY = 1 << 20 };
#else
enum {
    TEMPLATE_MAX_STEPS = 20 * 1000 * 1000, /* visited nodes of the tree and written elements */
    TEMPLATE_MAX_OUTPUT = 16 << 20,
    TEMPLATE_MAX_MEMORY = 128 << 20,
};
#endif
enum {
    TEMPLATE_MAX_SOURCE = 1 << 20,
    TEMPLATE_MAX_DEPTH = 150, /* of the tree, and of nested macro calls */
};

struct template;

/* TD_ERR_UNSUPPORTED or TD_ERR_CORRUPT, with text such as "line 3, column 14: ...". */
enum td_status template_parse(const char *source, size_t len_bytes, struct template **out, struct td_error *error_out);
void template_close(struct template *t); /* NULL is fine */

/*
 * Appends to out. variables: a JSON object. now: the time that strftime_now shows; 0: the present.
 * TD_ERR_INVALID: the template raised an error, or its values do not allow an operation (with the line).
 * TD_ERR_NO_SPACE: a limit was exceeded.
 */
enum td_status template_render(const struct template *t, json_t *variables, time_t now, struct bytes *out,
                               struct td_error *error_out);
