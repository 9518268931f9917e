// Experiment: RS masked grouped GEMM for few tokens, static persistent schedule.
#include "megamoe/mma/rs_mainloop.cuh"
using namespace megamoe;
using namespace megamoe::mma;
#ifndef WG
#define WG 4
#endif
#ifndef TOK
#define TOK 24
#endif
#ifndef SPS
#define SPS 2
#endif
#ifndef STAGES
#define STAGES 5
#endif
#ifndef TOKEN
#define TOKEN 0
#endif
#ifndef RM
#define RM 112
#define RP 32
#endif
#ifndef MINB
#define MINB 1
#endif
using P = RsPolicy<TOKEN ? ScaleGranularity::kToken : ScaleGranularity::kBlock128, WG, TOK, SPS, STAGES>;

struct Args {
    ptx::TensorMap x, sx, w;
    const uint8_t* packed;
    const float* w_scale;  // [G, N]
    const float* token_scale;
    uint16_t* d;
    unsigned long long* clocks;
    int groups, rows, n, kb, m_tiles, n_tiles, num_tiles, pad;
};

extern "C" __global__ void __launch_bounds__(WG * 128 + 128, MINB) gemm(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) uint8_t smem_raw[];
    const uint32_t base = ptx::smem_address(smem_raw), bars = base + P::kSmemBytes;
    RsRing<P> ring{base, bars, bars + 8 * STAGES};
    const int wg = threadIdx.x / 128, thread = threadIdx.x % 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            ptx::mbarrier_init(ring.full(i), ring.kFullArrivals);
            ptx::mbarrier_init(ring.empty(i), ring.kEmptyArrivals);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const unsigned long long c0 = ptx::cycle_counter(), t0 = ptx::global_timer();
    PipelineState<STAGES> state;
    if (wg == WG) {
        if (RM) ptx::setmaxnreg_dec<RP ? RP : 24>();
        if (thread == 0) {
            for (int i = blockIdx.x; i < args.num_tiles; i += gridDim.x) {
                const int group = i / args.n_tiles;
                const uint8_t* strip = args.packed + static_cast<int64_t>(i) * WG * args.kb * kRsBlockBytes;
                for (int k = 0; k < args.kb; k += SPS, state.advance()) {
                    const int steps = args.kb - k < SPS ? args.kb - k : SPS;
                    ptx::mbarrier_wait(ring.empty(state.stage), state.parity ^ 1);
                    const uint32_t bar = ring.full(state.stage);
                    ptx::mbarrier_arrive_expect_tx(bar, steps * (P::kWBytes + P::kXBytes + (TOKEN ? 0 : TOK * 4)));
#pragma unroll
                    for (int w = 0; w < WG; ++w)
                        ptx::bulk_load(ring.w(state.stage, w, 0), strip + (static_cast<int64_t>(w) * args.kb + k) * kRsBlockBytes, steps * kRsBlockBytes, bar);
#pragma unroll
                    for (int q = 0; q < SPS; ++q)
                        if (q < steps) {
                            ptx::tensor_load_2d(ring.x(state.stage, q), &args.x, bar, (k + q) * 128, group * args.rows);
                            if (!TOKEN) ptx::tensor_load_2d(ring.scales(state.stage, q), &args.sx, bar, group * args.rows, k + q);
                        }
                }
            }
        }
    } else {
        if (RM) ptx::setmaxnreg_inc<RM ? RM : 24>();
        for (int i = blockIdx.x; i < args.num_tiles; i += gridDim.x) {
            const int group = i / args.n_tiles, nt = i - group * args.n_tiles;
            float acc[TOK / 2];
            rs_multiply<P>(acc, state, ring, args.kb, wg, thread);
            const int lane = thread % 32, c = lane % 4;
            const int feature = nt * WG * 64 + wg * 64 + (thread / 32) * 16 + (lane / 4) * 2;
            const float2 ws = *reinterpret_cast<const float2*>(args.w_scale + static_cast<int64_t>(group) * args.n + feature);
#pragma unroll
            for (int j = 0; j < TOK / 8; ++j)
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    const int row = 8 * j + 2 * c + b;
                    if (row < args.rows) {
                        const int64_t grow = static_cast<int64_t>(group) * args.rows + row;
                        const float ts = TOKEN ? args.token_scale[grow] : 1.f;
                        ptx::store_global_u32(args.d + grow * args.n + feature, ptx::pack_bf16x2(acc[4 * j + b] * ts * ws.x, acc[4 * j + 2 + b] * ts * ws.y));
                    }
                }
        }
    }
    if (args.clocks && threadIdx.x == 0) {
        args.clocks[2 * blockIdx.x] = ptx::cycle_counter() - c0;
        args.clocks[2 * blockIdx.x + 1] = ptx::global_timer() - t0;
    }
}
