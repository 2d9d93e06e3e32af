/*
 * Places are kept in a hash table of many shards. Only the scanning thread changes them, and it holds a
 * shard's mutex for one change at a time; it reads them without the mutex. A table that grows is built beside
 * the old one, without the mutex, and then replaces it. So no reader waits for more than one change, however
 * many places there are. Each file keeps the keys that were found in it, so that forgetting the file costs in
 * proportion to its records.
 *
 * A file is opened for each read. That costs a hundredth of the read, and leaves nothing to be closed when
 * RocksDB removes the file.
 */
#include "kvstore/blobs.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/endian.h"
#include "base/mem.h"
#include "base/probing.h"

enum {
    FILE_HEADER_BYTES = 30,
    RECORD_HEADER_BYTES = 32,
    RECORD_KEY_BYTES = 1 + BLOCK_KEY_BYTES,
    ALIGN = 4096,
    SHARD_BITS = 10,
    N_SHARDS = 1 << SHARD_BITS,
    SHARD_MIN = 8,
    RECORDS_A_LOOK = 64 /* records between two looks at the clock */
};
static const uint64_t VALUE_MAX = 1 << 30;
static const uint64_t MIX =
    0x9e3779b97f4a7c15; /* 2^64 / golden ratio (Knuth, The Art of Computer Programming 3, 6.4) */

struct place {
    struct block_key key;
    uint32_t len_bytes; /* length of the value; 0: an empty bucket */
    uint32_t offset;    /* of the value in the file; RocksDB ends a file before it has 2 GiB */
    uint64_t file;
};

struct shard {            /* open addressing with linear probing, at most three quarters full */
    pthread_mutex_t lock; /* readers look up what the scanning thread changes */
    struct place *table;
    uint64_t n, cap;
};

struct scanned { /* the mark of a file: the records that were found in it */
    /* The file was scanned up to here. */
    uint64_t upto_bytes;
    struct block_key *keys;
    uint64_t n, cap;
};

struct blobs {
    char *dir;
    struct dir_files *files; /* borrowed */
    uint64_t until_ns;       /* when the present scan must stop */
    uint64_t n_taken;        /* files that the present scan has looked at */
    struct clock clock;
    struct blobs_work work;
    struct shard shards[N_SHARDS];
};

struct blobs *blobs_open(const char *dir, struct dir_files *files)
{
    struct blobs *b = mem_zalloc(sizeof(*b));
    b->dir = mem_strdup(dir);
    b->files = files;
    clock_init_real(&b->clock);
    for (int i = 0; i < N_SHARDS; i++)
        pthread_mutex_init(&b->shards[i].lock, NULL);
    return b;
}

/* -------------------------------------------------------------------- places */

static struct shard *shard_of(struct blobs *b, const struct block_key *key)
{
    return &b->shards[block_key_hash(key) * MIX >> (64 - SHARD_BITS)];
}

static uint64_t home_of(uint64_t cap, const struct block_key *key)
{
    return (block_key_hash(key) * MIX >> 16) & (cap - 1);
}

/* Index of the key's bucket, or of the empty bucket where it would go. */
static uint64_t bucket_of(const struct place *table, uint64_t cap, const struct block_key *key)
{
    uint64_t i = home_of(cap, key);
    while (table[i].len_bytes && !block_key_equal(&table[i].key, key))
        i = (i + 1) & (cap - 1);
    return i;
}

static void grow_shard(struct blobs *b, struct shard *s)
{
    uint64_t cap = s->cap ? 2 * s->cap : SHARD_MIN;
    struct place *table = mem_array(cap, sizeof(*table)), *old = s->table;
    for (uint64_t i = 0; i < s->cap; i++)
        if (old[i].len_bytes)
            table[bucket_of(table, cap, &old[i].key)] = old[i];
    b->work.n_moved += s->n;
    pthread_mutex_lock(&s->lock);
    s->table = table;
    s->cap = cap;
    pthread_mutex_unlock(&s->lock);
    free(old);
}

/* If a key has two places, the one in the younger file counts: garbage collection copies values into
 * younger files. */
static void note_place(struct blobs *b, const struct place *p)
{
    struct shard *s = shard_of(b, &p->key);
    if (4 * (s->n + 1) > 3 * s->cap)
        grow_shard(b, s);
    struct place *at = &s->table[bucket_of(s->table, s->cap, &p->key)];
    pthread_mutex_lock(&s->lock);
    s->n += !at->len_bytes;
    b->work.n_places += !at->len_bytes;
    if (!at->len_bytes || at->file <= p->file)
        *at = *p;
    pthread_mutex_unlock(&s->lock);
}

/* Empties a bucket. Call under the lock; returns the number of entries looked at. */
static uint64_t empty_bucket(struct shard *s, uint64_t hole)
{
    uint64_t mask = s->cap - 1, n = 1;
    for (uint64_t i = (hole + 1) & mask; s->table[i].len_bytes; i = (i + 1) & mask, n++)
        if (probing_fills(hole, i, home_of(s->cap, &s->table[i].key), mask)) {
            s->table[hole] = s->table[i];
            hole = i;
        }
    s->table[hole].len_bytes = 0;
    return n;
}

static void forget_place(struct blobs *b, const struct block_key *key, uint64_t file)
{
    struct shard *s = shard_of(b, key);
    uint64_t at = s->cap ? bucket_of(s->table, s->cap, key) : 0;
    b->work.n_moved++;
    if (!s->cap || !s->table[at].len_bytes || s->table[at].file != file)
        return; /* a younger copy has replaced it */
    pthread_mutex_lock(&s->lock);
    uint64_t n = empty_bucket(s, at);
    s->n--;
    pthread_mutex_unlock(&s->lock);
    b->work.n_places--;
    b->work.n_moved += n;
    b->work.longest_locked = n > b->work.longest_locked ? n : b->work.longest_locked;
}

/* ------------------------------------------------------------------ scanning */

static int open_blob(const struct blobs *b, uint64_t number, int flags)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/%06llu.blob", b->dir, (unsigned long long)number);
    return open(path, O_RDONLY | O_CLOEXEC | flags);
}

static void note_key(struct scanned *f, const struct block_key *key)
{
    f->keys = MEM_ROOM(f->keys, f->n, f->cap, 16);
    f->keys[f->n++] = *key;
}

/* Notes the complete records from upto_bytes on. False: the time is up before the end. */
static bool scan_records(struct blobs *b, int fd, const struct dir_file *file, struct scanned *f)
{
    uint8_t head[RECORD_HEADER_BYTES + RECORD_KEY_BYTES];
    for (uint32_t n = 1;; n++) {
        uint64_t at = f->upto_bytes;
        if (at + sizeof(head) > file->len_bytes || at > UINT32_MAX ||
            pread(fd, head, sizeof(head), (off_t)at) != (ssize_t)sizeof(head))
            return true;
        uint64_t key_len = get_u64(head), len = get_u64(head + 8);
        if (key_len != RECORD_KEY_BYTES || !len || len > VALUE_MAX || at + sizeof(head) + len > file->len_bytes)
            return true;
        struct place p = {.len_bytes = (uint32_t)len, .offset = (uint32_t)(at + sizeof(head)), .file = file->number};
        memcpy(p.key.b, head + RECORD_HEADER_BYTES + 1, BLOCK_KEY_BYTES);
        note_place(b, &p);
        note_key(f, &p.key);
        f->upto_bytes = at + sizeof(head) + len;
        if (n % RECORDS_A_LOOK == 0 && clock_now(&b->clock) >= b->until_ns)
            return false;
    }
}

static bool scan_file(struct blobs *b, struct dir_file *file)
{
    if (!file->mark) {
        struct scanned *f = file->mark = mem_zalloc(sizeof(*f));
        f->upto_bytes = FILE_HEADER_BYTES;
    }
    int fd = open_blob(b, file->number, 0);
    /* The file is gone or can't be read: readers will ask RocksDB. */
    if (fd < 0)
        return true;
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM); /* one page of each value is read */
    bool is_done = scan_records(b, fd, file, file->mark);
    close(fd);
    return is_done;
}

/* Forgets the file's places, from the last key to the first. False: the time is up before that. */
static bool forget_file(struct blobs *b, struct dir_file *file)
{
    struct scanned *f = file->mark;
    while (f && f->n) {
        forget_place(b, &f->keys[--f->n], file->number);
        if (f->n % RECORDS_A_LOOK == 0 && clock_now(&b->clock) >= b->until_ns && f->n)
            return false;
    }
    if (f)
        free(f->keys);
    free(f);
    file->mark = NULL;
    return true;
}

static bool take_change(void *user, struct dir_file *file)
{
    struct blobs *b = user;
    if (b->n_taken++ && clock_now(&b->clock) >= b->until_ns)
        return false; /* at least a part of the first file is done in each scan */
    if ((file->is_gone || file->is_fresh) && file->mark && !forget_file(b, file))
        return false;
    file->is_fresh = false; /* what is scanned from here on belongs to the new file of this number */
    return file->is_gone || scan_file(b, file);
}

bool blobs_scan(struct blobs *b, uint64_t for_ns)
{
    b->until_ns = for_ns ? clock_now(&b->clock) + for_ns : UINT64_MAX;
    b->n_taken = 0;
    return dir_files_visit_changed(b->files, take_change, b);
}

struct blobs_work blobs_work(const struct blobs *b)
{
    return b->work;
}

static bool drop_mark(void *user, struct dir_file *file)
{
    struct scanned *f = file->mark;
    (void)user;
    if (f)
        free(f->keys);
    free(f);
    file->mark = NULL;
    return true;
}

void blobs_close(struct blobs *b)
{
    if (!b)
        return;
    dir_files_each(b->files, drop_mark, b);
    for (int i = 0; i < N_SHARDS; i++) {
        pthread_mutex_destroy(&b->shards[i].lock);
        free(b->shards[i].table);
    }
    free(b->dir);
    free(b);
}

/* ------------------------------------------------------------------- reading */

size_t blobs_buffer_bytes(size_t len_bytes)
{
    return (len_bytes + 3 * ALIGN - 1) / ALIGN * ALIGN;
}

static struct place find_place(struct blobs *b, const struct block_key *key)
{
    struct shard *s = shard_of(b, key);
    struct place p = {.len_bytes = 0};
    pthread_mutex_lock(&s->lock);
    if (s->cap)
        p = s->table[bucket_of(s->table, s->cap, key)];
    pthread_mutex_unlock(&s->lock);
    return p;
}

enum td_status blobs_read(struct blobs *b, const struct block_key *key, void *buffer, size_t buffer_bytes,
                          const void **value_out, size_t *len_out)
{
    struct place p = find_place(b, key);
    if (!p.len_bytes)
        return TD_ERR_NOT_FOUND;
    uint64_t begin = p.offset / ALIGN * ALIGN, skip = p.offset - begin;
    size_t want = (skip + p.len_bytes + ALIGN - 1) / ALIGN * ALIGN;
    int fd = want <= buffer_bytes ? open_blob(b, p.file, O_DIRECT) : -1;
    if (fd < 0)
        return TD_ERR_NOT_FOUND;
    /* The last page may extend beyond the file's end. */
    ssize_t got = pread(fd, buffer, want, (off_t)begin);
    close(fd);
    if (got < (ssize_t)(skip + p.len_bytes))
        return TD_ERR_IO;
    *value_out = (uint8_t *)buffer + skip;
    *len_out = p.len_bytes;
    return TD_OK;
}
