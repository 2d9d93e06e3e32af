/*
 * Fuzz targets of what clients and workers say to a router, one for each program (-DTARGET=...): see fuzz.c.
 * The router is a real one on calls in memory (tests/router/world.h).
 */
#include "tests/fuzz/no_check.h"

#include "base/endian.h"
#include "tests/router/world.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Input: a GenerateRequest, as it comes from a client. */
static void params(const uint8_t *data, size_t size)
{
    struct params p = {0};
    struct td_error e;
    if (!router)
        world_open("pd");
    Tandem__V1__GenerateRequest *m = tandem__v1__generate_request__unpack(NULL, size, data);
    if (m && !params_fits(router, m, &e) && !params_parse(router, m, INT64_MAX, &p, &e))
        params_free(&p);
    tandem__v1__generate_request__free_unpacked(m, NULL);
}

/* ------------------------------------------------------------ what workers say */

enum { CLIENTS_MAX = 8 };
static struct client clients[CLIENTS_MAX];
static uint32_t n_clients;

static void a_client_asks(uint8_t how)
{
    static uint32_t ids[100];
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    Tandem__V1__TokenPrompt prompt = TANDEM__V1__TOKEN_PROMPT__INIT;
    Tandem__V1__Sampling sampling = TANDEM__V1__SAMPLING__INIT;
    Tandem__V1__Stopping stopping = TANDEM__V1__STOPPING__INIT;
    if (n_clients == CLIENTS_MAX)
        return;
    prompt.ids = ids;
    prompt.n_ids = 10 + how % 64;
    m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TOKENS;
    m.tokens = &prompt;
    m.sampling = &sampling;
    sampling.n = 1 + (how & 1);
    m.want_prompt_logprobs = how & 2;
    m.want_ids = true;
    m.stopping = &stopping;
    stopping.has_max_tokens_case = TANDEM__V1__STOPPING__HAS_MAX_TOKENS_MAX_TOKENS;
    stopping.max_tokens = 4;
    struct params p = {0};
    struct td_error e;
    if (params_parse(router, &m, INT64_MAX, &p, &e))
        return; /* a worker has said that it can't hold so much */
    params_free(&p);
    clients[n_clients++] = ask(&m);
}

static void client_leaves(struct client *c)
{
    if (!c->call)
        return;
    (void)answer_of(c); /* nothing may follow an end */
    c->call->over = true;
    router_call_gone(router, c->call);
    rpc_call_unref(c->call);
    c->call = NULL;
}

/* A name of a transfer that a worker gives: of a request that there is, mostly. */
static void name_transfer(Tandem__Worker__V1__TransferId *id)
{
    if (!id || id->incarnation == UINT32_MAX)
        return;
    id->incarnation = router->incarnation;
    if (n_clients && id->counter < 2 * CLIENTS_MAX)
        id->counter = clients[id->counter % n_clients].counter;
}

static void worker_says_bytes(struct peer *p, const uint8_t *data, size_t size)
{
    Tandem__Worker__V1__WorkerMessage *m = tandem__worker__v1__worker_message__unpack(NULL, size, data);
    if (!m)
        return;
    if (!p->call) { /* notes of a stream that is over are dropped before they come here */
        tandem__worker__v1__worker_message__free_unpacked(m, NULL);
        return;
    }
    switch (m->kind_case) {
    case TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_ACCEPTED:
        name_transfer(m->accepted->id);
        break;
    case TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_END:
        name_transfer(m->end->id);
        break;
    case TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_TOKENS:
        for (size_t i = 0; i < m->tokens->n_tokens; i++)
            name_transfer(m->tokens->tokens[i]->id);
        break;
    default:
        break;
    }
    worker_says(p, m);
    tandem__worker__v1__worker_message__free_unpacked(m, NULL);
}

static void time_passes(uint64_t ms)
{
    world_wait_ms(ms);
    for (uint32_t i = 0; i < router->n_peers; i++)
        peer_tick(router->peers[i], router_patience(router));
    place_queued(router);
}

static bool attach(struct peer *p)
{
    static uint64_t incarnation = 200;
    if (p->state == PEER_READY) {
        call_forget(p->call);
        return true;
    }
    p->retry_ns = 0;
    peer_tick(p, router_patience(router));
    if (p->state == PEER_CONNECTING)
        world_says_hello(p, incarnation++);
    return p->state == PEER_READY;
}

/* All workers are attached, in the router that there is, if it can have them; else in a new one, which costs
 * a hundred times as much. */
static void begin(void)
{
    bool is_whole = router != NULL;
    for (uint32_t i = 0; is_whole && i < router->n_peers; i++)
        is_whole = attach(router->peers[i]);
    if (is_whole)
        return;
    if (router)
        world_close();
    world_open("pdds");
}

static void end(void)
{
    if (router)
        world_close();
}

/*
 * Input: steps. Each is one byte, and for a message a u16 length and the message's bytes. The low 3 bits of
 * the byte are the kind of step, the others the number of a worker, a client, or a length. Kinds: 0 to 2: a
 * worker's message, whose number and transfers are corrected first; 3: a client asks; 4: a client leaves;
 * 5: time passes; 6: a worker that was lost begins a stream and proves itself, and its hello is the next
 * message; 7: the same, with its hello.
 */
static void peer(const uint8_t *data, size_t size)
{
    static bool is_known;
    if (!is_known)
        atexit(end);
    is_known = true;
    begin();
    n_clients = 0;
    a_client_asks(0);
    a_client_asks(20);
    for (size_t at = 0; at < size;) {
        uint8_t what = data[at] & 7, who = data[at] >> 3;
        struct peer *p = router->peers[who % router->n_peers];
        at++;
        if (what < 3 && at + 2 <= size) {
            size_t n = get_u16(data + at);
            at += 2;
            n = n < size - at ? n : size - at;
            worker_says_bytes(p, data + at, n);
            at += n;
        } else if (what == 3)
            a_client_asks(who);
        else if (what == 4 && n_clients)
            client_leaves(&clients[who % n_clients]);
        else if (what == 5)
            time_passes(1u << (who % 16));
        else if (what == 6) {
            p->retry_ns = 0;
            peer_tick(p, router_patience(router));
            if (p->state == PEER_CONNECTING && !p->is_proved)
                world_says_challenge(p, NULL);
        } else if (what == 7)
            (void)attach(p);
    }
    for (uint32_t i = 0; i < n_clients; i++)
        client_leaves(&clients[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    void (*const all[])(const uint8_t *, size_t) = {params, peer};
    (void)all; /* each program uses only one of them */
    TARGET(data, size);
    return 0;
}
