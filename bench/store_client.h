/*
 * The workers' side of the store's bench: a holder whose arena is the working set, and a reader with room for
 * it. Requests are 32 MiB long, two in flight at a time, as two sequences would have. What arrives is
 * compared with what was sent: bf16 numbers of magnitudes from 1/128 to 2, so that codecs find about as much
 * in them as in KV.
 *
 * Threads: the caller waits; the callbacks of the two transfer endpoints count.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>

#include "kvstore/kvstore.h"
#include "proto/wire/store_msg.h"

enum { BENCH_FLIGHTS = 2, BENCH_REQUEST_BYTES = 32 << 20, BENCH_REQUEST_BLOCKS = 256 };

enum bench_move {
    BENCH_WIRE, /* from worker to worker */
    BENCH_HIT,  /* from the store; every block must be found */
    BENCH_PUT   /* to the store; every block must be taken */
};

struct bench_client;

struct bench_flight { /* a request in flight */
    struct bench_client *client;
    struct xfer_id id;
    uint32_t first, n; /* blocks [first, first + n) */
    uint64_t began_ns, took_ns;
    bool is_busy, is_ok;
};

struct bench_client {
    struct xfer *holder, *reader;
    struct clock clock;
    struct log log;
    struct kv_layout layout;
    uint64_t page_bytes, next_id;
    uint8_t *source, *landing; /* arenas of holder and reader: n_blocks pages each */
    int source_fd;
    bool is_lossy; /* what comes back is not compared */
    uint32_t n_blocks, n_request;
    uint32_t generation;  /* part of the keys: another generation has other keys for the same bytes */
    const char *store;    /* the store's transfer address */
    pthread_mutex_t lock; /* guards the flights: callbacks end them, and the caller waits for that */
    pthread_cond_t changed;
    struct bench_flight flights[BENCH_FLIGHTS];
};

/* A page holds 16 tokens in bf16, 32 KiB for each of n_layers. transports as in xfer_config. */
enum td_status bench_client_open(struct bench_client *c, uint32_t n_layers, uint64_t bytes, const char *transports,
                                 struct td_error *error_out);
void bench_client_close(struct bench_client *c); /* also a half-opened client */

/* Moves blocks [first, first + n); false if one did not arrive. */
bool bench_client_move(struct bench_client *c, enum bench_move move, uint32_t first, uint32_t n);
bool bench_client_check(const struct bench_client *c); /* true if everything that landed is what was sent */
/* Moves n <= n_request blocks in one request, and checks them; *ns_out: its duration in ns. */
bool bench_client_time(struct bench_client *c, enum bench_move move, uint32_t first, uint32_t n, uint64_t *ns_out);
