/*
 * tandem replay: what its parts share.
 *
 * One process conducts, others send. The conductor (replay_run.c) never touches gRPC, so that it may fork: it
 * makes the schedule, forks the senders, shows progress, does the faults that were asked for (replay_at.c),
 * and reads what the senders left. A sender (replay_send.c) has every n-th request, and writes what became of
 * each into its slot.
 *
 * All of this lies on a board: memory that was mapped before the fork and is shared. A slot belongs to its
 * sender until its state is SLOT_OVER. What a sender that died left behind counts as cut short.
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
    const char *router, *tenant, *run_dir, *at, *html, *output, *label;
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
    char prefill[64], decode[64]; /* names of workers; "": none */
    char plan[16];                /* as the router told; "": nobody told */
    /* Why it was not answered, as the router told; "": it was, or nobody told. */
    char reason[96];
};

struct replay_counts { /* of all senders, since the start; only added to */
    _Atomic uint64_t sent, over, answered, refused, failed, met;
    _Atomic uint64_t ttft_us, tpot_us, n_tpot; /* sums over the answered */
};

struct replay_worker {
    char name[64], role[16];
};

struct replay_board {
    uint32_t vocab, context; /* of the model: what the probe found */
    uint32_t n_workers;
    struct replay_worker workers[REPLAY_MAX_WORKERS];
    _Atomic int stop;          /* 1: send no more; 2: nor wait for what is under way */
    _Atomic uint32_t n_ready;  /* senders that are connected */
    _Atomic uint64_t began_ns; /* by the monotonic clock; 0 until all are */
    struct replay_counts counts;
};

struct replay {
    struct replay_options o;
    struct trace *trace; /* cut to what is sent */
    struct clock clock;
    struct replay_board *board;
    struct replay_slot *slots; /* [n] shared */
    float *tokens;             /* shared; of request i from first_token[i] on */
    uint64_t *first_token, n_tokens;
    double *due_ms;  /* [n] since the start; 0 in closed loop */
    uint32_t *owner; /* [n] which sender; the steps of a session have one */
    uint64_t n;
    uint32_t round; /* of a search: prompts of one are not those of another */
    uint64_t left_out;
    uint32_t n_senders_died; /* in the last run */
};

uint32_t replay_prompt_tokens(const struct replay *r, uint64_t index); /* of a request, scaled */
uint32_t replay_output_tokens(const struct replay *r, uint64_t index);

/* ------------------------------------------------------------------ senders */

/* In a process of its own: asks the router for its model and workers. Exit code. */
int replay_probe(struct replay *r);
/* In a process of its own: sends what it owns, and waits for the answers. Exit code. */
int replay_send(struct replay *r, uint32_t sender);

/* ------------------------------------------------------------------- faults */

struct replay_event { /* of --at */
    double at_ms;
    char action[8]; /* kill stop cont term slow faults drain scale */
    char target[64];
    double times;      /* slow: so many times */
    char script[1024]; /* faults: of base/fault.h; "": none any more */
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

/* "30s:kill:decode-1,45s:slow:prefill-0/4". TD_ERR_INVALID names the event. */
enum td_status replay_events_parse(const char *text, struct replay_events *out, struct td_error *error_out);
/* That they can be done: a cluster runs in the run directory, knows the targets, and lets its faults be set
 * if any are. */
enum td_status replay_events_check(const struct replay_events *v, const char *run_dir, struct td_error *error_out);
/* Does what is due. Called every few milliseconds. */
void replay_events_do(struct replay_events *v, const struct replay_options *o, double now_ms);
/* Whoever is slowed goes on, faults that were set are taken away. */
void replay_events_end(struct replay_events *v, const struct replay_options *o);

/* ---------------------------------------------------------------- conductor */

/* Runs a function of senders in a process of its own and waits for it. Exit code. */
int replay_in_child(struct replay *r, int (*run)(struct replay *r));
/* One run: forks the senders, and returns when all is over. False: none could start. */
bool replay_run(struct replay *r, struct replay_events *events);
void replay_on_signal(void); /* Ctrl-C: stop */
bool replay_is_stopped(void);

/* Finds the highest rates that are good enough; the rounds' points, by rate, of which there are *n_out. The
 * last run is the best. */
struct report_point *replay_find_max(struct replay *r, uint32_t *n_out);

/* Shared memory of zeroes, for as long as the process lives. */
void *replay_map(size_t len_bytes);
/* (Re)makes slots and schedule of all requests for the rate of the options. */
void replay_schedule(struct replay *r);

/* --------------------------------------------------------------- afterwards */

/* The run as a report. Everything in it is borrowed from r, or lives in *out. */
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
