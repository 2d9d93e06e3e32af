/* Exchanges between ranks, and copies of parts of host memory. */
#include "base/thread.h"
#include "tests/kernels/device.h"

enum { RANKS = 3, ROUNDS = 40, MAX_ROWS = 70 };

/* First column of each rank; a rank may have no column. */
static const uint32_t SHARES[][RANKS + 1] = {{0, 5, 70, 130}, {0, 33, 33, 40}, {0, 64, 128, 192}, {0, 1, 2, 3}};
enum { N_SHARES = 4, WIDEST = 192 };

struct meeting {
    struct kernels *ranks[RANKS];
    struct k_group *group;
};

/* One thread's rank, and the sum of everything that it has gathered. */
struct member {
    struct meeting *meeting;
    uint32_t rank;
    float *sum; /* [MAX_ROWS * WIDEST] host */
};

static uint32_t rows_of(uint32_t round)
{
    return (uint32_t[]){1, 7, MAX_ROWS, 2, 0}[round % 5];
}

static uint32_t to_of(uint32_t round)
{
    return round % 3 == 2 ? round % RANKS : K_EVERY_RANK;
}

static float number(uint32_t round, uint32_t row, uint32_t column)
{
    return (float)(round * 1000 + row * 13 + column);
}

/* Does what a rank of a model does: it writes its columns into two places in turn, and overwrites a place as
 * soon as one more gather has been queued after that of the place. */
static void *gather_all(void *arg)
{
    struct member *m = arg;
    struct kernels *k = m->meeting->ranks[m->rank];
    float *host = mem_array(MAX_ROWS * WIDEST, sizeof(*host));
    void *mine[2], *all = alloc(k, host, MAX_ROWS * WIDEST * sizeof(float)),
                   *sum = alloc(k, host, MAX_ROWS * WIDEST * sizeof(float));
    for (int i = 0; i < 2; i++)
        mine[i] = alloc(k, host, MAX_ROWS * WIDEST * sizeof(float));
    for (uint32_t round = 0; round < ROUNDS; round++) {
        const uint32_t *first = SHARES[round % N_SHARES];
        uint32_t n = first[m->rank + 1] - first[m->rank], n_rows = rows_of(round), to = to_of(round);
        for (uint32_t row = 0; row < n_rows; row++)
            for (uint32_t c = 0; c < n; c++)
                host[row * n + c] = number(round, row, first[m->rank] + c);
        k_write(k, mine[round % 2], host, (size_t)n_rows * n * sizeof(*host));
        bool takes = to == K_EVERY_RANK || to == m->rank;
        k_gather(m->meeting->group, m->rank, first, to, n_rows, mine[round % 2], takes ? all : NULL);
        if (takes)
            k_add(k, all, (size_t)n_rows * first[RANKS], sum);
    }
    k_read(k, m->sum, sum, MAX_ROWS * WIDEST * sizeof(float));
    k_finish(k);
    k_free(k, mine[0]);
    k_free(k, mine[1]);
    k_free(k, all);
    k_free(k, sum);
    free(host);
    return NULL;
}

START_TEST(test_gather_gives_every_column_to_who_asks)
{
    const struct kernels_config config = {.device = DEVICES[_i].device, .n_threads = 4};
    struct meeting meeting;
    struct member members[RANKS];
    pthread_t threads[RANKS];
    struct td_error e = {0};
    ck_assert_msg(!kernels_open_ranks(&config, RANKS, ranks_share_device(), meeting.ranks, &e), "%s", e.text);
    meeting.group = k_group_open(meeting.ranks, RANKS);
    const char *transport = k_group_transport(meeting.group);
    if (DEVICES[_i].device == DEVICE_CPU || ranks_share_device())
        ck_assert_str_eq(transport, DEVICES[_i].device == DEVICE_CPU ? "memory" : "copies");
    for (uint32_t i = 0; i < RANKS; i++) {
        members[i] = (struct member){&meeting, i, mem_array(MAX_ROWS * WIDEST, sizeof(float))};
        threads[i] = thread_start("rank", gather_all, &members[i]);
    }
    for (uint32_t i = 0; i < RANKS; i++)
        pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < RANKS; i++) {
        float *want = mem_array(MAX_ROWS * WIDEST, sizeof(float));
        for (uint32_t round = 0; round < ROUNDS; round++) {
            uint32_t width = SHARES[round % N_SHARES][RANKS];
            for (uint32_t j = 0; j < rows_of(round) * width; j++)
                if (to_of(round) == K_EVERY_RANK || to_of(round) == i)
                    want[j] += number(round, j / width, j % width);
        }
        data_equal(members[i].sum, want, MAX_ROWS * WIDEST, "gathered");
        free(want);
        free(members[i].sum);
    }
    k_group_close(meeting.group);
    kernels_close_ranks(meeting.ranks, RANKS);
}
END_TEST

START_TEST(test_ranks_share_out_the_threads)
{
    const struct kernels_config config = {.device = DEVICES[_i].device, .n_threads = 7};
    struct kernels *ranks[RANKS];
    struct td_error e = {0};
    if (config.device != DEVICE_CPU)
        return;
    ck_assert(!kernels_open_ranks(&config, RANKS, false, ranks, &e));
    for (uint32_t i = 0; i < RANKS; i++)
        ck_assert_uint_eq(kernels_n_threads(ranks[i]), 2);
    kernels_close_ranks(ranks, RANKS);
    ck_assert_int_eq(kernels_open_ranks(&config, 0, false, ranks, &e), TD_ERR_INVALID);
    ck_assert_int_eq(kernels_open_ranks(&config, K_MAX_RANKS + 1, false, ranks, &e), TD_ERR_INVALID);
}
END_TEST

/* Pieces of an array are packed, doubled, and read back asynchronously. The host's bytes between them do not
 * change. */
START_TEST(test_pieces_of_the_host_are_packed_and_come_back)
{
    static const struct k_pieces PIECES[] = {{12, 40, 50},  {4096, 10000, 30}, {400000, 800000, 13},
                                             {64, 64, 100}, {20, 20, 1},       {8, 24, 0}};
    open_exact(_i);
    struct kernels *k = sides[1];
    for (size_t i = 0; i < sizeof(PIECES) / sizeof(PIECES[0]); i++)
        for (int is_mapped = 0; is_mapped < 2; is_mapped++) {
            struct k_pieces p = PIECES[i];
            size_t n = (p.stride_bytes * p.n + 64) / sizeof(float), part = p.piece_bytes * p.n / sizeof(float);
            float *x = data_floats(i, n, 1), *back = mem_dup(x, n * sizeof(*x)), *want = mem_dup(x, n * sizeof(*x));
            void *packed = NULL, *mapped = NULL;
            if (is_mapped)
                ck_assert_int_eq(k_map_part(k, back, n * sizeof(*x), p.piece_bytes * p.n, &mapped), TD_OK);
            ck_assert_int_eq(k_alloc(k, part * sizeof(float) + 64, &packed), TD_OK);
            k_write_pieces(k, packed, x, &p);
            k_add(k, packed, part, packed);
            k_read_pieces_aside(k, back, packed, &p);
            k_finish(k);
            for (uint32_t j = 0; j < p.n; j++)
                for (size_t c = 0; c < p.piece_bytes / sizeof(float); c++)
                    want[j * p.stride_bytes / sizeof(float) + c] *= 2;
            data_equal(back, want, n, "pieces");
            k_unmap(k, mapped);
            k_free(k, packed);
            free(x);
            free(back);
            free(want);
        }
    close_device();
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {test_gather_gives_every_column_to_who_asks, test_ranks_share_out_the_threads,
                                  test_pieces_of_the_host_are_packed_and_come_back};
    return device_main("kernels_ranks", tests, sizeof(tests) / sizeof(tests[0]));
}
