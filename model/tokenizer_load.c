/*
 * Loading tokenizer.json: what it uses is understood or refused by name; its vocabulary goes into hash maps.
 *
 * Byte-level vocabularies are turned back from GPT-2's alphabet into raw bytes once, here, so that encoding and decoding
 * work on bytes.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "model/tokenizer_internal.h"

enum { MAX_FILE_BYTES = 256 << 20, MAX_ID = 1 << 24 };

/* ------------------------------------------------------------------- maps */

struct slice tokenizer_keep(struct tokenizer *t, const char *data, size_t len)
{
    t->arena = mem_resize(t->arena, t->n_arena + 1, sizeof(*t->arena));
    struct bytes *b = &t->arena[t->n_arena++];
    *b = (struct bytes){0};
    bytes_append(b, data, len);
    return (struct slice){b->data, len};
}

static uint64_t hash_slice(struct slice s)
{
    uint64_t h = 0xcbf29ce484222325ull; /* FNV-1a */
    for (size_t i = 0; i < s.len; i++)
        h = (h ^ (unsigned char)s.data[i]) * 0x100000001b3ull;
    return h ^ h >> 29;
}

static struct id_slot *id_slot(const struct id_map *m, struct slice key)
{
    size_t i = hash_slice(key) & (m->cap - 1);
    while (m->slots[i].used && (m->slots[i].key.len != key.len || memcmp(m->slots[i].key.data, key.data, key.len)))
        i = (i + 1) & (m->cap - 1);
    return &m->slots[i];
}

bool id_map_find(const struct id_map *m, struct slice key, uint32_t *id_out)
{
    const struct id_slot *s = m->cap ? id_slot(m, key) : NULL;
    if (!s || !s->used)
        return false;
    *id_out = s->id;
    return true;
}

void id_map_add(struct id_map *m, struct slice key, uint32_t id)
{
    if (m->n * 2 >= m->cap) {
        struct id_map bigger = {.cap = m->cap ? m->cap * 2 : 1024, .n = m->n};
        bigger.slots = mem_array(bigger.cap, sizeof(*bigger.slots));
        for (size_t i = 0; i < m->cap; i++)
            if (m->slots[i].used)
                *id_slot(&bigger, m->slots[i].key) = m->slots[i];
        free(m->slots);
        *m = bigger;
    }
    struct id_slot *s = id_slot(m, key);
    m->n += !s->used;
    *s = (struct id_slot){key, id, true};
}

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

void merge_map_add(struct merge_map *m, uint32_t left, uint32_t right, uint32_t rank, uint32_t id)
{
    if (m->n * 2 >= m->cap) {
        struct merge_map bigger = {.cap = m->cap ? m->cap * 2 : 1024, .n = m->n};
        bigger.slots = mem_array(bigger.cap, sizeof(*bigger.slots));
        memset(bigger.slots, 0xff, bigger.cap * sizeof(*bigger.slots));
        for (size_t i = 0; i < m->cap; i++)
            if (m->slots[i].pair != UINT64_MAX)
                *merge_slot(&bigger, m->slots[i].pair) = m->slots[i];
        free(m->slots);
        *m = bigger;
    }
    struct merge *s = merge_slot(m, (uint64_t)left << 32 | right);
    m->n += s->pair == UINT64_MAX;
    *s = (struct merge){(uint64_t)left << 32 | right, rank, id};
}

int byte_of_alphabet(uint32_t c)
{
    if ((c >= '!' && c <= '~') || (c >= 0xa1 && c <= 0xac) || (c >= 0xae && c <= 0xff))
        return (int)c;
    if (c < 0x100 || c >= 0x100 + 68) /* the 68 other bytes, in order, from U+0100 on */
        return -1;
    int n = (int)c - 0x100;
    return n < 33 ? n : n < 67 ? n - 33 + 127 : 0xad;
}

/* ----------------------------------------------------------- small helpers */

struct loader {
    struct tokenizer *t;
    struct td_error *e;
    enum td_status status; /* the first failure */
};

static bool fail(struct loader *l, enum td_status s, const char *where, const char *what)
{
    if (!l->status)
        l->status = td_fail(l->e, s, "tokenizer.json: %s: %.120s", where, what);
    return false;
}

static const char *type_of(json_t *v)
{
    const char *s = json_string_value(json_object_get(v, "type"));
    return s ? s : "";
}

static struct slice text_of(struct loader *l, json_t *v, const char *key, const char *where)
{
    json_t *s = json_object_get(v, key);
    if (!json_is_string(s)) {
        fail(l, TD_ERR_CORRUPT, where, "a text is missing");
        return (struct slice){"", 0};
    }
    return tokenizer_keep(l->t, json_string_value(s), json_string_length(s));
}

static bool flag(json_t *v, const char *key)
{
    return json_is_true(json_object_get(v, key));
}

/* Calls each for v itself, or for each element of the Sequence that it is. */
static void each_step(struct loader *l, json_t *v, const char *list, void (*each)(struct loader *, json_t *))
{
    if (!v || json_is_null(v) || l->status)
        return;
    if (strcmp(type_of(v), "Sequence")) {
        each(l, v);
        return;
    }
    size_t i;
    json_t *step;
    json_array_foreach(json_object_get(v, list), i, step) if (!l->status) each(l, step);
}

/* ------------------------------------------------------------- components */

static struct normalizer replace_of(struct loader *l, json_t *v, const char *where)
{
    struct normalizer n = {.kind = NORMALIZE_REPLACE};
    n.pattern = text_of(l, json_object_get(v, "pattern"), "String", where);
    n.content = text_of(l, v, "content", where);
    if (!n.pattern.len)
        fail(l, TD_ERR_CORRUPT, where, "Replace of an empty pattern");
    return n;
}

static void add_normalizer(struct loader *l, json_t *v)
{
    struct tokenizer *t = l->t;
    struct normalizer n = {0};
    if (!strcmp(type_of(v), "NFC"))
        n.kind = NORMALIZE_NFC;
    else if (!strcmp(type_of(v), "Prepend"))
        n = (struct normalizer){.kind = NORMALIZE_PREPEND, .content = text_of(l, v, "prepend", "normalizer")};
    else if (!strcmp(type_of(v), "Replace"))
        n = replace_of(l, v, "normalizer");
    else
        fail(l, TD_ERR_UNSUPPORTED, "normalizer is not supported", type_of(v));
    if (t->n_normalizers == MAX_STEPS)
        fail(l, TD_ERR_UNSUPPORTED, "normalizer", "too many steps");
    else
        t->normalizers[t->n_normalizers++] = n;
}

static void add_split_pattern(struct loader *l, const char *pattern, size_t len)
{
    int code;
    size_t at;
    struct tokenizer *t = l->t;
    pcre2_code *re =
        pcre2_compile((PCRE2_SPTR)pattern, len, PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &at, NULL);
    if (!re) {
        char text[100];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof(text));
        fail(l, TD_ERR_UNSUPPORTED, "pre_tokenizer: Split expression", text);
        return;
    }
    if (t->n_splits == MAX_STEPS) {
        pcre2_code_free(re);
        fail(l, TD_ERR_UNSUPPORTED, "pre_tokenizer", "too many steps");
        return;
    }
    pcre2_jit_compile(re, PCRE2_JIT_COMPLETE); /* optional: matching works without */
    t->splits[t->n_splits++] = re;
}

static void add_byte_level(struct loader *l, json_t *v)
{
    static const char GPT2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    l->t->byte_level = true;
    l->t->add_prefix_space = flag(v, "add_prefix_space");
    if (!json_is_false(json_object_get(v, "use_regex")))
        add_split_pattern(l, GPT2, sizeof(GPT2) - 1);
}

static void add_metaspace(struct loader *l, json_t *v)
{
    const char *scheme = json_string_value(json_object_get(v, "prepend_scheme"));
    l->t->metaspace = true;
    l->t->meta_replacement = text_of(l, v, "replacement", "pre_tokenizer: Metaspace");
    if (flag(v, "split"))
        fail(l, TD_ERR_UNSUPPORTED, "pre_tokenizer: Metaspace", "split true");
    l->t->meta_prepend = !scheme || !strcmp(scheme, "always") ? PREPEND_ALWAYS
                         : !strcmp(scheme, "first")           ? PREPEND_FIRST
                                                              : PREPEND_NEVER;
}

static void add_pre_tokenizer(struct loader *l, json_t *v)
{
    if (!strcmp(type_of(v), "Split")) {
        json_t *re = json_object_get(json_object_get(v, "pattern"), "Regex");
        const char *behavior = json_string_value(json_object_get(v, "behavior"));
        if (!json_is_string(re) || !behavior || strcmp(behavior, "Isolated") || flag(v, "invert"))
            fail(l, TD_ERR_UNSUPPORTED, "pre_tokenizer: Split", "only isolated, regular expressions, not inverted");
        else
            add_split_pattern(l, json_string_value(re), json_string_length(re));
    } else if (!strcmp(type_of(v), "ByteLevel")) {
        add_byte_level(l, v);
    } else if (!strcmp(type_of(v), "Metaspace")) {
        add_metaspace(l, v);
    } else {
        fail(l, TD_ERR_UNSUPPORTED, "pre_tokenizer is not supported", type_of(v));
    }
}

static void add_template(struct loader *l, json_t *v)
{
    struct tokenizer *t = l->t;
    size_t i;
    json_t *item;
    bool after = false;
    json_array_foreach(json_object_get(v, "single"), i, item)
    {
        json_t *special = json_object_get(item, "SpecialToken");
        const char *name = json_string_value(json_object_get(special, "id"));
        json_t *ids = json_object_get(json_object_get(json_object_get(v, "special_tokens"), name ? name : ""), "ids");
        after |= json_object_get(item, "Sequence") != NULL;
        for (size_t j = 0; special && j < json_array_size(ids); j++) {
            json_int_t id = json_integer_value(json_array_get(ids, j));
            uint32_t *n = after ? &t->n_after : &t->n_before, *list = after ? t->after : t->before;
            if (id < 0 || id >= MAX_ID || *n == MAX_TEMPLATE_IDS) {
                fail(l, TD_ERR_CORRUPT, "post_processor", "bad or too many ids");
                return;
            }
            list[(*n)++] = (uint32_t)id;
        }
    }
}

static void add_post_processor(struct loader *l, json_t *v)
{
    if (!strcmp(type_of(v), "TemplateProcessing"))
        add_template(l, v);
    else if (strcmp(type_of(v), "ByteLevel")) /* that one only trims offsets */
        fail(l, TD_ERR_UNSUPPORTED, "post_processor is not supported", type_of(v));
}

static void add_decoder(struct loader *l, json_t *v)
{
    struct tokenizer *t = l->t;
    const char *type = type_of(v);
    if (!strcmp(type, "ByteLevel")) {
        if (!t->byte_level)
            fail(l, TD_ERR_UNSUPPORTED, "decoder", "ByteLevel without a byte-level pre-tokenizer");
    } else if (!strcmp(type, "Replace") || !strcmp(type, "Metaspace")) {
        struct normalizer n = {.kind = NORMALIZE_REPLACE};
        bool replace = type[0] == 'R';
        if (replace)
            n = replace_of(l, v, "decoder");
        else
            n = (struct normalizer){NORMALIZE_REPLACE, text_of(l, v, "replacement", "decoder"), {" ", 1}};
        if (!replace)
            t->decode_strip = (struct slice){" ", 1};
        if (t->n_decode_replaces < MAX_STEPS)
            t->decode_replaces[t->n_decode_replaces++] = n;
    } else if (!strcmp(type, "Strip")) {
        t->decode_strip = text_of(l, v, "content", "decoder: Strip");
        if (json_integer_value(json_object_get(v, "start")) != 1 || json_integer_value(json_object_get(v, "stop")))
            fail(l, TD_ERR_UNSUPPORTED, "decoder: Strip", "only one at the start");
    } else if (strcmp(type, "ByteFallback") && strcmp(type, "Fuse")) {
        fail(l, TD_ERR_UNSUPPORTED, "decoder is not supported", type);
    }
}

/* ------------------------------------------------------------------ model */

static struct piece *piece_at(struct tokenizer *t, uint32_t id)
{
    if (id >= t->n_pieces) {
        t->pieces = mem_resize(t->pieces, id + 1, sizeof(*t->pieces));
        for (uint32_t i = t->n_pieces; i <= id; i++)
            t->pieces[i] = (struct piece){.byte = -1};
        t->n_pieces = id + 1;
    }
    return &t->pieces[id];
}

/* Raw bytes of a byte-level entry; an entry with a character outside the alphabet stays as it is. */
static struct slice raw_bytes(struct tokenizer *t, const char *text, size_t len)
{
    struct bytes b = {0};
    for (size_t i = 0; i < len;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)text + i, (utf8proc_ssize_t)(len - i), &c);
        int byte = n > 0 ? byte_of_alphabet((uint32_t)c) : -1;
        if (byte < 0) {
            bytes_free(&b);
            return tokenizer_keep(t, text, len);
        }
        char one = (char)byte;
        bytes_append(&b, &one, 1);
        i += (size_t)n;
    }
    struct slice s = tokenizer_keep(t, b.data ? b.data : "", b.len);
    bytes_free(&b);
    return s;
}

static int byte_token(const char *text, size_t len)
{
    unsigned v;
    char end;
    if (len != 6 || memcmp(text, "<0x", 3) || sscanf(text + 3, "%2X%c", &v, &end) != 2 || end != '>')
        return -1;
    return (int)v;
}

static void load_vocab(struct loader *l, json_t *vocab)
{
    struct tokenizer *t = l->t;
    const char *key;
    size_t len;
    json_t *v;
    json_object_keylen_foreach(vocab, key, len, v)
    {
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= MAX_ID) {
            fail(l, TD_ERR_CORRUPT, "model.vocab: id is not a number in range", key);
            return;
        }
        uint32_t id = (uint32_t)json_integer_value(v);
        struct piece *p = piece_at(t, id);
        p->text = t->byte_level ? raw_bytes(t, key, len) : tokenizer_keep(t, key, len);
        p->known = true;
        p->byte = t->byte_fallback ? (int16_t)byte_token(key, len) : -1;
        id_map_add(&t->vocab, p->text, id);
        int byte = t->byte_level && p->text.len == 1 ? (unsigned char)p->text.data[0] : p->byte;
        if (byte >= 0) {
            t->byte_ids[byte] = id;
            t->has_byte[byte] = true;
        }
    }
}

static bool split_merge(json_t *m, struct slice *left, struct slice *right)
{
    json_t *a = json_array_get(m, 0), *b = json_array_get(m, 1);
    if (json_is_string(a) && json_is_string(b) && json_array_size(m) == 2) {
        *left = (struct slice){json_string_value(a), json_string_length(a)};
        *right = (struct slice){json_string_value(b), json_string_length(b)};
        return true;
    }
    const char *s = json_string_value(m), *space = s ? memchr(s, ' ', json_string_length(m)) : NULL;
    if (!space || memchr(space + 1, ' ', json_string_length(m) - (size_t)(space + 1 - s)))
        return false;
    *left = (struct slice){s, (size_t)(space - s)};
    *right = (struct slice){space + 1, json_string_length(m) - (size_t)(space + 1 - s)};
    return true;
}

static bool find_entry(struct tokenizer *t, struct bytes *scratch, struct slice text, uint32_t *id)
{
    if (!t->byte_level)
        return id_map_find(&t->vocab, text, id);
    bytes_clear(scratch);
    for (size_t i = 0; i < text.len;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t n =
            utf8proc_iterate((const utf8proc_uint8_t *)text.data + i, (utf8proc_ssize_t)(text.len - i), &c);
        int byte = n > 0 ? byte_of_alphabet((uint32_t)c) : -1;
        if (byte < 0)
            return false;
        char one = (char)byte;
        bytes_append(scratch, &one, 1);
        i += (size_t)n;
    }
    return id_map_find(&t->vocab, (struct slice){scratch->data ? scratch->data : "", scratch->len}, id);
}

static void load_merges(struct loader *l, json_t *merges)
{
    struct tokenizer *t = l->t;
    struct bytes scratch = {0}, joined = {0};
    size_t i;
    json_t *m;
    json_array_foreach(merges, i, m)
    {
        struct slice left, right;
        uint32_t a, b, both;
        char where[64];
        snprintf(where, sizeof(where), "model.merges[%zu]", i);
        if (!split_merge(m, &left, &right)) {
            fail(l, TD_ERR_CORRUPT, where, "is no pair");
            break;
        }
        bytes_clear(&joined);
        bytes_append(&joined, left.data, left.len);
        bytes_append(&joined, right.data, right.len);
        if (!find_entry(t, &scratch, left, &a) || !find_entry(t, &scratch, right, &b) ||
            !find_entry(t, &scratch, (struct slice){joined.data, joined.len}, &both)) {
            fail(l, TD_ERR_CORRUPT, where, "its parts or their sum are not in the vocabulary");
            break;
        }
        merge_map_add(&t->merges, a, b, (uint32_t)i, both);
    }
    bytes_free(&scratch);
    bytes_free(&joined);
}

static void load_model(struct loader *l, json_t *model)
{
    struct tokenizer *t = l->t;
    json_t *unk = json_object_get(model, "unk_token"), *dropout = json_object_get(model, "dropout");
    const char *type = type_of(model);
    if (*type && strcmp(type, "BPE")) {
        fail(l, TD_ERR_UNSUPPORTED, "model is not BPE", type);
        return;
    }
    if (!json_is_object(json_object_get(model, "vocab")) || !json_is_array(json_object_get(model, "merges"))) {
        fail(l, TD_ERR_CORRUPT, "model", "vocab or merges is missing");
        return;
    }
    json_t *prefix = json_object_get(model, "continuing_subword_prefix"),
           *suffix = json_object_get(model, "end_of_word_suffix");
    if (json_number_value(dropout) > 0 || json_string_length(prefix) || json_string_length(suffix))
        fail(l, TD_ERR_UNSUPPORTED, "model", "dropout, continuing_subword_prefix or end_of_word_suffix");
    t->byte_fallback = flag(model, "byte_fallback");
    t->ignore_merges = flag(model, "ignore_merges");
    t->fuse_unk = flag(model, "fuse_unk");
    load_vocab(l, json_object_get(model, "vocab"));
    if (!l->status)
        load_merges(l, json_object_get(model, "merges"));
    if (json_is_string(unk))
        t->has_unk =
            id_map_find(&t->vocab, (struct slice){json_string_value(unk), json_string_length(unk)}, &t->unk_id);
}

/* ----------------------------------------------------------- added tokens */

static int by_first_then_length(const void *a, const void *b)
{
    const struct added_token *x = a, *y = b;
    unsigned char fx = (unsigned char)x->content.data[0], fy = (unsigned char)y->content.data[0];
    if (fx != fy)
        return fx < fy ? -1 : 1;
    return x->content.len > y->content.len ? -1 : x->content.len < y->content.len;
}

static void index_added(struct added_set *s)
{
    if (s->n)
        qsort(s->tokens, s->n, sizeof(*s->tokens), by_first_then_length);
    uint32_t at = 0;
    for (uint32_t b = 0; b < 257; b++) {
        while (at < s->n && (unsigned char)s->tokens[at].content.data[0] < b)
            at++;
        s->first[b] = b == 256 ? s->n : at;
    }
}

static void add_to(struct added_set *s, struct slice content, uint32_t id)
{
    s->tokens = mem_resize(s->tokens, s->n + 1, sizeof(*s->tokens));
    s->tokens[s->n++] = (struct added_token){content, id};
}

static void load_added(struct loader *l, json_t *list)
{
    struct tokenizer *t = l->t;
    size_t i;
    json_t *v;
    json_array_foreach(list, i, v)
    {
        json_t *id = json_object_get(v, "id");
        struct slice content = text_of(l, v, "content", "added_tokens");
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= MAX_ID || !content.len) {
            fail(l, TD_ERR_CORRUPT, "added_tokens", "an id out of range, or an empty content");
            return;
        }
        if (flag(v, "lstrip") || flag(v, "rstrip") || flag(v, "single_word")) {
            fail(l, TD_ERR_UNSUPPORTED, "added_tokens: lstrip, rstrip or single_word", content.data);
            return;
        }
        struct piece *p = piece_at(t, (uint32_t)json_integer_value(id));
        *p = (struct piece){.text = content, .known = true, .added = true, .special = flag(v, "special"), .byte = -1};
        if (!flag(v, "normalized")) {
            add_to(&t->raw_added, content, (uint32_t)json_integer_value(id));
            continue;
        }
        struct bytes normal = {0};
        enum td_status s = tokenizer_normalize(t, content, &normal, l->e);
        if (s || !normal.len) {
            fail(l, s ? s : TD_ERR_CORRUPT, "added_tokens", "nothing is left after normalizing");
        } else { /* the library knows such a token by its normalized text only: it decodes to that, and is special if equal */
            p->text = tokenizer_keep(t, normal.data, normal.len);
            p->special &= normal.len == content.len && !memcmp(normal.data, content.data, content.len);
            add_to(&t->normalized_added, p->text, (uint32_t)json_integer_value(id));
        }
        bytes_free(&normal);
    }
    index_added(&t->raw_added);
    index_added(&t->normalized_added);
}

/* ------------------------------------------------------------------- open */

enum td_status tokenizer_parse(const char *json, size_t len_bytes, struct tokenizer **out, struct td_error *error_out)
{
    json_error_t je;
    json_t *root = json_loadb(json, len_bytes, JSON_ALLOW_NUL, &je);
    if (!json_is_object(root)) {
        json_decref(root);
        return td_fail(error_out, TD_ERR_CORRUPT, "tokenizer.json: line %d: %s", root ? 1 : je.line,
                       root ? "not an object" : je.text);
    }
    struct loader l = {.t = mem_zalloc(sizeof(*l.t)), .e = error_out};
    each_step(&l, json_object_get(root, "normalizer"), "normalizers", add_normalizer);
    each_step(&l, json_object_get(root, "pre_tokenizer"), "pretokenizers", add_pre_tokenizer);
    if (!l.status)
        load_model(&l, json_object_get(root, "model"));
    each_step(&l, json_object_get(root, "post_processor"), "processors", add_post_processor);
    each_step(&l, json_object_get(root, "decoder"), "decoders", add_decoder);
    if (!l.status)
        load_added(&l, json_object_get(root, "added_tokens"));
    json_decref(root);
    if (l.status) {
        tokenizer_close(l.t);
        return l.status;
    }
    *out = l.t;
    return TD_OK;
}

enum td_status tokenizer_open(const char *dir, struct tokenizer **out, struct td_error *error_out)
{
    char path[4096], *data = NULL;
    size_t len = 0;
    snprintf(path, sizeof(path), "%s/tokenizer.json", dir);
    enum td_status s = file_read(path, MAX_FILE_BYTES, &data, &len, error_out);
    if (!s)
        s = tokenizer_parse(data, len, out, error_out);
    free(data);
    return s;
}

void tokenizer_close(struct tokenizer *t)
{
    if (!t)
        return;
    for (uint32_t i = 0; i < t->n_arena; i++)
        bytes_free(&t->arena[i]);
    for (uint32_t i = 0; i < t->n_splits; i++)
        pcre2_code_free(t->splits[i]);
    free(t->arena);
    free(t->pieces);
    free(t->vocab.slots);
    free(t->merges.slots);
    free(t->raw_added.tokens);
    free(t->normalized_added.tokens);
    free(t);
}

uint32_t tokenizer_size(const struct tokenizer *t)
{
    return t->n_pieces;
}

enum td_status tokenizer_find(const struct tokenizer *t, const char *text, uint32_t *id_out)
{
    size_t len = strlen(text);
    for (uint32_t i = 0; i < t->n_pieces; i++)
        if (t->pieces[i].known && t->pieces[i].text.len == len && !memcmp(t->pieces[i].text.data, text, len)) {
            *id_out = i;
            return TD_OK;
        }
    return TD_ERR_NOT_FOUND;
}
