/* The two functions that need AVX512_BF16, in a file with compiler flags of its own. */
#include "kernels/cpu/avx512.h"

#define v_step(w, x, acc, kind) ((void)(kind), _mm512_dpbf16_ps(acc, (__m512bh)(w), (__m512bh)(x)))

#include "kernels/cpu/limits.inc.h"

static void multiply_dp(const struct cpu_tile *t, uint32_t rows)
{
    any_tile(t, rows, LINEAR_DP);
}

static void multiply_few_dp(const struct few_job *f, uint32_t rows)
{
    any_few(f, rows, LINEAR_DP);
}

static const struct linear_loops PAIR_LOOPS = {multiply_dp, multiply_few_dp};

void cpu_avx512_linear_bf16(const struct cpu_linear_job *job, uint32_t panel, uint32_t row0, uint32_t row1)
{
    _Alignas(64) float sums[ROW_BLOCK * PANEL];
    sum_panel(job, panel, row0, row1, sums, &PAIR_LOOPS);
    put_sums(job, panel, row0, row1, sums);
}

double cpu_avx512_peak_bf16(void)
{
    return peak(LINEAR_DP);
}
