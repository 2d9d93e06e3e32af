/*
 * A real router (model, tokenizer, scheduler, index) in virtual time, whose calls are kept in memory
 * (calls.h).
 *
 * The test is the owner thread, all workers and all clients. What a worker says goes through peer_message(),
 * as in a running router; what the router says to it is read from its stream.
 *
 * Roles of workers are given as letters: "pdds" is a prefill worker, two decode workers, and a store, which
 * are router->peers[0..3] with the names p0, d1, d2, s3.
 */
#pragma once

#include <inttypes.h>

#include "router/router_internal.h"
#include "tests/calls.h"
#include "tests/tap.h"
#include "worker/link.h"

enum { WORLD_PAGE_TOKENS = 16, WORLD_START_NS = 1000000000 };

static struct router *router;
static uint32_t world_n_pages = 4096; /* of each worker that says hello from now on */
static uint32_t world_max_context;    /* of each worker that says hello from now on; 0: the model's */
static const char *world_name;        /* of who says hello from now on; NULL: by its address */
static const char *world_codec = "";  /* of each store that says hello from now on */

static const char *world_address, *world_local = ""; /* of who challenges from now on; NULL: that of its peer */

/* p challenges the router, and proves that it knows a secret (NULL: there is none). */
static inline void world_says_challenge(struct peer *p, const char *text)
{
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__Challenge challenge = TANDEM__WORKER__V1__CHALLENGE__INIT;
    struct proof_said said = p->said;
    struct secret *secret = NULL;
    uint8_t mac[SECRET_MAC_BYTES];
    ck_assert(!secret_open(text, NULL, NULL, &secret, NULL));
    memcpy(said.worker, "worker", 7);
    said.address = world_address ? world_address : p->address;
    said.local = world_local;
    proof_sign(secret, ATTACH_WORKER, &said, mac);
    secret_close(secret);
    challenge.nonce = (ProtobufCBinaryData){sizeof(said.worker), said.worker};
    challenge.proof = (ProtobufCBinaryData){sizeof(mac), mac};
    challenge.address = rpc_data(said.address);
    challenge.local = rpc_data(said.local);
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_CHALLENGE;
    m.challenge = &challenge;
    m.number = p->n_heard + 1;
    peer_message(p, &m);
}

/* p says hello, and may be refused. */
static inline void world_says_hello(struct peer *p, uint64_t incarnation)
{
    static const uint8_t FINGERPRINT[BLOCK_KEY_BYTES] = "weights";
    static const struct kv_layout LAYOUT = {
        .dtype = NUM_BF16, .n_layers = 4, .n_kv_heads = 2, .head_dim = 32, .page_tokens = WORLD_PAGE_TOKENS};
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__WorkerHello h = TANDEM__WORKER__V1__WORKER_HELLO__INIT;
    uint8_t layout[KV_LAYOUT_WIRE_BYTES];
    char name[256];
    memcpy(name, p->address, sizeof(p->address));
    *strchr(name, ':') = 0;
    kv_layout_encode(&LAYOUT, layout);
    if (p->state == PEER_CONNECTING && !p->is_proved)
        world_says_challenge(p, NULL);
    h.protocol = LINK_PROTOCOL_VERSION;
    h.name = rpc_data(world_name ? world_name : name);
    h.role = rpc_data(*name == 'p' ? "prefill" : *name == 'd' ? "decode" : "store");
    h.incarnation = incarnation;
    h.fingerprint = (ProtobufCBinaryData){*name == 's' ? 0 : BLOCK_KEY_BYTES, (uint8_t *)(uintptr_t)FINGERPRINT};
    h.layout = (ProtobufCBinaryData){sizeof(layout), layout};
    h.numerics = rpc_data(*name == 's' ? "" : "exact");
    h.xfer_address = rpc_data(p->address);
    h.n_pages = world_n_pages;
    h.kv_codec = rpc_data(*name == 's' ? world_codec : "");
    h.max_context = world_max_context ? world_max_context : router->config.max_positions;
    h.max_batch = 64;
    h.chunk_tokens = 512;
    h.vocab_size = router->config.vocab_size;
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_HELLO;
    m.hello = &h;
    m.number = p->n_heard + 1;
    peer_message(p, &m);
}

static inline void world_hello(struct peer *p, uint64_t incarnation)
{
    world_says_hello(p, incarnation);
    ck_assert_msg(p->state == PEER_READY, "%s: %s", p->name, p->why);
}

/* p begins a stream: also after it was lost. */
static inline void world_connect(struct peer *p, uint64_t incarnation)
{
    p->retry_ns = 0;
    peer_tick(p, router_patience(router));
    world_hello(p, incarnation);
}

/* more: further words of the command line, NULL or ended by NULL. */
static inline void world_open_with(const char *roles, const char *const *more)
{
    static char workers[512]; /* the router borrows it */
    char *strings = NULL;
    const char *argv[32] = {"router", "--model",        DEMO_MODEL,   "--text-threads",   "1",           "--log-level",
                            "error",  "--admin-listen", "unix:admin", "--cluster-listen", "unix:cluster"};
    int argc = 11;
    struct router_options options = {0};
    enum options_action action;
    struct td_error e = {{0}};
    const struct options table = {
        .program = "router", .usage = "", .about = "", .env_prefix = NULL, .table = ROUTER_OPTIONS};
    *workers = 0;
    for (uint32_t i = 0; roles[i]; i++)
        snprintf(workers + strlen(workers), 16, "%s%c%u:1", i ? "," : "", roles[i], i);
    argv[argc++] = "--workers";
    argv[argc++] = workers;
    while (more && *more)
        argv[argc++] = *more++;
    if (options_parse(&table, argc, (char **)(uintptr_t)argv, &options, NULL, NULL, &strings, &action, &e) ||
        router_open(&options, &router, &e))
        ck_abort_msg("%s", e.text);
    clock_init_virtual(&router->clock, WORLD_START_NS);
    absence_init(&router->absence, &router->clock, UINT64_MAX / 2); /* tests let time jump */
    router->opened_ns = router->able_ns = WORLD_START_NS;
    router->ready = true; /* the workers have no blocks to tell */
    for (uint32_t i = 0; i < router->n_peers; i++)
        world_connect(router->peers[i], 100 + i);
    free(strings);
}

static inline void world_open(const char *roles)
{
    world_open_with(roles, NULL);
}

static inline void world_close(void)
{
    router_close(router);
    router = NULL;
}

static inline void world_wait_ms(uint64_t ms)
{
    clock_advance(&router->clock, ms * NS_PER_MS);
}

/* -------------------------------------------------------------------- tokens */

/* Ids of a text; the caller frees them. */
static inline struct token_ids ids_of(const char *text)
{
    struct token_ids ids = {0};
    struct td_error e;
    ck_assert_int_eq(tokenizer_encode(router->tokenizer, text, strlen(text), false, &ids, &e), TD_OK);
    return ids;
}

/* The token that is one byte: the first 256 ids are the bytes in the order of GPT-2. */
static inline uint32_t id_of_byte(uint8_t byte)
{
    uint32_t n = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int b = 0; b < 256; b++) {
            bool printable = (b > 32 && b < 127) || (b > 160 && b != 173);
            if (printable == (pass == 0)) {
                if (b == byte)
                    return n;
                n++;
            }
        }
    return UINT32_MAX;
}

/* ------------------------------------------------------------------ requests */

/* One client's call, and the request while it is not over. */
struct client {
    struct rpc_call *call;
    struct request *q;
    uint64_t counter;  /* transfer id under which the worker_* functions speak */
    uint32_t n_tokens; /* tokens that workers sent */
};

/* The request still exists. Asks the list, since q may be freed. */
static inline bool is_alive(const struct client *c)
{
    const struct request *q;
    TAILQ_FOREACH (q, &router->requests, in_router)
        if (q == c->q)
            return true;
    return false;
}

/* Validates, queues and places a request, as a text thread and the owner do. */
static inline struct client ask(const Tandem__V1__GenerateRequest *m)
{
    struct client c = {.call = call_open()};
    struct td_error e = {{0}};
    struct request *q = mem_zalloc(sizeof(*q));
    ck_assert_msg(!params_parse(router, m, INT64_MAX, &q->p, &e), "%s", e.text);
    q->router = router;
    q->call = rpc_call_ref(c.call);
    q->arrived_ns = q->tokenized_ns = clock_now(&router->clock);
    q->detok = token_stream_open(router->tokenizer, q->p.skip_special);
    choices_open(q);
    router_enqueue(router, q);
    place_queued(router);
    c.q = q; /* freed already if it was refused */
    c.counter = is_alive(&c) ? q->counter : 0;
    return c;
}

static inline Tandem__Worker__V1__TransferId transfer_id_of(const struct client *c)
{
    Tandem__Worker__V1__TransferId id = TANDEM__WORKER__V1__TRANSFER_ID__INIT;
    id.incarnation = router->incarnation;
    id.counter = c->counter;
    return id;
}

static inline void worker_says(struct peer *p, Tandem__Worker__V1__WorkerMessage *m)
{
    m->number = p->n_heard + 1;
    peer_message(p, m);
}

/* A worker sends one token, of this position. */
static inline void worker_token(struct client *c, struct peer *p, uint32_t id, uint32_t position, float logprob)
{
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__Tokens tokens = TANDEM__WORKER__V1__TOKENS__INIT;
    Tandem__Worker__V1__Token t = TANDEM__WORKER__V1__TOKEN__INIT, *list[] = {&t};
    Tandem__Worker__V1__TransferId xfer = transfer_id_of(c);
    t.id = &xfer;
    t.token = id;
    t.position = position;
    t.logprob = logprob;
    tokens.n_tokens = 1;
    tokens.tokens = list;
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_TOKENS;
    m.tokens = &tokens;
    worker_says(p, &m);
}

static inline void worker_accepts(struct client *c, struct peer *p)
{
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__LegAccepted accepted = TANDEM__WORKER__V1__LEG_ACCEPTED__INIT;
    Tandem__Worker__V1__TransferId xfer = transfer_id_of(c);
    accepted.id = &xfer;
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_ACCEPTED;
    m.accepted = &accepted;
    worker_says(p, &m);
}

/* A leg ends; end: what its message says, without the id. */
static inline void worker_ends_with(struct client *c, struct peer *p, Tandem__Worker__V1__LegEnd end)
{
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__TransferId xfer = transfer_id_of(c);
    end.id = &xfer;
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_END;
    m.end = &end;
    worker_says(p, &m);
}

static inline void worker_ends(struct client *c, struct peer *p, const char *finish_reason)
{
    Tandem__Worker__V1__LegEnd end = TANDEM__WORKER__V1__LEG_END__INIT;
    end.finish_reason = rpc_data(finish_reason);
    worker_ends_with(c, p, end);
}

static inline void worker_fails(struct client *c, struct peer *p, enum td_status status)
{
    Tandem__Worker__V1__LegEnd end = TANDEM__WORKER__V1__LEG_END__INIT;
    end.status = status;
    end.text = rpc_data("it failed");
    worker_ends_with(c, p, end);
}

/* A heartbeat: p has received, and its engine has taken, all messages so far; it has these legs. */
static inline void worker_beats(struct peer *p, const uint64_t *legs, uint32_t n_legs)
{
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__Load load = TANDEM__WORKER__V1__LOAD__INIT;
    load.heard = load.taken = p->n_said;
    load.legs = (uint64_t *)(uintptr_t)legs;
    load.n_legs = n_legs;
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_LOAD;
    m.load = &load;
    worker_says(p, &m);
}

/* The latest leg that p was sent; NULL: none. Borrowed from its stream. */
static inline const Tandem__Worker__V1__Leg *last_leg(const struct peer *p)
{
    for (uint32_t i = p->call->n_sent; i-- > 0;) {
        const Tandem__Worker__V1__RouterMessage *m = (Tandem__Worker__V1__RouterMessage *)p->call->sent[i];
        if (m->kind_case == TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_LEG)
            return m->leg;
    }
    return NULL;
}

/* How many of p's messages cancel the transfer id `counter`. */
static inline uint32_t count_cancels(const struct peer *p, uint64_t counter)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->call->n_sent; i++) {
        const Tandem__Worker__V1__RouterMessage *m = (Tandem__Worker__V1__RouterMessage *)p->call->sent[i];
        n += m->kind_case == TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_CANCEL && m->cancel->id->counter == counter;
    }
    return n;
}

/* ------------------------------------------------------------------- answers */

enum { ANSWER_MAX = 4096 };

/* All that the client got so far, put together. */
struct answer {
    char text[ANSWER_MAX];
    uint32_t n_bytes, n_ids, n_messages, n_ends;
    uint32_t ids[ANSWER_MAX];
    float logprobs[ANSWER_MAX];
    const Tandem__V1__GenerateEnd *end; /* borrowed from the call; NULL: none yet */
};

static inline struct answer answer_of(const struct client *c)
{
    static struct answer a;
    a = (struct answer){.n_messages = c->call->n_sent};
    for (uint32_t i = 0; i < c->call->n_sent; i++) {
        const Tandem__V1__GenerateResponse *m = (Tandem__V1__GenerateResponse *)c->call->sent[i];
        ck_assert_uint_lt(a.n_bytes + m->text.len, ANSWER_MAX);
        ck_assert_uint_lt(a.n_ids + m->n_tokens, ANSWER_MAX);
        if (m->text.len)
            memcpy(a.text + a.n_bytes, m->text.data, m->text.len);
        a.n_bytes += (uint32_t)m->text.len;
        for (size_t t = 0; t < m->n_tokens; t++) {
            a.ids[a.n_ids] = m->tokens[t]->id;
            a.logprobs[a.n_ids++] = m->tokens[t]->logprob;
        }
        ck_assert_msg(!a.end, "a message after the end");
        a.end = m->end;
        a.n_ends += m->end != NULL;
    }
    return a;
}

static inline bool is_text(ProtobufCBinaryData b, const char *text)
{
    return b.len == strlen(text) && !memcmp(b.data, text, b.len);
}
