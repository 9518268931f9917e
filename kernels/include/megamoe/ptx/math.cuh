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

}  // namespace megamoe::ptx
