/* Reads traces with comma-separated columns: Azure, BurstGPT. The first line names the columns. */
#include <inttypes.h>
#include <string.h>

#include "base/clock.h"
#include "replay/trace_internal.h"

enum column { TIME, SECONDS, PROMPT, OUTPUT, MODEL, SESSION, COLUMNS };

static const struct {
    const char *name;
    enum column column;
} KNOWN[] = {{"TIMESTAMP", TIME},    {"ContextTokens", PROMPT},  {"GeneratedTokens", OUTPUT},
             {"Timestamp", SECONDS}, {"Request tokens", PROMPT}, {"Response tokens", OUTPUT},
             {"Model", MODEL},       {"Session ID", SESSION}};

/* Reads 1 to max_digits digits and moves *at behind them. */
static bool get_number(const char **at, const char *end, int max_digits, uint64_t *out)
{
    const char *p = *at;
    uint64_t n = 0;
    while (p < end && p - *at < max_digits && *p >= '0' && *p <= '9')
        n = 10 * n + (uint64_t)(*p++ - '0');
    bool any = p > *at;
    *at = p;
    *out = n;
    return any;
}

static bool get_char(const char **at, const char *end, char c)
{
    return *at < end && *(*at)++ == c;
}

/* Reads a fraction, if there is one, as billionths (0 without). False: a point without digits. */
static bool get_fraction(const char **at, const char *end, uint64_t *out)
{
    *out = 0;
    if (*at == end || **at != '.')
        return true;
    const char *first = ++*at;
    if (!get_number(at, end, 9, out))
        return false;
    for (long n = *at - first; n < 9; n++)
        *out *= 10;
    while (*at < end && **at >= '0' && **at <= '9')
        ++*at;
    return true;
}

/* Days from 1970-01-01 to a day of the Gregorian calendar. Years begin in March here, so that the leap day is
 * the last day of a year. */
static uint64_t days_of(uint64_t year, uint64_t month, uint64_t day)
{
    uint64_t y = month > 2 ? year : year - 1, m = (month + 9) % 12;
    return 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1 - 719468;
}

/* Reads "2023-11-16 18:15:46.6805900", in 2024 with "+00:00" behind it, which is the only offset in these
 * files. */
static bool get_date(const char *at, const char *end, uint64_t *ns_out)
{
    uint64_t year, month, day, hour, minute, second, fraction;
    bool ok = get_number(&at, end, 4, &year) && get_char(&at, end, '-') && get_number(&at, end, 2, &month) &&
              get_char(&at, end, '-') && get_number(&at, end, 2, &day) && get_char(&at, end, ' ') &&
              get_number(&at, end, 2, &hour) && get_char(&at, end, ':') && get_number(&at, end, 2, &minute) &&
              get_char(&at, end, ':') && get_number(&at, end, 2, &second) && get_fraction(&at, end, &fraction);
    if (ok && end - at == 6 && !memcmp(at, "+00:00", 6))
        at = end;
    if (!ok || at != end || year < 1970 || year > 2200 || month < 1 || month > 12 || day < 1 || day > 31 || hour > 23 ||
        minute > 59 || second > 60)
        return false;
    *ns_out = (((days_of(year, month, day) * 24 + hour) * 60 + minute) * 60 + second) * NS_PER_S + fraction;
    return true;
}

static bool get_seconds(const char *at, const char *end, uint64_t *ns_out)
{
    uint64_t seconds, fraction;
    if (!get_number(&at, end, 10, &seconds) || !get_fraction(&at, end, &fraction) || at != end ||
        (double)seconds * 1e3 >= TRACE_MAX_TIMESTAMP_MS)
        return false;
    *ns_out = seconds * NS_PER_S + fraction;
    return true;
}

/* Reads a whole number, which some of these files write with ".0". */
static bool get_tokens(const char *at, const char *end, uint64_t least, uint32_t *out)
{
    uint64_t n, fraction;
    if (!get_number(&at, end, 10, &n) || !get_fraction(&at, end, &fraction) || fraction || at != end || n < least ||
        n > TRACE_MAX_TOKENS)
        return false;
    *out = (uint32_t)n;
    return true;
}

/* ------------------------------------------------------------------- lines */

/* The next field. *at moves behind its comma, or becomes NULL after the last field. */
static const char *next_field(const char **at, const char *end, const char **field_end)
{
    const char *field = *at, *comma = memchr(field, ',', (size_t)(end - field));
    *field_end = comma ? comma : end;
    *at = comma ? comma + 1 : NULL;
    return field;
}

enum td_status trace_csv_header(struct trace_parser *p, const char *text, size_t len)
{
    const char *at = text, *end = text + len, *field_end;
    bool has[COLUMNS] = {false};
    while (at) {
        const char *field = next_field(&at, end, &field_end);
        size_t n = (size_t)(field_end - field);
        if (p->n_columns == TRACE_MAX_COLUMNS)
            return TRACE_FAIL(p, "line %" PRIu64 ": more than %d columns", p->line, TRACE_MAX_COLUMNS);
        p->columns[p->n_columns] = -1;
        for (size_t i = 0; i < sizeof(KNOWN) / sizeof(KNOWN[0]); i++)
            if (strlen(KNOWN[i].name) == n && !memcmp(KNOWN[i].name, field, n) && !has[KNOWN[i].column]) {
                p->columns[p->n_columns] = (int)KNOWN[i].column;
                has[KNOWN[i].column] = true;
            }
        p->n_columns++;
    }
    if (has[TIME] == has[SECONDS] || !has[PROMPT] || !has[OUTPUT])
        return TRACE_FAIL(p,
                          "line %" PRIu64 ": must name TIMESTAMP,ContextTokens,GeneratedTokens (Azure) or "
                          "Timestamp,Request tokens,Response tokens (BurstGPT)",
                          p->line);
    p->trace->format = has[SECONDS] ? TRACE_BURSTGPT : TRACE_AZURE;
    return TD_OK;
}

static void get_session(struct trace_parser *p, const char *name, struct trace_request *r)
{
    if (!*name)
        return;
    if (!json_object_get(p->sessions, name))
        json_object_set_new_nocheck(p->sessions, name, json_integer((json_int_t)json_object_size(p->sessions) + 1));
    r->session = (uint64_t)json_integer_value(json_object_get(p->sessions, name));
}

static enum td_status get_field(struct trace_parser *p, enum column column, const char *field, const char *end,
                                struct trace_request *r)
{
    bool azure = p->trace->format == TRACE_AZURE;
    char name[65] = "";
    size_t n = (size_t)(end - field);
    memcpy(name, field, n < 64 ? n : 64);
    switch (column) {
    case TIME:
        return get_date(field, end, &r->arrival_ns)
                   ? TD_OK
                   : TRACE_FAIL(p, "line %" PRIu64 ": TIMESTAMP must be like 2023-11-16 18:15:46.6805900", p->line);
    case SECONDS:
        return get_seconds(field, end, &r->arrival_ns)
                   ? TD_OK
                   : TRACE_FAIL(p, "line %" PRIu64 ": Timestamp must be seconds from 0 on", p->line);
    case PROMPT:
        return get_tokens(field, end, azure, &r->n_prompt)
                   ? TD_OK
                   : TRACE_FAIL(p, "line %" PRIu64 ": %s must be from %d to %u", p->line,
                                azure ? "ContextTokens" : "Request tokens", azure, TRACE_MAX_TOKENS);
    case OUTPUT:
        return get_tokens(field, end, 0, &r->n_output)
                   ? TD_OK
                   : TRACE_FAIL(p, "line %" PRIu64 ": %s must be up to %u", p->line,
                                azure ? "GeneratedTokens" : "Response tokens", TRACE_MAX_TOKENS);
    case MODEL:
        r->tenant = trace_tenant(p->trace, p->tenants, name);
        break;
    case SESSION:
        get_session(p, name, r);
        break;
    case COLUMNS:
        break;
    }
    return TD_OK;
}

enum td_status trace_csv_line(struct trace_parser *p, const char *text, size_t len)
{
    const char *at = text, *end = text + len, *field_end;
    struct trace_request r = {0};
    int n = 0;
    for (; at && n < p->n_columns; n++) {
        const char *field = next_field(&at, end, &field_end);
        enum td_status s = p->columns[n] < 0 ? TD_OK : get_field(p, (enum column)p->columns[n], field, field_end, &r);
        if (s)
            return s;
    }
    if (at || n < p->n_columns)
        return TRACE_FAIL(p, "line %" PRIu64 ": must have %d columns, as the first line says", p->line, p->n_columns);
    if (r.n_prompt)
        trace_add_request(p->trace, &p->cap_requests, &r);
    else
        p->trace->n_left_out++;
    return TD_OK;
}
