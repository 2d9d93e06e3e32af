/*
 * What every main() of ours does: stop and reload on signals, and tell a parent where it listens.
 *
 * Signals are blocked in all threads and taken by a thread of their own, so that what they cause is ordinary code.
 */
#pragma once

#include "base/status.h"

/* SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2; SIGPIPE is ignored. Before any thread is started. */
void process_block_signals(void);

/*
 * SIGSEGV, SIGILL, SIGBUS, SIGFPE and SIGABRT end the process, with a core dump where that is set up. libucs takes them over in its
 * constructor, and what its handler does (it allocates, and prints) may wait for ever on a lock that the crash left taken. Handlers
 * of others, as those of the sanitizers, stay.
 */
void process_default_fatal_signals(void);

/* To what the system allows this process: each connection takes a descriptor, by UCX some ten. */
void process_raise_file_limit(void);

struct process_signals;
/*
 * Fatal signals are as above. Blocks the others and takes them from now on. While the process starts SIGINT and SIGTERM end it at once, with a word on stderr and exit
 * status 128 + signal: nothing is there yet that has to be cleaned up. SIGUSR1 waits; the others do nothing.
 */
struct process_signals *process_signals_open(const char *program);
/*
 * The process has started. Calls stop(user) for each SIGINT and SIGTERM that arrives, on a thread of its own. Calls reload(user) for
 * each SIGUSR1, there or, for one that came before, here: it must be safe on two threads at once. reload may be NULL. SIGHUP and
 * SIGUSR2 do nothing: there is nothing to read again, and a terminal that closes ends no server.
 */
void process_on_signals(struct process_signals *p, void (*stop)(void *user), void (*reload)(void *user), void *user);
/* Signals are blocked still, and nobody takes them any more. */
void process_signals_close(struct process_signals *p);

/*
 * Says on stderr why a program ends, if not with TD_OK, and returns its exit status: 0; 2 for TD_ERR_INVALID, which is what a user
 * must change in the options; 1 for all else. text may be empty.
 */
int process_exit_status(const char *program, enum td_status status, const char *text);

/*
 * Writes "ADDRESS\n" to the descriptor named by TANDEM_READY_FD, if that is set, and closes it: how a supervisor learns
 * that we are up and which port was picked.
 */
void process_announce(const char *address);
