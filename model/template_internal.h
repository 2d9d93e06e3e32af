/*
 * What the files of the template interpreter share.
 *
 *     source --template_lex.c--> tokens --template_parse.c--> tree of nodes --template_run.c--> text
 *
 * template_filters.c and template_methods.c have the operations by name; template_value.c has values, and
 * writes them as Python does.
 *
 * Memory: a tree, and all values of one rendering, are in an arena that is freed as a whole.
 * Errors: the first failure is kept in the parser or run; everything after it returns none, and loops check
 * for it.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "model/template.h"

struct str {
    const char *p;
    size_t n;
};
#define NAME(literal)                                                                                                  \
    {                                                                                                                  \
        literal, sizeof(literal) - 1                                                                                   \
    } /* in tables */
#define STR(literal) ((struct str)NAME(literal))

static inline bool str_is(struct str a, struct str b)
{
    return a.n == b.n && !memcmp(a.p, b.p, a.n);
}

/* ------------------------------------------------------------------- arena */
struct arena {
    struct chunk *chunks;
    size_t left, total;
    char *at;
};
void *arena_take(struct arena *a, size_t len); /* zeroed memory */
struct str arena_str(struct arena *a, const char *p, size_t n);
void arena_free(struct arena *a);

/* ------------------------------------------------------------------ values */
enum kind {
    V_UNDEFINED, /* str: the undefined name */
    V_NONE,
    V_BOOL,
    V_INT,
    V_FLOAT,
    V_STR,
    V_LIST,
    V_DICT,
    V_NAMESPACE, /* a dict that may be assigned to */
    V_LOOP,
    V_MACRO,
    V_FUNCTION, /* i: which function */
    V_METHOD,
};
struct value {
    enum kind kind;
    union {
        bool b;
        int64_t i;
        double f;
        struct str s;
        struct template_list *list;
        struct dict *dict;
        struct loop *loop;
        struct macro *macro;
        struct template_bound *bound;
    };
};
struct template_list {
    struct value *items;
    size_t n, cap;
    bool tuple;
};
struct dict {
    struct pair {
        struct value key, value;
    } * items;
    size_t n, cap;
};
struct template_bound {
    struct value self;
    int method;
};
struct loop {
    const struct template_list *items;
    size_t i;
    uint32_t depth0;
    struct value changed;
    bool has_changed;
};
struct macro {
    const struct template_node *node; /* N_MACRO or N_CALL_BLOCK */
    struct scope *scope;              /* scope of the definition */
};

/* -------------------------------------------------------------------- tree */
enum node_kind {
    N_CONST,    /* value */
    N_NAME,     /* text */
    N_LIST,     /* kids[0]: N_ARGUMENTs */
    N_TUPLE,    /* as N_LIST; as a target: N_NAMEs */
    N_ARGUMENT, /* value: one of a list */
    N_DICT,     /* kids[0]: N_PAIRs */
    N_PAIR,     /* key, value */
    N_ATTR,     /* object; text */
    N_ITEM,     /* object, key */
    N_SLICE,    /* object, start, stop, step */
    N_CALL,     /* callee, arguments */
    N_KEYWORD,  /* text = value */
    N_FILTER,   /* operand (NULL: the block's text), arguments; op */
    N_TEST,     /* operand, arguments; op */
    N_UNARY,    /* op: '-', '+', '!' */
    N_BINARY,   /* op */
    N_COMPARE,  /* first; kids[1]: N_COMPARE_WITH */
    N_COMPARE_WITH,
    N_COND, /* test, then, else */
    N_TEXT,
    N_OUTPUT,
    N_IF,        /* test, body, else */
    N_FOR,       /* target, list, body, else, filter */
    N_SET,       /* target, value */
    N_SET_BLOCK, /* target, body, N_FILTER chain */
    N_MACRO,     /* parameters, body; text */
    N_PARAMETER, /* default; text */
    N_CALL_BLOCK,
    N_FILTER_BLOCK, /* filter chain, body */
    N_WITH,         /* N_SETs, body */
    N_BREAK,
    N_CONTINUE,
};
enum op { /* operators of N_BINARY and N_COMPARE_WITH; others are characters */
          OP_AND = 256,
          OP_OR,
          OP_FLOOR,
          OP_POW,
          OP_EQ,
          OP_NE,
          OP_LT,
          OP_LE,
          OP_GT,
          OP_GE,
          OP_IN,
          OP_NOT_IN,
};
struct template_node {
    enum node_kind kind;
    int op;
    uint32_t line, column;
    struct template_node *next; /* next in a list */
    struct template_node *kids[5];
    struct str text;
    struct value value;
};

enum token_kind {
    T_TEXT,
    T_VARIABLE,
    T_VARIABLE_END,
    T_BLOCK,
    T_BLOCK_END,
    T_NAME,
    T_STR,
    T_INT,
    T_FLOAT,
    T_OP,
    T_END
};
struct token {
    enum token_kind kind;
    uint32_t line, column;
    struct str text; /* T_STR: without quotes, escapes resolved; T_OP: one or two characters */
    int64_t i;
    double f;
};

struct template
{
    struct arena arena;
    struct template_node *body;
    struct token *tokens; /* freed after parsing */
    size_t n_tokens, cap_tokens;
};

/* template_lex.c: fills t->tokens; the last one is T_END. */
enum td_status template_lex(struct template *t, const char *source, size_t len, struct td_error *e);
/* template_parse.c: builds t->body from t->tokens. */
enum td_status template_build(struct template *t, struct td_error *e);

/* ------------------------------------------------------------------- a run */
struct variable {
    struct str name;
    struct value value;
};
struct scope {
    struct scope *parent;
    struct variable *variables;
    size_t n, cap;
};
struct template_run {
    struct arena arena;
    struct bytes *out; /* where output goes: the answer, or the text of a macro or block */
    struct td_error *e;
    enum td_status status;
    const struct template_node *at;
    uint64_t steps;
    uint32_t depth, loops;
    enum { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE } flow;
    time_t now;
};

enum { MAX_ARGS = 16 };
struct template_args {
    struct value values[MAX_ARGS];
    uint32_t n;
    struct variable named[MAX_ARGS];
    uint32_t n_named;
};

/* Keeps the first failure, with its line. Returns none. */
struct value run_fail(struct template_run *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
struct value run_undefined(struct template_run *r, struct value v); /* fails, because v is undefined */
/* Room for len more bytes; false: failed. */
bool run_room(struct template_run *r, size_t len);

struct value value_none(void);
struct value value_bool(bool b);
struct value value_int(int64_t i);
struct value value_float(double f);
struct value value_str(const char *p, size_t n); /* borrows p */
struct value value_copy(struct template_run *r, const char *p, size_t n);
struct value value_bytes(struct template_run *r, struct bytes *b); /* copies b and frees it */
struct value value_list(struct template_run *r, bool tuple);
struct value value_dict(struct template_run *r);
struct value value_json(struct template_run *r, json_t *v, uint32_t depth);
void list_push(struct template_run *r, struct template_list *l, struct value v);
struct value *dict_find(const struct dict *d, struct value key);
void dict_set(struct template_run *r, struct dict *d, struct value key, struct value v);

bool value_true(struct value v);
bool value_equal(struct value a, struct value b, uint32_t depth);
int value_compare(struct template_run *r, struct value a, struct value b); /* fails where Python would */
bool value_number(struct value v, double *out);
const char *value_type(struct value v);
void value_write(struct template_run *r, struct value v, struct bytes *out); /* str() */
struct value value_text(struct template_run *r, struct value v);             /* str() as a value */
struct template_list *value_iterate(struct template_run *r, struct value v); /* NULL: failed */

struct json_style {
    bool ascii, sorted;
    struct str indent, item, key; /* indent NULL: everything on one line */
};
void value_tojson(struct template_run *r, struct value v, const struct json_style *s, uint32_t depth,
                  struct bytes *out);

size_t str_chars(struct str s);
size_t str_offset(struct str s, size_t chars); /* offset in bytes of that character, at most n */
struct str str_strip(struct str s, struct str *chars, bool left, bool right);
struct value str_case(struct template_run *r, struct str s, bool upper);
struct value str_replace(struct template_run *r, struct str s, struct str old, struct str with, int64_t count);

/* template_run.c */
struct value run_attribute(struct template_run *r, struct value v, struct str name);
struct value run_item(struct template_run *r, struct value v, struct value key);

/* Argument i, or the one with that name. False if it is not given. */
bool template_arg(const struct template_args *a, uint32_t i, const char *name, struct value *out);

/* template_filters.c, template_methods.c. Return -1 if there is no such name. */
int filter_find(struct str name);
struct value filter_apply(struct template_run *r, int filter, struct value v, const struct template_args *a);
int test_find(struct str name);
bool test_apply(struct template_run *r, int test, struct value v, const struct template_args *a);
int method_find(struct str name);
bool method_of(struct value self, int method); /* whether such a value has that method */
struct value method_call(struct template_run *r, const struct template_bound *b, const struct template_args *a);
int function_find(struct str name);
struct value function_call(struct template_run *r, int function, const struct template_args *a);
