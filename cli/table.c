#include "cli/table.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { GROW_CELLS = 64, MAX_COLUMNS = 32 };

static void append_cell(struct table *t, const char *text)
{
    if (t->n_cells % GROW_CELLS == 0)
        t->cells = mem_resize(t->cells, t->n_cells + GROW_CELLS, sizeof(*t->cells));
    char *cell = t->cells[t->n_cells++] = mem_strdup(text);
    for (; *cell; cell++) /* no control characters: texts come from other processes */
        if ((unsigned char)*cell < 0x20 || *cell == 0x7f)
            *cell = '?';
}

void table_init(struct table *t, uint32_t n_columns, uint32_t left, const char *const *titles)
{
    *t = (struct table){.n_columns = n_columns < MAX_COLUMNS ? n_columns : MAX_COLUMNS, .left = left};
    for (uint32_t i = 0; i < t->n_columns; i++)
        append_cell(t, titles[i]);
}

void table_fini(struct table *t)
{
    for (uint32_t i = 0; i < t->n_cells; i++)
        free(t->cells[i]);
    free(t->cells);
    *t = (struct table){0};
}

void table_cell(struct table *t, const char *format, ...)
{
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    append_cell(t, text);
}

void table_bytes(struct table *t, uint64_t bytes)
{
    static const char *const UNITS[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double v = (double)bytes;
    int unit = 0;
    for (; v >= 1000 && unit < 5; unit++)
        v /= 1024;
    if (!bytes)
        table_cell(t, "0");
    else
        table_cell(t, unit && v < 100 ? "%.3g %s" : "%.0f %s", v, UNITS[unit]);
}

void table_print(const struct table *t, FILE *f)
{
    int widths[MAX_COLUMNS] = {0};
    for (uint32_t i = 0; i < t->n_cells; i++) {
        int n = (int)strlen(t->cells[i]);
        if (n > widths[i % t->n_columns])
            widths[i % t->n_columns] = n;
    }
    for (uint32_t i = 0; i < t->n_cells; i++) {
        uint32_t column = i % t->n_columns;
        bool last = column + 1 == t->n_columns, left = t->left >> column & 1;
        int width = last && left ? 0 : left ? -widths[column] : widths[column];
        fprintf(f, "%*s%s", width, t->cells[i], last ? "\n" : "  ");
    }
}
