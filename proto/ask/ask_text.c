#include "proto/ask/ask_text.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

static bool is_plain(unsigned char c)
{
    return c >= 0x20 && c < 0x7f && c != '"' && c != '\\';
}

/* Bytes of the character at p, of at most n; 0: it is none. */
static size_t character(const uint8_t *p, size_t n)
{
    utf8proc_int32_t c;
    utf8proc_ssize_t len = utf8proc_iterate(p, (utf8proc_ssize_t)n, &c);
    return len > 0 ? (size_t)len : 0;
}

static void escape_one(struct bytes *out, unsigned char c)
{
    if (c == '\n')
        bytes_append(out, "\\n", 2);
    else if (c == '"' || c == '\\')
        bytes_append(out, (const char[]){'\\', (char)c}, 2);
    else
        bytes_printf(out, "\\u%04x", c);
}

void ask_text_escape(struct bytes *out, const void *text, size_t n)
{
    const uint8_t *p = text;
    for (size_t i = 0; i < n;) {
        size_t from = i, len = 0;
        while (i < n && is_plain(p[i]))
            i++;
        bytes_append(out, p + from, i - from);
        if (i == n)
            return;
        if (p[i] < 0x80) {
            escape_one(out, p[i++]);
            continue;
        }
        len = character(p + i, n - i);
        bytes_append(out, len ? (const void *)(p + i) : "\xef\xbf\xbd", len ? len : 3);
        i += len ? len : 1;
    }
}

json_t *ask_text_json(const void *text, size_t n)
{
    const uint8_t *p = text;
    json_t *v = json_stringn(n ? text : "", n); /* NULL: it is not UTF-8 */
    struct bytes b = {0};
    if (v)
        return v;
    for (size_t i = 0; i < n;) {
        size_t len = character(p + i, n - i);
        bytes_append(&b, len ? (const void *)(p + i) : "\xef\xbf\xbd", len ? len : 3);
        i += len ? len : 1;
    }
    v = json_stringn(b.data, b.len);
    bytes_free(&b);
    return v;
}

void ask_json_append(struct bytes *out, json_t *value)
{
    char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
    bytes_append(out, text, strlen(text));
    free(text);
    json_decref(value);
}
