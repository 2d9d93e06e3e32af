/*
 * Compute operations of the forward pass: the one boundary that every backend implements.
 *
 * Results are invariant: the order in which an output element is summed depends on its own row only, never on
 * the number of rows, the chunk, the thread count or the rest of the batch. GEMV and GEMM share one order
 * over K; attention walks absolute blocks of positions; no libm. Every operation has a plain C version
 * (kernels/cpu/plain.c), which is its specification: the fast versions on the CPU, and all operations of a
 * device in COMPUTE_F32, give the same bits. A backend with other bits has another kernels_numerics() name,
 * and that name is a part of the model's fingerprint.
 *
 * Shapes are written outermost first. T is the number of rows (tokens of all sequences in the batch); rows
 * are contiguous.
 *
 * Memory: operations read and write memory of their backend (k_alloc, k_map, k_put), except structs, and
 * arrays marked "host".
 *
 * Threads: one caller at a time. On the CPU an operation spreads over the pool of threads and returns when it
 * is done. The pool hands out work in pieces that threads claim, so a lost core costs only its piece; idle
 * threads spin briefly, then sleep. On a device an operation is queued behind the ones before it; k_finish
 * waits for all of them.
 * Errors: opening, allocating and packing return a status. Operations can't fail; their arguments are
 * asserted. A device that is lost ends the process, with the driver's message.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/wire/kv_layout.h"

/*
 * The format in which a matrix is kept. In a packed format each K_GROUP consecutive inputs of an output (the
 * last group may be shorter) share a scale. Both computes multiply with bf16(w'): k_linear gives the bits
 * that it gives with a matrix of these bf16 numbers.
 *
 *     WEIGHTS_INT8   w' = s q, q = -127..127                     s = bf16(amax / 127)                8.5 bits
 *     a weight WEIGHTS_FP8    w' = s q, q in e4m3 (scalar.h), saturating  s = amax / 448
 *     9 WEIGHTS_INT4   w' = s q, q = -8..7                         s of 3 significant bits, searched   4.5
 *
 * amax is the largest magnitude in the group; q = w / s rounded to nearest even and clamped. kernels/packed.h
 * is the specification.
 */
enum k_weights { WEIGHTS_AS_STORED, WEIGHTS_INT8, WEIGHTS_FP8, WEIGHTS_INT4 };
enum { K_GROUP = 32 };
const char *k_weights_name(enum k_weights weights); /* "as-stored", "int8", "fp8", "int4" */
#define K_WEIGHTS_NAMES "as-stored|int8|fp8|int4"
enum k_weights k_weights_parse(const char *name); /* name: one of the above */

/* ISA_AVX2 means AVX2, FMA and F16C; ISA_AVX512 means F, BW, VL and DQ. */
enum kernels_isa { ISA_AUTO, ISA_PLAIN, ISA_AVX2, ISA_AVX512 };

/*
 * COMPUTE_F32: activations stay f32, weights are widened exactly: acc = fma(w, x, acc), k ascending.
 * COMPUTE_BF16: activations are rounded to bf16 (nearest even) before each linear operation. On the CPU the
 * order and the rounding of each pair of k's are those of VDPBF16PS, emulated bit for bit where the
 * instruction is missing; on a device they are those of its tensor cores.
 */
enum compute { COMPUTE_F32 = 1, COMPUTE_BF16 = 2 };

struct kernels;

enum kernels_device { DEVICE_CPU, DEVICE_CUDA };
enum { K_MAX_THREADS = 256 };

struct kernels_config {
    enum kernels_device device;
    uint32_t ordinal;     /* DEVICE_CUDA: number of the device */
    uint32_t n_threads;   /* DEVICE_CPU, <= K_MAX_THREADS; 0: one for each CPU that this process may use */
    enum kernels_isa isa; /* DEVICE_CPU; ISA_AUTO: the best that this CPU has */
    /*
     * DEVICE_CUDA: compute of the model's matrices; in COMPUTE_BF16 sums have the device's own order. 0:
     * COMPUTE_F32.
     */
    enum compute compute;
    /*
     * DEVICE_CUDA with COMPUTE_BF16: use cuBLAS where it is faster. A row's bits may then depend on the
     * batch's size.
     */
    bool any_order;
};

/*
 * DEVICE_CUDA loads a plugin (kernels/cuda). TD_ERR_UNSUPPORTED says why it can't: it was not built, there is
 * no device, or the driver is too old for it.
 */
enum td_status kernels_open(const struct kernels_config *config, struct kernels **out, struct td_error *error_out);
void kernels_close(struct kernels *k); /* NULL is fine */

const struct kernels_config *kernels_config(const struct kernels *k); /* as opened */
/* E.g. "avx512"; on a device the instructions that are used, e.g. "sm_90a". */
const char *kernels_isa_name(const struct kernels *k);
uint32_t kernels_n_threads(const struct kernels *k); /* threads of the pool; 1 on a device */

/*
 * Names the bits of a model in that compute: same name, same results. E.g. "cpu1-f32", "cpu1-bf16",
 * "cuda2-bf16".
 */
const char *kernels_numerics(const struct kernels_config *config, enum compute compute);
/*
 * The same for opened kernels, with more detail, as tensor cores of each kind round differently:
 * "cuda2-bf16-sm_90a".
 */
enum { K_NUMERICS_BYTES = 32 };
void k_numerics(const struct kernels *k, enum compute compute, char out[K_NUMERICS_BYTES]);

/* ------------------------------------------------------------------ memory */

/* Bytes of the device's memory: free, and in all. False on the CPU: its memory is the host's
 * (base/available.h). */
bool k_memory(struct kernels *k, uint64_t *free_out, uint64_t *total_out);
/* Memory for operations, not cleared. On the CPU it is ordinary memory, 64-byte aligned. TD_ERR_NO_MEMORY. */
enum td_status k_alloc(struct kernels *k, size_t len_bytes, void **out);
void k_free(struct kernels *k, void *p); /* NULL is fine */

/*
 * Memory for operations that mirrors host memory. On the CPU it is the host memory itself, which must outlive
 * the mapping. On a device it is as much device memory; k_write and k_read copy between the two, and do
 * nothing on the CPU. TD_ERR_NO_MEMORY.
 */
enum td_status k_map(struct kernels *k, const void *host, size_t len_bytes, void **out);
/* The same for kernels that use only a part of it: a device allocates part_bytes. */
enum td_status k_map_part(struct kernels *k, const void *host, size_t len_bytes, size_t part_bytes, void **out);
/* Whether copies between the two need no buffer, which makes them slower. True on the CPU. */
bool k_is_pinned(const struct kernels *k, const void *mapped);
void k_unmap(struct kernels *k, void *mapped); /* NULL is fine */

/*
 * Makes a small host array readable by operations until the next k_step. The array must not change before
 * these operations were called: on the CPU the result is the array itself.
 */
const void *k_put(struct kernels *k, const void *host, size_t len_bytes);
void k_step(struct kernels *k); /* begins a step: frees what k_put returned in the last one */

/*
 * Copies from and to the host, in order with operations. The source of a write may be reused at once; the
 * result of a read is there after k_finish.
 */
void k_write(struct kernels *k, void *to, const void *host, size_t len_bytes);
void k_read(struct kernels *k, void *host, const void *from, size_t len_bytes);
void k_finish(struct kernels *k);

/* n pieces of host memory, stride_bytes apart. In the kernels' memory they are contiguous. */
struct k_pieces {
    size_t piece_bytes, stride_bytes;
    uint32_t n;
};
void k_write_pieces(struct kernels *k, void *to, const void *host, const struct k_pieces *p); /* as k_write */

/*
 * Replay: a device can queue a whole step at once if it has recorded the same step before. Decoding steps
 * profit.
 *
 * k_replay_rows returns the padded row count (>= n_rows), or 0 if this size is not replayed. Padding keeps
 * the number of recorded shapes small; the caller makes up the additional rows.
 *
 * Call order in such a step: k_put for everything that operations need, k_put_seqs last; then k_replay. If it
 * returns true, the operations of the recorded step are queued, for the arrays put now, and the step is
 * complete. If it returns false, the caller queues the operations and calls k_replay_end. In between come
 * operations only, no reads or writes of the host.
 *
 * shape must differ for steps that differ in their operations or in any argument that was not put, such as an
 * address or a size; the lengths of sequences may differ.
 */
uint32_t k_replay_rows(struct kernels *k, uint32_t n_rows);
bool k_replay(struct kernels *k, uint64_t shape);
void k_replay_end(struct kernels *k);

/*
 * Asynchronous device-to-host copies. No operation queued before the next k_finish may write the source.
 * k_mark returns a number for the copies queued so far: they are complete when k_passed returns true or
 * k_wait returns; k_wait does not wait for anything that was queued later. Between the copies of one mark no
 * operation may be queued that writes their sources. On the CPU copies are complete at once. At most
 * K_MAX_MARKS marks between two k_finish.
 */
enum { K_MAX_MARKS = 64 };
void k_read_aside(struct kernels *k, void *host, const void *from, size_t len_bytes);
void k_read_pieces_aside(struct kernels *k, void *host, const void *from, const struct k_pieces *p);
uint32_t k_mark(struct kernels *k);
bool k_passed(struct kernels *k, uint32_t mark);
void k_wait(struct kernels *k, uint32_t mark);

/*
 * Asynchronous host-to-device copies. They begin after the operations that were queued before, and
 * operations queued later do not wait for them: until they are written, no operation may use the target,
 * and the host's bytes must not change. If the host's memory is not pinned (k_is_pinned) it is
 * k_write_pieces, in order with operations. k_write_mark returns a number for all copies queued so far,
 * which rises with them; they are there when k_written returns true or k_write_wait returns. A number that
 * was not reached counts as the last.
 */
void k_write_pieces_aside(struct kernels *k, void *to, const void *host, const struct k_pieces *p);
uint64_t k_write_mark(struct kernels *k);
bool k_written(struct kernels *k, uint64_t mark);
void k_write_wait(struct kernels *k, uint64_t mark);

/*
 * A trace: what ran on the device from k_trace_begin to k_trace_end, for benches. Both wait for all
 * operations. k_trace_end returns an array that the caller frees, in order of begin; NULL: nothing ran. One
 * trace at a time in a process. TD_ERR_UNSUPPORTED: the CPU, or a library is missing.
 */
struct k_trace_event {
    char name[96]; /* of a kernel, with its template's arguments, or of a kind of copy */
    uint64_t begin_ns, end_ns;
};
enum td_status k_trace_begin(struct kernels *k, struct td_error *error_out);
struct k_trace_event *k_trace_end(struct kernels *k, uint32_t *n_out);

/* ------------------------------------------------------------------ linear */

/* A weight matrix [n_out][n_in], packed in the backend's own layout. */
struct k_matrix;

/*
 * data [n_out][n_in], row-major, of the given type, host; borrowed during the call. For COMPUTE_BF16 an f32
 * or f16 source is rounded to bf16. Parts let several matrices with equal n_in become one (q, k, v; gate,
 * up): rows of part 0 come first. Strides, in elements, let a part be transposed or interleaved with another
 * one. If any part has a bias, the matrix adds a bias in f32.
 *
 * A part of e4m3 numbers has scales. Output o, input i stands for
 * bf16(data * scales[(first_out + o) / out_block][(first_in + i) / in_block]). WEIGHTS_FP8 keeps its numbers
 * and scales (as bounded in kernels/packed.h) if in_block and first_in are multiples of K_GROUP, or if all
 * inputs share one block.
 */
struct k_scales {
    const void *data; /* NULL: all scales are 1 */
    enum num_type type;
    uint32_t out_block, in_block; /* outputs and inputs that share a scale */
    size_t out_stride, in_stride; /* elements between scales of neighbouring blocks */
    /* Output and input, in the tensor that has the scales, where this part starts. */
    uint32_t first_out, first_in;
};
struct k_matrix_part {
    const void *data;
    enum num_type type;
    uint32_t n_out;
    size_t out_stride, in_stride; /* between outputs, between inputs; 0 means n_in and 1 */
    const void *bias;             /* [n_out], or NULL */
    enum num_type bias_type;
    uint32_t bias_stride; /* 0 means 1 */
    struct k_scales scales;
};
enum td_status k_matrix_pack(struct kernels *k, const struct k_matrix_part *parts, uint32_t n_parts, uint32_t n_in,
                             enum compute compute, enum k_weights weights, struct k_matrix **out);
void k_matrix_free(struct kernels *k, struct k_matrix *m); /* NULL is fine */
uint64_t k_matrix_bytes(const struct kernels *k, const struct k_matrix *m);

/*
 * Packed bytes outside the kernels' memory, as in a file that several processes map (engine/weight_cache.h).
 * The same parts, compute, weights and isa name give the same bytes. DEVICE_CPU only.
 *
 * k_matrix_data: the k_matrix_bytes() bytes of a matrix; NULL on a device.
 * k_matrix_view: as k_matrix_pack, but uses the bytes at data, 64-byte aligned. They stay the caller's, who
 * keeps them until the matrix is freed. Only shapes and biases of the parts are read; their data may be NULL.
 * TD_ERR_INVALID if the matrix does not have len_bytes, TD_ERR_UNSUPPORTED on a device.
 * k_matrix_move: a packed matrix frees its own memory and uses a copy of it at data, on the same terms.
 */
const void *k_matrix_data(const struct kernels *k, const struct k_matrix *m);
enum td_status k_matrix_view(struct kernels *k, const struct k_matrix_part *parts, uint32_t n_parts, uint32_t n_in,
                             enum compute compute, enum k_weights weights, const void *data, uint64_t len_bytes,
                             struct k_matrix **out);
void k_matrix_move(struct kernels *k, struct k_matrix *m, const void *data);

/* y[T][n_out] = x[T][n_in] W^T + bias. accumulate: y = y + (x W^T + bias), each sum rounded. */
void k_linear(struct kernels *k, const struct k_matrix *w, const float *x, uint32_t n_rows, float *y, bool accumulate);

/*
 * A stack: n matrices of one shape, compute and type. A row's result is that of k_linear with its matrix. The
 * stack takes the matrices over, and closing frees them; the array is copied.
 */
struct k_stack;
enum td_status k_stack_open(struct kernels *k, struct k_matrix *const *matrices, uint32_t n, struct k_stack **out);
void k_stack_close(struct kernels *k, struct k_stack *s); /* NULL is fine */
uint64_t k_stack_bytes(const struct kernels *k, const struct k_stack *s);

/*
 * Every row goes through each matrix: row t of matrix i is read at x + t * x_stride + i * x_step and its
 * result is written at y + t * y_stride + i * y_step.
 */
struct k_each {
    const float *x;
    float *y;
    size_t x_stride, x_step, y_stride, y_step;
};
void k_linear_each(struct kernels *k, const struct k_stack *s, const struct k_each *e, uint32_t n_rows);

/*
 * Rows sorted by matrix: rows first[i] .. first[i + 1] - 1 of x go through matrix i. A matrix without rows is
 * not read. n_rows = first[n].
 */
void k_linear_sorted(struct kernels *k, const struct k_stack *s, const uint32_t *first, uint32_t n_rows, const float *x,
                     float *y);

/* ------------------------------------------------------------- elementwise */

/* out[T][dim] = table[ids[t]][dim] * scale; table [any number of rows][dim] of type, such as an embedding. */
void k_take_rows(struct kernels *k, const void *table, enum num_type type, uint32_t dim, const uint32_t *ids,
                 uint32_t n_rows, float scale, float *out);

/*
 * y[T][dim] = x / sqrt(mean(x^2) + eps) * w[dim]. Sum of squares: 16 lanes strided by 16, then a fixed tree.
 * y may be x.
 */
void k_rmsnorm(struct kernels *k, const float *x, const float *w, float eps, uint32_t n_rows, uint32_t dim, float *y);

/* The same in place for n_heads heads of dim numbers, head_stride apart; rows are row_stride apart. */
void k_head_norm(struct kernels *k, float *x, size_t row_stride, uint32_t n_heads, size_t head_stride, const float *w,
                 float eps, uint32_t n_rows, uint32_t dim);

/* y[n] = y + x. */
void k_add(struct kernels *k, const float *x, size_t n, float *y);

/*
 * Copies dim numbers of each of n_heads heads: row t, head h from x + t * x_stride + h * x_step to y + t *
 * y_stride + h * y_step.
 */
void k_copy_heads(struct kernels *k, const struct k_each *e, uint32_t n_heads, uint32_t dim, uint32_t n_rows);

/*
 * out[T][dim] = act(g) * u of g = gate_up[T][0..dim), u = gate_up[T][dim..2 dim), with our own exp:
 *
 *     silu       g / (1 + exp(-g)) * u
 *     gelu_tanh  g / (1 + exp(-z)) * u, z = g * fma(g * g, 2 sqrt(2 / pi) 0.044715, 2 sqrt(2 / pi)); this is
 *                g (1 + tanh(z / 2)) / 2 * u (Hendrycks and Gimpel 2016, the approximation by tanh)
 *     clamped    (u + 1) * (g / (1 + exp(-alpha * g))), after g = min(g, limit), u = clamp(u, -limit, limit)
 *                (gpt-oss)
 */
enum k_act { ACT_SILU, ACT_GELU_TANH, ACT_CLAMPED };
struct k_glu {
    enum k_act act;
    float alpha, limit; /* ACT_CLAMPED */
};
void k_glu(struct kernels *k, const float *gate_up, uint32_t n_rows, uint32_t dim, const struct k_glu *glu, float *out);

/* x[n] = cap * tanh(x / cap), with tanh(u) = 1 - 2 / (exp(2 u) + 1). Error below 2e-7 cap. */
void k_softcap(struct kernels *k, float *x, size_t n, float cap);

/*
 * Rotary table: cos_sin_out[n_positions][half_dim][2] = scale * cos, scale * sin of pos * inv_freq[i], by our
 * own double-precision range reduction and polynomial (error < 1e-9), rounded to f32.
 */
void k_rope_table(const double *inv_freq, uint32_t half_dim, uint32_t n_positions, double scale, float *cos_sin_out);

/*
 * Rotates dim numbers of each head in place: pairs (i, i + dim / 2) ("rotate half", Su et al. 2021 as in
 * Hugging Face) or, if interleaved, (2 i, 2 i + 1). Row t is at x + t * row_stride; its n_heads heads are
 * head_stride apart. Numbers of a head beyond dim are not changed. table_rows[T] are rows of cos_sin, usually
 * the absolute positions.
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
 * Chooses the experts of a row (Shazeer et al. 2017; groups as in DeepSeek-V2, section 2.1.2) and their
 * weights. The n_groups_used groups with the largest logits are kept; of their experts the n_used with the
 * largest logits are chosen. On a tie the lower index wins. weights: softmax over the chosen logits if
 * normalized, else over all logits; times scale. Sums run in order of index (all logits) or of choice.
 */
struct k_router {
    uint32_t n_experts, n_used; /* <= K_MAX_EXPERTS, <= K_MAX_USED */
    uint32_t n_groups, n_groups_used;
    bool normalized;
    float scale;
};
enum { K_MAX_EXPERTS = 1024, K_MAX_USED = 32 };
/*
 * logits[T][n_experts]. Row t of experts_out and weights_out is at t * stride; its n_used entries have
 * falling logits.
 */
void k_route(struct kernels *k, const struct k_router *r, const float *logits, uint32_t n_rows, uint32_t stride,
             uint32_t *experts_out, float *weights_out);

/*
 * Sorts rows by expert. A slot is one row of the experts' work: a pair of a row and one of its choices. Slots
 * are sorted by expert, and within an expert by row. The slots of a shared expert follow all others, in order
 * of rows.
 */
struct k_slots {
    uint32_t n_used, n_slots; /* slots of a row: without and with the shared expert */
    const uint32_t *experts;  /* [T][n_slots] from k_route */
    float *weights;           /* [T][n_slots] from k_route; those of the shared expert are set here */
    /* Out: [T][n_slots] slot of each choice, and [T * n_used] row of each slot. */
    uint32_t *slots, *slot_row;
    uint32_t *first;   /* out: [n_experts + 1] first slot of each expert */
    const float *gate; /* [T] logits: the shared expert's weight is 1 / (1 + exp(-gate)); NULL: 1 */
};
void k_sort_slots(struct kernels *k, const struct k_slots *s, uint32_t n_experts, uint32_t n_rows);

/*
 * y[T][dim] = y + s, with s = sum over i = 0 .. n - 1, ascending, of weights[t][i] * x[rows[t][i]], by fma
 * from 0.
 */
void k_combine(struct kernels *k, const float *x, uint32_t dim, const uint32_t *rows, const float *weights, uint32_t n,
               uint32_t n_rows, float *y);

/* ---------------------------------------------------------------- attention */

/* Consecutive rows of one sequence in the batch, and the pages of its KV. */
struct k_attn_seq {
    uint32_t first_row; /* number of the first row in the batch */
    uint32_t n_rows;    /* >= 1 */
    uint32_t first_pos; /* absolute position of first_row */
    /*
     * Host. Addresses in token order of all pages up to the last row's; pages before a window are not read.
     */
    uint8_t *const *pages;
};

/*
 * Announces the sequences of the attention operations that follow, until the next call or k_step. k_attn.seqs
 * must be this array, unchanged.
 */
void k_put_seqs(struct kernels *k, const struct k_attn_seq *seqs, uint32_t n_seqs, uint32_t page_tokens);

struct k_attn {
    const struct kv_layout *layout;
    uint32_t layer;                     /* within the layout */
    uint32_t first_kv_head, n_kv_heads; /* of the layout's kv heads; other heads are not touched */
    uint32_t n_heads;                   /* query heads; a multiple of n_kv_heads */
    const float *q;                     /* row t at q + t * q_stride: [n_heads][head_dim] */
    /* Row t is at k, v + t * kv_stride: [n_kv_heads][head_dim]. Latent: k has both, v is NULL. */
    const float *k, *v;
    size_t q_stride, kv_stride;
    uint32_t v_dim; /* used numbers of a row of V: head_dim; latent: fewer */
    float *out;     /* [T][n_heads][v_dim] */
    float scale;    /* factor of the scores, usually 1 / sqrt(head_dim) */
    float cap;      /* soft cap of the scaled scores (k_softcap); 0: none */
    /* [n_heads] an additional logit of each head, whose value is 0; NULL: none. */
    const float *sinks;
    uint32_t window;               /* a row at position p sees the last `window` of 0 .. p; 0: all */
    const struct k_attn_seq *seqs; /* host */
    uint32_t n_seqs;
};

/* Writes k and v of every row to its slot in the page, rounded to the layout's dtype (nearest even). */
void k_kv_store(struct kernels *k, const struct k_attn *a);

/*
 * Causal attention over the pages; K and V are read only as stored. A row at position p sees 0 .. p, or the
 * end of that range if there is a window. For each row and head: keys in absolute blocks of 32 positions,
 * ascending from the block of the first key that is seen; scores by a 16-lane strided dot product with a
 * fixed tree; online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022, algorithm 1) with
 * our own exp, from maximum -inf and sum 0, or from the sink's logit and sum 1; V accumulated in order of
 * positions by fma. k_kv_store must be complete before.
 */
void k_attention(struct kernels *k, const struct k_attn *a);

/* -------------------------------------------------------------------- ranks */

/*
 * Ranks: kernels of one backend that compute one model together, each with a thread of its own. No sum is
 * ever split. A rank computes some columns (outputs of a matrix, heads) of all rows, each as it would alone;
 * a gather brings all columns to the operations that need them. So the number of ranks changes no bit.
 * (Rejected: splitting along the inputs, as in Shoeybi et al. 2019; it needs half as many gathers, but adds
 * partial sums.)
 *
 * On the CPU the ranks divide the threads; each has at least one. Rank i uses device config->ordinal + i, or
 * all use config->ordinal if share_device. out[n] is written only on success.
 */
enum { K_MAX_RANKS = 64 };
enum td_status kernels_open_ranks(const struct kernels_config *config, uint32_t n, bool share_device,
                                  struct kernels **out, struct td_error *error_out);
void kernels_close_ranks(struct kernels *const *ranks, uint32_t n); /* NULLs are fine */

/* Ranks that exchange data. A rank may be in several groups. Copies the array, borrows the ranks. */
struct k_group;
struct k_group *k_group_open(struct kernels *const *ranks, uint32_t n);
void k_group_close(struct k_group *g); /* NULL is fine */
/*
 * How the group exchanges: "memory" on the CPU; on devices "nccl", or "copies" if ranks share a device or
 * NCCL is missing.
 */
const char *k_group_transport(const struct k_group *g);

/*
 * Gathers columns: rank `to`, or every rank, gets all[T][first[n]], in which columns first[i] .. first[i + 1]
 * - 1 are rank i's mine[T][first[i + 1] - first[i]]. All ranks of the group call it, with the same first, to
 * and n_rows. `all` is ignored on ranks that receive nothing. mine must stay unchanged until this rank's next
 * gather in the group, or until k_finish of all ranks.
 *
 * Threads: each rank calls it on its own; on the CPU, and where devices copy, the calls wait for each other.
 */
enum { K_EVERY_RANK = K_MAX_RANKS };
void k_gather(struct k_group *g, uint32_t rank, const uint32_t *first, uint32_t to, uint32_t n_rows, const float *mine,
              float *all);
/*
 * A gather of nothing: operations that any rank queued before it come before operations that any rank queues
 * after it. All ranks of the group call it.
 */
void k_barrier(struct k_group *g, uint32_t rank);

/* ----------------------------------------------------------------- sampling */

/*
 * How a token is drawn from a row x of logits. Weights are integers, so their sums do not depend on the order
 * and are the same everywhere:
 *
 *     w_i = exp((x_i - max) / temperature) 2^45, rounded; an id less than 2^-46 times as likely as the best
 *     is never drawn
 *
 * Ids are sorted by falling logit, of equal logits the lower id first. Each limit then keeps a part of what
 * the one before it kept:
 *
 *     top_k      the first top_k ids
 *     top_p      as few of the first ids as together have the share top_p of the weight
 *     min_p      ids whose exp() is at least min_p
 *     typical_p  ids sorted anew by how close their surprise -log(w_i / sum) is to the expected surprise: as
 *                few of the first as together have the share typical_p of the weight (Meister et al. 2022,
 *                section 4)
 *
 * The draw walks the remaining ids in ascending order and takes the id at which the share u of their weight
 * is reached. NaNs are never drawn. If the largest logit is infinite, it is taken.
 */
struct k_draw {
    float temperature; /* 0: takes the largest logit, of equal ones the lowest id */
    uint32_t top_k;    /* 0: no limit */
    float top_p;       /* (0, 1] */
    float min_p;       /* [0, 1] */
    float typical_p;   /* 0 or 1: no limit */
    double u;          /* [0, 1) */
};

struct k_sampled {
    uint32_t id;
    float logit; /* logit of id */
    /*
     * Of the row: 16 lanes and a fixed tree, our own exp and log. Not finite if a logit is NaN or +inf, or
     * all are -inf.
     */
    float logsumexp;
};

/* Draws from each row of logits[T][n], with draws[T]. */
void k_sample_rows(struct kernels *k, const float *logits, uint32_t n, uint32_t n_rows, const struct k_draw *draws,
                   struct k_sampled *out);

/* ------------------------------------------------------------- always on the host */

uint32_t k_argmax(const float *logits, uint32_t n);
float k_logsumexp(const float *logits, uint32_t n);

/*
 * Draws as k_sample_rows does, from one row; best is the id of its largest logit. scratch has
 * k_draw_scratch_bytes(n) bytes, aligned for any type.
 */
uint32_t k_draw(const float *logits, uint32_t n, uint32_t best, const struct k_draw *d, void *scratch);
size_t k_draw_scratch_bytes(uint32_t n);

/*
 * The ids of the m largest logits (or of all, if there are fewer), the largest first, of equal ones the lower
 * id first; never NaNs. Returns their number.
 */
uint32_t k_largest(const float *logits, uint32_t n, uint32_t m, void *scratch, uint32_t *ids_out);

/* Our own exp and log, with the same bits on every backend. exp: |x| <= 87, beyond that 0 or +inf. */
float k_exp(float x);
float k_log(float x);

/* Conversions between number formats, rounded to nearest even; NaN stays NaN. */
void k_convert_to_f32(const void *src, enum num_type type, uint64_t n, float *dst);
void k_convert_from_f32(const float *src, enum num_type type, uint64_t n, void *dst);
