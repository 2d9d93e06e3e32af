/*
 * Prompts that a router wants to be kept or forgotten, by the keys of their blocks, whether these are stored
 * or not.
 *
 * At most half of the last tier (kvstore/table.h) is kept. Blocks beyond that are treated like others, also
 * when room for pins becomes free; a new pin, or a new offer of the block, keeps them then.
 */
#include <string.h>

#include "kvstore/kvstore_internal.h"

enum { KEPT_PART = 2 };

static struct block_key key_at(const void *keys, size_t i)
{
    struct block_key k;
    memcpy(k.b, (const uint8_t *)keys + i * BLOCK_KEY_BYTES, BLOCK_KEY_BYTES);
    return k;
}

static uint64_t most_kept(const struct kvstore *s)
{
    return (s->ssd ? ssd_tier_max_blocks(s->ssd) : table_audit(s->table).total) / KEPT_PART;
}

static void mark(struct kvstore *s, struct store_entry *e, bool kept)
{
    if (e->is_kept != kept && (!kept || table_kept(s->table) < most_kept(s)))
        table_set_kept(s->table, e, kept);
}

void pinned_added(struct kvstore *s, struct store_entry *e)
{
    if (pins_has(&s->pins, &e->key))
        mark(s, e, true);
}

void pinned_keep(struct kvstore *s, ProtobufCBinaryData keys, uint32_t ttl_ms)
{
    uint64_t until_ns = clock_now(&s->clock) + ttl_ms * NS_PER_MS;
    for (size_t i = 0; i < keys.len / BLOCK_KEY_BYTES; i++) {
        struct block_key key = key_at(keys.data, i);
        struct store_entry *e = table_find(s->table, &key);
        bool kept = ttl_ms && pins_keep(&s->pins, &key, until_ns);
        if (!kept)
            pins_drop(&s->pins, &key);
        if (e)
            mark(s, e, kept);
    }
}

static void pin_is_over(void *user, const struct block_key *key)
{
    struct kvstore *s = user;
    struct store_entry *e = table_find(s->table, key);
    if (e)
        mark(s, e, false);
}

static void add_key(void *user, const struct store_entry *e)
{
    bytes_append(user, e->key.b, BLOCK_KEY_BYTES);
}

/* Forgets doomed blocks that are not in use; the others stay doomed. */
static void forget_doomed(struct kvstore *s)
{
    struct bytes doomed = s->doomed;
    s->doomed = (struct bytes){0};
    for (size_t i = 0; i < doomed.len / BLOCK_KEY_BYTES; i++) {
        struct block_key key = key_at(doomed.data, i);
        struct store_entry *e = table_find(s->table, &key);
        if (e && !tier_forget(s, e))
            bytes_append(&s->doomed, key.b, BLOCK_KEY_BYTES);
        else
            tier_forget_on_disk(s, &key);
    }
    bytes_free(&doomed);
}

void pinned_forget(struct kvstore *s, ProtobufCBinaryData keys)
{
    for (size_t i = 0; i < keys.len / BLOCK_KEY_BYTES; i++) {
        struct block_key key = key_at(keys.data, i);
        pins_drop(&s->pins, &key);
        bytes_append(&s->doomed, key.b, BLOCK_KEY_BYTES);
    }
    if (!keys.len) {
        pins_free(&s->pins);
        tier_forget_on_disk(s, NULL);
        table_each(s->table, add_key, &s->doomed);
    }
    forget_doomed(s);
}

void pinned_tick(struct kvstore *s, uint64_t now)
{
    pins_expire(&s->pins, now, pin_is_over, s);
    forget_doomed(s);
}

void pinned_forget_in_use(struct kvstore *s)
{
    for (size_t i = 0; i < s->doomed.len / BLOCK_KEY_BYTES; i++) {
        struct block_key key = key_at(s->doomed.data, i);
        tier_forget_on_disk(s, &key);
    }
}
