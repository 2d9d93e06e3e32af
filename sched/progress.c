#include "sched/progress.h"

#include <math.h>

static const double LATE_FADES = 0.5; /* factor for each step: the model follows within COST_RUN steps */

static double model_ms(const struct cost_model *m, const struct cost_step *s)
{
    return cost_step_ms(m, s->prefill_tokens, s->prefill_square, s->batch, s->context);
}

double progress_expect_ms(const struct progress_past *p, const struct cost_model *m, const struct cost_step *step)
{
    double ms = model_ms(m, step) * fmax(p->late, 1);
    bool is_known = (!step->prefill_tokens || p->n_prefill >= PROGRESS_MEASURED) &&
                    (!step->batch || p->n_decode >= PROGRESS_MEASURED);
    return is_known ? ms : fmax(ms * PROGRESS_GUESS, PROGRESS_FIRST_MS);
}

void progress_measured(struct progress_past *p, const struct cost_model *m, const struct cost_step *step)
{
    double ms = model_ms(m, step), late = ms > 0 ? step->ms / ms : 0;
    p->n_prefill += step->prefill_tokens > 0;
    p->n_decode += step->batch > 0;
    p->late = fmax(p->late * LATE_FADES, late);
}

double progress_unacked_ms(struct progress_acks *a, uint32_t n_acked, uint32_t n_sent, uint64_t now_ns)
{
    if (n_acked >= n_sent)
        a->since_ns = 0;
    else if (!a->since_ns || n_acked != a->n_acked)
        a->since_ns = now_ns;
    a->n_acked = n_acked;
    return a->since_ns ? clock_ms_between(a->since_ns, now_ns) : 0;
}

bool progress_judge(struct progress *p, const struct progress_report *r, uint64_t now_ns)
{
    double limit = PROGRESS_PATIENCE_MS + PROGRESS_TIMES * fmax(r->expected_ms, 0);
    bool moved = r->n_steps != p->n_steps || r->n_taken != p->taken.n_acked || !p->moved_ns;
    double waits = progress_unacked_ms(&p->taken, r->n_taken, r->n_sent, now_ns);
    bool owes = r->busy || r->expected_ms > 0;
    p->n_steps = r->n_steps;
    if (moved || !owes)
        p->moved_ns = now_ns;
    double stands = owes ? fmax(clock_ms_between(p->moved_ns, now_ns), moved ? 0 : r->running_ms) : 0;
    return stands <= limit && waits <= limit;
}
