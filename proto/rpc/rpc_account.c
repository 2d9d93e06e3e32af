#include "proto/rpc/rpc_account.h"

#include "base/clock.h"

enum { MESSAGE_BYTES = 64 }; /* frames and records around a message */

struct rpc_account rpc_account_open(uint64_t now_ns)
{
    return (struct rpc_account){.began_ns = now_ns, .quiet_ns = now_ns};
}

void rpc_account_call(struct rpc_account *a)
{
    a->explained_bytes += RPC_CALL_BYTES;
}

void rpc_account_message(struct rpc_account *a, size_t len_bytes)
{
    a->explained_bytes += 2 * len_bytes + MESSAGE_BYTES;
}

void rpc_account_unread(struct rpc_account *a, uint64_t most_bytes, bool is_doubtful, uint64_t now_ns)
{
    uint32_t rate = is_doubtful ? RPC_DOUBTFUL_BYTES : RPC_UNREAD_BYTES;
    double there = (double)a->unread_bytes + (double)(now_ns - a->unread_ns) * 1e-9 * rate;
    a->unread_bytes = there < rate ? (uint64_t)there : rate;
    a->unread_ns = now_ns;
    uint64_t n = most_bytes < a->unread_bytes ? most_bytes : a->unread_bytes;
    a->unread_bytes -= n;
    a->explained_bytes += n;
    a->explained_bytes -= is_doubtful ? RPC_CALL_BYTES : 0;
}

/* Whether a connection without calls has had these bytes for a while. */
static bool is_noise(struct rpc_account *a, uint64_t bytes, uint32_t n_calls, const struct rpc_allowance *may,
                     uint64_t now_ns)
{
    if (n_calls || bytes <= may->noise || a->quiet_bytes != a->explained_bytes) {
        a->quiet_bytes = a->explained_bytes;
        a->quiet_ns = now_ns;
        return false;
    }
    return now_ns - a->quiet_ns >= may->noise_ns;
}

bool rpc_account_is_over(struct rpc_account *a, const struct rpc_flow *flow, uint32_t n_calls,
                         const struct rpc_allowance *may, uint64_t now_ns)
{
    uint64_t explained = a->explained_bytes + flow->acked_bytes / 5 * 4 + (now_ns - a->began_ns) / NS_PER_MS;
    /* Calls may have explained less since, when they ended. */
    explained -= explained < a->surplus_bytes ? explained : a->surplus_bytes;
    if (explained > flow->read_bytes + may->each)
        a->surplus_bytes += explained - flow->read_bytes - may->each;
    uint64_t bytes = flow->read_bytes > explained ? flow->read_bytes - explained : 0;
    return is_noise(a, bytes, n_calls, may, now_ns) || bytes > may->few + may->each * n_calls;
}

bool rpc_account_has_noise(const struct rpc_account *a, uint64_t looked_ns)
{
    return a->quiet_ns < looked_ns;
}
