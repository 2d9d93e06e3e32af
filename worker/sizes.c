#include "worker/sizes.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const uint64_t LEAST_BYTES = 64ull << 20;
enum { DEVICE_BATCH = 256, DEVICE_CHUNK = 2048 };

bool sizes_has_device(const struct worker_options *o, const struct geometry *g)
{
    return g->kernels.device != DEVICE_CPU && !(o->engine && !strcmp(o->engine, "sim"));
}

void sizes_steps(struct worker_options *o, const struct geometry *g)
{
    bool on_device = sizes_has_device(o, g);
    if (!o->max_batch)
        o->max_batch = on_device ? DEVICE_BATCH : 64;
    if (!o->max_rows) {
        o->max_rows = on_device ? DEVICE_BATCH + DEVICE_CHUNK : 512;
        o->max_rows = o->max_rows > o->max_batch ? o->max_rows : o->max_batch;
    }
    if (!o->chunk_tokens)
        o->chunk_tokens = on_device ? DEVICE_CHUNK : 256;
}

uint64_t sizes_default(const struct kv_layout *layout, uint32_t max_context, uint32_t n, uint64_t share_bytes)
{
    uint64_t page = kv_layout_page_bytes(layout);
    uint64_t pages = ((uint64_t)max_context + layout->page_tokens - 1) / layout->page_tokens * n;
    uint64_t most = (share_bytes > LEAST_BYTES ? share_bytes : LEAST_BYTES) / page;
    pages = pages < most ? pages : most;
    return (pages ? pages : 1) * page;
}

enum td_status sizes_pool(const struct worker_options *o, const struct geometry *g, uint64_t share_bytes,
                          struct size_asked *out, struct td_error *error_out)
{
    uint64_t page = kv_layout_page_bytes(&g->layout);
    uint32_t context = o->max_context ? (uint32_t)o->max_context : g->config.max_positions;
    if (o->pages) {
        *out = (struct size_asked){"--pages", (uint64_t)o->pages * page};
        return TD_OK;
    }
    if (o->pool_bytes && (uint64_t)o->pool_bytes < page)
        return td_fail(error_out, TD_ERR_INVALID, "--pool-bytes %lld: a page takes %llu", (long long)o->pool_bytes,
                       (unsigned long long)page);
    if (o->pool_bytes) {
        *out = (struct size_asked){"--pool-bytes", (uint64_t)o->pool_bytes / page * page};
    } else if (sizes_has_device(o, g)) {
        uint32_t n = o->max_batch ? (uint32_t)o->max_batch : DEVICE_BATCH;
        uint64_t most = o->pool_most ? (uint64_t)o->pool_most : share_bytes;
        *out = (struct size_asked){"--pool-most", sizes_default(&g->layout, context, n, most)};
    } else {
        *out = (struct size_asked){"--pool-bytes", sizes_default(&g->layout, context, SIZES_CONTEXTS, share_bytes)};
    }
    return TD_OK;
}

void sizes_dram(int64_t dram_bytes, const struct geometry *g, uint64_t share_bytes, struct size_asked *out)
{
    uint64_t bytes = dram_bytes ? (uint64_t)dram_bytes
                                : sizes_default(&g->layout, g->config.max_positions, SIZES_STORE_CONTEXTS, share_bytes);
    *out = (struct size_asked){"--dram-bytes", bytes};
}

static uint64_t weight_bytes(const struct geometry *g)
{
    static const uint64_t BITS[] = {
        [WEIGHTS_AS_STORED] = 16, [WEIGHTS_INT8] = 8, [WEIGHTS_FP8] = 8, [WEIGHTS_INT4] = 4};
    return model_config_n_params(&g->config) * BITS[g->weights] / 8;
}

enum td_status sizes_on_devices(const struct worker_options *o, const struct geometry *g,
                                const struct size_device *least, uint64_t *bytes_out, struct td_error *error_out)
{
    double share = o->device_memory > 0 ? o->device_memory : SIZES_DEVICE_SHARE;
    double total = (double)least->total_bytes, kept = fmin(SIZES_DEVICE_KEPT, 1 - share) * total;
    uint32_t n_ranks = rank_options_n(&o->ranks);
    double there = fmin(share * total, (double)least->free_bytes - kept);
    if (o->ranks.devices && !strcmp(o->ranks.devices, "same"))
        there /= n_ranks;
    /* Ranks that divide the layers' heads hold a latent as a whole. */
    double parts = (double)(g->layout.kind == KV_LATENT ? o->ranks.n_pipeline : n_ranks);
    double bytes = (there - (double)weight_bytes(g) / n_ranks) * parts;
    *bytes_out = bytes > 0 ? (uint64_t)bytes : 0;
    if (*bytes_out >= kv_layout_page_bytes(&g->layout))
        return TD_OK;
    char all[24], left[24], weights[24];
    available_text(least->total_bytes, all);
    available_text(least->free_bytes, left);
    available_text(weight_bytes(g) / n_ranks, weights);
    return td_fail(error_out, TD_ERR_INVALID,
                   "--device-memory %g: no KV page fits on a device of %s, %s of it free, beside weights of %s", share,
                   all, left, weights);
}

uint64_t sizes_weights(const struct worker_options *o, const struct geometry *g)
{
    if (g->kernels.device != DEVICE_CPU || !strcmp(o->engine, "sim"))
        return 0;
    return weight_bytes(g);
}

bool sizes_shares_weights(const struct worker_options *o, const struct geometry *g)
{
    return !o->no_packed_cache && !g->is_dummy;
}

uint64_t sizes_left(const struct available_memory *there, uint64_t weights_bytes)
{
    return there->bytes > weights_bytes ? there->bytes - weights_bytes : 0;
}

enum td_status sizes_check(const struct size_asked *all, uint32_t n, uint64_t weights_bytes,
                           const struct available_memory *there, struct td_error *error_out)
{
    char asked[24], total[24], available[24], with[64] = "the weights";
    uint64_t sum = weights_bytes;
    uint32_t largest = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (__builtin_add_overflow(sum, all[i].bytes, &sum))
            sum = UINT64_MAX;
        if (all[i].bytes > all[largest].bytes)
            largest = i;
    }
    if (!n || sum <= there->bytes)
        return TD_OK;
    available_text(all[largest].bytes, asked);
    available_text(sum, total);
    available_text(there->bytes, available);
    if (all[largest].bytes > there->bytes)
        return td_fail(error_out, TD_ERR_INVALID, "%s: %s are asked for, %s are available (%s)", all[largest].option,
                       asked, available, there->by);
    if (n > 1)
        snprintf(with, sizeof(with), "all %u pools%s", n, weights_bytes ? " and the weights" : "");
    return td_fail(error_out, TD_ERR_INVALID, "%s: %s, and %s with %s, are asked for, %s are available (%s)",
                   all[largest].option, asked, total, with, available, there->by);
}
