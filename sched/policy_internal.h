/* Shared by sched/policy.c and sched/policy_named.c: predictions for one worker. Times in milliseconds. */
#pragma once

#include "sched/policy.h"

/* The request's prefill on one worker. */
struct prefill_view {
    uint32_t worker, own_blocks, loaded_blocks, peer_from; /* blocks as in struct policy_candidate */
    /* wait: from now until it begins. compute: if nothing decodes beside it. ttft: from now. */
    double wait, load, compute, ttft;
    double share;       /* share of the worker's time that prompts get beside decoding sequences */
    double alone;       /* load + compute: the time on an idle worker */
    bool booked;        /* it would overlap a place that is booked for another request */
    const char *reason; /* why it is impossible; NULL: it is possible. Static text */
};

/* The request's decoding on one worker, from the end of its prefill on. */
struct decode_view {
    uint32_t worker;
    /*
     * start: from now; later than the end of the prefill if the worker has no room or would break a promise
     * then.
     */
    double tpot, start;
    /*
     * Longest step without prompts while it decodes, if a TPOT limit applies on this worker; otherwise its
     * first step.
     */
    double longest;
    double step; /* its first step, without prompts */
    /*
     * Cost of its decoding, in milliseconds of work: prompts get less time and, if the request has no TPOT
     * limit, the TPOT of every sequence there grows, its own included.
     */
    double delays;
    struct transfer transfer; /* its handover; all 0 if the prefill runs on the same worker */
    double exposed, gap;      /* part of the transfer after the prefill; between first and second token */
    double token;             /* mean between two later tokens */
    bool keeps;               /* this request and the sequences there stay within their TPOT limits */
    bool now;                 /* its pages and its place in the batch are free now */
    const char *reason;       /* why it is impossible; NULL: it is possible. Static text */
};

struct prefill_view policy_view_prefill(const struct policy_worker *workers, uint32_t i,
                                        const struct policy_request *r);
/*
 * after_ms: from now until its prefill ends. from: that prefill, on this or another worker; NULL: no
 * handover.
 */
struct decode_view policy_view_decode(const struct policy_worker *workers, uint32_t i, const struct policy_request *r,
                                      double after_ms, const struct prefill_view *from);

/* Whether w can read pages of worker `from`. */
static inline bool policy_can_read(const struct policy_worker *w, uint32_t from)
{
    return !w->unread || !(w->unread[from / 64] >> (from % 64) & 1);
}

/* Whether w, under load `at`, has a place in the batch and pages for prompt and expected answer. */
bool policy_has_room(const struct policy_worker *w, const struct policy_request *r, struct policy_load at);

/*
 * All policies but tandem: chooses the workers. *prefill_out is the prediction for the chosen prefill worker;
 * the caller predicts the decoding. The two are equal for an aggregated or kept plan. False: no worker can
 * take the request.
 */
bool policy_choose_named(const struct policy_worker *workers, uint32_t n, const struct policy_request *r,
                         struct prefill_view *prefill_out, uint32_t *decode_out);
