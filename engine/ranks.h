/*
 * One model on several ranks: n_tensor ranks share every layer, n_pipeline stages share the layers. A rank is a forward pass
 * (engine/forward.h) on kernels of its own.
 *
 * Tokens, log-probabilities and pages have the same bits for any number of ranks: no sum is split (kernels.h), rows are independent.
 * So neither the numerics' name nor the fingerprint says how many there are, and a page is the cluster's page.
 *
 * Callers must not know where a rank keeps its part of a page. Addresses come per view: memory in which pages lie. On the CPU all ranks
 * work on the pool itself, which is one view; on devices each rank has its own.
 *
 * Threads: the engine's, which is rank 0's too; every other rank has one, and waits while no batch runs. One rank alone runs in the
 * caller, with no thread and no copy.
 */
#pragma once

#include "base/clock.h"
#include "base/log.h"
#include "engine/forward.h"

struct ranks;

struct ranks_config {
    struct kernels *const *kernels; /* [n_tensor * n_pipeline], stage by stage; borrowed, the array is copied */
    uint32_t n_tensor, n_pipeline;  /* 0: 1 */
    struct forward_config forward;  /* what all have; without kernels, and of rank only piece_rows (0: 256) */
    const struct log *log;          /* says what the ranks exchange by; may be NULL */
};

/* As forward_open; the ranks load at the same time. TD_ERR_INVALID: what can't be shared, with both numbers. */
enum td_status ranks_open(const struct ranks_config *config, struct ranks **out, struct td_error *error_out);
void ranks_share_weights(struct ranks *r);          /* forward_share_weights of all */
void ranks_close(struct ranks *r);                  /* NULL is fine */
uint64_t ranks_weight_bytes(const struct ranks *r); /* of all; what every rank has counts each time */

uint32_t ranks_n_views(const struct ranks *r);
uint8_t *ranks_page(const struct ranks *r, uint32_t view, uint32_t page);
void ranks_write_page(struct ranks *r, uint32_t page); /* the host's copy, to all who keep one */

/*
 * As forward_run, but for seqs, which are [n_views][n_seqs], and on_queued, which comes in the threads of the ranks, at once: it may
 * call forward_read_page() and read what the caller has.
 */
void ranks_run(struct ranks *r, const struct forward_batch *batch);

/* Seconds that what the ranks exchange takes in a batch of so many rows, computing nothing; 0: nothing is exchanged. */
double ranks_measure_gathers(struct ranks *r, uint32_t n_rows, const struct clock *clock);
