/*
 * The store as a whole: opening its parts, the main thread's loop, and what it tells routers about itself.
 *
 * The main thread sleeps in its mailbox. All that it does is short: it moves entries between states and tells
 * other threads what to do. Only the wire and the SSD tier's threads touch the bytes of blocks.
 */
#include "kvstore/kvstore.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/random.h"
#include "base/ticker.h"
#include "kvstore/kvstore_internal.h"
#include "worker/sizes.h"

enum {
    BEAT_MS = LINK_BEAT_MS,
    IDLE_MS = 100,
    WAITING_MS = 10,
    TURN_MS = 200 /* a turn that takes longer counts as an absence of this process */
};
/* Limit per peer: puts that are under way should not delay reads for long. */
enum { IN_FLIGHT_BYTES = 4 << 20 };

#define TEXT_OF(macro) #macro
#define TEXT(macro)    TEXT_OF(macro)
#define AT(member)     offsetof(struct kvstore_options, member)
const struct option KVSTORE_OPTIONS[] = {
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Model"},
    GEOMETRY_OPTIONS(struct kvstore_options, geometry),
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Network"},
    {"name", OPT_STRING, AT(name), NULL, "NAME", 0, 0, "name in status and logs; default: role and process id"},
    {"listen", OPT_ADDRESS, AT(listen), "127.0.0.1:0", "HOST:PORT", 0, 0,
     "address of the gRPC service for routers; port 0 picks one"},
    {"xfer-listen", OPT_ADDRESS, AT(xfer_listen), NULL, "HOST:PORT", 0, 0,
     "address of KV transfers; default: a free port of --listen's host"},
    {"routers", OPT_ADDRESS, AT(routers), NULL, "HOST:PORT,...", 0, 0,
     "routers to register with; without the option routers must know this store (--workers)"},
    {"advertise", OPT_ADDRESS, AT(advertise), NULL, "HOST[:PORT]", 0, 0,
     "address at which routers and peers reach this store; default: where it listens"},
    {"transports", OPT_STRING, AT(transports), "auto", "LIST", 0, 0,
     "how KV travels: auto (TCP, on one host a mapped arena), tcp, ucx (shared memory), or a UCX_TLS list"},
    {"trusted-network", OPT_BOOL, AT(is_trusted_network), NULL, NULL, 0, 0,
     "allows RDMA and UCX's tcp in --transports: whoever reaches them can write into this process's memory"},
    {"kv-encrypt", OPT_BOOL, AT(encrypts), NULL, NULL, 0, 0,
     "encrypts KV transfers over TCP (TLS 1.3, with the secret); every worker and store must do the same"},
    SECRET_OPTIONS(struct kvstore_options),
    RPC_TLS_OPTIONS(struct kvstore_options),
    {"metrics-listen", OPT_ADDRESS, AT(metrics_listen), NULL, "HOST:PORT", 0, 0,
     "address of Prometheus metrics over HTTP"},
    {"silence-ms", OPT_MS, AT(silence_ms), "1000", NULL, LINK_LEAST_SILENCE_MS, 3.6e6,
     "silence after which a peer counts as dead"},
    {"lease-ms", OPT_MS, AT(lease_ms), "10000", NULL, 100, 3.6e6,
     "how long blocks wait for a reader that does nothing"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Memory and disk"},
    {"eviction", OPT_CHOICE, AT(eviction), "tandem", EVICTION_NAMES, 0, 0, "which blocks are evicted first"},
    {"dram-bytes", OPT_BYTES, AT(dram_bytes), "0", NULL, 0, 1e15,
     "memory for blocks; 0: 16 longest contexts, at most an eighth of the available memory"},
    {"tenant-quota", OPT_DOUBLE, AT(tenant_quota), "1", "SHARE", 0.001, 1,
     "most of memory and directory that a tenant may keep while others need the room; 1: all"},
    {"tenant-quotas", OPT_STRING, AT(tenant_quotas), NULL, "NAME=SHARE,...", 0, 0, "other shares for some tenants"},
    {"dir", OPT_STRING, AT(dir), NULL, "DIR", 0, 0, "directory for blocks on SSD; without it there is only DRAM"},
    {"ssd-bytes", OPT_BYTES, AT(ssd_bytes), "16G", NULL, 1 << 20, 1e17, "most bytes of the directory"},
    {"codec", OPT_CHOICE, AT(codec), "none", BLOCK_CODEC_NAMES, 0, 0,
     "codec of blocks on SSD; int8 and fp8 are lossy: such blocks have names of their own"},
    {"read-threads", OPT_INT, AT(read_threads), TEXT(KVSTORE_READ_THREADS), NULL, 1, 64, "threads that read from SSD"},
    {"read-deadline-ms", OPT_MS, AT(read_deadline_ms), "500", NULL, 1, 3.6e6,
     "how long a reader waits for its next block from SSD; then the rest is a miss"},
    {"write-queue-bytes", OPT_BYTES, AT(write_queue_bytes), "256M", NULL, 4096, 1e15,
     "most bytes that wait to be written"},
    {"write-rate", OPT_BYTES, AT(write_bytes_per_s), TEXT(KVSTORE_WRITE_MIB_PER_S) "M", NULL, 0, 1e15,
     "most bytes per second written to SSD; 0: no limit"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Other"},
    {"faults", OPT_STRING, AT(faults), NULL, "SCRIPT", 0, 0,
     "for tests: makes wire and disk go wrong by SCRIPT, or by the script in @FILE, which is read again at SIGUSR1; "
     "syntax: base/fault.h"},
    {"log-level", OPT_CHOICE, AT(log_level), "info", "error|warn|info|debug", 0, 0,
     "log level; the log goes to stderr"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

static const struct metric_info METRIC_INFO[] = {METRICS_TABLE(KVSTORE_METRICS)};

struct store_work *store_work_new(enum store_work_kind kind)
{
    struct store_work *work = mem_zalloc(sizeof(*work));
    work->kind = kind;
    return work;
}

void store_count(struct kvstore *s, uint32_t metric, uint64_t by)
{
    if (by)
        metrics_inc(s->counters, metric, by);
}

/* ------------------------------------------------------------------ hello */

/* On an rpc thread: reads only what does not change after the store has opened. */
static void hello(void *user, Tandem__Worker__V1__WorkerHello *h)
{
    struct kvstore *s = user;
    static _Thread_local uint8_t layout[KV_LAYOUT_WIRE_BYTES];
    kv_layout_encode(&s->geometry.layout, layout);
    h->name = rpc_data(s->name);
    h->role = rpc_data("store");
    h->pid = (uint32_t)getpid();
    h->incarnation = s->incarnation;
    h->layout = (ProtobufCBinaryData){sizeof(layout), layout};
    h->xfer_address = rpc_data(s->xfer_address);
    h->n_pages = (uint32_t)(s->arena_bytes / s->page_bytes);
    h->kv_codec = rpc_data(block_codec_is_lossy(s->codec) ? block_codec_name(s->codec) : "");
}

static void on_link_mail(void *user, struct link_mail *mail)
{
    struct kvstore *s = user;
    struct store_work *work = store_work_new(WORK_LINK);
    work->link = mail;
    mailbox_push(&s->mailbox, &work->mail);
}

/* ----------------------------------------------------------- block events */

void store_event(struct kvstore *s, enum block_event_kind kind, enum block_tier tier, const struct store_entry *e)
{
    event_queue_add(&s->events, &(struct block_event){kind, tier, e->chain_index, e->key});
}

static void add_snapshot_block(void *user, const struct store_entry *e)
{
    if (e->dram == DRAM_READY)
        store_event(user, BLOCK_ADDED, TIER_DRAM, e);
    if (e->ssd == SSD_DURABLE)
        store_event(user, BLOCK_ADDED, TIER_SSD, e);
}

static void send_snapshot(struct kvstore *s, struct link *link)
{
    event_queue_begin_snapshot(&s->events, s->links, TIER_DRAM);
    table_each(s->table, add_snapshot_block, s);
    event_queue_end_snapshot(&s->events, link);
}

/* ------------------------------------------------------------------- load */

static struct ssd_tier_stats stats_of_ssd(const struct kvstore *s)
{
    return s->ssd ? ssd_tier_stats(s->ssd) : (struct ssd_tier_stats){0};
}

static void note_load(struct kvstore *s)
{
    struct table_audit a = table_audit(s->table);
    struct ssd_tier_stats d = stats_of_ssd(s);
    pthread_mutex_lock(&s->load_lock);
    s->audit = a;
    pthread_mutex_unlock(&s->load_lock);
    metrics_gauge(s->counters, STORE_SLOTS_FREE, a.free);
    metrics_gauge(s->counters, STORE_SLOTS_CACHED, a.cached);
    metrics_gauge(s->counters, STORE_SLOTS_LEASED, a.leased);
    metrics_gauge(s->counters, STORE_SLOTS_HELD, a.held);
    metrics_gauge(s->counters, STORE_BLOCKS_DRAM, (double)a.n_dram);
    metrics_gauge(s->counters, STORE_BLOCKS_SSD, (double)a.n_ssd);
    metrics_gauge(s->counters, STORE_SSD_UP, d.is_writable);
    metrics_gauge(s->counters, STORE_SSD_SLOW, d.is_slow);
    metrics_gauge(s->counters, STORE_SSD_BYTES, (double)d.dir_bytes);
    metrics_gauge(s->counters, STORE_SSD_BLOCK_BYTES, s->ssd ? (double)ssd_tier_block_bytes(s->ssd) : 0);
    metrics_gauge(s->counters, STORE_QUEUE_BYTES, (double)d.queued_bytes);
}

static void send_load(struct kvstore *s)
{
    char transport[64];
    Tandem__Worker__V1__Load l = TANDEM__WORKER__V1__LOAD__INIT;
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    struct xfer_stats x = xfer_stats(s->xfer);
    xfer_transport(s->xfer, transport, sizeof(transport));
    pthread_mutex_lock(&s->load_lock);
    struct table_audit a = s->audit;
    pthread_mutex_unlock(&s->load_lock);
    l.free_pages = a.free;
    l.cached_pages = a.cached;
    l.held_pages = a.held;
    l.leased_pages = a.leased;
    l.total_pages = a.total;
    l.kv_bytes_in = x.bytes_in;
    l.kv_bytes_out = x.bytes_out;
    l.transport = rpc_data(transport);
    l.store_blocks_dram = a.n_dram;
    l.store_blocks_ssd = a.n_ssd;
    l.store_bytes_ssd = stats_of_ssd(s).dir_bytes;
    l.draining = atomic_load(&s->stopping);
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_LOAD;
    m.load = &l;
    link_server_send_all(s->links, &m);
}

static void beat(void *arg)
{
    send_load(arg);
}

/* ------------------------------------------------------------ main thread */

static void on_message(struct kvstore *s, struct link *link, const Tandem__Worker__V1__RouterMessage *m)
{
    switch (m->kind_case) {
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_SNAPSHOT:
        send_snapshot(s, link);
        break;
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_AUDIT:
        event_queue_flush(&s->events, s->links);
        kvstore_audit_answer(s, link, m->audit->nonce);
        break;
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_KEEP:
        pinned_keep(s, m->keep->keys, m->keep->ttl_ms);
        keeps_note(&s->keeps, s->links, link, m, clock_now(&s->clock));
        break;
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_FORGET:
        pinned_forget(s, m->forget->keys);
        keeps_note(&s->keeps, s->links, link, m, clock_now(&s->clock));
        break;
    case TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_DRAIN:
        if (!atomic_load(&s->stopping)) /* a second stop would not wait for what is not on SSD yet */
            kvstore_stop(s);
        break;
    /* Not for a store, or from a newer router. */
    default:
        break;
    }
}

static void on_link(struct kvstore *s, struct link_mail *mail)
{
    unsigned long long router = link_router_incarnation(mail->link);
    switch (mail->kind) {
    case LINK_UP:
        log_info(&s->log, "router attached router=%016llx", router);
        send_snapshot(s, mail->link);
        keeps_tell(&s->keeps, mail->link, clock_now(&s->clock));
        break;
    case LINK_GONE:
        log_info(&s->log, "router left router=%016llx", router);
        break;
    case LINK_MESSAGE:
        on_message(s, mail->link, mail->message);
        break;
    }
    link_mail_free(mail);
}

static void on_work(struct kvstore *s, struct store_work *work)
{
    switch (work->kind) {
    case WORK_LINK:
        if (s->is_closing)
            link_mail_free(work->link);
        else
            on_link(s, work->link);
        break;
    case WORK_MESSAGE:
        if (!s->is_closing)
            request_message(s, work);
        break;
    case WORK_LEASE_END:
        request_lease_ended(s, work->lease, work->in_doubt);
        break;
    case WORK_FILL_END:
        request_fill_ended(s, work->fill);
        break;
    case WORK_LOADED:
        tier_loaded(s, work->entry, work->status);
        break;
    case WORK_WRITTEN:
        tier_written(s, work->entry, work->status);
        break;
    case WORK_SSD_OVER:
        tier_make_ssd_room(s, work->n_bytes);
        break;
    case WORK_SSD_LISTED:
        if (!s->is_closing)
            tier_compare_ssd(s, &work->data);
        break;
    case WORK_STOP:
        break;
    }
    bytes_free(&work->data);
    free(work);
}

static void take_mail(struct kvstore *s)
{
    for (struct mail *m = mailbox_take(&s->mailbox), *next; m; m = next) {
        next = m->next;
        on_work(s, (struct store_work *)m); /* mail is the first member of struct store_work */
    }
    request_advance_all(s);
}

enum td_status kvstore_run(struct kvstore *s)
{
    struct ticker *beats = ticker_start("beat", BEAT_MS * NS_PER_MS, beat, s);
    while (!atomic_load(&s->forced) && !(atomic_load(&s->stopping) && !s->n_wire && tier_is_settled(s))) {
        take_mail(s);
        /* Limits on readers and on this store's own SSD are judged by this time, which leaves out our
         * absences. */
        uint64_t patience = absence_now(&s->absence, 0);
        request_free_doubtful(s, patience, false);
        pinned_tick(s, clock_now(&s->clock));
        keeps_expire(&s->keeps, clock_now(&s->clock));
        bool is_waiting = request_expire(s, patience);
        if (atomic_load(&s->stopping) && s->ssd)
            ssd_tier_hurry(s->ssd);
        event_queue_flush(&s->events, s->links);
        note_load(s);
        mailbox_wait(&s->mailbox, is_waiting ? WAITING_MS : IDLE_MS);
    }
    ticker_stop(beats);
    /* Routers hear that the store leaves, so that they don't count it as lost. */
    send_load(s);
    return TD_OK;
}

void kvstore_stop(struct kvstore *s)
{
    if (atomic_exchange(&s->stopping, true))
        atomic_store(&s->forced, true);
    mailbox_push(&s->mailbox, &store_work_new(WORK_STOP)->mail);
}

void kvstore_reload(struct kvstore *s)
{
    faults_reload(s->faults);
}

/* ------------------------------------------------------------ open, close */

static void open_table(struct kvstore *s, uint32_t n_slots, bool has_ssd, enum eviction_policy policy)
{
    double share = s->options.tenant_quota;
    table_close(s->table);
    s->table = table_open(n_slots, has_ssd, policy);
    table_set_quotas(s->table, share > 0 ? share : 1, s->quotas, s->n_quotas);
}

/* Finds the number of blocks that DRAM holds; nothing is allocated yet. */
static enum td_status size_dram(const struct kvstore *s, uint64_t *n_slots_out, struct td_error *e)
{
    const struct available_memory there = available_memory("");
    struct size_asked dram;
    sizes_dram(s->options.dram_bytes, &s->geometry, there.bytes / SIZES_ALONE, &dram);
    uint64_t n_slots = dram.bytes / s->page_bytes;
    if (!n_slots || n_slots > UINT32_MAX)
        return td_fail(e, TD_ERR_INVALID, "--dram-bytes %llu: a block takes %llu", (unsigned long long)dram.bytes,
                       (unsigned long long)s->page_bytes);
    *n_slots_out = n_slots;
    return sizes_check(&dram, 1, 0, &there, e);
}

static enum td_status open_tiers(struct kvstore *s, struct td_error *e)
{
    struct kvstore_options *o = &s->options;
    enum eviction_policy policy = EVICTION_TANDEM;
    if (o->eviction && !eviction_policy_from_name(o->eviction, &policy))
        return td_fail(e, TD_ERR_INVALID, "--eviction %s: expected one of " EVICTION_NAMES, o->eviction);
    if (o->codec && !block_codec_from_name(o->codec, &s->codec))
        return td_fail(e, TD_ERR_INVALID, "--codec %s: expected one of " BLOCK_CODEC_NAMES, o->codec);
    enum td_status status = quotas_parse(o->tenant_quotas, &s->quotas, &s->n_quotas, e);
    if (!status)
        status = geometry_resolve(&o->geometry, &s->geometry, e);
    if (status)
        return status;
    s->page_bytes = kv_layout_page_bytes(&s->geometry.layout);
    if (!o->dir)
        s->codec = BLOCK_RAW; /* blocks in DRAM are never encoded */
    uint64_t n_slots = 0;
    status = size_dram(s, &n_slots, e);
    if (status)
        return status;
    s->arena_bytes = n_slots * s->page_bytes;
    /* Readers on this host may map a shared arena; without one they get the bytes by messages. */
    if (mem_map_shared(s->arena_bytes, &s->arena, &s->arena_fd))
        status = mem_map(s->arena_bytes, &s->arena);
    if (status)
        return td_fail(e, status, "--dram-bytes %lld: the system has not as much", (long long)o->dram_bytes);
    open_table(s, (uint32_t)n_slots, o->dir != NULL, policy);
    if (!o->dir)
        return TD_OK;
    status = tier_open_ssd(s, e);
    if (!status || status == TD_ERR_REFUSED)
        return status;
    log_error(&s->log, "no SSD tier: %s", e->text); /* a cache in DRAM alone is better than none */
    open_table(s, (uint32_t)n_slots, false, policy);
    return TD_OK;
}

static enum td_status open_network(struct kvstore *s, struct xfer_hub *hub, struct td_error *e)
{
    struct kvstore_options *o = &s->options;
    reach_xfer(&s->reach, s->xfer_listen, s->xfer_address);
    const struct xfer_config x = {.backend = hub ? XFER_LOOPBACK : XFER_NET,
                                  .hub = hub,
                                  .name = s->name,
                                  .listen = hub ? s->name : s->xfer_listen,
                                  .reached_at = s->xfer_address,
                                  .transports = o->transports,
                                  .is_trusted_network = o->is_trusted_network,
                                  .encrypts = o->encrypts,
                                  .incarnation = s->incarnation,
                                  .secret = s->secret,
                                  .layout = &s->geometry.layout,
                                  .arena = s->arena,
                                  .arena_bytes = s->arena_bytes,
                                  .arena_fd = s->arena_fd,
                                  .silence_ns = (uint64_t)o->silence_ms * NS_PER_MS,
                                  .max_inflight_bytes = IN_FLIGHT_BYTES,
                                  .faults = s->faults,
                                  .clock = &s->clock,
                                  .log = &s->log,
                                  .callbacks = {.user = s, .on_message = request_on_message}};
    enum td_status status = xfer_open(&x, &s->xfer, e);
    if (!status)
        reach_xfer(&s->reach, xfer_address(s->xfer), s->xfer_address);
    if (!status && o->metrics_listen)
        status = metrics_http_open(s->metrics, o->metrics_listen, &s->metrics_http, s->metrics_address, e);
    const struct link_server_config l = {.tls = &o->tls,
                                         .reach = &s->reach,
                                         .secret = s->secret,
                                         .log = &s->log,
                                         .deliver = on_link_mail,
                                         .hello = hello,
                                         .user = s};
    if (!status)
        status = link_server_open(&l, &s->links, e);
    const struct registrar_config r = {.routers = o->routers,
                                       .tls = &o->tls,
                                       .address = status ? NULL : link_server_reached(s->links),
                                       .secret = s->secret,
                                       .incarnation = s->incarnation,
                                       .log = &s->log};
    return status ? status : registrar_open(&r, &s->registrar, e);
}

/*
 * RocksDB allocates a buffer or two for each block that it reads or writes. With the default limits each of
 * them is fresh memory from the system, which is cleared page by page and returned at once: a third of the
 * cost of reading.
 */
static void keep_buffers(void)
{
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 256 << 20);
}

enum td_status kvstore_open(const struct kvstore_config *config, struct kvstore **out, struct td_error *error_out)
{
    keep_buffers();
    struct kvstore *s = mem_zalloc(sizeof(*s));
    s->options = config->options;
    if (s->options.name)
        snprintf(s->name, sizeof(s->name), "%s", s->options.name);
    else
        snprintf(s->name, sizeof(s->name), "store-%d", (int)getpid());
    s->log = (struct log){.who = s->name, .level = (enum log_level)log_level_parse(s->options.log_level)};
    clock_init_real(&s->clock);
    absence_init(&s->absence, &s->clock, TURN_MS * NS_PER_MS);
    s->incarnation = random_u64();
    s->reach = (struct reach_config){s->options.listen, s->options.xfer_listen, s->options.advertise};
    event_queue_init(&s->events, s->incarnation);
    mailbox_init(&s->mailbox);
    pthread_mutex_init(&s->load_lock, NULL);
    s->metrics = metrics_open();
    s->counters = metrics_add(s->metrics, METRIC_INFO, sizeof(METRIC_INFO) / sizeof(METRIC_INFO[0]), NULL);
    enum td_status status = faults_open(s->options.faults, &s->log, &s->faults, error_out);
    faults_export(s->faults, s->metrics);
    if (!status)
        status = secret_open(s->options.secret, s->options.secret_file, &s->log, &s->secret, error_out);
    if (!status)
        status = rpc_tls_check(&s->options.tls, true, error_out);
    if (!status)
        status = reach_listen(&s->reach, s->xfer_listen, error_out);
    if (!status)
        status =
            reach_guard("--listen", s->options.listen, secret_is_set(s->secret), s->options.is_insecure, error_out);
    if (!status)
        status =
            reach_guard("--xfer-listen", s->xfer_listen, secret_is_set(s->secret), s->options.is_insecure, error_out);
    if (!status)
        status = open_tiers(s, error_out);
    if (!status)
        status = open_network(s, config->hub, error_out);
    if (status) {
        kvstore_close(s);
        return status;
    }
    note_load(s);
    absence_log(&s->absence, &s->log);
    log_info(&s->log, "ready address=%s xfer=%s slots=%u block_kib=%llu blocks_ssd=%llu dir=%s", kvstore_address(s),
             s->xfer_address, s->audit.total, (unsigned long long)(s->page_bytes >> 10),
             (unsigned long long)s->audit.n_ssd, s->ssd ? s->options.dir : "none");
    *out = s;
    return TD_OK;
}

/* Order: first no router and no pin can change anything; then the SSD tier ends its reads and writes; then
 * the wire ends all leases and pulls. Their ends come by mail and are taken after each. */
void kvstore_close(struct kvstore *s)
{
    if (!s)
        return;
    s->is_closing = true;
    registrar_close(s->registrar);
    link_server_close(s->links);
    pinned_forget_in_use(s);
    ssd_tier_close(s->ssd); /* before the wire: blocks that were read may still be announced */
    s->ssd = NULL;
    take_mail(s);
    xfer_close(s->xfer); /* when this returns, the ends of all leases and pulls are in the mailbox */
    take_mail(s);
    request_free_doubtful(s, 0, true);
    metrics_http_close(s->metrics_http);
    faults_close(s->faults);
    metrics_close(s->metrics);
    mailbox_fini(&s->mailbox);
    pthread_mutex_destroy(&s->load_lock);
    table_close(s->table);
    pins_free(&s->pins);
    keeps_free(&s->keeps);
    bytes_free(&s->doomed);
    free(s->quotas);
    mem_unmap(s->arena, s->arena_bytes);
    if (s->arena_fd)
        close(s->arena_fd);
    event_queue_free(&s->events);
    secret_close(s->secret);
    free(s);
}

const char *kvstore_xfer_address(const struct kvstore *s)
{
    return xfer_address(s->xfer);
}

const char *kvstore_address(const struct kvstore *s)
{
    return link_server_address(s->links);
}
