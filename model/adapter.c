#include "model/adapter.h"

#include <jansson.h>
#include <math.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/process.h"

enum { MAX_NAME = 160, CONFIG_MAX_BYTES = 1 << 20 };

static const char PREFIX[] = "base_model.model.model.layers.";

struct adapter {
    struct safetensors *file;
    float alpha;
    bool by_root; /* use_rslora: alpha / sqrt(rank) */
    struct block_key fingerprint;
};

/* A matrix that can be adapted. */
struct module {
    const char *name;
    uint64_t n_out, n_in;
};
enum { MAX_MODULES = 7 };

/* ------------------------------------------------------------------- modules */

static uint32_t modules_of(const struct model_config *c, uint32_t layer, struct module out[MAX_MODULES])
{
    const struct model_family *f = c->family;
    uint64_t q = (uint64_t)c->n_heads * c->head_dim, kv = (uint64_t)c->n_kv_heads * c->head_dim;
    uint32_t n = 0;
    if (!f->latent && f->fused_qkv)
        out[n++] = (struct module){"self_attn.qkv_proj", q + 2 * kv, c->hidden};
    if (!f->latent && !f->fused_qkv) {
        out[n++] = (struct module){"self_attn.q_proj", q, c->hidden};
        out[n++] = (struct module){"self_attn.k_proj", kv, c->hidden};
        out[n++] = (struct module){"self_attn.v_proj", kv, c->hidden};
    }
    if (!f->latent)
        out[n++] = (struct module){"self_attn.o_proj", c->hidden, q};
    if (c->layers[layer] & LAYER_MOE)
        return n;
    if (f->fused_gate_up)
        out[n++] = (struct module){"mlp.gate_up_proj", 2ul * c->intermediate, c->hidden};
    if (!f->fused_gate_up) {
        out[n++] = (struct module){"mlp.gate_proj", c->intermediate, c->hidden};
        out[n++] = (struct module){"mlp.up_proj", c->intermediate, c->hidden};
    }
    out[n++] = (struct module){"mlp.down_proj", c->hidden, c->intermediate};
    return n;
}

static const struct tensor *half_of(const struct adapter *a, uint32_t layer, const char *module, char half)
{
    char name[MAX_NAME];
    snprintf(name, sizeof(name), "%s%u.%s.lora_%c.weight", PREFIX, layer, module, half);
    return safetensors_find(a->file, name);
}

static bool is_matrix(const struct tensor *t)
{
    return t && t->n_dims == 2 && t->type >= NUM_F32 && t->type <= NUM_BF16;
}

bool adapter_find(const struct adapter *a, uint32_t layer, const char *module, struct adapter_matrix *out)
{
    const struct tensor *down = half_of(a, layer, module, 'A'), *up = half_of(a, layer, module, 'B');
    if (!down || !up)
        return false;
    uint32_t rank = (uint32_t)down->shape[0];
    *out = (struct adapter_matrix){down, up, rank, a->alpha / (a->by_root ? sqrtf((float)rank) : (float)rank)};
    return true;
}

/* ------------------------------------------------------------------- checking */

/* Checks the module's tensors. *n_found: how many of the file's tensors it has, 0 or 2. */
static enum td_status check_module(const struct adapter *a, uint32_t layer, const struct module *m, uint32_t *n_found,
                                   struct td_error *e)
{
    const struct tensor *down = half_of(a, layer, m->name, 'A'), *up = half_of(a, layer, m->name, 'B');
    if (!down && !up)
        return TD_OK;
    if (!is_matrix(down) || !is_matrix(up))
        return td_fail(e, TD_ERR_CORRUPT, "layer %u: %s: lora_A and lora_B must both be matrices of F32, F16 or BF16",
                       layer, m->name);
    uint64_t rank = down->shape[0];
    if (!rank || rank > ADAPTER_MAX_RANK)
        return td_fail(e, TD_ERR_UNSUPPORTED, "tensor %s: rank %llu is not in 1..%d", down->name,
                       (unsigned long long)rank, ADAPTER_MAX_RANK);
    if (down->shape[1] != m->n_in || up->shape[0] != m->n_out || up->shape[1] != rank)
        return td_fail(e, TD_ERR_CORRUPT,
                       "layer %u: %s: lora_B [%llu, %llu] and lora_A [%llu, %llu] don't make [%llu, %llu]", layer,
                       m->name, (unsigned long long)up->shape[0], (unsigned long long)up->shape[1],
                       (unsigned long long)rank, (unsigned long long)down->shape[1], (unsigned long long)m->n_out,
                       (unsigned long long)m->n_in);
    *n_found += 2;
    return TD_OK;
}

/* Reports a tensor that belongs to no module. */
static enum td_status name_stranger(const struct adapter *a, const struct model_config *c, struct td_error *e)
{
    struct module modules[MAX_MODULES];
    for (uint32_t i = 0; i < safetensors_count(a->file); i++) {
        const char *name = safetensors_at(a->file, i)->name;
        bool known = false;
        for (uint32_t l = 0; l < c->n_layers && !known; l++)
            for (uint32_t m = modules_of(c, l, modules); m-- > 0 && !known;)
                known = half_of(a, l, modules[m].name, 'A') == safetensors_at(a->file, i) ||
                        half_of(a, l, modules[m].name, 'B') == safetensors_at(a->file, i);
        if (!known)
            return td_fail(e, TD_ERR_UNSUPPORTED, "tensor %s: not of a matrix that can be adapted", name);
    }
    return TD_OK;
}

static enum td_status check_tensors(const struct adapter *a, const struct model_config *c, struct td_error *e)
{
    struct module modules[MAX_MODULES];
    uint32_t n_found = 0;
    for (uint32_t l = 0; l < c->n_layers; l++) {
        uint32_t n = modules_of(c, l, modules);
        for (uint32_t m = 0; m < n; m++) {
            enum td_status s = check_module(a, l, &modules[m], &n_found, e);
            if (s)
                return s;
        }
    }
    if (n_found == safetensors_count(a->file))
        return n_found ? TD_OK : td_fail(e, TD_ERR_CORRUPT, "adapter_model.safetensors: it is empty");
    return name_stranger(a, c, e);
}

static bool is_given(json_t *root, const char *field) /* and is not null, false, "none" or empty */
{
    json_t *v = json_object_get(root, field);
    const char *text = json_string_value(v);
    return v && !json_is_null(v) && !json_is_false(v) && !(json_is_array(v) && !json_array_size(v)) &&
           !(json_is_object(v) && !json_object_size(v)) && !(text && !strcmp(text, "none"));
}

static enum td_status read_config(struct adapter *a, json_t *root, struct td_error *e)
{
    static const char *const REFUSED[] = {"use_dora",      "bias",           "modules_to_save",
                                          "alpha_pattern", "fan_in_fan_out", "lora_bias"};
    const char *type = json_string_value(json_object_get(root, "peft_type"));
    json_t *alpha = json_object_get(root, "lora_alpha");
    if (!type || strcmp(type, "LORA") != 0)
        return td_fail(e, TD_ERR_UNSUPPORTED, "adapter_config.json: peft_type: '%s' is not LORA", type ? type : "");
    for (size_t i = 0; i < sizeof(REFUSED) / sizeof(REFUSED[0]); i++)
        if (is_given(root, REFUSED[i]))
            return td_fail(e, TD_ERR_UNSUPPORTED, "adapter_config.json: %s: not supported", REFUSED[i]);
    double value = json_number_value(alpha);
    if (!json_is_number(alpha) || !(fabs(value) <= 1e6))
        return td_fail(e, TD_ERR_CORRUPT, "adapter_config.json: lora_alpha: a number up to 10^6 is missing");
    a->alpha = (float)value;
    a->by_root = json_is_true(json_object_get(root, "use_rslora"));
    return TD_OK;
}

static enum td_status parse_config(struct adapter *a, const char *text, size_t len, struct td_error *e)
{
    json_error_t error;
    json_t *root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &error);
    enum td_status s = json_is_object(root)
                           ? read_config(a, root, e)
                           : td_fail(e, TD_ERR_CORRUPT, "adapter_config.json: %s", root ? "not an object" : error.text);
    json_decref(root);
    return s;
}

static enum td_status load_config(struct adapter *a, const char *dir, struct td_error *e)
{
    char path[4096], *text = NULL;
    size_t n = 0;
    snprintf(path, sizeof(path), "%s/adapter_config.json", dir);
    enum td_status s = file_read(path, CONFIG_MAX_BYTES, &text, &n, e);
    if (!s)
        s = parse_config(a, text, n, e);
    free(text);
    return s;
}

static void hash(EVP_MD_CTX *ctx, const void *data, size_t len_bytes)
{
    EVP_DigestUpdate(ctx, data, len_bytes);
}

static void make_fingerprint(struct adapter *a)
{
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    uint8_t full[32];
    EVP_DigestInit_ex(ctx, EVP_sha256(), NULL);
    hash(ctx, "tandem-adapter-1", 16);
    hash(ctx, &a->alpha, sizeof(a->alpha));
    hash(ctx, &a->by_root, sizeof(a->by_root));
    for (uint32_t i = 0; i < safetensors_count(a->file); i++) {
        const struct tensor *t = safetensors_at(a->file, i);
        hash(ctx, t->name, strlen(t->name) + 1);
        hash(ctx, &t->type, sizeof(t->type));
        hash(ctx, t->shape, t->n_dims * sizeof(*t->shape));
        hash(ctx, t->data, t->len_bytes);
    }
    EVP_DigestFinal_ex(ctx, full, NULL);
    EVP_MD_CTX_free(ctx);
    memcpy(a->fingerprint.b, full, BLOCK_KEY_BYTES);
}

static enum td_status finish_open(struct adapter *a, enum td_status s, const struct model_config *config,
                                  struct adapter **out, struct td_error *e)
{
    if (!s)
        s = check_tensors(a, config, e);
    if (s) {
        adapter_close(a);
        return s;
    }
    make_fingerprint(a);
    *out = a;
    return TD_OK;
}

enum td_status adapter_open(const char *dir, const struct model_config *config, struct adapter **out,
                            struct td_error *error_out)
{
    char path[4096];
    struct adapter *a = mem_zalloc(sizeof(*a));
    enum td_status s = load_config(a, dir, error_out);
    snprintf(path, sizeof(path), "%s/adapter_model.safetensors", dir);
    if (!s)
        s = safetensors_open_file(path, &a->file, error_out);
    return finish_open(a, s, config, out, error_out);
}

enum td_status adapter_open_memory(const char *config_json, size_t json_bytes, const void *tensors,
                                   size_t tensors_bytes, const struct model_config *config, struct adapter **out,
                                   struct td_error *error_out)
{
    struct adapter *a = mem_zalloc(sizeof(*a));
    enum td_status s = parse_config(a, config_json, json_bytes, error_out);
    if (!s)
        s = safetensors_open_memory(tensors, tensors_bytes, &a->file, error_out);
    return finish_open(a, s, config, out, error_out);
}

void adapter_close(struct adapter *a)
{
    if (!a)
        return;
    safetensors_close(a->file);
    free(a);
}

struct block_key adapter_fingerprint(const struct adapter *a)
{
    return a->fingerprint;
}
