/*
 * Draws from logits (k_draw, kernels.h) by selection, without sorting: the cost is a few passes over the row
 * with any settings.
 *
 * Ids that may still be drawn are kept in ascending order, which is the order of the draw. A limit that goes
 * by falling logits is found in a copy, by partitions: the result is the last candidate that is kept, and ids
 * behind that one are removed.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/state.h"
#include "kernels/scalar.h"

enum {
    HEAP_MAX = 1024, /* up to this many of the largest are found in one pass with a heap */
    FEW = 24,        /* up to this many candidates are sorted */
    CHUNK = 4096,    /* ids whose weights are summed at once if all ids may be drawn */
};

struct draw_candidate {
    uint32_t id;
    float key; /* order of selection: the logit, or how typical it is */
    uint64_t weight;
};

struct draw {
    const struct cpu_ops *ops;
    const struct k_draw *by;
    const float *x;
    uint32_t n;
    float max;
    struct draw_candidate *candidates; /* [n] */
    float *e, *surprises;              /* [n], by id */
    uint32_t *ids, n_ids;              /* [n] */
};

size_t k_draw_scratch_bytes(uint32_t n)
{
    return n * (sizeof(struct draw_candidate) + 2 * sizeof(float) + sizeof(uint32_t));
}

/* -------------------------------------------------------------- selection */

/* A larger key comes first; of equal keys the lower id. */
static inline bool before(const struct draw_candidate *a, const struct draw_candidate *b)
{
    return a->key != b->key ? a->key > b->key : a->id < b->id;
}

static void swap(struct draw_candidate *a, struct draw_candidate *b)
{
    struct draw_candidate c = *a;
    *a = *b;
    *b = c;
}

static void sort_few(struct draw_candidate *c, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++)
        for (uint32_t j = i; j && before(&c[j], &c[j - 1]); j--)
            swap(&c[j], &c[j - 1]);
}

/* Moves candidates before a pivot (median of three) to the front. Returns how many: not 0, not all. */
static uint32_t partition(struct draw_candidate *c, uint32_t n)
{
    uint32_t m = n / 2, kept = 0;
    if (before(&c[m], &c[0]))
        swap(&c[m], &c[0]);
    if (before(&c[n - 1], &c[0]))
        swap(&c[n - 1], &c[0]);
    if (before(&c[n - 1], &c[m]))
        swap(&c[n - 1], &c[m]);
    struct draw_candidate pivot = c[m];
    swap(&c[m], &c[n - 1]);
    for (uint32_t i = 0; i + 1 < n; i++)
        if (before(&c[i], &pivot))
            swap(&c[i], &c[kept++]);
    swap(&c[kept], &c[n - 1]);
    return kept;
}

static uint64_t weight_of(const struct draw_candidate *c, uint32_t n)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += c[i].weight;
    return sum;
}

/* The last of as few first candidates as together have the weight want; the very last if all have less. */
static struct draw_candidate select_weight(struct draw_candidate *c, uint32_t n, uint64_t want)
{
    while (n > FEW) {
        uint32_t m = partition(c, n);
        uint64_t left = weight_of(c, m);
        if (left >= want) {
            n = m;
        } else if (left + c[m].weight >= want || m + 1 == n) {
            return c[m];
        } else {
            want -= left + c[m].weight;
            c += m + 1;
            n -= m + 1;
        }
    }
    sort_few(c, n);
    uint32_t i = 0;
    for (; i + 1 < n && c[i].weight < want; i++)
        want -= c[i].weight;
    return c[i];
}

/* Restores a heap of the best candidates so far, with the worst of them at its top. */
static void sink(struct draw_candidate *heap, uint32_t n, uint32_t i)
{
    for (uint32_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && before(&heap[child], &heap[child + 1]))
            child++;
        if (!before(&heap[i], &heap[child]))
            return;
        swap(&heap[i], &heap[child]);
    }
}

/* The m largest numbers, in any order. Returns how many there are. */
static uint32_t find_largest(const float *x, uint32_t n, uint32_t m, struct draw_candidate *heap)
{
    uint32_t n_heap = 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct draw_candidate c = {i, x[i], 0};
        if (n_heap < m && c.key == c.key) {
            heap[n_heap++] = c;
            for (uint32_t j = n_heap / 2; n_heap == m && j-- > 0;)
                sink(heap, n_heap, j);
        } else if (n_heap == m && c.key > heap[0].key) { /* an equal key has a higher id: it loses */
            heap[0] = c;
            sink(heap, n_heap, 0);
        }
    }
    return n_heap;
}

static int by_falling_key(const void *a, const void *b)
{
    return before(a, b) ? -1 : 1;
}

uint32_t k_largest(const float *logits, uint32_t n, uint32_t m, void *scratch, uint32_t *ids_out)
{
    struct draw_candidate *heap = scratch;
    uint32_t n_found = m ? find_largest(logits, n, m, heap) : 0;
    qsort(heap, n_found, sizeof(*heap), by_falling_key);
    for (uint32_t i = 0; i < n_found; i++)
        ids_out[i] = heap[i].id;
    return n_found;
}

/* ------------------------------------------------------------------- sets */

/* Keeps ids whose exp is at least `least`; returns their weight. */
static uint64_t keep_likely(struct draw *d, float least)
{
    uint64_t sum = 0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < d->n_ids; i++) {
        uint32_t id = d->ids[i];
        d->ids[n] = id;
        n += d->e[id] >= least;
    }
    for (uint32_t i = 0; i < n; i++)
        sum += scalar_weight(d->e[d->ids[i]]);
    d->n_ids = n;
    return sum;
}

/* Keeps ids up to the candidate `last`; returns their weight. */
static uint64_t keep_before(struct draw *d, const struct draw_candidate *last, const float *keys)
{
    uint64_t sum = 0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < d->n_ids; i++) {
        uint32_t id = d->ids[i];
        const struct draw_candidate c = {id, keys[id], 0};
        if (before(last, &c))
            continue;
        d->ids[n++] = id;
        sum += scalar_weight(d->e[id]);
    }
    d->n_ids = n;
    return sum;
}

/*
 * Keeps as few of the first ids, by their keys, as have the weight want; or `want` ids, if each counts as
 * one.
 */
static uint64_t keep_first(struct draw *d, const float *keys, uint64_t want, bool counts)
{
    for (uint32_t i = 0; i < d->n_ids; i++) {
        uint32_t id = d->ids[i];
        d->candidates[i] = (struct draw_candidate){id, keys[id], counts ? 1 : scalar_weight(d->e[id])};
    }
    const struct draw_candidate last = select_weight(d->candidates, d->n_ids, want ? want : 1);
    return keep_before(d, &last, keys);
}

/*
 * Collects the ids to look at if there is no top_k. Ids that top_p or min_p would remove anyway may be left
 * out: n exps of at most (1 - top_p) / n are not enough for the share that top_p removes.
 */
static uint64_t gather(struct draw *d)
{
    const struct k_draw *by = d->by;
    uint64_t sum = d->ops->weigh(d->x, d->n, d->max, by->temperature, d->e);
    float least = 0x1p-46f;
    if (by->top_p < 0.9999f && !by->top_k)
        least = 0.99f * (1 - by->top_p) / (float)d->n;
    else if (by->top_p >= 1 && !by->top_k && by->min_p > least)
        least = by->min_p;
    d->n_ids = 0;
    for (uint32_t i = 0; i < d->n; i++) {
        d->ids[d->n_ids] = i;
        d->n_ids += d->e[i] >= least;
    }
    return sum;
}

static int by_id(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static uint64_t gather_largest(struct draw *d)
{
    uint64_t sum = 0;
    d->n_ids = find_largest(d->x, d->n, d->by->top_k, d->candidates);
    for (uint32_t i = 0; i < d->n_ids; i++) {
        uint32_t id = d->ids[i] = d->candidates[i].id;
        sum += d->ops->weigh(d->x + id, 1, d->max, d->by->temperature, d->e + id);
    }
    qsort(d->ids, d->n_ids, sizeof(*d->ids), by_id);
    return sum;
}

/* Keeps typical ids. The key is minus the distance from the expected surprise. */
static uint64_t keep_typical(struct draw *d, uint64_t sum)
{
    uint64_t expected = 0;
    float log_sum = scalar_log_weight(sum);
    for (uint32_t i = 0; i < d->n_ids; i++) {
        uint32_t id = d->ids[i];
        d->surprises[id] = scalar_surprise(log_sum, d->x[id], d->max, d->by->temperature);
        expected += scalar_expected(d->e[id], d->surprises[id]);
    }
    float mean = scalar_expectation(expected, sum);
    for (uint32_t i = 0; i < d->n_ids; i++)
        d->surprises[d->ids[i]] = -fabsf(d->surprises[d->ids[i]] - mean);
    return keep_first(d, d->surprises, scalar_share(sum, (double)d->by->typical_p), false);
}

/* ------------------------------------------------------------------- draw */

/* Draws if all ids may be drawn: sums chunks first, so that only one chunk is searched number by number. */
static uint32_t draw_any(const struct draw *d, uint64_t at)
{
    uint64_t sum = 0;
    uint32_t first = 0, id = 0;
    for (;; first += CHUNK) {
        uint32_t n = d->n - first < CHUNK ? d->n - first : CHUNK;
        uint64_t chunk = d->ops->weigh(d->x + first, n, d->max, d->by->temperature, d->e + first);
        if (at < sum + chunk)
            break;
        sum += chunk;
    }
    for (id = first; at >= (sum += scalar_weight(d->e[id])); id++)
        ;
    return id;
}

static uint32_t draw_kept(const struct draw *d, uint64_t at)
{
    uint64_t sum = 0;
    uint32_t i = 0;
    while (at >= (sum += scalar_weight(d->e[d->ids[i]])))
        i++;
    return d->ids[i];
}

static uint32_t draw(struct draw *d)
{
    const struct k_draw *by = d->by;
    bool few = by->top_k && by->top_k <= HEAP_MAX, typical = by->typical_p > 0 && by->typical_p < 1;
    if (!by->top_k && by->top_p >= 1 && by->min_p <= 0 && !typical)
        return draw_any(d, scalar_share(d->ops->weigh(d->x, d->n, d->max, by->temperature, d->e), by->u));
    uint64_t sum = few ? gather_largest(d) : gather(d);
    if (by->top_k && !few && by->top_k < d->n_ids)
        sum = keep_first(d, d->x, by->top_k, true);
    if (by->top_p < 1)
        sum = keep_first(d, d->x, scalar_share(sum, (double)by->top_p), false);
    if (by->min_p > 0)
        sum = keep_likely(d, by->min_p);
    if (typical)
        sum = keep_typical(d, sum);
    return draw_kept(d, scalar_share(sum, by->u));
}

static uint32_t draw_row(const struct cpu_ops *ops, const float *x, uint32_t n, uint32_t best, const struct k_draw *by,
                         void *scratch)
{
    struct draw d = {.ops = ops, .by = by, .x = x, .n = n, .max = x[best], .candidates = scratch};
    if (by->temperature <= 0 || !(fabsf(d.max) < INFINITY))
        return best;
    d.e = (float *)(void *)(d.candidates + n);
    d.surprises = d.e + n;
    d.ids = (uint32_t *)(void *)(d.surprises + n);
    return draw(&d);
}

uint32_t k_draw(const float *logits, uint32_t n, uint32_t best, const struct k_draw *d, void *scratch)
{
    return draw_row(cpu_ops_get(ISA_AUTO), logits, n, best, d, scratch);
}

struct sample_run {
    const struct cpu_ops *ops;
    const float *logits;
    uint32_t n;
    const struct k_draw *draws;
    struct k_sampled *out;
    uint8_t *scratch; /* [n_threads][scratch_bytes] */
    size_t scratch_bytes;
};

static void run_sample(void *arg, uint32_t row, uint32_t thread)
{
    const struct sample_run *r = arg;
    const float *x = r->logits + (size_t)row * r->n;
    uint32_t best = cpu_argmax(r->ops, x, r->n);
    uint32_t id = draw_row(r->ops, x, r->n, best, &r->draws[row], r->scratch + thread * r->scratch_bytes);
    r->out[row] = (struct k_sampled){id, x[id], r->ops->logsumexp(x, r->n)};
}

void cpu_sample_rows(struct kernels *head, const float *logits, uint32_t n, uint32_t n_rows, const struct k_draw *draws,
                     struct k_sampled *out)
{
    struct cpu_kernels *k = cpu_of(head);
    struct sample_run r = {k->ops, logits, n, draws, out, NULL, (k_draw_scratch_bytes(n) + 63) / 64 * 64};
    r.scratch = kernels_scratch(k, pool_n_threads(k->pool) * r.scratch_bytes);
    pool_run(k->pool, run_sample, &r, n_rows);
}
