/*
 * Logging: one line per event, lower case, then key=value. One grep follows a key through all processes: req=
 * is the id of a request, xfer= the id of a transfer or of a leg, peer= a process. Never on stdout.
 *
 * Levels by volume: error (a promise failed), warn, info (a handful per process life), debug (per request).
 *
 * A log belongs to one part of a process (router, prefill-0, ...). Whole clusters run in one process, so it
 * is an object and not a global.
 *
 * Threads: any; a line is one write(2), so lines of threads and processes that share a file do not mix.
 * (Rejected: stdio, whose buffer splits lines, and is lost when a process dies.) A line has at most 1,023
 * bytes; the rest of a longer one is left out.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

struct log {
    const char *who; /* borrowed; first word of every line */
    enum log_level level;
    int fd; /* 0: stderr */
};

/* Converts "error", "warn", "info" or "debug" to a level; -1: unknown name. */
int log_level_parse(const char *name);

void log_write(const struct log *log, enum log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/*
 * Bytes of a client as one word of a log line: letters, digits and punctuation stay; blanks, quotes, '=', '\'
 * and everything that is not printable ASCII become \xHH; bytes beyond LOG_WORD_MAX are left out. Returns
 * out.
 */
enum { LOG_WORD_MAX = 64, LOG_WORD_BYTES = 4 * LOG_WORD_MAX + 1 };
const char *log_word(const void *data, size_t len_bytes, char out[LOG_WORD_BYTES]);

#define LOG_AT(log, lvl, ...)                                                                                          \
    do {                                                                                                               \
        if ((log) && (lvl) <= (log)->level)                                                                            \
            log_write(log, lvl, __VA_ARGS__);                                                                          \
    } while (0)
/*
 * For lines that strangers can cause, as often as they like: each place in the code writes at most
 * LOG_LIMITED lines in a period of LOG_LIMITED_S seconds. The first line after that says how many were left
 * out.
 */
enum { LOG_LIMITED = 10, LOG_LIMITED_S = 10 };
struct log_limit {
    _Atomic uint64_t window;
    _Atomic uint32_t n;
};
bool log_limit_allows(struct log_limit *limit, const struct log *log);
#define log_limited(log, lvl, ...)                                                                                     \
    do {                                                                                                               \
        static struct log_limit log_limit_here;                                                                        \
        if ((log) && (lvl) <= (log)->level && log_limit_allows(&log_limit_here, log))                                  \
            log_write(log, lvl, __VA_ARGS__);                                                                          \
    } while (0)
#define log_error(log, ...) LOG_AT(log, LOG_ERROR, __VA_ARGS__)
#define log_warn(log, ...)  LOG_AT(log, LOG_WARN, __VA_ARGS__)
#define log_info(log, ...)  LOG_AT(log, LOG_INFO, __VA_ARGS__)
#define log_debug(log, ...) LOG_AT(log, LOG_DEBUG, __VA_ARGS__)
