/*
 * Prefill and decode legs: how the KV of a prompt and its first token go from one worker to another, and
 * what happens if they don't. Where one of the two misbehaves, a bare xfer takes its place
 * (tests/transfer/node.h).
 */
#include "tests/worker/world.h"

#include "tests/transfer/node.h"
#include "worker/first_token.h"

static const struct kv_layout LAYOUT = {NUM_F32, 2, 2, 16, 16}; /* the layout of WORLD_DIMS */
static struct leg_message leg;

/* Two workers, and the legs of one request on them. */
struct pair {
    struct node_worker *prefill, *decode;
    struct router_end *to_prefill, *to_decode;
};

static struct pair pair_open(const char *const *more)
{
    struct pair p = {.prefill = world_worker("prefill", more), .decode = world_worker("decode", more)};
    p.to_prefill = &p.prefill->routers[0];
    p.to_decode = &p.decode->routers[0];
    return p;
}

static void send_prefill(const struct pair *p, uint64_t counter, uint32_t text, uint32_t n_prompt, uint32_t max_tokens)
{
    leg_make(&leg, PREFILL, counter, text, n_prompt);
    leg.sampling.max_tokens = max_tokens;
    leg.sampling.top_logprobs = 2;
    leg.m.peer_incarnation = p->decode->w->incarnation;
    router_sends_leg(p->to_prefill, &leg);
}

static void send_decode(const struct pair *p, uint64_t counter, uint32_t text, uint32_t n_prompt, uint32_t max_tokens)
{
    leg_make(&leg, DECODE, counter, text, n_prompt);
    leg.sampling.max_tokens = max_tokens;
    leg.m.peer_xfer_address = rpc_data(p->prefill->w->xfer_address);
    leg.m.peer_incarnation = p->prefill->w->incarnation;
    router_sends_leg(p->to_decode, &leg);
}

static bool is_over(const struct pair *p, uint64_t counter)
{
    return end_of(p->to_prefill, counter) && end_of(p->to_decode, counter);
}

static void pair_close(const struct pair *p)
{
    check_quiet(p->prefill);
    check_quiet(p->decode);
    world_close();
}

/* The tokens of one worker that does everything. */
static struct tokens aggregated(struct node_worker *n, uint64_t counter, uint32_t text, uint32_t n_prompt,
                                uint32_t max_tokens)
{
    leg_make(&leg, AGGREGATED, counter, text, n_prompt);
    leg.sampling.max_tokens = max_tokens;
    router_sends_leg(&n->routers[0], &leg);
    turns_until(end_of(&n->routers[0], counter));
    return tokens_of(&n->routers[0], counter);
}

/* ---------------------------------------------------------------- it arrives */

static void check_split(const char *engine, bool decode_comes_first, uint32_t n_prompt)
{
    world_engine = engine;
    struct pair p = pair_open(NULL);
    if (decode_comes_first)
        send_decode(&p, 1, 0, n_prompt, 6);
    for (int i = 0; i < 5; i++)
        turn_all();
    ck_assert_uint_eq(count_of(p.to_decode, ACCEPTED), decode_comes_first);
    send_prefill(&p, 1, 0, n_prompt, 6);
    if (!decode_comes_first)
        send_decode(&p, 1, 0, n_prompt, 6);
    turns_until(is_over(&p, 1));
    check_end(p.to_prefill, 1, TD_OK, "");
    check_end(p.to_decode, 1, TD_OK, "");
    ck_assert(is_text(end_of(p.to_prefill, 1)->finish_reason, ""));
    ck_assert(is_text(end_of(p.to_decode, 1)->finish_reason, "length"));
    /* Each says the first token once; the decode worker says that it has pages once, before any token. */
    struct tokens first = tokens_of(p.to_prefill, 1), all = tokens_of(p.to_decode, 1);
    ck_assert_uint_eq(first.n, 1);
    ck_assert_uint_eq(all.n, 6);
    ck_assert_uint_eq(first.ids[0], all.ids[0]);
    ck_assert_uint_eq(count_of(p.to_decode, ACCEPTED), 1);
    ck_assert_uint_eq(count_of(p.to_prefill, ACCEPTED), 0);
    ck_assert_uint_gt(end_of(p.to_prefill, 1)->times->prefill, 0);
    ck_assert_uint_eq(end_of(p.to_prefill, 1)->times->transfer, 0);
    ck_assert_uint_gt(end_of(p.to_decode, 1)->times->transfer, 0);
    ck_assert_uint_eq(end_of(p.to_decode, 1)->times->prefill, 0);
    ck_assert_uint_eq(xfer_stats(p.decode->w->xfer).pages_in, (n_prompt + 15) / 16);
    check_quiet(p.prefill);
    /* The likeliest tokens of the first token travel with it. */
    const Tandem__Worker__V1__Token *t = first.last;
    ck_assert_uint_eq(t->n_top_ids, 2);
    ck_assert_uint_eq(t->top_ids[0], t->token);
    world_close_worker(p.prefill); /* a fresh worker: nothing is cached there */
    struct node_worker *one = world_worker("prefill", NULL);
    struct tokens want = aggregated(one, 2, 0, n_prompt, 6);
    check_same_tokens(&want, &all);
    check_quiet(p.decode);
    world_close();
}

START_TEST(test_handover_gives_the_tokens_of_one_worker)
{
    check_split("sim", _i & 1, _i < 2 ? 40 : 64); /* the last page is partly filled, or full */
}
END_TEST

START_TEST(test_handover_of_real_compute_gives_the_tokens_of_one_worker)
{
    check_split("cpu", false, 40);
}
END_TEST

START_TEST(test_handover_pulls_only_pages_that_the_decode_worker_lacks)
{
    struct pair p = pair_open(NULL);
    for (uint64_t i = 1; i <= 2; i++) {
        send_prefill(&p, i, 0, 40, 6);
        send_decode(&p, i, 0, 40, 6);
        turns_until(is_over(&p, i));
    }
    struct tokens once = tokens_of(p.to_decode, 1), again = tokens_of(p.to_decode, 2);
    check_same_tokens(&once, &again);
    ck_assert_uint_eq(end_of(p.to_prefill, 2)->cached_worker, 32);
    ck_assert_uint_eq(xfer_stats(p.decode->w->xfer).pages_in, 3 + 1); /* two of three were here */
    ck_assert_double_eq(metrics_get(p.decode->w->counters, WORKER_DECODE_CACHED_TOKENS), 32);
    pair_close(&p);
}
END_TEST

START_TEST(test_handover_of_many_requests_at_once_mixes_nothing_up)
{
    struct pair p = pair_open(NULL);
    for (uint64_t i = 1; i <= 6; i++) {
        if (i % 2)
            send_decode(&p, i, (uint32_t)i, 30 + 7 * (uint32_t)i, 8);
        send_prefill(&p, i, (uint32_t)i, 30 + 7 * (uint32_t)i, 8);
        if (i % 2 == 0)
            send_decode(&p, i, (uint32_t)i, 30 + 7 * (uint32_t)i, 8);
    }
    for (uint64_t i = 1; i <= 6; i++)
        turns_until(is_over(&p, i));
    struct node_worker *one = world_worker("decode", NULL);
    for (uint64_t i = 1; i <= 6; i++) {
        struct tokens want = aggregated(one, 10 + i, (uint32_t)i, 30 + 7 * (uint32_t)i, 8);
        struct tokens got = tokens_of(p.to_decode, i);
        check_same_tokens(&want, &got);
    }
    pair_close(&p);
}
END_TEST

/* ------------------------------------------------------------- it is ended */

START_TEST(test_handover_is_called_off_when_the_first_token_ends_the_answer)
{
    struct pair p = pair_open(NULL);
    send_prefill(&p, 1, 0, 40, 1);
    send_decode(&p, 1, 0, 40, 1);
    turns_until(is_over(&p, 1));
    check_end(p.to_prefill, 1, TD_OK, "");
    ck_assert(is_text(end_of(p.to_prefill, 1)->finish_reason, "length"));
    ck_assert_uint_eq(tokens_of(p.to_prefill, 1).n, 1);
    check_end(p.to_decode, 1, TD_ERR_CANCELLED, "the prefill worker cancelled the handover of its KV");
    ck_assert_uint_eq(tokens_of(p.to_decode, 1).n, 0);
    pair_close(&p);
}
END_TEST

START_TEST(test_handover_ends_with_the_prefill_leg_that_is_cancelled)
{
    struct pair p = pair_open(NULL);
    send_decode(&p, 1, 0, 100, 6);
    send_prefill(&p, 1, 0, 100, 6);
    worker_turn(p.decode->w, 1);
    worker_turn(p.prefill->w, 1);
    worker_turn(p.prefill->w, 1); /* two of seven chunks, announced */
    router_cancels(p.to_prefill, WORLD_ROUTER, 1);
    turns_until(is_over(&p, 1));
    check_end(p.to_prefill, 1, TD_ERR_CANCELLED, "cancelled");
    check_end(p.to_decode, 1, TD_ERR_CANCELLED, "the prefill worker cancelled the handover of its KV");
    pair_close(&p);
}
END_TEST

START_TEST(test_handover_decode_leg_can_be_cancelled_while_its_pages_arrive)
{
    struct pair p = pair_open(NULL);
    send_decode(&p, 1, 0, 100, 6);
    send_prefill(&p, 1, 0, 100, 6);
    worker_turn(p.decode->w, 1);
    worker_turn(p.prefill->w, 1);
    ck_assert_int_eq(engine_seq_state(LIST_FIRST(&p.decode->w->legs)->seq), SEQ_FILLING);
    router_cancels(p.to_decode, WORLD_ROUTER, 1);
    worker_turn(p.decode->w, 1);
    check_end(p.to_decode, 1, TD_ERR_CANCELLED, "cancelled");
    turns_until(end_of(p.to_prefill, 1));
    check_end(p.to_prefill, 1, TD_OK, ""); /* what becomes of its request is the router's affair */
    router_cancels(p.to_prefill, WORLD_ROUTER, 1);
    ck_assert_uint_eq(tokens_of(p.to_decode, 1).n, 0);
    pair_close(&p);
}
END_TEST

START_TEST(test_handover_that_waits_for_a_reader_is_ended_by_a_cancel)
{
    struct pair p = pair_open(NULL);
    send_prefill(&p, 1, 0, 40, 6);
    turns_until(end_of(p.to_prefill, 1));
    for (int i = 0; i < 5; i++)
        turn_all();
    ck_assert_uint_eq(audit_of(p.prefill)->leases, 1);
    ck_assert_uint_eq(audit_of(p.prefill)->leased, 3);
    router_cancels(p.to_prefill, WORLD_ROUTER, 1);
    check_quiet(p.prefill);
    ck_assert_uint_eq(count_of(p.to_prefill, END), 1);
    send_decode(&p, 1, 0, 40, 6); /* comes too late */
    turns_until(end_of(p.to_decode, 1));
    ck_assert_int_ne(end_of(p.to_decode, 1)->status, TD_OK);
    pair_close(&p);
}
END_TEST

START_TEST(test_handover_lease_without_a_reader_is_over_after_its_time)
{
    const char *const brief[] = {"--lease-ms", "100", NULL};
    struct pair p = pair_open(brief);
    uint64_t began = world_wall_ns();
    send_prefill(&p, 1, 0, 40, 6);
    turns_until(end_of(p.to_prefill, 1));
    ck_assert_uint_eq(audit_of(p.prefill)->leases, 1);
    check_quiet(p.prefill);
    ck_assert_uint_ge(world_wall_ns() - began, 100 * NS_PER_MS);
    pair_close(&p);
}
END_TEST

START_TEST(test_handover_ends_when_its_router_leaves)
{
    struct pair p = pair_open(NULL);
    send_decode(&p, 1, 0, 100, 6);
    send_prefill(&p, 1, 0, 100, 6);
    worker_turn(p.decode->w, 1);
    worker_turn(p.prefill->w, 1);
    router_leaves(p.to_prefill);
    router_leaves(p.to_decode);
    turns_until(LIST_EMPTY(&p.prefill->w->legs) && LIST_EMPTY(&p.decode->w->legs));
    p.prefill->n_routers = p.decode->n_routers = 0;
    world_attach(p.prefill, 9);
    world_attach(p.decode, 9);
    pair_close(&p);
}
END_TEST

START_TEST(test_handover_that_never_comes_ends_at_the_deadline)
{
    struct pair p = pair_open(NULL);
    leg_make(&leg, DECODE, 1, 0, 40);
    leg.m.peer_xfer_address = rpc_data(p.prefill->w->xfer_address);
    leg.m.peer_incarnation = p.prefill->w->incarnation;
    leg.m.remaining_ms = 60;
    router_sends_leg(p.to_decode, &leg);
    turns_until(end_of(p.to_decode, 1));
    ck_assert_int_eq(end_of(p.to_decode, 1)->status, TD_ERR_DEADLINE);
    pair_close(&p);
}
END_TEST

START_TEST(test_handover_from_another_process_at_that_address_is_a_lost_peer)
{
    struct pair p = pair_open(NULL);
    leg_make(&leg, DECODE, 1, 0, 40);
    leg.m.peer_xfer_address = rpc_data(p.prefill->w->xfer_address);
    leg.m.peer_incarnation = p.prefill->w->incarnation + 1; /* it was started anew */
    router_sends_leg(p.to_decode, &leg);
    turns_until(end_of(p.to_decode, 1));
    check_end(p.to_decode, 1, TD_ERR_PEER_LOST, "KV did not arrive from the prefill worker");
    pair_close(&p);
}
END_TEST

START_TEST(test_handover_from_a_worker_that_closes_is_a_lost_peer)
{
    struct pair p = pair_open(NULL);
    send_decode(&p, 1, 0, 100, 6);
    send_prefill(&p, 1, 0, 100, 6);
    worker_turn(p.decode->w, 1);
    worker_turn(p.prefill->w, 1);
    world_close_worker(p.prefill);
    turns_until(end_of(p.to_decode, 1));
    ck_assert(end_of(p.to_decode, 1)->status == TD_ERR_PEER_LOST || end_of(p.to_decode, 1)->status == TD_ERR_CANCELLED);
    check_quiet(p.decode);
    world_close();
}
END_TEST

/* ------------------------------------------------------ a bare xfer instead */

/* A decode leg whose prefill worker is `node`, until it has asked for its KV. */
static struct node_worker *open_with_node(struct node **node_out)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct node *node = *node_out = node_open(&(struct node_params){
        .backend = "loopback", .hub = world_hub, .name = "node", .n_pages = 64, .layout = LAYOUT});
    leg_make(&leg, DECODE, 1, 0, 40);
    leg.m.peer_xfer_address = rpc_data(node->address);
    leg.m.peer_incarnation = node->incarnation;
    router_sends_leg(&n->routers[0], &leg);
    turns_until(count_of(&n->routers[0], ACCEPTED));
    return n;
}

static void hand_over(struct node *node, uint32_t n_pages, const void *tail, uint32_t len)
{
    node_grant(node, 1, 10 * NS_PER_S);
    node_announce(node, 1, 0, 0, n_pages, 0, 2);
    xfer_lease_finish(node->x, node_id(1), n_pages, tail, len);
}

enum { N_WRONG = 6 };

START_TEST(test_handover_of_something_else_ends_the_leg_and_leaves_nothing)
{
    uint8_t tail[FIRST_TOKEN_MAX_BYTES + 8];
    struct node *node;
    struct node_worker *n = open_with_node(&node);
    const struct sampled fine = {.id = 255}, outside = {.id = 256};
    memset(tail, 0, sizeof(tail));
    switch (_i) {
    case 0: /* fewer pages than the prompt has */
        hand_over(node, 2, tail, first_token_encode(&fine, tail));
        break;
    case 1: /* no tail */
        hand_over(node, 3, NULL, 0);
        break;
    case 2: /* a tail that is too short, and one that ends within an entry */
        hand_over(node, 3, tail, FIRST_TOKEN_BYTES - 1);
        break;
    case 3:
        hand_over(node, 3, tail, FIRST_TOKEN_BYTES + 4);
        break;
    case 4:
        hand_over(node, 3, tail, FIRST_TOKEN_MAX_BYTES + 8);
        break;
    default: /* a token that is not in the vocabulary */
        hand_over(node, 3, tail, first_token_encode(&outside, tail));
    }
    turns_until(end_of(&n->routers[0], 1));
    check_end(&n->routers[0], 1, TD_ERR_PROTOCOL, "prefill worker handed over something else than this prompt");
    ck_assert_uint_eq(tokens_of(&n->routers[0], 1).n, 0);
    check_quiet(n);
    node_check_quiet(node);
    node_close(node);
    world_close();
}
END_TEST

START_TEST(test_handover_of_more_pages_than_the_prompt_has_is_refused)
{
    uint8_t tail[FIRST_TOKEN_MAX_BYTES];
    struct node *node;
    struct node_worker *n = open_with_node(&node);
    hand_over(node, 4, tail, first_token_encode(&(struct sampled){.id = 1}, tail));
    turns_until(end_of(&n->routers[0], 1));
    ck_assert_int_lt(end_of(&n->routers[0], 1)->status, 0);
    check_quiet(n);
    node_close(node);
    world_close();
}
END_TEST

START_TEST(test_handover_token_and_its_likeliest_go_to_the_router_once)
{
    uint8_t tail[FIRST_TOKEN_MAX_BYTES];
    struct node *node;
    struct node_worker *n = open_with_node(&node);
    const struct sampled first = {
        .id = 9, .logprob = -0.5f, .n_top = 2, .top_ids = {9, 3}, .top_logprobs = {-0.5f, -2}};
    hand_over(node, 3, tail, first_token_encode(&first, tail));
    turns_until(tokens_of(&n->routers[0], 1).n);
    const Tandem__Worker__V1__Token *t = tokens_of(&n->routers[0], 1).first;
    ck_assert_uint_eq(t->token, 9);
    ck_assert_uint_eq(t->position, 0);
    ck_assert(t->logprob == -0.5f);
    ck_assert_uint_eq(t->n_top_ids, 2);
    ck_assert_uint_eq(t->top_ids[1], 3);
    ck_assert(t->top_logprobs[1] == -2);
    turns_until(end_of(&n->routers[0], 1));
    check_end(&n->routers[0], 1, TD_OK, "");
    ck_assert_uint_eq(tokens_of(&n->routers[0], 1).n, 4);
    /* Sampled elsewhere, so not counted here. */
    ck_assert_double_eq(metrics_get(n->w->counters, WORKER_TOKENS), 3);
    check_quiet(n);
    node_check_quiet(node);
    node_close(node);
    world_close();
}
END_TEST

/* Whether the end of a pull is in the worker's mailbox. */
static bool has_pull_end(struct worker *w)
{
    bool has = false;
    pthread_mutex_lock(&w->mailbox.lock);
    for (const struct mail *m = w->mailbox.head; m; m = m->next)
        has |= ((const struct worker_work *)m)->kind == WORK_PULL_END;
    pthread_mutex_unlock(&w->mailbox.lock);
    return has;
}

START_TEST(test_handover_token_of_a_leg_that_is_cancelled_before_it_was_sent_is_dropped)
{
    uint8_t tail[FIRST_TOKEN_MAX_BYTES];
    struct node *node;
    struct node_worker *n = open_with_node(&node);
    hand_over(node, 3, tail, first_token_encode(&(struct sampled){.id = 9}, tail));
    uint64_t limit = world_wall_ns() + 20 * NS_PER_S;
    while (!has_pull_end(n->w))
        ck_assert(world_wall_ns() < limit);
    router_cancels(&n->routers[0], WORLD_ROUTER, 1); /* handled in the same turn */
    worker_turn(n->w, 1);
    check_end(&n->routers[0], 1, TD_ERR_CANCELLED, "cancelled");
    ck_assert_uint_eq(tokens_of(&n->routers[0], 1).n, 0);
    ck_assert_uint_eq(n->w->n_out, 0);
    check_quiet(n);
    node_close(node);
    world_close();
}
END_TEST

START_TEST(test_handover_first_token_that_is_a_stop_id_ends_the_decode_leg_with_it)
{
    uint8_t tail[FIRST_TOKEN_MAX_BYTES];
    uint32_t stop = 9;
    struct node_worker *n = world_worker("decode", NULL);
    struct node *node = node_open(&(struct node_params){
        .backend = "loopback", .hub = world_hub, .name = "node", .n_pages = 64, .layout = LAYOUT});
    leg_make(&leg, DECODE, 1, 0, 40);
    leg.sampling.n_stop_ids = 1;
    leg.sampling.stop_ids = &stop;
    leg.m.peer_xfer_address = rpc_data(node->address);
    leg.m.peer_incarnation = node->incarnation;
    router_sends_leg(&n->routers[0], &leg);
    hand_over(node, 3, tail, first_token_encode(&(struct sampled){.id = 9}, tail));
    turns_until(end_of(&n->routers[0], 1));
    check_end(&n->routers[0], 1, TD_OK, "");
    ck_assert(is_text(end_of(&n->routers[0], 1)->finish_reason, "stop"));
    ck_assert_uint_eq(tokens_of(&n->routers[0], 1).n, 1);
    check_quiet(n);
    node_close(node);
    world_close();
}
END_TEST

START_TEST(test_handover_tail_has_the_token_that_the_router_was_told)
{
    struct node_worker *n = world_worker("prefill", NULL);
    struct node *node = node_open(&(struct node_params){
        .backend = "loopback", .hub = world_hub, .name = "node", .n_pages = 64, .layout = LAYOUT});
    leg_make(&leg, PREFILL, 1, 0, 40);
    leg.sampling.top_logprobs = 3;
    leg.m.peer_incarnation = node->incarnation;
    router_sends_leg(&n->routers[0], &leg);
    node_pull(node, 1, n->w->xfer_address, n->w->incarnation, 10 * NS_PER_S);
    turns_until(end_of(&n->routers[0], 1));
    NODE_WAIT(node, node->pulls[1].ends);
    ck_assert_int_eq(node->pulls[1].status, TD_OK);
    ck_assert_uint_eq(node->pulls[1].n_pages, 3);
    struct sampled s;
    ck_assert_int_eq(first_token_decode(node->pulls[1].tail, node->pulls[1].tail_len, &s), TD_OK);
    const Tandem__Worker__V1__Token *t = tokens_of(&n->routers[0], 1).last;
    ck_assert_uint_eq(s.id, t->token);
    ck_assert(s.logprob == t->logprob);
    ck_assert_uint_eq(s.n_top, 3);
    ck_assert_mem_eq(s.top_ids, t->top_ids, 3 * sizeof(uint32_t));
    check_quiet(n);
    node_close(node);
    world_close();
}
END_TEST

START_TEST(test_handover_is_not_given_to_another_reader)
{
    struct node_worker *n = world_worker("prefill", NULL);
    struct node *node = node_open(&(struct node_params){
        .backend = "loopback", .hub = world_hub, .name = "node", .n_pages = 64, .layout = LAYOUT});
    leg_make(&leg, PREFILL, 1, 0, 40);
    leg.m.peer_incarnation = node->incarnation + 1;
    router_sends_leg(&n->routers[0], &leg);
    node_pull(node, 1, n->w->xfer_address, n->w->incarnation, 10 * NS_PER_S);
    turns_until(end_of(&n->routers[0], 1));
    NODE_WAIT(node, node->pulls[1].ends);
    ck_assert_int_ne(node->pulls[1].status, TD_OK);
    ck_assert_uint_eq(audit_of(n)->leases, 1); /* still there for its own reader */
    router_cancels(&n->routers[0], WORLD_ROUTER, 1);
    check_quiet(n);
    node_close(node);
    world_close();
}
END_TEST

START_TEST(test_handover_prefill_leg_without_a_decode_leg_leases_nothing)
{
    struct node_worker *n = world_worker("prefill", NULL);
    leg_make(&leg, PREFILL, 1, 0, 40);
    router_sends_leg(&n->routers[0], &leg);
    turns_until(end_of(&n->routers[0], 1));
    check_end(&n->routers[0], 1, TD_OK, "");
    ck_assert_uint_eq(tokens_of(&n->routers[0], 1).n, 1);
    ck_assert_uint_eq(n->w->n_wire, 0);
    check_quiet(n);
    world_close();
}
END_TEST

/* The lease outlives its leg until the reader releases it. A second leg of that id would announce its pages
 * in the first one's lease. */
START_TEST(test_handover_id_stays_in_use_until_its_lease_has_ended)
{
    struct pair p = pair_open(NULL);
    const Tandem__Worker__V1__LegEnd *first = NULL;
    send_prefill(&p, 1, 0, 40, 4);
    turns_until(end_of(p.to_prefill, 1));
    send_prefill(&p, 1, 1, 40, 4);
    turns_until(ends_of(p.to_prefill, 1, NULL) == 2);
    const Tandem__Worker__V1__LegEnd *second = last_of(p.to_prefill, END)->end;
    ck_assert_int_eq(second->status, TD_ERR_INVALID);
    ck_assert(is_text(second->text, "leg.id: in use"));
    ends_of(p.to_prefill, 1, &first);
    ck_assert_int_eq(first->status, TD_OK);
    send_decode(&p, 1, 0, 40, 4); /* what was handed over first is there */
    turns_until(end_of(p.to_decode, 1));
    check_end(p.to_decode, 1, TD_OK, "");
    ck_assert_uint_eq(tokens_of(p.to_decode, 1).n, 4);
    pair_close(&p);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("handover");
    TCase *t = tcase_create("handover");
    tcase_set_timeout(t, 30);
    tcase_add_loop_test(t, test_handover_gives_the_tokens_of_one_worker, 0, 4);
    tcase_add_test(t, test_handover_of_real_compute_gives_the_tokens_of_one_worker);
    tcase_add_test(t, test_handover_pulls_only_pages_that_the_decode_worker_lacks);
    tcase_add_test(t, test_handover_of_many_requests_at_once_mixes_nothing_up);
    tcase_add_test(t, test_handover_is_called_off_when_the_first_token_ends_the_answer);
    tcase_add_test(t, test_handover_ends_with_the_prefill_leg_that_is_cancelled);
    tcase_add_test(t, test_handover_decode_leg_can_be_cancelled_while_its_pages_arrive);
    tcase_add_test(t, test_handover_that_waits_for_a_reader_is_ended_by_a_cancel);
    tcase_add_test(t, test_handover_lease_without_a_reader_is_over_after_its_time);
    tcase_add_test(t, test_handover_ends_when_its_router_leaves);
    tcase_add_test(t, test_handover_that_never_comes_ends_at_the_deadline);
    tcase_add_test(t, test_handover_from_another_process_at_that_address_is_a_lost_peer);
    tcase_add_test(t, test_handover_from_a_worker_that_closes_is_a_lost_peer);
    tcase_add_loop_test(t, test_handover_of_something_else_ends_the_leg_and_leaves_nothing, 0, N_WRONG);
    tcase_add_test(t, test_handover_of_more_pages_than_the_prompt_has_is_refused);
    tcase_add_test(t, test_handover_token_and_its_likeliest_go_to_the_router_once);
    tcase_add_test(t, test_handover_token_of_a_leg_that_is_cancelled_before_it_was_sent_is_dropped);
    tcase_add_test(t, test_handover_first_token_that_is_a_stop_id_ends_the_decode_leg_with_it);
    tcase_add_test(t, test_handover_tail_has_the_token_that_the_router_was_told);
    tcase_add_test(t, test_handover_is_not_given_to_another_reader);
    tcase_add_test(t, test_handover_prefill_leg_without_a_decode_leg_leases_nothing);
    tcase_add_test(t, test_handover_id_stays_in_use_until_its_lease_has_ended);
    suite_add_tcase(s, t);
    return tap_main(s);
}
