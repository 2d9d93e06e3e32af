/*
 * Mailbox: how threads hand messages to each other. Many threads push, one reads; first in, first out.
 *
 * A push hands over ownership of the node. The reader takes everything at once, and may sleep on an eventfd,
 * so that a mailbox fits into an epoll set beside sockets and UCX workers.
 *
 * A mutex, not a lock-free list: it is held for three instructions, and wake-ups go through the eventfd
 * anyway.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct mail { /* embedded as the first member of the message, unless the reader converts by offset */
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

/* Takes everything pushed so far, oldest first; NULL if there is nothing. Reader only. The caller owns the
 * nodes. */
struct mail *mailbox_take(struct mailbox *box);

/* Sleeps until the mailbox has mail or timeout_ms has passed (-1: no limit). Reader only. */
void mailbox_wait(struct mailbox *box, int timeout_ms);

static inline int mailbox_fd(const struct mailbox *box)
{
    return box->event_fd; /* readable while the mailbox has mail */
}
