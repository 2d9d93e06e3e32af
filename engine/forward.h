/*
 * The forward pass: weights packed for the kernels, and one function that runs a batch of rows through all layers.
 *
 * Threads: engine thread. Results of a row depend on its own sequence only (kernels.h).
 */
#pragma once

#include <stdint.h>

#include "kernels/kernels.h"
#include "model/model.h"

struct forward;

struct forward_config {
    struct kernels *kernels;   /* borrowed */
    const struct model *model; /* borrowed */
    enum compute compute;
    const struct kv_layout *layout; /* copied */
    uint32_t max_rows;              /* rows of one batch */
    uint32_t max_positions;         /* longest context served */
    float *logits;                  /* [max_logit_rows][vocab] host; where forward_run leaves them; borrowed */
    struct k_sampled *sampled;      /* [max_logit_rows] host, likewise */
    uint32_t max_logit_rows;
};

/* Finds and packs all weights. TD_ERR_NOT_FOUND or _CORRUPT name the tensor. */
enum td_status forward_open(const struct forward_config *config, struct forward **out, struct td_error *error_out);
void forward_close(struct forward *f);                  /* NULL is fine */
uint64_t forward_weight_bytes(const struct forward *f); /* memory of the packed copy */

struct forward_batch {
    const uint32_t *ids;       /* [n_rows] */
    const uint32_t *positions; /* [n_rows] */
    uint32_t n_rows;
    const struct k_attn_seq *seqs;
    const uint32_t *n_tokens; /* [n_seqs] length of the sequence, what longrope goes by */
    uint32_t n_seqs;
    const uint32_t *logit_rows; /* [n_logit_rows] rows whose logits are wanted */
    const bool *wants_logits;   /* [n_logit_rows] false: only what is drawn of them */
    const struct k_draw *draws; /* [n_logit_rows] */
    uint32_t n_logit_rows;
    /* Optional: layers [begin, end) of every row's KV are queued to be in their pages: what shall be read of them is asked for now, */
    void (*on_queued)(void *user, uint16_t begin, uint16_t end);
    /* and then: they are there for good, and read. */
    void (*on_layers)(void *user, uint16_t begin, uint16_t end);
    uint16_t layers_per_call; /* >= 1, and K_MAX_MARKS calls at most */
    void *user;
};

void forward_run(struct forward *f, const struct forward_batch *batch);
