#include "base/absence.h"

enum { LOG_TURNS = 4 };

void absence_init(struct absence *a, const struct clock *clock, uint64_t turn_ns)
{
    *a = (struct absence){.clock = clock, .turn_ns = turn_ns, .read_ns = clock_now(clock)};
}

void absence_log(struct absence *a, const struct log *log)
{
    absence_now(a, 0); /* what has passed until now */
    a->log = log;
}

static void log_away(const struct absence *a, uint64_t ns)
{
    if (ns >= LOG_TURNS * a->turn_ns)
        log_warn(a->log, "this process was stopped or starved ms=%llu", (unsigned long long)(ns / NS_PER_MS));
}

uint64_t absence_now(struct absence *a, uint64_t sleep_until_ns)
{
    uint64_t now = clock_now(a->clock), back = a->read_ns - a->away_ns;
    if (sleep_until_ns > back)
        back = sleep_until_ns < now - a->away_ns ? sleep_until_ns : now - a->away_ns;
    /* The latest reading that is not an absence, by the clock. */
    uint64_t latest = back + a->turn_ns + a->away_ns;
    if (now > latest) {
        a->away_ns += now - latest;
        log_away(a, now - latest);
    }
    if (a->is_deaf)
        a->away_ns = now - back;
    a->read_ns = now;
    return now - a->away_ns;
}

void absence_deaf(struct absence *a, bool is_deaf)
{
    if (is_deaf == a->is_deaf)
        return;
    absence_now(a, 0); /* what has passed until now */
    if (is_deaf)
        a->deaf_ns = a->read_ns;
    else
        log_away(a, a->read_ns - a->deaf_ns);
    a->is_deaf = is_deaf;
}
