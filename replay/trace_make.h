/*
 * Makes traces from other traces and from descriptions.
 *
 * trace_changed() cuts a trace and scales its rate, its lengths, and how much of the prompts is shared.
 * trace_synth() makes a trace of sessions: each begins with a system prompt that other sessions have, too,
 * then a user asks, gets an answer, thinks, and asks again. Its description may be fitted to a trace
 * (trace_fit). The same seed gives the same trace.
 *
 * Threads: any.
 */
#pragma once

#include <stdbool.h>

#include "replay/trace.h"

struct trace_change {
    double from_s, to_s;  /* arrivals within [from, to); to 0: until the end */
    uint64_t skip, count; /* of these requests, `skip` are left out, then `count` are taken; count 0: all */
    double rate;          /* factor by which the new trace is faster */
    double length_scale;  /* factor for prompts, answers and blocks; a block keeps at least one token */
    double output_scale;  /* further factor for answers */
    double prefix_scale;  /* factor for what prompts share with others; 0: nothing is shared */
    const char *tenant;   /* only this tenant's requests; NULL: all */
};
/* The result may have no request. Free with trace_close(). */
struct trace *trace_changed(const struct trace *t, const struct trace_change *change);

enum { TRACE_QUANTILES = 1001 };
struct trace_law { /* a distribution: evenly spaced quantiles, linear between them */
    double quantiles[TRACE_QUANTILES];
};
/* Makes a log-normal distribution. sigma 0: always the median. */
void trace_law_lognormal(double median, double sigma, struct trace_law *out);
double trace_law_draw(const struct trace_law *law, double unit); /* unit in [0, 1) */

struct trace_synth {
    uint64_t n_requests, seed;
    double rate; /* requests per second, on average */
    /* Coefficient of variation of the gaps between sessions: 1 Poisson, 0 even, above 1 gamma bursts. */
    double burstiness;
    struct trace_law first, more;     /* tokens that the first request and each later one add */
    struct trace_law output, think_s; /* think: seconds from one arrival of a session to the next */
    double turns;                     /* mean requests of a session, >= 1; geometric */
    uint32_t n_system, system_tokens; /* number of system prompts, whose popularity follows Zipf's law */
    uint32_t block_tokens, n_tenants; /* n_tenants 0: none is named; else sessions belong to t0, t1, ... */
    bool follows;                     /* a request follows the one before it, and thinks after its end */
};
struct trace *trace_synth(const struct trace_synth *description);

/* Describes a trace: sets all members but n_requests, seed, n_tenants and follows. A trace without blocks has
 * sessions of one request. */
void trace_fit(const struct trace *t, struct trace_synth *out);
