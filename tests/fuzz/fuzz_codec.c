/* Bytes from a disk for the codecs (kvstore/codec.h). For any bytes decoding ends with a status, and accesses
 * nothing outside of them and of one page. Whatever a page contains, its encoding can be decoded. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kvstore/codec.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

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
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!size)
        return 0;
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
    return 0;
}
