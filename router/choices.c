/* Several answers to one prompt; struct choices (router_internal.h) describes how they start. */
#include <stdlib.h>

#include "router/router_internal.h"

void choices_open(struct request *q)
{
    if (q->p.n_choices < 2)
        return;
    q->choices = mem_zalloc(sizeof(*q->choices));
    *q->choices = (struct choices){.n_live = 1, .n_open = q->p.n_choices};
}

bool choices_is_first(const struct request *q)
{
    return !q->choices || !q->p.sampling.choice;
}

/* Enqueues one more choice: a copy of the first request. Its deadline is what is left of the first one's. */
static void begin_one(struct request *first, uint32_t choice)
{
    struct router *r = first->router;
    struct request *q = mem_zalloc(sizeof(*q));
    q->router = r;
    q->call = rpc_call_ref(first->call);
    q->choices = first->choices;
    q->choices->n_live++;
    q->p = params_copy(&first->p);
    q->p.sampling.choice = choice;
    q->p.want_prompt_logprobs = false; /* the first choice reports them */
    q->p.sampling.prompt_logprobs = false;
    q->arrived_ns = q->tokenized_ns = clock_now(&r->clock);
    if (q->p.remaining_ms != INT64_MAX) {
        q->p.remaining_ms -= (int64_t)((q->arrived_ns - first->arrived_ns) / NS_PER_MS);
        q->p.remaining_ms = q->p.remaining_ms > 1 ? q->p.remaining_ms : 1;
    }
    parts_begin(q);
    router_enqueue(r, q);
}

void choices_begin(struct request *q)
{
    if (!q->choices || q->choices->begun)
        return;
    q->choices->begun = true;
    for (uint32_t i = 1; i < q->p.n_choices; i++)
        begin_one(q, i);
}

bool choices_answered(struct request *q)
{
    return !q->choices || (!--q->choices->n_open && !q->choices->failed);
}

/*
 * The other choices are dropped when the call reports its end (NOTE_REQUEST_GONE), not here: a caller may be
 * walking over router.requests.
 */
bool choices_failed(struct request *q)
{
    bool first = !q->choices || !q->choices->failed;
    if (q->choices)
        q->choices->failed = true;
    return first;
}

void choices_leave(struct request *q)
{
    if (q->choices && !--q->choices->n_live)
        free(q->choices);
}
