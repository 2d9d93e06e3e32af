#include "replay/simulate.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "sched/batching.h"

enum event_kind { EVENT_ARRIVAL, EVENT_STEP_END, EVENT_JOIN, EVENT_RETURN, EVENT_PROBE, EVENT_TICK };
enum { TICK_MS = 20, PROBE_MS = 5 };

struct event {
    uint64_t at_ns, order; /* equal times in the order of their making */
    enum event_kind kind;
    uint32_t subject; /* request or worker */
    uint64_t run;     /* of the worker: one that was cut short is not the one that ends */
};

struct seq { /* a request on its way */
    struct sched_request q;
    const struct trace_request *t;
    struct simulated *out;
    uint32_t n_computed, n_generated, n_total; /* of the prompt; of the answer; the answer's true length */
    uint32_t rows;                             /* of the step that runs */
    uint64_t first_ns;
    struct seq *next;       /* of its workflow: sent when this one has ended */
    const struct seq *head; /* of its workflow */
};

struct cached { /* a block in one worker's pool: doubly linked, most recently used first */
    uint32_t prev, next;
};

struct node { /* a worker */
    enum worker_role role;
    struct seq **prompts, **running; /* in order of arrival */
    uint32_t n_prompts, cap_prompts, n_running, cap_running;
    bool is_busy;
    uint64_t began_ns, run;
    uint32_t n_steps;    /* of the run: 0 when prompts take part */
    uint32_t n_decoding; /* in the run: those that joined since follow behind */
    double run_ms, busy_ms;
    struct cached *blocks; /* by number of the block; blocks[n_blocks] is the list's head */
    uint32_t n_cached, capacity;
    struct rand {
        uint64_t n;
    } rand;
};

struct sim {
    const struct trace *trace;
    struct simulate_config c;
    struct scheduler *scheduler;
    struct seq *seqs;
    uint64_t n_seqs;
    struct node *nodes;
    uint32_t n_nodes, n_words;
    uint32_t *block_of; /* numbers of the trace's blocks */
    uint32_t n_blocks;
    uint64_t *holders; /* n_words for each block */
    struct event *heap;
    uint64_t n_heap, cap_heap, n_made, now_ns, n_open;
    struct simulate_result *result;
    struct batch_item *items;
    uint32_t *rows, cap_items;
};

/* ------------------------------------------------------------------ events */

static bool earlier(const struct event *a, const struct event *b)
{
    return a->at_ns < b->at_ns || (a->at_ns == b->at_ns && a->order < b->order);
}

static void post(struct sim *s, uint64_t at_ns, enum event_kind kind, uint32_t subject, uint64_t run)
{
    if (s->n_heap == s->cap_heap) {
        s->cap_heap = s->cap_heap ? s->cap_heap * 2 : 1024;
        s->heap = mem_resize(s->heap, s->cap_heap, sizeof(*s->heap));
    }
    struct event e = {at_ns, s->n_made++, kind, subject, run};
    uint64_t i = s->n_heap++;
    for (; i && earlier(&e, &s->heap[(i - 1) / 2]); i = (i - 1) / 2)
        s->heap[i] = s->heap[(i - 1) / 2];
    s->heap[i] = e;
}

static struct event take(struct sim *s)
{
    struct event first = s->heap[0], last = s->heap[--s->n_heap];
    uint64_t i = 0;
    for (;;) {
        uint64_t child = 2 * i + 1;
        if (child >= s->n_heap)
            break;
        child += child + 1 < s->n_heap && earlier(&s->heap[child + 1], &s->heap[child]);
        if (!earlier(&s->heap[child], &last))
            break;
        s->heap[i] = s->heap[child];
        i = child;
    }
    s->heap[i] = last;
    return first;
}

static uint64_t ns_of(double ms)
{
    return (uint64_t)(ms * 1e6);
}

/* Standard normal: Box and Muller, of one worker's own numbers. */
static double normal(struct sim *s, struct node *n)
{
    uint64_t stream = (uint64_t)(n - s->nodes);
    double u = random_unit(random_at(s->c.seed, stream, n->rand.n)) + 0x1p-54;
    double v = random_unit(random_at(s->c.seed, stream, n->rand.n + 1));
    n->rand.n += 2;
    return sqrt(-2 * log(u)) * cos(2 * M_PI * v);
}

/* A log-normal factor of mean 1 on one step; of n steps, their mean. */
static double noise(struct sim *s, struct node *n, uint32_t n_steps)
{
    double sigma = s->c.noise / sqrt(n_steps);
    return sigma > 0 ? exp(sigma * normal(s, n) - sigma * sigma / 2) : 1;
}

/* ------------------------------------------------------------------ blocks */

static uint64_t *holders_of(struct sim *s, uint32_t block)
{
    return s->holders + (uint64_t)block * s->n_words;
}

static bool holds(struct sim *s, uint32_t node, uint32_t block)
{
    return holders_of(s, block)[node / 64] >> node % 64 & 1;
}

static void unlink_block(struct node *n, uint32_t b)
{
    n->blocks[n->blocks[b].prev].next = n->blocks[b].next;
    n->blocks[n->blocks[b].next].prev = n->blocks[b].prev;
}

static void use_block(struct sim *s, uint32_t node, uint32_t b)
{
    struct node *n = &s->nodes[node];
    uint32_t head = s->n_blocks;
    if (holds(s, node, b)) {
        unlink_block(n, b);
    } else if (n->n_cached == n->capacity) {
        uint32_t victim = n->blocks[head].prev;
        unlink_block(n, victim);
        holders_of(s, victim)[node / 64] &= ~(1ull << node % 64);
    } else {
        n->n_cached++;
    }
    holders_of(s, b)[node / 64] |= 1ull << node % 64;
    n->blocks[b] = (struct cached){head, n->blocks[head].next};
    n->blocks[n->blocks[head].next].prev = b;
    n->blocks[head].next = b;
}

static uint32_t full_blocks(const struct sim *s, const struct trace_request *t)
{
    uint32_t full = t->n_prompt / s->c.block_tokens;
    return t->n_blocks < full ? t->n_blocks : full;
}

/* From the tail on, so that the head is the last to go. */
static void use_chain(struct sim *s, uint32_t node, const struct trace_request *t)
{
    uint32_t n = full_blocks(s, t);
    for (uint32_t i = n < s->nodes[node].capacity ? n : s->nodes[node].capacity; i--;)
        use_block(s, node, s->block_of[t->first_block + i]);
}

static void match(void *user, struct sched_request *q)
{
    struct sim *s = user;
    const struct seq *q_seq = q->user;
    const struct trace_request *t = q_seq->t;
    uint32_t n = full_blocks(s, t);
    uint32_t *matched = q->matched_blocks;
    memset(matched, 0, s->n_nodes * sizeof(*matched));
    for (uint32_t w = 0; w < s->n_words; w++) {
        uint64_t mask = ~0ull;
        for (uint32_t i = 0; i < n && mask; i++) {
            uint64_t now = mask & holders_of(s, s->block_of[t->first_block + i])[w];
            for (uint64_t lost = mask & ~now; lost; lost &= lost - 1) {
                uint32_t node = w * 64 + (uint32_t)__builtin_ctzll(lost);
                if (node < s->n_nodes)
                    matched[node] = i;
            }
            mask = now;
        }
        for (; mask; mask &= mask - 1)
            if (w * 64 + (uint32_t)__builtin_ctzll(mask) < s->n_nodes)
                matched[w * 64 + (uint32_t)__builtin_ctzll(mask)] = n;
    }
}

/* ------------------------------------------------------------------- steps */

static void push(struct seq ***list, uint32_t *n, uint32_t *cap, struct seq *q)
{
    if (*n == *cap) {
        *cap = *cap ? *cap * 2 : 32;
        *list = mem_resize(*list, *cap, sizeof(**list));
    }
    (*list)[(*n)++] = q;
}

static double step_ms(const struct cost_profile *c, const struct cost_step *s)
{
    const double *p = c->prefill, *d = c->decode;
    return (s->prefill_tokens ? p[0] + p[1] * s->prefill_tokens + p[2] * s->prefill_square : 0) +
           (s->batch ? d[0] + d[1] * s->context + d[2] * s->batch : 0);
}

/* One step with prompts: what is left of the rows after the running ones goes to them, in order. */
static struct cost_step plan_step(struct sim *s, struct node *n)
{
    struct cost_step step = {.n_prompts = n->n_prompts, .batch = n->n_running};
    uint32_t n_items = n->n_prompts + n->n_running;
    if (n_items > s->cap_items) {
        s->cap_items = n_items * 2;
        s->items = mem_resize(s->items, s->cap_items, sizeof(*s->items));
        s->rows = mem_resize(s->rows, s->cap_items, sizeof(*s->rows));
    }
    for (uint32_t i = 0; i < n->n_prompts; i++) {
        const struct seq *q = n->prompts[i];
        s->items[i] =
            (struct batch_item){q->q.n_tokens - q->n_computed, false, s->c.chunk_tokens, q->q.plan.chunk_tokens};
    }
    for (uint32_t i = 0; i < n->n_running; i++) {
        s->items[n->n_prompts + i] = (struct batch_item){1, true, 1, 1};
        step.context += n->running[i]->q.n_tokens + n->running[i]->n_generated;
    }
    batching_plan(s->items, n_items, s->c.chunk_tokens + n->n_running, s->rows);
    for (uint32_t i = 0; i < n->n_prompts; i++) {
        struct seq *q = n->prompts[i];
        q->rows = s->rows[i];
        step.prefill_tokens += q->rows;
        step.prefill_square += (double)q->rows * (q->rows + 2.0 * q->n_computed);
    }
    return step;
}

static void begin(struct sim *s, uint32_t node)
{
    struct node *n = &s->nodes[node];
    struct cost_step step = {.batch = n->n_running};
    if (n->is_busy || !(n->n_prompts + n->n_running))
        return;
    n->n_steps = 0;
    n->n_decoding = n->n_running;
    if (n->n_prompts) {
        step = plan_step(s, n);
        n->run_ms = step_ms(&s->c.cost, &step) * noise(s, n, 1);
    } else {
        n->n_steps = UINT32_MAX;
        for (uint32_t i = 0; i < n->n_running; i++) {
            const struct seq *q = n->running[i];
            step.context += q->q.n_tokens + q->n_generated;
            if (q->n_total - q->n_generated < n->n_steps)
                n->n_steps = q->n_total - q->n_generated;
        }
        step.context += (n->n_steps - 1) / 2.0 * n->n_running; /* of the step in the middle */
        n->run_ms = step_ms(&s->c.cost, &step) * n->n_steps * noise(s, n, n->n_steps);
        step.ms = n->run_ms / n->n_steps;
    }
    if (n->n_prompts)
        step.ms = n->run_ms;
    scheduler_observe_step(s->scheduler, node, &step);
    n->is_busy = true;
    n->began_ns = s->now_ns;
    n->busy_ms += n->run_ms;
    post(s, s->now_ns + ns_of(n->run_ms), EVENT_STEP_END, node, ++n->run);
}

/* Somebody joins while a run of decode steps goes on: it ends with the step that runs now. */
static void cut_run(struct sim *s, uint32_t node)
{
    struct node *n = &s->nodes[node];
    if (!n->is_busy || n->n_steps <= 1)
        return;
    double each = n->run_ms / n->n_steps, done = (double)(s->now_ns - n->began_ns) * 1e-6 / each;
    uint32_t steps = (uint32_t)fmin(floor(done) + 1, n->n_steps);
    if (steps == n->n_steps)
        return;
    n->busy_ms -= n->run_ms - steps * each;
    n->run_ms = steps * each;
    n->n_steps = steps;
    post(s, n->began_ns + ns_of(n->run_ms), EVENT_STEP_END, node, ++n->run);
}

/* The next step of its workflow is sent, or never will be. */
static void step_over(struct sim *s, struct seq *q, bool answered)
{
    struct seq *next = q->next;
    if (next && answered)
        post(s, s->now_ns, EVENT_ARRIVAL, (uint32_t)(next - s->seqs), 0);
    for (; next && !answered; next = next->next) {
        next->out->refused = true;
        s->n_open--;
    }
}

static void finish(struct sim *s, struct seq *q)
{
    q->out->end_ms = (double)s->now_ns * 1e-6;
    if (q->n_total > 1)
        q->out->tpot_ms = (double)(s->now_ns - q->first_ns) * 1e-6 / (q->n_total - 1);
    scheduler_generated(&q->q, q->n_total);
    scheduler_end(s->scheduler, &q->q, s->now_ns, true);
    s->n_open--;
    step_over(s, q, true);
}

static void prompt_done(struct sim *s, uint32_t node, struct seq *q)
{
    q->first_ns = s->now_ns;
    q->out->ttft_ms = (double)(s->now_ns - q->q.arrived_ns) * 1e-6;
    q->n_generated = 1;
    use_chain(s, node, q->t);
    scheduler_prefilled(s->scheduler, &q->q, s->now_ns);
    scheduler_generated(&q->q, 1);
    if (q->n_total <= 1) {
        finish(s, q);
    } else if (q->q.plan.decode == node) {
        push(&s->nodes[node].running, &s->nodes[node].n_running, &s->nodes[node].cap_running, q);
    } else {
        uint32_t last = q->q.n_tokens < s->c.chunk_tokens ? q->q.n_tokens : s->c.chunk_tokens;
        post(s, s->now_ns + ns_of(s->c.link_ms + s->c.link_ms_per_token * last), EVENT_JOIN, (uint32_t)(q - s->seqs),
             0);
    }
}

static void end_decode(struct sim *s, struct node *n, uint32_t steps)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n->n_running; i++) {
        struct seq *q = n->running[i];
        if (i >= n->n_decoding) {
            n->running[kept++] = q;
            continue;
        }
        q->n_generated += steps;
        scheduler_generated(&q->q, q->n_generated);
        if (q->n_generated < q->n_total)
            n->running[kept++] = q;
        else
            finish(s, q);
    }
    n->n_running = kept;
}

static void end_step(struct sim *s, uint32_t node)
{
    struct node *n = &s->nodes[node];
    uint32_t kept = 0;
    n->is_busy = false;
    end_decode(s, n, n->n_steps ? n->n_steps : 1);
    for (uint32_t i = 0; i < n->n_prompts; i++) {
        struct seq *q = n->prompts[i];
        q->n_computed += q->rows;
        q->rows = 0;
        if (q->n_computed < q->q.n_tokens)
            n->prompts[kept++] = q;
        else
            prompt_done(s, node, q);
    }
    n->n_prompts = kept;
    begin(s, node);
}

/* ------------------------------------------------------- the router's part */

static void placed(void *user, struct sched_request *q_)
{
    struct sim *s = user;
    struct seq *q = q_->user;
    struct node *n = &s->nodes[q->q.plan.prefill];
    uint32_t usable = (q->q.n_tokens - 1) / s->c.block_tokens, own;
    match(s, &q->q);
    own = q->q.matched_blocks[q->q.plan.prefill] < usable ? q->q.matched_blocks[q->q.plan.prefill] : usable;
    free(q->q.matched_blocks);
    q->q.matched_blocks = NULL;
    q->n_computed = own * s->c.block_tokens;
    q->rows = 0;
    q->out->cached_tokens = q->n_computed;
    q->out->prefill = q->q.plan.prefill;
    q->out->decode = q->q.plan.decode;
    use_chain(s, q->q.plan.prefill, q->t);
    cut_run(s, q->q.plan.prefill);
    push(&n->prompts, &n->n_prompts, &n->cap_prompts, q);
    begin(s, q->q.plan.prefill);
}

/* Whether it would be admitted, had it come now. */
static void probe(struct sim *s, struct seq *q)
{
    struct sched_request asked = q->q;
    asked.arrived_ns = s->now_ns;
    asked.identity = asked.matched_ns = 0;
    asked.matched_blocks = mem_array(s->n_nodes, sizeof(uint32_t));
    q->out->admissible_ms += PROBE_MS;
    bool admitted = scheduler_would_admit(s->scheduler, &asked, s->now_ns);
    if (!admitted && (asked.plan.hopeless || !s->n_open))
        q->out->admissible_ms = 0;
    else if (!admitted)
        post(s, s->now_ns + PROBE_MS * NS_PER_MS, EVENT_PROBE, (uint32_t)(q - s->seqs), 0);
    free(asked.matched_blocks);
}

static void was_refused(struct sim *s, struct seq *q, double retry_after_ms)
{
    bool first = !q->out->came_back;
    s->n_open--;
    free(q->q.matched_blocks);
    q->q.matched_blocks = NULL;
    q->out->refused = true;
    if (first && retry_after_ms > 0 && random_unit(random_at(s->c.seed, 2ull << 40, q->q.number)) < s->c.probe_share)
        post(s, s->now_ns + PROBE_MS * NS_PER_MS, EVENT_PROBE, (uint32_t)(q - s->seqs), 0);
    if (first)
        q->out->retry_after_ms = retry_after_ms;
    if (!first || retry_after_ms <= 0 ||
        random_unit(random_at(s->c.seed, 1ull << 40, q->q.number)) >= s->c.retry_share) {
        step_over(s, q, false);
        return;
    }
    q->out->came_back = true;
    s->n_open++;
    post(s, s->now_ns + ns_of(retry_after_ms), EVENT_RETURN, (uint32_t)(q - s->seqs), 0);
}

static void refused(void *user, struct sched_request *q, double retry_after_ms)
{
    struct sim *s = user;
    s->result->n_late_refused++;
    was_refused(s, q->user, retry_after_ms);
}

static void submit(struct sim *s, struct seq *q)
{
    double retry_after_ms, workflow_ms = s->c.asks ? s->c.asks[q - s->seqs].workflow_ms : 0;
    if (!q->out->came_back)
        q->out->arrived_ms = (double)s->now_ns * 1e-6;
    if (workflow_ms > 0)
        q->q.workflow_deadline_ns = ns_of(q->head->out->arrived_ms + workflow_ms);
    q->q.arrived_ns = s->now_ns;
    q->q.matched_ns = 0;
    q->q.matched_blocks = mem_array(s->n_nodes, sizeof(uint32_t));
    if (!scheduler_submit(s->scheduler, &q->q, s->now_ns, &retry_after_ms)) {
        q->out->predicted_ttft_ms = q->q.plan.ttft_ms;
        was_refused(s, q, retry_after_ms);
        return;
    }
    q->out->admitted_then = q->out->came_back;
    q->out->refused = false;
    q->out->predicted_ttft_ms = q->q.promised_ttft_ms;
    q->out->predicted_tpot_ms = q->q.promised_tpot_ms;
}

/* --------------------------------------------------------------------- run */

static int compare_ids(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void number_blocks(struct sim *s)
{
    uint64_t n = s->trace->n_blocks, *ids = mem_dup(s->trace->blocks, n * sizeof(*ids));
    s->block_of = mem_array(n, sizeof(*s->block_of));
    if (n)
        qsort(ids, n, sizeof(*ids), compare_ids);
    uint64_t kept = 0;
    for (uint64_t i = 0; i < n; i++)
        if (!kept || ids[kept - 1] != ids[i])
            ids[kept++] = ids[i];
    for (uint64_t i = 0; i < n; i++) {
        uint64_t *at = bsearch(&s->trace->blocks[i], ids, kept, sizeof(*ids), compare_ids);
        s->block_of[i] = (uint32_t)(at - ids);
    }
    s->n_blocks = (uint32_t)kept;
    s->holders = mem_array((uint64_t)kept * s->n_words, sizeof(*s->holders));
    free(ids);
}

static void open_nodes(struct sim *s)
{
    const struct simulate_config *c = &s->c;
    for (uint32_t i = 0; i < s->n_nodes; i++) {
        struct node *n = &s->nodes[i];
        n->role = i < c->n_prefill ? ROLE_PREFILL : ROLE_DECODE;
        n->capacity = c->n_pages;
        n->blocks = mem_array((uint64_t)s->n_blocks + 1, sizeof(*n->blocks));
        n->blocks[s->n_blocks] = (struct cached){s->n_blocks, s->n_blocks};
        scheduler_worker_up(s->scheduler, i,
                            &(struct sched_worker_info){.role = n->role,
                                                        .chunk_tokens = c->chunk_tokens,
                                                        .max_batch = c->max_batch,
                                                        .n_pages = c->n_pages,
                                                        .max_context = c->max_context});
    }
}

static void open_seqs(struct sim *s)
{
    for (uint64_t i = 0; i < s->n_seqs; i++) {
        const struct trace_request *t = &s->trace->requests[i];
        struct seq *q = &s->seqs[i];
        q->t = t;
        q->out = &s->result->requests[i];
        q->n_total = t->n_output ? t->n_output : 1;
        q->q = (struct sched_request){.user = q,
                                      .number = i,
                                      .identity = i + 1,
                                      .n_tokens = t->n_prompt,
                                      .max_tokens =
                                          s->c.max_context - t->n_prompt < 2048 ? s->c.max_context - t->n_prompt : 2048,
                                      .block_tokens = s->c.block_tokens,
                                      .ttft_ms = s->c.ttft_ms,
                                      .tpot_ms = s->c.tpot_ms,
                                      .deadline_ns = UINT64_MAX,
                                      .workflow_deadline_ns = UINT64_MAX};
        const struct simulate_ask *a = s->c.asks ? &s->c.asks[i] : NULL;
        q->head = q;
        if (a) {
            q->q.tenant = a->tenant;
            q->q.workflow_steps_left = a->steps_left;
        }
        if (a && a->follows >= 0) {
            s->seqs[a->follows].next = q;
            q->head = s->seqs[a->follows].head;
        } else {
            post(s, ns_of((double)t->arrival_ns * 1e-6 / s->c.rate), EVENT_ARRIVAL, (uint32_t)i, 0);
        }
    }
    s->n_open = s->n_seqs;
}

static void on_event(struct sim *s, const struct event *e)
{
    struct node *n = e->kind == EVENT_STEP_END ? &s->nodes[e->subject] : NULL;
    struct seq *q = e->kind == EVENT_JOIN ? &s->seqs[e->subject] : NULL;
    switch (e->kind) {
    case EVENT_ARRIVAL:
    case EVENT_RETURN:
        submit(s, &s->seqs[e->subject]);
        break;
    case EVENT_PROBE:
        probe(s, &s->seqs[e->subject]);
        break;
    case EVENT_STEP_END:
        if (n->is_busy && n->run == e->run)
            end_step(s, e->subject);
        break;
    case EVENT_JOIN:
        cut_run(s, q->q.plan.decode);
        use_chain(s, q->q.plan.decode, q->t);
        push(&s->nodes[q->q.plan.decode].running, &s->nodes[q->q.plan.decode].n_running,
             &s->nodes[q->q.plan.decode].cap_running, q);
        begin(s, q->q.plan.decode);
        break;
    case EVENT_TICK:
        if (s->n_open)
            post(s, s->now_ns + TICK_MS * NS_PER_MS, EVENT_TICK, 0, 0);
        break;
    }
}

static void loop(struct sim *s)
{
    post(s, TICK_MS * NS_PER_MS, EVENT_TICK, 0, 0);
    while (s->n_heap) {
        struct event e = take(s);
        s->now_ns = e.at_ns;
        on_event(s, &e);
        scheduler_run(s->scheduler, s->now_ns);
    }
}

void simulate_run(const struct trace *trace, const struct simulate_config *config, struct simulate_result *out)
{
    struct sim s = {.trace = trace, .c = *config, .result = out};
    struct scheduler_config sc = {.policy = config->policy,
                                  .order = config->order,
                                  .force = config->force,
                                  .profile = config->cost,
                                  .weights = config->weights,
                                  .n_weights = config->n_weights,
                                  .half_life_ns = 30 * NS_PER_S,
                                  .max_wait_ns = 120 * NS_PER_S,
                                  .max_queued_tokens = UINT64_MAX / 2,
                                  .max_queued = UINT32_MAX / 2,
                                  .user = &s,
                                  .place = placed,
                                  .refuse = refused,
                                  .match = match};
    for (int i = 0; i < 3; i++) {
        sc.profile.prefill[i] *= config->profile_error;
        sc.profile.decode[i] *= config->profile_error;
    }
    s.n_nodes = config->n_prefill + config->n_decode;
    s.n_words = (s.n_nodes + 63) / 64;
    s.n_seqs = config->n_requests && config->n_requests < trace->n_requests ? config->n_requests : trace->n_requests;
    *out = (struct simulate_result){.n_requests = s.n_seqs, .n_workers = s.n_nodes};
    out->requests = mem_array(s.n_seqs, sizeof(*out->requests));
    out->busy_ms = mem_array(s.n_nodes, sizeof(*out->busy_ms));
    s.nodes = mem_array(s.n_nodes, sizeof(*s.nodes));
    s.seqs = mem_array(s.n_seqs, sizeof(*s.seqs));
    s.scheduler = scheduler_open(&sc);
    number_blocks(&s);
    open_nodes(&s);
    open_seqs(&s);
    loop(&s);
    out->duration_ms = (double)s.now_ns * 1e-6;
    for (uint64_t i = 0; i < s.n_seqs; i++)
        out->n_refused += out->requests[i].refused;
    for (uint32_t i = 0; i < s.n_nodes; i++) {
        out->busy_ms[i] = s.nodes[i].busy_ms;
        free(s.nodes[i].prompts);
        free(s.nodes[i].running);
        free(s.nodes[i].blocks);
    }
    scheduler_close(s.scheduler);
    free(s.nodes);
    free(s.seqs);
    free(s.block_of);
    free(s.holders);
    free(s.heap);
    free(s.items);
    free(s.rows);
}

void simulate_result_fini(struct simulate_result *r)
{
    free(r->requests);
    free(r->busy_ms);
    memset(r, 0, sizeof(*r));
}
