/*
 * The peers that routers told this worker to connect to: the union of the last list of each attached router.
 *
 * Threads: engine. Links are borrowed from wants_note() to wants_leave().
 */
#pragma once

#include "transfer/xfer.h"
#include "worker/link.h"

enum { WANTS_MAX = 64 }; /* addresses of one router's list; further ones are ignored */

struct wants_list {
    struct link *link;
    char (*addresses)[XFER_ADDRESS_BYTES];
    uint32_t n;
};

struct wants { /* zeroed: none */
    struct wants_list *lists;
    uint32_t n;
};

/* Replaces that router's list. */
void wants_note(struct wants *w, struct xfer *x, struct link *link, const Tandem__Worker__V1__Peers *m);
/* Drops that router's list. */
void wants_leave(struct wants *w, struct xfer *x, const struct link *link);
void wants_free(struct wants *w);
