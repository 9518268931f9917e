// One unit of the MQA logits: 64 keys on M x (queries x heads) on N over the whole head, and the weighted sum of its
// positive parts over the heads.
//
// A thread holds keys g and g + 8 of its warp's 16 and, of every 8 columns, 2c and 2c + 1 (g = lane / 4, c = lane % 4).
// The order of additions depends on the head alone: a logit has the same bits in whatever unit it is computed.
#pragma once
#include "megamoe/mma/operand.cuh"
#include "megamoe/ptx/math.cuh"

namespace megamoe::mma {

// acc = keys by descriptor x queries; closes a group of wgmma.
template <int N, int kHeadDim>
__device__ __forceinline__ void issue_scores(float (&acc)[N / 2], uint64_t keys, uint64_t queries) {
    pin(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 32; ++k) ptx::Wgmma<N>::ss(acc, keys + 2 * k, queries + 2 * k, k != 0);
    ptx::wgmma_commit();
}
// The same with keys in registers.
template <int N, int kHeadDim>
__device__ __forceinline__ void issue_scores(float (&acc)[N / 2], const uint32_t (&keys)[kHeadDim / 32][4],
                                             uint64_t queries) {
    pin(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 32; ++k) ptx::Wgmma<N>::rs(acc, keys[k], queries + 2 * k, k != 0);
    ptx::wgmma_commit();
}

// sum[row][query] over this thread's heads of max(score, 0) * weight.
template <int kHeads, int kQueries>
__device__ __forceinline__ void sum_heads(float (&sum)[2][kQueries], float (&acc)[kHeads * kQueries / 2],
                                          const float (&weights)[kHeads * kQueries / 4]) {
    pin(acc);
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
        sum[0][q] = sum[1][q] = 0.f;
#pragma unroll
        for (int i = 0; i < kHeads / 8; ++i)
#pragma unroll
            for (int b = 0; b < 2; ++b)
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const int j = q * (kHeads / 8) + i;
                    const float x = acc[4 * j + 2 * row + b], w = weights[2 * j + b];
                    sum[row][q] = __fmaf_rn(ptx::relu(x), w, sum[row][q]);
                }
    }
}

// Adds the sums of the four lanes that share keys. Lane c is left with key row c % 2 and queries 2 i + c / 2; of an odd
// count the last query is left in both halves.
template <int kQueries>
__device__ __forceinline__ void sum_quad(float (&out)[(kQueries + 1) / 2], const float (&sum)[2][kQueries], int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    float row[kQueries];
#pragma unroll
    for (int q = 0; q < kQueries; ++q) {
        const float kept = odd ? sum[1][q] : sum[0][q], given = odd ? sum[0][q] : sum[1][q];
        row[q] = kept + __shfl_xor_sync(0xffffffffu, given, 1);
    }
#pragma unroll
    for (int i = 0; i < kQueries / 2; ++i) {
        const float kept = upper ? row[2 * i + 1] : row[2 * i], given = upper ? row[2 * i] : row[2 * i + 1];
        out[i] = kept + __shfl_xor_sync(0xffffffffu, given, 2);
    }
    if constexpr (kQueries % 2)
        out[kQueries / 2] = row[kQueries - 1] + __shfl_xor_sync(0xffffffffu, row[kQueries - 1], 2);
}

// ---- MXFP4 ---------------------------------------------------------------------------------------------------------
// A row's codes become E4M3 relative to the row's largest scale; what that scale leaves is one power of two a row. A
// group whose scale is more than 2^11 below the largest becomes zero.
//
// Lane c of a quad holds words kHeadDim / 32 * c .. of the row (8 codes each), so that one vector load brings them.
// K step j multiplies word j of the four lanes: position 4c + i of it is code i of lane c's word, 16 + 4c + i is code
// 4 + i.

// The factor that `Fp4Table` relative to the largest of a row's scales leaves; NaN where a scale is NaN.
template <int kHeadDim>
__device__ __forceinline__ float largest_scale(uint32_t scales, uint32_t& largest) {
    largest = scales & 255;
#pragma unroll
    for (int g = 1; g < kHeadDim / 32; ++g) largest = max(largest, scales >> (8 * g) & 255);
    if (largest == 255) return __uint_as_float(0x7fc00000u);
    // 2^(largest - 127 - 6): below 2^-126 it is no normal number
    return largest > 6 ? __uint_as_float((largest - 6) << 23) : __uint_as_float(1u << (largest + 16));
}

// 8 codes of a word, low nibble first, as two words of E4M3; `below`: powers of two from the row's largest scale.
__device__ __forceinline__ void decode_mx(uint32_t word, uint32_t below, uint32_t& first, uint32_t& second) {
    const bool kept = below <= 11;
    const uint32_t step = (11 - below) * 0x08080808u;
    const uint32_t low = kept ? 0x14100800u + (step & 0xffffff00u) : 0u, high = kept ? 0x24201c18u + step : 0u;
    const uint32_t magnitudes = word & 0x77777777u, shifted = word << 4;
    first = __byte_perm(low, high, magnitudes) | (__byte_perm(word, shifted, 0x1504) & 0x80808080u);
    second = __byte_perm(low, high, magnitudes >> 16) | (__byte_perm(word, shifted, 0x3726) & 0x80808080u);
}

// The words of a row that lane c multiplies.
template <int kHeadDim>
__device__ __forceinline__ void load_words(uint32_t (&words)[kHeadDim / 32], uint32_t row, int c) {
    if constexpr (kHeadDim == 128) {
        const uint4 v = ptx::load_shared_v4(row + 16 * c);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else if constexpr (kHeadDim == 64) {
        const uint2 v = ptx::load_shared_v2(row + 8 * c);
        words[0] = v.x, words[1] = v.y;
    } else {
        words[0] = ptx::load_shared_u32(row + 4 * c);
    }
}

// The scale group of lane c's word j.
template <int kHeadDim>
__device__ __forceinline__ int group_of_word(int c, int j) {
    return (kHeadDim / 32 * c + j) / 4;
}

}  // namespace megamoe::mma
