#include "cli/rundir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/private_dir.h"
#include "base/random.h"

enum { LOCK_TRIES = 5 };

enum td_status rundir_locate(const char *option, struct rundir *out, struct td_error *error_out)
{
    struct rundir r = {.lock_fd = -1};
    char cwd[PATH_MAX] = "";
    struct stat st;
    int n;
    if (option && !*option) /* an unset variable of a script; the current directory is "." */
        return td_fail(error_out, TD_ERR_INVALID, "--run-dir: is empty");
    if (option && option[0] != '/')
        n = getcwd(cwd, sizeof(cwd)) ? snprintf(r.path, sizeof(r.path), "%s/%s", cwd, option) : -1;
    else if (option)
        n = snprintf(r.path, sizeof(r.path), "%s", option);
    else
        n = private_dir_default(r.path, sizeof(r.path)) ? (int)strlen(r.path) : -1;
    if (n < 0 || n >= (int)sizeof(r.path))
        return td_fail(error_out, TD_ERR_INVALID, "--run-dir: the path is too long");
    while (n > 1 && r.path[n - 1] == '/')
        r.path[--n] = 0;
    *out = r;
    /* Its files say which processes get signals: nobody else may have written them. */
    return lstat(r.path, &st) ? TD_OK : private_dir_check(r.path, error_out);
}

void rundir_path(const struct rundir *r, const char *name, char out[PATH_MAX])
{
    snprintf(out, PATH_MAX, "%s/%s", r->path, name);
}

/* Whether faults/ may hold a file of this name: ROLE-N, or ROLE-N.new of a write that was cut off. */
static bool is_script_name(const char *name)
{
    static const char *const ROLES[] = {"prefill-", "decode-", "store-"};
    for (size_t i = 0; i < sizeof(ROLES) / sizeof(ROLES[0]); i++) {
        size_t len = strlen(ROLES[i]), n = strncmp(name, ROLES[i], len) ? 0 : strspn(name + len, "0123456789");
        if (n && (!name[len + n] || !strcmp(name + len + n, ".new")))
            return true;
    }
    return false;
}

/* Removes the scripts, and the directory if it is empty then. */
static bool remove_faults(const char *path)
{
    struct dirent *entry;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    while (d && (entry = readdir(d)))
        if (is_script_name(entry->d_name))
            unlinkat(fd, entry->d_name, 0);
    if (d)
        closedir(d);
    return !rmdir(path) || errno == ENOENT;
}

enum td_status rundir_reset_faults(const struct rundir *r, bool wanted, struct td_error *e)
{
    char path[PATH_MAX];
    rundir_path(r, RUNDIR_FAULTS, path);
    bool is_removed = remove_faults(path);
    if (!wanted)
        return TD_OK; /* what is left in a directory of this name is not ours */
    return is_removed ? private_dir_make(path, e)
                      : td_fail(e, TD_ERR_IO, "%s: can't be removed: %s", path, strerror(errno));
}

static bool leads_to(const char *path, int fd)
{
    struct stat a, b;
    return !stat(path, &a) && !fstat(fd, &b) && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

enum td_status rundir_take(struct rundir *r, struct td_error *e)
{
    char path[PATH_MAX];
    rundir_path(r, "logs", path);
    enum td_status s = private_dir_make(r->path, e);
    if (!s)
        s = private_dir_make(path, e);
    if (s)
        return s;
    rundir_path(r, "up.pid", path);
    for (int i = 0; i < LOCK_TRIES; i++) { /* rundir_owner() of another process holds the lock for a moment */
        int fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd < 0)
            return td_fail(e, TD_ERR_IO, "%s: %s", path, strerror(errno));
        if (!flock(fd, LOCK_EX | LOCK_NB) && leads_to(path, fd)) {
            r->lock_fd = fd;
            return ftruncate(fd, 0) ? td_fail(e, TD_ERR_IO, "%s: %s", path, strerror(errno)) : TD_OK;
        }
        close(fd);
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    pid_t pid = rundir_owner(r);
    return pid > 0 ? td_fail(e, TD_ERR_REFUSED, "%s: a cluster runs here already (pid %d)", r->path, (int)pid)
                   : td_fail(e, TD_ERR_REFUSED, "%s: a cluster runs here already", r->path);
}

void rundir_set_pid(struct rundir *r)
{
    if (ftruncate(r->lock_fd, 0) == 0)
        dprintf(r->lock_fd, "%d\n", (int)getpid());
}

void rundir_release(struct rundir *r)
{
    static const char *const NAMES[] = {"router.address", "cluster.json", "scale", "up.pid"};
    char path[PATH_MAX];
    if (r->lock_fd < 0)
        return;
    rundir_path(r, "up.pid", path);
    /* The directory may have been removed and made again by another supervisor, whose files must stay. */
    bool is_ours = leads_to(path, r->lock_fd);
    if (is_ours)
        rundir_reset_faults(r, false, NULL);
    for (size_t i = 0; i < sizeof(NAMES) / sizeof(NAMES[0]) && is_ours; i++) {
        rundir_path(r, NAMES[i], path);
        unlink(path);
    }
    close(r->lock_fd);
    r->lock_fd = -1;
}

/* Whether the process has the file `name` open (as /proc spells it), and its content is this process id. */
static bool has_open(const char *pid, const char *name)
{
    char path[PATH_MAX], link[PATH_MAX], text[32];
    struct dirent *entry;
    bool has = false;
    snprintf(path, sizeof(path), "/proc/%s/fd", pid);
    DIR *d = opendir(path); /* fails for processes of other users */
    while (d && !has && (entry = readdir(d))) {
        ssize_t n = readlinkat(dirfd(d), entry->d_name, link, sizeof(link) - 1);
        link[n > 0 ? n : 0] = 0;
        if (strcmp(link, name))
            continue;
        int fd = openat(dirfd(d), entry->d_name, O_RDONLY | O_CLOEXEC);
        n = fd < 0 ? 0 : pread(fd, text, sizeof(text) - 1, 0);
        text[n > 0 ? n : 0] = 0;
        has = atoi(text) == atoi(pid);
        if (fd >= 0)
            close(fd);
    }
    if (d)
        closedir(d);
    return has;
}

pid_t rundir_orphan(const struct rundir *r)
{
    char parent[PATH_MAX], real[PATH_MAX], name[2 * PATH_MAX];
    struct dirent *entry;
    pid_t found = 0;
    snprintf(parent, sizeof(parent), "%s", r->path);
    char *slash = strrchr(parent, '/');
    const char *last = strrchr(r->path, '/') + 1; /* not NULL: rundir_locate() made the path absolute */
    *slash = 0;
    if (!realpath(*parent ? parent : "/", real))
        snprintf(real, sizeof(real), "%s", parent);
    snprintf(name, sizeof(name), "%s/%s/up.pid (deleted)", strcmp(real, "/") ? real : "", last);
    DIR *d = opendir("/proc");
    while (d && !found && (entry = readdir(d)))
        if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && has_open(entry->d_name, name))
            found = (pid_t)atoi(entry->d_name);
    if (d)
        closedir(d);
    return found;
}

pid_t rundir_owner(const struct rundir *r)
{
    char path[PATH_MAX], text[32] = "";
    rundir_path(r, "up.pid", path);
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return 0;
    bool locked = flock(fd, LOCK_SH | LOCK_NB) && errno == EWOULDBLOCK;
    ssize_t n = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (!locked)
        return 0;
    return n > 0 && atoi(text) > 1 ? (pid_t)atoi(text) : -1;
}

static enum td_status write_file(const char *path, const char *text, bool is_synced, struct td_error *e)
{
    char fresh[PATH_MAX + 8];
    snprintf(fresh, sizeof(fresh), "%s.new", path);
    unlink(fresh); /* left by a process that was killed; nothing is followed from there */
    int fd = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    size_t len = strlen(text);
    bool ok = fd >= 0 && write(fd, text, len) == (ssize_t)len && (!is_synced || !fsync(fd));
    if (fd >= 0)
        ok = !close(fd) && ok;
    if (ok && !rename(fresh, path))
        return TD_OK;
    enum td_status s = td_fail(e, TD_ERR_IO, "%s: can't be written: %s", path, strerror(errno));
    unlink(fresh);
    return s;
}

enum td_status rundir_write(const struct rundir *r, const char *name, const char *text, struct td_error *e)
{
    char path[PATH_MAX];
    rundir_path(r, name, path);
    return write_file(path, text, false, e);
}

/* TD_ERR_NOT_FOUND: the file does not exist. */
static enum td_status read_key(const char *path, char out[RUNDIR_KEY_BYTES], struct td_error *e)
{
    char text[RUNDIR_KEY_BYTES + 1] = "";
    struct stat st;
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return td_fail(e, errno == ENOENT ? TD_ERR_NOT_FOUND : TD_ERR_IO, "%s: %s", path, strerror(errno));
    ssize_t n = read(fd, text, sizeof(text));
    bool is_ours = !fstat(fd, &st) && st.st_uid == geteuid() && !(st.st_mode & 077);
    close(fd);
    if (!is_ours)
        return td_fail(e, TD_ERR_REFUSED, "%s: must be ours, and nobody else may read it (mode 0600)", path);
    if (n != RUNDIR_KEY_BYTES || strspn(text, "0123456789abcdef") != RUNDIR_KEY_BYTES - 1)
        return td_fail(e, TD_ERR_REFUSED, "%s: holds no key of 64 hex digits; without the file a new one is drawn",
                       path);
    memcpy(out, text, RUNDIR_KEY_BYTES - 1);
    out[RUNDIR_KEY_BYTES - 1] = 0;
    return TD_OK;
}

enum td_status rundir_key(const char *dir, const char *name, char out[RUNDIR_KEY_BYTES], struct td_error *e)
{
    char path[PATH_MAX], line[RUNDIR_KEY_BYTES + 1];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    enum td_status s = read_key(path, out, e);
    if (s != TD_ERR_NOT_FOUND)
        return s;
    mkdir(dir, 0700); /* if it fails, write_file() fails and says why */
    for (int i = 0; i < 4; i++)
        snprintf(line + 16 * i, 17, "%016" PRIx64, random_u64());
    memcpy(out, line, RUNDIR_KEY_BYTES);
    memcpy(line + RUNDIR_KEY_BYTES - 1, "\n", 2);
    return write_file(path, line, true, e);
}
