/*
 * What the files of the forward pass share: the packed weights as a layer uses them, and the scratch of one batch.
 *
 * forward.c runs layers, forward_attention.c and forward_mlp.c the halves of one; forward_weights.c finds and packs the weights,
 * forward_lora.c what adapters add, forward_share.c says what of them and of the pages a rank has, and forward_open.c has the rest of
 * opening. None of them asks for a family's name: what a weight is NULL for, or a field of the configuration says, is what is done.
 */
#pragma once

#include "engine/forward.h"
#include "engine/weight_cache.h"

/* Who of the n_tensor ranks has which of some columns: rank i those from first[i] to first[i + 1]. */
struct share {
    uint32_t first[K_MAX_RANKS + 1];
};

enum { MAX_PARTS = 3 };

/* Rows first .. first + n_out of a tensor that has n_all. */
struct part_name {
    const char *name;
    uint32_t n_all, first, n_out;
    bool bias;
};

/* What adapters add to one matrix: [n_adapters] of [rank][n_in], of [n_out][rank]. Zero: none adapts it. */
struct lora {
    struct k_stack *down, *up;
    uint32_t n_in, n_out;
};

/* Shapes below are of all ranks; n_out, and heads, are a rank's share of it (where x is added to: of hidden), n_in is whole. */
struct attention {            /* [n_out][n_in] */
    float *norm, *norm_after; /* [hidden]; norm_after NULL: none */
    struct k_matrix *in;      /* [q, k, v][hidden]; latent: [q or q_a, latent][hidden] */
    struct k_matrix *out;     /* [hidden][n_heads * v_dim] */
    struct lora in_lora, out_lora;
    float *q_norm, *k_norm;            /* [head_dim], or NULL; latent: k_norm [kv_rank], q_norm [q_rank] or NULL */
    float *sinks;                      /* [n_heads of all ranks], or NULL */
    struct k_stack *q_b;               /* latent: one of [n_heads * head_dim][q_rank], or NULL */
    struct k_stack *to_latent, *value; /* latent, of each head: [kv_rank][nope_dim], [v_dim][kv_rank] */
};

struct mlp {
    struct k_matrix *gate_up, *down; /* [2 * intermediate][hidden], [hidden][intermediate] */
    struct lora gate_up_lora, down_lora;
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

/* Rows with adapters: those of adapter i are first_row + first[i] .. first_row + first[i + 1]. */
struct adapted_rows {
    uint32_t first_row, n_rows;
    const uint32_t *first; /* [n_adapters + 1] put */
};

/* Rows that go through the layers together: of the batch, or with several stages a piece of it. */
struct forward_rows {
    float *x; /* [n_rows][hidden] */
    uint32_t n_rows;
    const uint32_t *rope; /* [n_rows] rows of the rotary tables */
    const struct k_attn_seq *seqs;
    uint32_t n_seqs;
    struct adapted_rows adapted;
};

/* How a matrix is packed. */
struct form {
    enum compute compute;
    enum k_weights weights;
};

struct forward {
    struct kernels *kernels;
    const struct model *model;
    struct model_config c;
    struct forward_rank rank;
    struct {
        struct share heads, kv_heads, values; /* values: of what attention gives, n_heads * value_dim */
        struct share hidden, dense, expert, shared, vocab;
    } share;
    struct kv_layout layout;      /* of the cluster's pages */
    struct kv_layout kept_layout; /* as the kernels have them: the same, or of the rank's heads and layers only */
    uint32_t kept_kv_head;        /* where the rank's begin in kept_layout, */
    uint32_t kept_layer;          /* and which layer is its first */
    uint8_t *arena, *kept_arena;
    struct form form;           /* of the large matrices */
    struct weight_cache *cache; /* NULL: none */
    struct k_matrix **added;    /* [n_added] to it, while it is built */
    uint32_t n_added, cap_added;
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
    float *whole, *own;                        /* several ranks: what was gathered, and a rank's columns of x */
    float *q, *latent_q, *latent_out;          /* latent */
    float *route_logits, *sorted, *expert_out; /* experts */
    float *own_logits;                         /* [max_logit_rows] of a rank's share of vocab; alone: logits */
    float *logits;                             /* [max_logit_rows][vocab], as mapped, or NULL */
    struct k_sampled *sampled;                 /* [max_logit_rows], likewise */
    struct routes routes;
    struct adapter *const *adapters;
    uint32_t n_adapters;
    uint32_t lora_rank, lora_n_out; /* the largest of all */
    float *lora_mid, *lora_out;     /* [max_rows] of them */
    uint32_t *rope_rows;            /* host */
    uint32_t *adapter_first;        /* [n_adapters + 1] host */
    struct k_attn_seq *piece_seqs;  /* host; of the piece that runs */
    struct forward_made made;
    struct forward_put put;
};

static inline bool forward_is_alone(const struct forward *f)
{
    return !f->rank.tensor && !f->rank.before && !f->rank.after;
}

/* x = x + attention(x), and the KV of all rows stored. */
void forward_attention(struct forward *f, uint32_t layer, const struct forward_rows *r);
/* x = x + feed_forward(x) */
void forward_mlp(struct forward *f, uint32_t layer, const struct forward_rows *r);
/* x = x + W y, or + the norm of that: how both end. y has all columns. */
void forward_project(struct forward *f, const struct k_matrix *w, const struct lora *lora, const float *y,
                     const float *norm_after, const struct forward_rows *r);

/* ------------------------------------------------------------ forward_lora.c */

enum td_status forward_lora_open(struct forward *f, uint32_t layer, const struct part_name *parts, uint32_t n_parts,
                                 uint32_t n_in, struct lora *out, struct td_error *error_out);
/* to [n_rows][n_out] gets what the adapters of its rows make of x [n_rows][n_in]. */
void forward_lora(struct forward *f, const struct lora *y, const float *x, const struct forward_rows *r, float *to);
/* Of rows [begin, end) of the batch (forward_batch.adapter_rows); puts first. */
struct adapted_rows forward_adapted_rows(struct forward *f, const uint32_t *adapter_rows, uint32_t begin, uint32_t end);

/* --------------------------------------- forward_open.c, forward_weights.c */

enum td_status forward_no_memory(const struct forward *f, struct td_error *error_out);
/* n numbers of the kernels', to a pointer at out; host NULL: as they come. */
enum td_status forward_numbers(const struct forward *f, const void *host, size_t n, void *out,
                               struct td_error *error_out);
/* The rank's layers, the embedding, the output matrix. */
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
 * Every rank's columns, [n_rows][all], from mine, [n_rows][own]: in all, or alone mine itself. mine stays unchanged until the next
 * gather (kernels.h).
 */
const float *forward_gather(struct forward *f, const struct share *s, uint32_t n_rows, const float *mine, float *all);
/* The rank's columns of x, to be added to and gathered into x: alone x itself, else a copy. */
float *forward_own_columns(struct forward *f, const struct forward_rows *r);

enum td_status forward_pages_open(struct forward *f, uint32_t n_pages, struct td_error *error_out);
