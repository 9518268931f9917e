// Arithmetic that the compiler has no plain spelling for: one instruction a wrapper.
#pragma once
#include "megamoe/ptx/types.cuh"

namespace megamoe::ptx {

// max(x, 0) that keeps NaN.
__device__ __forceinline__ float relu(float x) {
    float v;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(v) : "f"(x));
    return v;
}

// Smaller and larger of two, NaN where one is.
__device__ __forceinline__ float min_nan(float a, float b) {
    float v;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}
__device__ __forceinline__ float max_nan(float a, float b) {
    float v;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}
// 2^x and 1 / x, within 2 units in the last place; numbers below the smallest normal one count as zero.
__device__ __forceinline__ float exp2_approx(float x) {
    float v;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
    return v;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
    float v;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
    return v;
}
// Two FP32 -> two E4M3 (low byte = a), round to nearest even, saturating; NaN -> 0x7f.
__device__ __forceinline__ uint32_t cvt_e4m3x2(float a, float b) {
    uint16_t out;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(out) : "f"(b), "f"(a));
    return out;
}

}  // namespace megamoe::ptx
