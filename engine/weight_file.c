#include "engine/weight_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/endian.h"
#include "proto/wire/checksum.h"

enum {
    AT_FORMAT = 8,
    AT_N = 12,
    AT_LEN = 16,
    AT_TABLE = 24,
    AT_TABLE_SUM = 32,
    AT_KEY = 40,
    AT_SUM = AT_KEY + WEIGHT_FILE_KEY_BYTES,
    HEADER_BYTES = AT_SUM + 8,
    FIRST = 4096,
    ALIGN = 64,
    ROW_BYTES = 24,
};
static const char MAGIC[8] = "TANDEMPW";
/* Stand for the index of a matrix in checksums of header and table. */
enum { INDEX_HEADER = -1, INDEX_TABLE = -2 };

static uint64_t sum_of(int64_t index, const void *data, uint64_t len_bytes)
{
    const struct checksum_identity identity = {.id_a = 1, .index = (uint32_t)index};
    return checksum_bytes(&identity, data, len_bytes);
}

static uint64_t aligned(uint64_t at)
{
    return (at + ALIGN - 1) / ALIGN * ALIGN;
}

/* -------------------------------------------------------------------- reading */

static enum td_status check_header(const uint8_t *h, uint64_t len_bytes, const char *key, struct td_error *e)
{
    char wanted[WEIGHT_FILE_KEY_BYTES] = {0};
    memcpy(wanted, key, strnlen(key, sizeof(wanted) - 1));
    if (memcmp(h, MAGIC, sizeof(MAGIC)))
        return td_fail(e, TD_ERR_CORRUPT, "it is no file of packed weights");
    if (get_u32(h + AT_FORMAT) != WEIGHT_FILE_FORMAT)
        return td_fail(e, TD_ERR_VERSION, "format %u instead of %d", get_u32(h + AT_FORMAT), WEIGHT_FILE_FORMAT);
    if (get_u64(h + AT_SUM) != sum_of(INDEX_HEADER, h, AT_SUM))
        return td_fail(e, TD_ERR_CORRUPT, "the header's checksum differs");
    if (memcmp(h + AT_KEY, wanted, sizeof(wanted)))
        return td_fail(e, TD_ERR_VERSION, "it holds weights of something else");
    if (get_u64(h + AT_LEN) != len_bytes)
        return td_fail(e, TD_ERR_CORRUPT, "%llu bytes instead of %llu", (unsigned long long)len_bytes,
                       (unsigned long long)get_u64(h + AT_LEN));
    return TD_OK;
}

/* Checks the table: matrices follow each other from FIRST to the table, without gaps but for alignment. */
static enum td_status check_table(const struct weight_file *f, struct td_error *e)
{
    uint64_t table = get_u64(f->base + AT_TABLE), at = FIRST;
    if (!f->n || table > f->len_bytes || f->len_bytes - table != (uint64_t)f->n * ROW_BYTES ||
        get_u64(f->base + AT_TABLE_SUM) != sum_of(INDEX_TABLE, f->base + table, f->len_bytes - table))
        return td_fail(e, TD_ERR_CORRUPT, "the table is damaged");
    for (uint32_t i = 0; i < f->n; i++) {
        const uint8_t *row = f->base + table + (uint64_t)i * ROW_BYTES;
        uint64_t len = get_u64(row + 8);
        if (get_u64(row) != at || at > table || len > table - at)
            return td_fail(e, TD_ERR_CORRUPT, "the table is damaged");
        at = aligned(at + len);
    }
    return TD_OK;
}

static enum td_status check_matrices(const struct weight_file *f, struct td_error *e)
{
    const uint8_t *table = f->base + get_u64(f->base + AT_TABLE);
    for (uint32_t i = 0; i < f->n; i++) {
        uint64_t len;
        const void *data = weight_file_at(f, i, &len);
        if (get_u64(table + (uint64_t)i * ROW_BYTES + 16) != sum_of(i, data, len))
            return td_fail(e, TD_ERR_CORRUPT, "the checksum of matrix %u differs", i);
    }
    return TD_OK;
}

enum td_status weight_file_map(int fd, uint64_t len_bytes, const char *key, struct weight_file *out,
                               struct td_error *error_out)
{
    uint8_t header[HEADER_BYTES];
    const void *base = NULL;
    if (len_bytes < FIRST || pread(fd, header, sizeof(header), 0) != (ssize_t)sizeof(header))
        return td_fail(error_out, TD_ERR_CORRUPT, "%llu bytes are no header", (unsigned long long)len_bytes);
    enum td_status s = check_header(header, len_bytes, key, error_out);
    if (!s && mem_map_view(len_bytes, fd, &base))
        s = td_fail(error_out, TD_ERR_NO_MEMORY, "it can't be mapped: %s", strerror(errno));
    if (s)
        return s;
    struct weight_file f = {base, len_bytes, get_u32(header + AT_N)};
    s = check_table(&f, error_out);
    if (!s)
        s = check_matrices(&f, error_out);
    if (s)
        weight_file_unmap(&f);
    else
        *out = f;
    return s;
}

void weight_file_unmap(struct weight_file *f)
{
    mem_unmap((void *)(uintptr_t)f->base, f->len_bytes);
    *f = (struct weight_file){0};
}

const void *weight_file_at(const struct weight_file *f, uint32_t i, uint64_t *len_bytes_out)
{
    const uint8_t *row = f->base + get_u64(f->base + AT_TABLE) + (uint64_t)i * ROW_BYTES;
    *len_bytes_out = get_u64(row + 8);
    return f->base + get_u64(row);
}

/* -------------------------------------------------------------------- writing */

static enum td_status write_at(int fd, const void *data, uint64_t len_bytes, uint64_t at, struct td_error *e)
{
    const uint8_t *from = data;
    while (len_bytes) {
        ssize_t n = pwrite(fd, from, len_bytes, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return td_fail(e, n < 0 && errno != ENOSPC && errno != EDQUOT ? TD_ERR_IO : TD_ERR_NO_SPACE, "%s",
                           n < 0 ? strerror(errno) : "nothing was written");
        from += n;
        at += (uint64_t)n;
        len_bytes -= (uint64_t)n;
    }
    return TD_OK;
}

enum td_status weight_writer_add(struct weight_writer *w, const void *data, uint64_t len_bytes,
                                 struct td_error *error_out)
{
    uint8_t row[ROW_BYTES];
    uint64_t at = w->n ? aligned(w->at) : FIRST;
    enum td_status s = write_at(w->fd, data, len_bytes, at, error_out);
    if (s)
        return s;
    sync_file_range(w->fd, (off_t)at, (off_t)len_bytes,
                    SYNC_FILE_RANGE_WRITE); /* the disk works while the next matrix is packed */
    put_u64(row, at);
    put_u64(row + 8, len_bytes);
    put_u64(row + 16, sum_of(w->n, data, len_bytes));
    bytes_append(&w->table, row, sizeof(row));
    w->at = at + len_bytes;
    w->n++;
    return TD_OK;
}

enum td_status weight_writer_end(struct weight_writer *w, const char *key, struct td_error *error_out)
{
    uint8_t h[HEADER_BYTES] = {0};
    uint64_t table = aligned(w->at);
    memcpy(h, MAGIC, sizeof(MAGIC));
    put_u32(h + AT_FORMAT, WEIGHT_FILE_FORMAT);
    put_u32(h + AT_N, w->n);
    put_u64(h + AT_LEN, table + w->table.len);
    put_u64(h + AT_TABLE, table);
    put_u64(h + AT_TABLE_SUM, sum_of(INDEX_TABLE, w->table.data, w->table.len));
    memcpy(h + AT_KEY, key, strnlen(key, WEIGHT_FILE_KEY_BYTES - 1));
    put_u64(h + AT_SUM, sum_of(INDEX_HEADER, h, AT_SUM));
    enum td_status s = write_at(w->fd, w->table.data, w->table.len, table, error_out);
    if (!s)
        s = write_at(w->fd, h, sizeof(h), 0, error_out);
    if (!s && fsync(w->fd))
        s = td_fail(error_out, TD_ERR_IO, "%s", strerror(errno));
    return s;
}

void weight_writer_free(struct weight_writer *w)
{
    bytes_free(&w->table);
}
