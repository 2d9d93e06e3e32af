/*
 * How each family differs from a Llama, which is a pre-norm transformer with rotary grouped-query attention
 * and a gated feed-forward. Names of tensors and fields are those of the checkpoints that transformers reads.
 */
#include <string.h>

#include "model/config.h"

#define LLAMA_LIKE .act_field = "hidden_act", .act = "silu", .rope_theta = 10000
#define GEMMA_LIKE                                                                                                     \
    .norm_offset = 1, .norms_after = true, .query_scalar = true, .head_dim = 256, .bias_field = "attention_bias",      \
    .bias_out = true, .act_field = "hidden_activation", .act = "gelu_pytorch_tanh", .scaled_embedding = true,          \
    .tied = true, .window = 4096
#define MLP_EXPERTS                                                                                                    \
    .router = "mlp.gate", .expert_gate = "mlp.experts.%u.gate_proj", .expert_up = "mlp.experts.%u.up_proj",            \
    .expert_down = "mlp.experts.%u.down_proj"

static const struct model_family FAMILIES[] = {
    {.model_type = "llama", LLAMA_LIKE, .bias_field = "attention_bias", .bias_out = true},
    {.model_type = "mistral", LLAMA_LIKE, .window_rule = WINDOW_ALL, .window = 4096},
    {.model_type = "qwen2", LLAMA_LIKE, .bias = true, .window_rule = WINDOW_UPPER, .window = 4096},
    {.model_type = "qwen3",
     LLAMA_LIKE,
     .bias_field = "attention_bias",
     .bias_out = true,
     .qk_norm = true,
     .head_dim = 128,
     .window_rule = WINDOW_UPPER,
     .window = 4096},
    {.model_type = "mixtral",
     .act_field = "hidden_act",
     .act = "silu",
     .rope_theta = 1e6,
     .window_rule = WINDOW_ALL,
     .router = "block_sparse_moe.gate",
     .expert_gate = "block_sparse_moe.experts.%u.w1",
     .expert_up = "block_sparse_moe.experts.%u.w3",
     .expert_down = "block_sparse_moe.experts.%u.w2",
     .always_normalized = true},
    {.model_type = "qwen2_moe",
     LLAMA_LIKE,
     .bias_field = "qkv_bias",
     .bias = true,
     MLP_EXPERTS,
     .shared = "mlp.shared_expert",
     .shared_gate = true},
    {.model_type = "qwen3_moe",
     LLAMA_LIKE,
     .bias_field = "attention_bias",
     .bias_out = true,
     .qk_norm = true,
     .window_rule = WINDOW_USED,
     .window = 4096,
     MLP_EXPERTS},
    {.model_type = "phi3", LLAMA_LIKE, .fused_qkv = true, .fused_gate_up = true, .window_rule = WINDOW_ALL},
    {.model_type = "gemma2",
     GEMMA_LIKE,
     .rope_theta = 10000,
     .window_rule = WINDOW_ALTERNATE,
     .attn_cap = 50,
     .logits_cap = 30},
    {.model_type = "gemma3_text",
     GEMMA_LIKE,
     .rope_theta = 1e6,
     .two_ropes = true,
     .qk_norm = true,
     .window_rule = WINDOW_PATTERN,
     .logits_cap = -1},
    {.model_type = "gpt_oss",
     .act_field = "hidden_act",
     .act = "silu",
     .rope_theta = 150000,
     .head_dim = 64,
     .bias_field = "attention_bias",
     .bias = true,
     .bias_out = true,
     .sinks = true,
     .window_rule = WINDOW_ALTERNATE,
     .window = 128,
     .clamped_glu = true,
     .router = "mlp.router",
     .always_normalized = true},
    {.model_type = "deepseek_v2", LLAMA_LIKE, .latent = true, MLP_EXPERTS, .shared = "mlp.shared_experts"},
};

const struct model_family *model_family_find(const char *model_type)
{
    for (size_t i = 0; i < sizeof(FAMILIES) / sizeof(FAMILIES[0]); i++)
        if (!strcmp(FAMILIES[i].model_type, model_type))
            return &FAMILIES[i];
    return NULL;
}
