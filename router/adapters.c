/*
 * Adapters: all workers serve the same adapters, equal in name and weights, so that any worker can take any
 * request. A worker with others is refused. Blocks computed with an adapter have keys of their own (place.c).
 */
#include <string.h>

#include "router/router_internal.h"

static bool is_named(const struct served_adapter *a, const void *name, size_t len)
{
    return strlen(a->name) == len && !memcmp(a->name, name, len);
}

static const struct served_adapter *find_served(const struct router *r, const void *name, size_t len)
{
    for (uint32_t i = 0; i < r->n_adapters; i++)
        if (is_named(&r->adapters[i], name, len))
            return &r->adapters[i];
    return NULL;
}

enum td_status adapters_check_hello(const Tandem__Worker__V1__WorkerHello *h, struct td_error *e)
{
    if (h->n_adapters > MAX_ADAPTERS)
        return td_fail(e, TD_ERR_PROTOCOL, "%zu adapters are more than %d", h->n_adapters, MAX_ADAPTERS);
    for (size_t i = 0; i < h->n_adapters; i++)
        if (!h->adapters[i]->name.len || h->adapters[i]->name.len > MAX_ADAPTER_NAME ||
            !rpc_text_is_clean((const char *)h->adapters[i]->name.data, h->adapters[i]->name.len) ||
            h->adapters[i]->fingerprint.len != BLOCK_KEY_BYTES)
            return td_fail(e, TD_ERR_PROTOCOL,
                           "adapters[%zu]: name is not printable UTF-8, or it or fingerprint has a length that makes "
                           "no sense",
                           i);
    return TD_OK;
}

void adapters_adopt(struct router *r, const Tandem__Worker__V1__WorkerHello *h)
{
    r->n_adapters = (uint32_t)h->n_adapters;
    for (uint32_t i = 0; i < r->n_adapters; i++) {
        struct served_adapter *a = &r->adapters[i];
        memset(a, 0, sizeof(*a));
        memcpy(a->name, h->adapters[i]->name.data, h->adapters[i]->name.len);
        memcpy(a->fingerprint.b, h->adapters[i]->fingerprint.data, BLOCK_KEY_BYTES);
    }
}

enum td_status adapters_match(const struct router *r, const Tandem__Worker__V1__WorkerHello *h, struct td_error *e)
{
    if (h->n_adapters != r->n_adapters)
        return td_fail(e, TD_ERR_VERSION, "adapters differ: the cluster serves %u, this worker has %zu (--lora)",
                       r->n_adapters, h->n_adapters);
    for (size_t i = 0; i < h->n_adapters; i++) {
        const Tandem__Worker__V1__Adapter *theirs = h->adapters[i];
        const struct served_adapter *ours = find_served(r, theirs->name.data, theirs->name.len);
        if (!ours || memcmp(ours->fingerprint.b, theirs->fingerprint.data, BLOCK_KEY_BYTES) != 0)
            return td_fail(e, TD_ERR_VERSION, "adapters differ: '%.*s' %s", (int)theirs->name.len,
                           (const char *)theirs->name.data, ours ? "has other numbers" : "is not one of the cluster's");
    }
    return TD_OK;
}

static void list_names(const struct router *r, char *out, size_t size)
{
    size_t at = 0;
    *out = 0;
    for (uint32_t i = 0; i < r->n_adapters && at < size; i++)
        at += (size_t)snprintf(out + at, size - at, "%s%s", i ? ", " : "", r->adapters[i].name);
}

enum td_status adapters_ask(struct router *r, const struct params *p, struct td_error *e)
{
    enum td_status s = TD_OK;
    char names[160];
    pthread_mutex_lock(&r->hello_lock);
    if (p->lora.len && r->known && !find_served(r, p->lora.data, p->lora.len)) {
        list_names(r, names, sizeof(names));
        s = td_fail(e, TD_ERR_NOT_FOUND, "lora: '%.*s' is not served; %s%s", (int)p->lora.len, p->lora.data,
                    *names ? "there are: " : "there are no adapters", names);
    }
    pthread_mutex_unlock(&r->hello_lock);
    return s;
}

bool adapters_has(struct router *r, ProtobufCBinaryData name)
{
    pthread_mutex_lock(&r->hello_lock);
    bool is_there = r->known && find_served(r, name.data, name.len);
    pthread_mutex_unlock(&r->hello_lock);
    return is_there;
}

const struct served_adapter *adapters_served(const struct router *r, const struct params *p)
{
    return p->lora.len ? find_served(r, p->lora.data, p->lora.len) : NULL;
}
