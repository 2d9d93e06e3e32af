/* Between the emulator's files: threads.cc runs kernels, runtime.cc says when. */
#pragma once

#include <functional>

#include "tests/emulator/emulator.h"

namespace emulator
{
void run_kernel(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &thread);
} // namespace emulator
