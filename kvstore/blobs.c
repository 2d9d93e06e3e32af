/*
 * The places are a hash table under a mutex that is held for one probe; files are opened for each read, which costs a
 * hundredth of it and leaves nothing to be closed when RocksDB removes one.
 */
#include "kvstore/blobs.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/endian.h"
#include "base/mem.h"

enum { FILE_HEADER_BYTES = 30, RECORD_HEADER_BYTES = 32, RECORD_KEY_BYTES = 1 + BLOCK_KEY_BYTES, ALIGN = 4096 };
static const uint64_t VALUE_MAX = 1 << 30;

struct place {
    struct block_key key;
    uint32_t len_bytes; /* 0: an empty bucket */
    uint64_t file, offset;
};

struct blob_file {
    uint64_t number, scanned_bytes;
    bool is_there;
};

struct blobs {
    char *dir;
    struct blob_file *files; /* of the scanning thread */
    uint32_t n_files;
    pthread_mutex_t lock; /* the table: readers look up what one thread fills in */
    struct place *table;  /* open addressing, at most half full */
    uint64_t n, cap;
};

struct blobs *blobs_open(const char *dir)
{
    struct blobs *b = mem_zalloc(sizeof(*b));
    b->dir = mem_strdup(dir);
    b->cap = 1024;
    b->table = mem_array(b->cap, sizeof(*b->table));
    pthread_mutex_init(&b->lock, NULL);
    return b;
}

void blobs_close(struct blobs *b)
{
    if (!b)
        return;
    pthread_mutex_destroy(&b->lock);
    free(b->dir);
    free(b->files);
    free(b->table);
    free(b);
}

/* -------------------------------------------------------------------- places */

static struct place *bucket(struct place *table, uint64_t cap, const struct block_key *key)
{
    uint64_t i = block_key_hash(key) & (cap - 1);
    while (table[i].len_bytes && !block_key_equal(&table[i].key, key))
        i = (i + 1) & (cap - 1);
    return &table[i];
}

/* Without the places in the given file; 0: with all. Under the lock. */
static void rebuild(struct blobs *b, uint64_t cap, uint64_t without_file)
{
    struct place *table = mem_array(cap, sizeof(*table));
    uint64_t n = 0;
    for (uint64_t i = 0; i < b->cap; i++) {
        const struct place *p = &b->table[i];
        if (!p->len_bytes || p->file == without_file)
            continue;
        *bucket(table, cap, &p->key) = *p;
        n++;
    }
    free(b->table);
    b->table = table;
    b->cap = cap;
    b->n = n;
}

/* Of two places of one key the one in the younger file counts: garbage collection copies. */
static void note_place(struct blobs *b, const struct place *p)
{
    pthread_mutex_lock(&b->lock);
    if (2 * (b->n + 1) > b->cap)
        rebuild(b, 2 * b->cap, 0);
    struct place *at = bucket(b->table, b->cap, &p->key);
    b->n += !at->len_bytes;
    if (!at->len_bytes || at->file <= p->file)
        *at = *p;
    pthread_mutex_unlock(&b->lock);
}

/* ------------------------------------------------------------------ scanning */

static int open_blob(const struct blobs *b, uint64_t number, int flags)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/%06llu.blob", b->dir, (unsigned long long)number);
    return open(path, O_RDONLY | O_CLOEXEC | flags);
}

/* Record after record, as far as they are complete. */
static void scan_file(struct blobs *b, struct blob_file *f)
{
    uint8_t head[RECORD_HEADER_BYTES + RECORD_KEY_BYTES];
    struct stat st;
    int fd = open_blob(b, f->number, 0);
    if (fd < 0)
        return;
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM); /* one page of each value */
    uint64_t at = f->scanned_bytes, size = fstat(fd, &st) ? 0 : (uint64_t)st.st_size;
    while (at + sizeof(head) <= size && pread(fd, head, sizeof(head), (off_t)at) == (ssize_t)sizeof(head)) {
        uint64_t key_len = get_u64(head), len = get_u64(head + 8);
        if (key_len != RECORD_KEY_BYTES || !len || len > VALUE_MAX || at + sizeof(head) + len > size)
            break;
        struct place p = {.len_bytes = (uint32_t)len, .file = f->number, .offset = at + sizeof(head)};
        memcpy(p.key.b, head + RECORD_HEADER_BYTES + 1, BLOCK_KEY_BYTES);
        note_place(b, &p);
        at += sizeof(head) + len;
    }
    f->scanned_bytes = at;
    close(fd);
}

static struct blob_file *file_of(struct blobs *b, uint64_t number)
{
    for (uint32_t i = 0; i < b->n_files; i++)
        if (b->files[i].number == number)
            return &b->files[i];
    b->files = mem_resize(b->files, b->n_files + 1, sizeof(*b->files));
    b->files[b->n_files] = (struct blob_file){.number = number, .scanned_bytes = FILE_HEADER_BYTES};
    return &b->files[b->n_files++];
}

static void forget_gone(struct blobs *b)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->n_files; i++) {
        if (b->files[i].is_there) {
            b->files[n++] = b->files[i];
            continue;
        }
        pthread_mutex_lock(&b->lock);
        rebuild(b, b->cap, b->files[i].number);
        pthread_mutex_unlock(&b->lock);
    }
    b->n_files = n;
}

void blobs_scan(struct blobs *b)
{
    DIR *d = opendir(b->dir);
    if (!d)
        return;
    for (uint32_t i = 0; i < b->n_files; i++)
        b->files[i].is_there = false;
    for (struct dirent *e; (e = readdir(d));) {
        char *end;
        unsigned long long number = strtoull(e->d_name, &end, 10);
        struct stat st;
        if (end == e->d_name || strcmp(end, ".blob") || fstatat(dirfd(d), e->d_name, &st, 0))
            continue;
        struct blob_file *f = file_of(b, number);
        f->is_there = true;
        if ((uint64_t)st.st_size > f->scanned_bytes)
            scan_file(b, f);
    }
    closedir(d);
    forget_gone(b);
}

/* ------------------------------------------------------------------- reading */

size_t blobs_buffer_bytes(size_t len_bytes)
{
    return (len_bytes + 3 * ALIGN - 1) / ALIGN * ALIGN;
}

enum td_status blobs_read(struct blobs *b, const struct block_key *key, void *buffer, size_t buffer_bytes,
                          const void **value_out, size_t *len_out)
{
    pthread_mutex_lock(&b->lock);
    struct place p = *bucket(b->table, b->cap, key);
    pthread_mutex_unlock(&b->lock);
    if (!p.len_bytes)
        return TD_ERR_NOT_FOUND;
    uint64_t begin = p.offset / ALIGN * ALIGN, skip = p.offset - begin;
    size_t want = (skip + p.len_bytes + ALIGN - 1) / ALIGN * ALIGN;
    int fd = want <= buffer_bytes ? open_blob(b, p.file, O_DIRECT) : -1;
    if (fd < 0)
        return TD_ERR_NOT_FOUND;
    ssize_t got = pread(fd, buffer, want, (off_t)begin); /* the last page may lie beyond the file's end */
    close(fd);
    if (got < (ssize_t)(skip + p.len_bytes))
        return TD_ERR_IO;
    *value_out = (uint8_t *)buffer + skip;
    *len_out = p.len_bytes;
    return TD_OK;
}
