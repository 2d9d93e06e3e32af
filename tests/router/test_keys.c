/* API keys (router/keys.h): the file, who is known, and what a key may have in a minute. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "router/keys.h"
#include "tests/tap.h"

static char dir[] = "/tmp/tandem-keys-XXXXXX", path[64];
static const struct log QUIET = {.who = "keys", .level = LOG_ERROR, .fd = -1};

static void setup(void)
{
    ck_assert_ptr_nonnull(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/keys.json", dir);
}

static void teardown(void)
{
    char command[128];
    snprintf(command, sizeof(command), "rm -r %s", dir);
    ck_assert_int_eq(system(command), 0);
    memcpy(dir + sizeof(dir) - 7, "XXXXXX", 6);
}

static void add(const char *tenant, char key[KEYS_TEXT_BYTES])
{
    struct td_error e;
    ck_assert_msg(!keys_add(path, tenant, key, &e), "%s", e.text);
}

static struct api_keys *open_keys(void)
{
    struct api_keys *k = NULL;
    struct td_error e;
    ck_assert_msg(!keys_open(path, &QUIET, &k, &e), "%s", e.text);
    return k;
}

static struct api_key *find(struct api_keys *k, const char *key)
{
    char header[KEYS_TEXT_BYTES + 16];
    snprintf(header, sizeof(header), "Bearer %s", key);
    return keys_find(k, header);
}

/* Replaces a text of the file, which comes once. */
static void edit(const char *from, const char *to)
{
    static char text[1 << 16], made[1 << 16];
    FILE *f = fopen(path, "r");
    size_t n = fread(text, 1, sizeof(text) - 1, f);
    text[n] = 0;
    fclose(f);
    char *at = strstr(text, from);
    ck_assert_ptr_nonnull(at);
    snprintf(made, sizeof(made), "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    f = fopen(path, "w");
    fputs(made, f);
    fclose(f);
}

START_TEST(test_keys_are_found_by_what_was_printed_and_by_nothing_else)
{
    char a[KEYS_TEXT_BYTES], b[KEYS_TEXT_BYTES], wrong[KEYS_TEXT_BYTES];
    struct key_terms terms;
    struct stat st;
    add("hospital", a);
    add("bank", b);
    ck_assert(!stat(path, &st) && (st.st_mode & 0777) == 0600);
    struct api_keys *k = open_keys();
    ck_assert_ptr_nonnull(find(k, a));
    keys_terms(k, find(k, b), &terms);
    ck_assert_str_eq(terms.tenant, "bank");
    snprintf(wrong, sizeof(wrong), "%.*s%s", 20, a, b + 20); /* the id of one, the secret of the other */
    ck_assert_ptr_null(find(k, wrong));
    snprintf(wrong, sizeof(wrong), "%s", a);
    wrong[strlen(wrong) - 1] ^= 1;
    ck_assert_ptr_null(find(k, wrong));
    ck_assert_ptr_null(find(k, ""));
    ck_assert_ptr_null(find(k, "td-"));
    ck_assert_ptr_null(find(k, "td-0123456789abcdef-"));
    ck_assert_ptr_null(keys_find(k, NULL));
    ck_assert_ptr_null(keys_find(k, a)); /* without "Bearer" */
    keys_close(k);
}
END_TEST

START_TEST(test_keys_follow_the_file)
{
    char a[KEYS_TEXT_BYTES], b[KEYS_TEXT_BYTES];
    struct key_terms terms;
    add("hospital", a);
    struct api_keys *k = open_keys();
    struct api_key *first = find(k, a);
    add("bank", b);
    for (int i = 0; i < 500 && !find(k, b); i++)
        usleep(10000);
    ck_assert_ptr_nonnull(find(k, b));
    ck_assert_ptr_eq(find(k, a), first); /* requests point to it */
    edit("\"hospital\"", "\"clinic\", \"weight\": 3, \"pin_blocks\": 7");
    for (int i = 0; i < 500; i++, usleep(10000)) {
        keys_terms(k, find(k, a), &terms);
        if (!strcmp(terms.tenant, "clinic"))
            break;
    }
    ck_assert_str_eq(terms.tenant, "clinic");
    ck_assert_double_eq(terms.weight, 3);
    ck_assert_uint_eq(terms.pin_blocks, 7);
    FILE *f = fopen(path, "w"); /* broken: nothing changes */
    fputs("{\"keys\": [", f);
    fclose(f);
    usleep(700000);
    ck_assert_ptr_eq(find(k, a), first);
    f = fopen(path, "w"); /* no key any more */
    fputs("{\"keys\": []}", f);
    fclose(f);
    for (int i = 0; i < 500 && find(k, a); i++)
        usleep(10000);
    ck_assert_ptr_null(find(k, a));
    keys_terms(k, first, &terms); /* its requests go on */
    ck_assert_str_eq(terms.tenant, "clinic");
    keys_close(k);
}
END_TEST

/* Whoever may write into the directory could have put a link where the new file is made. */
START_TEST(test_a_key_is_written_to_no_file_of_another_name)
{
    char key[KEYS_TEXT_BYTES], link[80], target[80], text[8] = "";
    snprintf(link, sizeof(link), "%s.new", path);
    snprintf(target, sizeof(target), "%s/target", dir);
    FILE *f = fopen(target, "w");
    fputs("work", f);
    fclose(f);
    ck_assert(!symlink(target, link));
    add("hospital", key);
    f = fopen(target, "r");
    ck_assert(fgets(text, sizeof(text), f));
    fclose(f);
    ck_assert_str_eq(text, "work");
    struct api_keys *k = open_keys();
    ck_assert_ptr_nonnull(find(k, key));
    keys_close(k);
    unlink(target);
}
END_TEST

static const struct {
    const char *member, *text;
} WRONG[] = {{"\"weight\": 0", ".weight: is wrong"},
             {"\"weight\": \"3\"", ".weight: is wrong"},
             {"\"concurrency\": 1.5", ".concurrency: is wrong"},
             {"\"concurrency\": 0", ".concurrency: is wrong"},
             {"\"pin_blocks\": -1", ".pin_blocks: is wrong"},
             {"\"requests_per_minute\": 1e300", ".requests_per_minute: is wrong"},
             {"\"models\": \"a\"", ".models: is wrong"},
             {"\"loras\": [1]", ".loras: is wrong"},
             {"\"color\": 1", ".color: is no member of a key"},
             {"\"tenant\": \"\"", "duplicate object key"}};

START_TEST(test_keys_of_a_file_that_is_wrong_are_refused_by_member)
{
    char a[KEYS_TEXT_BYTES], made[128];
    struct api_keys *k = NULL;
    struct td_error e;
    add("hospital", a);
    snprintf(made, sizeof(made), "\"hospital\", %s", WRONG[_i].member);
    edit("\"hospital\"", made);
    ck_assert_int_eq(keys_open(path, &QUIET, &k, &e), TD_ERR_INVALID);
    ck_assert_msg(strstr(e.text, WRONG[_i].text) && strstr(e.text, "--api-keys"), "%s", e.text);
    ck_assert_int_ne(keys_add(path, "bank", a, &e), TD_OK); /* and not written over */
}
END_TEST

static bool take(struct api_keys *k, struct api_key *key, uint32_t n_prompt, uint64_t now_ns, uint32_t *retry_after_ms)
{
    struct td_error e;
    return !keys_take(k, key, n_prompt, 1, now_ns, retry_after_ms, &e);
}

START_TEST(test_keys_have_a_rate_for_each_of_three)
{
    char a[KEYS_TEXT_BYTES];
    uint32_t late;
    uint64_t now = NS_PER_S;
    add("hospital", a);
    edit("\"hospital\"", "\"hospital\", \"requests_per_minute\": 60, \"prompt_tokens_per_minute\": 6000, "
                         "\"output_tokens_per_minute\": 600");
    struct api_keys *k = open_keys();
    struct api_key *key = find(k, a);
    for (int i = 0; i < 60; i++)
        ck_assert(take(k, key, 1, now, &late));
    ck_assert(!take(k, key, 1, now, &late)); /* one a second from now on */
    ck_assert_uint_le(late, 1001);
    ck_assert(take(k, key, 1, now += NS_PER_S, &late));
    ck_assert(!take(k, key, 1, now, &late));
    now += 60 * NS_PER_S;
    ck_assert(take(k, key, 18000, now, &late)); /* three minutes' worth: it waits for nothing, the next does */
    ck_assert(!take(k, key, 1, now, &late));
    ck_assert_uint_eq(late, 60000);
    ck_assert(!take(k, key, 1, now += 110 * NS_PER_S, &late));
    ck_assert(take(k, key, 1, now += 11 * NS_PER_S, &late));
    now += 300 * NS_PER_S;
    keys_charge_output(k, key, 0);
    ck_assert(take(k, key, 1, now, &late));
    keys_charge_output(k, key, 610);
    ck_assert(!take(k, key, 1, now, &late));
    ck_assert(take(k, key, 1, now += 2 * NS_PER_S, &late));
    keys_close(k);
}
END_TEST

START_TEST(test_keys_share_a_rate_among_routers_and_get_back_what_was_not_placed)
{
    char a[KEYS_TEXT_BYTES];
    uint32_t late, n = 0;
    uint64_t now = NS_PER_S;
    add("hospital", a);
    edit("\"hospital\"", "\"hospital\", \"requests_per_minute\": 60, \"concurrency\": 40");
    struct api_keys *k = open_keys();
    struct api_key *key = find(k, a);
    keys_share(k, 3, UINT32_MAX);
    while (take(k, key, 1, now, &late))
        n++;
    ck_assert_uint_eq(n, 20); /* this one of three routers */
    keys_opened(k, key, 1);
    keys_ended(k, key, 1, true, 1);
    ck_assert(take(k, key, 1, now, &late));
    ck_assert(!take(k, key, 1, now, &late));
    now += 600 * NS_PER_S;
    keys_share(k, 1, UINT32_MAX);
    for (int i = 0; i < 40; i++)
        keys_opened(k, key, 1);
    ck_assert(!take(k, key, 1, now, &late)); /* as many are open as may be */
    keys_ended(k, key, 1, false, 1);
    ck_assert(take(k, key, 1, now, &late));
    keys_close(k);
}
END_TEST

START_TEST(test_keys_have_a_rate_of_texts_beside_that_of_requests)
{
    char a[KEYS_TEXT_BYTES];
    struct td_error e;
    uint32_t late = 0;
    uint64_t now = NS_PER_S;
    add("hospital", a);
    edit("\"hospital\"", "\"hospital\", \"texts_per_minute\": 4, \"requests_per_minute\": 1");
    struct api_keys *k = open_keys();
    struct api_key *key = find(k, a);
    for (int i = 0; i < 4; i++)
        ck_assert(!keys_take_text(k, key, now, &late, &e));
    ck_assert_int_eq(keys_take_text(k, key, now, &late, &e), TD_ERR_REFUSED);
    ck_assert_str_eq(e.text, "the key's texts_per_minute are used up");
    ck_assert_uint_le(late, 15001);
    ck_assert(take(k, key, 1, now, &late));
    ck_assert(!take(k, key, 1, now, &late));
    ck_assert(!keys_take_text(k, key, now += 15 * NS_PER_S, &late, &e));
    keys_close(k);
}
END_TEST

START_TEST(test_keys_of_one_tenant_share_what_it_may_have_open)
{
    char a[KEYS_TEXT_BYTES], b[KEYS_TEXT_BYTES], c[KEYS_TEXT_BYTES];
    uint32_t late = 0;
    struct td_error e;
    add("hospital", a);
    add("bank", b);
    add("hospital", c);
    struct api_keys *k = open_keys();
    struct api_key *first = find(k, a), *other = find(k, b), *second = find(k, c);
    keys_share(k, 1, 10);
    for (int i = 0; i < 10; i++)
        keys_opened(k, i % 2 ? first : second, 1);
    ck_assert_int_eq(keys_take(k, second, 1, 1, NS_PER_S, &late, &e), TD_ERR_REFUSED);
    ck_assert_str_eq(e.text, "10 requests of the tenant are open, of 10");
    ck_assert(take(k, other, 1, NS_PER_S, &late));
    edit("\"bank\"", "\"hospital\""); /* its key becomes the other tenant's */
    for (int i = 0; i < 500 && !keys_take(k, other, 1, 1, NS_PER_S, &late, &e); i++, usleep(10000))
        find(k, b);
    ck_assert_int_eq(keys_take(k, other, 1, 1, NS_PER_S, &late, &e), TD_ERR_REFUSED);
    for (int i = 0; i < 10; i++)
        keys_ended(k, i % 2 ? first : second, 1, false, 1);
    ck_assert(!keys_take(k, other, 1, 10, NS_PER_S, &late, &e));
    ck_assert(keys_take(k, other, 1, 11, NS_PER_S, &late, &e)); /* a request of eleven answers */
    keys_close(k);
}
END_TEST

START_TEST(test_keys_name_what_they_are_not_for)
{
    char a[KEYS_TEXT_BYTES];
    struct td_error e;
    add("hospital", a);
    edit("\"hospital\"", "\"hospital\", \"models\": [\"big\"], \"loras\": [\"\", \"poet\"]");
    struct api_keys *k = open_keys();
    struct api_key *key = find(k, a);
    ck_assert_int_eq(keys_allow(k, key, "big", "", &e), TD_OK);
    ck_assert_int_eq(keys_allow(k, key, "big", "poet", &e), TD_OK);
    ck_assert_int_eq(keys_allow(k, key, "big", "cook", &e), TD_ERR_FORBIDDEN);
    ck_assert_str_eq(e.text, "lora: the key is not for 'cook'");
    ck_assert_int_eq(keys_allow(k, key, "small", "", &e), TD_ERR_FORBIDDEN);
    ck_assert_str_eq(e.text, "model: the key is not for small");
    keys_close(k);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("router_keys");
    TCase *t = tcase_create("keys");
    tcase_set_timeout(t, 60);
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, test_keys_are_found_by_what_was_printed_and_by_nothing_else);
    tcase_add_test(t, test_keys_follow_the_file);
    tcase_add_test(t, test_a_key_is_written_to_no_file_of_another_name);
    tcase_add_loop_test(t, test_keys_of_a_file_that_is_wrong_are_refused_by_member, 0,
                        sizeof(WRONG) / sizeof(WRONG[0]));
    tcase_add_test(t, test_keys_have_a_rate_for_each_of_three);
    tcase_add_test(t, test_keys_share_a_rate_among_routers_and_get_back_what_was_not_placed);
    tcase_add_test(t, test_keys_have_a_rate_of_texts_beside_that_of_requests);
    tcase_add_test(t, test_keys_of_one_tenant_share_what_it_may_have_open);
    tcase_add_test(t, test_keys_name_what_they_are_not_for);
    suite_add_tcase(s, t);
    return tap_main(s);
}
