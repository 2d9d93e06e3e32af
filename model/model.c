#include "model/model.h"

#include <math.h>
#include <openssl/evp.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/endian.h"
#include "base/mem.h"
#include "base/random.h"

enum { DUMMY_TABLE = 65536 };

struct model {
    struct model_config config;
    struct safetensors *file;
    struct block_key fingerprint;
    uint64_t weight_bytes;
    struct tensor *dummy; /* --dummy: the tensors, instead of a file */
    uint32_t n_dummy;
    atomic_bool *asked; /* [n_tensors] whether model_tensor() returned it */
    void *dummy_data;
    size_t dummy_bytes;
};

static void hash_text(EVP_MD_CTX *ctx, const char *text)
{
    EVP_DigestUpdate(ctx, text, strlen(text) + 1);
}

static void hash_number(EVP_MD_CTX *ctx, uint64_t v)
{
    uint8_t b[8];
    put_u64(b, v);
    EVP_DigestUpdate(ctx, b, 8);
}

static void hash_double(EVP_MD_CTX *ctx, double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof(bits));
    hash_number(ctx, bits);
}

static void hash_rope(EVP_MD_CTX *ctx, const struct model_rope *r, uint32_t rotary_dim)
{
    const double numbers[] = {r->theta,     r->factor, r->low_freq_factor, r->high_freq_factor, r->beta_fast,
                              r->beta_slow, r->mscale, r->mscale_all_dim,  r->attention_factor};
    hash_number(ctx, r->type);
    hash_number(ctx, r->original_positions);
    hash_number(ctx, r->truncate);
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        hash_double(ctx, numbers[i]);
    for (uint32_t i = 0; i < rotary_dim / 2; i++) {
        hash_double(ctx, r->short_factor[i]);
        hash_double(ctx, r->long_factor[i]);
    }
}

/* Hashes everything that changes what the model computes. */
static void hash_config(EVP_MD_CTX *ctx, const struct model_config *c)
{
    const struct model_moe *m = &c->moe;
    const struct model_latent *l = &c->latent;
    const uint64_t numbers[] = {c->vocab_size,
                                c->hidden,
                                c->n_layers,
                                c->n_heads,
                                c->n_kv_heads,
                                c->head_dim,
                                c->intermediate,
                                c->rotary_dim,
                                c->max_positions,
                                c->fp8_block[0],
                                c->fp8_block[1],
                                c->mxfp4,
                                c->tied_embeddings,
                                c->qkv_bias,
                                c->out_bias,
                                c->mlp_bias,
                                c->glu,
                                c->window,
                                m->n_experts,
                                m->n_used,
                                m->intermediate,
                                m->shared_intermediate,
                                m->n_groups,
                                m->n_groups_used,
                                m->normalized,
                                l->q_rank,
                                l->kv_rank,
                                l->nope_dim,
                                l->rope_dim,
                                l->v_dim};
    const float floats[] = {c->rms_eps,  c->glu_alpha,  c->glu_limit, c->score_scale,
                            c->attn_cap, c->logits_cap, m->scale};
    hash_text(ctx, c->family->model_type);
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        hash_number(ctx, numbers[i]);
    for (size_t i = 0; i < sizeof(floats) / sizeof(floats[0]); i++)
        hash_double(ctx, (double)floats[i]);
    EVP_DigestUpdate(ctx, c->layers, c->n_layers);
    hash_rope(ctx, &c->rope[0], c->rotary_dim);
    hash_rope(ctx, &c->rope[1], c->rotary_dim);
}

static void fingerprint(struct model *m, uint64_t dummy_seed)
{
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    uint8_t full[32];
    EVP_DigestInit_ex(ctx, EVP_sha256(), NULL);
    hash_text(ctx, "tandem-model-2");
    hash_config(ctx, &m->config);
    if (!m->file) {
        hash_text(ctx, "dummy");
        hash_number(ctx, dummy_seed);
    }
    for (uint32_t i = 0; m->file && i < safetensors_count(m->file); i++) {
        const struct tensor *t = safetensors_at(m->file, i);
        hash_text(ctx, t->name);
        hash_number(ctx, t->type);
        hash_number(ctx, t->n_dims);
        for (uint32_t d = 0; d < t->n_dims; d++)
            hash_number(ctx, t->shape[d]);
        EVP_DigestUpdate(ctx, t->data, t->len_bytes);
        m->weight_bytes += t->len_bytes;
    }
    EVP_DigestFinal_ex(ctx, full, NULL);
    EVP_MD_CTX_free(ctx);
    memcpy(m->fingerprint.b, full, BLOCK_KEY_BYTES);
}

enum td_status model_open(const char *dir, struct model **out, struct td_error *error_out)
{
    struct model *m = mem_zalloc(sizeof(*m));
    enum td_status s = model_config_load(dir, &m->config, error_out);
    if (!s)
        s = safetensors_open_dir(dir, &m->file, error_out);
    if (s) {
        model_close(m);
        return s;
    }
    m->asked = mem_array(safetensors_count(m->file), sizeof(*m->asked));
    fingerprint(m, 0);
    *out = m;
    return TD_OK;
}

/* ------------------------------------------------------------------- dummy */

static uint16_t to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

/* The quantile of the normal distribution, by bisection of erf's series. Slow; it fills a table once. */
static double normal_quantile(double p)
{
    double lo = -6, hi = 6;
    for (int i = 0; i < 40; i++) {
        double x = (lo + hi) / 2;
        if (0.5 * erfc(-x * 0.70710678118654752) < p)
            lo = x;
        else
            hi = x;
    }
    return (lo + hi) / 2;
}

static void fill_gaussian(uint16_t *out, uint64_t n, uint64_t seed, const uint16_t *table)
{
    for (uint64_t i = 0; i < n; i += 4) {
        uint64_t r = random_at(seed, i, 0);
        for (uint64_t j = 0; j < 4 && i + j < n; j++)
            out[i + j] = table[(r >> (16 * j)) & 0xffff];
    }
}

struct dummy_shape {
    char name[112];
    uint64_t rows, cols;
};

struct dummy_list {
    struct dummy_shape *shapes;
    uint32_t n;
};

static void add_shape(struct dummy_list *list, uint32_t layer, const char *name, uint64_t rows, uint64_t cols)
{
    struct dummy_shape *s = &list->shapes[list->n++];
    snprintf(s->name, sizeof(s->name), "model.layers.%u.%s.weight", layer, name);
    s->rows = rows;
    s->cols = cols;
}

static void add_experts(struct dummy_list *list, const struct model_config *c, uint32_t layer)
{
    char name[64];
    add_shape(list, layer, c->family->router, c->moe.n_experts, c->hidden);
    for (uint32_t e = 0; e < c->moe.n_experts; e++) {
        const struct {
            const char *format;
            uint64_t rows, cols;
        } parts[] = {{c->family->expert_gate, c->moe.intermediate, c->hidden},
                     {c->family->expert_up, c->moe.intermediate, c->hidden},
                     {c->family->expert_down, c->hidden, c->moe.intermediate}};
        for (size_t i = 0; i < 3; i++) {
            const char *number = strstr(parts[i].format, "%u");
            snprintf(name, sizeof(name), "%.*s%u%s", (int)(number - parts[i].format), parts[i].format, e, number + 2);
            add_shape(list, layer, name, parts[i].rows, parts[i].cols);
        }
    }
}

static void add_layer(struct dummy_list *list, const struct model_config *c, uint32_t layer)
{
    uint64_t q = (uint64_t)c->n_heads * c->head_dim, kv = (uint64_t)c->n_kv_heads * c->head_dim;
    add_shape(list, layer, "input_layernorm", c->hidden, 0);
    add_shape(list, layer, "post_attention_layernorm", c->hidden, 0);
    add_shape(list, layer, "self_attn.q_proj", q, c->hidden);
    add_shape(list, layer, "self_attn.k_proj", kv, c->hidden);
    add_shape(list, layer, "self_attn.v_proj", kv, c->hidden);
    add_shape(list, layer, "self_attn.o_proj", c->hidden, q);
    if (c->layers[layer] & LAYER_MOE) {
        add_experts(list, c, layer);
        return;
    }
    add_shape(list, layer, "mlp.gate_proj", c->intermediate, c->hidden);
    add_shape(list, layer, "mlp.up_proj", c->intermediate, c->hidden);
    add_shape(list, layer, "mlp.down_proj", c->hidden, c->intermediate);
}

static struct dummy_list dummy_shapes(const struct model_config *c)
{
    struct dummy_list list = {mem_array(2 + (10 + 3 * (size_t)c->moe.n_experts) * c->n_layers, sizeof(*list.shapes)),
                              0};
    list.shapes[list.n++] = (struct dummy_shape){"model.embed_tokens.weight", c->vocab_size, c->hidden};
    list.shapes[list.n++] = (struct dummy_shape){"model.norm.weight", c->hidden, 0};
    for (uint32_t l = 0; l < c->n_layers; l++)
        add_layer(&list, c, l);
    return list;
}

static enum td_status make_dummy(struct model *m, uint64_t seed, struct td_error *e)
{
    struct dummy_list list = dummy_shapes(&m->config);
    struct dummy_shape *shapes = list.shapes;
    m->n_dummy = list.n;
    m->dummy = mem_array(m->n_dummy, sizeof(*m->dummy));
    m->asked = mem_array(m->n_dummy, sizeof(*m->asked));
    for (uint32_t i = 0; i < m->n_dummy; i++)
        m->weight_bytes += 2 * shapes[i].rows * (shapes[i].cols ? shapes[i].cols : 1);
    m->dummy_bytes = m->weight_bytes;
    enum td_status s = mem_map(m->dummy_bytes, &m->dummy_data);
    if (s) {
        free(shapes);
        return td_fail(e, s, "dummy weights: no memory for %llu bytes", (unsigned long long)m->dummy_bytes);
    }
    uint16_t *table = mem_array(DUMMY_TABLE, sizeof(*table)), *at = m->dummy_data;
    for (int i = 0; i < DUMMY_TABLE; i++)
        table[i] = to_bf16((float)(0.02 * normal_quantile((i + 0.5) / DUMMY_TABLE)));
    for (uint32_t i = 0; i < m->n_dummy; i++) {
        uint64_t n = shapes[i].rows * (shapes[i].cols ? shapes[i].cols : 1);
        if (shapes[i].cols)
            fill_gaussian(at, n, random_at(seed, i, 1), table);
        for (uint64_t j = 0; !shapes[i].cols && j < n; j++)
            at[j] = 0x3f80; /* 1.0 */
        m->dummy[i] = (struct tensor){.name = mem_strdup(shapes[i].name),
                                      .type = NUM_BF16,
                                      .n_dims = shapes[i].cols ? 2 : 1,
                                      .shape = {shapes[i].rows, shapes[i].cols},
                                      .data = at,
                                      .len_bytes = 2 * n};
        at += n;
    }
    free(table);
    free(shapes);
    return TD_OK;
}

void model_dummy_config(const struct model_dummy *dims, struct model_config *out)
{
#define DIM(field, fallback) (dims->field ? dims->field : (fallback))
    *out = (struct model_config){.family = model_family_find(dims->n_experts ? "mixtral" : "llama"),
                                 .vocab_size = DIM(vocab_size, 128256),
                                 .hidden = DIM(hidden, 2048),
                                 .n_layers = DIM(n_layers, 16),
                                 .n_heads = DIM(n_heads, 32),
                                 .n_kv_heads = DIM(n_kv_heads, 8),
                                 .head_dim = DIM(head_dim, 64),
                                 .rotary_dim = DIM(head_dim, 64),
                                 .intermediate = DIM(intermediate, 8192),
                                 .max_positions = DIM(max_positions, 131072),
                                 .rms_eps = 1e-5f,
                                 .tied_embeddings = true,
                                 .score_scale = 1.0f / sqrtf((float)DIM(head_dim, 64)),
                                 .window = dims->window,
                                 .rope = {{.theta = 500000}, {.theta = 500000}},
                                 .generation = MODEL_GENERATION_NONE};
    if (dims->n_experts)
        out->moe = (struct model_moe){.n_experts = dims->n_experts,
                                      .n_used = DIM(n_used, dims->n_experts < 2 ? 1 : 2),
                                      .intermediate = out->intermediate,
                                      .n_groups = 1,
                                      .n_groups_used = 1,
                                      .normalized = true,
                                      .scale = 1};
    memset(out->layers, (dims->n_experts ? LAYER_MOE : 0) | (dims->window ? LAYER_WINDOW : 0), out->n_layers);
#undef DIM
}

enum td_status model_open_dummy(const struct model_dummy *dims, struct model **out, struct td_error *error_out)
{
    struct model *m = mem_zalloc(sizeof(*m));
    model_dummy_config(dims, &m->config);
    enum td_status s = make_dummy(m, dims->seed, error_out);
    if (s) {
        model_close(m);
        return s;
    }
    fingerprint(m, dims->seed);
    *out = m;
    return TD_OK;
}

void model_close(struct model *m)
{
    if (!m)
        return;
    for (uint32_t i = 0; i < m->n_dummy; i++)
        free((char *)m->dummy[i].name);
    free(m->dummy);
    free(m->asked);
    mem_unmap(m->dummy_data, m->dummy_bytes);
    safetensors_close(m->file);
    free(m);
}

const struct model_config *model_config(const struct model *m)
{
    return &m->config;
}

uint64_t model_weight_bytes(const struct model *m)
{
    return m->weight_bytes;
}

struct block_key model_fingerprint(const struct model *m)
{
    return m->fingerprint;
}

static uint32_t n_tensors(const struct model *m)
{
    return m->file ? safetensors_count(m->file) : m->n_dummy;
}

static const struct tensor *tensor_at(const struct model *m, uint32_t i)
{
    return m->file ? safetensors_at(m->file, i) : &m->dummy[i];
}

static const struct tensor *find_dummy(const struct model *m, const char *name)
{
    for (uint32_t i = 0; i < m->n_dummy; i++)
        if (!strcmp(m->dummy[i].name, name))
            return &m->dummy[i];
    return NULL;
}

static const struct tensor *find_tensor(const struct model *m, const char *name)
{
    const struct tensor *t = m->file ? safetensors_find(m->file, name) : find_dummy(m, name);
    if (t)
        atomic_store(&m->asked[t - tensor_at(m, 0)], true);
    return t;
}

static bool is_weight(const struct model *m, const char *name)
{
    static const char *const OTHERS[] = {".rotary_emb.inv_freq", ".input_scale", ".k_scale", ".v_scale"};
    size_t len = strlen(name);
    for (size_t i = 0; i < sizeof(OTHERS) / sizeof(OTHERS[0]); i++)
        if (len >= strlen(OTHERS[i]) && !strcmp(name + len - strlen(OTHERS[i]), OTHERS[i]))
            return false;
    return !m->config.tied_embeddings || strcmp(name, "lm_head.weight") != 0;
}

enum td_status model_check_all_asked(const struct model *m, struct td_error *error_out)
{
    for (uint32_t i = 0; i < n_tensors(m); i++)
        if (!atomic_load(&m->asked[i]) && is_weight(m, tensor_at(m, i)->name))
            return td_fail(error_out, TD_ERR_UNSUPPORTED, "tensor %s: config.json describes no such weight",
                           tensor_at(m, i)->name);
    return TD_OK;
}

static void print_shape(const uint64_t *shape, uint32_t n, char out[96])
{
    int at = snprintf(out, 96, "[");
    for (uint32_t i = 0; i < n && i < 4; i++)
        at += snprintf(out + at, (size_t)(96 - at), "%s%llu", i ? ", " : "", (unsigned long long)shape[i]);
    snprintf(out + at, (size_t)(96 - at), "]");
}

static enum td_status check_shape(const struct tensor *t, const uint64_t *shape, uint32_t n_dims,
                                  struct td_error *error_out)
{
    if (t->n_dims == n_dims && !memcmp(t->shape, shape, n_dims * sizeof(*shape)))
        return TD_OK;
    char is[96], should[96];
    print_shape(t->shape, t->n_dims, is);
    print_shape(shape, n_dims, should);
    return td_fail(error_out, TD_ERR_CORRUPT, "tensor %s: shape %s, config.json says %s", t->name, is, should);
}

static enum td_status find_or_fail(const struct model *m, const char *name, const struct tensor **out,
                                   struct td_error *error_out)
{
    *out = find_tensor(m, name);
    return *out ? TD_OK : td_fail(error_out, TD_ERR_NOT_FOUND, "tensor %s is missing", name);
}

static enum td_status tensor_of(const struct model *m, const char *name, const uint64_t *shape, uint32_t n_dims,
                                const struct tensor **out, struct td_error *error_out)
{
    const struct tensor *t;
    enum td_status s = find_or_fail(m, name, &t, error_out);
    if (s)
        return s;
    if (t->type < NUM_F32 || t->type > NUM_BF16)
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "tensor %s: its dtype is none of F32, F16, BF16", name);
    s = check_shape(t, shape, n_dims, error_out);
    if (!s)
        *out = t;
    return s;
}

enum td_status model_tensor(const struct model *m, const char *name, uint64_t rows, uint64_t cols,
                            const struct tensor **out, struct td_error *error_out)
{
    return tensor_of(m, name, (uint64_t[]){rows, cols}, cols ? 2 : 1, out, error_out);
}

enum td_status model_tensor_stack(const struct model *m, const char *name, uint64_t n, uint64_t rows, uint64_t cols,
                                  const struct tensor **out, struct td_error *error_out)
{
    return tensor_of(m, name, (uint64_t[]){n, rows, cols}, 3, out, error_out);
}

/* --------------------------------------------------------------- quantised */

static uint64_t blocks(uint64_t n, uint32_t size)
{
    return (n + size - 1) / size;
}

/* Finds out from the shape of the scales which outputs and inputs share a scale. */
static enum td_status take_scales(const struct model *m, const struct tensor *scales, uint64_t rows, uint64_t cols,
                                  struct model_matrix *out, struct td_error *error_out)
{
    const uint32_t *block = m->config.fp8_block;
    uint64_t down = scales->n_dims > 0 ? scales->shape[0] : 1, across = scales->n_dims > 1 ? scales->shape[1] : 1;
    if (scales->type < NUM_F32 || scales->type > NUM_BF16)
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "tensor %s: its dtype is none of F32, F16, BF16", scales->name);
    out->scales = scales;
    out->out_stride = across;
    out->out_block = down == 1 ? UINT32_MAX : 1;
    out->in_block = UINT32_MAX;
    if (scales->n_dims <= 2 && across == 1 && (down == 1 || down == rows))
        return TD_OK;
    out->out_block = block[0];
    out->in_block = block[1];
    return check_shape(scales, (uint64_t[]){blocks(rows, block[0]), blocks(cols, block[1])}, 2, error_out);
}

enum td_status model_matrix(const struct model *m, const char *name, uint64_t rows, uint64_t cols,
                            struct model_matrix *out, struct td_error *error_out)
{
    static const char *const ENDINGS[] = {"_scale", "_scale_inv"};
    char scale_name[256];
    const struct tensor *t = find_tensor(m, name), *scales = NULL;
    struct model_matrix x = {.t = t};
    enum td_status s;
    if (!t || t->type != NUM_F8_E4M3) {
        s = model_tensor(m, name, rows, cols, &x.t, error_out);
    } else {
        for (int i = 0; i < 2 && !scales; i++) {
            snprintf(scale_name, sizeof(scale_name), "%s%s", name, ENDINGS[i]);
            scales = find_tensor(m, scale_name);
        }
        s = scales ? check_shape(t, (uint64_t[]){rows, cols}, 2, error_out)
                   : td_fail(error_out, TD_ERR_NOT_FOUND, "tensor %s has neither _scale nor _scale_inv", name);
        if (!s)
            s = take_scales(m, scales, rows, cols, &x, error_out);
    }
    if (!s)
        *out = x;
    return s;
}

enum { MX_GROUP = 32, MX_BYTES = 16 };

static void mxfp4_group(const uint8_t *codes, uint8_t scale, uint16_t *out)
{
    static const float E2M1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    uint32_t bits = scale ? (uint32_t)scale << 23 : 0x400000;
    float factor;
    memcpy(&factor, &bits, 4);
    for (uint32_t i = 0; i < MX_GROUP; i++) {
        uint32_t code = codes[i / 2] >> (i % 2 * 4) & 15;
        out[i] = to_bf16((code & 8 ? -E2M1[code & 7] : E2M1[code]) * factor); /* exact */
    }
}

static enum td_status find_bytes(const struct model *m, const char *name, const char *ending, const uint64_t *shape,
                                 uint32_t n_dims, const struct tensor **out, struct td_error *error_out)
{
    char full[256];
    uint64_t n = 1;
    for (uint32_t i = 0; i < n_dims; i++)
        n *= shape[i];
    snprintf(full, sizeof(full), "%s%s", name, ending);
    enum td_status s = find_or_fail(m, full, out, error_out);
    if (!s)
        s = check_shape(*out, shape, n_dims, error_out);
    if (!s && ((*out)->type || (*out)->len_bytes != n))
        s = td_fail(error_out, TD_ERR_UNSUPPORTED, "tensor %s: its dtype is not U8", full);
    return s;
}

enum td_status model_mxfp4(const struct model *m, const char *name, uint64_t n, uint64_t index, uint64_t rows,
                           uint64_t cols, uint16_t *out, struct td_error *error_out)
{
    const struct tensor *codes, *scales;
    uint64_t groups = cols / MX_GROUP;
    if (cols % MX_GROUP)
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "tensor %s_blocks: rows are not whole groups of 32", name);
    enum td_status s = find_bytes(m, name, "_blocks", (uint64_t[]){n, rows, groups, MX_BYTES}, 4, &codes, error_out);
    if (!s)
        s = find_bytes(m, name, "_scales", (uint64_t[]){n, rows, groups}, 3, &scales, error_out);
    for (uint64_t i = 0; i < rows * groups && out && !s; i++) {
        uint64_t at = index * rows * groups + i;
        mxfp4_group((const uint8_t *)codes->data + at * MX_BYTES, ((const uint8_t *)scales->data)[at],
                    out + i * MX_GROUP);
    }
    return s;
}
