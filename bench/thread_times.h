/*
 * Processor time of this process by the names of its threads ("engine", "xfer", "kernels-1" ...), for benches
 * that say where time goes. Other programs hardly change it. Threads: any. Errors: a thread whose time can't
 * be read counts as 0.
 */
#pragma once

#include <stdint.h>

enum { THREAD_TIMES_MAX = 64, THREAD_NAME_BYTES = 32 };

struct thread_times { /* all zero: no times */
    uint32_t n;
    struct {
        char name[THREAD_NAME_BYTES];
        double ms;
    } of[THREAD_TIMES_MAX];
};

/* Adds the processor times of all living threads, multiplied by sign. Threads that end between two calls are
 * lost. */
void thread_times_add(struct thread_times *t, double sign);

/* Sum over all threads whose name begins with prefix, in ms. */
double thread_times_ms(const struct thread_times *t, const char *prefix);
