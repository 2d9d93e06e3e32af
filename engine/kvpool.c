#include "engine/kvpool.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/mem.h"
#include "sched/pins.h"

static const uint32_t NONE = UINT32_MAX;

/*
 * A page that nobody holds is on exactly one list; a held page is on none (LIST_NONE). FREE, CACHED and KEPT
 * stand in the order in which pages are taken. KEPT: cached pages with a pin.
 */
enum list_id { LIST_NONE, LIST_FREE, LIST_CACHED, LIST_KEPT, LIST_QUARANTINE, N_LISTS };

struct page {
    uint32_t generation, seq_holds, xfer_holds;
    uint32_t prev, next; /* neighbours on its list, or NONE */
    enum list_id list;
    bool named, doubt;
    uint32_t chain_index, hash_next;
    struct block_key key;
    uint64_t free_at_ns;
};

struct page_list {
    uint32_t head, tail, n;
};

struct kvpool {
    struct kvpool_config config;
    struct kv_layout layout;
    size_t page_bytes, arena_bytes;
    uint8_t *arena;
    int arena_fd; /* 0: the arena can't be mapped by others */
    struct page *pages;
    struct page_list lists[N_LISTS]; /* CACHED, KEPT: least recently used first; QUARANTINE: by free_at_ns */
    uint32_t *buckets, n_buckets;
    struct pins pins;
};

/* An assert that stays in release builds, because it guards pages. */
#define MUST(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "kvpool: broken invariant: %s (%s:%d)\n", #condition, __FILE__, __LINE__);                 \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static void list_remove(struct kvpool *pool, uint32_t i)
{
    struct page *p = &pool->pages[i];
    struct page_list *l = &pool->lists[p->list];
    if (p->list == LIST_NONE)
        return;
    *(p->prev == NONE ? &l->head : &pool->pages[p->prev].next) = p->next;
    *(p->next == NONE ? &l->tail : &pool->pages[p->next].prev) = p->prev;
    l->n--;
    p->list = LIST_NONE;
}

static void list_append(struct kvpool *pool, enum list_id id, uint32_t i)
{
    struct page *p = &pool->pages[i];
    struct page_list *l = &pool->lists[id];
    MUST(p->list == LIST_NONE);
    p->prev = l->tail;
    p->next = NONE;
    *(l->tail == NONE ? &l->head : &pool->pages[l->tail].next) = i;
    l->tail = i;
    l->n++;
    p->list = id;
}

static uint32_t *bucket(const struct kvpool *pool, const struct block_key *key)
{
    return &pool->buckets[block_key_hash(key) & (pool->n_buckets - 1)];
}

/* The page that has this name, or NONE. */
static uint32_t page_named(const struct kvpool *pool, const struct block_key *key)
{
    uint32_t i = *bucket(pool, key);
    while (i != NONE && !block_key_equal(&pool->pages[i].key, key))
        i = pool->pages[i].hash_next;
    return i;
}

/* Takes the page's name away, if it has one, and reports that. */
static void unname(struct kvpool *pool, uint32_t i)
{
    struct page *p = &pool->pages[i];
    if (!p->named)
        return;
    uint32_t *at = bucket(pool, &p->key);
    while (*at != i)
        at = &pool->pages[*at].hash_next;
    *at = p->hash_next;
    p->named = false;
    if (pool->config.on_block)
        pool->config.on_block(pool->config.user, false, &p->key, p->chain_index);
}

/* The page of a reference. Aborts if the reference is stale. */
static struct page *checked(const struct kvpool *pool, struct page_ref ref)
{
    MUST(ref.index < pool->config.n_pages);
    struct page *p = &pool->pages[ref.index];
    MUST(p->generation == ref.generation);
    return p;
}

enum td_status kvpool_open(const struct kvpool_config *config, struct kvpool **out)
{
    struct kvpool *pool = mem_zalloc(sizeof(*pool));
    pool->config = *config;
    pool->layout = *config->layout;
    pool->page_bytes = kv_layout_page_bytes(config->layout);
    void *arena = NULL;
    if (__builtin_mul_overflow(pool->page_bytes, (size_t)config->n_pages, &pool->arena_bytes) ||
        (mem_map_shared(pool->arena_bytes, &arena, &pool->arena_fd) && mem_map(pool->arena_bytes, &arena))) {
        free(pool);
        return TD_ERR_NO_MEMORY;
    }
    pool->arena = arena;
    pool->pages = mem_array(config->n_pages, sizeof(*pool->pages));
    for (pool->n_buckets = 64; pool->n_buckets < config->n_pages;)
        pool->n_buckets *= 2;
    pool->buckets = mem_array(pool->n_buckets, sizeof(*pool->buckets));
    memset(pool->buckets, 0xff, pool->n_buckets * sizeof(*pool->buckets));
    for (int l = 0; l < N_LISTS; l++)
        pool->lists[l] = (struct page_list){NONE, NONE, 0};
    for (uint32_t i = 0; i < config->n_pages; i++)
        list_append(pool, LIST_FREE, i);
    *out = pool;
    return TD_OK;
}

void kvpool_close(struct kvpool *pool)
{
    if (!pool)
        return;
    for (uint32_t i = 0; i < pool->config.n_pages; i++)
        MUST(!pool->pages[i].xfer_holds);
    mem_unmap(pool->arena, pool->arena_bytes);
    if (pool->arena_fd)
        close(pool->arena_fd);
    pins_free(&pool->pins);
    free(pool->pages);
    free(pool->buckets);
    free(pool);
}

void *kvpool_arena(const struct kvpool *pool, uint64_t *bytes_out)
{
    *bytes_out = pool->arena_bytes;
    return pool->arena;
}

int kvpool_arena_fd(const struct kvpool *pool)
{
    return pool->arena_fd;
}

uint8_t *kvpool_address(const struct kvpool *pool, struct page_ref page)
{
    checked(pool, page);
    return pool->arena + page.index * pool->page_bytes;
}

/* Pages that kvpool_take() could give now: free, cached and pinned ones. */
static uint32_t n_takeable(const struct kvpool *pool)
{
    return pool->lists[LIST_FREE].n + pool->lists[LIST_CACHED].n + pool->lists[LIST_KEPT].n;
}

enum td_status kvpool_take(struct kvpool *pool, uint32_t n, struct page_ref *pages_out)
{
    if (n_takeable(pool) < n)
        return TD_ERR_NO_SPACE;
    for (uint32_t i = 0; i < n; i++) {
        enum list_id from = LIST_FREE;
        while (!pool->lists[from].n)
            from++;
        uint32_t at = pool->lists[from].head;
        struct page *p = &pool->pages[at];
        list_remove(pool, at);
        unname(pool, at);
        MUST(!p->seq_holds && !p->xfer_holds && !p->doubt);
        p->seq_holds = 1;
        p->generation++;
        pages_out[i] = (struct page_ref){at, p->generation};
    }
    return TD_OK;
}

uint32_t kvpool_match(struct kvpool *pool, const struct block_key *keys, uint32_t n, struct page_ref *pages_out)
{
    uint32_t i = 0;
    for (; i < n; i++) {
        uint32_t at = page_named(pool, &keys[i]);
        if (at == NONE)
            break;
        list_remove(pool, at);
        pool->pages[at].seq_holds++;
        pages_out[i] = (struct page_ref){at, pool->pages[at].generation};
    }
    return i;
}

uint32_t kvpool_match_window(struct kvpool *pool, const struct block_key *keys, uint32_t n, struct page_ref *pages_out,
                             uint32_t *first_out)
{
    uint32_t end = n, page_tokens = pool->layout.page_tokens;
    *first_out = 0;
    if (!pool->layout.window)
        return kvpool_match(pool, keys, n, pages_out);
    for (uint32_t i = n; i-- > 0;) { /* pages [i + 1, end) are found */
        if (page_named(pool, &keys[i]) == NONE)
            end = i;
        else if (i == kv_layout_first_kept(&pool->layout, end * page_tokens)) {
            *first_out = i;
            return i + kvpool_match(pool, keys + i, end - i, pages_out + i);
        }
    }
    return 0;
}

/* Puts a page on its list if nobody holds it any more. A page in doubt loses its name at once. */
static void list_page(struct kvpool *pool, uint32_t i)
{
    struct page *p = &pool->pages[i];
    if (p->seq_holds || p->xfer_holds)
        return;
    if (p->doubt) {
        unname(pool, i);
        p->free_at_ns = clock_now(pool->config.clock) + pool->config.quarantine_ns;
        list_append(pool, LIST_QUARANTINE, i);
    } else {
        list_append(pool, !p->named ? LIST_FREE : pins_has(&pool->pins, &p->key) ? LIST_KEPT : LIST_CACHED, i);
    }
}

void kvpool_hold(struct kvpool *pool, struct page_ref page)
{
    struct page *p = checked(pool, page);
    MUST(p->seq_holds || p->xfer_holds);
    p->seq_holds++;
}

void kvpool_unhold(struct kvpool *pool, const struct page_ref *pages, uint32_t n)
{
    for (uint32_t i = n; i-- > 0;) {
        struct page *p = checked(pool, pages[i]);
        MUST(p->seq_holds);
        p->seq_holds--;
        list_page(pool, pages[i].index);
    }
}

void kvpool_transfer_hold(struct kvpool *pool, struct page_ref page)
{
    struct page *p = checked(pool, page);
    MUST(p->seq_holds || p->xfer_holds);
    p->xfer_holds++;
}

void kvpool_transfer_unhold(struct kvpool *pool, struct page_ref page, bool in_doubt)
{
    struct page *p = checked(pool, page);
    MUST(p->xfer_holds);
    p->xfer_holds--;
    p->doubt |= in_doubt;
    list_page(pool, page.index);
}

void kvpool_name(struct kvpool *pool, struct page_ref page, const struct block_key *key, uint32_t chain_index)
{
    struct page *p = checked(pool, page);
    MUST(p->seq_holds);
    if (p->named || p->doubt || page_named(pool, key) != NONE)
        return;
    p->named = true;
    p->key = *key;
    p->chain_index = chain_index;
    p->hash_next = *bucket(pool, key);
    *bucket(pool, key) = page.index;
    if (pool->config.on_block)
        pool->config.on_block(pool->config.user, true, key, chain_index);
}

void kvpool_each_block(const struct kvpool *pool,
                       void (*each)(void *user, const struct block_key *key, uint32_t chain_index), void *user)
{
    for (uint32_t i = 0; i < pool->config.n_pages; i++)
        if (pool->pages[i].named)
            each(user, &pool->pages[i].key, pool->pages[i].chain_index);
}

/* Puts an unheld page on the list that fits, after its name or its pin changed. */
static void move(struct kvpool *pool, uint32_t i)
{
    enum list_id list = pool->pages[i].list;
    if (list != LIST_CACHED && list != LIST_KEPT)
        return;
    list_remove(pool, i);
    list_page(pool, i);
}

void kvpool_keep(struct kvpool *pool, const struct block_key *key, uint64_t until_ns)
{
    uint32_t i = page_named(pool, key);
    if (until_ns)
        pins_keep(&pool->pins, key, until_ns);
    else
        pins_drop(&pool->pins, key);
    if (i != NONE)
        move(pool, i);
}

void kvpool_forget(struct kvpool *pool, const struct block_key *key)
{
    uint32_t i = page_named(pool, key);
    pins_drop(&pool->pins, key);
    if (i == NONE)
        return;
    unname(pool, i);
    move(pool, i);
}

void kvpool_flush(struct kvpool *pool)
{
    pins_free(&pool->pins);
    for (uint32_t i = 0; i < pool->config.n_pages; i++) {
        unname(pool, i);
        move(pool, i);
    }
}

/* A pin expired: its block is reused like any other from now on. */
static void pin_is_over(void *user, const struct block_key *key)
{
    struct kvpool *pool = user;
    uint32_t i = page_named(pool, key);
    if (i == NONE || pool->pages[i].list != LIST_KEPT)
        return;
    list_remove(pool, i);
    list_append(pool, LIST_CACHED, i);
}

void kvpool_sweep(struct kvpool *pool)
{
    uint64_t now = clock_now(pool->config.clock);
    uint32_t i;
    pins_expire(&pool->pins, now, pin_is_over, pool);
    while ((i = pool->lists[LIST_QUARANTINE].head) != NONE && pool->pages[i].free_at_ns <= now) {
        list_remove(pool, i);
        pool->pages[i].doubt = false;
        list_append(pool, LIST_FREE, i);
    }
}

struct kvpool_audit kvpool_audit(const struct kvpool *pool)
{
    struct kvpool_audit a = {.total = pool->config.n_pages};
    for (uint32_t i = 0; i < pool->config.n_pages; i++) {
        const struct page *p = &pool->pages[i];
        if (p->doubt)
            a.quarantined++;
        else if (p->xfer_holds)
            a.leased++;
        else if (p->seq_holds)
            a.held++;
        else if (p->named)
            a.cached++;
        else
            a.free++;
    }
    return a;
}

void kvpool_page_holds(const struct kvpool *pool, uint32_t index, uint32_t *by_sequences_out,
                       uint32_t *by_transfers_out)
{
    MUST(index < pool->config.n_pages);
    *by_sequences_out = pool->pages[index].seq_holds;
    *by_transfers_out = pool->pages[index].xfer_holds;
}
