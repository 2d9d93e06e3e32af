/* Shares of named tenants, from the command line. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kvstore/kvstore_internal.h"

/* Parses one "NAME=SHARE" of len bytes. */
static enum td_status parse_one(const char *text, size_t len, struct tenant_share *out, struct td_error *e)
{
    const char *equals = memchr(text, '=', len);
    char *end = NULL;
    if (equals && equals > text && equals + 1 < text + len)
        *out = (struct tenant_share){store_tenant(text, (size_t)(equals - text)), strtod(equals + 1, &end)};
    if (end != text + len || !(out->share > 0 && out->share <= 1))
        return td_fail(e, TD_ERR_INVALID, "--tenant-quotas: '%.*s' is not NAME=SHARE with a share above 0, at most 1",
                       (int)len, text);
    return TD_OK;
}

enum td_status quotas_parse(const char *text, struct tenant_share **out, uint32_t *n_out, struct td_error *e)
{
    struct tenant_share *all = NULL;
    uint32_t n = 0;
    while (text && *text) {
        size_t len = strcspn(text, ",");
        all = mem_resize(all, n + 1, sizeof(*all));
        enum td_status s = parse_one(text, len, &all[n++], e);
        if (s) {
            free(all);
            return s;
        }
        text += len + (text[len] == ',');
    }
    *out = all;
    *n_out = n;
    return TD_OK;
}
