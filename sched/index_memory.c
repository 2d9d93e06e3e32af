/*
 * Memory for the index's tables: few large pieces, so that they lie on huge pages. A search that starts with
 * a prefetch waits longer for the address translation than for the cache line: with pages of 4 KiB most
 * translations are not in the TLB.
 *
 * First fit with coalescing (Knuth, vol. 1, 2.5, algorithms A and B). There are few tables, and memory is
 * taken and returned only when a table is copied. A piece that is completely free goes back to the system.
 */
#include <stdlib.h>

#include "sched/index_internal.h"

enum { PIECE_MIN = 64 << 10, PIECE_MAX = 64 << 20, HUGE_PAGE = 2 << 20, LINE = 64 };

struct range { /* a free part of a piece; linked by rising address */
    struct range *next;
    size_t at, len;
};

struct memory_piece {
    struct memory_piece *next;
    uint8_t *base;
    size_t len;
    struct range *free;
};

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

static struct range *range_new(struct range *next, size_t at, size_t len)
{
    struct range *r = mem_zalloc(sizeof(*r));
    *r = (struct range){next, at, len};
    return r;
}

static uint8_t *take_from(struct memory_piece *p, size_t len)
{
    struct range **at = &p->free;
    while (*at && (*at)->len < len)
        at = &(*at)->next;
    struct range *r = *at;
    if (!r)
        return NULL;
    uint8_t *taken = p->base + r->at;
    r->at += len;
    r->len -= len;
    if (!r->len) {
        *at = r->next;
        free(r);
    }
    return taken;
}

/*
 * Maps a new piece: a quarter of the memory so far, so that unused memory stays a small part. NULL: no
 * memory.
 */
static struct memory_piece *piece_open(struct index *x, size_t least)
{
    void *base;
    size_t len = x->bytes / 4 < PIECE_MIN ? PIECE_MIN : x->bytes / 4 > PIECE_MAX ? PIECE_MAX : x->bytes / 4;
    len = round_up(len < least ? least : len, len < HUGE_PAGE ? 4096 : HUGE_PAGE);
    if (mem_map(len, &base))
        return NULL;
    struct memory_piece *p = mem_zalloc(sizeof(*p));
    *p = (struct memory_piece){x->pieces, base, len, range_new(NULL, 0, len)};
    x->pieces = p;
    x->bytes += len;
    return p;
}

void *index_memory_take(struct index *x, size_t len)
{
    len = round_up(len, LINE);
    for (struct memory_piece *p = x->pieces; p; p = p->next) {
        uint8_t *taken = take_from(p, len);
        if (taken)
            return taken;
    }
    struct memory_piece *p = piece_open(x, len);
    return p ? take_from(p, len) : NULL;
}

static void piece_close(struct index *x, struct memory_piece *p)
{
    struct memory_piece **at = &x->pieces;
    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    x->bytes -= p->len;
    mem_unmap(p->base, p->len);
    free(p->free);
    free(p);
}

static void give_to(struct memory_piece *p, size_t at, size_t len)
{
    struct range *before = NULL, *next = p->free;
    for (; next && next->at < at; next = next->next)
        before = next;
    if (before && before->at + before->len == at)
        before->len += len;
    else
        before = *(before ? &before->next : &p->free) = range_new(next, at, len);
    if (!next || before->at + before->len != next->at)
        return;
    before->len += next->len;
    before->next = next->next;
    free(next);
}

void index_memory_give(struct index *x, void *taken, size_t len)
{
    struct memory_piece *p = x->pieces;
    while ((uint8_t *)taken < p->base || (uint8_t *)taken >= p->base + p->len)
        p = p->next;
    give_to(p, (size_t)((uint8_t *)taken - p->base), round_up(len, LINE));
    if (p->free->len == p->len)
        piece_close(x, p);
}
