/*
 * What a model's config.json says, in one struct, for files of transformers v4 (rope_theta, rope_scaling,
 * torch_dtype) and v5 (rope_parameters, dtype), and the table of what each family does (config_families.c).
 *
 * Differences between families are data: a row of the table, or a field of model_config that the row says how
 * to read. Behaviour follows from these two, never from the family's name.
 *
 * Only supported models load. An unknown model_type, activation, rope type or quantization is
 * TD_ERR_UNSUPPORTED, with the field's name and value; a malformed file is TD_ERR_CORRUPT. Both give one
 * line.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/wire/kv_layout.h"

enum {
    MODEL_MAX_EOS = 8,
    MODEL_MAX_SUPPRESSED = 256,
    MODEL_MAX_LAYERS = 1024,
    MODEL_MAX_PAIRS = 256,
    MODEL_MAX_EXPERTS = 1024,
    MODEL_MAX_USED = 32
};

/* ---------------------------------------------------------------- families */

/* Which layers see only the last sliding_window tokens, if config.json has no layer_types. */
enum window_rule {
    WINDOW_NONE,
    WINDOW_ALL,       /* all layers, if sliding_window is set */
    WINDOW_USED,      /* all layers, if use_sliding_window is also true */
    WINDOW_UPPER,     /* layers from max_window_layers on, if use_sliding_window is also true */
    WINDOW_ALTERNATE, /* layers 0, 2, 4, ... */
    WINDOW_PATTERN,   /* all layers except every sliding_window_pattern-th */
};

enum glu { GLU_SILU, GLU_GELU_TANH, GLU_CLAMPED }; /* kernels.h: k_glu */

struct model_family {
    const char *model_type;

    /*
     * Norms: weight w + norm_offset; one norm before each half of a layer, and with norms_after one behind
     * it, too.
     */
    float norm_offset;
    bool norms_after;
    bool qk_norm; /* norms of each head of q and k, before the rotation */

    /* Attention. */
    bool fused_qkv;         /* self_attn.qkv_proj instead of q_proj, k_proj, v_proj */
    const char *bias_field; /* the field that says whether projections have biases; NULL: `bias` decides */
    bool bias, bias_out;    /* value if that field is missing; whether o_proj has a bias, too */
    bool sinks;             /* one logit for each head that takes part in the softmax and has value 0 */
    bool latent;            /* multi-head latent attention (DeepSeek-V2) */
    /* Scores are scaled by 1 / sqrt(query_pre_attn_scalar) instead of 1 / sqrt(head_dim). */
    bool query_scalar;
    enum window_rule window_rule;
    double window; /* value if sliding_window is missing (not if it is null) */
    bool two_ropes;
    double rope_theta; /* value if rope_theta is missing */
    uint32_t head_dim; /* value if head_dim is missing; 0: hidden_size / num_attention_heads */
    /* Values if the soft caps are missing; 0: the fields are not read; negative: no cap if missing. */
    double attn_cap, logits_cap;

    /* Feed-forward. */
    bool fused_gate_up; /* mlp.gate_up_proj instead of gate_proj, up_proj */
    const char *act_field;
    const char *act;
    bool clamped_glu;

    /*
     * Experts. router NULL: none. %u is the expert's number. expert_gate NULL: all experts are in one tensor,
     * transposed, with biases.
     */
    const char *router, *expert_gate, *expert_up, *expert_down;
    const char *shared; /* prefix of the shared expert's tensors; NULL: none */
    bool shared_gate;
    bool always_normalized; /* weights of the chosen experts sum to 1; false: norm_topk_prob says whether */

    bool scaled_embedding; /* embeddings are multiplied by sqrt(hidden) */
    bool tied;             /* value if tie_word_embeddings is missing */
};

/* NULL if the model_type is unknown. */
const struct model_family *model_family_find(const char *model_type);

/* ------------------------------------------------------------------ config */

enum rope_type { ROPE_DEFAULT, ROPE_LINEAR, ROPE_DYNAMIC, ROPE_LLAMA3, ROPE_YARN, ROPE_LONGROPE };

struct model_rope {
    enum rope_type type;
    double theta, factor;
    double low_freq_factor, high_freq_factor;            /* llama3 only */
    double beta_fast, beta_slow, mscale, mscale_all_dim; /* yarn only; mscale 0: not given */
    bool truncate;
    double attention_factor;     /* yarn, longrope: factor of cos and sin; 0: computed from factor */
    uint32_t original_positions; /* llama3, yarn, longrope only */
    double short_factor[MODEL_MAX_PAIRS], long_factor[MODEL_MAX_PAIRS];
};

struct model_moe {
    uint32_t n_experts, n_used; /* 0: no experts */
    uint32_t intermediate;
    uint32_t shared_intermediate; /* 0: no shared expert */
    uint32_t n_groups, n_groups_used;
    bool normalized;
    float scale; /* factor of the experts' weights */
};

struct model_latent {
    uint32_t q_rank; /* 0: q is projected in one step */
    uint32_t kv_rank, nope_dim, rope_dim, v_dim;
};

enum { LAYER_WINDOW = 1, LAYER_MOE = 2 };

/*
 * generation_config.json: values for requests that give none. A missing file gives values that change
 * nothing. Without do_sample, temperature, top_k, top_p, min_p and typical_p are not read (transformers:
 * GenerationMixin.generate).
 */
struct model_generation {
    float temperature, top_p, min_p, typical_p, repetition_penalty;
    uint32_t top_k;
    uint32_t max_tokens; /* max_new_tokens; 0: as many as fit */
    /* suppress_tokens: never drawn, whatever the request says. */
    uint32_t suppressed_ids[MODEL_MAX_SUPPRESSED];
    uint32_t n_suppressed_ids;
    /* Comma-separated fields that would change answers and are not supported; "": none. */
    char ignored[256];
};
#define MODEL_GENERATION_NONE                                                                                          \
    {                                                                                                                  \
        .temperature = 1, .top_p = 1, .repetition_penalty = 1                                                          \
    }

struct model_config {
    const struct model_family *family;
    uint32_t vocab_size, hidden, n_layers, n_heads, n_kv_heads, head_dim, intermediate;
    uint32_t rotary_dim; /* numbers of a head that are rotated: the first ones; latent: the last ones */
    /* max_position_embeddings. yarn: the larger of it and factor times the original positions. */
    uint32_t max_positions;
    float rms_eps;
    /* Outputs and inputs of a block that shares a scale, for e4m3 matrices with block scales. */
    uint32_t fp8_block[2];
    bool mxfp4; /* experts in one tensor are stored as MXFP4 */
    bool tied_embeddings;
    bool qkv_bias, out_bias, mlp_bias;
    enum glu glu;
    float glu_alpha, glu_limit;
    float score_scale;          /* factor of q k */
    float attn_cap, logits_cap; /* 0: no cap */
    /* Tokens that layers with LAYER_WINDOW see, including the token itself; 0: no such layer. */
    uint32_t window;
    uint8_t layers[MODEL_MAX_LAYERS]; /* LAYER_ bits */
    struct model_rope rope[2];        /* [1]: for layers with LAYER_WINDOW */
    struct model_moe moe;
    struct model_latent latent;      /* valid if family->latent */
    uint32_t eos_ids[MODEL_MAX_EOS]; /* from generation_config.json, else config.json */
    uint32_t n_eos_ids;
    struct model_generation generation;
};

/* Parses from memory, so that it can be fuzzed. generation_data may be NULL. */
enum td_status model_config_parse(const char *data, size_t len_bytes, const char *generation_data,
                                  size_t generation_len_bytes, struct model_config *out, struct td_error *error_out);
enum td_status model_config_load(const char *dir, struct model_config *out, struct td_error *error_out);

/* Number of weights, as --dummy makes them. _active: the weights that one token uses. */
uint64_t model_config_n_params(const struct model_config *c);
uint64_t model_config_n_active_params(const struct model_config *c);

/*
 * The layout of its KV in pages. Latent attention keeps one row of kv_rank + rope_dim for all heads. If every
 * layer has the same window, pages behind the window are not kept (kv_layout.h).
 */
struct kv_layout model_config_layout(const struct model_config *c, enum num_type dtype, uint32_t page_tokens);

/*
 * longrope has two sets of frequencies. A sequence of more than rope_original_positions tokens uses the long
 * set for all its tokens, so its KV is computed again when it gets that long (transformers:
 * modeling_rope_utils, Phi3ForCausalLM).
 */
bool model_config_is_long(const struct model_config *c, uint32_t n_tokens);

/*
 * inv_freq_out[rotary_dim / 2]: rotary frequencies with the scaling of the rope's type, as in transformers'
 * modeling_rope_utils. Returns the factor of cos and sin. dynamic equals default here, because contexts never
 * exceed the model's positions. It runs once, but the result must not depend on libm: it uses our own exp and
 * log in double (|relative error| < 1e-12).
 */
double model_config_rope(const struct model_config *c, const struct model_rope *r, bool is_long, double *inv_freq_out);
/* yarn, DeepSeek-V2: scores are multiplied by the square of this. */
double model_rope_mscale(const struct model_rope *r, double mscale);
