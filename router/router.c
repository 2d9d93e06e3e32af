/*
 * The owner thread: handles notes, keeps the snapshot, and lets the scheduler decide (place.c).
 *
 * Each turn handles all notes, then makes a pass over the queue if something changed that may let a request
 * go. Timeouts are checked every TICK_MS.
 */
#include "router/router.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/random.h"
#include "descriptors_tandem.h"
#include "router/router_internal.h"
#include "sched/pins.h"
#include "worker/link.h"
#include "worker/reach.h"
#include "worker/register.h"

enum {
    TICK_MS = 20,
    /* A turn that comes later than this shows that the process did not run (base/absence.h). */
    TURN_MS = 100,
    /* An echo that takes longer than this shows that the threads that read from workers did not run. */
    DEAF_MS = 2 * TICK_MS,
    REGISTER_SLACK_MS = 500, /* time that a registering call may take on a busy machine */
    SWEEP_ENTRIES = 1 << 15, /* index entries swept in a tick: well under a millisecond */
    UNREAD_EVERY_MS = 100,   /* how often clients that do not read are looked for */
    UNREAD_MS = 60000,       /* a call whose client takes nothing for this time ends, full queue or not */
    TEXT_NICE = 5
};

#define AT(member) offsetof(struct router_options, member)
const struct option ROUTER_OPTIONS[] = {
    {"model", OPT_STRING, AT(model), NULL, "DIR", 0, 0, "Hugging Face directory: configuration and tokenizer are read"},
    {"chat-template", OPT_STRING, AT(chat_template), NULL, "FILE", 0, 0,
     "Jinja template instead of the model's; none: no chats"},
    {"listen", OPT_ADDRESS, AT(listen), "127.0.0.1:7470", "HOST:PORT", 0, 0,
     "address of the client API; port 0 picks one"},
    {"workers", OPT_ADDRESS, AT(workers), NULL, "ADDR,...", 0, 0,
     "workers and stores to connect to; without the option they must register"},
    {"name", OPT_STRING, AT(name), "router", "NAME", 0, 0, "name in logs"},
    {"admin-listen", OPT_ADDRESS, AT(admin_listen), "auto", "auto|none|ADDR", 0, 0,
     "where operators ask; auto: a socket of this user, which commands find by --router (router/socket.h); a HOST:PORT "
     "needs --admin-key"},
    {"admin-key", OPT_SECRET, AT(admin_key), NULL, "TEXT", 0, 0,
     "key that operators bring to an --admin-listen HOST:PORT; better set in the environment"},
    {"cluster-listen", OPT_ADDRESS, AT(cluster_listen), NULL, "auto|ADDR", 0, 0,
     "where workers and stores register (their --routers); auto: a socket of this user; default: nowhere, --workers "
     "names them"},
    {"api-keys", OPT_STRING, AT(api_keys), NULL, "FILE", 0, 0,
     "API keys: who a client is, and how much he may ask for; tandem key writes it; read again when it changes"},
    SECRET_OPTIONS(struct router_options),
    RPC_TLS_OPTIONS(struct router_options),
    {"tls-client-ca", OPT_STRING, AT(tls_client_ca), NULL, "FILE", 0, 0,
     "CA of clients, PEM: each must show a certificate that this CA has signed; default: they need none"},
    {"cache-key", OPT_SECRET, AT(cache_key), NULL, "TEXT", 0, 0,
     "names of blocks depend on this key, so blocks in stores are found again only with the same key; default: the "
     "secret; better set in the environment"},
    {"metrics-listen", OPT_ADDRESS, AT(metrics_listen), NULL, "HOST:PORT", 0, 0,
     "address of Prometheus metrics over HTTP"},
    {"plan", OPT_CHOICE, AT(plan), "auto", PLAN_FORCE_NAMES, 0, 0, "forces every placement"},
    {"policy", OPT_CHOICE, AT(policy), "tandem", POLICY_NAMES, 0, 0, "policy of placement; sched/policy.h"},
    {"order", OPT_CHOICE, AT(order), "tandem", ORDER_NAMES, 0, 0,
     "order of a tenant's requests in the queue; sched/scheduler.h"},
    {"profile", OPT_STRING, AT(profile), COST_GUESS, "A,B,C:A,B,C", 0, 0,
     "us of a worker's steps before they are measured: prefill A + B n + C n (n + 2 cached), decode A + B contexts + C "
     "sequences"},
    {"tenants", OPT_STRING, AT(tenants), NULL, "NAME=WEIGHT,...", 0, 0,
     "weights of tenants; a tenant that is not named has weight 1"},
    {"max-wait-ms", OPT_MS, AT(max_wait_ms), "120s", NULL, 1, 1e12,
     "time in the queue after which a request is the first of its tenant"},
    {"prefix", OPT_CHOICE, AT(prefix), "auto", "auto|load|compute", 0, 0,
     "blocks that stores have: load or compute, whichever is faster (auto), or always one of them"},
    {"silence-ms", OPT_MS, AT(silence_ms), "1000", NULL, LINK_LEAST_SILENCE_MS, 3.6e6,
     "silence after which a worker counts as dead"},
    {"dispatch-ms", OPT_MS, AT(dispatch_ms), "500", NULL, LINK_BEAT_MS, 3.6e6,
     "how long a worker may take to acknowledge a request before it goes elsewhere"},
    {"gone-ms", OPT_MS, AT(gone_ms), "5000", NULL, 0, 3.6e6, "how long requests wait when no worker of a role is left"},
    {"settle-ms", OPT_MS, AT(settle_ms), "5000", NULL, 0, 3.6e6,
     "after a start: longest wait for the workers' blocks, and without --workers for workers to register (2.5s)"},
    {"replan-burst", OPT_INT, AT(replan_burst), "256", NULL, 0, 1e9,
     "most re-plans at once; beyond that, one for every ten recent requests"},
    {"max-calls", OPT_INT, AT(max_calls), "8192", NULL, 1, 1e6,
     "most open calls of any kind (64 more for health checks); as many may wait to be looked at"},
    {"max-connections", OPT_INT, AT(max_connections), "0", NULL, 0, 1e6,
     "most connections of clients; idle ones make room; 0: half of the limit of open files"},
    {"max-connections-per-address", OPT_INT, AT(max_per_address), "0", NULL, 0, 1e6,
     "most connections from one address (IPv6: /64), but for this host's; 0: a quarter of --max-connections"},
    {"trusted-proxies", OPT_STRING, AT(trusted_proxies), NULL, "ADDR[/BITS],...", 0, 0,
     "gateways on other hosts, and other addresses behind which there are many clients; bounds for each address do not "
     "hold for these"},
    {"rpc-bytes", OPT_BYTES, AT(rpc_bytes), "128M", NULL, 1 << 20, 1e12,
     "most memory that gRPC takes for connections, calls and messages that are still arriving"},
    {"send-bytes", OPT_BYTES, AT(send_bytes), "256K", NULL, 4096, 1 << 30,
     "most bytes queued for a call whose client reads slowly, with overhead; and as many unsent in the kernel"},
    {"stall-ms", OPT_MS, AT(stall_ms), "500", NULL, 10, 3.6e6,
     "how long a client may read nothing while --send-bytes are queued before it is cut off"},
    {"queue-tokens", OPT_INT, AT(queue_tokens), "1000000", NULL, 1, 1e12, "most prompt tokens that wait"},
    {"queue-requests", OPT_INT, AT(queue_requests), "4096", NULL, 1, 1e9, "most requests that wait"},
    {"index-blocks", OPT_INT, AT(index_blocks), "0", NULL, 0, 1e12, "most blocks in the prefix index; 0: no bound"},
    {"pin-blocks", OPT_INT, AT(pin_blocks), "65536", NULL, 0, PINS_MAX,
     "most blocks that all clients together may pin"},
    {"text-threads", OPT_INT, AT(text_threads), "0", NULL, 0, 256,
     "threads that render chats and tokenize; 0: one for every two cores"},
    {"text-bytes", OPT_BYTES, AT(text_bytes), "64M", NULL, 1 << 20, 1e12,
     "most bytes of messages that wait for these threads; one tenant (without --api-keys: connection) gets at most "
     "half"},
    {"max-message-bytes", OPT_BYTES, AT(max_message_bytes), "4M", NULL, 1024, 256 << 20, "largest client message"},
    {"faults", OPT_STRING, AT(faults), NULL, "SCRIPT", 0, 0,
     "for tests: makes messages to workers go wrong by SCRIPT; syntax: base/fault.h"},
    {"log-level", OPT_CHOICE, AT(log_level), "info", "error|warn|info|debug", 0, 0,
     "log level; the log goes to stderr"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

static const struct metric_info METRIC_INFO[] = {METRICS_TABLE(ROUTER_METRICS)};

struct note *note_new(enum note_kind kind)
{
    struct note *n = mem_zalloc(sizeof(*n));
    n->kind = kind;
    return n;
}

struct request *router_find(struct router *r, const Tandem__Worker__V1__TransferId *id)
{
    if (!id || id->incarnation != r->incarnation)
        return NULL;
    struct request *q = r->placed[id->counter % PLACED_BUCKETS];
    while (q && q->counter != id->counter)
        q = q->next_placed;
    return q;
}

/* ---------------------------------------------------------------- arriving */

/* Fibonacci hashing (Knuth, TAOCP 6.4) of the address. */
static uint32_t bucket_of_call(const struct rpc_call *call)
{
    return (uint32_t)(((uint64_t)(uintptr_t)call * 0x9E3779B97F4A7C15u) >> 32) % CALL_BUCKETS;
}

void router_enqueue(struct router *r, struct request *q)
{
    TAILQ_INSERT_TAIL(&r->requests, q, in_router);
    LIST_INSERT_HEAD(&r->calls[bucket_of_call(q->call)], q, in_calls);
    q->is_counted = q->p.key != NULL;
    if (q->is_counted && choices_is_first(q)) /* at once for all choices, which begin later */
        keys_opened(r->keys, q->p.key, q->p.n_choices);
    r->n_queued++;
    r->queued_tokens += q->p.n_ids;
    r->n_unsubmitted++;
    metrics_inc(r->counters, ROUTER_ACCEPTED, 1);
    metrics_inc(r->counters, ROUTER_PROMPT_TOKENS, q->p.n_ids);
}

/* Routers that share the workers, as far as this one knows. */
static uint32_t count_routers(const struct router *r)
{
    uint32_t most = 1;
    for (uint32_t i = 0; i < r->n_peers; i++)
        if (r->peers[i]->state == PEER_READY && r->peers[i]->n_attached > most)
            most = r->peers[i]->n_attached;
    return most;
}

/* False: the key's rates are used up, and the request was refused. */
static bool take_rates(struct router *r, struct request *q)
{
    struct key_terms terms;
    struct td_error e = {{0}};
    uint32_t retry_after_ms;
    if (!q->p.key)
        return true;
    keys_terms(r->keys, q->p.key, &terms);
    scheduler_tenant_weight(r->scheduler, terms.tenant_id, terms.weight);
    if (!keys_take(r->keys, q->p.key, q->p.n_ids, q->p.n_choices, clock_now(&r->clock), &retry_after_ms, &e))
        return true;
    metrics_inc(r->counters, ROUTER_RATED, 1);
    request_refuse(q, e.text, retry_after_ms);
    return false;
}

static void on_request(struct router *r, struct request *q)
{
    /* Otherwise the scheduler decides whether there is room. */
    bool waits = !r->ready || !r->known || !router_can_serve(r);
    bool full = r->queued_tokens + q->p.n_ids > (uint64_t)r->options.queue_tokens ||
                r->n_queued >= (uint64_t)r->options.queue_requests;
    if (waits && full) {
        metrics_inc(r->counters, ROUTER_REFUSED, 1);
        request_refuse(q, "the queue is full", 1000);
        return;
    }
    if (!take_rates(r, q))
        return;
    choices_open(q);
    router_enqueue(r, q);
    if (q->p.n_resumed)
        replan_resumed(q);
}

/* ------------------------------------------------------------------- notes */

void router_call_gone(struct router *r, const struct rpc_call *call)
{
    struct request *q, *next;
    LIST_FOREACH_SAFE (q, &r->calls[bucket_of_call(call)], in_calls, next) {
        if (q->call == call)
            request_gone(q);
    }
}

/* Handles one note and frees it with what it owns. */
static void on_note(struct router *r, struct note *n)
{
    bool current = n->peer && n->epoch == n->peer->epoch;
    struct td_error e = {{0}};
    switch (n->kind) {
    case NOTE_REQUEST:
        /* The client left; its NOTE_REQUEST_GONE may have come before this note. */
        if (rpc_call_over(n->request->call))
            request_free(n->request);
        else
            on_request(r, n->request);
        break;
    case NOTE_REQUEST_GONE:
        router_call_gone(r, n->call);
        rpc_call_unref(n->call);
        break;
    case NOTE_WORKER:
        if (current)
            peer_message(n->peer, n->message);
        tandem__worker__v1__worker_message__free_unpacked(n->message, NULL);
        break;
    case NOTE_WORKER_GONE:
        if (current)
            peer_gone(n->peer, n->text);
        break;
    case NOTE_STATUS:
        admin_answer_status(r, n->call);
        rpc_call_unref(n->call);
        break;
    case NOTE_REGISTER:
        admin_register(r, n);
        break;
    case NOTE_DRAIN: {
        const Tandem__Admin__V1__DrainResponse answer = TANDEM__ADMIN__V1__DRAIN_RESPONSE__INIT;
        router_answer_simple(n->call, &answer.base, peer_drain(r, n->text, n->number, &e), &e);
        break;
    }
    case NOTE_EXPLAIN:
        explain_answer(r, n->call, n->text, n->number);
        break;
    case NOTE_AUDIT:
        audit_start(r, n->call);
        rpc_call_unref(n->call);
        break;
    case NOTE_PIN:
        prefix_pin(r, n->call, n->params, n->number);
        break;
    case NOTE_FLUSH:
        prefix_flush(r, n->call, n->params);
        break;
    case NOTE_FLUSH_ALL:
        prefix_flush_all(r, n->call);
        break;
    case NOTE_STOP:
        break;
    }
    if (n->params)
        params_free(n->params);
    free(n->params);
    free(n);
}

static void take_mail(struct router *r)
{
    uint64_t n = 0, began = clock_now(&r->clock);
    for (struct mail *m = mailbox_take(&r->mailbox), *next; m; m = next, n++) {
        struct note *note = (struct note *)m; /* mail is its first member */
        next = m->next;
        if (note->bytes) {
            atomic_fetch_sub(&r->n_notes, 1);
            atomic_fetch_sub(&r->note_bytes, note->bytes);
        }
        on_note(r, note);
    }
    if (n)
        atomic_store(&r->note_ns, (7 * atomic_load(&r->note_ns) + (clock_now(&r->clock) - began) / n) / 8);
}

bool router_can_serve(const struct router *r)
{
    enum plan_force force = place_forced(r);
    bool needs_prefill = force == FORCE_SPLIT || force == FORCE_KEPT;
    return peer_has_role(r, ROLE_DECODE) && (!needs_prefill || peer_has_role(r, ROLE_PREFILL)) &&
           !scheduler_is_cut(r->scheduler);
}

/*
 * Whether a new router may begin to place: each peer that can be reached has sent its blocks, or settle_ms
 * have passed. A list of workers (--workers) counts as complete; without one the router first waits for
 * workers to register, which each does once in REGISTER_MS.
 */
static bool settled(const struct router *r, uint64_t now)
{
    bool is_listed = r->options.workers && *r->options.workers;
    uint64_t waits_ms = (uint64_t)r->options.settle_ms, registers_ms = REGISTER_MS + REGISTER_SLACK_MS;
    if (!is_listed && now < r->opened_ns + (registers_ms < waits_ms ? registers_ms : waits_ms) * NS_PER_MS)
        return false;
    for (uint32_t i = 0; i < r->n_peers; i++) {
        const struct peer *p = r->peers[i];
        bool known = p->state == PEER_READY ? p->whole : p->tried || p->state == PEER_GONE;
        if (!known && now < r->opened_ns + (uint64_t)r->options.settle_ms * NS_PER_MS)
            return false;
    }
    return true;
}

static void show_worker(const struct router *r, const struct peer *p)
{
    struct sched_worker_stats s = scheduler_worker_stats(r->scheduler, p->holder);
    metrics_gauge(p->counters, PEER_BREAKER, p->breaker.state);
    metrics_gauge(p->counters, PEER_UNREACHED, p->n_unreached);
    metrics_gauge(p->counters, PEER_BUSY, s.busy_ms * 1e-3);
    metrics_gauge(p->counters, PEER_PREFILL_ERROR, s.cost.prefill_error.error);
    metrics_gauge(p->counters, PEER_DECODE_ERROR, s.cost.decode_error.error);
    metrics_gauge(p->counters, PEER_LEG_ERROR, s.leg_error.error);
    metrics_gauge(p->counters, PEER_TRANSFER_ERROR, s.transfer_error.error);
    metrics_gauge(p->counters, PEER_GAP_ERROR, s.gap_error.error);
    metrics_gauge(p->counters, PEER_PROBES, (double)s.n_probes);
}

static void look_at_workers(struct router *r, uint64_t now, uint64_t patience)
{
    for (uint32_t i = 0; i < r->n_peers; i++) {
        const struct peer *p = r->peers[i];
        show_worker(r, p);
        scheduler_worker_usable(r->scheduler, i, peer_usable(p, now));
    }
    if (!r->ready && settled(r, patience)) {
        r->ready = true;
        log_info(&r->log, "requests are placed from now on index_blocks=%llu",
                 (unsigned long long)index_blocks(r->index));
    }
    if (router_can_serve(r))
        r->able_ns = patience;
    bool serves = r->ready && peer_has_role(r, ROLE_DECODE) && !atomic_load(&r->stopping);
    rpc_server_set_serving(r->rpc, serves);
    if (r->admin)
        rpc_server_set_serving(r->admin, serves);
}

/* Fails requests whose deadline passed; sends what waited for room in a call's queue. */
static void expire(struct router *r, uint64_t now)
{
    struct request *q, *next;
    TAILQ_FOREACH_SAFE (q, &r->requests, in_router, next) {
        answer_more(q);
        if (q->p.remaining_ms != INT64_MAX && now > q->arrived_ns + (uint64_t)q->p.remaining_ms * NS_PER_MS)
            request_fail(q, RPC_DEADLINE_EXCEEDED, "slo.deadline_ms passed", 0);
    }
}

/* Tells workers, and through them other routers, how much work is queued here, if it changed by 5 %. */
static void tell_demand(struct router *r)
{
    double queued_ms = scheduler_queued_ms(r->scheduler);
    if (fabs(queued_ms - r->demand_ms) > 0.05 * fmax(queued_ms, r->demand_ms))
        r->demand_ms = queued_ms;
    for (uint32_t i = 0; i < r->n_peers; i++)
        peer_tell_demand(r->peers[i], r->demand_ms);
}

/* Counts up to a total that is counted elsewhere. */
static void count_to(struct router *r, uint32_t metric, uint64_t total)
{
    metrics_inc(r->counters, metric, total - metrics_get(r->counters, metric));
}

/* Ends calls whose clients do not read; their requests then end by NOTE_REQUEST_GONE. */
static void cut_unread(struct router *r, uint64_t now)
{
    if (now < r->next_unread_ns)
        return;
    r->next_unread_ns = now + UNREAD_EVERY_MS * NS_PER_MS;
    uint32_t n_full;
    const struct rpc_patience patience = {r->options.stall_ms, UNREAD_MS, r->absence.away_ns - r->away_ns};
    r->away_ns = r->absence.away_ns;
    metrics_inc(r->counters, ROUTER_UNREAD, rpc_server_cut_unread(r->rpc, &patience, &n_full));
    metrics_gauge(r->counters, ROUTER_BEHIND, n_full);
    const struct rpc_server_stats s = rpc_server_stats(r->rpc);
    metrics_gauge(r->counters, ROUTER_CONNECTIONS, s.connections);
    count_to(r, ROUTER_CALLS_REFUSED, s.calls_refused);
    count_to(r, ROUTER_CONNECTIONS_REFUSED, s.connections_refused);
    count_to(r, ROUTER_CONNECTIONS_DROPPED, s.connections_dropped);
}

/* A tenant may have half of the calls open, so that there is room for another. */
static void share_keys(struct router *r)
{
    if (r->keys)
        keys_share(r->keys, count_routers(r), (uint32_t)(r->options.max_calls + 1) / 2);
}

/* Share of the workers' pages that are neither free nor only cached. */
static double pages_used(const struct router *r)
{
    uint64_t used = 0, total = 0;
    for (uint32_t i = 0; i < r->n_peers; i++) {
        const struct peer_load *l = &r->peers[i]->load;
        if (r->peers[i]->state != PEER_READY || r->peers[i]->role == ROLE_STORE)
            continue;
        used += l->total_pages - l->free_pages - l->cached_pages;
        total += l->total_pages;
    }
    return total ? (double)used / (double)total : 0;
}

static void tick(struct router *r)
{
    absence_deaf(&r->absence, rpc_echo_age_ns(r->echo) > DEAF_MS * NS_PER_MS);
    uint64_t now = clock_now(&r->clock), patience = router_patience(r);
    for (uint32_t i = 0; i < r->n_peers; i++)
        peer_tick(r->peers[i], patience);
    expire(r, now);
    pairs_tick(r);
    tell_demand(r);
    share_keys(r);
    cut_unread(r, now);
    audit_tick(r, patience);
    prefix_tick(r, now);
    replan_tick(r, patience);
    look_at_workers(r, now, patience);
    metrics_gauge(r->counters, ROUTER_REPLAN_BUDGET, retry_budget_left(&r->budget, now));
    struct scheduler_margins margins = scheduler_margins(r->scheduler);
    metrics_gauge(r->counters, ROUTER_TTFT_MARGIN, margins.ttft);
    metrics_gauge(r->counters, ROUTER_TPOT_MARGIN, margins.tpot);
    metrics_gauge(r->counters, ROUTER_READY, r->ready);
    metrics_gauge(r->counters, ROUTER_QUEUED, r->n_queued);
    metrics_gauge(r->counters, ROUTER_RUNNING, r->n_running);
    metrics_gauge(r->counters, ROUTER_PAGES_USED, pages_used(r));
    index_sweep(r->index, SWEEP_ENTRIES);
    metrics_gauge(r->counters, ROUTER_INDEX_BLOCKS, (double)index_blocks(r->index));
    metrics_gauge(r->counters, ROUTER_INDEX_BYTES, (double)index_bytes(r->index));
    metrics_inc(r->counters, ROUTER_INDEX_DROPPED,
                index_dropped(r->index) - metrics_get(r->counters, ROUTER_INDEX_DROPPED));
}

void router_turn(struct router *r)
{
    take_mail(r);
    uint64_t now = clock_now(&r->clock);
    if (now >= r->next_tick_ns) {
        tick(r);
        r->next_tick_ns = now + TICK_MS * NS_PER_MS;
    }
    place_queued(r);
}

enum td_status router_run(struct router *r)
{
    while (!atomic_load(&r->forced) && !(atomic_load(&r->stopping) && TAILQ_EMPTY(&r->requests) &&
                                         !atomic_load(&r->n_texts) && !atomic_load(&r->n_notes))) {
        router_turn(r);
        mailbox_wait(&r->mailbox, TICK_MS);
    }
    while (!TAILQ_EMPTY(&r->requests))
        request_fail(TAILQ_FIRST(&r->requests), RPC_UNAVAILABLE, "router is stopping", 1000);
    return TD_OK;
}

void router_stop(struct router *r)
{
    if (atomic_exchange(&r->stopping, true))
        atomic_store(&r->forced, true);
    mailbox_push(&r->mailbox, &note_new(NOTE_STOP)->mail);
}

/* ------------------------------------------------------------ open, close */

static enum td_status open_model(struct router *r, struct td_error *e)
{
    if (!r->options.model)
        return td_fail(e, TD_ERR_INVALID, "--model: give the model's directory");
    enum td_status s = model_config_load(r->options.model, &r->config, e);
    if (!s && r->config.generation.ignored[0])
        log_warn(&r->log, "generation_config.json has fields that are not honoured fields=%s",
                 r->config.generation.ignored);
    if (!s)
        s = tokenizer_open(r->options.model, &r->tokenizer, e);
    if (!s)
        s = chat_template_open(r->options.model, r->options.chat_template, &r->chat, e);
    if (!s)
        parts_open(r);
    size_t n = strlen(r->options.model);
    while (n > 1 && r->options.model[n - 1] == '/')
        n--;
    size_t start = n;
    while (start > 0 && r->options.model[start - 1] != '/')
        start--;
    rpc_text_clean(r->options.model + start, n - start, r->model_name, sizeof(r->model_name));
    return s;
}

/* What schedulers and dashboards that know vLLM look for. */
static void name_as_vllm(struct router *r)
{
    static const struct metric_info INFO[] = {
        {METRIC_GAUGE, "vllm:num_requests_running", "tandem_requests_running"},
        {METRIC_GAUGE, "vllm:num_requests_waiting", "tandem_requests_queued"},
        {METRIC_GAUGE, "vllm:kv_cache_usage_perc", "tandem_kv_pages_used_ratio"},
        {METRIC_COUNTER, "vllm:prompt_tokens_total", "tandem_prompt_tokens_total"},
        {METRIC_COUNTER, "vllm:generation_tokens_total", "tandem_generation_tokens_total"},
        {METRIC_COUNTER, "vllm:request_success_total", "tandem_requests_finished_total"},
        {METRIC_SECONDS, "vllm:time_to_first_token_seconds", "tandem_time_to_first_token_seconds"},
        {METRIC_SECONDS, "vllm:request_time_per_output_token_seconds", "tandem_time_per_output_token_seconds"}};
    static const uint32_t IDS[] = {ROUTER_RUNNING, ROUTER_QUEUED,   ROUTER_PAGES_USED, ROUTER_PROMPT_TOKENS,
                                   ROUTER_TOKENS,  ROUTER_FINISHED, ROUTER_TTFT,       ROUTER_TPOT};
    char labels[2 * sizeof(r->model_name) + 32];
    size_t n = (size_t)snprintf(labels, sizeof(labels), "model_name=\"");
    for (const char *c = r->model_name; *c; c++) {
        if (strchr("\"\\\n", *c))
            labels[n++] = '\\';
        labels[n++] = *c == '\n' ? 'n' : *c;
    }
    snprintf(labels + n, sizeof(labels) - n, "\"");
    metrics_alias(r->metrics, r->counters, INFO, IDS, sizeof(IDS) / sizeof(IDS[0]), labels);
}

static void open_texts(struct router *r)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t half = cores > 2 ? (uint32_t)cores / 2 : 1, asked = (uint32_t)r->options.text_threads;
    const struct jobs_config c = {.thread_name = "text",
                                  .n_threads = asked ? asked : half,
                                  .max_jobs = (uint32_t)r->options.queue_requests,
                                  .max_bytes = (uint64_t)r->options.text_bytes,
                                  .nice = TEXT_NICE};
    r->texts = jobs_open(&c);
}

static enum td_status open_peers(struct router *r, struct td_error *e)
{
    const char *at = r->options.workers;
    while (at && *at) {
        size_t n = strcspn(at, ",");
        char address[128];
        if (n >= sizeof(address) || !memchr(at, ':', n))
            return td_fail(e, TD_ERR_INVALID, "--workers: '%.*s' is not HOST:PORT or unix:PATH", (int)n, at);
        if (r->n_peers == MAX_WORKERS)
            return td_fail(e, TD_ERR_INVALID, "--workers: at most %d", MAX_WORKERS);
        snprintf(address, sizeof(address), "%.*s", (int)n, at);
        struct peer *p = peer_open(r, address, r->n_peers);
        if (!p)
            return td_fail(e, TD_ERR_INVALID, "--workers: '%s' can't be used", address);
        r->peers[r->n_peers++] = p;
        at += n + (at[n] == ',');
    }
    return TD_OK; /* without a list, workers register */
}

/* Keys that pass in the clear prove nothing. */
static bool asks_clients(const struct router_options *o)
{
    return o->tls.cert && (o->api_keys || o->tls_client_ca);
}

static enum td_status open_network(struct router *r, struct td_error *e)
{
    const struct rpc_tls_files *f = &r->options.tls;
    r->client_tls = (struct rpc_tls_files){.cert = f->cert, .key = f->key, .ca = r->options.tls_client_ca};
    const struct rpc_server_config c = {.listen = r->options.listen,
                                        .tls = &r->client_tls,
                                        .methods = ROUTER_METHODS,
                                        .n_methods = N_ROUTER_METHODS,
                                        .descriptors = CLIENT_DESCRIPTORS,
                                        .descriptors_len_bytes = sizeof(CLIENT_DESCRIPTORS),
                                        .max_message_bytes = (uint32_t)r->options.max_message_bytes,
                                        .max_calls = (uint32_t)r->options.max_calls,
                                        .max_rpc_bytes = (uint64_t)r->options.rpc_bytes,
                                        .max_connections = (uint32_t)r->options.max_connections,
                                        .max_per_address = (uint32_t)r->options.max_per_address,
                                        .trusted_proxies = r->options.trusted_proxies,
                                        .max_queued_bytes = (uint64_t)r->options.send_bytes,
                                        .max_unsent_bytes = (uint32_t)r->options.send_bytes,
                                        .log = &r->log,
                                        .user = r};
    enum td_status s = TD_OK;
    if (r->options.tls_client_ca && !f->cert)
        s = td_fail(e, TD_ERR_INVALID, "--tls-cert: is missing; --tls-client-ca is given");
    if (!s)
        s = reach_guard("--listen", r->options.listen, asks_clients(&r->options), r->options.is_insecure, e);
    if (!s)
        s = rpc_server_open(&c, &r->rpc, e);
    if (!s)
        s = admin_open(r, e);
    if (!s && r->options.metrics_listen)
        s = metrics_http_open(r->metrics, r->options.metrics_listen, &r->metrics_http, r->metrics_address, e);
    return s;
}

enum td_status router_open(const struct router_options *options, struct router **out, struct td_error *error_out)
{
    struct router *r = mem_zalloc(sizeof(*r));
    TAILQ_INIT(&r->requests);
    r->options = *options;
    r->log = (struct log){.who = options->name, .level = (enum log_level)log_level_parse(options->log_level)};
    clock_init_real(&r->clock);
    absence_init(&r->absence, &r->clock, TURN_MS * NS_PER_MS);
    r->echo = rpc_echo_open();
    r->opened_ns = r->able_ns = router_patience(r);
    r->budget.burst = (double)options->replan_burst;
    r->incarnation = random_u64();
    mailbox_init(&r->mailbox);
    pthread_mutex_init(&r->hello_lock, NULL);
    r->index = index_open((uint64_t)options->index_blocks);
    r->hot = mem_zalloc(sizeof(*r->hot));
    r->explain = explain_open();
    r->metrics = metrics_open();
    r->counters = metrics_add(r->metrics, METRIC_INFO, sizeof(METRIC_INFO) / sizeof(METRIC_INFO[0]), NULL);
    replan_metrics(r);
    secret_nonce(r->join_key);
    enum td_status s = secret_open(options->secret, options->secret_file, &r->log, &r->secret, error_out);
    if (!s)
        s = rpc_tls_check(&options->tls, false, error_out); /* without --tls-ca only clients get TLS */
    r->secret_text = secret_text(r->secret);
    if (!s && options->api_keys)
        s = keys_open(options->api_keys, &r->log, &r->keys, error_out);
    if (!s)
        s = faults_open(r->options.faults, &r->log, &r->faults, error_out);
    faults_export(r->faults, r->metrics);
    if (!s)
        s = place_open(r, error_out);
    if (!s)
        s = open_model(r, error_out);
    if (!s)
        name_as_vllm(r);
    if (!s)
        open_texts(r);
    if (!s)
        s = open_peers(r, error_out);
    if (!s)
        s = open_network(r, error_out);
    if (s) {
        router_close(r);
        return s;
    }
    absence_log(&r->absence, &r->log);
    log_info(&r->log, "ready address=%s model=%s workers=%u", router_address(r), r->model_name, r->n_peers);
    *out = r;
    return TD_OK;
}

/*
 * Order: first the sources of notes (server, text threads), then the notes, then requests, then streams and
 * their notes, and peers last, since notes point to peers.
 */
void router_close(struct router *r)
{
    if (!r)
        return;
    atomic_store(&r->stopping, true);
    rpc_server_close(r->admin);
    rpc_server_close(r->cluster);
    rpc_server_close(r->rpc);
    jobs_close(r->texts); /* no rpc or text thread pushes client notes any more */
    take_mail(r);         /* frees the last requests: their calls are over */
    while (!TAILQ_EMPTY(&r->requests))
        request_gone(TAILQ_FIRST(&r->requests));
    for (uint32_t i = 0; i < r->n_peers; i++)
        peer_disconnect(r->peers[i]);
    take_mail(r); /* frees the last notes of the streams; the peers they point to must still exist */
    rpc_echo_close(r->echo);
    audit_drop(r);
    for (uint32_t i = 0; i < r->n_peers; i++) {
        free(r->peers[i]->legs);
        free(r->peers[i]);
    }
    metrics_http_close(r->metrics_http);
    metrics_close(r->metrics);
    faults_close(r->faults);
    secret_close(r->secret);
    keys_close(r->keys);
    free(r->secret_text);
    index_close(r->index);
    scheduler_close(r->scheduler);
    free(r->hot);
    explain_close(r->explain);
    prefix_close(r);
    tokenizer_close(r->tokenizer);
    chat_template_close(r->chat);
    free(r->marks);
    mailbox_fini(&r->mailbox);
    pthread_mutex_destroy(&r->hello_lock);
    free(r);
}

const char *router_address(const struct router *r)
{
    return rpc_server_address(r->rpc);
}
