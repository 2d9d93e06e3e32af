/*
 * Tells routers (their cluster listeners) where this worker or store is, again every REGISTER_MS, also if
 * they refuse it. So routers learn of a process that joins, and a router that starts anew learns of all,
 * without a list. For a router that knows the process already, a call costs one comparison.
 *
 * Threads: one of its own.
 */
#pragma once

#include <stdint.h>

#include "base/log.h"
#include "base/secret.h"
#include "base/status.h"
#include "proto/rpc/rpc.h"

enum { REGISTER_MS = 2000 };

struct registrar;

struct registrar_config {
    const struct rpc_tls_files *tls; /* of the connections to routers; borrowed; NULL: plain text */
    const char *routers;             /* HOST:PORT,...; NULL: none */
    const char *address;             /* this process's service, as routers reach it; borrowed */
    struct secret *secret;           /* borrowed; NULL: none */
    uint64_t incarnation;
    uint32_t every_ms; /* 0: REGISTER_MS */
    const struct log *log;
};

enum td_status registrar_open(const struct registrar_config *config, struct registrar **out,
                              struct td_error *error_out);
void registrar_close(struct registrar *r); /* NULL is fine */
