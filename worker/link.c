/*
 * Links to routers: one gRPC call each.
 *
 *   on_open -> on_hello (challenge) -> on_proof (LINK_UP, enters the list of the server) -> on_message*
 *           -> on_end (LINK_GONE)
 *
 * A link is counted. The call holds one reference until on_end, every mail holds one, and a leg holds one as
 * long as it exists; so a link outlives its call, and sending to it then does nothing.
 *
 * Locks: link_server.lock before link.lock. Numbers of messages and the list of legs change under link.lock
 * together with the queueing, so messages are queued in the order of their numbers, and a Load never shows
 * half of a change.
 */
#include "worker/link.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/list.h"
#include "base/mem.h"
#include "worker/proof.h"

struct link {
    _Atomic uint32_t refs;
    LIST_ENTRY(link) in_server; /* between hello and end */
    struct link_server *server;
    struct rpc_call *call;
    /* What hello and challenge said; router's incarnation. Used by on_message() only, until `up`. */
    struct proof_said said;
    bool is_challenged;
    /* The proof was accepted. Set once, by an rpc thread; the first Load may follow at once. */
    bool up;
    /* Messages that arrived, the hello included. */
    _Atomic uint32_t n_heard;
    /*
     * Guards the members below. Engine, beat and rpc threads send: a message gets its number and its place in
     * the queue in one step.
     */
    pthread_mutex_t lock;
    uint32_t n_said;
    /* Number of the last message that was handled; counters of the legs that the engine has. */
    uint32_t n_taken, n_legs, cap_legs;
    uint64_t *legs;
};

struct link_server {
    struct link_server_config config;
    struct rpc_server *rpc;
    struct rpc_method method;
    char address[REACH_BYTES]; /* at which routers reach it; under the lock until the server is open */
    /* Guards the list of links: rpc threads change it, the engine and beat threads walk it. Held while the
     * server opens: the first streams wait for the address. */
    pthread_mutex_t lock;
    LIST_HEAD(, link) links;
};

struct link *link_ref(struct link *link)
{
    atomic_fetch_add(&link->refs, 1);
    return link;
}

void link_unref(struct link *link)
{
    if (link && atomic_fetch_sub(&link->refs, 1) == 1) {
        rpc_call_unref(link->call);
        pthread_mutex_destroy(&link->lock);
        free(link->legs);
        free(link);
    }
}

uint64_t link_router_incarnation(const struct link *link)
{
    return link->said.incarnation;
}

void link_leg_began(struct link *link, uint64_t counter)
{
    pthread_mutex_lock(&link->lock);
    link->legs = MEM_ROOM(link->legs, link->n_legs, link->cap_legs, 16);
    link->legs[link->n_legs++] = counter;
    pthread_mutex_unlock(&link->lock);
}

void link_leg_ended(struct link *link, uint64_t counter)
{
    pthread_mutex_lock(&link->lock);
    uint32_t i = 0;
    while (i < link->n_legs && link->legs[i] != counter)
        i++;
    if (i < link->n_legs)
        link->legs[i] = link->legs[--link->n_legs];
    pthread_mutex_unlock(&link->lock);
}

static void note_taken(struct link *link, uint32_t number)
{
    pthread_mutex_lock(&link->lock);
    link->n_taken = number;
    pthread_mutex_unlock(&link->lock);
}

void link_mail_free(struct link_mail *mail)
{
    if (mail->kind != LINK_GONE)
        note_taken(mail->link, mail->message ? mail->message->number : 2); /* LINK_UP: the proof, number 2 */
    if (mail->message)
        tandem__worker__v1__router_message__free_unpacked(mail->message, NULL);
    link_unref(mail->link);
    free(mail);
}

/* Hands mail to the owner, with a reference of its own. */
static void deliver(struct link *link, enum link_mail_kind kind, Tandem__Worker__V1__RouterMessage *message)
{
    struct link_mail *mail = mem_zalloc(sizeof(*mail));
    mail->kind = kind;
    mail->link = link_ref(link);
    mail->message = message;
    link->server->config.deliver(link->server->config.user, mail);
}

/* Numbers and queues a message. A Load also gets what this link has heard and taken, and its legs. */
static enum td_status send_numbered(struct link *link, const Tandem__Worker__V1__WorkerMessage *message)
{
    Tandem__Worker__V1__WorkerMessage m = *message;
    Tandem__Worker__V1__Load load = TANDEM__WORKER__V1__LOAD__INIT;
    if (m.kind_case == TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_LOAD) {
        load = *m.load;
        load.heard = atomic_load(&link->n_heard);
        m.load = &load;
    }
    pthread_mutex_lock(&link->lock);
    load.taken = link->n_taken;
    load.n_legs = link->n_legs;
    load.legs = link->legs;
    m.number = ++link->n_said;
    enum td_status status = rpc_call_send(link->call, &m.base);
    pthread_mutex_unlock(&link->lock);
    return status;
}

void link_send(struct link *link, const Tandem__Worker__V1__WorkerMessage *message)
{
    if (send_numbered(link, message) == TD_ERR_NO_SPACE) {
        log_error(link->server->config.log, "router does not read; cut off router=%016llx",
                  (unsigned long long)link->said.incarnation);
        rpc_call_abort(link->call, RPC_RESOURCE_EXHAUSTED, "worker's queue to this router is full");
    }
}

void link_server_send_others(struct link_server *s, const struct link *except,
                             const Tandem__Worker__V1__WorkerMessage *message)
{
    pthread_mutex_lock(&s->lock);
    struct link *l;
    LIST_FOREACH (l, &s->links, in_server)
        if (l != except)
            link_send(l, message);
    pthread_mutex_unlock(&s->lock);
}

void link_server_send_all(struct link_server *s, const Tandem__Worker__V1__WorkerMessage *message)
{
    link_server_send_others(s, NULL, message);
}

static void on_open(struct rpc_call *call, void *user)
{
    struct link *link = mem_zalloc(sizeof(*link));
    atomic_init(&link->refs, 1);
    pthread_mutex_init(&link->lock, NULL);
    link->server = user;
    link->call = rpc_call_ref(call);
    rpc_call_set_user(call, link);
}

/* Answers with a challenge, in which this side proves the secret. */
static void on_hello(struct link *link, const Tandem__Worker__V1__RouterHello *hello)
{
    struct link_server *s = link->server;
    uint8_t proof[SECRET_MAC_BYTES];
    char text[80], local[RPC_PEER_BYTES];
    if (hello->protocol != LINK_PROTOCOL_VERSION) {
        snprintf(text, sizeof(text), "protocol version differs: this worker speaks %d", LINK_PROTOCOL_VERSION);
        rpc_call_finish(link->call, RPC_FAILED_PRECONDITION, text, 0);
        return;
    }
    if (!proof_nonce_read(hello->nonce, link->said.router)) {
        rpc_call_finish(link->call, RPC_INVALID_ARGUMENT, "nonce: has 16 bytes", 0);
        return;
    }
    link->said.incarnation = hello->incarnation;
    secret_nonce(link->said.worker);
    struct proof_said said = link->said;
    rpc_call_local(link->call, local);
    pthread_mutex_lock(&s->lock);
    said.address = s->address;
    pthread_mutex_unlock(&s->lock);
    said.local = local;
    proof_sign(s->config.secret, ATTACH_WORKER, &said, proof);
    Tandem__Worker__V1__Challenge challenge = TANDEM__WORKER__V1__CHALLENGE__INIT;
    Tandem__Worker__V1__WorkerMessage message = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    challenge.nonce = (ProtobufCBinaryData){sizeof(link->said.worker), link->said.worker};
    challenge.proof = (ProtobufCBinaryData){sizeof(proof), proof};
    challenge.address = rpc_data(said.address);
    challenge.local = rpc_data(said.local);
    message.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_CHALLENGE;
    message.challenge = &challenge;
    link->is_challenged = true;
    link_send(link, &message);
}

/* Answers before the link enters the list: the first message after the challenge is the hello. */
static void on_proof(struct link *link, const Tandem__Worker__V1__Proof *proof)
{
    struct link_server *s = link->server;
    char who[RPC_PEER_BYTES];
    if (!proof_verify(s->config.secret, ATTACH_ROUTER, &link->said, proof->proof)) {
        rpc_call_peer(link->call, who);
        log_limited(s->config.log, LOG_WARN, "router without the cluster secret refused from=%s", who);
        rpc_call_finish(link->call, RPC_UNAUTHENTICATED, "proof: not by this cluster's secret", 0);
        return;
    }
    rpc_call_proved(link->call);
    Tandem__Worker__V1__WorkerHello answer = TANDEM__WORKER__V1__WORKER_HELLO__INIT;
    Tandem__Worker__V1__WorkerMessage message = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    answer.protocol = LINK_PROTOCOL_VERSION;
    s->config.hello(s->config.user, &answer);
    message.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_HELLO;
    message.hello = &answer;
    link_send(link, &message);
    pthread_mutex_lock(&s->lock);
    LIST_INSERT_HEAD(&s->links, link, in_server);
    link->up = true;
    pthread_mutex_unlock(&s->lock);
    deliver(link, LINK_UP, NULL);
}

/* The kind of message that must come now; NOT_SET: any but these two. */
static int kind_due(const struct link *link)
{
    return link->up              ? TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND__NOT_SET
           : link->is_challenged ? TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_PROOF
                                 : TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_HELLO;
}

static bool is_due(const struct link *link, int kind)
{
    int due = kind_due(link);
    if (link->is_challenged && kind == TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_REFUSAL)
        return true; /* also instead of a proof: the router does not take ours */
    if (due != TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND__NOT_SET)
        return kind == due;
    return kind != TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND__NOT_SET &&
           kind != TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_HELLO &&
           kind != TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_PROOF;
}

static void on_message(struct rpc_call *call, const ProtobufCMessage *base)
{
    struct link *link = rpc_call_user(call);
    const Tandem__Worker__V1__RouterMessage *m = (const Tandem__Worker__V1__RouterMessage *)base;
    if (!is_due(link, m->kind_case)) {
        rpc_call_finish(call, RPC_INVALID_ARGUMENT, "kind: a stream begins with a hello and a proof, one of each", 0);
        return;
    }
    bool is_hello = m->kind_case == TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_HELLO;
    /* The number of a hello is not checked: on_hello() reports another version first. */
    if (m->number != atomic_fetch_add(&link->n_heard, 1) + 1 && !is_hello) {
        log_limited(link->server->config.log, LOG_WARN,
                    "stream is unsound: a message is missing or doubled router=%016llx",
                    (unsigned long long)link->said.incarnation);
        rpc_call_finish(call, RPC_DATA_LOSS, "number: a message is missing or doubled", 0);
        return;
    }
    switch (m->kind_case) {
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_HELLO:
        on_hello(link, m->hello);
        break;
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_PROOF:
        on_proof(link, m->proof);
        break;
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_REFUSAL:
        log_limited(link->server->config.log, LOG_ERROR, "router refuses this worker router=%016llx why='%.*s'",
                    (unsigned long long)link->said.incarnation, (int)m->refusal->why.len,
                    m->refusal->why.len ? (const char *)m->refusal->why.data : "");
        break;
    default:
        deliver(link, LINK_MESSAGE, (Tandem__Worker__V1__RouterMessage *)rpc_call_take(call, base));
    }
}

/* The link leaves the list before LINK_GONE is delivered: no message follows it. */
static void on_end(struct rpc_call *call, enum rpc_code code, const char *text)
{
    (void)code, (void)text;
    struct link *link = rpc_call_user(call);
    struct link_server *s = link->server;
    pthread_mutex_lock(&s->lock);
    if (link->up)
        LIST_REMOVE(link, in_server);
    pthread_mutex_unlock(&s->lock);
    if (link->up)
        deliver(link, LINK_GONE, NULL);
    link_unref(link);
}

static void on_half_close(struct rpc_call *call)
{
    rpc_call_finish(call, RPC_OK, "", 0);
}

enum td_status link_server_open(const struct link_server_config *config, struct link_server **out,
                                struct td_error *error_out)
{
    struct link_server *s = mem_zalloc(sizeof(*s));
    s->config = *config;
    pthread_mutex_init(&s->lock, NULL);
    s->method =
        (struct rpc_method){.path = "/tandem.worker.v1.Worker/Attach",
                            .request = &tandem__worker__v1__router_message__descriptor,
                            .handlers = {.on_message = on_message, .on_half_close = on_half_close, .on_end = on_end},
                            .on_open = on_open,
                            .must_prove = true};
    const struct rpc_server_config rpc = {.listen = config->reach->listen,
                                          .tls = config->tls,
                                          .methods = &s->method,
                                          .n_methods = 1,
                                          .max_message_bytes = LINK_MAX_MESSAGE_BYTES,
                                          .max_queued_bytes = LINK_MAX_MESSAGE_BYTES,
                                          .max_calls = LINK_MAX_STREAMS,
                                          .faults = config->faults,
                                          .log = config->log,
                                          .user = s};
    pthread_mutex_lock(&s->lock);
    enum td_status status = rpc_server_open(&rpc, &s->rpc, error_out);
    if (!status)
        reach_rpc(config->reach, rpc_server_address(s->rpc), s->address);
    pthread_mutex_unlock(&s->lock);
    if (status) {
        link_server_close(s);
        return status;
    }
    rpc_server_set_serving(s->rpc, true);
    *out = s;
    return TD_OK;
}

const char *link_server_address(const struct link_server *s)
{
    return rpc_server_address(s->rpc);
}

const char *link_server_reached(const struct link_server *s)
{
    return s->address;
}

void link_server_close(struct link_server *s)
{
    if (!s)
        return;
    rpc_server_close(s->rpc);
    pthread_mutex_destroy(&s->lock);
    free(s);
}
