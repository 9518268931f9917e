// Matrix products of a warp from registers: one instruction a wrapper.
#pragma once
#include "megamoe/ptx/types.cuh"

namespace megamoe::ptx {

// c += a * b of 16 x 16 and 16 x 8 BF16 in FP32. Lane 4 * g + q holds, as pairs of neighbours in k: of a rows g (a.x,
// a.z) and g + 8 (a.y, a.w), at k = 2q (a.x, a.y) and 2q + 8 (a.z, a.w); of b column g at 2q (b.x) and 2q + 8 (b.y); of
// c columns 2q and 2q + 1 of rows g (c[0], c[1]) and g + 8 (c[2], c[3]).
__device__ __forceinline__ void mma_bf16(float (&c)[4], uint4 a, uint2 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

}  // namespace megamoe::ptx
