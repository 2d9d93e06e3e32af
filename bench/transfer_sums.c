/*
 * Ways to sum a page, compared. Ways that would not do at any speed are left out (a sum of words does not see
 * swapped words).
 */
#include <openssl/evp.h>
#include <string.h>
#include <xxhash.h>
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "bench/transfer_bench.h"
#include "proto/wire/checksum.h"

enum { HOT_BYTES = 256 << 10, CHUNK = 8192, ROUNDS = 5 };

typedef uint64_t sum_fn(const void *data, size_t len_bytes);

static const struct checksum_identity IDENTITY = {1, 2, 3, 4, 5, 6};

static uint64_t sum_chosen(const void *data, size_t len_bytes)
{
    return checksum_bytes(&IDENTITY, data, len_bytes);
}

static uint64_t sum_xxh3_64(const void *data, size_t len_bytes)
{
    return XXH3_64bits(data, len_bytes);
}

static uint64_t sum_xxh3_128(const void *data, size_t len_bytes)
{
    return XXH3_128bits(data, len_bytes).low64;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint64_t sum_crc(const void *data, size_t len_bytes)
{
    uint64_t crc = 0, word;
    for (size_t i = 0; i + 8 <= len_bytes; i += 8) {
        memcpy(&word, (const uint8_t *)data + i, 8);
        crc = _mm_crc32_u64(crc, word);
    }
    return crc;
}

/* Sums three thirds at once, because the instruction takes three cycles and one can begin in each cycle;
 * the result is the sum of their three sums. */
__attribute__((target("sse4.2"))) static uint64_t sum_crc_3(const void *data, size_t len_bytes)
{
    size_t third = len_bytes / 24 * 8;
    const uint8_t *p = data;
    uint64_t a = 0, b = 0, c = 0, word[3];
    for (size_t i = 0; i < third; i += 8) {
        memcpy(&word[0], p + i, 8);
        memcpy(&word[1], p + third + i, 8);
        memcpy(&word[2], p + 2 * third + i, 8);
        a = _mm_crc32_u64(a, word[0]);
        b = _mm_crc32_u64(b, word[1]);
        c = _mm_crc32_u64(c, word[2]);
    }
    return _mm_crc32_u64(_mm_crc32_u64(_mm_crc32_u64(sum_crc(p + 3 * third, len_bytes - 3 * third), a), b), c);
}
#else
#define sum_crc   NULL
#define sum_crc_3 NULL
#endif

static const struct {
    const char *name;
    sum_fn *sum;
} WAYS[XFER_BENCH_SUMS] = {{"memcpy", NULL},
                           {"XXH3-64 as chosen", sum_chosen},
                           {"XXH3-64 as the library has it", sum_xxh3_64},
                           {"XXH3-128 as the library has it", sum_xxh3_128},
                           {"CRC32C by hardware", sum_crc},
                           {"CRC32C by hardware, 3 lanes", sum_crc_3}};

static volatile uint64_t sink; /* keeps the compiler from removing the sums */

static double best_rate(const struct clock *clock, sum_fn *sum, const uint8_t *data, uint64_t bytes, uint64_t stride)
{
    double best = 0;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t begin = clock_now(clock);
        for (uint64_t at = 0; at < bytes; at += HOT_BYTES)
            sink = sink + sum(data + at * stride, HOT_BYTES);
        double rate = (double)bytes / (double)(clock_now(clock) - begin);
        best = rate > best ? rate : best;
    }
    return best;
}

static void copy_part(sum_fn *sum, uint8_t *to, const uint8_t *from)
{
    if (!sum)
        memcpy(to, from, HOT_BYTES);
    else if (sum == sum_chosen)
        sink = sink + checksum_copy(&IDENTITY, to, from, HOT_BYTES);
    for (size_t at = 0; sum && sum != sum_chosen && at < HOT_BYTES; at += CHUNK) {
        memcpy(to + at, from + at, CHUNK);
        sink = sink + sum(to + at, CHUNK);
    }
}

static double copy_rate(const struct clock *clock, sum_fn *sum, uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    double best = 0;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t begin = clock_now(clock);
        for (uint64_t at = 0; at < bytes; at += HOT_BYTES)
            copy_part(sum, to + at, from + at);
        double rate = (double)bytes / (double)(clock_now(clock) - begin);
        best = rate > best ? rate : best;
    }
    return best;
}

static enum td_status map_random(uint64_t bytes, uint8_t **out)
{
    void *memory;
    if (mem_map(bytes, &memory))
        return TD_ERR_NO_MEMORY;
    for (uint64_t i = 0; i < bytes / 8; i++)
        ((uint64_t *)memory)[i] = random_mix(i);
    *out = memory;
    return TD_OK;
}

enum td_status xfer_bench_sums(uint64_t bytes, struct xfer_bench_sum rows[XFER_BENCH_SUMS])
{
    struct clock clock;
    uint8_t *from;
    bytes -= bytes % HOT_BYTES;
    if (map_random(2 * bytes, &from))
        return TD_ERR_NO_MEMORY;
    clock_init_real(&clock);
    for (int i = 0; i < XFER_BENCH_SUMS; i++) {
        sum_fn *sum = WAYS[i].sum;
        rows[i] = (struct xfer_bench_sum){.name = WAYS[i].name};
        if (i && !sum)
            continue;
        rows[i].copy_gb_per_s = copy_rate(&clock, sum, from + bytes, from, bytes);
        rows[i].cold_gb_per_s = sum ? best_rate(&clock, sum, from, bytes, 1) : 0;
        rows[i].hot_gb_per_s = sum ? best_rate(&clock, sum, from, bytes, 0) : 0;
    }
    mem_unmap(from, 2 * bytes);
    return TD_OK;
}

/* way < 0: memcpy. */
static double way_rate(const struct clock *clock, int way, uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    uint64_t begin = clock_now(clock);
    for (uint64_t at = 0; at < bytes; at += HOT_BYTES) {
        if (way < 0)
            memcpy(to + at, from + at, HOT_BYTES);
        else
            sink = sink + checksum_copy_by((uint32_t)way, &IDENTITY, to + at, from + at, HOT_BYTES);
    }
    return (double)bytes / (double)(clock_now(clock) - begin);
}

enum td_status xfer_bench_copies(uint64_t bytes, struct xfer_bench_ways *out)
{
    const struct checksum_choice *choice = checksum_choose();
    struct clock clock;
    uint8_t *from;
    bytes -= bytes % HOT_BYTES;
    if (map_random(2 * bytes, &from))
        return TD_ERR_NO_MEMORY;
    clock_init_real(&clock);
    *out = (struct xfer_bench_ways){.n = choice->n_ways,
                                    .start_memcpy_gb_per_s = choice->memcpy_gb_per_s,
                                    .start_ms = (double)choice->took_ns * 1e-6};
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = -1; i < (int)choice->n_ways; i++) {
            double rate = way_rate(&clock, i, from + bytes, from, bytes);
            double *best = i < 0 ? &out->memcpy_gb_per_s : &out->ways[i].gb_per_s;
            *best = rate > *best ? rate : *best;
        }
    }
    for (uint32_t i = 0; i < choice->n_ways; i++) {
        out->ways[i].name = choice->ways[i].name;
        out->ways[i].start_gb_per_s = choice->ways[i].gb_per_s;
        out->ways[i].is_chosen = i == choice->chosen;
    }
    mem_unmap(from, 2 * bytes);
    return TD_OK;
}

double xfer_bench_aes_gb_per_s(void)
{
    enum { BLOCK = 16 << 10, BLOCKS = 4096 };
    static uint8_t from[BLOCK], to[BLOCK];
    const uint8_t key[32] = {1}, iv[12] = {2};
    uint8_t tag[16];
    struct clock clock;
    double best = 0;
    EVP_CIPHER_CTX *c = EVP_CIPHER_CTX_new();
    clock_init_real(&clock);
    EVP_EncryptInit_ex(c, EVP_aes_256_gcm(), NULL, key, iv);
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t begin = clock_now(&clock);
        for (int i = 0, n; i < BLOCKS; i++) {
            EVP_EncryptInit_ex(c, NULL, NULL, NULL, iv);
            EVP_EncryptUpdate(c, to, &n, from, BLOCK);
            EVP_EncryptFinal_ex(c, to, &n);
            EVP_CIPHER_CTX_ctrl(c, EVP_CTRL_GCM_GET_TAG, sizeof(tag), tag);
        }
        double rate = (double)BLOCK * BLOCKS / (double)(clock_now(&clock) - begin);
        best = rate > best ? rate : best;
    }
    EVP_CIPHER_CTX_free(c);
    return best;
}
