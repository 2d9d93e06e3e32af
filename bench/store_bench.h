/*
 * Measures how fast the store is on this machine, as a share of what the wire and the disk can do.
 *
 * A store and two workers run in this process, with the mapped arena as between processes of one host. The
 * limits are measured in the same run, in rounds of limit, store, limit: the same requests from worker to
 * worker, and O_DIRECT reads of a file in the same directory, with as many threads and bytes per read as the
 * store has. Values are medians over the rounds; a share is the median of the rounds' shares; the spread is
 * how much the two limits of a round differ. Differences below the spread mean nothing.
 *
 * The SSD part reads from the disk: the store is opened anew with memory for a quarter of the working set,
 * which is read in a circle. Files are read past the page cache if the file system can do that, and are
 * dropped from the page cache before in any case (fdatasync, POSIX_FADV_DONTNEED).
 *
 * Putting until durable fills an empty store, three times; the limit is O_DIRECT writes of as much to one
 * file, and fdatasync.
 *
 * Reading under writes: one reader asks the disk for 2 MiB at a time, while a worker puts new blocks as fast
 * as the store writes them, into a directory so small that old blocks are deleted and their room collected
 * all the time. Then the same with the index of a directory of 1 TiB: beside RocksDB's blob files lie 16,384
 * more, with 1,048,576 records of a few bytes, whose places the store learns like those of blocks (RocksDB
 * does not know of them). They take 64 MiB.
 *
 * Threads: the caller waits; nothing is printed.
 * Errors:  TD_ERR_UNSUPPORTED if the directory's file system has no O_DIRECT; TD_ERR_IO; TD_ERR_NO_MEMORY.
 */
#pragma once

#include <stdint.h>

#include "base/status.h"
#include "proto/wire/block_header.h"

enum { KVSTORE_BENCH_ROWS = 24 };

struct kvstore_bench_config {
    const char *dir;        /* must exist; the bench removes what it makes there */
    const char *transports; /* as in xfer_config; NULL: auto */
    /* Working set; 0: 512 MiB. Needs three times as much memory and six times as much disk. */
    uint64_t bytes;
    uint32_t read_threads; /* 0: the store's default */
    uint32_t n_rounds;     /* 0: 6 */
    /* Of the store's SSD tier; rates count pages; results of a lossy codec are not compared. */
    enum block_codec codec;
    uint64_t load_ns;     /* length of each of the two measurements of reading under writes; 0: 8 s */
    uint64_t index_bytes; /* size of the directory whose index the large index imitates; 0: 1 TiB */
};

struct kvstore_bench_row {
    char name[96];
    const char *unit; /* "GB/s", "ms", "x" */
    double value;
    double limit;         /* 0: there is none */
    double share, spread; /* of limit; 0: there is none */
};

struct kvstore_bench {
    uint32_t n_rows;
    struct kvstore_bench_row rows[KVSTORE_BENCH_ROWS];
};

enum td_status kvstore_bench(const struct kvstore_bench_config *config, struct kvstore_bench *out,
                             struct td_error *error_out);
