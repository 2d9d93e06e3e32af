/* The bytes with which a prefill worker hands the first token over. */
#include <string.h>

#include "tests/tap.h"
#include "worker/first_token.h"

static const struct sampled TOKEN = {
    .id = 0x01020304, .logprob = -0.5f, .n_top = 2, .top_ids = {7, 0x0a0b0c0d}, .top_logprobs = {-0.25f, -2}};
static const uint8_t BYTES[] = {0x04, 0x03, 0x02, 0x01, 0,    0,    0x00, 0xbf, 0,    0,    0, 0, 7, 0,
                                0,    0,    0,    0,    0x80, 0xbe, 0x0d, 0x0c, 0x0b, 0x0a, 0, 0, 0, 0xc0};

START_TEST(test_first_token_has_these_bytes)
{
    uint8_t out[FIRST_TOKEN_MAX_BYTES];
    ck_assert_uint_eq(first_token_encode(&TOKEN, out), sizeof(BYTES));
    ck_assert_mem_eq(out, BYTES, sizeof(BYTES));
}
END_TEST

START_TEST(test_first_token_is_read_back)
{
    struct sampled t;
    ck_assert_int_eq(first_token_decode(BYTES, sizeof(BYTES), &t), TD_OK);
    ck_assert_uint_eq(t.id, TOKEN.id);
    ck_assert(t.logprob == TOKEN.logprob);
    ck_assert_uint_eq(t.n_top, 2);
    for (int i = 0; i < 2; i++)
        ck_assert(t.top_ids[i] == TOKEN.top_ids[i] && t.top_logprobs[i] == TOKEN.top_logprobs[i]);
}
END_TEST

START_TEST(test_first_token_of_a_wrong_length_is_refused_and_nothing_is_written)
{
    uint8_t bytes[FIRST_TOKEN_MAX_BYTES + FIRST_TOKEN_TOP_BYTES] = {0};
    for (uint32_t len = 0; len <= sizeof(bytes); len++) {
        struct sampled t = {.id = 99};
        bool is_fine = len >= FIRST_TOKEN_BYTES && len <= FIRST_TOKEN_MAX_BYTES && len % 8 == FIRST_TOKEN_BYTES % 8;
        ck_assert_int_eq(first_token_decode(bytes, len, &t), is_fine ? TD_OK : TD_ERR_PROTOCOL);
        ck_assert_uint_eq(t.id, is_fine ? 0 : 99);
    }
}
END_TEST

int main(void)
{
    Suite *s = suite_create("first_token");
    TCase *t = tcase_create("first_token");
    tcase_add_test(t, test_first_token_has_these_bytes);
    tcase_add_test(t, test_first_token_is_read_back);
    tcase_add_test(t, test_first_token_of_a_wrong_length_is_refused_and_nothing_is_written);
    suite_add_tcase(s, t);
    return tap_main(s);
}
