/*
 * A queue shared by tenants, by start-time fair queueing (Goyal et al., SIGCOMM '96; for tokens of language models: Sheng et al.,
 * OSDI '24): each tenant has a tag, the work that it was charged over its weight, and the tenant with the least tag is next. Inside a
 * tenant the item with the least key is next.
 *
 * Virtual time is the largest tag with which an item was served. A tenant that wants nothing for a while gets no credit for that: its
 * tag rises to virtual time when it comes again. A tenant that has items, or was sent away and told to come back (fair_want), keeps its
 * tag, so that it gets later what it missed; but a tenant is never owed more than all tenants were charged within FAIR_OWED. So
 * tenants that want more than their shares get their shares in every window that is long beside FAIR_OWED, whatever was before it.
 *
 * Tenants that have no weight of their own have weight 1, and FAIR_SLOTS tags between them, by hash: two that meet share one.
 *
 * A walk (fair_begin, fair_next, fair_take) changes nothing but the walk: what a taken item would be charged raises its tenant's tag in
 * the walk, so the walk sees the order in which all items would be served if nothing more came.
 *
 * Threads: one owner. Items are the caller's.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/status.h"

enum { FAIR_SLOTS = 1024 };
#define FAIR_OWED (2 * NS_PER_S)
#define FAIR_LEAST_WEIGHT                                                                                              \
    1e-3 /* tags are sums of work over weight: further apart, and they would lose tokens to rounding */
#define FAIR_MOST_WEIGHT 1e6

struct fair_weight {
    uint64_t tenant;
    double weight; /* > 0 */
};

/*
 * Weights from "NAME=WEIGHT,...", for the tenants of these names (ring_id). TD_ERR_INVALID: the text is something else, a weight is not
 * above 0, or a name comes twice; the error says "--tenants". The caller frees *weights_out. NULL and "" give no weights.
 */
enum td_status fair_weights_parse(const char *text, struct fair_weight **weights_out, uint32_t *n_out,
                                  struct td_error *error_out);

struct fair;

struct fair *fair_open(const struct fair_weight *weights, uint32_t n_weights); /* weights are copied */
void fair_close(struct fair *f);                                               /* NULL is fine; empty or not */

/* Size: what the item adds to fair_size(). O(items of the tenant). */
void fair_push(struct fair *f, uint64_t tenant, double key, double size, void *item, uint64_t now_ns);
void fair_remove(struct fair *f, uint64_t tenant, double key, double size, void *item); /* it is there */
/* An item of the tenant is served, and its work charged. */
void fair_serve(struct fair *f, uint64_t tenant, double amount, uint64_t now_ns);
/* The work turned out to be so much more; less if it is below 0. */
void fair_correct(struct fair *f, uint64_t tenant, double amount);
/* The tenant was sent away, and comes again before until_ns. */
void fair_want(struct fair *f, uint64_t tenant, uint64_t until_ns);
double fair_tag(const struct fair *f, uint64_t tenant);
bool fair_same(const struct fair *f, uint64_t a,
               uint64_t b); /* whether two tenants share a tag, and with it their part */

/* The tenant's part of the weights of all that have items or want to come again; it counts in any case. */
double fair_share(const struct fair *f, uint64_t tenant, uint64_t now_ns);
uint32_t fair_count(const struct fair *f, uint64_t tenant); /* its items */
double fair_size(const struct fair *f, uint64_t tenant);    /* the sum of their sizes */
/*
 * The last item, by key, of the tenant that has most for its weight, by count or by size; tenants whose last item stays (NULL: none does)
 * are left out. NULL: no tenant is left. So what a tenant gives up is what it would have been served last.
 */
void *fair_last(const struct fair *f, bool by_size, bool (*stays)(const void *item));
/* Whether the tenant's tag is at most the mean of the others that want something: each with what it has waiting, its own with `amount` more. */
bool fair_is_behind(const struct fair *f, uint64_t tenant, double amount, uint64_t now_ns);

void fair_begin(struct fair *f, uint64_t now_ns);
void *fair_next(struct fair *f);                                /* NULL: all were seen */
void fair_take(struct fair *f, uint64_t tenant, double amount); /* what an item of the walk would be charged */
/*
 * Work that other tenants may still bring before the tenant's next turn in the walk: those that want to come again, or whose items the
 * walk has all seen, from virtual time up to the tag that the tenant has now in the walk.
 */
double fair_to_come(const struct fair *f, uint64_t tenant);
