#!/usr/bin/env python3
"""Makes the tiny models beside this file, one for each family, and golden answers of transformers.

    pip install torch transformers safetensors        made with torch 2.15, transformers 5.23, in f32, eager
                                                      attention
    python make.py [NAME...]

Writes NAME/config.json, NAME/model.safetensors and NAME/golden.json, which has cases of prompt_ids,
greedy_ids and greedy_logprobs. Weights are random, but large enough for the logits to be far apart: of many
prompts the one is kept on whose path the best token leads by most. Every path is also computed in f64, and
must be the same there, so no rounding decides a token or an expert.
"""
import json, math, os, sys, zlib
import torch
from transformers import (AutoModelForCausalLM, DeepseekV2Config, Gemma2Config, Gemma3TextConfig, GptOssConfig, LlamaConfig,
                          MistralConfig, MixtralConfig, Phi3Config, Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig)

HERE = os.path.dirname(os.path.abspath(__file__))
LENGTHS, STEPS, TRIES = (1, 17, 56, 100), 16, 48  # 56 + 16 exceeds 64, where the longrope model changes
COMMON = dict(vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              intermediate_size=48, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
              pad_token_id=None)
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16)
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def rope(**kw):
    return dict(COMMON, rope_parameters=kw)


def configs():
    return {
        "llama_linear": LlamaConfig(**rope(rope_type="linear", rope_theta=10000.0, factor=3.0), attention_bias=True, mlp_bias=True),
        "mistral": MistralConfig(**rope(**DEFAULT), head_dim=12, sliding_window=24),
        "qwen2": Qwen2Config(**rope(**DEFAULT), use_sliding_window=True, sliding_window=20, max_window_layers=1),
        "qwen3": Qwen3Config(**rope(**DEFAULT), head_dim=16),
        "mixtral": MixtralConfig(**dict(rope(**DEFAULT), intermediate_size=16), num_local_experts=6, num_experts_per_tok=2),
        "qwen2_moe": Qwen2MoeConfig(**rope(**DEFAULT), **EXPERTS, shared_expert_intermediate_size=24, decoder_sparse_step=1),
        "qwen3_moe": Qwen3MoeConfig(**rope(**DEFAULT), **EXPERTS, head_dim=16, norm_topk_prob=True, mlp_only_layers=[0]),
        "phi3": Phi3Config(**rope(rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.5,
                                  short_factor=[1.0 + 0.1 * i for i in range(2)], long_factor=[1.0 + i for i in range(2)],
                                  original_max_position_embeddings=64), original_max_position_embeddings=64),
        "gemma2": Gemma2Config(**rope(**DEFAULT), head_dim=12, query_pre_attn_scalar=10, sliding_window=20,
                               attn_logit_softcapping=5.0, final_logit_softcapping=8.0),
        "gemma3": Gemma3TextConfig(**dict(COMMON, num_hidden_layers=3), head_dim=12, query_pre_attn_scalar=12, sliding_window=20,
                                   layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                                   rope_parameters={"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
                                                    "sliding_attention": DEFAULT}),
        "gpt_oss": GptOssConfig(**dict(rope(**YARN, truncate=False), intermediate_size=16), head_dim=12, num_local_experts=6, num_experts_per_tok=2,
                                sliding_window=20, swiglu_limit=2.0, layer_types=["sliding_attention", "full_attention"]),
        "deepseek_v2": DeepseekV2Config(**dict(rope(**YARN, mscale=0.7, mscale_all_dim=0.9), num_key_value_heads=4),
                                        q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12,
                                        n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3, moe_intermediate_size=16,
                                        first_k_dense_replace=1, topk_method="group_limited_greedy", n_group=4, topk_group=2,
                                        routed_scaling_factor=1.5),
    }


def draw(name, p, config, generator):
    leaf = name.split(".")[-2] if name.endswith(("weight", "bias")) else name.split(".")[-1]
    normal = torch.randn(p.shape, generator=generator)
    gemma = config.model_type.startswith("gemma")
    if "norm" in leaf:
        return (0.0 if gemma else 1.0) + 0.3 * normal
    if "bias" in name or leaf == "sinks":
        return 0.4 * normal
    if leaf == "embed_tokens":
        return normal * (2.0 if gemma else 3.0) / math.sqrt(p.shape[-1])
    fan_in = p.shape[1] if p.dim() == 3 and config.model_type == "gpt_oss" else p.shape[-1]
    return normal * {"down_proj": 3.0, "o_proj": 2.0}.get(leaf, 1.5) / math.sqrt(fan_in)


def load(folder, dtype):
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager",
                                                    experts_implementation="eager").eval()
    except (TypeError, ValueError):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def logits_of(model, ids):
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def greedy(model, prompt):
    """Generates without a cache, so that every token sees all others by the same rule. Also returns the least
    lead of the best token."""
    ids, logprobs, lead = list(prompt), [], 9.0
    for _ in range(STEPS):
        row = logits_of(model, ids)[-1]
        top = row.topk(2)
        lead = min(lead, (top.values[0] - top.values[1]).item())
        ids.append(top.indices[0].item())
        logprobs.append(round(row.log_softmax(-1)[ids[-1]].item(), 6))
    return ids[len(prompt):], logprobs, lead


def make_case(model, exact, n, generator):
    best = None
    for _ in range(TRIES):
        prompt = torch.randint(2, COMMON["vocab_size"], (n,), generator=generator).tolist()
        ids, logprobs, lead = greedy(model, prompt)
        if best is None or lead > best[3]:
            best = (prompt, ids, logprobs, lead)
        if best[3] > 0.2:
            break
    prompt, ids, logprobs, lead = best
    again, logprobs64, _ = greedy(exact, prompt)
    assert again == ids and max(abs(a - b) for a, b in zip(logprobs, logprobs64)) < 1e-4, (n, ids, again)
    assert lead > 0.02, (n, lead)
    return {"name": f"length_{n}", "prompt_ids": prompt, "greedy_ids": ids, "greedy_logprobs": logprobs, "min_margin": round(lead, 4)}


def make(name, config):
    folder = os.path.join(HERE, name)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    model = AutoModelForCausalLM.from_config(config)
    for key, p in model.named_parameters():
        p.data.copy_(draw(key, p, config, generator))
    model.to(torch.bfloat16).save_pretrained(folder)
    path = os.path.join(folder, "generation_config.json")
    if os.path.exists(path):
        os.remove(path)
    model, exact = load(folder, torch.float32), load(folder, torch.float64)
    golden = {"model": name, "max_tokens": STEPS, "cases": [make_case(model, exact, n, generator) for n in LENGTHS]}
    with open(os.path.join(folder, "golden.json"), "w") as f:
        json.dump(golden, f, separators=(",", ":"))
        f.write("\n")
    size = os.path.getsize(os.path.join(folder, "model.safetensors"))
    print(name, size, [c["min_margin"] for c in golden["cases"]], flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, config in configs().items():
        if name in (sys.argv[1:] or configs()):
            make(name, config)
