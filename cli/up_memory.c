#include "cli/up_memory.h"

#include <inttypes.h>
#include <stdlib.h>

#include "kvstore/kvstore.h"
#include "worker/sizes.h"

static bool is_worker(const struct child *c)
{
    return c->role == CHILD_PREFILL || c->role == CHILD_DECODE;
}

static enum td_status parse(const struct child *c, void *values, char **strings_out, struct td_error *e)
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

/* *has_default_out: it was told no size. */
static enum td_status measure_worker(const struct child *c, uint64_t share_bytes, struct size_asked *out,
                                     bool *has_default_out, struct td_error *e)
{
    struct worker_options o = {0};
    struct geometry g;
    char *strings = NULL;
    enum td_status s = parse(c, &o, &strings, e);
    if (!s)
        s = geometry_resolve(&o.geometry, &g, e);
    if (!s)
        s = sizes_pool(&o, &g, share_bytes, out, e);
    *has_default_out = !o.pages && !o.pool_bytes;
    free(strings);
    return s;
}

static enum td_status measure_store(const struct child *c, uint64_t share_bytes, struct size_asked *out,
                                    struct td_error *e)
{
    struct kvstore_options o = {0};
    struct geometry g;
    char *strings = NULL;
    enum td_status s = parse(c, &o, &strings, e);
    if (!s)
        s = geometry_resolve(&o.geometry, &g, e);
    if (!s)
        sizes_dram(o.dram_bytes, &g, share_bytes, out);
    out->option = "--store-dram";
    free(strings);
    return s;
}

static void add_size(struct child *c, uint64_t bytes)
{
    args_add(&c->args, "--pool-bytes=%" PRIu64, bytes);
}

enum td_status up_memory_plan(struct child *children, uint32_t n, uint64_t *default_bytes_out,
                              struct td_error *error_out)
{
    const struct available_memory there = available_memory("");
    struct size_asked *all = mem_array(n, sizeof(*all));
    uint32_t n_workers = 0, n_asked = 0;
    uint64_t default_bytes = 0;
    enum td_status s = TD_OK;
    for (uint32_t i = 0; i < n; i++)
        n_workers += is_worker(&children[i]);
    for (uint32_t i = 0; i < n && !s; i++) {
        bool has_default = false;
        if (is_worker(&children[i]))
            s = measure_worker(&children[i], there.bytes / SIZES_TOGETHER / n_workers, &all[n_asked++], &has_default,
                               error_out);
        else if (children[i].role == CHILD_STORE)
            s = measure_store(&children[i], there.bytes / SIZES_ALONE, &all[n_asked++], error_out);
        if (s || !has_default)
            continue;
        default_bytes = all[n_asked - 1].bytes;
        add_size(&children[i], default_bytes);
    }
    if (!s)
        s = sizes_check(all, n_asked, &there, error_out);
    *default_bytes_out = default_bytes;
    free(all);
    return s;
}

enum td_status up_memory_add(struct child *worker, uint64_t default_bytes, struct td_error *error_out)
{
    struct size_asked asked;
    bool has_default;
    enum td_status s = measure_worker(worker, UINT64_MAX, &asked, &has_default, error_out);
    if (!s && has_default && default_bytes)
        add_size(worker, default_bytes);
    return s;
}
