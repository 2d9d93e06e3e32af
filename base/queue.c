#include "base/queue.h"

#include <assert.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

void mailbox_init(struct mailbox *box)
{
    pthread_mutex_init(&box->lock, NULL);
    box->head = NULL;
    box->tail = &box->head;
    box->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (box->event_fd < 0)
        abort(); /* no file descriptors at the start: nothing could run */
}

void mailbox_fini(struct mailbox *box)
{
    assert(!box->head);
    close(box->event_fd);
    pthread_mutex_destroy(&box->lock);
}

void mailbox_push(struct mailbox *box, struct mail *mail)
{
    mail->next = NULL;
    pthread_mutex_lock(&box->lock);
    bool was_empty = !box->head;
    *box->tail = mail;
    box->tail = &mail->next;
    if (was_empty) { /* inside the lock, so that a take in between can't lose the wake-up */
        uint64_t one = 1;
        ssize_t n = write(box->event_fd, &one, sizeof(one));
        (void)n;
    }
    pthread_mutex_unlock(&box->lock);
}

struct mail *mailbox_take(struct mailbox *box)
{
    pthread_mutex_lock(&box->lock);
    struct mail *all = box->head;
    if (all) {
        uint64_t count;
        ssize_t n = read(box->event_fd, &count, sizeof(count));
        (void)n;
    }
    box->head = NULL;
    box->tail = &box->head;
    pthread_mutex_unlock(&box->lock);
    return all;
}

void mailbox_wait(struct mailbox *box, int timeout_ms)
{
    struct pollfd p = {.fd = box->event_fd, .events = POLLIN};
    poll(&p, 1, timeout_ms);
}
