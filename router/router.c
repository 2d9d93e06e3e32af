/*
 * The owner thread: takes notes, keeps the snapshot, and decides.
 *
 * Placement is asked again whenever something changed that may let a queued request go: by priority, then in order of
 * arrival, until one has to wait for room. Everything that expires by itself is looked at every TICK_MS.
 */
#include "router/router.h"

#include <openssl/hmac.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/endian.h"
#include "base/random.h"
#include "descriptors.h"
#include "router/router_internal.h"

enum { TICK_MS = 20, SWEEP_ENTRIES = 1 << 15 /* a tick; well under a millisecond */, SEND_QUEUE_BYTES = 256 << 10 };

#define AT(member) offsetof(struct router_options, member)
const struct option ROUTER_OPTIONS[] = {
    {"model", OPT_STRING, AT(model), NULL, "DIR", 0, 0, "Hugging Face directory: configuration and tokenizer are read"},
    {"listen", OPT_STRING, AT(listen), "127.0.0.1:7470", "HOST:PORT", 0, 0, "client API; port 0 picks one"},
    {"workers", OPT_STRING, AT(workers), NULL, "ADDR,...", 0, 0, "prefill, decode and store processes to connect to"},
    {"name", OPT_STRING, AT(name), "router", "NAME", 0, 0, "name in logs"},
    {"secret", OPT_STRING, AT(secret), NULL, "TEXT", 0, 0, "cluster secret; better set in the environment"},
    {"metrics-listen", OPT_STRING, AT(metrics_listen), NULL, "HOST:PORT", 0, 0, "Prometheus metrics over HTTP"},
    {"plan", OPT_CHOICE, AT(plan), "auto", "auto|split|aggregated", 0, 0, "forces every placement"},
    {"prefix", OPT_CHOICE, AT(prefix), "auto", "auto|load|compute", 0, 0,
     "what stores hold: whichever is faster, or always the one"},
    {"silence-ms", OPT_MS, AT(silence_ms), "1000", NULL, 100, 3.6e6, "silence after which a worker counts as dead"},
    {"stall-ms", OPT_MS, AT(stall_ms), "500", NULL, 10, 3.6e6, "how long a client may leave its tokens unread"},
    {"queue-tokens", OPT_INT, AT(queue_tokens), "1000000", NULL, 1, 1e12, "prompt tokens that may wait"},
    {"queue-requests", OPT_INT, AT(queue_requests), "4096", NULL, 1, 1e9, "requests that may wait"},
    {"index-blocks", OPT_INT, AT(index_blocks), "0", NULL, 0, 1e12, "blocks that the prefix index keeps; 0: all"},
    {"max-message-bytes", OPT_BYTES, AT(max_message_bytes), "4M", NULL, 1024, 256 << 20, "largest client message"},
    {"faults", OPT_STRING, AT(faults), NULL, "SCRIPT", 0, 0,
     "tests: messages to workers go wrong by script; syntax: base/fault.h"},
    {"log-level", OPT_CHOICE, AT(log_level), "info", "error|warn|info|debug", 0, 0, "what is logged, to stderr"},
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

/*
 * Root of a request's prefix keys. The salt is an HMAC of the cluster's secret, the tenant and what the client asked for
 * (length-framed), so no client can name another tenant's blocks. Behind it stands the lossy codec of the stores, if they have
 * one: what such a store gives back, and all that is computed from it, is never found under the names of the exact.
 */
static struct block_key root_key(struct router *r, const struct params *p)
{
    struct bytes b = {0};
    uint8_t salt[32 + sizeof(r->kv_codec)], n[4];
    unsigned len = 32, codec_len = (unsigned)strlen(r->kv_codec);
    const char *secret = r->options.secret ? r->options.secret : "",
               *tenant = p->tenant.len ? p->tenant.data : "default";
    put_u32(n, (uint32_t)strlen(tenant));
    bytes_append(&b, n, 4);
    bytes_append(&b, tenant, strlen(tenant));
    bytes_append(&b, p->salt.data, p->salt.len);
    HMAC(EVP_sha256(), secret, (int)strlen(secret), (const uint8_t *)b.data, b.len, salt, &len);
    bytes_free(&b);
    memcpy(salt + len, r->kv_codec, codec_len);
    return block_key_root(&r->fingerprint, NULL, 0, salt, len + codec_len);
}

static void name_blocks(struct router *r, struct request *q)
{
    uint32_t block_tokens = r->layout.page_tokens;
    q->root = root_key(r, &q->p);
    memcpy(q->kv_codec, r->kv_codec, sizeof(q->kv_codec));
    q->keys = mem_array(q->p.n_ids / block_tokens, sizeof(*q->keys));
    q->n_keys = block_keys(&q->root, q->p.ids, q->p.n_ids, block_tokens, q->keys);
}

static void enqueue(struct router *r, struct request *q)
{
    q->prev = r->last_request;
    *(r->last_request ? &r->last_request->next : &r->requests) = q;
    r->last_request = q;
    r->n_queued++;
    r->queued_tokens += q->p.n_ids;
    r->replan = true;
    metrics_inc(r->counters, ROUTER_ACCEPTED, 1);
    metrics_inc(r->counters, ROUTER_PROMPT_TOKENS, q->p.n_ids);
}

static void on_request(struct router *r, struct request *q)
{
    bool full = r->queued_tokens + q->p.n_ids > (uint64_t)r->options.queue_tokens ||
                r->n_queued >= (uint64_t)r->options.queue_requests;
    if (full || !r->known) {
        metrics_inc(r->counters, ROUTER_REFUSED, 1);
        rpc_call_finish(q->call, full ? RPC_RESOURCE_EXHAUSTED : RPC_UNAVAILABLE,
                        full ? "the queue is full" : "no worker is up yet", 1000);
        request_free(q);
        return;
    }
    name_blocks(r, q);
    enqueue(r, q);
}

/* ---------------------------------------------------------------- deciding */

static struct holder_set ready_holders(const struct router *r, bool stores)
{
    struct holder_set s = {{0}};
    for (uint32_t i = 0; i < r->n_peers; i++)
        if ((r->peers[i]->role == ROLE_STORE) == stores && r->peers[i]->state == PEER_READY)
            holder_set_add(&s, r->peers[i]->holder);
    return s;
}

static void fill_snapshot(struct router *r, const struct request *q, struct policy_worker *out)
{
    uint32_t matched[INDEX_MAX_HOLDERS] = {0};
    struct holder_set workers = ready_holders(r, false);
    index_match_each(r->index, &workers, q->keys, q->n_keys, matched);
    for (uint32_t i = 0; i < r->n_peers; i++) {
        const struct peer *p = r->peers[i];
        out[i] = (struct policy_worker){.role = p->role,
                                        .usable = p->state == PEER_READY,
                                        .matched_blocks = matched[p->holder],
                                        .queued_tokens = p->queued_tokens,
                                        .chunk_tokens = p->chunk_tokens,
                                        .running = p->running,
                                        .max_batch = p->max_batch,
                                        .total_pages = p->n_pages,
                                        .reserved_pages = p->reserved_pages,
                                        .max_context = p->max_context,
                                        .prefill_ms_per_token = p->load.prefill_ms_per_token,
                                        .decode_ms_per_step = p->load.decode_ms_per_step,
                                        .load_ms = p->load.load_ms,
                                        .load_dram_ms = p->load.load_dram_ms,
                                        .load_ssd_ms = p->load.load_ssd_ms};
    }
}

static enum plan_force forced_plan(const struct router *r)
{
    return !strcmp(r->options.plan, "split")        ? FORCE_SPLIT
           : !strcmp(r->options.plan, "aggregated") ? FORCE_AGGREGATED
                                                    : FORCE_NONE;
}

static enum prefix_rule prefix_rule(const struct router *r)
{
    return !strcmp(r->options.prefix, "load")      ? PREFIX_LOAD
           : !strcmp(r->options.prefix, "compute") ? PREFIX_COMPUTE
                                                   : PREFIX_AUTO;
}

/* False: it has to wait, and so have those behind it. */
static bool decide(struct router *r, struct request *q)
{
    struct policy_worker snapshot[MAX_WORKERS];
    struct holder_set stores = ready_holders(r, true);
    char text[200];
    double waited = (double)(clock_now(&r->clock) - q->arrived_ns) * 1e-6;
    q->ask = (struct policy_request){.n_tokens = q->p.n_ids,
                                     .max_tokens = q->p.sampling.max_tokens,
                                     .block_tokens = r->layout.page_tokens,
                                     .store_blocks = index_match_segments(r->index, &stores, q->keys, 0, q->n_keys),
                                     .ttft_ms = q->p.ttft_ms,
                                     .tpot_ms = q->p.tpot_ms,
                                     .remaining_ms = INT64_MAX,
                                     .waited_ms = waited,
                                     .force = forced_plan(r),
                                     .prefix = prefix_rule(r)};
    if (q->p.remaining_ms != INT64_MAX)
        q->ask.remaining_ms = q->p.remaining_ms > (int64_t)waited ? q->p.remaining_ms - (int64_t)waited : 0;
    q->ask.store_blocks_ssd = index_on_disk(r->index, &stores, q->keys, q->ask.store_blocks);
    fill_snapshot(r, q, snapshot);
    struct plan plan = policy_place(snapshot, r->n_peers, &q->ask, random_at(r->incarnation, r->next_counter, 0));
    if (plan.kind == PLAN_WAIT)
        return false;
    if (plan.kind != PLAN_REFUSE) {
        request_place(q, &plan);
        return true;
    }
    if (plan.ttft_ms > 0)
        snprintf(text, sizeof(text), "%s: predicted TTFT %.1f ms, TPOT %.1f ms", plan.reason, plan.ttft_ms,
                 plan.tpot_ms);
    else
        snprintf(text, sizeof(text), "%s", plan.reason);
    request_fail(q,
                 plan.never         ? RPC_INVALID_ARGUMENT
                 : plan.ttft_ms > 0 ? RPC_RESOURCE_EXHAUSTED
                                    : RPC_UNAVAILABLE,
                 text, plan.retry_after_ms);
    return true;
}

static struct request *first_queued(struct router *r)
{
    struct request *best = NULL;
    for (struct request *q = r->requests; q; q = q->next)
        if (q->state == REQUEST_QUEUED && (!best || q->p.priority > best->p.priority))
            best = q;
    return best;
}

static void place_queued(struct router *r)
{
    struct request *q;
    while (r->replan && (q = first_queued(r)))
        if (!decide(r, q))
            break;
    r->replan = false;
}

/* ------------------------------------------------------------------- notes */

static void on_request_gone(struct router *r, struct rpc_call *call)
{
    for (struct request *q = r->requests; q; q = q->next)
        if (q->call == call) {
            request_gone(q);
            break;
        }
    rpc_call_unref(call);
}

static void on_note(struct router *r, struct note *n)
{
    bool current = n->peer && n->epoch == n->peer->epoch;
    switch (n->kind) {
    case NOTE_REQUEST:
        on_request(r, n->request);
        break;
    case NOTE_REQUEST_GONE:
        on_request_gone(r, n->call);
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
        router_answer_status(r, n->call);
        rpc_call_unref(n->call);
        break;
    case NOTE_AUDIT:
        audit_start(r, n->call);
        rpc_call_unref(n->call);
        break;
    case NOTE_STOP:
        break;
    }
    free(n);
}

static void take_mail(struct router *r)
{
    for (struct mail *m = mailbox_take(&r->mailbox), *next; m; m = next) {
        next = m->next;
        on_note(r, (struct note *)m); /* mail is its first member */
    }
}

static bool ready(const struct router *r)
{
    bool decode = false;
    for (uint32_t i = 0; i < r->n_peers; i++)
        decode |= r->peers[i]->state == PEER_READY && r->peers[i]->role == ROLE_DECODE;
    return decode && !atomic_load(&r->stopping);
}

static void expire(struct router *r, uint64_t now)
{
    for (struct request *q = r->requests, *next; q; q = next) {
        next = q->next;
        if (q->p.remaining_ms != INT64_MAX && now > q->arrived_ns + (uint64_t)q->p.remaining_ms * NS_PER_MS)
            request_fail(q, RPC_DEADLINE_EXCEEDED, "slo.deadline_ms passed", 0);
    }
}

static void tick(struct router *r)
{
    uint64_t now = clock_now(&r->clock);
    for (uint32_t i = 0; i < r->n_peers; i++)
        peer_tick(r->peers[i], now);
    expire(r, now);
    audit_tick(r, now);
    rpc_server_set_serving(r->rpc, ready(r));
    metrics_gauge(r->counters, ROUTER_QUEUED, r->n_queued);
    metrics_gauge(r->counters, ROUTER_RUNNING, r->n_running);
    index_sweep(r->index, SWEEP_ENTRIES);
    metrics_gauge(r->counters, ROUTER_INDEX_BLOCKS, (double)index_blocks(r->index));
    metrics_gauge(r->counters, ROUTER_INDEX_BYTES, (double)index_bytes(r->index));
    metrics_inc(r->counters, ROUTER_INDEX_DROPPED,
                index_dropped(r->index) - metrics_get(r->counters, ROUTER_INDEX_DROPPED));
}

enum td_status router_run(struct router *r)
{
    uint64_t next_tick = 0;
    while (!atomic_load(&r->forced) && !(atomic_load(&r->stopping) && !r->requests)) {
        take_mail(r);
        uint64_t now = clock_now(&r->clock);
        if (now >= next_tick) {
            tick(r);
            next_tick = now + TICK_MS * NS_PER_MS;
        }
        place_queued(r);
        mailbox_wait(&r->mailbox, TICK_MS);
    }
    while (r->requests)
        request_fail(r->requests, RPC_UNAVAILABLE, "router is stopping", 1000);
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
    if (!s)
        s = tokenizer_open(r->options.model, &r->tokenizer, e);
    if (!s)
        s = chat_template_open(r->options.model, &r->chat, e);
    size_t n = strlen(r->options.model);
    while (n > 1 && r->options.model[n - 1] == '/')
        n--;
    size_t start = n;
    while (start > 0 && r->options.model[start - 1] != '/')
        start--;
    snprintf(r->model_name, sizeof(r->model_name), "%.*s", (int)(n - start), r->options.model + start);
    return s;
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
    return r->n_peers ? TD_OK : td_fail(e, TD_ERR_INVALID, "--workers: give at least one decode worker's address");
}

static enum td_status open_network(struct router *r, struct td_error *e)
{
    const struct rpc_server_config c = {.listen = r->options.listen,
                                        .methods = ROUTER_METHODS,
                                        .n_methods = N_ROUTER_METHODS,
                                        .descriptors = PROTO_DESCRIPTORS,
                                        .descriptors_len_bytes = sizeof(PROTO_DESCRIPTORS),
                                        .max_message_bytes = (uint32_t)r->options.max_message_bytes,
                                        .max_queued_bytes = SEND_QUEUE_BYTES,
                                        .log = &r->log,
                                        .user = r};
    enum td_status s = rpc_server_open(&c, &r->rpc, e);
    if (!s && r->options.metrics_listen)
        s = metrics_http_open(r->metrics, r->options.metrics_listen, &r->metrics_http, r->metrics_address, e);
    return s;
}

enum td_status router_open(const struct router_options *options, struct router **out, struct td_error *error_out)
{
    struct router *r = mem_zalloc(sizeof(*r));
    r->options = *options;
    r->log = (struct log){.who = options->name, .level = (enum log_level)log_level_parse(options->log_level)};
    clock_init_real(&r->clock);
    r->incarnation = random_u64();
    mailbox_init(&r->mailbox);
    pthread_mutex_init(&r->hello_lock, NULL);
    r->index = index_open((uint64_t)options->index_blocks);
    r->hot = mem_zalloc(sizeof(*r->hot));
    r->metrics = metrics_open();
    r->counters = metrics_add(r->metrics, METRIC_INFO, sizeof(METRIC_INFO) / sizeof(METRIC_INFO[0]), NULL);
    enum td_status s = faults_open(r->options.faults, &r->log, &r->faults, error_out);
    faults_export(r->faults, r->metrics);
    if (!s)
        s = open_model(r, error_out);
    if (!s)
        s = open_peers(r, error_out);
    if (!s)
        s = open_network(r, error_out);
    if (s) {
        router_close(r);
        return s;
    }
    log_info(&r->log, "ready address=%s model=%s workers=%u", router_address(r), r->model_name, r->n_peers);
    *out = r;
    return TD_OK;
}

void router_close(struct router *r)
{
    if (!r)
        return;
    atomic_store(&r->stopping, true);
    rpc_server_close(r->rpc);
    take_mail(r); /* requests that arrived last: their calls are over */
    while (r->requests)
        request_gone(r->requests);
    for (uint32_t i = 0; i < r->n_peers; i++)
        peer_disconnect(r->peers[i]);
    take_mail(r); /* what their calls still said */
    audit_drop(r);
    for (uint32_t i = 0; i < r->n_peers; i++)
        free(r->peers[i]);
    metrics_http_close(r->metrics_http);
    metrics_close(r->metrics);
    faults_close(r->faults);
    index_close(r->index);
    free(r->hot);
    tokenizer_close(r->tokenizer);
    chat_template_close(r->chat);
    mailbox_fini(&r->mailbox);
    pthread_mutex_destroy(&r->hello_lock);
    free(r);
}

const char *router_address(const struct router *r)
{
    return rpc_server_address(r->rpc);
}
