/*
 * Published policies of other systems, as their authors describe them, for comparison (--policy). Each only
 * chooses workers. Plans are predicted by the same model for all of them.
 */
#include <math.h>
#include <stddef.h>

#include "base/random.h"
#include "sched/policy_internal.h"

static const double HEADROOM_ANSWER = 0.6, HEADROOM_LEFT = 0.03; /* r and m of HRA */
/* Splitwise: most tokens in a prompt queue. */
static const double FULL_QUEUE = 8192;
static const double MATCHED = 0.5, UNEVEN = 32, UNEVEN_RATIO = 1.1; /* SGLang's gateway: thresholds */

/* Which workers may be chosen. */
struct named_choice {
    const struct policy_worker *workers;
    uint32_t n;
    const struct policy_request *r;
    enum worker_role role;
    bool is_reader; /* only workers that can read pages of worker `from` */
    uint32_t from;
    bool is_read; /* only workers whose pages some decode worker can read */
};

/* The score of worker i: the lowest wins; INFINITY: it can't be chosen. */
typedef double (*score_fn)(const struct named_choice *c, uint32_t i);

/* Whether worker i may be chosen: usable, of the role, readable, and large enough. */
static bool takes_part(const struct named_choice *c, uint32_t i)
{
    const struct policy_worker *w = &c->workers[i];
    double total = (double)c->r->n_tokens + c->r->max_tokens;
    return w->usable && w->role == c->role && (!c->is_reader || policy_can_read(w, c->from)) &&
           (!c->is_read || policy_is_read(c->workers, c->n, i)) && total <= w->max_context &&
           ceil(total / c->r->block_tokens) <= w->total_pages;
}

static double by_chance(const struct named_choice *c, uint32_t i)
{
    return random_unit(random_at(c->r->number, i, c->role));
}

/* The worker with the least score; ties at random. False: none can be chosen. */
static bool least(const struct named_choice *c, score_fn score, uint32_t *out)
{
    double best = INFINITY, best_tie = 0;
    for (uint32_t i = 0; i < c->n; i++) {
        double value = takes_part(c, i) ? score(c, i) : INFINITY, tie = by_chance(c, i);
        if (value < best || (value == best && value < INFINITY && tie < best_tie)) {
            best = value;
            best_tie = tie;
            *out = i;
        }
    }
    return best < INFINITY;
}

static double ttft(const struct named_choice *c, uint32_t i)
{
    return policy_view_prefill(c->workers, i, c->r).ttft;
}

static double step(const struct named_choice *c, uint32_t i)
{
    return policy_view_decode(c->workers, i, c->r, 0, NULL).step;
}

static double in_flight(const struct named_choice *c, uint32_t i)
{
    return c->workers[i].n_prompts + c->workers[i].at[0].running;
}

static double queue(const struct named_choice *c, uint32_t i)
{
    return c->workers[i].queued_tokens;
}

static double memory(const struct named_choice *c, uint32_t i)
{
    return c->workers[i].at[0].pages;
}

static double headroom(const struct named_choice *c, uint32_t i)
{
    const struct policy_worker *w = &c->workers[i];
    double need = ceil(c->r->n_tokens * (1 + HEADROOM_ANSWER) / c->r->block_tokens);
    bool fits = w->total_pages - w->at[0].pages - need >= HEADROOM_LEFT * w->total_pages;
    /* If none fits, the least busy one. */
    return in_flight(c, i) + (fits || c->role == ROLE_PREFILL ? 0 : 1e9);
}

static double short_queue(const struct named_choice *c, uint32_t i)
{
    double have = queue(c, i);
    return have > 0 && have + c->r->n_tokens > FULL_QUEUE ? INFINITY : have;
}

/* Whether the numbers of requests in flight differ too much to follow the cache. */
static bool uneven(const struct named_choice *c)
{
    double least_of = INFINITY, most = 0;
    for (uint32_t i = 0; i < c->n; i++)
        if (takes_part(c, i)) {
            least_of = fmin(least_of, in_flight(c, i));
            most = fmax(most, in_flight(c, i));
        }
    return most - least_of > UNEVEN && most > UNEVEN_RATIO * least_of;
}

static double cache_aware(const struct named_choice *c, uint32_t i)
{
    const uint32_t *matched = c->r->matched_blocks;
    double share = matched ? (double)matched[i] * c->r->block_tokens / c->r->n_tokens : 0;
    return in_flight(c, i) - (share > MATCHED && !uneven(c) ? 1e9 * share : 0);
}

/* Round-robin: distance of worker i from the one whose turn it is. */
static double in_turn(const struct named_choice *c, uint32_t i)
{
    uint32_t n = 0, before = 0;
    for (uint32_t j = 0; j < c->n; j++)
        if (takes_part(c, j)) {
            n++;
            before += j < i;
        }
    return (before + n - c->r->number % n) % n;
}

/* Pages in use; INFINITY: no room for the prompt and an answer of the expected length. */
static double free_memory(const struct named_choice *c, uint32_t i)
{
    return policy_has_room(&c->workers[i], c->r, c->workers[i].at[0]) ? memory(c, i) : INFINITY;
}

/* Pages in use on a prompt machine that could take both phases now; INFINITY: it could not. */
static double lent_memory(const struct named_choice *c, uint32_t i)
{
    return isfinite(short_queue(c, i)) ? free_memory(c, i) : INFINITY;
}

/*
 * Splitwise, section IV-A: each pool takes its own phase, and a full pool borrows a machine of the other one.
 * Here a borrowed machine gets both phases, since KV moves only from prompt machines to token machines.
 */
static bool mixed_pool(struct named_choice *c, uint32_t *prefill, uint32_t *decode)
{
    bool lends = c->r->force == FORCE_NONE;
    struct named_choice tokens = *c;
    tokens.role = ROLE_DECODE;
    if (!least(&tokens, free_memory, decode)) {
        /* The token pool is full: a prompt machine takes both. */
        if (lends && least(c, lent_memory, prefill)) {
            *decode = *prefill;
            return true;
        }
        if (!least(&tokens, memory, decode))
            return false;
    }
    if (least(c, short_queue, prefill))
        return true;
    /* The prompt pool is full: a token machine takes both. */
    if (lends && least(&tokens, short_queue, prefill)) {
        *decode = *prefill;
        return true;
    }
    return least(c, queue, prefill) || (lends && (*prefill = *decode, true));
}

bool policy_choose_named(const struct policy_worker *workers, uint32_t n, const struct policy_request *r,
                         struct prefill_view *prefill_out, uint32_t *decode_out)
{
    static const score_fn PREFILL[POLICIES] = {
        [POLICY_MOONCAKE] = ttft,          [POLICY_HEADROOM] = headroom,   [POLICY_CACHE_AWARE] = cache_aware,
        [POLICY_LEAST_LOADED] = in_flight, [POLICY_ROUND_ROBIN] = in_turn, [POLICY_RANDOM] = by_chance};
    static const score_fn DECODE[POLICIES] = {
        [POLICY_MOONCAKE] = step,          [POLICY_HEADROOM] = headroom,   [POLICY_CACHE_AWARE] = in_flight,
        [POLICY_LEAST_LOADED] = in_flight, [POLICY_ROUND_ROBIN] = in_turn, [POLICY_RANDOM] = by_chance};
    struct named_choice prompts = {.workers = workers, .n = n, .r = r, .role = ROLE_PREFILL},
                        tokens = {.workers = workers, .n = n, .r = r, .role = ROLE_DECODE};
    bool whole = r->force == FORCE_AGGREGATED || r->force == FORCE_KEPT, found;
    enum policy rule = r->policy == POLICY_MIXED_POOL ? POLICY_LEAST_LOADED : r->policy; /* within one pool */
    uint32_t prefill = 0, decode = 0;
    prompts.is_read = !whole;
    if (r->policy == POLICY_MIXED_POOL && !whole) {
        found = mixed_pool(&prompts, &prefill, &decode);
    } else if (r->force == FORCE_KEPT) {
        found = least(&prompts, PREFILL[rule], &prefill);
        decode = prefill;
    } else {
        bool splits = !whole && least(&prompts, PREFILL[rule], &prefill);
        found = least(&tokens, DECODE[rule], &decode) && (splits || r->force != FORCE_SPLIT);
        prefill = splits ? prefill : decode; /* without a prefill worker the decode worker does both */
    }
    if (found && prefill != decode && !policy_can_read(&workers[decode], prefill)) {
        tokens.is_reader = true;
        tokens.from = prefill;
        found = least(&tokens, DECODE[rule], &decode);
    }
    if (!found)
        return false;
    *decode_out = decode;
    *prefill_out = policy_view_prefill(workers, prefill, r);
    return !prefill_out->reason;
}
