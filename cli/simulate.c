/*
 * tandem simulate: runs a trace against a cluster in virtual time (replay/simulate.h) and reports it as
 * tandem replay reports a live run.
 *
 * The defaults are a cluster of H200 with Llama-3.1-8B. docs/simulate.md says what is modelled and what is
 * not.
 */
#include "cli/simulate.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TRACE_BYTES = 1 << 30, KEEP_TOKENS = 50000 /* requests; more have too many token times */ };

#define AT(member) offsetof(struct simulate_options, member)
const struct option SIMULATE_TABLE[] = {
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Cluster"},
    {"prefill", OPT_INT, AT(prefill), "8", NULL, 0, SCHEDULER_MAX_WORKERS,
     "prefill workers; 0: every worker does both phases"},
    {"decode", OPT_INT, AT(decode), "8", NULL, 1, SCHEDULER_MAX_WORKERS, "decode workers"},
    {"routers", OPT_INT, AT(routers), "1", NULL, 1, SIMULATE_MAX_ROUTERS,
     "routers that share only the workers; each request comes to a random one"},
    {"profile", OPT_STRING, AT(profile), "h200-8b", "P", 0, 0,
     "a worker: " PROFILE_NAMES "; A,B,C:A,B,C in us (as --sim-prefill and --sim-decode of a worker); FILE[:WORD,...]"},
    {"decode-profile", OPT_STRING, AT(decode_profile), NULL, "P", 0, 0,
     "profile of decode workers, if they are other machines"},
    {"chunk-tokens", OPT_INT, AT(chunk_tokens), "4096", NULL, 1, 1 << 20,
     "most prompt tokens of one sequence in a step"},
    {"max-rows", OPT_INT, AT(max_rows), "0", NULL, 0, 1 << 20,
     "most tokens of a step; 0: one chunk and all decoding sequences"},
    {"max-batch", OPT_INT, AT(max_batch), "256", NULL, 1, 65536, "most sequences computed together"},
    {"page-tokens", OPT_INT, AT(page_tokens), "16", NULL, 1, 65536, "tokens of a KV page; must divide --block-tokens"},
    {"pages", OPT_INT, AT(pages), "0", NULL, 0, 4e9, "KV pages of a worker; 0: as many as --pool-bytes hold"},
    {"pool-bytes", OPT_BYTES, AT(pool_bytes), "0", NULL, 0, 1e15,
     "memory of a worker for KV pages; 0: as its profile says"},
    {"kv-bytes", OPT_DOUBLE, AT(kv_bytes), "0", "X", 0, 1e9, "KV bytes of a token; 0: as the profile says"},
    {"max-context", OPT_INT, AT(max_context), "0", NULL, 0, 1 << 30,
     "most tokens of prompt and answer; 0: what the trace needs"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Network and stores"},
    {"port-gb-s", OPT_DOUBLE, AT(port_gb_s), "50", "X", 0, 1e6,
     "GB/s (1e9 bytes) of each worker and store, in each direction"},
    {"link-ms", OPT_DOUBLE, AT(link_ms), "1", "X", 0, 1e6, "time of a transfer beyond that of its bytes"},
    {"rpc-ms", OPT_DOUBLE, AT(rpc_ms), "0", "X", 0, 1e6, "time of a message between router and worker"},
    {"stores", OPT_INT, AT(stores), "0", NULL, 0, 512, "KV stores"},
    {"store-dram", OPT_BYTES, AT(store_dram), "256G", NULL, 0, 1e15, "memory of each store"},
    {"store-ssd", OPT_BYTES, AT(store_ssd), "0", NULL, 0, 1e16, "disk of each store"},
    {"store-ssd-gb-s", OPT_DOUBLE, AT(store_ssd_gb_s), "6", "X", 0, 1e6, "GB/s of reading from the disk of each store"},
    {"peers", OPT_BOOL, AT(peers), NULL, NULL, 0, 0, "prefill workers also fetch prefixes from each other"},
    {"eviction", OPT_CHOICE, AT(eviction), "tandem", EVICTION_NAMES, 0, 0, "which blocks stores evict first"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Decisions"},
    {"policy", OPT_CHOICE, AT(policy), "tandem", POLICY_NAMES, 0, 0, "how requests are placed"},
    {"order", OPT_CHOICE, AT(order), "tandem", ORDER_NAMES, 0, 0, "order of the queue"},
    {"plan", OPT_CHOICE, AT(plan), "auto", PLAN_FORCE_NAMES, 0, 0, "forces every placement"},
    {"prefix", OPT_CHOICE, AT(prefix), "auto", "auto|load|compute", 0, 0,
     "blocks that stores have: load or compute, whichever is faster (auto), or always one of them"},
    {"ttft-ms", OPT_LIMIT_MS, AT(ttft_ms), "0", NULL, 0, 3.6e6,
     "TTFT limit of requests that have none in the trace; 0: none"},
    {"tpot-ms", OPT_LIMIT_MS, AT(tpot_ms), "0", NULL, 0, 3.6e6,
     "TPOT limit of requests that have none in the trace; 0: none"},
    {"tenants", OPT_STRING, AT(tenants), NULL, "NAME=WEIGHT,...", 0, 0,
     "shares of the trace's tenants; a tenant that is not named has weight 1"},
    {"max-wait-ms", OPT_MS, AT(max_wait_ms), "120s", NULL, 1, 1e12,
     "time in the queue after which a request is the first of its tenant"},
    {"queue-requests", OPT_INT, AT(queue_requests), "0", NULL, 0, 1e9,
     "requests that may wait at each router; 0: no bound"},
    {"queue-tokens", OPT_INT, AT(queue_tokens), "0", NULL, 0, 1e12,
     "prompt tokens that may wait at each router; 0: no bound"},
    {"max-tokens", OPT_INT, AT(max_tokens), "0", NULL, 0, 1 << 30,
     "most tokens that a request asks for; 0: exactly the answer's tokens, so that the length is known"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "What goes wrong"},
    {"noise", OPT_DOUBLE, AT(noise), "0", "SIGMA", 0, 2, "sigma of a log-normal factor on the time of each step"},
    {"profile-error", OPT_DOUBLE, AT(profile_error), "1", "X", 1e-3, 1e3,
     "the scheduler starts with coefficients X times too large"},
    {"length-error", OPT_DOUBLE, AT(length_error), "1", "X", 1e-3, 1e3,
     "the scheduler learns that answers are X times as long"},
    {"fail", OPT_STRING, AT(fail), NULL, "LIST", 0, 0,
     "decode-3@120s,prefill-1@60s+30s,router-2@90s: it dies at that time; +TIME: it comes back, empty, after that "
     "time; routers don't come back"},
    {"silence-ms", OPT_MS, AT(silence_ms), "1000", NULL, 0, 3.6e6, "time after which a dead worker counts as dead"},
    {"gone-ms", OPT_MS, AT(gone_ms), "5000", NULL, 0, 3.6e6,
     "how long requests wait when no worker of a role is left; then they fail"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Load"},
    {"rate", OPT_DOUBLE, AT(rate), "1", "X", 1e-6, 1e6, "factor by which arrivals are faster than in the trace"},
    {"requests", OPT_INT, AT(requests), "0", NULL, 0, 1e12, "number of requests to run, from the first one on; 0: all"},
    {"block-tokens", OPT_INT, AT(block_tokens), "0", NULL, 0, 1 << 20,
     "tokens of a block id in the trace; 0: as its format says"},
    {"retry-share", OPT_DOUBLE, AT(retry_share), "0", "X", 0, 1,
     "share of the refused requests that come back once, when they are told to"},
    {"seed", OPT_INT, AT(seed), "1", NULL, 0, 1e18, "seed of noise and retries"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Power"},
    {"watts", OPT_STRING, AT(watts), NULL, "I,P,D", 0, 0,
     "watts of a worker that is idle, prefills, decodes; default: the profile's"},
    {"power-budget", OPT_DOUBLE, AT(power_budget), "0", "WATTS", 0, 1e12,
     "power budget of all workers together, near which clocks go down; 0: none"},
    {"power-first", OPT_INT, AT(power_first), "-1", "N", -1, SCHEDULER_MAX_WORKERS,
     "the last N workers' clocks go down first; -1: all decode workers', or half of the workers that do both phases"},
    {"power-control", OPT_CHOICE, AT(power_control), "polca", "polca|brake", 0, 0,
     "polca: clocks go down in steps; brake: only above the budget"},
    {"price", OPT_DOUBLE, AT(price), "0", "X", 0, 1e9, "price of a worker per hour; 0: as the profile says"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Report"},
    {"sweep", OPT_STRING, AT(sweep), NULL, "LIST", 0, 0,
     "runs every combination of some options' values: prefill=4..12,policy=tandem|random,rate=1..2:0.5; any option "
     "above"},
    {"jobs", OPT_INT, AT(jobs), "0", NULL, 0, 1024, "number of a sweep's runs at a time; 0: one for each CPU"},
    {"label", OPT_STRING, AT(label), NULL, "TEXT", 0, 0, "name of the run in comparisons"},
    {"output", OPT_STRING, AT(output), NULL, "FILE", 0, 0, "writes the report with every request as JSON"},
    {"html", OPT_STRING, AT(html), NULL, "FILE", 0, 0, "writes the report as one page"},
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "prints one JSON object"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

/* ------------------------------------------------------------ configuration */

/* Index of a name in "a|b|c". The option table has made sure that it is one of them. */
static int choice(const char *names, const char *name)
{
    size_t len = strlen(name);
    for (int i = 0; *names; i++) {
        size_t n = strcspn(names, "|");
        if (n == len && !strncmp(names, name, n))
            return i;
        names += n + (names[n] == '|');
    }
    return 0;
}

static bool seconds(const char *text, char **end, double *ms_out)
{
    double value = strtod(text, end);
    bool is_ms = !strncmp(*end, "ms", 2);
    if (*end == text || !(value >= 0) || value > 1e9)
        return false;
    *end += is_ms ? 2 : **end == 's';
    *ms_out = is_ms ? value : value * 1000;
    return true;
}

static bool one_fault(const struct simulate_options *o, char *text, struct simulate_fault *out)
{
    bool prefill = !strncmp(text, "prefill-", 8), decode = !strncmp(text, "decode-", 7);
    char *end;
    unsigned long n = prefill || decode ? strtoul(text + (prefill ? 8 : 7), &end, 10) : 0;
    *out = (struct simulate_fault){.back_ms = INFINITY};
    if (!n || n > (unsigned long)(prefill ? o->prefill : o->decode) || *end != '@' ||
        !seconds(end + 1, &end, &out->at_ms))
        return false;
    if (*end == '+') {
        if (!seconds(end + 1, &end, &out->back_ms))
            return false;
        out->back_ms += out->at_ms;
    }
    out->worker = (uint32_t)(n - 1 + (prefill ? 0 : (unsigned long)o->prefill));
    return !*end;
}

/* Whether the last fault hits a worker that is still dead, or whose death the router does not know yet. */
static bool dies_twice(const struct simulate_fault *faults, uint32_t n, double silence_ms)
{
    const struct simulate_fault *last = &faults[n - 1];
    for (uint32_t i = 0; i + 1 < n; i++) {
        const struct simulate_fault *a = faults[i].at_ms < last->at_ms ? &faults[i] : last,
                                    *b = a == last ? &faults[i] : last;
        if (a->worker == b->worker && b->at_ms <= fmax(a->back_ms, a->at_ms + silence_ms))
            return true;
    }
    return false;
}

/* Parses "router-2@90s". A dead router does not come back, and one router must be left. */
static enum td_status router_fault(struct simulate_point *p, const char *text, struct td_error *e)
{
    char *end;
    unsigned long n = strtoul(text + 7, &end, 10);
    double at_ms;
    if (!n || n > (unsigned long)p->o.routers || *end != '@' || !seconds(end + 1, &end, &at_ms) || *end)
        return td_fail(e, TD_ERR_INVALID, "--fail '%s': expected router-N@TIME, with N from 1 to --routers", text);
    for (uint32_t i = 0; i < p->config.n_router_faults; i++)
        if (p->router_faults[i].router == n - 1)
            return td_fail(e, TD_ERR_INVALID, "--fail '%s': this router is dead already", text);
    if (p->config.n_router_faults + 1 == (uint32_t)p->o.routers)
        return td_fail(e, TD_ERR_INVALID, "--fail '%s': no router would be left", text);
    p->router_faults[p->config.n_router_faults++] = (struct simulate_router_fault){(uint32_t)n - 1, at_ms};
    return TD_OK;
}

static enum td_status worker_fault(struct simulate_point *p, char *text, struct td_error *e)
{
    if (p->config.n_faults == SIMULATE_FAULTS)
        return td_fail(e, TD_ERR_INVALID, "--fail: more than %d workers", SIMULATE_FAULTS);
    if (!one_fault(&p->o, text, &p->faults[p->config.n_faults++]))
        return td_fail(e, TD_ERR_INVALID,
                       "--fail '%s': expected prefill-N@TIME[+TIME] or decode-N@TIME[+TIME], with N from 1 to the "
                       "number of workers",
                       text);
    if (dies_twice(p->faults, p->config.n_faults, p->config.silence_ms))
        return td_fail(e, TD_ERR_INVALID,
                       "--fail '%s': at that time this worker is still dead, or its last death is not known yet", text);
    return TD_OK;
}

static enum td_status parse_faults(struct simulate_point *p, struct td_error *e)
{
    char *copy = mem_strdup(p->o.fail ? p->o.fail : ""), *state = NULL;
    enum td_status s = TD_OK;
    for (char *t = strtok_r(copy, ",", &state); t && !s; t = strtok_r(NULL, ",", &state))
        s = strncmp(t, "router-", 7) ? worker_fault(p, t, e) : router_fault(p, t, e);
    free(copy);
    p->config.faults = p->faults;
    p->config.router_faults = p->router_faults;
    return s;
}

static enum td_status read_watts(struct simulate_point *p, struct td_error *e)
{
    struct simulate_power *power = p->config.power;
    double w[3];
    int end = 0;
    for (int i = 0; i < 2; i++)
        power[i] = (struct simulate_power){p->profiles[i].idle_w, p->profiles[i].prefill_w, p->profiles[i].decode_w};
    if (!p->o.watts)
        return TD_OK;
    if (sscanf(p->o.watts, "%lf,%lf,%lf%n", &w[0], &w[1], &w[2], &end) != 3 || p->o.watts[end] || !(w[0] >= 0) ||
        !(w[1] >= 0) || !(w[2] >= 0))
        return td_fail(e, TD_ERR_INVALID, "--watts %s: expected IDLE,PREFILL,DECODE", p->o.watts);
    power[0] = power[1] = (struct simulate_power){w[0], w[1], w[2]};
    return TD_OK;
}

static enum td_status set_budget(struct simulate_point *p, struct td_error *e)
{
    const struct simulate_options *o = &p->o;
    struct simulate_config *c = &p->config;
    uint32_t n_workers = c->n_prefill + c->n_decode;
    if (!(o->power_budget > 0))
        return TD_OK;
    if ((c->n_prefill && !simulate_power_known(&c->power[0])) || !simulate_power_known(&c->power[1]))
        return td_fail(e, TD_ERR_INVALID, "--power-budget: the profile does not say what workers draw; give --watts");
    if (o->power_first > (int64_t)n_workers)
        return td_fail(e, TD_ERR_INVALID, "--power-first: there are only %u workers", n_workers);
    c->power_budget_w = o->power_budget;
    c->power_brake_only = o->power_control[0] == 'b';
    c->n_power_first = c->n_prefill ? c->n_decode : n_workers / 2;
    if (o->power_first >= 0)
        c->n_power_first = (uint32_t)o->power_first;
    return TD_OK;
}

static enum td_status read_profiles(struct simulate_point *p, struct td_error *e)
{
    enum td_status s = profile_read(p->o.profile, &p->profiles[0], e);
    p->profiles[1] = p->profiles[0];
    if (!s && p->o.decode_profile)
        s = profile_read(p->o.decode_profile, &p->profiles[1], e);
    return s;
}

static uint32_t longest(const struct trace *t)
{
    uint32_t most = 0;
    for (uint64_t i = 0; i < t->n_requests; i++) {
        uint32_t n = t->requests[i].n_prompt + t->requests[i].n_output + 1;
        most = n > most ? n : most;
    }
    return most;
}

/* Both roles hold KV of the same model: if one profile does not give its size, that of the other counts. */
static enum td_status set_kv_bytes(struct simulate_point *p, struct td_error *e)
{
    double prefill = p->o.prefill ? p->profiles[0].kv_bytes_per_token : 0, decode = p->profiles[1].kv_bytes_per_token;
    double kv = p->o.kv_bytes > 0 ? p->o.kv_bytes : prefill > 0 ? prefill : decode;
    if (!(p->o.kv_bytes > 0) && prefill > 0 && decode > 0 && fabs(prefill - decode) > 1e-6 * prefill)
        return td_fail(
            e, TD_ERR_INVALID,
            "--decode-profile %s: %.0f bytes of KV a token, but prefill workers have %.0f; workers of one cluster "
            "have the same (--kv-bytes says which)",
            p->o.decode_profile, decode, prefill);
    if (!(kv > 0))
        return td_fail(e, TD_ERR_INVALID, "--profile %s does not say what a token's KV weighs: give --kv-bytes",
                       p->o.profile);
    p->config.kv_bytes_per_token = kv;
    return TD_OK;
}

/* Number of pages of a worker of this role. */
static enum td_status count_pages(const struct simulate_point *p, int role, uint32_t *out, struct td_error *e)
{
    const struct simulate_options *o = &p->o;
    const char *name = role && o->decode_profile ? "decode-profile" : "profile";
    double pool = o->pool_bytes ? (double)o->pool_bytes : p->profiles[role].pool_bytes;
    double pages = o->pages ? (double)o->pages : floor(pool / p->config.kv_bytes_per_token / p->config.page_tokens);
    if (!o->pages && !(pool > 0))
        return td_fail(e, TD_ERR_INVALID,
                       "--%s %s does not say how much memory KV pages have: give --pool-bytes or --pages", name,
                       role && o->decode_profile ? o->decode_profile : o->profile);
    if (!(pages >= 1))
        return td_fail(e, TD_ERR_INVALID, "--pool-bytes: %.0f bytes hold no page of %u tokens", pool,
                       p->config.page_tokens);
    *out = (uint32_t)fmin(pages, 4e9);
    return TD_OK;
}

static enum td_status set_memory(struct simulate_point *p, const struct trace *trace, struct td_error *e)
{
    const struct simulate_options *o = &p->o;
    struct simulate_config *c = &p->config;
    enum td_status s = TD_OK;
    c->block_tokens = o->block_tokens ? (uint32_t)o->block_tokens : trace->block_tokens;
    c->page_tokens = (uint32_t)o->page_tokens;
    c->max_context = o->max_context ? (uint32_t)o->max_context : longest(trace) + c->max_tokens;
    if (c->block_tokens % c->page_tokens)
        s = td_fail(e, TD_ERR_INVALID, "--page-tokens %u does not divide blocks of %u tokens", c->page_tokens,
                    c->block_tokens);
    if (!s)
        s = set_kv_bytes(p, e);
    if (!s)
        s = count_pages(p, 1, &c->n_decode_pages, e);
    c->n_pages = c->n_decode_pages;
    return s || !c->n_prefill ? s : count_pages(p, 0, &c->n_pages, e);
}

static void set_rest(struct simulate_config *c, const struct simulate_options *o)
{
    *c = (struct simulate_config){
        .n_prefill = (uint32_t)o->prefill,
        .n_decode = (uint32_t)o->decode,
        .chunk_tokens = (uint32_t)o->chunk_tokens,
        .max_batch = (uint32_t)o->max_batch,
        .max_rows = (uint32_t)o->max_rows,
        .profile_error = o->profile_error,
        .noise = o->noise,
        .port_gb_s = o->port_gb_s,
        .link_ms = o->link_ms,
        .rpc_ms = o->rpc_ms,
        .stores = {.n = (uint32_t)o->stores,
                   .eviction = (enum eviction_policy)choice(EVICTION_NAMES, o->eviction),
                   .dram_bytes = (double)o->store_dram,
                   .ssd_bytes = (double)o->store_ssd,
                   .port_gb_s = o->port_gb_s,
                   .ssd_gb_s = o->store_ssd_gb_s},
        .peers = o->peers,
        .rate = o->rate,
        .ttft_ms = o->ttft_ms,
        .tpot_ms = o->tpot_ms,
        .policy = (enum policy)choice(POLICY_NAMES, o->policy),
        .order = (enum scheduler_order)choice(ORDER_NAMES, o->order),
        .force = (enum plan_force)choice(PLAN_FORCE_NAMES, o->plan),
        .n_routers = (uint32_t)o->routers,
        .max_queued = (uint32_t)o->queue_requests,
        .max_queued_tokens = (uint64_t)o->queue_tokens,
        .max_wait_ms = (double)o->max_wait_ms,
        .prefix = (enum prefix_rule)choice("auto|load|compute", o->prefix),
        .max_tokens = (uint32_t)o->max_tokens,
        .length_error = o->length_error,
        .retry_share = o->retry_share,
        .silence_ms = (double)o->silence_ms,
        .gone_ms = (double)o->gone_ms,
        .seed = (uint64_t)o->seed,
        .n_requests = (uint64_t)o->requests,
    };
}

enum td_status simulate_point_init(struct simulate_point *p, const struct trace *trace, struct td_error *e)
{
    struct simulate_config *c = &p->config;
    uint64_t n =
        p->o.requests && (uint64_t)p->o.requests < trace->n_requests ? (uint64_t)p->o.requests : trace->n_requests;
    enum td_status s = read_profiles(p, e);
    if (s)
        return s;
    if (p->o.prefill + p->o.decode > SCHEDULER_MAX_WORKERS)
        return td_fail(e, TD_ERR_INVALID, "--prefill and --decode: more than %d workers", SCHEDULER_MAX_WORKERS);
    if ((p->o.plan[0] == 's' || p->o.plan[0] == 'k') && !p->o.prefill)
        return td_fail(e, TD_ERR_INVALID, "--plan %s needs prefill workers", p->o.plan);
    set_rest(c, &p->o);
    c->cost = p->profiles[0].cost;
    c->decode_cost = p->o.decode_profile ? &p->profiles[1].cost : NULL;
    c->keep_tokens = n <= KEEP_TOKENS && (p->o.json || p->o.output || p->o.html);
    c->load_tick_ms = 1;
    s = set_memory(p, trace, e);
    if (!s)
        s = parse_faults(p, e);
    if (!s)
        s = fair_weights_parse(p->o.tenants, &p->weights, &c->n_weights, e);
    c->weights = p->weights;
    if (!s)
        s = read_watts(p, e);
    return s ? s : set_budget(p, e);
}

/* --------------------------------------------------------------------- run */

/* The power budget, and how the run kept it. */
static json_t *power_of(const struct simulate_point *p)
{
    const struct simulated_power *w = &p->result.power;
    json_t *seconds = json_array();
    for (int i = 0; i < POWER_LEVELS; i++)
        json_array_append_new(seconds, json_real(w->level_ms[i] * 1e-3));
    return json_pack("{s:f,s:I,s:s,s:f,s:I,s:o}", "budget_w", p->config.power_budget_w, "first",
                     (json_int_t)p->config.n_power_first, "control", p->o.power_control, "peak_share", w->peak_share,
                     "brakes", (json_int_t)w->n_brakes, "level_s", seconds);
}

static json_t *fit_error_of(const struct worker_profile *profile)
{
    return profile->fit_error > 0 ? json_real(profile->fit_error) : json_null();
}

static char *settings_of(const struct simulate_point *p)
{
    const struct simulate_options *o = &p->o;
    const struct simulate_config *c = &p->config;
    const double *a = c->cost.prefill, *d = (c->decode_cost ? c->decode_cost : &c->cost)->decode;
    json_t *s = json_pack(
        "{s:I,s:I,s:s,s:s,s:s,s:s,s:f,s:f,s:f,s:f,s:I,s:I,s:I,s:I,s:I,s:I,s:f,s:f,s:f,s:f,s:I,s:I,s:I,s:s,s:f,s:I}",
        "prefill", (json_int_t)o->prefill, "decode", (json_int_t)o->decode, "policy", o->policy, "order", o->order,
        "plan", o->plan, "profile", o->profile, "rate", o->rate, "noise", o->noise, "profile_error", o->profile_error,
        "length_error", o->length_error, "chunk_tokens", (json_int_t)c->chunk_tokens, "max_batch",
        (json_int_t)c->max_batch, "page_tokens", (json_int_t)c->page_tokens, "pages", (json_int_t)c->n_pages,
        "max_tokens", (json_int_t)c->max_tokens, "block_tokens", (json_int_t)c->block_tokens, "kv_bytes_per_token",
        c->kv_bytes_per_token, "port_gb_s", c->port_gb_s, "link_ms", c->link_ms, "rpc_ms", c->rpc_ms, "stores",
        (json_int_t)o->stores, "store_dram", (json_int_t)o->store_dram, "store_ssd", (json_int_t)o->store_ssd,
        "eviction", o->eviction, "retry_share", o->retry_share, "seed", (json_int_t)o->seed);
    json_object_set_new(s, "prefill_us", json_pack("[f,f,f]", a[0] * 1e3, a[1] * 1e3, a[2] * 1e3));
    json_object_set_new(s, "decode_us", json_pack("[f,f,f]", d[0] * 1e3, d[1] * 1e3, d[2] * 1e3));
    json_object_set_new(s, "decode_pages", json_integer(c->n_decode_pages));
    json_object_set_new(s, "fit_error", fit_error_of(&p->profiles[0]));
    if (o->decode_profile) {
        json_object_set_new(s, "decode_profile", json_string(o->decode_profile));
        json_object_set_new(s, "decode_fit_error", fit_error_of(&p->profiles[1]));
    }
    json_object_set_new(s, "routers", json_integer(o->routers));
    json_object_set_new(s, "max_wait_ms", json_integer(o->max_wait_ms));
    json_object_set_new(s, "queue_requests", json_integer(o->queue_requests));
    json_object_set_new(s, "queue_tokens", json_integer(o->queue_tokens));
    if (o->tenants)
        json_object_set_new(s, "tenants", json_string(o->tenants));
    if (o->fail)
        json_object_set_new(s, "fail", json_string(o->fail));
    if (c->power_budget_w > 0)
        json_object_set_new(s, "power", power_of(p));
    char *text = json_dumps(s, JSON_COMPACT | JSON_REAL_PRECISION(10));
    json_decref(s);
    return text;
}

void simulate_point_run(struct simulate_point *p, const struct trace *trace, const char *trace_name)
{
    simulate_run(trace, &p->config, &p->result);
    simulate_report_init(&p->report, trace, &p->config, &p->result);
    if (p->o.label)
        snprintf(p->label, sizeof(p->label), "%s", p->o.label);
    else
        snprintf(p->label, sizeof(p->label), "%u+%u %s", p->config.n_prefill, p->config.n_decode, p->o.policy);
    p->report.run.label = p->label;
    p->report.run.trace = trace_name;
    p->report.run.settings = p->settings = settings_of(p);
}

void simulate_point_fini(struct simulate_point *p)
{
    simulate_report_fini(&p->report);
    simulate_result_fini(&p->result);
    free(p->settings);
    free(p->overrides);
    for (char **w = p->words; w && *w; w++)
        free(*w);
    free(p->words);
    free(p->weights);
}

bool simulate_write_file(const char *path, const struct bytes *text)
{
    FILE *f = fopen(path, "wb");
    bool ok = f && fwrite(text->data, 1, text->len, f) == text->len;
    if (f)
        ok = !fclose(f) && ok;
    if (!ok)
        cli_fail("simulate", "%s: can't be written", path);
    return ok;
}

static void print_power(const struct simulate_point *p, double tokens)
{
    const struct report_run *run = &p->report.run;
    const struct simulated_power *power = &p->result.power;
    double joules = 0, lowered_ms = 0;
    for (uint32_t w = 0; w < run->n_workers; w++)
        joules += run->workers[w].joules;
    if (!isfinite(joules) || !(tokens > 0))
        return;
    printf("power          %.1f kW on average, %.2f J a token", joules / fmax(run->duration_ms, 1e-9), joules / tokens);
    for (int i = 1; i < POWER_LEVELS; i++)
        lowered_ms += power->level_ms[i];
    if (p->config.power_budget_w > 0)
        printf("; peak %.1f %% of %.1f kW, %" PRIu64 " brakes, clocks lowered for %.0f s", 100 * power->peak_share,
               p->config.power_budget_w * 1e-3, power->n_brakes, lowered_ms * 1e-3);
    printf("\n");
}

/* Prints how well the coefficients fit the table, and what memory the workers have. */
static void print_profile(const struct simulate_point *p, int role)
{
    const struct worker_profile *profile = &p->profiles[role];
    if (!(profile->fit_error > 0) && !profile->is_derived)
        return;
    printf("%-14s fitted within %.1f %% (mean); %.0f bytes of KV a token, %u pages of %u tokens%s\n",
           role && p->o.decode_profile ? "decode profile" : "profile", 100 * profile->fit_error,
           p->config.kv_bytes_per_token, role ? p->config.n_decode_pages : p->config.n_pages, p->config.page_tokens,
           profile->is_derived && !(p->o.kv_bytes > 0 && (p->o.pages || p->o.pool_bytes))
               ? ", by the names of model and GPU"
               : "");
}

/* Prints what only a simulated run knows. */
static void print_more(const struct simulate_point *p)
{
    const struct simulate_result *r = &p->result;
    const struct report_run *run = &p->report.run;
    double tokens = 0, price = p->o.price > 0 ? p->o.price : p->profiles[0].price_per_hour;
    double price_decode = p->o.price > 0 || !p->o.decode_profile ? price : p->profiles[1].price_per_hour;
    uint64_t preempted = 0, replans = 0;
    for (uint64_t i = 0; i < r->n_requests; i++) {
        tokens += r->requests[i].refused || r->requests[i].failed ? 0 : r->requests[i].n_output;
        preempted += r->requests[i].n_preempted;
        replans += r->requests[i].n_replans;
    }
    double hours = run->duration_ms / 3.6e6;
    double cost = (p->config.n_prefill * price + p->config.n_decode * price_decode) * hours;
    print_power(p, tokens);
    if (p->config.n_prefill)
        print_profile(p, 0);
    if (p->o.decode_profile || !p->config.n_prefill)
        print_profile(p, 1);
    if (cost > 0 && tokens > 0)
        printf("cost           %.2f in all, %.3f per million tokens\n", cost, cost / tokens * 1e6);
    printf("moved          %.1f GB between workers, %.1f GB from stores; %" PRIu64 " preempted, %" PRIu64
           " planned anew; %" PRIu64 " steps\n",
           r->bytes_moved * 1e-9, r->bytes_loaded * 1e-9, preempted, replans, r->n_steps);
}

static int write_report(const struct simulate_point *p)
{
    const struct report_run *run = &p->report.run;
    struct bytes text = {0};
    bool ok = true;
    if (p->o.json)
        report_json(run, false, &text);
    else
        report_table(run, &text);
    fwrite(text.data, 1, text.len, stdout);
    if (!p->o.json)
        print_more(p);
    fflush(stdout);
    if (p->o.output) {
        bytes_clear(&text);
        report_json(run, true, &text);
        ok = simulate_write_file(p->o.output, &text) && ok;
    }
    if (p->o.html) {
        bytes_clear(&text);
        report_html((const struct report_run *const[]){run}, 1, &text);
        ok = simulate_write_file(p->o.html, &text) && ok;
    }
    bytes_free(&text);
    if (!run->valid)
        ok = !cli_fail("simulate", "the run contradicts itself: %s", run->why_invalid);
    return ok ? 0 : 1;
}

static int run_one(const struct simulate_options *o, const struct trace *trace, const char *name)
{
    struct td_error e = {{0}};
    struct simulate_point *p = mem_zalloc(sizeof(*p));
    int code = 2;
    p->o = *o;
    if (simulate_point_init(p, trace, &e)) {
        cli_fail("simulate", "%s", e.text);
    } else {
        simulate_point_run(p, trace, name);
        code = write_report(p);
    }
    simulate_point_fini(p);
    free(p);
    return code;
}

int cli_simulate(int argc, char **argv)
{
    struct simulate_options o = {.prefill = 0};
    struct td_error e = {{0}};
    struct trace *trace = NULL;
    const char **rest = mem_array((size_t)argc, sizeof(*rest)), *path, *slash;
    int code, n_rest;
    bool go = cli_options("simulate", "TRACE [options]", "Runs a trace against a cluster in virtual time.",
                          SIMULATE_TABLE, argc, argv, &o, rest, &n_rest, &code);
    go = go && cli_words("simulate", "TRACE", rest, n_rest, 1, 1, &code);
    path = go ? rest[0] : NULL;
    free(rest);
    if (!go)
        return code;
    if (trace_read(path, MAX_TRACE_BYTES, &trace, &e))
        return cli_fail("simulate", "%s", e.text);
    slash = strrchr(path, '/');
    path = slash ? slash + 1 : path;
    code = o.sweep ? simulate_sweep(trace, path, &o, argc, argv) : run_one(&o, trace, path);
    trace_close(trace);
    return code;
}
