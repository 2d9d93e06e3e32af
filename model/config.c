#include "model/config.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { CONFIG_MAX_BYTES = 4 << 20, MAX_POSITIONS = 1 << 24 };

/* Reads one config.json. The first error is kept; later calls do nothing. */
struct config_reader {
    const char *file;
    json_t *root;
    struct td_error *error;
    enum td_status status;
};

static void refuse_field(struct config_reader *r, enum td_status status, const char *field, const char *what)
{
    if (!r->status)
        r->status = td_fail(r->error, status, "%s: %s: %s", r->file, field, what);
}

static void unsupported(struct config_reader *r, const char *field, const char *value)
{
    if (!r->status)
        r->status = td_fail(r->error, TD_ERR_UNSUPPORTED, "%s: %s: '%s' is not supported", r->file, field, value);
}

/* fallback NAN: the field must exist. */
static double read_number(struct config_reader *r, json_t *object, const char *field, double fallback, double min,
                          double max)
{
    json_t *v = json_object_get(object, field);
    if (!v || json_is_null(v)) {
        if (isnan(fallback))
            refuse_field(r, TD_ERR_CORRUPT, field, "missing");
        return fallback;
    }
    double d = json_is_number(v) ? json_number_value(v) : NAN;
    if (!(d >= min && d <= max)) {
        refuse_field(r, TD_ERR_CORRUPT, field, "not a number in its range");
        return min;
    }
    return d;
}

static uint32_t whole(struct config_reader *r, json_t *object, const char *field, double fallback, double min,
                      double max)
{
    double d = read_number(r, object, field, fallback, min, max);
    if (isnan(d))
        return (uint32_t)min;
    if (d != floor(d))
        refuse_field(r, TD_ERR_CORRUPT, field, "not a whole number");
    return (uint32_t)d;
}

static uint32_t read_count(struct config_reader *r, const char *field, double fallback, double max)
{
    return whole(r, r->root, field, fallback, 1, max);
}

static bool is_set(json_t *object, const char *field)
{
    json_t *v = json_object_get(object, field);
    return v && !json_is_null(v);
}

static bool flag_in(struct config_reader *r, json_t *object, const char *field, bool fallback)
{
    json_t *v = json_object_get(object, field);
    if (!v || json_is_null(v))
        return fallback;
    if (!json_is_boolean(v))
        refuse_field(r, TD_ERR_CORRUPT, field, "neither true nor false");
    return json_is_true(v);
}

static bool flag(struct config_reader *r, const char *field, bool fallback)
{
    return flag_in(r, r->root, field, fallback);
}

static const char *text(json_t *object, const char *field, const char *fallback)
{
    json_t *v = json_object_get(object, field);
    return json_is_string(v) ? json_string_value(v) : fallback;
}

static void must_not_be(struct config_reader *r, const char *field)
{
    if (flag(r, field, false))
        unsupported(r, field, "true");
}

/* -------------------------------------------------------------------- rope */

static void read_factors(struct config_reader *r, json_t *object, const char *field, uint32_t n, double *out)
{
    json_t *list = json_object_get(object, field);
    if (!json_is_array(list) || json_array_size(list) != n) {
        refuse_field(r, TD_ERR_CORRUPT, field, "not a list of half as many numbers as dimensions are rotated");
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        json_t *v = json_array_get(list, i);
        out[i] = json_is_number(v) ? json_number_value(v) : 0;
        if (!(out[i] > 1e-6 && out[i] < 1e6))
            refuse_field(r, TD_ERR_CORRUPT, field, "not numbers in their range");
    }
}

static enum rope_type rope_type_of(struct config_reader *r, const char *name)
{
    static const struct {
        const char *name;
        enum rope_type type;
    } TYPES[] = {{"default", ROPE_DEFAULT}, {"linear", ROPE_LINEAR}, {"dynamic", ROPE_DYNAMIC},
                 {"llama3", ROPE_LLAMA3},   {"yarn", ROPE_YARN},     {"longrope", ROPE_LONGROPE},
                 {"su", ROPE_LONGROPE}}; /* the name in the first Phi-3 */
    for (size_t i = 0; i < sizeof(TYPES) / sizeof(TYPES[0]); i++)
        if (!strcmp(TYPES[i].name, name))
            return TYPES[i].type;
    unsupported(r, "rope_type", name);
    return ROPE_DEFAULT;
}

static void read_scaling(struct config_reader *r, json_t *s, const struct model_config *c, struct model_rope *rope)
{
    double ratio = NAN; /* a value for `factor` if it may be missing */
    if (rope->type >= ROPE_LLAMA3) {
        double original = read_number(r, s, "original_max_position_embeddings", c->max_positions, 2, 1e8);
        rope->original_positions =
            (uint32_t)read_number(r, r->root, "original_max_position_embeddings", original, 2, 1e8);
        if (rope->type != ROPE_LLAMA3)
            ratio = c->max_positions / (double)rope->original_positions;
    }
    rope->factor = read_number(r, s, "factor", ratio, 1e-6, 1e6);
    if (rope->type == ROPE_LLAMA3) {
        rope->low_freq_factor = read_number(r, s, "low_freq_factor", NAN, 1e-6, 1e6);
        rope->high_freq_factor = read_number(r, s, "high_freq_factor", NAN, 1e-6, 1e6);
        if (!r->status && rope->high_freq_factor <= rope->low_freq_factor)
            refuse_field(r, TD_ERR_CORRUPT, "high_freq_factor", "not larger than low_freq_factor");
    }
    if (rope->type == ROPE_YARN) {
        rope->beta_fast = read_number(r, s, "beta_fast", 32, 1e-6, 1e6);
        rope->beta_slow = read_number(r, s, "beta_slow", 1, 1e-6, 1e6);
        rope->mscale = read_number(r, s, "mscale", 0, 0, 1e6);
        rope->mscale_all_dim = read_number(r, s, "mscale_all_dim", 0, 0, 1e6);
        rope->truncate = flag_in(r, s, "truncate", true);
    }
    if (rope->type == ROPE_YARN || rope->type == ROPE_LONGROPE)
        rope->attention_factor = read_number(r, s, "attention_factor", 0, 1e-6, 1e6);
    if (rope->type == ROPE_LONGROPE && !r->status) {
        read_factors(r, s, "short_factor", c->rotary_dim / 2, rope->short_factor);
        read_factors(r, s, "long_factor", c->rotary_dim / 2, rope->long_factor);
    }
}

/* Reads theta from p, and type and scaling from s, if there is any. */
static void read_one_rope(struct config_reader *r, json_t *p, json_t *s, double theta, const struct model_config *c,
                          struct model_rope *rope)
{
    rope->theta = read_number(r, p, "rope_theta", theta, 2, 1e12);
    if (!json_is_object(s))
        return;
    rope->type = rope_type_of(r, text(s, "rope_type", text(s, "type", "default")));
    if (rope->type != ROPE_DEFAULT && !r->status)
        read_scaling(r, s, c, rope);
}

/* yarn is meant for factor times the original positions. max_position_embeddings may give either number. */
static void extend_positions(struct model_config *c)
{
    const struct model_rope *r = &c->rope[0];
    double scaled = r->type == ROPE_YARN ? r->factor * r->original_positions : 0;
    if (scaled > c->max_positions)
        c->max_positions = scaled < MAX_POSITIONS ? (uint32_t)scaled : MAX_POSITIONS;
}

/*
 * v5 keeps theta and scaling in rope_parameters, which may have one object for each kind of layer. v4 has
 * theta at the top level and scaling, if any, in rope_scaling.
 */
static void read_rope(struct config_reader *r, struct model_config *c)
{
    json_t *p = json_object_get(r->root, "rope_parameters"), *full = json_object_get(p, "full_attention"), *factor;
    bool v5 = json_is_object(p);
    p = json_is_object(full) ? full : v5 ? p : r->root;
    json_t *s = v5 ? p : json_object_get(r->root, "rope_scaling");
    double theta = c->family->rope_theta, part = 1;
    uint32_t dim = c->family->latent ? c->latent.rope_dim : c->head_dim;
    factor = is_set(p, "partial_rotary_factor") ? p : r->root;
    part = read_number(r, factor, "partial_rotary_factor", 1, 1e-3, 1);
    c->rotary_dim = (uint32_t)(dim * part);
    if (!r->status && (c->rotary_dim % 2 || c->rotary_dim < 2 || c->rotary_dim > 2 * MODEL_MAX_PAIRS)) {
        refuse_field(r, TD_ERR_CORRUPT, "head_dim", "the dimensions to rotate are odd, or too many");
        return;
    }
    read_one_rope(r, p, s, theta, c, &c->rope[0]);
    c->rope[1] = c->rope[0];
    if (c->family->two_ropes) {
        json_t *local = json_object_get(json_object_get(r->root, "rope_parameters"), "sliding_attention");
        c->rope[1] = (struct model_rope){.type = ROPE_DEFAULT};
        read_one_rope(r, local, local, read_number(r, r->root, "rope_local_base_freq", 10000, 1, 1e12), c, &c->rope[1]);
    }
}

/* ----------------------------------------------------------------- windows */

static bool rule_windows(const struct model_family *f, uint32_t layer, uint32_t from, uint32_t pattern)
{
    switch (f->window_rule) {
    case WINDOW_NONE:
        return false;
    case WINDOW_ALL:
    case WINDOW_USED:
        return true;
    case WINDOW_UPPER:
        return layer >= from;
    case WINDOW_ALTERNATE:
        return layer % 2 == 0;
    case WINDOW_PATTERN:
        return (layer + 1) % pattern != 0;
    }
    return false;
}

static bool type_windows(struct config_reader *r, json_t *type)
{
    const char *name = json_is_string(type) ? json_string_value(type) : "";
    if (!strcmp(name, "sliding_attention"))
        return true;
    if (strcmp(name, "full_attention"))
        unsupported(r, "layer_types", name);
    return false;
}

static void read_windows(struct config_reader *r, struct model_config *c)
{
    const struct model_family *f = c->family;
    json_t *types = f->window_rule == WINDOW_ALL ? NULL : json_object_get(r->root, "layer_types");
    bool needs_use = f->window_rule == WINDOW_USED || f->window_rule == WINDOW_UPPER || f->window_rule == WINDOW_NONE;
    bool used = flag(r, "use_sliding_window", !needs_use) || !needs_use;
    uint32_t from = whole(r, r->root, "max_window_layers", 0, 0, 1e6);
    uint32_t pattern = read_count(r, "sliding_window_pattern", 6, MODEL_MAX_LAYERS);
    bool missing = !json_object_get(r->root, "sliding_window");
    uint32_t window = missing ? (uint32_t)f->window : whole(r, r->root, "sliding_window", 0, 0, 1 << 24);
    if (json_is_array(types) && json_array_size(types) != c->n_layers)
        refuse_field(r, TD_ERR_CORRUPT, "layer_types", "not one for each layer");
    if (f->window_rule == WINDOW_NONE && used && !json_is_array(types))
        unsupported(r, "use_sliding_window without layer_types", "true");
    for (uint32_t l = 0; l < c->n_layers && !r->status; l++) {
        bool typed = json_is_array(types) && type_windows(r, json_array_get(types, l));
        if (typed && !(window && used))
            refuse_field(r, TD_ERR_CORRUPT, "sliding_window", "missing, and layer_types has sliding_attention");
        if (json_is_array(types) ? typed : window && used && rule_windows(f, l, from, pattern)) {
            c->layers[l] |= LAYER_WINDOW;
            c->window = window;
        }
    }
}

/* ----------------------------------------------------------------- experts */

static bool in_list(json_t *list, uint32_t layer)
{
    for (size_t i = 0; i < json_array_size(list); i++)
        if (json_integer_value(json_array_get(list, i)) == layer)
            return true;
    return false;
}

static void read_expert_layers(struct config_reader *r, struct model_config *c)
{
    uint32_t step = read_count(r, "decoder_sparse_step", 1, MODEL_MAX_LAYERS),
             first = whole(r, r->root, "first_k_dense_replace", 0, 0, 1e6);
    json_t *dense = json_object_get(r->root, "mlp_only_layers");
    if (whole(r, r->root, "moe_layer_freq", 1, 1, 1e6) != 1)
        refuse_field(r, TD_ERR_UNSUPPORTED, "moe_layer_freq", "other than 1 is not supported");
    for (uint32_t l = 0; l < c->n_layers; l++)
        if (l >= first && (l + 1) % step == 0 && !in_list(dense, l))
            c->layers[l] |= LAYER_MOE;
}

static void read_groups(struct config_reader *r, struct model_moe *m)
{
    const char *method = text(r->root, "topk_method", "greedy"), *scoring = text(r->root, "scoring_func", "softmax");
    m->n_groups = m->n_groups_used = 1;
    if (strcmp(scoring, "softmax"))
        unsupported(r, "scoring_func", scoring);
    if (!strcmp(method, "group_limited_greedy")) {
        m->n_groups = read_count(r, "n_group", NAN, 256);
        m->n_groups_used = read_count(r, "topk_group", NAN, 256);
        if (!r->status && (m->n_experts % m->n_groups || m->n_groups_used > m->n_groups ||
                           m->n_used > m->n_experts / m->n_groups * m->n_groups_used))
            refuse_field(r, TD_ERR_CORRUPT, "n_group", "does not divide the experts, or has fewer than are used");
    } else if (strcmp(method, "greedy")) {
        unsupported(r, "topk_method", method);
    }
}

static void read_experts(struct config_reader *r, struct model_config *c)
{
    static const char *const NAMES[] = {"num_local_experts", "num_experts", "n_routed_experts"};
    const struct model_family *f = c->family;
    struct model_moe *m = &c->moe;
    if (!f->router)
        return;
    const char *name = NAMES[0];
    for (size_t i = 0; i < sizeof(NAMES) / sizeof(NAMES[0]) && !is_set(r->root, name); i++)
        name = NAMES[i];
    m->n_experts = read_count(r, name, NAN, MODEL_MAX_EXPERTS);
    m->n_used = read_count(r, "num_experts_per_tok", NAN, MODEL_MAX_USED);
    if (!r->status && m->n_used > m->n_experts)
        refuse_field(r, TD_ERR_CORRUPT, "num_experts_per_tok", "more than there are experts");
    m->intermediate = read_count(
        r, is_set(r->root, "moe_intermediate_size") ? "moe_intermediate_size" : "intermediate_size", NAN, 1 << 22);
    m->scale = (float)read_number(r, r->root, "routed_scaling_factor", 1, 1e-6, 1e6);
    m->normalized = f->always_normalized || flag(r, "norm_topk_prob", false);
    /* Versions differ in what it means together with routed_scaling_factor. */
    if (m->normalized && f->latent)
        unsupported(r, "norm_topk_prob", "true");
    if (f->shared_gate)
        m->shared_intermediate = read_count(r, "shared_expert_intermediate_size", NAN, 1 << 22);
    else if (f->shared)
        m->shared_intermediate = m->intermediate * whole(r, r->root, "n_shared_experts", 0, 0, 64);
    read_groups(r, m);
    read_expert_layers(r, c);
}

/* Reads one id or a list of ids; returns how many. */
static uint32_t read_ids(struct config_reader *r, json_t *object, const char *field, uint32_t vocab_size, uint32_t max,
                         uint32_t *out)
{
    json_t *v = json_object_get(object, field);
    size_t n = json_is_array(v) ? json_array_size(v) : v && !json_is_null(v);
    for (size_t i = 0; i < n; i++) {
        json_t *id = json_is_array(v) ? json_array_get(v, i) : v;
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= vocab_size || i >= max) {
            refuse_field(r, TD_ERR_CORRUPT, field, "not ids inside the vocabulary, or too many");
            return 0;
        }
        out[i] = (uint32_t)json_integer_value(id);
    }
    return (uint32_t)n;
}

static void read_eos(struct config_reader *r, json_t *object, struct model_config *c)
{
    c->n_eos_ids = read_ids(r, object, "eos_token_id", c->vocab_size, MODEL_MAX_EOS, c->eos_ids);
}

/* --------------------------------------------------- generation_config.json */

static bool changes_nothing(json_t *v, double min, double max)
{
    if (json_is_number(v))
        return json_number_value(v) >= min && json_number_value(v) <= max;
    return !v || json_is_null(v) || json_is_false(v) || (json_is_array(v) && !json_array_size(v)) ||
           (json_is_object(v) && !json_object_size(v));
}

/* Notes the fields that transformers' generate() honours and tandem does not. */
static void note_ignored(json_t *g, const struct model_config *c, struct model_generation *out)
{
    const struct {
        const char *field;
        double min, max; /* numbers in this range change nothing */
    } FIELDS[] = {{"num_beams", 0, 1},
                  {"num_return_sequences", 0, 1},
                  {"max_length", c->max_positions, INFINITY},
                  {"min_length", 0, 0},
                  {"min_new_tokens", 0, 0},
                  {"max_time", INFINITY, INFINITY},
                  {"stop_strings", 0, 0},
                  {"no_repeat_ngram_size", 0, 0},
                  {"encoder_no_repeat_ngram_size", 0, 0},
                  {"encoder_repetition_penalty", 1, 1},
                  {"penalty_alpha", 0, 0},
                  {"epsilon_cutoff", 0, 0},
                  {"eta_cutoff", 0, 0},
                  {"top_h", 1, 1},
                  {"guidance_scale", 1, 1},
                  {"bad_words_ids", 0, 0},
                  {"force_words_ids", 0, 0},
                  {"constraints", 0, 0},
                  {"sequence_bias", 0, 0},
                  {"forced_bos_token_id", 1, 0},
                  {"forced_eos_token_id", 1, 0},
                  {"begin_suppress_tokens", 1, 0},
                  {"exponential_decay_length_penalty", 0, 0},
                  {"watermarking_config", 0, 0}};
    for (size_t i = 0, n = 0; i < sizeof(FIELDS) / sizeof(FIELDS[0]) && n < sizeof(out->ignored); i++)
        if (!changes_nothing(json_object_get(g, FIELDS[i].field), FIELDS[i].min, FIELDS[i].max))
            n += (size_t)snprintf(out->ignored + n, sizeof(out->ignored) - n, "%s%s", n ? "," : "", FIELDS[i].field);
}

static void read_defaults(struct config_reader *r, json_t *g, const struct model_config *c,
                          struct model_generation *out)
{
    out->repetition_penalty = (float)read_number(r, g, "repetition_penalty", 1, 1e-3, 10);
    out->max_tokens = whole(r, g, "max_new_tokens", 0, 0, UINT32_MAX);
    out->n_suppressed_ids = read_ids(r, g, "suppress_tokens", c->vocab_size, MODEL_MAX_SUPPRESSED, out->suppressed_ids);
    note_ignored(g, c, out);
    if (!json_is_true(json_object_get(g, "do_sample")))
        return;
    out->temperature = (float)read_number(r, g, "temperature", 1, 0, 100);
    out->top_p = (float)read_number(r, g, "top_p", 1, 1e-6, 1);
    out->top_k = (uint32_t)read_number(r, g, "top_k", 0, 0, 1e9);
    out->min_p = (float)read_number(r, g, "min_p", 0, 0, 1);
    out->typical_p = (float)read_number(r, g, "typical_p", 0, 0, 1);
}

static void read_generation(struct config_reader *r, const char *data, size_t len, struct model_config *c)
{
    json_error_t e;
    json_t *g = json_loadb(data, len, 0, &e);
    r->file = "generation_config.json";
    if (!json_is_object(g)) {
        if (!r->status)
            r->status = td_fail(r->error, TD_ERR_CORRUPT, "%s: line %d: %s", r->file, e.line, e.text);
        json_decref(g);
        return;
    }
    if (json_object_get(g, "eos_token_id"))
        read_eos(r, g, c);
    read_defaults(r, g, c, &c->generation);
    json_decref(g);
}

/* -------------------------------------------------------------------- all */

static void read_attention(struct config_reader *r, struct model_config *c)
{
    const struct model_family *f = c->family;
    uint32_t head_dim = f->head_dim ? f->head_dim : c->n_heads ? c->hidden / c->n_heads : 0;
    c->n_kv_heads = read_count(r, "num_key_value_heads", c->n_heads, 1024);
    c->head_dim = read_count(r, "head_dim", head_dim, 1024);
    if (f->latent) {
        c->latent.q_rank = whole(r, r->root, "q_lora_rank", 0, 0, 1 << 16);
        c->latent.kv_rank = read_count(r, "kv_lora_rank", NAN, 960);
        c->latent.nope_dim = read_count(r, "qk_nope_head_dim", NAN, 1024);
        c->latent.rope_dim = read_count(r, "qk_rope_head_dim", NAN, 64);
        c->latent.v_dim = read_count(r, "v_head_dim", NAN, 1024);
        c->head_dim = c->latent.nope_dim + c->latent.rope_dim;
        c->n_kv_heads = c->n_heads;
        must_not_be(r, "attention_bias");
        must_not_be(r, "mlp_bias");
    }
    if (!r->status && (c->n_kv_heads > c->n_heads || c->n_heads % c->n_kv_heads))
        refuse_field(r, TD_ERR_CORRUPT, "num_key_value_heads", "does not divide num_attention_heads");
    c->qkv_bias = f->bias_field ? flag(r, f->bias_field, f->bias) : f->bias;
    c->out_bias = c->qkv_bias && f->bias_out;
    must_not_be(r, "use_bidirectional_attention");
    read_rope(r, c);
    extend_positions(c);
    read_windows(r, c);
}

static float cap_of(struct config_reader *r, const char *field, double fallback)
{
    bool missing = !json_object_get(r->root, field);
    return (float)read_number(r, r->root, field, missing && fallback > 0 ? fallback : 0, 1e-3, 1e6);
}

static void read_scores(struct config_reader *r, struct model_config *c)
{
    const struct model_family *f = c->family;
    double scalar = f->query_scalar ? read_number(r, r->root, "query_pre_attn_scalar", 256, 1e-3, 1e6) : c->head_dim;
    c->score_scale = 1.0f / sqrtf((float)scalar);
    if (f->latent && c->rope[0].type == ROPE_YARN && c->rope[0].mscale_all_dim > 0) {
        double m = model_rope_mscale(&c->rope[0], c->rope[0].mscale_all_dim);
        c->score_scale = (float)(m * m / sqrt(scalar));
    }
    if (f->attn_cap != 0)
        c->attn_cap = cap_of(r, "attn_logit_softcapping", f->attn_cap);
    else if (is_set(r->root, "attn_logit_softcapping"))
        unsupported(r, "attn_logit_softcapping", "a number");
    if (f->logits_cap != 0)
        c->logits_cap = cap_of(r, "final_logit_softcapping", f->logits_cap);
}

static void read_activation(struct config_reader *r, struct model_config *c)
{
    const char *act = text(r->root, c->family->act_field, c->family->act);
    if (!strcmp(act, "silu"))
        c->glu = c->family->clamped_glu ? GLU_CLAMPED : GLU_SILU;
    else if (!strcmp(act, "gelu_pytorch_tanh"))
        c->glu = GLU_GELU_TANH;
    else
        unsupported(r, c->family->act_field, act);
    c->glu_alpha = (float)read_number(r, r->root, "swiglu_alpha", 1.702, 1e-3, 1e3);
    c->glu_limit = (float)read_number(r, r->root, "swiglu_limit", 7, 1e-3, 1e6);
    c->mlp_bias = flag(r, "mlp_bias", false);
}

/* compressed-tensors gives the format of weights for each group of layers. */
static void read_compressed(struct config_reader *r, json_t *groups)
{
    const char *name;
    json_t *group;
    json_object_foreach(groups, name, group)
    {
        json_t *weights = json_object_get(group, "weights");
        const char *type = text(weights, "type", "?");
        if (strcmp(type, "float"))
            unsupported(r, "quantization_config: weights of type", type);
        if (whole(r, weights, "num_bits", 8, 1, 64) != 8)
            refuse_field(r, TD_ERR_UNSUPPORTED, "quantization_config: num_bits", "other than 8 is not supported");
    }
}

/*
 * Reads how matrices are stored. Activations are not rounded here, even if the checkpoint's makers rounded
 * them.
 */
static void read_quantization(struct config_reader *r, struct model_config *c)
{
    json_t *q = json_object_get(r->root, "quantization_config"), *block = json_object_get(q, "weight_block_size");
    const char *method = text(q, "quant_method", "?");
    c->fp8_block[0] = c->fp8_block[1] = 128; /* as in DeepSeek-V3 */
    if (!json_is_object(q))
        return;
    if (!strcmp(method, "compressed-tensors"))
        read_compressed(r, json_object_get(q, "config_groups"));
    else if (!strcmp(method, "mxfp4") && c->family->router && !c->family->expert_gate)
        c->mxfp4 = true;
    else if (strcmp(method, "fp8"))
        unsupported(r, "quantization_config.quant_method", method);
    for (size_t i = 0; i < 2 && json_is_array(block); i++) {
        json_t *n = json_array_get(block, i);
        if (!json_is_integer(n) || json_integer_value(n) < 1 || json_integer_value(n) > 1 << 20)
            refuse_field(r, TD_ERR_CORRUPT, "weight_block_size", "not two whole numbers in their range");
        else
            c->fp8_block[i] = (uint32_t)json_integer_value(n);
    }
}

static void read_all(struct config_reader *r, struct model_config *c)
{
    const char *type = text(r->root, "model_type", "");
    c->family = model_family_find(type);
    if (!c->family) {
        unsupported(r, "model_type", type);
        return;
    }
    read_quantization(r, c);
    c->vocab_size = read_count(r, "vocab_size", NAN, 1 << 24);
    c->hidden = read_count(r, "hidden_size", NAN, 1 << 20);
    c->n_layers = read_count(r, "num_hidden_layers", NAN, MODEL_MAX_LAYERS);
    c->n_heads = read_count(r, "num_attention_heads", NAN, 1024);
    c->intermediate = read_count(r, "intermediate_size", NAN, 1 << 22);
    c->max_positions = read_count(r, "max_position_embeddings", NAN, MAX_POSITIONS);
    c->rms_eps = (float)read_number(r, r->root, "rms_norm_eps", NAN, 0, 1);
    c->tied_embeddings = flag(r, "tie_word_embeddings", c->family->tied);
    if (r->status)
        return;
    read_attention(r, c);
    read_scores(r, c);
    read_activation(r, c);
    read_experts(r, c);
    read_eos(r, r->root, c);
}

enum td_status model_config_parse(const char *data, size_t len_bytes, const char *generation_data,
                                  size_t generation_len_bytes, struct model_config *out, struct td_error *error_out)
{
    json_error_t e;
    struct config_reader r = {.file = "config.json", .root = json_loadb(data, len_bytes, 0, &e), .error = error_out};
    struct model_config c = {.generation = MODEL_GENERATION_NONE};
    if (!json_is_object(r.root))
        r.status = td_fail(error_out, TD_ERR_CORRUPT, "config.json: line %d: %s", r.root ? 1 : e.line,
                           r.root ? "not an object" : e.text);
    else
        read_all(&r, &c);
    if (!r.status && generation_data)
        read_generation(&r, generation_data, generation_len_bytes, &c);
    json_decref(r.root);
    if (!r.status)
        *out = c;
    return r.status;
}

enum td_status model_config_load(const char *dir, struct model_config *out, struct td_error *error_out)
{
    char path[4096];
    char *config = NULL, *generation = NULL;
    size_t n = 0, n_generation = 0;
    snprintf(path, sizeof(path), "%s/config.json", dir);
    enum td_status s = file_read(path, CONFIG_MAX_BYTES, &config, &n, error_out);
    if (s)
        return s;
    snprintf(path, sizeof(path), "%s/generation_config.json", dir);
    s = file_read(path, CONFIG_MAX_BYTES, &generation, &n_generation, error_out);
    if (s == TD_OK || s == TD_ERR_NOT_FOUND)
        s = model_config_parse(config, n, generation, n_generation, out, error_out);
    free(config);
    free(generation);
    return s;
}

/* ------------------------------------------------------------------ derived */

static uint64_t mlp_params(const struct model_config *c, uint32_t layer, uint64_t n_experts)
{
    uint64_t h = c->hidden;
    if (!(c->layers[layer] & LAYER_MOE))
        return 3 * h * c->intermediate;
    return 3 * h * c->moe.intermediate * n_experts + 3 * h * c->moe.shared_intermediate + h * c->moe.n_experts;
}

static uint64_t attention_params(const struct model_config *c)
{
    uint64_t h = c->hidden, q = (uint64_t)c->n_heads * c->head_dim, kv = (uint64_t)c->n_kv_heads * c->head_dim;
    const struct model_latent *m = &c->latent;
    if (!c->family->latent)
        return h * (2 * q + 2 * kv);
    return (m->q_rank ? m->q_rank * (h + q) : h * q) + h * (m->kv_rank + m->rope_dim) +
           (uint64_t)c->n_heads * (m->kv_rank * (uint64_t)(m->nope_dim + m->v_dim) + h * m->v_dim);
}

static uint64_t n_params(const struct model_config *c, uint64_t n_experts)
{
    uint64_t n = (uint64_t)c->vocab_size * c->hidden * (c->tied_embeddings ? 1 : 2) + c->hidden;
    for (uint32_t l = 0; l < c->n_layers; l++)
        n += attention_params(c) + mlp_params(c, l, n_experts) + 2ull * c->hidden;
    return n;
}

uint64_t model_config_n_params(const struct model_config *c)
{
    return n_params(c, c->moe.n_experts);
}

uint64_t model_config_n_active_params(const struct model_config *c)
{
    return n_params(c, c->moe.n_used);
}

struct kv_layout model_config_layout(const struct model_config *c, enum num_type dtype, uint32_t page_tokens)
{
    struct kv_layout l = {.dtype = dtype,
                          .n_layers = c->n_layers,
                          .n_kv_heads = c->n_kv_heads,
                          .head_dim = c->head_dim,
                          .page_tokens = page_tokens,
                          .window = c->window};
    for (uint32_t i = 0; i < c->n_layers; i++)
        if (!(c->layers[i] & LAYER_WINDOW))
            l.window = 0;
    if (c->family->latent) {
        l.kind = KV_LATENT;
        l.n_kv_heads = 1;
        l.head_dim = c->latent.kv_rank + c->latent.rope_dim;
    }
    return l;
}

bool model_config_is_long(const struct model_config *c, uint32_t n_tokens)
{
    return c->rope[0].type == ROPE_LONGROPE && n_tokens > c->rope[0].original_positions;
}
