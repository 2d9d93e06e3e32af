/*
 * tandem up, tandem down: a cluster on this machine, as real processes under one supervisor.
 *
 * This file turns options into command lines. rundir.c keeps a second cluster out of the same directory, and
 * supervise.c runs the processes. An option that was not given is not passed on, so that TANDEM_PREFILL_*,
 * TANDEM_DECODE_*, TANDEM_KVSTORE_* and TANDEM_ROUTER_* in the environment still count. Secret and cache key
 * are passed in the environment, because every user can read command lines.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/rundir.h"
#include "cli/supervise.h"
#include "cli/up_devices.h"
#include "cli/up_memory.h"
#include "proto/wire/block_header.h"
#include "router/socket.h"
#include "transfer/netaddr.h"
#include "worker/geometry.h"
#include "sched/policy.h"

enum { DOWN_MS = SUPERVISE_STOP_MS + 10000, DOWN_POLL_MS = 20, MAX_CHILDREN = 3 * CHILD_MOST + 2 };

struct up_options {
    const char *model, *dummy, *chat_template, *run_dir, *store_dir, *listen, *http, *plan, *transports, *isa,
        *numerics, *weights, *kv_dtype, *device, *invariant, *lora, *rank_devices, *log_level, *store_codec;
    int64_t n_prefill, n_decode, n_stores, threads, block_tokens, pool_bytes, pages, max_context, max_batch,
        chunk_tokens, silence_ms, deaf_ms, n_tensor, n_pipeline;
    int64_t store_dram, store_ssd;
    const char *packed_cache;
    bool store, detach, faults, no_packed_cache, is_trusted_network, encrypts;
};

#define AT(member) offsetof(struct up_options, member)
static const struct option TABLE[] = {
    {"model", OPT_STRING, AT(model), NULL, "DIR", 0, 0, "Hugging Face model directory"},
    {"dummy", OPT_STRING, AT(dummy), NULL, "DIMS", 0, 0,
     "workers make up weights of these dimensions, as tandem-decode --dummy; DIR gives the router's tokenizer, with "
     "the same vocabulary"},
    {"chat-template", OPT_STRING, AT(chat_template), NULL, "FILE", 0, 0,
     "chat template (Jinja) instead of the model's own"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Processes"},
    {"prefill", OPT_INT, AT(n_prefill), "1", NULL, 0, 16, "prefill workers"},
    {"decode", OPT_INT, AT(n_decode), "1", NULL, 1, 16, "decode workers"},
    {"store", OPT_BOOL, AT(store), "true", NULL, 0, 0, "runs KV stores; --no-store: none"},
    {"stores", OPT_INT, AT(n_stores), "1", NULL, 1, 16, "number of stores, over which prefixes are spread"},
    {"run-dir", OPT_STRING, AT(run_dir), NULL, "DIR", 0, 0,
     "run directory with pid, logs, secret and store; default: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-UID"},
    {"detach", OPT_BOOL, AT(detach), NULL, NULL, 0, 0, "returns when the cluster is up; tandem down ends it"},
    {"listen", OPT_ADDRESS, AT(listen), CLI_DEFAULT_ROUTER, "HOST:PORT", 0, 0,
     "address of the client API; port 0 picks one"},
    {"http", OPT_ADDRESS, AT(http), CLI_DEFAULT_HTTP, "none|HOST:PORT", 0, 0,
     "address of the HTTP API (OpenAI's, by tandem-gateway); port 0 picks one; none: no gateway"},
    {"log-level", OPT_CHOICE, AT(log_level), NULL, "error|warn|info|debug", 0, 0, "log level of all processes"},
    {"deaf-ms", OPT_MS, AT(deaf_ms), "30s", NULL, 0, 3.6e6,
     "a process that lives and answers no health check for this long is started again; 0: never"},
    {"faults", OPT_BOOL, AT(faults), NULL, NULL, 0, 0,
     "allows tandem replay --at to set faults of workers and stores while they run"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Compute"},
    {"threads", OPT_INT, AT(threads), "0", NULL, 0, 1024,
     "compute threads, divided among the workers; 0: one for each usable CPU"},
    {"isa", OPT_CHOICE, AT(isa), NULL, "auto|plain|avx2|avx512", 0, 0, "instruction set of the kernels"},
    {"numerics", OPT_CHOICE, AT(numerics), NULL, "auto|f32|bf16", 0, 0, "type of activations"},
    {"weights", OPT_CHOICE, AT(weights), NULL, K_WEIGHTS_NAMES, 0, 0, "format of large matrices"},
    {"lora", OPT_STRING, AT(lora), NULL, "NAME=DIR,...", 0, 0, "adapters that requests may name, as PEFT saves them"},
    {"chunk-tokens", OPT_INT, AT(chunk_tokens), NULL, NULL, 0, 65536, "most prompt tokens of one sequence in a step"},
    {"max-batch", OPT_INT, AT(max_batch), NULL, NULL, 0, 4096, "most sequences computed together"},
    {"max-context", OPT_INT, AT(max_context), NULL, NULL, 0, 1 << 24, "most tokens of prompt and answer"},
    {"packed-cache", OPT_STRING, AT(packed_cache), NULL, "DIR", 0, 0,
     "directory of packed weights that all workers map; default: $XDG_CACHE_HOME/tandem, else ~/.cache/tandem"},
    {"no-packed-cache", OPT_BOOL, AT(no_packed_cache), NULL, NULL, 0, 0, "each worker packs the weights for itself"},
    {"plan", OPT_CHOICE, AT(plan), NULL, PLAN_FORCE_NAMES, 0, 0, "forces every placement"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "KV"},
    {"kv-dtype", OPT_CHOICE, AT(kv_dtype), NULL, "auto|f32|f16|bf16|fp8", 0, 0, "type of the KV cache"},
    {"device", OPT_STRING, AT(device), NULL, "cpu|cuda|cuda:N", 0, 0,
     "device on which the workers compute; cuda: each rank of each worker on one of its own; cuda:N: all on that one"},
    {"batch-invariant", OPT_CHOICE, AT(invariant), NULL, "on|off", 0, 0, "cuda, bf16: the same bits in any batch"},
    {"tensor-parallel", OPT_INT, AT(n_tensor), NULL, NULL, 0, K_MAX_RANKS, "ranks of a worker that divide every layer"},
    {"pipeline-parallel", OPT_INT, AT(n_pipeline), NULL, NULL, 0, K_MAX_RANKS,
     "stages of a worker, dividing the layers"},
    {"rank-devices", OPT_CHOICE, AT(rank_devices), NULL, "next|same", 0, 0,
     "devices of a worker's ranks: from --device on (next), or all on that one (same)"},
    {"block-tokens", OPT_INT, AT(block_tokens), NULL, NULL, 0, 256, "tokens of a page and of a block"},
    {"pool-bytes", OPT_BYTES, AT(pool_bytes), NULL, NULL, 0, 1e15,
     "memory of each worker for KV pages; default: 4 longest contexts, at most a quarter of the available memory for "
     "all workers together; on a device --max-batch of them, at most half, and what fits there"},
    {"pages", OPT_INT, AT(pages), NULL, NULL, 0, 4e9, "KV pages of each worker; 0: as many as --pool-bytes hold"},
    {"transports", OPT_STRING, AT(transports), NULL, "LIST", 0, 0,
     "how KV travels: auto (TCP, on one host a mapped arena), tcp, ucx (shared memory), or a UCX_TLS list"},
    {"trusted-network", OPT_BOOL, AT(is_trusted_network), NULL, NULL, 0, 0,
     "allows RDMA and UCX's tcp in --transports: whoever reaches them can write into a worker's memory"},
    {"kv-encrypt", OPT_BOOL, AT(encrypts), NULL, NULL, 0, 0, "encrypts KV transfers over TCP"},
    {"silence-ms", OPT_MS, AT(silence_ms), NULL, NULL, 0, 3.6e6, "silence after which a process counts as dead"},
    {"store-dram", OPT_BYTES, AT(store_dram), NULL, NULL, 0, 1e15,
     "memory of each store; default: 16 longest contexts, at most an eighth of the available memory for all stores "
     "together"},
    {"store-ssd", OPT_BYTES, AT(store_ssd), NULL, NULL, 0, 1e15, "most disk space of each store"},
    {"store-codec", OPT_CHOICE, AT(store_codec), NULL, BLOCK_CODEC_NAMES, 0, 0, "codec of blocks on disk"},
    {"store-dir", OPT_STRING, AT(store_dir), NULL, "DIR", 0, 0,
     "directory of the store, and DIR-1, DIR-2, ... of further ones; default: store/ in the run directory"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

/* Which processes get an option: bits of child roles. */
enum {
    ROUTER = 1 << CHILD_ROUTER,
    WORKERS = 1 << CHILD_PREFILL | 1 << CHILD_DECODE,
    STORE = 1 << CHILD_STORE,
    GATEWAY = 1 << CHILD_GATEWAY,
};

static const struct {
    const char *name;
    size_t offset;
    unsigned roles;
    bool text;
} PASSED[] = {
    {"model", AT(model), ROUTER | WORKERS | STORE, true},
    {"dummy", AT(dummy), WORKERS | STORE, true},
    {"chat-template", AT(chat_template), ROUTER, true},
    {"plan", AT(plan), ROUTER, true},
    {"log-level", AT(log_level), ROUTER | WORKERS | STORE | GATEWAY, true},
    {"isa", AT(isa), WORKERS, true},
    {"numerics", AT(numerics), WORKERS | STORE, true},
    {"weights", AT(weights), WORKERS, true},
    {"lora", AT(lora), WORKERS, true},
    {"packed-cache", AT(packed_cache), WORKERS, true},
    {"kv-dtype", AT(kv_dtype), WORKERS | STORE, true},
    {"batch-invariant", AT(invariant), WORKERS, true},
    {"tensor-parallel", AT(n_tensor), WORKERS, false},
    {"pipeline-parallel", AT(n_pipeline), WORKERS, false},
    {"rank-devices", AT(rank_devices), WORKERS, true},
    {"transports", AT(transports), WORKERS | STORE, true},
    {"block-tokens", AT(block_tokens), WORKERS | STORE, false},
    {"chunk-tokens", AT(chunk_tokens), WORKERS, false},
    {"max-batch", AT(max_batch), WORKERS, false},
    {"max-context", AT(max_context), WORKERS, false},
    {"pool-bytes", AT(pool_bytes), WORKERS, false},
    {"pages", AT(pages), WORKERS, false},
    {"silence-ms", AT(silence_ms), ROUTER | WORKERS | STORE, false},
    {"dram-bytes", AT(store_dram), STORE, false},
    {"ssd-bytes", AT(store_ssd), STORE, false},
    {"codec", AT(store_codec), STORE, true},
};

struct up {
    struct up_options options;
    struct rundir dir;
    struct child *children;
    uint32_t n_children;
    uint32_t n_devices;          /* of this host; UINT32_MAX: not known */
    uint64_t default_pool_bytes; /* pool size of workers that have none from elsewhere */
    /* report_fd: the parent of a detached supervisor waits at its other end for the cluster to be up; -1: not
     * detached. */
    int signal_fd, report_fd;
    char bin[PATH_MAX / 2]; /* directory of this program */
    char store_dir[PATH_MAX];
};

/* ----------------------------------------------------------- command lines */

static void pass_options(struct child_args *a, const struct up_options *o, enum child_role role)
{
    for (size_t i = 0; i < sizeof(PASSED) / sizeof(PASSED[0]); i++) {
        const char *at = (const char *)o + PASSED[i].offset, *text = NULL;
        int64_t number = 0;
        if (!(PASSED[i].roles >> role & 1) || (o->dummy && role != CHILD_ROUTER && PASSED[i].offset == AT(model)))
            continue;
        if (PASSED[i].text)
            memcpy(&text, at, sizeof(text));
        else
            memcpy(&number, at, sizeof(number));
        if (text)
            args_add(a, "--%s=%s", PASSED[i].name, text);
        else if (number)
            args_add(a, "--%s=%" PRId64, PASSED[i].name, number);
    }
}

/* Adds the path of a role's program: beside this program, or where a build leaves it. */
static enum td_status add_program(const struct up *u, struct child_args *a, enum child_role role, struct td_error *e)
{
    static const char *const FOLDERS[] = {"router", "prefill", "decode", "kvstore", "gateway"};
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s/tandem-%s", u->bin, FOLDERS[role]);
    if (access(path, X_OK))
        snprintf(path, sizeof(path), "%s/../%s/tandem-%s", u->bin, FOLDERS[role], FOLDERS[role]);
    if (access(path, X_OK))
        return td_fail(e, TD_ERR_NOT_FOUND, "tandem-%s is not beside this program in %s", FOLDERS[role], u->bin);
    args_add(a, "%s", path);
    return TD_OK;
}

static bool has_gateway(const struct up_options *o)
{
    return strcmp(o->http, "none") != 0;
}

/* Devices that a worker has for itself. */
static uint32_t devices_of_a_worker(const struct up_options *o)
{
    if (o->rank_devices && !strcmp(o->rank_devices, "same"))
        return 1;
    return (uint32_t)((o->n_tensor ? o->n_tensor : 1) * (o->n_pipeline ? o->n_pipeline : 1));
}

static enum td_status add_device(const struct up *u, struct child_args *a, struct td_error *e)
{
    const struct up_options *o = &u->options;
    if (!o->device || strcmp(o->device, "cuda") != 0) {
        if (o->device)
            args_add(a, "--device=%s", o->device);
        return TD_OK;
    }
    uint32_t n_ranks = devices_of_a_worker(o), device = up_devices_next(u->children, MAX_CHILDREN, n_ranks);
    args_add(a, "--device=cuda:%u", device);
    return up_devices_check(device / n_ranks + 1, n_ranks, u->n_devices, e);
}

static enum td_status fill_child(const struct up *u, struct child *c, uint32_t number, uint32_t n_threads,
                                 struct td_error *e)
{
    bool is_one = c->role == CHILD_ROUTER || c->role == CHILD_GATEWAY;
    if (is_one)
        snprintf(c->name, sizeof(c->name), "%s", child_role_name(c->role));
    else
        snprintf(c->name, sizeof(c->name), "%s-%u", child_role_name(c->role), number);
    snprintf(c->listen, sizeof(c->listen), "%s",
             c->role == CHILD_ROUTER    ? u->options.listen
             : c->role == CHILD_GATEWAY ? u->options.http
                                        : "127.0.0.1:0");
    enum td_status s = add_program(u, &c->args, c->role, e);
    args_add(&c->args, "--name=%s", c->name);
    pass_options(&c->args, &u->options, c->role);
    if (!s && WORKERS >> c->role & 1)
        s = add_device(u, &c->args, e);
    if (c->role == CHILD_ROUTER)
        args_add(&c->args, "--cluster-listen=auto"); /* for processes that tandem scale adds */
    if (c->role == CHILD_ROUTER && has_gateway(&u->options) && !getenv("TANDEM_ROUTER_TRUSTED_PROXIES"))
        args_add(&c->args, "--trusted-proxies=127.0.0.0/8,::1");
    if (c->role == CHILD_STORE)
        args_add(&c->args, number ? "--dir=%s-%u" : "--dir=%s", u->options.store_dir, number);
    if (u->options.no_packed_cache && WORKERS >> c->role & 1)
        args_add(&c->args, "--no-packed-cache");
    if (u->options.is_trusted_network && (WORKERS | STORE) >> c->role & 1)
        args_add(&c->args, "--trusted-network");
    if (u->options.encrypts && (WORKERS | STORE) >> c->role & 1)
        args_add(&c->args, "--kv-encrypt");
    if (n_threads)
        args_add(&c->args, "--threads=%u", n_threads);
    if (u->options.faults && !is_one)
        args_add(&c->args, "--faults=@%s/" RUNDIR_FAULTS "/%s", u->dir.path, c->name);
    return s;
}

static enum td_status add_child(struct up *u, enum child_role role, uint32_t number, uint32_t n_threads,
                                struct td_error *e)
{
    struct child *c = &u->children[u->n_children++];
    c->role = role;
    return fill_child(u, c, number, n_threads, e);
}

/* Makes a process that joins later. It registers with the router by itself (--routers). */
static enum td_status make_child(void *user, enum child_role role, uint32_t number, const char *router,
                                 struct child *out, struct td_error *e)
{
    const struct up *u = user;
    char socket[ROUTER_SOCKET_BYTES];
    out->role = role;
    enum td_status s = fill_child(u, out, number, role == CHILD_STORE ? 0 : 1, e);
    if (!s)
        s = router_socket(router, "cluster", socket, e);
    if (!s)
        args_add(&out->args, "--routers=%s", socket);
    return s ? s : up_memory_add(out, u->default_pool_bytes, e);
}

/* Each worker gets an equal share of the threads; the first workers get the remainder. */
static uint32_t threads_of(const struct up_options *o, uint32_t index)
{
    cpu_set_t set;
    uint32_t total = (uint32_t)o->threads, n = (uint32_t)(o->n_prefill + o->n_decode);
    if (!total)
        total = sched_getaffinity(0, sizeof(set), &set) ? 1 : (uint32_t)CPU_COUNT(&set);
    uint32_t share = total / n + (index < total % n);
    return share ? share : 1;
}

static enum td_status plan_children(struct up *u, struct td_error *e)
{
    const struct up_options *o = &u->options;
    uint32_t n_prefill = (uint32_t)o->n_prefill, n_decode = (uint32_t)o->n_decode;
    u->children = mem_array(MAX_CHILDREN, sizeof(*u->children));
    u->n_devices = up_devices_count(getenv("CUDA_VISIBLE_DEVICES"), UP_DEVICES_PROC);
    enum td_status s = TD_OK;
    if (o->device && !strcmp(o->device, "cuda"))
        s = up_devices_check(n_prefill + n_decode, devices_of_a_worker(o), u->n_devices, e);
    for (uint32_t i = 0; i < n_prefill && !s; i++)
        s = add_child(u, CHILD_PREFILL, i, threads_of(o, i), e);
    for (uint32_t i = 0; i < n_decode && !s; i++)
        s = add_child(u, CHILD_DECODE, i, threads_of(o, n_prefill + i), e);
    for (uint32_t i = 0; i < o->n_stores && o->store && !s; i++)
        s = add_child(u, CHILD_STORE, i, 0, e);
    if (!s && has_gateway(o))
        s = add_child(u, CHILD_GATEWAY, 0, 0, e);
    return s ? s : add_child(u, CHILD_ROUTER, 0, 0, e);
}

/* ------------------------------------------------------------------ checks */

/* Binds an address of the router or gateway once. They start last, so the error would otherwise come only
 * after the workers have loaded the model. */
static enum td_status check_listen(const char *option, const char *listen, struct td_error *e)
{
    struct sockaddr_storage address;
    socklen_t len;
    if (!strncmp(listen, "unix:", 5))
        return TD_OK;
    enum td_status s = netaddr_resolve(listen, &address, &len, e);
    if (s)
        return s;
    int fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd, (struct sockaddr *)&address, len))
        s = td_fail(e, TD_ERR_IO, "%s %s: %s", option, listen, strerror(errno));
    close(fd);
    return s;
}

/* Reads the model far enough to know its shape, so that a wrong directory is reported once and at once. */
static enum td_status check_model(const struct up_options *o, struct td_error *e)
{
    struct geometry g;
    const struct geometry_options geometry = {.model = o->dummy ? NULL : o->model,
                                              .dummy = o->dummy,
                                              .numerics = o->numerics ? o->numerics : "auto",
                                              .kv_dtype = o->kv_dtype ? o->kv_dtype : "auto",
                                              .device = o->device,
                                              .invariant = o->invariant,
                                              .block_tokens = o->block_tokens ? o->block_tokens : 16};
    if (!o->model)
        return td_fail(e, TD_ERR_INVALID, "--model: give the model's directory");
    if (access(o->model, R_OK))
        return td_fail(e, TD_ERR_INVALID, "--model %s: %s", o->model, strerror(errno));
    return geometry_resolve(&geometry, &g, e);
}

static enum td_status locate_program(struct up *u, struct td_error *e)
{
    ssize_t n = readlink("/proc/self/exe", u->bin, sizeof(u->bin) - 1);
    if (n <= 0)
        return td_fail(e, TD_ERR_IO, "/proc/self/exe: %s", strerror(errno));
    u->bin[n] = 0;
    *strrchr(u->bin, '/') = 0;
    return TD_OK;
}

/*
 * Both secrets are kept, so that a later cluster finds the blocks in the store's directory. The cache key
 * lies beside the blocks whose names depend on it, because the run directory may be gone after a reboot. The
 * cluster also starts if the store's directory takes no file; then block names depend on the secret.
 */
static enum td_status set_secrets(const struct up *u, struct td_error *e)
{
    static const char *const NAMES[] = {"TANDEM_ROUTER_SECRET", "TANDEM_PREFILL_SECRET", "TANDEM_DECODE_SECRET",
                                        "TANDEM_KVSTORE_SECRET"};
    char secret[RUNDIR_KEY_BYTES], cache_key[RUNDIR_KEY_BYTES];
    struct td_error why;
    enum td_status s = rundir_key(u->dir.path, "secret", secret, e);
    for (int i = 0; i < 4 && !s; i++)
        setenv(NAMES[i], secret, 1);
    if (s || !u->options.store)
        return s;
    if (rundir_key(u->options.store_dir, "cache.key", cache_key, &why))
        fprintf(stderr, "tandem up: %s\n", why.text);
    else
        setenv("TANDEM_ROUTER_CACHE_KEY", cache_key, 0);
    return TD_OK;
}

/* ------------------------------------------------------------------ detach */

/* Waits until the supervisor reports that all is up, or has ended. Passes signals on to it. Returns the exit
 * code. */
static int wait_detached(pid_t supervisor, int signal_fd, int report_fd)
{
    struct signalfd_siginfo info;
    char byte;
    for (;;) {
        struct pollfd fds[] = {{.fd = report_fd, .events = POLLIN}, {.fd = signal_fd, .events = POLLIN}};
        poll(fds, 2, -1);
        while (read(signal_fd, &info, sizeof(info)) == sizeof(info))
            if (info.ssi_signo != SIGCHLD)
                kill(supervisor, SIGTERM);
        if (fds[0].revents)
            return read(report_fd, &byte, 1) == 1 ? 0 : 1;
    }
}

/* True in the process that goes on as supervisor. */
static bool go_detached(struct up *u, int *exit_out)
{
    int fds[2];
    *exit_out = 1;
    fflush(NULL);
    pid_t pid = pipe2(fds, O_CLOEXEC) ? -1 : fork();
    if (pid < 0) {
        cli_fail("up", "--detach: %s", strerror(errno));
        return false;
    }
    if (pid) {
        close(fds[1]);
        *exit_out = wait_detached(pid, u->signal_fd, fds[0]);
        return false;
    }
    close(fds[0]);
    u->report_fd = fds[1];
    setsid();
    return true;
}

static bool on_up(void *user, const char *router)
{
    struct up *u = user;
    char log[PATH_MAX];
    printf("tandem is up: router %s", router);
    for (uint32_t i = 0; i < u->n_children; i++)
        if (u->children[i].role == CHILD_GATEWAY)
            printf(", http://%s/v1", u->children[i].listen);
    printf(" (run dir %s)\n", u->dir.path);
    fflush(stdout);
    if (u->report_fd < 0)
        return false;
    rundir_path(&u->dir, "logs/up.log", log);
    int null_fd = open("/dev/null", O_RDWR | O_CLOEXEC), log_fd = open(log, O_WRONLY | O_APPEND | O_CLOEXEC);
    dup2(null_fd, 0);
    dup2(null_fd, 1);
    dup2(log_fd, 2);
    close(null_fd);
    close(log_fd);
    (void)!write(u->report_fd, "1", 1);
    close(u->report_fd);
    return true;
}

/* ---------------------------------------------------------------- commands */

static int run_cluster(struct up *u)
{
    char tandem[PATH_MAX];
    int exit_code;
    u->signal_fd = supervise_signals();
    if (u->options.detach && !go_detached(u, &exit_code))
        return exit_code;
    rundir_set_pid(&u->dir);
    snprintf(tandem, sizeof(tandem), "/proc/self/exe");
    const struct supervise_config c = {.dir = &u->dir,
                                       .children = u->children,
                                       .n_children = u->n_children,
                                       .max_children = MAX_CHILDREN,
                                       .make = make_child,
                                       .tandem = tandem,
                                       .deaf_ms = u->options.deaf_ms,
                                       .model = u->options.model,
                                       .on_up = on_up,
                                       .user = u};
    exit_code = supervise_run(&c, u->signal_fd);
    rundir_release(&u->dir);
    return exit_code;
}

int cli_up(int argc, char **argv)
{
    struct up u = {.dir = {.lock_fd = -1}, .signal_fd = -1, .report_fd = -1};
    struct td_error e = {{0}};
    int exit_code;
    if (!cli_options(
            "up", "--model DIR [options]",
            "A cluster on this machine: router, gateway, prefill and decode workers, KV store. Ctrl-C drains and ends\n"
            "it.\n"
            "What has no option here can be set in the environment: TANDEM_PREFILL_NAME, TANDEM_DECODE_NAME,\n"
            "TANDEM_KVSTORE_NAME, TANDEM_ROUTER_NAME, TANDEM_GATEWAY_NAME.",
            TABLE, argc, argv, &u.options, NULL, NULL, &exit_code))
        return exit_code;
    enum td_status s = rundir_locate(u.options.run_dir, &u.dir, &e);
    if (!s)
        s = locate_program(&u, &e);
    if (!s)
        s = check_model(&u.options, &e);
    if (!s)
        s = rundir_take(&u.dir, &e);
    if (!s)
        s = rundir_reset_faults(&u.dir, u.options.faults, &e);
    if (!s)
        s = check_listen("--listen", u.options.listen, &e);
    if (!s && has_gateway(&u.options))
        s = check_listen("--http", u.options.http, &e);
    if (!u.options.store_dir) {
        rundir_path(&u.dir, "store", u.store_dir);
        u.options.store_dir = u.store_dir;
    }
    if (!s)
        s = plan_children(&u, &e);
    if (!s)
        s = up_memory_plan(u.children, u.n_children, &u.default_pool_bytes, &e);
    if (!s)
        s = set_secrets(&u, &e);
    exit_code = s == TD_ERR_INVALID ? cli_usage("up", "%s", e.text)
                : s                 ? cli_fail("up", "%s", e.text)
                                    : run_cluster(&u);
    if (s)
        rundir_release(&u.dir);
    for (uint32_t i = 0; u.children && i < MAX_CHILDREN; i++)
        child_free(&u.children[i]);
    free(u.children);
    return exit_code;
}

struct down_options {
    const char *run_dir;
};

static const struct option DOWN_TABLE[] = {
    {"run-dir", OPT_STRING, offsetof(struct down_options, run_dir), NULL, "DIR", 0, 0,
     "as for tandem up; default: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-UID"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

int cli_down(int argc, char **argv)
{
    struct down_options o = {0};
    struct td_error e = {{0}};
    struct rundir dir;
    int exit_code;
    if (!cli_options("down", "[options]", "Drains and ends the cluster that tandem up started on this machine.",
                     DOWN_TABLE, argc, argv, &o, NULL, NULL, &exit_code))
        return exit_code;
    if (rundir_locate(o.run_dir, &dir, &e))
        return cli_fail("down", "%s", e.text);
    pid_t pid;
    int ms = 0;
    /* The supervisor is just starting. */
    for (; (pid = rundir_owner(&dir)) < 0 && ms < DOWN_MS; ms += DOWN_POLL_MS)
        nanosleep(&(struct timespec){.tv_nsec = DOWN_POLL_MS * 1000000L}, NULL);
    if (pid < 0)
        return cli_fail("down", "%s: a supervisor holds it, but has not said who it is", dir.path);
    bool is_orphan = !pid && (pid = rundir_orphan(&dir)) > 0;
    int fd = pid ? pidfd_open(pid, 0) : -1;
    pid_t again = is_orphan ? rundir_orphan(&dir) : rundir_owner(&dir);
    if (!pid || (fd < 0 && errno == ESRCH) || (fd >= 0 && again != pid)) {
        fprintf(stderr, "nothing runs in %s\n", dir.path);
        return 0;
    }
    if (fd < 0 || pidfd_send_signal(fd, SIGTERM, NULL, 0))
        return cli_fail("down", "%s: process %d can't be told to end: %s", dir.path, (int)pid, strerror(errno));
    if (poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, DOWN_MS) != 1)
        return cli_fail("down", "%s: process %d has not ended after %d s", dir.path, (int)pid, DOWN_MS / 1000);
    fprintf(stderr, "tandem is down (run dir %s)\n", dir.path);
    return 0;
}
