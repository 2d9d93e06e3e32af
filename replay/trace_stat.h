/*
 * What a trace is like: lengths, rates, and how much of its prompts a cache could find.
 *
 * Hits are those of a prefix: a block is found if it and all before it are. Two figures, never one: with
 * partial last blocks, as publications count the traces' ids, and without them, as a store of full blocks
 * finds them.
 *
 * Threads: any; the trace is borrowed.
 */
#pragma once

#include "replay/report.h"
#include "replay/trace.h"

/* Blocks named by all that stands before them: the number of a node for each use, requests by arrival. */
struct trace_nodes {
    uint32_t *of_use; /* [n_uses] */
    uint64_t *first;  /* [n_requests + 1] into of_use */
    uint32_t *n_uses; /* [n_nodes] how often each is used */
    uint64_t n_nodes;
};
void trace_nodes_init(const struct trace *t, struct trace_nodes *out);
void trace_nodes_fini(struct trace_nodes *n);

struct trace_ceiling {                   /* of a cache without end */
    uint64_t asked, found;               /* blocks */
    uint64_t asked_tokens, found_tokens; /* asked: of whole prompts, also what no block has */
};

struct trace_stat {
    uint64_t n, n_tokens_in, n_tokens_out, n_unanswered;
    /* First arrival to last, requests a second. */
    double span_s, rate;
    uint64_t most_in_a_second, least_in_a_minute, most_in_a_minute; /* of whole minutes */
    double gap_cv; /* of the times between arrivals: 1 when they are independent, more in bursts */
    struct report_stats prompt, output;
    uint64_t n_blocks, n_distinct, n_used_once;
    struct trace_ceiling with_partial, full_only;
    struct report_stats reuse_blocks; /* distinct blocks used since the last use of the same */
    struct report_stats reuse_s;      /* time since it */
    uint64_t n_sessions, n_following, n_tenants;
};
void trace_stat_of(const struct trace *t, struct trace_stat *out);
