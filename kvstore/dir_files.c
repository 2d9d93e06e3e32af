/*
 * The kernel queues an event before the system call that caused it returns, so an update sees everything that
 * this process did before it. A file is looked at twice after it was closed: the event comes before the file
 * system returns the room that it allocated in advance.
 *
 * A directory that was renamed or removed is followed by its name: the watch is set on whatever has that name
 * now, and that is listed.
 */
#include "kvstore/dir_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"

enum { WRITING = UINT8_MAX, LOOKS_AFTER = 2 };
static const uint32_t CHANGES =
    IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_CLOSE_WRITE | IN_MOVE_SELF | IN_DELETE_SELF | IN_ONLYDIR;

struct other_file { /* a file that is not a blob file */
    char *name;
    uint64_t len_bytes; /* when it was last looked at */
};

struct file_list {
    struct dir_file **files;
    uint64_t n, cap;
};

struct dir_files {
    char *path;
    int notify_fd, watch; /* -1: none */
    bool must_list;
    /* By rising number. Files that are gone stay until they are half of the list. */
    struct file_list blobs;
    /* watched: to be looked at in each update. changed: to be visited. */
    struct file_list watched, changed;
    struct other_file *others;
    uint64_t n_others, n_gone, n_listings, n_looks, blob_bytes, other_bytes;
};

static void push_file(struct file_list *l, struct dir_file *f)
{
    l->files = MEM_ROOM(l->files, l->n, l->cap, 64);
    l->files[l->n++] = f;
}

struct dir_files *dir_files_open(const char *path)
{
    struct dir_files *d = mem_zalloc(sizeof(*d));
    d->path = mem_strdup(path);
    d->notify_fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    d->watch = -1;
    return d;
}

static void forget_others(struct dir_files *d)
{
    for (uint64_t i = 0; i < d->n_others; i++)
        free(d->others[i].name);
    d->n_others = 0;
}

void dir_files_close(struct dir_files *d)
{
    if (!d)
        return;
    if (d->notify_fd >= 0)
        close(d->notify_fd);
    for (uint64_t i = 0; i < d->blobs.n; i++)
        free(d->blobs.files[i]);
    forget_others(d);
    free(d->others);
    free(d->blobs.files);
    free(d->watched.files);
    free(d->changed.files);
    free(d->path);
    free(d);
}

/* -------------------------------------------------------------- blob files */

/* Index of the first file whose number is not smaller. */
static uint64_t place_of(const struct dir_files *d, uint64_t number)
{
    uint64_t low = 0, high = d->blobs.n;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        if (d->blobs.files[middle]->number < number)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The blob file with this number; NULL if there is none. */
static struct dir_file *find_blob(const struct dir_files *d, uint64_t number)
{
    uint64_t at = place_of(d, number);
    bool is_there = at < d->blobs.n && d->blobs.files[at]->number == number && !d->blobs.files[at]->is_gone;
    return is_there ? d->blobs.files[at] : NULL;
}

static void note_change(struct dir_files *d, struct dir_file *f)
{
    if (!f->is_changed)
        push_file(&d->changed, f);
    f->is_changed = true;
}

static struct dir_file *find_or_add(struct dir_files *d, uint64_t number)
{
    uint64_t at = place_of(d, number);
    struct dir_file *f = at < d->blobs.n ? d->blobs.files[at] : NULL;
    if (!f || f->number != number) { /* new files have the largest number, so this moves little */
        f = mem_zalloc(sizeof(*f));
        push_file(&d->blobs, f);
        memmove(&d->blobs.files[at + 1], &d->blobs.files[at], (d->blobs.n - 1 - at) * sizeof(f));
        d->blobs.files[at] = f;
        *f = (struct dir_file){.number = number, .is_fresh = true};
    } else if (f->is_gone) {
        f->is_gone = false;
        f->is_fresh = true;
        d->n_gone--;
    }
    note_change(d, f);
    return f;
}

static void set_gone(struct dir_files *d, struct dir_file *f)
{
    d->blob_bytes -= f->disk_bytes;
    f->len_bytes = f->disk_bytes = 0;
    f->is_gone = true;
    d->n_gone++;
    note_change(d, f);
}

static void set_size(struct dir_files *d, struct dir_file *f, const struct stat *st)
{
    uint64_t disk_bytes = (uint64_t)st->st_blocks * 512;
    d->blob_bytes += disk_bytes - f->disk_bytes;
    f->disk_bytes = disk_bytes;
    if (f->len_bytes == (uint64_t)st->st_size)
        return;
    f->len_bytes = (uint64_t)st->st_size;
    note_change(d, f);
}

static bool stat_name(struct dir_files *d, int dir_fd, const char *name, struct stat *st)
{
    d->n_looks++;
    return !fstatat(dir_fd, name, st, AT_SYMLINK_NOFOLLOW) && S_ISREG(st->st_mode);
}

/* Whether this is the name of a blob file. */
static bool number_of_name(const char *name, uint64_t *number_out)
{
    char *end;
    *number_out = strtoull(name, &end, 10);
    return end != name && !strcmp(end, ".blob");
}

/* ------------------------------------------------------------- other files */

static void remove_other(struct dir_files *d, const char *name)
{
    for (uint64_t i = 0; i < d->n_others; i++)
        if (!strcmp(d->others[i].name, name)) {
            free(d->others[i].name);
            d->others[i] = d->others[--d->n_others];
            return;
        }
}

static void add_other(struct dir_files *d, const char *name)
{
    remove_other(d, name);
    d->others = mem_resize(d->others, d->n_others + 1, sizeof(*d->others));
    d->others[d->n_others++] = (struct other_file){mem_strdup(name), 0};
}

/* ----------------------------------------------------------------- listing */

static int by_number(const void *a, const void *b)
{
    const struct dir_file *x = a, *y = b;
    return (x->number > y->number) - (x->number < y->number);
}

/* Returns the blob files in any order; replaces the list of other files. */
static struct dir_file *list_dir(struct dir_files *d, DIR *dir, uint64_t *n_out)
{
    struct dir_file *found = NULL;
    uint64_t n = 0, cap = 0, number;
    forget_others(d);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        if (!number_of_name(e->d_name, &number)) {
            if (e->d_name[0] != '.')
                add_other(d, e->d_name);
            continue;
        }
        found = MEM_ROOM(found, n, cap, 64);
        found[n++] = (struct dir_file){.number = number};
    }
    *n_out = n;
    return found;
}

/* dir NULL: the directory does not exist. */
static void list_all(struct dir_files *d, DIR *dir)
{
    uint64_t n, listing = ++d->n_listings;
    struct dir_file *found = list_dir(d, dir, &n);
    char name[32];
    struct stat st;
    /* So that adding them in order moves nothing. */
    if (n)
        qsort(found, n, sizeof(*found), by_number);
    for (uint64_t i = 0; i < n; i++) {
        snprintf(name, sizeof(name), "%06llu.blob", (unsigned long long)found[i].number);
        if (!stat_name(d, dirfd(dir), name, &st))
            continue;
        struct dir_file *f = find_blob(d, found[i].number);
        if (!f)
            f = find_or_add(d, found[i].number);
        f->seen_at = listing;
        set_size(d, f, &st);
    }
    for (uint64_t i = 0; i < d->blobs.n; i++)
        if (!d->blobs.files[i]->is_gone && d->blobs.files[i]->seen_at != listing)
            set_gone(d, d->blobs.files[i]);
    free(found);
}

/* ----------------------------------------------------------------- changes */

static void watch_file(struct dir_files *d, struct dir_file *f, uint8_t looks)
{
    if (!f->looks)
        push_file(&d->watched, f);
    f->looks = looks;
}

static void take_event(struct dir_files *d, const struct inotify_event *e)
{
    uint64_t number;
    bool is_end = e->mask & (IN_DELETE | IN_MOVED_FROM), is_new = e->mask & (IN_CREATE | IN_MOVED_TO);
    if (!number_of_name(e->name, &number)) {
        if (is_end)
            remove_other(d, e->name);
        else if (is_new)
            add_other(d, e->name);
        return;
    }
    struct dir_file *f = find_blob(d, number);
    if (is_end && f)
        set_gone(d, f);
    else if (!is_end)
        watch_file(d, f ? f : find_or_add(d, number), e->mask & IN_CREATE ? WRITING : LOOKS_AFTER);
}

/* Takes in all queued events. False: the directory must be listed. */
static bool take_events(struct dir_files *d)
{
    _Alignas(struct inotify_event) char buffer[16384];
    bool is_complete = d->watch >= 0;
    for (ssize_t got; d->notify_fd >= 0 && (got = read(d->notify_fd, buffer, sizeof(buffer))) > 0;)
        for (ssize_t at = 0; at < got;) {
            const struct inotify_event *e = (const struct inotify_event *)(buffer + at);
            at += (ssize_t)(sizeof(*e) + e->len);
            if (e->mask & IN_Q_OVERFLOW)
                is_complete = false;
            if (e->wd != d->watch)
                continue;
            if (e->mask & (IN_MOVE_SELF | IN_DELETE_SELF | IN_IGNORED)) {
                inotify_rm_watch(d->notify_fd, d->watch);
                d->watch = -1;
                is_complete = false;
            } else if (e->len && !(e->mask & IN_ISDIR)) {
                take_event(d, e);
            }
        }
    return is_complete;
}

static void look_at_watched(struct dir_files *d, int dir_fd)
{
    uint64_t n = 0;
    char name[32];
    struct stat st;
    for (uint64_t i = 0; i < d->watched.n; i++) {
        struct dir_file *f = d->watched.files[i];
        snprintf(name, sizeof(name), "%06llu.blob", (unsigned long long)f->number);
        if (f->is_gone)
            f->looks = 0;
        else if (stat_name(d, dir_fd, name, &st))
            set_size(d, f, &st);
        if (f->looks && f->looks != WRITING)
            f->looks--;
        if (f->looks)
            d->watched.files[n++] = f;
    }
    d->watched.n = n;
}

static void look_at_others(struct dir_files *d, int dir_fd)
{
    struct stat st;
    d->other_bytes = 0;
    for (uint64_t i = 0; i < d->n_others; i++)
        if (stat_name(d, dir_fd, d->others[i].name, &st)) {
            d->other_bytes += (uint64_t)st.st_blocks * 512;
            d->others[i].len_bytes = (uint64_t)st.st_size;
        }
}

void dir_files_update(struct dir_files *d)
{
    d->must_list |= !take_events(d);
    /* Watch first: what changes during the listing comes as an event, too. */
    if (d->must_list && d->notify_fd >= 0 && d->watch < 0)
        d->watch = inotify_add_watch(d->notify_fd, d->path, CHANGES);
    DIR *dir = opendir(d->path);
    if (!dir && errno != ENOENT)
        return; /* for example, no descriptors are left: the next update tries again */
    if (d->must_list)
        list_all(d, dir);
    d->must_list = d->watch < 0;
    look_at_watched(d, dir ? dirfd(dir) : -1);
    look_at_others(d, dir ? dirfd(dir) : -1);
    if (dir)
        closedir(dir);
}

/* ----------------------------------------------------------------- answers */

uint64_t dir_files_disk_bytes(const struct dir_files *d)
{
    return d->blob_bytes + d->other_bytes;
}

uint64_t dir_files_n_blobs(const struct dir_files *d)
{
    return d->blobs.n - d->n_gone;
}

uint64_t dir_files_len_bytes(const struct dir_files *d, const char *suffix)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < d->n_others; i++) {
        size_t len = strlen(d->others[i].name), end = strlen(suffix);
        if (len >= end && !strcmp(d->others[i].name + len - end, suffix))
            sum += d->others[i].len_bytes;
    }
    return sum;
}

uint64_t dir_files_n_looks(const struct dir_files *d)
{
    return d->n_looks;
}

/* Frees files that are gone, once they are half of all. No other list has them: the update that found them
 * gone removed them from `watched`, and `changed` is empty here. */
static void drop_gone(struct dir_files *d)
{
    uint64_t n = 0;
    if (2 * d->n_gone < d->blobs.n || d->changed.n)
        return;
    for (uint64_t i = 0; i < d->blobs.n; i++)
        if (d->blobs.files[i]->is_gone)
            free(d->blobs.files[i]);
        else
            d->blobs.files[n++] = d->blobs.files[i];
    d->blobs.n = n;
    d->n_gone = 0;
}

bool dir_files_visit_changed(struct dir_files *d, dir_files_visit_fn *visit, void *user)
{
    uint64_t i = 0;
    for (bool is_done = true; i < d->changed.n && is_done; i += is_done) {
        struct dir_file *f = d->changed.files[i];
        is_done = !visit || visit(user, f);
        f->is_fresh &= !is_done;
        f->is_changed = !is_done;
    }
    d->changed.n -= i;
    if (d->changed.n)
        memmove(d->changed.files, d->changed.files + i, d->changed.n * sizeof(*d->changed.files));
    drop_gone(d);
    return !d->changed.n;
}

void dir_files_each(struct dir_files *d, dir_files_visit_fn *visit, void *user)
{
    for (uint64_t i = 0; i < d->blobs.n; i++)
        visit(user, d->blobs.files[i]);
}
