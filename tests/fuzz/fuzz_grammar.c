/*
 * Grammars of strangers: the first byte chooses the kind, the rest up to a 0xff is the text, and what
 * follows it is taken as far as it is allowed. What must hold: a text is refused or gives a program that
 * works; each token of a mask can be taken, and no other.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "grammar/grammar.h"

enum { N_TOKENS = 256 + 8 };
static const char *const PIECES[] = {"\":", "{\"", "\",", "true", "12", "ab", "\\u", "]}"};

static void piece(void *user, uint32_t id, const char **bytes, size_t *len)
{
    static char one[256];
    (void)user;
    one[id % 256] = (char)id;
    *bytes = id < 256 ? &one[id] : PIECES[id - 256];
    *len = id < 256 ? 1 : strlen(*bytes);
}

/* False: it is said that the grammar is too ambiguous here. */
static bool check_mask(struct grammar_cursor *c)
{
    uint32_t words[(N_TOKENS + 31) / 32];
    if (!grammar_cursor_mask(c, words))
        return false;
    for (uint32_t id = 0; id < N_TOKENS; id++) {
        struct grammar_cursor *copy = grammar_cursor_copy(c);
        if (grammar_cursor_take(copy, id) != (words[id / 32] >> id % 32 & 1))
            abort();
        grammar_cursor_close(copy);
    }
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct grammar_vocab *vocab;
    struct grammar *g = NULL;
    struct td_error e;
    vocab = vocab ? vocab : grammar_vocab_open(N_TOKENS, piece, NULL);
    const uint8_t *end = size ? memchr(data + 1, 0xff, size - 1) : NULL;
    size_t len = !size ? 0 : end ? (size_t)(end - data) - 1 : size - 1;
    if (!size || grammar_compile(vocab, data[0] % 5, (const char *)data + 1, len, &g, &e))
        return 0;
    struct grammar_cursor *c = grammar_cursor_open(g);
    for (size_t i = 1 + len + 1, n = 0; n < 8; i++, n++) {
        if (!check_mask(c) || i >= size || !grammar_cursor_take_bytes(c, (const char *)data + i, 1))
            break;
    }
    grammar_cursor_close(c);
    grammar_unref(g);
    return 0;
}
