// Operands of a K step: descriptors, fragments, and the four wgmma of one product.
#pragma once
#include "megamoe/mma/policy.cuh"
#include "megamoe/ptx/barrier.cuh"
#include "megamoe/ptx/memory.cuh"
#include "megamoe/ptx/wgmma.cuh"

namespace megamoe::mma {

// wgmma operand descriptor of a K-major tile with 128B swizzle: rows of 128 bytes, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ uint64_t swizzled_descriptor(uint32_t address) {
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// Keeps the compiler from moving accesses of `r` across this point.
template <int N>
__device__ __forceinline__ void pin(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

// One 64 x kUnitN product over a K step.
template <int N>
__device__ __forceinline__ void issue_unit(float (&part)[N / 2], uint64_t a, uint64_t b) {
    pin(part);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockK / 32; ++k) ptx::Wgmma<N>::ss(part, a + 2 * k, b + 2 * k, k != 0);
    ptx::wgmma_commit();
}

// The same with A in registers.
template <int N>
__device__ __forceinline__ void issue_unit(float (&part)[N / 2], const uint32_t (&a)[kBlockK / 32][4], uint64_t b) {
    pin(part);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockK / 32; ++k) ptx::Wgmma<N>::rs(part, a[k], b + 2 * k, k != 0);
    ptx::wgmma_commit();
}

}  // namespace megamoe::mma
