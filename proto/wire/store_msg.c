#include "proto/wire/store_msg.h"

#include <stdbool.h>
#include <string.h>
#include <xxhash.h>

#include "base/endian.h"

uint32_t store_tenant(const char *name, size_t len_bytes)
{
    if (!len_bytes || (len_bytes == 7 && !memcmp(name, "default", 7)))
        return 0;
    uint32_t id = (uint32_t)XXH3_64bits(name, len_bytes);
    return id ? id : 1;
}

static void put_header(uint8_t b[STORE_MSG_HEADER_BYTES], uint16_t n, uint32_t word, uint64_t incarnation,
                       uint64_t counter)
{
    put_u16(b, STORE_MSG_VERSION);
    put_u16(b + 2, n);
    put_u32(b + 4, word);
    put_u64(b + 8, incarnation);
    put_u64(b + 16, counter);
}

void store_keys_encode(const struct store_keys_msg *m, struct bytes *out)
{
    uint8_t b[STORE_MSG_HEADER_BYTES];
    put_header(b, m->n_keys, m->first_index, m->id_incarnation, m->id_counter);
    bytes_append(out, b, sizeof(b));
    bytes_append(out, m->keys, (size_t)m->n_keys * BLOCK_KEY_BYTES);
    if (m->address_len) {
        uint8_t len[2], tenant[4];
        put_u16(len, m->address_len);
        put_u32(tenant, m->tenant);
        bytes_append(out, len, sizeof(len));
        bytes_append(out, m->address, m->address_len);
        bytes_append(out, tenant, sizeof(tenant));
    }
}

static bool has_control(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (text[i] < 0x21 || text[i] > 0x7e)
            return true;
    return false;
}

/* Decodes what follows the keys: nothing, or an address and a tenant. */
static enum td_status decode_sender(const uint8_t *b, size_t len_bytes, struct store_keys_msg *m)
{
    if (!len_bytes)
        return TD_OK;
    if (len_bytes < 7 || get_u16(b) != len_bytes - 6 || get_u16(b) > STORE_ADDRESS_MAX)
        return TD_ERR_PROTOCOL;
    m->address = (const char *)b + 2;
    m->address_len = get_u16(b);
    m->tenant = get_u32(b + 2 + m->address_len);
    return has_control(m->address, m->address_len) ? TD_ERR_PROTOCOL : TD_OK;
}

enum td_status store_keys_decode(const void *data, size_t len_bytes, struct store_keys_msg *out)
{
    const uint8_t *b = data;
    if (len_bytes < STORE_MSG_HEADER_BYTES)
        return TD_ERR_PROTOCOL;
    if (get_u16(b) != STORE_MSG_VERSION)
        return TD_ERR_VERSION;
    struct store_keys_msg m = {.n_keys = get_u16(b + 2),
                               .first_index = get_u32(b + 4),
                               .id_incarnation = get_u64(b + 8),
                               .id_counter = get_u64(b + 16),
                               .keys = b + STORE_MSG_HEADER_BYTES};
    size_t keys_end = STORE_MSG_HEADER_BYTES + (size_t)m.n_keys * BLOCK_KEY_BYTES;
    if (!m.n_keys || m.n_keys > STORE_MAX_KEYS || len_bytes < keys_end)
        return TD_ERR_PROTOCOL;
    enum td_status s = decode_sender(b + keys_end, len_bytes - keys_end, &m);
    if (!s)
        *out = m;
    return s;
}

void store_want_encode(uint64_t id_incarnation, uint64_t id_counter, const uint16_t *positions, uint16_t n,
                       struct bytes *out)
{
    uint8_t b[STORE_MSG_HEADER_BYTES], p[2];
    put_header(b, n, 0, id_incarnation, id_counter);
    bytes_append(out, b, sizeof(b));
    for (uint16_t i = 0; i < n; i++) {
        put_u16(p, positions[i]);
        bytes_append(out, p, 2);
    }
}

uint16_t store_want_at(const struct store_want_msg *m, uint32_t i)
{
    return get_u16(m->positions + 2 * (size_t)i);
}

enum td_status store_want_decode(const void *data, size_t len_bytes, struct store_want_msg *out)
{
    const uint8_t *b = data;
    if (len_bytes < STORE_MSG_HEADER_BYTES)
        return TD_ERR_PROTOCOL;
    if (get_u16(b) != STORE_MSG_VERSION)
        return TD_ERR_VERSION;
    struct store_want_msg m = {.n = get_u16(b + 2),
                               .id_incarnation = get_u64(b + 8),
                               .id_counter = get_u64(b + 16),
                               .positions = b + STORE_MSG_HEADER_BYTES};
    if (get_u32(b + 4) || m.n > STORE_MAX_KEYS || len_bytes != STORE_MSG_HEADER_BYTES + 2 * (size_t)m.n)
        return TD_ERR_PROTOCOL;
    for (uint32_t i = 1; i < m.n; i++)
        if (store_want_at(&m, i - 1) >= store_want_at(&m, i))
            return TD_ERR_PROTOCOL;
    *out = m;
    return TD_OK;
}

void store_found_encode(const struct store_found *f, uint8_t out[STORE_FOUND_BYTES])
{
    put_u16(out, STORE_MSG_VERSION);
    put_u16(out + 2, 0);
    put_u32(out + 4, f->n_dram);
    put_u32(out + 8, f->n_ssd);
}

enum td_status store_found_decode(const void *data, size_t len_bytes, struct store_found *out)
{
    const uint8_t *b = data;
    if (len_bytes != STORE_FOUND_BYTES)
        return TD_ERR_PROTOCOL;
    if (get_u16(b) != STORE_MSG_VERSION)
        return TD_ERR_VERSION;
    *out = (struct store_found){get_u32(b + 4), get_u32(b + 8)};
    return TD_OK;
}
