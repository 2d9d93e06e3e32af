/*
 * The inner loop of XXH3-64, which also copies: each 64 bytes are loaded once, and stored and summed from the
 * register. So what is summed is what is stored, whatever another process does to the source meanwhile.
 *
 * Source: xxHash's specification, XXH3, "long key" (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): a block
 * is 16 stripes of 64 bytes with the default secret of 192 bytes, and ends with a scramble. Pure functions.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CHECKSUM_STRIPE = 64, CHECKSUM_BLOCK = 1024, CHECKSUM_SECRET = 192 };

/* Copies n_blocks blocks and adds them to acc[8], which is aligned to 64 bytes. past_caches: uses stores
 * that bypass the caches; then `to` must be aligned to 64 bytes, and the caller ends with a store fence. */
typedef void checksum_blocks_fn(uint64_t *acc, const uint8_t secret[CHECKSUM_SECRET], uint8_t *to, const uint8_t *from,
                                size_t n_blocks, bool past_caches);

/* NULL: this CPU does not have the instructions. */
checksum_blocks_fn *checksum_blocks_256(void);
checksum_blocks_fn *checksum_blocks_512(void);
