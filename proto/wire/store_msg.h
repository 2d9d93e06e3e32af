/*
 * Messages between workers and stores, and between workers, sent by the transfer layer (xfer_send). They
 * carry no KV bytes: those are pulled under leases that the messages name.
 *
 *   reading:  worker --LOOKUP(id, keys)--> store
 *             The store pins the longest stored prefix of keys and grants lease id over it, even if it is
 *             empty. The worker pulls id as soon as it has pages (the pull may arrive before the lease is
 *             granted). The lease's tail is STORE_FOUND. Another worker answers a LOOKUP in the same way,
 *             from its pool.
 *   writing:  worker --OFFER(id, keys)--> store --WANT(id, which)--> worker
 *             The worker then grants lease id over those blocks, in that order, and the store pulls them.
 *
 * Layouts, little-endian. LOOKUP and OFFER:
 *      0  u16 version (2)   2  u16 n_keys (1..4096)   4  u32 index of the first key's block in its chain
 *      8  u64 id.incarnation   16  u64 id.counter   24  keys, 16 bytes each
 *      then, in an OFFER only: u16 length (1..255) and bytes of the transfer address to which WANT is sent
 *      and from which the store pulls; u32 tenant that asked for the blocks
 * WANT:
 *      0  u16 version (2)   2  u16 n (0..4096)  4  u32 reserved, 0  8  u64 id.incarnation  16  u64 id.counter
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

struct store_keys_msg { /* LOOKUP and OFFER */
    uint64_t id_incarnation, id_counter;
    uint32_t first_index;
    uint16_t n_keys;
    const uint8_t *keys; /* n_keys * BLOCK_KEY_BYTES; borrowed from the message */
    /* OFFER: the sender's transfer address, not terminated; borrowed from the message. */
    const char *address;
    uint16_t address_len; /* 0: neither address nor tenant is in the message */
    uint32_t tenant;      /* in an OFFER */
};

struct store_want_msg {
    uint64_t id_incarnation, id_counter;
    uint16_t n;
    const uint8_t *positions; /* u16 each, not aligned; read with store_want_at() */
};

struct store_found {
    uint32_t n_dram, n_ssd;
};

/* A store's id of a tenant: a hash of its name; 0 for "default" and for no name, and only for these. */
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
/* Checks that positions ascend. The sender of the offer must check that they lie within it. */
enum td_status store_want_decode(const void *data, size_t len_bytes, struct store_want_msg *out);
uint16_t store_want_at(const struct store_want_msg *m, uint32_t i);

void store_found_encode(const struct store_found *f, uint8_t out[STORE_FOUND_BYTES]);
enum td_status store_found_decode(const void *data, size_t len_bytes, struct store_found *out);
