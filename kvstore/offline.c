#include "kvstore/offline.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "kvstore/codec.h"
#include "kvstore/ssd.h"

enum { PROGRESS_EVERY = 64 };

struct offline {
    struct ssd *db;
};

enum td_status offline_open(const char *dir, enum offline_mode mode, const struct clock *clock, const struct log *log,
                            struct offline **out, struct td_error *error_out)
{
    static const enum ssd_mode MODES[] = {SSD_INSPECT, SSD_REPAIR, SSD_SERVE};
    struct offline *o = mem_zalloc(sizeof(*o));
    const struct ssd_config c = {
        .dir = dir, .mode = MODES[mode], .capacity_bytes = UINT64_MAX, .clock = clock, .log = log};
    enum td_status status = ssd_open(&c, &o->db, error_out);
    if (status) {
        free(o);
        return status;
    }
    *out = o;
    return TD_OK;
}

void offline_close(struct offline *o)
{
    if (!o)
        return;
    ssd_close(o->db);
    free(o);
}

/* ------------------------------------------------------------------ listing */

struct visit {
    offline_visit_fn *fn;
    void *user;
};

static bool visit_header(void *user, const struct block_key *key, const void *header, size_t len_bytes)
{
    struct visit *v = user;
    struct offline_block b = {.status = TD_OK};
    b.status = block_header_decode(header, len_bytes, &b.header);
    if (!b.status && !block_key_equal(&b.header.key, key))
        b.status = TD_ERR_CORRUPT;
    b.header.key = *key;
    v->fn(v->user, &b);
    return true;
}

enum td_status offline_each(struct offline *o, offline_visit_fn *visit, void *user, struct td_error *error_out)
{
    struct visit v = {visit, user};
    return ssd_each(o->db, visit_header, &v, error_out);
}

static void sum_up_tenant(struct offline_info *i, const struct block_header *h)
{
    uint32_t n = 0;
    while (n < i->n_tenants && i->tenants[n].tenant != h->tenant)
        n++;
    if (n == OFFLINE_TENANTS)
        n--;
    if (n == i->n_tenants)
        i->tenants[i->n_tenants++].tenant = h->tenant;
    i->tenants[n].n_blocks++;
    i->tenants[n].stored_bytes += h->payload_bytes;
}

static void sum_up(void *user, const struct offline_block *b)
{
    struct offline_info *i = user;
    i->n_blocks++;
    if (b->status) {
        i->n_bad_headers++;
        return;
    }
    i->payload_bytes += kv_layout_page_bytes(&b->header.layout);
    i->stored_bytes += b->header.payload_bytes;
    i->n_by_codec[b->header.codec]++;
    sum_up_tenant(i, &b->header);
    if (!i->n_layouts)
        i->layout = b->header.layout;
    if (!i->n_layouts || kv_layout_match(&i->layout, &b->header.layout, NULL))
        i->n_layouts++;
}

enum td_status offline_info(struct offline *o, struct offline_info *out, struct td_error *error_out)
{
    struct ssd_info d = ssd_info(o->db);
    struct offline_info i = {.dir_bytes = d.dir_bytes,
                             .blob_bytes = d.blob_bytes,
                             .garbage_bytes = d.garbage_bytes,
                             .n_blob_files = d.n_blob_files};
    enum td_status status = offline_each(o, sum_up, &i, error_out);
    if (!status)
        *out = i;
    return status;
}

/* ----------------------------------------------------------- checking, copying */

struct keys {
    struct block_key *all;
    uint64_t n, cap;
};

static void add_key(void *user, const struct offline_block *b)
{
    struct keys *k = user;
    k->all = MEM_ROOM(k->all, k->n, k->cap, 256);
    k->all[k->n++] = b->header.key;
}

static void count_block(struct offline_report *r, enum td_status status)
{
    r->n_blocks++;
    r->n_right += status == TD_OK;
    r->n_absent += status == TD_ERR_NOT_FOUND;
    r->n_corrupt += status == TD_ERR_CORRUPT;
    r->n_checksum += status == TD_ERR_CHECKSUM;
    r->n_version += status == TD_ERR_VERSION;
    r->n_unreadable += status == TD_ERR_IO || status == TD_NOT_YET;
}

static bool write_all(int fd, const uint8_t *data, size_t len)
{
    for (ssize_t n; len; data += n, len -= (size_t)n)
        if ((n = write(fd, data, len)) <= 0)
            return false;
    return true;
}

/* Whether an encoded payload becomes a page is known only after decoding it. */
static enum td_status check_value(const void *value, size_t len, const struct block_key *key)
{
    struct block_header h;
    enum td_status status = block_header_decode(value, len, &h);
    if (!status)
        status = block_verify(value, len, key, &h.layout, &h);
    if (status || h.codec == BLOCK_RAW)
        return status;
    struct codec *c = codec_open(&h.layout);
    void *page = mem_array(kv_layout_page_bytes(&h.layout), 1);
    status = codec_decode(c, h.codec, (const uint8_t *)value + BLOCK_HEADER_BYTES, h.payload_bytes, page);
    free(page);
    codec_close(c);
    return status;
}

/* Checks a block against the layout in its own header: a store that opens the directory checks its own
 * layout later. */
static enum td_status check_block(struct offline *o, const struct block_key *key, int fd, struct offline_report *r,
                                  bool *copied_out)
{
    struct ssd_value v;
    enum td_status status = ssd_get(o->db, key, &v);
    if (!status) {
        status = check_value(v.data, v.len_bytes, key);
        r->n_bytes += v.len_bytes;
        *copied_out = status || fd < 0 || write_all(fd, v.data, v.len_bytes);
        ssd_release(o->db, &v);
    }
    return status;
}

static enum td_status check_all(struct offline *o, int fd, const struct offline_work *work, struct offline_report *out,
                                struct td_error *e)
{
    struct keys k = {0};
    struct offline_report r = {0};
    enum td_status status = offline_each(o, add_key, &k, e);
    for (uint64_t i = 0; !status && i < k.n; i++) {
        bool is_copied = true;
        enum td_status one = check_block(o, &k.all[i], fd, &r, &is_copied);
        if (!is_copied) {
            status = td_fail(e, TD_ERR_IO, "writing: %s", strerror(errno));
            break;
        }
        count_block(&r, one);
        if (one && work->on_bad)
            work->on_bad(work->user, &k.all[i], one);
        if (work->on_progress && (i % PROGRESS_EVERY == 0 || i + 1 == k.n))
            work->on_progress(work->user, i + 1, k.n);
    }
    free(k.all);
    if (!status)
        *out = r;
    return status;
}

enum td_status offline_verify(struct offline *o, const struct offline_work *work, struct offline_report *out,
                              struct td_error *error_out)
{
    return check_all(o, -1, work, out, error_out);
}

enum td_status offline_export(struct offline *o, const char *path, const struct offline_work *work,
                              struct offline_report *out, struct td_error *error_out)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return td_fail(error_out, TD_ERR_IO, "%s: %s", path, strerror(errno));
    enum td_status status = check_all(o, fd, work, out, error_out);
    if (!status && fdatasync(fd))
        status = td_fail(error_out, TD_ERR_IO, "%s: %s", path, strerror(errno));
    close(fd);
    if (status)
        unlink(path);
    return status;
}

/* ------------------------------------------------------------------ import */

struct import {
    struct offline *store;
    const struct offline_work *work;
    struct offline_report report;
    /* Bytes put since the last sync. */
    uint64_t n_unsynced;
};

static enum td_status put_block(struct import *m, const uint8_t *value, const struct block_header *h)
{
    enum td_status s = check_value(value, BLOCK_HEADER_BYTES + h->payload_bytes, &h->key);
    count_block(&m->report, s);
    if (s && m->work->on_bad)
        m->work->on_bad(m->work->user, &h->key, s);
    if (s)
        return TD_OK;
    s = ssd_put(m->store->db, &h->key, value, value + BLOCK_HEADER_BYTES, h->payload_bytes, false);
    m->n_unsynced += h->payload_bytes;
    if (!s && m->n_unsynced >= ssd_batch_bytes(m->store->db)) {
        s = ssd_sync(m->store->db);
        m->n_unsynced = 0;
    }
    return s;
}

/* Puts all blocks of the file. Progress counts bytes, because the number of blocks is known only at the
 * end. */
static enum td_status put_all(struct import *m, const char *path, const uint8_t *data, uint64_t len, struct td_error *e)
{
    struct block_header h;
    enum td_status s = TD_OK;
    for (uint64_t at = 0; at < len && !s; at += BLOCK_HEADER_BYTES + h.payload_bytes) {
        if (block_header_decode(data + at, len - at, &h) || h.payload_bytes > len - at - BLOCK_HEADER_BYTES)
            return td_fail(e, TD_ERR_CORRUPT, "%s: byte %llu: no whole block begins here", path,
                           (unsigned long long)at);
        s = put_block(m, data + at, &h);
        m->report.n_bytes = at + BLOCK_HEADER_BYTES + h.payload_bytes;
        if (m->work->on_progress && (m->report.n_blocks % PROGRESS_EVERY == 0 || m->report.n_bytes == len))
            m->work->on_progress(m->work->user, m->report.n_bytes, len);
    }
    return s ? td_fail(e, s, "the block can't be written: %s", td_status_name(s)) : TD_OK;
}

enum td_status offline_import(struct offline *o, const char *path, const struct offline_work *work,
                              struct offline_report *out, struct td_error *error_out)
{
    struct import m = {.store = o, .work = work};
    struct stat st = {0};
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st)) {
        if (fd >= 0)
            close(fd);
        return td_fail(error_out, TD_ERR_IO, "%s: %s", path, strerror(errno));
    }
    uint64_t len = (uint64_t)st.st_size;
    void *data = len ? mmap(NULL, len, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
    close(fd);
    if (data == MAP_FAILED)
        return td_fail(error_out, TD_ERR_IO, "%s: %s", path, strerror(errno));
    enum td_status s = put_all(&m, path, data, len, error_out);
    /* Also after an error: what was put before it is kept. */
    enum td_status synced = ssd_sync(o->db);
    if (data)
        munmap(data, len);
    if (!s && synced)
        s = td_fail(error_out, synced, "the database can't be written: %s", td_status_name(synced));
    if (!s)
        *out = m.report;
    return s;
}

enum td_status offline_compact(struct offline *o, uint64_t *before_out, uint64_t *after_out, struct td_error *error_out)
{
    *before_out = ssd_dir_bytes(o->db);
    enum td_status status = ssd_compact(o->db);
    if (status)
        return td_fail(error_out, status, "the database refuses to be compacted: %s", td_status_name(status));
    *after_out = ssd_dir_bytes(o->db);
    return TD_OK;
}
