/*
 * The call, the same for both sides.
 *
 * gRPC's unit is the batch: operations that are started together and come back as one tag. A call has at most
 * three batches out:
 *
 *   close   server: RECV_CLOSE_ON_SERVER, the only notice of cancel, deadline and a lost client, so it is
 *           started first; client: initial metadata and status. Always completes, after everything else can
 *           be read.
 *   recv    one RECV_MESSAGE; the next one starts when the callback has returned, which keeps on_message in
 *           order
 *   send    headers, one message, end of sending, as many of them as are due; further messages wait in our
 *           own queue
 *
 * `pending` counts close, recv and the callbacks that they lead to. The completion that brings it to 0 runs
 * on_end. After close nothing is started except a client's reading, so this happens once, and after all other
 * callbacks. Sends from other threads check `state` under the lock.
 *
 * A send is not counted: one that is stuck in the socket of a frozen peer comes back seconds later, or on a
 * unix socket when the peer dies, and on_end, which frees pages and slots, must not wait for it. The
 * grpc_call must: it is released by the later of on_end and the last send.
 *
 * Rejected: a serialising queue per call for callbacks (the chain of receives already is one); starting the
 * next receive before the callback returns (two threads would deliver out of order).
 */
#include "proto/rpc/rpc_internal.h"

#include <assert.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>

#include "base/mem.h"
#include "proto/rpc/rpc_accept.h"

#define CALL_OF(tag_ptr, member) ((struct rpc_call *)(void *)((char *)(tag_ptr)-offsetof(struct rpc_call, member)))

struct rpc_send {
    struct rpc_send *next;
    grpc_byte_buffer *buffer;
    uint64_t cost_bytes; /* packed size and the cost of keeping it: empty messages must fill a queue, too */
};

#define SEND_OVERHEAD_BYTES (sizeof(struct rpc_send) + 128)

/* ------------------------------------------------------------------ life */

static void close_done(struct rpc_tag *tag, bool ok);
static void recv_done(struct rpc_tag *tag, bool ok);
static void send_done(struct rpc_tag *tag, bool ok);

static void call_set_state(struct rpc_call *call, enum rpc_call_state state)
{
    assert(state == call->state + 1);
    call->state = state;
}

struct rpc_call *rpc_call_new(struct rpc_pump *pump, bool is_server, const char *path)
{
    struct rpc_call *call = mem_zalloc(sizeof(*call));
    atomic_init(&call->refs, 1);
    call->is_server = is_server;
    call->pump = pump;
    call->path = mem_strdup(path);
    call->deadline = gpr_inf_future(GPR_CLOCK_MONOTONIC);
    rpc_tag_set(&call->close_tag, close_done);
    rpc_tag_set(&call->recv_tag, recv_done);
    rpc_tag_set(&call->send_tag, send_done);
    call->send_tail = &call->send_head;
    call->recv_details = grpc_empty_slice();
    grpc_metadata_array_init(&call->recv_initial);
    grpc_metadata_array_init(&call->recv_trailing);
    pthread_mutex_init(&call->lock, NULL);
    return call;
}

struct rpc_call *rpc_call_ref(struct rpc_call *call)
{
    atomic_fetch_add_explicit(&call->refs, 1, memory_order_relaxed);
    return call;
}

static void send_free(struct rpc_send *send)
{
    if (!send)
        return;
    grpc_byte_buffer_destroy(send->buffer);
    free(send);
}

static void call_drop_queue(struct rpc_call *call)
{
    while (call->send_head) {
        struct rpc_send *send = call->send_head;
        call->send_head = send->next;
        call->queued_bytes -= send->cost_bytes;
        call->n_waiting--;
        send_free(send);
    }
    call->send_tail = &call->send_head;
    send_free(call->overtaken);
    call->overtaken = NULL;
}

void rpc_call_unref(struct rpc_call *call)
{
    if (!call || atomic_fetch_sub_explicit(&call->refs, 1, memory_order_acq_rel) != 1)
        return;
    call_drop_queue(call);
    for (uint32_t i = 0; i < call->n_headers; i++) {
        free(call->headers[i].name);
        free(call->headers[i].value);
    }
    free(call->headers);
    free(call->path);
    free(call->finish_text);
    free(call->abort_text);
    grpc_metadata_array_destroy(&call->recv_initial);
    grpc_metadata_array_destroy(&call->recv_trailing);
    grpc_slice_unref(call->recv_details);
    pthread_mutex_destroy(&call->lock);
    free(call);
}

void rpc_call_set_user(struct rpc_call *call, void *user)
{
    call->user = user;
}

void *rpc_call_user(const struct rpc_call *call)
{
    return call->user;
}

int64_t rpc_call_remaining_ms(const struct rpc_call *call)
{
    if (gpr_time_cmp(call->deadline, gpr_inf_future(GPR_CLOCK_MONOTONIC)) == 0)
        return INT64_MAX;
    gpr_timespec left = gpr_time_sub(call->deadline, gpr_now(GPR_CLOCK_MONOTONIC));
    int64_t ms = left.tv_sec * 1000 + left.tv_nsec / 1000000;
    return ms > 0 ? ms : 0;
}

uint64_t rpc_call_connection(const struct rpc_call *call)
{
    return call->connection;
}

/* gRPC gives "ipv4:10.0.0.1:7000", "ipv6:%5B::1%5D:7000", or "unix:/path". */
static void peer_of_client(struct rpc_call *call, char out[RPC_PEER_BYTES])
{
    char *uri = NULL;
    pthread_mutex_lock(&call->lock);
    if (call->state != CALL_ENDED) /* it is released only after its end */
        uri = grpc_call_get_peer(call->grpc);
    pthread_mutex_unlock(&call->lock);
    const char *at = uri ? uri : "?";
    size_t n = 0;
    if (!strncmp(at, "ipv4:", 5) || !strncmp(at, "ipv6:", 5))
        at += 5;
    for (; *at && n < RPC_PEER_BYTES - 1; n++) {
        bool is_bracket = !strncmp(at, "%5B", 3) || !strncmp(at, "%5D", 3);
        out[n] = !is_bracket ? *at : at[2] == 'B' ? '[' : ']';
        at += is_bracket ? 3 : 1;
    }
    out[n] = 0;
    gpr_free(uri);
}

void rpc_call_peer(struct rpc_call *call, char out[RPC_PEER_BYTES])
{
    if (call->is_server)
        rpc_door_peer(call->door, call->fd, call->connection, out, RPC_PEER_BYTES);
    else
        peer_of_client(call, out);
}

void rpc_call_local(const struct rpc_call *call, char out[RPC_PEER_BYTES])
{
    rpc_door_local(call->door, call->fd, call->connection, out, RPC_PEER_BYTES);
}

void rpc_call_proved(struct rpc_call *call)
{
    atomic_store(&call->is_proved, true);
    if (call->door)
        rpc_door_proved(call->door, call->fd, call->connection);
    if (call->is_server)
        rpc_pump_spoke(call->pump, call);
    else
        rpc_client_proved(call);
}

bool rpc_call_over(struct rpc_call *call)
{
    pthread_mutex_lock(&call->lock);
    bool over = call->state == CALL_ENDED;
    pthread_mutex_unlock(&call->lock);
    return over;
}

const char *rpc_call_header(const struct rpc_call *call, const char *name)
{
    for (uint32_t i = 0; i < call->n_headers; i++)
        if (!strcmp(call->headers[i].name, name))
            return call->headers[i].value;
    return NULL;
}

uint32_t rpc_call_retry_after_ms(const struct rpc_call *call)
{
    return call->is_server ? 0 : call->retry_after_ms;
}

/* ------------------------------------------------------------------ batches */

/* Call under the lock. A batch that gRPC refuses is a mistake of ours, never the peer's; the call is then
 * cancelled. */
static bool call_start_batch(struct rpc_call *call, const grpc_op *ops, size_t n_ops, struct rpc_tag *tag)
{
    grpc_call_error error = grpc_call_start_batch(call->grpc, ops, n_ops, tag, NULL);
    if (error == GRPC_CALL_OK)
        return true;
    log_error(call->pump->log, "rpc batch refused method=%s error=%s", call->path, grpc_call_error_to_string(error));
    grpc_call_cancel_with_status(call->grpc, GRPC_STATUS_INTERNAL, "batch refused", NULL);
    return false;
}

static const char *call_server_outcome(const struct rpc_call *call, enum rpc_code *code_out)
{
    if (!call->recv_cancelled) {
        *code_out = RPC_OK;
        return "";
    }
    if (call->aborted) {
        *code_out = call->abort_code;
        return call->abort_text;
    }
    *code_out = RPC_CANCELLED;
    return rpc_call_remaining_ms(call) == 0 ? "deadline passed" : "client left";
}

static const char *call_client_outcome(const struct rpc_call *call, char buffer[RPC_TEXT_BYTES],
                                       enum rpc_code *code_out)
{
    if (call->unparsed) {
        *code_out = call->abort_code;
        return call->abort_text;
    }
    bool known = (unsigned)call->recv_status <= RPC_UNAUTHENTICATED;
    *code_out = known ? (enum rpc_code)call->recv_status : RPC_UNKNOWN;
    rpc_text_clean((const char *)GRPC_SLICE_START_PTR(call->recv_details), GRPC_SLICE_LENGTH(call->recv_details),
                   buffer, RPC_TEXT_BYTES);
    return buffer;
}

/* For rpc_door_call_end(): it brought no message, or it was ended, by whomever, before it was answered. */
static uint32_t call_waste(const struct rpc_call *call)
{
    if (call->was_admitted && !call->n_received) /* of a held one nothing was read */
        return call->begins_ns ? RPC_WASTE_YOUNG : RPC_WASTE_SILENT;
    if (call->is_too_much)
        return RPC_WASTE_REFUSED;
    if (call->is_too_long)
        return RPC_WASTE_LONG;
    if (call->finish_code == RPC_UNAUTHENTICATED)
        return RPC_WASTE_GUESS;
    return call->recv_cancelled && rpc_now_ns() - call->opened_ns < RPC_YOUNG_MS * 1000000ull ? RPC_WASTE_YOUNG : 0;
}

/* Nothing of the call is left inside gRPC. */
static void call_release(struct rpc_call *call)
{
    if (call->door && !call->n_received)
        rpc_door_unread(call->door, call->fd, call->connection, !call->recv_cancelled || call->aborted);
    if (call->door && call->has_queue && !call->recv_cancelled && call->finish_code == RPC_OK)
        rpc_door_answered(call->door, call->fd, call->connection);
    if (call->door)
        rpc_door_call_end(call->door, call->fd, call->connection, call_waste(call));
    grpc_call_unref(call->grpc); /* from here on its descriptor may be another connection's */
    rpc_pump_leave_channel(call);
    rpc_pump_other_done(call->pump); /* lets rpc_pump_fini go on */
    rpc_call_unref(call);
}

/* Runs once per call, on an rpc thread. */
static void call_end(struct rpc_call *call)
{
    enum rpc_code code = RPC_UNKNOWN;
    char buffer[RPC_TEXT_BYTES];
    const char *text = call->is_server ? call_server_outcome(call, &code) : call_client_outcome(call, buffer, &code);
    log_debug(call->pump->log, "rpc call ended side=%s method=%s code=%s text=\"%s\"",
              call->is_server ? "server" : "client", call->path, rpc_code_name(code), text);
    if (call->handlers.on_end)
        call->handlers.on_end(call, code, text);
    rpc_pump_remove(call->pump, call);
    rpc_call_ref(call);
    pthread_mutex_lock(&call->lock);
    call->end_returned = true;
    bool release = !call->sending;
    pthread_mutex_unlock(&call->lock);
    if (release)
        call_release(call);
    rpc_call_unref(call);
}

static void call_step_done(struct rpc_call *call)
{
    pthread_mutex_lock(&call->lock);
    bool last = --call->pending == 0;
    if (last) {
        call_set_state(call, CALL_ENDED);
        call_drop_queue(call);
    }
    pthread_mutex_unlock(&call->lock);
    if (last)
        call_end(call);
}

/* ------------------------------------------------------------------ sending */

/* The operations of one batch and the data that they point to. */
struct send_batch {
    grpc_op ops[3];
    size_t n_ops;
    grpc_metadata *initial;
    size_t n_initial;
    grpc_metadata trailing[2];
    size_t n_trailing;
    grpc_slice text;
};

static void batch_add_headers(struct rpc_call *call, struct send_batch *batch)
{
    uint32_t n = call->is_server ? 0 : call->n_headers;
    batch->initial = mem_array(n, sizeof(*batch->initial));
    batch->n_initial = n;
    for (uint32_t i = 0; i < n; i++) {
        batch->initial[i].key = grpc_slice_from_copied_string(call->headers[i].name);
        batch->initial[i].value = grpc_slice_from_copied_string(call->headers[i].value);
    }
    grpc_op *op = &batch->ops[batch->n_ops++];
    op->op = GRPC_OP_SEND_INITIAL_METADATA;
    op->data.send_initial_metadata.count = n;
    op->data.send_initial_metadata.metadata = batch->initial;
    if (call->wait_for_ready)
        op->flags = GRPC_INITIAL_METADATA_WAIT_FOR_READY | GRPC_INITIAL_METADATA_WAIT_FOR_READY_EXPLICITLY_SET;
    call->metadata_sent = true;
}

static void batch_add_message(struct rpc_call *call, struct send_batch *batch)
{
    struct rpc_send *send = call->send_head;
    grpc_op *op = &batch->ops[batch->n_ops++];
    op->op = GRPC_OP_SEND_MESSAGE;
    op->data.send_message.send_message = send->buffer;
    call->send_head = send->next;
    if (!call->send_head)
        call->send_tail = &call->send_head;
    call->n_waiting--;
    call->inflight_bytes = send->cost_bytes;
}

static void batch_add_trailing(struct send_batch *batch, const char *name, grpc_slice value)
{
    grpc_metadata *m = &batch->trailing[batch->n_trailing++];
    m->key = grpc_slice_from_static_string(name);
    m->value = value;
}

static void batch_add_finish(struct rpc_call *call, struct send_batch *batch)
{
    grpc_op *op = &batch->ops[batch->n_ops++];
    call->finish_sent = true;
    if (!call->is_server) {
        op->op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
        return;
    }
    op->op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    op->data.send_status_from_server.status = (grpc_status_code)call->finish_code;
    batch->text = grpc_slice_from_copied_string(call->finish_text);
    op->data.send_status_from_server.status_details = &batch->text;
    uint8_t *details;
    size_t n = rpc_details_pack(call->finish_code, call->finish_text, call->retry_after_ms, &details);
    if (n) {
        batch_add_trailing(batch, "grpc-status-details-bin", grpc_slice_from_copied_buffer((const char *)details, n));
        free(details);
    }
    if (call->retry_after_ms) {
        char number[16];
        snprintf(number, sizeof(number), "%u", call->retry_after_ms);
        batch_add_trailing(batch, "retry-after-ms", grpc_slice_from_copied_string(number));
    }
    op->data.send_status_from_server.trailing_metadata = batch->trailing;
    op->data.send_status_from_server.trailing_metadata_count = batch->n_trailing;
}

static void batch_fini(struct send_batch *batch, struct rpc_send *send)
{
    for (size_t i = 0; i < batch->n_initial; i++) {
        grpc_slice_unref(batch->initial[i].key);
        grpc_slice_unref(batch->initial[i].value);
    }
    free(batch->initial);
    grpc_slice_unref(batch->text);
    for (size_t i = 0; i < batch->n_trailing; i++)
        grpc_slice_unref(batch->trailing[i].value);
    if (send) {
        grpc_byte_buffer_destroy(send->buffer);
        free(send);
    }
}

/* Call under the lock. Starts the sends that are due, if no send batch is out. Only a client sends headers
 * alone, because they start its call. */
static void call_pump_sends(struct rpc_call *call)
{
    if (call->sending || call->aborted || call->state != CALL_OPEN)
        return;
    struct rpc_send *send = call->send_head;
    bool finish = call->finish_wanted && !call->finish_sent && !(send && send->next);
    bool headers = !call->metadata_sent && (send || finish || !call->is_server);
    if (!send && !finish && !headers)
        return;
    struct send_batch batch = {.text = grpc_empty_slice()};
    if (headers)
        batch_add_headers(call, &batch);
    if (send)
        batch_add_message(call, &batch);
    if (finish)
        batch_add_finish(call, &batch);
    call->sending = call_start_batch(call, batch.ops, batch.n_ops, &call->send_tag);
    batch_fini(&batch, send);
    if (!call->sending) {
        call->queued_bytes -= call->inflight_bytes;
        call->inflight_bytes = 0;
        call->aborted = true;
        call->abort_code = RPC_INTERNAL;
        call->abort_text = mem_strdup("batch refused");
    }
}

uint64_t rpc_now_ns(void)
{
    gpr_timespec now = gpr_now(GPR_CLOCK_MONOTONIC);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void send_done(struct rpc_tag *tag, bool ok)
{
    struct rpc_call *call = CALL_OF(tag, send_tag);
    uint64_t now = rpc_now_ns();
    pthread_mutex_lock(&call->lock);
    call->sending = false;
    call->taken_ns = now;
    call->full_ns = 0;
    call->queued_bytes -= call->inflight_bytes;
    call->inflight_bytes = 0;
    if (ok)
        call_pump_sends(call);
    else
        call_drop_queue(call); /* the call is lost; the close batch says why */
    bool release = call->end_returned;
    pthread_mutex_unlock(&call->lock);
    if (release)
        call_release(call);
}

static struct rpc_send *send_pack(const ProtobufCMessage *message, size_t len_bytes)
{
    struct rpc_send *send = mem_zalloc(sizeof(*send));
    grpc_slice slice = grpc_slice_malloc(len_bytes);
    protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(slice));
    send->buffer = grpc_raw_byte_buffer_create(&slice, 1);
    send->cost_bytes = len_bytes + SEND_OVERHEAD_BYTES;
    grpc_slice_unref(slice);
    return send;
}

/* Call under the lock. An empty queue takes any message: it may be larger than max_queued_bytes. */
static enum td_status call_enqueue(struct rpc_call *call, struct rpc_send *send, bool over)
{
    if (call->state != CALL_OPEN || call->aborted || call->finish_wanted)
        return TD_ERR_CANCELLED;
    if (!call->queued_bytes)
        call->taken_ns = rpc_now_ns();
    if (call->send_head && call->queued_bytes + send->cost_bytes > call->pump->max_queued_bytes) {
        call->full_ns = call->full_ns ? call->full_ns : rpc_now_ns();
        if (!over)
            return TD_ERR_NO_SPACE;
    }
    *call->send_tail = send;
    call->send_tail = &send->next;
    call->queued_bytes += send->cost_bytes;
    call->n_waiting++;
    return TD_OK;
}

enum { SEND_NOW = 1, SEND_OVER = 2 };

static enum td_status call_send(struct rpc_call *call, const ProtobufCMessage *message, uint32_t limit, int how)
{
    size_t len = protobuf_c_message_get_packed_size(message);
    if (len > limit)
        return TD_ERR_INVALID;
    struct rpc_send *send = send_pack(message, len);
    pthread_mutex_lock(&call->lock);
    enum td_status status = call_enqueue(call, send, how & SEND_OVER);
    if (status == TD_OK && (how & SEND_NOW))
        call_pump_sends(call);
    pthread_mutex_unlock(&call->lock);
    if (status != TD_OK)
        send_free(send);
    return status;
}

/* Injected fault. True: the message was dealt with; the caller is told that it was sent. */
static bool call_misbehaves(struct rpc_call *call, struct faults *faults, const ProtobufCMessage *message,
                            uint32_t limit)
{
    switch (faults_draw(faults, FAULT_RPC_MESSAGE).kind) {
    case FAULT_DROP:
        return true;
    case FAULT_DUPLICATE:
        call_send(call, message, limit, SEND_NOW);
        return false;
    case FAULT_FAIL:
        rpc_call_abort(call, RPC_UNAVAILABLE, "a fault made on purpose");
        return true;
    case FAULT_REORDER:
        break;
    default:
        return false;
    }
    struct rpc_send *send = send_pack(message, protobuf_c_message_get_packed_size(message));
    pthread_mutex_lock(&call->lock);
    struct rpc_send *before = call->overtaken;
    call->overtaken = send;
    pthread_mutex_unlock(&call->lock);
    send_free(before); /* two in a row: the first one is lost */
    return true;
}

static void call_send_overtaken(struct rpc_call *call)
{
    pthread_mutex_lock(&call->lock);
    struct rpc_send *send = call->overtaken;
    call->overtaken = NULL;
    if (send && call_enqueue(call, send, false) == TD_OK) {
        call_pump_sends(call);
        send = NULL;
    }
    pthread_mutex_unlock(&call->lock);
    send_free(send);
}

/* The pump may be freed once the call has ended, so its members are read under the lock. */
static enum td_status send_open(struct rpc_call *call, const ProtobufCMessage *message, int how)
{
    pthread_mutex_lock(&call->lock);
    bool open = call->state == CALL_OPEN && !call->aborted && !call->finish_wanted;
    uint32_t limit = open ? call->pump->max_message_bytes : 0;
    struct faults *faults = open ? call->pump->faults : NULL;
    pthread_mutex_unlock(&call->lock);
    if (!open)
        return TD_ERR_CANCELLED;
    if (faults && call_misbehaves(call, faults, message, limit))
        return TD_OK;
    enum td_status status = call_send(call, message, limit, how);
    if (faults)
        call_send_overtaken(call);
    return status;
}

enum td_status rpc_call_send(struct rpc_call *call, const ProtobufCMessage *message)
{
    return send_open(call, message, SEND_NOW);
}

enum td_status rpc_call_send_over(struct rpc_call *call, const ProtobufCMessage *message)
{
    return send_open(call, message, SEND_NOW | SEND_OVER);
}

enum td_status rpc_call_preload(struct rpc_call *call, const ProtobufCMessage *message)
{
    enum td_status status = call_send(call, message, call->pump->max_message_bytes, 0);
    call->finish_wanted = true;
    return status;
}

uint64_t rpc_call_queued_bytes(struct rpc_call *call)
{
    pthread_mutex_lock(&call->lock);
    uint64_t n = call->queued_bytes;
    pthread_mutex_unlock(&call->lock);
    return n;
}

uint32_t rpc_call_n_waiting(struct rpc_call *call)
{
    pthread_mutex_lock(&call->lock);
    uint32_t n = call->n_waiting;
    pthread_mutex_unlock(&call->lock);
    return n;
}

/* ------------------------------------------------------------------ receiving */

/*
 * Limit of the memory of an unpacked message: submessages of two bytes become structs of a hundred bytes, so
 * with the wire's limit alone 4 MiB could become 400 MiB. Memory comes from plain malloc, so a message that
 * is kept is freed without this allocator.
 */
struct unpack_budget {
    size_t left_bytes;
};

static void *budget_alloc(void *data, size_t size)
{
    struct unpack_budget *budget = data;
    if (size > budget->left_bytes)
        return NULL;
    budget->left_bytes -= size;
    return malloc(size);
}

static void budget_free(void *data, void *pointer)
{
    (void)data;
    free(pointer);
}

static ProtobufCMessage *call_unpack(struct rpc_call *call, grpc_byte_buffer *buffer)
{
    grpc_byte_buffer_reader reader;
    if (!grpc_byte_buffer_reader_init(&reader, buffer))
        return NULL;
    grpc_slice slice = grpc_byte_buffer_reader_readall(&reader);
    grpc_byte_buffer_reader_destroy(&reader);
    const size_t most = 65536 + (size_t)call->pump->max_message_bytes * 16;
    struct unpack_budget budget = {.left_bytes = most};
    ProtobufCAllocator allocator = {.alloc = budget_alloc, .free = budget_free, .allocator_data = &budget};
    ProtobufCMessage *message =
        protobuf_c_message_unpack(call->incoming, &allocator, GRPC_SLICE_LENGTH(slice), GRPC_SLICE_START_PTR(slice));
    call->message_bytes = most - budget.left_bytes;
    grpc_slice_unref(slice);
    return message;
}

/* unparsed: the peer's message was wrong, which counts even if its status has already arrived. */
static void call_abort(struct rpc_call *call, enum rpc_code code, const char *text, bool unparsed)
{
    char clean[RPC_TEXT_BYTES];
    rpc_text_clean(text ? text : "", text ? strlen(text) : 0, clean, sizeof(clean));
    if (code <= RPC_OK || code > RPC_UNAUTHENTICATED)
        code = RPC_UNKNOWN;
    pthread_mutex_lock(&call->lock);
    bool live = call->state == CALL_OPEN || (unparsed && call->state == CALL_CLOSED);
    if (live && !call->aborted) {
        call->aborted = true;
        call->unparsed = unparsed;
        call->abort_code = code;
        call->abort_text = mem_strdup(clean);
        call_drop_queue(call);
        /* From a server this sends status and text at once, ahead of what waits for a client that does not
         * read. */
        grpc_call_cancel_with_status(call->grpc, (grpc_status_code)code, clean, NULL);
    }
    pthread_mutex_unlock(&call->lock);
}

static void call_deliver(struct rpc_call *call, grpc_byte_buffer *buffer)
{
    if (call->one_request && call->n_received) {
        call_abort(call, RPC_INVALID_ARGUMENT, "a second request in one call", false);
        return;
    }
    char text[160];
    if (call->must_prove && !atomic_load(&call->is_proved) && grpc_byte_buffer_length(buffer) > RPC_UNPROVED_BYTES) {
        snprintf(text, sizeof(text), "a message of over %d bytes before the proof", RPC_UNPROVED_BYTES);
        call_abort(call, call->is_server ? RPC_RESOURCE_EXHAUSTED : RPC_INTERNAL, text, true);
        return;
    }
    if (call->door)
        rpc_door_message(call->door, call->fd, call->connection, grpc_byte_buffer_length(buffer));
    ProtobufCMessage *message = call_unpack(call, buffer);
    if (!message) {
        snprintf(text, sizeof(text), "%s: not parseable", call->incoming->name);
        log_debug(call->pump->log, "rpc message refused method=%s type=%s", call->path, call->incoming->name);
        call_abort(call, call->is_server ? RPC_INVALID_ARGUMENT : RPC_INTERNAL, text, true);
        return;
    }
    if (call->is_server && !call->n_received && !call->must_prove)
        rpc_pump_spoke(call->pump, call);
    call->n_received++;
    call->message_taken = false;
    if (call->handlers.on_message)
        call->handlers.on_message(call, message);
    if (!call->message_taken)
        protobuf_c_message_free_unpacked(message, NULL);
}

size_t rpc_call_message_bytes(const struct rpc_call *call)
{
    return call->message_bytes;
}

ProtobufCMessage *rpc_call_take(struct rpc_call *call, const ProtobufCMessage *message)
{
    call->message_taken = true;
    return (ProtobufCMessage *)(uintptr_t)message;
}

/* Call under the lock. */
static void call_recv_locked(struct rpc_call *call)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &call->recv_buffer};
    if ((!call->is_server || call->state == CALL_OPEN) && call_start_batch(call, &op, 1, &call->recv_tag))
        call->pending++;
}

static void call_recv_start(struct rpc_call *call)
{
    pthread_mutex_lock(&call->lock);
    call->waits_to_recv = call->is_held;
    if (!call->is_held)
        call_recv_locked(call);
    pthread_mutex_unlock(&call->lock);
}

void rpc_call_hold(struct rpc_call *call)
{
    pthread_mutex_lock(&call->lock);
    call->is_held = true;
    pthread_mutex_unlock(&call->lock);
}

void rpc_call_resume(struct rpc_call *call)
{
    pthread_mutex_lock(&call->lock);
    bool starts = call->waits_to_recv && call->state != CALL_ENDED;
    call->is_held = call->waits_to_recv = false;
    if (starts)
        call_recv_locked(call);
    pthread_mutex_unlock(&call->lock);
}

/* The client sends nothing more. A method that waits for a request must not wait for ever. */
static void call_half_closed(struct rpc_call *call)
{
    if (call->handlers.on_half_close)
        call->handlers.on_half_close(call);
    else if (call->n_received == 0)
        rpc_call_finish(call, RPC_INVALID_ARGUMENT, "no request", 0);
}

static void recv_done(struct rpc_tag *tag, bool ok)
{
    struct rpc_call *call = CALL_OF(tag, recv_tag);
    pthread_mutex_lock(&call->lock);
    grpc_byte_buffer *buffer = call->recv_buffer;
    call->recv_buffer = NULL;
    /* A server that has given its status reads on, so that the client's sends complete, but discards the
     * messages. */
    bool deliver = !call->aborted && !(call->is_server && (call->finish_wanted || call->state != CALL_OPEN));
    bool graceful = ok && !grpc_call_failed_before_recv_message(call->grpc);
    pthread_mutex_unlock(&call->lock);
    if (buffer) {
        if (ok && deliver)
            call_deliver(call, buffer);
        grpc_byte_buffer_destroy(buffer);
        call_recv_start(call);
    } else if (call->is_server && deliver && graceful) {
        call_half_closed(call);
    }
    call_step_done(call);
}

static uint32_t retry_after_of(const grpc_metadata_array *trailing)
{
    for (size_t i = 0; i < trailing->count; i++) {
        if (grpc_slice_str_cmp(trailing->metadata[i].key, "retry-after-ms") != 0)
            continue;
        uint64_t n = 0;
        grpc_slice value = trailing->metadata[i].value;
        for (size_t k = 0; k < GRPC_SLICE_LENGTH(value); k++) {
            uint8_t digit = (uint8_t)(GRPC_SLICE_START_PTR(value)[k] - '0');
            if (digit > 9)
                return 0;
            n = n * 10 + digit;
            if (n > UINT32_MAX)
                return UINT32_MAX;
        }
        return (uint32_t)n;
    }
    return 0;
}

static void close_done(struct rpc_tag *tag, bool ok)
{
    (void)ok; /* receiving a close or a status always succeeds */
    struct rpc_call *call = CALL_OF(tag, close_tag);
    pthread_mutex_lock(&call->lock);
    call_set_state(call, CALL_CLOSED);
    call_drop_queue(call);
    if (!call->is_server)
        call->retry_after_ms = retry_after_of(&call->recv_trailing);
    pthread_mutex_unlock(&call->lock);
    call_step_done(call);
}

/* ------------------------------------------------------------------ begin and end */

void rpc_call_run_server(struct rpc_call *call, void (*on_open)(struct rpc_call *call, void *user), void *user)
{
    grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER, .data.recv_close_on_server.cancelled = &call->recv_cancelled};
    pthread_mutex_lock(&call->lock);
    call->pending = 2; /* this batch, and on_open */
    bool started = call_start_batch(call, &op, 1, &call->close_tag);
    /* The first operation of a fresh call; without it nothing would ever end the call. */
    assert(started);
    (void)started;
    pthread_mutex_unlock(&call->lock);
    on_open(call, user);
    call_recv_start(call);
    call_step_done(call);
}

enum td_status rpc_call_run_client(struct rpc_call *call)
{
    grpc_op ops[2] = {
        {.op = GRPC_OP_RECV_INITIAL_METADATA, .data.recv_initial_metadata.recv_initial_metadata = &call->recv_initial},
        {.op = GRPC_OP_RECV_STATUS_ON_CLIENT,
         .data.recv_status_on_client = {.trailing_metadata = &call->recv_trailing,
                                        .status = &call->recv_status,
                                        .status_details = &call->recv_details}},
    };
    grpc_op recv = {.op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &call->recv_buffer};
    pthread_mutex_lock(&call->lock);
    bool started = call_start_batch(call, ops, 2, &call->close_tag);
    if (started) {
        call->pending = 1;
        call_pump_sends(call);
        call->pending += call_start_batch(call, &recv, 1, &call->recv_tag);
    }
    pthread_mutex_unlock(&call->lock);
    return started ? TD_OK : TD_ERR_INVALID;
}

void rpc_call_finish(struct rpc_call *call, enum rpc_code code, const char *text, uint32_t retry_after_ms)
{
    char clean[RPC_TEXT_BYTES];
    rpc_text_clean(text ? text : "", text ? strlen(text) : 0, clean, sizeof(clean));
    pthread_mutex_lock(&call->lock);
    if (call->is_server && call->state == CALL_OPEN && !call->finish_wanted && !call->aborted) {
        call->finish_wanted = true;
        call->finish_code = (unsigned)code <= RPC_UNAUTHENTICATED ? code : RPC_UNKNOWN;
        call->finish_text = mem_strdup(clean);
        call->retry_after_ms = retry_after_ms;
        call_pump_sends(call);
    }
    pthread_mutex_unlock(&call->lock);
}

void rpc_call_close_send(struct rpc_call *call)
{
    pthread_mutex_lock(&call->lock);
    if (!call->is_server && call->state == CALL_OPEN) {
        call->finish_wanted = true;
        call_pump_sends(call);
    }
    pthread_mutex_unlock(&call->lock);
}

void rpc_call_abort(struct rpc_call *call, enum rpc_code code, const char *text)
{
    call_abort(call, code, text, false);
}

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

bool rpc_call_cut_unread(struct rpc_call *call, uint64_t now_ns, const struct rpc_patience *patience, uint32_t *n_full)
{
    const uint64_t ms = 1000000, full_ns = (uint64_t)patience->full_ms * ms, any_ns = (uint64_t)patience->any_ms * ms;
    pthread_mutex_lock(&call->lock);
    call->full_ns = call->full_ns ? earlier(call->full_ns + patience->away_ns, now_ns) : 0;
    call->taken_ns = earlier(call->taken_ns + patience->away_ns, now_ns);
    bool live = call->state == CALL_OPEN && !call->aborted && call->queued_bytes;
    *n_full += live && call->full_ns;
    bool cut = live && ((call->full_ns && now_ns > call->full_ns + full_ns) || now_ns > call->taken_ns + any_ns);
    pthread_mutex_unlock(&call->lock);
    if (cut)
        rpc_call_abort(call, RPC_RESOURCE_EXHAUSTED, "the client does not read");
    return cut;
}

void rpc_call_cancel(struct rpc_call *call)
{
    call_abort(call, RPC_CANCELLED, "cancelled", false);
}
