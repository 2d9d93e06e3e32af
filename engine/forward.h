/*
 * The forward pass: weights packed for the kernels, pages where the kernels read them, and one function that
 * runs a batch of rows through the layers.
 *
 * A rank (engine/ranks.h) is a forward pass with some of the layers (a stage) and, of each layer, some heads
 * and columns. It runs the same batch as the other ranks and exchanges results with them in gathers
 * (kernels.h). A single rank has everything and exchanges nothing.
 *
 * Threads: one at a time, the rank's. The results of a row depend on its own sequence only (kernels.h).
 * Errors: opening returns a status; running can't fail.
 */
#pragma once

#include <stdint.h>

#include "base/log.h"
#include "kernels/kernels.h"
#include "model/adapter.h"
#include "model/model.h"

struct forward;
struct weight_cache;

struct forward_config {
    struct kernels *kernels;   /* borrowed */
    const struct model *model; /* borrowed */
    enum compute compute;
    struct adapter *const *adapters; /* [n_adapters]; array and adapters are borrowed */
    uint32_t n_adapters;
    /* Of the large matrices: projections, feed-forward, experts, output. int4: the output matrix is int8. */
    enum k_weights weights;
    const struct kv_layout *layout; /* copied */
    uint8_t *arena;                 /* [n_pages] of that layout, host memory; borrowed */
    uint32_t n_pages;
    uint32_t max_rows;      /* rows of one batch */
    uint32_t max_positions; /* longest context that is served */
    /* [max_logit_rows][vocab], host memory in which forward_run() leaves the logits; borrowed. */
    float *logits;
    /* [max_logit_rows], host memory for what was drawn. Both NULL: another rank leaves the results. */
    struct k_sampled *sampled;
    uint32_t max_logit_rows;
    /* Rank 0 of the first stage has packed n_done of its n_layers layers; may be NULL. */
    void (*on_load)(void *user, uint32_t n_done, uint32_t n_layers);
    void *load_user;
    const char *weight_cache; /* directory of engine/weight_cache.h; NULL: packs into its own memory */
    const struct log *log;    /* reports what happens to the cache; may be NULL */
    /* From forward_open_cache(); forward_open() takes it over, also if it fails. */
    struct weight_cache *cache;
    struct forward_rank {
        /* Which share of each layer's heads and columns; n_tensor 0 means 1. */
        uint32_t rank, n_tensor;
        struct k_group *tensor;          /* the n_tensor ranks of this stage; NULL if n_tensor is 1 */
        uint32_t first_layer, end_layer; /* [first, end); end_layer 0: all layers */
        struct k_group *before, *after;  /* {previous stage, this one}, {this one, next stage}; NULL: none */
        uint32_t piece_rows;             /* several stages: least rows of a piece of a batch (forward.c) */
    } rank;                              /* groups are borrowed; zeroed: a single rank */
};

/*
 * Opens this rank's file of packed weights; NULL: the weights of this rank are not shared. May wait for
 * another process that writes the file. If this process has to write it, the file stays locked until
 * forward_share_weights(). So every process opens the files of its ranks in the order of the ranks: otherwise
 * two processes could wait for each other.
 */
struct weight_cache *forward_open_cache(const struct forward_config *config);

/*
 * Finds the weights and packs them, or maps the file of packed weights. TD_ERR_NOT_FOUND or _CORRUPT name the
 * tensor; TD_ERR_INVALID names the dimension that can't be divided among the ranks.
 */
enum td_status forward_open(const struct forward_config *config, struct forward **out, struct td_error *error_out);
/*
 * Call it once, before the first batch, when model_check_all_asked() has found the model whole. Publishes the
 * file of packed weights for other processes, and moves this process's matrices into it
 * (weight_cache_publish).
 */
void forward_share_weights(struct forward *f);
void forward_close(struct forward *f);                  /* NULL is fine */
uint64_t forward_weight_bytes(const struct forward *f); /* bytes of the packed weights */

/*
 * Pages. On a device a rank keeps a copy of its heads and layers of each page; forward_write_page() copies it
 * from the host's page and forward_read_page() back. On the CPU all ranks work on the host's page itself, and
 * both do nothing. forward_page() returns the address for this rank's k_attn_seq.pages.
 */
bool forward_has_own_pages(const struct forward *f);
uint8_t *forward_page(const struct forward *f, uint32_t page);
void forward_write_page(struct forward *f, uint32_t page);
/* The copies are asynchronous (k_write_pieces_aside): pages may be used when forward_written() says so. */
uint64_t forward_write_mark(struct forward *f);
bool forward_written(struct forward *f, uint64_t mark);
void forward_write_wait(struct forward *f, uint64_t mark);
/* Queues an asynchronous copy (k_read_aside) of those layers in [begin, end) that the rank has. */
void forward_read_page(struct forward *f, uint32_t page, uint16_t begin, uint16_t end);
uint16_t forward_end_layer(const struct forward *f);

struct forward_batch {
    const uint32_t *ids;       /* [n_rows] */
    const uint32_t *positions; /* [n_rows] */
    uint32_t n_rows;
    const struct k_attn_seq *seqs; /* [n_seqs]; with this rank's page addresses */
    const uint32_t *n_tokens;      /* [n_seqs] tokens of the sequence, which choose longrope's frequencies */
    uint32_t n_seqs;
    const uint32_t *logit_rows; /* [n_logit_rows] rows of the batch whose logits are computed */
    const bool *wants_logits;   /* [n_logit_rows] false: only the drawn token is copied to the host */
    const struct k_draw *draws; /* [n_logit_rows] */
    uint32_t n_logit_rows;
    /*
     * NULL: no adapters. Else [n_adapters + 1]: adapter i has rows [i] .. [i + 1] - 1; rows before [0] have
     * none.
     */
    const uint32_t *adapter_rows;
    /*
     * Optional, on the rank's thread: operations that write layers [begin, end) of all rows' KV are queued.
     * Reads of these layers (forward_read_page) may be queued now, behind them.
     */
    void (*on_queued)(void *user, struct forward *f, uint16_t begin, uint16_t end);
    /* Optional, on the rank's thread: the reads queued in on_queued for layers [begin, end) are complete. */
    void (*on_layers)(void *user, uint16_t begin, uint16_t end);
    uint16_t layers_per_call; /* >= 1; at most K_MAX_MARKS calls result */
    void *user;
};

void forward_run(struct forward *f, const struct forward_batch *batch);

/* Only the exchanges between ranks in a batch of n_rows rows, with nothing computed, to measure them. */
void forward_run_gathers(struct forward *f, uint32_t n_rows);
