#include "base/ticker.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/thread.h"

struct ticker {
    pthread_mutex_t lock; /* guards is_stopped */
    pthread_cond_t stopped;
    bool is_stopped;
    uint64_t period_ns;
    void (*tick)(void *arg);
    void *arg;
    pthread_t thread;
};

static struct timespec after(uint64_t ns)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    ns += (uint64_t)at.tv_nsec;
    at.tv_sec += (time_t)(ns / NS_PER_S);
    at.tv_nsec = (long)(ns % NS_PER_S);
    return at;
}

static void *run(void *arg)
{
    struct ticker *t = arg;
    pthread_mutex_lock(&t->lock);
    while (!t->is_stopped) {
        pthread_mutex_unlock(&t->lock);
        t->tick(t->arg);
        pthread_mutex_lock(&t->lock);
        struct timespec until = after(t->period_ns);
        while (!t->is_stopped && !pthread_cond_timedwait(&t->stopped, &t->lock, &until))
            ;
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

struct ticker *ticker_start(const char *name, uint64_t period_ns, void (*tick)(void *arg), void *arg)
{
    struct ticker *t = mem_zalloc(sizeof(*t));
    t->period_ns = period_ns;
    t->tick = tick;
    t->arg = arg;
    pthread_mutex_init(&t->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&t->stopped, &attr);
    pthread_condattr_destroy(&attr);
    t->thread = thread_start(name, run, t);
    return t;
}

void ticker_stop(struct ticker *t)
{
    if (!t)
        return;
    pthread_mutex_lock(&t->lock);
    t->is_stopped = true;
    pthread_cond_signal(&t->stopped);
    pthread_mutex_unlock(&t->lock);
    pthread_join(t->thread, NULL);
    pthread_cond_destroy(&t->stopped);
    pthread_mutex_destroy(&t->lock);
    free(t);
}
