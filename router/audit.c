/*
 * The audit of a cluster: every worker and store is asked to account for its pages and blocks. Its blocks are
 * compared with the index when its answer is handled; all events that it sent before the answer are in the
 * index then.
 *
 * One audit runs at a time; a second call joins it. A peer that has not answered is asked again each second,
 * because its connection may have been lost meanwhile. If it does not answer in time, that is a problem.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "router/router_internal.h"

enum { PATIENCE_MS = 5000, ASK_AGAIN_MS = 1000, TEXT_BYTES = 200 };

struct audited { /* the account of one peer, in the form in which it is sent */
    Tandem__Admin__V1__WorkerAudit m;
    Tandem__Admin__V1__Pages pages;
    ProtobufCBinaryData *problems;
    bool has_answered;
};

struct audit {
    struct rpc_call **calls; /* calls that wait for the result; one reference each */
    uint32_t n_calls;
    uint64_t nonce, deadline_ns, ask_again_ns; /* times by router_patience() */
    struct audited *of;                        /* [n_peers], by holder */
    uint32_t n_peers;                          /* router.n_peers when the audit began */
};

static void add_problem(struct audited *a, const char *text, size_t len)
{
    char *clean = mem_zalloc(len + 1);
    rpc_text_clean(text, len, clean, len + 1);
    a->problems = mem_resize(a->problems, a->m.n_problems + 1, sizeof(*a->problems));
    a->problems[a->m.n_problems++] = (ProtobufCBinaryData){strlen(clean), (uint8_t *)clean};
    a->m.problems = a->problems;
}

/* Asks all that are connected and have not answered. */
static void ask(struct router *r, uint64_t now)
{
    struct audit *a = r->audit;
    Tandem__Worker__V1__AuditRequest question = TANDEM__WORKER__V1__AUDIT_REQUEST__INIT;
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    question.nonce = a->nonce;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_AUDIT;
    m.audit = &question;
    for (uint32_t i = 0; i < a->n_peers; i++)
        if (r->peers[i]->state == PEER_READY && !a->of[i].has_answered)
            peer_send(r->peers[i], &m);
    a->ask_again_ns = now + ASK_AGAIN_MS * NS_PER_MS;
}

static void begin(struct router *r)
{
    struct audit *a = r->audit = mem_zalloc(sizeof(*a));
    uint64_t now = router_patience(r);
    a->nonce = ++r->next_audit;
    a->deadline_ns = now + PATIENCE_MS * NS_PER_MS;
    a->n_peers = r->n_peers;
    a->of = mem_array(r->n_peers, sizeof(*a->of));
    for (uint32_t i = 0; i < r->n_peers; i++) {
        tandem__admin__v1__worker_audit__init(&a->of[i].m);
        tandem__admin__v1__pages__init(&a->of[i].pages);
        a->of[i].m.pages = &a->of[i].pages;
    }
    ask(r, now);
}

void audit_start(struct router *r, struct rpc_call *call)
{
    if (!r->audit)
        begin(r);
    r->audit->calls = mem_resize(r->audit->calls, r->audit->n_calls + 1, sizeof(call));
    r->audit->calls[r->audit->n_calls++] = rpc_call_ref(call);
    audit_tick(r, router_patience(r));
}

void audit_answered(struct peer *p, const Tandem__Worker__V1__Audit *m)
{
    struct router *r = p->router;
    if (!r->audit || m->nonce != r->audit->nonce || p->holder >= r->audit->n_peers)
        return;
    struct audited *a = &r->audit->of[p->holder];
    if (a->has_answered) /* asked again while its answer was on the way */
        return;
    uint64_t n_index, digest;
    bool is_whole = index_digest(r->index, p->holder, &n_index, &digest);
    char text[TEXT_BYTES];
    a->has_answered = true;
    a->pages.free = m->free;
    a->pages.cached = m->cached;
    a->pages.held = m->held;
    a->pages.leased = m->leased;
    a->pages.quarantined = m->quarantined;
    a->pages.total = m->total;
    a->m.blocks = m->blocks;
    a->m.index_blocks = n_index;
    a->m.legs = m->legs;
    a->m.leases = m->leases;
    a->m.pulls = m->pulls;
    for (size_t i = 0; i < m->n_problems; i++)
        add_problem(a, (const char *)m->problems[i].data, m->problems[i].len);
    if (!p->snapshot_asked && is_whole && (n_index != m->blocks || digest != m->digest)) {
        snprintf(text, sizeof(text), "the router's index has %llu blocks of it%s, it has %llu",
                 (unsigned long long)n_index, n_index == m->blocks ? ", others than these" : "",
                 (unsigned long long)m->blocks);
        add_problem(a, text, strlen(text));
    }
    audit_tick(r, router_patience(r));
}

static void audit_free(struct audit *a)
{
    for (uint32_t i = 0; i < a->n_peers; i++) {
        for (size_t j = 0; j < a->of[i].m.n_problems; j++)
            free(a->of[i].problems[j].data);
        free(a->of[i].problems);
    }
    free(a->of);
    free(a->calls);
    free(a);
}

static void tell_audit(struct router *r)
{
    static const char *const ROLES[] = {"prefill", "decode", "store"};
    struct audit *a = r->audit;
    Tandem__Admin__V1__AuditResponse answer = TANDEM__ADMIN__V1__AUDIT_RESPONSE__INIT;
    Tandem__Admin__V1__WorkerAudit **list = mem_array(a->n_peers, sizeof(*list));
    for (uint32_t i = 0; i < a->n_peers; i++) {
        struct peer *p = r->peers[i];
        if (p->state == PEER_GONE || p->drained) /* it exited in order */
            continue;
        a->of[i].m.name = rpc_data(p->name);
        a->of[i].m.role = rpc_data(ROLES[p->role]);
        if (!a->of[i].has_answered)
            add_problem(&a->of[i], "it does not answer", 18);
        list[answer.n_workers++] = &a->of[i].m;
    }
    answer.workers = list;
    answer.running = r->n_running;
    for (uint32_t i = 0; i < a->n_calls; i++) {
        rpc_call_send(a->calls[i], &answer.base);
        rpc_call_finish(a->calls[i], RPC_OK, "", 0);
        rpc_call_unref(a->calls[i]);
    }
    free(list);
    audit_free(a);
    r->audit = NULL;
}

void audit_tick(struct router *r, uint64_t now)
{
    if (!r->audit)
        return;
    bool is_awaited = false;
    for (uint32_t i = 0; i < r->audit->n_peers; i++)
        is_awaited |= !r->audit->of[i].has_answered && r->peers[i]->state == PEER_READY;
    if (!is_awaited || now >= r->audit->deadline_ns)
        tell_audit(r);
    else if (now >= r->audit->ask_again_ns)
        ask(r, now);
}

void audit_drop(struct router *r)
{
    for (uint32_t i = 0; r->audit && i < r->audit->n_calls; i++) {
        rpc_call_finish(r->audit->calls[i], RPC_UNAVAILABLE, "the router is stopping", 0);
        rpc_call_unref(r->audit->calls[i]);
    }
    if (r->audit)
        audit_free(r->audit);
    r->audit = NULL;
}
