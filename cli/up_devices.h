/*
 * The devices of the workers of `tandem up --device cuda`. Each worker, of both roles, gets as many as it has
 * ranks, one after the other: worker i of r ranks begins at cuda:(i r). One that joins later gets the first
 * that no worker has.
 *
 * Threads: one.
 */
#pragma once

#include "base/status.h"
#include "cli/child.h"

#define UP_DEVICES_PROC "/proc/driver/nvidia/gpus" /* a folder for each device */

/* Devices of this host: those that CUDA_VISIBLE_DEVICES (`visible`; NULL: not set) names, as far as they can
 * be there, else the entries of the folder. UINT32_MAX: that can't be told; workers will say what is
 * missing. */
uint32_t up_devices_count(const char *visible, const char *folder);
/* TD_ERR_INVALID: n_workers of n_ranks each need more devices than there are. */
enum td_status up_devices_check(uint32_t n_workers, uint32_t n_ranks, uint32_t n_devices, struct td_error *error_out);
/* Number of the first device for another worker: no worker that has not ended has it, or one of the n_ranks
 * after it. */
uint32_t up_devices_next(const struct child *children, uint32_t n, uint32_t n_ranks);
