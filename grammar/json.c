/* Values of JSON as rules, and the text of strings. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "grammar/grammar_internal.h"

enum { INDENTATION_MOST = 40 };

/* Nothing, one space, or one or two ends of a line and an indentation. Models that may write any space write
 * nothing else sometimes, until their tokens are used up. */
uint32_t gr_space(struct gr_program *p, uint32_t next)
{
    uint32_t indented = next, line, lines;
    for (int i = 0; i < INDENTATION_MOST; i++) {
        const struct gr_range deeper[] = {{'\t', '\t', indented}, {' ', ' ', indented}};
        indented = gr_either(p, gr_bytes(p, deeper, 2), next);
    }
    line = gr_byte(p, '\n', '\n', indented);
    const struct gr_range second[] = {{'\n', '\n', indented}, {'\r', '\r', line}};
    lines = gr_either(p, gr_bytes(p, second, 2), indented);
    const struct gr_range first[] = {
        {'\n', '\n', lines}, {'\r', '\r', gr_byte(p, '\n', '\n', lines)}, {' ', ' ', next}};
    return gr_either(p, gr_bytes(p, first, 3), next);
}

uint32_t gr_colon(struct gr_program *p, uint32_t next)
{
    uint32_t colon = gr_byte(p, ':', ':', gr_space(p, next));
    return gr_either(p, gr_byte(p, ' ', ' ', colon), colon);
}

enum { FOREIGN_RANGES = 8 };

/* Characters beyond ASCII in UTF-8, then next. */
static void put_foreign(struct gr_program *p, uint32_t next, struct gr_range out[FOREIGN_RANGES])
{
    uint32_t one = gr_byte(p, 0x80, 0xbf, next), two = gr_byte(p, 0x80, 0xbf, one), three = gr_byte(p, 0x80, 0xbf, two);
    const struct gr_range ranges[FOREIGN_RANGES] = {{0xc2, 0xdf, one},   {0xe0, 0xe0, gr_byte(p, 0xa0, 0xbf, one)},
                                                    {0xe1, 0xec, two},   {0xed, 0xed, gr_byte(p, 0x80, 0x9f, one)},
                                                    {0xee, 0xef, two},   {0xf0, 0xf0, gr_byte(p, 0x90, 0xbf, two)},
                                                    {0xf1, 0xf3, three}, {0xf4, 0xf4, gr_byte(p, 0x80, 0x8f, two)}};
    memcpy(out, ranges, sizeof(ranges));
}

/* What comes behind the first quote of any string, with the closing one. */
static uint32_t string_body(struct gr_program *p)
{
    uint32_t later = gr_later(p);
    const struct gr_range hex[] = {{'0', '9', 0}, {'A', 'F', 0}, {'a', 'f', 0}};
    uint32_t four = later;
    for (int i = 0; i < 4; i++) {
        struct gr_range r[3];
        for (int k = 0; k < 3; k++)
            r[k] = (struct gr_range){hex[k].first, hex[k].last, four};
        four = gr_bytes(p, r, 3);
    }
    const struct gr_range escapes[] = {{'"', '"', later}, {'/', '/', later}, {'\\', '\\', later},
                                       {'b', 'b', later}, {'f', 'f', later}, {'n', 'n', later},
                                       {'r', 'r', later}, {'t', 't', later}, {'u', 'u', four}};
    uint32_t escape = gr_bytes(p, escapes, 9);
    struct gr_range all[5 + FOREIGN_RANGES] = {
        {0x20, 0x21, later}, {'"', '"', GR_END}, {0x23, 0x5b, later}, {'\\', '\\', escape}, {0x5d, 0x7f, later}};
    put_foreign(p, later, all + 5);
    uint32_t body = gr_bytes(p, all, 13);
    gr_become(p, later, body);
    return body;
}

static uint32_t expression(struct gr_program *p, const char *text)
{
    struct gr_tree t = {0};
    struct gr_node *n = NULL;
    uint32_t state = GR_END;
    if (!gr_parse_pattern(&t, text, strlen(text), false, &n, NULL))
        state = gr_emit(p, n, GR_RAW, GR_END);
    gr_tree_free(&t);
    return state;
}

/* [ ... ] or { ... } of items, with space where it may be. */
static uint32_t container(struct gr_program *p, char open, char close,
                          uint32_t (*item)(struct gr_program *p, const struct gr_json *j, uint32_t next),
                          const struct gr_json *j)
{
    uint32_t end = gr_byte(p, (uint8_t)close, (uint8_t)close, GR_END), later = gr_later(p),
             more = gr_space(p, gr_either(p, gr_byte(p, ',', ',', gr_space(p, later)), end)), first = item(p, j, more);
    gr_become(p, later, first);
    return gr_byte(p, (uint8_t)open, (uint8_t)open, gr_space(p, gr_either(p, first, end)));
}

static uint32_t element(struct gr_program *p, const struct gr_json *j, uint32_t next)
{
    return gr_call(p, j->value, true, next);
}

static uint32_t member(struct gr_program *p, const struct gr_json *j, uint32_t next)
{
    uint32_t value = gr_call(p, j->value, true, next);
    return gr_call(p, j->string, true, gr_colon(p, value));
}

/* What may come in a name of no property, after the first byte that no property has there. */
static void other_body(struct gr_program *p, struct gr_json *j)
{
    static const struct gr_span ESCAPED[] = {{0, 0x1f}, {0x7f, 0xffff}};
    uint32_t later = gr_later(p), four = gr_four_digits(p, ESCAPED, 2, later);
    const struct gr_range escapes[] = {{'"', '"', later}, {'\\', '\\', later}, {'b', 'b', later}, {'f', 'f', later},
                                       {'n', 'n', later}, {'r', 'r', later},   {'t', 't', later}, {'u', 'u', four}};
    struct gr_range all[GR_OTHER_RANGES] = {{0x20, 0x21, later},
                                            {0x23, 0x5b, later},
                                            {'\\', '\\', gr_bytes(p, escapes, 8)},
                                            {0x5d, 0x7f, later},
                                            [GR_OTHER_RANGES - 1] = {'"', '"', GR_END}};
    put_foreign(p, later, all + 4);
    gr_become(p, later, gr_bytes(p, all, 13));
    memcpy(j->other, all, sizeof(all));
}

static void init_strings(struct gr_program *p)
{
    const struct gr_span all = {0, 0x10ffff};
    struct gr_tree t = {0};
    p->strings.rest = string_body(p);
    p->strings.end = gr_byte(p, '"', '"', GR_END);
    p->strings.character = gr_emit(p, gr_node_class(&t, &all, 1), GR_IN_STRING, GR_END);
    p->strings.at_most = p->n_repeats;
    gr_repeat(p, p->strings.character, 0, GR_LENGTH_MOST);
    p->strings.exactly = p->n_repeats;
    gr_repeat(p, p->strings.character, GR_LENGTH_MOST, GR_LENGTH_MOST);
    gr_tree_free(&t);
}

void gr_json_init(struct gr_program *p, struct gr_json *j)
{
    j->value = gr_later(p);
    init_strings(p);
    j->string = gr_byte(p, '"', '"', p->strings.rest);
    j->number = expression(p, "-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?");
    j->integer = expression(p, "-?(0|[1-9][0-9]*)(\\.0+)?");
    j->truth = gr_either(p, gr_text(p, "true", 4, GR_END), gr_text(p, "false", 5, GR_END));
    j->null = gr_text(p, "null", 4, GR_END);
    j->array = container(p, '[', ']', element, j);
    j->object = container(p, '{', '}', member, j);
    const uint32_t kinds[] = {gr_call(p, j->string, true, GR_END), j->number, j->truth, j->null, j->array, j->object};
    gr_become(p, j->value, gr_split(p, kinds, 6));
    other_body(p, j);
}

/* The state at a node of the trie: on along the trie, or out of it with any byte that is not there. */
static uint32_t leave_trie(struct gr_program *p, const struct gr_json *j, uint32_t node)
{
    struct gr_range *ranges = mem_array(512, sizeof(*ranges));
    bool is_taken[256] = {false};
    uint32_t n = 0;
    for (uint32_t c = p->keys[node].child; c; c = p->keys[c].sibling) {
        uint8_t byte = p->keys[c].byte;
        is_taken[byte] = true; /* the closing quote of a property's name is no way out */
        if (byte != '"')
            ranges[n++] = (struct gr_range){byte, byte, leave_trie(p, j, c)};
    }
    for (uint32_t i = 0; i < GR_OTHER_RANGES; i++)
        for (uint32_t b = j->other[i].first; b <= j->other[i].last; b++) {
            if (is_taken[b])
                continue;
            uint32_t from = b;
            while (b < j->other[i].last && !is_taken[b + 1])
                b++;
            ranges[n++] = (struct gr_range){(uint8_t)from, (uint8_t)b, j->other[i].next};
        }
    uint32_t state = gr_bytes(p, ranges, n);
    free(ranges);
    return state;
}

uint32_t gr_other_name(struct gr_program *p, const struct gr_json *j, uint32_t object)
{
    uint32_t open = p->keys[p->objects[object].root].child;
    return gr_byte(p, '"', '"', open ? leave_trie(p, j, open) : gr_bytes(p, j->other, GR_OTHER_RANGES));
}

static void quote_one(struct bytes *out, uint32_t c, const char *text, size_t len, bool is_ascii)
{
    static const char LETTERS[] = "\"\\bfnrt", MEANT[] = "\"\\\b\f\n\r\t";
    const char *at = c && c < 0x80 ? strchr(MEANT, (int)c) : NULL;
    if (at)
        bytes_append(out, (const char[]){'\\', LETTERS[at - MEANT]}, 2);
    else if (c < 0x20 || (is_ascii && c >= 0x7f && c < 0x10000))
        bytes_printf(out, "\\u%04x", c);
    else if (is_ascii && c >= 0x10000)
        bytes_printf(out, "\\u%04x\\u%04x", 0xd800 + ((c - 0x10000) >> 10), 0xdc00 + (c & 0x3ff));
    else
        bytes_append(out, text, len);
}

void gr_quote(struct bytes *out, const char *text, size_t len, bool is_ascii)
{
    bytes_append(out, "\"", 1);
    for (size_t i = 0; i < len;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)text + i, (utf8proc_ssize_t)(len - i), &c);
        n = n < 1 ? 1 : n; /* the caller's text is UTF-8 */
        quote_one(out, (uint32_t)c, text + i, (size_t)n, is_ascii);
        i += (size_t)n;
    }
    bytes_append(out, "\"", 1);
}
