// Grouped GEMM on the SS mainloop: FP8xFP8 or FP8xFP4, contiguous or masked groups, persistent, one CTA per SM.
//
// | warpgroup | FP8 | FP4 |
// | 0, 1      | math, 232 registers | math, 200 registers |
// | 2, 3      | thread 0 loads X, W, scales; 40 (2 alone) | decode, thread 0 loads X, scales; 56 |
// Register sums: (2 * 232 + 40) * 128 <= 384 * 168; (2 * 200 + 2 * 56) * 128 = 512 * 128. Beyond that setmaxnreg hangs.
// Barriers: the ring's (mma/ss_mainloop.cuh).
#pragma once
#include "megamoe/epilogue/store_rows.cuh"
#include "megamoe/impls/sm90_grouped_gemm_args.cuh"
#include "megamoe/mma/ss_mainloop.cuh"

namespace megamoe::impls {

template <class P>
using SsTiles = scheduler::GroupedTiles<P::kTileM>;

// Starts the copies of K step k of X rows from `row` on and, for FP8, W rows from `w_row` on into the slot, with the
// arrival that announces them.
template <class P>
__device__ __forceinline__ void ss_load(const GroupedGemmArgs& args, const mma::SsRing<P>& ring, int stage,
                                        int row, int w_row, int k) {
    const uint32_t bar = ring.full(stage);
    const uint32_t scales = P::kScaled ? scale_bytes(args, row, P::kTileM) : 0;
    ptx::mbarrier_arrive_expect_tx(bar, P::kXBytes + scales + (P::kDecode ? 0 : P::kWBytes));
    ptx::tensor_load_2d(ring.x(stage), &args.x, bar, k * mma::kBlockK, row);
    if constexpr (P::kScaled) load_scales(args, ring.scales(stage), row, k, scales, bar);
    if constexpr (!P::kDecode)
        ptx::tensor_load_5d(ring.w(stage), &args.w, bar, k * mma::kBlockK, w_row / 32);
}

template <class P>
__device__ __forceinline__ void ss_loader(const GroupedGemmArgs& args, const mma::SsRing<P>& ring, SsTiles<P> tiles) {
    mma::PipelineState<P::kStages> state;
    for (; tiles.valid(); tiles.advance()) {
        const scheduler::Tile t = tiles.tile();
        for (int k = 0; k < args.num_k_blocks; ++k, state.advance()) {
            ptx::mbarrier_wait(ring.empty(state.stage()), state.parity() ^ 1);
            ss_load<P>(args, ring, state.stage(), t.first_row, t.group * args.n + t.n * P::kTileN, k);
        }
    }
}

// Decoding warpgroup `which` (0 or 1) of two. In turn: every second K step, counted across tiles, with the copy of X
// for its steps; else: row block `which` of every step, warpgroup 0 with the copy.
template <class P>
__device__ __forceinline__ void ss_decoder(const GroupedGemmArgs& args, const mma::SsRing<P>& ring, SsTiles<P> tiles,
                                           int which, int thread) {
    constexpr int kStride = P::kDecodeInTurn ? 2 : 1;
    const int num_row_blocks = (args.n + mma::kSsBlockRows - 1) / mma::kSsBlockRows;
    const int my_block = P::kDecodeInTurn ? 0 : which;
    mma::PipelineState<P::kStages> state;
    mma::SsDecoder decoder;
    float feature_scale = 0.f;
    int x_row = 0;
    const uint8_t* block = nullptr;
    int k = P::kDecodeInTurn ? which : 0;
    if (k == 1) state.advance();

    // Skips tiles until k lies in the current one, then asks for the codes of step k.
    auto prepare = [&](bool moved) {
        while (tiles.valid() && k >= args.num_k_blocks) {
            k -= args.num_k_blocks;
            tiles.advance();
            moved = true;
        }
        if (!tiles.valid()) return;
        if (moved) {
            const scheduler::Tile t = tiles.tile();
            x_row = t.first_row;
            int row_block = t.n * P::kNBlocks + my_block;
            if (row_block >= num_row_blocks) row_block = num_row_blocks - 1;  // past the end: never stored
            block = args.packed + (static_cast<int64_t>(t.group * num_row_blocks + row_block) * args.num_k_blocks + k) *
                                      mma::kSsBlockBytes;
            const int f = t.n * P::kTileN + my_block * mma::kSsBlockRows + thread;
            if (k == 0 && f < args.n) feature_scale = __ldg(args.w_scales + static_cast<int64_t>(t.group) * args.n + f);
        }
        decoder.load(block, thread);
    };
    prepare(true);
    while (tiles.valid()) {
        ptx::mbarrier_wait(ring.empty(state.stage()), state.parity() ^ 1);
        if (thread == 0 && my_block == 0) ss_load<P>(args, ring, state.stage(), x_row, 0, k);
        __syncwarp();
        decoder.store(ring.w(state.stage()) + my_block * (mma::kSsBlockRows * mma::kSwizzleRowBytes), thread);
        if (k == 0)
            ptx::store_shared_f32(ring.feature_scales(tiles.number()) + (my_block * mma::kSsBlockRows + thread) * 4, feature_scale);
        ptx::fence_proxy_async_shared();  // pairs with the wgmma of the math warps behind full[stage]
        __syncwarp();
        if (ptx::elect_one()) ptx::mbarrier_arrive(ring.full(state.stage()));
#pragma unroll
        for (int i = 0; i < kStride; ++i) state.advance();
        k += kStride;
        block += kStride * mma::kSsBlockBytes;
        prepare(false);
    }
}

template <class P>
__device__ __forceinline__ void ss_math(const GroupedGemmArgs& args, const mma::SsRing<P>& ring, SsTiles<P> tiles, int wg,
                                        int thread) {
    const int lane = thread % 32, num_row_blocks = (args.n + 127) / 128;
    const uint32_t aside = ring.base + P::kSmemBytes + (wg * 4 + thread / 32) * 4;
    mma::PipelineState<P::kStages> state;
    mma::NoWeightScale no_scale;
    mma::BlockWeightScale<P::kNBlocks> block_scale(args.num_k_blocks);
    auto start_scale = [&] {
        if (P::kDecode || !tiles.valid()) return;
        const scheduler::Tile next = tiles.tile();
        const int first = next.n * P::kNBlocks;
        block_scale.start(args.w_scales + static_cast<int64_t>(next.group * num_row_blocks + first) * args.num_k_blocks,
                          first + 1 < num_row_blocks ? args.num_k_blocks : 0);
    };
    start_scale();
    while (tiles.valid()) {
        const int shift = P::kScaled ? tiles.first_row_of_group() & 3 : 0;  // row tiles are multiples of 4
        // what is put aside would be spilled, and how much of it depends on the compiler's version
        constexpr bool kAside = P::kDecode && P::kScaled, kWord = P::kNBlocks == 1;
        if constexpr (kAside && kWord) tiles.put_aside(aside);
        if constexpr (kAside && !kWord) tiles.put_aside();
        float acc[P::kUnits][P::kUnitN / 2];
        if constexpr (P::kDecode) {
            mma::ss_multiply<P>(acc, state, ring, args.num_k_blocks, wg, thread, shift, no_scale);
        } else {
            mma::ss_multiply<P>(acc, state, ring, args.num_k_blocks, wg, thread, shift, block_scale);
        }
        if constexpr (kAside && kWord) tiles.take_up(aside);
        if constexpr (kAside && !kWord) tiles.take_up();
        const scheduler::Tile t = tiles.tile();
        const uint32_t feature_scales = P::kDecode ? ring.feature_scales(tiles.number()) : 0;
        tiles.advance();
        start_scale();
#pragma unroll
        for (int u = 0; u < P::kUnits; ++u) {
            const int m = u / P::kNBlocks, n = u % P::kNBlocks;
            const int row = (wg * P::kMBlocks + m) * 64 + (thread / 32) * 16 + lane / 4;
            const int column = t.n * P::kTileN + n * P::kUnitN, mine = 8 * (lane % 4);
            uint16_t* out = args.d + static_cast<int64_t>(t.first_row + row) * args.d_stride + column + mine;
            const bool first = row < t.rows, second = row + 8 < t.rows;
            float s0 = 1.f, s1 = 1.f;
            if constexpr (!P::kScaled) {
                if (first) s0 = __ldg(args.x_scales + t.first_row + row);
                if (second) s1 = __ldg(args.x_scales + t.first_row + row + 8);
            }
            const uint32_t scales = feature_scales + (n * P::kUnitN + mine) * 4;
            auto feature_scale = [&](int f, float (&w)[8]) {
                if constexpr (P::kDecode) {
                    const uint4 v0 = ptx::load_shared_v4(scales + f * 4), v1 = ptx::load_shared_v4(scales + f * 4 + 16);
                    const uint32_t v[8] = {v0.x, v0.y, v0.z, v0.w, v1.x, v1.y, v1.z, v1.w};
#pragma unroll
                    for (int i = 0; i < 8; ++i) w[i] = __uint_as_float(v[i]);
                } else {
#pragma unroll
                    for (int i = 0; i < 8; ++i) w[i] = 1.f;
                }
            };
            epilogue::store_rows<P::kUnitN>(acc[u], first ? out : nullptr, second ? out + 8 * args.d_stride : nullptr, s0, s1,
                                            args.n - column, feature_scale);
        }
    }
}

constexpr int kSsAsideBytes = 8 * 4;  // a word for each math warp

// Launch: P::kSmemBytes dynamic shared memory, behind it kSsAsideBytes and 4 * (3 * groups + 1) for a table; 128 * (2 + P::kOtherWarpgroups) threads, any number of CTAs.
template <class P>
__device__ __forceinline__ void sm90_grouped_gemm_ss(const GroupedGemmArgs& args, uint8_t* smem) {
    const mma::SsRing<P> ring{ptx::smem_address(smem)};
    int* table = reinterpret_cast<int*>(smem + P::kSmemBytes + kSsAsideBytes);
    const int wg = threadIdx.x / 128, thread = threadIdx.x % 128;
    const int num_n_tiles = (args.n + P::kTileN - 1) / P::kTileN;
    SsTiles<P>::build(table, args.rows, num_n_tiles);
    if (threadIdx.x == 32) ring.init();
    __syncthreads();
    if (wg >= 2) {
        ptx::setmaxnreg_dec<P::kOtherRegisters>();
        const SsTiles<P> tiles(table, args.rows);
        if constexpr (P::kDecode) {
            ss_decoder<P>(args, ring, tiles, wg - 2, thread);
        } else {
            if (thread == 0) ss_loader<P>(args, ring, tiles);
        }
    } else {
        ptx::setmaxnreg_inc<P::kMathRegisters>();
        ss_math<P>(args, ring, SsTiles<P>(table, args.rows), wg, thread);
    }
}

}  // namespace megamoe::impls
