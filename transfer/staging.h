/*
 * A ring of host buffers between the wire and memory that the wire can't reach: a device's. On the holder's side a part of a page
 * is copied out into a buffer and sent from there; on the reader's it lands in a buffer, is checked, and is copied in.
 *
 *     FREE --staging_out--> COPYING_OUT --done--> HELD --staging_release--> FREE
 *     FREE --staging_take--> HELD --staging_in--> COPYING_IN --done--> FREE
 *
 * The copies belong to a backend that starts them and is asked whether they are done: streams and events with CUDA, whose
 * buffers are pinned; plain memory in staging_plain_ops, which is what tests and machines without a device use. Copies end in the
 * order in which they were begun. n_buffers bounds what is on its way between wire and device: with none free the answer is
 * TD_BUSY, and the caller tries again when one was given back, so a slow device slows its own transfers only.
 *
 * Ownership: the ring owns the buffers. A HELD one is its taker's until released or copied in. Callbacks come from
 * staging_progress alone, exactly once for each copy begun, also when it fails.
 *
 * Threads: one, that of the xfer. Errors: what the backend says, TD_ERR_DEVICE as a rule, goes to the callback.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct staging;

struct staging_ops {
    void *user;
    enum td_status (*alloc)(void *user, size_t len_bytes, void **out); /* of all buffers, at once */
    void (*free)(void *user, void *base, size_t len_bytes);
    /* Begin a copy and name it; addresses of the device are its own business. A failure to begin names nothing. */
    enum td_status (*copy_out)(void *user, void *to, uint64_t device_from, size_t len_bytes, uint64_t *ticket_out);
    enum td_status (*copy_in)(void *user, uint64_t device_to, const void *from, size_t len_bytes, uint64_t *ticket_out);
    enum td_status (*poll)(void *user, uint64_t ticket); /* TD_NOT_YET, or how it ended */
};

/* The device is this process's memory, its addresses are pointers; a copy is done when it is begun. */
extern const struct staging_ops STAGING_PLAIN;

struct staging_config {
    const struct staging_ops *ops; /* copied; user borrowed */
    uint32_t n_buffers;            /* >= 1 */
    size_t buffer_bytes;           /* the longest part */
};

enum td_status staging_open(const struct staging_config *config, struct staging **out, struct td_error *error_out);
/* Waits for copies that were begun, and calls back. NULL is fine; no buffer may be HELD but by those callbacks. */
void staging_close(struct staging *s);

/* buffer: number of a buffer that is HELD now if status is TD_OK, after copying out; after copying in, or failing, it is FREE. */
typedef void staging_done_fn(void *arg, uint32_t buffer, enum td_status status);

/* From the device into a free buffer. TD_BUSY: none is. TD_ERR_INVALID: longer than a buffer. On failure no callback comes. */
enum td_status staging_out(struct staging *s, uint64_t device_from, size_t len_bytes, staging_done_fn *done, void *arg);

/* A free buffer, to be filled by the wire. TD_BUSY. */
enum td_status staging_take(struct staging *s, uint32_t *buffer_out);
/* From a HELD buffer to the device. On failure it stays HELD, and no callback comes. */
enum td_status staging_in(struct staging *s, uint32_t buffer, uint64_t device_to, size_t len_bytes,
                          staging_done_fn *done, void *arg);

void staging_release(struct staging *s, uint32_t buffer); /* HELD */
void *staging_bytes(const struct staging *s, uint32_t buffer);
uint32_t staging_n_free(const struct staging *s);

/* Asks after copies and calls back. True if any ended. */
bool staging_progress(struct staging *s);
