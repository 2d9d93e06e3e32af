/*
 * Ids to text, all at once or one by one. Each token goes through the decoder's steps, bytes are put
 * together, and both ends of the whole text are stripped.
 *
 * Byte-level: bytes are collected and released when they are complete UTF-8. A part that can't become UTF-8
 * is one U+FFFD (the maximal invalid part, as in Rust's from_utf8_lossy and the WHATWG decoder).
 * Byte fallback: a run of byte tokens is text if all of it is UTF-8, else one U+FFFD for each byte. Streaming
 * releases a run as soon as it is text, and the bytes after it are a new run. Decoding all at once may differ
 * there, but only in runs that are not text as a whole.
 */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "model/tokenizer_internal.h"

static const char REPLACEMENT[] = "\xef\xbf\xbd";

struct token_stream {
    const struct tokenizer *t;
    bool skip_special;
    const uint32_t *shown; /* special tokens that are not skipped */
    size_t n_shown;
    bool whole_runs;      /* decoding all at once: judges a run of byte tokens as a whole */
    bool any;             /* a token was decoded */
    uint32_t may_strip;   /* characters at the beginning that may still be stripped */
    uint32_t held;        /* characters at the end that are held back, because they may be stripped */
    struct bytes pending; /* bytes that are not text yet */
    struct matcher matcher;
    bool has_matcher;
};

struct token_stream *token_stream_open(const struct tokenizer *t, bool skip_special)
{
    struct token_stream *s = mem_zalloc(sizeof(*s));
    s->t = t;
    s->skip_special = skip_special;
    s->may_strip = t->decode_last.start;
    for (uint32_t i = 0; i < t->n_decode_steps; i++)
        s->has_matcher |= t->decode_steps[i].pattern.code != NULL;
    if (s->has_matcher)
        matcher_init(&s->matcher);
    return s;
}

void token_stream_show(struct token_stream *s, const uint32_t *ids, size_t n)
{
    s->shown = ids;
    s->n_shown = n;
}

static bool skips(const struct token_stream *s, uint32_t id)
{
    bool is_skipped = s->skip_special && s->t->pieces[id].special;
    for (size_t i = 0; is_skipped && i < s->n_shown; i++)
        is_skipped = s->shown[i] != id;
    return is_skipped;
}

void token_stream_close(struct token_stream *s)
{
    if (!s)
        return;
    if (s->has_matcher)
        matcher_fini(&s->matcher);
    bytes_free(&s->pending);
    free(s);
}

/* -------------------------------------------------- the ends of the whole text */

static bool begins(const char *text, size_t len, struct slice with)
{
    return with.len && len >= with.len && !memcmp(text, with.data, with.len);
}

/* Appends text: strips the beginning of the whole, and holds back what may be its end. */
static void append_text(struct token_stream *s, const char *text, size_t len, struct bytes *out)
{
    const struct decode_step *strip = &s->t->decode_last;
    const struct slice c = strip->content;
    for (; s->may_strip && begins(text, len, c); s->may_strip--, text += c.len)
        len -= c.len;
    if (!len)
        return;
    s->may_strip = 0;
    uint32_t tail = 0;
    for (size_t n = len; tail < strip->stop && n >= c.len && !memcmp(text + n - c.len, c.data, c.len); n -= c.len)
        tail++;
    bool all = tail * c.len == len;
    for (; s->held && (!all || s->held + tail > strip->stop); s->held--)
        bytes_append(out, c.data, c.len);
    bytes_append(out, text, len - tail * c.len);
    s->held += tail;
}

/* ------------------------------------------------------------- byte-level */

/*
 * Bounds of the byte after a lead byte (Unicode 15, table 3-7). Returns how many bytes follow the lead byte.
 */
static int follow(unsigned char lead, unsigned char *lo, unsigned char *hi)
{
    *lo = 0x80;
    *hi = 0xbf;
    if (lead >= 0xc2 && lead <= 0xdf)
        return 1;
    if (lead >= 0xe0 && lead <= 0xef) {
        *lo = lead == 0xe0 ? 0xa0 : 0x80;
        *hi = lead == 0xed ? 0x9f : 0xbf;
        return 2;
    }
    if (lead >= 0xf0 && lead <= 0xf4) {
        *lo = lead == 0xf0 ? 0x90 : 0x80;
        *hi = lead == 0xf4 ? 0x8f : 0xbf;
        return 3;
    }
    return lead < 0x80 ? 0 : -1;
}

/*
 * Length of the character at p. 0: the text ends within it. Negative: that many bytes are one invalid part.
 */
static int character_bytes(const unsigned char *p, size_t len)
{
    unsigned char lo, hi;
    int n = follow(p[0], &lo, &hi);
    if (n < 0)
        return -1;
    for (int i = 1; i <= n; i++) {
        if ((size_t)i >= len)
            return 0;
        if (p[i] < lo || p[i] > hi)
            return -i;
        lo = 0x80;
        hi = 0xbf;
    }
    return n + 1;
}

static void release_text(struct token_stream *s, bool all, struct bytes *out)
{
    size_t at = 0;
    while (at < s->pending.len) {
        const char *p = s->pending.data + at;
        int n = character_bytes((const unsigned char *)p, s->pending.len - at);
        if (n == 0 && !all)
            break;
        if (n > 0) {
            append_text(s, p, (size_t)n, out);
            at += (size_t)n;
        } else {
            append_text(s, REPLACEMENT, 3, out);
            at += n < 0 ? (size_t)-n : s->pending.len - at;
        }
    }
    if (at) /* with at 0, memory may be NULL */
        memmove(s->pending.data, s->pending.data + at, s->pending.len - at);
    s->pending.len -= at;
}

/* ------------------------------------------------------------------- steps */

static void strip_token(const struct decode_step *step, struct bytes *b)
{
    struct slice c = step->content;
    size_t begin = 0;
    for (uint32_t i = 0; i < step->start && begins(b->data + begin, b->len - begin, c); i++)
        begin += c.len;
    for (uint32_t i = 0; i < step->stop && b->len - begin >= c.len && begins(b->data + b->len - c.len, c.len, c); i++)
        b->len -= c.len;
    memmove(b->data, b->data + begin, b->len - begin);
    b->len -= begin;
}

static void run_step(struct token_stream *s, const struct decode_step *step, bool first, size_t limit, struct bytes *b)
{
    const struct slice space = {" ", 1}, nothing = {"", 0};
    struct bytes changed = {0};
    if (!b->len)
        return;
    if (step->kind == DECODE_STRIP) {
        strip_token(step, b);
        return;
    }
    struct slice instead = step->kind == DECODE_REPLACE ? step->content : step->not_first && first ? nothing : space;
    struct slice text = {b->data, b->len};
    if (pattern_replace(&step->pattern, &s->matcher, text, instead, limit, &changed, NULL) || changed.len > limit) {
        bytes_free(&changed); /* a step that fails changes nothing */
        return;
    }
    bytes_free(b);
    *b = changed;
}

/* What the steps make of a token's text. The caller frees it. */
static struct bytes run_steps(struct token_stream *s, const char *text, size_t len, uint32_t first_step, bool first)
{
    struct bytes b = {0};
    bytes_append(&b, text, len);
    for (uint32_t i = first_step; i < s->t->n_decode_steps; i++)
        run_step(s, &s->t->decode_steps[i], first, normalize_most_bytes(len), &b);
    return b;
}

/* Appends a token's text, or the text of a run of bytes. */
static void append_token(struct token_stream *s, const char *text, size_t len, uint32_t first_step, bool first,
                         struct bytes *out)
{
    struct bytes b = run_steps(s, text, len, first_step, first);
    append_text(s, b.data ? b.data : "", b.len, out);
    bytes_free(&b);
}

/* ------------------------------------------------------------ byte fallback */

static bool is_utf8(const struct bytes *b)
{
    for (size_t i = 0; i < b->len;) {
        int n = character_bytes((const unsigned char *)b->data + i, b->len - i);
        if (n <= 0)
            return false;
        i += (size_t)n;
    }
    return true;
}

static void end_run(struct token_stream *s, struct bytes *out)
{
    if (!s->pending.len)
        return;
    if (is_utf8(&s->pending))
        append_token(s, s->pending.data, s->pending.len, s->t->n_decode_early, false, out);
    else
        for (size_t i = 0; i < s->pending.len; i++)
            append_token(s, REPLACEMENT, 3, s->t->n_decode_early, false, out);
    bytes_clear(&s->pending);
}

/* --------------------------------------------------------------- in common */

static void append_raw(const struct tokenizer_piece *p, struct bytes *out)
{
    if (p->raw || !alphabet_decode(out, p->text.data, p->text.len))
        bytes_append(out, p->text.data, p->text.len);
}

static void push_bytes(struct token_stream *s, const struct tokenizer_piece *p, struct bytes *out)
{
    append_raw(p, &s->pending);
    release_text(s, false, out);
}

/* The token's text as the decoder's steps take it. The caller frees it. */
static struct bytes text_for_steps(const struct tokenizer_piece *p)
{
    struct bytes text = {0};
    if (p->raw)
        alphabet_append(&text, p->text.data, p->text.len);
    else
        bytes_append(&text, p->text.data, p->text.len);
    return text;
}

void token_stream_push(struct token_stream *s, uint32_t id, struct bytes *out)
{
    const struct tokenizer *t = s->t;
    if (id >= t->n_pieces || !t->pieces[id].known || skips(s, id))
        return;
    const struct tokenizer_piece *p = &t->pieces[id];
    bool first = !s->any;
    s->any = true;
    if (t->decode_byte_level) {
        push_bytes(s, p, out);
    } else if (p->byte >= 0 && t->decode_bytes) {
        char b = (char)p->byte;
        bytes_append(&s->pending, &b, 1);
        if (!s->whole_runs && is_utf8(&s->pending))
            end_run(s, out);
    } else {
        struct bytes text = text_for_steps(p);
        end_run(s, out);
        if (!t->has_decoder && !first)
            bytes_append(out, " ", 1);
        append_token(s, text.data ? text.data : "", text.len, 0, first, out);
        bytes_free(&text);
    }
}

void token_stream_piece(struct token_stream *s, uint32_t id, struct bytes *out)
{
    const struct tokenizer *t = s->t;
    if (id >= t->n_pieces || !t->pieces[id].known)
        return;
    const struct tokenizer_piece *p = &t->pieces[id];
    if (t->decode_byte_level) {
        append_raw(p, out);
    } else if (p->byte >= 0 && t->decode_bytes) {
        bytes_append(out, &(char){(char)p->byte}, 1);
    } else {
        struct bytes text = text_for_steps(p), piece = run_steps(s, text.data ? text.data : "", text.len, 0, false);
        if (!t->has_decoder)
            bytes_append(out, " ", 1);
        bytes_append(out, piece.data, piece.len);
        bytes_free(&text);
        bytes_free(&piece);
    }
}

bool tokenizer_is_special(const struct tokenizer *t, uint32_t id)
{
    return id < t->n_pieces && t->pieces[id].special;
}

void token_stream_flush(struct token_stream *s, struct bytes *out)
{
    if (s->t->decode_byte_level)
        release_text(s, true, out);
    else
        end_run(s, out);
}

void tokenizer_decode(const struct tokenizer *t, const uint32_t *ids, size_t n, bool skip_special, struct bytes *out)
{
    struct token_stream *s = token_stream_open(t, skip_special);
    s->whole_runs = true;
    for (size_t i = 0; i < n; i++)
        token_stream_push(s, ids[i], out);
    token_stream_flush(s, out);
    token_stream_close(s);
}
