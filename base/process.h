/*
 * What every main() of ours does: stop and reload on signals, and tell a parent where it listens.
 *
 * Signals are blocked in all threads and taken by a thread of their own, so that what they cause is ordinary code.
 */
#pragma once

/* SIGINT, SIGTERM, SIGHUP, SIGUSR1; SIGPIPE is ignored. Before any thread is started. */
void process_block_signals(void);

struct process_signals;
/*
 * Calls, on a thread of its own, stop(user) for each SIGINT, SIGTERM or SIGHUP that arrives, and reload(user) for each SIGUSR1;
 * reload may be NULL: then SIGUSR1 does nothing.
 */
struct process_signals *process_on_signals(void (*stop)(void *user), void (*reload)(void *user), void *user);
void process_signals_close(struct process_signals *p);

/*
 * Writes "ADDRESS\n" to the descriptor named by TANDEM_READY_FD, if that is set, and closes it: how a supervisor learns
 * that we are up and which port was picked.
 */
void process_announce(const char *address);
