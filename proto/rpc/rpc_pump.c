/*
 * A completion queue with two threads.
 *
 * Two, because grpc_completion_queue_next returns a ready event without looking at the sockets: one thread whose sends
 * complete at once would never read, and would miss a cancel for as long as it has something to send. Not more, because
 * every further thread costs a wake-up per event and none of them brings throughput.
 *
 * The order of ending (any other crashes, hangs or leaks): no new operations; the running calls are aborted; every on_end
 * has returned and every other operation is back; queue shut down, once; threads drain it and leave; queue destroyed.
 *
 * gRPC gives an operation back only when its bytes have left. A frozen peer holds up a TCP socket for the keepalive
 * time-out (gRPC sets the kernel's TCP_USER_TIMEOUT to it), but a unix socket until it dies. Then a thread of its own waits
 * for that peer, and who called close does not: nothing of his is in it any more.
 */
#include "proto/rpc/rpc_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

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

/* Never shut down: the clean-up of the last grpc_shutdown runs on a thread of its own, which nothing waits for. */
void rpc_core_init(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, core_init_once);
}

static void *pump_run(void *arg)
{
    struct rpc_pump *pump = arg;
    for (;;) {
        grpc_event event = grpc_completion_queue_next(pump->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        if (event.type == GRPC_QUEUE_SHUTDOWN)
            return NULL;
        struct rpc_tag *tag = event.tag;
        atomic_load_explicit(&tag->done, memory_order_acquire)(tag, event.success != 0);
    }
}

void rpc_pump_init(struct rpc_pump *pump, const char *thread_name, uint32_t max_message_bytes,
                   uint64_t max_queued_bytes, const struct log *log)
{
    rpc_core_init();
    *pump = (struct rpc_pump){
        .log = log,
        .max_message_bytes = max_message_bytes ? max_message_bytes : 4u << 20,
        .max_queued_bytes = max_queued_bytes ? max_queued_bytes : 1u << 20,
    };
    pthread_mutex_init(&pump->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&pump->changed, &attr);
    pthread_condattr_destroy(&attr);
    pump->queue = grpc_completion_queue_create_for_next(NULL);
    for (int i = 0; i < 2; i++)
        pump->threads[i] = thread_start(thread_name, pump_run, pump);
}

bool rpc_pump_add(struct rpc_pump *pump, struct rpc_call *call)
{
    pthread_mutex_lock(&pump->lock);
    bool closing = pump->closing;
    if (!closing || call->is_server) {
        call->prev = NULL;
        call->next = pump->calls;
        if (call->next)
            call->next->prev = call;
        pump->calls = call;
        pump->n_calls++;
    }
    pthread_mutex_unlock(&pump->lock);
    return !closing;
}

void rpc_pump_remove(struct rpc_pump *pump, struct rpc_call *call)
{
    pthread_mutex_lock(&pump->lock);
    *(call->prev ? &call->prev->next : &pump->calls) = call->next;
    if (call->next)
        call->next->prev = call->prev;
    pump->n_calls--;
    pump->n_other++;
    pthread_cond_broadcast(&pump->changed);
    pthread_mutex_unlock(&pump->lock);
}

void rpc_pump_other_done(struct rpc_pump *pump)
{
    pthread_mutex_lock(&pump->lock);
    pump->n_other--;
    pthread_cond_broadcast(&pump->changed);
    pthread_mutex_unlock(&pump->lock);
}

void rpc_pump_abort_all(struct rpc_pump *pump, enum rpc_code code, const char *text)
{
    pthread_mutex_lock(&pump->lock);
    uint32_t n = 0;
    struct rpc_call **calls = mem_array(pump->n_calls, sizeof(*calls));
    for (struct rpc_call *call = pump->calls; call; call = call->next)
        calls[n++] = rpc_call_ref(call);
    pthread_mutex_unlock(&pump->lock);
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

/* An operation that never completes would hang us without a word: say which call it is. */
static void pump_log_left(struct rpc_pump *pump)
{
    pthread_mutex_lock(&pump->lock);
    log_warn(pump->log, "rpc close still waits calls=%u other=%u", pump->n_calls, pump->n_other);
    for (struct rpc_call *call = pump->calls; call; call = call->next) {
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
    grpc_completion_queue_shutdown(pump->queue);
    for (int i = 0; i < 2; i++)
        pthread_join(pump->threads[i], NULL);
    grpc_completion_queue_destroy(pump->queue);
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
    pump->log = NULL; /* the caller's */
    pthread_mutex_unlock(&pump->lock);
    pthread_detach(thread_start("rpc-linger", destroy, object));
}
