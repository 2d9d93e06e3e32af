/*
 * Processor time of this process by the names of its threads ("engine", "xfer", "kernels-1" ..), for benches
 * that say where time goes: what stays the same when other programs are busy too. Threads: any. Errors: what
 * can't be read counts as nothing.
 */
#pragma once

#include <stdint.h>

enum { THREAD_TIMES_MAX = 64, THREAD_NAME_BYTES = 32 };

struct thread_times { /* zeros: none */
    uint32_t n;
    struct {
        char name[THREAD_NAME_BYTES];
        double ms;
    } of[THREAD_TIMES_MAX];
};

/* Adds sign times what the threads that live now have used so far. Those that end between two calls are
 * lost. */
void thread_times_add(struct thread_times *t, double sign);

/* Of all threads whose name begins with prefix. */
double thread_times_ms(const struct thread_times *t, const char *prefix);
