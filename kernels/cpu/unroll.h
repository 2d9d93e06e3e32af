/* Loops over registers must be unrolled completely, or the registers become memory. */
#pragma once

#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif
