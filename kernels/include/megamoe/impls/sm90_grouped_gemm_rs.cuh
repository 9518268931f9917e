// Grouped GEMM on the RS mainloop: FP8xFP4, few rows a group (decode), contiguous or masked, one CTA per SM.
//
// | warpgroup | role |
// | 0 - 3     | math: 64 features each, 112 registers |
// | 4         | thread 0 loads X, packed W and scales, 32 registers |
// Register sum: (4 * 112 + 32) * 128 = 640 * 96. Barriers: the ring's (mma/rs_mainloop.cuh).
#pragma once
#include "megamoe/epilogue/store_rows.cuh"
#include "megamoe/impls/sm90_grouped_gemm_args.cuh"
#include "megamoe/mma/rs_mainloop.cuh"

namespace megamoe::impls {

template <class P>
using RsTiles = scheduler::GroupedTiles<P::kTokens>;

template <class P>
__device__ __forceinline__ void rs_loader(const GroupedGemmArgs& args, const mma::RsRing<P>& ring, RsTiles<P> tiles) {
    constexpr int S = P::kStepsPerStage;
    const int num_row_blocks = (args.n + mma::kRsBlockRows - 1) / mma::kRsBlockRows;
    mma::PipelineState<P::kStages> state;
    for (; tiles.valid(); tiles.advance()) {
        const scheduler::Tile t = tiles.tile();
        const int row = t.first_row;
        const uint32_t scales = P::kScaled ? scale_bytes(args, row, P::kTokens) : 0;
        const uint8_t* strip[P::kWarpgroups];
#pragma unroll
        for (int w = 0; w < P::kWarpgroups; ++w) {
            const int block = t.n * P::kWarpgroups + w;  // past the end: the last one again, never stored
            strip[w] = args.packed + static_cast<int64_t>(t.group * num_row_blocks + (block < num_row_blocks ? block : num_row_blocks - 1)) *
                                         args.num_k_blocks * mma::kRsBlockBytes;
        }
        for (int k = 0; k < args.num_k_blocks; k += S, state.advance()) {
            const int steps = args.num_k_blocks - k < S ? args.num_k_blocks - k : S;
            const uint32_t bar = ring.full(state.stage());
            ptx::mbarrier_wait(ring.empty(state.stage()), state.parity() ^ 1);
            ptx::mbarrier_arrive_expect_tx(bar, steps * (P::kWBytes + P::kXBytes + scales));
#pragma unroll
            for (int w = 0; w < P::kWarpgroups; ++w)
                ptx::bulk_load(ring.w(state.stage(), w, 0), strip[w] + k * mma::kRsBlockBytes, steps * mma::kRsBlockBytes, bar);
#pragma unroll
            for (int i = 0; i < S; ++i) {
                if (i < steps) {
                    ptx::tensor_load_2d(ring.x(state.stage(), i), &args.x, bar, (k + i) * mma::kBlockK, row);
                    if constexpr (P::kScaled) load_scales(args, ring.scales(state.stage(), i), row, k + i, scales, bar);
                }
            }
        }
    }
}

template <class P>
__device__ __forceinline__ void rs_math(const GroupedGemmArgs& args, const mma::RsRing<P>& ring, RsTiles<P> tiles, int wg,
                                        int thread) {
    mma::PipelineState<P::kStages> state;
    for (; tiles.valid(); tiles.advance()) {
        float acc[P::kTokens / 2];
        mma::rs_multiply<P, P::kTokens>(acc, state, ring, args.num_k_blocks, wg, thread, P::kScaled ? tiles.tile().first_row & 3 : 0);
        const scheduler::Tile t = tiles.tile();
        const int lane = thread % 32;
        const int feature = t.n * P::kTileFeatures + wg * 64 + (thread / 32) * 16 + (lane / 4) * 2;
        if (feature >= args.n) continue;
        const float* scale = args.w_scales + static_cast<int64_t>(t.group) * args.n + feature;
        uint16_t* out = args.d + static_cast<int64_t>(t.first_row) * args.d_stride + feature;
        epilogue::store_columns<P::kTokens>(
            acc, lane, __ldg(scale), __ldg(scale + 1),
            [&](int token) { return token < t.rows ? out + token * args.d_stride : nullptr; },
            [&](int token) { return P::kScaled ? 1.f : __ldg(args.x_scales + t.first_row + token); });
    }
}

// Launch: P::kSmemBytes dynamic shared memory and 4 * (3 * groups + 1) behind it for a table, 640 threads, any number of CTAs.
template <class P>
__device__ __forceinline__ void sm90_grouped_gemm_rs(const GroupedGemmArgs& args, uint8_t* smem) {
    const mma::RsRing<P> ring{ptx::smem_address(smem)};
    int* table = reinterpret_cast<int*>(smem + P::kSmemBytes);
    const int wg = threadIdx.x / 128, thread = threadIdx.x % 128;
    const int num_n_tiles = (args.n + P::kTileFeatures - 1) / P::kTileFeatures;
    RsTiles<P>::build(table, args.rows, num_n_tiles);
    if (threadIdx.x == 32) ring.init();
    __syncthreads();
    if (wg == P::kWarpgroups) {
        ptx::setmaxnreg_dec<P::kOtherRegisters>();
        if (thread == 0) rs_loader<P>(args, ring, RsTiles<P>(table, args.rows));
    } else {
        ptx::setmaxnreg_inc<P::kMathRegisters>();
        rs_math<P>(args, ring, RsTiles<P>(table, args.rows), wg, thread);
    }
}

}  // namespace megamoe::impls
