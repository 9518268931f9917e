// Operands of a K step: descriptors, fragments, and the four wgmma of one product.
#pragma once
#include "megamoe/mma/policy.cuh"
#include "megamoe/ptx/barrier.cuh"
#include "megamoe/ptx/memory.cuh"
#include "megamoe/ptx/wgmma.cuh"

namespace megamoe::mma {

constexpr uint64_t kSwizzledHigh = (64ull << 32) | (1ull << 62);  // the upper word, of every tile
// wgmma operand descriptor of a K-major tile with 128B swizzle: rows of 128 bytes, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ uint64_t swizzled_descriptor(uint32_t address) {
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | (1ull << 16) | kSwizzledHigh;
}

// Descriptors of one tile, 32 bytes of K apart. Every lane holds the same: said so, they are worked out in uniform registers,
// where wgmma wants them, instead of being moved there two words at a time.
class UniformDescriptors {
public:
    __device__ __forceinline__ explicit UniformDescriptors(uint64_t first)
        : low_(__shfl_sync(0xffffffffu, static_cast<uint32_t>(first), 0)) {}
    __device__ __forceinline__ uint64_t at(int step) const { return kSwizzledHigh | (low_ + 2 * step); }

private:
    uint32_t low_;
};

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
    const UniformDescriptors tokens(b);
    pin(part);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockK / 32; ++k) ptx::Wgmma<N>::rs(part, a[k], tokens.at(k), k != 0);
    ptx::wgmma_commit();
}

}  // namespace megamoe::mma
