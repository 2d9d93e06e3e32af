/*
 * The codecs of the store's SSD tier on KV pages: ratio, speed, and error of the decoded numbers.
 *
 * The pages come from a file that `tandem store export` made (--blocks), up to 64 MiB of them; without a file
 * they are bell-shaped numbers in bf16. Each round copies all pages with memcpy, then encodes and decodes
 * them with each codec, in one thread. Rates count bytes of pages, so that they compare with memcpy's; values
 * are medians over the rounds. The error is the largest one, as a share of the largest number in its page.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "bench/bench.h"
#include "kernels/scalar.h"
#include "kvstore/codec.h"

enum { ROUNDS = 5 };
static const size_t MAX_PAGES_BYTES = 64u << 20, MAX_FILE_BYTES = 1u << 30;
static const struct kv_layout MADE_UP = {NUM_BF16, 16, 8, 64, 16};

struct pages {
    struct kv_layout layout;
    size_t page_bytes, n;
    uint8_t *data, *back;
    struct {
        enum block_codec codec; /* the codec that was used: raw if the page could not be made smaller */
        size_t len;
        uint8_t *data; /* page_bytes */
    } * encoded;
};

/* ------------------------------------------------------------------- pages */

static void pages_open(struct pages *p, const struct kv_layout *layout, size_t n)
{
    p->layout = *layout;
    p->page_bytes = kv_layout_page_bytes(layout);
    p->n = n * p->page_bytes < MAX_PAGES_BYTES ? n : MAX_PAGES_BYTES / p->page_bytes;
    p->data = mem_array(p->n, p->page_bytes);
    p->back = mem_array(p->n, p->page_bytes);
    p->encoded = mem_array(p->n, sizeof(*p->encoded));
    for (size_t i = 0; i < p->n; i++)
        p->encoded[i].data = mem_array(p->page_bytes, 1);
}

static void pages_close(struct pages *p)
{
    for (size_t i = 0; i < p->n; i++)
        free(p->encoded[i].data);
    free(p->encoded);
    free(p->data);
    free(p->back);
}

static void make_up(struct pages *p)
{
    pages_open(p, &MADE_UP, SIZE_MAX / MAX_PAGES_BYTES);
    for (size_t i = 0; i < p->n * p->page_bytes / 2; i++) {
        double sum = -6;
        for (uint64_t k = 0; k < 3; k++)
            for (uint64_t r = random_at(1, i, k), j = 0; j < 4; j++, r >>= 16)
                sum += (double)(r & 0xffff) / 0x10000;
        uint16_t h = scalar_to_bf16((float)sum);
        memcpy(p->data + 2 * i, &h, 2);
    }
}

/* Goes through the blocks in [at, end). Without a codec it counts them, with one it decodes them into p. */
static enum td_status walk(struct pages *p, const uint8_t *at, const uint8_t *end, struct codec *codec, size_t *n_out)
{
    struct block_header h;
    size_t n = 0;
    for (enum td_status s; at < end && (!codec || n < p->n); at += BLOCK_HEADER_BYTES + h.payload_bytes, n++) {
        if ((s = block_header_decode(at, (size_t)(end - at), &h)))
            return s;
        size_t len = BLOCK_HEADER_BYTES + h.payload_bytes;
        if (len > (size_t)(end - at) || (n && kv_layout_match(&p->layout, &h.layout, NULL)))
            return TD_ERR_VERSION;
        p->layout = h.layout;
        if (codec && (s = codec_take(codec, at, len, &h.key, p->data + n * p->page_bytes, &h)))
            return s;
    }
    *n_out = n;
    return n ? TD_OK : TD_ERR_NOT_FOUND;
}

static enum td_status read_pages(struct pages *p, const char *path, struct td_error *e)
{
    char *file;
    size_t len, n;
    enum td_status s = file_read(path, MAX_FILE_BYTES, &file, &len, e);
    if (s)
        return s;
    const uint8_t *at = (const uint8_t *)file;
    s = walk(p, at, at + len, NULL, &n);
    if (!s) {
        const struct kv_layout layout = p->layout;
        struct codec *codec = codec_open(&layout);
        pages_open(p, &layout, n);
        s = walk(p, at, at + len, codec, &n);
        codec_close(codec);
    }
    free(file);
    return s ? td_fail(e, s, "%s: not blocks of one layout as tandem store export writes them", path) : TD_OK;
}

/* --------------------------------------------------------------- measuring */

static double gb_per_s(const struct pages *p, uint64_t took_ns)
{
    return (double)(p->n * p->page_bytes) / (double)took_ns;
}

static double measure_copy(const struct pages *p, const struct clock *clock)
{
    uint64_t before = clock_now(clock);
    for (size_t i = 0; i < p->n; i++)
        memcpy(p->back + i * p->page_bytes, p->data + i * p->page_bytes, p->page_bytes);
    return gb_per_s(p, clock_now(clock) - before);
}

/* Includes the copy out of the codec's buffer, which RocksDB also makes. */
static double measure_encode(struct pages *p, struct codec *c, enum block_codec codec, const struct clock *clock)
{
    const void *data;
    uint64_t before = clock_now(clock);
    for (size_t i = 0; i < p->n; i++) {
        p->encoded[i].codec = codec_encode(c, codec, p->data + i * p->page_bytes, &data, &p->encoded[i].len);
        memcpy(p->encoded[i].data, data, p->encoded[i].len);
    }
    return gb_per_s(p, clock_now(clock) - before);
}

static double measure_decode(struct pages *p, struct codec *c, const struct clock *clock)
{
    uint64_t before = clock_now(clock);
    for (size_t i = 0; i < p->n; i++) {
        uint8_t *to = p->back + i * p->page_bytes;
        if (p->encoded[i].codec == BLOCK_RAW)
            memcpy(to, p->encoded[i].data, p->page_bytes);
        else
            codec_decode(c, p->encoded[i].codec, p->encoded[i].data, p->encoded[i].len, to);
    }
    return gb_per_s(p, clock_now(clock) - before);
}

static double worst_error(const struct pages *p)
{
    uint32_t size = (uint32_t)num_type_bytes(p->layout.dtype);
    double worst = 0;
    for (size_t i = 0; i < p->n; i++) {
        const uint8_t *a = p->data + i * p->page_bytes, *b = p->back + i * p->page_bytes;
        double most = 0, off = 0;
        for (size_t k = 0; k < p->page_bytes / size; k++) {
            double x = scalar_from(a, size, p->layout.dtype == NUM_BF16, k);
            most = fmax(most, fabs(x));
            off = fmax(off, fabs(x - scalar_from(b, size, p->layout.dtype == NUM_BF16, k)));
        }
        worst = most > 0 ? fmax(worst, off / most) : worst;
    }
    return worst;
}

static double median(double *v)
{
    bench_sort(v, ROUNDS);
    return v[ROUNDS / 2];
}

static void measure_codecs(struct pages *p, struct bench_rows *out)
{
    double copy[ROUNDS], in[BLOCK_CODECS][ROUNDS], back[BLOCK_CODECS][ROUNDS], ratio[BLOCK_CODECS], off[BLOCK_CODECS];
    struct clock clock;
    struct codec *c = codec_open(&p->layout);
    clock_init_real(&clock);
    measure_copy(p, &clock); /* touches the memory once */
    for (int i = 0; i < ROUNDS; i++) {
        copy[i] = measure_copy(p, &clock);
        for (int k = BLOCK_ZSTD; k < BLOCK_CODECS; k++) {
            size_t n = 0;
            in[k][i] = measure_encode(p, c, (enum block_codec)k, &clock);
            back[k][i] = measure_decode(p, c, &clock);
            for (size_t j = 0; j < p->n; j++)
                n += p->encoded[j].len;
            ratio[k] = (double)(p->n * p->page_bytes) / (double)n;
            off[k] = i ? off[k] : worst_error(p);
        }
    }
    double limit = median(copy);
    for (int k = BLOCK_ZSTD; k < BLOCK_CODECS; k++) {
        const char *name = block_codec_name((enum block_codec)k), *type = num_type_name(p->layout.dtype);
        bench_add(out, "x", ratio[k], 0, "%s, %s: a page's bytes by those on disk", name, type);
        bench_add(out, "GB/s", median(in[k]), limit, "%s, %s: encode, beside memcpy", name, type);
        bench_add(out, "GB/s", median(back[k]), limit, "%s, %s: decode, beside memcpy", name, type);
        bench_add(out, "%", 100 * off[k], 0, "%s, %s: largest error, of the page's largest number", name, type);
    }
    codec_close(c);
}

enum td_status bench_codec(const struct bench_options *o, struct bench_rows *out, struct td_error *e)
{
    struct pages p = {.n = 0};
    enum td_status s = TD_OK;
    if (o->blocks)
        s = read_pages(&p, o->blocks, e);
    else
        make_up(&p);
    if (!s)
        measure_codecs(&p, out);
    pages_close(&p);
    return s;
}
