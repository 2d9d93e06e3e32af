/*
 * tokenizer.json: text to ids and back, as the Hugging Face tokenizers library does it.
 *
 *   normalizers     NFC, NFD, NFKC, NFKD, Lowercase, StripAccents, Strip, Prepend, Replace, ByteLevel,
 *   Precompiled pre-tokenizers  Split (all behaviors), ByteLevel, Metaspace, Whitespace, WhitespaceSplit,
 *                   Digits, Punctuation, CharDelimiterSplit, BertPreTokenizer
 *   models          BPE (byte fallback, ignore_merges, fuse_unk, prefixes and suffixes of words), Unigram
 *   post-processors TemplateProcessing, ByteLevel, BertProcessing, RobertaProcessing
 *   decoders        Replace, ByteFallback, Fuse, Strip, ByteLevel, Metaspace
 *   added tokens    lstrip, rstrip, single_word, normalized, special
 *
 * and Sequences of them. Anything else in a file is refused at load, by name.
 *
 * Text is bytes with a length: it may contain U+0000. Input that is not UTF-8 is TD_ERR_INVALID.
 *
 * Cost: linear in the length of any text (as far as the file's own expressions are) if the merges of the
 * vocabulary are in the order in which they were learned, else n log n. Each encoding thread has a cache of
 * one MiB for short pieces. Loading refuses hostile files: empty added tokens, merges that no entry makes
 * (checked as in the library), JSON that is too deep or too large.
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

/* A list of ids. Zeroed: empty. Free it with token_ids_free(). */
struct token_ids {
    uint32_t *ids;
    size_t n, cap;
    size_t limit; /* tokenizer_encode() stops soon after more than limit ids; 0: no limit */
};
void token_ids_push(struct token_ids *t, uint32_t id);
void token_ids_free(struct token_ids *t);

/* Reads DIR/tokenizer.json. TD_ERR_NOT_FOUND, TD_ERR_CORRUPT and TD_ERR_UNSUPPORTED give one line. */
enum td_status tokenizer_open(const char *dir, struct tokenizer **out, struct td_error *error_out);
enum td_status tokenizer_parse(const char *json, size_t len_bytes, struct tokenizer **out, struct td_error *error_out);
void tokenizer_close(struct tokenizer *t); /* NULL is fine */

uint32_t tokenizer_size(const struct tokenizer *t); /* largest id + 1, added tokens included */
bool tokenizer_is_special(const struct tokenizer *t, uint32_t id);
/*
 * The most bytes of text that one token stands for: the length of the longest entry, or four times that if
 * normalizers shorten text. A text of more than n times this many bytes has more than n tokens, unless the
 * tokenizer drops most of it (stripped spaces, removed separators, runs of unknown characters that become one
 * token).
 */
uint32_t tokenizer_max_token_bytes(const struct tokenizer *t);

/*
 * Appends to out. add_special: also what the post-processor adds. Special tokens in the text count as
 * special. TD_ERR_NO_SPACE: more than out->limit ids; the first ones are in out.
 */
enum td_status tokenizer_encode(const struct tokenizer *t, const char *text, size_t len_bytes, bool add_special,
                                struct token_ids *out, struct td_error *error_out);

/*
 * Appends text to out. Unknown ids decode to nothing; bytes that are not UTF-8 become U+FFFD, as in the
 * library.
 */
void tokenizer_decode(const struct tokenizer *t, const uint32_t *ids, size_t n, bool skip_special, struct bytes *out);

/*
 * Streaming: ids one by one, text as soon as it is certain. Bytes are held back until they are complete
 * UTF-8. Byte-level: bytes that can't become UTF-8 give U+FFFD at once. Byte fallback: a run of byte tokens
 * is held until it is valid. All pieces together equal tokenizer_decode() of all ids, except in byte-fallback
 * runs that are only partly text, which tokenizer_decode() judges as a whole.
 */
struct token_stream;
struct token_stream *token_stream_open(const struct tokenizer *t, bool skip_special);
/* These special tokens are not skipped; ids are borrowed. */
void token_stream_show(struct token_stream *s, const uint32_t *ids, size_t n);
void token_stream_push(struct token_stream *s, uint32_t id, struct bytes *out);
/* Appends the bytes that this token stands for within a text (special tokens: their names), which may be part
 * of a character. The stream stays as it is. */
void token_stream_piece(struct token_stream *s, uint32_t id, struct bytes *out);
void token_stream_flush(struct token_stream *s, struct bytes *out);
void token_stream_close(struct token_stream *s); /* NULL is fine */
