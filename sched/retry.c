#include "sched/retry.h"

#include <math.h>

static void fade(struct retry_budget *b, uint64_t now_ns)
{
    if (now_ns <= b->at_ns)
        return;
    double keep = exp(-(double)(now_ns - b->at_ns) / (double)RETRY_MEMORY_NS);
    b->first *= keep;
    b->again *= keep;
    b->at_ns = now_ns;
}

void retry_budget_first(struct retry_budget *b, uint64_t now_ns)
{
    fade(b, now_ns);
    b->first += 1;
}

double retry_budget_left(struct retry_budget *b, uint64_t now_ns)
{
    fade(b, now_ns);
    double left = b->burst + b->first / RETRY_SHARE - b->again;
    return left > 0 ? left : 0;
}

bool retry_budget_take(struct retry_budget *b, uint64_t now_ns)
{
    if (retry_budget_left(b, now_ns) < 1)
        return false;
    b->again += 1;
    return true;
}

/* ----------------------------------------------------------------- breaker */

bool breaker_usable(const struct breaker *b, uint64_t now_ns)
{
    return b->state == BREAKER_CLOSED || (b->state == BREAKER_OPEN && now_ns >= b->until_ns);
}

bool breaker_used(struct breaker *b)
{
    if (b->state != BREAKER_OPEN)
        return false;
    b->state = BREAKER_PROBING;
    return true;
}

void breaker_succeeded(struct breaker *b)
{
    if (b->state == BREAKER_PROBING)
        *b = (struct breaker){.state = BREAKER_CLOSED};
    else if (b->failures)
        b->failures--;
}

static void open_it(struct breaker *b, uint64_t now_ns)
{
    if (b->state == BREAKER_OPEN)
        return;
    uint64_t wait = b->state == BREAKER_PROBING ? 2 * b->wait_ns : BREAKER_WAIT_NS;
    wait = wait < BREAKER_LONGEST_NS ? wait : BREAKER_LONGEST_NS;
    *b = (struct breaker){.state = BREAKER_OPEN, .wait_ns = wait, .until_ns = now_ns + wait};
}

void breaker_failed(struct breaker *b, uint64_t now_ns)
{
    if (b->state == BREAKER_CLOSED) {
        if (!b->failures || now_ns > b->since_ns + BREAKER_WINDOW_NS) {
            b->failures = 0;
            b->since_ns = now_ns;
        }
        if (++b->failures < BREAKER_FAILURES)
            return;
    }
    open_it(b, now_ns);
}

void breaker_trip(struct breaker *b, uint64_t now_ns)
{
    open_it(b, now_ns);
}

void breaker_try(struct breaker *b, uint64_t now_ns)
{
    if (b->state == BREAKER_CLOSED)
        return;
    b->state = BREAKER_OPEN;
    b->until_ns = now_ns;
}

const char *breaker_name(enum breaker_state state)
{
    static const char *const NAMES[] = {"closed", "probing", "open"};
    return NAMES[state];
}
