#include "replay/profile.h"

#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { MAX_FILE_BYTES = 64 << 20, MAX_ROWS = 65536, TERMS = 3 };

/*
 * Named machines.
 * - H200: fits to TensorRT-LLM 1.3 as AIConfigurator 0.12 predicts it, bf16, one GPU for 8B and four for 70B.
 *   Pools are 90 % of the memory less weights and 3.8 GB a GPU.
 * - a800x8-70b: eight A800. Prefill by equation 1 of Mooncake (FAST '25) at half of 312 TFLOP/s each; decode
 *   17 ms a step, and KV at half of 16.3 TB/s.
 * - DGX: a 70B model on eight GPUs. The H100 is 3.43 times as fast as the A100 in prefill and 1.64 times in
 *   decode, at 1.75 times the power and 2.16 times the price (Splitwise, ISCA '24).
 * - Power: idle draws a fifth of what the machine is built for, prefill all of it, decode six tenths (prompts
 *   draw the peak, decoding hardly notices a cap at half of the peak).
 */
static const struct {
    const char *name, *cost;
    double kv_bytes_per_token, pool_bytes, watts, price;
} NAMED[] = {
    {"h200-8b", PROFILE_H200_8B, 131072, 114e9, 700, 1},
    {"h200-70b", "9516,59.05,0.0006157:12087,0.01884,46.12", 327680, 380e9, 2800, 4},
    {"a800x8-70b", "0,94.63,0.0021006:17000,0.0402,0", 327680, 449e9, 3200, 8},
    {"dgx-h100-70b", "12624,37.4,0.0003157:10075,0.01381,46.67", 327680, 400e9, 10200, 2.16},
    {"dgx-a100-70b", "43300,128.3,0.001083:16523,0.02265,76.5", 327680, 400e9, 5830, 1},
};
static const double IDLE_SHARE = 0.2, DECODE_SHARE = 0.6;

/* --------------------------------------------------------------------- fit */

struct rows { /* rows of x[TERMS] with y = 1: both divided by the measured time */
    double (*x)[TERMS];
    uint32_t n;
};

static void add_row(struct rows *r, double a, double b, double c, double ms)
{
    if (!(r->n & (r->n - 1)))
        r->x = mem_resize(r->x, r->n ? r->n * 2 : 1, sizeof(*r->x));
    r->x[r->n][0] = a / ms;
    r->x[r->n][1] = b / ms;
    r->x[r->n++][2] = c / ms;
}

/* Solves m w = b for n terms by Gauss-Jordan elimination with pivots. The caller has scaled the columns. */
static bool solve(double m[TERMS][TERMS + 1], uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t best = i;
        for (uint32_t k = i; k < n; k++)
            best = fabs(m[k][i]) > fabs(m[best][i]) ? k : best;
        if (fabs(m[best][i]) < 1e-12)
            return false;
        for (uint32_t j = 0; j <= n; j++) {
            double other = m[i][j];
            m[i][j] = m[best][j];
            m[best][j] = other;
        }
        for (uint32_t k = 0; k < n; k++)
            for (uint32_t j = n + 1; k != i && j-- > i;)
                m[k][j] -= m[k][i] / m[i][i] * m[i][j];
    }
    return true;
}

/* Least squares over the used terms. *worst_out: the most negative coefficient; TERMS: none is negative. */
static bool fit_terms(const struct rows *r, const bool *used, double *w_out, int *worst_out)
{
    double m[TERMS][TERMS + 1] = {{0}}, scale[TERMS] = {0}, least = 0;
    int index[TERMS];
    uint32_t n = 0;
    for (int t = 0; t < TERMS; t++) {
        if (!used[t])
            continue;
        for (uint32_t i = 0; i < r->n; i++)
            scale[n] = fmax(scale[n], r->x[i][t]);
        index[n++] = t;
    }
    for (uint32_t i = 0; i < r->n; i++)
        for (uint32_t a = 0; a < n; a++) {
            for (uint32_t b = 0; b < n; b++)
                m[a][b] += r->x[i][index[a]] / scale[a] * (r->x[i][index[b]] / scale[b]);
            m[a][n] += r->x[i][index[a]] / scale[a];
        }
    if (!solve(m, n))
        return false;
    *worst_out = TERMS;
    memset(w_out, 0, TERMS * sizeof(*w_out));
    for (uint32_t a = 0; a < n; a++) {
        w_out[index[a]] = m[a][n] / m[a][a] / scale[a];
        if (w_out[index[a]] * scale[a] < least) {
            least = w_out[index[a]] * scale[a];
            *worst_out = index[a];
        }
    }
    return true;
}

static bool fit(const struct rows *r, double *w_out, double *error_out)
{
    bool used[TERMS] = {true, true, true};
    int worst = TERMS;
    for (int left = TERMS; left; left--) {
        if (!fit_terms(r, used, w_out, &worst))
            return false;
        if (worst == TERMS)
            break;
        used[worst] = false; /* fix the most negative one at 0 and fit the others again */
    }
    *error_out = 0;
    for (uint32_t i = 0; i < r->n; i++)
        *error_out += fabs(r->x[i][0] * w_out[0] + r->x[i][1] * w_out[1] + r->x[i][2] * w_out[2] - 1) / r->n;
    return worst == TERMS;
}

/* -------------------------------------------------------------------- file */

static bool number_of(const json_t *row, const char *name, double least, double *out)
{
    const json_t *v = json_object_get(row, name);
    if (!json_is_number(v) || !(json_number_value(v) >= least) || !(json_number_value(v) < 1e12))
        return false;
    *out = json_number_value(v);
    return true;
}

static enum td_status read_rows(const json_t *profile, const char *list, const char *const names[2], struct rows *out,
                                struct td_error *e)
{
    const json_t *rows = json_object_get(profile, list), *row;
    size_t i;
    if (rows && !json_is_array(rows))
        return td_fail(e, TD_ERR_INVALID, "%s: expected a list", list);
    if (json_array_size(rows) > MAX_ROWS)
        return td_fail(e, TD_ERR_INVALID, "%s: more than %d rows", list, MAX_ROWS);
    json_array_foreach(rows, i, row)
    {
        double a, b, ms;
        bool decode = !strcmp(list, "decode"), prefix = !strcmp(list, "prefill_prefix");
        if (!number_of(row, names[0], 1, &a) || !number_of(row, names[1], prefix ? 0 : 1, &b) ||
            !number_of(row, "ms", 1e-6, &ms) || (prefix && b >= a))
            return td_fail(e, TD_ERR_INVALID, "%s[%zu]: expected positive numbers %s, %s and ms", list, i, names[0],
                           names[1]);
        if (decode)
            add_row(out, 1, a * b, a, ms);
        else if (prefix)
            add_row(out, 1, a - b, (a - b) * (a + b), ms);
        else
            add_row(out, 1, a * b, a * b * b, ms);
    }
    return TD_OK;
}

/* Measured steps with prompt tokens and decoding, as the cost model describes them. */
struct mixed_rows {
    struct cost_step *at;
    uint32_t n;
};

static enum td_status read_mixed(const json_t *profile, struct mixed_rows *out, struct td_error *e)
{
    const json_t *rows = json_object_get(profile, "mixed"), *row;
    size_t i;
    if (rows && !json_is_array(rows))
        return td_fail(e, TD_ERR_INVALID, "mixed: expected a list");
    if (json_array_size(rows) > MAX_ROWS)
        return td_fail(e, TD_ERR_INVALID, "mixed: more than %d rows", MAX_ROWS);
    out->at = mem_array(json_array_size(rows), sizeof(*out->at));
    json_array_foreach(rows, i, row)
    {
        double batch, context, tokens, prefix, ms;
        if (!number_of(row, "batch", 1, &batch) || !number_of(row, "context", 1, &context) ||
            !number_of(row, "tokens", 1, &tokens) || !number_of(row, "prefix", 0, &prefix) ||
            !number_of(row, "ms", 1e-6, &ms) || batch > UINT32_MAX || tokens > UINT32_MAX)
            return td_fail(e, TD_ERR_INVALID,
                           "mixed[%zu]: expected positive numbers batch, context, tokens and ms, and prefix", i);
        out->at[out->n++] = (struct cost_step){.n_prompts = 1,
                                               .prefill_tokens = (uint32_t)tokens,
                                               .prefill_square = tokens * (tokens + 2 * prefix),
                                               .batch = (uint32_t)batch,
                                               .context = batch * context,
                                               .ms = ms};
    }
    return TD_OK;
}

struct weighted {
    double value, weight;
};

static int compare(const void *a, const void *b)
{
    const struct weighted *x = a, *y = b;
    return (x->value > y->value) - (x->value < y->value);
}

static double median(struct weighted *w, uint32_t n)
{
    double half = 0;
    uint32_t i = 0;
    qsort(w, n, sizeof(*w), compare);
    for (uint32_t k = 0; k < n; k++)
        half += w[k].weight / 2;
    while (i + 1 < n && (half -= w[i].weight) > 0)
        i++;
    return w[i].value;
}

/* Median error of the model "sum of both parts, less `less` milliseconds". */
static double mixed_error(const struct mixed_rows *rows, const double *sums, double less, struct weighted *errors)
{
    for (uint32_t i = 0; i < rows->n; i++)
        errors[i] = (struct weighted){fabs((sums[i] - less) / rows->at[i].ms - 1), 1};
    return median(errors, rows->n);
}

/* Finds the errors of the models. The best share has the least mean of relative errors: it is the median of
 * the rows' own shares, each weighted by 1 / ms. */
static struct profile_mixed judge_mixed(const struct mixed_rows *rows, const struct cost_profile *cost)
{
    struct profile_mixed m = {.n_rows = rows->n};
    double fixed = cost->decode[0], *sums = mem_array(rows->n, sizeof(*sums));
    struct weighted *w = mem_array(rows->n, sizeof(*w));
    for (uint32_t i = 0; i < rows->n; i++) {
        struct cost_step prompt = rows->at[i], batch = rows->at[i];
        prompt.batch = batch.prefill_tokens = 0;
        sums[i] = cost_profile_step_ms(cost, &prompt) + cost_profile_step_ms(cost, &batch);
        w[i] = (struct weighted){fixed > 0 ? (sums[i] - rows->at[i].ms) / fixed : 0, 1 / rows->at[i].ms};
    }
    if (rows->n) {
        m.share = median(w, rows->n);
        m.sum_error = mixed_error(rows, sums, 0, w);
        m.smaller_error = mixed_error(rows, sums, fmin(fixed, cost->prefill[0]), w);
        m.share_error = mixed_error(rows, sums, m.share * fixed, w);
        for (uint32_t i = 0; i < rows->n; i++)
            sums[i] = cost_profile_step_ms(cost, &rows->at[i]);
        m.model_error = mixed_error(rows, sums, 0, w);
    }
    free(sums);
    free(w);
    return m;
}

static bool has_word(const json_t *profile, const char *word)
{
    static const char *const MEMBERS[] = {"gpu", "model", "backend", "precision"};
    char tp[32];
    snprintf(tp, sizeof(tp), "tp%lld", (long long)json_integer_value(json_object_get(profile, "tp")));
    if (!strcmp(tp, word))
        return true;
    for (size_t i = 0; i < sizeof(MEMBERS) / sizeof(MEMBERS[0]); i++) {
        const char *text = json_string_value(json_object_get(profile, MEMBERS[i]));
        if (text && strstr(text, word))
            return true;
    }
    return false;
}

static bool has_words(const json_t *profile, const char *words)
{
    char *copy = mem_strdup(words ? words : ""), *state = NULL;
    bool all = true;
    for (char *w = strtok_r(copy, ",", &state); w && all; w = strtok_r(NULL, ",", &state))
        all = has_word(profile, w);
    free(copy);
    return all;
}

static enum td_status choose_profile(const json_t *root, const char *words, const json_t **out, struct td_error *e)
{
    const json_t *list = json_object_get(root, "profiles"), *p;
    size_t i;
    if (!json_is_array(list))
        return td_fail(e, TD_ERR_INVALID, "profiles: expected a list");
    if (!words && json_array_size(list) != 1)
        return td_fail(e, TD_ERR_INVALID, "it has %zu profiles: say which by FILE:WORD,...", json_array_size(list));
    json_array_foreach(list, i, p) if (has_words(p, words))
    {
        *out = p;
        return TD_OK;
    }
    return td_fail(e, TD_ERR_NOT_FOUND, "no profile has all of '%s'", words);
}

/* ------------------------------------------------------------------ memory */

/* Models and GPUs whose memory is derived from their names: sizes from the models' configs, and memory as the
 * driver reports it less what it reserves. */
static const struct {
    const char *name;
    double layers, kv_heads, head_dim, parameters;
} MODELS[] = {
    {"Llama-3.1-8B", 32, 8, 128, 8.03e9},  {"Llama-3-8B", 32, 8, 128, 8.03e9},
    {"Llama-3.1-70B", 80, 8, 128, 70.6e9}, {"Llama-3-70B", 80, 8, 128, 70.6e9},
    {"Llama-3.3-70B", 80, 8, 128, 70.6e9}, {"Llama-3.1-405B", 126, 8, 128, 405.9e9},
};
static const struct {
    const char *name;
    double bytes;
} GPUS[] = {{"h200_sxm", 139 * 0x1p30}, {"h100_sxm", 79 * 0x1p30}, {"a100_sxm", 79 * 0x1p30}};
/* Used share of a GPU's memory; bytes of activations, graphs and libraries on each GPU. */
static const double USED_SHARE = 0.9, OTHER_BYTES = 3.8e9;

/* Bytes of a number in a quantization mode, as AIConfigurator names modes; 0: not known. */
static double bytes_of_mode(const char *mode)
{
    if (!strcmp(mode, "bfloat16") || !strcmp(mode, "bf16") || !strcmp(mode, "float16") || !strcmp(mode, "fp16"))
        return 2;
    return !strcmp(mode, "fp8") || !strcmp(mode, "fp8_block") || !strcmp(mode, "int8") ? 1 : 0;
}

/* Bytes of a number of `what`. Without modes, a precision of "bf16" holds for all numbers; "fp8" does not say
 * what the KV has. */
static double bytes_of(const json_t *p, const char *what)
{
    const char *mode = json_string_value(json_object_get(json_object_get(p, "quant"), what)),
               *precision = json_string_value(json_object_get(p, "precision"));
    double all = precision ? bytes_of_mode(precision) : 0;
    return mode ? bytes_of_mode(mode) : all > 1 ? all : 0;
}

/* Derives the memory that the table does not give. Unknown names give nothing. */
static void derive_memory(const json_t *p, struct worker_profile *out)
{
    const char *model = json_string_value(json_object_get(p, "model")),
               *gpu = json_string_value(json_object_get(p, "gpu"));
    double tp = (double)json_integer_value(json_object_get(p, "tp")), kv = bytes_of(p, "kvcache_quant_mode"),
           weight = bytes_of(p, "gemm_quant_mode");
    size_t m = 0, g = 0;
    while (m < sizeof(MODELS) / sizeof(MODELS[0]) && !(model && strstr(model, MODELS[m].name)))
        m++;
    while (g < sizeof(GPUS) / sizeof(GPUS[0]) && !(gpu && !strcmp(gpu, GPUS[g].name)))
        g++;
    if (m == sizeof(MODELS) / sizeof(MODELS[0]) || !(tp >= 1 && tp <= MODELS[m].kv_heads))
        return; /* with more GPUs than KV heads, some heads are stored more than once */
    if (!(out->kv_bytes_per_token > 0) && kv > 0) {
        out->kv_bytes_per_token = 2 * MODELS[m].layers * MODELS[m].kv_heads * MODELS[m].head_dim * kv;
        out->is_derived = true;
    }
    double pool = g < sizeof(GPUS) / sizeof(GPUS[0])
                      ? tp * (USED_SHARE * GPUS[g].bytes - OTHER_BYTES) - MODELS[m].parameters * weight
                      : 0;
    if (!(out->pool_bytes > 0) && weight > 0 && pool > 0) {
        out->pool_bytes = pool;
        out->is_derived = true;
    }
}

static enum td_status fit_profile(const json_t *p, struct worker_profile *out, struct td_error *e)
{
    static const char *const PREFILL[] = {"batch", "isl"}, *const PREFIX[] = {"isl_total", "prefix"},
                             *const DECODE[] = {"batch", "context"};
    struct rows prefill = {0}, decode = {0};
    struct mixed_rows mixed = {0};
    double errors[2];
    *out = (struct worker_profile){.fit_error = 0};
    enum td_status s = read_rows(p, "prefill", PREFILL, &prefill, e);
    if (!s)
        s = read_rows(p, "prefill_prefix", PREFIX, &prefill, e);
    if (!s)
        s = read_rows(p, "decode", DECODE, &decode, e);
    if (!s)
        s = read_mixed(p, &mixed, e);
    if (!s && (!fit(&prefill, out->cost.prefill, &errors[0]) || !fit(&decode, out->cost.decode, &errors[1])))
        s = td_fail(e, TD_ERR_INVALID, "prefill or decode: too few different rows to fit three coefficients");
    if (!s) {
        out->fit_error = fmax(errors[0], errors[1]);
        out->mixed = judge_mixed(&mixed, &out->cost);
    }
    number_of(p, "kv_bytes_per_token", 0, &out->kv_bytes_per_token);
    number_of(p, "pool_bytes", 0, &out->pool_bytes);
    derive_memory(p, out);
    free(prefill.x);
    free(decode.x);
    free(mixed.at);
    return s;
}

enum td_status profile_parse(const char *data, size_t size, const char *words, struct worker_profile *out,
                             struct td_error *e)
{
    const json_t *chosen = NULL;
    json_error_t why;
    struct worker_profile p;
    json_t *root = json_loadb(data, size, JSON_REJECT_DUPLICATES, &why);
    if (!root)
        return td_fail(e, TD_ERR_INVALID, "line %d: %s", why.line, why.text);
    enum td_status s = choose_profile(root, words, &chosen, e);
    if (!s)
        s = fit_profile(chosen, &p, e);
    if (!s)
        *out = p;
    json_decref(root);
    return s;
}

/* ------------------------------------------------------------------- names */

static bool by_name(const char *name, struct worker_profile *out)
{
    for (size_t i = 0; i < sizeof(NAMED) / sizeof(NAMED[0]); i++) {
        if (strcmp(NAMED[i].name, name))
            continue;
        *out = (struct worker_profile){.kv_bytes_per_token = NAMED[i].kv_bytes_per_token,
                                       .pool_bytes = NAMED[i].pool_bytes,
                                       .idle_w = NAMED[i].watts * IDLE_SHARE,
                                       .prefill_w = NAMED[i].watts,
                                       .decode_w = NAMED[i].watts * DECODE_SHARE,
                                       .price_per_hour = NAMED[i].price};
        return !cost_profile_parse(NAMED[i].cost, &out->cost, NULL);
    }
    return false;
}

static enum td_status from_file(const char *text, struct worker_profile *out, struct td_error *e)
{
    char *path = mem_strdup(text), *words = NULL, *data;
    size_t size;
    struct td_error why = {{0}};
    enum td_status s = file_read(path, MAX_FILE_BYTES, &data, &size, &why);
    if (s == TD_ERR_NOT_FOUND && (words = strrchr(path, ':'))) {
        *words++ = 0;
        s = file_read(path, MAX_FILE_BYTES, &data, &size, &why);
    }
    if (s) {
        s = td_fail(e, s, "'%s': %s; expected " PROFILE_NAMES ", A,B,C:A,B,C, or FILE[:WORD,...]", text, why.text);
    } else {
        s = profile_parse(data, size, words, out, &why);
        if (s)
            td_fail(e, s, "%s: %s", path, why.text);
        free(data);
    }
    free(path);
    return s;
}

enum td_status profile_read(const char *text, struct worker_profile *out, struct td_error *e)
{
    struct worker_profile p = {.fit_error = 0};
    if (by_name(text, out))
        return TD_OK;
    if (strspn(text, "0123456789.,:eE+-") == strlen(text)) {
        enum td_status s = cost_profile_parse(text, &p.cost, e);
        if (!s)
            *out = p;
        return s;
    }
    return from_file(text, out, e);
}
