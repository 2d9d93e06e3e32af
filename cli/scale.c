/*
 * tandem scale, tandem drain: start and drain workers and stores while the cluster serves.
 *
 * scale tells the supervisor on this machine (tandem up) how many workers of each role and how many stores
 * there shall be, and waits until there are. drain asks the router to tell one worker, on any machine, to
 * take no new work, to finish and to end.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "admin.pb-c.h"
#include "cli/child.h"
#include "cli/admin.h"
#include "cli/cli.h"
#include "cli/rundir.h"

enum { POLL_MS = 100, CALL_MS = 5000, EXTRA_MS = 10000 };

struct scale_options {
    const char *run_dir;
    double wait_s;
};

#define AT(member) offsetof(struct scale_options, member)
static const struct option SCALE_TABLE[] = {
    {"run-dir", OPT_STRING, AT(run_dir), NULL, "DIR", 0, 0,
     "as for tandem up; default: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-UID"},
    {"wait", OPT_DOUBLE, AT(wait_s), "60", "SECONDS", 0, 86400,
     "waits until this is so; exit code 1 if it is not in time; 0: does not wait"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};
#undef AT

enum pool { PREFILL, DECODE, STORE, POOLS };
static const struct {
    const char *role;
    int least;
} POOL[POOLS] = {{"prefill", 0}, {"decode", 1}, {"store", 0}};

struct pools {
    int n[POOLS];   /* processes that are up; in a target, -1: leave as it is */
    int leaving;    /* processes that are starting or draining */
    int n_given_up; /* n_given_up of cluster.json: added processes that could not start */
    char why[256];  /* what is wrong with the last of them */
};

/* -1: there is no such pool. */
static int pool_of(const char *role, size_t len)
{
    for (int i = 0; i < POOLS; i++)
        if (strlen(POOL[i].role) == len && !memcmp(POOL[i].role, role, len))
            return i;
    return -1;
}

static void pause_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}

static bool read_pools(const struct rundir *dir, struct pools *out)
{
    char path[PATH_MAX];
    rundir_path(dir, "cluster.json", path);
    json_t *root = json_load_file(path, 0, NULL), *process;
    size_t i;
    const char *why = json_string_value(json_object_get(root, "given_up"));
    *out = (struct pools){.n_given_up = (int)json_integer_value(json_object_get(root, "n_given_up"))};
    snprintf(out->why, sizeof(out->why), "%s", why ? why : "");
    json_array_foreach(json_object_get(root, "processes"), i, process)
    {
        const char *role = json_string_value(json_object_get(process, "role")),
                   *state = json_string_value(json_object_get(process, "state"));
        int pool = role ? pool_of(role, strlen(role)) : -1;
        if (pool >= 0)
            *(state && !strcmp(state, "up") ? &out->n[pool] : &out->leaving) += 1;
    }
    json_decref(root);
    return root;
}

/* Parses "prefill=4", "decode=6" or "store=2". */
static bool parse_target(const char *text, struct pools *target)
{
    const char *number = strchr(text, '=');
    int pool = number ? pool_of(text, (size_t)(number - text)) : -1;
    char *end = NULL;
    long n = pool >= 0 ? strtol(number + 1, &end, 10) : -1;
    if (pool < 0 || !number[1] || *end || n < POOL[pool].least || n > CHILD_MOST)
        return false;
    target->n[pool] = (int)n;
    return true;
}

static bool is_met(const struct pools *target, const struct pools *now)
{
    bool met = !now->leaving;
    for (int i = 0; i < POOLS; i++)
        met &= target->n[i] < 0 || target->n[i] == now->n[i];
    return met;
}

/* n_given_up: its value in cluster.json before the supervisor was asked. */
static int wait_for(const struct rundir *dir, const struct pools *target, int n_given_up, double wait_s)
{
    struct pools now = {{0}};
    for (double waited = 0; waited <= wait_s; waited += POLL_MS * 1e-3) {
        pause_ms(POLL_MS);
        if (read_pools(dir, &now) && is_met(target, &now)) {
            fprintf(stderr, "prefill=%d decode=%d store=%d\n", now.n[PREFILL], now.n[DECODE], now.n[STORE]);
            return 0;
        }
        if (now.n_given_up > n_given_up)
            return cli_fail("scale", "prefill=%d decode=%d store=%d: %s; %s/logs has more", now.n[PREFILL],
                            now.n[DECODE], now.n[STORE], now.why, dir->path);
    }
    return wait_s > 0
               ? cli_fail("scale",
                          "prefill=%d decode=%d store=%d, and %d are still starting or draining; see %s/logs/up.log",
                          now.n[PREFILL], now.n[DECODE], now.n[STORE], now.leaving, dir->path)
               : 0;
}

int cli_scale(int argc, char **argv)
{
    struct scale_options o = {0};
    struct td_error e = {{0}};
    struct rundir dir;
    struct pools target = {.n = {-1, -1, -1}}, now;
    const char **rest = mem_array((size_t)argc, sizeof(*rest));
    char text[32];
    int exit_code = 0, n_rest;
    bool run = cli_options("scale", "[prefill=N] [decode=N] [store=N] [options]",
                           "Sets how many workers of each role and how many stores the cluster of tandem up has: "
                           "starts or drains processes.",
                           SCALE_TABLE, argc, argv, &o, rest, &n_rest, &exit_code);
    if (run && !n_rest) {
        exit_code = cli_usage("scale", "give prefill=N, decode=N or store=N");
        run = false;
    }
    for (int i = 0; run && i < n_rest; i++)
        if (!parse_target(rest[i], &target)) {
            exit_code = cli_usage("scale", "'%s': expected prefill=N, 0 to %d, decode=N, 1 to %d, or store=N, 0 to %d",
                                  rest[i], CHILD_MOST, CHILD_MOST, CHILD_MOST);
            run = false;
        }
    if (run && rundir_locate(o.run_dir, &dir, &e)) {
        exit_code = cli_fail("scale", "%s", e.text);
        run = false;
    }
    pid_t owner = run ? rundir_owner(&dir) : 0;
    if (run && (owner <= 0 || !read_pools(&dir, &now))) {
        exit_code = cli_fail("scale", "no cluster runs in %s: tandem up starts one", dir.path);
        run = false;
    }
    free(rest);
    if (!run)
        return exit_code;
    snprintf(text, sizeof(text), "%d %d %d\n", target.n[PREFILL], target.n[DECODE], target.n[STORE]);
    if (rundir_write(&dir, "scale", text, &e) || kill(owner, SIGUSR1))
        return cli_fail("scale", "the supervisor %d can't be told: %s", (int)owner, e.text);
    return wait_for(&dir, &target, now.n_given_up, o.wait_s);
}

/* ------------------------------------------------------------------- drain */

struct drain_options {
    struct admin_at at;
    int64_t limit_ms;
    bool wait;
};

#define AT(member) offsetof(struct drain_options, member)
static const struct option DRAIN_TABLE[] = {
    ADMIN_OPTIONS(struct drain_options),
    {"limit", OPT_MS, AT(limit_ms), "30s", NULL, 1, 3.6e6,
     "requests that still run after this time are planned anew elsewhere"},
    {"wait", OPT_BOOL, AT(wait), "true", NULL, 0, 0, "waits until the worker has ended"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};
#undef AT

static bool is_data(ProtobufCBinaryData b, const char *text)
{
    return b.len == strlen(text) && !memcmp(b.data, text, b.len);
}

/* 1: the router knows the worker; 0: it does not; -1: the router did not answer. */
static int is_known(struct rpc_client *c, const char *name)
{
    const Tandem__Admin__V1__StatusRequest request = TANDEM__ADMIN__V1__STATUS_REQUEST__INIT;
    struct td_error text;
    ProtobufCMessage *m = NULL;
    int known = 0;
    if (rpc_unary(c, "/tandem.admin.v1.Admin/Status", &request.base, &tandem__admin__v1__status_response__descriptor,
                  CALL_MS, &m, &text))
        return -1;
    const Tandem__Admin__V1__StatusResponse *s = (const Tandem__Admin__V1__StatusResponse *)m;
    for (size_t i = 0; i < s->n_workers; i++)
        known |= is_data(s->workers[i]->name, name);
    protobuf_c_message_free_unpacked(m, NULL);
    return known;
}

static int wait_gone(struct rpc_client *c, const char *name, int64_t limit_ms)
{
    for (int64_t ms = 0; ms < limit_ms + EXTRA_MS; ms += POLL_MS) {
        if (!is_known(c, name)) {
            fprintf(stderr, "%s has ended\n", name);
            return 0;
        }
        pause_ms(POLL_MS);
    }
    return cli_fail("drain", "%s has not ended yet", name);
}

int cli_drain(int argc, char **argv)
{
    struct drain_options o = {0};
    struct td_error text = {{0}};
    Tandem__Admin__V1__DrainRequest request = TANDEM__ADMIN__V1__DRAIN_REQUEST__INIT;
    ProtobufCMessage *m = NULL;
    const char **rest = mem_array((size_t)argc, sizeof(*rest)), *name;
    int exit_code, n_rest;
    bool run = cli_options("drain", "WORKER [options]",
                           "Drains a worker: it takes no new work, finishes what it has, and ends.", DRAIN_TABLE, argc,
                           argv, &o, rest, &n_rest, &exit_code);
    run = run && cli_words("drain", "WORKER, a name that tandem status shows,", rest, n_rest, 1, 1, &exit_code);
    name = run ? rest[0] : NULL;
    free(rest);
    if (!name)
        return exit_code;
    struct rpc_client *c = admin_connect("drain", &o.at);
    if (!c)
        return 1;
    request.name = rpc_data(name);
    request.limit_ms = (uint32_t)o.limit_ms;
    enum rpc_code code = rpc_unary(c, "/tandem.admin.v1.Admin/Drain", &request.base,
                                   &tandem__admin__v1__drain_response__descriptor, CALL_MS, &m, &text);
    if (m)
        protobuf_c_message_free_unpacked(m, NULL);
    exit_code = code ? admin_fail("drain", &o.at, code, text.text) : o.wait ? wait_gone(c, name, o.limit_ms) : 0;
    rpc_client_close(c);
    return exit_code;
}
