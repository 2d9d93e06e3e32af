/*
 * What the files of the forward pass share: the packed weights as a layer uses them, and the scratch of one batch.
 *
 * forward.c runs layers, forward_attention.c and forward_mlp.c the halves of one, forward_open.c finds and packs the weights.
 * None of them asks for a family's name: what a weight is NULL for, or a field of the configuration says, is what is done.
 */
#pragma once

#include "engine/forward.h"

struct attention {                     /* [n_out][n_in] */
    float *norm, *norm_after;          /* [hidden]; norm_after NULL: none */
    struct k_matrix *in;               /* [q, k, v][hidden]; latent: [q or q_a, latent][hidden] */
    struct k_matrix *out;              /* [hidden][n_heads * v_dim] */
    float *q_norm, *k_norm;            /* [head_dim], or NULL; latent: k_norm [kv_rank], q_norm [q_rank] or NULL */
    float *sinks;                      /* [n_heads], or NULL */
    struct k_stack *q_b;               /* latent: one of [n_heads * head_dim][q_rank], or NULL */
    struct k_stack *to_latent, *value; /* latent, of each head: [kv_rank][nope_dim], [v_dim][kv_rank] */
};

struct mlp {
    struct k_matrix *gate_up, *down; /* [2 * intermediate][hidden], [hidden][intermediate] */
};

struct experts {
    struct k_stack *gate_up, *down; /* [n_experts] of the same; NULL: none */
};

struct feed_forward {
    float *norm, *norm_after; /* [hidden] */
    struct mlp dense;         /* or, with a router, the shared expert; may have neither */
    struct k_matrix *router;  /* [n_experts][hidden], or NULL; always COMPUTE_F32: it decides where a row goes */
    struct experts experts;
    struct k_matrix *gate; /* [1][hidden] of the shared expert, or NULL; COMPUTE_F32 */
};

struct layer {
    struct attention attention;
    struct feed_forward feed_forward;
};

/* Where rows of a batch go among the experts (k_slots). */
struct routes {
    uint32_t n_slots;   /* of one row: experts, and the shared one */
    uint32_t *experts;  /* [rows][n_slots] */
    float *weights;     /* [rows][n_slots] */
    uint32_t *slots;    /* [rows][n_slots] */
    uint32_t *slot_row; /* [rows * n_used] */
    uint32_t *first;    /* [n_experts + 1] */
};

/* What a step of single rows is filled up with, and its arrays; host. */
struct forward_made {
    uint8_t *page; /* of the kernels: where made-up rows have their KV; nobody reads what is there, but they */
    uint32_t *ids, *positions, *n_tokens, *logit_rows;
    struct k_attn_seq *seqs;
    struct k_draw *draws;
};

/* Of the batch that runs, put for operations. */
struct forward_put {
    const uint32_t *ids, *rope_rows, *logit_rows;
    const struct k_draw *draws;
};

struct forward {
    struct kernels *kernels;
    const struct model *model;
    struct model_config c;
    struct kv_layout layout;
    enum compute compute;
    uint32_t max_rows, max_logit_rows, max_positions;
    float *host_logits;
    struct k_sampled *host_sampled;
    uint32_t in_dim;    /* of attention.in */
    uint32_t value_dim; /* of a head's part of what attention.out takes */
    struct layer *layers;
    struct k_matrix *head;
    void *embedding; /* [vocab][hidden] of embedding_type */
    enum num_type embedding_type;
    float embedding_scale;
    float *final_norm;
    struct k_rotary rope[2]; /* of layers without and with LAYER_WINDOW; longrope: short positions, then long ones */
    float *cos_sin[2];

    /* scratch, max_rows each; of the kernels, as are all weights */
    float *x, *normed, *in, *attn, *mlp, *hidden;
    float *q, *latent_q, *latent_out;          /* latent */
    float *route_logits, *sorted, *expert_out; /* experts */
    float *logits;                             /* [max_logit_rows][vocab], as mapped */
    struct k_sampled *sampled;                 /* [max_logit_rows], likewise */
    struct routes routes;
    uint32_t *rope_rows; /* host */
    struct forward_made made;
    struct forward_put put;
};

/* x = x + attention(x), and the KV of all rows stored. */
void forward_attention(struct forward *f, uint32_t layer, const struct forward_batch *b);
/* x = x + feed_forward(x) */
void forward_mlp(struct forward *f, uint32_t layer, const struct forward_batch *b);
/* x = x + y, or + its norm; y [rows][hidden] is spent */
void forward_add(struct forward *f, uint32_t n_rows, const float *norm_after, float *y);
