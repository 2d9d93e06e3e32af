/*
 * A queue shared by tenants: of those that wait, the tenant that used least for its weight is next; inside a tenant, the least key.
 *
 * Use is what was charged, halved every half_life_ns (the time-decayed shares of NVIDIA's KAI scheduler): two tenants that always
 * wait are served by their weights, one that was away is ahead for about a half-life, and then not for ever. Those that
 * have no weight of their own have 1, and FAIR_SLOTS queues between them, by hash: two that meet share one.
 *
 * Walking it (fair_begin, fair_next, fair_take) changes nothing but the walk: what a taken item would be charged moves its tenant
 * back, so a walk sees the order in which all would be served.
 *
 * Threads: one owner. Items are the caller's.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum { FAIR_SLOTS = 1024 };

struct fair_weight {
    uint64_t tenant;
    double weight; /* > 0 */
};

struct fair;

struct fair *fair_open(uint64_t half_life_ns, const struct fair_weight *weights,
                       uint32_t n_weights); /* weights copied */
void fair_close(struct fair *f);            /* NULL is fine; empty or not */

void fair_push(struct fair *f, uint64_t tenant, double key, void *item);           /* O(queued of the tenant) */
void fair_remove(struct fair *f, uint64_t tenant, double key, void *item);         /* it is there */
void fair_charge(struct fair *f, uint64_t tenant, double amount, uint64_t now_ns); /* amount may be negative */
double fair_use(const struct fair *f, uint64_t tenant, uint64_t now_ns);           /* over its weight */

void fair_begin(struct fair *f, uint64_t now_ns);
void *fair_next(struct fair *f);                                /* NULL: all were seen */
void fair_take(struct fair *f, uint64_t tenant, double amount); /* what an item of the walk would be charged */
