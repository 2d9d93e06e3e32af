/*
 * One process under supervision: how it is started, told to end, and what is known of it.
 *
 *     IDLE --start--> STARTING --its address arrives--> UP
 *                        |  ^                            |
 *                       exit  due                       exit
 *                        v  |                            |
 *                       BACKOFF <------------------------+
 *     STARTING, UP --stop--> STOPPING --exit--> ENDED        IDLE, BACKOFF --stop--> ENDED
 *     UP --a worker's exit with code 0: it was drained--> ENDED
 *
 * A child gets SIGTERM when the supervisor dies (PR_SET_PDEATHSIG), so that nothing outlives it; a process
 * group of its own, so that Ctrl-C reaches only the supervisor, which then stops everything in order; no open
 * file but its log, and the pipe named by TANDEM_READY_FD, on which it says where it listens. The address it
 * said first is the one it is given at each restart: others know it by that.
 *
 * fork() is safe only while this process has one thread: nothing here, or in whoever calls, may start gRPC.
 *
 * Threads: the supervisor's only one (PR_SET_PDEATHSIG counts from the thread that forked).
 */
#pragma once

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/mem.h"

/* Words of a command line, in one allocation each. */
struct child_args {
    char **words; /* followed by NULL */
    uint32_t n;
};
void args_add(struct child_args *a, const char *format, ...) __attribute__((format(printf, 2, 3)));
void args_free(struct child_args *a);

enum { CHILD_MOST = 64 }; /* of one role but the router */

enum child_role { CHILD_ROUTER, CHILD_PREFILL, CHILD_DECODE, CHILD_STORE, CHILD_STATUS };
enum child_state { CHILD_IDLE, CHILD_STARTING, CHILD_UP, CHILD_BACKOFF, CHILD_STOPPING, CHILD_ENDED };

struct child {
    char name[32];
    enum child_role role;
    struct child_args args; /* owned; program first */
    char listen[128];       /* for --listen; "": it does not listen */
    char log_path[PATH_MAX];

    enum child_state state;
    pid_t pid;         /* 0: not running */
    int ready_fd;      /* -1: nothing more to come */
    bool announced;    /* at least once; listen is its address since */
    int64_t log_start; /* where in its log the present run began */
    uint32_t n_restarts;
    /* due: in BACKOFF when it starts again, in STOPPING when it is killed, if the supervisor sets that.
     * backoff: the last one, also while it runs. */
    uint64_t started_ns, due_ns, backoff_ns;
    bool registers;   /* it tells the router itself where it is */
    int64_t drain_ms; /* how long it may take to finish what it has, once it is told to end */
};

const char *child_role_name(enum child_role role);
const char *child_state_name(enum child_state state);

/* TD_ERR_IO: the log can't be opened, or the system has no process to give; that counts as an exit:
 * BACKOFF. */
enum td_status child_start(struct child *c, uint64_t now_ns, struct td_error *error_out);

/* ready_fd is readable. True: it announced itself, and is UP now. */
bool child_hear(struct child *c);

/* Its exit was collected: state is BACKOFF (or ENDED, if it was stopping), wait_status_out as of waitpid. */
bool child_reap(struct child *c, uint64_t now_ns, int *wait_status_out);

/* SIGTERM; one that is not up yet has nothing to drain and does not listen to signals: SIGKILL. */
void child_stop(struct child *c);
void child_kill(struct child *c); /* SIGKILL; it still has to be reaped */
void child_free(struct child *c); /* of this process: a running child goes on */

/* The last lines, n_lines at most, that it wrote since its start. */
void child_log_tail(const struct child *c, uint32_t n_lines, struct bytes *out);
/* "exit code 1", "signal 9 (Killed)". */
void child_describe_exit(int wait_status, char out[64]);
