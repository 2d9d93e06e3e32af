/*
 * Host names to addresses, beside the threads that need them: a name service that does not answer holds up the names that it was asked
 * for, and a few others, never a connection to a numeric address.
 *
 * Rejected: base/jobs.h (its queue is bounded, and what waits is run when it is closed, which may take a name service's patience).
 *
 * Threads: up to NAMES_THREADS, started as they are needed; names_resolve from any thread.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/status.h"

enum { NAMES_THREADS = 4 };

struct names;

struct name_query { /* the caller's, until done */
    struct name_query *next;
    const char *address;     /* "HOST:PORT" */
    uint32_t attempt;        /* of a name with several addresses: which one, counted round */
    atomic_bool is_given_up; /* then no name service is asked any more */
    /* Once, unless names_close comes first; of a name on a thread of this module. target_len 0: why says why not. */
    void (*done)(struct name_query *q);
    struct sockaddr_storage target;
    socklen_t target_len;
    struct td_error why;
};

struct names *names_open(void);
/* Waits for the name service where it is being asked. What was not begun is dropped, without done. */
void names_close(struct names *n);
void names_resolve(struct names *n, struct name_query *q); /* a numeric address is done in this call */
