#include "transfer/names.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/thread.h"
#include "transfer/netaddr.h"

struct names {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct name_query *queries, **tail;
    uint32_t n_waiting, n_idle; /* waiting queries; idle threads */
    bool is_stopping;
    pthread_t threads[NAMES_THREADS];
    uint32_t n_threads;
};

struct names *names_open(void)
{
    struct names *n = mem_zalloc(sizeof(*n));
    n->tail = &n->queries;
    pthread_mutex_init(&n->lock, NULL);
    pthread_cond_init(&n->wake, NULL);
    return n;
}

/* The next query; NULL: names_close was called. */
static struct name_query *take(struct names *n)
{
    pthread_mutex_lock(&n->lock);
    n->n_idle++;
    while (!n->queries && !n->is_stopping)
        pthread_cond_wait(&n->wake, &n->lock);
    n->n_idle--;
    struct name_query *q = n->is_stopping ? NULL : n->queries;
    if (q && !(n->queries = q->next))
        n->tail = &n->queries;
    n->n_waiting -= q != NULL;
    pthread_mutex_unlock(&n->lock);
    return q;
}

static void resolve(struct name_query *q)
{
    if (!atomic_load(&q->is_given_up))
        netaddr_resolve_nth(q->address, q->attempt, &q->target, &q->target_len, &q->why);
    q->done(q);
}

static void *resolve_names(void *arg)
{
    for (struct name_query *q; (q = take(arg));)
        resolve(q);
    return NULL;
}

void names_resolve(struct names *n, struct name_query *q)
{
    if (netaddr_is_numeric(q->address)) {
        resolve(q);
        return;
    }
    pthread_mutex_lock(&n->lock);
    q->next = NULL;
    *n->tail = q;
    n->tail = &q->next;
    if (++n->n_waiting > n->n_idle && n->n_threads < NAMES_THREADS) {
        n->threads[n->n_threads] = thread_start("xfer-names", resolve_names, n);
        n->n_threads++;
    }
    pthread_cond_signal(&n->wake);
    pthread_mutex_unlock(&n->lock);
}

void names_close(struct names *n)
{
    if (!n)
        return;
    pthread_mutex_lock(&n->lock);
    n->is_stopping = true;
    pthread_cond_broadcast(&n->wake);
    pthread_mutex_unlock(&n->lock);
    for (uint32_t i = 0; i < n->n_threads; i++)
        pthread_join(n->threads[i], NULL);
    pthread_cond_destroy(&n->wake);
    pthread_mutex_destroy(&n->lock);
    free(n);
}
