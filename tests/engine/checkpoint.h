/* Makes directories with models or adapters, tensor by tensor, for tests that need one of their own. */
#pragma once

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/endian.h"
#include "base/mem.h"
#include "model/safetensors.h"
#include "tests/tap.h"

/* Path of a file of this project: in the source tree of the build, or below TANDEM_SOURCE_ROOT. */
static inline const char *source_file(char out[4096], const char *path)
{
    const char *root = getenv("TANDEM_SOURCE_ROOT");
    snprintf(out, 4096, "%s/%s", root ? root : SOURCE_ROOT, path);
    return out;
}

/* A directory with a model, which is written tensor by tensor. */
struct checkpoint {
    char dir[64];
    json_t *header;
    struct bytes data;
};

static inline void checkpoint_new(struct checkpoint *c)
{
    *c = (struct checkpoint){.header = json_object()};
    snprintf(c->dir, sizeof(c->dir), "/tmp/tandem-weights-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(c->dir));
}

/* Begins with the files of directory `from`. changes: members of config.json to change, as JSON;
 * quantization: its quantization_config, NULL: none. */
static inline void checkpoint_begin(struct checkpoint *c, const char *from, const char *changes,
                                    const char *quantization)
{
    char path[4200];
    json_error_t je;
    checkpoint_new(c);
    snprintf(path, sizeof(path), "%s/config.json", from);
    json_t *config = json_load_file(path, 0, &je), *other = json_loads(changes, 0, &je);
    json_object_update(config, other);
    json_decref(other);
    if (quantization)
        json_object_set_new(config, "quantization_config", json_loads(quantization, 0, &je));
    snprintf(path, sizeof(path), "%s/config.json", c->dir);
    ck_assert_int_eq(json_dump_file(config, path, 0), 0);
    json_decref(config);
}

static inline void checkpoint_add(struct checkpoint *c, const char *name, const char *dtype, const uint64_t *shape,
                                  uint32_t n_dims, const void *data, size_t len_bytes)
{
    json_t *dims = json_array();
    for (uint32_t i = 0; i < n_dims; i++)
        json_array_append_new(dims, json_integer((json_int_t)shape[i]));
    json_object_set_new(c->header, name,
                        json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype, "shape", dims, "data_offsets",
                                  (json_int_t)c->data.len, (json_int_t)(c->data.len + len_bytes)));
    bytes_append(&c->data, data, len_bytes);
}

static inline void checkpoint_copy(struct checkpoint *c, const struct tensor *t)
{
    static const char *const DTYPES[] = {"", "F32", "F16", "BF16"};
    checkpoint_add(c, t->name, DTYPES[t->type], t->shape, t->n_dims, t->data, t->len_bytes);
}

/* Writes the tensors to a file, usually "model.safetensors". */
static inline void checkpoint_end_as(struct checkpoint *c, const char *file)
{
    char path[4200];
    uint8_t length[8];
    char *header = json_dumps(c->header, 0);
    snprintf(path, sizeof(path), "%s/%s", c->dir, file);
    FILE *f = fopen(path, "w");
    put_u64(length, strlen(header));
    fwrite(length, 1, 8, f);
    fwrite(header, 1, strlen(header), f);
    fwrite(c->data.data, 1, c->data.len, f);
    ck_assert_int_eq(fclose(f), 0);
    free(header);
    json_decref(c->header);
    bytes_free(&c->data);
}

static inline void checkpoint_end(struct checkpoint *c)
{
    checkpoint_end_as(c, "model.safetensors");
}

/* Removes the checkpoint's directory. */
static inline void checkpoint_remove(const struct checkpoint *c)
{
    static const char *const FILES[] = {"config.json", "model.safetensors", "adapter_config.json",
                                        "adapter_model.safetensors"};
    char path[4200];
    for (size_t i = 0; i < sizeof(FILES) / sizeof(FILES[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", c->dir, FILES[i]);
        unlink(path);
    }
    rmdir(c->dir);
}
