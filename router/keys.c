#include "router/keys.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "sched/fair.h"
#include "sched/ring.h"

enum { ID_BYTES = 8, SALT_BYTES = 16, HASH_BYTES = 32, SECRET_BYTES = 32, FILE_MOST = 16 << 20, NAMES_MOST = 64 };
#define LOOK_EVERY_NS (NS_PER_S / 2) /* how often the file is looked at */
#define RATE_MOST     1e12

enum bucket { REQUESTS, PROMPT, OUTPUT, TEXTS, BUCKETS };
static const char *const RATES[BUCKETS] = {"requests_per_minute", "prompt_tokens_per_minute",
                                           "output_tokens_per_minute", "texts_per_minute"};

struct key_names { /* is_given false: every name is allowed */
    bool is_given;
    uint32_t n;
    char *list[NAMES_MOST];
};

struct key_limits { /* what the file says */
    uint8_t salt[SALT_BYTES], hash[HASH_BYTES];
    struct key_terms terms;
    double per_minute[BUCKETS]; /* INFINITY: no limit */
    uint32_t concurrency;       /* UINT32_MAX: no limit */
    struct key_names models, loras;
};

struct api_key {
    char id[2 * ID_BYTES + 1];
    bool is_known; /* the file has it now */
    struct key_limits limits;
    double left[BUCKETS];
    uint64_t filled_ns; /* when `left` was right; 0: never, the buckets are full */
    uint32_t n_open;
    struct key_tenant *tenant; /* in api_keys.tenants */
};

struct key_tenant {
    uint32_t n_open; /* of all its keys */
};

struct api_keys {
    char *path;
    const struct log *log;
    struct clock clock;
    /* A lock, not a queue: rpc, text and owner threads ask, and want the answer at once. */
    pthread_mutex_t lock;
    struct api_key **all; /* sorted by id */
    uint32_t n;
    struct key_tenant *tenants;
    uint32_t n_routers, tenant_open_most;
    struct stat seen; /* of the file as it was read, or complained about */
    uint64_t looked_ns;
};

/* -------------------------------------------------------------------- reading */

static bool from_hex(const char *text, uint8_t *out, size_t n)
{
    static const char DIGITS[] = "0123456789abcdef";
    if (!text || strlen(text) != 2 * n)
        return false;
    for (size_t i = 0; i < 2 * n; i++) {
        const char *at = strchr(DIGITS, text[i]);
        if (!at)
            return false;
        out[i / 2] = (uint8_t)(out[i / 2] << 4 | (uint8_t)(at - DIGITS));
    }
    return true;
}

static void to_hex(const uint8_t *bytes, size_t n, char *out)
{
    for (size_t i = 0; i < n; i++)
        sprintf(out + 2 * i, "%02x", bytes[i]);
}

static void names_free(struct key_names *n)
{
    for (uint32_t i = 0; i < n->n; i++)
        free(n->list[i]);
    *n = (struct key_names){0};
}

static void limits_free(struct key_limits *l)
{
    names_free(&l->models);
    names_free(&l->loras);
}

static bool read_names(const json_t *list, struct key_names *out)
{
    const json_t *name;
    size_t i;
    *out = (struct key_names){.is_given = true};
    if (!json_is_array(list) || json_array_size(list) > NAMES_MOST)
        return false;
    json_array_foreach((json_t *)(uintptr_t)list, i, name)
    {
        if (!json_is_string(name))
            return false;
        out->list[out->n++] = mem_strdup(json_string_value(name));
    }
    return true;
}

static bool read_number(const json_t *v, double least, double most, double *out)
{
    *out = json_number_value(v);
    return json_is_number(v) && *out >= least && *out <= most;
}

static bool read_tenant(const json_t *v, char out[KEYS_TENANT_BYTES])
{
    size_t n = json_string_length(v);
    if (!json_is_string(v) || !n || n >= KEYS_TENANT_BYTES || strlen(json_string_value(v)) != n)
        return false;
    memcpy(out, json_string_value(v), n + 1);
    return true;
}

/* One member. False: it is wrong. *is_known_out: false: there is no such member. */
static bool read_member(const char *name, const json_t *v, struct key_limits *l, char id[2 * ID_BYTES + 1],
                        bool *is_known_out)
{
    uint8_t bytes[ID_BYTES];
    double number = 0;
    *is_known_out = true;
    for (int b = 0; b < BUCKETS; b++)
        if (!strcmp(name, RATES[b]))
            return read_number(v, 1e-3, RATE_MOST, &l->per_minute[b]);
    if (!strcmp(name, "id")) {
        snprintf(id, 2 * ID_BYTES + 1, "%s", json_is_string(v) ? json_string_value(v) : "");
        return from_hex(json_string_value(v), bytes, ID_BYTES);
    }
    if (!strcmp(name, "salt"))
        return from_hex(json_string_value(v), l->salt, SALT_BYTES);
    if (!strcmp(name, "hash"))
        return from_hex(json_string_value(v), l->hash, HASH_BYTES);
    if (!strcmp(name, "tenant")) {
        bool is_good = read_tenant(v, l->terms.tenant);
        l->terms.tenant_id = ring_id(l->terms.tenant, strlen(l->terms.tenant));
        return is_good;
    }
    if (!strcmp(name, "weight"))
        return read_number(v, FAIR_LEAST_WEIGHT, FAIR_MOST_WEIGHT, &l->terms.weight);
    if (!strcmp(name, "models"))
        return read_names(v, &l->models);
    if (!strcmp(name, "loras"))
        return read_names(v, &l->loras);
    bool is_pins = !strcmp(name, "pin_blocks");
    if (is_pins || !strcmp(name, "concurrency")) {
        if (!json_is_integer(v) || !read_number(v, is_pins ? 0 : 1, UINT32_MAX - 1, &number))
            return false;
        *(is_pins ? &l->terms.pin_blocks : &l->concurrency) = (uint32_t)number;
        return true;
    }
    *is_known_out = false;
    return false;
}

static enum td_status read_key(const char *path, size_t at, const json_t *object, struct key_limits *l,
                               char id[2 * ID_BYTES + 1], struct td_error *e)
{
    static const char *const NEEDED[] = {"id", "salt", "hash", "tenant"};
    const char *name;
    json_t *v;
    bool is_known;
    *l = (struct key_limits){.terms = {.weight = 1, .pin_blocks = UINT32_MAX}, .concurrency = UINT32_MAX};
    for (int b = 0; b < BUCKETS; b++)
        l->per_minute[b] = INFINITY;
    if (!json_is_object(object))
        return td_fail(e, TD_ERR_INVALID, "%s: keys[%zu]: is no object", path, at);
    for (size_t i = 0; i < sizeof(NEEDED) / sizeof(NEEDED[0]); i++)
        if (!json_object_get(object, NEEDED[i]))
            return td_fail(e, TD_ERR_INVALID, "%s: keys[%zu].%s: is missing", path, at, NEEDED[i]);
    json_object_foreach((json_t *)(uintptr_t)object, name, v) if (!read_member(name, v, l, id, &is_known))
    {
        limits_free(l);
        return td_fail(e, TD_ERR_INVALID, "%s: keys[%zu].%.40s: %s", path, at, name,
                       is_known ? "is wrong" : "is no member of a key");
    }
    return TD_OK;
}

static int by_id(const void *a, const void *b)
{
    return strcmp((*(struct api_key *const *)a)->id, (*(struct api_key *const *)b)->id);
}

static void key_free(struct api_key *key)
{
    limits_free(&key->limits);
    free(key);
}

static void all_free(struct api_key **all, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        key_free(all[i]);
    free(all);
}

static enum td_status read_list(const char *path, const json_t *root, struct api_key ***out, uint32_t *n_out,
                                struct td_error *e)
{
    const json_t *list = json_object_get(root, "keys");
    struct api_key **all = NULL;
    uint32_t n = 0;
    enum td_status s = TD_OK;
    if (!json_is_array(list) || json_object_size(root) != 1)
        return td_fail(e, TD_ERR_INVALID, "%s: is not {\"keys\": [...]}", path);
    if (json_array_size(list) > KEYS_MOST)
        return td_fail(e, TD_ERR_INVALID, "%s: over %d keys", path, KEYS_MOST);
    all = mem_array(json_array_size(list), sizeof(*all));
    for (size_t i = 0; i < json_array_size(list) && !s; i++) {
        all[n] = mem_zalloc(sizeof(**all));
        all[n]->is_known = true;
        s = read_key(path, i, json_array_get(list, i), &all[n]->limits, all[n]->id, e);
        if (s)
            free(all[n]);
        else
            n++;
    }
    qsort(all, n, sizeof(*all), by_id);
    for (uint32_t i = 1; i < n && !s; i++)
        if (!strcmp(all[i - 1]->id, all[i]->id))
            s = td_fail(e, TD_ERR_INVALID, "%s: id %s comes twice", path, all[i]->id);
    if (s) {
        all_free(all, n);
        return s;
    }
    *out = all;
    *n_out = n;
    return TD_OK;
}

static enum td_status read_json(const char *path, json_t **out, struct td_error *e)
{
    char *text = NULL;
    size_t len = 0;
    json_error_t why;
    enum td_status s = file_read(path, FILE_MOST, &text, &len, e);
    if (s)
        return s;
    *out = json_loadb(text, len, JSON_REJECT_DUPLICATES, &why);
    free(text);
    return *out ? TD_OK : td_fail(e, TD_ERR_INVALID, "%s: line %d: %s", path, why.line, why.text);
}

static enum td_status read_file(const char *path, struct api_key ***out, uint32_t *n_out, struct td_error *e)
{
    json_t *root = NULL;
    enum td_status s = read_json(path, &root, e);
    if (!s)
        s = read_list(path, root, out, n_out, e);
    json_decref(root);
    return s;
}

/* ------------------------------------------------------------------- refresh */

static struct api_key *find_id(const struct api_keys *k, const char *id)
{
    uint32_t low = 0, high = k->n;
    while (low < high) {
        uint32_t mid = (low + high) / 2;
        int order = strcmp(id, k->all[mid]->id);
        if (!order)
            return k->all[mid];
        if (order < 0)
            high = mid;
        else
            low = mid + 1;
    }
    return NULL;
}

static int by_tenant(const void *a, const void *b)
{
    return strcmp((*(struct api_key *const *)a)->limits.terms.tenant,
                  (*(struct api_key *const *)b)->limits.terms.tenant);
}

/* Finds which keys have one tenant, anew. */
static void group_by_tenant(struct api_keys *k)
{
    struct api_key **sorted = mem_array(k->n, sizeof(*sorted));
    struct key_tenant *t = mem_array(k->n, sizeof(*t));
    free(k->tenants);
    k->tenants = t;
    if (k->n)
        memcpy(sorted, k->all, k->n * sizeof(*sorted));
    qsort(sorted, k->n, sizeof(*sorted), by_tenant);
    for (uint32_t i = 0; i < k->n; i++) {
        t += i && by_tenant(&sorted[i - 1], &sorted[i]);
        sorted[i]->tenant = t;
        t->n_open += sorted[i]->n_open;
    }
    free(sorted);
}

/* Takes over what was read. A key that was there before keeps its buckets and its place in memory, because
 * requests point to it. */
static void take_over(struct api_keys *k, struct api_key **fresh, uint32_t n_fresh)
{
    uint32_t n_before = k->n, n_new = 0;
    for (uint32_t i = 0; i < n_before; i++)
        k->all[i]->is_known = false;
    for (uint32_t i = 0; i < n_fresh; i++) {
        struct api_key *old = find_id(k, fresh[i]->id);
        if (!old) {
            fresh[n_new++] = fresh[i];
            continue;
        }
        limits_free(&old->limits);
        old->limits = fresh[i]->limits;
        old->is_known = true;
        free(fresh[i]);
    }
    k->all = mem_resize(k->all, n_before + n_new, sizeof(*k->all));
    memcpy(k->all + n_before, fresh, n_new * sizeof(*fresh));
    k->n = n_before + n_new;
    qsort(k->all, k->n, sizeof(*k->all), by_id);
    group_by_tenant(k);
    free(fresh);
}

static bool is_same(const struct stat *a, const struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_size == b->st_size && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
           a->st_mtim.tv_nsec == b->st_mtim.tv_nsec && a->st_mode == b->st_mode;
}

/* Call under the lock. */
static void refresh(struct api_keys *k)
{
    uint64_t now = clock_now(&k->clock);
    struct stat st = {0};
    struct api_key **fresh;
    struct td_error e;
    uint32_t n;
    if (now - k->looked_ns < LOOK_EVERY_NS)
        return;
    k->looked_ns = now;
    bool is_there = !stat(k->path, &st);
    if (is_same(&st, &k->seen))
        return;
    k->seen = st;
    if (!is_there)
        log_error(k->log, "the API keys stay as they were: %s: %s", k->path, strerror(errno));
    else if (read_file(k->path, &fresh, &n, &e))
        log_error(k->log, "the API keys stay as they were: %s", e.text);
    else {
        take_over(k, fresh, n);
        log_info(k->log, "API keys read again file=%s keys=%u", k->path, n);
    }
}

enum td_status keys_open(const char *path, const struct log *log, struct api_keys **out, struct td_error *error_out)
{
    struct api_keys *k = mem_zalloc(sizeof(*k));
    struct td_error why;
    struct api_key **fresh;
    uint32_t n;
    k->path = mem_strdup(path);
    k->log = log;
    k->n_routers = 1;
    k->tenant_open_most = UINT32_MAX;
    clock_init_real(&k->clock);
    pthread_mutex_init(&k->lock, NULL);
    k->looked_ns = clock_now(&k->clock);
    stat(path, &k->seen);
    if (read_file(path, &fresh, &n, &why)) {
        keys_close(k);
        return td_fail(error_out, TD_ERR_INVALID, "--api-keys %s", why.text);
    }
    take_over(k, fresh, n);
    *out = k;
    return TD_OK;
}

void keys_close(struct api_keys *k)
{
    if (!k)
        return;
    all_free(k->all, k->n);
    free(k->tenants);
    pthread_mutex_destroy(&k->lock);
    free(k->path);
    free(k);
}

/* -------------------------------------------------------------------- asking */

static void hash_of(const uint8_t salt[SALT_BYTES], const char *text, uint8_t out[HASH_BYTES])
{
    EVP_MD_CTX *c = EVP_MD_CTX_new();
    if (!c || !EVP_DigestInit_ex(c, EVP_sha256(), NULL) || !EVP_DigestUpdate(c, salt, SALT_BYTES) ||
        !EVP_DigestUpdate(c, text, strlen(text)) || !EVP_DigestFinal_ex(c, out, NULL))
        abort(); /* the crypto library has no SHA-256: nobody could be let in */
    EVP_MD_CTX_free(c);
}

struct api_key *keys_find(struct api_keys *k, const char *authorization)
{
    static const char BEARER[] = "Bearer td-";
    char id[2 * ID_BYTES + 1];
    uint8_t hash[HASH_BYTES];
    if (!authorization || strncmp(authorization, BEARER, sizeof(BEARER) - 1) ||
        strlen(authorization) > sizeof(BEARER) + KEYS_TEXT_BYTES)
        return NULL;
    const char *text = authorization + sizeof("Bearer ") - 1, *dash = strchr(text + 3, '-');
    if (!dash || dash - (text + 3) != 2 * ID_BYTES)
        return NULL;
    snprintf(id, sizeof(id), "%s", text + 3);
    pthread_mutex_lock(&k->lock);
    refresh(k);
    struct api_key *key = find_id(k, id);
    if (key)
        hash_of(key->limits.salt, text, hash);
    if (!key || !key->is_known || CRYPTO_memcmp(hash, key->limits.hash, HASH_BYTES))
        key = NULL;
    pthread_mutex_unlock(&k->lock);
    return key;
}

void keys_terms(struct api_keys *k, const struct api_key *key, struct key_terms *out)
{
    pthread_mutex_lock(&k->lock);
    *out = key->limits.terms;
    pthread_mutex_unlock(&k->lock);
}

static bool has_name(const struct key_names *names, const char *name)
{
    bool found = !names->is_given;
    for (uint32_t i = 0; i < names->n; i++)
        found |= !strcmp(names->list[i], name);
    return found;
}

enum td_status keys_allow(struct api_keys *k, const struct api_key *key, const char *model, const char *lora,
                          struct td_error *error_out)
{
    pthread_mutex_lock(&k->lock);
    bool has_model = has_name(&key->limits.models, model), has_lora = !lora || has_name(&key->limits.loras, lora);
    pthread_mutex_unlock(&k->lock);
    if (!has_model)
        return td_fail(error_out, TD_ERR_FORBIDDEN, "model: the key is not for %s", model);
    if (!has_lora)
        return td_fail(error_out, TD_ERR_FORBIDDEN, "lora: the key is not for '%s'", lora);
    return TD_OK;
}

/* --------------------------------------------------------------------- rates */

void keys_share(struct api_keys *k, uint32_t n_routers, uint32_t tenant_open_most)
{
    pthread_mutex_lock(&k->lock);
    k->n_routers = n_routers;
    k->tenant_open_most = tenant_open_most;
    pthread_mutex_unlock(&k->lock);
}

/* Fills the buckets for the time that has passed. */
static void fill(struct api_key *key, uint32_t n_routers, uint64_t now_ns)
{
    double minutes = key->filled_ns && now_ns > key->filled_ns ? (double)(now_ns - key->filled_ns) / 60e9 : 0;
    for (int b = 0; b < BUCKETS; b++) {
        double most = key->limits.per_minute[b] / n_routers;
        if (isinf(most))
            key->left[b] = 0; /* never asked for */
        else
            key->left[b] = key->filled_ns ? fmin(key->left[b] + most * minutes, most) : most;
    }
    key->filled_ns = now_ns ? now_ns : 1;
}

/* Milliseconds until the bucket holds one, or is above zero; 0: it does now. */
static double wait_ms(const struct api_key *key, enum bucket b, bool takes_one, uint32_t n_routers)
{
    double per_ms = key->limits.per_minute[b] / n_routers / 60e3;
    double need = takes_one ? fmin(1, key->limits.per_minute[b] / n_routers) : 0;
    if (isinf(per_ms) || key->left[b] > need || (need > 0 && key->left[b] >= need))
        return 0;
    return fmax((need - key->left[b]) / per_ms, 1);
}

static void take_out(struct api_key *key, enum bucket b, double amount)
{
    key->left[b] -= isinf(key->limits.per_minute[b]) ? 0 : amount;
}

static void put_back(struct api_key *key, enum bucket b, double amount)
{
    if (!isinf(key->limits.per_minute[b]))
        key->left[b] = fmin(key->left[b] + amount, key->limits.per_minute[b]);
}

static enum td_status used_up(enum bucket b, double wait, uint32_t *retry_after_ms_out, struct td_error *e)
{
    *retry_after_ms_out = (uint32_t)fmin(wait + 1, 60e3);
    return td_fail(e, TD_ERR_REFUSED, "the key's %s are used up", RATES[b]);
}

/* Call under the lock. */
static enum td_status check_open(const struct api_keys *k, const struct api_key *key, uint32_t n_choices,
                                 struct td_error *e)
{
    uint32_t n = key->n_open, most = key->limits.concurrency;
    if (n >= most || n_choices > most - n)
        return td_fail(e, TD_ERR_REFUSED, "%u requests of the key are open, of %u", n, most);
    n = key->tenant->n_open, most = k->tenant_open_most;
    if (n >= most || n_choices > most - n)
        return td_fail(e, TD_ERR_REFUSED, "%u requests of the tenant are open, of %u", n, most);
    return TD_OK;
}

enum td_status keys_take(struct api_keys *k, struct api_key *key, uint32_t n_prompt_tokens, uint32_t n_choices,
                         uint64_t now_ns, uint32_t *retry_after_ms_out, struct td_error *error_out)
{
    static const enum bucket ASKED[] = {REQUESTS, PROMPT, OUTPUT};
    double longest_ms = 0;
    enum bucket late = REQUESTS;
    pthread_mutex_lock(&k->lock);
    fill(key, k->n_routers, now_ns);
    for (int i = 0; i < 3; i++) {
        double wait = wait_ms(key, ASKED[i], ASKED[i] == REQUESTS, k->n_routers);
        late = wait > longest_ms ? ASKED[i] : late;
        longest_ms = fmax(wait, longest_ms);
    }
    enum td_status s = longest_ms > 0 ? used_up(late, longest_ms, retry_after_ms_out, error_out) : TD_OK;
    if (!s) {
        *retry_after_ms_out = 1000;
        s = check_open(k, key, n_choices, error_out);
    }
    if (!s) {
        take_out(key, REQUESTS, 1);
        take_out(key, PROMPT, n_prompt_tokens);
    }
    pthread_mutex_unlock(&k->lock);
    return s;
}

enum td_status keys_take_text(struct api_keys *k, struct api_key *key, uint64_t now_ns, uint32_t *retry_after_ms_out,
                              struct td_error *error_out)
{
    pthread_mutex_lock(&k->lock);
    fill(key, k->n_routers, now_ns);
    double wait = wait_ms(key, TEXTS, true, k->n_routers);
    if (wait <= 0)
        take_out(key, TEXTS, 1);
    pthread_mutex_unlock(&k->lock);
    return wait > 0 ? used_up(TEXTS, wait, retry_after_ms_out, error_out) : TD_OK;
}

void keys_charge_output(struct api_keys *k, struct api_key *key, uint32_t n_tokens)
{
    pthread_mutex_lock(&k->lock);
    if (!isinf(key->limits.per_minute[OUTPUT]))
        key->left[OUTPUT] -= n_tokens;
    pthread_mutex_unlock(&k->lock);
}

void keys_opened(struct api_keys *k, struct api_key *key, uint32_t n_choices)
{
    pthread_mutex_lock(&k->lock);
    key->n_open += n_choices;
    key->tenant->n_open += n_choices;
    pthread_mutex_unlock(&k->lock);
}

void keys_ended(struct api_keys *k, struct api_key *key, uint32_t n_choices, bool is_free, uint32_t n_prompt_tokens)
{
    pthread_mutex_lock(&k->lock);
    key->n_open -= n_choices;
    key->tenant->n_open -= n_choices;
    if (is_free) {
        put_back(key, REQUESTS, 1);
        put_back(key, PROMPT, n_prompt_tokens);
    }
    pthread_mutex_unlock(&k->lock);
}

/* ---------------------------------------------------------------- tandem key */

static json_t *make_entry(const char *tenant, char key_out[KEYS_TEXT_BYTES])
{
    uint8_t id[ID_BYTES], salt[SALT_BYTES], secret[SECRET_BYTES], hash[HASH_BYTES];
    char id_hex[2 * ID_BYTES + 1], salt_hex[2 * SALT_BYTES + 1], hash_hex[2 * HASH_BYTES + 1],
        secret_hex[2 * SECRET_BYTES + 1];
    if (RAND_bytes(id, sizeof(id)) != 1 || RAND_bytes(salt, sizeof(salt)) != 1 ||
        RAND_bytes(secret, sizeof(secret)) != 1)
        abort(); /* no random numbers: the key would be none */
    to_hex(id, sizeof(id), id_hex);
    to_hex(salt, sizeof(salt), salt_hex);
    to_hex(secret, sizeof(secret), secret_hex);
    snprintf(key_out, KEYS_TEXT_BYTES, "td-%s-%s", id_hex, secret_hex);
    hash_of(salt, key_out, hash);
    to_hex(hash, sizeof(hash), hash_hex);
    return json_pack("{s:s, s:s, s:s, s:s}", "id", id_hex, "tenant", tenant, "salt", salt_hex, "hash", hash_hex);
}

/* Replaces the file in one step. */
static enum td_status write_json(const char *path, const json_t *root, struct td_error *e)
{
    char fresh[4096];
    if (snprintf(fresh, sizeof(fresh), "%s.new", path) >= (int)sizeof(fresh))
        return td_fail(e, TD_ERR_INVALID, "%s: the path is too long", path);
    unlink(fresh); /* left by a command that was killed; nothing is followed from there */
    int fd = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool is_written = fd >= 0 && !json_dumpfd(root, fd, JSON_INDENT(2)) && write(fd, "\n", 1) == 1 && !fsync(fd);
    if (fd >= 0)
        close(fd);
    if (is_written && !rename(fresh, path))
        return TD_OK;
    enum td_status s = td_fail(e, TD_ERR_IO, "%s: %s", path, strerror(errno));
    unlink(fresh);
    return s;
}

static enum td_status add_to(const char *path, const char *tenant, char key_out[KEYS_TEXT_BYTES], struct td_error *e)
{
    json_t *root = NULL;
    struct api_key **all;
    uint32_t n;
    struct stat st;
    enum td_status s = TD_OK;
    if (stat(path, &st) && errno == ENOENT)
        root = json_pack("{s:[]}", "keys");
    else
        s = read_json(path, &root, e);
    if (!s)
        s = read_list(path, root, &all, &n, e); /* a broken file is not written over */
    if (!s) {
        all_free(all, n);
        json_t *entry = make_entry(tenant, key_out);
        if (!entry || json_array_append_new(json_object_get(root, "keys"), entry))
            s = td_fail(e, TD_ERR_INVALID, "the tenant's name is not UTF-8");
    }
    if (!s)
        s = write_json(path, root, e);
    json_decref(root);
    return s;
}

enum td_status keys_add(const char *path, const char *tenant, char key_out[KEYS_TEXT_BYTES], struct td_error *error_out)
{
    char lock_path[4096];
    if (!*tenant || strlen(tenant) >= KEYS_TENANT_BYTES)
        return td_fail(error_out, TD_ERR_INVALID, "the tenant's name has 1 to %d bytes", KEYS_TENANT_BYTES - 1);
    if (snprintf(lock_path, sizeof(lock_path), "%s.lock", path) >= (int)sizeof(lock_path))
        return td_fail(error_out, TD_ERR_INVALID, "%s: the path is too long", path);
    int fd = open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600); /* two commands at once lose no key */
    if (fd < 0 || flock(fd, LOCK_EX)) {
        enum td_status s = td_fail(error_out, TD_ERR_IO, "%s: %s", lock_path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return s;
    }
    enum td_status s = add_to(path, tenant, key_out, error_out);
    close(fd);
    return s;
}
