#include "worker/grammars.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/tokenizer.h"

enum { GRAMMARS_MOST = 64 };
static const size_t BYTES_MOST = 256 << 20; /* of the grammars that are kept; running sequences may hold others */

struct kept {
    struct grammar *grammar; /* NULL: the place is free */
    uint32_t kind;
    char *text;
    size_t len;
    uint64_t used; /* number of the request that used it last */
};

struct grammars {
    struct grammar_vocab *vocab; /* NULL: none */
    pthread_mutex_t lock;        /* guards the rest */
    struct kept kept[GRAMMARS_MOST];
    uint64_t n_used;
};

/* ------------------------------------------------------------------ vocabulary */

struct reading {
    struct tokenizer *tokenizer;
    struct token_stream *stream;
    struct bytes piece;
};

static void bytes_of(void *user, uint32_t id, const char **bytes_out, size_t *len_out)
{
    struct reading *r = user;
    bool is_special = tokenizer_is_special(r->tokenizer, id);
    bytes_clear(&r->piece);
    if (is_special)
        bytes_append(&r->piece, &(char){GRAMMAR_MARK}, 1);
    token_stream_piece(r->stream, id, &r->piece);
    if (!is_special && r->piece.len && r->piece.data[0] == GRAMMAR_MARK) /* a byte that no text has */
        bytes_clear(&r->piece);
    *bytes_out = r->piece.data ? r->piece.data : "";
    *len_out = r->piece.len;
}

static struct grammar_vocab *read_vocab(struct tokenizer *t, uint32_t vocab_size)
{
    struct reading r = {.tokenizer = t, .stream = token_stream_open(t, false)};
    struct grammar_vocab *v = grammar_vocab_open(vocab_size, bytes_of, &r);
    token_stream_close(r.stream);
    bytes_free(&r.piece);
    return v;
}

enum td_status grammars_open(const char *dir, uint32_t vocab_size, struct grammars **out, struct td_error *e)
{
    struct tokenizer *t = NULL;
    enum td_status s = dir ? tokenizer_open(dir, &t, e) : TD_ERR_NOT_FOUND;
    if (s && s != TD_ERR_NOT_FOUND)
        return s;
    struct grammars *g = *out = mem_zalloc(sizeof(*g));
    pthread_mutex_init(&g->lock, NULL);
    if (!s)
        g->vocab = read_vocab(t, vocab_size);
    tokenizer_close(t);
    return TD_OK;
}

void grammars_close(struct grammars *g)
{
    if (!g)
        return;
    for (int i = 0; i < GRAMMARS_MOST; i++) {
        grammar_unref(g->kept[i].grammar);
        free(g->kept[i].text);
    }
    grammar_vocab_close(g->vocab);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

/* -------------------------------------------------------------------- grammars */

/* The place with this text; else NULL, and *oldest_out is the place that was not used for longest. */
static struct kept *find(struct grammars *g, uint32_t kind, const void *text, size_t len, struct kept **oldest_out)
{
    *oldest_out = &g->kept[0];
    for (int i = 0; i < GRAMMARS_MOST; i++) {
        struct kept *k = &g->kept[i];
        if (k->grammar && k->kind == kind && k->len == len && !memcmp(k->text, text, len))
            return k;
        if (k->used < (*oldest_out)->used)
            *oldest_out = k;
    }
    return NULL;
}

/* The one that was not used for longest, but for `newest`; NULL: there is no other. *bytes_out: of all. */
static struct kept *oldest_of(struct grammars *g, const struct kept *newest, size_t *bytes_out)
{
    struct kept *oldest = NULL;
    *bytes_out = 0;
    for (int i = 0; i < GRAMMARS_MOST; i++) {
        struct kept *k = &g->kept[i];
        if (!k->grammar)
            continue;
        *bytes_out += grammar_bytes(k->grammar);
        if (k != newest && (!oldest || k->used < oldest->used))
            oldest = k;
    }
    return oldest;
}

static void forget(struct kept *k)
{
    grammar_unref(k->grammar);
    free(k->text);
    *k = (struct kept){0};
}

size_t grammars_bytes(struct grammars *g)
{
    size_t bytes;
    pthread_mutex_lock(&g->lock);
    oldest_of(g, NULL, &bytes);
    pthread_mutex_unlock(&g->lock);
    return bytes;
}

/* Compiling is not under the lock. Two threads may compile the same text; one of the results is kept. */
enum td_status grammars_get(struct grammars *g, uint32_t kind, const void *text, size_t len, struct grammar **out,
                            struct td_error *e)
{
    struct kept *oldest;
    if (!g->vocab)
        return td_fail(e, TD_ERR_UNSUPPORTED, "leg.grammar: this worker has no tokenizer");
    pthread_mutex_lock(&g->lock);
    struct kept *k = find(g, kind, text, len, &oldest);
    *out = k ? grammar_ref(k->grammar) : NULL;
    if (k)
        k->used = ++g->n_used;
    pthread_mutex_unlock(&g->lock);
    if (*out)
        return TD_OK;
    enum td_status s = grammar_compile(g->vocab, (enum grammar_kind)kind, text, len, out, e);
    if (s)
        return s;
    pthread_mutex_lock(&g->lock);
    if (!find(g, kind, text, len, &oldest)) {
        struct kept *newest = oldest;
        size_t bytes;
        forget(newest);
        *newest = (struct kept){grammar_ref(*out), kind, mem_dup(text, len), len, ++g->n_used};
        while ((oldest = oldest_of(g, newest, &bytes)) && bytes > BYTES_MOST)
            forget(oldest);
    }
    pthread_mutex_unlock(&g->lock);
    return TD_OK;
}
