/* What the child program and the test that kills it must agree on. */
#pragma once

#include "proto/wire/kv_layout.h"

enum { PEER_PAGES = 16, PEER_WINDOW = 3, PEER_LAYERS = 4 };
#define PEER_LAYOUT ((struct kv_layout){NUM_F32, PEER_LAYERS, 8, 64, 32}) /* page 512 KiB, transfer 8 MiB */
