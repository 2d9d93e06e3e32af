/* The opened backend: what the files that spread operations over the pool share. */
#pragma once

#include "kernels/backend.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/pool.h"

enum { PIECE_NUMBERS = 16384 }; /* elementwise work that is worth a claim */

struct cpu_kernels {
    struct kernels head;
    const struct cpu_ops *ops;
    struct thread_pool *pool;
    void *scratch; /* grows to the largest need of any operation */
    size_t scratch_bytes;
};

/*
 * Scratch memory of the running operation, valid until its next call or its end. An operation can't fail, so
 * the process ends if the system has no memory.
 */
void *kernels_scratch(struct cpu_kernels *k, size_t len_bytes);

static inline struct cpu_kernels *cpu_of(struct kernels *k)
{
    return (struct cpu_kernels *)k;
}

static inline uint32_t cpu_argmax(const struct cpu_ops *ops, const float *x, uint32_t n)
{
    float max = ops->max(x, n);
    for (uint32_t i = 0; i < n; i++)
        if (x[i] == max)
            return i;
    return 0;
}

/* limits.c */
double cpu_run_limit(struct kernels *k, enum kernels_limit limit, void *memory, size_t len_bytes);

/* rows.c: operations of backend.h */
void cpu_take_rows(struct kernels *k, const void *table, enum num_type type, uint32_t dim, const uint32_t *ids,
                   uint32_t n_rows, float scale, float *out);
void cpu_rmsnorm(struct kernels *k, const float *x, const float *w, float eps, uint32_t n_rows, uint32_t dim, float *y);
void cpu_head_norm(struct kernels *k, float *x, size_t row_stride, uint32_t n_heads, size_t head_stride, const float *w,
                   float eps, uint32_t n_rows, uint32_t dim);
void cpu_glu(struct kernels *k, const float *gate_up, uint32_t n_rows, uint32_t dim, const struct k_glu *glu,
             float *out);
void cpu_add(struct kernels *k, const float *x, size_t n, float *y);
void cpu_softcap(struct kernels *k, float *x, size_t n, float cap);
void cpu_copy_heads(struct kernels *k, const struct k_each *e, uint32_t n_heads, uint32_t dim, uint32_t n_rows);
void cpu_rope(struct kernels *k, float *x, size_t row_stride, uint32_t n_heads, size_t head_stride,
              const struct k_rotary *r, const uint32_t *table_rows, uint32_t n_rows);
void cpu_route(struct kernels *k, const struct k_router *r, const float *logits, uint32_t n_rows, uint32_t stride,
               uint32_t *experts_out, float *weights_out);
void cpu_sort_slots(struct kernels *k, const struct k_slots *s, uint32_t n_experts, uint32_t n_rows);
void cpu_combine(struct kernels *k, const float *x, uint32_t dim, const uint32_t *rows, const float *weights,
                 uint32_t n, uint32_t n_rows, float *y);

/* draw.c */
void cpu_sample_rows(struct kernels *k, const float *logits, uint32_t n, uint32_t n_rows, const struct k_draw *draws,
                     struct k_sampled *out);
