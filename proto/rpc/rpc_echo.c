/*
 * A call on a channel that leads nowhere, again and again: its end comes through the clients' queue at once,
 * if the queue's threads get processor time. (gRPC's alarms are for C++ only.)
 */
#include "proto/rpc/rpc_internal.h"

#include <stddef.h>
#include <stdlib.h>

#include <grpc/slice.h>
#include <grpc/support/time.h>

#include "base/mem.h"

/* Time from one call to the next, if the first one ended soon; else the next one follows at once. */
static const uint64_t APART_NS = 100 * 1000000ull, SOON_NS = 20 * 1000000ull;

struct rpc_echo {
    struct rpc_pump pump;
    grpc_channel *nowhere;
    struct rpc_tag tag;
    grpc_call *call; /* the latest one; NULL: none yet */
    grpc_metadata_array trailing;
    grpc_status_code status;
    grpc_slice details;
    uint64_t sent_ns;
    _Atomic uint64_t next_ns; /* when the next one is due */
    atomic_bool is_under_way; /* the call has not ended */
};

static void echo_done(struct rpc_tag *tag, bool ok)
{
    struct rpc_echo *e = (struct rpc_echo *)((char *)tag - offsetof(struct rpc_echo, tag));
    uint64_t now = rpc_now_ns();
    (void)ok;
    atomic_store(&e->next_ns, now - e->sent_ns < SOON_NS ? now + APART_NS : now);
    atomic_store(&e->is_under_way, false);
    rpc_pump_other_done(&e->pump);
}

static void end_call(struct rpc_echo *e)
{
    if (!e->call)
        return;
    grpc_call_unref(e->call);
    grpc_slice_unref(e->details);
    grpc_metadata_array_destroy(&e->trailing);
    e->call = NULL;
}

struct rpc_echo *rpc_echo_open(void)
{
    struct rpc_echo *e = mem_zalloc(sizeof(*e));
    rpc_pump_init(&e->pump, false, 0, 0, NULL);
    e->nowhere = grpc_lame_client_channel_create("nowhere", GRPC_STATUS_UNAVAILABLE, "an echo");
    return e;
}

void rpc_echo_close(struct rpc_echo *e)
{
    if (!e)
        return;
    while (!rpc_pump_wait(&e->pump, true, 5000))
        ;
    end_call(e);
    grpc_channel_destroy(e->nowhere);
    rpc_pump_fini(&e->pump);
    free(e);
}

uint64_t rpc_echo_age_ns(struct rpc_echo *e)
{
    uint64_t now = rpc_now_ns();
    if (atomic_load(&e->is_under_way))
        return now - e->sent_ns;
    if (now < atomic_load(&e->next_ns))
        return 0;
    end_call(e);
    grpc_slice path = grpc_slice_from_static_string("/echo");
    e->call = grpc_channel_create_call(e->nowhere, NULL, 0, e->pump.queue, path, NULL,
                                       gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    grpc_metadata_array_init(&e->trailing);
    const grpc_op ops[] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                           {.op = GRPC_OP_RECV_STATUS_ON_CLIENT,
                            .data.recv_status_on_client = {.trailing_metadata = &e->trailing,
                                                           .status = &e->status,
                                                           .status_details = &e->details}}};
    e->sent_ns = now;
    atomic_store(&e->is_under_way, true);
    rpc_tag_set(&e->tag, echo_done);
    rpc_pump_other_begin(&e->pump);
    if (grpc_call_start_batch(e->call, ops, sizeof(ops) / sizeof(ops[0]), &e->tag, NULL) != GRPC_CALL_OK)
        echo_done(&e->tag, false);
    return 0;
}
