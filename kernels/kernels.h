/*
 * Compute operations of the forward pass: the one boundary that every backend implements.
 *
 * Results are invariant: the order in which an output element is summed depends on its own row only, never on the number of
 * rows, the chunk, the thread count or who else is in the batch. GEMV and GEMM share one order over K; attention walks
 * absolute blocks of positions; no libm. Every operation has a plain C version (kernels/cpu/plain.c) that is its
 * specification: the fast versions give the same bits. Backends whose bits differ have another kernels_numerics() name, and
 * that name is a part of the model's fingerprint.
 *
 * Shapes are written outermost first; T is the number of rows (tokens of all sequences in the batch), rows are contiguous.
 *
 * Threads: one caller at a time; an operation spreads over the pool inside and returns when it is done. The pool spins
 * briefly, then sleeps, and hands out work in claimable pieces, so that a lost core costs only its share.
 * Errors:  opening and packing return a status; operations can't fail, their arguments are asserted.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/wire/kv_layout.h"

enum kernels_isa { ISA_AUTO, ISA_PLAIN, ISA_AVX2, ISA_AVX512 }; /* AVX2 means AVX2+FMA+F16C; AVX512 F+BW+VL+DQ */

/*
 * COMPUTE_F32: activations stay f32, weights as stored are widened exactly:        acc = fma(w, x, acc), k ascending.
 * COMPUTE_BF16: activations are rounded to bf16 (nearest even) before each linear; per pair of k's the order and rounding
 * are those of VDPBF16PS, emulated bit for bit where the instruction is missing.
 */
enum compute { COMPUTE_F32 = 1, COMPUTE_BF16 = 2 };

struct kernels;

struct kernels_config {
    uint32_t n_threads;   /* 0: one per CPU this process may run on */
    enum kernels_isa isa; /* ISA_AUTO: the best this CPU has; a test asks for less */
};

enum td_status kernels_open(const struct kernels_config *config, struct kernels **out, struct td_error *error_out);
void kernels_close(struct kernels *k); /* NULL is fine */

const char *kernels_isa_name(const struct kernels *k);
uint32_t kernels_n_threads(const struct kernels *k);

/* Names the bits: same name, same results. E.g. "cpu1-f32", "cpu1-bf16". */
const char *kernels_numerics(enum compute compute);

/* ------------------------------------------------------------------ linear */

/* A weight matrix [n_out][n_in], packed for this backend (panels of outputs, k-major inside). */
struct k_matrix;

/*
 * data [n_out][n_in] row-major of type; borrowed only during the call. For COMPUTE_BF16 an f32 or f16 source is rounded to
 * bf16. parts let several matrices with equal n_in become one (q, k, v; gate, up): rows of part 0 first.
 */
struct k_matrix_part {
    const void *data;
    enum num_type type;
    uint32_t n_out;
};
enum td_status k_matrix_pack(struct kernels *k, const struct k_matrix_part *parts, uint32_t n_parts, uint32_t n_in,
                             enum compute compute, struct k_matrix **out);
void k_matrix_free(struct k_matrix *m);
uint64_t k_matrix_bytes(const struct k_matrix *m);
uint32_t k_matrix_n_out(const struct k_matrix *m);

/* y[T][n_out] = x[T][n_in] W^T; accumulate adds to what y holds: y = y + (x W^T), the sum rounded once at the end. */
void k_linear(struct kernels *k, const struct k_matrix *w, const float *x, uint32_t n_rows, float *y, bool accumulate);

/* ------------------------------------------------------------- elementwise */

/* out[T][dim] = table[ids[t]][dim]; table [vocab][dim] of type, as stored. */
void k_embed(struct kernels *k, const void *table, enum num_type type, uint32_t dim, const uint32_t *ids,
             uint32_t n_rows, float *out);

/* y[T][dim] = x / sqrt(mean(x^2) + eps) * w[dim]. Sum of squares: 16 lanes strided by 16, then a fixed tree. y may be x. */
void k_rmsnorm(struct kernels *k, const float *x, const float *w, float eps, uint32_t n_rows, uint32_t dim, float *y);

/* out[T][dim] = silu(gate_up[T][0..dim)) * gate_up[T][dim..2 dim). silu with our own exp. */
void k_silu_mul(struct kernels *k, const float *gate_up, uint32_t n_rows, uint32_t dim, float *out);

/*
 * Rotary table for n_positions: cos_sin_out[pos][half_dim][2] = cos, sin of pos * inv_freq[i], by our own double-precision
 * range reduction and polynomial (error < 1e-9), rounded to f32.
 */
void k_rope_table(const double *inv_freq, uint32_t half_dim, uint32_t n_positions, float *cos_sin_out);

/*
 * Rotates pairs (i, i + half) of each head in place ("rotate half", Su et al. 2021 as in Hugging Face).
 * x: row t at x + t * row_stride, n_heads heads of head_dim. positions[T] absolute.
 */
void k_rope(struct kernels *k, float *x, uint32_t row_stride, uint32_t n_heads, uint32_t head_dim,
            const uint32_t *positions, uint32_t n_rows, const float *cos_sin);

/* ---------------------------------------------------------------- attention */

/* Consecutive rows of one sequence in the batch, and where its KV lies. */
struct k_attn_seq {
    uint32_t first_row;    /* in the batch */
    uint32_t n_rows;       /* >= 1 */
    uint32_t first_pos;    /* absolute position of first_row */
    uint8_t *const *pages; /* [ceil((first_pos + n_rows) / page_tokens)] page addresses in token order */
};

struct k_attn {
    const struct kv_layout *layout;
    uint32_t layer;      /* within the layout */
    uint32_t n_heads;    /* query heads; a multiple of layout->n_kv_heads */
    uint32_t row_stride; /* floats between rows of qkv */
    const float *qkv;    /* row: [n_heads][head_dim] q, then [n_kv_heads][head_dim] k, then the same of v */
    float *out;          /* [T][n_heads][head_dim] */
    float scale;         /* 1 / sqrt(head_dim) usually */
    const struct k_attn_seq *seqs;
    uint32_t n_seqs;
};

/* Writes k and v of every row into its page slot, rounded to the layout's dtype (nearest even). */
void k_kv_store(struct kernels *k, const struct k_attn *a);

/*
 * Causal attention over the pages (row at position p sees 0..p), reading K and V only as stored. Per (row, head): keys in
 * absolute blocks of 32 positions, ascending; scores by a 16-lane strided dot product with a fixed tree; online softmax
 * (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022, algorithm 1) with our own exp; V accumulated in position
 * order by fma. A fully computed k_kv_store must come before.
 */
void k_attention(struct kernels *k, const struct k_attn *a);

/* ----------------------------------------------------------------- sampling */

/* Index of the largest of logits[n]; the lowest index on a tie. */
uint32_t k_argmax(const float *logits, uint32_t n);

/* log(sum(exp(logits[n]))), 16 lanes and a fixed tree, our own exp and log. */
float k_logsumexp(const float *logits, uint32_t n);

/* Our own exp and log, the same bits on every backend; for samplers. exp: |x| <= 87, else 0 or +inf. */
float k_exp(float x);
float k_log(float x);

/* Number conversions, round to nearest even; NaN stays NaN. */
void k_convert_to_f32(const void *src, enum num_type type, uint64_t n, float *dst);
void k_convert_from_f32(const float *src, enum num_type type, uint64_t n, void *dst);
