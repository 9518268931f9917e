// Rows of the indexer's queries and keys -> E4M3 with an FP32 scale a row, or MXFP4, after an optional Hadamard
// transform; into plain tensors or into the pages of a cache. The bits are those of kernels/indexer_quantize.py.
//
// A lane has four neighbours of a row; kLanes lanes have the row (of 96 values, 8 of 32 lanes have none).
#pragma once
#include "megamoe/common/codes.h"
#include "megamoe/impls/quantize_e4m3.cuh"
#include "megamoe/ptx/types.cuh"

namespace megamoe::impls {

struct IndexerQuantizeArgs {
    const void* x;           // [rows, dim]
    uint8_t* values;         // where page 0 begins; not paged: the values
    uint8_t* scales;         // where the scales of page 0 begin
    const int64_t* slots;    // [rows]: place in the cache; null: the row's number
    int64_t x_stride;        // elements
    int64_t page_bytes;      // from page to page
    int64_t num_slots;       // rows of another slot are not written
    int num_rows, page;
    float hadamard_scale;    // 0: no transform
    int power_of_two;        // whether E4M3 scales are powers of two
};

// Four neighbours as FP32.
__device__ __forceinline__ void load_four(const float* p, float* out) {
    const float4 v = *reinterpret_cast<const float4*>(p);
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}
__device__ __forceinline__ void load_four(const uint16_t* p, float* out) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    out[0] = bf16_low(v.x), out[1] = bf16_high(v.x), out[2] = bf16_low(v.y), out[3] = bf16_high(v.y);
}

// One stage of the transform: (a, b) -> (a + b, a - b) for partners `kDistance` apart.
template <int kDistance>
__device__ __forceinline__ void hadamard_stage(float (&v)[4]) {
    if constexpr (kDistance < 4) {
        float sums[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[i] = i & kDistance ? __fsub_rn(v[i ^ kDistance], v[i]) : __fadd_rn(v[i], v[i ^ kDistance]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = sums[i];
    } else {
        const bool is_upper = (threadIdx.x & kDistance / 4) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, v[i], kDistance / 4);
            v[i] = is_upper ? __fsub_rn(other, v[i]) : __fadd_rn(v[i], other);
        }
    }
}
template <int kDim, int kDistance = 1>
__device__ __forceinline__ void hadamard(float (&v)[4], float scale) {
    hadamard_stage<kDistance>(v);
    if constexpr (2 * kDistance < kDim) {
        hadamard<kDim, 2 * kDistance>(v, scale);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = __fmul_rn(v[i], scale);
    }
}

template <int kLanes>
__device__ __forceinline__ uint32_t max_of_lanes(uint32_t value) {
#pragma unroll
    for (int lane = kLanes / 2; lane > 0; lane /= 2) {
        value = max_of(value, __shfl_xor_sync(0xffffffffu, value, lane));
    }
    return value;
}

template <typename Value, int kDim, bool kFp4>
__device__ __forceinline__ void sm90_indexer_quantize(const IndexerQuantizeArgs& args) {
    static_assert(kDim == 32 || kDim == 64 || kDim == 96 || kDim == 128, "a row is 8, 16, 24 or 32 lanes of four");
    constexpr int kLanes = kDim == 96 ? 32 : kDim / 4, kValueBytes = kFp4 ? kDim / 2 : kDim;
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
    const int at = threadIdx.x % kLanes * 4;
    const int64_t slot = row >= args.num_rows ? -1 : args.slots == nullptr ? row : args.slots[row];
    const bool is_written = slot >= 0 && slot < args.num_slots && at < kDim;

    float v[4] = {};
    if (is_written) load_four(static_cast<const Value*>(args.x) + row * args.x_stride + at, v);
    if constexpr (kDim != 96) {  // the transform is of a power of two
        if (args.hadamard_scale != 0.0f) hadamard<kDim>(v, args.hadamard_scale);
    }

    uint32_t magnitude = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t bits = magnitude_bits(v[i]);
        // E4M3: a NaN does not spoil the scale of its row; as integers magnitudes order as they do as floats
        magnitude = max_of(magnitude, !kFp4 && bits > 0x7f800000u ? 0u : bits);
    }
    magnitude = max_of_lanes<kFp4 ? 8 : kLanes>(magnitude);

    const int64_t page = slot / args.page, place = slot - page * args.page;
    uint8_t* target = args.values + page * args.page_bytes + place * kValueBytes;
    uint8_t* target_scale = args.scales + page * args.page_bytes + place * 4;
    if constexpr (kFp4) {
        const bool has_nan = magnitude > 0x7f800000u;
        // 6 = 1.5 * 2^2: the sum carries into the exponent exactly when the mantissa exceeds 1.5
        const uint32_t carried = (min_of(magnitude, 0x7f7fffffu) + 0x3fffffu) >> 23;
        const uint32_t code = carried > 2 ? carried - 2 : 0;
        const float inverse = bits_float((254u - code) << 23), limit = code == 253 ? 3.0f : 6.0f;
        uint32_t codes = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float scaled = fminf(__fmul_rn(fabsf(v[i]), inverse), limit);
            codes |= (e2m1_encode(scaled) | (float_bits(v[i]) >> 28 & 8u)) << 4 * i;
        }
        // the bytes of a row's groups, gathered into its first lane: a word that the row owns
        uint32_t word = (has_nan ? 255u : code) << at / 32 * 8;
        word |= kDim > 32 ? __shfl_down_sync(0xffffffffu, word, 8, kLanes) * (at + 32 < kDim) : 0;
        if constexpr (kDim > 64) word |= __shfl_down_sync(0xffffffffu, word, 16, kLanes) * (at + 64 < kDim);
        if (is_written) {
            *reinterpret_cast<uint16_t*>(target + at / 2) = has_nan ? 0 : static_cast<uint16_t>(codes);
            if (at == 0) *reinterpret_cast<uint32_t*>(target_scale) = word;
        }
    } else {
        float scale = megamoe::e4m3_scale(bits_float(magnitude));
        if (args.power_of_two != 0) scale = bits_float((float_bits(scale) + 0x7fffffu) & 0xff800000u);
        const float inverse = __fdiv_rn(1.0f, scale);
        if (is_written) {
            *reinterpret_cast<uint32_t*>(target + at) =
                ptx::cvt_e4m3x2(__fmul_rn(v[0], inverse), __fmul_rn(v[1], inverse)) |
                ptx::cvt_e4m3x2(__fmul_rn(v[2], inverse), __fmul_rn(v[3], inverse)) << 16;
            if (at == 0) *reinterpret_cast<float*>(target_scale) = scale;
        }
    }
}

}  // namespace megamoe::impls
