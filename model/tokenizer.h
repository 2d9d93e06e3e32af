/*
 * tokenizer.json: text to ids and back, as the Hugging Face tokenizers library does it.
 *
 *   normalizers     NFC, NFD, NFKC, NFKD, Lowercase, StripAccents, Strip, Prepend, Replace, ByteLevel, Precompiled
 *   pre-tokenizers  Split (all behaviors), ByteLevel, Metaspace, Whitespace, WhitespaceSplit, Digits, Punctuation,
 *                   CharDelimiterSplit, BertPreTokenizer
 *   models          BPE (byte fallback, ignore_merges, fuse_unk, prefixes and suffixes of words), Unigram
 *   post-processors TemplateProcessing, ByteLevel, BertProcessing, RobertaProcessing
 *   decoders        Replace, ByteFallback, Fuse, Strip, ByteLevel, Metaspace
 *   added tokens    lstrip, rstrip, single_word, normalized, special
 *
 * and Sequences of them. What a file uses beyond that is refused at load by name.
 *
 * Text is bytes with a length: it may hold U+0000. Input that is not UTF-8 is TD_ERR_INVALID.
 *
 * Cost: linear in the text's length whatever the text (expressions, as far as the file's own are), for vocabularies whose merges
 * come in the order in which they were learned; n log n for others. Short pieces are looked up in a cache of a megabyte for each thread
 * that encodes at the same time. Loading refuses hostile files: empty added tokens, merges that no entry makes (checked as the library
 * does), too deep or too large JSON.
 *
 * Threads: after opening every function may run on several threads at once.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/mem.h"
#include "base/status.h"

struct tokenizer;

struct token_ids { /* zero-initialised is empty; free with token_ids_free */
    uint32_t *ids;
    size_t n, cap;
    size_t limit; /* tokenizer_encode gives up soon after it has more than this many; 0: never */
};
void token_ids_push(struct token_ids *t, uint32_t id);
void token_ids_free(struct token_ids *t);

/* Reads DIR/tokenizer.json (TD_ERR_NOT_FOUND, TD_ERR_CORRUPT, TD_ERR_UNSUPPORTED: one clear line). */
enum td_status tokenizer_open(const char *dir, struct tokenizer **out, struct td_error *error_out);
enum td_status tokenizer_parse(const char *json, size_t len_bytes, struct tokenizer **out, struct td_error *error_out);
void tokenizer_close(struct tokenizer *t); /* NULL is fine */

uint32_t tokenizer_size(const struct tokenizer *t); /* largest id + 1, added tokens included */
/*
 * The most bytes of text that one token stands for: the longest entry, four times that where normalizers shorten text. A text of more
 * than n times this many bytes has more than n tokens, unless the tokenizer drops most of it (stripped spaces, removed separators, runs
 * of unknown characters that become one token).
 */
uint32_t tokenizer_max_token_bytes(const struct tokenizer *t);
/* id of an added token's or vocabulary entry's text; TD_ERR_NOT_FOUND */
enum td_status tokenizer_find(const struct tokenizer *t, const char *text, uint32_t *id_out);

/*
 * Appends to out. add_special: what the post-processor adds. Special tokens in the text are taken as special. TD_ERR_NO_SPACE: more
 * than out->limit ids; the ones so far are there.
 */
enum td_status tokenizer_encode(const struct tokenizer *t, const char *text, size_t len_bytes, bool add_special,
                                struct token_ids *out, struct td_error *error_out);

/* Appends text to out. Unknown ids decode to nothing; bytes that are not UTF-8 become U+FFFD as the library does it. */
void tokenizer_decode(const struct tokenizer *t, const uint32_t *ids, size_t n, bool skip_special, struct bytes *out);

/*
 * Streaming: ids one by one, text as soon as it is certain. Bytes are held back until they are complete UTF-8; byte-level:
 * what can't become UTF-8 comes out as U+FFFD at once; byte fallback: a run of byte tokens is held until it is valid. All
 * pieces joined are tokenizer_decode of all ids, but for byte-fallback runs that are partly text: those count as a whole
 * there.
 */
struct token_stream;
struct token_stream *token_stream_open(const struct tokenizer *t, bool skip_special);
void token_stream_push(struct token_stream *s, uint32_t id, struct bytes *out);
void token_stream_flush(struct token_stream *s, struct bytes *out);
void token_stream_close(struct token_stream *s); /* NULL is fine */
