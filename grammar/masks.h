/*
 * Masks: the walk over the vocabulary's trie, in parts that are kept. locals.c has the local places, walks.c
 * the parts, merged.c what comes below their ends, masks.c the masks.
 *
 * A *local* place is a set of stacks above the rule that was entered last (gr_frame.is_base), without what is
 * below. Local places and their steps by byte are kept like the states of a DFA that is made on demand. The
 * *part* of a local place is one walk over the whole trie: tokens that go on within the rule, or end it with
 * their last byte, and nodes at which the rule ends and longer tokens go on ("exits").
 *
 * The mask of a cursor is the union of the parts of its stacks, and of walks from their exits, with what is
 * below: closed again, cut again at its own rule, and so on upwards. Masks are kept, too.
 *
 * Work is bounded, and the count does not depend on what is kept: a walk counts each step that it meets for
 * the first time as if nothing were kept. So all workers refuse to go on at the same token.
 *
 * Threads: one at a time, with the lock of the cache, and of the one that it shares with others.
 */
#pragma once

#include "grammar/places.h"

enum { GR_GOES_ON = 1, GR_MAY_END = 2, GR_LOOPS = 4 }; /* of a local place */
#define GR_DEAD    UINT32_MAX
#define GR_UNKNOWN (UINT32_MAX - 1)
/* A frame that is compared or copied (gr_places.n_units) counts as GR_NODES_A_UNIT nodes of the trie. */
enum { GR_NODES_A_UNIT = 16, GR_WHOLES = 128 }; /* GR_WHOLES: masks that are kept */

/*
 * What comes below the exits of a part, as one trie: a string ends in hundreds of nodes, and the same few
 * bytes may follow each. Made once for parts that all schemas have.
 */
struct gr_merged_node {
    uint8_t byte;
    uint16_t depth;                   /* 1: one byte behind an exit */
    uint32_t end;                     /* behind the last node below this one */
    uint32_t first_origin, n_origins; /* nodes of the vocabulary's trie */
    uint32_t first_token, n_tokens;   /* ids of the tokens that end at them */
};
struct gr_merged {
    struct gr_merged_node *nodes;
    uint32_t *origins, *tokens;
    uint32_t n_nodes, n_origins, n_tokens, cap_nodes, cap_origins, cap_tokens;
};

struct gr_part {
    uint32_t *tokens, n_tokens; /* ids, if they are few */
    uint32_t *bits;             /* else a mask; NULL: they are few */
    uint32_t *exits, n_exits;   /* nodes that have children */
    struct gr_merged *below;    /* of them; NULL: they are few, or of one schema alone */
    uint64_t n_nodes;           /* work; above the cache's `most`: the walk did not come to its end */
};

struct gr_mask_step { /* from a local place, by a class of bytes */
    uint32_t to;      /* local place; GR_UNKNOWN, GR_DEAD */
    uint32_t walk;    /* the last one that met it */
    uint32_t n_units;
};

struct gr_local {
    uint64_t hash;
    struct gr_places places; /* is_done: the rule may have ended */
    struct gr_part *part;
    uint64_t stays;             /* kinds of bytes all of which lead back to it */
    uint32_t stays_walk;        /* the last walk that met these steps */
    const struct gr_loop *loop; /* GR_LOOPS: of the shared place that is the same; of a shared place its own, owned */
};

/*
 * Of a shared place to which most bytes lead back, such as the inside of a string: the nodes of the trie
 * whose bytes lead from it to itself. What goes on below such a node is what its part says, so another
 * walk that comes to the same place there takes it over.
 */
struct gr_loop {
    const struct gr_part *part;
    uint8_t *is_at; /* by node */
};

/* A mask that was made. */
struct gr_whole {
    uint64_t hash;
    struct gr_places places; /* of the cursor, with canonical counts */
    uint32_t *words;         /* NULL: the entry is free */
};

/* What is kept of masks of one program. */
struct gr_cache {
    struct gr_cache *shared; /* of the vocabulary; NULL: this is it, or nothing is shared */
    uint32_t n_shared;       /* states that are shared */
    bool is_common;          /* it is the one of the vocabulary */
    const struct grammar_vocab *vocab;
    const struct gr_program *program;
    uint8_t classes[256];
    uint32_t n_classes;
    pthread_mutex_t lock; /* guards the rest */
    struct gr_local *locals;
    struct gr_mask_step *steps;      /* by local place, then by class of bytes */
    uint64_t (*taken)[GR_SET_WORDS]; /* gr_bytes_taken() of each local place */
    uint8_t *flags;                  /* GR_GOES_ON, GR_MAY_END, GR_LOOPS */
    uint32_t walk;                   /* number of the present one; the first is 1 */
    uint64_t n_nodes, most;          /* work of the present one, and of any mask */
    uint32_t n_locals, cap_locals;
    uint32_t *table, n_table; /* hash table of indexes + 1 */
    struct gr_whole *wholes;  /* by their hash; NULL: none yet */
    size_t bytes;
    struct gr_places scratch;
    uint32_t *path, *merged_path; /* local place at each depth of a walk */
};

/* Rules that all schemas have (gr_json_init) and that call only each other: their states have the same
 * numbers in every program, so their parts are made once for a vocabulary. */
struct gr_shared {
    struct gr_program program;
    struct gr_json json;
    struct gr_cache cache;
};

/* What a walk has met. Few tokens are a list; of many it makes a mask. */
struct gr_walk {
    uint32_t *words; /* NULL: ids */
    uint32_t *ids, n_ids, cap_ids;
    uint32_t *exits, n_exits, cap_exits; /* nodes with children at which the rule may end */
};

/* locals.c */
/* shared: NULL, or that of the vocabulary, whose rules the program begins with. */
void gr_cache_open(struct gr_cache *c, const struct grammar_vocab *vocab, const struct gr_program *program,
                   struct gr_shared *shared);
void gr_cache_close(struct gr_cache *c); /* zeros are fine */
void gr_cache_forget(struct gr_cache *c);
/* The index of the local place with these stacks. Stacks lie in the order in which they were found, which is
 * the same whenever a place is reached in the same way; a place that has two orders is kept twice. */
uint32_t gr_local_of(struct gr_cache *c, const struct gr_places *s);
/* The present walk meets a step for the first time. Those of rules that all schemas have cost nothing. */
uint32_t gr_meet_step(struct gr_cache *c, uint32_t local, uint8_t byte);

/* Where a byte leads to from a local place; GR_DEAD: nowhere. */
static inline uint32_t gr_local_step(struct gr_cache *c, uint32_t local, uint8_t byte)
{
    const struct gr_mask_step *s = &c->steps[(size_t)local * c->n_classes + c->classes[byte]];
    if (!(c->taken[local][byte / 64] >> byte % 64 & 1))
        return GR_DEAD;
    return s->walk == c->walk ? s->to : gr_meet_step(c, local, byte);
}

/* walks.c */
void gr_begin_walk(struct gr_cache *c); /* from now on each step is met for the first time */
/* Walks below `node`, at which the place is `local`. */
void gr_walk_below(struct gr_cache *c, uint32_t node, uint32_t local, struct gr_walk *w);
/* ...and below all exits of the part. */
void gr_walk_exits(struct gr_cache *c, const struct gr_part *p, uint32_t local, struct gr_walk *w);
const struct gr_part *gr_part_of(struct gr_cache *c, uint32_t local);
/* Looks whether a new place is one of the shared rules', and loops there. */
void gr_find_loop(struct gr_cache *c, uint32_t local);
/* The same for a place of the shared rules themselves: others of them take over what it has. */
void gr_share_loop(struct gr_cache *shared, uint32_t local);

static inline bool gr_is_too_much(const struct gr_cache *c)
{
    return c->n_nodes > c->most;
}

/* merged.c */
struct gr_merged *gr_merge(const struct grammar_vocab *v, const uint32_t *nodes, uint32_t n);
void gr_merged_free(struct gr_merged *m);

/* masks.c: as grammar_cursor_mask(), for a cursor at these places. */
bool gr_mask(struct gr_cache *c, const struct gr_places *now, uint32_t *words);
