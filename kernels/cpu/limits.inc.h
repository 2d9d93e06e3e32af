/*
 * Loops that reach the limits of the machine, for the bench. Included where linear.inc.h is, so that the
 * measured step is the step of k_linear. Empty asm statements keep the compiler from computing results in
 * advance.
 */
#pragma once

#include "kernels/cpu/linear.inc.h"

enum { PEAK_SUMS = VL == 16 ? 24 : 12, PEAK_ROUNDS = 20000 };

/* Returns the number of floating-point operations done. */
static inline __attribute__((always_inline)) double peak(enum linear_kind kind)
{
    vf sums[PEAK_SUMS], w = v_set1(0), x = v_set1(0);
    UNROLL for (int i = 0; i < PEAK_SUMS; i++)
    {
        sums[i] = v_set1(0);
        __asm__ volatile("" : "+v"(sums[i]) : "r"(i)); /* otherwise the compiler would make all sums one */
    }
    for (int round = 0; round < PEAK_ROUNDS; round++) {
        __asm__ volatile("" : "+v"(w), "+v"(x));
        UNROLL for (int i = 0; i < PEAK_SUMS; i++) sums[i] = v_step(w, x, sums[i], kind);
    }
    UNROLL for (int i = 0; i < PEAK_SUMS; i++) __asm__ volatile("" : : "v"(sums[i]));
    return (kind == LINEAR_DP ? 4.0 : 2.0) * VL * PEAK_SUMS * PEAK_ROUNDS;
}

/* Reads len_bytes, a multiple of 1024, as a stream. */
static inline void read_stream(const void *from, size_t len_bytes)
{
    enum { LINES = 1024 / (VL * 4) };
    const uint8_t *p = from;
    vf sums[LINES / 2];
    UNROLL for (int i = 0; i < LINES / 2; i++) sums[i] = v_set1(0);
    for (size_t at = 0; at < len_bytes; at += 1024) {
        UNROLL for (int i = 0; i < 16; i++) __builtin_prefetch(p + at + PREFETCH_BYTES + i * 64, 0, 3);
        UNROLL for (int i = 0; i < LINES; i++) sums[i / 2] =
            v_add(sums[i / 2], v_load((const void *)(p + at + i * VL * 4)));
    }
    UNROLL for (int i = 0; i < LINES / 2; i++) __asm__ volatile("" : : "v"(sums[i]));
}
