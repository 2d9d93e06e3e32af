/*
 * Registration with routers, which are functions in this process (calls_unary in tests/calls.h), and the
 * addresses that a worker tells.
 */
#include <pthread.h>
#include <time.h>

#include "tests/worker/world.h"

enum { ROUTERS = 20, LATE_S = 20 };

/* What the routers have heard. The register thread writes and the test reads, under the lock. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct {
    char target[128];
    enum rpc_code answer;
    uint32_t n_calls;
    uint8_t nonce[SECRET_NONCE_BYTES];
} routers[ROUTERS];
static uint32_t n_routers;
static char address[128];
static uint64_t incarnation;
static bool is_proved; /* the last call brought the nonce of the answer before, and a good proof */
static const char *secret_of_router = "xyz";

static uint32_t router_of(const char *target)
{
    uint32_t i = 0;
    while (i < n_routers && strcmp(routers[i].target, target))
        i++;
    if (i == n_routers)
        snprintf(routers[n_routers++].target, sizeof(routers[0].target), "%s", target);
    return i;
}

static enum rpc_code join(const char *target, const char *path, const ProtobufCMessage *request,
                          ProtobufCMessage **response_out, struct td_error *text_out)
{
    const Tandem__Worker__V1__JoinRequest *m = (const Tandem__Worker__V1__JoinRequest *)request;
    pthread_mutex_lock(&lock);
    uint32_t i = router_of(target);
    enum rpc_code code = strcmp(path, "/tandem.worker.v1.Registry/Join") ? RPC_UNIMPLEMENTED : routers[i].answer;
    snprintf(address, sizeof(address), "%.*s", (int)m->address.len, (const char *)m->address.data);
    incarnation = m->incarnation;
    struct secret *secret = NULL;
    struct proof_said said = {.incarnation = incarnation, .address = address};
    ck_assert(!secret_open(secret_of_router, NULL, NULL, &secret, NULL) && proof_nonce_read(m->nonce, said.worker));
    is_proved = proof_nonce_read(m->router_nonce, said.router) && !memcmp(said.router, routers[i].nonce, 16) &&
                proof_verify(secret, JOIN_WORKER, &said, m->proof);
    routers[i].n_calls += is_proved || code; /* the first call only gets a nonce */
    secret_nonce(routers[i].nonce);
    memcpy(said.router, routers[i].nonce, sizeof(said.router));
    Tandem__Worker__V1__JoinResponse *answer = mem_zalloc(sizeof(*answer));
    uint8_t mac[SECRET_MAC_BYTES];
    proof_sign(secret, JOIN_ROUTER, &said, mac);
    secret_close(secret);
    tandem__worker__v1__join_response__init(answer);
    answer->nonce = (ProtobufCBinaryData){16, mem_dup(said.router, 16)};
    answer->proof = (ProtobufCBinaryData){sizeof(mac), mem_dup(mac, sizeof(mac))};
    answer->is_taken = is_proved;
    if (code)
        tandem__worker__v1__join_response__free_unpacked(answer, NULL);
    else
        *response_out = &answer->base;
    td_fail(text_out, TD_ERR_REFUSED, "because");
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return code;
}

static void set_answer(uint32_t i, enum rpc_code code)
{
    pthread_mutex_lock(&lock);
    routers[i].answer = code;
    pthread_mutex_unlock(&lock);
}

/* Waits until router i was called n times in all. */
static void wait_all_calls(uint32_t i, uint32_t n)
{
    struct timespec until;
    int late = 0;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += LATE_S;
    pthread_mutex_lock(&lock);
    while (routers[i].n_calls < n && !late)
        late = pthread_cond_timedwait(&changed, &lock, &until);
    pthread_mutex_unlock(&lock);
    ck_assert_msg(!late, "router %u was not called", i);
}

/* Waits until router i was called n times more. */
static void wait_calls(uint32_t i, uint32_t n)
{
    pthread_mutex_lock(&lock);
    uint32_t all = routers[i].n_calls + n;
    pthread_mutex_unlock(&lock);
    wait_all_calls(i, all);
}

/* A log that the test can read. */
static struct log test_log = {.who = "worker", .level = LOG_INFO};

static void open_log(void)
{
    char log_path[] = "/tmp/tandem-register-XXXXXX";
    calls_unary = join;
    test_log.fd = mkstemp(log_path);
    ck_assert_int_ge(test_log.fd, 0);
    unlink(log_path);
}

static uint32_t count_log(const char *what)
{
    static char all[1 << 16];
    ssize_t n = pread(test_log.fd, all, sizeof(all) - 1, 0);
    uint32_t found = 0;
    all[n > 0 ? n : 0] = 0;
    for (const char *at = all; (at = strstr(at, what)); at += strlen(what))
        found++;
    return found;
}

static struct secret *secret;

static struct registrar *open_with(const char *list, uint32_t every_ms)
{
    if (!secret)
        ck_assert(!secret_open("xyz", NULL, &test_log, &secret, NULL));
    const struct registrar_config c = {.routers = list,
                                       .address = "host:71",
                                       .secret = secret,
                                       .incarnation = 42,
                                       .every_ms = every_ms,
                                       .log = &test_log};
    struct registrar *r = NULL;
    struct td_error e = {{0}};
    ck_assert_msg(!registrar_open(&c, &r, &e), "%s", e.text);
    return r;
}

START_TEST(test_register_tells_every_router_who_and_where_the_worker_is)
{
    open_log();
    router_of("a:1");
    router_of("b:2");
    struct registrar *r = open_with("a:1,b:2", 1);
    wait_calls(0, 1);
    wait_calls(1, 1);
    registrar_close(r);
    ck_assert_uint_eq(n_routers, 2);
    ck_assert_str_eq(address, "host:71");
    ck_assert_uint_eq(incarnation, 42);
    ck_assert(is_proved);
    ck_assert_uint_eq(count_log("router does not take us"), 0);
}
END_TEST

/* Whoever sits at a router's address without the secret learns nothing that is good elsewhere. */
START_TEST(test_register_names_a_router_that_does_not_know_the_secret)
{
    open_log();
    router_of("a:1");
    secret_of_router = "another";
    struct registrar *r = open_with("a:1", 1);
    for (int i = 0; i < 2000 && !count_log("the router does not know the cluster secret"); i++)
        usleep(10000);
    registrar_close(r);
    secret_of_router = "xyz";
    ck_assert(!is_proved);
    ck_assert_uint_eq(routers[0].n_calls, 0);
    ck_assert_uint_eq(count_log("the router does not know the cluster secret"), 1);
}
END_TEST

START_TEST(test_register_goes_on_after_a_refusal_and_logs_it_once)
{
    open_log();
    router_of("a:1");
    set_answer(0, RPC_PERMISSION_DENIED);
    struct registrar *r = open_with("a:1", 1);
    wait_calls(0, 5);
    ck_assert_uint_eq(count_log("router does not take us"), 1);
    ck_assert_uint_eq(count_log("address=host:71 why='PERMISSION_DENIED: because'"), 1);
    set_answer(0, RPC_OK);
    wait_calls(0, 3);
    set_answer(0, RPC_PERMISSION_DENIED);
    wait_calls(0, 3);
    registrar_close(r);
    ck_assert_uint_eq(count_log("router does not take us"), 2);
}
END_TEST

START_TEST(test_register_comes_back_to_a_router_that_was_away)
{
    open_log();
    router_of("a:1");
    router_of("b:2");
    set_answer(0, RPC_UNAVAILABLE);
    struct registrar *r = open_with("a:1,b:2", 1);
    wait_calls(0, 3);
    wait_calls(1, 3);                                           /* a router that is away keeps no other one waiting */
    ck_assert_uint_eq(count_log("router does not take us"), 0); /* it may not be up yet: no news */
    set_answer(0, RPC_OK);
    wait_calls(0, 2);
    set_answer(0, RPC_UNAVAILABLE); /* it restarts */
    wait_calls(0, 4);
    ck_assert_uint_eq(count_log("why='UNAVAILABLE: because'"), 1);
    set_answer(0, RPC_OK);
    wait_calls(0, 2);
    registrar_close(r);
    ck_assert_uint_eq(incarnation, 42);
}
END_TEST

START_TEST(test_register_close_does_not_wait_for_the_next_call)
{
    open_log();
    router_of("a:1");
    struct registrar *r = open_with("a:1", 3600000);
    wait_all_calls(0, 1);
    uint64_t began = world_wall_ns();
    registrar_close(r);
    ck_assert_uint_lt(world_wall_ns() - began, 5 * NS_PER_S);
    ck_assert_uint_eq(routers[0].n_calls, 1);
}
END_TEST

START_TEST(test_register_has_no_thread_without_routers)
{
    open_log();
    registrar_close(open_with(NULL, 1));
    registrar_close(open_with("", 1));
    registrar_close(NULL);
    ck_assert_uint_eq(n_routers, 0);
}
END_TEST

static enum td_status try_list(const char *list, struct td_error *e)
{
    const struct registrar_config c = {.routers = list, .address = "host:71", .log = &test_log};
    struct registrar *r = NULL;
    enum td_status s = registrar_open(&c, &r, e);
    registrar_close(r);
    return s;
}

START_TEST(test_register_names_the_address_that_it_can_not_use)
{
    char list[ROUTERS * 8] = "", longest[200];
    struct td_error e = {{0}};
    open_log();
    ck_assert_int_eq(try_list("a:1,b", &e), TD_ERR_INVALID);
    ck_assert_str_eq(e.text, "--routers: 'b' is not HOST:PORT or unix:PATH");
    ck_assert_int_eq(try_list("a:1,,b:2", &e), TD_ERR_INVALID);
    ck_assert_int_eq(try_list("a:1,", &e), TD_OK);
    ck_assert_int_eq(try_list("unix:/tmp/x", &e), TD_OK);
    memset(longest, 'a', sizeof(longest));
    longest[0] = ':';
    longest[128] = 0;
    ck_assert_int_eq(try_list(longest, &e), TD_ERR_INVALID);
    longest[127] = 0;
    ck_assert_int_eq(try_list(longest, &e), TD_OK);
    for (int i = 0; i < 16; i++)
        snprintf(list + strlen(list), 8, "a:%d,", i);
    ck_assert_int_eq(try_list(list, &e), TD_OK);
    strcat(list, "a:99");
    ck_assert_int_eq(try_list(list, &e), TD_ERR_INVALID);
    ck_assert_str_eq(e.text, "--routers: at most 16");
}
END_TEST

/* -------------------------------------------------------------- a worker's */

/* Opens a worker whose transfers listen on TCP, and waits until it has registered. */
static struct node_worker *open_worker(const char *const *more, Tandem__Worker__V1__WorkerHello **hello_out)
{
    calls_unary = join;
    router_of("r:1");
    world_has_net = true;
    secret_of_router = NULL;
    struct node_worker *n = world_worker("prefill", more);
    wait_all_calls(0, 1);
    *hello_out = message_at(&n->routers[0], 1)->hello;
    return n;
}

static uint32_t port_of(const char *a)
{
    return (uint32_t)strtoul(strrchr(a, ':') + 1, NULL, 10);
}

START_TEST(test_register_worker_tells_where_it_listens)
{
    const char *const more[] = {"--routers", "r:1", NULL};
    Tandem__Worker__V1__WorkerHello *hello;
    struct node_worker *n = open_worker(more, &hello);
    ck_assert_str_eq(address, worker_address(n->w));
    ck_assert_uint_eq(incarnation, hello->incarnation);
    ck_assert(hello->xfer_address.len > 10 && !memcmp(hello->xfer_address.data, "127.0.0.1:", 10));
    ck_assert_uint_ne(port_of(n->w->xfer_address), 0);
    world_close();
}
END_TEST

START_TEST(test_register_worker_tells_the_advertised_host_with_its_own_ports)
{
    const char *const more[] = {"--routers", "r:1", "--advertise", "a.example", NULL};
    Tandem__Worker__V1__WorkerHello *hello;
    struct node_worker *n = open_worker(more, &hello);
    ck_assert(!strncmp(address, "a.example:", 10));
    ck_assert_uint_eq(port_of(address), port_of(worker_address(n->w)));
    ck_assert(hello->xfer_address.len > 10 && !memcmp(hello->xfer_address.data, "a.example:", 10));
    ck_assert_uint_eq(port_of(n->w->xfer_address), port_of(xfer_address(n->w->xfer)));
    world_close();
}
END_TEST

START_TEST(test_register_worker_tells_the_advertised_port)
{
    const char *const more[] = {"--routers", "r:1", "--advertise", "a.example:71", NULL};
    Tandem__Worker__V1__WorkerHello *hello;
    struct node_worker *n = open_worker(more, &hello);
    ck_assert_str_eq(address, "a.example:71");
    ck_assert_uint_ne(port_of(n->w->xfer_address), 71); /* transfers have a port of their own */
    world_close();
}
END_TEST

START_TEST(test_register_worker_with_a_bad_list_of_routers_does_not_open)
{
    const char *const more[] = {"--routers", "nobody", NULL};
    struct td_error e = {{0}};
    ck_assert_int_eq(world_try("prefill", more, &e), TD_ERR_INVALID);
    ck_assert_msg(strstr(e.text, "--routers: 'nobody'") != NULL, "%s", e.text);
    world_close();
}
END_TEST

int main(void)
{
    Suite *s = suite_create("register");
    TCase *t = tcase_create("register");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_register_tells_every_router_who_and_where_the_worker_is);
    tcase_add_test(t, test_register_names_a_router_that_does_not_know_the_secret);
    tcase_add_test(t, test_register_goes_on_after_a_refusal_and_logs_it_once);
    tcase_add_test(t, test_register_comes_back_to_a_router_that_was_away);
    tcase_add_test(t, test_register_close_does_not_wait_for_the_next_call);
    tcase_add_test(t, test_register_has_no_thread_without_routers);
    tcase_add_test(t, test_register_names_the_address_that_it_can_not_use);
    tcase_add_test(t, test_register_worker_tells_where_it_listens);
    tcase_add_test(t, test_register_worker_tells_the_advertised_host_with_its_own_ports);
    tcase_add_test(t, test_register_worker_tells_the_advertised_port);
    tcase_add_test(t, test_register_worker_with_a_bad_list_of_routers_does_not_open);
    suite_add_tcase(s, t);
    return tap_main(s);
}
