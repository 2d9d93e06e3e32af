/*
 * What workers and stores, and workers among themselves, say to one another, as messages of the transfer layer (xfer_send). KV bytes never travel here:
 * they are pulled under leases that these messages name.
 *
 *   reading:  worker --LOOKUP(id, keys)--> store   the store pins the longest stored prefix of keys and grants lease id over
 *             it, also when it is empty; the worker pulls id as soon as it has pages (a pull may overtake its lease). The
 *             lease's tail is STORE_FOUND. Another worker answers a LOOKUP in the same way, from its pool.
 *   writing:  worker --OFFER(id, keys)--> store --WANT(id, which)--> worker   the worker then grants lease id over those
 *             blocks, in that order; the store pulls them.
 *
 * Layouts, little-endian. LOOKUP and OFFER:
 *      0  u16 version (2)   2  u16 n_keys (1..4096)   4  u32 index of the first key's block in its chain
 *      8  u64 id.incarnation   16  u64 id.counter   24  keys, 16 bytes each
 *      then, in an OFFER: u16 length (1..255) and bytes of the transfer address that WANT goes to and that is pulled from;
 *      u32 tenant that asked for the blocks
 * WANT:
 *      0  u16 version (2)   2  u16 n (0..4096)   4  u32 reserved, 0   8  u64 id.incarnation  16  u64 id.counter
 *     24  u16 each: position in the offer's keys, ascending
 * FOUND (tail of a lease):
 *      0  u16 version (2)   2  u16 reserved, 0   4  u32 n_dram   8  u32 n_ssd
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/mem.h"
#include "base/status.h"
#include "proto/wire/block_key.h"

enum store_msg_kind { STORE_LOOKUP = 1, STORE_OFFER = 2, STORE_WANT = 3 }; /* xfer_send's kind */
enum {
    STORE_MSG_VERSION = 2,
    STORE_MAX_KEYS = 4096,
    STORE_MSG_HEADER_BYTES = 24,
    STORE_FOUND_BYTES = 12,
    STORE_ADDRESS_MAX = 255
};

struct store_keys_msg { /* LOOKUP, OFFER */
    uint64_t id_incarnation, id_counter;
    uint32_t first_index;
    uint16_t n_keys;
    const uint8_t *keys;  /* n_keys * BLOCK_KEY_BYTES; borrowed from the message */
    const char *address;  /* OFFER: of the sender, not terminated; borrowed too */
    uint16_t address_len; /* 0: none, and nothing of it and of the tenant on the wire */
    uint32_t tenant;      /* OFFER */
};

struct store_want_msg {
    uint64_t id_incarnation, id_counter;
    uint16_t n;
    const uint8_t *positions; /* u16 each; store_want_at() */
};

struct store_found {
    uint32_t n_dram, n_ssd;
};

/* What a store knows of a tenant's name: some hash; 0 of "default" and of no name, and of no other. */
uint32_t store_tenant(const char *name, size_t len_bytes);

void store_keys_encode(const struct store_keys_msg *m, struct bytes *out);
enum td_status store_keys_decode(const void *data, size_t len_bytes, struct store_keys_msg *out);
static inline struct block_key store_keys_at(const struct store_keys_msg *m, uint32_t i)
{
    struct block_key k;
    memcpy(k.b, m->keys + (size_t)i * BLOCK_KEY_BYTES, BLOCK_KEY_BYTES);
    return k;
}

void store_want_encode(uint64_t id_incarnation, uint64_t id_counter, const uint16_t *positions, uint16_t n,
                       struct bytes *out);
/* Positions ascend; whether they lie within the offer is for the one who made it to check. */
enum td_status store_want_decode(const void *data, size_t len_bytes, struct store_want_msg *out);
uint16_t store_want_at(const struct store_want_msg *m, uint32_t i);

void store_found_encode(const struct store_found *f, uint8_t out[STORE_FOUND_BYTES]);
enum td_status store_found_decode(const void *data, size_t len_bytes, struct store_found *out);
