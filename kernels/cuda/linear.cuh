/*
 * Products with weight matrices: the arguments of launches in linear.cu, linear_packed.cu and
 * linear_hopper.cu, and how a sum becomes an output.
 */
#pragma once

#include "kernels/cuda/cuda.h"

/* One launch: products with one matrix, or with each matrix of a stack. */
struct linear_job {
    struct cuda_product p;
    const void *data; /* numbers of the only matrix */
    const float *bias;
    const void *const *datas; /* numbers of each matrix of a stack; NULL: one matrix */
    const float *const *biases;
    const uint32_t *first; /* sorted rows; NULL: every matrix has all rows */
    size_t x_step, y_step; /* distance between the rows of one matrix and of the next */
    uint32_t n_matrices;
    uint32_t n_out, n_in, stride;
    enum num_type type;
    enum k_weights weights;
};

/* The tile of a CTA. */
struct tile {
    uint32_t matrix;
    uint32_t row0, n_rows; /* n_rows: at most the height of a tile */
    uint32_t out0;
};

/* Where the sums of a tile go; row and out count from the tile's first. */
struct target {
    float *y;
    const float *bias;
    size_t y_stride;
    uint32_t n_rows, n_outs;
    bool accumulate;
};

static __device__ inline struct target target_of(const struct linear_job &job, const struct tile &t)
{
    const float *bias = job.biases ? job.biases[t.matrix] : job.bias;
    struct target to = {job.p.y + t.matrix * job.y_step + t.row0 * job.p.y_stride + t.out0,
                        bias ? bias + t.out0 : NULL,
                        job.p.y_stride,
                        t.n_rows,
                        job.n_out - t.out0,
                        job.p.accumulate};
    return to;
}

/* The new value of y. before: its present value, read only if sums are accumulated. */
static __device__ __forceinline__ float finished(const struct target &to, float sum, float bias, float before)
{
    if (to.bias)
        sum = sum + bias;
    return to.accumulate ? before + sum : sum;
}

/* ---------------------------------------------------------------- launches */

static __host__ __device__ __forceinline__ uint32_t tiles(uint32_t n, uint32_t size)
{
    return (n + size - 1) / size;
}

static inline struct linear_job job_of(const struct cuda_matrix *w, const struct cuda_product *p)
{
    struct linear_job job = {};
    job.p = *p;
    job.data = w->data;
    job.bias = w->bias;
    job.n_matrices = 1;
    job.n_out = w->n_out;
    job.n_in = w->n_in;
    job.stride = w->stride;
    job.type = w->type;
    job.weights = w->weights;
    return job;
}

static inline struct linear_job stack_job_of(const struct cuda_stack *s, const struct cuda_product *p)
{
    struct linear_job job = job_of(s->shape, p);
    job.datas = s->data;
    job.biases = s->bias;
    job.bias = NULL;
    job.n_matrices = s->n;
    return job;
}

static inline struct linear_job each_job_of(const struct cuda_stack *s, const struct cuda_product *p, size_t x_step,
                                            size_t y_step)
{
    struct linear_job job = stack_job_of(s, p);
    job.x_step = x_step;
    job.y_step = y_step;
    return job;
}

static inline struct linear_job sorted_job_of(const struct cuda_stack *s, const struct cuda_product *p,
                                              const uint32_t *first)
{
    struct linear_job job = stack_job_of(s, p);
    job.first = first;
    return job;
}
