/* Programs with what is kept of their masks, and cursors over them (grammar.h). */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "grammar/masks.h"

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
    copy->now = gr_places_copy(&c->now);
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

bool grammar_cursor_mask(struct grammar_cursor *c, uint32_t *words)
{
    return gr_mask(&c->g->cache, &c->now, words);
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
        gr_cache_open(&g->cache, vocab, &g->program, has_json ? vocab->shared : NULL);
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
    gr_cache_close(&g->cache);
    gr_program_fini(&g->program);
    free(g);
}
