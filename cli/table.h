/* Tables for people. Cells are added row by row; each column is as wide as it needs, with two spaces between
 * columns. Scripts read --json instead. */
#pragma once

#include <stdint.h>
#include <stdio.h>

struct table {
    uint32_t n_columns;
    uint32_t left; /* bit i: column i holds text, aligned left; the others are numbers */
    char **cells;  /* row by row, titles first */
    uint32_t n_cells;
};

void table_init(struct table *t, uint32_t n_columns, uint32_t left, const char *const *titles);
void table_fini(struct table *t);
void table_cell(struct table *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
void table_print(const struct table *t, FILE *f);

/* "0", "17 KiB", "1.25 GiB". */
void table_bytes(struct table *t, uint64_t bytes);
