/*
 * Places: sets of stacks of frames, and how a byte changes them (places.c).
 */
#pragma once

#include "grammar/grammar_internal.h"

/* A set of stacks, each with its top frame last. Stacks lie one after the other in `frames`. */
struct gr_stack {
    uint32_t at, n;
};
struct gr_places {
    struct gr_frame *frames;
    struct gr_stack *stacks;
    uint32_t n_frames, cap_frames, n_stacks, cap_stacks;
    uint64_t n_units; /* work since gr_places_clear(): frames that were compared or copied */
    bool is_done;     /* one of them has ended: nothing is left of it */
    bool is_broken;   /* some are left out: more than GR_STACKS_MOST, too deep, or too much work */
};
enum { GR_STACKS_MOST = 512, GR_DEPTH_MOST = 256, GR_UNITS_MOST = 1 << 17 };

void gr_places_clear(struct gr_places *s);
void gr_places_free(struct gr_places *s);
struct gr_places gr_places_copy(const struct gr_places *s);
/* Of the same stacks in the same order. */
bool gr_places_equal(const struct gr_places *a, const struct gr_places *b);
uint64_t gr_places_hash(const struct gr_places *s);
/* Adds to `out` all places at which a byte is taken that can be reached from this stack without a byte. */
void gr_close(const struct gr_program *p, const struct gr_frame *stack, uint32_t n, struct gr_places *out);
/* TD_ERR_UNSUPPORTED: a rule begins with itself, or has so many places at its beginning that it can't be
 * followed. */
enum td_status gr_check_rules(const struct gr_program *p, struct td_error *e);
/* The bytes after which there may be a place: bit byte % 64 of out[byte / 64]. */
enum { GR_SET_WORDS = 4 };
void gr_bytes_taken(const struct gr_program *p, const struct gr_places *from, uint64_t out[GR_SET_WORDS]);
/* The places after the byte. out is cleared first. */
void gr_step(const struct gr_program *p, const struct gr_places *from, uint8_t byte, struct gr_places *out);
