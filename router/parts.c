/*
 * The parts of an answer to a chat: text, reasoning, calls of functions (model/reply.h). They are told
 * apart in the answer's text, behind the search for stop strings, so what is told is a function of the
 * tokens, and a re-plan, or another router, goes on at the same byte.
 */
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "router/router_internal.h"

/* ----------------------------------------------------------------------------- router */

/* Special tokens that have a meaning, those of reasoning first. */
static void find_marks(struct router *r, bool of_calls)
{
    struct token_stream *stream = token_stream_open(r->tokenizer, false);
    struct bytes piece = {0};
    for (uint32_t id = 0; id < tokenizer_size(r->tokenizer); id++) {
        if (!tokenizer_is_special(r->tokenizer, id))
            continue;
        bytes_clear(&piece);
        token_stream_piece(stream, id, &piece);
        const char *text = piece.data ? piece.data : "";
        if (of_calls ? !convention_is_mark_of_calls(r->convention, text, piece.len)
                     : !convention_is_mark_of_reasoning(r->convention, text, piece.len))
            continue;
        r->marks = MEM_ROOM(r->marks, r->n_marks, r->cap_marks, 16);
        r->marks[r->n_marks++] = id;
    }
    bytes_free(&piece);
    token_stream_close(stream);
}

void parts_open(struct router *r)
{
    const char *source = chat_template_source(r->chat);
    r->convention = convention_of(source, strlen(source));
    r->has_reasoning = convention_reasons(r->convention, source, strlen(source));
    if (r->has_reasoning)
        find_marks(r, false);
    r->n_reasoning_marks = r->n_marks;
    find_marks(r, true);
    log_info(&r->log, "answers to chats calls=%s reasoning=%s", convention_name(r->convention),
             r->has_reasoning ? "yes" : "no");
}

/* ---------------------------------------------------------------------------- request */

static struct reply *open_reply(const struct request *q)
{
    const struct router *r = q->router;
    const struct reply_params p = {.convention = r->convention,
                                   .tools = q->p.tools,
                                   .has_reasoning = r->has_reasoning,
                                   .begins_reasoning = q->p.begins_reasoning,
                                   .is_strict = q->p.is_strict};
    return reply_open(&p);
}

void parts_begin(struct request *q)
{
    const struct router *r = q->router;
    q->detok = token_stream_open(r->tokenizer, q->p.skip_special);
    if (!q->p.wants_parts)
        return;
    token_stream_show(q->detok, r->marks, q->p.tools ? r->n_marks : r->n_reasoning_marks);
    q->reply = open_reply(q);
}

static uint64_t told_bytes(const struct reply_delta *d)
{
    uint64_t n = d->text.len + d->reasoning.len;
    for (size_t i = 0; i < d->n_calls; i++)
        n += d->calls[i].name.len + d->calls[i].arguments.len;
    return n;
}

/* Feeds text [q->fed, upto), forgets what is told, and adds its bytes to *told. */
static void skip(struct request *q, uint64_t upto, uint64_t *told)
{
    reply_feed(q->reply, q->text.data + q->fed, upto - q->fed);
    q->fed = upto;
    *told += told_bytes(reply_delta(q->reply));
    reply_clear(q->reply);
}

/* Goes through the answer's text by tokens, until as many bytes were told. The token that is in. */
static uint32_t token_at(struct request *q, uint64_t bytes)
{
    uint64_t told = 0;
    uint32_t i = 0;
    for (; i < q->n_tokens && told < bytes; i++)
        skip(q, i + 1 < q->n_tokens ? q->tokens[i + 1].text_start : q->text.len, &told);
    return told < bytes ? UINT32_MAX : i;
}

bool parts_resume(struct request *q, uint64_t bytes, uint64_t *shown_out)
{
    uint32_t token = token_at(q, bytes);
    if (token == UINT32_MAX)
        return false;
    uint64_t told = 0;
    reply_close(q->reply);
    q->reply = open_reply(q);
    q->fed = 0;
    if (token)
        skip(q, q->tokens[token - 1].text_start, &told);
    while (told < bytes)
        skip(q, q->fed + 1, &told);
    *shown_out = q->fed;
    return told == bytes;
}

/* Nine letters and digits, as some templates demand. The same for a request that is continued. */
static void name_call(const struct request *q, uint32_t index, char out[PART_ID_BYTES])
{
    static const char DIGITS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    uint64_t n = random_at(q->p.sampling.seed, q->p.sampling.choice, index);
    for (int i = 0; i < PART_ID_BYTES - 1; i++, n /= 62)
        out[i] = DIGITS[n % 62];
    out[PART_ID_BYTES - 1] = 0;
}

static ProtobufCBinaryData data_of(const struct bytes *b)
{
    return (ProtobufCBinaryData){b->len, (uint8_t *)b->data};
}

void parts_fill(struct request *q, uint64_t upto, bool is_over, Tandem__V1__GenerateResponse *m, struct parts *parts)
{
    *parts = (struct parts){0};
    if (!q->reply) {
        if (upto > q->shown) /* q->text.data is NULL while there is no text */
            m->text = (ProtobufCBinaryData){upto - q->shown, (uint8_t *)q->text.data + q->shown};
        return;
    }
    if (upto > q->fed)
        reply_feed(q->reply, q->text.data + q->fed, upto - q->fed);
    q->fed = upto > q->fed ? upto : q->fed;
    if (is_over)
        reply_end(q->reply);
    const struct reply_delta *d = reply_delta(q->reply);
    m->text = data_of(&d->text);
    m->reasoning = data_of(&d->reasoning);
    parts->calls = mem_array(d->n_calls, sizeof(*parts->calls));
    parts->list = mem_array(d->n_calls, sizeof(*parts->list));
    for (size_t i = 0; i < d->n_calls; i++) {
        struct part_call *c = &parts->calls[i];
        tandem__v1__tool_call__init(&c->m);
        c->m.index = d->calls[i].index;
        c->m.name = data_of(&d->calls[i].name);
        c->m.arguments = data_of(&d->calls[i].arguments);
        if (c->m.name.len) {
            name_call(q, c->m.index, c->id);
            c->m.id = rpc_data(c->id);
        }
        parts->list[i] = &c->m;
    }
    m->tool_calls = parts->list;
    m->n_tool_calls = d->n_calls;
}

void parts_free(struct request *q, struct parts *parts, bool was_sent)
{
    free(parts->calls);
    free(parts->list);
    if (q->reply && was_sent)
        reply_clear(q->reply);
}
