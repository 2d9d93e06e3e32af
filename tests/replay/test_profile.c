/* Profiles of workers: by name, by coefficients, from a table of step times. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "replay/profile.h"
#include "tests/replay/shared.h"
#include "tests/tap.h"

/* Makes a table whose times follow coefficients: 3 + 0.02 n + 1e-6 n (n + 2 c); 5 + 4e-5 contexts + 0.01
 * sequences. */
static void make_table_with(struct bytes *b, const char *model, const char *more)
{
    bytes_printf(b, "{\"gpu\":\"g1\",\"model\":\"%s\",\"backend\":\"b\",\"tp\":2,\"precision\":\"bf16\",\"prefill\":[",
                 model);
    for (uint32_t n = 128; n <= 65536; n *= 2)
        bytes_printf(b, "%s{\"batch\":1,\"isl\":%u,\"ms\":%.9g}", n > 128 ? "," : "", n, 3 + 0.02 * n + 1e-6 * n * n);
    bytes_printf(b, "],\"prefill_prefix\":[{\"isl_total\":8192,\"prefix\":4096,\"ms\":%.9g}],\"decode\":[",
                 3 + 0.02 * 4096 + 1e-6 * 4096 * (4096 + 2 * 4096.0));
    for (uint32_t n = 1; n <= 256; n *= 4)
        for (uint32_t c = 512; c <= 32768; c *= 4)
            bytes_printf(b, "%s{\"batch\":%u,\"context\":%u,\"ms\":%.9g}", n > 1 || c > 512 ? "," : "", n, c,
                         5 + 4e-5 * n * c + 0.01 * n);
    bytes_printf(b, "]%s}", more);
}

static void make_table(struct bytes *b, const char *model)
{
    make_table_with(b, model, "");
}

START_TEST(test_profile_is_fitted_to_a_table)
{
    struct bytes b = {0};
    struct worker_profile p;
    struct td_error e;
    bytes_printf(&b, "{\"profiles\":[");
    make_table(&b, "small");
    bytes_printf(&b, ",");
    make_table(&b, "large");
    bytes_printf(&b, "]}");
    ck_assert_int_eq(profile_parse(b.data, b.len, "large,tp2,bf16", &p, &e), TD_OK);
    static const double PREFILL[] = {3, 0.02, 1e-6}, DECODE[] = {5, 4e-5, 0.01};
    for (int i = 0; i < 3; i++) {
        ck_assert_msg(fabs(p.cost.prefill[i] / PREFILL[i] - 1) < 1e-3, "%d: %g", i, p.cost.prefill[i]);
        ck_assert_msg(fabs(p.cost.decode[i] / DECODE[i] - 1) < 1e-3, "%d: %g", i, p.cost.decode[i]);
    }
    ck_assert_double_lt(p.fit_error, 1e-4);
    ck_assert_uint_eq(p.mixed.n_rows, 0);
    ck_assert_int_eq(profile_parse(b.data, b.len, "large,tp4", &p, &e), TD_ERR_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(e.text, "tp4"));
    ck_assert_int_eq(profile_parse(b.data, b.len, NULL, &p, &e), TD_ERR_INVALID);
    bytes_free(&b);
}
END_TEST

/* A profile of such step times with these further members. */
static struct worker_profile with_members(const char *members)
{
    struct bytes b = {0};
    struct worker_profile p;
    struct td_error e = {{0}};
    bytes_printf(&b, "{\"profiles\":[{%s,\"prefill\":[", members);
    for (uint32_t n = 128; n <= 65536; n *= 2)
        bytes_printf(&b, "%s{\"batch\":1,\"isl\":%u,\"ms\":%.9g}", n > 128 ? "," : "", n, 3 + 0.02 * n + 1e-6 * n * n);
    bytes_printf(&b, "],\"decode\":[");
    for (uint32_t n = 1; n <= 256; n *= 4)
        for (uint32_t c = 512; c <= 32768; c *= 4)
            bytes_printf(&b, "%s{\"batch\":%u,\"context\":%u,\"ms\":%.9g}", n > 1 || c > 512 ? "," : "", n, c,
                         5 + 4e-5 * n * c + 0.01 * n);
    bytes_printf(&b, "]}]}");
    ck_assert_msg(!profile_parse(b.data, b.len, NULL, &p, &e), "%s", e.text);
    bytes_free(&b);
    return p;
}

START_TEST(test_profile_has_the_memory_of_its_model_or_none)
{
    struct worker_profile p = with_members(
        "\"gpu\":\"h200_sxm\",\"model\":\"meta-llama/Meta-Llama-3.1-70B\",\"tp\":4,\"precision\":\"bf16\"");
    ck_assert_double_eq(p.kv_bytes_per_token, 327680);
    /* The pool of h200-70b. */
    ck_assert_msg(p.is_derived && fabs(p.pool_bytes / 380e9 - 1) < 0.01, "%g", p.pool_bytes);
    p = with_members("\"gpu\":\"h200_sxm\",\"model\":\"meta-llama/Meta-Llama-3.1-8B\",\"tp\":1,\"precision\":\"bf16\"");
    /* The pool of h200-8b. */
    ck_assert(p.kv_bytes_per_token == 131072 && fabs(p.pool_bytes / 114e9 - 1) < 0.01);
    p = with_members("\"gpu\":\"h100_sxm\",\"model\":\"meta-llama/Meta-Llama-3.1-8B\",\"tp\":1,\"precision\":\"fp8\","
                     "\"quant\":{\"gemm_quant_mode\":\"fp8\",\"kvcache_quant_mode\":\"fp8\"}");
    ck_assert(p.kv_bytes_per_token == 65536 && p.pool_bytes > 60e9 && p.pool_bytes < 70e9);
    p = with_members("\"gpu\":\"h100_sxm\",\"model\":\"meta-llama/Meta-Llama-3.1-8B\",\"tp\":1,\"precision\":\"fp8\"");
    ck_assert(p.kv_bytes_per_token == 0 && p.pool_bytes == 0); /* "fp8" does not say what is in fp8 */
    p = with_members(
        "\"gpu\":\"h100_sxm\",\"model\":\"meta-llama/Meta-Llama-3.1-70B\",\"tp\":1,\"precision\":\"bf16\"");
    ck_assert(p.kv_bytes_per_token == 327680 && p.pool_bytes == 0); /* the weights do not fit on one GPU */
    p = with_members("\"gpu\":\"x100\",\"model\":\"somebody/Other-8B\",\"tp\":1,\"precision\":\"bf16\"");
    ck_assert(p.kv_bytes_per_token == 0 && p.pool_bytes == 0 && !p.is_derived);
    /* The profile's own values take precedence. */
    p = with_members("\"gpu\":\"h200_sxm\",\"model\":\"Llama-3.1-8B\",\"tp\":1,\"precision\":\"bf16\","
                     "\"kv_bytes_per_token\":1000,\"pool_bytes\":5e9");
    ck_assert(p.kv_bytes_per_token == 1000 && p.pool_bytes == 5e9 && !p.is_derived);
}
END_TEST

/* Mixed steps that take the sum less some share of the decode step's fixed part of 5 ms. */
START_TEST(test_profile_says_how_far_the_model_of_mixed_steps_is_off)
{
    static const double SHARES[] = {1, 0, 0.6, 1.2};
    for (int k = 0; k < 4; k++) {
        struct bytes b = {0}, rows = {0};
        struct worker_profile p;
        struct td_error e;
        bytes_printf(&rows, ",\"mixed\":[");
        for (uint32_t n = 16; n <= 512; n *= 2)
            for (uint32_t c = 0; c <= n; c += n)
                bytes_printf(&rows, "%s{\"batch\":%u,\"context\":64,\"tokens\":%u,\"prefix\":%u,\"ms\":%.9g}",
                             n > 16 || c ? "," : "", n / 4, n, c,
                             8 - SHARES[k] * 5 + 0.02 * n + 1e-6 * n * (n + 2.0 * c) + 4e-5 * 64 * n / 4 +
                                 0.01 * n / 4);
        bytes_printf(&rows, "]%c", 0);
        bytes_printf(&b, "{\"profiles\":[");
        make_table_with(&b, "small", (const char *)rows.data);
        bytes_printf(&b, "]}");
        ck_assert_msg(profile_parse(b.data, b.len, NULL, &p, &e) == TD_OK, "%s", e.text);
        ck_assert_uint_eq(p.mixed.n_rows, 12);
        ck_assert_msg(fabs(p.mixed.share - SHARES[k]) < 0.01, "%g", p.mixed.share);
        ck_assert_double_lt(p.mixed.share_error, 1e-3);
        ck_assert_msg((SHARES[k] == 1) == (p.mixed.model_error < 1e-3), "%g: %g", SHARES[k], p.mixed.model_error);
        ck_assert_msg((SHARES[k] == 0) == (p.mixed.sum_error < 1e-3), "%g: %g", SHARES[k], p.mixed.sum_error);
        ck_assert_msg((SHARES[k] == 0.6) == (p.mixed.smaller_error < 1e-3), "%g: %g", SHARES[k], p.mixed.smaller_error);
        bytes_free(&rows);
        bytes_free(&b);
    }
}
END_TEST

START_TEST(test_profile_says_what_is_wrong_with_a_table)
{
    static const struct {
        const char *text, *says;
    } BAD[] = {
        {"{\"profiles\":3}", "profiles"},
        {"{\"profiles\":[{", "line 1"},
        {"{\"profiles\":[{\"prefill\":[{\"batch\":1,\"isl\":0,\"ms\":1}]}]}", "prefill[0]"},
        {"{\"profiles\":[{\"prefill\":[{\"batch\":1,\"isl\":8,\"ms\":0}]}]}", "prefill[0]"},
        {"{\"profiles\":[{\"decode\":[{\"batch\":1,\"context\":1,\"ms\":1},{\"batch\":1,\"ms\":1}]}]}", "decode[1]"},
        {"{\"profiles\":[{\"prefill_prefix\":[{\"isl_total\":8,\"prefix\":8,\"ms\":1}]}]}", "prefill_prefix[0]"},
        {"{\"profiles\":[{\"decode\":{}}]}", "decode"},
        {"{\"profiles\":[{\"mixed\":3}]}", "mixed"},
        {"{\"profiles\":[{\"mixed\":[{\"batch\":1,\"context\":9,\"tokens\":16,\"prefix\":0,\"ms\":1},"
         "{\"batch\":1,\"context\":9,\"tokens\":16,\"ms\":1}]}]}",
         "mixed[1]"},
        {"{\"profiles\":[{\"mixed\":[{\"batch\":0,\"context\":9,\"tokens\":16,\"prefix\":0,\"ms\":1}]}]}", "mixed[0]"},
        {"{\"profiles\":[{\"mixed\":[{\"batch\":1,\"context\":9,\"tokens\":1e11,\"prefix\":0,\"ms\":1}]}]}",
         "mixed[0]"},
        {"{\"profiles\":[{}]}", "few"},
    };
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        struct worker_profile p;
        struct td_error e = {{0}};
        ck_assert_int_eq(profile_parse(BAD[i].text, strlen(BAD[i].text), NULL, &p, &e), TD_ERR_INVALID);
        ck_assert_msg(strstr(e.text, BAD[i].says) != NULL, "%s: %s", BAD[i].text, e.text);
    }
}
END_TEST

START_TEST(test_profile_is_a_name_or_coefficients)
{
    struct worker_profile a, b;
    struct td_error e;
    ck_assert_int_eq(profile_read("h200-8b", &a, &e), TD_OK);
    ck_assert_int_eq(profile_read(PROFILE_H200_8B, &b, &e), TD_OK);
    for (int i = 0; i < 3; i++)
        ck_assert(a.cost.prefill[i] == b.cost.prefill[i] && a.cost.decode[i] == b.cost.decode[i]);
    ck_assert(a.kv_bytes_per_token == 131072 && b.kv_bytes_per_token == 0);
    ck_assert_int_eq(profile_read("h900", &a, &e), TD_ERR_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(e.text, "h900"));
    ck_assert_int_eq(profile_read("1,2,3:4,5", &a, &e), TD_ERR_INVALID);
}
END_TEST

/* The constant of this machine is close to the table of predictions. */
START_TEST(test_profile_of_the_h200_is_that_of_its_table)
{
    char path[512], text[600];
    struct worker_profile table, named;
    struct td_error e;
    if (!shared_path("test_profile_of_the_h200_is_that_of_its_table", "../profiles/aiconfigurator.json", path,
                     sizeof(path)))
        return;
    snprintf(text, sizeof(text), "%s:h200_sxm,8B,trtllm,tp1,bf16", path);
    ck_assert_msg(profile_read(text, &table, &e) == TD_OK, "%s", e.text);
    ck_assert_int_eq(profile_read("h200-8b", &named, &e), TD_OK);
    const struct cost_model a = cost_make(&table.cost), b = cost_make(&named.cost);
    for (uint32_t n = 512; n <= 32768; n *= 4) {
        double x = cost_prefill_ms(&a, n, 0, 0), y = cost_prefill_ms(&b, n, 0, 0);
        ck_assert_msg(fabs(x / y - 1) < 0.05, "%u tokens: %f %f", n, x, y);
        x = cost_decode_ms(&a, 64, 64.0 * n);
        y = cost_decode_ms(&b, 64, 64.0 * n);
        ck_assert_msg(fabs(x / y - 1) < 0.05, "64 sequences of %u: %f %f", n, x, y);
    }
    ck_assert_double_lt(table.fit_error, 0.05);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("profile");
    TCase *t = tcase_create("profile");
    tcase_add_test(t, test_profile_is_fitted_to_a_table);
    tcase_add_test(t, test_profile_has_the_memory_of_its_model_or_none);
    tcase_add_test(t, test_profile_says_how_far_the_model_of_mixed_steps_is_off);
    tcase_add_test(t, test_profile_says_what_is_wrong_with_a_table);
    tcase_add_test(t, test_profile_is_a_name_or_coefficients);
    tcase_add_test(t, test_profile_of_the_h200_is_that_of_its_table);
    suite_add_tcase(s, t);
    return tap_main(s);
}
