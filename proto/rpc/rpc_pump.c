/*
 * Completion queues and their threads: one queue with two threads for each server, one queue for all clients
 * of the process.
 *
 * At least two threads per queue, because grpc_completion_queue_next returns a ready event without looking at
 * the sockets: one thread whose sends complete at once would never read, and would not notice a cancel as
 * long as it has something to send. A server has no more than two, because each further thread costs a
 * wake-up per event and brings no throughput.
 *
 * Clients share a queue, because a router has a client for each worker, and the 128 threads of 64 clients
 * were most of its threads. The shared queue has two threads per core: whatever one connection delivers,
 * another thread looks at the sockets. It lives from the first client to the last. The end of a client waits
 * only for its own operations, which its pump counts, and joins no thread: no thread touches a pump after the
 * count that rpc_pump_fini waits for. (Rejected: a queue for each worker polled by few threads; gRPC can't
 * wait on several queues.)
 *
 * The order of ending (any other order crashes, hangs or leaks): no new operations; the running calls are
 * aborted; every on_end has returned and every other operation has come back; the queue is shut down, once;
 * its threads drain it and leave; the queue is destroyed.
 *
 * gRPC gives an operation back only when its bytes have left. A frozen peer holds up a TCP socket for the
 * keepalive time-out (gRPC sets the kernel's TCP_USER_TIMEOUT to it), but a unix socket until the peer dies.
 * Then a thread of its own waits for that peer and the closing thread does not, because nothing of the caller
 * is in the operation any more.
 */
#include "proto/rpc/rpc_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <grpc/support/log.h>

#include "base/mem.h"
#include "base/thread.h"

static void log_nothing(gpr_log_func_args *args)
{
    (void)args;
}

static void core_init_once(void)
{
    gpr_set_log_function(log_nothing);
    grpc_init();
}

/*
 * Calls grpc_init once and silences gRPC's log. gRPC is never shut down, because the clean-up of the last
 * grpc_shutdown runs on a thread that nothing waits for.
 */
static void rpc_core_init(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, core_init_once);
}

struct rpc_queue {
    grpc_completion_queue *queue;
    pthread_t *threads;
    uint32_t n_threads;
};

static void *queue_run(void *arg)
{
    struct rpc_queue *q = arg;
    for (;;) {
        grpc_event event = grpc_completion_queue_next(q->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        if (event.type == GRPC_QUEUE_SHUTDOWN)
            return NULL;
        struct rpc_tag *tag = event.tag;
        atomic_load_explicit(&tag->done, memory_order_acquire)(tag, event.success != 0);
    }
}

static struct rpc_queue *queue_open(const char *thread_name, uint32_t n_threads)
{
    struct rpc_queue *q = mem_zalloc(sizeof(*q));
    q->queue = grpc_completion_queue_create_for_next(NULL);
    q->threads = mem_array(n_threads, sizeof(*q->threads));
    q->n_threads = n_threads;
    for (uint32_t i = 0; i < n_threads; i++)
        q->threads[i] = thread_start(thread_name, queue_run, q);
    return q;
}

static void queue_close(struct rpc_queue *q)
{
    grpc_completion_queue_shutdown(q->queue);
    for (uint32_t i = 0; i < q->n_threads; i++)
        pthread_join(q->threads[i], NULL);
    grpc_completion_queue_destroy(q->queue);
    free(q->threads);
    free(q);
}

/* The clients' queue. It is the only state of the process besides gRPC's own, because the clients have no
 * common owner. */
static struct {
    pthread_mutex_t lock; /* clients open and close on any thread */
    struct rpc_queue *queue;
    uint32_t n_clients;
} shared = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct rpc_queue *shared_take(void)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    pthread_mutex_lock(&shared.lock);
    if (!shared.n_clients++)
        shared.queue = queue_open("rpc-client", cores < 2 ? 4 : cores > 16 ? 32 : 2 * (uint32_t)cores);
    struct rpc_queue *q = shared.queue;
    pthread_mutex_unlock(&shared.lock);
    return q;
}

static void shared_give(void)
{
    pthread_mutex_lock(&shared.lock);
    struct rpc_queue *q = --shared.n_clients ? NULL : shared.queue;
    pthread_mutex_unlock(&shared.lock);
    if (q)
        queue_close(q);
}

void rpc_pump_init(struct rpc_pump *pump, bool is_server, uint32_t max_message_bytes, uint64_t max_queued_bytes,
                   const struct log *log)
{
    rpc_core_init();
    *pump = (struct rpc_pump){
        .log = log,
        .max_message_bytes = max_message_bytes ? max_message_bytes : 4u << 20,
        .max_queued_bytes = max_queued_bytes ? max_queued_bytes : 1u << 20,
    };
    TAILQ_INIT(&pump->main.can_go);
    TAILQ_INIT(&pump->common.can_go);
    pthread_mutex_init(&pump->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&pump->changed, &attr);
    pthread_condattr_destroy(&attr);
    pump->own = is_server ? queue_open("rpc-server", 2) : NULL;
    pump->queue = (is_server ? pump->own : shared_take())->queue;
}

bool rpc_pump_add(struct rpc_pump *pump, struct rpc_call *call)
{
    pthread_mutex_lock(&pump->lock);
    bool closing = pump->closing;
    if (!closing || call->is_server) {
        LIST_INSERT_HEAD(&pump->calls, call, in_pump);
        pump->n_calls++;
    }
    pthread_mutex_unlock(&pump->lock);
    return !closing;
}

/* Under the lock, as all that follows here. */
static struct rpc_places *places_of(const struct rpc_call *call)
{
    return call->is_common ? &call->pump->common : &call->pump->main;
}

/* An admitted call leaves its place. */
static void leave_place(struct rpc_call *call)
{
    call->admitted = false;
    places_of(call)->n_admitted--;
}

static void note_end(struct rpc_pump *pump)
{
    const double share = 0.1;
    uint64_t now = rpc_now_ns();
    double gap = pump->ended_ns ? (double)(now - pump->ended_ns) : 0;
    pump->end_gap_ns += pump->end_gap_ns > 0 ? share * (gap - pump->end_gap_ns) : gap;
    pump->ended_ns = now;
    pump->n_refused_since = 0;
}

/* A call younger than this keeps its place: its request may be here, and not read yet. */
#define SILENT_GRACE_NS (200 * 1000000ull)

static void stays(struct rpc_call *call)
{
    if (call->can_go)
        TAILQ_REMOVE(&places_of(call)->can_go, call, in_places);
    call->can_go = false;
}

/* The place of the oldest call that can go, if it was opened before that time, is free from now on. Returns a
 * ref of that call, which is to be ended when the lock is released. */
static struct rpc_call *take_oldest(struct rpc_places *places, uint64_t before_ns)
{
    struct rpc_call *call = TAILQ_FIRST(&places->can_go);
    if (!call || call->opened_ns >= before_ns)
        return NULL;
    stays(call);
    leave_place(call);
    return rpc_call_ref(call);
}

/* Without the lock. */
static void end_oldest(struct rpc_call *call)
{
    if (!call)
        return;
    rpc_call_abort(call, RPC_RESOURCE_EXHAUSTED,
                   call->is_common || call->begins_ns ? "others need its place"
                   : call->must_prove                 ? "no proof came in time"
                                                      : "no request came with the call");
    rpc_call_unref(call);
}

/* Milliseconds after which a refused client may come back; see rpc_pump_admit(). */
static uint32_t refuse_call(struct rpc_pump *pump, uint32_t max_calls)
{
    double waited = pump->ended_ns ? (double)(rpc_now_ns() - pump->ended_ns) : 1e9;
    double gap = waited > pump->end_gap_ns ? waited : pump->end_gap_ns;
    double ms = gap * 1e-6 * ++pump->n_refused_since;
    pump->n_refused++;
    /* As many calls are being refused as are open: their clients do not fetch the answer. */
    if (pump->n_calls - pump->main.n_admitted - pump->common.n_admitted > max_calls)
        return 0;
    return ms < 1 ? 1 : ms > 60000 ? 60000 : (uint32_t)ms;
}

bool rpc_pump_admit(struct rpc_pump *pump, struct rpc_call *call, uint32_t max_calls, uint32_t *retry_after_ms_out)
{
    uint64_t now = rpc_now_ns();
    struct rpc_places *places = places_of(call);
    struct rpc_call *oldest = NULL;
    uint32_t most = max_calls;
    if (call->is_common)
        most = max_calls / 4 > RPC_COMMON_CALLS ? max_calls / 4 : RPC_COMMON_CALLS;
    pthread_mutex_lock(&pump->lock);
    if (places->n_admitted >= most)
        oldest = take_oldest(places, call->is_common ? UINT64_MAX : now - SILENT_GRACE_NS);
    bool admitted = call->admitted = places->n_admitted < most;
    if (admitted) {
        places->n_admitted++;
        call->was_admitted = call->can_go = true;
        call->opened_ns = now;
        TAILQ_INSERT_TAIL(&places->can_go, call, in_places);
    } else {
        *retry_after_ms_out = refuse_call(pump, max_calls);
    }
    pthread_mutex_unlock(&pump->lock);
    end_oldest(oldest);
    return admitted;
}

void rpc_pump_spoke(struct rpc_pump *pump, struct rpc_call *call)
{
    pthread_mutex_lock(&pump->lock);
    if (!call->is_common)
        stays(call);
    pthread_mutex_unlock(&pump->lock);
}

void rpc_pump_end_silent(struct rpc_pump *pump, uint64_t before_ns)
{
    struct rpc_call *oldest;
    do {
        pthread_mutex_lock(&pump->lock);
        oldest = take_oldest(&pump->main, before_ns);
        pthread_mutex_unlock(&pump->lock);
        end_oldest(oldest);
    } while (oldest);
}

void rpc_pump_remove(struct rpc_pump *pump, struct rpc_call *call)
{
    pthread_mutex_lock(&pump->lock);
    LIST_REMOVE(call, in_pump);
    stays(call);
    pump->n_calls--;
    pump->n_other++;
    if (call->admitted) {
        leave_place(call);
        if (!call->is_common)
            note_end(pump);
    }
    pthread_cond_broadcast(&pump->changed);
    pthread_mutex_unlock(&pump->lock);
}

void rpc_pump_leave_channel(struct rpc_call *call)
{
    if (!call->channel)
        return;
    pthread_mutex_lock(&call->pump->lock);
    call->channel->n_calls--;
    pthread_mutex_unlock(&call->pump->lock);
}

void rpc_pump_other_begin(struct rpc_pump *pump)
{
    pthread_mutex_lock(&pump->lock);
    pump->n_other++;
    pthread_mutex_unlock(&pump->lock);
}

void rpc_pump_other_done(struct rpc_pump *pump)
{
    pthread_mutex_lock(&pump->lock);
    pump->n_other--;
    pthread_cond_broadcast(&pump->changed);
    pthread_mutex_unlock(&pump->lock);
}

struct rpc_call **rpc_pump_calls(struct rpc_pump *pump, uint32_t *n_out)
{
    pthread_mutex_lock(&pump->lock);
    uint32_t n = 0;
    struct rpc_call **calls = mem_array(pump->n_calls, sizeof(*calls));
    struct rpc_call *call;
    LIST_FOREACH (call, &pump->calls, in_pump)
        calls[n++] = rpc_call_ref(call);
    pthread_mutex_unlock(&pump->lock);
    *n_out = n;
    return calls;
}

void rpc_pump_abort_all(struct rpc_pump *pump, enum rpc_code code, const char *text)
{
    uint32_t n;
    struct rpc_call **calls = rpc_pump_calls(pump, &n);
    for (uint32_t i = 0; i < n; i++) {
        rpc_call_abort(calls[i], code, text);
        rpc_call_unref(calls[i]);
    }
    free(calls);
}

bool rpc_pump_wait(struct rpc_pump *pump, bool others_too, int timeout_ms)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += timeout_ms % 1000 * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000L;
    }
    int rc = 0;
    pthread_mutex_lock(&pump->lock);
    while ((pump->n_calls || (others_too && pump->n_other)) && rc != ETIMEDOUT)
        rc = pthread_cond_timedwait(&pump->changed, &pump->lock, &until);
    bool done = !pump->n_calls && !(others_too && pump->n_other);
    pthread_mutex_unlock(&pump->lock);
    return done;
}

/* An operation that never completes would hang the close silently: this logs which call it is. */
static void pump_log_left(struct rpc_pump *pump)
{
    pthread_mutex_lock(&pump->lock);
    log_warn(pump->log, "rpc close still waits calls=%u other=%u", pump->n_calls, pump->n_other);
    struct rpc_call *call;
    LIST_FOREACH (call, &pump->calls, in_pump) {
        pthread_mutex_lock(&call->lock);
        log_warn(pump->log, "rpc call still open method=%s state=%d pending=%u sending=%d", call->path,
                 (int)call->state, call->pending, call->sending);
        pthread_mutex_unlock(&call->lock);
    }
    pthread_mutex_unlock(&pump->lock);
}

void rpc_pump_wait_calls(struct rpc_pump *pump)
{
    while (!rpc_pump_wait(pump, false, 5000))
        pump_log_left(pump);
}

void rpc_pump_fini(struct rpc_pump *pump)
{
    while (!rpc_pump_wait(pump, true, 5000))
        pump_log_left(pump);
    if (pump->own)
        queue_close(pump->own);
    else
        shared_give();
    pthread_cond_destroy(&pump->changed);
    pthread_mutex_destroy(&pump->lock);
}

void rpc_pump_destroy(struct rpc_pump *pump, void *(*destroy)(void *object), void *object)
{
    if (rpc_pump_wait(pump, true, 3000)) {
        destroy(object);
        return;
    }
    log_warn(pump->log, "rpc closed with a frozen peer connected");
    pthread_mutex_lock(&pump->lock);
    pump->log = NULL; /* the log is the caller's, who may free it now */
    pthread_mutex_unlock(&pump->lock);
    pthread_detach(thread_start("rpc-linger", destroy, object));
}
