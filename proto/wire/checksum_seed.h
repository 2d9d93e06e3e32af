/* What the files of the checksum share. */
#pragma once

#include "proto/wire/checksum.h"

/* The seed that the identity and the length give. */
uint64_t checksum_seed(const struct checksum_identity *identity, size_t len_bytes);
