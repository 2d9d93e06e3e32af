#include "worker/adapters.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

static enum td_status open_one(struct adapters *a, const char *text, size_t len, const struct model_config *config,
                               struct td_error *e)
{
    const char *equals = memchr(text, '=', len);
    size_t n = equals ? (size_t)(equals - text) : 0;
    struct td_error why = {{0}};
    if (!n || n > MAX_ADAPTER_NAME || n + 1 == len)
        return td_fail(e, TD_ERR_INVALID, "--lora: '%.*s' is not NAME=DIR, NAME of 1 to %d bytes", (int)len, text,
                       MAX_ADAPTER_NAME);
    if (a->n == MAX_ADAPTERS)
        return td_fail(e, TD_ERR_INVALID, "--lora: more than %d adapters", MAX_ADAPTERS);
    if (adapters_find(a, text, n))
        return td_fail(e, TD_ERR_INVALID, "--lora: '%.*s' is there twice", (int)n, text);
    char *dir = mem_zalloc(len - n);
    memcpy(dir, equals + 1, len - n - 1);
    memcpy(a->names[a->n], text, n);
    enum td_status s = adapter_open(dir, config, &a->all[a->n], &why);
    free(dir);
    if (s)
        return td_fail(e, s, "--lora %.*s: %s", (int)n, text, why.text);
    a->n++;
    return TD_OK;
}

enum td_status adapters_open(const char *option, const struct model_config *config, struct adapters *out,
                             struct td_error *error_out)
{
    enum td_status s = TD_OK;
    *out = (struct adapters){0};
    for (const char *at = option; at && *at && !s;) {
        size_t len = strcspn(at, ",");
        s = open_one(out, at, len, config, error_out);
        at += len + (at[len] == ',');
    }
    if (s)
        adapters_close(out);
    return s;
}

void adapters_close(struct adapters *a)
{
    for (uint32_t i = 0; i < a->n; i++)
        adapter_close(a->all[i]);
    a->n = 0;
}

uint32_t adapters_find(const struct adapters *a, const void *name, size_t len)
{
    for (uint32_t i = 0; i < a->n; i++)
        if (strlen(a->names[i]) == len && !memcmp(a->names[i], name, len))
            return i + 1;
    return 0;
}
