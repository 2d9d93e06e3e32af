/*
 * What a model's config.json says, in one struct, whichever transformers wrote it (v4: rope_theta, rope_scaling,
 * torch_dtype; v5: rope_parameters, dtype).
 *
 * Only what is supported loads: an unknown model_type, activation, rope type, bias or sliding window is
 * TD_ERR_UNSUPPORTED with the field's name and value; a malformed file is TD_ERR_CORRUPT; both in one line.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { MODEL_MAX_EOS = 8 };

enum rope_type { ROPE_DEFAULT, ROPE_LLAMA3 };

struct model_config {
    char model_type[32]; /* "llama" */
    uint32_t vocab_size, hidden, n_layers, n_heads, n_kv_heads, head_dim, intermediate;
    uint32_t max_positions;
    float rms_eps;
    bool tied_embeddings;
    enum rope_type rope_type;
    double rope_theta;
    double rope_factor, rope_low_freq_factor, rope_high_freq_factor; /* llama3 */
    uint32_t rope_original_positions;
    uint32_t eos_ids[MODEL_MAX_EOS]; /* generation_config.json first, else config.json */
    uint32_t n_eos_ids;
    /* generation_config.json: what a client gets who asks for the model's own sampling. 0 / 1: not given. */
    float default_temperature, default_top_p;
    uint32_t default_top_k;
};

/* Parses by (data, len), so that it can be fuzzed; generation_data may be NULL. */
enum td_status model_config_parse(const char *data, size_t len_bytes, const char *generation_data,
                                  size_t generation_len_bytes, struct model_config *out, struct td_error *error_out);
enum td_status model_config_load(const char *dir, struct model_config *out, struct td_error *error_out);

/* Number of weights: what --dummy makes, what a bench divides by. */
uint64_t model_config_n_params(const struct model_config *c);

/*
 * inv_freq_out[head_dim / 2]: rotary frequencies with the scaling of rope_type applied (llama3: Meta's
 * wavelength-dependent interpolation, as in transformers' modeling_rope_utils). pow() is allowed here, it runs once, but
 * the result must not depend on libm: use exp/log of our own in double (|relative error| < 1e-12).
 */
void model_config_rope(const struct model_config *c, double *inv_freq_out);
