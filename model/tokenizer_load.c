/*
 * Loads tokenizer.json: vocabulary, merges and added tokens go into hash maps. tokenizer_parts.c loads the
 * components.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_internal.h"

enum { MAX_FILE_BYTES = 256 << 20 };

static bool flag(json_t *v, const char *key)
{
    return json_is_true(json_object_get(v, key));
}

static struct slice slice_of(json_t *v)
{
    return (struct slice){json_is_string(v) ? json_string_value(v) : "", json_string_length(v)};
}

/* -------------------------------------------------------------- vocabulary */

static struct tokenizer_piece *piece_at(struct tokenizer *t, uint32_t id)
{
    if (id >= t->cap_pieces) {
        uint32_t cap = id + 1 > t->cap_pieces * 2 ? id + 1 : t->cap_pieces * 2;
        t->pieces = mem_resize(t->pieces, cap, sizeof(*t->pieces));
        for (uint32_t i = t->cap_pieces; i < cap; i++)
            t->pieces[i] = (struct tokenizer_piece){.byte = -1};
        t->cap_pieces = cap;
    }
    if (id >= t->n_pieces)
        t->n_pieces = id + 1;
    return &t->pieces[id];
}

static int hex(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
}

/* The byte that <0xHH> stands for; -1 for any other text. */
static int byte_token(struct slice s)
{
    if (s.len != 6 || memcmp(s.data, "<0x", 3) || s.data[5] != '>' || hex(s.data[3]) < 0 || hex(s.data[4]) < 0)
        return -1;
    return hex(s.data[3]) << 4 | hex(s.data[4]);
}

static void set_text(struct tokenizer *t, struct tokenizer_piece *p, struct slice text)
{
    struct bytes raw = {0};
    p->raw = t->raw && alphabet_decode(&raw, text.data, text.len);
    p->text = p->raw ? tokenizer_keep(t, raw.data, raw.len) : tokenizer_keep(t, text.data, text.len);
    p->byte = (int16_t)byte_token(text);
    bytes_free(&raw);
}

/*
 * Adds what the model may look up. With raw bytes, entries with a character outside the alphabet are left
 * out.
 */
static void add_entry(struct tokenizer *t, struct slice text, uint32_t id)
{
    struct tokenizer_piece *p = piece_at(t, id);
    p->known = true;
    set_text(t, p, text);
    if (p->raw || !t->raw)
        id_map_add(&t->vocab, p->text, id);
    int byte = !t->raw ? p->byte : p->raw && p->text.len == 1 ? (unsigned char)p->text.data[0] : -1;
    char upper[8];
    snprintf(upper, sizeof(upper), "<0x%02X>", (unsigned)byte & 255);
    /* Any case decodes, but only upper case encodes. */
    if (byte >= 0 && (t->raw || !memcmp(upper, text.data, 6))) {
        t->byte_ids[byte] = id;
        t->has_byte[byte] = true;
    }
}

static bool bad_entry(struct loader *l, struct slice key)
{
    char where[80];
    snprintf(where, sizeof(where), "%.*s", key.len < 79 ? (int)key.len : 79, key.data ? key.data : "");
    return load_fail(l, TD_ERR_CORRUPT, "model.vocab: no text, or its id is not a number in range", where);
}

static bool load_vocab(struct loader *l)
{
    struct slice vocab = l->parts.vocab, key = {"", 0};
    struct json_scan s = {.p = vocab.data, .end = vocab.data + vocab.len};
    uint64_t id;
    bool good = json_scan_take(&s, '{');
    id_map_reserve(&l->t->vocab,
                   /* An entry has about 16 bytes in the file. */
                   vocab.len < 8 << 20 ? vocab.len / 16 : 1 << 19);
    while (good && !json_scan_take(&s, '}')) {
        good = json_scan_text(&s, &key) && json_scan_take(&s, ':') && json_scan_number(&s, &id) && id < MAX_ID;
        if (good)
            add_entry(l->t, key, (uint32_t)id);
        good = good && (json_scan_take(&s, ',') || (s.p < s.end && *s.p == '}'));
    }
    if (!good)
        bad_entry(l, key);
    bytes_free(&s.text);
    return good;
}

static bool find_entry(const struct tokenizer *t, struct slice text, uint32_t *id)
{
    struct bytes raw = {0};
    bool found = !t->raw && id_map_find(&t->vocab, text, id);
    if (t->raw && alphabet_decode(&raw, text.data, text.len))
        found = id_map_find(&t->vocab, (struct slice){raw.data ? raw.data : "", raw.len}, id);
    bytes_free(&raw);
    return found;
}

/* --------------------------------------------------------------------- BPE */

/* Appends text in the form of the vocabulary's keys. False: the vocabulary can't contain it. */
static bool append_key(const struct tokenizer *t, struct slice text, struct bytes *out)
{
    if (t->raw)
        return alphabet_decode(out, text.data, text.len);
    bytes_append(out, text.data, text.len);
    return true;
}

/* Adds the merge of the two parts of key, divided at `middle`, if the vocabulary has both and their sum. */
static bool add_merge(struct tokenizer *t, struct bytes *key, size_t middle, uint32_t rank)
{
    uint32_t a, b, both;
    size_t skip = t->word_prefix.len;
    const char *p = key->data ? key->data : "";
    if (key->len - middle < skip || !id_map_find(&t->vocab, (struct slice){p, middle}, &a) ||
        !id_map_find(&t->vocab, (struct slice){p + middle, key->len - middle}, &b))
        return false;
    if (skip) { /* a part inside a word loses its mark when it is joined */
        memmove(key->data + middle, key->data + middle + skip, key->len - middle - skip);
        key->len -= skip;
    }
    if (!id_map_find(&t->vocab, (struct slice){p, key->len}, &both))
        return false;
    merge_map_add(&t->merges, a, b, rank, both);
    return true;
}

/*
 * Reads "left right" or ["left", "right"]. False if it is neither. *known: the vocabulary may contain both.
 */
static bool read_pair(const struct tokenizer *t, struct json_scan *s, struct bytes *key, size_t *middle, bool *known)
{
    struct slice left, right;
    bool list = json_scan_take(s, '[');
    bytes_clear(key);
    if (!json_scan_text(s, &left))
        return false;
    if (list) {
        *known = append_key(t, left, key);
        *middle = key->len;
        if (!json_scan_take(s, ',') || !json_scan_text(s, &right) || !json_scan_take(s, ']'))
            return false;
        *known = append_key(t, right, key) && *known;
        return true;
    }
    const char *space = memchr(left.data, ' ', left.len);
    if (!space)
        return false;
    right = (struct slice){space + 1, left.len - (size_t)(space + 1 - left.data)};
    left.len = (size_t)(space - left.data);
    *known = append_key(t, left, key);
    *middle = key->len;
    *known = append_key(t, right, key) && *known;
    return !memchr(right.data, ' ', right.len);
}

static void load_merges(struct loader *l)
{
    struct slice merges = l->parts.merges;
    struct json_scan s = {.p = merges.data, .end = merges.data + merges.len};
    struct bytes key = {0};
    uint32_t n = 0;
    bool good = json_scan_take(&s, '['), pair = true, known = false;
    size_t middle = 0;
    merge_map_reserve(&l->t->merges, merges.len < 8 << 20 ? merges.len / 16 : 1 << 19);
    while (good && !json_scan_take(&s, ']')) {
        pair = read_pair(l->t, &s, &key, &middle, &known);
        known = pair && known && add_merge(l->t, &key, middle, n);
        good = known && (json_scan_take(&s, ',') || (s.p < s.end && *s.p == ']'));
        n += good;
    }
    char where[64];
    snprintf(where, sizeof(where), "model.merges[%u]", n);
    if (!good)
        load_fail(l, TD_ERR_CORRUPT, where, pair ? "its parts or their sum are not in the vocabulary" : "is no pair");
    l->t->n_ranks = n;
    bytes_free(&s.text);
    bytes_free(&key);
}

static void load_bpe(struct loader *l, json_t *model)
{
    struct tokenizer *t = l->t;
    if (!l->parts.vocab.data) {
        load_fail(l, TD_ERR_CORRUPT, "model", "vocab or merges is missing");
        return;
    }
    if (json_number_value(json_object_get(model, "dropout")) > 0)
        load_fail(l, TD_ERR_UNSUPPORTED, "model", "dropout");
    struct slice prefix = slice_of(json_object_get(model, "continuing_subword_prefix")),
                 suffix = slice_of(json_object_get(model, "end_of_word_suffix"));
    t->word_prefix = tokenizer_keep(t, prefix.data, prefix.len);
    t->word_suffix = tokenizer_keep(t, suffix.data, suffix.len);
    if (t->raw && (prefix.len || suffix.len))
        load_fail(l, TD_ERR_UNSUPPORTED, "model",
                  "continuing_subword_prefix or end_of_word_suffix of byte-level kinds");
    t->byte_fallback = flag(model, "byte_fallback");
    t->ignore_merges = flag(model, "ignore_merges");
    t->fuse_unk = flag(model, "fuse_unk");
    if (!l->status && load_vocab(l))
        load_merges(l);
    if (json_is_string(json_object_get(model, "unk_token")))
        t->has_unk = find_entry(t, slice_of(json_object_get(model, "unk_token")), &t->unk_id);
}

/* ----------------------------------------------------------------- Unigram */

/* Adds every beginning of a piece, so that a search knows when it can stop. */
static void add_prefixes(struct tokenizer *t, struct slice text, uint32_t id)
{
    uint32_t known;
    for (size_t n = 0; n < text.len;) {
        n += utf8_length((unsigned char)text.data[n]);
        struct slice s = {text.data, n};
        if (n == text.len)
            id_map_add(&t->prefixes, s, id);
        else if (!id_map_find(&t->prefixes, s, &known))
            id_map_add(&t->prefixes, s, NO_ID);
    }
}

/*
 * A number as the library reads it: the digits as an integer, multiplied or divided by a power of ten. The
 * last bit may be wrong, and where two segmentations have almost equal sums, that bit decides. The digits are
 * the fewest that give the number, as the writer of the file had it.
 */
static double as_library_reads(double x)
{
    char text[40], power[32];
    int n_digits = 0;
    do
        snprintf(text, sizeof(text), "%.*e", n_digits++, fabs(x));
    while (n_digits < 17 && strtod(text, NULL) != fabs(x));
    const char *e = strchr(text, 'e');
    long exponent = strtol(e + 1, NULL, 10) - (n_digits - 1);
    uint64_t digits = 0;
    for (const char *c = text; c < e; c++)
        digits = *c == '.' ? digits : 10 * digits + (uint64_t)(*c - '0');
    snprintf(power, sizeof(power), "1e%ld", labs(exponent));
    double value = exponent < 0 ? (double)digits / strtod(power, NULL) : (double)digits * strtod(power, NULL);
    return copysign(value, x);
}

static void load_unigram(struct loader *l, json_t *model)
{
    struct tokenizer *t = l->t;
    json_t *vocab = json_object_get(model, "vocab"), *unk = json_object_get(model, "unk_id"), *v;
    double least = INFINITY;
    size_t i;
    if (!json_is_array(vocab) || json_array_size(vocab) > MAX_ID) {
        load_fail(l, TD_ERR_CORRUPT, "model", "vocab is missing");
        return;
    }
    if (t->raw) {
        load_fail(l, TD_ERR_UNSUPPORTED, "model", "Unigram of bytes");
        return;
    }
    t->unigram = true;
    t->byte_fallback = flag(model, "byte_fallback");
    t->scores = mem_array(json_array_size(vocab), sizeof(*t->scores));
    json_array_foreach(vocab, i, v)
    {
        json_t *text = json_array_get(v, 0), *score = json_array_get(v, 1);
        char where[64];
        snprintf(where, sizeof(where), "model.vocab[%zu]", i);
        if (!json_is_string(text) || !json_is_number(score)) {
            load_fail(l, TD_ERR_CORRUPT, where, "is no pair of text and score");
            return;
        }
        add_entry(t, slice_of(text), (uint32_t)i);
        add_prefixes(t, t->pieces[i].text, (uint32_t)i);
        t->scores[i] = as_library_reads(json_number_value(score));
        least = t->scores[i] < least ? t->scores[i] : least;
    }
    t->has_unk = json_is_integer(unk);
    t->unk_id = (uint32_t)json_integer_value(unk);
    t->unk_score = least - 10;
    if (t->has_unk && (json_integer_value(unk) < 0 || (size_t)json_integer_value(unk) >= json_array_size(vocab)))
        load_fail(l, TD_ERR_CORRUPT, "model", "unk_id is not in the vocabulary");
}

static void load_model(struct loader *l, json_t *model)
{
    const char *type = load_type(model);
    if (!*type || !strcmp(type, "BPE"))
        load_bpe(l, model);
    else if (!strcmp(type, "Unigram"))
        load_unigram(l, model);
    else
        load_fail(l, TD_ERR_UNSUPPORTED, "model is neither BPE nor Unigram", type);
}

/* ----------------------------------------------------------- added tokens */

static int by_content(const void *a, const void *b)
{
    const struct added_token *x = a, *y = b;
    size_t n = x->content.len < y->content.len ? x->content.len : y->content.len;
    int order = memcmp(x->content.data, y->content.data, n);
    return order ? order : x->content.len < y->content.len ? -1 : x->content.len > y->content.len;
}

static void index_added(struct added_set *s)
{
    if (s->n)
        qsort(s->tokens, s->n, sizeof(*s->tokens), by_content);
    uint32_t at = 0;
    for (uint32_t b = 0; b < 257; b++) {
        while (at < s->n && (unsigned char)s->tokens[at].content.data[0] < b)
            at++;
        s->first[b] = b == 256 ? s->n : at;
    }
}

static void add_to(struct added_set *s, struct slice content, uint32_t id, json_t *v)
{
    s->tokens = mem_resize(s->tokens, s->n + 1, sizeof(*s->tokens));
    s->tokens[s->n++] = (struct added_token){content, id, flag(v, "lstrip"), flag(v, "rstrip"), flag(v, "single_word")};
}

static void add_normalized(struct loader *l, struct matcher *m, struct tokenizer_piece *p, uint32_t id, json_t *v)
{
    struct tokenizer *t = l->t;
    struct bytes normal = {0};
    struct td_error e = {{0}};
    struct slice content = slice_of(json_object_get(v, "content"));
    enum td_status s = tokenizer_normalize(t, m, content, &normal, &e);
    if (s || !normal.len) {
        load_fail(l, s ? s : TD_ERR_UNSUPPORTED, "added_tokens",
                  s ? e.text : "nothing is left of one after normalizing");
        /*
     * The library knows such a token by its normalized text only: it decodes to that, and is special if that
     * is equal.
     */
    } else {
        struct slice text = tokenizer_keep(t, normal.data, normal.len);
        set_text(t, p, text);
        p->special &= text.len == content.len && !memcmp(text.data, content.data, content.len);
        add_to(&t->normalized_added, text, id, v);
    }
    bytes_free(&normal);
}

/* "Special" belongs to a text, not an id: other entries with that text are special, too. */
static void mark_doubles(struct tokenizer *t, json_t *list)
{
    struct id_map special = {0};
    uint32_t id;
    size_t i;
    json_t *v;
    json_array_foreach(list, i, v) if (flag(v, "special"))
        id_map_add(&special, slice_of(json_object_get(v, "content")), 0);
    for (uint32_t j = 0; j < t->n_pieces; j++)
        t->pieces[j].special |= t->pieces[j].known && id_map_find(&special, t->pieces[j].text, &id);
    free(special.slots);
}

static void load_added(struct loader *l, json_t *list)
{
    struct tokenizer *t = l->t;
    struct matcher m;
    size_t i;
    json_t *v;
    bool words = false;
    matcher_init(&m);
    json_array_foreach(list, i, v)
    {
        json_t *id = json_object_get(v, "id");
        struct slice content = slice_of(json_object_get(v, "content"));
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= MAX_ID || !content.len) {
            load_fail(l, TD_ERR_CORRUPT, "added_tokens", "an id out of range, or an empty content");
            break;
        }
        uint32_t at = (uint32_t)json_integer_value(id);
        find_entry(t, content, &at); /* if the model has the text, too, the model's id is used */
        struct tokenizer_piece *p = piece_at(t, at);
        *p = (struct tokenizer_piece){.known = true, .special = flag(v, "special")};
        set_text(t, p, content);
        words |= flag(v, "single_word");
        if (flag(v, "normalized"))
            add_normalized(l, &m, p, at, v);
        else
            add_to(&t->raw_added, tokenizer_keep(t, content.data, content.len), at, v);
    }
    matcher_fini(&m);
    if (t->unigram) /* the vocabulary is a list, the only form in which a text may occur twice */
        mark_doubles(t, list);
    index_added(&t->raw_added);
    index_added(&t->normalized_added);
    if (words && !l->status)
        l->status = pattern_compile((struct slice){"[\\w\\p{Join_Control}]", 20}, &t->word, l->e);
}

/* ------------------------------------------------------------------- open */

/* Compatibility forms may turn a character of 4 bytes into 1, composition may turn 9 bytes into 3. */
static void note_longest(struct tokenizer *t)
{
    size_t most = 1;
    for (uint32_t i = 0; i < t->n_pieces; i++)
        if (t->pieces[i].text.len > most)
            most = t->pieces[i].text.len;
    most *= t->n_normalizers ? 4 : 1;
    t->max_token_bytes = most < UINT32_MAX ? (uint32_t)most : UINT32_MAX;
}

enum td_status tokenizer_parse(const char *json, size_t len_bytes, struct tokenizer **out, struct td_error *error_out)
{
    json_error_t je;
    struct loader l = {.e = error_out};
    enum td_status s = utf8_check(json, len_bytes, "tokenizer.json", error_out);
    if (s)
        return TD_ERR_CORRUPT;
    json_parts_find(json, len_bytes, &l.parts);
    json_t *root = json_loadb(l.parts.rest.data ? l.parts.rest.data : "", l.parts.rest.len, JSON_ALLOW_NUL, &je);
    bytes_free(&l.parts.rest);
    if (!json_is_object(root)) {
        json_decref(root);
        return td_fail(error_out, TD_ERR_CORRUPT, "tokenizer.json: line %d: %s", root ? 1 : je.line,
                       root ? "not an object" : je.text);
    }
    l.t = mem_zalloc(sizeof(*l.t));
    l.t->encoders = encoder_pool_open();
    load_parts(&l, root);
    if (!l.status)
        load_model(&l, json_object_get(root, "model"));
    if (!l.status)
        load_added(&l, json_object_get(root, "added_tokens"));
    json_decref(root);
    note_longest(l.t);
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
    for (uint32_t i = 0; i < MAX_STEPS; i++) {
        pattern_free(&t->steps[i].pattern);
        pattern_free(&t->normalizers[i].pattern);
        pattern_free(&t->decode_steps[i].pattern);
        free(t->normalizers[i].trie);
    }
    pattern_free(&t->word);
    encoder_pool_close(t->encoders);
    free(t->arena);
    free(t->pieces);
    free(t->scores);
    free(t->vocab.slots);
    free(t->prefixes.slots);
    free(t->merges.slots);
    free(t->raw_added.tokens);
    free(t->normalized_added.tokens);
    free(t);
}

uint32_t tokenizer_size(const struct tokenizer *t)
{
    return t->n_pieces;
}

uint32_t tokenizer_max_token_bytes(const struct tokenizer *t)
{
    return t->max_token_bytes;
}
