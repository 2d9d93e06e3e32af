#include "base/eventcount.h"

#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SPINS = 4000 }; /* 20 to 50 microseconds */

static void futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int n)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

static void relax(void)
{
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

void eventcount_raise(struct eventcount *e)
{
    atomic_fetch_add(&e->value, 1);
    if (atomic_load(&e->n_asleep))
        futex_wake(&e->value, INT32_MAX);
}

void eventcount_wait(struct eventcount *e, uint32_t seen)
{
    for (uint32_t i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&e->value, memory_order_acquire) != seen)
            return;
        relax();
    }
    atomic_fetch_add(&e->n_asleep, 1);
    while (atomic_load(&e->value) == seen)
        futex_wait(&e->value, seen);
    atomic_fetch_sub(&e->n_asleep, 1);
}
