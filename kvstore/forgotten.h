/*
 * Blocks that were to be forgotten while the disk took no deletes. They must not come back when the store is restarted before it
 * could delete them, so their keys are written down.
 *
 * DIR/forgotten is a file of fixed size beside the database: keys, one behind the other; zeros: unused; ones: every block. Its room is
 * taken when it is made, so that it can be written when the disk is full. It survives the death of the process, as RocksDB's log does. A
 * disk that is read-only keeps nothing: then keys are only known until the process ends.
 *
 * Threads: one.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/log.h"
#include "proto/wire/block_key.h"

enum { FORGOTTEN_MAX = 1 << 14 }; /* keys; when there are more, every block is forgotten */

struct forgotten;

/* With what an earlier process left. Without the file it works, too, and says so. */
struct forgotten *forgotten_open(const char *dir, const struct log *log);
void forgotten_close(struct forgotten *f); /* NULL is fine */

/* key NULL: every block. */
void forgotten_add(struct forgotten *f, const struct block_key *key);
bool forgotten_has(const struct forgotten *f, const struct block_key *key);
bool forgotten_all(const struct forgotten *f); /* every block is forgotten */
/* The keys, rising; none while forgotten_all(). */
const struct block_key *forgotten_keys(const struct forgotten *f, uint32_t *n_out);
void forgotten_clear(struct forgotten *f); /* all are deleted */
