/*
 * Dispatches operations to the opened backend, and checks the arguments on which every backend relies. Loads
 * the plugin of a device.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/backend.h"

/* Operations can't return an error, so a wrong argument must not pass in release builds either. */
#undef NDEBUG
#include <assert.h>

enum { MAX_HEAD_DIM = 1024 };

/* ------------------------------------------------------------------ opening */

static const char PLUGIN[] = "libtandem_cuda.so";

/* Looks in TANDEM_PLUGINS if it is set, beside the program as built, and in the install directory. */
static void *load_plugin(char *tried, size_t tried_bytes)
{
    static const char *const PLACES[] = {"../kernels/cuda", "../../kernels/cuda", "../lib/tandem"};
    const char *set = getenv("TANDEM_PLUGINS");
    char program[2048] = "", path[4096];
    ssize_t n = readlink("/proc/self/exe", program, sizeof(program) - 1);
    program[n > 0 ? n : 0] = 0;
    *(strrchr(program, '/') ? strrchr(program, '/') : program) = 0;
    void *plugin = NULL;
    for (size_t i = 0; i < (set ? 1 : sizeof(PLACES) / sizeof(PLACES[0])) && !plugin; i++) {
        if (set)
            snprintf(path, sizeof(path), "%s/%s", set, PLUGIN);
        else
            snprintf(path, sizeof(path), "%s/%s/%s", program, PLACES[i], PLUGIN);
        if (access(path, R_OK))
            continue;
        plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        snprintf(tried, tried_bytes, "%s", plugin ? "" : dlerror());
    }
    return plugin;
}

static enum td_status open_cuda(const struct kernels_config *config, struct kernels **out, struct td_error *error_out)
{
    char tried[256] = "";
    /* The plugin stays loaded: threads of its driver may run until the process ends. */
    void *plugin = load_plugin(tried, sizeof(tried));
    kernels_plugin open_plugin = NULL;
    if (plugin)
        *(void **)&open_plugin = dlsym(plugin, KERNELS_PLUGIN);
    if (!open_plugin)
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "device cuda: %s",
                       *tried ? tried
                              : "this build has no CUDA backend (meson setup -Dgpu=enabled builds it, "
                                "TANDEM_PLUGINS=DIR says where it is)");
    return open_plugin(KERNELS_ABI, config, out, error_out);
}

enum td_status kernels_open(const struct kernels_config *config, struct kernels **out, struct td_error *error_out)
{
    enum td_status s =
        config->device == DEVICE_CUDA ? open_cuda(config, out, error_out) : cpu_open(config, out, error_out);
    if (!s)
        (*out)->config = *config;
    return s;
}

void kernels_close(struct kernels *k)
{
    if (k)
        k->backend->close(k);
}

const struct kernels_config *kernels_config(const struct kernels *k)
{
    return &k->config;
}

const char *kernels_isa_name(const struct kernels *k)
{
    return k->backend->isa_name(k);
}

uint32_t kernels_n_threads(const struct kernels *k)
{
    return k->backend->n_threads(k);
}

const char *kernels_numerics(const struct kernels_config *config, enum compute compute)
{
    static const char *const NAMES[2][2] = {{"cpu1-f32", "cpu1-bf16"}, {"cuda1-f32", "cuda2-bf16"}};
    if (config->device == DEVICE_CUDA && config->any_order && compute == COMPUTE_BF16)
        return "cuda2-bf16-any";
    return NAMES[config->device == DEVICE_CUDA][compute == COMPUTE_BF16];
}

static const char *const WEIGHTS[] = {"as-stored", "int8", "fp8", "int4"};

const char *k_weights_name(enum k_weights weights)
{
    return WEIGHTS[weights];
}

enum k_weights k_weights_parse(const char *name)
{
    enum k_weights w = WEIGHTS_AS_STORED;
    while (w < WEIGHTS_INT4 && strcmp(WEIGHTS[w], name))
        w++;
    assert(!strcmp(WEIGHTS[w], name));
    return w;
}

void k_numerics(const struct kernels *k, enum compute compute, char out[K_NUMERICS_BYTES])
{
    const char *name = kernels_numerics(&k->config, compute);
    bool by_kind = k->config.device == DEVICE_CUDA && compute == COMPUTE_BF16;
    snprintf(out, K_NUMERICS_BYTES, "%s%s%s", name, by_kind ? "-" : "", by_kind ? kernels_isa_name(k) : "");
}

/* --------------------------------------------------------------- operations */

static void check_attn(const struct k_attn *a)
{
    const struct kv_layout *l = a->layout;
    assert(a->n_kv_heads && a->first_kv_head + a->n_kv_heads <= l->n_kv_heads && a->layer < l->n_layers);
    assert(a->n_heads && a->n_heads % a->n_kv_heads == 0);
    assert(l->head_dim && l->head_dim <= MAX_HEAD_DIM && l->page_tokens);
    assert(a->q_stride >= (size_t)a->n_heads * l->head_dim && a->kv_stride >= (size_t)a->n_kv_heads * l->head_dim);
    assert(a->k && a->v_dim && a->v_dim <= l->head_dim && (l->kind == KV_LATENT || (a->v && a->v_dim == l->head_dim)));
}

bool k_memory(struct kernels *k, uint64_t *free_out, uint64_t *total_out)
{
    return k->backend->memory(k, free_out, total_out);
}

enum td_status k_alloc(struct kernels *k, size_t len_bytes, void **out)
{
    return k->backend->alloc(k, len_bytes, out);
}

void k_free(struct kernels *k, void *p)
{
    k->backend->free(k, p);
}

enum td_status k_map(struct kernels *k, const void *host, size_t len_bytes, void **out)
{
    return k->backend->map(k, host, len_bytes, len_bytes, out);
}

enum td_status k_map_part(struct kernels *k, const void *host, size_t len_bytes, size_t part_bytes, void **out)
{
    return k->backend->map(k, host, len_bytes, part_bytes, out);
}

bool k_is_pinned(const struct kernels *k, const void *mapped)
{
    return k->backend->is_pinned(k, mapped);
}

void k_unmap(struct kernels *k, void *mapped)
{
    k->backend->unmap(k, mapped);
}

const void *k_put(struct kernels *k, const void *host, size_t len_bytes)
{
    return k->backend->put(k, host, len_bytes);
}

void k_step(struct kernels *k)
{
    k->backend->step(k);
}

void k_write(struct kernels *k, void *to, const void *host, size_t len_bytes)
{
    k_write_pieces(k, to, host, &(struct k_pieces){len_bytes, len_bytes, 1});
}

void k_write_pieces(struct kernels *k, void *to, const void *host, const struct k_pieces *p)
{
    k->backend->write(k, to, host, p);
}

void k_read(struct kernels *k, void *host, const void *from, size_t len_bytes)
{
    k->backend->read(k, host, from, len_bytes);
}

void k_finish(struct kernels *k)
{
    k->backend->finish(k);
}

enum td_status k_trace_begin(struct kernels *k, struct td_error *error_out)
{
    if (!k->backend->trace_begin)
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "traces need --device cuda, built with CUPTI (cupti.h)");
    return k->backend->trace_begin(k, error_out);
}

struct k_trace_event *k_trace_end(struct kernels *k, uint32_t *n_out)
{
    return k->backend->trace_end(k, n_out);
}

uint32_t k_replay_rows(struct kernels *k, uint32_t n_rows)
{
    return k->backend->replay_rows(k, n_rows);
}

bool k_replay(struct kernels *k, uint64_t shape)
{
    return k->backend->replay(k, shape);
}

void k_replay_end(struct kernels *k)
{
    k->backend->replay_end(k);
}

void k_read_aside(struct kernels *k, void *host, const void *from, size_t len_bytes)
{
    k_read_pieces_aside(k, host, from, &(struct k_pieces){len_bytes, len_bytes, 1});
}

void k_read_pieces_aside(struct kernels *k, void *host, const void *from, const struct k_pieces *p)
{
    k->backend->read_aside(k, host, from, p);
}

uint32_t k_mark(struct kernels *k)
{
    return k->backend->mark(k);
}

bool k_passed(struct kernels *k, uint32_t mark)
{
    return k->backend->passed(k, mark);
}

void k_wait(struct kernels *k, uint32_t mark)
{
    k->backend->wait(k, mark);
}

void k_write_pieces_aside(struct kernels *k, void *to, const void *host, const struct k_pieces *p)
{
    k->backend->write_aside(k, to, host, p);
}

uint64_t k_write_mark(struct kernels *k)
{
    return k->backend->write_mark(k);
}

bool k_written(struct kernels *k, uint64_t mark)
{
    return k->backend->written(k, mark);
}

void k_write_wait(struct kernels *k, uint64_t mark)
{
    k->backend->write_wait(k, mark);
}

/* The type of elements in which a part's numbers are kept, or 0 if they can't be converted. */
static enum num_type part_type(const struct k_matrix_part *part)
{
    const struct k_scales *s = &part->scales;
    if (part->type >= NUM_F32 && part->type <= NUM_BF16)
        return part->type;
    bool has_scales = s->out_block && s->in_block && s->type >= NUM_F32 && s->type <= NUM_BF16;
    return part->type == NUM_F8_E4M3 && (!s->data || has_scales) ? NUM_BF16 : 0;
}

static enum td_status shape_of(const struct k_matrix_part *parts, uint32_t n_parts, uint32_t n_in, enum compute compute,
                               enum k_weights weights, struct matrix_shape *out)
{
    uint64_t n_out = 0;
    enum num_type type = n_parts ? part_type(&parts[0]) : NUM_F32;
    for (uint32_t i = 0; i < n_parts; i++) {
        enum num_type t = part_type(&parts[i]);
        if (!t)
            return TD_ERR_INVALID;
        if (t != type)
            type = NUM_F32;
        n_out += parts[i].n_out;
    }
    if (compute == COMPUTE_BF16 || weights)
        type = NUM_BF16;
    if (!n_in || n_in > INT32_MAX || !n_out || n_out > INT32_MAX || weights > WEIGHTS_INT4 ||
        (compute != COMPUTE_F32 && compute != COMPUTE_BF16))
        return TD_ERR_INVALID;
    *out = (struct matrix_shape){(uint32_t)n_out, n_in, compute, type, weights};
    return TD_OK;
}

enum td_status k_matrix_pack(struct kernels *k, const struct k_matrix_part *parts, uint32_t n_parts, uint32_t n_in,
                             enum compute compute, enum k_weights weights, struct k_matrix **out)
{
    struct matrix_shape shape;
    enum td_status s = shape_of(parts, n_parts, n_in, compute, weights, &shape);
    return s ? s : k->backend->matrix_pack(k, parts, n_parts, &shape, out);
}

void k_matrix_free(struct kernels *k, struct k_matrix *m)
{
    k->backend->matrix_free(k, m);
}

uint64_t k_matrix_bytes(const struct kernels *k, const struct k_matrix *m)
{
    return k->backend->matrix_bytes(m);
}

const void *k_matrix_data(const struct kernels *k, const struct k_matrix *m)
{
    return k->backend->matrix_data ? k->backend->matrix_data(m) : NULL;
}

enum td_status k_matrix_view(struct kernels *k, const struct k_matrix_part *parts, uint32_t n_parts, uint32_t n_in,
                             enum compute compute, enum k_weights weights, const void *data, uint64_t len_bytes,
                             struct k_matrix **out)
{
    struct matrix_shape shape;
    enum td_status s = shape_of(parts, n_parts, n_in, compute, weights, &shape);
    if (!s && !k->backend->matrix_view)
        s = TD_ERR_UNSUPPORTED;
    return s ? s : k->backend->matrix_view(k, parts, n_parts, &shape, data, len_bytes, out);
}

void k_matrix_move(struct kernels *k, struct k_matrix *m, const void *data)
{
    k->backend->matrix_move(m, data);
}

void k_linear(struct kernels *k, const struct k_matrix *w, const float *x, uint32_t n_rows, float *y, bool accumulate)
{
    k->backend->linear(k, w, x, n_rows, y, accumulate);
}

enum td_status k_stack_open(struct kernels *k, struct k_matrix *const *matrices, uint32_t n, struct k_stack **out)
{
    return k->backend->stack_open(k, matrices, n, out);
}

void k_stack_close(struct kernels *k, struct k_stack *s)
{
    k->backend->stack_close(k, s);
}

uint64_t k_stack_bytes(const struct kernels *k, const struct k_stack *s)
{
    return k->backend->stack_bytes(s);
}

void k_linear_each(struct kernels *k, const struct k_stack *s, const struct k_each *e, uint32_t n_rows)
{
    k->backend->linear_each(k, s, e, n_rows);
}

void k_linear_sorted(struct kernels *k, const struct k_stack *s, const uint32_t *first, uint32_t n_rows, const float *x,
                     float *y)
{
    k->backend->linear_sorted(k, s, first, n_rows, x, y);
}

void k_take_rows(struct kernels *k, const void *table, enum num_type type, uint32_t dim, const uint32_t *ids,
                 uint32_t n_rows, float scale, float *out)
{
    k->backend->take_rows(k, table, type, dim, ids, n_rows, scale, out);
}

void k_rmsnorm(struct kernels *k, const float *x, const float *w, float eps, uint32_t n_rows, uint32_t dim, float *y)
{
    k->backend->rmsnorm(k, x, w, eps, n_rows, dim, y);
}

void k_head_norm(struct kernels *k, float *x, size_t row_stride, uint32_t n_heads, size_t head_stride, const float *w,
                 float eps, uint32_t n_rows, uint32_t dim)
{
    k->backend->head_norm(k, x, row_stride, n_heads, head_stride, w, eps, n_rows, dim);
}

void k_add(struct kernels *k, const float *x, size_t n, float *y)
{
    k->backend->add(k, x, n, y);
}

void k_copy_heads(struct kernels *k, const struct k_each *e, uint32_t n_heads, uint32_t dim, uint32_t n_rows)
{
    k->backend->copy_heads(k, e, n_heads, dim, n_rows);
}

void k_glu(struct kernels *k, const float *gate_up, uint32_t n_rows, uint32_t dim, const struct k_glu *glu, float *out)
{
    k->backend->glu(k, gate_up, n_rows, dim, glu, out);
}

void k_softcap(struct kernels *k, float *x, size_t n, float cap)
{
    k->backend->softcap(k, x, n, cap);
}

void k_rope(struct kernels *k, float *x, size_t row_stride, uint32_t n_heads, size_t head_stride,
            const struct k_rotary *r, const uint32_t *table_rows, uint32_t n_rows)
{
    assert(r->dim % 2 == 0 && head_stride >= r->dim && row_stride >= (n_heads - 1) * head_stride + r->dim);
    k->backend->rope(k, x, row_stride, n_heads, head_stride, r, table_rows, n_rows);
}

void k_route(struct kernels *k, const struct k_router *r, const float *logits, uint32_t n_rows, uint32_t stride,
             uint32_t *experts_out, float *weights_out)
{
    assert(r->n_experts <= K_MAX_EXPERTS && r->n_used >= 1 && r->n_used <= K_MAX_USED && r->n_used <= stride);
    assert(r->n_groups && r->n_experts % r->n_groups == 0 &&
           r->n_used <= r->n_experts / r->n_groups * r->n_groups_used);
    k->backend->route(k, r, logits, n_rows, stride, experts_out, weights_out);
}

void k_sort_slots(struct kernels *k, const struct k_slots *s, uint32_t n_experts, uint32_t n_rows)
{
    assert(s->n_used >= 1 && s->n_used <= s->n_slots && n_experts <= K_MAX_EXPERTS);
    k->backend->sort_slots(k, s, n_experts, n_rows);
}

void k_combine(struct kernels *k, const float *x, uint32_t dim, const uint32_t *rows, const float *weights, uint32_t n,
               uint32_t n_rows, float *y)
{
    k->backend->combine(k, x, dim, rows, weights, n, n_rows, y);
}

void k_put_seqs(struct kernels *k, const struct k_attn_seq *seqs, uint32_t n_seqs, uint32_t page_tokens)
{
    k->backend->put_seqs(k, seqs, n_seqs, page_tokens);
}

void k_kv_store(struct kernels *k, const struct k_attn *a)
{
    check_attn(a);
    k->backend->kv_store(k, a);
}

void k_attention(struct kernels *k, const struct k_attn *a)
{
    check_attn(a);
    k->backend->attention(k, a);
}

void k_sample_rows(struct kernels *k, const float *logits, uint32_t n, uint32_t n_rows, const struct k_draw *draws,
                   struct k_sampled *out)
{
    k->backend->sample_rows(k, logits, n, n_rows, draws, out);
}
