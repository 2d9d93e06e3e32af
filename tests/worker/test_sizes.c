/* Default sizes of pools, and refused sizes. */
#include <string.h>

#include "tests/tap.h"
#include "worker/sizes.h"

/* 4 layers, 2 kv heads of 32 numbers, f32: 2 KiB a token, 32 KiB a page. */
static struct geometry geometry(uint32_t max_positions)
{
    struct geometry g = {
        .config = {.max_positions = max_positions},
        .layout = {.n_layers = 4, .n_kv_heads = 2, .head_dim = 32, .dtype = NUM_F32, .page_tokens = 16}};
    ck_assert_uint_eq(kv_layout_page_bytes(&g.layout), 32768);
    return g;
}

static const uint64_t MIB = 1 << 20, GIB = 1ull << 30;

START_TEST(test_default_pool_holds_four_contexts_if_its_share_does)
{
    struct geometry small = geometry(8192), odd = geometry(17), large = geometry(1 << 20);
    ck_assert_uint_eq(sizes_default(&small.layout, 8192, 4, GIB), 64 * MIB);
    ck_assert_uint_eq(sizes_default(&odd.layout, 17, 4, GIB), 8 * 32768);
    ck_assert_uint_eq(sizes_default(&large.layout, 1 << 20, 4, 2 * GIB), 2 * GIB);
    ck_assert_uint_eq(sizes_default(&large.layout, 1 << 20, 4, UINT64_MAX), 8 * GIB);
    /* A smaller pool would be useless. */
    ck_assert_uint_eq(sizes_default(&large.layout, 1 << 20, 4, MIB), 64 * MIB);
}
END_TEST

START_TEST(test_pool_is_what_options_say)
{
    struct geometry g = geometry(8192);
    struct size_asked out;
    struct td_error e;
    struct worker_options o = {0};
    ck_assert_int_eq(sizes_pool(&o, &g, GIB, &out, &e), TD_OK);
    ck_assert_uint_eq(out.bytes, 64 * MIB);
    o.max_context = 1024;
    ck_assert_int_eq(sizes_pool(&o, &g, GIB, &out, &e), TD_OK);
    ck_assert_uint_eq(out.bytes, 8 * MIB);
    o.pool_bytes = 100000;
    ck_assert_int_eq(sizes_pool(&o, &g, GIB, &out, &e), TD_OK);
    ck_assert_uint_eq(out.bytes, 3 * 32768);
    ck_assert_str_eq(out.option, "--pool-bytes");
    o.pages = 7;
    ck_assert_int_eq(sizes_pool(&o, &g, GIB, &out, &e), TD_OK);
    ck_assert_uint_eq(out.bytes, 7 * 32768);
    ck_assert_str_eq(out.option, "--pages");
    o = (struct worker_options){.pool_bytes = 32767};
    ck_assert_int_eq(sizes_pool(&o, &g, GIB, &out, &e), TD_ERR_INVALID);
    ck_assert_str_eq(e.text, "--pool-bytes 32767: a page takes 32768");
    sizes_dram(0, &g, GIB, &out);
    ck_assert_uint_eq(out.bytes, 256 * MIB);
    sizes_dram(5000000, &g, GIB, &out);
    ck_assert_uint_eq(out.bytes, 5000000);
}
END_TEST

START_TEST(test_device_takes_what_the_host_may_give)
{
    struct geometry g = geometry(1 << 20);
    struct size_asked out;
    struct worker_options o = {.engine = "cpu"};
    g.kernels.device = DEVICE_CUDA;
    ck_assert_int_eq(sizes_pool(&o, &g, 100 * GIB, &out, NULL), TD_OK);
    ck_assert_uint_eq(out.bytes, 100 * GIB);
    ck_assert_str_eq(out.option, "--pool-most");
    o.pool_most = (int64_t)(3 * GIB + 5);
    ck_assert_int_eq(sizes_pool(&o, &g, 100 * GIB, &out, NULL), TD_OK);
    ck_assert_uint_eq(out.bytes, 3 * GIB);
    g.config.max_positions = 8192; /* --max-batch such contexts, of 16 MiB each, are all that can be in use */
    ck_assert_int_eq(sizes_pool(&o, &g, 100 * GIB, &out, NULL), TD_OK);
    ck_assert_uint_eq(out.bytes, 3 * GIB);
    o.pool_most = 0;
    ck_assert_int_eq(sizes_pool(&o, &g, 100 * GIB, &out, NULL), TD_OK);
    ck_assert_uint_eq(out.bytes, 4 * GIB);
    o.max_batch = 64;
    ck_assert_int_eq(sizes_pool(&o, &g, 100 * GIB, &out, NULL), TD_OK);
    ck_assert_uint_eq(out.bytes, GIB);
    g = geometry(1 << 20);
    g.kernels.device = DEVICE_CUDA;
    o.pool_bytes = (int64_t)GIB; /* says more than a limit of defaults */
    ck_assert_int_eq(sizes_pool(&o, &g, 100 * GIB, &out, NULL), TD_OK);
    ck_assert_uint_eq(out.bytes, GIB);
    o = (struct worker_options){.engine = "sim"}; /* nothing is on the device */
    ck_assert_int_eq(sizes_pool(&o, &g, 100 * GIB, &out, NULL), TD_OK);
    ck_assert_uint_eq(out.bytes, 8 * GIB);
}
END_TEST

/* Bytes for pages on ranks of devices of 100 GiB, of which free_gib are free; 0: refused. */
static uint64_t on_devices(struct worker_options o, struct geometry g, uint64_t free_gib, struct td_error *e)
{
    const struct size_device least = {free_gib * GIB, 100 * GIB};
    uint64_t bytes;
    o.ranks.n_tensor += !o.ranks.n_tensor;
    o.ranks.n_pipeline += !o.ranks.n_pipeline;
    return sizes_on_devices(&o, &g, &least, &bytes, e) ? 0 : bytes;
}

static double gib(uint64_t bytes)
{
    return (double)bytes / (double)GIB;
}

START_TEST(test_pool_fits_on_its_devices_beside_the_weights)
{
    struct geometry g = geometry(1 << 20), latent = geometry(1 << 20);
    struct td_error e;
    latent.layout.kind = KV_LATENT;
    /* A tenth is left to others; of a device that is in use, too. */
    ck_assert_double_eq_tol(gib(on_devices((struct worker_options){0}, g, 100, &e)), 90, 0.01);
    ck_assert_double_eq_tol(gib(on_devices((struct worker_options){0}, g, 60, &e)), 50, 0.01);
    const struct worker_options half = {.device_memory = 0.45}, all = {.device_memory = 1};
    ck_assert_double_eq_tol(gib(on_devices(half, g, 100, &e)), 45, 0.01);
    ck_assert_double_eq_tol(gib(on_devices(half, g, 30, &e)), 20, 0.01);
    ck_assert_double_eq_tol(gib(on_devices(all, g, 100, &e)), 100, 0.01);
    /* Ranks divide pages, of a latent only its layers; several ranks on a device divide that. */
    struct worker_options o = {.ranks = {.n_tensor = 2, .n_pipeline = 2, .devices = "next"}};
    ck_assert_double_eq_tol(gib(on_devices(o, g, 100, &e)), 360, 0.01);
    ck_assert_double_eq_tol(gib(on_devices(o, latent, 100, &e)), 180, 0.01);
    o.ranks.devices = "same";
    ck_assert_double_eq_tol(gib(on_devices(o, g, 100, &e)), 90, 0.01);
    model_dummy_config(&(struct model_dummy){.vocab_size = 128256,
                                             .hidden = 4096,
                                             .n_layers = 32,
                                             .n_heads = 32,
                                             .n_kv_heads = 8,
                                             .head_dim = 128,
                                             .intermediate = 14336,
                                             .max_positions = 8192},
                       &g.config);
    double weights = gib(2 * model_config_n_params(&g.config));
    ck_assert_double_ge(weights, 13);
    ck_assert_double_eq_tol(gib(on_devices((struct worker_options){0}, g, 100, &e)), 90 - weights, 0.01);
    o.ranks = (struct rank_options){.n_tensor = 4, .n_pipeline = 1};
    ck_assert_double_eq_tol(gib(on_devices(o, g, 100, &e)), 360 - weights, 0.01);
    g.weights = WEIGHTS_INT4;
    ck_assert_double_eq_tol(gib(on_devices((struct worker_options){0}, g, 100, &e)), 90 - weights / 4, 0.01);
    g.weights = WEIGHTS_AS_STORED;
    ck_assert_uint_eq(on_devices((struct worker_options){0}, g, 20, &e), 0);
    ck_assert_ptr_nonnull(
        strstr(e.text, "--device-memory 0.9: no KV page fits on a device of 100.0 GiB, 20.0 GiB of it free"));
    ck_assert_uint_eq(on_devices((struct worker_options){0}, g, 5, &e), 0); /* less is free than is left to others */
}
END_TEST

START_TEST(test_steps_are_larger_on_a_device)
{
    struct geometry g = geometry(8192);
    struct worker_options o = {.engine = "cpu"};
    sizes_steps(&o, &g);
    ck_assert(o.max_batch == 64 && o.max_rows == 512 && o.chunk_tokens == 256);
    o = (struct worker_options){.engine = "cpu", .max_batch = 600};
    sizes_steps(&o, &g);
    ck_assert(o.max_batch == 600 && o.max_rows == 600 && o.chunk_tokens == 256);
    g.kernels.device = DEVICE_CUDA;
    o = (struct worker_options){.engine = "cpu"};
    sizes_steps(&o, &g);
    ck_assert(o.max_batch == 256 && o.max_rows == 2304 && o.chunk_tokens == 2048);
    o = (struct worker_options){.engine = "cpu", .max_batch = 8, .max_rows = 32, .chunk_tokens = 4};
    sizes_steps(&o, &g);
    ck_assert(o.max_batch == 8 && o.max_rows == 32 && o.chunk_tokens == 4);
    o = (struct worker_options){.engine = "sim"};
    sizes_steps(&o, &g);
    ck_assert_int_eq(o.max_batch, 64);
}
END_TEST

START_TEST(test_sizes_beyond_what_is_there_are_refused_by_option)
{
    const struct available_memory there = {16 * GIB, "MemAvailable"};
    const struct size_asked fit[] = {{"--pool-bytes", 8 * GIB}, {"--pool-bytes", 7 * GIB}, {"--store-dram", GIB}};
    const struct size_asked sum[] = {{"--pool-bytes", 8 * GIB}, {"--pool-bytes", 8 * GIB}, {"--store-dram", 1}};
    const struct size_asked one[] = {{"--pool-bytes", 8 * GIB}, {"--store-dram", 900 * GIB}};
    const struct size_asked huge[] = {{"--pages", UINT64_MAX}, {"--pages", UINT64_MAX}};
    struct td_error e;
    ck_assert_int_eq(sizes_check(fit, 3, 0, &there, &e), TD_OK);
    ck_assert_int_eq(sizes_check(fit, 0, 20 * GIB, &there, &e), TD_OK);
    ck_assert_int_eq(sizes_check(sum, 3, 0, &there, &e), TD_ERR_INVALID);
    ck_assert_str_eq(e.text, "--pool-bytes: 8.0 GiB, and 16.0 GiB with all 3 pools, are asked for, 16.0 GiB are "
                             "available (MemAvailable)");
    ck_assert_int_eq(sizes_check(fit, 3, GIB, &there, &e), TD_ERR_INVALID);
    ck_assert_str_eq(e.text, "--pool-bytes: 8.0 GiB, and 17.0 GiB with all 3 pools and the weights, are asked for, "
                             "16.0 GiB are available (MemAvailable)");
    ck_assert_int_eq(sizes_check(fit, 1, 9 * GIB, &there, &e), TD_ERR_INVALID);
    ck_assert_str_eq(e.text, "--pool-bytes: 8.0 GiB, and 17.0 GiB with the weights, are asked for, 16.0 GiB are "
                             "available (MemAvailable)");
    ck_assert_int_eq(sizes_check(one, 2, GIB, &there, &e), TD_ERR_INVALID);
    ck_assert_str_eq(e.text, "--store-dram: 900.0 GiB are asked for, 16.0 GiB are available (MemAvailable)");
    ck_assert_int_eq(sizes_check(one, 1, 8 * GIB, &there, &e), TD_OK);
    ck_assert_int_eq(sizes_check(huge, 2, 0, &there, &e), TD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(e.text, "--pages: "));
    ck_assert_uint_eq(sizes_left(&there, GIB), 15 * GIB);
    ck_assert_uint_eq(sizes_left(&there, 17 * GIB), 0);
}
END_TEST

START_TEST(test_weights_take_what_their_format_says_and_nothing_on_devices)
{
    struct geometry g = {.kernels.device = DEVICE_CPU};
    struct worker_options o = {.engine = "cpu"};
    model_dummy_config(&(struct model_dummy){0}, &g.config);
    uint64_t n = model_config_n_params(&g.config);
    ck_assert_uint_eq(sizes_weights(&o, &g), 2 * n);
    g.weights = WEIGHTS_INT4;
    ck_assert_uint_eq(sizes_weights(&o, &g), n / 2);
    ck_assert(sizes_shares_weights(&o, &g));
    o.no_packed_cache = true;
    ck_assert(!sizes_shares_weights(&o, &g));
    o.engine = "sim";
    ck_assert_uint_eq(sizes_weights(&o, &g), 0);
    o.engine = "cpu";
    g.kernels.device = DEVICE_CUDA;
    ck_assert_uint_eq(sizes_weights(&o, &g), 0);
}
END_TEST

START_TEST(test_more_threads_than_kernels_take_are_refused_by_the_option)
{
    char *argv[] = {(char *)(uintptr_t) "worker", (char *)(uintptr_t) "--threads=257"}, *strings;
    struct worker_options o;
    struct td_error e;
    enum options_action action;
    const struct options table = {.program = "worker", .usage = "", .about = "", .table = WORKER_OPTIONS};
    ck_assert_int_eq(options_parse(&table, 2, argv, &o, NULL, NULL, &strings, &action, &e), TD_ERR_INVALID);
    ck_assert_msg(!strncmp(e.text, "--threads", 9), "%s", e.text);
    free(strings);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("sizes");
    TCase *t = tcase_create("sizes");
    tcase_add_test(t, test_default_pool_holds_four_contexts_if_its_share_does);
    tcase_add_test(t, test_pool_is_what_options_say);
    tcase_add_test(t, test_device_takes_what_the_host_may_give);
    tcase_add_test(t, test_pool_fits_on_its_devices_beside_the_weights);
    tcase_add_test(t, test_steps_are_larger_on_a_device);
    tcase_add_test(t, test_sizes_beyond_what_is_there_are_refused_by_option);
    tcase_add_test(t, test_weights_take_what_their_format_says_and_nothing_on_devices);
    tcase_add_test(t, test_more_threads_than_kernels_take_are_refused_by_the_option);
    suite_add_tcase(s, t);
    return tap_main(s);
}
