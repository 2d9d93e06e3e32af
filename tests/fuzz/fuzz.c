/*
 * Fuzz targets, one for each program (-DTARGET=...). For any bytes a parser must return a status, read
 * nothing outside of them, and leak nothing. Run with libFuzzer: build/tests/fuzz/fuzz_NAME -runs=10000000.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model/adapter.h"
#include "model/config.h"
#include "model/model.h"
#include "model/safetensors.h"
#include "model/template.h"
#include "model/tokenizer.h"
#include "proto/wire/block_header.h"
#include "proto/wire/events.h"
#include "proto/wire/store_msg.h"
#include "replay/compare.h"
#include "replay/profile.h"
#include "replay/trace_make.h"
#include "replay/trace_stat.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void events(const uint8_t *data, size_t size)
{
    struct events_header h;
    if (events_decode(data, size, &h))
        return;
    for (uint32_t i = 0; i < h.count; i++)
        if (events_at(data, i).kind > BLOCK_CLEARED)
            abort();
}

static void store_msg(const uint8_t *data, size_t size)
{
    struct store_keys_msg keys;
    struct store_want_msg want;
    struct store_found found;
    uint8_t sum = 0;
    if (!store_keys_decode(data, size, &keys))
        for (uint32_t i = 0; i < keys.n_keys; i++)
            sum ^= store_keys_at(&keys, i).b[15];
    if (!store_want_decode(data, size, &want))
        for (uint32_t i = 0; i < want.n; i++)
            sum ^= (uint8_t)store_want_at(&want, i);
    (void)store_found_decode(data, size, &found);
    *(volatile uint8_t *)&sum = sum;
}

static void block(const uint8_t *data, size_t size)
{
    static const struct kv_layout layout = {NUM_F32, 1, 1, 2, 1};
    struct block_header h;
    struct block_key key = {{0}};
    (void)block_header_decode(data, size, &h);
    if (size >= 24)
        memcpy(key.b, data + 8, 16);
    (void)block_verify(data, size, &key, &layout, &h);
}

static void layout(const uint8_t *data, size_t size)
{
    struct kv_layout l;
    uint8_t back[KV_LAYOUT_WIRE_BYTES];
    if (kv_layout_decode(data, size, &l, NULL))
        return;
    kv_layout_encode(&l, back);
    if (memcmp(back, data, sizeof(back)))
        abort(); /* a layout has exactly one encoding */
}

static void tensors(const uint8_t *data, size_t size)
{
    struct safetensors *s;
    if (safetensors_open_memory(data, size, &s, NULL))
        return;
    for (uint32_t i = 0; i < safetensors_count(s); i++) {
        const struct tensor *t = safetensors_at(s, i);
        if ((const uint8_t *)t->data < data || (const uint8_t *)t->data + t->len_bytes > data + size)
            abort();
    }
    safetensors_close(s);
}

static char shards_dir[] = "/tmp/tandem-fuzz-XXXXXX";
static const char *const SHARD_FILES[] = {"a.safetensors", "b.safetensors", "model.safetensors.index.json"};

static void shards_remove(void)
{
    char path[128];
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof(path), "%s/%s", shards_dir, SHARD_FILES[i]);
        unlink(path);
    }
    rmdir(shards_dir);
}

static void shards_write(const char *name, const void *data, size_t size)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/%s", shards_dir, name);
    FILE *f = fopen(path, "w");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f))
        abort();
}

/* Input: model.safetensors.index.json, beside two shards. */
static void shards(const uint8_t *data, size_t size)
{
    static bool is_made;
    struct safetensors *s = NULL;
    if (!is_made) {
        if (!mkdtemp(shards_dir))
            abort();
        is_made = true;
        atexit(shards_remove);
        for (int i = 0; i < 2; i++) {
            char file[80] = {56};
            snprintf(file + 8, sizeof(file) - 8, "{\"%c\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}  ",
                     "ab"[i]);
            shards_write(SHARD_FILES[i], file, 8 + 56 + 4);
        }
    }
    shards_write(SHARD_FILES[2], data, size);
    if (safetensors_open_dir(shards_dir, &s, NULL))
        return;
    for (uint32_t i = 0; i < safetensors_count(s); i++)
        if (safetensors_at(s, i)->len_bytes != 4)
            abort();
    safetensors_close(s);
}

static void config(const uint8_t *data, size_t size)
{
    struct model_config c;
    double inv_freq[MODEL_MAX_PAIRS];
    if (model_config_parse((const char *)data, size, (const char *)data, size, &c, NULL))
        return;
    for (int i = 0; i < 4; i++) /* an accepted object must be usable */
        (void)model_config_rope(&c, &c.rope[i % 2], i / 2, inv_freq);
    struct kv_layout l = model_config_layout(&c, NUM_BF16, 16);
    (void)kv_layout_check(&l, NULL);
    if (model_config_n_active_params(&c) > model_config_n_params(&c))
        abort();
}

/* Input: adapter_config.json, a zero byte, adapter_model.safetensors. */
static void adapter(const uint8_t *data, size_t size)
{
    static const struct model_dummy DIMS = {
        .vocab_size = 8, .hidden = 4, .n_layers = 1, .n_heads = 2, .n_kv_heads = 1, .head_dim = 2, .intermediate = 4};
    const uint8_t *zero = memchr(data, 0, size);
    size_t n = zero ? (size_t)(zero - data) : size, left = zero ? size - n - 1 : 0;
    struct model_config c;
    struct adapter *a = NULL;
    struct adapter_matrix m;
    model_dummy_config(&DIMS, &c);
    if (adapter_open_memory((const char *)data, n, data + size - left, left, &c, &a, NULL))
        return;
    if (adapter_find(a, 0, "self_attn.q_proj", &m) && (m.a->shape[1] != 4 || m.b->shape[0] != 4 || !m.rank))
        abort();
    adapter_close(a);
}

static void tokenizer(const uint8_t *data, size_t size)
{
    struct tokenizer *t;
    struct token_ids ids = {0};
    struct bytes text = {0};
    if (tokenizer_parse((const char *)data, size, &t, NULL))
        return;
    static const char *const TEXTS[] = {"a b<x>\n12", "", " \xc3\xa9\xcc\x81\xe4\xb8\xad  <s> don't<0x41>\xe2\x96\x81",
                                        "aaaaaaaaaaaaaaaa"};
    for (size_t i = 0; i < sizeof(TEXTS) / sizeof(TEXTS[0]); i++) {
        (void)tokenizer_encode(t, TEXTS[i], strlen(TEXTS[i]), true, &ids, NULL);
        (void)tokenizer_encode(t, (const char *)data, size < 64 ? size : 64, false, &ids, NULL);
    }
    for (uint32_t i = 0; i < 300; i++)
        token_ids_push(&ids, i);
    tokenizer_decode(t, ids.ids, ids.n, false, &text);
    struct token_stream *s = token_stream_open(t, true);
    for (size_t i = 0; i < ids.n; i++)
        token_stream_push(s, ids.ids[i], &text);
    token_stream_flush(s, &text);
    token_stream_close(s);
    token_ids_free(&ids);
    bytes_free(&text);
    tokenizer_close(t);
}

/* Input: a template. Its variables are fixed and have values of each kind. */
static void template(const uint8_t *data, size_t size)
{
    static const char VARIABLES[] =
        "{\"s\":\" A\\u00e9 "
        "b\\n\",\"n\":3,\"f\":0.5,\"t\":true,\"no\":null,\"l\":[\"b\",\"a\",[1]],\"d\":{\"x\":1,\"y\":{\"z\":[]}},"
        "\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"},{\"role\":\"assistant\",\"content\":null,\"tool_calls\":["
        "{\"function\":{"
        "\"name\":\"f\",\"arguments\":{\"a\":1}}}]}],\"tools\":[{\"type\":\"function\"}]}";
    static json_t *variables;
    struct template *t;
    struct bytes out = {0};
    if (!variables)
        variables = json_loads(VARIABLES, 0, NULL);
    if (template_parse((const char *)data, size, &t, NULL))
        return;
    (void)template_render(t, variables, 1, &out, NULL);
    bytes_free(&out);
    template_close(t);
}

static void check_trace(const struct trace *t)
{
    for (uint64_t i = 0; i < t->n_requests; i++)
        if (t->requests[i].first_block + t->requests[i].n_blocks > t->n_blocks || t->requests[i].follows > i ||
            t->requests[i].tenant >= t->n_tenants || (i && t->requests[i].arrival_ns < t->requests[i - 1].arrival_ns))
            abort();
}

/* An accepted trace is also written, and must be readable again. */
static void trace(const uint8_t *data, size_t size)
{
    static const struct trace_change change = {.rate = 2, .length_scale = 0.5, .output_scale = 1, .prefix_scale = 1.5};
    struct trace *t, *again;
    struct trace_stat stat;
    struct bytes text = {0};
    char *plain;
    size_t len;
    if (trace_unpack((const char *)data, size, 1 << 20, &plain, &len, NULL))
        return;
    if (!trace_parse(plain, len, &t, NULL)) {
        check_trace(t);
        trace_stat_of(t, &stat);
        again = trace_changed(t, &change);
        check_trace(again);
        trace_close(again);
        if (trace_write(t, TRACE_TANDEM, &text, NULL) || trace_parse(text.data, text.len, &again, NULL))
            abort();
        if (again->n_requests != t->n_requests)
            abort();
        trace_close(again);
        trace_close(t);
    }
    bytes_free(&text);
    free(plain);
}

static void report(const uint8_t *data, size_t size)
{
    struct report_file *f, *again;
    struct bytes text = {0};
    if (report_parse((const char *)data, size, &f, NULL))
        return;
    const struct report_run *run = report_file_run(f);
    (void)report_check(run, NULL);
    report_json(run, true, &text);
    if (report_parse(text.data, text.len, &again, NULL))
        abort();
    report_close(again);
    report_table(run, &text);
    report_html(&run, 1, &text);
    bytes_free(&text);
    report_close(f);
}

static void profile(const uint8_t *data, size_t size)
{
    struct worker_profile p;
    if (profile_parse((const char *)data, size, NULL, &p, NULL))
        return;
    for (int i = 0; i < 3; i++)
        if (!(p.cost.prefill[i] >= 0 && p.cost.decode[i] >= 0))
            abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    void (*const all[])(const uint8_t *, size_t) = {events,  store_msg, block,    layout, tensors, shards, config,
                                                    adapter, tokenizer, template, trace,  report,  profile};
    (void)all; /* each program uses only one of them */
    TARGET(data, size);
    return 0;
}
