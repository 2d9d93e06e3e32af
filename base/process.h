/*
 * What every main() of ours does: stop on a signal, and tell a parent where it listens.
 *
 * Signals are blocked in all threads and taken by a thread of their own, so that what they cause is ordinary code.
 */
#pragma once

/* SIGINT, SIGTERM, SIGHUP; SIGPIPE is ignored. Before any thread is started. */
void process_block_signals(void);

struct process_signals;
/* Calls stop(user), on a thread of its own, for each SIGINT, SIGTERM or SIGHUP that arrives. */
struct process_signals *process_on_stop(void (*stop)(void *user), void *user);
void process_signals_close(struct process_signals *p);

/*
 * Writes "ADDRESS\n" to the descriptor named by TANDEM_READY_FD, if that is set, and closes it: how a supervisor learns
 * that we are up and which port was picked.
 */
void process_announce(const char *address);
