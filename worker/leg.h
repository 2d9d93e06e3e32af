/*
 * Legs: one worker's part of a request, from the router's message to the answer.
 *
 *   prefill     computes the prompt, samples the first token, leases its KV pages to the decode worker
 *   decode      reserves pages, pulls the KV, generates from the first token on
 *   aggregated  computes the prompt and generates; both roles get such legs (plans aggregated and kept)
 *
 * leg.c does what all legs have in common. What only one kind does is in prefill/handover.c and
 * decode/adopt.c, behind the table struct leg_kind, which leg.c names and they define: so includes point from
 * the roles to worker/, and every worker process has all kinds, whatever its role is.
 *
 * A leg ends with one LegEnd message, unless its router is gone. Cancelling closes the sequence at once;
 * pages that the wire may still touch keep their transfer holds until the lease or pull has ended.
 *
 * Threads: all of it runs on the engine thread.
 */
#pragma once

#include "base/list.h"
#include "engine/engine.h"
#include "proto/wire/store_msg.h"
#include "transfer/xfer.h"
#include "worker/link.h"

struct leg;
struct worker;
struct worker_work;

/* What a kind of leg does beyond what all legs do. All members but the functions are set. */
struct leg_kind {
    const char *name; /* for logs */
    enum seq_goal goal;
    bool computes_prompt; /* so it looks for the prefix elsewhere, and scores the prompt if that was asked for */
    bool generates;       /* tokens after the first one */
    /* Validates the fields that only this kind needs. NULL: none. */
    enum td_status (*check)(const Tandem__Worker__V1__Leg *m, struct td_error *error_out);
    /* The leg has been taken. NULL: nothing to do. */
    void (*begin)(struct worker *w, struct leg *leg);
    /* The sequence has its pages, the first n_matched of which need no computing. */
    void (*admitted)(struct worker *w, struct leg *leg, uint32_t n_matched);
    /* Inside engine_step(): pages [first, first + n) are complete in layers [begin, end). NULL: ignored. */
    void (*pages_ready)(struct worker *w, struct leg *leg, uint32_t first, uint32_t n, uint16_t begin, uint16_t end);
    /* The sequence has ended well; the LegEnd comes after this. NULL: nothing to do. */
    void (*finish)(struct worker *w, struct leg *leg);
    /* The leg's pull has ended with work->status; leg->pull is NULL. NULL: such a leg has none. */
    void (*pull_ended)(struct worker *w, struct leg *leg, const struct worker_work *work);
};

extern const struct leg_kind PREFILL_LEG; /* prefill/handover.c */
extern const struct leg_kind DECODE_LEG;  /* decode/adopt.c */

enum { MAX_STORES = 64, MAX_HOLDERS = 16 };

/* A store that a leg may load blocks from and must offer its blocks to. */
struct store_ref {
    char *address; /* address for KV transfers */
    uint64_t id;   /* the store's number in rendezvous hashing (sched/ring.h) */
};

/*
 * Blocks [first, first + n) of the prompt that the router believes one source to have. Sources below
 * leg.n_stores are leg.stores; the sources from n_stores on are leg.holders.
 */
struct store_run {
    uint32_t store, first, n;
};

/* The blocks that one source of a leg's prefix was asked for, and the pull that brings them. */
struct prefix_source {
    struct xfer_id id;
    uint32_t source;          /* numbered as in store_run */
    uint32_t *blocks, n, cap; /* positions in the prompt's chain of blocks, ascending */
    struct worker_pull *pull; /* NULL: not started, or ended */
    bool is_over;
    /* Leading entries of blocks[] that were in the pool when the pull started, and that are there now. */
    uint32_t n_have, n_got;
    struct store_found found;
};

/* One worker's part of a request; leg_start() makes it, leg_free() in leg.c frees it and its sequence. */
struct leg {
    LIST_ENTRY(leg) in_worker;
    struct xfer_id id;
    const struct leg_kind *kind;
    struct link *link;
    struct seq *seq;
    struct worker_lease *lease; /* prefill legs whose request has a decode leg; NULL after the lease ended */
    struct worker_pull *pull;   /* decode legs: the handover; NULL before admission and after its end */
    char *peer;                 /* transfer address of the prefill worker; NULL: none */
    struct store_ref *stores;
    char **holders; /* transfer addresses of other workers that have some of the prompt's blocks */
    struct store_run *runs;
    uint32_t n_stores, n_holders, n_runs, hot_blocks, tenant;

    /* Written by prefix.c. loads were asked for; n_loading of them are being pulled. */
    struct prefix_source *loads;
    uint32_t n_loads, n_loading;
    /* First block that was asked for; blocks that were in the pool when the sequence got its pages. */
    uint32_t load_first, n_matched;
    struct store_found found; /* sum over all stores */
    uint32_t n_from_holders;  /* blocks that other workers gave */
    uint64_t asked_ns, load_begin_ns, stores_done_ns, holders_done_ns;

    uint64_t peer_incarnation;
    /* Tokens of the original prompt; leading blocks that no store needs to be offered. */
    uint32_t n_prompt, n_from_store;
    /* Tokens that came with the leg; tokens of them that the router expects this worker to compute. */
    uint32_t n_ids, n_new;
    double tpot_ms; /* TPOT limit in ms; 0: none */
    /* Page of the sequence with index 0 in a handover; no layer sees the pages before it. */
    uint32_t first_page;
    char req[LOG_WORD_BYTES]; /* the request id as one word for logs */
    uint64_t deadline_ns, transfer_ns, exposed_ns;
    /* Prompt tokens by where their KV came from: this pool, other workers, DRAM and SSD of stores. */
    uint32_t cached_worker, cached_peer, cached_dram, cached_ssd;
    struct sampled first_token; /* the last token sampled here: in a prefill leg, the first one of the answer */
    bool ended;                 /* the sequence ended in this step: leg_flush() ends the leg */
    enum seq_finish finish;
};

/* Begins a leg, or refuses it with a LegEnd. m is borrowed during the call. */
void leg_start(struct worker *w, struct link *link, const Tandem__Worker__V1__Leg *m);
/* Ends a leg early and frees it. tell: send a LegEnd to the router; false: the router is gone. */
void leg_abort(struct worker *w, struct leg *leg, enum td_status why, const char *text, bool tell);
/* Cancels the leg with that id or, if the leg has ended, its lease that still waits for a reader. */
void leg_cancel(struct worker *w, struct xfer_id id, enum td_status why, const char *text);
void leg_cancel_link(struct worker *w, const struct link *link);
void leg_cancel_all(struct worker *w, enum td_status why, const char *text);
void leg_expire(struct worker *w, uint64_t now);
/* After a step: sends the tokens first, then ends the legs whose sequences have ended. */
void leg_flush(struct worker *w);
/* A pull has ended: nothing writes into its pages any more. Gives up their holds and goes on with the leg. */
void leg_pull_ended(struct worker *w, struct worker_work *work);

/* Callbacks of the engine (engine/engine.h). They never free a leg: the engine still walks its sequences. */
void leg_on_admitted(void *user, struct seq *seq, uint32_t n_matched);
void leg_on_pages_ready(void *user, struct seq *seq, uint32_t first, uint32_t n, uint16_t begin, uint16_t end);
void leg_on_token(void *user, struct seq *seq, const struct sampled *token);
void leg_on_end(void *user, struct seq *seq, enum seq_finish finish);

/* For the kinds of legs. */
Tandem__Worker__V1__TransferId leg_message_id(struct xfer_id id);
/* Keeps a token until leg_flush(). Call it before the token is appended: the length gives its position. */
void leg_put_token(struct worker *w, struct leg *leg, const struct sampled *token);
/* `admitted` of legs that compute the prompt: loads what is elsewhere of its prefix, if anything is. */
void leg_admit_prompt(struct worker *w, struct leg *leg, uint32_t n_matched);
