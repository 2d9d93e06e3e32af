#include "base/process.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/thread.h"

struct process_signals {
    const char *program;
    pthread_t thread;
    _Atomic bool closing;
    /* Guards the members below: they are set once, while signals may arrive. */
    pthread_mutex_t lock;
    void (*stop)(void *user), (*reload)(void *user);
    void *user;
    bool is_reload_due; /* SIGUSR1 came before process_on_signals() */
};

/* Opening takes the lowest free number; the wrong direction makes reading and writing fail. Bare system
 * calls, because sanitizers, which replace the functions, may not have started yet. */
static void fill_standard_files(int argc, char **argv, char **environment)
{
    (void)argc, (void)argv, (void)environment;
    for (int fd = 0; fd <= 2; fd++)
        if (syscall(SYS_fcntl, fd, F_GETFD) < 0 &&
            syscall(SYS_openat, AT_FDCWD, "/dev/null", fd ? O_RDONLY : O_WRONLY, 0) != fd)
            _exit(1);
}

__attribute__((section(".preinit_array"),
               used)) static void (*const before_constructors)(int, char **, char **) = fill_standard_files;

static sigset_t our_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGUSR2); /* ends the thread, at process_signals_close */
    return set;
}

void process_block_signals(void)
{
    sigset_t set = our_signals();
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
}

void process_default_fatal_signals(void)
{
    static const int SIGNALS[] = {SIGSEGV, SIGILL, SIGBUS, SIGFPE, SIGABRT};
    for (size_t i = 0; i < sizeof(SIGNALS) / sizeof(SIGNALS[0]); i++) {
        struct sigaction now;
        Dl_info where;
        if (sigaction(SIGNALS[i], NULL, &now) || !(now.sa_flags & SA_SIGINFO))
            continue;
        void *handler;
        memcpy(&handler, &now.sa_sigaction, sizeof(handler)); /* C has no cast from functions to objects */
        if (dladdr(handler, &where) && where.dli_fname && strstr(where.dli_fname, "libucs"))
            signal(SIGNALS[i], SIG_DFL);
    }
}

/*
 * The callbacks are called without the lock: they may take long, and process_on_signals() may call reload at
 * the same time.
 */
static void take_signal(struct process_signals *p, int sig)
{
    pthread_mutex_lock(&p->lock);
    void (*stop)(void *) = p->stop, (*reload)(void *) = p->reload;
    p->is_reload_due |= sig == SIGUSR1 && !stop;
    pthread_mutex_unlock(&p->lock);
    if (sig == SIGUSR1 && reload)
        reload(p->user);
    if (sig != SIGINT && sig != SIGTERM)
        return;
    if (stop) {
        stop(p->user);
        return;
    }
    fprintf(stderr, "%s: ended by signal %d while it was starting\n", p->program, sig);
    _exit(128 + sig);
}

static void *take_signals(void *arg)
{
    struct process_signals *p = arg;
    sigset_t set = our_signals();
    int sig = 0;
    while (!sigwait(&set, &sig) && !atomic_load(&p->closing))
        take_signal(p, sig);
    return NULL;
}

struct process_signals *process_signals_open(const char *program)
{
    struct process_signals *p = mem_zalloc(sizeof(*p));
    process_block_signals();
    p->program = program;
    pthread_mutex_init(&p->lock, NULL);
    p->thread = thread_start("signals", take_signals, p);
    return p;
}

void process_on_signals(struct process_signals *p, void (*stop)(void *user), void (*reload)(void *user), void *user)
{
    pthread_mutex_lock(&p->lock);
    p->stop = stop;
    p->reload = reload;
    p->user = user;
    bool is_reload_due = p->is_reload_due;
    pthread_mutex_unlock(&p->lock);
    if (is_reload_due && reload)
        reload(user);
}

void process_signals_close(struct process_signals *p)
{
    if (!p)
        return;
    /* Order: the thread looks at closing when a signal came. A SIGUSR2 of somebody else does nothing. */
    atomic_store(&p->closing, true);
    pthread_kill(p->thread, SIGUSR2);
    pthread_join(p->thread, NULL);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

void process_raise_file_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= limit.rlim_max)
        return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

void process_keep_private(void)
{
    const unsigned shared = 2; /* core(5): dump anonymous shared mappings, which a memfd and UCX's memory are */
    unsigned filter = 0;
    umask(077);
    FILE *f = fopen("/proc/self/coredump_filter", "r+e");
    if (!f)
        return; /* a kernel without it */
    if (fscanf(f, "%x", &filter) == 1) {
        rewind(f);
        fprintf(f, "0x%x\n", filter & ~shared);
    }
    fclose(f);
}

void process_announce(const char *address)
{
    const char *fd = getenv("TANDEM_READY_FD");
    if (!fd)
        return;
    dprintf(atoi(fd), "%s\n", address);
    close(atoi(fd));
    unsetenv("TANDEM_READY_FD");
}

int process_exit_status(const char *program, enum td_status s, const char *text)
{
    if (s)
        fprintf(stderr, "%s: %s\n", program, text[0] ? text : td_status_name(s));
    return s == TD_ERR_INVALID ? 2 : s ? 1 : 0;
}
