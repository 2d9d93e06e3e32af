/*
 * What the files of the forward pass share: the packed weights of a layer, and the scratch memory of one
 * batch.
 *
 * forward.c runs batches, forward_layer.c a layer, with forward_latent.c and forward_experts.c for the
 * families that have these; forward_linear.c its linear maps. forward_weights.c finds and packs the weights,
 * forward_lora.c those of adapters. forward_share.c divides weights and pages among ranks. forward_open.c has
 * the rest of opening. Behaviour follows from which weights are NULL and from the config, never from the
 * family's name.
 */
#pragma once

#include "engine/forward.h"
#include "engine/weight_cache.h"

/* Columns divided among the n_tensor ranks: rank i has those from first[i] to first[i + 1] - 1. */
struct share {
    uint32_t first[K_MAX_RANKS + 1];
};

enum { MAX_PARTS = 3 };

/* Outputs (rows) first .. first + n_out - 1 of a tensor with n_all outputs. */
struct part_name {
    const char *name;
    uint32_t n_all, first, n_out;
    bool bias;
};

/*
 * What adapters add to one matrix: stacks of n_adapters matrices, down [rank][n_in] and up [n_out][rank].
 * Zeroed: no adapter changes this matrix.
 */
struct lora {
    struct k_stack *down, *up;
    uint32_t n_in, n_out;
};

/* A linear map: a matrix, and what adapters add to it. */
struct projection {
    struct k_matrix *matrix;
    struct lora lora;
};

/*
 * Shapes below are [n_out][n_in] of all ranks together. A rank has its share of n_out and of the heads, and
 * all of n_in; of matrices whose result is added to x, n_out is hidden. "latent" marks multi-head latent
 * attention.
 */
struct attention_weights {
    float *norm, *norm_after; /* [hidden]; norm_after NULL: none */
    struct projection in;     /* [q, k, v][hidden]; latent: [q or q_a, latent][hidden] */
    struct projection out;    /* W_o [hidden][n_heads * v_dim] */
    float *q_norm, *k_norm;   /* [head_dim], or NULL; latent: k_norm [kv_rank], q_norm [q_rank] or NULL */
    float *sinks;             /* [n_heads of all ranks], or NULL */
    struct k_stack *q_b;      /* latent: one matrix [n_heads * head_dim][q_rank], or NULL */
    /* latent, one matrix for each head: W_UK [kv_rank][nope_dim], W_UV [v_dim][kv_rank]. */
    struct k_stack *to_latent, *value;
};

struct mlp {
    struct projection gate_up, down; /* [2 * intermediate][hidden], [hidden][intermediate] */
};

struct experts {
    struct k_stack *gate_up, *down; /* n_experts matrices shaped as in mlp; NULL: no experts */
};

struct feed_forward {
    float *norm, *norm_after; /* [hidden] */
    struct mlp dense;         /* without a router the whole unit, else the shared expert or nothing */
    /* [n_experts][hidden], or NULL. Always COMPUTE_F32, because it decides which experts a row uses. */
    struct k_matrix *router;
    struct experts experts;
    struct k_matrix *gate; /* [1][hidden] of the shared expert, or NULL; COMPUTE_F32 */
};

struct layer {
    struct attention_weights attention;
    struct feed_forward feed_forward;
};

/* Which experts each row of a batch uses (k_slots). */
struct routes {
    uint32_t n_slots;   /* slots of a row: its experts, and the shared one */
    uint32_t *experts;  /* [rows][n_slots] */
    float *weights;     /* [rows][n_slots] */
    uint32_t *slots;    /* [rows][n_slots] */
    uint32_t *slot_row; /* [rows * n_used] */
    uint32_t *first;    /* [n_experts + 1] */
};

/* Rows that fill a step of single rows up to a size that is replayed; arrays are in host memory. */
struct forward_made {
    uint8_t *page; /* in the kernels' memory: KV of the added rows, which only they read */
    uint32_t *ids, *positions, *n_tokens, *logit_rows;
    struct k_attn_seq *seqs;
    struct k_draw *draws;
};

/* Arrays of the running batch where operations can read them (k_put). */
struct forward_put {
    const uint32_t *ids, *rope_rows, *logit_rows;
    const struct k_draw *draws;
};

/* Rows with adapters: adapter i has rows first_row + first[i] .. first_row + first[i + 1] - 1. */
struct adapted_rows {
    uint32_t first_row, n_rows;
    const uint32_t *first; /* [n_adapters + 1], from k_put */
};

/* Rows that go through the layers together: the batch or, with several stages, a piece of it. */
struct forward_rows {
    float *x; /* [n_rows][hidden] */
    uint32_t n_rows;
    const uint32_t *rope; /* [n_rows] row of the rotary table for each */
    const struct k_attn_seq *seqs;
    uint32_t n_seqs;
    struct adapted_rows adapted;
};

/* The format in which a matrix is packed. */
struct packed_form {
    enum compute compute;
    enum k_weights weights;
};

struct forward {
    struct kernels *kernels;
    const struct model *model;
    struct model_config c;
    struct forward_rank rank;
    struct {
        struct share heads, kv_heads, values; /* values: columns of attention's result, n_heads * value_dim */
        struct share hidden, dense, expert, shared, vocab;
    } share;
    struct kv_layout layout; /* of the cluster's pages */
    /*
     * Of the pages that the kernels use: the same on the CPU; on a device only the rank's heads and layers.
     */
    struct kv_layout kept_layout;
    uint32_t kept_kv_head; /* the rank's first kv head in kept_layout */
    uint32_t kept_layer;   /* number of the layer that is layer 0 of kept_layout */
    uint8_t *arena, *kept_arena;
    struct packed_form form;    /* format of the large matrices */
    struct weight_cache *cache; /* NULL: none */
    struct k_matrix **added;    /* [n_added] matrices that were added to the cache while it is built */
    uint32_t n_added, cap_added;
    uint32_t max_rows, max_logit_rows, max_positions;
    float *host_logits;
    struct k_sampled *host_sampled;
    uint32_t in_dim;    /* columns of attention.in */
    uint32_t value_dim; /* columns of one head in the input of attention.out */
    struct layer *layers;
    struct k_matrix *head;
    void *embedding; /* [vocab][hidden] of embedding_type */
    enum num_type embedding_type;
    float embedding_scale;
    float *final_norm;
    /* Tables for layers without and with LAYER_WINDOW. longrope: short frequencies, then long ones. */
    struct k_rotary rope[2];
    float *cos_sin[2];

    /* Scratch for max_rows rows, in the kernels' memory, as are all weights. */
    float *x, *normed, *in, *attn, *gate_up, *hidden;
    float *whole, *own;                        /* several ranks: gathered columns; the rank's columns of x */
    float *q, *latent_q, *latent_out;          /* latent */
    float *route_logits, *sorted, *expert_out; /* experts */
    /* [max_logit_rows][the rank's share of vocab]; one rank: logits. */
    float *own_logits;
    float *logits;             /* [max_logit_rows][vocab], mapped (k_map); NULL: another rank has them */
    struct k_sampled *sampled; /* [max_logit_rows], likewise */
    struct routes routes;
    struct adapter *const *adapters;
    uint32_t n_adapters;
    uint32_t lora_rank, lora_n_out; /* largest of all adapted matrices */
    float *lora_mid, *lora_out;     /* [max_rows][lora_rank], [max_rows][lora_n_out] */
    uint32_t *rope_rows;            /* host */
    uint32_t *adapter_first;        /* [n_adapters + 1] host */
    struct k_attn_seq *piece_seqs;  /* host; sequences of the piece that runs */
    struct forward_made made;
    struct forward_put put;
};

static inline bool forward_is_alone(const struct forward *f)
{
    return !f->rank.tensor && !f->rank.before && !f->rank.after;
}

/* x = layer(x); stores the KV of all rows. */
void forward_layer(struct forward *f, uint32_t layer, const struct forward_rows *r);
/* The parameters of attention that q, k and v have no part in. */
struct k_attn forward_attention(const struct forward *f, uint32_t layer, const struct forward_rows *r);
/*
 * A row of in holds q [n_heads][nope, rope] (or q_a, if there is a q_rank), then the latent [kv_rank, rope].
 * Changes in; writes o [T][n_heads][v_dim].
 */
void forward_latent(struct forward *f, uint32_t layer, const struct forward_rows *r, float *in, float *o);
/* x = x + the weighted sum of what each row's experts make of h [T][hidden]. */
void forward_experts(struct forward *f, const struct feed_forward *w, const float *h, const struct forward_rows *r);

/* --------------------------------------------------------- forward_linear.c */

/* out = W in, [T][n_in] -> [T][the rank's share of n_out]. */
void forward_linear(struct forward *f, const struct projection *w, const float *in, const struct forward_rows *r,
                    float *out);
/* x = x + W in, or x + norm_after(W in): ends both halves of a layer. in has the rank's share of columns. */
void forward_add(struct forward *f, const struct projection *w, const struct share *in_share, const float *in,
                 const float *norm_after, const struct forward_rows *r);
/* out [n][the rank's share] = act(gate) * up, of gate_up [n][gate, up]. */
void forward_glu(struct forward *f, const float *gate_up, uint32_t n_rows, const struct share *s, float *out);

/* ------------------------------------------------------------ forward_lora.c */

enum td_status forward_lora_open(struct forward *f, uint32_t layer, const struct part_name *parts, uint32_t n_parts,
                                 uint32_t n_in, struct lora *out, struct td_error *error_out);
/* Adds what the adapters of its rows make of x [n_rows][n_in] to `to` [n_rows][n_out]. */
void forward_lora(struct forward *f, const struct lora *w, const float *x, const struct forward_rows *r, float *to);
/* The adapted rows among rows [begin, end) of the batch. adapter_rows: forward_batch.adapter_rows. */
struct adapted_rows forward_adapted_rows(struct forward *f, const uint32_t *adapter_rows, uint32_t begin, uint32_t end);

/* --------------------------------------- forward_open.c, forward_weights.c */

enum td_status forward_no_memory(const struct forward *f, struct td_error *error_out);
/* Allocates n 4-byte numbers in the kernels' memory; *out points to them. host: their values, or NULL. */
enum td_status forward_numbers(const struct forward *f, const void *host, size_t n, void *out,
                               struct td_error *error_out);
/* Opens the rank's layers, and the embedding and output matrix if its stage has them. */
enum td_status forward_weights_open(struct forward *f, const struct forward_config *config, struct td_error *error_out);

/* ----------------------------------------------------------- forward_share.c */

enum td_status forward_share_open(struct forward *f, struct td_error *error_out);

static inline uint32_t own_first(const struct forward *f, const struct share *s)
{
    return s->first[f->rank.rank];
}
static inline uint32_t own(const struct forward *f, const struct share *s)
{
    return s->first[f->rank.rank + 1] - s->first[f->rank.rank];
}

/*
 * Returns the columns of all ranks, [n_rows][all]: gathered from each rank's `mine` [n_rows][own] into `all`,
 * or `mine` itself if there is one rank. `mine` must stay unchanged until the next gather (kernels.h).
 */
const float *forward_gather(struct forward *f, const struct share *s, uint32_t n_rows, const float *mine, float *all);
/*
 * The rank's columns of x, to be added to and then gathered into x: a copy, or x itself if there is one rank.
 */
float *forward_own_columns(struct forward *f, const struct forward_rows *r);

enum td_status forward_pages_open(struct forward *f, const struct forward_config *config, struct td_error *error_out);
