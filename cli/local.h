/* A whole cluster inside this process: a router, a prefill worker and a decode worker, with real gRPC on
 * ports that the system picks. For --local, benches and tests. */
#pragma once

#include "base/status.h"

struct local;

/* How the workers move KV; LOCAL_NET: as separate processes do. */
enum local_wire { LOCAL_LOOPBACK, LOCAL_NET };

/* worker_args: options of both workers ("--model", DIR, ...), ended by NULL; they must outlive the cluster.
 * plan: as in tandem-router. */
enum td_status local_open(const char *model, const char *const *worker_args, const char *plan, enum local_wire wire,
                          struct local **out, struct td_error *error_out);
const char *local_router(const struct local *l);
void local_close(struct local *l); /* NULL is fine */
