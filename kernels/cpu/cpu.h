/*
 * What the files of the CPU backend share: the packed matrix, pieces of work, and the table of functions of
 * each instruction set.
 *
 * backend.c and rows.c cut an operation into pieces and hand them to the pool; plain.c, avx2.c and avx512.c
 * compute one piece. A sum is never cut between pieces, so bits do not depend on the thread that computes it.
 * "Same bits" excludes the payload of NaNs.
 *
 * A packed matrix is [n_panels][n_steps][64 outputs] elements; missing outputs of the last panel are zero.
 *
 *     COMPUTE_F32   a step is one k; elements as stored (bf16 and f16 2 bytes, f32 4 bytes). In bf16 panels
 *                   the 64 elements of a step are 32 words of two: word 16 g + i holds output 32 g + i low
 *                   and 32 g + 16 + i high (g 0..1, i 0..15), so a shift and a mask widen a vector of words
 *                   into two vectors of outputs.
 *     COMPUTE_BF16  a step is a pair of k's; an element is a word, the even k low, the odd k high. If n_in is
 *                   odd, the last odd k is +0 on both sides; that turns a -0 sum into +0, in every version.
 *
 * A matrix in a packed format is [n_panels][n_groups] groups of K_GROUP k's; the last one is padded with
 * zeros. A group is
 *
 *     [64] scales (f32 for fp8, else bf16), in COMPUTE_F32 in the order of a step's elements
 *     [K_GROUP * 64] codes, in the order of the elements of the steps that the group has in a bf16 panel.
 *                   Codes are bytes; of int4 they are words of four codes: in each run of 128, word i has
 *                   elements i, i + 32, i + 64, i + 96, the first one lowest
 *
 * A group is widened to those steps before they are summed (packed.inc.h).
 */
#pragma once

#include <stddef.h>

#include "kernels/packed.h"

enum {
    PANEL = 64,       /* outputs of a panel */
    STEP_BLOCK = 512, /* steps of a panel that stay in the L2 cache while rows pass (at most 128 KiB) */
    NEAR_BLOCK = 64,  /* widened steps that stay in the L1 cache (at most 16 KiB) */
    ROW_BLOCK = 192,  /* rows of one piece; their partial sums are 48 KiB of stack */
    LANES = 16,       /* partial sums of a dot product */
    KEY_BLOCK = 32,   /* positions of one online-softmax step */
    QUERY_TILE = 48,  /* queries (rows times heads of a group) that share a loaded block of keys */
};

struct k_matrix {
    enum compute compute;
    enum k_weights weights;
    /* Of elements; for packed formats of the widened elements. NUM_BF16 with COMPUTE_BF16. */
    enum num_type type;
    uint32_t n_out, n_in;
    uint32_t n_panels, n_steps, n_groups;
    size_t step_bytes, group_bytes;
    size_t bytes;
    uint8_t *data;    /* from mem_map, or borrowed and then perhaps read-only */
    bool is_borrowed; /* by k_matrix_view or k_matrix_move */
    float *bias;      /* [n_out], or NULL */
};

static inline const uint8_t *matrix_step(const struct k_matrix *m, uint32_t panel, uint32_t step)
{
    return m->data + ((size_t)panel * m->n_steps + step) * m->step_bytes;
}

/* The place of output c of a panel within a step, in elements. */
static inline uint32_t panel_slot(const struct k_matrix *m, uint32_t c)
{
    if (m->compute == COMPUTE_BF16 || m->type != NUM_BF16)
        return c;
    return c / 32 * 32 + c % 16 * 2 + c % 32 / 16;
}

static inline uint8_t *matrix_group(const struct k_matrix *m, uint32_t panel, uint32_t group)
{
    return m->data + ((size_t)panel * m->n_groups + group) * m->group_bytes;
}

static inline uint32_t group_scales_bytes(const struct k_matrix *m)
{
    return PANEL * packed_scale_bytes(m->weights);
}

static inline uint32_t group_steps(const struct k_matrix *m)
{
    return m->compute == COMPUTE_BF16 ? K_GROUP / 2 : K_GROUP;
}

/* The place of output c's scale in a group, in scales; the place of its k-th number, in codes. */
static inline uint32_t group_scale_slot(const struct k_matrix *m, uint32_t c)
{
    return panel_slot(m, c);
}

static inline uint32_t group_code_slot(const struct k_matrix *m, uint32_t k, uint32_t c)
{
    return m->compute == COMPUTE_BF16 ? (k / 2 * PANEL + c) * 2 + k % 2 : k * PANEL + panel_slot(m, c);
}

/* The byte of a group's codes that has int4 code i; its shift within the byte. */
static inline uint32_t int4_byte(uint32_t i)
{
    return i / 128 * 64 + i % 32 * 2 + i % 128 / 64;
}

static inline uint32_t int4_shift(uint32_t i)
{
    return i % 64 / 32 * 4;
}

struct cpu_linear_job {
    const struct k_matrix *w;
    const void *x; /* [T][n_steps]: COMPUTE_F32 floats, COMPUTE_BF16 words of two bf16 */
    size_t x_stride, y_stride;
    uint32_t n_rows;
    float *y; /* [T][n_out] */
    bool accumulate;
};

/* One piece of attention: rows row0 .. row0 + n_rows - 1 of a sequence, all query heads of one kv head. */
struct attn_tile {
    const struct k_attn *a;
    const struct k_attn_seq *seq;
    uint32_t kv_head;
    uint32_t row0, n_rows;
    float *scratch; /* attn_scratch_floats() floats, 64-byte aligned */
};

static inline uint32_t attn_padded(uint32_t dim)
{
    return (dim + LANES - 1) / LANES * LANES;
}

/* Transposed keys; values, queries and sums padded to whole vectors; weights; five numbers for each query. */
static inline size_t attn_scratch_floats(uint32_t head_dim, uint32_t n_queries)
{
    size_t dim = attn_padded(head_dim);
    return 2 * KEY_BLOCK * dim + n_queries * (2 * dim + KEY_BLOCK + 5) + 6 * LANES;
}

/* The first position that a row at position pos sees. */
static inline uint32_t attn_first_key(const struct k_attn *a, uint32_t pos)
{
    return a->window && pos >= a->window ? pos - a->window + 1 : 0;
}

/*
 * Address of K (which 0) or V (which 1) of a position, as stored; the same for latents. kv_head counts a's kv
 * heads.
 */
static inline uint8_t *attn_kv_at(const struct k_attn *a, const struct k_attn_seq *s, uint32_t which, uint32_t kv_head,
                                  uint32_t pos)
{
    const struct kv_layout *l = a->layout;
    size_t head = (size_t)(which % kv_layout_planes(l)) * l->n_kv_heads + a->first_kv_head + kv_head;
    return s->pages[pos / l->page_tokens] + a->layer * kv_layout_layer_bytes(l) + head * kv_layout_head_bytes(l) +
           (size_t)(pos % l->page_tokens) * l->head_dim * num_type_bytes(l->dtype);
}

/* The functions of one instruction set. Rows are row0 <= r < row1, row1 - row0 <= ROW_BLOCK. */
struct cpu_ops {
    const char *name;
    void (*linear_f32)(const struct cpu_linear_job *job, uint32_t panel, uint32_t row0, uint32_t row1);
    void (*linear_bf16)(const struct cpu_linear_job *job, uint32_t panel, uint32_t row0, uint32_t row1);
    void (*round_pairs)(const float *x, uint32_t n_in, uint32_t *words_out); /* (n_in + 1) / 2 words */
    void (*rmsnorm)(const float *x, const float *w, float eps, uint32_t dim, float *y);
    void (*glu)(const float *gate, const float *up, uint32_t dim, const struct k_glu *glu, float *out);
    void (*softcap)(float *x, size_t n, float cap);
    void (*axpy)(float a, const float *x, uint32_t n, float *y); /* y = fma(a, x, y) */
    void (*attend)(const struct attn_tile *tile);
    void (*to_f32)(const void *src, enum num_type type, uint64_t n, float *dst);
    void (*from_f32)(const float *src, enum num_type type, uint64_t n, void *dst);
    float (*max)(const float *x, uint32_t n); /* ignores NaNs; -inf if nothing else is there */
    float (*logsumexp)(const float *x, uint32_t n);
    /* e_out = exp((x - max) / temperature), 0 for NaNs. Returns the sum of scalar_weight(e). */
    uint64_t (*weigh)(const float *x, uint32_t n, float max, float temperature, float *e_out);
    float (*exp)(float x);
    float (*log)(float x);
    /*
     * For the bench; NULL in plain C. The peak_ functions return the operations that they did; len_bytes is a
     * multiple of 1024.
     */
    double (*peak_f32)(void);
    double (*peak_bf16)(void);
    void (*read_stream)(const void *from, size_t len_bytes);
};

extern const struct cpu_ops cpu_plain;
#ifdef KERNELS_SIMD
/* Functions that avx512.c takes from the other files. */
void cpu_avx2_linear_bf16(const struct cpu_linear_job *job, uint32_t panel, uint32_t row0, uint32_t row1);
double cpu_avx2_peak_bf16(void);
double cpu_avx512_peak_bf16(void);
void cpu_avx512_linear_bf16(const struct cpu_linear_job *job, uint32_t panel, uint32_t row0, uint32_t row1);

extern const struct cpu_ops cpu_avx2;
extern const struct cpu_ops cpu_avx512;
extern const struct cpu_ops cpu_avx512_bf16; /* cpu_avx512 with linear_bf16 by the instruction */
#endif

/* The best instruction set that this CPU has and isa allows; NULL if the CPU lacks isa. */
const struct cpu_ops *cpu_ops_get(enum kernels_isa isa);
