// BF16 rows -> E4M3 rows with one FP32 scale per token or per 128 columns, bit for bit what kernels/formats.py does:
// amax without NaN, clamped to [448 * 2^-126, FLT_MAX]; scale = amax / 448; value = rne_satfinite(x * (1 / scale)).
//
// One block per row. A thread owns vectors of 8 columns: vector v of the row belongs to thread v % kThreads, so that 16
// consecutive lanes own one block of 128 columns and a scale per 128 columns needs no shared memory.
#pragma once
#include "megamoe/common/codes.h"
#include "megamoe/ptx/math.cuh"

namespace megamoe {

struct alignas(16) Bf16x8 {
    unsigned int word[4];
};

// The two BF16 halves of a word as FP32; exact.
__device__ __forceinline__ float bf16_low(unsigned int word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float bf16_high(unsigned int word) { return __uint_as_float(word & 0xffff0000u); }

__device__ __forceinline__ float amax_of(const Bf16x8& v) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // fmaxf drops NaN, so a NaN element does not spoil the scale of its neighbours.
        amax = fmaxf(amax, fmaxf(fabsf(bf16_low(v.word[i])), fabsf(bf16_high(v.word[i]))));
    }
    return amax;
}

__device__ __forceinline__ uint2 quantize_vector(const Bf16x8& v, float inverse) {
    unsigned int packed[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned int a = v.word[2 * i], b = v.word[2 * i + 1];
        packed[i] = ptx::cvt_e4m3x2(__fmul_rn(bf16_low(a), inverse), __fmul_rn(bf16_high(a), inverse)) |
                    ptx::cvt_e4m3x2(__fmul_rn(bf16_low(b), inverse), __fmul_rn(bf16_high(b), inverse)) << 16;
    }
    return make_uint2(packed[0], packed[1]);
}

// kVectors: vectors of 8 columns that a thread keeps in registers; kThreads * kVectors * 8 >= columns.
// kPerToken: one scale per row; otherwise one per 128 columns, the last block may be short.
template <int kThreads, int kVectors, bool kPerToken>
__device__ __forceinline__ void quantize_e4m3_row(const Bf16x8* __restrict__ x, long long x_stride_bytes,
                                                  uint2* __restrict__ q, long long q_stride_bytes,
                                                  float* __restrict__ scale, long long scale_stride,
                                                  int num_vectors) {
    static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block is whole warps");
    const long long row = blockIdx.x;
    const Bf16x8* source = reinterpret_cast<const Bf16x8*>(reinterpret_cast<const char*>(x) + row * x_stride_bytes);
    uint2* target = reinterpret_cast<uint2*>(reinterpret_cast<char*>(q) + row * q_stride_bytes);

    Bf16x8 values[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int v = i * kThreads + threadIdx.x;
        values[i] = v < num_vectors ? source[v] : Bf16x8{{0u, 0u, 0u, 0u}};
    }

    if constexpr (kPerToken) {
        __shared__ float warp_amax[kThreads / 32];
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) amax = fmaxf(amax, amax_of(values[i]));
#pragma unroll
        for (int lane = 16; lane > 0; lane /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, lane));
        if (threadIdx.x % 32 == 0) warp_amax[threadIdx.x / 32] = amax;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kThreads / 32; ++i) amax = fmaxf(amax, warp_amax[i]);
        const float row_scale = e4m3_scale(amax);
        const float inverse = __fdiv_rn(1.0f, row_scale);
        if (threadIdx.x == 0) scale[row * scale_stride] = row_scale;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const int v = i * kThreads + threadIdx.x;
            if (v < num_vectors) target[v] = quantize_vector(values[i], inverse);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const int v = i * kThreads + threadIdx.x;
            float amax = amax_of(values[i]);
#pragma unroll
            for (int lane = 8; lane > 0; lane /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, lane));
            const float block_scale = e4m3_scale(amax);
            if (v < num_vectors) {
                if (v % 16 == 0) scale[row * scale_stride + v / 16] = block_scale;
                target[v] = quantize_vector(values[i], __fdiv_rn(1.0f, block_scale));
            }
        }
    }
}

}  // namespace megamoe
