/*
 * Compares the simulator's workers with the engine: the same random loads, with shared prefixes, small pools,
 * limits of batch and rows, and chunks, run through both. The tokens that each request finds in the cache,
 * the order and times of admissions, preemptions and ends, the number of steps, and the final contents of the
 * pools must be equal if a block of the trace is a page.
 *
 * The engine computes nothing and takes no time; after each step the virtual clock advances by the time that
 * the cost model gives for it. Legs come when the simulator's scheduler sends them. A split request is handed
 * over in a few nanoseconds, so that this never coincides with the end of a step.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/engine.h"
#include "sched/sequence.h"
#include "tests/replay/simulate_made.h"

enum { N = 60, MAX_NOTES = 64 * N, VOCAB = 61, LINK_NS = 7, LOADS = 400 };

struct load {
    struct maker made;
    struct simulate_config config;
    uint32_t n_prefill;
};

struct notes {
    struct simulate_note at[MAX_NOTES];
    uint32_t n;
};

struct side { /* results of one of the two */
    struct notes legs, admitted[2], over[2];
    uint32_t n_preempted[N];
    uint64_t n_steps;
    uint32_t free[2], cached[2];
};

/* ------------------------------------------------------------------- loads */

static uint32_t between(uint64_t seed, uint64_t what, uint32_t low, uint32_t high)
{
    return low + (uint32_t)(random_unit(random_at(seed, 1, what)) * (high - low + 1));
}

static void add_request(struct load *l, uint64_t seed, uint32_t i, uint64_t at_ns)
{
    const struct simulate_config *c = &l->config;
    uint32_t pool = c->n_pages * c->page_tokens, most = pool / 2 < 400 ? pool / 2 : 400;
    uint32_t n_prompt = between(seed, 100 + i, 1, most),
             n_output = between(seed, 200 + i, 1, pool / 3 < 80 ? pool / 3 : 80);
    uint32_t full = n_prompt / c->block_tokens, shared = between(seed, 300 + i, 0, full);
    /* The whole prompt may be in the cache. */
    if (n_prompt % c->block_tokens == 0 && between(seed, 400 + i, 0, 1)) {
        shared = full;
        /* But no page of the answer can be. */
        n_output = n_output < c->page_tokens ? n_output : c->page_tokens;
    } else if (n_prompt % c->block_tokens == 0 && shared == full) {
        shared--;
    }
    add_in_blocks(&l->made, c->block_tokens, 0, n_prompt, n_output, 1 + between(seed, 500 + i, 0, 3), shared);
    l->made.trace.requests[i].arrival_ns = at_ns;
}

static void note_sim(void *user, const struct simulate_note *note)
{
    struct side *side = user;
    struct notes *list = note->what == SIMULATE_LEG        ? &side->legs
                         : note->what == SIMULATE_ADMITTED ? &side->admitted[note->worker]
                                                           : &side->over[note->worker];
    if (note->what == SIMULATE_PREEMPTED) {
        side->n_preempted[note->request]++;
        return;
    }
    ck_assert_uint_lt(list->n, MAX_NOTES);
    list->at[list->n++] = *note;
}

/* block_pages: pages of a block of the trace. growth: decode steps take longer as contexts grow. */
static void make_load(struct load *l, uint64_t seed, uint32_t n_prefill, uint32_t block_pages, bool growth)
{
    static const enum policy POLICY[] = {POLICY_ROUND_ROBIN, POLICY_LEAST_LOADED, POLICY_TANDEM, POLICY_CACHE_AWARE};
    *l = (struct load){.n_prefill = n_prefill};
    struct simulate_config *c = &l->config;
    *c = config_of(n_prefill, 1);
    c->page_tokens = between(seed, 0, 0, 1) ? 16 : 8;
    c->block_tokens = block_pages * c->page_tokens;
    c->n_pages = between(seed, 1, 16, between(seed, 2, 0, 1) ? 60 : 300);
    c->max_context = c->n_pages * c->page_tokens;
    c->max_batch = between(seed, 3, 1, 16);
    c->chunk_tokens = between(seed, 4, 8, 128);
    c->max_rows = c->max_batch + between(seed, 5, 0, 160);
    c->chunk_tokens = c->chunk_tokens < c->max_rows ? c->chunk_tokens : c->max_rows;
    c->policy = POLICY[between(seed, 6, 0, 3)];
    c->force = n_prefill ? FORCE_SPLIT : FORCE_NONE;
    c->length_error = between(seed, 7, 0, 1) ? 0.05 : 0;
    c->ttft_ms = c->tpot_ms = c->kv_bytes_per_token = 0;
    c->link_ms = LINK_NS * 1e-6;
    c->max_tokens = 0;
    c->cost = (struct cost_profile){{3, 0.02, 0.00001}, {5, growth ? 0.001 : 0, 0.1}};
    double at = 0, gap = between(seed, 8, 5, 200);
    for (uint32_t i = 0; i < N; i++) {
        at += -gap * log(1 - random_unit(random_at(seed, 2, i)));
        /* Whole microseconds and a half, so that no two events coincide. */
        add_request(l, seed, i, (uint64_t)(at * 1e3) * 1000 + 500);
    }
}

/* ------------------------------------------------------------------ engine */

struct rig;

struct leg_of { /* a request's leg on one engine */
    struct rig *rig;
    struct seq *seq;
    uint32_t request, worker, n_preempted;
    bool hands_over;
};

struct rig {
    const struct load *load;
    struct side *out;
    struct clock clock;
    struct engine *engines[2];
    uint64_t busy_until[2]; /* 0: idle */
    struct leg_of legs[N][2];
    uint32_t n_sides_ready[N]; /* split requests: how many of "prefilled" and "accepted" have happened */
    uint32_t ready[N];         /* requests to be handed over, in order */
    uint64_t ready_ns[N];      /* when they are handed over */
    uint32_t n_ready, n_handed_over;
    uint32_t first_token[N];
    struct leg_of *ended[2][N], *to_fill[N];
    uint32_t n_ended[2], n_to_fill;
};

static void push(struct notes *list, const struct leg_of *leg, uint64_t at_ns, uint32_t n)
{
    ck_assert_uint_lt(list->n, MAX_NOTES);
    list->at[list->n++] =
        (struct simulate_note){.worker = leg->worker, .request = leg->request, .at_ns = at_ns, .n = n};
}

static void side_ready(struct rig *rig, uint32_t request)
{
    if (++rig->n_sides_ready[request] == 2) {
        rig->ready[rig->n_ready] = request;
        rig->ready_ns[rig->n_ready++] = clock_now(&rig->clock) + LINK_NS;
    }
}

static void on_admitted(void *user, struct seq *seq, uint32_t n_matched)
{
    struct rig *rig = user;
    struct leg_of *leg = engine_seq_user(seq);
    push(&rig->out->admitted[leg->worker], leg, clock_now(&rig->clock), n_matched * rig->load->config.page_tokens);
    if (leg->worker && rig->load->n_prefill) {
        engine_seq_fill(rig->engines[1], seq);
        side_ready(rig, leg->request);
    }
}

static void on_pages_ready(void *user, struct seq *seq, uint32_t first, uint32_t n, uint16_t begin, uint16_t end)
{
    (void)user, (void)seq, (void)first, (void)n, (void)begin, (void)end;
}

static void on_token(void *user, struct seq *seq, const struct sampled *token)
{
    const struct leg_of *leg = engine_seq_user(seq);
    ((struct rig *)user)->first_token[leg->request] = token->id;
}

static void on_end(void *user, struct seq *seq, enum seq_finish finish)
{
    (void)finish;
    struct rig *rig = user;
    struct leg_of *leg = engine_seq_user(seq);
    rig->ended[leg->worker][rig->n_ended[leg->worker]++] = leg;
}

static void on_block(void *user, bool added, const struct block_key *key, uint32_t chain_index)
{
    (void)user, (void)added, (void)key, (void)chain_index;
}

static void open_engine(struct rig *rig, uint32_t w)
{
    const struct simulate_config *c = &rig->load->config;
    static const struct model_dummy SHAPE = {.vocab_size = VOCAB,
                                             .hidden = 8,
                                             .n_layers = 1,
                                             .n_heads = 1,
                                             .n_kv_heads = 1,
                                             .head_dim = 4,
                                             .intermediate = 8};
    static const struct sim_cost FREE = {.noise = 0};
    struct model_config shape;
    struct td_error e = {{0}};
    model_dummy_config(&SHAPE, &shape);
    const struct engine_config config = {.sim = &FREE,
                                         .shape = &shape,
                                         .kv_dtype = NUM_BF16,
                                         .page_tokens = c->page_tokens,
                                         .n_pages = c->n_pages,
                                         .max_context = c->max_context,
                                         .max_batch = c->max_batch,
                                         .max_rows = c->max_rows,
                                         .chunk_tokens = c->chunk_tokens,
                                         .clock = &rig->clock,
                                         .callbacks = {rig, on_admitted, on_pages_ready, on_token, on_end, on_block}};
    ck_assert_msg(engine_open(&config, &rig->engines[w], &e) == TD_OK, "%s", e.text);
}

/* The tokens of a block follow from its name; those after the last full block are the request's own. */
static void make_ids(const struct load *l, uint32_t request, uint32_t *ids)
{
    const struct trace_request *t = &l->made.trace.requests[request];
    for (uint32_t i = 0; i < t->n_prompt; i++) {
        uint32_t block = i / l->config.block_tokens, full = t->n_prompt / l->config.block_tokens;
        uint64_t name = block < full ? l->made.trace.blocks[t->first_block + block] : 3ull << 61 | request;
        ids[i] = (uint32_t)(random_at(name, i, 0) % VOCAB);
    }
}

static void close_leg(struct rig *rig, struct leg_of *leg)
{
    engine_seq_close(rig->engines[leg->worker], leg->seq);
    leg->seq = NULL;
}

static void fill(struct rig *rig, struct leg_of *leg)
{
    uint32_t n_prompt = rig->load->made.trace.requests[leg->request].n_prompt;
    engine_seq_filled(rig->engines[1], leg->seq, n_prompt);
    engine_seq_append(rig->engines[1], leg->seq, rig->first_token[leg->request]);
}

static void count_preempted(struct rig *rig, uint32_t w)
{
    for (uint32_t r = 0; r < N; r++) {
        struct leg_of *leg = &rig->legs[r][w];
        uint32_t n = leg->seq ? engine_seq_times(leg->seq).n_preempted : leg->n_preempted;
        rig->out->n_preempted[r] += n - leg->n_preempted;
        leg->n_preempted = n;
    }
}

static void begin_step(struct rig *rig, uint32_t w)
{
    if (rig->busy_until[w])
        return;
    for (uint32_t i = 0; w && i < rig->n_to_fill; i++)
        fill(rig, rig->to_fill[i]);
    rig->n_to_fill = w ? 0 : rig->n_to_fill;
    uint32_t rows = engine_step(rig->engines[w]);
    count_preempted(rig, w);
    if (!rows)
        return;
    const struct cost_step step = engine_last_step(rig->engines[w]);
    rig->busy_until[w] =
        clock_now(&rig->clock) + (uint64_t)llround(cost_profile_step_ms(&rig->load->config.cost, &step) * 1e6);
    rig->out->n_steps++;
}

static void open_leg(struct rig *rig, const struct simulate_note *came)
{
    uint32_t r = (uint32_t)came->request, w = came->worker, ids[512];
    const struct trace_request *t = &rig->load->made.trace.requests[r];
    struct leg_of *leg = &rig->legs[r][w];
    struct td_error e = {{0}};
    *leg =
        (struct leg_of){.rig = rig, .request = r, .worker = w, .hands_over = rig->load->n_prefill && t->n_output > 1};
    make_ids(rig->load, r, ids);
    const struct seq_params p = {.ids = ids,
                                 .n_ids = t->n_prompt,
                                 .n_prompt = t->n_prompt,
                                 .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = t->n_output},
                                 .goal = !leg->hands_over ? SEQ_GENERATE
                                         : w              ? SEQ_ADOPT
                                                          : SEQ_FIRST_TOKEN,
                                 .user = leg};
    ck_assert_msg(engine_seq_open(rig->engines[w], &p, &leg->seq, &e) == TD_OK, "%s", e.text);
    begin_step(rig, w);
}

static void end_step(struct rig *rig, uint32_t w)
{
    rig->busy_until[w] = 0;
    for (uint32_t i = 0; i < rig->n_ended[w]; i++) {
        struct leg_of *leg = rig->ended[w][i];
        if (leg->hands_over && !w) {
            side_ready(rig, leg->request);
            continue;
        }
        push(&rig->out->over[w], leg, clock_now(&rig->clock), 0);
        close_leg(rig, leg);
    }
    rig->n_ended[w] = 0;
    begin_step(rig, w);
}

/* Hands a request over: the prefill worker's pages become free, and the decode worker continues with it in
 * its next step. */
static void hand_over(struct rig *rig)
{
    uint32_t r = rig->ready[rig->n_handed_over++];
    close_leg(rig, &rig->legs[r][0]);
    begin_step(rig, 0);
    rig->to_fill[rig->n_to_fill++] = &rig->legs[r][1];
    begin_step(rig, 1);
}

/* Runs the next event; false: there is none. Of events at the same time, ends of steps come first. */
static bool run_event(struct rig *rig, const struct notes *legs, uint32_t *n_legs)
{
    const uint64_t *ends = rig->busy_until, now = clock_now(&rig->clock), none = UINT64_MAX;
    uint32_t w = ends[0] && (!ends[1] || ends[0] <= ends[1]) ? 0 : 1;
    uint64_t step = ends[w] ? ends[w] : none, leg = *n_legs < legs->n ? legs->at[*n_legs].at_ns : none;
    uint64_t fill = rig->n_handed_over < rig->n_ready ? rig->ready_ns[rig->n_handed_over] : none;
    uint64_t next = step < fill ? step : fill;
    next = leg < next ? leg : next;
    if (next == none)
        return false;
    clock_advance(&rig->clock, next - now);
    if (next == step)
        end_step(rig, w);
    else if (next == fill)
        hand_over(rig);
    else
        open_leg(rig, &legs->at[(*n_legs)++]);
    return true;
}

static void run_engines(const struct load *l, struct side *out)
{
    struct rig *rig = mem_zalloc(sizeof(*rig));
    uint32_t w, n_legs = 0;
    rig->load = l;
    rig->out = out;
    clock_init_virtual(&rig->clock, 0);
    for (w = 0; w <= l->n_prefill; w++)
        open_engine(rig, w);
    while (run_event(rig, &out->legs, &n_legs))
        ;
    for (w = 0; w <= l->n_prefill; w++) {
        const struct kvpool_audit a = kvpool_audit(engine_pool(rig->engines[w]));
        out->free[w] = a.free;
        out->cached[w] = a.cached;
        for (uint32_t r = 0; r < N; r++)
            ck_assert_msg(!rig->legs[r][w].seq, "request %u is still there", r);
        engine_close(rig->engines[w]);
    }
    free(rig);
}

/* ----------------------------------------------------------------- compare */

static void run_simulator(const struct load *l, struct side *out)
{
    struct simulate_config c = l->config;
    struct simulate_result r;
    c.observe = note_sim;
    c.observer = out;
    simulate_run(&l->made.trace, &c, &r);
    ck_assert_uint_eq(r.n_refused, 0);
    out->n_steps = r.n_steps;
    for (uint32_t w = 0; w < r.n_workers; w++) {
        out->free[w] = r.workers[w].pages_free;
        out->cached[w] = r.workers[w].pages_cached;
    }
    simulate_result_fini(&r);
}

static double off_ns(const struct notes *a, const struct notes *b, const char *what, uint64_t seed, bool same_n)
{
    double most = 0;
    if (a->n != b->n)
        printf("# load %lu: %u and %u %s\n", (unsigned long)seed, a->n, b->n, what);
    for (uint32_t i = 0; i < a->n && i < b->n; i++) {
        const struct simulate_note *x = &a->at[i], *y = &b->at[i];
        if (x->request != y->request || (same_n && x->n != y->n)) {
            printf("# load %lu, worker %u, %s %u: simulator %lu at %lu (%u), engine %lu at %lu (%u)\n",
                   (unsigned long)seed, x->worker, what, i, (unsigned long)x->request, (unsigned long)x->at_ns, x->n,
                   (unsigned long)y->request, (unsigned long)y->at_ns, y->n);
            return INFINITY;
        }
        if (fabs((double)x->at_ns - (double)y->at_ns) >= 1000 && most < 1000)
            printf("# load %lu, worker %u, %s %u: request %lu at %lu, engine at %lu\n", (unsigned long)seed, x->worker,
                   what, i, (unsigned long)x->request, (unsigned long)x->at_ns, (unsigned long)y->at_ns);
        most = fmax(most, fabs((double)x->at_ns - (double)y->at_ns));
    }
    return a->n == b->n ? most : INFINITY;
}

struct counts {
    uint32_t n, same, admissions, over, cached, preempted, steps, pools;
    uint64_t n_preempted, n_steps, n_cached;
};

static void compare_load(uint64_t seed, uint32_t n_prefill, struct counts *out)
{
    struct load l;
    struct side *sim = mem_zalloc(sizeof(*sim)), *live = mem_zalloc(sizeof(*live));
    make_load(&l, seed, n_prefill, 1, seed % 2);
    run_simulator(&l, sim);
    live->legs = sim->legs;
    run_engines(&l, live);
    bool order = true, cached = true, over = true, pools = true;
    for (uint32_t w = 0; w <= n_prefill; w++) {
        order &= off_ns(&sim->admitted[w], &live->admitted[w], "admitted", seed, false) < 1000;
        cached &= off_ns(&sim->admitted[w], &live->admitted[w], "cached", seed, true) < INFINITY;
        over &= off_ns(&sim->over[w], &live->over[w], "over", seed, false) < 1000;
        pools &= sim->free[w] == live->free[w] && sim->cached[w] == live->cached[w];
        if (sim->free[w] != live->free[w] || sim->cached[w] != live->cached[w])
            printf("# load %lu: pool %u: free %u and %u, cached %u and %u\n", (unsigned long)seed, w, sim->free[w],
                   live->free[w], sim->cached[w], live->cached[w]);
        for (uint32_t i = 0; i < live->admitted[w].n; i++)
            out->n_cached += live->admitted[w].at[i].n;
    }
    bool preempted = !memcmp(sim->n_preempted, live->n_preempted, sizeof(sim->n_preempted));
    bool steps = sim->n_steps == live->n_steps;
    if (!steps)
        printf("# load %lu: steps %lu and %lu\n", (unsigned long)seed, (unsigned long)sim->n_steps,
               (unsigned long)live->n_steps);
    for (uint32_t r = 0; r < N; r++)
        out->n_preempted += live->n_preempted[r];
    out->n++;
    out->n_steps += live->n_steps;
    out->admissions += order;
    out->cached += cached;
    out->over += over;
    out->preempted += preempted;
    out->steps += steps;
    out->pools += pools;
    out->same += order && cached && over && preempted && steps && pools;
    maker_fini(&l.made);
    free(sim);
    free(live);
}

static void compare_loads(uint32_t n_prefill)
{
    struct counts c = {0};
    for (uint64_t seed = 1; seed <= LOADS; seed++)
        compare_load(seed, n_prefill, &c);
    printf("# %u loads of %d requests, %lu steps, %lu preemptions, %lu cached tokens; the same: admissions %u, cached "
           "tokens %u, ends %u, "
           "preemptions %u, steps %u, pools %u, all %u\n",
           c.n, N, (unsigned long)c.n_steps, (unsigned long)c.n_preempted, (unsigned long)c.n_cached, c.admissions,
           c.cached, c.over, c.preempted, c.steps, c.pools, c.same);
    fflush(stdout);
    ck_assert_uint_eq(c.same, c.n);
}

START_TEST(test_simulate_worker_does_what_the_engine_does)
{
    compare_loads(0);
}
END_TEST

START_TEST(test_simulate_prefill_and_decode_workers_do_what_two_engines_do)
{
    compare_loads(1);
}
END_TEST

/* Blocks of four pages are cached and evicted as a whole, and only whole ones are found: results are close,
 * but not equal. */
START_TEST(test_simulate_blocks_of_several_pages_are_close_to_the_engine)
{
    double cached[2] = {0}, preempted[2] = {0}, steps[2] = {0}, last[2] = {0};
    for (uint64_t seed = 1; seed <= LOADS; seed++) {
        struct side *sides[] = {mem_zalloc(sizeof(struct side)), mem_zalloc(sizeof(struct side))};
        struct load l;
        make_load(&l, seed, 0, 4, seed % 2);
        run_simulator(&l, sides[0]);
        sides[1]->legs = sides[0]->legs;
        run_engines(&l, sides[1]);
        for (int k = 0; k < 2; k++) {
            for (uint32_t i = 0; i < N; i++) {
                cached[k] += sides[k]->admitted[0].at[i].n;
                preempted[k] += sides[k]->n_preempted[i];
            }
            steps[k] += (double)sides[k]->n_steps;
            last[k] += (double)sides[k]->over[0].at[N - 1].at_ns * 1e-6;
            free(sides[k]);
        }
        maker_fini(&l.made);
    }
    printf(
        "# blocks of 4 pages, simulator beside engine: cached tokens %.3f, preemptions %.3f, steps %.3f, time %.4f\n",
        cached[0] / cached[1], preempted[0] / preempted[1], steps[0] / steps[1], last[0] / last[1]);
    ck_assert(fabs(cached[0] / cached[1] - 1) < 0.1 && fabs(preempted[0] / preempted[1] - 1) < 0.1);
    ck_assert(fabs(steps[0] / steps[1] - 1) < 0.01 && fabs(last[0] / last[1] - 1) < 0.01);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("simulate_engine");
    TCase *t = tcase_create("simulate_engine");
    tcase_set_timeout(t, 120);
    tcase_add_test(t, test_simulate_worker_does_what_the_engine_does);
    tcase_add_test(t, test_simulate_prefill_and_decode_workers_do_what_two_engines_do);
    tcase_add_test(t, test_simulate_blocks_of_several_pages_are_close_to_the_engine);
    suite_add_tcase(s, t);
    return tap_main(s);
}
