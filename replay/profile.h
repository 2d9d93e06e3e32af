/*
 * Describes a worker to the simulator: how long its steps take, how large a token's KV is, how much of it
 * fits, what power the worker draws and what it costs.
 *
 * A profile is a name (PROFILE_NAMES), a list of coefficients, or a file of measured or predicted step times.
 * A file is one JSON object, in the format of AIConfigurator's tables:
 *
 *     {"profiles": [{"gpu": "h200_sxm", "model": "meta-llama/Meta-Llama-3.1-8B", "backend": "vllm",
 *       "tp": 1, "precision": "bf16",
 *       "prefill": [{"batch": 1, "isl": 128, "ms": 6.2}, ...],
 *       "prefill_prefix": [{"isl_total": 8192, "prefix": 4096, "ms": 106}, ...],
 *       "decode": [{"batch": 16, "context": 4096, "ms": 7.5}, ...],
 *       "mixed": [{"batch": 4, "context": 64, "tokens": 128, "prefix": 0, "ms": 9.1}, ...]}, ...]}
 *
 * A mixed row is a step in which a chunk of `tokens` tokens, after `prefix` cached ones, is computed beside
 * `batch` decoding sequences with a mean context of `context` tokens. The coefficients are not fitted to
 * mixed rows; these rows show how good the model of such a step is (sched/cost.h). Every list is optional,
 * but prefill and decode must have enough rows for a fit.
 *
 * FILE names the only profile of a file. FILE:WORD,WORD,... names the first profile whose gpu, model,
 * backend, tpN and precision contain all the words. Coefficients are fitted by least squares of relative
 * errors; none is below 0.
 *
 * A profile may also have "kv_bytes_per_token" and "pool_bytes" (of all its GPUs). If it does not, they are
 * derived for the models and GPUs that profile.c lists: the KV from layers, heads and "quant":
 * {"kvcache_quant_mode", "gemm_quant_mode"} (or a precision of bf16), the pool as 90 % of the memory less 3.8
 * GB a GPU and the weights. Otherwise they stay 0, not known.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "sched/cost.h"

/* One H200 SXM with Llama-3.1-8B in bf16: a fit to TensorRT-LLM's step times. Benches and tests use it. */
#define PROFILE_H200_8B "3526,18.5,0.000535:5228,0.0293,8.088"

/* Errors of four models of the mixed rows: medians of |predicted / row - 1|. */
struct profile_mixed {
    uint32_t n_rows;      /* 0: the file has none, and the other members are 0 */
    double sum_error;     /* prefill + decode, each with its fixed part */
    double smaller_error; /* the sum less the smaller fixed part */
    /* The model of sched/cost.h: the sum less the fixed part of the decode step. */
    double model_error;
    /* The sum less the share of that fixed part that suits the rows best; that share. */
    double share, share_error;
};

struct worker_profile {
    struct cost_profile cost;
    double kv_bytes_per_token, pool_bytes; /* 0: not known */
    /* Watts while nothing runs, in steps with prompts, in decode steps; 0: not known. */
    double idle_w, prefill_w, decode_w;
    double price_per_hour; /* in any unit; 0: not known */
    double fit_error;      /* mean of |fitted / row - 1|, of the worse phase; 0: not fitted */
    bool is_derived;       /* kv_bytes_per_token or pool_bytes was derived from names */
    struct profile_mixed mixed;
};

#define PROFILE_NAMES "h200-8b, h200-70b, a800x8-70b, dgx-h100-70b, dgx-a100-70b"

/* Reads a profile from an option's text. TD_ERR_INVALID names what is wrong, and where. */
enum td_status profile_read(const char *text, struct worker_profile *out, struct td_error *error_out);

/* Reads a profile from a file's content. words: NULL or "WORD,WORD". */
enum td_status profile_parse(const char *data, size_t size, const char *words, struct worker_profile *out,
                             struct td_error *error_out);
