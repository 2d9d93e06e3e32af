#include "worker/wants.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

static struct wants_list *wants_of(struct wants *w, const struct link *link)
{
    for (uint32_t i = 0; i < w->n; i++)
        if (w->lists[i].link == link)
            return &w->lists[i];
    return NULL;
}

static void apply(const struct wants *w, struct xfer *x)
{
    const char **all = mem_array((size_t)w->n * WANTS_MAX, sizeof(*all));
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->n; i++)
        for (uint32_t j = 0; j < w->lists[i].n; j++)
            all[n++] = w->lists[i].addresses[j];
    xfer_want(x, all, n); /* an address that several routers named counts once */
    free(all);
}

void wants_note(struct wants *w, struct xfer *x, struct link *link, const Tandem__Worker__V1__Peers *m)
{
    struct wants_list *l = wants_of(w, link);
    if (!l) {
        w->lists = mem_resize(w->lists, w->n + 1, sizeof(*w->lists));
        l = &w->lists[w->n++];
        *l = (struct wants_list){.link = link, .addresses = mem_array(WANTS_MAX, sizeof(*l->addresses))};
    }
    l->n = 0;
    for (size_t i = 0; i < m->n_xfer_addresses && l->n < WANTS_MAX; i++) {
        ProtobufCBinaryData a = m->xfer_addresses[i];
        if (!a.len || a.len >= XFER_ADDRESS_BYTES)
            continue;
        memcpy(l->addresses[l->n], a.data, a.len);
        l->addresses[l->n++][a.len] = 0;
    }
    apply(w, x);
}

void wants_leave(struct wants *w, struct xfer *x, const struct link *link)
{
    struct wants_list *l = wants_of(w, link);
    if (!l)
        return;
    free(l->addresses);
    *l = w->lists[--w->n];
    apply(w, x);
}

void wants_free(struct wants *w)
{
    for (uint32_t i = 0; i < w->n; i++)
        free(w->lists[i].addresses);
    free(w->lists);
    *w = (struct wants){0};
}
