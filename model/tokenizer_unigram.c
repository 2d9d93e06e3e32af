/*
 * Unigram: the segmentation of a text whose pieces have the largest sum of scores (Viterbi; Kudo 2018,
 * section 3.2). A character with which no piece begins costs 10 more than the worst piece; a run of such
 * characters becomes one unknown token, or its bytes.
 */
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_internal.h"

/* The best segmentation that ends here. */
struct unigram_way {
    double score;
    size_t begin; /* beginning of its last piece; SIZE_MAX: nothing ends here */
    uint32_t id;
};

static void offer(struct unigram_way *w, size_t begin, size_t end, double score, uint32_t id)
{
    if (w[end].begin == SIZE_MAX || score > w[end].score)
        w[end] = (struct unigram_way){score, begin, id};
}

static bool forward(const struct tokenizer *t, struct slice text, struct unigram_way *w)
{
    w[0].begin = 0;
    w[0].score = 0;
    for (size_t i = 1; i <= text.len; i++)
        w[i].begin = SIZE_MAX;
    for (size_t at = 0; at < text.len;) {
        size_t first = utf8_length((unsigned char)text.data[at]);
        bool single = false;
        uint32_t hash = HASH_BEGIN, id;
        for (size_t end = at; end < text.len;) {
            size_t n = utf8_length((unsigned char)text.data[end]);
            hash = id_map_hash(hash, text.data + end, n);
            end += n;
            if (!id_map_find_hashed(&t->prefixes, (struct slice){text.data + at, end - at}, hash, &id))
                break;
            if (id == NO_ID)
                continue;
            offer(w, at, end, w[at].score + t->scores[id], id);
            single |= end - at == first;
        }
        if (!single && !t->has_unk)
            return false;
        if (!single)
            offer(w, at, at + first, w[at].score + t->unk_score, t->unk_id);
        at += first;
    }
    return true;
}

/* Appends piece [begin, end): its id, its bytes, or the unknown token. */
static void push_piece(const struct tokenizer *t, struct slice piece, struct token_ids *out)
{
    uint32_t id;
    bool bytes = t->byte_fallback;
    if (id_map_find(&t->vocab, piece, &id)) {
        token_ids_push(out, id);
        return;
    }
    for (size_t i = 0; i < piece.len; i++)
        bytes = bytes && t->has_byte[(unsigned char)piece.data[i]];
    for (size_t i = 0; bytes && i < piece.len; i++)
        token_ids_push(out, t->byte_ids[(unsigned char)piece.data[i]]);
    if (!bytes)
        token_ids_push(out, t->unk_id);
}

enum td_status tokenizer_unigram(const struct tokenizer *t, struct slice text, struct token_ids *out,
                                 struct td_error *e)
{
    struct unigram_way *w = mem_resize(NULL, text.len + 1, sizeof(*w));
    size_t *ends = mem_resize(NULL, text.len + 1, sizeof(*ends)), n = 0;
    if (!forward(t, text, w)) {
        free(w);
        free(ends);
        return td_fail(e, TD_ERR_INVALID, "text: a character is not in the vocabulary, which has no unknown token");
    }
    for (size_t end = text.len; end; end = w[end].begin)
        ends[n++] = end;
    for (size_t i = n, begin = 0; i-- > 0; begin = ends[i]) {
        bool unk = t->has_unk && w[ends[i]].id == t->unk_id;
        while (unk && i && w[ends[i - 1]].id == t->unk_id)
            i--;
        push_piece(t, (struct slice){text.data + begin, ends[i] - begin}, out);
    }
    free(w);
    free(ends);
    return TD_OK;
}
