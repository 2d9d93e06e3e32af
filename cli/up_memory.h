/*
 * What the processes of `tandem up` will take: the sum of all pools is held against the memory that is available before the first of
 * them starts, and workers that were not told how much get equal shares.
 *
 * Each child's options are read as the child will read them: its command line, its environment, its file.
 *
 * Threads: one.
 */
#pragma once

#include "cli/child.h"

/*
 * Adds --pool-bytes to the command lines of workers that have no size from elsewhere. TD_ERR_INVALID: an option of a child is wrong, or
 * all pools together are more than is there. *default_bytes_out: what one of those workers got; 0: there was none.
 */
enum td_status up_memory_plan(struct child *children, uint32_t n, uint64_t *default_bytes_out,
                              struct td_error *error_out);
/* As much for a worker that joins later, if it has no size from elsewhere. It looks itself whether that is there. */
enum td_status up_memory_add(struct child *worker, uint64_t default_bytes, struct td_error *error_out);
