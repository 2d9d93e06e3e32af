/* What the client gets (router/answer.c): text, tokens, stops and the end, token by token. */
#include "world.h"

/* What a test asks for; the rest is the demo model's default. */
struct wish {
    const char *stops[4];
    uint32_t min_tokens, max_tokens, top; /* max_tokens 0: 100 */
    bool ids, logprobs, echo, shows_special;
};

static void setup(void)
{
    const char *const forced[] = {"--plan", "aggregated", NULL};
    world_open_with("d", forced);
}

static struct client generate(const struct wish *w)
{
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    Tandem__V1__Stopping stopping = TANDEM__V1__STOPPING__INIT;
    ProtobufCBinaryData stops[4];
    m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT;
    m.text = rpc_data("Tell me");
    m.request_id = rpc_data("answer");
    m.want_ids = w->ids;
    m.want_logprobs = w->logprobs;
    m.top_logprobs = w->top;
    m.echo = w->echo;
    m.has_skip_special_tokens_case = TANDEM__V1__GENERATE_REQUEST__HAS_SKIP_SPECIAL_TOKENS_SKIP_SPECIAL_TOKENS;
    m.skip_special_tokens = !w->shows_special;
    m.stopping = &stopping;
    stopping.has_max_tokens_case = TANDEM__V1__STOPPING__HAS_MAX_TOKENS_MAX_TOKENS;
    stopping.max_tokens = w->max_tokens ? w->max_tokens : 100;
    stopping.min_tokens = w->min_tokens;
    stopping.stop = stops;
    while (stopping.n_stop < 4 && w->stops[stopping.n_stop]) {
        stops[stopping.n_stop] = rpc_data(w->stops[stopping.n_stop]);
        stopping.n_stop++;
    }
    struct client c = ask(&m);
    ck_assert_int_eq(c.q->state, REQUEST_PLACED);
    return c;
}

static void say_id(struct client *c, uint32_t id)
{
    worker_token(c, router->peers[0], id, c->n_tokens++, -0.25f);
}

/* One token for each byte. */
static void say(struct client *c, const char *bytes)
{
    for (; *bytes; bytes++)
        say_id(c, id_of_byte((uint8_t)*bytes));
}

/* Checks the answer, whose request is over, and that nothing holds its call any more. */
static void expect_end(struct client *c, const char *text, uint32_t n_tokens, const char *reason)
{
    struct answer a = answer_of(c);
    ck_assert(!is_alive(c));
    ck_assert_str_eq(a.text, text);
    ck_assert_uint_eq(a.n_bytes, strlen(text));
    ck_assert_ptr_nonnull(a.end);
    ck_assert_msg(is_text(a.end->finish_reason, reason), "finish reason is not %s", reason);
    ck_assert_uint_eq(a.end->usage->completion_tokens, n_tokens);
    ck_assert(c->call->finished);
    ck_assert_int_eq(c->call->code, RPC_OK);
    ck_assert_uint_eq(c->call->n_refs, 1);
    rpc_call_unref(c->call);
}

static void expect_shown(const struct client *c, const char *text)
{
    ck_assert_str_eq(answer_of(c).text, text);
}

/* -------------------------------------------------------------- stop strings */

START_TEST(test_a_stop_string_is_found_over_token_borders)
{
    struct client c = generate(&(struct wish){.stops = {"STOP"}});
    say(&c, "so STO");
    expect_shown(&c, "so ");
    say(&c, "P");
    expect_end(&c, "so ", 3, "stop");
}
END_TEST

START_TEST(test_tokens_after_a_stop_string_are_dropped)
{
    struct client c = generate(&(struct wish){.stops = {"."}, .ids = true});
    say(&c, "a.bc");
    ck_assert_uint_eq(answer_of(&c).n_ids, 1);
    expect_end(&c, "a", 1, "stop");
}
END_TEST

START_TEST(test_the_first_of_several_stops_ends_the_answer)
{
    struct client c = generate(&(struct wish){.stops = {"zzz", "two", "one"}});
    say(&c, "only one or two");
    expect_end(&c, "only ", 5, "stop");
}
END_TEST

START_TEST(test_of_two_stops_in_one_token_the_earlier_one_counts)
{
    struct token_ids the = ids_of(" the");
    ck_assert_uint_eq(the.n, 1); /* or the test shows nothing */
    struct client c = generate(&(struct wish){.stops = {"he", "th", "e"}});
    say_id(&c, the.ids[0]);
    expect_end(&c, " ", 1, "stop");
    token_ids_free(&the);
}
END_TEST

START_TEST(test_a_stop_at_the_very_start_leaves_an_empty_answer)
{
    struct client c = generate(&(struct wish){.stops = {"\n\n"}, .ids = true});
    say(&c, "\n\n");
    ck_assert_uint_eq(answer_of(&c).n_ids, 0);
    expect_end(&c, "", 0, "stop");
}
END_TEST

START_TEST(test_what_only_begins_a_stop_is_released_with_its_tokens)
{
    struct client c = generate(&(struct wish){.stops = {"END."}, .ids = true});
    say(&c, "EN");
    expect_shown(&c, "");
    ck_assert_uint_eq(answer_of(&c).n_ids, 0);
    say(&c, "T");
    expect_shown(&c, "ENT");
    ck_assert_uint_eq(answer_of(&c).n_ids, 3);
    worker_ends(&c, router->peers[0], "length");
    expect_end(&c, "ENT", 3, "length");
}
END_TEST

START_TEST(test_a_beginning_inside_a_beginning_is_held_back)
{
    struct client c = generate(&(struct wish){.stops = {"aab"}});
    say(&c, "aaa"); /* the last two may still begin the stop */
    expect_shown(&c, "a");
    say(&c, "b");
    expect_end(&c, "a", 1, "stop");
}
END_TEST

START_TEST(test_the_longest_beginning_of_any_stop_is_held_back)
{
    struct client c = generate(&(struct wish){.stops = {"y!", "xyz"}});
    say(&c, "-xy");
    expect_shown(&c, "-");
    say(&c, "?");
    expect_shown(&c, "-xy?");
    worker_ends(&c, router->peers[0], "stop");
    expect_end(&c, "-xy?", 4, "stop");
}
END_TEST

START_TEST(test_what_was_held_back_is_shown_at_the_end)
{
    struct client c = generate(&(struct wish){.stops = {"END."}, .ids = true});
    say(&c, "THE END");
    expect_shown(&c, "THE ");
    worker_ends(&c, router->peers[0], "stop");
    ck_assert_uint_eq(answer_of(&c).n_ids, 7);
    expect_end(&c, "THE END", 7, "stop");
}
END_TEST

START_TEST(test_a_stop_in_the_middle_of_a_token_keeps_the_tokens_beginning)
{
    struct token_ids the = ids_of(" the");
    struct client c = generate(&(struct wish){.stops = {"he"}, .ids = true});
    say_id(&c, the.ids[0]);
    ck_assert_uint_eq(answer_of(&c).n_ids, 1);
    expect_end(&c, " t", 1, "stop");
    token_ids_free(&the);
}
END_TEST

START_TEST(test_a_stop_may_be_cut_inside_a_character_by_tokens)
{
    struct client c = generate(&(struct wish){.stops = {"\xe2\x82\xac"}}); /* the euro sign */
    say(&c, "5\xe2\x82");
    expect_shown(&c, "5");
    say(&c, "\xac");
    expect_end(&c, "5", 1, "stop");
}
END_TEST

START_TEST(test_before_min_tokens_a_stop_string_is_text)
{
    struct client c = generate(&(struct wish){.stops = {"."}, .min_tokens = 3});
    say(&c, "a.b");
    expect_shown(&c, "a.b");
    say(&c, ".");
    expect_end(&c, "a.b", 3, "stop");
}
END_TEST

START_TEST(test_a_stop_string_that_ends_with_min_tokens_is_text)
{
    struct client c = generate(&(struct wish){.stops = {"ab"}, .min_tokens = 2});
    say(&c, "abc");
    ck_assert(is_alive(&c));
    expect_shown(&c, "abc");
    worker_ends(&c, router->peers[0], "length");
    expect_end(&c, "abc", 3, "length");
}
END_TEST

/* ---------------------------------------------------------------- characters */

START_TEST(test_a_character_is_shown_when_it_is_whole)
{
    struct client c = generate(&(struct wish){0});
    say(&c, "a\xf0\x9f\x98");
    expect_shown(&c, "a");
    say(&c, "\x80");
    expect_shown(&c, "a\xf0\x9f\x98\x80");
    worker_ends(&c, router->peers[0], "length");
    expect_end(&c, "a\xf0\x9f\x98\x80", 5, "length");
}
END_TEST

START_TEST(test_bytes_that_are_no_character_become_one_replacement_each)
{
    struct client c = generate(&(struct wish){0});
    say(&c, "a\xff"
            "b\xc3"
            "c");
    expect_shown(&c, "a\xef\xbf\xbd"
                     "b\xef\xbf\xbd"
                     "c");
    worker_ends(&c, router->peers[0], "length");
    expect_end(&c,
               "a\xef\xbf\xbd"
               "b\xef\xbf\xbd"
               "c",
               5, "length");
}
END_TEST

START_TEST(test_an_unfinished_character_is_replaced_at_the_end)
{
    struct client c = generate(&(struct wish){.ids = true});
    say(&c, "a\xe2\x82");
    expect_shown(&c, "a");
    worker_ends(&c, router->peers[0], "length");
    ck_assert_uint_eq(answer_of(&c).n_ids, 3);
    expect_end(&c, "a\xef\xbf\xbd", 3, "length");
}
END_TEST

START_TEST(test_a_stop_that_the_end_completes_is_found)
{
    struct client c = generate(&(struct wish){.stops = {"b\xef\xbf\xbd"}});
    say(&c, "ab\xe2");
    expect_shown(&c, "a");
    worker_ends(&c, router->peers[0], "length");
    expect_end(&c, "a", 1, "stop");
}
END_TEST

START_TEST(test_special_tokens_are_text_only_for_those_who_ask)
{
    struct client hidden = generate(&(struct wish){.ids = true});
    struct client shown = generate(&(struct wish){.ids = true, .shows_special = true});
    say(&hidden, "a");
    say(&shown, "a");
    say_id(&hidden, router->config.eos_ids[0]);
    say_id(&shown, router->config.eos_ids[0]);
    worker_ends(&hidden, router->peers[0], "stop");
    worker_ends(&shown, router->peers[0], "stop");
    ck_assert_uint_eq(answer_of(&hidden).n_ids, 2);
    expect_end(&hidden, "a", 2, "stop");
    expect_end(&shown, "a<|im_end|>", 2, "stop");
}
END_TEST

START_TEST(test_a_token_without_text_counts_at_the_end)
{
    struct client c = generate(&(struct wish){.stops = {"never"}, .ids = true});
    say(&c, "a");
    say_id(&c, router->config.eos_ids[0]);
    ck_assert_uint_eq(answer_of(&c).n_ids, 1); /* a stop might still begin here */
    worker_ends(&c, router->peers[0], "stop");
    ck_assert_uint_eq(answer_of(&c).n_ids, 2);
    expect_end(&c, "a", 2, "stop");
}
END_TEST

/* ------------------------------------------------------- tokens in the stream */

/* All tokens so far are single bytes: as many bytes as tokens in each message, and the same ones. */
static void expect_each_message_agrees(const struct client *c)
{
    for (uint32_t i = 0; i < c->call->n_sent; i++) {
        const Tandem__V1__GenerateResponse *m = (Tandem__V1__GenerateResponse *)c->call->sent[i];
        ck_assert_uint_eq(m->text.len, m->n_tokens);
        for (size_t t = 0; t < m->n_tokens; t++)
            ck_assert_uint_eq(m->tokens[t]->id, id_of_byte(m->text.data[t]));
    }
}

START_TEST(test_each_message_has_the_text_of_its_tokens)
{
    struct client c = generate(&(struct wish){.stops = {"never"}, .ids = true, .logprobs = true});
    say(&c, "a nevada neve");
    expect_each_message_agrees(&c);
    expect_shown(&c, "a nevada ");
    ck_assert_float_eq(answer_of(&c).logprobs[8], -0.25f);
    rpc_call_cancel(c.call);
    request_gone(c.q);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_logprobs_are_told_only_to_those_who_ask)
{
    struct client text = generate(&(struct wish){0}), ids = generate(&(struct wish){.ids = true});
    say(&text, "a");
    say(&ids, "a");
    ck_assert_uint_eq(answer_of(&text).n_ids, 0);
    ck_assert_uint_eq(answer_of(&ids).n_ids, 1);
    ck_assert_float_eq(answer_of(&ids).logprobs[0], 0);
    worker_ends(&text, router->peers[0], "length");
    worker_ends(&ids, router->peers[0], "length");
    expect_end(&text, "a", 1, "length");
    expect_end(&ids, "a", 1, "length");
}
END_TEST

START_TEST(test_the_likeliest_tokens_come_with_their_token)
{
    struct client c = generate(&(struct wish){.top = 2});
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__Tokens tokens = TANDEM__WORKER__V1__TOKENS__INIT;
    Tandem__Worker__V1__Token t = TANDEM__WORKER__V1__TOKEN__INIT, *list[] = {&t};
    Tandem__Worker__V1__TransferId id = transfer_id_of(&c);
    uint32_t top_ids[] = {65, 66};
    float top[] = {-0.5f, -1.5f};
    t.id = &id;
    t.token = 65;
    t.n_top_ids = t.n_top_logprobs = 2;
    t.top_ids = top_ids;
    t.top_logprobs = top;
    tokens.n_tokens = 1;
    tokens.tokens = list;
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_TOKENS;
    m.tokens = &tokens;
    worker_says(router->peers[0], &m);
    const Tandem__V1__GenerateResponse *got = (Tandem__V1__GenerateResponse *)c.call->sent[0];
    ck_assert_uint_eq(got->n_tokens, 1);
    ck_assert_uint_eq(got->tokens[0]->n_top_ids, 2);
    ck_assert_uint_eq(got->tokens[0]->n_top_logprobs, 2);
    ck_assert_mem_eq(got->tokens[0]->top_ids, top_ids, sizeof(top_ids));
    ck_assert_mem_eq(got->tokens[0]->top_logprobs, top, sizeof(top));
    request_gone(c.q);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_the_echo_comes_first_and_once)
{
    struct client c = generate(&(struct wish){.echo = true});
    say(&c, ":");
    const Tandem__V1__GenerateResponse *first = (Tandem__V1__GenerateResponse *)c.call->sent[0];
    ck_assert(is_text(first->text, "Tell me"));
    say(&c, "x");
    worker_ends(&c, router->peers[0], "length");
    expect_end(&c, "Tell me:x", 2, "length");
}
END_TEST

/* ------------------------------------------------------------------- the end */

START_TEST(test_the_last_leg_says_why_the_answer_ended)
{
    struct client length = generate(&(struct wish){0}), stop = generate(&(struct wish){0});
    say(&length, "ab");
    say(&stop, "ab");
    worker_ends(&length, router->peers[0], "length");
    worker_ends(&stop, router->peers[0], "stop");
    expect_end(&length, "ab", 2, "length");
    expect_end(&stop, "ab", 2, "stop");
}
END_TEST

START_TEST(test_usage_and_placement_are_in_the_end)
{
    struct client c = generate(&(struct wish){0});
    struct token_ids prompt = ids_of("Tell me");
    Tandem__Worker__V1__LegEnd end = TANDEM__WORKER__V1__LEG_END__INIT;
    say(&c, "abc");
    end.finish_reason = rpc_data("length");
    end.cached_worker = 1;
    end.cached_ssd = 1000; /* more than the prompt has */
    worker_ends_with(&c, router->peers[0], end);
    const Tandem__V1__GenerateEnd *e = answer_of(&c).end;
    ck_assert_uint_eq(e->usage->prompt_tokens, prompt.n);
    ck_assert_uint_eq(e->usage->cached_tokens->worker, 1);
    ck_assert_uint_eq(e->usage->cached_tokens->ssd, prompt.n - 1);
    ck_assert(is_text(e->placement->plan, "aggregated"));
    ck_assert(is_text(e->placement->decode, "d0"));
    ck_assert(is_text(e->request_id, "answer"));
    ck_assert_double_gt(e->predicted->ttft_ms, 0);
    ck_assert_double_gt(e->predicted->tpot_ms, 0);
    ck_assert_uint_eq(e->replans, 0);
    token_ids_free(&prompt);
    expect_end(&c, "abc", 3, "length");
}
END_TEST

START_TEST(test_times_in_the_end_add_up)
{
    struct client c = generate(&(struct wish){0});
    Tandem__Worker__V1__PhaseTimes times = TANDEM__WORKER__V1__PHASE_TIMES__INIT;
    Tandem__Worker__V1__LegEnd end = TANDEM__WORKER__V1__LEG_END__INIT;
    world_wait_ms(30);
    say(&c, "a");
    world_wait_ms(10);
    say(&c, "b");
    world_wait_ms(10);
    say(&c, "c");
    world_wait_ms(5);
    times.prefill = 28 * NS_PER_MS;
    times.decode = 20 * NS_PER_MS;
    end.times = &times;
    end.finish_reason = rpc_data("length");
    worker_ends_with(&c, router->peers[0], end);
    const Tandem__V1__Timing *t = answer_of(&c).end->timing;
    ck_assert_double_eq_tol(t->ttft, 30, 1e-9);
    ck_assert_double_eq_tol(t->tpot, 10, 1e-9);
    ck_assert_double_eq_tol(t->total, 55, 1e-9);
    ck_assert_double_eq_tol(t->prefill, 28, 1e-9);
    ck_assert_double_eq_tol(t->decode, 20, 1e-9);
    ck_assert_double_eq_tol(t->residual, 7, 1e-9);
    expect_end(&c, "abc", 3, "length");
}
END_TEST

/* ------------------------------------------------- clients that do not read */

START_TEST(test_a_client_that_does_not_read_gets_its_tokens_later)
{
    struct client c = generate(&(struct wish){.ids = true});
    c.call->reads = false;
    c.call->max_queued_bytes = 500; /* three messages */
    say(&c, "abcdefghij");
    uint32_t n_before = c.call->n_sent;
    ck_assert_uint_eq(n_before, 3);
    expect_shown(&c, "abc");
    answer_more(c.q);
    ck_assert_uint_eq(c.call->n_sent, n_before); /* there is no room yet */
    call_read(c.call);
    answer_more(c.q);
    ck_assert_uint_eq(c.call->n_sent, n_before + 1); /* the rest in one message */
    expect_shown(&c, "abcdefghij");
    ck_assert_uint_eq(answer_of(&c).n_ids, 10);
    answer_more(c.q);
    ck_assert_uint_eq(c.call->n_sent, n_before + 1);
    worker_ends(&c, router->peers[0], "length");
    expect_end(&c, "abcdefghij", 10, "length");
}
END_TEST

START_TEST(test_the_end_is_queued_without_room)
{
    struct client c = generate(&(struct wish){.ids = true});
    c.call->reads = false;
    c.call->max_queued_bytes = 1;
    say(&c, "abcdef");
    expect_shown(&c, "a");
    worker_ends(&c, router->peers[0], "length");
    ck_assert_uint_eq(answer_of(&c).n_ids, 6);
    expect_end(&c, "abcdef", 6, "length");
}
END_TEST

START_TEST(test_the_queue_of_a_slow_client_is_filled_by_messages_of_many_tokens)
{
    struct client c = generate(&(struct wish){.ids = true});
    c.call->reads = false;
    while (c.call->queued_bytes <= 8192)
        say(&c, "x");
    uint32_t n_sent = c.call->n_sent;
    for (int i = 0; i < 31; i++)
        say(&c, "y");
    ck_assert_uint_eq(c.call->n_sent, n_sent);
    say(&c, "y");
    ck_assert_uint_eq(c.call->n_sent, n_sent + 1);
    const Tandem__V1__GenerateResponse *m = (Tandem__V1__GenerateResponse *)c.call->sent[n_sent];
    ck_assert_uint_eq(m->n_tokens, 32);
    request_gone(c.q);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_a_message_that_would_be_too_large_is_sent_in_parts)
{
    struct client c = generate(&(struct wish){.ids = true, .logprobs = true});
    c.call->reads = false;
    c.call->max_queued_bytes = 1;
    say(&c, "abcdefghijklmnopqrstuvwxyz");
    call_read(c.call);
    c.call->max_queued_bytes = UINT64_MAX;
    c.call->max_message_bytes = 100; /* some six tokens */
    answer_more(c.q);
    ck_assert_uint_gt(c.call->n_sent, 4);
    expect_each_message_agrees(&c);
    expect_shown(&c, "abcdefghijklmnopqrstuvwxyz");
    ck_assert_uint_eq(answer_of(&c).n_ids, 26);
    c.call->max_message_bytes = 4096;
    worker_ends(&c, router->peers[0], "length");
    expect_end(&c, "abcdefghijklmnopqrstuvwxyz", 26, "length");
}
END_TEST

START_TEST(test_reading_slowly_moves_no_stop)
{
    struct client c = generate(&(struct wish){.stops = {"."}, .min_tokens = 5, .ids = true});
    c.call->reads = false;
    c.call->max_queued_bytes = 1;
    say(&c, "ab.defgh"); /* the stop is text: it comes before min_tokens */
    expect_shown(&c, "a");
    worker_ends(&c, router->peers[0], "length");
    expect_end(&c, "ab.defgh", 8, "length");
}
END_TEST

START_TEST(test_a_stop_is_found_while_the_client_does_not_read)
{
    struct client c = generate(&(struct wish){.stops = {"."}, .ids = true});
    c.call->reads = false;
    c.call->max_queued_bytes = 1;
    say(&c, "abc.");
    ck_assert_uint_eq(answer_of(&c).n_ids, 3);
    expect_end(&c, "abc", 3, "stop");
}
END_TEST

int main(void)
{
    Suite *s = suite_create("router_answer");
    TCase *stops = tcase_create("stops"), *text = tcase_create("text"), *end = tcase_create("end"),
          *slow = tcase_create("slow");
    TCase *cases[] = {stops, text, end, slow};
    for (int i = 0; i < 4; i++) {
        tcase_add_checked_fixture(cases[i], setup, world_close);
        suite_add_tcase(s, cases[i]);
    }
    tcase_add_test(stops, test_a_stop_string_is_found_over_token_borders);
    tcase_add_test(stops, test_tokens_after_a_stop_string_are_dropped);
    tcase_add_test(stops, test_the_first_of_several_stops_ends_the_answer);
    tcase_add_test(stops, test_of_two_stops_in_one_token_the_earlier_one_counts);
    tcase_add_test(stops, test_a_stop_at_the_very_start_leaves_an_empty_answer);
    tcase_add_test(stops, test_what_only_begins_a_stop_is_released_with_its_tokens);
    tcase_add_test(stops, test_a_beginning_inside_a_beginning_is_held_back);
    tcase_add_test(stops, test_the_longest_beginning_of_any_stop_is_held_back);
    tcase_add_test(stops, test_what_was_held_back_is_shown_at_the_end);
    tcase_add_test(stops, test_a_stop_in_the_middle_of_a_token_keeps_the_tokens_beginning);
    tcase_add_test(stops, test_a_stop_may_be_cut_inside_a_character_by_tokens);
    tcase_add_test(stops, test_before_min_tokens_a_stop_string_is_text);
    tcase_add_test(stops, test_a_stop_string_that_ends_with_min_tokens_is_text);
    tcase_add_test(text, test_a_character_is_shown_when_it_is_whole);
    tcase_add_test(text, test_bytes_that_are_no_character_become_one_replacement_each);
    tcase_add_test(text, test_an_unfinished_character_is_replaced_at_the_end);
    tcase_add_test(text, test_a_stop_that_the_end_completes_is_found);
    tcase_add_test(text, test_special_tokens_are_text_only_for_those_who_ask);
    tcase_add_test(text, test_a_token_without_text_counts_at_the_end);
    tcase_add_test(text, test_each_message_has_the_text_of_its_tokens);
    tcase_add_test(text, test_logprobs_are_told_only_to_those_who_ask);
    tcase_add_test(text, test_the_likeliest_tokens_come_with_their_token);
    tcase_add_test(text, test_the_echo_comes_first_and_once);
    tcase_add_test(end, test_the_last_leg_says_why_the_answer_ended);
    tcase_add_test(end, test_usage_and_placement_are_in_the_end);
    tcase_add_test(end, test_times_in_the_end_add_up);
    tcase_add_test(slow, test_a_client_that_does_not_read_gets_its_tokens_later);
    tcase_add_test(slow, test_the_end_is_queued_without_room);
    tcase_add_test(slow, test_the_queue_of_a_slow_client_is_filled_by_messages_of_many_tokens);
    tcase_add_test(slow, test_a_message_that_would_be_too_large_is_sent_in_parts);
    tcase_add_test(slow, test_reading_slowly_moves_no_stop);
    tcase_add_test(slow, test_a_stop_is_found_while_the_client_does_not_read);
    return tap_main(s);
}
