/* Random numbers: from the system where they name things, counter-based where they must be repeatable. */
#pragma once

#include <stdint.h>

uint64_t random_u64(void); /* from the system; never 0, so it can name an incarnation */

/*
 * Counter-based generator: the same (seed, a, b) gives the same number everywhere, in whatever order numbers
 * are asked for. The finaliser of SplitMix64 (Steele, Lea, Flood 2014) is applied after each of the three
 * inputs.
 */
static inline uint64_t random_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static inline uint64_t random_at(uint64_t seed, uint64_t a, uint64_t b)
{
    return random_mix(random_mix(random_mix(seed) ^ a) ^ b);
}

static inline double random_unit(uint64_t bits)
{
    return (double)(bits >> 11) * 0x1p-53; /* [0, 1) */
}
