/*
 * tandem store: inspects, checks and compacts the directory of a store that is not running.
 *
 * --json prints one object for each block (ls), or one object in all: stat {"blocks", "payload_bytes",
 * "dir_bytes", "blob_bytes", "garbage_bytes", "blob_files", "bad_headers", "layouts", "layout": {"dtype",
 * "layers", "kv_heads", "head_dim", "page_tokens"}, "stored_bytes", "codecs": {NAME: BLOCKS}, "tenants":
 * {HASH OF NAME: BYTES}}, where tenants has "default", and "others" beyond 31 tenants; verify, export and
 * import {"blocks", "right", "absent", "corrupt", "checksum", "version", "unreadable", "bytes"}; compact
 * {"before_bytes", "after_bytes"}. verify, export and import end with 1 if any block is not right.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/table.h"
#include "kvstore/offline.h"

struct store_options {
    bool json, quiet;
};

#define AT(member) offsetof(struct store_options, member)
static const struct option TABLE[] = {
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "prints JSON objects instead of tables"},
    {"quiet", OPT_BOOL, AT(quiet), NULL, NULL, 0, 0, "prints no progress"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

struct store_command {
    const struct store_options *options;
    struct offline *store;
    const char *file;
    struct clock clock;
    uint64_t told_ns; /* when progress was last printed */
    struct table table;
};

/* --------------------------------------------------------------------- ls */

static json_t *json_layout(const struct kv_layout *l)
{
    return json_pack("{s:s, s:i, s:i, s:i, s:i}", "dtype", num_type_name(l->dtype), "layers", (int)l->n_layers,
                     "kv_heads", (int)l->n_kv_heads, "head_dim", (int)l->head_dim, "page_tokens", (int)l->page_tokens);
}

static void list_block(void *user, const struct offline_block *b)
{
    struct store_command *c = user;
    const struct block_header *h = &b->header;
    char hex[33];
    block_key_hex(&h->key, hex);
    if (c->options->json) {
        json_t *o = json_pack("{s:s, s:s}", "key", hex, "status", td_status_name(b->status));
        if (!b->status)
            json_object_update_missing_new(o,
                                           json_pack("{s:i, s:i, s:I, s:s, s:o}", "index", (int)h->index, "tokens",
                                                     (int)h->n_tokens, "bytes", (json_int_t)h->payload_bytes, "codec",
                                                     block_codec_name(h->codec), "layout", json_layout(&h->layout)));
        cli_print_json(o);
        return;
    }
    table_cell(&c->table, "%s", hex);
    if (b->status) {
        for (int i = 0; i < 3; i++)
            table_cell(&c->table, "%s", "");
        table_cell(&c->table, "header %s", td_status_name(b->status));
        return;
    }
    table_cell(&c->table, "%" PRIu32, h->index);
    table_bytes(&c->table, h->payload_bytes);
    table_cell(&c->table, "%s", block_codec_name(h->codec));
    table_cell(&c->table, "%" PRIu32 " layers %s", h->layout.n_layers, num_type_name(h->layout.dtype));
}

static enum td_status run_ls(struct store_command *c, struct td_error *e)
{
    static const char *const TITLES[] = {"KEY", "INDEX", "SIZE", "CODEC", "LAYOUT"};
    if (c->options->json)
        return offline_each(c->store, list_block, c, e);
    table_init(&c->table, 5, 1 | 1 << 3 | 1 << 4, TITLES);
    enum td_status s = offline_each(c->store, list_block, c, e);
    if (!s)
        table_print(&c->table, stdout);
    table_fini(&c->table);
    return s;
}

/* ------------------------------------------------------------------- stat */

static void print_size(const char *name, uint64_t bytes)
{
    printf("%-14s %.1f MiB\n", name, (double)bytes / (1 << 20));
}

static json_t *json_codecs(const struct offline_info *i)
{
    json_t *o = json_object();
    for (int k = 0; k < BLOCK_CODECS; k++)
        if (i->n_by_codec[k])
            json_object_set_new(o, block_codec_name((enum block_codec)k), json_integer((json_int_t)i->n_by_codec[k]));
    return o;
}

static void tenant_name(const struct offline_info *i, uint32_t n, char out[16])
{
    if (n + 1 == OFFLINE_TENANTS)
        snprintf(out, 16, "others");
    else if (!i->tenants[n].tenant)
        snprintf(out, 16, "default");
    else
        snprintf(out, 16, "%08" PRIx32, i->tenants[n].tenant);
}

static json_t *json_tenants(const struct offline_info *i)
{
    json_t *o = json_object();
    char name[16];
    for (uint32_t n = 0; n < i->n_tenants; n++) {
        tenant_name(i, n, name);
        json_object_set_new(o, name, json_integer((json_int_t)i->tenants[n].stored_bytes));
    }
    return o;
}

static enum td_status run_stat(struct store_command *c, struct td_error *e)
{
    struct offline_info i;
    enum td_status s = offline_info(c->store, &i, e);
    if (s)
        return s;
    if (c->options->json) {
        cli_print_json(json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:i, s:o, s:I, s:o, s:o}", "blocks",
                                 (json_int_t)i.n_blocks, "payload_bytes", (json_int_t)i.payload_bytes, "dir_bytes",
                                 (json_int_t)i.dir_bytes, "blob_bytes", (json_int_t)i.blob_bytes, "garbage_bytes",
                                 (json_int_t)i.garbage_bytes, "blob_files", (json_int_t)i.n_blob_files, "bad_headers",
                                 (json_int_t)i.n_bad_headers, "layouts", (int)i.n_layouts, "layout",
                                 i.n_layouts ? json_layout(&i.layout) : json_null(), "stored_bytes",
                                 (json_int_t)i.stored_bytes, "codecs", json_codecs(&i), "tenants", json_tenants(&i)));
        return TD_OK;
    }
    printf("%-14s %" PRIu64 "\n", "blocks", i.n_blocks);
    for (int k = 0; k < BLOCK_CODECS; k++)
        if (i.n_by_codec[k])
            printf("  %-12s %" PRIu64 "\n", block_codec_name((enum block_codec)k), i.n_by_codec[k]);
    print_size("payload", i.payload_bytes);
    print_size("as stored", i.stored_bytes);
    for (uint32_t n = 0; n < i.n_tenants; n++) {
        char name[16];
        tenant_name(&i, n, name);
        printf("  %-12s %.1f MiB in %" PRIu64 "\n", name, (double)i.tenants[n].stored_bytes / (1 << 20),
               i.tenants[n].n_blocks);
    }
    print_size("directory", i.dir_bytes);
    print_size("in blob files", i.blob_bytes);
    print_size("garbage", i.garbage_bytes);
    printf("%-14s %" PRIu64 "\n", "blob files", i.n_blob_files);
    if (i.n_bad_headers)
        printf("%-14s %" PRIu64 "\n", "bad headers", i.n_bad_headers);
    if (i.n_layouts)
        printf("%-14s %s, %u layers, %u heads of %u, %u tokens%s\n", "layout", num_type_name(i.layout.dtype),
               i.layout.n_layers, i.layout.n_kv_heads, i.layout.head_dim, i.layout.page_tokens,
               i.n_layouts > 1 ? ", and others" : "");
    return TD_OK;
}

/* --------------------------------------------------------- verify and export */

static void say_progress(void *user, uint64_t n_done, uint64_t n_blocks)
{
    struct store_command *c = user;
    uint64_t now = clock_now(&c->clock);
    if (c->options->quiet || (now < c->told_ns + NS_PER_S && n_done < n_blocks))
        return;
    c->told_ns = now;
    fprintf(stderr, "tandem store: %" PRIu64 " of %" PRIu64 " blocks\n", n_done, n_blocks);
}

static void say_bad(void *user, const struct block_key *key, enum td_status why)
{
    char hex[33];
    (void)user;
    block_key_hex(key, hex);
    fprintf(stderr, "tandem store: block %s: %s\n", hex, td_status_name(why));
}

static void print_report(const struct store_command *c, const struct offline_report *r)
{
    if (c->options->json) {
        cli_print_json(json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "blocks", (json_int_t)r->n_blocks, "right",
                                 (json_int_t)r->n_right, "absent", (json_int_t)r->n_absent, "corrupt",
                                 (json_int_t)r->n_corrupt, "checksum", (json_int_t)r->n_checksum, "version",
                                 (json_int_t)r->n_version, "unreadable", (json_int_t)r->n_unreadable, "bytes",
                                 (json_int_t)r->n_bytes));
        return;
    }
    printf("%" PRIu64 " blocks, %" PRIu64 " right", r->n_blocks, r->n_right);
    if (r->n_right < r->n_blocks)
        printf("; absent %" PRIu64 ", corrupt %" PRIu64 ", checksum %" PRIu64 ", version %" PRIu64
               ", unreadable %" PRIu64,
               r->n_absent, r->n_corrupt, r->n_checksum, r->n_version, r->n_unreadable);
    putchar('\n');
}

static enum td_status finish_check(const struct store_command *c, enum td_status s, const struct offline_report *r,
                                   struct td_error *e)
{
    if (s)
        return s;
    print_report(c, r);
    if (r->n_right == r->n_blocks)
        return TD_OK;
    return td_fail(e, TD_ERR_CORRUPT, "%" PRIu64 " blocks are not right; a store deletes them when they are asked for",
                   r->n_blocks - r->n_right);
}

static enum td_status run_verify(struct store_command *c, struct td_error *e)
{
    struct offline_report r;
    const struct offline_work work = {say_progress, say_bad, c};
    return finish_check(c, offline_verify(c->store, &work, &r, e), &r, e);
}

static enum td_status run_export(struct store_command *c, struct td_error *e)
{
    struct offline_report r;
    const struct offline_work work = {say_progress, say_bad, c};
    return finish_check(c, offline_export(c->store, c->file, &work, &r, e), &r, e);
}

static void say_bytes(void *user, uint64_t n_done, uint64_t n_bytes)
{
    struct store_command *c = user;
    uint64_t now = clock_now(&c->clock);
    if (c->options->quiet || (now < c->told_ns + NS_PER_S && n_done < n_bytes))
        return;
    c->told_ns = now;
    fprintf(stderr, "tandem store: %" PRIu64 " of %" PRIu64 " MiB\n", n_done >> 20, n_bytes >> 20);
}

static enum td_status run_import(struct store_command *c, struct td_error *e)
{
    struct offline_report r;
    const struct offline_work work = {say_bytes, say_bad, c};
    enum td_status s = offline_import(c->store, c->file, &work, &r, e);
    if (s)
        return s;
    print_report(c, &r);
    return r.n_right == r.n_blocks ? TD_OK
                                   : td_fail(e, TD_ERR_CORRUPT, "%" PRIu64 " blocks are not right and were left out",
                                             r.n_blocks - r.n_right);
}

/* ---------------------------------------------------------------- compact */

static enum td_status run_compact(struct store_command *c, struct td_error *e)
{
    uint64_t before, after;
    if (!c->options->quiet)
        fprintf(stderr, "tandem store: compacting\n");
    enum td_status s = offline_compact(c->store, &before, &after, e);
    if (s)
        return s;
    if (c->options->json)
        cli_print_json(json_pack("{s:I, s:I}", "before_bytes", (json_int_t)before, "after_bytes", (json_int_t)after));
    else
        printf("%.1f MiB before, %.1f MiB after\n", (double)before / (1 << 20), (double)after / (1 << 20));
    return TD_OK;
}

/* ---------------------------------------------------------------- command */

static const struct {
    const char *name, *about;
    enum td_status (*run)(struct store_command *c, struct td_error *error_out);
    enum offline_mode mode;
    bool has_file;
} COMMANDS[] = {
    {"ls", "lists the blocks", run_ls, OFFLINE_READ, false},
    {"stat", "counts blocks, bytes and garbage", run_stat, OFFLINE_READ, false},
    {"verify", "reads and checks every block", run_verify, OFFLINE_READ, false},
    {"export", "the same, and writes the right blocks to FILE", run_export, OFFLINE_READ, true},
    {"import", "puts the right blocks of such a FILE into DIR, which it makes if need be", run_import, OFFLINE_MAKE,
     true},
    {"compact", "collects all garbage", run_compact, OFFLINE_WRITE, false},
};
enum { N_COMMANDS = sizeof(COMMANDS) / sizeof(COMMANDS[0]) };

static int usage(int which, const char **words, int n)
{
    int n_words = which < N_COMMANDS ? 2 + COMMANDS[which].has_file : 0;
    if (n && which == N_COMMANDS)
        fprintf(stderr, "tandem store: '%s': no such COMMAND\n", words[0]);
    else if (n > n_words && n)
        fprintf(stderr, "tandem store: '%s': one word too many\n", words[n_words]);
    else if (n)
        fprintf(stderr, "tandem store %s: %s is missing\n", words[0], n == 1 ? "DIR" : "FILE");
    fprintf(stderr, "usage: tandem store COMMAND DIR [FILE] [options]; the store must not be running\n");
    for (int i = 0; i < N_COMMANDS; i++)
        fprintf(stderr, "  %-10s %s\n", COMMANDS[i].name, COMMANDS[i].about);
    return 2;
}

static int run_command(int which, const struct store_options *options, const char *dir, const char *file)
{
    struct store_command c = {.options = options, .file = file};
    struct td_error e = {{0}};
    const struct log log = {.who = "tandem store", .level = LOG_ERROR};
    clock_init_real(&c.clock);
    enum td_status s = offline_open(dir, COMMANDS[which].mode, &c.clock, &log, &c.store, &e);
    if (!s)
        s = COMMANDS[which].run(&c, &e);
    offline_close(c.store);
    return s ? cli_fail("store", "%s", e.text[0] ? e.text : td_status_name(s)) : 0;
}

int cli_store(int argc, char **argv)
{
    struct store_options o = {0};
    const char **rest = mem_array((size_t)argc, sizeof(*rest));
    int n = 0, exit_code, which = 0;
    struct option_word words[N_COMMANDS + 1] = {{0}};
    for (int i = 0; i < N_COMMANDS; i++)
        words[i] = (struct option_word){.name = COMMANDS[i].name, .about = COMMANDS[i].about};
    const struct options options = {.usage = "COMMAND DIR [FILE] [options]",
                                    .about = "Looks into the directory of a store that does not run.",
                                    .table = TABLE,
                                    .words = words,
                                    .word = "COMMAND"};
    bool run = cli_options_words("store", &options, argc, argv, &o, rest, &n, &exit_code);
    if (run) {
        while (which < N_COMMANDS && (!n || strcmp(COMMANDS[which].name, rest[0])))
            which++;
        bool is_right = which < N_COMMANDS && n == 2 + COMMANDS[which].has_file;
        exit_code = is_right ? run_command(which, &o, rest[1], n > 2 ? rest[2] : NULL) : usage(which, rest, n);
    }
    free(rest);
    return exit_code;
}
