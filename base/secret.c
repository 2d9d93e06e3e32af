#include "base/secret.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/mem.h"

enum { FILE_BYTES = 1 << 16 };

struct secret {
    /* A lock, not a queue: proofs are made on whatever thread a connection begins. */
    pthread_mutex_t lock;
    char *file; /* NULL: the secret is from an option */
    const struct log *log;
    struct stat seen; /* of the file when it was read, or last complained about */
    char *all[SECRET_FILE_MOST];
    uint32_t n;
};

static void forget(char *all[SECRET_FILE_MOST], uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        OPENSSL_cleanse(all[i], strlen(all[i]));
        free(all[i]);
    }
}

/* Splits text, which it changes, into lines; empty lines and those with # at the front are left out. */
static enum td_status take_lines(const char *file, char *text, char *all[SECRET_FILE_MOST], uint32_t *n_out,
                                 struct td_error *e)
{
    uint32_t n = 0;
    for (char *end, *line = text; line; line = end) {
        end = strchr(line, '\n');
        if (end)
            *end++ = 0;
        line[strcspn(line, "\r")] = 0;
        if (!*line || *line == '#')
            continue;
        if (n == SECRET_FILE_MOST) {
            forget(all, n);
            return td_fail(e, TD_ERR_INVALID, "%s: over %d secrets", file, SECRET_FILE_MOST);
        }
        all[n++] = mem_strdup(line);
    }
    *n_out = n;
    return n ? TD_OK : td_fail(e, TD_ERR_INVALID, "%s: holds no secret; give one a line", file);
}

static enum td_status read_all(const char *file, char *all[SECRET_FILE_MOST], uint32_t *n_out, struct stat *seen_out,
                               struct td_error *e)
{
    char *text = NULL;
    size_t len = 0;
    if (stat(file, seen_out))
        return td_fail(e, TD_ERR_IO, "%s: %s", file, strerror(errno));
    if (seen_out->st_mode & 077)
        return td_fail(e, TD_ERR_INVALID, "%s: others may read it; chmod 600 helps", file);
    enum td_status s = file_read(file, FILE_BYTES, &text, &len, e);
    if (!s && memchr(text, 0, len))
        s = td_fail(e, TD_ERR_INVALID, "%s: is no text", file);
    if (!s)
        s = take_lines(file, text, all, n_out, e);
    if (text)
        OPENSSL_cleanse(text, len);
    free(text);
    return s;
}

static bool is_same(const struct stat *a, const struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_size == b->st_size && a->st_mode == b->st_mode &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec &&
           a->st_ctim.tv_sec == b->st_ctim.tv_sec && a->st_ctim.tv_nsec == b->st_ctim.tv_nsec;
}

/* Reads the file again if it has changed. Call under the lock. */
static void refresh(struct secret *s)
{
    char *all[SECRET_FILE_MOST];
    struct stat now = {0};
    struct td_error e;
    uint32_t n = 0;
    if (!s->file || (!stat(s->file, &now) && is_same(&now, &s->seen)))
        return;
    if (read_all(s->file, all, &n, &now, &e)) {
        if (!is_same(&now, &s->seen))
            log_error(s->log, "the secret stays as it was: %s", e.text);
    } else {
        forget(s->all, s->n);
        memcpy(s->all, all, sizeof(all));
        s->n = n;
        log_info(s->log, "secret read again file=%s accepted=%u", s->file, n);
    }
    s->seen = now;
}

enum td_status secret_open(const char *text, const char *file, const struct log *log, struct secret **out,
                           struct td_error *error_out)
{
    struct td_error why;
    *out = NULL;
    if (text && file)
        return td_fail(error_out, TD_ERR_INVALID, "--secret and --secret-file: give one of them");
    struct secret *s = mem_zalloc(sizeof(*s));
    pthread_mutex_init(&s->lock, NULL);
    s->log = log;
    if (file && read_all(file, s->all, &s->n, &s->seen, &why)) {
        secret_close(s);
        return td_fail(error_out, TD_ERR_INVALID, "--secret-file %s", why.text);
    }
    s->file = file ? mem_strdup(file) : NULL;
    if (text && *text)
        s->all[s->n++] = mem_strdup(text);
    *out = s;
    return TD_OK;
}

void secret_close(struct secret *s)
{
    if (!s)
        return;
    forget(s->all, s->n);
    pthread_mutex_destroy(&s->lock);
    free(s->file);
    free(s);
}

bool secret_is_set(const struct secret *s)
{
    return s && (s->file || s->n);
}

static void mac_by(const char *key, const void *data, size_t n_bytes, uint8_t out[SECRET_MAC_BYTES])
{
    unsigned n = 0;
    if (!HMAC(EVP_sha256(), key, (int)strlen(key), data, n_bytes, out, &n) || n != SECRET_MAC_BYTES)
        abort(); /* the crypto library has no HMAC-SHA-256: no peer could be let in */
}

void secret_sign(struct secret *s, const void *data, size_t n_bytes, uint8_t mac_out[SECRET_MAC_BYTES])
{
    if (!secret_is_set(s)) {
        mac_by("", data, n_bytes, mac_out);
        return;
    }
    pthread_mutex_lock(&s->lock);
    refresh(s);
    mac_by(s->all[0], data, n_bytes, mac_out);
    pthread_mutex_unlock(&s->lock);
}

bool secret_sign_by(struct secret *s, uint32_t i, const void *data, size_t n_bytes, uint8_t mac_out[SECRET_MAC_BYTES])
{
    pthread_mutex_lock(&s->lock);
    if (!i)
        refresh(s);
    bool is_there = i < s->n;
    if (is_there)
        mac_by(s->all[i], data, n_bytes, mac_out);
    pthread_mutex_unlock(&s->lock);
    return is_there;
}

bool secret_verify(struct secret *s, const void *data, size_t n_bytes, const uint8_t *mac, size_t mac_bytes)
{
    uint8_t want[SECRET_MAC_BYTES];
    bool is_good = false;
    if (mac_bytes != sizeof(want))
        return false;
    if (!secret_is_set(s)) {
        mac_by("", data, n_bytes, want);
        return !CRYPTO_memcmp(mac, want, sizeof(want));
    }
    pthread_mutex_lock(&s->lock);
    refresh(s);
    for (uint32_t i = 0; i < s->n; i++) {
        mac_by(s->all[i], data, n_bytes, want);
        is_good |= !CRYPTO_memcmp(mac, want, sizeof(want));
    }
    pthread_mutex_unlock(&s->lock);
    return is_good;
}

void secret_nonce(uint8_t out[SECRET_NONCE_BYTES])
{
    if (RAND_bytes(out, SECRET_NONCE_BYTES) != 1)
        abort(); /* no random numbers: no proof would mean anything */
}

char *secret_text(struct secret *s)
{
    if (!secret_is_set(s))
        return mem_strdup("");
    pthread_mutex_lock(&s->lock);
    char *text = mem_strdup(s->all[0]);
    pthread_mutex_unlock(&s->lock);
    return text;
}
