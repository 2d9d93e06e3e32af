#include "sched/fair.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "sched/ring.h"

struct waiting {
    double key;
    void *item;
};

struct fair_tenant {
    double weight, tag;
    uint64_t wants_ns;       /* it was told to come back before then */
    struct waiting *waiting; /* its items by key; equal keys in the order of arrival */
    double size;             /* sum of the sizes of its items */
    uint32_t n, cap;
    uint32_t active; /* 1 + its place in fair.active; 0: it is not there */
    uint32_t at;     /* items of it that the walk has seen */
    double walked;   /* its tag in the walk */
};

struct fair {
    struct fair_weight *weights;
    uint32_t n_weights, cap_weights, n_active;
    /* cap_weights tenants with weights of their own, of which n_weights are there; then FAIR_SLOTS shared
     * ones */
    struct fair_tenant *tenants;
    /* The n_active tenants that have items or were told to come back; no order. */
    uint32_t *active;
    double now;        /* virtual time */
    double charged[2]; /* work charged in the current half of FAIR_OWED, and in the half before */
    uint64_t half_ns;  /* when the current half began */
};

/* ------------------------------------------------------------------ weights */

/* Parses one NAME=WEIGHT of n bytes into weights[n_weights]. */
static enum td_status parse_weight(const char *at, size_t n, struct fair_weight *weights, uint32_t n_weights,
                                   struct td_error *e)
{
    size_t name = strcspn(at, "=");
    char *end = NULL;
    double weight = name < n ? strtod(at + name + 1, &end) : 0;
    if (!name || end != at + n || !(weight >= FAIR_LEAST_WEIGHT && weight <= FAIR_MOST_WEIGHT))
        return td_fail(e, TD_ERR_INVALID, "--tenants: '%.*s' is not NAME=WEIGHT, %g to %g", (int)n, at,
                       FAIR_LEAST_WEIGHT, FAIR_MOST_WEIGHT);
    weights[n_weights] = (struct fair_weight){ring_id(at, name), weight};
    for (uint32_t i = 0; i < n_weights; i++)
        if (weights[i].tenant == weights[n_weights].tenant)
            return td_fail(e, TD_ERR_INVALID, "--tenants: '%.*s' comes twice", (int)name, at);
    return TD_OK;
}

enum td_status fair_weights_parse(const char *text, struct fair_weight **weights_out, uint32_t *n_out,
                                  struct td_error *error_out)
{
    struct fair_weight *weights = NULL;
    enum td_status s = TD_OK;
    uint32_t n = 0;
    for (const char *at = text; at && *at && !s;) {
        size_t len = strcspn(at, ",");
        weights = mem_resize(weights, n + 1, sizeof(*weights));
        s = parse_weight(at, len, weights, n++, error_out);
        at += len + (at[len] == ',');
    }
    if (s) {
        free(weights);
        return s;
    }
    *weights_out = weights;
    *n_out = n;
    return TD_OK;
}

/* -------------------------------------------------------------------- queue */

struct fair *fair_open(const struct fair_weight *weights, uint32_t n_weights)
{
    struct fair *f = mem_zalloc(sizeof(*f));
    f->n_weights = n_weights;
    f->cap_weights = n_weights + FAIR_LATER;
    f->weights = mem_array(f->cap_weights, sizeof(*weights));
    if (n_weights)
        memcpy(f->weights, weights, n_weights * sizeof(*weights));
    f->tenants = mem_array(f->cap_weights + FAIR_SLOTS, sizeof(*f->tenants));
    f->active = mem_array(f->cap_weights + FAIR_SLOTS, sizeof(*f->active));
    for (uint32_t i = 0; i < f->cap_weights + FAIR_SLOTS; i++)
        f->tenants[i].weight = i < n_weights ? weights[i].weight : 1;
    return f;
}

void fair_close(struct fair *f)
{
    if (!f)
        return;
    for (uint32_t i = 0; i < f->cap_weights + FAIR_SLOTS; i++)
        free(f->tenants[i].waiting);
    free(f->tenants);
    free(f->weights);
    free(f->active);
    free(f);
}

static uint32_t find_tenant(const struct fair *f, uint64_t tenant)
{
    for (uint32_t i = 0; i < f->n_weights; i++)
        if (f->weights[i].tenant == tenant)
            return i;
    return f->cap_weights + (uint32_t)(random_mix(tenant) % FAIR_SLOTS);
}

bool fair_set_weight(struct fair *f, uint64_t tenant, double weight)
{
    struct fair_tenant *t = &f->tenants[find_tenant(f, tenant)];
    bool is_own = t < f->tenants + f->cap_weights;
    if (is_own) {
        t->weight = weight;
    } else if (weight != 1) {
        if (t->n || f->n_weights == f->cap_weights)
            return false;
        double tag = t->tag; /* what it was charged stays charged */
        f->weights[f->n_weights] = (struct fair_weight){tenant, weight};
        t = &f->tenants[f->n_weights++];
        t->weight = weight;
        t->tag = tag;
    }
    return true;
}

/* ----------------------------------------------------------- active tenants */

static void deactivate(struct fair *f, struct fair_tenant *t)
{
    uint32_t last = f->active[--f->n_active];
    f->active[t->active - 1] = last;
    f->tenants[last].active = t->active;
    t->active = 0;
}

/* Takes tenants without items off the active list when their time to come back is over. */
static void forget_the_gone(struct fair *f, uint64_t now)
{
    for (uint32_t i = f->n_active; i; i--) {
        struct fair_tenant *t = &f->tenants[f->active[i - 1]];
        if (!t->n && now >= t->wants_ns)
            deactivate(f, t);
    }
}

/* The most that a tenant may be owed: what all tenants were charged lately. */
static double owed(const struct fair *f)
{
    return f->charged[0] + f->charged[1];
}

/* A tenant wants something again: its tag rises to virtual time, so idle time gives no credit. */
static void activate(struct fair *f, uint32_t slot)
{
    struct fair_tenant *t = &f->tenants[slot];
    if (t->active)
        return;
    t->tag = t->walked = fmax(t->tag, f->now);
    f->active[f->n_active++] = slot;
    t->active = f->n_active;
}

/* No tag may be further behind virtual time than owed() allows. */
static void limit_credit(struct fair *f)
{
    for (uint32_t i = 0; i < f->n_active; i++) {
        struct fair_tenant *t = &f->tenants[f->active[i]];
        t->tag = fmax(t->tag, f->now - owed(f) / t->weight);
    }
}

/* -------------------------------------------------------------------- queue */

void fair_push(struct fair *f, uint64_t tenant, double key, double size, void *item, uint64_t now)
{
    uint32_t slot = find_tenant(f, tenant);
    struct fair_tenant *t = &f->tenants[slot];
    forget_the_gone(f, now);
    t->waiting = MEM_ROOM(t->waiting, t->n, t->cap, 16);
    uint32_t at = t->n++;
    for (; at && t->waiting[at - 1].key > key; at--)
        t->waiting[at] = t->waiting[at - 1];
    t->waiting[at] = (struct waiting){key, item};
    t->at += t->at > at; /* a running walk does not see an item that was put before its place */
    t->size += size;
    activate(f, slot);
}

void fair_remove(struct fair *f, uint64_t tenant, double key, double size, void *item)
{
    struct fair_tenant *t = &f->tenants[find_tenant(f, tenant)];
    uint32_t low = 0, high = t->n; /* bisection for the first item with this key */
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (t->waiting[middle].key < key)
            low = middle + 1;
        else
            high = middle;
    }
    while (low < t->n && t->waiting[low].item != item)
        low++;
    assert(low < t->n);
    memmove(t->waiting + low, t->waiting + low + 1, (t->n - low - 1) * sizeof(*t->waiting));
    t->at -= t->at > low;
    t->size = --t->n ? t->size - size : 0;
}

void fair_serve(struct fair *f, uint64_t tenant, double amount, uint64_t now)
{
    uint32_t slot = find_tenant(f, tenant);
    struct fair_tenant *t = &f->tenants[slot];
    activate(f, slot);
    if (now >= f->half_ns + FAIR_OWED / 2) {
        f->charged[1] = now < f->half_ns + FAIR_OWED ? f->charged[0] : 0;
        f->charged[0] = 0;
        f->half_ns = now;
    }
    f->charged[0] += amount;
    f->now = fmax(f->now, t->tag);
    t->tag += amount / t->weight;
    limit_credit(f);
}

void fair_correct(struct fair *f, uint64_t tenant, double amount)
{
    struct fair_tenant *t = &f->tenants[find_tenant(f, tenant)];
    t->tag = fmax(t->tag + amount / t->weight, 0);
}

void fair_want(struct fair *f, uint64_t tenant, uint64_t until_ns)
{
    uint32_t slot = find_tenant(f, tenant);
    struct fair_tenant *t = &f->tenants[slot];
    t->wants_ns = until_ns > t->wants_ns ? until_ns : t->wants_ns;
    activate(f, slot);
}

bool fair_same(const struct fair *f, uint64_t a, uint64_t b)
{
    return a == b || find_tenant(f, a) == find_tenant(f, b);
}

double fair_tag(const struct fair *f, uint64_t tenant)
{
    return f->tenants[find_tenant(f, tenant)].tag;
}

/* ------------------------------------------------------------------- shares */

static bool wants(const struct fair_tenant *t, uint64_t now)
{
    return t->n || now < t->wants_ns;
}

double fair_share(const struct fair *f, uint64_t tenant, uint64_t now)
{
    const struct fair_tenant *own = &f->tenants[find_tenant(f, tenant)];
    double all = own->weight;
    for (uint32_t i = 0; i < f->n_active; i++) {
        const struct fair_tenant *t = &f->tenants[f->active[i]];
        all += t != own && wants(t, now) ? t->weight : 0;
    }
    return own->weight / all;
}

uint32_t fair_count(const struct fair *f, uint64_t tenant)
{
    return f->tenants[find_tenant(f, tenant)].n;
}

double fair_size(const struct fair *f, uint64_t tenant)
{
    return f->tenants[find_tenant(f, tenant)].size;
}

void *fair_last(const struct fair *f, bool by_size, bool (*stays)(const void *item))
{
    const struct fair_tenant *most = NULL;
    double has = 0;
    for (uint32_t i = 0; i < f->n_active; i++) {
        const struct fair_tenant *t = &f->tenants[f->active[i]];
        double its = (by_size ? t->size : t->n) / t->weight;
        if (t->n && (!most || its > has) && !(stays && stays(t->waiting[t->n - 1].item))) {
            most = t;
            has = its;
        }
    }
    return most ? most->waiting[most->n - 1].item : NULL;
}

bool fair_is_behind(const struct fair *f, uint64_t tenant, double amount, uint64_t now)
{
    const struct fair_tenant *own = &f->tenants[find_tenant(f, tenant)];
    double tags = 0, weights = 0;
    for (uint32_t i = 0; i < f->n_active; i++) {
        const struct fair_tenant *t = &f->tenants[f->active[i]];
        if (t == own || !wants(t, now))
            continue;
        tags += t->tag * t->weight + t->size;
        weights += t->weight;
    }
    double tag = (own->active ? own->tag : fmax(own->tag, f->now)) + (own->size + amount) / own->weight;
    return !(weights > 0) || tag <= tags / weights;
}

/* -------------------------------------------------------------------- walks */

void fair_begin(struct fair *f, uint64_t now)
{
    forget_the_gone(f, now);
    for (uint32_t i = 0; i < f->n_active; i++) {
        struct fair_tenant *t = &f->tenants[f->active[i]];
        t->at = 0;
        t->walked = t->tag;
    }
}

void *fair_next(struct fair *f)
{
    struct fair_tenant *best = NULL;
    for (uint32_t i = 0; i < f->n_active; i++) {
        struct fair_tenant *t = &f->tenants[f->active[i]];
        if (t->at >= t->n)
            continue;
        if (!best || t->walked < best->walked ||
            (t->walked == best->walked && t->waiting[t->at].key < best->waiting[best->at].key))
            best = t;
    }
    return best ? best->waiting[best->at++].item : NULL;
}

void fair_take(struct fair *f, uint64_t tenant, double amount)
{
    struct fair_tenant *t = &f->tenants[find_tenant(f, tenant)];
    t->walked += amount / t->weight;
}

double fair_to_come(const struct fair *f, uint64_t tenant)
{
    const struct fair_tenant *own = &f->tenants[find_tenant(f, tenant)];
    double work = 0;
    for (uint32_t i = 0; i < f->n_active; i++) {
        const struct fair_tenant *t = &f->tenants[f->active[i]];
        if (t != own && t->at >= t->n)
            work += fmax(own->walked - fmax(t->walked, f->now), 0) * t->weight;
    }
    return work;
}
