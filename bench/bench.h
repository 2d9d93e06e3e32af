/*
 * What the areas of tandem bench share: rows of a measured value beside this machine's limit, measured in the
 * same run.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "worker/geometry.h"

struct bench_options {
    const char *trace, *capacity, *blocks, *codec;
    int64_t block_tokens;
    const char *dummy, *numerics, *weights, *kv_dtype, *device, *invariant, *dir, *model, *text, *profile;
    double seconds; /* per row; 0: the area's own */
    const char *paths, *serve, *peer, *secret;
    struct rank_options ranks;
    int64_t threads, bytes, rounds, n_blocks;
    bool json;
};

struct bench_row {
    char name[96];
    const char *unit; /* "GB/s", "GFLOP/s", "tokens/s"; static text */
    double value;
    double limit;  /* 0: none, or it is a limit itself */
    uint64_t hash; /* of the tokens and log-probabilities computed; 0: none */
};

struct bench_rows {
    struct bench_row *rows;
    uint32_t n;
};

/* Prints nothing; the caller does, when the area is done. The row returned is good until the next is
 * added. */
struct bench_row *bench_add(struct bench_rows *b, const char *unit, double value, double limit, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Rising, for medians and percentiles. */
void bench_sort(double *values, uint32_t n);

/* Times of single steps by prompt, prefix, batch and context; options' profile: a file for tandem simulate,
 * NULL: none. */
enum td_status bench_profile(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* Prefill and decode of a model, a made-up one or a directory's, through engine/engine.h. */
enum td_status bench_engine(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* KV pages between two endpoints, on this machine or two. */
enum td_status bench_transfer(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* Exposed part of the transfer by length of the prompt, with simulated and real compute; needs model. */
enum td_status bench_overlap(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* Hit rates of the eviction policies over a trace; needs trace. */
enum td_status bench_eviction(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* A decision's time, a router's processor time; needs model. */
enum td_status bench_router(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* The part of bench_router() with a queue (bench/waiting.c). */
void bench_waiting(struct bench_rows *out);

/* The router's prefix index: inserting, removing, lookups alone and beside the writer. */
enum td_status bench_index(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* What the codecs of the SSD tier save, cost and lose. */
enum td_status bench_codec(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* Time to first token, split and not; needs model. */
enum td_status bench_cluster(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* The sampler by settings, against one pass over the vocabulary. */
enum td_status bench_sample(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* The tokenizer of model beside the tokenizers library. */
enum td_status bench_tokenize(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);
