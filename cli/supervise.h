/*
 * Runs a cluster on this machine: starts workers and store, then the router that is told their addresses,
 * restarts what dies, and stops everything in order.
 *
 *   start:   all workers and the store at once; when each has said where it listens, the router; when `tandem
 *            status --wait` says that all are ready and the router serves, on_up
 *   run:     whoever exits is started again, on the same address, after 100 ms, doubling to 5 s; 10 s of life
 *            start that over
 *   scale:   SIGUSR1: the run directory's file `scale` says how many workers of each role and stores there
 *            shall be; new ones register with the router by themselves, those of the highest numbers are told
 *            to drain, and killed if they have not ended 10 s after the time that they have for it
 *   stop:    SIGTERM to the router, then to the workers, then to the store; each group has 10 s to drain,
 *            then SIGKILL
 *
 * A process that ends before it was ever ready stops the whole start: what is wrong with it will not pass by
 * itself. One that was added later is given up, and the others go on.
 *
 * The question whether all are ready is asked by a process of its own, because a process that has used gRPC
 * must not fork.
 *
 * Threads: one. Errors: said on stderr and in logs/up.log.
 */
#pragma once

#include "cli/child.h"
#include "cli/rundir.h"

struct supervise_config {
    struct rundir *dir; /* taken */
    /* The caller's. IDLE, with name, role, args and listen filled in; the router last, its --workers left
     * out. */
    struct child *children;
    uint32_t n_children, max_children;
    /* Fills in another worker or store, which is told of the router. */
    enum td_status (*make)(void *user, enum child_role role, uint32_t number, const char *router, struct child *out,
                           struct td_error *error_out);
    const char *tandem; /* path of this program, for the question above */
    const char *model;
    /* Called once, with the router's address. True: nobody reads stderr any more. */
    bool (*on_up)(void *user, const char *router);
    void *user;
};

enum { SUPERVISE_STOP_MS = 30000 }; /* longest that it takes to end all processes */

/* Before any fork: SIGINT, SIGTERM, SIGHUP (unless ignored) and SIGCHLD wait to be read from the descriptor
 * returned. */
int supervise_signals(void);

/* Until a signal comes. Returns the exit code: 0 if it came when all was up. */
int supervise_run(const struct supervise_config *config, int signal_fd);
