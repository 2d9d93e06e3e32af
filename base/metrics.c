#include "base/metrics.h"

#include <microhttpd.h>
#include <netdb.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/host_port.h"
#include "base/list.h"

/* Upper bounds of the duration histogram in nanoseconds: 100 us to 100 s, three per decade. */
static const uint64_t BOUNDS[] = {100000,      200000,      500000,      1000000,     2000000,
                                  5000000,     10000000,    20000000,    50000000,    100000000,
                                  200000000,   500000000,   1000000000,  2000000000,  5000000000,
                                  10000000000, 20000000000, 50000000000, 100000000000};
enum { N_BOUNDS = sizeof(BOUNDS) / sizeof(BOUNDS[0]) };

/*
 * An observation is counted in value first, then in its bucket. Rendering reads the buckets first: so the
 * last bucket, le="+Inf", is never below the others, as Prometheus demands, whatever is observed meanwhile.
 */
struct metric {
    /* counter: the value; gauge: bits of a double; histogram: number of observations. */
    _Atomic uint64_t value;
    _Atomic uint64_t sum_ns;   /* histograms only */
    _Atomic uint64_t *buckets; /* [N_BOUNDS], histograms only: durations above the bound before and up to this one */
};

struct metrics_set {
    struct metrics_set *next;
    const struct metric_info *info;
    uint32_t n;
    char *labels;
    struct metric *metrics;
    const struct metrics_set *of; /* shows this set's metrics `ids` instead; NULL: its own */
    const uint32_t *ids;
};

struct metrics {
    /* Guards the list of sets: registering and rendering are rare, and no thread owns the list. */
    pthread_mutex_t lock;
    struct metrics_set *sets, **tail;
};

struct metrics *metrics_open(void)
{
    struct metrics *m = mem_zalloc(sizeof(*m));
    pthread_mutex_init(&m->lock, NULL);
    m->tail = &m->sets;
    return m;
}

void metrics_close(struct metrics *m)
{
    if (!m)
        return;
    while (m->sets) {
        struct metrics_set *s = m->sets;
        m->sets = s->next;
        for (uint32_t i = 0; s->metrics && i < s->n; i++)
            free(s->metrics[i].buckets);
        free(s->metrics);
        free(s->labels);
        free(s);
    }
    pthread_mutex_destroy(&m->lock);
    free(m);
}

static struct metrics_set *add_set(struct metrics *m, struct metrics_set set, const char *labels)
{
    struct metrics_set *s = mem_dup(&set, sizeof(set));
    s->labels = mem_strdup(labels ? labels : "");
    pthread_mutex_lock(&m->lock);
    *m->tail = s;
    m->tail = &s->next;
    pthread_mutex_unlock(&m->lock);
    return s;
}

struct metrics_set *metrics_add(struct metrics *m, const struct metric_info *info, uint32_t n, const char *labels)
{
    struct metric *metrics = mem_array(n, sizeof(*metrics));
    for (uint32_t i = 0; i < n; i++)
        if (info[i].type == METRIC_SECONDS)
            metrics[i].buckets = mem_array(N_BOUNDS, sizeof(*metrics[i].buckets));
    return add_set(m, (struct metrics_set){.info = info, .n = n, .metrics = metrics}, labels);
}

void metrics_alias(struct metrics *m, struct metrics_set *of, const struct metric_info *info, const uint32_t *ids,
                   uint32_t n, const char *labels)
{
    add_set(m, (struct metrics_set){.info = info, .n = n, .of = of, .ids = ids}, labels);
}

void metrics_inc(struct metrics_set *s, uint32_t id, uint64_t by)
{
    if (s)
        atomic_fetch_add_explicit(&s->metrics[id].value, by, memory_order_relaxed);
}

void metrics_gauge(struct metrics_set *s, uint32_t id, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    if (s)
        atomic_store_explicit(&s->metrics[id].value, bits, memory_order_relaxed);
}

void metrics_observe_ns(struct metrics_set *s, uint32_t id, uint64_t duration_ns)
{
    if (!s)
        return;
    struct metric *m = &s->metrics[id];
    atomic_fetch_add_explicit(&m->value, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&m->sum_ns, duration_ns, memory_order_relaxed);
    for (uint32_t i = 0; i < N_BOUNDS; i++)
        if (duration_ns <= BOUNDS[i]) {
            atomic_fetch_add_explicit(&m->buckets[i], 1, memory_order_release);
            break;
        }
}

uint64_t metrics_get(const struct metrics_set *s, uint32_t id)
{
    return s ? atomic_load_explicit(&s->metrics[id].value, memory_order_relaxed) : 0;
}

static void render_histogram(const struct metric_info *info, struct metric *m, const char *labels, struct bytes *out)
{
    uint64_t total = 0;
    const char *comma = *labels ? "," : "";
    for (uint32_t i = 0; i < N_BOUNDS; i++) {
        total += atomic_load_explicit(&m->buckets[i], memory_order_acquire);
        bytes_printf(out, "%s_bucket{%s%sle=\"%g\"} %llu\n", info->name, labels, comma, (double)BOUNDS[i] * 1e-9,
                     (unsigned long long)total);
    }
    unsigned long long count = atomic_load_explicit(&m->value, memory_order_relaxed);
    bytes_printf(out, "%s_bucket{%s%sle=\"+Inf\"} %llu\n", info->name, labels, comma, count);
    bytes_printf(out, "%s_sum{%s} %.9f\n%s_count{%s} %llu\n", info->name, labels,
                 (double)atomic_load_explicit(&m->sum_ns, memory_order_relaxed) * 1e-9, info->name, labels, count);
}

static void render_one(const struct metric_info *info, struct metric *m, const char *labels, struct bytes *out)
{
    uint64_t value = atomic_load_explicit(&m->value, memory_order_relaxed);
    double gauge;
    memcpy(&gauge, &value, sizeof(gauge));
    if (info->type == METRIC_COUNTER)
        bytes_printf(out, "%s{%s} %llu\n", info->name, labels, (unsigned long long)value);
    else if (info->type == METRIC_GAUGE)
        bytes_printf(out, "%s{%s} %.17g\n", info->name, labels, gauge);
    else
        render_histogram(info, m, labels, out);
}

void metrics_render(struct metrics *m, struct bytes *out)
{
    static const char *const TYPES[] = {"counter", "gauge", "histogram"};
    pthread_mutex_lock(&m->lock);
    for (struct metrics_set *s = m->sets; s; s = s->next) {
        /* Several sets may share a table (for example one per peer): each of its metrics is written once,
         * with all sets. */
        bool first = true;
        for (struct metrics_set *t = m->sets; t != s; t = t->next)
            first = first && t->info != s->info;
        for (uint32_t i = 0; first && i < s->n; i++) {
            bytes_printf(out, "# HELP %s %s\n# TYPE %s %s\n", s->info[i].name, s->info[i].help, s->info[i].name,
                         TYPES[s->info[i].type]);
            for (struct metrics_set *t = s; t; t = t->next)
                if (t->info == s->info)
                    render_one(&t->info[i], t->of ? &t->of->metrics[t->ids[i]] : &t->metrics[i], t->labels, out);
        }
    }
    pthread_mutex_unlock(&m->lock);
}

/* ------------------------------------------------------------------- HTTP */

enum { SCRAPERS_MAX = 64, SCRAPERS_KEPT = 32, SCRAPER_IDLE_S = 10 };

struct scraper { /* an open connection */
    TAILQ_ENTRY(scraper) in_http;
    int fd; /* the daemon's */
};

struct metrics_http {
    struct metrics *metrics;
    struct MHD_Daemon *daemon;
    TAILQ_HEAD(, scraper) scrapers; /* the oldest first; used by the daemon's thread only */
    uint32_t n_scrapers;
};

/*
 * On the daemon's thread, for each connection that begins or ends. Beyond SCRAPERS_KEPT the oldest one is
 * shut down: a client that drips its request byte by byte never reaches the daemon's own limit of time, and
 * Prometheus connects again.
 */
static void on_connection(void *user, struct MHD_Connection *c, void **state, enum MHD_ConnectionNotificationCode code)
{
    struct metrics_http *h = user;
    struct scraper *s = *state;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        s = *state = mem_zalloc(sizeof(*s));
        s->fd = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
        TAILQ_INSERT_TAIL(&h->scrapers, s, in_http);
        if (++h->n_scrapers > SCRAPERS_KEPT)
            shutdown(TAILQ_FIRST(&h->scrapers)->fd, SHUT_RDWR);
    } else if (s) {
        TAILQ_REMOVE(&h->scrapers, s, in_http);
        h->n_scrapers--;
        free(s);
        *state = NULL;
    }
}

static enum MHD_Result answer(void *user, struct MHD_Connection *c, const char *url, const char *method,
                              const char *version, const char *upload, size_t *upload_len, void **state)
{
    (void)version, (void)upload, (void)upload_len, (void)state;
    struct metrics_http *h = user;
    bool found = !strcmp(url, "/metrics") && !strcmp(method, "GET");
    struct bytes b = {0};
    if (found)
        metrics_render(h->metrics, &b);
    else
        bytes_printf(&b, "see /metrics\n");
    struct MHD_Response *r = MHD_create_response_from_buffer(b.len, b.data, MHD_RESPMEM_MUST_FREE);
    MHD_add_response_header(r, "Content-Type", "text/plain; version=0.0.4; charset=utf-8");
    enum MHD_Result result = MHD_queue_response(c, found ? MHD_HTTP_OK : MHD_HTTP_NOT_FOUND, r);
    MHD_destroy_response(r);
    return result;
}

/* NULL: the host has no address of this family. */
static struct addrinfo *resolve(const char *host, const char *port, int family)
{
    struct addrinfo hints = {.ai_family = family, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV | AI_PASSIVE};
    struct addrinfo *list = NULL;
    return getaddrinfo(*host ? host : NULL, port, &hints, &list) ? NULL : list;
}

enum td_status metrics_http_open(struct metrics *m, const char *listen, struct metrics_http **out, char address_out[64],
                                 struct td_error *error_out)
{
    const char *port;
    char host[HOST_BYTES];
    if (host_port_split(listen, host, &port, NULL))
        return td_fail(error_out, TD_ERR_INVALID, "metrics address '%s' is not HOST:PORT", listen);
    struct addrinfo *list = resolve(host, port, AF_INET);
    if (!list)
        list = resolve(host, port, AF_INET6);
    if (!list)
        return td_fail(error_out, TD_ERR_INVALID, "metrics address '%s' can't be resolved", listen);
    struct metrics_http *h = mem_zalloc(sizeof(*h));
    h->metrics = m;
    TAILQ_INIT(&h->scrapers);
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | (list->ai_family == AF_INET6 ? MHD_USE_IPv6 : 0);
    h->daemon =
        MHD_start_daemon(flags, 0, NULL, NULL, answer, h, MHD_OPTION_SOCK_ADDR, list->ai_addr,
                         MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)SCRAPER_IDLE_S, MHD_OPTION_CONNECTION_LIMIT,
                         (unsigned)SCRAPERS_MAX, MHD_OPTION_NOTIFY_CONNECTION, on_connection, h, MHD_OPTION_END);
    freeaddrinfo(list);
    if (!h->daemon) {
        free(h);
        return td_fail(error_out, TD_ERR_IO, "metrics address '%s' can't be listened on", listen);
    }
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(h->daemon, MHD_DAEMON_INFO_BIND_PORT);
    snprintf(address_out, 64, "%.*s:%u", (int)(port - listen) - 1 < 50 ? (int)(port - listen) - 1 : 50, listen,
             info ? info->port : 0);
    *out = h;
    return TD_OK;
}

void metrics_http_close(struct metrics_http *h)
{
    if (!h)
        return;
    MHD_stop_daemon(h->daemon);
    free(h);
}
