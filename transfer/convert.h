/*
 * Pages of a holder in pages of a reader that are longer or shorter: page_tokens may differ when one divides the other; every
 * other field of the two layouts must be the same.
 *
 * Inside a page the tokens of one head lie together, [layer][K, V][kv_head][slot][head_dim], so a page of 16 tokens is, for
 * each head of each layer, a run that belongs at a slot of a page of 64, and a page of 64 is four such runs for four pages.
 * What arrives is checked whole, as the holder sent it, and only then laid out.
 *
 * Pure functions; pages are named by index within the transfer: theirs as the holder counts, ours as the reader does.
 */
#pragma once

#include "base/status.h"
#include "proto/wire/kv_layout.h"

/* TD_OK if pages of theirs can be laid out in ours; TD_ERR_VERSION names the field that stands in the way. */
enum td_status convert_check(const struct kv_layout *ours, const struct kv_layout *theirs, struct td_error *error_out);

/* Our pages that their pages [0, n) begin to fill, and that they fill. */
uint64_t convert_pages_begun(const struct kv_layout *ours, const struct kv_layout *theirs, uint64_t n);
uint64_t convert_pages_full(const struct kv_layout *ours, const struct kv_layout *theirs, uint64_t n);

/* Our pages [*begin_out, *end_out) in which their page index lies. */
void convert_range(const struct kv_layout *ours, const struct kv_layout *theirs, uint32_t index, uint32_t *begin_out,
                   uint32_t *end_out);

/*
 * from: layers [layer_begin, layer_end) of their page index. places: of our pages, by index; of those of
 * convert_range one that is NULL is left out.
 */
void convert_page(const struct kv_layout *ours, const struct kv_layout *theirs, uint32_t index, uint16_t layer_begin,
                  uint16_t layer_end, const void *from, void *const *places);
