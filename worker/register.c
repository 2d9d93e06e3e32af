#include "worker/register.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "admin.pb-c.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/ticker.h"
#include "worker/link.h"

enum { MAX_ROUTERS = 16, CALL_MS = 1000 };

struct registrar {
    struct registrar_config config;
    struct rpc_client *routers[MAX_ROUTERS];
    enum rpc_code last[MAX_ROUTERS]; /* how the last call ended; only changes are logged */
    uint32_t n_routers;
    struct ticker *ticker;
};

static void tell(struct registrar *r, uint32_t i)
{
    Tandem__Admin__V1__JoinRequest m = TANDEM__ADMIN__V1__JOIN_REQUEST__INIT;
    uint8_t proof[LINK_PROOF_BYTES];
    struct td_error e = {{0}};
    ProtobufCMessage *answer = NULL;
    link_proof(r->config.secret, r->config.incarnation, proof);
    m.address = rpc_data(r->config.address);
    m.incarnation = r->config.incarnation;
    m.secret_proof = (ProtobufCBinaryData){sizeof(proof), proof};
    enum rpc_code code = rpc_unary(r->routers[i], "/tandem.admin.v1.Admin/Join", &m.base,
                                   &tandem__admin__v1__join_response__descriptor, CALL_MS, &answer, &e);
    if (answer)
        protobuf_c_message_free_unpacked(answer, NULL);
    if (code && code != r->last[i])
        log_warn(r->config.log, "router does not take us address=%s why='%s: %s'", r->config.address,
                 rpc_code_name(code), e.text);
    r->last[i] = code;
}

static void tell_all(void *arg)
{
    struct registrar *r = arg;
    for (uint32_t i = 0; i < r->n_routers; i++)
        tell(r, i);
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
        const struct rpc_client_config c = {
            .target = address, .max_message_bytes = 1 << 16, .max_queued_bytes = 1 << 16, .log = r->config.log};
        enum td_status s = rpc_client_open(&c, &r->routers[r->n_routers], e);
        if (s)
            return s;
        r->last[r->n_routers++] = RPC_UNAVAILABLE; /* a router that is not up yet is no news */
        at += n + (at[n] == ',');
    }
    return TD_OK;
}

enum td_status registrar_open(const struct registrar_config *config, struct registrar **out, struct td_error *error_out)
{
    struct registrar *r = mem_zalloc(sizeof(*r));
    r->config = *config;
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
        rpc_client_close(r->routers[i]);
    free(r);
}
