/*
 * Between requests and the scheduler (router/place.c): names of blocks, who has them, and what the scheduler
 * is told.
 */
#include "world.h"

enum { N_BLOCKS = 4, N_IDS = N_BLOCKS * WORLD_PAGE_TOKENS + 3 };

static uint32_t ids[N_IDS];

static void open_with(const char *roles, const char *plan)
{
    const char *const more[] = {"--plan", plan, "--prefix", "load", NULL};
    for (uint32_t i = 0; i < N_IDS; i++)
        ids[i] = 200 + i;
    world_open_with(roles, more);
}

static void setup(void)
{
    open_with("pdss", "split");
}

static void setup_two(void)
{
    open_with("ppd", "split");
}

/* Fills m with a prompt of all ids; prompt must live as long as m. */
static void set_prompt(Tandem__V1__GenerateRequest *m, Tandem__V1__TokenPrompt *prompt)
{
    tandem__v1__generate_request__init(m);
    tandem__v1__token_prompt__init(prompt);
    prompt->n_ids = N_IDS;
    prompt->ids = ids;
    m->prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TOKENS;
    m->tokens = prompt;
}

static void leave(struct client *c)
{
    ck_assert(is_alive(c));
    request_gone(c->q);
    ck_assert_uint_eq(c->call->n_refs, 1);
    rpc_call_unref(c->call);
}

static void expect_failed(struct client *c, enum rpc_code code, const char *text)
{
    ck_assert(!is_alive(c));
    ck_assert_str_eq(c->call->text, text);
    ck_assert_int_eq(c->call->code, code);
    ck_assert_uint_eq(c->call->n_refs, 1);
    rpc_call_unref(c->call);
}

/* --------------------------------------------------------------------- names */

/* Name of the prompt's first block for this tenant, salt and adapter. */
static struct block_key name_for(const char *tenant, size_t tenant_len, const char *salt, const char *lora, bool bypass)
{
    struct params p = {.ids = ids, .n_ids = N_IDS, .bypass_cache = bypass};
    struct block_key root, *keys, first;
    uint32_t n;
    bytes_append(&p.tenant, tenant, tenant_len);
    bytes_append(&p.salt, salt, strlen(salt));
    bytes_append(&p.lora, lora, strlen(lora));
    keys = place_keys(router, &p, &n, &root);
    ck_assert_uint_eq(n, N_BLOCKS);
    first = keys[0];
    free(keys);
    bytes_free(&p.tenant);
    bytes_free(&p.salt);
    bytes_free(&p.lora);
    return first;
}

static struct block_key name_of(const char *tenant, const char *salt, const char *lora)
{
    return name_for(tenant, strlen(tenant), salt, lora, false);
}

static void expect_same(struct block_key a, struct block_key b)
{
    ck_assert(block_key_equal(&a, &b));
}

static void expect_other(struct block_key a, struct block_key b)
{
    ck_assert(!block_key_equal(&a, &b));
}

START_TEST(test_equal_prompts_have_equal_names)
{
    expect_same(name_of("", "", ""), name_of("", "", ""));
    expect_same(name_of("a", "s", ""), name_of("a", "s", ""));
    expect_same(name_of("", "", ""), name_of("default", "", ""));
}
END_TEST

START_TEST(test_names_differ_by_tenant_and_salt)
{
    struct block_key plain = name_of("", "", "");
    expect_other(plain, name_of("a", "", ""));
    expect_other(plain, name_of("", "s", ""));
    expect_other(name_of("a", "", ""), name_of("b", "", ""));
    expect_other(name_of("ab", "c", ""), name_of("a", "bc", "")); /* a salt can't continue a tenant */
    expect_other(name_for("a\0b", 3, "", "", false), name_of("a", "", ""));
    expect_other(name_for("a\0b", 3, "", "", false), name_for("a\0c", 3, "", "", false));
}
END_TEST

START_TEST(test_names_differ_by_model_adapter_codec_and_secret)
{
    struct block_key plain = name_of("", "", ""), named;
    router->n_adapters = 2;
    strcpy(router->adapters[0].name, "cook");
    strcpy(router->adapters[1].name, "poet");
    router->adapters[0].fingerprint.b[0] = 1;
    router->adapters[1].fingerprint.b[0] = 2;
    named = name_of("", "", "cook");
    expect_other(plain, named);
    expect_other(named, name_of("", "", "poet"));
    router->adapters[0].fingerprint.b[0] = 3; /* other weights under the same name */
    expect_other(named, name_of("", "", "cook"));
    strcpy(router->kv_codec, "int8");
    expect_other(plain, name_of("", "", ""));
    *router->kv_codec = 0;
    router->fingerprint.b[0]++;
    expect_other(plain, name_of("", "", ""));
    router->fingerprint.b[0]--;
    expect_same(plain, name_of("", "", ""));
    char *before = router->secret_text, word[] = "word", another[] = "another word";
    router->secret_text = word;
    named = name_of("", "", "");
    expect_other(plain, named);
    router->options.cache_key = "key";
    expect_other(named, name_of("", "", ""));
    router->secret_text = another; /* with a cache key the secret does not count */
    named = name_of("", "", "");
    router->secret_text = before;
    expect_same(named, name_of("", "", ""));
}
END_TEST

START_TEST(test_a_prompt_that_bypasses_the_cache_has_a_name_of_its_own)
{
    struct block_key once = name_for("", 0, "", "", true);
    expect_other(once, name_for("", 0, "", "", true));
    expect_other(once, name_of("", "", ""));
}
END_TEST

START_TEST(test_a_block_is_named_by_all_tokens_up_to_its_end)
{
    struct params p = {.ids = ids, .n_ids = N_IDS};
    struct block_key root, *keys, *others;
    uint32_t n;
    keys = place_keys(router, &p, &n, &root);
    ids[2 * WORLD_PAGE_TOKENS]++;
    others = place_keys(router, &p, &n, &root);
    for (uint32_t i = 0; i < N_BLOCKS; i++)
        ck_assert_int_eq(block_key_equal(&keys[i], &others[i]), i < 2);
    free(others);
    p.n_ids = 2 * WORLD_PAGE_TOKENS - 1;
    others = place_keys(router, &p, &n, &root);
    ck_assert_uint_eq(n, 1);
    expect_same(keys[0], others[0]);
    free(others);
    free(keys);
}
END_TEST

/* ------------------------------------------------------------------ matching */

/* p says that it has these blocks of the plain prompt. */
static void has_blocks(struct peer *p, uint32_t first, uint32_t n, enum block_tier tier)
{
    struct params params = {.ids = ids, .n_ids = N_IDS};
    struct block_event events[N_BLOCKS];
    struct block_key root, *keys;
    uint32_t n_keys;
    keys = place_keys(router, &params, &n_keys, &root);
    for (uint32_t i = 0; i < n; i++)
        events[i] = (struct block_event){BLOCK_ADDED, tier, first + i, keys[first + i]};
    index_apply(router->index, p->holder, events, n);
    free(keys);
}

static struct client ask_prompt(void (*change)(Tandem__V1__GenerateRequest *m))
{
    Tandem__V1__GenerateRequest m;
    Tandem__V1__TokenPrompt prompt;
    set_prompt(&m, &prompt);
    if (change)
        change(&m);
    return ask(&m);
}

static void bypass(Tandem__V1__GenerateRequest *m)
{
    m->bypass_cache = true;
}

static void want_scores(Tandem__V1__GenerateRequest *m)
{
    m->want_prompt_logprobs = true;
}

START_TEST(test_the_scheduler_is_told_what_each_worker_and_the_stores_have)
{
    struct peer *prefill = router->peers[0], *decode = router->peers[1];
    has_blocks(prefill, 0, 2, TIER_WORKER);
    has_blocks(decode, 0, 3, TIER_WORKER);
    has_blocks(router->peers[2], 0, 1, TIER_DRAM);
    has_blocks(router->peers[3], 0, 4, TIER_SSD);
    struct client c = ask_prompt(NULL);
    const struct sched_request *s = &c.q->sched;
    ck_assert_uint_eq(s->matched_blocks[0], 2);
    ck_assert_uint_eq(s->matched_blocks[1], 3);
    ck_assert_uint_eq(s->peer_blocks, 3); /* a decode worker lends, too */
    ck_assert_uint_eq(s->store_blocks, 4);
    ck_assert_uint_eq(s->store_blocks_ssd, 3);
    ck_assert_uint_eq(place_cached(router, c.q->keys, c.q->n_keys), 4);
    leave(&c);
}
END_TEST

START_TEST(test_who_is_away_or_drains_has_nothing)
{
    has_blocks(router->peers[2], 0, 4, TIER_DRAM);
    has_blocks(router->peers[3], 0, 2, TIER_DRAM);
    peer_drains(router->peers[2]); /* a draining store serves no reads */
    struct client c = ask_prompt(NULL);
    ck_assert_uint_eq(c.q->sched.store_blocks, 2);
    ck_assert_uint_eq(last_leg(c.q->prefill)->n_stores, 1);
    leave(&c);
    peer_gone(router->peers[3], "test");
    c = ask_prompt(NULL);
    ck_assert_uint_eq(c.q->sched.store_blocks, 0);
    ck_assert_uint_eq(last_leg(c.q->prefill)->n_stores, 0);
    leave(&c);
}
END_TEST

START_TEST(test_other_tenants_find_nothing)
{
    has_blocks(router->peers[0], 0, 4, TIER_WORKER);
    Tandem__V1__GenerateRequest m;
    Tandem__V1__TokenPrompt prompt;
    set_prompt(&m, &prompt);
    m.tenant = rpc_data("other");
    struct client c = ask(&m);
    ck_assert_uint_eq(c.q->sched.matched_blocks[0], 0);
    leave(&c);
}
END_TEST

START_TEST(test_a_request_that_bypasses_the_cache_matches_nothing_and_knows_no_store)
{
    has_blocks(router->peers[0], 0, 4, TIER_WORKER);
    has_blocks(router->peers[2], 0, 4, TIER_DRAM);
    struct client c = ask_prompt(bypass);
    ck_assert_uint_eq(c.q->sched.matched_blocks[0], 0);
    ck_assert_uint_eq(c.q->sched.store_blocks, 0);
    ck_assert_uint_eq(last_leg(c.q->prefill)->n_stores, 0);
    ck_assert_uint_eq(last_leg(c.q->decode)->n_stores, 0);
    leave(&c);
}
END_TEST

START_TEST(test_scoring_a_prompt_uses_no_match)
{
    has_blocks(router->peers[0], 0, 4, TIER_WORKER);
    has_blocks(router->peers[2], 0, 4, TIER_DRAM);
    struct client c = ask_prompt(want_scores);
    ck_assert_uint_eq(c.q->sched.matched_blocks[0], 0);
    ck_assert_uint_eq(c.q->sched.store_blocks, 0);
    leave(&c);
}
END_TEST

START_TEST(test_the_prefill_leg_says_what_to_load_from_whom)
{
    has_blocks(router->peers[0], 0, 1, TIER_WORKER);
    has_blocks(router->peers[2], 0, 1, TIER_DRAM);
    has_blocks(router->peers[3], 0, 4, TIER_DRAM);
    for (int round = 0; round < 8; round++) { /* equal stores are chosen at random, unequal ones are not */
        struct client c = ask_prompt(NULL);
        const Tandem__Worker__V1__Leg *leg = last_leg(c.q->prefill), *other = last_leg(c.q->decode);
        ck_assert_uint_eq(leg->n_stores, 2);
        ck_assert(is_text(leg->stores[1]->xfer_address, router->peers[3]->xfer_address));
        ck_assert_uint_eq(leg->stores[1]->id, ring_id("s3", 2));
        ck_assert_uint_eq(leg->n_store_runs, 1);
        ck_assert_uint_eq(leg->store_runs[0]->store, 1);
        ck_assert_uint_eq(leg->store_runs[0]->first_block, 0);
        ck_assert_uint_eq(leg->store_runs[0]->n_blocks, 4);
        ck_assert_uint_eq(leg->n_holders, 0);
        ck_assert_uint_eq(other->n_stores, 2); /* for what it will offer */
        ck_assert_uint_eq(other->n_store_runs, 0);
        leave(&c);
    }
}
END_TEST

START_TEST(test_blocks_of_another_worker_are_fetched_from_it)
{
    /* The decode worker has them, of an earlier answer. */
    has_blocks(router->peers[2], 0, 4, TIER_WORKER);
    struct client c = ask_prompt(NULL);
    const Tandem__Worker__V1__Leg *leg = last_leg(c.q->prefill);
    ck_assert_uint_eq(leg->n_stores, 0);
    ck_assert_uint_eq(leg->n_holders, 1);
    ck_assert(is_text(leg->holders[0], router->peers[2]->xfer_address));
    ck_assert_uint_eq(leg->n_store_runs, 1);
    ck_assert_uint_eq(leg->store_runs[0]->store, 0); /* beyond the stores: the first holder */
    ck_assert_uint_eq(leg->store_runs[0]->n_blocks, 4);
    leave(&c);
}
END_TEST

START_TEST(test_stores_with_another_codec_are_not_named)
{
    struct client c = ask_prompt(NULL);
    ck_assert_str_eq(c.q->kv_codec, "");
    /* Both stores restart with a lossy codec; the request was named for exact blocks. */
    peer_gone(router->peers[2], "test");
    peer_gone(router->peers[3], "test");
    world_codec = "int8";
    world_connect(router->peers[2], 7);
    world_connect(router->peers[3], 8);
    world_codec = "";
    ck_assert_str_eq(router->kv_codec, "int8");
    worker_fails(&c, c.q->decode, TD_ERR_NO_SPACE);
    place_queued(router);
    ck_assert_int_eq(c.q->state, REQUEST_PLACED);
    ck_assert_uint_eq(last_leg(c.q->prefill)->n_stores, 0);
    leave(&c);
    c = ask_prompt(NULL);
    ck_assert_str_eq(c.q->kv_codec, "int8");
    ck_assert_uint_eq(last_leg(c.q->prefill)->n_stores, 2);
    leave(&c);
}
END_TEST

/* ------------------------------------------------------- what the scheduler sees */

START_TEST(test_the_scheduler_sees_limits_priority_and_deadlines)
{
    Tandem__V1__GenerateRequest m;
    Tandem__V1__TokenPrompt prompt;
    Tandem__V1__Slo slo = TANDEM__V1__SLO__INIT;
    Tandem__V1__Stopping stopping = TANDEM__V1__STOPPING__INIT;
    set_prompt(&m, &prompt);
    m.slo = &slo;
    m.stopping = &stopping;
    stopping.has_max_tokens_case = TANDEM__V1__STOPPING__HAS_MAX_TOKENS_MAX_TOKENS;
    stopping.max_tokens = 9;
    slo.ttft_ms = 60000;
    slo.tpot_ms = 5000;
    slo.deadline_ms = 90000;
    m.priority = -2;
    m.workflow_deadline_ms = 120000;
    m.workflow_steps_left = 3;
    struct client c = ask(&m);
    const struct sched_request *s = &c.q->sched;
    ck_assert_uint_eq(s->n_tokens, N_IDS);
    ck_assert_uint_eq(s->max_tokens, 9);
    ck_assert_uint_eq(s->block_tokens, WORLD_PAGE_TOKENS);
    ck_assert_double_eq(s->ttft_ms, 60000);
    ck_assert_double_eq(s->tpot_ms, 5000);
    ck_assert_int_eq(s->priority, -2);
    ck_assert_uint_eq(s->deadline_ns, c.q->arrived_ns + 90000 * NS_PER_MS);
    ck_assert_uint_eq(s->workflow_deadline_ns, c.q->arrived_ns + 120000 * NS_PER_MS);
    ck_assert_uint_eq(s->workflow_steps_left, 3);
    ck_assert(!s->resumed && !s->shares);
    ck_assert_double_gt(c.q->predicted_ttft_ms, 0);
    leave(&c);
    c = ask_prompt(NULL);
    ck_assert_uint_eq(c.q->sched.deadline_ns, UINT64_MAX);
    ck_assert_uint_eq(c.q->sched.workflow_deadline_ns, UINT64_MAX);
    ck_assert_uint_eq(c.q->sched.tenant, 0);
    leave(&c);
}
END_TEST

START_TEST(test_a_request_that_comes_back_is_recognised)
{
    struct client a = ask_prompt(NULL), b = ask_prompt(NULL);
    ck_assert_uint_ne(a.q->sched.identity, 0);
    ck_assert_uint_eq(a.q->sched.identity, b.q->sched.identity);
    ck_assert_uint_lt(a.q->sched.number, b.q->sched.number);
    leave(&b);
    ids[N_IDS - 1]++; /* behind the last full block */
    b = ask_prompt(NULL);
    ck_assert_uint_ne(a.q->sched.identity, b.q->sched.identity);
    leave(&a);
    leave(&b);
}
END_TEST

START_TEST(test_a_limit_that_no_worker_can_keep_is_refused_with_the_prediction)
{
    Tandem__V1__GenerateRequest m;
    Tandem__V1__TokenPrompt prompt;
    Tandem__V1__Slo slo = TANDEM__V1__SLO__INIT;
    set_prompt(&m, &prompt);
    m.slo = &slo;
    slo.exact_ttft_ms = 0.001;
    struct client c = ask(&m);
    ck_assert(!is_alive(&c));
    ck_assert_int_eq(c.call->code, RPC_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(c.call->text, ": predicted TTFT "));
    ck_assert_ptr_nonnull(strstr(c.call->text, "; not with idle workers either"));
    ck_assert_uint_eq(c.call->retry_after_ms, 0);
    ck_assert_uint_eq(router->n_queued, 0);
    rpc_call_unref(c.call);
}
END_TEST

START_TEST(test_a_prompt_that_no_pool_holds_is_an_invalid_one)
{
    world_close();
    world_n_pages = N_BLOCKS; /* one page too few for the prompt */
    open_with("pd", "split");
    world_n_pages = 4096;
    struct client c = ask_prompt(NULL);
    ck_assert(!is_alive(&c));
    ck_assert_int_eq(c.call->code, RPC_INVALID_ARGUMENT);
    rpc_call_unref(c.call);
}
END_TEST

/* ------------------------------------------------------------- before a worker came */

START_TEST(test_a_request_waits_until_the_router_is_ready)
{
    router->ready = false;
    struct client c = ask_prompt(NULL);
    ck_assert_int_eq(c.q->state, REQUEST_QUEUED);
    ck_assert(!c.q->submitted);
    ck_assert_uint_eq(router->n_unsubmitted, 1);
    atomic_store(&router->max_context, 100); /* the first worker says so */
    router->ready = true;
    place_queued(router);
    ck_assert_int_eq(c.q->state, REQUEST_PLACED);
    ck_assert_uint_eq(router->n_unsubmitted, 0);
    ck_assert_uint_eq(c.q->p.sampling.max_tokens, 100 - N_IDS);
    leave(&c);
}
END_TEST

START_TEST(test_an_adapter_is_looked_up_when_the_adapters_are_known)
{
    Tandem__V1__GenerateRequest m;
    Tandem__V1__TokenPrompt prompt;
    set_prompt(&m, &prompt);
    m.lora = rpc_data("poet");
    router->known = false;
    struct client c = ask(&m);
    ck_assert(is_alive(&c));
    router->known = true;
    place_queued(router);
    expect_failed(&c, RPC_NOT_FOUND, "lora: 'poet' is not served; there are no adapters");
}
END_TEST

/* Roles that are there, the plan that is forced, and what a request is told after --gone-ms. */
static const struct {
    const char *roles, *plan, *said;
} GONE[] = {
    {"p", "auto", "no decode worker is up"},
    {"d", "split", "no prefill worker is up"},
    {"d", "kept", "no prefill worker is up"},
    {"", "auto", "no worker is up yet"},
};

START_TEST(test_a_request_is_told_which_workers_are_missing)
{
    open_with(GONE[_i].roles, GONE[_i].plan);
    struct client c = ask_prompt(NULL);
    world_wait_ms(4999);
    place_queued(router);
    ck_assert(is_alive(&c));
    world_wait_ms(1);
    place_queued(router);
    ck_assert_uint_eq(c.call->retry_after_ms, 1000);
    expect_failed(&c, RPC_UNAVAILABLE, GONE[_i].said);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("router_place");
    TCase *stores = tcase_create("stores"), *two = tcase_create("two"), *gone = tcase_create("gone");
    suite_add_tcase(s, stores);
    suite_add_tcase(s, two);
    suite_add_tcase(s, gone);
    tcase_add_checked_fixture(stores, setup, world_close);
    tcase_add_checked_fixture(two, setup_two, world_close);
    tcase_add_checked_fixture(gone, NULL, world_close);
    tcase_add_test(stores, test_equal_prompts_have_equal_names);
    tcase_add_test(stores, test_names_differ_by_tenant_and_salt);
    tcase_add_test(stores, test_names_differ_by_model_adapter_codec_and_secret);
    tcase_add_test(stores, test_a_prompt_that_bypasses_the_cache_has_a_name_of_its_own);
    tcase_add_test(stores, test_a_block_is_named_by_all_tokens_up_to_its_end);
    tcase_add_test(stores, test_the_scheduler_is_told_what_each_worker_and_the_stores_have);
    tcase_add_test(stores, test_who_is_away_or_drains_has_nothing);
    tcase_add_test(stores, test_other_tenants_find_nothing);
    tcase_add_test(stores, test_a_request_that_bypasses_the_cache_matches_nothing_and_knows_no_store);
    tcase_add_test(stores, test_scoring_a_prompt_uses_no_match);
    tcase_add_test(stores, test_the_prefill_leg_says_what_to_load_from_whom);
    tcase_add_test(stores, test_stores_with_another_codec_are_not_named);
    tcase_add_test(stores, test_the_scheduler_sees_limits_priority_and_deadlines);
    tcase_add_test(stores, test_a_request_that_comes_back_is_recognised);
    tcase_add_test(stores, test_a_limit_that_no_worker_can_keep_is_refused_with_the_prediction);
    tcase_add_test(stores, test_a_prompt_that_no_pool_holds_is_an_invalid_one);
    tcase_add_test(stores, test_a_request_waits_until_the_router_is_ready);
    tcase_add_test(stores, test_an_adapter_is_looked_up_when_the_adapters_are_known);
    tcase_add_test(two, test_blocks_of_another_worker_are_fetched_from_it);
    tcase_add_loop_test(gone, test_a_request_is_told_which_workers_are_missing, 0, sizeof(GONE) / sizeof(GONE[0]));
    return tap_main(s);
}
