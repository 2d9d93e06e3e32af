/*
 * The files in RocksDB's directory: their size on disk, and which blob files came, grew and went.
 *
 * The cost of an update is proportional to the changes since the last one, not to the directory: the kernel
 * reports files that were made, closed and removed (inotify(7)). Only blob files that are being written, and
 * the few files that are not blob files, are looked at each time. The whole directory is listed if the kernel
 * does not report (no watch is available, or its queue was full).
 *
 * Rejected: listing each time (a directory of 1 TiB has 16,384 blob files, and it is measured for each 32 MiB
 * written); RocksDB's own lists (its C API names no blob files).
 *
 * Threads: one.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct dir_files;

struct dir_file { /* a blob file; owned by dir_files; valid until the end of the visit that finds it gone */
    uint64_t number;
    uint64_t len_bytes, disk_bytes;
    bool is_gone;  /* the file was removed; this is its last visit */
    bool is_fresh; /* the first visit, or the first one after the file of this number was replaced */
    void *mark;    /* the visitor's own; NULL at first. The visitor sets it to NULL when the file is gone. */

    bool is_changed;  /* changed since the last visit */
    uint8_t looks;    /* how often the file will still be looked at; UINT8_MAX: until it is closed */
    uint64_t seen_at; /* number of the listing that found it last */
};

struct dir_files *dir_files_open(const char *path); /* path is copied; the directory need not exist yet */
void dir_files_close(struct dir_files *d);          /* NULL is fine. All marks must be NULL */

void dir_files_update(struct dir_files *d); /* takes in the changes since the last call */
/* The answers below are as of the last update. */
uint64_t dir_files_disk_bytes(const struct dir_files *d); /* of all regular files */
/* Length of the files that are not blob files and whose name ends with suffix. */
uint64_t dir_files_len_bytes(const struct dir_files *d, const char *suffix);
uint64_t dir_files_n_blobs(const struct dir_files *d);
/* Files looked at since opening: what the updates cost. */
uint64_t dir_files_n_looks(const struct dir_files *d);

/* Return false if the visit of this file is not finished; the file is visited again. */
typedef bool dir_files_visit_fn(void *user, struct dir_file *file);
/* Visits the blob files that changed since their last visit, until a visit returns false; true if all were
 * visited. visit NULL: forgets the changes. */
bool dir_files_visit_changed(struct dir_files *d, dir_files_visit_fn *visit, void *user);
/* Visits all blob files, also those that are gone but were not visited since. */
void dir_files_each(struct dir_files *d, dir_files_visit_fn *visit, void *user);
