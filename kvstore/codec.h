/*
 * Encodes a block's bytes for SSD, and decodes them: lossless (zstd) or quantised (int8, fp8). In DRAM and on
 * the wire a block is always the page itself.
 *
 * zstd:  each element of more than one byte is rotated left by one bit, so that the exponent of bf16 and
 *        f32 fills a byte. The bytes are then stored in planes: the highest byte of all elements, then the
 *        next one, and so on (as in ZipNN, Hershcovitch et al. 2024). Each plane is
 *           0  u32 length     4  a zstd frame, or the plane itself if length is the plane's length
 *        Exponents compress well, mantissas hardly.
 *
 * int8, fp8:  groups of 64 elements along head_dim; the last group of a row may be shorter. A group is
 *           0  f32 scale      4  one byte per element
 *        little-endian, group after group in the page's order, so the length follows from the layout.
 *
 *        int8: x' = scale q, scale = amax / 127:          |x - x'| <= amax / 254
 *        fp8:  x' = scale e4m3(q), scale = amax / 448:     |x - x'| <= max(|x| / 16, amax / 458752),
 *                                                          which is at most amax / 28
 *
 *        amax is the group's largest magnitude. e4m3 is the OCP format (bias 7, largest 448, no infinity):
 *        half a unit in its last place is 1/16 of a normal number and 2^-10 of a subnormal one. To these
 *        errors come the arithmetic in f32 (amax 2^-15 at most) and the rounding of x' to the page's dtype.
 *        Zeros stay zeros (but lose their sign); a group with amax < 2^-100 becomes zeros.
 *
 * A page is stored raw if encoding would not shrink it (int8 and fp8 do not shrink pages of fp8), or if it
 * can't be quantised: it has an infinity, a NaN, or a magnitude above 2^100. So a value that is not finite
 * never becomes finite.
 *
 * Threads: each codec is used by one thread at a time.
 * Errors:  TD_ERR_CORRUPT for bytes that no encoder made. No bytes make it access
 *          anything out of bounds.
 */
#pragma once

#include <stddef.h>

#include "base/status.h"
#include "proto/wire/block_header.h"

struct codec;

struct codec *codec_open(const struct kv_layout *layout); /* layout is copied */
void codec_close(struct codec *c);                        /* NULL is fine */

/* Encodes a page. *data_out is the page itself for BLOCK_RAW, else the codec's buffer, valid until its
 * next call. Returns the codec that was used: `wanted`, or BLOCK_RAW. */
enum block_codec codec_encode(struct codec *c, enum block_codec wanted, const void *page, const void **data_out,
                              size_t *len_out);
/* Decodes into page, which has the layout's size; after an error its contents are undefined. Not for
 * BLOCK_RAW. */
enum td_status codec_decode(struct codec *c, enum block_codec codec, const void *data, size_t len_bytes, void *page);

/* As block_take(), for blocks of any codec: verifies the value, then decodes it into page. */
enum td_status codec_take(struct codec *c, const void *value, size_t len_bytes, const struct block_key *key, void *page,
                          struct block_header *out);
