/* Shared by the files of the checksum. */
#pragma once

#include "proto/wire/checksum.h"

/* The seed for this identity and length. */
uint64_t checksum_seed(const struct checksum_identity *identity, size_t len_bytes);
