/* Pins and flushes (router/prefix.c): what clients ask, and what workers, stores and other routers tell. */
#include "door.h"

#define PIN       "/tandem.v1.Tandem/Pin"
#define FLUSH     "/tandem.v1.Tandem/Flush"
#define FLUSH_ALL "/tandem.admin.v1.Admin/Flush"

enum {
    KEEP = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_KEEP,
    FORGET = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_FORGET,
    MINUTE_MS = 60000,
};

static const char FOX[] =
    "Tell me a story about a fox and a lantern. Tell me a story about a fox, a lantern and a dog, "
    "and about the rain on the roof, the warm bread and the end of the story that ends well.";
static const char DOG[] = "There was a dog once, and it liked the rain, the roof and the warm bread as much as a fox, "
                          "and it had no lantern. Tell me how the story of the dog ends, and if it ends well at all.";

static void setup(void)
{
    world_open("pds");
}

static Tandem__V1__GenerateRequest prompt(const char *text)
{
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT;
    m.text = rpc_data(text);
    return m;
}

static struct rpc_call *ask_pin(const char *text, uint32_t ttl_ms)
{
    Tandem__V1__GenerateRequest g = prompt(text);
    Tandem__V1__PinRequest m = TANDEM__V1__PIN_REQUEST__INIT;
    m.prefix = &g;
    m.ttl_ms = ttl_ms;
    return door_ask(PIN, &m.base);
}

/* Pins for so long; 0: ends the pin. Returns how many workers and stores were told. */
static uint32_t pin(const char *text, uint32_t ttl_ms)
{
    struct rpc_call *call = ask_pin(text, ttl_ms);
    uint32_t n = ((const Tandem__V1__PinResponse *)door_answer(call))->told;
    door_close(call);
    return n;
}

static uint32_t flush(const char *text, uint32_t *away_out)
{
    Tandem__V1__GenerateRequest g = prompt(text);
    Tandem__V1__FlushRequest m = TANDEM__V1__FLUSH_REQUEST__INIT;
    m.prefix = &g;
    struct rpc_call *call = door_ask(FLUSH, &m.base);
    const Tandem__V1__FlushResponse *a = door_answer(call);
    uint32_t n = a->told;
    if (away_out)
        *away_out = a->away;
    door_close(call);
    return n;
}

/* The last Keep that p got. */
static const Tandem__Worker__V1__Keep *last_keep(const struct peer *p)
{
    const Tandem__Worker__V1__RouterMessage *m = NULL;
    ck_assert_uint_gt(told(p, KEEP, &m), 0);
    return m->keep;
}

/* p reports one pin. */
static void says_pin(struct peer *p, ProtobufCBinaryData keys, uint32_t ttl_ms, bool held)
{
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__Pins pins = TANDEM__WORKER__V1__PINS__INIT;
    Tandem__Worker__V1__Keep keep = TANDEM__WORKER__V1__KEEP__INIT, *list[] = {&keep};
    keep.keys = keys;
    keep.ttl_ms = ttl_ms;
    pins.n_keeps = 1;
    pins.keeps = list;
    pins.held = held;
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_PINS;
    m.pins = &pins;
    worker_says(p, &m);
}

static const uint8_t OTHER_KEYS[2 * BLOCK_KEY_BYTES] = "the blocks of another router...";
static const ProtobufCBinaryData OTHER = {sizeof(OTHER_KEYS), (uint8_t *)(uintptr_t)OTHER_KEYS};

static uint32_t n_pinned(void)
{
    return router->pinned.n_blocks;
}

/* -------------------------------------------------------------------- asked */

START_TEST(test_prefix_pin_goes_to_every_worker_and_store)
{
    struct token_ids ids = ids_of(FOX);
    uint32_t n_blocks = (uint32_t)ids.n / WORLD_PAGE_TOKENS;
    struct rpc_call *call = ask_pin(FOX, MINUTE_MS);
    const Tandem__V1__PinResponse *a = door_answer(call);
    ck_assert_uint_ge(n_blocks, 2);
    ck_assert_uint_eq(a->prefix_tokens, n_blocks * WORLD_PAGE_TOKENS);
    ck_assert_uint_eq(a->cached_tokens, 0);
    ck_assert_uint_eq(a->told, 3);
    for (uint32_t i = 0; i < 3; i++) {
        ck_assert_uint_eq(last_keep(router->peers[i])->keys.len, (size_t)n_blocks * BLOCK_KEY_BYTES);
        ck_assert_uint_eq(last_keep(router->peers[i])->ttl_ms, MINUTE_MS);
    }
    ck_assert_uint_eq(n_pinned(), n_blocks);
    door_close(call);
    token_ids_free(&ids);
}
END_TEST

START_TEST(test_prefix_pin_is_told_to_a_worker_that_comes_back_until_it_ends)
{
    struct peer *p = router->peers[1];
    pin(FOX, MINUTE_MS);
    world_lose(p);
    ck_assert_uint_eq(pin(DOG, MINUTE_MS), 2);
    clock_advance(&router->clock, 20 * NS_PER_S);
    world_connect(p, 101);
    ck_assert_uint_eq(told(p, KEEP, NULL), 2);
    ck_assert_uint_eq(last_keep(p)->ttl_ms, MINUTE_MS - 20000);
    world_lose(p);
    clock_advance(&router->clock, 41 * NS_PER_S);
    world_connect(p, 101);
    ck_assert_uint_eq(told(p, KEEP, NULL), 0);
    prefix_tick(router, clock_now(&router->clock));
    ck_assert_uint_eq(n_pinned(), 0);
}
END_TEST

START_TEST(test_prefix_pin_ends_when_asked_and_other_pins_are_said_again)
{
    struct peer *p = router->peers[1];
    pin(FOX, MINUTE_MS);
    pin(DOG, MINUTE_MS);
    uint32_t before = told(p, KEEP, NULL);
    ck_assert_uint_eq(pin(FOX, 0), 3);
    /* The end, then the other one, which may share blocks. */
    ck_assert_uint_eq(told(p, KEEP, NULL), before + 2);
    ck_assert_uint_eq(last_keep(p)->ttl_ms, MINUTE_MS);
    pin(DOG, 0);
    ck_assert_uint_eq(n_pinned(), 0);
    ck_assert_uint_eq(last_keep(p)->ttl_ms, 0);
}
END_TEST

START_TEST(test_prefix_flush_ends_the_pin_and_counts_those_that_are_away)
{
    const Tandem__Worker__V1__RouterMessage *m = NULL;
    uint32_t away;
    pin(FOX, MINUTE_MS);
    pin(DOG, MINUTE_MS);
    uint32_t keeps = told(router->peers[0], KEEP, NULL);
    world_lose(router->peers[1]);
    ck_assert_uint_eq(flush(FOX, &away), 2);
    ck_assert_uint_eq(away, 1);
    ck_assert_uint_eq(told(router->peers[0], FORGET, &m), 1);
    ck_assert_uint_gt(m->forget->keys.len, 0);
    ck_assert_uint_eq(told(router->peers[0], KEEP, NULL), keeps + 1); /* the pin of the other prompt */
    router->peers[1]->drained = true;                                 /* it left in order, and its pool with it */
    flush(FOX, &away);
    ck_assert_uint_eq(away, 0);
    world_lose(router->peers[2]);
    router->peers[2]->drained = true; /* a store's disk outlives it */
    flush(FOX, &away);
    ck_assert_uint_eq(away, 1);
}
END_TEST

START_TEST(test_prefix_flush_of_everything_ends_all_pins)
{
    Tandem__Admin__V1__FlushRequest m = TANDEM__ADMIN__V1__FLUSH_REQUEST__INIT;
    const Tandem__Worker__V1__RouterMessage *last = NULL;
    pin(FOX, MINUTE_MS);
    pin(DOG, MINUTE_MS);
    struct rpc_call *call = door_ask(FLUSH_ALL, &m.base);
    ck_assert_uint_eq(((const Tandem__Admin__V1__FlushResponse *)door_answer(call))->told, 3);
    door_close(call);
    ck_assert_uint_eq(n_pinned(), 0);
    ck_assert_uint_eq(told(router->peers[2], FORGET, &last), 1);
    ck_assert_uint_eq(last->forget->keys.len, 0);
    uint8_t keys[1024];
    ProtobufCBinaryData pinned = last_keep(router->peers[1])->keys;
    memcpy(keys, pinned.data, pinned.len);
    world_lose(router->peers[1]); /* it comes back with a pin that was ended meanwhile */
    world_connect(router->peers[1], 101);
    says_pin(router->peers[1], (ProtobufCBinaryData){pinned.len, keys}, MINUTE_MS, true);
    ck_assert_uint_eq(last_keep(router->peers[1])->ttl_ms, 0);
    ck_assert_uint_eq(n_pinned(), 0);
}
END_TEST

START_TEST(test_prefix_names_the_field_that_is_wrong)
{
    Tandem__V1__GenerateRequest g = prompt(FOX);
    Tandem__V1__PinRequest m = TANDEM__V1__PIN_REQUEST__INIT;
    Tandem__V1__FlushRequest f = TANDEM__V1__FLUSH_REQUEST__INIT;
    door_refuses(PIN, &m.base, RPC_INVALID_ARGUMENT, "prefix: missing");
    door_refuses(FLUSH, &f.base, RPC_INVALID_ARGUMENT, "prefix: missing");
    m.prefix = f.prefix = &g;
    m.ttl_ms = MAX_PIN_MS + 1;
    door_refuses(PIN, &m.base, RPC_INVALID_ARGUMENT, "ttl_ms: 86400001 is more than a day, 86400000");
    m.ttl_ms = 1;
    g.bypass_cache = true;
    door_refuses(PIN, &m.base, RPC_INVALID_ARGUMENT, "prefix.bypass_cache: then nothing is cached");
    g.bypass_cache = false;
    g.model = rpc_data("another");
    door_refuses(FLUSH, &f.base, RPC_NOT_FOUND, "model");
    ck_assert_uint_eq(told(router->peers[0], KEEP, NULL) + told(router->peers[0], FORGET, NULL), 0);
}
END_TEST

START_TEST(test_prefix_shorter_than_a_block_pins_nothing)
{
    ck_assert_uint_eq(pin("Hi", MINUTE_MS), 0);
    ck_assert_uint_eq(flush("Hi", NULL), 0);
    ck_assert_uint_eq(told(router->peers[0], KEEP, NULL) + told(router->peers[0], FORGET, NULL), 0);
}
END_TEST

START_TEST(test_prefix_pins_no_more_blocks_than_the_operator_allows)
{
    world_close();
    struct token_ids ids;
    char limit[24];
    const char *const more[] = {"--pin-blocks", limit, NULL};
    world_open("pd");
    ids = ids_of(FOX);
    world_close();
    snprintf(limit, sizeof(limit), "%zu", ids.n / WORLD_PAGE_TOKENS);
    world_open_with("pd", more);
    pin(FOX, MINUTE_MS);
    struct rpc_call *call = ask_pin(DOG, MINUTE_MS);
    ck_assert_int_eq(call->code, RPC_RESOURCE_EXHAUSTED);
    ck_assert(strstr(call->text, "--pin-blocks") != NULL);
    door_close(call);
    world_hush();
    says_pin(router->peers[0], OTHER, MINUTE_MS, true); /* there is no room for those of others, either */
    ck_assert_uint_eq(n_pinned(), ids.n / WORLD_PAGE_TOKENS);
    pin(FOX, 0);
    pin(DOG, MINUTE_MS);
    token_ids_free(&ids);
}
END_TEST

START_TEST(test_prefix_can_not_be_named_before_a_worker_came)
{
    world_close();
    world_open("");
    struct rpc_call *call = ask_pin(FOX, MINUTE_MS);
    ck_assert_int_eq(call->code, RPC_UNAVAILABLE);
    ck_assert_str_eq(call->text, "no worker is up yet");
    ck_assert_uint_eq(call->retry_after_ms, 1000);
    door_close(call);
    Tandem__V1__GenerateRequest g = prompt(FOX);
    Tandem__V1__FlushRequest f = TANDEM__V1__FLUSH_REQUEST__INIT;
    f.prefix = &g;
    door_refuses(FLUSH, &f.base, RPC_UNAVAILABLE, "no worker is up yet");
}
END_TEST

/* --------------------------------------------------------------------- told */

START_TEST(test_prefix_pin_of_another_router_goes_to_the_peers_that_did_not_say_it)
{
    says_pin(router->peers[0], OTHER, MINUTE_MS, false);
    ck_assert_uint_eq(told(router->peers[0], KEEP, NULL), 0);
    ck_assert_uint_eq(told(router->peers[1], KEEP, NULL), 1);
    ck_assert_uint_eq(told(router->peers[2], KEEP, NULL), 1);
    says_pin(router->peers[1], OTHER, MINUTE_MS, false); /* no news: it does not go round for ever */
    ck_assert_uint_eq(told(router->peers[0], KEEP, NULL), 0);
    ck_assert_uint_eq(told(router->peers[2], KEEP, NULL), 1);
    ck_assert_uint_eq(n_pinned(), 2);
    says_pin(router->peers[1], OTHER, 0, false); /* its end: the other router tells all of its peers */
    ck_assert_uint_eq(n_pinned(), 0);
    ck_assert_uint_eq(told(router->peers[0], KEEP, NULL), 0);
}
END_TEST

START_TEST(test_prefix_pin_that_was_ended_is_not_taken_up_again_from_a_peer_that_was_away)
{
    struct peer *p = router->peers[1];
    uint8_t keys[1024];
    pin(FOX, MINUTE_MS);
    ProtobufCBinaryData fox = last_keep(p)->keys;
    memcpy(keys, fox.data, fox.len);
    fox.data = keys;
    world_lose(p);
    pin(FOX, 0);
    world_connect(p, 101);
    says_pin(p, fox, MINUTE_MS, true);
    ck_assert_uint_eq(n_pinned(), 0);
    ck_assert_uint_eq(last_keep(p)->ttl_ms, 0); /* it is told the end */
    says_pin(p, fox, 2 * MINUTE_MS, true);      /* a longer pin is another one */
    ck_assert_uint_eq(n_pinned(), fox.len / BLOCK_KEY_BYTES);
    pin(FOX, 0);
    says_pin(p, fox, MINUTE_MS, false); /* a client of another router wants it now */
    ck_assert_uint_eq(n_pinned(), fox.len / BLOCK_KEY_BYTES);
    uint32_t before = told(router->peers[0], KEEP, NULL);
    says_pin(router->peers[0], fox, MINUTE_MS, true); /* so a peer that has it still is told no end */
    ck_assert_uint_eq(told(router->peers[0], KEEP, NULL), before);
    pin(FOX, 0);
    pin(FOX, MINUTE_MS); /* and so does one of ours: what was ended is forgotten */
    says_pin(p, fox, MINUTE_MS, true);
    ck_assert_uint_eq(last_keep(p)->ttl_ms, MINUTE_MS);
}
END_TEST

START_TEST(test_prefix_ignores_a_pin_that_can_not_be_read)
{
    world_hush();
    says_pin(router->peers[0], (ProtobufCBinaryData){0, NULL}, MINUTE_MS, true);
    says_pin(router->peers[0], (ProtobufCBinaryData){17, OTHER.data}, MINUTE_MS, true);
    ck_assert_uint_eq(n_pinned(), 0);
    ck_assert_int_eq(router->peers[0]->state, PEER_READY);
    says_pin(router->peers[0], OTHER, UINT32_MAX, true); /* for more than a day: a day */
    ck_assert_uint_eq(last_keep(router->peers[1])->ttl_ms, MAX_PIN_MS);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("router_prefix");
    TCase *t = tcase_create("router_prefix");
    tcase_add_checked_fixture(t, setup, world_close);
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_prefix_pin_goes_to_every_worker_and_store);
    tcase_add_test(t, test_prefix_pin_is_told_to_a_worker_that_comes_back_until_it_ends);
    tcase_add_test(t, test_prefix_pin_ends_when_asked_and_other_pins_are_said_again);
    tcase_add_test(t, test_prefix_flush_ends_the_pin_and_counts_those_that_are_away);
    tcase_add_test(t, test_prefix_flush_of_everything_ends_all_pins);
    tcase_add_test(t, test_prefix_names_the_field_that_is_wrong);
    tcase_add_test(t, test_prefix_shorter_than_a_block_pins_nothing);
    tcase_add_test(t, test_prefix_pins_no_more_blocks_than_the_operator_allows);
    tcase_add_test(t, test_prefix_can_not_be_named_before_a_worker_came);
    tcase_add_test(t, test_prefix_pin_of_another_router_goes_to_the_peers_that_did_not_say_it);
    tcase_add_test(t, test_prefix_pin_that_was_ended_is_not_taken_up_again_from_a_peer_that_was_away);
    tcase_add_test(t, test_prefix_ignores_a_pin_that_can_not_be_read);
    suite_add_tcase(s, t);
    return tap_main(s);
}
