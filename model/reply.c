/*
 * An answer as it comes. Text that may begin a mark is held back until it is known; so is white space, which
 * belongs to nothing if a call or the end of the reasoning follows.
 */
#include "model/reply.h"

#include <stdlib.h>
#include <string.h>

#include "model/reply_internal.h"

/* The first whose tells are all in the template. */
static const struct convention CONVENTIONS[] = {
    {.name = "harmony", .tells = {"<|channel|>", "<|message|>"}, .form = CALL_CHANNELS, .begin = "", .end = ""},
    {.name = "glm", .tells = {"<arg_key>"}, .form = CALL_KEYS, .begin = "<tool_call>", .end = "</tool_call>"},
    {.name = "qwen-coder", .tells = {"<function="}, .form = CALL_TAGS, .begin = "<tool_call>", .end = "</tool_call>"},
    {.name = "granite", .tells = {"<|tool_call|>"}, .form = CALL_JSON, .begin = "<|tool_call|>", .end = ""},
    {.name = "hermes", .tells = {"<tool_call>"}, .form = CALL_JSON, .begin = "<tool_call>", .end = "</tool_call>"},
    {.name = "deepseek-v3",
     .tells = {"<｜tool▁sep｜>", "```json"},
     .form = CALL_NAMED,
     .begin = "<｜tool▁call▁begin｜>",
     .before_name = "function<｜tool▁sep｜>",
     .after_name = "\n```json\n",
     .after_arguments = "```",
     .end = "<｜tool▁call▁end｜>",
     .around = {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"}},
    {.name = "deepseek-v3.1",
     .tells = {"<｜tool▁sep｜>"},
     .form = CALL_NAMED,
     .begin = "<｜tool▁call▁begin｜>",
     .before_name = "",
     .after_name = "<｜tool▁sep｜>",
     .after_arguments = "",
     .end = "<｜tool▁call▁end｜>",
     .around = {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"}},
    {.name = "mistral-args",
     .tells = {"[TOOL_CALLS]", "[ARGS]"},
     .form = CALL_NAMED,
     .begin = "[TOOL_CALLS]",
     .before_name = "",
     .after_name = "[ARGS]",
     .after_arguments = "",
     .end = "",
     .think = {"[THINK]", "[/THINK]"}},
    {.name = "mistral",
     .tells = {"[TOOL_CALLS]"},
     .form = CALL_JSON,
     .begin = "[TOOL_CALLS]",
     .end = "",
     .think = {"[THINK]", "[/THINK]"}},
    {.name = "llama-python",
     .tells = {"func_name1(params_name1"},
     .form = CALL_PYTHON,
     .begin = "<|python_start|>",
     .end = "<|python_end|>",
     .bare = '['},
    {.name = "llama-json",
     .tells = {"<|eot_id|>", "\"parameters\""},
     .form = CALL_JSON,
     .begin = "<|python_tag|>",
     .end = "",
     .bare = '{'},
};

const struct convention *convention_of(const char *source, size_t len)
{
    for (size_t i = 0; i < sizeof(CONVENTIONS) / sizeof(CONVENTIONS[0]); i++) {
        bool is_it = true;
        for (size_t k = 0; k < 3 && CONVENTIONS[i].tells[k]; k++)
            is_it = is_it && memmem(source, len, CONVENTIONS[i].tells[k], strlen(CONVENTIONS[i].tells[k]));
        if (is_it)
            return &CONVENTIONS[i];
    }
    return NULL;
}

const char *convention_name(const struct convention *c)
{
    return c ? c->name : "none";
}

static const char *think_of(const struct convention *c, bool closes)
{
    if (c && c->think[0])
        return c->think[closes];
    return closes ? "</think>" : "<think>";
}

static bool has_channels(const struct convention *c)
{
    return c && c->form == CALL_CHANNELS;
}

bool convention_is_mark_of_reasoning(const struct convention *c, const char *text, size_t len)
{
    static const char *const CHANNELS[] = {"<|start|>", "<|channel|>", "<|message|>", "<|constrain|>",
                                           "<|end|>",   "<|return|>",  "<|call|>"};
    bool is_it = reply_mark(text, len, think_of(c, false)) == 1 || reply_mark(text, len, think_of(c, true)) == 1;
    for (size_t i = 0; has_channels(c) && i < sizeof(CHANNELS) / sizeof(CHANNELS[0]); i++)
        is_it = is_it || reply_mark(text, len, CHANNELS[i]) == 1;
    return is_it;
}

/* A mark may be several tokens. */
bool convention_is_mark_of_calls(const struct convention *c, const char *text, size_t len)
{
    const char *marks[] = {c ? c->begin : NULL,
                           c ? c->end : NULL,
                           c ? c->around[0] : NULL,
                           c ? c->around[1] : NULL,
                           c ? c->before_name : NULL,
                           c ? c->after_name : NULL,
                           "[CALL_ID]"};
    bool is_it = false;
    for (size_t i = 0; c && i < sizeof(marks) / sizeof(marks[0]); i++)
        is_it = is_it || (len && marks[i] && memmem(marks[i], strlen(marks[i]), text, len));
    return is_it;
}

bool convention_reasons(const struct convention *c, const char *source, size_t len)
{
    return has_channels(c) || memmem(source, len, think_of(c, true), strlen(think_of(c, true)));
}

bool convention_ends_in_reasoning(const struct convention *c, const char *prompt, size_t len)
{
    const char *mark = think_of(c, false);
    while (len && reply_space(prompt + len - 1, 1))
        len--;
    return !has_channels(c) && len >= strlen(mark) && !memcmp(prompt + len - strlen(mark), mark, strlen(mark));
}

enum reply_state { AT_START, IN_TEXT, IN_REASONING, IN_CALL, IN_HEAD, IN_CHANNEL };
enum channel { CHANNEL_TEXT, CHANNEL_REASONING, CHANNEL_CALL };

struct reply {
    struct reply_params p;
    enum reply_state state;
    struct bytes held;  /* what has come and is not decided yet */
    struct bytes space; /* white space before it, of the text or the reasoning */
    bool has_text;      /* of the text, or of the reasoning, something was told: no white space before it */
    bool is_bare;       /* the call has no mark */
    uint32_t n_calls;
    struct reply_scan scan; /* of a call in JSON or Python: what was looked at of held */
    size_t looked;          /* of another: the same */
    bool is_telling;        /* strict: the call's name was told */
    size_t arguments_at;    /* then: where they begin in held, how far they go, whether they are over */
    struct reply_scan arguments;
    bool are_arguments_over;
    size_t told; /* strict: bytes of them that were told */
    enum channel channel;
    char *function; /* CHANNEL_CALL */
    struct reply_delta delta;
};

struct reply *reply_open(const struct reply_params *p)
{
    struct reply *r = mem_zalloc(sizeof(*r));
    r->p = *p;
    if (p->convention && p->convention->form == CALL_CHANNELS)
        r->state = IN_HEAD;
    else if (p->has_reasoning && p->begins_reasoning)
        r->state = IN_REASONING;
    return r;
}

void reply_clear(struct reply *r)
{
    for (size_t i = 0; i < r->delta.n_calls; i++) {
        bytes_free(&r->delta.calls[i].name);
        bytes_free(&r->delta.calls[i].arguments);
    }
    free(r->delta.calls);
    r->delta.calls = NULL;
    r->delta.n_calls = 0;
    bytes_clear(&r->delta.text);
    bytes_clear(&r->delta.reasoning);
}

void reply_close(struct reply *r)
{
    if (!r)
        return;
    reply_clear(r);
    bytes_free(&r->delta.text);
    bytes_free(&r->delta.reasoning);
    bytes_free(&r->held);
    bytes_free(&r->space);
    free(r->function);
    free(r);
}

uint32_t reply_calls(const struct reply *r)
{
    return r->n_calls;
}

/* ---------------------------------------------------------------------------- telling */

/* Takes the first n bytes of what is held. */
static void drop(struct reply *r, size_t n)
{
    memmove(r->held.data, r->held.data + n, r->held.len - n);
    r->held.len -= n;
}

/* Tells text, or reasoning, but for white space at its ends. */
static void tell(struct reply *r, struct bytes *to, const char *text, size_t len)
{
    size_t end = len, begin = r->has_text ? 0 : reply_space(text, len);
    while (end > begin && reply_space(text + end - 1, 1))
        end--;
    if (end > begin) {
        bytes_append(to, r->space.data ? r->space.data : "", r->space.len);
        bytes_clear(&r->space);
        bytes_append(to, text + begin, end - begin);
        r->has_text = true;
        begin = end;
    }
    if (r->has_text)
        bytes_append(&r->space, text + begin, len - begin);
}

static void tell_held(struct reply *r, struct bytes *to, size_t n)
{
    tell(r, to, r->held.data, n);
    drop(r, n);
}

static struct reply_call *new_delta(struct reply *r, uint32_t index)
{
    struct reply_delta *d = &r->delta;
    d->calls = mem_resize(d->calls, d->n_calls + 1, sizeof(*d->calls));
    d->calls[d->n_calls] = (struct reply_call){.index = index};
    return &d->calls[d->n_calls++];
}

static void tell_call(struct reply *r, const char *name, const struct bytes *arguments)
{
    struct reply_call *d = new_delta(r, r->n_calls++);
    bytes_append(&d->name, name, strlen(name));
    bytes_append(&d->arguments, arguments->data, arguments->len);
    bytes_clear(&r->space); /* what was before it */
}

/* ------------------------------------------------------------------------------ marks */

/* The first of the marks in what is held, from *n on; *n bytes are before it. -1: none; then they are before
 * what may begin one. */
static int next_mark(const struct reply *r, const char *const *marks, int n_marks, size_t *n)
{
    const struct bytes *h = &r->held;
    for (; *n < h->len; ++*n) {
        bool may = false;
        for (int i = 0; i < n_marks; i++) {
            int state = marks[i] && *marks[i] ? reply_mark(h->data + *n, h->len - *n, marks[i]) : -1;
            if (state == 1)
                return i;
            may = may || !state;
        }
        if (may)
            return -1;
    }
    return -1;
}

static const char *think(const struct reply *r, bool closes)
{
    return think_of(r->p.convention, closes);
}

static bool has_calls(const struct reply *r)
{
    return r->p.convention && json_array_size(r->p.tools);
}

/* ------------------------------------------------------------------------------ calls */

/* What is held begins a call, or is behind one. */
static void begin_call(struct reply *r)
{
    r->scan = r->arguments = (struct reply_scan){0};
    r->looked = r->told = 0;
    r->is_telling = r->are_arguments_over = false;
}

/* The mark was no mark: what follows it is text, and looked at again. */
static void give_up(struct reply *r)
{
    if (!r->is_bare)
        tell(r, &r->delta.text, r->p.convention->begin, strlen(r->p.convention->begin));
    r->state = IN_TEXT;
}

/* Whether what has come since the last time is within a call. Then it isn't parsed: else the work would grow
 * with the square of the call's length. */
static bool is_within(struct reply *r)
{
    const struct convention *c = r->p.convention;
    const struct bytes *h = &r->held;
    bool has_ended = false;
    if (c->form == CALL_KEYS || c->form == CALL_TAGS) {
        size_t n = strlen(c->end), from = r->looked > n ? r->looked - n : 0;
        r->looked = h->len;
        return !memmem(h->data + from, h->len - from, c->end, n);
    }
    while (reply_scan(&r->scan, h->data, h->len))
        has_ended = true;
    return !has_ended && r->scan.depth;
}

/* strict: tells what is new of a call that will be whole. */
static void tell_part(struct reply *r)
{
    const struct bytes *h = &r->held;
    const char *name = NULL, *arguments;
    size_t name_len = 0;
    if (!r->is_telling) {
        if (!calls_peek(r->p.convention, h->data, h->len, &name, &name_len, &arguments))
            return;
        r->arguments_at = (size_t)(arguments - h->data);
    }
    if (!r->are_arguments_over)
        r->are_arguments_over = reply_scan(&r->arguments, h->data + r->arguments_at, h->len - r->arguments_at);
    if (r->arguments.at == r->told)
        return;
    struct reply_call *d = new_delta(r, r->n_calls);
    bytes_append(&d->name, name, name_len);
    bytes_append(&d->arguments, h->data + r->arguments_at + r->told, r->arguments.at - r->told);
    bytes_clear(&r->space);
    r->told = r->arguments.at;
    r->is_telling = true;
}

static void step_call(struct reply *r, bool is_over)
{
    const struct convention *c = r->p.convention;
    struct calls_read calls = {0};
    if (r->p.is_strict)
        tell_part(r);
    if (is_within(r) && !is_over)
        return;
    ptrdiff_t n = calls_parse(c, r->p.tools, r->held.data, r->held.len, r->is_bare, is_over, &calls);
    if (n < 0 && r->is_telling) { /* cut off by the end of the answer */
        r->n_calls++;
        r->state = IN_TEXT;
        drop(r, r->held.len);
        begin_call(r);
    } else if (n < 0) {
        give_up(r);
    }
    if (n <= 0)
        return;
    for (size_t i = 0; i < calls.n; i++)
        if (i || !r->is_telling)
            tell_call(r, calls.calls[i].name, &calls.calls[i].arguments);
        else
            r->n_calls++;
    calls_read_free(&calls);
    drop(r, (size_t)n);
    begin_call(r);
    r->has_text = false; /* white space behind a call is nobody's */
    r->state = IN_TEXT;
}

/* ------------------------------------------------------------------------------- text */

static void step_text(struct reply *r, bool is_over)
{
    const struct convention *c = has_calls(r) ? r->p.convention : NULL;
    bool is_start = r->state == AT_START;
    size_t n = is_start ? reply_space(r->held.data, r->held.len) : 0;
    if (is_start && n == r->held.len && !is_over)
        return;
    if (is_start && c && c->bare && n < r->held.len && r->held.data[n] == c->bare) {
        begin_call(r);
        r->state = IN_CALL;
        r->is_bare = true;
        return;
    }
    const char *marks[] = {r->p.has_reasoning && is_start ? think(r, false) : NULL, c ? c->begin : NULL,
                           c ? c->around[0] : NULL, c ? c->around[1] : NULL};
    n = 0;
    int mark = next_mark(r, marks, 4, &n);
    if (mark < 0 && is_over)
        n = r->held.len;
    if (mark == 0 && reply_space(r->held.data, n) < n) /* reasoning comes first */
        mark = -1, n += strlen(marks[0]);
    if (n > reply_space(r->held.data, n))
        r->state = IN_TEXT;
    tell_held(r, &r->delta.text, n);
    if (mark < 0)
        return;
    drop(r, strlen(marks[mark]));
    begin_call(r);
    r->state = mark == 0 ? IN_REASONING : mark == 1 ? IN_CALL : IN_TEXT;
    r->is_bare = false;
}

static void step_reasoning(struct reply *r, bool is_over)
{
    const char *marks[] = {think(r, true)};
    size_t n = 0;
    int mark = next_mark(r, marks, 1, &n);
    if (mark < 0 && is_over)
        n = r->held.len;
    tell_held(r, &r->delta.reasoning, n);
    if (mark < 0)
        return;
    drop(r, strlen(marks[0]));
    bytes_clear(&r->space);
    r->has_text = false;
    r->state = IN_TEXT;
}

/* --------------------------------------------------------------------------- channels */

/* What stands before <|message|>: "assistant<|channel|>commentary to=functions.f <|constrain|>json". */
static void read_head(struct reply *r, const char *head, size_t len)
{
    const char *to = memmem(head, len, "to=functions.", 13), *channel = memmem(head, len, "<|channel|>", 11);
    bool is_analysis = channel && reply_mark(channel + 11, len - (size_t)(channel - head) - 11, "analysis") == 1;
    size_t n = 0;
    free(r->function);
    r->function = NULL;
    r->channel = is_analysis && r->p.has_reasoning ? CHANNEL_REASONING : CHANNEL_TEXT;
    if (!to)
        return;
    to += 13;
    while (to + n < head + len && !strchr(" <", to[n]))
        n++;
    if (has_calls(r) && reply_tool(r->p.tools, to, n)) {
        r->function = mem_zalloc(n + 1);
        memcpy(r->function, to, n);
        r->channel = CHANNEL_CALL;
    }
}

/* A head that the end of the answer cuts off is nobody's; what is longer than a head is text. */
static void step_head(struct reply *r, bool is_over)
{
    enum { HEAD_MOST = 512 };
    static const char *const MESSAGE[] = {"<|message|>"};
    static const char *const BEGINNINGS[] = {"<|channel|>", "<|start|>", "<|message|>", " to="};
    size_t n = r->looked, begin = 0;
    int mark = next_mark(r, MESSAGE, 1, &n), is_head = -1;
    for (size_t i = 0; i < sizeof(BEGINNINGS) / sizeof(BEGINNINGS[0]) && is_head != 1; i++) {
        int is_this = reply_mark(r->held.data, r->held.len, BEGINNINGS[i]);
        is_head = is_this > is_head ? is_this : is_head;
        begin = is_this == 1 ? strlen(BEGINNINGS[i]) : 0;
    }
    r->looked = n;
    bool is_short = mark < 0 ? r->held.len <= HEAD_MOST : n + strlen(MESSAGE[0]) <= HEAD_MOST + 1;
    if (mark < 0 && is_head >= 0 && is_short && !is_over)
        return;
    r->has_text = false;
    begin_call(r);
    r->state = IN_CHANNEL;
    r->channel = CHANNEL_TEXT;
    if (mark >= 0 && is_head >= 0 && is_short) {
        read_head(r, r->held.data, n);
        drop(r, n + strlen(MESSAGE[0]));
    } else if (is_head == 1) {
        drop(r, is_short ? r->held.len : begin);
    }
}

static void end_function(struct reply *r, size_t n)
{
    json_t *v = json_loadb(r->held.data, n, 0, NULL);
    if (r->is_telling) {
        r->n_calls++;
    } else if (json_is_object(v)) {
        const struct bytes raw = {.data = r->held.data, .len = n};
        tell_call(r, r->function, &raw);
    } else {
        tell(r, &r->delta.text, r->held.data, n);
    }
    json_decref(v);
    drop(r, n);
    begin_call(r);
}

/* strict: as tell_part(). */
static void tell_function_part(struct reply *r, size_t n)
{
    if (!r->p.is_strict || n <= r->told)
        return;
    struct reply_call *d = new_delta(r, r->n_calls);
    if (!r->is_telling)
        bytes_append(&d->name, r->function, strlen(r->function));
    bytes_append(&d->arguments, r->held.data + r->told, n - r->told);
    r->told = n;
    r->is_telling = true;
}

static void step_channel(struct reply *r, bool is_over)
{
    static const char *const ENDS[] = {"<|end|>", "<|return|>", "<|call|>", "<|start|>"};
    size_t n = r->looked;
    int mark = next_mark(r, ENDS, 4, &n);
    r->looked = r->channel == CHANNEL_CALL ? n : 0;
    if (mark < 0 && is_over)
        n = r->held.len;
    if (r->channel == CHANNEL_CALL) {
        tell_function_part(r, n);
        if (mark >= 0 || is_over)
            end_function(r, n);
    } else {
        tell_held(r, r->channel == CHANNEL_REASONING ? &r->delta.reasoning : &r->delta.text, n);
    }
    if (mark < 0)
        return;
    if (mark < 3)
        drop(r, strlen(ENDS[mark]));
    bytes_clear(&r->space);
    r->state = IN_HEAD;
}

/* -------------------------------------------------------------------------------- all */

/* Steps until nothing changes any more. */
static void run(struct reply *r, bool is_over)
{
    static void (*const STEPS[])(struct reply *, bool) = {
        [AT_START] = step_text, [IN_TEXT] = step_text, [IN_REASONING] = step_reasoning,
        [IN_CALL] = step_call,  [IN_HEAD] = step_head, [IN_CHANNEL] = step_channel};
    size_t len;
    enum reply_state state;
    do {
        len = r->held.len;
        state = r->state;
        STEPS[state](r, is_over);
    } while (r->held.len && (r->held.len != len || r->state != state));
}

const struct reply_delta *reply_delta(const struct reply *r)
{
    return &r->delta;
}

void reply_feed(struct reply *r, const char *text, size_t len)
{
    bytes_append(&r->held, text, len);
    if (r->held.len)
        run(r, false);
}

void reply_end(struct reply *r)
{
    if (r->held.len)
        run(r, true);
    if (!r->n_calls && r->space.len && r->state != IN_REASONING)
        bytes_append(&r->delta.text, r->space.data, r->space.len);
    bytes_clear(&r->space);
}
