/* What the writers and the reader of reports share: the columns of a request, and how the JSON of a run is
 * put together. */
#pragma once

#include "replay/report.h"

/* A limit is a double from 0 on; a double may be negative, or NAN. */
enum report_column_type { COLUMN_OUTCOME, COLUMN_U32, COLUMN_I32, COLUMN_BOOL, COLUMN_LIMIT, COLUMN_DOUBLE };

struct report_column {
    const char *name;
    enum report_column_type type;
    size_t offset;   /* in struct report_request */
    bool is_younger; /* than version 1: where a report lacks it, all are 0, doubles NAN */
};

enum { REPORT_COLUMNS = 32 };
extern const struct report_column report_columns[REPORT_COLUMNS];

struct report_parts {
    bool requests, plots; /* plots: what a page draws and the requests alone don't give */
    uint32_t tokens_of;   /* times of tokens are kept of every so-manieth request; 0: of none */
    int digits;           /* significant ones of times of requests */
};

void report_write_json(const struct report_run *run, const struct report_parts *parts, struct bytes *out);
/* As a JSON string; what is no UTF-8 becomes '?', and no "</" is in it. */
void report_write_text(const char *text, struct bytes *out);

/* offered and quarters of a summary (report_offered.c). */
void report_sum_offered(const struct report_run *run, struct report_summary *out);
