/*
 * Byte-pair encoding of one piece: symbols in a linked list, merged lowest rank first, of equal ranks the
 * leftmost first. A candidate may be outdated by another merge. This shows in what its symbols would merge to
 * now; it is then skipped.
 *
 * Short pieces keep their candidates in a heap by (rank, position). In long pieces (a whole text, for
 * SentencePiece kinds) each rank has a bucket, and a bitmap says which buckets are filled. Merges were
 * learned in the order of their ranks, so a merge only makes candidates of later ranks possible, the buckets
 * are emptied in one sweep, and the cost is linear. A candidate of an earlier rank (no trained vocabulary has
 * one) goes to the heap, which is always asked first.
 */
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_internal.h"

enum { LONG_PIECE = 2048, RADIX_BITS = 11, RADIX_FROM = 512, MOST_KEPT = 1 << 16 };

struct symbol {
    uint32_t id;
    int32_t prev, next; /* -1: none */
    bool gone;
};

struct bpe_candidate {
    uint32_t rank;
    int32_t at; /* index of the left symbol */
    uint32_t left, right, id;
};

struct bpe_node {
    struct bpe_candidate c;
    uint32_t next; /* next in its bucket: index + 1; 0: the last one */
};

struct bpe_work {
    struct symbol *symbols;
    struct bpe_candidate *heap, *batch, *other;
    struct bpe_node *nodes;
    size_t n_symbols, cap_symbols, n_heap, cap_heap, n_nodes, cap_nodes, cap_batch;
    uint32_t n_ranks, *heads;   /* of the buckets; allocated when the first long piece comes */
    uint64_t *filled, *summary; /* one bit for each bucket; one bit for each word of filled */
    bool buckets;               /* this piece uses buckets */
    uint32_t now;               /* the rank that the sweep has reached */
};

struct bpe_work *bpe_work_open(const struct tokenizer *t)
{
    struct bpe_work *w = mem_zalloc(sizeof(*w));
    w->n_ranks = t->n_ranks;
    return w;
}

static void free_arrays(struct bpe_work *w)
{
    free(w->symbols);
    free(w->heap);
    free(w->batch);
    free(w->other);
    free(w->nodes);
    w->symbols = NULL;
    w->heap = w->batch = w->other = NULL;
    w->nodes = NULL;
    w->cap_symbols = w->cap_heap = w->cap_batch = w->cap_nodes = 0;
}

void bpe_work_trim(struct bpe_work *w)
{
    if (w->cap_symbols > MOST_KEPT)
        free_arrays(w);
}

void bpe_work_close(struct bpe_work *w)
{
    free_arrays(w);
    free(w->heads);
    free(w->filled);
    free(w->summary);
    free(w);
}

/* -------------------------------------------------------------------- heap */

static bool before(const struct bpe_candidate *a, const struct bpe_candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static void heap_push(struct bpe_work *w, struct bpe_candidate c)
{
    w->heap = MEM_ROOM(w->heap, w->n_heap, w->cap_heap, 64);
    size_t i = w->n_heap++;
    for (size_t up = (i - 1) / 2; i && before(&c, &w->heap[up]); i = up, up = (i - 1) / 2)
        w->heap[i] = w->heap[up];
    w->heap[i] = c;
}

static struct bpe_candidate heap_pop(struct bpe_work *w)
{
    struct bpe_candidate top = w->heap[0], last = w->heap[--w->n_heap];
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

/* ----------------------------------------------------------------- buckets */

static void buckets_begin(struct bpe_work *w)
{
    size_t words = w->n_ranks / 64 + 1;
    if (!w->heads) { /* allocated once; empty again after each piece */
        w->heads = mem_array(w->n_ranks, sizeof(*w->heads));
        w->filled = mem_array(words, sizeof(*w->filled));
        w->summary = mem_array(words / 64 + 1, sizeof(*w->summary));
    }
    w->n_nodes = 0;
    w->now = 0;
    w->buckets = true;
}

static void bucket_push(struct bpe_work *w, struct bpe_candidate c)
{
    w->nodes = MEM_ROOM(w->nodes, w->n_nodes, w->cap_nodes, 4096);
    w->nodes[w->n_nodes] = (struct bpe_node){c, w->heads[c.rank]};
    w->heads[c.rank] = (uint32_t)++w->n_nodes;
    w->filled[c.rank / 64] |= 1ull << c.rank % 64;
    w->summary[c.rank / 4096] |= 1ull << c.rank / 64 % 64;
}

/* The first filled bucket. False: all are empty. */
static bool bucket_first(const struct bpe_work *w, uint32_t *rank_out)
{
    for (size_t i = w->now / 4096; i <= w->n_ranks / 4096; i++)
        if (w->summary[i]) {
            size_t word = i * 64 + (size_t)__builtin_ctzll(w->summary[i]);
            *rank_out = (uint32_t)(word * 64 + (size_t)__builtin_ctzll(w->filled[word]));
            return true;
        }
    return false;
}

static int by_position(const void *a, const void *b)
{
    const struct bpe_candidate *x = a, *y = b;
    return x->at < y->at ? -1 : x->at > y->at;
}

static void radix_sort(struct bpe_work *w, size_t n)
{
    for (int shift = 0; shift < 32; shift += RADIX_BITS) {
        size_t at[(1 << RADIX_BITS) + 1] = {0};
        const uint32_t mask = (1 << RADIX_BITS) - 1;
        for (size_t i = 0; i < n; i++)
            at[((uint32_t)w->batch[i].at >> shift & mask) + 1]++;
        for (size_t i = 1; i <= mask; i++)
            at[i] += at[i - 1];
        for (size_t i = 0; i < n; i++)
            w->other[at[(uint32_t)w->batch[i].at >> shift & mask]++] = w->batch[i];
        struct bpe_candidate *swap = w->batch;
        w->batch = w->other;
        w->other = swap;
    }
}

/* Moves a bucket's candidates to w->batch, sorted by position. Returns how many. */
static size_t bucket_take(struct bpe_work *w, uint32_t rank)
{
    size_t n = 0;
    bool sorted = true;
    for (uint32_t i = w->heads[rank]; i; i = w->nodes[i - 1].next)
        n++;
    if (n > w->cap_batch) {
        w->cap_batch = n * 2;
        w->batch = mem_resize(w->batch, w->cap_batch, sizeof(*w->batch));
        w->other = mem_resize(w->other, w->cap_batch, sizeof(*w->other));
    }
    /* Candidates were pushed mostly from left to right, and the list runs the other way. */
    size_t at = n;
    for (uint32_t i = w->heads[rank]; i; i = w->nodes[i - 1].next) {
        w->batch[--at] = w->nodes[i - 1].c;
        sorted &= at + 1 == n || w->batch[at].at <= w->batch[at + 1].at;
    }
    w->heads[rank] = 0;
    if (!(w->filled[rank / 64] &= ~(1ull << rank % 64)))
        w->summary[rank / 4096] &= ~(1ull << rank / 64 % 64);
    if (!sorted && n > RADIX_FROM)
        radix_sort(w, n);
    else if (!sorted)
        qsort(w->batch, n, sizeof(*w->batch), by_position);
    return n;
}

/* ----------------------------------------------------------------- merging */

static void consider(const struct tokenizer *t, struct bpe_work *w, int32_t at)
{
    if (at < 0 || w->symbols[at].next < 0)
        return;
    uint32_t left = w->symbols[at].id, right = w->symbols[w->symbols[at].next].id;
    const struct merge *m = merge_map_find(&t->merges, left, right);
    if (!m)
        return;
    const struct bpe_candidate c = {m->rank, at, left, right, m->id};
    if (w->buckets && m->rank >= w->now)
        bucket_push(w, c);
    else
        heap_push(w, c);
}

static void try_merge(const struct tokenizer *t, struct bpe_work *w, const struct bpe_candidate *c)
{
    struct symbol *s = &w->symbols[c->at];
    if (s->gone || s->next < 0)
        return;
    struct symbol *right = &w->symbols[s->next];
    /* Another pair by now: valid only if it merges to the same. */
    if (s->id != c->left || right->id != c->right) {
        const struct merge *m = merge_map_find(&t->merges, s->id, right->id);
        if (!m || m->id != c->id)
            return;
    }
    right->gone = true;
    s->id = c->id;
    s->next = right->next;
    if (s->next >= 0)
        w->symbols[s->next].prev = c->at;
    consider(t, w, s->prev);
    consider(t, w, c->at);
}

static void drain_heap(const struct tokenizer *t, struct bpe_work *w)
{
    while (w->n_heap) {
        struct bpe_candidate c = heap_pop(w);
        try_merge(t, w, &c);
    }
}

static void merge_all(const struct tokenizer *t, struct bpe_work *w)
{
    w->buckets = false;
    if (w->n_symbols > LONG_PIECE)
        buckets_begin(w);
    for (size_t i = 0; i + 1 < w->n_symbols; i++)
        consider(t, w, (int32_t)i);
    uint32_t rank = 0;
    for (;;) { /* candidates in the heap rank before those in buckets */
        drain_heap(t, w);
        if (!w->buckets || !bucket_first(w, &rank))
            return;
        w->now = rank;
        size_t n = bucket_take(w, rank);
        for (size_t i = 0; i < n; i++) {
            if (w->n_heap && w->heap[0].rank < rank)
                drain_heap(t, w);
            try_merge(t, w, &w->batch[i]);
        }
    }
}

/* ----------------------------------------------------------------- symbols */

static void add_symbol(struct bpe_work *w, uint32_t id)
{
    int32_t i = (int32_t)w->n_symbols++;
    w->symbols[i] = (struct symbol){.id = id, .prev = i - 1, .next = -1};
    if (i)
        w->symbols[i - 1].next = i;
}

static bool find_char(const struct tokenizer *t, struct slice c, bool first, bool last, uint32_t *id)
{
    struct bytes key = {0};
    struct slice prefix = first ? (struct slice){"", 0} : t->word_prefix,
                 suffix = last ? t->word_suffix : (struct slice){"", 0};
    if (!prefix.len && !suffix.len)
        return id_map_find(&t->vocab, c, id);
    bytes_append(&key, prefix.data, prefix.len);
    bytes_append(&key, c.data, c.len);
    bytes_append(&key, suffix.data, suffix.len);
    bool found = id_map_find(&t->vocab, (struct slice){key.data, key.len}, id);
    bytes_free(&key);
    return found;
}

/*
 * Adds one character: as itself, as its bytes, or as the unknown token (one token for a run, if they fuse).
 */
static void add_char(const struct tokenizer *t, struct bpe_work *w, struct slice c, bool first, bool last, bool *in_unk)
{
    uint32_t id;
    bool was_unk = *in_unk, bytes = t->byte_fallback;
    *in_unk = false;
    if (find_char(t, c, first, last, &id)) {
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

static void split_symbols(const struct tokenizer *t, struct bpe_work *w, struct slice text)
{
    bool in_unk = false;
    for (size_t i = 0, n; i < text.len; i += n) {
        unsigned char b = (unsigned char)text.data[i];
        n = t->raw ? 1 : utf8_length(b);
        if (!t->raw)
            add_char(t, w, (struct slice){text.data + i, n}, !i, i + n == text.len, &in_unk);
        else if (t->has_byte[b])
            add_symbol(w, t->byte_ids[b]);
        else if (t->has_unk) { /* the same for a character of the alphabet */
            if (!in_unk || !t->fuse_unk)
                add_symbol(w, t->unk_id);
            in_unk = true;
            continue;
        }
        in_unk &= !t->raw;
    }
}

void tokenizer_bpe(const struct tokenizer *t, struct bpe_work *w, struct slice text, struct token_ids *out)
{
    uint32_t id;
    if (t->ignore_merges && id_map_find(&t->vocab, text, &id)) {
        token_ids_push(out, id);
        return;
    }
    if (text.len > w->cap_symbols) {
        w->cap_symbols = text.len * 2 > 256 ? text.len * 2 : 256;
        w->symbols = mem_resize(w->symbols, w->cap_symbols, sizeof(*w->symbols));
    }
    w->n_symbols = 0;
    split_symbols(t, w, text);
    merge_all(t, w);
    for (int32_t i = w->n_symbols ? 0 : -1; i >= 0; i = w->symbols[i].next)
        token_ids_push(out, w->symbols[i].id);
}
