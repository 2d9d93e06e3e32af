/*
 * Some xfers in one thread, under a virtual clock and a script of faults. Everything that happens is a
 * function of the seed.
 *
 * Transfers begin at random times between random nodes, are announced piece by piece, and are sometimes
 * cancelled on either side. The tests check these rules; each failure was seen in another system:
 *
 *   - a pull that ends with TD_OK has every byte of the leased pages, whatever happened on the way; pages
 *     that the reader had before stay as they are, however the pull ends;
 *   - each lease and each pull ends once, within its time;
 *   - after the end of a pull nothing writes into its pages: they are filled with a poison that must stay
 *     until the next use;
 *   - at the end no lease, pull, connection or page is left.
 */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fault.h"
#include "base/mem.h"
#include "base/random.h"
#include "tests/tap.h"
#include "transfer/xfer.h"

/* libcheck writes to a pipe at each assertion, so checks in inner loops only call it when they fail. */
enum { WORLD_NODES = 3, WORLD_PAGES = 24, WORLD_RUN = 4, WORLD_LAYERS = 4, WORLD_AT_ONCE = 8, POISON = 0xee };

static const struct kv_layout WORLD_LAYOUT = {NUM_F16, WORLD_LAYERS, 1, 16, 16};

struct world;

struct sim_node {
    struct world *world;
    struct xfer *x;
    struct faults *faults;
    char name[16];
    uint8_t *arena;
    int use[WORLD_PAGES]; /* 1 + transfer that uses the page; 0: free */
    bool is_poisoned[WORLD_PAGES];
    uint32_t generation[WORLD_PAGES];
};

enum step { STEP_GRANT, STEP_ANNOUNCE, STEP_FINISH, STEP_PULL, STEP_CANCEL_LEASE, STEP_CANCEL_PULL, N_STEPS };

struct sim_transfer {
    struct world *world;
    int number, holder, reader;
    uint32_t n_pages, n_have, from[WORLD_RUN], to[WORLD_RUN];
    uint64_t at[N_STEPS]; /* time of each step; 0: done, or not to be done */
    uint32_t n_announced; /* announced layers */
    bool lease_ended, pull_ended;
};

struct world {
    uint64_t seed, n_draws;
    struct clock clock;
    struct log log;
    struct xfer_hub *hub;
    struct sim_node nodes[WORLD_NODES];
    struct sim_transfer *transfers;
    int n_transfers, n_begun, n_over;
    uint64_t page_bytes, trace; /* trace: a hash of all callbacks and their times */
    uint64_t n_status[8], n_faults[FAULT_SITES][FAULT_KINDS];
};

static inline uint64_t world_draw(struct world *w, uint64_t below)
{
    return random_at(w->seed, 77, w->n_draws++) % below;
}

static inline void world_trace(struct world *w, uint64_t a, uint64_t b)
{
    w->trace = random_at(w->trace, a ^ clock_now(&w->clock), b);
}

static inline uint8_t *page_of(struct sim_node *n, uint32_t page)
{
    return n->arena + page * n->world->page_bytes;
}

static inline uint64_t word_of(const struct sim_transfer *t, uint32_t index, uint64_t i)
{
    return random_at(t->world->seed, (uint64_t)t->number << 8 | index, i);
}

/* ------------------------------------------------------------------ oracles */

static inline void check_content(const struct sim_transfer *t, uint32_t n_pages)
{
    struct world *w = t->world;
    for (uint32_t p = 0; p < n_pages; p++) {
        const uint64_t *words = (const uint64_t *)page_of(&w->nodes[t->reader], t->to[p]);
        for (uint64_t i = 0; i < w->page_bytes / 8; i++)
            if (words[i] != word_of(t, p, i))
                ck_abort_msg("seed %llu: transfer %d ended with wrong bytes in page %u", (unsigned long long)w->seed,
                             t->number, p);
    }
}

static inline void check_poison(struct sim_node *n, uint32_t page)
{
    const uint8_t *bytes = page_of(n, page);
    for (uint64_t i = 0; n->is_poisoned[page] && i < n->world->page_bytes; i++)
        if (bytes[i] != POISON)
            ck_abort_msg("seed %llu: page %u of %s was written after its pull had ended",
                         (unsigned long long)n->world->seed, page, n->name);
}

static inline void give_back(struct sim_node *n, const uint32_t *pages, uint32_t count, bool poison)
{
    for (uint32_t i = 0; i < count; i++) {
        n->use[pages[i]] = 0;
        n->is_poisoned[pages[i]] = poison;
        memset(page_of(n, pages[i]), POISON, n->world->page_bytes);
    }
}

static inline void over_if_both(struct sim_transfer *t)
{
    t->world->n_over += t->lease_ended && t->pull_ended;
}

static inline void on_lease_end(void *user, struct xfer_id id, enum td_status status, bool in_doubt)
{
    struct sim_transfer *t = user;
    ck_assert(!t->lease_ended && id.counter == (uint64_t)t->number + 1);
    t->lease_ended = true;
    world_trace(t->world, 1, (uint64_t)t->number << 16 ^ (uint64_t)(uint32_t)status << 1 ^ in_doubt);
    give_back(&t->world->nodes[t->holder], t->from, t->n_pages, false);
    over_if_both(t);
}

static inline void on_pull_end(void *user, struct xfer_id id, const struct xfer_pull_result *r)
{
    struct sim_transfer *t = user;
    ck_assert(!t->pull_ended && id.counter == (uint64_t)t->number + 1);
    t->pull_ended = true;
    world_trace(t->world, 2, (uint64_t)t->number << 16 ^ (uint64_t)(uint32_t)r->status);
    if (!r->status) {
        ck_assert_uint_eq(r->n_pages, t->n_pages);
        ck_assert_uint_eq(r->bytes, (t->n_pages - t->n_have) * t->world->page_bytes);
    }
    check_content(t, r->status ? t->n_have : t->n_pages);
    t->world->n_status[r->status == TD_OK                                             ? 0
                       : r->status == TD_ERR_PEER_LOST                                ? 1
                       : r->status == TD_ERR_CHECKSUM                                 ? 2
                       : r->status == TD_ERR_CANCELLED                                ? 3
                       : r->status == TD_ERR_STALE || r->status == TD_ERR_NOT_FOUND   ? 4
                       : r->status == TD_ERR_DEADLINE                                 ? 5
                       : r->status == TD_ERR_PROTOCOL || r->status == TD_ERR_NO_SPACE ? 6
                                                                                      : 7]++;
    give_back(&t->world->nodes[t->reader], t->to, t->n_pages, true);
    over_if_both(t);
}

static inline void *on_place(void *user, struct xfer_id id, uint32_t index)
{
    struct sim_transfer *t = user;
    (void)id;
    ck_assert_uint_ge(index, t->n_have);
    return index < t->n_pages ? page_of(&t->world->nodes[t->reader], t->to[index]) : NULL;
}

/* ---------------------------------------------------------------- transfers */

static inline bool take_pages(struct sim_node *n, int number, uint32_t count, uint32_t *out)
{
    uint32_t found = 0;
    for (uint32_t p = 0; p < WORLD_PAGES && found < count; p++)
        if (!n->use[p])
            out[found++] = p;
    for (uint32_t i = 0; found == count && i < count; i++) {
        check_poison(n, out[i]);
        n->is_poisoned[out[i]] = false;
        n->use[out[i]] = number + 1;
        n->generation[out[i]]++;
    }
    return found == count;
}

static inline void begin_transfer(struct world *w)
{
    struct sim_transfer *t = &w->transfers[w->n_begun];
    uint64_t now = clock_now(&w->clock);
    *t = (struct sim_transfer){.world = w, .number = w->n_begun, .n_pages = 1 + (uint32_t)world_draw(w, WORLD_RUN)};
    t->holder = (int)world_draw(w, WORLD_NODES);
    t->reader = (t->holder + 1 + (int)world_draw(w, WORLD_NODES - 1)) % WORLD_NODES;
    struct sim_node *h = &w->nodes[t->holder], *r = &w->nodes[t->reader];
    if (!take_pages(h, t->number, t->n_pages, t->from))
        return;
    if (!take_pages(r, t->number, t->n_pages, t->to)) {
        give_back(h, t->from, t->n_pages, false);
        return;
    }
    if (!world_draw(w, 3))
        t->n_have = (uint32_t)world_draw(w, t->n_pages + 1);
    for (uint32_t p = 0; p < t->n_pages; p++)
        for (uint64_t i = 0; i < w->page_bytes / 8; i++) {
            ((uint64_t *)page_of(h, t->from[p]))[i] = word_of(t, p, i);
            if (p < t->n_have)
                ((uint64_t *)page_of(r, t->to[p]))[i] = word_of(t, p, i);
        }
    t->at[STEP_GRANT] = now + 1 + world_draw(w, 5 * NS_PER_MS);
    t->at[STEP_ANNOUNCE] = t->at[STEP_GRANT] + world_draw(w, 5 * NS_PER_MS);
    t->at[STEP_PULL] = now + 1 + world_draw(w, 10 * NS_PER_MS);
    if (!world_draw(w, 20))
        t->at[STEP_CANCEL_LEASE] = t->at[STEP_GRANT] + world_draw(w, 20 * NS_PER_MS);
    if (!world_draw(w, 20))
        t->at[STEP_CANCEL_PULL] = t->at[STEP_PULL] + world_draw(w, 20 * NS_PER_MS);
    w->n_begun++;
}

static inline void announce(struct sim_transfer *t)
{
    struct world *w = t->world;
    struct sim_node *h = &w->nodes[t->holder];
    struct xfer_page pages[WORLD_RUN];
    uint32_t end = t->n_announced + 1 + (uint32_t)world_draw(w, WORLD_LAYERS - t->n_announced);
    for (uint32_t i = 0; i < t->n_pages; i++)
        pages[i] = (struct xfer_page){page_of(h, t->from[i]), h->generation[t->from[i]]};
    xfer_lease_announce(h->x, (struct xfer_id){7, (uint64_t)t->number + 1}, 0, pages, t->n_pages,
                        (uint16_t)t->n_announced, (uint16_t)end);
    t->n_announced = end;
    uint64_t next = clock_now(&w->clock) + 1 + world_draw(w, 5 * NS_PER_MS);
    t->at[end == WORLD_LAYERS ? STEP_FINISH : STEP_ANNOUNCE] = next;
}

static inline void take_step(struct sim_transfer *t, enum step step)
{
    struct world *w = t->world;
    struct xfer *holder = w->nodes[t->holder].x, *reader = w->nodes[t->reader].x;
    const struct xfer_id id = {7, (uint64_t)t->number + 1};
    t->at[step] = 0;
    switch (step) {
    case STEP_GRANT:
        xfer_lease_grant(holder, &(struct xfer_lease_params){.id = id,
                                                             .reader_incarnation = (uint64_t)t->reader + 1,
                                                             .duration_ns = 3 * NS_PER_S,
                                                             .on_end = on_lease_end,
                                                             .user = t});
        return;
    case STEP_ANNOUNCE:
        if (!t->lease_ended)
            announce(t);
        return;
    case STEP_FINISH:
        xfer_lease_finish(holder, id, t->n_pages, &t->number, sizeof(t->number));
        return;
    case STEP_PULL:
        xfer_pull_start(reader, &(struct xfer_pull_params){.id = id,
                                                           .address = w->nodes[t->holder].name,
                                                           .holder_incarnation = (uint64_t)t->holder + 1,
                                                           .deadline_ns = clock_now(&w->clock) + 10 * NS_PER_S,
                                                           .n_have = t->n_have,
                                                           .place = on_place,
                                                           .on_end = on_pull_end,
                                                           .user = t});
        return;
    case STEP_CANCEL_LEASE:
        xfer_lease_cancel(holder, id);
        return;
    default:
        xfer_pull_cancel(reader, id);
    }
}

/* Does the steps that are due. Returns the time of the next one. */
static inline uint64_t run_schedule(struct world *w)
{
    uint64_t now = clock_now(&w->clock), next = UINT64_MAX;
    if (w->n_begun < w->n_transfers && w->n_begun - w->n_over < WORLD_AT_ONCE)
        begin_transfer(w);
    for (int i = w->n_begun > 1024 ? w->n_begun - 1024 : 0; i < w->n_begun; i++) {
        struct sim_transfer *t = &w->transfers[i];
        for (int s = 0; s < N_STEPS; s++) {
            if (t->at[s] && t->at[s] <= now)
                take_step(t, (enum step)s);
            if (t->at[s] && t->at[s] < next)
                next = t->at[s];
        }
    }
    if (w->n_begun < w->n_transfers && w->n_begun - w->n_over < WORLD_AT_ONCE && now + NS_PER_MS < next)
        next = now + NS_PER_MS;
    return next;
}

/* ------------------------------------------------------------------ the run */

/* Runs all nodes until nothing more happens at this moment. Returns the time of the next event. */
static inline uint64_t settle(struct world *w)
{
    uint64_t due = UINT64_MAX;
    bool any = true;
    for (int turns = 0; any; turns++) {
        if (turns == 100000)
            ck_abort_msg("seed %llu: the nodes never come to rest", (unsigned long long)w->seed);
        any = false;
        due = UINT64_MAX;
        for (int i = 0; i < WORLD_NODES; i++) {
            uint64_t d;
            any |= xfer_step(w->nodes[i].x, &d);
            due = d < due ? d : due;
        }
    }
    return due;
}

static inline void world_open(struct world *w, uint64_t seed, const char *script, int n_transfers)
{
    *w = (struct world){.seed = seed, .n_transfers = n_transfers, .log = {.who = "sim", .level = LOG_ERROR}};
    clock_init_virtual(&w->clock, NS_PER_S);
    w->page_bytes = kv_layout_page_bytes(&WORLD_LAYOUT);
    w->transfers = mem_array((size_t)n_transfers, sizeof(w->transfers[0]));
    w->hub = xfer_hub_open();
    for (int i = 0; i < WORLD_NODES; i++) {
        struct sim_node *n = &w->nodes[i];
        char seeded[1024];
        void *arena;
        n->world = w;
        snprintf(n->name, sizeof(n->name), "node-%d", i);
        snprintf(seeded, sizeof(seeded), "seed=%llu %s", (unsigned long long)random_at(seed, 5, (uint64_t)i), script);
        ck_assert_int_eq(faults_open(seeded, &w->log, &n->faults, NULL), TD_OK);
        ck_assert_int_eq(mem_map(WORLD_PAGES * w->page_bytes, &arena), TD_OK);
        n->arena = arena;
        const struct xfer_config c = {.backend = XFER_LOOPBACK,
                                      .hub = w->hub,
                                      .name = n->name,
                                      .listen = n->name,
                                      .incarnation = (uint64_t)i + 1,
                                      .layout = &WORLD_LAYOUT,
                                      .arena = arena,
                                      .arena_bytes = WORLD_PAGES * w->page_bytes,
                                      .faults = n->faults,
                                      .is_driven = true,
                                      .clock = &w->clock,
                                      .log = &w->log};
        ck_assert_int_eq(xfer_open(&c, &n->x, NULL), TD_OK);
    }
}

static inline void advance(struct world *w, uint64_t next)
{
    uint64_t now = clock_now(&w->clock);
    clock_advance(&w->clock, next > now ? next - now : 1000);
}

static inline void world_run(struct world *w)
{
    while (w->n_over < w->n_transfers) {
        uint64_t scheduled = run_schedule(w), due = settle(w);
        uint64_t next = scheduled < due ? scheduled : due;
        if (w->n_over < w->n_transfers && next >= clock_now(&w->clock) + 60 * NS_PER_S)
            ck_abort_msg("seed %llu: %d of %d transfers never ended", (unsigned long long)w->seed,
                         w->n_begun - w->n_over, w->n_begun);
        advance(w, next);
    }
}

static inline void world_close(struct world *w)
{
    bool is_over = false;
    for (int turns = 0; !is_over; turns++) {
        ck_assert_msg(turns < 10000, "seed %llu: the nodes never stop", (unsigned long long)w->seed);
        is_over = true;
        for (int i = 0; i < WORLD_NODES; i++)
            is_over &= xfer_stop(w->nodes[i].x);
        uint64_t due = settle(w);
        if (!is_over)
            advance(w, due < UINT64_MAX ? due : 0);
    }
    for (int i = 0; i < WORLD_NODES; i++) {
        struct sim_node *n = &w->nodes[i];
        struct xfer_stats s = xfer_stats(n->x);
        ck_assert(!s.leases_open && !s.pulls_open && !s.peers_up);
        for (uint32_t p = 0; p < WORLD_PAGES; p++) {
            ck_assert_msg(!n->use[p], "seed %llu: page %u of %s is lost", (unsigned long long)w->seed, p, n->name);
            check_poison(n, p);
        }
        for (int site = 0; site < FAULT_SITES; site++)
            for (int kind = 0; kind < FAULT_KINDS; kind++)
                w->n_faults[site][kind] += faults_count(n->faults, (enum fault_site)site, (enum fault_kind)kind);
        xfer_close(n->x);
        faults_close(n->faults);
        mem_unmap(n->arena, WORLD_PAGES * w->page_bytes);
    }
    xfer_hub_close(w->hub);
    free(w->transfers);
}
