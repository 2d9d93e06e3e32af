/*
 * A budget for second attempts, and a breaker for each worker. Pure functions of state and time; the router
 * calls them.
 *
 * Budget: recently (counts fade with RETRY_MEMORY_NS) there may be one second attempt for every RETRY_SHARE
 * first attempts, and a burst beyond that. The burst covers the death of one full worker at any load. If
 * everything fails and is tried again, the share makes attempts die out instead of multiply. (The idea of
 * Finagle's RetryBudget.)
 *
 * Breaker (Nygard, Release It!):
 *
 *     CLOSED --failures, or tripped--> OPEN --after a wait: one probe--> PROBING
 *        ^                               ^                                |  |
 *        |                               +-----failure: twice the wait----+  |
 *        +-------------------------------success-----------------------------+
 *
 * It opens after BREAKER_FAILURES failures, less successes, within BREAKER_WINDOW_NS: each success takes one
 * failure back, so a worker that mostly works stays closed. A breaker chooses among workers: the caller heeds
 * it only while another worker of the role has a closed one. If all workers fail alike (a bad network),
 * leaving all of them out would only stop a slow cluster (Envoy's panic threshold).
 *
 * Threads: the caller's.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"

#define RETRY_MEMORY_NS    (10 * NS_PER_S)
#define BREAKER_WINDOW_NS  (10 * NS_PER_S)
#define BREAKER_WAIT_NS    (1 * NS_PER_S) /* the first wait; each failed probe doubles it */
#define BREAKER_LONGEST_NS (4 * NS_PER_S)
enum { RETRY_SHARE = 10, BREAKER_FAILURES = 5 };

struct retry_budget {
    double burst;        /* set by the owner; the other members start at zero */
    double first, again; /* recent first attempts, recent second attempts; both fade */
    uint64_t at_ns;
};

void retry_budget_first(struct retry_budget *b, uint64_t now_ns); /* a first attempt was made */
double retry_budget_left(struct retry_budget *b, uint64_t now_ns);
bool retry_budget_take(struct retry_budget *b, uint64_t now_ns); /* false: used up, and nothing was taken */

enum breaker_state { BREAKER_CLOSED, BREAKER_PROBING, BREAKER_OPEN };

struct breaker { /* all zero: closed */
    enum breaker_state state;
    uint32_t failures; /* CLOSED: failures less successes */
    uint64_t since_ns; /* CLOSED: when the first of these failures was */
    uint64_t until_ns; /* OPEN: when one request may probe */
    uint64_t wait_ns;  /* OPEN, PROBING: the latest wait */
};

bool breaker_usable(const struct breaker *b, uint64_t now_ns);
bool breaker_used(struct breaker *b); /* a request was sent to the worker; true: it is the probe */
void breaker_succeeded(struct breaker *b);
void breaker_failed(struct breaker *b, uint64_t now_ns);
void breaker_trip(struct breaker *b, uint64_t now_ns); /* opens it at once, in any state */
/*
 * The probe gave no result, or another process has taken the worker's place: one request may probe at once.
 */
void breaker_try(struct breaker *b, uint64_t now_ns);
const char *breaker_name(enum breaker_state state);
