#include "engine/forward.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

struct layer {
    struct k_matrix *qkv, *o, *gate_up, *down;
    float *attn_norm, *mlp_norm; /* [hidden] */
};

struct forward {
    struct kernels *kernels;
    const struct model *model;
    struct model_config c;
    struct kv_layout layout;
    enum compute compute;
    uint32_t max_rows, qkv_dim;
    struct layer *layers;
    struct k_matrix *head;
    const struct tensor *embedding;
    float *final_norm;
    float *cos_sin;                                /* [max_positions][head_dim/2][2] */
    float *x, *normed, *qkv, *attn, *mlp, *hidden; /* scratch, max_rows each */
};

static enum td_status norm_weights(struct forward *f, const char *name, float **out, struct td_error *e)
{
    const struct tensor *t;
    enum td_status s = model_tensor(f->model, name, f->c.hidden, 0, &t, e);
    if (s)
        return s;
    *out = mem_array(f->c.hidden, sizeof(float));
    k_convert_to_f32(t->data, t->type, f->c.hidden, *out);
    return TD_OK;
}

struct part_name {
    const char *name;
    uint32_t n_out;
};

/* The named projections of layer l, packed one after the other into one matrix. */
static enum td_status pack(struct forward *f, uint32_t l, const struct part_name *names, uint32_t n, uint32_t n_in,
                           struct k_matrix **out, struct td_error *e)
{
    struct k_matrix_part parts[3];
    for (uint32_t i = 0; i < n; i++) {
        char name[96];
        const struct tensor *t;
        snprintf(name, sizeof(name), "model.layers.%u.%s.weight", l, names[i].name);
        enum td_status s = model_tensor(f->model, name, names[i].n_out, n_in, &t, e);
        if (s)
            return s;
        parts[i] = (struct k_matrix_part){t->data, t->type, names[i].n_out};
    }
    enum td_status s = k_matrix_pack(f->kernels, parts, n, n_in, f->compute, out);
    return s ? td_fail(e, s, "no memory for the packed weights of layer %u", l) : TD_OK;
}

static enum td_status open_layer(struct forward *f, uint32_t l, struct td_error *e)
{
    struct layer *y = &f->layers[l];
    uint32_t q = f->c.n_heads * f->c.head_dim, kv = f->c.n_kv_heads * f->c.head_dim;
    const struct part_name qkv[] = {{"self_attn.q_proj", q}, {"self_attn.k_proj", kv}, {"self_attn.v_proj", kv}};
    const struct part_name o[] = {{"self_attn.o_proj", f->c.hidden}};
    const struct part_name gate_up[] = {{"mlp.gate_proj", f->c.intermediate}, {"mlp.up_proj", f->c.intermediate}};
    const struct part_name down[] = {{"mlp.down_proj", f->c.hidden}};
    char name[96];
    snprintf(name, sizeof(name), "model.layers.%u.input_layernorm.weight", l);
    enum td_status s = norm_weights(f, name, &y->attn_norm, e);
    snprintf(name, sizeof(name), "model.layers.%u.post_attention_layernorm.weight", l);
    if (!s)
        s = norm_weights(f, name, &y->mlp_norm, e);
    if (!s)
        s = pack(f, l, qkv, 3, f->c.hidden, &y->qkv, e);
    if (!s)
        s = pack(f, l, o, 1, q, &y->o, e);
    if (!s)
        s = pack(f, l, gate_up, 2, f->c.hidden, &y->gate_up, e);
    if (!s)
        s = pack(f, l, down, 1, f->c.intermediate, &y->down, e);
    return s;
}

/* A tied model may store its one matrix under either name. */
static enum td_status open_ends(struct forward *f, struct td_error *e)
{
    const char *embed = "model.embed_tokens.weight", *head = "lm_head.weight";
    const struct tensor *t;
    enum td_status s = model_tensor(f->model, embed, f->c.vocab_size, f->c.hidden, &f->embedding, e);
    if (s == TD_ERR_NOT_FOUND && f->c.tied_embeddings)
        s = model_tensor(f->model, head, f->c.vocab_size, f->c.hidden, &f->embedding, e);
    t = f->embedding;
    if (!s && !f->c.tied_embeddings)
        s = model_tensor(f->model, head, f->c.vocab_size, f->c.hidden, &t, e);
    if (s)
        return s;
    struct k_matrix_part part = {t->data, t->type, f->c.vocab_size};
    s = k_matrix_pack(f->kernels, &part, 1, f->c.hidden, f->compute, &f->head);
    return s ? td_fail(e, s, "no memory for the packed output matrix")
             : norm_weights(f, "model.norm.weight", &f->final_norm, e);
}

static enum td_status open_scratch(struct forward *f, uint32_t max_positions, struct td_error *e)
{
    size_t rows = f->max_rows;
    struct {
        float **at;
        size_t floats;
    } const buffers[] = {{&f->x, rows * f->c.hidden},
                         {&f->normed, rows * f->c.hidden},
                         {&f->qkv, rows * f->qkv_dim},
                         {&f->attn, rows * f->c.n_heads * f->c.head_dim},
                         {&f->mlp, rows * 2 * f->c.intermediate},
                         {&f->hidden, rows * f->c.intermediate},
                         {&f->cos_sin, (size_t)max_positions * f->c.head_dim}};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        void *p;
        if (mem_try(buffers[i].floats * sizeof(float), &p))
            return td_fail(e, TD_ERR_NO_MEMORY, "no memory for the forward pass of %zu rows", rows);
        *buffers[i].at = p;
    }
    double *inv_freq = mem_array(f->c.head_dim / 2, sizeof(*inv_freq));
    model_config_rope(&f->c, inv_freq);
    k_rope_table(inv_freq, f->c.head_dim / 2, max_positions, f->cos_sin);
    free(inv_freq);
    return TD_OK;
}

enum td_status forward_open(const struct forward_config *config, struct forward **out, struct td_error *error_out)
{
    struct forward *f = mem_zalloc(sizeof(*f));
    f->kernels = config->kernels;
    f->model = config->model;
    f->c = *model_config(config->model);
    f->layout = *config->layout;
    f->compute = config->compute;
    f->max_rows = config->max_rows;
    f->qkv_dim = (f->c.n_heads + 2 * f->c.n_kv_heads) * f->c.head_dim;
    f->layers = mem_array(f->c.n_layers, sizeof(*f->layers));
    enum td_status s = TD_OK;
    for (uint32_t l = 0; l < f->c.n_layers && !s; l++)
        s = open_layer(f, l, error_out);
    if (!s)
        s = open_ends(f, error_out);
    if (!s)
        s = open_scratch(f, config->max_positions, error_out);
    if (s) {
        forward_close(f);
        return s;
    }
    *out = f;
    return TD_OK;
}

void forward_close(struct forward *f)
{
    if (!f)
        return;
    for (uint32_t l = 0; l < f->c.n_layers; l++) {
        struct layer *y = &f->layers[l];
        k_matrix_free(y->qkv);
        k_matrix_free(y->o);
        k_matrix_free(y->gate_up);
        k_matrix_free(y->down);
        free(y->attn_norm);
        free(y->mlp_norm);
    }
    k_matrix_free(f->head);
    float *buffers[] = {f->final_norm, f->cos_sin, f->x, f->normed, f->qkv, f->attn, f->mlp, f->hidden};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++)
        free(buffers[i]);
    free(f->layers);
    free(f);
}

uint64_t forward_weight_bytes(const struct forward *f)
{
    uint64_t n = k_matrix_bytes(f->head);
    for (uint32_t l = 0; l < f->c.n_layers; l++)
        n += k_matrix_bytes(f->layers[l].qkv) + k_matrix_bytes(f->layers[l].o) + k_matrix_bytes(f->layers[l].gate_up) +
             k_matrix_bytes(f->layers[l].down);
    return n;
}

/* One transformer layer, as in Touvron et al. 2023, section 2.2: pre-norm, rotary GQA attention, SwiGLU. */
static void run_layer(struct forward *f, uint32_t l, const struct forward_batch *b)
{
    const struct layer *y = &f->layers[l];
    struct kernels *k = f->kernels;
    uint32_t rows = b->n_rows, dim = f->c.hidden, heads = f->c.n_heads + f->c.n_kv_heads;
    const struct k_attn attn = {.layout = &f->layout,
                                .layer = l,
                                .n_heads = f->c.n_heads,
                                .row_stride = f->qkv_dim,
                                .qkv = f->qkv,
                                .out = f->attn,
                                .scale = 1.0f / sqrtf((float)f->c.head_dim),
                                .seqs = b->seqs,
                                .n_seqs = b->n_seqs};
    k_rmsnorm(k, f->x, y->attn_norm, f->c.rms_eps, rows, dim, f->normed);
    k_linear(k, y->qkv, f->normed, rows, f->qkv, false);
    k_rope(k, f->qkv, f->qkv_dim, heads, f->c.head_dim, b->positions, rows, f->cos_sin); /* q and k lie side by side */
    k_kv_store(k, &attn);
    k_attention(k, &attn);
    k_linear(k, y->o, f->attn, rows, f->x, true);

    k_rmsnorm(k, f->x, y->mlp_norm, f->c.rms_eps, rows, dim, f->normed);
    k_linear(k, y->gate_up, f->normed, rows, f->mlp, false);
    k_silu_mul(k, f->mlp, rows, f->c.intermediate, f->hidden);
    k_linear(k, y->down, f->hidden, rows, f->x, true);
}

void forward_run(struct forward *f, const struct forward_batch *b, float *logits_out)
{
    assert(b->n_rows >= 1 && b->n_rows <= f->max_rows && b->n_logit_rows <= b->n_rows);
    k_embed(f->kernels, f->embedding->data, f->embedding->type, f->c.hidden, b->ids, b->n_rows, f->x);
    uint32_t told = 0;
    for (uint32_t l = 0; l < f->c.n_layers; l++) {
        run_layer(f, l, b);
        if (b->on_layers && (l + 1 - told == b->layers_per_call || l + 1 == f->c.n_layers)) {
            b->on_layers(b->user, (uint16_t)told, (uint16_t)(l + 1));
            told = l + 1;
        }
    }
    if (!b->n_logit_rows)
        return;
    for (uint32_t i = 0; i < b->n_logit_rows; i++) /* rows ascend, so a copy never overwrites one still wanted */
        memmove(f->x + (size_t)i * f->c.hidden, f->x + (size_t)b->logit_rows[i] * f->c.hidden,
                f->c.hidden * sizeof(float));
    k_rmsnorm(f->kernels, f->x, f->final_norm, f->c.rms_eps, b->n_logit_rows, f->c.hidden, f->normed);
    k_linear(f->kernels, f->head, f->normed, b->n_logit_rows, logits_out, false);
}
