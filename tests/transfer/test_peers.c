/*
 * Many peers: all pairs move data, and a frozen or slow peer does not hold up the others. Peers are processes
 * of their own, so not over loopback.
 *
 * TANDEM_LONG=transfer: 32 + 32 endpoints instead of 8 + 8. argv: the helper programs xfer_many and
 * xfer_peer.
 */
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/tap.h"
#include "tests/transfer/node.h"
#include "tests/transfer/peer_shape.h"

static const char *many_program, *peer_program;
static const char *const TLS[] = {"tcp", "mapped", "ucx"};
enum { N_TLS = 3, PROCESSES_MAX = 4, ENDPOINTS_MAX = 32, ROUNDS = 3 /* of xfer_many */ };

struct child {
    pid_t pid;
    FILE *out;
};

static struct child child_start(const char *program, char **argv)
{
    int fds[2];
    ck_assert_int_eq(pipe2(fds, O_CLOEXEC), 0);
    struct child c = {.pid = fork()};
    if (c.pid == 0) {
        dup2(fds[1], 1);
        execv(program, argv);
        _exit(127);
    }
    close(fds[1]);
    c.out = fdopen(fds[0], "r");
    return c;
}

static void child_line(struct child *c, char *line, size_t len)
{
    ck_assert_ptr_nonnull(fgets(line, (int)len, c->out));
    line[strcspn(line, "\n")] = 0;
}

static void child_kill(struct child *c)
{
    kill(c->pid, SIGKILL);
    waitpid(c->pid, NULL, 0);
    fclose(c->out);
}

/* ------------------------------------------------------------------ all pairs */

static char addresses[ENDPOINTS_MAX][160];

static void start_holders(struct child *children, int n_processes, int n_each, char *transports)
{
    for (int p = 0; p < n_processes; p++) {
        char n[8], first[8], readers[8];
        snprintf(n, sizeof(n), "%d", n_each);
        snprintf(first, sizeof(first), "%d", p * n_each);
        snprintf(readers, sizeof(readers), "%d", n_processes * n_each);
        char *argv[] = {"xfer_many", "holder", transports, n, first, readers, NULL};
        children[p] = child_start(many_program, argv);
        for (int i = 0; i < n_each; i++)
            child_line(&children[p], addresses[p * n_each + i], sizeof(addresses[0]));
    }
}

static void start_readers(struct child *children, int n_processes, int n_each, char *transports)
{
    for (int p = 0; p < n_processes; p++) {
        char n[8], first[8], *argv[5 + ENDPOINTS_MAX + 1] = {"xfer_many", "reader", transports, n, first};
        snprintf(n, sizeof(n), "%d", n_each);
        snprintf(first, sizeof(first), "%d", p * n_each);
        for (int i = 0; i < n_processes * n_each; i++)
            argv[5 + i] = addresses[i];
        children[p] = child_start(many_program, argv);
    }
}

START_TEST(test_peers_all_pairs_move_data)
{
    const char *how_long = getenv("TANDEM_LONG");
    bool is_long = how_long && strstr(how_long, "transfer") &&
                   strcmp(TLS[_i], "ucx") != 0; /* UCX does not take that many: docs/transfer.md */
    int n_processes = is_long ? 4 : 2, n_each = is_long ? 8 : 4, n = n_processes * n_each;
    struct child holders[PROCESSES_MAX], readers[PROCESSES_MAX];
    char *transports = (char *)(uintptr_t)TLS[_i], expected[32], line[64];
    uint64_t begin = wall_ns();
    start_holders(holders, n_processes, n_each, transports);
    start_readers(readers, n_processes, n_each, transports);
    snprintf(expected, sizeof(expected), "ok %d", n_each * n * ROUNDS);
    for (int p = 0; p < n_processes; p++) {
        int status = -1;
        child_line(&readers[p], line, sizeof(line));
        ck_assert_str_eq(line, expected);
        ck_assert_int_eq(waitpid(readers[p].pid, &status, 0), readers[p].pid);
        ck_assert_int_eq(status, 0);
        fclose(readers[p].out);
    }
    for (int p = 0; p < n_processes; p++)
        child_kill(&holders[p]);
    printf("# %s: %d + %d endpoints, %d connections, %d transfers in %.1f s\n", transports, n, n, n * n, n * n * ROUNDS,
           (double)(wall_ns() - begin) * 1e-9);
    fflush(stdout);
}
END_TEST

/* ------------------------------------------------------- one frozen or slow peer */

enum { HEALTHY = 2, SAMPLES_MAX = 20000 };

struct stream { /* successive transfers from one holder */
    struct node *n;
    struct child child;
    char address[160];
    uint64_t id_incarnation, began_ns;
    uint32_t place_base;
    bool is_measured;
};

static double samples_ms[SAMPLES_MAX]; /* guarded by the node's lock */
static uint32_t n_samples;
static bool is_over;

static void stream_next(struct stream *s, uint64_t counter);

static void *stream_place(void *user, struct xfer_id id, uint32_t index)
{
    struct stream *s = user;
    (void)id;
    return s->n->arena + (s->place_base + index) * s->n->page_bytes;
}

static void stream_end(void *user, struct xfer_id id, const struct xfer_pull_result *result)
{
    struct stream *s = user;
    pthread_mutex_lock(&s->n->lock);
    if (s->is_measured && !result->status && n_samples < SAMPLES_MAX)
        samples_ms[n_samples++] = (double)(wall_ns() - s->began_ns) * 1e-6;
    bool goes_on = !is_over && !result->status;
    pthread_cond_broadcast(&s->n->changed);
    pthread_mutex_unlock(&s->n->lock);
    if (goes_on)
        stream_next(s, id.counter + 1);
}

static void stream_next(struct stream *s, uint64_t counter)
{
    s->began_ns = wall_ns();
    struct xfer_pull_params p = {.id = {s->id_incarnation, counter},
                                 .address = s->address,
                                 .deadline_ns = clock_now(&s->n->clock) + 60 * NS_PER_S,
                                 .place = stream_place,
                                 .on_end = stream_end,
                                 .user = s};
    xfer_pull_start(s->n->x, &p);
}

static void stream_start(struct stream *s, struct node *n, uint32_t index, char *transports, bool is_measured)
{
    char id[16];
    snprintf(id, sizeof(id), "%u", 100 + index);
    char *argv[] = {"xfer_peer", "holder", transports, id, NULL};
    *s = (struct stream){.n = n, .id_incarnation = 100 + index, .place_base = index * PEER_PAGES};
    s->is_measured = is_measured;
    s->child = child_start(peer_program, argv);
    child_line(&s->child, s->address, sizeof(s->address));
    stream_next(s, 1);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The 99th percentile of the healthy streams' transfers that ended within for_ns. The victim runs for run_ms
 * of each 50 ms. */
static double p99_ms(struct node *n, pid_t victim, int run_ms, uint64_t for_ns)
{
    pthread_mutex_lock(&n->lock);
    n_samples = 0;
    uint64_t until = wall_ns() + for_ns, turn = wall_ns(); /* the time is what is tested */
    bool runs = true;
    while (wall_ns() < until) {
        bool should_run = run_ms >= 50 || (wall_ns() - turn) / NS_PER_MS % 50 < (uint64_t)run_ms;
        if (should_run != runs)
            kill(victim, should_run ? SIGCONT : SIGSTOP);
        runs = should_run;
        struct timespec ts;
        clock_gettime(CLOCK_REALTIME, &ts);
        ts.tv_nsec += 2000000;
        ts.tv_sec += ts.tv_nsec / 1000000000;
        ts.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&n->changed, &n->lock, &ts);
    }
    uint32_t count = n_samples;
    qsort(samples_ms, count, sizeof(samples_ms[0]), compare);
    double p99 = count ? samples_ms[count * 99 / 100] : 0;
    pthread_mutex_unlock(&n->lock);
    ck_assert_msg(count >= 20, "the healthy peers moved only %u transfers", count);
    return p99;
}

/* The bad peer runs for run_ms of each 50 ms. 0: it is frozen, and measured before it is taken for dead; 5:
 * it is slow. */
static void one_bad_peer(char *transports, int run_ms)
{
    struct node *n = node_open(&(struct node_params){
        .backend = transports, .name = "reader", .layout = PEER_LAYOUT, .n_pages = PEER_PAGES * (HEALTHY + 1)});
    struct stream streams[HEALTHY + 1];
    for (uint32_t i = 0; i <= HEALTHY; i++)
        stream_start(&streams[i], n, i, transports, i < HEALTHY);
    NODE_WAIT(n, n->ups == HEALTHY + 1 && n_samples > 50);
    pid_t victim = streams[HEALTHY].child.pid;
    double before = p99_ms(n, victim, 50, 900 * NS_PER_MS);
    double during = p99_ms(n, victim, run_ms, 900 * NS_PER_MS);
    kill(victim, SIGCONT);
    pthread_mutex_lock(&n->lock);
    is_over = true;
    pthread_mutex_unlock(&n->lock);
    printf("# %s: p99 of the healthy %.2f ms, beside a %s peer %.2f ms: %.2f times\n", transports, before,
           run_ms ? "slow" : "frozen", during, during / before);
    fflush(stdout);
    /* Generous: the failure would be a wait for the bad peer, which lasts a second. */
    ck_assert_msg(during < 10 * before + 100, "p99 went from %.2f to %.2f ms", before, during);
    node_close(n);
    for (uint32_t i = 0; i <= HEALTHY; i++)
        child_kill(&streams[i].child);
}

START_TEST(test_peers_frozen_one_leaves_the_others_alone)
{
    one_bad_peer((char *)(uintptr_t)TLS[_i], 0);
}
END_TEST

START_TEST(test_peers_slow_one_leaves_the_others_alone)
{
    one_bad_peer((char *)(uintptr_t)TLS[_i], 5);
}
END_TEST

int main(int argc, char **argv)
{
    many_program = argc > 1 ? argv[1] : "./xfer_many";
    peer_program = argc > 2 ? argv[2] : "./xfer_peer";
    Suite *s = suite_create("peers");
    TCase *pairs = tcase_create("pairs"), *one = tcase_create("one");
    tcase_set_timeout(pairs, 300);
    tcase_set_timeout(one, 60);
    tcase_add_loop_test(pairs, test_peers_all_pairs_move_data, 0, N_TLS);
    if (tap_forks()) { /* without forks a thread checker is at work, and times mean nothing */
        tcase_add_loop_test(one, test_peers_frozen_one_leaves_the_others_alone, 0, N_TLS);
        tcase_add_loop_test(one, test_peers_slow_one_leaves_the_others_alone, 0, N_TLS);
    }
    suite_add_tcase(s, pairs);
    suite_add_tcase(s, one);
    return tap_main(s);
}
