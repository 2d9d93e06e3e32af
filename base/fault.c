#include "base/fault.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"

enum { RULES_MAX = 64, WORD_MAX = 128, FILE_BYTES_MAX = 16384 };
static const char BLANKS[] = " \t\n";

static const char *const SITES[FAULT_SITES] = {"wire.connect", "wire.message", "wire.payload", "disk.put",
                                               "disk.read",    "rpc.message",  "step",         "leg",
                                               "disk.delete",  "disk.flush",   "lease",        "wire.arrival"};
static const char *const KINDS[FAULT_KINDS] = {"none",    "delay",   "drop",  "truncate", "duplicate",
                                               "reorder", "corrupt", "fail",  "lie",      "stall",
                                               "full",    "reuse",   "stale", "expire",   "early"};

#define K(kind) (1u << FAULT_##kind)
static const uint32_t ALLOWED[FAULT_SITES] = {
    [FAULT_WIRE_CONNECT] = K(DELAY) | K(FAIL),
    [FAULT_WIRE_MESSAGE] = K(DELAY) | K(DROP) | K(TRUNCATE) | K(DUPLICATE) | K(REORDER) | K(CORRUPT) | K(FAIL),
    [FAULT_WIRE_PAYLOAD] = K(DELAY) | K(TRUNCATE) | K(DUPLICATE) | K(REORDER) | K(CORRUPT) | K(FAIL) | K(LIE),
    [FAULT_DISK_PUT] = K(DELAY) | K(TRUNCATE) | K(DUPLICATE) | K(CORRUPT) | K(FAIL) | K(FULL) | K(LIE),
    [FAULT_DISK_READ] = K(DELAY) | K(TRUNCATE) | K(CORRUPT) | K(FAIL) | K(LIE),
    [FAULT_RPC_MESSAGE] = K(DROP) | K(DUPLICATE) | K(REORDER) | K(FAIL),
    [FAULT_STEP] = K(DELAY) | K(STALL),
    [FAULT_LEG] = K(DROP),
    [FAULT_DISK_DELETE] = K(DELAY) | K(FAIL) | K(FULL),
    [FAULT_DISK_FLUSH] = K(DELAY) | K(FAIL) | K(FULL),
    [FAULT_LEASE] = K(REUSE) | K(STALE) | K(EXPIRE),
    [FAULT_WIRE_ARRIVAL] = K(EARLY),
};

static const struct metric_info INFO = {METRIC_COUNTER, "tandem_faults_total", "faults made on purpose (--faults)"};

struct rule {
    enum fault_site site;
    enum fault_kind kind;
    double share;
    uint64_t delay_ns, first, last;
};

struct rules { /* a parsed script; never changes */
    struct rules *older;
    uint64_t seed;
    uint32_t n;
    struct rule list[RULES_MAX];
};

struct faults {
    const struct log *log;
    char *path; /* of "@FILE"; NULL: the script does not change */
    /* The present rules. Older ones are kept until faults_close, because a draw may still read them. */
    _Atomic(struct rules *) rules;
    /* Reading and replacing are one step, so that the script read last stays in force; a queue would need
     * a thread. */
    pthread_mutex_t reload_lock;
    _Atomic uint64_t n_reloads;
    _Atomic uint64_t n_operations[FAULT_SITES], counts[FAULT_SITES][FAULT_KINDS];
    struct metrics_set *exported[FAULT_SITES][FAULT_KINDS]; /* only for the counts that may occur */
};

/* ------------------------------------------------------------------ parsing */

/* Index of the longest of `names` with which text begins, and the rest of text behind it; -1: none. */
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
        if (*at == '-' && (at++, !number_at(&at, &r->last) || r->last < r->first))
            return false;
    }
    return !*at;
}

static bool parse_word(struct rules *r, const char *word)
{
    const char *at = word + 5;
    if (!strncmp(word, "seed=", 5))
        return number_at(&at, &r->seed) && !*at;
    return r->n < RULES_MAX && parse_rule(word, &r->list[r->n]) && ++r->n;
}

static enum td_status parse_script(const char *script, struct rules *r, struct td_error *e)
{
    for (const char *at = script + strspn(script, BLANKS); *at; at += strspn(at, BLANKS)) {
        char word[WORD_MAX];
        size_t len = strcspn(at, BLANKS);
        snprintf(word, sizeof(word), "%.*s", (int)len, at);
        if (len >= sizeof(word) || !parse_word(r, word))
            return td_fail(e, TD_ERR_INVALID,
                           "faults: '%s': expected seed=N or SITE:KIND[=SHARE][/DURATION][@FIRST[-LAST]], as in "
                           "wire.payload:corrupt=0.01",
                           word);
        at += len;
    }
    return TD_OK;
}

/* ----------------------------------------------------------------- scripts */

static enum td_status set_script(struct faults *f, const char *script, struct td_error *e)
{
    struct rules *r = mem_zalloc(sizeof(*r));
    enum td_status s = parse_script(script, r, e);
    if (s) {
        free(r);
        return s;
    }
    r->older = atomic_load(&f->rules);
    atomic_store(&f->rules, r);
    if (r->n)
        log_warn(f->log, "faults are made on purpose script='%s'", script);
    else
        log_info(f->log, "no faults are made on purpose");
    return TD_OK;
}

static enum td_status set_script_of_file(struct faults *f, struct td_error *e)
{
    char *script = NULL;
    size_t len;
    enum td_status s = file_read(f->path, FILE_BYTES_MAX, &script, &len, e);
    if (s && s != TD_ERR_NOT_FOUND)
        return s;
    s = set_script(f, s ? "" : script, e);
    free(script);
    return s;
}

enum td_status faults_open(const char *script, const struct log *log, struct faults **out, struct td_error *error_out)
{
    *out = NULL;
    if (!script || !script[strspn(script, BLANKS)])
        return TD_OK;
    struct faults *f = mem_zalloc(sizeof(*f));
    f->log = log;
    pthread_mutex_init(&f->reload_lock, NULL);
    if (*script == '@')
        f->path = mem_strdup(script + 1);
    enum td_status s = f->path ? set_script_of_file(f, error_out) : set_script(f, script, error_out);
    if (s) {
        faults_close(f);
        return s;
    }
    *out = f;
    return TD_OK;
}

void faults_reload(struct faults *f)
{
    struct td_error e;
    if (!f || !f->path)
        return;
    pthread_mutex_lock(&f->reload_lock);
    if (set_script_of_file(f, &e))
        log_warn(f->log, "faults stay as they were file=%s: %s", f->path, e.text);
    else
        atomic_fetch_add(&f->n_reloads, 1);
    pthread_mutex_unlock(&f->reload_lock);
}

void faults_close(struct faults *f)
{
    if (!f)
        return;
    for (struct rules *r = atomic_load(&f->rules), *older; r; r = older) {
        older = r->older;
        free(r);
    }
    pthread_mutex_destroy(&f->reload_lock);
    free(f->path);
    free(f);
}

/* ------------------------------------------------------------------ drawing */

static struct fault strike(struct faults *f, uint64_t seed, const struct rule *r, uint64_t n)
{
    atomic_fetch_add(&f->counts[r->site][r->kind], 1);
    metrics_inc(f->exported[r->site][r->kind], 0, 1);
    log_debug(f->log, "fault on purpose site=%s kind=%s n=%llu", SITES[r->site], KINDS[r->kind], (unsigned long long)n);
    return (struct fault){r->kind, r->delay_ns, random_at(~seed, r->site, n)};
}

struct fault faults_draw(struct faults *f, enum fault_site site)
{
    if (!f)
        return (struct fault){0};
    uint64_t n = atomic_fetch_add(&f->n_operations[site], 1) + 1;
    const struct rules *rules = atomic_load(&f->rules);
    for (uint32_t i = 0; i < rules->n; i++) {
        const struct rule *r = &rules->list[i];
        if (r->site == site && n >= r->first && n <= r->last &&
            random_unit(random_at(rules->seed, (uint64_t)site << 32 | i, n)) < r->share)
            return strike(f, rules->seed, r, n);
    }
    return (struct fault){0};
}

uint64_t faults_reloads(const struct faults *f)
{
    return f ? atomic_load(&f->n_reloads) : 0;
}

uint64_t faults_count(const struct faults *f, enum fault_site site, enum fault_kind kind)
{
    return f ? atomic_load(&f->counts[site][kind]) : 0;
}

static bool may_occur(const struct faults *f, enum fault_site site, enum fault_kind kind)
{
    if (f->path)
        return ALLOWED[site] >> kind & 1;
    const struct rules *r = atomic_load(&f->rules);
    uint32_t i = 0;
    while (i < r->n && (r->list[i].site != site || r->list[i].kind != kind))
        i++;
    return i < r->n;
}

void faults_export(struct faults *f, struct metrics *m)
{
    for (enum fault_site site = 0; f && site < FAULT_SITES; site++)
        for (enum fault_kind kind = 0; kind < FAULT_KINDS; kind++) {
            char labels[64];
            snprintf(labels, sizeof(labels), "site=\"%s\",kind=\"%s\"", SITES[site], KINDS[kind]);
            if (may_occur(f, site, kind))
                f->exported[site][kind] = metrics_add(m, &INFO, 1, labels);
        }
}
