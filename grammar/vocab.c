#include "grammar/grammar_internal.h"

#include <stdlib.h>
#include <string.h>

static size_t len_of(const struct grammar_vocab *v, uint32_t id)
{
    return v->starts[id + 1] - v->starts[id];
}

static int by_bytes(const void *a, const void *b, void *vocab)
{
    const struct grammar_vocab *v = vocab;
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    size_t n = len_of(v, x), m = len_of(v, y);
    int order = memcmp(v->bytes + v->starts[x], v->bytes + v->starts[y], n < m ? n : m);
    return order ? order : n != m ? (n < m ? -1 : 1) : x < y ? -1 : x > y;
}

static void take_bytes(struct grammar_vocab *v, grammar_bytes_of *bytes_of, void *user)
{
    struct bytes all = {0};
    v->starts = mem_array((size_t)v->n_tokens + 1, sizeof(*v->starts));
    for (uint32_t id = 0; id < v->n_tokens; id++) {
        const char *bytes = "";
        size_t len = 0;
        bytes_of(user, id, &bytes, &len);
        len = len > UINT16_MAX ? 0 : len; /* none is that long */
        bytes_append(&all, bytes, len);
        v->starts[id + 1] = (uint32_t)all.len;
        v->longest = len > v->longest ? (uint32_t)len : v->longest;
    }
    v->bytes = all.data;
}

static void sort_tokens(struct grammar_vocab *v)
{
    v->tokens = mem_array(v->n_tokens, sizeof(*v->tokens));
    for (uint32_t id = 0; id < v->n_tokens; id++)
        if (len_of(v, id))
            v->tokens[v->n_listed++] = id;
    qsort_r(v->tokens, v->n_listed, sizeof(*v->tokens), by_bytes, v);
}

/* Adds the nodes of a token behind those that it shares with the one before. open: the node at each depth. */
static void add_nodes(struct grammar_vocab *v, uint32_t at, uint32_t shared, uint32_t *open, uint32_t *cap)
{
    const char *bytes = v->bytes + v->starts[v->tokens[at]];
    uint32_t len = (uint32_t)len_of(v, v->tokens[at]);
    for (uint32_t d = shared + 1; d <= len; d++) {
        v->nodes = MEM_ROOM(v->nodes, v->n_nodes, *cap, 1024);
        v->nodes[v->n_nodes] =
            (struct gr_trie_node){.byte = (uint8_t)bytes[d - 1], .depth = (uint16_t)d, .first_token = at};
        open[d] = v->n_nodes++;
    }
    v->nodes[open[len]].n_tokens++; /* tokens of the same bytes follow each other */
}

static uint32_t shared_bytes(const struct grammar_vocab *v, uint32_t x, uint32_t y)
{
    size_t n = len_of(v, x), m = len_of(v, y), i = 0;
    const char *a = v->bytes + v->starts[x], *b = v->bytes + v->starts[y];
    for (n = n < m ? n : m; i < n && a[i] == b[i]; i++)
        ;
    return (uint32_t)i;
}

static void build_trie(struct grammar_vocab *v)
{
    uint32_t cap = 0, *open = mem_array((size_t)v->longest + 1, sizeof(*open)), depth = 0;
    v->nodes = MEM_ROOM(v->nodes, v->n_nodes, cap, 1024);
    v->nodes[v->n_nodes++] = (struct gr_trie_node){0};
    for (uint32_t i = 0; i < v->n_listed; i++) {
        uint32_t shared = i ? shared_bytes(v, v->tokens[i - 1], v->tokens[i]) : 0;
        for (; depth > shared; depth--)
            v->nodes[open[depth]].end = v->n_nodes;
        add_nodes(v, i, shared, open, &cap);
        depth = (uint32_t)len_of(v, v->tokens[i]);
    }
    for (; depth; depth--)
        v->nodes[open[depth]].end = v->n_nodes;
    v->nodes[0].end = v->n_nodes;
    for (uint32_t i = 1; i < v->n_nodes; i = v->nodes[i].end)
        v->beginnings[v->nodes[i].byte] = i;
    free(open);
}

uint64_t gr_kind_of(uint8_t byte)
{
    static const char MARKS[] = " \"\\.-_/:,{}[]()\n";
    const char *mark = byte ? strchr(MARKS, byte) : NULL;
    unsigned kind;
    if (byte >= 'a' && byte <= 'z')
        kind = byte - 'a';
    else if (byte >= 'A' && byte <= 'Z')
        kind = 26 + (byte - 'A') / 4; /* to 32 */
    else if (byte >= '0' && byte <= '9')
        kind = 33;
    else if (mark)
        kind = 34 + (unsigned)(mark - MARKS); /* to 49 */
    else if (byte >= 0x80)
        kind = byte < 0xc0 ? 50 : byte < 0xe0 ? 51 : byte < 0xf0 ? 52 : 53;
    else
        kind = byte < ' ' ? 54 : 55;
    return 1ull << kind;
}

static void note_below(struct grammar_vocab *v)
{
    uint64_t *seen = mem_array((size_t)v->longest + 2, sizeof(*seen)); /* by depth, since the last node above it */
    for (uint32_t i = v->n_nodes; i-- > 0;) {
        struct gr_trie_node *n = &v->nodes[i];
        n->below = seen[n->depth + 1];
        seen[n->depth + 1] = 0;
        seen[n->depth] |= n->below | gr_kind_of(n->byte);
    }
    free(seen);
}

struct grammar_vocab *grammar_vocab_open(uint32_t n_tokens, grammar_bytes_of *bytes_of, void *user)
{
    struct grammar_vocab *v = mem_zalloc(sizeof(*v));
    v->n_tokens = n_tokens;
    take_bytes(v, bytes_of, user);
    sort_tokens(v);
    build_trie(v);
    note_below(v);
    v->shared = gr_shared_open(v);
    return v;
}

void grammar_vocab_close(struct grammar_vocab *v)
{
    if (!v)
        return;
    gr_shared_close(v->shared);
    free(v->nodes);
    free(v->tokens);
    free(v->starts);
    free(v->bytes);
    free(v);
}

uint32_t grammar_mask_words(const struct grammar_vocab *v)
{
    return (v->n_tokens + 31) / 32;
}
