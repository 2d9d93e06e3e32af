/*
 * Several endpoints in one process, for the test that connects all with all.
 *
 *     xfer_many holder TLS N FIRST N_READERS          endpoints FIRST.. that lease to readers 0..; prints
 *                                                     their addresses, then waits
 *     xfer_many reader TLS N FIRST ADDRESS...         endpoints FIRST.. that each pull ROUNDS times from
 *                                                     every address (holder 0, 1, ..), check every word, and
 *                                                     print "ok" and the number of pulls
 *
 * The process dies with its parent.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/random.h"
#include "transfer/xfer.h"

enum { PAGES = 8, ROUNDS = 3, PATIENCE_S = 240 };
static const struct kv_layout LAYOUT = {NUM_F16, 4, 2, 128, 16}; /* page 64 KiB */
enum { PAGE_BYTES = 65536, WORDS = PAGE_BYTES / 8 };
static const struct log LOG = {.who = "many", .level = LOG_ERROR};

struct many {
    struct clock clock;
    pthread_mutex_t lock; /* main waits for a count that all endpoints raise */
    pthread_cond_t changed;
    uint32_t n_ended, n_bad;
};

struct endpoint {
    struct many *many;
    struct xfer *x;
    uint32_t index;
    uint8_t *arena;
    int n_addresses;
    char **addresses;
};

static struct many many;

static uint64_t word_of(uint32_t holder, uint32_t page, uint32_t at)
{
    return random_mix((uint64_t)holder << 32 | page) + at;
}

static int endpoint_open(struct endpoint *e, const char *transports, uint32_t n_pages, const char *listen)
{
    int fd = 0, is_mapped = !strcmp(transports, "mapped");
    uint64_t arena_bytes = (uint64_t)n_pages * PAGE_BYTES;
    char name[32];
    if (is_mapped ? mem_map_shared(arena_bytes, (void **)&e->arena, &fd) : mem_map(arena_bytes, (void **)&e->arena))
        return 2;
    snprintf(name, sizeof(name), "%s-%u", listen ? "holder" : "reader", e->index);
    const struct xfer_config c = {.backend = XFER_NET,
                                  .name = name,
                                  .listen = listen,
                                  .transports = is_mapped ? "auto" : transports,
                                  .incarnation = random_u64(),
                                  .layout = &LAYOUT,
                                  .arena = e->arena,
                                  .arena_bytes = arena_bytes,
                                  .arena_fd = fd,
                                  .clock = &many.clock,
                                  .log = &LOG};
    struct td_error error = {""};
    if (xfer_open(&c, &e->x, &error)) {
        fprintf(stderr, "%s\n", error.text);
        return 2;
    }
    return 0;
}

/* -------------------------------------------------------------------- holder */

static void on_lease_end(void *user, struct xfer_id id, enum td_status status, bool in_doubt)
{
    (void)user, (void)id, (void)status, (void)in_doubt;
}

static void lease_all(struct endpoint *e, uint32_t n_readers)
{
    struct xfer_page pages[PAGES];
    for (uint32_t i = 0; i < PAGES; i++) {
        pages[i] = (struct xfer_page){e->arena + (uint64_t)i * PAGE_BYTES, i};
        for (uint32_t at = 0; at < WORDS; at++)
            ((uint64_t *)(void *)e->arena)[i * WORDS + at] = word_of(e->index, i, at);
    }
    for (uint32_t r = 0; r < n_readers; r++) {
        for (uint64_t round = 0; round < ROUNDS; round++) {
            struct xfer_lease_params p = {.id = {1000 + r, e->index * ROUNDS + round + 1},
                                          .duration_ns = PATIENCE_S * NS_PER_S,
                                          .on_end = on_lease_end};
            xfer_lease_grant(e->x, &p);
            xfer_lease_announce(e->x, p.id, 0, pages, PAGES, 0, (uint16_t)LAYOUT.n_layers);
            xfer_lease_finish(e->x, p.id, PAGES, NULL, 0);
        }
    }
}

static int run_holders(struct endpoint *endpoints, uint32_t n, const char *transports, uint32_t n_readers)
{
    for (uint32_t i = 0; i < n; i++) {
        if (endpoint_open(&endpoints[i], transports, PAGES, "127.0.0.1:0"))
            return 2;
        lease_all(&endpoints[i], n_readers);
        printf("%s\n", xfer_address(endpoints[i].x));
    }
    fflush(stdout);
    for (;;)
        pause();
}

/* -------------------------------------------------------------------- reader */

static void *place(void *user, struct xfer_id id, uint32_t index)
{
    struct endpoint *e = user;
    return e->arena + ((id.counter - 1) / ROUNDS * PAGES + index) * PAGE_BYTES;
}

static void pull(struct endpoint *e, uint64_t counter);

static void on_pull_end(void *user, struct xfer_id id, const struct xfer_pull_result *result)
{
    struct endpoint *e = user;
    uint32_t holder = (uint32_t)((id.counter - 1) / ROUNDS);
    bool is_bad = result->status || result->n_pages != PAGES;
    for (uint32_t i = 0; i < PAGES && !is_bad; i++) {
        uint64_t *words = place(e, id, i);
        for (uint32_t at = 0; at < WORDS; at++)
            is_bad |= words[at] != word_of(holder, i, at);
        memset(words, 0, PAGE_BYTES);
    }
    if (is_bad)
        fprintf(stderr, "reader %u from holder %u: %s\n", e->index, holder, td_status_name(result->status));
    pthread_mutex_lock(&many.lock);
    many.n_ended++;
    many.n_bad += is_bad;
    pthread_cond_signal(&many.changed);
    pthread_mutex_unlock(&many.lock);
    if (id.counter % ROUNDS)
        pull(e, id.counter + 1);
}

static void pull(struct endpoint *e, uint64_t counter)
{
    struct xfer_pull_params p = {.id = {1000 + e->index, counter},
                                 .address = e->addresses[(counter - 1) / ROUNDS],
                                 .deadline_ns = clock_now(&many.clock) + PATIENCE_S * NS_PER_S,
                                 .place = place,
                                 .on_end = on_pull_end,
                                 .user = e};
    xfer_pull_start(e->x, &p);
}

static int run_readers(struct endpoint *endpoints, uint32_t n, const char *transports, int n_addresses,
                       char **addresses)
{
    for (uint32_t i = 0; i < n; i++) {
        struct endpoint *e = &endpoints[i];
        e->n_addresses = n_addresses;
        e->addresses = addresses;
        if (endpoint_open(e, transports, (uint32_t)n_addresses * PAGES, NULL))
            return 2;
        for (int holder = 0; holder < n_addresses; holder++)
            pull(e, (uint64_t)holder * ROUNDS + 1);
    }
    uint32_t n_all = n * (uint32_t)n_addresses * ROUNDS;
    pthread_mutex_lock(&many.lock);
    while (many.n_ended < n_all)
        pthread_cond_wait(&many.changed, &many.lock);
    pthread_mutex_unlock(&many.lock);
    for (uint32_t i = 0; i < n; i++)
        xfer_close(endpoints[i].x);
    printf("%s %u\n", many.n_bad ? "bad" : "ok", many.n_ended - many.n_bad);
    return many.n_bad ? 1 : 0;
}

int main(int argc, char **argv)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (argc < 6)
        return 2;
    uint32_t n = (uint32_t)atoi(argv[3]);
    clock_init_real(&many.clock);
    pthread_mutex_init(&many.lock, NULL);
    pthread_cond_init(&many.changed, NULL);
    struct endpoint *endpoints = mem_array(n, sizeof(endpoints[0]));
    for (uint32_t i = 0; i < n; i++)
        endpoints[i] = (struct endpoint){.many = &many, .index = (uint32_t)atoi(argv[4]) + i};
    int exit_code = !strcmp(argv[1], "holder") ? run_holders(endpoints, n, argv[2], (uint32_t)atoi(argv[5]))
                                               : run_readers(endpoints, n, argv[2], argc - 5, argv + 5);
    free(endpoints);
    return exit_code;
}
