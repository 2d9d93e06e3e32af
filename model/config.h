/*
 * What a model's config.json says, in one struct, whichever transformers wrote it (v4: rope_theta, rope_scaling,
 * torch_dtype; v5: rope_parameters, dtype), and the table of what each family does (config_families.c).
 *
 * What differs between families is data: a row of the table, or a field of model_config that the row says how to read. The forward
 * pass asks these two and never for a family's name.
 *
 * Only what is supported loads: an unknown model_type, activation, rope type or quantization is TD_ERR_UNSUPPORTED with the
 * field's name and value; a malformed file is TD_ERR_CORRUPT; both in one line.
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

/* Which layers see only the last sliding_window tokens, where config.json has no layer_types. */
enum window_rule {
    WINDOW_NONE,
    WINDOW_ALL,       /* all, if sliding_window is set */
    WINDOW_USED,      /* all, if use_sliding_window too */
    WINDOW_UPPER,     /* those from max_window_layers on, if use_sliding_window too */
    WINDOW_ALTERNATE, /* the first, the third, ... */
    WINDOW_PATTERN,   /* all but every sliding_window_pattern-th */
};

enum glu { GLU_SILU, GLU_GELU_TANH, GLU_CLAMPED }; /* kernels.h: k_glu */

struct model_family {
    const char *model_type;

    /* norms: w or 1 + w; one before each half of a layer, and in Gemma one after it too */
    float norm_offset;
    bool norms_after;
    bool qk_norm; /* of each head of q and k, before the rotation */

    /* attention */
    bool fused_qkv;         /* self_attn.qkv_proj instead of q_proj, k_proj, v_proj */
    const char *bias_field; /* says whether the projections have biases; NULL: bias does */
    bool bias, bias_out;    /* what holds without the field; whether o_proj has one as well */
    bool sinks;             /* one logit for each head that takes its share of the softmax and gives nothing */
    bool latent;            /* multi-head latent attention (DeepSeek-V2) */
    bool query_scalar;      /* scores are scaled by query_pre_attn_scalar, not by head_dim */
    enum window_rule window_rule;
    double window; /* what holds where sliding_window is missing (not null) */
    bool two_ropes;
    double rope_theta;           /* what holds where it is missing */
    uint32_t head_dim;           /* the same; 0: hidden_size / num_attention_heads */
    double attn_cap, logits_cap; /* the same of the soft caps, read only if not 0; negative: none unless given */

    /* feed-forward */
    bool fused_gate_up; /* mlp.gate_up_proj instead of gate_proj, up_proj */
    const char *act_field;
    const char *act;
    bool clamped_glu;

    /* experts; router NULL: there are none. %u is the expert's number; NULL gate: all in one tensor, transposed, with biases */
    const char *router, *expert_gate, *expert_up, *expert_down;
    const char *shared; /* prefix of the shared expert's tensors */
    bool shared_gate;
    bool always_normalized; /* weights of the chosen experts sum to 1; else norm_topk_prob says */

    bool scaled_embedding; /* by sqrt(hidden) */
    bool tied;             /* what holds without tie_word_embeddings */
};

/* NULL: unknown. */
const struct model_family *model_family_find(const char *model_type);

/* ------------------------------------------------------------------ config */

enum rope_type { ROPE_DEFAULT, ROPE_LINEAR, ROPE_DYNAMIC, ROPE_LLAMA3, ROPE_YARN, ROPE_LONGROPE };

struct model_rope {
    enum rope_type type;
    double theta, factor;
    double low_freq_factor, high_freq_factor;            /* llama3 */
    double beta_fast, beta_slow, mscale, mscale_all_dim; /* yarn; mscale 0: not given */
    bool truncate;
    double attention_factor;     /* yarn, longrope: of cos and sin; 0: follows from factor */
    uint32_t original_positions; /* llama3, yarn, longrope */
    double short_factor[MODEL_MAX_PAIRS], long_factor[MODEL_MAX_PAIRS];
};

struct model_moe {
    uint32_t n_experts, n_used; /* 0: no experts */
    uint32_t intermediate;
    uint32_t shared_intermediate; /* 0: no shared expert */
    uint32_t n_groups, n_groups_used;
    bool normalized;
    float scale; /* of the experts' weights */
};

struct model_latent {
    uint32_t q_rank; /* 0: q is projected in one step */
    uint32_t kv_rank, nope_dim, rope_dim, v_dim;
};

enum { LAYER_WINDOW = 1, LAYER_MOE = 2 };

/*
 * generation_config.json: what a request gets that does not say. Values that change nothing where the file has none; without
 * do_sample temperature, top_k, top_p, min_p and typical_p are not read (transformers: GenerationMixin.generate).
 */
struct model_generation {
    float temperature, top_p, min_p, typical_p, repetition_penalty;
    uint32_t top_k;
    uint32_t max_tokens;                           /* max_new_tokens; 0: as many as fit */
    uint32_t suppressed_ids[MODEL_MAX_SUPPRESSED]; /* suppress_tokens: never drawn, whatever a request says */
    uint32_t n_suppressed_ids;
    char ignored[256]; /* fields that would change answers and are not honoured, with commas between; "": none */
};
#define MODEL_GENERATION_NONE                                                                                          \
    {                                                                                                                  \
        .temperature = 1, .top_p = 1, .repetition_penalty = 1                                                          \
    }

struct model_config {
    const struct model_family *family;
    uint32_t vocab_size, hidden, n_layers, n_heads, n_kv_heads, head_dim, intermediate;
    uint32_t rotary_dim;    /* the first so many of a head are rotated; latent: the last */
    uint32_t max_positions; /* max_position_embeddings; yarn: or factor times the original ones, whichever is more */
    float rms_eps;
    uint32_t fp8_block[2]; /* outputs and inputs that share a scale where an e4m3 matrix has one for each block */
    bool mxfp4;            /* of experts that come in one tensor: their matrices */
    bool tied_embeddings;
    bool qkv_bias, out_bias, mlp_bias;
    enum glu glu;
    float glu_alpha, glu_limit;
    float score_scale;          /* of q k */
    float attn_cap, logits_cap; /* 0: none */
    uint32_t window; /* tokens that layers with LAYER_WINDOW see, the token itself included; 0: no such layer */
    uint8_t layers[MODEL_MAX_LAYERS]; /* LAYER_ bits */
    struct model_rope rope[2];        /* [1]: of layers with LAYER_WINDOW */
    struct model_moe moe;
    struct model_latent latent;      /* family->latent */
    uint32_t eos_ids[MODEL_MAX_EOS]; /* generation_config.json first, else config.json */
    uint32_t n_eos_ids;
    struct model_generation generation;
};

/* Parses by (data, len), so that it can be fuzzed; generation_data may be NULL. */
enum td_status model_config_parse(const char *data, size_t len_bytes, const char *generation_data,
                                  size_t generation_len_bytes, struct model_config *out, struct td_error *error_out);
enum td_status model_config_load(const char *dir, struct model_config *out, struct td_error *error_out);

/* Number of weights: what --dummy makes, what a bench divides by. _active: those that one token meets. */
uint64_t model_config_n_params(const struct model_config *c);
uint64_t model_config_n_active_params(const struct model_config *c);

/*
 * How its KV lies in pages. Latent attention keeps one row of kv_rank + rope_dim for all heads. If every layer has the same
 * window, pages behind it are not kept (kv_layout.h).
 */
struct kv_layout model_config_layout(const struct model_config *c, enum num_type dtype, uint32_t page_tokens);

/*
 * longrope has two sets of frequencies; a sequence of n_tokens uses the long one for all its tokens once it has more than
 * rope_original_positions, so its KV is made anew when it gets there (transformers: modeling_rope_utils, Phi3ForCausalLM).
 */
bool model_config_is_long(const struct model_config *c, uint32_t n_tokens);

/*
 * inv_freq_out[rotary_dim / 2]: rotary frequencies with the scaling of the rope's type applied, as in transformers'
 * modeling_rope_utils; returns what cos and sin are multiplied by. dynamic never leaves the positions that a model was made
 * for (longer contexts are refused), where it is the default. pow() is allowed here, it runs once, but the
 * result must not depend on libm: exp and log of our own in double (|relative error| < 1e-12).
 */
double model_config_rope(const struct model_config *c, const struct model_rope *r, bool is_long, double *inv_freq_out);
/* yarn, DeepSeek-V2: the scores are scaled by the square of this. */
double model_rope_mscale(const struct model_rope *r, double mscale);
