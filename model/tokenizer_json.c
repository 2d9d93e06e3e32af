/*
 * Reads the two long parts of tokenizer.json in place: model.vocab (an object of numbers) and model.merges (a
 * list of texts or pairs). A tree of 300,000 values would take most of the time of loading. Everything else
 * goes through jansson, from a copy in which these two are empty, so that errors elsewhere are reported by
 * jansson.
 */
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_internal.h"

enum { MAX_NESTING = 64 };

static void skip_space(struct json_scan *s)
{
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\n' || *s->p == '\t' || *s->p == '\r'))
        s->p++;
}

bool json_scan_take(struct json_scan *s, char c)
{
    skip_space(s);
    if (s->p == s->end || *s->p != c)
        return false;
    s->p++;
    return true;
}

static bool hex4(const char *p, const char *end, uint32_t *out)
{
    *out = 0;
    for (int i = 0; i < 4; i++) {
        char c = p + i < end ? p[i] : 0;
        int v = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (v < 0)
            return false;
        *out = *out << 4 | (uint32_t)v;
    }
    return true;
}

static bool unescape(struct json_scan *s)
{
    static const char FROM[] = "\"\\/bfnrt", TO[] = "\"\\/\b\f\n\r\t";
    const char *hit = s->p + 1 < s->end && s->p[1] ? strchr(FROM, s->p[1]) : NULL;
    uint32_t c, low;
    char u[4];
    if (hit) {
        bytes_append(&s->text, &TO[hit - FROM], 1);
        s->p += 2;
        return true;
    }
    if (s->p + 1 == s->end || s->p[1] != 'u' || !hex4(s->p + 2, s->end, &c))
        return false;
    s->p += 6;
    if (c >= 0xd800 && c < 0xdc00) {
        if (s->end - s->p < 6 || s->p[0] != '\\' || s->p[1] != 'u' || !hex4(s->p + 2, s->end, &low) || low < 0xdc00 ||
            low > 0xdfff)
            return false;
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
        s->p += 6;
    } else if (c >= 0xdc00 && c < 0xe000) {
        return false;
    }
    size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const unsigned char LEAD[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = n; i-- > 1; c >>= 6)
        u[i] = (char)(0x80 | (c & 63));
    u[0] = (char)(LEAD[n] | c);
    bytes_append(&s->text, u, n);
    return true;
}

bool json_scan_text(struct json_scan *s, struct slice *out)
{
    if (!json_scan_take(s, '"'))
        return false;
    const char *begin = s->p;
    while (s->p < s->end && *s->p != '"' && *s->p != '\\' && (unsigned char)*s->p >= 0x20)
        s->p++;
    if (s->p < s->end && *s->p == '"') { /* nothing to unescape: borrows from the file */
        *out = (struct slice){begin, (size_t)(s->p++ - begin)};
        return true;
    }
    bytes_clear(&s->text);
    bytes_append(&s->text, begin, (size_t)(s->p - begin));
    while (s->p < s->end && *s->p != '"') {
        if ((unsigned char)*s->p < 0x20 || (*s->p == '\\' && !unescape(s)))
            return false;
        const char *plain = s->p;
        while (s->p < s->end && *s->p != '"' && *s->p != '\\' && (unsigned char)*s->p >= 0x20)
            s->p++;
        bytes_append(&s->text, plain, (size_t)(s->p - plain));
    }
    *out = (struct slice){s->text.data, s->text.len};
    return s->p < s->end && s->p++;
}

bool json_scan_number(struct json_scan *s, uint64_t *out)
{
    skip_space(s);
    const char *begin = s->p;
    for (*out = 0; s->p < s->end && *s->p >= '0' && *s->p <= '9' && s->p - begin < 18; s->p++)
        *out = *out * 10 + (uint64_t)(*s->p - '0');
    return s->p > begin && s->p < s->end && !strchr("0123456789.eE", *s->p);
}

/* Skips one value of any kind. */
static bool skip_value(struct json_scan *s)
{
    struct slice text;
    int depth = 0;
    do {
        skip_space(s);
        if (s->p == s->end)
            return false;
        char c = *s->p;
        if (c == '"') {
            if (!json_scan_text(s, &text))
                return false;
            continue;
        }
        depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
        if (depth < 0 || depth > MAX_NESTING)
            return false;
        if (strchr("{}[],:", c)) {
            s->p++;
            continue;
        }
        while (s->p < s->end && !strchr("{}[],: \t\r\n\"", *s->p))
            s->p++;
    } while (depth);
    return true;
}

/* Calls member for each member of an object; member must read the value. */
static bool each_member(struct json_scan *s, bool (*member)(struct json_scan *s, struct slice key, void *user),
                        void *user)
{
    struct slice key;
    if (!json_scan_take(s, '{'))
        return false;
    if (json_scan_take(s, '}'))
        return true;
    do
        if (!json_scan_text(s, &key) || !json_scan_take(s, ':') || !member(s, key, user))
            return false;
    while (json_scan_take(s, ','));
    return json_scan_take(s, '}');
}

static bool is(struct slice key, const char *name)
{
    return key.len == strlen(name) && !memcmp(key.data, name, key.len);
}

static bool model_member(struct json_scan *s, struct slice key, void *user)
{
    struct json_parts *parts = user;
    struct slice *part = is(key, "vocab") ? &parts->vocab : is(key, "merges") ? &parts->merges : NULL;
    skip_space(s);
    const char *begin = s->p;
    if (!skip_value(s))
        return false;
    if (part && (*begin == '{' || *begin == '['))
        *part = (struct slice){begin, (size_t)(s->p - begin)};
    return true;
}

static bool root_member(struct json_scan *s, struct slice key, void *user)
{
    skip_space(s);
    if (is(key, "model") && s->p < s->end && *s->p == '{')
        return each_member(s, model_member, user);
    return skip_value(s);
}

static void append_without(struct bytes *out, const char **at, struct slice part, const char *instead)
{
    bytes_append(out, *at, (size_t)(part.data - *at));
    bytes_append(out, instead, 2);
    *at = part.data + part.len;
}

void json_parts_find(const char *json, size_t len, struct json_parts *out)
{
    struct json_scan s = {.p = json, .end = json + len};
    const char *at = json;
    *out = (struct json_parts){{NULL, 0}, {NULL, 0}, {NULL, 0, 0}};
    bool clean = each_member(&s, root_member, out);
    bytes_free(&s.text);
    /* Only the forms of BPE are read in this way. */
    if (!clean || !out->vocab.data || !out->merges.data || *out->vocab.data != '{' || *out->merges.data != '[')
        out->vocab = out->merges = (struct slice){NULL, 0};
    if (out->vocab.data) {
        bool vocab_first = out->vocab.data < out->merges.data;
        append_without(&out->rest, &at, vocab_first ? out->vocab : out->merges, vocab_first ? "{}" : "[]");
        append_without(&out->rest, &at, vocab_first ? out->merges : out->vocab, vocab_first ? "[]" : "{}");
    }
    bytes_append(&out->rest, at, (size_t)(json + len - at));
}
