/* The conductor of tandem replay: schedule, senders, progress. It never touches gRPC, because a process that
 * has used gRPC must not fork. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/random.h"
#include "cli/replay.h"

enum { TICK_MS = 5, SHOW_MS = 1000, LEAD_MS = 20 };

static _Atomic int n_signals;

static void on_signal(int number)
{
    (void)number;
    n_signals++;
}

void replay_on_signal(void)
{
    const struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool replay_is_stopped(void)
{
    return n_signals > 0;
}

void *replay_map(size_t len_bytes)
{
    void *base = mmap(NULL, len_bytes ? len_bytes : 1, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        abort();
    return base;
}

/* ---------------------------------------------------------------- schedule */

static uint32_t scaled(const struct replay *r, uint32_t n)
{
    return (uint32_t)fmin(fmax(round(n * r->o.length_scale), 1), UINT32_MAX);
}

uint32_t replay_prompt_tokens(const struct replay *r, uint64_t index)
{
    return scaled(r, r->trace->requests[index].n_prompt);
}

uint32_t replay_output_tokens(const struct replay *r, uint64_t index)
{
    const struct trace_request *t = &r->trace->requests[index];
    uint32_t n = t->n_output ? t->n_output : 1, room = r->board->context - scaled(r, t->n_prompt);
    if (r->o.max_output && n > r->o.max_output)
        n = (uint32_t)r->o.max_output;
    return n < room ? n : room;
}

static void make_slot(struct replay *r, uint64_t i)
{
    const struct trace_request *t = &r->trace->requests[i];
    struct report_request q = REPORT_REQUEST_NONE;
    q.tenant = t->tenant;
    q.n_prompt = replay_prompt_tokens(r, i);
    q.n_asked = replay_output_tokens(r, i);
    q.ttft_slo_ms = t->ttft_ms;
    q.tpot_slo_ms = t->tpot_ms;
    r->slots[i] = (struct replay_slot){.q = q};
}

/* When request i is due, in ms since the start: at its arrival in the trace or, with --poisson, a random time
 * after before_ms, when the request before it is due. */
static double due_of(const struct replay *r, uint64_t i, double before_ms)
{
    if (r->o.concurrency)
        return 0;
    if (!(r->o.poisson > 0))
        return (double)r->trace->requests[i].arrival_ns * 1e-6 / r->o.rate;
    double unit = random_unit(random_at((uint64_t)r->o.seed, i, 4 + r->round));
    return i ? before_ms - log1p(-unit) * 1e3 / (r->o.poisson * r->o.rate) : 0;
}

void replay_schedule(struct replay *r)
{
    uint32_t n_heads = 0;
    if (!r->slots) {
        r->slots = replay_map(r->n * sizeof(*r->slots));
        r->due_ms = mem_array(r->n, sizeof(*r->due_ms));
        r->owner = mem_array(r->n, sizeof(*r->owner));
        r->first_token = mem_array(r->n, sizeof(*r->first_token));
        for (uint64_t i = 0; i < r->n; i++) {
            r->first_token[i] = r->n_tokens;
            r->n_tokens += replay_output_tokens(r, i);
        }
        r->tokens = replay_map(r->n_tokens * sizeof(*r->tokens));
    }
    for (uint64_t i = 0; i < r->n; i++) {
        uint64_t follows = r->trace->requests[i].follows;
        make_slot(r, i);
        r->due_ms[i] = due_of(r, i, i ? r->due_ms[i - 1] : 0);
        r->owner[i] = follows ? r->owner[follows - 1] : n_heads++ % (uint32_t)r->o.processes;
    }
    memset(&r->board->counts, 0, sizeof(r->board->counts));
    r->board->stop = 0;
    r->board->n_ready = 0;
    r->board->began_ns = 0;
}

/* ----------------------------------------------------------------- children */

/* Forks. The child is killed when the parent dies, and ignores Ctrl-C, which the parent handles. */
static pid_t fork_child(void)
{
    pid_t parent = getpid();
    fflush(NULL);
    pid_t pid = fork();
    if (pid)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_DFL);
    return 0;
}

int replay_in_child(struct replay *r, int (*run)(struct replay *r))
{
    int status = 0;
    pid_t pid = fork_child();
    if (!pid)
        _exit(run(r));
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
        if (replay_is_stopped())
            kill(pid, SIGTERM);
    return pid > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

struct senders {
    pid_t pids[REPLAY_MAX_PROCESSES];
    uint32_t n_alive, n_failed;
};

static void start_senders(struct replay *r, struct senders *s)
{
    for (uint32_t i = 0; i < (uint32_t)r->o.processes; i++) {
        s->pids[i] = fork_child();
        if (!s->pids[i])
            _exit(replay_send(r, i));
        s->n_alive += s->pids[i] > 0;
        s->n_failed += s->pids[i] < 0;
    }
}

static void reap_senders(const struct replay *r, struct senders *s)
{
    for (uint32_t i = 0; i < (uint32_t)r->o.processes; i++) {
        int status;
        if (s->pids[i] <= 0 || waitpid(s->pids[i], &status, WNOHANG) != s->pids[i])
            continue;
        s->pids[i] = 0;
        s->n_alive--;
        s->n_failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    }
}

/* ----------------------------------------------------------------- progress */

struct shown { /* the counts when progress was last shown */
    uint64_t at_ns, sent, answered, ttft_us, tpot_us, n_tpot;
    bool any;
};

static void show_progress(const struct replay *r, struct shown *last, uint64_t now_ns)
{
    const struct replay_counts *n = &r->board->counts;
    struct shown now = {now_ns, n->sent, n->answered, n->ttft_us, n->tpot_us, n->n_tpot, true};
    double seconds = (double)(now_ns - last->at_ns) * 1e-9;
    uint64_t answered = now.answered - last->answered, tpots = now.n_tpot - last->n_tpot, over = n->over;
    fprintf(stderr, "\r%.0f s: %" PRIu64 " of %" PRIu64 " sent, %.1f/s, %" PRIu64 " in flight",
            (double)(now_ns - r->board->began_ns) * 1e-9, now.sent, r->n, (double)(now.sent - last->sent) / seconds,
            now.sent > over ? now.sent - over : 0);
    if (answered)
        fprintf(stderr, ", TTFT %.0f", (double)(now.ttft_us - last->ttft_us) * 1e-3 / (double)answered);
    if (tpots)
        fprintf(stderr, ", TPOT %.1f ms", (double)(now.tpot_us - last->tpot_us) * 1e-3 / (double)tpots);
    fprintf(stderr, ", %.1f %% in time, %" PRIu64 " refused, %" PRIu64 " failed   ",
            over ? 100 * (double)n->met / (double)over : 100, n->refused, n->failed);
    *last = now;
}

/* ---------------------------------------------------------------------- run */

static bool wait_ready(struct replay *r, struct senders *s)
{
    while (s->n_alive && r->board->n_ready < s->n_alive && !replay_is_stopped()) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        reap_senders(r, s);
    }
    return s->n_alive && !s->n_failed && !replay_is_stopped();
}

static void conduct(struct replay *r, struct senders *s, struct replay_events *events)
{
    uint64_t began_ns = clock_now(&r->clock) + LEAD_MS * NS_PER_MS;
    struct shown last = {.at_ns = began_ns};
    r->board->began_ns = began_ns;
    while (s->n_alive) {
        nanosleep(&(struct timespec){.tv_nsec = TICK_MS * 1000000}, NULL);
        uint64_t now_ns = clock_now(&r->clock);
        int n = n_signals;
        r->board->stop = n < 2 ? n : 2;
        reap_senders(r, s);
        if (events && now_ns > began_ns && !n)
            replay_events_do(events, &r->o, (double)(now_ns - began_ns) * 1e-6);
        if (r->o.progress && now_ns > last.at_ns + SHOW_MS * NS_PER_MS)
            show_progress(r, &last, now_ns);
    }
    if (events)
        replay_events_end(events, &r->o);
    if (last.any)
        fprintf(stderr, "\n");
}

bool replay_run(struct replay *r, struct replay_events *events)
{
    struct senders s = {.n_alive = 0};
    start_senders(r, &s);
    bool ready = wait_ready(r, &s);
    if (ready)
        conduct(r, &s, events);
    r->board->stop = 2;
    while (s.n_alive) {
        nanosleep(&(struct timespec){.tv_nsec = TICK_MS * 1000000}, NULL);
        reap_senders(r, &s);
    }
    r->n_senders_died = ready ? s.n_failed : 0;
    if (r->n_senders_died)
        cli_fail("replay", "%u of the senders ended early: what they had under way counts as cut short", s.n_failed);
    for (uint64_t i = 0; i < r->n; i++) {
        struct report_request *q = &r->slots[i].q;
        if (r->slots[i].state == SLOT_SENT)
            q->outcome = REPORT_CUT_SHORT; /* its sender died before it wrote an outcome */
        q->token_ms = q->n_output ? r->tokens + r->first_token[i] : NULL;
    }
    return ready;
}
