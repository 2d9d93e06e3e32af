#include "sched/batching.h"

#include <math.h>

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

double batching_room_ms(double limit, uint32_t n_tokens, double since_first_ms)
{
    return limit > 0 ? fmin(limit * BATCHING_SAFE * n_tokens - since_first_ms, limit * BATCHING_BURST) : INFINITY;
}

struct batch_step { /* the step as planned so far; tokens and square: of its prompts */
    double tokens, square, batch, context, decode_ms, room_ms;
};

/* The step with its decoding sequences only, and the time that it may take. */
static struct batch_step decoding_step(const struct batch_item *items, uint32_t n, const struct cost_model *cost,
                                       double starved_ms)
{
    struct batch_step s = {.room_ms = INFINITY};
    for (uint32_t i = 0; i < n; i++) {
        if (!items[i].decoding)
            continue;
        s.batch++;
        s.context += items[i].n_computed;
        s.room_ms = fmin(s.room_ms, items[i].room_ms);
    }
    s.decode_ms = cost_decode_ms(cost, s.batch, s.context);
    s.room_ms = fmax(s.room_ms, s.decode_ms + BATCHING_FLOOR * (starved_ms + s.decode_ms));
    return s;
}

/* Fixed cost of a chunk beside a batch. */
static double overhead(double fixed_ms, double shared_ms)
{
    return fmax(fixed_ms - shared_ms, 0);
}

/*
 * Tokens of one more prompt for which the step has time. The first chunk of a step may have to wait
 * (BATCHING_WORTH).
 */
static uint32_t within_time(const struct batch_step *s, const struct batch_item *item, const struct cost_model *cost,
                            uint32_t most)
{
    if (s->room_ms == INFINITY)
        return most;
    if (s->tokens > 0)
        return cost_chunk_more(cost, s->room_ms - cost_step_ms(cost, s->tokens, s->square, s->batch, s->context),
                               item->n_computed, most);
    uint32_t n = cost_chunk_within(cost, s->room_ms, s->batch, s->context, item->n_computed, most);
    double worth = BATCHING_WORTH * overhead(cost_chunk_ms(cost), cost_shared_ms(cost));
    return n < most && (n < BATCHING_LEAST || s->room_ms - s->decode_ms < worth) ? 0 : n;
}

uint32_t batching_plan(const struct batch_item *items, uint32_t n, uint32_t budget, const struct cost_model *cost,
                       double starved_ms, uint32_t *rows_out)
{
    struct batch_step step = decoding_step(items, n, cost, starved_ms);
    uint32_t used = 0, prompts = 0;
    bool waits = false; /* the first prompt waits for more time; prompts behind it must not use that time */
    for (uint32_t i = 0; i < n; i++) {
        rows_out[i] = items[i].decoding && used < budget;
        used += rows_out[i];
    }
    for (uint32_t i = 0; i < n; i++) {
        if (items[i].decoding)
            continue;
        uint32_t most = least(least(budget - used, items[i].chunk), items[i].n_pending);
        if (prompts)
            most = least(most, BATCHING_FILL > prompts ? BATCHING_FILL - prompts : 0);
        double rows = rows_out[i] = most && !waits ? within_time(&step, &items[i], cost, most) : 0;
        waits |= most && !(step.tokens > 0) && !rows_out[i];
        used += rows_out[i];
        prompts += rows_out[i];
        step.tokens += rows;
        step.square += rows * (rows + 2.0 * items[i].n_computed);
    }
    return used;
}

bool batching_starves(const struct batch_item *items, const uint32_t *rows, uint32_t n)
{
    bool waits = false, computes = false;
    for (uint32_t i = 0; i < n; i++) {
        waits |= !items[i].decoding;
        computes |= !items[i].decoding && rows[i];
    }
    return waits && !computes;
}

double batching_mixed_ms(double decode, double limit)
{
    return fmax(limit * BATCHING_SAFE, (1 + BATCHING_FLOOR) * decode);
}

/*
 * In the long run one chunk passes in every k steps, when these have saved enough time for it. It then takes
 * k (m - decode) beyond decoding, where m is the time that a step may take. That time, less the chunk's
 * overhead, is progress; it is compared with the progress of full chunks.
 */
double batching_prompt_share(double decode, double chunk, double fixed, double shared, double limit)
{
    double most = chunk / (chunk + decode - shared), tokens = fmax(chunk - fixed, chunk * 1e-3);
    if (!(limit > 0))
        return most;
    double over = overhead(fixed, shared), saved = batching_mixed_ms(decode, limit) - decode;
    /* Never enough time: only the floor is left. */
    if (BATCHING_WORTH * over > BATCHING_BURST * limit - decode)
        saved = BATCHING_FLOOR * decode;
    double k = fmax(1, BATCHING_WORTH * over / saved), progress = (k * saved - fixed + shared) / tokens;
    return fmin(progress * chunk / (k * (decode + saved)), most);
}
