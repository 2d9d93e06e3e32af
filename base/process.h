/*
 * What every main() does: stop and reload on signals, and tell the parent process where it listens.
 *
 * Signals are blocked in all threads and taken by a thread of their own, so that the code that they cause is
 * ordinary code.
 *
 * A program with this file also fills the places of standard input, output and error that its caller left
 * closed (2>&-), so that no file or connection gets these numbers, and with them what is printed or logged.
 * Reading and writing there fail as before. It happens before the constructors of libraries: that of libucs
 * opens a file.
 */
#pragma once

#include "base/status.h"

/* Blocks SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2. SIGPIPE and SIGXFSZ (a file at its ulimit) are
 * ignored, so that the write fails instead. Call before any thread is started. */
void process_block_signals(void);

/*
 * Makes SIGSEGV, SIGILL, SIGBUS, SIGFPE and SIGABRT end the process, with a core dump if that is configured.
 * libucs installs handlers for them in its constructor; its handler allocates and prints, and may wait for
 * ever on a lock that was held at the crash. Handlers of others, such as sanitizers, stay.
 */
void process_default_fatal_signals(void);

/* Raises the limit of open files to what the system allows: each connection takes a descriptor, with UCX
 * about ten. */
void process_raise_file_limit(void);

/*
 * Keeps what the process has to itself: files that it makes can be read by its user alone (umask 077), and
 * core dumps leave out shared memory, which has KV pages. (Those that are not shared: mem_map().) Call it
 * before a file is made.
 */
void process_keep_private(void);

struct process_signals;
/*
 * Blocks the signals above and takes them from now on; fatal signals as above. Until process_on_signals,
 * SIGINT and SIGTERM end the process at once, with a line on stderr and exit status 128 + signal, because
 * nothing needs cleaning up yet. SIGUSR1 is remembered; the others do nothing.
 */
struct process_signals *process_signals_open(const char *program);
/*
 * Call when the process has started. Calls stop(user) for each SIGINT and SIGTERM, on a thread of its own.
 * Calls reload(user) for each SIGUSR1 on that thread; for one that came before, inside this call. So reload
 * must be safe on two threads at once; it may be NULL. SIGHUP and SIGUSR2 do nothing: there is nothing else
 * to read again, and a closing terminal does not end a server.
 */
void process_on_signals(struct process_signals *p, void (*stop)(void *user), void (*reload)(void *user), void *user);
/* Afterwards signals stay blocked, and no thread takes them. */
void process_signals_close(struct process_signals *p);

/* Prints on stderr why a program ends, unless status is TD_OK, and returns its exit status: 0; 2 for
 * TD_ERR_INVALID, which the user must mend in the options; 1 for everything else. text may be empty. */
int process_exit_status(const char *program, enum td_status status, const char *text);

/* Writes "ADDRESS\n" to the descriptor named by TANDEM_READY_FD, if that is set, and closes it: this tells
 * a supervisor that the process is up and which port it picked. */
void process_announce(const char *address);
