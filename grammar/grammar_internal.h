/*
 * Programs: states of a pushdown automaton over bytes.
 *
 * A place in an answer is a stack of frames. The top frame's state says what may come; frames below wait for
 * the rules above them to end. States that take a byte are GR_BYTES and GR_KEYS; the others are passed at
 * once (places.c, gr_close).
 *
 * Each frame has a number, `data`, whose meaning is that of the rule to which the frame belongs:
 *
 *     GR_REPEAT   how often the body came
 *     GR_OBJECT   bits of the properties that came
 *     GR_KEYS     the node of the trie of names
 *     others      0
 */
#pragma once

#include <jansson.h>
#include <pthread.h>

#include "base/mem.h"
#include "grammar/grammar.h"

enum { GR_END = 0 }; /* state 0 of every program ends a rule */
#define GR_NO_STATE UINT32_MAX

enum gr_op {
    GR_OP_END,    /* the rule ends: its frame is popped */
    GR_OP_BYTES,  /* a: first range; b: number of ranges */
    GR_OP_SPLIT,  /* a: first of lists; b: number: goes on at each of them */
    GR_OP_CALL,   /* a: first state of a rule; b: where this frame goes on after it */
    GR_OP_REPEAT, /* a: index of repeats. First state of a rule of its own, so that its count begins at 0 */
    GR_OP_BACK,   /* a: the same: the body has come once more */
    GR_OP_OBJECT, /* a: index of objects; b: enum gr_place */
    GR_OP_KEYS,   /* a: index of objects: a name of a property is being spelled */
};
enum gr_place { GR_FIRST_KEY, GR_NEXT_KEY, GR_AFTER_VALUE };

struct gr_state {
    uint8_t op;
    bool cuts; /* CALL: masks are computed for the rule by itself */
    uint32_t a, b;
};
struct gr_range {
    uint8_t first, last;
    uint32_t next;
};
struct gr_repeat {
    uint32_t body, next, self, back;
    uint32_t least, most; /* most: UINT32_MAX: no limit */
};
enum { GR_PROPERTIES_MOST = 64 };
struct gr_object {
    uint64_t required, all;
    uint32_t keys;                       /* state GR_OP_KEYS; its trie begins at node root */
    uint32_t root;                       /* of gr_program.keys */
    uint32_t colons[GR_PROPERTIES_MOST]; /* where a property goes on after its name */
    uint32_t other_key, other_colon;     /* the rule of other names, and where they go on; GR_NO_STATE: none */
    uint32_t comma, close;               /* states that take ',' and what follows, and '}' */
};
struct gr_key { /* a node of a trie of names, with both quotes */
    uint8_t byte;
    uint32_t child, sibling; /* 0: none */
    uint64_t reach;          /* properties at or below this node */
    uint32_t property;       /* whose name ends here; UINT32_MAX: none */
};

/*
 * Parts of strings that are the same in all programs, so that masks of them are made once for a vocabulary. A
 * string with a limit of its length repeats `character` by a repeat of its own. Its mask k characters before
 * that limit is the mask of at_most, or exactly, k characters before the limit of that rule
 * (masks.c).
 */
struct gr_strings {
    uint32_t rest; /* what may come behind the first quote of any string, with the last one */
    uint32_t end;  /* the last quote */
    uint32_t character;
    uint32_t at_most, exactly; /* repeats of GR_LENGTH_MOST characters */
};
enum { GR_LENGTH_MOST = 1 << 20 };

struct gr_program {
    struct gr_state *states;
    struct gr_range *ranges;
    struct gr_repeat *repeats;
    struct gr_object *objects;
    struct gr_key *keys;
    uint32_t *lists;
    uint32_t n_states, n_ranges, n_repeats, n_objects, n_keys, n_lists;
    uint32_t cap_states, cap_ranges, cap_repeats, cap_objects, cap_keys, cap_lists;
    uint32_t start;
    struct gr_strings strings; /* of gr_json_init; zeros without it */
    bool is_full;              /* GR_STATES_MOST was reached; what was added since then is not there */
};
enum { GR_STATES_MOST = 1 << 18 };

/* program.c: adding states, from the end of a rule to its beginning. `next`: where it goes on. */
void gr_program_init(struct gr_program *p);
void gr_program_fini(struct gr_program *p);
size_t gr_program_bytes(const struct gr_program *p);
uint32_t gr_add(struct gr_program *p, struct gr_state s);
uint32_t gr_bytes(struct gr_program *p, const struct gr_range *ranges, uint32_t n);
uint32_t gr_byte(struct gr_program *p, uint8_t first, uint8_t last, uint32_t next);
uint32_t gr_text(struct gr_program *p, const char *text, size_t len, uint32_t next);
uint32_t gr_split(struct gr_program *p, const uint32_t *states, uint32_t n);
/* One of n texts, each followed by next. texts are sorted here. */
uint32_t gr_one_of(struct gr_program *p, struct bytes *texts, uint32_t n, uint32_t next);
uint32_t gr_either(struct gr_program *p, uint32_t a, uint32_t b);
uint32_t gr_call(struct gr_program *p, uint32_t rule, bool cuts, uint32_t next);
/* The rule that repeats body, itself a rule: what begins at `body` and ends with GR_END. */
uint32_t gr_repeat(struct gr_program *p, uint32_t body, uint32_t least, uint32_t most);
/* A state to be set later, by gr_become(), for loops. */
uint32_t gr_later(struct gr_program *p);
void gr_become(struct gr_program *p, uint32_t later, uint32_t state);
uint32_t gr_object_new(struct gr_program *p);
/* Adds a name to the trie of an object. text: with its quotes, as it stands in the answer. */
void gr_object_key(struct gr_program *p, uint32_t object, const char *text, size_t len, uint32_t property);

/* pattern.c: expressions over code points. */
struct gr_node; /* of a syntax tree; all nodes of a tree are freed together */
struct gr_tree {
    struct gr_node **nodes;
    uint32_t n, cap;
};
enum gr_domain {
    GR_RAW,      /* the text itself */
    GR_IN_STRING /* the inside of a JSON string: with escapes */
};
struct gr_span {
    uint32_t first, last; /* code points */
};
struct gr_node *gr_node_class(struct gr_tree *t, const struct gr_span *spans, uint32_t n);
struct gr_node *gr_node_text(struct gr_tree *t, const char *text, size_t len);        /* TD: NULL if it is not UTF-8 */
struct gr_node *gr_node_cat(struct gr_tree *t, struct gr_node *a, struct gr_node *b); /* NULL: the empty text */
struct gr_node *gr_node_alt(struct gr_tree *t, struct gr_node *a, struct gr_node *b);
struct gr_node *gr_node_times(struct gr_tree *t, struct gr_node *a, uint32_t least, uint32_t most);
struct gr_node *gr_node_rule(struct gr_tree *t, uint32_t state); /* calls a rule */
void gr_tree_free(struct gr_tree *t);
/* is_search: it may match anywhere in the text, unless it begins with ^ and ends with $. NULL with an
 * error. */
enum td_status gr_parse_pattern(struct gr_tree *t, const char *text, size_t len, bool is_search, struct gr_node **out,
                                struct td_error *e);
/* The class [...] that begins at *at, for EBNF as well. */
enum td_status gr_parse_class(struct gr_tree *t, const char *text, size_t len, size_t *at, struct gr_node **out,
                              struct td_error *e);
/* Four hexadecimal digits, in either case, of a number in one of the spans; then next. */
uint32_t gr_four_digits(struct gr_program *p, const struct gr_span *spans, uint32_t n, uint32_t next);
uint32_t gr_emit(struct gr_program *p, const struct gr_node *n, enum gr_domain domain, uint32_t next);

/* json.c: values of JSON. Each of the rules ends with GR_END, and has no space around it. */
enum { GR_OTHER_RANGES = 13 };
struct gr_json {
    uint32_t string, number, integer, value, object, array, truth, null; /* value: any of them */
    struct gr_range other[GR_OTHER_RANGES];                              /* what may come in a name of no property */
};
void gr_json_init(struct gr_program *p, struct gr_json *j);
uint32_t gr_colon(struct gr_program *p, uint32_t next); /* a colon with space around it, then next */
uint32_t gr_space(struct gr_program *p, uint32_t next); /* the space that JSON is written with, then next */
/* A name that the object has no property for, with its quotes; ends with GR_END. Such names are not spelled
 * with escapes of printable ASCII, so that no property's name is spelled in another way. */
uint32_t gr_other_name(struct gr_program *p, const struct gr_json *j, uint32_t object);
/* Appends the text of a string as JSON has it, with quotes; is_ascii: other characters as \uXXXX. */
void gr_quote(struct bytes *out, const char *text, size_t len, bool is_ascii);

enum td_status gr_compile_schema(struct gr_program *p, const char *text, size_t len, struct td_error *e);
/* The rule of a schema, with j as gr_json_init() left it. */
enum td_status gr_schema_rule(struct gr_program *p, const struct gr_json *j, json_t *schema, uint32_t *rule_out,
                              struct td_error *e);
enum td_status gr_compile_structure(struct gr_program *p, const char *text, size_t len, struct td_error *e);
enum td_status gr_compile_ebnf(struct gr_program *p, const char *text, size_t len, struct td_error *e);
enum td_status gr_compile_choice(struct gr_program *p, const char *text, size_t len, struct td_error *e);

/* vocab.c: the trie, depth first. */
struct gr_trie_node {
    uint8_t byte;
    uint16_t depth;                 /* of the root: 0 */
    uint32_t end;                   /* behind the last node below this one */
    uint32_t first_token, n_tokens; /* in grammar_vocab.tokens */
    uint64_t below;                 /* kinds of the bytes of the nodes below this one */
};
/* Bytes are of 64 kinds, each a bit: letters by themselves, as most tokens have only a few of them. */
uint64_t gr_kind_of(uint8_t byte);
struct grammar_vocab {
    struct gr_trie_node *nodes; /* [0]: the root */
    uint32_t beginnings[256];   /* the root's child by its byte; 0: none */
    uint32_t *tokens;           /* sorted by their bytes */
    uint32_t n_nodes, n_tokens, n_listed, longest;
    uint32_t *starts; /* of each token in bytes; one more at the end */
    char *bytes;
    struct gr_shared *shared; /* parts of masks of rules that all schemas have */
};
struct gr_shared *gr_shared_open(const struct grammar_vocab *v);
void gr_shared_close(struct gr_shared *s);

struct gr_frame {
    uint32_t state;
    uint32_t is_base; /* its rule is one that cuts */
    uint64_t data;
};
