/*
 * Whether to try again, and where not: a budget for second attempts and a breaker for each worker. Pure: state and time in, state
 * out; the router calls them.
 *
 * Budget: of late (counts that fade with RETRY_MEMORY_NS) there may be one second attempt for every RETRY_SHARE first ones, and a
 * burst beyond that, so that the death of one full worker is survived whatever the traffic, but attempts that only make more
 * attempts (everything fails, everything is tried again) die out instead of multiplying. (The idea of Finagle's RetryBudget.)
 *
 * Breaker (Nygard, Release It!):
 *
 *     CLOSED --BREAKER_FAILURES, less successes, within BREAKER_WINDOW_NS; or tripped--> OPEN --a wait; then one probe--> PROBING
 *        ^                                                                    ^                              |  |
 *        |                                                                    +--failure: twice the wait ----+  |
 *        +----------------------------------success-------------------------------------------------------------+
 *
 * Each success takes one failure back, so a worker that mostly works stays closed. A breaker chooses among workers: the caller asks
 * it only as long as another one of the role is closed. Where all of them fail alike (a bad network) leaving them out would only
 * turn a slow cluster into none (the panic threshold of Envoy).
 *
 * Threads: the caller's.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"

#define RETRY_MEMORY_NS    (10 * NS_PER_S)
#define BREAKER_WINDOW_NS  (10 * NS_PER_S)
#define BREAKER_WAIT_NS    (1 * NS_PER_S) /* the first; doubles */
#define BREAKER_LONGEST_NS (4 * NS_PER_S)
enum { RETRY_SHARE = 10, BREAKER_FAILURES = 5 };

struct retry_budget {
    double burst;        /* set by the owner; the rest begins as zero */
    double first, again; /* attempts of late */
    uint64_t at_ns;
};

void retry_budget_first(struct retry_budget *b, uint64_t now_ns); /* a first attempt was made */
double retry_budget_left(struct retry_budget *b, uint64_t now_ns);
bool retry_budget_take(struct retry_budget *b, uint64_t now_ns); /* false: used up, and nothing was taken */

enum breaker_state { BREAKER_CLOSED, BREAKER_PROBING, BREAKER_OPEN };

struct breaker { /* all zero: closed */
    enum breaker_state state;
    uint32_t failures; /* CLOSED: less successes */
    uint64_t since_ns; /* CLOSED: of the first of these failures */
    uint64_t until_ns; /* OPEN: from then on one may try */
    uint64_t wait_ns;
};

bool breaker_usable(const struct breaker *b, uint64_t now_ns);
bool breaker_used(struct breaker *b); /* something was sent to the worker; true: it is the probe */
void breaker_succeeded(struct breaker *b);
void breaker_failed(struct breaker *b, uint64_t now_ns);
void breaker_trip(struct breaker *b, uint64_t now_ns); /* one failure is enough: open, from whatever state */
/* The probe told neither success nor failure, or another process came in the worker's place: one may try at once. */
void breaker_try(struct breaker *b, uint64_t now_ns);
const char *breaker_name(enum breaker_state state);
