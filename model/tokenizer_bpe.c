/*
 * Byte-pair encoding of one piece: symbols in a linked list, candidate merges in a heap by (rank, position), so that the
 * lowest rank goes first and the leftmost of equal ones: n log n whatever the text. A candidate that was overtaken by
 * another merge is told by its symbols' ids having changed, and skipped.
 */
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_internal.h"

struct symbol {
    uint32_t id;
    int32_t prev, next; /* -1: none */
    bool gone;
};

struct candidate {
    uint32_t rank;
    int32_t at; /* left symbol */
    uint32_t left, right, id;
};

struct work {
    struct symbol *symbols;
    struct candidate *heap;
    size_t n_symbols, n_heap, cap_heap;
};

static bool before(const struct candidate *a, const struct candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static void heap_push(struct work *w, struct candidate c)
{
    if (w->n_heap == w->cap_heap) {
        w->cap_heap = w->cap_heap ? w->cap_heap * 2 : 64;
        w->heap = mem_resize(w->heap, w->cap_heap, sizeof(*w->heap));
    }
    size_t i = w->n_heap++;
    for (size_t up = (i - 1) / 2; i && before(&c, &w->heap[up]); i = up, up = (i - 1) / 2)
        w->heap[i] = w->heap[up];
    w->heap[i] = c;
}

static struct candidate heap_pop(struct work *w)
{
    struct candidate top = w->heap[0], last = w->heap[--w->n_heap];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < w->n_heap; i = child) {
        if (child + 1 < w->n_heap && before(&w->heap[child + 1], &w->heap[child]))
            child++;
        if (!before(&w->heap[child], &last))
            break;
        w->heap[i] = w->heap[child];
    }
    if (w->n_heap)
        w->heap[i] = last;
    return top;
}

static void consider(const struct tokenizer *t, struct work *w, int32_t at)
{
    if (at < 0 || w->symbols[at].next < 0)
        return;
    uint32_t left = w->symbols[at].id, right = w->symbols[w->symbols[at].next].id;
    const struct merge *m = merge_map_find(&t->merges, left, right);
    if (m)
        heap_push(w, (struct candidate){m->rank, at, left, right, m->id});
}

static void merge_all(const struct tokenizer *t, struct work *w)
{
    for (size_t i = 0; i + 1 < w->n_symbols; i++)
        consider(t, w, (int32_t)i);
    while (w->n_heap) {
        struct candidate c = heap_pop(w);
        struct symbol *s = &w->symbols[c.at];
        if (s->gone || s->id != c.left || s->next < 0 || w->symbols[s->next].id != c.right)
            continue;
        struct symbol *right = &w->symbols[s->next];
        right->gone = true;
        s->id = c.id;
        s->next = right->next;
        if (s->next >= 0)
            w->symbols[s->next].prev = c.at;
        consider(t, w, s->prev);
        consider(t, w, c.at);
    }
}

static void add_symbol(struct work *w, uint32_t id)
{
    int32_t i = (int32_t)w->n_symbols++;
    w->symbols[i] = (struct symbol){.id = id, .prev = i - 1, .next = -1};
    if (i)
        w->symbols[i - 1].next = i;
}

static size_t char_len(unsigned char c)
{
    return c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
}

/* One character of a SentencePiece kind: itself, its bytes, or the unknown token (one for a run, where they fuse). */
static void add_char(const struct tokenizer *t, struct work *w, struct slice c, bool *in_unk)
{
    uint32_t id;
    bool was_unk = *in_unk, bytes = t->byte_fallback;
    *in_unk = false;
    if (id_map_find(&t->vocab, c, &id)) {
        add_symbol(w, id);
        return;
    }
    for (size_t i = 0; i < c.len; i++)
        bytes = bytes && t->has_byte[(unsigned char)c.data[i]];
    for (size_t i = 0; bytes && i < c.len; i++)
        add_symbol(w, t->byte_ids[(unsigned char)c.data[i]]);
    if (bytes || !t->has_unk)
        return;
    *in_unk = true;
    if (!was_unk || !t->fuse_unk)
        add_symbol(w, t->unk_id);
}

static void split_symbols(const struct tokenizer *t, struct work *w, struct slice text)
{
    bool in_unk = false;
    for (size_t i = 0; i < text.len;) {
        size_t n = t->byte_level ? 1 : char_len((unsigned char)text.data[i]);
        unsigned char b = (unsigned char)text.data[i];
        if (!t->byte_level)
            add_char(t, w, (struct slice){text.data + i, n}, &in_unk);
        else if (t->has_byte[b])
            add_symbol(w, t->byte_ids[b]);
        i += n;
    }
}

void tokenizer_bpe(const struct tokenizer *t, struct slice text, struct token_ids *out)
{
    uint32_t id;
    if (!text.len)
        return;
    if (t->ignore_merges && id_map_find(&t->vocab, text, &id)) {
        token_ids_push(out, id);
        return;
    }
    struct symbol few[256];
    struct work w = {.symbols = text.len <= 256 ? few : mem_array(text.len, sizeof(struct symbol))};
    split_symbols(t, &w, text);
    merge_all(t, &w);
    for (int32_t i = w.n_symbols ? 0 : -1; i >= 0; i = w.symbols[i].next)
        token_ids_push(out, w.symbols[i].id);
    if (w.symbols != few)
        free(w.symbols);
    free(w.heap);
}
