/* Local places: how they are kept and found, and the caches that they lie in (masks.h). */
#include "grammar/masks.h"

#include <stdlib.h>
#include <string.h>

/* A mask may take at most WALKS_MOST walks over the whole trie and FRAMES_MOST frames that are compared or
 * copied (gr_places.n_units), together: a frame counts as GR_NODES_A_UNIT nodes of the trie. 1,000 schemas of
 * all kinds, with a vocabulary of 128,000 tokens, took at most 6 walks and 6,309 frames. */
enum { WALKS_MOST = 16, FRAMES_MOST = 1 << 18 };

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

static void locals_grow(struct gr_cache *c)
{
    if (c->n_locals < c->cap_locals)
        return;
    c->cap_locals = c->cap_locals ? 2 * c->cap_locals : 64;
    c->locals = mem_resize(c->locals, c->cap_locals, sizeof(*c->locals));
    c->steps = mem_resize(c->steps, (size_t)c->cap_locals * c->n_classes, sizeof(*c->steps));
    c->taken = mem_resize(c->taken, c->cap_locals, sizeof(*c->taken));
    c->flags = mem_resize(c->flags, c->cap_locals, sizeof(*c->flags));
}

uint32_t gr_local_of(struct gr_cache *c, const struct gr_places *s)
{
    uint64_t h = gr_places_hash(s);
    for (uint32_t at = (uint32_t)h & (c->n_table - 1); c->table[at]; at = (at + 1) & (c->n_table - 1)) {
        const struct gr_local *l = &c->locals[c->table[at] - 1];
        if (l->hash == h && gr_places_equal(&l->places, s))
            return c->table[at] - 1;
    }
    locals_grow(c);
    uint32_t i = c->n_locals++;
    c->locals[i] = (struct gr_local){.hash = h, .places = gr_places_copy(s)};
    c->flags[i] = (uint8_t)((s->n_stacks ? GR_GOES_ON : 0) | (s->is_done ? GR_MAY_END : 0));
    gr_bytes_taken(c->program, s, c->taken[i]);
    gr_find_loop(c, i);
    for (uint32_t k = 0; k < c->n_classes; k++)
        c->steps[(size_t)i * c->n_classes + k] = (struct gr_mask_step){.to = GR_UNKNOWN};
    c->bytes += sizeof(*c->locals) + s->n_frames * sizeof(*s->frames) + c->n_classes * sizeof(*c->steps);
    table_grow(c);
    table_put(c, i);
    return i;
}

static void make_step(struct gr_cache *c, uint32_t local, uint8_t byte)
{
    gr_step(c->program, &c->locals[local].places, byte, &c->scratch);
    struct gr_mask_step s = {.to = GR_DEAD, .n_units = (uint32_t)c->scratch.n_units};
    if (c->scratch.n_stacks || c->scratch.is_done)
        s.to = gr_local_of(c, &c->scratch);
    c->steps[(size_t)local * c->n_classes + c->classes[byte]] = s;
}

uint32_t gr_meet_step(struct gr_cache *c, uint32_t local, uint8_t byte)
{
    size_t at = (size_t)local * c->n_classes + c->classes[byte];
    if (c->steps[at].to == GR_UNKNOWN)
        make_step(c, local, byte);
    c->steps[at].walk = c->walk;
    c->n_nodes += c->is_common ? 0 : (uint64_t)GR_NODES_A_UNIT * c->steps[at].n_units;
    return c->steps[at].to;
}

static void part_free(struct gr_part *p)
{
    if (!p)
        return;
    free(p->tokens);
    free(p->bits);
    free(p->exits);
    gr_merged_free(p->below);
    free(p);
}

void gr_cache_forget(struct gr_cache *c)
{
    for (uint32_t i = 0; i < c->n_locals; i++) {
        gr_places_free(&c->locals[i].places);
        part_free(c->locals[i].part);
        if (!c->shared && c->locals[i].loop) {
            free(c->locals[i].loop->is_at);
            free((void *)c->locals[i].loop);
        }
    }
    for (uint32_t i = 0; i < GR_WHOLES && c->wholes; i++) {
        gr_places_free(&c->wholes[i].places);
        free(c->wholes[i].words);
    }
    free(c->wholes);
    c->wholes = NULL;
    c->n_locals = 0;
    c->bytes = 0;
    memset(c->table, 0, c->n_table * sizeof(*c->table));
}

void gr_cache_open(struct gr_cache *c, const struct grammar_vocab *vocab, const struct gr_program *program,
                   struct gr_shared *shared)
{
    *c = (struct gr_cache){.vocab = vocab, .program = program, .walk = 1};
    if (shared) {
        c->shared = &shared->cache;
        c->n_shared = shared->program.n_states;
    }
    pthread_mutex_init(&c->lock, NULL);
    c->most = (uint64_t)WALKS_MOST * vocab->n_nodes + (uint64_t)FRAMES_MOST * GR_NODES_A_UNIT;
    make_classes(c);
    table_grow(c);
    c->path = mem_array((size_t)vocab->longest + 1, sizeof(*c->path));
    c->merged_path = mem_array((size_t)vocab->longest + 1, sizeof(*c->merged_path));
}

void gr_cache_close(struct gr_cache *c)
{
    if (!c->table)
        return;
    gr_cache_forget(c);
    pthread_mutex_destroy(&c->lock);
    gr_places_free(&c->scratch);
    free(c->locals);
    free(c->steps);
    free(c->flags);
    free(c->taken);
    free(c->table);
    free(c->path);
    free(c->merged_path);
}

struct gr_shared *gr_shared_open(const struct grammar_vocab *v)
{
    struct gr_shared *s = mem_zalloc(sizeof(*s));
    gr_program_init(&s->program);
    gr_json_init(&s->program, &s->json);
    gr_cache_open(&s->cache, v, &s->program, NULL);
    s->cache.is_common = true;
    const struct gr_frame rest = {.state = s->program.strings.rest, .is_base = true};
    struct gr_places inside = {0};
    gr_close(&s->program, &rest, 1, &inside);
    gr_share_loop(&s->cache, gr_local_of(&s->cache, &inside));
    gr_places_free(&inside);
    return s;
}

void gr_shared_close(struct gr_shared *s)
{
    gr_cache_close(&s->cache);
    gr_program_fini(&s->program);
    free(s);
}
