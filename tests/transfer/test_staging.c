/* The staging ring, over plain memory and over a device whose copies take their time and fail when told to. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "tests/tap.h"
#include "transfer/staging.h"

enum { N = 4, BYTES = 4096, DEVICE_BYTES = 64 * BYTES, COPIES_MAX = 4096 };

/* A device that does a copy only when the test says so; addresses are offsets, so none of them is a pointer by chance. */
struct device {
    uint8_t memory[DEVICE_BYTES];
    struct {
        void *to;
        const void *from;
        size_t len;
        enum td_status status;
    } copies[COPIES_MAX];
    uint64_t n_begun, n_done;
    bool refuses, fails, has_no_memory;
    int n_allocs;
};

static struct device device;

static enum td_status slow_alloc(void *user, size_t len_bytes, void **out)
{
    struct device *d = user;
    if (d->has_no_memory)
        return TD_ERR_NO_MEMORY;
    d->n_allocs++;
    *out = mem_zalloc(len_bytes);
    return TD_OK;
}

static void slow_free(void *user, void *base, size_t len_bytes)
{
    (void)len_bytes;
    ((struct device *)user)->n_allocs--;
    free(base);
}

static enum td_status begin(struct device *d, void *to, const void *from, size_t len, uint64_t *ticket_out)
{
    if (d->refuses)
        return TD_ERR_DEVICE;
    ck_assert_uint_lt(d->n_begun, COPIES_MAX);
    d->copies[d->n_begun].to = to;
    d->copies[d->n_begun].from = from;
    d->copies[d->n_begun].len = len;
    d->copies[d->n_begun].status = d->fails ? TD_ERR_DEVICE : TD_OK;
    *ticket_out = d->n_begun++;
    return TD_OK;
}

static enum td_status slow_out(void *user, void *to, uint64_t from, size_t len, uint64_t *ticket_out)
{
    struct device *d = user;
    return begin(d, to, d->memory + from, len, ticket_out);
}

static enum td_status slow_in(void *user, uint64_t to, const void *from, size_t len, uint64_t *ticket_out)
{
    struct device *d = user;
    return begin(d, d->memory + to, from, len, ticket_out);
}

static enum td_status slow_poll(void *user, uint64_t ticket)
{
    struct device *d = user;
    return ticket < d->n_done ? d->copies[ticket].status : TD_NOT_YET;
}

static void device_do(uint64_t n)
{
    for (; n && device.n_done < device.n_begun; n--, device.n_done++)
        if (!device.copies[device.n_done].status)
            memcpy(device.copies[device.n_done].to, device.copies[device.n_done].from,
                   device.copies[device.n_done].len);
}

static const struct staging_ops SLOW = {&device, slow_alloc, slow_free, slow_out, slow_in, slow_poll};

struct record {
    uint32_t n, buffers[64];
    enum td_status status;
};

static void note(void *arg, uint32_t buffer, enum td_status status)
{
    struct record *r = arg;
    r->buffers[r->n++ % 64] = buffer;
    r->status = status;
}

static struct staging *open_ring(const struct staging_ops *ops)
{
    memset(&device, 0, sizeof(device));
    for (size_t i = 0; i < DEVICE_BYTES; i++)
        device.memory[i] = (uint8_t)random_mix(i);
    struct staging *s = NULL;
    const struct staging_config c = {.ops = ops, .n_buffers = N, .buffer_bytes = BYTES};
    ck_assert_int_eq(staging_open(&c, &s, NULL), TD_OK);
    ck_assert_uint_eq(staging_n_free(s), N);
    return s;
}

START_TEST(test_staging_bytes_go_out_and_in_again)
{
    struct staging *s = open_ring(_i ? &SLOW : &STAGING_PLAIN);
    uint64_t base = _i ? 0 : (uint64_t)(uintptr_t)device.memory;
    struct record out = {0}, in = {0};
    for (uint32_t part = 0; part < 16; part++) {
        ck_assert_int_eq(staging_out(s, base + part * BYTES, BYTES, note, &out), TD_OK);
        device_do(1);
        ck_assert(staging_progress(s));
        ck_assert_int_eq(out.status, TD_OK);
        uint32_t filled = out.buffers[part], landing;
        ck_assert_mem_eq(staging_bytes(s, filled), device.memory + part * BYTES, BYTES);
        ck_assert_int_eq(staging_take(s, &landing), TD_OK);
        ck_assert_uint_ne(landing, filled);
        memcpy(staging_bytes(s, landing), staging_bytes(s, filled), BYTES); /* the wire */
        staging_release(s, filled);
        ck_assert_int_eq(staging_in(s, landing, base + (32 + part) * BYTES, BYTES, note, &in), TD_OK);
        device_do(1);
        ck_assert(staging_progress(s));
        ck_assert_uint_eq(in.n, part + 1);
        ck_assert_uint_eq(staging_n_free(s), N);
    }
    ck_assert_mem_eq(device.memory, device.memory + 32 * BYTES, 16 * BYTES);
    staging_close(s);
}
END_TEST

START_TEST(test_staging_full_ring_is_busy_until_one_is_given_back)
{
    struct staging *s = open_ring(&SLOW);
    struct record r = {0};
    uint32_t buffer;
    for (uint32_t i = 0; i < N; i++)
        ck_assert_int_eq(staging_out(s, i * BYTES, BYTES, note, &r), TD_OK);
    ck_assert_int_eq(staging_out(s, 0, BYTES, note, &r), TD_BUSY);
    ck_assert_int_eq(staging_take(s, &buffer), TD_BUSY);
    ck_assert(!staging_progress(s)); /* the device has done nothing yet */
    device_do(2);
    ck_assert(staging_progress(s));
    ck_assert_uint_eq(r.n, 2);
    ck_assert_int_eq(staging_take(s, &buffer), TD_BUSY); /* copied out, but still to be sent */
    staging_release(s, r.buffers[0]);
    ck_assert_int_eq(staging_take(s, &buffer), TD_OK);
    ck_assert_uint_eq(buffer, r.buffers[0]);
    staging_release(s, buffer);
    staging_release(s, r.buffers[1]);
    device_do(N);
    while (staging_progress(s))
        ;
    ck_assert_uint_eq(r.n, N);
    staging_release(s, r.buffers[2]);
    staging_release(s, r.buffers[3]);
    staging_close(s);
}
END_TEST

START_TEST(test_staging_failed_copy_is_told_once_and_gives_its_buffer_back)
{
    struct staging *s = open_ring(&SLOW);
    struct record r = {0};
    uint32_t buffer;
    device.fails = true;
    ck_assert_int_eq(staging_out(s, 0, BYTES, note, &r), TD_OK);
    device_do(1);
    ck_assert(staging_progress(s) && !staging_progress(s));
    ck_assert_uint_eq(r.n, 1);
    ck_assert_int_eq(r.status, TD_ERR_DEVICE);
    ck_assert_uint_eq(staging_n_free(s), N);
    device.fails = false;
    device.refuses = true; /* not even begun: no callback, and nothing is lost */
    ck_assert_int_eq(staging_out(s, 0, BYTES, note, &r), TD_ERR_DEVICE);
    ck_assert_int_eq(staging_take(s, &buffer), TD_OK);
    ck_assert_int_eq(staging_in(s, buffer, 0, BYTES, note, &r), TD_ERR_DEVICE);
    staging_release(s, buffer);
    ck_assert_uint_eq(r.n, 1);
    ck_assert_uint_eq(staging_n_free(s), N);
    staging_close(s);
}
END_TEST

START_TEST(test_staging_close_waits_for_copies)
{
    struct staging *s = open_ring(&SLOW);
    struct record r = {0};
    uint32_t buffer;
    ck_assert_int_eq(staging_take(s, &buffer), TD_OK);
    memset(staging_bytes(s, buffer), 0x5a, BYTES);
    ck_assert_int_eq(staging_in(s, buffer, 7 * BYTES, BYTES, note, &r), TD_OK);
    device_do(1); /* done by the device, not told yet */
    staging_close(s);
    ck_assert_uint_eq(r.n, 1);
    ck_assert_uint_eq(device.memory[7 * BYTES], 0x5a);
    ck_assert_int_eq(device.n_allocs, 0);
}
END_TEST

START_TEST(test_staging_refuses_what_does_not_fit)
{
    struct staging *s = open_ring(&SLOW);
    struct td_error error = {""};
    ck_assert_int_eq(staging_out(s, 0, BYTES + 1, note, NULL), TD_ERR_INVALID);
    ck_assert_int_eq(staging_out(s, 0, 0, note, NULL), TD_ERR_INVALID);
    staging_close(s);
    struct staging_config c = {.ops = &SLOW, .n_buffers = 0, .buffer_bytes = BYTES};
    ck_assert_int_eq(staging_open(&c, &s, &error), TD_ERR_INVALID);
    c.n_buffers = 3;
    c.buffer_bytes = SIZE_MAX / 2;
    ck_assert_int_eq(staging_open(&c, &s, &error), TD_ERR_INVALID);
    device.has_no_memory = true;
    c.buffer_bytes = BYTES;
    ck_assert_int_eq(staging_open(&c, &s, &error), TD_ERR_NO_MEMORY);
    ck_assert(error.text[0]);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("staging");
    TCase *tc = tcase_create("staging");
    tcase_set_timeout(tc, 10);
    tcase_add_loop_test(tc, test_staging_bytes_go_out_and_in_again, 0, 2);
    tcase_add_test(tc, test_staging_full_ring_is_busy_until_one_is_given_back);
    tcase_add_test(tc, test_staging_failed_copy_is_told_once_and_gives_its_buffer_back);
    tcase_add_test(tc, test_staging_close_waits_for_copies);
    tcase_add_test(tc, test_staging_refuses_what_does_not_fit);
    suite_add_tcase(s, tc);
    return tap_main(s);
}
