/*
 * Decode legs: what they do beyond other legs (worker/leg.h).
 *
 * When the sequence has its pages, the leg is accepted, which the router waits for, and the pages that this
 * worker's prefix cache lacks are pulled from the prefill worker. When the last one is verified, the sequence
 * takes the first token out of the lease's tail and joins the batch.
 *
 * What must hold: the pull is opened while the sequence holds its pages, and the sequence runs only after the
 * pull has ended well.
 */
#include <inttypes.h>

#include "worker/first_token.h"
#include "worker/worker_internal.h"

static enum td_status check_peer(const Tandem__Worker__V1__Leg *m, struct td_error *error_out)
{
    if (m->peer_xfer_address.len && m->peer_incarnation)
        return TD_OK;
    return td_fail(error_out, TD_ERR_INVALID, "leg.peer_xfer_address: a decode leg needs one, and the incarnation");
}

static void say_accepted(const struct leg *leg)
{
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__LegAccepted accepted = TANDEM__WORKER__V1__LEG_ACCEPTED__INIT;
    Tandem__Worker__V1__TransferId id = leg_message_id(leg->id);
    accepted.id = &id;
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_ACCEPTED;
    m.accepted = &accepted;
    link_send(leg->link, &m);
}

/*
 * The first n_matched pages need no pull: they are in the prefix cache, or lie behind the sliding window of
 * every layer. Page 0 of the lease is page leg->first_page of the sequence, and n_matched >= leg->first_page.
 */
static void accept_leg(struct worker *w, struct leg *leg, uint32_t n_matched)
{
    uint32_t n_pages;
    const struct page_ref *pages = engine_seq_pages(leg->seq, &n_pages);
    engine_seq_fill(w->engine, leg->seq);
    struct worker_pull *p = leg->pull = pull_open(w, leg, pages + n_matched, NULL, n_pages - n_matched);
    p->n_have = n_matched - leg->first_page;
    metrics_inc(w->counters, WORKER_DECODE_CACHED_TOKENS, (uint64_t)p->n_have * w->geometry.layout.page_tokens);
    pull_start(w, p, leg->id, leg->peer, leg->peer_incarnation, leg->deadline_ns);
    log_debug(&w->log, "leg accepted req=%s had_pages=%u pages=%u", leg->req, p->n_have, n_pages - leg->first_page);
    say_accepted(leg);
}

static void note_times(struct worker *w, struct leg *leg, const struct xfer_pull_result *r)
{
    if (!r->bytes)
        return;
    leg->transfer_ns = r->done_ns - r->first_announce_ns;
    leg->exposed_ns = r->done_ns > r->last_announce_ns ? r->done_ns - r->last_announce_ns : 0;
    metrics_observe_ns(w->counters, WORKER_TRANSFER_SECONDS, leg->transfer_ns);
}

/* A handover is complete. Checks its size and tail, then lets the sequence run on from the first token. */
static void arrived(struct worker *w, struct leg *leg, const struct xfer_pull_result *r)
{
    uint32_t n_tokens, n_pages;
    struct sampled first;
    engine_seq_tokens(leg->seq, &n_tokens);
    engine_seq_pages(leg->seq, &n_pages);
    if (r->n_pages != n_pages - leg->first_page || first_token_decode(r->tail, r->tail_len_bytes, &first) ||
        first.id >= w->geometry.config.vocab_size) {
        leg_abort(w, leg, TD_ERR_PROTOCOL, "prefill worker handed over something else than this prompt", true);
        return;
    }
    note_times(w, leg, r);
    log_debug(&w->log, "handover arrived req=%s pages=%u bytes=%" PRIu64, leg->req, r->n_pages, r->bytes);
    engine_seq_filled(w->engine, leg->seq, n_tokens);
    leg_put_token(w, leg, &first); /* before the append: it reads the position from the length */
    engine_seq_append(w->engine, leg->seq, first.id);
}

static void pull_ended(struct worker *w, struct leg *leg, const struct worker_work *work)
{
    /*
     * The router has its own reactions to a handover that was late and to one that was cancelled. Any other
     * status means that this pair of workers failed.
     */
    bool is_own_case = work->status == TD_ERR_DEADLINE || work->status == TD_ERR_CANCELLED;
    const char *text = work->status == TD_ERR_CANCELLED ? "the prefill worker cancelled the handover of its KV"
                                                        : "KV did not arrive from the prefill worker";
    if (work->status)
        leg_abort(w, leg, is_own_case ? work->status : TD_ERR_PEER_LOST, text, true);
    else
        arrived(w, leg, &work->result);
}

const struct leg_kind DECODE_LEG = {.name = "decode",
                                    .goal = SEQ_ADOPT,
                                    .generates = true,
                                    .check = check_peer,
                                    .admitted = accept_leg,
                                    .pull_ended = pull_ended};
