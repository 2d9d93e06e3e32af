/*
 * Outcomes of all offered requests, as a whole and by the length of prompts. Rates and means over answered
 * requests alone improve as more requests are refused: long prompts are refused first, and the remaining ones
 * are short and often cached.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "replay/report_internal.h"

static int by_length(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Finds the longest prompt of each of the first three quarters. Prompts of equal length are in the same
 * quarter. */
static void find_quartiles(const struct report_run *run, uint32_t most_out[REPORT_QUARTERS - 1])
{
    uint64_t n = run->n_requests;
    uint32_t *lengths = mem_array(n, sizeof(*lengths));
    for (uint64_t i = 0; i < n; i++)
        lengths[i] = run->requests[i].n_prompt;
    qsort(lengths, n, sizeof(*lengths), by_length);
    for (uint64_t k = 0; k < REPORT_QUARTERS - 1; k++)
        most_out[k] = n ? lengths[(n * (k + 1) + REPORT_QUARTERS - 1) / REPORT_QUARTERS - 1] : 0;
    free(lengths);
}

struct offered_sums {
    uint64_t n, tokens, refused, refused_tokens, met, met_tokens, cached;
    uint32_t least, most;
};

static void add_offered(struct offered_sums *s, const struct report_request *q, bool met)
{
    bool refused = q->outcome == REPORT_REFUSED;
    s->least = s->n && s->least < q->n_prompt ? s->least : q->n_prompt;
    s->most = s->most > q->n_prompt ? s->most : q->n_prompt;
    s->n++;
    s->tokens += q->n_prompt;
    s->refused += refused;
    s->refused_tokens += refused ? q->n_prompt : 0;
    s->met += met;
    s->met_tokens += met ? q->n_prompt : 0;
    for (int i = 0; i < 4 && q->outcome == REPORT_ANSWERED; i++)
        s->cached += q->cached[i];
}

static double share(uint64_t part, uint64_t whole)
{
    return whole ? (double)part / (double)whole : NAN;
}

static struct report_offered offered_of(const struct offered_sums *s)
{
    return (struct report_offered){.n = s->n,
                                   .tokens = s->tokens,
                                   .least_tokens = s->least,
                                   .most_tokens = s->most,
                                   .refused_share = share(s->refused, s->n),
                                   .met_share = share(s->met, s->n),
                                   .refused_token_share = share(s->refused_tokens, s->tokens),
                                   .met_token_share = share(s->met_tokens, s->tokens),
                                   .cached_share = share(s->cached, s->tokens)};
}

void report_sum_offered(const struct report_run *run, struct report_summary *out)
{
    struct offered_sums all = {0}, of[REPORT_QUARTERS] = {{0}};
    uint32_t most[REPORT_QUARTERS - 1];
    find_quartiles(run, most);
    for (uint64_t i = 0; i < run->n_requests; i++) {
        const struct report_request *q = &run->requests[i];
        bool met = report_is_met(run, q);
        int quarter = 0;
        while (quarter < REPORT_QUARTERS - 1 && q->n_prompt > most[quarter])
            quarter++;
        add_offered(&all, q, met);
        add_offered(&of[quarter], q, met);
    }
    out->offered = offered_of(&all);
    for (int i = 0; i < REPORT_QUARTERS; i++)
        out->quarters[i] = offered_of(&of[i]);
}

/* ----------------------------------------------------------------- reasons */

void report_count_reasons(const struct report_run *run, struct report_reason *out)
{
    memset(out, 0, run->n_reasons * sizeof(*out));
    for (uint64_t i = 0; i < run->n_requests; i++) {
        const struct report_request *q = &run->requests[i];
        if (!q->reason || q->outcome == REPORT_ANSWERED)
            continue;
        struct report_reason *r = &out[q->reason - 1];
        ++*(q->outcome == REPORT_REFUSED ? &r->refused : &r->failed);
        r->tokens += q->n_prompt;
    }
}

uint32_t report_reason_of(struct report_reasons *r, const char *text)
{
    if (!text || !*text)
        return 0;
    for (uint32_t i = 0; i < r->n; i++)
        if (!strcmp(r->texts[i], text))
            return i + 1;
    if (r->n < REPORT_MAX_REASONS)
        r->texts[r->n++] = text;
    else if (r->n == REPORT_MAX_REASONS)
        r->texts[r->n++] = "other reasons";
    return r->n;
}
