/*
 * Faults on schedule during a replay. Processes of a cluster on this machine (tandem up) are killed, frozen,
 * slowed, drained or added, and scripts (base/fault.h) make their operations on the wire, on disk and in RPCs
 * fail. Process ids are read from cluster.json each time, because a process that died has been started again
 * under another id.
 *
 * A slowed process is stopped and continued in turns that take SLOW_MS together. This slows both its
 * computing and its sending.
 *
 * A script is written to a file that the process reads at each start, and again at SIGUSR1 (tandem up
 * --faults). So a process that dies comes back with its faults. At its end, however it came, the run takes
 * away the faults that it set; only a replay that is killed leaves them.
 */
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fault.h"
#include "cli/replay.h"
#include "cli/rundir.h"

enum { SLOW_MS = 50 };

static const char *const ACTIONS[] = {"kill", "stop", "cont", "term", "slow", "faults", "drain", "scale"};

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

static bool is_action(const struct replay_event *event, const char *action)
{
    return !strcmp(event->action, action);
}

static bool is_known(const struct replay_event *event)
{
    for (size_t i = 0; i < sizeof(ACTIONS) / sizeof(ACTIONS[0]); i++)
        if (is_action(event, ACTIONS[i]))
            return true;
    return false;
}

static enum td_status bad_event(const char *text, const char *why, struct td_error *e)
{
    return td_fail(e, TD_ERR_INVALID, "--at: '%.60s': %s", text, why);
}

static enum td_status parse_times(const char *text, const char *rest, struct replay_event *out, struct td_error *e)
{
    char *end;
    out->times = strtod(*rest ? rest + 1 : "2", &end);
    return *end || !(out->times > 1 && out->times <= 1000)
               ? bad_event(text, "TIMES must be above 1 and at most 1000: slow:WORKER/TIMES", e)
               : TD_OK;
}

static enum td_status parse_script(const char *text, const char *rest, struct replay_event *out, struct td_error *e)
{
    struct td_error why = {{0}};
    struct faults *faults;
    if (!*rest)
        return bad_event(text, "the script is missing: faults:NAME/SCRIPT; an empty script ends faults", e);
    if (rest[1] == '@')
        return bad_event(text, "expected a script, not the name of a file with a script", e);
    if (strlen(rest + 1) >= sizeof(out->script))
        return bad_event(text, "the script is too long", e);
    if (faults_open(rest + 1, NULL, &faults, &why))
        return bad_event(text, why.text, e);
    faults_close(faults);
    snprintf(out->script, sizeof(out->script), "%s", rest + 1);
    return TD_OK;
}

/* Parses "30s:slow:decode-1/4". rest is what follows the name: nothing, or '/' and more. */
static enum td_status parse_event(const char *text, struct replay_event *out, struct td_error *e)
{
    char *end;
    int len = 0;
    *out = (struct replay_event){.at_ms = parse_time(text, &end)};
    int n = sscanf(end, ":%7[a-z]:%63[^/]%n", out->action, out->target, &len);
    const char *rest = end + len;
    if (n != 2 || !is_known(out) || (*rest && *rest != '/') || !(out->at_ms >= 0 && out->at_ms <= 1e10))
        return bad_event(text,
                         "expected TIME:ACTION:WORKER, like 30s:kill:decode-1; actions are kill, stop, cont, term, "
                         "drain, slow:WORKER/TIMES, faults:NAME/SCRIPT, scale:prefill=N",
                         e);
    if (is_action(out, "slow"))
        return parse_times(text, rest, out, e);
    if (is_action(out, "faults"))
        return parse_script(text, rest, out, e);
    return *rest ? bad_event(text, "nothing may follow the name", e) : TD_OK;
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

/* Process id by name; 0: the process is not known, or does not run. */
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

static enum td_status check_takes_faults(const struct rundir *dir, const char *name, struct td_error *e)
{
    char path[PATH_MAX];
    rundir_path(dir, RUNDIR_FAULTS, path);
    if (access(path, F_OK))
        return td_fail(e, TD_ERR_INVALID,
                       "--at: faults can't be set in the cluster of %s: start it with tandem up --faults", dir->path);
    if (!strcmp(name, "router"))
        return td_fail(e, TD_ERR_INVALID, "--at: faults of the router can't be set, only those of workers and store");
    return TD_OK;
}

enum td_status replay_events_check(const struct replay_events *v, const char *run_dir, struct td_error *error_out)
{
    struct rundir dir;
    bool known, is_scaled = false; /* an earlier scale may start the worker that a later event names */
    enum td_status s = v->n ? rundir_locate(run_dir, &dir, error_out) : TD_OK;
    if (s || !v->n)
        return s;
    if (rundir_owner(&dir) <= 0)
        return td_fail(error_out, TD_ERR_NOT_FOUND, "--at: no cluster runs in %s: tandem up starts one", dir.path);
    for (uint32_t i = 0; i < v->n && !s; i++) {
        const struct replay_event *event = &v->list[i];
        is_scaled |= is_action(event, "scale");
        pid_of(&dir, event->target, &known);
        if (!known && !is_scaled)
            s = td_fail(error_out, TD_ERR_NOT_FOUND, "--at: no process '%s' in %s", event->target, dir.path);
        else if (is_action(event, "faults"))
            s = check_takes_faults(&dir, event->target, error_out);
    }
    return s;
}

/* ------------------------------------------------------------------- doing */

/*
 * Runs tandem drain WORKER or tandem scale prefill=N in a process of its own, because these commands wait. It
 * is not waited for: its messages go to the same stderr, and it may end after the replay.
 */
static void run_command(const struct replay_event *event, const struct replay_options *o)
{
    bool drain = is_action(event, "drain");
    const char *router = cli_router(o->router);
    if (fork())
        return;
    if (drain && o->admin)
        execl("/proc/self/exe", "tandem", "drain", event->target, "--admin", o->admin, (char *)NULL);
    else if (drain)
        execl("/proc/self/exe", "tandem", "drain", event->target, "--router", router, (char *)NULL);
    else if (o->run_dir)
        execl("/proc/self/exe", "tandem", "scale", event->target, "--run-dir", o->run_dir, (char *)NULL);
    else
        execl("/proc/self/exe", "tandem", "scale", event->target, (char *)NULL);
    _exit(127);
}

/*
 * Slowed processes are known by their process id, which replay_events_do() does not look up again. So an id
 * must be forgotten before its process can end: at each kill, stop, cont and term of this replay. If a slowed
 * process ends by itself, its id gets signals until the end of the run, as long as no other process has it.
 */
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

/* Reads the pid after it has written the file: a process that starts in between has read the new file. */
static void set_faults(const char *name, const char *script, const struct replay_options *o)
{
    char file[96];
    struct rundir dir;
    struct td_error e = {{0}};
    bool known;
    snprintf(file, sizeof(file), RUNDIR_FAULTS "/%s", name);
    if (rundir_locate(o->run_dir, &dir, &e) || rundir_write(&dir, file, script, &e)) {
        cli_fail("replay", "--at: %s", e.text);
        return;
    }
    pid_t pid = pid_of(&dir, name, &known);
    if (pid)
        kill(pid, SIGUSR1);
    else if (*script)
        cli_fail("replay", "--at: %s does not run: its faults begin when it does", name);
}

static void send_signal(struct replay_events *v, const struct replay_event *event, const struct replay_options *o)
{
    static const struct {
        const char *action;
        int signal;
    } SIGNALS[] = {{"kill", SIGKILL}, {"stop", SIGSTOP}, {"cont", SIGCONT}, {"term", SIGTERM}};
    struct rundir dir;
    bool known;
    pid_t pid = rundir_locate(o->run_dir, &dir, NULL) ? 0 : pid_of(&dir, event->target, &known);
    if (!pid) {
        cli_fail("replay", "--at: %s does not run: nothing was done", event->target);
        return;
    }
    if (is_action(event, "slow")) {
        set_slowed(v, pid, event->times);
        return;
    }
    forget_slowed(v, pid);
    for (size_t i = 0; i < sizeof(SIGNALS) / sizeof(SIGNALS[0]); i++)
        if (is_action(event, SIGNALS[i].action))
            kill(pid, SIGNALS[i].signal);
}

static void do_event(struct replay_events *v, const struct replay_event *event, const struct replay_options *o)
{
    bool is_faults = is_action(event, "faults");
    fprintf(stderr, "\r%.1f s: %s %s %s%30s\n", event->at_ms * 1e-3, event->action, event->target,
            is_faults && !*event->script ? "none" : event->script, "");
    if (is_action(event, "drain") || is_action(event, "scale"))
        run_command(event, o);
    else if (is_faults)
        set_faults(event->target, event->script, o);
    else
        send_signal(v, event, o);
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

void replay_events_end(struct replay_events *v, const struct replay_options *o)
{
    if (v->next < v->n)
        cli_fail("replay", "--at: the run was over before %s %s was due", v->list[v->next].action,
                 v->list[v->next].target);
    for (uint32_t i = 0; i < v->n_slowed; i++)
        kill(v->slowed[i].pid, SIGCONT);
    for (uint32_t i = 0; i < v->next; i++)
        if (*v->list[i].script)
            set_faults(v->list[i].target, "", o);
    v->n_slowed = 0;
    v->next = 0;
}
