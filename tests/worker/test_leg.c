/* Legs of every kind on a real worker: what is refused at the door, how legs end, and what they leave. */
#include "tests/worker/world.h"

static struct leg_message leg;

/* The tokens of a prompt, computed by one worker that has nothing cached. */
static struct tokens expected(uint32_t text, uint32_t n_prompt, uint32_t max_tokens)
{
    static struct leg_message l;
    struct node_worker *n = world_worker("decode", NULL);
    leg_make(&l, AGGREGATED, 999, text, n_prompt);
    l.sampling.max_tokens = max_tokens;
    router_sends_leg(&n->routers[0], &l);
    turns_until(end_of(&n->routers[0], 999));
    struct tokens t = tokens_of(&n->routers[0], 999);
    t.last = NULL;
    world_close_worker(n);
    n_workers--;
    return t;
}

/* ----------------------------------------------------------------- the door */

static void no_id(struct leg_message *l)
{
    l->m.id = NULL;
}
static void no_incarnation(struct leg_message *l)
{
    l->id.incarnation = 0;
}
static void no_sampling(struct leg_message *l)
{
    l->m.sampling = NULL;
}
static void short_root(struct leg_message *l)
{
    l->m.prefix_root.len = 15;
}
static void no_root(struct leg_message *l)
{
    l->m.prefix_root = (ProtobufCBinaryData){0, NULL};
}
static void unknown_kind(struct leg_message *l)
{
    l->m.kind = (Tandem__Worker__V1__LegKind)3;
}
static void negative_kind(struct leg_message *l)
{
    l->m.kind = (Tandem__Worker__V1__LegKind)-1;
}
static void decode_without_peer(struct leg_message *l)
{
    l->m.kind = TANDEM__WORKER__V1__LEG_KIND__LEG_DECODE;
    l->m.peer_incarnation = 5;
}
static void decode_without_incarnation(struct leg_message *l)
{
    l->m.kind = TANDEM__WORKER__V1__LEG_KIND__LEG_DECODE;
    l->m.peer_xfer_address = rpc_data("p0");
}
static void unknown_lora(struct leg_message *l)
{
    l->m.lora = rpc_data("french");
}
static char long_text[400];
static void long_peer(struct leg_message *l)
{
    l->m.peer_xfer_address = (ProtobufCBinaryData){129, (uint8_t *)long_text};
}
static void long_request_id(struct leg_message *l)
{
    l->m.request_id = (ProtobufCBinaryData){LOG_WORD_MAX + 1, (uint8_t *)long_text};
}
static Tandem__Worker__V1__Store store, *stores[MAX_STORES + 1];
static Tandem__Worker__V1__StoreRun run, *runs[64];
static ProtobufCBinaryData holders[MAX_HOLDERS + 1];
static void too_many_stores(struct leg_message *l)
{
    l->m.n_stores = MAX_STORES + 1;
    l->m.stores = stores;
}
static void too_many_holders(struct leg_message *l)
{
    l->m.n_holders = MAX_HOLDERS + 1;
    l->m.holders = holders;
}
static void too_many_runs(struct leg_message *l)
{
    l->m.n_store_runs = l->m.n_ids + 1;
    l->m.store_runs = runs;
}
static void store_without_address(struct leg_message *l)
{
    store.xfer_address = rpc_data("");
    l->m.n_stores = 1;
    l->m.stores = stores;
}
static void store_with_long_address(struct leg_message *l)
{
    store.xfer_address = (ProtobufCBinaryData){129, (uint8_t *)long_text};
    l->m.n_stores = 1;
    l->m.stores = stores;
}
static void holder_without_address(struct leg_message *l)
{
    holders[1] = rpc_data("");
    l->m.n_holders = 2;
    l->m.holders = holders;
}
static void one_run(struct leg_message *l, uint32_t of, uint32_t first, uint32_t n)
{
    store.xfer_address = holders[0] = rpc_data("p9");
    run.store = of;
    run.first_block = first;
    run.n_blocks = n;
    l->m.n_stores = 1;
    l->m.stores = stores;
    l->m.n_holders = 1;
    l->m.holders = holders;
    l->m.n_store_runs = 1;
    l->m.store_runs = runs;
}
static void run_of_nobody(struct leg_message *l)
{
    one_run(l, 2, 0, 1);
}
static void run_too_long(struct leg_message *l)
{
    one_run(l, 0, 0, 41);
}
static void run_too_late(struct leg_message *l)
{
    one_run(l, 1, 41, 1);
}
static void too_many_biases(struct leg_message *l)
{
    static Tandem__Worker__V1__Bias bias = TANDEM__WORKER__V1__BIAS__INIT, *list[SAMPLING_MAX_BIAS + 1];
    for (int i = 0; i <= SAMPLING_MAX_BIAS; i++)
        list[i] = &bias;
    l->sampling.n_logit_bias = SAMPLING_MAX_BIAS + 1;
    l->sampling.logit_bias = list;
}
/* The engine's own checks, through the same door. */
static void no_ids(struct leg_message *l)
{
    l->m.n_ids = 0;
}
static void id_outside(struct leg_message *l)
{
    l->ids[7] = 256;
}
static void prompt_longer_than_ids(struct leg_message *l)
{
    l->sampling.n_prompt = 41;
}
static void too_long_for_context(struct leg_message *l)
{
    l->sampling.max_tokens = 473;
}
static void bad_temperature(struct leg_message *l)
{
    l->sampling.temperature = -1;
}
static void bad_limit(struct leg_message *l)
{
    l->m.tpot_ms = NAN;
}
static void stop_id_outside(struct leg_message *l)
{
    static uint32_t id = 256;
    l->sampling.n_stop_ids = 1;
    l->sampling.stop_ids = &id;
}

static const struct {
    void (*spoil)(struct leg_message *l);
    const char *text; /* with which the answer begins */
} REFUSED[] = {
    {no_id, "leg.id: missing"},
    {no_incarnation, "leg.id: missing"},
    {no_sampling, "leg.sampling: missing"},
    {short_root, "leg.prefix_root: 15 bytes, expected 16"},
    {no_root, "leg.prefix_root: 0 bytes, expected 16"},
    {unknown_kind, "leg.kind: 3 is unknown"},
    {negative_kind, "leg.kind: -1 is unknown"},
    {decode_without_peer, "leg.peer_xfer_address: a decode leg needs one, and the incarnation"},
    {decode_without_incarnation, "leg.peer_xfer_address: a decode leg needs one, and the incarnation"},
    {unknown_lora, "leg.lora: no adapter 'french' here"},
    {long_peer, "leg: an address or the request id is too long"},
    {long_request_id, "leg: an address or the request id is too long"},
    {too_many_stores, "leg.stores: 65, holders: 0, and 0 runs"},
    {too_many_holders, "leg.stores: 0, holders: 17, and 0 runs"},
    {too_many_runs, "leg.stores: 0, holders: 0, and 41 runs"},
    {store_without_address, "leg.stores[0].xfer_address: 0 bytes"},
    {store_with_long_address, "leg.stores[0].xfer_address: 129 bytes"},
    {holder_without_address, "leg.holders[1]: 0 bytes"},
    {run_of_nobody, "leg.store_runs[0]: blocks 0+1 of store 2"},
    {run_too_long, "leg.store_runs[0]: blocks 0+41 of store 0"},
    {run_too_late, "leg.store_runs[0]: blocks 41+1 of store 1"},
    {too_many_biases, "leg: too many ids or biases"},
    {no_ids, "prompt: empty"},
    {id_outside, "prompt.ids[7]: 256 is not in the vocabulary of 256"},
    {prompt_longer_than_ids, "prompt: empty"},
    {too_long_for_context, "prompt of 40 tokens and stopping.max_tokens 473 are over the context of 512"},
    {bad_temperature, "sampling.temperature: -1"},
    {bad_limit, "leg.tpot_ms: nan is no limit"},
    {stop_id_outside, "stopping.stop_ids[0]: 256 is not in the vocabulary of 256"},
};
enum { N_REFUSED = sizeof(REFUSED) / sizeof(REFUSED[0]) };

static void set_up_lists(void)
{
    memset(long_text, 'x', sizeof(long_text));
    tandem__worker__v1__store__init(&store);
    tandem__worker__v1__store_run__init(&run);
    store.xfer_address = rpc_data("s9");
    for (int i = 0; i <= MAX_STORES; i++)
        stores[i] = &store;
    for (int i = 0; i < 64; i++)
        runs[i] = &run;
    for (int i = 0; i <= MAX_HOLDERS; i++)
        holders[i] = rpc_data("p9");
}

/* Sends a leg with one wrong field. */
static void check_refused(struct node_worker *n, uint32_t i)
{
    struct router_end *r = &n->routers[0];
    leg_make(&leg, AGGREGATED, 1000 + i, 0, 40);
    REFUSED[i].spoil(&leg);
    router_sends_leg(r, &leg);
    turn_all();
    ck_assert_msg(count_of(r, END) == i + 1, "taken: %s", REFUSED[i].text);
    const Tandem__Worker__V1__LegEnd *end = last_of(r, END)->end;
    ck_assert_uint_eq(end->id->counter, leg.m.id ? 1000 + i : 0);
    ck_assert_int_eq(end->status, TD_ERR_INVALID);
    ck_assert_msg(end->text.len >= strlen(REFUSED[i].text) &&
                      !memcmp(end->text.data, REFUSED[i].text, strlen(REFUSED[i].text)),
                  "'%.*s' instead of '%s'", (int)end->text.len, (const char *)end->text.data, REFUSED[i].text);
    check_quiet(n);
    ck_assert_uint_eq(kvpool_audit(engine_pool(n->w->engine)).free, WORLD_PAGES);
}

START_TEST(test_leg_is_refused_by_the_name_of_the_field_and_leaves_nothing)
{
    struct node_worker *n = world_worker("prefill", NULL);
    struct router_end *r = &n->routers[0];
    set_up_lists();
    for (uint32_t i = 0; i < N_REFUSED; i++)
        check_refused(n, i);
    ck_assert_uint_eq(count_of(r, TOKENS), 0);
    ck_assert_double_eq(metrics_get(n->w->counters, WORKER_LEGS), 0);
    leg_make(&leg, AGGREGATED, 1, 0, 40); /* the worker goes on */
    router_sends_leg(r, &leg);
    turns_until(end_of(r, 1));
    check_end(r, 1, TD_OK, "");
    world_close();
}
END_TEST

START_TEST(test_leg_with_the_longest_fields_is_taken)
{
    struct node_worker *n = world_worker("prefill", NULL);
    set_up_lists();
    leg_make(&leg, AGGREGATED, 1, 0, 40);
    leg.m.n_stores = MAX_STORES;
    leg.m.stores = stores;
    leg.m.n_holders = MAX_HOLDERS;
    leg.m.holders = holders;
    store.xfer_address = (ProtobufCBinaryData){128, (uint8_t *)long_text};
    leg.m.peer_xfer_address = (ProtobufCBinaryData){128, (uint8_t *)long_text};
    leg.m.request_id = (ProtobufCBinaryData){LOG_WORD_MAX, (uint8_t *)long_text};
    leg.sampling.max_tokens = 472; /* prompt and answer fill the context of 512 */
    router_sends_leg(&n->routers[0], &leg);
    turns_until(end_of(&n->routers[0], 1));
    check_end(&n->routers[0], 1, TD_OK, "");
    ck_assert_uint_eq(tokens_of(&n->routers[0], 1).n, 472);
    ck_assert(!LIST_EMPTY(&n->w->offers));
    store_expire(n->w, 0, true); /* no store answers */
    check_quiet(n);
    world_close();
}
END_TEST

/* --------------------------------------------------------------- aggregated */

START_TEST(test_leg_aggregated_sends_each_token_once_and_then_its_end)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = &n->routers[0];
    leg_make(&leg, AGGREGATED, 1, 0, 40);
    leg.m.request_id = rpc_data("one");
    router_sends_leg(r, &leg);
    turns_until(end_of(r, 1));
    check_end(r, 1, TD_OK, "");
    struct tokens t = tokens_of(r, 1);
    ck_assert_uint_eq(t.n, 4);
    ck_assert(is_text(end_of(r, 1)->finish_reason, "length"));
    ck_assert_uint_gt(end_of(r, 1)->times->prefill, 0);
    ck_assert_uint_eq(end_of(r, 1)->times->transfer, 0);
    /* The same prompt again: its two full blocks are here, and the tokens are the same. */
    leg_make(&leg, AGGREGATED, 2, 0, 40);
    router_sends_leg(r, &leg);
    turns_until(end_of(r, 2));
    ck_assert_uint_eq(end_of(r, 2)->cached_worker, 32);
    struct tokens again = tokens_of(r, 2);
    check_same_tokens(&t, &again);
    ck_assert_double_eq(metrics_get(n->w->counters, WORKER_LEGS), 2);
    ck_assert_double_eq(metrics_get(n->w->counters, WORKER_PROMPT_TOKENS), 80);
    check_quiet(n);
    world_close();
}
END_TEST

START_TEST(test_leg_sends_block_events_before_tokens_and_tokens_before_ends)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = &n->routers[0];
    leg_make(&leg, AGGREGATED, 1, 0, 40);
    leg.sampling.max_tokens = 1;
    router_sends_leg(r, &leg);
    turns_until(end_of(r, 1));
    uint32_t last[16] = {0};
    for (uint32_t i = 0; i < r->call->n_sent; i++)
        last[message_at(r, i)->kind_case] = i;
    ck_assert_uint_gt(last[EVENTS], 0);
    ck_assert_uint_lt(last[EVENTS], last[TOKENS]);
    ck_assert_uint_lt(last[TOKENS], last[END]);
    world_close();
}
END_TEST

START_TEST(test_leg_tokens_of_one_step_share_a_message_for_each_router)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *a = &n->routers[0], *b = world_attach(n, 8);
    for (uint64_t i = 1; i <= 3; i++) {
        leg_make(&leg, AGGREGATED, i, (uint32_t)i, 10);
        leg.id.incarnation = i == 3 ? 8 : WORLD_ROUTER;
        router_sends_leg(i == 3 ? b : a, &leg);
    }
    turns_until(end_of(a, 1) && end_of(a, 2) && end_of(b, 3));
    ck_assert_uint_eq(tokens_of(a, 1).n + tokens_of(a, 2).n, 8);
    ck_assert_uint_eq(tokens_of(b, 3).n, 4);
    ck_assert_uint_eq(tokens_of(a, 3).n + tokens_of(b, 1).n + ends_of(b, 1, NULL) + ends_of(a, 3, NULL), 0);
    ck_assert_uint_eq(last_of(a, TOKENS)->tokens->n_tokens, 2);
    ck_assert_uint_eq(count_of(a, TOKENS), 4);
    check_quiet(n);
    world_close();
}
END_TEST

START_TEST(test_leg_sends_the_likeliest_tokens_and_the_scores_of_the_prompt)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = &n->routers[0];
    leg_make(&leg, AGGREGATED, 1, 0, 20);
    leg.sampling.top_logprobs = 3;
    leg.sampling.prompt_logprobs = true;
    router_sends_leg(r, &leg);
    turns_until(end_of(r, 1));
    const Tandem__Worker__V1__Token *t = tokens_of(r, 1).last;
    ck_assert_uint_eq(t->n_top_ids, 3);
    ck_assert_uint_eq(t->n_top_logprobs, 3);
    ck_assert_uint_eq(t->top_ids[0], t->token); /* greedy */
    ck_assert(t->top_logprobs[0] == t->logprob && t->top_logprobs[1] <= t->logprob);
    const Tandem__Worker__V1__LegEnd *end = end_of(r, 1);
    ck_assert_uint_eq(end->n_prompt_logprobs, 20);
    ck_assert_uint_eq(end->n_prompt_ranks, 20);
    ck_assert_uint_eq(end->n_prompt_top_ids, 19 * 3);
    ck_assert_uint_eq(end->n_prompt_top_logprobs, 19 * 3);
    ck_assert_uint_eq(end->prompt_ranks[0], 0);
    ck_assert_uint_ge(end->prompt_ranks[19], 1);
    ck_assert(isnan(end->prompt_logprobs[0]) && end->prompt_logprobs[1] < 0);
    world_close();
}
END_TEST

START_TEST(test_leg_takes_biases_of_tokens)
{
    static Tandem__Worker__V1__Bias bias = TANDEM__WORKER__V1__BIAS__INIT, *list[] = {&bias};
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = &n->routers[0];
    leg_make(&leg, AGGREGATED, 1, 0, 20);
    bias.id = 77;
    bias.bias = 100;
    leg.sampling.n_logit_bias = 1;
    leg.sampling.logit_bias = list;
    router_sends_leg(r, &leg);
    turns_until(end_of(r, 1));
    struct tokens t = tokens_of(r, 1);
    ck_assert(t.n == 4 && t.ids[0] == 77 && t.ids[3] == 77);
    world_close();
}
END_TEST

static const struct {
    enum seq_finish finish; /* as the engine says it */
    enum td_status status;
    const char *text;
    double n_broken;
} BREAKS[] = {
    {FINISH_BROKEN, TD_ERR_CORRUPT, "the model's logits are not finite: its weights, or the device, are broken", 1},
    {FINISH_STUCK, TD_ERR_INVALID,
     "structured: the answer can't go on: the vocabulary has no token that may follow, or the grammar is too ambiguous "
     "here",
     0},
};

START_TEST(test_leg_that_no_worker_could_go_on_with_ends_with_an_error)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = &n->routers[0];
    world_hush(n);
    leg_make(&leg, AGGREGATED, 1, 0, 20);
    leg.sampling.max_tokens = 100;
    router_sends_leg(r, &leg);
    turns_until(tokens_of(r, 1).n == 2);
    leg_on_end(n->w, LIST_FIRST(&n->w->legs)->seq, BREAKS[_i].finish);
    leg_flush(n->w);
    check_end(r, 1, BREAKS[_i].status, BREAKS[_i].text);
    ck_assert_double_eq(metrics_get(n->w->counters, WORKER_LEGS_BROKEN), BREAKS[_i].n_broken);
    check_quiet(n);
    world_close();
}
END_TEST

START_TEST(test_leg_that_goes_on_counts_positions_from_the_original_prompt)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = &n->routers[0];
    leg_make(&leg, AGGREGATED, 1, 0, 40);
    leg.sampling.max_tokens = 6;
    router_sends_leg(r, &leg);
    turns_until(end_of(r, 1));
    struct tokens all = tokens_of(r, 1);
    leg_make(&leg, AGGREGATED, 2, 0, 40);
    leg.sampling.max_tokens = 6;
    memcpy(leg.ids + 40, all.ids, 4 * sizeof(uint32_t));
    leg.m.n_ids = 44;
    router_sends_leg(r, &leg);
    turns_until(end_of(r, 2));
    struct tokens rest = tokens_from(r, 2, 4);
    ck_assert_uint_eq(rest.n, 2);
    ck_assert_uint_eq(rest.ids[0], all.ids[4]);
    ck_assert_uint_eq(rest.ids[1], all.ids[5]);
    world_close();
}
END_TEST

/* ------------------------------------------------------------------- one id */

START_TEST(test_leg_id_in_use_is_refused_and_the_first_leg_goes_on)
{
    struct tokens want = expected(0, 40, 4);
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = &n->routers[0];
    const Tandem__Worker__V1__LegEnd *first = NULL;
    leg_make(&leg, AGGREGATED, 1, 0, 40);
    router_sends_leg(r, &leg);
    leg_make(&leg, AGGREGATED, 1, 1, 40);
    router_sends_leg(r, &leg);
    leg_make(&leg, AGGREGATED, 1, 2, 40); /* the same counter of another router is another id */
    leg.id.incarnation = 8;
    router_sends_leg(world_attach(n, 8), &leg);
    turns_until(ends_of(r, 1, &first) == 2 && end_of(&n->routers[1], 1));
    ck_assert_int_eq(first->status, TD_ERR_INVALID);
    ck_assert(is_text(first->text, "leg.id: in use"));
    struct tokens got = tokens_of(r, 1);
    check_same_tokens(&want, &got);
    ck_assert_int_eq(last_of(r, END)->end->status, TD_OK);
    check_end(&n->routers[1], 1, TD_OK, "");
    /* An id that is free again may be used. */
    leg_make(&leg, PREFILL, 1, 3, 40);
    router_sends_leg(r, &leg);
    turns_until(ends_of(r, 1, NULL) == 3);
    ck_assert_int_eq(last_of(r, END)->end->status, TD_OK);
    check_quiet(n);
    world_close();
}
END_TEST

/* ------------------------------------------------------------------- cancel */

static enum seq_state state_of(const struct node_worker *n, uint64_t counter)
{
    const struct leg *l;
    LIST_FOREACH (l, &n->w->legs, in_worker)
        if (l->id.counter == counter)
            return engine_seq_state(l->seq);
    return SEQ_ENDED;
}

static uint32_t n_legs(const struct node_worker *n)
{
    uint32_t i = 0;
    const struct leg *l;
    LIST_FOREACH (l, &n->w->legs, in_worker)
        i++;
    return i;
}

START_TEST(test_leg_can_be_cancelled_while_it_waits_for_pages)
{
    const char *const few[] = {"--pages", "4", "--max-context", "64", NULL};
    struct node_worker *n = world_worker("decode", few);
    struct router_end *r = &n->routers[0];
    leg_make(&leg, AGGREGATED, 1, 0, 50);
    router_sends_leg(r, &leg);
    leg_make(&leg, AGGREGATED, 2, 1, 50);
    router_sends_leg(r, &leg);
    turn_all();
    ck_assert_int_eq(state_of(n, 2), SEQ_WAITING);
    router_cancels(r, WORLD_ROUTER, 2);
    turn_all();
    check_end(r, 2, TD_ERR_CANCELLED, "cancelled");
    ck_assert_uint_eq(tokens_of(r, 2).n, 0);
    turns_until(end_of(r, 1));
    check_end(r, 1, TD_OK, "");
    ck_assert_uint_eq(tokens_of(r, 1).n, 4);
    check_quiet(n);
    world_close();
}
END_TEST

START_TEST(test_leg_can_be_cancelled_in_the_middle_of_its_prompt)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = &n->routers[0];
    leg_make(&leg, AGGREGATED, 1, 0, 100); /* seven chunks */
    router_sends_leg(r, &leg);
    turn_all();
    turn_all();
    ck_assert_int_eq(state_of(n, 1), SEQ_RUNNING);
    router_cancels(r, WORLD_ROUTER, 1);
    turn_all();
    check_end(r, 1, TD_ERR_CANCELLED, "cancelled");
    ck_assert_uint_eq(tokens_of(r, 1).n, 0);
    check_quiet(n);
    world_close();
}
END_TEST

START_TEST(test_leg_can_be_cancelled_between_tokens_and_sends_no_more)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = &n->routers[0];
    leg_make(&leg, AGGREGATED, 1, 0, 10);
    leg.sampling.max_tokens = 100;
    router_sends_leg(r, &leg);
    turns_until(tokens_of(r, 1).n == 3);
    router_cancels(r, WORLD_ROUTER, 1);
    router_cancels(r, WORLD_ROUTER, 1); /* the second finds nothing */
    turn_all();
    check_end(r, 1, TD_ERR_CANCELLED, "cancelled");
    ck_assert_uint_eq(tokens_of(r, 1).n, 3);
    ck_assert_uint_gt(end_of(r, 1)->times->prefill, 0);
    ck_assert_double_eq(metrics_get(n->w->counters, WORKER_LEGS_FAILED), 1);
    check_quiet(n);
    world_close();
}
END_TEST

START_TEST(test_leg_cancel_of_an_unknown_id_does_nothing)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = &n->routers[0];
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Cancel without_id = TANDEM__WORKER__V1__CANCEL__INIT;
    leg_make(&leg, AGGREGATED, 1, 0, 40);
    router_sends_leg(r, &leg);
    router_cancels(r, WORLD_ROUTER, 2);
    router_cancels(r, 8, 1);
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_CANCEL;
    m.cancel = &without_id;
    router_says(r, &m);
    turns_until(end_of(r, 1));
    check_end(r, 1, TD_OK, "");
    ck_assert_uint_eq(count_of(r, END), 1);
    world_close();
}
END_TEST

START_TEST(test_leg_ends_without_a_word_when_its_router_is_gone)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *a = &n->routers[0], *b = world_attach(n, 8);
    for (uint64_t i = 1; i <= 2; i++) {
        leg_make(&leg, AGGREGATED, i, (uint32_t)i, 20);
        leg.id.incarnation = i == 1 ? WORLD_ROUTER : 8;
        leg.sampling.max_tokens = 30;
        router_sends_leg(i == 1 ? a : b, &leg);
    }
    turns_until(tokens_of(b, 2).n == 2);
    uint32_t n_sent = b->call->n_sent;
    struct rpc_call *kept = rpc_call_ref(b->call);
    router_leaves(b);
    turns_until(end_of(a, 1));
    check_end(a, 1, TD_OK, "");
    ck_assert_uint_eq(tokens_of(a, 1).n, 30);
    ck_assert_uint_eq(kept->n_sent, n_sent);
    rpc_call_unref(kept);
    check_quiet(n);
    world_close();
}
END_TEST

START_TEST(test_leg_ends_at_its_deadline)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = &n->routers[0];
    for (uint64_t i = 1; i <= 3; i++) { /* no deadline, one that is far too late to be kept, and 1 ms */
        leg_make(&leg, AGGREGATED, i, (uint32_t)i, 20);
        leg.m.remaining_ms = i == 1 ? 0 : i == 2 ? INT64_MAX : 1;
        leg.sampling.max_tokens = 400;
        router_sends_leg(r, &leg);
    }
    turn_all();
    uint64_t until = world_wall_ns() + 2 * NS_PER_MS;
    while (world_wall_ns() < until)
        ;
    turns_until(end_of(r, 3));
    check_end(r, 3, TD_ERR_DEADLINE, "deadline passed on the worker");
    ck_assert_uint_eq(n_legs(n), 2);
    router_cancels(r, WORLD_ROUTER, 1);
    router_cancels(r, WORLD_ROUTER, 2);
    check_quiet(n);
    world_close();
}
END_TEST

int main(void)
{
    Suite *s = suite_create("leg");
    TCase *t = tcase_create("leg");
    tcase_set_timeout(t, 30);
    tcase_add_test(t, test_leg_is_refused_by_the_name_of_the_field_and_leaves_nothing);
    tcase_add_test(t, test_leg_with_the_longest_fields_is_taken);
    tcase_add_test(t, test_leg_aggregated_sends_each_token_once_and_then_its_end);
    tcase_add_test(t, test_leg_sends_block_events_before_tokens_and_tokens_before_ends);
    tcase_add_test(t, test_leg_tokens_of_one_step_share_a_message_for_each_router);
    tcase_add_test(t, test_leg_sends_the_likeliest_tokens_and_the_scores_of_the_prompt);
    tcase_add_test(t, test_leg_takes_biases_of_tokens);
    tcase_add_loop_test(t, test_leg_that_no_worker_could_go_on_with_ends_with_an_error, 0, 2);
    tcase_add_test(t, test_leg_that_goes_on_counts_positions_from_the_original_prompt);
    tcase_add_test(t, test_leg_id_in_use_is_refused_and_the_first_leg_goes_on);
    tcase_add_test(t, test_leg_can_be_cancelled_while_it_waits_for_pages);
    tcase_add_test(t, test_leg_can_be_cancelled_in_the_middle_of_its_prompt);
    tcase_add_test(t, test_leg_can_be_cancelled_between_tokens_and_sends_no_more);
    tcase_add_test(t, test_leg_cancel_of_an_unknown_id_does_nothing);
    tcase_add_test(t, test_leg_ends_without_a_word_when_its_router_is_gone);
    tcase_add_test(t, test_leg_ends_at_its_deadline);
    suite_add_tcase(s, t);
    return tap_main(s);
}
