/*
 * One sequence: its tokens, its pages, the keys of its blocks, and its states (drawn in engine.h).
 *
 * What must hold:
 *   - first_page <= n_pages, and exactly pages [first_page, n_pages) are held, each with one sequence hold.
 *   - Until it is preempted, n_named * page_tokens <= n_computed: only computed, full blocks have names.
 *   - keys[] covers the full blocks of tokens[]; its root depends on is_long.
 *   - addresses[] is NULL for pages that were given up, so that attention can't read them.
 */
#include "engine/engine_internal.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

/* The only place where the state changes; counts n_active. An illegal change aborts. */
static void set_state(struct seq *s, enum seq_state to)
{
    static const bool LEGAL[4][4] = {
        [SEQ_WAITING] = {[SEQ_FILLING] = true, [SEQ_RUNNING] = true, [SEQ_ENDED] = true},
        [SEQ_FILLING] = {[SEQ_RUNNING] = true},
        [SEQ_RUNNING] = {[SEQ_WAITING] = true, [SEQ_FILLING] = true, [SEQ_ENDED] = true},
    };
    if (!LEGAL[s->state][to])
        abort();
    bool was = s->state == SEQ_FILLING || s->state == SEQ_RUNNING, is = to == SEQ_FILLING || to == SEQ_RUNNING;
    s->engine->n_active += (uint32_t)is - (uint32_t)was;
    s->state = to;
}

/* ------------------------------------------------------------- validation */

static enum td_status check_lengths(const struct engine *e, const struct seq_params *p, struct td_error *error_out)
{
    if (!p->n_prompt || p->n_prompt > p->n_ids)
        return td_fail(error_out, TD_ERR_INVALID, "prompt: empty");
    if (!p->sampling.max_tokens && !p->prompt_logprobs)
        return td_fail(error_out, TD_ERR_INVALID, "stopping.max_tokens: 0 is only for prompt log-probabilities");
    uint64_t total = (uint64_t)p->n_prompt + p->sampling.max_tokens;
    if (total > e->config.max_context)
        return td_fail(error_out, TD_ERR_INVALID,
                       "prompt of %u tokens and stopping.max_tokens %u are over the context of %u", p->n_prompt,
                       p->sampling.max_tokens, e->config.max_context);
    if (total > (uint64_t)e->config.n_pages * e->config.page_tokens)
        return td_fail(error_out, TD_ERR_INVALID,
                       "prompt of %u tokens and stopping.max_tokens %u never fit into the pool of %u pages of %u",
                       p->n_prompt, p->sampling.max_tokens, e->config.n_pages, e->config.page_tokens);
    if (p->n_ids - p->n_prompt > p->sampling.max_tokens)
        return td_fail(error_out, TD_ERR_INVALID, "more tokens generated before than stopping.max_tokens");
    return TD_OK;
}

/* Ids, limits and sampling come from a router, so all of them are validated. */
static enum td_status check_params(const struct engine *e, const struct seq_params *p, struct td_error *error_out)
{
    enum td_status s = check_lengths(e, p, error_out);
    if (s)
        return s;
    for (uint32_t i = 0; i < p->n_ids; i++)
        if (p->ids[i] >= e->model.vocab_size)
            return td_fail(error_out, TD_ERR_INVALID, "prompt.ids[%u]: %u is not in the vocabulary of %u", i, p->ids[i],
                           e->model.vocab_size);
    if (!(p->tpot_ms >= 0 && p->tpot_ms < INFINITY))
        return td_fail(error_out, TD_ERR_INVALID, "leg.tpot_ms: %g is no limit; 0 is none", p->tpot_ms);
    if (p->adapter > e->config.n_adapters)
        return td_fail(error_out, TD_ERR_INVALID, "adapter: %u, there are %u", p->adapter, e->config.n_adapters);
    return sampling_check(&p->sampling, e->model.vocab_size, error_out);
}

/* ------------------------------------------------------------- life cycle */

/*
 * Makes the keys of new full blocks. A sequence that uses longrope's long frequencies has another root: its
 * KV differs, so it must not share blocks with short sequences.
 */
static void extend_keys(struct seq *s)
{
    static const uint32_t LONG = UINT32_MAX;
    uint32_t page_tokens = s->engine->config.page_tokens, n = s->n_tokens / page_tokens;
    struct block_key root = s->is_long ? block_key_next(&s->root, &LONG, 1) : s->root;
    for (; s->n_keys < n; s->n_keys++)
        s->keys[s->n_keys] = block_key_next(s->n_keys ? &s->keys[s->n_keys - 1] : &root,
                                            s->tokens + (size_t)s->n_keys * page_tokens, page_tokens);
}

bool seq_is_there(struct seq *s)
{
    if (s->written && ranks_written(s->engine->ranks, s->written))
        s->written = 0;
    return !s->written;
}

/* Gives up all pages. n_computed is the caller's. Others may write to them at once: no copy may be left. */
static void release_pages(struct seq *s)
{
    if (s->written)
        ranks_write_wait(s->engine->ranks, s->written);
    s->written = 0;
    kvpool_unhold(s->engine->pool, s->pages + s->first_page, s->n_pages - s->first_page);
    s->first_page = s->n_pages = 0;
}

static void clear_addresses(struct seq *s, uint32_t i)
{
    for (uint32_t v = 0; v < s->engine->n_views; v++)
        s->addresses[(size_t)v * s->cap_pages + i] = NULL;
}

/* Gives up the pages that are behind every window, now that the sequence goes on after n_computed tokens. */
static void drop_unseen(struct seq *s)
{
    uint32_t first = kv_layout_first_kept(&s->engine->layout, s->n_computed);
    if (!seq_is_there(s))
        return;
    for (; s->first_page < first && s->first_page < s->n_pages; s->first_page++) {
        kvpool_unhold(s->engine->pool, &s->pages[s->first_page], 1);
        clear_addresses(s, s->first_page);
    }
}

static struct prompt_scores scores_open(uint32_t n, uint32_t n_top)
{
    struct prompt_scores p = {.n = n,
                              .n_top = n_top,
                              .logprobs = mem_array(n, sizeof(float)),
                              .ranks = mem_array(n, sizeof(uint32_t)),
                              .top_ids = mem_array((size_t)n * n_top, sizeof(uint32_t)),
                              .top_logprobs = mem_array((size_t)n * n_top, sizeof(float))};
    p.logprobs[0] = NAN;
    return p;
}

static void scores_free(struct prompt_scores *p)
{
    free(p->logprobs);
    free(p->ranks);
    free(p->top_ids);
    free(p->top_logprobs);
}

enum td_status engine_seq_open(struct engine *e, const struct seq_params *p, struct seq **out,
                               struct td_error *error_out)
{
    enum td_status status = check_params(e, p, error_out);
    if (status)
        return status;
    struct seq *s = mem_zalloc(sizeof(*s));
    s->engine = e;
    s->goal = p->goal;
    s->root = p->root;
    s->adapter = p->adapter;
    s->user = p->user;
    s->sampling = p->sampling;
    s->sampling.bias = mem_dup(p->sampling.bias, p->sampling.n_bias * sizeof(*p->sampling.bias));
    s->sampling.stop_ids = mem_dup(p->sampling.stop_ids, p->sampling.n_stop_ids * sizeof(*p->sampling.stop_ids));
    s->sampling.allowed = mem_dup(p->sampling.allowed, p->sampling.n_allowed * sizeof(*p->sampling.allowed));
    s->sampling.bad_ids = mem_dup(p->sampling.bad_ids, p->sampling.n_bad_ids * sizeof(*p->sampling.bad_ids));
    s->sampling.bad_lengths = mem_dup(p->sampling.bad_lengths, p->sampling.n_bad * sizeof(*p->sampling.bad_lengths));
    s->sampling.is_masked = p->grammar != NULL;
    s->cursor = p->grammar ? grammar_cursor_open(p->grammar) : NULL;
    s->n_prompt = p->n_prompt;
    s->n_tokens = p->n_ids;
    s->cap_tokens = p->n_prompt + p->sampling.max_tokens + 1;
    s->tokens = mem_array(s->cap_tokens, sizeof(*s->tokens));
    memcpy(s->tokens, p->ids, p->n_ids * sizeof(*s->tokens));
    s->cap_pages = pages_for(e, s->cap_tokens);
    s->pages = mem_array(s->cap_pages, sizeof(*s->pages));
    s->addresses = mem_array((size_t)e->n_views * s->cap_pages, sizeof(*s->addresses));
    s->keys = mem_array(s->cap_pages, sizeof(*s->keys));
    s->chunk_tokens = p->chunk_tokens ? p->chunk_tokens : e->config.chunk_tokens;
    s->tpot_ms = p->tpot_ms;
    if (p->prompt_logprobs)
        s->scores = scores_open(p->n_prompt, p->sampling.top_logprobs);
    s->is_long = model_config_is_long(&e->model, s->n_tokens);
    extend_keys(s);
    s->opened_ns = clock_now(e->config.clock);
    TAILQ_INSERT_TAIL(&e->seqs, s, in_engine);
    for (uint32_t i = s->n_prompt; s->cursor && i < s->n_tokens; i++)
        if (!grammar_cursor_take(s->cursor, s->tokens[i])) {
            engine_seq_close(e, s);
            return td_fail(error_out, TD_ERR_INVALID, "tokens generated before do not follow the grammar");
        }
    *out = s;
    return TD_OK;
}

void engine_seq_close(struct engine *e, struct seq *s)
{
    if (!s)
        return;
    release_pages(s);
    e->n_active -= s->state == SEQ_FILLING || s->state == SEQ_RUNNING;
    TAILQ_REMOVE(&e->seqs, s, in_engine);
    free((void *)s->sampling.bias);
    free((void *)s->sampling.stop_ids);
    free((void *)s->sampling.allowed);
    free((void *)s->sampling.bad_ids);
    free((void *)s->sampling.bad_lengths);
    grammar_cursor_close(s->cursor);
    free(s->tokens);
    free(s->pages);
    free(s->addresses);
    free(s->keys);
    scores_free(&s->scores);
    free(s);
}

/* ------------------------------------------------------------------ pages */

/* Looks up the addresses of page i in every view. */
static void set_addresses(struct seq *s, uint32_t i)
{
    const struct engine *e = s->engine;
    uint8_t *host = kvpool_address(e->pool, s->pages[i]);
    for (uint32_t v = 0; v < e->n_views; v++)
        s->addresses[(size_t)v * s->cap_pages + i] = e->ranks ? ranks_page(e->ranks, v, s->pages[i].index) : host;
}

/*
 * Begins to copy pages that came from elsewhere to the devices, from the one of token n_computed to the
 * one of token n_tokens - 1. Call it before n_computed advances.
 */
static void write_pages(struct seq *s, uint32_t n_tokens)
{
    struct engine *e = s->engine;
    uint32_t first = s->n_computed / e->config.page_tokens;
    for (uint32_t i = first > s->first_page ? first : s->first_page; i < pages_for(e, n_tokens) && e->ranks; i++)
        ranks_write_page(e->ranks, s->pages[i].index);
    if (e->ranks)
        s->written = e->written = ranks_write_mark(e->ranks);
}

/* Sequences never give back single pages at the end, so n_pages only grows between admission and release. */
bool seq_grow(struct seq *s, uint32_t n_pages)
{
    assert(n_pages <= s->cap_pages);
    if (n_pages <= s->n_pages)
        return true;
    if (kvpool_take(s->engine->pool, n_pages - s->n_pages, s->pages + s->n_pages))
        return false;
    for (; s->n_pages < n_pages; s->n_pages++)
        set_addresses(s, s->n_pages);
    return true;
}

/*
 * Holds the pages that the prefix cache has, and returns the block at which they end.
 *
 * A sequence that computes needs everything that its next token sees, and always computes the last token into
 * a private page. An adopting sequence gets the rest by handover: it can use any run of blocks that begins
 * with the handover's first page, up to the last full block.
 */
static uint32_t take_matched(struct seq *s)
{
    struct engine *e = s->engine;
    /* After a preemption it computes for itself. */
    bool adopts = s->goal == SEQ_ADOPT && !s->times.n_preempted;
    if (adopts) {
        uint32_t first = s->first_page = engine_first_page_after(e, s->n_tokens);
        return first + kvpool_match(e->pool, s->keys + first, s->n_keys - first, s->pages + first);
    }
    uint32_t matchable = s->scores.logprobs ? 0 : sequence_reusable_pages(s->n_tokens, e->config.page_tokens);
    return kvpool_match_window(e->pool, s->keys, matchable, s->pages, &s->first_page);
}

/* Runs before on_admitted, so that the callback may move the sequence on to FILLING. */
bool seq_admit(struct seq *s)
{
    struct engine *e = s->engine;
    uint32_t matched = s->n_pages = take_matched(s);
    for (uint32_t i = s->first_page; i < matched; i++)
        set_addresses(s, i);
    if (!seq_grow(s, pages_for(e, s->n_tokens))) {
        release_pages(s);
        return false;
    }
    for (uint32_t i = 0; i < s->first_page; i++)
        clear_addresses(s, i);
    s->written = matched ? e->written : 0; /* others' pages may still be on their way */
    s->n_computed = matched * e->config.page_tokens;
    s->n_named = matched;
    s->n_reported = 0;
    s->admitted_ns = s->running_ns = clock_now(e->config.clock);
    if (!s->times.n_preempted)
        s->times.queue = s->admitted_ns - s->opened_ns;
    set_state(s, SEQ_RUNNING);
    if (e->config.callbacks.on_admitted && !s->times.n_preempted)
        e->config.callbacks.on_admitted(e->config.callbacks.user, s, matched);
    return true;
}

void seq_preempt(struct seq *s)
{
    release_pages(s);
    s->n_computed = 0;
    s->times.n_preempted++;
    set_state(s, SEQ_WAITING);
    log_debug(s->engine->config.log, "sequence preempted tokens=%u", s->n_tokens);
}

void seq_computed(struct seq *s, uint32_t n_total)
{
    s->n_computed = n_total;
    for (uint32_t n = n_total / s->engine->config.page_tokens; s->n_named < n; s->n_named++)
        kvpool_name(s->engine->pool, s->pages[s->n_named], &s->keys[s->n_named], s->n_named);
    drop_unseen(s);
}

void engine_seq_fill(struct engine *e, struct seq *s)
{
    (void)e;
    set_state(s, SEQ_FILLING);
}

/* Order: write_pages() goes by n_computed, which seq_computed() advances. */
void engine_seq_filled(struct engine *e, struct seq *s, uint32_t n_tokens)
{
    uint64_t now = clock_now(e->config.clock);
    s->times.fill = now - s->admitted_ns;
    s->running_ns = now;
    set_state(s, SEQ_RUNNING);
    if (n_tokens > s->n_computed) {
        write_pages(s, n_tokens);
        seq_computed(s, n_tokens);
    }
}

/* ----------------------------------------------------------------- tokens */

void seq_end(struct seq *s, enum seq_finish finish)
{
    struct engine_callbacks *cb = &s->engine->config.callbacks;
    uint64_t now = clock_now(s->engine->config.clock);
    s->times.decode = s->decode_ns ? now - s->decode_ns : 0;
    set_state(s, SEQ_ENDED);
    if (cb->on_end)
        cb->on_end(cb->user, s, finish);
}

/* KV of any of its blocks may be the broken part, so no other sequence may find them. */
void seq_break(struct seq *s)
{
    for (uint32_t i = 0; i < s->n_named; i++)
        kvpool_forget(s->engine->pool, &s->keys[i]);
    seq_end(s, FINISH_BROKEN);
}

static bool is_stop(const struct seq *s, uint32_t token)
{
    for (uint32_t i = 0; i < s->sampling.n_stop_ids; i++)
        if (s->sampling.stop_ids[i] == token)
            return true;
    return false;
}

void seq_push_token(struct seq *s, uint32_t token)
{
    assert(s->n_tokens < s->cap_tokens);
    s->tokens[s->n_tokens++] = token;
    if (s->cursor && !is_stop(s, token))
        grammar_cursor_take(s->cursor, token);
    extend_keys(s);
    if (!s->first_token_ns) {
        s->first_token_ns = clock_now(s->engine->config.clock);
        s->n_before = s->n_tokens - 1;
    }
    if (is_stop(s, token))
        seq_end(s, FINISH_STOP);
    else if (s->n_tokens - s->n_prompt >= s->sampling.max_tokens)
        seq_end(s, FINISH_LENGTH);
    else if (s->goal == SEQ_FIRST_TOKEN)
        seq_end(s, FINISH_NONE);
    /* It crossed longrope's limit: all of its KV is computed again with the other frequencies. */
    else if (s->is_long != model_config_is_long(&s->engine->model, s->n_tokens)) {
        s->is_long = !s->is_long;
        s->n_keys = 0;
        extend_keys(s);
        seq_preempt(s);
    }
}

void engine_seq_append(struct engine *e, struct seq *s, uint32_t token)
{
    (void)e;
    seq_push_token(s, token);
}

/* -------------------------------------------------------------- accessors */

void *engine_seq_user(const struct seq *s)
{
    return s->user;
}

enum seq_state engine_seq_state(const struct seq *s)
{
    return s->state;
}

uint32_t engine_seq_computed(const struct seq *s)
{
    return s->n_computed;
}

const uint32_t *engine_seq_tokens(const struct seq *s, uint32_t *n_out)
{
    *n_out = s->n_tokens;
    return s->tokens;
}

const struct page_ref *engine_seq_pages(const struct seq *s, uint32_t *n_out)
{
    *n_out = s->n_pages;
    return s->pages;
}

uint32_t engine_seq_first_page(const struct seq *s)
{
    return s->first_page;
}

uint32_t engine_first_page_after(const struct engine *e, uint32_t n_tokens)
{
    return kv_layout_first_kept(&e->layout, n_tokens);
}

const struct block_key *engine_seq_keys(const struct seq *s, uint32_t *n_out, uint32_t *n_computed_out)
{
    *n_out = s->n_keys;
    *n_computed_out = s->n_computed / s->engine->config.page_tokens;
    return s->keys;
}

const struct prompt_scores *engine_seq_prompt_scores(const struct seq *s)
{
    return s->scores.logprobs ? &s->scores : NULL;
}

struct seq_times engine_seq_times(const struct seq *s)
{
    return s->times;
}
