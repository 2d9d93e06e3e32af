/*
 * What the processes of `tandem up` will take: the sum of all pools is held against the memory that is
 * available before the first of them starts, and workers and stores that were not told how much get equal
 * shares.
 *
 * Each child's options are read as the child will read them: its command line, its environment, its file. So
 * this is also where a child's drain_ms comes from.
 *
 * Threads: one.
 */
#pragma once

#include "cli/child.h"

/*
 * Adds --pool-bytes to the command lines of workers, and --dram-bytes to those of stores, that have no size
 * from elsewhere. TD_ERR_INVALID: an option of a child is wrong, or all pools together need more memory than
 * is available. *default_bytes_out: the size that was added to each of those workers; 0: every worker had a
 * size of its own.
 */
enum td_status up_memory_plan(struct child *children, uint32_t n, uint64_t *default_bytes_out,
                              struct td_error *error_out);
/*
 * The same size for a worker that joins later and has none from elsewhere; a store sizes itself. The process
 * itself holds its size against the memory that is available then.
 */
enum td_status up_memory_add(struct child *joined, uint64_t default_bytes, struct td_error *error_out);
