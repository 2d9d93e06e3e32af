#include "sched/batching.h"

uint32_t batching_plan(const struct batch_item *items, uint32_t n, uint32_t budget, uint32_t chunk, uint32_t *rows_out)
{
    uint32_t used = 0;
    for (uint32_t i = 0; i < n; i++) {
        rows_out[i] = items[i].decoding && used < budget;
        used += rows_out[i];
    }
    for (uint32_t i = 0; i < n; i++) {
        if (items[i].decoding)
            continue;
        uint32_t rows = items[i].n_pending < chunk ? items[i].n_pending : chunk;
        if (rows > budget - used)
            rows = budget - used;
        rows_out[i] = rows;
        used += rows;
    }
    return used;
}
