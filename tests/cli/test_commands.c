/*
 * The commands of tandem, run inside the test: what they make of words and input, and how they refuse. No
 * cluster runs.
 */
#include <sys/stat.h>

#include "cli/child.h"
#include "cli/params.h"
#include "cli/replay.h"
#include "cli/rundir.h"
#include "cli/table.h"
#include "tests/cli/run.h"

static char dir[64]; /* of the test's files */

static void make_dir(void)
{
    strcpy(dir, "/tmp/tandem-cli-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(dir));
    unsetenv("TANDEM_ROUTER");
}

static void remove_dir(void)
{
    char command[128];
    snprintf(command, sizeof(command), "rm -r %s", dir);
    ck_assert_int_eq(system(command), 0);
}

/* Path of a new file with this text; valid until the next call. */
static const char *file(const char *name, const char *text)
{
    static char path[128];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    ck_assert_ptr_nonnull(f);
    fputs(text, f);
    ck_assert_int_eq(fclose(f), 0);
    return path;
}

/* ------------------------------------------------------------------ generate */

/* n words as one word for run(): "~x~x". */
static const char *worker_options(int n, const char *word)
{
    static char text[3000];
    size_t len = 0;
    for (int i = 0; i < n; i++)
        len += (size_t)snprintf(text + len, sizeof(text) - len, "~%s", word);
    ck_assert_uint_lt(len, sizeof(text));
    return text;
}

START_TEST(test_generate_local_passes_all_worker_options_or_says_that_it_can_not)
{
    char words[3100];
    snprintf(words, sizeof(words), "--local --model %s --worker-options %s x", dir, worker_options(30, "--threads~1"));
    run(cli_generate, words);
    ck_assert_msg(strstr(ran.err, "more than 62 words") && ran.code == 2, "%d: %s", ran.code, ran.err);
}
END_TEST

static const struct {
    const char *words, *said;
} GENERATE[] = {
    {"--top-p 2 x", "--top-p: must be a number from 1e-06 to 1"},
    {"--n x x", "--n: 'x' is not N"},
    {"--seed -1 x", "--seed: '-1' is not N"},
    {"--stop-ids 1,x x", "--stop-ids: '1,x' is not ID,..."},
    {"--ttft-ms 0.0001 x", "--ttft-ms: must be 0, or milliseconds from 0.001 to 1e+12"},
    {"--logit-bias {\"a\":1} x", "--logit-bias: 'a' is no token id"},
    {"--greedy --temperature 0.5 x", "--temperature: can't be given together with --greedy"},
    {"--n 2 x", "--n: several answers need --json; see tandem generate --help"},
    {"--local x", "--local needs --model DIR; see tandem generate --help"},
    {"--jsonl x", "'x': with --jsonl prompts come from standard input; see tandem generate --help"},
};

START_TEST(test_generate_refuses_options_before_it_connects)
{
    char want[256];
    run(cli_generate, GENERATE[_i].words);
    snprintf(want, sizeof(want), "tandem generate: %s\n", GENERATE[_i].said);
    ck_assert_str_eq(ran.err, want);
    ck_assert_int_eq(ran.code, 2);
    ck_assert_str_eq(ran.out, "");
}
END_TEST

START_TEST(test_a_router_in_the_environment_has_a_port_that_exists)
{
    setenv("TANDEM_ROUTER", "localhost:99999", 1);
    run(cli_generate, "x");
    ck_assert_int_eq(ran.code, 2);
    ck_assert_ptr_nonnull(strstr(ran.err, "TANDEM_ROUTER"));
    ck_assert_str_eq(cli_router(NULL), "localhost:99999");
    ck_assert_str_eq(cli_router("here:1"), "here:1");
    setenv("TANDEM_ROUTER", "", 1);
    ck_assert_str_eq(cli_router(NULL), CLI_DEFAULT_ROUTER);
}
END_TEST

struct own {
    const char *tenant;
    struct cli_params params;
};

START_TEST(test_a_row_of_the_command_goes_before_a_parameter)
{
    static const struct option OWN[] = {
        {"tenant", OPT_STRING, offsetof(struct own, tenant), NULL, "WHO", 0, 0, "of the command"},
        {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
    };
    struct option *table = cli_params_table(OWN, offsetof(struct own, params));
    uint32_t n_tenants = 0, n_greedy = 0, n_prompts = 0;
    for (const struct option *row = table; row->name; row++) {
        n_tenants += !strcmp(row->name, "tenant");
        n_greedy += !strcmp(row->name, "greedy") && row->type == OPT_BOOL;
        n_prompts += !strcmp(row->name, "prompt-ids"); /* not of the command line */
        if (!strcmp(row->name, "skip-special-tokens"))
            ck_assert_str_eq(row->fallback, "true");
    }
    ck_assert_uint_eq(n_tenants, 1);
    ck_assert_uint_eq(n_greedy, 1);
    ck_assert_uint_eq(n_prompts, 0);
    ck_assert_str_eq(table[0].choices, "WHO");
    free(table);
}
END_TEST

/* Parses words into parameters, as a command does. */
static void read_params(struct own *own, struct option **table_out, int argc, char **argv)
{
    static const struct option NONE[] = {{NULL, 0, 0, NULL, NULL, 0, 0, NULL}};
    int exit_code;
    *table_out = cli_params_table(NONE, offsetof(struct own, params));
    ck_assert(cli_options("test", "", "", *table_out, argc, argv, own, NULL, NULL, &exit_code));
    ck_assert(cli_params_read("test", &own->params));
}

START_TEST(test_what_a_line_says_goes_before_options)
{
    char *argv[] = {"test",    "--greedy", "--max-tokens", "5", "--no-add-special-tokens",
                    "--tools", "[1]",      "--seed",       "3", NULL};
    struct own own = {0};
    struct option *table;
    read_params(&own, &table, 9, argv);
    ck_assert_uint_eq(json_object_size(own.params.given), 5);
    json_t *line = json_loads("{\"prompt\": \"x\", \"max_tokens\": 9, \"temperature\": 1}", 0, NULL);
    cli_params_add(&own.params, line, true);
    char *text = json_dumps(line, JSON_COMPACT | JSON_SORT_KEYS);
    /* greedy is temperature's rival, tools need messages */
    ck_assert_str_eq(text,
                     "{\"add_special_tokens\":false,\"max_tokens\":9,\"prompt\":\"x\",\"seed\":3,\"temperature\":1}");
    free(text);
    json_decref(line);
    line = json_loads("{\"prompt\": \"x\"}", 0, NULL);
    cli_params_add(&own.params, line, false);
    ck_assert_ptr_nonnull(json_object_get(line, "tools")); /* to be refused by name */
    ck_assert(json_is_true(json_object_get(line, "greedy")));
    json_decref(line);
    cli_params_free(&own.params);
    free(table);
}
END_TEST

START_TEST(test_switches_that_are_as_always_are_not_given)
{
    char *argv[] = {"test", "--no-greedy", "--skip-special-tokens", NULL};
    struct own own = {0};
    struct option *table;
    read_params(&own, &table, 3, argv);
    ck_assert_uint_eq(json_object_size(own.params.given), 0);
    cli_params_free(&own.params);
    free(table);
}
END_TEST

/* --------------------------------------------------------------------- input */

START_TEST(test_a_prompt_is_the_words_or_all_of_the_input)
{
    const char *words[] = {"Why", "is", "it?"};
    struct bytes b = {0};
    ck_assert(cli_read_prompt("test", words, 3, &b));
    ck_assert_str_eq(b.data, "Why is it?");
    bytes_clear(&b);
    give_input("a\n\0b", 4);
    ck_assert(cli_read_prompt("test", NULL, 0, &b));
    ck_assert_uint_eq(b.len, 4);
    ck_assert_mem_eq(b.data, "a\n\0b", 4);
    bytes_clear(&b);
    give_input("", 0);
    ck_assert(!cli_read_prompt("test", NULL, 0, &b));
    bytes_free(&b);
}
END_TEST

START_TEST(test_lines_have_any_length_and_lose_their_ends)
{
    static char text[20000];
    struct bytes line = {0};
    memset(text, 'x', sizeof(text));
    memcpy(text, "a\r\n\nb\0c\n", 8);
    give_input(text, sizeof(text));
    const size_t lens[] = {1, 0, 3, sizeof(text) - 8};
    for (int i = 0; i < 4; i++) {
        ck_assert(cli_read_line(&line));
        ck_assert_uint_eq(line.len, lens[i]);
    }
    ck_assert(!cli_read_line(&line));
    bytes_free(&line);
}
END_TEST

START_TEST(test_text_that_is_not_utf8_is_repaired_for_json)
{
    json_t *s = ask_text_json("a\xff\xe2\x82\xac\xc3", 6);
    ck_assert_str_eq(json_string_value(s), "a\xef\xbf\xbd\xe2\x82\xac\xef\xbf\xbd");
    json_decref(s);
    s = ask_text_json(NULL, 0);
    ck_assert_str_eq(json_string_value(s), "");
    json_decref(s);
}
END_TEST

/* -------------------------------------------------------------------- tables */

START_TEST(test_sizes_have_units_of_1024)
{
    static const struct {
        uint64_t bytes;
        const char *want;
    } CASES[] = {{0, "0"},
                 {999, "999 B"},
                 {1000, "0.977 KiB"},
                 {1536, "1.5 KiB"},
                 {100 << 10, "100 KiB"},
                 {1023 << 10, "0.999 MiB"},
                 {5ull << 30, "5 GiB"},
                 {3ull << 50, "3 PiB"},
                 {UINT64_MAX, "16384 PiB"}};
    static const char *const TITLES[] = {""};
    struct table t;
    table_init(&t, 1, 0, TITLES);
    for (int i = 0; i < 9; i++) {
        table_bytes(&t, CASES[i].bytes);
        ck_assert_str_eq(t.cells[1 + i], CASES[i].want);
    }
    table_fini(&t);
}
END_TEST

START_TEST(test_columns_are_as_wide_as_they_need)
{
    static const char *const TITLES[] = {"name", "n", "why"};
    char *text = NULL;
    size_t len = 0;
    FILE *f = open_memstream(&text, &len);
    struct table t;
    table_init(&t, 3, 5, TITLES);
    table_cell(&t, "a\nb");
    table_cell(&t, "%d", 1000);
    table_cell(&t, "x");
    table_print(&t, f);
    fclose(f);
    ck_assert_str_eq(text, "name     n  why\na?b   1000  x\n");
    table_fini(&t);
    free(text);
}
END_TEST

/* ------------------------------------------------------------ replay, scale */

START_TEST(test_events_are_sorted_by_time)
{
    struct replay_events v;
    struct td_error e;
    ck_assert_int_eq(replay_events_parse("2m:kill:decode-1,30s:slow:prefill-0/4,500ms:scale:prefill=3,"
                                         "1s:faults:store/wire.message:drop=0.5@3-9,0s:faults:store/",
                                         &v, &e),
                     TD_OK);
    static const struct {
        double at_ms;
        const char *action, *target;
    } WANT[] = {{0, "faults", "store"},
                {500, "scale", "prefill=3"},
                {1000, "faults", "store"},
                {30000, "slow", "prefill-0"},
                {120000, "kill", "decode-1"}};
    ck_assert_uint_eq(v.n, 5);
    for (int i = 0; i < 5; i++) {
        ck_assert_double_eq(v.list[i].at_ms, WANT[i].at_ms);
        ck_assert_str_eq(v.list[i].action, WANT[i].action);
        ck_assert_str_eq(v.list[i].target, WANT[i].target);
    }
    ck_assert_str_eq(v.list[0].script, "");
    ck_assert_str_eq(v.list[2].script, "wire.message:drop=0.5@3-9");
    ck_assert_double_eq(v.list[3].times, 4);
    ck_assert_int_eq(replay_events_parse("1s:slow:prefill-0", &v, &e), TD_OK);
    ck_assert_double_eq(v.list[0].times, 2);
    ck_assert_int_eq(replay_events_parse(NULL, &v, &e), TD_OK);
    ck_assert_uint_eq(v.n, 0);
}
END_TEST

static const char *const BAD_EVENTS[][2] = {
    {"5:kill:a", "expected TIME:ACTION:WORKER"},
    {"-1s:kill:a", "expected TIME:ACTION:WORKER"},
    {"nans:kill:a", "expected TIME:ACTION:WORKER"},
    {"1s:murder:a", "expected TIME:ACTION:WORKER"},
    {"1s:kill:", "expected TIME:ACTION:WORKER"},
    {"1s:kill", "expected TIME:ACTION:WORKER"},
    {"1s:kill:a/2", "nothing may follow the name"},
    {"1s:slow:a/1", "TIMES must be above 1 and at most 1000"},
    {"1s:slow:a/1001", "TIMES must be above 1 and at most 1000"},
    {"1s:slow:a/2x", "TIMES must be above 1 and at most 1000"},
    {"1s:faults:a", "the script is missing"},
    {"1s:faults:a/@file", "expected a script, not the name of a file"},
    {"1s:faults:a/wire.message:melt", "melt"},
};
enum { N_BAD_EVENTS = sizeof(BAD_EVENTS) / sizeof(BAD_EVENTS[0]) };

START_TEST(test_events_that_can_not_be_done_are_refused)
{
    struct replay_events v;
    struct td_error e;
    char begin[128];
    snprintf(begin, sizeof(begin), "--at: '%s': ", BAD_EVENTS[_i][0]);
    ck_assert_int_eq(replay_events_parse(BAD_EVENTS[_i][0], &v, &e), TD_ERR_INVALID);
    ck_assert_mem_eq(e.text, begin, strlen(begin));
    ck_assert_msg(strstr(e.text, BAD_EVENTS[_i][1]) != NULL, "%s", e.text);
}
END_TEST

START_TEST(test_scale_takes_numbers_of_the_roles)
{
    static const char *const BAD[] = {"router=1",   "prefill",    "prefill=", "prefill=x",
                                      "prefill=65", "prefill=-1", "decode=0", "decode=1x"};
    char words[128];
    for (int i = 0; i < 8; i++) {
        run(cli_scale, BAD[i]);
        ck_assert_int_eq(ran.code, 2);
        ck_assert_ptr_nonnull(strstr(ran.err, BAD[i]));
    }
    run(cli_scale, "");
    ck_assert_int_eq(ran.code, 2);
    snprintf(words, sizeof(words), "prefill=0 decode=64 store=0 --run-dir %s", dir);
    run(cli_scale, words);
    ck_assert_int_eq(ran.code, 1);
    ck_assert_ptr_nonnull(strstr(ran.err, "no cluster runs in"));
}
END_TEST

/* -------------------------------------------------------------------- traces */

static const char TRACE[] = "{\"tandem_trace\": 1, \"block_tokens\": 16}\n"
                            "{\"timestamp\": 1000, \"input_length\": 10, \"output_length\": 1}\n"
                            "{\"timestamp\": 3000, \"input_length\": 20, \"output_length\": 2}\n"
                            "{\"timestamp\": 6000, \"input_length\": 30, \"output_length\": 3}\n";

/* Times and prompts of the trace that the latest command wrote to stdout. */
static void expect_trace(uint32_t n, const uint64_t *ms, const uint32_t *prompts)
{
    struct trace *t;
    struct td_error e = {{0}};
    char path[128];
    strcpy(path, file("again", ran.out));
    ck_assert_msg(!trace_read(path, 1 << 20, &t, &e), "%s", e.text);
    ck_assert_uint_eq(t->n_requests, n);
    for (uint32_t i = 0; i < n; i++) {
        ck_assert_uint_eq(t->requests[i].arrival_ns, ms[i] * NS_PER_MS);
        ck_assert_uint_eq(t->requests[i].n_prompt, prompts[i]);
    }
    trace_close(t);
}

START_TEST(test_a_slice_of_a_trace_begins_at_0_and_ends_before_to)
{
    char words[256];
    const char *path = file("trace.jsonl", TRACE);
    snprintf(words, sizeof(words), "slice %s --from 2", path);
    run(cli_trace, words);
    ck_assert_int_eq(ran.code, 0);
    expect_trace(2, (uint64_t[]){0, 3000}, (uint32_t[]){20, 30});
    snprintf(words, sizeof(words), "slice %s/trace.jsonl --to 5 --rate 2", dir);
    run(cli_trace, words);
    expect_trace(2, (uint64_t[]){0, 1000}, (uint32_t[]){10, 20});
    snprintf(words, sizeof(words), "slice %s/trace.jsonl --skip 1 --count 1 --length-scale 3", dir);
    run(cli_trace, words);
    expect_trace(1, (uint64_t[]){0}, (uint32_t[]){60});
    snprintf(words, sizeof(words), "slice %s/trace.jsonl --from 100", dir);
    run(cli_trace, words);
    ck_assert_int_eq(ran.code, 1);
    ck_assert_ptr_nonnull(strstr(ran.err, "no request is left"));
}
END_TEST

START_TEST(test_capacities_are_whole_numbers_with_commas)
{
    static const char *const BAD[] = {"0",  "1,", ",1", "1,,2",       "x",
                                      "-1", "1x", "+1", "4294967296", "18446744073709551617"};
    char words[256];
    file("trace.jsonl", TRACE);
    for (int i = 0; i < 10; i++) {
        snprintf(words, sizeof(words), "stat %s/trace.jsonl --capacity %s", dir, BAD[i]);
        run(cli_trace, words);
        ck_assert_msg(ran.code == 2, "%s", BAD[i]);
        ck_assert_ptr_nonnull(strstr(ran.err, "--capacity"));
    }
    snprintf(words, sizeof(words), "stat %s/trace.jsonl --capacity 1,4294967295", dir);
    run(cli_trace, words);
    ck_assert_int_eq(ran.code, 0);
}
END_TEST

START_TEST(test_a_trace_command_needs_a_kind_and_its_file)
{
    run(cli_trace, "");
    ck_assert_int_eq(ran.code, 2);
    run(cli_trace, "stir x");
    ck_assert_int_eq(ran.code, 2);
    ck_assert_ptr_nonnull(strstr(ran.err, "'stir': no such KIND"));
    run(cli_trace, "stat");
    ck_assert_int_eq(ran.code, 2);
    ck_assert_ptr_nonnull(strstr(ran.err, "TRACE is missing"));
    run(cli_trace, "stat a b");
    ck_assert_int_eq(ran.code, 2);
    ck_assert_ptr_nonnull(strstr(ran.err, "'b': one word too many"));
}
END_TEST

/* ------------------------------------------------------------------- traces */

/* A made trace in the test's directory, as tandem synth writes it. */
static void synth(const char *name, const char *more)
{
    char words[512];
    snprintf(words, sizeof(words), "synth --output %s/%s --requests 200 --rate 5 --system 2 %s %s", dir, name,
             strstr(more, "--turns") ? "" : "--turns 3", more);
    run(cli_trace, words);
    ck_assert_msg(ran.code == 0, "%s", ran.err);
}

/* A trace command about that file, which must go well. */
static void about_trace(const char *kind, const char *name, const char *more)
{
    char words[512];
    snprintf(words, sizeof(words), "%s %s/%s %s", kind, dir, name, more);
    run(cli_trace, words);
    ck_assert_msg(ran.code == 0, "%s", ran.err);
}

/* A number of the latest command's JSON object. */
static double printed(const char *name)
{
    json_t *o = json_loads(ran.out, 0, NULL);
    ck_assert_msg(o != NULL, "no JSON: %s", ran.out);
    double v = json_number_value(json_object_get(o, name));
    json_decref(o);
    return v;
}

START_TEST(test_trace_stat_describes_what_synth_made)
{
    synth("a.jsonl", "--tenants 3 --block-tokens 64 --prompt 300 --output-tokens 50");
    ck_assert_ptr_nonnull(strstr(ran.err, "made: 200 requests"));
    about_trace("stat", "a.jsonl", "--capacity 100,1000");
    ck_assert_ptr_nonnull(strstr(ran.out, "200 requests in "));
    ck_assert_ptr_nonnull(strstr(ran.out, "3 tenants"));
    ck_assert_ptr_nonnull(strstr(ran.out, "prompt tokens"));
    ck_assert_ptr_nonnull(strstr(ran.out, "without end"));
    about_trace("stat", "a.jsonl", "--capacity 100,1000000 --json");
    ck_assert_double_eq(printed("requests"), 200);
    ck_assert_double_eq(printed("block_tokens"), 64);
    ck_assert_double_eq(printed("tenants"), 3);
    json_t *o = json_loads(ran.out, 0, NULL);
    /* A cache that holds everything finds all that can be found. */
    const json_t *large = json_array_get(json_object_get(o, "hits"), 1);
    double full = json_number_value(json_object_get(json_object_get(large, "full_blocks_only"), "lru"));
    double with = json_number_value(json_object_get(json_object_get(large, "with_partial_last_blocks"), "lru"));
    const json_t *most = json_object_get(o, "ceiling_full_blocks_only");
    ck_assert_double_eq_tol(full, json_number_value(json_object_get(most, "block_share")), 1e-6);
    most = json_object_get(o, "ceiling_with_partial_last_blocks");
    ck_assert_double_eq_tol(with, json_number_value(json_object_get(most, "block_share")), 1e-6);
    ck_assert_double_ne(full, with);
    json_decref(o);
}
END_TEST

START_TEST(test_trace_convert_keeps_lengths_and_slices_cut_by_time_and_number)
{
    char words[256];
    synth("a.jsonl", "--tenants 2");
    about_trace("stat", "a.jsonl", "--json");
    double tokens = printed("input_tokens"), span_s = printed("span_s");
    snprintf(words, sizeof(words), "--format mooncake --output %s/b.jsonl", dir);
    about_trace("convert", "a.jsonl", words);
    about_trace("stat", "b.jsonl", "--json");
    ck_assert_double_eq(printed("requests"), 200);
    ck_assert_double_eq(printed("input_tokens"), tokens);
    snprintf(words, sizeof(words), "--rate 2 --output-scale 2 --output %s/c.jsonl", dir);
    about_trace("convert", "a.jsonl", words);
    about_trace("stat", "c.jsonl", "--json");
    ck_assert_double_eq_tol(printed("span_s"), span_s / 2, 0.01);
    snprintf(words, sizeof(words), "--skip 20 --count 30 --output %s/d.jsonl", dir);
    about_trace("slice", "a.jsonl", words);
    about_trace("stat", "d.jsonl", "--json");
    ck_assert_double_eq(printed("requests"), 30);
    snprintf(words, sizeof(words), "slice %s/a.jsonl --from 1e6", dir);
    run(cli_trace, words);
    ck_assert_int_eq(ran.code, 1);
    ck_assert_ptr_nonnull(strstr(ran.err, "no request is left"));
}
END_TEST

START_TEST(test_trace_synth_fits_another_trace)
{
    char words[256];
    synth("even.jsonl", "--arrivals even --turns 1");
    about_trace("stat", "even.jsonl", "--json");
    ck_assert_double_lt(printed("gap_cv"), 0.01);
    synth("a.jsonl", "--prompt 700 --arrivals even --follows");
    snprintf(words, sizeof(words), "--fit %s/a.jsonl --seed 2", dir);
    synth("b.jsonl", words);
    about_trace("stat", "a.jsonl", "--json");
    double tokens = printed("input_tokens");
    about_trace("stat", "b.jsonl", "--json");
    ck_assert_double_eq(printed("requests"), 200);
    ck_assert_double_gt(printed("input_tokens"), tokens / 2);
    ck_assert_double_lt(printed("input_tokens"), tokens * 2);
}
END_TEST

static const struct {
    const char *words, *said;
    int code;
} BAD_TRACE[] = {
    {"stat /nowhere/trace", "/nowhere/trace", 1},
    {"stat /nowhere/trace --capacity 1,x", "--capacity: expected up to 16 numbers of blocks", 2},
    {"synth --fit /nowhere/trace", "/nowhere/trace", 1},
    {"synth --requests 3 --output /nowhere/out", "/nowhere/out: No such file", 1},
    {"convert /nowhere/trace", "/nowhere/trace", 1},
    {"synth --format tea", "--format", 2},
};

START_TEST(test_trace_says_which_file_or_option_is_wrong)
{
    for (size_t i = 0; i < sizeof(BAD_TRACE) / sizeof(BAD_TRACE[0]); i++) {
        run(cli_trace, BAD_TRACE[i].words);
        ck_assert_msg(strstr(ran.err, BAD_TRACE[i].said) != NULL, "'%s' instead of '%s'", ran.err, BAD_TRACE[i].said);
        ck_assert_int_eq(ran.code, BAD_TRACE[i].code);
    }
    run(cli_trace, "--help");
    ck_assert_int_eq(ran.code, 0);
    ck_assert_ptr_nonnull(strstr(ran.out, "Makes a trace of sessions."));
}
END_TEST

/* ------------------------------------------------------------------ simulate */

static void simulate(const char *more)
{
    char words[1024];
    file("trace.jsonl", TRACE);
    snprintf(words, sizeof(words), "%s/trace.jsonl --prefill 2 --decode 2 %s", dir, more);
    run(cli_simulate, words);
}

static const char *const BAD_SIMULATE[][2] = {
    {"--fail decode-3@1s", "with N from 1 to the number of workers"},
    {"--fail decode-0@1s", "with N from 1 to the number of workers"},
    {"--fail store-1@1s", "with N from 1 to the number of workers"},
    {"--fail decode-1@1s+", "with N from 1 to the number of workers"},
    {"--fail decode-1@1sx", "with N from 1 to the number of workers"},
    {"--fail decode-1@nan", "with N from 1 to the number of workers"},
    {"--fail decode-1@4s+10s,decode-1@9s", "still dead, or its last death is not known yet"},
    {"--fail decode-1@9s,decode-1@4s+10s", "still dead, or its last death is not known yet"},
    {"--fail router-1@1s", "no router would be left"},
    {"--routers 2 --fail router-1@1s+1s", "expected router-N@TIME"},
    {"--routers 3 --fail router-2@1s,router-2@2s", "dead already"},
    {"--watts 1,2", "--watts 1,2: expected IDLE,PREFILL,DECODE"},
    {"--watts 1,2,-3", "--watts 1,2,-3: expected IDLE,PREFILL,DECODE"},
    {"--watts 1,2,3x", "--watts 1,2,3x: expected IDLE,PREFILL,DECODE"},
    {"--watts 1,2,3 --power-budget 100 --power-first 5", "there are only 4 workers"},
    {"--page-tokens 7", "--page-tokens 7 does not divide blocks of 16 tokens"},
    {"--sweep prefill", "expected NAME=VALUES"},
    {"--sweep =1", "expected NAME=VALUES"},
    {"--sweep prefill=", "no values"},
    {"--sweep ,", "nothing to sweep"},
    {"--sweep prefill=4..x", "expected FROM..TO"},
    {"--sweep prefill=4..2", "expected FROM..TO"},
    {"--sweep prefill=1..2:0", "expected FROM..TO"},
    {"--sweep prefill=1..2:-1", "expected FROM..TO"},
    {"--sweep prefill=1..2000", "expected FROM..TO"},
    {"--sweep seed=1..1000,rate=1..100", "more than 65536 points"},
    {"--sweep policy=wish", "--policy"},
};
enum { N_BAD_SIMULATE = sizeof(BAD_SIMULATE) / sizeof(BAD_SIMULATE[0]) };

START_TEST(test_simulate_refuses_what_it_can_not_run)
{
    simulate(BAD_SIMULATE[_i][0]);
    ck_assert_int_eq(ran.code, 2);
    ck_assert_msg(strstr(ran.err, BAD_SIMULATE[_i][1]) != NULL, "%s", ran.err);
}
END_TEST

START_TEST(test_faults_that_a_simulation_can_run)
{
    simulate("--json --fail decode-1@1s+500ms,prefill-2@2,decode-1@5s");
    ck_assert_msg(ran.code == 0, "%s", ran.err);
    simulate("--json --fail decode-1@9s,decode-1@1s+1s"); /* in any order */
    ck_assert_msg(ran.code == 0, "%s", ran.err);
}
END_TEST

/* How many lines of the sweep begin with a point. */
static void expect_points(const char *const *points, uint32_t n)
{
    char *line = strchr(ran.out, '\n');
    ck_assert_msg(ran.code == 0, "%s", ran.err);
    for (uint32_t i = 0; i < n; i++) {
        ck_assert_ptr_nonnull(line);
        ck_assert_msg(!strncmp(line + 1, points[i], strlen(points[i])), "%s", line);
        line = strchr(line + 1, '\n');
    }
    ck_assert_ptr_nonnull(line);
    ck_assert_str_eq(line, "\n");
}

START_TEST(test_a_sweep_makes_every_combination_in_order)
{
    static const char *const POINTS[] = {"decode=1 rate=1 ", "decode=1 rate=1.5 ", "decode=2 rate=1 ",
                                         "decode=2 rate=1.5 "};
    static const char *const NAMES[] = {"policy=tandem ", "policy=random "};
    simulate("--jobs 1 --sweep decode=1..2,rate=1..1.5:0.5");
    expect_points(POINTS, 4);
    simulate("--jobs 1 --sweep policy=tandem|random");
    expect_points(NAMES, 2);
}
END_TEST

START_TEST(test_a_path_with_dots_is_one_value_of_a_sweep)
{
    char words[256];
    file("profile.json", "");
    snprintf(words, sizeof(words), "--jobs 1 --sweep profile=%s/../none.json", dir);
    simulate(words);
    ck_assert_int_eq(ran.code, 2);
    ck_assert_ptr_null(strstr(ran.err, "FROM..TO"));
    ck_assert_ptr_nonnull(strstr(ran.err, "none.json"));
}
END_TEST

/* ------------------------------------------------------------------ tokenize */

static void tokenize_lines(const char *input)
{
    give_input(input, strlen(input));
    run(cli_tokenize, "--jsonl --tokenizer " DEMO_MODEL);
}

START_TEST(test_tokenize_answers_each_line)
{
    tokenize_lines("{\"id\": 7, \"text\": \"Hi\"}\n\n{\"text_base64\": \"SGk=\"}\n{\"ids\": [39, 72]}\n"
                   "{\"ids\": [39, 72], \"stream\": true}\n{\"text\": \"\"}\n"
                   "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}\n");
    ck_assert_msg(ran.code == 0, "%s", ran.err);
    char *lines[6], *save, *line = strtok_r(ran.out, "\n", &save);
    for (int i = 0; i < 6; i++, line = strtok_r(NULL, "\n", &save))
        lines[i] = line;
    ck_assert_str_eq(lines[0], "{\"ids\":[39,72],\"id\":7}");
    ck_assert_str_eq(lines[1], "{\"ids\":[39,72]}");
    ck_assert_str_eq(lines[2], "{\"text\":\"Hi\"}");
    ck_assert_str_eq(lines[3], "{\"pieces\":[\"H\",\"i\",\"\"]}");
    ck_assert_str_eq(lines[4], "{\"ids\":[]}");
    ck_assert_ptr_nonnull(strstr(lines[5], "\"text\":\"<|im_start|>user\\nHi<|im_end|>\\n\""));
}
END_TEST

START_TEST(test_tokenize_says_what_is_wrong_with_a_line)
{
    tokenize_lines("{\"text\": 5}\n{\"text_base64\": \"SGk\"}\n{\"text_base64\": 5}\n{\"ids\": 5}\n{\"ids\": [-1]}\n"
                   "{\"ids\": [4294967296]}\n");
    ck_assert_str_eq(ran.out, "{\"error\":\"text: must be a text\",\"line\":1}\n"
                              "{\"error\":\"text_base64: not base64\",\"line\":2}\n"
                              "{\"error\":\"text_base64: must be a text\",\"line\":3}\n"
                              "{\"error\":\"ids: must be a list\",\"line\":4}\n"
                              "{\"error\":\"ids[0]: not an id\",\"line\":5}\n"
                              "{\"error\":\"ids[0]: not an id\",\"line\":6}\n");
    ck_assert_int_eq(ran.code, 0); /* they were requests, and were answered */
    tokenize_lines("5\n{\"text\": \"a\"}\n{}\n");
    ck_assert_int_eq(ran.code, 1);
    ck_assert_ptr_nonnull(strstr(ran.err, "line 1: not a JSON object"));
    ck_assert_ptr_nonnull(strstr(ran.err, "line 3: text, text_base64, ids or messages is missing"));
}
END_TEST

/* ------------------------------------------------------------- run directory */

START_TEST(test_a_run_directory_is_given_or_found)
{
    struct rundir r;
    struct td_error e;
    char want[128], cwd[1000];
    static char longest[3000];
    ck_assert_int_eq(rundir_locate("/a/b//", &r, &e), TD_OK);
    ck_assert_str_eq(r.path, "/a/b");
    ck_assert_ptr_nonnull(getcwd(cwd, sizeof(cwd)));
    ck_assert_int_eq(rundir_locate("here", &r, &e), TD_OK);
    ck_assert_mem_eq(r.path, cwd, strlen(cwd));
    ck_assert_str_eq(r.path + strlen(cwd), "/here");
    setenv("XDG_RUNTIME_DIR", dir, 1);
    snprintf(want, sizeof(want), "%s/tandem", dir);
    ck_assert_int_eq(rundir_locate(NULL, &r, &e), TD_OK);
    ck_assert_str_eq(r.path, want);
    unsetenv("XDG_RUNTIME_DIR");
    snprintf(want, sizeof(want), "/tmp/tandem-%u", (unsigned)geteuid());
    ck_assert_int_eq(rundir_locate(NULL, &r, &e), TD_OK);
    ck_assert_str_eq(r.path, want);
    memset(longest, '/', sizeof(longest) - 1);
    ck_assert_int_eq(rundir_locate(longest, &r, &e), TD_ERR_INVALID);
}
END_TEST

START_TEST(test_a_key_is_drawn_once_and_kept)
{
    char a[RUNDIR_KEY_BYTES], b[RUNDIR_KEY_BYTES], path[128];
    struct td_error e = {{0}};
    struct stat st;
    ck_assert_msg(!rundir_key(dir, "secret", a, &e), "%s", e.text);
    ck_assert_msg(!rundir_key(dir, "secret", b, &e), "%s", e.text);
    ck_assert_str_eq(a, b);
    ck_assert_uint_eq(strspn(a, "0123456789abcdef"), 64);
    snprintf(path, sizeof(path), "%s/secret", dir);
    ck_assert_int_eq(stat(path, &st), 0);
    ck_assert_uint_eq(st.st_mode & 0777, 0600);
    ck_assert_int_eq(chmod(path, 0640), 0);
    ck_assert_int_eq(rundir_key(dir, "secret", b, &e), TD_ERR_REFUSED);
    strcpy(path, file("bare", a)); /* without the end of the line */
    ck_assert_int_eq(chmod(path, 0600), 0);
    ck_assert_int_eq(rundir_key(dir, "bare", b, &e), TD_ERR_REFUSED);
    strcpy(path, file("word", "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdeX\n"));
    ck_assert_int_eq(chmod(path, 0600), 0);
    ck_assert_int_eq(rundir_key(dir, "word", b, &e), TD_ERR_REFUSED);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("cli_commands");
    TCase *c = tcase_create("commands");
    suite_add_tcase(s, c);
    tcase_add_checked_fixture(c, make_dir, remove_dir);
    tcase_add_test(c, test_generate_local_passes_all_worker_options_or_says_that_it_can_not);
    tcase_add_loop_test(c, test_generate_refuses_options_before_it_connects, 0, sizeof(GENERATE) / sizeof(GENERATE[0]));
    tcase_add_test(c, test_a_router_in_the_environment_has_a_port_that_exists);
    tcase_add_test(c, test_a_row_of_the_command_goes_before_a_parameter);
    tcase_add_test(c, test_what_a_line_says_goes_before_options);
    tcase_add_test(c, test_switches_that_are_as_always_are_not_given);
    tcase_add_test(c, test_a_prompt_is_the_words_or_all_of_the_input);
    tcase_add_test(c, test_lines_have_any_length_and_lose_their_ends);
    tcase_add_test(c, test_text_that_is_not_utf8_is_repaired_for_json);
    tcase_add_test(c, test_sizes_have_units_of_1024);
    tcase_add_test(c, test_columns_are_as_wide_as_they_need);
    tcase_add_test(c, test_events_are_sorted_by_time);
    tcase_add_loop_test(c, test_events_that_can_not_be_done_are_refused, 0, N_BAD_EVENTS);
    tcase_add_test(c, test_scale_takes_numbers_of_the_roles);
    tcase_add_test(c, test_a_slice_of_a_trace_begins_at_0_and_ends_before_to);
    tcase_add_test(c, test_capacities_are_whole_numbers_with_commas);
    tcase_add_test(c, test_a_trace_command_needs_a_kind_and_its_file);
    tcase_add_test(c, test_trace_stat_describes_what_synth_made);
    tcase_add_test(c, test_trace_convert_keeps_lengths_and_slices_cut_by_time_and_number);
    tcase_add_test(c, test_trace_synth_fits_another_trace);
    tcase_add_test(c, test_trace_says_which_file_or_option_is_wrong);
    tcase_add_loop_test(c, test_simulate_refuses_what_it_can_not_run, 0, N_BAD_SIMULATE);
    tcase_add_test(c, test_faults_that_a_simulation_can_run);
    tcase_add_test(c, test_a_sweep_makes_every_combination_in_order);
    tcase_add_test(c, test_a_path_with_dots_is_one_value_of_a_sweep);
    tcase_add_test(c, test_tokenize_answers_each_line);
    tcase_add_test(c, test_tokenize_says_what_is_wrong_with_a_line);
    tcase_add_test(c, test_a_run_directory_is_given_or_found);
    tcase_add_test(c, test_a_key_is_drawn_once_and_kept);
    return tap_main(s);
}
