/*
 * Packed weights that all workers of a host share: the first one packs and leaves a file (engine/weight_file.h), the others, and
 * all later ones, map it read-only, so that the memory is there once.
 *
 * A file is named by its key: fingerprint of the model, instruction set, numbers, and what of the model a rank has. Its directory is the
 * user's own; a file that somebody else owns or may write is not used.
 *
 *     KEY-vFORMAT.packed        whole; 0600, never written again, replaced and removed by name only: who maps it keeps it
 *     KEY-vFORMAT.packed.tmp    being written, under flock(2) by its builder; renamed when it is on the disk
 *
 * The lock is the unfinished file itself. So a builder that dies leaves no lock, and its file is begun anew by the next one; who
 * waited and gets the lock looks whether the name still means what it locked, and begins again if not. (Rejected: lock files, which
 * stay for ever or are removed under somebody's feet; packing into a mapping of the file, where a full disk is a SIGBUS.)
 *
 * Nothing here fails: whatever is wrong with directory, disk or file is one warning, and the caller packs into its own memory. A
 * builder that makes no progress for a minute is waited for no longer.
 *
 * Bounds: whoever writes a file removes those of other formats, those that nobody has opened for 30 days, and what dead builders left.
 *
 * Threads: one for each object; any number of processes.
 */
#pragma once

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/log.h"
#include "kernels/kernels.h"
#include "proto/wire/block_key.h"

struct weight_cache;

struct weight_cache_key {
    struct block_key model; /* model_fingerprint() */
    const char *isa;        /* kernels_isa_name() */
    enum compute compute;
    enum k_weights weights;
    uint32_t rank, n_tensor, first_layer, end_layer; /* forward_rank */
};

/* The directory by default: $XDG_CACHE_HOME/tandem, else $HOME/.cache/tandem. False: the environment names none. */
bool weight_cache_default_dir(char out[PATH_MAX]);

/*
 * Maps the file of key in dir, which is made if it is not there; waits for the process that writes it; or begins to write it. NULL:
 * neither can be done, and log has a warning. log may be NULL.
 */
struct weight_cache *weight_cache_open(const char *dir, const struct weight_cache_key *key, const struct log *log);
void weight_cache_close(struct weight_cache *c); /* NULL is fine; unmaps: after the matrices are freed */

/*
 * Mapped: the next matrix, in the order in which they were added. NULL: nothing is mapped, or (with a warning) there is no next one.
 */
const void *weight_cache_next(struct weight_cache *c, uint64_t *len_bytes_out);
/* What weight_cache_next gave last can't be used: the file is removed, and nothing more is taken from it. */
void weight_cache_refuse(struct weight_cache *c, const char *why);

/* Whether matrices are to be added. */
bool weight_cache_is_building(const struct weight_cache *c);
void weight_cache_add(struct weight_cache *c, const void *data, uint64_t len_bytes);
/*
 * After the last matrix was added: the file is there for all. True: it is mapped here, too, and weight_cache_next begins with the first
 * matrix. False: it was not being built, or (with a warning) can't be used.
 */
bool weight_cache_publish(struct weight_cache *c);
