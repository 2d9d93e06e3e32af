/*
 * Grammars: which tokens may come next, so that an answer has a stated form from its first token to its last.
 *
 *     text of a schema, expression, grammar --grammar_compile--> program (grammar_internal.h)
 *     a cursor, the set of places where the answer can be --grammar_cursor_take(token)--> the next set
 *     a cursor --grammar_cursor_mask--> one bit for each token of the vocabulary
 *
 * Programs work on bytes, so a token may end within a character, a string or a keyword. What a cursor
 * knows is a function of the program and the tokens that it took: cursors that took the same tokens
 * agree, wherever they run.
 *
 * A mask is put together from parts that were computed before. Part of a place is what lies above the rule
 * that was entered last (a string's body, an object's keys); which tokens go on within it depends on nothing
 * below, so that is computed once, by a walk over the trie of the vocabulary, and kept. Where a token ends a
 * rule and goes on behind it, the walk stops, and each mask walks on from there with what is below. This is
 * the split of XGrammar (Dong et al., MLSys 2025) into tokens that depend on the context and those that do
 * not, made on demand instead of at compile time, and for whole subtrees of the trie instead of tokens.
 *
 * Threads: a vocabulary and a program may be used by several threads at once; a cursor by one at a time.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* ---------------------------------------------------------------- vocabulary */

struct grammar_vocab;
/* The bytes of token `id`; length 0: a grammar never allows it (entries that are not used). A special
 * token is GRAMMAR_MARK and its text: only marks of GRAMMAR_STRUCTURE allow it, since no text has that
 * byte. */
#define GRAMMAR_MARK '\xff'
typedef void grammar_bytes_of(void *user, uint32_t id, const char **bytes_out, size_t *len_out);
/* bytes_of is called once for each id below n_tokens. */
struct grammar_vocab *grammar_vocab_open(uint32_t n_tokens, grammar_bytes_of *bytes_of, void *user);
void grammar_vocab_close(struct grammar_vocab *v);          /* NULL is fine; after the programs that use it */
uint32_t grammar_mask_words(const struct grammar_vocab *v); /* of 32 bits, in a mask */

/* ------------------------------------------------------------------ programs */

enum grammar_kind {
    GRAMMAR_JSON,      /* any JSON object; text is not looked at */
    GRAMMAR_SCHEMA,    /* a JSON Schema (grammar/schema.c says which part of 2020-12) */
    GRAMMAR_REGEX,     /* a regular expression that the whole answer matches (grammar/pattern.c) */
    GRAMMAR_EBNF,      /* rules, in the common ground of GBNF and Lark (grammar/ebnf.c) */
    GRAMMAR_CHOICE,    /* a JSON list of texts, one of which the answer is */
    GRAMMAR_STRUCTURE, /* sequences of texts, marks, schemas and expressions (grammar/structure.c) */
};

struct grammar;
/*
 * Compiles. vocab: for which masks are made; NULL: the text is only checked. TD_ERR_INVALID: the text is
 * wrong; TD_ERR_UNSUPPORTED: it says something that is not supported, by name; TD_ERR_NO_SPACE: it is too
 * large, too deep, or makes too many states.
 */
enum td_status grammar_compile(const struct grammar_vocab *vocab, enum grammar_kind kind, const char *text, size_t len,
                               struct grammar **out, struct td_error *error_out);
struct grammar *grammar_ref(struct grammar *g); /* NULL gives NULL */
void grammar_unref(struct grammar *g);          /* NULL is fine; the last one frees it */
/* Memory that it takes now: the program, and what is kept of masks. */
size_t grammar_bytes(struct grammar *g);

/* ------------------------------------------------------------------- cursors */

struct grammar_cursor;
struct grammar_cursor *grammar_cursor_open(struct grammar *g); /* keeps a reference */
struct grammar_cursor *grammar_cursor_copy(const struct grammar_cursor *c);
void grammar_cursor_close(struct grammar_cursor *c); /* NULL is fine */
/* Goes over a token, or over bytes. False: they are not allowed here; the cursor is at no place from then
 * on. Of a very ambiguous grammar only some places are followed (places.c), so then it may also mean that the
 * way to go on was not among them. */
bool grammar_cursor_take(struct grammar_cursor *c, uint32_t token);
bool grammar_cursor_take_bytes(struct grammar_cursor *c, const char *bytes, size_t len);
bool grammar_cursor_may_end(const struct grammar_cursor *c); /* the answer is complete here */
/* Writes grammar_mask_words() words: bit id % 32 of word id / 32 is set if the token is allowed. False: the
 * grammar is so ambiguous here that this would take too long; then no bit is set. Where this is so follows
 * from the grammar, the vocabulary and the tokens taken alone. */
bool grammar_cursor_mask(struct grammar_cursor *c, uint32_t *words);
