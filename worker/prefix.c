/*
 * Prefixes that are elsewhere: in stores, and in the pools of other workers. A leg says which blocks are
 * worth loading, and from where.
 *
 *     prefix_ask (leg starts) -> prefix_load (sequence has pages) -> prefix_pull_ended* -> all_ended
 *
 * Each source is asked once for all of its blocks, as soon as the leg starts, so that a store reads its disk
 * while the leg still waits for pages. When the sequence has pages, all sources are pulled at the same time.
 * When the last pull has ended, the sequence computes from the first block that is missing; loaded blocks
 * behind that one are of no use.
 *
 * Nothing here can fail a request: blocks that a source does not deliver are computed.
 *
 * What must hold: a question always gets a pull, also if nobody needs its blocks any more (unask()), because
 * the source keeps a lease for it; and every pull writes only into pages that it holds, whether its leg still
 * exists or not.
 *
 * The other side is here, too: prefix_asked() answers another worker's question as a store would
 * (proto/wire/store_msg.h), by a lease over the longest prefix of the keys that the pool has, which may be
 * empty. The engine thread answers, so a question waits for the running step.
 */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "worker/worker_internal.h"

static const uint64_t LOAD_NS = 10 * NS_PER_S; /* a slower source is treated as a miss */
/* If the sequence waited longer than this for pages, its load says nothing about the source's speed. */
static const uint64_t AT_ONCE_NS = 5 * NS_PER_MS;

/* ------------------------------------------------------------------ asking */

static const char *address_of(const struct leg *leg, uint32_t source)
{
    return source < leg->n_stores ? leg->stores[source].address : leg->holders[source - leg->n_stores];
}

/* A load from that source with room for another block; if there is none, a new one for `cap` blocks. */
static struct prefix_source *load_of(struct leg *leg, uint32_t source, uint32_t cap)
{
    for (uint32_t i = leg->n_loads; i-- > 0;)
        if (leg->loads[i].source == source && leg->loads[i].n < leg->loads[i].cap)
            return &leg->loads[i];
    leg->loads = mem_resize(leg->loads, leg->n_loads + 1, sizeof(*leg->loads));
    cap = cap < STORE_MAX_KEYS ? cap : STORE_MAX_KEYS;
    leg->loads[leg->n_loads] =
        (struct prefix_source){.source = source, .cap = cap, .blocks = mem_array(cap, sizeof(uint32_t))};
    return &leg->loads[leg->n_loads++];
}

/*
 * Distributes blocks n_have .. usable - 1 among the sources, each block to the first run that has it. Stops
 * at the first block that no run has. Runs are in ascending order.
 */
static void list_blocks(struct leg *leg, uint32_t n_have, uint32_t usable)
{
    uint32_t next = n_have;
    for (uint32_t i = 0; i < leg->n_runs; i++) {
        const struct store_run *r = &leg->runs[i];
        uint32_t end = r->first + r->n < usable ? r->first + r->n : usable;
        if (r->first > next)
            return;
        for (; next < end; next++) {
            struct prefix_source *l = load_of(leg, r->store, usable - next);
            l->blocks[l->n++] = next;
        }
    }
}

/* Sends one load's question. Its id also names the lease that the source will grant. */
static void ask_source(struct worker *w, struct leg *leg, struct prefix_source *l)
{
    uint32_t n_keys, n_computed;
    const struct block_key *keys = engine_seq_keys(leg->seq, &n_keys, &n_computed);
    struct block_key *wanted = mem_array(l->n, sizeof(*wanted));
    struct bytes b = {0};
    for (uint32_t i = 0; i < l->n; i++)
        wanted[i] = keys[l->blocks[i]];
    l->id = worker_new_id(w);
    const struct store_keys_msg m = {.id_incarnation = l->id.incarnation,
                                     .id_counter = l->id.counter,
                                     .first_index = l->blocks[0],
                                     .n_keys = (uint16_t)l->n,
                                     .keys = wanted[0].b};
    store_keys_encode(&m, &b);
    xfer_send(w->xfer, address_of(leg, l->source), STORE_LOOKUP, b.data, (uint32_t)b.len);
    bytes_free(&b);
    free(wanted);
}

/* Asks for all blocks behind the first n_have that some source has. */
static void ask_all(struct worker *w, struct leg *leg, uint32_t n_have)
{
    uint32_t n_tokens;
    engine_seq_tokens(leg->seq, &n_tokens);
    /* The last token is always computed here. */
    uint32_t usable = (n_tokens - 1) / w->geometry.layout.page_tokens;
    list_blocks(leg, n_have, usable);
    leg->load_first = n_have;
    leg->asked_ns = clock_now(&w->clock);
    for (uint32_t i = 0; i < leg->n_loads; i++)
        ask_source(w, leg, &leg->loads[i]);
}

void prefix_ask(struct worker *w, struct leg *leg)
{
    uint32_t n_keys, n_computed;
    if (!leg->n_runs || !leg->kind->computes_prompt || engine_seq_prompt_scores(leg->seq))
        return;
    const struct block_key *keys = engine_seq_keys(leg->seq, &n_keys, &n_computed);
    struct page_ref *own = mem_array(n_keys, sizeof(*own));
    uint32_t n_own = kvpool_match(engine_pool(w->engine), keys, n_keys, own);
    kvpool_unhold(engine_pool(w->engine), own, n_own);
    free(own);
    ask_all(w, leg, n_own);
}

/* ----------------------------------------------------------------- loading */

/* Entries of l->blocks that come before that block of the prompt. */
static uint32_t n_before(const struct prefix_source *l, uint32_t block)
{
    uint32_t n = 0;
    while (n < l->n && l->blocks[n] < block)
        n++;
    return n;
}

/* Withdraws a question: a pull that is cancelled at once makes the source drop its lease early. */
static void unask(struct worker *w, struct leg *leg, struct prefix_source *l)
{
    struct worker_pull *p = pull_open(w, NULL, NULL, NULL, 0);
    pull_start(w, p, l->id, address_of(leg, l->source), 0, clock_now(&w->clock) + LOAD_NS);
    xfer_pull_cancel(w->xfer, l->id);
}

/* Withdraws or cancels every load. Pulls that have not ended keep their pages and end without a leg. */
void prefix_drop(struct worker *w, struct leg *leg)
{
    for (uint32_t i = 0; i < leg->n_loads; i++) {
        struct prefix_source *l = &leg->loads[i];
        if (l->pull) {
            xfer_pull_cancel(w->xfer, l->id);
            l->pull->leg = NULL;
        } else if (!l->is_over) {
            unask(w, leg, l);
        }
        free(l->blocks);
    }
    free(leg->loads);
    leg->loads = NULL;
    leg->n_loads = leg->n_loading = 0;
}

/* Pulls what the load's source has and the pool has not. */
static void start(struct worker *w, struct leg *leg, struct prefix_source *l, uint32_t n_have)
{
    l->n_have = l->n_got = n_before(l, n_have);
    if (l->n_have == l->n) {
        unask(w, leg, l);
        l->is_over = true;
        return;
    }
    uint64_t limit = leg->load_begin_ns + LOAD_NS;
    l->pull = pull_open(w, leg, engine_seq_pages(leg->seq, &(uint32_t){0}), l->blocks + l->n_have, l->n - l->n_have);
    l->pull->n_have = l->n_have;
    leg->n_loading++;
    pull_start(w, l->pull, l->id, address_of(leg, l->source), 0, limit < leg->deadline_ns ? limit : leg->deadline_ns);
}

bool prefix_load(struct worker *w, struct leg *leg, uint32_t n_have)
{
    if (n_have < leg->load_first) { /* blocks that were cached when the leg started are gone: ask again */
        prefix_drop(w, leg);
        ask_all(w, leg, n_have);
    }
    leg->n_matched = n_have;
    leg->load_begin_ns = clock_now(&w->clock);
    for (uint32_t i = 0; i < leg->n_loads; i++)
        start(w, leg, &leg->loads[i], n_have);
    return leg->n_loading > 0;
}

/* ------------------------------------------------------------------- ended */

/* Learns how fast loading is, for routers: one sample for all stores together, one for all workers. */
static void note_speed(struct worker *w, const struct leg *leg)
{
    const uint32_t n_stores = leg->found.n_dram + leg->found.n_ssd;
    const double stored[] = {1, leg->found.n_dram, leg->found.n_ssd}, held[] = {1, leg->n_from_holders};
    if (leg->load_begin_ns > leg->asked_ns + AT_ONCE_NS)
        return;
    pthread_mutex_lock(&w->load_lock);
    if (n_stores)
        w->loading = rls_observe(w->loading, stored, clock_ms_between(leg->load_begin_ns, leg->stores_done_ns));
    if (leg->n_from_holders)
        w->fetching = rls_observe(w->fetching, held, clock_ms_between(leg->load_begin_ns, leg->holders_done_ns));
    pthread_mutex_unlock(&w->load_lock);
}

/* The number of leading blocks of the prompt whose KV is in the sequence's pages now. */
static uint32_t first_missing(const struct leg *leg)
{
    uint32_t missing = UINT32_MAX, end = leg->n_matched;
    for (uint32_t i = 0; i < leg->n_loads; i++) {
        const struct prefix_source *l = &leg->loads[i];
        if (l->n_got < l->n && l->blocks[l->n_got] < missing)
            missing = l->blocks[l->n_got];
        if (l->blocks[l->n - 1] + 1 > end)
            end = l->blocks[l->n - 1] + 1;
    }
    return missing < end ? missing : end;
}

/* Counts the tokens of a load that are used, those before block n_filled, in metrics and in the leg. */
static void count_loaded(struct worker *w, struct leg *leg, const struct prefix_source *l, uint32_t n_filled)
{
    uint32_t page_tokens = w->geometry.layout.page_tokens, all = l->found.n_dram + l->found.n_ssd;
    uint32_t n = n_before(l, n_filled);
    n = n > l->n_have ? n - l->n_have : 0;
    if (l->source >= leg->n_stores) {
        leg->cached_peer += n * page_tokens;
        metrics_inc(w->counters, WORKER_PEER_TOKENS, (uint64_t)n * page_tokens);
        return;
    }
    uint32_t n_ssd = all ? (uint32_t)((uint64_t)n * l->found.n_ssd / all) : 0;
    leg->cached_dram += (n - n_ssd) * page_tokens;
    leg->cached_ssd += n_ssd * page_tokens;
    metrics_inc(w->counters, WORKER_STORE_TOKENS, (uint64_t)n * page_tokens);
}

/*
 * Number of leading blocks that need not be offered to stores: the blocks that are filled now, up to the
 * first one that another worker gave. 0 if stores gave nothing behind the blocks that were cached here.
 */
static uint32_t known_to_stores(const struct leg *leg, uint32_t n_filled)
{
    for (uint32_t i = 0; i < leg->n_loads; i++) {
        const struct prefix_source *l = &leg->loads[i];
        if (l->source >= leg->n_stores && l->n_have < l->n && l->blocks[l->n_have] < n_filled)
            n_filled = l->blocks[l->n_have];
    }
    return n_filled > leg->n_matched ? n_filled : 0;
}

/* The last load has ended: the sequence runs on, and computes from the first missing block. */
static void all_ended(struct worker *w, struct leg *leg)
{
    uint32_t n = first_missing(leg);
    note_speed(w, leg);
    for (uint32_t i = 0; i < leg->n_loads; i++)
        count_loaded(w, leg, &leg->loads[i], n);
    leg->n_from_store = known_to_stores(leg, n);
    engine_seq_filled(w->engine, leg->seq, n * w->geometry.layout.page_tokens);
}

/* Adds a load that brought something to the sums over all stores, or over all workers. */
static void note_source(struct worker *w, struct leg *leg, const struct prefix_source *l)
{
    uint64_t now = clock_now(&w->clock);
    if (l->source < leg->n_stores) {
        leg->found.n_dram += l->found.n_dram;
        leg->found.n_ssd += l->found.n_ssd;
        leg->stores_done_ns = now;
    } else {
        leg->n_from_holders += l->n_got - l->n_have;
        leg->holders_done_ns = now;
    }
}

bool prefix_pull_ended(struct worker *w, struct leg *leg, const struct worker_pull *p, const struct worker_work *work)
{
    uint32_t i = 0;
    while (i < leg->n_loads && leg->loads[i].pull != p)
        i++;
    if (i == leg->n_loads)
        return false;
    struct prefix_source *l = &leg->loads[i];
    const struct xfer_pull_result *r = &work->result;
    l->pull = NULL;
    l->is_over = true;
    if (!work->status && !store_found_decode(r->tail, r->tail_len_bytes, &l->found) && r->n_pages <= l->n)
        l->n_got = r->n_pages > l->n_have ? r->n_pages : l->n_have;
    else if (work->status != TD_ERR_INVALID) /* INVALID: the source has fewer blocks than are cached here */
        log_warn(&w->log, "prefix load failed, computing instead req=%s source=%s status=%s", leg->req,
                 address_of(leg, l->source), td_status_name(work->status ? work->status : TD_ERR_PROTOCOL));
    if (l->n_got > l->n_have)
        note_source(w, leg, l);
    if (!--leg->n_loading)
        all_ended(w, leg);
    return true;
}

/* --------------------------------------------------------------- answering */

/*
 * Holds the pages of the longest prefix of the keys that the pool has, once more for each key; the caller
 * gives the holds back. At most as many as the pool has pages, which is the limit of a lease: a peer may
 * repeat a key.
 */
static uint32_t take_blocks(struct worker *w, const struct store_keys_msg *m, struct page_ref *out)
{
    struct kvpool *pool = engine_pool(w->engine);
    uint32_t n = 0, most = (uint32_t)w->options.pages; /* of a lease */
    for (; n < m->n_keys && n < most; n++) {
        struct block_key key = store_keys_at(m, n);
        if (kvpool_match(pool, &key, 1, &out[n]) != 1)
            break;
    }
    return n;
}

/* Answers a question with a lease, also if there is nothing to lend: the reader's pull then ends at once. */
void prefix_asked(struct worker *w, const struct bytes *message, uint64_t reader)
{
    struct store_keys_msg m;
    struct page_ref refs[STORE_MAX_KEYS];
    uint8_t tail[STORE_FOUND_BYTES];
    if (!w->xfer) /* late mail, handled by worker_close() */
        return;
    if (store_keys_decode(message->data, message->len, &m)) {
        log_warn(&w->log, "a peer's question for blocks can't be read bytes=%zu", message->len);
        return;
    }
    struct xfer_id id = {m.id_incarnation, m.id_counter};
    if (lease_is_open(w, id)) {
        log_warn(&w->log, "question for blocks with an id that is in use refused id=%llx-%llu",
                 (unsigned long long)id.incarnation, (unsigned long long)id.counter);
        return;
    }
    struct worker_lease *l = lease_open(w, id, reader, true);
    uint32_t n = atomic_load(&w->stopping) ? 0 : take_blocks(w, &m, refs);
    struct xfer_page *pages = mem_array(n, sizeof(*pages));
    for (uint32_t i = 0; i < n; i++) {
        held_add(w, &l->held, refs[i]);
        pages[i] = (struct xfer_page){kvpool_address(engine_pool(w->engine), refs[i]), refs[i].generation};
    }
    kvpool_unhold(engine_pool(w->engine), refs, n);
    if (n)
        xfer_lease_announce(w->xfer, id, 0, pages, n, 0, (uint16_t)w->geometry.layout.n_layers);
    store_found_encode(&(struct store_found){.n_dram = n}, tail);
    xfer_lease_finish(w->xfer, id, n, tail, sizeof(tail));
    metrics_inc(w->counters, WORKER_LENT_TOKENS, (uint64_t)n * w->geometry.layout.page_tokens);
    free(pages);
}
