/*
 * How fast the store is on this machine, as a share of what the wire and the disk can do.
 *
 * A store and two workers in this process, by the mapped arena as between processes of one host. The limits are measured in the same run,
 * in rounds that alternate limit, store, limit: the same requests from worker to worker, and O_DIRECT reads of a file in the
 * same directory, as many threads and bytes a read as the store has. Values are medians over the rounds, a share is the
 * median of the rounds' shares, and the spread is how much the limits of one round differ: less than that means nothing.
 *
 * The SSD part reads from the disk: the store is opened anew with memory for a quarter of the working set, which goes round
 * and round in it, its files are read past the page cache where the file system can do that, and they are dropped from the
 * page cache before (fdatasync, POSIX_FADV_DONTNEED) in any case.
 *
 * Putting until durable fills an empty store, three times, beside O_DIRECT writes of as much to one file, and fdatasync.
 *
 * Reading under writes: one reader, a request of 2 MiB at a time from the disk, beside a worker that puts new blocks as fast as
 * the store writes them, in a directory so small that old ones are deleted and their room collected all the time. Then the same once more
 * with the index of a directory of 1 TiB: beside RocksDB's blob files stand 16,384 more of them, with 1,048,576 records of a few bytes
 * whose places the store learns as it does of blocks (RocksDB does not know of them). They take 64 MiB.
 *
 * Threads: the caller waits; nothing is printed.
 * Errors:  TD_ERR_UNSUPPORTED where the directory's file system has no O_DIRECT; TD_ERR_IO; TD_ERR_NO_MEMORY.
 */
#pragma once

#include <stdint.h>

#include "base/status.h"
#include "proto/wire/block_header.h"

enum { KVSTORE_BENCH_ROWS = 24 };

struct kvstore_bench_config {
    const char *dir; /* exists; what the bench makes there it removes */
    const char *tls; /* as in xfer_config; NULL: auto */
    uint64_t bytes;  /* working set; 0: 512 MiB. Three times as much memory and six times as much disk are needed */
    uint32_t read_threads;  /* 0: as the store's default */
    uint32_t n_rounds;      /* 0: 6 */
    enum block_codec codec; /* of the store's SSD tier; rates are of pages, and what is lossy is not compared */
    uint64_t load_ns;       /* how long reading under writes is measured, twice; 0: 8 s each */
    uint64_t index_bytes;   /* size of the directory that the large index would be of; 0: 1 TiB */
};

struct kvstore_bench_row {
    char name[96];
    const char *unit; /* "GB/s", "ms", "x" */
    double value;
    double limit;         /* 0: none */
    double share, spread; /* of limit; 0: none */
};

struct kvstore_bench {
    uint32_t n_rows;
    struct kvstore_bench_row rows[KVSTORE_BENCH_ROWS];
};

enum td_status kvstore_bench(const struct kvstore_bench_config *config, struct kvstore_bench *out,
                             struct td_error *error_out);
