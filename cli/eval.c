/*
 * tandem eval: how well the model predicts a text. The text's tokens go through windows that overlap, so that
 * each token is scored once, behind at least context - stride others (but for those of the first window).
 *
 * References: Hugging Face, "Perplexity of fixed-length models" (windows with a stride).
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "cli/ask.h"

/* A router takes texts that may fit the context, so at least some bytes for each of its tokens. */
enum { PIECE_MOST = 1 << 20, PIECE_BYTES_PER_TOKEN = 4, CONTEXT_MOST = 2048, RETRY_MS = 500 };

struct eval_options {
    const char *router, *api_key, *lora;
    int64_t context, stride, concurrency, limit, wait_ms;
    bool special, progress, json;
};

#define AT(member) offsetof(struct eval_options, member)
static const struct option TABLE[] = {
    {"router", OPT_ADDRESS, AT(router), NULL, "HOST:PORT", 0, 0, "default: $TANDEM_ROUTER, else " CLI_DEFAULT_ROUTER},
    CLI_API_KEY_OPTION(AT(api_key)),
    {"lora", OPT_STRING, AT(lora), NULL, "NAME", 0, 0, "the adapter to score with"},
    {"context", OPT_INT, AT(context), "0", NULL, 0, 1 << 24,
     "tokens of a window; 0: the model's context, but at most 2048"},
    {"stride", OPT_INT, AT(stride), "0", NULL, 0, 1 << 24, "tokens that a window goes on by; 0: half of --context"},
    {"limit", OPT_INT, AT(limit), "0", NULL, 0, 1e12, "scores no more than the first tokens; 0: all"},
    {"add-special-tokens", OPT_BOOL, AT(special), "true", NULL, 0, 0,
     "the text begins with the token that the model begins texts with"},
    {"concurrency", OPT_INT, AT(concurrency), "8", NULL, 1, 4096, "most windows in flight"},
    {"wait-ms", OPT_MS, AT(wait_ms), "30000", NULL, 0, 3.6e6,
     "how long to wait for the cluster to be ready, and while it refuses"},
    {"progress", OPT_BOOL, AT(progress), "true", NULL, 0, 0, "prints a line on stderr each second"},
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "prints JSON"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

struct score {
    double nats, squares; /* sums over tokens of -log p, and of its square */
    uint64_t n, n_first;  /* tokens that were scored; of them the model's most probable */
};

struct window {
    struct eval *eval;
    uint64_t begin, end, scored_from; /* of the text's tokens */
    struct score score;
    bool is_done;
};

struct eval {
    const struct eval_options *o;
    const char *router, *file;
    struct rpc_client *client;
    struct clock clock;
    uint32_t *ids;
    uint64_t n_ids, n_bytes, context, stride, piece_bytes;
    struct window *windows;
    uint64_t n_windows;

    pthread_mutex_t lock; /* guards the rest, which rpc threads change, too */
    pthread_cond_t changed;
    uint64_t n_flying, n_done;
    struct window **again; /* that the router refused, to be asked again */
    uint64_t n_again;
    /* How many may be in flight: as many as the router kept when it refused one, and one more whenever as
     * many have been answered. Nothing is asked before again_ns, unless an answer has made room. */
    uint64_t n_most, n_since, again_ns;
    uint64_t done_ns;   /* when a window was done, or the first one began */
    enum rpc_code code; /* of the first window that failed for good */
    char error[1100];
};

/* --------------------------------------------------------------------- text */

static bool fail(struct eval *v, enum rpc_code code, const char *text)
{
    cli_rpc_fail("eval", v->router, code, text);
    return false;
}

static bool find_context(struct eval *v)
{
    struct td_error e = {{0}};
    struct cli_model model;
    enum rpc_code code = cli_ask_model(v->client, 5000, &model, &e);
    if (code)
        return fail(v, code, e.text);
    uint64_t most = model.context_tokens;
    v->context = v->o->context ? (uint64_t)v->o->context : most < CONTEXT_MOST ? most : CONTEXT_MOST;
    v->piece_bytes = most < PIECE_MOST / PIECE_BYTES_PER_TOKEN ? most * PIECE_BYTES_PER_TOKEN : PIECE_MOST;
    v->stride = v->o->stride ? (uint64_t)v->o->stride : v->context / 2;
    if (v->context > most || v->context < 2 || v->stride < 1 || v->stride >= v->context) {
        cli_usage("eval",
                  "--context %" PRIu64 ", --stride %" PRIu64 ": the model takes 2 to %" PRIu64
                  ", and the stride must be less than the context",
                  v->context, v->stride, most);
        return false;
    }
    return true;
}

static bool add_tokens(struct eval *v, const char *text, size_t len, bool special)
{
    Tandem__V1__TokenizeRequest request = TANDEM__V1__TOKENIZE_REQUEST__INIT;
    struct td_error e = {{0}};
    ProtobufCMessage *m = NULL;
    request.input_case = TANDEM__V1__TOKENIZE_REQUEST__INPUT_TEXT;
    request.text = (ProtobufCBinaryData){len, (uint8_t *)(uintptr_t)text};
    request.has_add_special_tokens_case = TANDEM__V1__TOKENIZE_REQUEST__HAS_ADD_SPECIAL_TOKENS_ADD_SPECIAL_TOKENS;
    request.add_special_tokens = special;
    enum rpc_code code = rpc_unary(v->client, "/tandem.v1.Tandem/Tokenize", &request.base,
                                   &tandem__v1__tokenize_response__descriptor, 60000, &m, &e);
    if (code)
        return fail(v, code, e.text);
    const Tandem__V1__TokenizeResponse *answer = (const Tandem__V1__TokenizeResponse *)m;
    v->ids = mem_resize(v->ids, v->n_ids + answer->n_ids + 1, sizeof(*v->ids));
    memcpy(v->ids + v->n_ids, answer->ids, answer->n_ids * sizeof(*v->ids));
    v->n_ids += answer->n_ids;
    protobuf_c_message_free_unpacked(m, NULL);
    return true;
}

/* Where a piece that begins at `at` ends: at most piece_bytes long, behind a line that no empty one
 * follows, since line ends may be tokens together; else behind a character. */
static size_t piece_end(const struct eval *v, const struct bytes *text, size_t at)
{
    size_t most = at + v->piece_bytes, end = most;
    if (most >= text->len)
        return text->len;
    while (end > at && !(text->data[end - 1] == '\n' && text->data[end] != '\n'))
        end--;
    if (end > at)
        return end;
    for (end = most; end > at + 1 && (text->data[end] & 0xc0) == 0x80;)
        end--;
    return end;
}

static bool tokenize(struct eval *v, const struct bytes *text)
{
    uint64_t limit = v->o->limit ? (uint64_t)v->o->limit : UINT64_MAX;
    for (size_t at = 0, end; at < text->len && v->n_ids < limit; at = end) {
        end = piece_end(v, text, at);
        if (!add_tokens(v, text->data + at, end - at, v->o->special && !at))
            return false;
    }
    v->n_bytes = text->len;
    if (v->n_ids > limit) {
        v->n_ids = limit;
        v->n_bytes = 0; /* unknown: tokens and bytes are not cut at the same place */
    }
    return true;
}

static void make_windows(struct eval *v)
{
    uint64_t end = 0, begin = 0, cap = 0;
    for (; end < v->n_ids; begin += v->stride) {
        uint64_t from = end ? end : 1;
        end = begin + v->context < v->n_ids ? begin + v->context : v->n_ids;
        v->windows = MEM_ROOM(v->windows, v->n_windows, cap, 64);
        v->windows[v->n_windows++] = (struct window){.eval = v, .begin = begin, .end = end, .scored_from = from};
    }
    v->again = mem_array(v->n_windows, sizeof(*v->again));
}

/* ------------------------------------------------------------------ windows */

static void add_score(struct window *w, const Tandem__V1__GenerateEnd *end)
{
    for (uint64_t i = w->scored_from - w->begin; i < end->n_prompt_logprobs && w->begin + i < w->end; i++) {
        double nats = -(double)end->prompt_logprobs[i];
        w->score.nats += nats;
        w->score.squares += nats * nats;
        w->score.n++;
        w->score.n_first += i < end->n_prompt_ranks && end->prompt_ranks[i] == 1;
    }
    w->is_done = true;
}

static void on_done(struct ask *a)
{
    struct window *w = a->user;
    struct eval *v = w->eval;
    uint64_t now = clock_now(&v->clock), patience_ns = (uint64_t)v->o->wait_ms * NS_PER_MS;
    pthread_mutex_lock(&v->lock);
    if (!a->code) {
        add_score(w, a->end);
        v->n_done++;
        v->done_ns = now;
        v->again_ns = 0;
        if (++v->n_since >= v->n_most && v->n_most < (uint64_t)v->o->concurrency) {
            v->n_most++;
            v->n_since = 0;
        }
    } else if (a->code == RPC_RESOURCE_EXHAUSTED && now < v->done_ns + patience_ns) {
        v->again[v->n_again++] = w;
        v->again_ns = now + (a->retry_after_ms ? a->retry_after_ms : RETRY_MS) * NS_PER_MS;
        uint64_t n_kept = v->n_flying > 1 ? v->n_flying - 1 : 1;
        v->n_most = n_kept < v->n_most ? n_kept : v->n_most;
        v->n_since = 0;
    } else if (!v->code) {
        v->code = a->code;
        snprintf(v->error, sizeof(v->error), "%s", a->error);
    }
    pthread_mutex_unlock(&v->lock);
    ask_free(a);
    pthread_mutex_lock(&v->lock); /* last: the main thread may go on, and leave the function that has v */
    v->n_flying--;
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
}

static void start(struct eval *v, struct window *w)
{
    json_t *ids = json_array(), *r = json_object();
    for (uint64_t i = w->begin; i < w->end; i++)
        json_array_append_new(ids, json_integer(v->ids[i]));
    json_object_set_new(r, "prompt_ids", ids);
    json_object_set_new(r, "max_tokens", json_integer(0));
    json_object_set_new(r, "prompt_logprobs", json_true());
    if (v->o->lora)
        json_object_set_new(r, "lora", json_string(v->o->lora));
    ask_start(v->client, r, NULL, on_done, w);
}

/* In the order of the text, so that the result does not depend on the order of answers. */
static struct score sum(const struct eval *v)
{
    struct score all = {0};
    for (uint64_t i = 0; i < v->n_windows; i++) {
        const struct score *s = &v->windows[i].score;
        if (!v->windows[i].is_done)
            continue;
        all.nats += s->nats;
        all.squares += s->squares;
        all.n += s->n;
        all.n_first += s->n_first;
    }
    return all;
}

static void show_progress(struct eval *v, uint64_t *shown_ns)
{
    uint64_t now = clock_now(&v->clock);
    if (!v->o->progress || now < *shown_ns + NS_PER_S || !v->n_done)
        return;
    *shown_ns = now;
    struct score s = sum(v);
    fprintf(stderr, "tandem eval: %" PRIu64 " of %" PRIu64 " windows, perplexity %.4f so far\n", v->n_done,
            v->n_windows, exp(s.nats / (double)s.n));
}

/* Waits up to ms for a change. The lock is held. */
static void wait_change(struct eval *v, uint32_t ms)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += ms / 1000;
    until.tv_nsec += (long)(ms % 1000) * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&v->changed, &v->lock, &until);
}

static bool run_windows(struct eval *v)
{
    uint64_t next = 0, shown_ns = clock_now(&v->clock);
    pthread_mutex_lock(&v->lock);
    v->done_ns = shown_ns;
    v->n_most = (uint64_t)v->o->concurrency;
    while ((v->n_done < v->n_windows && !v->code) || v->n_flying) {
        uint64_t now = clock_now(&v->clock), wait_ns = v->again_ns > now ? v->again_ns - now : 0;
        if (!v->code && !wait_ns && v->n_flying < v->n_most && (v->n_again || next < v->n_windows)) {
            struct window *w = v->n_again ? v->again[--v->n_again] : &v->windows[next++];
            v->n_flying++;
            pthread_mutex_unlock(&v->lock);
            start(v, w);
            pthread_mutex_lock(&v->lock);
        } else {
            wait_change(v, wait_ns && wait_ns < NS_PER_S ? (uint32_t)(wait_ns / NS_PER_MS) + 1 : 1000);
        }
        show_progress(v, &shown_ns);
    }
    pthread_mutex_unlock(&v->lock);
    return v->code ? fail(v, v->code, v->error) : true;
}

static void print_result(const struct eval *v)
{
    struct score s = sum(v);
    double mean = s.nats / (double)s.n, variance = s.squares / (double)s.n - mean * mean;
    double perplexity = exp(mean), error = perplexity * sqrt(fmax(variance, 0) / (double)s.n);
    double per_byte = v->n_bytes ? s.nats / log(2) / (double)v->n_bytes : NAN;
    if (v->o->json) {
        json_t *j = json_pack("{s:s, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f}", "file", v->file, "tokens",
                              (json_int_t)v->n_ids, "scored", (json_int_t)s.n, "context", (json_int_t)v->context,
                              "stride", (json_int_t)v->stride, "perplexity", perplexity, "perplexity_error", error,
                              "nats_per_token", mean, "most_probable", (double)s.n_first / (double)s.n);
        if (v->n_bytes) {
            json_object_set_new(j, "bytes", json_integer((json_int_t)v->n_bytes));
            json_object_set_new(j, "bits_per_byte", json_real(per_byte));
        }
        cli_print_json(j);
        return;
    }
    printf("%s: %" PRIu64 " tokens, %" PRIu64 " scored; windows of %" PRIu64 ", %" PRIu64 " new ones each\n", v->file,
           v->n_ids, s.n, v->context, v->stride);
    printf("%-24s %.4f +- %.4f\n", "perplexity", perplexity, error);
    printf("%-24s %.4f\n", "bits per token", mean / log(2));
    if (v->n_bytes)
        printf("%-24s %.4f\n", "bits per byte", per_byte);
    printf("%-24s %.2f %%\n", "most probable", 100 * (double)s.n_first / (double)s.n);
}

/* -------------------------------------------------------------------- start */

static bool read_text(const char *file, struct bytes *out)
{
    char chunk[65536];
    FILE *f = strcmp(file, "-") ? fopen(file, "rb") : stdin;
    size_t n;
    if (!f) {
        cli_fail("eval", "%s: %s", file, strerror(errno));
        return false;
    }
    while ((n = fread(chunk, 1, sizeof(chunk), f)) > 0)
        bytes_append(out, chunk, n);
    bool is_read = !ferror(f);
    if (!is_read)
        cli_fail("eval", "%s: %s", file, strerror(errno));
    if (f != stdin)
        fclose(f);
    return is_read;
}

static bool run(struct eval *v, const struct bytes *text)
{
    if (!cli_wait_ready("eval", v->client, v->router, v->o->wait_ms) || !find_context(v) || !tokenize(v, text))
        return false;
    if (v->n_ids < 2) {
        cli_fail("eval", "%s: fewer than two tokens: there is nothing to score", v->file);
        return false;
    }
    make_windows(v);
    if (!run_windows(v))
        return false;
    print_result(v);
    return true;
}

int cli_eval(int argc, char **argv)
{
    struct eval_options o = {0};
    struct bytes text = {0};
    const char **rest = mem_array((size_t)argc, sizeof(*rest));
    int n_rest, exit_code;
    if (!cli_options("eval", "[options] FILE", "Prints how well the model predicts a text (-: standard input).", TABLE,
                     argc, argv, &o, rest, &n_rest, &exit_code) ||
        !cli_words("eval", "FILE", rest, n_rest, 1, 1, &exit_code)) {
        free(rest);
        return exit_code;
    }
    struct eval v = {.o = &o, .router = cli_router(o.router), .file = rest[0], .lock = PTHREAD_MUTEX_INITIALIZER};
    clock_init_real(&v.clock);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&v.changed, &monotonic);
    exit_code = 1;
    if (read_text(v.file, &text) && (v.client = cli_connect("eval", v.router, o.api_key)))
        exit_code = run(&v, &text) ? 0 : 1;
    rpc_client_close(v.client);
    bytes_free(&text);
    free(v.ids);
    free(v.windows);
    free(v.again);
    free(rest);
    return exit_code;
}
