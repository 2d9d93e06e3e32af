/* UCX as the transport and the bench's bare loop use it: settings, contexts, workers, endpoints, and which
 * transports an endpoint uses. */
#include "transfer/wire_ucx.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Newer releases have inline assembly in these headers; standard C has no `asm`. */
#define asm __asm__
#include <ucs/config/global_opts.h>
#include <ucs/debug/log_def.h>
#undef asm

#include "base/log.h"
#include "base/process.h"
#include "transfer/netaddr.h"
#include "transfer/wire.h"

#define TCP_SEGMENT "1M" /* a part fits into one segment (wire_ucx.c) */

enum td_status wire_ucx_convert(ucs_status_t s)
{
    switch (s) {
    case UCS_OK:
        return TD_OK;
    case UCS_INPROGRESS:
        return TD_NOT_YET;
    case UCS_ERR_NO_MEMORY:
        return TD_ERR_NO_MEMORY;
    case UCS_ERR_INVALID_PARAM:
    case UCS_ERR_INVALID_ADDR:
        return TD_ERR_INVALID;
    case UCS_ERR_CANCELED:
        return TD_ERR_CANCELLED;
    case UCS_ERR_UNSUPPORTED:
        return TD_ERR_UNSUPPORTED;
    case UCS_ERR_MESSAGE_TRUNCATED:
        return TD_ERR_PROTOCOL;
    default:
        return TD_ERR_PEER_LOST;
    }
}

/* -------------------------------------------------------- once per process */

/* UCX writes its log to stdout, where answers belong. Errors go to stderr instead, the rest nowhere. */
__attribute__((format(printf, 6, 0))) static ucs_log_func_rc_t log_handler(const char *file, unsigned line,
                                                                           const char *function, ucs_log_level_t level,
                                                                           const ucs_log_component_config_t *component,
                                                                           const char *message, va_list args)
{
    static const struct log LOG = {.who = "ucx", .level = LOG_WARN};
    (void)function;
    (void)component;
    if (level > UCS_LOG_LEVEL_ERROR)
        return UCS_LOG_FUNC_RC_STOP;
    char text[512];
    vsnprintf(text, sizeof(text), message, args);
    const char *base = strrchr(file, '/');
    /* The end of a peer appears here as an error. The protocol decides what it means, and logs it. */
    log_write(&LOG, level == UCS_LOG_LEVEL_FATAL ? LOG_ERROR : LOG_WARN, "%s at=%s:%u", text, base ? base + 1 : file,
              line);
    return UCS_LOG_FUNC_RC_STOP;
}

/* Options of the single transports are set in the environment, because ucp_config_modify accepts their
 * names and ignores them. Variables that the user has set keep their values. TCP_CONN_NB: else a connect() of
 * UCX's blocks the thread, and one that is refused at once may end the process (docs/security.md). */
static void process_setup(void)
{
    static const char *const ENV[][2] = {{"UCX_LOG_LEVEL", "error"},
                                         {"UCX_ERROR_SIGNALS", ""},
                                         {"UCX_MEM_MMAP_HOOK_MODE", "none"},
                                         {"UCX_WARN_UNUSED_ENV_VARS", "n"},
                                         {"UCX_POSIX_ERROR_HANDLING", "y"},
                                         {"UCX_TCP_CM_REUSEADDR", "y"},
                                         {"UCX_POSIX_FIFO_SIZE", "128"},
                                         {"UCX_POSIX_SEG_SIZE", "32768"},
                                         {"UCX_POSIX_RX_BUFS_GROW", "32"},
                                         {"UCX_TCP_PUT_ENABLE", "n"},
                                         {"UCX_TCP_TX_SEG_SIZE", TCP_SEGMENT},
                                         {"UCX_TCP_RX_SEG_SIZE", TCP_SEGMENT},
                                         {"UCX_TCP_TX_BUFS_GROW", "2"},
                                         {"UCX_TCP_RX_BUFS_GROW", "2"},
                                         {"UCX_TCP_CONN_NB", "y"}};
    for (size_t i = 0; i < sizeof(ENV) / sizeof(ENV[0]); i++)
        setenv(ENV[i][0], ENV[i][1], 0);
    process_raise_file_limit();
    ucs_log_push_handler(log_handler);
    /* libucs read the environment when it was loaded, long before setenv above. */
    if (!strcmp(getenv("UCX_LOG_LEVEL"), "error"))
        ucs_global_opts_set_value("LOG_LEVEL", "error");
}

void wire_ucx_setup(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, process_setup);
}

/* ------------------------------------------------------- lists of transports */

/* Names in UCX_TLS that reach no other host. Of these the first ones carry messages through shared memory. */
static const char *const LOCAL[] = {"posix", "sysv", "xpmem", "mm",        "sm",       "shm",     "cma",
                                    "knem",  "self", "cuda",  "cuda_copy", "cuda_ipc", "gdr_copy"};
enum { N_SHM = 6 };

/* Looks at the name that begins at *at, and moves on to the next one. False: the list has ended. */
static bool next_name(const char **at, const char **name_out, size_t *len_out, uint16_t *flag_out)
{
    if (!**at)
        return false;
    *name_out = *at;
    *len_out = strcspn(*at, ",");
    *at += *len_out + (*(*at + *len_out) == ',');
    *flag_out = WIRE_UCX_NETWORKS; /* also for names that are not known here, and for "^name" */
    for (size_t i = 0; i < sizeof(LOCAL) / sizeof(LOCAL[0]); i++)
        if (strlen(LOCAL[i]) == *len_out && !memcmp(LOCAL[i], *name_out, *len_out))
            *flag_out = i < N_SHM ? WIRE_UCX_SHM : 0;
    return true;
}

uint16_t wire_ucx_usable(const char *list)
{
    uint16_t usable = 0, flag;
    const char *name;
    size_t len;
    while (next_name(&list, &name, &len, &flag))
        usable |= flag;
    return usable;
}

enum td_status wire_ucx_check(const char *list, bool is_trusted_network, bool encrypts, struct td_error *error_out)
{
    const char *at = list, *name;
    size_t len;
    uint16_t flag;
    while (next_name(&at, &name, &len, &flag)) {
        if (flag & WIRE_UCX_NETWORKS && !is_trusted_network)
            return td_fail(
                error_out, TD_ERR_INVALID,
                "--transports %s: whoever reaches UCX's transport %.*s can write into this process's memory; "
                "it needs --trusted-network",
                list, (int)len, name);
        if (flag & WIRE_UCX_NETWORKS && encrypts)
            return td_fail(
                error_out, TD_ERR_INVALID,
                "--kv-encrypt: UCX's transport %.*s of --transports %s does not encrypt; leave one of them out",
                (int)len, name, list);
    }
    return TD_OK;
}

/* ------------------------------------------------------------------ context */

/* Names the network device and, for RDMA, the card behind it. */
static void name_devices(const char *transports, const char *device, char *out, size_t out_bytes)
{
    static const char *const RDMA[] = {"rc", "dc", "ud", "ib", "all"};
    char card[64];
    bool is_rdma = false;
    for (size_t i = 0; i < sizeof(RDMA) / sizeof(RDMA[0]); i++)
        is_rdma |= strstr(transports, RDMA[i]) != NULL;
    is_rdma = is_rdma && netaddr_rdma_device("/sys", device, card);
    snprintf(out, out_bytes, "%s%s%s", device, is_rdma ? "," : "", is_rdma ? card : "");
}

static enum td_status apply_config(ucp_config_t *c, const char *transports, const char *device,
                                   struct td_error *error_out)
{
    char devices[160];
    name_devices(transports, device, devices, sizeof(devices));
    const char *const options[][2] = {{"TLS", transports},
                                      {"MAX_RNDV_LANES", "1"},
                                      {"RNDV_SCHEME", "get_zcopy"},
                                      {"ZCOPY_THRESH", "inf"},
                                      {"NET_DEVICES", devices}};
    for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++) {
        char variable[32];
        snprintf(variable, sizeof(variable), "UCX_%s", options[i][0]);
        /* The operator's variable wins, except UCX_TLS: for that there is --transports. */
        if (i && getenv(variable))
            continue;
        ucs_status_t s = ucp_config_modify(c, options[i][0], options[i][1]);
        if (s != UCS_OK)
            return td_fail(error_out, TD_ERR_INVALID, "UCX option %s=%s: %s", options[i][0], options[i][1],
                           ucs_status_string(s));
    }
    return TD_OK;
}

enum td_status wire_ucx_context_open(const char *transports, const char *device, ucp_context_h *out,
                                     struct td_error *error_out)
{
    ucp_config_t *c = NULL;
    ucs_status_t s = ucp_config_read(NULL, NULL, &c);
    if (s != UCS_OK)
        return td_fail(error_out, TD_ERR_IO, "UCX configuration: %s", ucs_status_string(s));
    enum td_status st = apply_config(c, transports, device, error_out);
    if (!st) {
        ucp_params_t p = {.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED,
                          .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
                          .mt_workers_shared = 1};
        s = ucp_init(&p, c, out);
        if (s != UCS_OK)
            st = td_fail(error_out, TD_ERR_IO, "UCX with transports %s on %s: %s", transports, device,
                         ucs_status_string(s));
    }
    ucp_config_release(c);
    return st;
}

/* ----------------------------------------------------- workers and endpoints */

enum td_status wire_ucx_worker_open(ucp_context_h context, ucp_worker_h *out, int *fd_out)
{
    ucp_worker_params_t p = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                             .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    ucp_worker_attr_t attr = {.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER};
    ucp_worker_h worker;
    if (ucp_worker_create(context, &p, &worker) != UCS_OK)
        return TD_ERR_IO;
    bool ok = ucp_worker_query(worker, &attr) == UCS_OK && attr.max_am_header >= WIRE_HEADER_MAX &&
              ucp_worker_get_efd(worker, fd_out) == UCS_OK;
    if (!ok) {
        ucp_worker_destroy(worker);
        return TD_ERR_IO;
    }
    *out = worker;
    return TD_OK;
}

ucs_status_t wire_ucx_endpoint_open(ucp_worker_h worker, const uint8_t *address, ucp_err_handler_cb_t on_error,
                                    void *arg, ucp_ep_h *out)
{
    ucp_ep_params_t p = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLER |
                                       UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
                         .address = (const ucp_address_t *)address,
                         .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                         .err_handler = {.cb = on_error, .arg = arg}};
    return ucp_ep_create(worker, &p, out);
}

/* ---------------------------------------------------------- what is in use */

static void add_transport(char *out, uint32_t out_bytes, const char *name, size_t len)
{
    char one[64];
    snprintf(one, sizeof(one), "%.*s", (int)len, name);
    char *dot = strrchr(one, '.'); /* cuts off the path index of the device */
    if (dot)
        *dot = 0;
    char *memory = strstr(one, "/memory"); /* cuts off the device name of shared memory */
    if (memory)
        *memory = 0;
    if (strstr(out, one))
        return;
    size_t used = strlen(out);
    snprintf(out + used, out_bytes - used, "%s%s", used ? "," : "", one);
}

/* Lines look like "#   lane[0]:  1:posix/memory.0 md[1]  -> md[1]/posix/... am am_bw#0". Lanes that carry
 * messages (am) are listed. */
void wire_ucx_transport(ucp_ep_h ep, char *out, uint32_t out_bytes)
{
    char *text = NULL;
    size_t size = 0;
    out[0] = 0;
    FILE *f = ep ? open_memstream(&text, &size) : NULL;
    if (!f)
        return;
    ucp_ep_print_info(ep, f);
    fclose(f);
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char *lane = strstr(line, "lane[");
        char *name = lane ? strchr(lane + 8, ':') : NULL;
        if (name && strstr(name, " am"))
            add_transport(out, out_bytes, name + 1, strcspn(name + 1, " "));
    }
    free(text);
}
