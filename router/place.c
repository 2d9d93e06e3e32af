/*
 * Between requests and the scheduler (sched/scheduler.h): names the blocks of requests, tells the scheduler
 * where they are, and carries out its decisions.
 *
 * A request is submitted when the router is ready, knows what it serves (router.known) and has the workers
 * that a plan needs. Until then it waits in router.requests, unknown to the scheduler (q->submitted is
 * false).
 */
#include <math.h>
#include <openssl/hmac.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/endian.h"
#include "base/random.h"
#include "router/router_internal.h"

/* ------------------------------------------------------------------- names */

/*
 * Root of a request's block keys. The salt is an HMAC, keyed by the cache key, of the tenant's length, the
 * tenant and the client's own salt: no client can name another tenant's blocks. The stores' lossy codec, if
 * any, follows the HMAC: blocks from such a store, and all KV computed from them, are never found under the
 * names of exact blocks.
 */
static struct block_key root_key(struct router *r, const struct params *p)
{
    struct bytes b = {0};
    uint8_t salt[32 + sizeof(r->kv_codec)], n[4];
    unsigned len = 32, codec_len = (unsigned)strlen(r->kv_codec);
    const struct router_options *o = &r->options;
    const char *cache_key = o->cache_key ? o->cache_key : r->secret_text,
               *tenant = p->tenant.len ? p->tenant.data : "default";
    size_t tenant_len = p->tenant.len ? p->tenant.len : strlen(tenant); /* a tenant may contain U+0000 */
    put_u32(n, (uint32_t)tenant_len);
    bytes_append(&b, n, 4);
    bytes_append(&b, tenant, tenant_len);
    bytes_append(&b, p->salt.data, p->salt.len);
    if (p->bypass_cache) { /* a name that no other request will ever have, so nothing is found under it */
        uint64_t nonce = random_u64();
        bytes_append(&b, &nonce, sizeof(nonce));
    }
    HMAC(EVP_sha256(), cache_key, (int)strlen(cache_key), (const uint8_t *)b.data, b.len, salt, &len);
    bytes_free(&b);
    memcpy(salt + len, r->kv_codec, codec_len);
    const struct served_adapter *adapter = adapters_served(r, p);
    return block_key_root(&r->fingerprint, adapter ? adapter->fingerprint.b : NULL, adapter ? BLOCK_KEY_BYTES : 0, salt,
                          len + codec_len);
}

struct block_key *place_keys(struct router *r, const struct params *p, uint32_t *n_out, struct block_key *root_out)
{
    struct block_key *keys = mem_array(p->n_ids / r->layout.page_tokens, sizeof(*keys));
    *root_out = root_key(r, p);
    *n_out = block_keys(root_out, p->ids, p->n_ids, r->layout.page_tokens, keys);
    return keys;
}

/*
 * Names the blocks of q. Only when r->known: fingerprint and block size of the first worker are part of the
 * names.
 */
static void name_blocks(struct router *r, struct request *q)
{
    uint32_t context = atomic_load(&r->max_context);
    if (!q->p.max_tokens_given && q->p.n_ids < context && q->p.sampling.max_tokens > context - q->p.n_ids)
        /* The request was validated before the workers' context was known. */
        q->p.sampling.max_tokens = context - q->p.n_ids;
    memcpy(q->kv_codec, r->kv_codec, sizeof(q->kv_codec));
    q->keys = place_keys(r, &q->p, &q->n_keys, &q->root);
}

/* Equal for equal prompts of one tenant and salt; never 0. */
static uint64_t identity(const struct router *r, const struct request *q)
{
    uint64_t h = block_key_hash(q->n_keys ? &q->keys[q->n_keys - 1] : &q->root);
    for (uint32_t i = q->n_keys * r->layout.page_tokens; i < q->p.n_ids; i++)
        h = random_at(h, q->p.ids[i], i);
    return h ? h : 1;
}

/* The tenant's number for the scheduler; 0: no tenant was given. */
static uint64_t tenant_of(const struct request *q)
{
    return q->p.tenant.len ? ring_id(q->p.tenant.data, q->p.tenant.len) : 0;
}

/* ---------------------------------------------------------------- matching */

/* All ready stores, or all ready workers. */
static struct holder_set ready_holders(const struct router *r, bool stores)
{
    struct holder_set s = {{0}};
    for (uint32_t i = 0; i < r->n_peers; i++)
        if ((r->peers[i]->role == ROLE_STORE) == stores && r->peers[i]->state == PEER_READY &&
            !(stores && r->peers[i]->draining)) /* a draining store serves no reads */
            holder_set_add(&s, r->peers[i]->holder);
    return s;
}

/* scheduler_config.match */
static void match_prefix(void *user, struct sched_request *s)
{
    struct router *r = user;
    struct request *q = s->user;
    struct holder_set workers = ready_holders(r, false), stores = ready_holders(r, true);
    memset(s->matched_blocks, 0, MAX_WORKERS * sizeof(*s->matched_blocks));
    s->store_blocks = s->store_blocks_ssd = s->peer_blocks = 0;
    if (replan_wants_scores(q)) /* scoring computes every prompt token, so no match helps */
        return;
    index_match_each(r->index, &workers, q->keys, q->n_keys, s->matched_blocks);
    s->store_blocks = index_match_segments(r->index, &stores, q->keys, 0, q->n_keys);
    s->store_blocks_ssd = index_on_disk(r->index, &stores, q->keys, s->store_blocks);
    for (uint32_t i = 0; i < r->n_peers; i++)
        if (peer_lends(r->peers[i]) && s->matched_blocks[r->peers[i]->holder] > s->peer_blocks)
            s->peer_blocks = s->matched_blocks[r->peers[i]->holder];
}

uint32_t place_cached(struct router *r, const struct block_key *keys, uint32_t n)
{
    struct holder_set workers = ready_holders(r, false), stores = ready_holders(r, true);
    uint32_t *matched = mem_array(MAX_WORKERS, sizeof(*matched));
    uint32_t most = index_match_segments(r->index, &stores, keys, 0, n);
    index_match_each(r->index, &workers, keys, n, matched);
    for (uint32_t i = 0; i < r->n_peers; i++)
        most = matched[i] > most ? matched[i] : most;
    free(matched);
    return most;
}

/* --------------------------------------------------------------- decisions */

/* scheduler_config.place */
static void carry_out(void *user, struct sched_request *s)
{
    (void)user;
    explain_note(s->user, &s->plan, 0);
    request_place(s->user, &s->plan);
}

/* scheduler_config.refuse; also for refusals at submission. Frees the request. */
static void tell_refusal(void *user, struct sched_request *s, double retry_after_ms)
{
    struct request *q = s->user;
    const struct plan *plan = &s->plan;
    char text[200];
    (void)user;
    explain_note(q, plan, retry_after_ms);
    if (plan->ttft_ms > 0)
        snprintf(text, sizeof(text), "%s: predicted TTFT %.1f ms, TPOT %.1f ms%s", plan->reason, plan->ttft_ms,
                 plan->tpot_ms, plan->hopeless ? "; not with idle workers either" : "");
    else
        snprintf(text, sizeof(text), "%s", plan->reason);
    request_fail(q, plan->never && !q->n_replans ? RPC_INVALID_ARGUMENT : RPC_RESOURCE_EXHAUSTED, text,
                 (uint32_t)ceil(retry_after_ms));
}

/* What is left to do for q. */
static void size_work(struct request *q)
{
    q->sched.n_tokens = q->scores ? q->p.sampling.n_prompt : q->p.n_ids;
    q->sched.max_tokens = q->scores ? 0 : q->p.sampling.max_tokens - q->n_tokens;
}

/* Gives q to the scheduler. May free q. */
static void submit(struct router *r, struct request *q, uint64_t now)
{
    struct sched_request *s = &q->sched;
    double retry_after_ms;
    struct td_error e;
    if (adapters_ask(r, &q->p, &e)) { /* q was validated before the adapters were known */
        request_fail(q, RPC_NOT_FOUND, e.text, 0);
        return;
    }
    name_blocks(r, q);
    q->submitted = true;
    r->n_unsubmitted--;
    *s = (struct sched_request){.user = q,
                                .number = ++r->next_number,
                                .tenant = tenant_of(q),
                                .identity = identity(r, q),
                                .priority = q->p.priority,
                                .block_tokens = r->layout.page_tokens,
                                .ttft_ms = q->p.ttft_ms,
                                .tpot_ms = q->p.tpot_ms,
                                .arrived_ns = q->arrived_ns,
                                .deadline_ns = UINT64_MAX,
                                .workflow_deadline_ns = UINT64_MAX,
                                .workflow_steps_left = q->p.workflow_steps_left,
                                .shares = q->choices && q->p.sampling.choice,
                                .matched_blocks = mem_array(MAX_WORKERS, sizeof(uint32_t))};
    size_work(q);
    if (q->p.remaining_ms != INT64_MAX)
        s->deadline_ns = q->arrived_ns + (uint64_t)q->p.remaining_ms * NS_PER_MS;
    if (q->p.workflow_deadline_ms)
        s->workflow_deadline_ns = q->arrived_ns + (uint64_t)q->p.workflow_deadline_ms * NS_PER_MS;
    if (scheduler_submit(r->scheduler, s, now, &retry_after_ms)) {
        q->predicted_ttft_ms = s->promised_ttft_ms;
        q->predicted_tpot_ms = s->promised_tpot_ms;
    } else {
        tell_refusal(r, s, retry_after_ms);
    }
}

void place_again(struct request *q)
{
    struct sched_request *s = &q->sched;
    s->resumed = true;
    size_work(q);
    scheduler_requeue(q->router->scheduler, s, clock_now(&q->router->clock));
}

/* Fails all queued requests: a role that they need has had no worker for gone_ms. */
static void fail_queued(struct router *r)
{
    struct request *q, *next;
    TAILQ_FOREACH_SAFE (q, &r->requests, in_router, next) {
        if (q->state == REQUEST_QUEUED)
            request_fail(q, RPC_UNAVAILABLE,
                         !r->known                        ? "no worker is up yet"
                         : scheduler_is_cut(r->scheduler) ? "no decode worker can connect to a prefill worker"
                         : peer_has_role(r, ROLE_DECODE)  ? "no prefill worker is up"
                                                          : "no decode worker is up",
                         1000);
    }
}

void place_queued(struct router *r)
{
    uint64_t now = clock_now(&r->clock);
    if (!r->n_queued)
        return;
    if (router_patience(r) >= r->able_ns + (uint64_t)r->options.gone_ms * NS_PER_MS && !router_can_serve(r)) {
        fail_queued(r);
        return;
    }
    if (!r->ready || !r->known || !router_can_serve(r))
        return;
    struct request *q, *next;
    TAILQ_FOREACH_SAFE (q, &r->requests, in_router, next) {
        if (!r->n_unsubmitted)
            break;
        if (!q->submitted)
            submit(r, q, now);
    }
    scheduler_run(r->scheduler, now);
}

/* -------------------------------------------------------------------- open */

enum plan_force place_forced(const struct router *r)
{
    return !strcmp(r->options.plan, "split")        ? FORCE_SPLIT
           : !strcmp(r->options.plan, "aggregated") ? FORCE_AGGREGATED
           : !strcmp(r->options.plan, "kept")       ? FORCE_KEPT
                                                    : FORCE_NONE;
}

static enum prefix_rule prefix_rule(const struct router *r)
{
    return !strcmp(r->options.prefix, "load")      ? PREFIX_LOAD
           : !strcmp(r->options.prefix, "compute") ? PREFIX_COMPUTE
                                                   : PREFIX_AUTO;
}

/* Index of a name in "a|b|c"; the name must be there. */
static int choice_of(const char *names, const char *name)
{
    int i = 0;
    for (size_t len = strlen(name); strncmp(names, name, len) || (names[len] && names[len] != '|'); i++)
        names = strchr(names, '|') + 1;
    return i;
}

enum td_status place_open(struct router *r, struct td_error *e)
{
    const struct router_options *o = &r->options;
    struct fair_weight *weights = NULL;
    struct scheduler_config c = {.policy = (enum policy)choice_of(POLICY_NAMES, o->policy),
                                 .order = (enum scheduler_order)choice_of(ORDER_NAMES, o->order),
                                 .force = place_forced(r),
                                 .prefix = prefix_rule(r),
                                 .max_wait_ns = (uint64_t)o->max_wait_ms * NS_PER_MS,
                                 .max_queued_tokens = (uint64_t)o->queue_tokens,
                                 .max_queued = (uint32_t)o->queue_requests,
                                 .explain = true,
                                 .seed = r->incarnation,
                                 .user = r,
                                 .place = carry_out,
                                 .refuse = tell_refusal,
                                 .match = match_prefix};
    enum td_status s = cost_profile_parse(o->profile, &c.profile, e);
    if (!s)
        s = fair_weights_parse(o->tenants, &weights, &c.n_weights, e);
    c.weights = weights;
    if (!s)
        r->scheduler = scheduler_open(&c);
    free(weights);
    return s;
}
