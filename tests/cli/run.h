/* Runs a command of tandem inside the test, and keeps what it printed. */
#pragma once

#include <sys/mman.h>

#include "tests/tap.h"

/* What the latest command left. */
static struct {
    int code;
    char out[1 << 16], err[4096];
} ran;

static inline void read_back(int fd, char *text, size_t size)
{
    ssize_t n = pread(fd, text, size - 1, 0);
    text[n > 0 ? n : 0] = 0;
    close(fd);
}

static inline void give_input(const void *input, size_t len)
{
    char path[64];
    int fd = memfd_create("input", 0);
    ck_assert_int_eq(write(fd, input, len), (ssize_t)len);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    ck_assert_ptr_nonnull(freopen(path, "r", stdin));
    close(fd);
}

/* words: between blanks; '~' stands for a blank inside a word. */
static inline void run(int (*command)(int, char **), const char *words)
{
    char text[4096], *argv[64], *save;
    int argc = 0, out = memfd_create("out", 0), err = memfd_create("err", 0), old_out = dup(1), old_err = dup(2);
    snprintf(text, sizeof(text), "command %s", words);
    for (char *w = strtok_r(text, " ", &save); w && argc < 63; w = strtok_r(NULL, " ", &save)) {
        for (char *c = w; *c; c++)
            *c = *c == '~' ? ' ' : *c;
        argv[argc++] = w;
    }
    argv[argc] = NULL;
    fflush(stdout);
    dup2(out, 1);
    dup2(err, 2);
    ran.code = command(argc, argv);
    fflush(stdout);
    dup2(old_out, 1);
    dup2(old_err, 2);
    close(old_out);
    close(old_err);
    read_back(out, ran.out, sizeof(ran.out));
    read_back(err, ran.err, sizeof(ran.err));
}
