#include "model/model.h"

#include <assert.h>
#include <math.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/endian.h"
#include "base/mem.h"
#include "base/random.h"

enum { DUMMY_TABLE = 65536 };

struct model {
    struct model_config config;
    char *name;
    struct safetensors *file;
    struct block_key fingerprint;
    uint64_t weight_bytes;
    struct tensor *dummy; /* instead of a file */
    uint32_t n_dummy;
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

static void hash_config(EVP_MD_CTX *ctx, const struct model_config *c)
{
    char line[512];
    snprintf(line, sizeof(line), "%s v%u h%u l%u q%u kv%u d%u i%u p%u eps%.9g tied%d rope%d %.17g %.17g %.17g %.17g %u",
             c->model_type, c->vocab_size, c->hidden, c->n_layers, c->n_heads, c->n_kv_heads, c->head_dim,
             c->intermediate, c->max_positions, (double)c->rms_eps, c->tied_embeddings, (int)c->rope_type,
             c->rope_theta, c->rope_factor, c->rope_low_freq_factor, c->rope_high_freq_factor,
             c->rope_original_positions);
    hash_text(ctx, line);
}

static void fingerprint(struct model *m, uint64_t dummy_seed)
{
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    uint8_t full[32];
    EVP_DigestInit_ex(ctx, EVP_sha256(), NULL);
    hash_text(ctx, "tandem-model-1");
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
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/')
        n--;
    size_t start = n;
    while (start > 0 && dir[start - 1] != '/')
        start--;
    m->name = mem_strdup(dir + start);
    m->name[n - start] = 0;
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

/* Quantile of the normal distribution by bisection of erf's series: slow, but it fills a table once. */
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
    char name[80];
    uint64_t rows, cols;
};

static uint32_t dummy_shapes(const struct model_config *c, struct dummy_shape *out)
{
    const struct {
        const char *name;
        uint64_t rows, cols;
    } layer[] = {{"input_layernorm", c->hidden, 0},
                 {"post_attention_layernorm", c->hidden, 0},
                 {"self_attn.q_proj", (uint64_t)c->n_heads * c->head_dim, c->hidden},
                 {"self_attn.k_proj", (uint64_t)c->n_kv_heads * c->head_dim, c->hidden},
                 {"self_attn.v_proj", (uint64_t)c->n_kv_heads * c->head_dim, c->hidden},
                 {"self_attn.o_proj", c->hidden, (uint64_t)c->n_heads * c->head_dim},
                 {"mlp.gate_proj", c->intermediate, c->hidden},
                 {"mlp.up_proj", c->intermediate, c->hidden},
                 {"mlp.down_proj", c->hidden, c->intermediate}};
    uint32_t n = 0;
    out[n++] = (struct dummy_shape){"model.embed_tokens.weight", c->vocab_size, c->hidden};
    out[n++] = (struct dummy_shape){"model.norm.weight", c->hidden, 0};
    for (uint32_t l = 0; l < c->n_layers; l++)
        for (size_t i = 0; i < sizeof(layer) / sizeof(layer[0]); i++, n++) {
            snprintf(out[n].name, sizeof(out[n].name), "model.layers.%u.%s.weight", l, layer[i].name);
            out[n].rows = layer[i].rows;
            out[n].cols = layer[i].cols;
        }
    return n;
}

static enum td_status make_dummy(struct model *m, uint64_t seed, struct td_error *e)
{
    struct dummy_shape *shapes = mem_array(2 + 9 * (size_t)m->config.n_layers, sizeof(*shapes));
    m->n_dummy = dummy_shapes(&m->config, shapes);
    m->dummy = mem_array(m->n_dummy, sizeof(*m->dummy));
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
    *out = (struct model_config){.model_type = "llama",
                                 .vocab_size = DIM(vocab_size, 128256),
                                 .hidden = DIM(hidden, 2048),
                                 .n_layers = DIM(n_layers, 16),
                                 .n_heads = DIM(n_heads, 32),
                                 .n_kv_heads = DIM(n_kv_heads, 8),
                                 .head_dim = DIM(head_dim, 64),
                                 .intermediate = DIM(intermediate, 8192),
                                 .max_positions = DIM(max_positions, 131072),
                                 .rms_eps = 1e-5f,
                                 .tied_embeddings = true,
                                 .rope_theta = 500000,
                                 .default_temperature = 1,
                                 .default_top_p = 1};
#undef DIM
}

enum td_status model_open_dummy(const struct model_dummy *dims, struct model **out, struct td_error *error_out)
{
    struct model *m = mem_zalloc(sizeof(*m));
    model_dummy_config(dims, &m->config);
    m->name = mem_strdup("dummy");
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
    mem_unmap(m->dummy_data, m->dummy_bytes);
    safetensors_close(m->file);
    free(m->name);
    free(m);
}

const struct model_config *model_config(const struct model *m)
{
    return &m->config;
}

const char *model_name(const struct model *m)
{
    return m->name;
}

uint64_t model_weight_bytes(const struct model *m)
{
    return m->weight_bytes;
}

struct block_key model_fingerprint(const struct model *m)
{
    return m->fingerprint;
}

static const struct tensor *find(const struct model *m, const char *name)
{
    if (m->file)
        return safetensors_find(m->file, name);
    for (uint32_t i = 0; i < m->n_dummy; i++)
        if (!strcmp(m->dummy[i].name, name))
            return &m->dummy[i];
    return NULL;
}

enum td_status model_tensor(const struct model *m, const char *name, uint64_t rows, uint64_t cols,
                            const struct tensor **out, struct td_error *error_out)
{
    const struct tensor *t = find(m, name);
    if (!t)
        return td_fail(error_out, TD_ERR_NOT_FOUND, "tensor %s is missing", name);
    if (!t->type)
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "tensor %s: its dtype is none of F32, F16, BF16", name);
    if (t->n_dims != (cols ? 2 : 1) || t->shape[0] != rows || (cols && t->shape[1] != cols))
        return td_fail(error_out, TD_ERR_CORRUPT, "tensor %s: shape [%llu, %llu], config.json says [%llu, %llu]", name,
                       (unsigned long long)(t->n_dims ? t->shape[0] : 0),
                       (unsigned long long)(t->n_dims > 1 ? t->shape[1] : 0), (unsigned long long)rows,
                       (unsigned long long)cols);
    *out = t;
    return TD_OK;
}
