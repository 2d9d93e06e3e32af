#include "sched/batching.h"

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

uint32_t batching_plan(const struct batch_item *items, uint32_t n, uint32_t budget, uint32_t *rows_out)
{
    uint32_t used = 0, prompts = 0;
    for (uint32_t i = 0; i < n; i++) {
        rows_out[i] = items[i].decoding && used < budget;
        used += rows_out[i];
    }
    bool beside = used > 0;
    for (uint32_t i = 0; i < n; i++) {
        if (items[i].decoding)
            continue;
        uint32_t most = least(budget - used, beside ? least(items[i].chunk, items[i].beside) : items[i].chunk);
        if (prompts)
            most = least(most, BATCHING_FILL > prompts ? BATCHING_FILL - prompts : 0);
        rows_out[i] = least(items[i].n_pending, most);
        used += rows_out[i];
        prompts += rows_out[i];
    }
    return used;
}
