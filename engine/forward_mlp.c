/*
 * The feed-forward half of a layer: a gated unit (Shazeer 2020), or a mixture of them (Shazeer et al. 2017, Jiang et al. 2024).
 *
 * With experts, rows are sorted by expert, each expert that has any multiplies all of its rows at once, and every row adds up what
 * came back in the order in which it chose: so neither who else is in the batch nor the sorting changes a bit, and an expert that
 * nobody chose is not read. A shared expert is one more slot of every row, with weight 1 or its gate's.
 */
#include <string.h>

#include "engine/forward_internal.h"

/* hidden [n][dim] = act(gate) * up of mlp [n][gate, up] */
static void activate(struct forward *f, uint32_t n, uint32_t dim)
{
    static const enum k_act ACTS[] = {
        [GLU_SILU] = ACT_SILU, [GLU_GELU_TANH] = ACT_GELU_TANH, [GLU_CLAMPED] = ACT_CLAMPED};
    const struct k_glu glu = {ACTS[f->c.glu], f->c.glu_alpha, f->c.glu_limit};
    k_glu(f->kernels, f->mlp, n, dim, &glu, f->hidden);
}

/* ----------------------------------------------------------------- experts */

/* Counting sort of the (row, choice) pairs by expert; rows stay in order. */
static void sort_rows(struct routes *r, uint32_t n_rows, uint32_t n_used, uint32_t n_experts)
{
    memset(r->first, 0, (n_experts + 1) * sizeof(*r->first));
    for (uint32_t t = 0; t < n_rows; t++)
        for (uint32_t i = 0; i < n_used; i++)
            r->first[r->experts[t * r->n_slots + i] + 1]++;
    for (uint32_t e = 0; e < n_experts; e++)
        r->first[e + 1] += r->first[e];
    for (uint32_t t = 0; t < n_rows; t++)
        for (uint32_t i = 0; i < n_used; i++) {
            uint32_t slot = r->first[r->experts[t * r->n_slots + i]]++; /* moves to the end of its expert */
            r->slots[t * r->n_slots + i] = slot;
            r->slot_row[slot] = t;
        }
    memmove(r->first + 1, r->first, n_experts * sizeof(*r->first));
    r->first[0] = 0;
}

static void route(struct forward *f, const struct feed_forward *y, uint32_t n_rows)
{
    const struct model_moe *m = &f->c.moe;
    struct routes *r = &f->routes;
    const struct k_router router = {.n_experts = m->n_experts,
                                    .n_used = m->n_used,
                                    .n_groups = m->n_groups,
                                    .n_groups_used = m->n_groups_used,
                                    .normalized = m->normalized,
                                    .scale = m->scale};
    k_linear(f->kernels, y->router, f->normed, n_rows, f->logits, false);
    k_route(f->kernels, &router, f->logits, n_rows, r->n_slots, r->experts, r->weights);
    sort_rows(r, n_rows, m->n_used, m->n_experts);
}

/* What the experts give for the sorted rows, in expert_out. */
static void run_experts(struct forward *f, const struct feed_forward *y, uint32_t n_rows)
{
    const struct routes *r = &f->routes;
    uint32_t hidden = f->c.hidden, dim = f->c.moe.intermediate, n = 0, total = n_rows * f->c.moe.n_used;
    k_embed(f->kernels, f->normed, NUM_F32, hidden, r->slot_row, total, 1, f->sorted);
    for (uint32_t e = 0; e < f->c.moe.n_experts; e++)
        if (r->first[e + 1] > r->first[e])
            r->groups[n++] = (struct k_group){y->experts[e].gate_up, f->sorted + (size_t)r->first[e] * hidden,
                                              f->mlp + (size_t)r->first[e] * 2 * dim, r->first[e + 1] - r->first[e]};
    k_linear_groups(f->kernels, r->groups, n, hidden, 2 * (size_t)dim);
    activate(f, total, dim);
    n = 0;
    for (uint32_t e = 0; e < f->c.moe.n_experts; e++)
        if (r->first[e + 1] > r->first[e])
            r->groups[n++] =
                (struct k_group){y->experts[e].down, f->hidden + (size_t)r->first[e] * dim,
                                 f->expert_out + (size_t)r->first[e] * hidden, r->first[e + 1] - r->first[e]};
    k_linear_groups(f->kernels, r->groups, n, dim, hidden);
}

static void run_shared(struct forward *f, const struct feed_forward *y, uint32_t n_rows)
{
    const struct routes *r = &f->routes;
    uint32_t dim = f->c.moe.shared_intermediate, n_used = f->c.moe.n_used;
    k_linear(f->kernels, y->dense.gate_up, f->normed, n_rows, f->mlp, false);
    activate(f, n_rows, dim);
    k_linear(f->kernels, y->dense.down, f->hidden, n_rows, f->expert_out + (size_t)n_rows * n_used * f->c.hidden,
             false);
    if (y->gate)
        k_linear(f->kernels, y->gate, f->normed, n_rows, f->logits, false);
    for (uint32_t t = 0; t < n_rows; t++) {
        r->slots[t * r->n_slots + n_used] = n_rows * n_used + t;
        r->weights[t * r->n_slots + n_used] = y->gate ? 1.0f / (1.0f + k_exp(-f->logits[t])) : 1.0f;
    }
}

static void run_mixture(struct forward *f, const struct feed_forward *y, uint32_t n_rows)
{
    const struct routes *r = &f->routes;
    route(f, y, n_rows);
    run_experts(f, y, n_rows);
    if (y->dense.gate_up)
        run_shared(f, y, n_rows);
    k_combine(f->kernels, f->expert_out, f->c.hidden, r->slots, r->weights, r->n_slots, n_rows, f->x);
}

/* -------------------------------------------------------------------- dense */

static void run_dense(struct forward *f, const struct feed_forward *y, uint32_t n_rows)
{
    k_linear(f->kernels, y->dense.gate_up, f->normed, n_rows, f->mlp, false);
    activate(f, n_rows, f->c.intermediate);
    if (!y->norm_after) {
        k_linear(f->kernels, y->dense.down, f->hidden, n_rows, f->x, true);
        return;
    }
    k_linear(f->kernels, y->dense.down, f->hidden, n_rows, f->normed, false);
    forward_add(f, n_rows, y->norm_after, f->normed);
}

void forward_mlp(struct forward *f, uint32_t l, const struct forward_batch *b)
{
    const struct feed_forward *y = &f->layers[l].feed_forward;
    k_rmsnorm(f->kernels, f->x, y->norm, f->c.rms_eps, b->n_rows, f->c.hidden, f->normed);
    if (y->router)
        run_mixture(f, y, b->n_rows);
    else
        run_dense(f, y, b->n_rows);
}
