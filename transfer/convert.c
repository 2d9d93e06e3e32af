#include "transfer/convert.h"

#include <string.h>

enum td_status convert_check(const struct kv_layout *ours, const struct kv_layout *theirs, struct td_error *error_out)
{
    uint32_t a = ours->page_tokens, b = theirs->page_tokens;
    struct kv_layout same = *theirs;
    same.page_tokens = a;
    enum td_status s = kv_layout_match(ours, &same, error_out);
    if (s)
        return s;
    if ((a > b ? a % b : b % a) != 0)
        return td_fail(error_out, TD_ERR_VERSION,
                       "kv_layout.page_tokens differs: ours %u, theirs %u, and neither is a multiple of the other", a,
                       b);
    return TD_OK;
}

uint64_t convert_pages_begun(const struct kv_layout *ours, const struct kv_layout *theirs, uint64_t n)
{
    return (n * theirs->page_tokens + ours->page_tokens - 1) / ours->page_tokens;
}

uint64_t convert_pages_full(const struct kv_layout *ours, const struct kv_layout *theirs, uint64_t n)
{
    return n * theirs->page_tokens / ours->page_tokens;
}

void convert_range(const struct kv_layout *ours, const struct kv_layout *theirs, uint32_t index, uint32_t *begin_out,
                   uint32_t *end_out)
{
    *begin_out = (uint32_t)convert_pages_full(ours, theirs, index);
    *end_out = (uint32_t)convert_pages_begun(ours, theirs, (uint64_t)index + 1);
}

void convert_page(const struct kv_layout *ours, const struct kv_layout *theirs, uint32_t index, uint16_t layer_begin,
                  uint16_t layer_end, const void *from, void *const *places)
{
    uint32_t begin, end;
    convert_range(ours, theirs, index, &begin, &end);
    size_t token = ours->head_dim * num_type_bytes(ours->dtype); /* bytes of one token of one head */
    size_t run = token * (ours->page_tokens < theirs->page_tokens ? ours->page_tokens : theirs->page_tokens);
    size_t slot = ((size_t)index * theirs->page_tokens) % ours->page_tokens * token;
    const uint8_t *in = from;
    size_t heads = (size_t)kv_layout_planes(ours) * ours->n_kv_heads, first = heads * layer_begin,
           last = heads * layer_end;
    for (size_t head = first; head < last; head++) { /* of K and V, of each layer */
        for (uint32_t page = begin; page < end; page++, in += run)
            if (places[page])
                memcpy((uint8_t *)places[page] + head * kv_layout_head_bytes(ours) + slot, in, run);
    }
}
