/*
 * A mixture of experts (Shazeer et al. 2017, Jiang et al. 2024) as the feed-forward half of a layer.
 *
 * Rows are sorted by expert, and each expert multiplies all of its rows at once. Every row then adds the
 * results of its experts in the order in which it chose them. So neither the rest of the batch nor the
 * sorting changes a bit, and an expert that no row chose is not read. A shared expert is one more slot of
 * every row, with weight 1 or the weight of its gate.
 */
#include "engine/forward_internal.h"

/* Chooses the experts of each row and sorts the rows by expert. */
static void route(struct forward *f, const struct feed_forward *w, const float *h, uint32_t n_rows)
{
    const struct model_moe *m = &f->c.moe;
    const struct routes *r = &f->routes;
    const struct k_router router = {.n_experts = m->n_experts,
                                    .n_used = m->n_used,
                                    .n_groups = m->n_groups,
                                    .n_groups_used = m->n_groups_used,
                                    .normalized = m->normalized,
                                    .scale = m->scale};
    k_linear(f->kernels, w->router, h, n_rows, f->route_logits, false);
    k_route(f->kernels, &router, f->route_logits, n_rows, r->n_slots, r->experts, r->weights);
    struct k_slots slots = {m->n_used, r->n_slots, r->experts, r->weights, r->slots, r->slot_row, r->first, NULL};
    if (w->gate) {
        k_linear(f->kernels, w->gate, h, n_rows, f->route_logits, false);
        slots.gate = f->route_logits;
    }
    k_sort_slots(f->kernels, &slots, m->n_experts, n_rows);
}

/* The experts' results for the sorted rows -> expert_out [slots][own share of hidden]. */
static void run_experts(struct forward *f, const struct experts *w, const float *h, uint32_t n_rows)
{
    const struct routes *r = &f->routes;
    uint32_t n = n_rows * f->c.moe.n_used;
    k_take_rows(f->kernels, h, NUM_F32, f->c.hidden, r->slot_row, n, 1, f->sorted);
    k_linear_sorted(f->kernels, w->gate_up, r->first, n, f->sorted, f->gate_up);
    forward_glu(f, f->gate_up, n, &f->share.expert, f->hidden);
    const float *hidden = forward_gather(f, &f->share.expert, n, f->hidden, f->whole);
    k_linear_sorted(f->kernels, w->down, r->first, n, hidden, f->expert_out);
}

/*
 * The shared expert. It writes behind the experts' part of hidden, which other ranks may still gather, and
 * behind their part of expert_out.
 */
static void run_shared(struct forward *f, const struct mlp *w, const float *h, uint32_t n_rows)
{
    size_t slots = (size_t)n_rows * f->c.moe.n_used;
    float *own_hidden = f->hidden + slots * own(f, &f->share.expert);
    k_linear(f->kernels, w->gate_up.matrix, h, n_rows, f->gate_up, false);
    forward_glu(f, f->gate_up, n_rows, &f->share.shared, own_hidden);
    const float *hidden = forward_gather(f, &f->share.shared, n_rows, own_hidden, f->whole);
    k_linear(f->kernels, w->down.matrix, hidden, n_rows, f->expert_out + slots * own(f, &f->share.hidden), false);
}

void forward_experts(struct forward *f, const struct feed_forward *w, const float *h, const struct forward_rows *r)
{
    const struct routes *to = &f->routes;
    route(f, w, h, r->n_rows);
    run_experts(f, &w->experts, h, r->n_rows);
    if (w->dense.gate_up.matrix)
        run_shared(f, &w->dense, h, r->n_rows);
    float *x = forward_own_columns(f, r);
    k_combine(f->kernels, f->expert_out, own(f, &f->share.hidden), to->slots, to->weights, to->n_slots, r->n_rows, x);
    forward_gather(f, &f->share.hidden, r->n_rows, x, r->x);
}
