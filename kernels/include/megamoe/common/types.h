// Integers of fixed width and the function markers that NVRTC and the host compiler share. No includes, so that device
// code needs no header search path.
#pragma once

namespace megamoe {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;

static_assert(sizeof(u8) == 1 && sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "widths of the integers");
static_assert(sizeof(float) == 4, "float is IEEE binary32");

}  // namespace megamoe

#if defined(__CUDACC__)
#define MEGAMOE_HOST_DEVICE __host__ __device__ inline
#else
#define MEGAMOE_HOST_DEVICE inline
#endif

namespace megamoe {

MEGAMOE_HOST_DEVICE constexpr u32 ceil_div(u32 value, u32 step) { return value == 0 ? 0 : (value - 1) / step + 1; }
MEGAMOE_HOST_DEVICE constexpr u64 align_up(u64 value, u64 step) { return (value + step - 1) / step * step; }
MEGAMOE_HOST_DEVICE constexpr u32 min_of(u32 a, u32 b) { return a < b ? a : b; }
MEGAMOE_HOST_DEVICE constexpr u32 max_of(u32 a, u32 b) { return a > b ? a : b; }
MEGAMOE_HOST_DEVICE constexpr u64 max_of(u64 a, u64 b) { return a > b ? a : b; }

}  // namespace megamoe
