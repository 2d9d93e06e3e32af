/* Subtrees of the vocabulary's trie, as one (masks.h). */
#include <stdlib.h>
#include <string.h>

#include "grammar/masks.h"

static void add_origin(struct gr_merged *m, const struct grammar_vocab *v, uint32_t node)
{
    const struct gr_trie_node *n = &v->nodes[node];
    m->origins = MEM_ROOM(m->origins, m->n_origins, m->cap_origins, 256);
    m->origins[m->n_origins++] = node;
    for (uint32_t k = n->first_token; k < n->first_token + n->n_tokens; k++) {
        m->tokens = MEM_ROOM(m->tokens, m->n_tokens, m->cap_tokens, 256);
        m->tokens[m->n_tokens++] = v->tokens[k];
    }
}

/* The children of these nodes, in the order of their bytes; the caller frees them. */
static uint32_t *children_of(const struct grammar_vocab *v, const uint32_t *nodes, uint32_t n, uint32_t *n_out)
{
    uint32_t begins[257] = {0}, n_children = 0;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = nodes[i] + 1; k < v->nodes[nodes[i]].end; k = v->nodes[k].end, n_children++)
            begins[v->nodes[k].byte + 1]++;
    for (uint32_t b = 1; b < 257; b++)
        begins[b] += begins[b - 1];
    uint32_t *children = mem_array(n_children + 1, sizeof(*children));
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = nodes[i] + 1; k < v->nodes[nodes[i]].end; k = v->nodes[k].end)
            children[begins[v->nodes[k].byte]++] = k;
    *n_out = n_children;
    return children;
}

static void merge_below(struct gr_merged *m, const struct grammar_vocab *v, const uint32_t *nodes, uint32_t n,
                        uint32_t depth)
{
    uint32_t n_children, n_same;
    uint32_t *children = children_of(v, nodes, n, &n_children);
    for (uint32_t i = 0; i < n_children; i += n_same) {
        uint8_t byte = v->nodes[children[i]].byte;
        m->nodes = MEM_ROOM(m->nodes, m->n_nodes, m->cap_nodes, 256);
        uint32_t at = m->n_nodes++;
        m->nodes[at] = (struct gr_merged_node){
            .byte = byte, .depth = (uint16_t)depth, .first_origin = m->n_origins, .first_token = m->n_tokens};
        for (n_same = 0; i + n_same < n_children && v->nodes[children[i + n_same]].byte == byte; n_same++)
            add_origin(m, v, children[i + n_same]);
        m->nodes[at].n_origins = n_same;
        m->nodes[at].n_tokens = m->n_tokens - m->nodes[at].first_token;
        merge_below(m, v, children + i, n_same, depth + 1);
        m->nodes[at].end = m->n_nodes;
    }
    free(children);
}

struct gr_merged *gr_merge(const struct grammar_vocab *v, const uint32_t *nodes, uint32_t n)
{
    struct gr_merged *m = mem_zalloc(sizeof(*m));
    merge_below(m, v, nodes, n, 1);
    return m;
}

void gr_merged_free(struct gr_merged *m)
{
    if (!m)
        return;
    free(m->nodes);
    free(m->origins);
    free(m->tokens);
    free(m);
}
