/* The page is replay/report.html with the runs inserted as JSON; the script in the page computes the rest. */
#include <stdlib.h>
#include <string.h>

#include "replay/report_internal.h"
#include "report_page.h"

static const char MARK[] = "@RUNS@";
/* Tokens whose times go into a page, to look at single requests. */
static const uint64_t MOST_TOKENS = 100000;

/* Stride between requests whose token times are written, so that there are about MOST_TOKENS of them. */
static uint32_t stride_of(const struct report_run *run)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < run->n_requests; i++)
        n += run->requests[i].token_ms ? run->requests[i].n_output : 0;
    return (uint32_t)(n / MOST_TOKENS) + 1;
}

void report_html(const struct report_run *const *runs, uint32_t n_runs, struct bytes *out)
{
    const char *page = (const char *)REPORT_PAGE, *end = page + sizeof(REPORT_PAGE);
    const char *mark = memmem(page, sizeof(REPORT_PAGE), MARK, strlen(MARK));
    bytes_append(out, page, (size_t)(mark - page));
    for (uint32_t i = 0; i < n_runs; i++) {
        const struct report_parts parts = {
            .requests = true, .plots = true, .tokens_of = stride_of(runs[i]), .digits = 6};
        bytes_append(out, i ? ",\n" : "[", i ? 2 : 1);
        report_write_json(runs[i], &parts, out);
    }
    bytes_append(out, "]", 1);
    mark += strlen(MARK);
    bytes_append(out, mark, (size_t)(end - mark));
}
