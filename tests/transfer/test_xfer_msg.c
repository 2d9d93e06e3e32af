/* The messages: golden bytes, round trips, and random bytes. */
#include <stdlib.h>
#include <string.h>

#include "base/endian.h"
#include "base/random.h"
#include "proto/wire/checksum.h"
#include "tests/tap.h"
#include "transfer/xfer_msg.h"

static const struct xfer_id ID = {0x1122334455667788ull, 0x99aabbccddeeff00ull};
#define ID_BYTES 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x00, 0xff, 0xee, 0xdd, 0xcc, 0xbb, 0xaa, 0x99

#define CHECK_GOLDEN(out, n, ...)                                                                                      \
    do {                                                                                                               \
        static const uint8_t golden[] = {__VA_ARGS__};                                                                 \
        ck_assert_uint_eq(n, sizeof(golden));                                                                          \
        ck_assert_mem_eq(out, golden, sizeof(golden));                                                                 \
    } while (0)

START_TEST(test_xfer_msg_bytes_are_the_golden_ones)
{
    uint8_t out[WIRE_HEADER_MAX], mac[XFER_MSG_MAC_BYTES];
    struct xfer_msg_hello h = {
        .incarnation = 0x0102030405060708ull, .layout = {NUM_BF16, 32, 8, 128, 16}, .name = "p0"};
    for (uint8_t i = 0; i < XFER_MSG_NONCE_BYTES; i++)
        h.nonce[i] = i;
    CHECK_GOLDEN(out, xfer_msg_put_hello(out, &h), 1, 0, 3, 0, 2, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6,
                 7, 8, 9, 10, 11, 12, 13, 14, 15, 1, 0, 3, 0, 32, 0, 0, 0, 8, 0, 0, 0, 128, 0, 0, 0, 16, 0, 0, 0, 0, 0,
                 0, 0, 'p', '0');
    for (uint8_t i = 0; i < XFER_MSG_MAC_BYTES; i++)
        mac[i] = (uint8_t)(0xe0 + i);
    CHECK_GOLDEN(out, xfer_msg_put_auth(out, mac), 2, 0, 0, 0, 0, 0, 0, 0, 0xe0, 0xe1, 0xe2, 0xe3, 0xe4, 0xe5, 0xe6,
                 0xe7, 0xe8, 0xe9, 0xea, 0xeb, 0xec, 0xed, 0xee, 0xef, 0xf0, 0xf1, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7,
                 0xf8, 0xf9, 0xfa, 0xfb, 0xfc, 0xfd, 0xfe, 0xff);
    CHECK_GOLDEN(out, xfer_msg_put_heartbeat(out), 3, 0, 0, 0, 0, 0, 0, 0);
    CHECK_GOLDEN(out, xfer_msg_put_goodbye(out, 1, TD_ERR_AUTH), 4, 0, 1, 0, 0xe9, 0xff, 0xff, 0xff);
    CHECK_GOLDEN(out, xfer_msg_put_pull_open(out, ID, 5), 5, 0, 0, 0, 0, 0, 0, 0, ID_BYTES, 5, 0, 0, 0, 0, 0, 0, 0);
    struct xfer_msg_unit u = {
        .id = ID, .first = 7, .n = 2, .layer_begin = 3, .layer_end = 5, .generations = {9, 0x01020304}};
    CHECK_GOLDEN(out, xfer_msg_put_unit(out, MSG_ANNOUNCE, &u), 6, 0, 2, 0, 7, 0, 0, 0, ID_BYTES, 3, 0, 5, 0, 0, 0, 0,
                 0, 9, 0, 0, 0, 4, 3, 2, 1);
    u.part_layers = 0x0102;
    CHECK_GOLDEN(out, xfer_msg_put_unit(out, MSG_PULL, &u), 7, 0, 2, 0, 7, 0, 0, 0, ID_BYTES, 3, 0, 5, 0, 2, 1, 0, 0, 9,
                 0, 0, 0, 4, 3, 2, 1);
    CHECK_GOLDEN(out, xfer_msg_put_finish(out, ID, 300, "xy", 2), 8, 0, 2, 0, 0x2c, 1, 0, 0, ID_BYTES, 'x', 'y');
    struct xfer_msg_data d = {ID, 6, 0x0a0b0c0d, 1, 4, 0x1817161514131211ull};
    CHECK_GOLDEN(out, xfer_msg_put_data(out, &d), 9, 0, 0, 0, 6, 0, 0, 0, ID_BYTES, 1, 0, 4, 0, 0x0d, 0x0c, 0x0b, 0x0a,
                 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18);
    CHECK_GOLDEN(out, xfer_msg_put_refuse(out, ID, REFUSE_EXPIRED), 10, 0, 4, 0, 0, 0, 0, 0, ID_BYTES);
    CHECK_GOLDEN(out, xfer_msg_put_release(out, ID, TD_ERR_CANCELLED), 11, 0, 0, 0, 0xfc, 0xff, 0xff, 0xff, ID_BYTES);
    CHECK_GOLDEN(out, xfer_msg_put_user(out, 0x0201, 10, 4, "abc", 3), 12, 0, 1, 2, 10, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0,
                 'a', 'b', 'c');
}
END_TEST

START_TEST(test_xfer_msg_decode_gives_back_what_was_put)
{
    uint8_t out[WIRE_HEADER_MAX];
    struct xfer_msg m;
    struct xfer_msg_hello h = {.incarnation = 9, .layout = {NUM_F16, 2, 1, 64, 8}, .name = "decode-1"};
    ck_assert_int_eq(xfer_msg_decode(out, xfer_msg_put_hello(out, &h), &m, NULL), TD_OK);
    ck_assert_int_eq(m.type, MSG_HELLO);
    ck_assert_str_eq(m.hello.name, "decode-1");
    ck_assert_uint_eq(m.hello.layout.head_dim, 64);

    struct xfer_msg_unit u = {
        .id = ID, .first = 1000, .n = XFER_MSG_UNIT_PAGES, .layer_begin = 0, .layer_end = 80, .part_layers = 7};
    for (uint32_t i = 0; i < XFER_MSG_UNIT_PAGES; i++)
        u.generations[i] = i * i;
    ck_assert_int_eq(xfer_msg_decode(out, xfer_msg_put_unit(out, MSG_PULL, &u), &m, NULL), TD_OK);
    ck_assert_uint_eq(m.unit.first, u.first);
    ck_assert_uint_eq(m.unit.n, u.n);
    ck_assert_uint_eq(m.unit.layer_end, u.layer_end);
    ck_assert_uint_eq(m.unit.part_layers, 7);
    put_u16(out, MSG_ANNOUNCE); /* an ANNOUNCE has no parts */
    ck_assert_int_eq(xfer_msg_decode(out, 32 + 4 * XFER_MSG_UNIT_PAGES, &m, NULL), TD_ERR_PROTOCOL);
    ck_assert_mem_eq(m.unit.generations, u.generations, sizeof(u.generations));

    ck_assert_int_eq(xfer_msg_decode(out, xfer_msg_put_goodbye(out, 0, TD_ERR_VERSION), &m, NULL), TD_OK);
    ck_assert_int_eq(m.goodbye.status, TD_ERR_VERSION);
    ck_assert_int_eq(xfer_msg_decode(out, xfer_msg_put_release(out, ID, TD_OK), &m, NULL), TD_OK);
    ck_assert_int_eq(m.release.status, TD_OK);
    ck_assert_uint_eq(m.release.id.counter, ID.counter);
    ck_assert_int_eq(xfer_msg_decode(out, xfer_msg_put_user(out, 3, 0, 0, NULL, 0), &m, NULL), TD_OK);
    ck_assert_uint_eq(m.user.len, 0);
}
END_TEST

START_TEST(test_xfer_msg_other_version_is_told_by_name)
{
    uint8_t out[WIRE_HEADER_MAX];
    struct xfer_msg m;
    struct td_error error = {""};
    struct xfer_msg_hello h = {.incarnation = 9, .layout = {NUM_F16, 2, 1, 64, 8}, .name = "x"};
    uint32_t n = xfer_msg_put_hello(out, &h);
    put_u16(out + 2, XFER_MSG_VERSION + 1);
    ck_assert_int_eq(xfer_msg_decode(out, n, &m, &error), TD_ERR_VERSION);
    ck_assert_ptr_nonnull(strstr(error.text, "version"));
}
END_TEST

START_TEST(test_xfer_msg_seal_tells_damage_and_another_number)
{
    uint8_t out[WIRE_HEADER_MAX];
    uint32_t n = xfer_msg_seal(out, xfer_msg_put_heartbeat(out), 258), len = n;
    ck_assert_uint_eq(n, 8 + XFER_MSG_SEAL_BYTES);
    ck_assert_uint_eq(get_u32(out + 8), 258);
    ck_assert_uint_eq(get_u32(out + 12), 0xdcba79c5); /* the low half of XXH3-64 of the first 12 bytes */
    ck_assert_int_eq(xfer_msg_unseal(out, &len, 258, NULL), TD_OK);
    ck_assert_uint_eq(len, 8);
    len = n;
    ck_assert_int_eq(xfer_msg_unseal(out, &len, 257, NULL), TD_ERR_PROTOCOL);
    for (uint32_t bit = 0; bit < 8 * n; bit++) {
        out[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        ck_assert_int_eq(xfer_msg_unseal(out, &len, 258, NULL), TD_ERR_PROTOCOL);
        out[bit / 8] ^= (uint8_t)(1u << (bit % 8));
    }
    for (len = 0; len < n; len++) {
        uint32_t cut = len;
        ck_assert_int_eq(xfer_msg_unseal(out, &cut, 258, NULL), TD_ERR_PROTOCOL);
    }
}
END_TEST

/* Makes a sample of each message. Every truncation, extension and changed byte must give a status and stay in
 * bounds. */
static uint32_t sample(uint32_t which, uint8_t *out)
{
    static const uint8_t mac[XFER_MSG_MAC_BYTES];
    const struct xfer_msg_hello h = {.incarnation = 9, .layout = {NUM_F16, 2, 1, 64, 8}, .name = "name"};
    const struct xfer_msg_unit u = {.id = ID, .first = 7, .n = 3, .layer_begin = 3, .layer_end = 5};
    const struct xfer_msg_data d = {ID, 6, 1, 1, 4, 5};
    switch (which) {
    case 0:
        return xfer_msg_put_hello(out, &h);
    case 1:
        return xfer_msg_put_auth(out, mac);
    case 2:
        return xfer_msg_put_heartbeat(out);
    case 3:
        return xfer_msg_put_goodbye(out, 0, TD_OK);
    case 4:
        return xfer_msg_put_pull_open(out, ID, 1);
    case 5:
        return xfer_msg_put_unit(out, MSG_ANNOUNCE, &u);
    case 6:
        return xfer_msg_put_finish(out, ID, 3, "tail", 4);
    case 7:
        return xfer_msg_put_data(out, &d);
    case 8:
        return xfer_msg_put_refuse(out, ID, REFUSE_STALE);
    case 9:
        return xfer_msg_put_release(out, ID, TD_OK);
    default:
        return xfer_msg_put_user(out, 1, 5, 0, "abc", 3);
    }
}

/* Decodes from memory of exactly that size, so that a sanitizer notices a read beyond it. */
static enum td_status decode_exactly(const uint8_t *data, size_t len, struct xfer_msg *m)
{
    uint8_t *copy = malloc(len ? len : 1);
    memcpy(copy, data, len);
    enum td_status s = xfer_msg_decode(copy, len, m, NULL);
    if (s == TD_OK && m->type == MSG_USER && m->user.len)
        ck_assert(m->user.bytes >= copy && m->user.bytes + m->user.len <= copy + len);
    if (s == TD_OK && m->type == MSG_FINISH && m->finish.tail_len)
        ck_assert(m->finish.tail >= copy && m->finish.tail + m->finish.tail_len <= copy + len);
    free(copy);
    return s;
}

START_TEST(test_xfer_msg_other_lengths_are_refused)
{
    uint8_t out[WIRE_HEADER_MAX + 1] = {0};
    struct xfer_msg m;
    for (uint32_t which = 0; which <= 10; which++) {
        uint32_t n = sample(which, out);
        ck_assert_int_eq(decode_exactly(out, n, &m), TD_OK);
        for (uint32_t cut = 0; cut < n; cut++)
            if (which != 10 || cut <= 16) /* a shorter part of a user message is a valid message */
                ck_assert_int_eq(decode_exactly(out, cut, &m), TD_ERR_PROTOCOL);
        out[n] = 0;
        if (which != 10)
            ck_assert_int_eq(decode_exactly(out, n + 1, &m), TD_ERR_PROTOCOL);
    }
}
END_TEST

START_TEST(test_xfer_msg_any_bytes_give_a_status)
{
    uint8_t out[WIRE_HEADER_MAX];
    struct xfer_msg m;
    for (uint64_t i = 0; i < 200000; i++) {
        uint32_t n = sample((uint32_t)(i % 11), out);
        for (uint64_t k = 0; k < 1 + i % 4; k++) {
            uint64_t r = random_at(1, i, k);
            out[r % n] = (uint8_t)(r >> 32);
        }
        n = i % 5 ? n : (uint32_t)(random_at(2, i, 0) % (n + 1));
        enum td_status s = decode_exactly(out, n, &m);
        ck_assert(s == TD_OK || s == TD_ERR_PROTOCOL || s == TD_ERR_VERSION);
    }
}
END_TEST

static bool is_same_text(struct bytes a, struct bytes b)
{
    bool is_same = a.len == b.len && !memcmp(a.data, b.data, a.len);
    bytes_free(&a);
    bytes_free(&b);
    return is_same;
}

START_TEST(test_xfer_msg_proof_is_of_the_role_and_both_hellos)
{
    uint8_t a[60], b[60];
    memset(a, 1, sizeof(a));
    memset(b, 2, sizeof(b));
    ck_assert(is_same_text(xfer_msg_said('c', a, 60, b, 60), xfer_msg_said('c', a, 60, b, 60)));
    ck_assert(!is_same_text(xfer_msg_said('c', a, 60, b, 60), xfer_msg_said('a', a, 60, b, 60)));
    ck_assert(!is_same_text(xfer_msg_said('c', a, 60, b, 60), xfer_msg_said('c', b, 60, a, 60)));
    struct bytes before = xfer_msg_said('c', a, 60, b, 60);
    b[59]++;
    ck_assert(!is_same_text(before, xfer_msg_said('c', a, 60, b, 60)));
}
END_TEST

START_TEST(test_xfer_msg_checksum_fails_for_the_right_bytes_in_the_wrong_place)
{
    uint8_t bytes[4096];
    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (uint8_t)random_mix(i);
    const struct checksum_identity right = {ID.incarnation, ID.counter, 3, 7, 0, 4};
    uint64_t sum = checksum_bytes(&right, bytes, sizeof(bytes));
    struct checksum_identity wrong[6] = {right, right, right, right, right, right};
    wrong[0].id_a++;
    wrong[1].id_b++;
    wrong[2].index++;
    wrong[3].generation++;
    wrong[4].part_begin++;
    wrong[5].part_end++;
    for (int i = 0; i < 6; i++)
        ck_assert_uint_ne(checksum_bytes(&wrong[i], bytes, sizeof(bytes)), sum);
    bytes[2048] ^= 1;
    ck_assert_uint_ne(checksum_bytes(&right, bytes, sizeof(bytes)), sum);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("transfer protocol");
    TCase *tc = tcase_create("messages");
    tcase_set_timeout(tc, 30);
    tcase_add_test(tc, test_xfer_msg_bytes_are_the_golden_ones);
    tcase_add_test(tc, test_xfer_msg_decode_gives_back_what_was_put);
    tcase_add_test(tc, test_xfer_msg_other_version_is_told_by_name);
    tcase_add_test(tc, test_xfer_msg_seal_tells_damage_and_another_number);
    tcase_add_test(tc, test_xfer_msg_other_lengths_are_refused);
    tcase_add_test(tc, test_xfer_msg_any_bytes_give_a_status);
    tcase_add_test(tc, test_xfer_msg_proof_is_of_the_role_and_both_hellos);
    tcase_add_test(tc, test_xfer_msg_checksum_fails_for_the_right_bytes_in_the_wrong_place);
    suite_add_tcase(s, tc);
    SRunner *sr = srunner_create(s);
    srunner_run_all(sr, CK_ENV);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed ? 1 : 0;
}
