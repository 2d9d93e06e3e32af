/* Shared by the areas of tandem bench. A row is a measured value beside the limit of this machine that was
 * measured in the same run. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "worker/geometry.h"

struct bench_options {
    const char *trace, *capacity, *blocks, *codec;
    int64_t block_tokens;
    const char *dummy, *numerics, *weights, *kv_dtype, *device, *invariant, *dir, *model, *text, *profile;
    double seconds; /* for each row; 0: the area's default */
    const char *paths, *serve, *peer, *secret, *only;
    struct rank_options ranks;
    int64_t threads, bytes, rounds, n_blocks;
    bool json;
};

struct bench_row {
    char name[96];
    const char *unit; /* "GB/s", "GFLOP/s", "tokens/s"; static text */
    double value;
    double limit;  /* 0: there is none, or the row is a limit itself */
    uint64_t hash; /* hash of the computed tokens and log-probabilities; 0: none */
};

struct bench_rows {
    struct bench_row *rows;
    uint32_t n;
};

/* Adds a row; the rows are printed when the area has ended. The returned row is valid until the next one is
 * added. */
struct bench_row *bench_add(struct bench_rows *b, const char *unit, double value, double limit, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Sorts in rising order, for medians and percentiles. */
void bench_sort(double *values, uint32_t n);

/* Times of single steps by prompt, prefix, batch and context. options' profile: a file for tandem simulate;
 * NULL: none. */
enum td_status bench_profile(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* Prefill and decode of a model, made up or from a directory, through engine/engine.h. */
enum td_status bench_engine(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* KV pages between two endpoints, on this machine or on two machines. */
enum td_status bench_transfer(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* Part of the transfer that prefill does not hide, by length of the prompt, with simulated and real compute;
 * needs model. */
enum td_status bench_overlap(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* Hit rates of the eviction policies over a trace; needs trace. */
enum td_status bench_eviction(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* Time of a decision, and the processor time of a router; needs model. */
enum td_status bench_router(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* The part of bench_router() that has a queue (bench/waiting.c). */
void bench_waiting(struct bench_rows *out);

/* The router's prefix index: inserting, removing, lookups alone and beside the writer. */
enum td_status bench_index(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* Ratio, speed and error of the SSD tier's codecs. */
enum td_status bench_codec(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* Time to first token of a split cluster and of a single worker; needs model. */
enum td_status bench_cluster(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* The sampler with several settings, against one pass over the vocabulary. */
enum td_status bench_sample(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);

/* The tokenizer of model, beside the Hugging Face tokenizers library. */
enum td_status bench_tokenize(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);
