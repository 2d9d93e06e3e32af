#include "model/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/endian.h"
#include "base/mem.h"

enum { HEADER_MAX_BYTES = 100 << 20, MAX_SHARDS = 1024 };

struct mapping {
    void *base;
    size_t len;
};

struct safetensors {
    struct tensor *tensors;
    uint32_t n, cap;
    struct mapping *mappings;
    uint32_t n_mappings;
};

static const struct {
    const char *name;
    enum num_type type;
    uint32_t bytes;
} DTYPES[] = {{"F32", NUM_F32, 4},   {"F16", NUM_F16, 2},
              {"BF16", NUM_BF16, 2}, {"F64", 0, 8},
              {"I64", 0, 8},         {"I32", 0, 4},
              {"I16", 0, 2},         {"I8", 0, 1},
              {"U8", 0, 1},          {"BOOL", 0, 1},
              {"U64", 0, 8},         {"U32", 0, 4},
              {"U16", 0, 2},         {"F8_E4M3", NUM_F8_E4M3, 1},
              {"F8_E5M2", 0, 1}};

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct tensor *)a)->name, ((const struct tensor *)b)->name);
}

static int by_offset(const void *a, const void *b)
{
    const char *x = ((const struct tensor *)a)->data, *y = ((const struct tensor *)b)->data;
    return x < y ? -1 : x > y;
}

static bool is_offset(json_t *v, uint64_t max)
{
    return json_is_integer(v) && json_integer_value(v) >= 0 && (uint64_t)json_integer_value(v) <= max;
}

static enum td_status parse_tensor(const char *name, json_t *v, const uint8_t *data, uint64_t data_len,
                                   struct tensor *out, struct td_error *e)
{
    json_t *shape = json_object_get(v, "shape"), *offsets = json_object_get(v, "data_offsets");
    const char *dtype = json_string_value(json_object_get(v, "dtype"));
    size_t kind = 0, n_kinds = sizeof(DTYPES) / sizeof(DTYPES[0]);
    while (dtype && kind < n_kinds && strcmp(DTYPES[kind].name, dtype))
        kind++;
    if (!dtype || kind == n_kinds)
        return td_fail(e, TD_ERR_CORRUPT, "tensor %.100s: dtype %.20s is unknown", name, dtype ? dtype : "missing");
    if (!json_is_array(shape) || json_array_size(shape) > 4 || json_array_size(offsets) != 2)
        return td_fail(e, TD_ERR_CORRUPT, "tensor %.100s: no shape of at most 4 dimensions, or no offsets", name);
    json_t *b = json_array_get(offsets, 0), *f = json_array_get(offsets, 1);
    if (!is_offset(b, data_len) || !is_offset(f, data_len) || json_integer_value(b) > json_integer_value(f))
        return td_fail(e, TD_ERR_CORRUPT, "tensor %.100s: data_offsets outside the file's %llu bytes, or reversed",
                       name, (unsigned long long)data_len);
    uint64_t bytes = DTYPES[kind].bytes;
    out->n_dims = (uint32_t)json_array_size(shape);
    for (uint32_t i = 0; i < out->n_dims; i++) {
        json_t *d = json_array_get(shape, i);
        if (!is_offset(d, INT64_MAX) || __builtin_mul_overflow(bytes, (uint64_t)json_integer_value(d), &bytes))
            return td_fail(e, TD_ERR_CORRUPT, "tensor %.100s: shape is negative or overflows", name);
        out->shape[i] = (uint64_t)json_integer_value(d);
    }
    out->data = data + json_integer_value(b);
    out->len_bytes = (uint64_t)(json_integer_value(f) - json_integer_value(b));
    out->type = DTYPES[kind].type;
    if (bytes != out->len_bytes)
        return td_fail(e, TD_ERR_CORRUPT, "tensor %.100s: shape needs %llu bytes, offsets span %llu", name,
                       (unsigned long long)bytes, (unsigned long long)out->len_bytes);
    out->name = mem_strdup(name);
    return TD_OK;
}

static enum td_status add_file(struct safetensors *s, const uint8_t *file, size_t len, const char *path,
                               struct td_error *e)
{
    uint64_t header = len >= 8 ? get_u64(file) : 0;
    if (len < 8 || header > HEADER_MAX_BYTES || header > len - 8)
        return td_fail(e, TD_ERR_CORRUPT, "%s: truncated, or its header length is wrong", path);
    json_error_t je;
    json_t *root = json_loadb((const char *)file + 8, header, JSON_REJECT_DUPLICATES, &je);
    if (!json_is_object(root)) {
        json_decref(root);
        return td_fail(e, TD_ERR_CORRUPT, "%s: header: %s", path, root ? "not an object" : je.text);
    }
    const uint8_t *data = file + 8 + header;
    uint32_t first = s->n;
    enum td_status status = TD_OK;
    const char *name;
    json_t *v;
    json_object_foreach(root, name, v)
    {
        if (!strcmp(name, "__metadata__"))
            continue;
        s->tensors = MEM_ROOM(s->tensors, s->n, s->cap, 64);
        s->tensors[s->n] = (struct tensor){0};
        status = parse_tensor(name, v, data, len - 8 - header, &s->tensors[s->n], e);
        if (status)
            break;
        s->n++;
    }
    json_decref(root);
    if (status)
        return status;
    /* The tensors must cover the data section exactly, without holes or overlaps. */
    if (s->n)
        qsort(s->tensors + first, s->n - first, sizeof(*s->tensors), by_offset);
    const uint8_t *at = data;
    for (uint32_t i = first; i < s->n; i++) {
        if ((const uint8_t *)s->tensors[i].data != at && s->tensors[i].len_bytes)
            return td_fail(e, TD_ERR_CORRUPT, "%s: tensor %.100s overlaps another or leaves a hole", path,
                           s->tensors[i].name);
        at += s->tensors[i].len_bytes;
    }
    if (at != file + len)
        return td_fail(e, TD_ERR_CORRUPT, "%s: %zu bytes that no tensor claims", path, (size_t)(file + len - at));
    return TD_OK;
}

static enum td_status sort_by_name(struct safetensors *s, struct td_error *e)
{
    if (s->n)
        qsort(s->tensors, s->n, sizeof(*s->tensors), by_name);
    for (uint32_t i = 1; i < s->n; i++)
        if (!strcmp(s->tensors[i - 1].name, s->tensors[i].name))
            return td_fail(e, TD_ERR_CORRUPT, "tensor %.100s is there twice", s->tensors[i].name);
    return TD_OK;
}

static enum td_status map_file(struct safetensors *s, const char *path, struct td_error *e)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st)) {
        int err = errno;
        if (fd >= 0)
            close(fd);
        return td_fail(e, err == ENOENT ? TD_ERR_NOT_FOUND : TD_ERR_IO, "%s: %s", path, strerror(err));
    }
    if (!S_ISREG(st.st_mode) || st.st_size < 8) {
        close(fd);
        return td_fail(e, TD_ERR_CORRUPT, "%s: truncated, or not a file", path);
    }
    void *base = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (base == MAP_FAILED)
        return td_fail(e, TD_ERR_IO, "%s: can't be mapped: %s", path, strerror(errno));
    s->mappings = mem_resize(s->mappings, s->n_mappings + 1, sizeof(*s->mappings));
    s->mappings[s->n_mappings++] = (struct mapping){base, (size_t)st.st_size};
    return add_file(s, base, (size_t)st.st_size, path, e);
}

/*
 * Maps every file in weight_map once. A name with a slash is refused, because it could leave the directory.
 */
static enum td_status map_shards(struct safetensors *s, const char *dir, const char *index, struct td_error *e)
{
    char *data = NULL;
    size_t len = 0;
    enum td_status status = file_read(index, HEADER_MAX_BYTES, &data, &len, e);
    if (status)
        return status;
    json_error_t je;
    json_t *root = json_loadb(data, len, 0, &je), *map = json_object_get(root, "weight_map");
    free(data);
    if (!json_is_object(map))
        status = td_fail(e, TD_ERR_CORRUPT, "%s: no weight_map", index);
    json_t *seen = json_object(), *v;
    const char *name;
    json_object_foreach(map, name, v)
    {
        const char *file = json_string_value(v);
        if (!file || strchr(file, '/') || !*file || json_object_size(seen) >= MAX_SHARDS) {
            status = td_fail(e, TD_ERR_CORRUPT, "%s: weight_map: %.100s has no plain file name", index, name);
            break;
        }
        if (json_object_get(seen, file))
            continue;
        json_object_set_new(seen, file, json_true());
        char path[4096];
        snprintf(path, sizeof(path), "%s/%s", dir, file);
        status = map_file(s, path, e);
        if (status)
            break;
    }
    json_decref(seen);
    json_decref(root);
    return status;
}

static enum td_status finish_open(struct safetensors *s, enum td_status status, struct safetensors **out,
                                  struct td_error *error_out)
{
    if (!status)
        status = sort_by_name(s, error_out);
    if (status) {
        safetensors_close(s);
        return status;
    }
    *out = s;
    return TD_OK;
}

enum td_status safetensors_open_file(const char *path, struct safetensors **out, struct td_error *error_out)
{
    struct safetensors *s = mem_zalloc(sizeof(*s));
    return finish_open(s, map_file(s, path, error_out), out, error_out);
}

enum td_status safetensors_open_dir(const char *dir, struct safetensors **out, struct td_error *error_out)
{
    char single[4096], index[4096];
    snprintf(single, sizeof(single), "%s/model.safetensors", dir);
    snprintf(index, sizeof(index), "%s/model.safetensors.index.json", dir);
    struct safetensors *s = mem_zalloc(sizeof(*s));
    enum td_status status = access(single, F_OK) && !access(index, F_OK) ? map_shards(s, dir, index, error_out)
                                                                         : map_file(s, single, error_out);
    return finish_open(s, status, out, error_out);
}

enum td_status safetensors_open_memory(const void *data, size_t len_bytes, struct safetensors **out,
                                       struct td_error *error_out)
{
    struct safetensors *s = mem_zalloc(sizeof(*s));
    return finish_open(s, add_file(s, data, len_bytes, "memory", error_out), out, error_out);
}

void safetensors_close(struct safetensors *s)
{
    if (!s)
        return;
    for (uint32_t i = 0; i < s->n; i++)
        free((char *)s->tensors[i].name);
    for (uint32_t i = 0; i < s->n_mappings; i++)
        munmap(s->mappings[i].base, s->mappings[i].len);
    free(s->tensors);
    free(s->mappings);
    free(s);
}

const struct tensor *safetensors_find(const struct safetensors *s, const char *name)
{
    struct tensor key = {.name = name};
    return s->n ? bsearch(&key, s->tensors, s->n, sizeof(*s->tensors), by_name) : NULL;
}

uint32_t safetensors_count(const struct safetensors *s)
{
    return s->n;
}

const struct tensor *safetensors_at(const struct safetensors *s, uint32_t i)
{
    return &s->tensors[i];
}
