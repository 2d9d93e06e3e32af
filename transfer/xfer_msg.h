/*
 * The messages of the transfer protocol, byte by byte. Little-endian; every message begins with its type. A
 * message whose reserved fields are not 0, or whose length is not exact, is refused. Decoding is total: any
 * bytes give a status, and pointers in a decoded message point into those bytes.
 *
 * HELLO      0 u16 1      2 u16 version (3)  4 u32 name_len (0..63)   8 u64 incarnation
 *           16 nonce[16] 32 kv_layout[24]   56 name[name_len]
 * AUTH       0 u16 2      2 u16 0            4 u32 0                  8 mac[32]
 * HEARTBEAT  0 u16 3      2 u16 0            4 u32 0
 * GOODBYE    0 u16 4      2 u16 is_reply     4 i32 status (0: a leave; else why the connection is refused)
 * PULL_OPEN  0 u16 5      2 u16 0            4 u32 0      8 id[16]   24 u64 holder incarnation (0: any)
 * ANNOUNCE   0 u16 6      2 u16 n (1..256)   4 u32 first  8 id[16]   24 u16 layer_begin  26 u16 layer_end
 *           28 u32 0     32 u32 generation[n]
 * PULL       0 u16 7      as ANNOUNCE, but 28 u16 part_layers (layers in one DATA; 0: no limit)  30 u16 0
 * FINISH     0 u16 8      2 u16 tail_len (0..256)  4 u32 n_pages      8 id[16]           24 tail[tail_len]
 * DATA       0 u16 9      2 u16 0            4 u32 index  8 id[16]   24 u16 layer_begin  26 u16 layer_end
 *           28 u32 generation                 32 u64 checksum         (the bytes follow as the payload)
 * REFUSE     0 u16 10     2 u16 reason       4 u32 0      8 id[16]
 * RELEASE    0 u16 11     2 u16 0            4 i32 status 8 id[16]
 * USER       0 u16 12     2 u16 kind         4 u32 total_len          8 u32 offset   12 u32 0   16 bytes[..]
 *
 * id is u64 incarnation, u64 counter. A user message longer than one header travels as consecutive USER
 * messages.
 *
 * Every message but DATA is sealed: 8 bytes follow it, u32 number (counts the sender's sealed messages on
 * this connection, from 1) and u32 check (low half of XXH3-64 over message and number). So a message that was
 * lost, repeated, overtaken, cut short or damaged is noticed at the next message, a heartbeat at the latest,
 * and ends the connection. DATA is not ordered with the sealed messages; its checksum covers all its fields
 * and the payload.
 *
 * The mac of AUTH is HMAC-SHA-256(secret, "tandem-xfer-1" || role || HELLO of the connecting side || HELLO of
 * the other side). role is 'c' for the connecting side and 'a' for the accepting one, so one side's proof
 * can't be sent back as the other's; name, layout and version are proved together with nonces and
 * incarnations.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/mem.h"
#include "base/secret.h"
#include "base/status.h"
#include "proto/wire/kv_layout.h"
#include "transfer/wire.h"
#include "transfer/xfer.h"

enum {
    XFER_MSG_VERSION = 3,
    XFER_MSG_SEAL_BYTES = 8,
    XFER_MSG_NAME_MAX = 63,
    XFER_MSG_NONCE_BYTES = 16,
    XFER_MSG_MAC_BYTES = SECRET_MAC_BYTES,
    XFER_MSG_UNIT_PAGES = 256,
    XFER_MSG_TAIL_MAX = 256,
    XFER_MSG_HELLO_MAX = 56 + XFER_MSG_NAME_MAX,
    XFER_MSG_USER_HEADER = 16,
    XFER_MSG_USER_PART = WIRE_HEADER_MAX - XFER_MSG_USER_HEADER - XFER_MSG_SEAL_BYTES,
    XFER_MSG_USER_MAX = 16 << 20, /* longest user message, in bytes */
    XFER_MSG_PAGES_MAX = 1 << 20, /* pages of one transfer */
    XFER_MSG_LAYERS_MAX = 1024,
};

enum xfer_msg_type { /* these values are sent: never renumber */
                     MSG_HELLO = 1,
                     MSG_AUTH = 2,
                     MSG_HEARTBEAT = 3,
                     MSG_GOODBYE = 4,
                     MSG_PULL_OPEN = 5,
                     MSG_ANNOUNCE = 6,
                     MSG_PULL = 7,
                     MSG_FINISH = 8,
                     MSG_DATA = 9,
                     MSG_REFUSE = 10,
                     MSG_RELEASE = 11,
                     MSG_USER = 12,
};

enum xfer_msg_reason { /* these values are sent: never renumber */
                       REFUSE_NOT_YET = 1,
                       /* Another incarnation or generation, or the lease has ended. */
                       REFUSE_STALE = 2,
                       REFUSE_UNKNOWN = 3,
                       REFUSE_EXPIRED = 4,
                       REFUSE_CANCELLED = 5,
};

struct xfer_msg_hello {
    uint64_t incarnation;
    uint8_t nonce[XFER_MSG_NONCE_BYTES];
    struct kv_layout layout;
    char name[XFER_MSG_NAME_MAX + 1];
};

struct xfer_msg_unit { /* pages [first, first + n) in layers [layer_begin, layer_end) */
    struct xfer_id id;
    uint32_t first;
    uint16_t n, layer_begin, layer_end, part_layers; /* part_layers: in PULL only */
    uint32_t generations[XFER_MSG_UNIT_PAGES];
};

struct xfer_msg_data {
    struct xfer_id id;
    uint32_t index, generation;
    uint16_t layer_begin, layer_end;
    uint64_t checksum;
};

struct xfer_msg { /* a decoded message; pointers point into the decoded bytes */
    enum xfer_msg_type type;
    union {
        struct xfer_msg_hello hello;
        const uint8_t *mac;
        struct {
            int is_reply;
            enum td_status status;
        } goodbye;
        struct {
            struct xfer_id id;
            uint64_t holder_incarnation;
        } open;
        struct xfer_msg_unit unit; /* of ANNOUNCE and PULL */
        struct {
            struct xfer_id id;
            uint32_t n_pages, tail_len;
            const uint8_t *tail;
        } finish;
        struct xfer_msg_data data;
        struct {
            struct xfer_id id;
            enum xfer_msg_reason reason;
        } refuse;
        struct {
            struct xfer_id id;
            enum td_status status;
        } release;
        struct {
            uint16_t kind;
            uint32_t total_len, offset, len;
            const uint8_t *bytes;
        } user;
    };
};

/* TD_ERR_PROTOCOL, or TD_ERR_VERSION for a HELLO with another protocol or layout version; error_out names
 * the field. */
enum td_status xfer_msg_decode(const uint8_t *data, size_t len_bytes, struct xfer_msg *out, struct td_error *error_out);

/* Appends the seal to a message of len bytes; returns the new length, len + XFER_MSG_SEAL_BYTES. */
uint32_t xfer_msg_seal(uint8_t *message, uint32_t len, uint32_t number);
/* Checks the seal and subtracts it from *len_bytes. TD_ERR_PROTOCOL: damaged, or not message `number`. */
enum td_status xfer_msg_unseal(const uint8_t *data, uint32_t *len_bytes, uint32_t number, struct td_error *error_out);

/* Each writes one message of at most WIRE_HEADER_MAX - XFER_MSG_SEAL_BYTES bytes, without seal, and returns
 * its length. */
uint32_t xfer_msg_put_hello(uint8_t *out, const struct xfer_msg_hello *m);
uint32_t xfer_msg_put_auth(uint8_t *out, const uint8_t mac[XFER_MSG_MAC_BYTES]);
uint32_t xfer_msg_put_heartbeat(uint8_t *out);
uint32_t xfer_msg_put_goodbye(uint8_t *out, int is_reply, enum td_status status);
uint32_t xfer_msg_put_pull_open(uint8_t *out, struct xfer_id id, uint64_t holder_incarnation);
uint32_t xfer_msg_put_unit(uint8_t *out, enum xfer_msg_type announce_or_pull, const struct xfer_msg_unit *m);
uint32_t xfer_msg_put_finish(uint8_t *out, struct xfer_id id, uint32_t n_pages, const void *tail, uint32_t tail_len);
uint32_t xfer_msg_put_data(uint8_t *out, const struct xfer_msg_data *m);
uint32_t xfer_msg_put_refuse(uint8_t *out, struct xfer_id id, enum xfer_msg_reason reason);
uint32_t xfer_msg_put_release(uint8_t *out, struct xfer_id id, enum td_status status);
uint32_t xfer_msg_put_user(uint8_t *out, uint16_t kind, uint32_t total_len, uint32_t offset, const void *bytes,
                           uint32_t len);

/* What the mac of AUTH signs. role: 'c' (connecting side) or 'a' (accepting side). connecting, accepting: the
 * HELLO messages as sent, without seal. The caller frees it. */
struct bytes xfer_msg_said(char role, const uint8_t *connecting, uint32_t connecting_len, const uint8_t *accepting,
                           uint32_t accepting_len);
