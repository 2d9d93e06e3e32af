/*
 * A model directory as loaded: configuration, weights (mapped), and its fingerprint. No device, no compute.
 *
 * Weights have the names that their family gives them: model_tensor() finds one and checks its shape. --dummy
 * makes seeded gaussian weights of any dimensions, for benches.
 *
 * Threads: immutable after opening, except the marks of tensors that were asked for, which any thread may
 * set.
 */
#pragma once

#include "model/config.h"
#include "model/safetensors.h"
#include "proto/wire/block_key.h"

struct model;

/* Dimensions of a made-up Llama; 0: that of Llama 3.2 1B. */
struct model_dummy {
    uint32_t vocab_size, hidden, n_layers, n_heads, n_kv_heads, head_dim, intermediate, max_positions;
    uint32_t n_experts, n_used; /* n_experts 0: no experts; n_used 0: two */
    uint32_t window;            /* of every layer; 0: none */
    uint64_t seed;
};

enum td_status model_open(const char *dir, struct model **out, struct td_error *error_out);
void model_dummy_config(const struct model_dummy *dims, struct model_config *out);
/* bf16 weights, gaussian with standard deviation 0.02 (norms are 1), tied embeddings. */
enum td_status model_open_dummy(const struct model_dummy *dims, struct model **out, struct td_error *error_out);
void model_close(struct model *m); /* NULL is fine */

const struct model_config *model_config(const struct model *m);
uint64_t model_weight_bytes(const struct model *m);

/*
 * Finds a tensor of exactly this shape; cols 0: it has one dimension. TD_ERR_CORRUPT names the tensor and
 * both shapes; TD_ERR_NOT_FOUND. The tensor is borrowed from the model.
 */
enum td_status model_tensor(const struct model *m, const char *name, uint64_t rows, uint64_t cols,
                            const struct tensor **out, struct td_error *error_out);

/*
 * A matrix as in model_tensor(), or one of e4m3 numbers with scales: output o, input i stands for
 * t * scales[o / out_block, i / in_block]. The scales are the tensor `name`_scale (one, or one for each
 * output), or `name`_scale_inv (one for each block of config's fp8_block).
 */
struct model_matrix {
    const struct tensor *t;
    const struct tensor *scales; /* NULL: none */
    uint32_t out_block, in_block;
    size_t out_stride; /* between scales of neighbouring blocks of outputs; between those of inputs it is 1 */
};
enum td_status model_matrix(const struct model *m, const char *name, uint64_t rows, uint64_t cols,
                            struct model_matrix *out, struct td_error *error_out);

/*
 * Converts matrix `index` of n from MXFP4 (OCP Microscaling 1.0) to bf16, exactly. Tensors: `name`_blocks
 * [n][rows][cols / 32][16], two e2m1 numbers in each byte, the first in the low bits, and `name`_scales
 * [n][rows][cols / 32], bytes; numbers are multiplied by 2^(scale - 127). out [rows][cols]; NULL: only finds
 * and checks the tensors.
 */
enum td_status model_mxfp4(const struct model *m, const char *name, uint64_t n, uint64_t index, uint64_t rows,
                           uint64_t cols, uint16_t *out, struct td_error *error_out);

/* A tensor with n matrices [rows][cols]. */
enum td_status model_tensor_stack(const struct model *m, const char *name, uint64_t n, uint64_t rows, uint64_t cols,
                                  const struct tensor **out, struct td_error *error_out);

/*
 * Call it when all weights that the configuration describes were asked for. A tensor that nobody asked for
 * would be missing from the computation: TD_ERR_UNSUPPORTED names the first one. Allowed, because they are no
 * weights: *.rotary_emb.inv_freq (computed here), *.input_scale (activations are not rounded), *.k_scale and
 * *.v_scale (pages have no scales), lm_head.weight of tied embeddings.
 */
enum td_status model_check_all_asked(const struct model *m, struct td_error *error_out);

/*
 * First 128 bits of SHA-256 over the canonical configuration and every tensor's name, dtype, shape and bytes,
 * in the order of names. It is the same for the same weights in any directory, sharded or not. Engines add
 * numerics and layout to it.
 */
struct block_key model_fingerprint(const struct model *m);
