// Experiment: SS grouped GEMM, uniform groups, static persistent schedule; -D options choose the variant.
#include "megamoe/epilogue/store_rows.cuh"
#include "megamoe/mma/ss_mainloop.cuh"
using namespace megamoe;
using namespace megamoe::mma;
#ifndef MB
#define MB 1
#define NB 2
#define UN 128
#endif
#ifndef PARTS
#define PARTS 1
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef FP4
#define FP4 1
#endif
#ifndef TR
#define TR 0
#endif
#ifndef CHUNK
#define CHUNK 64
#endif
#ifndef H
#define H -1
#endif
#ifndef STAGGER
#define STAGGER 0
#endif
#ifndef BUFS
#define BUFS 2
#endif
#ifndef HALF
#define HALF 0
#endif
#ifndef STAGED
#define STAGED 0
#endif
#ifndef PF
#define PF 0
#endif
#ifndef TOKEN
#define TOKEN 0
#endif
#ifndef RC
#define RC 208
#define RD 48
#endif
#ifndef PERM5D
#define PERM5D 1
#endif
using P = SsPolicy<FP4 ? WeightFormat::kFp4 : WeightFormat::kFp8,
                   TOKEN ? ScaleGranularity::kToken : ScaleGranularity::kBlock128, MB, NB, UN, PARTS, STAGES, TR, HALF ? 2 : 1, H>;
#ifndef DEC
#define DEC 2
#endif
constexpr int kThreads = FP4 && DEC == 2 ? 512 : 384;

struct Args {
    ptx::TensorMap x, sx, w;
    const uint8_t* packed;
    const float* w_scale;    // FP4: [G, N]; FP8: [G, N/128, KB]
    const float* token_scale;
    uint16_t* d;
    unsigned long long* clocks;
    int groups, rows, n, kb, m_tiles, n_tiles, num_tiles, pad;
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) gemm(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) uint8_t smem_raw[];
    const uint32_t base = ptx::smem_address(smem_raw);
    const uint32_t bars = base + STAGES * (P::kStageBytes + P::kScaleBytes) + STAGED * BUFS * 8 * 16 * CHUNK * 2;
    SsRing<P> ring{base, bars, bars + 8 * STAGES};
    const uint32_t feature_scales = bars + 16 * STAGES;  // [2][kTileN], by tile parity
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
    const int per_group = args.m_tiles * args.n_tiles;
    struct Tile { int group, m, n; };
    auto tile_at = [&](int i) {
        Tile t; t.group = i / per_group; int r = i - t.group * per_group; t.n = r / args.m_tiles; t.m = r - t.n * args.m_tiles; return t;
    };
    PipelineState<STAGES> state;
    if (wg >= 2) {
        ptx::setmaxnreg_dec<RD>();
        auto load_x = [&](const Tile& t, int k) {
            const uint32_t bar = ring.full(state.stage);
            constexpr uint32_t bytes = P::kXBytes + (TOKEN ? 0 : P::kScaleBytes) + (FP4 ? 0 : P::kWBytes);
            ptx::mbarrier_arrive_expect_tx(bar, bytes);
            ptx::tensor_load_2d(ring.x(state.stage), &args.x, bar, k * 128, t.group * args.rows + t.m * P::kTileM);
            if (!TOKEN) ptx::tensor_load_2d(ring.scales(state.stage), &args.sx, bar, t.group * args.rows + t.m * P::kTileM, k);
            if (!FP4) {
                if (PERM5D) ptx::tensor_load_5d(ring.w(state.stage), &args.w, bar, k * 128, (t.group * args.n + t.n * P::kTileN) / 32);
                else ptx::tensor_load_2d(ring.w(state.stage), &args.w, bar, k * 128, t.group * args.n + t.n * P::kTileN);
            }
        };
        if constexpr (FP4) {
            constexpr int kRows = P::kTileN / 128 / (HALF ? 2 : 1), kStride = HALF || DEC == 1 ? 1 : 2;
            SsDecoder<kRows> decoder;
            const int d = wg - 2, row0 = HALF ? d * kRows : 0;
            int i = blockIdx.x, k = HALF || DEC == 1 ? 0 : d;
            if (!HALF && d) state.advance();
            Tile t = tile_at(i);
            const int row_stride = args.kb * kSsBlockBytes;
            auto strip = [&] { return args.packed + (static_cast<int64_t>((t.group * args.n_tiles + t.n) * (P::kTileN / 128) + row0) * args.kb + k) * kSsBlockBytes; };
            const uint8_t* block = strip();
            auto load = [&] {
#pragma unroll
                for (int r = 0; r < kRows; ++r) decoder.load(r, block + r * row_stride, thread);
            };
            float fscale[kRows];
            uint32_t tile_parity = 0;
            auto load_scales = [&] {
#pragma unroll
                for (int r = 0; r < kRows; ++r) fscale[r] = args.w_scale[static_cast<int64_t>(t.group) * args.n + t.n * P::kTileN + (row0 + r) * 128 + thread];
            };
            if (i < args.num_tiles) { load(); if (k == 0) load_scales(); }
#ifdef EXP_PROF
            unsigned prof[6] = {}, last_ = clock();
#endif
            while (i < args.num_tiles) {
#ifdef EARLY
                if (false) {}
#endif
                ptx::mbarrier_wait(ring.empty(state.stage), state.parity ^ 1);
                if (thread == 0 && (!HALF || d == 0)) load_x(t, k);
                __syncwarp();
                TICK(0)
                if (PF && thread == 32 && k + PF % 100 < args.kb && (PF < 100 || t.m == k % args.m_tiles)) {
                    for (int r = 0; r < kRows; ++r)
                        ptx::bulk_prefetch_l2(args.packed + (static_cast<int64_t>((t.group * args.n_tiles + t.n) * (P::kTileN / 128) + row0 + r) * args.kb + k + PF % 100) * kSsBlockBytes, kSsBlockBytes);
                }
#ifdef EXP_PROF
                for (int r = 0; r < kRows; ++r) for (int q = 0; q < 4; ++q) asm volatile("" : "+r"(decoder.codes[r][q].x), "+r"(decoder.codes[r][q].y) :: "memory");
                { unsigned z = 0; for (int r = 0; r < kRows; ++r) for (int q = 0; q < 4; ++q) z |= decoder.codes[r][q].x ^ decoder.exponents[r]; if (z == 0x12345) last_++; }
                TICK(1)
#endif
#ifndef NODEC
#pragma unroll
                for (int r = 0; r < kRows; ++r) decoder.store(r, ring.w(state.stage) + row0 * 128 * kSwizzleRowBytes, thread);
#endif
                if (k == 0) {
#pragma unroll
                    for (int r = 0; r < kRows; ++r) ptx::store_shared_f32(feature_scales + (tile_parity * P::kTileN + (row0 + r) * 128 + thread) * 4, fscale[r]);
                }
                TICK(2)
                ptx::fence_proxy_async_shared();
                __syncwarp();
                TICK(3)
                if (thread % 32 == 0) ptx::mbarrier_arrive(ring.full(state.stage));
                for (int a = 0; a < kStride; ++a) state.advance();
                k += kStride;
                block += kStride * kSsBlockBytes;
                if (k >= args.kb) {
                    k -= args.kb;
                    i += gridDim.x;
                    if (i < args.num_tiles) t = tile_at(i);
                    block = strip();
                    tile_parity ^= 1;
                }
                if (i < args.num_tiles) { load(); if (k == 0) load_scales(); }
                TICK(4)
            }
#ifdef EXP_PROF
            if (thread == 64) for (int q = 0; q < 6; ++q) args.clocks[264 + (blockIdx.x * 4 + wg) * 6 + q] = prof[q];
#endif
        } else if (thread == 0) {
            for (int i = blockIdx.x; i < args.num_tiles; i += gridDim.x) {
                const Tile t = tile_at(i);
                for (int k = 0; k < args.kb; ++k, state.advance()) {
                    ptx::mbarrier_wait(ring.empty(state.stage), state.parity ^ 1);
                    load_x(t, k);
                }
            }
        }
    } else {
        ptx::setmaxnreg_inc<RC>();
        open_turns<P>(wg);
        auto scale_base = [&](int i) {
            const Tile t = tile_at(i);
            return args.w_scale + static_cast<int64_t>((t.group * args.n + t.n * P::kTileN) / 128) * args.kb;
        };
#ifdef EXP_PROF
        unsigned prof[6] = {};
#define PROFARG , prof
#else
#define PROFARG
#endif
        BlockWeightScale<NB> block_scale(args.kb, args.kb);
        if (!FP4 && blockIdx.x < args.num_tiles) block_scale.start(scale_base(blockIdx.x));
        uint32_t tile_parity = 0;
        for (int i = blockIdx.x; i < args.num_tiles; i += gridDim.x, tile_parity ^= 1) {
            const Tile t = tile_at(i);
            if (STAGGER && wg == 1) { const unsigned c = clock(); while (clock() - c < STAGGER) {} }
            float acc[P::kUnits][UN / 2];
            if constexpr (FP4) {
                NoWeightScale ws;
                ss_multiply<P>(acc, state, ring, args.kb, wg, thread, ws PROFARG);
            } else {
                static_assert(FP4 || UN == 128);
                ss_multiply<P>(acc, state, ring, args.kb, wg, thread, block_scale PROFARG);
                if (i + gridDim.x < args.num_tiles) block_scale.start(scale_base(i + gridDim.x));
            }
#ifdef EXP_PROF
            unsigned e0 = clock();
#endif
            const int lane = thread % 32;
#pragma unroll
            for (int u = 0; u < P::kUnits; ++u) {
                const int m = u / NB, n = u % NB;
                const int row = t.m * P::kTileM + (wg * MB + m) * 64 + (thread / 32) * 16 + lane / 4;
                const int col = t.n * P::kTileN + n * UN;
                const int64_t grow = static_cast<int64_t>(t.group) * args.rows + row;
                uint16_t* out = args.d + grow * args.n + col + 8 * (lane % 4);
                float s0 = 1.f, s1 = 1.f;
                if (TOKEN) { s0 = args.token_scale[grow]; s1 = args.token_scale[grow + 8]; }
                const uint32_t fs = feature_scales + (tile_parity * P::kTileN + n * UN + 8 * (lane % 4)) * 4;
                auto scale = [&](int f, float (&w)[8]) {
                    if (FP4) {
                        const uint4 v0 = ptx::load_shared_v4(fs + f * 4), v1 = ptx::load_shared_v4(fs + f * 4 + 16);
                        w[0] = __uint_as_float(v0.x); w[1] = __uint_as_float(v0.y); w[2] = __uint_as_float(v0.z); w[3] = __uint_as_float(v0.w);
                        w[4] = __uint_as_float(v1.x); w[5] = __uint_as_float(v1.y); w[6] = __uint_as_float(v1.z); w[7] = __uint_as_float(v1.w);
                    } else {
                        for (int q = 0; q < 8; ++q) w[q] = 1.f;
                    }
                };
                if constexpr (STAGED) {
                    const int r16 = t.m * P::kTileM + (wg * MB + m) * 64 + (thread / 32) * 16 + lane % 16;
                    uint16_t* o = args.d + (static_cast<int64_t>(t.group) * args.rows + r16) * args.n + col;
                    epilogue::store_rows_staged<UN, CHUNK, BUFS>(acc[u], base + STAGES * (P::kStageBytes + P::kScaleBytes) + (threadIdx.x / 32) * BUFS * 16 * CHUNK * 2, r16 < args.rows ? o : nullptr, s0, s1, args.n - col, scale, lane);
                } else
                epilogue::store_rows<UN>(acc[u], row < args.rows ? out : nullptr, row + 8 < args.rows ? out + 8 * static_cast<int64_t>(args.n) : nullptr,
                                         s0, s1, args.n - col, scale);
            }
#ifdef EXP_PROF
            prof[3] += clock() - e0;
#endif
        }
#ifdef EXP_PROF
            if (thread == 64) for (int q = 0; q < 6; ++q) args.clocks[264 + (blockIdx.x * 4 + wg) * 6 + q] = prof[q];
#endif
    }
    if (STAGED) ptx::bulk_wait<0>();
    if (args.clocks && threadIdx.x == 0) {
        args.clocks[2 * blockIdx.x] = ptx::cycle_counter() - c0;
        args.clocks[2 * blockIdx.x + 1] = ptx::global_timer() - t0;
    }
}
