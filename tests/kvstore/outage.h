/* A store whose disk fails for a while: shared by tests of injected faults and tests of full disks. */
#pragma once

#include "kvstore/kvstore_internal.h"
#include "kvstore/offline.h"
#include "tests/kvstore/world.h"

static inline uint64_t counted(const struct world *w, uint32_t metric)
{
    return metrics_get(w->store->counters, metric);
}

static inline void check_counters(const struct world *w)
{
    static const uint32_t ENDS[] = {STORE_HITS_DRAM,    STORE_HITS_SSD,     STORE_MISS_ABSENT,
                                    STORE_MISS_NO_SLOT, STORE_MISS_CORRUPT, STORE_MISS_IO,
                                    STORE_MISS_SLOW,    STORE_MISS_ENDED,   STORE_MISS_STOPPING};
    static const uint32_t OFFERS[] = {STORE_PUTS, STORE_KNOWN, STORE_DROP_NO_SLOT, STORE_DROP_TRANSFER,
                                      STORE_DROP_STOPPING};
    uint64_t ends = 0, offers = 0;
    for (size_t i = 0; i < sizeof(ENDS) / sizeof(ENDS[0]); i++)
        ends += counted(w, ENDS[i]);
    for (size_t i = 0; i < sizeof(OFFERS) / sizeof(OFFERS[0]); i++)
        offers += counted(w, OFFERS[i]);
    ck_assert_uint_eq(counted(w, STORE_ASKED), ends);
    ck_assert_uint_eq(counted(w, STORE_OFFERED), offers);
}

/* Waits until no block waits to be written. */
static inline void settle(struct world *w)
{
    uint64_t until = wall_ns() + 20 * NS_PER_S;
    bool is_quiet;
    do { /* its events have been sent when one more heartbeat has come */
        is_quiet = !ssd_tier_stats(w->store->ssd).queued_bytes;
        uint32_t loads = (uint32_t)ROUTER_READ(w->router, w->router->n_loads);
        ROUTER_WAIT(w->router, w->router->n_loads > loads);
        ck_assert_uint_lt(wall_ns(), until);
    } while (!is_quiet);
}

/* Offers new blocks until one is durable again, as a worker that goes on offering would. */
static inline void wait_durable(struct world *w, uint32_t first)
{
    uint64_t until = wall_ns() + 10 * NS_PER_S;
    for (uint32_t i = first; !ROUTER_READ(w->router, w->router->in_tier[TIER_SSD][i]); i++) {
        ck_assert_msg(wall_ns() < until, "nothing became durable within 10 s");
        offer(w, i + 1, 1);
        uint32_t loads = (uint32_t)ROUTER_READ(w->router, w->router->n_loads);
        ROUTER_WAIT(w->router, w->router->n_loads > loads || w->router->in_tier[TIER_SSD][i + 1]);
    }
}

static inline void wait_sure(struct world *w)
{
    uint64_t until = wall_ns() + 30 * NS_PER_S;
    while (ssd_tier_stats(w->store->ssd).is_in_doubt) {
        ck_assert_msg(wall_ns() < until, "what is on disk is not known after 30 s");
        uint32_t loads = (uint32_t)ROUTER_READ(w->router, w->router->n_loads);
        ROUTER_WAIT(w->router, w->router->n_loads > loads);
    }
}

static inline void note_on_disk(void *user, const struct offline_block *b)
{
    bool *is_there = user;
    ck_assert_int_eq(b->status, TD_OK);
    is_there[number_of(&b->header.key)] = true;
}

/* Stops the store, compares its directory with what the store told the router, and starts it again. Returns
 * the number of blocks that both have. Forgotten blocks (by number; NULL: none) must be in neither. */
static inline uint32_t check_disk(struct world *w, const bool *forgotten)
{
    static bool told[ROUTER_BLOCKS], found[ROUTER_BLOCKS];
    uint32_t n_both = 0, n_orphans = 0, n_lost = 0;
    struct offline *o;
    struct clock clock;
    struct td_error e = {""};
    clock_init_real(&clock);
    settle(w);
    pthread_mutex_lock(&w->router->lock);
    memcpy(told, w->router->in_tier[TIER_SSD], sizeof(told));
    pthread_mutex_unlock(&w->router->lock);
    stop_store(w);
    const struct log log = {.who = "test", .level = LOG_ERROR};
    ck_assert_msg(!offline_open(w->dir.store, false, &clock, &log, &o, &e), "%s", e.text);
    memset(found, 0, sizeof(found));
    ck_assert_int_eq(offline_each(o, note_on_disk, found, &e), TD_OK);
    offline_close(o);
    for (uint32_t i = 0; i < ROUTER_BLOCKS; i++) {
        n_both += told[i] && found[i];
        n_orphans += found[i] && !told[i];
        n_lost += told[i] && !found[i];
        ck_assert_msg(!forgotten || !forgotten[i] || (!told[i] && !found[i]), "block %u was forgotten, and is back", i);
    }
    fprintf(stderr, "# %u blocks on disk and known, %u on disk only, %u known only\n", n_both, n_orphans, n_lost);
    ck_assert_uint_eq(n_orphans, 0);
    ck_assert_uint_eq(n_lost, 0);
    start_store(w);
    return n_both;
}

/* Offers new blocks for ns nanoseconds, at most 5000 a second. Returns the number after the last block. */
static inline uint32_t offer_for(struct world *w, uint32_t first, uint64_t ns)
{
    for (uint64_t until = wall_ns() + ns; wall_ns() < until; first += 25) {
        offer(w, first, 25);
        nanosleep(&(struct timespec){.tv_nsec = 5 * NS_PER_MS}, NULL);
    }
    return first;
}
