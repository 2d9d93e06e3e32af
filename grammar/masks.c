/*
 * Masks: the walk over the vocabulary's trie, in parts that are kept.
 *
 * A *local* place is a set of stacks above the rule that was entered last (gr_frame.is_base), without what is
 * below. Local places and their steps by byte are kept like the states of a DFA that is made on demand. The
 * *part* of a local place is one walk over the whole trie: tokens that go on within the rule, or end it with
 * their last byte, and nodes at which the rule ends and longer tokens go on ("exits").
 *
 * The mask of a cursor is the union of the parts of its stacks, and of walks from their exits, with what is
 * below: closed again, cut again at its own rule, and so on upwards.
 *
 * Work is bounded, and the count does not depend on what is kept: a walk counts each step that it meets for
 * the first time as if nothing were kept. So all workers refuse to go on at the same token.
 *
 * Counts that are far from their limits make no difference within one token, so they are replaced by one that
 * is as far (canonical_count); a string of at most 5,000 characters has as many parts as the longest token
 * has bytes.
 */
#include "grammar/places.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { GOES_ON = 1, MAY_END = 2, LOOPS = 4 };
static const uint32_t UNKNOWN = UINT32_MAX - 1, DEAD = UINT32_MAX;
static const size_t CACHE_BYTES_MOST = 16 << 20;
/* A mask may take at most WALKS_MOST walks over the whole trie and FRAMES_MOST frames that are compared or
 * copied (gr_places.n_units), together: a frame counts as NODES_A_UNIT nodes of the trie. 1,000 schemas of
 * all kinds, with a vocabulary of 128,000 tokens, took at most 6 walks and 6,309 frames. */
enum { WALKS_MOST = 16, FRAMES_MOST = 1 << 18, NODES_A_UNIT = 16 };

struct mask_part {
    uint32_t *tokens, n_tokens; /* ids, if they are few */
    uint32_t *bits;             /* else a mask; NULL: they are few */
    uint32_t *exits, n_exits;   /* nodes that have children */
    uint64_t n_nodes;           /* work; above the cache's `most`: the walk did not come to its end */
};

struct mask_step { /* from a local place, by a class of bytes */
    uint32_t to;   /* local place; UNKNOWN, DEAD */
    uint32_t walk; /* the last one that met it */
    uint32_t n_units;
};

struct mask_local {
    uint64_t hash;
    struct gr_places places; /* is_done: the rule may have ended */
    struct mask_part *part;
    const struct mask_loop *loop; /* LOOPS: of the shared place that is the same; of a shared place its own, owned */
};

/*
 * Of a shared place to which most bytes lead back, such as the inside of a string: the nodes of the trie
 * whose bytes lead from it to itself. What goes on below such a node is what its part says, so another
 * walk that comes to the same place there takes it over.
 */
struct mask_loop {
    const struct mask_part *part;
    uint8_t *is_at; /* by node */
};

/* Local places of one program, and their parts. */
struct gr_cache {
    struct gr_cache *shared; /* of the vocabulary; NULL: this is it, or nothing is shared */
    uint32_t n_shared;       /* states that are shared */
    bool is_common;          /* it is the one of the vocabulary */
    const struct grammar_vocab *vocab;
    const struct gr_program *program;
    uint8_t classes[256];
    uint32_t n_classes;
    pthread_mutex_t lock; /* guards the rest */
    struct mask_local *locals;
    struct mask_step *steps; /* by local place, then by class of bytes */
    uint8_t *flags;          /* GOES_ON, MAY_END */
    uint32_t walk;           /* number of the present one; the first is 1 */
    uint64_t n_nodes, most;  /* work of the present one, and of any mask */
    uint32_t n_locals, cap_locals;
    uint32_t *table, n_table; /* hash table of indexes + 1 */
    size_t bytes;
    struct gr_places scratch;
    uint32_t *path; /* local place at each depth of a walk */
};

/* Rules that all schemas have (gr_json_init) and that call only each other: their states have the same
 * numbers in every program, so their parts are made once for a vocabulary. */
struct gr_shared {
    struct gr_program program;
    struct gr_json json;
    struct gr_cache cache;
};

struct grammar {
    atomic_uint n_refs;
    const struct grammar_vocab *vocab;
    struct gr_program program;
    struct gr_cache cache;
};

struct grammar_cursor {
    struct grammar *g;
    struct gr_places now, then;
};

/* ------------------------------------------------------------ classes of bytes */

static void mark_ends(const struct gr_program *p, bool begins[257])
{
    for (uint32_t i = 0; i < p->n_ranges; i++)
        begins[p->ranges[i].first] = begins[p->ranges[i].last + 1] = true;
    for (uint32_t i = 1; i < p->n_keys; i++)
        begins[p->keys[i].byte] = begins[p->keys[i].byte + 1] = true;
}

static void make_classes(struct gr_cache *c)
{
    bool begins[257] = {false};
    mark_ends(c->program, begins);
    for (int b = 0; b < 256; b++) {
        c->n_classes += b && begins[b];
        c->classes[b] = (uint8_t)c->n_classes;
    }
    c->n_classes++;
}

/* ---------------------------------------------------------------- local places */

static uint64_t hash_of(const struct gr_places *s)
{
    uint64_t h = 0x9e3779b97f4a7c15ull + s->is_done;
    const unsigned char *b = (const unsigned char *)s->frames;
    for (size_t i = 0; i < s->n_frames * sizeof(*s->frames); i++)
        h = (h ^ b[i]) * 0x100000001b3ull;
    for (uint32_t i = 0; i < s->n_stacks; i++)
        h = (h ^ s->stacks[i].n) * 0x100000001b3ull;
    return h ^ h >> 29;
}

static bool equal(const struct gr_places *a, const struct gr_places *b)
{
    if (a->is_done != b->is_done || a->n_stacks != b->n_stacks || a->n_frames != b->n_frames)
        return false;
    for (uint32_t i = 0; i < a->n_stacks; i++)
        if (a->stacks[i].n != b->stacks[i].n)
            return false;
    return !a->n_frames || !memcmp(a->frames, b->frames, a->n_frames * sizeof(*a->frames));
}

static void table_put(struct gr_cache *c, uint32_t index)
{
    uint32_t at = (uint32_t)c->locals[index].hash & (c->n_table - 1);
    while (c->table[at])
        at = (at + 1) & (c->n_table - 1);
    c->table[at] = index + 1;
}

static void table_grow(struct gr_cache *c)
{
    if (c->n_locals * 2 < c->n_table)
        return;
    free(c->table);
    c->n_table = c->n_table ? 2 * c->n_table : 256;
    c->table = mem_array(c->n_table, sizeof(*c->table));
    for (uint32_t i = 0; i < c->n_locals; i++)
        table_put(c, i);
}

static struct gr_places copy_of(const struct gr_places *s)
{
    struct gr_places c = *s;
    c.frames = mem_dup(s->frames, s->n_frames * sizeof(*s->frames));
    c.stacks = mem_dup(s->stacks, s->n_stacks * sizeof(*s->stacks));
    c.cap_frames = s->n_frames;
    c.cap_stacks = s->n_stacks;
    return c;
}

static void find_loop(struct gr_cache *c, uint32_t local);

static void locals_grow(struct gr_cache *c)
{
    if (c->n_locals < c->cap_locals)
        return;
    c->cap_locals = c->cap_locals ? 2 * c->cap_locals : 64;
    c->locals = mem_resize(c->locals, c->cap_locals, sizeof(*c->locals));
    c->steps = mem_resize(c->steps, (size_t)c->cap_locals * c->n_classes, sizeof(*c->steps));
    c->flags = mem_resize(c->flags, c->cap_locals, sizeof(*c->flags));
}

/* The index of the local place with these stacks. Stacks lie in the order in which they were found, which is
 * the same whenever a place is reached in the same way; a place that has two orders is kept twice. */
static uint32_t local_of(struct gr_cache *c, const struct gr_places *s)
{
    uint64_t h = hash_of(s);
    for (uint32_t at = (uint32_t)h & (c->n_table - 1); c->table[at]; at = (at + 1) & (c->n_table - 1)) {
        const struct mask_local *l = &c->locals[c->table[at] - 1];
        if (l->hash == h && equal(&l->places, s))
            return c->table[at] - 1;
    }
    locals_grow(c);
    uint32_t i = c->n_locals++;
    c->locals[i] = (struct mask_local){.hash = h, .places = copy_of(s)};
    c->flags[i] = (uint8_t)((s->n_stacks ? GOES_ON : 0) | (s->is_done ? MAY_END : 0));
    find_loop(c, i);
    for (uint32_t k = 0; k < c->n_classes; k++)
        c->steps[(size_t)i * c->n_classes + k] = (struct mask_step){.to = UNKNOWN};
    c->bytes += sizeof(*c->locals) + s->n_frames * sizeof(*s->frames) + c->n_classes * sizeof(*c->steps);
    table_grow(c);
    table_put(c, i);
    return i;
}

static void make_step(struct gr_cache *c, uint32_t local, uint8_t byte)
{
    gr_step(c->program, &c->locals[local].places, byte, &c->scratch);
    struct mask_step s = {.to = DEAD, .n_units = (uint32_t)c->scratch.n_units};
    if (c->scratch.n_stacks || c->scratch.is_done)
        s.to = local_of(c, &c->scratch);
    c->steps[(size_t)local * c->n_classes + c->classes[byte]] = s;
}

/* The present walk meets a step for the first time. Those of rules that all schemas have cost nothing. */
static uint32_t meet_step(struct gr_cache *c, uint32_t local, uint8_t byte)
{
    size_t at = (size_t)local * c->n_classes + c->classes[byte];
    if (c->steps[at].to == UNKNOWN)
        make_step(c, local, byte);
    c->steps[at].walk = c->walk;
    c->n_nodes += c->is_common ? 0 : (uint64_t)NODES_A_UNIT * c->steps[at].n_units;
    return c->steps[at].to;
}

static inline uint32_t local_step(struct gr_cache *c, uint32_t local, uint8_t byte)
{
    const struct mask_step *s = &c->steps[(size_t)local * c->n_classes + c->classes[byte]];
    return s->walk == c->walk ? s->to : meet_step(c, local, byte);
}

static void part_free(struct mask_part *p)
{
    if (!p)
        return;
    free(p->tokens);
    free(p->bits);
    free(p->exits);
    free(p);
}

static void forget_all(struct gr_cache *c)
{
    for (uint32_t i = 0; i < c->n_locals; i++) {
        gr_places_free(&c->locals[i].places);
        part_free(c->locals[i].part);
        if (!c->shared && c->locals[i].loop) {
            free(c->locals[i].loop->is_at);
            free((void *)c->locals[i].loop);
        }
    }
    c->n_locals = 0;
    c->bytes = 0;
    memset(c->table, 0, c->n_table * sizeof(*c->table));
}

static void cache_open(struct gr_cache *c, const struct grammar_vocab *vocab, const struct gr_program *program,
                       struct gr_shared *shared)
{
    *c = (struct gr_cache){.vocab = vocab, .program = program, .walk = 1};
    if (shared) {
        c->shared = &shared->cache;
        c->n_shared = shared->program.n_states;
    }
    pthread_mutex_init(&c->lock, NULL);
    c->most = (uint64_t)WALKS_MOST * vocab->n_nodes + (uint64_t)FRAMES_MOST * NODES_A_UNIT;
    make_classes(c);
    table_grow(c);
    c->path = mem_array((size_t)vocab->longest + 1, sizeof(*c->path));
}

static void cache_close(struct gr_cache *c)
{
    if (!c->table)
        return;
    forget_all(c);
    pthread_mutex_destroy(&c->lock);
    gr_places_free(&c->scratch);
    free(c->locals);
    free(c->steps);
    free(c->flags);
    free(c->table);
    free(c->path);
}

struct gr_shared *gr_shared_open(const struct grammar_vocab *v)
{
    struct gr_shared *s = mem_zalloc(sizeof(*s));
    gr_program_init(&s->program);
    gr_json_init(&s->program, &s->json);
    cache_open(&s->cache, v, &s->program, NULL);
    s->cache.is_common = true;
    return s;
}

void gr_shared_close(struct gr_shared *s)
{
    cache_close(&s->cache);
    gr_program_fini(&s->program);
    free(s);
}

/* ----------------------------------------------------------------------- walks */

/* What a walk has met. Few tokens are a list; of more than LISTED_MOST it makes a mask. */
struct mask_walk {
    uint32_t *words; /* NULL: ids */
    uint32_t *ids, n_ids, cap_ids;
    uint32_t *exits, n_exits, cap_exits; /* nodes with children at which the rule may end */
};
enum { LISTED_MOST = 1024 };

static void list_to_words(const struct grammar_vocab *v, struct mask_walk *w)
{
    w->words = mem_array(grammar_mask_words(v), sizeof(*w->words));
    for (uint32_t i = 0; i < w->n_ids; i++)
        w->words[w->ids[i] / 32] |= 1u << w->ids[i] % 32;
    free(w->ids);
    w->ids = NULL;
    w->n_ids = w->cap_ids = 0;
}

static inline void meet(const struct grammar_vocab *v, struct mask_walk *w, uint32_t id)
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

static void meet_exit(struct mask_walk *w, uint32_t node)
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
static void take_exits(const struct gr_cache *c, const struct mask_loop *l, uint32_t node, struct mask_walk *w)
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
static void take_loop(const struct gr_cache *c, const struct mask_loop *l, uint32_t node, struct mask_walk *w)
{
    const uint32_t *tokens = c->vocab->tokens, *bits = l->part->bits;
    uint32_t end;
    for (uint32_t k = tokens_below(c->vocab, node, &end); k < end; k++)
        if (bits[tokens[k] / 32] >> tokens[k] % 32 & 1)
            meet(c->vocab, w, tokens[k]);
    take_exits(c, l, node, w);
}

/* The loop that the place, when it is reached at the node, is at; NULL: none. */
static inline const struct mask_loop *loop_at(const struct gr_cache *c, uint32_t local, uint32_t node)
{
    bool is_one = local != DEAD && c->flags[local] & LOOPS && c->locals[local].loop->is_at[node];
    return is_one ? c->locals[local].loop : NULL;
}

/* From now on each step is met for the first time. */
static void begin_walk(struct gr_cache *c)
{
    c->walk = c->is_common || c->walk == UINT32_MAX ? 1 : c->walk + 1;
    c->n_nodes = 0;
}

static bool is_too_much(const struct gr_cache *c)
{
    return c->n_nodes > c->most;
}

/* Walks over nodes [from, end), which are the node `from` and what is behind it, at most up to a node that is
 * less deep. */
static void walk_nodes(struct gr_cache *c, uint32_t from, uint32_t end, struct mask_walk *w)
{
    const struct gr_trie_node *nodes = c->vocab->nodes;
    uint32_t *path = c->path;
    for (uint32_t i = from; i < end && !is_too_much(c); c->n_nodes++) {
        const struct gr_trie_node *n = &nodes[i];
        uint32_t at = local_step(c, path[n->depth - 1], n->byte);
        const struct mask_loop *l = loop_at(c, at, i);
        if (at == DEAD || l) {
            if (l)
                take_loop(c, l, i, w);
            i = n->end;
            continue;
        }
        for (uint32_t k = n->first_token; k < n->first_token + n->n_tokens; k++)
            meet(c->vocab, w, c->vocab->tokens[k]);
        if (c->flags[at] & MAY_END && n->end > i + 1)
            meet_exit(w, i);
        path[n->depth] = at;
        i = c->flags[at] & GOES_ON ? i + 1 : n->end;
    }
}

/* Walks below `node`, at which the place is `local`. */
static void walk_below(struct gr_cache *c, uint32_t node, uint32_t local, struct mask_walk *w)
{
    c->path[c->vocab->nodes[node].depth] = local;
    walk_nodes(c, node + 1, c->vocab->nodes[node].end, w);
}

/* The loop that the place comes to by letters, if at least a quarter of all tokens may begin here; NULL: none. */
static const struct mask_loop *main_loop(struct gr_cache *c, uint32_t local)
{
    const struct grammar_vocab *v = c->vocab;
    uint32_t n = 0, at = local, end = 0;
    for (uint32_t i = 1; i < v->n_nodes; i = v->nodes[i].end)
        if (local_step(c, local, v->nodes[i].byte) != DEAD) {
            uint32_t first = tokens_below(v, i, &end);
            n += end - first;
        }
    for (uint32_t i = 0; i < v->longest && n > v->n_listed / 4 && at != DEAD; i++) {
        at = local_step(c, at, 'e');
        if (at != DEAD && c->flags[at] & LOOPS)
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
static void walk_from_loop(struct gr_cache *c, uint32_t local, const struct mask_loop *l, struct mask_walk *w)
{
    const struct grammar_vocab *v = c->vocab;
    const struct mask_part *p = l->part;
    uint32_t *path = c->path, i = 1, k = 0; /* k: of the loop's exits */
    w->words = mem_dup(p->bits, grammar_mask_words(v) * sizeof(*w->words));
    path[0] = local;
    for (; i < v->n_nodes && !is_too_much(c); c->n_nodes++) {
        const struct gr_trie_node *n = &v->nodes[i];
        uint32_t at = local_step(c, path[n->depth - 1], n->byte);
        if (at != DEAD && loop_at(c, at, i) == l) {
            while (k < p->n_exits && p->exits[k] < i)
                k++;
            for (; k < p->n_exits && p->exits[k] < n->end; k++)
                meet_exit(w, p->exits[k]);
            i = n->end;
            continue;
        }
        bool goes_on = at != DEAD && c->flags[at] & GOES_ON;
        if (!goes_on)
            clear_below(v, i, w->words);
        for (uint32_t t = n->first_token; at != DEAD && t < n->first_token + n->n_tokens; t++)
            meet(v, w, v->tokens[t]);
        if (at != DEAD && c->flags[at] & MAY_END && n->end > i + 1)
            meet_exit(w, i);
        path[n->depth] = at;
        i = goes_on ? i + 1 : n->end;
    }
}

static void walk_all(struct gr_cache *c, uint32_t local, struct mask_walk *w)
{
    const struct mask_loop *l = main_loop(c, local);
    if (l)
        walk_from_loop(c, local, l, w);
    else
        walk_below(c, 0, local, w);
}

static const struct mask_part *part_of(struct gr_cache *c, uint32_t local)
{
    if (c->locals[local].part)
        return c->locals[local].part;
    struct mask_part *p = mem_zalloc(sizeof(*p));
    struct mask_walk w = {0};
    uint64_t n_before = c->n_nodes; /* of a walk that comes upon a common rule */
    begin_walk(c);
    walk_all(c, local, &w);
    *p = (struct mask_part){w.ids, w.n_ids, w.words, w.exits, w.n_exits, c->n_nodes};
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
        if (local_step(shared, local, b) != local)
            return false;
    return true;
}

static const struct mask_loop *loop_of(struct gr_cache *shared, uint32_t local)
{
    const struct grammar_vocab *v = shared->vocab;
    const struct mask_part *p = part_of(shared, local);
    if (shared->locals[local].loop || !p->bits)
        return shared->locals[local].loop;
    struct mask_loop *l = mem_zalloc(sizeof(*l));
    l->part = p;
    l->is_at = mem_array(v->n_nodes, 1);
    shared->path[0] = local;
    for (uint32_t i = 1; i < v->n_nodes;) {
        uint32_t at = local_step(shared, shared->path[v->nodes[i].depth - 1], v->nodes[i].byte);
        l->is_at[i] = at == local;
        shared->path[v->nodes[i].depth] = at;
        i = at == DEAD || !(shared->flags[at] & GOES_ON) ? v->nodes[i].end : i + 1;
    }
    shared->locals[local].loop = l;
    return l;
}

/* Looks whether a new place is one of the shared rules', and loops there. */
static void find_loop(struct gr_cache *c, uint32_t local)
{
    const struct gr_places *places = &c->locals[local].places;
    if (!c->shared || places->is_done)
        return;
    for (uint32_t i = 0; i < places->n_frames; i++)
        if (places->frames[i].state >= c->n_shared)
            return;
    uint32_t there = local_of(c->shared, places);
    if (places->n_stacks && loops(c->shared, there))
        c->locals[local].loop = loop_of(c->shared, there);
    c->flags[local] |= c->locals[local].loop ? LOOPS : 0;
}

/* ----------------------------------------------------------------------- masks */

static uint64_t canonical_count(const struct gr_repeat *r, uint64_t count, uint32_t longest)
{
    if (count + longest < r->least)
        return 0;
    if (r->most != UINT32_MAX && count >= r->least && count + longest < r->most)
        return r->least;
    return count;
}

/* A frame of a repeat, as far from its limits as makes a difference within one token. */
static struct gr_frame canonical(const struct gr_program *p, struct gr_frame f, uint32_t longest)
{
    const struct gr_repeat *r = &p->repeats[p->states[f.state].a];
    bool is_length = p->strings.character && r->body == p->strings.character && r->most != UINT32_MAX &&
                     (!r->least || r->least == r->most);
    if (is_length) {
        const struct gr_repeat *common = &p->repeats[r->least ? p->strings.exactly : p->strings.at_most];
        uint64_t left = r->most - f.data;
        f.state = common->back;
        f.data = common->most - (left <= longest ? left : (uint64_t)longest + 1);
    } else {
        f.data = canonical_count(r, f.data, longest);
    }
    return f;
}

/* Where a stack is cut: its upper frames as a local place. */
struct cut {
    struct gr_cache *cache;
    uint32_t local, base; /* base: frames below */
};

static struct cut cut(struct grammar *g, const struct gr_frame *stack, uint32_t n)
{
    struct gr_frame copy[GR_DEPTH_MOST];
    struct gr_stack whole = {0, 0};
    uint32_t base = n - 1, highest = 0;
    while (base && !stack[base].is_base)
        base--;
    whole.n = n - base;
    memcpy(copy, stack + base, whole.n * sizeof(*copy));
    for (uint32_t i = 0; i < whole.n; i++) {
        if (g->program.states[copy[i].state].op == GR_OP_BACK)
            copy[i] = canonical(&g->program, copy[i], g->vocab->longest);
        highest = copy[i].state > highest ? copy[i].state : highest;
    }
    struct gr_cache *c = highest < g->cache.n_shared ? g->cache.shared : &g->cache;
    struct gr_places one = {.frames = copy, .stacks = &whole, .n_frames = whole.n, .n_stacks = 1};
    return (struct cut){c, local_of(c, &one), base};
}

/* Walks on from these nodes, at which all frames from n on have ended. */
static void walk_up(struct grammar *g, const struct gr_frame *stack, uint32_t n, const uint32_t *nodes,
                    uint32_t n_nodes, uint32_t *words)
{
    struct gr_places below = {0};
    if (!n || !n_nodes)
        return; /* nothing is left that could go on */
    gr_close(&g->program, stack, n, &below);
    g->cache.n_nodes += NODES_A_UNIT * below.n_units;
    for (uint32_t i = 0; i < below.n_stacks && !is_too_much(&g->cache); i++) {
        const struct gr_frame *other = below.frames + below.stacks[i].at;
        struct mask_walk w = {.words = words};
        struct cut at = cut(g, other, below.stacks[i].n);
        for (uint32_t k = 0; k < n_nodes; k++)
            walk_below(at.cache, nodes[k], at.local, &w);
        if (at.cache->is_common) {
            g->cache.n_nodes += at.cache->n_nodes;
            at.cache->n_nodes = 0;
        }
        walk_up(g, other, at.base, w.exits, w.n_exits, words);
        free(w.exits);
    }
    gr_places_free(&below);
}

static void add_part(const struct mask_part *p, uint32_t n_words, uint32_t *words)
{
    for (uint32_t i = 0; i < n_words && p->bits; i++)
        words[i] |= p->bits[i];
    for (uint32_t i = 0; i < p->n_tokens; i++)
        words[p->tokens[i] / 32] |= 1u << p->tokens[i] % 32;
}

static void lock_caches(struct grammar *g)
{
    pthread_mutex_lock(&g->cache.lock);
    if (g->cache.bytes > CACHE_BYTES_MOST)
        forget_all(&g->cache);
    if (g->cache.shared) /* never forgotten: there are few rules, and loops point into them */
        pthread_mutex_lock(&g->cache.shared->lock);
}

static void unlock_caches(struct grammar *g)
{
    if (g->cache.shared)
        pthread_mutex_unlock(&g->cache.shared->lock);
    pthread_mutex_unlock(&g->cache.lock);
}

bool grammar_cursor_mask(struct grammar_cursor *c, uint32_t *words)
{
    struct grammar *g = c->g;
    uint32_t n_words = grammar_mask_words(g->vocab);
    const struct mask_part *parts[GR_STACKS_MOST];
    uint32_t bases[GR_STACKS_MOST];
    uint64_t n_nodes = 0;
    memset(words, 0, n_words * sizeof(*words));
    lock_caches(g);
    for (uint32_t i = 0; i < c->now.n_stacks && n_nodes <= g->cache.most; i++) {
        struct cut at = cut(g, c->now.frames + c->now.stacks[i].at, c->now.stacks[i].n);
        parts[i] = part_of(at.cache, at.local);
        bases[i] = at.base;
        n_nodes += parts[i]->n_nodes;
    }
    begin_walk(&g->cache);
    g->cache.n_nodes = n_nodes;
    for (uint32_t i = 0; i < c->now.n_stacks && !is_too_much(&g->cache); i++) {
        add_part(parts[i], n_words, words);
        walk_up(g, c->now.frames + c->now.stacks[i].at, bases[i], parts[i]->exits, parts[i]->n_exits, words);
    }
    bool is_whole = !is_too_much(&g->cache);
    unlock_caches(g);
    if (!is_whole)
        memset(words, 0, n_words * sizeof(*words));
    return is_whole;
}

/* --------------------------------------------------------------------- cursors */

struct grammar_cursor *grammar_cursor_open(struct grammar *g)
{
    struct grammar_cursor *c = mem_zalloc(sizeof(*c));
    const struct gr_frame first = {.state = g->program.start, .is_base = true};
    c->g = grammar_ref(g);
    gr_close(&g->program, &first, 1, &c->now);
    return c;
}

struct grammar_cursor *grammar_cursor_copy(const struct grammar_cursor *c)
{
    struct grammar_cursor *copy = mem_zalloc(sizeof(*copy));
    copy->g = grammar_ref(c->g);
    copy->now = copy_of(&c->now);
    return copy;
}

void grammar_cursor_close(struct grammar_cursor *c)
{
    if (!c)
        return;
    gr_places_free(&c->now);
    gr_places_free(&c->then);
    grammar_unref(c->g);
    free(c);
}

bool grammar_cursor_take_bytes(struct grammar_cursor *c, const char *bytes, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        gr_step(&c->g->program, &c->now, (uint8_t)bytes[i], &c->then);
        struct gr_places before = c->now;
        c->now = c->then;
        c->then = before;
    }
    return c->now.n_stacks || c->now.is_done;
}

bool grammar_cursor_take(struct grammar_cursor *c, uint32_t token)
{
    const struct grammar_vocab *v = c->g->vocab;
    bool is_text = token < v->n_tokens && v->starts[token + 1] > v->starts[token];
    if (is_text)
        return grammar_cursor_take_bytes(c, v->bytes + v->starts[token], v->starts[token + 1] - v->starts[token]);
    gr_places_clear(&c->now);
    return false;
}

bool grammar_cursor_may_end(const struct grammar_cursor *c)
{
    return c->now.is_done;
}

/* -------------------------------------------------------------------- programs */

static enum td_status compile(struct gr_program *p, enum grammar_kind kind, const char *text, size_t len,
                              struct td_error *e)
{
    struct gr_tree tree = {0};
    struct gr_node *node = NULL;
    enum td_status s = TD_OK;
    switch (kind) {
    case GRAMMAR_JSON:
        return gr_compile_schema(p, "{\"type\":\"object\"}", 17, e);
    case GRAMMAR_SCHEMA:
        return gr_compile_schema(p, text, len, e);
    case GRAMMAR_EBNF:
        return gr_compile_ebnf(p, text, len, e);
    case GRAMMAR_STRUCTURE:
        return gr_compile_structure(p, text, len, e);
    case GRAMMAR_CHOICE:
        return gr_compile_choice(p, text, len, e);
    case GRAMMAR_REGEX:
        s = gr_parse_pattern(&tree, text, len, false, &node, e);
        p->start = s ? GR_END : gr_emit(p, node, GR_RAW, GR_END);
        gr_tree_free(&tree);
        return s;
    }
    return td_fail(e, TD_ERR_INVALID, "kind: %d is unknown", (int)kind);
}

enum td_status grammar_compile(const struct grammar_vocab *vocab, enum grammar_kind kind, const char *text, size_t len,
                               struct grammar **out, struct td_error *e)
{
    struct grammar *g = mem_zalloc(sizeof(*g));
    atomic_init(&g->n_refs, 1);
    g->vocab = vocab;
    gr_program_init(&g->program);
    enum td_status s = compile(&g->program, kind, text, len, e);
    if (!s && g->program.is_full)
        s = td_fail(e, TD_ERR_NO_SPACE, "it makes more than %d states", GR_STATES_MOST);
    if (!s)
        s = gr_check_rules(&g->program, e);
    if (s) {
        grammar_unref(g);
        return s;
    }
    bool has_json = kind == GRAMMAR_JSON || kind == GRAMMAR_SCHEMA || kind == GRAMMAR_STRUCTURE;
    if (vocab)
        cache_open(&g->cache, vocab, &g->program, has_json ? vocab->shared : NULL);
    *out = g;
    return TD_OK;
}

size_t grammar_bytes(struct grammar *g)
{
    pthread_mutex_lock(&g->cache.lock);
    size_t kept = g->cache.bytes;
    pthread_mutex_unlock(&g->cache.lock);
    return kept + gr_program_bytes(&g->program);
}

struct grammar *grammar_ref(struct grammar *g)
{
    if (g)
        atomic_fetch_add(&g->n_refs, 1);
    return g;
}

void grammar_unref(struct grammar *g)
{
    if (!g || atomic_fetch_sub(&g->n_refs, 1) != 1)
        return;
    cache_close(&g->cache);
    gr_program_fini(&g->program);
    free(g);
}
