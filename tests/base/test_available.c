/* Available memory, from recorded files of the system and of cgroups of both versions. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/available.h"
#include "tests/tap.h"

struct recorded {
    const char *path, *text;
};
struct recorded_machine {
    const char *what;
    struct recorded files[10];
    uint64_t bytes;
    const char *by;
};

#define MEMINFO                                                                                                        \
    {                                                                                                                  \
        "proc/meminfo", "MemTotal: 24684084 kB\nMemFree: 1000 kB\nMemAvailable:   8000000 kB\nBuffers: 1 kB\n"         \
    }
#define V1_NONE "9223372036854771712\n"

static const struct recorded_machine MACHINES[] = {
    {"nothing can be read", {{0}}, UINT64_MAX, ""},
    {"no cgroups", {MEMINFO}, 8192000000, "MemAvailable"},
    {"an old kernel without MemAvailable", {{"proc/meminfo", "MemTotal: 1 kB\nMemFree: 1 kB\n"}}, UINT64_MAX, ""},
    {"version 2, no limit",
     {MEMINFO,
      {"proc/self/cgroup", "0::/user.slice/a.scope\n"},
      {"sys/fs/cgroup/user.slice/a.scope/memory.max", "max\n"},
      {"sys/fs/cgroup/user.slice/a.scope/memory.current", "5000\n"}},
     8192000000,
     "MemAvailable"},
    {"version 2, limit of the group; pages of files can be dropped",
     {MEMINFO,
      {"proc/self/cgroup", "0::/a/b\n"},
      {"sys/fs/cgroup/a/b/memory.max", "1000000\n"},
      {"sys/fs/cgroup/a/b/memory.current", "700000\n"},
      {"sys/fs/cgroup/a/b/memory.stat", "anon 100000\nfile 300000\ninactive_file 120000\nactive_file 80000\n"}},
     500000,
     "memory.max of cgroup /a/b"},
    {"version 2, the group above has less",
     {MEMINFO,
      {"proc/self/cgroup", "0::/a/b\n"},
      {"sys/fs/cgroup/a/b/memory.max", "1000000\n"},
      {"sys/fs/cgroup/a/b/memory.current", "700000\n"},
      {"sys/fs/cgroup/a/memory.max", "2000000\n"},
      {"sys/fs/cgroup/a/memory.current", "1900000\n"}},
     100000,
     "memory.max of cgroup /a"},
    {"version 2 in a container that sees its own group only",
     {MEMINFO,
      {"proc/self/cgroup", "0::/\n"},
      {"sys/fs/cgroup/memory.max", "1000000\n"},
      {"sys/fs/cgroup/memory.current", "1200000\n"},
      {"sys/fs/cgroup/memory.stat", "inactive_file 100\nactive_file 0\n"}},
     0,
     "memory.max of cgroup /"},
    {"version 1",
     {MEMINFO,
      {"proc/self/cgroup", "9:cpu,cpuacct:/x\n4:hugetlb,memory:/a/b\n0::/\n"},
      {"sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "900000\n"},
      {"sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "500000\n"},
      {"sys/fs/cgroup/memory/a/b/memory.stat",
       "inactive_file 1\nactive_file 1\ntotal_inactive_file 100000\ntotal_active_file 50000\n"},
      {"sys/fs/cgroup/memory/memory.limit_in_bytes", V1_NONE},
      {"sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n"}},
     550000,
     "memory.limit_in_bytes of cgroup /a/b"},
    {"version 1 in a container whose path is not to be seen",
     {MEMINFO,
      {"proc/self/cgroup", "4:memory:/docker/0123\n"},
      {"sys/fs/cgroup/memory/memory.limit_in_bytes", "900000\n"},
      {"sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n"}},
     400000,
     "memory.limit_in_bytes of cgroup /"},
    {"both versions, the second one beside the first",
     {MEMINFO,
      {"proc/self/cgroup", "4:memory:/a\n0::/b\n"},
      {"sys/fs/cgroup/memory/a/memory.limit_in_bytes", V1_NONE},
      {"sys/fs/cgroup/memory/a/memory.usage_in_bytes", "1\n"},
      {"sys/fs/cgroup/unified/b/memory.max", "70000\n"},
      {"sys/fs/cgroup/unified/b/memory.current", "1\n"}},
     69999,
     "memory.max of cgroup /b"},
    {"lines that make no sense",
     {MEMINFO, {"proc/self/cgroup", "\n:\n4:memory\nx\n4:memoryless:/a\n"}},
     8192000000,
     "MemAvailable"},
};

static void record(const char *root, const struct recorded *f)
{
    char path[512];
    snprintf(path, sizeof(path), "%s/%s", root, f->path);
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0700);
        *slash = '/';
    }
    FILE *out = fopen(path, "w");
    ck_assert_ptr_nonnull(out);
    ck_assert_int_ge(fputs(f->text, out), 0);
    ck_assert_int_eq(fclose(out), 0);
}

START_TEST(test_available_memory_is_the_least_that_anybody_leaves)
{
    const struct recorded_machine *s = &MACHINES[_i];
    char root[] = "/tmp/tandem-available-XXXXXX", command[64];
    ck_assert_ptr_nonnull(mkdtemp(root));
    for (int i = 0; s->files[i].path; i++)
        record(root, &s->files[i]);
    struct available_memory m = available_memory(root);
    ck_assert_msg(m.bytes == s->bytes, "%s: %llu", s->what, (unsigned long long)m.bytes);
    ck_assert_msg(!strcmp(m.by, s->by), "%s: %s", s->what, m.by);
    snprintf(command, sizeof(command), "rm -r %s", root);
    ck_assert_int_eq(system(command), 0);
}
END_TEST

START_TEST(test_available_memory_of_this_machine_is_less_than_it_has)
{
    struct available_memory m = available_memory("");
    ck_assert_uint_gt(m.bytes, 0);
    ck_assert_uint_lt(m.bytes, (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE));
    ck_assert_str_ne(m.by, "");
}
END_TEST

START_TEST(test_available_memory_is_said_in_units)
{
    char out[24];
    ck_assert_str_eq(available_text(0, out), "0 bytes");
    ck_assert_str_eq(available_text(1023, out), "1023 bytes");
    ck_assert_str_eq(available_text(1536, out), "1.5 KiB");
    ck_assert_str_eq(available_text(900ull << 30, out), "900.0 GiB");
    ck_assert_str_eq(available_text(UINT64_MAX, out), "16777216.0 TiB");
}
END_TEST

int main(void)
{
    Suite *s = suite_create("available");
    TCase *t = tcase_create("files");
    tcase_add_loop_test(t, test_available_memory_is_the_least_that_anybody_leaves, 0,
                        (int)(sizeof(MACHINES) / sizeof(MACHINES[0])));
    tcase_add_test(t, test_available_memory_of_this_machine_is_less_than_it_has);
    tcase_add_test(t, test_available_memory_is_said_in_units);
    suite_add_tcase(s, t);
    return tap_main(s);
}
