/*
 * Finding the weights by the names that a family gives them, and packing them for the kernels.
 *
 * A weight may come as several tensors (q, k, v), as one (fused), as a slice of one (an expert of gpt-oss, a head of latent
 * attention), transposed or interleaved: a part says where it lies, and pack() does not care.
 */
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/forward_internal.h"

enum { MAX_PARTS = 3, MAX_NAME = 160 };

/* ------------------------------------------------------------------- tensors */

/* "model.layers.L.NAME.KIND", where NAME may have a %u for an expert's number. */
static const char *name_of(char out[MAX_NAME], uint32_t layer, const char *name, uint32_t number, const char *kind)
{
    const char *at = strstr(name, "%u");
    if (at)
        snprintf(out, MAX_NAME, "model.layers.%u.%.*s%u%s%s", layer, (int)(at - name), name, number, at + 2, kind);
    else
        snprintf(out, MAX_NAME, "model.layers.%u.%s%s", layer, name, kind);
    return out;
}

/* A vector as f32, with offset added (the norms' 1 + w). */
static enum td_status vector(const struct forward *f, const char *name, uint32_t n, float offset, float **out,
                             struct td_error *e)
{
    const struct tensor *t;
    enum td_status s = model_tensor(f->model, name, n, 0, &t, e);
    if (s)
        return s;
    *out = mem_array(n, sizeof(float));
    k_convert_to_f32(t->data, t->type, n, *out);
    for (uint32_t i = 0; i < n && offset != 0; i++)
        (*out)[i] += offset;
    return TD_OK;
}

static enum td_status norm(const struct forward *f, uint32_t layer, const char *name, uint32_t n, float **out,
                           struct td_error *e)
{
    char full[MAX_NAME];
    return vector(f, name_of(full, layer, name, 0, ".weight"), n, f->c.family->norm_offset, out, e);
}

static enum td_status pack(const struct forward *f, uint32_t layer, const struct k_matrix_part *parts, uint32_t n,
                           uint32_t n_in, enum compute compute, struct k_matrix **out, struct td_error *e)
{
    enum td_status s = k_matrix_pack(f->kernels, parts, n, n_in, compute, out);
    return s ? td_fail(e, s, "no memory for the packed weights of layer %u", layer) : TD_OK;
}

struct part_name {
    const char *name;
    uint32_t n_out;
    bool bias;
};

static enum td_status find_part(const struct forward *f, uint32_t layer, uint32_t number, const struct part_name *p,
                                uint32_t n_in, struct k_matrix_part *out, struct td_error *e)
{
    char name[MAX_NAME];
    const struct tensor *w, *bias = NULL;
    enum td_status s = model_tensor(f->model, name_of(name, layer, p->name, number, ".weight"), p->n_out, n_in, &w, e);
    if (!s && p->bias)
        s = model_tensor(f->model, name_of(name, layer, p->name, number, ".bias"), p->n_out, 0, &bias, e);
    if (s)
        return s;
    *out = (struct k_matrix_part){.data = w->data, .type = w->type, .n_out = p->n_out};
    if (bias) {
        out->bias = bias->data;
        out->bias_type = bias->type;
    }
    return TD_OK;
}

/* The named projections of a layer (or of its expert `number`), one after the other in one matrix. */
static enum td_status project(const struct forward *f, uint32_t layer, uint32_t number, const struct part_name *names,
                              uint32_t n, uint32_t n_in, enum compute compute, struct k_matrix **out,
                              struct td_error *e)
{
    struct k_matrix_part parts[MAX_PARTS];
    for (uint32_t i = 0; i < n; i++) {
        enum td_status s = find_part(f, layer, number, &names[i], n_in, &parts[i], e);
        if (s)
            return s;
    }
    return pack(f, layer, parts, n, n_in, compute, out, e);
}

/* ----------------------------------------------------------------- attention */

static enum td_status open_plain(struct forward *f, uint32_t l, struct td_error *e)
{
    struct attention *y = &f->layers[l].attention;
    uint32_t q = f->c.n_heads * f->c.head_dim, kv = f->c.n_kv_heads * f->c.head_dim;
    bool bias = f->c.qkv_bias;
    const struct part_name split[] = {
        {"self_attn.q_proj", q, bias}, {"self_attn.k_proj", kv, bias}, {"self_attn.v_proj", kv, bias}};
    const struct part_name fused[] = {{"self_attn.qkv_proj", q + 2 * kv, bias}};
    char name[MAX_NAME];
    enum td_status s = f->c.family->fused_qkv ? project(f, l, 0, fused, 1, f->c.hidden, f->compute, &y->in, e)
                                              : project(f, l, 0, split, 3, f->c.hidden, f->compute, &y->in, e);
    if (!s && f->c.family->qk_norm)
        s = norm(f, l, "self_attn.q_norm", f->c.head_dim, &y->q_norm, e);
    if (!s && f->c.family->qk_norm)
        s = norm(f, l, "self_attn.k_norm", f->c.head_dim, &y->k_norm, e);
    if (!s && f->c.family->sinks)
        s = vector(f, name_of(name, l, "self_attn.sinks", 0, ""), f->c.n_heads, 0, &y->sinks, e);
    return s;
}

/*
 * W_UK and W_UV of every head, out of kv_b_proj [n_heads][nope_dim + v_dim][kv_rank]; W_UK transposed. Always COMPUTE_F32: they
 * are small, and stand between attention and what would be rounded before and after them anyway.
 */
static enum td_status open_heads(struct forward *f, uint32_t l, struct td_error *e)
{
    const struct model_latent *m = &f->c.latent;
    struct attention *y = &f->layers[l].attention;
    struct part_name name = {"self_attn.kv_b_proj", f->c.n_heads * (m->nope_dim + m->v_dim), false};
    struct k_matrix_part all;
    enum td_status s = find_part(f, l, 0, &name, m->kv_rank, &all, e);
    y->to_latent = mem_array(f->c.n_heads, sizeof(struct k_matrix *));
    y->value = mem_array(f->c.n_heads, sizeof(struct k_matrix *));
    for (uint32_t h = 0; h < f->c.n_heads && !s; h++) {
        size_t row_bytes = m->kv_rank * num_type_bytes(all.type), first = (size_t)h * (m->nope_dim + m->v_dim);
        struct k_matrix_part up = {.data = (const uint8_t *)all.data + first * row_bytes, .type = all.type},
                             value = {.data = (const uint8_t *)all.data + (first + m->nope_dim) * row_bytes,
                                      .type = all.type,
                                      .n_out = m->v_dim};
        up.n_out = m->kv_rank;
        up.out_stride = 1;
        up.in_stride = m->kv_rank;
        s = pack(f, l, &up, 1, m->nope_dim, COMPUTE_F32, &y->to_latent[h], e);
        if (!s)
            s = pack(f, l, &value, 1, m->kv_rank, COMPUTE_F32, &y->value[h], e);
    }
    return s;
}

static enum td_status open_latent(struct forward *f, uint32_t l, struct td_error *e)
{
    const struct model_latent *m = &f->c.latent;
    struct attention *y = &f->layers[l].attention;
    uint32_t q = f->c.n_heads * f->c.head_dim;
    const struct part_name in[] = {
        {m->q_rank ? "self_attn.q_a_proj" : "self_attn.q_proj", m->q_rank ? m->q_rank : q, false},
        {"self_attn.kv_a_proj_with_mqa", m->kv_rank + m->rope_dim, false}};
    const struct part_name q_b[] = {{"self_attn.q_b_proj", q, false}};
    enum td_status s = project(f, l, 0, in, 2, f->c.hidden, f->compute, &y->in, e);
    if (!s)
        s = norm(f, l, "self_attn.kv_a_layernorm", m->kv_rank, &y->k_norm, e);
    if (!s && m->q_rank)
        s = norm(f, l, "self_attn.q_a_layernorm", m->q_rank, &y->q_norm, e);
    if (!s && m->q_rank)
        s = project(f, l, 0, q_b, 1, m->q_rank, f->compute, &y->q_b, e);
    return s ? s : open_heads(f, l, e);
}

static enum td_status open_attention(struct forward *f, uint32_t l, struct td_error *e)
{
    struct attention *y = &f->layers[l].attention;
    const struct part_name out[] = {{"self_attn.o_proj", f->c.hidden, f->c.out_bias}};
    enum td_status s = norm(f, l, "input_layernorm", f->c.hidden, &y->norm, e);
    if (!s && f->c.family->norms_after)
        s = norm(f, l, "post_attention_layernorm", f->c.hidden, &y->norm_after, e);
    if (!s)
        s = f->c.family->latent ? open_latent(f, l, e) : open_plain(f, l, e);
    return s ? s : project(f, l, 0, out, 1, f->c.n_heads * f->value_dim, f->compute, &y->out, e);
}

/* -------------------------------------------------------------- feed-forward */

/* names: gate, up, down; up NULL: gate is both. */
static enum td_status open_mlp(struct forward *f, uint32_t l, uint32_t number, const char *const names[3], uint32_t dim,
                               struct mlp *out, struct td_error *e)
{
    bool bias = f->c.mlp_bias;
    const struct part_name gate_up[] = {{names[0], names[1] ? dim : 2 * dim, bias}, {names[1], dim, bias}},
                           down[] = {{names[2], f->c.hidden, bias}};
    enum td_status s = project(f, l, number, gate_up, names[1] ? 2 : 1, f->c.hidden, f->compute, &out->gate_up, e);
    return s ? s : project(f, l, number, down, 1, dim, f->compute, &out->down, e);
}

static enum td_status stack(const struct forward *f, uint32_t l, const char *kind, uint64_t rows, uint64_t cols,
                            const struct tensor **out, struct td_error *e)
{
    char name[MAX_NAME];
    name_of(name, l, "mlp.experts.", 0, kind);
    return cols ? model_tensor_stack(f->model, name, f->c.moe.n_experts, rows, cols, out, e)
                : model_tensor(f->model, name, f->c.moe.n_experts, rows, out, e);
}

static const void *at(const struct tensor *t, size_t element)
{
    return (const uint8_t *)t->data + element * num_type_bytes(t->type);
}

/*
 * gpt-oss: gate_up_proj [E][hidden][2 dim] with gate and up in turns, down_proj [E][dim][hidden], and a bias for each: inputs by
 * outputs, so outputs are neighbours.
 */
static enum td_status open_stacked(struct forward *f, uint32_t l, struct mlp *experts, struct td_error *e)
{
    const struct tensor *in, *in_bias, *down, *down_bias;
    size_t hidden = f->c.hidden, dim = f->c.moe.intermediate;
    enum td_status s = stack(f, l, "gate_up_proj", hidden, 2 * dim, &in, e);
    if (!s)
        s = stack(f, l, "gate_up_proj_bias", 2 * dim, 0, &in_bias, e);
    if (!s)
        s = stack(f, l, "down_proj", dim, hidden, &down, e);
    if (!s)
        s = stack(f, l, "down_proj_bias", hidden, 0, &down_bias, e);
    for (size_t i = 0; i < f->c.moe.n_experts && !s; i++) {
        struct k_matrix_part gate_up[2], out = {.data = at(down, i * dim * hidden),
                                                .type = down->type,
                                                .n_out = (uint32_t)hidden,
                                                .out_stride = 1,
                                                .in_stride = hidden,
                                                .bias = at(down_bias, i * hidden),
                                                .bias_type = down_bias->type};
        for (size_t j = 0; j < 2; j++)
            gate_up[j] = (struct k_matrix_part){.data = at(in, i * hidden * 2 * dim + j),
                                                .type = in->type,
                                                .n_out = (uint32_t)dim,
                                                .out_stride = 2,
                                                .in_stride = 2 * dim,
                                                .bias = at(in_bias, i * 2 * dim + j),
                                                .bias_type = in_bias->type,
                                                .bias_stride = 2};
        s = pack(f, l, gate_up, 2, (uint32_t)hidden, f->compute, &experts[i].gate_up, e);
        if (!s)
            s = pack(f, l, &out, 1, (uint32_t)dim, f->compute, &experts[i].down, e);
    }
    return s;
}

static enum td_status open_shared(struct forward *f, uint32_t l, struct td_error *e)
{
    struct feed_forward *y = &f->layers[l].feed_forward;
    const char *shared = f->c.family->shared;
    char gate[64], up[64], down[64];
    snprintf(gate, sizeof(gate), "%s.gate_proj", shared);
    snprintf(up, sizeof(up), "%s.up_proj", shared);
    snprintf(down, sizeof(down), "%s.down_proj", shared);
    enum td_status s =
        open_mlp(f, l, 0, (const char *const[]){gate, up, down}, f->c.moe.shared_intermediate, &y->dense, e);
    if (s || !f->c.family->shared_gate)
        return s;
    snprintf(gate, sizeof(gate), "%s_gate", shared);
    return project(f, l, 0, &(struct part_name){gate, 1, false}, 1, f->c.hidden, COMPUTE_F32, &y->gate, e);
}

static enum td_status open_experts(struct forward *f, uint32_t l, struct td_error *e)
{
    struct feed_forward *y = &f->layers[l].feed_forward;
    const struct model_family *family = f->c.family;
    const char *const names[] = {family->expert_gate, family->expert_up, family->expert_down};
    bool stacked = !family->expert_gate;
    const struct part_name router[] = {{family->router, f->c.moe.n_experts, stacked}};
    enum td_status s = project(f, l, 0, router, 1, f->c.hidden, COMPUTE_F32, &y->router, e);
    y->experts = mem_array(f->c.moe.n_experts, sizeof(*y->experts));
    if (!s && stacked)
        s = open_stacked(f, l, y->experts, e);
    for (uint32_t i = 0; i < f->c.moe.n_experts && !s && !stacked; i++)
        s = open_mlp(f, l, i, names, f->c.moe.intermediate, &y->experts[i], e);
    return s || !f->c.moe.shared_intermediate ? s : open_shared(f, l, e);
}

static enum td_status open_feed_forward(struct forward *f, uint32_t l, struct td_error *e)
{
    static const char *const SPLIT[] = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}, *const FUSED[] = {
                                                                                              "mlp.gate_up_proj", NULL,
                                                                                              "mlp.down_proj"};
    struct feed_forward *y = &f->layers[l].feed_forward;
    const struct model_family *family = f->c.family;
    const char *before = family->norms_after ? "pre_feedforward_layernorm" : "post_attention_layernorm";
    enum td_status s = norm(f, l, before, f->c.hidden, &y->norm, e);
    if (!s && family->norms_after)
        s = norm(f, l, "post_feedforward_layernorm", f->c.hidden, &y->norm_after, e);
    if (s)
        return s;
    if (f->c.layers[l] & LAYER_MOE)
        return open_experts(f, l, e);
    return open_mlp(f, l, 0, family->fused_gate_up ? FUSED : SPLIT, f->c.intermediate, &y->dense, e);
}

/* ------------------------------------------------------------- ends, scratch */

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
    f->embedding_scale = f->c.family->scaled_embedding ? sqrtf((float)f->c.hidden) : 1;
    struct k_matrix_part part = {.data = t->data, .type = t->type, .n_out = f->c.vocab_size};
    s = k_matrix_pack(f->kernels, &part, 1, f->c.hidden, f->compute, &f->head);
    return s ? td_fail(e, s, "no memory for the packed output matrix")
             : vector(f, "model.norm.weight", f->c.hidden, f->c.family->norm_offset, &f->final_norm, e);
}

static enum td_status no_memory(const struct forward *f, struct td_error *e)
{
    return td_fail(e, TD_ERR_NO_MEMORY, "no memory for the forward pass of %u rows", f->max_rows);
}

static enum td_status open_rope(struct forward *f, struct td_error *e)
{
    uint32_t half = f->c.rotary_dim / 2, n_tables = f->c.family->two_ropes ? 2 : 1;
    double *inv_freq = mem_array(half, sizeof(*inv_freq));
    enum td_status s = TD_OK;
    for (uint32_t i = 0; i < n_tables && !s; i++) {
        const struct model_rope *r = &f->c.rope[i];
        size_t n = (size_t)f->max_positions * half * 2, n_sets = r->type == ROPE_LONGROPE ? 2 : 1;
        void *p = NULL;
        if (mem_try(n_sets * n * sizeof(float), &p))
            s = no_memory(f, e);
        f->cos_sin[i] = p;
        for (size_t set = 0; set < n_sets && !s; set++) {
            double scale = model_config_rope(&f->c, r, set == 1, inv_freq);
            k_rope_table(inv_freq, half, f->max_positions, scale, f->cos_sin[i] + set * n);
        }
    }
    free(inv_freq);
    for (uint32_t i = 0; i < 2; i++)
        f->rope[i] = (struct k_rotary){f->cos_sin[i < n_tables ? i : 0], f->c.rotary_dim, f->c.family->latent};
    return s;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static enum td_status open_scratch(struct forward *f, struct td_error *e)
{
    const struct model_moe *m = &f->c.moe;
    const struct model_latent *y = &f->c.latent;
    struct routes *r = &f->routes;
    bool latent = f->c.family->latent;
    size_t rows = f->max_rows, heads = f->c.n_heads, row = latent ? y->kv_rank + y->rope_dim : 0;
    size_t mlp = larger(f->c.intermediate, larger((size_t)m->n_used * m->intermediate, m->shared_intermediate));
    r->n_slots = m->n_used + (m->shared_intermediate > 0);
    size_t slots = rows * r->n_slots;
    const struct {
        void *at; /* of a pointer to 4-byte numbers */
        size_t n;
    } buffers[] = {{&f->x, rows * f->c.hidden},
                   {&f->normed, rows * f->c.hidden},
                   {&f->in, rows * f->in_dim},
                   {&f->attn, rows * heads * f->value_dim},
                   {&f->mlp, rows * 2 * mlp},
                   {&f->hidden, rows * mlp},
                   {&f->q, y->q_rank ? rows * heads * f->c.head_dim : 0},
                   {&f->latent_q, rows * heads * row},
                   {&f->latent_out, latent ? rows * heads * y->kv_rank : 0},
                   {&f->logits, rows * m->n_experts},
                   {&f->sorted, rows * m->n_used * f->c.hidden},
                   {&f->expert_out, slots * f->c.hidden},
                   {&f->rope_rows, rows},
                   {&r->experts, slots},
                   {&r->weights, slots},
                   {&r->slots, slots},
                   {&r->slot_row, rows * m->n_used},
                   {&r->first, m->n_experts + 1ul}};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        void *p = NULL;
        if (buffers[i].n && mem_try(buffers[i].n * 4, &p))
            return no_memory(f, e);
        memcpy(buffers[i].at, &p, sizeof(p));
    }
    r->groups = mem_array(larger(m->n_experts, heads), sizeof(*r->groups));
    return TD_OK;
}

/* ------------------------------------------------------------- open, close */

static void fill_shape(struct forward *f)
{
    const struct model_latent *m = &f->c.latent;
    if (f->c.family->latent) {
        f->in_dim = (m->q_rank ? m->q_rank : f->c.n_heads * f->c.head_dim) + m->kv_rank + m->rope_dim;
        f->value_dim = m->v_dim;
    } else {
        f->in_dim = (f->c.n_heads + 2 * f->c.n_kv_heads) * f->c.head_dim;
        f->value_dim = f->c.head_dim;
    }
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
    f->max_positions = config->max_positions;
    fill_shape(f);
    f->layers = mem_array(f->c.n_layers, sizeof(*f->layers));
    enum td_status s = TD_OK;
    for (uint32_t l = 0; l < f->c.n_layers && !s; l++) {
        s = open_attention(f, l, error_out);
        if (!s)
            s = open_feed_forward(f, l, error_out);
    }
    if (!s)
        s = open_ends(f, error_out);
    if (!s)
        s = open_rope(f, error_out);
    if (!s)
        s = open_scratch(f, error_out);
    if (s) {
        forward_close(f);
        return s;
    }
    *out = f;
    return TD_OK;
}

/* Every matrix that was packed. */
static void each_matrix(const struct forward *f, void (*each)(void *user, struct k_matrix *m), void *user)
{
    each(user, f->head);
    for (uint32_t l = 0; l < f->c.n_layers; l++) {
        const struct attention *a = &f->layers[l].attention;
        const struct feed_forward *y = &f->layers[l].feed_forward;
        struct k_matrix *const all[] = {a->in, a->out, a->q_b, y->dense.gate_up, y->dense.down, y->router, y->gate};
        for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
            each(user, all[i]);
        for (uint32_t h = 0; h < f->c.n_heads && a->to_latent; h++) {
            each(user, a->to_latent[h]);
            each(user, a->value[h]);
        }
        for (uint32_t i = 0; i < f->c.moe.n_experts && y->experts; i++) {
            each(user, y->experts[i].gate_up);
            each(user, y->experts[i].down);
        }
    }
}

static void free_matrix(void *user, struct k_matrix *m)
{
    (void)user;
    k_matrix_free(m);
}

void forward_close(struct forward *f)
{
    if (!f)
        return;
    each_matrix(f, free_matrix, NULL);
    for (uint32_t l = 0; l < f->c.n_layers; l++) {
        struct attention *a = &f->layers[l].attention;
        struct feed_forward *y = &f->layers[l].feed_forward;
        void *const all[] = {a->norm,      a->norm_after, a->q_norm, a->k_norm,     a->sinks,
                             a->to_latent, a->value,      y->norm,   y->norm_after, y->experts};
        for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
            free(all[i]);
    }
    struct routes *r = &f->routes;
    void *const buffers[] = {f->final_norm, f->cos_sin[0], f->cos_sin[1], f->x,         f->normed,   f->in,
                             f->attn,       f->mlp,        f->hidden,     f->q,         f->latent_q, f->latent_out,
                             f->logits,     f->sorted,     f->expert_out, f->rope_rows, r->experts,  r->weights,
                             r->slots,      r->slot_row,   r->first,      r->groups,    f->layers};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++)
        free(buffers[i]);
    free(f);
}

static void add_bytes(void *user, struct k_matrix *m)
{
    *(uint64_t *)user += m ? k_matrix_bytes(m) : 0;
}

uint64_t forward_weight_bytes(const struct forward *f)
{
    uint64_t n = 0;
    each_matrix(f, add_bytes, &n);
    return n;
}
