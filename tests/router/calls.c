#include "calls.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"

/* What keeping a message costs, about as in proto/rpc/rpc_call.c. */
enum { OVERHEAD_BYTES = 150 };

struct rpc_client {
    char target[128];
};

struct rpc_server {
    char address[128];
};

struct rpc_call *call_open(void)
{
    struct rpc_call *call = mem_zalloc(sizeof(*call));
    *call = (struct rpc_call){.n_refs = 1, .reads = true, .max_queued_bytes = UINT64_MAX, .max_message_bytes = 4 << 20};
    return call;
}

void call_read(struct rpc_call *call)
{
    call->queued_bytes = 0;
}

/* ---------------------------------------------------------------- every call */

struct rpc_call *rpc_call_ref(struct rpc_call *call)
{
    call->n_refs++;
    return call;
}

void rpc_call_unref(struct rpc_call *call)
{
    if (!call || --call->n_refs)
        return;
    for (uint32_t i = 0; i < call->n_sent; i++)
        protobuf_c_message_free_unpacked(call->sent[i], NULL);
    free(call->sent);
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

bool rpc_call_over(struct rpc_call *call)
{
    return call->over;
}

uint64_t rpc_call_connection(const struct rpc_call *call)
{
    (void)call;
    return 1;
}

int64_t rpc_call_remaining_ms(const struct rpc_call *call)
{
    (void)call;
    return INT64_MAX;
}

const char *rpc_call_header(const struct rpc_call *call, const char *name)
{
    (void)call, (void)name;
    return NULL;
}

ProtobufCMessage *rpc_call_take(struct rpc_call *call, const ProtobufCMessage *message)
{
    (void)call;
    return (ProtobufCMessage *)(uintptr_t)message;
}

size_t rpc_call_message_bytes(const struct rpc_call *call)
{
    (void)call;
    return 0;
}

static enum td_status keep(struct rpc_call *call, const ProtobufCMessage *message, bool over)
{
    size_t len = protobuf_c_message_get_packed_size(message);
    if (call->over || call->finished)
        return TD_ERR_CANCELLED;
    if (len > call->max_message_bytes)
        return TD_ERR_INVALID;
    if (!over && call->queued_bytes && call->queued_bytes + len + OVERHEAD_BYTES > call->max_queued_bytes)
        return TD_ERR_NO_SPACE;
    uint8_t *packed = mem_array(len ? len : 1, 1);
    protobuf_c_message_pack(message, packed);
    call->sent = mem_resize(call->sent, call->n_sent + 1, sizeof(*call->sent));
    call->sent[call->n_sent] = protobuf_c_message_unpack(message->descriptor, NULL, len, packed);
    free(packed);
    if (!call->sent[call->n_sent])
        abort();
    call->n_sent++;
    call->queued_bytes += call->reads ? 0 : len + OVERHEAD_BYTES;
    return TD_OK;
}

enum td_status rpc_call_send(struct rpc_call *call, const ProtobufCMessage *message)
{
    return keep(call, message, false);
}

enum td_status rpc_call_send_over(struct rpc_call *call, const ProtobufCMessage *message)
{
    return keep(call, message, true);
}

uint64_t rpc_call_queued_bytes(struct rpc_call *call)
{
    return call->queued_bytes;
}

void rpc_call_finish(struct rpc_call *call, enum rpc_code code, const char *text, uint32_t retry_after_ms)
{
    call->n_finishes++;
    if (call->over || call->finished)
        return;
    call->finished = true;
    call->code = code;
    call->retry_after_ms = retry_after_ms;
    snprintf(call->text, sizeof(call->text), "%s", text ? text : "");
}

/* ------------------------------------------------------------ workers' streams */

void rpc_call_cancel(struct rpc_call *call)
{
    if (call->over)
        return;
    call->over = true;
    if (call->handlers.on_end)
        call->handlers.on_end(call, RPC_CANCELLED, "cancelled");
}

void rpc_call_abort(struct rpc_call *call, enum rpc_code code, const char *text)
{
    rpc_call_finish(call, code, text, 0);
    rpc_call_cancel(call);
}

void rpc_call_close_send(struct rpc_call *call)
{
    call->finished = true;
}

uint32_t rpc_call_retry_after_ms(const struct rpc_call *call)
{
    return call->retry_after_ms;
}

enum td_status rpc_client_open(const struct rpc_client_config *config, struct rpc_client **out,
                               struct td_error *error_out)
{
    (void)error_out;
    *out = mem_zalloc(sizeof(**out));
    snprintf((*out)->target, sizeof((*out)->target), "%s", config->target);
    return TD_OK;
}

void rpc_client_close(struct rpc_client *c)
{
    free(c);
}

enum td_status rpc_call_start(struct rpc_client *c, const struct rpc_call_params *params, struct rpc_call **out)
{
    (void)c;
    *out = call_open();
    (*out)->handlers = params->handlers;
    (*out)->user = params->user;
    return TD_OK;
}

/* ------------------------------------------------------------------- server */

enum td_status rpc_server_open(const struct rpc_server_config *config, struct rpc_server **out,
                               struct td_error *error_out)
{
    (void)error_out;
    *out = mem_zalloc(sizeof(**out));
    snprintf((*out)->address, sizeof((*out)->address), "%s", config->listen);
    return TD_OK;
}

const char *rpc_server_address(const struct rpc_server *s)
{
    return s->address;
}

uint64_t rpc_server_refused(struct rpc_server *s)
{
    (void)s;
    return 0;
}

void rpc_server_set_serving(struct rpc_server *s, bool serving)
{
    (void)s, (void)serving;
}

uint32_t rpc_server_cut_unread(struct rpc_server *s, const struct rpc_patience *patience, uint32_t *n_full_out)
{
    (void)s, (void)patience;
    *n_full_out = 0;
    return 0;
}

void rpc_server_close(struct rpc_server *s)
{
    free(s);
}
