/*
 * The memory of the processes of `tandem up`. Before the first one starts, the sum of all pools is compared
 * with the available memory. Workers and stores without a size of their own get equal shares; where devices
 * compute, also of a device that several workers have.
 *
 * Each child's options are read as the child will read them: from its command line, environment and file. So
 * this is also where a child's drain_ms comes from.
 *
 * Threads: one.
 */
#pragma once

#include "cli/child.h"

/*
 * Adds --pool-bytes (--pool-most where devices compute) to the command lines of workers and --dram-bytes to
 * those of stores that have no size from elsewhere. TD_ERR_INVALID: an option of a child is wrong, or all
 * pools together need more memory than is available. *default_bytes_out: the size added to each such worker;
 * 0: every worker had a size of its own.
 */
enum td_status up_memory_plan(struct child *children, uint32_t n, uint64_t *default_bytes_out,
                              struct td_error *error_out);
/* Adds that size for a worker that joins later and has none from elsewhere; a store sizes itself. The new
 * process compares its size with the memory that is available then. */
enum td_status up_memory_add(struct child *joined, uint64_t default_bytes, struct td_error *error_out);
