/*
 * What becomes of a request: its calls at the routers, and the answer made of what they say.
 *
 *     read -> calls start -> messages: gathered, or written as events -> all calls over -> last bytes
 *
 * A call that loses its router goes on at another one, if there is one. Before the first message it is sent
 * again as it was. After that each choice that is not over is asked for by itself, with the tokens that came
 * (tandem.v1.Resume), so that the client sees the same stream go on. When a call fails, the others of its
 * task are cancelled, and the task ends with the first error: a status if nothing was sent yet, else an
 * event.
 *
 * A client that takes nothing stops its calls (rpc_call_hold), so what it does not take stays with the
 * router, which has bounds of its own for clients that do not read.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/gateway_internal.h"
#include "gateway/members.h"
#include "gateway/scores.h"

static const char EVENTS[] = "Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
                             "X-Accel-Buffering: no\r\n";
static const char JSON[] = "Content-Type: application/json\r\n";
static const char FILLER[] = ": keep-alive\n\n";

/* -------------------------------------------------------------------- life */

static uint32_t tries_most(const struct gw_task *t)
{
    return t->n_choices * GW_TRIES_MOST;
}

static void for_each_rpc(struct gw_task *t, void (*act)(struct rpc_call *rpc))
{
    for (uint32_t i = 0; i < t->n_calls; i++)
        for (uint32_t k = 0; k < tries_most(t); k++) {
            struct rpc_call *rpc = atomic_load(&t->calls[i].tries[k].rpc);
            if (rpc)
                act(rpc);
        }
}

static void free_call(struct gw_call *c)
{
    for (uint32_t i = 0; i < c->n_tries; i++)
        rpc_call_unref(atomic_load(&c->tries[i].rpc));
    free(c->tries);
    if (c->request)
        protobuf_c_message_free_unpacked(c->request, NULL);
    if (c->response)
        protobuf_c_message_free_unpacked(c->response, NULL);
    for (int i = 0; i < ASK_MAX_CHOICES; i++) {
        bytes_free(&c->choices[i].text);
        bytes_free(&c->choices[i].reasoning);
        json_decref(c->choices[i].calls);
        free(c->choices[i].ids);
        json_decref(c->choices[i].scores);
        if (c->choices[i].end)
            tandem__v1__generate_end__free_unpacked(c->choices[i].end, NULL);
    }
}

/* The client has its answer: nobody else knows the task any more. */
static void free_task(struct gw_task *t)
{
    struct gateway *g = t->g;
    for (uint32_t i = 0; i < t->n_calls; i++)
        free_call(&t->calls[i]);
    free(t->calls);
    free(t->authorization);
    free(t->traceparent);
    free(t->headers);
    json_decref(t->parts);
    free(t->model);
    bytes_free(&t->prefix);
    bytes_free(&t->events);
    pthread_mutex_destroy(&t->lock);
    free(t);
    pthread_mutex_lock(&g->lock);
    if (atomic_fetch_sub(&g->n_tasks, 1) == 1)
        pthread_cond_signal(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static char *join(const char *a, const char *b)
{
    struct bytes all = {0};
    bytes_printf(&all, "%s%s", a, b ? b : "");
    return all.data;
}

static void answer_and_free(struct gw_task *t, int status, const char *headers, const struct bytes *body)
{
    char *all = join(headers, t->headers);
    http_answer(t->conn, status, all, body->data, body->len);
    free(all);
    free_task(t);
}

static void refuse(struct gw_task *t, int status, const char *why, uint32_t retry_after_ms)
{
    log_debug(&t->g->log, "request refused req=%s status=%d", t->id, status);
    gw_error_answer(t->g, t->conn, status, why, t->headers, retry_after_ms);
    free_task(t);
}

/* -------------------------------------------------------------------- the end */

static void end_stream(struct gw_task *t)
{
    bytes_clear(&t->events);
    if (t->code) {
        bytes_printf(&t->events, "%sdata: ", t->api->error_event ? t->api->error_event : "");
        gw_error_body(http_target(t->conn), gw_error_status(t->code), t->why, &t->events);
        bytes_printf(&t->events, "\n\n");
    } else {
        t->api->end(t, &t->events);
    }
    http_write(t->conn, t->events.data, t->events.len);
    http_end(t->conn);
    free_task(t);
}

/* All calls are over. */
static void finish(struct gw_task *t)
{
    struct bytes body = {0};
    log_debug(&t->g->log, "request finished req=%s code=%s", t->id, rpc_code_name(t->code));
    if (atomic_load(&t->is_gone)) {
        http_end(t->conn);
        free_task(t);
    } else if (t->has_begun) {
        end_stream(t);
    } else if (t->code) {
        refuse(t, gw_error_status(t->code), t->why, t->retry_after_ms);
    } else {
        t->api->whole(t, &body);
        if (t->status)
            refuse(t, t->status, t->why, 0);
        else
            answer_and_free(t, 200, JSON, &body);
        bytes_free(&body);
    }
}

void gw_task_fail(struct gw_task *t, int status, const char *why)
{
    t->status = status;
    snprintf(t->why, sizeof(t->why), "%s", why);
}

static void cancel_all(struct gw_task *t)
{
    for_each_rpc(t, rpc_call_cancel);
}

/* -------------------------------------------------------------------- messages */

/* Each choice says it; they share the prompt. */
static void note_prompt(struct gw_call *c, uint32_t tokens)
{
    c->task->prompt_tokens += c->prompt_tokens ? 0 : tokens;
    c->prompt_tokens = c->prompt_tokens ? c->prompt_tokens : tokens;
}

static void note_begin(struct gw_call *c, const Tandem__V1__GenerateBegin *begin)
{
    struct gw_task *t = c->task;
    note_prompt(c, begin->prompt_tokens);
    if (!t->model) {
        t->model = mem_zalloc(begin->model.len + 1);
        memcpy(t->model, begin->model.data, begin->model.len);
    }
}

static void count_usage(struct gw_call *c, const Tandem__V1__GenerateResponse *m)
{
    struct gw_task *t = c->task;
    const Tandem__V1__Usage *u = m->end ? m->end->usage : NULL;
    if (!u)
        return;
    note_prompt(c, u->prompt_tokens); /* a router of a version that says it at the end only */
    t->completion_tokens += u->completion_tokens;
    if (!m->choice && u->cached_tokens)
        t->cached_tokens +=
            u->cached_tokens->worker + u->cached_tokens->peer + u->cached_tokens->dram + u->cached_tokens->ssd;
}

static void stream(struct gw_task *t, struct gw_call *c, struct rpc_call *rpc, const Tandem__V1__GenerateResponse *m)
{
    if (!t->has_begun) {
        char *headers = join(EVENTS, t->headers);
        http_begin(t->conn, 200, headers, FILLER);
        free(headers);
        t->has_begun = true;
    }
    bytes_clear(&t->events);
    t->api->delta(t, c, m, &t->events);
    /* Held before, since what was written may be drained before this thread goes on. */
    rpc_call_hold(rpc);
    if (http_write(t->conn, t->events.data, t->events.len))
        rpc_call_resume(rpc);
    else
        metrics_inc(t->g->counters, GW_HELD, 1);
}

static void gather(struct gw_call *c, struct rpc_call *rpc, const ProtobufCMessage *base)
{
    const Tandem__V1__GenerateResponse *m = (const Tandem__V1__GenerateResponse *)base;
    struct gw_choice *choice = &c->choices[m->choice];
    bytes_append(&choice->text, m->text.data, m->text.len);
    bytes_append(&choice->reasoning, m->reasoning.data, m->reasoning.len);
    ask_calls_add(&choice->calls, m);
    if (c->task->wants_scores) {
        choice->scores = choice->scores ? choice->scores : gw_scores_new(c->task);
        gw_scores_add(c->task, choice->scores, m, &choice->n_chars);
    }
    if (!m->end || choice->end)
        return;
    Tandem__V1__GenerateResponse *whole = (Tandem__V1__GenerateResponse *)rpc_call_take(rpc, base);
    choice->end = whole->end;
    whole->end = NULL;
    tandem__v1__generate_response__free_unpacked(whole, NULL);
}

/* What another router would have to know to go on after this message. */
static void note_progress(struct gw_call *c, const Tandem__V1__GenerateResponse *m)
{
    struct gw_choice *choice = &c->choices[m->choice];
    choice->n_bytes += m->text.len + m->reasoning.len;
    for (size_t i = 0; i < m->n_tool_calls; i++)
        choice->n_bytes += m->tool_calls[i]->name.len + m->tool_calls[i]->arguments.len;
    choice->is_over |= m->end != NULL;
    choice->n_tokens += (uint32_t)m->n_tokens;
    for (size_t i = 0; i < m->n_tokens && c->request; i++) {
        choice->ids = MEM_ROOM(choice->ids, choice->n_ids, choice->cap_ids, 64);
        choice->ids[choice->n_ids++] = m->tokens[i]->id;
    }
}

static void forget_request(struct gw_call *c)
{
    if (c->request)
        protobuf_c_message_free_unpacked(c->request, NULL);
    c->request = NULL;
}

static void on_message(struct rpc_call *rpc, const ProtobufCMessage *base)
{
    struct gw_try *y = rpc_call_user(rpc);
    struct gw_call *c = y->call;
    struct gw_task *t = c->task;
    bool generates = base->descriptor == &tandem__v1__generate_response__descriptor;
    const Tandem__V1__GenerateResponse *m = (const Tandem__V1__GenerateResponse *)base;
    if (generates && m->choice >= t->n_choices)
        return; /* nobody asked for it */
    pthread_mutex_lock(&t->lock);
    c->has_answer = true;
    y->tried = gw_upstream_bit(t->g, y->router);
    if (!generates || t->g->n_routers == 1)
        forget_request(c);
    if (generates) {
        if (m->begin)
            note_begin(c, m->begin);
        note_progress(c, m);
        count_usage(c, m);
    }
    if (generates && t->is_stream && !t->code)
        stream(t, c, rpc, m);
    else if (generates)
        gather(c, rpc, base);
    else if (!c->response)
        c->response = rpc_call_take(rpc, base);
    pthread_mutex_unlock(&t->lock);
}

static enum td_status start_try(struct gw_call *c, uint32_t first, uint32_t n_choices, uint32_t tried);

/* Whether each choice of the try goes on elsewhere, or has ended. */
static bool go_on(const struct gw_try *y)
{
    struct gw_call *c = y->call;
    struct gw_task *t = c->task;
    if (!c->has_answer) {
        if (start_try(c, y->first, y->n_choices, y->tried))
            return false;
        metrics_inc(t->g->counters, GW_RETRIED, 1);
        t->n_left++;
        return true;
    }
    for (uint32_t i = y->first; i < y->first + y->n_choices; i++) {
        if (c->choices[i].is_over)
            continue;
        if (start_try(c, i, 1, y->tried))
            return false; /* what was started already is cancelled with the task */
        log_info(&t->g->log, "router was lost, another one goes on req=%s lost=%s choice=%u tokens=%u", t->id,
                 y->router->address, i, c->choices[i].n_ids);
        metrics_inc(t->g->counters, GW_RESUMED, 1);
        t->n_left++;
    }
    return true;
}

static void on_end(struct rpc_call *rpc, enum rpc_code code, const char *text)
{
    struct gw_try *y = rpc_call_user(rpc);
    struct gw_call *c = y->call;
    struct gw_task *t = c->task;
    bool is_first = false;
    pthread_mutex_lock(&t->lock);
    atomic_fetch_sub(&y->router->n_calls, 1);
    if (!code && !c->has_answer) {
        code = RPC_INTERNAL;
        text = "the router answered nothing";
    }
    if (code == RPC_UNAVAILABLE)
        atomic_store(&y->router->lost_ns, clock_now(&t->g->clock));
    bool may_go_on = code == RPC_UNAVAILABLE && c->request && !t->code && !atomic_load(&t->is_gone);
    if (may_go_on && go_on(y))
        code = RPC_OK;
    if (code && !t->code) {
        is_first = true;
        t->code = code;
        t->retry_after_ms = rpc_call_retry_after_ms(rpc);
        gw_members_rename(code == RPC_INVALID_ARGUMENT ? t->members : NULL, text, t->why, sizeof(t->why));
    }
    bool is_last = --t->n_left == 0;
    if (is_first && !is_last)
        cancel_all(t);
    pthread_mutex_unlock(&t->lock);
    if (is_last)
        finish(t);
}

/* -------------------------------------------------------------------- calls */

/* The client's deadline goes by the first router's clock; another one gets what is left. */
static enum td_status send_in_time(const struct gw_call *c, struct rpc_call *rpc)
{
    Tandem__V1__GenerateRequest *m = (Tandem__V1__GenerateRequest *)c->request;
    bool generates = c->request->descriptor == &tandem__v1__generate_request__descriptor;
    if (!generates || !m->slo || !m->slo->deadline_ms)
        return rpc_call_send(rpc, c->request);
    uint32_t whole = m->slo->deadline_ms;
    double left = whole - clock_ms_between(c->task->began_ns, clock_now(&c->task->g->clock));
    m->slo->deadline_ms = c->n_tries == 1 ? whole : left > 1 ? (uint32_t)left : 1;
    enum td_status s = rpc_call_send(rpc, c->request);
    m->slo->deadline_ms = whole;
    return s;
}

/* Sends the request; after the first message of the call: for what is left of this choice. */
static enum td_status send_request(const struct gw_try *y, struct rpc_call *rpc)
{
    const struct gw_call *c = y->call;
    const struct gw_choice *choice = &c->choices[y->first];
    Tandem__V1__GenerateRequest *m = (Tandem__V1__GenerateRequest *)c->request;
    Tandem__V1__Resume resume = TANDEM__V1__RESUME__INIT;
    if (!c->has_answer)
        return send_in_time(c, rpc);
    uint32_t n = m->sampling ? m->sampling->n : 0;
    resume.ids = choice->ids;
    resume.n_ids = choice->n_ids;
    resume.text_bytes = choice->n_bytes;
    resume.choice = y->first;
    m->resume = &resume;
    if (m->sampling)
        m->sampling->n = 0;
    enum td_status s = send_in_time(c, rpc);
    m->resume = NULL;
    if (m->sampling)
        m->sampling->n = n;
    return s;
}

/* Begins a call for these choices at a router that they were not sent to yet. Call under the task's lock, or
 * before any other thread knows the task. */
static enum td_status start_try(struct gw_call *c, uint32_t first, uint32_t n_choices, uint32_t tried)
{
    struct gw_task *t = c->task;
    struct gw_router *r = gw_upstream_pick(t->g, tried);
    if (!r || c->n_tries == tries_most(t))
        return TD_ERR_PEER_LOST;
    struct gw_try *y = &c->tries[c->n_tries];
    y->call = c;
    y->router = r;
    y->first = first;
    y->n_choices = n_choices;
    y->tried = tried | gw_upstream_bit(t->g, r);
    const char *headers[5] = {NULL};
    size_t n = 0;
    if (t->authorization) {
        headers[n++] = "authorization";
        headers[n++] = t->authorization;
    }
    if (t->traceparent) {
        headers[n++] = "traceparent";
        headers[n++] = t->traceparent;
    }
    const struct rpc_call_params params = {.path = t->api->rpc,
                                           .response = t->api->response,
                                           .handlers = {.on_message = on_message, .on_end = on_end},
                                           .user = y,
                                           .headers = headers};
    struct rpc_call *rpc = NULL;
    atomic_fetch_add(&r->n_calls, 1);
    enum td_status s = rpc_call_start(r->client, &params, &rpc);
    if (s) {
        atomic_fetch_sub(&r->n_calls, 1);
        return s;
    }
    c->n_tries++;
    atomic_store(&y->rpc, rpc);
    if (send_request(y, rpc) == TD_ERR_INVALID)
        rpc_call_abort(rpc, RPC_INVALID_ARGUMENT, "body: too large");
    rpc_call_close_send(rpc);
    if (atomic_load(&t->is_gone)) /* on_gone may have looked before the call was there */
        rpc_call_cancel(rpc);
    return TD_OK;
}

void gw_task_calls(struct gw_task *t, uint32_t n)
{
    t->calls = mem_array(n, sizeof(*t->calls));
    t->n_calls = n;
    for (uint32_t i = 0; i < n; i++) {
        t->calls[i].task = t;
        t->calls[i].number = i;
    }
}

void gw_task_request(struct gw_task *t, uint32_t i, const ProtobufCMessage *request)
{
    size_t n = protobuf_c_message_get_packed_size(request);
    uint8_t *packed = mem_array(n, 1);
    protobuf_c_message_pack(request, packed);
    t->calls[i].request = protobuf_c_message_unpack(request->descriptor, NULL, n, packed);
    free(packed);
}

enum td_status gw_task_ask(struct gw_task *t, uint32_t i, json_t *ask, struct td_error *e)
{
    struct ask_message *m;
    enum td_status s = ask_message_make(ask, &m, e);
    if (s)
        return s;
    gw_task_request(t, i, &ask_message_get(m)->base);
    ask_message_free(m);
    return TD_OK;
}

/* Starts all calls. Those that can't be started end the task, as if they had failed. */
static void start_all(struct gw_task *t)
{
    bool is_last = false;
    pthread_mutex_lock(&t->lock);
    t->n_left = t->n_calls;
    for (uint32_t i = 0; i < t->n_calls; i++) {
        enum td_status s = t->code ? TD_ERR_CANCELLED : start_try(&t->calls[i], 0, t->n_choices, 0);
        if (!s)
            continue;
        is_last = --t->n_left == 0;
        if (t->code)
            continue;
        t->code = s == TD_ERR_INVALID ? RPC_UNAUTHENTICATED : RPC_UNAVAILABLE;
        t->retry_after_ms = s == TD_ERR_INVALID ? 0 : 1000;
        snprintf(t->why, sizeof(t->why), "%s",
                 s == TD_ERR_INVALID ? "authorization: it has characters that no key has"
                                     : "no router can be reached (--routers)");
        cancel_all(t);
    }
    pthread_mutex_unlock(&t->lock);
    if (is_last)
        finish(t);
}

void gw_task_on_gone(struct http_conn *conn)
{
    struct gw_task *t = http_user(conn);
    if (!t)
        return;
    atomic_store(&t->is_gone, true);
    cancel_all(t);
}

void gw_task_on_drained(struct http_conn *conn)
{
    for_each_rpc(http_user(conn), rpc_call_resume);
}

/* -------------------------------------------------------------------- begin */

static char *header_for_router(const struct http_conn *conn)
{
    const char *authorization = http_header(conn, "authorization"), *key = http_header(conn, "x-api-key");
    if (authorization)
        return mem_strdup(authorization);
    return key ? join("Bearer ", key) : NULL;
}

/* Routers check its form; here it is kept from being a header that gRPC refuses. */
static char *trace_for_router(const struct http_conn *conn)
{
    const char *trace = http_header(conn, "traceparent");
    return trace && !trace[strspn(trace, "0123456789abcdef-")] ? mem_strdup(trace) : NULL;
}

static struct gw_task *new_task(struct gateway *g, struct http_conn *conn, const struct gw_api *api, const char *id,
                                const char *headers)
{
    struct gw_task *t = mem_zalloc(sizeof(*t));
    *t = (struct gw_task){.g = g, .conn = conn, .api = api, .n_choices = 1};
    snprintf(t->id, sizeof(t->id), "%s", id);
    t->headers = mem_strdup(headers);
    t->authorization = header_for_router(conn);
    t->traceparent = trace_for_router(conn);
    t->created_s = (int64_t)time(NULL);
    t->began_ns = clock_now(&g->clock);
    pthread_mutex_init(&t->lock, NULL);
    atomic_fetch_add(&g->n_tasks, 1);
    return t;
}

/* NULL, with an error: it is no JSON object. */
static json_t *parse_body(const struct http_conn *conn, struct td_error *e)
{
    const struct bytes *b = http_body(conn);
    json_error_t je;
    json_t *v = json_loadb(b->len ? b->data : "", b->len, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &je);
    if (v && json_is_object(v))
        return v;
    if (v)
        td_fail(e, TD_ERR_INVALID, "body: must be a JSON object");
    else
        td_fail(e, TD_ERR_INVALID, "body: is not JSON: %s (line %d, column %d)", je.text, je.line, je.column);
    json_decref(v);
    return NULL;
}

void gw_task_run(struct gateway *g, struct http_conn *conn, const struct gw_api *api, const char *id,
                 const char *headers)
{
    struct gw_task *t = new_task(g, conn, api, id, headers);
    struct td_error e = {{0}};
    json_t *body = NULL;
    enum td_status s = TD_OK;
    if (!strcmp(http_method(conn), "POST")) {
        body = parse_body(conn, &e);
        s = body ? TD_OK : TD_ERR_INVALID;
        http_free_body(conn);
    }
    if (!s)
        s = api->read(t, body, &e);
    json_decref(body);
    if (s) {
        gw_members_rename(t->members, e.text, t->why, sizeof(t->why));
        refuse(t, gw_error_status(rpc_code_of_status(s)), t->why, 0);
        return;
    }
    log_debug(&g->log, "request received req=%s path=%s calls=%u", t->id, api->path, t->n_calls);
    for (uint32_t i = 0; i < t->n_calls; i++)
        t->calls[i].tries = mem_array(tries_most(t), sizeof(*t->calls[i].tries));
    http_set_user(conn, t);
    start_all(t);
}
