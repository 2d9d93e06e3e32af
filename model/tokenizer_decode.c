/*
 * Ids to text, all at once or one by one.
 *
 * Byte-level: bytes are collected and released as UTF-8 gets complete; a part that can't become UTF-8 is one U+FFFD (the
 * maximal invalid part, as Rust's from_utf8_lossy and the WHATWG decoder have it).
 * Byte fallback: a run of byte tokens is text if all of it is UTF-8, else one U+FFFD a byte. Streaming releases a run as
 * soon as it is text, and what follows counts as a new run: all at once may differ there, in what is no text anyway.
 */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "model/tokenizer_internal.h"

static const char REPLACEMENT[] = "\xef\xbf\xbd";

struct token_stream {
    const struct tokenizer *t;
    bool skip_special;
    bool whole_runs;      /* all at once: a run of byte tokens is judged as a whole */
    bool begun;           /* text came out: nothing is stripped any more */
    struct bytes pending; /* bytes that are no text yet */
};

struct token_stream *token_stream_open(const struct tokenizer *t, bool skip_special)
{
    struct token_stream *s = mem_zalloc(sizeof(*s));
    s->t = t;
    s->skip_special = skip_special;
    return s;
}

void token_stream_close(struct token_stream *s)
{
    if (!s)
        return;
    bytes_free(&s->pending);
    free(s);
}

/* ------------------------------------------------------------- byte-level */

/* Bounds of the byte after a lead byte (Unicode 15, table 3-7); how many bytes follow. */
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

/* Length of the character at p; 0: cut off by the end; negative: that many bytes are one invalid part. */
static int measure(const unsigned char *p, size_t len)
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

static void release(struct token_stream *s, bool all, struct bytes *out)
{
    size_t at = 0;
    while (at < s->pending.len) {
        const char *p = s->pending.data + at;
        int n = measure((const unsigned char *)p, s->pending.len - at);
        if (n == 0 && !all)
            break;
        if (n > 0) {
            bytes_append(out, p, (size_t)n);
            at += (size_t)n;
        } else {
            bytes_append(out, REPLACEMENT, 3);
            at += n < 0 ? (size_t)-n : s->pending.len - at;
        }
    }
    if (at) /* else there may be no memory yet */
        memmove(s->pending.data, s->pending.data + at, s->pending.len - at);
    s->pending.len -= at;
}

/* ------------------------------------------------------------ byte fallback */

static bool is_utf8(const struct bytes *b)
{
    for (size_t i = 0; i < b->len;) {
        int n = measure((const unsigned char *)b->data + i, b->len - i);
        if (n <= 0)
            return false;
        i += (size_t)n;
    }
    return true;
}

static void append_text(struct token_stream *s, const char *text, size_t len, struct bytes *out)
{
    const struct slice *strip = &s->t->decode_strip;
    if (!s->begun && len && strip->len && len >= strip->len && !memcmp(text, strip->data, strip->len)) {
        text += strip->len;
        len -= strip->len;
    }
    s->begun |= true;
    bytes_append(out, text, len);
}

static void end_run(struct token_stream *s, struct bytes *out)
{
    if (!s->pending.len)
        return;
    if (is_utf8(&s->pending))
        append_text(s, s->pending.data, s->pending.len, out);
    else
        for (size_t i = 0; i < s->pending.len; i++)
            append_text(s, REPLACEMENT, 3, out);
    bytes_clear(&s->pending);
}

static void append_piece(struct token_stream *s, struct slice text, struct bytes *out)
{
    struct bytes now = {0};
    bytes_append(&now, text.data, text.len);
    for (uint32_t i = 0; i < s->t->n_decode_replaces; i++) {
        const struct normalizer *r = &s->t->decode_replaces[i];
        struct bytes next = {0};
        const char *at = now.data, *end = now.data + now.len, *hit;
        while ((hit = memmem(at, (size_t)(end - at), r->pattern.data, r->pattern.len))) {
            bytes_append(&next, at, (size_t)(hit - at));
            bytes_append(&next, r->content.data, r->content.len);
            at = hit + r->pattern.len;
        }
        bytes_append(&next, at, (size_t)(end - at));
        bytes_free(&now);
        now = next;
    }
    append_text(s, now.data, now.len, out);
    bytes_free(&now);
}

/* --------------------------------------------------------------- in common */

void token_stream_push(struct token_stream *s, uint32_t id, struct bytes *out)
{
    const struct tokenizer *t = s->t;
    if (id >= t->n_pieces || !t->pieces[id].known || (s->skip_special && t->pieces[id].special))
        return;
    const struct piece *p = &t->pieces[id];
    if (t->byte_level) {
        bytes_append(&s->pending, p->text.data, p->text.len);
        release(s, false, out);
    } else if (p->byte >= 0 && t->byte_fallback) {
        char b = (char)p->byte;
        bytes_append(&s->pending, &b, 1);
        if (!s->whole_runs && is_utf8(&s->pending))
            end_run(s, out);
    } else {
        end_run(s, out);
        append_piece(s, p->text, out);
    }
}

void token_stream_flush(struct token_stream *s, struct bytes *out)
{
    if (s->t->byte_level)
        release(s, true, out);
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
