/* Writes a trace in tandem's own format, Mooncake's or Azure's. Times keep their nanoseconds, as far as the
 * format has them. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "replay/report_internal.h"
#include "replay/trace.h"

static void add_ms(struct bytes *out, uint64_t ns)
{
    char text[32];
    int n =
        snprintf(text, sizeof(text), "%" PRIu64 ".%06" PRIu64, (uint64_t)(ns / NS_PER_MS), (uint64_t)(ns % NS_PER_MS));
    while (text[n - 1] == '0')
        n--;
    bytes_append(out, text, (size_t)(text[n - 1] == '.' ? n - 1 : n));
}

static void add_mooncake(const struct trace *t, const struct trace_request *r, struct bytes *out)
{
    bytes_printf(out, "{\"timestamp\": ");
    add_ms(out, r->arrival_ns);
    bytes_printf(out, ", \"input_length\": %u, \"output_length\": %u, \"hash_ids\": [", r->n_prompt, r->n_output);
    for (uint32_t i = 0; i < r->n_blocks; i++)
        bytes_printf(out, "%s%" PRIu64, i ? ", " : "", trace_blocks(t, r)[i]);
    bytes_append(out, "]", 1);
}

static void add_tandem(const struct trace *t, uint64_t i, bool is_followed, struct bytes *out)
{
    const struct trace_request *r = &t->requests[i];
    if (r->tenant) {
        bytes_printf(out, ", \"tenant\": ");
        report_write_text(t->tenants[r->tenant], out);
    }
    if (r->priority)
        bytes_printf(out, ", \"priority\": %d", r->priority);
    if (r->ttft_ms > 0)
        bytes_printf(out, ", \"ttft_ms\": %.15g", r->ttft_ms);
    if (r->tpot_ms > 0)
        bytes_printf(out, ", \"tpot_ms\": %.15g", r->tpot_ms);
    if (r->session)
        bytes_printf(out, ", \"session\": \"s%" PRIu64 "\"", r->session);
    if (is_followed)
        bytes_printf(out, ", \"id\": \"r%" PRIu64 "\"", i);
    if (r->follows)
        bytes_printf(out, ", \"follows\": \"r%" PRIu64 "\"", r->follows - 1);
    if (r->delay_ms)
        bytes_printf(out, ", \"delay_ms\": %u", r->delay_ms);
}

static void write_json(const struct trace *t, bool tandem, struct bytes *out)
{
    bool *is_followed = mem_array(t->n_requests, sizeof(*is_followed));
    for (uint64_t i = 0; i < t->n_requests; i++)
        if (t->requests[i].follows)
            is_followed[t->requests[i].follows - 1] = true;
    if (tandem)
        bytes_printf(out, "{\"tandem_trace\": 1, \"block_tokens\": %u}\n", t->block_tokens);
    for (uint64_t i = 0; i < t->n_requests; i++) {
        add_mooncake(t, &t->requests[i], out);
        if (tandem)
            add_tandem(t, i, is_followed[i], out);
        bytes_append(out, "}\n", 2);
    }
    free(is_followed);
}

/* Arrivals count from the first one, so the date is invented: 2000-01-01. */
static void write_azure(const struct trace *t, struct bytes *out)
{
    bytes_printf(out, "TIMESTAMP,ContextTokens,GeneratedTokens\n");
    for (uint64_t i = 0; i < t->n_requests; i++) {
        const struct trace_request *r = &t->requests[i];
        time_t seconds = (time_t)(946684800 + r->arrival_ns / NS_PER_S);
        struct tm day;
        char text[32];
        strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", gmtime_r(&seconds, &day));
        bytes_printf(out, "%s.%07" PRIu64 ",%u,%u\n", text, (uint64_t)(r->arrival_ns % NS_PER_S / 100), r->n_prompt,
                     r->n_output);
    }
}

enum td_status trace_write(const struct trace *t, enum trace_format format, struct bytes *out,
                           struct td_error *error_out)
{
    if (format == TRACE_TANDEM || format == TRACE_MOONCAKE)
        write_json(t, format == TRACE_TANDEM, out);
    else if (format == TRACE_AZURE)
        write_azure(t, out);
    else
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "%s is only read: write tandem, mooncake or azure",
                       trace_format_name(format));
    return TD_OK;
}
