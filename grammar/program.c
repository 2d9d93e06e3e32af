#include "grammar/grammar_internal.h"

#include <stdlib.h>
#include <string.h>

void gr_program_init(struct gr_program *p)
{
    *p = (struct gr_program){0};
    gr_add(p, (struct gr_state){.op = GR_OP_END});
    p->keys = MEM_ROOM(p->keys, p->n_keys, p->cap_keys, 16);
    p->keys[p->n_keys++] = (struct gr_key){0}; /* 0 means none */
}

void gr_program_fini(struct gr_program *p)
{
    free(p->states);
    free(p->ranges);
    free(p->repeats);
    free(p->objects);
    free(p->keys);
    free(p->lists);
}

size_t gr_program_bytes(const struct gr_program *p)
{
    return p->cap_states * sizeof(*p->states) + p->cap_ranges * sizeof(*p->ranges) +
           p->cap_repeats * sizeof(*p->repeats) + p->cap_objects * sizeof(*p->objects) +
           p->cap_keys * sizeof(*p->keys) + p->cap_lists * sizeof(*p->lists);
}

uint32_t gr_add(struct gr_program *p, struct gr_state s)
{
    if (p->n_states >= GR_STATES_MOST) {
        p->is_full = true;
        return GR_END;
    }
    p->states = MEM_ROOM(p->states, p->n_states, p->cap_states, 64);
    p->states[p->n_states] = s;
    return p->n_states++;
}

uint32_t gr_bytes(struct gr_program *p, const struct gr_range *ranges, uint32_t n)
{
    uint32_t at = p->n_ranges;
    for (uint32_t i = 0; i < n && !p->is_full; i++) {
        p->ranges = MEM_ROOM(p->ranges, p->n_ranges, p->cap_ranges, 64);
        p->ranges[p->n_ranges++] = ranges[i];
    }
    return gr_add(p, (struct gr_state){.op = GR_OP_BYTES, .a = at, .b = n});
}

uint32_t gr_byte(struct gr_program *p, uint8_t first, uint8_t last, uint32_t next)
{
    return gr_bytes(p, &(struct gr_range){first, last, next}, 1);
}

uint32_t gr_text(struct gr_program *p, const char *text, size_t len, uint32_t next)
{
    while (len--)
        next = gr_byte(p, (uint8_t)text[len], (uint8_t)text[len], next);
    return next;
}

uint32_t gr_split(struct gr_program *p, const uint32_t *states, uint32_t n)
{
    uint32_t at = p->n_lists;
    if (n == 1)
        return states[0];
    for (uint32_t i = 0; i < n && !p->is_full; i++) {
        p->lists = MEM_ROOM(p->lists, p->n_lists, p->cap_lists, 64);
        p->lists[p->n_lists++] = states[i];
    }
    return gr_add(p, (struct gr_state){.op = GR_OP_SPLIT, .a = at, .b = n});
}

static int by_bytes(const void *a, const void *b)
{
    const struct bytes *x = a, *y = b;
    int order = memcmp(x->data ? x->data : "", y->data ? y->data : "", x->len < y->len ? x->len : y->len);
    return order ? order : (x->len > y->len) - (x->len < y->len);
}

/* Texts [0, n), which are sorted and share their first `at` bytes, from there on. */
static uint32_t one_of_sorted(struct gr_program *p, const struct bytes *texts, uint32_t n, size_t at, uint32_t next)
{
    struct gr_range ranges[256];
    uint32_t n_ranges = 0, i = 0;
    if (n == 1)
        return gr_text(p, texts[0].data + at, texts[0].len - at, next);
    size_t shared = at;
    while (shared < texts[0].len && shared < texts[n - 1].len && texts[0].data[shared] == texts[n - 1].data[shared])
        shared++;
    if (shared > at)
        return gr_text(p, texts[0].data + at, shared - at, one_of_sorted(p, texts, n, shared, next));
    while (i < n && texts[i].len == at)
        i++;
    bool ends = i > 0;
    while (i < n) {
        uint32_t from = i;
        uint8_t byte = (uint8_t)texts[i].data[at];
        while (i < n && (uint8_t)texts[i].data[at] == byte)
            i++;
        ranges[n_ranges++] = (struct gr_range){byte, byte, one_of_sorted(p, texts + from, i - from, at + 1, next)};
    }
    if (!n_ranges)
        return next;
    uint32_t more = gr_bytes(p, ranges, n_ranges);
    return ends ? gr_either(p, more, next) : more;
}

uint32_t gr_one_of(struct gr_program *p, struct bytes *texts, uint32_t n, uint32_t next)
{
    if (!n)
        return gr_bytes(p, NULL, 0);
    qsort(texts, n, sizeof(*texts), by_bytes);
    return one_of_sorted(p, texts, n, 0, next);
}

uint32_t gr_either(struct gr_program *p, uint32_t a, uint32_t b)
{
    return gr_split(p, (const uint32_t[]){a, b}, 2);
}

uint32_t gr_call(struct gr_program *p, uint32_t rule, bool cuts, uint32_t next)
{
    return gr_add(p, (struct gr_state){.op = GR_OP_CALL, .cuts = cuts, .a = rule, .b = next});
}

uint32_t gr_repeat(struct gr_program *p, uint32_t body, uint32_t least, uint32_t most)
{
    uint32_t i = p->n_repeats;
    p->repeats = MEM_ROOM(p->repeats, p->n_repeats, p->cap_repeats, 16);
    p->n_repeats++;
    uint32_t self = gr_add(p, (struct gr_state){.op = GR_OP_REPEAT, .a = i}),
             back = gr_add(p, (struct gr_state){.op = GR_OP_BACK, .a = i});
    p->repeats[i] =
        (struct gr_repeat){.body = body, .next = GR_END, .self = self, .back = back, .least = least, .most = most};
    return self;
}

uint32_t gr_later(struct gr_program *p)
{
    return gr_split(p, (const uint32_t[]){GR_END, GR_END}, 2);
}

void gr_become(struct gr_program *p, uint32_t later, uint32_t state)
{
    if (p->is_full)
        return;
    p->lists[p->states[later].a] = state;
    p->states[later].b = 1;
}

uint32_t gr_object_new(struct gr_program *p)
{
    uint32_t i = p->n_objects;
    p->objects = MEM_ROOM(p->objects, p->n_objects, p->cap_objects, 8);
    p->n_objects++;
    p->keys = MEM_ROOM(p->keys, p->n_keys, p->cap_keys, 16);
    p->keys[p->n_keys] = (struct gr_key){.property = UINT32_MAX};
    p->objects[i] = (struct gr_object){.root = p->n_keys++, .other_key = GR_NO_STATE, .other_colon = GR_NO_STATE};
    p->objects[i].keys = gr_add(p, (struct gr_state){.op = GR_OP_KEYS, .a = i});
    return i;
}

/* The child of this node for the byte, which is made if it is not there. */
static uint32_t key_child(struct gr_program *p, uint32_t node, uint8_t byte)
{
    uint32_t c = p->keys[node].child;
    while (c && p->keys[c].byte != byte)
        c = p->keys[c].sibling;
    if (c)
        return c;
    p->keys = MEM_ROOM(p->keys, p->n_keys, p->cap_keys, 16);
    c = p->n_keys++;
    p->keys[c] = (struct gr_key){.byte = byte, .sibling = p->keys[node].child, .property = UINT32_MAX};
    p->keys[node].child = c;
    return c;
}

void gr_object_key(struct gr_program *p, uint32_t object, const char *text, size_t len, uint32_t property)
{
    uint32_t node = p->objects[object].root;
    for (size_t i = 0; i < len; i++) {
        p->keys[node].reach |= 1ull << property;
        node = key_child(p, node, (uint8_t)text[i]);
    }
    p->keys[node].reach |= 1ull << property;
    p->keys[node].property = property;
}
