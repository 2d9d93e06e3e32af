/* What the files of the tokenizer share: loading fills it, encoding and decoding only read it. */
#pragma once

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "model/tokenizer.h"

enum { MAX_STEPS = 8, MAX_TEMPLATE_IDS = 8 };

struct slice {
    const char *data;
    size_t len;
};

/* Bytes -> id. Keys borrow from the tokenizer's arena. */
struct id_map {
    struct id_slot {
        struct slice key;
        uint32_t id;
        bool used;
    } * slots;
    size_t cap, n;
};

/* (left id, right id) -> rank and id of the merged piece. */
struct merge {
    uint64_t pair;
    uint32_t rank, id;
};
struct merge_map {
    struct merge *slots; /* pair UINT64_MAX: empty */
    size_t cap, n;
};

enum normalizer_kind { NORMALIZE_NFC, NORMALIZE_PREPEND, NORMALIZE_REPLACE };
struct normalizer {
    enum normalizer_kind kind;
    struct slice pattern, content;
};

enum prepend_scheme { PREPEND_NEVER, PREPEND_FIRST, PREPEND_ALWAYS };

struct added_token {
    struct slice content; /* as matched: normalized where it asks for that */
    uint32_t id;
};
struct added_set { /* longest first within a first byte */
    struct added_token *tokens;
    uint32_t n;
    uint32_t first[257]; /* tokens[first[b] .. first[b+1]) begin with byte b */
};

struct piece {
    struct slice text; /* raw bytes for byte-level kinds, else UTF-8 */
    bool known, added, special;
    int16_t byte; /* 0..255: a byte-fallback token; else -1 */
};

struct tokenizer {
    struct bytes *arena; /* blocks of text that slices borrow from */
    uint32_t n_arena;
    struct piece *pieces;
    uint32_t n_pieces;
    struct id_map vocab;
    struct merge_map merges;
    bool byte_level, byte_fallback, ignore_merges, fuse_unk, has_unk;
    uint32_t unk_id, byte_ids[256];
    bool has_byte[256];
    struct normalizer normalizers[MAX_STEPS];
    uint32_t n_normalizers;
    pcre2_code *splits[MAX_STEPS];
    uint32_t n_splits;
    bool add_prefix_space, metaspace;
    struct slice meta_replacement;
    enum prepend_scheme meta_prepend;
    struct added_set raw_added, normalized_added;
    uint32_t before[MAX_TEMPLATE_IDS], n_before, after[MAX_TEMPLATE_IDS], n_after;
    struct normalizer decode_replaces[MAX_STEPS];
    uint32_t n_decode_replaces;
    struct slice decode_strip; /* one leading occurrence goes; empty: none */
};

struct slice tokenizer_keep(struct tokenizer *t, const char *data, size_t len);
bool id_map_find(const struct id_map *m, struct slice key, uint32_t *id_out);
void id_map_add(struct id_map *m, struct slice key, uint32_t id);
const struct merge *merge_map_find(const struct merge_map *m, uint32_t left, uint32_t right);
void merge_map_add(struct merge_map *m, uint32_t left, uint32_t right, uint32_t rank, uint32_t id);

/* GPT-2's alphabet: the byte that a character of a byte-level vocabulary stands for; -1: none. */
int byte_of_alphabet(uint32_t codepoint);

/* Applies the normalizers to text (valid UTF-8); appends to out. */
enum td_status tokenizer_normalize(const struct tokenizer *t, struct slice text, struct bytes *out, struct td_error *e);

/* Appends the ids of one pre-tokenized piece. */
void tokenizer_bpe(const struct tokenizer *t, struct slice text, struct token_ids *out);
