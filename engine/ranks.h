/*
 * One model on several ranks: n_tensor ranks divide every layer, n_pipeline stages divide the layers. A rank
 * is a forward pass (engine/forward.h) on kernels of its own.
 *
 * Tokens, log-probabilities and pages have the same bits for any number of ranks: no sum is split (kernels.h)
 * and rows are independent. So neither the name of the numerics nor the fingerprint contains the number of
 * ranks, and pages can be exchanged between workers of different degrees.
 *
 * Callers must not know where a rank keeps its part of a page. There is one address per view, which is a
 * memory in which pages have an address: on the CPU all ranks work on the pool itself (one view), on devices
 * each rank has a view.
 *
 * Threads: the engine's, which also runs rank 0. Every other rank has its own, which sleeps while no batch
 * runs. A single rank runs in the caller, without threads and copies.
 */
#pragma once

#include "base/clock.h"
#include "base/log.h"
#include "engine/forward.h"

struct ranks;

struct ranks_config {
    /* [n_tensor * n_pipeline], stage by stage; borrowed, the array is copied. */
    struct kernels *const *kernels;
    uint32_t n_tensor, n_pipeline; /* 0 means 1 */
    struct forward_config forward; /* common to all ranks; kernels unused, of rank only piece_rows (0: 256) */
    const struct log *log;         /* reports how the ranks exchange; may be NULL */
};

/* As forward_open(); ranks load at the same time. TD_ERR_INVALID names both numbers that do not divide. */
enum td_status ranks_open(const struct ranks_config *config, struct ranks **out, struct td_error *error_out);
void ranks_share_weights(struct ranks *r); /* forward_share_weights() of all ranks */
void ranks_close(struct ranks *r);         /* NULL is fine */
/* Of all ranks; weights that every rank has count each time. */
uint64_t ranks_weight_bytes(const struct ranks *r);

uint32_t ranks_n_views(const struct ranks *r);
uint8_t *ranks_page(const struct ranks *r, uint32_t view, uint32_t page);
/*
 * Copies a page from the host to every rank that keeps a copy. The copies are asynchronous: the page may be
 * used, changed on the host, or given to others when all ranks have written the mark that was taken after it.
 */
void ranks_write_page(struct ranks *r, uint32_t page);
uint64_t ranks_write_mark(struct ranks *r);
bool ranks_written(struct ranks *r, uint64_t mark);
void ranks_write_wait(struct ranks *r, uint64_t mark);

/*
 * As forward_run(), with two differences: seqs are [n_views][n_seqs], and on_queued comes on the threads of
 * all ranks at the same time. There it may call forward_read_page() and read, but not change, what the caller
 * owns. on_layers comes on the calling thread, in order.
 */
void ranks_run(struct ranks *r, const struct forward_batch *batch);

/* Seconds that the exchanges of a batch of n_rows rows take alone; 0 if there is one rank. */
double ranks_measure_gathers(struct ranks *r, uint32_t n_rows, const struct clock *clock);
