#include "base/fault.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"

enum { RULES_MAX = 64, WORD_MAX = 128 };

static const char *const SITES[FAULT_SITES] = {"wire.connect", "wire.message", "wire.payload",
                                               "disk.put",     "disk.read",    "rpc.message"};
static const char *const KINDS[FAULT_KINDS] = {"none",    "delay",   "drop", "truncate", "duplicate",
                                               "reorder", "corrupt", "fail", "lie"};

#define K(kind) (1u << FAULT_##kind)
static const uint32_t ALLOWED[FAULT_SITES] = {
    [FAULT_WIRE_CONNECT] = K(DELAY) | K(FAIL),
    [FAULT_WIRE_MESSAGE] = K(DELAY) | K(DROP) | K(TRUNCATE) | K(DUPLICATE) | K(REORDER) | K(CORRUPT) | K(FAIL),
    [FAULT_WIRE_PAYLOAD] = K(DELAY) | K(TRUNCATE) | K(DUPLICATE) | K(REORDER) | K(CORRUPT) | K(FAIL) | K(LIE),
    [FAULT_DISK_PUT] = K(DELAY) | K(TRUNCATE) | K(DUPLICATE) | K(CORRUPT) | K(FAIL) | K(LIE),
    [FAULT_DISK_READ] = K(DELAY) | K(TRUNCATE) | K(CORRUPT) | K(FAIL) | K(LIE),
    [FAULT_RPC_MESSAGE] = K(DROP) | K(DUPLICATE) | K(REORDER) | K(FAIL),
};

static const struct metric_info INFO = {METRIC_COUNTER, "tandem_faults_total", "faults made on purpose (--faults)"};

struct rule {
    enum fault_site site;
    enum fault_kind kind;
    double share;
    uint64_t delay_ns, first, last;
};

struct faults {
    const struct log *log;
    uint64_t seed;
    struct rule rules[RULES_MAX];
    uint32_t n_rules;
    _Atomic uint64_t n_operations[FAULT_SITES], counts[FAULT_SITES][FAULT_KINDS];
    struct metrics_set *exported[FAULT_SITES][FAULT_KINDS]; /* of those that a rule can cause */
};

/* ------------------------------------------------------------------ parsing */

/* The longest of names that text begins with, and what follows it; -1: none. */
static int name_at(const char *text, const char *const *names, int n, const char **rest_out)
{
    for (int i = 0; i < n; i++) {
        size_t len = strlen(names[i]);
        if (!strncmp(text, names[i], len)) {
            *rest_out = text + len;
            return i;
        }
    }
    return -1;
}

static bool number_at(const char **text, uint64_t *out)
{
    char *end;
    if (**text < '0' || **text > '9')
        return false;
    *out = strtoull(*text, &end, 10);
    *text = end;
    return true;
}

static bool duration_at(const char **text, uint64_t *ns_out)
{
    static const char *const UNITS[] = {"us", "ms", "s"};
    static const uint64_t NS[] = {1000, NS_PER_MS, NS_PER_S};
    uint64_t n;
    if (!number_at(text, &n) || n > 3600000000ull)
        return false;
    int unit = name_at(*text, UNITS, 3, text);
    if (unit < 0)
        return false;
    *ns_out = n * NS[unit];
    return true;
}

static bool share_at(const char **text, double *out)
{
    char *end;
    *out = strtod(*text, &end);
    bool ok = end != *text && *out >= 0 && *out <= 1;
    *text = end;
    return ok;
}

static bool parse_rule(const char *at, struct rule *r)
{
    *r = (struct rule){.share = 1, .delay_ns = 10 * NS_PER_MS, .first = 1, .last = UINT64_MAX};
    int site = name_at(at, SITES, FAULT_SITES, &at);
    if (site < 0 || *at++ != ':')
        return false;
    int kind = name_at(at, KINDS, FAULT_KINDS, &at);
    if (kind < 0 || !(ALLOWED[site] >> kind & 1))
        return false;
    r->site = (enum fault_site)site;
    r->kind = (enum fault_kind)kind;
    if (*at == '=' && (at++, !share_at(&at, &r->share)))
        return false;
    if (*at == '/' && (at++, !duration_at(&at, &r->delay_ns)))
        return false;
    if (*at == '@') {
        at++;
        if (!number_at(&at, &r->first) || !r->first)
            return false;
        r->last = r->first;
        if (*at == '-' && (at++, !number_at(&at, &r->last)))
            return false;
    }
    return !*at;
}

static bool parse_word(struct faults *f, const char *word)
{
    const char *at = word + 5;
    if (!strncmp(word, "seed=", 5))
        return number_at(&at, &f->seed) && !*at;
    return f->n_rules < RULES_MAX && parse_rule(word, &f->rules[f->n_rules]) && ++f->n_rules;
}

enum td_status faults_open(const char *script, const struct log *log, struct faults **out, struct td_error *error_out)
{
    *out = NULL;
    if (!script || !script[strspn(script, " \t\n")])
        return TD_OK;
    struct faults *f = mem_zalloc(sizeof(*f));
    f->log = log;
    for (const char *at = script + strspn(script, " \t\n"); *at; at += strspn(at, " \t\n")) {
        char word[WORD_MAX];
        size_t len = strcspn(at, " \t\n");
        snprintf(word, sizeof(word), "%.*s", (int)len, at);
        if (len >= sizeof(word) || !parse_word(f, word)) {
            free(f);
            return td_fail(error_out, TD_ERR_INVALID,
                           "faults: '%s': expected seed=N or SITE:KIND[=SHARE][/DURATION][@FIRST[-LAST]], as in "
                           "wire.payload:corrupt=0.01",
                           word);
        }
        at += len;
    }
    log_warn(log, "faults are made on purpose script='%s'", script);
    *out = f;
    return TD_OK;
}

void faults_close(struct faults *f)
{
    free(f);
}

/* ------------------------------------------------------------------ drawing */

static struct fault strike(struct faults *f, const struct rule *r, uint64_t n)
{
    atomic_fetch_add(&f->counts[r->site][r->kind], 1);
    metrics_inc(f->exported[r->site][r->kind], 0, 1);
    log_debug(f->log, "fault on purpose site=%s kind=%s n=%llu", SITES[r->site], KINDS[r->kind], (unsigned long long)n);
    return (struct fault){r->kind, r->delay_ns, random_at(~f->seed, r->site, n)};
}

struct fault faults_draw(struct faults *f, enum fault_site site)
{
    if (!f)
        return (struct fault){0};
    uint64_t n = atomic_fetch_add(&f->n_operations[site], 1) + 1;
    for (uint32_t i = 0; i < f->n_rules; i++) {
        const struct rule *r = &f->rules[i];
        if (r->site == site && n >= r->first && n <= r->last &&
            random_unit(random_at(f->seed, (uint64_t)site << 32 | i, n)) < r->share)
            return strike(f, r, n);
    }
    return (struct fault){0};
}

uint64_t faults_count(const struct faults *f, enum fault_site site, enum fault_kind kind)
{
    return f ? atomic_load(&f->counts[site][kind]) : 0;
}

void faults_export(struct faults *f, struct metrics *m)
{
    if (!f)
        return;
    for (uint32_t i = 0; i < f->n_rules; i++) {
        const struct rule *r = &f->rules[i];
        char labels[64];
        snprintf(labels, sizeof(labels), "site=\"%s\",kind=\"%s\"", SITES[r->site], KINDS[r->kind]);
        if (!f->exported[r->site][r->kind])
            f->exported[r->site][r->kind] = metrics_add(m, &INFO, 1, labels);
    }
}
