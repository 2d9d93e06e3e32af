#include "worker/sizes.h"

static const uint64_t LEAST_BYTES = 64ull << 20;
static const uint64_t DEVICE_BYTES = 1ull << 30; /* default where a device has as much, too: nobody asks what it has */

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
    if (g->kernels.device != DEVICE_CPU && share_bytes > DEVICE_BYTES)
        share_bytes = DEVICE_BYTES;
    uint64_t bytes =
        o->pool_bytes ? (uint64_t)o->pool_bytes : sizes_default(&g->layout, context, SIZES_CONTEXTS, share_bytes);
    *out = (struct size_asked){"--pool-bytes", bytes / page * page};
    return TD_OK;
}

void sizes_dram(int64_t dram_bytes, const struct geometry *g, uint64_t share_bytes, struct size_asked *out)
{
    uint64_t bytes = dram_bytes ? (uint64_t)dram_bytes
                                : sizes_default(&g->layout, g->config.max_positions, SIZES_STORE_CONTEXTS, share_bytes);
    *out = (struct size_asked){"--dram-bytes", bytes};
}

enum td_status sizes_check(const struct size_asked *all, uint32_t n, const struct available_memory *there,
                           struct td_error *error_out)
{
    char asked[24], total[24], available[24];
    uint64_t sum = 0;
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
    if (n == 1 || all[largest].bytes > there->bytes)
        return td_fail(error_out, TD_ERR_INVALID, "%s: %s are asked for, %s are available (%s)", all[largest].option,
                       asked, available, there->by);
    return td_fail(error_out, TD_ERR_INVALID, "%s: %s, and %s with all %u pools, are asked for, %s are available (%s)",
                   all[largest].option, asked, total, n, available, there->by);
}
