/*
 * Blocks that were to be forgotten while the disk took no deletes. They must not come back if the store is
 * restarted before it could delete them, so their keys are written to a file.
 *
 * DIR/forgotten is a file of fixed size beside the database, FORGOTTEN_MAX keys of 16 bytes: all zeros:
 * unused; all ones: every block is forgotten; anything else: a block key. Its room is allocated when it is
 * made, so that it can be written when the disk is full. It survives the death of the process, as RocksDB's
 * log does. If the disk is read-only, keys are known only until the process ends.
 *
 * Threads: one.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/log.h"
#include "proto/wire/block_key.h"

enum { FORGOTTEN_MAX = 1 << 14 }; /* keys; beyond that every block is forgotten */

struct forgotten;

/* Reads what an earlier process left. If the file can't be made, logs that and works without it. Never
 * NULL. */
struct forgotten *forgotten_open(const char *dir, const struct log *log);
void forgotten_close(struct forgotten *f); /* NULL is fine */

/* key NULL: forgets every block. */
void forgotten_add(struct forgotten *f, const struct block_key *key);
bool forgotten_has(const struct forgotten *f, const struct block_key *key);
bool forgotten_all(const struct forgotten *f); /* every block is forgotten */
/* The keys in rising order; none if forgotten_all(). Borrowed until the next change. */
const struct block_key *forgotten_keys(const struct forgotten *f, uint32_t *n_out);
void forgotten_clear(struct forgotten *f); /* everything forgotten has been deleted */
