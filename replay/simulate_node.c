/*
 * One worker: which sequences it has, and its steps.
 *
 *     leg arrives -> WAITING --pages--> PROMPT --computed--> DECODING --last token--> over        (aggregated, preempted)
 *                       |                  \--computed--> LEASED --the reader has all--> over     (prefill leg)
 *                       |--pages--> FILLING --loaded from stores--> PROMPT
 *                       \--pages--> FILLING --the last byte came--> DECODING --last token--> over (decode leg)
 *
 * A run of decode steps in which nothing else happens is one event. A leg that comes meanwhile is admitted at the end of the step
 * that runs; a decode leg need not cut the run short for that, since it only takes pages.
 */
#include <assert.h>
#include <math.h>

#include "base/mem.h"
#include "base/random.h"
#include "replay/simulate_internal.h"
#include "sched/batching.h"

enum { ANNOUNCE_CALLS = 4 }; /* the engine's announce_calls: parts in which a step's layers are announced */

/* ------------------------------------------------------------------- lists */

static void list_push(struct list *l, struct seq *q)
{
    if (l->n == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 32;
        l->at = mem_resize(l->at, l->cap, sizeof(*l->at));
    }
    l->at[l->n++] = q;
}

static bool find(const struct list *l, const struct seq *q, uint32_t *at_out)
{
    for (uint32_t i = 0; i < l->n; i++)
        if (l->at[i] == q) {
            *at_out = i;
            return true;
        }
    return false;
}

static void take_out(struct list *l, uint32_t at)
{
    for (l->n--; at < l->n; at++)
        l->at[at] = l->at[at + 1];
}

static bool list_remove(struct list *l, const struct seq *q)
{
    uint32_t at;
    if (!find(l, q, &at))
        return false;
    take_out(l, at);
    return true;
}

static uint32_t number(const struct sim *s, const struct node *n)
{
    return (uint32_t)(n - s->nodes);
}

static struct leg *leg_on(const struct sim *s, const struct node *n, struct seq *q)
{
    return &q->legs[q->q.plan.prefill != number(s, n)];
}

/* In order of arrival at the worker. */
static void insert(struct sim *s, struct node *n, struct list *l, struct seq *q)
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
    return (n_tokens + s->page_tokens - 1) / s->page_tokens;
}

static uint32_t pages_of(const struct sim *s, const struct leg *leg)
{
    return (leg->n_blocks - leg->n_twice) * s->block_pages + leg->n_private;
}

static uint32_t block_at(const struct sim *s, const struct seq *q, uint32_t i)
{
    return s->block_of[q->t->first_block + i];
}

/* Full blocks of what is computed get their names, and are found by others from now on; of one that is here already there are two. */
static void name_blocks(struct sim *s, struct node *n, struct seq *q, struct leg *leg)
{
    uint32_t full = leg->n_computed / s->c.block_tokens, most = blocks_of(s, q->t);
    for (; leg->n_blocks < (full < most ? full : most); leg->n_blocks++) {
        if (pool_name(s, n, block_at(s, q, leg->n_blocks), s->block_pages))
            leg->n_private -= s->block_pages;
        else
            leg->n_twice++;
    }
}

static void give_back(struct sim *s, struct node *n, struct seq *q, struct leg *leg)
{
    uint32_t computed = leg->n_computed / s->page_tokens, named = leg->n_blocks * s->block_pages;
    uint32_t cached = computed > named ? computed - named : 0, twice = leg->n_twice * s->block_pages;
    cached = cached < leg->n_private - twice ? cached : leg->n_private - twice;
    pool_cache_answer(n, cached);
    pool_give(n, leg->n_private - cached);
    while (leg->n_blocks)
        pool_unhold(n, block_at(s, q, --leg->n_blocks));
    leg->n_private = leg->n_twice = 0;
}

static bool grow(struct sim *s, struct node *n, struct leg *leg, uint32_t n_tokens)
{
    uint32_t need = pages_for(s, n_tokens), have = pages_of(s, leg);
    if (need <= have)
        return true;
    if (!pool_take(s, n, need - have))
        return false;
    leg->n_private += need - have;
    return true;
}

/* --------------------------------------------------------------- admission */

static bool only_decodes(const struct sim *s, const struct node *n, const struct seq *q)
{
    return q->q.plan.prefill != number(s, n);
}

static bool hands_over(const struct seq *q)
{
    return q->q.plan.prefill != q->q.plan.decode && q->q.max_tokens != 1;
}

/* When what runs now is over, and its batch can change. */
static uint64_t step_end(const struct sim *s, const struct node *n)
{
    double each;
    if (!n->is_busy)
        return s->now_ns;
    if (n->n_steps <= 1)
        return n->began_ns + ns_of(n->run_ms);
    each = n->run_ms / n->n_steps;
    return n->began_ns + ns_of(fmin(floor(ms_of(n->began_ns, s->now_ns) / each) + 1, n->n_steps) * each);
}

static void start_prompt(struct sim *s, struct node *n, struct seq *q, struct leg *leg)
{
    leg->state = LEG_PROMPT;
    q->running_ns = s->now_ns;
    insert(s, n, &n->prompts, q);
}

/* What it finds here, in tokens; those blocks are held then. The last token is always computed. */
static void hold_matched(struct sim *s, struct node *n, struct seq *q, struct leg *leg)
{
    uint32_t usable = (leg->goal - 1) / s->page_tokens;
    uint32_t pages = blocks_match_one(s, number(s, n), q->t) * s->block_pages;
    pages = pages < usable ? pages : usable;
    for (; leg->n_blocks < pages / s->block_pages; leg->n_blocks++)
        pool_hold(n, block_at(s, q, leg->n_blocks));
    leg->n_computed = pages * s->page_tokens;
}

static void admitted(struct sim *s, struct node *n, struct seq *q, struct leg *leg)
{
    bool again = q->was_preempted;
    n->n_active++;
    if (only_decodes(s, n, q) && !again) {
        leg->state = LEG_FILLING;
        sim_request_accepted(s, q, step_end(s, n));
        return;
    }
    if (!again) {
        q->admitted_ns = s->now_ns;
        q->own_tokens = leg->n_computed;
        q->coming = leg->n_computed * s->c.kv_bytes_per_token;
        uint32_t have = leg->n_computed / s->c.block_tokens, want = q->q.plan.store_blocks / s->block_pages;
        if (want > have && stores_load(s, n, q, have, want)) {
            leg->state = LEG_FILLING;
            return;
        }
    }
    start_prompt(s, n, q, leg);
}

static bool admit_one(struct sim *s, struct node *n, struct seq *q)
{
    struct leg *leg = leg_on(s, n, q);
    leg->goal = q->t->n_prompt + q->n_generated;
    leg->n_computed = 0;
    if (!only_decodes(s, n, q) || q->was_preempted)
        hold_matched(s, n, q, leg);
    if (!grow(s, n, leg, leg->goal)) {
        leg->n_computed = 0;
        give_back(s, n, q, leg);
        return false;
    }
    list_remove(&n->waiting, q);
    admitted(s, n, q, leg);
    return true;
}

static void admit(struct sim *s, struct node *n)
{
    while (n->waiting.n && n->n_active < s->c.max_batch && admit_one(s, n, n->waiting.at[0]))
        ;
}

/* --------------------------------------------------------------- preemption */

/* Of those that generate here, the one that came last. */
static struct seq *newest(struct sim *s, struct node *n)
{
    struct seq *best = NULL;
    struct list *lists[] = {&n->running, &n->prompts};
    for (int k = 0; k < 2; k++)
        for (uint32_t i = 0; i < lists[k]->n; i++) {
            struct seq *q = lists[k]->at[i];
            if ((!best || leg_on(s, n, q)->order > leg_on(s, n, best)->order) &&
                (q->q.plan.decode == number(s, n) || !hands_over(q)))
                best = q;
        }
    return best;
}

static void preempt(struct sim *s, struct node *n, struct seq *q)
{
    struct leg *leg = leg_on(s, n, q);
    if (!list_remove(&n->running, q))
        list_remove(&n->prompts, q);
    give_back(s, n, q, leg);
    leg->state = LEG_WAITING;
    leg->n_computed = leg->rows = 0;
    n->n_active--;
    q->was_preempted = true;
    q->out->n_preempted++;
    insert(s, n, &n->waiting, q);
}

/* Pages for each one's next token, in order, whatever it takes. */
static void make_room(struct sim *s, struct node *n)
{
    for (uint32_t i = 0; i < n->running.n; i++) {
        struct seq *q = n->running.at[i];
        if (grow(s, n, leg_on(s, n, q), q->t->n_prompt + q->n_generated))
            continue;
        preempt(s, n, newest(s, n));
        i = UINT32_MAX; /* from the first on: they have moved up */
    }
}

/* How many steps all can go without anybody's leaving; 0: their pages aren't there even for one. */
static uint32_t steps_ahead(struct sim *s, struct node *n)
{
    uint32_t steps = UINT32_MAX, need = 0;
    for (uint32_t i = 0; i < n->running.n; i++) {
        const struct seq *q = n->running.at[i];
        steps = q->n_total - q->n_generated < steps ? q->n_total - q->n_generated : steps;
    }
    for (uint32_t i = 0; i < n->running.n; i++) {
        const struct seq *q = n->running.at[i];
        uint32_t pages = pages_for(s, q->t->n_prompt + q->n_generated + steps - 1);
        uint32_t have = pages_of(s, leg_on(s, n, n->running.at[i]));
        need += pages > have ? pages - have : 0;
    }
    if (need > n->pool.n_free + n->pool.n_idle)
        return 0;
    for (uint32_t i = 0; i < n->running.n; i++)
        grow(s, n, leg_on(s, n, n->running.at[i]),
             n->running.at[i]->t->n_prompt + n->running.at[i]->n_generated + steps - 1);
    return steps;
}

/* ------------------------------------------------------------------- steps */

/* Standard normal: Box and Muller, of one worker's own numbers. */
static double normal(struct sim *s, struct node *n)
{
    double u = random_unit(random_at(s->c.seed, number(s, n), n->n_random)) + 0x1p-54;
    double v = random_unit(random_at(s->c.seed, number(s, n), n->n_random + 1));
    n->n_random += 2;
    return sqrt(-2 * log(u)) * cos(2 * M_PI * v);
}

/* A log-normal factor of mean 1 on one step; of n steps, their mean. */
static double noise(struct sim *s, struct node *n, uint32_t n_steps)
{
    double sigma = s->c.noise / sqrt(n_steps);
    return sigma > 0 ? exp(sigma * normal(s, n) - sigma * sigma / 2) : 1;
}

static double step_ms(const struct node *n)
{
    struct cost_profile now = n->cost;
    for (int i = 0; i < 3; i++) {
        now.prefill[i] *= power_prefill_factor(n->clock);
        now.decode[i] *= power_decode_factor(n->clock);
    }
    return cost_profile_step_ms(&now, &n->step);
}

static double watts_of_step(const struct node *n)
{
    double most = n->prompts.n ? n->power.prefill : n->power.decode;
    return n->power.idle + (most - n->power.idle) * power_draw_factor(n->clock);
}

static double context_of(const struct seq *q)
{
    return q->t->n_prompt + q->n_generated - 1;
}

static void make_items(struct sim *s, uint32_t n_items)
{
    if (n_items <= s->cap_items)
        return;
    s->cap_items = n_items * 2;
    s->items = mem_resize(s->items, s->cap_items, sizeof(*s->items));
    s->rows = mem_resize(s->rows, s->cap_items, sizeof(*s->rows));
}

/* One step with prompts: what is left of the rows after the running ones goes to them, in order. */
static struct cost_step plan_step(struct sim *s, struct node *n)
{
    uint32_t n_prompts = n->prompts.n, n_running = n->running.n, chunk = s->c.chunk_tokens;
    struct cost_step step = {.n_prompts = n_prompts, .batch = n_running};
    make_items(s, n_prompts + n_running);
    for (uint32_t i = 0; i < n_prompts; i++) {
        const struct leg *leg = leg_on(s, n, n->prompts.at[i]);
        s->items[i] = (struct batch_item){
            .n_pending = leg->goal - leg->n_computed, .n_computed = leg->n_computed, .chunk = chunk};
    }
    for (uint32_t i = 0; i < n_running; i++) {
        const struct seq *q = n->running.at[i];
        double since = ms_of(q->first_ns, s->now_ns);
        s->items[n_prompts + i] = (struct batch_item){.n_pending = 1,
                                                      .n_computed = (uint32_t)context_of(q),
                                                      .decoding = true,
                                                      .chunk = 1,
                                                      .room_ms = batching_room_ms(q->q.tpot_ms, q->n_generated, since)};
        step.context += context_of(q);
    }
    batching_plan(s->items, n_prompts + n_running, s->c.max_rows ? s->c.max_rows : chunk + n_running, &n->model,
                  s->rows);
    for (uint32_t i = 0; i < n_prompts; i++) {
        struct leg *leg = leg_on(s, n, n->prompts.at[i]);
        leg->rows = s->rows[i];
        step.prefill_tokens += leg->rows;
        step.prefill_square += (double)leg->rows * (leg->rows + 2.0 * leg->n_computed);
    }
    return step;
}

/* All layers but the last part are announced while the step runs: taken to be there when the first part is. */
static void announce_early(struct sim *s, struct node *n)
{
    for (uint32_t i = 0; i < n->prompts.n; i++) {
        struct seq *q = n->prompts.at[i];
        struct leg *leg = leg_on(s, n, q);
        if (!hands_over(q) || !leg->rows || only_decodes(s, n, q))
            continue;
        q->coming += leg->rows * s->c.kv_bytes_per_token;
        if (s->c.port_gb_s > 0)
            events_post(&s->events, s->now_ns + ns_of(n->run_ms / ANNOUNCE_CALLS), EVENT_ANNOUNCE,
                        (uint32_t)(q - s->seqs), q->placement);
    }
}

static void begin(struct sim *s, struct node *n)
{
    if (n->is_busy || !n->is_up)
        return;
    admit(s, n);
    uint32_t steps = n->prompts.n || !n->running.n ? 0 : steps_ahead(s, n);
    if (!steps)
        make_room(s, n);
    if (!(n->prompts.n + n->running.n))
        return;
    n->n_decoding = n->running.n;
    n->n_steps = 0;
    if (n->prompts.n) {
        n->step = plan_step(s, n);
        n->run_ms = step_ms(n) * noise(s, n, 1);
    } else {
        n->n_steps = steps ? steps : 1;
        n->step = (struct cost_step){.batch = n->running.n};
        for (uint32_t i = 0; i < n->running.n; i++)
            n->step.context += context_of(n->running.at[i]);
        n->step.context += (n->n_steps - 1) / 2.0 * n->running.n; /* of the step in the middle */
        n->run_ms = step_ms(n) * n->n_steps * noise(s, n, n->n_steps);
    }
    n->watts = watts_of_step(n);
    n->is_busy = true;
    n->began_ns = s->now_ns;
    announce_early(s, n);
    events_post(&s->events, s->now_ns + ns_of(n->run_ms), EVENT_STEP_END, number(s, n), ++n->run);
}

/* Something changes while a run of decode steps goes on: it ends with the step that runs now. */
static void cut_run(struct sim *s, struct node *n)
{
    double each = n->run_ms / n->n_steps;
    if (!n->is_busy || n->n_steps <= 1)
        return;
    uint32_t steps = (uint32_t)fmin(floor(ms_of(n->began_ns, s->now_ns) / each) + 1, n->n_steps);
    if (steps == n->n_steps)
        return;
    n->run_ms = steps * each;
    n->n_steps = steps;
    events_post(&s->events, n->began_ns + ns_of(n->run_ms), EVENT_STEP_END, number(s, n), ++n->run);
}

void node_set_clock(struct sim *s, uint32_t w, double clock)
{
    struct node *n = &s->nodes[w];
    if (n->clock == clock)
        return;
    n->clock = clock;
    cut_run(s, n);
}

double node_watts(const struct node *n)
{
    return n->is_busy ? n->watts : n->power.idle;
}

void node_show_progress(struct sim *s)
{
    for (uint32_t w = 0; w < s->n_nodes; w++) {
        struct node *n = &s->nodes[w];
        if (!n->is_busy || n->n_steps <= 1)
            continue;
        uint32_t done = (uint32_t)(ms_of(n->began_ns, s->now_ns) / (n->run_ms / n->n_steps));
        for (uint32_t i = 0; i < n->n_decoding; i++) {
            struct seq *q = n->running.at[i];
            scheduler_generated(&q->q, q->n_generated - q->n_before + done);
        }
    }
}

/* --------------------------------------------------------------- hand-over */

static void handed_over(struct sim *s, uint32_t request)
{
    struct seq *q = &s->seqs[request];
    q->flow = 0;
    events_post(&s->events, s->now_ns + ns_of(s->c.link_ms), EVENT_JOIN, request, q->placement);
}

/* What was announced flows as soon as the reader has pages for it. */
void node_send(struct sim *s, struct seq *q)
{
    if (!q->is_accepted || s->now_ns < q->accepted_ns || q->is_sent || !s->nodes[q->q.plan.prefill].is_up ||
        !s->nodes[q->q.plan.decode].is_up)
        return;
    if (!q->flow)
        q->flow = 1 + net_open(s, &s->nodes[q->q.plan.prefill].sends, &s->nodes[q->q.plan.decode].receives, handed_over,
                               (uint32_t)(q - s->seqs));
    if (q->unsent > 0)
        net_add(s, q->flow - 1, q->unsent);
    s->result->bytes_moved += q->unsent;
    q->unsent = 0;
    q->is_sent = q->is_closed;
    if (q->is_closed)
        net_finish(s, q->flow - 1);
}

void node_announce(struct sim *s, struct seq *q)
{
    double part = q->coming * (ANNOUNCE_CALLS - 1) / ANNOUNCE_CALLS;
    q->unsent += part;
    q->coming -= part;
    node_send(s, q);
}

/* The step is over: the last part. */
static void announce_rest(struct sim *s, struct seq *q, bool is_last)
{
    q->unsent += q->coming;
    q->coming = 0;
    q->is_closed = is_last;
    if (q->unsent > 0 || is_last)
        node_send(s, q);
}

void node_join(struct sim *s, struct seq *q)
{
    uint32_t from = q->q.plan.prefill;
    struct node *n = &s->nodes[q->q.plan.decode];
    struct leg *leg = &q->legs[1];
    q->out->transfer_ms = ms_of(q->prefilled_ns, s->now_ns);
    node_drop(s, from, q);
    node_go_on(s, from);
    leg->state = LEG_DECODING;
    leg->n_computed = leg->goal;
    name_blocks(s, n, q, leg);
    cut_run(s, n);
    list_push(&n->running, q);
    begin(s, n);
}

/* ------------------------------------------------------------ ends of steps */

static void over(struct sim *s, struct node *n, struct seq *q, struct leg *leg)
{
    give_back(s, n, q, leg);
    leg->state = LEG_NONE;
    n->n_active--;
    sim_request_ended(s, q);
}

static void end_decode(struct sim *s, struct node *n, uint32_t steps)
{
    double each = n->run_ms / steps, began = (double)n->began_ns * 1e-6;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n->running.n; i++) {
        struct seq *q = n->running.at[i];
        n->running.at[kept++] = q;
        if (i >= n->n_decoding)
            continue;
        struct leg *leg = leg_on(s, n, q);
        sim_request_note_tokens(s, q, steps, began + each, each);
        leg->n_computed += steps;
        q->n_generated += steps;
        scheduler_generated(&q->q, q->n_generated - q->n_before);
        if (q->n_generated == q->n_total) {
            kept--;
            over(s, n, q, leg);
        }
    }
    n->running.n = kept;
}

/* The next token is sampled: the first, or one after a preemption or another worker's death. */
static void prompt_done(struct sim *s, struct node *n, struct seq *q, struct leg *leg)
{
    bool split = hands_over(q) && !only_decodes(s, n, q);
    q->n_generated++;
    if (!only_decodes(s, n, q) && !q->was_preempted)
        stores_offer(s, n, q->t, q->load_end, blocks_of(s, q->t));
    sim_request_note_tokens(s, q, 1, (double)s->now_ns * 1e-6, 0);
    sim_request_prefilled(s, q);
    if (q->n_generated == q->n_total) {
        over(s, n, q, leg);
    } else if (split) {
        leg->state = LEG_LEASED;
        n->n_active--;
        announce_rest(s, q, true);
    } else {
        leg->state = LEG_DECODING;
        list_push(&n->running, q);
    }
}

static void end_prompts(struct sim *s, struct node *n)
{
    uint32_t kept = 0, n_prompts = n->prompts.n;
    for (uint32_t i = 0; i < n_prompts; i++) {
        struct seq *q = n->prompts.at[i];
        struct leg *leg = leg_on(s, n, q);
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

static void note_load(struct sim *s, struct node *n)
{
    double from = (double)n->began_ns * 1e-6;
    n->out->busy_ms += n->run_ms;
    n->out->prefill_ms += n->n_steps ? 0 : n->run_ms;
    n->out->joules += n->watts * n->run_ms * 1e-3;
    sim_note_load(s, n->out, from, from + n->run_ms);
}

void node_step_ended(struct sim *s, uint32_t w)
{
    struct node *n = &s->nodes[w];
    uint32_t steps = n->n_steps ? n->n_steps : 1;
    n->is_busy = false;
    s->result->n_steps += steps;
    note_load(s, n);
    n->step.ms = n->run_ms / steps;
    n->model = cost_observe(n->model, &n->step);
    scheduler_observe_step(s->scheduler, w, &n->step);
    end_decode(s, n, steps);
    end_prompts(s, n);
    begin(s, n);
}

/* -------------------------------------------------------- what comes and goes */

void node_leg(struct sim *s, uint32_t w, struct seq *q)
{
    struct node *n = &s->nodes[w];
    struct leg *leg = leg_on(s, n, q);
    *leg = (struct leg){.state = LEG_WAITING, .order = ++s->n_orders};
    list_push(&n->waiting, q);
    if (!n->is_up)
        return;
    if (only_decodes(s, n, q) && n->is_busy) {
        if (n->waiting.n == 1 && n->n_active < s->c.max_batch)
            admit_one(s, n, q);
        return;
    }
    cut_run(s, n);
    begin(s, n);
}

void node_filled(struct sim *s, struct seq *q, uint32_t n_blocks)
{
    struct node *n = &s->nodes[q->q.plan.prefill];
    struct leg *leg = &q->legs[0];
    uint32_t usable = (leg->goal - 1) / s->page_tokens, pages = n_blocks * s->block_pages;
    leg->n_computed = (pages < usable ? pages : usable) * s->page_tokens;
    q->coming = leg->n_computed * s->c.kv_bytes_per_token;
    name_blocks(s, n, q, leg);
    cut_run(s, n);
    start_prompt(s, n, q, leg);
    begin(s, n);
}

void node_go_on(struct sim *s, uint32_t w)
{
    struct node *n = &s->nodes[w];
    if (n->waiting.n)
        begin(s, n);
}

void node_drop(struct sim *s, uint32_t w, struct seq *q)
{
    struct node *n = &s->nodes[w];
    struct leg *leg = leg_on(s, n, q);
    uint32_t at;
    if (leg->state == LEG_NONE)
        return;
    if (leg->state != LEG_WAITING && leg->state != LEG_LEASED)
        n->n_active--;
    list_remove(&n->waiting, q);
    list_remove(&n->prompts, q);
    if (find(&n->running, q, &at)) {
        n->n_decoding -= n->is_busy && at < n->n_decoding;
        take_out(&n->running, at);
    }
    if (leg->state != LEG_WAITING)
        give_back(s, n, q, leg);
    leg->state = LEG_NONE;
}

/* Of a run of decode steps those that are over have shown their tokens. Of the step that runs only the time counts. */
static void end_run_by_death(struct sim *s, struct node *n)
{
    double ran_ms = fmin(ms_of(n->began_ns, s->now_ns), n->run_ms);
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

/* What flows to and from it stops; those whose request it is hear of it later. */
void node_die(struct sim *s, uint32_t w)
{
    struct node *n = &s->nodes[w];
    end_run_by_death(s, n);
    n->is_up = false;
    n->run++;
    for (uint64_t i = 0; i < s->n_seqs; i++) {
        struct seq *q = &s->seqs[i];
        if (q->q.plan.prefill == w)
            stores_cancel(s, q);
        if (q->flow && (q->q.plan.prefill == w || q->q.plan.decode == w)) {
            net_cancel(s, q->flow - 1);
            q->flow = 0;
            q->placement++; /* nothing of it joins */
        }
    }
}
