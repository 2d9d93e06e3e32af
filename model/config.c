#include "model/config.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { CONFIG_MAX_BYTES = 4 << 20 };

/* What one config.json is read with: the first error stays. */
struct reader {
    json_t *root;
    struct td_error *error;
    enum td_status status;
};

static void refuse(struct reader *r, enum td_status status, const char *field, const char *what)
{
    if (!r->status)
        r->status = td_fail(r->error, status, "config.json: %s: %s", field, what);
}

static double number(struct reader *r, json_t *object, const char *field, double fallback, double min, double max)
{
    json_t *v = json_object_get(object, field);
    if (!v || json_is_null(v)) {
        if (isnan(fallback))
            refuse(r, TD_ERR_CORRUPT, field, "missing");
        return fallback;
    }
    double d = json_is_number(v) ? json_number_value(v) : NAN;
    if (!(d >= min && d <= max)) {
        refuse(r, TD_ERR_CORRUPT, field, "not a number in its range");
        return min;
    }
    return d;
}

static uint32_t count(struct reader *r, const char *field, double fallback, double max)
{
    double d = number(r, r->root, field, fallback, 1, max);
    if (d != floor(d))
        refuse(r, TD_ERR_CORRUPT, field, "not a whole number");
    return (uint32_t)d;
}

static bool flag(struct reader *r, const char *field)
{
    json_t *v = json_object_get(r->root, field);
    if (v && !json_is_boolean(v) && !json_is_null(v))
        refuse(r, TD_ERR_CORRUPT, field, "neither true nor false");
    return json_is_true(v);
}

static const char *text(json_t *object, const char *field, const char *fallback)
{
    json_t *v = json_object_get(object, field);
    return json_is_string(v) ? json_string_value(v) : fallback;
}

/* v5 keeps theta and scaling in rope_parameters; v4 theta at the top and scaling, if any, in rope_scaling. */
static void read_rope(struct reader *r, struct model_config *c)
{
    json_t *p = json_object_get(r->root, "rope_parameters"), *scaling = p;
    if (!json_is_object(p)) {
        p = r->root;
        scaling = json_object_get(r->root, "rope_scaling");
    }
    c->rope_theta = number(r, p, "rope_theta", 10000, 1, 1e12);
    if (!json_is_object(scaling))
        return;
    const char *type = text(scaling, "rope_type", text(scaling, "type", "default"));
    if (!strcmp(type, "default"))
        return;
    if (strcmp(type, "llama3")) {
        refuse(r, TD_ERR_UNSUPPORTED, "rope_type is neither default nor llama3", type);
        return;
    }
    c->rope_type = ROPE_LLAMA3;
    c->rope_factor = number(r, scaling, "factor", NAN, 1, 1e6);
    c->rope_low_freq_factor = number(r, scaling, "low_freq_factor", NAN, 1e-6, 1e6);
    c->rope_high_freq_factor = number(r, scaling, "high_freq_factor", NAN, 1e-6, 1e6);
    c->rope_original_positions = (uint32_t)number(r, scaling, "original_max_position_embeddings", NAN, 1, 1e8);
    if (!r->status && c->rope_high_freq_factor <= c->rope_low_freq_factor)
        refuse(r, TD_ERR_CORRUPT, "high_freq_factor", "not larger than low_freq_factor");
}

static void read_eos(struct reader *r, json_t *v, struct model_config *c)
{
    c->n_eos_ids = 0;
    size_t n = json_is_array(v) ? json_array_size(v) : v && !json_is_null(v);
    for (size_t i = 0; i < n; i++) {
        json_t *id = json_is_array(v) ? json_array_get(v, i) : v;
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= c->vocab_size ||
            i >= MODEL_MAX_EOS) {
            refuse(r, TD_ERR_CORRUPT, "eos_token_id", "not ids inside the vocabulary, or too many");
            return;
        }
        c->eos_ids[c->n_eos_ids++] = (uint32_t)json_integer_value(id);
    }
}

static void read_generation(struct reader *r, const char *data, size_t len, struct model_config *c)
{
    json_error_t e;
    json_t *g = json_loadb(data, len, 0, &e);
    if (!json_is_object(g)) {
        if (!r->status)
            r->status = td_fail(r->error, TD_ERR_CORRUPT, "generation_config.json: line %d: %s", e.line, e.text);
        json_decref(g);
        return;
    }
    if (json_object_get(g, "eos_token_id"))
        read_eos(r, json_object_get(g, "eos_token_id"), c);
    if (json_is_true(json_object_get(g, "do_sample"))) {
        c->default_temperature = (float)number(r, g, "temperature", 1, 0, 100);
        c->default_top_p = (float)number(r, g, "top_p", 1, 1e-6, 1);
        c->default_top_k = (uint32_t)number(r, g, "top_k", 0, 0, 1e9);
    }
    json_decref(g);
}

static void read_all(struct reader *r, struct model_config *c)
{
    const char *type = text(r->root, "model_type", "");
    if (strcmp(type, "llama")) {
        refuse(r, TD_ERR_UNSUPPORTED, "model_type is not llama", type);
        return;
    }
    snprintf(c->model_type, sizeof(c->model_type), "%s", type);
    c->vocab_size = count(r, "vocab_size", NAN, 1 << 24);
    c->hidden = count(r, "hidden_size", NAN, 1 << 20);
    c->n_layers = count(r, "num_hidden_layers", NAN, 1024);
    c->n_heads = count(r, "num_attention_heads", NAN, 1024);
    c->n_kv_heads = count(r, "num_key_value_heads", c->n_heads, 1024);
    c->head_dim = count(r, "head_dim", c->n_heads ? c->hidden / c->n_heads : 0, 1024);
    c->intermediate = count(r, "intermediate_size", NAN, 1 << 22);
    c->max_positions = count(r, "max_position_embeddings", NAN, 1 << 24);
    c->rms_eps = (float)number(r, r->root, "rms_norm_eps", NAN, 0, 1);
    c->tied_embeddings = flag(r, "tie_word_embeddings");
    if (flag(r, "attention_bias") || flag(r, "mlp_bias"))
        refuse(r, TD_ERR_UNSUPPORTED, "attention_bias or mlp_bias", "true is not supported");
    if (strcmp(text(r->root, "hidden_act", "silu"), "silu"))
        refuse(r, TD_ERR_UNSUPPORTED, "hidden_act is not silu", text(r->root, "hidden_act", ""));
    if (!r->status && (c->n_kv_heads > c->n_heads || c->n_heads % c->n_kv_heads))
        refuse(r, TD_ERR_CORRUPT, "num_key_value_heads", "does not divide num_attention_heads");
    if (!r->status && c->head_dim % 2)
        refuse(r, TD_ERR_CORRUPT, "head_dim", "odd");
    read_rope(r, c);
    read_eos(r, json_object_get(r->root, "eos_token_id"), c);
}

enum td_status model_config_parse(const char *data, size_t len_bytes, const char *generation_data,
                                  size_t generation_len_bytes, struct model_config *out, struct td_error *error_out)
{
    json_error_t e;
    struct reader r = {.root = json_loadb(data, len_bytes, 0, &e), .error = error_out};
    struct model_config c = {.default_temperature = 1, .default_top_p = 1};
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

uint64_t model_config_n_params(const struct model_config *c)
{
    uint64_t q = (uint64_t)c->n_heads * c->head_dim, kv = (uint64_t)c->n_kv_heads * c->head_dim;
    uint64_t layer = c->hidden * (2 * q + 2 * kv) + 3ull * c->hidden * c->intermediate + 2ull * c->hidden;
    return layer * c->n_layers + (uint64_t)c->vocab_size * c->hidden * (c->tied_embeddings ? 1 : 2) + c->hidden;
}

/* ------------------------------------------------------------------ rotary */

static const double LN2_HI = 0x1.62e42fee00000p-1, LN2_LO = 0x1.a39ef35793c76p-33;

/* frexp, ldexp and rint are exact, so these give the same bits with any C library. */
static double own_log(double x)
{
    int e;
    double m = frexp(x, &e);
    if (m < 0.70710678118654752) {
        m *= 2;
        e--;
    }
    double s = (m - 1) / (m + 1), s2 = s * s, sum = 0;
    for (int k = 25; k >= 1; k -= 2)
        sum = sum * s2 + 1.0 / k;
    return 2 * s * sum + e * LN2_LO + e * LN2_HI;
}

static double own_exp(double y)
{
    double n = rint(y * 1.4426950408889634), r = (y - n * LN2_HI) - n * LN2_LO, sum = 1;
    for (int k = 20; k >= 1; k--)
        sum = 1 + sum * r / k;
    return ldexp(sum, (int)n);
}

static double llama3_scaled(const struct model_config *c, double freq)
{
    const double two_pi = 6.283185307179586;
    double wavelength = two_pi / freq, original = c->rope_original_positions;
    if (wavelength < original / c->rope_high_freq_factor)
        return freq;
    if (wavelength > original / c->rope_low_freq_factor)
        return freq / c->rope_factor;
    double smooth =
        (original / wavelength - c->rope_low_freq_factor) / (c->rope_high_freq_factor - c->rope_low_freq_factor);
    return (1 - smooth) * freq / c->rope_factor + smooth * freq;
}

void model_config_rope(const struct model_config *c, double *inv_freq_out)
{
    double log_theta = own_log(c->rope_theta);
    for (uint32_t i = 0; i < c->head_dim / 2; i++) {
        double freq = own_exp(-log_theta * (2.0 * i) / c->head_dim);
        inv_freq_out[i] = c->rope_type == ROPE_LLAMA3 ? llama3_scaled(c, freq) : freq;
    }
}
