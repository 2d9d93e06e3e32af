/*
 * Predictions, costs and the search of policy_place(). Each layer uses only those above it:
 *
 *     predictions   policy_view_prefill(), policy_view_decode(): one request on one worker, in milliseconds
 *     costs         prefill_cost(), copy_cost(), disturbance(), ...: in milliseconds of work
 *     search        try_split(), try_alone(): the cheapest plan within the limits, or what a refusal tells
 *
 * What must hold:
 *   - The result depends on the arguments only. candidates_out never changes the plan, so a worker may be
 *     skipped only if a lower bound of its cost is above the best cost so far.
 *   - A refusal reports least values over all workers, so a search without result is repeated without
 *     skipping any worker (search.is_thorough).
 *   - Costs of different kinds of plan are compared with each other, so every term has the same unit.
 */
#include "sched/policy.h"

#include <math.h>
#include <stddef.h>

#include "base/random.h"
#include "sched/batching.h"
#include "sched/policy_internal.h"

const double POLICY_HORIZON_MS[POLICY_HORIZONS] = {0, 250, 500, 1000, 2000, 4000, 8000, 16000};
const double POLICY_BALANCE = 4;

/* Costs, in milliseconds of work. docs/scheduling.md has the reason and the effect of each. */
static const double WAITING = 0.5;         /* of 1 ms of waiting, for a request with a TTFT limit */
static const double WAITING_UNLIMITED = 1; /* of 1 ms of waiting, for a request without a TTFT limit */
static const double DISTURBED = 0.02;      /* of 1 ms that a sequence waits for a chunk, under a TPOT limit */
/*
 * Cost of 1 ms more TPOT of one request, its own or another's, where no TPOT limit applies. Each request
 * counts the same, whatever the length of its answer, as it does in percentiles of TPOT.
 */
static const double UNLIMITED_TPOT = 80;
/*
 * Only this much of a prompt's work counts as a delay of other requests' TPOT: a request that waits longer is
 * among the slowest anyway.
 */
static const double MOST_DELAY_MS = 700;
/*
 * Cost of a second copy of KV: it evicts blocks that later requests would have found. Unit: milliseconds, for
 * each millisecond of work that the existing copy would have saved. COPY: the prefill worker computes blocks
 * that another worker has. HANDED_COPY: the decode worker of a split plan receives blocks that it does not
 * have (small, since it must hold them while it decodes anyway). MOST_COPY_MS limits both for one request: a
 * request must not wait minutes for a prefix while workers are idle.
 */
static const double COPY = 6, HANDED_COPY = 0.05, MOST_COPY_MS = 10000;
static const double FIRST_GAP = 0.2; /* of 1 ms by which the first gap is longer */

/* Costs are multiplied by a random factor in [1, 1 + TIE): predictions are no more exact than that. */
static const double TIE = 0.07;        /* of prefill workers */
static const double DECODE_TIE = 0.15; /* of decode workers */
/*
 * Share of a chunk's KV that is announced only when its step ends: the engine announces layers in four parts.
 */
static const double ANNOUNCED_LATE = 0.25;
/* Least share of its time in which a prefill worker is assumed to have prompts. */
static const double PROMPTS_TO_COME = 0.1;
/*
 * A request whose own work takes a larger share of its limit needs a worker that is idle by chance: hopeless.
 */
static const double PROMISABLE = 0.9;
static const char *const BOOKED = "it is kept for one that was told to come back";
static const char *const UNREAD = "no decode worker can connect to it";

const char *plan_name(enum plan_kind kind)
{
    static const char *const NAMES[] = {
        [PLAN_SPLIT] = "split", [PLAN_AGGREGATED] = "aggregated", [PLAN_KEPT] = "kept", [PLAN_REFUSE] = "refused"};
    return NAMES[kind];
}

/* ------------------------------------------------------------- predictions */

static double pages(double tokens, uint32_t block_tokens)
{
    return ceil(tokens / block_tokens);
}

uint32_t policy_pages(const struct policy_request *r)
{
    return (uint32_t)pages(r->n_tokens + r->expected_tokens, r->block_tokens);
}

struct policy_load policy_load_at(const struct policy_worker *w, double after_ms)
{
    uint32_t i = 1;
    while (i < POLICY_HORIZONS && POLICY_HORIZON_MS[i] < after_ms)
        i++;
    if (i == POLICY_HORIZONS)
        return w->at[POLICY_HORIZONS - 1];
    const struct policy_load *a = &w->at[i - 1], *b = &w->at[i];
    double share = (after_ms - POLICY_HORIZON_MS[i - 1]) / (POLICY_HORIZON_MS[i] - POLICY_HORIZON_MS[i - 1]);
    share = share < 0 ? 0 : share;
    return (struct policy_load){
        a->running + share * (b->running - a->running), a->context + share * (b->context - a->context),
        a->pages + share * (b->pages - a->pages), a->brevity + share * (b->brevity - a->brevity)};
}

/* Whether an empty worker could hold the request with its longest possible answer. */
static bool fits_ever(const struct policy_worker *w, const struct policy_request *r)
{
    double total = (double)r->n_tokens + r->max_tokens;
    return total <= w->max_context && pages(total, r->block_tokens) <= w->total_pages;
}

/*
 * Time to load n_stored blocks from stores and n_held blocks from a worker, at the same time. The loaded
 * blocks are assumed to be on SSD in the same proportion as all blocks that the stores hold of this prompt.
 */
static double predict_load(const struct policy_worker *w, const struct policy_request *r, uint32_t n_stored,
                           uint32_t n_held)
{
    double on_disk = n_stored ? (double)n_stored * r->store_blocks_ssd / r->store_blocks : 0;
    double stored = n_stored ? w->load_ms + w->load_dram_ms * (n_stored - on_disk) + w->load_ssd_ms * on_disk : 0;
    double held = n_held ? w->fetch_ms + w->fetch_block_ms * n_held : 0;
    return fmax(fmax(stored, held), 0);
}

/* Time to compute the prompt if its first `blocks` blocks are there. chunk: most tokens of a step. */
static double compute_ms(const struct policy_worker *w, const struct policy_request *r, uint32_t blocks, uint32_t chunk)
{
    double cached = (double)blocks * r->block_tokens;
    return cost_prefill_ms(w->cost, r->n_tokens - cached, cached, chunk);
}

/*
 * Whether to load the prefix up to block `there`, where the worker has `own` blocks. load, saved: time to
 * load it, and computing time that this saves. Mooncake decides by the ratio of blocks, cache-aware never
 * loads, all other policies decide by time.
 */
static bool load_pays(const struct policy_request *r, uint32_t own, uint32_t there, double load, double saved)
{
    if (r->prefix != PREFIX_AUTO)
        return r->prefix == PREFIX_LOAD;
    if (r->policy == POLICY_MOONCAKE)
        return there > POLICY_BALANCE * own;
    return r->policy != POLICY_CACHE_AWARE && load < saved;
}

/* Leading blocks that the worker need not compute. The block of the last prompt token never counts. */
static uint32_t own_blocks(const struct policy_request *r, uint32_t worker)
{
    uint32_t usable = (r->n_tokens - 1) / r->block_tokens, matched = r->matched_blocks ? r->matched_blocks[worker] : 0;
    return matched < usable ? matched : usable;
}

/*
 * One way to get a prefix: blocks [own, peer_from) from stores, blocks [max(own, peer_from), there) from
 * another worker.
 */
struct source {
    uint32_t there, peer_from; /* there: 0 if there is nothing to load */
    double load, rest;         /* times: loading; computing the prompt tokens that are not loaded */
};

static struct source view_source(const struct policy_worker *w, const struct policy_request *r, uint32_t own,
                                 uint32_t peer_from, uint32_t there)
{
    uint32_t from = peer_from > own ? peer_from : own;
    return (struct source){there, peer_from, predict_load(w, r, from - own, there - from),
                           compute_ms(w, r, there, w->chunk_tokens)};
}

/* Whether a is better: the longer prefix for PREFIX_LOAD and for Mooncake's rule, else the shorter time. */
static bool is_better(const struct policy_request *r, const struct source *a, const struct source *b)
{
    bool most = r->prefix == PREFIX_LOAD || (r->policy == POLICY_MOONCAKE && r->prefix == PREFIX_AUTO);
    if (most && a->there != b->there)
        return a->there > b->there;
    return a->load + a->rest < b->load + b->rest;
}

/* Compares three sources: stores; stores and then the worker that holds more; that worker alone. */
static struct source best_source(const struct policy_worker *w, const struct policy_request *r, uint32_t own)
{
    uint32_t usable = (r->n_tokens - 1) / r->block_tokens;
    uint32_t stored = r->store_blocks < usable ? r->store_blocks : usable;
    uint32_t held = r->peer_blocks < usable ? r->peer_blocks : usable;
    struct source best = {.there = 0};
    if (stored > own)
        best = view_source(w, r, own, stored, stored);
    if (held > own && held > stored && stored > own) {
        struct source both = view_source(w, r, own, stored, held);
        best = is_better(r, &both, &best) ? both : best;
    }
    if (held > own) {
        struct source alone = view_source(w, r, own, 0, held);
        best = !best.there || is_better(r, &alone, &best) ? alone : best;
    }
    return best;
}

/*
 * Fills blocks, load and compute of v: from the best source if loading pays, else with the worker's own
 * blocks.
 */
static void view_prefix(const struct policy_worker *w, const struct policy_request *r, struct prefill_view *v)
{
    v->own_blocks = own_blocks(r, v->worker);
    v->compute = compute_ms(w, r, v->own_blocks, w->chunk_tokens);
    struct source s = best_source(w, r, v->own_blocks);
    if (!s.there || !load_pays(r, v->own_blocks, s.there, s.load, v->compute - s.rest))
        return;
    v->loaded_blocks = s.there;
    v->peer_from = s.peer_from;
    v->load = s.load;
    v->compute = s.rest;
}

/* Whether work on worker i that ends `ttft` ms from now would overlap another request's booking. */
static bool is_booked(const struct policy_worker *w, uint32_t i, const struct policy_request *r, double ttft)
{
    return r->keeper != i && r->keeper != POLICY_ANY_KEEPER && ttft > w->booked_ms;
}

/* The smaller of two limits, where 0 means no limit. */
static double tightest(double a, double b)
{
    return a > 0 && b > 0 ? fmin(a, b) : fmax(a, b);
}

/*
 * Share of the worker's time that prompts get beside the decoding load `at`. With less than one expected
 * sequence, at.running is the probability that one decodes there at all.
 */
static double prompt_share(const struct policy_worker *w, struct policy_load at, double tpot_limit)
{
    if (at.running < 1e-3)
        return 1;
    double there = fmin(at.running, 1);
    double decode = cost_decode_ms(w->cost, at.running / there, at.context / there);
    double chunk = cost_prefill_ms(w->cost, w->chunk_tokens, 0, 0);
    return 1 - there * (1 - batching_prompt_share(decode, chunk, cost_chunk_ms(w->cost), cost_shared_ms(w->cost),
                                                  tpot_limit));
}

double policy_prompt_share(const struct policy_worker *w, double after_ms)
{
    return prompt_share(w, policy_load_at(w, after_ms), w->tpot_limit_ms);
}

struct prefill_view policy_view_prefill(const struct policy_worker *workers, uint32_t i, const struct policy_request *r)
{
    const struct policy_worker *w = &workers[i];
    struct prefill_view v = {.worker = i};
    if (!fits_ever(w, r)) {
        v.reason = "prompt and max_tokens fit no worker's context or pool";
        return v;
    }
    view_prefix(w, r, &v);
    v.alone = v.load + v.compute;
    v.share = w->share > 0 ? w->share : policy_prompt_share(w, w->busy_ms);
    v.wait = w->busy_ms / v.share;
    v.ttft = fmax(v.wait, v.load) + v.compute / v.share; /* loading runs while earlier prompts are computed */
    v.booked = is_booked(w, i, r, v.ttft);
    return v;
}

bool policy_has_room(const struct policy_worker *w, const struct policy_request *r, struct policy_load at)
{
    return at.running + 1 <= w->max_batch && at.pages + policy_pages(r) <= w->total_pages;
}

/* Load `at` plus this request. Its pages are not added: policy_has_room() counts them. Brevity is 0. */
static struct policy_load with(const struct policy_request *r, struct policy_load at)
{
    return (struct policy_load){at.running + 1, at.context + r->n_tokens + r->expected_tokens / 2, at.pages};
}

/*
 * The longest step without prompts from now (not from from_ms) until the request ends, if it or a sequence
 * there has a TPOT limit; otherwise its first step. Departures before from_ms are not counted on: a batch
 * that has just begun grows for a while before any sequence leaves it, and with expected departures taken
 * off, a wave of long answers broke half of its limits.
 */
static double longest_step(const struct policy_worker *w, const struct policy_request *r, double from_ms)
{
    struct policy_load at = with(r, policy_load_at(w, from_ms));
    double first = cost_decode_ms(w->cost, at.running, at.context), longest = first;
    bool is_limited = tightest(w->tpot_limit_ms, r->tpot_ms) > 0;
    for (uint32_t i = 0; is_limited && i < POLICY_HORIZONS; i++) {
        if (POLICY_HORIZON_MS[i] > from_ms + first * r->expected_tokens)
            continue;
        at = with(r, w->at[i]);
        longest = fmax(longest, cost_decode_ms(w->cost, at.running, at.context));
    }
    return longest;
}

/*
 * Whether the request meets its TPOT limit. step: without prompts. more: ms that the first gap adds per
 * token.
 */
static bool within_tpot(const struct policy_request *r, double step, double more)
{
    return !(r->tpot_ms > 0) || step * (1 + r->tpot_margin) + more <= r->tpot_ms;
}

/*
 * Whether this request and all sequences there stay within their TPOT limits. If the worker has prompts,
 * steps are longer by the floor that prompts always get.
 */
static bool keeps_tpot(const struct policy_worker *w, const struct policy_request *r, double longest)
{
    double limit = tightest(w->tpot_limit_ms, r->tpot_ms), floor = w->n_prompts ? 1 + BATCHING_FLOOR : 1;
    return !(limit > 0) || longest * floor * (1 + r->tpot_margin) <= limit;
}

/* Whether the worker's prompts still meet their TTFT limits if the request decodes there from after_ms on. */
static bool keeps_ttft(const struct policy_worker *w, const struct policy_request *r, struct policy_load at,
                       double after_ms)
{
    if (!w->n_prompts || w->patience == INFINITY)
        return true;
    double limit = tightest(w->tpot_limit_ms, r->tpot_ms);
    double before = prompt_share(w, at, w->tpot_limit_ms), after = prompt_share(w, with(r, at), limit);
    double done = w->busy_ms / before, left = fmax(done - after_ms, 0);
    return done - left + left * before / after <= done * w->patience;
}

/* Whether the request can begin to decode at_ms from now. */
static bool may_begin(const struct policy_worker *w, const struct policy_request *r, double at_ms)
{
    struct policy_load at = policy_load_at(w, at_ms);
    if (r->policy != POLICY_TANDEM && r->policy != POLICY_MOONCAKE) /* all other policies ignore limits */
        return policy_has_room(w, r, at);
    return policy_has_room(w, r, at) && keeps_tpot(w, r, longest_step(w, r, at_ms)) && keeps_ttft(w, r, at, at_ms);
}

/* First moment at which may_begin(): after_ms or a later horizon. If none: after_ms plus the last horizon. */
static double room_from(const struct policy_worker *w, const struct policy_request *r, double after_ms)
{
    if (may_begin(w, r, after_ms))
        return after_ms;
    for (uint32_t i = 1; i < POLICY_HORIZONS; i++)
        if (POLICY_HORIZON_MS[i] > after_ms && may_begin(w, r, POLICY_HORIZON_MS[i]))
            return POLICY_HORIZON_MS[i];
    return after_ms + POLICY_HORIZON_MS[POLICY_HORIZONS - 1];
}

/* Duration of a step with prompts, if it takes `step` without them. limit: tightest TPOT limit; 0: none. */
static double mixed_step(const struct policy_worker *w, double step, double limit)
{
    double full = cost_prefill_ms(w->cost, w->chunk_tokens, 0, 0) + step - cost_shared_ms(w->cost);
    return limit > 0 ? fmin(full, batching_mixed_ms(step, limit)) : full;
}

/* Mean time between two tokens if the worker has prompts for the share `prompts` of the time. */
static double token_ms(const struct policy_worker *w, double step, double limit, double prompts)
{
    return prompts > 0 ? 1 / (prompts / mixed_step(w, step, limit) + (1 - prompts) / step) : step;
}

/* Prompt tokens to compute: neither in the worker's pool nor loaded. */
static uint32_t new_tokens(const struct policy_request *r, const struct prefill_view *v)
{
    uint32_t known = v->loaded_blocks > v->own_blocks ? v->loaded_blocks : v->own_blocks;
    return r->n_tokens - known * r->block_tokens;
}

/* The handover from the prefill `from` to worker i. */
static struct transfer view_transfer(const struct policy_worker *workers, uint32_t i, const struct policy_request *r,
                                     const struct prefill_view *from)
{
    const struct policy_worker *p = &workers[from->worker], *d = &workers[i];
    double there = r->matched_blocks ? (double)r->matched_blocks[i] * r->block_tokens : 0;
    double tokens = fmax(r->n_tokens - there, 0), computed = new_tokens(r, from);
    double last = fmin(fmod(computed - 1, p->chunk_tokens) + 1, tokens) * ANNOUNCED_LATE;
    return (struct transfer){tokens, last, 1 + fmax(p->sends, d->receives), from->compute / from->share};
}

/*
 * Fills v's transfer, exposed and gap. running: sequences that decode there at the start; step: duration of
 * their steps. The decode worker handles announcements between its steps, so on average half a step of the
 * prefill hides no transfer.
 */
static void view_gap(const struct policy_worker *workers, uint32_t i, const struct policy_request *r,
                     const struct prefill_view *from, double running, double step, struct decode_view *v)
{
    const struct policy_worker *w = &workers[i];
    v->gap = step;
    if (!from || from->worker == i || !w->transfer)
        return;
    v->transfer = view_transfer(workers, i, r, from);
    v->transfer.hidden_ms = fmax(v->transfer.hidden_ms - fmin(running, 1) * step / 2, 0);
    v->exposed = transfer_exposed_ms(w->transfer, &v->transfer);
    v->gap = transfer_gap_ms(w->transfer, v->exposed, step, fmin(running, 1));
}

/*
 * Mean of n gaps between tokens: with prompts for the first prompts_ms, then for the share `prompts` of time.
 */
static double tpot_of(const struct policy_worker *w, double step, double limit, double n, double prompts_ms,
                      double prompts)
{
    double mixed = mixed_step(w, step, limit), beside = fmin(fmax(prompts_ms, 0) / mixed, n);
    return (beside * mixed + (n - beside) * token_ms(w, step, limit, prompts)) / n;
}

double policy_token_ms(const struct policy_worker *w, double step_ms)
{
    return token_ms(w, step_ms, w->tpot_limit_ms, w->prompt_use);
}

struct decode_view policy_view_decode(const struct policy_worker *workers, uint32_t i, const struct policy_request *r,
                                      double after_ms, const struct prefill_view *from)
{
    const struct policy_worker *w = &workers[i];
    struct decode_view v = {.worker = i, .start = after_ms};
    if (!fits_ever(w, r)) {
        v.reason = "prompt and max_tokens fit no worker's context or pool";
        return v;
    }
    v.start = room_from(w, r, after_ms);
    v.now = v.start <= after_ms && policy_has_room(w, r, w->at[0]);
    struct policy_load at = policy_load_at(w, v.start), then = with(r, at);
    double limit = tightest(w->tpot_limit_ms, r->tpot_ms);
    v.step = cost_decode_ms(w->cost, then.running, then.context);
    v.longest = longest_step(w, r, v.start);
    double n_gaps = fmax(r->expected_tokens - 1, 1);
    double prompts_ms = w->busy_ms > 0 ? w->busy_ms / prompt_share(w, at, limit) - v.start : 0;
    v.token = tpot_of(w, v.step, limit, n_gaps, prompts_ms, w->prompt_use) * w->stretch;
    double first = prompts_ms > 0 ? mixed_step(w, v.step, limit) : token_ms(w, v.step, limit, w->prompt_use);
    view_gap(workers, i, r, from, at.running, first, &v);
    v.tpot = v.token + (v.gap - v.token) / n_gaps;
    v.keeps = keeps_tpot(w, r, v.longest) &&
              within_tpot(r, v.step, r->max_tokens > 1 ? fmax(v.gap - v.token, 0) / n_gaps : 0);
    double use = w->role == ROLE_PREFILL ? fmax(w->prompt_use, PROMPTS_TO_COME) : w->prompt_use;
    if (use > 0)
        v.delays = use * n_gaps * v.step * (prompt_share(w, at, w->tpot_limit_ms) - prompt_share(w, then, limit));
    /*
     * Prompts that have not arrived yet are assumed with the mean of the role: they may go to any of its
     * workers. With this worker's own prompt_use, requests would avoid a worker for what it did before.
     */
    if (!(r->tpot_ms > 0))
        v.delays += UNLIMITED_TPOT * (tpot_of(w, v.step, limit, n_gaps, prompts_ms, w->role_prompt_use) * w->stretch +
                                      at.running * (v.step - cost_decode_ms(w->cost, at.running, at.context)));
    return v;
}

/* ----------------------------------------------------------------- limits */

/*
 * The time to the first token, from now, as it is held against the TTFT limit. ttft: predicted, from now.
 * work: the part of ttft that is the request's own work. Own work is predicted well (hope); the rest is
 * waiting and uncertain (caution).
 */
static double careful_ttft(const struct policy_request *r, double ttft, double work)
{
    return ttft * (1 - r->grace) + r->caution * fmax(r->waited_ms + ttft - work, 0) - r->hope * work;
}

/* Whether the request meets its TTFT limit and its deadline; parameters as careful_ttft(). */
static bool within_ttft(const struct policy_request *r, double ttft, double work)
{
    return (!(r->ttft_ms > 0) || r->waited_ms + careful_ttft(r, ttft, work) <= r->ttft_ms) && ttft <= r->remaining_ms;
}

/* A random factor in [1, 1 + tie), the same for each call with this request and worker. */
static double tie_break(const struct policy_request *r, uint32_t worker, double tie)
{
    return 1 + tie * random_unit(random_at(r->seed ^ r->number, worker, 0));
}

/* Cost of work_ms of prompt computation for the sequences that decode there after_ms from now. */
static double disturbance(const struct policy_worker *w, const struct policy_request *r, double after_ms,
                          double work_ms)
{
    struct policy_load at = policy_load_at(w, after_ms);
    return tightest(w->tpot_limit_ms, r->tpot_ms) > 0 ? DISTURBED * at.running * work_ms
                                                      : UNLIMITED_TPOT * at.brevity * fmin(work_ms, MOST_DELAY_MS);
}

/* Cost of a second copy of blocks that save saved_ms of computing where they are. 0 under a TTFT limit. */
static double copy_cost(const struct policy_request *r, double weight, double saved_ms)
{
    return r->ttft_ms > 0 || r->urgent ? 0 : fmin(weight * fmax(saved_ms, 0), MOST_COPY_MS);
}

/* Cost of the prefill: work, waiting and a second copy. most_own: most leading blocks that any worker has. */
static double prefill_cost(const struct policy_worker *w, const struct policy_request *r, const struct prefill_view *v,
                           uint32_t most_own)
{
    uint32_t most = most_own > v->loaded_blocks ? most_own : v->loaded_blocks;
    if (r->urgent)
        return v->ttft;
    double waiting = r->ttft_ms > 0 ? WAITING : WAITING_UNLIMITED, slowed = v->compute / v->share - v->compute;
    return (v->load + v->compute + waiting * (v->wait + slowed)) * tie_break(r, v->worker, TIE) +
           copy_cost(r, COPY, v->compute - compute_ms(w, r, most, w->chunk_tokens));
}

bool policy_is_read(const struct policy_worker *workers, uint32_t n, uint32_t from)
{
    bool has_readers = false, is_cut_off = false;
    for (uint32_t i = 0; i < n && !has_readers; i++) {
        bool decodes = workers[i].usable && workers[i].role == ROLE_DECODE;
        has_readers = decodes && policy_can_read(&workers[i], from);
        is_cut_off |= decodes && workers[i].unread;
    }
    return has_readers || !is_cut_off;
}

/* ------------------------------------------------------------------ search */

/* State of one policy_place(). Pointers are borrowed from its caller. */
struct policy_search {
    const struct policy_worker *workers;
    uint32_t n;
    const struct policy_request *r;
    struct policy_candidate *log; /* room for 2 * n entries, n_log of them are written; NULL: no log */
    uint32_t n_log;
    struct plan best; /* the cheapest plan within the limits; valid if best_cost < INFINITY */
    double best_cost;
    /* For refusals: least values of all plans, within the limits or not. INFINITY: no plan was possible. */
    double least_ttft, least_tpot; /* time to the first token from now; step without prompts */
    double least_careful;          /* careful_ttft() */
    double least_work;             /* time to the first token on an idle worker */
    const char *why;               /* the latest reason why a worker could not take the request; NULL: none */
    bool could_fit;                /* some worker could take the request now or later */
    uint32_t most_own;             /* most leading blocks of the prompt in the pool of any one worker */
    uint32_t soonest;              /* the prefill worker of least_ttft */
    bool is_cut;                   /* some usable worker can't read pages of another worker */
    bool is_thorough;              /* no worker may be skipped: for the log, and for what a refusal tells */
};

/* Adds a candidate to the log. p, d: its halves; NULL: it was not weighed for that phase. */
static void note(struct policy_search *s, const struct prefill_view *p, const struct decode_view *d, double cost,
                 const char *reason)
{
    if (!s->log)
        return;
    struct policy_candidate *c = &s->log[s->n_log++];
    *c = (struct policy_candidate){.cost = cost, .reason = reason};
    if (p) {
        c->worker = p->worker;
        c->as_prefill = true;
        c->matched_blocks = p->own_blocks;
        c->loaded_blocks = p->loaded_blocks;
        c->peer_from = p->peer_from;
        c->wait_ms = p->wait;
        c->load_ms = p->load;
        c->prefill_ms = p->compute;
        c->ttft_ms = s->r->waited_ms + p->ttft;
    }
    if (d) {
        c->worker = d->worker;
        c->as_decode = true;
        c->transfer_ms = d->exposed;
        c->tpot_ms = d->tpot;
    }
}

static struct plan plan_of(const struct policy_search *s, const struct prefill_view *p, const struct decode_view *d)
{
    const struct policy_request *r = s->r;
    /* the first token is shown only after the decode worker has reserved */
    double ready = fmax(p->ttft, d->start);
    bool decodes = s->workers[d->worker].role == ROLE_DECODE;
    return (struct plan){.kind = p->worker != d->worker ? PLAN_SPLIT
                                 : decodes              ? PLAN_AGGREGATED
                                                        : PLAN_KEPT,
                         .now = s->workers[p->worker].takes_prompts && d->now,
                         .prefill = p->worker,
                         .decode = d->worker,
                         .loaded_blocks = p->loaded_blocks,
                         .peer_from = p->peer_from,
                         .new_tokens = new_tokens(r, p),
                         .ttft_ms = r->waited_ms + ready,
                         .tpot_ms = d->tpot,
                         .work_ms = p->load + p->compute,
                         .step_ms = d->longest,
                         .prompt_share = p->share,
                         .stretch = s->workers[d->worker].stretch,
                         .load_ms = p->load,
                         .start_ms = p->wait,
                         .transfer = d->transfer,
                         .gap_ms = d->gap,
                         .token_ms = d->token};
}

/* Lowers *least to value. */
static void see(double *least, double value)
{
    *least = value < *least ? value : *least;
}

/*
 * Records a possible plan: in the least values, and as the best plan if it meets the limits and is cheaper.
 */
static void weigh(struct policy_search *s, const struct prefill_view *p, const struct decode_view *d, double cost)
{
    struct plan plan = plan_of(s, p, d);
    double from_now = plan.ttft_ms - s->r->waited_ms;
    if (from_now < s->least_ttft)
        s->soonest = p->worker;
    see(&s->least_ttft, from_now);
    see(&s->least_careful, careful_ttft(s->r, from_now, plan.work_ms));
    see(&s->least_tpot, d->step);
    see(&s->least_work, p->alone);
    bool keeps =
        /* Mooncake checks this request only */
        s->r->policy == POLICY_TANDEM ? d->keeps : within_tpot(s->r, d->step, 0);
    if (!p->booked && within_ttft(s->r, from_now, plan.work_ms) && keeps && cost < s->best_cost) {
        s->best = plan;
        s->best_cost = cost;
    }
}

/* Whether the request can share all full blocks of its prompt there, now and within the TPOT limits. */
static bool shares_there(const struct policy_request *r, const struct decode_view *v)
{
    uint32_t blocks = r->n_tokens / r->block_tokens;
    return r->shares && blocks && r->matched_blocks && r->matched_blocks[v->worker] >= blocks && v->now && v->keeps;
}

/*
 * A lower bound of the cost in best_decode(), without its tie factor: cheap to compute, so most workers need
 * no full prediction. Either decoding begins at after_ms, with this step, or at a later horizon, and the
 * delay alone costs that much.
 */
static double least_decode_cost(const struct policy_search *s, const struct policy_worker *w, double after_ms,
                                double full)
{
    struct policy_load at = with(s->r, policy_load_at(w, after_ms));
    uint32_t i = 1;
    while (i < POLICY_HORIZONS && POLICY_HORIZON_MS[i] <= after_ms)
        i++;
    double later = i < POLICY_HORIZONS ? POLICY_HORIZON_MS[i] - after_ms : INFINITY;
    return fmin(cost_decode_ms(w->cost, at.running, at.context) * (1 + full), later);
}

/*
 * The decode worker for a split plan with the prefill `from`: shortest step, weighted by the share of its
 * pool that is in use, plus the exposed transfer for each token, plus the time until it has room. For another
 * choice of one call, a worker that shares the prompt's pages goes first. If .reason is set, no decode worker
 * is possible.
 */
static struct decode_view best_decode(struct policy_search *s, const struct prefill_view *from)
{
    struct decode_view best = {.start = INFINITY, .reason = "no decode worker is up"};
    double best_cost = INFINITY, after_ms = from->ttft;
    bool best_shares = false;
    for (uint32_t i = 0; i < s->n; i++) {
        if (!s->workers[i].usable || s->workers[i].role != ROLE_DECODE ||
            !policy_can_read(&s->workers[i], from->worker))
            continue;
        double full = policy_load_at(&s->workers[i], after_ms).pages / fmax(s->workers[i].total_pages, 1);
        double tie = tie_break(s->r, i, DECODE_TIE);
        s->could_fit |= fits_ever(&s->workers[i], s->r);
        if (!s->is_thorough && !s->r->shares && least_decode_cost(s, &s->workers[i], after_ms, full) * tie >= best_cost)
            continue;
        struct decode_view v = policy_view_decode(s->workers, i, s->r, after_ms, from);
        double per_token = v.step * (1 + full) + v.exposed / fmax(s->r->expected_tokens - 1, 1);
        double cost = (per_token + (v.start - after_ms)) * tie;
        note(s, NULL, &v, cost, v.reason);
        see(&s->least_tpot, v.step > 0 ? v.step : INFINITY);
        if (v.reason && best_cost == INFINITY)
            best.reason = v.reason;
        bool shares = shares_there(s->r, &v);
        if (!v.reason && (shares != best_shares ? shares : cost < best_cost)) {
            best = v;
            best_cost = cost;
            best_shares = shares;
        }
    }
    return best;
}

/* Weighs both phases on worker i: aggregated or kept, by its role. */
static void try_alone(struct policy_search *s, uint32_t i)
{
    const struct policy_worker *w = &s->workers[i];
    double waiting = (s->r->ttft_ms > 0 ? WAITING : WAITING_UNLIMITED) * w->busy_ms, cost = INFINITY;
    if (!s->is_thorough && !s->r->urgent && waiting >= s->best_cost)
        return; /* waiting alone costs more than the best plan */
    struct prefill_view p = policy_view_prefill(s->workers, i, s->r);
    struct decode_view d = {.worker = i};
    if (!p.reason) {
        double disturbed = disturbance(w, s->r, p.wait, p.load + p.compute);
        s->could_fit = true;
        see(&s->least_work, p.alone);
        cost = prefill_cost(w, s->r, &p, s->most_own) + (s->r->urgent ? 0 : disturbed);
        if (!s->is_thorough && cost >= s->best_cost)
            return; /* decoding only adds to the cost */
        d = policy_view_decode(s->workers, i, s->r, p.ttft, &p);
        cost += (s->r->urgent ? 0 : d.delays) + (d.start - p.ttft);
        weigh(s, &p, &d, cost);
    }
    note(s, &p, &d, cost, p.booked ? BOOKED : p.reason);
    s->why = p.reason ? p.reason : s->why;
}

/* Cost of the copy that the decode worker of a split plan receives. */
static double handed_cost(const struct policy_search *s, const struct decode_view *d)
{
    const struct policy_worker *w = &s->workers[d->worker];
    return copy_cost(s->r, HANDED_COPY, compute_ms(w, s->r, own_blocks(s->r, d->worker), w->chunk_tokens));
}

/*
 * Cost of a split plan's prefill for sequences that decode on the prefill worker. 0 if the request has a TPOT
 * limit: chunks then take only the time that the limits leave.
 */
static double kept_disturbance(const struct policy_search *s, const struct prefill_view *v)
{
    bool counts = !(s->r->tpot_ms > 0) && !s->r->urgent;
    return counts ? disturbance(&s->workers[v->worker], s->r, v->wait, v->load + v->compute) : 0;
}

/*
 * Weighs one split plan: the cheapest prefill worker within the TTFT limit (without one, the soonest, for
 * what a refusal tells), then the best decode worker for the moment at which that prefill ends.
 */
static void try_split(struct policy_search *s)
{
    struct prefill_view best = {0}, soonest = {.ttft = INFINITY};
    double best_cost = INFINITY;
    for (uint32_t i = 0; i < s->n; i++) {
        if (!s->workers[i].usable || s->workers[i].role != ROLE_PREFILL)
            continue;
        struct prefill_view v = policy_view_prefill(s->workers, i, s->r);
        if (s->is_cut && !v.reason && !policy_is_read(s->workers, s->n, i)) {
            v.reason = UNREAD;
            s->could_fit = true;
        }
        double cost =
            v.reason ? INFINITY : prefill_cost(&s->workers[i], s->r, &v, s->most_own) + kept_disturbance(s, &v);
        note(s, &v, NULL, cost, v.booked ? BOOKED : v.reason);
        s->why = v.reason ? v.reason : s->why;
        if (v.reason)
            continue;
        see(&s->least_work, v.alone);
        if (v.ttft < soonest.ttft)
            soonest = v;
        if (!v.booked && within_ttft(s->r, v.ttft, v.load + v.compute) && cost < best_cost) {
            best = v;
            best_cost = cost;
        }
    }
    if (soonest.ttft == INFINITY)
        return;
    if (best_cost == INFINITY)
        best = soonest;
    struct decode_view d = best_decode(s, &best);
    if (d.reason) {
        s->why = d.reason;
        return;
    }
    weigh(s, &best, &d,
          (best_cost == INFINITY ? best.load + best.compute : best_cost) + FIRST_GAP * d.exposed + d.delays +
              (d.start - best.ttft) + handed_cost(s, &d));
}

/* The refusal: its reason is the first limit that no plan meets. Needs a thorough search. */
static struct plan refusal_of(const struct policy_search *s)
{
    const struct policy_request *r = s->r;
    bool known = s->least_ttft < INFINITY;
    struct plan p = {.kind = PLAN_REFUSE,
                     .prefill = s->soonest,
                     .work_ms = s->least_work < INFINITY ? s->least_work : 0,
                     .ttft_ms = known ? r->waited_ms + s->least_ttft : 0,
                     .tpot_ms = s->least_tpot < INFINITY ? s->least_tpot : 0};
    double limit = r->ttft_ms > 0 ? r->ttft_ms - r->waited_ms : INFINITY;
    p.hopeless = known && s->least_work > PROMISABLE * fmin(limit, r->remaining_ms);
    if (!s->could_fit) {
        p.reason = s->why ? s->why : "no worker takes it";
        p.never = true;
    } else if (known && s->least_ttft > r->remaining_ms) {
        p.reason = "slo.deadline_ms can't be met";
        p.over_ms = s->least_ttft - r->remaining_ms;
    } else if (known && s->least_careful > limit) {
        p.reason = "slo.ttft_ms can't be met";
        p.over_ms = s->least_careful - limit;
    } else if (!within_tpot(r, p.tpot_ms, 0)) {
        p.reason = "slo.tpot_ms can't be met";
        p.over_ms = 1000;
    } else {
        p.reason = s->why ? s->why : "no pair meets slo.ttft_ms and slo.tpot_ms together";
        p.over_ms = 1000;
    }
    return p;
}

/* All policies but tandem. Only Mooncake's compares predictions with limits; the others ignore the limits. */
static struct plan place_named(struct policy_search *s)
{
    struct prefill_view p;
    uint32_t decode;
    if (!policy_choose_named(s->workers, s->n, s->r, &p, &decode)) {
        s->why = "prompt and max_tokens fit no worker's context or pool";
        return refusal_of(s);
    }
    s->could_fit = true;
    struct decode_view d = policy_view_decode(s->workers, decode, s->r, p.ttft, &p);
    double cost = prefill_cost(&s->workers[p.worker], s->r, &p, s->most_own);
    if (p.worker == decode) {
        note(s, &p, &d, cost, NULL);
    } else {
        note(s, &p, NULL, cost, NULL);
        note(s, NULL, &d, cost, NULL);
    }
    struct plan plan = plan_of(s, &p, &d);
    if (s->r->policy != POLICY_MOONCAKE)
        return plan;
    weigh(s, &p, &d, cost);
    return s->best_cost < INFINITY ? s->best : refusal_of(s);
}

/* Whether plan_force allows both phases on one worker of this role. */
static bool may_be_alone(const struct policy_request *r, enum worker_role role)
{
    if (role == ROLE_DECODE)
        return r->force == FORCE_NONE || r->force == FORCE_AGGREGATED;
    return role == ROLE_PREFILL && (r->force == FORCE_NONE || r->force == FORCE_KEPT);
}

static void search_all(struct policy_search *s)
{
    if (s->r->force == FORCE_NONE || s->r->force == FORCE_SPLIT)
        try_split(s);
    for (uint32_t i = 0; i < s->n; i++)
        if (s->workers[i].usable && may_be_alone(s->r, s->workers[i].role))
            try_alone(s, i);
}

struct plan policy_place(const struct policy_worker *workers, uint32_t n_workers, const struct policy_request *request,
                         struct policy_candidate *candidates_out, uint32_t *n_candidates_out)
{
    struct policy_search s = {.workers = workers,
                              .n = n_workers,
                              .r = request,
                              .log = candidates_out,
                              .is_thorough = candidates_out != NULL,
                              .best_cost = INFINITY,
                              .least_ttft = INFINITY,
                              .least_careful = INFINITY,
                              .least_tpot = INFINITY,
                              .least_work = INFINITY};
    struct plan plan;
    for (uint32_t i = 0; i < n_workers; i++)
        if (workers[i].usable && own_blocks(request, i) > s.most_own)
            s.most_own = own_blocks(request, i);
    for (uint32_t i = 0; i < n_workers; i++)
        s.is_cut |= workers[i].usable && workers[i].unread;
    if (request->policy != POLICY_TANDEM) {
        plan = place_named(&s);
    } else {
        search_all(&s);
        if (s.best_cost == INFINITY && !s.is_thorough) { /* a refusal reports least values over all workers */
            s.is_thorough = true;
            search_all(&s);
        }
        plan = s.best_cost < INFINITY ? s.best : refusal_of(&s);
    }
    if (n_candidates_out)
        *n_candidates_out = s.n_log;
    return plan;
}
