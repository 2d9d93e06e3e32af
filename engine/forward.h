/*
 * The forward pass: weights packed for the kernels, pages where the kernels have them, and one function that runs a batch of rows
 * through the layers.
 *
 * A rank (engine/ranks.h) is a forward pass that has some of the layers (a stage), and of each some heads and columns. It runs the same
 * batch as the others, who are met in gathers (kernels.h); alone it has everything and meets nobody.
 *
 * Threads: one at a time, the rank's. Results of a row depend on its own sequence only (kernels.h).
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
    struct adapter *const *adapters; /* [n_adapters], borrowed, the array too */
    uint32_t n_adapters;
    enum k_weights
        weights; /* of the large matrices: projections, feed-forward, experts, output; int4: the output's are int8 */
    const struct kv_layout *layout; /* copied */
    uint8_t *arena;                 /* [n_pages] of that layout, host; borrowed */
    uint32_t n_pages;
    uint32_t max_rows;         /* rows of one batch */
    uint32_t max_positions;    /* longest context served */
    float *logits;             /* [max_logit_rows][vocab] host; where forward_run leaves them; borrowed */
    struct k_sampled *sampled; /* [max_logit_rows] host, likewise; both NULL: another rank leaves them */
    uint32_t max_logit_rows;
    void (*on_load)(void *user, uint32_t n_done,
                    uint32_t n_layers); /* the first rank's layers as they are packed; may be NULL */
    void *load_user;
    const char *weight_cache;   /* directory of engine/weight_cache.h; NULL: all is packed into memory of our own */
    const struct log *log;      /* what becomes of it; may be NULL */
    struct weight_cache *cache; /* of forward_open_cache; forward_open takes it over, also when it fails */
    struct forward_rank {
        uint32_t rank, n_tensor;         /* which share of every layer's heads and columns; n_tensor 0: 1 */
        struct k_group *tensor;          /* the n_tensor ranks of these layers; NULL: n_tensor is 1 */
        uint32_t first_layer, end_layer; /* end 0: all */
        struct k_group *before, *after;  /* {the stage before, this one}, {this one, the next}; NULL: there is none */
        uint32_t piece_rows;             /* with several stages: at least so many rows follow each other through them */
    } rank;                              /* groups borrowed; zero: alone */
};

/*
 * Opens the file of packed weights of this rank; NULL: the weights of this rank are not shared. The call may wait for another process
 * that writes the file. If this process has to write it, the file is locked until forward_share_weights. So every process opens the files
 * of its ranks in the order of the ranks; in different orders two processes could wait for each other.
 */
struct weight_cache *forward_open_cache(const struct forward_config *config);

/*
 * Finds the weights, and packs them or maps the file in which they are packed. TD_ERR_NOT_FOUND or _CORRUPT name the tensor;
 * TD_ERR_INVALID names the dimension that can't be divided among the ranks.
 */
enum td_status forward_open(const struct forward_config *config, struct forward **out, struct td_error *error_out);
/*
 * To be called once, before the first batch, when model_check_all_asked has found the model whole: publishes the file of packed weights
 * for other processes, and moves this process's matrices into it (weight_cache_publish).
 */
void forward_share_weights(struct forward *f);
void forward_close(struct forward *f);                  /* NULL is fine */
uint64_t forward_weight_bytes(const struct forward *f); /* memory of the packed copy */

/*
 * Pages. On a device a rank keeps its heads and layers of each, which are kept like the host's page by hand; on the CPU all have the host's
 * page itself. The address is for k_attn_seq.pages of this rank.
 */
bool forward_has_own_pages(const struct forward *f);
uint8_t *forward_page(const struct forward *f, uint32_t page);
void forward_write_page(struct forward *f, uint32_t page);
/* Aside (k_read_aside), of layers [begin, end) those that the rank has. */
void forward_read_page(struct forward *f, uint32_t page, uint16_t begin, uint16_t end);
uint16_t forward_end_layer(const struct forward *f);

struct forward_batch {
    const uint32_t *ids;       /* [n_rows] */
    const uint32_t *positions; /* [n_rows] */
    uint32_t n_rows;
    const struct k_attn_seq *seqs; /* [n_seqs]; pages are this rank's */
    const uint32_t *n_tokens;      /* [n_seqs] length of the sequence, what longrope goes by */
    uint32_t n_seqs;
    const uint32_t *logit_rows; /* [n_logit_rows] rows whose logits are wanted */
    const bool *wants_logits;   /* [n_logit_rows] false: only what is drawn of them */
    const struct k_draw *draws; /* [n_logit_rows] */
    uint32_t n_logit_rows;
    /* NULL: no adapters; else [n_adapters + 1]: adapter i is that of rows [i] .. [i + 1], rows before [0] have none */
    const uint32_t *adapter_rows;
    /* Optional: layers [begin, end) of every row's KV are queued to be in the rank's pages: reads of them may be queued behind, */
    void (*on_queued)(void *user, struct forward *f, uint16_t begin, uint16_t end);
    /* and then: they are there for good, and read. Both in the rank's thread. */
    void (*on_layers)(void *user, uint16_t begin, uint16_t end);
    uint16_t layers_per_call; /* >= 1, and K_MAX_MARKS calls at most */
    void *user;
};

void forward_run(struct forward *f, const struct forward_batch *batch);

/* What the ranks exchange in a batch of so many rows, and nothing else: to measure it. */
void forward_run_gathers(struct forward *f, uint32_t n_rows);
