/*
 * The run directory of a cluster on this machine: its files, and which supervisor owns it.
 *
 *   up.pid          process id of the supervisor, which holds a flock on it for as long as it lives
 *   router.address  HOST:PORT of the client API, once it is up
 *   cluster.json    {"pid", "router", "model", "processes": [{"name", "role", "pid" (0: not running),
 *                   "state", "address", "restarts", "log"}], "n_given_up", "given_up"}, rewritten at each
 *                   change; n_given_up counts processes that tandem scale asked for and that can't start,
 *                   given_up says what is wrong with the last one
 *   scale           numbers of processes that tandem scale asks for ("4 6 2": prefill, decode, store; below
 *                   0: leave as it is); read at SIGUSR1
 *   faults/         of tandem up --faults: a file NAME for each process whose faults were set (base/fault.h)
 *   logs/           up.log and one NAME.log for each process; kept
 *   secret          the cluster secret (rundir_key); kept. If it is removed while the cluster is down, the
 *                   next cluster draws a new one
 *   store/          the files of the KV store; kept
 *
 * A living supervisor is known by the lock, not by the file: the lock ends with the process, however it ends.
 * The file is removed under the lock. So a process that has locked a file owns the directory only if the path
 * still leads to that file.
 *
 * Threads: one. Errors: TD_ERR_REFUSED from rundir_take() means that another supervisor has the directory.
 */
#pragma once

#include <limits.h>
#include <stdbool.h>
#include <sys/types.h>

#include "base/status.h"

#define RUNDIR_FAULTS "faults"
enum { RUNDIR_KEY_BYTES = 65 }; /* with the terminating 0 */

struct rundir {
    char path[PATH_MAX / 2]; /* leaves room in PATH_MAX for names below it */
    int lock_fd;             /* descriptor of up.pid, which we have locked; -1: we don't own the directory */
};

/* Path: option if given, else $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-UID. Makes no directory. TD_ERR_IO:
 * there is one, but it is another user's, or others may write into it. */
enum td_status rundir_locate(const char *option, struct rundir *out, struct td_error *error_out);

/* Makes the directory and logs/ in it (mode 0700; a directory of another user is refused), and takes the
 * lock, which a forked child keeps. */
enum td_status rundir_take(struct rundir *r, struct td_error *error_out);
/* Removes faults/, so that the faults of an earlier cluster are gone; makes it again, empty, if wanted. Only
 * files that are named as processes are removed: a directory of that name with other files stays, and is an
 * error if faults/ is wanted. The run directory must be taken. */
enum td_status rundir_reset_faults(const struct rundir *r, bool wanted, struct td_error *error_out);
void rundir_set_pid(struct rundir *r);
void rundir_release(struct rundir *r); /* removes up.pid, router.address, cluster.json, scale and faults/ */

/* Process id of the living supervisor; 0: there is none; -1: one is starting. */
pid_t rundir_owner(const struct rundir *r);

/* Process id of a living supervisor whose directory was removed, found through /proc; 0: none. */
pid_t rundir_orphan(const struct rundir *r);

void rundir_path(const struct rundir *r, const char *name, char out[PATH_MAX]);
/* Replaces a file in one step, so that a reader sees the old text or the new. */
enum td_status rundir_write(const struct rundir *r, const char *name, const char *text, struct td_error *error_out);

/*
 * A random text of 64 hex digits that outlives the process: read from DIR/NAME, or drawn and written there
 * (mode 0600) if there is no such file. Makes dir; its parent must exist. TD_ERR_IO. TD_ERR_REFUSED: the file
 * is not ours, others may read it, or it does not hold a key.
 */
enum td_status rundir_key(const char *dir, const char *name, char out[RUNDIR_KEY_BYTES], struct td_error *error_out);
