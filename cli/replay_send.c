/*
 * A sender of tandem replay.
 *
 * It has three kinds of threads. One makes prompts ahead of time. The main thread sends each request when it
 * is due, and does nothing else. gRPC's threads note the answers. A prompt is made from the block ids of the
 * trace: equal ids give equal tokens, so prefixes are really shared. Without ids all prompts are different.
 *
 * A token's time is when its message arrived. If a message has several tokens, the time since the previous
 * message is divided evenly among them, because nobody saw them come one by one.
 */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "admin.pb-c.h"
#include "base/random.h"
#include "base/thread.h"
#include "cli/admin.h"
#include "cli/replay.h"

enum { AHEAD = 256, AHEAD_TOKENS = 8 << 20, STEP_MS = 20, READY_MS = 30000 };

struct sender;

struct call { /* one attempt of a request; freed in on_end(), or when the call can't be started */
    struct sender *sender;
    uint64_t index;
    double due_ms, sent_ms, first_ms, last_ms; /* ms since the start */
    uint32_t n_tokens;
    bool second;
    Tandem__V1__GenerateEnd *end;
};

struct prompt {
    uint64_t index;
    uint32_t *ids, n;
};

struct back { /* a request sent out of turn: it comes back after a refusal, or the one before it has ended */
    uint64_t index;
    double due_ms;
    bool second;
};

struct sender {
    struct replay *r;
    struct rpc_client *client;
    uint64_t *mine, n_mine, next; /* this sender's requests, in the order of the trace */
    uint64_t *next_follower;      /* [n] 1 + the next request that follows the same request; 0: none */
    uint64_t *first_follower;     /* [n] 1 + the first request that follows this one; 0: none */
    struct back *back;            /* sorted by due_ms, the earliest last */
    uint64_t n_back, cap_back;
    uint64_t n_running;
    /* Guards back, n_back and n_running: rpc threads end calls, the main thread starts them. */
    pthread_mutex_t lock;
    pthread_cond_t changed;

    pthread_mutex_t making; /* guards the bounded queue of prompts made ahead, in the order of mine */
    pthread_cond_t made, taken;
    struct prompt ahead[AHEAD];
    uint64_t n_made, n_taken, n_tokens_ahead;
    bool closing;
};

static double now_ms(const struct replay *r)
{
    return ((double)clock_now(&r->clock) - (double)r->board->began_ns) * 1e-6;
}

/* ----------------------------------------------------------------- prompts */

/* The tokens of a block follow from its id; a block without an id gets tokens of its own. */
static struct prompt make_prompt(const struct replay *r, uint64_t index)
{
    const struct trace_request *t = &r->trace->requests[index];
    const uint64_t *blocks = trace_blocks(r->trace, t), salt = (uint64_t)r->o.seed + r->round;
    double scaled = round((double)r->trace->block_tokens * r->o.length_scale);
    uint32_t block = scaled < 1 ? 1 : (uint32_t)scaled, n = replay_prompt_tokens(r, index);
    struct prompt p = {index, mem_array(n, sizeof(uint32_t)), n};
    for (uint32_t b = 0, i = 0; i < n; b++) {
        uint64_t name = random_mix(salt) ^ (b < t->n_blocks ? random_mix(blocks[b]) : random_at(index, b, 1));
        for (uint32_t k = 0; k < block && i < n; k++, i++)
            p.ids[i] = (uint32_t)(random_mix(name + k) % r->board->vocab);
    }
    return p;
}

static void *make_ahead(void *user)
{
    struct sender *s = user;
    for (uint64_t i = 0; i < s->n_mine; i++) {
        struct prompt p = make_prompt(s->r, s->mine[i]);
        pthread_mutex_lock(&s->making);
        while (!s->closing &&
               (s->n_made - s->n_taken == AHEAD || (s->n_made > s->n_taken && s->n_tokens_ahead + p.n > AHEAD_TOKENS)))
            pthread_cond_wait(&s->taken, &s->making);
        if (s->closing) {
            pthread_mutex_unlock(&s->making);
            free(p.ids);
            break;
        }
        s->ahead[s->n_made++ % AHEAD] = p;
        s->n_tokens_ahead += p.n;
        pthread_cond_signal(&s->made);
        pthread_mutex_unlock(&s->making);
    }
    return NULL;
}

/* A request in turn has a prompt made ahead. The prompt of any other is made now. */
static struct prompt take_prompt(struct sender *s, uint64_t index, bool in_turn)
{
    if (!in_turn)
        return make_prompt(s->r, index);
    pthread_mutex_lock(&s->making);
    while (s->n_made == s->n_taken)
        pthread_cond_wait(&s->made, &s->making);
    struct prompt p = s->ahead[s->n_taken++ % AHEAD];
    s->n_tokens_ahead -= p.n;
    pthread_cond_signal(&s->taken);
    pthread_mutex_unlock(&s->making);
    return p;
}

/* ----------------------------------------------------------------- reasons */

/* Keeps the router's text without the predictions at its end, which differ from request to request. */
static void note_reason(struct replay_slot *slot, const char *text)
{
    const char *figures = text ? strstr(text, ": predicted TTFT") : NULL;
    size_t len = figures ? (size_t)(figures - text) : text ? strlen(text) : 0;
    snprintf(slot->reason, sizeof(slot->reason), "%.*s", (int)len, text ? text : "");
}

/* ----------------------------------------------------------------- answers */

static void on_message(struct rpc_call *rpc, const ProtobufCMessage *base)
{
    struct call *c = rpc_call_user(rpc);
    const struct replay *r = c->sender->r;
    const Tandem__V1__GenerateResponse *m = (const Tandem__V1__GenerateResponse *)base;
    double now = now_ms(r);
    float *tokens = r->tokens + r->first_token[c->index];
    uint32_t n = (uint32_t)m->n_tokens, room = replay_output_tokens(r, c->index);
    for (uint32_t i = 0; i < n && c->n_tokens < room; i++) {
        double at = c->first_ms > 0 ? c->last_ms + (now - c->last_ms) * (i + 1) / n : now;
        tokens[c->n_tokens++] = (float)(at - c->due_ms);
    }
    if (n && !(c->first_ms > 0))
        c->first_ms = now;
    if (n)
        c->last_ms = now;
    if (m->end && !c->end) {
        Tandem__V1__GenerateResponse *whole = (Tandem__V1__GenerateResponse *)rpc_call_take(rpc, base);
        c->end = whole->end;
        whole->end = NULL;
        tandem__v1__generate_response__free_unpacked(whole, NULL);
    }
}

static void copy_name(char *out, size_t size, ProtobufCBinaryData name)
{
    snprintf(out, size, "%.*s", (int)(name.len < size ? name.len : size - 1), name.data ? (const char *)name.data : "");
}

/* Values that only the last message of a stream has. */
static void note_end(const struct call *c, struct replay_slot *slot)
{
    const Tandem__V1__GenerateEnd *e = c->end;
    struct report_request *q = &slot->q;
    if (e->usage && e->usage->cached_tokens) {
        const Tandem__V1__CachedTokens *t = e->usage->cached_tokens;
        const uint32_t cached[] = {t->worker, t->peer, t->dram, t->ssd};
        memcpy(q->cached, cached, sizeof(cached));
    }
    if (e->usage && e->usage->completion_tokens != c->n_tokens)
        q->n_asked = e->usage->completion_tokens; /* makes report_check() fail: tokens were lost */
    if (e->timing) {
        q->queue_ms = e->timing->queue;
        q->load_ms = e->timing->prefix_load;
        q->prefill_ms = e->timing->prefill;
        q->transfer_ms = e->timing->exposed_transfer;
    }
    if (e->predicted) {
        q->predicted_ttft_ms = e->predicted->ttft_ms;
        q->predicted_tpot_ms = e->predicted->tpot_ms;
    }
    if (e->placement) {
        copy_name(slot->prefill, sizeof(slot->prefill), e->placement->prefill);
        copy_name(slot->decode, sizeof(slot->decode), e->placement->decode);
        copy_name(slot->plan, sizeof(slot->plan), e->placement->plan);
    }
}

static void note_answer(const struct call *c, struct replay_slot *slot)
{
    struct report_request *q = &slot->q;
    q->n_output = c->n_tokens;
    if (c->n_tokens) {
        q->ttft_ms = c->first_ms - c->due_ms;
        q->e2e_ms = c->last_ms - c->due_ms;
    }
    if (c->n_tokens > 1)
        q->tpot_ms = (q->e2e_ms - q->ttft_ms) / (c->n_tokens - 1);
    if (c->end)
        note_end(c, slot);
}

static void count_answer(struct replay *r, const struct report_request *q)
{
    const struct report_run limits = {.ttft_slo_ms = r->o.ttft_ms, .tpot_slo_ms = r->o.tpot_ms};
    struct replay_counts *n = &r->board->counts;
    n->answered++;
    n->met += report_is_met(&limits, q);
    n->ttft_us += (uint64_t)(fmax(q->ttft_ms, 0) * 1e3);
    n->tpot_us += isfinite(q->tpot_ms) ? (uint64_t)(q->tpot_ms * 1e3) : 0;
    n->n_tpot += isfinite(q->tpot_ms);
}

/* --------------------------------------------------------------- out of turn */

static void push_back(struct sender *s, struct back b)
{
    s->back = MEM_ROOM(s->back, s->n_back, s->cap_back, 64);
    uint64_t i = s->n_back++;
    for (; i && s->back[i - 1].due_ms < b.due_ms; i--)
        s->back[i] = s->back[i - 1];
    s->back[i] = b;
}

/* If a request was not answered, the requests that follow it are not sent. They count as refused. */
static void drop_followers(struct sender *s, uint64_t index)
{
    for (uint64_t f = s->first_follower[index]; f; f = s->next_follower[f - 1]) {
        struct replay_slot *slot = &s->r->slots[f - 1];
        slot->q.outcome = REPORT_REFUSED;
        note_reason(slot, "the request that it follows was not answered");
        slot->q.arrived_ms = now_ms(s->r);
        atomic_store(&slot->state, SLOT_OVER);
        s->r->board->counts.over++;
        s->r->board->counts.refused++;
        drop_followers(s, f - 1);
    }
}

/* Puts the followers of a request that has ended into the list `back`. send_all() passes over them in
 * turn. */
static void free_followers(struct sender *s, uint64_t index, double ended_ms)
{
    for (uint64_t f = s->first_follower[index]; f; f = s->next_follower[f - 1]) {
        double due = fmax(s->r->due_ms[f - 1], ended_ms + s->r->trace->requests[f - 1].delay_ms);
        push_back(s, (struct back){f - 1, due, false});
    }
}

static bool comes_back(const struct sender *s, const struct call *c, uint32_t retry_after_ms)
{
    return retry_after_ms && !c->second &&
           random_unit(random_at((uint64_t)s->r->o.seed, c->index, 3)) < s->r->o.retry_share;
}

/* The lock is held. True: the request does not come back. */
static bool note_refusal(struct sender *s, const struct call *c, uint32_t retry_after_ms, double now)
{
    struct report_request *q = &s->r->slots[c->index].q;
    q->outcome = REPORT_REFUSED;
    if (!c->second) {
        q->refused_after_ms = now - c->due_ms;
        q->retry_after_ms = retry_after_ms ? retry_after_ms : NAN;
    }
    if (!comes_back(s, c, retry_after_ms))
        return true;
    q->came_back = true;
    push_back(s, (struct back){c->index, now + retry_after_ms, true});
    return false;
}

static void settle_call(struct sender *s, struct call *c, enum rpc_code code, const char *text, uint32_t retry_after_ms,
                        double now)
{
    struct replay_slot *slot = &s->r->slots[c->index];
    struct replay_counts *n = &s->r->board->counts;
    bool is_over = true, ok = code == RPC_OK && c->end;
    note_reason(slot, ok ? NULL : text);
    if (ok || c->n_tokens)
        note_answer(c, slot);
    if (ok) {
        slot->q.outcome = REPORT_ANSWERED;
        slot->q.admitted_then = c->second;
        count_answer(s->r, &slot->q);
        free_followers(s, c->index, now);
    } else if (code == RPC_RESOURCE_EXHAUSTED && !c->n_tokens) {
        is_over = note_refusal(s, c, retry_after_ms, now);
        n->refused += is_over;
    } else {
        slot->q.outcome = c->n_tokens ? REPORT_CUT_SHORT : REPORT_FAILED;
        n->failed++;
    }
    if (!is_over)
        return;
    if (!ok)
        drop_followers(s, c->index);
    atomic_store(&slot->state, SLOT_OVER);
    n->over++;
}

static void on_end(struct rpc_call *rpc, enum rpc_code code, const char *text)
{
    struct call *c = rpc_call_user(rpc);
    struct sender *s = c->sender;
    pthread_mutex_lock(&s->lock);
    settle_call(s, c, code, text, rpc_call_retry_after_ms(rpc), now_ms(s->r));
    s->n_running--;
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->lock);
    if (c->end)
        tandem__v1__generate_end__free_unpacked(c->end, NULL);
    free(c);
}

/* ----------------------------------------------------------------- sending */

static void send_prompt(struct sender *s, struct call *c, const struct prompt *p)
{
    const struct replay *r = s->r;
    const struct trace_request *t = &r->trace->requests[c->index];
    const struct report_request *q = &r->slots[c->index].q;
    char id[32], workflow[32];
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    Tandem__V1__TokenPrompt tokens = TANDEM__V1__TOKEN_PROMPT__INIT;
    Tandem__V1__Sampling sampling = TANDEM__V1__SAMPLING__INIT;
    Tandem__V1__Stopping stopping = TANDEM__V1__STOPPING__INIT;
    Tandem__V1__Slo slo = TANDEM__V1__SLO__INIT;
    snprintf(id, sizeof(id), "%" PRIu64, c->index);
    snprintf(workflow, sizeof(workflow), "s%" PRIu64, t->session);
    tokens.n_ids = p->n;
    tokens.ids = p->ids;
    sampling.has_temperature_case = TANDEM__V1__SAMPLING__HAS_TEMPERATURE_TEMPERATURE; /* 0: greedy */
    stopping.has_max_tokens_case = TANDEM__V1__STOPPING__HAS_MAX_TOKENS_MAX_TOKENS;
    stopping.max_tokens = q->n_asked;
    stopping.ignore_eos = true;
    ask_limits(&slo, t->ttft_ms > 0 ? t->ttft_ms : r->o.ttft_ms, t->tpot_ms > 0 ? t->tpot_ms : r->o.tpot_ms);
    m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TOKENS;
    m.tokens = &tokens;
    m.sampling = &sampling;
    m.stopping = &stopping;
    m.slo = &slo;
    m.priority = t->priority;
    m.tenant = rpc_data(r->o.tenant ? r->o.tenant : r->trace->tenants[t->tenant]);
    m.workflow_id = rpc_data(t->session ? workflow : "");
    m.request_id = rpc_data(id);
    m.want_ids = true;
    const struct rpc_call_params params = {.path = "/tandem.v1.Tandem/Generate",
                                           .response = &tandem__v1__generate_response__descriptor,
                                           .handlers = {.on_message = on_message, .on_end = on_end},
                                           .user = c};
    /* Not a member of c, which on_end() may free from here on. */
    struct rpc_call *call = NULL;
    /* The client is closing: nothing was sent, and on_end() does not come. */
    if (rpc_call_start(s->client, &params, &call)) {
        pthread_mutex_lock(&s->lock);
        settle_call(s, c, RPC_CANCELLED, "the client was closing", 0, now_ms(r));
        s->n_running--;
        pthread_mutex_unlock(&s->lock);
        free(c);
        return;
    }
    rpc_call_send(call, &m.base);
    rpc_call_close_send(call);
    rpc_call_unref(call);
}

static void send_one(struct sender *s, const struct back *b, bool in_turn)
{
    struct prompt p = take_prompt(s, b->index, in_turn);
    struct replay_slot *slot = &s->r->slots[b->index];
    struct call *c = mem_zalloc(sizeof(*c));
    double now = now_ms(s->r);
    *c = (struct call){.sender = s, .index = b->index, .due_ms = b->due_ms, .sent_ms = now, .second = b->second};
    if (s->r->o.concurrency && !b->second)
        c->due_ms = now;
    if (!b->second) {
        slot->q.arrived_ms = c->due_ms;
        slot->q.sent_late_ms = now - c->due_ms;
        atomic_store(&slot->state, SLOT_SENT);
        s->r->board->counts.sent++;
    }
    pthread_mutex_lock(&s->lock);
    s->n_running++;
    pthread_mutex_unlock(&s->lock);
    send_prompt(s, c, &p);
    free(p.ids);
}

/* -------------------------------------------------------------------- turns */

enum turn { TURN_SEND, TURN_SEND_BACK, TURN_WAIT, TURN_NONE };

/* Chooses what is sent next: the earlier of the next request in turn and the first of `back`. */
static enum turn next_turn(struct sender *s, struct back *out)
{
    const struct replay *r = s->r;
    enum turn turn = TURN_NONE;
    double new_due = s->next < s->n_mine ? r->due_ms[s->mine[s->next]] : INFINITY;
    uint64_t limit = r->o.concurrency ? (uint64_t)r->o.concurrency : UINT64_MAX;
    uint32_t n = (uint32_t)r->o.processes;
    if (r->o.concurrency) /* this sender's share of the limit */
        limit = limit / n + (r->owner[s->mine[0]] < limit % n);
    pthread_mutex_lock(&s->lock);
    if (s->n_running >= limit && (s->n_back || s->next < s->n_mine)) {
        turn = TURN_WAIT;
    } else if (s->n_back && s->back[s->n_back - 1].due_ms <= new_due) {
        *out = s->back[s->n_back - 1];
        turn = TURN_SEND_BACK;
    } else if (s->next < s->n_mine) {
        *out = (struct back){s->mine[s->next], new_due, false};
        turn = TURN_SEND;
    } else if (s->n_running) {
        turn = TURN_WAIT;
    }
    pthread_mutex_unlock(&s->lock);
    return turn;
}

static bool is_stopped(const struct sender *s)
{
    return atomic_load(&s->r->board->stop) > 0;
}

/* Sleeps for a step at most. False: the caller must look again, since an earlier request may have become due
 * or the run may have been stopped. */
static bool wait_until(const struct sender *s, double due_ms)
{
    double left_ms = due_ms - now_ms(s->r);
    if (is_stopped(s))
        return false;
    if (left_ms > STEP_MS) {
        nanosleep(&(struct timespec){.tv_nsec = STEP_MS * 1000000L}, NULL);
        return false;
    }
    if (left_ms > 0)
        nanosleep(&(struct timespec){.tv_nsec = (long)(left_ms * 1e6)}, NULL);
    return true;
}

static void wait_change(struct sender *s)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += STEP_MS * 1000000L;
    until.tv_sec += until.tv_nsec / (long)NS_PER_S;
    until.tv_nsec %= (long)NS_PER_S;
    pthread_mutex_lock(&s->lock);
    if (s->n_running)
        pthread_cond_timedwait(&s->changed, &s->lock, &until);
    pthread_mutex_unlock(&s->lock);
}

static void send_all(struct sender *s)
{
    struct back b;
    while (!is_stopped(s)) {
        enum turn turn = next_turn(s, &b);
        if (turn == TURN_NONE)
            break;
        if (turn == TURN_WAIT) {
            wait_change(s);
            continue;
        }
        if (!s->r->o.concurrency && !wait_until(s, b.due_ms))
            continue;
        if (turn == TURN_SEND && s->r->trace->requests[b.index].follows) {
            /* free_followers() adds it to `back` when it may be sent. */
            free(take_prompt(s, b.index, true).ids);
            s->next++;
            continue;
        }
        pthread_mutex_lock(&s->lock);
        s->next += turn == TURN_SEND;
        s->n_back -= turn == TURN_SEND_BACK;
        pthread_mutex_unlock(&s->lock);
        send_one(s, &b, turn == TURN_SEND);
    }
    while (atomic_load(&s->r->board->stop) < 2) {
        pthread_mutex_lock(&s->lock);
        bool idle = !s->n_running;
        pthread_mutex_unlock(&s->lock);
        if (idle)
            break;
        wait_change(s);
    }
}

/* -------------------------------------------------------------------- whole */

static void list_mine(struct sender *s, uint32_t sender)
{
    const struct replay *r = s->r;
    s->mine = mem_array(r->n, sizeof(*s->mine));
    s->first_follower = mem_array(r->n, sizeof(*s->first_follower));
    s->next_follower = mem_array(r->n, sizeof(*s->next_follower));
    for (uint64_t i = 0; i < r->n; i++)
        if (r->owner[i] == sender)
            s->mine[s->n_mine++] = i;
    for (uint64_t i = r->n; i-- > 0;) {
        uint64_t follows = r->trace->requests[i].follows;
        if (!follows || r->owner[i] != sender)
            continue;
        s->next_follower[i] = s->first_follower[follows - 1];
        s->first_follower[follows - 1] = i + 1;
    }
}

static void close_sender(struct sender *s, pthread_t maker)
{
    pthread_mutex_lock(&s->making);
    s->closing = true;
    pthread_cond_broadcast(&s->taken);
    pthread_mutex_unlock(&s->making);
    pthread_join(maker, NULL);
    rpc_client_close(s->client);
    for (; s->n_taken < s->n_made; s->n_taken++)
        free(s->ahead[s->n_taken % AHEAD].ids);
    free(s->mine);
    free(s->first_follower);
    free(s->next_follower);
    free(s->back);
}

int replay_send(struct replay *r, uint32_t sender)
{
    struct sender s = {.r = r};
    s.client = cli_connect("replay", cli_router(r->o.router), r->o.api_key);
    /* This opens the connection. */
    if (!s.client || !cli_wait_ready("replay", s.client, cli_router(r->o.router), READY_MS))
        return 1;
    pthread_mutex_init(&s.lock, NULL);
    pthread_cond_init(&s.changed, NULL);
    pthread_mutex_init(&s.making, NULL);
    pthread_cond_init(&s.made, NULL);
    pthread_cond_init(&s.taken, NULL);
    list_mine(&s, sender);
    pthread_t maker = thread_start("prompts", make_ahead, &s);
    pthread_mutex_lock(&s.making);
    while (s.n_mine && !s.n_made)
        pthread_cond_wait(&s.made, &s.making);
    pthread_mutex_unlock(&s.making);
    atomic_fetch_add(&r->board->n_ready, 1);
    while (!atomic_load(&r->board->began_ns) && !is_stopped(&s))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    if (s.n_mine)
        send_all(&s);
    close_sender(&s, maker);
    return 0;
}

/* ------------------------------------------------------------------- probe */

static bool ask_model(struct replay *r, struct rpc_client *client)
{
    struct cli_model model;
    struct td_error e;
    if (cli_ask_model(client, 5000, &model, &e))
        return false;
    r->board->vocab = model.vocab_size;
    r->board->context = model.context_tokens;
    return true;
}

/* Workers' names, if this user may ask for them. */
static void ask_workers(struct replay *r)
{
    const struct admin_at at = {.router = r->o.router, .admin = r->o.admin};
    char address[ADMIN_ADDRESS_BYTES];
    const Tandem__Admin__V1__StatusRequest request = TANDEM__ADMIN__V1__STATUS_REQUEST__INIT;
    ProtobufCMessage *m = NULL;
    struct td_error e;
    struct rpc_client *client = admin_address(&at, address, &e) ? NULL : admin_connect("replay", &at);
    bool is_told = client && !rpc_unary(client, "/tandem.admin.v1.Admin/Status", &request.base,
                                        &tandem__admin__v1__status_response__descriptor, 5000, &m, &e);
    rpc_client_close(client);
    if (!is_told)
        return; /* the placements of answers will name the workers */
    const Tandem__Admin__V1__StatusResponse *status = (const Tandem__Admin__V1__StatusResponse *)m;
    struct replay_board *b = r->board;
    for (size_t i = 0; i < status->n_workers && b->n_workers < REPLAY_MAX_WORKERS; i++) {
        struct replay_worker *w = &b->workers[b->n_workers++];
        copy_name(w->name, sizeof(w->name), status->workers[i]->name);
        copy_name(w->role, sizeof(w->role), status->workers[i]->role);
    }
    protobuf_c_message_free_unpacked(m, NULL);
}

int replay_probe(struct replay *r)
{
    struct rpc_client *client = cli_connect("replay", cli_router(r->o.router), r->o.api_key);
    bool ok = client && cli_wait_ready("replay", client, cli_router(r->o.router), READY_MS) && ask_model(r, client);
    if (ok)
        ask_workers(r);
    rpc_client_close(client);
    return ok ? 0 : 1;
}
