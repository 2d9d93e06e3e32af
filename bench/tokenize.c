/*
 * The tokenizer of --model beside the Hugging Face tokenizers library, on the same text in the same pieces,
 * each in one thread and by that thread's own time. The text is --text FILE, else it is made of the
 * vocabulary's words, the first words being the most frequent.
 *
 * The library is measured by the python3 on the path, if that can import it. Its rate is the limit of our
 * rows.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/random.h"
#include "bench/bench.h"
#include "model/tokenizer.h"

enum { PIECE_BYTES = 8 << 10, MADE_UP_BYTES = 4 << 20, LETTERS = 5 << 20, MAX_TEXT = 64 << 20 };

static const char SCRIPT[] =
    "import sys,time\n"
    "from tokenizers import Tokenizer\n"
    "a=time.thread_time(); t=Tokenizer.from_file(sys.argv[1]); load=time.thread_time()-a\n"
    "text=open(sys.argv[2],'rb').read()\n"
    "at,parts=0,[]\n"
    "while at<len(text):\n"
    "    end=min(at+int(sys.argv[3]),len(text))\n"
    "    while end<len(text) and text[end]&0xc0==0x80: end-=1\n"
    "    parts.append(text[at:end].decode()); at=end\n"
    "best=0; n=0\n"
    "for _ in range(3):\n"
    "    a=time.thread_time(); ids=[t.encode(p,add_special_tokens=False).ids for p in parts]; s=time.thread_time()-a\n"
    "    n=sum(map(len,ids)); best=max(best,n/s)\n"
    "a=time.thread_time()\n"
    "for i in ids: t.decode(i,skip_special_tokens=False)\n"
    "print(n,best,n/(time.thread_time()-a),load*1000)\n";

struct library {
    bool there;
    double n_tokens, encode, decode, load_ms;
};

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void make_up(const struct tokenizer *t, struct bytes *out)
{
    struct bytes word = {0};
    for (uint64_t i = 0; out->len < MADE_UP_BYTES; i++) {
        double u = random_unit(random_at(1, 0, i));
        uint32_t id = 256 + (uint32_t)((double)(tokenizer_size(t) / 4 + 1) * u * u * u);
        bytes_clear(&word);
        tokenizer_decode(t, &id, 1, true, &word);
        bytes_printf(out, " ");
        for (size_t j = 0; j < word.len; j++) /* one-byte characters: any cut is between two */
            if (word.data[j] > ' ' && word.data[j] < 127)
                bytes_append(out, &word.data[j], 1);
    }
    bytes_free(&word);
}

static size_t piece_end(const struct bytes *text, size_t at)
{
    size_t end = at + PIECE_BYTES < text->len ? at + PIECE_BYTES : text->len;
    while (end < text->len && ((unsigned char)text->data[end] & 0xc0) == 0x80)
        end--;
    return end;
}

static enum td_status encode_all(const struct tokenizer *t, const struct bytes *text, struct token_ids *ids,
                                 struct td_error *e)
{
    enum td_status s = TD_OK;
    ids->n = 0;
    for (size_t at = 0, end; at < text->len && !s; at = end) {
        end = piece_end(text, at);
        s = tokenizer_encode(t, text->data + at, end - at, false, ids, e);
    }
    return s;
}

static bool quotable(const char *path)
{
    return !strchr(path, '\'');
}

/* Measures the library on the text in file `path`. */
static struct library measure_library(const char *dir, const char *path)
{
    struct library l = {0};
    struct bytes command = {0};
    if (!quotable(dir) || !quotable(path))
        return l;
    bytes_printf(
        &command,
        "TOKENIZERS_PARALLELISM=false RAYON_NUM_THREADS=1 python3 -c \"%s\" '%s/tokenizer.json' '%s' %d 2>/dev/null",
        SCRIPT, dir, path, PIECE_BYTES);
    FILE *f = popen(command.data, "r");
    l.there = f && fscanf(f, "%lf %lf %lf %lf", &l.n_tokens, &l.encode, &l.decode, &l.load_ms) == 4;
    if (f)
        pclose(f);
    bytes_free(&command);
    return l;
}

static enum td_status bench_letters(const struct tokenizer *t, struct bench_rows *out, struct td_error *e)
{
    struct bytes text = {0};
    struct token_ids ids = {0};
    while (text.len < LETTERS)
        bytes_append(&text, "aaaaaaaaaaaaaaaa", 16);
    double a = seconds();
    enum td_status s = tokenizer_encode(t, text.data, text.len, false, &ids, e);
    bench_add(out, "MB/s", LETTERS * 1e-6 / (seconds() - a), 0, "encode 5 MB of one letter");
    token_ids_free(&ids);
    bytes_free(&text);
    return s;
}

static enum td_status bench_text(const struct tokenizer *t, const struct bytes *text, const struct library *l,
                                 struct bench_rows *out, struct td_error *e)
{
    struct token_ids ids = {0};
    struct bytes back = {0};
    double best = 0, a = seconds();
    enum td_status s = encode_all(t, text, &ids, e);
    bench_add(out, "tokens/s", (double)ids.n / (seconds() - a), 0, "encode %.1f MB, first time",
              (double)text->len * 1e-6);
    for (int i = 0; i < 5 && !s; i++) {
        a = seconds();
        s = encode_all(t, text, &ids, e);
        double rate = (double)ids.n / (seconds() - a);
        best = rate > best ? rate : best;
    }
    bench_add(out, "tokens/s", best, l->encode, "encode, words known%s",
              l->there ? "; limit: the tokenizers library" : "");
    a = seconds();
    tokenizer_decode(t, ids.ids, ids.n, false, &back);
    bench_add(out, "tokens/s", (double)ids.n / (seconds() - a), l->decode, "decode");
    if (!s && l->there && l->n_tokens != (double)ids.n)
        s = td_fail(e, TD_ERR_INVALID, "%zu tokens, the library makes %.0f", ids.n, l->n_tokens);
    token_ids_free(&ids);
    bytes_free(&back);
    return s;
}

/* Puts the text into a file that the library can read, too: --text itself, or a temporary file. */
static enum td_status measure_tokenizer(const struct tokenizer *t, const struct bench_options *o, double load_ms,
                                        struct bench_rows *out, struct td_error *e)
{
    char made[] = "/tmp/tandem-bench-XXXXXX", *data = NULL;
    struct bytes text = {0};
    size_t len = 0;
    enum td_status s = TD_OK;
    int fd = -1;
    if (o->text) {
        s = file_read(o->text, MAX_TEXT, &data, &len, e);
        text = (struct bytes){data, len, len};
    } else {
        make_up(t, &text);
        fd = mkstemp(made);
        if (fd < 0 || write(fd, text.data, text.len) != (ssize_t)text.len)
            s = td_fail(e, TD_ERR_IO, "%s: can't be written", made);
    }
    struct library l = {0};
    if (!s)
        l = measure_library(o->model, o->text ? o->text : made);
    bench_add(out, "ms", load_ms, l.load_ms, "load %u entries", tokenizer_size(t));
    if (!s)
        s = bench_text(t, &text, &l, out, e);
    if (!s && !l.there)
        bench_add(out, "", 0, 0, "the tokenizers library: absent");
    if (fd >= 0) {
        close(fd);
        unlink(made);
    }
    bytes_free(&text);
    return s;
}

enum td_status bench_tokenize(const struct bench_options *o, struct bench_rows *out, struct td_error *e)
{
    struct tokenizer *t = NULL;
    if (!o->model)
        return td_fail(e, TD_ERR_INVALID, "give --model DIR, with a tokenizer.json");
    double a = seconds();
    enum td_status s = tokenizer_open(o->model, &t, e);
    if (s)
        return s;
    s = measure_tokenizer(t, o, (seconds() - a) * 1e3, out, e);
    if (!s)
        s = bench_letters(t, out, e);
    tokenizer_close(t);
    return s;
}
