/* Between the emulator's files: threads.cc runs kernels, hopper.cc does what they ask of Hopper, and
 * runtime.cc says when a kernel runs. */
#pragma once

#include <functional>

#include "tests/emulator/emulator.h"

namespace emulator
{
[[noreturn]] void fail(const char *why);
void look_again(void);   /* lets other threads run, before the caller looks at what it waits for */
bool copy_box_now(void); /* the oldest copy of a box. False: there is none */
/* A product of a warp, as each of its lanes has queued it; warp: of the warpgroup. */
void multiply_now(const struct product *const lanes[WARP], uint32_t warp);
void run_kernel(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &thread);
} // namespace emulator
