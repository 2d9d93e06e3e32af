#include "replay/trace_stat.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"

/* ------------------------------------------------------------------- nodes */

struct trace_names { /* numbers of nodes by key; a hash table with open addressing */
    uint64_t *keys;
    uint32_t *numbers; /* 1 + number; 0: the bucket is empty */
    uint64_t n_buckets;
};

static uint32_t number_of(struct trace_names *m, uint64_t key, uint64_t *n_nodes)
{
    uint64_t i = key & (m->n_buckets - 1);
    for (; m->numbers[i]; i = (i + 1) & (m->n_buckets - 1))
        if (m->keys[i] == key)
            return m->numbers[i] - 1;
    m->keys[i] = key;
    m->numbers[i] = (uint32_t)++ * n_nodes;
    return m->numbers[i] - 1;
}

void trace_nodes_init(const struct trace *t, struct trace_nodes *out)
{
    struct trace_names names = {.n_buckets = 64};
    uint64_t n = 0;
    while (names.n_buckets < 2 * t->n_blocks)
        names.n_buckets *= 2;
    names.keys = mem_array(names.n_buckets, sizeof(*names.keys));
    names.numbers = mem_array(names.n_buckets, sizeof(*names.numbers));
    *out = (struct trace_nodes){.of_use = mem_array(t->n_blocks, sizeof(*out->of_use)),
                                .first = mem_array(t->n_requests + 1, sizeof(*out->first)),
                                .n_uses = mem_array(t->n_blocks, sizeof(*out->n_uses))};
    for (uint64_t r = 0; r < t->n_requests; r++) {
        const uint64_t *ids = trace_blocks(t, &t->requests[r]);
        uint64_t key = 0;
        out->first[r] = n;
        for (uint32_t i = 0; i < t->requests[r].n_blocks; i++) {
            key = random_at(key, i, ids[i]);
            out->of_use[n] = number_of(&names, key, &out->n_nodes);
            out->n_uses[out->of_use[n++]]++;
        }
    }
    out->first[t->n_requests] = n;
    free(names.keys);
    free(names.numbers);
}

void trace_nodes_fini(struct trace_nodes *n)
{
    free(n->of_use);
    free(n->first);
    free(n->n_uses);
}

/* ------------------------------------------------------------------- reuse */

/* A tree of partial sums (Fenwick 1994) over a list of 0 and 1: each block counts 1 at its last use. */
static void tree_add(int32_t *tree, uint64_t n, uint64_t at, int32_t value)
{
    for (uint64_t i = at + 1; i <= n; i += i & (0 - i))
        tree[i - 1] += value;
}

static uint64_t tree_sum(const int32_t *tree, uint64_t n_first)
{
    uint64_t sum = 0;
    for (uint64_t i = n_first; i; i -= i & (0 - i))
        sum += (uint64_t)tree[i - 1];
    return sum;
}

/* Adds stack distances (Mattson et al. 1970): an LRU cache of more blocks than the distance finds the
 * block. */
static void add_reuse(const struct trace *t, const struct trace_nodes *nodes, struct trace_stat *out)
{
    uint64_t n = t->n_blocks, n_reuses = 0, *last = mem_array(nodes->n_nodes, sizeof(*last)); /* 1 + use */
    int32_t *tree = mem_array(n, sizeof(*tree));
    uint32_t *request_of = mem_array(n, sizeof(*request_of));
    double *blocks = mem_array(n, sizeof(*blocks)), *seconds = mem_array(n, sizeof(*seconds));
    for (uint64_t r = 0; r < t->n_requests; r++) {
        for (uint64_t use = nodes->first[r]; use < nodes->first[r + 1]; use++) {
            uint32_t node = nodes->of_use[use];
            request_of[use] = (uint32_t)r;
            if (last[node]) {
                uint64_t before = last[node] - 1;
                blocks[n_reuses] = (double)(tree_sum(tree, use) - tree_sum(tree, before + 1));
                seconds[n_reuses++] =
                    (double)(t->requests[r].arrival_ns - t->requests[request_of[before]].arrival_ns) / NS_PER_S;
                tree_add(tree, n, before, -1);
            }
            tree_add(tree, n, use, 1);
            last[node] = use + 1;
        }
    }
    out->reuse_blocks = report_stats_of(blocks, n_reuses);
    out->reuse_s = report_stats_of(seconds, n_reuses);
    free(last);
    free(tree);
    free(request_of);
    free(blocks);
    free(seconds);
}

/* ---------------------------------------------------------------- ceilings */

static void add_ceiling(const struct trace *t, const struct trace_nodes *nodes, bool full_only,
                        struct trace_ceiling *out)
{
    bool *seen = mem_array(nodes->n_nodes, sizeof(*seen));
    for (uint64_t r = 0; r < t->n_requests; r++) {
        const struct trace_request *q = &t->requests[r];
        uint32_t n = q->n_blocks, n_full = q->n_prompt / t->block_tokens, n_found = 0;
        if (full_only && n > n_full)
            n = n_full;
        const uint32_t *node = nodes->of_use + nodes->first[r];
        while (n_found < n && seen[node[n_found]])
            n_found++;
        for (uint32_t i = 0; i < n; i++)
            seen[node[i]] = true;
        uint64_t found = (uint64_t)n_found * t->block_tokens;
        out->asked += n;
        out->found += n_found;
        out->asked_tokens += q->n_prompt;
        out->found_tokens += found < q->n_prompt ? found : q->n_prompt;
    }
    free(seen);
}

/* ------------------------------------------------------------------- rates */

static void add_rates(const struct trace *t, struct trace_stat *out)
{
    uint64_t n = t->n_requests, last_ns = t->requests[n - 1].arrival_ns, in_second = 0, in_minute = 0;
    double *gaps = mem_array(n, sizeof(*gaps));
    out->least_in_a_minute = UINT64_MAX;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t at = t->requests[i].arrival_ns, before = i ? t->requests[i - 1].arrival_ns : 0;
        if (i)
            gaps[i - 1] = (double)(at - before);
        in_second = i && at / NS_PER_S == before / NS_PER_S ? in_second + 1 : 1;
        out->most_in_a_second = in_second > out->most_in_a_second ? in_second : out->most_in_a_second;
        if (at / (60 * NS_PER_S) !=
            before / (60 * NS_PER_S)) { /* a minute is over; minutes without a request may follow */
            out->most_in_a_minute = in_minute > out->most_in_a_minute ? in_minute : out->most_in_a_minute;
            out->least_in_a_minute = in_minute < out->least_in_a_minute ? in_minute : out->least_in_a_minute;
            if (at / (60 * NS_PER_S) - before / (60 * NS_PER_S) > 1)
                out->least_in_a_minute = 0;
            in_minute = 0;
        }
        in_minute++;
    }
    if (out->least_in_a_minute == UINT64_MAX) /* the trace is shorter than a minute */
        out->least_in_a_minute = out->most_in_a_minute = n;
    struct report_stats s = report_stats_of(gaps, n - 1);
    out->gap_cv = s.n && s.mean > 0 ? s.std / s.mean : NAN;
    out->span_s = (double)last_ns / NS_PER_S;
    out->rate = last_ns ? (double)n / out->span_s : 0;
    free(gaps);
}

static void add_lengths(const struct trace *t, struct trace_stat *out)
{
    double *prompts = mem_array(t->n_requests, sizeof(*prompts)), *outputs = mem_array(t->n_requests, sizeof(*outputs));
    uint64_t last_session = 0;
    for (uint64_t i = 0; i < t->n_requests; i++) {
        const struct trace_request *r = &t->requests[i];
        prompts[i] = r->n_prompt;
        outputs[i] = r->n_output;
        out->n_tokens_in += r->n_prompt;
        out->n_tokens_out += r->n_output;
        out->n_unanswered += !r->n_output;
        out->n_following += r->follows > 0;
        last_session = r->session > last_session ? r->session : last_session;
    }
    bool *seen = mem_array(last_session + 1, sizeof(*seen));
    for (uint64_t i = 0; i < t->n_requests; i++) {
        out->n_sessions += t->requests[i].session && !seen[t->requests[i].session];
        seen[t->requests[i].session] = true;
    }
    out->prompt = report_stats_of(prompts, t->n_requests);
    out->output = report_stats_of(outputs, t->n_requests);
    free(prompts);
    free(outputs);
    free(seen);
}

void trace_stat_of(const struct trace *t, struct trace_stat *out)
{
    struct trace_nodes nodes;
    *out = (struct trace_stat){.n = t->n_requests, .n_tenants = t->n_tenants, .n_blocks = t->n_blocks};
    if (!t->n_requests)
        return;
    add_rates(t, out);
    add_lengths(t, out);
    trace_nodes_init(t, &nodes);
    out->n_blocks = nodes.first[t->n_requests];
    out->n_distinct = nodes.n_nodes;
    for (uint64_t i = 0; i < nodes.n_nodes; i++)
        out->n_used_once += nodes.n_uses[i] == 1;
    add_ceiling(t, &nodes, false, &out->with_partial);
    add_ceiling(t, &nodes, true, &out->full_only);
    add_reuse(t, &nodes, out);
    trace_nodes_fini(&nodes);
}
