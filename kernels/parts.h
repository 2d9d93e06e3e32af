/* What all backends do, on the host, with the parts of a matrix (struct k_matrix_part) when they pack it. */
#pragma once

#include "kernels/packed.h"

/* The scale of one e4m3 number of a part. */
static inline float part_scale(const struct k_matrix_part *part, uint32_t out, uint32_t in)
{
    const struct k_scales *s = &part->scales;
    return s->data ? scalar_from(s->data, (uint32_t)num_type_bytes(s->type), s->type == NUM_BF16,
                                 (s->first_out + out) / s->out_block * s->out_stride +
                                     (s->first_in + in) / s->in_block * s->in_stride)
                   : 1;
}

/* The number that x stands for; x is the stored number, widened. */
static inline float part_number(const struct k_matrix_part *part, uint32_t out, uint32_t in, float x)
{
    return part->type == NUM_F8_E4M3 ? scalar_from_bf16(scalar_to_bf16(x * part_scale(part, out, in))) : x;
}

/* Whether a packed matrix can keep the part's numbers and scales unchanged. */
static inline bool part_is_kept(const struct k_matrix_part *part, enum k_weights weights, uint32_t n_in)
{
    const struct k_scales *s = &part->scales;
    return weights == WEIGHTS_FP8 && part->type == NUM_F8_E4M3 &&
           (!s->data || (s->in_block % K_GROUP == 0 && s->first_in % K_GROUP == 0) ||
            s->in_block >= s->first_in + n_in);
}

/*
 * Packs n <= K_GROUP consecutive inputs of an output, and returns their scale. w: the widened numbers; kept:
 * the stored ones, if part_is_kept(), else NULL.
 */
static inline float part_pack_group(const struct k_matrix_part *part, enum k_weights weights, uint32_t out, uint32_t in,
                                    uint32_t n, const float *w, const uint8_t *kept, uint8_t *codes_out)
{
    float scale = kept ? packed_bound(part_scale(part, out, in)) : packed_scale(weights, w, n);
    for (uint32_t i = 0; i < n; i++)
        codes_out[i] = kept ? packed_keep(kept[i]) : packed_code(weights, w[i], scale);
    return scale;
}
