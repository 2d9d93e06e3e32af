/*
 * Mailbox: how threads hand messages to one another. Many pushers, one reader; first in, first out.
 *
 * A push hands over ownership of the node. The reader takes everything at once and may sleep on an eventfd, so a mailbox
 * fits into an epoll set beside sockets and UCX workers.
 *
 * A mutex, not a lock-free list: it is held for three instructions, and wakes are by eventfd anyway.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct mail {
    struct mail *next;
};

struct mailbox {
    pthread_mutex_t lock;
    struct mail *head, **tail;
    int event_fd;
};

void mailbox_init(struct mailbox *box);
void mailbox_fini(struct mailbox *box); /* must be empty */
void mailbox_push(struct mailbox *box, struct mail *mail);

/* Everything pushed so far, oldest first, or NULL. Reader only. */
struct mail *mailbox_take(struct mailbox *box);

/* Sleeps until something is there or timeout_ms (-1: for ever) is over. Reader only. */
void mailbox_wait(struct mailbox *box, int timeout_ms);

static inline int mailbox_fd(const struct mailbox *box)
{
    return box->event_fd; /* readable while something is in it */
}
