/* A temporary directory for a test, and damage as disks do it. */
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/tap.h"

struct temp_dir {
    char root[64], store[96]; /* path of the store's directory, which is not made here */
};

static inline struct temp_dir temp_dir_make(void)
{
    struct temp_dir d = {.root = "/tmp/tandem-store-XXXXXX"};
    ck_assert_ptr_nonnull(mkdtemp(d.root));
    snprintf(d.store, sizeof(d.store), "%s/store", d.root);
    return d;
}

static inline int temp_dir_remove_one(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
    (void)st, (void)kind, (void)ftw;
    return remove(path);
}

static inline void temp_dir_remove(const struct temp_dir *d)
{
    nftw(d->root, temp_dir_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static inline void temp_dir_remove_store(const struct temp_dir *d)
{
    nftw(d->store, temp_dir_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* In each file of dir whose name ends with suffix, flips one bit of the first occurrence of the bytes.
 * Returns the number of changed files. */
static inline int temp_dir_flip(const char *dir, const char *suffix, const void *bytes, size_t len)
{
    int n = 0;
    DIR *d = opendir(dir);
    ck_assert_ptr_nonnull(d);
    for (struct dirent *e; (e = readdir(d));) {
        size_t name = strlen(e->d_name), end = strlen(suffix);
        if (name < end || strcmp(e->d_name + name - end, suffix))
            continue;
        int fd = openat(dirfd(d), e->d_name, O_RDWR);
        struct stat st;
        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(fstat(fd, &st), 0);
        if (st.st_size) {
            uint8_t *map = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            ck_assert_ptr_ne(map, MAP_FAILED);
            uint8_t *at = memmem(map, (size_t)st.st_size, bytes, len);
            if (at) {
                at[len / 2] ^= 4;
                n++;
            }
            munmap(map, (size_t)st.st_size);
        }
        close(fd);
    }
    closedir(d);
    return n;
}
