/*
 * Normalizers change text before it is split.
 *
 * utf8proc computes Unicode's forms, except the order of combining marks: it sorts them by insertion, which
 * is quadratic for a long run. Here long runs are sorted by counting.
 */
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/endian.h"
#include "model/tokenizer_internal.h"

/* ------------------------------------------------------------ Unicode forms */

struct points {
    utf8proc_int32_t *c;
    size_t n, cap;
};

static utf8proc_propval_t class_of(utf8proc_int32_t c)
{
    return utf8proc_get_property(c)->combining_class;
}

static void sort_few(utf8proc_int32_t *c, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        utf8proc_int32_t v = c[i];
        size_t j = i;
        for (; j && class_of(c[j - 1]) > class_of(v); j--)
            c[j] = c[j - 1];
        c[j] = v;
    }
}

static void sort_many(utf8proc_int32_t *c, size_t n)
{
    size_t at[257] = {0};
    utf8proc_int32_t *copy = mem_dup(c, n * sizeof(*c));
    for (size_t i = 0; i < n; i++)
        at[(class_of(c[i]) & 255) + 1]++;
    for (int i = 1; i < 257; i++)
        at[i] += at[i - 1];
    for (size_t i = 0; i < n; i++)
        c[at[class_of(copy[i]) & 255]++] = copy[i];
    free(copy);
}

static void order_marks(struct points *p)
{
    for (size_t i = 0; i < p->n;) {
        size_t begin = i;
        while (i < p->n && class_of(p->c[i]))
            i++;
        (i - begin > 32 ? sort_many : sort_few)(p->c + begin, i - begin);
        i += i == begin;
    }
}

static void form_span(const struct normalizer *n, struct slice s, struct points *p, struct bytes *out)
{
    int options =
        UTF8PROC_STABLE | (n->compose ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) | (n->compat ? UTF8PROC_COMPAT : 0);
    int boundary = UTF8PROC_BOUNDCLASS_START;
    p->n = 0;
    for (size_t i = 0; i < s.len;) {
        utf8proc_int32_t c;
        i += (size_t)utf8proc_iterate((const utf8proc_uint8_t *)s.data + i, (utf8proc_ssize_t)(s.len - i), &c);
        if (p->cap - p->n < 32) { /* the longest decomposition has 18 */
            p->cap = p->cap ? p->cap * 2 : 256;
            p->c = mem_resize(p->c, p->cap, sizeof(*p->c));
        }
        p->n += (size_t)utf8proc_decompose_char(c, p->c + p->n, 32, options, &boundary);
    }
    order_marks(p);
    utf8proc_ssize_t left = utf8proc_normalize_utf32(p->c, (utf8proc_ssize_t)p->n, options);
    for (utf8proc_ssize_t i = 0; i < left; i++) {
        utf8proc_uint8_t text[4];
        bytes_append(out, text, (size_t)utf8proc_encode_char(p->c[i], text));
    }
}

/* ASCII stays as it is; only its last character may combine with the next one. */
static void append_form(const struct normalizer *n, struct slice s, struct bytes *out)
{
    struct points p = {0};
    for (size_t i = 0; i < s.len;) {
        size_t begin = i;
        while (i < s.len && (unsigned char)s.data[i] < 0x80)
            i++;
        /* First character of the span that must be looked at. */
        size_t first = i < s.len && i > begin ? i - 1 : i;
        bytes_append(out, s.data + begin, first - begin);
        while (i < s.len && (unsigned char)s.data[i] >= 0x80)
            i++;
        if (i > first)
            form_span(n, (struct slice){s.data + first, i - first}, &p, out);
    }
    free(p.c);
}

/* ------------------------------------------------------- character by character */

static void append_changed(const struct normalizer *n, struct slice s, struct bytes *out)
{
    for (size_t i = 0; i < s.len;) {
        utf8proc_int32_t c;
        size_t len = (size_t)utf8proc_iterate((const utf8proc_uint8_t *)s.data + i, (utf8proc_ssize_t)(s.len - i), &c);
        utf8proc_uint8_t text[4];
        if (n->kind == NORMALIZE_ACCENTS) {
            utf8proc_category_t kind = utf8proc_category(c);
            if (kind != UTF8PROC_CATEGORY_MN && kind != UTF8PROC_CATEGORY_MC && kind != UTF8PROC_CATEGORY_ME)
                bytes_append(out, s.data + i, len);
        } else if (c == 0x130) { /* the only letter whose lower case is two characters */
            bytes_append(out, "i\xcc\x87", 3);
        } else {
            bytes_append(out, text, (size_t)utf8proc_encode_char(utf8proc_tolower(c), text));
        }
        i += len;
    }
}

static struct slice stripped(const struct normalizer *n, struct slice s)
{
    size_t len;
    while (n->left && s.len && utf8_is_white_space(s.data, s.len, &len))
        s = (struct slice){s.data + len, s.len - len};
    while (n->right && s.len) {
        size_t at = s.len - 1;
        while (at && ((unsigned char)s.data[at] & 0xc0) == 0x80)
            at--;
        if (!utf8_is_white_space(s.data + at, s.len - at, &len))
            break;
        s.len = at;
    }
    return s;
}

size_t normalize_most_bytes(size_t len)
{
    return 32 * len + 4096;
}

enum td_status pattern_replace(const struct pattern *p, struct matcher *m, struct slice text, struct slice content,
                               size_t limit, struct bytes *out, struct td_error *e)
{
    struct scan scan = {0};
    size_t at = 0;
    while (text.len && out->len <= limit && pattern_next(p, m, text, &scan)) {
        bytes_append(out, text.data + at, scan.begin - at);
        bytes_append(out, content.data, content.len);
        at = scan.end;
    }
    bytes_append(out, text.data + at, text.len - at);
    return scan.failed ? td_fail(e, TD_ERR_INVALID, "text: the tokenizer's expression gives up on it") : TD_OK;
}

/* ------------------------------------------------------------- precompiled */

/*
 * SentencePiece's charsmap: u32 length of the trie in bytes, a Darts trie of u32 units (label, offset of the
 * children, leaf flag), then texts, each ended by a zero. Values of the trie are offsets of texts.
 */
enum td_status normalize_load_precompiled(struct tokenizer *t, const char *base64, size_t len, struct normalizer *out,
                                          struct td_error *e)
{
    unsigned char *raw = mem_zalloc(len + 4);
    int n = len < 1 << 28 ? EVP_DecodeBlock(raw, (const unsigned char *)base64, (int)len) : -1;
    uint32_t trie_bytes = n >= 4 ? get_u32(raw) : 0;
    if (n < 4 || trie_bytes % 4 || trie_bytes > (uint32_t)n - 4) {
        free(raw);
        return td_fail(e, TD_ERR_CORRUPT, "precompiled_charsmap: not base64, or cut off");
    }
    for (size_t i = len; i-- > 0 && base64[i] == '=';)
        n--;
    out->n_trie = trie_bytes / 4;
    out->trie = mem_array(out->n_trie, sizeof(*out->trie));
    for (uint32_t i = 0; i < out->n_trie; i++)
        out->trie[i] = get_u32(raw + 4 + 4 * (size_t)i);
    out->content = tokenizer_keep(t, (char *)raw + 4 + trie_bytes, (size_t)n - 4 - trie_bytes);
    free(raw);
    return TD_OK;
}

static size_t trie_offset(uint32_t unit)
{
    return (size_t)(unit >> 10) << ((unit & 1u << 9) >> 6);
}

/* The replacement for the shortest beginning of key that the trie contains, as in the library. */
static bool transform(const struct normalizer *n, const char *key, size_t len, struct slice *out)
{
    size_t at = n->n_trie ? trie_offset(n->trie[0]) : 0;
    for (size_t i = 0; i < len && key[i]; i++) {
        at ^= (unsigned char)key[i];
        if (at >= n->n_trie || (n->trie[at] & (1u << 31 | 0xff)) != (unsigned char)key[i])
            return false;
        uint32_t unit = n->trie[at];
        at ^= trie_offset(unit);
        if (unit >> 8 & 1) {
            size_t value = at < n->n_trie ? n->trie[at] & 0x7fffffff : SIZE_MAX;
            if (value > n->content.len)
                return false;
            *out = (struct slice){n->content.data + value, strnlen(n->content.data + value, n->content.len - value)};
            return true;
        }
    }
    return false;
}

static void append_precompiled(const struct normalizer *n, struct slice s, size_t limit, struct bytes *out)
{
    for (size_t i = 0; i < s.len && out->len <= limit;) {
        utf8proc_int32_t c, next, state = 0;
        size_t end =
            i + (size_t)utf8proc_iterate((const utf8proc_uint8_t *)s.data + i, (utf8proc_ssize_t)(s.len - i), &c);
        while (end < s.len) {
            utf8proc_ssize_t len =
                utf8proc_iterate((const utf8proc_uint8_t *)s.data + end, (utf8proc_ssize_t)(s.len - end), &next);
            if (utf8proc_grapheme_break_stateful(c, next, &state))
                break;
            c = next;
            end += (size_t)len;
        }
        struct slice to;
        if (end - i < 6 && transform(n, s.data + i, end - i, &to)) {
            bytes_append(out, to.data, to.len);
            i = end;
        }
        for (size_t len; i < end; i += len) {
            len = utf8_length((unsigned char)s.data[i]);
            if (!transform(n, s.data + i, len, &to))
                to = (struct slice){s.data + i, len};
            bytes_append(out, to.data, to.len);
        }
    }
}

/* -------------------------------------------------------------------- all */

static enum td_status append_normalized(const struct normalizer *n, struct matcher *m, struct slice in, size_t limit,
                                        struct bytes *out, struct td_error *e)
{
    switch (n->kind) {
    case NORMALIZE_FORM:
        append_form(n, in, out);
        break;
    case NORMALIZE_LOWERCASE:
    case NORMALIZE_ACCENTS:
        append_changed(n, in, out);
        break;
    case NORMALIZE_STRIP:
        in = stripped(n, in);
        bytes_append(out, in.data, in.len);
        break;
    case NORMALIZE_PREPEND:
        bytes_append(out, n->content.data, in.len ? n->content.len : 0);
        bytes_append(out, in.data, in.len);
        break;
    case NORMALIZE_REPLACE:
        return pattern_replace(&n->pattern, m, in, n->content, limit, out, e);
    case NORMALIZE_ALPHABET:
        alphabet_append(out, in.data, in.len);
        break;
    case NORMALIZE_PRECOMPILED:
        append_precompiled(n, in, limit, out);
        break;
    }
    return TD_OK;
}

enum td_status tokenizer_normalize(const struct tokenizer *t, struct matcher *m, struct slice text, struct bytes *out,
                                   struct td_error *e)
{
    struct bytes now = {0}, next = {0};
    size_t limit = normalize_most_bytes(text.len);
    enum td_status s = TD_OK;
    bytes_append(&now, text.data, text.len);
    for (uint32_t i = 0; i < t->n_normalizers && !s; i++) {
        bytes_clear(&next);
        struct slice in = {now.data ? now.data : "", now.len};
        s = append_normalized(&t->normalizers[i], m, in, limit, &next, e);
        if (!s && next.len > limit)
            s = td_fail(e, TD_ERR_INVALID, "text: the tokenizer's normalizer %u makes more than %zu bytes of its %zu",
                        i + 1, limit, text.len);
        struct bytes swap = now;
        now = next;
        next = swap;
    }
    if (!s)
        bytes_append(out, now.data, now.len);
    bytes_free(&now);
    bytes_free(&next);
    return s;
}
