#include "proto/wire/events.h"

#include <assert.h>

#include "base/endian.h"

enum { EVENTS_VERSION = 1 };

void events_encode(const struct events_header *h, const struct block_event *events, struct bytes *out)
{
    assert(h->count <= EVENTS_MAX);
    uint8_t b[EVENTS_HEADER_BYTES] = {0};
    put_u16(b, EVENTS_VERSION);
    put_u32(b + 4, h->count);
    put_u64(b + 8, h->incarnation);
    put_u64(b + 16, h->first_sequence);
    bytes_append(out, b, sizeof(b));
    for (uint32_t i = 0; i < h->count; i++) {
        uint8_t e[EVENT_BYTES] = {(uint8_t)events[i].kind, (uint8_t)events[i].tier};
        put_u32(e + 4, events[i].index);
        memcpy(e + 8, events[i].key.b, BLOCK_KEY_BYTES);
        bytes_append(out, e, sizeof(e));
    }
}

enum td_status events_decode(const void *data, size_t len_bytes, struct events_header *out)
{
    const uint8_t *b = data;
    if (len_bytes < EVENTS_HEADER_BYTES)
        return TD_ERR_PROTOCOL;
    if (get_u16(b) != EVENTS_VERSION)
        return TD_ERR_VERSION;
    struct events_header h = {
        .count = get_u32(b + 4), .incarnation = get_u64(b + 8), .first_sequence = get_u64(b + 16)};
    if (get_u16(b + 2) || h.count > EVENTS_MAX || len_bytes != EVENTS_HEADER_BYTES + (size_t)h.count * EVENT_BYTES)
        return TD_ERR_PROTOCOL;
    for (uint32_t i = 0; i < h.count; i++) {
        const uint8_t *e = b + EVENTS_HEADER_BYTES + (size_t)i * EVENT_BYTES;
        if (e[0] < BLOCK_ADDED || e[0] > BLOCK_CLEARED || e[1] > TIER_SSD || get_u16(e + 2))
            return TD_ERR_PROTOCOL;
    }
    *out = h;
    return TD_OK;
}

struct block_event events_at(const void *data, uint32_t i)
{
    const uint8_t *e = (const uint8_t *)data + EVENTS_HEADER_BYTES + (size_t)i * EVENT_BYTES;
    struct block_event ev = {.kind = e[0], .tier = e[1], .index = get_u32(e + 4)};
    memcpy(ev.key.b, e + 8, BLOCK_KEY_BYTES);
    return ev;
}
