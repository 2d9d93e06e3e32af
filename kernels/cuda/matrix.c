/*
 * Weights: from a model file to rows of a device's matrix. Parts that have the device's format are copied
 * unchanged; others are converted here, some rows at a time.
 */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/cuda/state.h"
#include "kernels/parts.h"

enum {
    PIECE_BYTES = 1 << 20, /* bytes that are converted at a time */
    ALIGN = 8,             /* in numbers; rows of every type then begin at 16 bytes */
    JOINED_ALIGN = 256,    /* bytes, as cudaMalloc's */
};

static float load(const void *data, enum num_type type, size_t i)
{
    return scalar_from(data, (uint32_t)num_type_bytes(type), type == NUM_BF16, i);
}

static void store(void *data, enum num_type type, size_t i, float x)
{
    if (type == NUM_F32)
        ((float *)data)[i] = x;
    else
        ((uint16_t *)data)[i] = type == NUM_BF16 ? scalar_to_bf16(x) : scalar_to_f16(x);
}

static const void *element(const struct k_matrix_part *part, size_t i)
{
    return (const uint8_t *)part->data + i * num_type_bytes(part->type);
}

static void convert_row(const struct k_matrix_part *part, const struct cuda_matrix *m, uint32_t row, void *to)
{
    const void *from = element(part, row * (part->out_stride ? part->out_stride : m->n_in));
    size_t step = part->in_stride ? part->in_stride : 1;
    if (part->type == m->type && step == 1)
        memcpy(to, from, m->n_in * num_type_bytes(m->type));
    else
        for (uint32_t i = 0; i < m->n_in; i++)
            store(to, m->type, i, part_number(part, row, i, load(from, part->type, i * step)));
}

static size_t row_bytes_of(const struct cuda_matrix *m)
{
    return m->weights ? (size_t)m->stride * packed_bits(m->weights) / 8 : m->stride * num_type_bytes(m->type);
}

/* Bytes of one row. */
static size_t scales_bytes_of(const struct cuda_matrix *m)
{
    return m->weights ? (size_t)m->stride / K_GROUP * packed_scale_bytes(m->weights) : 0;
}

/* Packs the group of a row that begins at number i. */
static void pack_group(const struct k_matrix_part *part, const struct cuda_matrix *m, uint32_t row, uint32_t i,
                       uint8_t *codes_out, uint8_t *scales_out)
{
    const void *from = element(part, row * (part->out_stride ? part->out_stride : m->n_in));
    size_t step = part->in_stride ? part->in_stride : 1;
    bool is_kept = part_is_kept(part, m->weights, m->n_in);
    uint32_t n = m->n_in - i < K_GROUP ? m->n_in - i : K_GROUP;
    uint8_t codes[K_GROUP], kept[K_GROUP];
    float wide[K_GROUP];
    for (uint32_t j = 0; j < n; j++) {
        wide[j] = part_number(part, row, i + j, load(from, part->type, (i + j) * step));
        kept[j] = is_kept ? ((const uint8_t *)from)[(i + j) * step] : 0;
    }
    float scale = part_pack_group(part, m->weights, row, i, n, wide, is_kept ? kept : NULL, codes);
    store(scales_out, m->weights == WEIGHTS_FP8 ? NUM_F32 : NUM_BF16, i / K_GROUP, scale);
    for (uint32_t j = 0; j < n; j++)
        if (m->weights == WEIGHTS_INT4)
            codes_out[(i + j) / 2] |= (uint8_t)(codes[j] << (j % 2 * 4));
        else
            codes_out[i + j] = codes[j];
}

/* Some rows of a part, converted on the host. */
struct conversion {
    const struct k_matrix_part *part;
    const struct cuda_matrix *m;
    uint32_t first;
    uint8_t *rows, *scales;
};

static void run_convert(void *arg, uint32_t i, uint32_t thread)
{
    (void)thread;
    const struct conversion *t = arg;
    uint8_t *row = t->rows + i * row_bytes_of(t->m), *scales = t->scales + i * scales_bytes_of(t->m);
    if (!t->m->weights) { /* numbers behind n_in are zero: mem_array() cleared them */
        convert_row(t->part, t->m, t->first + i, row);
        return;
    }
    memset(row, 0, row_bytes_of(t->m));
    for (uint32_t at = 0; at < t->m->n_in; at += K_GROUP)
        pack_group(t->part, t->m, t->first + i, at, row, scales);
}

/* Writes rows of a part to the matrix from row `first` on, some at a time. */
static void write_converted(struct kernels *k, const struct k_matrix_part *part, const struct cuda_matrix *m,
                            uint32_t first)
{
    size_t row_bytes = row_bytes_of(m), scales_bytes = scales_bytes_of(m);
    uint8_t *to = (uint8_t *)m->data + first * row_bytes;
    uint8_t *scales_to = (uint8_t *)m->data + m->n_out * row_bytes + first * scales_bytes;
    uint32_t n_rows = row_bytes < PIECE_BYTES ? (uint32_t)(PIECE_BYTES / row_bytes) : 1;
    uint8_t *rows = mem_array(n_rows, row_bytes), *scales = mem_array(n_rows, scales_bytes + 1);
    for (uint32_t row = 0; row < part->n_out; row += n_rows) {
        uint32_t n = part->n_out - row < n_rows ? part->n_out - row : n_rows;
        struct conversion t = {part, m, row, rows, scales};
        pool_run(((struct cuda *)k)->loaders, run_convert, &t, n);
        cuda_write(k, to + row * row_bytes, rows, n * row_bytes);
        if (m->weights)
            cuda_write(k, scales_to + row * scales_bytes, scales, n * scales_bytes);
    }
    free(scales);
    free(rows);
}

/* Whether a part's rows are laid out as the device's are. */
static bool is_packed(const struct k_matrix_part *part, const struct cuda_matrix *m)
{
    return part->type == m->type && !m->weights && m->stride == m->n_in && part->in_stride <= 1 &&
           (!part->out_stride || part->out_stride == m->n_in);
}

static void write_parts(struct kernels *k, const struct k_matrix_part *parts, uint32_t n_parts,
                        const struct cuda_matrix *m)
{
    uint32_t first = 0;
    for (uint32_t i = 0; i < n_parts; first += parts[i++].n_out) {
        if (is_packed(&parts[i], m))
            cuda_write(k, (uint8_t *)m->data + first * row_bytes_of(m), parts[i].data,
                       parts[i].n_out * row_bytes_of(m));
        else
            write_converted(k, &parts[i], m, first);
    }
}

static enum td_status pack_bias(struct kernels *k, const struct k_matrix_part *parts, uint32_t n_parts,
                                struct cuda_matrix *m)
{
    bool any = false;
    for (uint32_t i = 0; i < n_parts; i++)
        any |= parts[i].bias != NULL;
    if (!any)
        return TD_OK;
    enum td_status s = cuda_alloc(k, m->n_out * sizeof(float), (void **)&m->bias);
    if (s)
        return s;
    float *bias = mem_array(m->n_out, sizeof(*bias)), *at = bias;
    for (uint32_t i = 0; i < n_parts; at += parts[i++].n_out)
        for (uint32_t c = 0; c < parts[i].n_out && parts[i].bias; c++)
            at[c] =
                load(parts[i].bias, parts[i].bias_type, (size_t)c * (parts[i].bias_stride ? parts[i].bias_stride : 1));
    cuda_write(k, m->bias, bias, m->n_out * sizeof(float));
    free(bias);
    return TD_OK;
}

static bool is_mapped(const struct kernels *k, const struct cuda_matrix *m)
{
    return ((const struct cuda *)k)->is_hopper && m->compute == COMPUTE_BF16 && !m->weights;
}

/* One map for each shape of tiles. */
static void make_maps(struct cuda *c, struct cuda_matrix *m)
{
    const struct cuda_mapped rows = {m->data, m->stride, 1, m->n_out, m->stride};
    uint32_t n = cuda_hopper_shapes();
    m->maps = mem_array(n, sizeof(*m->maps));
    for (uint32_t i = 0; i < n; i++)
        cuda_map_rows(c, &rows, cuda_hopper_tile(i).outs, cuda_hopper_tile(i).slabs, &m->maps[i]);
}

enum td_status cuda_matrix_pack(struct kernels *k, const struct k_matrix_part *parts, uint32_t n_parts,
                                const struct matrix_shape *shape, struct k_matrix **out)
{
    struct k_matrix *m = mem_zalloc(sizeof(*m));
    m->on = (struct cuda_matrix){.compute = shape->compute,
                                 .weights = shape->weights,
                                 .type = shape->type,
                                 .n_out = shape->n_out,
                                 .n_in = shape->n_in};
    uint32_t align = shape->weights ? CUDA_PACKED_ALIGN : is_mapped(k, &m->on) ? CUDA_SLAB_NUMBERS : ALIGN;
    m->on.stride = (shape->n_in + align - 1) / align * align;
    m->on.len_bytes = (uint64_t)shape->n_out * (row_bytes_of(&m->on) + scales_bytes_of(&m->on));
    enum td_status s = cuda_alloc(k, m->on.len_bytes, &m->on.data);
    if (!s)
        s = pack_bias(k, parts, n_parts, &m->on);
    if (s) {
        cuda_matrix_free(k, m);
        return s;
    }
    write_parts(k, parts, n_parts, &m->on);
    if (is_mapped(k, &m->on))
        make_maps((struct cuda *)k, &m->on);
    *out = m;
    return TD_OK;
}

void cuda_matrix_free(struct kernels *k, struct k_matrix *m)
{
    if (!m)
        return;
    if (!m->is_in_stack)
        cuda_free(k, m->on.data);
    cuda_free(k, m->on.bias);
    free(m->on.maps);
    free(m);
}

uint64_t cuda_matrix_bytes(const struct k_matrix *m)
{
    return m->on.len_bytes;
}

/* Copies an array to the device. */
static enum td_status write_array(struct kernels *k, const void *array, size_t len_bytes, void **out)
{
    enum td_status status = cuda_alloc(k, len_bytes, out);
    if (!status)
        cuda_write(k, *out, array, len_bytes);
    return status;
}

/* Writes the addresses of each matrix's numbers, or biases, to the device. */
static enum td_status write_pointers(struct kernels *k, const struct k_stack *s, bool is_bias, void **out)
{
    const void **pointers = mem_array(s->on.n, sizeof(*pointers));
    for (uint32_t i = 0; i < s->on.n; i++)
        pointers[i] = is_bias ? (const void *)s->matrices[i]->on.bias : s->matrices[i]->on.data;
    enum td_status status = write_array(k, pointers, s->on.n * sizeof(*pointers), out);
    free(pointers);
    return status;
}

static enum td_status write_maps(struct kernels *k, const struct k_stack *s, void **out)
{
    size_t n = (size_t)cuda_hopper_shapes() * s->on.n;
    struct cuda_map *maps = mem_array(n, sizeof(*maps));
    for (size_t i = 0; i < n; i++)
        maps[i] = s->matrices[i % s->on.n]->on.maps[i / s->on.n];
    enum td_status status = write_array(k, maps, n * sizeof(*maps), out);
    free(maps);
    return status;
}

static bool alike(const struct cuda_matrix *a, const struct cuda_matrix *b)
{
    return a->n_out == b->n_out && a->n_in == b->n_in && a->compute == b->compute && a->type == b->type &&
           a->weights == b->weights;
}

/*
 * Moves the numbers of all matrices into one allocation: CUDA rounds each large one up to 2 MiB, which
 * experts of some MB pay for one by one. Without memory for the copy they stay where they are.
 */
static void join_matrices(struct kernels *k, struct k_stack *s)
{
    struct cuda *c = cuda_enter(k);
    size_t each = (s->on.shape->len_bytes + JOINED_ALIGN - 1) / JOINED_ALIGN * JOINED_ALIGN;
    if (cuda_alloc(k, s->on.n * each, &s->joined))
        return;
    for (uint32_t i = 0; i < s->on.n; i++) {
        struct k_matrix *m = s->matrices[i];
        void *from = m->on.data;
        m->on.data = (uint8_t *)s->joined + i * each;
        CUDA_MUST(cudaMemcpyAsync(m->on.data, from, m->on.len_bytes, cudaMemcpyDeviceToDevice, c->stream));
        cuda_free(k, from); /* waits for the copy */
        m->is_in_stack = true;
        if (m->on.maps) {
            free(m->on.maps);
            make_maps(c, &m->on);
        }
    }
}

static void stack_free(struct kernels *k, struct k_stack *s)
{
    cuda_free(k, s->joined);
    cuda_free(k, (void *)(uintptr_t)s->on.data);
    cuda_free(k, (void *)(uintptr_t)s->on.bias);
    cuda_free(k, (void *)(uintptr_t)s->on.maps);
    free(s->matrices);
    free(s);
}

enum td_status cuda_stack_open(struct kernels *k, struct k_matrix *const *matrices, uint32_t n, struct k_stack **out)
{
    bool biased = false;
    for (uint32_t i = 0; i < n; i++) {
        if (!alike(&matrices[i]->on, &matrices[0]->on))
            return TD_ERR_INVALID;
        biased |= matrices[i]->on.bias != NULL;
    }
    if (!n)
        return TD_ERR_INVALID;
    struct k_stack *s = mem_zalloc(sizeof(*s));
    s->matrices = mem_dup(matrices, n * sizeof(struct k_matrix *));
    s->on.shape = &s->matrices[0]->on;
    s->on.n = n;
    void *data = NULL, *bias = NULL, *maps = NULL;
    join_matrices(k, s);
    enum td_status status = write_pointers(k, s, false, &data);
    if (!status && biased)
        status = write_pointers(k, s, true, &bias);
    if (!status && is_mapped(k, s->on.shape))
        status = write_maps(k, s, &maps);
    s->on.data = data;
    s->on.bias = bias;
    s->on.maps = maps;
    if (status) {
        stack_free(k, s);
        return status;
    }
    *out = s;
    return TD_OK;
}

void cuda_stack_close(struct kernels *k, struct k_stack *s)
{
    if (!s)
        return;
    for (uint32_t i = 0; i < s->on.n; i++)
        cuda_matrix_free(k, s->matrices[i]);
    stack_free(k, s);
}

uint64_t cuda_stack_bytes(const struct k_stack *s)
{
    return s->on.n * s->on.shape->len_bytes;
}
