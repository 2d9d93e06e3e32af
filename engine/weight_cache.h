/*
 * Packed weights that all workers of a host share. The first worker packs them and leaves a file
 * (engine/weight_file.h); the others, and all later ones, map that file read-only, so that the memory is used
 * once.
 *
 * The name of a file is its key: fingerprint of the model, instruction set, number formats, and the part of
 * the model that a rank has. The directory belongs to the user; a file that another user owns, or may write,
 * is not used.
 *
 *     KEY-vFORMAT.packed        complete; mode 0600. Never written again, only replaced or removed by name,
 *                               so a process that maps it keeps its content
 *     KEY-vFORMAT.packed.tmp    being written, under flock(2) by its builder; renamed when it is on the disk
 *
 * The lock is on the unfinished file itself. So a builder that dies leaves no lock, and the next builder
 * starts its file again. A process that waited for the lock checks that the name still means the file that it
 * locked, and starts again if not. (Rejected: lock files, which stay for ever or are removed while in use;
 * packing into a mapping of the file, where a full disk is a SIGBUS.)
 *
 * Nothing here fails: any problem with the directory, the disk or the file is one warning, and the caller
 * packs into its own memory. A builder that makes no progress for a minute is not waited for any longer.
 *
 * Bounds: a process that writes a file removes files of older formats, files that nobody has opened for 30
 * days, and what dead builders left.
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

/*
 * The default directory: $XDG_CACHE_HOME/tandem, else $HOME/.cache/tandem. False if the environment names
 * neither.
 */
bool weight_cache_default_dir(char out[PATH_MAX]);

/*
 * Maps the file of key in dir, which is created if it does not exist; or waits for the process that writes
 * the file; or begins to write it. NULL if none of this is possible; log gets a warning. log may be NULL.
 */
struct weight_cache *weight_cache_open(const char *dir, const struct weight_cache_key *key, const struct log *log);
void weight_cache_close(struct weight_cache *c); /* NULL is fine; unmaps, so free the matrices first */

/* The next matrix, in the order of adding. NULL: no file is mapped or, with a warning, it has no next one. */
const void *weight_cache_next(struct weight_cache *c, uint64_t *len_bytes_out);
/*
 * The matrix of the last weight_cache_next() can't be used: removes the file, and takes nothing more from it.
 */
void weight_cache_refuse(struct weight_cache *c, const char *why);

/* Whether this process builds the file, so that matrices must be added. */
bool weight_cache_is_building(const struct weight_cache *c);
void weight_cache_add(struct weight_cache *c, const void *data, uint64_t len_bytes);
/*
 * After the last matrix was added: makes the file visible to all. True: it is mapped here, too, and
 * weight_cache_next() begins with the first matrix. False: it was not being built, or can't be used (with a
 * warning).
 */
bool weight_cache_publish(struct weight_cache *c);
