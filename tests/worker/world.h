/*
 * Real workers (engine, pool, transfers over loopback) whose routers are the test: links are calls in memory
 * (tests/calls.h).
 *
 * The test is the engine thread of every worker: turns_until() runs the workers in turn, one step each.
 * Compute is simulated and takes no time, unless a test asks for a real one; either way the tokens depend on
 * the KV that lies in the pages. Only the xfer threads are real, so whatever moves pages is waited for.
 */
#pragma once

#include <fcntl.h>
#include <inttypes.h>
#include <math.h>

#include "tests/calls.h"
#include "tests/tap.h"
#include "worker/proof.h"
#include "worker/worker_internal.h"

#define WORLD_DIMS "layers=2,hidden=32,heads=2,kv_heads=2,head_dim=16,ffn=64,vocab=256"
enum {
    WORLD_PAGE_TOKENS = 16,
    WORLD_PAGES = 64,
    WORLD_ROUTER = 77, /* incarnation of the router that speaks, unless a test says another one; as node_id() */
    WORLD_MAX = 4,     /* workers, and routers of a worker */
};

/* Kinds of legs and of a worker's messages, in short. */
enum {
    PREFILL = TANDEM__WORKER__V1__LEG_KIND__LEG_PREFILL,
    DECODE = TANDEM__WORKER__V1__LEG_KIND__LEG_DECODE,
    AGGREGATED = TANDEM__WORKER__V1__LEG_KIND__LEG_AGGREGATED,
    ACCEPTED = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_ACCEPTED,
    TOKENS = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_TOKENS,
    END = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_END,
    LOAD = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_LOAD,
    EVENTS = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_EVENTS,
    AUDIT = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_AUDIT,
};

struct router_end { /* a router's end of its stream */
    struct rpc_call *call;
    uint64_t incarnation;
    uint32_t n_said;
};

struct node_worker {
    struct worker *w;
    char *strings;
    struct router_end routers[WORLD_MAX];
    uint32_t n_routers;
};

static struct xfer_hub *world_hub;
static struct node_worker workers[WORLD_MAX];
static uint32_t n_workers;
/* Of workers that are opened from now on. "cpu" takes 0.1 s to draw its weights. */
static const char *world_engine = "sim", *world_decode_us = "0,0,0";

static bool world_has_net; /* transfers of workers that are opened from now on use TCP */

/* ------------------------------------------------------------------ workers */

static inline enum td_status world_try(const char *role, const char *const *more, struct td_error *e)
{
    struct node_worker *n = &workers[n_workers];
    char name[16];
    const char *argv[40] = {"worker",
                            "--dummy",
                            WORLD_DIMS,
                            "--numerics",
                            "f32",
                            "--threads",
                            "1",
                            "--pages",
                            "64",
                            "--max-context",
                            "512",
                            "--chunk-tokens",
                            "16",
                            "--name",
                            name,
                            "--log-level",
                            "error",
                            "--no-packed-cache",
                            "--engine",
                            world_engine,
                            "--sim-prefill",
                            "0,0,0",
                            "--sim-decode",
                            world_decode_us};
    int argc = 24;
    struct worker_config config = {.role = role};
    enum options_action action;
    const struct options table = {
        .program = "worker", .usage = "", .about = "", .env_prefix = NULL, .table = WORKER_OPTIONS};
    if (!world_hub && !world_has_net)
        world_hub = xfer_hub_open();
    config.hub = world_hub;
    snprintf(name, sizeof(name), "%c%u", *role, n_workers);
    while (more && *more)
        argv[argc++] = *more++;
    enum td_status s =
        options_parse(&table, argc, (char **)(uintptr_t)argv, &config.options, NULL, NULL, &n->strings, &action, e);
    if (!s)
        s = worker_open(&config, &n->w, e);
    n_workers += !s;
    if (s)
        free(n->strings);
    return s;
}

static inline void router_says(struct router_end *r, Tandem__Worker__V1__RouterMessage *m)
{
    m->number = ++r->n_said;
    call_says(r->call, &m->base);
}

static inline void router_says_hello(struct router_end *r, uint32_t protocol)
{
    static uint8_t nonce[SECRET_NONCE_BYTES] = "router";
    Tandem__Worker__V1__RouterHello hello = TANDEM__WORKER__V1__ROUTER_HELLO__INIT;
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    hello.protocol = protocol;
    hello.incarnation = r->incarnation;
    hello.nonce = (ProtobufCBinaryData){sizeof(nonce), nonce};
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_HELLO;
    m.hello = &hello;
    router_says(r, &m);
}

/* The worker has answered the hello with a challenge. NULL: no secret. */
static inline void router_says_proof(struct router_end *r, const char *text)
{
    uint8_t mac[SECRET_MAC_BYTES];
    struct proof_said said = {.incarnation = r->incarnation, .router = "router"};
    struct secret *secret = NULL;
    const Tandem__Worker__V1__WorkerMessage *first = (Tandem__Worker__V1__WorkerMessage *)r->call->sent[0];
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Proof proof = TANDEM__WORKER__V1__PROOF__INIT;
    ck_assert_int_eq(first->kind_case, TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_CHALLENGE);
    ck_assert(proof_nonce_read(first->challenge->nonce, said.worker));
    ck_assert(!secret_open(text, NULL, NULL, &secret, NULL));
    proof_sign(secret, ATTACH_ROUTER, &said, mac);
    secret_close(secret);
    proof.proof = (ProtobufCBinaryData){sizeof(mac), mac};
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_PROOF;
    m.proof = &proof;
    router_says(r, &m);
}

/* A router attaches to n. Its first messages are queued, not handled. */
static inline struct router_end *world_attach(struct node_worker *n, uint64_t incarnation)
{
    struct router_end *r = &n->routers[n->n_routers++];
    *r = (struct router_end){call_to(worker_address(n->w), "/tandem.worker.v1.Worker/Attach"), incarnation, 0};
    router_says_hello(r, LINK_PROTOCOL_VERSION);
    router_says_proof(r, NULL);
    return r;
}

/* A worker with one router. more: further words of the command line, NULL or ended by NULL. */
static inline struct node_worker *world_worker(const char *role, const char *const *more)
{
    struct td_error e = {{0}};
    struct node_worker *n = &workers[n_workers];
    enum td_status s = world_try(role, more, &e);
    ck_assert_msg(!s, "%s", e.text);
    world_attach(n, WORLD_ROUTER);
    worker_turn(n->w, 0);
    return n;
}

static inline void router_leaves(struct router_end *r)
{
    call_leaves(r->call);
    rpc_call_unref(r->call);
    r->call = NULL;
}

/* What n logs from now on is expected, and not shown. */
static inline void world_hush(struct node_worker *n)
{
    static int nowhere;
    nowhere = nowhere ? nowhere : open("/dev/null", O_WRONLY);
    n->w->log.fd = nowhere;
}

static inline void world_close_worker(struct node_worker *n)
{
    worker_close(n->w);
    n->w = NULL;
    for (uint32_t i = 0; i < n->n_routers; i++)
        rpc_call_unref(n->routers[i].call);
    n->n_routers = 0;
    free(n->strings);
}

static inline void world_close(void)
{
    world_engine = "sim";
    world_decode_us = "0,0,0"; /* the tests may share a process */
    for (uint32_t i = 0; i < n_workers; i++)
        if (workers[i].w)
            world_close_worker(&workers[i]);
    if (world_hub)
        xfer_hub_close(world_hub);
    world_hub = NULL;
    n_workers = 0;
}

static inline uint64_t world_wall_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

static inline void turn_all(void)
{
    for (uint32_t i = 0; i < n_workers; i++)
        if (workers[i].w)
            worker_turn(workers[i].w, 1);
}

/* Runs all workers until the condition holds; fails the test after 20 s. */
#define turns_until(condition)                                                                                         \
    do {                                                                                                               \
        uint64_t turns_limit = world_wall_ns() + 20 * NS_PER_S;                                                        \
        while (!(condition)) {                                                                                         \
            ck_assert_msg(world_wall_ns() < turns_limit, "waited in vain for: %s", #condition);                        \
            turn_all();                                                                                                \
        }                                                                                                              \
    } while (0)

/* --------------------------------------------------------------------- legs */

enum { LEG_MAX_IDS = 600 };

struct leg_message { /* made by leg_make(), which points its parts at each other */
    Tandem__Worker__V1__Leg m;
    Tandem__Worker__V1__SamplingParams sampling;
    Tandem__Worker__V1__TransferId id;
    uint32_t ids[LEG_MAX_IDS];
    uint8_t root[BLOCK_KEY_BYTES];
};

/* A greedy leg over a prompt of n_prompt tokens that follow from `text`, for max_tokens tokens. */
static inline void leg_make(struct leg_message *l, int kind, uint64_t counter, uint32_t text, uint32_t n_prompt)
{
    tandem__worker__v1__leg__init(&l->m);
    tandem__worker__v1__sampling_params__init(&l->sampling);
    tandem__worker__v1__transfer_id__init(&l->id);
    l->id.incarnation = WORLD_ROUTER;
    l->id.counter = counter;
    for (uint32_t i = 0; i < n_prompt; i++)
        l->ids[i] = (text * 97 + i * 31 + 5) % 256;
    memset(l->root, 1, sizeof(l->root));
    l->sampling.top_p = 1;
    l->sampling.repetition_penalty = 1;
    l->sampling.max_tokens = 4;
    l->sampling.n_prompt = n_prompt;
    l->m.id = &l->id;
    l->m.kind = (Tandem__Worker__V1__LegKind)kind;
    l->m.ids = l->ids;
    l->m.n_ids = n_prompt;
    l->m.sampling = &l->sampling;
    l->m.prefix_root = (ProtobufCBinaryData){sizeof(l->root), l->root};
}

static inline void router_sends_leg(struct router_end *r, struct leg_message *l)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_LEG;
    m.leg = &l->m;
    router_says(r, &m);
}

static inline void router_cancels(struct router_end *r, uint64_t incarnation, uint64_t counter)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Cancel cancel = TANDEM__WORKER__V1__CANCEL__INIT;
    Tandem__Worker__V1__TransferId id = TANDEM__WORKER__V1__TRANSFER_ID__INIT;
    id.incarnation = incarnation;
    id.counter = counter;
    cancel.id = &id;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_CANCEL;
    m.cancel = &cancel;
    router_says(r, &m);
}

static inline void router_drains(struct router_end *r, uint32_t limit_ms)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Drain drain = TANDEM__WORKER__V1__DRAIN__INIT;
    drain.limit_ms = limit_ms;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_DRAIN;
    m.drain = &drain;
    router_says(r, &m);
}

/* ------------------------------------------------------------------ answers */

/* The message of number `at`, from 0, that this router got. */
static inline const Tandem__Worker__V1__WorkerMessage *message_at(const struct router_end *r, uint32_t at)
{
    return (const Tandem__Worker__V1__WorkerMessage *)r->call->sent[at];
}

/* The latest message of this kind; NULL: none. */
static inline const Tandem__Worker__V1__WorkerMessage *last_of(const struct router_end *r, int kind)
{
    for (uint32_t i = r->call->n_sent; i-- > 0;)
        if ((int)message_at(r, i)->kind_case == kind)
            return message_at(r, i);
    return NULL;
}

static inline uint32_t count_of(const struct router_end *r, int kind)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->call->n_sent; i++)
        n += (int)message_at(r, i)->kind_case == kind;
    return n;
}

/* The ends of the leg that this router got; *end_out: the first one. */
static inline uint32_t ends_of(const struct router_end *r, uint64_t counter, const Tandem__Worker__V1__LegEnd **end_out)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->call->n_sent; i++) {
        const Tandem__Worker__V1__WorkerMessage *m = message_at(r, i);
        if (m->kind_case != TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_END || m->end->id->counter != counter)
            continue;
        if (!n++ && end_out)
            *end_out = m->end;
    }
    return n;
}

/* The leg's only end; NULL: none yet. */
static inline const Tandem__Worker__V1__LegEnd *end_of(const struct router_end *r, uint64_t counter)
{
    const Tandem__Worker__V1__LegEnd *end = NULL;
    uint32_t n = ends_of(r, counter, &end);
    ck_assert_msg(n <= 1, "%u ends of leg %" PRIu64, n, counter);
    return end;
}

static inline bool is_text(ProtobufCBinaryData b, const char *text)
{
    return b.len == strlen(text) && !memcmp(b.data, text, b.len);
}

/* Fails unless the leg ended with this status and text; text NULL: any. */
static inline void check_end(const struct router_end *r, uint64_t counter, enum td_status status, const char *text)
{
    const Tandem__Worker__V1__LegEnd *end = end_of(r, counter);
    ck_assert_msg(end != NULL, "leg %" PRIu64 " has not ended", counter);
    ck_assert_msg(end->status == (int)status && (!text || is_text(end->text, text)),
                  "leg %" PRIu64 " ended with %s '%.*s'", counter, td_status_name((enum td_status)end->status),
                  (int)end->text.len, end->text.len ? (const char *)end->text.data : "");
}

struct tokens { /* of one leg, by position */
    uint32_t n, ids[LEG_MAX_IDS];
    const Tandem__Worker__V1__Token *first, *last;
};

/* All tokens of the leg. Their positions must be [from, from + n), each once and in order. */
static inline struct tokens tokens_from(const struct router_end *r, uint64_t counter, uint32_t from)
{
    struct tokens t = {0};
    for (uint32_t i = 0; i < r->call->n_sent; i++) {
        const Tandem__Worker__V1__WorkerMessage *m = message_at(r, i);
        for (size_t j = 0; m->kind_case == TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_TOKENS && j < m->tokens->n_tokens;
             j++) {
            const Tandem__Worker__V1__Token *token = m->tokens->tokens[j];
            if (token->id->counter != counter)
                continue;
            ck_assert_uint_eq(token->position, from + t.n);
            t.ids[t.n++] = token->token;
            t.first = t.first ? t.first : token;
            t.last = token;
        }
    }
    return t;
}

static inline struct tokens tokens_of(const struct router_end *r, uint64_t counter)
{
    return tokens_from(r, counter, 0);
}

static inline void check_same_tokens(const struct tokens *a, const struct tokens *b)
{
    ck_assert_uint_eq(a->n, b->n);
    for (uint32_t i = 0; i < a->n; i++)
        ck_assert_msg(a->ids[i] == b->ids[i], "token %u: %u and %u", i, a->ids[i], b->ids[i]);
}

/* -------------------------------------------------------------------- audit */

/* Asks the worker to account for all pages. The answer is borrowed from the call. */
static inline const Tandem__Worker__V1__Audit *audit_of(struct node_worker *n)
{
    struct router_end *r = &n->routers[0];
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__AuditRequest ask = TANDEM__WORKER__V1__AUDIT_REQUEST__INIT;
    uint32_t before = count_of(r, AUDIT);
    ask.nonce = before + 1;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_AUDIT;
    m.audit = &ask;
    router_says(r, &m);
    turns_until(count_of(r, AUDIT) > before);
    const Tandem__Worker__V1__Audit *a = last_of(r, AUDIT)->audit;
    ck_assert_uint_eq(a->nonce, before + 1);
    return a;
}

/* No leg, lease or pull, and nobody holds a page; waits for the wire. */
static inline void check_quiet(struct node_worker *n)
{
    turns_until(LIST_EMPTY(&n->w->legs) && !n->w->n_wire && LIST_EMPTY(&n->w->offers));
    turns_until(!kvpool_audit(engine_pool(n->w->engine)).quarantined);
    const Tandem__Worker__V1__Audit *a = audit_of(n);
    ck_assert_msg(!a->n_problems, "%.*s", (int)a->problems[0].len, (const char *)a->problems[0].data);
    ck_assert_uint_eq(a->held + a->leased + a->quarantined, 0);
    ck_assert_uint_eq(a->free + a->cached, a->total);
    ck_assert_uint_eq(a->legs + a->leases + a->pulls, 0);
    struct engine_load load = engine_load(n->w->engine);
    ck_assert_uint_eq(load.running + load.waiting + load.filling, 0);
}
