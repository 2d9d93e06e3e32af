/*
 * Numbers within bounds, as expressions over their digits.
 *
 * A number within [a, b] of non-negative whole bounds has a whole part within [a, b - 1] and any
 * fraction, or is b. Negative ones are the mirror image. Whole parts within a range are cut by their
 * number of digits, and then by their first digits that differ: 17 to 342 is
 * 1[7-9]|[2-9][0-9]|[12][0-9]{2}|3[0-3][0-9]|34[0-2].
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "grammar/schema.h"

static const double LARGEST = 1e15;
enum { DIGITS_MOST = 20 };

/* ---------------------------------------------------------------------- reading */

static const char *read_bound(const json_t *schema, const char *name, const char *out_name, bool is_least,
                              struct schema_bounds *b)
{
    const json_t *v = json_object_get(schema, name), *out = json_object_get(schema, out_name);
    bool *has = is_least ? &b->has_least : &b->has_most, *is_out = is_least ? &b->is_least_out : &b->is_most_out;
    int64_t *bound = is_least ? &b->least : &b->most;
    if (json_is_number(out)) {
        if (v) /* both: the tighter one */
            out = (is_least ? json_number_value(out) >= json_number_value(v)
                            : json_number_value(out) <= json_number_value(v))
                      ? out
                      : NULL;
        *is_out = out != NULL;
        v = out ? out : v;
    } else {
        *is_out = v && json_is_true(out); /* draft 4 */
    }
    if (!v)
        return NULL;
    double value = json_number_value(v);
    if (!json_is_number(v) || !(fabs(value) <= LARGEST))
        return "a bound beyond 10^15";
    if (floor(value) != value && !b->is_integer)
        return "a bound that is no whole number";
    if (floor(value) != value) /* of a whole number: the next one within */
        *is_out = false;
    *bound = (int64_t)(is_least ? ceil(value) : floor(value));
    *has = true;
    if (b->is_integer && *is_out) {
        *bound += is_least ? 1 : -1;
        *is_out = false;
    }
    return NULL;
}

const char *schema_bounds_read(const json_t *schema, struct schema_bounds *b)
{
    const json_t *step = json_object_get(schema, "multipleOf");
    double value = json_number_value(step);
    if (step && value == 1) {
        b->is_integer = true;
    } else if (step && !b->is_integer && (value == 0.1 || value == 0.01 || value == 0.001 || value == 0.0001)) {
        b->decimals = value == 0.1 ? 1 : value == 0.01 ? 2 : value == 0.001 ? 3 : 4;
    } else if (step) {
        return "multipleOf other than 1, 0.1, 0.01, 0.001, 0.0001";
    }
    const char *wrong = read_bound(schema, "minimum", "exclusiveMinimum", true, b);
    return wrong ? wrong : read_bound(schema, "maximum", "exclusiveMaximum", false, b);
}

/* ------------------------------------------------------------------- whole parts */

static void add_or(struct bytes *out, size_t from)
{
    if (out->len > from)
        bytes_append(out, "|", 1);
}

/* Numbers of n digits from a to b, which begin with the same `at` digits. */
static void cut(const char *a, const char *b, int n, int at, struct bytes *out, size_t from)
{
    char prefix[DIGITS_MOST + 1], nines[DIGITS_MOST + 1], zeros[DIGITS_MOST + 1];
    while (at < n && a[at] == b[at])
        at++;
    snprintf(prefix, sizeof(prefix), "%.*s", at, a);
    if (at >= n - 1) {
        add_or(out, from);
        bytes_printf(out, at == n ? "%s" : "%s[%c-%c]", prefix, at < n ? a[at] : 0, at < n ? b[at] : 0);
        return;
    }
    bool is_low = strspn(a + at + 1, "0") == (size_t)(n - at - 1),
         is_high = strspn(b + at + 1, "9") == (size_t)(n - at - 1);
    char first = is_low ? a[at] : (char)(a[at] + 1), last = is_high ? b[at] : (char)(b[at] - 1);
    if (!is_low) {
        memset(nines, '9', sizeof(nines));
        memcpy(nines, a, (size_t)at + 1);
        nines[n] = 0;
        cut(a, nines, n, at + 1, out, from);
    }
    if (first <= last) {
        add_or(out, from);
        bytes_printf(out, "%s[%c-%c][0-9]{%d}", prefix, first, last, n - at - 1);
    }
    if (!is_high) {
        memset(zeros, '0', sizeof(zeros));
        memcpy(zeros, b, (size_t)at + 1);
        zeros[n] = 0;
        cut(zeros, b, n, at + 1, out, from);
    }
}

/* Whole numbers from a to b (UINT64_MAX: no end), as alternatives. */
static void whole_numbers(uint64_t a, uint64_t b, struct bytes *out)
{
    size_t from = out->len;
    char first[DIGITS_MOST + 2], last[DIGITS_MOST + 2], end[DIGITS_MOST + 2];
    int n, n_last = snprintf(last, sizeof(last), "%" PRIu64, b);
    for (;;) {
        n = snprintf(first, sizeof(first), "%" PRIu64, a);
        if (b != UINT64_MAX && n == n_last) {
            cut(first, last, n, 0, out, from);
            return;
        }
        memset(end, '9', sizeof(end));
        end[n] = 0;
        cut(first, end, n, 0, out, from);
        if (b == UINT64_MAX) {
            bytes_printf(out, "|[1-9][0-9]{%d,}", n);
            return;
        }
        a = 1;
        for (int i = 0; i < n; i++)
            a *= 10;
    }
}

/* --------------------------------------------------------------------- numbers */

/* A fraction; least: it is not 0. */
static void fraction(const struct schema_bounds *b, bool is_least, struct bytes *out)
{
    if (!is_least && b->decimals)
        bytes_printf(out, "(\\.[0-9]{1,%d})?", b->decimals);
    else if (!is_least)
        bytes_printf(out, "(\\.[0-9]+)?");
    else if (!b->decimals)
        bytes_printf(out, "\\.[0-9]*[1-9][0-9]*");
    else
        for (int i = 0; i < b->decimals; i++)
            bytes_printf(out, "%s\\.0{%d}[1-9][0-9]{0,%d}%s", i ? "|" : "(", i, b->decimals - 1 - i,
                         i + 1 < b->decimals ? "" : ")");
}

/* Numbers from a to b without a sign; b UINT64_MAX: no end. Each alternative begins with the sign. */
static void magnitudes(const struct schema_bounds *b, uint64_t least, bool is_least_out, uint64_t most,
                       bool is_most_out, const char *sign, struct bytes *out)
{
    size_t from = out->len;
    bool has_end = most != UINT64_MAX;
    uint64_t first = least + is_least_out;
    if (least > most || (least == most && (is_least_out || is_most_out)))
        return;
    if (b->is_integer) {
        if (first > most)
            return;
        bytes_printf(out, "%s(", sign);
        whole_numbers(first, most, out);
        bytes_printf(out, ")(\\.0+)?");
        return;
    }
    if (!has_end || first < most) {
        bytes_printf(out, "%s(", sign);
        whole_numbers(first, has_end ? most - 1 : most, out);
        bytes_printf(out, ")");
        fraction(b, false, out);
    }
    if (is_least_out && (!has_end || least < most)) {
        add_or(out, from);
        bytes_printf(out, "%s%" PRIu64, sign, least);
        fraction(b, true, out);
    }
    if (has_end && !is_most_out) {
        add_or(out, from);
        bytes_printf(out, "%s%" PRIu64 "(\\.0+)?", sign, most);
    }
}

bool schema_bounds_expression(const struct schema_bounds *b, struct bytes *out)
{
    size_t from = out->len;
    if (!b->has_most || b->most >= 0)
        magnitudes(b, b->has_least && b->least > 0 ? (uint64_t)b->least : 0,
                   b->has_least && b->least >= 0 && b->is_least_out, b->has_most ? (uint64_t)b->most : UINT64_MAX,
                   b->is_most_out, "", out);
    if (b->has_least && b->least >= 0)
        return out->len > from;
    struct bytes negative = {0};
    bool is_below = b->has_most && b->most < 0;
    magnitudes(b, is_below ? (uint64_t)-b->most : 0, is_below ? b->is_most_out : true,
               b->has_least ? (uint64_t)-b->least : UINT64_MAX, b->is_least_out, "-", &negative);
    if (negative.len)
        add_or(out, from);
    bytes_append(out, negative.data ? negative.data : "", negative.len);
    bytes_free(&negative);
    return out->len > from;
}
