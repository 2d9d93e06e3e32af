#include "proto/wire/checksum.h"

#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define XXH_STATIC_LINKING_ONLY /* a state on the stack; it has kept its layout in all of 0.8 */
#ifdef CHECKSUM_DISPATCH
#include <xxh_x86dispatch.h> /* the same functions, with the vectors that this CPU has */
#else
#include <xxhash.h>
#endif

#include "base/endian.h"

enum { CHUNK = 4096 }; /* of a copy: in the first-level cache while it is summed */

static uint64_t seed_of(const struct checksum_identity *identity, size_t len_bytes)
{
    uint8_t b[40];
    put_u64(b, identity->id_a);
    put_u64(b + 8, identity->id_b);
    put_u32(b + 16, identity->index);
    put_u32(b + 20, identity->generation);
    put_u32(b + 24, identity->part_begin);
    put_u32(b + 28, identity->part_end);
    put_u64(b + 32, len_bytes);
    return XXH3_64bits(b, sizeof(b));
}

uint64_t checksum_bytes(const struct checksum_identity *identity, const void *data, size_t len_bytes)
{
    return XXH3_64bits_withSeed(data, len_bytes, seed_of(identity, len_bytes));
}

#ifdef __SSE2__
/* Past the caches: a page is not read again soon, and the lines that it takes need not be fetched first. */
static void store(uint8_t *to, const uint8_t *from, size_t n)
{
    size_t i = 0;
    for (; (uintptr_t)to % 16 == 0 && i + 64 <= n; i += 64)
        for (size_t k = i; k < i + 64; k += 16)
            _mm_stream_si128((__m128i *)(void *)(to + k), _mm_load_si128((const __m128i *)(const void *)(from + k)));
    memcpy(to + i, from + i, n - i);
}

static void store_end(void)
{
    _mm_sfence(); /* before another thread is told that the bytes are there */
}
#else
static void store(uint8_t *to, const uint8_t *from, size_t n)
{
    memcpy(to, from, n);
}

static void store_end(void)
{
}
#endif

uint64_t checksum_copy(const struct checksum_identity *identity, void *to, const void *from, size_t len_bytes)
{
    XXH3_state_t state;
    uint8_t *out = to, chunk[CHUNK] __attribute__((aligned(64)));
    const uint8_t *in = from;
    XXH3_64bits_reset_withSeed(&state, seed_of(identity, len_bytes));
    for (size_t at = 0; at < len_bytes; at += CHUNK) {
        size_t n = len_bytes - at < CHUNK ? len_bytes - at : CHUNK;
        memcpy(chunk, in + at, n); /* so that what is summed is what is stored, whatever happens at from meanwhile */
        XXH3_64bits_update(&state, chunk, n);
        store(out + at, chunk, n);
    }
    store_end();
    return XXH3_64bits_digest(&state);
}
