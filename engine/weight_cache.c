#include "engine/weight_cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "engine/weight_file.h"

enum { NAME_BYTES = 256, POLL_MS = 10, STALLED_MS = 60000, UNUSED_DAYS = 30, TRIES = 1000 };

struct weight_cache {
    const struct log *log;
    char dir[PATH_MAX], key[WEIGHT_FILE_KEY_BYTES], name[NAME_BYTES], unfinished[NAME_BYTES + 8];
    int dir_fd;
    struct weight_file file; /* zeroed: not mapped */
    uint32_t next;           /* index of the next matrix */
    bool is_building, is_refused;
    struct weight_writer writer; /* valid while is_building */
    struct clock clock;
    uint64_t begun_ns;
};

/* ------------------------------------------------------------- names, directory */

bool weight_cache_default_dir(char out[PATH_MAX])
{
    const char *base = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n = 0;
    if (base && base[0] == '/') /* a relative path must be ignored (XDG Base Directory Specification) */
        n = snprintf(out, PATH_MAX, "%s/tandem", base);
    else if (home && home[0] == '/')
        n = snprintf(out, PATH_MAX, "%s/.cache/tandem", home);
    return n > 0 && n < PATH_MAX;
}

static void make_names(struct weight_cache *c, const struct weight_cache_key *k)
{
    char model[2 * BLOCK_KEY_BYTES + 1];
    block_key_hex(&k->model, model);
    snprintf(c->key, sizeof(c->key), "%s-%s-%s-%s-rank%uof%u-layers%uto%u", model, k->isa,
             k->compute == COMPUTE_BF16 ? "bf16" : "f32", k_weights_name(k->weights), k->rank, k->n_tensor,
             k->first_layer, k->end_layer);
    snprintf(c->name, sizeof(c->name), "%s-v%d.packed", c->key, WEIGHT_FILE_FORMAT);
    snprintf(c->unfinished, sizeof(c->unfinished), "%s.tmp", c->name);
}

/* Whether this user owns it and nobody else may write it. */
static bool is_ours(const struct stat *st)
{
    return st->st_uid == geteuid() && !(st->st_mode & (S_IWGRP | S_IWOTH));
}

static enum td_status open_dir(struct weight_cache *c, struct td_error *e)
{
    char part[PATH_MAX];
    struct stat st;
    snprintf(part, sizeof(part), "%s", c->dir);
    for (char *slash = strchr(part + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(part, 0700);
        *slash = '/';
    }
    mkdir(part, 0700);
    c->dir_fd = open(c->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (c->dir_fd < 0)
        return td_fail(e, TD_ERR_IO, "%s", strerror(errno));
    if (fstat(c->dir_fd, &st) || !is_ours(&st))
        return td_fail(e, TD_ERR_IO, "others own it or may write into it");
    return TD_OK;
}

static void warn(const struct weight_cache *c, const char *what, const char *why)
{
    log_warn(c->log, "packed weights: %s why=\"%s\" dir=%s file=%s", what, why, c->dir, c->name);
}

/* -------------------------------------------------------------------- mapping */

/* TD_ERR_NOT_FOUND: there is no file. Other errors: there is one, but it must not be used. */
static enum td_status map_file(struct weight_cache *c, struct td_error *e)
{
    struct stat st;
    int fd = openat(c->dir_fd, c->name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return td_fail(e, errno == ENOENT ? TD_ERR_NOT_FOUND : TD_ERR_IO, "%s", strerror(errno));
    enum td_status s = TD_OK;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || !is_ours(&st))
        s = td_fail(e, TD_ERR_IO, "others own it or may write it");
    if (!s)
        s = weight_file_map(fd, (uint64_t)st.st_size, c->key, &c->file, e);
    if (!s)
        futimens(fd, NULL); /* marks it as used: files that nobody opens for long are removed */
    close(fd);
    c->next = 0;
    return s;
}

const void *weight_cache_next(struct weight_cache *c, uint64_t *len_bytes_out)
{
    if (!c || !c->file.base || c->is_refused)
        return NULL;
    if (c->next == c->file.n) {
        weight_cache_refuse(c, "it has too few matrices");
        return NULL;
    }
    return weight_file_at(&c->file, c->next++, len_bytes_out);
}

/* The file stays mapped: the matrices that were taken from it are good. */
void weight_cache_refuse(struct weight_cache *c, const char *why)
{
    warn(c, "packed in memory of our own instead", why);
    unlinkat(c->dir_fd, c->name, 0);
    c->is_refused = true;
}

/* ------------------------------------------------------------------- building */

static void stop_building(struct weight_cache *c)
{
    weight_writer_free(&c->writer);
    close(c->writer.fd); /* also gives up the lock */
    c->is_building = false;
}

static void give_up_building(struct weight_cache *c, const char *why)
{
    warn(c, "not written, packed in memory of our own", why);
    unlinkat(c->dir_fd, c->unfinished, 0);
    stop_building(c);
}

/* Takes the lock, and waits while another process writes. TD_BUSY: that process makes no progress. */
static enum td_status lock(const struct weight_cache *c, int fd)
{
    struct stat st;
    off_t seen = -1;
    uint64_t seen_ns = clock_now(&c->clock);
    bool is_told = false;
    while (flock(fd, LOCK_EX | LOCK_NB)) {
        uint64_t now = clock_now(&c->clock);
        if (errno != EWOULDBLOCK && errno != EINTR)
            return TD_ERR_IO;
        if (!is_told)
            log_info(c->log, "packed weights: another process writes them, waiting for it dir=%s file=%s", c->dir,
                     c->name);
        is_told = true;
        if (!fstat(fd, &st) && st.st_size != seen) {
            seen = st.st_size;
            seen_ns = now;
        }
        if (clock_ms_between(seen_ns, now) > STALLED_MS)
            return TD_BUSY;
        nanosleep(&(struct timespec){.tv_nsec = POLL_MS * 1000000L}, NULL);
    }
    return TD_OK;
}

/* Whether the name of the unfinished file still means the file that is locked. */
static bool is_current(const struct weight_cache *c, int fd)
{
    struct stat named, locked;
    return !fstatat(c->dir_fd, c->unfinished, &named, AT_SYMLINK_NOFOLLOW) && !fstat(fd, &locked) &&
           named.st_ino == locked.st_ino && named.st_dev == locked.st_dev;
}

/* With the lock taken. TD_OK: another process wrote the file, it is mapped. TD_NOT_YET: write it. */
static enum td_status map_or_begin(struct weight_cache *c, int fd, struct td_error *e)
{
    if (!map_file(c, e)) {
        unlinkat(c->dir_fd, c->unfinished, 0);
        return TD_OK;
    }
    if (fchmod(fd, 0600) || ftruncate(fd, 0))
        return td_fail(e, TD_ERR_IO, "%s", strerror(errno));
    c->is_building = true;
    c->writer = (struct weight_writer){.fd = fd};
    c->begun_ns = clock_now(&c->clock);
    return TD_NOT_YET;
}

/* Results as map_or_begin(). An error means that packed weights can't be shared. */
static enum td_status build(struct weight_cache *c, struct td_error *e)
{
    for (int i = 0; i < TRIES; i++) {
        int fd = openat(c->dir_fd, c->unfinished, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
        if (fd < 0)
            return td_fail(e, TD_ERR_IO, "%s", strerror(errno));
        enum td_status s = lock(c, fd);
        if (s)
            s = td_fail(e, s, s == TD_BUSY ? "the process that writes it makes no progress" : "it can't be locked");
        else if (!is_current(c, fd)) {
            close(fd);
            continue;
        } else
            s = map_or_begin(c, fd, e);
        if (s != TD_NOT_YET)
            close(fd);
        return s;
    }
    /* A file system whose inode numbers do not last. */
    return td_fail(e, TD_ERR_IO, "its name does not stay with the file");
}

bool weight_cache_is_building(const struct weight_cache *c)
{
    return c && c->is_building;
}

void weight_cache_add(struct weight_cache *c, const void *data, uint64_t len_bytes)
{
    struct td_error e;
    if (weight_cache_is_building(c) && weight_writer_add(&c->writer, data, len_bytes, &e))
        give_up_building(c, e.text);
}

/* ------------------------------------------------------------------- cleaning */

/* Whether a file is of an older format, or was not opened for UNUSED_DAYS. */
static bool is_outdated(const struct weight_cache *c, const char *name)
{
    struct stat st;
    unsigned format = 0;
    int used = 0;
    const char *version = strrchr(name, '-');
    if (!version || sscanf(version, "-v%u.packed%n", &format, &used) != 1 || !used || version[used])
        return false;
    return format < WEIGHT_FILE_FORMAT ||
           (!fstatat(c->dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) && time(NULL) - st.st_mtime > UNUSED_DAYS * 86400L);
}

/*
 * Removes an unfinished file whose builder is dead. With the lock taken, so that no process begins to write a
 * file that has no name any more.
 */
static void remove_abandoned(const struct weight_cache *c, const char *name)
{
    size_t n = strlen(name);
    if (n < 11 || strcmp(name + n - 11, ".packed.tmp") != 0)
        return;
    int fd = openat(c->dir_fd, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd >= 0 && !flock(fd, LOCK_EX | LOCK_NB))
        unlinkat(c->dir_fd, name, 0);
    if (fd >= 0)
        close(fd);
}

static void remove_outdated(const struct weight_cache *c)
{
    int fd = openat(c->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir && fd >= 0)
        close(fd);
    for (struct dirent *d = dir ? readdir(dir) : NULL; d; d = readdir(dir)) {
        if (strcmp(d->d_name, c->name) != 0 && is_outdated(c, d->d_name) && !unlinkat(c->dir_fd, d->d_name, 0))
            log_info(c->log, "packed weights: removed, nobody uses them any more dir=%s file=%s", c->dir, d->d_name);
        remove_abandoned(c, d->d_name);
    }
    if (dir)
        closedir(dir);
}

bool weight_cache_publish(struct weight_cache *c)
{
    struct td_error e;
    if (!weight_cache_is_building(c))
        return false;
    if (weight_writer_end(&c->writer, c->key, &e)) {
        give_up_building(c, e.text);
        return false;
    }
    if (renameat(c->dir_fd, c->unfinished, c->dir_fd, c->name)) {
        give_up_building(c, strerror(errno));
        return false;
    }
    fsync(c->dir_fd);
    stop_building(c);
    remove_outdated(c);
    if (map_file(c, &e)) {
        warn(c, "written, but not used", e.text);
        return false;
    }
    log_info(c->log, "packed weights: written dir=%s file=%s mib=%llu ms=%.0f", c->dir, c->name,
             (unsigned long long)(c->file.len_bytes >> 20), clock_ms_between(c->begun_ns, clock_now(&c->clock)));
    return true;
}

/* ---------------------------------------------------------------- open, close */

struct weight_cache *weight_cache_open(const char *dir, const struct weight_cache_key *key, const struct log *log)
{
    struct weight_cache *c = mem_zalloc(sizeof(*c));
    struct td_error e = {{0}};
    c->log = log;
    clock_init_real(&c->clock);
    snprintf(c->dir, sizeof(c->dir), "%s", dir);
    make_names(c, key);
    enum td_status s = open_dir(c, &e);
    if (!s) {
        s = map_file(c, &e);
        if (s && s != TD_ERR_NOT_FOUND)
            warn(c, "there is a file that can't be used, it is written anew", e.text);
        if (s)
            s = build(c, &e);
    }
    if (s && s != TD_NOT_YET) {
        warn(c, "not shared, packed in memory of our own", e.text);
        weight_cache_close(c);
        return NULL;
    }
    if (!s)
        log_info(log, "packed weights: mapped dir=%s file=%s mib=%llu", c->dir, c->name,
                 (unsigned long long)(c->file.len_bytes >> 20));
    return c;
}

void weight_cache_close(struct weight_cache *c)
{
    if (!c)
        return;
    if (c->is_building) {
        unlinkat(c->dir_fd, c->unfinished, 0);
        stop_building(c);
    }
    weight_file_unmap(&c->file);
    if (c->dir_fd > 0)
        close(c->dir_fd);
    free(c);
}
