/* Compares every instruction set with plain C, bit for bit. Also the invariance that the product promises: a
 * row's result does not depend on the rows beside it, the chunk, or the number of threads. */
#include <math.h>

#include "tests/kernels/data.h"

static const struct {
    enum kernels_isa isa;
    uint32_t n_threads;
} BACKENDS[] = {{ISA_PLAIN, 2}, {ISA_AVX2, 1}, {ISA_AVX2, 3}, {ISA_AVX512, 1}, {ISA_AVX512, 3}, {ISA_AUTO, 0}};

enum { N_BACKENDS = sizeof(BACKENDS) / sizeof(BACKENDS[0]) };

/* Fast is NULL if the CPU lacks the instruction set: the test then passes without work. */
static struct kernels *plain, *fast;

static void open_both(int i)
{
    plain = data_open(ISA_PLAIN, 1);
    fast = data_open(BACKENDS[i].isa, BACKENDS[i].n_threads);
}

static void close_both(void)
{
    kernels_close(plain);
    kernels_close(fast);
}

/* ------------------------------------------------------------------ linear */

struct linear_case {
    uint32_t n_rows, n_in, n_out[2];
    enum num_type type[2];
    enum compute compute;
    enum k_weights weights;
    bool accumulate, bias;
    float scale;
};

static struct k_matrix *pack(struct kernels *k, const struct linear_case *c, uint64_t seed)
{
    struct k_matrix_part parts[2];
    void *data[2];
    for (int i = 0; i < 2; i++) {
        size_t n = (size_t)c->n_out[i] * c->n_in;
        float *w = data_floats(seed + (uint64_t)i, n, c->scale);
        data[i] = data_as(w, c->type[i], n);
        parts[i] = (struct k_matrix_part){.data = data[i], .type = c->type[i], .n_out = c->n_out[i]};
        if (c->bias && i == 0) { /* any numbers will do */
            parts[i].bias = data[i];
            parts[i].bias_type = c->type[i];
        }
        free(w);
    }
    struct k_matrix *m = NULL;
    ck_assert_int_eq(k_matrix_pack(k, parts, c->n_out[1] ? 2 : 1, c->n_in, c->compute, c->weights, &m), TD_OK);
    static const uint32_t BITS[] = {16, 8, 8, 4}; /* at least */
    ck_assert_uint_ge(k_matrix_bytes(k, m), BITS[c->weights] * (c->n_out[0] + c->n_out[1]) * (size_t)c->n_in / 8);
    free(data[0]);
    free(data[1]);
    return m;
}

static void check_linear(const struct linear_case *c, uint64_t seed)
{
    uint32_t n_out = c->n_out[0] + c->n_out[1];
    size_t n_y = (size_t)c->n_rows * n_out;
    float *x = data_floats(seed + 7, (size_t)c->n_rows * c->n_in, 1.5f);
    float *y = data_floats(seed + 8, n_y, 1), *z = mem_dup(y, n_y * sizeof(float));
    struct k_matrix *a = pack(plain, c, seed), *b = pack(fast, c, seed);
    k_linear(plain, a, x, c->n_rows, y, c->accumulate);
    k_linear(fast, b, x, c->n_rows, z, c->accumulate);
    data_equal(z, y, n_y, "linear");
    k_matrix_free(plain, a);
    k_matrix_free(fast, b);
    free(x);
    free(y);
    free(z);
}

START_TEST(test_linear_equals_plain_for_any_shape)
{
    open_both(_i);
    for (uint64_t i = 0; fast && i < 200; i++) {
        uint64_t s = 1000 * i;
        struct linear_case c = {.n_rows = data_range(s, 1, 1, i % 4 ? 14 : 70),
                                .n_in = data_range(s, 2, 1, 150),
                                .n_out = {data_range(s, 3, 1, 150), i % 3 ? 0 : data_range(s, 4, 1, 80)},
                                .type = {1 + data_bits(s, 5) % 3, 1 + data_bits(s, 6) % 3},
                                .compute = i % 2 ? COMPUTE_F32 : COMPUTE_BF16,
                                .weights = data_bits(s, 9) % 4,
                                .accumulate = data_bits(s, 7) % 2,
                                .bias = data_bits(s, 8) % 2,
                                .scale = 1};
        check_linear(&c, s);
    }
    close_both();
}
END_TEST

START_TEST(test_linear_equals_plain_beyond_a_cache_block)
{
    open_both(_i);
    for (int i = 0; fast && i < 8; i++) {
        struct linear_case c = {.n_in = 1500, .n_out = {65, 0}, .type = {NUM_BF16, NUM_BF16}, .scale = 1};
        c.compute = i % 2 ? COMPUTE_F32 : COMPUTE_BF16;
        c.weights = i / 2;
        for (c.n_rows = 2; c.n_rows < 10; c.n_rows += 3)
            check_linear(&c, 40);
        c.n_rows = 200;
        c.n_in = 40;
        c.n_out[0] = 3;
        check_linear(&c, 41);
    }
    close_both();
}
END_TEST

/* Products and sums around the smallest normal number, where VDPBF16PS flushes to zero, and up to
 * infinity. */
START_TEST(test_linear_bf16_equals_plain_at_the_edges_of_the_range)
{
    open_both(_i);
    static const float W[] = {0x1p-60f, 0x1p-80f, 0x1p-126f, 0x1p-130f, 0x1p120f, 1, 0x1.04p-75f, 0x1p-70f};
    for (uint64_t i = 0; fast && i < 32; i++) {
        struct linear_case c = {.n_rows = 3, .n_in = data_range(i, 50, 1, 40), .n_out = {70, 0}};
        c.type[0] = c.type[1] = NUM_F32;
        c.compute = COMPUTE_BF16;
        c.scale = W[i % 8];
        uint32_t n_out = c.n_out[0];
        float *x = data_floats(i, (size_t)c.n_rows * c.n_in, W[i / 4]), y[3 * 70], z[3 * 70];
        struct k_matrix *a = pack(plain, &c, i), *b = pack(fast, &c, i);
        k_linear(plain, a, x, c.n_rows, y, false);
        k_linear(fast, b, x, c.n_rows, z, false);
        data_equal(z, y, (size_t)c.n_rows * n_out, "linear at the edges");
        k_matrix_free(plain, a);
        k_matrix_free(fast, b);
        free(x);
    }
    close_both();
}
END_TEST

/* One pair of k's, and an accumulator that a first pair sets, all with random exponents: sums that cancel,
 * sums that are subnormal before or after rounding, ties. */
START_TEST(test_linear_bf16_equals_plain_for_random_bits)
{
    open_both(_i);
    enum { N_OUT = 640, N_IN = 4, N_ROWS = 16 };
    for (uint64_t round = 0; fast && round < 24; round++) {
        uint32_t centre = (uint32_t[]){64, 70, 127, 190, 1, 30}[round % 6];
        uint16_t *w = mem_array((size_t)N_OUT * N_IN, 2);
        float *x = mem_array((size_t)N_ROWS * N_IN, 4), *y = mem_array((size_t)N_OUT * N_ROWS, 4),
              *z = mem_array((size_t)N_OUT * N_ROWS, 4);
        for (uint32_t i = 0; i < N_OUT * N_IN; i++)
            w[i] = (uint16_t)(data_bits(round, i) % 2 << 15 | data_range(round + 100, i, centre, centre + 10) << 7 |
                              data_bits(round + 200, i) % 128);
        for (uint32_t i = 0; i < N_ROWS * N_IN; i++) {
            uint32_t low = round % 4 ? 127 - 62 : 118;
            uint32_t b = (uint32_t)(data_bits(round, ~i) % 2) << 31 | data_range(round + 300, i, low, low + 8) << 23 |
                         (uint32_t)(data_bits(round + 400, i) & 0x7fffff);
            memcpy(x + i, &b, 4);
        }
        struct k_matrix_part part = {.data = w, .type = NUM_BF16, .n_out = N_OUT};
        struct k_matrix *a = NULL, *b = NULL;
        ck_assert_int_eq(k_matrix_pack(plain, &part, 1, N_IN, COMPUTE_BF16, WEIGHTS_AS_STORED, &a), TD_OK);
        ck_assert_int_eq(k_matrix_pack(fast, &part, 1, N_IN, COMPUTE_BF16, WEIGHTS_AS_STORED, &b), TD_OK);
        k_linear(plain, a, x, N_ROWS, y, false);
        k_linear(fast, b, x, N_ROWS, z, false);
        data_equal(z, y, (size_t)N_OUT * N_ROWS, "random bits");
        k_matrix_free(plain, a);
        k_matrix_free(fast, b);
        free(w);
        free(x);
        free(y);
        free(z);
    }
    close_both();
}
END_TEST

START_TEST(test_linear_row_is_the_same_alone_and_in_a_batch)
{
    open_both(_i);
    for (int mode = 0; fast && mode < 10; mode++) {
        struct linear_case c = {.n_in = 1100, .n_out = {200, 0}, .scale = 1};
        c.type[0] = c.type[1] = mode % 2 ? NUM_BF16 : NUM_F16;
        c.weights = mode < 4 ? WEIGHTS_AS_STORED : (enum k_weights)(mode / 2 - 1);
        c.compute = (mode < 4 ? mode / 2 : mode % 2) ? COMPUTE_BF16 : COMPUTE_F32;
        enum { N_ROWS = 70 };
        struct k_matrix *m = pack(fast, &c, 5);
        float *x = data_floats(6, (size_t)N_ROWS * c.n_in, 1), *all = mem_array(N_ROWS * 200, 4), y[20 * 200];
        uint32_t n_out = c.n_out[0];
        k_linear(fast, m, x, N_ROWS, all, false);
        for (uint32_t row = 0, n = 1; row < N_ROWS; row += n, n = n % 13 + 1) {
            uint32_t n_rows = row + n > N_ROWS ? N_ROWS - row : n;
            k_linear(fast, m, x + (size_t)row * c.n_in, n_rows, y, false);
            data_equal(y, all + (size_t)row * n_out, (size_t)n_rows * n_out, "rows of a batch");
        }
        k_matrix_free(fast, m);
        free(x);
        free(all);
    }
    close_both();
}
END_TEST

START_TEST(test_matrix_pack_refuses_empty_shapes)
{
    struct kernels *k = data_open(ISA_PLAIN, 1);
    float w[4] = {0};
    struct k_matrix *m = NULL;
    struct k_matrix_part part = {.data = w, .type = NUM_F32, .n_out = 0};
    ck_assert_int_eq(k_matrix_pack(k, &part, 1, 4, COMPUTE_F32, WEIGHTS_AS_STORED, &m), TD_ERR_INVALID);
    part.n_out = 1;
    ck_assert_int_eq(k_matrix_pack(k, &part, 1, 0, COMPUTE_F32, WEIGHTS_AS_STORED, &m), TD_ERR_INVALID);
    ck_assert_int_eq(k_matrix_pack(k, &part, 1, 4, (enum compute)9, WEIGHTS_AS_STORED, &m), TD_ERR_INVALID);
    part.type = (enum num_type)9;
    ck_assert_int_eq(k_matrix_pack(k, &part, 1, 4, COMPUTE_F32, WEIGHTS_AS_STORED, &m), TD_ERR_INVALID);
    ck_assert_ptr_null(m);
    kernels_close(k);
}
END_TEST

/* ------------------------------------------------------------- elementwise */

START_TEST(test_elementwise_equals_plain_for_any_shape)
{
    open_both(_i);
    for (uint64_t i = 0; fast && i < 40; i++) {
        uint32_t n_rows = data_range(i, 1, 1, 70), dim = data_range(i, 2, 1, 300);
        size_t n = (size_t)n_rows * dim;
        float *x = data_floats(i, 2 * n, i % 5 ? 2 : 100), *w = data_floats(i + 1, dim, 2);
        float *y = mem_array(n, 4), *z = mem_array(n, 4);
        k_rmsnorm(plain, x, w, 1e-5f, n_rows, dim, y);
        k_rmsnorm(fast, x, w, 1e-5f, n_rows, dim, z);
        data_equal(z, y, n, "rmsnorm");
        for (enum k_act act = ACT_SILU; act <= ACT_CLAMPED; act++) {
            const struct k_glu glu = {act, 1.702f, 1.5f};
            k_glu(plain, x, n_rows, dim, &glu, y);
            k_glu(fast, x, n_rows, dim, &glu, z);
            data_equal(z, y, n, "glu");
        }
        memcpy(y, x, n * sizeof(float));
        memcpy(z, x, n * sizeof(float));
        k_softcap(plain, y, n, 3);
        k_softcap(fast, z, n, 3);
        data_equal(z, y, n, "softcap");
        k_rmsnorm(fast, x, w, 1e-5f, n_rows, dim, x);
        k_rmsnorm(plain, x, w, 1e-5f, n_rows, dim, y);
        k_rmsnorm(fast, x, w, 1e-5f, n_rows, dim, x);
        data_equal(x, y, n, "rmsnorm in place");
        free(x);
        free(w);
        free(y);
        free(z);
    }
    close_both();
}
END_TEST

START_TEST(test_embed_equals_plain_for_every_type)
{
    open_both(_i);
    enum { VOCAB = 11, DIM = 37, N_ROWS = 23 };
    float *x = data_floats(3, VOCAB * DIM, 4), y[N_ROWS * DIM], z[N_ROWS * DIM];
    uint32_t ids[N_ROWS];
    for (uint32_t i = 0; i < N_ROWS; i++)
        ids[i] = data_range(4, i, 0, VOCAB - 1);
    for (enum num_type type = NUM_F32; fast && type <= NUM_F8_E4M3; type++) {
        void *table = data_as(x, type, VOCAB * DIM);
        k_take_rows(plain, table, type, DIM, ids, N_ROWS, 1, y);
        k_take_rows(fast, table, type, DIM, ids, N_ROWS, 1, z);
        data_equal(z, y, N_ROWS * DIM, "embed");
        k_convert_to_f32((uint8_t *)table + ids[5] * DIM * num_type_bytes(type), type, DIM, y);
        data_equal(z + 5 * DIM, y, DIM, "embed of one row");
        free(table);
    }
    free(x);
    close_both();
}
END_TEST

START_TEST(test_rope_rotates_only_its_heads)
{
    open_both(_i);
    enum { HALF = 9, HEADS = 3, STRIDE = HEADS * 2 * HALF + 5, N_ROWS = 20 };
    double inv_freq[HALF];
    float table[64 * HALF * 2], *x = data_floats(8, STRIDE * N_ROWS, 2);
    uint32_t positions[N_ROWS];
    for (uint32_t i = 0; i < HALF; i++)
        inv_freq[i] = 1.0 / (1 + i);
    for (uint32_t i = 0; i < N_ROWS; i++)
        positions[i] = data_range(9, i, 0, 63);
    k_rope_table(inv_freq, HALF, 64, 1, table);
    const struct k_rotary rotary = {table, 2 * HALF, false};
    for (int once = 0; fast && once < 1; once++) {
        float *y = mem_dup(x, STRIDE * N_ROWS * 4), *z = mem_dup(x, STRIDE * N_ROWS * 4);
        k_rope(plain, y, STRIDE, HEADS, 2 * HALF, &rotary, positions, N_ROWS);
        k_rope(fast, z, STRIDE, HEADS, 2 * HALF, &rotary, positions, N_ROWS);
        data_equal(z, y, STRIDE * N_ROWS, "rope");
        for (uint32_t t = 0; t < N_ROWS; t++)
            data_equal(z + t * STRIDE + STRIDE - 5, x + t * STRIDE + STRIDE - 5, 5, "behind the heads");
        const float *in = x + 4 * STRIDE + 2 * HALF, *out = z + 4 * STRIDE + 2 * HALF;
        double angle = positions[4] * inv_freq[2];
        ck_assert_double_eq_tol((double)out[2], (double)in[2] * cos(angle) - (double)in[2 + HALF] * sin(angle), 1e-6);
        ck_assert_double_eq_tol((double)out[2 + HALF], (double)in[2 + HALF] * cos(angle) + (double)in[2] * sin(angle),
                                1e-6);
        free(y);
        free(z);
    }
    free(x);
    close_both();
}
END_TEST

/* --------------------------------------------------------------- attention */

struct kv_case {
    struct kv_layout layout;
    uint32_t n_heads, n_seqs, window, v_dim;
    uint32_t first_kv_head, n_kv_heads; /* 0: all KV heads of the layout */
    float cap;
    bool sinks;
    uint32_t first_pos[4], n_rows[4];
};

/* A batch of sequences, its pages (filled with NaN), and the start of each: the KV of positions 0..first_pos
 * comes from seed. */
struct kv_batch {
    struct k_attn attn;
    struct k_attn_seq seqs[4];
    uint8_t **pages[4];
    uint32_t n_pages[4];
    uint32_t n_rows, stride;
    float *qkv, *sinks;
};

static struct kv_batch batch_open(const struct kv_case *c)
{
    struct kv_batch b = {0};
    uint32_t n_kv_heads = c->n_kv_heads ? c->n_kv_heads : c->layout.n_kv_heads;
    const struct kv_layout *l = &c->layout;
    for (uint32_t i = 0; i < c->n_seqs; i++) {
        b.n_pages[i] = (c->first_pos[i] + c->n_rows[i] + l->page_tokens - 1) / l->page_tokens;
        b.pages[i] = mem_array(b.n_pages[i], sizeof(uint8_t *));
        for (uint32_t p = 0; p < b.n_pages[i]; p++) {
            b.pages[i][p] = mem_zalloc(kv_layout_page_bytes(l));
            memset(b.pages[i][p], 0xff, kv_layout_page_bytes(l));
        }
        b.seqs[i] = (struct k_attn_seq){.first_row = b.n_rows, .n_rows = c->n_rows[i], .first_pos = c->first_pos[i]};
        b.seqs[i].pages = b.pages[i];
        b.n_rows += c->n_rows[i];
    }
    b.stride = (c->n_heads + 2 * n_kv_heads) * l->head_dim + 3;
    b.qkv = mem_array((size_t)b.n_rows * b.stride, sizeof(float));
    b.sinks = data_floats(99, c->n_heads, 3);
    b.attn = (struct k_attn){.layout = l, .layer = l->n_layers - 1, .n_heads = c->n_heads, .q = b.qkv};
    b.attn.k = b.qkv + (size_t)c->n_heads * l->head_dim;
    b.attn.v = b.attn.k + (size_t)n_kv_heads * l->head_dim;
    b.attn.first_kv_head = c->first_kv_head;
    b.attn.n_kv_heads = n_kv_heads;
    b.attn.q_stride = b.attn.kv_stride = b.stride;
    b.attn.v_dim = c->v_dim ? c->v_dim : l->head_dim;
    b.attn.scale = 0.3f;
    b.attn.cap = c->cap;
    b.attn.window = c->window;
    b.attn.sinks = c->sinks ? b.sinks : NULL;
    b.attn.n_seqs = c->n_seqs;
    return b;
}

static void batch_close(struct kv_batch *b)
{
    for (uint32_t i = 0; i < b->attn.n_seqs; i++) {
        for (uint32_t p = 0; p < b->n_pages[i]; p++)
            free(b->pages[i][p]);
        free(b->pages[i]);
    }
    free(b->qkv);
    free(b->sinks);
}

/* Fills the row of sequence seq at a position: it has the same numbers in every chunk. */
static void fill_row(struct kv_batch *b, uint32_t row, uint32_t seq, uint32_t pos)
{
    float *x = data_floats(7000 + seq * 1000 + pos, b->stride, 1.5f);
    memcpy(b->qkv + (size_t)row * b->stride, x, b->stride * sizeof(float));
    free(x);
}

/* Stores the KV before the chunk, one row at a time; then fills the chunk and stores its KV. */
static void fill(struct kernels *k, struct kv_batch *b, const uint32_t *seq_ids)
{
    for (uint32_t i = 0; i < b->attn.n_seqs; i++) {
        struct k_attn one = b->attn;
        for (uint32_t pos = 0; pos < b->seqs[i].first_pos; pos++) {
            struct k_attn_seq s = {.first_row = 0, .n_rows = 1, .first_pos = pos, .pages = b->pages[i]};
            fill_row(b, 0, seq_ids[i], pos);
            one.seqs = &s;
            one.n_seqs = 1;
            k_kv_store(k, &one);
        }
    }
    for (uint32_t i = 0; i < b->attn.n_seqs; i++)
        for (uint32_t r = 0; r < b->seqs[i].n_rows; r++)
            fill_row(b, b->seqs[i].first_row + r, seq_ids[i], b->seqs[i].first_pos + r);
    b->attn.seqs = b->seqs;
    k_kv_store(k, &b->attn);
}

static const uint32_t SEQ_IDS[] = {0, 1, 2, 3};

static struct kv_case random_kv_case(uint64_t i)
{
    struct kv_case c = {.layout = {.dtype = 1 + i % 4, .n_layers = 1 + i % 2}, .n_seqs = data_range(i, 1, 1, 4)};
    c.layout.n_kv_heads = data_range(i, 2, 1, 3);
    c.layout.head_dim = (uint32_t[]){64, 16, 7, 33, 128, 80, 1}[i % 7];
    c.layout.page_tokens = (uint32_t[]){16, 5, 32, 64, 1}[i % 5];
    c.n_heads = c.layout.n_kv_heads * (uint32_t[]){1, 4, 3, 7, 2}[data_bits(i, 3) % 5];
    c.window = data_bits(i, 20) % 2 ? data_range(i, 21, 1, 70) : 0;
    c.cap = data_bits(i, 22) % 2 ? 2.5f : 0;
    c.sinks = data_bits(i, 23) % 2;
    if (data_bits(i, 24) % 3 == 0) {
        c.layout.kind = KV_LATENT;
        c.layout.n_kv_heads = 1;
        c.v_dim = data_range(i, 25, 1, c.layout.head_dim);
    } else if (i % 3 == 1) { /* pages also hold heads of other ranks */
        c.n_kv_heads = c.layout.n_kv_heads;
        c.first_kv_head = data_range(i, 26, 0, 2);
        c.layout.n_kv_heads += c.first_kv_head + data_range(i, 27, 0, 2);
    }
    for (uint32_t s = 0; s < c.n_seqs; s++) {
        c.first_pos[s] = data_bits(i, 4 + s) % 3 ? data_range(i, 8 + s, 0, 80) : 0;
        c.n_rows[s] = data_bits(i, 12 + s) % 2 ? 1 : data_range(i, 16 + s, 1, 40);
    }
    return c;
}

/* Drops pages that are before the window of every row. */
static void drop_unseen(const struct kv_case *c, struct kv_batch *b)
{
    struct kv_layout l = c->layout;
    l.window = c->window;
    for (uint32_t s = 0; s < c->n_seqs; s++)
        for (uint32_t p = 0; p < kv_layout_first_kept(&l, c->first_pos[s]); p++) {
            free(b->pages[s][p]);
            b->pages[s][p] = NULL;
        }
}

START_TEST(test_attention_equals_plain_for_any_shape)
{
    open_both(_i);
    for (uint64_t i = 0; fast && i < 70; i++) {
        struct kv_case c = random_kv_case(i);
        struct kv_batch a = batch_open(&c), b = batch_open(&c);
        size_t n = (size_t)a.n_rows * c.n_heads * a.attn.v_dim;
        float *y = mem_array(n, sizeof(float)), *z = mem_array(n, sizeof(float));
        fill(plain, &a, SEQ_IDS);
        fill(fast, &b, SEQ_IDS);
        for (uint32_t s = 0; s < c.n_seqs; s++)
            for (uint32_t p = 0; p < a.n_pages[s]; p++)
                ck_assert_mem_eq(a.pages[s][p], b.pages[s][p], kv_layout_page_bytes(&c.layout));
        a.attn.out = y;
        b.attn.out = z;
        drop_unseen(&c, &a);
        drop_unseen(&c, &b);
        k_attention(plain, &a.attn);
        k_attention(fast, &b.attn);
        data_equal(z, y, n, "attention");
        for (size_t j = 0; j < n; j++)
            ck_assert(isfinite(z[j]));
        batch_close(&a);
        batch_close(&b);
        free(y);
        free(z);
    }
    close_both();
}
END_TEST

/* Ranks with one common set of pages: each computes a range of heads. */
START_TEST(test_attention_by_ranges_of_heads_equals_all_heads)
{
    open_both(_i);
    if (!fast) {
        close_both();
        return;
    }
    struct kv_case c = {.layout = {NUM_BF16, 2, 5, 24, 16}, .n_heads = 15, .n_seqs = 2, .n_rows = {20, 1}};
    c.first_pos[0] = 7;
    c.first_pos[1] = 40;
    c.sinks = true;
    struct kv_batch all = batch_open(&c), parts = batch_open(&c);
    size_t dim = c.layout.head_dim, width = c.n_heads * dim, n = all.n_rows * width;
    float *y = mem_array(n, sizeof(float)), *z = mem_array(n, sizeof(float)), *part = mem_array(n, sizeof(float));
    all.attn.out = y;
    fill(fast, &all, SEQ_IDS);
    k_attention(fast, &all.attn);
    const struct k_attn whole = parts.attn;
    for (uint32_t first = 0, n_kv = 2; first < 5; first += n_kv, n_kv = 3) {
        uint32_t n_heads = 3 * n_kv;
        struct k_attn *a = &parts.attn;
        *a = whole;
        a->first_kv_head = first;
        a->n_kv_heads = n_kv;
        a->n_heads = n_heads;
        a->q += 3 * first * dim;
        a->k += first * dim;
        a->v += first * dim;
        a->sinks = parts.sinks + (size_t)3 * first;
        a->out = part;
        fill(fast, &parts, SEQ_IDS);
        k_attention(fast, a);
        for (uint32_t row = 0; row < all.n_rows; row++)
            memcpy(z + row * width + 3 * first * dim, part + row * n_heads * dim, n_heads * dim * sizeof(float));
    }
    data_equal(z, y, n, "attention");
    for (uint32_t s = 0; s < c.n_seqs; s++)
        for (uint32_t p = 0; p < all.n_pages[s]; p++)
            ck_assert_mem_eq(parts.pages[s][p], all.pages[s][p], kv_layout_page_bytes(&c.layout));
    batch_close(&all);
    batch_close(&parts);
    free(y);
    free(z);
    free(part);
    close_both();
}
END_TEST

/* Compares a prompt as one chunk with the same prompt in odd chunks beside other sequences, and with rows one
 * by one. */
START_TEST(test_attention_row_is_the_same_in_any_chunk_and_batch)
{
    open_both(_i);
    enum { N_TOKENS = 101 };
    struct kv_case c = {.layout = {NUM_BF16, 1, 2, 32, 16}, .n_heads = 6, .n_seqs = 1, .n_rows = {N_TOKENS}};
    c.window = _i % 2 ? 40 : 0;
    c.sinks = _i % 3 == 0;
    c.cap = _i % 3 == 1 ? 3 : 0;
    size_t row_floats = (size_t)c.n_heads * c.layout.head_dim;
    float *whole = mem_array(N_TOKENS * row_floats, 4), *part = mem_array(N_TOKENS * 3 * row_floats, 4);
    struct kv_batch b = {0};
    if (fast) {
        b = batch_open(&c);
        fill(fast, &b, SEQ_IDS);
        b.attn.out = whole;
        k_attention(fast, &b.attn);
        batch_close(&b);
    }
    for (uint32_t pos = 0, n = 1; fast && pos < N_TOKENS; pos += n, n = n * 2 % 19 + 1) {
        uint32_t n_rows = pos + n > N_TOKENS ? N_TOKENS - pos : n;
        struct kv_case odd = c;
        odd.n_seqs = 3;
        memcpy(odd.first_pos, (uint32_t[]){pos / 2, pos, 33, 0}, sizeof(odd.first_pos));
        memcpy(odd.n_rows, (uint32_t[]){3, n_rows, 1, 0}, sizeof(odd.n_rows));
        b = batch_open(&odd);
        fill(fast, &b, (uint32_t[]){9, 0, 8});
        b.attn.out = part;
        k_attention(fast, &b.attn);
        data_equal(part + 3 * row_floats, whole + pos * row_floats, n_rows * row_floats, "attention of a chunk");
        batch_close(&b);
    }
    free(whole);
    free(part);
    close_both();
}
END_TEST

/* ------------------------------------------------------------------ experts */

enum { STACK = 5, STACK_IN = 37, STACK_OUT = 70 };

/* Makes one of four kinds of stack: with and without bias, in both compute types. matrices: the matrices of
 * the stack, which owns them. */
static struct k_stack *stack(struct kernels *k, int kind, struct k_matrix *matrices[STACK])
{
    struct linear_case c = {.n_in = STACK_IN, .n_out = {STACK_OUT, 0}, .scale = 1, .bias = kind % 2};
    struct k_stack *s = NULL;
    c.type[0] = c.type[1] = NUM_BF16;
    c.compute = kind / 2 ? COMPUTE_BF16 : COMPUTE_F32;
    for (uint32_t i = 0; i < STACK; i++)
        matrices[i] = pack(k, &c, 50 + i);
    ck_assert_int_eq(k_stack_open(k, matrices, STACK, &s), TD_OK);
    ck_assert_uint_eq(k_stack_bytes(k, s), STACK * k_matrix_bytes(k, matrices[0]));
    return s;
}

/* A stack with sorted rows of many matrices, and with each row for each matrix, gives what one matrix after
 * the other gives. */
START_TEST(test_a_stack_gives_what_linear_gives)
{
    open_both(_i);
    static const uint32_t FIRST[STACK + 1] = {0, 3, 3, 203, 204, 204};
    enum { N_ROWS = 204, X_STRIDE = STACK * STACK_IN + 3, Y_STRIDE = STACK * STACK_OUT + 5 };
    for (int kind = 0; fast && kind < 4; kind++) {
        struct k_matrix *m[STACK];
        struct k_stack *s = stack(fast, kind, m);
        float *x = data_floats(3, N_ROWS * X_STRIDE, 1), *y = mem_array(N_ROWS * Y_STRIDE, 4), row[STACK_OUT];
        k_linear_sorted(fast, s, FIRST, N_ROWS, x, y);
        for (uint32_t i = 0; i < STACK; i++)
            for (uint32_t r = FIRST[i]; r < FIRST[i + 1]; r++) {
                k_linear(fast, m[i], x + r * STACK_IN, 1, row, false);
                data_equal(y + r * STACK_OUT, row, STACK_OUT, "row of an expert");
            }
        k_linear_each(fast, s, &(struct k_each){x, y, X_STRIDE, STACK_IN, Y_STRIDE, STACK_OUT}, 7);
        for (uint32_t i = 0; i < STACK; i++)
            for (uint32_t r = 0; r < 7; r++) {
                k_linear(fast, m[i], x + r * X_STRIDE + i * STACK_IN, 1, row, false);
                data_equal(y + r * Y_STRIDE + i * STACK_OUT, row, STACK_OUT, "row of a head");
            }
        k_stack_close(fast, s);
        free(x);
        free(y);
    }
    close_both();
}
END_TEST

/* Five pairs written by hand, followed by a shared expert. */
START_TEST(test_slots_are_sorted_by_expert_and_rows_stay_in_order)
{
    struct kernels *k = data_open(ISA_AUTO, 1);
    enum { ROWS = 3, USED = 2, SLOTS = 3, EXPERTS = 4 };
    const uint32_t experts[ROWS * SLOTS] = {3, 1, 9, 1, 0, 9, 3, 1, 9};
    const float gate[ROWS] = {0, 100, -100};
    float weights[ROWS * SLOTS] = {0};
    uint32_t slots[ROWS * SLOTS], slot_row[ROWS * USED], first[EXPERTS + 1];
    struct k_slots s = {USED, SLOTS, experts, weights, slots, slot_row, first, gate};
    k_sort_slots(k, &s, EXPERTS, ROWS);
    ck_assert_mem_eq(first, ((uint32_t[]){0, 1, 4, 4, 6}), sizeof(first));
    ck_assert_mem_eq(slots, ((uint32_t[]){4, 1, 6, 2, 0, 7, 5, 3, 8}), sizeof(slots));
    ck_assert_mem_eq(slot_row, ((uint32_t[]){1, 0, 1, 2, 0, 2}), sizeof(slot_row));
    ck_assert(weights[2] == 0.5f && weights[5] == 1 && weights[8] == 0);
    s.gate = NULL;
    k_sort_slots(k, &s, EXPERTS, ROWS);
    ck_assert(weights[2] == 1 && weights[5] == 1 && weights[8] == 1);
    kernels_close(k);
}
END_TEST

START_TEST(test_matrix_parts_may_be_transposed_or_interleaved)
{
    struct kernels *k = data_open(ISA_AUTO, 1);
    enum { N_OUT = 9, N_IN = 5 };
    uint16_t straight[2 * N_OUT * N_IN], mixed[2 * N_OUT * N_IN], bias[2 * N_OUT], mixed_bias[2 * N_OUT];
    for (uint32_t o = 0; o < 2 * N_OUT; o++) {
        bias[o] = mixed_bias[o % N_OUT * 2 + o / N_OUT] = (uint16_t)(0x3f80 + o);
        for (uint32_t i = 0; i < N_IN; i++)
            straight[o * N_IN + i] = mixed[i * 2 * N_OUT + o % N_OUT * 2 + o / N_OUT] =
                (uint16_t)(0x3f00 + data_bits(o, i) % 128);
    }
    for (enum compute compute = COMPUTE_F32; compute <= COMPUTE_BF16; compute++) {
        struct k_matrix_part part = {.data = straight,
                                     .type = NUM_BF16,
                                     .n_out = 2 * N_OUT,
                                     .bias = bias,
                                     .bias_type = NUM_BF16},
                             parts[2];
        for (uint32_t i = 0; i < 2; i++)
            parts[i] = (struct k_matrix_part){.data = mixed + i,
                                              .type = NUM_BF16,
                                              .n_out = N_OUT,
                                              .out_stride = 2,
                                              .in_stride = 2 * N_OUT,
                                              .bias = mixed_bias + i,
                                              .bias_type = NUM_BF16,
                                              .bias_stride = 2};
        struct k_matrix *a = NULL, *b = NULL;
        float *x = data_floats(1, 3 * N_IN, 1), y[3 * 2 * N_OUT], z[3 * 2 * N_OUT];
        ck_assert_int_eq(k_matrix_pack(k, &part, 1, N_IN, compute, WEIGHTS_AS_STORED, &a), TD_OK);
        ck_assert_int_eq(k_matrix_pack(k, parts, 2, N_IN, compute, WEIGHTS_AS_STORED, &b), TD_OK);
        k_linear(k, a, x, 3, y, false);
        k_linear(k, b, x, 3, z, false);
        data_equal(z, y, 3 * 2 * N_OUT, "interleaved");
        k_matrix_free(k, a);
        k_matrix_free(k, b);
        free(x);
    }
    kernels_close(k);
}
END_TEST

static double share(const float *logits, uint32_t e, const uint32_t *among, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += exp((double)logits[among ? among[i] : i]);
    return exp((double)logits[e]) / sum;
}

START_TEST(test_route_takes_the_best_experts_of_the_best_groups)
{
    struct kernels *k = data_open(ISA_AUTO, 2);
    enum { ROWS = 300, E = 24, USED = 4, STRIDE = 5 };
    float *logits = data_floats(5, ROWS * E, 4), weights[ROWS * STRIDE];
    uint32_t experts[ROWS * STRIDE];
    logits[0] = logits[1] = logits[7] = 9; /* equal logits: the lower index comes first */
    for (int mode = 0; mode < 4; mode++) {
        const struct k_router r = {E, USED, mode % 2 ? 6 : 1, mode % 2 ? 2 : 1, mode / 2, 2.5f};
        k_route(k, &r, logits, ROWS, STRIDE, experts, weights);
        ck_assert(experts[0] == 0 && experts[1] == 1);
        for (uint32_t t = 0; t < ROWS; t++) {
            const float *row = logits + t * E;
            const uint32_t *got = experts + t * STRIDE;
            bool open[E] = {false};
            for (uint32_t g = 0; g < r.n_groups; g++) { /* counts the better groups */
                uint32_t better = 0, size = E / r.n_groups;
                for (uint32_t h = 0; h < r.n_groups; h++)
                    better +=
                        row[k_argmax(row + h * size, size) + h * size] > row[k_argmax(row + g * size, size) + g * size];
                for (uint32_t e = 0; e < size; e++)
                    open[g * size + e] = better < r.n_groups_used;
            }
            for (uint32_t i = 0; i < USED; i++) {
                uint32_t larger = 0;
                for (uint32_t e = 0; e < E; e++)
                    larger += open[e] && row[e] > row[got[i]];
                ck_assert(open[got[i]] && (larger == i || t == 0));
                double want = 2.5 * (r.normalized ? share(row, got[i], got, USED) : share(row, got[i], NULL, E));
                ck_assert_double_eq_tol((double)weights[t * STRIDE + i], want, 1e-5);
            }
        }
    }
    free(logits);
    kernels_close(k);
}
END_TEST

START_TEST(test_combine_adds_weighted_rows_in_order)
{
    open_both(_i);
    enum { ROWS = 40, N = 3, DIM = 300 };
    float *x = data_floats(1, 50 * DIM, 2), *weights = data_floats(2, ROWS * N, 1), *y = data_floats(3, ROWS * DIM, 1);
    float *z = mem_dup(y, ROWS * DIM * 4), *in = mem_dup(y, ROWS * DIM * 4);
    uint32_t rows[ROWS * N];
    for (uint32_t i = 0; i < ROWS * N; i++)
        rows[i] = data_range(4, i, 0, 49);
    if (fast) {
        k_combine(plain, x, DIM, rows, weights, N, ROWS, y);
        k_combine(fast, x, DIM, rows, weights, N, ROWS, z);
        data_equal(z, y, ROWS * DIM, "combine");
        for (uint32_t t = 0; t < ROWS; t++) {
            float sum = 0;
            for (uint32_t i = 0; i < N; i++)
                sum = fmaf(weights[t * N + i], x[rows[t * N + i] * DIM + 7], sum);
            ck_assert(y[t * DIM + 7] == in[t * DIM + 7] + sum);
        }
    }
    free(x);
    free(weights);
    free(y);
    free(z);
    free(in);
    close_both();
}
END_TEST

/* Compares each head with the same numbers as a row, and interleaved pairs with the same numbers as
 * halves. */
START_TEST(test_heads_are_normed_and_rotated_each_by_itself)
{
    struct kernels *k = data_open(ISA_AUTO, 2);
    enum { ROWS = 9, HEADS = 3, DIM = 12, APART = 17, STRIDE = HEADS * APART + 2, HALF = 4 };
    float *x = data_floats(1, ROWS * STRIDE, 2), *w = data_floats(2, DIM, 1), *y = mem_dup(x, ROWS * STRIDE * 4);
    float table[ROWS * HALF * 2], one[DIM], halves[DIM], inv[4] = {1, 0.3f, 0.1f, 0.01f};
    double inv_freq[HALF];
    uint32_t at[ROWS];
    for (uint32_t i = 0; i < HALF; i++)
        inv_freq[i] = (double)inv[i];
    for (uint32_t t = 0; t < ROWS; t++)
        at[t] = ROWS - 1 - t;
    k_rope_table(inv_freq, HALF, ROWS, 1.5, table);
    k_head_norm(k, y, STRIDE, HEADS, APART, w, 1e-6f, ROWS, DIM);
    for (uint32_t t = 0; t < ROWS; t++)
        for (uint32_t h = 0; h < HEADS; h++) {
            k_rmsnorm(k, x + t * STRIDE + h * APART, w, 1e-6f, 1, DIM, one);
            data_equal(y + t * STRIDE + h * APART, one, DIM, "norm of a head");
            data_equal(y + t * STRIDE + h * APART + DIM, x + t * STRIDE + h * APART + DIM, APART - DIM,
                       "between heads");
        }
    memcpy(y, x, ROWS * STRIDE * 4);
    k_rope(k, y, STRIDE, HEADS, APART, &(struct k_rotary){table, 2 * HALF, true}, at, ROWS);
    for (uint32_t t = 0; t < ROWS; t++)
        for (uint32_t h = 0; h < HEADS; h++) {
            const float *head = x + t * STRIDE + h * APART, *got = y + t * STRIDE + h * APART;
            for (uint32_t i = 0; i < 2 * HALF; i++)
                halves[i % 2 * HALF + i / 2] = head[i];
            k_rope(k, halves, DIM, 1, DIM, &(struct k_rotary){table, 2 * HALF, false}, &at[t], 1);
            for (uint32_t i = 0; i < 2 * HALF; i++)
                ck_assert(got[i] == halves[i % 2 * HALF + i / 2]);
            data_equal(got + 2 * HALF, head + 2 * HALF, APART - 2 * HALF, "beyond the rotated");
        }
    free(x);
    free(w);
    free(y);
    kernels_close(k);
}
END_TEST

/* ------------------------------------------------------------------ opening */

START_TEST(test_sampling_equals_plain_whatever_is_drawn)
{
    open_both(_i);
    enum { N = 20003, ROWS = 70 };
    float *x = data_floats(5, (size_t)N * ROWS, 3);
    struct k_sampled a[ROWS], b[ROWS];
    struct k_draw draws[ROWS];
    for (uint32_t r = 0; r < ROWS; r++) {
        float *row = x + (size_t)r * N;
        row[17 + r] = row[500 + r] = r % 2 ? 4 : 12;
        for (uint32_t i = 0; r % 3 == 0 && i < N; i++)
            row[i] = (float)(int)(row[i] * 4) / 4; /* makes many logits equal */
        draws[r] = data_draw(r);
    }
    x[3] = NAN;
    for (uint32_t i = 0; i < N; i++)
        x[1 * N + i] = i == 9 ? INFINITY : 0;
    for (uint32_t i = 0; i < N; i++)
        x[8 * N + i] = -INFINITY;
    for (uint32_t i = 0; i < N; i++)
        x[16 * N + i] = i == 77 ? 1 : NAN;
    if (fast) {
        k_sample_rows(plain, x, N, ROWS, draws, a);
        k_sample_rows(fast, x, N, ROWS, draws, b);
        data_sampled_equal(b, a, ROWS);
        ck_assert_uint_eq(a[0].id, 17); /* greedy: the lowest of equal ids */
        ck_assert_uint_eq(a[1].id, 9);
        ck_assert_uint_eq(a[8].id, 0);
        ck_assert_uint_eq(a[16].id, 77);
        for (uint32_t r = 0; r < ROWS; r++)
            ck_assert_int_eq(!isfinite(a[r].logsumexp), r == 0 || r == 1 || r == 8 || r == 16);
    }
    free(x);
    close_both();
}
END_TEST

START_TEST(test_open_names_what_it_uses)
{
    static const char *const NAMES[] = {"", "plain", "avx2", "avx512"};
    open_both(_i);
    if (fast && BACKENDS[_i].isa != ISA_AUTO)
        ck_assert(!strncmp(kernels_isa_name(fast), NAMES[BACKENDS[_i].isa], strlen(NAMES[BACKENDS[_i].isa])));
    if (fast && BACKENDS[_i].n_threads)
        ck_assert_uint_eq(kernels_n_threads(fast), BACKENDS[_i].n_threads);
    const struct kernels_config cpu = {.device = DEVICE_CPU}, cuda = {.device = DEVICE_CUDA},
                                any = {.device = DEVICE_CUDA, .any_order = true};
    ck_assert_str_ne(kernels_numerics(&cpu, COMPUTE_F32), kernels_numerics(&cpu, COMPUTE_BF16));
    ck_assert_str_ne(kernels_numerics(&cpu, COMPUTE_BF16), kernels_numerics(&cuda, COMPUTE_BF16));
    ck_assert_str_ne(kernels_numerics(&cuda, COMPUTE_BF16), kernels_numerics(&any, COMPUTE_BF16));
    ck_assert_str_eq(kernels_numerics(&cuda, COMPUTE_F32), kernels_numerics(&any, COMPUTE_F32));
    close_both();
}
END_TEST

START_TEST(test_open_refuses_nonsense)
{
    struct kernels *k = NULL;
    struct td_error error;
    struct kernels_config config = {.isa = (enum kernels_isa)77};
    ck_assert_int_eq(kernels_open(&config, &k, &error), TD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "isa"));
    config = (struct kernels_config){.n_threads = 100000};
    ck_assert_int_eq(kernels_open(&config, &k, &error), TD_ERR_INVALID);
    ck_assert_ptr_null(k);
    kernels_close(NULL);
}
END_TEST

/* Many small operations in a row, with pauses in which the threads fall asleep: no operation may hang or lose
 * a piece. */
START_TEST(test_pool_survives_many_operations)
{
    struct kernels *k = data_open(ISA_AUTO, 4);
    enum { N_ROWS = 64, DIM = 2048 };
    float *x = data_floats(1, N_ROWS * DIM, 1), *w = data_floats(2, DIM, 1), *y = mem_array(N_ROWS * DIM, 4),
          *z = mem_array(N_ROWS * DIM, 4);
    k_rmsnorm(k, x, w, 1e-5f, N_ROWS, DIM, z);
    for (int i = 0; i < 300; i++) {
        memset(y, 0, N_ROWS * DIM * 4);
        k_rmsnorm(k, x, w, 1e-5f, N_ROWS, DIM, y);
        ck_assert_mem_eq(y, z, N_ROWS * DIM * 4);
    }
    kernels_close(k);
    free(x);
    free(w);
    free(y);
    free(z);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kernels");
    TCase *t = tcase_create("kernels");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, test_linear_equals_plain_for_any_shape, 0, N_BACKENDS);
    tcase_add_loop_test(t, test_linear_equals_plain_beyond_a_cache_block, 0, N_BACKENDS);
    tcase_add_loop_test(t, test_linear_bf16_equals_plain_at_the_edges_of_the_range, 0, N_BACKENDS);
    tcase_add_loop_test(t, test_linear_bf16_equals_plain_for_random_bits, 0, N_BACKENDS);
    tcase_add_loop_test(t, test_linear_row_is_the_same_alone_and_in_a_batch, 1, N_BACKENDS);
    tcase_add_test(t, test_matrix_pack_refuses_empty_shapes);
    tcase_add_loop_test(t, test_elementwise_equals_plain_for_any_shape, 0, N_BACKENDS);
    tcase_add_loop_test(t, test_embed_equals_plain_for_every_type, 0, N_BACKENDS);
    tcase_add_loop_test(t, test_rope_rotates_only_its_heads, 0, N_BACKENDS);
    tcase_add_loop_test(t, test_attention_equals_plain_for_any_shape, 0, N_BACKENDS);
    tcase_add_loop_test(t, test_attention_by_ranges_of_heads_equals_all_heads, 0, N_BACKENDS);
    tcase_add_loop_test(t, test_attention_row_is_the_same_in_any_chunk_and_batch, 1, N_BACKENDS);
    tcase_add_loop_test(t, test_a_stack_gives_what_linear_gives, 1, N_BACKENDS);
    tcase_add_test(t, test_slots_are_sorted_by_expert_and_rows_stay_in_order);
    tcase_add_test(t, test_matrix_parts_may_be_transposed_or_interleaved);
    tcase_add_test(t, test_route_takes_the_best_experts_of_the_best_groups);
    tcase_add_loop_test(t, test_combine_adds_weighted_rows_in_order, 0, N_BACKENDS);
    tcase_add_test(t, test_heads_are_normed_and_rotated_each_by_itself);
    tcase_add_loop_test(t, test_sampling_equals_plain_whatever_is_drawn, 0, N_BACKENDS);
    tcase_add_loop_test(t, test_open_names_what_it_uses, 0, N_BACKENDS);
    tcase_add_test(t, test_open_refuses_nonsense);
    tcase_add_test(t, test_pool_survives_many_operations);
    suite_add_tcase(s, t);
    return data_main(s);
}
