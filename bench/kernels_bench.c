/*
 * The bench calls the public operations, and runs the limits by the backend. On the CPU the pieces of a limit
 * are claimed like the pieces of an operation, so a core that is busy elsewhere slows both down in the same
 * way.
 *
 * Weights alternate between copies that together exceed the caches, as the layers of a model do.
 */
#include "bench/kernels_bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "kernels/backend.h"

enum {
    MAX_COPIES = 16,
    MAX_SHAPES = 4,
    MAX_ATTENTIONS = 10,
    N_ROWS = 4,
    PAGE_TOKENS = 16,
    FILL_BYTES = 1 << 20,
    PAGE_BYTES = 2 << 20,
    N_PAGES = 256
};

struct shape {
    uint32_t n_out, n_in;
};

/*
 * n_seqs sequences with n_rows rows each, at the end of a context of `context` positions. dim: numbers of
 * a key; 0: the plan's. v_dim: if not 0, keys are latents, and 16 query heads share them
 * (DeepSeek-V2-Lite); else there are 32 query heads and 8 kv heads.
 */
struct attention_shape {
    uint32_t n_seqs, n_rows, context, dim, v_dim;
};

/* What is measured on a kind of device. */
struct kernels_plan {
    const char *arithmetic[2]; /* names of the limits of arithmetic: f32, bf16 */
    enum compute first_compute;
    size_t memory_bytes; /* memory that a limit reads */
    uint32_t head_dim, rows[N_ROWS];
    struct shape shapes[MAX_SHAPES];
    struct shape packed; /* the shape that is also measured in packed formats */
    struct attention_shape attentions[MAX_ATTENTIONS];
};

static const struct kernels_plan CPU_PLAN = {
    .arithmetic = {"f32 fma", "bf16 pairs"},
    .first_compute = COMPUTE_F32,
    .memory_bytes = 256 << 20,
    .head_dim = 64,
    .rows = {1, 8, 64, 512},
    .shapes = {{2048, 2048}, {8192, 2048}, {2048, 8192}},
    .packed = {8192, 2048},
    .attentions = {{16, 1, 2048}, {1, 512, 2048}, {16, 1, 2048, 576, 512}},
};

static const struct kernels_plan DEVICE_PLAN = {
    .arithmetic = {"f32 fma", "bf16 product"},
    .first_compute = COMPUTE_BF16,
    .memory_bytes = 1 << 30,
    .head_dim = 128,
    .rows = {1, 64, 256, 2048},
    .shapes = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}},
    .packed = {28672, 4096},
    .attentions = {{1, 1, 4096},
                   {64, 1, 4096},
                   {128, 1, 4096},
                   {256, 1, 2048},
                   {1, 2048, 2048},
                   {1, 16384, 16384},
                   {64, 1, 4096, 96},
                   {1, 2048, 2048, 96},
                   {64, 1, 4096, 576, 512},
                   {1, 2048, 2048, 576, 512}},
};

struct kernels_bench_run {
    struct kernels *k;
    const struct kernels_plan *plan;
    bool limits_only;
    struct clock clock;
    uint64_t row_ns;
    uint32_t shrink;
    size_t memory_bytes;
    void *memory; /* [2][memory_bytes], used by the limits */
    struct kernels_bench *out;
};

/* Best time of one call, in seconds. */
static double best_seconds(const struct kernels_bench_run *b, void (*run)(void *arg), void *arg)
{
    uint64_t start = clock_now(&b->clock), best = UINT64_MAX;
    for (uint32_t i = 0; i < 3 || clock_now(&b->clock) - start < b->row_ns; i++) {
        uint64_t t = clock_now(&b->clock);
        run(arg);
        k_finish(b->k);
        t = clock_now(&b->clock) - t;
        best = t < best ? t : best;
    }
    return (double)(best ? best : 1) / (double)NS_PER_S;
}

/* Numbers of magnitude 1/64 to 1/32 with both signs: no sum overflows, none becomes subnormal. */
static uint16_t bf16_at(size_t i)
{
    return (uint16_t)(0x3c80 | (i * 2654435761u >> 16 & 0x807f));
}

/* len_bytes of the kernels' memory, filled with bf16 numbers. */
static enum td_status filled(struct kernels_bench_run *b, size_t len_bytes, void **out)
{
    uint16_t *host = mem_array(FILL_BYTES / 2, sizeof(*host));
    for (size_t i = 0; i < FILL_BYTES / 2; i++)
        host[i] = bf16_at(i);
    enum td_status s = k_alloc(b->k, len_bytes, out);
    for (size_t at = 0; at < len_bytes && !s; at += FILL_BYTES)
        k_write(b->k, (uint8_t *)*out + at, host, len_bytes - at < FILL_BYTES ? len_bytes - at : FILL_BYTES);
    free(host);
    return s;
}

/* n floats of the kernels' memory, from -8 to 8. */
static enum td_status numbers(struct kernels_bench_run *b, size_t n, float **out)
{
    void *p = NULL;
    enum td_status s = k_alloc(b->k, n * sizeof(float), &p);
    float *host = mem_array(n, sizeof(*host));
    for (size_t i = 0; i < n; i++)
        host[i] = (float)(i % 17) - 8;
    if (!s)
        k_write(b->k, p, host, n * sizeof(float));
    k_finish(b->k);
    free(host);
    *out = p;
    return s;
}

/* ------------------------------------------------------------------ limits */

struct bench_limit_run {
    const struct kernels_bench_run *b;
    enum kernels_limit limit;
    double amount;
};

static void run_limit(void *arg)
{
    struct bench_limit_run *r = arg;
    r->amount = r->b->k->backend->run_limit(r->b->k, r->limit, r->b->memory, r->b->memory_bytes);
}

/* Called between shapes, so that a short load elsewhere does not lower the limits alone. */
static void measure_limits(struct kernels_bench_run *b)
{
    const char *const names[N_LIMITS] = {[LIMIT_READ_ONE] = "memory read, 1 thread",
                                         [LIMIT_READ] = "memory read",
                                         [LIMIT_COPY] = "memory copy",
                                         [LIMIT_LINK] = "link to the host",
                                         [LIMIT_F32] = b->plan->arithmetic[0],
                                         [LIMIT_BF16] = b->plan->arithmetic[1]};
    uint64_t row_ns = b->row_ns;
    b->row_ns /= 4;
    for (enum kernels_limit i = 0; i < N_LIMITS; i++) {
        struct kernels_bench_row *row = &b->out->rows[i];
        struct bench_limit_run r = {.b = b, .limit = i};
        double seconds = best_seconds(b, run_limit, &r), value = r.amount * 1e-9 / seconds;
        snprintf(row->name, sizeof(row->name), "%s", names[i]);
        row->unit = i < LIMIT_F32 ? "GB/s" : "GFLOP/s";
        row->value = value > row->value ? value : row->value;
    }
    b->row_ns = row_ns;
}

/* -------------------------------------------------------------- operations */

/* An operation that moved bytes and did ops in some seconds. finish_rows() finds the limit that binds it. */
struct kernels_work {
    double seconds, bytes, ops;
    enum kernels_limit memory, arithmetic;
};

static void add_row(struct kernels_bench_run *b, struct kernels_work *works, const char *name, struct kernels_work work)
{
    struct kernels_bench_row *row = &b->out->rows[b->out->n_rows];
    snprintf(row->name, sizeof(row->name), "%s", name);
    works[b->out->n_rows++] = work;
}

/* Finds the limit that binds each row, and removes limits that are unknown here. */
static void finish_rows(struct kernels_bench *out, const struct kernels_work *works)
{
    uint32_t n = 0;
    for (uint32_t i = N_LIMITS; i < out->n_rows; i++) {
        const struct kernels_work *w = &works[i];
        struct kernels_bench_row *row = &out->rows[i];
        double memory = out->rows[w->memory].value, arithmetic = out->rows[w->arithmetic].value;
        bool by_memory = w->bytes / memory > w->ops / arithmetic;
        row->unit = by_memory ? "GB/s" : "GFLOP/s";
        row->limit = by_memory ? memory : arithmetic;
        row->value = (by_memory ? w->bytes : w->ops) * 1e-9 / w->seconds;
        row->share = row->value / row->limit;
    }
    for (uint32_t i = 0; i < out->n_rows; i++)
        if (out->rows[i].value > 0)
            out->rows[n++] = out->rows[i];
    out->n_rows = n;
}

struct linear_bench {
    struct kernels *k;
    struct k_matrix *copies[MAX_COPIES];
    uint32_t n_copies, n_rows;
    float *x, *y;
};

static void run_copies(void *arg)
{
    const struct linear_bench *l = arg;
    for (uint32_t i = 0; i < l->n_copies; i++)
        k_linear(l->k, l->copies[i], l->x, l->n_rows, l->y, false);
}

static enum td_status pack_copies(struct kernels_bench_run *b, struct linear_bench *l, struct shape shape,
                                  enum compute compute, enum k_weights weights)
{
    size_t n = (size_t)shape.n_out * shape.n_in;
    uint16_t *w = mem_array(n, sizeof(*w));
    for (size_t i = 0; i < n; i++)
        w[i] = bf16_at(i);
    struct k_matrix_part part = {.data = w, .type = NUM_BF16, .n_out = shape.n_out};
    enum td_status s = TD_OK;
    uint32_t wanted = (uint32_t)(b->memory_bytes / 2 / (n * 2));
    wanted = wanted < 1 ? 1 : wanted > MAX_COPIES ? MAX_COPIES : wanted;
    for (; !s && l->n_copies < wanted; l->n_copies += !s)
        s = k_matrix_pack(b->k, &part, 1, shape.n_in, compute, weights, &l->copies[l->n_copies]);
    free(w);
    return s;
}

static enum td_status bench_shape(struct kernels_bench_run *b, struct kernels_work *works, struct shape shape,
                                  enum compute compute, enum k_weights weights)
{
    const uint32_t *rows = b->plan->rows;
    struct linear_bench l = {.k = b->k};
    enum td_status s = numbers(b, (size_t)rows[N_ROWS - 1] * shape.n_in, &l.x);
    if (!s)
        s = numbers(b, (size_t)rows[N_ROWS - 1] * shape.n_out, &l.y);
    if (!s)
        s = pack_copies(b, &l, shape, compute, weights);
    for (uint32_t i = 0; !s && i < N_ROWS; i++) {
        char name[64];
        l.n_rows = rows[i];
        snprintf(name, sizeof(name), "linear %s%s%s %ux%u T=%u", compute == COMPUTE_F32 ? "f32" : "bf16",
                 weights ? " " : "", weights ? k_weights_name(weights) : "", shape.n_out, shape.n_in, l.n_rows);
        struct kernels_work w = {.bytes = (double)k_matrix_bytes(b->k, l.copies[0]),
                                 .ops = 2.0 * shape.n_out * shape.n_in * l.n_rows,
                                 .memory = LIMIT_READ,
                                 .arithmetic = compute == COMPUTE_F32 ? LIMIT_F32 : LIMIT_BF16};
        w.seconds = best_seconds(b, run_copies, &l) / l.n_copies;
        add_row(b, works, name, w);
    }
    measure_limits(b);
    for (uint32_t i = 0; i < l.n_copies; i++)
        k_matrix_free(b->k, l.copies[i]);
    k_free(b->k, l.x);
    k_free(b->k, l.y);
    return s;
}

static struct shape shrunk(const struct kernels_bench_run *b, struct shape shape)
{
    return (struct shape){shape.n_out / b->shrink, shape.n_in / b->shrink};
}

static enum td_status bench_linear(struct kernels_bench_run *b, struct kernels_work *works)
{
    enum td_status s = TD_OK;
    for (enum compute c = b->plan->first_compute; !s && c <= COMPUTE_BF16; c++)
        for (uint32_t i = 0; !s && i < MAX_SHAPES && b->plan->shapes[i].n_out; i++)
            s = bench_shape(b, works, shrunk(b, b->plan->shapes[i]), c, WEIGHTS_AS_STORED);
    for (enum k_weights w = WEIGHTS_INT8; !s && w <= WEIGHTS_INT4; w++)
        s = bench_shape(b, works, shrunk(b, b->plan->packed), COMPUTE_BF16, w);
    return s;
}

struct attn_bench {
    struct kernels *k;
    struct kv_layout layout;
    struct k_attn attn;
    uint32_t n_pages; /* pages of one sequence */
    float *qkv;
    void *kv;
    size_t kv_bytes;
    uint8_t **pages;
    struct k_attn_seq *seqs;
};

static void run_attn(void *arg)
{
    const struct attn_bench *a = arg;
    k_attention(a->k, &a->attn);
}

static enum td_status open_attn(struct kernels_bench_run *b, struct attn_bench *a, const struct attention_shape *shape)
{
    uint32_t n_heads = shape->v_dim ? 16 : 32, n_kv_heads = shape->v_dim ? 1 : 8, dim = shape->dim;
    uint32_t total = shape->n_seqs * shape->n_rows, stride = (n_heads + 2 * n_kv_heads) * dim;
    uint32_t v_dim = shape->v_dim ? shape->v_dim : dim;
    float *out = NULL;
    *a = (struct attn_bench){.k = b->k, .layout = {NUM_BF16, 1, n_kv_heads, dim, PAGE_TOKENS}};
    a->layout.kind = shape->v_dim ? KV_LATENT : KV_PLAIN;
    a->n_pages = shape->context / PAGE_TOKENS;
    a->kv_bytes = kv_layout_page_bytes(&a->layout) * a->n_pages * shape->n_seqs;
    a->pages = mem_array((size_t)a->n_pages * shape->n_seqs, sizeof(*a->pages));
    a->seqs = mem_array(shape->n_seqs, sizeof(*a->seqs));
    enum td_status s = filled(b, a->kv_bytes, &a->kv);
    if (!s)
        s = numbers(b, (size_t)total * stride, &a->qkv);
    if (!s)
        s = numbers(b, (size_t)total * n_heads * v_dim, &out);
    for (uint32_t i = 0; i < a->n_pages * shape->n_seqs && !s; i++)
        a->pages[i] = (uint8_t *)a->kv + i * kv_layout_page_bytes(&a->layout);
    for (uint32_t i = 0; i < shape->n_seqs; i++)
        a->seqs[i] = (struct k_attn_seq){i * shape->n_rows, shape->n_rows, shape->context - shape->n_rows,
                                         a->pages + (size_t)i * a->n_pages};
    a->attn = (struct k_attn){.layout = &a->layout,
                              .n_kv_heads = n_kv_heads,
                              .n_heads = n_heads,
                              .q = a->qkv,
                              .k = a->qkv + (size_t)n_heads * dim,
                              .v = shape->v_dim ? NULL : a->qkv + (size_t)(n_heads + n_kv_heads) * dim,
                              .q_stride = stride,
                              .kv_stride = stride,
                              .v_dim = v_dim,
                              .out = out,
                              .scale = 0.125f,
                              .seqs = a->seqs,
                              .n_seqs = shape->n_seqs};
    return s;
}

static void close_attn(struct attn_bench *a)
{
    k_free(a->k, a->attn.out);
    k_free(a->k, a->qkv);
    k_free(a->k, a->kv);
    free(a->pages);
    free(a->seqs);
}

static enum td_status bench_attention(struct kernels_bench_run *b, struct kernels_work *works,
                                      struct attention_shape shape)
{
    struct attn_bench a;
    char name[64];
    shape.context /= b->shrink;
    shape.n_rows = shape.n_rows > 1 ? shape.n_rows / b->shrink : 1;
    bool is_usual = !shape.dim;
    shape.dim = is_usual ? b->plan->head_dim : shape.dim;
    enum td_status s = open_attn(b, &a, &shape);
    if (!s) {
        double total = (double)shape.n_seqs * shape.n_rows,
               keys = (shape.context - shape.n_rows) + (shape.n_rows + 1) / 2.0;
        struct kernels_work w = {.bytes = (double)a.kv_bytes,
                                 .ops = 2.0 * (shape.dim + a.attn.v_dim) * a.attn.n_heads * keys * total,
                                 .memory = LIMIT_READ,
                                 .arithmetic = b->plan == &CPU_PLAN ? LIMIT_F32 : LIMIT_BF16};
        k_step(b->k);
        k_put_seqs(b->k, a.seqs, shape.n_seqs, PAGE_TOKENS);
        w.seconds = best_seconds(b, run_attn, &a);
        snprintf(name, sizeof(name),
                 is_usual ? "attention %u x %u rows, context %u" : "attention %u x %u rows, context %u, %s%u",
                 shape.n_seqs, shape.n_rows, shape.context, shape.v_dim ? "latents of " : "head_dim ", shape.dim);
        add_row(b, works, name, w);
    }
    close_attn(&a);
    return s;
}

struct page_bench {
    struct kernels *k;
    uint8_t *host, *device;
    size_t len_bytes;
};

static void run_pages(void *arg)
{
    const struct page_bench *p = arg;
    for (size_t at = 0; at < p->len_bytes; at += PAGE_BYTES)
        k_read(p->k, p->host + at, p->device + at, PAGE_BYTES);
}

/* Copies pages to the host one by one, as an engine does before it announces them. */
static enum td_status bench_pages(struct kernels_bench_run *b, struct kernels_work *works)
{
    struct page_bench p = {.k = b->k, .len_bytes = PAGE_BYTES * (N_PAGES / b->shrink)};
    void *host = NULL, *device = NULL;
    enum td_status s = mem_map(p.len_bytes, &host);
    if (!s)
        s = k_map(b->k, host, p.len_bytes, &device);
    p.host = host;
    p.device = device;
    if (!s)
        add_row(b, works, "pages to the host, 2 MiB each",
                (struct kernels_work){.seconds = best_seconds(b, run_pages, &p),
                                      .bytes = (double)p.len_bytes,
                                      .memory = LIMIT_LINK,
                                      .arithmetic = LIMIT_F32});
    k_unmap(b->k, device);
    mem_unmap(host, p.len_bytes);
    return s;
}

static enum td_status run_bench(struct kernels_bench_run *b)
{
    struct kernels_work works[KERNELS_BENCH_ROWS];
    b->out->n_rows = N_LIMITS;
    measure_limits(b);
    enum td_status s = b->limits_only ? TD_OK : bench_linear(b, works);
    for (uint32_t i = 0; i < MAX_ATTENTIONS && b->plan->attentions[i].n_seqs && !s && !b->limits_only; i++)
        s = bench_attention(b, works, b->plan->attentions[i]);
    if (!s && !b->limits_only && b->plan == &DEVICE_PLAN)
        s = bench_pages(b, works);
    if (s)
        return s;
    measure_limits(b);
    finish_rows(b->out, works);
    return TD_OK;
}

enum td_status kernels_bench(const struct kernels_bench_config *config, struct kernels_bench *out,
                             struct td_error *error_out)
{
    struct kernels_bench_run b = {.shrink = config->shrink ? config->shrink : 1, .limits_only = config->limits_only};
    enum td_status s = kernels_open(&config->kernels, &b.k, error_out);
    if (s)
        return s;
    if (!strcmp(kernels_isa_name(b.k), "plain")) {
        kernels_close(b.k);
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "kernels.isa: the plain kernels are not made to be fast");
    }
    struct kernels_bench *result = mem_zalloc(sizeof(*result));
    *result = (struct kernels_bench){.isa = kernels_isa_name(b.k), .n_threads = kernels_n_threads(b.k)};
    b.plan = kernels_config(b.k)->device == DEVICE_CPU ? &CPU_PLAN : &DEVICE_PLAN;
    b.out = result;
    b.row_ns = (uint64_t)((config->seconds_per_row > 0 ? config->seconds_per_row : 0.2) * (double)NS_PER_S);
    b.memory_bytes = b.plan->memory_bytes / b.shrink;
    clock_init_real(&b.clock);
    s = filled(&b, 2 * b.memory_bytes, &b.memory);
    if (!s)
        s = run_bench(&b);
    k_free(b.k, b.memory);
    kernels_close(b.k);
    if (s)
        td_fail(error_out, s, "kernels bench: not enough memory");
    else
        *out = *result;
    free(result);
    return s;
}
