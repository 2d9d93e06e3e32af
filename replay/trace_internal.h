/* What the readers of the formats share. */
#pragma once

#include <jansson.h>
#include <stdbool.h>

#include "replay/trace.h"

enum { TRACE_MAX_COLUMNS = 32 };

struct trace_parser {
    struct trace *trace;
    uint64_t cap_requests, cap_blocks;
    uint64_t line;                    /* from 1 */
    json_t *ids, *sessions, *tenants; /* numbers by name */
    /* Which member each column of a CSV file is; -1: none of ours. */
    int columns[TRACE_MAX_COLUMNS], n_columns;
    struct td_error *error_out;
};

static const uint32_t TRACE_MAX_TOKENS = 1u << 30; /* of a prompt or an answer */
static const double TRACE_MAX_TIMESTAMP_MS = 1e12; /* 30 years: below 2^63 ns */

#define TRACE_FAIL(p, ...) td_fail((p)->error_out, TD_ERR_INVALID, __VA_ARGS__)

/* The request is added at once, at its time in the file's own terms; blocks follow by trace_add_block. */
struct trace_request *trace_add_request(struct trace *t, uint64_t *cap, const struct trace_request *r);
void trace_add_block(struct trace *t, uint64_t *cap, uint64_t id);
/* Its index, of a new one if need be. */
uint32_t trace_tenant(struct trace *t, json_t *by_name, const char *name);
/* By arrival, in the order of the list where equal; follows is set anew, arrivals count from the first. */
void trace_sort(struct trace *t);
struct trace *trace_open(void); /* with the tenant "" */

/* A line without its end. The first one has told the format, and is a header in all but Mooncake's and
 * Bailian's. */
enum td_status trace_json_line(struct trace_parser *p, const char *text, size_t len);
enum td_status trace_csv_header(struct trace_parser *p, const char *text, size_t len);
enum td_status trace_csv_line(struct trace_parser *p, const char *text, size_t len);
