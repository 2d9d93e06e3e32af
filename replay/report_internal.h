/* Shared by the writers and the reader of reports: the columns of a request, and the JSON of a run. */
#pragma once

#include "replay/report.h"

/* A limit is a double >= 0. A double may be negative, or NAN. */
enum report_column_type { COLUMN_OUTCOME, COLUMN_U32, COLUMN_I32, COLUMN_BOOL, COLUMN_LIMIT, COLUMN_DOUBLE };

struct report_column {
    const char *name;
    enum report_column_type type;
    size_t offset;   /* offset in struct report_request */
    bool is_younger; /* added after version 1: if a report lacks it, its values are 0, doubles NAN */
};

enum { REPORT_COLUMNS = 32 };
extern const struct report_column report_columns[REPORT_COLUMNS];

struct report_parts {
    bool requests, plots; /* plots: data of a page's plots that the requests alone don't give */
    uint32_t tokens_of;   /* token times of each tokens_of-th request are written; 0: of none */
    int digits;           /* significant digits of the requests' times */
};

void report_write_json(const struct report_run *run, const struct report_parts *parts, struct bytes *out);
/* Fills `offered` and `quarters` of a summary (report_offered.c). */
void report_sum_offered(const struct report_run *run, struct report_summary *out);
