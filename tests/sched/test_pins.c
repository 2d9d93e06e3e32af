/* Compares pins with a plain array of deadlines. */
#include <string.h>

#include "base/random.h"
#include "sched/pin_list.h"
#include "sched/pins.h"
#include "tests/tap.h"

enum { KEYS = 3000 };

struct model {
    uint64_t until_ns[KEYS], now_ns;
    uint32_t n_over;
};

static struct block_key key_of(uint64_t n)
{
    struct block_key k;
    uint64_t a = random_mix(n) << 8, b = n; /* hashes with equal low bits, so that runs of places form */
    memcpy(k.b, &a, 8);
    memcpy(k.b + 8, &b, 8);
    return k;
}

static void over(void *user, const struct block_key *key)
{
    struct model *m = user;
    uint64_t n;
    memcpy(&n, key->b + 8, 8);
    ck_assert_uint_lt(n, KEYS);
    ck_assert(m->until_ns[n] && m->until_ns[n] <= m->now_ns);
    m->until_ns[n] = 0;
    m->n_over++;
}

static void check(const struct pins *p, const struct model *m)
{
    uint32_t n = 0;
    for (uint64_t i = 0; i < KEYS; i++) {
        struct block_key k = key_of(i);
        ck_assert_int_eq(pins_has(p, &k), m->until_ns[i] > 0);
        n += m->until_ns[i] > 0;
    }
    ck_assert_uint_eq(p->n, n);
}

START_TEST(test_pins_are_what_was_said_and_end_when_they_are_over)
{
    struct pins p = {0};
    struct model m = {.now_ns = 1};
    for (uint64_t step = 0; step < 40000; step++) {
        uint64_t n = random_at((uint64_t)_i, 0, step) % KEYS, what = random_at((uint64_t)_i, 1, step) % 10;
        struct block_key k = key_of(n);
        if (what < 6) {
            uint64_t until = m.now_ns + 1 + random_at((uint64_t)_i, 2, step) % 5000;
            ck_assert(pins_keep(&p, &k, until));
            m.until_ns[n] = until > m.until_ns[n] ? until : m.until_ns[n];
        } else if (what < 8) {
            pins_drop(&p, &k);
            m.until_ns[n] = 0;
        } else {
            m.now_ns += random_at((uint64_t)_i, 3, step) % 10;
            pins_expire(&p, m.now_ns, over, &m);
            for (uint32_t i = 0; step % 100 == 0 && i < KEYS; i++)
                ck_assert(!m.until_ns[i] || m.until_ns[i] > m.now_ns);
        }
        if (step % 1000 == 0)
            check(&p, &m);
    }
    ck_assert_uint_gt(m.n_over, 100);
    pins_free(&p);
    ck_assert_uint_eq(p.n, 0);
}
END_TEST

START_TEST(test_pins_are_bounded)
{
    struct pins p = {0};
    for (uint64_t i = 0; i < PINS_MAX; i++) {
        struct block_key k = key_of(i);
        ck_assert(pins_keep(&p, &k, 10));
    }
    struct block_key one_more = key_of(PINS_MAX), there = key_of(7);
    ck_assert(!pins_keep(&p, &one_more, 10));
    ck_assert(pins_keep(&p, &there, 20));
    pins_drop(&p, &there);
    ck_assert(pins_keep(&p, &one_more, 10));
    pins_free(&p);
}
END_TEST

static void sum(void *user, const struct pin_entry *e)
{
    *(uint32_t *)user += e->n;
}

START_TEST(test_pin_list_is_what_was_said_prompt_by_prompt)
{
    enum { PROMPTS = 500 };
    struct pin_list l = {0};
    struct block_key keys[PROMPTS + 4];
    uint32_t n_blocks = 0, seen = 0;
    for (uint32_t i = 0; i < PROMPTS + 4; i++)
        keys[i] = key_of(i);
    ck_assert_uint_eq(pin_list_remove(&l, keys, 1), 0);
    for (uint32_t i = 0; i < PROMPTS; i++) { /* each has 1 to 4 blocks; keys[i..] is a chain */
        ck_assert_int_eq(pin_list_add(&l, keys + i, 1 + i % 4, (1 + i) * NS_PER_S, UINT32_MAX), PIN_NEWS);
        n_blocks += 1 + i % 4;
    }
    ck_assert_uint_eq(l.n_blocks, n_blocks);
    pin_list_each(&l, sum, &seen);
    ck_assert_uint_eq(seen, n_blocks);
    ck_assert_uint_eq(pin_list_remove(&l, keys + 1, 2), 2 * NS_PER_S);
    ck_assert_uint_eq(pin_list_remove(&l, keys + 1, 2), 0); /* the same last block, but another length */
    ck_assert_uint_eq(l.n_blocks, n_blocks - 2);
    pin_list_expire(&l, 100 * NS_PER_S);
    ck_assert_uint_eq(l.n_entries, PROMPTS - 100);
    pin_list_expire(&l, PROMPTS * NS_PER_S);
    ck_assert_uint_eq(l.n_entries + l.n_blocks, 0);
    pin_list_free(&l);
}
END_TEST

START_TEST(test_pin_list_takes_the_longer_end_and_calls_a_moment_more_no_news)
{
    struct pin_list l = {0};
    struct block_key keys[] = {key_of(1), key_of(2), key_of(3)};
    ck_assert_int_eq(pin_list_add(&l, keys, 3, 10 * NS_PER_S, 4), PIN_NEWS);
    ck_assert_int_eq(pin_list_add(&l, keys, 3, 9 * NS_PER_S, 4), PIN_KNOWN);
    /* Adds the same pin twice. */
    ck_assert_int_eq(pin_list_add(&l, keys, 3, 10 * NS_PER_S + NS_PER_MS, 4), PIN_KNOWN);
    ck_assert_int_eq(pin_list_add(&l, keys, 3, 12 * NS_PER_S, 4), PIN_NEWS);
    ck_assert_int_eq(pin_list_add(&l, keys, 2, 12 * NS_PER_S, 4), PIN_NO_ROOM);
    ck_assert_int_eq(pin_list_add(&l, keys, 1, 12 * NS_PER_S, 4), PIN_NEWS);
    ck_assert_uint_eq(pin_list_remove(&l, keys, 3), 12 * NS_PER_S);
    pin_list_free(&l);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("pins");
    TCase *t = tcase_create("pins");
    tcase_set_timeout(t, 30);
    tcase_add_loop_test(t, test_pins_are_what_was_said_and_end_when_they_are_over, 0, 4);
    tcase_add_test(t, test_pins_are_bounded);
    tcase_add_test(t, test_pin_list_is_what_was_said_prompt_by_prompt);
    tcase_add_test(t, test_pin_list_takes_the_longer_end_and_calls_a_moment_more_no_news);
    suite_add_tcase(s, t);
    return tap_main(s);
}
