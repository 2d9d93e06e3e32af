/*
 * Opening and closing a forward pass: its rotary tables, its scratch memory, and freeing all of it.
 *
 * Everything that operations use is memory of the kernels (k_alloc, k_map); arrays marked host are ordinary
 * memory.
 */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/forward_internal.h"

enum td_status forward_no_memory(const struct forward *f, struct td_error *e)
{
    return td_fail(e, TD_ERR_NO_MEMORY, "no memory for the forward pass of %u rows", f->max_rows);
}

enum td_status forward_numbers(const struct forward *f, const void *host, size_t n, void *out, struct td_error *e)
{
    void *p = NULL;
    if (k_alloc(f->kernels, n * sizeof(float), &p))
        return forward_no_memory(f, e);
    if (host)
        k_write(f->kernels, p, host, n * sizeof(float));
    memcpy(out, &p, sizeof(p));
    return TD_OK;
}

/* ------------------------------------------------------------ tables, scratch */

/*
 * One table: all positions with the short frequencies; for longrope, all positions with the long ones behind
 * them.
 */
static enum td_status open_table(struct forward *f, const struct model_rope *r, float **out, struct td_error *e)
{
    uint32_t half = f->c.rotary_dim / 2, n_sets = r->type == ROPE_LONGROPE ? 2 : 1;
    size_t n = (size_t)f->max_positions * half * 2;
    double *inv_freq = mem_array(half, sizeof(*inv_freq));
    void *table = NULL;
    enum td_status s = mem_try(n_sets * n * sizeof(float), &table) ? forward_no_memory(f, e) : TD_OK;
    for (uint32_t set = 0; set < n_sets && !s; set++) {
        double scale = model_config_rope(&f->c, r, set == 1, inv_freq);
        k_rope_table(inv_freq, half, f->max_positions, scale, (float *)table + set * n);
    }
    if (!s)
        s = forward_numbers(f, table, n_sets * n, out, e);
    free(table);
    free(inv_freq);
    return s;
}

static enum td_status open_rope(struct forward *f, struct td_error *e)
{
    uint32_t n_tables = f->c.family->two_ropes ? 2 : 1;
    enum td_status s = TD_OK;
    for (uint32_t i = 0; i < n_tables && !s; i++)
        s = open_table(f, &f->c.rope[i], &f->cos_sin[i], e);
    for (uint32_t i = 0; i < 2; i++)
        f->rope[i] = (struct k_rotary){f->cos_sin[i < n_tables ? i : 0], f->c.rotary_dim, f->c.family->latent};
    return s;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Arrays of steps that are padded (forward_made); the page only if steps can be replayed. */
static enum td_status open_made(struct forward *f, struct td_error *e)
{
    struct forward_made *m = &f->made;
    void *page = NULL;
    m->ids = mem_array(f->max_rows, sizeof(*m->ids));
    m->positions = mem_array(f->max_rows, sizeof(*m->positions));
    m->n_tokens = mem_array(f->max_rows, sizeof(*m->n_tokens));
    m->logit_rows = mem_array(f->max_rows, sizeof(*m->logit_rows));
    m->seqs = mem_array(f->max_rows, sizeof(*m->seqs));
    m->draws = mem_array(f->max_rows, sizeof(*m->draws));
    if (forward_is_alone(f) && k_replay_rows(f->kernels, 1) &&
        k_alloc(f->kernels, kv_layout_page_bytes(&f->kept_layout), &page))
        return forward_no_memory(f, e);
    m->page = page;
    return TD_OK;
}

/* Maps the host memory for logits and drawn tokens, if this rank leaves them there. */
static enum td_status open_results(struct forward *f, struct td_error *e)
{
    void *logits = NULL, *sampled = NULL;
    size_t logits_bytes = (size_t)f->max_logit_rows * f->c.vocab_size * sizeof(float);
    if (f->host_logits && (k_map(f->kernels, f->host_logits, logits_bytes, &logits) ||
                           k_map(f->kernels, f->host_sampled, f->max_logit_rows * sizeof(*f->sampled), &sampled)))
        return forward_no_memory(f, e);
    f->logits = logits;
    f->sampled = sampled;
    f->own_logits = logits;
    if (!f->rank.tensor || f->rank.after)
        return TD_OK;
    return forward_numbers(f, NULL, (size_t)f->max_logit_rows * own(f, &f->share.vocab), &f->own_logits, e);
}

static enum td_status open_scratch(struct forward *f, struct td_error *e)
{
    const struct model_moe *m = &f->c.moe;
    const struct model_latent *latent_dims = &f->c.latent;
    struct routes *r = &f->routes;
    bool latent = f->c.family->latent, several = f->rank.tensor != NULL;
    size_t rows = f->max_rows, heads = own(f, &f->share.heads),
           row = latent ? latent_dims->kv_rank + latent_dims->rope_dim : 0;
    size_t expert = m->n_used * own(f, &f->share.expert), shared = own(f, &f->share.shared);
    size_t mlp = larger(own(f, &f->share.dense), larger(expert, shared));
    size_t hidden = larger(own(f, &f->share.dense), expert + shared);
    size_t all_mlp = larger(f->c.intermediate, larger((size_t)m->n_used * m->intermediate, m->shared_intermediate));
    r->n_slots = m->n_used + (m->shared_intermediate > 0);
    size_t slots = rows * r->n_slots;
    const struct {
        void *at; /* address of a pointer to 4-byte numbers */
        size_t n;
    } buffers[] = {{&f->x, rows * f->c.hidden},
                   {&f->normed, rows * f->c.hidden},
                   {&f->in, rows * f->in_dim},
                   {&f->attn, rows * heads * f->value_dim},
                   {&f->gate_up, rows * 2 * mlp},
                   {&f->hidden, rows * hidden},
                   {&f->whole, several ? rows * larger((size_t)f->c.n_heads * f->value_dim, all_mlp) : 0},
                   {&f->lora_mid, rows * f->lora_rank},
                   {&f->lora_out, rows * f->lora_n_out},
                   {&f->own, several ? rows * own(f, &f->share.hidden) : 0},
                   {&f->q, latent_dims->q_rank ? rows * heads * f->c.head_dim : 0},
                   {&f->latent_q, rows * heads * row},
                   {&f->latent_out, latent ? rows * heads * latent_dims->kv_rank : 0},
                   {&f->route_logits, rows * m->n_experts},
                   {&f->sorted, rows * m->n_used * f->c.hidden},
                   {&f->expert_out, slots * own(f, &f->share.hidden)},
                   {&r->experts, slots},
                   {&r->weights, slots},
                   {&r->slots, slots},
                   {&r->slot_row, rows * m->n_used},
                   {&r->first, m->n_experts + 1ul}};
    enum td_status s = TD_OK;
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]) && !s; i++)
        if (buffers[i].n)
            s = forward_numbers(f, NULL, buffers[i].n, buffers[i].at, e);
    f->rope_rows = mem_array(rows, sizeof(*f->rope_rows));
    f->adapter_first = mem_array(f->n_adapters + 1ul, sizeof(*f->adapter_first));
    if (!s)
        s = open_made(f, e);
    return s ? s : open_results(f, e);
}

/* ------------------------------------------------------------- open, close */

/* Columns of attention's input projection, and of one head in the input of the output projection. */
static void fill_shape(struct forward *f)
{
    const struct model_latent *m = &f->c.latent;
    if (f->c.family->latent) {
        f->in_dim = (m->q_rank ? m->q_rank : own(f, &f->share.heads) * f->c.head_dim) + m->kv_rank + m->rope_dim;
        f->value_dim = m->v_dim;
    } else {
        f->in_dim = (own(f, &f->share.heads) + 2 * own(f, &f->share.kv_heads)) * f->c.head_dim;
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
    f->form = (struct packed_form){config->compute, config->weights};
    f->max_rows = config->max_rows;
    f->max_positions = config->max_positions;
    f->host_logits = config->logits;
    f->host_sampled = config->sampled;
    f->max_logit_rows = config->max_logit_rows;
    f->arena = config->arena;
    f->rank = config->rank;
    f->cache = config->cache;
    f->adapters = config->adapters;
    f->n_adapters = config->n_adapters;
    f->rank.n_tensor = f->rank.n_tensor ? f->rank.n_tensor : 1;
    f->rank.end_layer = f->rank.end_layer ? f->rank.end_layer : f->c.n_layers;
    f->layers = mem_array(f->c.n_layers, sizeof(*f->layers));
    enum td_status s = forward_share_open(f, error_out);
    fill_shape(f);
    if (!s)
        s = forward_pages_open(f, config, error_out);
    if (!s)
        s = forward_weights_open(f, config, error_out);
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

/* What to do with every matrix and stack that was packed; NULL ones are visited, too. */
struct visitor {
    void (*matrix)(struct visitor *v, struct k_matrix *m);
    void (*stack)(struct visitor *v, struct k_stack *s);
    struct kernels *kernels;
    uint64_t len_bytes;
};

static void visit(const struct forward *f, struct visitor *v)
{
    v->kernels = f->kernels;
    v->matrix(v, f->head);
    for (uint32_t l = 0; l < f->c.n_layers; l++) {
        const struct attention_weights *a = &f->layers[l].attention;
        const struct feed_forward *ff = &f->layers[l].feed_forward;
        struct k_matrix *const matrices[] = {a->in.matrix,          a->out.matrix, ff->dense.gate_up.matrix,
                                             ff->dense.down.matrix, ff->router,    ff->gate};
        const struct lora *const adapted[] = {&a->in.lora, &a->out.lora, &ff->dense.gate_up.lora, &ff->dense.down.lora};
        struct k_stack *const stacks[] = {a->q_b, a->to_latent, a->value, ff->experts.gate_up, ff->experts.down};
        for (size_t i = 0; i < sizeof(matrices) / sizeof(matrices[0]); i++)
            v->matrix(v, matrices[i]);
        for (size_t i = 0; i < sizeof(stacks) / sizeof(stacks[0]); i++)
            v->stack(v, stacks[i]);
        for (size_t i = 0; i < sizeof(adapted) / sizeof(adapted[0]); i++) {
            v->stack(v, adapted[i]->down);
            v->stack(v, adapted[i]->up);
        }
    }
}

static void free_matrix(struct visitor *v, struct k_matrix *m)
{
    k_matrix_free(v->kernels, m);
}

static void free_stack(struct visitor *v, struct k_stack *s)
{
    k_stack_close(v->kernels, s);
}

void forward_close(struct forward *f)
{
    if (!f)
        return;
    visit(f, &(struct visitor){.matrix = free_matrix, .stack = free_stack});
    for (uint32_t l = 0; l < f->c.n_layers; l++) {
        struct attention_weights *a = &f->layers[l].attention;
        struct feed_forward *ff = &f->layers[l].feed_forward;
        void *const all[] = {a->norm, a->norm_after, a->q_norm, a->k_norm, a->sinks, ff->norm, ff->norm_after};
        for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
            k_free(f->kernels, all[i]);
    }
    struct routes *r = &f->routes;
    void *const buffers[] = {f->final_norm,   f->cos_sin[0], f->cos_sin[1], f->x,       f->normed,   f->in,
                             f->attn,         f->gate_up,    f->hidden,     f->q,       f->latent_q, f->latent_out,
                             f->route_logits, f->sorted,     f->expert_out, r->experts, r->weights,  r->slots,
                             r->first,        r->slot_row,   f->whole,      f->own,     f->lora_mid, f->lora_out};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++)
        k_free(f->kernels, buffers[i]);
    if (f->own_logits != f->logits)
        k_free(f->kernels, f->own_logits);
    if (f->kept_arena)
        k_unmap(f->kernels, f->kept_arena);
    k_unmap(f->kernels, f->embedding);
    k_unmap(f->kernels, f->logits);
    k_unmap(f->kernels, f->sampled);
    k_free(f->kernels, f->made.page);
    free(f->rope_rows);
    free(f->adapter_first);
    free(f->made.ids);
    free(f->made.positions);
    free(f->made.n_tokens);
    free(f->made.logit_rows);
    free(f->made.seqs);
    free(f->made.draws);
    free(f->piece_seqs);
    free(f->added);
    weight_cache_close(f->cache); /* after the matrices, which may be in its file */
    free(f->layers);
    free(f);
}

static void add_matrix(struct visitor *v, struct k_matrix *m)
{
    v->len_bytes += m ? k_matrix_bytes(v->kernels, m) : 0;
}

static void add_stack(struct visitor *v, struct k_stack *s)
{
    v->len_bytes += s ? k_stack_bytes(v->kernels, s) : 0;
}

uint64_t forward_weight_bytes(const struct forward *f)
{
    struct visitor v = {.matrix = add_matrix, .stack = add_stack};
    visit(f, &v);
    return v.len_bytes;
}
