/*
 * grammar_tool [VOCABULARY]: reads lines {"schema": ..., "instances": [TEXT, ...]} and answers each with a
 * line {"error": TEXT} or {"accepts": [true, ...]}. For tests that compare with other validators. With a
 * vocabulary, a file of one token in hexadecimal for each line, it takes {"schema": ..., "ids": [...]} and
 * answers with the times to compile the schema and to make the mask before each token, the first time and
 * once more: deploy/reproduce/grammar.py.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "grammar/grammar.h"

static json_t *accepts(struct grammar *g, json_t *instances)
{
    json_t *list = json_array(), *v;
    size_t i;
    json_array_foreach(instances, i, v)
    {
        struct grammar_cursor *c = grammar_cursor_open(g);
        bool is_good = grammar_cursor_take_bytes(c, json_string_value(v), json_string_length(v));
        json_array_append_new(list, json_boolean(is_good && grammar_cursor_may_end(c)));
        grammar_cursor_close(c);
    }
    return list;
}

/* ------------------------------------------------------------------- with a vocabulary */

struct tokens {
    struct bytes *list;
    uint32_t n, cap;
};

static void read_tokens(const char *path, struct tokens *out)
{
    FILE *f = fopen(path, "r");
    char *line = NULL;
    size_t cap = 0;
    ssize_t len;
    while (f && (len = getline(&line, &cap, f)) > 0) {
        out->list = MEM_ROOM(out->list, out->n, out->cap, 1024);
        struct bytes *token = &out->list[out->n++];
        *token = (struct bytes){0};
        for (ssize_t i = 0; i + 2 < len; i += 2) {
            char pair[3] = {line[i], line[i + 1]};
            bytes_append(token, &(char){(char)strtol(pair, NULL, 16)}, 1);
        }
    }
    free(line);
    if (f)
        fclose(f);
}

static void bytes_of(void *user, uint32_t id, const char **bytes_out, size_t *len_out)
{
    const struct tokens *t = user;
    *bytes_out = t->list[id].data;
    *len_out = t->list[id].len;
}

static double thread_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* Times of the masks of one answer; false: it is not one. */
static bool mask_times(struct grammar *g, const struct grammar_vocab *vocab, json_t *ids, json_t *us)
{
    struct grammar_cursor *c = grammar_cursor_open(g);
    uint32_t *mask = mem_array(grammar_mask_words(vocab), sizeof(*mask));
    json_t *v;
    bool is_valid = true;
    size_t i;
    json_array_foreach(ids, i, v)
    {
        uint32_t id = (uint32_t)json_integer_value(v);
        double t = thread_us();
        bool is_made = grammar_cursor_mask(c, mask);
        json_array_append_new(us, json_real(thread_us() - t));
        is_valid = is_valid && is_made && mask[id / 32] >> id % 32 & 1 && grammar_cursor_take(c, id);
    }
    is_valid = is_valid && grammar_cursor_may_end(c);
    grammar_cursor_close(c);
    free(mask);
    return is_valid;
}

static json_t *times(struct grammar *g, const struct grammar_vocab *vocab, json_t *ids, double compile_us)
{
    json_t *first = json_array(), *again = json_array();
    bool is_valid = mask_times(g, vocab, ids, first);
    is_valid = mask_times(g, vocab, ids, again) && is_valid;
    return json_pack("{s:f, s:o, s:o, s:b}", "compile_us", compile_us, "masks_us", first, "again_us", again, "is_valid",
                     is_valid);
}

static json_t *answer(const struct grammar_vocab *vocab, json_t *line)
{
    char *text = json_dumps(json_object_get(line, "schema"), JSON_ENCODE_ANY);
    struct grammar *g = NULL;
    struct td_error e = {{0}};
    json_t *said;
    double t = thread_us();
    if (grammar_compile(vocab, GRAMMAR_SCHEMA, text, strlen(text), &g, &e))
        said = json_pack("{s:s}", "error", e.text);
    else if (vocab)
        said = times(g, vocab, json_object_get(line, "ids"), thread_us() - t);
    else
        said = json_pack("{s:o}", "accepts", accepts(g, json_object_get(line, "instances")));
    grammar_unref(g);
    free(text);
    return said;
}

int main(int argc, char **argv)
{
    char *line = NULL;
    size_t cap = 0;
    struct tokens tokens = {0};
    struct grammar_vocab *vocab = NULL;
    if (argc > 1) {
        read_tokens(argv[1], &tokens);
        vocab = grammar_vocab_open(tokens.n, bytes_of, &tokens);
    }
    while (getline(&line, &cap, stdin) > 0) {
        json_t *v = json_loads(line, 0, NULL), *said = answer(vocab, v);
        char *text = json_dumps(said, JSON_COMPACT);
        puts(text);
        fflush(stdout);
        free(text);
        json_decref(said);
        json_decref(v);
    }
    grammar_vocab_close(vocab);
    for (uint32_t i = 0; i < tokens.n; i++)
        bytes_free(&tokens.list[i]);
    free(tokens.list);
    free(line);
    return 0;
}
