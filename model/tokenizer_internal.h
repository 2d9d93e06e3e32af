/*
 * What the files of the tokenizer share. Loading fills it; encoding and decoding only read it.
 *
 *     text --added tokens cut out--> normalizers --normalized added tokens cut out--> steps (pre-tokenizers)
 *     --> model
 *
 * If the last step maps bytes to GPT-2's alphabet (all byte-level kinds), that step is left out and the
 * vocabulary is kept as raw bytes instead: encoding then works on the text itself.
 */
#pragma once

#define PCRE2_CODE_UNIT_WIDTH 8
#include <jansson.h>
#include <pcre2.h>

#include "model/tokenizer.h"

enum { MAX_STEPS = 16, MAX_TEMPLATE_IDS = 8, MAX_ID = 1 << 24 };
#define NO_ID UINT32_MAX

struct slice {
    const char *data;
    size_t len;
};

/* A hash map from bytes to ids. Keys borrow from the tokenizer's arena. */
struct id_map {
    struct id_slot {
        struct slice key;
        uint32_t id, hash; /* hash 0: the slot is empty */
    } * slots;
    size_t cap, n;
};

/* Two ids that merge: (left id, right id) -> rank, and id of the merged piece. */
struct merge {
    uint64_t pair;
    uint32_t rank, id;
};
struct merge_map {
    struct merge *slots; /* pair UINT64_MAX: the slot is empty */
    size_t cap, n;
};

/* An expression, or (code NULL) a literal text. */
struct pattern {
    pcre2_code *code;
    bool jit;
    struct slice literal;
};

enum normalizer_kind {
    NORMALIZE_FORM,
    NORMALIZE_LOWERCASE,
    NORMALIZE_ACCENTS,
    NORMALIZE_STRIP,
    NORMALIZE_PREPEND,
    NORMALIZE_REPLACE,
    NORMALIZE_ALPHABET,
    NORMALIZE_PRECOMPILED,
};
struct normalizer {
    enum normalizer_kind kind;
    bool compose, compat; /* FORM: NFC, NFD, NFKC or NFKD */
    bool left, right;     /* STRIP */
    struct pattern pattern;
    struct slice content;   /* PREPEND, REPLACE; PRECOMPILED: the texts that the trie points to */
    uint32_t *trie, n_trie; /* PRECOMPILED: units of a Darts trie */
};

enum split_behavior { SPLIT_REMOVED, SPLIT_ISOLATED, SPLIT_CONTIGUOUS, SPLIT_WITH_PREVIOUS, SPLIT_WITH_NEXT };
enum step_kind { STEP_SPLIT, STEP_METASPACE, STEP_PREFIX_SPACE, STEP_ALPHABET };
enum prepend_scheme { PREPEND_NEVER, PREPEND_FIRST, PREPEND_ALWAYS };
struct tokenizer_step {
    enum step_kind kind;
    struct pattern pattern;
    enum split_behavior behavior;
    bool invert;
    struct slice replacement; /* METASPACE */
    enum prepend_scheme prepend;
};

struct added_token {
    struct slice content; /* the text to match: normalized, if the token asks for that */
    uint32_t id;
    bool lstrip, rstrip, single_word;
};
/* Added tokens, sorted by content. */
struct added_set {
    struct added_token *tokens;
    uint32_t n;
    uint32_t first[257]; /* tokens[first[b] .. first[b + 1] - 1] begin with byte b */
};

struct tokenizer_piece {
    struct slice text;
    bool known, special;
    bool raw;     /* the text was converted back from GPT-2's alphabet */
    int16_t byte; /* 0 .. 255: the text is <0xHH>; else -1 */
};

enum decode_kind { DECODE_REPLACE, DECODE_STRIP, DECODE_METASPACE };
struct decode_step {
    enum decode_kind kind;
    struct pattern pattern; /* REPLACE, METASPACE */
    struct slice content;   /* REPLACE: the new text; STRIP: the character */
    uint32_t start, stop;   /* STRIP */
    bool not_first;         /* METASPACE: not at the beginning of the first token */
};

struct tokenizer {
    struct bytes *arena; /* blocks of text, from which slices borrow */
    uint32_t n_arena;
    struct tokenizer_piece *pieces;
    uint32_t n_pieces, cap_pieces, max_token_bytes;
    struct id_map vocab;

    bool unigram, raw, byte_fallback, ignore_merges, fuse_unk, has_unk;
    uint32_t unk_id, byte_ids[256];
    bool has_byte[256];
    struct merge_map merges; /* BPE */
    uint32_t n_ranks;
    struct slice word_prefix, word_suffix; /* of the inner characters, and of the last character, of a word */
    /* Unigram: every beginning of an entry; NO_ID: it is no entry itself. */
    struct id_map prefixes;
    double *scores, unk_score;

    struct normalizer normalizers[MAX_STEPS];
    uint32_t n_normalizers;
    struct tokenizer_step steps[MAX_STEPS];
    uint32_t n_steps;
    struct added_set raw_added, normalized_added;
    struct pattern word; /* a character that must not be next to a single_word token */
    uint32_t before[MAX_TEMPLATE_IDS], n_before, after[MAX_TEMPLATE_IDS], n_after;

    bool has_decoder, decode_bytes, decode_byte_level, decode_fused;
    /* Steps for each token; the first n_decode_early run before bytes are put together. */
    struct decode_step decode_steps[MAX_STEPS];
    uint32_t n_decode_steps, n_decode_early;
    struct decode_step decode_last; /* STRIP of the whole text; content empty: none */

    struct encoder_pool *encoders;
};

/* ------------------------------------------- tokenizer_map.c */
struct slice tokenizer_keep(struct tokenizer *t, const char *data, size_t len);
bool id_map_find(const struct id_map *m, struct slice key, uint32_t *id_out);
void id_map_add(struct id_map *m, struct slice key, uint32_t id);
/* The hash of a key that grows byte by byte. */
#define HASH_BEGIN 0x811c9dc5u
uint32_t id_map_hash(uint32_t so_far, const char *data, size_t len);
bool id_map_find_hashed(const struct id_map *m, struct slice key, uint32_t hash, uint32_t *id_out);
const struct merge *merge_map_find(const struct merge_map *m, uint32_t left, uint32_t right);
void merge_map_add(struct merge_map *m, uint32_t left, uint32_t right, uint32_t rank, uint32_t id);
void id_map_reserve(struct id_map *m, size_t n);
void merge_map_reserve(struct merge_map *m, size_t n);

/* Writes bytes in GPT-2's alphabet, in which a byte-level vocabulary has a character for each byte. */
void alphabet_append(struct bytes *out, const char *raw, size_t len);
/*
 * Appends the bytes that text stands for. False, with nothing appended, if text has a character outside the
 * alphabet.
 */
bool alphabet_decode(struct bytes *out, const char *text, size_t len);

size_t utf8_length(unsigned char lead); /* length of a character of valid UTF-8, by its first byte */
bool utf8_is_white_space(const char *c, size_t len,
                         size_t *char_len_out); /* whether the character at c has Unicode's White_Space */

/* ------------------------------------------- tokenizer_json.c */
struct json_parts {
    struct slice vocab, merges; /* as they are in the file; NULL: missing, or in another form */
    struct bytes rest;          /* the file with these two empty */
};
void json_parts_find(const char *json, size_t len_bytes, struct json_parts *out);

/* Reads one value after another. The functions return false if the next value is of another kind. */
struct json_scan {
    const char *p, *end;
    struct bytes text; /* the last text, if it had escapes */
};
bool json_scan_take(struct json_scan *s, char c);
bool json_scan_text(struct json_scan *s, struct slice *out); /* valid until the next call */
bool json_scan_number(struct json_scan *s, uint64_t *out);   /* a whole number >= 0 */

/* ------------------------------------------- tokenizer_pattern.c */
/* Scratch memory of one thread. */
struct matcher {
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};
void matcher_init(struct matcher *m);
void matcher_fini(struct matcher *m);

/*
 * Compiles an expression of the library's dialect (Oniguruma, Ruby syntax). Rewrites what PCRE2 would read
 * differently, or refuses it.
 */
enum td_status pattern_compile(struct slice expression, struct pattern *out, struct td_error *error_out);
void pattern_free(struct pattern *p);

/*
 * Finds matches one by one, as the library's iterator does. scan.from begins at 0. An empty match directly
 * behind the last match does not count. False: no further match or (scan.failed) the expression exceeded a
 * limit.
 */
struct scan {
    size_t from, last_end, begin, end;
    bool any, failed;
};
bool pattern_next(const struct pattern *p, struct matcher *m, struct slice text, struct scan *scan);

/* ------------------------------------------- tokenizer_normalize.c */
/* Applies the normalizers to text (valid UTF-8), and appends to out. */
enum td_status tokenizer_normalize(const struct tokenizer *t, struct matcher *m, struct slice text, struct bytes *out,
                                   struct td_error *e);
/* Most bytes that steps may make of a text of len bytes: repeated replacements could make any number. */
size_t normalize_most_bytes(size_t len);
/* Appends text with every match replaced. Stops when out is longer than limit bytes. */
enum td_status pattern_replace(const struct pattern *p, struct matcher *m, struct slice text, struct slice content,
                               size_t limit, struct bytes *out, struct td_error *e);
/* Loads the Darts trie and the texts of a charsmap in base64. */
enum td_status normalize_load_precompiled(struct tokenizer *t, const char *base64, size_t len, struct normalizer *out,
                                          struct td_error *e);

/* ------------------------------------------- tokenizer_parts.c */
struct loader {
    struct tokenizer *t;
    struct td_error *e;
    enum td_status status; /* the first failure */
    struct json_parts parts;
};
bool load_fail(struct loader *l, enum td_status s, const char *where, const char *what);
const char *load_type(json_t *v);
/* Loads all components except the model and the added tokens. */
void load_parts(struct loader *l, json_t *root);

/* ------------------------------------------- tokenizer_bpe.c, tokenizer_unigram.c */
struct bpe_work; /* scratch memory */
struct bpe_work *bpe_work_open(const struct tokenizer *t);
void bpe_work_close(struct bpe_work *w);
void bpe_work_trim(struct bpe_work *w); /* frees memory after a long text */
/* Appends the ids of one pre-tokenized piece. */
void tokenizer_bpe(const struct tokenizer *t, struct bpe_work *w, struct slice text, struct token_ids *out);
enum td_status tokenizer_unigram(const struct tokenizer *t, struct slice text, struct token_ids *out,
                                 struct td_error *e);

/* ------------------------------------------- tokenizer_encode.c */
enum td_status utf8_check(const char *text, size_t len, const char *what, struct td_error *e);
struct encoder_pool *encoder_pool_open(void);
void encoder_pool_close(struct encoder_pool *p); /* NULL is fine */
