#include "engine/forward_sim.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "base/random.h"

#define SEED 0x73696d756c617465ull

static const float NOT_DRAWN = -30, DRAWN = 10; /* logits of all other tokens, and of the one that is drawn */

struct forward_sim {
    struct kv_layout layout;
    uint32_t vocab_size;
    struct sim_cost cost;
    const struct clock *clock;
    uint64_t *words; /* words of this step's rows */
    uint32_t cap_words;
    void *scratch; /* scratch memory for k_draw() */
    uint64_t seed, n_steps;
};

enum td_status sim_cost_parse(const char *option, const char *text, double out[3], struct td_error *error_out)
{
    int end = 0;
    if (sscanf(text, "%lf,%lf,%lf%n", &out[0], &out[1], &out[2], &end) != 3 || text[end] || out[0] < 0 || out[1] < 0 ||
        out[2] < 0)
        return td_fail(error_out, TD_ERR_INVALID, "--%s %s: expected A,B,C in microseconds, none below 0", option,
                       text);
    for (int i = 0; i < 3; i++)
        out[i] *= 1000;
    return TD_OK;
}

enum td_status forward_sim_open(const struct kv_layout *layout, uint32_t vocab_size, const struct sim_cost *cost,
                                const struct clock *clock, struct forward_sim **out, struct td_error *error_out)
{
    if (layout->head_dim * num_type_bytes(layout->dtype) < sizeof(uint64_t))
        return td_fail(error_out, TD_ERR_INVALID, "--engine sim: head_dim %u of %zu bytes is less than a word",
                       layout->head_dim, num_type_bytes(layout->dtype));
    struct forward_sim *f = mem_zalloc(sizeof(*f));
    *f = (struct forward_sim){
        .layout = *layout, .vocab_size = vocab_size, .cost = *cost, .clock = clock, .seed = random_u64()};
    f->scratch = mem_array(vocab_size, k_draw_scratch_bytes(1));
    *out = f;
    return TD_OK;
}

void forward_sim_close(struct forward_sim *f)
{
    if (!f)
        return;
    free(f->words);
    free(f->scratch);
    free(f);
}

/* ----------------------------------------------------------------- contents */

/* Where a token's word is: in K of the first head, at the token's slot. */
static uint8_t *kv_slot(const struct forward_sim *f, const struct k_attn_seq *s, uint32_t layer, uint32_t position)
{
    const struct kv_layout *l = &f->layout;
    return s->pages[position / l->page_tokens] + layer * kv_layout_layer_bytes(l) +
           position % l->page_tokens * (l->head_dim * num_type_bytes(l->dtype));
}

static uint64_t load_kv(const struct forward_sim *f, const struct k_attn_seq *s, uint32_t layer, uint32_t position)
{
    uint64_t word;
    memcpy(&word, kv_slot(f, s, layer, position), sizeof(word));
    return word ^ layer;
}

/* The word of a past token, or another word if the token's layers do not agree. */
static uint64_t recall(const struct forward_sim *f, const struct k_attn_seq *s, uint32_t position)
{
    uint64_t word = load_kv(f, s, 0, position), odd = 0;
    for (uint32_t layer = 1; layer < f->layout.n_layers; layer++)
        odd |= load_kv(f, s, layer, position) ^ word;
    return odd ? ~word : word;
}

/* The words of a sequence's rows. A past position is checked, too, if its page is still held. */
static void make_words(struct forward_sim *f, const struct forward_batch *b, const struct k_attn_seq *s)
{
    uint64_t word = SEED;
    if (s->first_pos) {
        word = recall(f, s, s->first_pos - 1);
        uint32_t past = (uint32_t)(word % s->first_pos);
        if (s->pages[past / f->layout.page_tokens] && recall(f, s, past) == ~load_kv(f, s, 0, past))
            word = ~word;
    }
    for (uint32_t i = s->first_row; i < s->first_row + s->n_rows; i++)
        f->words[i] = word = random_at(word, b->ids[i], b->positions[i]);
}

static void store_kv(struct forward_sim *f, const struct forward_batch *b, uint32_t begin, uint32_t end)
{
    for (uint32_t i = 0; i < b->n_seqs; i++) {
        const struct k_attn_seq *s = &b->seqs[i];
        for (uint32_t layer = begin; layer < end; layer++)
            for (uint32_t r = 0; r < s->n_rows; r++) {
                uint64_t word = f->words[s->first_row + r] ^ layer;
                memcpy(kv_slot(f, s, layer, s->first_pos + r), &word, sizeof(word));
            }
    }
}

static void make_logits(const struct forward_sim *f, const struct forward_batch *b, float *logits)
{
    for (uint32_t i = 0; i < b->n_logit_rows; i++, logits += f->vocab_size) {
        for (uint32_t t = 0; t < f->vocab_size; t++)
            logits[t] = NOT_DRAWN;
        logits[random_mix(f->words[b->logit_rows[i]]) % f->vocab_size] = DRAWN;
    }
}

/* --------------------------------------------------------------------- time */

/* A log-normal factor (Box and Muller). Each process draws another sequence. */
static double noise(struct forward_sim *f)
{
    double sigma = f->cost.noise, u = 1 - random_unit(random_at(f->seed, f->n_steps, 0)),
           v = random_unit(random_at(f->seed, f->n_steps, 1));
    f->n_steps++;
    return sigma > 0 ? exp(sigma * sqrt(-2 * log(u)) * cos(2 * M_PI * v) - sigma * sigma / 2) : 1;
}

static void sleep_until(const struct clock *clock, uint64_t then_ns)
{
    for (uint64_t now; (now = clock_now(clock)) < then_ns;) {
        uint64_t left = then_ns - now;
        nanosleep(&(struct timespec){(time_t)(left / NS_PER_S), (long)(left % NS_PER_S)}, NULL);
    }
}

void forward_sim_run(struct forward_sim *f, const struct forward_batch *b, const struct cost_step *step,
                     float *logits_out, struct k_sampled *sampled_out)
{
    uint64_t begin_ns = clock_now(f->clock);
    double took_ns = cost_profile_step_ms(&f->cost.step_ns, step) * noise(f);
    uint32_t n_layers = f->layout.n_layers, per_call = b->layers_per_call;
    if (b->n_rows > f->cap_words) {
        f->cap_words = b->n_rows;
        f->words = mem_resize(f->words, f->cap_words, sizeof(f->words[0]));
    }
    for (uint32_t i = 0; i < b->n_seqs; i++)
        make_words(f, b, &b->seqs[i]);
    for (uint32_t begin = 0; begin < n_layers; begin += per_call) {
        uint32_t end = begin + per_call < n_layers ? begin + per_call : n_layers;
        store_kv(f, b, begin, end);
        sleep_until(f->clock, begin_ns + (uint64_t)(took_ns * end / n_layers));
        if (b->on_layers)
            b->on_layers(b->user, (uint16_t)begin, (uint16_t)end);
    }
    make_logits(f, b, logits_out);
    for (uint32_t i = 0; i < b->n_logit_rows; i++) {
        const float *row = logits_out + (size_t)i * f->vocab_size;
        uint32_t id = k_draw(row, f->vocab_size, k_argmax(row, f->vocab_size), &b->draws[i], f->scratch);
        sampled_out[i] = (struct k_sampled){id, row[id], k_logsumexp(row, f->vocab_size)};
    }
}
