/*
 * The stream between a router and a worker or store, on the serving side: hello, proof of the cluster secret, messages.
 *
 * One link for each router that is attached. The owner gets messages as mail and answers from any thread. A router that
 * stops reading is cut off when its queue is full; its legs are then cancelled as if it had died.
 */
#pragma once

#include <stdint.h>

#include "base/queue.h"
#include "proto/rpc/rpc.h"
#include "worker.pb-c.h"

enum { LINK_PROTOCOL_VERSION = 1, LINK_PROOF_BYTES = 32, LINK_MAX_MESSAGE_BYTES = 64 << 20 };

struct link; /* counted; link_ref/unref */

enum link_mail_kind { LINK_MESSAGE, LINK_UP, LINK_GONE };

struct link_mail { /* the owner frees it with link_mail_free */
    struct mail mail;
    enum link_mail_kind kind;
    struct link *link;                          /* holds a ref */
    Tandem__Worker__V1__RouterMessage *message; /* LINK_MESSAGE; never a hello */
};

struct link_server;

struct link_server_config {
    const char *listen;
    const char *secret;
    struct faults *faults; /* borrowed; NULL: none */
    const struct log *log;
    /* On an rpc thread: takes the mail over. */
    void (*deliver)(void *user, struct link_mail *mail);
    /* On an rpc thread, for each router that proved itself: packs nothing, fills in. Strings stay as long as the server. */
    void (*hello)(void *user, Tandem__Worker__V1__WorkerHello *out);
    void *user;
};

enum td_status link_server_open(const struct link_server_config *config, struct link_server **out,
                                struct td_error *error_out);
const char *link_server_address(const struct link_server *s);
void link_server_close(struct link_server *s); /* NULL is fine; LINK_GONE comes for every link before it returns */

/* What the mail asked for is done: the next Load says so. */
void link_mail_free(struct link_mail *mail);
struct link *link_ref(struct link *link);
void link_unref(struct link *link);
uint64_t link_router_incarnation(const struct link *link);

/* Any thread. Nothing comes of it when the router is gone. */
void link_send(struct link *link, const Tandem__Worker__V1__WorkerMessage *message);
/*
 * The legs that the engine has of this router, by counter; Loads tell them. A leg begins before its mail is freed, and ends after its
 * end was sent: so a router that finds a leg neither in a Load nor ended knows that it was forgotten.
 */
void link_leg_began(struct link *link, uint64_t counter);
void link_leg_ended(struct link *link, uint64_t counter);
/* To every router attached. */
void link_server_send_all(struct link_server *s, const Tandem__Worker__V1__WorkerMessage *message);
void link_server_send_others(struct link_server *s, const struct link *except,
                             const Tandem__Worker__V1__WorkerMessage *message);

/* HMAC-SHA-256 by the cluster secret of "tandem-attach" || incarnation (little-endian). */
void link_proof(const char *secret, uint64_t incarnation, uint8_t out[LINK_PROOF_BYTES]);
