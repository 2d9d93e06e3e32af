#include "cli/local.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "base/thread.h"
#include "router/router.h"
#include "transfer/xfer.h"
#include "worker/sizes.h"
#include "worker/worker.h"

enum { N_WORKERS = 2, MAX_ARGS = 64 };

struct local {
    struct xfer_hub *hub;
    struct worker *workers[N_WORKERS];
    struct router *router;
    pthread_t threads[N_WORKERS + 1];
    int n_threads;
    char addresses[256], secret[40];
};

/*
 * The options borrow their strings from args, which outlive the cluster. `strings` has those of a file that
 * --config names: they are never freed, because the options borrow them, too.
 */
static enum td_status parse_args(const char *program, const struct option *table, const char *const *args, void *values,
                                 struct td_error *e)
{
    char *argv[MAX_ARGS] = {(char *)(uintptr_t)program}, *strings;
    int argc = 1;
    enum options_action action;
    for (; *args && argc < MAX_ARGS - 1; args++)
        argv[argc++] = (char *)(uintptr_t)*args;
    if (*args)
        return td_fail(e, TD_ERR_INVALID, "options of workers: more than %d words", MAX_ARGS - 2);
    const struct options o = {.program = program, .usage = "", .about = "", .table = table};
    return options_parse(&o, argc, argv, values, NULL, NULL, &strings, &action, e);
}

static void *run_worker(void *w)
{
    worker_run(w);
    return NULL;
}

static void *run_router(void *r)
{
    router_run(r);
    return NULL;
}

/* Checks both pools together before anything is opened, because each worker only checks its own. */
static enum td_status check_pools(const struct worker_options *o, uint64_t *bytes_out, struct td_error *e)
{
    const struct available_memory there = available_memory("");
    struct size_asked pools[N_WORKERS];
    struct geometry g;
    enum td_status s = geometry_resolve(&o->geometry, &g, e);
    uint64_t weights = s ? 0 : sizes_weights(o, &g) * (sizes_shares_weights(o, &g) ? 1 : N_WORKERS);
    if (!s)
        s = sizes_pool(o, &g, sizes_left(&there, weights) / SIZES_ALONE, &pools[0], e);
    for (int i = 1; i < N_WORKERS; i++)
        pools[i] = pools[0];
    *bytes_out = pools[0].bytes;
    return s ? s : sizes_check(pools, N_WORKERS, weights, &there, e);
}

static enum td_status open_workers(struct local *l, const char *const *args, struct td_error *e)
{
    static const char *const ROLES[N_WORKERS] = {"prefill", "decode"};
    uint64_t bytes = 0;
    for (int i = 0; i < N_WORKERS; i++) {
        struct worker_config c = {.role = ROLES[i], .hub = l->hub};
        enum td_status s = parse_args("tandem generate --local", WORKER_OPTIONS, args, &c.options, e);
        if (!s && !i)
            s = check_pools(&c.options, &bytes, e);
        if (!c.options.pool_most)
            c.options.pool_most = (int64_t)bytes;
        if (c.options.device_memory <= 0) /* both are on one device */
            c.options.device_memory = SIZES_DEVICE_SHARE / N_WORKERS;
        c.options.name = i ? "decode-0" : "prefill-0";
        c.options.listen = "127.0.0.1:0";
        c.options.secret = l->secret;
        if (!s)
            s = worker_open(&c, &l->workers[i], e);
        if (s)
            return s;
        size_t n = strlen(l->addresses);
        snprintf(l->addresses + n, sizeof(l->addresses) - n, "%s%s", i ? "," : "", worker_address(l->workers[i]));
        l->threads[l->n_threads++] = thread_start("engine", run_worker, l->workers[i]);
    }
    return TD_OK;
}

enum td_status local_open(const char *model, const char *const *worker_args, const char *plan, enum local_wire wire,
                          struct local **out, struct td_error *error_out)
{
    struct local *l = mem_zalloc(sizeof(*l));
    struct router_options options = {0};
    l->hub = wire == LOCAL_LOOPBACK ? xfer_hub_open() : NULL;
    /* Other users of this host reach the ports. */
    snprintf(l->secret, sizeof(l->secret), "%016" PRIx64 "%016" PRIx64, random_u64(), random_u64());
    enum td_status s = open_workers(l, worker_args, error_out);
    if (!s) {
        const char *args[] = {"--model",        model,    "--workers", l->addresses,  "--listen",
                              "127.0.0.1:0",    "--plan", plan,        "--log-level", "warn",
                              "--admin-listen", "none",   NULL};
        s = parse_args("tandem generate --local", ROUTER_OPTIONS, args, &options, error_out);
    }
    if (!s)
        options.secret = l->secret;
    if (!s)
        s = router_open(&options, &l->router, error_out);
    if (s) {
        local_close(l);
        return s;
    }
    l->threads[l->n_threads++] = thread_start("router", run_router, l->router);
    *out = l;
    return TD_OK;
}

const char *local_router(const struct local *l)
{
    return router_address(l->router);
}

void local_close(struct local *l)
{
    if (!l)
        return;
    /* The router goes first: it cancels its legs, so the workers have nothing to finish. Each worker_run()
     * returns when its leases have ended, so all of them are told before any is joined. Closing comes last:
     * the threads use these objects. */
    if (l->router)
        router_stop(l->router);
    for (int i = 0; i < N_WORKERS; i++)
        if (l->workers[i])
            worker_stop(l->workers[i]);
    for (int i = 0; i < l->n_threads; i++)
        pthread_join(l->threads[i], NULL);
    router_close(l->router);
    for (int i = 0; i < N_WORKERS; i++)
        worker_close(l->workers[i]);
    xfer_hub_close(l->hub);
    free(l);
}
