#include "transfer/wire_wrap.h"

#include <stdio.h>
#include <stdlib.h>

void wrap_conn_init(struct wrap_wire *w, struct wrap_conn *c)
{
    c->base.wire = &w->base;
    LIST_INSERT_HEAD(&w->conns, c, in_wire);
}

void wrap_accept(struct wrap_wire *w, struct wrap_conn *c, struct wire_conn *inner)
{
    c->inner = inner;
    w->base.events.on_accept(w->base.events.user, &c->base);
    if (c->base.user) {
        inner->user = c;
        return;
    }
    LIST_REMOVE(c, in_wire);
    free(c);
}

void wrap_tell_error(struct wrap_conn *c, enum td_status why)
{
    if (c->error_told || c->is_closing)
        return;
    c->error_told = true;
    wrap_events(c)->on_error(c->base.user, why);
}

bool wrap_reap(struct wrap_wire *w, bool (*is_over)(const struct wrap_conn *c))
{
    struct wrap_conn *c;
    LIST_FOREACH (c, &w->conns, in_wire)
        if (c->is_closing && !c->inner && is_over(c))
            break;
    if (!c)
        return false;
    void *user = c->base.user;
    LIST_REMOVE(c, in_wire);
    free(c);
    w->base.events.on_closed(user);
    return true;
}

void wrap_boot_id(char out[WRAP_BOOT_ID_BYTES])
{
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (!f || fread(out, 1, WRAP_BOOT_ID_BYTES, f) != WRAP_BOOT_ID_BYTES)
        out[0] = 0;
    if (f)
        fclose(f);
}

void wrap_on_open(void *user)
{
    struct wrap_conn *c = user;
    if (!c->is_closing)
        wrap_events(c)->on_open(c->base.user);
}

void wrap_on_message(void *user, const uint8_t *header, uint32_t header_len)
{
    struct wrap_conn *c = user;
    if (!c->is_closing)
        wrap_events(c)->on_message(c->base.user, header, header_len);
}

void *wrap_on_payload(void *user, const uint8_t *header, uint32_t header_len, uint64_t payload_len, void **token_out)
{
    struct wrap_conn *c = user;
    return c->is_closing ? NULL : wrap_events(c)->on_payload(c->base.user, header, header_len, payload_len, token_out);
}

void wrap_land(void *user, void *token, void *to, const void *from, uint64_t len_bytes)
{
    struct wrap_conn *c = user;
    wire_land(wrap_events(c), c->base.user, token, to, from, len_bytes);
}

void wrap_on_payload_done(void *user, void *token, enum td_status status)
{
    struct wrap_conn *c = user;
    wrap_events(c)->on_payload_done(c->base.user, token, status);
}

void wrap_on_transport(void *user)
{
    struct wrap_conn *c = user;
    if (!c->is_closing && wrap_events(c)->on_transport)
        wrap_events(c)->on_transport(c->base.user);
}

void wrap_on_error(void *user, enum td_status why)
{
    wrap_tell_error(user, why);
}

void wrap_on_closed(void *user)
{
    struct wrap_conn *c = user;
    c->inner = NULL;
}
