/* Compares a device's attention, and the pages it stores, with plain C on the CPU: exact attention bit for
 * bit, fast attention within bounds. For both, a row's bits are the same in any chunk and batch. */
#include "tests/kernels/device.h"

enum { MAX_SEQS = 4 };

struct kv_case {
    struct kv_layout layout;
    uint32_t n_heads, v_dim, window, n_seqs;
    uint32_t first_kv_head, n_kv_heads; /* 0: all KV heads of the layout */
    float cap;
    bool sinks;
    uint32_t end[MAX_SEQS], n_rows[MAX_SEQS]; /* the last n_rows rows of 0..end attend */
};

/* Sequences whose tokens are all stored, on both sides; the rows that attend are chosen later. */
struct kv_pair {
    const struct kv_case *c;
    struct twin arena, qkv, sinks;
    uint8_t **pages[2][MAX_SEQS];
    uint32_t first_row[MAX_SEQS], n_rows; /* qkv has a row for every token */
    uint32_t stride;
};

static uint32_t pages_of(const struct kv_case *c, uint32_t seq)
{
    return (c->end[seq] + c->layout.page_tokens - 1) / c->layout.page_tokens;
}

static struct k_attn attn_of(const struct kv_pair *p, int side, uint32_t first_row)
{
    const struct kv_case *c = p->c;
    const float *q = (const float *)p->qkv.at[side] + (size_t)first_row * p->stride;
    uint32_t n_kv_heads = c->n_kv_heads ? c->n_kv_heads : c->layout.n_kv_heads;
    struct k_attn a = {.layout = &c->layout,
                       .layer = c->layout.n_layers - 1,
                       .first_kv_head = c->first_kv_head,
                       .n_kv_heads = n_kv_heads,
                       .n_heads = c->n_heads,
                       .q = q};
    a.k = q + (size_t)c->n_heads * c->layout.head_dim;
    if (c->layout.kind != KV_LATENT)
        a.v = a.k + (size_t)n_kv_heads * c->layout.head_dim;
    a.q_stride = a.kv_stride = p->stride;
    a.v_dim = c->v_dim ? c->v_dim : c->layout.head_dim;
    a.scale = 1 / sqrtf((float)c->layout.head_dim);
    a.cap = c->cap;
    a.window = c->window;
    a.sinks = c->sinks ? p->sinks.at[side] : NULL;
    return a;
}

static void store_all(struct kv_pair *p, int side)
{
    struct k_attn_seq seqs[MAX_SEQS];
    for (uint32_t s = 0; s < p->c->n_seqs; s++)
        seqs[s] = (struct k_attn_seq){
            .first_row = p->first_row[s], .n_rows = p->c->end[s], .first_pos = 0, .pages = p->pages[side][s]};
    struct k_attn a = attn_of(p, side, 0);
    a.seqs = seqs;
    a.n_seqs = p->c->n_seqs;
    k_step(sides[side]);
    k_put_seqs(sides[side], seqs, a.n_seqs, p->c->layout.page_tokens);
    k_kv_store(sides[side], &a);
    k_finish(sides[side]);
}

static struct kv_pair kv_open(const struct kv_case *c, uint64_t seed)
{
    struct kv_pair p = {.c = c, .stride = (c->n_heads + 2 * c->layout.n_kv_heads) * c->layout.head_dim + 8};
    uint32_t n_pages = 0;
    for (uint32_t s = 0; s < c->n_seqs; s++) {
        p.first_row[s] = p.n_rows;
        p.n_rows += c->end[s];
        n_pages += pages_of(c, s);
    }
    size_t page_bytes = kv_layout_page_bytes(&c->layout);
    uint8_t *nans = mem_array(n_pages, page_bytes);
    memset(nans, 0xff, n_pages * page_bytes);
    p.arena = twin_of(nans, n_pages * page_bytes);
    p.qkv = twin_floats(seed, (size_t)p.n_rows * p.stride, 2);
    p.sinks = twin_floats(seed + 1, c->n_heads, 3);
    for (int side = 0; side < 2; side++) {
        for (uint32_t s = 0, from = n_pages; s < c->n_seqs; s++) {
            p.pages[side][s] = mem_array(pages_of(c, s), sizeof(uint8_t *));
            for (uint32_t i = 0; i < pages_of(c, s); i++) /* pages in random order */
                p.pages[side][s][i] = (uint8_t *)p.arena.at[side] + --from * page_bytes;
        }
        store_all(&p, side);
    }
    free(nans);
    return p;
}

static void kv_close(struct kv_pair *p)
{
    for (int side = 0; side < 2; side++)
        for (uint32_t s = 0; s < p->c->n_seqs; s++)
            free(p->pages[side][s]);
    twin_free(&p->arena);
    twin_free(&p->qkv);
    twin_free(&p->sinks);
}

/* Lets rows of some sequences attend, n_rows of each up to position end. out [all of their
 * rows][n_heads][v_dim]. Returns the number of rows. */
struct chunk {
    uint32_t seq, end, n_rows;
};

static uint32_t attend(const struct kv_pair *p, int side, const struct chunk *chunks, uint32_t n, float *out)
{
    struct k_attn_seq seqs[MAX_SEQS];
    struct kernels *k = sides[side];
    uint32_t n_rows = 0, width = p->c->n_heads * p->c->layout.head_dim;
    for (uint32_t i = 0; i < n; i++) {
        const struct chunk *c = &chunks[i];
        seqs[i] = (struct k_attn_seq){.first_row = n_rows, .n_rows = c->n_rows, .first_pos = c->end - c->n_rows};
        seqs[i].pages = p->pages[side][c->seq];
        n_rows += c->n_rows;
    }
    float *all = twin_read(&p->qkv, side), *q = mem_array(n_rows, width * sizeof(float));
    for (uint32_t i = 0, row = 0; i < n; i++)
        for (uint32_t t = chunks[i].end - chunks[i].n_rows; t < chunks[i].end; t++, row++)
            memcpy(q + (size_t)row * width, all + (size_t)(p->first_row[chunks[i].seq] + t) * p->stride,
                   width * sizeof(float));
    struct k_attn a = attn_of(p, side, 0);
    size_t out_bytes = (size_t)n_rows * a.n_heads * a.v_dim * sizeof(float);
    void *q_at = alloc(k, q, (size_t)n_rows * width * sizeof(float)), *out_at = NULL;
    ck_assert_int_eq(k_alloc(k, out_bytes, &out_at), TD_OK);
    a.q = q_at;
    a.q_stride = width;
    a.out = out_at;
    a.seqs = seqs;
    a.n_seqs = n;
    bool fast = kernels_config(k)->compute == COMPUTE_BF16;
    struct product follows = {0};
    if (fast)
        follows = product_open(k, n_rows, a.n_heads * a.v_dim);
    k_step(k);
    k_put_seqs(k, seqs, n, p->c->layout.page_tokens);
    k_attention(k, &a);
    if (fast)
        product_check(k, &follows, out_at, n_rows);
    k_read(k, out, out_at, out_bytes);
    k_finish(k);
    k_free(k, q_at);
    k_free(k, out_at);
    free(all);
    free(q);
    return n_rows;
}

static size_t out_floats(const struct kv_case *c)
{
    return (size_t)c->n_heads * (c->v_dim ? c->v_dim : c->layout.head_dim);
}

/* Drops pages that no row can see. */
static void drop_unseen(struct kv_pair *p, const struct kv_case *c)
{
    for (int side = 0; side < 2; side++)
        for (uint32_t s = 0; s < c->n_seqs && c->window; s++) {
            uint32_t first = c->end[s] - c->n_rows[s];
            uint32_t seen = first >= c->window ? (first - c->window + 1) / c->layout.page_tokens : 0;
            memset(p->pages[side][s], 0, seen * sizeof(uint8_t *));
        }
}

/* exact: the bits must be equal; else the numbers must be near. */
static void check_attention(const struct kv_case *c, uint64_t seed, bool exact)
{
    struct kv_pair p = kv_open(c, seed);
    twin_same_bytes(&p.arena, "pages");
    drop_unseen(&p, c);
    struct chunk chunks[MAX_SEQS];
    uint32_t n_rows = 0;
    for (uint32_t s = 0; s < c->n_seqs; s++) {
        chunks[s] = (struct chunk){s, c->end[s], c->n_rows[s]};
        n_rows += c->n_rows[s];
    }
    size_t width = out_floats(c), n = n_rows * width;
    float *want = mem_array(n, sizeof(float)), *got = mem_array(n, sizeof(float));
    attend(&p, 0, chunks, c->n_seqs, want);
    attend(&p, 1, chunks, c->n_seqs, got);
    if (exact)
        data_equal(got, want, n, "attention");
    for (size_t i = 0; i < n; i++) {
        float largest = 0;
        for (size_t j = i / width * width; j < (i / width + 1) * width; j++)
            largest = fmaxf(largest, fabsf(want[j]));
        if (!(fabsf(got[i] - want[i]) <= 2e-2f * largest))
            ck_abort_msg("attention: [%zu] %g is far from %g (of %g)", i, (double)got[i], (double)want[i],
                         (double)largest);
    }
    free(want);
    free(got);
    kv_close(&p);
}

static struct kv_case random_kv(uint64_t s, bool tensor_cores)
{
    static const uint32_t DIMS[] = {64, 96, 128, 256};
    struct kv_case c = {.layout = {.dtype = tensor_cores ? NUM_BF16 + data_bits(s, 1) % 2 : 1 + data_bits(s, 1) % 4}};
    c.layout.n_layers = data_range(s, 2, 1, 3);
    c.layout.n_kv_heads = data_range(s, 3, 1, 3);
    c.layout.head_dim = tensor_cores ? DIMS[s % 4] : data_range(s, 4, 1, 150);
    c.layout.page_tokens = s % 2 ? 16 : data_range(s, 5, 1, 40);
    c.n_heads = c.layout.n_kv_heads * data_range(s, 6, 1, 5);
    if (s % 5 == 4) {
        c.layout.kind = KV_LATENT;
        c.layout.n_kv_heads = 1;
        c.layout.head_dim = tensor_cores ? 576 : c.layout.head_dim;
        c.v_dim = tensor_cores ? 512 : data_range(s, 7, 1, c.layout.head_dim);
    } else if (s % 5 == 2) { /* pages also hold heads of other ranks */
        c.n_kv_heads = c.layout.n_kv_heads;
        c.first_kv_head = data_range(s, 12, 0, 2);
        c.layout.n_kv_heads += c.first_kv_head + data_range(s, 13, 0, 2);
    }
    c.window = s % 3 == 1 ? data_range(s, 8, 1, 60) : 0;
    c.cap = s % 4 == 1 ? 3 : 0;
    c.sinks = s % 4 >= 2;
    c.n_seqs = data_range(s, 9, 1, MAX_SEQS);
    for (uint32_t i = 0; i < c.n_seqs; i++) {
        c.end[i] = data_range(s, 20 + i, 1, i ? 50 : 150);
        c.n_rows[i] = data_bits(s, 30 + i) % 3 ? data_range(s, 40 + i, 1, c.end[i]) : 1;
    }
    return c;
}

START_TEST(test_attention_and_stored_pages_equal_plain)
{
    open_exact(_i);
    for (uint64_t s = 0; s < CASES; s++) {
        struct kv_case c = random_kv(s, false);
        check_attention(&c, s, true);
    }
    close_device();
}
END_TEST

START_TEST(test_fast_attention_is_near_plain)
{
    open_fast(_i);
    for (uint64_t s = 100; s < 100 + CASES / 4; s++) {
        struct kv_case c = random_kv(s, true);
        check_attention(&c, s, false);
    }
    close_device();
}
END_TEST

/* Sequences longer than the run of keys that a device sums by itself, with few rows and with many. */
START_TEST(test_fast_attention_is_near_plain_for_long_sequences)
{
    open_fast(_i);
    struct kv_case c = {
        .layout = {.dtype = NUM_BF16, .n_layers = 1, .n_kv_heads = 1, .head_dim = 64, .page_tokens = 16},
        .n_heads = 4,
        .n_seqs = 2,
        .end = {1300, 513},
        .n_rows = {1, 1}};
    check_attention(&c, 1, false);
    c.n_rows[0] = 70;
    c.window = 600;
    check_attention(&c, 2, false);
    c.layout.head_dim = 96;
    check_attention(&c, 3, false);
    close_device();
}
END_TEST

/* Shapes that a device's fast attention may leave to the exact one. */
START_TEST(test_attention_of_a_bf16_backend_takes_any_layout)
{
    open_fast(_i);
    for (uint64_t s = 0; s < CASES / 4; s++) {
        struct kv_case c = random_kv(s, false);
        check_attention(&c, s, false);
    }
    close_device();
}
END_TEST

/* Compares a sequence as one chunk with parts of it beside other sequences, and with rows one by one. */
static void check_chunks(const struct kv_case *c, uint64_t seed)
{
    struct kv_pair p = kv_open(c, seed);
    size_t width = out_floats(c);
    float *whole = mem_array(c->end[0] * width, sizeof(float));
    float *part = mem_array((c->end[0] + 5) * width, sizeof(float));
    attend(&p, 1, &(struct chunk){0, c->end[0], c->end[0]}, 1, whole);
    for (uint32_t end = 1, n = 1; end <= c->end[0]; n = n * 3 % 61 + 1, end += 7 + n) {
        uint32_t n_rows = n < end ? n : end;
        const struct chunk chunks[] = {{1, c->end[1], 3}, {0, end, n_rows}, {2, c->end[2], 1}};
        attend(&p, 1, chunks, 3, part);
        data_equal(part + 3 * width, whole + (end - n_rows) * width, n_rows * width, "attention of a chunk");
        attend(&p, 1, &(struct chunk){0, end, 1}, 1, part);
        data_equal(part, whole + (end - 1) * width, width, "attention of one row");
    }
    free(whole);
    free(part);
    kv_close(&p);
}

static struct kv_case chunk_case(enum num_type type, uint32_t head_dim, int mode)
{
    struct kv_case c = {
        .layout = {.dtype = type, .n_layers = 1, .n_kv_heads = 2, .head_dim = head_dim, .page_tokens = 16},
        .n_heads = 6,
        .n_seqs = 3,
        .end = {130, 70, 33},
        .window = mode % 2 ? 40 : 0,
        .sinks = mode % 3 == 0,
        .cap = mode % 3 == 1 ? 3 : 0};
    return c;
}

START_TEST(test_attention_row_is_the_same_in_any_chunk_and_batch)
{
    open_exact(_i);
    for (int mode = 0; mode < 4; mode++) {
        struct kv_case c = chunk_case(NUM_F16, 24, mode);
        check_chunks(&c, 1);
    }
    close_device();
}
END_TEST

START_TEST(test_fast_attention_row_is_the_same_in_any_chunk_and_batch)
{
    open_fast(_i);
    static const uint32_t DIMS[] = {64, 64, 128, 128, 96, 96};
    for (int mode = 0; mode < 12; mode++) {
        struct kv_case c = chunk_case(mode < 6 ? NUM_BF16 : NUM_F8_E4M3, DIMS[mode % 6], mode % 6);
        check_chunks(&c, 1);
    }
    struct kv_case latent = chunk_case(NUM_BF16, 96, 0);
    latent.layout.kind = KV_LATENT;
    latent.layout.n_kv_heads = 1;
    latent.v_dim = 64;
    check_chunks(&latent, 2);
    latent.layout.head_dim = 576;
    latent.v_dim = 512;
    latent.end[0] = 600;
    check_chunks(&latent, 5);
    struct kv_case large = chunk_case(NUM_BF16, 64, 2);
    large.end[0] = 1100;
    check_chunks(&large, 3);
    /* With so many heads a device is busy enough to take runs of keys one after the other. */
    struct kv_case many = chunk_case(NUM_BF16, 64, 2);
    many.layout.n_kv_heads = 16;
    many.n_heads = 64;
    many.end[0] = 560;
    check_chunks(&many, 4);
    close_device();
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {test_attention_and_stored_pages_equal_plain,
                                  test_fast_attention_is_near_plain,
                                  test_fast_attention_is_near_plain_for_long_sequences,
                                  test_attention_of_a_bf16_backend_takes_any_layout,
                                  test_attention_row_is_the_same_in_any_chunk_and_batch,
                                  test_fast_attention_row_is_the_same_in_any_chunk_and_batch};
    return device_main("kernels_device_attention", tests, sizeof(tests) / sizeof(tests[0]));
}
