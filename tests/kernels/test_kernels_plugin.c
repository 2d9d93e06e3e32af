/* A device that can't be opened: the error says what to do. With CUDA_PLUGIN, if this build has one: the
 * plugin loads, and reports a machine without a device, which any machine is that hides its devices. */
#include <dlfcn.h>

#include "kernels/backend.h"
#include "tests/kernels/data.h"
#include "tests/tap.h"

static enum td_status open_cuda(struct td_error *error)
{
    struct kernels *k = NULL;
    struct kernels_config config = {.device = DEVICE_CUDA};
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    enum td_status s = kernels_open(&config, &k, error);
    ck_assert_ptr_null(k);
    return s;
}

START_TEST(test_without_the_plugin_the_text_says_how_to_build_it)
{
    struct td_error error = {0};
    setenv("TANDEM_PLUGINS", "/nonexistent", 1);
    ck_assert_int_eq(open_cuda(&error), TD_ERR_UNSUPPORTED);
    ck_assert_msg(strstr(error.text, "-Dgpu=enabled") && strstr(error.text, "TANDEM_PLUGINS"), "%s", error.text);
}
END_TEST

#ifdef CUDA_PLUGIN
START_TEST(test_without_a_device_the_text_says_so)
{
    struct td_error error = {0};
    unsetenv("TANDEM_PLUGINS");
    ck_assert_int_eq(open_cuda(&error), TD_ERR_UNSUPPORTED);
    ck_assert_msg(!strncmp(error.text, "no CUDA device: ", 16) && strlen(error.text) > 16, "%s", error.text);
}
END_TEST

START_TEST(test_a_plugin_of_another_interface_is_refused)
{
    struct kernels *k = NULL;
    struct td_error error = {0};
    struct kernels_config config = {.device = DEVICE_CUDA};
    kernels_plugin open_plugin = NULL;
    void *plugin = dlopen(CUDA_PLUGIN, RTLD_NOW | RTLD_LOCAL);
    ck_assert_msg(plugin != NULL, "%s", plugin ? "" : dlerror());
    *(void **)&open_plugin = dlsym(plugin, KERNELS_PLUGIN);
    ck_assert(open_plugin != NULL);
    ck_assert_int_eq(open_plugin(KERNELS_ABI + 1, &config, &k, &error), TD_ERR_VERSION);
    ck_assert_ptr_nonnull(strstr(error.text, "interface"));
    ck_assert_ptr_null(k);
}
END_TEST
#endif

int main(void)
{
    Suite *s = suite_create("kernels_plugin");
    TCase *t = tcase_create("kernels_plugin");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_without_the_plugin_the_text_says_how_to_build_it);
#ifdef CUDA_PLUGIN
    tcase_add_test(t, test_without_a_device_the_text_says_so);
    tcase_add_test(t, test_a_plugin_of_another_interface_is_refused);
#endif
    suite_add_tcase(s, t);
    return tap_main(s);
}
