#include "cli/up_memory.h"

#include <inttypes.h>
#include <stdlib.h>

#include "kvstore/kvstore.h"
#include "worker/sizes.h"

enum { STORE_DRAIN_MS = 60000 }; /* it writes what is not on disk yet, as fast as --write-rate allows */

static bool is_worker(const struct child *c)
{
    return c->role == CHILD_PREFILL || c->role == CHILD_DECODE;
}

/* Routers and gateways need little, whatever the model. */
static bool has_plan(const struct child *c)
{
    return is_worker(c) || c->role == CHILD_STORE;
}

static enum td_status parse_child(const struct child *c, void *values, char **strings_out, struct td_error *e)
{
    enum options_action action;
    struct options o = {.program = "tandem-kvstore",
                        .usage = "",
                        .about = "",
                        .env_prefix = "TANDEM_KVSTORE",
                        .table = KVSTORE_OPTIONS};
    if (is_worker(c)) {
        o.program = c->role == CHILD_PREFILL ? "tandem-prefill" : "tandem-decode";
        o.env_prefix = c->role == CHILD_PREFILL ? "TANDEM_PREFILL" : "TANDEM_DECODE";
        o.table = WORKER_OPTIONS;
    }
    return options_parse(&o, (int)c->args.n, c->args.words, values, NULL, NULL, strings_out, &action, e);
}

/* A child's options as the child will read them, and the geometry that follows from them. */
struct child_plan {
    struct worker_options worker;
    struct kvstore_options store;
    struct geometry geometry;
    char *strings;
};

static enum td_status plan_child(const struct child *c, struct child_plan *out, struct td_error *e)
{
    *out = (struct child_plan){0};
    enum td_status s = parse_child(c, is_worker(c) ? (void *)&out->worker : (void *)&out->store, &out->strings, e);
    return s ? s : geometry_resolve(is_worker(c) ? &out->worker.geometry : &out->store.geometry, &out->geometry, e);
}

static int64_t drain_ms_of(const struct child *c, const struct child_plan *p)
{
    return is_worker(c) ? p->worker.drain_ms : STORE_DRAIN_MS;
}

static bool has_size(const struct worker_options *o)
{
    return o->pages || o->pool_bytes;
}

/* On a device the worker itself finds out how much of it fits there. */
static void add_size(struct child *c, const struct child_plan *p, uint64_t bytes)
{
    bool is_device = sizes_has_device(&p->worker, &p->geometry);
    if (!is_device || !p->worker.pool_most)
        args_add(&c->args, "--pool-%s=%" PRIu64, is_device ? "most" : "bytes", bytes);
}

/* Workers on one device share it, unless they were told otherwise. */
static void add_share(struct child *children, const struct child_plan *plans, uint32_t n, uint32_t i)
{
    uint32_t n_same = 0;
    const struct kernels_config *mine = &plans[i].geometry.kernels;
    for (uint32_t k = 0; k < n; k++)
        n_same += is_worker(&children[k]) && plans[k].geometry.kernels.device == mine->device &&
                  plans[k].geometry.kernels.ordinal == mine->ordinal;
    if (sizes_has_device(&plans[i].worker, &plans[i].geometry) && n_same > 1 && plans[i].worker.device_memory <= 0)
        args_add(&children[i].args, "--device-memory=%.4f", SIZES_DEVICE_SHARE / n_same);
}

/* Bytes of all workers' weights; shared weights count once. */
static uint64_t weights_of(const struct child *children, const struct child_plan *plans, uint32_t n)
{
    uint64_t shared = 0, own = 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct child_plan *p = &plans[i];
        uint64_t bytes = is_worker(&children[i]) ? sizes_weights(&p->worker, &p->geometry) : 0;
        if (!bytes || !sizes_shares_weights(&p->worker, &p->geometry))
            own += bytes;
        else if (bytes > shared)
            shared = bytes;
    }
    return shared + own;
}

/* Adds sizes to the command lines and checks the sum. plans[i] is the plan of children[i]. */
static enum td_status add_up(struct child *children, const struct child_plan *plans, uint32_t n,
                             uint64_t *default_bytes_out, struct td_error *e)
{
    const struct available_memory there = available_memory("");
    uint64_t weights = weights_of(children, plans, n), left = sizes_left(&there, weights);
    struct size_asked *all = mem_array(n, sizeof(*all));
    uint32_t n_workers = 0, n_stores = 0, n_asked = 0;
    enum td_status s = TD_OK;
    *default_bytes_out = 0;
    for (uint32_t i = 0; i < n; i++)
        if (is_worker(&children[i]))
            n_workers++;
        else
            n_stores += children[i].role == CHILD_STORE;
    for (uint32_t i = 0; i < n && !s; i++) {
        struct size_asked *asked = &all[n_asked];
        const struct child_plan *p = &plans[i];
        if (!has_plan(&children[i]))
            continue;
        n_asked++;
        if (!is_worker(&children[i])) {
            sizes_dram(p->store.dram_bytes, &p->geometry, left / SIZES_ALONE / n_stores, asked);
            asked->option = "--store-dram";
            if (!p->store.dram_bytes)
                args_add(&children[i].args, "--dram-bytes=%" PRIu64, asked->bytes);
            continue;
        }
        uint64_t part = sizes_has_device(&p->worker, &p->geometry) ? SIZES_DEVICES : SIZES_TOGETHER;
        s = sizes_pool(&p->worker, &p->geometry, left / part / n_workers, asked, e);
        if (s || has_size(&p->worker))
            continue;
        *default_bytes_out = asked->bytes;
        add_size(&children[i], p, asked->bytes);
        add_share(children, plans, n, i);
    }
    if (!s)
        s = sizes_check(all, n_asked, weights, &there, e);
    free(all);
    return s;
}

enum td_status up_memory_plan(struct child *children, uint32_t n, uint64_t *default_bytes_out,
                              struct td_error *error_out)
{
    struct child_plan *plans = mem_array(n, sizeof(*plans));
    enum td_status s = TD_OK;
    for (uint32_t i = 0; i < n && !s; i++)
        if (has_plan(&children[i])) {
            s = plan_child(&children[i], &plans[i], error_out);
            children[i].drain_ms = drain_ms_of(&children[i], &plans[i]);
        }
    if (!s)
        s = add_up(children, plans, n, default_bytes_out, error_out);
    for (uint32_t i = 0; i < n; i++)
        free(plans[i].strings);
    free(plans);
    return s;
}

enum td_status up_memory_add(struct child *joined, uint64_t default_bytes, struct td_error *error_out)
{
    struct child_plan p;
    enum td_status s = plan_child(joined, &p, error_out);
    if (!s && is_worker(joined) && !has_size(&p.worker) && default_bytes)
        add_size(joined, &p, default_bytes);
    joined->drain_ms = drain_ms_of(joined, &p);
    free(p.strings);
    return s;
}
