#include "transfer/staging.h"

#include <assert.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum buffer_state { BUFFER_FREE, BUFFER_COPYING_OUT, BUFFER_HELD, BUFFER_COPYING_IN };

struct buffer {
    enum buffer_state state;
    uint32_t next; /* in the list of free ones, or of copies in the order begun */
    uint64_t ticket;
    staging_done_fn *done;
    void *arg;
};

enum { NONE = UINT32_MAX };

struct staging {
    struct staging_ops ops;
    uint32_t n_buffers, n_free;
    size_t buffer_bytes;
    uint8_t *base;
    struct buffer *buffers;
    uint32_t free_head;            /* the one used last is taken first: it may still be in a cache */
    uint32_t copy_head, copy_tail; /* NONE: none */
};

static bool is_legal(enum buffer_state from, enum buffer_state to)
{
    static const uint8_t NEXT[] = {
        [BUFFER_FREE] = 1 << BUFFER_COPYING_OUT | 1 << BUFFER_HELD,
        [BUFFER_COPYING_OUT] = 1 << BUFFER_HELD | 1 << BUFFER_FREE,
        [BUFFER_HELD] = 1 << BUFFER_COPYING_IN | 1 << BUFFER_FREE,
        [BUFFER_COPYING_IN] = 1 << BUFFER_FREE,
    };
    return NEXT[from] >> to & 1;
}

static void set_state(struct staging *s, uint32_t buffer, enum buffer_state to)
{
    assert(buffer < s->n_buffers && is_legal(s->buffers[buffer].state, to));
    s->buffers[buffer].state = to;
}

static uint32_t pop_free(struct staging *s)
{
    uint32_t buffer = s->free_head;
    if (buffer == NONE)
        return NONE;
    s->free_head = s->buffers[buffer].next;
    s->n_free--;
    return buffer;
}

static void push_free(struct staging *s, uint32_t buffer)
{
    s->buffers[buffer].next = s->free_head;
    s->free_head = buffer;
    s->n_free++;
}

static void push_copy(struct staging *s, uint32_t buffer, uint64_t ticket, staging_done_fn *done, void *arg)
{
    struct buffer *b = &s->buffers[buffer];
    b->ticket = ticket;
    b->done = done;
    b->arg = arg;
    b->next = NONE;
    if (s->copy_head == NONE)
        s->copy_head = buffer;
    else
        s->buffers[s->copy_tail].next = buffer;
    s->copy_tail = buffer;
}

enum td_status staging_open(const struct staging_config *config, struct staging **out, struct td_error *error_out)
{
    size_t len_bytes = 0;
    void *base = NULL;
    if (!config->n_buffers || config->n_buffers == NONE || !config->buffer_bytes ||
        __builtin_mul_overflow((size_t)config->n_buffers, config->buffer_bytes, &len_bytes))
        return td_fail(error_out, TD_ERR_INVALID, "staging: %u buffers of %zu bytes", config->n_buffers,
                       config->buffer_bytes);
    enum td_status status = config->ops->alloc(config->ops->user, len_bytes, &base);
    if (status)
        return td_fail(error_out, status, "staging: no memory for %u buffers of %zu bytes", config->n_buffers,
                       config->buffer_bytes);
    struct staging *s = mem_zalloc(sizeof(*s));
    s->ops = *config->ops;
    s->n_buffers = config->n_buffers;
    s->buffer_bytes = config->buffer_bytes;
    s->base = base;
    s->buffers = mem_array(s->n_buffers, sizeof(s->buffers[0]));
    s->free_head = s->copy_head = s->copy_tail = NONE;
    for (uint32_t i = s->n_buffers; i-- > 0;)
        push_free(s, i);
    *out = s;
    return TD_OK;
}

void staging_close(struct staging *s)
{
    if (!s)
        return;
    while (s->copy_head != NONE) /* the device may be writing to memory that goes */
        if (!staging_progress(s))
            sched_yield();
    assert(s->n_free == s->n_buffers);
    s->ops.free(s->ops.user, s->base, s->n_buffers * s->buffer_bytes);
    free(s->buffers);
    free(s);
}

enum td_status staging_out(struct staging *s, uint64_t device_from, size_t len_bytes, staging_done_fn *done, void *arg)
{
    if (!len_bytes || len_bytes > s->buffer_bytes)
        return TD_ERR_INVALID;
    uint32_t buffer = pop_free(s);
    uint64_t ticket;
    if (buffer == NONE)
        return TD_BUSY;
    enum td_status status = s->ops.copy_out(s->ops.user, staging_bytes(s, buffer), device_from, len_bytes, &ticket);
    if (status) {
        push_free(s, buffer);
        return status;
    }
    set_state(s, buffer, BUFFER_COPYING_OUT);
    push_copy(s, buffer, ticket, done, arg);
    return TD_OK;
}

enum td_status staging_take(struct staging *s, uint32_t *buffer_out)
{
    uint32_t buffer = pop_free(s);
    if (buffer == NONE)
        return TD_BUSY;
    set_state(s, buffer, BUFFER_HELD);
    *buffer_out = buffer;
    return TD_OK;
}

enum td_status staging_in(struct staging *s, uint32_t buffer, uint64_t device_to, size_t len_bytes,
                          staging_done_fn *done, void *arg)
{
    uint64_t ticket;
    assert(buffer < s->n_buffers && s->buffers[buffer].state == BUFFER_HELD);
    if (!len_bytes || len_bytes > s->buffer_bytes)
        return TD_ERR_INVALID;
    enum td_status status = s->ops.copy_in(s->ops.user, device_to, staging_bytes(s, buffer), len_bytes, &ticket);
    if (status)
        return status;
    set_state(s, buffer, BUFFER_COPYING_IN);
    push_copy(s, buffer, ticket, done, arg);
    return TD_OK;
}

void staging_release(struct staging *s, uint32_t buffer)
{
    assert(buffer < s->n_buffers && s->buffers[buffer].state == BUFFER_HELD);
    set_state(s, buffer, BUFFER_FREE);
    push_free(s, buffer);
}

void *staging_bytes(const struct staging *s, uint32_t buffer)
{
    assert(buffer < s->n_buffers);
    return s->base + buffer * s->buffer_bytes;
}

uint32_t staging_n_free(const struct staging *s)
{
    return s->n_free;
}

bool staging_progress(struct staging *s)
{
    bool any = false;
    while (s->copy_head != NONE) {
        uint32_t buffer = s->copy_head;
        struct buffer *b = &s->buffers[buffer];
        enum td_status status = s->ops.poll(s->ops.user, b->ticket);
        if (status == TD_NOT_YET)
            break;
        s->copy_head = b->next;
        bool is_held = b->state == BUFFER_COPYING_OUT && !status;
        set_state(s, buffer, is_held ? BUFFER_HELD : BUFFER_FREE);
        if (!is_held)
            push_free(s, buffer);
        b->done(b->arg, buffer, status); /* may begin another copy, in this buffer even */
        any = true;
    }
    return any;
}

/* ------------------------------------------------------------- plain memory */

static enum td_status plain_alloc(void *user, size_t len_bytes, void **out)
{
    (void)user;
    return mem_map(len_bytes, out);
}

static void plain_free(void *user, void *base, size_t len_bytes)
{
    (void)user;
    mem_unmap(base, len_bytes);
}

static enum td_status plain_copy_out(void *user, void *to, uint64_t device_from, size_t len_bytes, uint64_t *ticket_out)
{
    (void)user;
    memcpy(to, (const void *)(uintptr_t)device_from, len_bytes);
    *ticket_out = 0;
    return TD_OK;
}

static enum td_status plain_copy_in(void *user, uint64_t device_to, const void *from, size_t len_bytes,
                                    uint64_t *ticket_out)
{
    (void)user;
    memcpy((void *)(uintptr_t)device_to, from, len_bytes);
    *ticket_out = 0;
    return TD_OK;
}

static enum td_status plain_poll(void *user, uint64_t ticket)
{
    (void)user;
    (void)ticket;
    return TD_OK;
}

const struct staging_ops STAGING_PLAIN = {NULL, plain_alloc, plain_free, plain_copy_out, plain_copy_in, plain_poll};
