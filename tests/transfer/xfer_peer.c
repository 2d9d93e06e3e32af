/*
 * A process to be killed: it holds leases, or pulls, until it is ended.
 *
 *     xfer_peer holder TRANSPORTS ID_INCARNATION           offers leases with counters 1, 2, .. for ever;
 *                                                          prints its address
 *     xfer_peer reader TRANSPORTS ID_INCARNATION ADDRESS   pulls counters 1, 2, .. from ADDRESS for ever
 *
 * WINDOW transfers are open at any time. The process dies with its parent.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/random.h"
#include "tests/transfer/peer_shape.h"
#include "transfer/xfer.h"

struct self {
    struct xfer *x;
    struct clock clock;
    const char *address;
    uint64_t id_incarnation;
    uint8_t *arena;
    size_t page_bytes;
};

static void on_lease_end(void *user, struct xfer_id id, enum td_status status, bool in_doubt);

static void offer(struct self *s, uint64_t counter)
{
    struct xfer_page pages[PEER_PAGES];
    for (uint32_t i = 0; i < PEER_PAGES; i++)
        pages[i] = (struct xfer_page){s->arena + i * s->page_bytes, i};
    struct xfer_lease_params p = {
        .id = {s->id_incarnation, counter}, .duration_ns = 60 * NS_PER_S, .on_end = on_lease_end, .user = s};
    xfer_lease_grant(s->x, &p);
    xfer_lease_announce(s->x, p.id, 0, pages, PEER_PAGES, 0, PEER_LAYERS);
    xfer_lease_finish(s->x, p.id, PEER_PAGES, NULL, 0);
}

static void on_lease_end(void *user, struct xfer_id id, enum td_status status, bool in_doubt)
{
    (void)status;
    (void)in_doubt;
    offer(user, id.counter + PEER_WINDOW);
}

static void *place(void *user, struct xfer_id id, uint32_t index)
{
    struct self *s = user;
    return s->arena + ((id.counter % PEER_WINDOW) * PEER_PAGES + index) * s->page_bytes;
}

static void on_pull_end(void *user, struct xfer_id id, const struct xfer_pull_result *result);

static void pull(struct self *s, uint64_t counter)
{
    struct xfer_pull_params p = {.id = {s->id_incarnation, counter},
                                 .address = s->address,
                                 .deadline_ns = clock_now(&s->clock) + 60 * NS_PER_S,
                                 .place = place,
                                 .on_end = on_pull_end,
                                 .user = s};
    xfer_pull_start(s->x, &p);
}

static void on_pull_end(void *user, struct xfer_id id, const struct xfer_pull_result *result)
{
    if (!result->status)
        pull(user, id.counter + PEER_WINDOW);
}

int main(int argc, char **argv)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (argc < 4)
        return 2;
    static struct self s;
    clock_init_real(&s.clock);
    s.id_incarnation = strtoull(argv[3], NULL, 10);
    s.address = argc > 4 ? argv[4] : NULL;
    struct kv_layout layout = PEER_LAYOUT;
    s.page_bytes = kv_layout_page_bytes(&layout);
    size_t arena_bytes = s.page_bytes * PEER_PAGES * PEER_WINDOW;
    bool is_mapped = !strcmp(argv[2], "mapped");
    int fd = 0;
    if (is_mapped ? mem_map_shared(arena_bytes, (void **)&s.arena, &fd) : mem_map(arena_bytes, (void **)&s.arena))
        return 2;
    struct log log = {.who = "child", .level = LOG_ERROR};
    struct xfer_config c = {.backend = XFER_NET,
                            .name = argv[1],
                            .listen = "127.0.0.1:0",
                            .transports = is_mapped ? "auto" : argv[2],
                            .incarnation = random_u64(),
                            .layout = &layout,
                            .arena = s.arena,
                            .arena_bytes = arena_bytes,
                            .arena_fd = fd,
                            .silence_ns = peer_silence_ns(),
                            .clock = &s.clock,
                            .log = &log};
    struct td_error error = {""};
    if (xfer_open(&c, &s.x, &error)) {
        fprintf(stderr, "%s\n", error.text);
        return 2;
    }
    printf("%s\n", xfer_address(s.x));
    fflush(stdout);
    for (uint64_t i = 1; i <= PEER_WINDOW; i++) {
        if (s.address)
            pull(&s, i);
        else
            offer(&s, i);
    }
    for (;;)
        pause();
}
