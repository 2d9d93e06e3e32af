/*
 * Steps of the sizes that come while the engine serves, run before it does. A device then has the memory
 * for the largest ones (too little ends the process at the start, not under load), and has recorded decoding
 * steps (kernels.h, k_replay): a size is recorded when it comes a second time, for each of the two places
 * where arguments are put.
 *
 * What is computed does not matter: sequences read the first page again and again, and write pages behind it,
 * which nobody has yet.
 */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/engine_internal.h"

enum { TIMES_TO_RECORD = 4, MOST_RECORDED = 256 };

/* n sequences with `rows` rows each, which end at `end`. */
struct warm_step {
    uint32_t n, rows, end;
};

/* Pages that a sequence of the step writes. */
static uint32_t n_written(const struct engine *e, const struct warm_step *w)
{
    return pages_for(e, w->end) - (w->end - w->rows) / e->config.page_tokens;
}

static void fill_pages(const struct engine *e, uint32_t view, uint32_t seq, const struct warm_step *w, uint8_t **out)
{
    uint32_t n = pages_for(e, w->end), n_own = n_written(e, w), others = e->config.n_pages - 1;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t own = others && i + n_own >= n ? 1 + (seq * n_own + i + n_own - n) % others : 0;
        out[i] = ranks_page(e->ranks, view, own);
    }
}

static void run_step(struct engine *e, struct warm_step w)
{
    uint32_t n_pages = pages_for(e, w.end), n_rows = w.n * w.rows;
    uint8_t **pages = mem_array((size_t)e->n_views * w.n * n_pages, sizeof(*pages)), **at = pages;
    struct k_attn_seq *seqs = mem_array((size_t)e->n_views * w.n, sizeof(*seqs));
    for (uint32_t v = 0; v < e->n_views; v++)
        for (uint32_t i = 0; i < w.n; i++, at += n_pages) {
            seqs[v * w.n + i] = (struct k_attn_seq){
                .first_row = i * w.rows, .n_rows = w.rows, .first_pos = w.end - w.rows, .pages = at};
            fill_pages(e, v, i, &w, at);
        }
    memset(e->ids, 0, n_rows * sizeof(*e->ids));
    for (uint32_t i = 0; i < n_rows; i++)
        e->positions[i] = w.end - w.rows + i % w.rows;
    for (uint32_t i = 0; i < w.n; i++) {
        e->seq_tokens[i] = w.end;
        e->logit_rows[i] = (i + 1) * w.rows - 1;
        e->wants_logits[i] = true;
        e->draws[i] = (struct k_draw){0};
    }
    const struct forward_batch batch = {.ids = e->ids,
                                        .positions = e->positions,
                                        .n_rows = n_rows,
                                        .seqs = seqs,
                                        .n_tokens = e->seq_tokens,
                                        .n_seqs = w.n,
                                        .logit_rows = e->logit_rows,
                                        .wants_logits = e->wants_logits,
                                        .draws = e->draws,
                                        .n_logit_rows = w.n,
                                        .layers_per_call = 1};
    ranks_run(e->ranks, &batch);
    free(seqs);
    free(pages);
}

static uint32_t least(uint64_t a, uint64_t b)
{
    return (uint32_t)(a < b ? a : b);
}

void engine_warm(struct engine *e)
{
    const struct engine_config *c = &e->config;
    uint64_t arena_bytes, room = (uint64_t)c->n_pages * c->page_tokens;
    uint32_t most = least(c->max_batch, c->max_rows), longest = least(c->max_context, room);
    uint32_t rows = least(c->max_rows, longest), each = least(longest, room / most);
    const struct warm_step prompt = {1, rows, longest}, decode = {most, 1, each ? each : 1};
    uint32_t n_own = n_written(e, &prompt), n_used = 1 + (n_own > most ? n_own : most);
    uint8_t *arena = kvpool_arena(e->pool, &arena_bytes);
    for (uint32_t i = 0; i < n_used && i < c->n_pages; i++) {
        memset(arena + i * kv_layout_page_bytes(&e->layout), 0, kv_layout_page_bytes(&e->layout));
        ranks_write_page(e->ranks, i); /* a device's memory may hold anything, and what is no number spreads */
    }
    ranks_write_wait(e->ranks, ranks_write_mark(e->ranks));
    run_step(e, prompt);
    run_step(e, decode);
    for (uint32_t n = 1; n <= most && n <= MOST_RECORDED; n *= 2)
        for (uint32_t i = 0; i < TIMES_TO_RECORD; i++)
            run_step(e, (struct warm_step){n, 1, 1});
}
