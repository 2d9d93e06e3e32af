/*
 * Memory. Small allocations abort when the system has none (there is no good answer to that); a size that comes from a
 * config, a model or a peer goes through mem_try or mem_map and returns a status.
 */
#pragma once

#include <stddef.h>

#include "base/status.h"

void *mem_zalloc(size_t len_bytes);               /* zeroed, never NULL */
void *mem_array(size_t count, size_t item_bytes); /* zeroed, overflow-checked, never NULL */
void *mem_resize(void *old, size_t count, size_t item_bytes);
char *mem_strdup(const char *text); /* NULL gives NULL */
void *mem_dup(const void *data, size_t len_bytes);

/* 64-byte aligned, not zeroed; free() releases it. */
enum td_status mem_try(size_t len_bytes, void **out);

/* Page-aligned, zeroed and touched, so that no fault comes later. mem_unmap releases it; NULL is fine. */
enum td_status mem_map(size_t len_bytes, void **out);
void mem_unmap(void *base, size_t len_bytes);

/*
 * The same, of memory that other processes may map too, read-only, by the descriptor *fd_out (> 2, close-on-exec, the
 * caller's to close): it is sealed, so that after this mapping nobody can make another that writes, nor change its length.
 */
enum td_status mem_map_shared(size_t len_bytes, void **out, int *fd_out);

/* Such memory of another process, read-only, by its descriptor. mem_unmap releases it. */
enum td_status mem_map_view(size_t len_bytes, int fd, const void **out);

/* A growing byte buffer; zero-initialised is empty. data is always followed by a NUL that len does not count. */
struct bytes {
    char *data;
    size_t len, cap;
};
void bytes_append(struct bytes *b, const void *data, size_t len_bytes);
void bytes_printf(struct bytes *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
void bytes_clear(struct bytes *b); /* keeps the room */
void bytes_free(struct bytes *b);

/* Reads a whole file; *out is malloc'd and NUL-terminated. TD_ERR_NOT_FOUND, TD_ERR_IO, TD_ERR_NO_SPACE over max. */
enum td_status file_read(const char *path, size_t max_bytes, char **out, size_t *len_out, struct td_error *error_out);
