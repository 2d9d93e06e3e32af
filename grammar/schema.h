/* Parts of schema.c that are tables or arithmetic. */
#pragma once

#include <jansson.h>

#include "grammar/grammar_internal.h"

/* The expression of a format; NULL: it is unknown, or no format, and says nothing. */
const char *schema_format(const char *name);

/* What bounds say of a number. */
struct schema_bounds {
    bool is_integer;
    bool has_least, has_most, is_least_out, is_most_out; /* out: the bound itself is not allowed */
    int64_t least, most;
    int decimals; /* most digits behind the point; 0: any number */
};
/* is_integer is set before. Returns what is not supported, or NULL. */
const char *schema_bounds_read(const json_t *schema, struct schema_bounds *b);
/* Appends an expression for such numbers; false: there are none. */
bool schema_bounds_expression(const struct schema_bounds *b, struct bytes *out);
