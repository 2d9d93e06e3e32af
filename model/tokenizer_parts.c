/*
 * Components of tokenizer.json, except the model: each is understood as in the library, or refused by its
 * name.
 */
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_internal.h"

bool load_fail(struct loader *l, enum td_status s, const char *where, const char *what)
{
    if (!l->status)
        l->status = td_fail(l->e, s, "tokenizer.json: %s: %.120s", where, what);
    return false;
}

const char *load_type(json_t *v)
{
    const char *s = json_string_value(json_object_get(v, "type"));
    return s ? s : "";
}

static struct slice text_of(struct loader *l, json_t *v, const char *key, const char *where)
{
    json_t *s = json_object_get(v, key);
    if (!json_is_string(s)) {
        load_fail(l, TD_ERR_CORRUPT, where, "a text is missing");
        return (struct slice){"", 0};
    }
    return tokenizer_keep(l->t, json_string_value(s), json_string_length(s));
}

static struct slice char_of(struct loader *l, json_t *v, const char *key, const char *where)
{
    struct slice s = text_of(l, v, key, where);
    if (!l->status && (!s.len || utf8_length((unsigned char)s.data[0]) != s.len))
        load_fail(l, TD_ERR_CORRUPT, where, "expected one character");
    return s;
}

static bool flag(json_t *v, const char *key, bool otherwise)
{
    json_t *f = json_object_get(v, key);
    return json_is_boolean(f) ? json_is_true(f) : otherwise;
}

/* Calls each for v itself or, if v is a Sequence, for each of its elements. */
static void each_step(struct loader *l, json_t *v, const char *list, void (*each)(struct loader *, json_t *))
{
    if (!v || json_is_null(v) || l->status)
        return;
    if (strcmp(load_type(v), "Sequence")) {
        each(l, v);
        return;
    }
    size_t i;
    json_t *step;
    if (!json_is_array(json_object_get(v, list)))
        load_fail(l, TD_ERR_CORRUPT, list, "the Sequence has none");
    json_array_foreach(json_object_get(v, list), i, step) each_step(l, step, list, each);
}

static struct pattern compile(struct loader *l, struct slice expression, const char *where)
{
    struct pattern p = {0};
    struct td_error e = {{0}};
    enum td_status s = pattern_compile(expression, &p, &e);
    if (s)
        load_fail(l, s, where, e.text);
    return p;
}

/* Compiles {"String": text} or {"Regex": expression}. */
static struct pattern pattern_of(struct loader *l, json_t *v, const char *where)
{
    json_t *p = json_object_get(v, "pattern");
    if (json_object_get(p, "Regex"))
        return compile(l, text_of(l, p, "Regex", where), where);
    struct pattern literal = {.literal = text_of(l, p, "String", where)};
    if (!l->status && !literal.literal.len)
        load_fail(l, TD_ERR_CORRUPT, where, "an empty pattern");
    return literal;
}

/* ------------------------------------------------------------- normalizers */

static bool unicode_form(const char *type, struct normalizer *n)
{
    bool compat = !strncmp(type, "NFK", 3);
    const char *last = type + (compat ? 3 : 2);
    if (strncmp(type, "NF", 2) || (strcmp(last, "C") && strcmp(last, "D")))
        return false;
    *n = (struct normalizer){.kind = NORMALIZE_FORM, .compose = *last == 'C', .compat = compat};
    return true;
}

static void add_normalizer(struct loader *l, json_t *v)
{
    static const char WHERE[] = "normalizer";
    struct tokenizer *t = l->t;
    const char *type = load_type(v);
    if (t->n_normalizers == MAX_STEPS) {
        load_fail(l, TD_ERR_UNSUPPORTED, WHERE, "too many steps");
        return;
    }
    struct normalizer *n = &t->normalizers[t->n_normalizers];
    if (unicode_form(type, n)) {
    } else if (!strcmp(type, "Lowercase")) {
        n->kind = NORMALIZE_LOWERCASE;
    } else if (!strcmp(type, "StripAccents")) {
        n->kind = NORMALIZE_ACCENTS;
    } else if (!strcmp(type, "Strip")) {
        *n = (struct normalizer){
            .kind = NORMALIZE_STRIP, .left = flag(v, "strip_left", true), .right = flag(v, "strip_right", true)};
    } else if (!strcmp(type, "Prepend")) {
        *n = (struct normalizer){.kind = NORMALIZE_PREPEND, .content = text_of(l, v, "prepend", WHERE)};
    } else if (!strcmp(type, "Replace")) {
        n->kind = NORMALIZE_REPLACE;
        n->content = text_of(l, v, "content", WHERE);
        n->pattern = pattern_of(l, v, WHERE);
    } else if (!strcmp(type, "ByteLevel")) {
        n->kind = NORMALIZE_ALPHABET;
    } else if (!strcmp(type, "Precompiled")) {
        struct td_error e = {{0}};
        json_t *map = json_object_get(v, "precompiled_charsmap");
        const char *text = json_string_value(map);
        n->kind = NORMALIZE_PRECOMPILED;
        enum td_status s = normalize_load_precompiled(t, text ? text : "", json_string_length(map), n, &e);
        if (s)
            load_fail(l, s, WHERE, e.text);
    } else {
        load_fail(l, TD_ERR_UNSUPPORTED, "normalizer is not supported", type);
        return;
    }
    t->n_normalizers++;
}

/* ---------------------------------------------------------- pre-tokenizers */

static const char PRE[] = "pre_tokenizer";

static struct tokenizer_step *add_step(struct loader *l, struct tokenizer_step step)
{
    static struct tokenizer_step nowhere;
    if (l->t->n_steps == MAX_STEPS) {
        pattern_free(&step.pattern);
        load_fail(l, TD_ERR_UNSUPPORTED, PRE, "too many steps");
        return &nowhere;
    }
    l->t->steps[l->t->n_steps] = step;
    return &l->t->steps[l->t->n_steps++];
}

static void add_split(struct loader *l, const char *expression, enum split_behavior behavior)
{
    const struct slice s = {expression, strlen(expression)};
    add_step(l, (struct tokenizer_step){.kind = STEP_SPLIT, .pattern = compile(l, s, PRE), .behavior = behavior});
}

static enum split_behavior behavior_of(struct loader *l, json_t *v, const char *otherwise)
{
    static const char *const NAMES[] = {"Removed", "Isolated", "Contiguous", "MergedWithPrevious", "MergedWithNext"};
    const char *name = json_string_value(json_object_get(v, "behavior"));
    name = name ? name : otherwise;
    for (int i = 0; i < 5; i++)
        if (!strcmp(name, NAMES[i]))
            return (enum split_behavior)i;
    load_fail(l, TD_ERR_UNSUPPORTED, "pre_tokenizer: behavior", name);
    return SPLIT_ISOLATED;
}

static void add_byte_level(struct loader *l, json_t *v)
{
    if (flag(v, "add_prefix_space", true))
        add_step(l, (struct tokenizer_step){.kind = STEP_PREFIX_SPACE});
    if (flag(v, "use_regex", true)) /* GPT-2's expression */
        add_split(l, "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
                  SPLIT_ISOLATED);
    for (uint32_t i = 0; i < l->t->n_steps; i++)
        if (l->t->steps[i].kind == STEP_ALPHABET) /* a second one would double the text */
            load_fail(l, TD_ERR_UNSUPPORTED, "pre_tokenizer", "a second ByteLevel");
    add_step(l, (struct tokenizer_step){.kind = STEP_ALPHABET});
}

/* Reads prepend_scheme or, in older files, add_prefix_space. */
static enum prepend_scheme scheme_of(struct loader *l, json_t *v, const char *where)
{
    const char *scheme = json_string_value(json_object_get(v, "prepend_scheme"));
    if (!scheme)
        return flag(v, "add_prefix_space", true) ? PREPEND_ALWAYS : PREPEND_NEVER;
    if (strcmp(scheme, "always") && strcmp(scheme, "first") && strcmp(scheme, "never"))
        load_fail(l, TD_ERR_UNSUPPORTED, where, scheme);
    return !strcmp(scheme, "always") ? PREPEND_ALWAYS : !strcmp(scheme, "first") ? PREPEND_FIRST : PREPEND_NEVER;
}

static void add_metaspace(struct loader *l, json_t *v)
{
    static const char WHERE[] = "pre_tokenizer: Metaspace";
    struct slice replacement = char_of(l, v, "replacement", WHERE);
    add_step(l, (struct tokenizer_step){
                    .kind = STEP_METASPACE, .replacement = replacement, .prepend = scheme_of(l, v, WHERE)});
    if (flag(v, "split", true))
        add_step(l, (struct tokenizer_step){
                        .kind = STEP_SPLIT, .pattern = {.literal = replacement}, .behavior = SPLIT_WITH_NEXT});
}

static void add_pre_tokenizer(struct loader *l, json_t *v)
{
    const char *type = load_type(v);
    if (!strcmp(type, "Split")) {
        struct tokenizer_step *s = add_step(
            l, (struct tokenizer_step){.kind = STEP_SPLIT, .pattern = pattern_of(l, v, "pre_tokenizer: Split")});
        s->behavior = behavior_of(l, v, "");
        s->invert = flag(v, "invert", false);
    } else if (!strcmp(type, "ByteLevel")) {
        add_byte_level(l, v);
    } else if (!strcmp(type, "Metaspace")) {
        add_metaspace(l, v);
    } else if (!strcmp(type, "Whitespace")) {
        add_split(l, "[\\w\\p{Join_Control}]+|[^\\w\\s\\p{Join_Control}]+", SPLIT_REMOVED);
        if (!l->status)
            l->t->steps[l->t->n_steps - 1].invert = true;
    } else if (!strcmp(type, "WhitespaceSplit")) {
        add_split(l, "\\s", SPLIT_REMOVED);
    } else if (!strcmp(type, "Digits")) {
        add_split(l, "\\p{N}", flag(v, "individual_digits", false) ? SPLIT_ISOLATED : SPLIT_CONTIGUOUS);
    } else if (!strcmp(type, "Punctuation")) {
        add_split(l, "[\\p{P}!-/:-@\\[-`{-~]", behavior_of(l, v, "Isolated"));
    } else if (!strcmp(type, "BertPreTokenizer")) {
        add_split(l, "\\s", SPLIT_REMOVED);
        add_split(l, "[\\p{P}!-/:-@\\[-`{-~]", SPLIT_ISOLATED);
    } else if (!strcmp(type, "CharDelimiterSplit")) {
        struct pattern p = {.literal = char_of(l, v, "delimiter", PRE)};
        add_step(l, (struct tokenizer_step){.kind = STEP_SPLIT, .pattern = p, .behavior = SPLIT_REMOVED});
    } else {
        load_fail(l, TD_ERR_UNSUPPORTED, "pre_tokenizer is not supported", type);
    }
}

/* ---------------------------------------------------------- post-processor */

static bool add_template_id(struct loader *l, uint32_t *list, uint32_t *n, json_t *id)
{
    json_int_t v = json_integer_value(id);
    if (!json_is_integer(id) || v < 0 || v >= MAX_ID || *n == MAX_TEMPLATE_IDS)
        return load_fail(l, TD_ERR_CORRUPT, "post_processor", "bad or too many ids");
    list[(*n)++] = (uint32_t)v;
    return true;
}

/* A later processor puts its ids around those of an earlier one. */
static void put_before(struct loader *l, const uint32_t *ids, uint32_t n)
{
    struct tokenizer *t = l->t;
    if (t->n_before + n > MAX_TEMPLATE_IDS) {
        load_fail(l, TD_ERR_UNSUPPORTED, "post_processor", "too many ids");
        return;
    }
    memmove(t->before + n, t->before, t->n_before * sizeof(*ids));
    memcpy(t->before, ids, n * sizeof(*ids));
    t->n_before += n;
}

static void add_template(struct loader *l, json_t *v)
{
    struct tokenizer *t = l->t;
    uint32_t before[MAX_TEMPLATE_IDS], n_before = 0;
    size_t i;
    json_t *item;
    int n_texts = 0;
    json_array_foreach(json_object_get(v, "single"), i, item)
    {
        json_t *special = json_object_get(item, "SpecialToken"), *text = json_object_get(item, "Sequence");
        const char *name = json_string_value(json_object_get(special, "id")),
                   *which = json_string_value(json_object_get(text, "id"));
        json_t *ids = json_object_get(json_object_get(json_object_get(v, "special_tokens"), name ? name : ""), "ids");
        n_texts += text && which && !strcmp(which, "A");
        if (special && !json_is_array(ids))
            load_fail(l, TD_ERR_CORRUPT, "post_processor: no ids of", name ? name : "a special token");
        for (size_t j = 0; special && j < json_array_size(ids); j++)
            if (!add_template_id(l, n_texts ? t->after : before, n_texts ? &t->n_after : &n_before,
                                 json_array_get(ids, j)))
                return;
    }
    if (n_texts != 1)
        load_fail(l, TD_ERR_UNSUPPORTED, "post_processor", "a template where the text does not stand once");
    put_before(l, before, n_before);
}

static void add_pair_processor(struct loader *l, json_t *v)
{
    struct tokenizer *t = l->t;
    uint32_t cls[MAX_TEMPLATE_IDS], n = 0;
    if (add_template_id(l, cls, &n, json_array_get(json_object_get(v, "cls"), 1)))
        put_before(l, cls, n);
    add_template_id(l, t->after, &t->n_after, json_array_get(json_object_get(v, "sep"), 1));
}

static void add_post_processor(struct loader *l, json_t *v)
{
    const char *type = load_type(v);
    if (!strcmp(type, "TemplateProcessing"))
        add_template(l, v);
    else if (!strcmp(type, "BertProcessing") || !strcmp(type, "RobertaProcessing"))
        add_pair_processor(l, v);
    else if (strcmp(type, "ByteLevel")) /* ByteLevel only trims offsets */
        load_fail(l, TD_ERR_UNSUPPORTED, "post_processor is not supported", type);
}

/* ----------------------------------------------------------------- decoder */

static uint32_t count_of(struct loader *l, json_t *v, const char *key)
{
    json_int_t n = json_integer_value(json_object_get(v, key));
    if (n < 0 || n > 1000)
        load_fail(l, TD_ERR_CORRUPT, "decoder: Strip", key);
    return (uint32_t)n;
}

static void add_decode_step(struct loader *l, struct decode_step step)
{
    struct tokenizer *t = l->t;
    if (step.kind == DECODE_STRIP && t->decode_fused && !t->decode_last.content.len) {
        t->decode_last = step;
    } else if (t->decode_fused || t->n_decode_steps == MAX_STEPS) {
        pattern_free(&step.pattern);
        load_fail(l, TD_ERR_UNSUPPORTED, "decoder", "too many steps, or another than one Strip after Fuse");
    } else {
        t->n_decode_early += !t->decode_bytes;
        t->decode_steps[t->n_decode_steps++] = step;
    }
}

static void add_decoder(struct loader *l, json_t *v)
{
    struct tokenizer *t = l->t;
    const char *type = load_type(v);
    bool late = t->decode_fused || t->decode_bytes;
    t->has_decoder = true;
    if (!strcmp(type, "ByteLevel")) {
        if (late || t->n_decode_steps)
            load_fail(l, TD_ERR_UNSUPPORTED, "decoder", "ByteLevel after other steps");
        t->decode_byte_level = t->decode_fused = true;
    } else if (!strcmp(type, "Replace")) {
        struct decode_step s = {.kind = DECODE_REPLACE, .content = text_of(l, v, "content", "decoder")};
        s.pattern = pattern_of(l, v, "decoder: Replace");
        add_decode_step(l, s);
    } else if (!strcmp(type, "Metaspace")) {
        struct decode_step s = {.kind = DECODE_METASPACE, .not_first = scheme_of(l, v, "decoder") != PREPEND_NEVER};
        s.pattern.literal = char_of(l, v, "replacement", "decoder: Metaspace");
        if (late)
            load_fail(l, TD_ERR_UNSUPPORTED, "decoder", "Metaspace after ByteFallback or Fuse");
        add_decode_step(l, s);
    } else if (!strcmp(type, "Strip")) {
        struct decode_step s = {.kind = DECODE_STRIP, .content = char_of(l, v, "content", "decoder: Strip")};
        s.start = count_of(l, v, "start");
        s.stop = count_of(l, v, "stop");
        add_decode_step(l, s);
    } else if (!strcmp(type, "ByteFallback")) {
        if (late)
            load_fail(l, TD_ERR_UNSUPPORTED, "decoder", "ByteFallback twice, or after Fuse");
        t->decode_bytes = true;
    } else if (!strcmp(type, "Fuse")) {
        t->decode_fused = true;
    } else {
        load_fail(l, TD_ERR_UNSUPPORTED, "decoder is not supported", type);
    }
}

void load_parts(struct loader *l, json_t *root)
{
    struct tokenizer *t = l->t;
    each_step(l, json_object_get(root, "normalizer"), "normalizers", add_normalizer);
    each_step(l, json_object_get(root, "pre_tokenizer"), "pretokenizers", add_pre_tokenizer);
    each_step(l, json_object_get(root, "post_processor"), "processors", add_post_processor);
    each_step(l, json_object_get(root, "decoder"), "decoders", add_decoder);
    t->raw = t->n_steps && t->steps[t->n_steps - 1].kind == STEP_ALPHABET;
    for (uint32_t i = 0; i + 1 < t->n_steps; i++)
        t->raw &= t->steps[i].kind != STEP_ALPHABET;
    t->n_steps -= t->raw;
}
