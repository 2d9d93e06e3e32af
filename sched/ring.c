#include "sched/ring.h"

#include "base/random.h"

uint64_t ring_id(const char *name, size_t len_bytes)
{
    /* FNV-1a, then mixed, since names may differ only in their last digit. */
    uint64_t h = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < len_bytes; i++)
        h = (h ^ (uint8_t)name[i]) * 0x100000001b3ull;
    return random_mix(h);
}

uint32_t ring_place(const uint64_t *ids, uint32_t n, const struct block_key *segment, uint32_t rank)
{
    uint64_t key = block_key_hash(segment), below = UINT64_MAX;
    uint32_t best = 0;
    for (uint32_t r = 0; r <= rank; r++) { /* rank is 0 or 1: no need to sort */
        uint64_t score = 0;
        for (uint32_t i = 0; i < n; i++) {
            uint64_t s = random_at(ids[i], key, 0) >> 1; /* below UINT64_MAX */
            if (s < below && s >= score) {
                score = s;
                best = i;
            }
        }
        below = score;
    }
    return best;
}
