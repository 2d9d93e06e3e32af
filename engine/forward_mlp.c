/*
 * The feed-forward half of a layer: a gated unit (Shazeer 2020), or a mixture of them (Shazeer et al. 2017, Jiang et al. 2024).
 *
 * With experts, rows are sorted by expert, each expert that has any multiplies all of its rows at once, and every row adds up what
 * came back in the order in which it chose: so neither who else is in the batch nor the sorting changes a bit, and an expert that
 * nobody chose is not read. A shared expert is one more slot of every row, with weight 1 or its gate's.
 */
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

static void route(struct forward *f, const struct feed_forward *y, uint32_t n_rows)
{
    const struct model_moe *m = &f->c.moe;
    const struct routes *r = &f->routes;
    const struct k_router router = {.n_experts = m->n_experts,
                                    .n_used = m->n_used,
                                    .n_groups = m->n_groups,
                                    .n_groups_used = m->n_groups_used,
                                    .normalized = m->normalized,
                                    .scale = m->scale};
    k_linear(f->kernels, y->router, f->normed, n_rows, f->route_logits, false);
    k_route(f->kernels, &router, f->route_logits, n_rows, r->n_slots, r->experts, r->weights);
    struct k_slots slots = {m->n_used, r->n_slots, r->experts, r->weights, r->slots, r->slot_row, r->first, NULL};
    if (y->gate) {
        k_linear(f->kernels, y->gate, f->normed, n_rows, f->route_logits, false);
        slots.gate = f->route_logits;
    }
    k_sort_slots(f->kernels, &slots, m->n_experts, n_rows);
}

/* What the experts give for the sorted rows, in expert_out. */
static void run_experts(struct forward *f, const struct experts *y, uint32_t n_rows)
{
    const struct routes *r = &f->routes;
    uint32_t n = n_rows * f->c.moe.n_used;
    k_embed(f->kernels, f->normed, NUM_F32, f->c.hidden, r->slot_row, n, 1, f->sorted);
    k_linear_sorted(f->kernels, y->gate_up, r->first, n, f->sorted, f->mlp);
    activate(f, n, f->c.moe.intermediate);
    k_linear_sorted(f->kernels, y->down, r->first, n, f->hidden, f->expert_out);
}

static void run_shared(struct forward *f, const struct mlp *y, uint32_t n_rows)
{
    float *out = f->expert_out + (size_t)n_rows * f->c.moe.n_used * f->c.hidden;
    k_linear(f->kernels, y->gate_up, f->normed, n_rows, f->mlp, false);
    activate(f, n_rows, f->c.moe.shared_intermediate);
    k_linear(f->kernels, y->down, f->hidden, n_rows, out, false);
}

static void run_mixture(struct forward *f, const struct feed_forward *y, uint32_t n_rows)
{
    const struct routes *r = &f->routes;
    route(f, y, n_rows);
    run_experts(f, &y->experts, n_rows);
    if (y->dense.gate_up)
        run_shared(f, &y->dense, n_rows);
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
