/* Fuzz targets of what lies on a store's disk, one for each program (-DTARGET=...): see fuzz.c. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "kvstore/blobs.h"
#include "kvstore/codec.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/*
 * Bytes of a page's value. For any bytes decoding ends with a status, and accesses nothing outside of them
 * and of one page. Whatever a page contains, its encoding can be decoded.
 */
static const struct kv_layout LAYOUTS[] = {{NUM_F32, 1, 1, 7, 3}, {NUM_BF16, 1, 2, 65, 1}, {NUM_F16, 2, 1, 64, 1}};

static void there_and_back(struct codec *c, enum block_codec wanted, const uint8_t *page, uint8_t *back,
                           size_t page_bytes)
{
    const void *made;
    size_t len;
    enum block_codec codec = codec_encode(c, wanted, page, &made, &len);
    if (codec == BLOCK_RAW)
        return;
    if (len >= page_bytes || codec_decode(c, codec, made, len, back))
        abort();
    if (!block_codec_is_lossy(codec) && memcmp(back, page, page_bytes))
        abort();
}

/* The first byte chooses codec and layout. */
static void codec(const uint8_t *data, size_t size)
{
    if (!size)
        return;
    const struct kv_layout *l = &LAYOUTS[*data / BLOCK_CODECS % (sizeof(LAYOUTS) / sizeof(LAYOUTS[0]))];
    enum block_codec codec = (enum block_codec)(*data % BLOCK_CODECS);
    size_t page_bytes = kv_layout_page_bytes(l);
    /* Exact sizes, so that ASan sees any access beyond the ends. */
    uint8_t *page = malloc(page_bytes), *copy = malloc(size);
    struct codec *c = codec_open(l);
    memcpy(copy, data, size);
    (void)codec_decode(c, codec, copy + 1, size - 1, page);
    if (size > page_bytes)
        there_and_back(c, codec, copy + 1, page, page_bytes);
    codec_close(c);
    free(copy);
    free(page);
}

/* ----------------------------------------------------------------- blob files */

static char dir[] = "/tmp/tandem-fuzz-XXXXXX", path[64];

static void remove_dir(void)
{
    unlink(path);
    rmdir(dir);
}

static void append(const uint8_t *data, size_t size)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size || close(fd))
        abort();
}

/* A file comes, grows, and goes. The first byte says how much of it comes first. */
static void blobs(const uint8_t *data, size_t size)
{
    static struct dir_files *files;
    static uint8_t *buffer;
    enum { BUFFER_BYTES = 1 << 14, KEY_AT = 30 + 32 + 1 };
    struct block_key key = {{0}};
    const void *value;
    size_t len;
    if (!files) {
        if (!mkdtemp(dir))
            abort();
        snprintf(path, sizeof(path), "%s/000007.blob", dir);
        atexit(remove_dir);
        files = dir_files_open(dir);
        buffer = aligned_alloc(4096, BUFFER_BYTES);
    }
    if (!size)
        return;
    struct blobs *b = blobs_open(dir, files);
    size_t first = --size < data[0] ? size : data[0];
    data++;
    append(data, first);
    dir_files_update(files);
    while (!blobs_scan(b, 0))
        ;
    append(data + first, size - first);
    dir_files_update(files);
    while (!blobs_scan(b, 0))
        ;
    if (size >= KEY_AT + sizeof(key))
        memcpy(key.b, data + KEY_AT, sizeof(key));
    if (!blobs_read(b, &key, buffer, BUFFER_BYTES, &value, &len) &&
        ((const uint8_t *)value < buffer || (const uint8_t *)value + len > buffer + BUFFER_BYTES))
        abort();
    if (unlink(path))
        abort();
    dir_files_update(files);
    while (!blobs_scan(b, 0))
        ;
    if (blobs_work(b).n_places)
        abort(); /* places of a file that is gone */
    blobs_close(b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    void (*const all[])(const uint8_t *, size_t) = {codec, blobs};
    (void)all; /* each program uses only one of them */
    TARGET(data, size);
    return 0;
}
