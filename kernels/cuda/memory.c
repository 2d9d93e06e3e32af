/*
 * Memory of the device, and copies between it and the host.
 *
 * The driver copies without waiting only from and to pinned memory, so everything goes through pinned
 * buffers: writes through two buffers in turn, k_put through an arena, reads through a buffer that
 * k_finish empties. k_map pins its host memory if the system allows it; reads then go there directly.
 * Asynchronous reads (k_read_aside) and writes (k_write_pieces_aside) use a stream each, which waits for
 * the operations that were queued before them.
 *
 * There are two arenas in turn: the host fills one while the device may still work with the one of the
 * step before. An arena that is too small is set aside, not moved, because queued operations have
 * addresses in it; the larger one serves from then on.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "kernels/cuda/state.h"

#undef NDEBUG
#include <assert.h>

enum {
    STAGING_BYTES = 4 << 20, /* bytes of each of the two buffers */
    SLICE_BYTES = 256 << 10, /* bytes that a thread copies into a buffer at a time */
    MAX_PENDING = 256,
    ARENA_BYTES = 1 << 20, /* initial size */
};

static size_t aligned(size_t len_bytes)
{
    return (len_bytes + CUDA_CACHE_LINE - 1) / CUDA_CACHE_LINE * CUDA_CACHE_LINE;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static void event_open(cudaEvent_t *out)
{
    CUDA_MUST(cudaEventCreateWithFlags(out, cudaEventDisableTiming));
}

static enum td_status arena_fill(struct cuda_arena *a, size_t capacity)
{
    if (cudaMallocHost((void **)&a->host, capacity) != cudaSuccess ||
        cudaMalloc((void **)&a->device, capacity) != cudaSuccess) {
        cudaGetLastError();
        return TD_ERR_NO_MEMORY;
    }
    a->capacity = capacity;
    return TD_OK;
}

static void free_pinned(void *host)
{
    if (host)
        CUDA_MUST(cudaFreeHost(host));
}

static void arena_release(void *host, void *device)
{
    free_pinned(host);
    CUDA_MUST(cudaFree(device));
}

static void arena_begin(struct cuda_arena *a)
{
    CUDA_MUST(cudaEventSynchronize(a->over));
    for (uint32_t i = 0; i < a->n_retired; i++)
        arena_release(a->retired[2 * i], a->retired[2 * i + 1]);
    a->n_retired = 0;
    a->used = a->sent = 0;
}

static void arena_grow(struct cuda_arena *a, size_t len_bytes)
{
    a->retired = mem_resize(a->retired, a->n_retired + 1, 2 * sizeof(void *));
    a->retired[2 * a->n_retired] = a->host;
    a->retired[2 * a->n_retired + 1] = a->device;
    a->n_retired++;
    size_t capacity = 2 * (a->capacity > len_bytes ? a->capacity : len_bytes);
    if (arena_fill(a, capacity))
        cuda_die(__func__, "no memory");
    a->used = a->sent = 0;
}

/* Takes room on both sides, at the same offset. */
static void arena_take(struct cuda *c, size_t len_bytes, void **host_out, void **device_out)
{
    struct cuda_arena *a = &c->arenas[c->arena];
    size_t len = aligned(len_bytes);
    c->is_idle = false;
    if (len > a->capacity - a->used) {
        cuda_send_puts(c);
        arena_grow(a, len);
    }
    *host_out = a->host + a->used;
    *device_out = a->device + a->used;
    a->used += len;
}

static void send(struct cuda *c, void *to, const void *pinned, size_t len_bytes)
{
    CUDA_MUST(cudaMemcpyAsync(to, pinned, len_bytes, cudaMemcpyHostToDevice, c->stream));
}

/* A mapped file is read from disk at first access. Several threads read several places at the same time. */
static uint32_t count_loaders(void)
{
    enum { MOST = 8 };
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > MOST ? MOST : (uint32_t)n;
}

enum td_status cuda_memory_open(struct cuda *c, struct td_error *error_out)
{
    c->loaders = pool_open(count_loaders());
    if (cudaStreamCreateWithFlags(&c->aside.stream, cudaStreamNonBlocking) != cudaSuccess)
        return td_fail(error_out, TD_ERR_DEVICE, "CUDA device %d: no second stream", c->ordinal);
    if (cudaStreamCreateWithFlags(&c->writes.stream, cudaStreamNonBlocking) != cudaSuccess)
        return td_fail(error_out, TD_ERR_DEVICE, "CUDA device %d: no third stream", c->ordinal);
    event_open(&c->aside.queued);
    event_open(&c->writes.queued);
    for (uint32_t i = 0; i < K_MAX_MARKS; i++) {
        event_open(&c->aside.marks[i]);
        event_open(&c->writes.marks[i]);
    }
    for (uint32_t i = 0; i < 2; i++) {
        event_open(&c->staging.sent[i]);
        event_open(&c->arenas[i].over);
        if (cudaMallocHost((void **)&c->staging.host[i], STAGING_BYTES) != cudaSuccess ||
            arena_fill(&c->arenas[i], ARENA_BYTES))
            return td_fail(error_out, TD_ERR_NO_MEMORY, "device cuda: no memory for copies");
    }
    if (cudaMallocHost((void **)&c->reads.host, CUDA_READS_BYTES) != cudaSuccess)
        return td_fail(error_out, TD_ERR_NO_MEMORY, "device cuda: no memory for copies");
    c->reads.pending = mem_array(MAX_PENDING, sizeof(*c->reads.pending));
    return TD_OK;
}

/* A stream for copies, with its events; what was not opened is NULL. */
static void stream_close(cudaStream_t stream, cudaEvent_t queued, const cudaEvent_t marks[K_MAX_MARKS])
{
    if (stream) {
        CUDA_MUST(cudaStreamSynchronize(stream));
        CUDA_MUST(cudaStreamDestroy(stream));
    }
    if (queued)
        CUDA_MUST(cudaEventDestroy(queued));
    for (uint32_t i = 0; i < K_MAX_MARKS; i++)
        if (marks[i])
            CUDA_MUST(cudaEventDestroy(marks[i]));
}

void cuda_memory_close(struct cuda *c)
{
    pool_close(c->loaders);
    stream_close(c->aside.stream, c->aside.queued, c->aside.marks);
    stream_close(c->writes.stream, c->writes.queued, c->writes.marks);
    for (uint32_t i = 0; i < 2; i++) {
        struct cuda_arena *a = &c->arenas[i];
        if (a->over) {
            arena_begin(a);
            CUDA_MUST(cudaEventDestroy(a->over));
            CUDA_MUST(cudaEventDestroy(c->staging.sent[i]));
        }
        arena_release(a->host, a->device);
        free(a->retired);
        free_pinned(c->staging.host[i]);
    }
    free_pinned(c->reads.host);
    free(c->reads.pending);
    free(c->mappings);
    CUDA_MUST(cudaFree(c->scratch.at));
    CUDA_MUST(cudaFree(c->rounded.at));
}

static void *room(struct cuda *c, struct cuda_room *r, size_t len_bytes)
{
    if (len_bytes <= r->len_bytes)
        return r->at;
    cuda_replay_forget(c);
    size_t twice = 2 * r->len_bytes, len = aligned(len_bytes > twice ? len_bytes : twice);
    CUDA_MUST(cudaFree(r->at)); /* waits for operations that use it */
    r->at = NULL;
    CUDA_MUST(cudaMalloc(&r->at, len));
    r->len_bytes = len;
    return r->at;
}

void *cuda_scratch(struct cuda *c, size_t len_bytes)
{
    return room(c, &c->scratch, len_bytes);
}

void *cuda_round_too(struct cuda *c, const float *rows, uint32_t n_rows, size_t n)
{
    if (c->compute != COMPUTE_BF16 || n % CUDA_SLAB_NUMBERS || (uintptr_t)rows % 16)
        return NULL;
    c->rounded_now = (struct cuda_rounded){rows, n_rows, (uint32_t)n};
    return room(c, &c->rounded, n_rows * n * sizeof(uint16_t));
}

bool cuda_memory(struct kernels *k, uint64_t *free_out, uint64_t *total_out)
{
    size_t free_bytes, total_bytes;
    cuda_enter(k);
    CUDA_MUST(cudaMemGetInfo(&free_bytes, &total_bytes));
    *free_out = free_bytes;
    *total_out = total_bytes;
    return true;
}

enum td_status cuda_alloc(struct kernels *k, size_t len_bytes, void **out)
{
    cuda_enter(k);
    void *p = NULL;
    cudaError_t e = cudaMalloc(&p, len_bytes ? len_bytes : 1);
    if (e == cudaErrorMemoryAllocation) {
        cudaGetLastError(); /* clears the error, so that the next operation does not see it */
        return TD_ERR_NO_MEMORY;
    }
    CUDA_MUST(e);
    *out = p;
    return TD_OK;
}

void cuda_free(struct kernels *k, void *p)
{
    cuda_enter(k);
    CUDA_MUST(cudaFree(p));
}

enum td_status cuda_map(struct kernels *k, const void *host, size_t len_bytes, size_t part_bytes, void **out)
{
    struct cuda *c = cuda_enter(k);
    struct cuda_mapping m = {.host = (void *)(uintptr_t)host};
    enum td_status s = cuda_alloc(k, part_bytes, &m.device);
    if (s)
        return s;
    if (cudaHostRegister(m.host, len_bytes, cudaHostRegisterDefault) != cudaSuccess) {
        cudaGetLastError(); /* a mapped file, or too much memory: reads go through a buffer */
        m.host = NULL;
    }
    c->mappings = mem_resize(c->mappings, c->n_mappings + 1, sizeof(*c->mappings));
    c->mappings[c->n_mappings++] = m;
    *out = m.device;
    return TD_OK;
}

bool cuda_is_pinned(const struct kernels *k, const void *mapped)
{
    const struct cuda *c = (const struct cuda *)k;
    for (uint32_t i = 0; i < c->n_mappings; i++)
        if (c->mappings[i].device == mapped)
            return c->mappings[i].host != NULL;
    return false;
}

void cuda_unmap(struct kernels *k, void *mapped)
{
    struct cuda *c = cuda_enter(k);
    for (uint32_t i = 0; i < c->n_mappings; i++) {
        if (c->mappings[i].device != mapped)
            continue;
        cuda_free(k, mapped);
        if (c->mappings[i].host)
            CUDA_MUST(cudaHostUnregister(c->mappings[i].host));
        c->mappings[i] = c->mappings[--c->n_mappings];
        return;
    }
    assert(!mapped);
}

/* Copies everything that was put since the last call, at once. Called before each operation. */
void cuda_send_puts(struct cuda *c)
{
    struct cuda_arena *a = &c->arenas[c->arena];
    if (a->sent == a->used)
        return;
    send(c, a->device + a->sent, a->host + a->sent, a->used - a->sent);
    a->sent = a->used;
}

const void *cuda_put(struct kernels *k, const void *host, size_t len_bytes)
{
    struct cuda *c = cuda_select(k);
    void *pinned = NULL, *device = NULL;
    arena_take(c, len_bytes, &pinned, &device);
    if (len_bytes)
        memcpy(pinned, host, len_bytes);
    return device;
}

void cuda_step(struct kernels *k)
{
    struct cuda *c = cuda_enter(k);
    if (!c->is_idle) {
        CUDA_MUST(cudaEventRecord(c->arenas[c->arena].over, c->stream));
        c->arena = !c->arena;
    }
    arena_begin(&c->arenas[c->arena]);
    c->batch = (struct cuda_batch){0};
}

static void staging_turn(struct cuda *c)
{
    struct cuda_staging *s = &c->staging;
    CUDA_MUST(cudaEventRecord(s->sent[s->turn], c->stream));
    s->turn = !s->turn;
    CUDA_MUST(cudaEventSynchronize(s->sent[s->turn]));
    s->used = 0;
}

/* Copies n bytes of the pieces, counted as if there were no gaps, from byte `first` on. */
static void collect(uint8_t *to, const uint8_t *host, const struct k_pieces *p, size_t first, size_t n)
{
    for (size_t done = 0, len; done < n; done += len) {
        size_t piece = (first + done) / p->piece_bytes, at = (first + done) % p->piece_bytes;
        len = smaller(n - done, p->piece_bytes - at);
        memcpy(to + done, host + piece * p->stride_bytes + at, len);
    }
}

struct collection {
    uint8_t *to;
    const uint8_t *host;
    const struct k_pieces *p;
    size_t first, len_bytes;
};

static void run_collect(void *arg, uint32_t slice, uint32_t thread)
{
    (void)thread;
    const struct collection *t = arg;
    size_t at = (size_t)slice * SLICE_BYTES;
    collect(t->to + at, t->host, t->p, t->first + at, smaller(t->len_bytes - at, SLICE_BYTES));
}

void cuda_write(struct kernels *k, void *to, const void *host, size_t len_bytes)
{
    cuda_write_pieces(k, to, host, &(struct k_pieces){len_bytes, len_bytes, 1});
}

void cuda_write_pieces(struct kernels *k, void *to, const void *host, const struct k_pieces *p)
{
    struct cuda *c = cuda_enter(k);
    struct cuda_staging *s = &c->staging;
    size_t len_bytes = p->n * p->piece_bytes;
    for (size_t done = 0, n; done < len_bytes; done += n) {
        if (s->used == STAGING_BYTES)
            staging_turn(c);
        n = smaller(len_bytes - done, STAGING_BYTES - s->used);
        uint8_t *pinned = s->host[s->turn] + s->used;
        struct collection t = {pinned, host, p, done, n};
        pool_run(c->loaders, run_collect, &t, (uint32_t)((n + SLICE_BYTES - 1) / SLICE_BYTES));
        send(c, (uint8_t *)to + done, pinned, n);
        s->used += aligned(n);
    }
}

static bool is_pinned(const void *host)
{
    struct cudaPointerAttributes attributes;
    CUDA_MUST(cudaPointerGetAttributes(&attributes, host));
    return attributes.type == cudaMemoryTypeHost;
}

static void deliver(struct cuda *c)
{
    struct cuda_reads *r = &c->reads;
    CUDA_MUST(cudaStreamSynchronize(c->stream));
    for (uint32_t i = 0; i < r->n_pending; i++)
        memcpy(r->pending[i].to, r->pending[i].from, r->pending[i].len_bytes);
    r->n_pending = 0;
    r->used = 0;
}

void cuda_read(struct kernels *k, void *host, const void *from, size_t len_bytes)
{
    struct cuda *c = cuda_enter(k);
    struct cuda_reads *r = &c->reads;
    if (is_pinned(host)) {
        CUDA_MUST(cudaMemcpyAsync(host, from, len_bytes, cudaMemcpyDeviceToHost, c->stream));
        return;
    }
    for (size_t done = 0, n; done < len_bytes; done += n) {
        if (r->used == CUDA_READS_BYTES || r->n_pending == MAX_PENDING)
            deliver(c);
        n = smaller(len_bytes - done, CUDA_READS_BYTES - r->used);
        struct cuda_read *read = &r->pending[r->n_pending++];
        *read = (struct cuda_read){(uint8_t *)host + done, r->host + r->used, n};
        CUDA_MUST(
            cudaMemcpyAsync(r->host + r->used, (const uint8_t *)from + done, n, cudaMemcpyDeviceToHost, c->stream));
        r->used += aligned(n);
    }
}

void cuda_finish(struct kernels *k)
{
    struct cuda *c = cuda_enter(k);
    deliver(c);
    CUDA_MUST(cudaStreamSynchronize(c->aside.stream));
    c->is_idle = true;
    c->aside.n_marks = 0;
    c->aside.has_begun = c->aside.is_behind = false;
}

void cuda_read_aside(struct kernels *k, void *host, const void *from, const struct k_pieces *p)
{
    struct cuda *c = cuda_enter(k);
    struct cuda_aside *a = &c->aside;
    if (!is_pinned(host)) {
        for (uint32_t i = 0; i < p->n; i++)
            cuda_read(k, (uint8_t *)host + i * p->stride_bytes, (const uint8_t *)from + i * p->piece_bytes,
                      p->piece_bytes);
        a->is_behind = true;
        return;
    }
    if (!a->has_begun) {
        CUDA_MUST(cudaEventRecord(a->queued, c->stream));
        CUDA_MUST(cudaStreamWaitEvent(a->stream, a->queued, 0));
        a->has_begun = true;
    }
    CUDA_MUST(cudaMemcpy2DAsync(host, p->stride_bytes, from, p->piece_bytes, p->piece_bytes, p->n,
                                cudaMemcpyDeviceToHost, a->stream));
}

uint32_t cuda_mark(struct kernels *k)
{
    struct cuda_aside *a = &cuda_enter(k)->aside;
    assert(a->n_marks < K_MAX_MARKS);
    CUDA_MUST(cudaEventRecord(a->marks[a->n_marks], a->stream));
    a->has_begun = false;
    return a->n_marks++;
}

bool cuda_passed(struct kernels *k, uint32_t mark)
{
    const struct cuda_aside *a = &cuda_enter(k)->aside;
    cudaError_t e = a->is_behind ? cudaErrorNotReady : cudaEventQuery(a->marks[mark]);
    if (e != cudaErrorNotReady)
        CUDA_MUST(e);
    return e == cudaSuccess;
}

void cuda_wait(struct kernels *k, uint32_t mark)
{
    struct cuda *c = cuda_enter(k);
    if (c->aside.is_behind)
        deliver(c);
    c->aside.is_behind = false;
    CUDA_MUST(cudaEventSynchronize(c->aside.marks[mark]));
}

void cuda_write_aside(struct kernels *k, void *to, const void *host, const struct k_pieces *p)
{
    struct cuda *c = cuda_select(k);
    struct cuda_writes *w = &c->writes;
    if (!is_pinned(host)) {
        cuda_write_pieces(k, to, host, p);
        return;
    }
    if (!w->has_begun) {
        CUDA_MUST(cudaEventRecord(w->queued, c->stream));
        CUDA_MUST(cudaStreamWaitEvent(w->stream, w->queued, 0));
        w->has_begun = true;
    }
    CUDA_MUST(cudaMemcpy2DAsync(to, p->piece_bytes, host, p->stride_bytes, p->piece_bytes, p->n, cudaMemcpyHostToDevice,
                                w->stream));
}

uint64_t cuda_write_mark(struct kernels *k)
{
    struct cuda_writes *w = &cuda_select(k)->writes;
    if (!w->has_begun)
        return w->n_marks;
    if (w->n_marks - w->n_passed == K_MAX_MARKS)
        cuda_write_wait(k, w->n_passed + 1);
    CUDA_MUST(cudaEventRecord(w->marks[w->n_marks % K_MAX_MARKS], w->stream));
    w->has_begun = false;
    return ++w->n_marks;
}

bool cuda_written(struct kernels *k, uint64_t mark)
{
    struct cuda_writes *w = &cuda_select(k)->writes;
    for (; w->n_passed < mark && w->n_passed < w->n_marks; w->n_passed++) {
        cudaError_t e = cudaEventQuery(w->marks[w->n_passed % K_MAX_MARKS]);
        if (e == cudaErrorNotReady)
            return false;
        CUDA_MUST(e);
    }
    return true;
}

void cuda_write_wait(struct kernels *k, uint64_t mark)
{
    struct cuda_writes *w = &cuda_select(k)->writes;
    for (; w->n_passed < mark && w->n_passed < w->n_marks; w->n_passed++)
        CUDA_MUST(cudaEventSynchronize(w->marks[w->n_passed % K_MAX_MARKS]));
}

static uint32_t power_of_two(uint32_t n)
{
    uint32_t p = 1;
    while (p < n)
        p *= 2;
    return p;
}

/* Computes sizes for launches; returns the number of pages of all sequences. */
static size_t size_batch(struct cuda_batch *b, uint32_t page_tokens)
{
    size_t n_pages = 0;
    uint32_t n_runs = 0;
    for (uint32_t i = 0; i < b->n_seqs; i++) {
        const struct k_attn_seq *s = &b->host[i];
        uint32_t end = s->first_pos + s->n_rows;
        assert(s->n_rows && s->first_row == b->n_rows);
        n_pages += (end + page_tokens - 1) / page_tokens;
        b->n_rows += s->n_rows;
        b->max_rows = s->n_rows > b->max_rows ? s->n_rows : b->max_rows;
        b->max_end = end > b->max_end ? end : b->max_end;
        n_runs += (end - 1) / CUDA_SPLIT + 1;
    }
    if (b->n_rows == b->n_seqs)
        b->single_runs = n_runs > b->n_seqs ? power_of_two(n_runs) : n_runs;
    return n_pages;
}

/* Pages come last: their number changes no other address. */
void cuda_put_seqs(struct kernels *k, const struct k_attn_seq *seqs, uint32_t n_seqs, uint32_t page_tokens)
{
    struct cuda *c = cuda_select(k);
    struct cuda_batch b = {.host = seqs, .n_seqs = n_seqs};
    size_t n_all_pages = size_batch(&b, page_tokens);
    size_t seqs_bytes = n_seqs * sizeof(struct cuda_seq), rows_bytes = aligned(b.n_rows * sizeof(uint32_t));
    void *pinned = NULL, *device = NULL;
    arena_take(c, seqs_bytes + rows_bytes + n_all_pages * sizeof(uint8_t *), &pinned, &device);
    struct cuda_seq *flat = pinned;
    uint32_t *row_seq = (uint32_t *)(void *)(flat + n_seqs);
    uint8_t **pages = (uint8_t **)(void *)((uint8_t *)row_seq + rows_bytes);
    uint32_t n_pages = 0;
    for (uint32_t i = 0; i < n_seqs; i++) {
        const struct k_attn_seq *s = &seqs[i];
        uint32_t n = (s->first_pos + s->n_rows + page_tokens - 1) / page_tokens;
        flat[i] = (struct cuda_seq){s->first_row, s->n_rows, s->first_pos, n_pages};
        memcpy(pages + n_pages, s->pages, n * sizeof(*pages));
        n_pages += n;
        for (uint32_t row = 0; row < s->n_rows; row++)
            row_seq[s->first_row + row] = i;
    }
    b.seqs = device;
    b.row_seq = (const uint32_t *)(const void *)(b.seqs + n_seqs);
    b.pages = (uint8_t *const *)(const void *)((const uint8_t *)b.row_seq + rows_bytes);
    c->batch = b;
}
