/*
 * Masks of cursors (masks.h).
 *
 * Counts that are far from their limits make no difference within one token, so they are replaced by one
 * that is as far; a string of at most 5,000 characters has as many parts as the longest token has bytes. The
 * length of a string is counted by a repeat that all schemas share (struct gr_strings), so its parts are made
 * once for a vocabulary.
 *
 * Whole masks are kept by the places of the cursor: within a string, and wherever another answer of the same
 * grammar was before, a mask is copied.
 */
#include "grammar/masks.h"

#include <stdlib.h>
#include <string.h>

static const size_t CACHE_BYTES_MOST = 16 << 20;
/* A mask of more than KEPT_FRAMES_MOST frames is not kept: it costs too much to find it. LENGTHS_MOST:
 * characters before the limit of a string for which parts are common; those are kept for ever. */
enum { KEPT_FRAMES_MOST = 512, LENGTHS_MOST = 64 };

static uint64_t canonical_count(const struct gr_repeat *r, uint64_t count, uint32_t longest)
{
    if (count + longest < r->least)
        return 0;
    if (r->most != UINT32_MAX && count >= r->least && count + longest < r->most)
        return r->least;
    return count;
}

/* The frame of a repeat, as far from its limits as makes a difference within one token; others as they
 * are. */
static struct gr_frame canonical(const struct gr_cache *c, struct gr_frame f)
{
    const struct gr_program *p = c->program;
    if (p->states[f.state].op != GR_OP_BACK)
        return f;
    const struct gr_repeat *r = &p->repeats[p->states[f.state].a];
    uint64_t left = r->most - f.data, longest = c->vocab->longest;
    bool is_length = p->strings.character && r->body == p->strings.character && r->most != UINT32_MAX &&
                     (!r->least || r->least == r->most);
    if (is_length && (left <= LENGTHS_MOST || left > longest)) {
        const struct gr_repeat *common = &p->repeats[r->least ? p->strings.exactly : p->strings.at_most];
        f.state = common->back;
        f.data = common->most - (left <= longest ? left : longest + 1);
    } else {
        f.data = canonical_count(r, f.data, c->vocab->longest);
    }
    return f;
}

/* Where a stack is cut: its upper frames as a local place. */
struct cut {
    struct gr_cache *cache;
    uint32_t local, base; /* base: frames below */
};

static struct cut cut(struct gr_cache *c, const struct gr_frame *stack, uint32_t n)
{
    struct gr_frame copy[GR_DEPTH_MOST];
    struct gr_stack whole = {0, 0};
    uint32_t base = n - 1, highest = 0;
    while (base && !stack[base].is_base)
        base--;
    whole.n = n - base;
    memcpy(copy, stack + base, whole.n * sizeof(*copy));
    for (uint32_t i = 0; i < whole.n; i++) {
        copy[i] = canonical(c, copy[i]);
        highest = copy[i].state > highest ? copy[i].state : highest;
    }
    c = highest < c->n_shared ? c->shared : c;
    struct gr_places one = {.frames = copy, .stacks = &whole, .n_frames = whole.n, .n_stacks = 1};
    return (struct cut){c, gr_local_of(c, &one), base};
}

/* Walks on from the exits of a part, at which all frames from n on have ended. */
static void walk_up(struct gr_cache *c, const struct gr_frame *stack, uint32_t n, const struct gr_part *part,
                    uint32_t *words)
{
    struct gr_places below = {0};
    if (!n || !part->n_exits)
        return; /* nothing is left that could go on */
    gr_close(c->program, stack, n, &below);
    c->n_nodes += GR_NODES_A_UNIT * below.n_units;
    for (uint32_t i = 0; i < below.n_stacks && !gr_is_too_much(c); i++) {
        const struct gr_frame *other = below.frames + below.stacks[i].at;
        struct gr_walk w = {.words = words};
        struct cut at = cut(c, other, below.stacks[i].n);
        gr_walk_exits(at.cache, part, at.local, &w);
        if (at.cache->is_common) {
            c->n_nodes += at.cache->n_nodes;
            at.cache->n_nodes = 0;
        }
        const struct gr_part rest = {.exits = w.exits, .n_exits = w.n_exits};
        walk_up(c, other, at.base, &rest, words);
        free(w.exits);
    }
    gr_places_free(&below);
}

static void add_part(const struct gr_part *p, uint32_t n_words, uint32_t *words)
{
    for (uint32_t i = 0; i < n_words && p->bits; i++)
        words[i] |= p->bits[i];
    for (uint32_t i = 0; i < p->n_tokens; i++)
        words[p->tokens[i] / 32] |= 1u << p->tokens[i] % 32;
}

/* False: it is too much. */
static bool make(struct gr_cache *c, const struct gr_places *now, uint32_t *words)
{
    const uint32_t n_words = grammar_mask_words(c->vocab);
    const struct gr_part *parts[GR_STACKS_MOST];
    uint32_t bases[GR_STACKS_MOST];
    uint64_t n_nodes = 0;
    memset(words, 0, n_words * sizeof(*words));
    for (uint32_t i = 0; i < now->n_stacks && n_nodes <= c->most; i++) {
        struct cut at = cut(c, now->frames + now->stacks[i].at, now->stacks[i].n);
        parts[i] = gr_part_of(at.cache, at.local);
        bases[i] = at.base;
        n_nodes += parts[i]->n_nodes;
    }
    gr_begin_walk(c);
    c->n_nodes = n_nodes;
    for (uint32_t i = 0; i < now->n_stacks && !gr_is_too_much(c); i++) {
        add_part(parts[i], n_words, words);
        walk_up(c, now->frames + now->stacks[i].at, bases[i], parts[i], words);
    }
    return !gr_is_too_much(c);
}

/* ----------------------------------------------------------------- masks that are kept */

/* These places with canonical counts; the caller frees their frames. */
static struct gr_places key_of(const struct gr_cache *c, const struct gr_places *now)
{
    struct gr_places key = *now;
    key.frames = mem_array(now->n_frames, sizeof(*key.frames));
    for (uint32_t i = 0; i < now->n_frames; i++)
        key.frames[i] = canonical(c, now->frames[i]);
    return key;
}

static void keep(struct gr_cache *c, struct gr_whole *w, uint64_t hash, const struct gr_places *key,
                 const uint32_t *words)
{
    const size_t len_bytes = grammar_mask_words(c->vocab) * sizeof(*words);
    if (w->words) {
        memcpy(w->words, words, len_bytes);
    } else {
        w->words = mem_dup(words, len_bytes);
        c->bytes += len_bytes;
    }
    c->bytes -= w->places.n_frames * sizeof(*key->frames);
    gr_places_free(&w->places);
    w->places = gr_places_copy(key);
    c->bytes += w->places.n_frames * sizeof(*key->frames);
    w->hash = hash;
}

static bool find_or_make(struct gr_cache *c, const struct gr_places *now, uint32_t *words)
{
    if (now->n_frames > KEPT_FRAMES_MOST)
        return make(c, now, words);
    struct gr_places key = key_of(c, now);
    uint64_t hash = gr_places_hash(&key);
    c->wholes = c->wholes ? c->wholes : mem_array(GR_WHOLES, sizeof(*c->wholes));
    struct gr_whole *w = &c->wholes[hash % GR_WHOLES];
    bool is_kept = w->words && w->hash == hash && gr_places_equal(&w->places, &key), is_made = is_kept;
    if (is_kept)
        memcpy(words, w->words, grammar_mask_words(c->vocab) * sizeof(*words));
    else if ((is_made = make(c, now, words)))
        keep(c, w, hash, &key, words);
    free(key.frames);
    return is_made;
}

bool gr_mask(struct gr_cache *c, const struct gr_places *now, uint32_t *words)
{
    pthread_mutex_lock(&c->lock);
    if (c->bytes > CACHE_BYTES_MOST)
        gr_cache_forget(c);
    if (c->shared) /* never forgotten: there are few rules, and loops point into them */
        pthread_mutex_lock(&c->shared->lock);
    bool is_made = find_or_make(c, now, words);
    if (c->shared)
        pthread_mutex_unlock(&c->shared->lock);
    pthread_mutex_unlock(&c->lock);
    if (!is_made)
        memset(words, 0, grammar_mask_words(c->vocab) * sizeof(*words));
    return is_made;
}
