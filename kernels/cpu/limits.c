/*
 * Limits of this CPU (bench/kernels_bench.h): pieces of memory or arithmetic, claimed from the pool like
 * those of an operation.
 */
#include <stdatomic.h>
#include <string.h>

#include "kernels/cpu/state.h"

enum { READ_PIECE = 1 << 20, PEAK_PIECES = 64 };

struct limit_run {
    const struct cpu_ops *ops;
    double (*peak)(void);
    _Atomic double ops_done; /* by each piece; all pieces do the same */
    uint8_t *memory;
    size_t len_bytes; /* of one half */
};

static uint32_t piece_bytes(const struct limit_run *r, uint32_t piece)
{
    size_t left = r->len_bytes - (size_t)piece * READ_PIECE;
    return left < READ_PIECE ? (uint32_t)left : READ_PIECE;
}

static void read_piece(void *arg, uint32_t piece, uint32_t thread)
{
    (void)thread;
    const struct limit_run *r = arg;
    r->ops->read_stream(r->memory + (size_t)piece * READ_PIECE, piece_bytes(r, piece));
}

static void copy_piece(void *arg, uint32_t piece, uint32_t thread)
{
    (void)thread;
    const struct limit_run *r = arg;
    uint8_t *from = r->memory + (size_t)piece * READ_PIECE;
    memcpy(from + r->len_bytes, from, piece_bytes(r, piece));
}

static void peak_piece(void *arg, uint32_t piece, uint32_t thread)
{
    (void)piece, (void)thread;
    struct limit_run *r = arg;
    atomic_store_explicit(&r->ops_done, r->peak(), memory_order_relaxed);
}

double cpu_run_limit(struct kernels *head, enum kernels_limit limit, void *memory, size_t len_bytes)
{
    struct cpu_kernels *k = cpu_of(head);
    struct limit_run r = {.ops = k->ops, .memory = memory, .len_bytes = len_bytes};
    uint32_t n_pieces = (uint32_t)((len_bytes + READ_PIECE - 1) / READ_PIECE);
    switch (limit) {
    case LIMIT_READ_ONE:
        for (uint32_t i = 0; i < n_pieces; i++)
            read_piece(&r, i, 0);
        return (double)len_bytes;
    case LIMIT_READ:
        pool_run(k->pool, read_piece, &r, n_pieces);
        return (double)len_bytes;
    case LIMIT_COPY:
        pool_run(k->pool, copy_piece, &r, n_pieces);
        return (double)len_bytes;
    case LIMIT_F32:
    case LIMIT_BF16:
        r.peak = limit == LIMIT_F32 ? k->ops->peak_f32 : k->ops->peak_bf16;
        pool_run(k->pool, peak_piece, &r, PEAK_PIECES);
        return r.ops_done * PEAK_PIECES;
    case LIMIT_LINK: /* there is no link: operations use the host's memory */
    case N_LIMITS:
        break;
    }
    return 0;
}
