/*
 * The specification: every operation in the most obvious way. A fast version is correct if it gives the same
 * bits.
 *
 * Nothing here is tuned, on purpose; it also serves CPUs without AVX2.
 */
#include "kernels/cpu/cpu.h"
#include "kernels/scalar.h"

static float load(const void *src, enum num_type type, uint64_t i)
{
    return scalar_from(src, (uint32_t)num_type_bytes(type), type == NUM_BF16, i);
}

/*
 * Lane i of 16 takes elements i, i + 16, ...; then halves are added onto each other until one number is left.
 */
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

static void put(const struct cpu_linear_job *job, uint32_t row, uint32_t out, float sum)
{
    float *y = job->y + (size_t)row * job->y_stride + out;
    if (job->w->bias)
        sum = sum + job->w->bias[out];
    *y = job->accumulate ? *y + sum : sum;
}

static uint16_t packed_at(const struct k_matrix *m, uint32_t panel, uint32_t k, uint32_t c)
{
    const uint8_t *group = matrix_group(m, panel, k / K_GROUP), *codes = group + group_scales_bytes(m);
    uint32_t i = group_code_slot(m, k % K_GROUP, c);
    bool wide = packed_scale_bytes(m->weights) == 4;
    float scale = load(group, wide ? NUM_F32 : NUM_BF16, group_scale_slot(m, c));
    uint32_t code = m->weights == WEIGHTS_INT4 ? codes[int4_byte(i)] >> int4_shift(i) & 15u : codes[i];
    return packed_to_bf16(m->weights, (uint8_t)code, scale);
}

static float number_at(const struct k_matrix *m, uint32_t panel, uint32_t k, uint32_t c)
{
    return m->weights ? scalar_from_bf16(packed_at(m, panel, k, c))
                      : load(matrix_step(m, panel, k), m->type, panel_slot(m, c));
}

static uint32_t word_at(const struct k_matrix *m, uint32_t panel, uint32_t step, uint32_t c)
{
    if (!m->weights)
        return ((const uint32_t *)matrix_step(m, panel, step))[c];
    return packed_at(m, panel, 2 * step, c) | (uint32_t)packed_at(m, panel, 2 * step + 1, c) << 16;
}

static uint32_t panel_outputs(const struct k_matrix *m, uint32_t panel)
{
    uint32_t left = m->n_out - panel * PANEL;
    return left < PANEL ? left : PANEL;
}

static void linear_f32(const struct cpu_linear_job *job, uint32_t panel, uint32_t row0, uint32_t row1)
{
    const struct k_matrix *m = job->w;
    for (uint32_t row = row0; row < row1; row++) {
        const float *x = (const float *)job->x + (size_t)row * job->x_stride;
        for (uint32_t c = 0; c < panel_outputs(m, panel); c++) {
            float acc = 0;
            for (uint32_t k = 0; k < m->n_in; k++)
                acc = scalar_fma(number_at(m, panel, k, c), x[k], acc);
            put(job, row, panel * PANEL + c, acc);
        }
    }
}

static void linear_bf16(const struct cpu_linear_job *job, uint32_t panel, uint32_t row0, uint32_t row1)
{
    const struct k_matrix *m = job->w;
    for (uint32_t row = row0; row < row1; row++) {
        const uint32_t *x = (const uint32_t *)job->x + (size_t)row * job->x_stride;
        for (uint32_t c = 0; c < panel_outputs(m, panel); c++) {
            float acc = 0;
            for (uint32_t step = 0; step < m->n_steps; step++)
                acc = scalar_dp(word_at(m, panel, step, c), x[step], acc);
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

static void glu(const float *gate, const float *up, uint32_t dim, const struct k_glu *glu, float *out)
{
    for (uint32_t i = 0; i < dim; i++) {
        if (glu->act == ACT_CLAMPED)
            out[i] = scalar_clamped(gate[i], up[i], glu->alpha, glu->limit);
        else if (glu->act == ACT_GELU_TANH)
            out[i] = scalar_gelu(gate[i]) * up[i];
        else
            out[i] = scalar_swish(gate[i], gate[i]) * up[i];
    }
}

static void softcap(float *x, size_t n, float cap)
{
    for (size_t i = 0; i < n; i++)
        x[i] = scalar_softcap(x[i], cap);
}

static void axpy(float a, const float *x, uint32_t n, float *y)
{
    for (uint32_t i = 0; i < n; i++)
        y[i] = scalar_fma(a, x[i], y[i]);
}

static float max(const float *x, uint32_t n)
{
    float m = -__builtin_inff();
    for (uint32_t i = 0; i < n; i++)
        m = scalar_max(x[i], m);
    return m;
}

/* The sum over x[first .. n - 1]. */
static float sum_exp(const float *x, float m, uint32_t first, uint32_t n, float *p_out)
{
    float lanes[LANES] = {0};
    for (uint32_t i = first; i < n; i++) {
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
    return scalar_log(sum_exp(x, m, 0, n, NULL)) + m;
}

static uint64_t weigh(const float *x, uint32_t n, float max, float temperature, float *e_out)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += scalar_weight(e_out[i] = scalar_likelihood(x[i], max, temperature));
    return sum;
}

static float score(const struct attn_tile *t, const float *q, uint32_t pos)
{
    const struct k_attn *a = t->a;
    const uint8_t *k = attn_kv_at(a, t->seq, 0, t->kv_head, pos);
    float s = dot(q, k, a->layout->dtype, a->layout->head_dim) * a->scale;
    return a->cap > 0 ? scalar_softcap(s, a->cap) : s;
}

/* One query against the positions that it sees, up to pos, in blocks of 32. */
static void attend_query(const struct attn_tile *t, uint32_t head, const float *q, uint32_t pos, float *out)
{
    const struct k_attn *a = t->a;
    uint32_t first_key = attn_first_key(a, pos);
    float m = a->sinks ? a->sinks[head] : -__builtin_inff(), l = a->sinks ? 1 : 0, s[KEY_BLOCK], p[KEY_BLOCK];
    memset(out, 0, a->v_dim * sizeof(float));
    for (uint32_t block = first_key / KEY_BLOCK * KEY_BLOCK; block <= pos; block += KEY_BLOCK) {
        uint32_t n = pos + 1 - block < KEY_BLOCK ? pos + 1 - block : KEY_BLOCK;
        uint32_t first = first_key > block ? first_key - block : 0;
        for (uint32_t j = first; j < n; j++)
            s[j] = score(t, q, block + j);
        float m_new = scalar_max(max(s + first, n - first), m), shrink = scalar_exp(m - m_new);
        l = scalar_fma(l, shrink, sum_exp(s, m_new, first, n, p));
        m = m_new;
        for (uint32_t d = 0; d < a->v_dim; d++)
            out[d] = out[d] * shrink;
        for (uint32_t j = first; j < n; j++) {
            const uint8_t *v = attn_kv_at(a, t->seq, 1, t->kv_head, block + j);
            for (uint32_t d = 0; d < a->v_dim; d++)
                out[d] = scalar_fma(p[j], load(v, a->layout->dtype, d), out[d]);
        }
    }
    for (uint32_t d = 0; d < a->v_dim; d++)
        out[d] = out[d] * (1.0f / l);
}

static void attend(const struct attn_tile *t)
{
    const struct k_attn *a = t->a;
    uint32_t group = a->n_heads / a->n_kv_heads, dim = a->layout->head_dim;
    for (uint32_t i = t->row0; i < t->row0 + t->n_rows; i++) {
        size_t row = t->seq->first_row + i;
        for (uint32_t h = t->kv_head * group; h < (t->kv_head + 1) * group; h++)
            attend_query(t, h, a->q + row * a->q_stride + h * dim, t->seq->first_pos + i,
                         a->out + (row * a->n_heads + h) * a->v_dim);
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
        if (type == NUM_F8_E4M3)
            ((uint8_t *)dst)[i] = scalar_to_e4m3(src[i]);
        else
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
                                  .glu = glu,
                                  .softcap = softcap,
                                  .axpy = axpy,
                                  .attend = attend,
                                  .to_f32 = to_f32,
                                  .from_f32 = from_f32,
                                  .max = max,
                                  .logsumexp = logsumexp,
                                  .weigh = weigh,
                                  .exp = exp_one,
                                  .log = log_one};
