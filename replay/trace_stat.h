/*
 * Describes a trace: lengths, rates, and how much of its prompts a cache could find.
 *
 * A hit is one of a prefix: a block is found if it and all blocks before it are. There are always two
 * figures: with partial last blocks, as publications count the traces' ids, and without them, as a store of
 * full blocks finds them.
 *
 * Threads: any; the trace is borrowed.
 */
#pragma once

#include "replay/report.h"
#include "replay/trace.h"

/* Blocks identified by all blocks before them: each use of a block has the number of its node. Requests in
 * the order of arrival. */
struct trace_nodes {
    uint32_t *of_use; /* [n_uses] */
    uint64_t *first;  /* [n_requests + 1] into of_use */
    uint32_t *n_uses; /* [n_nodes] number of uses of each node */
    uint64_t n_nodes;
};
void trace_nodes_init(const struct trace *t, struct trace_nodes *out);
void trace_nodes_fini(struct trace_nodes *n);

struct trace_ceiling {                   /* what an unlimited cache finds */
    uint64_t asked, found;               /* blocks */
    uint64_t asked_tokens, found_tokens; /* asked_tokens: of whole prompts, also tokens outside any block */
};

struct trace_stat {
    uint64_t n, n_tokens_in, n_tokens_out, n_unanswered;
    /* Seconds from the first arrival to the last; requests per second. */
    double span_s, rate;
    uint64_t most_in_a_second, least_in_a_minute, most_in_a_minute; /* minutes: whole ones only */
    /* Coefficient of variation of the times between arrivals: 1 if independent, more in bursts. */
    double gap_cv;
    struct report_stats prompt, output;
    uint64_t n_blocks, n_distinct, n_used_once;
    struct trace_ceiling with_partial, full_only;
    struct report_stats reuse_blocks; /* distinct blocks used between two uses of a block */
    struct report_stats reuse_s;      /* seconds between two uses of a block */
    uint64_t n_sessions, n_following, n_tenants;
};
void trace_stat_of(const struct trace *t, struct trace_stat *out);
