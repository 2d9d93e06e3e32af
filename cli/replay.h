/*
 * The parts of tandem replay, and the memory that they share.
 *
 * One process conducts, others send. The conductor (replay_run.c) never touches gRPC, so that it may fork: it
 * makes the schedule, forks the senders, shows progress, does the faults of --at (replay_at.c), and reads the
 * results. A sender (replay_send.c) sends the requests that it owns, and writes the outcome of each into its
 * slot.
 *
 * Slots, token times and counters lie in memory that is mapped before the fork and shared. A slot belongs to
 * its sender until its state is SLOT_OVER. A request whose sender died before that counts as cut short.
 */
#pragma once

#include <stdatomic.h>
#include <sys/types.h>

#include "base/clock.h"
#include "cli/ask.h"
#include "replay/report.h"
#include "replay/trace.h"

enum { REPLAY_MAX_PROCESSES = 64, REPLAY_MAX_WORKERS = 256, REPLAY_MAX_EVENTS = 64 };

struct replay_options {
    const char *router, *admin, *api_key, *tenant, *run_dir, *at, *html, *output, *label;
    double ttft_ms, tpot_ms, rate, length_scale, retry_share, poisson;
    int64_t requests, block_tokens, seed, max_output, concurrency, processes, max_lag_ms, warm_ms;
    int64_t find_rounds;
    bool json, find_max, progress;
};

/* ------------------------------------------------------------------- board */

enum slot_state { SLOT_WAITS, SLOT_SENT, SLOT_OVER };

struct replay_slot {
    _Atomic uint32_t state;
    struct report_request q;
    char prefill[64], decode[64]; /* names of the workers; "": none */
    char plan[16];                /* as the router reported it; "": not reported */
    /* Why the request was not answered, as the router reported it; "": it was answered, or there was no
     * report. */
    char reason[96];
};

struct replay_counts { /* sums over all senders since the start; they only rise */
    _Atomic uint64_t sent, over, answered, refused, failed, met;
    _Atomic uint64_t ttft_us, tpot_us, n_tpot; /* sums over the answered requests */
};

struct replay_worker {
    char name[64], role[16];
};

struct replay_board {
    uint32_t vocab, context; /* the model's sizes, found by replay_probe() */
    uint32_t n_workers;
    struct replay_worker workers[REPLAY_MAX_WORKERS];
    _Atomic int stop;          /* 1: send no more; 2: don't wait for running requests either */
    _Atomic uint32_t n_ready;  /* senders that are connected and have a first prompt */
    _Atomic uint64_t began_ns; /* start of the run by the monotonic clock; 0 until all senders are ready */
    struct replay_counts counts;
};

struct replay {
    struct replay_options o;
    struct trace *trace; /* cut to the requests that are sent */
    struct clock clock;
    struct replay_board *board;
    struct replay_slot *slots; /* [n], in shared memory */
    float *tokens;             /* in shared memory: token times; request i has those from first_token[i] on */
    uint64_t *first_token, n_tokens;
    double *due_ms;  /* [n] ms since the start; 0 in a closed loop */
    uint32_t *owner; /* [n] number of the sender; requests that follow each other have the same one */
    uint64_t n;
    uint32_t round; /* of a search; each round has prompts of its own */
    uint64_t left_out;
    uint32_t n_senders_died; /* in the last run */
};

uint32_t replay_prompt_tokens(const struct replay *r, uint64_t index); /* of a request, after scaling */
uint32_t replay_output_tokens(const struct replay *r, uint64_t index);

/* ------------------------------------------------------------------ senders */

/* Asks the router for its model and workers. Runs in a process of its own. Returns the exit code. */
int replay_probe(struct replay *r);
/* Sends the requests that the sender owns, and waits for their answers. Runs in a process of its own. Returns
 * the exit code. */
int replay_send(struct replay *r, uint32_t sender);

/* ------------------------------------------------------------------- faults */

struct replay_event { /* one entry of --at */
    double at_ms;
    char action[8]; /* kill stop cont term slow faults drain scale */
    char target[64];
    double times;      /* slow: the factor by which the process becomes slower */
    char script[1024]; /* faults: a script of base/fault.h; "": ends the faults */
};

struct replay_events {
    struct replay_event list[REPLAY_MAX_EVENTS];
    uint32_t n, next;
    struct { /* processes that run only part of the time */
        pid_t pid;
        double share;
        bool stopped;
    } slowed[REPLAY_MAX_EVENTS];
    uint32_t n_slowed;
};

/* Parses "30s:kill:decode-1,45s:slow:prefill-0/4"; the events come sorted by time. TD_ERR_INVALID names the
 * event. */
enum td_status replay_events_parse(const char *text, struct replay_events *out, struct td_error *error_out);
/* Checks that the events can be done: a cluster runs in the run directory, knows the targets, and accepts
 * faults if there are any. */
enum td_status replay_events_check(const struct replay_events *v, const char *run_dir, struct td_error *error_out);
/* Does the events that are due, and stops or continues slowed processes. Called every few milliseconds. */
void replay_events_do(struct replay_events *v, const struct replay_options *o, double now_ms);
/* Continues slowed processes, and takes away the faults that were set. */
void replay_events_end(struct replay_events *v, const struct replay_options *o);

/* ---------------------------------------------------------------- conductor */

/* Runs a function that uses gRPC in a process of its own, and waits for it. Returns the exit code. */
int replay_in_child(struct replay *r, int (*run)(struct replay *r));
/* One run: forks the senders, and returns when all have ended. False: the senders did not get ready, or the
 * run was stopped before it began. */
bool replay_run(struct replay *r, struct replay_events *events);
void replay_on_signal(void); /* installs the handlers of SIGINT and SIGTERM, which stop the run */
bool replay_is_stopped(void);

/* Searches for the highest rates that are good enough. Returns the *n_out points of the rounds, by rate
 * (free()). If a rate is good by distserve, r then has the results of a run at the best one. */
struct report_point *replay_find_max(struct replay *r, uint32_t *n_out);

/* Zeroed shared memory that lives as long as the process. */
void *replay_map(size_t len_bytes);
/* Makes slots and schedule of all requests for the rate of the options, the first time or again. */
void replay_schedule(struct replay *r);

/* --------------------------------------------------------------- afterwards */

/* The run as a report. Everything in `run` is borrowed from r or from this struct. */
struct replay_result {
    struct report_run run;
    struct report_request *requests;
    struct report_worker *workers;
    struct report_reasons reasons;
    float *loads;
    char *settings;
    char why[256];
};
void replay_result_init(struct replay_result *out, const struct replay *r, const struct replay_events *events);
void replay_result_fini(struct replay_result *out);
