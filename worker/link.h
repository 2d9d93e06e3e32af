/*
 * The stream between a router and a worker or store, on the serving side: proof of the cluster secret
 * (worker/proof.h), hello, messages.
 *
 * One link exists for each attached router. The owner gets messages as mail and may answer from any thread. A
 * router that stops reading is cut off when its queue of 64 MiB is full; its legs are then cancelled as if it
 * had died.
 */
#pragma once

#include <stdint.h>

#include "base/queue.h"
#include "base/secret.h"
#include "proto/rpc/rpc.h"
#include "worker.pb-c.h"
#include "worker/reach.h"

enum { LINK_PROTOCOL_VERSION = 3, LINK_MAX_MESSAGE_BYTES = 64 << 20 };
enum { LINK_MAX_STREAMS = 256 }; /* open at once, and those that have not proved themselves make room */

/* Time between two heartbeats, which also acknowledge legs, and the least --silence-ms: a shorter one takes
 * every idle worker for dead. */
enum { LINK_BEAT_MS = 250, LINK_LEAST_SILENCE_MS = 2 * LINK_BEAT_MS };

struct link; /* counted: link_ref, link_unref */

enum link_mail_kind { LINK_MESSAGE, LINK_UP, LINK_GONE };

struct link_mail { /* the owner frees it with link_mail_free */
    struct mail mail;
    enum link_mail_kind kind;
    struct link *link;                          /* mail holds one reference */
    Tandem__Worker__V1__RouterMessage *message; /* LINK_MESSAGE; never a hello */
};

struct link_server;

struct link_server_config {
    const struct rpc_tls_files *tls;  /* borrowed; NULL: plain text */
    const struct reach_config *reach; /* where to listen, and what routers are told; borrowed */
    struct secret *secret;            /* borrowed; NULL: none */
    struct faults *faults;            /* borrowed; NULL: none */
    const struct log *log;
    /* On an rpc thread. The callee owns the mail and frees it with link_mail_free(). */
    void (*deliver)(void *user, struct link_mail *mail);
    /*
     * On an rpc thread, for each router that proved the secret: fills in the hello. Its strings must live as
     * long as the server.
     */
    void (*hello)(void *user, Tandem__Worker__V1__WorkerHello *out);
    void *user;
};

enum td_status link_server_open(const struct link_server_config *config, struct link_server **out,
                                struct td_error *error_out);
const char *link_server_address(const struct link_server *s); /* at which it listens */
const char *link_server_reached(const struct link_server *s); /* at which routers reach it (reach_rpc()) */
/* NULL is fine; LINK_GONE was delivered for every link when it returns. */
void link_server_close(struct link_server *s);

/*
 * Frees the mail when what it asked for is done: the next Load tells the router that the message was taken.
 */
void link_mail_free(struct link_mail *mail);
struct link *link_ref(struct link *link);
void link_unref(struct link *link);
uint64_t link_router_incarnation(const struct link *link);

/* Any thread. Does nothing if the router is gone; cuts it off if its queue is full. */
void link_send(struct link *link, const Tandem__Worker__V1__WorkerMessage *message);
/*
 * The legs of this router that the engine has, by counter; every Load lists them. A leg begins before its
 * mail is freed and ends after its LegEnd was sent. So a router knows that a leg was forgotten if the worker
 * took it, no Load lists it, and no LegEnd came.
 */
void link_leg_began(struct link *link, uint64_t counter);
void link_leg_ended(struct link *link, uint64_t counter);
/* To every attached router; _others: to all of them but one. */
void link_server_send_all(struct link_server *s, const Tandem__Worker__V1__WorkerMessage *message);
void link_server_send_others(struct link_server *s, const struct link *except,
                             const Tandem__Worker__V1__WorkerMessage *message);
