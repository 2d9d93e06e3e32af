/*
 * Writes manual pages in roff, with the man(7) macros, from the same texts that --help prints.
 *
 * All text is escaped here: callers pass it as --help shows it. A line break in a text becomes a space. A
 * page has no date, so that the same sources make the same bytes.
 *
 * Errors: none are returned; the caller checks ferror(f).
 */
#pragma once

#include <stdbool.h>
#include <stdio.h>

/* Begins the page of `program` ("tandem up" is page tandem-up). `about`, up to the end of its first sentence,
 * is the line that man -k finds. */
void man_open(FILE *f, const char *program, int section, const char *about);

void man_heading(FILE *f, const char *title);
void man_subheading(FILE *f, const char *title);
void man_text(FILE *f, const char *text);
void man_synopsis(FILE *f, const char *program, const char *usage);

/* One row of a list: `name` in bold, `argument` (NULL or "": none) in italics, and what it does. `fallback`
 * is added in brackets unless it is NULL. */
void man_item(FILE *f, const char *name, const char *argument, const char *text, const char *fallback);

void man_example(FILE *f, const char *command); /* a line that is not filled */

/* A reference to the page of `program`; a comma follows it unless it is the last one. */
void man_reference(FILE *f, const char *program, int section, bool is_last);
