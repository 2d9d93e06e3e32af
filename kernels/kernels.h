/*
 * Compute operations of the forward pass: the one boundary that every backend implements.
 *
 * Results are invariant: the order in which an output element is summed depends on its own row only, never on the number of
 * rows, the chunk, the thread count or who else is in the batch. GEMV and GEMM share one order over K; attention walks
 * absolute blocks of positions; no libm. Every operation has a plain C version (kernels/cpu/plain.c) that is its
 * specification: the fast versions on the CPU, and all of a device in COMPUTE_F32, give the same bits. Backends whose bits differ
 * have another kernels_numerics() name, and that name is a part of the model's fingerprint.
 *
 * Shapes are written outermost first; T is the number of rows (tokens of all sequences in the batch), rows are contiguous.
 *
 * Memory: what an operation reads or writes is memory of its backend (k_alloc, k_map, k_put), but for structs, and arrays that say "host".
 *
 * Threads: one caller at a time. On the CPU an operation spreads over the pool inside and returns when it is done; the pool spins
 * briefly, then sleeps, and hands out work in claimable pieces, so that a lost core costs only its share. On a device it is queued
 * behind the ones before it; k_finish waits for all of them.
 * Errors:  opening, allocating and packing return a status; operations can't fail, their arguments are asserted. A device that is
 *          lost ends the process, with the driver's words.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/wire/kv_layout.h"

/*
 * What a matrix is kept as. Packed, each K_GROUP consecutive inputs of an output (the last may be fewer) share a scale, and
 * what is computed with is bf16(w'), in both computes: k_linear gives the bits that it gives with a matrix of those bf16 numbers.
 *
 *     WEIGHTS_INT8   w' = s q, q = -127..127                    s = bf16(amax / 127)                 8.5 bits a weight
 *     WEIGHTS_FP8    w' = s q, q of e4m3 (scalar.h), saturating  s = amax / 448                       9
 *     WEIGHTS_INT4   w' = s q, q = -8..7                        s of 3 significant bits, searched for 4.5
 *
 * amax is the group's largest magnitude; q = w / s, to the nearest even, cut at the ends. kernels/packed.h is the specification.
 */
enum k_weights { WEIGHTS_AS_STORED, WEIGHTS_INT8, WEIGHTS_FP8, WEIGHTS_INT4 };
enum { K_GROUP = 32 };
const char *k_weights_name(enum k_weights weights); /* "as-stored", "int8", "fp8", "int4" */
#define K_WEIGHTS_NAMES "as-stored|int8|fp8|int4"
enum k_weights k_weights_parse(const char *name); /* of one of them */

enum kernels_isa { ISA_AUTO, ISA_PLAIN, ISA_AVX2, ISA_AVX512 }; /* AVX2 means AVX2+FMA+F16C; AVX512 F+BW+VL+DQ */

/*
 * COMPUTE_F32: activations stay f32, weights as stored are widened exactly:        acc = fma(w, x, acc), k ascending.
 * COMPUTE_BF16: activations are rounded to bf16 (nearest even) before each linear. On the CPU the order and rounding are, per pair
 * of k's, those of VDPBF16PS, emulated bit for bit where the instruction is missing; on a device those of its tensor cores.
 */
enum compute { COMPUTE_F32 = 1, COMPUTE_BF16 = 2 };

struct kernels;

enum kernels_device { DEVICE_CPU, DEVICE_CUDA };

struct kernels_config {
    enum kernels_device device;
    uint32_t ordinal;     /* DEVICE_CUDA: which of them */
    uint32_t n_threads;   /* DEVICE_CPU: 0: one per CPU this process may run on */
    enum kernels_isa isa; /* DEVICE_CPU: ISA_AUTO: the best this CPU has; a test asks for less */
    /* DEVICE_CUDA: the compute of the model's matrices; in COMPUTE_BF16 sums have a device's own order. 0: COMPUTE_F32 */
    enum compute compute;
    /* DEVICE_CUDA, COMPUTE_BF16: products by cuBLAS where it is faster: a row's bits may depend on how many rows the batch has */
    bool any_order;
};

/*
 * DEVICE_CUDA loads a plugin (kernels/cuda): TD_ERR_UNSUPPORTED, saying why, where it was not built, no device is there, or the
 * driver is too old for it.
 */
enum td_status kernels_open(const struct kernels_config *config, struct kernels **out, struct td_error *error_out);
void kernels_close(struct kernels *k); /* NULL is fine */

const struct kernels_config *kernels_config(const struct kernels *k); /* as opened */
/* "avx512"; of a device the instructions it is used by: "sm_90a". */
const char *kernels_isa_name(const struct kernels *k);
uint32_t kernels_n_threads(const struct kernels *k); /* of the pool; a device: 1 */

/* Names the bits of a model in that compute: same name, same results. E.g. "cpu1-f32", "cpu1-bf16", "cuda1-bf16". */
const char *kernels_numerics(const struct kernels_config *config, enum compute compute);
/* The same of kernels as opened, which know more: tensor cores round as their kind does. "cuda1-bf16-sm_90a". */
enum { K_NUMERICS_BYTES = 32 };
void k_numerics(const struct kernels *k, enum compute compute, char out[K_NUMERICS_BYTES]);

/* ------------------------------------------------------------------ memory */

/* Memory for operations, not cleared; on the CPU ordinary memory, 64-byte aligned. TD_ERR_NO_MEMORY. */
enum td_status k_alloc(struct kernels *k, size_t len_bytes, void **out);
void k_free(struct kernels *k, void *p); /* NULL is fine */

/*
 * Memory for operations that stands for host memory: on the CPU that memory itself, which must outlive it; on a device as much there,
 * which k_write and k_read keep alike (between the two they have nothing to do on the CPU). TD_ERR_NO_MEMORY.
 */
enum td_status k_map(struct kernels *k, const void *host, size_t len_bytes, void **out);
/* The same for kernels that have a part of it only: a device has part_bytes. */
enum td_status k_map_part(struct kernels *k, const void *host, size_t len_bytes, size_t part_bytes, void **out);
void k_unmap(struct kernels *k, void *mapped); /* NULL is fine */

/* A small host array for operations of this step: gone with the next k_step, and so may the array be. */
const void *k_put(struct kernels *k, const void *host, size_t len_bytes);
void k_step(struct kernels *k); /* a step begins: what k_put gave is not needed any more */

/* From and to the host, in order with operations; a write's source may be reused at once, a read is there after k_finish. */
void k_write(struct kernels *k, void *to, const void *host, size_t len_bytes);
void k_read(struct kernels *k, void *host, const void *from, size_t len_bytes);
void k_finish(struct kernels *k);

/* Pieces of host memory, stride_bytes apart; in the kernels' own memory one begins where the other ends. */
struct k_pieces {
    size_t piece_bytes, stride_bytes;
    uint32_t n;
};
void k_write_pieces(struct kernels *k, void *to, const void *host, const struct k_pieces *p); /* as k_write */

/*
 * Steps that repeat, as those of decoding do: a device takes a step's operations at once if it knows them from an earlier one.
 *
 * k_replay_rows: 0: steps of so many rows are not replayed. Else how many rows to make of them, at least as many, so that few shapes
 * serve all; what is more is the caller's to make up. Such a step: what operations need is put, the sequences last; k_replay; if that
 * says false, the operations, and k_replay_end. True: they are queued as they were in an earlier step of the same shape, for
 * what was put now, and the caller leaves them and k_replay_end out. shape: all that the choice of operations and their
 * arguments depend on, but for what is put: addresses, and numbers other than the sizes of sequences. Between the two are operations alone, no reads or
 * writes of the host.
 */
uint32_t k_replay_rows(struct kernels *k, uint32_t n_rows);
bool k_replay(struct kernels *k, uint64_t shape);
void k_replay_end(struct kernels *k);

/*
 * A read beside the operations that come after it: of what none of them writes, before the next k_finish. k_mark: a number for the
 * reads aside up to here; they are there when k_passed says so, or k_wait returns, which waits for nothing that was queued later. The
 * reads of a mark are asked for together, with no operation in between that writes what they read. On the CPU they always are there.
 * At most K_MAX_MARKS between two k_finish.
 */
enum { K_MAX_MARKS = 64 };
void k_read_aside(struct kernels *k, void *host, const void *from, size_t len_bytes);
void k_read_pieces_aside(struct kernels *k, void *host, const void *from, const struct k_pieces *p);
uint32_t k_mark(struct kernels *k);
bool k_passed(struct kernels *k, uint32_t mark);
void k_wait(struct kernels *k, uint32_t mark);

/* ------------------------------------------------------------------ linear */

/* A weight matrix [n_out][n_in], packed as its backend likes it. */
struct k_matrix;

/*
 * data [n_out][n_in] row-major of type, host; borrowed only during the call. For COMPUTE_BF16 an f32 or f16 source is rounded to
 * bf16. parts let several matrices with equal n_in become one (q, k, v; gate, up): rows of part 0 first. Strides, in
 * elements, let a part be transposed or interleaved with another. A matrix in which any part has a bias adds one, as f32.
 *
 * A part of e4m3 numbers has scales: output o, input i stands for bf16(data * scales[(first_out + o) / out_block][(first_in + i) / in_block]). WEIGHTS_FP8 keeps
 * its numbers and scales (as far as kernels/packed.h bounds them) if in_block is a multiple of K_GROUP or all inputs are in one.
 */
struct k_scales {
    const void *data; /* NULL: 1 */
    enum num_type type;
    uint32_t out_block, in_block; /* what shares a scale */
    size_t out_stride, in_stride; /* between scales */
    uint32_t first_out, first_in; /* of what has the scales the part begins there */
};
struct k_matrix_part {
    const void *data;
    enum num_type type;
    uint32_t n_out;
    size_t out_stride, in_stride; /* between outputs, between inputs; 0: n_in and 1 */
    const void *bias;             /* [n_out], or NULL */
    enum num_type bias_type;
    uint32_t bias_stride; /* 0: 1 */
    struct k_scales scales;
};
enum td_status k_matrix_pack(struct kernels *k, const struct k_matrix_part *parts, uint32_t n_parts, uint32_t n_in,
                             enum compute compute, enum k_weights weights, struct k_matrix **out);
void k_matrix_free(struct kernels *k, struct k_matrix *m); /* NULL is fine */
uint64_t k_matrix_bytes(const struct kernels *k, const struct k_matrix *m);

/*
 * Packed bytes that lie elsewhere, as in a file that several processes map (engine/weight_cache.h). The same parts, compute, weights
 * and isa name give the same bytes. DEVICE_CPU only.
 *
 * k_matrix_data: the k_matrix_bytes() bytes of a matrix; NULL on a device. k_matrix_view: as k_matrix_pack, but the bytes are at data,
 * 64-byte aligned, and stay the caller's, who keeps them until the matrix is freed; of parts only shapes and biases are read, data may
 * be NULL. TD_ERR_INVALID if such a matrix has not len_bytes, TD_ERR_UNSUPPORTED on a device. k_matrix_move: the matrix, which was
 * packed, gives up its own memory for a copy of it at data, on the same terms.
 */
const void *k_matrix_data(const struct kernels *k, const struct k_matrix *m);
enum td_status k_matrix_view(struct kernels *k, const struct k_matrix_part *parts, uint32_t n_parts, uint32_t n_in,
                             enum compute compute, enum k_weights weights, const void *data, uint64_t len_bytes,
                             struct k_matrix **out);
void k_matrix_move(struct kernels *k, struct k_matrix *m, const void *data);

/* y[T][n_out] = x[T][n_in] W^T + bias; accumulate adds to what y holds: y = y + (x W^T + bias), each sum rounded. */
void k_linear(struct kernels *k, const struct k_matrix *w, const float *x, uint32_t n_rows, float *y, bool accumulate);

/*
 * A stack: n matrices of one shape, compute and type, each with rows of its own. A row's result is that of k_linear with its
 * matrix. The stack takes the matrices over; the array is copied. Closing frees them.
 */
struct k_stack;
enum td_status k_stack_open(struct kernels *k, struct k_matrix *const *matrices, uint32_t n, struct k_stack **out);
void k_stack_close(struct kernels *k, struct k_stack *s); /* NULL is fine */
uint64_t k_stack_bytes(const struct kernels *k, const struct k_stack *s);

/* Each matrix has every row: row t of matrix i at x + t * x_stride + i * x_step goes to y + t * y_stride + i * y_step. */
struct k_each {
    const float *x;
    float *y;
    size_t x_stride, x_step, y_stride, y_step;
};
void k_linear_each(struct kernels *k, const struct k_stack *s, const struct k_each *e, uint32_t n_rows);

/* Rows sorted by matrix: x[first[i] .. first[i + 1]) have matrix i. Matrices without rows are not read. n_rows = first[n]. */
void k_linear_sorted(struct kernels *k, const struct k_stack *s, const uint32_t *first, uint32_t n_rows, const float *x,
                     float *y);

/* ------------------------------------------------------------- elementwise */

/* out[T][dim] = table[ids[t]][dim] * scale; table [vocab][dim] of type, as stored. With scale 1 it gathers rows. */
void k_embed(struct kernels *k, const void *table, enum num_type type, uint32_t dim, const uint32_t *ids,
             uint32_t n_rows, float scale, float *out);

/* y[T][dim] = x / sqrt(mean(x^2) + eps) * w[dim]. Sum of squares: 16 lanes strided by 16, then a fixed tree. y may be x. */
void k_rmsnorm(struct kernels *k, const float *x, const float *w, float eps, uint32_t n_rows, uint32_t dim, float *y);

/* The same for each of n_heads heads of dim in place, row t at x + t * row_stride, heads head_stride apart. */
void k_head_norm(struct kernels *k, float *x, size_t row_stride, uint32_t n_heads, size_t head_stride, const float *w,
                 float eps, uint32_t n_rows, uint32_t dim);

/* y[n] = y + x. */
void k_add(struct kernels *k, const float *x, size_t n, float *y);

/* A dim of each of n_heads heads: row t, head h from x + t * x_stride + h * x_step to y + t * y_stride + h * y_step. */
void k_copy_heads(struct kernels *k, const struct k_each *e, uint32_t n_heads, uint32_t dim, uint32_t n_rows);

/*
 * out[T][dim] = act(g) * u of g = gate_up[T][0..dim), u = gate_up[T][dim..2 dim), with our own exp:
 *
 *     silu       g / (1 + exp(-g)) * u
 *     gelu_tanh  g / (1 + exp(-z)) * u, z = g * fma(g * g, 2 sqrt(2 / pi) 0.044715, 2 sqrt(2 / pi)), which is g times
 *                (1 + tanh(z / 2)) / 2 (Hendrycks and Gimpel 2016, the approximation by tanh)
 *     clamped    g = min(g, limit), u = clamp(u, -limit, limit), then (u + 1) * (g / (1 + exp(-alpha * g))) (gpt-oss)
 */
enum k_act { ACT_SILU, ACT_GELU_TANH, ACT_CLAMPED };
struct k_glu {
    enum k_act act;
    float alpha, limit; /* ACT_CLAMPED */
};
void k_glu(struct kernels *k, const float *gate_up, uint32_t n_rows, uint32_t dim, const struct k_glu *glu, float *out);

/* x[n] = cap * tanh(x / cap), tanh(u) = 1 - 2 / (exp(2 u) + 1): within 2e-7 cap of the true value. */
void k_softcap(struct kernels *k, float *x, size_t n, float cap);

/*
 * Rotary table for n_positions: cos_sin_out[pos][half_dim][2] = scale times cos, sin of pos * inv_freq[i], by our own
 * double-precision range reduction and polynomial (error < 1e-9), rounded to f32.
 */
void k_rope_table(const double *inv_freq, uint32_t half_dim, uint32_t n_positions, double scale, float *cos_sin_out);

/*
 * Rotates dim numbers of each head in place: pairs (i, i + dim / 2) ("rotate half", Su et al. 2021 as in Hugging Face), or
 * (2 i, 2 i + 1) if interleaved. Row t at x + t * row_stride, n_heads heads head_stride apart; what a head has beyond dim
 * stays. table_rows[T]: rows of cos_sin, usually the absolute positions.
 */
struct k_rotary {
    const float *cos_sin;
    uint32_t dim;
    bool interleaved;
};
void k_rope(struct kernels *k, float *x, size_t row_stride, uint32_t n_heads, size_t head_stride,
            const struct k_rotary *r, const uint32_t *table_rows, uint32_t n_rows);

/* ----------------------------------------------------------------- experts */

/*
 * Which experts a row goes to (Shazeer et al. 2017; groups as in DeepSeek-V2, section 2.1.2), and with what weights. The
 * n_used largest logits, the lower index first on a tie, out of the n_groups_used groups whose largest logit is largest.
 * weights: softmax over the chosen logits if normalized, else over all; times scale. Sums in order of index (all) or of choice.
 */
struct k_router {
    uint32_t n_experts, n_used; /* <= K_MAX_EXPERTS, <= K_MAX_USED */
    uint32_t n_groups, n_groups_used;
    bool normalized;
    float scale;
};
enum { K_MAX_EXPERTS = 1024, K_MAX_USED = 32 };
/* logits[T][n_experts]; row t of experts_out and weights_out is at t * stride, n_used long, by falling logit. */
void k_route(struct kernels *k, const struct k_router *r, const float *logits, uint32_t n_rows, uint32_t stride,
             uint32_t *experts_out, float *weights_out);

/*
 * Where rows go among the experts. A slot is a row of what experts compute: pairs of a row and a choice, sorted by expert, in order
 * of rows within one; a shared expert's come after all others, in order of rows.
 */
struct k_slots {
    uint32_t n_used, n_slots;   /* of a row: choices; the same with the shared expert */
    const uint32_t *experts;    /* [T][n_slots] from k_route */
    float *weights;             /* [T][n_slots] from k_route; the shared expert's are set here */
    uint32_t *slots, *slot_row; /* out: [T][n_slots], and [T * n_used] whose row it is */
    uint32_t *first;            /* out: [n_experts + 1] slots of each expert */
    const float *gate;          /* [T] the shared expert's weight is 1 / (1 + exp(-gate)); NULL: 1 */
};
void k_sort_slots(struct kernels *k, const struct k_slots *s, uint32_t n_experts, uint32_t n_rows);

/* y[T][dim] = y + s, s = sum of weights[t][i] * x[rows[t][i]] by fma from 0, i = 0 .. n-1 ascending. */
void k_combine(struct kernels *k, const float *x, uint32_t dim, const uint32_t *rows, const float *weights, uint32_t n,
               uint32_t n_rows, float *y);

/* ---------------------------------------------------------------- attention */

/* Consecutive rows of one sequence in the batch, and where its KV lies. */
struct k_attn_seq {
    uint32_t first_row;    /* in the batch */
    uint32_t n_rows;       /* >= 1 */
    uint32_t first_pos;    /* absolute position of first_row */
    uint8_t *const *pages; /* host; addresses, in token order, of all up to the last row; not read before a window */
};

/* The sequences whose attention comes next, until others do or the next k_step: k_attn.seqs must be this array, unchanged. */
void k_put_seqs(struct kernels *k, const struct k_attn_seq *seqs, uint32_t n_seqs, uint32_t page_tokens);

struct k_attn {
    const struct kv_layout *layout;
    uint32_t layer;                     /* within the layout */
    uint32_t first_kv_head, n_kv_heads; /* of the layout's; the others are not touched */
    uint32_t n_heads;                   /* query heads; a multiple of n_kv_heads */
    const float *q;                     /* row t at q + t * q_stride: [n_heads][head_dim] */
    const float *k, *v; /* row t at k, v + t * kv_stride: [n_kv_heads][head_dim]; latent: k is both, v NULL */
    size_t q_stride, kv_stride;
    uint32_t v_dim;                /* what of a row of V counts: head_dim; latent: less */
    float *out;                    /* [T][n_heads][v_dim] */
    float scale;                   /* of the scores: 1 / sqrt(head_dim) usually */
    float cap;                     /* soft cap of the scaled scores (k_softcap); 0: none */
    const float *sinks;            /* [n_heads] one more logit of each head, whose value is 0; NULL: none */
    uint32_t window;               /* a row at position p sees the last so many of 0..p; 0: all */
    const struct k_attn_seq *seqs; /* host */
    uint32_t n_seqs;
};

/* Writes k and v of every row into its page slot, rounded to the layout's dtype (nearest even). */
void k_kv_store(struct kernels *k, const struct k_attn *a);

/*
 * Causal attention over the pages (row at position p sees 0..p, or the end of that), reading K and V only as stored. Per (row,
 * head): keys in absolute blocks of 32 positions, ascending from the block of the first one seen; scores by a 16-lane strided
 * dot product with a fixed tree; online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022, algorithm 1)
 * with our own exp, from maximum -inf and sum 0, or from the sink's logit and 1; V accumulated in position order by fma.
 * A fully computed k_kv_store must come before.
 */
void k_attention(struct kernels *k, const struct k_attn *a);

/* -------------------------------------------------------------------- ranks */

/*
 * Ranks: kernels that compute one model together, all of one backend, each with a thread of its own. No sum is ever split: a rank computes
 * some columns (outputs of a matrix, heads) of all rows, each as it would alone, and what the next operation reads whole is
 * gathered. So the number of ranks changes no bit. (Splitting along the inputs, as in Shoeybi et al. 2019, gathers half as often, but
 * adds partial sums.)
 *
 * On the CPU they share out the threads, each has at least one. Devices are those from config->ordinal on, or if they share one, that
 * one. out[n] is written only on success.
 */
enum { K_MAX_RANKS = 64 };
enum td_status kernels_open_ranks(const struct kernels_config *config, uint32_t n, bool share_device,
                                  struct kernels **out, struct td_error *error_out);
void kernels_close_ranks(struct kernels *const *ranks, uint32_t n); /* NULLs are fine */

/* Ranks that exchange something; a rank may be in several groups. The array is copied, the ranks are borrowed. */
struct k_group;
struct k_group *k_group_open(struct kernels *const *ranks, uint32_t n);
void k_group_close(struct k_group *g); /* NULL is fine */
/* How: "memory"; of devices "nccl", or "copies" where two share one or there is no NCCL. */
const char *k_group_transport(const struct k_group *g);

/*
 * Rank `to`, or every one, gets all[T][first[n]]: columns first[i] .. first[i + 1) are rank i's mine[T][first[i + 1] - first[i]]. All ranks
 * call it, with the same first, to and n_rows; of who gets nothing all is not used. mine stays unchanged until this rank's next gather
 * in the group, or until k_finish of all ranks. Without columns (first all 0) what was queued before it, on any rank, comes before
 * what is queued after it.
 *
 * Threads: each rank's own; on the CPU, and where devices copy, they meet inside.
 */
enum { K_EVERY_RANK = K_MAX_RANKS };
void k_gather(struct k_group *g, uint32_t rank, const uint32_t *first, uint32_t to, uint32_t n_rows, const float *mine,
              float *all);

/* ----------------------------------------------------------------- sampling */

/*
 * How a token is drawn from a row x of logits. Weights are whole numbers, so their sums have no order and are the same everywhere:
 *
 *     w_i = exp((x_i - max) / temperature) 2^45, to the nearest; less than 2^-46 times as likely as the likeliest is never drawn
 *
 * Of all ids, by falling logit, the lower id first of equals: the first top_k; of those as few of the first as have top_p of their
 * weight; of those the ones whose exp() is at least min_p; of those (Meister et al. 2022, section 4) as few as have typical_p of the
 * weight, first the ones whose surprise -log(w_i / sum) is nearest to the expected one. Of what is left, in the order of ids, the one
 * at which the share u of the weight lies is drawn. NaNs never are. If the largest logit is infinite, it is taken.
 */
struct k_draw {
    float temperature; /* 0: the largest logit, the lowest id on a tie */
    uint32_t top_k;    /* 0: all */
    float top_p;       /* (0, 1] */
    float min_p;       /* [0, 1] */
    float typical_p;   /* 0 or 1: all */
    double u;          /* [0, 1) */
};

struct k_sampled {
    uint32_t id;
    float logit; /* of id */
    /* Of the row: 16 lanes and a fixed tree, our own exp and log. Not finite if a logit is NaN or +inf or all are -inf, else finite. */
    float logsumexp;
};

/* Of each row of logits[T][n]; draws [T]. */
void k_sample_rows(struct kernels *k, const float *logits, uint32_t n, uint32_t n_rows, const struct k_draw *draws,
                   struct k_sampled *out);

/* ------------------------------------------------------- on the host, always */

uint32_t k_argmax(const float *logits, uint32_t n);
float k_logsumexp(const float *logits, uint32_t n);

/* What k_sample_rows draws of one row whose largest logit is best's; scratch: k_draw_scratch_bytes(n), aligned for anything. */
uint32_t k_draw(const float *logits, uint32_t n, uint32_t best, const struct k_draw *d, void *scratch);
size_t k_draw_scratch_bytes(uint32_t n);

/* Ids of the m largest logits, or of all, the largest first, the lower id first of equals, NaNs never; returns how many. */
uint32_t k_largest(const float *logits, uint32_t n, uint32_t m, void *scratch, uint32_t *ids_out);

/* Our own exp and log, the same bits on every backend; for samplers. exp: |x| <= 87, else 0 or +inf. */
float k_exp(float x);
float k_log(float x);

/* Number conversions, round to nearest even; NaN stays NaN. */
void k_convert_to_f32(const void *src, enum num_type type, uint64_t n, float *dst);
void k_convert_from_f32(const float *src, enum num_type type, uint64_t n, void *dst);
