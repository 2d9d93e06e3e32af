/*
 * LoRA adapters (Hu et al. 2021) as the PEFT library saves them: DIR/adapter_config.json and
 * DIR/adapter_model.safetensors.
 *
 * An adapted matrix W becomes W + scale B A, with A [rank][n_in] and B [n_out][rank]. Their tensors are named
 * "base_model.model.model.layers.L.MODULE.lora_A.weight" and "lora_B". scale is lora_alpha / rank, or
 * lora_alpha / sqrt(rank) with use_rslora. Ranks may differ between matrices.
 *
 * Opening checks that the model has each matrix, that it can be adapted (projections of attention that is not
 * latent, and of feed-forward layers without experts), both shapes, and that both halves exist. Refused:
 * other kinds of adapters, DoRA, biases, modules_to_save, alpha_pattern, and tensors that belong to no
 * matrix.
 *
 * Threads: immutable after opening.
 * Ownership: tensors borrow from the adapter.
 */
#pragma once

#include "model/config.h"
#include "model/safetensors.h"
#include "proto/wire/block_key.h"

struct adapter;

enum { ADAPTER_MAX_RANK = 512 };

/* TD_ERR_CORRUPT and _UNSUPPORTED name the file, field or tensor. */
enum td_status adapter_open(const char *dir, const struct model_config *config, struct adapter **out,
                            struct td_error *error_out);
/* The same from both files in memory, which are borrowed until close. For the fuzzer. */
enum td_status adapter_open_memory(const char *config_json, size_t json_bytes, const void *tensors,
                                   size_t tensors_bytes, const struct model_config *config, struct adapter **out,
                                   struct td_error *error_out);
void adapter_close(struct adapter *a);                         /* NULL is fine */
struct block_key adapter_fingerprint(const struct adapter *a); /* covers all numbers and the scale */

struct adapter_matrix {
    const struct tensor *a, *b; /* F32, F16 or BF16 */
    uint32_t rank;
    float scale;
};
/* module is, e.g., "self_attn.q_proj". False if the adapter does not change it. */
bool adapter_find(const struct adapter *a, uint32_t layer, const char *module, struct adapter_matrix *out);
