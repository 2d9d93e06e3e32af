/*
 * The run directory of a cluster on this machine: who runs it, and where its files lie.
 *
 *   up.pid          process id of the supervisor, which holds a flock on it for as long as it lives
 *   router.address  HOST:PORT of the client API, once it is up
 *   cluster.json    {"pid", "router", "model", "processes": [{"name", "role", "pid" (0: not running),
 *                   "state", "address", "restarts", "log"}], "n_given_up", "given_up"}, rewritten at each
 *                   change; n_given_up counts processes that tandem scale asked for and that can't start,
 *                   given_up says what is wrong with the last one
 *   faults/         of tandem up --faults: a file NAME for each process whose faults were set (base/fault.h)
 *   logs/           up.log and one NAME.log for each process, kept
 *   secret          the cluster secret (rundir_key), kept: remove it while the cluster is down, and the next
 *                   one draws another
 *   store/          what the KV store wrote, kept
 *
 * The lock, not the file, says that a supervisor lives: it ends with the process, however that ends. The file
 * is removed under the lock, so a lock is only good if the path still leads to the file that was locked.
 *
 * Threads: one. Errors: TD_ERR_REFUSED from taking means that another supervisor has the directory.
 */
#pragma once

#include <limits.h>
#include <stdbool.h>
#include <sys/types.h>

#include "base/status.h"

#define RUNDIR_FAULTS "faults"
enum { RUNDIR_KEY_BYTES = 65 }; /* with the final 0 */

struct rundir {
    char path[PATH_MAX / 2]; /* room for names below it in PATH_MAX */
    int lock_fd;             /* of up.pid; -1: not ours */
};

/* option, else $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-UID. Makes nothing. */
enum td_status rundir_locate(const char *option, struct rundir *out, struct td_error *error_out);

/* Makes the directory with logs/ (mode 0700; somebody else's is refused) and takes the lock. It survives a
 * fork. */
enum td_status rundir_take(struct rundir *r, struct td_error *error_out);
/* Makes faults/, empty, or takes it away: what was set in an earlier cluster is over. Only files that are
 * named as processes are removed: somebody else's directory of that name stays, and is an error if faults/ is
 * wanted. The run directory must be taken. */
enum td_status rundir_reset_faults(const struct rundir *r, bool wanted, struct td_error *error_out);
void rundir_set_pid(struct rundir *r);
void rundir_release(struct rundir *r); /* removes up.pid, router.address, cluster.json, scale and faults/ */

/* The living supervisor, 0 if there is none, -1 while one is starting. */
pid_t rundir_owner(const struct rundir *r);

/* The living supervisor of a directory that was removed, which /proc still shows; 0: none. */
pid_t rundir_orphan(const struct rundir *r);

void rundir_path(const struct rundir *r, const char *name, char out[PATH_MAX]);
/* Replaces a file in one step, so that a reader sees the old text or the new. */
enum td_status rundir_write(const struct rundir *r, const char *name, const char *text, struct td_error *error_out);

/*
 * A random text of 64 hex digits that outlives the process: read from DIR/NAME, or drawn and written there
 * (mode 0600) if there is no such file. dir is made, its parent must exist. TD_ERR_IO; TD_ERR_REFUSED: the
 * file is not ours, others may read it, or it holds something else.
 */
enum td_status rundir_key(const char *dir, const char *name, char out[RUNDIR_KEY_BYTES], struct td_error *error_out);
