/* Threads with names, which top and debuggers show. */
#pragma once

#include <pthread.h>

/* Starts run(arg); the name is cut to 15 characters. Aborts if the system can't start a thread. */
pthread_t thread_start(const char *name, void *(*run)(void *), void *arg);
