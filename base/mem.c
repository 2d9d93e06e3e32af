#include "base/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void *must(void *p)
{
    if (!p) {
        fputs("out of memory\n", stderr);
        abort();
    }
    return p;
}

void *mem_zalloc(size_t len_bytes)
{
    return must(calloc(1, len_bytes ? len_bytes : 1));
}

void *mem_array(size_t count, size_t item_bytes)
{
    return must(calloc(count ? count : 1, item_bytes));
}

void *mem_resize(void *old, size_t count, size_t item_bytes)
{
    size_t len = 0;
    if (__builtin_mul_overflow(count, item_bytes, &len))
        must(NULL);
    return must(realloc(old, len ? len : 1));
}

char *mem_strdup(const char *text)
{
    return text ? must(strdup(text)) : NULL;
}

void *mem_dup(const void *data, size_t len_bytes)
{
    void *p = must(malloc(len_bytes ? len_bytes : 1));
    if (len_bytes)
        memcpy(p, data, len_bytes);
    return p;
}

enum td_status mem_try(size_t len_bytes, void **out)
{
    void *p = NULL;
    if (posix_memalign(&p, 64, len_bytes ? len_bytes : 64))
        return TD_ERR_NO_MEMORY;
    *out = p;
    return TD_OK;
}

static enum td_status touch(void *p, size_t len_bytes)
{
    madvise(p, len_bytes, MADV_HUGEPAGE);
    madvise(p, len_bytes, MADV_DONTDUMP);
    if (madvise(p, len_bytes, MADV_POPULATE_WRITE) == 0)
        return TD_OK;
    if (errno == ENOMEM || errno == EFAULT)
        return TD_ERR_NO_MEMORY;
    for (size_t i = 0; i < len_bytes; i += 4096) /* for kernels without MADV_POPULATE_WRITE */
        ((volatile char *)p)[i] = 0;
    return TD_OK;
}

enum td_status mem_map(size_t len_bytes, void **out)
{
    void *p = mmap(NULL, len_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return TD_ERR_NO_MEMORY;
    if (touch(p, len_bytes)) {
        munmap(p, len_bytes);
        return TD_ERR_NO_MEMORY;
    }
    *out = p;
    return TD_OK;
}

/* Maps at a multiple of 2 MiB; without that alignment a file's memory gets no huge pages. */
static void *map_aligned(size_t len_bytes, int protection, int fd)
{
    const size_t align = 2u << 20, room = len_bytes + align;
    char *p = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return MAP_FAILED;
    size_t before = (align - (uintptr_t)p % align) % align;
    size_t whole = (len_bytes + 4095) / 4096 * 4096;
    if (before)
        munmap(p, before);
    if (room > before + whole)
        munmap(p + before + whole, room - before - whole);
    void *at = mmap(p + before, len_bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    if (at == MAP_FAILED)
        munmap(p + before, whole);
    return at;
}

enum td_status mem_map_shared(size_t len_bytes, void **out, int *fd_out)
{
    int made = memfd_create("tandem-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    int fd = made < 0 ? -1 : fcntl(made, F_DUPFD_CLOEXEC, 3);
    void *p = MAP_FAILED;
    if (made >= 0)
        close(made);
    if (fd >= 0 && ftruncate(fd, (off_t)len_bytes) == 0)
        p = map_aligned(len_bytes, PROT_READ | PROT_WRITE, fd);
    bool ok = p != MAP_FAILED && !touch(p, len_bytes) &&
              fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0;
    if (ok) {
        *out = p;
        *fd_out = fd;
        return TD_OK;
    }
    if (p != MAP_FAILED)
        munmap(p, len_bytes);
    if (fd >= 0)
        close(fd);
    return TD_ERR_NO_MEMORY;
}

enum td_status mem_map_view(size_t len_bytes, int fd, const void **out)
{
    void *p = map_aligned(len_bytes, PROT_READ, fd);
    if (p == MAP_FAILED)
        return TD_ERR_NO_MEMORY;
    madvise(p, len_bytes, MADV_HUGEPAGE);
    madvise(p, len_bytes, MADV_DONTDUMP);
    /* If the kernel can't, pages are mapped when they are first read. */
    madvise(p, len_bytes, MADV_POPULATE_READ);
    *out = p;
    return TD_OK;
}

void mem_unmap(void *base, size_t len_bytes)
{
    if (base)
        munmap(base, len_bytes);
}

static void bytes_reserve(struct bytes *b, size_t more)
{
    if (b->len + more + 1 <= b->cap)
        return;
    size_t cap = b->cap ? b->cap * 2 : 64;
    while (cap < b->len + more + 1)
        cap *= 2;
    b->data = mem_resize(b->data, cap, 1);
    b->cap = cap;
}

void bytes_append(struct bytes *b, const void *data, size_t len_bytes)
{
    bytes_reserve(b, len_bytes);
    if (len_bytes)
        memcpy(b->data + b->len, data, len_bytes);
    b->len += len_bytes;
    b->data[b->len] = 0;
}

void bytes_printf(struct bytes *b, const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (n > 0) {
        bytes_reserve(b, (size_t)n);
        vsnprintf(b->data + b->len, (size_t)n + 1, format, again);
        b->len += (size_t)n;
    }
    va_end(again);
}

void bytes_clear(struct bytes *b)
{
    b->len = 0;
    if (b->data)
        b->data[0] = 0;
}

void bytes_free(struct bytes *b)
{
    free(b->data);
    *b = (struct bytes){0};
}

enum td_status file_read(const char *path, size_t max_bytes, char **out, size_t *len_out, struct td_error *error_out)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return td_fail(error_out, errno == ENOENT ? TD_ERR_NOT_FOUND : TD_ERR_IO, "%s: %s", path, strerror(errno));
    struct bytes b = {0};
    char chunk[65536];
    size_t n;
    while ((n = fread(chunk, 1, sizeof(chunk), f)) > 0 && b.len + n <= max_bytes)
        bytes_append(&b, chunk, n);
    int bad = ferror(f);
    fclose(f);
    if (bad || n > 0) {
        bytes_free(&b);
        return bad ? td_fail(error_out, TD_ERR_IO, "%s: read error", path)
                   : td_fail(error_out, TD_ERR_NO_SPACE, "%s: larger than %zu bytes", path, max_bytes);
    }
    bytes_append(&b, "", 0);
    *out = b.data;
    *len_out = b.len;
    return TD_OK;
}

#define RETURN_EVERY_NS 10000000000ull
enum { RETURN_LEAST = 32 << 20 };

/* Memory that this process has beyond what is allocated. Its part that malloc knows nothing of changes
 * little. */
static size_t unused_bytes(void)
{
    struct mallinfo2 m = mallinfo2();
    size_t in_use = m.uordblks + m.hblkhd, resident = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (f && fscanf(f, "%*u %zu", &resident) != 1)
        resident = 0;
    if (f)
        fclose(f);
    resident *= (size_t)sysconf(_SC_PAGESIZE);
    return resident > in_use ? resident - in_use : 0;
}

void mem_return_freed(uint64_t now_ns)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static size_t least; /* the least that was unused since memory was returned */
    static uint64_t returned_ns;
    static bool once_more;            /* for what a flood still held when its memory was returned */
    if (pthread_mutex_trylock(&lock)) /* several servers of one process */
        return;
    size_t unused = unused_bytes();
    bool grew = unused > least + RETURN_LEAST;
    if (!returned_ns || ((grew || once_more) && now_ns - returned_ns > RETURN_EVERY_NS)) {
        malloc_trim(0);
        once_more = grew;
        least = unused_bytes();
        returned_ns = now_ns;
    }
    least = unused < least ? unused : least;
    pthread_mutex_unlock(&lock);
}
