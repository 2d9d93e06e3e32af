/*
 * Ways to copy and sum in one pass, and the choice between them.
 *
 * Which way is fastest depends on the CPU. Stores past the caches need not fetch the destination's lines
 * first, which makes them faster than memcpy on Zen 4, and slower on CPUs where such stores are slow. With a
 * buffer in the first-level cache the library's sums can be used, but the bytes are copied twice. Two passes
 * read the destination again. So all ways are measured, for a few milliseconds once per process, and the
 * fastest is used. Of two widths that are about equally fast the wider one is used: it was never much slower,
 * and it is up to twice as fast where lines of the destination lie changed in a cache (Granite Rapids), which
 * the measurement does not show. Rejected: a table of CPU models. It knows neither the next generation nor
 * the CPU behind a virtual machine that hides it.
 *
 * Invariant of each way: a byte is loaded from the source once. The bytes that are summed come from the
 * register, from a buffer, or from the destination, all of which belong to the reader; so a source that
 * changes meanwhile can't produce a sum that hides the change.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

/* For a state on the stack and its accumulators; its layout is the same in all of 0.8. */
#define XXH_STATIC_LINKING_ONLY
#ifdef CHECKSUM_DISPATCH
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include "base/clock.h"
#include "base/mem.h"
#include "proto/wire/checksum_blocks.h"
#include "proto/wire/checksum_seed.h"

enum { CHUNK = 4096, PIECE = 64 << 10, KEPT_BACK = 256 };
enum { TRIAL_BYTES = 128 << 10, ROUNDS_MAX = 16, WIDER = 2 /* ways further: the same stores in 512 bits */ };
static const double AS_FAST = 0.8; /* within the noise of a measurement this short */
#define MEASURE_NS (5 * NS_PER_MS)

typedef uint64_t copy_fn(uint64_t seed, uint8_t *to, const uint8_t *from, size_t len_bytes);

/* ---------------------------------------------------------------- the stores */

#ifdef __x86_64__
static void store_past(uint8_t *to, const uint8_t *from, size_t n)
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

__attribute__((target("clflushopt"))) static void flush_fast(const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i += 64)
        _mm_clflushopt((void *)(uintptr_t)(p + i));
}

static bool find_flush_fast(void)
{
    unsigned a, b = 0, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && b & bit_CLFLUSHOPT;
}

/* Empties the caches of these bytes. The older instruction waits for each line, and took most of the time
 * that measuring has. */
static void forget(const uint8_t *p, size_t n, bool has_flush_fast)
{
    if (has_flush_fast)
        flush_fast(p, n);
    else
        for (size_t i = 0; i < n; i += 64)
            _mm_clflush(p + i);
    _mm_mfence();
}
#else
static void store_past(uint8_t *to, const uint8_t *from, size_t n)
{
    memcpy(to, from, n);
}

static void store_end(void)
{
}

static bool find_flush_fast(void)
{
    return false;
}

/* Without a way to empty the cache, measurements are made in it. */
static void forget(const uint8_t *p, size_t n, bool has_flush_fast)
{
    (void)p;
    (void)n;
    (void)has_flush_fast;
}
#endif

/* ------------------------------------------------------------------ the ways */

static inline uint64_t by_buffer(uint64_t seed, uint8_t *to, const uint8_t *from, size_t len_bytes, bool past_caches)
{
    XXH3_state_t state;
    uint8_t chunk[CHUNK] __attribute__((aligned(64)));
    XXH3_64bits_reset_withSeed(&state, seed);
    for (size_t at = 0; at < len_bytes; at += CHUNK) {
        size_t n = len_bytes - at < CHUNK ? len_bytes - at : CHUNK;
        memcpy(chunk, from + at, n);
        XXH3_64bits_update(&state, chunk, n);
        if (past_caches)
            store_past(to + at, chunk, n);
        else
            memcpy(to + at, chunk, n);
    }
    store_end();
    return XXH3_64bits_digest(&state);
}

static uint64_t buffer_past(uint64_t seed, uint8_t *to, const uint8_t *from, size_t len_bytes)
{
    return by_buffer(seed, to, from, len_bytes, true);
}

static uint64_t buffer_plain(uint64_t seed, uint8_t *to, const uint8_t *from, size_t len_bytes)
{
    return by_buffer(seed, to, from, len_bytes, false);
}

/* Sums each piece at its destination, while it is in a cache. */
static uint64_t by_pieces(uint64_t seed, uint8_t *to, const uint8_t *from, size_t len_bytes, size_t piece)
{
    XXH3_state_t state;
    XXH3_64bits_reset_withSeed(&state, seed);
    for (size_t at = 0; at < len_bytes; at += piece) {
        size_t n = len_bytes - at < piece ? len_bytes - at : piece;
        memcpy(to + at, from + at, n);
        XXH3_64bits_update(&state, to + at, n);
    }
    return XXH3_64bits_digest(&state);
}

static uint64_t pieces_first_level(uint64_t seed, uint8_t *to, const uint8_t *from, size_t len_bytes)
{
    return by_pieces(seed, to, from, len_bytes, CHUNK);
}

static uint64_t pieces_second_level(uint64_t seed, uint8_t *to, const uint8_t *from, size_t len_bytes)
{
    return by_pieces(seed, to, from, len_bytes, PIECE);
}

/*
 * Our own loop does the whole blocks, in the accumulators of the library's state; the library does the rest.
 * At least KEPT_BACK bytes are left to the library, because XXH3 treats the last 64 bytes of all differently
 * and the library looks for them in its buffer.
 */
static uint64_t by_blocks(checksum_blocks_fn *blocks, uint64_t seed, uint8_t *to, const uint8_t *from, size_t len_bytes,
                          bool past_caches)
{
    XXH3_state_t state;
    size_t n_blocks = len_bytes > KEPT_BACK ? (len_bytes - KEPT_BACK) / CHECKSUM_BLOCK : 0;
    size_t done = n_blocks * CHECKSUM_BLOCK;
    XXH3_64bits_reset_withSeed(&state, seed);
    /* With seed 0 the library uses its own secret. */
    const uint8_t *secret = state.extSecret ? state.extSecret : state.customSecret;
    blocks(state.acc, secret, to, from, n_blocks, past_caches && (uintptr_t)to % 64 == 0);
    state.totalLen = done;
    memcpy(to + done, from + done, len_bytes - done);
    XXH3_64bits_update(&state, to + done, len_bytes - done);
    store_end();
    return XXH3_64bits_digest(&state);
}

static uint64_t vectors_512_past(uint64_t seed, uint8_t *to, const uint8_t *from, size_t len_bytes)
{
    return by_blocks(checksum_blocks_512(), seed, to, from, len_bytes, true);
}

static uint64_t vectors_512_plain(uint64_t seed, uint8_t *to, const uint8_t *from, size_t len_bytes)
{
    return by_blocks(checksum_blocks_512(), seed, to, from, len_bytes, false);
}

static uint64_t vectors_256_past(uint64_t seed, uint8_t *to, const uint8_t *from, size_t len_bytes)
{
    return by_blocks(checksum_blocks_256(), seed, to, from, len_bytes, true);
}

static uint64_t vectors_256_plain(uint64_t seed, uint8_t *to, const uint8_t *from, size_t len_bytes)
{
    return by_blocks(checksum_blocks_256(), seed, to, from, len_bytes, false);
}

/* Ways that need vectors come last, so that the numbers of the other ways are the same on each CPU. */
static const struct copy_way {
    const char *name;
    copy_fn *copy;
    /* The function, if this CPU has its instructions; NULL: needs nothing special. */
    checksum_blocks_fn *(*needs)(void);
} WAYS[CHECKSUM_WAYS_MAX] = {{"buffer, past the caches", buffer_past, NULL},
                             {"buffer, plain stores", buffer_plain, NULL},
                             {"two passes of 4 KiB", pieces_first_level, NULL},
                             {"two passes of 64 KiB", pieces_second_level, NULL},
                             {"256-bit vectors, past the caches", vectors_256_past, checksum_blocks_256},
                             {"256-bit vectors, plain stores", vectors_256_plain, checksum_blocks_256},
                             {"512-bit vectors, past the caches", vectors_512_past, checksum_blocks_512},
                             {"512-bit vectors, plain stores", vectors_512_plain, checksum_blocks_512}};

static uint32_t count_ways(void)
{
    uint32_t n = 0;
    while (n < CHECKSUM_WAYS_MAX && (!WAYS[n].needs || WAYS[n].needs()))
        n++;
    return n;
}

/* ---------------------------------------------------------------- the choice */

struct trial {
    struct clock clock;
    uint8_t *to, *from;
    uint64_t expected;
    bool has_flush_fast;
};

/* GB/s of one copy from memory to memory; 0: the sum is wrong, so this way must not be chosen. */
static double try_once(const struct trial *t, copy_fn *copy)
{
    forget(t->from, TRIAL_BYTES, t->has_flush_fast);
    forget(t->to, TRIAL_BYTES, t->has_flush_fast);
    uint64_t begin = clock_now(&t->clock);
    uint64_t sum = copy ? copy(0, t->to, t->from, TRIAL_BYTES) : t->expected;
    if (!copy)
        memcpy(t->to, t->from, TRIAL_BYTES);
    uint64_t ns = clock_now(&t->clock) - begin;
    return sum == t->expected ? (double)TRIAL_BYTES / (double)(ns ? ns : 1) : 0;
}

static void keep_best(double *best, double value)
{
    *best = value > *best ? value : *best;
}

void checksum_measure(struct checksum_choice *out)
{
    struct trial t;
    void *memory;
    *out = (struct checksum_choice){.n_ways = count_ways()};
    for (uint32_t i = 0; i < out->n_ways; i++)
        out->ways[i].name = WAYS[i].name;
    /* The first way, unmeasured. */
    if (mem_try(2 * TRIAL_BYTES, &memory))
        return;
    clock_init_real(&t.clock);
    uint64_t begin = clock_now(&t.clock);
    t.has_flush_fast = find_flush_fast();
    memset(memory, 0x5a, 2 * TRIAL_BYTES);
    t.to = memory;
    t.from = t.to + TRIAL_BYTES;
    t.expected = XXH3_64bits_withSeed(t.from, TRIAL_BYTES, 0);
    for (int round = 0; round < ROUNDS_MAX && (!round || clock_now(&t.clock) - begin < MEASURE_NS); round++) {
        keep_best(&out->memcpy_gb_per_s, try_once(&t, NULL));
        for (uint32_t i = 0; i < out->n_ways; i++)
            keep_best(&out->ways[i].gb_per_s, try_once(&t, WAYS[i].copy));
    }
    for (uint32_t i = 1; i < out->n_ways; i++)
        if (out->ways[i].gb_per_s > out->ways[out->chosen].gb_per_s)
            out->chosen = i;
    uint32_t wider = out->chosen + WIDER;
    if (WAYS[out->chosen].needs && wider < out->n_ways &&
        out->ways[wider].gb_per_s > AS_FAST * out->ways[out->chosen].gb_per_s)
        out->chosen = wider;
    out->took_ns = clock_now(&t.clock) - begin;
    free(memory);
}

static struct checksum_choice choice;
static pthread_once_t choice_made = PTHREAD_ONCE_INIT;

static void choose_copy(void)
{
    checksum_measure(&choice);
}

const struct checksum_choice *checksum_choose(void)
{
    pthread_once(&choice_made, choose_copy);
    return &choice;
}

uint64_t checksum_copy_by(uint32_t way, const struct checksum_identity *identity, void *to, const void *from,
                          size_t len_bytes)
{
    return WAYS[way].copy(checksum_seed(identity, len_bytes), to, from, len_bytes);
}

uint64_t checksum_copy(const struct checksum_identity *identity, void *to, const void *from, size_t len_bytes)
{
    return checksum_copy_by(checksum_choose()->chosen, identity, to, from, len_bytes);
}
