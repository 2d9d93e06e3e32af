#include "sched/fair.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"

struct waiting {
    double key;
    void *item;
};

struct tenant {
    double weight, use;
    uint64_t use_ns;         /* when use was that */
    struct waiting *waiting; /* by key, then as they came */
    uint32_t n, cap, active; /* active: its place in the list of those that wait, from 1; 0: none */
    uint32_t at;             /* of the walk */
    double walked;
};

struct fair {
    double half_life_ns;
    struct fair_weight *weights;
    uint32_t n_weights, n_active;
    struct tenant *tenants; /* n_weights of their own, then FAIR_SLOTS */
    uint32_t *active;
};

struct fair *fair_open(uint64_t half_life_ns, const struct fair_weight *weights, uint32_t n_weights)
{
    struct fair *f = mem_zalloc(sizeof(*f));
    f->half_life_ns = (double)half_life_ns;
    f->n_weights = n_weights;
    f->weights = mem_dup(weights, n_weights * sizeof(*weights));
    f->tenants = mem_array(n_weights + FAIR_SLOTS, sizeof(*f->tenants));
    f->active = mem_array(n_weights + FAIR_SLOTS, sizeof(*f->active));
    for (uint32_t i = 0; i < n_weights + FAIR_SLOTS; i++)
        f->tenants[i].weight = i < n_weights ? weights[i].weight : 1;
    return f;
}

void fair_close(struct fair *f)
{
    if (!f)
        return;
    for (uint32_t i = 0; i < f->n_weights + FAIR_SLOTS; i++)
        free(f->tenants[i].waiting);
    free(f->tenants);
    free(f->weights);
    free(f->active);
    free(f);
}

static uint32_t find(const struct fair *f, uint64_t tenant)
{
    for (uint32_t i = 0; i < f->n_weights; i++)
        if (f->weights[i].tenant == tenant)
            return i;
    return f->n_weights + (uint32_t)(random_mix(tenant) % FAIR_SLOTS);
}

static double use_at(const struct fair *f, const struct tenant *t, uint64_t now)
{
    double age = now > t->use_ns ? (double)(now - t->use_ns) : 0;
    return t->use * exp2(-age / f->half_life_ns);
}

void fair_push(struct fair *f, uint64_t tenant, double key, void *item)
{
    uint32_t slot = find(f, tenant);
    struct tenant *t = &f->tenants[slot];
    if (t->n == t->cap) {
        t->cap = t->cap ? t->cap * 2 : 16;
        t->waiting = mem_resize(t->waiting, t->cap, sizeof(*t->waiting));
    }
    uint32_t at = t->n++;
    for (; at && t->waiting[at - 1].key > key; at--)
        t->waiting[at] = t->waiting[at - 1];
    t->waiting[at] = (struct waiting){key, item};
    if (!t->active) {
        f->active[f->n_active++] = slot;
        t->active = f->n_active;
    }
}

void fair_remove(struct fair *f, uint64_t tenant, double key, void *item)
{
    struct tenant *t = &f->tenants[find(f, tenant)];
    uint32_t low = 0, high = t->n; /* the first with this key */
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
    if (--t->n)
        return;
    uint32_t last = f->active[--f->n_active];
    f->active[t->active - 1] = last;
    f->tenants[last].active = t->active;
    t->active = 0;
}

void fair_charge(struct fair *f, uint64_t tenant, double amount, uint64_t now_ns)
{
    struct tenant *t = &f->tenants[find(f, tenant)];
    t->use = fmax(use_at(f, t, now_ns) + amount, 0);
    t->use_ns = now_ns;
}

double fair_use(const struct fair *f, uint64_t tenant, uint64_t now_ns)
{
    const struct tenant *t = &f->tenants[find(f, tenant)];
    return use_at(f, t, now_ns) / t->weight;
}

void fair_begin(struct fair *f, uint64_t now_ns)
{
    for (uint32_t i = 0; i < f->n_active; i++) {
        struct tenant *t = &f->tenants[f->active[i]];
        t->at = 0;
        t->walked = use_at(f, t, now_ns) / t->weight;
    }
}

void *fair_next(struct fair *f)
{
    struct tenant *best = NULL;
    for (uint32_t i = 0; i < f->n_active; i++) {
        struct tenant *t = &f->tenants[f->active[i]];
        bool better = !best || t->walked < best->walked ||
                      (t->walked == best->walked && t->at < t->n && best->at < best->n &&
                       t->waiting[t->at].key < best->waiting[best->at].key);
        if (t->at < t->n && better)
            best = t;
    }
    if (!best)
        return NULL;
    return best->waiting[best->at++].item;
}

void fair_take(struct fair *f, uint64_t tenant, double amount)
{
    struct tenant *t = &f->tenants[find(f, tenant)];
    t->walked += amount / t->weight;
}
