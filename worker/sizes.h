/*
 * How much memory pools take: by default what the model can use and the machine can spare, and never more
 * than is available.
 *
 * A default pool holds SIZES_CONTEXTS sequences of the longest context, if its owner's share of the available
 * memory allows it: an eighth for one worker or store; workers that one `tandem up` starts share a quarter.
 * Pools are touched when they are mapped. A pool larger than the available memory would therefore not fail,
 * but meet the kernel's OOM killer: so sizes are checked before.
 *
 * Weights count, too. They are in the worker's own memory or, if shared (engine/weight_cache.h), in pages of
 * a file, which the system calls available although they must stay. Scratch memory does not count.
 *
 * Threads: any.
 */
#pragma once

#include "base/available.h"
#include "worker/geometry.h"
#include "worker/worker.h"

enum {
    SIZES_CONTEXTS = 4,        /* sequences of the longest context in a worker's default pool */
    SIZES_STORE_CONTEXTS = 16, /* the same for a store's default DRAM */
    SIZES_ALONE = 8,           /* divisor: one default pool takes at most 1/8 of the available memory */
    /* divisor: the default pools of one cluster's workers take at most 1/4 together. */
    SIZES_TOGETHER = 4,
    /* divisor: the same where devices compute, whose hosts have no weights to hold. */
    SIZES_DEVICES = 2,
};

/* Of a device's memory: what a worker takes by default (--device-memory), and what is left to others and to
 * scratch memory if the option leaves that much. */
#define SIZES_DEVICE_SHARE 0.9
#define SIZES_DEVICE_KEPT  0.1

/* Whether a worker computes on a device; simulated compute has none. */
bool sizes_has_device(const struct worker_options *o, const struct geometry *g);

/*
 * Sets --max-batch, --max-rows and --chunk-tokens where they are 0. On a device a chunk is long enough for
 * the best rate of prompts or nearly so: docs/gpu.md has the figures.
 */
void sizes_steps(struct worker_options *o, const struct geometry *g);

/*
 * Bytes of a default pool: whole pages for n sequences of max_context tokens, but at most share_bytes or, if
 * that is less, 64 MiB; at least one page.
 */
uint64_t sizes_default(const struct kv_layout *layout, uint32_t max_context, uint32_t n, uint64_t share_bytes);

/* An amount of memory, and the option that sets it. */
struct size_asked {
    const char *option; /* "--pool-bytes" */
    uint64_t bytes;
};

/*
 * The size of a worker's pool by its options. share_bytes limits a default. out->option is "--pool-bytes" or
 * "--pages". On a device a default holds --max-batch sequences of the longest context if --pool-most or
 * share_bytes allows it, and out->option is "--pool-most"; how much the devices hold is known when they are
 * open (sizes_on_devices).
 */
enum td_status sizes_pool(const struct worker_options *o, const struct geometry *g, uint64_t share_bytes,
                          struct size_asked *out, struct td_error *error_out);

struct size_device {
    uint64_t free_bytes, total_bytes;
};
/*
 * The largest pool that fits on the devices of a worker's ranks beside the weights, of which each rank has an
 * equal part. least: the device with the least free memory. TD_ERR_INVALID, naming --device-memory: not even
 * a page fits.
 */
enum td_status sizes_on_devices(const struct worker_options *o, const struct geometry *g,
                                const struct size_device *least, uint64_t *bytes_out, struct td_error *error_out);

/*
 * The size of a store's DRAM. dram_bytes is the value of --dram-bytes; 0: a default, limited by share_bytes.
 */
void sizes_dram(int64_t dram_bytes, const struct geometry *g, uint64_t share_bytes, struct size_asked *out);

/*
 * Bytes of host memory that a worker's packed weights take at least; 2 bytes each as stored. 0: simulated, or
 * on a device.
 */
uint64_t sizes_weights(const struct worker_options *o, const struct geometry *g);
/* Whether workers of this host with the same options share one copy of the packed weights. */
bool sizes_shares_weights(const struct worker_options *o, const struct geometry *g);

/* Bytes that are left for pools beside the weights. */
uint64_t sizes_left(const struct available_memory *there, uint64_t weights_bytes);

/* TD_ERR_INVALID, naming the largest, if all sizes and the weights are more than is available. */
enum td_status sizes_check(const struct size_asked *all, uint32_t n, uint64_t weights_bytes,
                           const struct available_memory *there, struct td_error *error_out);
