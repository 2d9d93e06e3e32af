/*
 * Instructions of Hopper (include/kernels/cuda/hopper.cuh): barriers in shared memory, bulk copies of boxes,
 * and products of warpgroups. Copies happen when no thread can go on without them; products happen when their
 * warp waits for them, with the operands that are there then.
 */
#include <deque>
#include <vector>

#include "cuda_runtime_api.h"
#include "cudaTypedefs.h"
#include "kernels/scalar.h"
#include "tests/emulator/queue.h"

namespace emulator
{
namespace
{
enum { DIMS = 4, ROW_BYTES = 128, CHUNK_BYTES = 16, POISON = 0xff };

struct barrier { /* eight bytes in shared memory */
    uint16_t n, missing;
    int32_t bytes : 31; /* that are expected and have not come */
    uint32_t parity : 1;
};
static_assert(sizeof(struct barrier) == 8, "as large as a device's");

struct box_map { /* in the memory of a CUtensorMap */
    const uint8_t *data;
    uint64_t dims[DIMS], strides[DIMS - 1];
    uint32_t box[DIMS];
};
static_assert(sizeof(struct box_map) <= sizeof(CUtensorMap), "a map has room for it");

struct box {
    uint8_t *to;
    struct box_map map;
    uint64_t *barrier;
    uint32_t at[DIMS];
};

std::deque<struct box> boxes; /* of the block that runs */

struct barrier *of(uint64_t *barrier)
{
    return (struct barrier *)(void *)barrier;
}

void end_phase(struct barrier *b)
{
    if (b->missing || b->bytes)
        return;
    b->missing = b->n;
    b->parity ^= 1;
}

size_t box_bytes(const struct box_map &m)
{
    return (size_t)m.box[1] * m.box[2] * ROW_BYTES;
}

/* Where a byte of a tile with the swizzle of 128 bytes is: chunks of a row change places by its number. */
uint32_t swizzled(uint32_t address)
{
    return address ^ (address >> 7 & 7) << 4;
}

void copy_row(const struct box &b, uint32_t row, uint32_t slab, uint32_t to)
{
    const struct box_map &m = b.map;
    uint64_t r = b.at[1] + row, s = b.at[2] + slab;
    bool inside = r < m.dims[1] && s < m.dims[2] && b.at[3] < m.dims[3];
    const uint8_t *from = m.data + r * m.strides[0] + s * m.strides[1] + b.at[3] * m.strides[2];
    for (uint32_t c = 0; c < ROW_BYTES; c += CHUNK_BYTES)
        if (inside)
            memcpy(shared_memory + swizzled(to + c), from + c, CHUNK_BYTES);
        else
            memset(shared_memory + swizzled(to + c), 0, CHUNK_BYTES);
}

/* The number at row (of a: its row; of b: its column) and k of an operand. */
float number_at(uint64_t operand, uint32_t row, uint32_t k, bool transposed)
{
    uint32_t start = (uint32_t)(operand & 0x3fff) << 4, columns = (uint32_t)(operand >> 16 & 0x3fff) << 4;
    uint32_t eight = (uint32_t)(operand >> 32 & 0x3fff) << 4;
    uint32_t at = transposed ? row / 64 * columns + k / 8 * eight + k % 8 * ROW_BYTES + row % 64 * 2
                             : row / 8 * eight + row % 8 * ROW_BYTES + k * 2;
    uint16_t number;
    memcpy(&number, shared_memory + swizzled(start + at), 2);
    return scalar_from_bf16(number);
}

/* Row (of the warp's 16) and k of the first operand. lanes: the same product, as each lane has queued it. */
float first_at(const struct product *const lanes[WARP], uint32_t warp, uint32_t row, uint32_t k)
{
    if (!lanes[0]->a)
        return number_at(lanes[0]->shared_a, warp * 16 + row, k, false);
    uint32_t word = lanes[row % 8 * 4 + k % 8 / 2]->a[k / 8 * 2 + row / 8];
    return float_of(k % 2 ? word & 0xffff0000 : word << 16);
}
} // namespace

/* ----------------------------------------------------------------- barriers */

void barrier_init(uint64_t *barrier, uint32_t n)
{
    *of(barrier) = {(uint16_t)n, (uint16_t)n, 0, 0};
}

void barrier_arrive(uint64_t *barrier, uint32_t len_bytes)
{
    struct barrier *b = of(barrier);
    if (!b->missing)
        fail("arrives at a barrier of which all have come");
    b->missing--;
    b->bytes += (int32_t)len_bytes;
    end_phase(b);
}

void barrier_wait(uint64_t *barrier, uint32_t parity)
{
    while (of(barrier)->parity == parity)
        look_again();
}

/* ------------------------------------------------------------------- copies */

void copy_box_later(void *shared, const void *map, uint64_t *barrier, uint32_t row, uint32_t slab, uint32_t part)
{
    struct box b = {(uint8_t *)shared, {}, barrier, {0, row, slab, part}};
    memcpy(&b.map, map, sizeof(b.map));
    if ((b.to - shared_memory) % 1024)
        fail("copies a box to an address that is no multiple of 1 KiB");
    memset(shared, POISON, box_bytes(b.map));
    boxes.push_back(b);
}

bool copy_box_now(void)
{
    if (boxes.empty())
        return false;
    const struct box b = boxes.front();
    boxes.pop_front();
    uint32_t to = (uint32_t)(b.to - shared_memory);
    for (uint32_t slab = 0; slab < b.map.box[2]; slab++)
        for (uint32_t row = 0; row < b.map.box[1]; row++, to += ROW_BYTES)
            copy_row(b, row, slab, to);
    of(b.barrier)->bytes -= (int32_t)box_bytes(b.map);
    end_phase(of(b.barrier));
    return true;
}

/* ----------------------------------------------------------------- products */

void multiply_now(const struct product *const lanes[WARP], uint32_t warp)
{
    float a[16][16], b[16];
    for (uint32_t row = 0; row < 16; row++)
        for (uint32_t k = 0; k < 16; k++)
            a[row][k] = first_at(lanes, warp, row, k);
    for (uint32_t column = 0; column < 8 * lanes[0]->n; column++) {
        for (uint32_t k = 0; k < 16; k++)
            b[k] = number_at(lanes[0]->b, column, k, lanes[0]->transposed);
        for (uint32_t row = 0; row < 16; row++) {
            double sum = 0;
            for (uint32_t k = 0; k < 16; k++)
                sum += (double)a[row][k] * (double)b[k];
            float *d = &lanes[row % 8 * 4 + column % 8 / 2]->d[column / 8 * 4 + row / 8 * 2 + column % 2];
            *d = (float)(sum + (double)*d);
        }
    }
}
} // namespace emulator

/* Makes the map of boxes in the only form that kernels/cuda/map.c asks for: bf16 in slabs of 128 bytes. */
CUresult emulated_encode_map(CUtensorMap *out, CUtensorMapDataType, cuuint32_t, void *data, const cuuint64_t *dims,
                             const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *,
                             CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill)
{
    struct emulator::box_map m = {};
    m.data = (const uint8_t *)data;
    memcpy(m.dims, dims, sizeof(m.dims));
    memcpy(m.strides, strides, sizeof(m.strides));
    memcpy(m.box, box, sizeof(m.box));
    memset(out, 0, sizeof(*out));
    memcpy(out, &m, sizeof(m));
    return CUDA_SUCCESS;
}
