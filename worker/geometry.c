#include "worker/geometry.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Small models are computed in f32, where exactness costs little. */
static const uint64_t AUTO_F32_BELOW_PARAMS = 64000000;

static enum td_status parse_dummy(const char *text, struct model_dummy *out, struct td_error *e)
{
    *out = (struct model_dummy){.seed = 1};
    if (!strcmp(text, "1b"))
        return TD_OK;
    if (!strcmp(text, "8b")) {
        *out = (struct model_dummy){.hidden = 4096,
                                    .n_layers = 32,
                                    .n_heads = 32,
                                    .n_kv_heads = 8,
                                    .head_dim = 128,
                                    .intermediate = 14336,
                                    .seed = 1};
        return TD_OK;
    }
    const struct {
        const char *name;
        uint32_t *at;
    } fields[] = {{"vocab", &out->vocab_size},    {"hidden", &out->hidden},
                  {"layers", &out->n_layers},     {"heads", &out->n_heads},
                  {"kv_heads", &out->n_kv_heads}, {"head_dim", &out->head_dim},
                  {"ffn", &out->intermediate},    {"positions", &out->max_positions},
                  {"experts", &out->n_experts},   {"used", &out->n_used},
                  {"window", &out->window}};
    for (const char *p = text; *p;) {
        const char *eq = strchr(p, '=');
        char *end = NULL;
        unsigned long v = eq ? strtoul(eq + 1, &end, 10) : 0;
        size_t i = 0, n = sizeof(fields) / sizeof(fields[0]);
        while (i < n &&
               (!eq || strlen(fields[i].name) != (size_t)(eq - p) || memcmp(fields[i].name, p, (size_t)(eq - p))))
            i++;
        bool seed = eq && eq - p == 4 && !memcmp(p, "seed", 4);
        if ((i == n && !seed) || end == eq + 1 || (*end && *end != ',') || v > 1u << 24 || (!seed && !v))
            return td_fail(e, TD_ERR_INVALID,
                           "--dummy: '%s' is neither 1b, 8b nor name=number,... of vocab, hidden, layers, "
                           "heads, kv_heads, head_dim, ffn, positions, experts, used, window, seed",
                           text);
        if (seed)
            out->seed = v;
        else
            *fields[i].at = (uint32_t)v;
        p = *end ? end + 1 : end;
    }
    if (out->n_layers > MODEL_MAX_LAYERS || out->n_experts > MODEL_MAX_EXPERTS || out->n_used > MODEL_MAX_USED ||
        out->n_used > out->n_experts)
        return td_fail(e, TD_ERR_INVALID, "--dummy: at most %d layers, %d experts, and %d of them used",
                       MODEL_MAX_LAYERS, MODEL_MAX_EXPERTS, MODEL_MAX_USED);
    return TD_OK;
}

enum td_status geometry_device(const char *text, struct kernels_config *out, struct td_error *e)
{
    unsigned n = 0;
    int used = 0;
    bool numbered = sscanf(text, "cuda:%u%n", &n, &used) == 1 && !text[used] && n < 256;
    if (strcmp(text, "cpu") && strcmp(text, "cuda") && !numbered)
        return td_fail(e, TD_ERR_INVALID, "--device: '%s' is neither cpu, cuda nor cuda:N", text);
    out->device = strcmp(text, "cpu") ? DEVICE_CUDA : DEVICE_CPU;
    out->ordinal = n;
    return TD_OK;
}

enum td_status geometry_resolve(const struct geometry_options *o, struct geometry *out, struct td_error *e)
{
    struct geometry g = {0};
    if (!o->model == !o->dummy)
        return td_fail(e, TD_ERR_INVALID, "give either --model DIR or --dummy DIMS");
    g.is_dummy = o->dummy != NULL;
    enum td_status s = g.is_dummy ? parse_dummy(o->dummy, &g.dummy, e) : model_config_load(o->model, &g.config, e);
    if (!s)
        s = geometry_device(o->device ? o->device : "cpu", &g.kernels, e);
    if (!s && g.is_dummy)
        model_dummy_config(&g.dummy, &g.config);
    if (s)
        return s;
    if (!strcmp(o->numerics, "auto"))
        g.compute = model_config_n_params(&g.config) < AUTO_F32_BELOW_PARAMS ? COMPUTE_F32 : COMPUTE_BF16;
    else
        g.compute = !strcmp(o->numerics, "f32") ? COMPUTE_F32 : COMPUTE_BF16;
    g.weights = o->weights ? k_weights_parse(o->weights) : WEIGHTS_AS_STORED;
    g.kernels.compute = g.compute;
    g.kernels.any_order = o->invariant && !strcmp(o->invariant, "off");
    g.layout = model_config_layout(&g.config, g.compute == COMPUTE_F32 ? NUM_F32 : NUM_BF16, (uint32_t)o->block_tokens);
    if (strcmp(o->kv_dtype, "auto"))
        num_type_parse(o->kv_dtype, &g.layout.dtype);
    s = kv_layout_check(&g.layout, e);
    if (!s)
        *out = g;
    return s;
}

enum td_status geometry_open_model(const struct geometry_options *o, const struct geometry *g, struct model **out,
                                   struct td_error *error_out)
{
    return g->is_dummy ? model_open_dummy(&g->dummy, out, error_out) : model_open(o->model, out, error_out);
}

enum td_status rank_options_open(const struct rank_options *o, const struct kernels_config *config,
                                 struct kernels **out, struct td_error *e)
{
    return kernels_open_ranks(config, rank_options_n(o), !strcmp(o->devices, "same"), out, e);
}
