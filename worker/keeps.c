#include "worker/keeps.h"

#include <stdlib.h>

#include "base/mem.h"
#include "sched/pins.h"

/* Limits of one Pins message. A prompt with more keys than MESSAGE_KEYS gets a message of its own. */
enum { MESSAGE_KEYS = 4096, MESSAGE_KEEPS = 256 };

/* One Pins message while it is filled. */
struct batch {
    struct link_server *server; /* it goes to all routers of the server but `except`; NULL: it goes to `to` */
    const struct link *except;
    struct link *to;
    uint64_t now_ns;
    Tandem__Worker__V1__Keep keeps[MESSAGE_KEEPS], *list[MESSAGE_KEEPS];
    uint32_t n, n_keys;
};

static void flush(struct batch *b)
{
    Tandem__Worker__V1__Pins pins = TANDEM__WORKER__V1__PINS__INIT;
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    pins.n_keeps = b->n;
    pins.held = !b->server;
    pins.keeps = b->list;
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_PINS;
    m.pins = &pins;
    if (b->n && b->server)
        link_server_send_others(b->server, b->except, &m);
    else if (b->n)
        link_send(b->to, &m);
    b->n = b->n_keys = 0;
}

/* Adds a pin. keys are borrowed until flush(). */
static void add_pin(struct batch *b, ProtobufCBinaryData keys, uint32_t ttl_ms)
{
    uint32_t n_keys = (uint32_t)(keys.len / BLOCK_KEY_BYTES);
    if (b->n == MESSAGE_KEEPS || (b->n && b->n_keys + n_keys > MESSAGE_KEYS))
        flush(b);
    tandem__worker__v1__keep__init(&b->keeps[b->n]);
    b->keeps[b->n].keys = keys;
    b->keeps[b->n].ttl_ms = ttl_ms;
    b->list[b->n] = &b->keeps[b->n];
    b->n++;
    b->n_keys += n_keys;
}

static ProtobufCBinaryData keys_of(const struct pin_entry *e)
{
    return (ProtobufCBinaryData){(size_t)e->n * sizeof(*e->keys), e->keys->b};
}

static void add_held(void *user, const struct pin_entry *e)
{
    struct batch *b = user;
    if (e->until_ns > b->now_ns)
        add_pin(b, keys_of(e), (uint32_t)((e->until_ns - b->now_ns + NS_PER_MS - 1) / NS_PER_MS));
}

static void add_ended(void *user, const struct pin_entry *e)
{
    add_pin(user, keys_of(e), 0);
}

void keeps_tell(const struct keeps *k, struct link *to, uint64_t now_ns)
{
    struct batch b = {.to = to, .now_ns = now_ns};
    pin_list_each(&k->list, add_held, &b);
    flush(&b);
}

void keeps_note(struct keeps *k, struct link_server *s, const struct link *from,
                const Tandem__Worker__V1__RouterMessage *m, uint64_t now_ns)
{
    bool keep = m->kind_case == TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_KEEP;
    ProtobufCBinaryData data = keep ? m->keep->keys : m->forget->keys;
    uint32_t ttl_ms = keep ? m->keep->ttl_ms : 0, n = (uint32_t)(data.len / BLOCK_KEY_BYTES);
    struct batch b = {.server = s, .except = from, .now_ns = now_ns};
    struct block_key *keys = n ? mem_dup(data.data, (size_t)n * BLOCK_KEY_BYTES) : NULL;
    bool is_news = false;
    if (n && ttl_ms)
        is_news = pin_list_add(&k->list, keys, n, now_ns + ttl_ms * NS_PER_MS, PINS_MAX) == PIN_NEWS;
    else if (n)
        is_news = pin_list_remove(&k->list, keys, n) != 0;
    else if (!keep && !data.len)
        pin_list_each(&k->list, add_ended, &b);
    if (is_news)
        add_pin(&b, data, ttl_ms);
    flush(&b);
    if (!keep && !data.len)
        pin_list_free(&k->list);
    free(keys);
}

void keeps_expire(struct keeps *k, uint64_t now_ns)
{
    pin_list_expire(&k->list, now_ns);
}

void keeps_free(struct keeps *k)
{
    pin_list_free(&k->list);
}
