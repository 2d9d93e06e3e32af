/*
 * The grammars of requests, compiled once for all requests that have the same text.
 *
 * Threads: any. A grammar is looked for when a leg arrives, on the thread of its link, so that the
 * engine's thread finds it compiled.
 */
#pragma once

#include "grammar/grammar.h"

struct grammars;
/* dir: of the model, whose tokenizer gives the vocabulary; NULL, or without a tokenizer: there are no
 * grammars. */
enum td_status grammars_open(const char *dir, uint32_t vocab_size, struct grammars **out, struct td_error *error_out);
void grammars_close(struct grammars *g);   /* NULL is fine; after all sequences */
size_t grammars_bytes(struct grammars *g); /* memory of the grammars that are kept: some 256 MiB at most */
/* *out: a reference. Errors are grammar_compile()'s; TD_ERR_UNSUPPORTED: this worker has no vocabulary. */
enum td_status grammars_get(struct grammars *g, uint32_t kind, const void *text, size_t len, struct grammar **out,
                            struct td_error *error_out);
