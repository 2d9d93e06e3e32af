/*
 * Logging: one line per event, lower case, then key=value; req= and peer= where they exist, so that one grep
 * follows a request through all processes. Never on stdout.
 *
 * Levels by volume: error (a promise failed), warn, info (a handful per process life), debug (per request).
 *
 * A log belongs to one part of a process (router, prefill-0, ...). Whole clusters run in one process, so it
 * is an object and not a global.
 *
 * Threads: any; a line is one write(2).
 */
#pragma once

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

#define LOG_AT(log, lvl, ...)                                                                                          \
    do {                                                                                                               \
        if ((log) && (lvl) <= (log)->level)                                                                            \
            log_write(log, lvl, __VA_ARGS__);                                                                          \
    } while (0)
#define log_error(log, ...) LOG_AT(log, LOG_ERROR, __VA_ARGS__)
#define log_warn(log, ...)  LOG_AT(log, LOG_WARN, __VA_ARGS__)
#define log_info(log, ...)  LOG_AT(log, LOG_INFO, __VA_ARGS__)
#define log_debug(log, ...) LOG_AT(log, LOG_DEBUG, __VA_ARGS__)
