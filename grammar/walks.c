/* Walks over the vocabulary's trie, and the parts that they make (masks.h). */
#include "grammar/masks.h"

#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------------------- walks */

/* Tokens of a list; nodes; exits, and bytes of a token: merging calls itself for each byte. */
enum { LISTED_MOST = 1024, STAYS_LEAST = 16, MERGED_LEAST = 16, MERGED_LONGEST = 4096 };

static void list_to_words(const struct grammar_vocab *v, struct gr_walk *w)
{
    w->words = mem_array(grammar_mask_words(v), sizeof(*w->words));
    for (uint32_t i = 0; i < w->n_ids; i++)
        w->words[w->ids[i] / 32] |= 1u << w->ids[i] % 32;
    free(w->ids);
    w->ids = NULL;
    w->n_ids = w->cap_ids = 0;
}

static inline void meet(const struct grammar_vocab *v, struct gr_walk *w, uint32_t id)
{
    if (!w->words && w->n_ids == LISTED_MOST)
        list_to_words(v, w);
    if (w->words) {
        w->words[id / 32] |= 1u << id % 32;
        return;
    }
    w->ids = MEM_ROOM(w->ids, w->n_ids, w->cap_ids, 16);
    w->ids[w->n_ids++] = id;
}

static void meet_exit(struct gr_walk *w, uint32_t node)
{
    w->exits = MEM_ROOM(w->exits, w->n_exits, w->cap_exits, 16);
    w->exits[w->n_exits++] = node;
}

/* Tokens of the node and below it: [from, *end_out) in the vocabulary's order. */
static uint32_t tokens_below(const struct grammar_vocab *v, uint32_t node, uint32_t *end_out)
{
    uint32_t behind = v->nodes[node].end;
    *end_out = behind < v->n_nodes ? v->nodes[behind].first_token : v->n_listed;
    return v->nodes[node].first_token;
}

/* Takes over from the loop's part the exits at the node and below it. */
static void take_exits(const struct gr_cache *c, const struct gr_loop *l, uint32_t node, struct gr_walk *w)
{
    uint32_t low = 0, high = l->part->n_exits;
    while (low < high) { /* they are in the order of nodes */
        uint32_t middle = (low + high) / 2;
        if (l->part->exits[middle] < node)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < l->part->n_exits && l->part->exits[low] < c->vocab->nodes[node].end; low++)
        meet_exit(w, l->part->exits[low]);
}

/* ...and the tokens. */
static void take_loop(const struct gr_cache *c, const struct gr_loop *l, uint32_t node, struct gr_walk *w)
{
    const uint32_t *tokens = c->vocab->tokens, *bits = l->part->bits;
    uint32_t end;
    for (uint32_t k = tokens_below(c->vocab, node, &end); k < end; k++)
        if (bits[tokens[k] / 32] >> tokens[k] % 32 & 1)
            meet(c->vocab, w, tokens[k]);
    take_exits(c, l, node, w);
}

/* The loop that the place, when it is reached at the node, is at; NULL: none. */
static inline const struct gr_loop *loop_at(const struct gr_cache *c, uint32_t local, uint32_t node)
{
    bool is_one = local != GR_DEAD && c->flags[local] & GR_LOOPS && c->locals[local].loop->is_at[node];
    return is_one ? c->locals[local].loop : NULL;
}

void gr_begin_walk(struct gr_cache *c)
{
    c->walk = c->is_common || c->walk == UINT32_MAX ? 1 : c->walk + 1;
    c->n_nodes = 0;
}

/*
 * Whether all bytes below the node lead from the place back to it, without an end. Small subtrees are not
 * worth the question. The steps are met in each walk that asks, so that its work does not depend on what is
 * kept.
 */
static bool stays(struct gr_cache *c, uint32_t local, uint32_t node)
{
    const struct gr_trie_node *n = &c->vocab->nodes[node];
    if (n->end - node < STAYS_LEAST || c->flags[local] & GR_MAY_END)
        return false;
    if (c->locals[local].stays_walk != c->walk) {
        uint64_t kinds = UINT64_MAX;
        for (uint32_t b = 0; b < 256; b++)
            if (gr_is_too_much(c) || gr_local_step(c, local, (uint8_t)b) != local)
                kinds &= ~gr_kind_of((uint8_t)b);
        c->locals[local].stays = kinds;
        c->locals[local].stays_walk = c->walk;
    }
    return !(n->below & ~c->locals[local].stays);
}

static void meet_below(const struct grammar_vocab *v, uint32_t node, struct gr_walk *w)
{
    uint32_t end;
    for (uint32_t k = tokens_below(v, node, &end); k < end; k++)
        meet(v, w, v->tokens[k]);
}

/* Walks over nodes [from, end), which are the node `from` and what is behind it, at most up to a node that is
 * less deep. */
static void walk_nodes(struct gr_cache *c, uint32_t from, uint32_t end, struct gr_walk *w)
{
    const struct gr_trie_node *nodes = c->vocab->nodes;
    uint32_t *path = c->path;
    for (uint32_t i = from; i < end && !gr_is_too_much(c); c->n_nodes++) {
        const struct gr_trie_node *n = &nodes[i];
        uint32_t at = gr_local_step(c, path[n->depth - 1], n->byte);
        const struct gr_loop *l = loop_at(c, at, i);
        if (at == GR_DEAD || l) {
            if (l)
                take_loop(c, l, i, w);
            i = n->end;
            continue;
        }
        if (at == path[n->depth - 1] && stays(c, at, i)) {
            meet_below(c->vocab, i, w);
            i = n->end;
            continue;
        }
        for (uint32_t k = n->first_token; k < n->first_token + n->n_tokens; k++)
            meet(c->vocab, w, c->vocab->tokens[k]);
        if (c->flags[at] & GR_MAY_END && n->end > i + 1)
            meet_exit(w, i);
        path[n->depth] = at;
        i = c->flags[at] & GR_GOES_ON ? i + 1 : n->end;
    }
}

void gr_walk_below(struct gr_cache *c, uint32_t node, uint32_t local, struct gr_walk *w)
{
    c->path[c->vocab->nodes[node].depth] = local;
    walk_nodes(c, node + 1, c->vocab->nodes[node].end, w);
}

/* The next byte of the set from `byte` on that tokens begin with; 256: none. */
static uint32_t next_beginning(const struct grammar_vocab *v, const uint64_t *set, uint32_t byte)
{
    while (byte < 256 && !(set[byte / 64] >> byte % 64 & 1 && v->beginnings[byte]))
        byte++;
    return byte;
}

/* Where many tokens may be taken at once, each of the merged nodes is walked by itself. */
static void walk_merged(struct gr_cache *c, const struct gr_merged *m, uint32_t local, struct gr_walk *w)
{
    const struct gr_trie_node *nodes = c->vocab->nodes;
    uint32_t *path = c->merged_path;
    path[0] = local;
    for (uint32_t i = 0; i < m->n_nodes && !gr_is_too_much(c); c->n_nodes++) {
        const struct gr_merged_node *n = &m->nodes[i];
        uint32_t before = path[n->depth - 1], at = gr_local_step(c, before, n->byte);
        const uint32_t *origins = m->origins + n->first_origin, *tokens = m->tokens + n->first_token;
        if (at == GR_DEAD) {
            i = n->end;
            continue;
        }
        if (at == before || c->flags[at] & GR_LOOPS) {
            for (uint32_t k = 0; k < n->n_origins; k++) {
                c->path[nodes[origins[k]].depth - 1] = before;
                walk_nodes(c, origins[k], nodes[origins[k]].end, w);
            }
            i = n->end;
            continue;
        }
        for (uint32_t k = 0; k < n->n_tokens; k++)
            meet(c->vocab, w, tokens[k]);
        for (uint32_t k = 0; k < n->n_origins && c->flags[at] & GR_MAY_END; k++)
            if (nodes[origins[k]].end > origins[k] + 1)
                meet_exit(w, origins[k]);
        path[n->depth] = at;
        i = c->flags[at] & GR_GOES_ON ? i + 1 : n->end;
    }
}

void gr_walk_exits(struct gr_cache *c, const struct gr_part *p, uint32_t local, struct gr_walk *w)
{
    if (p->below)
        walk_merged(c, p->below, local, w);
    for (uint32_t k = 0; k < p->n_exits && !p->below; k++)
        gr_walk_below(c, p->exits[k], local, w);
}

/* The loop that the place comes to by letters, if more than a quarter of all tokens may begin here; NULL:
 * none. */
static const struct gr_loop *main_loop(struct gr_cache *c, uint32_t local)
{
    const struct grammar_vocab *v = c->vocab;
    uint32_t n = 0, at = local, end = 0;
    if (gr_local_step(c, local, 'e') == GR_DEAD)
        return NULL;
    for (uint32_t i = 1; i < v->n_nodes; i = v->nodes[i].end)
        if (gr_local_step(c, local, v->nodes[i].byte) != GR_DEAD) {
            uint32_t first = tokens_below(v, i, &end);
            n += end - first;
        }
    for (uint32_t i = 0; i < v->longest && n > v->n_listed / 4 && at != GR_DEAD; i++) {
        at = gr_local_step(c, at, 'e');
        if (at != GR_DEAD && c->flags[at] & GR_LOOPS)
            return c->locals[at].loop;
    }
    return NULL;
}

static void clear_below(const struct grammar_vocab *v, uint32_t node, uint32_t *words)
{
    uint32_t end;
    for (uint32_t k = tokens_below(v, node, &end); k < end; k++)
        words[v->tokens[k] / 32] &= ~(1u << v->tokens[k] % 32);
}

/* Walks over the whole trie for a place that mostly leads to a loop: begins with all that the loop has, and
 * goes over what is not below a node that the loop is at. */
static void walk_from_loop(struct gr_cache *c, uint32_t local, const struct gr_loop *l, struct gr_walk *w)
{
    const struct grammar_vocab *v = c->vocab;
    const struct gr_part *p = l->part;
    uint32_t *path = c->path, i = 1, k = 0; /* k: of the loop's exits */
    w->words = mem_dup(p->bits, grammar_mask_words(v) * sizeof(*w->words));
    path[0] = local;
    for (; i < v->n_nodes && !gr_is_too_much(c); c->n_nodes++) {
        const struct gr_trie_node *n = &v->nodes[i];
        uint32_t at = gr_local_step(c, path[n->depth - 1], n->byte);
        if (at != GR_DEAD && loop_at(c, at, i) == l) {
            while (k < p->n_exits && p->exits[k] < i)
                k++;
            for (; k < p->n_exits && p->exits[k] < n->end; k++)
                meet_exit(w, p->exits[k]);
            i = n->end;
            continue;
        }
        if (at != GR_DEAD && at == path[n->depth - 1] && stays(c, at, i)) {
            meet_below(v, i, w);
            i = n->end;
            continue;
        }
        bool goes_on = at != GR_DEAD && c->flags[at] & GR_GOES_ON;
        if (!goes_on)
            clear_below(v, i, w->words);
        for (uint32_t t = n->first_token; at != GR_DEAD && t < n->first_token + n->n_tokens; t++)
            meet(v, w, v->tokens[t]);
        if (at != GR_DEAD && c->flags[at] & GR_MAY_END && n->end > i + 1)
            meet_exit(w, i);
        path[n->depth] = at;
        i = goes_on ? i + 1 : n->end;
    }
}

static void walk_all(struct gr_cache *c, uint32_t local, struct gr_walk *w)
{
    const struct grammar_vocab *v = c->vocab;
    const struct gr_loop *l = main_loop(c, local);
    if (l) {
        walk_from_loop(c, local, l, w);
        return;
    }
    c->path[0] = local;
    for (uint32_t b = 0; (b = next_beginning(v, c->taken[local], b)) < 256; b++)
        walk_nodes(c, v->beginnings[b], v->nodes[v->beginnings[b]].end, w);
}

const struct gr_part *gr_part_of(struct gr_cache *c, uint32_t local)
{
    if (c->locals[local].part)
        return c->locals[local].part;
    struct gr_part *p = mem_zalloc(sizeof(*p));
    struct gr_walk w = {0};
    uint64_t n_before = c->n_nodes; /* of a walk that comes upon a common rule */
    gr_begin_walk(c);
    walk_all(c, local, &w);
    *p = (struct gr_part){w.ids, w.n_ids, w.words, w.exits, w.n_exits, NULL, c->n_nodes};
    if (c->is_common && p->n_exits >= MERGED_LEAST && c->vocab->longest <= MERGED_LONGEST)
        p->below = gr_merge(c->vocab, p->exits, p->n_exits);
    c->n_nodes = n_before;
    c->bytes += (w.cap_exits + w.cap_ids + (w.words ? grammar_mask_words(c->vocab) : 0)) * sizeof(uint32_t);
    c->locals[local].part = p;
    return p;
}

/* ----------------------------------------------------------------------- loops */

/* Whether all letters lead from the shared place back to it. */
static bool loops(struct gr_cache *shared, uint32_t local)
{
    for (uint8_t b = 'a'; b <= 'z'; b++)
        if (gr_local_step(shared, local, b) != local)
            return false;
    return true;
}

static const struct gr_loop *loop_of(struct gr_cache *shared, uint32_t local)
{
    const struct grammar_vocab *v = shared->vocab;
    const struct gr_part *p = gr_part_of(shared, local);
    if (shared->locals[local].loop || !p->bits)
        return shared->locals[local].loop;
    struct gr_loop *l = mem_zalloc(sizeof(*l));
    l->part = p;
    l->is_at = mem_array(v->n_nodes, 1);
    shared->path[0] = local;
    for (uint32_t i = 1; i < v->n_nodes;) {
        uint32_t at = gr_local_step(shared, shared->path[v->nodes[i].depth - 1], v->nodes[i].byte);
        l->is_at[i] = at == local;
        shared->path[v->nodes[i].depth] = at;
        i = at == GR_DEAD || !(shared->flags[at] & GR_GOES_ON) ? v->nodes[i].end : i + 1;
    }
    shared->locals[local].loop = l;
    return l;
}

void gr_find_loop(struct gr_cache *c, uint32_t local)
{
    const struct gr_places *places = &c->locals[local].places;
    if (!c->shared || places->is_done)
        return;
    for (uint32_t i = 0; i < places->n_frames; i++)
        if (places->frames[i].state >= c->n_shared)
            return;
    uint32_t there = gr_local_of(c->shared, places);
    if (places->n_stacks && loops(c->shared, there))
        c->locals[local].loop = loop_of(c->shared, there);
    c->flags[local] |= c->locals[local].loop ? GR_LOOPS : 0;
}

void gr_share_loop(struct gr_cache *shared, uint32_t local)
{
    if (loops(shared, local) && loop_of(shared, local))
        shared->flags[local] |= GR_LOOPS;
}
