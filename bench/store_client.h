/*
 * The workers' side of the store's bench: a holder whose arena is the working set, and a reader with room for it. Requests of
 * 32 MiB, two on their way at a time, as two sequences would have. What came is compared with what was sent: bf16 numbers of
 * magnitudes from 1/128 to 2, so that codecs find in them about what they find in KV.
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
    BENCH_HIT,  /* from the store, all of it */
    BENCH_PUT   /* to the store, all of it */
};

struct bench_client;

struct bench_flight { /* a request on its way */
    struct bench_client *client;
    struct xfer_id id;
    uint32_t first, n; /* blocks */
    uint64_t began_ns, took_ns;
    bool is_busy, is_ok;
};

struct bench_client {
    struct xfer *holder, *reader;
    struct clock clock;
    struct log log;
    struct kv_layout layout;
    uint64_t page_bytes, next_id;
    uint8_t *source, *landing; /* of holder and reader: n_blocks pages each */
    int source_fd;
    bool is_lossy; /* what comes back is not looked at */
    uint32_t n_blocks, n_request;
    uint32_t generation;  /* names other keys for the same bytes */
    const char *store;    /* transfer address */
    pthread_mutex_t lock; /* the flights: callbacks end them, the caller waits for that */
    pthread_cond_t changed;
    struct bench_flight flights[BENCH_FLIGHTS];
};

/* n_layers of 32 KiB a page of 16 tokens in bf16. tls as in xfer_config. */
enum td_status bench_client_open(struct bench_client *c, uint32_t n_layers, uint64_t bytes, const char *tls,
                                 struct td_error *error_out);
void bench_client_close(struct bench_client *c); /* also half-built */

/* Blocks [first, first + n), all of them; false if one did not come. */
bool bench_client_move(struct bench_client *c, enum bench_move move, uint32_t first, uint32_t n);
bool bench_client_check(const struct bench_client *c); /* all that landed is what was sent */
/* The same in one request, checked; its duration. n <= n_request. */
bool bench_client_time(struct bench_client *c, enum bench_move move, uint32_t first, uint32_t n, uint64_t *ns_out);
