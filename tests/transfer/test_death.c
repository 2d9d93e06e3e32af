/*
 * Processes that die or freeze during transfers. The survivor gets exactly one end for everything that it had
 * open with them, in time, and goes on with other peers. Not over loopback, since part of a process can't be
 * killed.
 *
 * TANDEM_LONG=transfer: 10 kills and 3 freezes of each kind instead of 5 and 1. argv[1] is the helper
 * program, xfer_peer.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/tap.h"
#include "tests/transfer/node.h"
#include "tests/transfer/peer_shape.h"

static const char *helper;
static const char *const TLS[] = {"tcp", "mapped", "ucx"};
enum { N_TLS = 3, BYSTANDER = 1, KILLS = 5, KILLS_LONG = 10, FREEZES = 1, FREEZES_LONG = 3 };

struct child {
    pid_t pid;
    char address[160];
};

static struct child child_start(const char *role, const char *transports, uint64_t id_incarnation, const char *address)
{
    int fds[2];
    ck_assert_int_eq(pipe2(fds, O_CLOEXEC), 0);
    char id[32];
    snprintf(id, sizeof(id), "%llu", (unsigned long long)id_incarnation);
    struct child c = {.pid = fork()};
    if (c.pid == 0) {
        dup2(fds[1], 1);
        execl(helper, helper, role, transports, id, address, (char *)NULL);
        _exit(127);
    }
    close(fds[1]);
    FILE *f = fdopen(fds[0], "r");
    ck_assert_ptr_nonnull(fgets(c.address, sizeof(c.address), f));
    c.address[strcspn(c.address, "\n")] = 0;
    fclose(f);
    return c;
}

static void child_end(struct child *c)
{
    kill(c->pid, SIGKILL);
    waitpid(c->pid, NULL, 0);
    c->pid = 0;
}

/* The transfers opened with one child, by counter. */
struct book {
    struct node *n;
    struct child child;
    uint64_t id_incarnation;
    uint32_t place_base; /* reader: first page of its part of the arena */
    uint32_t begun, ended, ended_ok, ended_lost, ended_doubt;
    uint8_t ends[65536]; /* number of ends, by counter */
    bool is_stopped;     /* no new transfers are begun */
};

static void book_end(struct book *b, uint64_t counter, enum td_status status)
{
    b->ended++;
    b->ended_ok += status == TD_OK;
    b->ended_lost += status == TD_ERR_PEER_LOST;
    if (counter < sizeof(b->ends) && b->ends[counter] < 255)
        b->ends[counter]++;
    pthread_cond_broadcast(&b->n->changed);
}

static void book_check_once(const struct book *b)
{
    for (size_t i = 0; i < sizeof(b->ends); i++)
        ck_assert_msg(b->ends[i] <= 1, "transfer %zu ended %u times", i, b->ends[i]);
    ck_assert_uint_eq(b->begun, b->ended);
}

/* ---------------------------------------------------------- we are the reader */

static void *book_place(void *user, struct xfer_id id, uint32_t index)
{
    struct book *b = user;
    return b->n->arena + (b->place_base + (id.counter % PEER_WINDOW) * PEER_PAGES + index) * b->n->page_bytes;
}

static void book_pull(struct book *b, uint64_t counter);

static void book_pull_end(void *user, struct xfer_id id, const struct xfer_pull_result *result)
{
    struct book *b = user;
    pthread_mutex_lock(&b->n->lock);
    book_end(b, id.counter, result->status);
    if (!b->is_stopped && !result->status)
        book_pull(b, id.counter + PEER_WINDOW);
    pthread_mutex_unlock(&b->n->lock);
}

static void book_pull(struct book *b, uint64_t counter)
{
    b->begun++;
    struct xfer_pull_params p = {.id = {b->id_incarnation, counter},
                                 .address = b->child.address,
                                 .deadline_ns = clock_now(&b->n->clock) + 60 * NS_PER_S,
                                 .place = book_place,
                                 .on_end = book_pull_end,
                                 .user = b};
    xfer_pull_start(b->n->x, &p);
}

/* ---------------------------------------------------------- we are the holder */

static void book_offer(struct book *b, uint64_t counter);

static void book_lease_end(void *user, struct xfer_id id, enum td_status status, bool in_doubt)
{
    struct book *b = user;
    pthread_mutex_lock(&b->n->lock);
    book_end(b, id.counter, status);
    b->ended_doubt += in_doubt;
    if (!b->is_stopped && !status)
        book_offer(b, id.counter + PEER_WINDOW);
    pthread_mutex_unlock(&b->n->lock);
}

static void book_offer(struct book *b, uint64_t counter)
{
    struct xfer_page pages[PEER_PAGES];
    for (uint32_t i = 0; i < PEER_PAGES; i++)
        pages[i] = (struct xfer_page){b->n->arena + i * b->n->page_bytes, i};
    b->begun++;
    struct xfer_lease_params p = {
        .id = {b->id_incarnation, counter}, .duration_ns = 60 * NS_PER_S, .on_end = book_lease_end, .user = b};
    xfer_lease_grant(b->n->x, &p);
    xfer_lease_announce(b->n->x, p.id, 0, pages, PEER_PAGES, 0, PEER_LAYERS);
    xfer_lease_finish(b->n->x, p.id, PEER_PAGES, NULL, 0);
}

/* ------------------------------------------------------------------- scenario */

static struct book *book_begin(struct node *n, const char *transports, bool we_read, uint64_t id_incarnation)
{
    struct book *b = mem_zalloc(sizeof(*b));
    b->n = n;
    b->id_incarnation = id_incarnation;
    b->place_base = id_incarnation == BYSTANDER ? 0 : PEER_PAGES * PEER_WINDOW;
    b->child = child_start(we_read ? "holder" : "reader", transports, id_incarnation, we_read ? NULL : n->address);
    pthread_mutex_lock(&n->lock);
    for (uint64_t i = 1; i <= PEER_WINDOW; i++) {
        if (we_read)
            book_pull(b, i);
        else
            book_offer(b, i);
    }
    pthread_mutex_unlock(&n->lock);
    return b;
}

static void wait_random_ms(struct node *n, uint32_t most_ms)
{
    /* The moment is an input of the test. */
    uint64_t until = wall_ns() + random_u64() % (most_ms * NS_PER_MS);
    while (wall_ns() < until)
        ck_assert_ptr_nonnull(n->x);
}

/* A single holder may be between two transfers when its reader dies, but not five of them. */
static uint32_t n_lost;

/* Kills or stops one victim at a random moment while transfers run. Returns how long the last end took. */
static uint64_t one_round(struct node *n, struct book *bystander, const char *transports, bool we_read, int sig,
                          uint64_t id)
{
    struct book *v = book_begin(n, transports, we_read, id);
    NODE_WAIT(n, v->ended_ok >= 2);
    wait_random_ms(n, 20);
    pthread_mutex_lock(&n->lock);
    uint32_t downs = n->downs;
    pthread_mutex_unlock(&n->lock);
    uint64_t begin = wall_ns();
    kill(v->child.pid, sig);
    NODE_WAIT_S(n, 5, n->downs > downs);
    pthread_mutex_lock(&n->lock);
    v->is_stopped = true;
    uint64_t took = wall_ns() - begin;
    ck_assert_int_eq(n->down_why, TD_ERR_PEER_LOST);
    n_lost += v->ended_lost; /* ends come before the report that the peer is down */
    pthread_mutex_unlock(&n->lock);
    /* Leases that were granted but not yet asked for when the reader died, or begun as it died. */
    for (uint64_t i = 1; i < 8192; i++) {
        if (we_read)
            xfer_pull_cancel(n->x, (struct xfer_id){id, i});
        else
            xfer_lease_cancel(n->x, (struct xfer_id){id, i});
    }
    NODE_WAIT_S(n, 2, v->begun == v->ended);
    pthread_mutex_lock(&n->lock);
    uint32_t before = bystander->ended_ok;
    pthread_mutex_unlock(&n->lock);
    NODE_WAIT(n, bystander->ended_ok >= before + 3 || bystander->ended_lost);
    book_check_once(v);
    child_end(&v->child);
    free(v);
    return took;
}

static void rounds(int tls_index, bool we_read, int sig, int n_rounds, uint64_t limit_ns)
{
    /* The transport reports a kill, so a bystander that is starved for a second still passes. */
    if (sig == SIGKILL)
        setenv(PEER_SILENCE, "8000", 1);
    else
        unsetenv(PEER_SILENCE);
    struct node *n = node_open(&(struct node_params){.backend = TLS[tls_index],
                                                     .name = "survivor",
                                                     .layout = PEER_LAYOUT,
                                                     .n_pages = 2 * PEER_PAGES * PEER_WINDOW,
                                                     .silence_ns = peer_silence_ns()});
    struct book *bystander = book_begin(n, TLS[tls_index], we_read, BYSTANDER);
    NODE_WAIT(n, bystander->ended_ok >= 3);
    for (int i = 0; i < n_rounds; i++) {
        uint64_t took = one_round(n, bystander, TLS[tls_index], we_read, sig, 100 + (uint64_t)i);
        ck_assert_msg(took < limit_ns, "noticed after %llu ms", (unsigned long long)(took / NS_PER_MS));
        if (sig == SIGSTOP)
            ck_assert_msg(took > 500 * NS_PER_MS, "a frozen peer was taken for dead after %llu ms",
                          (unsigned long long)(took / NS_PER_MS));
    }
    if (n_rounds >= KILLS)
        ck_assert_uint_ge(n_lost, 1);
    pthread_mutex_lock(&n->lock);
    ck_assert_uint_eq(bystander->ended_lost, 0);
    bystander->is_stopped = true;
    pthread_mutex_unlock(&n->lock);
    xfer_close(n->x);
    n->x = NULL;
    book_check_once(bystander);
    child_end(&bystander->child);
    node_close(n);
    free(bystander);
}

START_TEST(test_xfer_killed_holder_ends_every_pull_once)
{
    rounds(_i, true, SIGKILL, tap_is_long("transfer") ? KILLS_LONG : KILLS, 2 * NS_PER_S);
}
END_TEST

START_TEST(test_xfer_killed_reader_ends_every_lease_once)
{
    rounds(_i, false, SIGKILL, tap_is_long("transfer") ? KILLS_LONG : KILLS, 2 * NS_PER_S);
}
END_TEST

START_TEST(test_xfer_frozen_holder_is_dead_after_a_second)
{
    rounds(_i, true, SIGSTOP, tap_is_long("transfer") ? FREEZES_LONG : FREEZES, 1600 * NS_PER_MS);
}
END_TEST

START_TEST(test_xfer_frozen_reader_is_dead_after_a_second)
{
    rounds(_i, false, SIGSTOP, tap_is_long("transfer") ? FREEZES_LONG : FREEZES, 1600 * NS_PER_MS);
}
END_TEST

/* The peer was taken for dead, but has the same incarnation: the next pull connects again. */
START_TEST(test_xfer_frozen_peer_that_thaws_is_served_again)
{
    struct node *n = node_open(&(struct node_params){
        .backend = TLS[_i], .name = "survivor", .layout = PEER_LAYOUT, .n_pages = 2 * PEER_PAGES * PEER_WINDOW});
    struct book *b = book_begin(n, TLS[_i], true, 500);
    NODE_WAIT(n, b->ended_ok >= 2);
    kill(b->child.pid, SIGSTOP);
    NODE_WAIT_S(n, 5, n->downs == 1 && b->begun == b->ended);
    kill(b->child.pid, SIGCONT);
    pthread_mutex_lock(&n->lock);
    for (uint64_t i = 30000; i < 30000 + PEER_WINDOW; i++)
        book_pull(b, i); /* ids that it does not hold: "not yet" shows that it answers */
    pthread_mutex_unlock(&n->lock);
    NODE_WAIT(n, n->ups == 2);
    for (uint64_t i = 30000; i < 30000 + PEER_WINDOW; i++)
        xfer_pull_cancel(n->x, (struct xfer_id){500, i});
    NODE_WAIT(n, b->begun == b->ended);
    book_check_once(b);
    node_check_quiet(n);
    child_end(&b->child);
    node_close(n);
    free(b);
}
END_TEST

int main(int argc, char **argv)
{
    helper = argc > 1 ? argv[1] : "./xfer_peer";
    Suite *s = suite_create("death");
    const struct {
        const char *name;
        const TTest *test;
    } cases[] = {{"killed holder", test_xfer_killed_holder_ends_every_pull_once},
                 {"killed reader", test_xfer_killed_reader_ends_every_lease_once},
                 {"frozen holder", test_xfer_frozen_holder_is_dead_after_a_second},
                 {"frozen reader", test_xfer_frozen_reader_is_dead_after_a_second},
                 {"thawed", test_xfer_frozen_peer_that_thaws_is_served_again}};
    /* Each has a case of its own, so that CK_RUN_CASE can select it. */
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        TCase *tc = tcase_create(cases[i].name);
        tcase_set_timeout(tc, 120);
        tcase_add_loop_test(tc, cases[i].test, 0, N_TLS);
        suite_add_tcase(s, tc);
    }
    SRunner *sr = srunner_create(s);
    srunner_run_all(sr, CK_ENV);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed ? 1 : 0;
}
