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

struct step { /* as far as it is filled */
    double tokens, square, batch, context, room_ms;
};

static struct step decoding_step(const struct batch_item *items, uint32_t n, const struct cost_model *cost)
{
    struct step s = {.room_ms = INFINITY};
    for (uint32_t i = 0; i < n; i++) {
        if (!items[i].decoding)
            continue;
        s.batch++;
        s.context += items[i].n_computed;
        s.room_ms = fmin(s.room_ms, items[i].room_ms);
    }
    s.room_ms = fmax(s.room_ms, (1 + BATCHING_FLOOR) * cost_decode_ms(cost, s.batch, s.context));
    return s;
}

/* Tokens of one more prompt that the step has time for. */
static uint32_t within_time(const struct step *s, const struct batch_item *item, const struct cost_model *cost,
                            uint32_t most)
{
    if (s->room_ms == INFINITY)
        return most;
    uint32_t n =
        s->tokens > 0
            ? cost_chunk_more(cost, s->room_ms - cost_step_ms(cost, s->tokens, s->square, s->batch, s->context),
                              item->n_computed, most)
            : cost_chunk_within(cost, s->room_ms, s->batch, s->context, item->n_computed, most);
    return n < BATCHING_LEAST && !(s->tokens > 0) ? least(BATCHING_LEAST, most) : n;
}

uint32_t batching_plan(const struct batch_item *items, uint32_t n, uint32_t budget, const struct cost_model *cost,
                       uint32_t *rows_out)
{
    struct step step = decoding_step(items, n, cost);
    uint32_t used = 0, prompts = 0;
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
        double rows = rows_out[i] = most ? within_time(&step, &items[i], cost, most) : 0;
        used += rows_out[i];
        prompts += rows_out[i];
        step.tokens += rows;
        step.square += rows * (rows + 2.0 * items[i].n_computed);
    }
    return used;
}

double batching_mixed_ms(double decode, double limit)
{
    return fmax(limit * BATCHING_SAFE, (1 + BATCHING_FLOOR) * decode);
}

double batching_prompt_share(double decode, double chunk, double shared, double limit)
{
    double most = chunk / (chunk + decode - shared);
    if (!(limit > 0))
        return most;
    double left = 1 - decode / batching_mixed_ms(decode, limit);
    return fmin(left * chunk / fmax(chunk - shared, chunk / 2), most);
}
