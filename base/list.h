/*
 * Lists of structs by links that the structs hold themselves: the macros of <sys/queue.h>, as the BSDs have
 * them. LIST: any member is removed in one step, new members go to the front. TAILQ: also to the end.
 *
 * glibc's header lacks the loops in which the current member may be removed; they are here.
 */
#pragma once

#include <sys/queue.h>

#ifndef LIST_FOREACH_SAFE
#define LIST_FOREACH_SAFE(var, head, field, next)                                                                      \
    for ((var) = LIST_FIRST(head); (var) && ((next) = LIST_NEXT(var, field), 1); (var) = (next))
#endif

#ifndef TAILQ_FOREACH_SAFE
#define TAILQ_FOREACH_SAFE(var, head, field, next)                                                                     \
    for ((var) = TAILQ_FIRST(head); (var) && ((next) = TAILQ_NEXT(var, field), 1); (var) = (next))
#endif
