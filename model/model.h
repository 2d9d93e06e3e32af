/*
 * A model directory as loaded: configuration, weights (mapped), and its fingerprint. No device, no compute.
 *
 * Weights by the names that a family gives them: model_tensor() finds one and checks its shape. --dummy makes seeded gaussian
 * weights of any dimensions instead of reading any, for benches.
 *
 * Threads: immutable after opening, but for the marks of which tensors were asked for, which any thread may set.
 */
#pragma once

#include "model/config.h"
#include "model/safetensors.h"
#include "proto/wire/block_key.h"

struct model;

struct model_dummy { /* dimensions of a made-up Llama; 0 takes that of Llama 3.2 1B */
    uint32_t vocab_size, hidden, n_layers, n_heads, n_kv_heads, head_dim, intermediate, max_positions;
    uint32_t n_experts, n_used; /* 0: no experts; n_used 0: two */
    uint32_t window;            /* of every layer; 0: none */
    uint64_t seed;
};

enum td_status model_open(const char *dir, struct model **out, struct td_error *error_out);
void model_dummy_config(const struct model_dummy *dims, struct model_config *out);
/* bf16 weights, gaussian with deviation 0.02 (norms 1), tied embeddings. */
enum td_status model_open_dummy(const struct model_dummy *dims, struct model **out, struct td_error *error_out);
void model_close(struct model *m); /* NULL is fine */

const struct model_config *model_config(const struct model *m);
const char *model_name(const struct model *m); /* last part of the directory; "dummy" */
uint64_t model_weight_bytes(const struct model *m);

/*
 * A tensor by name with exactly this shape (n_dims 1 or 2). TD_ERR_CORRUPT naming tensor and both shapes, TD_ERR_NOT_FOUND.
 */
enum td_status model_tensor(const struct model *m, const char *name, uint64_t rows, uint64_t cols, /* cols 0: 1-D */
                            const struct tensor **out, struct td_error *error_out);

/*
 * A matrix as model_tensor, or one of e4m3 numbers with scales: output o, input i stands for t * scales[o / out_block, i / in_block],
 * which are `name`_scale (one; one for each output) or `name`_scale_inv (one for each block of config's fp8_block).
 */
struct model_matrix {
    const struct tensor *t;
    const struct tensor *scales; /* NULL: none */
    uint32_t out_block, in_block;
    size_t out_stride; /* between scales of neighbouring blocks of outputs; of inputs: 1 */
};
enum td_status model_matrix(const struct model *m, const char *name, uint64_t rows, uint64_t cols,
                            struct model_matrix *out, struct td_error *error_out);

/*
 * Matrix `index` of n in `name`_blocks [n][rows][cols / 32][16] and `name`_scales [n][rows][cols / 32], both bytes, as bf16, exactly:
 * MXFP4 (OCP Microscaling 1.0), e2m1 numbers, the first of two in the low bits, times 2^(scale - 127). out [rows][cols]; NULL: the
 * tensors are looked up and checked only.
 */
enum td_status model_mxfp4(const struct model *m, const char *name, uint64_t n, uint64_t index, uint64_t rows,
                           uint64_t cols, uint16_t *out, struct td_error *error_out);

/* n matrices in one tensor. */
enum td_status model_tensor_stack(const struct model *m, const char *name, uint64_t n, uint64_t rows, uint64_t cols,
                                  const struct tensor **out, struct td_error *error_out);

/*
 * To be called when every weight that the configuration describes was asked for: a tensor that nobody asked for is one that the model
 * would be computed without. TD_ERR_UNSUPPORTED names the first. Not weights, and so allowed: *.rotary_emb.inv_freq (computed),
 * *.input_scale (activations are not rounded), *.k_scale and *.v_scale (pages have no scales), lm_head.weight of tied embeddings.
 */
enum td_status model_check_all_asked(const struct model *m, struct td_error *error_out);

/*
 * First 128 bits of SHA-256 over the canonical configuration and every tensor's name, dtype, shape and bytes, in the order
 * of names: the same for the same weights wherever they lie, sharded or not. Engines mix numerics and layout into it.
 */
struct block_key model_fingerprint(const struct model *m);
