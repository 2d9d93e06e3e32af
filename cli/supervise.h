/*
 * Runs a cluster on this machine: starts workers and stores, then the router with their addresses and the
 * gateway with the router's, restarts processes that die, and stops everything in order.
 *
 *   start:   all workers and stores start at once; when each has written where it listens, the router starts,
 *            then the gateway; when `tandem status --wait` reports that all are ready and the router serves,
 *            on_up is called
 *   run:     a process that exits is started again on the same address, after 100 ms, doubling to 5 s; 10 s
 *            of life reset the delay. One that answers no health check for deaf_ms is killed, and so starts
 *            again; one that refuses connections answers (it may have as many as it takes)
 *   scale:   SIGUSR1: the run directory's file `scale` says how many workers of each role and how many stores
 *            there shall be. New ones register with the router by themselves; those with the highest numbers
 *            are told to drain, and killed if they have not ended 10 s after the time that they have for it
 *   stop:    SIGTERM to the gateway, then to the router, to the workers and to the stores; each group has
 *            10 s to drain, then SIGKILL. A second signal kills at once
 *
 * If a process ends before it was ever ready, the whole start fails, because its error will not go away by
 * itself. A process that was added later is given up, and the others go on.
 *
 * Processes of their own ask whether all are ready (tandem status) and answer (tandem health), because a
 * process that has used gRPC must not fork.
 *
 * Threads: one. Errors: printed on stderr and in logs/up.log.
 */
#pragma once

#include "cli/child.h"
#include "cli/rundir.h"

struct supervise_config {
    struct rundir *dir; /* taken (rundir_take) */
    /* Owned by the caller. IDLE, with name, role, args and listen filled in. The router is the last one, a
     * gateway the one before it; their --workers and --routers are left out. */
    struct child *children;
    uint32_t n_children, max_children;
    /* Fills in another worker or store, which is told the router's address. */
    enum td_status (*make)(void *user, enum child_role role, uint32_t number, const char *router, struct child *out,
                           struct td_error *error_out);
    const char *tandem; /* path of this program, for `tandem status --wait` and `tandem health` */
    int64_t deaf_ms;    /* 0: no process is asked */
    const char *model;
    /* Called once, with the router's address. True: nobody reads stderr any more, so messages go only to the
     * log. */
    bool (*on_up)(void *user, const char *router);
    void *user;
};

enum { SUPERVISE_STOP_MS = 40000 }; /* longest that it takes to end all processes */

/* Call it before any fork. Blocks SIGINT, SIGTERM, SIGHUP (unless ignored), SIGCHLD and SIGUSR1; they are
 * read from the returned descriptor. */
int supervise_signals(void);

/* Runs until a signal comes. Returns the exit code: 0 if the signal came after all were up. */
int supervise_run(const struct supervise_config *config, int signal_fd);
