/*
 * What the files of the CUDA backend share. C files own memory, the stream and cuBLAS; .cu files hold kernels and the functions that
 * launch them (extern "C"). Everything runs in one stream, in order.
 *
 * Two orders of summation. Exact: the plain C version's (kernels/cpu/plain.c), by the same source for single numbers
 * (kernels/scalar.h), so results are the CPU's bits; compiled without contraction, with IEEE division and square root, subnormals
 * kept. Fast: tensor cores, taken for matrices packed as COMPUTE_BF16, and by norms and attention of a backend that was opened for
 * COMPUTE_BF16. A fast row, too, is summed in an order of its own, whatever else is in the batch.
 */
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/backend.h"

#ifdef __cplusplus
#define CUDA_C extern "C"
#else
#define CUDA_C
#endif

/*
 * What Hopper's tensor memory accelerator knows of a matrix of bf16, as the driver encodes it (map.c); used from an address that is a
 * multiple of 64. Copies are boxes of rows by numbers.
 */
enum { CUDA_BOX_ROWS = 32, CUDA_BOX_NUMBERS = 64 };
struct cuda_map {
    uint64_t words[16];
};

/*
 * [n_out][n_in] row-major, on the device. In fewer bits: codes [n_out][stride], bytes or of int4 two in one, the first lower; then
 * scales [n_out][stride / K_GROUP], f32 for fp8, else bf16 (kernels/packed.h).
 */
enum { CUDA_PACKED_ALIGN = 128 }; /* codes; a row has whole runs of so many */
struct cuda_matrix {
    enum compute compute;
    enum k_weights weights;
    enum num_type type; /* of elements, or of what codes stand for; NUM_BF16 with COMPUTE_BF16 */
    uint32_t n_out, n_in;
    uint32_t stride; /* elements between rows: n_in rounded up to 8, so that rows begin at 16 bytes (codes: to
                        CUDA_PACKED_ALIGN); the rest is zero */
    void *data;
    float *bias; /* [n_out], or NULL */
    uint64_t len_bytes;
    struct cuda_map map; /* COMPUTE_BF16 on Hopper */
};

/* Of n matrices alike: arrays on the device. */
struct cuda_stack {
    const struct cuda_matrix *shape; /* the first one */
    const void *const *data;
    const float *const *bias;    /* NULL: none has one */
    const struct cuda_map *maps; /* NULL: their map is not set */
    uint32_t n;
};

/* A product y = x W^T (+ bias) (+ y); x rows x_stride apart, in floats, y likewise. */
struct cuda_product {
    const void *x; /* float; fast: bf16, with x_stride in elements */
    float *y;
    size_t x_stride, y_stride;
    uint32_t n_rows;
    bool accumulate;
};

/* A sequence of the batch on the device; pages: where its addresses begin in cuda_batch.pages. */
struct cuda_seq {
    uint32_t first_row, n_rows, first_pos, pages;
};

/* What k_put_seqs left: sizes for launches on the host, arrays on the device. */
struct cuda_batch {
    const struct k_attn_seq *host; /* the caller's, to be recognised */
    uint32_t n_seqs;
    uint32_t n_rows;   /* of all */
    uint32_t max_rows; /* of one sequence */
    uint32_t max_end;  /* positions of the longest: first_pos + n_rows */
    /* 0, or every sequence has one row, and all runs of CUDA_SPLIT positions are so many at most: a power of two if any has two, so that launches repeat */
    uint32_t single_runs;
    const struct cuda_seq *seqs;
    uint8_t *const *pages;
    const uint32_t *row_seq; /* [n_rows] which sequence a row is of */
};

/* ------------------------------------------------------------ launches: linear.cu */
/* Lets the kernels have as much shared memory as they want; once for a device. */
CUDA_C cudaError_t cuda_linear_open(void);
CUDA_C void cuda_linear_exact(cudaStream_t stream, const struct cuda_matrix *w, const struct cuda_product *p);
/* Own tensor-core product in one order of summation for any number of rows. */
CUDA_C void cuda_linear_fast(cudaStream_t stream, const struct cuda_matrix *w, const struct cuda_product *p);
/* Matrix i of the stack: x + i * x_step, y + i * y_step. COMPUTE_F32 only in exact, COMPUTE_BF16 only in fast. */
CUDA_C void cuda_each_exact(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                            size_t x_step, size_t y_step);
CUDA_C void cuda_each_fast(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p, size_t x_step,
                           size_t y_step);
/* Rows first[i] .. first[i + 1) go with matrix i; first is on the device, p->n_rows is all of them. */
CUDA_C void cuda_sorted_exact(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                              const uint32_t *first);
CUDA_C void cuda_sorted_fast(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                             const uint32_t *first);
/* -------------------------------------------------------- launches: linear_packed.cu */
/* Of matrices in fewer bits, COMPUTE_BF16; exact ones are above. */
CUDA_C cudaError_t cuda_packed_open(void);
CUDA_C void cuda_packed_fast(cudaStream_t stream, const struct cuda_matrix *w, const struct cuda_product *p);
CUDA_C void cuda_packed_each_fast(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                                  size_t x_step, size_t y_step);
CUDA_C void cuda_packed_sorted_fast(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                                    const uint32_t *first);
/* to[n_out][stride]: its numbers, bf16 */
CUDA_C void cuda_widen(cudaStream_t stream, const struct cuda_matrix *w, void *to);

/* ------------------------------------------------------------ launches: linear.cu */
/* y[n_rows][n] += bias[n] */
CUDA_C void cuda_add_bias(cudaStream_t stream, const float *bias, uint32_t n, uint32_t n_rows, float *y,
                          size_t y_stride);
/* to[n_rows][n_parts][to_stride] = n numbers of each part of a row, parts x_step apart, as bf16, zeros after them; to_stride is even. */
CUDA_C void cuda_round_rows(cudaStream_t stream, const float *x, size_t x_stride, size_t x_step, uint32_t n_parts,
                            uint32_t n, uint32_t n_rows, void *to, size_t to_stride);

/* ----------------------------------------------------- launches: linear_hopper.cu */
/* Whether the device runs them: it is Hopper and has its own image of the kernels. Once for a device; lets them have shared memory. */
CUDA_C cudaError_t cuda_linear_hopper_open(bool *has_out);
/* The fast products, of rows that a map describes: numbers, matrices of the stack (sorted rows, or no stack: one), rows. */
CUDA_C void cuda_linear_hopper(cudaStream_t stream, const struct cuda_matrix *w, const struct cuda_product *p,
                               const struct cuda_map *x);
CUDA_C void cuda_each_hopper(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                             const struct cuda_map *x, size_t y_step);
CUDA_C void cuda_sorted_hopper(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                               const struct cuda_map *x, const uint32_t *first);

/* -------------------------------------------------------------- launches: rows.cu */
CUDA_C void cuda_embed(cudaStream_t stream, const void *table, enum num_type type, uint32_t dim, const uint32_t *ids,
                       uint32_t n_rows, float scale, float *out);
/* n_heads heads of dim a row, as k_head_norm; y may be x, with the same strides. fast: any order of the sum. */
CUDA_C void cuda_norm(cudaStream_t stream, const float *x, float *y, size_t row_stride, uint32_t n_heads,
                      size_t head_stride, const float *w, float eps, uint32_t n_rows, uint32_t dim, bool fast);
CUDA_C void cuda_add(cudaStream_t stream, const float *x, size_t n, float *y);
CUDA_C void cuda_copy_heads(cudaStream_t stream, const struct k_each *e, uint32_t n_heads, uint32_t dim,
                            uint32_t n_rows);
CUDA_C void cuda_glu(cudaStream_t stream, const float *gate_up, uint32_t n_rows, uint32_t dim, const struct k_glu *glu,
                     float *out);
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
 * Tensor cores, pages of bf16 or e4m3, head_dim 64 or 128 or 256. Keys in absolute runs of CUDA_SPLIT positions, each a sum of its own, merged in
 * ascending order: long sequences with few rows spread their runs over the device, many rows take them one after the other, and the
 * bits are the same (Dao et al. 2023, Flash-Decoding; the merge as in Milakov and Gimelshein 2018). is_hopper: by Hopper's own
 * instructions where they have the shape, head_dim 64 or 128.
 */
enum { CUDA_SPLIT = 512 };
CUDA_C bool cuda_attention_fits(const struct k_attn *a); /* fast has this shape */
CUDA_C size_t cuda_attention_scratch(const struct k_attn *a, const struct cuda_batch *b,
                                     bool is_hopper); /* bytes; 0: none */
CUDA_C void cuda_attention_fast(cudaStream_t stream, const struct k_attn *a, const struct cuda_batch *b, bool is_hopper,
                                void *scratch);

/* ---------------------------------------------------------- launches: sampling.cu */
CUDA_C void cuda_sample_rows(cudaStream_t stream, const float *logits, uint32_t n, uint32_t n_rows,
                             const struct k_draw *draws, struct k_sampled *out);

/* ------------------------------------------------------------ launches: limits.cu */
/* Reads all; to is for a sum that is never stored. */
CUDA_C void cuda_read_all(cudaStream_t stream, const void *from, size_t len_bytes, void *to);
CUDA_C double cuda_multiply_add(cudaStream_t stream, void *to); /* returns how many operations it does */
