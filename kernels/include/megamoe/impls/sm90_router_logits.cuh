// The logits of a router: x [T, H] BF16 times weight [E, H], FP32 or BF16, as accurate as FP32 products and sums.
//
// A cluster of blocks has 16 experts and 8 * kTiles tokens; each of its warps has a part of H. An FP32 weight is the sum
// of three BF16 numbers without error (8 + 8 + 8 bits), so that tensor cores multiply it exactly; their sums run over 32
// of H only, from the smallest parts to the largest, and FP32 additions do the rest. The order of all sums depends on H
// alone: neither the number of tokens nor the other tokens change a bit.
#pragma once
#include "megamoe/common/types.h"
#include "megamoe/ptx/barrier.cuh"
#include "megamoe/ptx/cluster.cuh"
#include "megamoe/ptx/mma.cuh"
#include "megamoe/ptx/memory.cuh"

namespace megamoe::impls {

struct RouterLogitsArgs {
    const uint16_t* x;   // BF16, rows of x_stride elements
    const void* weight;  // [num_experts, hidden]
    const void* bias;    // [num_experts] in the type of the weight, or null
    float* logits;       // [num_tokens, num_experts]
    int64_t x_stride;
    int num_tokens, num_experts, hidden;  // hidden: a multiple of 8
    int token_groups;                     // of 8 * kTiles tokens
};

namespace router_logits {

constexpr int kExperts = 16, kK = 32;  // of a product, and of a step; a lane has eight neighbours of k
constexpr uint32_t kExponents = 0x7f807f80u, kTopHalf = 0xffff0000u;

// The upper halves of two words; `low` goes to the lower place.
__device__ __forceinline__ uint32_t upper_halves(uint32_t low, uint32_t high) { return __byte_perm(low, high, 0x7632); }

// Splits pairs of FP32 weights into kParts pairs of BF16, largest part first.
__device__ __forceinline__ void split(uint32_t first, uint32_t second, uint32_t (&parts)[3]) {
    float rest[2] = {__uint_as_float(first), __uint_as_float(second)};
    parts[0] = upper_halves(first, second);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t bits = i == 0 ? first : second;
        // of an infinity nothing is left, of NaN NaN
        rest[i] = (bits & 0x7fffffffu) == 0x7f800000u ? 0.0f : rest[i] - __uint_as_float(bits & kTopHalf);
    }
    const uint32_t a = __float_as_uint(rest[0]), b = __float_as_uint(rest[1]);
    parts[1] = upper_halves(a, b);
    parts[2] = upper_halves(__float_as_uint(rest[0] - __uint_as_float(a & kTopHalf)),
                            __float_as_uint(rest[1] - __uint_as_float(b & kTopHalf)));
}

// Whether a BF16 half of a word is an infinity or NaN.
__device__ __forceinline__ uint32_t not_finite(uint32_t word) {
    return ((word & kExponents) + 0x00800080u) & 0x80008000u;
}
// The word without such halves.
__device__ __forceinline__ uint32_t finite_halves(uint32_t word) {
    const uint32_t bad = not_finite(word);  // the top bit of each
    return word & ~((bad >> 15) * 0xffffu);
}

// Weights of a lane for a step: eight neighbours of k in rows g and g + 8.
template <bool kFp32>
struct Weights {
    static constexpr int kParts = kFp32 ? 3 : 1, kVectors = kFp32 ? 2 : 1;
    uint4 row[2][kVectors];

    __device__ __forceinline__ void load(const uint8_t* upper, const uint8_t* lower, bool has_upper, bool has_lower) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            row[0][v] = has_upper ? ptx::load_global_v4_no_allocate(upper + 16 * v) : make_uint4(0, 0, 0, 0);
            row[1][v] = has_lower ? ptx::load_global_v4_no_allocate(lower + 16 * v) : make_uint4(0, 0, 0, 0);
        }
    }
    // The operands of one half of a step (four neighbours of each lane), largest part first.
    template <int kHalf>
    __device__ __forceinline__ void operands(uint4 (&a)[kParts]) const {
        if constexpr (kFp32) {
            uint32_t parts[4][3];
            split(row[0][kHalf].x, row[0][kHalf].y, parts[0]);
            split(row[1][kHalf].x, row[1][kHalf].y, parts[1]);
            split(row[0][kHalf].z, row[0][kHalf].w, parts[2]);
            split(row[1][kHalf].z, row[1][kHalf].w, parts[3]);
#pragma unroll
            for (int p = 0; p < kParts; ++p) a[p] = make_uint4(parts[0][p], parts[1][p], parts[2][p], parts[3][p]);
        } else if constexpr (kHalf == 0) {
            a[0] = make_uint4(row[0][0].x, row[1][0].x, row[0][0].y, row[1][0].y);
        } else {
            a[0] = make_uint4(row[0][0].z, row[1][0].z, row[0][0].w, row[1][0].w);
        }
    }
};

}  // namespace router_logits

template <int kTiles, int kWarps>
struct RouterLogitsShared {
    static constexpr int kTokens = 8 * kTiles, kStride = 20;  // 16 experts; rows of 20 words meet in no bank
    float warps[kWarps][kTokens][kStride];
    float block[kTokens][router_logits::kExperts];
};

// kSteps: steps of 32 along H whose weights a warp loads at once.
template <bool kFp32, int kTiles, int kWarps, int kCluster, int kSteps>
__device__ __forceinline__ void sm90_router_logits(const RouterLogitsArgs& args, uint8_t* storage) {
    using namespace router_logits;
    using Shared = RouterLogitsShared<kTiles, kWarps>;
    constexpr int kTokens = Shared::kTokens, kThreads = 32 * kWarps, kBytes = kFp32 ? 4 : 2;
    constexpr int kOutputs = kTokens * kExperts, kShare = kOutputs / kCluster;
    static_assert(kShare * kCluster == kOutputs && kShare <= kThreads, "a thread has one logit at most");
    Shared& shared = *reinterpret_cast<Shared*>(storage);
    const uint32_t rank = ptx::cluster_rank();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int group = static_cast<int>(blockIdx.x) / kCluster;
    const int first_token = group % args.token_groups * kTokens, first_expert = group / args.token_groups * kExperts;

    const int steps = (args.hidden + kK - 1) / kK, workers = kWarps * kCluster;
    const int worker = static_cast<int>(rank) * kWarps + warp;
    const int end = (worker + 1) * steps / workers;
    const bool has_upper = first_expert + g < args.num_experts, has_lower = first_expert + g + 8 < args.num_experts;
    const int64_t row_bytes = static_cast<int64_t>(args.hidden) * kBytes;
    const uint8_t* upper = static_cast<const uint8_t*>(args.weight) + (first_expert + g) * row_bytes;
    const uint8_t* lower = upper + 8 * row_bytes;

    float total[kTiles][4] = {};
#pragma unroll 1
    for (int step = worker * steps / workers; step < end; step += kSteps) {
        Weights<kFp32> weights[kSteps];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const int k = (step + s) * kK + 8 * q;
            const bool is_in = step + s < end && k < args.hidden;
            weights[s].load(upper + k * kBytes, lower + k * kBytes, is_in && has_upper, is_in && has_lower);
        }
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const int k = (step + s) * kK + 8 * q;
            uint4 x[kTiles];
            uint32_t bad = 0;
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const int token = first_token + 8 * t + g;
                const bool is_in = step + s < end && k < args.hidden && token < args.num_tokens;
                x[t] = is_in ? __ldg(reinterpret_cast<const uint4*>(args.x + token * args.x_stride + k))
                             : make_uint4(0, 0, 0, 0);
                bad |= not_finite(x[t].x) | not_finite(x[t].y) | not_finite(x[t].z) | not_finite(x[t].w);
            }
            float sum[kTiles][4] = {};
            uint4 a[2][Weights<kFp32>::kParts];
            weights[s].template operands<0>(a[0]);
            weights[s].template operands<1>(a[1]);
            if constexpr (kFp32) {
                // an infinity meets the largest part alone: it would be NaN with a smaller one that is 0
                const bool is_finite = !__any_sync(0xffffffffu, bad != 0);
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    uint4 v = x[t];
                    if (!is_finite) {
                        v.x = finite_halves(v.x), v.y = finite_halves(v.y);
                        v.z = finite_halves(v.z), v.w = finite_halves(v.w);
                    }
#pragma unroll
                    for (int p = Weights<kFp32>::kParts - 1; p > 0; --p) {
                        ptx::mma_bf16(sum[t], a[0][p], make_uint2(v.x, v.y));
                        ptx::mma_bf16(sum[t], a[1][p], make_uint2(v.z, v.w));
                    }
                }
            }
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                ptx::mma_bf16(sum[t], a[0][0], make_uint2(x[t].x, x[t].y));
                ptx::mma_bf16(sum[t], a[1][0], make_uint2(x[t].z, x[t].w));
#pragma unroll
                for (int i = 0; i < 4; ++i) total[t][i] += sum[t][i];
            }
        }
    }

#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) shared.warps[warp][8 * t + 2 * q + i % 2][g + i / 2 * 8] = total[t][i];
    }
    __syncthreads();
#pragma unroll
    for (int o = threadIdx.x; o < kOutputs; o += kThreads) {
        float sum = shared.warps[0][o / kExperts][o % kExperts];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) sum += shared.warps[w][o / kExperts][o % kExperts];
        shared.block[o / kExperts][o % kExperts] = sum;
    }
    ptx::cluster_arrive_release();
    ptx::cluster_wait_acquire();
    if (threadIdx.x < kShare) {
        const int o = static_cast<int>(rank) * kShare + threadIdx.x;
        const int token = first_token + o / kExperts, expert = first_expert + o % kExperts;
        const uint32_t at = ptx::smem_address(&shared.block[o / kExperts][o % kExperts]);
        float parts[kCluster];
#pragma unroll
        for (uint32_t r = 0; r < kCluster; ++r) {
            parts[r] = __uint_as_float(ptx::load_cluster_u32(ptx::map_to_rank(at, r)));
        }
        float logit = parts[0];
#pragma unroll
        for (int r = 1; r < kCluster; ++r) logit += parts[r];
        if (token < args.num_tokens && expert < args.num_experts) {
            if (args.bias != nullptr) {
                logit += kFp32 ? static_cast<const float*>(args.bias)[expert]
                               : __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(args.bias)[expert]) << 16);
            }
            args.logits[static_cast<int64_t>(token) * args.num_experts + expert] = logit;
        }
    }
    ptx::cluster_arrive_release();  // after it no block reads another's memory
    ptx::cluster_wait_acquire();
}

}  // namespace megamoe::impls
