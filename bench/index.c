/*
 * The prefix index (sched/index.h). It has prompts of 6,250 blocks (100k tokens) at 1 to 3 of 128 holders
 * each, and a head of 100 blocks that all holders have.
 *
 * Rates count the thread's own time, so that other processes matter little. Each round measures them between
 * two measurements of the limit: random cache lines of as much memory, read and written, with prefetching.
 * The limit of a lookup's time is that of as many dependent reads of memory as its bisection makes.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "base/thread.h"
#include "bench/bench.h"
#include "sched/index.h"

enum {
    HOLDERS = 128,
    PROMPT = 6250,
    HEAD = 100,
    BATCH = 512, /* events in one call */
    ROUNDS = 10,
    LOOKUPS = 2000,
    READERS_MAX = 2,
    PROMPTS_ASKED = 64, /* prompts that a reader asks for, in turn */
    LINE_WORDS = 8,
    AHEAD = 16,
};
static const double WRITER_SECONDS = 0.5; /* duration of a row with readers beside the writer */

struct index_work {
    struct index *index;
    struct clock clock, processor; /* processor: time for which this thread ran */
    uint32_t n_prompts, next_chain;
    struct block_key *keys;     /* [n_prompts][PROMPT] */
    struct block_key *head;     /* [HEAD + PROMPT] the head, then PROMPT blocks that no holder has */
    struct block_event *events; /* [n_events] events of a round */
    uint32_t n_events;
    struct holder_set all;
    uint64_t *lines; /* memory on which the limits are measured */
    uint64_t n_lines;
    double seconds;
};

struct rate {
    double value, limit;
};

static uint64_t thread_ns(const struct clock *clock)
{
    struct timespec t;
    (void)clock;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

static double since(const struct index_work *w, uint64_t start_ns)
{
    return (double)(clock_now(&w->clock) - start_ns) * 1e-9;
}

static double ran_since(const struct index_work *w, uint64_t start_ns)
{
    return (double)(clock_now(&w->processor) - start_ns) * 1e-9;
}

static struct block_key key(uint64_t chain, uint64_t i)
{
    struct block_key k;
    uint64_t half[2] = {random_at(1, chain, i), random_at(2, chain, i)};
    memcpy(k.b, half, sizeof(half));
    return k;
}

/* ------------------------------------------------------------------ limits */

static uint64_t some_line(const struct index_work *w, uint64_t i)
{
    return ((random_mix(i) >> 32) * w->n_lines >> 32) * LINE_WORDS;
}

static double lines_per_second(const struct index_work *w)
{
    uint64_t n = w->n_events, start = clock_now(&w->processor);
    for (uint64_t i = 0; i < n; i++) {
        __builtin_prefetch(&w->lines[some_line(w, start + i + AHEAD)], 1);
        w->lines[some_line(w, start + i)]++;
    }
    return (double)n / ran_since(w, start);
}

/* Time of one read of memory whose address depends on the read before. */
static double seconds_per_read(const struct index_work *w)
{
    enum { READS = 100000 };
    uint64_t at = 0, start = clock_now(&w->processor);
    for (uint64_t i = 0; i < READS; i++)
        at = w->lines[some_line(w, at ^ i)] & 1;
    double t = ran_since(w, start) / READS;
    w->lines[0] += at;
    return t;
}

/* ----------------------------------------------------------------- writing */

static void apply(struct index_work *w, uint32_t holder, const struct block_event *events, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += BATCH)
        index_apply(w->index, holder, events + i, n - i < BATCH ? n - i : BATCH);
}

static void fill_events(struct block_event *events, const struct block_key *keys, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        events[i] = (struct block_event){BLOCK_ADDED, TIER_WORKER, i, keys[i]};
}

static void make_prompts(struct index_work *w)
{
    struct block_event *events = mem_array(PROMPT, sizeof(*events));
    for (uint32_t p = 0; p < w->n_prompts; p++) {
        struct block_key *keys = w->keys + (size_t)p * PROMPT;
        for (uint32_t i = 0; i < PROMPT; i++)
            keys[i] = key(p, i);
        fill_events(events, keys, PROMPT);
        for (uint32_t copy = 0; copy <= random_at(3, p, 0) % 3; copy++)
            apply(w, (uint32_t)(p + copy * 37) % HOLDERS, events, PROMPT);
    }
    w->next_chain = w->n_prompts;
    for (uint32_t i = 0; i < HEAD + PROMPT; i++)
        w->head[i] = key(UINT32_MAX, i);
    fill_events(events, w->head, HEAD);
    for (uint32_t h = 0; h < HOLDERS; h++) {
        holder_set_add(&w->all, h);
        apply(w, h, events, HEAD);
    }
    free(events);
}

static void new_events(struct index_work *w)
{
    uint32_t chain = w->next_chain++;
    for (uint32_t i = 0; i < w->n_events; i++)
        w->events[i] = (struct block_event){BLOCK_ADDED, TIER_WORKER, i, key(chain, i)};
}

/* Applies all events once, each batch for another holder. Returns blocks per second. */
static double write_events(struct index_work *w, enum block_event_kind kind)
{
    for (uint32_t i = 0; i < w->n_events; i++)
        w->events[i].kind = kind;
    uint64_t start = clock_now(&w->processor);
    for (uint32_t i = 0; i < w->n_events; i += BATCH)
        index_apply(w->index, i / BATCH % HOLDERS, w->events + i, w->n_events - i < BATCH ? w->n_events - i : BATCH);
    return w->n_events / ran_since(w, start);
}

/* Adds the mean rate of all rounds: tables are copied in some of them, and not in others. */
static void add_rate(struct bench_rows *out, const struct rate *r, const char *name, uint64_t n_blocks)
{
    double value = 0, limit = 0;
    for (int i = 0; i < ROUNDS; i++) {
        value += 1 / r[i].value;
        limit += 1 / r[i].limit;
    }
    bench_add(out, "M/s", ROUNDS / value * 1e-6, ROUNDS / limit * 1e-6, "%s, %" PRIu64 " blocks in it", name, n_blocks);
}

static void bench_writes(struct index_work *w, struct bench_rows *out)
{
    struct rate add[ROUNDS], again[ROUNDS], take[ROUNDS];
    uint64_t n_blocks = index_blocks(w->index);
    for (int i = 0; i < ROUNDS; i++) {
        new_events(w);
        double before = lines_per_second(w);
        add[i].value = write_events(w, BLOCK_ADDED);
        double middle = lines_per_second(w);
        again[i].value = write_events(w, BLOCK_ADDED);
        take[i].value = write_events(w, BLOCK_REMOVED);
        double after = lines_per_second(w);
        add[i].limit = (before + middle) / 2;
        again[i].limit = take[i].limit = (middle + after) / 2;
    }
    add_rate(out, add, "blocks added", n_blocks);
    add_rate(out, again, "blocks added that are there", n_blocks);
    add_rate(out, take, "blocks removed", n_blocks);
}

static void bench_clear(struct index_work *w, struct bench_rows *out)
{
    uint64_t n, sum, start = clock_now(&w->clock);
    index_digest(w->index, 0, &n, &sum);
    index_clear(w->index, 0);
    bench_add(out, "us", since(w, start) * 1e6, 0, "clear of a holder of %" PRIu64 " blocks", n);
    uint64_t n_steps = 0;
    for (start = clock_now(&w->clock); index_sweep(w->index, 1 << 16);)
        n_steps++;
    bench_add(out, "us", since(w, start) * 1e6 / (double)(n_steps + 1), 0, "step of its sweep, 65536 entries");
}

/* ----------------------------------------------------------------- lookups */

/* Makes the keys of prompt p; only its first `known` blocks are in the index. */
static void ask_index(const struct index_work *w, uint32_t p, uint32_t known, struct block_key *keys)
{
    memcpy(keys, w->keys + (size_t)(p % w->n_prompts) * PROMPT, known * sizeof(*keys));
    memcpy(keys + known, w->head + HEAD, (PROMPT - known) * sizeof(*keys));
}

struct lookup {
    const char *name;
    uint32_t known, n_reads; /* n_reads: dependent reads of memory that the bisection makes */
};

static void add_times(struct index_work *w, struct bench_rows *out, const struct lookup *l, double *us)
{
    double limit = seconds_per_read(w) * l->n_reads * 1e6;
    bench_sort(us, LOOKUPS);
    bench_add(out, "us", us[LOOKUPS / 2], limit, "lookup of %d blocks for %d holders, %s, p50", PROMPT, HOLDERS,
              l->name);
    bench_add(out, "us", us[LOOKUPS * 99 / 100], 0, "lookup of %d blocks for %d holders, %s, p99", PROMPT, HOLDERS,
              l->name);
}

static void bench_lookup(struct index_work *w, struct bench_rows *out, const struct lookup *l,
                         const struct block_key *fixed)
{
    uint32_t lengths[INDEX_MAX_HOLDERS];
    struct block_key *keys = mem_array(PROMPT, sizeof(*keys));
    double us[LOOKUPS];
    for (uint32_t i = 0; i < LOOKUPS; i++) {
        if (!fixed)
            ask_index(w, i, l->known, keys);
        uint64_t start = clock_now(&w->clock);
        index_match_each(w->index, &w->all, fixed ? fixed : keys, PROMPT, lengths);
        us[i] = since(w, start) * 1e6;
    }
    free(keys);
    add_times(w, out, l, us);
}

/* Measures lookups of a prompt of which every holder has a different part. */
static void bench_ends(struct index_work *w, struct bench_rows *out)
{
    static const struct lookup ENDS = {"each with another part of it", 0, 15};
    struct block_key *keys = mem_array(PROMPT, sizeof(*keys));
    struct block_event *events = mem_array(PROMPT, sizeof(*events));
    uint32_t chain = w->next_chain++;
    for (uint32_t i = 0; i < PROMPT; i++)
        keys[i] = key(chain, i);
    fill_events(events, keys, PROMPT);
    for (uint32_t h = 0; h < HOLDERS; h++)
        apply(w, h, events, PROMPT * (h + 1) / HOLDERS);
    bench_lookup(w, out, &ENDS, keys);
    free(events);
    free(keys);
}

static void bench_lookups(struct index_work *w, struct bench_rows *out)
{
    static const struct lookup LOOKUP[] = {
        {"all of it there", PROMPT, 2}, {"30 % of it", PROMPT * 3 / 10, 15}, {"nothing of it", 0, 1}};
    static const struct lookup SHARED = {"the head of all", 0, 15};
    for (int i = 0; i < 3; i++)
        bench_lookup(w, out, &LOOKUP[i], NULL);
    bench_lookup(w, out, &SHARED, w->head);
    bench_ends(w, out);
}

/* ----------------------------------------------------------------- threads */

struct bench_index_reader {
    const struct index_work *work;
    struct index_reader *reader;
    _Atomic bool *over;
    uint64_t n;
    pthread_t thread;
};

static void *look_up(void *arg)
{
    struct bench_index_reader *r = arg;
    uint32_t lengths[INDEX_MAX_HOLDERS];
    struct block_key *keys = mem_array((size_t)PROMPTS_ASKED * PROMPT, sizeof(*keys));
    for (uint32_t i = 0; i < PROMPTS_ASKED; i++)
        ask_index(r->work, i, PROMPT * 3 / 10, keys + (size_t)i * PROMPT);
    for (; !atomic_load(r->over); r->n++) {
        const struct block_key *prompt = keys + r->n % PROMPTS_ASKED * PROMPT;
        index_read_begin(r->reader);
        index_match_each(r->work->index, &r->work->all, prompt, PROMPT, lengths);
        index_read_end(r->reader);
    }
    free(keys);
    return NULL;
}

static void bench_readers(struct index_work *w, struct bench_rows *out, uint32_t n_readers)
{
    struct bench_index_reader readers[READERS_MAX] = {{0}};
    _Atomic bool over = false;
    uint64_t n_lookups = 0, n_written = 0;
    new_events(w);
    for (uint32_t i = 0; i < n_readers; i++) {
        readers[i] = (struct bench_index_reader){.work = w, .reader = index_reader_open(w->index), .over = &over};
        readers[i].thread = thread_start("reader", look_up, &readers[i]);
    }
    uint64_t start = clock_now(&w->clock);
    while (since(w, start) < w->seconds) {
        write_events(w, BLOCK_ADDED);
        write_events(w, BLOCK_REMOVED);
        n_written += 2ull * w->n_events;
    }
    atomic_store(&over, true);
    double t = since(w, start);
    for (uint32_t i = 0; i < n_readers; i++) {
        pthread_join(readers[i].thread, NULL);
        index_reader_close(readers[i].reader);
        n_lookups += readers[i].n;
    }
    bench_add(out, "k/s", (double)n_lookups / t * 1e-3, 0, "lookups, 30 %% hits, on %u threads beside the writer",
              n_readers);
    bench_add(out, "M/s", (double)n_written / t * 1e-6, 0, "blocks written beside %u threads of lookups", n_readers);
}

/* -------------------------------------------------------------------- area */

static enum td_status open_work(struct index_work *w, const struct bench_options *o, struct td_error *e)
{
    uint64_t n_blocks = (uint64_t)o->n_blocks;
    clock_init_real(&w->clock);
    w->processor.now_ns = thread_ns;
    w->seconds = o->seconds > 0 ? o->seconds : WRITER_SECONDS;
    w->n_prompts = (uint32_t)((n_blocks + PROMPT - 1) / PROMPT);
    w->n_events = (uint32_t)(n_blocks / 4 > BATCH ? n_blocks / 4 : BATCH);
    void *keys, *events, *lines;
    if (mem_try((size_t)w->n_prompts * PROMPT * sizeof(*w->keys), &keys))
        return td_fail(e, TD_ERR_NO_MEMORY, "no memory for the keys of %" PRIu64 " blocks", n_blocks);
    w->keys = keys;
    if (mem_try(w->n_events * sizeof(*w->events), &events))
        return td_fail(e, TD_ERR_NO_MEMORY, "no memory for %u events", w->n_events);
    w->events = events;
    w->head = mem_array(PROMPT + HEAD, sizeof(*w->head));
    w->index = index_open(0);
    make_prompts(w);
    while (index_sweep(w->index, UINT32_MAX))
        ;
    w->n_lines = index_bytes(w->index) / (LINE_WORDS * sizeof(uint64_t));
    if (mem_try(w->n_lines * LINE_WORDS * sizeof(uint64_t), &lines))
        return td_fail(e, TD_ERR_NO_MEMORY, "no memory to measure the limit on");
    w->lines = memset(lines, 0, w->n_lines * LINE_WORDS * sizeof(uint64_t));
    return TD_OK;
}

static void close_work(struct index_work *w)
{
    index_close(w->index);
    free(w->keys);
    free(w->head);
    free(w->events);
    free(w->lines);
}

enum td_status bench_index(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out)
{
    struct index_work w = {0};
    enum td_status s = open_work(&w, o, error_out);
    if (!s) {
        bench_add(out, "bytes", (double)index_bytes(w.index) / (double)index_blocks(w.index), 0,
                  "memory of a block, %" PRIu64 " in it", index_blocks(w.index));
        bench_writes(&w, out);
        bench_lookups(&w, out);
        for (uint32_t n = 1; n <= READERS_MAX; n++)
            bench_readers(&w, out, n);
        bench_clear(&w, out);
    }
    close_work(&w);
    return s;
}
