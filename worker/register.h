/*
 * Tells routers where this worker or store is, again every REGISTER_MS: so one that joins, or a router that started anew, is known
 * without anybody's list. Who is known already costs the router a comparison.
 *
 * Threads: one of its own.
 */
#pragma once

#include <stdint.h>

#include "base/log.h"
#include "base/status.h"

enum { REGISTER_MS = 2000 };

struct registrar;

struct registrar_config {
    const char *routers; /* HOST:PORT,...; NULL: none */
    const char *address; /* of the own service, as routers reach it; borrowed */
    const char *secret;  /* borrowed; may be NULL */
    uint64_t incarnation;
    const struct log *log;
};

enum td_status registrar_open(const struct registrar_config *config, struct registrar **out,
                              struct td_error *error_out);
void registrar_close(struct registrar *r); /* NULL is fine */
