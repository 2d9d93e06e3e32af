/*
 * Metrics in Prometheus' text format, per instance: a part of a process owns a registry, and modules add
 * their metrics.
 *
 * A module lists its metrics once, as an X-macro, which gives an enum and a table:
 *
 *     #define XFER_METRICS(X) \
 *         X(XFER_BYTES_IN, METRIC_COUNTER, "tandem_transfer_received_bytes_total", "KV bytes received")
 *     enum { METRICS_ENUM(XFER_METRICS) };
 *     static const struct metric_info INFO[] = {METRICS_TABLE(XFER_METRICS)};
 *
 * Threads: any thread may add sets, change metrics and render them; changes are atomic. A set is handed to
 * other threads as any pointer is. It stays until metrics_close(): what may come again, as a peer, keeps its
 * set, or the page would have the same labels twice.
 */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/status.h"

enum metric_type { METRIC_COUNTER, METRIC_GAUGE, METRIC_SECONDS /* a histogram of durations */ };

struct metric_info {
    enum metric_type type;
    const char *name, *help;
};

#define METRICS_ENUM_1(id, type, name, help)  id,
#define METRICS_TABLE_1(id, type, name, help) {type, name, help},
#define METRICS_ENUM(LIST)                    LIST(METRICS_ENUM_1)
#define METRICS_TABLE(LIST)                   LIST(METRICS_TABLE_1)

struct metrics;     /* registry */
struct metrics_set; /* the metrics of one module, indexed by its enum */

struct metrics *metrics_open(void);
void metrics_close(struct metrics *m);

/* info is borrowed until metrics_close (a static table). labels (such as worker="p0") are copied; NULL:
 * none. The registry owns the set. */
struct metrics_set *metrics_add(struct metrics *m, const struct metric_info *info, uint32_t n, const char *labels);

/*
 * The metrics of another set under other names: info[i] shows of's metric ids[i]. All but `of` as in
 * metrics_add(); ids are borrowed, too.
 */
void metrics_alias(struct metrics *m, struct metrics_set *of, const struct metric_info *info, const uint32_t *ids,
                   uint32_t n, const char *labels);

void metrics_inc(struct metrics_set *s, uint32_t id, uint64_t by); /* does nothing if s is NULL */
void metrics_gauge(struct metrics_set *s, uint32_t id, double value);
void metrics_observe_ns(struct metrics_set *s, uint32_t id, uint64_t duration_ns);
/* Value of a counter, or number of observations. */
uint64_t metrics_get(const struct metrics_set *s, uint32_t id);

/* Appends all metrics to out. */
void metrics_render(struct metrics *m, struct bytes *out);

/* Serves GET /metrics over HTTP on "HOST:PORT" (port 0 picks one; of a name with addresses of both kinds,
 * that of IPv4). address_out is the address, with its port. */
struct metrics_http;
enum td_status metrics_http_open(struct metrics *m, const char *listen, struct metrics_http **out, char address_out[64],
                                 struct td_error *error_out);
void metrics_http_close(struct metrics_http *h); /* NULL is fine */
