#include "base/jobs.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/thread.h"

enum { MAX_RETRY_MS = 60000 };

struct owner { /* an owner with waiting jobs */
    uint64_t id, served_bytes, waiting_bytes;
    uint32_t n_jobs;
    struct job *head, **tail;
};

struct jobs {
    struct jobs_config config;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool closing;
    struct owner **owners;
    uint32_t n_owners, cap_owners, n_jobs;
    uint64_t waiting_bytes;
    double ns_per_byte; /* mean of recent jobs */
    struct clock clock;
    pthread_t *threads;
};

/* ------------------------------------------------------------------ queue, under the lock */

static struct owner *owner_find(const struct jobs *p, uint64_t id)
{
    for (uint32_t i = 0; i < p->n_owners; i++)
        if (p->owners[i]->id == id)
            return p->owners[i];
    return NULL;
}

static struct owner *owner_add(struct jobs *p, uint64_t id)
{
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < p->n_owners; i++)
        if (p->owners[i]->served_bytes < least)
            least = p->owners[i]->served_bytes;
    p->owners = MEM_ROOM(p->owners, p->n_owners, p->cap_owners, 16);
    struct owner *o = mem_zalloc(sizeof(*o));
    o->id = id;
    o->served_bytes = p->n_owners ? least : 0;
    o->tail = &o->head;
    p->owners[p->n_owners++] = o;
    return o;
}

static struct job *job_take(struct jobs *p)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < p->n_owners; i++)
        if (p->owners[i]->served_bytes < p->owners[best]->served_bytes)
            best = i;
    struct owner *o = p->owners[best];
    struct job *job = o->head;
    o->head = job->next;
    o->served_bytes += job->cost_bytes;
    o->waiting_bytes -= job->cost_bytes;
    o->n_jobs--;
    p->n_jobs--;
    p->waiting_bytes -= job->cost_bytes;
    if (!o->head) {
        p->owners[best] = p->owners[--p->n_owners];
        free(o);
    }
    return job;
}

/* An owner may hold at most as much of the queue as it leaves free: a single owner gets half of it and
 * never keeps another one out. */
static bool has_room(const struct jobs *p, const struct owner *o, uint64_t cost_bytes)
{
    uint64_t jobs = (uint64_t)p->n_jobs + (o ? o->n_jobs : 0), bytes = p->waiting_bytes + (o ? o->waiting_bytes : 0);
    return jobs < p->config.max_jobs && bytes + cost_bytes <= p->config.max_bytes;
}

/* Time until the last of the jobs waiting now has left the queue. */
static uint32_t retry_after_ms(const struct jobs *p)
{
    double ms = (double)p->waiting_bytes * p->ns_per_byte / p->config.n_threads * 1e-6;
    return ms < 1 ? 1 : ms > MAX_RETRY_MS ? MAX_RETRY_MS : (uint32_t)ms;
}

/* ------------------------------------------------------------------ threads */

static void job_run(struct jobs *p, struct job *job)
{
    const double share = 0.1;
    uint64_t cost = job->cost_bytes ? job->cost_bytes : 1, began = clock_now(&p->clock);
    job->run(job);
    double ns = (double)(clock_now(&p->clock) - began) / (double)cost;
    pthread_mutex_lock(&p->lock);
    p->ns_per_byte += p->ns_per_byte > 0 ? share * (ns - p->ns_per_byte) : ns;
    pthread_mutex_unlock(&p->lock);
}

static void *jobs_run(void *arg)
{
    struct jobs *p = arg;
    if (p->config.nice)
        setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), getpriority(PRIO_PROCESS, 0) + p->config.nice);
    for (;;) {
        pthread_mutex_lock(&p->lock);
        while (!p->n_jobs && !p->closing)
            pthread_cond_wait(&p->changed, &p->lock);
        struct job *job = p->n_jobs ? job_take(p) : NULL;
        pthread_mutex_unlock(&p->lock);
        if (!job)
            return NULL;
        job_run(p, job);
    }
}

/* ------------------------------------------------------------------ interface */

struct jobs *jobs_open(const struct jobs_config *config)
{
    struct jobs *p = mem_zalloc(sizeof(*p));
    p->config = *config;
    clock_init_real(&p->clock);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    p->threads = mem_array(config->n_threads, sizeof(*p->threads));
    for (uint32_t i = 0; i < config->n_threads; i++)
        p->threads[i] = thread_start(config->thread_name, jobs_run, p);
    return p;
}

bool jobs_submit(struct jobs *p, struct job *job, uint32_t *retry_after_ms_out)
{
    job->next = NULL;
    pthread_mutex_lock(&p->lock);
    struct owner *o = owner_find(p, job->owner);
    bool full = p->n_jobs && !has_room(p, o, job->cost_bytes);
    if (full) {
        *retry_after_ms_out = retry_after_ms(p);
    } else {
        o = o ? o : owner_add(p, job->owner);
        *o->tail = job;
        o->tail = &job->next;
        o->waiting_bytes += job->cost_bytes;
        o->n_jobs++;
        p->n_jobs++;
        p->waiting_bytes += job->cost_bytes;
        pthread_cond_signal(&p->changed);
    }
    pthread_mutex_unlock(&p->lock);
    return !full;
}

uint64_t jobs_waiting_bytes(struct jobs *p)
{
    pthread_mutex_lock(&p->lock);
    uint64_t n = p->waiting_bytes;
    pthread_mutex_unlock(&p->lock);
    return n;
}

void jobs_close(struct jobs *p)
{
    if (!p)
        return;
    pthread_mutex_lock(&p->lock);
    p->closing = true;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    for (uint32_t i = 0; i < p->config.n_threads; i++)
        pthread_join(p->threads[i], NULL);
    free(p->threads);
    free(p->owners);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
    free(p);
}
