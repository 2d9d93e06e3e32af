/* The router's methods (router/api.c), from a client's message to the answer. */
#include "door.h"

#include "worker/link.h"

#define GENERATE   "/tandem.v1.Tandem/Generate"
#define TOKENIZE   "/tandem.v1.Tandem/Tokenize"
#define DETOKENIZE "/tandem.v1.Tandem/Detokenize"
#define ADMIN      "/tandem.admin.v1.Admin/"
#define JOIN       "/tandem.worker.v1.Registry/Join"

static void setup(void)
{
    world_open("pds");
}

static Tandem__V1__GenerateRequest text_request(const char *text)
{
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT;
    m.text = rpc_data(text);
    m.want_ids = true;
    return m;
}

/* The request of that call; NULL: none. */
static struct request *request_of(const struct rpc_call *call)
{
    struct request *q;
    TAILQ_FOREACH (q, &router->requests, in_router)
        if (q->call == call)
            return q;
    return NULL;
}

/* ----------------------------------------------------------------- Generate */

START_TEST(test_api_generate_streams_what_workers_send)
{
    Tandem__V1__GenerateRequest m = text_request("Tell me a story");
    struct rpc_call *call = door_open(GENERATE, &m.base);
    router_turns_until(request_of(call) && request_of(call)->state == REQUEST_PLACED);
    struct request *q = request_of(call);
    struct client c = {.call = call, .q = q, .counter = q->counter};
    struct peer *decode = q->decode;
    worker_accepts(&c, decode);
    worker_token(&c, q->prefill, id_of_byte('H'), 0, 0);
    if (q->prefill != decode)
        worker_ends(&c, q->prefill, "");
    worker_token(&c, decode, id_of_byte('i'), 1, 0);
    worker_ends(&c, decode, "stop");
    router_turns_until(call->finished);
    struct answer a = answer_of(&c);
    ck_assert_int_eq(call->code, RPC_OK);
    ck_assert_str_eq(a.text, "Hi");
    ck_assert_uint_eq(a.n_ids, 2);
    ck_assert_uint_eq(a.n_ends, 1);
    ck_assert_uint_eq(call->n_finishes, 1);
    door_close(call);
    router_turns_until(!atomic_load(&router->n_texts) && !atomic_load(&router->n_notes)); /* a helper may be late */
    ck_assert_uint_eq(atomic_load(&router->note_bytes), 0);
    world_close();
}
END_TEST

START_TEST(test_api_generate_names_the_field_that_is_wrong)
{
    Tandem__V1__GenerateRequest m = text_request("Tell me a story");
    Tandem__V1__Sampling sampling = TANDEM__V1__SAMPLING__INIT;
    m.sampling = &sampling;
    sampling.presence_penalty = 3;
    door_refuses(GENERATE, &m.base, RPC_INVALID_ARGUMENT, "sampling.presence_penalty");
    m.sampling = NULL;
    m.model = rpc_data("another");
    door_refuses(GENERATE, &m.base, RPC_NOT_FOUND, "model");
    m = (Tandem__V1__GenerateRequest)TANDEM__V1__GENERATE_REQUEST__INIT;
    door_refuses(GENERATE, &m.base, RPC_INVALID_ARGUMENT, "prompt");
    ck_assert_double_eq(metrics_get(router->counters, ROUTER_INVALID), 3);
    ck_assert(TAILQ_EMPTY(&router->requests));
    world_close();
}
END_TEST

/* A request whose first tokens another router gave to the client. */
struct resumed {
    Tandem__V1__GenerateRequest m; /* points to the rest */
    Tandem__V1__Resume resume;
    Tandem__V1__Stopping stopping;
    Tandem__V1__Sampling sampling;
    uint32_t ids[8];
    ProtobufCBinaryData stop[1];
};

static struct resumed *resumed_request(const char *came)
{
    static struct resumed r;
    r = (struct resumed){.m = text_request("Tell me a story"),
                         .resume = TANDEM__V1__RESUME__INIT,
                         .stopping = TANDEM__V1__STOPPING__INIT,
                         .sampling = TANDEM__V1__SAMPLING__INIT};
    for (; *came; came++)
        r.ids[r.resume.n_ids++] = id_of_byte((uint8_t)*came);
    r.m.resume = &r.resume;
    r.m.stopping = &r.stopping;
    r.m.sampling = &r.sampling;
    r.resume.ids = r.ids;
    r.resume.text_bytes = r.resume.n_ids;
    r.stopping.has_max_tokens_case = TANDEM__V1__STOPPING__HAS_MAX_TOKENS_MAX_TOKENS;
    r.stopping.max_tokens = 5;
    r.sampling.has_seed_case = TANDEM__V1__SAMPLING__HAS_SEED_SEED;
    r.sampling.seed = 7;
    return &r;
}

/* Workers go on with these tokens from this position on, and end for the reason. */
static struct answer workers_go_on(struct rpc_call *call, const char *text, uint32_t at, const char *reason)
{
    router_turns_until(call->finished || (request_of(call) && request_of(call)->state == REQUEST_PLACED));
    struct request *q = request_of(call);
    ck_assert_msg(q != NULL, "%s", call->text);
    struct client c = {.call = call, .q = q, .counter = q->counter};
    struct peer *prefill = q->prefill, *decode = q->decode;
    ck_assert_uint_eq(last_leg(decode)->n_ids, q->p.sampling.n_prompt + at);
    worker_accepts(&c, decode);
    for (uint32_t i = 0; text[i]; i++) {
        worker_token(&c, i ? decode : prefill, id_of_byte((uint8_t)text[i]), at + i, 0);
        if (!i && prefill != decode)
            worker_ends(&c, prefill, "");
    }
    worker_ends(&c, decode, reason);
    router_turns_until(call->finished);
    ck_assert_msg(call->code == RPC_OK, "%s", call->text);
    return answer_of(&c);
}

START_TEST(test_api_resume_goes_on_after_the_tokens_that_came)
{
    struct resumed *r = resumed_request("Hi");
    r->resume.choice = 3;
    r->resume.prompt_tokens = 4; /* of "Tell me a story" */
    struct rpc_call *call = door_open(GENERATE, &r->m.base);
    struct answer a = workers_go_on(call, ", y", 2, "length");
    ck_assert_str_eq(a.text, ", y");
    ck_assert_uint_eq(a.n_ids, 3);
    ck_assert_uint_eq(a.n_ends, 1);
    const Tandem__V1__GenerateResponse *last = (Tandem__V1__GenerateResponse *)call->sent[call->n_sent - 1];
    ck_assert_uint_eq(last->end->usage->completion_tokens, 5);
    ck_assert_uint_eq(last->end->usage->prompt_tokens, r->resume.prompt_tokens);
    ck_assert_uint_eq(last->choice, 3);
    ck_assert_double_eq(metrics_get(router->counters, ROUTER_TOKENS), 3);
    door_close(call);
    world_close();
}
END_TEST

/* Where the client's text ends need not be where its tokens end: a stop string may have begun. */
START_TEST(test_api_resume_goes_on_within_a_token_and_a_stop_string)
{
    struct resumed *r = resumed_request("Hi");
    r->resume.text_bytes = 1; /* "i" may begin the stop string */
    r->stop[0] = rpc_data("i!");
    r->stopping.stop = r->stop;
    r->stopping.n_stop = 1;
    struct rpc_call *call = door_open(GENERATE, &r->m.base);
    struct answer a = workers_go_on(call, "t.", 2, "length");
    ck_assert_str_eq(a.text, "it.");
    door_close(call);

    r = resumed_request("Hi");
    r->resume.text_bytes = 1;
    r->stop[0] = rpc_data("i!");
    r->stopping.stop = r->stop;
    r->stopping.n_stop = 1;
    call = door_open(GENERATE, &r->m.base);
    router_turns_until(request_of(call) && request_of(call)->state == REQUEST_PLACED);
    struct request *q = request_of(call);
    struct client c = {.call = call, .q = q, .counter = q->counter};
    worker_accepts(&c, q->decode);
    worker_token(&c, q->prefill, id_of_byte('!'), 2, 0);
    router_turns_until(call->finished);
    a = answer_of(&c);
    ck_assert_str_eq(a.text, "");
    ck_assert_uint_eq(a.n_ends, 1);
    door_close(call);
    world_close();
}
END_TEST

START_TEST(test_api_resume_of_a_complete_answer_ends_at_once)
{
    struct resumed *r = resumed_request("Hello");
    struct rpc_call *call = door_ask(GENERATE, &r->m.base);
    const Tandem__V1__GenerateResponse *only = door_answer(call);
    ck_assert_uint_eq(only->text.len, 0);
    ck_assert(!memcmp(only->end->finish_reason.data, "length", 6));
    ck_assert_uint_eq(only->end->usage->completion_tokens, 5);
    ck_assert_double_lt(only->end->timing->queue, 60000);
    ck_assert_uint_eq(only->end->placement->plan.len, 0);
    door_close(call);
    ck_assert_uint_eq(router->n_queued + router->n_running + router->n_unsubmitted, 0);
    world_close();
}
END_TEST

START_TEST(test_api_resume_is_refused_by_field)
{
    struct resumed *r = resumed_request("Hi");
    r->resume.text_bytes = 3;
    door_refuses(GENERATE, &r->m.base, RPC_INVALID_ARGUMENT, "resume.text_bytes");
    r = resumed_request("\xc3\xa4"); /* two tokens, one character */
    r->resume.text_bytes = 1;
    door_refuses(GENERATE, &r->m.base, RPC_INVALID_ARGUMENT, "resume.text_bytes");
    r = resumed_request("Hello!");
    door_refuses(GENERATE, &r->m.base, RPC_INVALID_ARGUMENT, "resume.ids: 6");
    r = resumed_request("Hi");
    r->ids[1] = UINT32_MAX;
    door_refuses(GENERATE, &r->m.base, RPC_INVALID_ARGUMENT, "resume.ids[1]");
    r = resumed_request("Hi");
    r->resume.choice = ASK_MAX_CHOICES;
    door_refuses(GENERATE, &r->m.base, RPC_INVALID_ARGUMENT, "resume.choice");
    r = resumed_request("Hi");
    r->resume.prompt_tokens = 1;
    door_refuses(GENERATE, &r->m.base, RPC_INVALID_ARGUMENT, "resume.prompt_tokens");
    r = resumed_request("Hi");
    r->sampling.n = 2;
    door_refuses(GENERATE, &r->m.base, RPC_INVALID_ARGUMENT, "sampling.n");
    r = resumed_request("Hi");
    r->sampling.has_seed_case = TANDEM__V1__SAMPLING__HAS_SEED__NOT_SET;
    r->sampling.has_temperature_case = TANDEM__V1__SAMPLING__HAS_TEMPERATURE_TEMPERATURE;
    r->sampling.temperature = 1;
    door_refuses(GENERATE, &r->m.base, RPC_INVALID_ARGUMENT, "resume: sampling.seed");
    r = resumed_request("Hi");
    r->m.echo = true;
    r->resume.text_bytes = 3; /* less than the echo */
    door_refuses(GENERATE, &r->m.base, RPC_INVALID_ARGUMENT, "resume.text_bytes");
    ck_assert(TAILQ_EMPTY(&router->requests));
    world_close();
}
END_TEST

START_TEST(test_api_generate_is_refused_while_the_router_drains)
{
    Tandem__V1__GenerateRequest m = text_request("Tell me a story");
    router_stop(router);
    struct rpc_call *call = door_ask(GENERATE, &m.base);
    ck_assert_int_eq(call->code, RPC_UNAVAILABLE);
    ck_assert_str_eq(call->text, "router is draining");
    ck_assert_uint_eq(call->retry_after_ms, 1000);
    door_close(call);
    ck_assert_int_eq(router_run(router), TD_OK); /* nothing is left to do */
    world_close();
}
END_TEST

START_TEST(test_api_generate_of_a_client_that_leaves_ends_everywhere)
{
    Tandem__V1__GenerateRequest m = text_request("Tell me a story");
    struct rpc_call *call = door_open(GENERATE, &m.base);
    router_turns_until(request_of(call) && request_of(call)->state == REQUEST_PLACED);
    struct peer *decode = request_of(call)->decode;
    uint64_t counter = request_of(call)->counter;
    call_leaves(call);
    router_turn(router);
    ck_assert(TAILQ_EMPTY(&router->requests));
    ck_assert_uint_eq(count_cancels(decode, counter), 1);
    rpc_call_unref(call);
    call = door_open(GENERATE, &m.base); /* one that leaves before its text was looked at, or just then */
    door_close(call);
    router_turns_until(!atomic_load(&router->n_texts) && !atomic_load(&router->n_notes));
    ck_assert(TAILQ_EMPTY(&router->requests));
    ck_assert_uint_eq(atomic_load(&router->note_bytes), 0);
    world_close();
}
END_TEST

START_TEST(test_api_generate_is_failed_when_the_router_is_stopped_twice)
{
    Tandem__V1__GenerateRequest m = text_request("Tell me a story");
    struct rpc_call *call = door_open(GENERATE, &m.base);
    router_turns_until(request_of(call));
    router_stop(router);
    router_stop(router);
    ck_assert_int_eq(router_run(router), TD_OK);
    ck_assert_int_eq(call->code, RPC_UNAVAILABLE);
    ck_assert_str_eq(call->text, "router is stopping");
    door_close(call);
    world_close();
}
END_TEST

START_TEST(test_api_refuses_more_notes_than_calls_may_be_open)
{
    world_close();
    const char *const two[] = {"--max-calls", "2", NULL};
    Tandem__V1__GenerateRequest generate = text_request("Tell me a story");
    Tandem__Admin__V1__StatusRequest status = TANDEM__ADMIN__V1__STATUS_REQUEST__INIT;
    world_open_with("pd", two);
    struct rpc_call *calls[4];
    for (int i = 0; i < 4; i++) /* the owner looks at nothing yet */
        calls[i] = door_open(GENERATE, &generate.base);
    uint64_t limit = door_wall_ns() + 20 * NS_PER_S;
    while (metrics_get(router->counters, ROUTER_NOTES_REFUSED) < 2 && door_wall_ns() < limit)
        ;
    struct rpc_call *asked = door_open(ADMIN "Status", &status.base); /* an operator's question is not one of them */
    ck_assert(!asked->finished);
    int n_refused = 0;
    for (int i = 0; i < 4; i++) {
        if (!calls[i]->finished)
            continue;
        n_refused++;
        ck_assert_int_eq(calls[i]->code, RPC_RESOURCE_EXHAUSTED);
        ck_assert_str_eq(calls[i]->text, "too many calls wait to be looked at");
        ck_assert_uint_ge(calls[i]->retry_after_ms, 1);
    }
    ck_assert_int_eq(n_refused, 2);
    router_turn(router);
    ck_assert_uint_eq(atomic_load(&router->n_notes), 0);
    ck_assert_uint_eq(atomic_load(&router->note_bytes), 0);
    ck_assert(asked->finished && asked->code == RPC_OK);
    door_close(asked);
    for (int i = 0; i < 4; i++)
        door_close(calls[i]);
    world_close();
}
END_TEST

START_TEST(test_api_refuses_a_request_while_nobody_can_serve_and_the_queue_is_full)
{
    world_close();
    const char *const one[] = {"--queue-requests", "1", NULL};
    Tandem__V1__GenerateRequest m = text_request("Tell me a story");
    world_open_with("p", one); /* no decode worker */
    struct rpc_call *first = door_open(GENERATE, &m.base);
    router_turns_until(request_of(first));
    struct rpc_call *second = door_ask(GENERATE, &m.base);
    ck_assert_int_eq(second->code, RPC_RESOURCE_EXHAUSTED);
    ck_assert_str_eq(second->text, "the queue is full");
    ck_assert_uint_eq(second->retry_after_ms, 1000);
    ck_assert(!first->finished);
    door_close(second);
    door_close(first);
    world_close();
}
END_TEST

/* ---------------------------------------------------- Tokenize, Detokenize */

static Tandem__V1__TokenizeRequest tokenize_request(const char *text)
{
    Tandem__V1__TokenizeRequest m = TANDEM__V1__TOKENIZE_REQUEST__INIT;
    m.input_case = TANDEM__V1__TOKENIZE_REQUEST__INPUT_TEXT;
    m.text = rpc_data(text);
    return m;
}

START_TEST(test_api_tokenize_and_detokenize_agree)
{
    Tandem__V1__TokenizeRequest m = tokenize_request("The fox likes rain.");
    Tandem__V1__DetokenizeRequest back = TANDEM__V1__DETOKENIZE_REQUEST__INIT;
    struct token_ids ids = ids_of("The fox likes rain.");
    m.has_add_special_tokens_case = TANDEM__V1__TOKENIZE_REQUEST__HAS_ADD_SPECIAL_TOKENS_ADD_SPECIAL_TOKENS;
    struct rpc_call *call = door_ask(TOKENIZE, &m.base);
    const Tandem__V1__TokenizeResponse *a = door_answer(call);
    ck_assert_uint_eq(a->n_ids, ids.n);
    ck_assert_mem_eq(a->ids, ids.ids, ids.n * sizeof(*ids.ids));
    ck_assert_uint_eq(a->text.len, 0);
    back.n_ids = a->n_ids;
    back.ids = a->ids;
    struct rpc_call *second = door_ask(DETOKENIZE, &back.base);
    const Tandem__V1__DetokenizeResponse *b = door_answer(second);
    ck_assert(is_text(b->text, "The fox likes rain."));
    door_close(call);
    door_close(second);
    token_ids_free(&ids);
    world_close();
}
END_TEST

START_TEST(test_api_tokenize_shows_the_text_of_a_chat)
{
    Tandem__V1__TokenizeRequest m = TANDEM__V1__TOKENIZE_REQUEST__INIT;
    Tandem__V1__ChatPrompt chat = TANDEM__V1__CHAT_PROMPT__INIT;
    Tandem__V1__ChatMessage message = TANDEM__V1__CHAT_MESSAGE__INIT, *list[] = {&message};
    message.role = rpc_data("user");
    message.content = rpc_data("Do foxes like rain?");
    chat.n_messages = 1;
    chat.messages = list;
    m.input_case = TANDEM__V1__TOKENIZE_REQUEST__INPUT_CHAT;
    m.chat = &chat;
    if (!chat_template_present(router->chat)) {
        door_refuses(TOKENIZE, &m.base, RPC_INVALID_ARGUMENT, "chat");
        world_close();
        return;
    }
    struct rpc_call *call = door_ask(TOKENIZE, &m.base);
    const Tandem__V1__TokenizeResponse *a = door_answer(call);
    ck_assert_uint_gt(a->n_ids, 5);
    ck_assert_uint_gt(a->text.len, message.content.len);
    door_close(call);
    world_close();
}
END_TEST

START_TEST(test_api_tokenize_refuses_by_field)
{
    static char long_text[1 << 22];
    Tandem__V1__TokenizeRequest m = TANDEM__V1__TOKENIZE_REQUEST__INIT;
    Tandem__V1__DetokenizeRequest back = TANDEM__V1__DETOKENIZE_REQUEST__INIT;
    Tandem__V1__ChatPrompt chat = TANDEM__V1__CHAT_PROMPT__INIT;
    uint32_t *ids = mem_array(params_context(router) + 1, sizeof(*ids));
    door_refuses(TOKENIZE, &m.base, RPC_INVALID_ARGUMENT, "input: neither text nor chat is given");
    m.input_case = TANDEM__V1__TOKENIZE_REQUEST__INPUT_CHAT;
    m.chat = &chat;
    door_refuses(TOKENIZE, &m.base, RPC_INVALID_ARGUMENT, "chat");
    m = tokenize_request("a");
    m.model = rpc_data("another");
    door_refuses(TOKENIZE, &m.base, RPC_NOT_FOUND, "model");
    memset(long_text, 'a', sizeof(long_text) - 1);
    m = tokenize_request(long_text);
    door_refuses(TOKENIZE, &m.base, RPC_INVALID_ARGUMENT, "text");
    back.n_ids = params_context(router) + 1;
    back.ids = ids;
    door_refuses(DETOKENIZE, &back.base, RPC_INVALID_ARGUMENT, "ids:");
    back.n_ids = 3;
    ids[2] = router->config.vocab_size;
    door_refuses(DETOKENIZE, &back.base, RPC_INVALID_ARGUMENT, "ids[2]:");
    back.model = rpc_data("another");
    door_refuses(DETOKENIZE, &back.base, RPC_NOT_FOUND, "model");
    free(ids);
    world_close();
}
END_TEST

START_TEST(test_api_answer_that_does_not_fit_is_an_error)
{
    Tandem__V1__TokenizeRequest m = tokenize_request("The fox likes rain.");
    Tandem__V1__DetokenizeRequest back = TANDEM__V1__DETOKENIZE_REQUEST__INIT;
    uint32_t ids[] = {5, 6, 7};
    back.n_ids = 3;
    back.ids = ids;
    for (int i = 0; i < 2; i++) {
        struct rpc_call *call = call_to(router_address(router), i ? DETOKENIZE : TOKENIZE);
        call->max_message_bytes = 1;
        call_says(call, i ? &back.base : &m.base);
        router_turns_until(call->finished);
        ck_assert_int_eq(call->code, RPC_RESOURCE_EXHAUSTED);
        ck_assert_str_eq(call->text, "answer too large");
        door_close(call);
    }
    world_close();
}
END_TEST

START_TEST(test_api_lists_the_model_with_what_workers_said)
{
    Tandem__V1__ListModelsRequest m = TANDEM__V1__LIST_MODELS_REQUEST__INIT;
    struct rpc_call *call = door_ask("/tandem.v1.Tandem/ListModels", &m.base);
    const Tandem__V1__ListModelsResponse *a = door_answer(call);
    ck_assert_uint_eq(a->n_models, 1);
    const Tandem__V1__ModelInfo *info = a->models[0];
    ck_assert(is_text(info->name, "tandem-demo"));
    ck_assert_uint_eq(info->vocab_size, router->config.vocab_size);
    ck_assert_uint_eq(info->block_tokens, WORLD_PAGE_TOKENS);
    ck_assert_uint_eq(info->fingerprint.len, 32);
    ck_assert(is_text(info->numerics, "exact"));
    ck_assert_uint_gt(info->max_context_tokens, 0);
    ck_assert_uint_eq(info->max_stop_strings, ASK_MAX_STOP_STRINGS);
    door_close(call);
    world_close();
    world_open(""); /* before a worker came */
    call = door_ask("/tandem.v1.Tandem/ListModels", &m.base);
    a = door_answer(call);
    ck_assert_uint_eq(a->models[0]->fingerprint.len, 0);
    door_close(call);
    world_close();
}
END_TEST

/* -------------------------------------------------------------------- Admin */

START_TEST(test_api_status_shows_each_worker_and_its_state)
{
    world_close();
    world_open("pddds");
    Tandem__Admin__V1__StatusRequest m = TANDEM__ADMIN__V1__STATUS_REQUEST__INIT;
    peer_drains(router->peers[1]);
    router->peers[2]->stalled = true;
    world_lose(router->peers[3]);
    snprintf(router->peers[4]->why, sizeof(router->peers[4]->why), "layout differs");
    router->peers[4]->state = PEER_REFUSED;
    struct rpc_call *call = door_ask(ADMIN "Status", &m.base);
    const Tandem__Admin__V1__StatusResponse *a = door_answer(call);
    static const char *const STATES[] = {"ready", "draining", "stalled", "lost", "refused: layout differs"};
    static const char *const ROLES[] = {"prefill", "decode", "decode", "decode", "store"};
    ck_assert_uint_eq(a->n_workers, 5);
    for (int i = 0; i < 5; i++) {
        ck_assert_msg(is_text(a->workers[i]->state, STATES[i]), "%.*s", (int)a->workers[i]->state.len,
                      (const char *)a->workers[i]->state.data);
        ck_assert(is_text(a->workers[i]->role, ROLES[i]) && is_text(a->workers[i]->breaker, "closed"));
    }
    ck_assert(is_text(a->workers[0]->name, "p0") && is_text(a->workers[0]->address, "p0:1"));
    ck_assert(a->ready);
    door_close(call);
    router->peers[3]->drained = true; /* it has left in order: not shown */
    call = door_ask(ADMIN "Status", &m.base);
    a = door_answer(call);
    ck_assert_uint_eq(a->n_workers, 4);
    door_close(call);
    router->peers[4]->state = PEER_LOST;
    world_close();
}
END_TEST

/* ------------------------------------------------------------- registration */

/* What a process says to register. nonce: of the router's last answer; NULL: none yet. */
struct join {
    Tandem__Worker__V1__JoinRequest m;
    struct proof_said said;
    uint8_t mac[SECRET_MAC_BYTES];
};

static void join_make(struct join *j, const char *address, const char *text, const uint8_t *nonce)
{
    struct secret *secret = NULL;
    *j = (struct join){.m = TANDEM__WORKER__V1__JOIN_REQUEST__INIT,
                       .said = {.incarnation = 5, .worker = "worker", .address = address}};
    j->m.address = rpc_data(address);
    j->m.incarnation = 5;
    j->m.nonce = (ProtobufCBinaryData){sizeof(j->said.worker), j->said.worker};
    if (!nonce)
        return;
    memcpy(j->said.router, nonce, sizeof(j->said.router));
    ck_assert(!secret_open(text, NULL, NULL, &secret, NULL));
    proof_sign(secret, JOIN_WORKER, &j->said, j->mac);
    secret_close(secret);
    j->m.router_nonce = (ProtobufCBinaryData){sizeof(j->said.router), j->said.router};
    j->m.proof = (ProtobufCBinaryData){sizeof(j->mac), j->mac};
}

/* Asks; the router proves itself in each answer. Returns whether it took the process, and its nonce. */
static bool join_ask(struct join *j, uint8_t nonce_out[SECRET_NONCE_BYTES])
{
    struct rpc_call *call = door_ask(JOIN, &j->m.base);
    const Tandem__Worker__V1__JoinResponse *a = door_answer(call);
    struct proof_said said = j->said;
    ck_assert(proof_nonce_read(a->nonce, said.router));
    ck_assert(proof_verify(NULL, JOIN_ROUTER, &said, a->proof));
    memcpy(nonce_out, said.router, sizeof(said.router));
    bool is_taken = a->is_taken;
    door_close(call);
    return is_taken;
}

START_TEST(test_api_join_takes_a_process_of_this_cluster_once)
{
    uint8_t nonce[SECRET_NONCE_BYTES];
    struct join j;
    join_make(&j, "d9:1", NULL, NULL);
    ck_assert(!join_ask(&j, nonce)); /* it has no nonce of the router yet */
    ck_assert_uint_eq(router->n_peers, 3);
    for (int i = 0; i < 2; i++) {
        join_make(&j, "d9:1", NULL, nonce);
        ck_assert(join_ask(&j, nonce));
        ck_assert_uint_eq(router->n_peers, 4);
    }
    ck_assert_str_eq(router->peers[3]->address, "d9:1");
    ck_assert(router->peers[3]->registered);
    world_connect(router->peers[3], 200);
    world_wait_ms(3 * PROOF_JOIN_MS);
    ck_assert(!join_ask(&j, nonce)); /* what somebody has recorded is too old by then */
    world_close();
}
END_TEST

START_TEST(test_api_join_refuses_another_secret_and_what_is_no_address)
{
    char longest[130] = ":";
    uint8_t nonce[SECRET_NONCE_BYTES];
    struct join j;
    join_make(&j, "d9:1", NULL, NULL);
    ck_assert(!join_ask(&j, nonce));
    join_make(&j, "d9:1", "another", nonce);
    door_refuses(JOIN, &j.m.base, RPC_PERMISSION_DENIED, "proof: not by this cluster's secret");
    join_make(&j, "d9:1", NULL, nonce);
    j.m.incarnation = 6; /* the proof of another process */
    door_refuses(JOIN, &j.m.base, RPC_PERMISSION_DENIED, "proof");
    join_make(&j, "d9:1", NULL, nonce);
    j.m.address = rpc_data("d8:1"); /* the proof for another address */
    door_refuses(JOIN, &j.m.base, RPC_PERMISSION_DENIED, "proof");
    join_make(&j, "d9:1", NULL, nonce);
    j.m.proof.len--;
    door_refuses(JOIN, &j.m.base, RPC_PERMISSION_DENIED, "proof");
    join_make(&j, "d9:1", NULL, nonce);
    j.m.nonce.len--;
    door_refuses(JOIN, &j.m.base, RPC_INVALID_ARGUMENT, "nonce: has 16 bytes");
    join_make(&j, "", NULL, nonce);
    door_refuses(JOIN, &j.m.base, RPC_INVALID_ARGUMENT, "address: not HOST:PORT or unix:PATH");
    join_make(&j, "d9", NULL, nonce);
    door_refuses(JOIN, &j.m.base, RPC_INVALID_ARGUMENT, "address");
    memset(longest + 1, 'a', 127);
    join_make(&j, longest, NULL, nonce);
    door_refuses(JOIN, &j.m.base, RPC_INVALID_ARGUMENT, "address");
    ck_assert_uint_eq(router->n_peers, 3);
    world_close();
}
END_TEST

/* ---------------------------------------------------------------- listeners */

START_TEST(test_api_operators_at_an_address_bring_the_key)
{
    static const char *const BAD[] = {NULL, "", "Bearer ", "Bearer x", "Bearer key2", "bearer key1", "key1"};
    const char *const at[] = {"--admin-listen", "127.0.0.1:0", "--admin-key", "key1", NULL};
    Tandem__Admin__V1__StatusRequest m = TANDEM__ADMIN__V1__STATUS_REQUEST__INIT;
    world_close();
    world_open_with("pd", at);
    world_hush();
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]) + 1; i++) {
        bool is_good = i == sizeof(BAD) / sizeof(BAD[0]);
        struct rpc_call *call = call_to(rpc_server_address(router->admin), ADMIN "Status");
        call->authorization = is_good ? "Bearer key1" : BAD[i];
        call_says(call, &m.base);
        router_turns_until(call->finished);
        ck_assert_int_eq(call->code, is_good ? RPC_OK : RPC_UNAUTHENTICATED);
        door_close(call);
    }
    world_close();
}
END_TEST

/* Opens a router of these words, which are refused; the error names the option. */
static void check_refused_options(const char *const *words, const char *text)
{
    const char *argv[16] = {"router", "--model", DEMO_MODEL, "--log-level", "error"};
    int argc = 5;
    struct router_options options = {0};
    enum options_action action;
    struct router *r = NULL;
    struct td_error e = {{0}};
    const struct options table = {
        .program = "router", .usage = "", .about = "", .env_prefix = NULL, .table = ROUTER_OPTIONS};
    char *strings = NULL;
    while (*words)
        argv[argc++] = *words++;
    ck_assert(!options_parse(&table, argc, (char **)(uintptr_t)argv, &options, NULL, NULL, &strings, &action, &e));
    ck_assert_int_eq(router_open(&options, &r, &e), TD_ERR_INVALID);
    ck_assert_msg(!strncmp(e.text, text, strlen(text)), "'%s' instead of '%s'", e.text, text);
    free(strings);
}

START_TEST(test_api_refuses_listeners_that_the_network_reaches_without_a_proof)
{
#define ALONE "--admin-listen", "none"
    const char *const client[] = {ALONE, "--workers", "d1:1", "--listen", "0.0.0.0:1", NULL},
                      *const all[] = {ALONE, "--workers", "d1:1", "--listen", ":1", NULL},
                      *const cluster[] = {ALONE, "--cluster-listen", "10.0.0.1:1", NULL},
                      *const keyless[] = {"--workers", "d1:1", "--admin-listen", "127.0.0.1:1", NULL},
                      *const clear[] = {"--workers", "d1:1", "--admin-listen", "10.0.0.1:1", "--admin-key", "k", NULL},
                      *const nobody[] = {ALONE, NULL};
    check_refused_options(client, "--listen 0.0.0.0:1: the network reaches it");
    check_refused_options(all, "--listen :1: the network reaches it");
    check_refused_options(cluster, "--cluster-listen 10.0.0.1:1: the network reaches it");
    check_refused_options(keyless, "--admin-listen 127.0.0.1:1: every user of this host reaches it");
    check_refused_options(clear, "--admin-listen 10.0.0.1:1: the network reaches it");
    check_refused_options(nobody, "--workers: give the workers' addresses, or --cluster-listen");
    const char *const allowed[] = {"--insecure", "--listen", "0.0.0.0:1", "--cluster-listen", "10.0.0.1:1", NULL};
    world_close();
    world_open_with("pd", allowed);
    world_close();
    const char *const proved[] = {"--secret", "abc", "--cluster-listen", "10.0.0.1:1", NULL};
    world_open_with("", proved);
    world_close();
}
END_TEST

START_TEST(test_api_drain_reaches_the_worker_of_that_name)
{
    const Tandem__Worker__V1__RouterMessage *last = NULL;
    char long_name[80];
    Tandem__Admin__V1__DrainRequest m = TANDEM__ADMIN__V1__DRAIN_REQUEST__INIT;
    door_refuses(ADMIN "Drain", &m.base, RPC_INVALID_ARGUMENT, "name: of a worker");
    memset(long_name, 'a', sizeof(long_name));
    m.name = (ProtobufCBinaryData){64, (uint8_t *)long_name};
    door_refuses(ADMIN "Drain", &m.base, RPC_INVALID_ARGUMENT, "name: of a worker");
    m.name = rpc_data("d7");
    door_refuses(ADMIN "Drain", &m.base, RPC_NOT_FOUND, "name: no worker 'd7' is ready");
    m.name = rpc_data("d1");
    m.limit_ms = 1500;
    struct rpc_call *call = door_ask(ADMIN "Drain", &m.base);
    door_answer(call);
    door_close(call);
    ck_assert_uint_eq(told(router->peers[1], TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_DRAIN, &last), 1);
    ck_assert_uint_eq(last->drain->limit_ms, 1500);
    ck_assert(router->peers[1]->draining);
    world_close();
}
END_TEST

START_TEST(test_api_explain_shows_the_newest_decisions_first)
{
    static char long_id[ASK_MAX_LABEL_BYTES + 1];
    Tandem__Admin__V1__ExplainRequest m = TANDEM__ADMIN__V1__EXPLAIN_REQUEST__INIT;
    struct client clients[3];
    static const char *const LABELS[] = {"a", "b", "a"};
    for (int i = 0; i < 3; i++) {
        Tandem__V1__GenerateRequest g = text_request("Tell me a story");
        g.request_id = rpc_data(LABELS[i]);
        clients[i] = ask(&g);
        world_wait_ms(1);
    }
    struct rpc_call *call = door_ask(ADMIN "Explain", &m.base);
    const Tandem__Admin__V1__ExplainResponse *a = door_answer(call);
    ck_assert_uint_eq(a->n_decisions, 3);
    ck_assert(a->decisions[0]->age_ms < a->decisions[2]->age_ms);
    ck_assert(is_text(a->decisions[1]->request_id, "b"));
    ck_assert_uint_gt(a->decisions[0]->n_candidates, 0);
    door_close(call);
    m.request_id = rpc_data("a");
    m.last = 1;
    call = door_ask(ADMIN "Explain", &m.base);
    a = door_answer(call);
    ck_assert_uint_eq(a->n_decisions, 1);
    ck_assert(is_text(a->decisions[0]->request_id, "a"));
    door_close(call);
    m.request_id = (ProtobufCBinaryData){sizeof(long_id), (uint8_t *)long_id};
    door_refuses(ADMIN "Explain", &m.base, RPC_INVALID_ARGUMENT, "request_id: too long");
    for (int i = 0; i < 3; i++)
        rpc_call_unref(clients[i].call);
    world_close();
}
END_TEST

int main(void)
{
    Suite *s = suite_create("router_api");
    TCase *t = tcase_create("router_api");
    tcase_add_checked_fixture(t, setup, NULL);
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_api_generate_streams_what_workers_send);
    tcase_add_test(t, test_api_generate_names_the_field_that_is_wrong);
    tcase_add_test(t, test_api_resume_goes_on_after_the_tokens_that_came);
    tcase_add_test(t, test_api_resume_goes_on_within_a_token_and_a_stop_string);
    tcase_add_test(t, test_api_resume_of_a_complete_answer_ends_at_once);
    tcase_add_test(t, test_api_resume_is_refused_by_field);
    tcase_add_test(t, test_api_generate_is_refused_while_the_router_drains);
    tcase_add_test(t, test_api_generate_of_a_client_that_leaves_ends_everywhere);
    tcase_add_test(t, test_api_generate_is_failed_when_the_router_is_stopped_twice);
    tcase_add_test(t, test_api_refuses_more_notes_than_calls_may_be_open);
    tcase_add_test(t, test_api_refuses_a_request_while_nobody_can_serve_and_the_queue_is_full);
    tcase_add_test(t, test_api_tokenize_and_detokenize_agree);
    tcase_add_test(t, test_api_tokenize_shows_the_text_of_a_chat);
    tcase_add_test(t, test_api_tokenize_refuses_by_field);
    tcase_add_test(t, test_api_answer_that_does_not_fit_is_an_error);
    tcase_add_test(t, test_api_lists_the_model_with_what_workers_said);
    tcase_add_test(t, test_api_status_shows_each_worker_and_its_state);
    tcase_add_test(t, test_api_join_takes_a_process_of_this_cluster_once);
    tcase_add_test(t, test_api_join_refuses_another_secret_and_what_is_no_address);
    tcase_add_test(t, test_api_operators_at_an_address_bring_the_key);
    tcase_add_test(t, test_api_refuses_listeners_that_the_network_reaches_without_a_proof);
    tcase_add_test(t, test_api_drain_reaches_the_worker_of_that_name);
    tcase_add_test(t, test_api_explain_shows_the_newest_decisions_first);
    suite_add_tcase(s, t);
    return tap_main(s);
}
