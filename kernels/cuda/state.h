/*
 * An opened CUDA backend: what its C files share.
 *
 *     memory.c      memory of the device, and copies between it and the host
 *     matrix.c      weights
 *     map.c         tensor maps, for Hopper's copies of matrices
 *     product.c     products
 *     collective.c  exchange between ranks
 *     replay.c      steps that repeat
 *     limits.c      limits of the device
 *     backend.c     opening, and the table of operations
 *
 * The driver keeps the current device for each thread. So every operation begins with cuda_enter(), which
 * sets the device if another thread opened the backend.
 */
#pragma once

#include <cublasLt.h>
#include <cudaTypedefs.h>
#include <stddef.h>

#include "kernels/cpu/pool.h"
#include "kernels/cuda/cuda.h"

enum {
    CUDA_CACHE_LINE = 128, /* allocations in an arena begin at multiples of it */
    CUDA_READS_BYTES = 8 << 20,
};

/* Pinned host memory and as much device memory, filled from the beginning on. */
struct cuda_arena {
    uint8_t *host, *device;
    size_t used, capacity;
    size_t sent;      /* bytes of used that were copied */
    cudaEvent_t over; /* its operations are complete */
    /* [n_retired][host, device]: too small for a step; freed when the arena is used again. */
    void **retired;
    uint32_t n_retired;
};

/* Two pinned buffers: the host fills one while the copies of the other one run. */
struct cuda_staging {
    uint8_t *host[2];
    cudaEvent_t sent[2];
    uint32_t turn;
    size_t used; /* bytes of the current buffer */
};

/* Copies to memory that is not pinned: they are in a pinned buffer until k_finish. */
struct cuda_reads {
    uint8_t *host;
    size_t used;
    struct cuda_read {
        void *to;
        const uint8_t *from;
        size_t len_bytes;
    } * pending;
    uint32_t n_pending;
};

/* Asynchronous reads (k_read_aside). */
struct cuda_aside {
    cudaStream_t stream;
    cudaEvent_t queued; /* after the operations before the first read since the last mark */
    cudaEvent_t marks[K_MAX_MARKS];
    uint32_t n_marks; /* since the last k_finish */
    bool has_begun;   /* there was a read since the last mark */
    /* A read went through cuda_reads, because its target is not pinned: marks don't cover it. */
    bool is_behind;
};

/* Asynchronous writes (k_write_pieces_aside). Mark n has event n % K_MAX_MARKS. */
struct cuda_writes {
    cudaStream_t stream;
    cudaEvent_t queued; /* after the operations before the first write since the last mark */
    cudaEvent_t marks[K_MAX_MARKS];
    uint64_t n_marks, n_passed;
    bool has_begun; /* there was a write since the last mark */
};

/* Memory of the device that grows to the largest need of any operation. */
struct cuda_room {
    void *at;
    size_t len_bytes;
};

/* One k_map. */
struct cuda_mapping {
    void *device;
    void *host; /* pinned; NULL: it could not be pinned */
};

/*
 * Rows that an operation has also written rounded to bf16, which saves the product that reads them next a
 * pass over them. They are for the next operation alone, since any other may change the rows.
 */
struct cuda_rounded {
    const float *rows; /* [n_rows][n]; NULL: none */
    uint32_t n_rows, n;
};

struct cuda_graph; /* replay.c: the operations of a step */
struct cuda_plan;  /* product.c: an algorithm of cuBLAS */

struct cuda {
    struct kernels base;
    struct thread_pool *loaders; /* threads that fill pinned buffers and convert weights */
    int ordinal;
    enum compute compute;
    char isa[16];
    cudaStream_t stream;

    struct cuda_staging staging;
    struct cuda_reads reads;
    struct cuda_aside aside;
    struct cuda_writes writes;
    struct cuda_arena arenas[2]; /* one for this step, one for the step before */
    uint32_t arena;
    bool is_idle; /* everything was complete at the last k_finish, and nothing was put since */
    struct cuda_batch batch;
    struct cuda_mapping *mappings;
    uint32_t n_mappings;
    struct cuda_room scratch;
    struct cuda_room rounded;
    struct cuda_rounded rounded_before, rounded_now; /* by the operation before this one, and by this one */

    struct cuda_graph *graphs; /* [n_graphs] */
    uint32_t n_graphs, capturing;
    uint64_t n_replays;

    bool is_hopper; /* uses Hopper's own instructions for products and attention */
    PFN_cuTensorMapEncodeTiled_v12000 encode_map;

    cudaEvent_t offers[2];       /* offer i is queued: other ranks may read it after this event */
    bool sees[CUDA_MAX_DEVICES]; /* devices whose memory operations can read in place */

    bool any_order;
    cublasLtHandle_t blas; /* NULL: not needed so far */
    void *workspace;
    struct cuda_plan *plans;
    uint32_t n_plans;
};

struct k_matrix {
    struct cuda_matrix on;
    bool is_in_stack; /* its numbers are a part of the stack's allocation */
};

struct k_stack {
    struct cuda_stack on;
    struct k_matrix **matrices; /* [n] matrices of the stack */
    void *joined;               /* their numbers; NULL: each has an allocation of its own */
};

/* Ends the process with the runtime's message, unless error is cudaSuccess. */
void cuda_must(cudaError_t error, const char *operation);
#define CUDA_MUST(call) cuda_must(call, __func__)
_Noreturn void cuda_die(const char *operation, const char *why);

/*
 * cuda_enter() begins every operation: selects the device, copies what was put, and keeps what the operation
 * before has rounded for this one alone. cuda_select() only selects the device.
 */
struct cuda *cuda_enter(struct kernels *k);
struct cuda *cuda_select(struct kernels *k);

/* ---------------------------------------------------------------- memory.c */

enum td_status cuda_memory_open(struct cuda *c, struct td_error *error_out);
void cuda_memory_close(struct cuda *c);

/*
 * Scratch memory for the next queued operation, valid until the next call. Waits for the device if it has to
 * grow.
 */
void *cuda_scratch(struct cuda *c, size_t len_bytes);
/*
 * Where an operation that writes rows[n_rows][n] writes them rounded to bf16, as [n_rows][n]. NULL: products
 * could not use them. Waits for the device if the memory has to grow.
 */
void *cuda_round_too(struct cuda *c, const float *rows, uint32_t n_rows, size_t n);

bool cuda_memory(struct kernels *k, uint64_t *free_out, uint64_t *total_out);
enum td_status cuda_alloc(struct kernels *k, size_t len_bytes, void **out);
void cuda_free(struct kernels *k, void *p);
enum td_status cuda_map(struct kernels *k, const void *host, size_t len_bytes, size_t part_bytes, void **out);
bool cuda_is_pinned(const struct kernels *k, const void *mapped);
void cuda_unmap(struct kernels *k, void *mapped);
void cuda_send_puts(struct cuda *c);
const void *cuda_put(struct kernels *k, const void *host, size_t len_bytes);
void cuda_step(struct kernels *k);
void cuda_write(struct kernels *k, void *to, const void *host, size_t len_bytes);
void cuda_write_pieces(struct kernels *k, void *to, const void *host, const struct k_pieces *p);
void cuda_read(struct kernels *k, void *host, const void *from, size_t len_bytes);
void cuda_finish(struct kernels *k);
void cuda_read_aside(struct kernels *k, void *host, const void *from, const struct k_pieces *p);
uint32_t cuda_mark(struct kernels *k);
bool cuda_passed(struct kernels *k, uint32_t mark);
void cuda_wait(struct kernels *k, uint32_t mark);
void cuda_write_aside(struct kernels *k, void *to, const void *host, const struct k_pieces *p);
uint64_t cuda_write_mark(struct kernels *k);
bool cuda_written(struct kernels *k, uint64_t mark);
void cuda_write_wait(struct kernels *k, uint64_t mark);
void cuda_put_seqs(struct kernels *k, const struct k_attn_seq *seqs, uint32_t n_seqs, uint32_t page_tokens);

/* ---------------------------------------------------------------- replay.c */

uint32_t cuda_replay_rows(struct kernels *k, uint32_t n_rows);
bool cuda_replay(struct kernels *k, uint64_t shape);
void cuda_replay_end(struct kernels *k);
void cuda_replay_forget(struct cuda *c); /* forgets recorded steps, because memory that they use is freed */

/* ---------------------------------------------------------------- matrix.c */

enum td_status cuda_matrix_pack(struct kernels *k, const struct k_matrix_part *parts, uint32_t n_parts,
                                const struct matrix_shape *shape, struct k_matrix **out);
void cuda_matrix_free(struct kernels *k, struct k_matrix *m);
uint64_t cuda_matrix_bytes(const struct k_matrix *m);
enum td_status cuda_stack_open(struct kernels *k, struct k_matrix *const *matrices, uint32_t n, struct k_stack **out);
void cuda_stack_close(struct kernels *k, struct k_stack *s);
uint64_t cuda_stack_bytes(const struct k_stack *s);

/* ------------------------------------------------------------------- map.c */

/* False: the driver has no tensor maps. */
bool cuda_map_open(struct cuda *c);
/*
 * Rows of n_parts * stride numbers (bf16; stride is a multiple of CUDA_SLAB_NUMBERS), row_stride numbers
 * apart.
 */
struct cuda_mapped {
    const void *data;
    uint32_t stride, n_parts, n_rows;
    size_t row_stride;
};
/* Makes their map, with boxes of at most 256 rows by some slabs. */
void cuda_map_rows(struct cuda *c, const struct cuda_mapped *m, uint32_t box_rows, uint32_t box_slabs,
                   struct cuda_map *out);

/* --------------------------------------------------------------- product.c */

enum td_status cuda_product_open(struct cuda *c, struct td_error *error_out);
void cuda_product_close(struct cuda *c);
/*
 * By cuBLAS, in any order of sums; rows of x and W are `stride` apart. False if cuBLAS has no algorithm for
 * it.
 */
bool cuda_product_blas(struct cuda *c, const struct cuda_matrix *m, const struct cuda_product *p);
void cuda_linear(struct kernels *k, const struct k_matrix *w, const float *x, uint32_t n_rows, float *y,
                 bool accumulate);
void cuda_linear_each(struct kernels *k, const struct k_stack *s, const struct k_each *e, uint32_t n_rows);
void cuda_linear_sorted(struct kernels *k, const struct k_stack *s, const uint32_t *first, uint32_t n_rows,
                        const float *x, float *y);

/* ------------------------------------------------------------ collective.c */

void cuda_collective_open(struct cuda *c);
void cuda_collective_close(struct cuda *c);
void cuda_offer(struct kernels *k, uint32_t turn);
void cuda_follow(struct kernels *k, struct kernels *peer, uint32_t turn);
const float *cuda_reach(struct kernels *k, struct kernels *peer, const float *from, size_t len_bytes);
struct k_links *cuda_links_open(struct kernels *const *ranks, uint32_t n);
void cuda_links_close(struct k_links *l);
void cuda_links_gather(struct k_links *l, uint32_t rank, const uint32_t *first, uint32_t to, uint32_t n_rows,
                       const float *mine, float *all);

/* ----------------------------------------------------------------- trace.c */

enum td_status cuda_trace_begin(struct kernels *k, struct td_error *error_out);
struct k_trace_event *cuda_trace_end(struct kernels *k, uint32_t *n_out);

/* ---------------------------------------------------------------- limits.c */

double cuda_run_limit(struct kernels *k, enum kernels_limit limit, void *memory, size_t len_bytes);
