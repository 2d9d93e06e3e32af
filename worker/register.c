#include "worker/register.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/ticker.h"
#include "proto/rpc/rpc.h"
#include "worker.pb-c.h"
#include "worker/proof.h"

enum { MAX_ROUTERS = 16, CALL_MS = 1000 };

struct joined_router { /* a router */
    struct rpc_client *client;
    enum rpc_code last; /* how the last call ended; only changes are logged */
    uint8_t nonce[SECRET_NONCE_BYTES];
    bool has_nonce;    /* that it gave in its last answer */
    uint64_t retry_ns; /* it is not asked before */
    uint32_t n_floods; /* answers that were none, one after the other */
};

struct registrar {
    struct registrar_config config;
    struct clock clock;
    struct joined_router routers[MAX_ROUTERS];
    uint32_t n_routers;
    struct ticker *ticker;
};

/* Takes what a router answered. RPC_OK: it has us, or *again_out: it waits for a call with its nonce. */
static enum rpc_code on_answer(struct registrar *r, struct joined_router *t, struct proof_said *said,
                               const Tandem__Worker__V1__JoinResponse *answer, bool *again_out, struct td_error *e)
{
    t->has_nonce = proof_nonce_read(answer->nonce, t->nonce);
    memcpy(said->router, t->nonce, sizeof(said->router));
    if (!t->has_nonce || !proof_verify(r->config.secret, JOIN_ROUTER, said, answer->proof)) {
        t->has_nonce = false;
        td_fail(e, TD_ERR_AUTH, "the router does not know the cluster secret");
        return RPC_UNAUTHENTICATED;
    }
    *again_out = !answer->is_taken;
    return RPC_OK;
}

static enum rpc_code ask(struct registrar *r, struct joined_router *t, bool *again_out, struct td_error *e)
{
    Tandem__Worker__V1__JoinRequest m = TANDEM__WORKER__V1__JOIN_REQUEST__INIT;
    uint8_t proof[SECRET_MAC_BYTES];
    ProtobufCMessage *answer = NULL;
    struct proof_said said = {.incarnation = r->config.incarnation, .address = r->config.address};
    secret_nonce(said.worker);
    m.address = rpc_data(r->config.address);
    m.incarnation = r->config.incarnation;
    m.nonce = (ProtobufCBinaryData){sizeof(said.worker), said.worker};
    if (t->has_nonce) {
        memcpy(said.router, t->nonce, sizeof(said.router));
        proof_sign(r->config.secret, JOIN_WORKER, &said, proof);
        m.router_nonce = (ProtobufCBinaryData){sizeof(said.router), said.router};
        m.proof = (ProtobufCBinaryData){sizeof(proof), proof};
    }
    enum rpc_code code = rpc_unary(t->client, "/tandem.worker.v1.Registry/Join", &m.base,
                                   &tandem__worker__v1__join_response__descriptor, CALL_MS, &answer, e);
    if (!code)
        code = on_answer(r, t, &said, (const Tandem__Worker__V1__JoinResponse *)answer, again_out, e);
    if (answer)
        protobuf_c_message_free_unpacked(answer, NULL);
    return code;
}

static void tell(struct registrar *r, struct joined_router *t)
{
    struct td_error e = {{0}};
    bool again = false;
    uint64_t now = clock_now(&r->clock);
    if (now < t->retry_ns)
        return;
    enum rpc_code code = ask(r, t, &again, &e);
    if (!code && again) /* once: the nonce is new now */
        code = ask(r, t, &again, &e);
    if (code && code != t->last)
        log_warn(r->config.log, "router does not take us address=%s why='%s: %s'", r->config.address,
                 rpc_code_name(code), e.text);
    t->last = code;
    if (code == RPC_ABORTED)
        t->retry_ns = now + rpc_flood_wait_ms(t->n_floods++) * NS_PER_MS;
    else
        t->n_floods = 0;
}

static void tell_all(void *arg)
{
    struct registrar *r = arg;
    for (uint32_t i = 0; i < r->n_routers; i++)
        tell(r, &r->routers[i]);
}

static enum td_status open_routers(struct registrar *r, struct td_error *e)
{
    for (const char *at = r->config.routers; at && *at;) {
        char address[128];
        size_t n = strcspn(at, ",");
        if (n >= sizeof(address) || !memchr(at, ':', n))
            return td_fail(e, TD_ERR_INVALID, "--routers: '%.*s' is not HOST:PORT or unix:PATH", (int)n, at);
        if (r->n_routers == MAX_ROUTERS)
            return td_fail(e, TD_ERR_INVALID, "--routers: at most %d", MAX_ROUTERS);
        snprintf(address, sizeof(address), "%.*s", (int)n, at);
        const struct rpc_client_config c = {.target = address,
                                            .tls = r->config.tls,
                                            .max_message_bytes = 1 << 16,
                                            .must_prove = true,
                                            .max_queued_bytes = 1 << 16,
                                            .log = r->config.log};
        enum td_status s = rpc_client_open(&c, &r->routers[r->n_routers].client, e);
        if (s)
            return s;
        r->routers[r->n_routers++].last = RPC_UNAVAILABLE; /* a router that is not up yet is no news */
        at += n + (at[n] == ',');
    }
    return TD_OK;
}

enum td_status registrar_open(const struct registrar_config *config, struct registrar **out, struct td_error *error_out)
{
    struct registrar *r = mem_zalloc(sizeof(*r));
    r->config = *config;
    clock_init_real(&r->clock);
    enum td_status s = open_routers(r, error_out);
    if (s) {
        registrar_close(r);
        return s;
    }
    uint64_t every_ms = config->every_ms ? config->every_ms : REGISTER_MS;
    if (r->n_routers)
        r->ticker = ticker_start("register", every_ms * NS_PER_MS, tell_all, r);
    *out = r;
    return TD_OK;
}

void registrar_close(struct registrar *r)
{
    if (!r)
        return;
    ticker_stop(r->ticker);
    for (uint32_t i = 0; i < r->n_routers; i++)
        rpc_client_close(r->routers[i].client);
    free(r);
}
