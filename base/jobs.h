/*
 * Threads for long work, and the bounded queue in front of them.
 *
 * A job has an owner (a number: a client's connection) and a size in bytes. The next job is one of the owner
 * that was served for the least time, so an owner with one small job waits for the jobs that run and not for
 * another owner's queue, and small texts of long work get no more time than others. A job that begins counts
 * as its bytes at the speed of recent jobs, until it ends. An owner that comes back starts level with the
 * owner that was served last, or with what it was served beyond that: idleness earns no credit, and leaving
 * ends no debt.
 *
 * A mutex, not mailboxes: several threads take from one queue, in an order that is known only when a job is
 * taken.
 *
 * Ownership: jobs_submit hands the job over; run() frees it.
 * Threads: any thread may submit.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct job {
    struct job *next;
    /* Called once for each job taken, on one of the threads, at the latest in jobs_close. */
    void (*run)(struct job *job);
    uint64_t owner, cost_bytes;
};

struct jobs_config {
    const char *thread_name;
    uint32_t n_threads, max_jobs; /* >= 1 */
    uint64_t max_bytes;           /* limit of all waiting jobs together; one job is always taken */
    int nice;                     /* added to the threads' niceness: 0 .. 19 */
};

struct jobs;
struct jobs *jobs_open(const struct jobs_config *config);
/* False: the queue is full, or this owner has as much of it as is free; the caller keeps the job.
 * *retry_after_ms_out: when the jobs waiting now will have run, at the speed of recent jobs. */
bool jobs_submit(struct jobs *jobs, struct job *job, uint32_t *retry_after_ms_out);
uint64_t jobs_waiting_bytes(struct jobs *jobs);
void jobs_close(struct jobs *jobs); /* runs the waiting jobs, then joins the threads; NULL is fine */
