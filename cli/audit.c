/*
 * tandem audit: accounts for every page and block of the cluster. Exit code 0: everything is accounted for;
 * 1: something is not, or the router could not be asked.
 *
 * --json prints one object: {"ok", "running", "workers": [{"name", "role", "pages": {...}, "blocks",
 * "index_blocks", "legs", "leases", "pulls", "problems": [TEXT...]}]}
 */
#include <inttypes.h>
#include <stdio.h>

#include "admin.pb-c.h"
#include "cli/admin.h"
#include "cli/cli.h"
#include "cli/table.h"

enum { CALL_MS = 10000 };

typedef Tandem__Admin__V1__AuditResponse audit_response;
typedef Tandem__Admin__V1__WorkerAudit worker_audit;

struct audit_options {
    struct admin_at at;
    bool json;
};

#define AT(member) offsetof(struct audit_options, member)
static const struct option TABLE[] = {
    ADMIN_OPTIONS(struct audit_options),
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "prints one JSON object"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

static bool is_ok(const audit_response *a)
{
    for (size_t i = 0; i < a->n_workers; i++)
        if (a->workers[i]->n_problems)
            return false;
    return true;
}

static json_t *json_worker(const worker_audit *w)
{
    const Tandem__Admin__V1__Pages *p = w->pages;
    json_t *problems = json_array();
    for (size_t i = 0; i < w->n_problems; i++)
        json_array_append_new(problems, ask_text_json(w->problems[i].data, w->problems[i].len));
    return json_pack("{s:o, s:o, s:{s:I, s:I, s:I, s:I, s:I, s:I}, s:I, s:I, s:I, s:I, s:I, s:o}", "name",
                     ask_text_json(w->name.data, w->name.len), "role", ask_text_json(w->role.data, w->role.len),
                     "pages", "free", (json_int_t)p->free, "cached", (json_int_t)p->cached, "held", (json_int_t)p->held,
                     "leased", (json_int_t)p->leased, "quarantined", (json_int_t)p->quarantined, "total",
                     (json_int_t)p->total, "blocks", (json_int_t)w->blocks, "index_blocks", (json_int_t)w->index_blocks,
                     "legs", (json_int_t)w->legs, "leases", (json_int_t)w->leases, "pulls", (json_int_t)w->pulls,
                     "problems", problems);
}

static void print_json(const audit_response *a)
{
    json_t *workers = json_array();
    for (size_t i = 0; i < a->n_workers; i++)
        json_array_append_new(workers, json_worker(a->workers[i]));
    cli_print_json(json_pack("{s:b, s:I, s:o}", "ok", is_ok(a), "running", (json_int_t)a->running, "workers", workers));
}

static void print_table(const audit_response *a)
{
    static const char *const TITLES[] = {"NAME",  "ROLE",   "FREE",     "CACHED", "HELD",   "LEASED", "QUAR",
                                         "TOTAL", "BLOCKS", "IN INDEX", "LEGS",   "LEASES", "PULLS"};
    struct table t;
    table_init(&t, sizeof(TITLES) / sizeof(TITLES[0]), 3, TITLES);
    for (size_t i = 0; i < a->n_workers; i++) {
        const worker_audit *w = a->workers[i];
        const Tandem__Admin__V1__Pages *p = w->pages;
        table_cell(&t, "%.*s", (int)w->name.len, (const char *)w->name.data);
        table_cell(&t, "%.*s", (int)w->role.len, (const char *)w->role.data);
        const uint64_t numbers[] = {p->free,   p->cached,       p->held, p->leased, p->quarantined, p->total,
                                    w->blocks, w->index_blocks, w->legs, w->leases, w->pulls};
        for (size_t j = 0; j < sizeof(numbers) / sizeof(numbers[0]); j++)
            table_cell(&t, "%" PRIu64, numbers[j]);
    }
    table_print(&t, stdout);
    table_fini(&t);
    for (size_t i = 0; i < a->n_workers; i++)
        for (size_t j = 0; j < a->workers[i]->n_problems; j++)
            printf("PROBLEM %.*s: %.*s\n", (int)a->workers[i]->name.len, (const char *)a->workers[i]->name.data,
                   (int)a->workers[i]->problems[j].len, (const char *)a->workers[i]->problems[j].data);
    printf("%s; %u requests running\n",
           is_ok(a) ? "every page and block is accounted for" : "NOT everything is accounted for", a->running);
}

int cli_audit(int argc, char **argv)
{
    struct audit_options o = {0};
    struct td_error text = {{0}};
    ProtobufCMessage *m = NULL;
    int exit_code;
    if (!cli_options("audit", "[options]", "Accounts for every KV page and block of the cluster.", TABLE, argc, argv,
                     &o, NULL, NULL, &exit_code))
        return exit_code;
    struct rpc_client *c = admin_connect("audit", &o.at);
    if (!c)
        return 1;
    const Tandem__Admin__V1__AuditRequest request = TANDEM__ADMIN__V1__AUDIT_REQUEST__INIT;
    enum rpc_code code = rpc_unary(c, "/tandem.admin.v1.Admin/Audit", &request.base,
                                   &tandem__admin__v1__audit_response__descriptor, CALL_MS, &m, &text);
    if (code) {
        exit_code = admin_fail("audit", &o.at, code, text.text);
    } else {
        const audit_response *a = (const audit_response *)m;
        o.json ? print_json(a) : print_table(a);
        exit_code = is_ok(a) ? 0 : 1;
        protobuf_c_message_free_unpacked(m, NULL);
    }
    rpc_client_close(c);
    return exit_code;
}
