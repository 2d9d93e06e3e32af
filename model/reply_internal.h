/* What reply.c (an answer as it comes) and reply_calls.c (one call) share. */
#pragma once

#include "model/reply.h"

enum call_form {
    CALL_JSON,   /* an object with name and arguments, or a list of such */
    CALL_NAMED,  /* the name, a mark, the arguments as JSON */
    CALL_KEYS,   /* GLM: arguments as pairs of marks */
    CALL_TAGS,   /* Qwen coder: arguments as tags */
    CALL_PYTHON, /* a list of calls in Python */
    CALL_CHANNELS
};

struct convention {
    const char *name;
    const char *tells[3]; /* all of them are in the template */
    enum call_form form;
    const char *begin, *end; /* of a call; "": an answer that is nothing but calls; its end is where its JSON ends */
    char bare; /* what an answer begins with that is nothing but calls, without a mark; 0: there is none */
    const char *before_name, *after_name, *after_arguments;
    const char *around[2]; /* marks that are neither text nor a call */
    const char *think[2];
};

/* Length of text[0 .. len) that is white space at its beginning. */
size_t reply_space(const char *text, size_t len);
/* What the beginning of text has in common with a mark: 1: the mark; 0: it may become one; -1: it differs. */
int reply_mark(const char *text, size_t len, const char *mark);

/* Where in a value of JSON (or Python) its text is: looks at each byte once. */
struct reply_scan {
    size_t at; /* bytes that were looked at */
    size_t depth;
    char quote; /* of the text that it is in; 0: none */
    bool is_escaped;
};
/* Goes on to len, or to the end of the value: true if it has ended, at s->at. */
bool reply_scan(struct reply_scan *s, const char *raw, size_t len);

/* A call that was read. */
struct call_read {
    char *name;
    struct bytes arguments; /* a JSON object */
};
struct calls_read {
    struct call_read *calls;
    size_t n, cap;
};
void calls_read_free(struct calls_read *c);

/*
 * Reads calls from raw, which begins behind the convention's mark (is_bare: there was none). is_over: nothing
 * follows. Returns the number of bytes that were read; 0: the rest is to come; -1: this is no call.
 */
ptrdiff_t calls_parse(const struct convention *c, json_t *tools, const char *raw, size_t len, bool is_bare,
                      bool is_over, struct calls_read *out);
/* Of a call that has begun and will be whole: true if the name has come, and the arguments have begun, at
 * *arguments_out within raw. */
bool calls_peek(const struct convention *c, const char *raw, size_t len, const char **name_out, size_t *name_len_out,
                const char **arguments_out);
