/*
 * A worker beside its legs: pins, what it tells routers about each other, and blocks that come from or go to
 * stores and other workers.
 */
#include "tests/worker/world.h"

#include "tests/transfer/node.h"

enum {
    PINS = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_PINS,
    BACKLOG = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_BACKLOG,
};

static struct leg_message leg;

/* --------------------------------------------------------------------- pins */

/* Keys of a leg's full blocks, one after another. */
static ProtobufCBinaryData keys_of(uint32_t text, uint32_t n_prompt, uint8_t out[512])
{
    struct block_key keys[32], root;
    uint32_t n_keys = n_prompt / WORLD_PAGE_TOKENS;
    leg_make(&leg, AGGREGATED, 1, text, n_prompt);
    memcpy(root.b, leg.root, sizeof(root.b));
    for (uint32_t i = 0; i < n_keys; i++)
        keys[i] = block_key_next(i ? &keys[i - 1] : &root, leg.ids + i * WORLD_PAGE_TOKENS, WORLD_PAGE_TOKENS);
    memcpy(out, keys, n_keys * sizeof(*keys));
    return (ProtobufCBinaryData){n_keys * sizeof(*keys), out};
}

static void say_keep(struct router_end *r, ProtobufCBinaryData keys, uint32_t ttl_ms)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Keep keep = TANDEM__WORKER__V1__KEEP__INIT;
    keep.keys = keys;
    keep.ttl_ms = ttl_ms;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_KEEP;
    m.keep = &keep;
    router_says(r, &m);
}

static void say_forget(struct router_end *r, ProtobufCBinaryData keys)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Forget forget = TANDEM__WORKER__V1__FORGET__INIT;
    forget.keys = keys;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_FORGET;
    m.forget = &forget;
    router_says(r, &m);
}

static void compute(struct node_worker *n, uint64_t counter, uint32_t text, uint32_t n_prompt)
{
    leg_make(&leg, AGGREGATED, counter, text, n_prompt);
    leg.sampling.max_tokens = 1;
    router_sends_leg(&n->routers[0], &leg);
    turns_until(end_of(&n->routers[0], counter));
}

START_TEST(test_worker_keeps_pinned_blocks_and_forgets_those_that_it_is_told)
{
    const char *const few[] = {"--pages", "8", "--max-context", "128", NULL};
    struct node_worker *n = world_worker("decode", few);
    struct router_end *r = &n->routers[0];
    uint8_t keys[512];
    compute(n, 1, 0, 48);
    say_keep(r, keys_of(0, 48, keys), 60000);
    for (uint64_t i = 2; i < 8; i++) /* more than the rest of the pool */
        compute(n, i, (uint32_t)i, 70);
    compute(n, 20, 0, 48);
    ck_assert_uint_eq(end_of(r, 20)->cached_worker, 32); /* the last token is always computed */
    say_forget(r, keys_of(0, 48, keys));
    compute(n, 21, 0, 48);
    ck_assert_uint_eq(end_of(r, 21)->cached_worker, 0);
    say_forget(r, (ProtobufCBinaryData){0, NULL}); /* everything */
    turn_all();
    ck_assert_uint_eq(audit_of(n)->blocks, 0);
    check_quiet(n);
    world_close();
}
END_TEST

START_TEST(test_worker_tells_pins_to_the_other_routers_and_to_those_that_come)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *a = &n->routers[0], *b = world_attach(n, 8);
    uint8_t keys[512];
    ProtobufCBinaryData data = keys_of(0, 48, keys);
    turn_all();
    say_keep(a, data, 60000);
    turn_all();
    ck_assert_uint_eq(count_of(a, PINS), 0);
    ck_assert_uint_eq(count_of(b, PINS), 1);
    const Tandem__Worker__V1__Pins *pins = last_of(b, PINS)->pins;
    ck_assert(!pins->held && pins->n_keeps == 1 && pins->keeps[0]->ttl_ms == 60000);
    ck_assert_uint_eq(pins->keeps[0]->keys.len, data.len);
    say_keep(a, data, 60000); /* no news */
    struct router_end *c = world_attach(n, 9);
    turn_all();
    ck_assert_uint_eq(count_of(b, PINS), 1);
    pins = last_of(c, PINS)->pins;
    ck_assert(pins->held && pins->n_keeps == 1 && pins->keeps[0]->ttl_ms > 50000 && pins->keeps[0]->ttl_ms <= 60000);
    say_keep(b, data, 0); /* the end of it */
    turn_all();
    ck_assert_uint_eq(last_of(a, PINS)->pins->keeps[0]->ttl_ms, 0);
    ck_assert_uint_eq(last_of(c, PINS)->pins->keeps[0]->ttl_ms, 0);
    ck_assert_uint_eq(count_of(b, PINS), 1);
    say_keep(a, data, 1);
    turn_all();
    uint64_t until = world_wall_ns() + 2 * NS_PER_MS;
    while (world_wall_ns() < until) /* its end is not noticed yet */
        ;
    struct router_end *d = world_attach(n, 10);
    turn_all();
    ck_assert_uint_eq(count_of(d, PINS), 0); /* it is over */
    world_close();
}
END_TEST

/* ------------------------------------------------------------ other routers */

static void say_demand(struct router_end *r, double queued_ms)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Demand demand = TANDEM__WORKER__V1__DEMAND__INIT;
    demand.queued_ms = queued_ms;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_DEMAND;
    m.demand = &demand;
    router_says(r, &m);
}

START_TEST(test_worker_tells_each_router_what_the_others_have_here)
{
    world_decode_us = "1000,0,0";
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *a = &n->routers[0], *b = world_attach(n, 8);
    leg_make(&leg, AGGREGATED, 1, 0, 40);
    leg.sampling.max_tokens = 400;
    leg.m.tpot_ms = 30;
    leg.m.queued_ms = 12; /* what is left in the queue of a */
    router_sends_leg(a, &leg);
    leg_make(&leg, AGGREGATED, 2, 1, 20);
    leg.id.incarnation = 8;
    leg.sampling.max_tokens = 400;
    leg.m.tpot_ms = 20;
    router_sends_leg(b, &leg);
    say_demand(b, 7);
    turns_until(tokens_of(b, 2).n > 1 && tokens_of(a, 1).n > 1);
    turns_until(last_of(a, BACKLOG) && last_of(a, BACKLOG)->backlog->generated > 0);
    const Tandem__Worker__V1__Backlog *of_a = last_of(a, BACKLOG)->backlog, *of_b = last_of(b, BACKLOG)->backlog;
    ck_assert_uint_eq(of_a->attached, 2);
    ck_assert_uint_eq(of_a->routers, 1);
    ck_assert_uint_eq(of_a->running, 1);
    ck_assert_uint_eq(of_a->own_prompts + of_a->prompts, 0);
    ck_assert_double_eq(of_a->tpot_ms, 20);
    ck_assert_double_eq(of_a->context, 20 + of_a->generated);
    ck_assert_double_eq(of_a->queued_ms, 7);
    ck_assert_double_eq(of_b->tpot_ms, 30);
    ck_assert_double_eq(of_b->queued_ms, 12);
    say_demand(b, NAN); /* what can't be work counts as none */
    router_cancels(a, WORLD_ROUTER, 1);
    turns_until(last_of(b, BACKLOG)->backlog->running == 0 && last_of(a, BACKLOG)->backlog->queued_ms == 0);
    router_leaves(b);
    n->n_routers--;
    turns_until(last_of(a, BACKLOG)->backlog->attached == 1);
    ck_assert_uint_eq(last_of(a, BACKLOG)->backlog->routers, 0);
    world_close();
}
END_TEST

START_TEST(test_worker_says_which_peers_it_can_not_connect_to)
{
    const char *const brief[] = {"--silence-ms", "500", NULL};
    struct node_worker *n = world_worker("decode", brief), *other = world_worker("prefill", NULL);
    char there[XFER_ADDRESS_BYTES], missing[WANTS_MAX][XFER_ADDRESS_BYTES];
    static char too_long[200];
    memset(too_long, 'x', sizeof(too_long));
    snprintf(there, sizeof(there), "%s", other->w->xfer_address);
    ProtobufCBinaryData list[] = {rpc_data(there), rpc_data("nobody"), {200, (uint8_t *)too_long}, rpc_data("")};
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Peers peers = TANDEM__WORKER__V1__PEERS__INIT;
    peers.n_xfer_addresses = 4;
    peers.xfer_addresses = list;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_PEERS;
    m.peers = &peers;
    router_says(&n->routers[0], &m);
    turn_all();
    ck_assert_uint_eq(n->w->wants.lists[0].n, 2); /* without those that are no address */
    turns_until(xfer_unreached(n->w->xfer, missing, WANTS_MAX) == 1);
    ck_assert_str_eq(missing[0], "nobody");
    ck_assert_uint_eq(xfer_stats(n->w->xfer).peers_up, 1);
    router_leaves(&n->routers[0]); /* nobody wants them any more */
    n->n_routers = 0;
    turns_until(n->w->wants.n == 0 && xfer_unreached(n->w->xfer, missing, WANTS_MAX) == 0);
    world_close();
}
END_TEST

/* ------------------------------------------------- blocks that are elsewhere */

static struct node *open_node(void)
{
    return node_open(&(struct node_params){
        .backend = "loopback", .hub = world_hub, .name = "node", .n_pages = 64, .layout = {NUM_F32, 2, 2, 16, 16}});
}

/* The last message that the node got, of this kind; waits for it. */
static void wait_message(struct node *node, uint16_t kind)
{
    uint64_t until = world_wall_ns() + 20 * NS_PER_S;
    bool has = false;
    while (!has && world_wall_ns() < until) {
        turn_all();
        pthread_mutex_lock(&node->lock);
        has = node->message_kind == kind;
        pthread_mutex_unlock(&node->lock);
    }
    ck_assert(has);
}

/* The leg names one source of its first n blocks: a store, or another worker. */
static void name_source(const char *address, bool is_store, uint32_t n)
{
    static Tandem__Worker__V1__Store store, *stores[] = {&store};
    static Tandem__Worker__V1__StoreRun run, *runs[] = {&run};
    static ProtobufCBinaryData holders[1];
    tandem__worker__v1__store__init(&store);
    tandem__worker__v1__store_run__init(&run);
    store.xfer_address = holders[0] = rpc_data(address);
    run.n_blocks = n;
    leg.m.n_stores = is_store;
    leg.m.stores = stores;
    leg.m.n_holders = !is_store;
    leg.m.holders = holders;
    leg.m.n_store_runs = 1;
    leg.m.store_runs = runs;
}

START_TEST(test_worker_loads_a_prefix_from_another_worker_and_computes_the_rest)
{
    struct node_worker *a = world_worker("prefill", NULL), *b = world_worker("prefill", NULL);
    compute(a, 1, 0, 70);
    leg_make(&leg, AGGREGATED, 2, 0, 70);
    router_sends_leg(&a->routers[0], &leg);
    turns_until(end_of(&a->routers[0], 2));
    struct tokens want = tokens_of(&a->routers[0], 2);
    leg_make(&leg, AGGREGATED, 3, 0, 70);
    name_source(a->w->xfer_address, false, 3); /* it has four */
    router_sends_leg(&b->routers[0], &leg);
    turns_until(end_of(&b->routers[0], 3));
    check_end(&b->routers[0], 3, TD_OK, "");
    ck_assert_uint_eq(end_of(&b->routers[0], 3)->cached_peer, 48);
    ck_assert_uint_eq(end_of(&b->routers[0], 3)->cached_worker, 0);
    struct tokens got = tokens_of(&b->routers[0], 3);
    check_same_tokens(&want, &got);
    ck_assert_double_eq(metrics_get(a->w->counters, WORKER_LENT_TOKENS), 48);
    ck_assert_double_eq(metrics_get(b->w->counters, WORKER_PEER_TOKENS), 48);
    check_quiet(a);
    check_quiet(b);
    world_close();
}
END_TEST

START_TEST(test_worker_computes_what_a_source_does_not_give)
{
    struct node_worker *a = world_worker("prefill", NULL), *b = world_worker("prefill", NULL);
    compute(a, 1, 0, 40); /* two blocks */
    leg_make(&leg, AGGREGATED, 2, 0, 70);
    name_source(a->w->xfer_address, false, 4);
    router_sends_leg(&b->routers[0], &leg);
    turns_until(end_of(&b->routers[0], 2));
    ck_assert_uint_eq(end_of(&b->routers[0], 2)->cached_peer, 32);
    leg_make(&leg, AGGREGATED, 3, 5, 70);
    name_source(a->w->xfer_address, false, 4); /* nothing of it */
    router_sends_leg(&b->routers[0], &leg);
    turns_until(end_of(&b->routers[0], 3));
    check_end(&b->routers[0], 3, TD_OK, "");
    ck_assert_uint_eq(end_of(&b->routers[0], 3)->cached_peer, 0);
    ck_assert_uint_eq(tokens_of(&b->routers[0], 3).n, 4);
    leg_make(&leg, AGGREGATED, 4, 0, 70);
    name_source(a->w->xfer_address, false, 2); /* all of it is here already: not even asked */
    router_sends_leg(&b->routers[0], &leg);
    turns_until(end_of(&b->routers[0], 4));
    ck_assert_uint_eq(end_of(&b->routers[0], 4)->cached_worker, 64);
    check_quiet(a);
    check_quiet(b);
    world_close();
}
END_TEST

START_TEST(test_worker_withdraws_its_question_when_the_leg_is_cancelled)
{
    struct node_worker *n = world_worker("prefill", NULL);
    struct node *node = open_node();
    leg_make(&leg, AGGREGATED, 1, 0, 70);
    name_source(node->address, true, 4);
    router_sends_leg(&n->routers[0], &leg);
    wait_message(node, STORE_LOOKUP);
    ck_assert_uint_eq(audit_of(n)->pulls, 1);
    router_cancels(&n->routers[0], WORLD_ROUTER, 1);
    turn_all();
    check_end(&n->routers[0], 1, TD_ERR_CANCELLED, "cancelled");
    check_quiet(n);
    node_close(node);
    world_close();
}
END_TEST

START_TEST(test_worker_withdraws_its_question_when_a_leg_that_waits_is_cancelled)
{
    const char *const few[] = {"--pages", "4", "--max-context", "64", NULL};
    struct node_worker *n = world_worker("prefill", few);
    struct node *node = open_node();
    struct store_keys_msg m;
    const char *address = node->address;
    xfer_want(n->w->xfer, &address, 1); /* they are connected */
    turns_until(xfer_stats(n->w->xfer).peers_up == 1);
    leg_make(&leg, AGGREGATED, 1, 0, 50);
    router_sends_leg(&n->routers[0], &leg);
    leg_make(&leg, AGGREGATED, 2, 1, 50);
    name_source(node->address, true, 3);
    router_sends_leg(&n->routers[0], &leg);
    worker_turn(n->w, 0);
    router_cancels(&n->routers[0], WORLD_ROUTER, 2);
    worker_turn(n->w, 0);
    check_end(&n->routers[0], 2, TD_ERR_CANCELLED, "cancelled");
    wait_message(node, STORE_LOOKUP);
    ck_assert_int_eq(store_keys_decode(node->message.data, node->message.len, &m), TD_OK);
    const struct xfer_lease_params p = {.id = {m.id_incarnation, m.id_counter},
                                        .reader_incarnation = n->w->incarnation, /* as stores do */
                                        .reader_is_up = true,
                                        .duration_ns = 1000 * NS_PER_S,
                                        .on_end = node_on_lease_end,
                                        .user = node};
    xfer_lease_grant(node->x, &p);
    NODE_WAIT(node, node->leases[m.id_counter % NODE_IDS].ends);
    turns_until(end_of(&n->routers[0], 1));
    check_quiet(n);
    node_close(node);
    world_close();
}
END_TEST

START_TEST(test_worker_counts_what_a_store_had_in_dram_and_on_ssd)
{
    struct node_worker *n = world_worker("prefill", NULL);
    struct node *node = open_node();
    struct store_keys_msg m;
    uint8_t tail[STORE_FOUND_BYTES];
    leg_make(&leg, AGGREGATED, 1, 0, 70);
    name_source(node->address, true, 4);
    router_sends_leg(&n->routers[0], &leg);
    wait_message(node, STORE_LOOKUP);
    ck_assert_int_eq(store_keys_decode(node->message.data, node->message.len, &m), TD_OK);
    ck_assert_uint_eq(m.n_keys, 4);
    const struct xfer_id id = {m.id_incarnation, m.id_counter};
    const struct xfer_lease_params p = {.id = id, .duration_ns = NS_PER_S, .on_end = node_on_lease_end, .user = node};
    struct xfer_page pages[3];
    for (uint32_t i = 0; i < 3; i++)
        pages[i] = (struct xfer_page){node->arena + i * node->page_bytes, 1};
    xfer_lease_grant(node->x, &p);
    xfer_lease_announce(node->x, id, 0, pages, 3, 0, 2);
    store_found_encode(&(struct store_found){.n_dram = 2, .n_ssd = 1}, tail);
    xfer_lease_finish(node->x, id, 3, tail, sizeof(tail));
    turns_until(end_of(&n->routers[0], 1));
    ck_assert_uint_eq(end_of(&n->routers[0], 1)->cached_dram, 32);
    ck_assert_uint_eq(end_of(&n->routers[0], 1)->cached_ssd, 16);
    ck_assert_double_eq(metrics_get(n->w->counters, WORKER_STORE_TOKENS), 48);
    store_expire(n->w, 0, true); /* the offer of the fourth block */
    check_quiet(n);
    node_close(node);
    world_close();
}
END_TEST

/* A want of positions [0, n) with this id; returns how many pages came. */
static uint32_t want(struct node_worker *w, struct node *node, struct xfer_id id, const uint16_t *at, uint16_t n)
{
    struct bytes b = {0};
    store_want_encode(id.incarnation, id.counter, at, n, &b);
    xfer_send(node->x, w->w->xfer_address, STORE_WANT, b.data, (uint32_t)b.len);
    bytes_free(&b);
    turns_until(LIST_EMPTY(&w->w->offers));
    return w->w->n_wire;
}

/* Computes a prompt whose two blocks are offered to the node. */
static struct xfer_id make_offer(struct node_worker *n, struct node *node, uint64_t counter)
{
    struct store_keys_msg m;
    leg_make(&leg, AGGREGATED, counter, (uint32_t)counter, 40);
    name_source(node->address, true, 0);
    leg.m.tenant = 6;
    leg.sampling.max_tokens = 1;
    router_sends_leg(&n->routers[0], &leg);
    turns_until(end_of(&n->routers[0], counter));
    wait_message(node, STORE_OFFER);
    ck_assert_int_eq(store_keys_decode(node->message.data, node->message.len, &m), TD_OK);
    ck_assert_uint_eq(m.n_keys, 2);
    ck_assert_uint_eq(m.tenant, 6);
    ck_assert(m.address_len == strlen(n->w->xfer_address) && !memcmp(m.address, n->w->xfer_address, m.address_len));
    node->message_kind = 0;
    return (struct xfer_id){m.id_incarnation, m.id_counter};
}

START_TEST(test_worker_leases_a_store_the_blocks_that_it_wants)
{
    struct node_worker *n = world_worker("prefill", NULL);
    struct node *node = open_node();
    struct xfer_id id = make_offer(n, node, 1);
    ck_assert_uint_eq(kvpool_audit(engine_pool(n->w->engine)).leased, 2); /* held while the store thinks */
    ck_assert_uint_eq(want(n, node, id, (const uint16_t[]){1}, 1), 1);
    ck_assert_uint_eq(kvpool_audit(engine_pool(n->w->engine)).leased, 1);
    const struct xfer_pull_params p = {.id = id,
                                       .address = n->w->xfer_address,
                                       .deadline_ns = clock_now(&node->clock) + 10 * NS_PER_S,
                                       .place = node_place,
                                       .on_end = node_on_pull_end,
                                       .user = node};
    xfer_pull_start(node->x, &p);
    NODE_WAIT(node, node->pulls[id.counter % NODE_IDS].ends);
    ck_assert_int_eq(node->pulls[id.counter % NODE_IDS].status, TD_OK);
    ck_assert_uint_eq(node->pulls[id.counter % NODE_IDS].n_pages, 1);
    check_quiet(n);
    node_close(node);
    world_close();
}
END_TEST

START_TEST(test_worker_leases_nothing_for_a_want_of_nothing_or_beyond_the_offer)
{
    struct node_worker *n = world_worker("prefill", NULL);
    struct node *node = open_node();
    ck_assert_uint_eq(want(n, node, make_offer(n, node, 1), (const uint16_t[]){0}, 0), 0);
    ck_assert_uint_eq(want(n, node, make_offer(n, node, 2), (const uint16_t[]){0, 2}, 2), 0);
    check_quiet(n);
    node_close(node);
    world_close();
}
END_TEST

START_TEST(test_worker_ignores_messages_of_peers_that_it_can_not_read)
{
    struct node_worker *n = world_worker("prefill", NULL);
    struct node *node = open_node();
    struct xfer_id id = make_offer(n, node, 1);
    struct bytes b = {0};
    world_hush(n);
    xfer_send(node->x, n->w->xfer_address, STORE_WANT, "abc", 3);
    xfer_send(node->x, n->w->xfer_address, STORE_LOOKUP, "abc", 3);
    xfer_send(node->x, n->w->xfer_address, 99, "abc", 3);
    store_want_encode(id.incarnation, id.counter + 1, NULL, 0, &b); /* no such offer */
    xfer_send(node->x, n->w->xfer_address, STORE_WANT, b.data, (uint32_t)b.len);
    bytes_free(&b);
    ck_assert_uint_eq(want(n, node, id, (const uint16_t[]){0}, 0), 0); /* comes after all these messages */
    check_quiet(n);
    node_close(node);
    world_close();
}
END_TEST

START_TEST(test_worker_answers_a_question_for_blocks_once_and_with_what_it_has)
{
    struct node_worker *n = world_worker("prefill", NULL);
    struct node *node = open_node();
    struct store_found found;
    struct bytes b = {0};
    uint8_t keys[512];
    compute(n, 1, 0, 40);
    const struct store_keys_msg m = {.id_incarnation = WORLD_ROUTER,
                                     .id_counter = 5,
                                     .n_keys = 3,
                                     .keys = keys_of(0, 48, keys).data}; /* two are there */
    store_keys_encode(&m, &b);
    world_hush(n);
    xfer_send(node->x, n->w->xfer_address, STORE_LOOKUP, b.data, (uint32_t)b.len);
    xfer_send(node->x, n->w->xfer_address, STORE_LOOKUP, b.data, (uint32_t)b.len); /* the id is in use */
    bytes_free(&b);
    turns_until(n->w->n_wire == 1);
    node_pull(node, 5, n->w->xfer_address, n->w->incarnation, 10 * NS_PER_S);
    NODE_WAIT(node, node->pulls[5].ends);
    ck_assert_int_eq(node->pulls[5].status, TD_OK);
    ck_assert_uint_eq(node->pulls[5].n_pages, 2);
    ck_assert_int_eq(store_found_decode(node->pulls[5].tail, node->pulls[5].tail_len, &found), TD_OK);
    ck_assert_uint_eq(found.n_dram, 2);
    check_quiet(n);
    node_close(node);
    world_close();
}
END_TEST

/* A peer may ask with any id, also with one that this worker gave to an offer. */
START_TEST(test_worker_leases_no_offer_whose_id_a_question_has_taken)
{
    struct node_worker *n = world_worker("prefill", NULL);
    struct node *node = open_node();
    struct bytes b = {0};
    uint8_t keys[512];
    struct xfer_id id = make_offer(n, node, 1);
    const struct store_keys_msg m = {.id_incarnation = id.incarnation,
                                     .id_counter = id.counter,
                                     .n_keys = 1,
                                     .keys = keys_of(7, 16, keys).data}; /* it is not there */
    store_keys_encode(&m, &b);
    xfer_send(node->x, n->w->xfer_address, STORE_LOOKUP, b.data, (uint32_t)b.len);
    bytes_free(&b);
    turns_until(n->w->n_wire == 1);
    ck_assert_uint_eq(want(n, node, id, (const uint16_t[]){1}, 1), 1);
    ck_assert_uint_eq(kvpool_audit(engine_pool(n->w->engine)).leased, 0);
    router_cancels(&n->routers[0], id.incarnation, id.counter);
    check_quiet(n);
    node_close(node);
    world_close();
}
END_TEST

/* ------------------------------------------------------------------ options */

static void check_not_opened(const char *const *more, const char *text)
{
    struct td_error e = {{0}};
    enum td_status s = world_try("prefill", more, &e);
    ck_assert_int_eq(s, TD_ERR_INVALID);
    ck_assert_msg(strstr(e.text, text) != NULL, "'%s' instead of '%s'", e.text, text);
}

START_TEST(test_worker_names_the_option_that_keeps_it_from_opening)
{
    check_not_opened((const char *const[]){"--max-rows", "8", NULL}, "--max-rows 8 is less than --max-batch 64");
    check_not_opened((const char *const[]){"--tensor-parallel", "2", NULL}, "simulated compute has one rank");
    check_not_opened((const char *const[]){"--lora", "a=/tmp", NULL}, "--lora: simulated compute has no adapters");
    check_not_opened((const char *const[]){"--listen", "0.0.0.0:0", NULL}, "--advertise");
    check_not_opened((const char *const[]){"--faults", "step:nonsense", NULL}, "nonsense");
    world_decode_us = "1,2";
    check_not_opened(NULL, "--sim-decode 1,2: expected A,B,C");
    world_close();
}
END_TEST

START_TEST(test_worker_loses_a_leg_when_a_fault_says_so)
{
    const char *const faulty[] = {"--faults", "leg:drop@1-1", NULL};
    struct node_worker *n = world_worker("prefill", faulty);
    for (uint64_t i = 1; i <= 2; i++) {
        leg_make(&leg, AGGREGATED, i, 0, 40);
        router_sends_leg(&n->routers[0], &leg);
    }
    turns_until(end_of(&n->routers[0], 2));
    ck_assert(!end_of(&n->routers[0], 1));
    check_quiet(n);
    world_close();
}
END_TEST

int main(void)
{
    Suite *s = suite_create("worker");
    TCase *t = tcase_create("worker");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_worker_keeps_pinned_blocks_and_forgets_those_that_it_is_told);
    tcase_add_test(t, test_worker_tells_pins_to_the_other_routers_and_to_those_that_come);
    tcase_add_test(t, test_worker_tells_each_router_what_the_others_have_here);
    tcase_add_test(t, test_worker_says_which_peers_it_can_not_connect_to);
    tcase_add_test(t, test_worker_loads_a_prefix_from_another_worker_and_computes_the_rest);
    tcase_add_test(t, test_worker_computes_what_a_source_does_not_give);
    tcase_add_test(t, test_worker_withdraws_its_question_when_the_leg_is_cancelled);
    tcase_add_test(t, test_worker_withdraws_its_question_when_a_leg_that_waits_is_cancelled);
    tcase_add_test(t, test_worker_counts_what_a_store_had_in_dram_and_on_ssd);
    tcase_add_test(t, test_worker_leases_a_store_the_blocks_that_it_wants);
    tcase_add_test(t, test_worker_leases_nothing_for_a_want_of_nothing_or_beyond_the_offer);
    tcase_add_test(t, test_worker_ignores_messages_of_peers_that_it_can_not_read);
    tcase_add_test(t, test_worker_answers_a_question_for_blocks_once_and_with_what_it_has);
    tcase_add_test(t, test_worker_leases_no_offer_whose_id_a_question_has_taken);
    tcase_add_test(t, test_worker_names_the_option_that_keeps_it_from_opening);
    tcase_add_test(t, test_worker_loses_a_leg_when_a_fault_says_so);
    suite_add_tcase(s, t);
    return tap_main(s);
}
