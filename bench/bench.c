/*
 * tandem bench: runs one area after the other. Each gives rows of (name, value, unit, limit, share).
 *
 * --json prints one object for each row: {"area", "name", "value", "unit", "limit" (null: none), "share"
 * (null), "hash" (engine)}.
 */
#include "bench/bench.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/kernels_bench.h"
#include "bench/store_bench.h"
#include "cli/cli.h"
#include "cli/table.h"
#include "worker/geometry.h"

#define AT(member) offsetof(struct bench_options, member)
static const struct option TABLE[] = {
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "prints one JSON object for each row"},
    {"seconds", OPT_DOUBLE, AT(seconds), "0", NULL, 0, 3600,
     "seconds for which a row is measured; 0: the area's default"},
    {"only", OPT_STRING, AT(only), "", "TEXT+...", 0, 0,
     "engine: rows whose name contains one of these texts, such as 'prefill+batch 64'; default: all"},
    {"threads", OPT_INT, AT(threads), "0", NULL, 0, K_MAX_THREADS,
     "kernels, engine, profile: compute threads; 0: one for each CPU"},
    {"dummy", OPT_STRING, AT(dummy), "1b", "DIMS", 0, 0,
     "engine, profile: dimensions of a made-up model: 1b, 8b or hidden=256,layers=2,..."},
    {"model", OPT_STRING, AT(model), NULL, "DIR", 0, 0,
     "engine, profile, cluster, overlap, router, tokenize: the model's directory"},
    {"profile", OPT_STRING, AT(profile), NULL, "FILE", 0, 0,
     "profile: writes step times to FILE, for tandem simulate --profile FILE; AREA may be left out"},
    {"text", OPT_STRING, AT(text), NULL, "FILE", 0, 0, "tokenize: text to encode; default: made up"},
    {"numerics", OPT_CHOICE, AT(numerics), "auto", "auto|f32|bf16", 0, 0, "engine, profile: type of activations"},
    {"weights", OPT_CHOICE, AT(weights), "as-stored", K_WEIGHTS_NAMES, 0, 0,
     "engine, profile: format of large matrices"},
    {"kv-dtype", OPT_CHOICE, AT(kv_dtype), "auto", "auto|f32|f16|bf16|fp8", 0, 0,
     "engine, profile: type of the KV cache"},
    {"device", OPT_STRING, AT(device), "cpu", "cpu|cuda|cuda:N", 0, 0,
     "kernels, engine, profile: device that computes"},
    {"batch-invariant", OPT_CHOICE, AT(invariant), "on", "on|off", 0, 0, "cuda, bf16: the same bits in any batch"},
    RANK_OPTIONS(struct bench_options, ranks),
    {"dir", OPT_STRING, AT(dir), ".", "DIR", 0, 0, "store: directory on the disk to measure; nothing is left in it"},
    {"codec", OPT_CHOICE, AT(codec), "none", BLOCK_CODEC_NAMES, 0, 0, "store: codec of blocks on disk"},
    {"bytes", OPT_BYTES, AT(bytes), "0", NULL, 0, 1e13,
     "store: bytes of the working set (0: 512M); transfer: bytes of a pool (0: 256M)"},
    {"paths", OPT_STRING, AT(paths), "mapped+shm+tcp+tls", NULL, 0, 0,
     "transfer: paths joined by +: mapped, shm (of UCX), tcp, tls (tcp, encrypted), or a list of UCX transports"},
    {"rounds", OPT_INT, AT(rounds), "10", NULL, 1, 100, "transfer: interleaved rounds for each row"},
    {"serve", OPT_ADDRESS, AT(serve), NULL, "HOST:PORT", 0, 0,
     "transfer: holds pages for a reader on another machine, over the first of --paths"},
    {"peer", OPT_ADDRESS, AT(peer), NULL, "HOST:PORT", 0, 0,
     "transfer: reads from a bench with --serve at this address, over the first of --paths"},
    {"secret", OPT_SECRET, AT(secret), "", NULL, 0, 0,
     "transfer: secret of --serve and --peer, the same on both sides"},
    {"blocks", OPT_STRING, AT(blocks), NULL, "FILE", 0, 0,
     "codec: file with pages to encode, from tandem store export; default: made-up pages"},
    {"trace", OPT_STRING, AT(trace), NULL, "FILE", 0, 0,
     "eviction: requests with block ids, in Mooncake's format; engine: writes the kernels of each row with their "
     "times to FILE, for a browser's trace viewer, and adds rows with their sums"},
    {"capacity", OPT_STRING, AT(capacity), "1000,10000,30000", "N,...", 0, 0, "eviction: sizes of the cache in blocks"},
    {"block-tokens", OPT_INT, AT(block_tokens), "0", NULL, 0, 1e6,
     "eviction: leave out last blocks with fewer tokens; 0: all blocks count"},
    {"n-blocks", OPT_INT, AT(n_blocks), "1000000", NULL, 1, 1e8,
     "index, router: blocks in the index before a row is measured"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

struct bench_row *bench_add(struct bench_rows *b, const char *unit, double value, double limit, const char *format, ...)
{
    va_list args;
    b->rows = mem_resize(b->rows, b->n + 1, sizeof(*b->rows));
    struct bench_row *row = &b->rows[b->n++];
    *row = (struct bench_row){.unit = unit, .value = value, .limit = limit};
    va_start(args, format);
    vsnprintf(row->name, sizeof(row->name), format, args);
    va_end(args);
    return row;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void bench_sort(double *values, uint32_t n)
{
    qsort(values, n, sizeof(*values), by_value);
}

/* ------------------------------------------------------------------- areas */

static enum td_status bench_kernels(const struct bench_options *o, struct bench_rows *out, struct td_error *e)
{
    struct kernels_bench *b = mem_zalloc(sizeof(*b));
    struct kernels_bench_config c = {.kernels = {.n_threads = (uint32_t)o->threads,
                                                 .compute = COMPUTE_BF16,
                                                 .any_order = !strcmp(o->invariant, "off")},
                                     .seconds_per_row = o->seconds};
    enum td_status s = geometry_device(o->device, &c.kernels, e);
    if (!s)
        s = kernels_bench(&c, b, e);
    for (uint32_t i = 0; i < b->n_rows && !s; i++)
        bench_add(out, b->rows[i].unit, b->rows[i].value, b->rows[i].limit, "%s", b->rows[i].name);
    free(b);
    return s;
}

static enum td_status bench_store(const struct bench_options *o, struct bench_rows *out, struct td_error *e)
{
    struct kvstore_bench b = {0};
    struct kvstore_bench_config c = {.dir = o->dir, .bytes = (uint64_t)o->bytes};
    block_codec_from_name(o->codec, &c.codec);
    enum td_status s = kvstore_bench(&c, &b, e);
    for (uint32_t i = 0; i < b.n_rows && !s; i++)
        bench_add(out, b.rows[i].unit, b.rows[i].value, b.rows[i].limit, "%s", b.rows[i].name);
    return s;
}

static const struct {
    const char *name, *about;
    enum td_status (*run)(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out);
} AREAS[] = {
    {"kernels", "single operations, against memory and arithmetic", bench_kernels},
    {"engine", "prefill and decode of a model, against memory and arithmetic", bench_engine},
    {"profile", "step times of a model on this machine, and the coefficients that fit them", bench_profile},
    {"transfer", "KV pages between two endpoints, against a bare UCX loop and memcpy", bench_transfer},
    {"cluster", "time to first token, split and with one worker for both phases", bench_cluster},
    {"overlap", "the part of the transfer that prefill does not hide, by prompt length", bench_overlap},
    {"store", "KV blocks put, and read from DRAM and from disk, against memcpy and the disk", bench_store},
    {"codec", "encoding KV blocks for the disk: ratio, speed beside memcpy, error", bench_codec},
    {"eviction", "block hits of a trace by policy and capacity, against the clairvoyant optimum", bench_eviction},
    {"router", "time of a decision, and processor time of a router; needs --model", bench_router},
    {"sample", "drawing a token from logits, by settings, against one pass over the vocabulary", bench_sample},
    {"tokenize", "text to ids and back, beside the tokenizers library; needs --model", bench_tokenize},
    {"index", "the router's prefix index: writes against random cache lines, lookups by time", bench_index},
};
enum { N_AREAS = sizeof(AREAS) / sizeof(AREAS[0]) };

/* ------------------------------------------------------------------ output */

static void print_json(const char *area, const struct bench_rows *b)
{
    char hash[17];
    for (uint32_t i = 0; i < b->n; i++) {
        const struct bench_row *r = &b->rows[i];
        json_t *o = json_pack("{s:s, s:s, s:f, s:s, s:o, s:o}", "area", area, "name", r->name, "value", r->value,
                              "unit", r->unit, "limit", r->limit > 0 ? json_real(r->limit) : json_null(), "share",
                              r->limit > 0 ? json_real(r->value / r->limit) : json_null());
        snprintf(hash, sizeof(hash), "%016" PRIx64, r->hash);
        if (r->hash)
            json_object_set_new(o, "hash", json_string(hash));
        cli_print_json(o);
    }
}

static void print_table(const char *area, const struct bench_rows *b)
{
    static const char *const TITLES[] = {"", "VALUE", "UNIT", "LIMIT", "SHARE", "HASH"};
    struct table t;
    table_init(&t, 6, 1 | 1 << 2 | 1 << 5, TITLES);
    for (uint32_t i = 0; i < b->n; i++) {
        const struct bench_row *r = &b->rows[i];
        table_cell(&t, "%s: %s", area, r->name);
        table_cell(&t, "%.2f", r->value);
        table_cell(&t, "%s", r->unit);
        if (r->limit > 0) {
            table_cell(&t, "%.2f", r->limit);
            table_cell(&t, "%.0f %%", 100 * r->value / r->limit);
        } else {
            table_cell(&t, "%s", "");
            table_cell(&t, "%s", "");
        }
        if (r->hash)
            table_cell(&t, "%016" PRIx64, r->hash);
        else
            table_cell(&t, "%s", "");
    }
    table_print(&t, stdout);
    fflush(stdout);
    table_fini(&t);
}

static int run_area(int area, const struct bench_options *o)
{
    struct bench_rows rows = {0};
    struct td_error e = {{0}};
    enum td_status s = AREAS[area].run(o, &rows, &e);
    if (s)
        cli_fail("bench", "%s: %s", AREAS[area].name, e.text[0] ? e.text : td_status_name(s));
    else if (o->json)
        print_json(AREAS[area].name, &rows);
    else if (rows.n)
        print_table(AREAS[area].name, &rows);
    free(rows.rows);
    return s ? 1 : 0;
}

static int find_area(const char *name)
{
    for (int i = 0; i < N_AREAS; i++)
        if (!strcmp(AREAS[i].name, name))
            return i;
    return -1;
}

static int usage(const char *unknown)
{
    if (unknown)
        fprintf(stderr, "tandem bench: '%s': no such AREA; areas are:\n", unknown);
    else
        fprintf(stderr, "tandem bench: give an AREA:\n");
    for (int i = 0; i < N_AREAS; i++)
        fprintf(stderr, "  %-10s %s\n", AREAS[i].name, AREAS[i].about);
    return 2;
}

int cli_bench(int argc, char **argv)
{
    struct bench_options o = {0};
    const char **areas = mem_array((size_t)argc, sizeof(*areas));
    int n_areas = 0, exit_code;
    struct option_word words[N_AREAS + 1] = {{0}};
    for (int i = 0; i < N_AREAS; i++)
        words[i] = (struct option_word){.name = AREAS[i].name, .about = AREAS[i].about};
    const struct options options = {.usage = "AREA... [options]",
                                    .about = "Measures areas beside the limits of this machine.",
                                    .table = TABLE,
                                    .words = words,
                                    .word = "AREA"};
    bool run = cli_options_words("bench", &options, argc, argv, &o, areas, &n_areas, &exit_code);
    if (run && !n_areas && o.profile)
        areas[n_areas++] = "profile";
    if (run && !n_areas)
        exit_code = usage(NULL);
    for (int i = 0; run && i < n_areas && !exit_code; i++)
        if (find_area(areas[i]) < 0)
            exit_code = usage(areas[i]);
    for (int i = 0; run && i < n_areas && !exit_code; i++)
        exit_code = run_area(find_area(areas[i]), &o);
    free(areas);
    return exit_code;
}
