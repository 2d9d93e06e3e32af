/*
 * tandem explain: what the router weighed when it placed or refused a request.
 *
 * --json prints
 *   {"decisions": [{"request_id", "workflow_id", "age_ms", "verdict", "reason", "prefill", "decode",
 *      "waited_ms", "ttft_ms", "tpot_ms", "retry_after_ms", "prompt_tokens",
 *      "candidates": [{"worker", "as", "matched_blocks", "store_blocks", "peer_blocks", "wait_ms", "load_ms",
 *                      "prefill_ms", "transfer_ms", "ttft_ms", "tpot_ms", "cost", "reason"}]}]}
 * cost is null if the worker could not take the request; reason then says why.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "admin.pb-c.h"
#include "cli/admin.h"
#include "cli/cli.h"
#include "cli/table.h"

enum { CALL_MS = 5000, SHOWN_BYTES = 128 };

typedef Tandem__Admin__V1__Decision decision;
typedef Tandem__Admin__V1__Candidate candidate;

struct explain_options {
    struct admin_at at;
    int64_t last;
    bool json;
};

#define AT(member) offsetof(struct explain_options, member)
static const struct option TABLE[] = {
    ADMIN_OPTIONS(struct explain_options),
    {"last", OPT_INT, AT(last), "1", NULL, 1, 256, "number of decisions, newest first"},
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "prints one JSON object"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

static const char *part_of(const candidate *c)
{
    return c->prefill && c->decode ? "both" : c->prefill ? "prefill" : "decode";
}

static json_t *json_data(ProtobufCBinaryData b)
{
    return ask_text_json(b.data, b.len);
}

static json_t *json_candidate(const candidate *c)
{
    return json_pack("{s:o, s:s, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:o, s:o}", "worker",
                     json_data(c->worker), "as", part_of(c), "matched_blocks", (json_int_t)c->matched_blocks,
                     "store_blocks", (json_int_t)c->store_blocks, "peer_blocks", (json_int_t)c->peer_blocks, "wait_ms",
                     c->wait_ms, "load_ms", c->load_ms, "prefill_ms", c->prefill_ms, "transfer_ms", c->transfer_ms,
                     "ttft_ms", c->ttft_ms, "tpot_ms", c->tpot_ms, "cost",
                     isfinite(c->cost) ? json_real(c->cost) : json_null(), "reason", json_data(c->reason));
}

static json_t *json_decision(const decision *d)
{
    json_t *candidates = json_array();
    for (size_t i = 0; i < d->n_candidates; i++)
        json_array_append_new(candidates, json_candidate(d->candidates[i]));
    return json_pack("{s:o, s:o, s:f, s:o, s:o, s:o, s:o, s:f, s:f, s:f, s:f, s:I, s:o}", "request_id",
                     json_data(d->request_id), "workflow_id", json_data(d->workflow_id), "age_ms", d->age_ms, "verdict",
                     json_data(d->verdict), "reason", json_data(d->reason), "prefill", json_data(d->prefill), "decode",
                     json_data(d->decode), "waited_ms", d->waited_ms, "ttft_ms", d->ttft_ms, "tpot_ms", d->tpot_ms,
                     "retry_after_ms", d->retry_after_ms, "prompt_tokens", (json_int_t)d->prompt_tokens, "candidates",
                     candidates);
}

static void print_json(const Tandem__Admin__V1__ExplainResponse *r)
{
    json_t *list = json_array();
    for (size_t i = 0; i < r->n_decisions; i++)
        json_array_append_new(list, json_decision(r->decisions[i]));
    cli_print_json(json_pack("{s:o}", "decisions", list));
}

/* A client's text without control characters, which could move the terminal's cursor. */
static const char *shown(ProtobufCBinaryData b, char out[SHOWN_BYTES])
{
    size_t n = b.len < SHOWN_BYTES ? b.len : SHOWN_BYTES - 1;
    for (size_t i = 0; i < n; i++)
        out[i] = b.data[i] < 0x20 || b.data[i] == 0x7f ? '?' : (char)b.data[i];
    out[n] = 0;
    return out;
}

static void print_head(const decision *d)
{
    char label[SHOWN_BYTES], workflow[SHOWN_BYTES];
    printf("request %s%s%s, %u tokens, %.1f s ago: ", shown(d->request_id, label),
           d->workflow_id.len ? " of workflow " : "", shown(d->workflow_id, workflow), d->prompt_tokens,
           d->age_ms * 1e-3);
    if (d->prefill.len)
        printf("%.*s, prefill %.*s, decode %.*s; waited %.1f ms, predicted TTFT %.1f ms, TPOT %.2f ms\n",
               (int)d->verdict.len, (const char *)d->verdict.data, (int)d->prefill.len, (const char *)d->prefill.data,
               (int)d->decode.len, (const char *)d->decode.data, d->waited_ms, d->ttft_ms, d->tpot_ms);
    else
        printf("refused: %.*s; predicted TTFT %.1f ms, TPOT %.2f ms, to come back after %.0f ms\n", (int)d->reason.len,
               (const char *)d->reason.data, d->ttft_ms, d->tpot_ms, d->retry_after_ms);
}

static void print_decision(const decision *d)
{
    static const char *const TITLES[] = {"WORKER",  "AS",       "MATCHED", "STORES", "PEERS", "WAIT",   "LOAD",
                                         "PREFILL", "TRANSFER", "TTFT",    "TPOT",   "COST",  "WHY NOT"};
    struct table t;
    print_head(d);
    table_init(&t, sizeof(TITLES) / sizeof(TITLES[0]), 2, TITLES);
    for (size_t i = 0; i < d->n_candidates; i++) {
        const candidate *c = d->candidates[i];
        table_cell(&t, "%.*s", (int)c->worker.len, (const char *)c->worker.data);
        table_cell(&t, "%s", part_of(c));
        table_cell(&t, "%u", c->matched_blocks);
        table_cell(&t, "%u", c->store_blocks);
        table_cell(&t, "%u", c->peer_blocks);
        const double numbers[] = {c->wait_ms, c->load_ms, c->prefill_ms, c->transfer_ms,
                                  c->ttft_ms, c->tpot_ms, c->cost};
        for (size_t j = 0; j < sizeof(numbers) / sizeof(numbers[0]); j++)
            table_cell(&t, isfinite(numbers[j]) ? "%.1f" : "-", numbers[j]);
        table_cell(&t, "%.*s", (int)c->reason.len, c->reason.len ? (const char *)c->reason.data : "");
    }
    table_print(&t, stdout);
    table_fini(&t);
}

int cli_explain(int argc, char **argv)
{
    struct explain_options o = {0};
    struct td_error text = {{0}};
    Tandem__Admin__V1__ExplainRequest request = TANDEM__ADMIN__V1__EXPLAIN_REQUEST__INIT;
    ProtobufCMessage *m = NULL;
    const char **rest = mem_array((size_t)argc, sizeof(*rest)), *label;
    int exit_code, n_rest;
    bool run = cli_options("explain", "[REQUEST] [options]",
                           "Prints what the router weighed for a request (its request_id), or for the last ones.",
                           TABLE, argc, argv, &o, rest, &n_rest, &exit_code);
    run = run && cli_words("explain", "REQUEST", rest, n_rest, 0, 1, &exit_code);
    label = run && n_rest ? rest[0] : "";
    free(rest);
    if (!run)
        return exit_code;
    struct rpc_client *c = admin_connect("explain", &o.at);
    if (!c)
        return 1;
    request.request_id = rpc_data(label);
    request.last = (uint32_t)o.last;
    enum rpc_code code = rpc_unary(c, "/tandem.admin.v1.Admin/Explain", &request.base,
                                   &tandem__admin__v1__explain_response__descriptor, CALL_MS, &m, &text);
    if (code) {
        exit_code = admin_fail("explain", &o.at, code, text.text);
    } else {
        const Tandem__Admin__V1__ExplainResponse *r = (const Tandem__Admin__V1__ExplainResponse *)m;
        exit_code = 0;
        if (o.json)
            print_json(r);
        for (size_t i = 0; i < r->n_decisions && !o.json; i++)
            print_decision(r->decisions[i]);
        if (!r->n_decisions)
            exit_code = cli_fail("explain", "no decision about '%s' is kept", label);
        protobuf_c_message_free_unpacked(m, NULL);
    }
    rpc_client_close(c);
    return exit_code;
}
