#include "proto/wire/checksum.h"

#ifdef CHECKSUM_DISPATCH
/* The same functions, with the widest vectors that this CPU has. */
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include "base/endian.h"
#include "proto/wire/checksum_seed.h"

uint64_t checksum_seed(const struct checksum_identity *identity, size_t len_bytes)
{
    uint8_t b[40];
    put_u64(b, identity->id_a);
    put_u64(b + 8, identity->id_b);
    put_u32(b + 16, identity->index);
    put_u32(b + 20, identity->generation);
    put_u32(b + 24, identity->part_begin);
    put_u32(b + 28, identity->part_end);
    put_u64(b + 32, len_bytes);
    return XXH3_64bits(b, sizeof(b));
}

uint64_t checksum_bytes(const struct checksum_identity *identity, const void *data, size_t len_bytes)
{
    return XXH3_64bits_withSeed(data, len_bytes, checksum_seed(identity, len_bytes));
}
