/*
 * The addresses at which others reach a worker or a store: routers its gRPC service, peers its KV transfers.
 *
 *     --listen        --xfer-listen   --advertise    routers are told   peers are told
 *     10.0.0.5:7000   (none)          (none)         10.0.0.5:7000      10.0.0.5:PORT
 *     10.0.0.5:7000   (none)          a.example      a.example:7000     a.example:PORT
 *     0.0.0.0:7000    (none)          a.example:71   a.example:71       a.example:PORT
 *     0.0.0.0:7000    10.1.0.5:0      a.example      a.example:7000     10.1.0.5:PORT
 *     0.0.0.0:7000    any             (none)         refused: nobody can connect to 0.0.0.0
 *
 * PORT is the port that transfers listen on. Pure functions.
 */
#pragma once

#include <stdbool.h>

#include "base/secret.h"
#include "base/status.h"

enum { REACH_BYTES = 128 }; /* longest address that routers accept, with the final 0 */

struct reach_config {
    const char *listen;      /* HOST:PORT or unix:PATH */
    const char *xfer_listen; /* HOST:PORT; NULL: a free port of listen's host */
    /* HOST or HOST:PORT; an IPv6 address with a port is in brackets. NULL: none. */
    const char *advertise;
};

/* Whether only this host reaches the address: loopback or a unix socket. */
bool reach_is_local(const char *address);

/*
 * Refuses (TD_ERR_INVALID) a listener that the network reaches and that asks nobody for a proof: one off
 * loopback that asks for none (asks_proof), unless is_insecure. option names it in the error.
 */
enum td_status reach_guard(const char *option, const char *address, bool asks_proof, bool is_insecure,
                           struct td_error *error_out);

/* Chooses where transfers listen. TD_ERR_INVALID names the option with a bad address. */
enum td_status reach_listen(const struct reach_config *config, char xfer_listen_out[REACH_BYTES],
                            struct td_error *error_out);

/*
 * The addresses to tell others, once a service listens: `listens` is its address, port filled in. Call
 * reach_listen() first.
 */
void reach_rpc(const struct reach_config *config, const char *listens, char out[REACH_BYTES]);
void reach_xfer(const struct reach_config *config, const char *listens, char out[REACH_BYTES]);
