/* Threads with names, which show in top and in a debugger. */
#pragma once

#include <pthread.h>

/* Starts run(arg); the name is cut to 15 characters. Aborts when the system has no thread to give. */
pthread_t thread_start(const char *name, void *(*run)(void *), void *arg);
