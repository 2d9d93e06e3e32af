#include "transfer/xfer_msg.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/endian.h"
#include "base/mem.h"

/* --------------------------------------------------------------------- seal */

uint32_t xfer_msg_seal(uint8_t *message, uint32_t len, uint32_t number)
{
    put_u32(message + len, number);
    put_u32(message + len + 4, (uint32_t)XXH3_64bits(message, len + 4));
    return len + XFER_MSG_SEAL_BYTES;
}

enum td_status xfer_msg_unseal(const uint8_t *data, uint32_t *len_bytes, uint32_t number, struct td_error *error_out)
{
    uint32_t len = *len_bytes - XFER_MSG_SEAL_BYTES;
    if (*len_bytes < 8 + XFER_MSG_SEAL_BYTES)
        return td_fail(error_out, TD_ERR_PROTOCOL, "transfer message: short (%u bytes)", *len_bytes);
    if (get_u32(data + len + 4) != (uint32_t)XXH3_64bits(data, len + 4))
        return td_fail(error_out, TD_ERR_PROTOCOL, "transfer message: damaged (%u bytes)", *len_bytes);
    if (get_u32(data + len) != number)
        return td_fail(error_out, TD_ERR_PROTOCOL, "transfer message: number %u instead of %u", get_u32(data + len),
                       number);
    *len_bytes = len;
    return TD_OK;
}

/* ------------------------------------------------------------------- encode */

static void put_head(uint8_t *out, enum xfer_msg_type type, uint16_t a, uint32_t b)
{
    put_u16(out, (uint16_t)type);
    put_u16(out + 2, a);
    put_u32(out + 4, b);
}

static void put_id(uint8_t *out, struct xfer_id id)
{
    put_u64(out, id.incarnation);
    put_u64(out + 8, id.counter);
}

uint32_t xfer_msg_put_hello(uint8_t *out, const struct xfer_msg_hello *m)
{
    uint32_t n = (uint32_t)strnlen(m->name, XFER_MSG_NAME_MAX);
    put_head(out, MSG_HELLO, XFER_MSG_VERSION, n);
    put_u64(out + 8, m->incarnation);
    memcpy(out + 16, m->nonce, XFER_MSG_NONCE_BYTES);
    kv_layout_encode(&m->layout, out + 32);
    memcpy(out + 56, m->name, n);
    return 56 + n;
}

uint32_t xfer_msg_put_auth(uint8_t *out, const uint8_t mac[XFER_MSG_MAC_BYTES])
{
    put_head(out, MSG_AUTH, 0, 0);
    memcpy(out + 8, mac, XFER_MSG_MAC_BYTES);
    return 8 + XFER_MSG_MAC_BYTES;
}

uint32_t xfer_msg_put_heartbeat(uint8_t *out)
{
    put_head(out, MSG_HEARTBEAT, 0, 0);
    return 8;
}

uint32_t xfer_msg_put_goodbye(uint8_t *out, int is_reply, enum td_status status)
{
    put_head(out, MSG_GOODBYE, is_reply ? 1 : 0, (uint32_t)status);
    return 8;
}

uint32_t xfer_msg_put_pull_open(uint8_t *out, struct xfer_id id, uint64_t holder_incarnation)
{
    put_head(out, MSG_PULL_OPEN, 0, 0);
    put_id(out + 8, id);
    put_u64(out + 24, holder_incarnation);
    return 32;
}

uint32_t xfer_msg_put_unit(uint8_t *out, enum xfer_msg_type announce_or_pull, const struct xfer_msg_unit *m)
{
    put_head(out, announce_or_pull, m->n, m->first);
    put_id(out + 8, m->id);
    put_u16(out + 24, m->layer_begin);
    put_u16(out + 26, m->layer_end);
    put_u16(out + 28, announce_or_pull == MSG_PULL ? m->part_layers : 0);
    put_u16(out + 30, 0);
    for (uint32_t i = 0; i < m->n; i++)
        put_u32(out + 32 + 4 * i, m->generations[i]);
    return 32 + 4u * m->n;
}

uint32_t xfer_msg_put_finish(uint8_t *out, struct xfer_id id, uint32_t n_pages, const void *tail, uint32_t tail_len)
{
    put_head(out, MSG_FINISH, (uint16_t)tail_len, n_pages);
    put_id(out + 8, id);
    if (tail_len)
        memcpy(out + 24, tail, tail_len);
    return 24 + tail_len;
}

uint32_t xfer_msg_put_data(uint8_t *out, const struct xfer_msg_data *m)
{
    put_head(out, MSG_DATA, 0, m->index);
    put_id(out + 8, m->id);
    put_u16(out + 24, m->layer_begin);
    put_u16(out + 26, m->layer_end);
    put_u32(out + 28, m->generation);
    put_u64(out + 32, m->checksum);
    return 40;
}

uint32_t xfer_msg_put_refuse(uint8_t *out, struct xfer_id id, enum xfer_msg_reason reason)
{
    put_head(out, MSG_REFUSE, (uint16_t)reason, 0);
    put_id(out + 8, id);
    return 24;
}

uint32_t xfer_msg_put_release(uint8_t *out, struct xfer_id id, enum td_status status)
{
    put_head(out, MSG_RELEASE, 0, (uint32_t)status);
    put_id(out + 8, id);
    return 24;
}

uint32_t xfer_msg_put_user(uint8_t *out, uint16_t kind, uint32_t total_len, uint32_t offset, const void *bytes,
                           uint32_t len)
{
    put_head(out, MSG_USER, kind, total_len);
    put_u32(out + 8, offset);
    put_u32(out + 12, 0);
    if (len)
        memcpy(out + XFER_MSG_USER_HEADER, bytes, len);
    return XFER_MSG_USER_HEADER + len;
}

/* ------------------------------------------------------------------- decode */

struct input {
    const uint8_t *p;
    size_t len;
    struct td_error *error_out;
};

static enum td_status bad(const struct input *in, const char *what)
{
    return td_fail(in->error_out, TD_ERR_PROTOCOL, "transfer message: %s (%zu bytes)", what, in->len);
}

static struct xfer_id get_id(const uint8_t *p)
{
    return (struct xfer_id){get_u64(p), get_u64(p + 8)};
}

/* A status as it is sent: 0 or an error, not a positive "not yet". */
static int is_error(enum td_status s)
{
    return s <= 0 && s >= -255;
}

static enum td_status get_hello(const struct input *in, struct xfer_msg *m)
{
    uint16_t version = get_u16(in->p + 2);
    if (version != XFER_MSG_VERSION)
        return td_fail(in->error_out, TD_ERR_VERSION, "hello.version differs: ours %d, theirs %u", XFER_MSG_VERSION,
                       version);
    uint32_t n = get_u32(in->p + 4);
    if (n > XFER_MSG_NAME_MAX || in->len != 56 + (size_t)n)
        return bad(in, "hello.name_len");
    m->hello.incarnation = get_u64(in->p + 8);
    if (!m->hello.incarnation)
        return bad(in, "hello.incarnation is 0");
    memcpy(m->hello.nonce, in->p + 16, XFER_MSG_NONCE_BYTES);
    enum td_status s = kv_layout_decode(in->p + 32, KV_LAYOUT_WIRE_BYTES, &m->hello.layout, in->error_out);
    if (s)
        return s == TD_ERR_VERSION ? s : TD_ERR_PROTOCOL;
    for (uint32_t i = 0; i < n; i++) /* names are shown to people: printable ASCII only */
        if (in->p[56 + i] < 0x20 || in->p[56 + i] > 0x7e)
            return bad(in, "hello.name");
    memcpy(m->hello.name, in->p + 56, n);
    m->hello.name[n] = 0;
    return TD_OK;
}

static enum td_status get_unit(const struct input *in, struct xfer_msg *m)
{
    if (in->len < 32)
        return bad(in, "unit is short");
    struct xfer_msg_unit *u = &m->unit;
    u->n = get_u16(in->p + 2);
    u->first = get_u32(in->p + 4);
    u->id = get_id(in->p + 8);
    u->layer_begin = get_u16(in->p + 24);
    u->layer_end = get_u16(in->p + 26);
    u->part_layers = get_u16(in->p + 28);
    if (u->n < 1 || u->n > XFER_MSG_UNIT_PAGES || in->len != 32 + 4 * (size_t)u->n)
        return bad(in, "unit.n_pages");
    if (get_u16(in->p + 30) || (m->type == MSG_ANNOUNCE && u->part_layers))
        return bad(in, "unit.part_layers");
    if (u->first > (uint32_t)XFER_MSG_PAGES_MAX - u->n)
        return bad(in, "unit.first_index");
    if (u->layer_begin >= u->layer_end || u->layer_end > XFER_MSG_LAYERS_MAX)
        return bad(in, "unit.layers");
    for (uint32_t i = 0; i < u->n; i++)
        u->generations[i] = get_u32(in->p + 32 + 4 * i);
    return TD_OK;
}

static enum td_status get_data(const struct input *in, struct xfer_msg *m)
{
    if (in->len != 40 || get_u16(in->p + 2))
        return bad(in, "data header");
    struct xfer_msg_data *d = &m->data;
    d->index = get_u32(in->p + 4);
    d->id = get_id(in->p + 8);
    d->layer_begin = get_u16(in->p + 24);
    d->layer_end = get_u16(in->p + 26);
    d->generation = get_u32(in->p + 28);
    d->checksum = get_u64(in->p + 32);
    if (d->index >= XFER_MSG_PAGES_MAX || d->layer_begin >= d->layer_end || d->layer_end > XFER_MSG_LAYERS_MAX)
        return bad(in, "data.index or layers");
    return TD_OK;
}

static enum td_status get_finish(const struct input *in, struct xfer_msg *m)
{
    if (in->len < 24)
        return bad(in, "finish is short");
    m->finish.tail_len = get_u16(in->p + 2);
    m->finish.n_pages = get_u32(in->p + 4);
    m->finish.id = get_id(in->p + 8);
    m->finish.tail = in->p + 24;
    if (m->finish.tail_len > XFER_MSG_TAIL_MAX || in->len != 24 + (size_t)m->finish.tail_len)
        return bad(in, "finish.tail_len");
    return m->finish.n_pages <= XFER_MSG_PAGES_MAX ? TD_OK : bad(in, "finish.n_pages");
}

static enum td_status get_user(const struct input *in, struct xfer_msg *m)
{
    if (in->len < XFER_MSG_USER_HEADER || in->len > WIRE_HEADER_MAX || get_u32(in->p + 12))
        return bad(in, "user header");
    m->user.kind = get_u16(in->p + 2);
    m->user.total_len = get_u32(in->p + 4);
    m->user.offset = get_u32(in->p + 8);
    m->user.len = (uint32_t)in->len - XFER_MSG_USER_HEADER;
    m->user.bytes = in->p + XFER_MSG_USER_HEADER;
    if (m->user.total_len > XFER_MSG_USER_MAX || m->user.offset > m->user.total_len ||
        m->user.len > m->user.total_len - m->user.offset)
        return bad(in, "user.total_len");
    return m->user.len || !m->user.total_len ? TD_OK : bad(in, "user part is empty");
}

/* Messages of fixed length, 8 to 40 bytes. */
static enum td_status get_small(const struct input *in, struct xfer_msg *m)
{
    static const uint8_t LENGTHS[] = {
        [MSG_AUTH] = 40,      [MSG_HEARTBEAT] = 8, [MSG_GOODBYE] = 8,
        [MSG_PULL_OPEN] = 32, [MSG_REFUSE] = 24,   [MSG_RELEASE] = 24,
    };
    if (in->len != LENGTHS[m->type])
        return bad(in, "length");
    uint16_t a = get_u16(in->p + 2);
    uint32_t b = get_u32(in->p + 4);
    switch (m->type) {
    case MSG_AUTH:
        m->mac = in->p + 8;
        return a || b ? bad(in, "auth") : TD_OK;
    case MSG_GOODBYE:
        m->goodbye.is_reply = a;
        m->goodbye.status = (enum td_status)(int32_t)b;
        return a > 1 || !is_error(m->goodbye.status) ? bad(in, "goodbye") : TD_OK;
    case MSG_PULL_OPEN:
        m->open.id = get_id(in->p + 8);
        m->open.holder_incarnation = get_u64(in->p + 24);
        return a || b ? bad(in, "pull_open") : TD_OK;
    case MSG_REFUSE:
        m->refuse.id = get_id(in->p + 8);
        m->refuse.reason = (enum xfer_msg_reason)a;
        return a < REFUSE_NOT_YET || a > REFUSE_CANCELLED || b ? bad(in, "refuse.reason") : TD_OK;
    case MSG_RELEASE:
        m->release.id = get_id(in->p + 8);
        m->release.status = (enum td_status)(int32_t)b;
        return a || !is_error(m->release.status) ? bad(in, "release.status") : TD_OK;
    default:
        return a || b ? bad(in, "heartbeat") : TD_OK;
    }
}

enum td_status xfer_msg_decode(const uint8_t *data, size_t len_bytes, struct xfer_msg *out, struct td_error *error_out)
{
    struct input in = {data, len_bytes, error_out};
    if (len_bytes < 8)
        return bad(&in, "short");
    uint16_t type = get_u16(data);
    if (type < MSG_HELLO || type > MSG_USER)
        return bad(&in, "unknown type");
    out->type = (enum xfer_msg_type)type;
    switch (out->type) {
    case MSG_HELLO:
        return get_hello(&in, out);
    case MSG_ANNOUNCE:
    case MSG_PULL:
        return get_unit(&in, out);
    case MSG_DATA:
        return get_data(&in, out);
    case MSG_FINISH:
        return get_finish(&in, out);
    case MSG_USER:
        return get_user(&in, out);
    default:
        return get_small(&in, out);
    }
}

/* --------------------------------------------------------------------- auth */

struct bytes xfer_msg_said(char role, const uint8_t *connecting, uint32_t connecting_len, const uint8_t *accepting,
                           uint32_t accepting_len)
{
    struct bytes b = {0};
    bytes_append(&b, "tandem-xfer-1", 13);
    bytes_append(&b, &role, 1);
    bytes_append(&b, connecting, connecting_len);
    bytes_append(&b, accepting, accepting_len);
    return b;
}
