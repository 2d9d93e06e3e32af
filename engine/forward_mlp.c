/*
 * The feed-forward half of a layer: a gated unit (Shazeer 2020), or a mixture of them (Shazeer et al. 2017,
 * Jiang et al. 2024).
 *
 * With experts, rows are sorted by expert, and each expert multiplies all of its rows at once. Every row then
 * adds the results of its experts in the order in which it chose them. So neither the rest of the batch nor
 * the sorting changes a bit, and an expert that no row chose is not read. A shared expert is one more slot of
 * every row, with weight 1 or the weight of its gate.
 */
#include "engine/forward_internal.h"

/* act(gate) * up of mlp [n][gate, up] -> hidden [n][own]. Returns the columns of all ranks. */
static const float *activate(struct forward *f, uint32_t n, const struct share *s, float *hidden)
{
    static const enum k_act ACTS[] = {
        [GLU_SILU] = ACT_SILU, [GLU_GELU_TANH] = ACT_GELU_TANH, [GLU_CLAMPED] = ACT_CLAMPED};
    const struct k_glu glu = {ACTS[f->c.glu], f->c.glu_alpha, f->c.glu_limit};
    k_glu(f->kernels, f->mlp, n, own(f, s), &glu, hidden);
    return forward_gather(f, s, n, hidden, f->whole);
}

/* ----------------------------------------------------------------- experts */

/* Chooses the experts of each row and sorts the rows by expert. */
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

/* The experts' results for the sorted rows -> expert_out [slots][own share of hidden]. */
static void run_experts(struct forward *f, const struct experts *y, uint32_t n_rows)
{
    const struct routes *r = &f->routes;
    uint32_t n = n_rows * f->c.moe.n_used;
    k_embed(f->kernels, f->normed, NUM_F32, f->c.hidden, r->slot_row, n, 1, f->sorted);
    k_linear_sorted(f->kernels, y->gate_up, r->first, n, f->sorted, f->mlp);
    const float *hidden = activate(f, n, &f->share.expert, f->hidden);
    k_linear_sorted(f->kernels, y->down, r->first, n, hidden, f->expert_out);
}

/*
 * The shared expert. It writes behind the experts' part of hidden, which other ranks may still gather, and
 * behind their part of expert_out.
 */
static void run_shared(struct forward *f, const struct mlp *y, uint32_t n_rows)
{
    size_t slots = (size_t)n_rows * f->c.moe.n_used;
    k_linear(f->kernels, y->gate_up, f->normed, n_rows, f->mlp, false);
    const float *hidden = activate(f, n_rows, &f->share.shared, f->hidden + slots * own(f, &f->share.expert));
    k_linear(f->kernels, y->down, hidden, n_rows, f->expert_out + slots * own(f, &f->share.hidden), false);
}

static void run_mixture(struct forward *f, const struct feed_forward *y, const struct forward_rows *r)
{
    const struct routes *to = &f->routes;
    route(f, y, r->n_rows);
    run_experts(f, &y->experts, r->n_rows);
    if (y->dense.gate_up)
        run_shared(f, &y->dense, r->n_rows);
    float *x = forward_own_columns(f, r);
    k_combine(f->kernels, f->expert_out, own(f, &f->share.hidden), to->slots, to->weights, to->n_slots, r->n_rows, x);
    forward_gather(f, &f->share.hidden, r->n_rows, x, r->x);
}

/* -------------------------------------------------------------------- dense */

static void run_dense(struct forward *f, const struct feed_forward *y, const struct forward_rows *r)
{
    k_linear(f->kernels, y->dense.gate_up, f->normed, r->n_rows, f->mlp, false);
    forward_lora(f, &y->dense.gate_up_lora, f->normed, r, f->mlp);
    const float *hidden = activate(f, r->n_rows, &f->share.dense, f->hidden);
    forward_project(f, y->dense.down, &y->dense.down_lora, hidden, y->norm_after, r);
}

void forward_mlp(struct forward *f, uint32_t l, const struct forward_rows *r)
{
    const struct feed_forward *y = &f->layers[l].feed_forward;
    k_rmsnorm(f->kernels, r->x, y->norm, f->c.rms_eps, r->n_rows, f->c.hidden, f->normed);
    if (y->router)
        run_mixture(f, y, r);
    else
        run_dense(f, y, r);
}
