/* AVX-512 F, BW, VL and DQ. */
#include "kernels/cpu/avx512.h"

#define v_step(w, x, acc, kind) ((void)(kind), v_fma(w, x, acc))

#include "kernels/cpu/linear.inc.h"
#include "kernels/cpu/simd.inc.h"

#define OPS(NAME, OTHER)                                                                                               \
    {                                                                                                                  \
        .name = NAME, .linear_f32 = linear_f32, .linear_bf16 = OTHER##_linear_bf16, .peak_bf16 = OTHER##_peak_bf16,    \
        SIMD_OPS                                                                                                       \
    }

const struct cpu_ops cpu_avx512 = OPS("avx512", cpu_avx2);
const struct cpu_ops cpu_avx512_bf16 = OPS("avx512_bf16", cpu_avx512);
