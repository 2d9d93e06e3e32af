/*
 * One worker: its sequences, and its steps.
 *
 *     leg arrives -> WAITING --pages--> PROMPT --computed--> DECODING --last token--> over   (aggregated)
 *                       |                  \--computed--> LEASED --the reader has all--> over (prefill leg)
 *                       |--pages--> FILLING --loaded from stores--> PROMPT
 *                       \--pages--> FILLING --the last byte came--> DECODING --last--> over    (decode leg)
 *
 * A preempted decode leg continues like an aggregated one.
 *
 * A run of decode steps in which nothing else happens is one event. A change in the meantime cuts the run at
 * the end of the current step. What a worker gets during a step (a leg, pages that arrived) counts from the
 * end of that step on, as in the engine. Each sequence of a run takes its next page when it needs it, no
 * sooner. tests/replay/test_simulate_engine.c compares all of this with the engine.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "replay/simulate_internal.h"
#include "sched/batching.h"
#include "sched/sequence.h"

/* The engine's announce_calls: a step's layers are announced in this many parts. */
enum { ANNOUNCE_CALLS = 4 };

/* ------------------------------------------------------------------- lists */

static void list_push(struct sim_list *l, struct sim_seq *q)
{
    l->at = MEM_ROOM(l->at, l->n, l->cap, 32);
    l->at[l->n++] = q;
}

static bool find_in_list(const struct sim_list *l, const struct sim_seq *q, uint32_t *at_out)
{
    for (uint32_t i = 0; i < l->n; i++)
        if (l->at[i] == q) {
            *at_out = i;
            return true;
        }
    return false;
}

static void take_out(struct sim_list *l, uint32_t at)
{
    for (l->n--; at < l->n; at++)
        l->at[at] = l->at[at + 1];
}

static bool list_remove(struct sim_list *l, const struct sim_seq *q)
{
    uint32_t at;
    if (!find_in_list(l, q, &at))
        return false;
    take_out(l, at);
    return true;
}

static uint32_t number(const struct sim *s, const struct sim_worker_node *n)
{
    return (uint32_t)(n - s->nodes);
}

static struct sim_leg *leg_on(const struct sim *s, const struct sim_worker_node *n, struct sim_seq *q)
{
    return &q->legs[q->q.plan.prefill != number(s, n)];
}

static void note(const struct sim *s, const struct sim_worker_node *n, const struct sim_seq *q, enum simulate_what what,
                 uint32_t count)
{
    const struct simulate_note note = {what, number(s, n), (uint64_t)(q - s->seqs), s->now_ns, count};
    if (s->c.observe)
        s->c.observe(s->c.observer, &note);
}

/* Inserts q into a list that is ordered by arrival at the worker. */
static void insert(struct sim *s, struct sim_worker_node *n, struct sim_list *l, struct sim_seq *q)
{
    uint64_t order = leg_on(s, n, q)->order;
    list_push(l, q);
    for (uint32_t i = l->n - 1; i && leg_on(s, n, l->at[i - 1])->order > order; i--) {
        l->at[i] = l->at[i - 1];
        l->at[i - 1] = q;
    }
}

/* ------------------------------------------------------------------- pages */

static uint32_t pages_for(const struct sim *s, uint32_t n_tokens)
{
    return sequence_pages(n_tokens, s->page_tokens);
}

static uint32_t block_at(const struct sim *s, const struct sim_seq *q, uint32_t i)
{
    return s->block_of[q->t->first_block + i];
}

static void note_twice(struct sim_leg *leg, uint32_t block)
{
    if (!(leg->n_twice & (leg->n_twice - 1)))
        leg->twice = mem_resize(leg->twice, leg->n_twice ? leg->n_twice * 2 : 1, sizeof(*leg->twice));
    leg->twice[leg->n_twice++] = block;
}

/* Names the full blocks that are computed: other requests find them from now on. If the pool has the block
 * already, the leg keeps its own pages without a name, and the block is there twice. */
static void name_blocks(struct sim *s, struct sim_worker_node *n, struct sim_seq *q, struct sim_leg *leg)
{
    uint32_t full = leg->n_computed / s->c.block_tokens, most = blocks_of(s, q->t);
    for (; leg->n_blocks < (full < most ? full : most); leg->n_blocks++) {
        if (pool_name(s, n, block_at(s, q, leg->n_blocks), s->block_pages))
            leg->n_private -= s->block_pages;
        else
            note_twice(leg, leg->n_blocks);
    }
}

/* Gives all pages of a leg back, the last ones first, so that a chain is evicted from its tail. Computed full
 * pages without a name are cached as those of an answer; all other pages without a name are free at once. */
static void give_back(struct sim *s, struct sim_worker_node *n, struct sim_seq *q, struct sim_leg *leg,
                      bool is_preempted)
{
    uint32_t computed = leg->n_computed / s->page_tokens, named = leg->n_blocks * s->block_pages;
    uint32_t cached = computed > named ? computed - named : 0, own = leg->n_private - leg->n_twice * s->block_pages;
    cached = cached < own ? cached : own;
    if (!is_preempted || cached)
        pool_leave_answer(n, q);
    if (is_preempted && cached)
        q->answer_page = named;
    pool_cache_answer(s, n, cached, is_preempted ? q : NULL);
    pool_give(n, leg->n_private - cached);
    while (leg->n_blocks--)
        if (leg->n_twice && leg->twice[leg->n_twice - 1] == leg->n_blocks)
            leg->n_twice--;
        else
            pool_unhold(n, block_at(s, q, leg->n_blocks));
    free(leg->twice);
    leg->twice = NULL;
    leg->n_blocks = leg->n_pages = leg->n_private = 0;
}

static bool grow_leg(struct sim *s, struct sim_worker_node *n, struct sim_leg *leg, uint32_t n_tokens)
{
    uint32_t need = pages_for(s, n_tokens);
    if (need <= leg->n_pages)
        return true;
    if (!pool_take(s, n, need - leg->n_pages))
        return false;
    leg->n_private += need - leg->n_pages;
    leg->n_pages = need;
    return true;
}

/* Tokens of a decoding sequence including the next one, as the engine's n_tokens. */
static uint32_t tokens_of(const struct sim_seq *q)
{
    return q->t->n_prompt + q->n_generated;
}

/* --------------------------------------------------------------- admission */

static bool only_decodes(const struct sim *s, const struct sim_worker_node *n, const struct sim_seq *q)
{
    return q->q.plan.prefill != number(s, n);
}

static bool hands_over(const struct sim_seq *q)
{
    return q->q.plan.prefill != q->q.plan.decode && q->q.max_tokens != 1;
}

/* The time at which the first `steps` steps of the run are over. Step times grow linearly. */
static uint64_t run_ns(const struct sim_worker_node *n, uint32_t steps)
{
    return n->began_ns + ns_of(steps * n->first_ms + n->longer_ms * steps * (steps - 1.0) / 2);
}

/* Steps of the run that are over. At least one always remains, since the end of the last step is an event.
 * Solves run_ns() for steps, then corrects the rounding. */
static uint32_t steps_over(const struct sim *s, const struct sim_worker_node *n)
{
    double ms = clock_ms_between(n->began_ns, s->now_ns), first = n->first_ms - n->longer_ms / 2,
           root = first * first + 2 * n->longer_ms * ms;
    double guess = 2 * ms / (first + sqrt(fmax(root, 0)));
    uint32_t steps = guess > 0 ? (uint32_t)fmin(guess, n->n_steps - 1) : 0;
    while (steps && run_ns(n, steps) > s->now_ns)
        steps--;
    while (steps + 1 < n->n_steps && run_ns(n, steps + 1) <= s->now_ns)
        steps++;
    return steps;
}

static void start_prompt(struct sim *s, struct sim_worker_node *n, struct sim_seq *q, struct sim_leg *leg)
{
    leg->state = LEG_PROMPT;
    q->running_ns = s->now_ns;
    insert(s, n, &n->prompts, q);
}

/*
 * Holds the cached prefix of q. A leg that computes leaves at least the last token to compute; a leg that is
 * handed the prompt needs no token left. If only part of a block is usable, the whole block is held, and its
 * last page is computed again.
 */
static void hold_matched(struct sim *s, struct sim_worker_node *n, struct sim_seq *q, struct sim_leg *leg, bool adopts)
{
    uint32_t usable = adopts ? leg->goal / s->page_tokens : sequence_reusable_pages(leg->goal, s->page_tokens);
    uint32_t found = blocks_match_one(s, number(s, n), q->t) * s->block_pages, pages = found < usable ? found : usable;
    for (; leg->n_blocks * s->block_pages < pages; leg->n_blocks++)
        pool_hold(n, block_at(s, q, leg->n_blocks));
    if (q->answer && pages == q->answer_page && !adopts) {
        leg->n_private = pool_take_answer(n, q);
        pages += leg->n_private;
    }
    leg->n_pages = pages;
    leg->n_computed = pages * s->page_tokens;
}

static void admitted(struct sim *s, struct sim_worker_node *n, struct sim_seq *q, struct sim_leg *leg)
{
    bool again = q->was_preempted;
    n->n_active++;
    if (!again)
        note(s, n, q, SIMULATE_ADMITTED, leg->n_computed);
    if (only_decodes(s, n, q) && !again) { /* pages that it has are not sent */
        leg->state = LEG_FILLING;
        list_push(&n->filling, q);
        q->unsent -= leg->n_computed * s->c.kv_bytes_per_token;
        sim_request_accepted(s, q, s->now_ns);
        return;
    }
    if (!again) {
        q->admitted_ns = s->now_ns;
        q->own_tokens = leg->n_computed;
        q->coming = leg->n_computed * s->c.kv_bytes_per_token;
        uint32_t have = leg->n_computed / s->c.block_tokens, want = q->q.plan.loaded_blocks / s->block_pages;
        if (want > have && stores_load(s, n, q, have, want)) {
            leg->state = LEG_FILLING;
            list_push(&n->filling, q);
            return;
        }
    }
    start_prompt(s, n, q, leg);
}

static bool admit_one(struct sim *s, struct sim_worker_node *n, struct sim_seq *q)
{
    struct sim_leg *leg = leg_on(s, n, q);
    bool adopts = only_decodes(s, n, q) && !q->was_preempted;
    leg->goal = q->t->n_prompt + (adopts ? q->n_before : q->n_generated);
    hold_matched(s, n, q, leg, adopts);
    if (!grow_leg(s, n, leg, leg->goal)) {
        give_back(s, n, q, leg, q->was_preempted);
        leg->n_computed = 0;
        return false;
    }
    list_remove(&n->waiting, q);
    admitted(s, n, q, leg);
    return true;
}

static void admit(struct sim *s, struct sim_worker_node *n)
{
    while (n->waiting.n && n->n_active < s->c.max_batch && admit_one(s, n, n->waiting.at[0]))
        ;
}

/* --------------------------------------------------------------- preemption */

/* The last arrived of the sequences that generate here. */
static struct sim_seq *newest(struct sim *s, struct sim_worker_node *n)
{
    struct sim_seq *best = NULL;
    struct sim_list *lists[] = {&n->running, &n->prompts};
    for (int k = 0; k < 2; k++)
        for (uint32_t i = 0; i < lists[k]->n; i++) {
            struct sim_seq *q = lists[k]->at[i];
            if ((!best || leg_on(s, n, q)->order > leg_on(s, n, best)->order) &&
                (q->q.plan.decode == number(s, n) || !hands_over(q)))
                best = q;
        }
    return best;
}

static void preempt(struct sim *s, struct sim_worker_node *n, struct sim_seq *q)
{
    struct sim_leg *leg = leg_on(s, n, q);
    if (!list_remove(&n->running, q))
        list_remove(&n->prompts, q);
    give_back(s, n, q, leg, true);
    leg->state = LEG_WAITING;
    leg->n_computed = leg->rows = 0;
    n->n_active--;
    q->was_preempted = true;
    q->out->n_preempted++;
    note(s, n, q, SIMULATE_PREEMPTED, 0);
    insert(s, n, &n->waiting, q);
}

/* Takes pages for the next token of each sequence, in order; preempts the newest sequences until they
 * suffice. */
static void preempt_for_room(struct sim *s, struct sim_worker_node *n)
{
    for (uint32_t i = 0; i < n->running.n; i++) {
        struct sim_seq *q = n->running.at[i];
        if (grow_leg(s, n, leg_on(s, n, q), tokens_of(q)))
            continue;
        preempt(s, n, newest(s, n));
        i = UINT32_MAX; /* starts again: the list has changed */
    }
}

/* Pages that a run of `steps` steps needs from now on. */
static uint32_t run_needs(struct sim *s, struct sim_worker_node *n, uint32_t n_decoding, uint32_t steps)
{
    uint32_t need = 0;
    for (uint32_t i = 0; i < n_decoding; i++) {
        uint32_t pages = pages_for(s, tokens_of(n->running.at[i]) + steps - 1),
                 have = leg_on(s, n, n->running.at[i])->n_pages;
        need += pages > have ? pages - have : 0;
    }
    return need;
}

/* Steps until the first sequence ends, or fewer if there are not enough pages. 0: not enough for one step. */
static uint32_t steps_ahead(struct sim *s, struct sim_worker_node *n)
{
    uint32_t steps = UINT32_MAX;
    for (uint32_t i = 0; i < n->running.n; i++) {
        const struct sim_seq *q = n->running.at[i];
        steps = q->n_total - q->n_generated < steps ? q->n_total - q->n_generated : steps;
    }
    while (steps && run_needs(s, n, n->running.n, steps) > pool_takeable(n))
        steps /= 2;
    return steps;
}

/* Takes the pages that the decoding sequences need at step `step` of the run, from 0: no sooner than they
 * need them. */
static void grow_run(struct sim *s, struct sim_worker_node *n, uint32_t step)
{
    for (uint32_t i = 0; i < n->n_decoding; i++)
        grow_leg(s, n, leg_on(s, n, n->running.at[i]), tokens_of(n->running.at[i]) + step);
}

/* ------------------------------------------------------------------- steps */

/* A standard normal number (Box and Muller) from the worker's own random numbers. */
static double normal(struct sim *s, struct sim_worker_node *n)
{
    double u = random_unit(random_at(s->c.seed, number(s, n), n->n_random)) + 0x1p-54;
    double v = random_unit(random_at(s->c.seed, number(s, n), n->n_random + 1));
    n->n_random += 2;
    return sqrt(-2 * log(u)) * cos(2 * M_PI * v);
}

/* A log-normal factor of mean 1 on the time of a step; for n_steps steps, on their mean. */
static double noise(struct sim *s, struct sim_worker_node *n, uint32_t n_steps)
{
    double sigma = s->c.noise / sqrt(n_steps);
    return sigma > 0 ? exp(sigma * normal(s, n) - sigma * sigma / 2) : 1;
}

static double step_ms(const struct sim_worker_node *n)
{
    struct cost_profile now = n->cost;
    for (int i = 0; i < 3; i++) {
        now.prefill[i] *= power_prefill_factor(n->clock);
        now.decode[i] *= power_decode_factor(n->clock);
    }
    now.chunk_square *= power_prefill_factor(n->clock);
    now.context_square *= power_decode_factor(n->clock);
    return cost_profile_step_ms(&now, &n->step);
}

static double watts_of_step(const struct sim_worker_node *n)
{
    double most = n->prompts.n ? n->power.prefill : n->power.decode;
    return n->power.idle + (most - n->power.idle) * power_draw_factor(n->clock);
}

static void make_items(struct sim *s, uint32_t n_items)
{
    if (n_items <= s->cap_items)
        return;
    s->cap_items = n_items * 2;
    s->items = mem_resize(s->items, s->cap_items, sizeof(*s->items));
    s->rows = mem_resize(s->rows, s->cap_items, sizeof(*s->rows));
}

/* Plans a step with prompts. The running sequences come first; the prompts get the rest of the rows, in
 * order. */
static struct cost_step plan_step(struct sim *s, struct sim_worker_node *n)
{
    uint32_t n_prompts = n->prompts.n, n_running = n->running.n, chunk = s->c.chunk_tokens;
    struct cost_step step = {0};
    make_items(s, n_prompts + n_running);
    for (uint32_t i = 0; i < n_prompts; i++) {
        const struct sim_leg *leg = leg_on(s, n, n->prompts.at[i]);
        const struct sim_seq *q = n->prompts.at[i];
        s->items[i] = (struct batch_item){.n_pending = leg->goal - leg->n_computed,
                                          .n_computed = leg->n_computed,
                                          .decoding = sequence_decodes(leg->goal, q->t->n_prompt, leg->n_computed),
                                          .chunk = chunk,
                                          .room_ms = INFINITY};
    }
    for (uint32_t i = 0; i < n_running; i++) {
        const struct sim_seq *q = n->running.at[i];
        double since = clock_ms_between(q->first_ns, s->now_ns),
               tpot_ms = q->q.resumed ? 0 : q->q.tpot_ms; /* as in the leg */
        s->items[n_prompts + i] = (struct batch_item){.n_pending = 1,
                                                      .n_computed = tokens_of(q) - 1,
                                                      .decoding = true,
                                                      .chunk = 1,
                                                      .room_ms = batching_room_ms(tpot_ms, q->n_generated, since)};
        sequence_add_to_step(&step, 1, tokens_of(q), q->t->n_prompt, tokens_of(q) - 1);
    }
    batching_plan(s->items, n_prompts + n_running, s->c.max_rows ? s->c.max_rows : chunk + n_running, &n->model,
                  n->starved_ms, s->rows);
    n->is_starving = batching_starves(s->items, s->rows, n_prompts + n_running);
    for (uint32_t i = 0; i < n_prompts; i++) {
        struct sim_seq *q = n->prompts.at[i];
        struct sim_leg *leg = leg_on(s, n, q);
        leg->rows = s->rows[i];
        if (leg->rows)
            sequence_add_to_step(&step, leg->rows, leg->goal, q->t->n_prompt, leg->n_computed);
    }
    return step;
}

/* All parts of the layers but the last are announced during the step. The simulator announces them together,
 * when the first part is ready. */
static void announce_early(struct sim *s, struct sim_worker_node *n)
{
    for (uint32_t i = 0; i < n->prompts.n; i++) {
        struct sim_seq *q = n->prompts.at[i];
        struct sim_leg *leg = leg_on(s, n, q);
        if (!hands_over(q) || !leg->rows || only_decodes(s, n, q))
            continue;
        q->coming += leg->rows * s->c.kv_bytes_per_token;
        if (s->c.port_gb_s > 0)
            events_post(&s->events, s->now_ns + ns_of(n->run_ms / ANNOUNCE_CALLS), EVENT_ANNOUNCE,
                        (uint32_t)(q - s->seqs), q->placement);
    }
}

/* Sequences that have joined take their places by order of arrival. */
static void sort_running(struct sim *s, struct sim_worker_node *n)
{
    struct sim_seq **at = n->running.at;
    for (uint32_t i = 1; i < n->running.n; i++)
        for (uint32_t k = i; k && leg_on(s, n, at[k - 1])->order > leg_on(s, n, at[k])->order; k--) {
            struct sim_seq *q = at[k];
            at[k] = at[k - 1];
            at[k - 1] = q;
        }
}

/* Plans a run of decode steps. Their times grow linearly with the contexts. */
static void plan_run(struct sim *s, struct sim_worker_node *n, uint32_t steps)
{
    n->n_steps = steps;
    n->step = (struct cost_step){0};
    for (uint32_t i = 0; i < n->running.n; i++) {
        const struct sim_seq *q = n->running.at[i];
        sequence_add_to_step(&n->step, 1, tokens_of(q), q->t->n_prompt, tokens_of(q) - 1);
    }
    double factor = noise(s, n, steps);
    n->first_ms = step_ms(n);
    n->step.context += n->step.batch;
    n->longer_ms = (step_ms(n) - n->first_ms) * factor;
    n->step.context -= n->step.batch;
    n->first_ms *= factor;
    n->run_ms = n->first_ms * steps + n->longer_ms * steps * (steps - 1.0) / 2;
}

static void begin(struct sim *s, struct sim_worker_node *n)
{
    if (n->is_busy || !n->is_up)
        return;
    admit(s, n);
    sort_running(s, n);
    uint32_t steps = n->prompts.n || !n->running.n ? 0 : steps_ahead(s, n);
    if (!steps)
        preempt_for_room(s, n);
    if (!(n->prompts.n + n->running.n))
        return;
    n->n_decoding = n->running.n;
    n->n_steps = 0;
    n->is_starving = false;
    if (n->prompts.n) {
        n->step = plan_step(s, n);
        n->run_ms = step_ms(n) * noise(s, n, 1);
    } else {
        plan_run(s, n, steps ? steps : 1);
        grow_run(s, n, 0);
    }
    n->watts = watts_of_step(n);
    n->is_busy = true;
    n->began_ns = s->now_ns;
    announce_early(s, n);
    events_post(&s->events, s->now_ns + ns_of(n->run_ms), EVENT_STEP_END, number(s, n), ++n->run);
}

/* A change cuts a run of decode steps at the end of the current step. The event of the old end is ignored
 * then (run is another one). */
static void cut_run(struct sim *s, struct sim_worker_node *n)
{
    if (!n->is_busy || n->n_steps <= 1)
        return;
    uint32_t steps = steps_over(s, n) + 1;
    if (steps == n->n_steps)
        return;
    n->n_steps = steps;
    n->run_ms = n->first_ms * steps + n->longer_ms * steps * (steps - 1.0) / 2;
    events_post(&s->events, n->began_ns + ns_of(n->run_ms), EVENT_STEP_END, number(s, n), ++n->run);
}

void node_set_clock(struct sim *s, uint32_t w, double clock)
{
    struct sim_worker_node *n = &s->nodes[w];
    if (n->clock == clock)
        return;
    n->clock = clock;
    cut_run(s, n);
}

double node_watts(const struct sim_worker_node *n)
{
    return n->is_busy ? n->watts : n->power.idle;
}

void node_show_progress(struct sim *s)
{
    for (uint32_t w = 0; w < s->n_nodes; w++) {
        struct sim_worker_node *n = &s->nodes[w];
        if (!n->is_busy || n->n_steps <= 1)
            continue;
        uint32_t done = steps_over(s, n);
        for (uint32_t i = 0; i < n->n_decoding; i++) {
            struct sim_seq *q = n->running.at[i];
            scheduler_generated(&q->q, q->n_generated - q->n_before + done);
        }
    }
}

/* --------------------------------------------------------------- hand-over */

static void handed_over(struct sim *s, uint32_t request)
{
    struct sim_seq *q = &s->seqs[request];
    q->flow = 0;
    events_post(&s->events, s->now_ns + ns_of(s->c.link_ms), EVENT_JOIN, request, q->placement);
}

/* Announced bytes flow as soon as the decode worker has pages for them. */
void node_send(struct sim *s, struct sim_seq *q)
{
    if (!q->is_accepted || s->now_ns < q->accepted_ns || q->is_sent || !s->nodes[q->q.plan.prefill].is_up ||
        !s->nodes[q->q.plan.decode].is_up)
        return;
    if (!q->flow)
        q->flow = 1 + net_open(s, &s->nodes[q->q.plan.prefill].sends, &s->nodes[q->q.plan.decode].receives, handed_over,
                               (uint32_t)(q - s->seqs));
    if (q->unsent > 0) {
        net_add(s, q->flow - 1, q->unsent);
        s->result->bytes_moved += q->unsent;
        q->unsent = 0;
    }
    q->is_sent = q->is_closed;
    if (q->is_closed)
        net_finish(s, q->flow - 1);
}

void node_announce(struct sim *s, struct sim_seq *q)
{
    double part = q->coming * (ANNOUNCE_CALLS - 1) / ANNOUNCE_CALLS;
    q->unsent += part;
    q->coming -= part;
    node_send(s, q);
}

/* Announces the last part, when the step is over. */
static void announce_rest(struct sim *s, struct sim_seq *q, bool is_last)
{
    q->unsent += q->coming;
    q->coming = 0;
    q->is_closed = is_last;
    if (q->unsent > 0 || is_last)
        node_send(s, q);
}

/* Names the blocks of sequences that joined during a step. The engine gets arrived pages between steps, so
 * the blocks of the step itself are named first. */
static void name_joined(struct sim *s, struct sim_worker_node *n)
{
    for (uint32_t i = 0; i < n->joined.n; i++)
        name_blocks(s, n, n->joined.at[i], leg_on(s, n, n->joined.at[i]));
    n->joined.n = 0;
}

void node_join(struct sim *s, struct sim_seq *q)
{
    uint32_t from = q->q.plan.prefill;
    struct sim_worker_node *n = &s->nodes[q->q.plan.decode];
    struct sim_leg *leg = &q->legs[1];
    q->out->transfer_ms = clock_ms_between(q->prefilled_ns, s->now_ns);
    scheduler_moved(scheduler_of(s, q), &q->q, q->out->transfer_ms);
    node_drop(s, from, q);
    node_go_on(s, from);
    list_remove(&n->filling, q);
    leg->state = LEG_DECODING;
    leg->n_computed = leg->goal;
    list_push(&n->joined, q);
    list_push(&n->running, q);
    if (!n->is_busy)
        name_joined(s, n);
    cut_run(s, n);
    begin(s, n);
}

/* ------------------------------------------------------------ ends of steps */

/* The sequence is over. Its pages go back when all sequences of the step have had their blocks named. */
static void over(struct sim *s, struct sim_worker_node *n, struct sim_seq *q)
{
    insert(s, n, &n->ended, q);
}

static void close_ended(struct sim *s, struct sim_worker_node *n)
{
    for (uint32_t i = 0; i < n->ended.n; i++) {
        struct sim_seq *q = n->ended.at[i];
        struct sim_leg *leg = leg_on(s, n, q);
        give_back(s, n, q, leg, false);
        leg->state = LEG_NONE;
        n->n_active--;
        note(s, n, q, SIMULATE_OVER, 0);
        sim_request_ended(s, q);
    }
    n->ended.n = 0;
}

static void second_token(struct sim *s, struct sim_seq *q, uint64_t at_ns)
{
    scheduler_second_token(scheduler_of(s, q), &q->q, at_ns);
    if (!hands_over(q) || q->q.resumed)
        return;
    q->out->first_gap_ms = clock_ms_between(q->prefilled_ns, at_ns);
    q->out->predicted_first_gap_ms = q->q.plan.gap_ms;
}

static void end_decode(struct sim *s, struct sim_worker_node *n, uint32_t steps)
{
    double each = n->run_ms / steps, began = (double)n->began_ns * 1e-6;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n->running.n; i++) {
        struct sim_seq *q = n->running.at[i];
        n->running.at[kept++] = q;
        if (i >= n->n_decoding)
            continue;
        struct sim_leg *leg = leg_on(s, n, q);
        sim_request_note_tokens(s, q, steps, began + each, each);
        if (q->n_generated - q->n_before == 1)
            second_token(s, q, n->n_steps ? run_ns(n, 1) : s->now_ns);
        leg->n_computed += steps;
        q->n_generated += steps;
        scheduler_generated(&q->q, q->n_generated - q->n_before);
        if (q->n_generated == q->n_total) {
            kept--;
            over(s, n, q);
        }
    }
    n->running.n = kept;
}

/* The prompt is computed and the next token sampled: the first one, or one after a preemption or the death of
 * another worker. */
static void prompt_done(struct sim *s, struct sim_worker_node *n, struct sim_seq *q, struct sim_leg *leg)
{
    bool split = hands_over(q) && !only_decodes(s, n, q);
    q->n_generated++;
    if (!only_decodes(s, n, q) && !q->was_preempted)
        stores_offer(s, n, q->t, q->load_end, blocks_of(s, q->t));
    sim_request_note_tokens(s, q, 1, (double)s->now_ns * 1e-6, 0);
    sim_request_prefilled(s, q);
    if (q->n_generated == q->n_total) {
        over(s, n, q);
    } else if (split) {
        leg->state = LEG_LEASED;
        n->n_active--;
        announce_rest(s, q, true);
    } else {
        leg->state = LEG_DECODING;
        list_push(&n->running, q);
    }
}

static void end_prompts(struct sim *s, struct sim_worker_node *n)
{
    uint32_t kept = 0, n_prompts = n->prompts.n;
    for (uint32_t i = 0; i < n_prompts; i++) {
        struct sim_seq *q = n->prompts.at[i];
        struct sim_leg *leg = leg_on(s, n, q);
        bool computed = leg->rows > 0;
        leg->n_computed += leg->rows;
        leg->rows = 0;
        name_blocks(s, n, q, leg);
        if (leg->n_computed >= leg->goal) {
            prompt_done(s, n, q, leg);
            continue;
        }
        n->prompts.at[kept++] = q;
        if (computed && hands_over(q) && !only_decodes(s, n, q))
            announce_rest(s, q, false);
    }
    n->prompts.n = kept;
}

static void note_load(struct sim *s, struct sim_worker_node *n)
{
    double from = (double)n->began_ns * 1e-6;
    n->out->busy_ms += n->run_ms;
    n->out->prefill_ms += n->n_steps ? 0 : n->run_ms;
    n->out->joules += n->watts * n->run_ms * 1e-3;
    sim_note_load(s, n->out, from, from + n->run_ms);
}

void node_step_ended(struct sim *s, uint32_t w)
{
    struct sim_worker_node *n = &s->nodes[w];
    uint32_t steps = n->n_steps ? n->n_steps : 1;
    n->is_busy = false;
    s->result->n_steps += steps;
    note_load(s, n);
    n->step.ms = n->run_ms / steps;
    /* Context of the run's middle step. */
    n->step.context += n->n_steps ? (steps - 1) / 2.0 * n->step.batch : 0;
    n->model = cost_observe(n->model, &n->step);
    n->starved_ms = n->is_starving ? n->starved_ms + n->run_ms : 0;
    for (uint32_t r = 0; r < s->n_routers; r++)
        scheduler_observe_step(s->routers[r].scheduler, w, &n->step);
    if (n->n_steps)
        grow_run(s, n, steps - 1);
    end_decode(s, n, steps);
    end_prompts(s, n);
    close_ended(s, n);
    name_joined(s, n);
    begin(s, n);
    node_report(s, w);
}

/* ------------------------------------------------------------------ reports */

void node_report(struct sim *s, uint32_t w)
{
    struct sim_worker_node *n = &s->nodes[w];
    uint64_t next = n->reported_ns + ns_of(SIMULATE_REPORT_MS);
    n->report_changed |= n->is_reporting;
    if (s->n_routers == 1 || n->reports_soon || n->is_reporting || !n->is_up)
        return;
    n->reports_soon = true;
    events_post(&s->events, next > s->now_ns ? next : s->now_ns, EVENT_REPORT, w, 0);
}

static void add_prompt_to(struct sched_report *r, double tokens, double cached, bool is_own)
{
    if (is_own) {
        r->own_prompts++;
        r->own_tokens += tokens;
        return;
    }
    r->n_prompts++;
    r->tokens += tokens;
    r->square += tokens * (tokens + 2 * cached);
}

static void add_running_to(struct sched_report *r, const struct sim_seq *q)
{
    double tpot_ms = q->q.resumed ? 0 : q->q.tpot_ms;
    r->running++;
    r->context += tokens_of(q);
    r->generated += q->n_generated;
    r->tpot_limit_ms =
        tpot_ms > 0 && (!(r->tpot_limit_ms > 0) || tpot_ms < r->tpot_limit_ms) ? tpot_ms : r->tpot_limit_ms;
}

/* Adds q to the reports of all routers. In the report of its own router it only counts as that router's
 * prompt, in the others all of its work counts. */
static void add_to_reports(struct sim *s, struct sim_worker_node *n, struct sim_seq *q)
{
    struct sim_leg *leg = leg_on(s, n, q);
    bool prefills = !only_decodes(s, n, q) && !q->prefilled_ns,
         decodes = q->q.plan.decode == number(s, n) && (only_decodes(s, n, q) || !hands_over(q));
    double known = leg->state == LEG_WAITING ? tokens_of(q) - q->q.plan.new_tokens : leg->n_computed;
    for (uint32_t r = 0; r < s->n_routers; r++) {
        if (prefills)
            add_prompt_to(&n->reports[r], tokens_of(q) - known, known, r == q->router);
        if (decodes && r != q->router)
            add_running_to(&n->reports[r], q);
    }
}

void node_send_report(struct sim *s, uint32_t w)
{
    struct sim_worker_node *n = &s->nodes[w];
    const struct sim_list *lists[] = {&n->waiting, &n->prompts, &n->running, &n->filling};
    bool *is_here = mem_array(s->n_routers, sizeof(*is_here));
    n->reports_soon = false;
    if (!n->is_up) {
        free(is_here);
        return;
    }
    memset(n->reports, 0, s->n_routers * sizeof(*n->reports));
    for (int k = 0; k < 4; k++)
        for (uint32_t i = 0; i < lists[k]->n; i++) {
            add_to_reports(s, n, lists[k]->at[i]);
            is_here[lists[k]->at[i]->router] = true;
        }
    for (uint32_t r = 0; r < s->n_routers; r++)
        for (uint32_t other = 0; other < s->n_routers; other++)
            if (other != r && (is_here[other] || s->routers[other].queued_ms > 0)) {
                n->reports[r].n_routers++;
                n->reports[r].queued_ms += s->routers[other].queued_ms;
            }
    free(is_here);
    n->is_reporting = true;
    n->reported_ns = s->now_ns;
    events_post(&s->events, s->now_ns + ns_of(s->c.rpc_ms), EVENT_REPORTED, w, 0);
}

void node_reported(struct sim *s, uint32_t w)
{
    struct sim_worker_node *n = &s->nodes[w];
    n->is_reporting = false;
    for (uint32_t r = 0; r < s->n_routers && n->is_known; r++)
        if (!s->routers[r].is_down)
            scheduler_observe_report(s->routers[r].scheduler, w, &n->reports[r], s->now_ns);
    if (n->report_changed)
        node_report(s, w);
    n->report_changed = false;
}

/* -------------------------------------------------------- what comes and goes */

void node_leg(struct sim *s, uint32_t w, struct sim_seq *q)
{
    struct sim_worker_node *n = &s->nodes[w];
    struct sim_leg *leg = leg_on(s, n, q);
    *leg = (struct sim_leg){.state = LEG_WAITING, .order = ++s->n_orders};
    list_push(&n->waiting, q);
    note(s, n, q, SIMULATE_LEG, 0);
    if (!n->is_up)
        return;
    node_report(s, w);
    cut_run(s, n);
    begin(s, n);
}

void node_filled(struct sim *s, struct sim_seq *q, uint32_t n_blocks)
{
    struct sim_worker_node *n = &s->nodes[q->q.plan.prefill];
    struct sim_leg *leg = &q->legs[0];
    uint32_t usable = (leg->goal - 1) / s->page_tokens, pages = n_blocks * s->block_pages;
    leg->n_computed = (pages < usable ? pages : usable) * s->page_tokens;
    q->coming = leg->n_computed * s->c.kv_bytes_per_token;
    if (!n->is_busy) /* else it is done with the others when the step ends */
        name_blocks(s, n, q, leg);
    cut_run(s, n);
    list_remove(&n->filling, q);
    start_prompt(s, n, q, leg);
    begin(s, n);
}

void node_go_on(struct sim *s, uint32_t w)
{
    struct sim_worker_node *n = &s->nodes[w];
    if (n->waiting.n)
        begin(s, n);
}

void node_drop(struct sim *s, uint32_t w, struct sim_seq *q)
{
    struct sim_worker_node *n = &s->nodes[w];
    struct sim_leg *leg = leg_on(s, n, q);
    uint32_t at;
    if (leg->state == LEG_NONE)
        return;
    if (leg->state != LEG_WAITING && leg->state != LEG_LEASED)
        n->n_active--;
    list_remove(&n->waiting, q);
    list_remove(&n->filling, q);
    list_remove(&n->prompts, q);
    list_remove(&n->joined, q);
    if (find_in_list(&n->running, q, &at)) {
        n->n_decoding -= n->is_busy && at < n->n_decoding;
        take_out(&n->running, at);
    }
    if (leg->state != LEG_WAITING)
        give_back(s, n, q, leg, false);
    else if (q->was_preempted)
        pool_leave_answer(n, q);
    leg->state = LEG_NONE;
    node_report(s, w);
}

/* Ends a run at a worker's death. Decode steps that were over have shown their tokens. Of the running step
 * only the time counts. */
static void end_run_by_death(struct sim *s, struct sim_worker_node *n)
{
    double ran_ms = fmin(clock_ms_between(n->began_ns, s->now_ns), n->run_ms);
    uint32_t steps = n->n_steps ? (uint32_t)floor(ran_ms / (n->run_ms / n->n_steps)) : 0;
    if (!n->is_busy)
        return;
    n->is_busy = false;
    if (steps) {
        s->result->n_steps += steps;
        n->run_ms *= (double)steps / n->n_steps;
        end_decode(s, n, steps);
    }
    n->run_ms = ran_ms;
    note_load(s, n);
}

/* Stops all flows to and from a dead worker. The routers learn of the death later. */
void node_die(struct sim *s, uint32_t w)
{
    struct sim_worker_node *n = &s->nodes[w];
    end_run_by_death(s, n);
    n->is_up = false;
    n->starved_ms = 0;
    n->run++;
    for (uint64_t i = 0; i < s->n_seqs; i++) {
        struct sim_seq *q = &s->seqs[i];
        if (q->q.plan.prefill == w)
            stores_cancel(s, q);
        if (q->flow && (q->q.plan.prefill == w || q->q.plan.decode == w)) {
            net_cancel(s, q->flow - 1);
            q->flow = 0;
            q->placement++; /* so that no late event makes it join */
        }
    }
}
