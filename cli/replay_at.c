/*
 * Faults on schedule, as part of a replay: processes of a cluster on this machine (tandem up) are killed, frozen, slowed, drained,
 * or more of them started. Pids are read anew each time: one that died has another one since.
 *
 * A slowed process is stopped and let go on in turns of SLOW_MS together: so are its computing and what it sends. Faults on the
 * wire, on disk and in RPCs are scripts that a server is started with (--faults); they can't be changed while it runs.
 */
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/replay.h"
#include "cli/rundir.h"

enum { SLOW_MS = 50 };

static const char *const ACTIONS[] = {"kill", "stop", "cont", "term", "slow", "drain", "scale"};

/* ----------------------------------------------------------------- parsing */

static double parse_time(const char *text, char **end)
{
    double value = strtod(text, end);
    if (!strncmp(*end, "ms", 2))
        *end += 2;
    else if (**end == 's')
        value *= 1e3, ++*end;
    else if (**end == 'm')
        value *= 60e3, ++*end;
    else
        return -1;
    return value;
}

static bool is_action(const char *name)
{
    for (size_t i = 0; i < sizeof(ACTIONS) / sizeof(ACTIONS[0]); i++)
        if (!strcmp(name, ACTIONS[i]))
            return true;
    return false;
}

/* "30s:slow:decode-1/4" */
static enum td_status parse_event(const char *text, struct replay_event *out, struct td_error *e)
{
    char *end, extra = 0, factor[16] = "";
    *out = (struct replay_event){.at_ms = parse_time(text, &end)};
    int n = *end == ':' ? sscanf(end, ":%7[a-z]:%63[^/]%15s%c", out->action, out->target, factor, &extra) : 0;
    bool slow = n >= 2 && !strcmp(out->action, "slow");
    if (n < 2 || extra || !is_action(out->action) || !(out->at_ms >= 0 && out->at_ms <= 1e10))
        return td_fail(
            e, TD_ERR_INVALID,
            "--at: '%.60s': expected TIME:ACTION:WORKER, like 30s:kill:decode-1; actions are kill, stop, cont, "
            "term, drain, slow:WORKER/TIMES, scale:prefill=N",
            text);
    out->times = slow && *factor ? strtod(factor + 1, &end) : slow ? 2 : 0;
    if (slow ? !(out->times > 1 && out->times <= 1000) || (*factor && *end) : *factor)
        return td_fail(e, TD_ERR_INVALID, "--at: '%.60s': %s", text,
                       slow ? "a worker can be slowed 1 to 1000 times: slow:WORKER/TIMES"
                            : "nothing may follow the name");
    return TD_OK;
}

static int by_time(const void *a, const void *b)
{
    const struct replay_event *x = a, *y = b;
    return (x->at_ms > y->at_ms) - (x->at_ms < y->at_ms);
}

enum td_status replay_events_parse(const char *text, struct replay_events *out, struct td_error *error_out)
{
    char *copy = mem_strdup(text ? text : ""), *rest = copy;
    enum td_status s = TD_OK;
    *out = (struct replay_events){.n = 0};
    for (char *word; !s && (word = strtok_r(rest, ",", &rest));) {
        if (out->n == REPLAY_MAX_EVENTS)
            s = td_fail(error_out, TD_ERR_INVALID, "--at: more than %d events", REPLAY_MAX_EVENTS);
        else
            s = parse_event(word, &out->list[out->n++], error_out);
    }
    free(copy);
    qsort(out->list, out->n, sizeof(out->list[0]), by_time);
    return s;
}

/* --------------------------------------------------------------- processes */

/* 0: it is not there, or does not run. */
static pid_t pid_of(const struct rundir *dir, const char *name, bool *known_out)
{
    char path[PATH_MAX];
    size_t i;
    pid_t pid = 0;
    json_t *process;
    rundir_path(dir, "cluster.json", path);
    json_t *root = json_load_file(path, 0, NULL);
    *known_out = false;
    json_array_foreach(json_object_get(root, "processes"), i, process)
    {
        const char *text = json_string_value(json_object_get(process, "name"));
        if (!text || strcmp(text, name))
            continue;
        *known_out = true;
        pid = (pid_t)json_integer_value(json_object_get(process, "pid"));
    }
    json_decref(root);
    return pid > 1 ? pid : 0;
}

enum td_status replay_events_check(const struct replay_events *v, const char *run_dir, struct td_error *error_out)
{
    struct rundir dir;
    enum td_status s = v->n ? rundir_locate(run_dir, &dir, error_out) : TD_OK;
    if (s || !v->n)
        return s;
    if (rundir_owner(&dir) <= 0)
        return td_fail(error_out, TD_ERR_NOT_FOUND, "--at: no cluster runs in %s: tandem up starts one", dir.path);
    for (uint32_t i = 0; i < v->n; i++) {
        bool known;
        if (!strcmp(v->list[i].action, "scale")) /* may make the worker that a later event names */
            break;
        pid_of(&dir, v->list[i].target, &known);
        if (!known)
            return td_fail(error_out, TD_ERR_NOT_FOUND, "--at: no process '%s' in %s", v->list[i].target, dir.path);
    }
    return TD_OK;
}

/* ------------------------------------------------------------------- doing */

/* tandem drain WORKER, tandem scale prefill=N, in a process of their own: they wait. */
static void run_command(const struct replay_event *event, const struct replay_options *o)
{
    bool drain = !strcmp(event->action, "drain");
    const char *router = cli_router(o->router);
    if (fork())
        return;
    if (drain)
        execl("/proc/self/exe", "tandem", "drain", event->target, "--router", router, (char *)NULL);
    else if (o->run_dir)
        execl("/proc/self/exe", "tandem", "scale", event->target, "--run-dir", o->run_dir, (char *)NULL);
    else
        execl("/proc/self/exe", "tandem", "scale", event->target, (char *)NULL);
    _exit(127);
}

static void set_slowed(struct replay_events *v, pid_t pid, double times)
{
    uint32_t i = 0;
    while (i < v->n_slowed && v->slowed[i].pid != pid)
        i++;
    if (i == REPLAY_MAX_EVENTS)
        return;
    v->n_slowed += i == v->n_slowed;
    v->slowed[i].pid = pid;
    v->slowed[i].share = 1 / times;
}

static void forget_slowed(struct replay_events *v, pid_t pid)
{
    for (uint32_t i = 0; i < v->n_slowed; i++)
        if (v->slowed[i].pid == pid)
            v->slowed[i--] = v->slowed[--v->n_slowed];
}

static void do_event(struct replay_events *v, const struct replay_event *event, const struct replay_options *o)
{
    static const struct {
        const char *action;
        int signal;
    } SIGNALS[] = {{"kill", SIGKILL}, {"stop", SIGSTOP}, {"cont", SIGCONT}, {"term", SIGTERM}};
    struct rundir dir;
    bool known;
    fprintf(stderr, "\r%.1f s: %s %s%30s\n", event->at_ms * 1e-3, event->action, event->target, "");
    if (!strcmp(event->action, "drain") || !strcmp(event->action, "scale")) {
        run_command(event, o);
        return;
    }
    pid_t pid = rundir_locate(o->run_dir, &dir, NULL) ? 0 : pid_of(&dir, event->target, &known);
    if (!pid) {
        cli_fail("replay", "--at: %s does not run: nothing was done", event->target);
        return;
    }
    if (!strcmp(event->action, "slow")) {
        set_slowed(v, pid, event->times);
        return;
    }
    forget_slowed(v, pid);
    for (size_t i = 0; i < sizeof(SIGNALS) / sizeof(SIGNALS[0]); i++)
        if (!strcmp(event->action, SIGNALS[i].action))
            kill(pid, SIGNALS[i].signal);
}

void replay_events_do(struct replay_events *v, const struct replay_options *o, double now_ms)
{
    while (v->next < v->n && v->list[v->next].at_ms <= now_ms)
        do_event(v, &v->list[v->next++], o);
    for (uint32_t i = 0; i < v->n_slowed; i++) {
        bool stop = fmod(now_ms, SLOW_MS) >= SLOW_MS * v->slowed[i].share;
        if (stop != v->slowed[i].stopped)
            kill(v->slowed[i].pid, stop ? SIGSTOP : SIGCONT);
        v->slowed[i].stopped = stop;
    }
}

void replay_events_end(struct replay_events *v)
{
    if (v->next < v->n)
        cli_fail("replay", "--at: the run was over before %s %s was due", v->list[v->next].action,
                 v->list[v->next].target);
    for (uint32_t i = 0; i < v->n_slowed; i++)
        kill(v->slowed[i].pid, SIGCONT);
    v->n_slowed = 0;
    v->next = 0;
}
