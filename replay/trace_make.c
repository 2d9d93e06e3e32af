#include "replay/trace_make.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"
#include "replay/trace_internal.h"
#include "replay/trace_stat.h"

/* ----------------------------------------------------------------- changing */

static bool is_taken(const struct trace *t, const struct trace_request *r, const struct trace_change *c)
{
    double at_s = (double)r->arrival_ns / NS_PER_S;
    return at_s >= c->from_s && (!(c->to_s > 0) || at_s < c->to_s) &&
           (!c->tenant || !strcmp(t->tenants[r->tenant], c->tenant));
}

static uint32_t scaled(uint32_t n, double times, uint32_t least)
{
    double tokens = round(n * times);
    return tokens < least ? least : tokens > TRACE_MAX_TOKENS ? TRACE_MAX_TOKENS : (uint32_t)tokens;
}

struct changing {
    const struct trace *from;
    const struct trace_nodes *nodes;
    const struct trace_change *change;
    struct trace *to;
    uint64_t cap_requests, cap_blocks;
};

/* Number of blocks that other requests use, too. They are at the head, since a node covers all blocks before
 * it. */
static uint32_t shared_of(const struct changing *c, uint64_t request)
{
    const uint32_t *node = c->nodes->of_use + c->nodes->first[request];
    uint32_t n = 0;
    while (n < c->from->requests[request].n_blocks && c->nodes->n_uses[node[n]] > 1)
        n++;
    return n;
}

/* Adds the blocks of a request. With prefix_scale x, shared block i becomes the blocks from round(i x) to
 * round((i + 1) x), so equal chains stay equal. Returns the number of blocks. */
static uint32_t add_blocks(struct changing *c, uint64_t request)
{
    const struct trace_request *r = &c->from->requests[request];
    const uint64_t *ids = trace_blocks(c->from, r);
    double x = c->change->prefix_scale;
    uint32_t n_shared = shared_of(c, request), n = 0;
    for (uint32_t i = 0; i < r->n_blocks; i++) {
        uint32_t from = (uint32_t)llround(i * x), to = (uint32_t)llround((i + 1) * x);
        if (i >= n_shared) {
            trace_add_block(c->to, &c->cap_blocks, ids[i]);
            n++;
            continue;
        }
        for (uint32_t k = from; k < to;
             k++, n++) /* ids of added blocks come from the block and the place; below 2^63 */
            trace_add_block(c->to, &c->cap_blocks, k == from ? ids[i] : random_at(ids[i], k - from, 7) >> 1);
    }
    return n;
}

static void add_changed(struct changing *c, uint64_t request, uint64_t *new_index)
{
    const struct trace_change *change = c->change;
    struct trace_request r = c->from->requests[request];
    double lengths = (double)c->to->block_tokens / c->from->block_tokens;
    r.arrival_ns = (uint64_t)((double)r.arrival_ns / change->rate);
    r.delay_ms = (uint32_t)(r.delay_ms / change->rate);
    r.follows = r.follows ? new_index[r.follows - 1] : 0; /* 0 also if that request was not taken */
    struct trace_request *to = trace_add_request(c->to, &c->cap_requests, &r);
    uint32_t n_blocks = add_blocks(c, request);
    int64_t more = (int64_t)n_blocks - r.n_blocks;
    int64_t n_prompt = (int64_t)r.n_prompt + more * c->from->block_tokens;
    to->n_blocks = n_blocks;
    to->n_prompt = scaled(n_prompt < 1 ? 1 : (uint32_t)n_prompt, r.n_blocks ? lengths : change->length_scale, 1);
    to->n_output = scaled(r.n_output, change->output_scale * change->length_scale, r.n_output > 0);
    if (to->n_blocks > to->n_prompt) /* the partial last block has shrunk to nothing */
        to->n_blocks = to->n_prompt;
    new_index[request] = c->to->n_requests;
}

struct trace *trace_changed(const struct trace *t, const struct trace_change *change)
{
    struct trace_nodes nodes;
    struct changing c = {.from = t, .nodes = &nodes, .change = change, .to = trace_open()};
    uint64_t *new_index = mem_array(t->n_requests, sizeof(*new_index)), n_seen = 0;
    trace_nodes_init(t, &nodes);
    c.to->format = t->format;
    c.to->block_tokens = scaled(t->block_tokens, change->length_scale, 1);
    for (uint32_t i = 1; i < t->n_tenants; i++)
        trace_tenant(c.to, NULL, t->tenants[i]);
    for (uint64_t i = 0; i < t->n_requests; i++) {
        if (!is_taken(t, &t->requests[i], change) || n_seen++ < change->skip)
            continue;
        if (change->count && c.to->n_requests == change->count)
            break;
        add_changed(&c, i, new_index);
    }
    trace_sort(c.to);
    trace_nodes_fini(&nodes);
    free(new_index);
    return c.to;
}

/* -------------------------------------------------------------------- laws */

/* Quantile of the standard normal distribution (Acklam 2003). Its relative error of a millionth is less than
 * a thousand points need. */
static double probit(double p)
{
    static const double A[] = {-39.69683028665376, 220.9460984245205,  -275.9285104469687,
                               138.3577518672690,  -30.66479806614716, 2.506628277459239},
                        B[] = {-54.47609879822406, 161.5858368580409, -155.6989798598866, 66.80131188771972,
                               -13.28068155288572},
                        C[] = {-0.007784894002430293, -0.3223964580411365, -2.400758277161838,
                               -2.549732539343734,    4.374664141464968,   2.938163982698783},
                        D[] = {0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416};
    if (p > 0.5)
        return -probit(1 - p);
    if (p < 0.02425) {
        double q = sqrt(-2 * log(p));
        return (((((C[0] * q + C[1]) * q + C[2]) * q + C[3]) * q + C[4]) * q + C[5]) /
               ((((D[0] * q + D[1]) * q + D[2]) * q + D[3]) * q + 1);
    }
    double q = p - 0.5, r = q * q;
    return (((((A[0] * r + A[1]) * r + A[2]) * r + A[3]) * r + A[4]) * r + A[5]) * q /
           (((((B[0] * r + B[1]) * r + B[2]) * r + B[3]) * r + B[4]) * r + 1);
}

void trace_law_lognormal(double median, double sigma, struct trace_law *out)
{
    for (int i = 0; i < TRACE_QUANTILES; i++)
        out->quantiles[i] = median * exp(sigma * probit((i + 0.5) / TRACE_QUANTILES));
}

double trace_law_draw(const struct trace_law *law, double unit)
{
    double at = unit * (TRACE_QUANTILES - 1);
    int i = at < TRACE_QUANTILES - 2 ? (int)at : TRACE_QUANTILES - 2;
    return law->quantiles[i] + (at - i) * (law->quantiles[i + 1] - law->quantiles[i]);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Makes the distribution of some values, which it sorts. Without values all quantiles are 0. */
static void law_of(double *values, uint64_t n, struct trace_law *out)
{
    qsort(values, n, sizeof(*values), by_value);
    for (int i = 0; i < TRACE_QUANTILES; i++) {
        double at = n ? (double)(n - 1) * i / (TRACE_QUANTILES - 1) : 0;
        uint64_t low = (uint64_t)at;
        double high = n ? values[low + 1 < n ? low + 1 : low] : 0;
        out->quantiles[i] = n ? values[low] + (at - (double)low) * (high - values[low]) : 0;
    }
}

/* --------------------------------------------------------------- synthesis */

enum trace_draw { DRAW_GAP, DRAW_FIRST, DRAW_MORE, DRAW_OUTPUT, DRAW_THINK, DRAW_TURN, DRAW_SYSTEM, DRAW_TENANT };

struct synth {
    const struct trace_synth *d;
    struct trace *t;
    uint64_t cap_requests, cap_blocks, next_id;
};

static double unit(const struct synth *s, uint64_t session, enum trace_draw what, uint64_t i)
{
    return random_unit(random_at(s->d->seed + (uint64_t)what * 0x9e37, session, i));
}

/* A gamma-distributed number with mean 1 (Marsaglia and Tsang 2000; for a shape below 1 with their power of a
 * uniform number). */
static double gamma_gap(struct synth *s, double shape, uint64_t session)
{
    double boost = shape < 1 ? pow(1 - unit(s, session, DRAW_GAP, 0), 1 / shape) : 1,
           d = (shape < 1 ? shape + 1 : shape) - 1.0 / 3, c = 1 / sqrt(9 * d);
    for (uint64_t i = 1;; i += 2) {
        double u = unit(s, session, DRAW_GAP, i), x = probit(fmin(fmax(u, 1e-12), 1 - 1e-12)), v = 1 + c * x;
        v = v * v * v;
        if (v > 0 && log(1 - unit(s, session, DRAW_GAP, i + 1)) < 0.5 * x * x + d - d * v + d * log(v))
            return d * v * boost / shape;
    }
}

static double session_gap_s(struct synth *s, uint64_t session)
{
    double mean = s->d->turns / s->d->rate, b = s->d->burstiness;
    if (!(b > 0))
        return mean;
    return mean * gamma_gap(s, 1 / (b * b), session);
}

/* Draws one of n by Zipf's law: number k is k + 1 times rarer than number 0. */
static uint32_t zipf(double u, uint32_t n)
{
    double all = 0, sum = 0;
    for (uint32_t k = 0; k < n; k++)
        all += 1.0 / (k + 1);
    for (uint32_t k = 0; k + 1 < n; k++) {
        sum += 1.0 / (k + 1) / all;
        if (u < sum)
            return k;
    }
    return n ? n - 1 : 0;
}

static uint32_t tokens_of(const struct trace_law *law, double u)
{
    double n = round(trace_law_draw(law, u));
    return n < 1 ? 1 : n > 1e7 ? 10000000 : (uint32_t)n;
}

struct chain { /* the full blocks of a session so far */
    uint64_t *ids;
    uint32_t n, cap;
};

static void extend(struct synth *s, struct chain *c, uint32_t n_blocks)
{
    if (n_blocks > c->cap) {
        c->cap = n_blocks * 2;
        c->ids = mem_resize(c->ids, c->cap, sizeof(*c->ids));
    }
    while (c->n < n_blocks)
        c->ids[c->n++] = s->next_id++;
}

/* Begins the chain with the system prompt's full blocks, whose ids are the lowest ones. */
static void begin_chain(struct synth *s, struct chain *c, uint32_t system)
{
    uint32_t n = s->d->system_tokens / s->d->block_tokens;
    extend(s, c, n);
    s->next_id -= n;
    for (uint32_t i = 0; i < n; i++)
        c->ids[i] = (uint64_t)system * n + i;
}

static void add_turn(struct synth *s, struct chain *c, struct trace_request *r)
{
    uint32_t n_full = r->n_prompt / s->d->block_tokens;
    struct trace_request *to = trace_add_request(s->t, &s->cap_requests, r);
    for (uint32_t i = 0; i < n_full; i++)
        trace_add_block(s->t, &s->cap_blocks, c->ids[i]);
    if (r->n_prompt % s->d->block_tokens) /* the partial block is never shared: a later turn fills it */
        trace_add_block(s->t, &s->cap_blocks, s->next_id++);
    to->n_blocks = n_full + (r->n_prompt % s->d->block_tokens > 0);
}

/* Adds the requests of a session that arrive at 0 or later; a session may begin before the trace does. */
static void add_session(struct synth *s, uint64_t session, double at_s)
{
    const struct trace_synth *d = s->d;
    struct chain chain = {0};
    uint32_t system = d->n_system ? zipf(unit(s, session, DRAW_SYSTEM, 0), d->n_system) : 0;
    uint32_t n_before = d->n_system ? d->system_tokens : 0;
    uint64_t before = 0;
    if (d->n_system)
        begin_chain(s, &chain, system);
    for (uint64_t turn = 0; n_before < 1u << 26; turn++) {
        double u = unit(s, session, turn ? DRAW_MORE : DRAW_FIRST, turn);
        double think = turn ? trace_law_draw(&d->think_s, unit(s, session, DRAW_THINK, turn)) : 0;
        at_s += fmax(think, 0);
        struct trace_request r = {
            .arrival_ns = (uint64_t)(fmax(at_s, 0) * NS_PER_S),
            .n_prompt = n_before + tokens_of(turn ? &d->more : &d->first, u),
            .n_output = tokens_of(&d->output, unit(s, session, DRAW_OUTPUT, turn)),
            .tenant = d->n_tenants ? 1 + (uint32_t)(unit(s, session, DRAW_TENANT, 0) * d->n_tenants) : 0,
            .session = session + 1,
            .follows = d->follows ? before : 0,
            .delay_ms = d->follows && before ? (uint32_t)(think * 1e3) : 0};
        extend(s, &chain, r.n_prompt / d->block_tokens);
        if (at_s >= 0) {
            add_turn(s, &chain, &r);
            before = s->t->n_requests;
        }
        n_before = r.n_prompt;
        if (unit(s, session, DRAW_TURN, turn) >= 1 - 1 / d->turns)
            break;
    }
    free(chain.ids);
}

/* Arrival of the i-th request by arrival. The trace need not be sorted. */
static double arrival_of(const struct trace *t, uint64_t i)
{
    double *all = mem_array(t->n_requests, sizeof(*all));
    for (uint64_t k = 0; k < t->n_requests; k++)
        all[k] = (double)t->requests[k].arrival_ns / NS_PER_S;
    qsort(all, t->n_requests, sizeof(*all), by_value);
    double at_s = all[i];
    free(all);
    return at_s;
}

/*
 * How many seconds before the trace the first session begins. Sessions in progress at the start contribute
 * their later requests, so the trace has its rate from the start. A session lasts `turns` times the time
 * between two requests, nearly exponentially distributed: after six times that 0.3 % are left. (Rejected:
 * making the first sessions denser. All sessions would stay whole, but the trace would begin with short
 * prompts alone.)
 */
static double warm_s(const struct trace_synth *d)
{
    static const double LIFETIMES = 6, MAX_SESSIONS = 1e7;
    double think_s = 0;
    for (int i = 0; i < TRACE_QUANTILES; i++)
        think_s += fmax(d->think_s.quantiles[i], 0) / TRACE_QUANTILES;
    return d->turns > 1 ? fmin(LIFETIMES * d->turns * think_s, MAX_SESSIONS * d->turns / d->rate) : 0;
}

struct trace *trace_synth(const struct trace_synth *d)
{
    struct synth s = {.d = d, .t = trace_open()};
    double at_s = -warm_s(d), end_s = 0;
    s.t->format = TRACE_TANDEM;
    s.t->block_tokens = d->block_tokens;
    s.next_id = (uint64_t)d->n_system * (d->system_tokens / d->block_tokens);
    for (uint32_t i = 0; i < d->n_tenants; i++) {
        char name[16];
        snprintf(name, sizeof(name), "t%u", i);
        trace_tenant(s.t, NULL, name);
    }
    for (uint64_t session = 0, n = d->n_requests; s.t->n_requests < n || at_s < end_s; session++) {
        bool enough = s.t->n_requests >= n;
        add_session(&s, session, at_s);
        /* Later sessions may still add requests that arrive before the n-th one. */
        if (!enough && s.t->n_requests >= n)
            end_s = arrival_of(s.t, n - 1);
        at_s += session_gap_s(&s, session);
    }
    trace_sort(s.t);
    s.t->n_requests = d->n_requests;
    return s.t;
}

/* ----------------------------------------------------------------- fitting */

struct fit {
    const struct trace *t;
    struct trace_nodes nodes;
    uint64_t *last_user; /* [n_nodes] 1 + last request that used the node; 0: none */
    double *first, *more, *think, *gaps, *system;
    uint64_t n_first, n_more, n_gaps;
};

/*
 * A request continues another one if it begins with all full blocks of that one's prompt, and with more than
 * one block (in some traces all requests share the first block). The other one is the last request that used
 * its deepest known block. A system prompt alone is shorter than that.
 */
static void fit_request(struct fit *f, uint64_t i, double *last_start_s)
{
    const struct trace_request *r = &f->t->requests[i];
    const uint32_t *node = f->nodes.of_use + f->nodes.first[i];
    uint32_t n = 0;
    uint64_t by = 0;
    double at_s = (double)r->arrival_ns / NS_PER_S;
    for (; n < r->n_blocks && f->last_user[node[n]]; n++)
        by = f->last_user[node[n]];
    uint64_t matched = (uint64_t)n * f->t->block_tokens;
    double added = matched < r->n_prompt ? (double)(r->n_prompt - matched) : 1;
    if (n > 1 && n >= f->t->requests[by - 1].n_prompt / f->t->block_tokens) {
        f->think[f->n_more] = at_s - (double)f->t->requests[by - 1].arrival_ns / NS_PER_S;
        f->more[f->n_more++] = added;
    } else {
        if (f->n_first)
            f->gaps[f->n_gaps++] = at_s - *last_start_s;
        *last_start_s = at_s;
        f->system[f->n_first] = n;
        f->first[f->n_first++] = added;
    }
    for (uint32_t k = 0; k < r->n_blocks; k++)
        f->last_user[node[k]] = i + 1;
}

void trace_fit(const struct trace *t, struct trace_synth *out)
{
    uint64_t n = t->n_requests;
    struct fit f = {.t = t};
    double last_start_s = 0, *outputs = mem_array(n, sizeof(*outputs)), *lists = mem_array(5 * n, sizeof(*lists));
    struct trace_stat stat;
    trace_stat_of(t, &stat);
    trace_nodes_init(t, &f.nodes);
    f.last_user = mem_array(f.nodes.n_nodes, sizeof(*f.last_user));
    f.first = lists, f.more = lists + n, f.think = lists + 2 * n, f.gaps = lists + 3 * n, f.system = lists + 4 * n;
    for (uint64_t i = 0; i < n; i++) {
        outputs[i] = t->requests[i].n_output;
        fit_request(&f, i, &last_start_s);
    }
    struct report_stats gaps = report_stats_of(f.gaps, f.n_gaps), system = report_stats_of(f.system, f.n_first);
    *out = (struct trace_synth){.rate = stat.rate,
                                .burstiness = gaps.n && gaps.mean > 0 ? gaps.std / gaps.mean : 1,
                                .turns = f.n_first ? (double)n / (double)f.n_first : 1,
                                .block_tokens = t->block_tokens,
                                .system_tokens = system.n ? (uint32_t)system.p50 * t->block_tokens : 0};
    out->n_system = out->system_tokens > 0;
    law_of(f.first, f.n_first, &out->first);
    law_of(f.more, f.n_more, &out->more);
    law_of(f.think, f.n_more, &out->think_s);
    law_of(outputs, n, &out->output);
    trace_nodes_fini(&f.nodes);
    free(f.last_user);
    free(lists);
    free(outputs);
}
