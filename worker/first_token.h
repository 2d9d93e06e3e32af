/*
 * The tail of a prefill worker's lease: the first token of the answer, which the decode worker goes on from.
 *
 * Layout, little-endian:
 *      0  u32 token   4  u32 bits of its log-probability (f32)   8  u32 reserved, written as 0
 *     12  for each of the likeliest tokens that were asked for: u32 token, u32 bits of its log-probability
 */
#pragma once

#include "engine/sampler.h"

enum {
    FIRST_TOKEN_BYTES = 12,
    FIRST_TOKEN_TOP_BYTES = 8,
    FIRST_TOKEN_MAX_BYTES = FIRST_TOKEN_BYTES + SAMPLING_MAX_TOP_LOGPROBS * FIRST_TOKEN_TOP_BYTES
};

/* Returns how many bytes it wrote. */
uint32_t first_token_encode(const struct sampled *token, uint8_t out[FIRST_TOKEN_MAX_BYTES]);
/* TD_ERR_PROTOCOL if the bytes are not a first token. Whether ids are in the vocabulary is not checked. */
enum td_status first_token_decode(const void *data, size_t len_bytes, struct sampled *out);
