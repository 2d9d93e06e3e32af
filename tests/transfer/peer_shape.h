/* Values that the child program and the test that kills it share. */
#pragma once

#include <stdlib.h>

#include "base/clock.h"
#include "proto/wire/kv_layout.h"

enum { PEER_PAGES = 16, PEER_WINDOW = 3, PEER_LAYERS = 4 };

/* How long a peer may be silent. The environment gives it, so that the test and its children have the same
 * value; 0: the default. */
#define PEER_SILENCE "XFER_PEER_SILENCE_MS"
static inline uint64_t peer_silence_ns(void)
{
    const char *ms = getenv(PEER_SILENCE);
    return ms ? strtoull(ms, NULL, 10) * NS_PER_MS : 0;
}

#define PEER_LAYOUT ((struct kv_layout){NUM_F32, PEER_LAYERS, 8, 64, 32}) /* page 512 KiB, transfer 8 MiB */
