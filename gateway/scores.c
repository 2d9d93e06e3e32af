#include "gateway/scores.h"

#include <math.h>
#include <stdio.h>

static const double IMPOSSIBLE = -9999;

/* One token with the likeliest ones at its place. */
struct scored {
    ProtobufCBinaryData piece;
    float logprob; /* NaN: none */
    size_t n_top;
    const ProtobufCBinaryData *top_pieces;
    const float *top_logprobs;
};

static json_t *number(float logprob)
{
    return isnan(logprob) ? json_null() : json_real(isinf(logprob) ? IMPOSSIBLE : (double)logprob);
}

static uint64_t count_characters(ProtobufCBinaryData piece)
{
    uint64_t n = 0;
    for (size_t i = 0; i < piece.len; i++)
        n += (piece.data[i] & 0xc0) != 0x80;
    return n;
}

/* -------------------------------------------------------------------- chats */

static json_t *chat_token(ProtobufCBinaryData piece, float logprob)
{
    json_t *bytes = json_array();
    for (size_t i = 0; i < piece.len; i++)
        json_array_append_new(bytes, json_integer(piece.data[i]));
    return json_pack("{s:o, s:o, s:o}", "token", ask_text_json(piece.data, piece.len), "logprob", number(logprob),
                     "bytes", bytes);
}

static void add_to_chat(json_t *scores, const struct scored *s)
{
    json_t *one = chat_token(s->piece, s->logprob), *tops = json_array();
    for (size_t i = 0; i < s->n_top; i++)
        json_array_append_new(tops, chat_token(s->top_pieces[i], s->top_logprobs[i]));
    json_object_set_new(one, "top_logprobs", tops);
    json_array_append_new(json_object_get(scores, "content"), one);
}

/* -------------------------------------------------------------- completions */

static json_t *completion_token(ProtobufCBinaryData piece)
{
    json_t *v = json_stringn(piece.len ? (const char *)piece.data : "", piece.len); /* NULL: it is not UTF-8 */
    struct bytes b = {0};
    if (v)
        return v;
    bytes_printf(&b, "bytes:");
    for (size_t i = 0; i < piece.len; i++)
        bytes_printf(&b, "\\x%02x", piece.data[i]);
    v = json_stringn(b.data, b.len);
    bytes_free(&b);
    return v;
}

/* Adds a token that no entry has; of two tokens with the same text the likelier one is there. */
static void add_top(json_t *tops, ProtobufCBinaryData piece, float logprob)
{
    json_t *name = completion_token(piece);
    if (!json_object_getn(tops, json_string_value(name), json_string_length(name)))
        json_object_setn_new(tops, json_string_value(name), json_string_length(name), number(logprob));
    json_decref(name);
}

static void add_to_completion(const struct gw_task *t, json_t *scores, const struct scored *s, uint64_t offset)
{
    json_t *tops = json_null();
    if (t->n_top && !isnan(s->logprob)) {
        tops = json_object();
        for (size_t i = 0; i < s->n_top; i++)
            add_top(tops, s->top_pieces[i], s->top_logprobs[i]);
        add_top(tops, s->piece, s->logprob);
    }
    json_array_append_new(json_object_get(scores, "tokens"), completion_token(s->piece));
    json_array_append_new(json_object_get(scores, "token_logprobs"), number(s->logprob));
    json_array_append_new(json_object_get(scores, "top_logprobs"), tops);
    json_array_append_new(json_object_get(scores, "text_offset"), json_integer((json_int_t)offset));
}

/* ---------------------------------------------------------------- interface */

json_t *gw_scores_new(const struct gw_task *t)
{
    return t->is_chat
               ? json_pack("{s:[], s:n}", "content", "refusal")
               : json_pack("{s:[], s:[], s:[], s:[]}", "tokens", "token_logprobs", "top_logprobs", "text_offset");
}

void gw_scores_add(const struct gw_task *t, json_t *scores, const Tandem__V1__GenerateResponse *m, uint64_t *n_chars)
{
    for (size_t i = 0; i < m->n_tokens; i++) {
        const Tandem__V1__TokenEvent *e = m->tokens[i];
        size_t n_top = e->n_top_pieces < e->n_top_logprobs ? e->n_top_pieces : e->n_top_logprobs;
        struct scored s = {e->piece, e->logprob, n_top < t->n_top ? n_top : t->n_top, e->top_pieces, e->top_logprobs};
        if (t->is_chat)
            add_to_chat(scores, &s);
        else
            add_to_completion(t, scores, &s, *n_chars);
        *n_chars += count_characters(e->piece);
    }
}

/* Moves the generated tokens of a list behind those of the prompt. */
static void move_behind(json_t *prompt, json_t *scores, const char *name, uint64_t shift)
{
    size_t i;
    json_t *list = json_object_get(prompt, name), *v;
    json_array_foreach(json_object_get(scores, name), i, v)
    {
        if (shift)
            json_array_append_new(list, json_integer(json_integer_value(v) + (json_int_t)shift));
        else
            json_array_append(list, v);
    }
    json_object_set(scores, name, list);
}

void gw_scores_add_prompt(const struct gw_task *t, json_t *scores, const Tandem__V1__GenerateEnd *end)
{
    json_t *prompt = gw_scores_new(t);
    size_t n = end->n_prompt_pieces, n_top = n > 1 ? end->n_prompt_top_pieces / (n - 1) : 0;
    uint64_t n_chars = 0;
    if (end->n_prompt_logprobs != n || end->n_prompt_top_logprobs != end->n_prompt_top_pieces)
        n = 0;
    for (size_t i = 0; i < n; i++) {
        struct scored s = {.piece = end->prompt_pieces[i], .logprob = end->prompt_logprobs[i]};
        if (i) {
            s.n_top = n_top < t->n_top ? n_top : t->n_top;
            s.top_pieces = end->prompt_top_pieces + (i - 1) * n_top;
            s.top_logprobs = end->prompt_top_logprobs + (i - 1) * n_top;
        }
        add_to_completion(t, prompt, &s, n_chars);
        n_chars += count_characters(end->prompt_pieces[i]);
    }
    move_behind(prompt, scores, "tokens", 0);
    move_behind(prompt, scores, "token_logprobs", 0);
    move_behind(prompt, scores, "top_logprobs", 0);
    move_behind(prompt, scores, "text_offset", n_chars);
    json_decref(prompt);
}

static void add_ranked(json_t *place, uint32_t id, float logprob, uint32_t rank, ProtobufCBinaryData piece)
{
    char name[16];
    snprintf(name, sizeof(name), "%u", id);
    if (!json_object_get(place, name))
        json_object_set_new(place, name,
                            json_pack("{s:o, s:I, s:o}", "logprob", number(logprob), "rank", (json_int_t)rank,
                                      "decoded_token", ask_text_json(piece.data, piece.len)));
}

json_t *gw_scores_prompt_list(const struct gw_task *t, const Tandem__V1__GenerateEnd *end)
{
    json_t *list = json_array();
    size_t n = end ? end->n_prompt_ids : 0, n_top = n > 1 ? end->n_prompt_top_ids / (n - 1) : 0;
    size_t most = n_top < t->n_prompt_top ? n_top : t->n_prompt_top;
    if (n && (end->n_prompt_logprobs != n || end->n_prompt_ranks != n || end->n_prompt_pieces != n ||
              end->n_prompt_top_logprobs != end->n_prompt_top_ids || end->n_prompt_top_pieces != end->n_prompt_top_ids))
        n = 0;
    for (size_t i = 0; i < n; i++) {
        json_t *place = i ? json_object() : json_null();
        json_array_append_new(list, place);
        if (!i)
            continue;
        add_ranked(place, end->prompt_ids[i], end->prompt_logprobs[i], end->prompt_ranks[i], end->prompt_pieces[i]);
        for (size_t k = 0, at = (i - 1) * n_top; k < most; k++, at++)
            add_ranked(place, end->prompt_top_ids[at], end->prompt_top_logprobs[at], (uint32_t)k + 1,
                       end->prompt_top_pieces[at]);
    }
    return list;
}
