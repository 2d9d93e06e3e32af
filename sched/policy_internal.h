/* What sched/policy.c and sched/policy_named.c share: the predictions, one worker at a time. */
#pragma once

#include "sched/policy.h"

struct prefill_view { /* of one worker, as the place of the prefill */
    uint32_t worker, own_blocks, loaded_blocks, peer_from;
    double wait, load, compute, ttft; /* ttft: from now; compute: if nothing decoded there */
    double share;                     /* of the worker's time that prompts get beside what decodes there */
    double alone;                     /* load and compute if nothing else were there */
    bool booked;                      /* the worker is kept for one that was told to come back */
    const char *reason;               /* NULL: possible */
};

struct decode_view { /* of one worker, as the place of decoding, from the end of the prefill on */
    uint32_t worker;
    double tpot, start; /* start: from now; later than the prefill's end where pages must become free first */
    double longest;     /* step until it is over, under a TPOT limit; else the first one */
    double step;        /* of decoding alone */
    /*
     * What its decoding costs others, in milliseconds of work: prompts that get less of the time and, without a TPOT limit, every
     * request's longer TPOT, its own among them.
     */
    double delays;
    struct transfer transfer; /* of what comes to it from elsewhere */
    double exposed, gap;      /* of it, after the prefill; between first and second token */
    double token;             /* between two later ones */
    bool keeps;               /* all stay within their TPOT limits */
    bool now;                 /* the pages and a place are there already */
    const char *reason;
};

struct prefill_view policy_view_prefill(const struct policy_worker *workers, uint32_t i,
                                        const struct policy_request *r);
/* from: the prefill after which it decodes, on whichever worker; NULL: it is there already. */
struct decode_view policy_view_decode(const struct policy_worker *workers, uint32_t i, const struct policy_request *r,
                                      double after_ms, const struct prefill_view *from);

static inline bool policy_can_read(const struct policy_worker *w, uint32_t from)
{
    return !w->unread || !(w->unread[from / 64] >> (from % 64) & 1);
}

/* Whether a place in the batch and pages for prompt and expected answer are there beside that load. */
bool policy_has_room(const struct policy_worker *w, const struct policy_request *r, struct policy_load at);

/* The policies of others: which workers, the predictions left to the caller. False: none. */
bool policy_choose_named(const struct policy_worker *workers, uint32_t n, const struct policy_request *r,
                         struct prefill_view *prefill_out, uint32_t *decode_out);
