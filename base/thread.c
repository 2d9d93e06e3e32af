#include "base/thread.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

pthread_t thread_start(const char *name, void *(*run)(void *), void *arg)
{
    sigset_t all, old; /* the new thread takes no signals (base/process.h) */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    pthread_t t;
    if (pthread_create(&t, NULL, run, arg))
        abort();
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    char cut[16];
    snprintf(cut, sizeof(cut), "%s", name);
    pthread_setname_np(t, cut);
    return t;
}
