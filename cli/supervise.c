#include "cli/supervise.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "cli/cli.h"

enum {
    READY_SECONDS = 60,
    TAIL_LINES = 5,
    CHECKS = 6, /* health checks within the time after which a process counts as deaf */
    LEAST_SILENT = 3
};
/* Limit of each: gateway, router, workers, stores. */
static const uint64_t DRAIN_NS = SUPERVISE_STOP_MS / 4 * NS_PER_MS;
/* Signals within this time count once: timeout(1) sends its signal to a process and to its group. */
static const uint64_t ONE_STOP_NS = 500 * NS_PER_MS;

struct supervisor {
    const struct supervise_config *config;
    struct clock clock;
    struct log log;
    int signal_fd;
    struct child *router; /* the last of the children at the start */
    struct child probe;   /* tandem status --wait, later tandem health; one at a time */
    int probe_status;
    uint64_t check_ns; /* when health is asked next, or the question is given up */
    uint32_t n_stops;  /* how often we were asked to stop; the second time means without draining */
    uint64_t stopped_ns;
    bool failed, stopping, quiet;
    bool changed;     /* cluster.json must be written again */
    bool unwritten;   /* the last attempt to write it failed */
    char loading[80]; /* the last progress line of a loading worker */
    bool is_up;       /* all processes have been ready once */
    bool scale;       /* tandem scale asks for other numbers of processes */
    uint32_t n_children;
    uint32_t n_given_up; /* processes that scale added and that can't start */
    char given_up[256];  /* what is wrong with the last of them */
};

int supervise_signals(void)
{
    struct sigaction hup;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGUSR1);
    if (!sigaction(SIGHUP, NULL, &hup) && hup.sa_handler != SIG_IGN) /* nohup */
        sigaddset(&set, SIGHUP);
    sigprocmask(SIG_BLOCK, &set, NULL);
    return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

/* ------------------------------------------------------------------- words */

static void say(struct supervisor *s, enum log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void say(struct supervisor *s, enum log_level level, const char *format, ...)
{
    char text[1200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    log_write(&s->log, level, "%s", text);
    if (!s->quiet)
        fprintf(stderr, "%s%s\n", level == LOG_ERROR ? "tandem up: " : "", text);
}

static json_t *json_child(const struct child *c)
{
    return json_pack("{s:s, s:s, s:I, s:s, s:s, s:I, s:o}", "name", c->name, "role", child_role_name(c->role), "pid",
                     (json_int_t)c->pid, "state", child_state_name(c->state), "address", c->announced ? c->listen : "",
                     "restarts", (json_int_t)c->n_restarts, "log", ask_text_json(c->log_path, strlen(c->log_path)));
}

static void write_cluster(struct supervisor *s)
{
    const struct supervise_config *k = s->config;
    struct bytes text = {0};
    struct td_error e;
    json_t *list = json_array();
    for (uint32_t i = 0; i < s->n_children; i++)
        if (s->stopping || k->children[i].state != CHILD_ENDED)
            json_array_append_new(list, json_child(&k->children[i]));
    json_t *root = json_pack("{s:I, s:s, s:o, s:I, s:o, s:o}", "pid", (json_int_t)getpid(), "router",
                             s->router->announced ? s->router->listen : "", "model",
                             ask_text_json(k->model, strlen(k->model)), "n_given_up", (json_int_t)s->n_given_up,
                             "given_up", ask_text_json(s->given_up, strlen(s->given_up)), "processes", list);
    char *json = json_dumps(root, JSON_INDENT(2));
    bytes_printf(&text, "%s\n", json ? json : "{}");
    bool failed = rundir_write(k->dir, "cluster.json", text.data, &e);
    if (failed && !s->unwritten)
        say(s, LOG_WARN, "%s", e.text);
    s->unwritten = failed;
    free(json);
    json_decref(root);
    bytes_free(&text);
    s->changed = false;
}

/* -------------------------------------------------------------------- loop */

/* A process that tandem scale asked for can't start: cluster.json says why, and the other processes go on. */
static void give_up_start(struct supervisor *s, const char *why)
{
    s->n_given_up++;
    snprintf(s->given_up, sizeof(s->given_up), "%s", why);
    s->changed = true;
}

static bool is_there(const struct child *c)
{
    return c->state != CHILD_ENDED && c->state != CHILD_STOPPING;
}

/* Replaces the last word, if it is this option, or adds it; NULL: it is left out. */
static void set_last(struct child_args *a, const char *option, const char *value)
{
    if (a->n && !strncmp(a->words[a->n - 1], option, strlen(option))) {
        free(a->words[--a->n]);
        a->words[a->n] = NULL;
    }
    if (value)
        args_add(a, "%s%s", option, value);
}

/* Tells the router of the workers and stores that are there now: one that was scaled away would be lost for
 * ever to a router that is started again. The others register by themselves. */
static void set_workers(struct supervisor *s)
{
    struct child_args *a = &s->router->args;
    struct bytes list = {0};
    for (uint32_t i = 0; i < s->n_children; i++) {
        const struct child *c = &s->config->children[i];
        if (c != s->router && c->role != CHILD_GATEWAY && is_there(c) && !c->registers)
            bytes_printf(&list, "%s%s", list.len ? "," : "", c->listen);
    }
    set_last(a, "--workers=", list.data);
    bytes_free(&list);
}

static void start(struct supervisor *s, struct child *c)
{
    char logs[PATH_MAX];
    struct td_error e;
    s->changed = true;
    if (c == s->router)
        set_workers(s);
    else if (c->role == CHILD_GATEWAY)
        set_last(&c->args, "--routers=", s->router->listen);
    rundir_path(s->config->dir, "logs", logs);
    mkdir(logs, 0700); /* somebody may have removed it to get room; without it nothing would start again */
    if (!child_start(c, clock_now(&s->clock), &e))
        return;
    say(s, c->announced ? LOG_WARN : LOG_ERROR, "%s", e.text);
    if (s->is_up && !c->announced) {
        give_up_start(s, e.text);
        child_stop(c);
    } else {
        s->failed |= !c->announced;
    }
}

static void on_announced(struct supervisor *s, struct child *c)
{
    c->heard_ns = clock_now(&s->clock);
    c->n_silent = 0;
    say(s, LOG_INFO, c->n_restarts ? "%s ready again %s" : "%s ready %s", c->name, c->listen);
    s->changed = true;
}

/* While the cluster starts, this fails the start. A process that was added later is given up, and the others
 * go on. */
static void on_exit_before_ready(struct supervisor *s, struct child *c, const char *how)
{
    struct bytes tail = {0}, last = {0};
    char why[sizeof(s->given_up)];
    child_log_tail(c, TAIL_LINES, &tail);
    child_log_tail(c, 1, &last);
    snprintf(why, sizeof(why), "%s ended before it was ready (%s)%s%.*s", c->name, how, last.len ? ": " : "",
             last.len ? (int)strcspn(last.data, "\n") : 0, last.len ? last.data : "");
    bytes_free(&last);
    say(s, LOG_ERROR, "%s ended before it was ready (%s)%s", c->name, how, tail.len ? ":" : "");
    for (char *line = tail.data ? strtok(tail.data, "\n") : NULL; line; line = strtok(NULL, "\n"))
        say(s, LOG_INFO, "  %s", line);
    bytes_free(&tail);
    if (s->is_up) {
        give_up_start(s, why);
        child_stop(c);
    } else {
        s->failed = true;
    }
}

static void on_exited(struct supervisor *s, struct child *c, int status)
{
    char how[64];
    struct bytes words = {0};
    child_describe_exit(status, how);
    s->changed = true;
    if (s->stopping || s->failed) {
        log_info(&s->log, "%s ended (%s)", c->name, how);
    } else if (c->state == CHILD_ENDED) {
        say(s, LOG_INFO, "%s drained (%s)", c->name, how);
    } else if (!c->announced) {
        on_exit_before_ready(s, c, how);
    } else {
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) /* a killed process has not logged why */
            child_log_tail(c, 1, &words);
        say(s, LOG_WARN, "%s ended (%s), starts again in %llu ms%s%.400s", c->name, how,
            (unsigned long long)(c->backoff_ns / NS_PER_MS), words.len ? "; its log ends: " : "",
            words.len ? words.data : "");
        bytes_free(&words);
    }
}

static void read_signals(struct supervisor *s)
{
    struct signalfd_siginfo info;
    uint64_t now = clock_now(&s->clock);
    while (read(s->signal_fd, &info, sizeof(info)) == sizeof(info))
        if (info.ssi_signo == SIGUSR1)
            s->scale = true;
        else if (info.ssi_signo != SIGCHLD && (!s->n_stops || now - s->stopped_ns > ONE_STOP_NS)) {
            s->n_stops++;
            s->stopped_ns = now;
        }
}

/* ------------------------------------------------------------------ health */

static uint64_t check_interval(const struct supervisor *s)
{
    return (uint64_t)s->config->deaf_ms * NS_PER_MS / CHECKS;
}

static bool is_checked(const struct supervisor *s)
{
    return s->is_up && s->config->deaf_ms && !s->stopping;
}

/* Starts tandem health for all processes that are up. One that takes until the next check is ended. */
static void check_health(struct supervisor *s)
{
    struct child *p = &s->probe;
    struct td_error e;
    uint64_t now = clock_now(&s->clock);
    if (!is_checked(s) || now < s->check_ns)
        return;
    s->check_ns = now + check_interval(s);
    if (p->pid) {
        child_kill(p);
        return;
    }
    args_free(&p->args);
    args_add(&p->args, "%s", s->config->tandem);
    args_add(&p->args, "health");
    args_add(&p->args, "--quiet");
    uint64_t half_ms = check_interval(s) / NS_PER_MS / 2;
    args_add(&p->args, "--timeout-ms=%llu", half_ms < 10 ? 10ull : half_ms < 2000 ? (unsigned long long)half_ms : 2000);
    for (uint32_t i = 0; i < s->n_children; i++)
        if (s->config->children[i].state == CHILD_UP)
            args_add(&p->args, "%s", s->config->children[i].listen);
    unlink(p->log_path); /* it has one answer at a time */
    if (child_start(p, now, &e))
        log_warn(&s->log, "%s", e.text);
}

/* Whether the answer of tandem health, a line for each process that does not serve, calls this one silent. */
static bool is_silent(const char *answer, const char *address)
{
    size_t len = strlen(address);
    for (const char *line = answer; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
        if (!strncmp(line, address, len) && line[len] == ' ')
            return !strncmp(line + len + strspn(line + len, " "), "silent", 6);
    return false;
}

static void on_health(struct supervisor *s)
{
    struct bytes answer = {0};
    uint64_t now = clock_now(&s->clock);
    child_log_tail(&s->probe, UINT32_MAX, &answer);
    for (uint32_t i = 0; i < s->n_children; i++) {
        struct child *c = &s->config->children[i];
        if (c->state != CHILD_UP || c->started_ns > s->probe.started_ns)
            continue;
        if (!is_silent(answer.data, c->listen)) {
            c->heard_ns = now;
            c->n_silent = 0;
        } else if (++c->n_silent >= LEAST_SILENT && now - c->heard_ns >= (uint64_t)s->config->deaf_ms * NS_PER_MS) {
            say(s, LOG_WARN, "%s has not answered for %llu s: killed", c->name,
                (unsigned long long)((now - c->heard_ns) / NS_PER_S));
            child_kill(c);
        }
    }
    bytes_free(&answer);
}

static void reap(struct supervisor *s)
{
    int status;
    uint64_t now = clock_now(&s->clock);
    for (uint32_t i = 0; i < s->n_children; i++)
        if (child_reap(&s->config->children[i], now, &status))
            on_exited(s, &s->config->children[i], status);
    if (child_reap(&s->probe, now, &s->probe_status) && is_checked(s) && WIFEXITED(s->probe_status))
        on_health(s);
}

/* When stopping, stop_roles() kills. */
static bool is_waited_for(const struct supervisor *s, const struct child *c)
{
    return (c->state == CHILD_BACKOFF || c->state == CHILD_STOPPING) && !s->stopping;
}

/* Starts again what has waited long enough, and kills what was told to drain and does not end. */
static void act_on_due(struct supervisor *s)
{
    uint64_t now = clock_now(&s->clock);
    for (uint32_t i = 0; i < s->n_children; i++) {
        struct child *c = &s->config->children[i];
        if (!is_waited_for(s, c) || now < c->due_ns)
            continue;
        if (c->state == CHILD_BACKOFF && !s->failed) {
            start(s, c);
        } else if (c->state == CHILD_STOPPING) {
            say(s, LOG_WARN, "%s has not ended yet: killed", c->name);
            child_kill(c);
            c->due_ns = UINT64_MAX;
        }
    }
}

/* Milliseconds until the deadline or the next restart; rounded up, so that it is due then. -1: nothing is
 * due. */
static int poll_ms(const struct supervisor *s, uint64_t deadline)
{
    uint64_t now = clock_now(&s->clock);
    if (s->unwritten && now + NS_PER_S < deadline)
        deadline = now + NS_PER_S;
    if (is_checked(s) && s->check_ns < deadline)
        deadline = s->check_ns;
    for (uint32_t i = 0; i < s->n_children; i++) {
        const struct child *c = &s->config->children[i];
        if (is_waited_for(s, c) && c->due_ns < deadline)
            deadline = c->due_ns;
    }
    return deadline == UINT64_MAX ? -1 : deadline <= now ? 0 : (int)((deadline - now + NS_PER_MS - 1) / NS_PER_MS);
}

/* Waits for the next thing to happen, or the deadline, and deals with it. */
static void turn(struct supervisor *s, uint64_t deadline)
{
    const struct supervise_config *k = s->config;
    struct pollfd *fds = mem_array(s->n_children + 1, sizeof(*fds));
    fds[s->n_children] = (struct pollfd){.fd = s->signal_fd, .events = POLLIN};
    for (uint32_t i = 0; i < s->n_children; i++)
        fds[i] = (struct pollfd){.fd = k->children[i].ready_fd, .events = POLLIN};
    poll(fds, s->n_children + 1, poll_ms(s, deadline));
    for (uint32_t i = 0; i < s->n_children; i++)
        if (fds[i].fd >= 0 && fds[i].revents && child_hear(&k->children[i]))
            on_announced(s, &k->children[i]);
    free(fds);
    read_signals(s);
    reap(s);
    act_on_due(s);
    check_health(s);
    if (s->changed || s->unwritten)
        write_cluster(s);
}

/* ------------------------------------------------------------------- scale */

static void name_log(struct supervisor *s, struct child *c)
{
    char path[PATH_MAX];
    c->ready_fd = -1;
    snprintf(path, sizeof(path), "logs/%s.log", c->name);
    rundir_path(s->config->dir, path, c->log_path);
}

/* A place in the array: that of a process that has ended, else a new one. NULL: the array is full. */
static struct child *free_child(struct supervisor *s)
{
    for (uint32_t i = 0; i < s->n_children; i++)
        if (s->config->children[i].state == CHILD_ENDED) {
            child_free(&s->config->children[i]);
            return &s->config->children[i];
        }
    return s->n_children < s->config->max_children ? &s->config->children[s->n_children++] : NULL;
}

static bool has_number(const struct supervisor *s, enum child_role role, uint32_t number)
{
    char name[32];
    snprintf(name, sizeof(name), "%s-%u", child_role_name(role), number);
    for (uint32_t i = 0; i < s->n_children; i++)
        if (s->config->children[i].state != CHILD_ENDED && !strcmp(s->config->children[i].name, name))
            return true;
    return false;
}

static void add_process(struct supervisor *s, enum child_role role)
{
    struct td_error e;
    uint32_t number = 0;
    struct child *c = free_child(s);
    if (!c) {
        snprintf(e.text, sizeof(e.text), "no more than %u processes", s->config->max_children);
        say(s, LOG_WARN, "%s", e.text);
        give_up_start(s, e.text);
        return;
    }
    *c = (struct child){.state = CHILD_ENDED, .ready_fd = -1};
    while (has_number(s, role, number))
        number++;
    struct child made = {.role = role};
    if (s->config->make(s->config->user, role, number, s->router->listen, &made, &e)) {
        say(s, LOG_WARN, "%s", e.text);
        give_up_start(s, e.text);
        child_free(&made);
        return;
    }
    *c = made;
    c->registers = true;
    name_log(s, c);
    start(s, c);
}

static void drain_process(struct supervisor *s, enum child_role role)
{
    struct child *last = NULL;
    for (uint32_t i = 0; i < s->n_children; i++) {
        struct child *c = &s->config->children[i];
        if (c->role == role && is_there(c) &&
            (!last || strlen(c->name) > strlen(last->name) ||
             (strlen(c->name) == strlen(last->name) && strcmp(c->name, last->name) > 0)))
            last = c;
    }
    if (last) {
        child_stop(last);
        last->due_ns = clock_now(&s->clock) + (uint64_t)last->drain_ms * NS_PER_MS + DRAIN_NS;
    }
    s->changed = true;
}

static void scale_role(struct supervisor *s, enum child_role role, int wanted)
{
    uint32_t n = 0, target = (uint32_t)wanted;
    if (wanted < 0)
        return;
    for (uint32_t i = 0; i < s->n_children; i++)
        n += s->config->children[i].role == role && is_there(&s->config->children[i]);
    if (n != target)
        say(s, LOG_INFO, "%s: %u, shall be %u", child_role_name(role), n, target);
    for (; n < target; n++)
        add_process(s, role);
    for (; n > target; n--)
        drain_process(s, role);
}

static void scale(struct supervisor *s)
{
    char path[PATH_MAX];
    int n_prefill, n_decode, n_store; /* below 0: leave as it is */
    rundir_path(s->config->dir, "scale", path);
    FILE *f = fopen(path, "re");
    s->scale = false;
    if (!f || fscanf(f, "%d %d %d", &n_prefill, &n_decode, &n_store) != 3 || n_prefill > CHILD_MOST || !n_decode ||
        n_decode > CHILD_MOST || n_store > CHILD_MOST) {
        say(s, LOG_WARN, "%s can't be read: three numbers are expected", path);
    } else {
        scale_role(s, CHILD_PREFILL, n_prefill);
        scale_role(s, CHILD_DECODE, n_decode);
        scale_role(s, CHILD_STORE, n_store);
    }
    if (f)
        fclose(f);
}

static bool go_on(const struct supervisor *s)
{
    return !s->failed && !s->n_stops;
}

/* ---------------------------------------------------------- start and stop */

/* Prints the last progress line of a worker that loads its model, unless it was printed already. */
static void tell_loading(struct supervisor *s, const struct child *c)
{
    struct bytes line = {0};
    child_log_tail(c, 1, &line);
    char *at = line.data ? strstr(line.data, " loading percent=") : NULL;
    if (at)
        at[strcspn(at, "\n")] = 0;
    if (at && strcmp(at, s->loading)) {
        snprintf(s->loading, sizeof(s->loading), "%s", at);
        fprintf(stderr, "%s%s\n", c->name, s->loading);
    }
    bytes_free(&line);
}

static bool wait_announced(struct supervisor *s, uint32_t n_children)
{
    uint32_t n = 0;
    uint64_t due_ns = clock_now(&s->clock) + NS_PER_S;
    while (go_on(s)) {
        while (n < n_children && s->config->children[n].announced)
            n++;
        if (n == n_children)
            return true;
        turn(s, due_ns);
        if (clock_now(&s->clock) < due_ns)
            continue;
        due_ns = clock_now(&s->clock) + NS_PER_S;
        if (n < n_children)
            tell_loading(s, &s->config->children[n]);
    }
    return false;
}

static bool start_workers(struct supervisor *s)
{
    uint32_t n = 0;
    for (; s->config->children[n].role != CHILD_ROUTER && s->config->children[n].role != CHILD_GATEWAY; n++)
        start(s, &s->config->children[n]);
    return wait_announced(s, n);
}

static bool start_router(struct supervisor *s)
{
    start(s, s->router);
    while (go_on(s) && !s->router->announced)
        turn(s, UINT64_MAX);
    return go_on(s);
}

static bool start_gateway(struct supervisor *s)
{
    for (uint32_t i = 0; i < s->n_children; i++)
        if (s->config->children[i].role == CHILD_GATEWAY)
            start(s, &s->config->children[i]);
    return wait_announced(s, s->n_children);
}

static void end_probe(struct supervisor *s)
{
    struct child *p = &s->probe;
    if (!p->pid)
        return;
    child_kill(p);
    waitpid(p->pid, &s->probe_status, 0);
    p->pid = 0;
    if (p->ready_fd >= 0)
        close(p->ready_fd);
}

static bool wait_ready(struct supervisor *s)
{
    struct child *p = &s->probe;
    struct bytes tail = {0};
    args_add(&p->args, "%s", s->config->tandem);
    static const char *const WORDS[] = {"status", "--json", "--router"};
    for (int i = 0; i < 3; i++)
        args_add(&p->args, "%s", WORDS[i]);
    args_add(&p->args, "%s", s->router->listen);
    args_add(&p->args, "--wait=%d", READY_SECONDS);
    start(s, p);
    while (go_on(s) && p->pid)
        turn(s, UINT64_MAX);
    end_probe(s);
    if (!go_on(s))
        return false;
    s->failed = !WIFEXITED(s->probe_status) || WEXITSTATUS(s->probe_status);
    if (s->failed) {
        child_log_tail(p, 1, &tail);
        say(s, LOG_ERROR, "the cluster did not get ready: %s", tail.data ? tail.data : "");
        bytes_free(&tail);
    }
    return !s->failed;
}

static uint32_t kill_late(struct supervisor *s, bool late)
{
    uint32_t n_running = 0;
    for (uint32_t i = 0; i < s->n_children; i++) {
        struct child *c = &s->config->children[i];
        if (c->state != CHILD_STOPPING)
            continue;
        n_running++;
        if (late) {
            say(s, LOG_WARN, "%s has not ended yet: killed", c->name);
            child_kill(c);
        }
    }
    return n_running;
}

/* Tells the children with these roles to end, and waits until they have. */
static void stop_roles(struct supervisor *s, enum child_role first, enum child_role last)
{
    uint64_t deadline = clock_now(&s->clock) + DRAIN_NS;
    for (uint32_t i = 0; i < s->n_children; i++)
        if (s->config->children[i].role >= first && s->config->children[i].role <= last)
            child_stop(&s->config->children[i]);
    for (;;) {
        bool late = deadline != UINT64_MAX && (clock_now(&s->clock) >= deadline || s->n_stops > 1);
        if (!kill_late(s, late))
            return;
        deadline = late ? UINT64_MAX : deadline;
        turn(s, deadline);
    }
}

static bool bring_up(struct supervisor *s)
{
    struct td_error e;
    struct bytes text = {0};
    if (!start_workers(s) || !start_router(s) || !start_gateway(s) || !wait_ready(s))
        return false;
    bytes_printf(&text, "%s\n", s->router->listen);
    s->failed = rundir_write(s->config->dir, "router.address", text.data, &e);
    bytes_free(&text);
    if (s->failed) {
        say(s, LOG_ERROR, "%s", e.text);
        return false;
    }
    log_info(&s->log, "up router=%s", s->router->listen);
    s->quiet = s->config->on_up(s->config->user, s->router->listen);
    s->is_up = true;
    return true;
}

int supervise_run(const struct supervise_config *config, int signal_fd)
{
    char path[PATH_MAX];
    struct supervisor s = {.config = config, .signal_fd = signal_fd, .log = {.who = "up", .level = LOG_INFO}};
    clock_init_real(&s.clock);
    rundir_path(config->dir, "logs/up.log", path);
    s.log.fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (s.log.fd < 0) {
        fprintf(stderr, "tandem up: %s: %s\n", path, strerror(errno));
        return 1;
    }
    s.n_children = config->n_children;
    for (uint32_t i = 0; i < s.n_children; i++)
        name_log(&s, &config->children[i]);
    s.router = &config->children[config->n_children - 1];
    s.probe_status = -1; /* not a status of a process that exited */
    s.probe = (struct child){.name = "status", .role = CHILD_STATUS, .ready_fd = -1};
    rundir_path(config->dir, "logs/status.log", s.probe.log_path);
    log_info(&s.log, "starting pid=%d", (int)getpid());
    bool up = bring_up(&s);
    while (go_on(&s)) {
        turn(&s, UINT64_MAX);
        if (s.scale && go_on(&s))
            scale(&s);
        if (s.changed)
            write_cluster(&s);
    }
    log_info(&s.log, "stopping");
    s.stopping = true;
    stop_roles(&s, CHILD_GATEWAY, CHILD_GATEWAY);
    stop_roles(&s, CHILD_ROUTER, CHILD_ROUTER);
    stop_roles(&s, CHILD_PREFILL, CHILD_DECODE);
    stop_roles(&s, CHILD_STORE, CHILD_STORE);
    end_probe(&s);
    log_info(&s.log, "stopped");
    child_free(&s.probe);
    close(s.log.fd);
    return up ? 0 : 1;
}
