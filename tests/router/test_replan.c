/*
 * Requests that lost a worker (router/replan.c): what the new placement carries, and what the old one can't
 * do any more.
 */
#include "world.h"

enum { N_PROMPT = 20, MAX_TOKENS = 50 };

static void open_with(const char *roles, const char *plan, const char *burst)
{
    const char *const more[] = {"--plan", plan, "--replan-burst", burst, NULL};
    world_open_with(roles, more);
}

static void setup(void)
{
    open_with("ppdd", "split", "256");
}

static void setup_poor(void)
{
    open_with("ppdd", "split", "0");
}

static void setup_aggregated(void)
{
    open_with("dd", "aggregated", "256");
}

static struct client generate(Tandem__V1__GenerateRequest *m, uint32_t max_tokens)
{
    static uint32_t ids[N_PROMPT];
    Tandem__V1__TokenPrompt prompt = TANDEM__V1__TOKEN_PROMPT__INIT;
    Tandem__V1__Sampling sampling = TANDEM__V1__SAMPLING__INIT;
    Tandem__V1__Stopping stopping = TANDEM__V1__STOPPING__INIT;
    ProtobufCBinaryData stop = rpc_data("END.");
    for (uint32_t i = 0; i < N_PROMPT; i++)
        ids[i] = 100 + i;
    prompt.n_ids = N_PROMPT;
    prompt.ids = ids;
    m->prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TOKENS;
    m->tokens = &prompt;
    m->sampling = &sampling;
    m->stopping = &stopping;
    m->request_id = rpc_data("again");
    m->want_ids = true;
    sampling.has_seed_case = TANDEM__V1__SAMPLING__HAS_SEED_SEED;
    sampling.seed = 99;
    stopping.has_max_tokens_case = TANDEM__V1__STOPPING__HAS_MAX_TOKENS_MAX_TOKENS;
    stopping.max_tokens = max_tokens;
    stopping.n_stop = 1;
    stopping.stop = &stop;
    struct client c = ask(m);
    ck_assert_int_eq(c.q->state, REQUEST_PLACED);
    return c;
}

static struct client generate_plain(void)
{
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    m.slo = NULL;
    return generate(&m, MAX_TOKENS);
}

/* Tokens of single bytes, at the next positions. */
static void say(struct client *c, struct peer *p, const char *bytes)
{
    for (; *bytes; bytes++)
        worker_token(c, p, id_of_byte((uint8_t)*bytes), c->n_tokens++, 0);
}

/* A split placement whose prompt is computed and moved, with the given tokens. */
static void decode(struct client *c, const char *bytes)
{
    struct peer *prefill = c->q->prefill;
    worker_accepts(c, c->q->decode);
    if (*bytes) {
        const char first[] = {*bytes, 0};
        say(c, prefill, first);
        worker_ends(c, prefill, "");
        say(c, c->q->decode, bytes + 1);
    }
}

/* The request goes back into the queue and is placed again; later messages speak about the new placement. */
static void place_anew(struct client *c)
{
    uint64_t old = c->counter;
    ck_assert(is_alive(c));
    ck_assert_int_eq(c->q->state, REQUEST_QUEUED);
    place_queued(router);
    ck_assert_int_eq(c->q->state, REQUEST_PLACED);
    c->counter = c->q->counter;
    ck_assert_uint_ne(c->counter, old);
}

static void lose(struct client *c, struct peer *p)
{
    peer_gone(p, "test");
    place_anew(c);
}

static void expect_failed(struct client *c, enum rpc_code code, const char *text)
{
    ck_assert(!is_alive(c));
    ck_assert(c->call->finished);
    ck_assert_int_eq(c->call->code, code);
    ck_assert_str_eq(c->call->text, text);
    ck_assert_uint_eq(c->call->n_refs, 1);
    rpc_call_unref(c->call);
}

static void expect_end(struct client *c, const char *text, const char *reason, uint32_t n_replans)
{
    struct answer a = answer_of(c);
    ck_assert(!is_alive(c));
    ck_assert_str_eq(a.text, text);
    ck_assert_ptr_nonnull(a.end);
    ck_assert_msg(is_text(a.end->finish_reason, reason), "finish reason is not %s", reason);
    ck_assert_uint_eq(a.end->replans, n_replans);
    ck_assert_uint_eq(a.end->seed, 99);
    ck_assert_uint_eq(a.end->usage->prompt_tokens, N_PROMPT);
    ck_assert_uint_eq(c->call->n_refs, 1);
    rpc_call_unref(c->call);
}

static void finish(struct client *c, const char *reason)
{
    struct peer *prefill = c->q->prefill_done ? NULL : c->q->prefill, *decoder = c->q->decode;
    worker_ends(c, decoder, reason);
    if (prefill && prefill != decoder)
        worker_ends(c, prefill, "");
}

/* -------------------------------------------------------- the new placement */

START_TEST(test_a_leg_carries_the_prompt_and_the_tokens_so_far)
{
    struct client c = generate_plain();
    struct peer *lost = c.q->decode;
    decode(&c, "abc");
    lose(&c, lost);
    ck_assert_ptr_ne(c.q->decode, lost);
    struct peer *const to[] = {c.q->prefill, c.q->decode};
    for (int i = 0; i < 2; i++) {
        const Tandem__Worker__V1__Leg *leg = last_leg(to[i]);
        ck_assert_uint_eq(leg->id->counter, c.counter);
        ck_assert_int_eq(leg->kind,
                         i ? TANDEM__WORKER__V1__LEG_KIND__LEG_DECODE : TANDEM__WORKER__V1__LEG_KIND__LEG_PREFILL);
        ck_assert_uint_eq(leg->n_ids, N_PROMPT + 3);
        for (uint32_t k = 0; k < N_PROMPT; k++)
            ck_assert_uint_eq(leg->ids[k], 100 + k);
        for (uint32_t k = 0; k < 3; k++)
            ck_assert_uint_eq(leg->ids[N_PROMPT + k], id_of_byte((uint8_t) "abc"[k]));
        ck_assert_uint_eq(leg->sampling->n_prompt, N_PROMPT); /* penalties and limits count from here */
        ck_assert_uint_eq(leg->sampling->max_tokens, MAX_TOKENS);
        ck_assert_uint_eq(leg->sampling->seed, 99);
        ck_assert_uint_eq(leg->sampling->choice, 0);
        ck_assert(is_text(leg->request_id, "again"));
    }
    ck_assert_uint_eq(c.q->sched.n_tokens, N_PROMPT + 3);
    ck_assert_uint_eq(c.q->sched.max_tokens, MAX_TOKENS - 3);
    worker_accepts(&c, c.q->decode);
    say(&c, c.q->prefill, "d");
    say(&c, c.q->decode, "e");
    finish(&c, "length");
    ck_assert_uint_eq(answer_of(&c).n_ids, 5);
    expect_end(&c, "abcde", "length", 1);
}
END_TEST

START_TEST(test_blocks_that_the_tokens_fill_get_the_names_of_a_longer_prompt)
{
    struct client c = generate_plain();
    ck_assert_uint_eq(c.q->n_keys, 1);
    decode(&c, "abcdefghijklmnop"); /* 36 tokens: two blocks of 16 */
    lose(&c, c.q->decode);
    struct block_key root, *keys;
    uint32_t n;
    keys = place_keys(router, &c.q->p, &n, &root);
    ck_assert_uint_eq(n, 2);
    ck_assert_uint_eq(c.q->n_keys, 2);
    ck_assert(block_key_equal(&c.q->keys[0], &keys[0]));
    ck_assert(block_key_equal(&c.q->keys[1], &keys[1]));
    ck_assert_mem_eq(last_leg(c.q->decode)->prefix_root.data, root.b, BLOCK_KEY_BYTES);
    free(keys);
    request_gone(c.q);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_every_placement_counts_tokens_from_the_original_prompt)
{
    struct client c = generate_plain();
    decode(&c, "ab");
    worker_fails(&c, c.q->decode, TD_ERR_NO_SPACE);
    place_anew(&c);
    worker_accepts(&c, c.q->decode);
    say(&c, c.q->prefill, "c");
    worker_ends(&c, c.q->prefill, "");
    say(&c, c.q->decode, "d");
    worker_fails(&c, c.q->decode, TD_ERR_NO_SPACE);
    place_anew(&c);
    const Tandem__Worker__V1__Leg *leg = last_leg(c.q->prefill);
    ck_assert_uint_eq(leg->n_ids, N_PROMPT + 4);
    ck_assert_uint_eq(leg->ids[N_PROMPT + 3], id_of_byte('d'));
    ck_assert_uint_eq(leg->sampling->n_prompt, N_PROMPT);
    ck_assert_uint_eq(c.q->sched.max_tokens, MAX_TOKENS - 4);
    finish(&c, "stop");
    expect_end(&c, "abcd", "stop", 2);
}
END_TEST

START_TEST(test_choices_keep_their_numbers_and_their_seed)
{
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    struct client c = generate(&m, MAX_TOKENS);
    struct peer *lost = c.q->decode;
    c.q->p.sampling.choice = 3; /* as choices.c makes it */
    decode(&c, "a");
    lose(&c, lost);
    ck_assert_uint_eq(last_leg(c.q->decode)->sampling->choice, 3);
    ck_assert_uint_eq(last_leg(c.q->prefill)->sampling->choice, 3);
    request_gone(c.q);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_a_resumed_request_brings_no_tpot_limit)
{
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    Tandem__V1__Slo slo = TANDEM__V1__SLO__INIT;
    slo.tpot_ms = 10000;
    m.slo = &slo;
    struct client c = generate(&m, MAX_TOKENS);
    ck_assert_double_eq(last_leg(c.q->decode)->tpot_ms, 10000);
    decode(&c, "a");
    lose(&c, c.q->decode);
    ck_assert_double_eq(last_leg(c.q->decode)->tpot_ms, 0);
    ck_assert(c.q->sched.resumed);
    request_gone(c.q);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_a_worker_that_failed_is_avoided)
{
    struct client c = generate_plain();
    struct peer *failed = c.q->decode;
    decode(&c, "a");
    worker_fails(&c, failed, TD_ERR_NO_SPACE);
    place_anew(&c);
    ck_assert_ptr_ne(c.q->decode, failed);
    ck_assert_int_eq(failed->state, PEER_READY);
    request_gone(c.q);
    rpc_call_unref(c.call);
}
END_TEST

/* --------------------------------------------------------- the old placement */

START_TEST(test_tokens_under_the_old_id_are_dropped)
{
    struct client c = generate_plain(), old;
    struct peer *prefill = c.q->prefill;
    decode(&c, "ab");
    old = c;
    lose(&c, c.q->decode);
    worker_token(&old, prefill, id_of_byte('X'), 2, 0);
    worker_accepts(&old, prefill);
    worker_fails(&old, prefill, TD_ERR_DEVICE);
    ck_assert(is_alive(&c));
    ck_assert_uint_eq(c.q->counter, c.counter);
    ck_assert_uint_eq(c.q->n_replans, 1);
    ck_assert_str_eq(answer_of(&c).text, "ab");
    Tandem__Worker__V1__TransferId id = transfer_id_of(&old);
    ck_assert_ptr_null(router_find(router, &id));
    id = transfer_id_of(&c);
    ck_assert_ptr_eq(router_find(router, &id), c.q);
    id.incarnation++;
    ck_assert_ptr_null(router_find(router, &id));
    request_gone(c.q);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_legs_of_the_old_placement_are_cancelled_where_they_can_hear)
{
    struct client c = generate_plain();
    struct peer *prefill = c.q->prefill, *lost = c.q->decode;
    uint64_t old = c.counter;
    decode(&c, "ab");
    rpc_call_ref(lost->call);
    struct rpc_call *stream = lost->call;
    lose(&c, lost);
    /* Though the prefill leg has ended: its pages may wait for a reader. */
    ck_assert_uint_eq(count_cancels(prefill, old), 1);
    struct peer gone = {.call = stream};
    ck_assert_uint_eq(count_cancels(&gone, old), 0);
    rpc_call_unref(stream);
    old = c.counter;
    struct peer *decoder = c.q->decode;
    worker_fails(&c, c.q->prefill, TD_ERR_NO_SPACE);
    ck_assert_uint_eq(count_cancels(decoder, old), 1);
    request_gone(c.q);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_positions_are_neither_repeated_nor_left_out)
{
    struct client c = generate_plain();
    decode(&c, "ab");
    lose(&c, c.q->decode);
    struct peer *decoder = c.q->decode;
    worker_accepts(&c, decoder);
    worker_token(&c, decoder, id_of_byte('X'), 1, 0); /* it was shown by the old placement */
    ck_assert_str_eq(answer_of(&c).text, "ab");
    worker_token(&c, decoder, id_of_byte('c'), 2, 0);
    ck_assert_str_eq(answer_of(&c).text, "abc");
    worker_token(&c, decoder, id_of_byte('Y'), 4, 0); /* 3 is missing */
    ck_assert_int_eq(c.q->state, REQUEST_QUEUED);
    ck_assert_uint_eq(c.q->n_replans, 2);
    c.n_tokens = 3;
    place_anew(&c);
    ck_assert_uint_eq(last_leg(c.q->decode)->n_ids, N_PROMPT + 3);
    finish(&c, "length");
    expect_end(&c, "abc", "length", 2);
}
END_TEST

START_TEST(test_a_first_token_that_nobody_reserved_for_is_made_again)
{
    struct client c = generate_plain();
    say(&c, c.q->prefill, "a");
    ck_assert_uint_eq(c.q->n_held, 1);
    ck_assert_uint_eq(c.call->n_sent, 0);
    lose(&c, c.q->decode);
    ck_assert_uint_eq(c.q->n_held, 0);
    ck_assert_uint_eq(last_leg(c.q->prefill)->n_ids, N_PROMPT);
    c.n_tokens = 0;
    decode(&c, "bc");
    finish(&c, "length");
    ck_assert_uint_eq(answer_of(&c).n_ids, 2);
    expect_end(&c, "bc", "length", 1);
}
END_TEST

START_TEST(test_a_stop_string_is_found_over_a_loss)
{
    struct client c = generate_plain();
    decode(&c, "THE EN");
    ck_assert_str_eq(answer_of(&c).text, "THE ");
    lose(&c, c.q->decode);
    ck_assert_uint_eq(last_leg(c.q->prefill)->n_ids, N_PROMPT + 6);
    worker_accepts(&c, c.q->decode);
    say(&c, c.q->prefill, "D");
    say(&c, c.q->decode, ".");
    expect_end(&c, "THE ", "stop", 1);
}
END_TEST

/* --------------------------------------------------------- without re-plan */

START_TEST(test_a_complete_answer_only_ends)
{
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    struct client c = generate(&m, 3);
    decode(&c, "abc");
    peer_gone(c.q->decode, "test"); /* the end of the leg is lost with it */
    expect_end(&c, "abc", "length", 0);
    c = generate_plain();
    decode(&c, "ab");
    worker_token(&c, c.q->decode, router->config.eos_ids[0], 2, 0);
    peer_gone(c.q->decode, "test");
    expect_end(&c, "ab", "stop", 0);
}
END_TEST

START_TEST(test_beyond_the_budget_a_request_fails_at_once)
{
    struct client c = generate_plain();
    char text[128];
    decode(&c, "a");
    snprintf(text, sizeof(text), "decode worker %s was lost; too much is being planned anew", c.q->decode->name);
    peer_gone(c.q->decode, "test");
    ck_assert_uint_eq(c.call->retry_after_ms, 1000);
    expect_failed(&c, RPC_UNAVAILABLE, text);
}
END_TEST

START_TEST(test_ten_first_placements_pay_for_one_more)
{
    struct client all[10];
    for (int i = 0; i < 10; i++)
        all[i] = generate_plain();
    worker_fails(&all[0], all[0].q->decode, TD_ERR_NO_SPACE);
    ck_assert(is_alive(&all[0]));
    worker_fails(&all[1], all[1].q->decode, TD_ERR_NO_SPACE);
    ck_assert(!is_alive(&all[1]));
    ck_assert_int_eq(all[1].call->code, RPC_UNAVAILABLE);
    for (int i = 0; i < 10; i++) {
        if (i != 1)
            request_gone(all[i].q);
        rpc_call_unref(all[i].call);
    }
}
END_TEST

START_TEST(test_a_request_is_planned_anew_five_times_and_no_more)
{
    struct client c = generate_plain();
    for (uint32_t i = 1; i <= 5; i++) {
        worker_fails(&c, c.q->prefill, TD_ERR_NO_SPACE);
        place_anew(&c);
        ck_assert_uint_eq(c.q->n_replans, i);
    }
    char text[128];
    snprintf(text, sizeof(text), "worker %s: it failed; it was planned anew too often already", c.q->prefill->name);
    worker_fails(&c, c.q->prefill, TD_ERR_NO_SPACE);
    expect_failed(&c, RPC_UNAVAILABLE, text);
}
END_TEST

START_TEST(test_a_worker_that_is_not_needed_any_more_may_die)
{
    struct client c = generate_plain();
    decode(&c, "ab");
    peer_gone(c.q->prefill, "test");
    ck_assert_int_eq(c.q->state, REQUEST_PLACED);
    ck_assert_ptr_null(c.q->prefill);
    say(&c, c.q->decode, "c");
    worker_ends(&c, c.q->decode, "length");
    expect_end(&c, "abc", "length", 0);
}
END_TEST

/* --------------------------------------------------------------------- scores */

static struct client score(uint32_t max_tokens)
{
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    m.want_prompt_logprobs = true;
    return generate(&m, max_tokens);
}

static void end_with_scores(struct client *c, struct peer *p, const char *reason, float score)
{
    Tandem__Worker__V1__LegEnd end = TANDEM__WORKER__V1__LEG_END__INIT;
    float logprobs[2] = {0, score};
    uint32_t ranks[2] = {0, 1};
    end.n_prompt_logprobs = end.n_prompt_ranks = 2;
    end.prompt_logprobs = logprobs;
    end.prompt_ranks = ranks;
    end.finish_reason = rpc_data(reason);
    worker_ends_with(c, p, end);
}

START_TEST(test_scores_that_were_lost_are_made_again_and_tokens_are_not)
{
    struct client c = score(2);
    worker_accepts(&c, c.q->decode);
    say(&c, c.q->prefill, "a");
    say(&c, c.q->decode, "b");
    lose(&c, c.q->prefill);
    const Tandem__Worker__V1__Leg *leg = last_leg(c.q->prefill);
    ck_assert_uint_eq(leg->n_ids, N_PROMPT); /* the prompt alone */
    ck_assert_uint_eq(leg->sampling->max_tokens, 0);
    ck_assert(leg->sampling->prompt_logprobs);
    ck_assert_ptr_null(c.q->decode); /* one leg gives them */
    end_with_scores(&c, c.q->prefill, "length", -2);
    struct answer a = answer_of(&c);
    ck_assert_uint_eq(a.end->n_prompt_logprobs, 2);
    ck_assert_float_eq(a.end->prompt_logprobs[1], -2);
    ck_assert_uint_eq(a.n_ids, 2);
    expect_end(&c, "ab", "length", 1);
}
END_TEST

START_TEST(test_scores_of_a_stopped_answer_need_one_leg_and_leave_its_reason)
{
    struct client c = score(MAX_TOKENS);
    worker_accepts(&c, c.q->decode);
    say(&c, c.q->prefill, "a");
    worker_token(&c, c.q->decode, router->config.eos_ids[0], 1, 0);
    lose(&c, c.q->prefill);
    ck_assert_ptr_null(c.q->decode);
    end_with_scores(&c, c.q->prefill, "length", -2);
    expect_end(&c, "a", "stop", 1);
}
END_TEST

START_TEST(test_scores_that_came_are_not_made_again)
{
    struct client c = score(MAX_TOKENS);
    worker_accepts(&c, c.q->decode);
    say(&c, c.q->prefill, "a");
    end_with_scores(&c, c.q->prefill, "", -2);
    lose(&c, c.q->decode);
    ck_assert(!last_leg(c.q->prefill)->sampling->prompt_logprobs);
    worker_accepts(&c, c.q->decode);
    say(&c, c.q->prefill, "b");
    end_with_scores(&c, c.q->prefill, "", -3); /* a worker that sends others: the first ones count */
    worker_ends(&c, c.q->decode, "length");
    ck_assert_float_eq(answer_of(&c).end->prompt_logprobs[1], -2);
    expect_end(&c, "ab", "length", 1);
}
END_TEST

/* ----------------------------------------------------------------- what is told */

START_TEST(test_the_pause_is_told_as_stalled)
{
    struct client c = generate_plain();
    world_wait_ms(10);
    decode(&c, "ab");
    world_wait_ms(5);
    lose(&c, c.q->decode);
    world_wait_ms(30);
    worker_accepts(&c, c.q->decode);
    say(&c, c.q->prefill, "c");
    world_wait_ms(7);
    finish(&c, "length");
    const Tandem__V1__Timing *t = answer_of(&c).end->timing;
    ck_assert_double_eq_tol(t->stalled, 35, 1e-9); /* from the token before the loss to the one after it */
    ck_assert_double_eq_tol(t->queue, 0, 1e-9);    /* of the first placement */
    ck_assert_double_eq_tol(t->ttft, 10, 1e-9);
    ck_assert_double_eq_tol(t->total, 52, 1e-9);
    expect_end(&c, "abc", "length", 1);
}
END_TEST

START_TEST(test_the_pause_before_the_first_token_begins_with_the_lost_placement)
{
    struct client c = generate_plain();
    world_wait_ms(20);
    lose(&c, c.q->prefill);
    world_wait_ms(30);
    decode(&c, "a");
    finish(&c, "length");
    const Tandem__V1__Timing *t = answer_of(&c).end->timing;
    ck_assert_double_eq_tol(t->stalled, 50, 1e-9);
    ck_assert_double_eq_tol(t->ttft, 50, 1e-9);
    expect_end(&c, "a", "length", 1);
}
END_TEST

/* -------------------------------------------------------- unheard, forgotten */

START_TEST(test_a_leg_that_is_not_acknowledged_goes_elsewhere)
{
    struct client c = generate_plain();
    struct peer *prefill = c.q->prefill, *deaf = c.q->decode;
    worker_beats(prefill, &c.counter, 1);
    world_wait_ms(500);
    replan_tick(router, router_patience(router));
    ck_assert_int_eq(c.q->state, REQUEST_PLACED); /* --dispatch-ms is not over */
    world_wait_ms(1);
    replan_tick(router, router_patience(router));
    place_anew(&c);
    ck_assert_ptr_ne(c.q->decode, deaf);
    request_gone(c.q);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_a_leg_that_waits_in_the_router_is_not_held_against_its_worker)
{
    struct client c = generate_plain();
    worker_beats(c.q->prefill, &c.counter, 1);
    c.q->decode->call->n_waiting = 1;
    for (int i = 0; i < 10; i++) {
        world_wait_ms(500);
        replan_tick(router, router_patience(router));
        ck_assert_int_eq(c.q->state, REQUEST_PLACED);
    }
    call_read(c.q->decode->call); /* from here on the worker may take --dispatch-ms */
    world_wait_ms(500);
    replan_tick(router, router_patience(router));
    ck_assert_int_eq(c.q->state, REQUEST_PLACED);
    world_wait_ms(1);
    replan_tick(router, router_patience(router));
    place_anew(&c);
    request_gone(c.q);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_a_heartbeat_or_a_message_acknowledges_a_leg)
{
    struct client c = generate_plain();
    worker_beats(c.q->prefill, &c.counter, 1);
    worker_accepts(&c, c.q->decode);
    world_wait_ms(5000);
    replan_tick(router, router_patience(router));
    ck_assert_int_eq(c.q->state, REQUEST_PLACED);
    request_gone(c.q);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_a_leg_that_a_worker_has_forgotten_goes_elsewhere)
{
    struct client c = generate_plain();
    const uint64_t legs[] = {c.counter + 7, c.counter + 3, c.counter}; /* in any order */
    struct peer *decoder = c.q->decode;
    worker_beats(decoder, legs, 3);
    worker_beats(c.q->prefill, &c.counter, 1);
    replan_tick(router, router_patience(router));
    ck_assert_int_eq(c.q->state, REQUEST_PLACED);
    worker_beats(decoder, legs, 1);
    replan_tick(router, router_patience(router));
    place_anew(&c);
    ck_assert_ptr_ne(c.q->decode, decoder);
    request_gone(c.q);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_a_prefill_leg_that_has_ended_is_not_missed)
{
    struct client c = generate_plain();
    decode(&c, "a");
    worker_beats(c.q->prefill, NULL, 0);
    worker_beats(c.q->decode, &c.counter, 1);
    replan_tick(router, router_patience(router));
    ck_assert_int_eq(c.q->state, REQUEST_PLACED);
    request_gone(c.q);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_one_worker_for_both_phases_is_replaced_as_well)
{
    struct client c = generate_plain();
    struct peer *lost = c.q->decode;
    say(&c, lost, "ab");
    lose(&c, lost);
    ck_assert_ptr_ne(c.q->decode, lost);
    ck_assert_int_eq(last_leg(c.q->decode)->kind, TANDEM__WORKER__V1__LEG_KIND__LEG_AGGREGATED);
    ck_assert_uint_eq(last_leg(c.q->decode)->n_ids, N_PROMPT + 2);
    say(&c, c.q->decode, "c");
    worker_ends(&c, c.q->decode, "length");
    expect_end(&c, "abc", "length", 1);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("router_replan");
    TCase *split = tcase_create("split"), *poor = tcase_create("poor"), *whole = tcase_create("whole");
    suite_add_tcase(s, split);
    suite_add_tcase(s, poor);
    suite_add_tcase(s, whole);
    tcase_add_checked_fixture(split, setup, world_close);
    tcase_add_checked_fixture(poor, setup_poor, world_close);
    tcase_add_checked_fixture(whole, setup_aggregated, world_close);
    tcase_add_test(split, test_a_leg_carries_the_prompt_and_the_tokens_so_far);
    tcase_add_test(split, test_blocks_that_the_tokens_fill_get_the_names_of_a_longer_prompt);
    tcase_add_test(split, test_every_placement_counts_tokens_from_the_original_prompt);
    tcase_add_test(split, test_choices_keep_their_numbers_and_their_seed);
    tcase_add_test(split, test_a_resumed_request_brings_no_tpot_limit);
    tcase_add_test(split, test_a_worker_that_failed_is_avoided);
    tcase_add_test(split, test_tokens_under_the_old_id_are_dropped);
    tcase_add_test(split, test_legs_of_the_old_placement_are_cancelled_where_they_can_hear);
    tcase_add_test(split, test_positions_are_neither_repeated_nor_left_out);
    tcase_add_test(split, test_a_first_token_that_nobody_reserved_for_is_made_again);
    tcase_add_test(split, test_a_stop_string_is_found_over_a_loss);
    tcase_add_test(split, test_a_complete_answer_only_ends);
    tcase_add_test(split, test_a_request_is_planned_anew_five_times_and_no_more);
    tcase_add_test(split, test_a_worker_that_is_not_needed_any_more_may_die);
    tcase_add_test(split, test_scores_that_were_lost_are_made_again_and_tokens_are_not);
    tcase_add_test(split, test_scores_of_a_stopped_answer_need_one_leg_and_leave_its_reason);
    tcase_add_test(split, test_scores_that_came_are_not_made_again);
    tcase_add_test(split, test_the_pause_is_told_as_stalled);
    tcase_add_test(split, test_the_pause_before_the_first_token_begins_with_the_lost_placement);
    tcase_add_test(split, test_a_leg_that_is_not_acknowledged_goes_elsewhere);
    tcase_add_test(split, test_a_leg_that_waits_in_the_router_is_not_held_against_its_worker);
    tcase_add_test(split, test_a_heartbeat_or_a_message_acknowledges_a_leg);
    tcase_add_test(split, test_a_leg_that_a_worker_has_forgotten_goes_elsewhere);
    tcase_add_test(split, test_a_prefill_leg_that_has_ended_is_not_missed);
    tcase_add_test(poor, test_beyond_the_budget_a_request_fails_at_once);
    tcase_add_test(poor, test_ten_first_placements_pay_for_one_more);
    tcase_add_test(whole, test_one_worker_for_both_phases_is_replaced_as_well);
    return tap_main(s);
}
