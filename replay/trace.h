/*
 * Request traces: when each request arrived, how long its prompt and its answer were, and which blocks it shares with
 * others.
 *
 * Two formats, told apart by their first bytes:
 *
 *   Mooncake, one JSON object a line (FAST'25 release). timestamp in milliseconds; hash_ids name the blocks of the
 *   prompt from its head, the last one may be partial; an id names the whole prefix that it ends.
 *
 *       {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
 *
 *   Azure (2023), comma separated, without blocks:
 *
 *       TIMESTAMP,ContextTokens,GeneratedTokens
 *       2023-11-16 18:15:46.6805900,374,44
 *
 * Requests come sorted by arrival, equal ones in the order of the file; arrivals count from the first. Other members of
 * an object are ignored, blank lines too. What is wrong is named by line.
 *
 * Threads: a trace is read-only once it is parsed.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct trace_request {
    uint64_t arrival_ns;         /* since the first of the trace */
    uint32_t n_prompt, n_output; /* tokens; n_prompt >= 1 */
    uint32_t n_blocks;           /* <= n_prompt; 0: the trace has none */
    uint64_t first_block;        /* into blocks */
};

struct trace {
    struct trace_request *requests;
    uint64_t n_requests;
    uint64_t *blocks; /* ids, request by request in the order of the file */
    uint64_t n_blocks;
};

static inline const uint64_t *trace_blocks(const struct trace *t, const struct trace_request *r)
{
    return t->blocks + r->first_block;
}

/*
 * data[0..size) is only read during the call. TD_ERR_INVALID names line and member. Memory: below 16 * size + 1 MiB,
 * and 32 times the longest line while that is parsed.
 */
enum td_status trace_parse(const char *data, size_t size, struct trace **out, struct td_error *error_out);

/* A whole file, of at most max_bytes. TD_ERR_NOT_FOUND, TD_ERR_IO, TD_ERR_NO_SPACE (too large), TD_ERR_INVALID. */
enum td_status trace_read(const char *path, size_t max_bytes, struct trace **out, struct td_error *error_out);

void trace_close(struct trace *t); /* NULL is fine */
