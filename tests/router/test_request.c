/* One request from placement to its end (router/request.c): messages of two workers in any order. */
#include <math.h>
#include <time.h>

#include "world.h"

static void setup(void)
{
    const char *const more[] = {"--plan", "split", NULL};
    world_open_with("ppdd", more);
}

static void setup_aggregated(void)
{
    const char *const more[] = {"--plan", "aggregated", NULL};
    world_open_with("pd", more);
}

static void setup_kept(void)
{
    const char *const more[] = {"--plan", "kept", NULL};
    world_open_with("pd", more);
}

/* What a test asks for. */
struct wish {
    uint32_t max_tokens, n; /* 0: 100; 1 */
    uint32_t deadline_ms;
    bool scores;
};

static struct client generate(const struct wish *w)
{
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    Tandem__V1__Sampling sampling = TANDEM__V1__SAMPLING__INIT;
    Tandem__V1__Stopping stopping = TANDEM__V1__STOPPING__INIT;
    Tandem__V1__Slo slo = TANDEM__V1__SLO__INIT;
    m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT;
    m.text = rpc_data("Tell me what the request does");
    m.sampling = &sampling;
    m.stopping = &stopping;
    m.slo = &slo;
    m.want_ids = true;
    m.want_prompt_logprobs = w->scores;
    sampling.n = w->n;
    slo.deadline_ms = w->deadline_ms;
    stopping.has_max_tokens_case = TANDEM__V1__STOPPING__HAS_MAX_TOKENS_MAX_TOKENS;
    stopping.max_tokens = w->max_tokens ? w->max_tokens : 100;
    struct client c = ask(&m);
    ck_assert_int_eq(c.q->state, REQUEST_PLACED);
    return c;
}

static void say(struct client *c, struct peer *p, char byte, uint32_t position)
{
    worker_token(c, p, id_of_byte((uint8_t)byte), position, 0);
}

static void expect_end(struct client *c, const char *text, const char *reason)
{
    struct answer a = answer_of(c);
    ck_assert(!is_alive(c));
    ck_assert_str_eq(a.text, text);
    ck_assert_uint_eq(a.n_ids, strlen(text));
    ck_assert_ptr_nonnull(a.end);
    ck_assert_msg(is_text(a.end->finish_reason, reason), "finish reason is not %s", reason);
    ck_assert_uint_eq(a.end->replans, 0);
    ck_assert(c->call->finished);
    ck_assert_int_eq(c->call->code, RPC_OK);
    ck_assert_uint_eq(c->call->n_refs, 1);
    rpc_call_unref(c->call);
}

static void expect_failed(struct client *c, enum rpc_code code)
{
    ck_assert(!is_alive(c));
    ck_assert(c->call->finished);
    ck_assert_int_eq(c->call->code, code);
    ck_assert_uint_eq(c->call->n_refs, 1);
    rpc_call_unref(c->call);
}

static void leave(struct client *c)
{
    ck_assert(is_alive(c));
    request_gone(c->q);
    rpc_call_unref(c->call);
}

/* ------------------------------------------------------------------- tokens */

START_TEST(test_the_first_token_may_come_from_either_worker)
{
    for (int decode_first = 0; decode_first < 2; decode_first++) {
        struct client c = generate(&(struct wish){0});
        struct peer *prefill = c.q->prefill, *decode = c.q->decode;
        worker_accepts(&c, decode);
        say(&c, decode_first ? decode : prefill, 'a', 0);
        ck_assert_str_eq(answer_of(&c).text, "a");
        say(&c, decode_first ? prefill : decode, 'a', 0); /* the second copy */
        ck_assert_str_eq(answer_of(&c).text, "a");
        say(&c, decode, 'b', 1);
        worker_ends(&c, prefill, "");
        worker_ends(&c, decode, "length");
        expect_end(&c, "ab", "length");
    }
}
END_TEST

START_TEST(test_tokens_wait_until_the_decode_worker_has_reserved)
{
    struct client c = generate(&(struct wish){0});
    say(&c, c.q->prefill, 'a', 0);
    say(&c, c.q->decode, 'b', 1);
    ck_assert_uint_eq(c.call->n_sent, 0);
    worker_accepts(&c, c.q->prefill); /* it is not the one */
    ck_assert_uint_eq(c.call->n_sent, 0);
    worker_accepts(&c, c.q->decode);
    ck_assert_str_eq(answer_of(&c).text, "ab");
    say(&c, c.q->decode, 'c', 2);
    ck_assert_str_eq(answer_of(&c).text, "abc");
    leave(&c);
}
END_TEST

START_TEST(test_tokens_of_a_worker_outside_the_placement_are_dropped)
{
    struct client c = generate(&(struct wish){0});
    worker_accepts(&c, c.q->decode);
    for (uint32_t i = 0; i < router->n_peers; i++)
        if (router->peers[i] != c.q->prefill && router->peers[i] != c.q->decode) {
            say(&c, router->peers[i], 'X', 0);
            worker_ends(&c, router->peers[i], "length");
            worker_fails(&c, router->peers[i], TD_ERR_DEVICE);
        }
    ck_assert_uint_eq(c.call->n_sent, 0);
    ck_assert_int_eq(c.q->state, REQUEST_PLACED);
    leave(&c);
}
END_TEST

START_TEST(test_a_token_outside_the_vocabulary_is_a_failure)
{
    struct client c = generate(&(struct wish){0});
    struct peer *decode = c.q->decode;
    worker_accepts(&c, decode);
    /* The last one that does not end the answer. */
    worker_token(&c, decode, router->config.vocab_size - 4, 0, 0);
    ck_assert_int_eq(c.q->state, REQUEST_PLACED);
    worker_token(&c, decode, router->config.vocab_size, 1, 0);
    ck_assert_int_eq(c.q->state, REQUEST_QUEUED);
    ck_assert_uint_eq(decode->breaker.failures, 1);
    leave(&c);
}
END_TEST

/* ---------------------------------------------------------------------- ends */

START_TEST(test_the_later_of_two_ends_finishes_the_answer)
{
    for (int decode_first = 0; decode_first < 2; decode_first++) {
        struct client c = generate(&(struct wish){0});
        struct peer *prefill = c.q->prefill, *decode = c.q->decode;
        worker_accepts(&c, decode);
        say(&c, decode, 'a', 0);
        say(&c, decode, 'b', 1);
        worker_ends(&c, decode_first ? decode : prefill, decode_first ? "length" : "");
        ck_assert(is_alive(&c));
        ck_assert_ptr_null(answer_of(&c).end);
        worker_ends(&c, decode_first ? prefill : decode, decode_first ? "" : "length");
        expect_end(&c, "ab", "length");
    }
}
END_TEST

START_TEST(test_the_prefill_leg_brings_its_counts_also_when_it_ends_last)
{
    struct client c = generate(&(struct wish){0});
    struct peer *prefill = c.q->prefill;
    Tandem__Worker__V1__LegEnd end = TANDEM__WORKER__V1__LEG_END__INIT;
    worker_accepts(&c, c.q->decode);
    say(&c, c.q->decode, 'a', 0);
    Tandem__Worker__V1__LegEnd other = TANDEM__WORKER__V1__LEG_END__INIT;
    other.finish_reason = rpc_data("stop");
    other.cached_worker = 5; /* what the decode worker found is not the prompt's */
    worker_ends_with(&c, c.q->decode, other);
    end.cached_dram = 2;
    worker_ends_with(&c, prefill, end);
    ck_assert_uint_eq(answer_of(&c).end->usage->cached_tokens->worker, 0);
    ck_assert_uint_eq(answer_of(&c).end->usage->cached_tokens->dram, 2);
    expect_end(&c, "a", "stop");
}
END_TEST

START_TEST(test_a_first_token_that_ends_the_answer_needs_no_decode_worker)
{
    struct client c = generate(&(struct wish){0});
    struct peer *prefill = c.q->prefill, *decode = c.q->decode;
    say(&c, prefill, 'a', 0);
    worker_ends(&c, prefill, "stop"); /* the decode worker has not even reserved */
    ck_assert_uint_eq(count_cancels(decode, c.counter), 1);
    expect_end(&c, "a", "stop");
}
END_TEST

START_TEST(test_a_cancelled_handover_waits_for_the_reason)
{
    struct client c = generate(&(struct wish){0});
    struct peer *prefill = c.q->prefill;
    worker_accepts(&c, c.q->decode);
    say(&c, prefill, 'a', 0);
    worker_fails(&c, c.q->decode, TD_ERR_CANCELLED);
    ck_assert_int_eq(c.q->state, REQUEST_PLACED);
    worker_ends(&c, prefill, "stop");
    expect_end(&c, "a", "stop");
    c = generate(&(struct wish){0});
    prefill = c.q->prefill;
    struct peer *decode = c.q->decode;
    worker_accepts(&c, decode);
    worker_fails(&c, decode, TD_ERR_CANCELLED);
    worker_ends(&c, prefill, ""); /* no reason: the handover failed */
    ck_assert_int_eq(c.q->state, REQUEST_QUEUED);
    ck_assert_uint_eq(c.q->sched.n_avoid, 1);
    ck_assert_uint_eq(c.q->sched.avoid[0], decode->holder);
    leave(&c);
}
END_TEST

START_TEST(test_one_token_needs_one_leg)
{
    struct client c = generate(&(struct wish){.max_tokens = 1});
    struct peer *prefill = c.q->prefill;
    ck_assert_ptr_null(c.q->decode);
    ck_assert_ptr_null(last_leg(c.q->placed_decode));
    ck_assert_uint_eq(last_leg(prefill)->peer_xfer_address.len, 0);
    say(&c, prefill, 'a', 0);
    ck_assert_str_eq(answer_of(&c).text, "a");
    worker_ends(&c, prefill, "length");
    expect_end(&c, "a", "length");
}
END_TEST

START_TEST(test_both_legs_name_each_other)
{
    struct client c = generate(&(struct wish){0});
    const Tandem__Worker__V1__Leg *prefill = last_leg(c.q->prefill), *decode = last_leg(c.q->decode);
    ck_assert_uint_eq(prefill->id->counter, decode->id->counter);
    ck_assert(is_text(prefill->peer_xfer_address, c.q->decode->xfer_address));
    ck_assert(is_text(decode->peer_xfer_address, c.q->prefill->xfer_address));
    ck_assert_uint_eq(decode->peer_incarnation, c.q->prefill->incarnation);
    leave(&c);
}
END_TEST

/* ------------------------------------------------------------ cancel, deadline */

START_TEST(test_a_client_that_leaves_cancels_both_legs_and_late_tokens_find_nothing)
{
    struct client c = generate(&(struct wish){0});
    struct peer *prefill = c.q->prefill, *decode = c.q->decode;
    worker_accepts(&c, decode);
    say(&c, prefill, 'a', 0);
    request_gone(c.q);
    ck_assert(!is_alive(&c));
    ck_assert_uint_eq(count_cancels(prefill, c.counter), 1);
    ck_assert_uint_eq(count_cancels(decode, c.counter), 1);
    ck_assert_uint_eq(router->n_running, 0);
    uint32_t n_sent = c.call->n_sent;
    say(&c, decode, 'b', 1);
    worker_accepts(&c, decode);
    worker_ends(&c, prefill, "");
    worker_ends(&c, decode, "length");
    ck_assert_uint_eq(c.call->n_sent, n_sent);
    ck_assert(!c.call->finished);
    ck_assert_uint_eq(c.call->n_refs, 1);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_tokens_after_the_end_find_nothing)
{
    struct client c = generate(&(struct wish){0});
    struct peer *prefill = c.q->prefill, *decode = c.q->decode;
    worker_accepts(&c, decode);
    say(&c, prefill, 'a', 0);
    worker_ends(&c, decode, "length");
    worker_ends(&c, prefill, "");
    say(&c, decode, 'b', 1);
    worker_fails(&c, decode, TD_ERR_DEVICE);
    ck_assert_int_eq(decode->breaker.failures, 0);
    expect_end(&c, "a", "length");
}
END_TEST

START_TEST(test_a_leg_has_what_is_left_until_the_deadline)
{
    struct client c = generate(&(struct wish){.deadline_ms = 1000});
    ck_assert_int_eq(last_leg(c.q->decode)->remaining_ms, 1000);
    world_wait_ms(300);
    worker_fails(&c, c.q->decode, TD_ERR_NO_SPACE);
    place_queued(router);
    ck_assert_int_eq(c.q->state, REQUEST_PLACED);
    ck_assert_int_eq(last_leg(c.q->decode)->remaining_ms, 700);
    leave(&c);
    c = generate(&(struct wish){0});
    ck_assert_int_eq(last_leg(c.q->decode)->remaining_ms, 0);
    leave(&c);
}
END_TEST

START_TEST(test_a_deadline_is_final_only_when_it_has_passed)
{
    struct client early = generate(&(struct wish){.deadline_ms = 1000}),
                  late = generate(&(struct wish){.deadline_ms = 1000}), none = generate(&(struct wish){0});
    worker_fails(&none, none.q->prefill, TD_ERR_DEADLINE);
    ck_assert_int_eq(none.q->state, REQUEST_QUEUED);
    world_wait_ms(899); /* a worker's clock may be 100 ms ahead */
    worker_fails(&early, early.q->prefill, TD_ERR_DEADLINE);
    ck_assert(is_alive(&early));
    world_wait_ms(2);
    worker_fails(&late, late.q->prefill, TD_ERR_DEADLINE);
    expect_failed(&late, RPC_DEADLINE_EXCEEDED);
    leave(&early);
    leave(&none);
}
END_TEST

/* ------------------------------------------------------------------- failures */

START_TEST(test_what_any_worker_would_refuse_fails_at_once)
{
    static const struct {
        enum td_status status;
        enum rpc_code code;
    } FINAL[] = {{TD_ERR_INVALID, RPC_INVALID_ARGUMENT},
                 {TD_ERR_UNSUPPORTED, RPC_UNIMPLEMENTED},
                 {TD_ERR_NOT_FOUND, RPC_NOT_FOUND},
                 {TD_ERR_CORRUPT, RPC_INTERNAL}};
    for (int i = 0; i < 4; i++) {
        char text[128];
        struct client c = generate(&(struct wish){0});
        snprintf(text, sizeof(text), "worker %s: it failed", c.q->prefill->name);
        worker_fails(&c, c.q->prefill, FINAL[i].status);
        ck_assert_str_eq(c.call->text, text);
        ck_assert_int_eq(rpc_code_of_status(FINAL[i].status), FINAL[i].code);
        expect_failed(&c, FINAL[i].code);
    }
}
END_TEST

START_TEST(test_a_worker_that_refuses_a_leg_drains)
{
    struct client c = generate(&(struct wish){0});
    struct peer *decode = c.q->decode;
    worker_fails(&c, decode, TD_ERR_REFUSED);
    ck_assert(decode->draining);
    ck_assert_uint_eq(decode->breaker.failures, 0);
    place_queued(router);
    ck_assert_ptr_ne(c.q->decode, decode);
    leave(&c);
}
END_TEST

START_TEST(test_a_transfer_that_fails_is_the_holders_and_at_two_holders_the_readers)
{
    struct client c = generate(&(struct wish){0});
    struct peer *holder = c.q->prefill, *reader = c.q->decode;
    worker_fails(&c, reader, TD_ERR_CHECKSUM);
    ck_assert_uint_eq(holder->breaker.failures, 1);
    ck_assert_uint_eq(reader->breaker.failures, 0);
    ck_assert_uint_eq(c.q->sched.n_avoid, 1); /* the prompt is in the holder's cache */
    ck_assert_uint_eq(c.q->sched.avoid[0], reader->holder);
    reader->failed_with = holder->holder + 2; /* another holder, before */
    place_queued(router);
    c.counter = c.q->counter;
    holder = c.q->prefill;
    struct peer *second = c.q->decode;
    second->failed_with = holder->holder + 2;
    uint32_t before = holder->breaker.failures;
    worker_fails(&c, second, TD_ERR_CHECKSUM);
    ck_assert_uint_eq(second->breaker.failures, 1);
    ck_assert_uint_eq(holder->breaker.failures, before + 1);
    ck_assert_uint_eq(c.q->sched.n_avoid, 3); /* now the holder as well */
    leave(&c);
}
END_TEST

START_TEST(test_generated_tokens_clear_both_workers)
{
    struct client c = generate(&(struct wish){0});
    struct peer *prefill = c.q->prefill, *decode = c.q->decode;
    peer_failed(prefill);
    peer_failed(decode);
    worker_accepts(&c, decode);
    say(&c, prefill, 'a', 0); /* it says nothing about the handover */
    ck_assert_uint_eq(prefill->breaker.failures, 1);
    say(&c, decode, 'b', 1);
    ck_assert_uint_eq(prefill->breaker.failures, 0);
    ck_assert_uint_eq(decode->breaker.failures, 0);
    leave(&c);
}
END_TEST

/* ----------------------------------------------------- clients that leave together */

static void enqueue_of(struct rpc_call *call)
{
    struct request *q = mem_zalloc(sizeof(*q));
    q->router = router;
    q->call = rpc_call_ref(call);
    q->p.remaining_ms = INT64_MAX;
    q->detok = token_stream_open(router->tokenizer, true);
    router_enqueue(router, q);
}

static uint32_t count_requests(void)
{
    const struct request *q;
    uint32_t n = 0;
    TAILQ_FOREACH (q, &router->requests, in_router)
        n++;
    return n;
}

/* More calls than router.calls has buckets, so that some share one. */
START_TEST(test_a_client_that_leaves_takes_its_choices_and_nothing_else)
{
    enum { N = CALL_BUCKETS + 1, LEAVER = 7, CHOICES = 3 };
    struct rpc_call **calls = mem_array(N, sizeof(struct rpc_call *));
    uint32_t n_left = N + CHOICES - 1;
    for (uint32_t i = 0; i < N; i++) {
        calls[i] = call_open();
        enqueue_of(calls[i]);
    }
    for (uint32_t i = 1; i < CHOICES; i++)
        enqueue_of(calls[LEAVER]);
    for (uint32_t i = 0; i < N; i++) {
        router_call_gone(router, calls[i]);
        n_left -= i == LEAVER ? CHOICES : 1;
        if (i % 64 == LEAVER)
            ck_assert_uint_eq(count_requests(), n_left);
    }
    ck_assert_uint_eq(n_left, 0);
    ck_assert_ptr_null(TAILQ_FIRST(&router->requests));
    for (uint32_t i = 0; i < N; i++)
        rpc_call_unref(calls[i]);
    free(calls);
}
END_TEST

/* Processor time per client, least of three tries, when n clients wait and leave, the last one first. */
static double ns_of_leaving(uint32_t n)
{
    struct rpc_call **calls = mem_array(n, sizeof(struct rpc_call *));
    double least = INFINITY;
    for (int attempt = 0; attempt < 3; attempt++) {
        for (uint32_t i = 0; i < n; i++)
            enqueue_of(calls[i] = call_open());
        struct timespec begin, end;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
        for (uint32_t i = n; i-- > 0;)
            router_call_gone(router, calls[i]);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
        least = fmin(least, ((double)(end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec)) / n);
        ck_assert_ptr_null(TAILQ_FIRST(&router->requests));
        for (uint32_t i = 0; i < n; i++)
            rpc_call_unref(calls[i]);
    }
    free(calls);
    return least;
}

START_TEST(test_a_client_that_leaves_costs_the_same_beside_many)
{
    double few = ns_of_leaving(512), many = ns_of_leaving(16384);
    ck_assert_msg(many < 16 * few, "%.0f ns beside 512, %.0f ns beside 16384", few, many);
}
END_TEST

/* -------------------------------------------------------------------- choices */

/* A client of the choice that runs in this request. */
static struct client choice_of(const struct client *first, uint32_t choice)
{
    struct client c = {.call = first->call};
    TAILQ_FOREACH (c.q, &router->requests, in_router)
        if (c.q->call == first->call && c.q->p.sampling.choice == choice)
            break;
    ck_assert_ptr_nonnull(c.q);
    c.counter = c.q->counter;
    return c;
}

static void end_choice(struct client *c, char byte)
{
    struct peer *prefill = c->q->prefill, *decode = c->q->decode;
    worker_accepts(c, decode);
    say(c, prefill, byte, 0);
    worker_ends(c, prefill, "");
    say(c, decode, byte, 1);
    worker_ends(c, decode, "length");
}

START_TEST(test_choices_begin_when_the_first_one_decodes_and_end_the_call_together)
{
    struct client first = generate(&(struct wish){.n = 3});
    struct peer *prefill = first.q->prefill, *decode = first.q->decode;
    worker_accepts(&first, decode);
    say(&first, prefill, 'a', 0);
    ck_assert_uint_eq(router->n_queued + router->n_running, 1);
    say(&first, decode, 'b', 1);
    ck_assert_uint_eq(router->n_queued, 2);
    place_queued(router);
    struct client second = choice_of(&first, 1), third = choice_of(&first, 2);
    ck_assert_uint_eq(second.q->p.sampling.seed, first.q->p.sampling.seed);
    ck_assert_uint_eq(last_leg(third.q->decode)->sampling->choice >= 1, 1);
    end_choice(&third, 'z');
    ck_assert(!first.call->finished);
    worker_ends(&first, prefill, "");
    worker_ends(&first, decode, "length");
    ck_assert(!first.call->finished);
    end_choice(&second, 'y');
    ck_assert(first.call->finished);
    ck_assert_int_eq(first.call->code, RPC_OK);
    char texts[3][8] = {"", "", ""};
    uint32_t n_ends[3] = {0};
    for (uint32_t i = 0; i < first.call->n_sent; i++) {
        const Tandem__V1__GenerateResponse *m = (Tandem__V1__GenerateResponse *)first.call->sent[i];
        strncat(texts[m->choice], m->text.len ? (const char *)m->text.data : "", m->text.len);
        n_ends[m->choice] += m->end != NULL;
    }
    ck_assert_str_eq(texts[0], "ab");
    ck_assert_str_eq(texts[1], "yy");
    ck_assert_str_eq(texts[2], "zz");
    for (int i = 0; i < 3; i++)
        ck_assert_uint_eq(n_ends[i], 1);
    ck_assert_uint_eq(first.call->n_refs, 1);
    rpc_call_unref(first.call);
}
END_TEST

START_TEST(test_choices_begin_also_when_the_first_one_ends_at_once)
{
    struct client first = generate(&(struct wish){.n = 2, .max_tokens = 1});
    struct peer *prefill = first.q->prefill;
    say(&first, prefill, 'a', 0);
    worker_ends(&first, prefill, "length");
    ck_assert(!first.call->finished);
    ck_assert_uint_eq(router->n_queued, 1);
    place_queued(router);
    struct client second = choice_of(&first, 1);
    prefill = second.q->prefill;
    say(&second, prefill, 'b', 0);
    worker_ends(&second, prefill, "length");
    ck_assert(first.call->finished);
    ck_assert_uint_eq(first.call->n_refs, 1);
    rpc_call_unref(first.call);
}
END_TEST

START_TEST(test_a_choice_that_fails_ends_the_call_once)
{
    struct client first = generate(&(struct wish){.n = 2});
    struct peer *decode = first.q->decode;
    worker_accepts(&first, decode);
    say(&first, decode, 'a', 0);
    place_queued(router);
    struct client second = choice_of(&first, 1);
    worker_fails(&second, second.q->prefill, TD_ERR_INVALID);
    ck_assert_int_eq(first.call->code, RPC_INVALID_ARGUMENT);
    ck_assert(is_alive(&first)); /* it goes when the call reports its end */
    worker_fails(&first, first.q->prefill, TD_ERR_NOT_FOUND);
    ck_assert_int_eq(first.call->code, RPC_INVALID_ARGUMENT);
    ck_assert_uint_eq(first.call->n_finishes, 1);
    ck_assert_uint_eq(first.call->n_refs, 1);
    rpc_call_unref(first.call);
}
END_TEST

START_TEST(test_later_choices_have_what_is_left_of_the_deadline_and_no_scores)
{
    struct client first = generate(&(struct wish){.n = 2, .deadline_ms = 1000, .scores = true});
    ck_assert(last_leg(first.q->prefill)->sampling->prompt_logprobs);
    world_wait_ms(400);
    say(&first, first.q->decode, 'a', 0);
    place_queued(router);
    struct client second = choice_of(&first, 1);
    ck_assert_int_eq(second.q->p.remaining_ms, 600);
    ck_assert(!last_leg(second.q->prefill)->sampling->prompt_logprobs);
    request_gone(second.q);
    leave(&first);
}
END_TEST

/* -------------------------------------------------------------- one worker */

START_TEST(test_one_worker_has_one_leg_and_its_end_is_the_end)
{
    struct client c = generate(&(struct wish){0});
    struct peer *only = c.q->decode, *other = router->peers[router->peers[0] == only];
    ck_assert_ptr_eq(c.q->prefill, only);
    ck_assert_ptr_null(last_leg(other));
    ck_assert_int_eq(last_leg(only)->kind, TANDEM__WORKER__V1__LEG_KIND__LEG_AGGREGATED);
    ck_assert_uint_eq(last_leg(only)->peer_xfer_address.len, 0);
    say(&c, only, 'a', 0); /* nobody has to reserve */
    ck_assert_str_eq(answer_of(&c).text, "a");
    Tandem__Worker__V1__LegEnd end = TANDEM__WORKER__V1__LEG_END__INIT;
    end.finish_reason = rpc_data("stop");
    end.cached_worker = 3;
    worker_ends_with(&c, only, end);
    ck_assert_uint_eq(answer_of(&c).end->usage->cached_tokens->worker, 3);
    ck_assert(is_text(answer_of(&c).end->placement->prefill, only->name));
    expect_end(&c, "a", "stop");
}
END_TEST

START_TEST(test_one_worker_gets_one_cancellation)
{
    struct client c = generate(&(struct wish){0});
    struct peer *only = c.q->decode;
    request_gone(c.q);
    ck_assert_uint_eq(count_cancels(only, c.counter), 1);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_a_cancelled_leg_of_one_worker_is_a_failure)
{
    struct client c = generate(&(struct wish){0});
    worker_fails(&c, c.q->decode, TD_ERR_CANCELLED);
    ck_assert_int_eq(c.q->state, REQUEST_QUEUED);
    leave(&c);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("router_request");
    TCase *split = tcase_create("split"), *whole = tcase_create("aggregated"), *kept = tcase_create("kept");
    TCase *const wholes[] = {whole, kept};
    suite_add_tcase(s, split);
    suite_add_tcase(s, whole);
    suite_add_tcase(s, kept);
    tcase_add_checked_fixture(split, setup, world_close);
    tcase_add_checked_fixture(whole, setup_aggregated, world_close);
    tcase_add_checked_fixture(kept, setup_kept, world_close);
    tcase_add_test(split, test_the_first_token_may_come_from_either_worker);
    tcase_add_test(split, test_tokens_wait_until_the_decode_worker_has_reserved);
    tcase_add_test(split, test_tokens_of_a_worker_outside_the_placement_are_dropped);
    tcase_add_test(split, test_a_token_outside_the_vocabulary_is_a_failure);
    tcase_add_test(split, test_the_later_of_two_ends_finishes_the_answer);
    tcase_add_test(split, test_the_prefill_leg_brings_its_counts_also_when_it_ends_last);
    tcase_add_test(split, test_a_first_token_that_ends_the_answer_needs_no_decode_worker);
    tcase_add_test(split, test_a_cancelled_handover_waits_for_the_reason);
    tcase_add_test(split, test_one_token_needs_one_leg);
    tcase_add_test(split, test_both_legs_name_each_other);
    tcase_add_test(split, test_a_client_that_leaves_cancels_both_legs_and_late_tokens_find_nothing);
    tcase_add_test(split, test_tokens_after_the_end_find_nothing);
    tcase_add_test(split, test_a_leg_has_what_is_left_until_the_deadline);
    tcase_add_test(split, test_a_deadline_is_final_only_when_it_has_passed);
    tcase_add_test(split, test_what_any_worker_would_refuse_fails_at_once);
    tcase_add_test(split, test_a_worker_that_refuses_a_leg_drains);
    tcase_add_test(split, test_a_transfer_that_fails_is_the_holders_and_at_two_holders_the_readers);
    tcase_add_test(split, test_generated_tokens_clear_both_workers);
    tcase_add_test(split, test_a_client_that_leaves_takes_its_choices_and_nothing_else);
    tcase_add_test(split, test_a_client_that_leaves_costs_the_same_beside_many);
    tcase_add_test(split, test_choices_begin_when_the_first_one_decodes_and_end_the_call_together);
    tcase_add_test(split, test_choices_begin_also_when_the_first_one_ends_at_once);
    tcase_add_test(split, test_a_choice_that_fails_ends_the_call_once);
    tcase_add_test(split, test_later_choices_have_what_is_left_of_the_deadline_and_no_scores);
    for (int i = 0; i < 2; i++) {
        tcase_add_test(wholes[i], test_one_worker_has_one_leg_and_its_end_is_the_end);
        tcase_add_test(wholes[i], test_one_worker_gets_one_cancellation);
        tcase_add_test(wholes[i], test_a_cancelled_leg_of_one_worker_is_a_failure);
    }
    return tap_main(s);
}
