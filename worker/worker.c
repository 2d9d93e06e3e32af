/*
 * The worker as a whole: opening its parts, the loop of the engine thread, and what routers are told about
 * the worker.
 *
 * The engine thread is the one that calls worker_run(). Each turn handles all mail, then runs one step of the
 * engine. When there is nothing to compute, it sleeps in the mailbox, with a short timer for everything that
 * expires. Nothing in the loop waits for the network.
 *
 * What must hold:
 *   - Only the engine thread touches the engine, the pool, legs, leases and pulls. Other threads send mail.
 *   - After a step, block events go out before tokens, and tokens before ends (step(), leg_flush()).
 *   - Closing: no router may send any more before legs end, and the wire must be closed before the pool is,
 *     because leases and pulls hold pages (worker_close()).
 */
#include "worker/worker.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/process.h"
#include "base/random.h"
#include "base/ticker.h"
#include "engine/weight_cache.h"
#include "sched/scheduler.h"
#include "worker/sizes.h"
#include "worker/worker_internal.h"

/* A turn of the engine thread that takes longer than TURN_MS is an absence (base/absence.h). */
enum { BEAT_MS = LINK_BEAT_MS, IDLE_MS = 50, TURN_MS = 200 };

#define AT(member) offsetof(struct worker_options, member)
const struct option WORKER_OPTIONS[] = {
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Model"},
    GEOMETRY_OPTIONS(struct worker_options, geometry),
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Network"},
    {"name", OPT_STRING, AT(name), NULL, "NAME", 0, 0, "name in status and logs; default: role and process id"},
    {"listen", OPT_ADDRESS, AT(listen), "127.0.0.1:0", "HOST:PORT", 0, 0,
     "address of the gRPC service for routers; port 0 picks one"},
    {"xfer-listen", OPT_ADDRESS, AT(xfer_listen), NULL, "HOST:PORT", 0, 0,
     "address of KV transfers; default: a free port of --listen's host"},
    {"transports", OPT_STRING, AT(transports), "auto", "LIST", 0, 0,
     "how KV travels: auto (TCP, on one host a mapped arena), tcp, ucx (shared memory), or a UCX_TLS list"},
    {"trusted-network", OPT_BOOL, AT(is_trusted_network), NULL, NULL, 0, 0,
     "allows RDMA and UCX's tcp in --transports: whoever reaches them can write into this process's memory"},
    {"kv-encrypt", OPT_BOOL, AT(encrypts), NULL, NULL, 0, 0,
     "encrypts KV transfers over TCP (TLS 1.3, with the secret); every worker and store must do the same"},
    {"routers", OPT_ADDRESS, AT(routers), NULL, "HOST:PORT,...", 0, 0,
     "routers to register with; without the option routers must know this worker (--workers)"},
    {"advertise", OPT_ADDRESS, AT(advertise), NULL, "HOST[:PORT]", 0, 0,
     "address at which routers and peers reach this worker; default: where it listens"},
    {"drain-ms", OPT_MS, AT(drain_ms), "30s", NULL, 0, 3.6e6,
     "time after SIGTERM to finish running requests; the others are planned anew elsewhere"},
    SECRET_OPTIONS(struct worker_options),
    RPC_TLS_OPTIONS(struct worker_options),
    {"metrics-listen", OPT_ADDRESS, AT(metrics_listen), NULL, "HOST:PORT", 0, 0,
     "address of Prometheus metrics over HTTP"},
    {"silence-ms", OPT_MS, AT(silence_ms), "1000", NULL, LINK_LEAST_SILENCE_MS, 3.6e6,
     "silence after which a peer counts as dead"},
    {"lease-ms", OPT_MS, AT(lease_ms), "10000", NULL, 100, 3.6e6, "how long pages wait for a reader that does nothing"},
    {"quarantine-ms", OPT_MS, AT(quarantine_ms), "1000", NULL, 0, 3.6e6, "how long a page in doubt is kept away"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Compute and memory"},
    {"engine", OPT_CHOICE, AT(engine), "cpu", "cpu|sim", 0, 0,
     "cpu: computes; sim: steps only take the time of a cost model"},
    {"sim-prefill", OPT_STRING, AT(sim_prefill), "5000,50,0.001", "A,B,C", 0, 0,
     "sim: us of a chunk of n tokens: A + B n + C n (n + 2 cached)"},
    {"sim-decode", OPT_STRING, AT(sim_decode), "8000,0.05,50", "A,B,C", 0, 0,
     "sim: us of a decode step: A + B (sum of contexts) + C sequences"},
    {"sim-noise", OPT_DOUBLE, AT(sim_noise), "0", "SIGMA", 0, 2,
     "sim: sigma of a log-normal factor on the time of each step"},
    {"threads", OPT_INT, AT(threads), "0", NULL, 0, K_MAX_THREADS, "compute threads; 0: one for each CPU"},
    COMPUTE_OPTIONS(struct worker_options, geometry),
    RANK_OPTIONS(struct worker_options, ranks),
    {"isa", OPT_CHOICE, AT(isa), "auto", "auto|plain|avx2|avx512", 0, 0, "instruction set of the kernels"},
    {"lora", OPT_STRING, AT(lora), NULL, "NAME=DIR,...", 0, 0,
     "adapters that requests may name, as PEFT saves them; the same on all workers"},
    {"packed-cache", OPT_STRING, AT(packed_cache), NULL, "DIR", 0, 0,
     "directory of packed weights that all workers of this host map; default: $XDG_CACHE_HOME/tandem, else "
     "~/.cache/tandem"},
    {"no-packed-cache", OPT_BOOL, AT(no_packed_cache), NULL, NULL, 0, 0,
     "packs the weights into memory of this process alone"},
    {"pool-bytes", OPT_BYTES, AT(pool_bytes), "0", NULL, 0, 1e15,
     "memory for KV pages; 0: 4 longest contexts, at most an eighth of the available memory; on a device --max-batch "
     "of them, as far as --device-memory and --pool-most allow"},
    {"pool-most", OPT_BYTES, AT(pool_most), "0", NULL, 0, 1e15,
     "on a device: most host memory for pages without a size, at least 64 MiB; 0: half of what is available"},
    {"device-memory", OPT_DOUBLE, AT(device_memory), "0", "SHARE", 0, 1,
     "on a device: share of its memory for this worker's weights and pages without a size; 0: 0.9"},
    {"pages", OPT_INT, AT(pages), "0", NULL, 0, 4e9, "KV pages; 0: as many as --pool-bytes hold"},
    {"max-context", OPT_INT, AT(max_context), "0", NULL, 0, 1 << 24,
     "most tokens of prompt and answer; 0: the model's limit"},
    {"max-batch", OPT_INT, AT(max_batch), "0", NULL, 0, 4096,
     "most sequences computed together; 0: 64, on a device 256"},
    {"max-rows", OPT_INT, AT(max_rows), "0", NULL, 0, 65536,
     "most tokens of one step; 0: 512, on a device 2304, and at least --max-batch"},
    {"chunk-tokens", OPT_INT, AT(chunk_tokens), "0", NULL, 0, 65536,
     "most prompt tokens of one sequence in a step; 0: 256, on a device 2048"},
    {"faults", OPT_STRING, AT(faults), NULL, "SCRIPT", 0, 0,
     "for tests: makes wire and messages go wrong by SCRIPT, or by the script in @FILE, which is read again at "
     "SIGUSR1; syntax: base/fault.h"},
    {"log-level", OPT_CHOICE, AT(log_level), "info", "error|warn|info|debug", 0, 0,
     "log level; the log goes to stderr"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

static const struct metric_info METRIC_INFO[] = {METRICS_TABLE(WORKER_METRICS)};

struct worker_work *worker_work_new(enum worker_work_kind kind)
{
    struct worker_work *work = mem_zalloc(sizeof(*work));
    work->kind = kind;
    return work;
}

struct xfer_id worker_new_id(struct worker *w)
{
    return (struct xfer_id){w->incarnation, ++w->next_counter};
}

/* ------------------------------------------------------------------ hello */

/* On an rpc thread: reads only what does not change after worker_open(). */
static void hello(void *user, Tandem__Worker__V1__WorkerHello *h)
{
    struct worker *w = user;
    static _Thread_local uint8_t layout[KV_LAYOUT_WIRE_BYTES];
    static _Thread_local struct block_key fingerprint;
    kv_layout_encode(&w->geometry.layout, layout);
    fingerprint = engine_fingerprint(w->engine);
    h->name = rpc_data(w->name);
    h->role = rpc_data(w->role);
    h->pid = (uint32_t)getpid();
    h->incarnation = w->incarnation;
    h->fingerprint = (ProtobufCBinaryData){BLOCK_KEY_BYTES, fingerprint.b};
    h->layout = (ProtobufCBinaryData){sizeof(layout), layout};
    h->numerics = rpc_data(engine_numerics(w->engine));
    h->xfer_address = rpc_data(w->xfer_address);
    h->n_pages = (uint32_t)w->options.pages;
    h->max_context = engine_max_context(w->engine);
    h->max_batch = (uint32_t)w->options.max_batch;
    h->chunk_tokens = (uint32_t)w->options.chunk_tokens;
    h->vocab_size = w->geometry.config.vocab_size;
    h->weight_bytes = engine_weight_bytes(w->engine);
    h->n_adapters = w->adapters.n;
    h->adapters = w->adapters_said;
}

/* On an rpc thread: compiles what a leg asks for, so that it is there when the engine thread opens the
 * sequence. An error comes again there. */
static void compile_ahead(struct worker *w, const Tandem__Worker__V1__RouterMessage *m)
{
    struct grammar *g = NULL;
    if (!m || m->kind_case != TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_LEG || !m->leg->grammar.len)
        return;
    if (!grammars_get(w->grammars, m->leg->grammar_kind, m->leg->grammar.data, m->leg->grammar.len, &g, NULL))
        grammar_unref(g);
}

/* On an rpc thread: hands a router's message to the engine thread. */
static void on_link_mail(void *user, struct link_mail *mail)
{
    struct worker *w = user;
    struct worker_work *work = worker_work_new(WORK_LINK);
    compile_ahead(w, mail->message);
    work->link = mail;
    mailbox_push(&w->mailbox, &work->mail);
}

/* ----------------------------------------------------------- block events */

/* Inside calls of the pool: only notes the event. */
static void on_block(void *user, bool added, const struct block_key *key, uint32_t chain_index)
{
    struct worker *w = user;
    event_queue_add(&w->events,
                    &(struct block_event){added ? BLOCK_ADDED : BLOCK_REMOVED, TIER_WORKER, chain_index, *key});
}

static void add_snapshot_block(void *user, const struct block_key *key, uint32_t chain_index)
{
    on_block(user, true, key, chain_index);
}

static void send_snapshot(struct worker *w, struct link *link)
{
    event_queue_begin_snapshot(&w->events, w->links, TIER_WORKER);
    kvpool_each_block(engine_pool(w->engine), add_snapshot_block, w);
    event_queue_end_snapshot(&w->events, link);
}

/* ------------------------------------------------------------------- load */

/* Copies the engine's load to where the beat thread reads it, and to the metrics. */
static void note_load(struct worker *w)
{
    struct engine_load load = engine_load(w->engine);
    struct kvpool_audit a = kvpool_audit(engine_pool(w->engine));
    pthread_mutex_lock(&w->load_lock);
    w->load = load;
    w->audit = a;
    pthread_mutex_unlock(&w->load_lock);
    metrics_gauge(w->counters, WORKER_PAGES_FREE, a.free);
    metrics_gauge(w->counters, WORKER_PAGES_CACHED, a.cached);
    metrics_gauge(w->counters, WORKER_PAGES_HELD, a.held);
    metrics_gauge(w->counters, WORKER_PAGES_LEASED, a.leased);
    metrics_gauge(w->counters, WORKER_PAGES_QUARANTINED, a.quarantined);
}

/* Fills in the steps since the last Load message and forgets them. The caller holds load_lock. */
static void fill_steps(struct worker *w, Tandem__Worker__V1__Step *steps, Tandem__Worker__V1__Step **list,
                       Tandem__Worker__V1__Load *l)
{
    uint32_t n = w->n_steps < STEPS_TOLD ? w->n_steps : STEPS_TOLD;
    for (uint32_t i = 0; i < n; i++) {
        const struct cost_step *s = &w->steps[i];
        tandem__worker__v1__step__init(&steps[i]);
        steps[i].n_prompts = s->n_prompts;
        steps[i].prefill_tokens = s->prefill_tokens;
        steps[i].prefill_square = s->prefill_square;
        steps[i].batch = s->batch;
        steps[i].context = s->context;
        steps[i].ms = s->ms;
        list[i] = &steps[i];
    }
    l->n_steps = n;
    l->steps = list;
    w->n_steps = 0;
}

/*
 * Whether a sequence could be computed now. A waiting sequence does not count while the pages that it lacks
 * may be held by sequences that are being filled, by transfers, or by the quarantine.
 */
static bool is_busy(const struct engine_load *e, const struct kvpool_audit *a)
{
    return e->running || (e->waiting && !e->filling && !a->leased && !a->quarantined);
}

/*
 * Fills in how long the running step has run. The caller holds load_lock. Time counts from the first Load
 * that saw the step.
 */
static void fill_progress(struct worker *w, Tandem__Worker__V1__Load *l)
{
    uint64_t now = absence_now(&w->beat_absence, w->beat_ns + BEAT_MS * NS_PER_MS);
    w->beat_ns = now;
    if (w->seen_step != w->steps_begun || w->steps_begun == w->steps_ended) {
        w->seen_step = w->steps_begun;
        w->seen_ns = now;
    }
    l->steps_ended = w->steps_ended;
    l->step_expected_ms = w->step_expected_ms;
    l->step_running_ms = clock_ms_between(w->seen_ns, now);
    l->busy = is_busy(&w->load, &w->audit);
}

/*
 * Fills in the peers that this worker can't connect to. unreached and list have room for WANTS_MAX entries.
 */
static void fill_unreached(struct worker *w, char (*unreached)[XFER_ADDRESS_BYTES], ProtobufCBinaryData *list,
                           Tandem__Worker__V1__Load *l)
{
    l->n_unreached = xfer_unreached(w->xfer, unreached, WANTS_MAX);
    l->unreached = list;
    for (size_t i = 0; i < l->n_unreached; i++)
        list[i] = rpc_data(unreached[i]);
}

/* A heartbeat. On the beat thread, and once on the engine thread when it begins to drain. */
static void send_load(struct worker *w)
{
    char transport[64], unreached[WANTS_MAX][XFER_ADDRESS_BYTES];
    ProtobufCBinaryData unreached_list[WANTS_MAX];
    Tandem__Worker__V1__Step steps[STEPS_TOLD], *list[STEPS_TOLD];
    Tandem__Worker__V1__Load l = TANDEM__WORKER__V1__LOAD__INIT;
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    struct xfer_stats x = xfer_stats(w->xfer);
    xfer_transport(w->xfer, transport, sizeof(transport));
    pthread_mutex_lock(&w->load_lock);
    struct engine_load e = w->load;
    struct kvpool_audit a = w->audit;
    struct rls loading = w->loading, fetching = w->fetching;
    fill_steps(w, steps, list, &l);
    fill_progress(w, &l);
    pthread_mutex_unlock(&w->load_lock);
    metrics_gauge(w->counters, WORKER_SLOWER, (double)x.slower);
    metrics_gauge(w->counters, WORKER_GRAMMAR_BYTES, (double)grammars_bytes(w->grammars));
    fill_unreached(w, unreached, unreached_list, &l);
    l.load_ms = loading.w[0];
    l.load_dram_ms = loading.w[1];
    l.load_ssd_ms = loading.w[2];
    l.fetch_ms = fetching.w[0];
    l.fetch_block_ms = fetching.w[1];
    l.free_pages = a.free;
    l.cached_pages = a.cached;
    l.held_pages = a.held;
    l.leased_pages = a.leased;
    l.quarantined_pages = a.quarantined;
    l.total_pages = a.total;
    l.running = e.running;
    l.waiting = e.waiting + e.filling;
    l.waiting_tokens = e.waiting_tokens;
    l.kv_bytes_in = x.bytes_in;
    l.kv_bytes_out = x.bytes_out;
    l.transport = rpc_data(transport);
    l.draining = atomic_load(&w->stopping);
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_LOAD;
    m.load = &l;
    link_server_send_all(w->links, &m);
}

/* On the beat thread, which never computes, so that a router does not take a long step for a death. */
static void beat(void *arg)
{
    send_load(arg);
}

/* ---------------------------------------------------------- engine thread */

/* Pins or forgets blocks of prompts. A message carries the keys one after another, 16 bytes each. */
static void on_prefix(struct worker *w, const Tandem__Worker__V1__RouterMessage *m)
{
    bool keep = m->kind_case == TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_KEEP;
    ProtobufCBinaryData keys = keep ? m->keep->keys : m->forget->keys;
    uint64_t until_ns = keep && m->keep->ttl_ms ? clock_now(&w->clock) + m->keep->ttl_ms * NS_PER_MS : 0;
    struct kvpool *pool = engine_pool(w->engine);
    if (!keep && !keys.len)
        kvpool_flush(pool);
    for (size_t i = 0; i < keys.len / BLOCK_KEY_BYTES; i++) {
        struct block_key key;
        memcpy(key.b, keys.data + i * BLOCK_KEY_BYTES, BLOCK_KEY_BYTES);
        if (keep)
            kvpool_keep(pool, &key, until_ns);
        else
            kvpool_forget(pool, &key);
    }
}

static void on_message(struct worker *w, struct link *link, Tandem__Worker__V1__RouterMessage *m)
{
    switch (m->kind_case) {
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_LEG:
        if (faults_draw(w->faults, FAULT_LEG).kind != FAULT_DROP)
            leg_start(w, link, m->leg);
        /* The leg's own work left the router's queue: else it would count twice until the next Demand. */
        if (m->leg->queued_ms > 0)
            backlog_demand(&w->backlog, link, m->leg->queued_ms);
        break;
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_CANCEL:
        if (m->cancel->id)
            leg_cancel(w, (struct xfer_id){m->cancel->id->incarnation, m->cancel->id->counter}, TD_ERR_CANCELLED,
                       "cancelled");
        break;
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_SNAPSHOT:
        send_snapshot(w, link);
        break;
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_AUDIT:
        event_queue_flush(&w->events, w->links);
        audit_answer(w, link, m->audit->nonce);
        break;
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_DRAIN:
        if (atomic_load(&w->stopping))
            break;
        if (m->drain->limit_ms)
            w->options.drain_ms = m->drain->limit_ms;
        worker_stop(w);
        break;
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_KEEP:
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_FORGET:
        on_prefix(w, m);
        /* While stopping, w->links may be closed already (worker_close). */
        if (!atomic_load(&w->stopping))
            keeps_note(&w->keeps, w->links, link, m, clock_now(&w->clock));
        break;
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_DEMAND:
        backlog_demand(&w->backlog, link, m->demand->queued_ms);
        break;
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_PEERS:
        /* While stopping, w->xfer may be closed already (worker_close). */
        if (!atomic_load(&w->stopping))
            wants_note(&w->wants, w->xfer, link, m->peers);
        break;
    default: /* from a newer router */
        break;
    }
}

static void on_link(struct worker *w, struct link_mail *mail)
{
    switch (mail->kind) {
    case LINK_UP:
        log_info(&w->log, "router attached router=%016llx", (unsigned long long)link_router_incarnation(mail->link));
        /* While stopping, w->links may be closed already. A router that misses events asks for a snapshot. */
        if (atomic_load(&w->stopping))
            break;
        backlog_attach(&w->backlog, mail->link);
        send_snapshot(w, mail->link);
        keeps_tell(&w->keeps, mail->link, clock_now(&w->clock));
        break;
    case LINK_GONE:
        log_info(&w->log, "router left router=%016llx", (unsigned long long)link_router_incarnation(mail->link));
        leg_cancel_link(w, mail->link);
        backlog_leave(&w->backlog, mail->link);
        if (!atomic_load(&w->stopping))
            wants_leave(&w->wants, w->xfer, mail->link);
        break;
    case LINK_MESSAGE:
        on_message(w, mail->link, mail->message);
        break;
    }
    link_mail_free(mail);
}

/* Handles one piece of mail and frees it. */
static void on_work(struct worker *w, struct worker_work *work)
{
    struct leg *leg;
    switch (work->kind) {
    case WORK_LINK:
        on_link(w, work->link);
        break;
    case WORK_PULL_END:
        leg_pull_ended(w, work);
        break;
    case WORK_LEASE_END:
        LIST_FOREACH (leg, &w->legs, in_worker)
            if (leg->lease == work->lease)
                leg->lease = NULL;
        lease_close(w, work->lease, work->in_doubt);
        break;
    case WORK_WANT:
        store_wanted(w, &work->data);
        bytes_free(&work->data);
        break;
    case WORK_LOOKUP:
        prefix_asked(w, &work->data, work->sender);
        bytes_free(&work->data);
        break;
    case WORK_STOP:
        break;
    }
    free(work);
}

static void take_mail(struct worker *w)
{
    for (struct mail *m = mailbox_take(&w->mailbox), *next; m; m = next) {
        next = m->next;
        on_work(w, (struct worker_work *)m); /* mail is the first member of struct worker_work */
    }
}

/* Injects faults. A stalled step goes on when the script is read again or the process is told to stop. */
static void misbehave(struct worker *w)
{
    uint64_t reloads = faults_reloads(w->faults);
    struct fault fault = faults_draw(w->faults, FAULT_STEP);
    uint64_t until = clock_now(&w->clock) + (fault.kind == FAULT_DELAY ? fault.delay_ns : UINT64_MAX / 2);
    while (fault.kind && clock_now(&w->clock) < until && !atomic_load(&w->stopping) &&
           faults_reloads(w->faults) == reloads)
        nanosleep(&(struct timespec){.tv_nsec = NS_PER_MS}, NULL);
}

/* Inside engine_step(), just before the batch runs. */
static void on_step(void *user, double expected_ms)
{
    struct worker *w = user;
    pthread_mutex_lock(&w->load_lock);
    w->steps_begun++;
    w->step_expected_ms = expected_ms;
    pthread_mutex_unlock(&w->load_lock);
    if (w->faults)
        misbehave(w);
}

/* Adds the step that ended to the ring of steps: if it is full, the oldest one is overwritten. */
static void note_step(struct worker *w)
{
    pthread_mutex_lock(&w->load_lock);
    w->steps_ended++;
    w->step_expected_ms = 0;
    w->steps[w->n_steps++ % STEPS_TOLD] = engine_last_step(w->engine);
    pthread_mutex_unlock(&w->load_lock);
}

/*
 * One engine step and what is due with it. If there was nothing to compute, sleeps in the mailbox for at
 * most idle_ms.
 */
static void step(struct worker *w, uint32_t idle_ms)
{
    uint64_t before = clock_now(&w->clock);
    leg_expire(w, before);
    keeps_expire(&w->keeps, before);
    store_expire(w, absence_now(&w->absence, 0), false);
    uint32_t rows = engine_step(w->engine);
    /* Before tokens: a router that gets a prompt's first token may look up its blocks at once. */
    event_queue_flush(&w->events, w->links);
    leg_flush(w);
    note_load(w);
    w->backlog.changed |= rows && engine_last_step(w->engine).prefill_tokens;
    uint32_t sleep_ms = backlog_tell(w, clock_now(&w->clock), idle_ms);
    if (rows) {
        note_step(w);
        metrics_inc(w->counters, WORKER_STEPS, 1);
        metrics_observe_ns(w->counters, WORKER_STEP_SECONDS, clock_now(&w->clock) - before);
    } else {
        mailbox_wait(&w->mailbox, sleep_ms);
    }
}

/*
 * Once a turn. At the limit the legs that still run are refused, so that routers plan them anew elsewhere.
 * Leases stay until their readers are done: worker_run() waits for them.
 */
static void drain(struct worker *w)
{
    uint64_t now = clock_now(&w->clock);
    if (!atomic_load(&w->stopping))
        return;
    if (!w->drain_until_ns) {
        log_info(&w->log, "draining limit_ms=%lld", (long long)w->options.drain_ms);
        w->drain_until_ns = now + (uint64_t)w->options.drain_ms * NS_PER_MS;
        send_load(w); /* tells routers at once */
    }
    if (now >= w->drain_until_ns && !LIST_EMPTY(&w->legs))
        leg_cancel_all(w, TD_ERR_REFUSED, "worker is draining");
}

void worker_turn(struct worker *w, uint32_t idle_ms)
{
    take_mail(w);
    step(w, idle_ms);
    drain(w);
}

enum td_status worker_run(struct worker *w)
{
    struct ticker *beats = ticker_start("beat", BEAT_MS * NS_PER_MS, beat, w);
    while (!atomic_load(&w->forced) && !(atomic_load(&w->stopping) && LIST_EMPTY(&w->legs) && !w->n_wire))
        worker_turn(w, IDLE_MS);
    leg_cancel_all(w, TD_ERR_PEER_LOST, "worker is stopping");
    leg_flush(w);
    ticker_stop(beats);
    return TD_OK;
}

void worker_stop(struct worker *w)
{
    if (atomic_exchange(&w->stopping, true))
        atomic_store(&w->forced, true);
    mailbox_push(&w->mailbox, &worker_work_new(WORK_STOP)->mail);
}

/* ------------------------------------------------------------ open, close */

/* Prepares the list of adapters for hello(), which runs on rpc threads. */
static void say_adapters(struct worker *w)
{
    w->adapters_said = mem_array(w->adapters.n, sizeof(*w->adapters_said));
    w->adapter_said = mem_array(w->adapters.n, sizeof(*w->adapter_said));
    w->adapter_keys = mem_array(w->adapters.n, sizeof(*w->adapter_keys));
    for (uint32_t i = 0; i < w->adapters.n; i++) {
        w->adapter_keys[i] = adapter_fingerprint(w->adapters.all[i]);
        tandem__worker__v1__adapter__init(&w->adapter_said[i]);
        w->adapter_said[i].name = rpc_data(w->adapters.names[i]);
        w->adapter_said[i].fingerprint = (ProtobufCBinaryData){BLOCK_KEY_BYTES, w->adapter_keys[i].b};
        w->adapters_said[i] = &w->adapter_said[i];
    }
}

/* Logs the progress of loading once a second: large models take minutes. */
static void on_load(void *user, uint32_t n_done, uint32_t n_layers)
{
    struct worker *w = user;
    uint64_t now = clock_now(&w->clock);
    if (now < w->load_told_ns + NS_PER_S)
        return;
    w->load_told_ns = now;
    log_info(&w->log, "loading percent=%u layers=%u/%u mib=%llu", 100 * n_done / n_layers, n_done, n_layers,
             (unsigned long long)(model_weight_bytes(w->model) >> 20));
}

/* Directory for packed weights; NULL: not shared. Dummy weights end with the process. */
static const char *packed_cache(const struct worker *w, char room[PATH_MAX])
{
    const struct worker_options *o = &w->options;
    if (o->no_packed_cache || w->geometry.is_dummy)
        return NULL;
    return o->packed_cache ? o->packed_cache : weight_cache_default_dir(room) ? room : NULL;
}

/* Chooses the number of pages (options.pages) from the memory that is available. Allocates nothing. */
static enum td_status size_pool(struct worker *w, struct td_error *e)
{
    struct available_memory there = available_memory("");
    struct size_asked pool;
    uint64_t weights = sizes_weights(&w->options, &w->geometry);
    uint64_t part = sizes_has_device(&w->options, &w->geometry) ? SIZES_DEVICES : SIZES_ALONE;
    enum td_status s = sizes_pool(&w->options, &w->geometry, sizes_left(&there, weights) / part, &pool, e);
    if (!s)
        s = sizes_check(&pool, 1, weights, &there, e);
    if (!s)
        w->options.pages = (int64_t)(pool.bytes / kv_layout_page_bytes(&w->geometry.layout));
    return s;
}

/* A pool without a size of its own is made as small as the devices of the ranks are. */
static enum td_status fit_pool(struct worker *w, struct td_error *e)
{
    struct size_device least = {UINT64_MAX, UINT64_MAX}, d;
    uint64_t bytes, page = kv_layout_page_bytes(&w->geometry.layout);
    for (uint32_t i = 0; i < rank_options_n(&w->options.ranks); i++) {
        if (!k_memory(w->kernels[i], &d.free_bytes, &d.total_bytes))
            return TD_OK;
        if (d.free_bytes < least.free_bytes)
            least = d;
    }
    enum td_status s = sizes_on_devices(&w->options, &w->geometry, &least, &bytes, e);
    if (!s && bytes / page < (uint64_t)w->options.pages)
        w->options.pages = (int64_t)(bytes / page);
    return s;
}

/* Rejects options that are invalid, alone or together, and sets options.pages. */
static enum td_status check_options(struct worker *w, bool is_sim, struct sim_cost *cost_out, struct td_error *e)
{
    struct worker_options *o = &w->options;
    enum td_status s = TD_OK;
    cost_out->noise = o->sim_noise;
    if (is_sim)
        s = sim_cost_parse("sim-prefill", o->sim_prefill, cost_out->step_ns.prefill, e);
    if (!s && is_sim)
        s = sim_cost_parse("sim-decode", o->sim_decode, cost_out->step_ns.decode, e);
    if (s)
        return s;
    if (is_sim && rank_options_n(&o->ranks) > 1)
        return td_fail(e, TD_ERR_INVALID,
                       "--tensor-parallel, --pipeline-parallel: simulated compute has one rank; "
                       "say what several take by --sim-prefill and --sim-decode");
    sizes_steps(o, &w->geometry);
    if (o->max_rows < o->max_batch)
        return td_fail(e, TD_ERR_INVALID, "--max-rows %lld is less than --max-batch %lld", (long long)o->max_rows,
                       (long long)o->max_batch);
    if (o->chunk_tokens > o->max_rows)
        o->chunk_tokens = o->max_rows;
    if (o->lora && is_sim)
        return td_fail(e, TD_ERR_INVALID, "--lora: simulated compute has no adapters");
    return size_pool(w, e);
}

static enum td_status open_kernels(struct worker *w, bool is_sim, struct td_error *e)
{
    static const char *const ISAS[] = {"auto", "plain", "avx2", "avx512"};
    struct kernels_config k = w->geometry.kernels;
    k.n_threads = (uint32_t)w->options.threads;
    while (strcmp(ISAS[k.isa], w->options.isa))
        k.isa++;
    if (is_sim)
        k.device = DEVICE_CPU;
    return rank_options_open(&w->options.ranks, &k, w->kernels, e);
}

static enum td_status open_engine(struct worker *w, struct td_error *e)
{
    struct worker_options *o = &w->options;
    bool is_sim = !strcmp(o->engine, "sim"), has_size = o->pages || o->pool_bytes;
    struct sim_cost cost = {0};
    char cache_dir[PATH_MAX];
    enum td_status s = geometry_resolve(&o->geometry, &w->geometry, e);
    if (!s)
        s = check_options(w, is_sim, &cost, e);
    if (!s && !is_sim)
        s = geometry_open_model(&o->geometry, &w->geometry, &w->model, e);
    if (!s)
        s = open_kernels(w, is_sim, e);
    if (!s && !has_size)
        s = fit_pool(w, e);
    if (!s)
        s = adapters_open(o->lora, &w->geometry.config, &w->adapters, e);
    if (!s)
        s = grammars_open(w->geometry.is_dummy ? NULL : o->geometry.model, w->geometry.config.vocab_size, &w->grammars,
                          e);
    if (s)
        return s;
    say_adapters(w);
    const struct engine_config c = {
        .kernels = w->kernels,
        .n_tensor = (uint32_t)o->ranks.n_tensor,
        .n_pipeline = (uint32_t)o->ranks.n_pipeline,
        .model = w->model,
        .adapters = w->adapters.all,
        .n_adapters = w->adapters.n,
        .sim = is_sim ? &cost : NULL,
        .shape = &w->geometry.config,
        .compute = w->geometry.compute,
        .weights = w->geometry.weights,
        .kv_dtype = w->geometry.layout.dtype,
        .page_tokens = w->geometry.layout.page_tokens,
        .n_pages = (uint32_t)o->pages,
        .max_context = (uint32_t)o->max_context,
        .max_batch = (uint32_t)o->max_batch,
        .max_rows = (uint32_t)o->max_rows,
        .chunk_tokens = (uint32_t)o->chunk_tokens,
        .quarantine_ns = (uint64_t)o->quarantine_ms * NS_PER_MS,
        .clock = &w->clock,
        .log = &w->log,
        .weight_cache = packed_cache(w, cache_dir),
        .callbacks = {.user = w,
                      .on_admitted = leg_on_admitted,
                      .on_pages_ready = leg_on_pages_ready,
                      .on_token = leg_on_token,
                      .on_end = leg_on_end,
                      .on_block = on_block,
                      .on_step = on_step,
                      .on_load = on_load},
    };
    return engine_open(&c, &w->engine, e);
}

static enum td_status open_network(struct worker *w, struct xfer_hub *hub, struct td_error *e)
{
    struct worker_options *o = &w->options;
    reach_xfer(&w->reach, w->xfer_listen, w->xfer_address);
    struct xfer_config x = {.backend = hub ? XFER_LOOPBACK : XFER_NET,
                            .hub = hub,
                            .name = w->name,
                            .listen = hub ? w->name : w->xfer_listen,
                            .reached_at = w->xfer_address,
                            .transports = o->transports,
                            .is_trusted_network = o->is_trusted_network,
                            .encrypts = o->encrypts,
                            .incarnation = w->incarnation,
                            .secret = w->secret,
                            .layout = &w->geometry.layout,
                            .silence_ns = (uint64_t)o->silence_ms * NS_PER_MS,
                            .faults = w->faults,
                            .clock = &w->clock,
                            .log = &w->log,
                            .callbacks = {.user = w, .on_message = transfers_on_message}};
    x.arena = kvpool_arena(engine_pool(w->engine), &x.arena_bytes);
    x.arena_fd = kvpool_arena_fd(engine_pool(w->engine));
    enum td_status s = xfer_open(&x, &w->xfer, e);
    if (!s)
        reach_xfer(&w->reach, xfer_address(w->xfer), w->xfer_address);
    if (!s && o->metrics_listen)
        s = metrics_http_open(w->metrics, o->metrics_listen, &w->metrics_http, w->metrics_address, e);
    const struct link_server_config l = {.tls = &o->tls,
                                         .reach = &w->reach,
                                         .secret = w->secret,
                                         .faults = w->faults,
                                         .log = &w->log,
                                         .deliver = on_link_mail,
                                         .hello = hello,
                                         .user = w};
    if (!s)
        s = link_server_open(&l, &w->links, e);
    const struct registrar_config r = {.routers = o->routers,
                                       .tls = &o->tls,
                                       .address = s ? NULL : link_server_reached(w->links),
                                       .secret = w->secret,
                                       .incarnation = w->incarnation,
                                       .log = &w->log};
    return s ? s : registrar_open(&r, &w->registrar, e);
}

enum td_status worker_open(const struct worker_config *config, struct worker **out, struct td_error *error_out)
{
    struct worker *w = mem_zalloc(sizeof(*w));
    w->role = config->role;
    w->options = config->options;
    if (w->options.name)
        snprintf(w->name, sizeof(w->name), "%s", w->options.name);
    else
        snprintf(w->name, sizeof(w->name), "%s-%d", w->role, (int)getpid());
    w->log = (struct log){.who = w->name, .level = (enum log_level)log_level_parse(w->options.log_level)};
    clock_init_real(&w->clock);
    w->load_told_ns = clock_now(&w->clock); /* loading that takes less than a second is not logged */
    absence_init(&w->absence, &w->clock, TURN_MS * NS_PER_MS);
    absence_init(&w->beat_absence, &w->clock, BEAT_MS * NS_PER_MS);
    w->incarnation = random_u64();
    w->reach = (struct reach_config){w->options.listen, w->options.xfer_listen, w->options.advertise};
    event_queue_init(&w->events, w->incarnation);
    mailbox_init(&w->mailbox);
    pthread_mutex_init(&w->load_lock, NULL);
    w->loading = rls_make(3, (const double[]){SCHEDULER_LOADING_PRIOR}, 0.1);
    w->fetching = rls_make(2, (const double[]){SCHEDULER_FETCHING_PRIOR}, 0.1);
    w->metrics = metrics_open();
    w->counters = metrics_add(w->metrics, METRIC_INFO, sizeof(METRIC_INFO) / sizeof(METRIC_INFO[0]), NULL);
    enum td_status s = faults_open(w->options.faults, &w->log, &w->faults, error_out);
    faults_export(w->faults, w->metrics);
    if (!s)
        s = secret_open(w->options.secret, w->options.secret_file, &w->log, &w->secret, error_out);
    if (!s)
        s = rpc_tls_check(&w->options.tls, true, error_out);
    if (!s)
        s = reach_listen(&w->reach, w->xfer_listen, error_out);
    if (!s)
        s = reach_guard("--listen", w->options.listen, secret_is_set(w->secret), w->options.is_insecure, error_out);
    if (!s)
        s = reach_guard("--xfer-listen", w->xfer_listen, secret_is_set(w->secret), w->options.is_insecure, error_out);
    if (!s)
        s = open_engine(w, error_out);
    if (!s)
        s = open_network(w, config->hub, error_out);
    if (s) {
        worker_close(w);
        return s;
    }
    note_load(w);
    log_info(&w->log, "ready address=%s xfer=%s isa=%s numerics=%s pages=%lld weights_mib=%llu", worker_address(w),
             w->xfer_address, kernels_isa_name(w->kernels[0]), engine_numerics(w->engine), (long long)w->options.pages,
             (unsigned long long)(engine_weight_bytes(w->engine) >> 20));
    *out = w;
    return TD_OK;
}

/*
 * The order matters. After link_server_close() no router sends anything, and LINK_GONE is in the mailbox for
 * each. Cancelling the legs cancels their pulls and leases. xfer_close() returns when each of these has
 * ended; the ends are in the mailbox. The last take_mail() frees them and so gives up their holds, which
 * engine_close() requires.
 */
void worker_close(struct worker *w)
{
    if (!w)
        return;
    atomic_store(&w->stopping, true); /* legs that are still in the mailbox are refused */
    registrar_close(w->registrar);
    link_server_close(w->links);
    if (w->engine) {
        leg_cancel_all(w, TD_ERR_PEER_LOST, "worker is stopping");
        store_expire(w, 0, true);
    }
    xfer_close(w->xfer); /* every lease and pull has ended now, and its end is in the mailbox */
    w->xfer = NULL;
    take_mail(w);
    metrics_http_close(w->metrics_http);
    engine_close(w->engine);
    kernels_close_ranks(w->kernels, K_MAX_RANKS);
    adapters_close(&w->adapters);
    grammars_close(w->grammars);
    free(w->adapters_said);
    free(w->adapter_said);
    free(w->adapter_keys);
    model_close(w->model);
    metrics_close(w->metrics);
    faults_close(w->faults);
    mailbox_fini(&w->mailbox);
    keeps_free(&w->keeps);
    backlog_free(&w->backlog);
    wants_free(&w->wants);
    pthread_mutex_destroy(&w->load_lock);
    free(w->out);
    secret_close(w->secret);
    event_queue_free(&w->events);
    free(w);
}

const char *worker_address(const struct worker *w)
{
    return link_server_address(w->links);
}

/* ------------------------------------------------------------------- main */

static void stop(void *worker)
{
    worker_stop(worker);
}

static void reload(void *worker)
{
    faults_reload(((struct worker *)worker)->faults);
}

int worker_main(const char *role, int argc, char **argv)
{
    char program[32], prefix[32], about[128];
    struct worker_config config = {.role = role};
    struct td_error e = {{0}};
    struct worker *w = NULL;
    char *strings;
    enum options_action action;
    snprintf(program, sizeof(program), "tandem-%s", role);
    snprintf(prefix, sizeof(prefix), "TANDEM_%s", !strcmp(role, "prefill") ? "PREFILL" : "DECODE");
    snprintf(about, sizeof(about), "A %s worker of a tandem cluster. Routers connect to it; SIGTERM drains it.", role);
    const struct options o = {.program = program,
                              .usage = "--model DIR [options]",
                              .about = about,
                              .man_section = 8,
                              .env_prefix = prefix,
                              .table = WORKER_OPTIONS};
    enum td_status s = options_parse(&o, argc, argv, &config.options, NULL, NULL, &strings, &action, &e);
    if (!s && action == OPTIONS_RUN) {
        process_keep_private();
        struct process_signals *signals = process_signals_open(program);
        s = worker_open(&config, &w, &e);
        if (!s) {
            process_on_signals(signals, stop, reload, w);
            process_announce(worker_address(w));
            s = worker_run(w);
        }
        process_signals_close(signals);
        worker_close(w);
    }
    free(strings);
    return process_exit_status(program, s, e.text);
}
