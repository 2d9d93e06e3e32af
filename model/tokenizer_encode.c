/*
 * Text to ids: added tokens are cut out first (some from the raw, some from the normalized text). The text
 * between them is normalized, goes through the steps of the pre-tokenizers, and is encoded piece by piece.
 * Short pieces are looked up in a cache first.
 *
 * Scratch memory and cache belong to an encoder. Each call takes an encoder from the tokenizer's pool and
 * gives it back, so there are as many encoders as threads that ever encoded at the same time.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "model/tokenizer_internal.h"

enum { CACHE_SLOTS = 1 << 14, CACHE_TEXT = 30, CACHE_IDS = 8 };

/* One cache line of a piece and its ids. */
struct cached {
    char text[CACHE_TEXT];
    uint8_t len, n;
    uint32_t ids[CACHE_IDS];
};

struct encoder {
    struct encoder *next;
    const struct tokenizer *t;
    struct token_ids *out;
    struct td_error *e;
    struct matcher matcher;
    struct bpe_work *work;
    struct cached *cache;
};

struct encoder_pool {
    /* Held for the assignment of two pointers. Any thread may encode: no owner could get a message. */
    pthread_mutex_t lock;
    struct encoder *free;
};

void token_ids_push(struct token_ids *t, uint32_t id)
{
    t->ids = MEM_ROOM(t->ids, t->n, t->cap, 64);
    t->ids[t->n++] = id;
}

void token_ids_free(struct token_ids *t)
{
    free(t->ids);
    *t = (struct token_ids){0};
}

/* -------------------------------------------------------------------- pool */

struct encoder_pool *encoder_pool_open(void)
{
    struct encoder_pool *p = mem_zalloc(sizeof(*p));
    pthread_mutex_init(&p->lock, NULL);
    return p;
}

static void encoder_close(struct encoder *x)
{
    matcher_fini(&x->matcher);
    bpe_work_close(x->work);
    free(x->cache);
    free(x);
}

void encoder_pool_close(struct encoder_pool *p)
{
    if (!p)
        return;
    for (struct encoder *x = p->free, *next; x; x = next) {
        next = x->next;
        encoder_close(x);
    }
    pthread_mutex_destroy(&p->lock);
    free(p);
}

static struct encoder *encoder_take(const struct tokenizer *t)
{
    pthread_mutex_lock(&t->encoders->lock);
    struct encoder *x = t->encoders->free;
    if (x)
        t->encoders->free = x->next;
    pthread_mutex_unlock(&t->encoders->lock);
    if (x)
        return x;
    x = mem_zalloc(sizeof(*x));
    x->t = t;
    matcher_init(&x->matcher);
    x->work = bpe_work_open(t);
    x->cache = mem_array(CACHE_SLOTS, sizeof(*x->cache));
    return x;
}

static void encoder_give(const struct tokenizer *t, struct encoder *x)
{
    bpe_work_trim(x->work);
    pthread_mutex_lock(&t->encoders->lock);
    x->next = t->encoders->free;
    t->encoders->free = x;
    pthread_mutex_unlock(&t->encoders->lock);
}

/* ------------------------------------------------------------------- model */

static uint64_t mix(uint64_t h, uint64_t v)
{
    h = (h ^ v) * 0x9e3779b97f4a7c15ull;
    return h ^ h >> 32;
}

/* The cache line for text; key_out gets what the line begins with if it holds that text. */
static struct cached *cache_slot(struct encoder *x, struct slice text, struct cached *key_out)
{
    uint64_t words[4];
    memset(key_out->text, 0, CACHE_TEXT);
    memcpy(key_out->text, text.data, text.len);
    key_out->len = (uint8_t)text.len;
    key_out->n = 0;
    memcpy(words, key_out, sizeof(words));
    return &x->cache[mix(mix(mix(mix(0, words[0]), words[1]), words[2]), words[3]) & (CACHE_SLOTS - 1)];
}

static enum td_status encode_piece(struct encoder *x, struct slice text)
{
    if (x->t->unigram)
        return tokenizer_unigram(x->t, text, x->out, x->e);
    tokenizer_bpe(x->t, x->work, text, x->out);
    return TD_OK;
}

static enum td_status model(struct encoder *x, struct slice text)
{
    if (x->out->limit && x->out->n > x->out->limit)
        return td_fail(x->e, TD_ERR_NO_SPACE, "text: more than %zu tokens", x->out->limit);
    if (text.len > CACHE_TEXT)
        return encode_piece(x, text);
    struct cached key, *c = cache_slot(x, text, &key);
    if (!memcmp(c, &key, CACHE_TEXT + 1)) {
        for (uint8_t i = 0; i < c->n; i++)
            token_ids_push(x->out, c->ids[i]);
        return TD_OK;
    }
    size_t before = x->out->n;
    enum td_status s = encode_piece(x, text);
    if (!s && x->out->n - before <= CACHE_IDS) {
        key.n = (uint8_t)(x->out->n - before);
        for (uint8_t i = 0; i < key.n; i++)
            key.ids[i] = x->out->ids[before + i];
        *c = key;
    }
    return s;
}

/* ------------------------------------------------------------------- steps */

static enum td_status run_steps(struct encoder *x, struct slice text, bool at_start, uint32_t level);

/* Collects parts. A part is held back until it is known whether the next one joins it. */
struct fold {
    struct encoder *x;
    struct slice text;
    uint32_t level; /* level of the next step */
    bool at_start;
    enum split_behavior behavior;
    bool held, was_match;
    size_t begin, end; /* the part that is held back */
};

static enum td_status pass_on(struct fold *f, size_t begin, size_t end)
{
    if (begin == end)
        return TD_OK;
    return run_steps(f->x, (struct slice){f->text.data + begin, end - begin}, f->at_start && !begin, f->level);
}

static enum td_status part(struct fold *f, size_t begin, size_t end, bool match)
{
    if (f->behavior == SPLIT_ISOLATED)
        return pass_on(f, begin, end);
    if (f->behavior == SPLIT_REMOVED)
        return match ? TD_OK : pass_on(f, begin, end);
    bool joins = f->behavior == SPLIT_CONTIGUOUS      ? match == f->was_match
                 : f->behavior == SPLIT_WITH_PREVIOUS ? match && !f->was_match
                                                      : !match && f->was_match;
    f->was_match = match;
    if (f->held && joins) {
        f->end = end;
        return TD_OK;
    }
    enum td_status s = f->held ? pass_on(f, f->begin, f->end) : TD_OK;
    f->held = true;
    f->begin = begin;
    f->end = end;
    return s;
}

static enum td_status split(struct encoder *x, const struct tokenizer_step *step, struct slice text, bool at_start,
                            uint32_t level)
{
    struct fold f = {.x = x, .text = text, .level = level + 1, .at_start = at_start, .behavior = step->behavior};
    struct scan scan = {0};
    size_t at = 0;
    enum td_status s = TD_OK;
    while (!s && pattern_next(&step->pattern, &x->matcher, text, &scan)) {
        size_t begin = scan.begin, end = scan.end;
        if (begin > at)
            s = part(&f, at, begin, step->invert);
        if (!s)
            s = part(&f, begin, end, !step->invert);
        at = end;
    }
    if (scan.failed)
        return td_fail(x->e, TD_ERR_INVALID, "text: the tokenizer's expression gives up on it");
    if (!s && at < text.len)
        s = part(&f, at, text.len, step->invert);
    return !s && f.held ? pass_on(&f, f.begin, f.end) : s;
}

static bool starts_with(struct slice s, struct slice prefix)
{
    return s.len >= prefix.len && !memcmp(s.data, prefix.data, prefix.len);
}

static void append_metaspace(const struct tokenizer_step *step, struct slice text, bool at_start, struct bytes *out)
{
    static const struct pattern SPACE = {.literal = {" ", 1}};
    const struct slice space = {" ", 1};
    bool wants = step->prepend == PREPEND_ALWAYS || (step->prepend == PREPEND_FIRST && at_start);
    if (wants && !starts_with(text, step->replacement) && !starts_with(text, space))
        bytes_append(out, step->replacement.data, step->replacement.len);
    pattern_replace(&SPACE, NULL, text, step->replacement, SIZE_MAX, out, NULL);
}

static enum td_status run_steps(struct encoder *x, struct slice text, bool at_start, uint32_t level)
{
    const struct tokenizer *t = x->t;
    struct bytes changed = {0};
    if (level == t->n_steps)
        return model(x, text);
    const struct tokenizer_step *step = &t->steps[level];
    switch (step->kind) {
    case STEP_SPLIT:
        return split(x, step, text, at_start, level);
    case STEP_METASPACE:
        append_metaspace(step, text, at_start, &changed);
        break;
    case STEP_PREFIX_SPACE:
        if (text.data[0] == ' ')
            return run_steps(x, text, at_start, level + 1);
        bytes_append(&changed, " ", 1);
        bytes_append(&changed, text.data, text.len);
        break;
    case STEP_ALPHABET:
        alphabet_append(&changed, text.data, text.len);
        break;
    }
    enum td_status s = run_steps(x, (struct slice){changed.data, changed.len}, at_start, level + 1);
    bytes_free(&changed);
    return s;
}

static enum td_status pre_tokenize(struct encoder *x, struct slice text, bool at_start)
{
    return run_steps(x, text, at_start, 0);
}

/* ----------------------------------------------------------- added tokens */

/* The longest added token that begins at data, or NULL. Candidates are narrowed byte by byte. */
static const struct added_token *match_added(const struct added_set *set, const char *data, size_t len)
{
    uint32_t lo = set->first[(unsigned char)data[0]], hi = set->first[(unsigned char)data[0] + 1];
    const struct added_token *best = NULL;
    for (size_t depth = 1; lo < hi; depth++) {
        if (set->tokens[lo].content.len == depth) {
            best = &set->tokens[lo];
            while (lo < hi && set->tokens[lo].content.len == depth)
                lo++;
        }
        if (depth == len || lo == hi)
            break;
        unsigned char c = (unsigned char)data[depth];
        for (uint32_t end = hi; lo < end;) { /* finds the first token that has c or more at this byte */
            uint32_t middle = lo + (end - lo) / 2;
            if ((unsigned char)set->tokens[middle].content.data[depth] < c)
                lo = middle + 1;
            else
                end = middle;
        }
        for (uint32_t begin = lo; begin < hi;) {
            uint32_t middle = begin + (hi - begin) / 2;
            if ((unsigned char)set->tokens[middle].content.data[depth] > c)
                hi = middle;
            else
                begin = middle + 1;
        }
    }
    return best;
}

static bool is_word(struct encoder *x, struct slice character)
{
    struct scan scan = {0};
    return pattern_next(&x->t->word, &x->matcher, character, &scan);
}

static size_t last_char(struct slice text)
{
    size_t at = text.len - 1;
    while (at && ((unsigned char)text.data[at] & 0xc0) == 0x80)
        at--;
    return at;
}

static bool stands_alone(struct encoder *x, struct slice text, size_t begin, size_t end)
{
    if (begin) {
        size_t at = last_char((struct slice){text.data, begin});
        if (is_word(x, (struct slice){text.data + at, begin - at}))
            return false;
    }
    return end == text.len || !is_word(x, (struct slice){text.data + end, utf8_length((unsigned char)text.data[end])});
}

static size_t before_spaces(struct slice text, size_t begin, size_t least)
{
    size_t n;
    while (begin > least) {
        size_t at = last_char((struct slice){text.data, begin});
        if (!utf8_is_white_space(text.data + at, begin - at, &n))
            break;
        begin = at;
    }
    return begin;
}

static size_t after_spaces(struct slice text, size_t end)
{
    size_t n;
    while (end < text.len && utf8_is_white_space(text.data + end, text.len - end, &n))
        end += n;
    return end;
}

typedef enum td_status between_fn(struct encoder *x, struct slice text, bool at_start);

static enum td_status cut_added(struct encoder *x, const struct added_set *set, struct slice text, bool at_start,
                                between_fn *between)
{
    size_t at = 0;
    enum td_status s = TD_OK;
    for (size_t i = 0; set->n && i < text.len && !s;) {
        unsigned char b = (unsigned char)text.data[i];
        const struct added_token *a =
            set->first[b] == set->first[b + 1] ? NULL : match_added(set, text.data + i, text.len - i);
        if (!a) {
            i++;
            continue;
        }
        size_t begin = i, end = i + a->content.len;
        i = end;
        if (a->single_word && !stands_alone(x, text, begin, end))
            continue;
        if (a->lstrip)
            begin = at > begin ? at : before_spaces(text, begin, at);
        if (a->rstrip)
            end = after_spaces(text, end);
        if (begin > at)
            s = between(x, (struct slice){text.data + at, begin - at}, at_start && at == 0);
        if (begin < end) /* otherwise the token before has taken all of it as spaces */
            token_ids_push(x->out, a->id);
        at = end;
    }
    if (!s && at < text.len)
        s = between(x, (struct slice){text.data + at, text.len - at}, at_start && at == 0);
    return s;
}

static enum td_status normalized(struct encoder *x, struct slice text, bool at_start)
{
    if (!x->t->n_normalizers)
        return cut_added(x, &x->t->normalized_added, text, at_start, pre_tokenize);
    struct bytes b = {0};
    enum td_status s = tokenizer_normalize(x->t, &x->matcher, text, &b, x->e);
    if (!s)
        s = cut_added(x, &x->t->normalized_added, (struct slice){b.data ? b.data : "", b.len}, at_start, pre_tokenize);
    bytes_free(&b);
    return s;
}

enum td_status utf8_check(const char *text, size_t len, const char *what, struct td_error *e)
{
    for (size_t i = 0; i < len;) {
        uint64_t eight;
        if (len - i >= 8 && (memcpy(&eight, text + i, 8), !(eight & 0x8080808080808080ull))) {
            i += 8;
            continue;
        }
        utf8proc_int32_t c;
        utf8proc_ssize_t n = (unsigned char)text[i] < 0x80 ? 1
                                                           : utf8proc_iterate((const utf8proc_uint8_t *)text + i,
                                                                              (utf8proc_ssize_t)(len - i), &c);
        if (n < 1)
            return td_fail(e, TD_ERR_INVALID, "%s: not UTF-8 at byte %zu", what, i);
        i += (size_t)n;
    }
    return TD_OK;
}

enum td_status tokenizer_encode(const struct tokenizer *t, const char *text, size_t len_bytes, bool add_special,
                                struct token_ids *out, struct td_error *error_out)
{
    enum td_status s = len_bytes > INT32_MAX ? td_fail(error_out, TD_ERR_INVALID, "text: %zu bytes", len_bytes)
                                             : utf8_check(text, len_bytes, "text", error_out);
    if (s)
        return s;
    struct encoder *x = encoder_take(t);
    x->out = out;
    x->e = error_out;
    for (uint32_t i = 0; add_special && i < t->n_before; i++)
        token_ids_push(out, t->before[i]);
    s = cut_added(x, &t->raw_added, (struct slice){text, len_bytes}, true, normalized);
    for (uint32_t i = 0; add_special && i < t->n_after; i++)
        token_ids_push(out, t->after[i]);
    encoder_give(t, x);
    return s;
}
