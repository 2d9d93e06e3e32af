/*
 * Resolves host names on threads of its own, so that a name service that does not answer holds up only the
 * names that it was asked for and a few others, never a connection to a numeric address.
 *
 * Rejected: base/jobs.h (its queue is bounded, and at close it runs the waiting jobs, which may take as long
 * as a name service's time-out).
 *
 * Threads: up to NAMES_THREADS, started when they are needed. Any thread may call names_resolve.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/status.h"

enum { NAMES_THREADS = 4 };

struct names;

struct name_query { /* owned by the caller, who must keep it until done */
    struct name_query *next;
    const char *address;     /* "HOST:PORT" */
    uint32_t attempt;        /* if the name has several addresses: which one, modulo their number */
    atomic_bool is_given_up; /* may be set at any time: no name service is asked from then on */
    /* Called once, unless names_close comes first; for names on a thread of this module. On failure
     * target_len is 0 and `why` has the reason. */
    void (*done)(struct name_query *q);
    struct sockaddr_storage target;
    socklen_t target_len;
    struct td_error why;
};

struct names *names_open(void);
/* Waits for name services that are being asked. Queries that were not begun are dropped without done. */
void names_close(struct names *n);
void names_resolve(struct names *n, struct name_query *q); /* for a numeric address done is called inside */
