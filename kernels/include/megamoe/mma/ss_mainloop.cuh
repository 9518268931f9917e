// SS mainloop: tokens on M, weights on N, both from shared memory, promoted with a scale per token every 128 of K.
//
// Ring of kStages slots, each one K step: X [kTileM, 128] and W [kTileN, 128] E4M3 (128B swizzle), scales [kTileM] FP32.
//   full[s]:  1 arrival by the loading thread (with the bytes of its copies) and, for FP4, 4 by the decoding warps
//   empty[s]: 8 arrivals, one by each math warp when its wgmma have read the slot and its scales are in registers
#pragma once
#include "megamoe/mma/decode_fp4.cuh"
#include "megamoe/mma/operand.cuh"
#include "megamoe/mma/policy.cuh"

namespace megamoe::mma {

// Where the ring lies; addresses in the shared window, `base` 1024-byte aligned.
template <class P>
struct SsRing {
    uint32_t base, full0, empty0;
    __device__ __forceinline__ uint32_t x(int s) const { return base + s * P::kStageBytes; }
    __device__ __forceinline__ uint32_t w(int s) const { return base + s * P::kStageBytes + P::kXBytes; }
    __device__ __forceinline__ uint32_t scales(int s) const {
        return base + P::kStages * P::kStageBytes + s * P::kScaleBytes;
    }
    __device__ __forceinline__ uint32_t full(int s) const { return full0 + s * 8; }
    __device__ __forceinline__ uint32_t empty(int s) const { return empty0 + s * 8; }
    static constexpr uint32_t kFullArrivals = P::kFormat == WeightFormat::kFp4 ? 1 + 4 * P::kDecodersPerStep : 1;
    static constexpr uint32_t kEmptyArrivals = 8;
};

// acc += part * scale of the row; rows g and g + 8 of the 64-row block.
template <int N>
__device__ __forceinline__ void promote(float (&acc)[N / 2], float (&part)[N / 2], float s0, float s1) {
    pin(part);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        acc[4 * j + 0] += part[4 * j + 0] * s0;
        acc[4 * j + 1] += part[4 * j + 1] * s0;
        acc[4 * j + 2] += part[4 * j + 2] * s1;
        acc[4 * j + 3] += part[4 * j + 3] * s1;
    }
}

// Weight scales of a K step, one per unit column block: nothing to multiply (FP4: row scales go to the epilogue).
struct NoWeightScale {
    __device__ __forceinline__ void start(const float*) {}
    __device__ __forceinline__ void prefetch(int) {}
    __device__ __forceinline__ float get(int) const { return 1.f; }
    __device__ __forceinline__ void next() {}
};

// FP32 scales per 128 x 128 weights, read one K step ahead; `row(b)` = scales + (first 128-row + b) * num_k_blocks.
template <int kNBlocks>
struct BlockWeightScale {
    const float* base;
    int stride, num_k_blocks;
    float now[kNBlocks], ahead[kNBlocks];
    __device__ __forceinline__ BlockWeightScale(int stride_, int num_k_blocks_)
        : base(nullptr), stride(stride_), num_k_blocks(num_k_blocks_) {}
    // Names the next tile; called before the epilogue of the current one, which hides the latency.
    __device__ __forceinline__ void start(const float* base_) {
        base = base_;
        prefetch(0);
    }
    __device__ __forceinline__ void prefetch(int k) {
        if (k < num_k_blocks) {
#pragma unroll
            for (int b = 0; b < kNBlocks; ++b) ahead[b] = __ldg(base + static_cast<int64_t>(b) * stride + k);
        }
    }
    __device__ __forceinline__ void next() {
#pragma unroll
        for (int b = 0; b < kNBlocks; ++b) now[b] = ahead[b];
    }
    __device__ __forceinline__ float get(int b) const { return now[b]; }
};

struct True {
    static constexpr bool value = true;
};
struct False {
    static constexpr bool value = false;
};

// The two math warpgroups take turns at the tensor cores: left alone they issue together, share the cores, and then
// promote together while the cores idle. A warpgroup passes the turn on when kHandoff of its four wgmma are still to
// finish. Barriers kTurnBarrier + wg; the second warpgroup opens the first turn once, by open_turns().
constexpr uint32_t kTurnBarrier = 1;
template <class P>
__device__ __forceinline__ void open_turns(int wg) {
    if (P::kHandoff >= 0 && wg == 1) ptx::named_barrier_arrive(kTurnBarrier, 256);
}

// Math warpgroup `wg` (0 or 1): acc[unit] = sum over K of the unit; unit = m_block * kNBlocks + n_block.
template <class P, class WeightScale>
__device__ __forceinline__ void ss_multiply(float (&acc)[P::kUnits][P::kUnitN / 2], PipelineState<P::kStages>& state,
                                            const SsRing<P>& ring, int num_k_blocks, int wg, int thread,
                                            WeightScale& weight_scale
#ifdef EXP_PROF
, unsigned (&prof)[6]
#endif
) {
    constexpr int N = P::kUnitN;
    const uint32_t scale_offset = (wg * P::kMBlocks * 64 + (thread / 32) * 16 + (thread % 32) / 4) * 4;
    float part[P::kPartials][N / 2];
#pragma unroll
    for (int u = 0; u < P::kUnits; ++u)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[u][i] = 0.f;

    auto descriptors = [&](int stage, int u, uint64_t& a, uint64_t& b) {
        const int m = u / P::kNBlocks, n = u % P::kNBlocks;
        a = swizzled_descriptor(ring.x(stage)) + (wg * P::kMBlocks + m) * (64 * kSwizzleRowBytes / 16);
        b = swizzled_descriptor(ring.w(stage)) + n * (N * kSwizzleRowBytes / 16);
    };
    float scale[P::kMBlocks][2];
    auto load_scales = [&](int stage) {
#pragma unroll
        for (int m = 0; m < P::kMBlocks; ++m) {
            scale[m][0] = scale[m][1] = 1.f;
            if constexpr (P::kGranularity == ScaleGranularity::kBlock128) {
                scale[m][0] = ptx::load_shared_f32(ring.scales(stage) + scale_offset + m * 256);
                scale[m][1] = ptx::load_shared_f32(ring.scales(stage) + scale_offset + m * 256 + 32);
            }
        }
    };
    auto promote_unit = [&](int u, float(&p)[N / 2]) {
        const int m = u / P::kNBlocks;
        const float ws = weight_scale.get(u % P::kNBlocks);
        promote<N>(acc[u], p, scale[m][0] * ws, scale[m][1] * ws);
    };

#ifdef EXP_PROF
#define TICK(i) { unsigned now_ = clock(); prof[i] += now_ - last_; last_ = now_; }
    unsigned last_ = clock();
#else
#define TICK(i)
#endif
    if constexpr (P::kPartials == 1) {
        for (int k = 0; k < num_k_blocks; ++k) {
            weight_scale.next();
            weight_scale.prefetch(k + 1);
            ptx::mbarrier_wait(ring.full(state.stage), state.parity);
            TICK(0)
            load_scales(state.stage);
            uint32_t x[kBlockK / 32][4];
#pragma unroll
            for (int u = 0; u < P::kUnits; ++u) {
                uint64_t a, b;
                descriptors(state.stage, u, a, b);
                if (P::kXInRegisters && u % P::kNBlocks == 0)
                    load_fragments(x, ring.x(state.stage) + (wg * P::kMBlocks + u / P::kNBlocks) * 8192, thread);
                if constexpr (P::kHandoff >= 0) ptx::named_barrier_sync(kTurnBarrier + wg, 256);
                constexpr int kFirst = kBlockK / 32 - (P::kHandoff > 0 ? P::kHandoff : 0);
                pin(part[0]);
                ptx::wgmma_fence();
#pragma unroll
                for (int i = 0; i < kBlockK / 32; ++i) {
                    if constexpr (P::kXInRegisters) {
                        ptx::Wgmma<N>::rs(part[0], x[i], b + 2 * i, i != 0);
                    } else {
                        ptx::Wgmma<N>::ss(part[0], a + 2 * i, b + 2 * i, i != 0);
                    }
                    if (i + 1 == kFirst) ptx::wgmma_commit();
                }
                if constexpr (P::kHandoff > 0) {
                    ptx::wgmma_commit();
                    ptx::wgmma_wait<1>();
                    ptx::named_barrier_arrive(kTurnBarrier + 1 - wg, 256);
                }
                ptx::wgmma_wait<0>();
                if constexpr (P::kHandoff == 0) ptx::named_barrier_arrive(kTurnBarrier + 1 - wg, 256);
                TICK(1)
                if (u == P::kUnits - 1 && thread % 32 == 0) ptx::mbarrier_arrive(ring.empty(state.stage));
                promote_unit(u, part[0]);
#ifdef EXP_PROF
                pin(acc[u]);
                TICK(2)
#endif
            }
            state.advance();
        }
    } else {
        // Unit u + 1 is issued before unit u is promoted; drained at the end of a K step.
        for (int k = 0; k < num_k_blocks; ++k) {
            weight_scale.next();
            weight_scale.prefetch(k + 1);
            ptx::mbarrier_wait(ring.full(state.stage), state.parity);
            load_scales(state.stage);
            uint64_t a, b;
            descriptors(state.stage, 0, a, b);
            issue_unit<N>(part[0], a, b);
#pragma unroll
            for (int u = 0; u < P::kUnits; ++u) {
                if (u + 1 < P::kUnits) {
                    descriptors(state.stage, u + 1, a, b);
                    issue_unit<N>(part[(u + 1) % 2], a, b);
                    ptx::wgmma_wait<1>();
                } else {
                    ptx::wgmma_wait<0>();
                    if (thread % 32 == 0) ptx::mbarrier_arrive(ring.empty(state.stage));
                }
                promote_unit(u, part[u % 2]);
            }
            state.advance();
        }
    }
}

// Packed FP4 weights `sm90_ss`: blocks of 128 rows x 128 of K: codes [4][128][16 bytes] (group of 32 of K, row), then
// relative exponents [128] uint16, 4 bits per group. Block (row block, k) lies at (row block * num_k_blocks + k).
constexpr int kSsBlockCodeBytes = 128 * 64, kSsBlockBytes = kSsBlockCodeBytes + 128 * 2;

// Decoding thread: holds the codes of row `thread` of kRows 128-row blocks.
// NOTES: the proxy fence after the stores waits for every load in flight (it compiles to a full memory barrier), so the
// codes of the next step are asked for after it; two warpgroups take turns to hide their latency.
template <int kRows>
struct SsDecoder {
    uint4 codes[kRows][4];
    uint32_t exponents[kRows];

    __device__ __forceinline__ void load(int r, const uint8_t* block, int thread) {
#pragma unroll
        for (int q = 0; q < 4; ++q) codes[r][q] = ptx::load_global_v4_no_allocate(block + q * 2048 + thread * 16);
        exponents[r] = ptx::load_global_u16_no_allocate(block + kSsBlockCodeBytes + thread * 2);
    }
    // Decodes row r of the held codes to row `thread` of the r-th 128-row block of `w`.
    __device__ __forceinline__ void store(int r, uint32_t w, int thread) {
        const uint32_t row = w + r * 128 * kSwizzleRowBytes + thread * kSwizzleRowBytes;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const Fp4Table table((exponents[r] >> (4 * q)) & 15);
            const uint32_t word[4] = {codes[r][q].x, codes[r][q].y, codes[r][q].z, codes[r][q].w};
            uint32_t out[8];
#pragma unroll
            for (int i = 0; i < 4; ++i) decode_fp4(word[i], table, out[2 * i], out[2 * i + 1]);
            ptx::store_shared_v4(row + (((2 * q) ^ (thread & 7)) << 4), out[0], out[1], out[2], out[3]);
            ptx::store_shared_v4(row + (((2 * q + 1) ^ (thread & 7)) << 4), out[4], out[5], out[6], out[7]);
        }
    }
};

}  // namespace megamoe::mma
