/*
 * The specification: every operation in the most obvious way. A fast version is right if it gives the same bits.
 *
 * Nothing here is tuned, on purpose; it also serves a CPU without AVX2.
 */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/scalar.h"

static float load(const void *src, enum num_type type, uint64_t i)
{
    return scalar_from(src, (uint32_t)num_type_bytes(type), type == NUM_BF16, i);
}

/* Lane i of 16 takes elements i, i+16, ...; then halves are added onto each other until one is left. */
static float tree(float lanes[LANES])
{
    for (uint32_t half = LANES / 2; half; half /= 2)
        for (uint32_t i = 0; i < half; i++)
            lanes[i] = lanes[i] + lanes[i + half];
    return lanes[0];
}

static float dot(const float *a, const void *b, enum num_type type, uint32_t n)
{
    float lanes[LANES] = {0};
    for (uint32_t i = 0; i < n; i++)
        lanes[i % LANES] = scalar_fma(a[i], load(b, type, i), lanes[i % LANES]);
    return tree(lanes);
}

static void put(const struct linear_job *job, uint32_t row, uint32_t out, float sum)
{
    float *y = job->y + (size_t)row * job->w->n_out + out;
    *y = job->accumulate ? *y + sum : sum;
}

static uint32_t panel_outputs(const struct k_matrix *m, uint32_t panel)
{
    uint32_t left = m->n_out - panel * PANEL;
    return left < PANEL ? left : PANEL;
}

static void linear_f32(const struct linear_job *job, uint32_t panel, uint32_t row0, uint32_t row1)
{
    const struct k_matrix *m = job->w;
    for (uint32_t row = row0; row < row1; row++) {
        const float *x = (const float *)job->x + (size_t)row * m->n_in;
        for (uint32_t c = 0; c < panel_outputs(m, panel); c++) {
            float acc = 0;
            for (uint32_t k = 0; k < m->n_in; k++)
                acc = scalar_fma(load(matrix_step(m, panel, k), m->type, panel_slot(m, c)), x[k], acc);
            put(job, row, panel * PANEL + c, acc);
        }
    }
}

static void linear_bf16(const struct linear_job *job, uint32_t panel, uint32_t row0, uint32_t row1)
{
    const struct k_matrix *m = job->w;
    for (uint32_t row = row0; row < row1; row++) {
        const uint32_t *x = (const uint32_t *)job->x + (size_t)row * m->n_steps;
        for (uint32_t c = 0; c < panel_outputs(m, panel); c++) {
            float acc = 0;
            for (uint32_t step = 0; step < m->n_steps; step++)
                acc = scalar_dp(((const uint32_t *)matrix_step(m, panel, step))[c], x[step], acc);
            put(job, row, panel * PANEL + c, acc);
        }
    }
}

static void round_pairs(const float *x, uint32_t n_in, uint32_t *words_out)
{
    for (uint32_t i = 0; i < n_in; i += 2) {
        uint32_t odd = i + 1 < n_in ? scalar_to_bf16(x[i + 1]) : 0;
        words_out[i / 2] = scalar_to_bf16(x[i]) | odd << 16;
    }
}

static void rmsnorm(const float *x, const float *w, float eps, uint32_t dim, float *y)
{
    float r = 1.0f / __builtin_sqrtf(dot(x, x, NUM_F32, dim) / (float)dim + eps);
    for (uint32_t i = 0; i < dim; i++)
        y[i] = x[i] * r * w[i];
}

static void silu_mul(const float *gate, const float *up, uint32_t dim, float *out)
{
    for (uint32_t i = 0; i < dim; i++)
        out[i] = gate[i] / (1.0f + scalar_exp(-gate[i])) * up[i];
}

static float max(const float *x, uint32_t n)
{
    float m = -__builtin_inff();
    for (uint32_t i = 0; i < n; i++)
        m = scalar_max(x[i], m);
    return m;
}

static float sum_exp(const float *x, float m, uint32_t n, float *p_out)
{
    float lanes[LANES] = {0};
    for (uint32_t i = 0; i < n; i++) {
        float p = scalar_exp(x[i] - m);
        lanes[i % LANES] = lanes[i % LANES] + p;
        if (p_out)
            p_out[i] = p;
    }
    return tree(lanes);
}

static float logsumexp(const float *x, uint32_t n)
{
    float m = max(x, n);
    if (m == __builtin_inff() || m == -__builtin_inff())
        return m;
    return scalar_log(sum_exp(x, m, n, NULL)) + m;
}

/* One query against positions 0..pos, in blocks of 32. */
static void attend_query(const struct attn_tile *t, const float *q, uint32_t pos, float *out)
{
    enum num_type type = t->a->layout->dtype;
    uint32_t dim = t->a->layout->head_dim;
    float m = -__builtin_inff(), l = 0, s[KEY_BLOCK], p[KEY_BLOCK];
    memset(out, 0, dim * sizeof(float));
    for (uint32_t first = 0; first <= pos; first += KEY_BLOCK) {
        uint32_t n = pos + 1 - first < KEY_BLOCK ? pos + 1 - first : KEY_BLOCK;
        for (uint32_t j = 0; j < n; j++)
            s[j] = dot(q, attn_kv_at(t->a, t->seq, 0, t->kv_head, first + j), type, dim) * t->a->scale;
        float m_new = scalar_max(max(s, n), m), shrink = scalar_exp(m - m_new);
        l = scalar_fma(l, shrink, sum_exp(s, m_new, n, p));
        m = m_new;
        for (uint32_t d = 0; d < dim; d++)
            out[d] = out[d] * shrink;
        for (uint32_t j = 0; j < n; j++) {
            const uint8_t *v = attn_kv_at(t->a, t->seq, 1, t->kv_head, first + j);
            for (uint32_t d = 0; d < dim; d++)
                out[d] = scalar_fma(p[j], load(v, type, d), out[d]);
        }
    }
    for (uint32_t d = 0; d < dim; d++)
        out[d] = out[d] * (1.0f / l);
}

static void attend(const struct attn_tile *t)
{
    const struct k_attn *a = t->a;
    uint32_t group = a->n_heads / a->layout->n_kv_heads, dim = a->layout->head_dim;
    for (uint32_t i = t->row0; i < t->row0 + t->n_rows; i++) {
        size_t row = t->seq->first_row + i;
        for (uint32_t h = t->kv_head * group; h < (t->kv_head + 1) * group; h++)
            attend_query(t, a->qkv + row * a->row_stride + h * dim, t->seq->first_pos + i,
                         a->out + (row * a->n_heads + h) * dim);
    }
}

static void to_f32(const void *src, enum num_type type, uint64_t n, float *dst)
{
    for (uint64_t i = 0; i < n; i++)
        dst[i] = load(src, type, i);
}

static void from_f32(const float *src, enum num_type type, uint64_t n, void *dst)
{
    if (type == NUM_F32) {
        memmove(dst, src, n * 4);
        return;
    }
    for (uint64_t i = 0; i < n; i++)
        ((uint16_t *)dst)[i] = type == NUM_BF16 ? scalar_to_bf16(src[i]) : scalar_to_f16(src[i]);
}

static float exp_one(float x)
{
    return scalar_exp(x);
}

static float log_one(float x)
{
    return scalar_log(x);
}

const struct cpu_ops cpu_plain = {.name = "plain",
                                  .linear_f32 = linear_f32,
                                  .linear_bf16 = linear_bf16,
                                  .round_pairs = round_pairs,
                                  .rmsnorm = rmsnorm,
                                  .silu_mul = silu_mul,
                                  .attend = attend,
                                  .to_f32 = to_f32,
                                  .from_f32 = from_f32,
                                  .max = max,
                                  .logsumexp = logsumexp,
                                  .exp = exp_one,
                                  .log = log_one};
