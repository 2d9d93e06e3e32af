#include "cli/child.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"

enum { TAIL_BYTES = 8192 };
static const uint64_t BACKOFF_MIN_NS = 100 * NS_PER_MS, BACKOFF_MAX_NS = 5 * NS_PER_S, BACKOFF_RESET_NS = 10 * NS_PER_S;

void args_add(struct child_args *a, const char *format, ...)
{
    char *word;
    va_list list;
    va_start(list, format);
    if (vasprintf(&word, format, list) < 0)
        abort();
    va_end(list);
    a->words = mem_resize(a->words, a->n + 2, sizeof(*a->words));
    a->words[a->n++] = word;
    a->words[a->n] = NULL;
}

void args_free(struct child_args *a)
{
    for (uint32_t i = 0; i < a->n; i++)
        free(a->words[i]);
    free(a->words);
    *a = (struct child_args){0};
}

const char *child_role_name(enum child_role role)
{
    static const char *const NAMES[] = {"router", "prefill", "decode", "store", "gateway", "status"};
    return NAMES[role];
}

const char *child_state_name(enum child_state state)
{
    static const char *const NAMES[] = {"idle", "starting", "up", "backoff", "stopping", "ended"};
    return NAMES[state];
}

static void set_state(struct child *c, enum child_state to)
{
    static const bool LEGAL[6][6] = {
        [CHILD_IDLE] = {[CHILD_STARTING] = true, [CHILD_ENDED] = true},
        [CHILD_STARTING] = {[CHILD_UP] = true, [CHILD_BACKOFF] = true, [CHILD_STOPPING] = true},
        [CHILD_UP] = {[CHILD_BACKOFF] = true, [CHILD_STOPPING] = true, [CHILD_ENDED] = true},
        [CHILD_BACKOFF] = {[CHILD_STARTING] = true, [CHILD_ENDED] = true},
        [CHILD_STOPPING] = {[CHILD_ENDED] = true},
    };
    if (!LEGAL[c->state][to])
        abort();
    c->state = to;
}

/* ---------------------------------------------------------------- starting */

/* Runs in the child, between fork and exec. log_fd becomes stdout and stderr; ready_fd stays open. */
static _Noreturn void become(char **argv, pid_t parent, int log_fd, int ready_fd)
{
    char number[16];
    sigset_t blocked;
    sigemptyset(&blocked);
    /* tandem replay --at may send it before the process handles it: it stays pending until then. */
    sigaddset(&blocked, SIGUSR1);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) /* the parent died before prctl() took effect */
        _exit(1);
    setpgid(0, 0);
    signal(SIGPIPE, SIG_DFL);
    sigprocmask(SIG_SETMASK, &blocked, NULL);
    int null_fd = open("/dev/null", O_RDONLY);
    dup2(null_fd, 0);
    dup2(log_fd, 1);
    dup2(log_fd, 2);
    close_range(3, ~0u, CLOSE_RANGE_CLOEXEC);
    fcntl(ready_fd, F_SETFD, 0);
    snprintf(number, sizeof(number), "%d", ready_fd);
    setenv("TANDEM_READY_FD", number, 1);
    execv(argv[0], argv);
    dprintf(2, "%s: can't be run: %s\n", argv[0], strerror(errno));
    _exit(127);
}

static void back_off(struct child *c, uint64_t now)
{
    if (!c->backoff_ns || now - c->started_ns >= BACKOFF_RESET_NS)
        c->backoff_ns = BACKOFF_MIN_NS;
    else
        c->backoff_ns = c->backoff_ns * 2 < BACKOFF_MAX_NS ? c->backoff_ns * 2 : BACKOFF_MAX_NS;
    c->due_ns = now + c->backoff_ns;
    set_state(c, CHILD_BACKOFF);
}

enum td_status child_start(struct child *c, uint64_t now, struct td_error *e)
{
    int fds[2] = {-1, -1};
    struct stat st;
    struct child_args args = {0};
    for (uint32_t i = 0; i < c->args.n; i++)
        args_add(&args, "%s", c->args.words[i]);
    if (c->listen[0]) {
        args_add(&args, "--listen");
        args_add(&args, "%s", c->listen);
    }
    c->n_restarts += c->state == CHILD_BACKOFF;
    c->started_ns = now;
    set_state(c, CHILD_STARTING);
    int log_fd = open(c->log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    c->log_start = log_fd >= 0 && !fstat(log_fd, &st) ? st.st_size : 0;
    pid_t parent = getpid(), pid = log_fd < 0 || pipe2(fds, O_CLOEXEC | O_NONBLOCK) ? -1 : fork();
    if (!pid)
        become(args.words, parent, log_fd, fds[1]);
    enum td_status s =
        pid > 0 ? TD_OK
                : td_fail(e, TD_ERR_IO, "%s can't be started (log %s): %s", c->name, c->log_path, strerror(errno));
    if (log_fd >= 0)
        close(log_fd);
    if (fds[1] >= 0)
        close(fds[1]);
    if (s && fds[0] >= 0)
        close(fds[0]);
    if (s)
        back_off(c, now);
    c->pid = s ? 0 : pid;
    c->ready_fd = s ? -1 : fds[0];
    args_free(&args);
    return s;
}

bool child_hear(struct child *c)
{
    char text[sizeof(c->listen)];
    ssize_t n = read(c->ready_fd, text, sizeof(text) - 1);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    close(c->ready_fd); /* the address comes in one write, and nothing follows it */
    c->ready_fd = -1;
    if (n <= 0 || c->state != CHILD_STARTING)
        return false;
    text[n] = 0;
    text[strcspn(text, "\n")] = 0;
    memcpy(c->listen, text, sizeof(c->listen));
    c->announced = true;
    set_state(c, CHILD_UP);
    return true;
}

/* ------------------------------------------------------------------ ending */

bool child_reap(struct child *c, uint64_t now, int *wait_status_out)
{
    int status;
    if (!c->pid || waitpid(c->pid, &status, WNOHANG) != c->pid)
        return false;
    c->pid = 0;
    if (c->ready_fd >= 0)
        close(c->ready_fd);
    c->ready_fd = -1;
    bool may_drain = c->role != CHILD_ROUTER && c->role != CHILD_GATEWAY; /* without these nobody is served */
    bool drained = may_drain && c->announced && WIFEXITED(status) && !WEXITSTATUS(status);
    if (c->state == CHILD_STOPPING || drained)
        set_state(c, CHILD_ENDED);
    else
        back_off(c, now);
    *wait_status_out = status;
    return true;
}

void child_stop(struct child *c)
{
    if (c->state == CHILD_STARTING || c->state == CHILD_UP) {
        kill(c->pid, c->state == CHILD_UP ? SIGTERM : SIGKILL);
        set_state(c, CHILD_STOPPING);
    } else if (c->state == CHILD_IDLE || c->state == CHILD_BACKOFF) {
        set_state(c, CHILD_ENDED);
    }
}

void child_kill(struct child *c)
{
    if (c->pid)
        kill(c->pid, SIGKILL);
}

void child_free(struct child *c)
{
    args_free(&c->args);
}

void child_log_tail(const struct child *c, uint32_t n_lines, struct bytes *out)
{
    char text[TAIL_BYTES];
    struct stat st;
    int fd = open(c->log_path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    int64_t end = fstat(fd, &st) ? 0 : st.st_size,
            at = end - TAIL_BYTES > c->log_start ? end - TAIL_BYTES : c->log_start;
    ssize_t n = pread(fd, text, sizeof(text), at);
    close(fd);
    while (n > 0 && text[n - 1] == '\n')
        n--;
    ssize_t first = n;
    for (uint32_t lines = 0; first > 0; first--)
        if (text[first - 1] == '\n' && ++lines == n_lines)
            break;
    if (n > 0)
        bytes_append(out, text + first, (size_t)(n - first));
}

void child_describe_exit(int status, char out[64])
{
    if (WIFSIGNALED(status))
        snprintf(out, 64, "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        snprintf(out, 64, "exit code %d", WEXITSTATUS(status));
}
