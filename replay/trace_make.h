/*
 * Traces made of others, and of a description.
 *
 * trace_changed cuts a trace, makes it faster, longer or shorter, and changes how much of the prompts is
 * shared; trace_synth makes one of sessions: each begins with a system prompt that others have too, says
 * something, gets an answer, thinks, and says more. Its description may be fitted to a trace (trace_fit). The
 * same seed gives the same trace.
 *
 * Threads: any.
 */
#pragma once

#include <stdbool.h>

#include "replay/trace.h"

struct trace_change {
    double from_s, to_s;  /* arrivals within [from, to); to 0: till the end */
    uint64_t skip, count; /* of those, so many left out, then so many taken; count 0: all */
    double rate;          /* so many times faster */
    double length_scale;  /* prompts, answers and blocks; a block has at least one token */
    double output_scale;  /* answers */
    double prefix_scale;  /* what prompts share with others is so many times longer; 0: nothing is shared */
    const char *tenant;   /* only of this one; NULL: of all */
};
struct trace *trace_changed(const struct trace *t,
                            const struct trace_change *change); /* close it; may be without a request */

enum { TRACE_QUANTILES = 1001 };
struct trace_law { /* a distribution by its quantiles, evenly spaced, with straight lines between them */
    double quantiles[TRACE_QUANTILES];
};
/* Log-normal; sigma 0: always the median. */
void trace_law_lognormal(double median, double sigma, struct trace_law *out);
double trace_law_draw(const struct trace_law *law, double unit); /* unit in [0, 1) */

struct trace_synth {
    uint64_t n_requests, seed;
    double rate; /* of requests, a second, on average */
    /* Of sessions' arrivals: the variation of the gaps; 1: Poisson, 0: even, above: gamma bursts. */
    double burstiness;
    struct trace_law first, more;     /* tokens that each request of a session adds */
    struct trace_law output, think_s; /* think: from one arrival to the next */
    double turns;                     /* >= 1; mean, geometric */
    uint32_t n_system, system_tokens; /* system prompts; their popularity follows Zipf's law */
    uint32_t block_tokens, n_tenants; /* tenants: 0: none named; else sessions belong to t0, t1, ... */
    bool follows;                     /* a request waits for the answer before it, and thinks after that */
};
struct trace *trace_synth(const struct trace_synth *description);

/* What describes a trace: all but n_requests, seed, n_tenants and follows. A trace without blocks has
 * sessions of one request. */
void trace_fit(const struct trace *t, struct trace_synth *out);
