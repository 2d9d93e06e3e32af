/*
 * Rotary frequencies: default (Su et al. 2021), linear (Chen et al. 2023), llama3 (Meta's interpolation by
 * wavelength), yarn (Peng et al. 2023), longrope (Ding et al. 2024). Each is computed as in transformers'
 * modeling_rope_utils, but in double.
 */
#include <math.h>

#include "model/config.h"

static const double LN2_HI = 0x1.62e42fee00000p-1, LN2_LO = 0x1.a39ef35793c76p-33;

/* frexp, ldexp and rint are exact, so these functions give the same bits with any C library. */
static double own_log(double x)
{
    int e;
    double m = frexp(x, &e);
    if (m < 0.70710678118654752) {
        m *= 2;
        e--;
    }
    double s = (m - 1) / (m + 1), s2 = s * s, sum = 0;
    for (int k = 25; k >= 1; k -= 2)
        sum = sum * s2 + 1.0 / k;
    return 2 * s * sum + e * LN2_LO + e * LN2_HI;
}

static double own_exp(double y)
{
    double n = rint(y * 1.4426950408889634), r = (y - n * LN2_HI) - n * LN2_LO, sum = 1;
    for (int k = 20; k >= 1; k--)
        sum = 1 + sum * r / k;
    return ldexp(sum, (int)n);
}

static double llama3_scaled(const struct model_rope *r, double freq)
{
    const double two_pi = 6.283185307179586;
    double wavelength = two_pi / freq, original = r->original_positions;
    if (wavelength < original / r->high_freq_factor)
        return freq;
    if (wavelength > original / r->low_freq_factor)
        return freq / r->factor;
    double smooth = (original / wavelength - r->low_freq_factor) / (r->high_freq_factor - r->low_freq_factor);
    return (1 - smooth) * freq / r->factor + smooth * freq;
}

/* The pair of numbers that turns n_rotations times within the original positions. */
static double yarn_pair(const struct model_rope *r, double dim, double n_rotations)
{
    const double two_pi = 6.283185307179586;
    return dim * own_log(r->original_positions / (n_rotations * two_pi)) / (2 * own_log(r->theta));
}

/* Fast pairs keep their frequency, slow ones are interpolated; between them the two are mixed linearly. */
static double yarn_scaled(const struct model_rope *r, double dim, uint32_t i, double freq)
{
    double low = yarn_pair(r, dim, r->beta_fast), high = yarn_pair(r, dim, r->beta_slow);
    if (r->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = low > 0 ? low : 0;
    high = high < dim - 1 ? high : dim - 1;
    if (low == high)
        high += 0.001;
    double ramp = (i - low) / (high - low);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return freq / r->factor * ramp + freq * (1 - ramp);
}

double model_rope_mscale(const struct model_rope *r, double mscale)
{
    return r->factor <= 1 ? 1 : 0.1 * mscale * own_log(r->factor) + 1;
}

static double attention_factor(const struct model_rope *r)
{
    if (r->attention_factor > 0)
        return r->attention_factor;
    if (r->type == ROPE_YARN && r->mscale > 0 && r->mscale_all_dim > 0)
        return model_rope_mscale(r, r->mscale) / model_rope_mscale(r, r->mscale_all_dim);
    if (r->type == ROPE_YARN)
        return model_rope_mscale(r, 1);
    if (r->type == ROPE_LONGROPE && r->factor > 1)
        return sqrt(1 + own_log(r->factor) / own_log(r->original_positions));
    return 1;
}

double model_config_rope(const struct model_config *c, const struct model_rope *r, bool is_long, double *inv_freq_out)
{
    double log_theta = own_log(r->theta), dim = c->rotary_dim;
    for (uint32_t i = 0; i < c->rotary_dim / 2; i++) {
        double freq = own_exp(-log_theta * (2.0 * i) / dim);
        if (r->type == ROPE_LINEAR)
            freq /= r->factor;
        else if (r->type == ROPE_LLAMA3)
            freq = llama3_scaled(r, freq);
        else if (r->type == ROPE_YARN)
            freq = yarn_scaled(r, dim, i, freq);
        else if (r->type == ROPE_LONGROPE)
            freq /= is_long ? r->long_factor[i] : r->short_factor[i];
        inv_freq_out[i] = freq;
    }
    return attention_factor(r);
}
