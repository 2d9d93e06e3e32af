#include "bench/transfer_bare.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/endian.h"
#include "base/mem.h"
#include "base/thread.h"
#include "transfer/netaddr.h"
#include "transfer/slices.h"
#include "transfer/wire_ucx.h"

enum { BARE_AM = 1, BARE_HEADER = 40, BURST = 8, SLEEP_MS = 100 };
#define SPIN_NS     30000ull
#define PATIENCE_NS (20 * NS_PER_S)

/*
 * Header, 40 bytes as in the transfer protocol.   request: 0 u64 message_bytes  8 u64 window_bytes
 *                                                          16 u64 total_bytes
 *                                                 payload: 40 bytes that are not read
 */
struct order {
    uint64_t message_bytes, window_bytes, total_bytes;
};

struct bare {
    struct clock clock;
    const struct log *log;
    uint8_t *arena;
    uint64_t arena_bytes;
    char address[128];
    ucp_context_h context;
    ucp_mem_h memory;
    ucp_worker_h listen_worker, worker;
    ucp_listener_h listener;
    ucp_conn_request_h request; /* of a client that wants to connect */
    ucp_ep_h ep;
    int epoll_fd, wake_fd;
    bool is_eager, knows_eager;
    pthread_t thread;
    bool is_running;
    atomic_bool stop, is_lost;

    /* Server: the request being answered. Client: the request to be sent, under the lock. */
    struct order order;
    bool is_new;
    uint64_t at, left, in_flight;
    /* The caller waits for the end of one fetch; a queue for one number would not be simpler. */
    pthread_mutex_t lock;
    pthread_cond_t done;
};

struct bare_piece { /* one payload being sent or received */
    struct bare *b;
    uint64_t len;
    uint8_t header[BARE_HEADER];
};

static uint64_t take_place(struct bare *b, uint64_t len)
{
    uint64_t at = b->at + len <= b->arena_bytes ? b->at : 0;
    b->at = at + len;
    return at;
}

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    struct bare *b = arg;
    (void)ep;
    (void)status;
    atomic_store(&b->is_lost, true);
}

/* ------------------------------------------------------------------- sending */

static void sent(void *request, ucs_status_t status, void *user_data)
{
    struct bare_piece *p = user_data;
    (void)status;
    p->b->in_flight -= p->len;
    free(p);
    if (request)
        ucp_request_free(request);
}

static void send_one(struct bare *b, const void *header, const void *payload, uint64_t len)
{
    char names[128] = "";
    /* Messages have come by then, so the endpoint is complete. */
    if (len && !b->knows_eager) {
        wire_ucx_transport(b->ep, names, sizeof(names));
        b->is_eager = !strncmp(names, "tcp", 3);
        b->knows_eager = true;
    }
    struct bare_piece *p = mem_zalloc(sizeof(*p));
    *p = (struct bare_piece){.b = b, .len = len};
    memcpy(p->header, header, BARE_HEADER);
    b->in_flight += len;
    ucp_request_param_t q = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                                             UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMH,
                             .cb.send = sent,
                             .user_data = p,
                             .memh = b->memory,
                             .flags = len && !b->is_eager ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER};
    if (!len)
        q.op_attr_mask &= ~(uint32_t)UCP_OP_ATTR_FIELD_MEMH;
    ucs_status_ptr_t r = ucp_am_send_nbx(b->ep, BARE_AM, p->header, BARE_HEADER, payload, len, &q);
    if (!UCS_PTR_IS_PTR(r))
        sent(NULL, UCS_PTR_STATUS(r), p);
}

static bool pump_server(struct bare *b)
{
    uint8_t header[BARE_HEADER] = {0};
    bool any = false;
    while (b->left && (!b->in_flight || b->in_flight + b->order.message_bytes <= b->order.window_bytes)) {
        uint64_t len = b->left < b->order.message_bytes ? b->left : b->order.message_bytes;
        b->left -= len;
        send_one(b, header, b->arena + take_place(b, len), len);
        any = true;
    }
    return any;
}

/* ----------------------------------------------------------------- receiving */

static void count_arrived(struct bare *b, uint64_t len)
{
    pthread_mutex_lock(&b->lock);
    b->left -= len < b->left ? len : b->left;
    if (!b->left)
        pthread_cond_signal(&b->done);
    pthread_mutex_unlock(&b->lock);
}

static void received(void *request, ucs_status_t status, size_t length, void *user_data)
{
    struct bare_piece *p = user_data;
    (void)length;
    if (status == UCS_OK)
        count_arrived(p->b, p->len);
    free(p);
    if (request)
        ucp_request_free(request);
}

static void take_order(struct bare *b, const uint8_t *header)
{
    struct order o = {get_u64(header), get_u64(header + 8), get_u64(header + 16)};
    if (!o.message_bytes || o.message_bytes > b->arena_bytes)
        return;
    b->order = o;
    b->left = o.total_bytes;
    b->at = 0;
}

static ucs_status_t on_message(void *arg, const void *header, size_t header_len, void *data, size_t len,
                               const ucp_am_recv_param_t *param)
{
    struct bare *b = arg;
    if (header_len != BARE_HEADER || len > b->arena_bytes)
        return UCS_OK;
    if (!len) {
        if (b->listener)
            take_order(b, header);
        return UCS_OK;
    }
    uint8_t *to = b->arena + take_place(b, len);
    if (!(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
        memcpy(to, data, len);
        count_arrived(b, len);
        return UCS_OK;
    }
    struct bare_piece *p = mem_zalloc(sizeof(*p));
    *p = (struct bare_piece){.b = b, .len = len};
    ucp_request_param_t q = {.op_attr_mask =
                                 UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH,
                             .cb.recv_am = received,
                             .user_data = p,
                             .memh = b->memory};
    ucs_status_ptr_t r = ucp_am_recv_data_nbx(b->worker, data, to, len, &q);
    if (!UCS_PTR_IS_PTR(r))
        received(NULL, UCS_PTR_STATUS(r), len, p);
    return UCS_OK;
}

/* -------------------------------------------------------------------- thread */

static void drop_endpoint(struct bare *b)
{
    if (!b->ep)
        return;
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    ucs_status_ptr_t r = ucp_ep_close_nbx(b->ep, &p);
    uint64_t until = clock_now(&b->clock) + NS_PER_S;
    while (UCS_PTR_IS_PTR(r) && ucp_request_check_status(r) == UCS_INPROGRESS && clock_now(&b->clock) < until)
        ucp_worker_progress(b->worker);
    if (UCS_PTR_IS_PTR(r))
        ucp_request_free(r);
    b->ep = NULL;
    b->left = 0;
    b->knows_eager = false;
}

/* Opens an endpoint in peer-error mode: to an address, or for a request, which is used up even on failure. */
static void open_endpoint(struct bare *b, ucp_conn_request_h request, const struct sockaddr_storage *to, socklen_t len)
{
    ucp_ep_params_t p = {.field_mask = UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
                         .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                         .err_handler = {.cb = on_error, .arg = b}};
    if (request) {
        p.field_mask |= UCP_EP_PARAM_FIELD_CONN_REQUEST;
        p.conn_request = request;
    } else {
        p.field_mask |= UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
        p.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
        p.sockaddr.addr = (const struct sockaddr *)to;
        p.sockaddr.addrlen = len;
    }
    if (ucp_ep_create(b->worker, &p, &b->ep) != UCS_OK)
        b->ep = NULL;
}

/* A new client takes the place of the one before. */
static void take_request(struct bare *b)
{
    ucp_conn_request_h request = b->request;
    b->request = NULL;
    drop_endpoint(b);
    atomic_store(&b->is_lost, false);
    open_endpoint(b, request, NULL, 0);
}

static void on_request(ucp_conn_request_h request, void *arg)
{
    struct bare *b = arg;
    if (b->request)
        ucp_listener_reject(b->listener, request);
    else
        b->request = request;
}

static bool start_order(struct bare *b)
{
    uint8_t header[BARE_HEADER] = {0};
    pthread_mutex_lock(&b->lock);
    bool is_new = b->is_new;
    b->is_new = false;
    put_u64(header, b->order.message_bytes);
    put_u64(header + 8, b->order.window_bytes);
    put_u64(header + 16, b->order.total_bytes);
    pthread_mutex_unlock(&b->lock);
    if (is_new)
        send_one(b, header, NULL, 0);
    return is_new;
}

static bool turn(struct bare *b)
{
    bool any = false;
    for (int i = 0; b->listen_worker && i < BURST && ucp_worker_progress(b->listen_worker); i++)
        any = true;
    for (int i = 0; i < BURST && ucp_worker_progress(b->worker); i++)
        any = true;
    if (b->request) {
        take_request(b);
        any = true;
    }
    if (b->ep && !atomic_load(&b->is_lost))
        any |= b->listener ? pump_server(b) : start_order(b);
    return any;
}

static void sleep_until_woken(struct bare *b)
{
    struct epoll_event events[4];
    uint64_t count;
    if ((b->listen_worker && ucp_worker_arm(b->listen_worker) != UCS_OK) || ucp_worker_arm(b->worker) != UCS_OK)
        return;
    epoll_wait(b->epoll_fd, events, 4, SLEEP_MS);
    if (read(b->wake_fd, &count, sizeof(count)) < 0)
        return; /* something else woke this thread */
}

static void *run(void *arg)
{
    struct bare *b = arg;
    uint64_t busy_ns = 0;
    slices_ask_short();
    while (!atomic_load(&b->stop)) {
        uint64_t now = clock_now(&b->clock);
        if (turn(b))
            busy_ns = now;
        else if (now - busy_ns > SPIN_NS)
            sleep_until_woken(b);
    }
    drop_endpoint(b);
    return NULL;
}

/* ------------------------------------------------------------- open and close */

static void watch(struct bare *b, int fd)
{
    struct epoll_event e = {.events = EPOLLIN};
    epoll_ctl(b->epoll_fd, EPOLL_CTL_ADD, fd, &e);
}

static enum td_status open_worker(struct bare *b, struct td_error *error_out)
{
    int fd;
    ucp_am_handler_param_t am = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = BARE_AM,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = on_message,
        .arg = b,
    };
    ucp_mem_map_params_t p = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                              .address = b->arena,
                              .length = b->arena_bytes};
    if (ucp_mem_map(b->context, &p, &b->memory) != UCS_OK || wire_ucx_worker_open(b->context, &b->worker, &fd) ||
        ucp_worker_set_am_recv_handler(b->worker, &am) != UCS_OK)
        return td_fail(error_out, TD_ERR_IO, "bare loop: no ucx worker could be made");
    watch(b, fd);
    return TD_OK;
}

static enum td_status open_listener(struct bare *b, const struct sockaddr_storage *at, socklen_t len,
                                    struct td_error *error_out)
{
    int fd;
    ucp_listener_params_t p = {.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
                               .sockaddr = {.addr = (const struct sockaddr *)at, .addrlen = len},
                               .conn_handler = {.cb = on_request, .arg = b}};
    ucp_listener_attr_t attr = {.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR};
    if (wire_ucx_worker_open(b->context, &b->listen_worker, &fd) ||
        ucp_listener_create(b->listen_worker, &p, &b->listener) != UCS_OK ||
        ucp_listener_query(b->listener, &attr) != UCS_OK)
        return td_fail(error_out, TD_ERR_IO, "bare loop: can't listen");
    watch(b, fd);
    netaddr_format(&attr.sockaddr, b->address, sizeof(b->address));
    return TD_OK;
}

static enum td_status bare_open(const struct bare_config *config, bool listens, struct bare **out,
                                struct td_error *error_out)
{
    wire_ucx_setup();
    struct bare *b = mem_zalloc(sizeof(*b));
    struct sockaddr_storage at;
    socklen_t len;
    char device[64];
    clock_init_real(&b->clock);
    b->arena = config->arena;
    b->arena_bytes = config->arena_bytes;
    b->log = config->log;
    b->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    b->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    watch(b, b->wake_fd);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->done, NULL);
    enum td_status s = netaddr_resolve(config->address, &at, &len, error_out);
    if (!s && !netaddr_device(&at, len, device))
        netaddr_any_device(device);
    s = s ? s : wire_ucx_context_open(config->transports, device, &b->context, error_out);
    s = s ? s : open_worker(b, error_out);
    if (!s && listens)
        s = open_listener(b, &at, len, error_out);
    if (!s && !listens)
        open_endpoint(b, NULL, &at, len);
    if (!s && !listens && !b->ep)
        s = td_fail(error_out, TD_ERR_PEER_LOST, "bare loop: can't connect to %s", config->address);
    if (s) {
        bare_close(b);
        return s;
    }
    b->thread = thread_start("bare", run, b);
    b->is_running = true;
    *out = b;
    return TD_OK;
}

enum td_status bare_serve(const struct bare_config *config, struct bare **out, struct td_error *error_out)
{
    return bare_open(config, true, out, error_out);
}

enum td_status bare_connect(const struct bare_config *config, struct bare **out, struct td_error *error_out)
{
    return bare_open(config, false, out, error_out);
}

const char *bare_address(const struct bare *b)
{
    return b->address;
}

static void wake(struct bare *b)
{
    uint64_t one = 1;
    if (write(b->wake_fd, &one, sizeof(one)) < 0)
        return; /* the thread is awake already */
}

void bare_close(struct bare *b)
{
    if (!b)
        return;
    atomic_store(&b->stop, true);
    if (b->is_running) {
        wake(b);
        pthread_join(b->thread, NULL);
    }
    if (b->listener)
        ucp_listener_destroy(b->listener);
    if (b->worker)
        ucp_worker_destroy(b->worker);
    if (b->listen_worker)
        ucp_worker_destroy(b->listen_worker);
    if (b->memory)
        ucp_mem_unmap(b->context, b->memory);
    if (b->context)
        ucp_cleanup(b->context);
    close(b->epoll_fd);
    close(b->wake_fd);
    pthread_cond_destroy(&b->done);
    pthread_mutex_destroy(&b->lock);
    free(b);
}

enum td_status bare_fetch(struct bare *b, uint64_t message_bytes, uint64_t window_bytes, uint64_t total_bytes)
{
    uint64_t until = clock_now(&b->clock) + PATIENCE_NS;
    pthread_mutex_lock(&b->lock);
    b->order = (struct order){message_bytes, window_bytes, total_bytes};
    b->left = total_bytes;
    b->at = 0;
    b->is_new = true;
    wake(b);
    while (b->left && !atomic_load(&b->is_lost) && clock_now(&b->clock) < until) {
        struct timespec ts;
        clock_gettime(CLOCK_REALTIME, &ts);
        ts.tv_sec++;
        pthread_cond_timedwait(&b->done, &b->lock, &ts);
    }
    enum td_status s = b->left ? TD_ERR_PEER_LOST : TD_OK;
    pthread_mutex_unlock(&b->lock);
    return s;
}
