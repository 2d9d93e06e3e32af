#include "echo.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/thread.h"
#include "echo_descriptors.h"

extern char **environ;

bool echo_own_address(char *out, size_t out_bytes)
{
    struct ifaddrs *all = NULL;
    bool found = false;
    if (getifaddrs(&all))
        return false;
    for (const struct ifaddrs *a = all; a && !found; a = a->ifa_next)
        if (a->ifa_addr && a->ifa_addr->sa_family == AF_INET && !(a->ifa_flags & IFF_LOOPBACK)) {
            char host[INET_ADDRSTRLEN];
            inet_ntop(AF_INET, &((struct sockaddr_in *)(void *)a->ifa_addr)->sin_addr, host, sizeof(host));
            snprintf(out, out_bytes, "%s:0", host);
            found = true;
        }
    freeifaddrs(all);
    return found;
}

uint64_t echo_now_ms(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

static void pause_us(long us)
{
    nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL);
}

/* A lock with a condition whose waits have a deadline. */
struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
};

static void gate_init(struct gate *g)
{
    pthread_mutex_init(&g->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&g->changed, &attr);
    pthread_condattr_destroy(&attr);
}

static void gate_fini(struct gate *g)
{
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
}

static void gate_enter(struct gate *g)
{
    pthread_mutex_lock(&g->lock);
}

static void gate_leave(struct gate *g)
{
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

/* Call it inside the gate. Waits for a change; false after until_ms. */
static bool gate_wait(struct gate *g, uint64_t until_ms)
{
    struct timespec ts = {.tv_sec = (time_t)(until_ms / 1000), .tv_nsec = (long)(until_ms % 1000) * 1000000};
    pthread_cond_timedwait(&g->changed, &g->lock, &ts);
    return echo_now_ms() < until_ms;
}

/* ------------------------------------------------------------------ service */

enum { FROZEN_MS = 1000 }; /* tests wait for that long */

struct echo_service {
    struct rpc_server *server;
    struct gate gate;
    struct echo_stats stats;
    uint32_t n_feeders;
};

struct served { /* a call at the server */
    struct echo_service *service;
    _Atomic int inside;
    bool ended;
};

struct feeder {
    struct echo_service *service;
    struct rpc_call *call;
    uint64_t n;
    uint32_t payload_bytes;
    bool abort_when_full;
};

static struct served *served_enter(struct rpc_call *call)
{
    struct served *s = rpc_call_user(call);
    if (atomic_fetch_add(&s->inside, 1) != 0) {
        gate_enter(&s->service->gate);
        s->service->stats.n_overlaps++;
        gate_leave(&s->service->gate);
    }
    return s;
}

static void served_leave(struct served *s)
{
    atomic_fetch_sub(&s->inside, 1);
}

static void on_open(struct rpc_call *call, void *user)
{
    struct echo_service *e = user;
    struct served *s = mem_zalloc(sizeof(*s));
    s->service = e;
    rpc_call_set_user(call, s);
    gate_enter(&e->gate);
    e->stats.n_opened++;
    gate_leave(&e->gate);
}

static void on_end(struct rpc_call *call, enum rpc_code code, const char *text)
{
    struct served *s = served_enter(call);
    struct echo_service *e = s->service;
    gate_enter(&e->gate);
    e->stats.n_ended++;
    e->stats.n_double_ends += s->ended;
    s->ended = true;
    e->stats.last_code = code;
    snprintf(e->stats.last_text, sizeof(e->stats.last_text), "%s", text);
    e->stats.last_end_ms = echo_now_ms();
    gate_leave(&e->gate);
    rpc_call_set_user(call, NULL);
    free(s);
}

static void count_request(struct echo_service *e)
{
    gate_enter(&e->gate);
    e->stats.n_requests++;
    gate_leave(&e->gate);
}

static void echo_answer(struct rpc_call *call, const Tandem__Test__EchoRequest *request)
{
    Tandem__Test__EchoResponse response = TANDEM__TEST__ECHO_RESPONSE__INIT;
    const char *header = rpc_call_header(call, "x-test");
    int64_t left = rpc_call_remaining_ms(call);
    uint8_t *large = request->answer_bytes ? mem_zalloc(request->answer_bytes) : NULL;
    response.text = large ? (ProtobufCBinaryData){request->answer_bytes, large} : request->text;
    response.header = (char *)(uintptr_t)(header ? header : "");
    response.remaining_ms = left == INT64_MAX ? -1 : left;
    /* Sent over the limit, so that a flooding client gets all answers. */
    rpc_call_send_over(call, &response.base);
    free(large);
}

static void echo_message(struct rpc_call *call, const ProtobufCMessage *message)
{
    struct served *s = served_enter(call);
    const Tandem__Test__EchoRequest *request = (const Tandem__Test__EchoRequest *)message;
    count_request(s->service);
    if (request->fail_code) {
        char *text = mem_zalloc(request->text.len + 1);
        memcpy(text, request->text.data, request->text.len);
        rpc_call_finish(call, (enum rpc_code)request->fail_code, text, request->retry_after_ms);
        free(text);
    } else if (!request->hang) {
        echo_answer(call, request);
        rpc_call_finish(call, RPC_OK, "", 0);
    }
    served_leave(s);
}

static void chat_message(struct rpc_call *call, const ProtobufCMessage *message)
{
    struct served *s = served_enter(call);
    count_request(s->service);
    echo_answer(call, (const Tandem__Test__EchoRequest *)message);
    served_leave(s);
}

static void chat_half_close(struct rpc_call *call)
{
    struct served *s = served_enter(call);
    gate_enter(&s->service->gate);
    s->service->stats.n_half_closed++;
    gate_leave(&s->service->gate);
    rpc_call_finish(call, RPC_OK, "", 0);
    served_leave(s);
}

static enum td_status feed_one(struct feeder *f, const Tandem__Test__CountResponse *response)
{
    for (;;) {
        enum td_status status = rpc_call_send(f->call, &response->base);
        if (status != TD_ERR_NO_SPACE)
            return status;
        gate_enter(&f->service->gate);
        f->service->stats.n_full++;
        gate_leave(&f->service->gate);
        if (f->abort_when_full) {
            rpc_call_abort(f->call, RPC_RESOURCE_EXHAUSTED, "you do not read");
            return TD_ERR_NO_SPACE;
        }
        pause_us(200);
    }
}

static void *feeder_run(void *arg)
{
    struct feeder *f = arg;
    Tandem__Test__CountResponse response = TANDEM__TEST__COUNT_RESPONSE__INIT;
    uint8_t *payload = mem_zalloc(f->payload_bytes);
    response.payload = (ProtobufCBinaryData){f->payload_bytes, payload};
    enum td_status status = TD_OK;
    for (uint64_t i = 0; status == TD_OK && (f->n == 0 || i < f->n); i++) {
        response.index = i;
        status = feed_one(f, &response);
    }
    rpc_call_finish(f->call, RPC_OK, "", 0);
    free(payload);
    rpc_call_unref(f->call);
    struct echo_service *e = f->service;
    free(f);
    gate_enter(&e->gate);
    e->n_feeders--;
    gate_leave(&e->gate);
    return NULL;
}

static void count_message(struct rpc_call *call, const ProtobufCMessage *message)
{
    struct served *s = served_enter(call);
    const Tandem__Test__CountRequest *request = (const Tandem__Test__CountRequest *)message;
    count_request(s->service);
    if (!request->silent) {
        struct feeder *f = mem_zalloc(sizeof(*f));
        *f = (struct feeder){
            .service = s->service,
            .call = rpc_call_ref(call),
            .n = request->n,
            .payload_bytes = request->payload_bytes,
            .abort_when_full = request->abort_when_full,
        };
        gate_enter(&s->service->gate);
        s->service->n_feeders++;
        gate_leave(&s->service->gate);
        pthread_detach(thread_start("feeder", feeder_run, f));
    }
    served_leave(s);
}

static const struct rpc_method METHODS[] = {
    {
        .path = ECHO_PATH,
        .request = &tandem__test__echo_request__descriptor,
        .handlers = {.on_message = echo_message, .on_end = on_end},
        .on_open = on_open,
    },
    {
        .path = COUNT_PATH,
        .request = &tandem__test__count_request__descriptor,
        .handlers = {.on_message = count_message, .on_end = on_end},
        .on_open = on_open,
    },
    {
        .path = CHAT_PATH,
        .request = &tandem__test__echo_request__descriptor,
        .handlers = {.on_message = chat_message, .on_half_close = chat_half_close, .on_end = on_end},
        .on_open = on_open,
    },
};

struct echo_service *echo_open(const struct echo_config *config)
{
    struct echo_service *e = mem_zalloc(sizeof(*e));
    gate_init(&e->gate);
    struct rpc_server_config server = {
        .listen = config->listen ? config->listen : "127.0.0.1:0",
        .methods = METHODS,
        .n_methods = sizeof(METHODS) / sizeof(*METHODS),
        .descriptors = ECHO_DESCRIPTORS,
        .descriptors_len_bytes = sizeof(ECHO_DESCRIPTORS),
        .max_message_bytes = config->max_message_bytes,
        .max_queued_bytes = config->max_queued_bytes,
        .frozen_ms = FROZEN_MS,
        .user = e,
    };
    struct td_error error;
    if (rpc_server_open(&server, &e->server, &error) != TD_OK) {
        gate_fini(&e->gate);
        free(e);
        return NULL;
    }
    return e;
}

void echo_close(struct echo_service *e)
{
    if (!e)
        return;
    rpc_server_close(e->server);
    gate_enter(&e->gate);
    while (e->n_feeders)
        gate_wait(&e->gate, echo_now_ms() + 100);
    gate_leave(&e->gate);
    gate_fini(&e->gate);
    free(e);
}

struct rpc_server *echo_server(struct echo_service *e)
{
    return e->server;
}

const char *echo_address(struct echo_service *e)
{
    return rpc_server_address(e->server);
}

struct echo_stats echo_stats(struct echo_service *e)
{
    gate_enter(&e->gate);
    struct echo_stats stats = e->stats;
    gate_leave(&e->gate);
    return stats;
}

static bool wait_stat(struct echo_service *e, const uint32_t *stat, uint32_t n, int timeout_ms)
{
    uint64_t until_ms = echo_now_ms() + (uint64_t)timeout_ms;
    gate_enter(&e->gate);
    while (*stat < n && gate_wait(&e->gate, until_ms))
        ;
    bool there = *stat >= n;
    gate_leave(&e->gate);
    return there;
}

bool echo_wait_ended(struct echo_service *e, uint32_t n, int timeout_ms)
{
    return wait_stat(e, &e->stats.n_ended, n, timeout_ms);
}

bool echo_wait_opened(struct echo_service *e, uint32_t n, int timeout_ms)
{
    return wait_stat(e, &e->stats.n_opened, n, timeout_ms);
}

/* ------------------------------------------------------------------ client */

struct rpc_client *echo_client(const char *address, uint32_t max_message_bytes)
{
    struct rpc_client_config config = {
        .target = address, .max_message_bytes = max_message_bytes, .frozen_ms = FROZEN_MS};
    struct rpc_client *c = NULL;
    struct td_error error;
    return rpc_client_open(&config, &c, &error) == TD_OK ? c : NULL;
}

struct record {
    struct gate gate;
    struct record_view view;
    struct rpc_call *call;
    _Atomic int inside;
    bool block;
    bool counts; /* Count: indices rise */
};

struct record *record_open(void)
{
    struct record *r = mem_zalloc(sizeof(*r));
    gate_init(&r->gate);
    r->view.in_order = true;
    return r;
}

void record_close(struct record *r)
{
    rpc_call_unref(r->call);
    gate_fini(&r->gate);
    free(r);
}

static void record_enter(struct record *r)
{
    bool alone = atomic_fetch_add(&r->inside, 1) == 0;
    gate_enter(&r->gate);
    if (!alone || r->view.n_ends)
        r->view.in_order = false;
}

static void record_leave(struct record *r)
{
    atomic_fetch_sub(&r->inside, 1);
    gate_leave(&r->gate);
}

static void record_message(struct rpc_call *call, const ProtobufCMessage *message)
{
    struct record *r = rpc_call_user(call);
    record_enter(r);
    if (r->counts && ((const Tandem__Test__CountResponse *)message)->index != r->view.n_messages)
        r->view.in_order = false;
    if (!r->counts) {
        const Tandem__Test__EchoResponse *echo = (const Tandem__Test__EchoResponse *)message;
        snprintf(r->view.last_text, sizeof(r->view.last_text), "%.*s", (int)echo->text.len,
                 echo->text.len ? (char *)echo->text.data : "");
        snprintf(r->view.last_header, sizeof(r->view.last_header), "%s", echo->header);
    }
    r->view.n_messages++;
    pthread_cond_broadcast(&r->gate.changed);
    while (r->block)
        gate_wait(&r->gate, echo_now_ms() + 100);
    record_leave(r);
}

static void record_end(struct rpc_call *call, enum rpc_code code, const char *text)
{
    struct record *r = rpc_call_user(call);
    record_enter(r);
    r->view.n_ends++;
    r->view.code = code;
    snprintf(r->view.text, sizeof(r->view.text), "%s", text);
    r->view.retry_after_ms = rpc_call_retry_after_ms(call);
    r->view.end_ms = echo_now_ms();
    record_leave(r);
}

struct record_view record_view(struct record *r)
{
    gate_enter(&r->gate);
    struct record_view view = r->view;
    gate_leave(&r->gate);
    return view;
}

bool record_wait_end(struct record *r, int timeout_ms)
{
    uint64_t until_ms = echo_now_ms() + (uint64_t)timeout_ms;
    gate_enter(&r->gate);
    while (!r->view.n_ends && gate_wait(&r->gate, until_ms))
        ;
    bool there = r->view.n_ends > 0;
    gate_leave(&r->gate);
    return there;
}

bool record_wait_messages(struct record *r, uint64_t n, int timeout_ms)
{
    uint64_t until_ms = echo_now_ms() + (uint64_t)timeout_ms;
    gate_enter(&r->gate);
    while (r->view.n_messages < n && gate_wait(&r->gate, until_ms))
        ;
    bool there = r->view.n_messages >= n;
    gate_leave(&r->gate);
    return there;
}

void record_block(struct record *r, bool block)
{
    gate_enter(&r->gate);
    r->block = block;
    gate_leave(&r->gate);
}

struct rpc_call *record_call(struct record *r)
{
    return r->call;
}

enum td_status record_start(struct record *r, struct rpc_client *c, const char *path, int64_t timeout_ms)
{
    return record_start_with(r, c, path, timeout_ms, NULL);
}

enum td_status record_start_with(struct record *r, struct rpc_client *c, const char *path, int64_t timeout_ms,
                                 const char *const *headers)
{
    r->counts = !strcmp(path, COUNT_PATH);
    struct rpc_call_params params = {
        .path = path,
        .response = r->counts ? &tandem__test__count_response__descriptor : &tandem__test__echo_response__descriptor,
        .handlers = {.on_message = record_message, .on_end = record_end},
        .user = r,
        .timeout_ms = timeout_ms,
        .headers = headers,
    };
    return rpc_call_start(c, &params, &r->call);
}

void record_count(struct record *r, struct rpc_client *c, uint64_t n, uint32_t payload_bytes)
{
    Tandem__Test__CountRequest request = TANDEM__TEST__COUNT_REQUEST__INIT;
    request.n = n;
    request.payload_bytes = payload_bytes;
    if (record_start(r, c, COUNT_PATH, 0) != TD_OK || rpc_call_send(r->call, &request.base) != TD_OK)
        abort();
    rpc_call_close_send(r->call);
}

/* ------------------------------------------------------------------ child */

struct child child_start(const char *mode, const char *address)
{
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC))
        abort();
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], 0);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    const char *tool = getenv("ECHO_TOOL");
    char *argv[] = {(char *)(uintptr_t)tool, (char *)(uintptr_t)mode, (char *)(uintptr_t)address, NULL};
    struct child child = {.in_fd = in[1], .out_fd = out[0]};
    if (!tool || posix_spawn(&child.pid, tool, &actions, NULL, argv, environ))
        abort();
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    return child;
}

bool child_read_line(struct child *c, char *line, size_t cap)
{
    size_t n = 0;
    while (n + 1 < cap && read(c->out_fd, line + n, 1) == 1 && line[n] != '\n')
        n++;
    line[n] = 0;
    return n > 0;
}

void child_end(struct child *c)
{
    kill(c->pid, SIGKILL);
    waitpid(c->pid, NULL, 0);
    close(c->in_fd);
    close(c->out_fd);
}
