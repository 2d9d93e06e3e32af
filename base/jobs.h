/*
 * Threads for long work, and the bounded queue before them.
 *
 * Jobs have an owner (a number: a client's connection) and a cost in bytes. The owner that was served the least goes first, so an owner with
 * one small job waits for the jobs that run and not for the queue of another owner. An owner that was away begins level with the
 * least served one that waits: idleness earns no credit.
 *
 * A mutex and not mailboxes: several threads take from one queue, in an order that is known only when a job is taken.
 *
 * Ownership: jobs_submit hands the job over until its run() begins; run() frees it. Threads: any thread submits.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct job {
    struct job *next;
    void (*run)(struct job *job); /* on one of the threads; runs for every job taken, at the latest in jobs_close */
    uint64_t owner, cost_bytes;
};

struct jobs_config {
    const char *thread_name;
    uint32_t n_threads, max_jobs; /* >= 1 */
    uint64_t max_bytes;           /* that wait, all together; one job is always taken */
    int nice;                     /* added to the threads' niceness: 0 .. 19 */
};

struct jobs;
struct jobs *jobs_open(const struct jobs_config *config);
/*
 * False: the queue is full, or holds as much of this owner as it has free; the job stays the caller's, and retry_after_ms_out says
 * when what waits will have run, at the speed of the last jobs.
 */
bool jobs_submit(struct jobs *jobs, struct job *job, uint32_t *retry_after_ms_out);
uint64_t jobs_waiting_bytes(struct jobs *jobs);
void jobs_close(struct jobs *jobs); /* runs what waits, then joins the threads; NULL is fine */
