/*
 * Which model a process serves, and in which number formats. Prefill workers, decode workers and, as far as
 * the options shape pages, stores share these options, so that one rule decides for all.
 */
#pragma once

#include "base/options.h"
#include "kernels/kernels.h"
#include "model/model.h"
#include "proto/wire/kv_layout.h"

struct geometry_options {
    const char *model; /* directory; NULL with dummy */
    /* "1b", "8b" or "layers=2,hidden=256,...": seeded gaussian weights instead of a directory. */
    const char *dummy;
    const char *numerics;  /* auto, f32, bf16 */
    const char *weights;   /* K_WEIGHTS_NAMES; NULL: as-stored */
    const char *kv_dtype;  /* auto, f32, f16, bf16, fp8 */
    const char *device;    /* cpu, cuda, cuda:N; NULL: cpu */
    const char *invariant; /* on, off; NULL: on */
    int64_t block_tokens;
};

/* clang-format off */
#define GEOMETRY_OPTIONS(type, member) \
    {"model", OPT_STRING, offsetof(type, member.model), NULL, "DIR", 0, 0, "Hugging Face model directory"}, \
    {"dummy", OPT_STRING, offsetof(type, member.dummy), NULL, "DIMS", 0, 0, \
     "random weights of these dimensions instead of a model: 1b, 8b, or hidden=256,layers=2,heads=8,..."}, \
    {"numerics", OPT_CHOICE, offsetof(type, member.numerics), "auto", "auto|f32|bf16", 0, 0, \
     "type of activations; auto: f32 below 64 M parameters, else bf16"}, \
    {"kv-dtype", OPT_CHOICE, offsetof(type, member.kv_dtype), "auto", "auto|f32|f16|bf16|fp8", 0, 0, \
     "type of the KV cache; auto: as --numerics; fp8: e4m3, without scales"}, \
    {"block-tokens", OPT_INT, offsetof(type, member.block_tokens), "16", "N", 1, 256, \
     "tokens of a page and of a block; one value for the whole cluster"}
/* clang-format on */

/* Options of the computation, in the same struct. A store has no use for them and leaves the members NULL. */
/* clang-format off */
#define COMPUTE_OPTIONS(type, member) \
    {"weights", OPT_CHOICE, offsetof(type, member.weights), "as-stored", K_WEIGHTS_NAMES, 0, 0, \
     "format of large matrices; fewer bits: groups of 32 weights with a scale"}, \
    {"device", OPT_STRING, offsetof(type, member.device), "cpu", "cpu|cuda|cuda:N", 0, 0, \
     "device that computes"}, \
    {"batch-invariant", OPT_CHOICE, offsetof(type, member.invariant), "on", "on|off", 0, 0, \
     "cuda, bf16: a sequence gets the same bits in any batch; off: cuBLAS may order sums as is fastest"}
/* clang-format on */

/*
 * How many kernels a process computes with (engine/ranks.h). Stores have no use for it: pages are the same.
 */
struct rank_options {
    int64_t n_tensor, n_pipeline;
    const char *devices; /* next, same */
};

/* clang-format off */
#define RANK_OPTIONS(type, member) \
    {"tensor-parallel", OPT_INT, offsetof(type, member.n_tensor), "1", "N", 1, K_MAX_RANKS, \
     "ranks (devices, or shares of the CPU's threads) that divide every layer; must divide the KV heads"}, \
    {"pipeline-parallel", OPT_INT, offsetof(type, member.n_pipeline), "1", "N", 1, K_MAX_RANKS, \
     "stages that divide the layers, each of --tensor-parallel devices or shares"}, \
    {"rank-devices", OPT_CHOICE, offsetof(type, member.devices), "next", "next|same", 0, 0, \
     "devices of the ranks: next: from --device on; same: all on that one"}
/* clang-format on */

static inline uint32_t rank_options_n(const struct rank_options *o)
{
    return (uint32_t)(o->n_tensor * o->n_pipeline);
}

/* Opens kernels of that configuration for all ranks: out[rank_options_n(o)]. */
enum td_status rank_options_open(const struct rank_options *o, const struct kernels_config *config,
                                 struct kernels **out, struct td_error *error_out);

struct geometry {
    struct model_config config;
    struct model_dummy dummy; /* valid if is_dummy */
    bool is_dummy;
    enum compute compute;
    enum k_weights weights;
    struct kernels_config kernels; /* device and compute */
    struct kv_layout layout;
};

/* Reads config.json at most. TD_ERR_INVALID names the option. */
enum td_status geometry_resolve(const struct geometry_options *o, struct geometry *out, struct td_error *error_out);

/* Parses "cpu", "cuda" or "cuda:N" into out->device and out->ordinal. */
enum td_status geometry_device(const char *text, struct kernels_config *out, struct td_error *error_out);

/* Opens the weights that geometry_resolve() found. The caller closes the model. */
enum td_status geometry_open_model(const struct geometry_options *o, const struct geometry *g, struct model **out,
                                   struct td_error *error_out);
