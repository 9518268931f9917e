// The mega-kernel for many rows an expert: tokens on M, row blocks of 256, weights decoded into shared memory (SS).
//
// | warps   | role | registers |
// | 0 - 7   | math: products, epilogues; publish, combine, pulls | 208 |
// | 8 - 14  | decode: packed weights from global memory -> E4M3 in the ring; whoever decodes the first rows loads X | 48 |
// | 15      | scheduler: tickets, pulls, the wait for rows and what is known of them | 48 |
// Register sum: (2 * 208 + 2 * 48) * 128 = 512 * 128. Beyond that setmaxnreg hangs. A warp more is out of reach: the
// register file is four parts, and the part with five warps would leave each 96.
// Barriers: the ring's (mma/ss_mainloop.cuh), the tasks' and the pulls' (shared.cuh); named barrier 1: the math warps;
// 2, 3: a math warpgroup. The two go on alone from tile to tile, so that one multiplies while the other stores.
//
// An L1 task is 128 intermediate columns of a row block, as two tiles of 128 rows of W13 (gate and up of 64 columns, in
// turn); the first tile's h waits in `stash`, in FP32, until the second's is there: a scale belongs to 128 columns.
#pragma once
#include "megamoe/impls/mega_moe/combine.cuh"
#include "megamoe/impls/mega_moe/ss_roles.cuh"
#include "megamoe/mma/moe_block.cuh"
#include "megamoe/mma/ss_mainloop.cuh"

namespace megamoe::impls {

namespace prefill {

using namespace ss;

using L1 = mma::SsPolicy<mma::WeightFormat::kFp4, kBlockScales ? mma::ScaleGranularity::kBlock128 : mma::ScaleGranularity::kToken, 2, 1, 4>;
using L2 = mma::SsPolicy<mma::WeightFormat::kFp4, mma::ScaleGranularity::kBlock128, 2, 1, 4>;
// Row blocks of up to 128 rows: half the products, 64 rows a warpgroup.
template <class P>
struct Half {
    static constexpr int kMBlocks = 1, kNBlocks = 1, kUnits = 1, kUnitN = P::kUnitN, kStages = P::kStages;
    static constexpr bool kScaled = P::kScaled;
};
constexpr u32 kThreads = 512, kBlockRows = L2::kTileM, kBoxRows = 128;
constexpr int kMathRegisters = 208, kDecodeRegisters = 48;
constexpr u32 kStashFloats = kMathThreads * (64 + 4);
constexpr u32 kRingBytes = (L2::kSmemBytes + 127) / 128 * 128;
constexpr u32 kStagingBytes = kPullSlots * kPullBytes;
constexpr u32 kFactBytes = kTaskSlots * kBlockRows * 8;
constexpr u32 kStateBytes = (sizeof(SharedState) + 15) / 16 * 16;
// ring, staging, facts, state; then the schedule's sums
constexpr u32 kFixedBytes = kRingBytes + kStagingBytes + kFactBytes + kStateBytes;

using Ring = TaskRing<L2>;

// X of one K step, with the arrival that announces it.
__device__ __forceinline__ void load_x(const Context& c, const Ring& ring, const TaskRecord& task, u32 stage, u32 k) {
    const bool first = task.phase == Phase::l1;
    const u32 row = first ? task.ring1_row : task.ring2_row, boxes = ceil_div(task.num_rows, kBoxRows);
    const ptx::TensorMap* map = first ? &c.args.ring1 : &c.args.ring2;
    const uint32_t bar = ring.full(stage);
    ptx::mbarrier_arrive_expect_tx(bar, boxes * kBoxRows * mma::kBlockK + (first && !kBlockScales ? 0 : kBlockRows * 4));
    for (u32 b = 0; b < boxes; ++b)
        ptx::tensor_load_2d(ring.x(stage) + b * kBoxRows * mma::kBlockK, map, bar, k * mma::kBlockK, row + b * kBoxRows);
    if (first && !kBlockScales) return;
    const u64 scales_at = first ? c.s.at.ring1_scales : c.s.at.ring2_scales;
    const float* scales = reinterpret_cast<const float*>(c.base() + scales_at) + static_cast<u64>(row) * (first ? l1_steps(c.args) : l2_steps(c.args));
    ptx::bulk_load(ring.scales(stage), scales + k * kBlockRows, kBlockRows * 4, bar);
}

// The first block of weight rows of a task, of all experts.
__device__ __forceinline__ u32 first_row_block(const MegaMoeArgs& args, const TaskRecord& task) {
    return task.phase == Phase::l1 ? task.expert * (2 * l2_steps(args)) + 2 * task.index
                                   : task.expert * ceil_div(args.shape.hidden, mma::kMoeBlockRows) + task.index;
}

constexpr u32 kPrefetchSteps = 8;  // K steps that weights are asked into L2 ahead
constexpr u32 kDecodeWarps = 7, kParts = 4;  // a K step is decoded in parts of 32 rows, a warp each, warps in turn

// By one thread: the first weights of a task that is next, into L2.
__device__ __forceinline__ void prefetch_first(const Context& c, const TaskRecord& task) {
    const bool first = task.phase == Phase::l1;
    const u32 depth = first ? l1_steps(c.args) : l2_steps(c.args);
    const u8* w = (first ? c.args.w13 : c.args.w2) + static_cast<u64>(first_row_block(c.args, task)) * depth * mma::kMoeBlockBytes;
    ptx::prefetch_l2(w, min_of(kPrefetchSteps, depth) * mma::kMoeBlockBytes);
}

// Seven warps decode, across steps, tiles and tasks: part p of step n is job 4 n + p, and job j belongs to warp j % 7.
__device__ __forceinline__ void decode_role(const Context& c, const Ring& ring, u32 warp, u32 lane) {
    const MegaMoeArgs& args = c.args;
    TaskReader tasks;
    mma::MoeDecoder decoder;
    u32 job = warp;                // next one
    u32 steps = 0, tiles = 0;      // of all tasks so far
    for (;;) {
        const TaskRecord& task = tasks.next(c);
        const Phase phase = task.phase;
        if (phase == Phase::end) return;
        if (phase != Phase::l1 && phase != Phase::l2) {
            tasks.release(c);
            continue;
        }
        const bool first = phase == Phase::l1;
        const u32 depth = first ? l1_steps(args) : l2_steps(args);
        const u32 end = steps + (first ? 2 * depth : depth);
        tasks.put_aside(aside(c, 0));
        ptx::store_shared_volatile(aside(c, 1), first_row_block(args, task) * depth);
        auto block_of = [&](u32 step) {  // of packed weights
            const u8* w = first ? args.w13 : args.w2;
            return w + static_cast<u64>(ptx::load_shared_volatile(aside(c, 1)) + step) * mma::kMoeBlockBytes;
        };
        float feature_scale = 0.f;
        auto load = [&] {
            const u32 step = job / kParts - steps, row = job % kParts * 32 + lane;
            decoder.load(block_of(step), row);
            if (step == 0 || step == depth) {
                const u32 at = (first_row_block(args, reader_aside(c).task(c)) + (step == depth)) * mma::kMoeBlockRows + row;
                feature_scale = __ldg((first ? args.w13_scale : args.w2_scale) + at);
            }
        };
        if (job / kParts < end) load();
        while (job / kParts < end) {
            const u32 n = job / kParts, part = job % kParts, stage = n % L2::kStages, step = n - steps;
            const u32 row = part * 32 + lane;
            c.wait_barrier(ring.empty(stage), n / L2::kStages & 1 ^ 1);
            if (part == 0 && ptx::elect_one()) {
                if (step + kPrefetchSteps < end - steps)  // few row blocks an expert: weights come from far away
                    ptx::prefetch_l2(block_of(step + kPrefetchSteps), mma::kMoeBlockBytes);
                const TaskReader now = reader_aside(c);
                const u32 round = ptx::load_shared_volatile(ptx::smem_address(&c.s.done_rounds[now.slot()]));
                c.wait_barrier(ptx::smem_address(&c.s.rows_ready[now.slot()]), round & 1);
                if (!c.aborted()) load_x(c, ring, now.task(c), stage, step < depth ? step : step - depth);
            }
            __syncwarp();
            decoder.store(ring.w(stage), row);
            if (step == 0 || step == depth)
                ptx::store_shared_f32(ring.feature_scales(tiles + (step == depth)) + row * 4, feature_scale);
            ptx::fence_proxy_async_shared();  // pairs with the wgmma of the math warps behind full[stage]
            __syncwarp();
            if (ptx::elect_one()) ptx::mbarrier_arrive(ring.full(stage));
            job += kDecodeWarps;
            if (job / kParts < end) load();
        }
        steps = end;
        tiles += first ? 2 : 1;
        tasks.take_up(aside(c, 0));
        tasks.release(c);
    }
}

// h of one tile from its sums: value (u, half, jj, i) of a thread is column 64 tile + 16 (lane % 4) + 4 jj + i of row
// (kM wg + u) * 64 + 16 (warp % 4) + lane / 4 + 8 half. Calls use(u, half, jj, h[4]).
template <int kM, class Use>
__device__ __forceinline__ void each_h(const Context& c, const float (&acc)[kM][64], const Fact (&facts)[kM][2],
                                       uint32_t feature_scales, const float* bias, Use&& use) {
#pragma unroll
    for (int jj = 0; jj < 4; ++jj) {
        const uint4 v0 = ptx::load_shared_v4(feature_scales + jj * 128), v1 = ptx::load_shared_v4(feature_scales + jj * 128 + 16);
        const float w[8] = {__uint_as_float(v0.x), __uint_as_float(v0.y), __uint_as_float(v0.z), __uint_as_float(v0.w),
                            __uint_as_float(v1.x), __uint_as_float(v1.y), __uint_as_float(v1.z), __uint_as_float(v1.w)};
        float b[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        if (bias) {
            const float4 b0 = __ldg(reinterpret_cast<const float4*>(bias + jj * 32)), b1 = __ldg(reinterpret_cast<const float4*>(bias + jj * 32 + 4));
            b[0] = b0.x, b[1] = b0.y, b[2] = b0.z, b[3] = b0.w, b[4] = b1.x, b[5] = b1.y, b[6] = b1.z, b[7] = b1.w;
        }
#pragma unroll
        for (int u = 0; u < kM; ++u)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float weight = __uint_as_float(facts[u][half].other);
                const float row_scale = kBlockScales ? 1.f : facts[u][half].value;
                float h[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* a = &acc[u][4 * (4 * jj + i) + 2 * half];
                    const float gate = l1_value(a[0], row_scale, w[2 * i], b[2 * i]);
                    const float up = l1_value(a[1], row_scale, w[2 * i + 1], b[2 * i + 1]);
                    h[i] = __fmul_rn(activate(c.args, gate, up), weight);
                }
                use(u, half, jj, h);
            }
    }
}

// First row of the block that a thread holds sums of.
template <int kM>
__device__ __forceinline__ u32 first_row(u32 all) {
    return all / 128 * (64 * kM) + all % 128 / 32 * 16 + all % 32 / 4;
}

template <int kM, class P>
__device__ __forceinline__ void math_l1(const Context& c, const Ring& ring) {
    const MegaMoeArgs& args = c.args;
#pragma unroll 1
    for (u32 tile = 0; tile < 2; ++tile) {
        float acc[kM][64];
        const u32 number = multiply<P>(acc, c, ring, l1_steps(args));
        const CycleScope cycles(c, 6, ptx::thread_index() == 0);
        const TaskReader tasks = reader_aside(c);
        const TaskRecord& task = tasks.task(c);
        const Fact* block_facts = ring.facts + tasks.slot() * kBlockRows;
        const u32 all = ptx::thread_index(), lane = all % 32;  // anew, for the same reason
        const u32 row = first_row<kM>(all);
        float4* stash = reinterpret_cast<float4*>(args.stash) + static_cast<u64>(blockIdx.x) * (kStashFloats / 4) + all;
        Fact facts[kM][2];
#pragma unroll
        for (int u = 0; u < kM; ++u)
#pragma unroll
            for (int half = 0; half < 2; ++half) facts[u][half] = block_facts[row + u * 64 + half * 8];
        const uint32_t scales = ring.feature_scales(number) + lane % 4 * 32;
        const u32 first = (task.expert * 2 * l2_steps(args) + 2 * task.index + tile) * mma::kMoeBlockRows;
        const float* bias = args.b13 ? args.b13 + first + lane % 4 * 8 : nullptr;
        float amax[kM][2];
        if (tile == 0) {
#pragma unroll
            for (int u = 0; u < kM; ++u) amax[u][0] = amax[u][1] = 0.f;
            each_h<kM>(c, acc, facts, scales, bias, [&](int u, int half, int jj, const float (&h)[4]) {
                for (int i = 0; i < 4; ++i) amax[u][half] = fmaxf(amax[u][half], fabsf(h[i]));
                __stcg(stash + ((u * 2 + half) * 4 + jj) * kMathThreads, make_float4(h[0], h[1], h[2], h[3]));
            });
#pragma unroll
            for (int u = 0; u < kM; ++u)
                __stcg(reinterpret_cast<float2*>(stash + 16 * kMathThreads) + u, make_float2(amax[u][0], amax[u][1]));
            continue;
        }
#pragma unroll
        for (int u = 0; u < kM; ++u) {
            const float2 before = __ldcg(reinterpret_cast<const float2*>(stash + 16 * kMathThreads) + u);
            amax[u][0] = before.x, amax[u][1] = before.y;
        }
        // the registers of the partial sums are free: the stash of the first 64 rows comes while this tile is activated
        float4 then_h[2][4];
        auto load_stash = [&](int u) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int jj = 0; jj < 4; ++jj) then_h[half][jj] = __ldcg(stash + ((u * 2 + half) * 4 + jj) * kMathThreads);
        };
        load_stash(0);
        // h takes the place of the sums it came from
        each_h<kM>(c, acc, facts, scales, bias, [&](int u, int half, int jj, const float (&h)[4]) {
            for (int i = 0; i < 4; ++i) amax[u][half] = fmaxf(amax[u][half], fabsf(h[i]));
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[u][4 * (4 * jj + i) + 2 * half] = h[i];
        });
        const u64 columns = align_up(args.shape.intermediate, 128);
        u8* h_rows = reinterpret_cast<u8*>(c.base() + c.s.at.ring2) + (task.ring2_row + row) * columns + task.index * 128 + lane % 4 * 16;
        float* h_scales = reinterpret_cast<float*>(c.base() + c.s.at.ring2_scales) +
                          static_cast<u64>(task.ring2_row) * l2_steps(args) + task.index * kBlockRows + row;
#pragma unroll
        for (int u = 0; u < kM; ++u) {
            u32 then[2][4];
            float inverse[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float m = amax[u][half];
                m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
                m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
                const float row_scale = e4m3_scale(m);
                inverse[half] = __fdiv_rn(1.0f, row_scale);
                const u32 at = u * 64 + half * 8;
                if (lane % 4 == 0 && row + at < task.num_rows) h_scales[at] = row_scale;
#pragma unroll
                for (int jj = 0; jj < 4; ++jj) {
                    const float4 v = then_h[half][jj];
                    then[half][jj] = quantize4(v.x, v.y, v.z, v.w, inverse[half]);
                }
            }
            if (u + 1 < kM) load_stash(u + 1);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 at = u * 64 + half * 8;
                u32 now[4];
#pragma unroll
                for (int jj = 0; jj < 4; ++jj) {
                    const float* a = &acc[u][16 * jj + 2 * half];
                    now[jj] = quantize4(a[0], a[4], a[8], a[12], inverse[half]);
                }
                if (row + at < task.num_rows) {
                    ptx::store_global_v4(h_rows + at * columns, then[half][0], then[half][1], then[half][2], then[half][3]);
                    ptx::store_global_v4(h_rows + at * columns + 64, now[0], now[1], now[2], now[3]);
                }
            }
        }
    }
}

template <int kM, class P>
__device__ __forceinline__ void math_l2(const Context& c, const Ring& ring) {
    const MegaMoeArgs& args = c.args;
    float acc[kM][64];
    const u32 number = multiply<P>(acc, c, ring, l2_steps(args));
    const CycleScope cycles(c, 6, ptx::thread_index() == 0);
    const TaskReader tasks = reader_aside(c);
    const TaskRecord& task = tasks.task(c);
    const Fact* block_facts = ring.facts + tasks.slot() * kBlockRows;
    const u32 all = ptx::thread_index(), lane = all % 32;
    const u32 row = first_row<kM>(all), column = task.index * 128 + lane % 4 * 8;
    const bool lost = c.aborted();  // then the facts may be of nothing, and lead anywhere
    u64 to[kM][2];
    float weight[kM][2];
#pragma unroll
    for (int u = 0; u < kM; ++u)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 r = row + u * 64 + half * 8;
            const Fact fact = block_facts[r];
            weight[u][half] = fact.value;
            to[u][half] = 0;
            if (r < task.num_rows && !lost)
                to[u][half] = c.peer(fact.other >> kSlotRowBits) + c.s.at.slots +
                              (static_cast<u64>(fact.other & ((1u << kSlotRowBits) - 1)) * args.shape.hidden + column) * 2;
        }
    wait_for_link(c, kM * 16 * 256);  // 16 rows of 128 columns each
    const uint32_t scales = ring.feature_scales(number) + lane % 4 * 32;
    const float* bias = args.b2 ? args.b2 + (task.expert * ceil_div(args.shape.hidden, 128) * 128) + column : nullptr;
#pragma unroll
    for (int jj = 0; jj < 4; ++jj) {
        if (column + jj * 32 >= args.shape.hidden) break;
        const uint4 v0 = ptx::load_shared_v4(scales + jj * 128), v1 = ptx::load_shared_v4(scales + jj * 128 + 16);
        const float w[8] = {__uint_as_float(v0.x), __uint_as_float(v0.y), __uint_as_float(v0.z), __uint_as_float(v0.w),
                            __uint_as_float(v1.x), __uint_as_float(v1.y), __uint_as_float(v1.z), __uint_as_float(v1.w)};
        float b[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        if (bias) {
            const float4 b0 = __ldg(reinterpret_cast<const float4*>(bias + jj * 32)), b1 = __ldg(reinterpret_cast<const float4*>(bias + jj * 32 + 4));
            b[0] = b0.x, b[1] = b0.y, b[2] = b0.z, b[3] = b0.w, b[4] = b1.x, b[5] = b1.y, b[6] = b1.z, b[7] = b1.w;
        }
#pragma unroll
        for (int u = 0; u < kM; ++u)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (to[u][half] == 0) continue;
                // "before": the weight is in h already, and the bias has its own
                const float outer = args.weight_before ? 1.f : weight[u][half], inner = args.weight_before ? weight[u][half] : 1.f;
                u32 y[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* a = &acc[u][4 * (4 * jj + i) + 2 * half];
                    y[i] = ptx::pack_bf16x2(l2_value(a[0], w[2 * i], b[2 * i], inner, outer), l2_value(a[1], w[2 * i + 1], b[2 * i + 1], inner, outer));
                }
                ptx::store_global_v4(reinterpret_cast<void*>(to[u][half] + jj * 64), y[0], y[1], y[2], y[3]);
            }
    }
}

// What the shared roles do here besides, or in a way of this kernel.
struct Instance {
    static constexpr u32 kBlockRows = prefill::kBlockRows;
    static __device__ __forceinline__ void end_tiles(const Context&, const TaskRecord&) {}
    static __device__ __forceinline__ void prefetch(const Context& c, const TaskRecord& task) {
        if (task.phase == Phase::l1 || task.phase == Phase::l2) prefetch_first(c, task);
    }
    static __device__ __forceinline__ void l1(const Context& c, const Ring& ring, const TaskRecord& task) {
        if (task.num_rows > 128) math_l1<2, L1>(c, ring);
        else math_l1<1, Half<L1>>(c, ring);
    }
    static __device__ __forceinline__ void l2(const Context& c, const Ring& ring, const TaskRecord& task) {
        if (task.num_rows > 128) math_l2<2, L2>(c, ring);
        else math_l2<1, Half<L2>>(c, ring);
    }
    static __device__ __forceinline__ void expand(const Context&, const Ring&, const TaskRecord&, u32) {}
};

}  // namespace prefill

// Launch: kFixedBytes + 4 * (3 * local experts + 2) bytes of dynamic shared memory, 512 threads, any number of CTAs.
__device__ __forceinline__ void sm90_mega_moe_prefill(const MegaMoeArgs& args, uint8_t* smem) {
    using namespace prefill;
    Fact* facts = reinterpret_cast<Fact*>(smem + kRingBytes + kStagingBytes);
    SharedState& s = *reinterpret_cast<SharedState*>(smem + kRingBytes + kStagingBytes + kFactBytes);
    u32* sums = reinterpret_cast<u32*>(smem + kFixedBytes);
    const Context c{args, s};
    const Ring ring(ptx::smem_address(smem), facts, c);
    enter(c, kThreads / 32 - 1, kMathThreads / 32);
    if (threadIdx.x == 32) ring.init();
    __syncthreads();
    const u32 wg = threadIdx.x / 128, thread = threadIdx.x % 128;
    if (wg < 2) {
        ptx::setmaxnreg_inc<kMathRegisters>();
        math_role<Instance>(c, ring);
    } else {
        ptx::setmaxnreg_dec<kDecodeRegisters>();
        if (threadIdx.x / 32 == kThreads / 32 - 1) {
            schedule_role<Instance>(c, facts, sums, ptx::smem_address(smem) + kRingBytes, thread % 32);
        } else {
            decode_role(c, ring, threadIdx.x / 32 - kMathThreads / 32, thread % 32);
        }
    }
    leave(c, sums, kThreads);
}

}  // namespace megamoe::impls
