/* A simulated run as a report. The report borrows from the result and the trace; what is made for the report
 * is freed by simulate_report_fini(). */
#pragma once

#include "replay/report.h"
#include "replay/simulate.h"

struct simulate_report {
    struct report_run run;
    struct report_request *requests;
    struct report_worker *workers;
    char (*names)[24];
    struct report_reasons reasons;
    char why[256];
};

/* Makes the report, checks it (report_check), and marks it as not valid if the check fails. */
void simulate_report_init(struct simulate_report *out, const struct trace *trace, const struct simulate_config *config,
                          const struct simulate_result *result);
void simulate_report_fini(struct simulate_report *r);
