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
#define CHUNK 128
#endif
#ifndef STAGED
#define STAGED 1
#endif
#ifndef PF
#define PF 0
#endif
#ifndef TOKEN
#define TOKEN 0
#endif
#ifndef RC
#define RC 208
#define RD 88
#endif
#ifndef PERM5D
#define PERM5D 1
#endif
using P = SsPolicy<FP4 ? WeightFormat::kFp4 : WeightFormat::kFp8,
                   TOKEN ? ScaleGranularity::kToken : ScaleGranularity::kBlock128, MB, NB, UN, PARTS, STAGES, TR>;

struct Args {
    ptx::TensorMap x, sx, w;
    const uint8_t* packed;
    const float* w_scale;    // FP4: [G, N]; FP8: [G, N/128, KB]
    const float* token_scale;
    uint16_t* d;
    unsigned long long* clocks;
    int groups, rows, n, kb, m_tiles, n_tiles, num_tiles, pad;
};

extern "C" __global__ void __launch_bounds__(384, 1) gemm(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) uint8_t smem_raw[];
    const uint32_t base = ptx::smem_address(smem_raw);
    const uint32_t bars = base + STAGES * (P::kStageBytes + P::kScaleBytes) + STAGED * 8 * 16 * CHUNK * 2;
    SsRing<P> ring{base, bars, bars + 8 * STAGES};
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
    if (wg == 2) {
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
            SsDecoder<P> decoder;
            constexpr int kRows = P::kTileN / 128;
            auto block = [&](const Tile& t, int r, int k) {
                return args.packed + static_cast<int64_t>((t.group * args.n_tiles + t.n) * kRows + r) * args.kb * kSsBlockBytes + k * kSsBlockBytes;
            };
            int i = blockIdx.x;
            if (i < args.num_tiles) {
                Tile t = tile_at(i);
                for (int r = 0; r < kRows; ++r) decoder.load(r, block(t, r, 0), thread);
                while (i < args.num_tiles) {
                    const int ni = i + gridDim.x;
                    const Tile nt = tile_at(ni < args.num_tiles ? ni : i);
                    const uint8_t* p = block(t, 0, 1);
                    for (int k = 0; k < args.kb; ++k) {
                        if (k + 1 == args.kb) p = block(nt, 0, 0);
                        ptx::mbarrier_wait(ring.empty(state.stage), state.parity ^ 1);
                        if (thread == 0) load_x(t, k);
                        if (PF && thread == 32 && (PF < 100 || t.m == k % args.m_tiles)) {
                            constexpr int D = PF % 100;
                            const bool here = k + D < args.kb;
                            if (here || ni < args.num_tiles) {
#pragma unroll
                                for (int r = 0; r < kRows; ++r) ptx::bulk_prefetch_l2(here ? block(t, r, k + D) : block(nt, r, k + D - args.kb), kSsBlockBytes);
                            }
                        }
                        __syncwarp();
#pragma unroll
                        for (int r = 0; r < kRows; ++r) {
#ifndef NODEC
                            decoder.store(r, ring.w(state.stage), thread);
#endif
                            decoder.load(r, p + static_cast<int64_t>(r) * args.kb * kSsBlockBytes, thread);
                        }
                        p += kSsBlockBytes;
                        ptx::fence_proxy_async_shared();
                        __syncwarp();
                        if (thread % 32 == 0) ptx::mbarrier_arrive(ring.full(state.stage));
                        state.advance();
                    }
                    t = nt; i = ni;
                }
            }
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
#ifdef EXP_ORDERED
        if (wg == 1) ptx::named_barrier_arrive(1, 256);
#endif
        for (int i = blockIdx.x; i < args.num_tiles; i += gridDim.x) {
            const Tile t = tile_at(i);
            float acc[P::kUnits][UN / 2];
            if constexpr (FP4) {
                NoWeightScale ws;
                ss_multiply<P>(acc, state, ring, args.kb, wg, thread, ws);
            } else {
                static_assert(FP4 || UN == 128);
                BlockWeightScale<NB> ws(args.w_scale + static_cast<int64_t>((t.group * args.n + t.n * P::kTileN) / 128) * args.kb, args.kb, args.kb);
                ss_multiply<P>(acc, state, ring, args.kb, wg, thread, ws);
            }
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
                const float* fs = args.w_scale + static_cast<int64_t>(t.group) * args.n + col + 8 * (lane % 4);
                auto scale = [&](int f, float (&w)[8]) {
                    if (FP4) {
                        const float4 v0 = __ldg(reinterpret_cast<const float4*>(fs + f)), v1 = __ldg(reinterpret_cast<const float4*>(fs + f + 4));
                        w[0] = v0.x; w[1] = v0.y; w[2] = v0.z; w[3] = v0.w; w[4] = v1.x; w[5] = v1.y; w[6] = v1.z; w[7] = v1.w;
                    } else {
                        for (int q = 0; q < 8; ++q) w[q] = 1.f;
                    }
                };
                if constexpr (STAGED) {
                    const int r16 = t.m * P::kTileM + (wg * MB + m) * 64 + (thread / 32) * 16 + lane % 16;
                    uint16_t* o = args.d + (static_cast<int64_t>(t.group) * args.rows + r16) * args.n + col;
                    epilogue::store_rows_staged<UN, CHUNK>(acc[u], base + STAGES * (P::kStageBytes + P::kScaleBytes) + (threadIdx.x / 32) * 16 * CHUNK * 2, r16 < args.rows ? o : nullptr, s0, s1, args.n - col, scale, lane);
                } else
                epilogue::store_rows<UN>(acc[u], row < args.rows ? out : nullptr, row + 8 < args.rows ? out + 8 * static_cast<int64_t>(args.n) : nullptr,
                                         s0, s1, args.n - col, scale);
            }
        }
    }
    if (STAGED) ptx::bulk_wait<0>();
    if (args.clocks && threadIdx.x == 0) {
        args.clocks[2 * blockIdx.x] = ptx::cycle_counter() - c0;
        args.clocks[2 * blockIdx.x + 1] = ptx::global_timer() - t0;
    }
}
