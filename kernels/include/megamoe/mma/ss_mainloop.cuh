// SS mainloop: tokens on M, weights on N, both from shared memory, promoted with a scale per token every 128 of K.
//
// Ring of kStages slots, each one K step: X [kTileM, 128] and W [kTileN, 128] E4M3 (128B swizzle), scales FP32.
//   full[s]:  1 arrival by the loading thread (with the bytes of its copies) and, for FP4, one by each decoding warp
//   empty[s]: 8 arrivals, one by each math warp when its wgmma have read the slot and its scales are in registers
// FP4: two decoding warpgroups read packed codes from global memory straight into registers and decode them into the
// slot, K steps in turn (one row block of 128) or a row block each (two).
#pragma once
#include "megamoe/mma/decode_fp4.cuh"
#include "megamoe/mma/operand.cuh"
#include "megamoe/mma/policy.cuh"

namespace megamoe::mma {

// Where the ring lies; addresses in the shared window, `base` 1024-byte aligned, P::kSmemBytes long.
template <class P>
struct SsRing {
    uint32_t base;
    __device__ __forceinline__ uint32_t x(int s) const { return base + s * P::kStageBytes; }
    __device__ __forceinline__ uint32_t w(int s) const { return base + s * P::kStageBytes + P::kXBytes; }
    __device__ __forceinline__ uint32_t scales(int s) const {
        return base + P::kStages * P::kStageBytes + s * P::kScaleBytes;
    }
    __device__ __forceinline__ uint32_t feature_scales(uint32_t tile) const {
        return scales(P::kStages) + tile % P::kFeatureScaleSets * (P::kTileN * 4);
    }
    __device__ __forceinline__ uint32_t full(int s) const { return scales(P::kStages) + P::kFeatureScaleBytes + s * 8; }
    __device__ __forceinline__ uint32_t empty(int s) const { return full(P::kStages) + s * 8; }

    // The math warps' wait for a slot; a ring of another kernel may have one that ends early.
    __device__ __forceinline__ void wait(uint32_t bar, uint32_t parity) const { ptx::mbarrier_wait(bar, parity); }

    // By one thread, before the CTA's first barrier.
    __device__ __forceinline__ void init() const {
        for (int s = 0; s < P::kStages; ++s) {
            ptx::mbarrier_init(full(s), !P::kDecode ? 1 : P::kDecodeInTurn ? 5 : 9);
            ptx::mbarrier_init(empty(s), 8);
        }
        ptx::fence_mbarrier_init();
    }
};

// acc += part * scale of the row; rows g and g + 8 of the 64-row block.
template <int N>
__device__ __forceinline__ void promote_rows(float (&acc)[N / 2], float (&part)[N / 2], float s0, float s1) {
    pin(part);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        acc[4 * j + 0] += part[4 * j + 0] * s0;
        acc[4 * j + 1] += part[4 * j + 1] * s0;
        acc[4 * j + 2] += part[4 * j + 2] * s1;
        acc[4 * j + 3] += part[4 * j + 3] * s1;
    }
}

// FP4 has no scale to multiply inside the K loop: its row scales go to the epilogue.
struct NoWeightScale {
    __device__ __forceinline__ void step(int) {}
    __device__ __forceinline__ float get(int) const { return 1.f; }
};

// FP32 scales per 128 x 128 weights, [row block, k], read one K step ahead.
template <int kNBlocks>
struct BlockWeightScale {
    const float* base = nullptr;
    int stride = 0, num_k_blocks;
    float now[kNBlocks], ahead[kNBlocks];

    __device__ __forceinline__ explicit BlockWeightScale(int num_k_blocks_) : num_k_blocks(num_k_blocks_) {}
    // Names the next tile; called before the epilogue of the current one, which hides the latency. `next_block`:
    // distance of the second row block, 0 where the matrix ends before it.
    __device__ __forceinline__ void start(const float* first, int next_block) {
        base = first;
        stride = next_block;
        prefetch(0);
    }
    __device__ __forceinline__ void prefetch(int k) {
        if (k < num_k_blocks) {
#pragma unroll
            for (int b = 0; b < kNBlocks; ++b) ahead[b] = __ldg(base + b * stride + k);
        }
    }
    __device__ __forceinline__ void step(int k) {
#pragma unroll
        for (int b = 0; b < kNBlocks; ++b) now[b] = ahead[b];
        prefetch(k + 1);
    }
    __device__ __forceinline__ float get(int b) const { return now[b]; }
};

// Math warpgroup `wg` (0 or 1): acc[unit] = its rows x columns, summed over K; unit = m_block * kNBlocks + n_block.
// `scale_shift`: place of the tile's first row in the slot's scales. `ring`: SsRing<P>, or one with the same members.
template <class P, class State, class Ring, class WeightScale>
__device__ __forceinline__ void ss_multiply(float (&acc)[P::kUnits][P::kUnitN / 2], State& state,
                                            const Ring& ring, int num_k_blocks, int wg, int thread,
                                            int scale_shift, WeightScale& weight_scale) {
    constexpr int N = P::kUnitN;
    const uint32_t row = wg * P::kMBlocks * 64 + (thread / 32) * 16 + (thread % 32) / 4 + scale_shift;
    float part[N / 2];
#pragma unroll
    for (int u = 0; u < P::kUnits; ++u)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[u][i] = 0.f;

    ring.wait(ring.full(state.stage()), state.parity());
    auto step = [&](int k, bool more) {
        weight_scale.step(k);
        const int stage = state.stage();
        float s0 = 1.f, s1 = 1.f;
#pragma unroll
        for (int u = 0; u < P::kUnits; ++u) {
            const int m = u / P::kNBlocks, n = u % P::kNBlocks;
            if (P::kScaled && n == 0) {
                s0 = ptx::load_shared_f32(ring.scales(stage) + (row + m * 64) * 4);
                s1 = ptx::load_shared_f32(ring.scales(stage) + (row + m * 64 + 8) * 4);
            }
            issue_unit<N>(part,
                          swizzled_descriptor(ring.x(stage)) + (wg * P::kMBlocks + m) * (64 * kSwizzleRowBytes / 16),
                          swizzled_descriptor(ring.w(stage)) + n * (N * kSwizzleRowBytes / 16));
            if (u == P::kUnits - 1) {
                // The next slot is waited for behind the last product of this one.
                state.advance();
                if (more) ring.wait(ring.full(state.stage()), state.parity());
                ptx::wgmma_wait<0>();
                if (ptx::elect_one()) ptx::mbarrier_arrive(ring.empty(stage));
            } else {
                ptx::wgmma_wait<0>();
            }
            const float ws = weight_scale.get(n);
            promote_rows<N>(acc[u], part, s0 * ws, s1 * ws);
        }
    };
    if constexpr (State::kFewRegisters) {
        for (int left = num_k_blocks; left > 0; --left) step(0, left > 1);  // one register instead of two; no weight scale asks for k
    } else {
        for (int k = 0; k < num_k_blocks; ++k) step(k, k + 1 < num_k_blocks);
    }
}

// Decoding thread: holds the codes of row `thread` of a block.
// NOTES: the proxy fence after the stores compiles to a full memory barrier, which waits for every load in flight; so
// the codes of the next step are asked for after it, and a second warpgroup hides their latency.
struct SsDecoder {
    uint4 codes[4];
    uint32_t exponents;

    __device__ __forceinline__ void load(const uint8_t* block, int thread) {
#pragma unroll
        for (int q = 0; q < 4; ++q) codes[q] = ptx::load_global_v4_no_allocate(block + q * 2048 + thread * 16);
        exponents = ptx::load_global_u16_no_allocate(block + kSsBlockCodeBytes + thread * 2);
    }
    // Decodes the held row into the 128 rows at `w`.
    __device__ __forceinline__ void store(uint32_t w, int thread) const {
        const uint32_t row = w + thread * kSwizzleRowBytes;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const Fp4Table table((exponents >> (4 * q)) & 15);
            const uint32_t word[4] = {codes[q].x, codes[q].y, codes[q].z, codes[q].w};
            uint32_t out[8];
#pragma unroll
            for (int i = 0; i < 4; ++i) decode_fp4(word[i], table, out[2 * i], out[2 * i + 1]);
            ptx::store_shared_v4(row + (((2 * q) ^ (thread & 7)) << 4), out[0], out[1], out[2], out[3]);
            ptx::store_shared_v4(row + (((2 * q + 1) ^ (thread & 7)) << 4), out[4], out[5], out[6], out[7]);
        }
    }
};

}  // namespace megamoe::mma
