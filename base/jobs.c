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

/* An owner with jobs, or that was served for longer than others have been since. */
struct owner {
    uint64_t id, served_ns, waiting_bytes;
    uint64_t guessed_ns; /* of its jobs that run; not in served_ns */
    uint32_t n_jobs, n_running;
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
    uint64_t level_ns;  /* for how long the owner had been served that was served last */
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

static bool is_idle(const struct owner *o)
{
    return !o->n_jobs && !o->n_running;
}

/* Forgets owners that have nothing here and owe nothing. Under a flood of owners that come once each, those
 * that owe something are forgotten, too. */
static void drop_idle(struct jobs *p)
{
    for (uint32_t i = p->n_owners; i-- > 0;) {
        struct owner *o = p->owners[i];
        if (is_idle(o) && (o->served_ns <= p->level_ns || p->n_owners > p->config.max_jobs)) {
            free(o);
            p->owners[i] = p->owners[--p->n_owners];
        }
    }
}

/* The owner of a job that comes. */
static struct owner *owner_of(struct jobs *p, uint64_t id)
{
    struct owner *o = owner_find(p, id);
    if (o) {
        if (is_idle(o) && o->served_ns < p->level_ns)
            o->served_ns = p->level_ns;
        return o;
    }
    drop_idle(p);
    p->owners = MEM_ROOM(p->owners, p->n_owners, p->cap_owners, 16);
    o = mem_zalloc(sizeof(*o));
    o->id = id;
    o->served_ns = p->level_ns;
    o->tail = &o->head;
    p->owners[p->n_owners++] = o;
    return o;
}

static bool is_before(const struct owner *a, const struct owner *b)
{
    return a->served_ns + a->guessed_ns < b->served_ns + b->guessed_ns;
}

/* *guess_ns_out: what the job counts as until it has ended. Guesses are not in the level: one that was far
 * too long would hold up whoever comes. */
static struct job *job_take(struct jobs *p, uint64_t *guess_ns_out)
{
    struct owner *o = NULL;
    for (uint32_t i = 0; i < p->n_owners; i++)
        if (p->owners[i]->head && (!o || is_before(p->owners[i], o)))
            o = p->owners[i];
    struct job *job = o->head;
    o->head = job->next;
    if (!o->head)
        o->tail = &o->head;
    p->level_ns = o->served_ns > p->level_ns ? o->served_ns : p->level_ns;
    *guess_ns_out = (uint64_t)((double)job->cost_bytes * p->ns_per_byte);
    o->guessed_ns += *guess_ns_out;
    o->waiting_bytes -= job->cost_bytes;
    o->n_jobs--;
    o->n_running++;
    p->n_jobs--;
    p->waiting_bytes -= job->cost_bytes;
    return job;
}

static void job_ended(struct jobs *p, uint64_t owner, uint64_t cost_bytes, uint64_t guess_ns, uint64_t took_ns)
{
    const double share = 0.1;
    double ns_per_byte = (double)took_ns / (double)(cost_bytes ? cost_bytes : 1);
    struct owner *o = owner_find(p, owner);
    p->ns_per_byte += p->ns_per_byte > 0 ? share * (ns_per_byte - p->ns_per_byte) : ns_per_byte;
    o->served_ns += took_ns;
    o->guessed_ns -= guess_ns;
    o->n_running--;
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

static void *jobs_run(void *arg)
{
    struct jobs *p = arg;
    if (p->config.nice)
        setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), getpriority(PRIO_PROCESS, 0) + p->config.nice);
    pthread_mutex_lock(&p->lock);
    while (p->n_jobs || !p->closing) {
        if (!p->n_jobs) {
            pthread_cond_wait(&p->changed, &p->lock);
            continue;
        }
        uint64_t guess;
        struct job *job = job_take(p, &guess);
        uint64_t owner = job->owner, cost_bytes = job->cost_bytes;
        pthread_mutex_unlock(&p->lock);
        uint64_t began = clock_now(&p->clock);
        job->run(job); /* frees it */
        uint64_t took = clock_now(&p->clock) - began;
        pthread_mutex_lock(&p->lock);
        job_ended(p, owner, cost_bytes, guess, took);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
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
        o = owner_of(p, job->owner);
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
    for (uint32_t i = 0; i < p->n_owners; i++)
        free(p->owners[i]);
    free(p->threads);
    free(p->owners);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
    free(p);
}
