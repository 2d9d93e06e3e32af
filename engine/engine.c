/*
 * Steps: admit, plan, run one batch, sample.
 *
 * A step never waits: sequences that lack something are left out. A prompt gets all its pages at once when it
 * is admitted, in order of arrival. A decoding sequence takes one page when it crosses the end of a page. If
 * there is none, the newest running sequence gives up all its pages (its full blocks stay cached) and waits
 * to be admitted again. So the oldest running sequence always makes progress. A sequence with goal
 * FIRST_TOKEN is never preempted: it needs no page after admission, and its pages may be announced to a
 * reader.
 *
 * Order in a step: pages are taken before the batch is planned; the batch is fixed until finish_rows(); KV is
 * counted (seq_computed) before tokens are appended, because a token may end or preempt its sequence.
 */
#include "engine/engine_internal.h"

#include <assert.h>
#include <math.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { PROMPT_LOGPROB_ROWS = 64, MIN_PART_BYTES = 64 << 10 };

/* ------------------------------------------------------------ open, close */

/* Hashes the model's fingerprint, the page layout, the numerics and, if packed, the format of weights. */
static void make_fingerprint(struct engine *e)
{
    struct block_key model = {0};
    if (!e->sim)
        model = model_fingerprint(e->config.model);
    uint8_t layout[KV_LAYOUT_WIRE_BYTES], full[32];
    kv_layout_encode(&e->layout, layout);
    struct bytes b = {0};
    bytes_append(&b, model.b, BLOCK_KEY_BYTES);
    bytes_append(&b, layout, sizeof(layout));
    bytes_printf(&b, "%s", engine_numerics(e));
    /* Weights as stored add nothing: the model's own fingerprint covers them. */
    if (e->config.weights)
        bytes_printf(&b, " %s", k_weights_name(e->config.weights));
    EVP_Digest(b.data, b.len, full, NULL, EVP_sha256(), NULL);
    bytes_free(&b);
    memcpy(e->fingerprint.b, full, BLOCK_KEY_BYTES);
}

/* Predicts the duration of steps before any was measured. */
static struct cost_model first_cost(const struct sim_cost *sim)
{
    struct cost_profile p;
    if (!sim) {
        cost_profile_parse(COST_GUESS, &p, NULL);
        return cost_make(&p);
    }
    p = sim->step_ns;
    for (int i = 0; i < 3; i++) {
        p.prefill[i] *= 1e-6;
        p.decode[i] *= 1e-6;
    }
    return cost_make(&p);
}

/* Fills in defaults and validates. TD_ERR_INVALID names the field. */
static enum td_status check_config(struct engine *e, struct td_error *error_out)
{
    struct engine_config *c = &e->config;
    uint64_t pool_tokens = (uint64_t)c->n_pages * c->page_tokens;
    if (!c->max_context)
        c->max_context = pool_tokens < e->model.max_positions ? (uint32_t)pool_tokens : e->model.max_positions;
    if (c->max_context > e->model.max_positions)
        return td_fail(error_out, TD_ERR_INVALID, "max-context %u is over the model's %u positions", c->max_context,
                       e->model.max_positions);
    if (!c->n_pages || !c->max_batch || c->max_rows < c->max_batch)
        return td_fail(error_out, TD_ERR_INVALID, "no pages, no batch, or fewer rows a step (%u) than sequences (%u)",
                       c->max_rows, c->max_batch);
    if (!c->chunk_tokens || c->chunk_tokens > c->max_rows)
        c->chunk_tokens = c->max_rows;
    if (!c->announce_calls)
        c->announce_calls = 4;
    /* Small pages are announced whole: overlapping their transfer with later layers would not pay. */
    uint64_t parts = kv_layout_page_bytes(&e->layout) / MIN_PART_BYTES;
    if (c->announce_calls > parts)
        c->announce_calls = parts ? (uint32_t)parts : 1;
    if (c->announce_calls > K_MAX_MARKS)
        c->announce_calls = K_MAX_MARKS;
    return kv_layout_check(&e->layout, error_out);
}

static enum td_status open_arrays(struct engine *e, struct td_error *error_out)
{
    const struct engine_config *c = &e->config;
    void *logits;
    e->max_logit_rows = c->max_batch + PROMPT_LOGPROB_ROWS;
    e->ids = mem_array(c->max_rows, sizeof(*e->ids));
    e->positions = mem_array(c->max_rows, sizeof(*e->positions));
    e->logit_rows = mem_array(e->max_logit_rows, sizeof(*e->logit_rows));
    e->wants_logits = mem_array(e->max_logit_rows, sizeof(*e->wants_logits));
    e->draws = mem_array(e->max_logit_rows, sizeof(*e->draws));
    e->sampled = mem_array(e->max_logit_rows, sizeof(*e->sampled));
    e->seq_tokens = mem_array(c->max_batch, sizeof(*e->seq_tokens));
    e->adapter_rows = mem_array(c->n_adapters + 1ul, sizeof(*e->adapter_rows));
    e->batch = mem_array(c->max_batch, sizeof(struct seq *));
    e->items = mem_array(c->max_batch, sizeof(*e->items));
    e->item_rows = mem_array(c->max_batch, sizeof(*e->item_rows));
    enum td_status s = mem_try((size_t)e->max_logit_rows * e->model.vocab_size * sizeof(float), &logits);
    if (s)
        return td_fail(error_out, s, "no memory for logits of %u rows", e->max_logit_rows);
    e->logits = logits;
    return TD_OK;
}

static enum td_status open_pool(struct engine *e, struct td_error *error_out)
{
    struct engine_config *c = &e->config;
    const struct kvpool_config pool = {.layout = &e->layout,
                                       .n_pages = c->n_pages,
                                       .quarantine_ns = c->quarantine_ns,
                                       .clock = c->clock,
                                       .on_block = c->callbacks.on_block,
                                       .user = c->callbacks.user};
    enum td_status s = kvpool_open(&pool, &e->pool);
    return s ? td_fail(error_out, s, "no memory for a pool of %u pages of %zu bytes", c->n_pages,
                       kv_layout_page_bytes(&e->layout))
             : TD_OK;
}

/* Opens the forward passes, and publishes packed weights only after the model was found to be whole. */
static enum td_status open_ranks(struct engine *e, struct td_error *error_out)
{
    struct engine_config *c = &e->config;
    uint64_t arena_bytes;
    const struct ranks_config ranks = {.kernels = c->kernels,
                                       .n_tensor = c->n_tensor,
                                       .n_pipeline = c->n_pipeline,
                                       .log = c->log,
                                       .forward = {.model = c->model,
                                                   .compute = c->compute,
                                                   .weights = c->weights,
                                                   .adapters = c->adapters,
                                                   .n_adapters = c->n_adapters,
                                                   .layout = &e->layout,
                                                   .arena = kvpool_arena(e->pool, &arena_bytes),
                                                   .n_pages = c->n_pages,
                                                   .max_rows = c->max_rows,
                                                   .max_positions = c->max_context,
                                                   .logits = e->logits,
                                                   .sampled = e->sampled,
                                                   .max_logit_rows = e->max_logit_rows,
                                                   .on_load = c->callbacks.on_load,
                                                   .load_user = c->callbacks.user,
                                                   .weight_cache = c->weight_cache,
                                                   .log = c->log,
                                                   .rank = {.piece_rows = c->piece_rows}}};
    enum td_status s = ranks_open(&ranks, &e->ranks, error_out);
    if (!s)
        s = model_check_all_asked(c->model, error_out);
    if (s)
        return s;
    ranks_share_weights(e->ranks);
    e->n_views = ranks_n_views(e->ranks);
    return TD_OK;
}

static enum td_status open_parts(struct engine *e, struct td_error *error_out)
{
    struct engine_config *c = &e->config;
    e->n_views = 1;
    enum td_status s = open_arrays(e, error_out);
    if (!s)
        s = open_pool(e, error_out);
    if (!s && c->sim)
        s = forward_sim_open(&e->layout, e->model.vocab_size, c->sim, c->clock, &e->sim, error_out);
    else if (!s)
        s = open_ranks(e, error_out);
    if (s)
        return s;
    e->attn_seqs = mem_array((size_t)e->n_views * c->max_batch, sizeof(*e->attn_seqs));
    e->sampler = sampler_open(e->model.vocab_size);
    return TD_OK;
}

enum td_status engine_open(const struct engine_config *config, struct engine **out, struct td_error *error_out)
{
    struct engine *e = mem_zalloc(sizeof(*e));
    TAILQ_INIT(&e->seqs);
    e->config = *config;
    e->model = config->sim ? *config->shape : *model_config(config->model);
    e->layout = model_config_layout(&e->model, config->kv_dtype, config->page_tokens);
    e->cost = first_cost(config->sim);
    enum td_status s = check_config(e, error_out);
    if (!s)
        s = open_parts(e, error_out);
    if (s) {
        engine_close(e);
        return s;
    }
    snprintf(e->numerics, sizeof(e->numerics), "sim");
    if (!e->sim)
        k_numerics(e->config.kernels[0], e->config.compute, e->numerics);
    make_fingerprint(e);
    if (!e->sim && kernels_config(e->config.kernels[0])->device != DEVICE_CPU)
        engine_warm(e);
    *out = e;
    return TD_OK;
}

void engine_close(struct engine *e)
{
    if (!e)
        return;
    assert(TAILQ_EMPTY(&e->seqs));
    sampler_close(e->sampler);
    ranks_close(e->ranks);
    forward_sim_close(e->sim);
    kvpool_close(e->pool);
    free(e->ids);
    free(e->positions);
    free(e->logit_rows);
    free(e->wants_logits);
    free(e->draws);
    free(e->sampled);
    free(e->masks);
    free(e->attn_seqs);
    free(e->seq_tokens);
    free(e->adapter_rows);
    free(e->batch);
    free(e->items);
    free(e->item_rows);
    free(e->logits);
    free(e);
}

struct kvpool *engine_pool(struct engine *e)
{
    return e->pool;
}

const struct kv_layout *engine_layout(const struct engine *e)
{
    return &e->layout;
}

uint32_t engine_max_context(const struct engine *e)
{
    return e->config.max_context;
}

uint64_t engine_weight_bytes(const struct engine *e)
{
    return e->ranks ? ranks_weight_bytes(e->ranks) : 0;
}

double engine_measure_gathers(struct engine *e, uint32_t n_rows)
{
    return e->ranks ? ranks_measure_gathers(e->ranks, n_rows, e->config.clock) : 0;
}

const char *engine_numerics(const struct engine *e)
{
    return e->numerics;
}

struct block_key engine_fingerprint(const struct engine *e)
{
    return e->fingerprint;
}

struct engine_load engine_load(const struct engine *e)
{
    struct engine_load l = {0};
    const struct seq *s;
    TAILQ_FOREACH (s, &e->seqs, in_engine) {
        l.running += s->state == SEQ_RUNNING;
        l.waiting += s->state == SEQ_WAITING;
        l.filling += s->state == SEQ_FILLING;
        if (s->state != SEQ_ENDED && s->goal != SEQ_ADOPT && s->n_computed < s->n_prompt)
            l.waiting_tokens += s->n_prompt - s->n_computed;
    }
    return l;
}

struct cost_step engine_last_step(const struct engine *e)
{
    return e->last_step;
}

/* -------------------------------------------------------------- the batch */

/* Admits waiting sequences while there are pages and room in the batch. */
static void admit(struct engine *e)
{
    struct seq *s, *next;
    TAILQ_FOREACH_SAFE (s, &e->seqs, in_engine, next) {
        if (e->n_active >= e->config.max_batch)
            return;
        if (s->state == SEQ_WAITING && !seq_admit(s))
            return; /* nobody overtakes the sequence that lacks pages */
    }
}

/* The next victim of a preemption; NULL if there is none. */
static struct seq *newest_running(struct engine *e)
{
    struct seq *s;
    TAILQ_FOREACH_REVERSE(s, &e->seqs, seq_list, in_engine)
    if (s->state == SEQ_RUNNING && s->goal != SEQ_FIRST_TOKEN)
        break;
    return s;
}

/* Takes the page for the next token of s, and preempts others for it. False: s itself was preempted. */
static bool find_room(struct engine *e, struct seq *s)
{
    while (!seq_grow(s, pages_for(e, s->n_tokens))) {
        struct seq *victim = newest_running(e);
        seq_preempt(victim ? victim : s);
        if (!victim || victim == s)
            return false;
    }
    return true;
}

/* Time (ms) that the TPOT limit of s leaves to the step; no limit before its first token here. */
static double room_ms(const struct seq *s, uint64_t now_ns)
{
    if (!s->first_token_ns)
        return INFINITY;
    return batching_room_ms(s->tpot_ms, s->n_tokens - s->n_before, (double)(now_ns - s->first_token_ns) * 1e-6);
}

/* Puts the running sequences that have pages into e->batch; returns how many. */
static uint32_t pick(struct engine *e)
{
    uint32_t n = 0, kept = 0;
    struct seq *s;
    TAILQ_FOREACH (s, &e->seqs, in_engine)
        if (n < e->config.max_batch && s->state == SEQ_RUNNING && seq_is_there(s) && find_room(e, s))
            e->batch[n++] = s;
    for (uint32_t i = 0; i < n; i++) /* a later sequence may have preempted one that is in the batch already */
        if (e->batch[i]->state == SEQ_RUNNING)
            e->batch[kept++] = e->batch[i];
    return kept;
}

/* Chooses the sequences of this step (e->batch) and gives each its n_rows. */
static void plan(struct engine *e)
{
    uint64_t now = clock_now(e->config.clock);
    struct batch_item *items = e->items;
    uint32_t *rows = e->item_rows, logprob_rows = 0, n = pick(e);
    for (uint32_t i = 0; i < n; i++) {
        const struct seq *s = e->batch[i];
        uint32_t n_pending = s->n_tokens - s->n_computed;
        bool decoding = sequence_decodes(s->n_tokens, s->n_prompt, s->n_computed);
        items[i] = (struct batch_item){.n_pending = n_pending,
                                       .n_computed = s->n_computed,
                                       .decoding = decoding,
                                       .chunk = s->chunk_tokens,
                                       .room_ms = decoding ? room_ms(s, now) : INFINITY};
    }
    batching_plan(items, n, e->config.max_rows, &e->cost, e->starved_ms, rows);
    e->is_starving = batching_starves(items, rows, n);
    e->n_batch = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct seq *s = e->batch[i];
        /* Scoring needs the logits of every row, so it takes few rows at a time. */
        if (s->scores.logprobs && s->n_computed < s->n_prompt) {
            uint32_t room = PROMPT_LOGPROB_ROWS - logprob_rows;
            rows[i] = rows[i] < room ? rows[i] : room;
            logprob_rows += rows[i];
        }
        s->n_rows = rows[i];
        if (!rows[i])
            continue;
        e->batch[e->n_batch++] = s;
        /* A resumed sequence has one token to compute, but none drawn here yet. */
        bool generates = items[i].decoding && s->first_token_ns;
        if (generates && !s->decode_ns) {
            s->decode_ns = clock_now(e->config.clock);
            s->times.decode_wait = s->decode_ns - (s->goal == SEQ_ADOPT ? s->running_ns : s->first_token_ns);
        }
    }
}

/* Puts sequences of one adapter side by side, those without an adapter first. The sort is stable. */
static void sort_by_adapter(struct engine *e)
{
    for (uint32_t i = 1; i < e->n_batch && e->config.n_adapters; i++) {
        struct seq *s = e->batch[i];
        uint32_t at = i;
        for (; at && e->batch[at - 1]->adapter > s->adapter; at--)
            e->batch[at] = e->batch[at - 1];
        e->batch[at] = s;
    }
}

/* Rows by adapter, as forward_batch.adapter_rows wants them. NULL if no sequence has an adapter. */
static const uint32_t *fill_adapter_rows(struct engine *e)
{
    uint32_t row = 0, adapter = 0, n = e->config.n_adapters;
    for (uint32_t i = 0; i < e->n_batch; i++) {
        for (; adapter < e->batch[i]->adapter; adapter++)
            e->adapter_rows[adapter] = row;
        row += e->batch[i]->n_rows;
    }
    bool any = adapter > 0;
    for (; adapter <= n; adapter++)
        e->adapter_rows[adapter] = row;
    return any ? e->adapter_rows : NULL;
}

/*
 * Whether the row at `position` scores the next prompt token. Not again when a sequence that has generated is
 * computed anew after a preemption.
 */
static bool wants_logprob(const struct seq *s, uint32_t position)
{
    return s->scores.logprobs && !s->first_token_ns && position + 1 < s->n_prompt;
}

/* Whether logits are computed for the row at `position`: the row draws a token or scores one. */
static bool wants_row(const struct seq *s, uint32_t position)
{
    return position + 1 == s->n_tokens || wants_logprob(s, position);
}

/*
 * Asks for logits: entry i of the logit arrays is for row `row` of the batch, which is token `position` of s.
 */
static void want_logits(struct engine *e, const struct seq *s, uint32_t position, uint32_t row, uint32_t i)
{
    bool draws = position + 1 == s->n_tokens;
    e->logit_rows[i] = row;
    e->wants_logits[i] =
        draws ? sampling_wants_logits(&s->sampling, s->n_tokens - s->n_prompt) : wants_logprob(s, position);
    e->draws[i] = draws ? sampling_draw(&s->sampling, s->n_tokens, s->n_prompt) : (struct k_draw){0};
}

/*
 * Fills the arrays of the batch; returns its rows. finish_rows() must walk the same rows in the same order.
 */
static uint32_t fill_arrays(struct engine *e, uint32_t *n_logit_rows)
{
    uint32_t row = 0;
    *n_logit_rows = 0;
    for (uint32_t i = 0; i < e->n_batch; i++) {
        struct seq *s = e->batch[i];
        for (uint32_t v = 0; v < e->n_views; v++)
            e->attn_seqs[v * e->n_batch + i] = (struct k_attn_seq){.first_row = row,
                                                                   .n_rows = s->n_rows,
                                                                   .first_pos = s->n_computed,
                                                                   .pages = s->addresses + (size_t)v * s->cap_pages};
        e->seq_tokens[i] = s->n_tokens;
        for (uint32_t j = 0; j < s->n_rows; j++, row++) {
            e->ids[row] = s->tokens[s->n_computed + j];
            e->positions[row] = s->n_computed + j;
            if (wants_row(s, s->n_computed + j)) {
                want_logits(e, s, s->n_computed + j, row, (*n_logit_rows)++);
            }
        }
    }
    return row;
}

/* Whether pages of s are announced layer by layer. */
static bool announces(const struct engine *e, const struct seq *s)
{
    return s->goal == SEQ_FIRST_TOKEN && e->config.callbacks.on_pages_ready;
}

/*
 * Pages [*first_out, end) are completed by this step; returns end. A partly filled page counts if it is
 * announced and ends the prompt.
 */
static uint32_t pages_done(const struct engine *e, const struct seq *s, uint32_t *first_out)
{
    uint32_t after = s->n_computed + s->n_rows;
    *first_out = s->n_computed / e->config.page_tokens;
    return announces(e, s) && after == s->n_tokens ? pages_for(e, after) : after / e->config.page_tokens;
}

/*
 * Writes the tokens that the grammar of s allows next, with the stop ids where the answer may end. Before
 * min_tokens it ends only if nothing else may come. False: nothing may come at all, or the grammar is too
 * ambiguous here.
 */
static bool write_mask(const struct seq *s, uint32_t n_words, uint32_t *mask)
{
    const struct sampling *p = &s->sampling;
    bool is_any = false, is_early = s->n_tokens - s->n_prompt < p->min_tokens;
    if (!grammar_cursor_mask(s->cursor, mask))
        return false;
    for (uint32_t i = 0; i < n_words && !is_any; i++)
        is_any = mask[i];
    for (uint32_t i = 0; i < p->n_stop_ids && grammar_cursor_may_end(s->cursor) && !(is_any && is_early); i++)
        mask[p->stop_ids[i] / 32] |= 1u << p->stop_ids[i] % 32;
    return is_any || (grammar_cursor_may_end(s->cursor) && p->n_stop_ids);
}

/* Makes the masks of the sequences that draw a token in this step, once. Thread: that of the first rank that
 * has all of its work queued, so that a device computes meanwhile. */
static void make_masks(struct engine *e)
{
    uint32_t n = 0, n_words = (e->model.vocab_size + 31) / 32;
    if (atomic_exchange(&e->has_masks, true))
        return;
    for (uint32_t i = 0; i < e->n_batch; i++)
        n += e->batch[i]->cursor != NULL;
    if (n > e->cap_masks) {
        free(e->masks);
        e->cap_masks = n;
        e->masks = mem_array((size_t)n * n_words, sizeof(*e->masks));
    }
    uint32_t *mask = e->masks;
    for (uint32_t i = 0; i < e->n_batch; i++) {
        struct seq *s = e->batch[i];
        if (!s->cursor || s->n_computed + s->n_rows < s->n_tokens)
            continue;
        s->mask = write_mask(s, n_words, mask) ? mask : NULL;
        mask += n_words;
    }
}

/*
 * Queues copies of completed pages to host memory: layer by layer if the pages are announced, else all layers
 * at the end. Runs on the threads of the ranks, all at the same time: but for the masks it only reads e.
 */
static void on_queued(void *user, struct forward *f, uint16_t begin, uint16_t end)
{
    struct engine *e = user;
    if (end == forward_end_layer(f))
        make_masks(e);
    for (uint32_t i = 0; i < e->n_batch; i++) {
        const struct seq *s = e->batch[i];
        bool by_layers = announces(e, s);
        uint32_t page, last = pages_done(e, s, &page);
        for (; page < last && (by_layers || end == forward_end_layer(f)); page++)
            forward_read_page(f, s->pages[page].index, by_layers ? begin : 0, end);
    }
}

/*
 * Announces completed pages in layers [begin, end). Pages before them came from the prefix cache: they are
 * announced once, in all layers. On the engine thread.
 */
static void on_layers(void *user, uint16_t begin, uint16_t end)
{
    struct engine *e = user;
    const struct engine_callbacks *cb = &e->config.callbacks;
    for (uint32_t i = 0; i < e->n_batch; i++) {
        struct seq *s = e->batch[i];
        uint32_t ready, last = pages_done(e, s, &ready);
        if (!announces(e, s))
            continue;
        if (begin == 0 && ready > s->n_reported) {
            cb->on_pages_ready(cb->user, s, s->n_reported, ready - s->n_reported, 0, (uint16_t)e->layout.n_layers);
            s->n_reported = ready;
        }
        if (last > ready)
            cb->on_pages_ready(cb->user, s, ready, last - ready, begin, end);
        if (end == e->layout.n_layers && last > s->n_reported)
            s->n_reported = last;
    }
}

/* -------------------------------------------------------- after the batch */

static float *row_logits(const struct engine *e, uint32_t row)
{
    return e->logits + (size_t)row * e->model.vocab_size;
}

/* Draws the next token of s from a row of logits, and appends it. */
static void sample(struct engine *e, struct seq *s, uint32_t row)
{
    struct engine_callbacks *cb = &e->config.callbacks;
    if (!s->first_token_ns)
        s->times.prefill = clock_now(e->config.clock) - s->running_ns;
    if (!s->sampling.max_tokens) { /* the request wants scores only */
        seq_end(s, FINISH_LENGTH);
        return;
    }
    if (s->cursor && !s->mask) {
        seq_end(s, grammar_cursor_may_end(s->cursor) ? FINISH_STOP : FINISH_STUCK);
        return;
    }
    struct sampled token;
    sampler_finish(e->sampler, &s->sampling, s->tokens, s->n_tokens, s->n_prompt, &e->sampled[row], s->mask,
                   row_logits(e, row), &token);
    if (cb->on_token)
        cb->on_token(cb->user, s, &token);
    seq_push_token(s, token.id);
}

/* Scores the prompt token after `position`, from the row of logits at `position`. */
static void score(struct engine *e, struct seq *s, uint32_t position, uint32_t row)
{
    struct prompt_scores *p = &s->scores;
    struct sampled scored;
    uint32_t next = position + 1;
    p->ranks[next] =
        sampler_score(e->sampler, row_logits(e, row), e->sampled[row].logsumexp, s->tokens[next], p->n_top, &scored);
    p->logprobs[next] = scored.logprob;
    memcpy(p->top_ids + (size_t)position * p->n_top, scored.top_ids, p->n_top * sizeof(*p->top_ids));
    memcpy(p->top_logprobs + (size_t)position * p->n_top, scored.top_logprobs, p->n_top * sizeof(*p->top_logprobs));
}

/* Handles one row of logits: draws a token, or scores the prompt token after `position`. */
static void finish_row(struct engine *e, struct seq *s, uint32_t position, bool draws, uint32_t row)
{
    float logsumexp = e->sampled[row].logsumexp;
    if (s->state == SEQ_ENDED) /* ended by an earlier row */
        return;
    if (!isfinite(logsumexp))
        seq_break(s);
    else if (draws)
        sample(e, s, row);
    else
        score(e, s, position, row);
}

/*
 * Counts the KV of the step and handles all its rows of logits. on_token and on_end may not close sequences,
 * because e->batch still points at them.
 */
static void finish_rows(struct engine *e)
{
    uint32_t row = 0;
    for (uint32_t i = 0; i < e->n_batch; i++) {
        struct seq *s = e->batch[i];
        uint32_t first = s->n_computed, after = first + s->n_rows, n_tokens = s->n_tokens;
        seq_computed(s, after);
        for (uint32_t position = first; position < after; position++) {
            bool draws = position + 1 == n_tokens;
            if (draws || wants_logprob(s, position))
                finish_row(e, s, position, draws, row++);
        }
    }
}

/* Describes the step for the cost model. Call it before the step's tokens are counted. */
static struct cost_step describe_step(const struct engine *e)
{
    struct cost_step step = {0};
    for (uint32_t i = 0; i < e->n_batch; i++) {
        const struct seq *s = e->batch[i];
        sequence_add_to_step(&step, s->n_rows, s->n_tokens, s->n_prompt, s->n_computed);
    }
    return step;
}

/* While nothing can be computed: waits for pages of a sequence that are on their way. False: none has any. */
static bool wait_for_pages(struct engine *e)
{
    struct seq *s;
    TAILQ_FOREACH (s, &e->seqs, in_engine)
        if (s->state == SEQ_RUNNING && s->written) {
            ranks_write_wait(e->ranks, s->written);
            return true;
        }
    return false;
}

uint32_t engine_step(struct engine *e)
{
    kvpool_sweep(e->pool);
    admit(e);
    plan(e);
    if (!e->n_batch && wait_for_pages(e))
        plan(e);
    if (!e->n_batch)
        return 0;
    sort_by_adapter(e);
    uint32_t n_logit_rows, n_rows = fill_arrays(e, &n_logit_rows);
    uint32_t per_call = (e->layout.n_layers + e->config.announce_calls - 1) / e->config.announce_calls;
    const struct forward_batch batch = {.ids = e->ids,
                                        .positions = e->positions,
                                        .n_rows = n_rows,
                                        .seqs = e->attn_seqs,
                                        .n_tokens = e->seq_tokens,
                                        .n_seqs = e->n_batch,
                                        .logit_rows = e->logit_rows,
                                        .wants_logits = e->wants_logits,
                                        .draws = e->draws,
                                        .n_logit_rows = n_logit_rows,
                                        .adapter_rows = fill_adapter_rows(e),
                                        .on_queued = on_queued,
                                        .on_layers = on_layers,
                                        .layers_per_call = (uint16_t)per_call,
                                        .user = e};
    atomic_store(&e->has_masks, false);
    e->last_step = describe_step(e);
    if (e->config.callbacks.on_step)
        e->config.callbacks.on_step(e->config.callbacks.user, progress_expect_ms(&e->past, &e->cost, &e->last_step));
    uint64_t start = clock_now(e->config.clock);
    if (e->sim)
        forward_sim_run(e->sim, &batch, &e->last_step, e->logits, e->sampled);
    else
        ranks_run(e->ranks, &batch);
    make_masks(e); /* unless that was done meanwhile */
    e->last_step.ms = (double)(clock_now(e->config.clock) - start) * 1e-6;
    progress_measured(&e->past, &e->cost, &e->last_step);
    e->cost = cost_observe(e->cost, &e->last_step);
    e->starved_ms = e->is_starving ? e->starved_ms + e->last_step.ms : 0;
    finish_rows(e);
    return n_rows;
}
