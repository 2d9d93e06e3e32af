#include "base/man.h"

#include <string.h>

/* In roff a backslash begins an escape, a dot or a quote at the start of a line begins a request, and these
 * ASCII characters are typeset as other ones: a plain '-' as a hyphen, which can't be copied into a shell. */
static const char *escape(char c)
{
    switch (c) {
    case '\\':
        return "\\e";
    case '-':
        return "\\-";
    case '\'':
        return "\\(aq";
    case '`':
        return "\\(ga";
    case '^':
        return "\\(ha";
    case '~':
        return "\\(ti";
    case '"':
        return "\\(dq"; /* also inside the arguments of a macro */
    case '|':
        return "|\\:"; /* a line may be broken after it, as in --policy a|b|c */
    case '\n':
        return " ";
    default:
        return NULL;
    }
}

static void put(FILE *f, const char *text, size_t len)
{
    if (len && text[0] == '.')
        fputs("\\&", f);
    for (size_t i = 0; i < len; i++) {
        const char *escaped = escape(text[i]);
        if (escaped)
            fputs(escaped, f);
        else
            putc(text[i], f);
    }
}

static void put_text(FILE *f, const char *text)
{
    put(f, text, strlen(text));
}

static void put_font(FILE *f, char font, const char *text)
{
    fprintf(f, "\\f%c", font);
    put_text(f, text);
    fputs("\\fR", f);
}

static void put_page(FILE *f, const char *program)
{
    for (const char *c = program; *c; c++)
        put(f, *c == ' ' ? "-" : c, 1);
}

/* Length of the first sentence, without its full stop. */
static size_t first_sentence(const char *about)
{
    for (const char *c = about; *c; c++)
        if (*c == '.' && (!c[1] || c[1] == ' ' || c[1] == '\n'))
            return (size_t)(c - about);
    return strlen(about);
}

void man_open(FILE *f, const char *program, int section, const char *about)
{
    fputs(".TH \"", f);
    put_page(f, program);
    fprintf(f, "\" %d \"\" \"tandem %s\" \"tandem\"\n.nh\n.ad l\n.SH NAME\n", section, TANDEM_VERSION);
    put_page(f, program);
    fputs(" \\- ", f); /* man -k looks for these characters */
    put(f, about, first_sentence(about));
    putc('\n', f);
}

static void heading(FILE *f, const char *macro, const char *title)
{
    fprintf(f, "%s \"", macro);
    put_text(f, title);
    fputs("\"\n", f);
}

void man_heading(FILE *f, const char *title)
{
    heading(f, ".SH", title);
}

void man_subheading(FILE *f, const char *title)
{
    heading(f, ".SS", title);
}

void man_text(FILE *f, const char *text)
{
    put_text(f, text);
    putc('\n', f);
}

void man_synopsis(FILE *f, const char *program, const char *usage)
{
    put_font(f, 'B', program);
    putc(' ', f);
    put_text(f, usage);
    putc('\n', f);
}

void man_item(FILE *f, const char *name, const char *argument, const char *text, const char *fallback)
{
    fputs(".TP\n", f);
    put_font(f, 'B', name);
    if (argument && *argument) {
        putc(' ', f);
        put_font(f, 'I', argument);
    }
    putc('\n', f);
    put_text(f, text);
    if (fallback) {
        fputs(" [", f);
        put_text(f, fallback);
        putc(']', f);
    }
    putc('\n', f);
}

void man_example(FILE *f, const char *command)
{
    fputs(".nf\n", f);
    put_text(f, command);
    fputs("\n.fi\n", f);
}

void man_reference(FILE *f, const char *program, int section, bool is_last)
{
    fputs("\\fB", f);
    put_page(f, program);
    fprintf(f, "\\fR(%d)%s\n", section, is_last ? "" : ",");
}
