/*
 * Finds the weights by the names that a family gives them, and packs them for the kernels.
 *
 * A weight may be several tensors (q, k, v), one tensor (fused), or a slice of one (an expert of gpt-oss, a
 * head of latent attention, a rank's share); it may be transposed or interleaved. Parts describe where it is,
 * so that pack() need not know.
 *
 * The order in which matrices are packed is a part of the format of shared files (engine/weight_file.h).
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/forward_internal.h"

enum { MAX_NAME = 160 };

/* For small matrices that decide much: routers, gates, and those between attention and the latent. */
static const struct packed_form EXACT = {COMPUTE_F32, WEIGHTS_AS_STORED};

/* ------------------------------------------------------------------- tensors */

/* "model.layers.LAYER.NAME" + kind; a %u in name stands for `number`, that of an expert. */
static const char *name_of(char out[MAX_NAME], uint32_t layer, const char *name, uint32_t number, const char *kind)
{
    const char *at = strstr(name, "%u");
    if (at)
        snprintf(out, MAX_NAME, "model.layers.%u.%.*s%u%s%s", layer, (int)(at - name), name, number, at + 2, kind);
    else
        snprintf(out, MAX_NAME, "model.layers.%u.%s%s", layer, name, kind);
    return out;
}

/* A vector as f32, with offset added (norms that store w - 1). Every rank has all of it. */
static enum td_status vector(const struct forward *f, const char *name, uint32_t n, float offset, float **out,
                             struct td_error *e)
{
    const struct tensor *t;
    enum td_status s = model_tensor(f->model, name, n, 0, &t, e);
    if (s)
        return s;
    float *host = mem_array(n, sizeof(*host));
    k_convert_to_f32(t->data, t->type, n, host);
    for (uint32_t i = 0; i < n && offset != 0; i++)
        host[i] += offset;
    s = forward_numbers(f, host, n, out, e);
    free(host);
    return s;
}

static enum td_status norm(const struct forward *f, uint32_t layer, const char *name, uint32_t n, float **out,
                           struct td_error *e)
{
    char full[MAX_NAME];
    return vector(f, name_of(full, layer, name, 0, ".weight"), n, f->c.family->norm_offset, out, e);
}

/* ------------------------------------------------------------------- packing */

/*
 * Takes the next matrix from the mapped file. The data of the parts may be NULL. TD_NOT_YET: the matrix must
 * be packed.
 */
static enum td_status view(const struct forward *f, const struct k_matrix_part *parts, uint32_t n, uint32_t n_in,
                           struct packed_form form, struct k_matrix **out)
{
    uint64_t len_bytes;
    const void *data = weight_cache_next(f->cache, &len_bytes);
    enum td_status s = TD_NOT_YET;
    if (data)
        s = k_matrix_view(f->kernels, parts, n, n_in, form.compute, form.weights, data, len_bytes, out);
    if (s < 0) {
        weight_cache_refuse(f->cache, "a matrix has another size");
        s = TD_NOT_YET;
    }
    return s;
}

/* Packs a matrix and, if this process builds the shared file, adds it there. */
static enum td_status pack_new(struct forward *f, const struct k_matrix_part *parts, uint32_t n, uint32_t n_in,
                               struct packed_form form, struct k_matrix **out)
{
    enum td_status s = k_matrix_pack(f->kernels, parts, n, n_in, form.compute, form.weights, out);
    if (s || !weight_cache_is_building(f->cache))
        return s;
    weight_cache_add(f->cache, k_matrix_data(f->kernels, *out), k_matrix_bytes(f->kernels, *out));
    f->added = MEM_ROOM(f->added, f->n_added, f->cap_added, 64);
    f->added[f->n_added++] = *out;
    return TD_OK;
}

static enum td_status pack(struct forward *f, uint32_t layer, const struct k_matrix_part *parts, uint32_t n,
                           uint32_t n_in, struct packed_form form, struct k_matrix **out, struct td_error *e)
{
    enum td_status s = view(f, parts, n, n_in, form, out);
    if (s == TD_NOT_YET)
        s = pack_new(f, parts, n, n_in, form, out);
    return s ? td_fail(e, s, "no memory for the packed weights of layer %u", layer) : TD_OK;
}

struct weight_cache *forward_open_cache(const struct forward_config *config)
{
    const struct forward_rank *r = &config->rank;
    if (!config->weight_cache || kernels_config(config->kernels)->device != DEVICE_CPU)
        return NULL;
    const struct weight_cache_key key = {.model = model_fingerprint(config->model),
                                         .isa = kernels_isa_name(config->kernels),
                                         .compute = config->compute,
                                         .weights = config->weights,
                                         .rank = r->rank,
                                         .n_tensor = r->n_tensor,
                                         .first_layer = r->first_layer,
                                         .end_layer = r->end_layer};
    return weight_cache_open(config->weight_cache, &key, config->log);
}

/* --------------------------------------------------------------------- parts */

/* All n outputs of a tensor. */
static struct part_name whole(const char *name, uint32_t n, bool bias)
{
    return (struct part_name){name, n, 0, n, bias};
}

/* This rank's share of a tensor's outputs. */
static struct part_name share_of(const struct forward *f, const struct share *s, const char *name, bool bias)
{
    return (struct part_name){name, s->first[f->rank.n_tensor], own_first(f, s), own(f, s), bias};
}

/* Outputs first .. first + n_out - 1 of a matrix. */
static struct k_matrix_part part_of(const struct model_matrix *w, uint32_t first, uint32_t n_out, uint32_t n_in)
{
    size_t at = (size_t)first * n_in * num_type_bytes(w->t->type);
    struct k_matrix_part part = {.data = (const uint8_t *)w->t->data + at, .type = w->t->type, .n_out = n_out};
    if (w->scales)
        part.scales =
            (struct k_scales){w->scales->data, w->scales->type, w->out_block, w->in_block, w->out_stride, 1, first, 0};
    return part;
}

/* Finds a tensor and its bias, and checks their shapes. */
static enum td_status find_part(const struct forward *f, uint32_t layer, uint32_t number, const struct part_name *p,
                                uint32_t n_in, struct k_matrix_part *out, struct td_error *e)
{
    char name[MAX_NAME];
    const struct tensor *bias = NULL;
    struct model_matrix w;
    enum td_status s = model_matrix(f->model, name_of(name, layer, p->name, number, ".weight"), p->n_all, n_in, &w, e);
    if (!s && p->bias)
        s = model_tensor(f->model, name_of(name, layer, p->name, number, ".bias"), p->n_all, 0, &bias, e);
    if (s)
        return s;
    *out = part_of(&w, p->first, p->n_out, n_in);
    if (bias) {
        out->bias = (const uint8_t *)bias->data + p->first * num_type_bytes(bias->type);
        out->bias_type = bias->type;
    }
    return TD_OK;
}

/* Packs the named projections of a layer (or of its expert `number`) as one matrix, one below the other. */
static enum td_status project(struct forward *f, uint32_t layer, uint32_t number, const struct part_name *names,
                              uint32_t n, uint32_t n_in, struct packed_form form, struct k_matrix **out,
                              struct td_error *e)
{
    struct k_matrix_part parts[MAX_PARTS];
    for (uint32_t i = 0; i < n; i++) {
        enum td_status s = find_part(f, layer, number, &names[i], n_in, &parts[i], e);
        if (s)
            return s;
    }
    return pack(f, layer, parts, n, n_in, form, out, e);
}

/* The same for a matrix that adapters may change. */
static enum td_status project_adapted(struct forward *f, uint32_t layer, const struct part_name *names, uint32_t n,
                                      uint32_t n_in, struct projection *out, struct td_error *e)
{
    enum td_status s = project(f, layer, 0, names, n, n_in, f->form, &out->matrix, e);
    return s ? s : forward_lora_open(f, layer, names, n, n_in, &out->lora, e);
}

/* Packs matrix `number` of a stack. */
typedef enum td_status (*pack_one)(struct forward *f, uint32_t layer, uint32_t number, struct k_matrix **out,
                                   struct td_error *e);

/* A stack of n matrices, packed by one(). */
static enum td_status pack_stack(struct forward *f, uint32_t layer, uint32_t n, pack_one one, struct k_stack **out,
                                 struct td_error *e)
{
    struct k_matrix **all = mem_array(n, sizeof(struct k_matrix *));
    enum td_status s = TD_OK;
    for (uint32_t i = 0; i < n && !s; i++)
        s = one(f, layer, i, &all[i], e);
    if (!s && k_stack_open(f->kernels, all, n, out))
        s = forward_no_memory(f, e);
    for (uint32_t i = 0; i < n && s; i++)
        k_matrix_free(f->kernels, all[i]);
    free(all);
    return s;
}

/* ----------------------------------------------------------------- attention */

static enum td_status open_plain(struct forward *f, uint32_t l, struct td_error *e)
{
    struct attention_weights *w = &f->layers[l].attention;
    uint32_t dim = f->c.head_dim, all_q = f->c.n_heads * dim, all_kv = f->c.n_kv_heads * dim, all = all_q + 2 * all_kv;
    uint32_t q = own(f, &f->share.heads) * dim, first_q = own_first(f, &f->share.heads) * dim;
    uint32_t kv = own(f, &f->share.kv_heads) * dim, first_kv = own_first(f, &f->share.kv_heads) * dim;
    bool bias = f->c.qkv_bias;
    const struct part_name split[] = {{"self_attn.q_proj", all_q, first_q, q, bias},
                                      {"self_attn.k_proj", all_kv, first_kv, kv, bias},
                                      {"self_attn.v_proj", all_kv, first_kv, kv, bias}};
    const struct part_name fused[] = {{"self_attn.qkv_proj", all, first_q, q, bias},
                                      {"self_attn.qkv_proj", all, all_q + first_kv, kv, bias},
                                      {"self_attn.qkv_proj", all, all_q + all_kv + first_kv, kv, bias}};
    char name[MAX_NAME];
    const struct part_name *names = f->c.family->fused_qkv ? fused : split;
    enum td_status s = project_adapted(f, l, names, 3, f->c.hidden, &w->in, e);
    if (!s && f->c.family->qk_norm)
        s = norm(f, l, "self_attn.q_norm", f->c.head_dim, &w->q_norm, e);
    if (!s && f->c.family->qk_norm)
        s = norm(f, l, "self_attn.k_norm", f->c.head_dim, &w->k_norm, e);
    if (!s && f->c.family->sinks)
        s = vector(f, name_of(name, l, "self_attn.sinks", 0, ""), f->c.n_heads, 0, &w->sinks, e);
    return s;
}

/*
 * W_UK (transposed) or, if value, W_UV of one of the rank's heads, from kv_b_proj [n_heads][nope_dim +
 * v_dim][kv_rank]. Always COMPUTE_F32: they are small, and the results before and after them are rounded
 * anyway.
 */
static enum td_status pack_head(struct forward *f, uint32_t l, uint32_t head, bool value, struct k_matrix **out,
                                struct td_error *e)
{
    const struct model_latent *m = &f->c.latent;
    const struct part_name name = whole("self_attn.kv_b_proj", f->c.n_heads * (m->nope_dim + m->v_dim), false);
    struct k_matrix_part p;
    enum td_status s = find_part(f, l, 0, &name, m->kv_rank, &p, e);
    if (s)
        return s;
    size_t first =
        (size_t)(own_first(f, &f->share.heads) + head) * (m->nope_dim + m->v_dim) + (value ? m->nope_dim : 0);
    p.data = (const uint8_t *)p.data + first * m->kv_rank * num_type_bytes(p.type);
    p.scales.first_out = (uint32_t)first;
    p.n_out = value ? m->v_dim : m->kv_rank;
    if (!value) {
        const struct k_scales b = p.scales;
        p.scales = (struct k_scales){b.data,      b.type,       b.in_block, b.out_block,
                                     b.in_stride, b.out_stride, b.first_in, b.first_out};
        p.out_stride = 1;
        p.in_stride = m->kv_rank;
    }
    return pack(f, l, &p, 1, value ? m->kv_rank : m->nope_dim, EXACT, out, e);
}

static enum td_status pack_to_latent(struct forward *f, uint32_t l, uint32_t head, struct k_matrix **out,
                                     struct td_error *e)
{
    return pack_head(f, l, head, false, out, e);
}

static enum td_status pack_value(struct forward *f, uint32_t l, uint32_t head, struct k_matrix **out,
                                 struct td_error *e)
{
    return pack_head(f, l, head, true, out, e);
}

/* The share of q that belongs to the rank's heads. */
static struct part_name latent_q(const struct forward *f, const char *name)
{
    uint32_t dim = f->c.head_dim;
    return (struct part_name){name, f->c.n_heads * dim, own_first(f, &f->share.heads) * dim,
                              own(f, &f->share.heads) * dim, false};
}

static enum td_status pack_q_b(struct forward *f, uint32_t l, uint32_t number, struct k_matrix **out,
                               struct td_error *e)
{
    const struct part_name q_b = latent_q(f, "self_attn.q_b_proj");
    return project(f, l, number, &q_b, 1, f->c.latent.q_rank, f->form, out, e);
}

static enum td_status open_latent(struct forward *f, uint32_t l, struct td_error *e)
{
    const struct model_latent *m = &f->c.latent;
    struct attention_weights *w = &f->layers[l].attention;
    const struct part_name in[] = {m->q_rank ? whole("self_attn.q_a_proj", m->q_rank, false)
                                             : latent_q(f, "self_attn.q_proj"),
                                   whole("self_attn.kv_a_proj_with_mqa", m->kv_rank + m->rope_dim, false)};
    uint32_t n_heads = own(f, &f->share.heads);
    enum td_status s = project(f, l, 0, in, 2, f->c.hidden, f->form, &w->in.matrix, e);
    if (!s)
        s = norm(f, l, "self_attn.kv_a_layernorm", m->kv_rank, &w->k_norm, e);
    if (!s && m->q_rank)
        s = norm(f, l, "self_attn.q_a_layernorm", m->q_rank, &w->q_norm, e);
    if (!s && m->q_rank)
        s = pack_stack(f, l, 1, pack_q_b, &w->q_b, e);
    if (!s)
        s = pack_stack(f, l, n_heads, pack_to_latent, &w->to_latent, e);
    return s ? s : pack_stack(f, l, n_heads, pack_value, &w->value, e);
}

static enum td_status open_attention(struct forward *f, uint32_t l, struct td_error *e)
{
    struct attention_weights *w = &f->layers[l].attention;
    const struct part_name out = share_of(f, &f->share.hidden, "self_attn.o_proj", f->c.out_bias);
    enum td_status s = norm(f, l, "input_layernorm", f->c.hidden, &w->norm, e);
    if (!s && f->c.family->norms_after)
        s = norm(f, l, "post_attention_layernorm", f->c.hidden, &w->norm_after, e);
    if (!s)
        s = f->c.family->latent ? open_latent(f, l, e) : open_plain(f, l, e);
    return s ? s : project_adapted(f, l, &out, 1, f->c.n_heads * f->value_dim, &w->out, e);
}

/* -------------------------------------------------------------- feed-forward */

/* Parts of gate and up. up NULL: the tensor `gate` has both, gate first. */
static void name_gate_up(const struct forward *f, const char *gate, const char *up, const struct share *s,
                         struct part_name out[2])
{
    out[0] = share_of(f, s, gate, f->c.mlp_bias);
    out[1] = share_of(f, s, up ? up : gate, f->c.mlp_bias);
    if (!up) {
        out[1].first += out[0].n_all;
        out[0].n_all = out[1].n_all *= 2;
    }
}

static enum td_status expert_gate_up(struct forward *f, uint32_t l, uint32_t expert, struct k_matrix **out,
                                     struct td_error *e)
{
    struct part_name names[2];
    name_gate_up(f, f->c.family->expert_gate, f->c.family->expert_up, &f->share.expert, names);
    return project(f, l, expert, names, 2, f->c.hidden, f->form, out, e);
}

static enum td_status expert_down(struct forward *f, uint32_t l, uint32_t expert, struct k_matrix **out,
                                  struct td_error *e)
{
    const struct part_name name = share_of(f, &f->share.hidden, f->c.family->expert_down, f->c.mlp_bias);
    return project(f, l, expert, &name, 1, f->c.moe.intermediate, f->form, out, e);
}

/*
 * The experts of gpt-oss: gate_up_proj [E][hidden][2 dim], in which gate and up alternate, down_proj
 * [E][dim][hidden], and a bias for each. Both are inputs by outputs, so the outputs of an input are
 * neighbours; in MXFP4 they are outputs by inputs. A matrix of one expert is packed as `step` parts, each of
 * which takes every step-th output.
 */
struct stacked {
    const char *kind;
    uint32_t n_in, n_out, step;
    const struct share *share; /* divides n_out / step outputs among the ranks */
    uint16_t *numbers;         /* [n_out][n_in] of an MXFP4 matrix, which the caller frees */
    const void *data;
    enum num_type type;
    const struct tensor *bias; /* [E][n_out] */
};

/* Finds and checks the tensors. For MXFP4, data stays NULL until stacked_widen(). */
static enum td_status stacked_open(const struct forward *f, uint32_t l, uint32_t expert, struct stacked *t,
                                   struct td_error *e)
{
    char name[MAX_NAME], with_bias[64];
    const struct tensor *w;
    uint32_t n = f->c.moe.n_experts;
    t->n_out = t->share->first[f->rank.n_tensor] * t->step;
    size_t numbers = (size_t)t->n_in * t->n_out;
    snprintf(with_bias, sizeof(with_bias), "%s_bias", t->kind);
    enum td_status s = model_tensor(f->model, name_of(name, l, "mlp.experts.", 0, with_bias), n, t->n_out, &t->bias, e);
    name_of(name, l, "mlp.experts.", 0, t->kind);
    if (!s && f->c.mxfp4) {
        t->type = NUM_BF16;
        return model_mxfp4(f->model, name, n, expert, t->n_out, t->n_in, NULL, e);
    }
    if (!s)
        s = model_tensor_stack(f->model, name, n, t->n_in, t->n_out, &w, e);
    if (s)
        return s;
    t->type = w->type;
    t->data = (const uint8_t *)w->data + expert * numbers * num_type_bytes(w->type);
    return TD_OK;
}

/* Converts MXFP4 to bf16 numbers. Only for matrices that must be packed, because it takes long. */
static enum td_status stacked_widen(const struct forward *f, uint32_t l, uint32_t expert, struct stacked *t,
                                    struct td_error *e)
{
    char name[MAX_NAME];
    if (!f->c.mxfp4)
        return TD_OK;
    t->numbers = mem_array((size_t)t->n_in * t->n_out, sizeof(*t->numbers));
    t->data = t->numbers;
    return model_mxfp4(f->model, name_of(name, l, "mlp.experts.", 0, t->kind), f->c.moe.n_experts, expert, t->n_out,
                       t->n_in, t->numbers, e);
}

/* The rank's share of an expert's outputs first, first + step, ... */
static struct k_matrix_part stacked_part(const struct forward *f, const struct stacked *t, uint32_t expert,
                                         uint32_t first)
{
    first += own_first(f, t->share) * t->step;
    size_t out_stride = f->c.mxfp4 ? t->n_in : 1, bias_at = (size_t)expert * t->n_out + first;
    size_t data_at = first * out_stride * num_type_bytes(t->type);
    return (struct k_matrix_part){.data = t->data ? (const uint8_t *)t->data + data_at : NULL,
                                  .type = t->type,
                                  .n_out = own(f, t->share),
                                  .out_stride = t->step * out_stride,
                                  .in_stride = f->c.mxfp4 ? 1 : t->n_out,
                                  .bias = (const uint8_t *)t->bias->data + bias_at * num_type_bytes(t->bias->type),
                                  .bias_type = t->bias->type,
                                  .bias_stride = t->step};
}

static enum td_status pack_stacked(struct forward *f, uint32_t l, uint32_t expert, struct stacked *t,
                                   struct k_matrix **out, struct td_error *e)
{
    struct k_matrix_part parts[2];
    enum td_status s = stacked_open(f, l, expert, t, e);
    for (uint32_t i = 0; i < t->step && !s; i++)
        parts[i] = stacked_part(f, t, expert, i);
    if (s || view(f, parts, t->step, t->n_in, f->form, out) != TD_NOT_YET)
        return s;
    s = stacked_widen(f, l, expert, t, e);
    for (uint32_t i = 0; i < t->step && !s; i++)
        parts[i] = stacked_part(f, t, expert, i);
    if (!s && (s = pack_new(f, parts, t->step, t->n_in, f->form, out)))
        td_fail(e, s, "no memory for the packed weights of layer %u", l);
    free(t->numbers);
    return s;
}

static enum td_status stacked_gate_up(struct forward *f, uint32_t l, uint32_t expert, struct k_matrix **out,
                                      struct td_error *e)
{
    struct stacked t = {.kind = "gate_up_proj", .n_in = f->c.hidden, .share = &f->share.expert, .step = 2};
    return pack_stacked(f, l, expert, &t, out, e);
}

static enum td_status stacked_down(struct forward *f, uint32_t l, uint32_t expert, struct k_matrix **out,
                                   struct td_error *e)
{
    struct stacked t = {.kind = "down_proj", .n_in = f->c.moe.intermediate, .share = &f->share.hidden, .step = 1};
    return pack_stacked(f, l, expert, &t, out, e);
}

static enum td_status open_dense(struct forward *f, uint32_t l, const char *const names[3], const struct share *share,
                                 struct td_error *e)
{
    struct mlp *w = &f->layers[l].feed_forward.dense;
    struct part_name gate_up[2], down = share_of(f, &f->share.hidden, names[2], f->c.mlp_bias);
    name_gate_up(f, names[0], names[1], share, gate_up);
    enum td_status s = project_adapted(f, l, gate_up, 2, f->c.hidden, &w->gate_up, e);
    return s ? s : project_adapted(f, l, &down, 1, share->first[f->rank.n_tensor], &w->down, e);
}

static enum td_status open_shared(struct forward *f, uint32_t l, struct td_error *e)
{
    const char *shared = f->c.family->shared;
    char gate[64], up[64], down[64];
    snprintf(gate, sizeof(gate), "%s.gate_proj", shared);
    snprintf(up, sizeof(up), "%s.up_proj", shared);
    snprintf(down, sizeof(down), "%s.down_proj", shared);
    enum td_status s = open_dense(f, l, (const char *const[]){gate, up, down}, &f->share.shared, e);
    if (s || !f->c.family->shared_gate)
        return s;
    snprintf(gate, sizeof(gate), "%s_gate", shared);
    const struct part_name name = whole(gate, 1, false);
    return project(f, l, 0, &name, 1, f->c.hidden, EXACT, &f->layers[l].feed_forward.gate, e);
}

static enum td_status open_experts(struct forward *f, uint32_t l, struct td_error *e)
{
    struct feed_forward *w = &f->layers[l].feed_forward;
    const struct model_family *family = f->c.family;
    uint32_t n = f->c.moe.n_experts;
    bool stacked = !family->expert_gate;
    const struct part_name router = whole(family->router, n, stacked);
    enum td_status s = project(f, l, 0, &router, 1, f->c.hidden, EXACT, &w->router, e);
    if (!s)
        s = pack_stack(f, l, n, stacked ? stacked_gate_up : expert_gate_up, &w->experts.gate_up, e);
    if (!s)
        s = pack_stack(f, l, n, stacked ? stacked_down : expert_down, &w->experts.down, e);
    return s || !f->c.moe.shared_intermediate ? s : open_shared(f, l, e);
}

static enum td_status open_feed_forward(struct forward *f, uint32_t l, struct td_error *e)
{
    static const char *const SPLIT[] = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}, *const FUSED[] = {
                                                                                              "mlp.gate_up_proj", NULL,
                                                                                              "mlp.down_proj"};
    struct feed_forward *w = &f->layers[l].feed_forward;
    const struct model_family *family = f->c.family;
    const char *before = family->norms_after ? "pre_feedforward_layernorm" : "post_attention_layernorm";
    enum td_status s = norm(f, l, before, f->c.hidden, &w->norm, e);
    if (!s && family->norms_after)
        s = norm(f, l, "post_feedforward_layernorm", f->c.hidden, &w->norm_after, e);
    if (s)
        return s;
    if (f->c.layers[l] & LAYER_MOE)
        return open_experts(f, l, e);
    return open_dense(f, l, family->fused_gate_up ? FUSED : SPLIT, &f->share.dense, e);
}

/* --------------------------------------------------------------------- ends */

static enum td_status open_embedding(struct forward *f, const struct tensor *t, struct td_error *e)
{
    size_t table_bytes = (size_t)f->c.vocab_size * f->c.hidden * num_type_bytes(t->type);
    f->embedding_scale = f->c.family->scaled_embedding ? sqrtf((float)f->c.hidden) : 1;
    f->embedding_type = t->type;
    enum td_status s = k_map(f->kernels, t->data, table_bytes, &f->embedding);
    if (s)
        return td_fail(e, s, "no memory for the embedding");
    k_write(f->kernels, f->embedding, t->data, table_bytes);
    return TD_OK;
}

static enum td_status open_head(struct forward *f, const struct model_matrix *w, struct td_error *e)
{
    struct packed_form form = f->form;
    if (form.weights == WEIGHTS_INT4) /* the output matrix decides most: int4 would be too coarse */
        form.weights = WEIGHTS_INT8;
    const struct k_matrix_part part = part_of(w, own_first(f, &f->share.vocab), own(f, &f->share.vocab), f->c.hidden);
    enum td_status s = view(f, &part, 1, f->c.hidden, form, &f->head);
    if (s == TD_NOT_YET)
        s = pack_new(f, &part, 1, f->c.hidden, form, &f->head);
    if (s)
        return td_fail(e, s, "no memory for the output matrix");
    return vector(f, "model.norm.weight", f->c.hidden, f->c.family->norm_offset, &f->final_norm, e);
}

/*
 * The first stage has the embedding, the last one the output matrix. A tied model may store its one matrix
 * under either name.
 */
static enum td_status open_ends(struct forward *f, struct td_error *e)
{
    const char *embed = "model.embed_tokens.weight", *head = "lm_head.weight";
    const struct tensor *embedding = NULL;
    enum td_status s = model_tensor(f->model, embed, f->c.vocab_size, f->c.hidden, &embedding, e);
    if (s == TD_ERR_NOT_FOUND && f->c.tied_embeddings)
        s = model_tensor(f->model, head, f->c.vocab_size, f->c.hidden, &embedding, e);
    struct model_matrix w = {.t = embedding};
    if (!s && !f->c.tied_embeddings)
        s = model_matrix(f->model, head, f->c.vocab_size, f->c.hidden, &w, e);
    if (!s && !f->rank.before)
        s = open_embedding(f, embedding, e);
    return s || f->rank.after ? s : open_head(f, &w, e);
}

/* Opens the layers of this rank's stage; the layers of other stages stay zeroed. */
static enum td_status open_layers(struct forward *f, const struct forward_config *config, struct td_error *e)
{
    enum td_status s = TD_OK;
    uint32_t first = f->rank.first_layer, end = f->rank.end_layer;
    bool is_telling = config->on_load && !f->rank.rank && !f->rank.before;
    for (uint32_t l = first; l < end && !s; l++) {
        s = open_attention(f, l, e);
        if (!s)
            s = open_feed_forward(f, l, e);
        if (!s && is_telling)
            config->on_load(config->load_user, l + 1 - first, end - first);
    }
    return s;
}

enum td_status forward_weights_open(struct forward *f, const struct forward_config *config, struct td_error *error_out)
{
    enum td_status s = open_layers(f, config, error_out);
    return s ? s : open_ends(f, error_out);
}

void forward_share_weights(struct forward *f)
{
    bool is_shared = weight_cache_publish(f->cache);
    for (uint32_t i = 0; i < f->n_added && is_shared; i++) {
        uint64_t len_bytes;
        k_matrix_move(f->kernels, f->added[i], weight_cache_next(f->cache, &len_bytes));
    }
    free(f->added);
    f->added = NULL;
    f->n_added = f->cap_added = 0;
}
