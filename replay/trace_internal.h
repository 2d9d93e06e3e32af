/* Shared by the readers of trace formats. */
#pragma once

#include <jansson.h>
#include <stdbool.h>

#include "replay/trace.h"

enum { TRACE_MAX_COLUMNS = 32 };

struct trace_parser {
    struct trace *trace;
    uint64_t cap_requests, cap_blocks;
    uint64_t line;                    /* from 1 */
    json_t *ids, *sessions, *tenants; /* numbers of request ids, sessions and tenants by name */
    /* Meaning of each column of a CSV file; -1: the column is ignored. */
    int columns[TRACE_MAX_COLUMNS], n_columns;
    struct td_error *error_out;
};

static const uint32_t TRACE_MAX_TOKENS = 1u << 30; /* most tokens of a prompt or an answer */
static const double TRACE_MAX_TIMESTAMP_MS = 1e12; /* 30 years: below 2^63 ns */

#define TRACE_FAIL(p, ...) td_fail((p)->error_out, TD_ERR_INVALID, __VA_ARGS__)

/* Adds a request with its time as in the file. Its blocks follow with trace_add_block(). */
struct trace_request *trace_add_request(struct trace *t, uint64_t *cap, const struct trace_request *r);
void trace_add_block(struct trace *t, uint64_t *cap, uint64_t id);
/* Index of the tenant; adds it if it is new. */
uint32_t trace_tenant(struct trace *t, json_t *by_name, const char *name);
/* Sorts by arrival, stably. Corrects the members follows, and makes arrivals count from the first one. */
void trace_sort(struct trace *t);
struct trace *trace_open(void); /* an empty trace with the tenant "" */

/* Read one line, without its end. The first line determines the format. It is a header, except in Mooncake's
 * and Bailian's format. */
enum td_status trace_json_line(struct trace_parser *p, const char *text, size_t len);
enum td_status trace_csv_header(struct trace_parser *p, const char *text, size_t len);
enum td_status trace_csv_line(struct trace_parser *p, const char *text, size_t len);
