/*
 * The admin API, for operators, and the cluster listener, at which workers and stores register. Methods run
 * on rpc threads: they check and hand over to the owner thread. Their notes are not counted with those of
 * clients, so a flood of requests does not keep operators out.
 *
 * Operators: nobody but the router's user reaches the admin socket. At a TCP address every call brings the
 * admin key. What changes something is logged with who asked, and from where.
 */
#include <openssl/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/private_dir.h"
#include "descriptors_admin.h"
#include "router/router_internal.h"
#include "router/socket.h"
#include "worker/reach.h"

enum {
    CALLS_MOST = 64,
    RPC_BYTES_MOST = 16 << 20, /* gRPC's, at each of the two listeners */
    JOIN_BYTES_MOST = 1 << 12
};

/* ------------------------------------------------------------------ operators */

static bool has_key(const struct router *r, const struct rpc_call *call)
{
    static const char BEARER[] = "Bearer ";
    const char *key = r->options.admin_key, *said = rpc_call_header(call, "authorization");
    if (!key || !*key)
        return true;
    if (!said || strncmp(said, BEARER, sizeof(BEARER) - 1))
        return false;
    said += sizeof(BEARER) - 1;
    return strlen(said) == strlen(key) && !CRYPTO_memcmp(said, key, strlen(key));
}

/* Whether the caller may ask. action: what is logged; NULL: it changes nothing. */
static bool admit(struct router *r, struct rpc_call *call, const char *action, const char *of)
{
    char who[RPC_PEER_BYTES];
    rpc_call_peer(call, who);
    bool is_allowed = has_key(r, call);
    if (!is_allowed)
        rpc_call_finish(call, RPC_UNAUTHENTICATED, "authorization: not the admin key", 0);
    if (!is_allowed)
        log_limited(&r->log, LOG_WARN, "admin refused, without the key who='%s'", who);
    else if (action)
        log_info(&r->log, "admin action=%s of='%s' who='%s'", action, of, who);
    return is_allowed;
}

static void ask_owner(struct rpc_call *call, enum note_kind kind, const char *action)
{
    struct router *r = rpc_call_user(call);
    if (!admit(r, call, action, "all"))
        return;
    struct note *note = note_new(kind);
    note->call = rpc_call_ref(call);
    mailbox_push(&r->mailbox, &note->mail);
}

static void on_status(struct rpc_call *call, const ProtobufCMessage *base)
{
    (void)base;
    ask_owner(call, NOTE_STATUS, NULL);
}

static void on_flush_all(struct rpc_call *call, const ProtobufCMessage *base)
{
    (void)base;
    ask_owner(call, NOTE_FLUSH_ALL, "flush");
}

static void on_audit(struct rpc_call *call, const ProtobufCMessage *base)
{
    (void)base;
    ask_owner(call, NOTE_AUDIT, NULL);
}

static void on_drain(struct rpc_call *call, const ProtobufCMessage *base)
{
    struct router *r = rpc_call_user(call);
    const Tandem__Admin__V1__DrainRequest *m = (const Tandem__Admin__V1__DrainRequest *)base;
    char name[LOG_WORD_BYTES];
    if (!m->name.len || m->name.len >= sizeof(r->peers[0]->name)) {
        rpc_call_finish(call, RPC_INVALID_ARGUMENT, "name: of a worker", 0);
        return;
    }
    if (!admit(r, call, "drain", log_word(m->name.data, m->name.len, name)))
        return;
    struct note *note = note_new(NOTE_DRAIN);
    memcpy(note->text, m->name.data, m->name.len);
    note->number = m->limit_ms;
    note->call = rpc_call_ref(call);
    mailbox_push(&r->mailbox, &note->mail);
}

static void on_explain(struct rpc_call *call, const ProtobufCMessage *base)
{
    struct router *r = rpc_call_user(call);
    const Tandem__Admin__V1__ExplainRequest *m = (const Tandem__Admin__V1__ExplainRequest *)base;
    if (m->request_id.len > ASK_MAX_LABEL_BYTES) {
        rpc_call_finish(call, RPC_INVALID_ARGUMENT, "request_id: too long", 0);
        return;
    }
    if (!admit(r, call, NULL, NULL))
        return;
    struct note *note = note_new(NOTE_EXPLAIN);
    if (m->request_id.len)
        memcpy(note->text, m->request_id.data, m->request_id.len);
    note->number = m->last;
    note->call = rpc_call_ref(call);
    mailbox_push(&r->mailbox, &note->mail);
}

static void fill_worker(const struct peer *p, Tandem__Admin__V1__WorkerStatus *w, Tandem__Admin__V1__Pages *pages,
                        char state[300])
{
    static const char *const STATES[] = {"connecting", "ready", "lost", "refused"}, *const ROLES[] = {
                                                                                        "prefill", "decode", "store"};
    char text[300];
    snprintf(text, sizeof(text), "%s%s%s",
             p->draining && p->state == PEER_READY  ? "draining"
             : p->stalled && p->state == PEER_READY ? "stalled"
                                                    : STATES[p->state],
             p->state == PEER_REFUSED ? ": " : "", p->state == PEER_REFUSED ? p->why : "");
    rpc_text_clean(text, strlen(text), state, 300);
    w->name = rpc_data(p->name);
    w->role = rpc_data(ROLES[p->role]);
    w->pid = p->pid;
    w->state = rpc_data(state);
    w->address = rpc_data(p->address);
    w->transport = rpc_data(p->transport);
    pages->free = p->load.free_pages;
    pages->cached = p->load.cached_pages;
    pages->held = p->load.held_pages;
    pages->leased = p->load.leased_pages;
    pages->quarantined = p->load.quarantined_pages;
    pages->total = p->load.total_pages;
    w->pages = pages;
    w->kv_bytes_in = p->load.kv_bytes_in;
    w->kv_bytes_out = p->load.kv_bytes_out;
    w->running = p->load.running;
    w->waiting = p->load.waiting;
    w->weight_bytes = p->weight_bytes;
    w->incarnation = p->incarnation;
    w->store_blocks_dram = p->load.store_blocks_dram;
    w->store_blocks_ssd = p->load.store_blocks_ssd;
    w->store_bytes_ssd = p->load.store_bytes_ssd;
    w->breaker = rpc_data(breaker_name(p->breaker.state));
}

/* Owner thread. */
void admin_answer_status(struct router *r, struct rpc_call *call)
{
    Tandem__Admin__V1__StatusResponse answer = TANDEM__ADMIN__V1__STATUS_RESPONSE__INIT;
    Tandem__Admin__V1__WorkerStatus *workers = mem_array(r->n_peers, sizeof(*workers)),
                                    **list = mem_array(r->n_peers, sizeof(*list));
    Tandem__Admin__V1__Pages *pages = mem_array(r->n_peers, sizeof(*pages));
    char(*states)[300] = mem_array(r->n_peers, sizeof(*states)), hex[33] = "";
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->n_peers; i++) {
        if (r->peers[i]->state == PEER_GONE || r->peers[i]->drained) /* it exited in order */
            continue;
        tandem__admin__v1__worker_status__init(&workers[n]);
        tandem__admin__v1__pages__init(&pages[n]);
        fill_worker(r->peers[i], &workers[n], &pages[n], states[n]);
        workers[n].unreached = mem_array(r->n_peers, sizeof(*workers[n].unreached));
        workers[n].n_unreached = pairs_unreached(r->peers[i], workers[n].unreached);
        list[n] = &workers[n];
        n++;
    }
    if (r->known)
        block_key_hex(&r->fingerprint, hex);
    answer.model = rpc_data(r->model_name);
    answer.fingerprint = rpc_data(hex);
    answer.n_workers = n;
    answer.workers = list;
    answer.queued = r->n_queued;
    answer.running = r->n_running;
    answer.accepted = metrics_get(r->counters, ROUTER_ACCEPTED);
    answer.refused = metrics_get(r->counters, ROUTER_REFUSED);
    answer.failed = metrics_get(r->counters, ROUTER_FAILED);
    answer.finished = metrics_get(r->counters, ROUTER_FINISHED);
    answer.placed_split = metrics_get(r->counters, ROUTER_SPLIT);
    answer.placed_aggregated = metrics_get(r->counters, ROUTER_AGGREGATED);
    answer.placed_kept = metrics_get(r->counters, ROUTER_KEPT);
    answer.index_blocks = index_blocks(r->index);
    answer.ready = r->ready;
    answer.replan_budget = (uint64_t)retry_budget_left(&r->budget, clock_now(&r->clock));
    for (int i = 0; i < REPLAN_REASONS; i++)
        answer.replans += metrics_get(r->replans[i], 0);
    rpc_call_send(call, &answer.base);
    rpc_call_finish(call, RPC_OK, "", 0);
    for (uint32_t i = 0; i < n; i++)
        free(workers[i].unreached);
    free(workers);
    free(list);
    free(pages);
    free(states);
}

const struct rpc_method ADMIN_METHODS[] = {
    {"/tandem.admin.v1.Admin/Flush",
     &tandem__admin__v1__flush_request__descriptor,
     {on_flush_all, NULL, api_on_end},
     api_on_open,
     true},
    {"/tandem.admin.v1.Admin/Status",
     &tandem__admin__v1__status_request__descriptor,
     {on_status, NULL, api_on_end},
     api_on_open,
     true},
    {"/tandem.admin.v1.Admin/Explain",
     &tandem__admin__v1__explain_request__descriptor,
     {on_explain, NULL, api_on_end},
     api_on_open,
     true},
    {"/tandem.admin.v1.Admin/Drain",
     &tandem__admin__v1__drain_request__descriptor,
     {on_drain, NULL, api_on_end},
     api_on_open,
     true},
    {"/tandem.admin.v1.Admin/Audit",
     &tandem__admin__v1__audit_request__descriptor,
     {on_audit, NULL, api_on_end},
     api_on_open,
     true},
};
const uint32_t N_ADMIN_METHODS = sizeof(ADMIN_METHODS) / sizeof(ADMIN_METHODS[0]);

/* --------------------------------------------------------------- registration */

/* Answers with a nonce for the next call, in which this side proves the secret. */
static void answer_join(struct router *r, struct rpc_call *call, struct proof_said *said, bool is_taken)
{
    Tandem__Worker__V1__JoinResponse answer = TANDEM__WORKER__V1__JOIN_RESPONSE__INIT;
    uint8_t proof[SECRET_MAC_BYTES];
    proof_join_nonce(r->join_key, clock_now(&r->clock), said->router);
    proof_sign(r->secret, JOIN_ROUTER, said, proof);
    answer.nonce = (ProtobufCBinaryData){sizeof(said->router), said->router};
    answer.proof = (ProtobufCBinaryData){sizeof(proof), proof};
    answer.is_taken = is_taken;
    rpc_call_send(call, &answer.base);
    rpc_call_finish(call, RPC_OK, "", 0);
}

static void on_join(struct rpc_call *call, const ProtobufCMessage *base)
{
    struct router *r = rpc_call_user(call);
    const Tandem__Worker__V1__JoinRequest *m = (const Tandem__Worker__V1__JoinRequest *)base;
    char address[sizeof(r->peers[0]->address)];
    struct proof_said said = {.incarnation = m->incarnation, .address = address};
    if (!m->address.len || m->address.len >= sizeof(address) || !memchr(m->address.data, ':', m->address.len)) {
        rpc_call_finish(call, RPC_INVALID_ARGUMENT, "address: not HOST:PORT or unix:PATH", 0);
        return;
    }
    snprintf(address, sizeof(address), "%.*s", (int)m->address.len, (const char *)m->address.data);
    if (!proof_nonce_read(m->nonce, said.worker)) {
        rpc_call_finish(call, RPC_INVALID_ARGUMENT, "nonce: has 16 bytes", 0);
        return;
    }
    if (!proof_nonce_read(m->router_nonce, said.router) ||
        !proof_join_nonce_is_good(r->join_key, clock_now(&r->clock), said.router)) {
        answer_join(r, call, &said, false);
        return;
    }
    if (!proof_verify(r->secret, JOIN_WORKER, &said, m->proof)) {
        rpc_call_finish(call, RPC_PERMISSION_DENIED, "proof: not by this cluster's secret", 0);
        return;
    }
    struct note *note = note_new(NOTE_REGISTER);
    memcpy(note->text, address, sizeof(address));
    note->said = said;
    note->call = rpc_call_ref(call);
    mailbox_push(&r->mailbox, &note->mail);
}

void admin_register(struct router *r, struct note *n)
{
    struct td_error e = {{0}};
    enum td_status s = peer_register(r, n->text, &e);
    n->said.address = n->text;
    if (s)
        rpc_call_finish(n->call, rpc_code_of_status(s), e.text, 0);
    else
        answer_join(r, n->call, &n->said, true);
    rpc_call_unref(n->call);
}

const struct rpc_method ADMIN_JOIN_METHODS[1] = {
    {"/tandem.worker.v1.Registry/Join",
     &tandem__worker__v1__join_request__descriptor,
     {on_join, NULL, api_on_end},
     api_on_open,
     true},
};

/* ------------------------------------------------------------------ listeners */

/* Opens a listener. A socket that only the default asks for may fail: operators then have to say where. */
static enum td_status listen_at(struct router *r, const char *option, const char *kind, struct rpc_server_config *c,
                                struct rpc_server **out, struct td_error *e)
{
    char socket[ROUTER_SOCKET_BYTES], dir[ROUTER_SOCKET_BYTES];
    bool is_auto = !strcmp(c->listen, "auto");
    enum td_status s = is_auto ? router_socket(router_address(r), kind, socket, e) : TD_OK;
    if (!s && is_auto && strncmp(router_address(r), "unix:", 5) && private_dir_default(dir, sizeof(dir)))
        s = private_dir_make(dir, e) ? TD_ERR_IO : private_dir_check(dir, e);
    if (is_auto)
        c->listen = socket;
    c->is_private = true;
    c->tls = &r->options.tls; /* with the cluster's CA: whoever asks must show its certificate */
    c->log = &r->log;
    c->user = r;
    if (!s)
        s = rpc_server_open(c, out, e);
    if (!s || !is_auto)
        return s;
    log_warn(&r->log, "no %s service: %s; --%s says where it is to be", kind, e->text, option);
    return TD_OK;
}

static enum td_status open_admin(struct router *r, struct td_error *e)
{
    const struct router_options *o = &r->options;
    struct rpc_server_config c = {.listen = o->admin_listen,
                                  .methods = ADMIN_METHODS,
                                  .n_methods = N_ADMIN_METHODS,
                                  .descriptors = ADMIN_DESCRIPTORS,
                                  .descriptors_len_bytes = sizeof(ADMIN_DESCRIPTORS),
                                  .max_calls = CALLS_MOST,
                                  .max_rpc_bytes = RPC_BYTES_MOST};
    bool is_tcp = strcmp(o->admin_listen, "auto") && strncmp(o->admin_listen, "unix:", 5);
    if (!strcmp(o->admin_listen, "none"))
        return TD_OK;
    if (is_tcp && !(o->admin_key && *o->admin_key) && !(o->tls.ca && o->tls.cert))
        return td_fail(e, TD_ERR_INVALID,
                       "--admin-listen %s: every user of this host reaches it; give --admin-key, --tls-cert with "
                       "--tls-ca, or a unix socket",
                       o->admin_listen);
    /* Without TLS the key passes in the clear. */
    enum td_status s = is_tcp ? reach_guard("--admin-listen", o->admin_listen, o->tls.cert, o->is_insecure, e) : TD_OK;
    return s ? s : listen_at(r, "admin-listen", "admin", &c, &r->admin, e);
}

static enum td_status open_cluster(struct router *r, struct td_error *e)
{
    const struct router_options *o = &r->options;
    struct rpc_server_config c = {.listen = o->cluster_listen,
                                  .methods = ADMIN_JOIN_METHODS,
                                  .n_methods = 1,
                                  .max_message_bytes = JOIN_BYTES_MOST,
                                  .max_calls = CALLS_MOST,
                                  .max_rpc_bytes = RPC_BYTES_MOST};
    if (!o->cluster_listen)
        return o->workers && *o->workers ? TD_OK
                                         : td_fail(e, TD_ERR_INVALID,
                                                   "--workers: give the workers' addresses, or "
                                                   "--cluster-listen, where they register");
    enum td_status s = strcmp(o->cluster_listen, "auto") ? reach_guard("--cluster-listen", o->cluster_listen,
                                                                       secret_is_set(r->secret), o->is_insecure, e)
                                                         : TD_OK;
    return s ? s : listen_at(r, "cluster-listen", "cluster", &c, &r->cluster, e);
}

enum td_status admin_open(struct router *r, struct td_error *error_out)
{
    enum td_status s = open_admin(r, error_out);
    return s ? s : open_cluster(r, error_out);
}
