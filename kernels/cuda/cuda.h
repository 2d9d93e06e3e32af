/*
 * What the files of the CUDA backend share. C files own memory, the stream and cuBLAS; .cu files have
 * kernels, and the functions that launch them (extern "C"). Everything runs in one stream, in order.
 *
 * There are two orders of summation. Exact: the order of the plain C version (kernels/cpu/plain.c), with the
 * same source for single numbers (kernels/scalar.h), so results have the CPU's bits. It is compiled without
 * contraction, with IEEE division and square root, and keeps subnormals. Fast: tensor cores, for matrices
 * packed as COMPUTE_BF16, and for norms and attention of a backend that was opened for COMPUTE_BF16. A fast
 * row, too, has one order of sums, whatever else is in the batch.
 */
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/backend.h"

#ifdef __cplusplus
#define CUDA_C extern "C"
#else
#define CUDA_C
#endif

enum { CUDA_MAX_DEVICES = 64 }; /* devices beyond are used without what needs to know other devices */

/*
 * A tensor map: what Hopper's tensor memory accelerator needs to know of a matrix of bf16, encoded by the
 * driver (map.c). It must be at a multiple of 64. A copy is a box: some rows of some slabs, which are 64
 * numbers (128 bytes) of each row; in shared memory slabs lie one after the other.
 */
enum { CUDA_SLAB_NUMBERS = 64 };
struct cuda_map {
    uint64_t words[16];
};

/*
 * [n_out][n_in], row-major, on the device. Packed formats: codes [n_out][stride], bytes, or of int4 two codes
 * in a byte, the first one lower; then scales [n_out][stride / K_GROUP], f32 for fp8, else bf16
 * (kernels/packed.h). A row of codes is a multiple of CUDA_PACKED_ALIGN codes.
 */
enum { CUDA_PACKED_ALIGN = 128 };
struct cuda_matrix {
    enum compute compute;
    enum k_weights weights;
    /* Of elements, or of the numbers that codes stand for. NUM_BF16 with COMPUTE_BF16. */
    enum num_type type;
    uint32_t n_out, n_in;
    /*
     * Elements between rows: n_in rounded up to 8 (rows begin at 16 bytes), to CUDA_SLAB_NUMBERS if there are
     * maps; codes: to CUDA_PACKED_ALIGN. What is behind n_in is zero.
     */
    uint32_t stride;
    void *data;
    float *bias; /* [n_out], or NULL */
    uint64_t len_bytes;
    struct cuda_map *maps; /* [cuda_hopper_shapes()] on the host; NULL: not for Hopper's own products */
};

/* A stack of n matrices of the same shape; its arrays are on the device. */
struct cuda_stack {
    const struct cuda_matrix *shape; /* the first one */
    const void *const *data;
    const float *const *bias;    /* NULL: no matrix has a bias */
    const struct cuda_map *maps; /* [cuda_hopper_shapes()][n]; NULL: the matrices have no maps */
    uint32_t n;
};

/* A product y = x W^T (+ bias) (+ y). Rows of x are x_stride floats apart; likewise y. */
struct cuda_product {
    const void *x; /* floats; fast: bf16, with x_stride in elements */
    float *y;
    size_t x_stride, y_stride;
    uint32_t n_rows;
    bool accumulate;
};

/* A sequence of the batch, on the device. pages: index of its first address in cuda_batch.pages. */
struct cuda_seq {
    uint32_t first_row, n_rows, first_pos, pages;
};

/* The result of k_put_seqs: sizes for launches, and arrays on the device. */
struct cuda_batch {
    const struct k_attn_seq *host; /* the caller's array, to recognise it in k_attn */
    uint32_t n_seqs;
    uint32_t n_rows;   /* of all sequences */
    uint32_t max_rows; /* of one sequence */
    uint32_t max_end;  /* end of the longest sequence: first_pos + n_rows */
    /*
     * 0, or: every sequence has one row, and none has more than this many runs of CUDA_SPLIT positions. If a
     * sequence has two runs or more, it is rounded up to a power of two, so that launches repeat.
     */
    uint32_t single_runs;
    const struct cuda_seq *seqs;
    uint8_t *const *pages;
    const uint32_t *row_seq; /* [n_rows] the sequence of each row */
};

/* ------------------------------------------------------------ launches: linear.cu */
/* Allows the kernels the shared memory that they need. Once for each device. */
CUDA_C cudaError_t cuda_linear_open(void);
CUDA_C void cuda_linear_exact(cudaStream_t stream, const struct cuda_matrix *w, const struct cuda_product *p);
/* Our own product by tensor cores, in one order of summation for any number of rows. */
CUDA_C void cuda_linear_fast(cudaStream_t stream, const struct cuda_matrix *w, const struct cuda_product *p);
/* Matrix i of the stack: x + i * x_step, y + i * y_step. exact: COMPUTE_F32 only; fast: COMPUTE_BF16. */
CUDA_C void cuda_each_exact(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                            size_t x_step, size_t y_step);
CUDA_C void cuda_each_fast(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p, size_t x_step,
                           size_t y_step);
/*
 * Rows first[i] .. first[i + 1] - 1 go through matrix i. first is on the device; p->n_rows counts all rows.
 */
CUDA_C void cuda_sorted_exact(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                              const uint32_t *first);
CUDA_C void cuda_sorted_fast(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                             const uint32_t *first);
/* -------------------------------------------------------- launches: linear_packed.cu */
/* Matrices in packed formats with COMPUTE_BF16. Exact products with them are above. */
CUDA_C cudaError_t cuda_packed_open(void);
CUDA_C void cuda_packed_fast(cudaStream_t stream, const struct cuda_matrix *w, const struct cuda_product *p);
CUDA_C void cuda_packed_each_fast(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                                  size_t x_step, size_t y_step);
CUDA_C void cuda_packed_sorted_fast(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                                    const uint32_t *first);
/* to[n_out][stride]: the numbers of the matrix as bf16. */
CUDA_C void cuda_widen(cudaStream_t stream, const struct cuda_matrix *w, void *to);

/* ------------------------------------------------------------ launches: linear.cu */
/* y[n_rows][n] += bias[n] */
CUDA_C void cuda_add_bias(cudaStream_t stream, const float *bias, uint32_t n, uint32_t n_rows, float *y,
                          size_t y_stride);
/*
 * Rounds n numbers of each part of a row to bf16: to[n_rows][n_parts][to_stride], padded with zeros. Parts
 * are x_step apart; to_stride is even.
 */
CUDA_C void cuda_round_rows(cudaStream_t stream, const float *x, size_t x_stride, size_t x_step, uint32_t n_parts,
                            uint32_t n, uint32_t n_rows, void *to, size_t to_stride);

/* ----------------------------------------------------- launches: linear_hopper.cu */
/*
 * *has_out: the device is Hopper and the image of the kernels for it runs. Also allows them shared memory.
 * Once for each device.
 */
CUDA_C cudaError_t cuda_linear_hopper_open(bool *has_out);
CUDA_C bool cuda_launches_overlap(void); /* whether launch_next() overlaps on the current device */

/* The tile of a shape: outputs by rows, with as many slabs at a time. Maps of weights have boxes of outs. */
struct cuda_tile {
    uint32_t outs, rows, slabs;
};
CUDA_C uint32_t cuda_hopper_shapes(void); /* the number of shapes */
CUDA_C struct cuda_tile cuda_hopper_tile(uint32_t shape);
/* The shape for n_rows rows through each of n matrices; is_sorted: all rows together. */
CUDA_C uint32_t cuda_hopper_choose(const struct cuda_matrix *w, uint32_t n, uint32_t n_rows, bool is_sorted);

/*
 * Fast products with tiles of a shape. x: a map of p's rows with the shape's boxes: parts are the matrices of
 * the stack (one for sorted rows, or without a stack).
 */
CUDA_C void cuda_linear_hopper(cudaStream_t stream, const struct cuda_matrix *w, const struct cuda_product *p,
                               uint32_t shape, const struct cuda_map *x);
CUDA_C void cuda_each_hopper(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                             uint32_t shape, const struct cuda_map *x, size_t y_step);
CUDA_C void cuda_sorted_hopper(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                               uint32_t shape, const struct cuda_map *x, const uint32_t *first);

/* -------------------------------------------------------------- launches: rows.cu */
CUDA_C void cuda_take_rows(cudaStream_t stream, const void *table, enum num_type type, uint32_t dim,
                           const uint32_t *ids, uint32_t n_rows, float scale, float *out);
/*
 * As k_head_norm, for n_heads heads of dim numbers in a row. y may be x with the same strides. fast: any
 * order of the sum. rounded, here and below: NULL, or where the rows are written as bf16, too, one behind the
 * other (their length is a multiple of four then; here n_heads is 1).
 */
CUDA_C void cuda_norm(cudaStream_t stream, const float *x, float *y, size_t row_stride, uint32_t n_heads,
                      size_t head_stride, const float *w, float eps, uint32_t n_rows, uint32_t dim, bool fast,
                      void *rounded);
CUDA_C void cuda_add(cudaStream_t stream, const float *x, size_t n, float *y);
CUDA_C void cuda_copy_heads(cudaStream_t stream, const struct k_each *e, uint32_t n_heads, uint32_t dim,
                            uint32_t n_rows);
CUDA_C void cuda_glu(cudaStream_t stream, const float *gate_up, uint32_t n_rows, uint32_t dim, const struct k_glu *glu,
                     float *out, void *rounded);
CUDA_C void cuda_softcap(cudaStream_t stream, float *x, size_t n, float cap);
CUDA_C void cuda_rope(cudaStream_t stream, float *x, size_t row_stride, uint32_t n_heads, size_t head_stride,
                      const struct k_rotary *r, const uint32_t *table_rows, uint32_t n_rows);
CUDA_C void cuda_route(cudaStream_t stream, const struct k_router *r, const float *logits, uint32_t n_rows,
                       uint32_t stride, uint32_t *experts, float *weights);
CUDA_C void cuda_sort_slots(cudaStream_t stream, const struct k_slots *s, uint32_t n_experts, uint32_t n_rows);
CUDA_C void cuda_combine(cudaStream_t stream, const float *x, uint32_t dim, const uint32_t *rows, const float *weights,
                         uint32_t n, uint32_t n_rows, float *y);

/* --------------------------------------------------------- launches: attention.cu */
CUDA_C void cuda_kv_store(cudaStream_t stream, const struct k_attn *a, const struct cuda_batch *b);
CUDA_C void cuda_attention_exact(cudaStream_t stream, const struct k_attn *a, const struct cuda_batch *b);
/*
 * Attention by tensor cores: pages of bf16 or e4m3, head_dim 64, 96, 128 or 256, or latents of 576. Keys
 * are cut into absolute runs of CUDA_SPLIT positions. Each run is a sum of its own, and runs are merged in
 * ascending order. Long sequences with few rows spread their runs over the device; with many rows runs are
 * computed one after another; the bits are the same (Dao et al. 2023, Flash-Decoding; merged as in Milakov
 * and Gimelshein 2018). is_hopper: use Hopper's own instructions if they have the shape (head_dim 64 or
 * 128).
 */
enum { CUDA_SPLIT = 512 };
CUDA_C bool cuda_attention_fits(const struct k_attn *a); /* whether the fast form has this shape */
CUDA_C size_t cuda_attention_scratch(const struct k_attn *a, const struct cuda_batch *b,
                                     bool is_hopper); /* bytes of scratch; 0: none */
CUDA_C void cuda_attention_fast(cudaStream_t stream, const struct k_attn *a, const struct cuda_batch *b, bool is_hopper,
                                void *scratch, void *rounded);

/* ---------------------------------------------------------- launches: sampling.cu */
CUDA_C void cuda_sample_rows(cudaStream_t stream, const float *logits, uint32_t n, uint32_t n_rows,
                             const struct k_draw *draws, struct k_sampled *out);

/* ------------------------------------------------------------ launches: limits.cu */
/* Reads all bytes. `to` is for a sum that is never stored. */
CUDA_C void cuda_read_all(cudaStream_t stream, const void *from, size_t len_bytes, void *to);
CUDA_C double cuda_multiply_add(cudaStream_t stream, void *to); /* returns the number of operations */
