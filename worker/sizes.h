/*
 * How much memory pools take: by default as the model and the machine allow, and never more than is there.
 *
 * A default pool holds SIZES_CONTEXTS sequences of the longest context, if that is within the share of the available memory that its owner
 * may have: an eighth for a worker or a store alone; workers that one `tandem up` starts share a quarter. Pools are touched as they are
 * made, so one that is larger than what is there would not fail but meet the kernel's OOM killer: sizes are checked before.
 *
 * Weights count, too: they lie in memory of the worker's own, or, shared (engine/weight_cache.h), in pages of a file that the system
 * calls available and that must stay all the same. Scratch memory does not count.
 *
 * Threads: any.
 */
#pragma once

#include "base/available.h"
#include "worker/geometry.h"
#include "worker/worker.h"

enum {
    SIZES_CONTEXTS = 4,        /* of a worker's default pool */
    SIZES_STORE_CONTEXTS = 16, /* of a store's */
    SIZES_ALONE = 8,           /* a default takes at most 1 / so much of what is available */
    SIZES_TOGETHER = 4,        /* and the default pools of the workers of one cluster at most 1 / so much */
};

/* Whole pages of the layout for n sequences of max_context tokens, at most share_bytes; but 64 MiB if as much is needed. */
uint64_t sizes_default(const struct kv_layout *layout, uint32_t max_context, uint32_t n, uint64_t share_bytes);

/* Memory for something, and the option that says how much. */
struct size_asked {
    const char *option; /* "--pool-bytes" */
    uint64_t bytes;
};

/* What the pool of a worker takes by its options, share_bytes being for a default; option is "--pool-bytes" or "--pages". */
enum td_status sizes_pool(const struct worker_options *o, const struct geometry *g, uint64_t share_bytes,
                          struct size_asked *out, struct td_error *error_out);

/* The same of a store's DRAM; option is "--dram-bytes", dram_bytes what it says, 0: a default. */
void sizes_dram(int64_t dram_bytes, const struct geometry *g, uint64_t share_bytes, struct size_asked *out);

/* What the packed weights of a worker take in the host's memory, at least: as stored 2 bytes each. 0: simulated, or on a device. */
uint64_t sizes_weights(const struct worker_options *o, const struct geometry *g);
/* Whether workers of this host with the same options have them once. */
bool sizes_shares_weights(const struct worker_options *o, const struct geometry *g);

/* What is left for pools beside weights. */
uint64_t sizes_left(const struct available_memory *there, uint64_t weights_bytes);

/* TD_ERR_INVALID, naming the largest, what all take together with the weights, and what is there, if that is less. */
enum td_status sizes_check(const struct size_asked *all, uint32_t n, uint64_t weights_bytes,
                           const struct available_memory *there, struct td_error *error_out);
