/*
 * Prefill legs: what they do beyond other legs (worker/leg.h).
 *
 * The leg computes the prompt and samples the first token. If the request has a decode leg, a lease on the
 * sequence's pages is granted when the leg begins, so that a pull which comes early finds it. Pages are
 * announced layer by layer as they get complete, and the lease is finished with the first token in its tail.
 * The leg ends there; the pages stay leased until the reader releases them or its time is over.
 *
 * What must hold: the lease holds a page from its first announcement on, and that comes while the sequence
 * still holds the page.
 */
#include <stdlib.h>

#include "base/mem.h"
#include "worker/first_token.h"
#include "worker/worker_internal.h"

static void grant(struct worker *w, struct leg *leg)
{
    if (leg->peer_incarnation)
        leg->lease = lease_open(w, leg->id, leg->peer_incarnation, false);
}

/* Page 0 of the lease is page leg->first_page of the sequence: the decode worker needs none before it. */
static void announce(struct worker *w, struct leg *leg, uint32_t first, uint32_t n, uint16_t begin, uint16_t end)
{
    uint32_t n_pages;
    const struct page_ref *refs = engine_seq_pages(leg->seq, &n_pages);
    if (!leg->lease || first + n <= leg->first_page)
        return;
    uint32_t unseen = first < leg->first_page ? leg->first_page - first : 0;
    first += unseen;
    n -= unseen;
    struct xfer_page *pages = mem_array(n, sizeof(*pages));
    for (uint32_t i = 0; i < n; i++) {
        struct page_ref ref = refs[first + i];
        pages[i] = (struct xfer_page){kvpool_address(engine_pool(w->engine), ref), ref.generation};
        if (first + i - leg->first_page >= leg->lease->held.n) /* first announcement of this page: hold it */
            held_add(w, &leg->lease->held, ref);
    }
    xfer_lease_announce(w->xfer, leg->id, first - leg->first_page, pages, n, begin, end);
    free(pages);
}

/* Finishes the lease with the first token. Cancels it if that token ended the answer: nobody will decode. */
static void hand_over(struct worker *w, struct leg *leg)
{
    uint8_t tail[FIRST_TOKEN_MAX_BYTES];
    if (!leg->lease)
        return;
    if (leg->finish != FINISH_NONE) {
        xfer_lease_cancel(w->xfer, leg->id);
    } else {
        log_debug(&w->log, "handed over req=%s pages=%u", leg->req, leg->lease->held.n);
        xfer_lease_finish(w->xfer, leg->id, leg->lease->held.n, tail, first_token_encode(&leg->first_token, tail));
    }
    leg->lease = NULL; /* it ends by itself, when the reader releases it or its time is over */
}

const struct leg_kind PREFILL_LEG = {.name = "prefill",
                                     .goal = SEQ_FIRST_TOKEN,
                                     .computes_prompt = true,
                                     .begin = grant,
                                     .admitted = leg_admit_prompt,
                                     .pages_ready = announce,
                                     .finish = hand_over};
