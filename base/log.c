#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char *const LEVEL_NAMES[] = {
    [LOG_ERROR] = "error", [LOG_WARN] = "warn", [LOG_INFO] = "info", [LOG_DEBUG] = "debug"};
enum { N_LEVELS = sizeof(LEVEL_NAMES) / sizeof(LEVEL_NAMES[0]) };

int log_level_parse(const char *name)
{
    for (int i = 0; i < N_LEVELS; i++)
        if (!strcmp(name, LEVEL_NAMES[i]))
            return i;
    return -1;
}

void log_write(const struct log *log, enum log_level level, const char *format, ...)
{
    char line[1024];
    struct timespec ts;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &ts);
    gmtime_r(&ts.tv_sec, &tm);
    int n =
        snprintf(line, sizeof(line), "%04d-%02d-%02dT%02d:%02d:%02d.%06ldZ %s %s ", tm.tm_year + 1900, tm.tm_mon + 1,
                 tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec, ts.tv_nsec / 1000, log->who, LEVEL_NAMES[level]);
    va_list args;
    va_start(args, format);
    int m = vsnprintf(line + n, sizeof(line) - (size_t)n, format, args);
    va_end(args);
    size_t len = (size_t)n + (size_t)(m < 0 ? 0 : m);
    if (len > sizeof(line) - 2) /* vsnprintf returns the length without the cut, and ends with a 0 */
        len = sizeof(line) - 2;
    /* A value from outside must not begin a line of its own, nor command a terminal (U+0080 to U+009F do). */
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f ||
            ((unsigned char)line[i] == 0xc2 && i + 1 < len && (unsigned char)line[i + 1] - 0x80u < 0x20u))
            line[i] = ' ';
    line[len++] = '\n';
    ssize_t ignored = write(log->fd ? log->fd : 2, line, len); /* a full disk must not end a server */
    (void)ignored;
}

bool log_limit_allows(struct log_limit *limit, const struct log *log)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    uint64_t window = (uint64_t)ts.tv_sec / LOG_LIMITED_S + 1, before = atomic_load(&limit->window);
    if (window != before && atomic_compare_exchange_strong(&limit->window, &before, window)) {
        uint32_t n = atomic_exchange(&limit->n, 0);
        if (n > LOG_LIMITED)
            log_write(log, LOG_WARN, "lines like the next one were left out n=%u", n - LOG_LIMITED);
    }
    return atomic_fetch_add(&limit->n, 1) < LOG_LIMITED;
}

const char *log_word(const void *data, size_t len_bytes, char out[LOG_WORD_BYTES])
{
    const unsigned char *from = data;
    char *to = out;
    for (size_t i = 0; i < len_bytes && i < LOG_WORD_MAX; i++)
        if (from[i] > ' ' && from[i] < 127 && !strchr("\"'=\\", from[i]))
            *to++ = (char)from[i];
        else
            to += snprintf(to, 5, "\\x%02x", from[i]);
    *to = 0;
    return out;
}
