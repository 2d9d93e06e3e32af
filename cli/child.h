/*
 * One process under supervision: how it is started and told to end, and its state.
 *
 *     IDLE --start--> STARTING --its address arrives--> UP
 *                        |  ^                            |
 *                       exit  due                       exit
 *                        v  |                            |
 *                       BACKOFF <------------------------+
 *     STARTING, UP --stop--> STOPPING --exit--> ENDED        IDLE, BACKOFF --stop--> ENDED
 *     UP --exit of a worker or store with code 0: it was drained--> ENDED
 *
 * A child gets SIGTERM when the supervisor dies (PR_SET_PDEATHSIG), so that nothing outlives it. It has a
 * process group of its own, so that Ctrl-C reaches only the supervisor, which then stops everything in order.
 * It inherits no open file but its log and a pipe (TANDEM_READY_FD), on which it writes where it listens. A
 * restart gets the address that the first start wrote, because others know the process by it.
 *
 * fork() is safe only while this process has one thread: neither this file nor its callers may start gRPC.
 *
 * Threads: the supervisor's only thread (PR_SET_PDEATHSIG is tied to the thread that forked).
 */
#pragma once

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/mem.h"

/* The words of a command line, each in an allocation of its own. */
struct child_args {
    char **words; /* followed by NULL */
    uint32_t n;
};
void args_add(struct child_args *a, const char *format, ...) __attribute__((format(printf, 2, 3)));
void args_free(struct child_args *a);

enum { CHILD_MOST = 64 }; /* most processes of one role; of routers and gateways there is one */

enum child_role { CHILD_ROUTER, CHILD_PREFILL, CHILD_DECODE, CHILD_STORE, CHILD_GATEWAY, CHILD_STATUS };
enum child_state { CHILD_IDLE, CHILD_STARTING, CHILD_UP, CHILD_BACKOFF, CHILD_STOPPING, CHILD_ENDED };

struct child {
    char name[32];
    enum child_role role;
    struct child_args args; /* owned; the program is the first word */
    char listen[128];       /* for --listen; "": the process does not listen */
    char log_path[PATH_MAX];

    enum child_state state;
    pid_t pid;         /* 0: not running */
    int ready_fd;      /* -1: the address has come, or the process is not running */
    bool announced;    /* the process has been UP once; listen is its address since then */
    int64_t log_start; /* offset in the log at which the present run began */
    uint32_t n_restarts;
    /*
     * due_ns: in BACKOFF when it starts again; in STOPPING when it is killed, if the supervisor sets that.
     * backoff_ns: the last delay, also kept while the process runs.
     */
    uint64_t started_ns, due_ns, backoff_ns;
    uint64_t heard_ns; /* when it last answered a health check, or came up */
    uint32_t n_silent; /* checks since then that it has not answered */
    bool registers;    /* it tells the router itself where it is */
    int64_t drain_ms;  /* how long it may take to finish what it has, once it is told to end */
};

const char *child_role_name(enum child_role role);
const char *child_state_name(enum child_state state);

/* TD_ERR_IO: the log can't be opened, or no process can be made. That counts as an exit: the state is
 * BACKOFF. */
enum td_status child_start(struct child *c, uint64_t now_ns, struct td_error *error_out);

/* Call it when ready_fd is readable. True: the process wrote its address, and is UP now. */
bool child_hear(struct child *c);

/* True: the process has exited and was reaped. Its state is BACKOFF or ENDED; *wait_status_out is as of
 * waitpid(). */
bool child_reap(struct child *c, uint64_t now_ns, int *wait_status_out);

/* Sends SIGTERM. A process that is not up yet gets SIGKILL: it has nothing to drain and does not read
 * signals. */
void child_stop(struct child *c);
void child_kill(struct child *c); /* sends SIGKILL; the process still has to be reaped */
void child_free(struct child *c); /* frees memory only: a running child goes on */

/* The last lines, at most n_lines, that the present run wrote to its log. */
void child_log_tail(const struct child *c, uint32_t n_lines, struct bytes *out);
/* "exit code 1", "signal 9 (Killed)". */
void child_describe_exit(int wait_status, char out[64]);
