/*
 * The operations on the CPU: cut the work into pieces and let the pool compute them.
 *
 * A piece is large enough to be worth a claim (PIECE_NUMBERS elements for elementwise work). An operation of
 * one piece runs on the caller and wakes no thread.
 */
#ifdef KERNELS_SIMD
#include <cpuid.h>
#endif
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/parts.h"
#include "kernels/cpu/state.h"

/* Operations can't return an error, so a wrong argument must not pass in release builds either. */
#undef NDEBUG
#include <assert.h>

#ifdef KERNELS_SIMD
/* __builtin_cpu_supports of Clang 14 does not know F16C. */
static bool has_f16c(void)
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
    /* Kept, because asking the CPU traps under a hypervisor. */
    static _Atomic(const struct cpu_ops *) best;
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

static void cpu_close(struct kernels *head)
{
    struct cpu_kernels *k = cpu_of(head);
    pool_close(k->pool);
    free(k->scratch);
    free(k);
}

static const char *cpu_isa_name(const struct kernels *k)
{
    return ((const struct cpu_kernels *)k)->ops->name;
}

static uint32_t cpu_n_threads(const struct kernels *k)
{
    return pool_n_threads(((const struct cpu_kernels *)k)->pool);
}

void *kernels_scratch(struct cpu_kernels *k, size_t len_bytes)
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

/* ------------------------------------------------------------------ memory */

static bool cpu_memory(struct kernels *k, uint64_t *free_out, uint64_t *total_out)
{
    (void)k, (void)free_out, (void)total_out;
    return false;
}

static enum td_status cpu_alloc(struct kernels *k, size_t len_bytes, void **out)
{
    (void)k;
    return mem_try(len_bytes, out);
}

static void cpu_free(struct kernels *k, void *p)
{
    (void)k;
    free(p);
}

static enum td_status cpu_map(struct kernels *k, const void *host, size_t len_bytes, size_t part_bytes, void **out)
{
    (void)k, (void)len_bytes, (void)part_bytes;
    *out = (void *)host;
    return TD_OK;
}

static bool cpu_is_pinned(const struct kernels *k, const void *mapped)
{
    (void)k, (void)mapped;
    return true;
}

static void cpu_unmap(struct kernels *k, void *mapped)
{
    (void)k, (void)mapped;
}

static const void *cpu_put(struct kernels *k, const void *host, size_t len_bytes)
{
    (void)k, (void)len_bytes;
    return host;
}

static void cpu_write(struct kernels *k, void *to, const void *host, const struct k_pieces *p)
{
    (void)k;
    for (uint32_t i = 0; i < p->n && to != host; i++) /* if equal, the memory is mapped */
        memmove((uint8_t *)to + i * p->piece_bytes, (const uint8_t *)host + i * p->stride_bytes, p->piece_bytes);
}

static void cpu_read(struct kernels *k, void *host, const void *from, size_t len_bytes)
{
    (void)k;
    if (host != from)
        memmove(host, from, len_bytes);
}

static uint32_t cpu_replay_rows(struct kernels *k, uint32_t n_rows)
{
    (void)k, (void)n_rows;
    return 0;
}

static bool cpu_replay(struct kernels *k, uint64_t shape)
{
    (void)k, (void)shape;
    return false;
}

static void cpu_read_aside(struct kernels *k, void *host, const void *from, const struct k_pieces *p)
{
    for (uint32_t i = 0; i < p->n && host != from; i++)
        cpu_read(k, (uint8_t *)host + i * p->stride_bytes, (const uint8_t *)from + i * p->piece_bytes, p->piece_bytes);
}

static uint32_t cpu_mark(struct kernels *k)
{
    (void)k;
    return 0;
}

static bool cpu_passed(struct kernels *k, uint32_t mark)
{
    (void)k, (void)mark;
    return true;
}

static void cpu_wait(struct kernels *k, uint32_t mark)
{
    (void)k, (void)mark;
}

static uint64_t cpu_write_mark(struct kernels *k)
{
    (void)k;
    return 0;
}

static bool cpu_written(struct kernels *k, uint64_t mark)
{
    (void)k, (void)mark;
    return true;
}

static void cpu_write_wait(struct kernels *k, uint64_t mark)
{
    (void)k, (void)mark;
}

/* Operations are done when they return, and k_put copies nothing. */
static void cpu_nothing(struct kernels *k)
{
    (void)k;
}

/* ------------------------------------------------------------------ linear */

/* Rows that go through one matrix. */
struct row_group {
    const struct k_matrix *w;
    const float *x; /* row t at x + t * x_stride */
    float *y;       /* row t at y + t * y_stride */
    uint32_t n_rows;
};

struct k_stack {
    struct k_matrix **matrices;
    struct row_group *groups; /* groups of the running call */
    uint32_t n;
};

/* The groups of one call, cut into pieces: a piece is a panel of a matrix and a block of rows. */
struct linear_run {
    const struct row_group *groups;
    struct cpu_linear_job shape; /* strides and accumulate only */
    void (*linear)(const struct cpu_linear_job *job, uint32_t panel, uint32_t row0, uint32_t row1);
    uint32_t n_groups;
    uint32_t *first_piece; /* [n_groups + 1] */
    uint32_t *words;       /* COMPUTE_BF16: rounded activations, group after group; else NULL */
    uint32_t *first_row;   /* [n_groups] first row of each group in words */
};

static uint32_t row_blocks(uint32_t n_rows)
{
    return (n_rows + ROW_BLOCK - 1) / ROW_BLOCK;
}

/* The last i with first[i] <= piece. Empty groups have the same first as the next one, and are skipped. */
static uint32_t find_piece(const uint32_t *first, uint32_t n, uint32_t piece)
{
    uint32_t low = 0, high = n;
    while (high - low > 1) {
        uint32_t mid = low + (high - low) / 2;
        *(first[mid] <= piece ? &low : &high) = mid;
    }
    return low;
}

/* The row blocks of a panel are consecutive pieces, so the second one finds the panel in the cache. */
static void run_linear(void *arg, uint32_t piece, uint32_t thread)
{
    (void)thread;
    const struct linear_run *r = arg;
    uint32_t i = find_piece(r->first_piece, r->n_groups, piece);
    const struct row_group *g = &r->groups[i];
    struct cpu_linear_job job = r->shape;
    job.w = g->w;
    job.x = r->words ? (const void *)(r->words + (size_t)r->first_row[i] * job.x_stride) : g->x;
    job.y = g->y;
    job.n_rows = g->n_rows;
    piece -= r->first_piece[i];
    uint32_t n_blocks = row_blocks(g->n_rows), row0 = piece % n_blocks * ROW_BLOCK, left = g->n_rows - row0;
    r->linear(&job, piece / n_blocks, row0, row0 + (left < ROW_BLOCK ? left : ROW_BLOCK));
}

struct round_run {
    const struct linear_run *r;
    const struct cpu_ops *ops;
    size_t x_stride; /* stride of the floats */
    uint32_t n_rows, rows_per_piece;
};

static void run_round(void *arg, uint32_t piece, uint32_t thread)
{
    (void)thread;
    const struct round_run *a = arg;
    uint32_t first = piece * a->rows_per_piece, left = a->n_rows - first;
    for (uint32_t row = first; row < first + (left < a->rows_per_piece ? left : a->rows_per_piece); row++) {
        uint32_t i = find_piece(a->r->first_row, a->r->n_groups, row);
        const struct row_group *g = &a->r->groups[i];
        a->ops->round_pairs(g->x + (row - a->r->first_row[i]) * a->x_stride, g->w->n_in,
                            a->r->words + (size_t)row * g->w->n_steps);
    }
}

/* Rounds activations once, instead of in every piece that reads them. */
static void round_rows(struct cpu_kernels *k, const struct linear_run *r, size_t x_stride, uint32_t n_rows,
                       uint32_t n_in)
{
    struct round_run a = {.r = r, .ops = k->ops, .x_stride = x_stride, .n_rows = n_rows};
    a.rows_per_piece = PIECE_NUMBERS / n_in + 1;
    pool_run(k->pool, run_round, &a, (n_rows + a.rows_per_piece - 1) / a.rows_per_piece);
}

static void linear(struct cpu_kernels *k, const struct row_group *groups, uint32_t n_groups, size_t x_stride,
                   size_t y_stride, bool accumulate)
{
    struct linear_run r = {.groups = groups, .n_groups = n_groups};
    uint32_t n_rows = 0;
    for (uint32_t i = 0; i < n_groups; i++)
        n_rows += groups[i].n_rows;
    if (!n_rows)
        return;
    const struct k_matrix *w = groups[0].w;
    bool rounds = w->compute == COMPUTE_BF16;
    size_t words = rounds ? (size_t)n_rows * w->n_steps : 0;
    uint32_t *memory = kernels_scratch(k, (words + 2 * n_groups + 2ul) * sizeof(uint32_t));
    r.words = rounds ? memory : NULL;
    r.first_piece = memory + words;
    r.first_row = r.first_piece + n_groups + 1;
    r.shape = (struct cpu_linear_job){
        .x_stride = rounds ? w->n_steps : x_stride, .y_stride = y_stride, .accumulate = accumulate};
    r.linear = rounds ? k->ops->linear_bf16 : k->ops->linear_f32;
    r.first_piece[0] = r.first_row[0] = 0;
    for (uint32_t i = 0; i < n_groups; i++) {
        assert(groups[i].w->n_in == w->n_in && groups[i].w->n_out == w->n_out && groups[i].w->compute == w->compute);
        r.first_piece[i + 1] = r.first_piece[i] + row_blocks(groups[i].n_rows) * w->n_panels;
        r.first_row[i + 1] = r.first_row[i] + groups[i].n_rows;
    }
    if (rounds)
        round_rows(k, &r, x_stride, n_rows, w->n_in);
    pool_run(k->pool, run_linear, &r, r.first_piece[n_groups]);
}

static void cpu_linear(struct kernels *k, const struct k_matrix *w, const float *x, uint32_t n_rows, float *y,
                       bool accumulate)
{
    linear(cpu_of(k), &(struct row_group){w, x, y, n_rows}, 1, w->n_in, w->n_out, accumulate);
}

static void cpu_linear_each(struct kernels *k, const struct k_stack *s, const struct k_each *e, uint32_t n_rows)
{
    for (uint32_t i = 0; i < s->n; i++)
        s->groups[i] = (struct row_group){s->matrices[i], e->x + i * e->x_step, e->y + i * e->y_step, n_rows};
    linear(cpu_of(k), s->groups, s->n, e->x_stride, e->y_stride, false);
}

static void cpu_linear_sorted(struct kernels *k, const struct k_stack *s, const uint32_t *first, uint32_t n_rows,
                              const float *x, float *y)
{
    const struct k_matrix *m = s->matrices[0];
    uint32_t n = 0;
    assert(first[s->n] == n_rows);
    for (uint32_t i = 0; i < s->n; i++)
        if (first[i + 1] > first[i])
            s->groups[n++] = (struct row_group){s->matrices[i], x + (size_t)first[i] * m->n_in,
                                                y + (size_t)first[i] * m->n_out, first[i + 1] - first[i]};
    linear(cpu_of(k), s->groups, n, m->n_in, m->n_out, false);
}

struct pack_run {
    const struct cpu_ops *ops;
    const struct k_matrix_part *parts;
    uint32_t n_parts;
    struct k_matrix *m;
    /* [n_threads][3][n_in]: a row as f32, as packed, and without its stride. */
    float *rows;
};

/* Writes n elements of a row to the places of output c in the panel. */
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

/* The same for a group of n codes and their scale. The panel's memory must be zero before. */
static void scatter_group(const struct k_matrix *m, uint8_t *group, uint32_t c, const uint8_t *codes, uint32_t n,
                          float scale)
{
    uint8_t *to = group + group_scales_bytes(m);
    if (m->weights == WEIGHTS_FP8)
        ((float *)(void *)group)[group_scale_slot(m, c)] = scale;
    else
        ((uint16_t *)(void *)group)[group_scale_slot(m, c)] = scalar_to_bf16(scale);
    for (uint32_t k = 0; k < n; k++) {
        uint32_t i = group_code_slot(m, k, c);
        if (m->weights == WEIGHTS_INT4)
            to[int4_byte(i)] |= (uint8_t)(codes[k] << int4_shift(i));
        else
            to[i] = codes[k];
    }
}

/*
 * One output of a part as stored, with its elements side by side and aligned for their type (tensors of a
 * file begin where its header ends, at any address). Returns the row itself, or a copy in memory.
 */
static const uint8_t *line_up(const struct k_matrix_part *part, uint32_t out, uint32_t n_in, uint8_t *memory)
{
    size_t element = num_type_bytes(part->type);
    const uint8_t *row = (const uint8_t *)part->data + out * (part->out_stride ? part->out_stride : n_in) * element;
    if (part->in_stride > 1)
        for (uint32_t i = 0; i < n_in; i++)
            memcpy(memory + i * element, row + i * part->in_stride * element, element);
    else if ((uintptr_t)row % element)
        memcpy(memory, row, n_in * element);
    else
        return row;
    return memory;
}

static void pack_output(const struct pack_run *r, uint32_t panel, uint32_t c, const struct k_matrix_part *part,
                        uint32_t out, float *memory)
{
    const struct k_matrix *m = r->m;
    float *wide = memory, *cast = wide + m->n_in;
    const uint8_t *row = line_up(part, out, m->n_in, (uint8_t *)(cast + m->n_in));
    bool is_kept = part_is_kept(part, m->weights, m->n_in);
    if (part->type == m->type && !m->weights) {
        scatter(m, panel, c, row);
        return;
    }
    r->ops->to_f32(row, part->type, m->n_in, wide);
    for (uint32_t i = 0; i < m->n_in && part->type == NUM_F8_E4M3; i++)
        wide[i] = part_number(part, out, i, wide[i]);
    if (!m->weights) {
        r->ops->from_f32(wide, m->type, m->n_in, cast);
        scatter(m, panel, c, cast);
        return;
    }
    for (uint32_t i = 0; i < m->n_in; i += K_GROUP) {
        uint8_t codes[K_GROUP];
        uint32_t n = m->n_in - i < K_GROUP ? m->n_in - i : K_GROUP;
        float scale = part_pack_group(part, m->weights, out, i, n, wide + i, is_kept ? row + i : NULL, codes);
        scatter_group(m, matrix_group(m, panel, i / K_GROUP), c, codes, n, scale);
    }
}

static void run_pack(void *arg, uint32_t panel, uint32_t thread)
{
    const struct pack_run *r = arg;
    const struct k_matrix *m = r->m;
    for (uint32_t c = 0; c < PANEL && panel * PANEL + c < m->n_out; c++) {
        uint32_t out = panel * PANEL + c;
        const struct k_matrix_part *part = r->parts;
        for (; out >= part->n_out; part++)
            out -= part->n_out;
        pack_output(r, panel, c, part, out, r->rows + (size_t)thread * 3 * m->n_in);
    }
}

static struct k_matrix *matrix_new(const struct matrix_shape *shape)
{
    struct k_matrix *m = mem_zalloc(sizeof(*m));
    *m = (struct k_matrix){.compute = shape->compute,
                           .weights = shape->weights,
                           .type = shape->type,
                           .n_out = shape->n_out,
                           .n_in = shape->n_in};
    return m;
}

static enum td_status matrix_measure(struct k_matrix *m)
{
    m->n_panels = (m->n_out + PANEL - 1) / PANEL;
    m->n_steps = m->compute == COMPUTE_BF16 ? (m->n_in + 1) / 2 : m->n_in;
    m->step_bytes = PANEL * (m->compute == COMPUTE_BF16 ? 4 : num_type_bytes(m->type));
    m->n_groups = (m->n_in + K_GROUP - 1) / K_GROUP;
    m->group_bytes = group_scales_bytes(m) + K_GROUP * PANEL * packed_bits(m->weights) / 8;
    size_t units = (size_t)m->n_panels * (m->weights ? m->n_groups : m->n_steps);
    if (__builtin_mul_overflow(units, m->weights ? m->group_bytes : m->step_bytes, &m->bytes))
        return TD_ERR_NO_MEMORY;
    return TD_OK;
}

static float *pack_bias(const struct k_matrix_part *parts, uint32_t n_parts, uint32_t n_out)
{
    bool any = false;
    for (uint32_t i = 0; i < n_parts; i++)
        any |= parts[i].bias != NULL;
    float *bias = any ? mem_array(n_out, sizeof(*bias)) : NULL, *at = bias;
    for (uint32_t i = 0; i < n_parts && any; at += parts[i++].n_out)
        for (uint32_t c = 0; c < parts[i].n_out && parts[i].bias; c++) {
            size_t from = (size_t)c * (parts[i].bias_stride ? parts[i].bias_stride : 1);
            at[c] = scalar_from(parts[i].bias, (uint32_t)num_type_bytes(parts[i].bias_type),
                                parts[i].bias_type == NUM_BF16, from);
        }
    return bias;
}

static enum td_status cpu_matrix_pack(struct kernels *head, const struct k_matrix_part *parts, uint32_t n_parts,
                                      const struct matrix_shape *shape, struct k_matrix **out)
{
    struct k_matrix *m = matrix_new(shape);
    void *data = NULL;
    enum td_status s = matrix_measure(m);
    if (!s)
        s = mem_map(m->bytes, &data);
    if (s) {
        free(m);
        return s;
    }
    m->data = data;
    struct cpu_kernels *k = cpu_of(head);
    struct pack_run r = {.ops = k->ops, .parts = parts, .n_parts = n_parts, .m = m};
    r.rows = kernels_scratch(k, (size_t)pool_n_threads(k->pool) * 3 * m->n_in * sizeof(float));
    pool_run(k->pool, run_pack, &r, m->n_panels);
    m->bias = pack_bias(parts, n_parts, m->n_out);
    *out = m;
    return TD_OK;
}

static void cpu_matrix_free(struct kernels *k, struct k_matrix *m)
{
    (void)k;
    if (!m)
        return;
    if (!m->is_borrowed)
        mem_unmap(m->data, m->bytes);
    free(m->bias);
    free(m);
}

static const void *cpu_matrix_data(const struct k_matrix *m)
{
    return m->data;
}

static void borrow(struct k_matrix *m, const void *data)
{
    m->data = (uint8_t *)(uintptr_t)data; /* the cast is safe: only packing writes */
    m->is_borrowed = true;
}

static enum td_status cpu_matrix_view(struct kernels *k, const struct k_matrix_part *parts, uint32_t n_parts,
                                      const struct matrix_shape *shape, const void *data, uint64_t len_bytes,
                                      struct k_matrix **out)
{
    (void)k;
    struct k_matrix *m = matrix_new(shape);
    enum td_status s = matrix_measure(m);
    if (!s && m->bytes != len_bytes)
        s = TD_ERR_INVALID;
    if (s) {
        free(m);
        return s;
    }
    borrow(m, data);
    m->bias = pack_bias(parts, n_parts, m->n_out);
    *out = m;
    return TD_OK;
}

static void cpu_matrix_move(struct k_matrix *m, const void *data)
{
    assert(!m->is_borrowed);
    mem_unmap(m->data, m->bytes);
    borrow(m, data);
}

static uint64_t cpu_matrix_bytes(const struct k_matrix *m)
{
    return m->bytes;
}

static enum td_status cpu_stack_open(struct kernels *k, struct k_matrix *const *matrices, uint32_t n,
                                     struct k_stack **out)
{
    (void)k;
    struct k_stack *s = mem_zalloc(sizeof(*s));
    s->n = n;
    s->matrices = mem_dup(matrices, n * sizeof(struct k_matrix *));
    s->groups = mem_array(n, sizeof(*s->groups));
    *out = s;
    return TD_OK;
}

static void cpu_stack_close(struct kernels *k, struct k_stack *s)
{
    for (uint32_t i = 0; s && i < s->n; i++)
        cpu_matrix_free(k, s->matrices[i]);
    if (s) {
        free(s->matrices);
        free(s->groups);
    }
    free(s);
}

static uint64_t cpu_stack_bytes(const struct k_stack *s)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < s->n; i++)
        bytes += s->matrices[i]->bytes;
    return bytes;
}

/* --------------------------------------------------------------- attention */

struct attn_run {
    const struct cpu_ops *ops;
    const struct k_attn *a;
    uint32_t rows_per_tile;
    uint32_t *first_piece; /* [n_seqs + 1] */
    uint8_t *scratch;
    size_t scratch_bytes; /* bytes for one thread */
};

/* Finds the sequence of a piece; returns the number of the piece within the sequence. */
static uint32_t find_seq(const struct attn_run *r, uint32_t piece, const struct k_attn_seq **seq_out)
{
    uint32_t i = find_piece(r->first_piece, r->a->n_seqs, piece);
    *seq_out = &r->a->seqs[i];
    return piece - r->first_piece[i];
}

/* Counts the pieces of each sequence: one for each tile of rows and each kv head; kv heads vary fastest. */
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
    const float *from = (which ? a->v : a->k) + ((size_t)s->first_row + i) * a->kv_stride;
    for (uint32_t h = 0; h < a->n_kv_heads; h++)
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
        for (uint32_t which = 0; which < kv_layout_planes(r->a->layout); which++)
            store_row(r->a, r->ops, s, row0 + i, which);
    }
}

static void cpu_put_seqs(struct kernels *k, const struct k_attn_seq *seqs, uint32_t n_seqs, uint32_t page_tokens)
{
    (void)k, (void)seqs, (void)n_seqs, (void)page_tokens;
}

static void cpu_kv_store(struct kernels *head, const struct k_attn *a)
{
    struct cpu_kernels *k = cpu_of(head);
    uint32_t numbers = kv_layout_planes(a->layout) * a->n_kv_heads * a->layout->head_dim;
    struct attn_run r = {.ops = k->ops, .a = a, .rows_per_tile = PIECE_NUMBERS / numbers + 1};
    r.first_piece = kernels_scratch(k, (a->n_seqs + 1ul) * sizeof(uint32_t));
    pool_run(k->pool, run_store, &r, cut_seqs(&r, 1));
}

static void run_attention(void *arg, uint32_t piece, uint32_t thread)
{
    const struct attn_run *r = arg;
    const struct k_attn_seq *s = NULL;
    uint32_t n_kv_heads = r->a->n_kv_heads, i = find_seq(r, piece, &s);
    struct attn_tile t = {.a = r->a, .seq = s, .kv_head = i % n_kv_heads, .row0 = i / n_kv_heads * r->rows_per_tile};
    uint32_t left = s->n_rows - t.row0;
    t.n_rows = left < r->rows_per_tile ? left : r->rows_per_tile;
    t.scratch = (float *)(void *)(r->scratch + thread * r->scratch_bytes);
    r->ops->attend(&t);
}

static void cpu_attention(struct kernels *head, const struct k_attn *a)
{
    struct cpu_kernels *k = cpu_of(head);
    uint32_t group = a->n_heads / a->n_kv_heads, rows = QUERY_TILE / group;
    struct attn_run r = {.ops = k->ops, .a = a, .rows_per_tile = rows ? rows : 1};
    size_t floats = attn_scratch_floats(a->layout->head_dim, r.rows_per_tile * group);
    r.scratch_bytes = (floats * sizeof(float) + 63) / 64 * 64;
    size_t tiles_bytes = r.scratch_bytes * pool_n_threads(k->pool);
    r.scratch = kernels_scratch(k, tiles_bytes + (a->n_seqs + 1ul) * sizeof(uint32_t));
    r.first_piece = (uint32_t *)(void *)(r.scratch + tiles_bytes);
    pool_run(k->pool, run_attention, &r, cut_seqs(&r, a->n_kv_heads));
}

/* -------------------------------------------------------------------- ranks */

/* Nothing to do: operations are done when they return, and all ranks share memory. */
static void cpu_offer(struct kernels *k, uint32_t turn)
{
    (void)k, (void)turn;
}

static void cpu_follow(struct kernels *k, struct kernels *peer, uint32_t turn)
{
    (void)k, (void)peer, (void)turn;
}

static const float *cpu_reach(struct kernels *k, struct kernels *peer, const float *from, size_t len_bytes)
{
    (void)k, (void)peer, (void)len_bytes;
    return from;
}

static struct k_links *cpu_links_open(struct kernels *const *ranks, uint32_t n)
{
    (void)ranks, (void)n;
    return NULL;
}

/* -------------------------------------------------------------------- open */

static const struct kernels_backend CPU = {
    .isa_name = cpu_isa_name,
    .n_threads = cpu_n_threads,
    .close = cpu_close,
    .memory = cpu_memory,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .map = cpu_map,
    .is_pinned = cpu_is_pinned,
    .unmap = cpu_unmap,
    .put = cpu_put,
    .step = cpu_nothing,
    .write = cpu_write,
    .read = cpu_read,
    .finish = cpu_nothing,
    .replay_rows = cpu_replay_rows,
    .replay = cpu_replay,
    .replay_end = cpu_nothing,
    .read_aside = cpu_read_aside,
    .mark = cpu_mark,
    .passed = cpu_passed,
    .wait = cpu_wait,
    .write_aside = cpu_write,
    .write_mark = cpu_write_mark,
    .written = cpu_written,
    .write_wait = cpu_write_wait,
    .matrix_pack = cpu_matrix_pack,
    .matrix_free = cpu_matrix_free,
    .matrix_bytes = cpu_matrix_bytes,
    .matrix_data = cpu_matrix_data,
    .matrix_view = cpu_matrix_view,
    .matrix_move = cpu_matrix_move,
    .stack_open = cpu_stack_open,
    .stack_close = cpu_stack_close,
    .stack_bytes = cpu_stack_bytes,
    .linear = cpu_linear,
    .linear_each = cpu_linear_each,
    .linear_sorted = cpu_linear_sorted,
    .take_rows = cpu_take_rows,
    .rmsnorm = cpu_rmsnorm,
    .head_norm = cpu_head_norm,
    .add = cpu_add,
    .copy_heads = cpu_copy_heads,
    .glu = cpu_glu,
    .softcap = cpu_softcap,
    .rope = cpu_rope,
    .route = cpu_route,
    .sort_slots = cpu_sort_slots,
    .combine = cpu_combine,
    .sample_rows = cpu_sample_rows,
    .offer = cpu_offer,
    .follow = cpu_follow,
    .reach = cpu_reach,
    .links_open = cpu_links_open,
    .put_seqs = cpu_put_seqs,
    .kv_store = cpu_kv_store,
    .attention = cpu_attention,
    .run_limit = cpu_run_limit,
};

uint32_t cpu_threads(const struct kernels_config *config)
{
    return config->n_threads ? config->n_threads : cpus_allowed();
}

enum td_status cpu_open(const struct kernels_config *config, struct kernels **out, struct td_error *error_out)
{
    uint32_t n_threads = cpu_threads(config);
    if (config->n_threads > K_MAX_THREADS)
        return td_fail(error_out, TD_ERR_INVALID, "kernels.n_threads: %u is not in 0..%d", n_threads, K_MAX_THREADS);
    if (config->isa > ISA_AVX512)
        return td_fail(error_out, TD_ERR_INVALID, "kernels.isa: %d is unknown", (int)config->isa);
    const struct cpu_ops *ops = cpu_ops_get(config->isa);
    if (!ops)
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "kernels.isa: this CPU has no %s",
                       config->isa == ISA_AVX2 ? "AVX2, FMA and F16C" : "AVX-512 F, BW, VL and DQ");
    struct cpu_kernels *k = mem_zalloc(sizeof(*k));
    k->head.backend = &CPU;
    k->ops = ops;
    k->pool = pool_open(n_threads < K_MAX_THREADS ? n_threads : K_MAX_THREADS);
    *out = &k->head;
    return TD_OK;
}

/* ----------------------------------------------------------------- numbers */

uint32_t k_argmax(const float *logits, uint32_t n)
{
    return cpu_argmax(cpu_ops_get(ISA_AUTO), logits, n);
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
