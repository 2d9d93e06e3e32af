/*
 * When room is collected in the directory, and when the owner is asked to evict (kvstore/ssd_room.c). The
 * test is the writer, so it decides what happens between two steps.
 */
#include <unistd.h>

#include "kvstore/ssd_internal.h"
#include "tests/kvstore/dirs.h"
#include "tests/tap.h"

enum { PAYLOAD_BYTES = 16 << 10, CAPACITY_BYTES = 8 << 20, NEED_BYTES = PAYLOAD_BYTES + BLOCK_HEADER_BYTES };
/* Blocks that do not fit, and blocks of which a collection makes room for many more. */
enum { N_TOO_MANY = CAPACITY_BYTES / PAYLOAD_BYTES + 16, N_DELETED = N_TOO_MANY / 4 };

static const struct log LOG = {.who = "test", .level = LOG_ERROR};

static struct block_key key_of(uint32_t i)
{
    struct block_key key = {{0}};
    memcpy(key.b, &i, sizeof(i));
    return key;
}

static struct temp_dir dir;
static struct clock real_clock;
static struct ssd *s;

static void setup(void)
{
    struct td_error e;
    dir = temp_dir_make();
    clock_init_real(&real_clock);
    const struct ssd_config c = {
        .dir = dir.store, .mode = SSD_SERVE, .capacity_bytes = CAPACITY_BYTES, .clock = &real_clock, .log = &LOG};
    ck_assert_msg(!ssd_open(&c, &s, &e), "%s", e.text);
}

static void teardown(void)
{
    ssd_close(s);
    temp_dir_remove(&dir);
}

/* Puts blocks without asking for room. */
static void overfill(void)
{
    static uint8_t payload[PAYLOAD_BYTES];
    const uint8_t header[BLOCK_HEADER_BYTES] = {0};
    for (uint32_t i = 0; i < N_TOO_MANY; i++) {
        struct block_key key = key_of(i);
        ck_assert_int_eq(ssd_put(s, &key, header, payload, sizeof(payload), false), TD_OK);
    }
    ck_assert_int_eq(ssd_sync(s), TD_OK);
    ssd_measure(s);
}

static void delete_some(void)
{
    for (uint32_t i = 0; i < N_DELETED; i++) {
        struct block_key key = key_of(i);
        ck_assert_int_eq(ssd_delete(s, &key), TD_OK);
    }
}

/* Until the thread has carried out its round. The writer has not seen it yet. */
static void await_round(void)
{
    for (bool is_over = false; !is_over; usleep(1000)) {
        pthread_mutex_lock(&s->room.lock);
        is_over = s->room.round == ROOM_IDLE;
        pthread_mutex_unlock(&s->room.lock);
    }
}

/* As the writer asks when it has a block. */
static enum td_status ask(uint64_t *over_out)
{
    enum td_status status;
    while ((status = ssd_make_room(s, NEED_BYTES, over_out)) == TD_NOT_YET)
        ;
    return status;
}

START_TEST(test_ssd_room_of_what_was_deleted_during_a_round_is_collected_before_anything_is_evicted)
{
    uint64_t over;
    overfill();
    ck_assert_int_eq(ssd_make_room(s, 0, &over), TD_NOT_YET); /* a round, for which nothing was deleted */
    await_round();
    delete_some();
    ck_assert_int_eq(ask(&over), TD_OK);
    ck_assert_uint_eq(over, 0);
}
END_TEST

START_TEST(test_ssd_room_that_no_collection_gives_must_be_evicted)
{
    uint64_t over;
    overfill();
    ck_assert_int_eq(ask(&over), TD_ERR_NO_SPACE);
    ck_assert_uint_gt(over, NEED_BYTES);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("kvstore ssd room");
    TCase *c = tcase_create("room");
    tcase_set_timeout(c, 60);
    tcase_add_checked_fixture(c, setup, teardown);
    tcase_add_test(c, test_ssd_room_of_what_was_deleted_during_a_round_is_collected_before_anything_is_evicted);
    tcase_add_test(c, test_ssd_room_that_no_collection_gives_must_be_evicted);
    suite_add_tcase(suite, c);
    return tap_main(suite);
}
