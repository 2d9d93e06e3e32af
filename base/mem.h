/*
 * Memory. Small allocations abort if the system has no memory, because nothing sensible can be done then.
 * Sizes that come from a config, a model or a peer use mem_try or mem_map, which return a status.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

void *mem_zalloc(size_t len_bytes);               /* zeroed, never NULL */
void *mem_array(size_t count, size_t item_bytes); /* zeroed, overflow-checked, never NULL */
/* As realloc: keeps the contents; added memory is not zeroed. Overflow-checked, never NULL. */
void *mem_resize(void *old, size_t count, size_t item_bytes);
/*
 * `items`, with room for another one behind the first n: if all `cap` are in use, cap doubles (the first
 * time: to `least`) and the array is resized. items = MEM_ROOM(items, n, cap, least); cap is an lvalue,
 * evaluated twice.
 */
#define MEM_ROOM(items, n, cap, least)                                                                                 \
    ((n) < (cap) ? (void *)(items)                                                                                     \
                 : ((cap) = (cap) ? 2 * (cap) : (least), mem_resize((items), (cap), sizeof(*(items)))))
char *mem_strdup(const char *text); /* NULL gives NULL; the caller frees */
void *mem_dup(const void *data, size_t len_bytes);

/* Aligned to 64 bytes, not zeroed; release with free(). */
enum td_status mem_try(size_t len_bytes, void **out);

/* Page-aligned, zeroed and touched, so that no page fault comes later, and left out of core dumps, as all
 * that is mapped here. Release with mem_unmap; NULL is fine. */
enum td_status mem_map(size_t len_bytes, void **out);
void mem_unmap(void *base, size_t len_bytes);

/*
 * As mem_map, but other processes may map the memory read-only by the descriptor *fd_out (> 2, close-on-exec;
 * the caller closes it). The file is sealed: nobody can make another writable mapping or change its length.
 */
enum td_status mem_map_shared(size_t len_bytes, void **out, int *fd_out);

/* Maps such memory of another process, read-only, by its descriptor. Release with mem_unmap. */
enum td_status mem_map_view(size_t len_bytes, int fd, const void **out);

/* A growing byte buffer; zero-initialised: empty. A NUL always follows data and is not counted in len. */
struct bytes {
    char *data;
    size_t len, cap;
};
void bytes_append(struct bytes *b, const void *data, size_t len_bytes);
void bytes_printf(struct bytes *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
void bytes_clear(struct bytes *b); /* keeps the memory */
void bytes_free(struct bytes *b);

/* Reads a whole file. *out is malloc'd and NUL-terminated; the caller frees it. TD_ERR_NOT_FOUND,
 * TD_ERR_IO; TD_ERR_NO_SPACE: longer than max_bytes. */
enum td_status file_read(const char *path, size_t max_bytes, char **out, size_t *len_out, struct td_error *error_out);

/*
 * Returns freed memory to the system if the process has much more than it uses, compared with the last time,
 * at most every ten seconds, and once more ten seconds later: at the first time part of a flood is still in
 * use.
 * The allocator keeps the memory of a hundred thousand small objects because some object at its end is in
 * use. Call it once a second from a thread that has nothing urgent to do: it takes the allocator's locks, for
 * some milliseconds after a flood. now_ns: by any clock, always the same one.
 */
void mem_return_freed(uint64_t now_ns);
