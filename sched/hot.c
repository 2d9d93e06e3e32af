#include "sched/hot.h"

#include <math.h>

double hot_count(struct hot *h, const struct block_key *key, uint64_t now_ns)
{
    uint32_t i = (uint32_t)(block_key_hash(key) % HOT_SLOTS);
    double *count = &h->slots[i].count, age = (double)(now_ns - h->slots[i].seen_ns) / (double)HOT_HALF_LIFE_NS;
    *count *= exp2(-age);
    h->slots[i].seen_ns = now_ns;
    if (block_key_equal(&h->slots[i].key, key))
        return ++*count;
    if (--*count > 0)
        return 1;
    h->slots[i].key = *key;
    *count = 1;
    return 1;
}
