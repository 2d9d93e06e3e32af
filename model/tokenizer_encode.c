/*
 * Text to ids: added tokens are cut out first (some of the raw, some of the normalized text), what lies between is
 * normalized, split, and encoded piece by piece.
 */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "model/tokenizer_internal.h"

enum { JIT_STACK_BYTES = 8 << 20 };

void token_ids_push(struct token_ids *t, uint32_t id)
{
    if (t->n == t->cap) {
        t->cap = t->cap ? t->cap * 2 : 64;
        t->ids = mem_resize(t->ids, t->cap, sizeof(*t->ids));
    }
    t->ids[t->n++] = id;
}

void token_ids_free(struct token_ids *t)
{
    free(t->ids);
    *t = (struct token_ids){0};
}

/* -------------------------------------------------------------- normalize */

static bool is_ascii(struct slice s)
{
    for (size_t i = 0; i < s.len; i++)
        if ((unsigned char)s.data[i] >= 0x80)
            return false;
    return true;
}

static enum td_status append_nfc(struct slice s, struct bytes *out, struct td_error *e)
{
    if (is_ascii(s)) {
        bytes_append(out, s.data, s.len);
        return TD_OK;
    }
    utf8proc_uint8_t *composed = NULL;
    utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)s.data, (utf8proc_ssize_t)s.len, &composed,
                                      UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (n < 0)
        return td_fail(e, TD_ERR_INVALID, "text: can't be normalized: %s", utf8proc_errmsg(n));
    bytes_append(out, composed, (size_t)n);
    free(composed);
    return TD_OK;
}

static void append_replaced(struct slice s, struct slice pattern, struct slice content, struct bytes *out)
{
    const char *at = s.data, *end = s.data + s.len, *hit;
    while ((hit = memmem(at, (size_t)(end - at), pattern.data, pattern.len))) {
        bytes_append(out, at, (size_t)(hit - at));
        bytes_append(out, content.data, content.len);
        at = hit + pattern.len;
    }
    bytes_append(out, at, (size_t)(end - at));
}

enum td_status tokenizer_normalize(const struct tokenizer *t, struct slice text, struct bytes *out, struct td_error *e)
{
    struct bytes now = {0}, next = {0};
    bytes_append(&now, text.data, text.len);
    enum td_status s = TD_OK;
    for (uint32_t i = 0; i < t->n_normalizers && !s; i++) {
        const struct normalizer *n = &t->normalizers[i];
        struct slice in = {now.data, now.len};
        bytes_clear(&next);
        if (n->kind == NORMALIZE_NFC)
            s = append_nfc(in, &next, e);
        if (n->kind == NORMALIZE_PREPEND && in.len)
            bytes_append(&next, n->content.data, n->content.len);
        if (n->kind == NORMALIZE_PREPEND)
            bytes_append(&next, in.data, in.len);
        if (n->kind == NORMALIZE_REPLACE)
            append_replaced(in, n->pattern, n->content, &next);
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

/* -------------------------------------------------------------- pre-split */

struct encoder { /* one call's scratch */
    const struct tokenizer *t;
    struct token_ids *out;
    struct td_error *e;
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

/* Splits by expression level, then the next; matches and the gaps between them are pieces of their own. */
static enum td_status split(struct encoder *x, struct slice text, uint32_t level)
{
    if (level == x->t->n_splits) {
        tokenizer_bpe(x->t, text, x->out);
        return TD_OK;
    }
    enum td_status s = TD_OK;
    size_t at = 0; /* end of what was passed on */
    for (size_t from = 0; from < text.len && !s;) {
        int n = pcre2_match(x->t->splits[level], (PCRE2_SPTR)text.data, text.len, from, PCRE2_NO_UTF_CHECK, x->match,
                            x->context);
        if (n == PCRE2_ERROR_NOMATCH)
            break;
        if (n < 0)
            return td_fail(x->e, TD_ERR_INVALID, "text: the tokenizer's expression gives up on it (%d)", n);
        const PCRE2_SIZE *v = pcre2_get_ovector_pointer(x->match);
        if (v[1] == v[0]) { /* an empty match splits nothing */
            from = v[1] + 1;
            while (from < text.len && ((unsigned char)text.data[from] & 0xc0) == 0x80)
                from++;
            continue;
        }
        if (v[0] > at)
            s = split(x, (struct slice){text.data + at, v[0] - at}, level + 1);
        size_t begin = v[0], end = v[1];
        if (!s)
            s = split(x, (struct slice){text.data + begin, end - begin}, level + 1);
        at = from = end;
    }
    if (!s && at < text.len)
        s = split(x, (struct slice){text.data + at, text.len - at}, level + 1);
    return s;
}

static bool starts_with(struct slice s, struct slice prefix)
{
    return s.len >= prefix.len && !memcmp(s.data, prefix.data, prefix.len);
}

static enum td_status pre_tokenize(struct encoder *x, struct slice text, bool at_start)
{
    const struct tokenizer *t = x->t;
    struct bytes changed = {0};
    if (t->metaspace) {
        struct slice space = {" ", 1}, in;
        struct bytes replaced = {0};
        append_replaced(text, space, t->meta_replacement, &replaced);
        in = (struct slice){replaced.data, replaced.len};
        bool wants = t->meta_prepend == PREPEND_ALWAYS || (t->meta_prepend == PREPEND_FIRST && at_start);
        if (wants && !starts_with(in, t->meta_replacement))
            bytes_append(&changed, t->meta_replacement.data, t->meta_replacement.len);
        bytes_append(&changed, in.data, in.len);
        bytes_free(&replaced);
        text = (struct slice){changed.data, changed.len};
    } else if (t->add_prefix_space && text.len && text.data[0] != ' ') {
        bytes_append(&changed, " ", 1);
        bytes_append(&changed, text.data, text.len);
        text = (struct slice){changed.data, changed.len};
    }
    enum td_status s = split(x, text, 0);
    bytes_free(&changed);
    return s;
}

/* ----------------------------------------------------------- added tokens */

/* The longest added token that begins at data; NULL: none. */
static const struct added_token *match_added(const struct added_set *set, const char *data, size_t len)
{
    unsigned char b = (unsigned char)data[0];
    for (uint32_t i = set->first[b]; i < set->first[b + 1]; i++) {
        const struct added_token *a = &set->tokens[i];
        if (a->content.len <= len && !memcmp(a->content.data, data, a->content.len))
            return a;
    }
    return NULL;
}

typedef enum td_status between_fn(struct encoder *x, struct slice text, bool at_start);

static enum td_status cut_added(struct encoder *x, const struct added_set *set, struct slice text, bool at_start,
                                between_fn *between)
{
    size_t at = 0, i = 0;
    enum td_status s = TD_OK;
    while (set->n && i < text.len && !s) {
        const struct added_token *a = match_added(set, text.data + i, text.len - i);
        if (!a) {
            i++;
            continue;
        }
        if (i > at)
            s = between(x, (struct slice){text.data + at, i - at}, at_start && at == 0);
        token_ids_push(x->out, a->id);
        at = i = i + a->content.len;
    }
    if (!s && at < text.len)
        s = between(x, (struct slice){text.data + at, text.len - at}, at_start && at == 0);
    return s;
}

static enum td_status normalized(struct encoder *x, struct slice text, bool at_start)
{
    struct bytes b = {0};
    enum td_status s = tokenizer_normalize(x->t, text, &b, x->e);
    if (!s)
        s = cut_added(x, &x->t->normalized_added, (struct slice){b.data, b.len}, at_start, pre_tokenize);
    bytes_free(&b);
    return s;
}

static enum td_status check_utf8(const char *text, size_t len, struct td_error *e)
{
    for (size_t i = 0; i < len;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t n = (unsigned char)text[i] < 0x80 ? 1
                                                           : utf8proc_iterate((const utf8proc_uint8_t *)text + i,
                                                                              (utf8proc_ssize_t)(len - i), &c);
        if (n < 1)
            return td_fail(e, TD_ERR_INVALID, "text: not UTF-8 at byte %zu", i);
        i += (size_t)n;
    }
    return TD_OK;
}

enum td_status tokenizer_encode(const struct tokenizer *t, const char *text, size_t len_bytes, bool add_special,
                                struct token_ids *out, struct td_error *error_out)
{
    enum td_status s = check_utf8(text, len_bytes, error_out);
    if (s)
        return s;
    struct encoder x = {.t = t, .out = out, .e = error_out};
    if (t->n_splits) {
        x.match = pcre2_match_data_create(8, NULL);
        x.context = pcre2_match_context_create(NULL);
        x.stack = pcre2_jit_stack_create(64 << 10, JIT_STACK_BYTES, NULL);
        pcre2_jit_stack_assign(x.context, NULL, x.stack);
    }
    for (uint32_t i = 0; add_special && i < t->n_before; i++)
        token_ids_push(out, t->before[i]);
    s = cut_added(&x, &t->raw_added, (struct slice){text, len_bytes}, true, normalized);
    for (uint32_t i = 0; add_special && i < t->n_after; i++)
        token_ids_push(out, t->after[i]);
    if (t->n_splits) {
        pcre2_jit_stack_free(x.stack);
        pcre2_match_context_free(x.context);
        pcre2_match_data_free(x.match);
    }
    return s;
}
