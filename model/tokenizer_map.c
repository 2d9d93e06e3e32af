/* The tokenizer's texts, hash maps and characters. */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "model/tokenizer_internal.h"

enum { BLOCK_BYTES = 1 << 20 };

struct slice tokenizer_keep(struct tokenizer *t, const char *data, size_t len)
{
    struct bytes *b = t->n_arena ? &t->arena[t->n_arena - 1] : NULL;
    if (!b || b->cap - b->len < len + 1) { /* blocks never move: slices point into them */
        size_t cap = len + 1 > BLOCK_BYTES ? len + 1 : BLOCK_BYTES;
        t->arena = mem_resize(t->arena, t->n_arena + 1, sizeof(*t->arena));
        b = &t->arena[t->n_arena++];
        *b = (struct bytes){mem_resize(NULL, cap, 1), 0, cap};
    }
    char *at = b->data + b->len;
    if (len)
        memcpy(at, data, len);
    at[len] = 0;
    b->len += len + 1;
    return (struct slice){at, len};
}

/* ------------------------------------------------------------- bytes -> id */

uint32_t id_map_hash(uint32_t h, const char *data, size_t len)
{
    for (size_t i = 0; i < len; i++)
        h = (h ^ (unsigned char)data[i]) * 0x01000193u; /* FNV-1a */
    return h;
}

static struct id_slot *id_slot(const struct id_map *m, struct slice key, uint32_t hash)
{
    size_t i = (hash * 0x9e3779b97f4a7c15ull) >> 20 & (m->cap - 1);
    while (m->slots[i].hash && (m->slots[i].hash != hash || m->slots[i].key.len != key.len ||
                                memcmp(m->slots[i].key.data, key.data, key.len)))
        i = (i + 1) & (m->cap - 1);
    return &m->slots[i];
}

bool id_map_find_hashed(const struct id_map *m, struct slice key, uint32_t hash, uint32_t *id_out)
{
    const struct id_slot *s = m->cap ? id_slot(m, key, hash ? hash : 1) : NULL;
    if (!s || !s->hash)
        return false;
    *id_out = s->id;
    return true;
}

bool id_map_find(const struct id_map *m, struct slice key, uint32_t *id_out)
{
    return id_map_find_hashed(m, key, id_map_hash(HASH_BEGIN, key.data, key.len), id_out);
}

void id_map_reserve(struct id_map *m, size_t n)
{
    size_t cap = 1024;
    while (cap < n * 2)
        cap *= 2;
    if (cap <= m->cap)
        return;
    struct id_map bigger = {.cap = cap, .n = m->n};
    bigger.slots = mem_array(cap, sizeof(*bigger.slots));
    for (size_t i = 0; i < m->cap; i++)
        if (m->slots[i].hash)
            *id_slot(&bigger, m->slots[i].key, m->slots[i].hash) = m->slots[i];
    free(m->slots);
    *m = bigger;
}

void id_map_add(struct id_map *m, struct slice key, uint32_t id)
{
    uint32_t hash = id_map_hash(HASH_BEGIN, key.data, key.len);
    id_map_reserve(m, m->n + 1);
    struct id_slot *s = id_slot(m, key, hash ? hash : 1);
    m->n += !s->hash;
    *s = (struct id_slot){key, id, hash ? hash : 1};
}

/* ------------------------------------------------------------------ merges */

static struct merge *merge_slot(const struct merge_map *m, uint64_t pair)
{
    size_t i = (pair * 0x9e3779b97f4a7c15ull) >> 20 & (m->cap - 1);
    while (m->slots[i].pair != UINT64_MAX && m->slots[i].pair != pair)
        i = (i + 1) & (m->cap - 1);
    return &m->slots[i];
}

const struct merge *merge_map_find(const struct merge_map *m, uint32_t left, uint32_t right)
{
    if (!m->cap)
        return NULL;
    const struct merge *s = merge_slot(m, (uint64_t)left << 32 | right);
    return s->pair == UINT64_MAX ? NULL : s;
}

void merge_map_reserve(struct merge_map *m, size_t n)
{
    size_t cap = 1024;
    while (cap < n * 2)
        cap *= 2;
    if (cap <= m->cap)
        return;
    struct merge_map bigger = {.cap = cap, .n = m->n};
    bigger.slots = mem_array(cap, sizeof(*bigger.slots));
    memset(bigger.slots, 0xff, cap * sizeof(*bigger.slots));
    for (size_t i = 0; i < m->cap; i++)
        if (m->slots[i].pair != UINT64_MAX)
            *merge_slot(&bigger, m->slots[i].pair) = m->slots[i];
    free(m->slots);
    *m = bigger;
}

void merge_map_add(struct merge_map *m, uint32_t left, uint32_t right, uint32_t rank, uint32_t id)
{
    merge_map_reserve(m, m->n + 1);
    struct merge *s = merge_slot(m, (uint64_t)left << 32 | right);
    m->n += s->pair == UINT64_MAX;
    *s = (struct merge){(uint64_t)left << 32 | right, rank, id};
}

/* -------------------------------------------------------------- characters */

/* The byte for which a character of GPT-2's alphabet stands, or -1. */
static int byte_of_alphabet(uint32_t c)
{
    if ((c >= '!' && c <= '~') || (c >= 0xa1 && c <= 0xac) || (c >= 0xae && c <= 0xff))
        return (int)c;
    if (c < 0x100 || c >= 0x100 + 68) /* the other 68 bytes, in order, are U+0100 and on */
        return -1;
    int n = (int)c - 0x100;
    return n < 33 ? n : n < 67 ? n - 33 + 127 : 0xad;
}

static uint32_t alphabet_of_byte(unsigned char b)
{
    if (b < 33)
        return 0x100u + b;
    if (b >= 127 && b <= 160)
        return 0x100u + 33 + b - 127;
    return b == 0xad ? 0x100u + 67 : b;
}

void alphabet_append(struct bytes *out, const char *raw, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        utf8proc_uint8_t c[4];
        utf8proc_ssize_t n = utf8proc_encode_char((utf8proc_int32_t)alphabet_of_byte((unsigned char)raw[i]), c);
        bytes_append(out, c, (size_t)n);
    }
}

bool alphabet_decode(struct bytes *out, const char *text, size_t len)
{
    size_t before = out->len;
    for (size_t i = 0; i < len;) {
        unsigned char lead = (unsigned char)text[i];
        uint32_t c = lead; /* the alphabet ends before U+0800: characters have one or two bytes */
        size_t n = 1;
        if (lead >= 0x80) {
            c = lead < 0xe0 && i + 1 < len ? (lead & 31u) << 6 | ((unsigned char)text[i + 1] & 63u) : UINT32_MAX;
            n = 2;
        }
        int byte = byte_of_alphabet(c);
        if (byte < 0) {
            out->len = before;
            return false;
        }
        char one = (char)byte;
        bytes_append(out, &one, 1);
        i += n;
    }
    return true;
}

size_t utf8_length(unsigned char c)
{
    return c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
}

bool utf8_is_white_space(const char *p, size_t len, size_t *n_out)
{
    utf8proc_int32_t c;
    utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)p, (utf8proc_ssize_t)len, &c);
    if (n < 1)
        return false;
    *n_out = (size_t)n;
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
           c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}
