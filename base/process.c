#include "base/process.h"

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/thread.h"

struct process_signals {
    void (*stop)(void *user), (*reload)(void *user);
    void *user;
    pthread_t thread;
};

static sigset_t our_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGUSR2); /* ends the thread */
    return set;
}

void process_block_signals(void)
{
    sigset_t set = our_signals();
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
}

static void *take_signals(void *arg)
{
    struct process_signals *p = arg;
    sigset_t set = our_signals();
    int sig = 0;
    while (!sigwait(&set, &sig) && sig != SIGUSR2)
        if (sig != SIGUSR1)
            p->stop(p->user);
        else if (p->reload)
            p->reload(p->user);
    return NULL;
}

struct process_signals *process_on_signals(void (*stop)(void *user), void (*reload)(void *user), void *user)
{
    struct process_signals *p = mem_zalloc(sizeof(*p));
    p->stop = stop;
    p->reload = reload;
    p->user = user;
    p->thread = thread_start("signals", take_signals, p);
    return p;
}

void process_signals_close(struct process_signals *p)
{
    if (!p)
        return;
    pthread_kill(p->thread, SIGUSR2);
    pthread_join(p->thread, NULL);
    free(p);
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
