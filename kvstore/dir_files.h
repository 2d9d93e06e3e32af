/*
 * What lies in RocksDB's directory: how much its files take, and which blob files came, grew and went.
 *
 * Asking costs in proportion to what changed since the last time, not to the directory: the kernel says which files were made, closed and
 * removed (inotify(7)). Only files that are being written and files that are no blob files, of which there are few, are looked at each
 * time. The whole directory is listed where the kernel doesn't say (there is no watch to be had, or its queue was full).
 *
 * Rejected: listing each time (a directory of 1 TiB has 16,384 blob files, and it is asked about for each 32 MiB that are written);
 * RocksDB's own lists (its C API names no blob files).
 *
 * Threads: one.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct dir_files;

struct dir_file { /* a blob file; owned by dir_files, valid until the visit that finds it gone ends */
    uint64_t number;
    uint64_t len_bytes, disk_bytes;
    bool is_gone;  /* the last visit */
    bool is_fresh; /* the first visit, or the first after a file of this number was replaced */
    void *mark;    /* the visitor's own; NULL at first. Once the file is gone it must be NULL again */

    bool is_changed;  /* since the last visit */
    uint8_t looks;    /* how often the file is still to be looked at; UINT8_MAX: until it is closed */
    uint64_t seen_at; /* number of the listing that found it */
};

struct dir_files *dir_files_open(const char *path); /* copied; it need not be there yet */
void dir_files_close(struct dir_files *d);          /* NULL is fine. Marks must be NULL */

void dir_files_update(struct dir_files *d); /* takes in what changed */
/* As of the last update. */
uint64_t dir_files_disk_bytes(const struct dir_files *d); /* of all regular files */
/* Of files that are no blob files and whose name ends with suffix. */
uint64_t dir_files_len_bytes(const struct dir_files *d, const char *suffix);
uint64_t dir_files_n_blobs(const struct dir_files *d);
uint64_t dir_files_n_looks(const struct dir_files *d); /* files looked at since opening: what updates cost */

/* The blob file of that number; NULL if there is none. */
struct dir_file *dir_files_find(const struct dir_files *d, uint64_t number);

/* False: not done with this file; it is visited again. */
typedef bool dir_files_visit_fn(void *user, struct dir_file *file);
/* Visits blob files that changed; NULL: nobody wants to know. Ends when a visit says false; returns whether all were visited. */
bool dir_files_visit_changed(struct dir_files *d, dir_files_visit_fn *visit, void *user);
/* Visits all blob files, also those that are gone and were not visited since. */
void dir_files_each(struct dir_files *d, dir_files_visit_fn *visit, void *user);
