/*
 * Fuzz target of what a router says to a worker: see fuzz.c. The worker is a real one on calls in memory,
 * with simulated compute and real pages (tests/worker/world.h).
 */
#include "tests/fuzz/no_check.h"

#include "base/endian.h"
#include "tests/worker/world.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct node_worker *node;

static void close_worker(void)
{
    if (node)
        world_close();
    node = NULL;
}

/*
 * The worker lives as long as nothing asks it to drain: opening it takes longer than a conversation. Each
 * input is a router's stream, after which every page must be free or cached again. Pages that wait for a
 * reader come back when their lease ends, which inputs don't wait for: the next one that leaves no lease
 * does.
 *
 * Steps: a byte (0: the worker has a turn; 1: the router attaches anew; else a message), and for a message a
 * u16 length and its bytes.
 */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const MORE[] = {"--lease-ms", "100", "--pages", "2048", NULL};
    static bool is_known;
    if (!is_known)
        atexit(close_worker);
    is_known = true;
    if (!node) {
        node = world_worker("decode", MORE);
        world_hush(node);
        node->w->log.level = LOG_ERROR;
    }
    bool drains = false;
    struct router_end *r = world_attach(node, WORLD_ROUTER + 1);
    for (size_t at = 0; at < size;) {
        uint8_t what = data[at++];
        if (what == 0)
            worker_turn(node->w, 0);
        else if (what == 1 && node->n_routers < WORLD_MAX) {
            router_leaves(r);
            r = world_attach(node, WORLD_ROUTER + 1);
        } else if (what > 1 && at + 2 <= size) {
            size_t n = get_u16(data + at);
            at += 2;
            n = n < size - at ? n : size - at;
            Tandem__Worker__V1__RouterMessage *m = tandem__worker__v1__router_message__unpack(NULL, n, data + at);
            at += n;
            if (!m)
                continue;
            drains |= m->kind_case == TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_DRAIN;
            router_says(r, m);
            tandem__worker__v1__router_message__free_unpacked(m, NULL);
        }
    }
    worker_turn(node->w, 0);
    router_leaves(r);
    if (!drains && LIST_EMPTY(&node->w->offers))
        check_quiet(node);
    call_forget(node->routers[0].call);
    while (node->n_routers > 1)
        if (node->routers[--node->n_routers].call)
            router_leaves(&node->routers[node->n_routers]);
    if (drains)
        close_worker();
    return 0;
}
