#include "kvstore/forgotten.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"

static const off_t FILE_BYTES = (off_t)FORGOTTEN_MAX * BLOCK_KEY_BYTES;

struct forgotten {
    int fd; /* -1: no file */
    const struct log *log;
    struct block_key *keys; /* in rising order; in the file in the order in which they were added */
    uint32_t n;
    bool is_all;
};

static const struct block_key NONE,
    ALL = {{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}};

static void write_at(struct forgotten *f, const void *data, size_t len, uint32_t at)
{
    if (f->fd >= 0 && pwrite(f->fd, data, len, (off_t)at * BLOCK_KEY_BYTES) != (ssize_t)len)
        log_error(f->log, "blocks to be forgotten can't be written down: they may come back at the next start: %s",
                  strerror(errno));
}

/* Index of the key among the sorted keys, or where it would be inserted. */
static uint32_t place_of(const struct forgotten *f, const struct block_key *key)
{
    uint32_t low = 0, high = f->n;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (memcmp(f->keys[middle].b, key->b, BLOCK_KEY_BYTES) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool is_at(const struct forgotten *f, uint32_t place, const struct block_key *key)
{
    return place < f->n && block_key_equal(&f->keys[place], key);
}

static void insert(struct forgotten *f, uint32_t place, const struct block_key *key)
{
    memmove(&f->keys[place + 1], &f->keys[place], (f->n - place) * sizeof(f->keys[0]));
    f->keys[place] = *key;
    f->n++;
}

static void read_file(struct forgotten *f)
{
    struct block_key *found = mem_array(FORGOTTEN_MAX, sizeof(*found));
    ssize_t n_bytes = f->fd < 0 ? 0 : pread(f->fd, found, (size_t)FILE_BYTES, 0);
    for (ssize_t i = 0; i < n_bytes / BLOCK_KEY_BYTES; i++) {
        uint32_t place = place_of(f, &found[i]);
        if (block_key_equal(&found[i], &ALL))
            f->is_all = true;
        else if (!block_key_equal(&found[i], &NONE) && !is_at(f, place, &found[i]))
            insert(f, place, &found[i]);
    }
    free(found);
}

struct forgotten *forgotten_open(const char *dir, const struct log *log)
{
    struct forgotten *f = mem_zalloc(sizeof(*f));
    struct bytes path = {0};
    f->log = log;
    f->keys = mem_array(FORGOTTEN_MAX, sizeof(f->keys[0]));
    bytes_printf(&path, "%s/forgotten", dir);
    f->fd = open(path.data, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    int error = f->fd < 0 ? errno : posix_fallocate(f->fd, 0, FILE_BYTES);
    if (error)
        log_warn(log, "no room to write down what is to be forgotten path=%s: %s", path.data, strerror(error));
    bytes_free(&path);
    read_file(f);
    return f;
}

void forgotten_close(struct forgotten *f)
{
    if (!f)
        return;
    if (f->fd >= 0)
        close(f->fd);
    free(f->keys);
    free(f);
}

void forgotten_add(struct forgotten *f, const struct block_key *key)
{
    uint32_t place = key ? place_of(f, key) : 0;
    if (f->is_all || (key && is_at(f, place, key)))
        return;
    if (!key || f->n == FORGOTTEN_MAX) {
        f->is_all = true;
        write_at(f, &ALL, sizeof(ALL), 0);
        return;
    }
    write_at(f, key, sizeof(*key), f->n);
    insert(f, place, key);
}

bool forgotten_has(const struct forgotten *f, const struct block_key *key)
{
    return f->is_all || is_at(f, place_of(f, key), key);
}

bool forgotten_all(const struct forgotten *f)
{
    return f->is_all;
}

const struct block_key *forgotten_keys(const struct forgotten *f, uint32_t *n_out)
{
    *n_out = f->is_all ? 0 : f->n;
    return f->keys;
}

void forgotten_clear(struct forgotten *f)
{
    /* One more than n: the mark for "every block" may have been written in the place of a key, or in an
     * empty file. */
    uint32_t n = f->n < FORGOTTEN_MAX ? f->n + 1 : f->n;
    memset(f->keys, 0, n * sizeof(f->keys[0]));
    write_at(f, f->keys, n * sizeof(f->keys[0]), 0);
    f->n = 0;
    f->is_all = false;
}
