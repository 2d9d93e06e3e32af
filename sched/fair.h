/*
 * A queue shared by tenants: start-time fair queueing (Goyal et al., SIGCOMM '96; for tokens of language
 * models: Sheng et al., OSDI '24). Each tenant has a tag: the work that it was charged, divided by its
 * weight. The tenant with the least tag is next; inside a tenant, the item with the least key.
 *
 * Virtual time is the largest tag with which an item was served. A tenant that wants nothing for a while gets
 * no credit: its tag rises to virtual time when it comes again. A tenant that has items, or that was told to
 * come back (fair_want), keeps its tag, so it later gets what it missed. That credit is limited to the work
 * that all tenants were charged within FAIR_OWED. So tenants that want more than their shares get their
 * shares in every window that is long compared with FAIR_OWED, whatever came before.
 *
 * Tenants without a weight of their own have weight 1. They share FAIR_SLOTS tags by hash: two tenants in one
 * slot count as one.
 *
 * A walk (fair_begin, fair_next, fair_take) only changes the state of the walk. fair_take() raises the
 * tenant's tag in the walk by what the item would be charged. So a walk sees items in the order in which they
 * would be served if no more came.
 *
 * Threads: one owner. Ownership: items are the caller's; the queue only keeps their addresses.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/status.h"

enum { FAIR_SLOTS = 1024 };
#define FAIR_OWED         (2 * NS_PER_S)
/* Tags are sums of work / weight; with a wider range of weights, single tokens would be lost to rounding. */
#define FAIR_LEAST_WEIGHT 1e-3
#define FAIR_MOST_WEIGHT  1e6

struct fair_weight {
    uint64_t tenant;
    double weight; /* > 0 */
};

/*
 * Parses "NAME=WEIGHT,..."; a tenant is ring_id() of its name. The caller frees *weights_out. NULL and ""
 * give no weights. TD_ERR_INVALID: a syntax error, a weight outside FAIR_LEAST_WEIGHT .. FAIR_MOST_WEIGHT, or
 * a name that comes twice; the error says "--tenants".
 */
enum td_status fair_weights_parse(const char *text, struct fair_weight **weights_out, uint32_t *n_out,
                                  struct td_error *error_out);

struct fair;

/* Weights are copied. There is room for FAIR_LATER tenants more, whose weights come later. */
enum { FAIR_LATER = 256 };
struct fair *fair_open(const struct fair_weight *weights, uint32_t n_weights);
/* Gives a tenant a weight. False: not now, because items wait in the tag that it shares, or because there is
 * no room for one more tenant with a weight of its own; it has weight 1 then. */
bool fair_set_weight(struct fair *f, uint64_t tenant, double weight);
/* NULL is fine; empty or not. */
void fair_close(struct fair *f);

/* Adds an item; size is what it adds to fair_size(). O(items of the tenant). */
void fair_push(struct fair *f, uint64_t tenant, double key, double size, void *item, uint64_t now_ns);
/* Removes an item with the key and size with which it was pushed; asserts that it is there. */
void fair_remove(struct fair *f, uint64_t tenant, double key, double size, void *item);
/* An item of the tenant is served: charges the tenant `amount`. The item is removed by fair_remove(). */
void fair_serve(struct fair *f, uint64_t tenant, double amount, uint64_t now_ns);
/* Corrects an earlier charge by `amount`, which may be below 0. */
void fair_correct(struct fair *f, uint64_t tenant, double amount);
/* The tenant was told to come back before until_ns: it keeps its tag until then. */
void fair_want(struct fair *f, uint64_t tenant, uint64_t until_ns);
double fair_tag(const struct fair *f, uint64_t tenant);
/* Whether two tenants share a tag, and so count as one. */
bool fair_same(const struct fair *f, uint64_t a, uint64_t b);

/*
 * The tenant's weight over the weights of all tenants that have items or were told to come back; it counts
 * itself always.
 */
double fair_share(const struct fair *f, uint64_t tenant, uint64_t now_ns);
uint32_t fair_count(const struct fair *f, uint64_t tenant); /* number of its items */
double fair_size(const struct fair *f, uint64_t tenant);    /* sum of their sizes */
/*
 * The last item, by key, of the tenant that has the most items (or the largest size) for its weight: what
 * that tenant would be served last. Tenants whose last item `stays` are left out; stays NULL: none stays.
 * NULL: no tenant is left.
 */
void *fair_last(const struct fair *f, bool by_size, bool (*stays)(const void *item));
/*
 * Whether the tenant's tag is at most the mean tag of the other tenants that want something, if all that is
 * queued were served, and `amount` more for this tenant. True if no other tenant wants anything.
 */
bool fair_is_behind(const struct fair *f, uint64_t tenant, double amount, uint64_t now_ns);

void fair_begin(struct fair *f, uint64_t now_ns);
/* The next item of the walk; NULL: all items were seen. The item may be removed before the next call. */
void *fair_next(struct fair *f);
void fair_take(struct fair *f, uint64_t tenant, double amount); /* charges `amount` in the walk only */
/*
 * Work that other tenants could still bring before the tenant's next turn in the walk. Counted are tenants
 * that were told to come back, or whose items the walk has seen: from their tag in the walk (at least virtual
 * time) up to this tenant's.
 */
double fair_to_come(const struct fair *f, uint64_t tenant);
