/*
 * Everything except the inner loops of k_linear, written once for both vector widths. The including file
 * defines VL (numbers in a vector), vf and the v_* functions. Each sum has the order that plain.c shows:
 * lanes of the sum are lanes of vectors.
 *
 * Attention shares a block of 32 keys among all queries of a tile. K is transposed once, so that a vector
 * holds the scores of neighbouring positions, and the 16 lanes of a dot product are 16 separate accumulators.
 * V is widened once.
 */
#pragma once

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/limits.inc.h"
#include "kernels/scalar.h"

enum { WIDE = LANES / VL, KEY_VECTORS = KEY_BLOCK / VL };

/* 16 lanes as one or two vectors. */
struct lanes {
    vf v[WIDE];
};

static inline float sum_lanes(struct lanes a)
{
    float x[LANES];
    for (int i = 0; i < WIDE; i++)
        v_store(x + i * VL, a.v[i]);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            x[i] = x[i] + x[i + half];
    return x[0];
}

static inline vf exp_vector(vf x)
{
    vf t = v_fma(x, v_set1(LOG2_E), v_set1(EXP_MAGIC)), n = v_sub(t, v_set1(EXP_MAGIC));
    vf r = v_fma(n, v_set1(-LN2_LO), v_fma(n, v_set1(-LN2_HI), x));
    vf p = v_fma(v_fma(v_fma(v_set1(EXP_C4), r, v_set1(EXP_C3)), r, v_set1(EXP_C2)), r, v_set1(EXP_C1));
    p = v_fma(v_fma(v_fma(p, r, v_set1(EXP_C0)), r, v_set1(1)), r, v_set1(1));
    return v_exp_ends(x, v_mul(p, v_exp_scale(t)));
}

/* --------------------------------------------------------------- conversions */

static void to_f32(const void *src, enum num_type type, uint64_t n, float *dst)
{
    const uint8_t *from = src;
    uint64_t i = 0;
    if (type == NUM_F32) {
        memmove(dst, src, n * 4);
        return;
    }
    if (type == NUM_BF16) {
        for (; i + 4 * VL <= n; i += 4 * VL)
            UNROLL for (int j = 0; j < 4; j++)
                v_store(dst + i + j * VL, v_from_bf16(from + 2 * (i + (uint64_t)j * VL)));
        for (; i + VL <= n; i += VL)
            v_store(dst + i, v_from_bf16(from + 2 * i));
    } else if (type == NUM_F8_E4M3)
        for (; i + VL <= n; i += VL)
            v_store(dst + i, v_from_e4m3(from + i));
    else
        for (; i + VL <= n; i += VL)
            v_store(dst + i, v_from_f16(from + 2 * i));
    for (; i < n; i++)
        dst[i] = scalar_from(src, (uint32_t)num_type_bytes(type), type == NUM_BF16, i);
}

static void from_f32(const float *src, enum num_type type, uint64_t n, void *dst)
{
    uint16_t *to = dst;
    uint64_t i = 0;
    if (type == NUM_F32) {
        memmove(dst, src, n * 4);
        return;
    }
    if (type == NUM_F8_E4M3) {
        for (; i < n; i++)
            ((uint8_t *)dst)[i] = scalar_to_e4m3(src[i]);
        return;
    }
    if (type == NUM_BF16)
        for (; i + VL <= n; i += VL)
            v_to_bf16(to + i, v_load(src + i));
    else
        for (; i + VL <= n; i += VL)
            v_to_f16(to + i, v_load(src + i));
    for (; i < n; i++)
        to[i] = type == NUM_BF16 ? scalar_to_bf16(src[i]) : scalar_to_f16(src[i]);
}

static void round_pairs(const float *x, uint32_t n_in, uint32_t *words_out)
{
    if (n_in % 2)
        words_out[n_in / 2] = scalar_to_bf16(x[n_in - 1]);
    from_f32(x, NUM_BF16, n_in / 2 * 2, words_out);
}

/* --------------------------------------------------------------- elementwise */

static void rmsnorm(const float *x, const float *w, float eps, uint32_t dim, float *y)
{
    struct lanes sum;
    for (int j = 0; j < WIDE; j++)
        sum.v[j] = v_set1(0);
    for (uint32_t i = 0; i < dim; i += LANES)
        for (int j = 0; j < WIDE; j++) {
            vf a = v_load_n(x + i + j * VL, (int)(dim - i) - j * VL);
            sum.v[j] = v_fma(a, a, sum.v[j]);
        }
    float r = 1.0f / __builtin_sqrtf(sum_lanes(sum) / (float)dim + eps);
    uint32_t i = 0;
    for (; i + VL <= dim; i += VL)
        v_store(y + i, v_mul(v_mul(v_load(x + i), v_set1(r)), v_load(w + i)));
    for (; i < dim; i++)
        y[i] = x[i] * r * w[i];
}

static inline vf swish_vector(vf g, vf z)
{
    return v_div(g, v_add(v_set1(1), exp_vector(v_negate(z))));
}

static inline vf softcap_vector(vf x, vf cap)
{
    vf e = exp_vector(v_mul(v_set1(2), v_div(x, cap)));
    return v_mul(cap, v_sub(v_set1(1), v_div(v_set1(2), v_add(e, v_set1(1)))));
}

static inline vf glu_vector(vf g, vf u, const struct k_glu *glu)
{
    if (glu->act == ACT_CLAMPED) {
        vf limit = v_set1(glu->limit);
        g = v_min(g, limit);
        u = v_max(v_min(u, limit), v_negate(limit));
        return v_mul(v_add(u, v_set1(1)), swish_vector(g, v_mul(v_set1(glu->alpha), g)));
    }
    if (glu->act == ACT_GELU_TANH)
        return v_mul(swish_vector(g, v_mul(g, v_fma(v_mul(g, g), v_set1(GELU_C1), v_set1(GELU_C0)))), u);
    return v_mul(swish_vector(g, g), u);
}

static void glu(const float *gate, const float *up, uint32_t dim, const struct k_glu *glu, float *out)
{
    uint32_t i = 0;
    for (; i + VL <= dim; i += VL)
        v_store(out + i, glu_vector(v_load(gate + i), v_load(up + i), glu));
    if (i < dim) {
        float rest[VL];
        v_store(rest, glu_vector(v_load_n(gate + i, (int)(dim - i)), v_load_n(up + i, (int)(dim - i)), glu));
        memcpy(out + i, rest, (dim - i) * sizeof(float));
    }
}

static void softcap(float *x, size_t n, float cap)
{
    size_t i = 0;
    for (; i + VL <= n; i += VL)
        v_store(x + i, softcap_vector(v_load(x + i), v_set1(cap)));
    for (; i < n; i++)
        x[i] = scalar_softcap(x[i], cap);
}

static void axpy(float a, const float *x, uint32_t n, float *y)
{
    uint32_t i = 0;
    for (; i + VL <= n; i += VL)
        v_store(y + i, v_fma(v_set1(a), v_load(x + i), v_load(y + i)));
    for (; i < n; i++)
        y[i] = scalar_fma(a, x[i], y[i]);
}

static float max(const float *x, uint32_t n)
{
    vf m[4];
    uint32_t i = 0;
    for (int j = 0; j < 4; j++)
        m[j] = v_set1(-__builtin_inff());
    for (; i + 4 * VL <= n; i += 4 * VL)
        for (int j = 0; j < 4; j++)
            m[j] = v_max(v_load(x + i + j * VL), m[j]);
    float parts[VL], best = -__builtin_inff();
    v_store(parts, v_max(v_max(m[0], m[1]), v_max(m[2], m[3])));
    for (int j = 0; j < VL; j++)
        best = scalar_max(parts[j], best);
    for (; i < n; i++)
        best = scalar_max(x[i], best);
    return best;
}

static float logsumexp(const float *x, uint32_t n)
{
    float m = max(x, n);
    if (m == __builtin_inff() || m == -__builtin_inff())
        return m;
    struct lanes sum;
    for (int j = 0; j < WIDE; j++)
        sum.v[j] = v_set1(0);
    for (uint32_t i = 0; i < n; i += LANES)
        for (int j = 0; j < WIDE; j++) {
            int left = (int)(n - i) - j * VL;
            vf p = exp_vector(v_sub(v_load_n(x + i + j * VL, left), v_set1(m)));
            sum.v[j] = v_add(sum.v[j], v_keep(p, left));
        }
    return scalar_log(sum_lanes(sum)) + m;
}

static uint64_t weigh_all(const float *x, uint32_t n, float top, float temperature, float *e_out)
{
    vw sum = vw_zero();
    uint32_t i = 0;
    for (; i + VL <= n; i += VL) {
        vf e = v_max(exp_vector(v_div(v_sub(v_load(x + i), v_set1(top)), v_set1(temperature))), v_set1(0));
        v_store(e_out + i, e);
        sum = vw_add_weights(sum, e);
    }
    uint64_t rest = 0;
    for (; i < n; i++)
        rest += scalar_weight(e_out[i] = scalar_likelihood(x[i], top, temperature));
    return vw_sum(sum) + rest;
}

static float exp_one(float x)
{
    return scalar_exp(x);
}

static float log_one(float x)
{
    return scalar_log(x);
}

static void multiply_f32(const struct cpu_tile *t, uint32_t rows)
{
    any_tile(t, rows, LINEAR_F32);
}

static void multiply_f16(const struct cpu_tile *t, uint32_t rows)
{
    any_tile(t, rows, LINEAR_F16);
}

static void multiply_bf16(const struct cpu_tile *t, uint32_t rows)
{
    any_tile(t, rows, LINEAR_BF16);
}

static void multiply_few(const struct few_job *f, uint32_t rows)
{
    any_few(f, rows, LINEAR_BF16);
}

static void linear_f32(const struct cpu_linear_job *job, uint32_t panel, uint32_t row0, uint32_t row1)
{
    static const struct linear_loops LOOPS[] = {
        [NUM_F32] = {multiply_f32, NULL}, [NUM_F16] = {multiply_f16, NULL}, [NUM_BF16] = {multiply_bf16, multiply_few}};
    _Alignas(64) float sums[ROW_BLOCK * PANEL];
    sum_panel(job, panel, row0, row1, sums, &LOOPS[job->w->type]);
    put_sums(job, panel, row0, row1, sums);
}

/* ----------------------------------------------------------------- attention */

/*
 * The working memory of a tile, in its scratch. Q is the number of queries; dim is padded with zeros to a
 * multiple of 16.
 */
struct attn_work {
    const struct attn_tile *t;
    uint32_t head_dim, dim, v_dim, group, n_queries;
    float *keys;                 /* [dim][KEY_BLOCK], transposed */
    float *values;               /* [KEY_BLOCK][dim], of which v_dim columns are used */
    float *q;                    /* [Q][dim] */
    float *acc;                  /* [Q][v_dim] */
    float *p;                    /* [Q][KEY_BLOCK]: scores, then weights */
    float *m, *l, *shrink;       /* [Q] */
    uint32_t *n_before, *n_seen; /* [Q]: the query sees keys n_before <= j < n_seen of the block */
};

static float *carve(float **at, size_t floats)
{
    float *p = *at;
    *at += (floats + LANES - 1) / LANES * LANES;
    return p;
}

static void work_open(struct attn_work *w, const struct attn_tile *t)
{
    const struct k_attn *a = t->a;
    w->t = t;
    w->head_dim = a->layout->head_dim;
    w->dim = attn_padded(w->head_dim);
    w->v_dim = attn_padded(a->v_dim);
    w->group = a->n_heads / a->n_kv_heads;
    w->n_queries = t->n_rows * w->group;
    float *at = t->scratch;
    w->keys = carve(&at, (size_t)w->dim * KEY_BLOCK);
    w->values = carve(&at, (size_t)w->dim * KEY_BLOCK);
    w->q = carve(&at, (size_t)w->n_queries * w->dim);
    w->acc = carve(&at, (size_t)w->n_queries * w->v_dim);
    w->p = carve(&at, (size_t)w->n_queries * KEY_BLOCK);
    w->m = carve(&at, w->n_queries);
    w->l = carve(&at, w->n_queries);
    w->shrink = carve(&at, w->n_queries);
    w->n_before = (uint32_t *)(void *)carve(&at, w->n_queries);
    w->n_seen = (uint32_t *)(void *)carve(&at, w->n_queries);
    memset(w->acc, 0, (size_t)w->n_queries * w->v_dim * sizeof(float));
    for (uint32_t i = 0; i < w->n_queries; i++) {
        size_t row = t->seq->first_row + t->row0 + i / w->group;
        uint32_t head = t->kv_head * w->group + i % w->group;
        memcpy(w->q + (size_t)i * w->dim, a->q + row * a->q_stride + head * w->head_dim, w->head_dim * sizeof(float));
        w->m[i] = a->sinks ? a->sinks[head] : -__builtin_inff();
        w->l[i] = a->sinks ? 1 : 0;
    }
}

/* Address of a position's K or V, and how many of the next n follow directly behind it in the same page. */
static inline const uint8_t *run_at(const struct attn_work *w, uint32_t which, uint32_t pos, uint32_t n,
                                    uint32_t *run_out)
{
    const struct k_attn *a = w->t->a;
    uint32_t page_tokens = a->layout->page_tokens, left = page_tokens - pos % page_tokens;
    *run_out = left < n ? left : n;
    return attn_kv_at(a, w->t->seq, which, w->t->kv_head, pos);
}

/*
 * Widens K or V of positions block + skip .. block + n - 1 to [KEY_BLOCK][dim]; the other rows become zero.
 */
static void load_rows(const struct attn_work *w, uint32_t which, uint32_t block, uint32_t skip, uint32_t n, float *to)
{
    enum num_type type = w->t->a->layout->dtype;
    uint32_t run = 0, whole = w->head_dim == w->dim;
    if (!whole || skip || n < KEY_BLOCK)
        memset(to, 0, (size_t)KEY_BLOCK * w->dim * sizeof(float));
    for (uint32_t j = skip; j < n; j += run) {
        const uint8_t *from = run_at(w, which, block + j, n - j, &run);
        if (whole)
            to_f32(from, type, (uint64_t)run * w->dim, to + (size_t)j * w->dim);
        else
            for (uint32_t i = 0; i < run; i++)
                to_f32(from + (size_t)i * w->head_dim * num_type_bytes(type), type, w->head_dim,
                       to + (size_t)(j + i) * w->dim);
    }
}

/* A head's part of a page is only some kilobytes, too short for the processor's own prefetching. */
static void prefetch_rows(const struct attn_work *w, uint32_t which, uint32_t first, uint32_t n)
{
    size_t row_bytes = w->head_dim * num_type_bytes(w->t->a->layout->dtype);
    for (uint32_t j = 0, run = 0; j < n; j += run) {
        const uint8_t *from = run_at(w, which, first + j, n - j, &run);
        for (size_t i = 0; i < run * row_bytes; i += 64)
            __builtin_prefetch(from + i);
    }
}

static void load_block(const struct attn_work *w, uint32_t block, uint32_t skip, uint32_t n)
{
    load_rows(w, 0, block, skip, n, w->values);
    for (uint32_t j = 0; j < KEY_BLOCK; j += VL)
        for (uint32_t d = 0; d < w->dim; d += VL)
            v_transpose(w->values + (size_t)j * w->dim + d, w->dim, w->keys + (size_t)d * KEY_BLOCK + j, KEY_BLOCK);
    if (w->t->a->layout->kind == KV_PLAIN)
        load_rows(w, 1, block, skip, n, w->values);
}

struct scores {
    vf v[SCORE_ROWS][2];
};

static inline __attribute__((always_inline)) struct scores add_scores(struct scores a, struct scores b, int rows)
{
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < 2; c++) a.v[r][c] = v_add(a.v[r][c], b.v[r][c]);
    return a;
}

/* Lane i of the dot products of some queries with 2 vectors of keys. */
static inline __attribute__((always_inline)) struct scores lane(const struct attn_work *w, const float *q,
                                                                const float *keys, uint32_t i, int rows)
{
    struct scores s;
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < 2; c++) s.v[r][c] = v_set1(0);
    for (uint32_t d = i; d < w->head_dim; d += LANES) {
        vf k0 = v_load(keys + d * KEY_BLOCK), k1 = v_load(keys + d * KEY_BLOCK + VL);
        UNROLL for (int r = 0; r < rows; r++)
        {
            vf x = v_broadcast(q + r * w->dim + d);
            s.v[r][0] = v_fma(x, k0, s.v[r][0]);
            s.v[r][1] = v_fma(x, k1, s.v[r][1]);
        }
    }
    return s;
}

/* Sums lanes i, i + 8, i + 4 and i + 12, in the order of the tree. */
static inline __attribute__((always_inline)) struct scores four_lanes(const struct attn_work *w, const float *q,
                                                                      const float *keys, uint32_t i, int rows)
{
    struct scores a = add_scores(lane(w, q, keys, i, rows), lane(w, q, keys, i + 8, rows), rows);
    struct scores b = add_scores(lane(w, q, keys, i + 4, rows), lane(w, q, keys, i + 12, rows), rows);
    return add_scores(a, b, rows);
}

static inline __attribute__((always_inline)) void score_rows(const struct attn_work *w, uint32_t query, int rows)
{
    const float *q = w->q + (size_t)query * w->dim;
    for (int c = 0; c < KEY_BLOCK; c += 2 * VL) {
        const float *keys = w->keys + c;
        struct scores even = add_scores(four_lanes(w, q, keys, 0, rows), four_lanes(w, q, keys, 2, rows), rows);
        struct scores odd = add_scores(four_lanes(w, q, keys, 1, rows), four_lanes(w, q, keys, 3, rows), rows);
        struct scores s = add_scores(even, odd, rows);
        UNROLL for (int r = 0; r < rows; r++)
        {
            v_store(w->p + (query + r) * KEY_BLOCK + c, s.v[r][0]);
            v_store(w->p + (query + r) * KEY_BLOCK + c + VL, s.v[r][1]);
        }
    }
}

/* Turns a query's scores into weights, and updates its maximum and its sum. */
static inline void soften(const struct attn_work *w, uint32_t query)
{
    const struct k_attn *a = w->t->a;
    float *p = w->p + (size_t)query * KEY_BLOCK;
    int n = (int)w->n_seen[query], before = (int)w->n_before[query];
    vf s[KEY_VECTORS], top = v_set1(-__builtin_inff());
    for (int i = 0; i < KEY_VECTORS; i++) {
        s[i] = v_mul(v_load(p + i * VL), v_set1(a->scale));
        if (a->cap > 0)
            s[i] = softcap_vector(s[i], v_set1(a->cap));
        s[i] = v_keep_or(s[i], n - i * VL, -__builtin_inff());
        s[i] = v_drop_or(s[i], before - i * VL, -__builtin_inff());
        top = v_max(s[i], top);
    }
    float m = w->m[query], m_new = scalar_max(v_max_lanes(top), m);
    struct lanes sum;
    for (int i = 0; i < KEY_VECTORS; i++) {
        s[i] = v_drop_or(v_keep(exp_vector(v_sub(s[i], v_set1(m_new))), n - i * VL), before - i * VL, 0);
        v_store(p + i * VL, s[i]);
    }
    for (int i = 0; i < WIDE; i++)
        sum.v[i] = v_add(s[i], s[i + WIDE]);
    w->shrink[query] = scalar_exp(m - m_new);
    w->l[query] = scalar_fma(w->l[query], w->shrink[query], v_sum_lanes(sum.v));
    w->m[query] = m_new;
}

/* Adds the first n weighted values to the sums of some queries, `vectors` vectors from column d on. */
static inline __attribute__((always_inline)) void weigh(const struct attn_work *w, uint32_t query, int rows, uint32_t d,
                                                        int vectors, uint32_t n)
{
    vf acc[VALUE_ROWS][VALUE_VECTORS];
    float *sums = w->acc + (size_t)query * w->v_dim + d;
    const float *v = w->values + d, *p = w->p + (size_t)query * KEY_BLOCK;
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < vectors; c++) acc[r][c] =
        v_mul(v_load(sums + r * w->v_dim + c * VL), v_set1(w->shrink[query + r]));
    for (uint32_t j = 0; j < n; j++, v += w->dim) {
        vf x[VALUE_VECTORS];
        UNROLL for (int c = 0; c < vectors; c++) x[c] = v_load(v + c * VL);
        UNROLL for (int r = 0; r < rows; r++)
        {
            vf weight = v_broadcast(p + r * KEY_BLOCK + j);
            UNROLL for (int c = 0; c < vectors; c++) acc[r][c] = v_fma(weight, x[c], acc[r][c]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < vectors; c++)
        v_store(sums + r * w->v_dim + c * VL, acc[r][c]);
}

static inline __attribute__((always_inline)) void weigh_rows(const struct attn_work *w, uint32_t query, int rows,
                                                             uint32_t n)
{
    uint32_t d = 0;
    for (; d + VALUE_VECTORS * VL <= w->v_dim; d += VALUE_VECTORS * VL)
        weigh(w, query, rows, d, VALUE_VECTORS, n);
    for (; d < w->v_dim; d += VL)
        weigh(w, query, rows, d, 1, n);
}

/*
 * Queries first .. last - 1, in runs that see the same number of keys. Keys before a query's window have
 * weight 0.
 */
static void weigh_block(const struct attn_work *w, uint32_t first, uint32_t last)
{
    uint32_t rows = 0;
    for (uint32_t i = first; i < last; i += rows) {
        uint32_t n = w->n_seen[i];
        for (rows = 1; rows < VALUE_ROWS && i + rows < last && w->n_seen[i + rows] == n;)
            rows++;
        rows = rows >= VALUE_ROWS ? VALUE_ROWS : rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
        if (rows == VALUE_ROWS)
            weigh_rows(w, i, VALUE_ROWS, n);
        else if (rows == 4)
            weigh_rows(w, i, 4, n);
        else if (rows == 2)
            weigh_rows(w, i, 2, n);
        else
            weigh_rows(w, i, 1, n);
    }
}

static void score_block(const struct attn_work *w, uint32_t first, uint32_t last)
{
    uint32_t i = first;
    for (; i + SCORE_ROWS <= last; i += SCORE_ROWS)
        score_rows(w, i, SCORE_ROWS);
    for (; i + 2 <= last; i += 2)
        score_rows(w, i, 2);
    for (; i < last; i++)
        score_rows(w, i, 1);
}

/*
 * The queries of the tile that see keys of the block. Earlier rows do not reach it, later rows have it before
 * their window.
 */
static void seen_by(const struct attn_work *w, uint32_t pos0, uint32_t block, uint32_t *first_out, uint32_t *last_out)
{
    uint32_t window = w->t->a->window, end = block + KEY_BLOCK;
    *first_out = block > pos0 ? (block - pos0) * w->group : 0;
    *last_out = w->n_queries;
    if (window && end + window - 1 < pos0 + w->t->n_rows)
        *last_out = (end + window - 1 - pos0) * w->group;
}

static void attend_block(struct attn_work *w, uint32_t pos0, uint32_t block)
{
    const struct k_attn *a = w->t->a;
    uint32_t first = 0, last = 0;
    seen_by(w, pos0, block, &first, &last);
    score_block(w, first, last);
    for (uint32_t i = first; i < last; i++) {
        uint32_t pos = pos0 + i / w->group, seen = pos + 1 - block, first_key = attn_first_key(a, pos);
        w->n_seen[i] = seen < KEY_BLOCK ? seen : KEY_BLOCK;
        w->n_before[i] = first_key > block ? first_key - block : 0;
        soften(w, i);
    }
    weigh_block(w, first, last);
}

static void attend(const struct attn_tile *t)
{
    struct attn_work w;
    work_open(&w, t);
    const struct k_attn *a = t->a;
    uint32_t pos0 = t->seq->first_pos + t->row0, n_keys = pos0 + t->n_rows, first_key = attn_first_key(a, pos0);
    for (uint32_t block = first_key / KEY_BLOCK * KEY_BLOCK; block < n_keys; block += KEY_BLOCK) {
        uint32_t skip = first_key > block ? first_key - block : 0;
        load_block(&w, block, skip, n_keys - block < KEY_BLOCK ? n_keys - block : KEY_BLOCK);
        if (n_keys - block >= 2 * KEY_BLOCK)
            for (uint32_t which = 0; which < kv_layout_planes(a->layout); which++)
                prefetch_rows(&w, which, block + KEY_BLOCK, KEY_BLOCK);
        attend_block(&w, pos0, block);
    }
    for (uint32_t i = 0; i < w.n_queries; i++) {
        size_t row = t->seq->first_row + t->row0 + i / w.group, head = t->kv_head * w.group + i % w.group;
        float *out = a->out + (row * a->n_heads + head) * a->v_dim, inverse = 1.0f / w.l[i];
        for (uint32_t d = 0; d < a->v_dim; d++)
            out[d] = w.acc[(size_t)i * w.v_dim + d] * inverse;
    }
}

static double peak_f32(void)
{
    return peak(LINEAR_F32);
}

#define SIMD_OPS                                                                                                       \
    .round_pairs = round_pairs, .rmsnorm = rmsnorm, .glu = glu, .softcap = softcap, .axpy = axpy, .attend = attend,    \
    .to_f32 = to_f32, .from_f32 = from_f32, .max = max, .logsumexp = logsumexp, .weigh = weigh_all, .exp = exp_one,    \
    .log = log_one, .peak_f32 = peak_f32, .read_stream = read_stream
