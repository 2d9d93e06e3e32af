/*
 * Sine and cosine for the rotary table, in double, without libm.
 *
 * x = n pi/2 + r, |r| <= pi/4, with pi/2 in three parts; n times the first two is exact for n < 2^20 (Cody
 * and Waite 1980). Then Taylor polynomials, whose first dropped term is below 1e-16 there. Runs once for each
 * model, so it is not tuned.
 */
#include <stddef.h>

#include "kernels/kernels.h"

#define PIO2_1      0x1.921fb544p+0  /* 33 bits */
#define PIO2_2      0x1.0b4611a6p-34 /* the next 33 */
#define PIO2_3      0x1.3198a2e037073p-69
#define TWO_OVER_PI 0x1.45f306dc9c883p-1 /* 2 / pi */

static double sin_poly(double r)
{
    double z = r * r, p = -1.0 / 1307674368000.0;
    p = p * z + 1.0 / 6227020800.0;
    p = p * z - 1.0 / 39916800.0;
    p = p * z + 1.0 / 362880.0;
    p = p * z - 1.0 / 5040.0;
    p = p * z + 1.0 / 120.0;
    p = p * z - 1.0 / 6.0;
    return r + r * z * p;
}

static double cos_poly(double r)
{
    double z = r * r, p = 1.0 / 20922789888000.0;
    p = p * z - 1.0 / 87178291200.0;
    p = p * z + 1.0 / 479001600.0;
    p = p * z - 1.0 / 3628800.0;
    p = p * z + 1.0 / 40320.0;
    p = p * z - 1.0 / 720.0;
    p = p * z + 1.0 / 24.0;
    p = p * z - 0.5;
    return 1.0 + z * p;
}

static void cos_sin(double x, double scale, float *out)
{
    int64_t n = (int64_t)(x * TWO_OVER_PI + (x < 0 ? -0.5 : 0.5));
    double k = (double)n, r = x - k * PIO2_1 - k * PIO2_2 - k * PIO2_3;
    double s = sin_poly(r), c = cos_poly(r);
    double quarter[4][2] = {{c, s}, {-s, c}, {-c, -s}, {s, -c}};
    out[0] = (float)(scale * quarter[n & 3][0]);
    out[1] = (float)(scale * quarter[n & 3][1]);
}

void k_rope_table(const double *inv_freq, uint32_t half_dim, uint32_t n_positions, double scale, float *cos_sin_out)
{
    for (uint32_t pos = 0; pos < n_positions; pos++)
        for (uint32_t i = 0; i < half_dim; i++)
            cos_sin((double)pos * inv_freq[i], scale, cos_sin_out + ((size_t)pos * half_dim + i) * 2);
}
