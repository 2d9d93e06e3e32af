/*
 * Closing a place: states that take no byte are passed at once, each alternative with a copy of the stack.
 *
 * Stacks that were there already are not followed again, so loops that take no byte end. Work is bounded: of
 * a grammar that is so ambiguous that it has more places than GR_STACKS_MOST, or takes more than
 * GR_UNITS_MOST to go over a byte, the first ones are followed. What is said of them holds, but some ways to
 * go on are not seen. Work is counted, not timed, so that all workers agree.
 */
#include "grammar/places.h"

#include <stdlib.h>
#include <string.h>

void gr_places_clear(struct gr_places *s)
{
    s->n_frames = s->n_stacks = 0;
    s->n_units = 0;
    s->is_done = s->is_broken = false;
}

void gr_places_free(struct gr_places *s)
{
    free(s->frames);
    free(s->stacks);
}

uint64_t gr_places_hash(const struct gr_places *s)
{
    uint64_t h = 0x9e3779b97f4a7c15ull + s->is_done;
    for (uint32_t i = 0; i < s->n_frames; i++) {
        const struct gr_frame *f = &s->frames[i];
        h = (h ^ f->data ^ (uint64_t)f->state << 33 ^ f->is_base) * 0xff51afd7ed558ccdull;
        h ^= h >> 32;
    }
    for (uint32_t i = 0; i < s->n_stacks; i++)
        h = (h ^ s->stacks[i].n) * 0x100000001b3ull;
    return h ^ h >> 29;
}

bool gr_places_equal(const struct gr_places *a, const struct gr_places *b)
{
    if (a->is_done != b->is_done || a->n_stacks != b->n_stacks || a->n_frames != b->n_frames)
        return false;
    for (uint32_t i = 0; i < a->n_stacks; i++)
        if (a->stacks[i].n != b->stacks[i].n)
            return false;
    return !a->n_frames || !memcmp(a->frames, b->frames, a->n_frames * sizeof(*a->frames));
}

struct gr_places gr_places_copy(const struct gr_places *s)
{
    struct gr_places c = *s;
    c.frames = mem_dup(s->frames, s->n_frames * sizeof(*s->frames));
    c.stacks = mem_dup(s->stacks, s->n_stacks * sizeof(*s->stacks));
    c.cap_frames = s->n_frames;
    c.cap_stacks = s->n_stacks;
    return c;
}

/* How many frames of the two are the same, from their tops. */
static uint32_t n_same(const struct gr_frame *a, const struct gr_frame *b, uint32_t n)
{
    for (uint32_t i = n; i-- > 0;) /* tops differ first */
        if (a[i].state != b[i].state || a[i].data != b[i].data || a[i].is_base != b[i].is_base)
            return n - 1 - i;
    return n;
}

static bool is_there(const struct gr_places *s, const struct gr_frame *stack, uint32_t n, uint64_t *n_units)
{
    uint32_t n_here = 0;
    for (uint32_t i = 0; i < s->n_stacks && n_here < n; i++) {
        n_here = s->stacks[i].n == n ? n_same(s->frames + s->stacks[i].at, stack, n) : 0;
        *n_units += 1 + n_here;
    }
    return n_here == n;
}

/* Appends a stack. It may be one of s itself. */
static void push(struct gr_places *s, const struct gr_frame *stack, uint32_t n)
{
    uintptr_t offset = (uintptr_t)stack - (uintptr_t)s->frames;
    bool is_inside = s->frames && offset < (uintptr_t)s->cap_frames * sizeof(*stack);
    while (s->n_frames + n > s->cap_frames) {
        s->cap_frames = s->cap_frames ? 2 * s->cap_frames : 256;
        s->frames = mem_resize(s->frames, s->cap_frames, sizeof(*s->frames));
    }
    if (is_inside)
        stack = (const struct gr_frame *)((const char *)s->frames + offset);
    s->stacks = MEM_ROOM(s->stacks, s->n_stacks, s->cap_stacks, 16);
    s->stacks[s->n_stacks++] = (struct gr_stack){s->n_frames, n};
    memcpy(s->frames + s->n_frames, stack, n * sizeof(*stack));
    s->n_frames += n;
}

/* ----------------------------------------------------------------- one closing */

/* A byte is taken at the stack. */
static void rest(struct gr_places *out, const struct gr_frame *stack, uint32_t n)
{
    if (is_there(out, stack, n, &out->n_units))
        return;
    if (out->n_stacks < GR_STACKS_MOST)
        push(out, stack, n);
    else
        out->is_broken = true;
}

struct closing {
    const struct gr_program *p;
    struct gr_places *work; /* the stacks that were seen, whether they rest or not */
    struct gr_places *out;  /* those that rest; counts the work */
};

/* Adds the stack of `of` with another top frame. */
static void add(struct closing *c, const struct gr_frame *of, uint32_t n, struct gr_frame top)
{
    struct gr_frame stack[GR_DEPTH_MOST];
    c->out->n_units += n;
    if (c->out->n_units > GR_UNITS_MOST) {
        c->out->is_broken = true;
        return;
    }
    memcpy(stack, of, (n - 1) * sizeof(*stack));
    stack[n - 1] = top;
    if (!is_there(c->work, stack, n, &c->out->n_units))
        push(c->work, stack, n);
}

static void add_state(struct closing *c, const struct gr_frame *stack, uint32_t n, uint32_t state)
{
    struct gr_frame top = stack[n - 1];
    top.state = state;
    add(c, stack, n, top);
}

/* Adds the stack with another frame on top; the frame below goes on at `state` later. */
static void add_call(struct closing *c, const struct gr_frame *stack, uint32_t n, uint32_t state, struct gr_frame top)
{
    struct gr_frame deeper[GR_DEPTH_MOST];
    if (n == GR_DEPTH_MOST) {
        c->out->is_broken = true;
        return;
    }
    memcpy(deeper, stack, n * sizeof(*deeper));
    deeper[n - 1].state = state;
    add(c, deeper, n + 1, top);
}

static void pass_repeat(struct closing *c, const struct gr_frame *stack, uint32_t n)
{
    const struct gr_repeat *r = &c->p->repeats[c->p->states[stack[n - 1].state].a];
    uint64_t count = stack[n - 1].data;
    if (count < r->most)
        add_call(c, stack, n, r->back, (struct gr_frame){.state = r->body});
    if (count >= r->least)
        add_state(c, stack, n, r->next);
}

static void pass_back(struct closing *c, const struct gr_frame *stack, uint32_t n)
{
    const struct gr_repeat *r = &c->p->repeats[c->p->states[stack[n - 1].state].a];
    struct gr_frame top = {.state = r->self, .is_base = stack[n - 1].is_base, .data = stack[n - 1].data};
    top.data += top.data < r->least || r->most != UINT32_MAX; /* without a limit, more than enough is enough */
    add(c, stack, n, top);
}

static void pass_object(struct closing *c, const struct gr_frame *stack, uint32_t n)
{
    const struct gr_state *s = &c->p->states[stack[n - 1].state];
    const struct gr_object *o = &c->p->objects[s->a];
    uint64_t came = stack[n - 1].data;
    bool has_keys = (o->all & ~came) || o->other_key != GR_NO_STATE;
    if (s->b != GR_NEXT_KEY && (came & o->required) == o->required)
        add_state(c, stack, n, o->close);
    if (s->b == GR_AFTER_VALUE) {
        if (has_keys)
            add_state(c, stack, n, o->comma);
        return;
    }
    if (o->all & ~came)
        add_call(c, stack, n, stack[n - 1].state, (struct gr_frame){.state = o->keys, .data = o->root});
    if (o->other_key != GR_NO_STATE)
        add_call(c, stack, n, o->other_colon, (struct gr_frame){.state = o->other_key, .is_base = true});
}

/* Looks at one stack: it rests, it ends, or others are added. */
static void pass(struct closing *c, const struct gr_frame *stack, uint32_t n)
{
    const struct gr_state *s = &c->p->states[stack[n - 1].state];
    switch ((enum gr_op)s->op) {
    case GR_OP_BYTES:
        if (!s->b)
            return; /* nothing comes from here */
        /* fallthrough */
    case GR_OP_KEYS:
        rest(c->out, stack, n);
        return;
    case GR_OP_END:
        if (n == 1)
            c->out->is_done = true;
        else
            add(c, stack, n - 1, stack[n - 2]);
        return;
    case GR_OP_SPLIT:
        for (uint32_t i = 0; i < s->b; i++)
            add_state(c, stack, n, c->p->lists[s->a + i]);
        return;
    case GR_OP_CALL:
        add_call(c, stack, n, s->b, (struct gr_frame){.state = s->a, .is_base = s->cuts});
        return;
    case GR_OP_REPEAT:
        pass_repeat(c, stack, n);
        return;
    case GR_OP_BACK:
        pass_back(c, stack, n);
        return;
    case GR_OP_OBJECT:
        pass_object(c, stack, n);
        return;
    }
}

void gr_close(const struct gr_program *p, const struct gr_frame *stack, uint32_t n, struct gr_places *out)
{
    const struct gr_state *top = &p->states[stack[n - 1].state];
    if (top->op == GR_OP_KEYS || (top->op == GR_OP_BYTES && top->b)) { /* most often: it rests */
        rest(out, stack, n);
        return;
    }
    struct gr_places work = {0};
    struct closing c = {p, &work, out};
    struct gr_frame copy[GR_DEPTH_MOST];
    push(&work, stack, n);
    for (uint32_t i = 0; i < work.n_stacks; i++) {
        uint32_t depth = work.stacks[i].n;
        memcpy(copy, work.frames + work.stacks[i].at, depth * sizeof(*copy)); /* the set grows and moves */
        pass(&c, copy, depth);
    }
    gr_places_free(&work);
}

/* -------------------------------------------------------------------- a byte */

static void step_keys(const struct gr_program *p, struct gr_frame *stack, uint32_t n, uint8_t byte,
                      struct gr_places *out)
{
    const struct gr_object *o = &p->objects[p->states[stack[n - 1].state].a];
    uint64_t open = ~stack[n - 2].data;
    uint32_t node = p->keys[stack[n - 1].data].child;
    while (node && (p->keys[node].byte != byte || !(p->keys[node].reach & open)))
        node = p->keys[node].sibling;
    if (!node)
        return;
    uint32_t property = p->keys[node].property;
    if (property == UINT32_MAX) {
        stack[n - 1].data = node;
    } else {
        n--;
        stack[n - 1].data |= 1ull << property;
        stack[n - 1].state = o->colons[property];
    }
    gr_close(p, stack, n, out);
}

static void step_bytes(const struct gr_program *p, struct gr_frame *stack, uint32_t n, uint8_t byte,
                       struct gr_places *out)
{
    const struct gr_state *s = &p->states[stack[n - 1].state];
    for (uint32_t i = 0; i < s->b; i++) {
        const struct gr_range *r = &p->ranges[s->a + i];
        if (byte < r->first || byte > r->last)
            continue;
        stack[n - 1].state = r->next;
        gr_close(p, stack, n, out);
        return; /* ranges of a state do not overlap */
    }
}

static void add_range(uint64_t out[GR_SET_WORDS], uint8_t first, uint8_t last)
{
    for (unsigned b = first; b <= last; b++)
        out[b / 64] |= 1ull << b % 64;
}

void gr_bytes_taken(const struct gr_program *p, const struct gr_places *from, uint64_t out[GR_SET_WORDS])
{
    memset(out, 0, GR_SET_WORDS * sizeof(*out));
    for (uint32_t i = 0; i < from->n_stacks; i++) {
        const struct gr_frame *top = from->frames + from->stacks[i].at + from->stacks[i].n - 1;
        const struct gr_state *s = &p->states[top->state];
        if (s->op == GR_OP_KEYS)
            for (uint32_t node = p->keys[top->data].child; node; node = p->keys[node].sibling)
                add_range(out, p->keys[node].byte, p->keys[node].byte);
        else
            for (uint32_t k = 0; k < s->b; k++)
                add_range(out, p->ranges[s->a + k].first, p->ranges[s->a + k].last);
    }
}

void gr_step(const struct gr_program *p, const struct gr_places *from, uint8_t byte, struct gr_places *out)
{
    gr_places_clear(out);
    for (uint32_t i = 0; i < from->n_stacks && out->n_units <= GR_UNITS_MOST; i++) {
        struct gr_frame stack[GR_DEPTH_MOST];
        uint32_t n = from->stacks[i].n;
        memcpy(stack, from->frames + from->stacks[i].at, n * sizeof(*stack));
        if (p->states[stack[n - 1].state].op == GR_OP_KEYS)
            step_keys(p, stack, n, byte, out);
        else
            step_bytes(p, stack, n, byte, out);
    }
}

/* --------------------------------------------------------------------- checks */

static const uint64_t CHECK_UNITS_MOST = 1 << 23; /* work of all checks of a program */

static enum td_status check_rule(const struct gr_program *p, uint32_t rule, uint64_t *n_units, struct td_error *e)
{
    const struct gr_frame first = {.state = rule};
    struct gr_places places = {0};
    gr_close(p, &first, 1, &places);
    bool is_broken = places.is_broken, is_empty = !places.n_stacks && !places.is_done;
    *n_units += places.n_units;
    gr_places_free(&places);
    if (*n_units > CHECK_UNITS_MOST)
        return td_fail(e, TD_ERR_NO_SPACE, "its rules have too many beginnings");
    if (is_broken)
        return td_fail(e, TD_ERR_UNSUPPORTED, "a rule begins with itself, or has too many beginnings (more than %d)",
                       GR_STACKS_MOST);
    return is_empty ? td_fail(e, TD_ERR_INVALID, "a rule allows nothing") : TD_OK;
}

enum td_status gr_check_rules(const struct gr_program *p, struct td_error *e)
{
    uint8_t *is_seen = mem_array(p->n_states, 1);
    uint64_t n_units = 0;
    enum td_status s = check_rule(p, p->start, &n_units, e);
    for (uint32_t i = 0; i < p->n_states && !s; i++) {
        const struct gr_state *call = &p->states[i];
        if (call->op != GR_OP_CALL || is_seen[call->a])
            continue;
        is_seen[call->a] = 1;
        s = check_rule(p, call->a, &n_units, e);
    }
    free(is_seen);
    return s;
}
