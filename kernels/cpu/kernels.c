/*
 * The public operations: check the arguments, cut the work into pieces, let the pool compute them.
 *
 * Pieces are made large enough to be worth a claim (PIECE_NUMBERS elements for elementwise work), and an operation that is
 * one piece runs on the caller without waking anybody.
 */
#ifdef KERNELS_SIMD
#include <cpuid.h>
#endif
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/pool.h"

#undef NDEBUG /* operations can't return an error: a wrong argument must not pass in release builds either */
#include <assert.h>

enum { PIECE_NUMBERS = 16384, MAX_THREADS = 256, MAX_HEAD_DIM = 1024 };

struct kernels {
    const struct cpu_ops *ops;
    struct pool *pool;
    void *scratch; /* grows to the largest operation seen */
    size_t scratch_bytes;
};

#ifdef KERNELS_SIMD
static bool has_f16c(void) /* which __builtin_cpu_supports of Clang 14 can't tell */
{
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

static const struct cpu_ops *best_of(enum kernels_isa isa)
{
#ifdef KERNELS_SIMD
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && isa >= ISA_AVX512)
        return __builtin_cpu_supports("avx512bf16") ? &cpu_avx512_bf16 : &cpu_avx512;
    if (avx2 && isa >= ISA_AVX2)
        return &cpu_avx2;
#endif
    (void)isa;
    return &cpu_plain;
}

const struct cpu_ops *cpu_ops_get(enum kernels_isa isa)
{
    static _Atomic(const struct cpu_ops *) best; /* kept because asking the CPU traps under a hypervisor */
    if (isa == ISA_AUTO) {
        const struct cpu_ops *ops = atomic_load_explicit(&best, memory_order_relaxed);
        if (!ops)
            atomic_store_explicit(&best, ops = best_of(ISA_AVX512), memory_order_relaxed);
        return ops;
    }
    const struct cpu_ops *ops = best_of(isa);
    if (isa == ISA_AVX2 && ops == &cpu_plain)
        return NULL;
    return isa == ISA_AVX512 && strncmp(ops->name, "avx512", 6) != 0 ? NULL : ops;
}

static uint32_t cpus_allowed(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof(set), &set) ? 1 : CPU_COUNT(&set);
    return n < 1 ? 1 : (uint32_t)n;
}

enum td_status kernels_open(const struct kernels_config *config, struct kernels **out, struct td_error *error_out)
{
    uint32_t n_threads = config->n_threads ? config->n_threads : cpus_allowed();
    if (config->n_threads > MAX_THREADS)
        return td_fail(error_out, TD_ERR_INVALID, "kernels.n_threads: %u is not in 0..%d", n_threads, MAX_THREADS);
    if (config->isa > ISA_AVX512)
        return td_fail(error_out, TD_ERR_INVALID, "kernels.isa: %d is unknown", (int)config->isa);
    const struct cpu_ops *ops = cpu_ops_get(config->isa);
    if (!ops)
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "kernels.isa: this CPU has no %s",
                       config->isa == ISA_AVX2 ? "AVX2, FMA and F16C" : "AVX-512 F, BW, VL and DQ");
    struct kernels *k = mem_zalloc(sizeof(*k));
    k->ops = ops;
    k->pool = pool_open(n_threads < MAX_THREADS ? n_threads : MAX_THREADS);
    *out = k;
    return TD_OK;
}

void kernels_close(struct kernels *k)
{
    if (!k)
        return;
    pool_close(k->pool);
    free(k->scratch);
    free(k);
}

const char *kernels_isa_name(const struct kernels *k)
{
    return k->ops->name;
}

uint32_t kernels_n_threads(const struct kernels *k)
{
    return pool_n_threads(k->pool);
}

const char *kernels_numerics(enum compute compute)
{
    return compute == COMPUTE_BF16 ? "cpu1-bf16" : "cpu1-f32";
}

/* An operation can't fail, so a system that has no memory for its scratch ends the process. */
static void *scratch(struct kernels *k, size_t len_bytes)
{
    if (len_bytes > k->scratch_bytes) {
        free(k->scratch);
        k->scratch = NULL;
        if (mem_try(len_bytes, &k->scratch))
            abort();
        k->scratch_bytes = len_bytes;
    }
    return k->scratch;
}

/* -------------------------------------------------------------------- rows */

/* An elementwise operation over rows; each use names the fields it needs. */
struct row_job {
    const struct cpu_ops *ops;
    uint32_t n_rows, rows_per_piece, dim;
    const float *in, *weight;
    float *out;
    float eps;
    void (*row)(const struct row_job *job, size_t row);
    const void *table; /* embed */
    enum num_type type;
    const uint32_t *ids; /* embed: ids; rope: positions */
    uint32_t row_stride, n_heads;
    uint32_t *words; /* linear: rounded activations */
};

static void run_rows(void *arg, uint32_t piece, uint32_t thread)
{
    (void)thread;
    const struct row_job *job = arg;
    uint32_t first = piece * job->rows_per_piece, left = job->n_rows - first;
    for (uint32_t i = 0; i < (left < job->rows_per_piece ? left : job->rows_per_piece); i++)
        job->row(job, first + i);
}

static void spread_rows(struct kernels *k, struct row_job *job)
{
    uint32_t rows = PIECE_NUMBERS / (job->dim ? job->dim : 1);
    job->rows_per_piece = rows ? rows : 1;
    pool_run(k->pool, run_rows, job, (job->n_rows + job->rows_per_piece - 1) / job->rows_per_piece);
}

static void embed_row(const struct row_job *job, size_t row)
{
    const uint8_t *at = (const uint8_t *)job->table + (size_t)job->ids[row] * job->dim * num_type_bytes(job->type);
    job->ops->to_f32(at, job->type, job->dim, job->out + row * job->dim);
}

void k_embed(struct kernels *k, const void *table, enum num_type type, uint32_t dim, const uint32_t *ids,
             uint32_t n_rows, float *out)
{
    struct row_job job = {.ops = k->ops, .n_rows = n_rows, .dim = dim, .row = embed_row};
    job.table = table;
    job.type = type;
    job.ids = ids;
    job.out = out;
    spread_rows(k, &job);
}

static void rmsnorm_row(const struct row_job *job, size_t row)
{
    job->ops->rmsnorm(job->in + row * job->dim, job->weight, job->eps, job->dim, job->out + row * job->dim);
}

void k_rmsnorm(struct kernels *k, const float *x, const float *w, float eps, uint32_t n_rows, uint32_t dim, float *y)
{
    struct row_job job = {.ops = k->ops, .n_rows = n_rows, .dim = dim, .row = rmsnorm_row};
    job.in = x;
    job.weight = w;
    job.eps = eps;
    job.out = y;
    spread_rows(k, &job);
}

static void silu_row(const struct row_job *job, size_t row)
{
    const float *gate = job->in + row * 2 * job->dim;
    job->ops->silu_mul(gate, gate + job->dim, job->dim, job->out + row * job->dim);
}

void k_silu_mul(struct kernels *k, const float *gate_up, uint32_t n_rows, uint32_t dim, float *out)
{
    struct row_job job = {.ops = k->ops, .n_rows = n_rows, .dim = dim, .row = silu_row};
    job.in = gate_up;
    job.out = out;
    spread_rows(k, &job);
}

/* No fma here: two products and a sum, each rounded, are the same on every machine without further care. */
static void rope_row(const struct row_job *job, size_t row)
{
    uint32_t half = job->dim / 2;
    const float *cs = job->in + (size_t)job->ids[row] * half * 2;
    for (uint32_t h = 0; h < job->n_heads; h++) {
        float *a = job->out + row * job->row_stride + (size_t)h * job->dim, *b = a + half;
        for (uint32_t i = 0; i < half; i++) {
            float c = cs[2 * i], s = cs[2 * i + 1], x = a[i], y = b[i];
            a[i] = x * c - y * s;
            b[i] = y * c + x * s;
        }
    }
}

void k_rope(struct kernels *k, float *x, uint32_t row_stride, uint32_t n_heads, uint32_t head_dim,
            const uint32_t *positions, uint32_t n_rows, const float *cos_sin)
{
    assert(head_dim % 2 == 0 && row_stride >= n_heads * head_dim);
    struct row_job job = {.ops = k->ops, .n_rows = n_rows, .dim = head_dim, .row = rope_row};
    job.in = cos_sin;
    job.out = x;
    job.ids = positions;
    job.row_stride = row_stride;
    job.n_heads = n_heads;
    spread_rows(k, &job);
}

/* ------------------------------------------------------------------ linear */

static void round_row(const struct row_job *job, size_t row)
{
    job->ops->round_pairs(job->in + row * job->dim, job->dim, job->words + row * ((job->dim + 1) / 2));
}

static const uint32_t *rounded(struct kernels *k, const float *x, uint32_t n_rows, uint32_t n_in)
{
    struct row_job job = {.ops = k->ops, .n_rows = n_rows, .dim = n_in, .in = x, .row = round_row};
    job.words = scratch(k, (size_t)n_rows * ((n_in + 1) / 2) * sizeof(uint32_t));
    spread_rows(k, &job);
    return job.words;
}

struct linear_run {
    struct linear_job job;
    void (*linear)(const struct linear_job *job, uint32_t panel, uint32_t row0, uint32_t row1);
    uint32_t n_blocks; /* of rows; a panel's blocks are neighbours, so that the second one finds it in the cache */
};

static void run_linear(void *arg, uint32_t piece, uint32_t thread)
{
    (void)thread;
    const struct linear_run *r = arg;
    uint32_t row0 = piece % r->n_blocks * ROW_BLOCK, left = r->job.n_rows - row0;
    r->linear(&r->job, piece / r->n_blocks, row0, row0 + (left < ROW_BLOCK ? left : ROW_BLOCK));
}

void k_linear(struct kernels *k, const struct k_matrix *w, const float *x, uint32_t n_rows, float *y, bool accumulate)
{
    if (!n_rows)
        return;
    struct linear_run r = {.job = {.w = w, .x = x, .n_rows = n_rows, .y = y, .accumulate = accumulate}};
    r.linear = k->ops->linear_f32;
    if (w->compute == COMPUTE_BF16) {
        r.job.x = rounded(k, x, n_rows, w->n_in);
        r.linear = k->ops->linear_bf16;
    }
    r.n_blocks = (n_rows + ROW_BLOCK - 1) / ROW_BLOCK;
    pool_run(k->pool, run_linear, &r, r.n_blocks * w->n_panels);
}

struct pack_run {
    const struct cpu_ops *ops;
    const struct k_matrix_part *parts;
    uint32_t n_parts;
    struct k_matrix *m;
    float *rows; /* [n_threads][2][n_in]: one row as f32, then as packed */
};

/* Puts n elements of a row where output c of the panel has them. */
static void scatter(const struct k_matrix *m, uint32_t panel, uint32_t c, const void *row)
{
    uint8_t *to = m->data + (size_t)panel * m->n_steps * m->step_bytes;
    uint32_t slot = panel_slot(m, c);
    if (m->compute == COMPUTE_BF16)
        for (uint32_t k = 0; k < m->n_in; k++)
            ((uint16_t *)to)[((size_t)k / 2 * PANEL + slot) * 2 + k % 2] = ((const uint16_t *)row)[k];
    else if (m->type == NUM_F32)
        for (uint32_t k = 0; k < m->n_in; k++)
            ((float *)to)[(size_t)k * PANEL + slot] = ((const float *)row)[k];
    else
        for (uint32_t k = 0; k < m->n_in; k++)
            ((uint16_t *)to)[(size_t)k * PANEL + slot] = ((const uint16_t *)row)[k];
}

static void run_pack(void *arg, uint32_t panel, uint32_t thread)
{
    const struct pack_run *r = arg;
    const struct k_matrix *m = r->m;
    float *wide = r->rows + (size_t)thread * 2 * m->n_in, *cast = wide + m->n_in;
    for (uint32_t c = 0; c < PANEL && panel * PANEL + c < m->n_out; c++) {
        uint32_t out = panel * PANEL + c;
        const struct k_matrix_part *part = r->parts;
        for (; out >= part->n_out; part++)
            out -= part->n_out;
        const uint8_t *row = (const uint8_t *)part->data + (size_t)out * m->n_in * num_type_bytes(part->type);
        if (part->type != m->type) {
            r->ops->to_f32(row, part->type, m->n_in, wide);
            r->ops->from_f32(wide, m->type, m->n_in, cast);
            row = (const uint8_t *)cast;
        }
        scatter(m, panel, c, row);
    }
}

/* Elements are kept as stored; parts of different types meet in f32, which holds all of them exactly. */
static enum num_type packed_type(const struct k_matrix_part *parts, uint32_t n_parts, enum compute compute)
{
    if (compute == COMPUTE_BF16)
        return NUM_BF16;
    for (uint32_t i = 1; i < n_parts; i++)
        if (parts[i].type != parts[0].type)
            return NUM_F32;
    return parts[0].type;
}

static enum td_status matrix_alloc(struct k_matrix *m)
{
    m->n_panels = (m->n_out + PANEL - 1) / PANEL;
    m->n_steps = m->compute == COMPUTE_BF16 ? (m->n_in + 1) / 2 : m->n_in;
    m->step_bytes = PANEL * (m->compute == COMPUTE_BF16 ? 4 : num_type_bytes(m->type));
    size_t steps = (size_t)m->n_panels * m->n_steps;
    if (__builtin_mul_overflow(steps, m->step_bytes, &m->bytes))
        return TD_ERR_NO_MEMORY;
    void *data = NULL;
    enum td_status s = mem_map(m->bytes, &data);
    m->data = data;
    return s;
}

enum td_status k_matrix_pack(struct kernels *k, const struct k_matrix_part *parts, uint32_t n_parts, uint32_t n_in,
                             enum compute compute, struct k_matrix **out)
{
    uint64_t n_out = 0;
    for (uint32_t i = 0; i < n_parts; i++) {
        if (parts[i].type < NUM_F32 || parts[i].type > NUM_BF16)
            return TD_ERR_INVALID;
        n_out += parts[i].n_out;
    }
    if (!n_in || !n_out || n_out > UINT32_MAX - PANEL || (compute != COMPUTE_F32 && compute != COMPUTE_BF16))
        return TD_ERR_INVALID;
    struct k_matrix *m = mem_zalloc(sizeof(*m));
    *m = (struct k_matrix){.compute = compute, .n_out = (uint32_t)n_out, .n_in = n_in};
    m->type = packed_type(parts, n_parts, compute);
    enum td_status s = matrix_alloc(m);
    if (s) {
        free(m);
        return s;
    }
    struct pack_run r = {.ops = k->ops, .parts = parts, .n_parts = n_parts, .m = m};
    r.rows = scratch(k, (size_t)kernels_n_threads(k) * 2 * n_in * sizeof(float));
    pool_run(k->pool, run_pack, &r, m->n_panels);
    *out = m;
    return TD_OK;
}

void k_matrix_free(struct k_matrix *m)
{
    if (!m)
        return;
    mem_unmap(m->data, m->bytes);
    free(m);
}

uint64_t k_matrix_bytes(const struct k_matrix *m)
{
    return m->bytes;
}

uint32_t k_matrix_n_out(const struct k_matrix *m)
{
    return m->n_out;
}

/* --------------------------------------------------------------- attention */

static void check_attn(const struct k_attn *a)
{
    const struct kv_layout *l = a->layout;
    assert(l->n_kv_heads && a->n_heads && a->n_heads % l->n_kv_heads == 0 && a->layer < l->n_layers);
    assert(l->head_dim && l->head_dim <= MAX_HEAD_DIM && l->page_tokens);
    assert(a->row_stride >= (a->n_heads + 2 * l->n_kv_heads) * l->head_dim);
}

struct attn_run {
    const struct cpu_ops *ops;
    const struct k_attn *a;
    uint32_t rows_per_tile;
    uint32_t *first_piece; /* [n_seqs + 1] */
    uint8_t *scratch;
    size_t scratch_bytes; /* of one thread */
};

/* The sequence of a piece; returns the piece's number within the sequence. */
static uint32_t find_seq(const struct attn_run *r, uint32_t piece, const struct k_attn_seq **seq_out)
{
    uint32_t low = 0, high = r->a->n_seqs;
    while (high - low > 1) {
        uint32_t mid = low + (high - low) / 2;
        *(r->first_piece[mid] <= piece ? &low : &high) = mid;
    }
    *seq_out = &r->a->seqs[low];
    return piece - r->first_piece[low];
}

/* Pieces of a sequence: kv heads inside, row tiles outside. */
static uint32_t cut_seqs(struct attn_run *r, uint32_t n_kv_heads)
{
    r->first_piece[0] = 0;
    for (uint32_t i = 0; i < r->a->n_seqs; i++) {
        uint32_t n_rows = r->a->seqs[i].n_rows;
        uint32_t tiles = (n_rows + r->rows_per_tile - 1) / r->rows_per_tile;
        r->first_piece[i + 1] = r->first_piece[i] + tiles * n_kv_heads;
    }
    return r->first_piece[r->a->n_seqs];
}

static void store_row(const struct k_attn *a, const struct cpu_ops *ops, const struct k_attn_seq *s, uint32_t i,
                      uint32_t which)
{
    const struct kv_layout *l = a->layout;
    const float *from = a->qkv + ((size_t)s->first_row + i) * a->row_stride +
                        (size_t)(a->n_heads + which * l->n_kv_heads) * l->head_dim;
    for (uint32_t h = 0; h < l->n_kv_heads; h++)
        ops->from_f32(from + (size_t)h * l->head_dim, l->dtype, l->head_dim,
                      attn_kv_at(a, s, which, h, s->first_pos + i));
}

static void run_store(void *arg, uint32_t piece, uint32_t thread)
{
    (void)thread;
    const struct attn_run *r = arg;
    const struct k_attn_seq *s = NULL;
    uint32_t row0 = find_seq(r, piece, &s) * r->rows_per_tile, left = s->n_rows - row0;
    for (uint32_t i = 0; i < (left < r->rows_per_tile ? left : r->rows_per_tile); i++) {
        store_row(r->a, r->ops, s, row0 + i, 0);
        store_row(r->a, r->ops, s, row0 + i, 1);
    }
}

void k_kv_store(struct kernels *k, const struct k_attn *a)
{
    check_attn(a);
    uint32_t numbers = 2 * a->layout->n_kv_heads * a->layout->head_dim;
    struct attn_run r = {.ops = k->ops, .a = a, .rows_per_tile = PIECE_NUMBERS / numbers + 1};
    r.first_piece = scratch(k, (a->n_seqs + 1ul) * sizeof(uint32_t));
    pool_run(k->pool, run_store, &r, cut_seqs(&r, 1));
}

static void run_attention(void *arg, uint32_t piece, uint32_t thread)
{
    const struct attn_run *r = arg;
    const struct k_attn_seq *s = NULL;
    uint32_t n_kv_heads = r->a->layout->n_kv_heads, i = find_seq(r, piece, &s);
    struct attn_tile t = {.a = r->a, .seq = s, .kv_head = i % n_kv_heads, .row0 = i / n_kv_heads * r->rows_per_tile};
    uint32_t left = s->n_rows - t.row0;
    t.n_rows = left < r->rows_per_tile ? left : r->rows_per_tile;
    t.scratch = (float *)(void *)(r->scratch + thread * r->scratch_bytes);
    r->ops->attend(&t);
}

void k_attention(struct kernels *k, const struct k_attn *a)
{
    check_attn(a);
    uint32_t group = a->n_heads / a->layout->n_kv_heads, rows = QUERY_TILE / group;
    struct attn_run r = {.ops = k->ops, .a = a, .rows_per_tile = rows ? rows : 1};
    size_t floats = attn_scratch_floats(a->layout->head_dim, r.rows_per_tile * group);
    r.scratch_bytes = (floats * sizeof(float) + 63) / 64 * 64;
    size_t tiles_bytes = r.scratch_bytes * kernels_n_threads(k);
    r.scratch = scratch(k, tiles_bytes + (a->n_seqs + 1ul) * sizeof(uint32_t));
    r.first_piece = (uint32_t *)(void *)(r.scratch + tiles_bytes);
    pool_run(k->pool, run_attention, &r, cut_seqs(&r, a->layout->n_kv_heads));
}

/* ----------------------------------------------------------------- numbers */

uint32_t k_argmax(const float *logits, uint32_t n)
{
    float max = cpu_ops_get(ISA_AUTO)->max(logits, n);
    for (uint32_t i = 0; i < n; i++)
        if (logits[i] == max)
            return i;
    return 0;
}

float k_logsumexp(const float *logits, uint32_t n)
{
    return cpu_ops_get(ISA_AUTO)->logsumexp(logits, n);
}

float k_exp(float x)
{
    return cpu_ops_get(ISA_AUTO)->exp(x);
}

float k_log(float x)
{
    return cpu_ops_get(ISA_AUTO)->log(x);
}

void k_convert_to_f32(const void *src, enum num_type type, uint64_t n, float *dst)
{
    cpu_ops_get(ISA_AUTO)->to_f32(src, type, n, dst);
}

void k_convert_from_f32(const float *src, enum num_type type, uint64_t n, void *dst)
{
    cpu_ops_get(ISA_AUTO)->from_f32(src, type, n, dst);
}
