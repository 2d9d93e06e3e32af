/*
 * What a block's bytes become on SSD, and back: lossless (zstd) or quantised (int8, fp8). In DRAM and on the wire a block is
 * always the page itself.
 *
 * zstd   each element (of more than a byte) is turned left by one bit, so that the exponent of bf16 and f32 fills a byte; then the highest bytes of all
 *        elements, then the next ones (as ZipNN does, Hershcovitch et al. 2024). Each of these planes is
 *           0  u32 length     4  a zstd frame, or the plane itself if it is as long as that
 *        Exponents compress, mantissas hardly.
 * int8, fp8: groups of 64 elements along head_dim, the last of a row may be shorter. A group is
 *           0  f32 scale     4  one byte an element
 *        little-endian, group after group in the page's order, so the length follows from the layout.
 *        int8: x' = scale q, scale = amax / 127:          |x - x'| <= amax / 254
 *        fp8:  x' = scale e4m3(q), scale = amax / 448:     |x - x'| <= max(|x| / 16, amax / 458752), at most amax / 28
 *        where amax is the group's largest magnitude; e4m3 is the OCP format (bias 7, largest 448, no infinity), half of its
 *        last place is 1/16 of a normal number and 2^-10 of a subnormal one. Beside that: the arithmetic in f32 (amax 2^-15
 *        at most), and rounding x' to the page's dtype. Zeros stay zeros (but lose their sign); a group with amax < 2^-100
 *        becomes zeros.
 *
 * What would not shrink is kept raw (so are pages of fp8 by int8 and fp8), and so is what can't be quantised: a page with an infinity, a NaN, or a magnitude above
 * 2^100. So nothing that isn't finite is ever made finite.
 *
 * Threads: a codec is one thread's.
 * Errors:  TD_ERR_CORRUPT for bytes that no encoder made; nothing is read or written out of bounds, whatever they are.
 */
#pragma once

#include <stddef.h>

#include "base/status.h"
#include "proto/wire/block_header.h"

struct codec;

struct codec *codec_open(const struct kv_layout *layout); /* copied */
void codec_close(struct codec *c);                        /* NULL is fine */

/* *data_out is the page itself after BLOCK_RAW, else the codec's until the next call. Returns what it was made with. */
enum block_codec codec_encode(struct codec *c, enum block_codec wanted, const void *page, const void **data_out,
                              size_t *len_out);
/* page: of the layout; after an error some bytes of it are anything. Not for BLOCK_RAW. */
enum td_status codec_decode(struct codec *c, enum block_codec codec, const void *data, size_t len_bytes, void *page);

/* block_take() for blocks of any codec: verified, then decoded. */
enum td_status codec_take(struct codec *c, const void *value, size_t len_bytes, const struct block_key *key, void *page,
                          struct block_header *out);
