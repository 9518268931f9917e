// The mega-kernel for many rows an expert: tokens on M, row blocks of 256, weights decoded into shared memory (SS).
//
// | warps   | role | registers |
// | 0 - 7   | math: products, epilogues; publish and combine | 200 |
// | 8 - 15  | decode: packed weights from global memory -> E4M3 in the ring; 8 and 12 load X; 15 is the scheduler | 56 |
// Register sum: (2 * 200 + 2 * 56) * 128 = 512 * 128. Beyond that setmaxnreg hangs. A warp more is out of reach: the
// register file is four parts, and the part with five warps would leave each 96.
// Barriers: the ring's (mma/ss_mainloop.cuh), the tasks' and the pulls' (shared.cuh); named barrier 1: the math warps.
//
// An L1 task is 128 intermediate columns of a row block, as two tiles of 128 rows of W13 (gate and up of 64 columns, in
// turn); the first tile's h waits in `stash`, in FP32, until the second's is there: a scale belongs to 128 columns.
#pragma once
#include "megamoe/impls/mega_moe/call.cuh"
#include "megamoe/impls/mega_moe/combine.cuh"
#include "megamoe/impls/mega_moe/frontend.cuh"
#include "megamoe/mma/moe_block.cuh"
#include "megamoe/mma/ss_mainloop.cuh"

namespace megamoe::impls {

namespace prefill {

using L1 = mma::SsPolicy<mma::WeightFormat::kFp4, mma::ScaleGranularity::kToken, 2, 1, 4>;
using L2 = mma::SsPolicy<mma::WeightFormat::kFp4, mma::ScaleGranularity::kBlock128, 2, 1, 4>;
constexpr u32 kMathThreads = 256, kThreads = 512, kBlockRows = L2::kTileM, kBoxRows = 128;
constexpr int kMathRegisters = 200, kDecodeRegisters = 56;
constexpr u32 kStashFloats = kMathThreads * (64 + 4);
constexpr u32 kRingBytes = (L2::kSmemBytes + 127) / 128 * 128;
constexpr u32 kStagingBytes = kPullSlots * kPullBytes;
// then SharedState and the schedule's sums
constexpr u32 kFixedBytes = kRingBytes + kStagingBytes + sizeof(SharedState);

struct Ring : mma::SsRing<L2> {
    const Context& c;
    __device__ __forceinline__ Ring(uint32_t base, const Context& context) : mma::SsRing<L2>{base}, c(context) {}
    __device__ __forceinline__ void wait(uint32_t bar, uint32_t parity) const { c.wait_barrier(bar, parity); }
};

__device__ __forceinline__ u32 l1_steps(const MegaMoeArgs& args) { return ceil_div(args.shape.hidden, mma::kBlockK); }
__device__ __forceinline__ u32 l2_steps(const MegaMoeArgs& args) { return ceil_div(args.shape.intermediate, mma::kBlockK); }

// X of one K step, with the arrival that announces it.
__device__ __forceinline__ void load_x(const Context& c, const Ring& ring, const TaskRecord& task, u32 stage, u32 k) {
    const bool first = task.phase == Phase::l1;
    const u32 row = first ? task.ring1_row : task.ring2_row, boxes = ceil_div(task.num_rows, kBoxRows);
    const ptx::TensorMap* map = first ? &c.args.ring1 : &c.args.ring2;
    const uint32_t bar = ring.full(stage);
    ptx::mbarrier_arrive_expect_tx(bar, boxes * kBoxRows * mma::kBlockK + (first ? 0 : kBlockRows * 4));
    for (u32 b = 0; b < boxes; ++b)
        ptx::tensor_load_2d(ring.x(stage) + b * kBoxRows * mma::kBlockK, map, bar, k * mma::kBlockK, row + b * kBoxRows);
    if (first) return;
    const float* scales = reinterpret_cast<const float*>(c.base + c.s.at.ring2_scales) + static_cast<u64>(row) * l2_steps(c.args);
    ptx::bulk_load(ring.scales(stage), scales + k * kBlockRows, kBlockRows * 4, bar);
}

// The first block of weight rows of a task, of all experts.
__device__ __forceinline__ u32 first_row_block(const MegaMoeArgs& args, const TaskRecord& task) {
    return task.phase == Phase::l1 ? task.expert * (2 * l2_steps(args)) + 2 * task.index
                                   : task.expert * ceil_div(args.shape.hidden, mma::kMoeBlockRows) + task.index;
}

// Two warpgroups decode K steps in turn, across tiles and tasks. The first thread of each loads X for its steps; the
// last warp is the scheduler as well: it moves the pull in flight while it waits for a slot, and looks for the next task
// when the last one is decoded, which is a few K steps before the math warps need it.
__device__ __forceinline__ void decode_role(const Context& c, const Ring& ring, u32* sums, uint32_t staging, u32 which, u32 thread) {
    const MegaMoeArgs& args = c.args;
    const bool schedules = which == 1 && thread >= 96;
    const u32 lane = thread % 32;
    TaskReader tasks;
    mma::MoeDecoder decoder;
    u32 steps = 0, tiles = 0;  // of all tasks so far
    for (;;) {
        if (schedules)
            while (!__all_sync(0xffffffffu, tasks.ready(c))) turn_scheduler(c, sums, staging, lane);
        const TaskRecord& task = tasks.next(c);
        const Phase phase = task.phase;
        if (phase == Phase::end) return;
        if (phase != Phase::l1 && phase != Phase::l2) {
            tasks.release(c);
            continue;
        }
        const bool first = phase == Phase::l1;
        const u32 depth = first ? l1_steps(args) : l2_steps(args);
        const u32 end = steps + (first ? 2 * depth : depth), end_tiles = tiles + (first ? 2 : 1);
        u32 n = steps + ((which + steps) & 1), k = n - steps, tile = tiles;  // registers are short: the rest is looked up again
        const u8* block = (first ? args.w13 : args.w2) + (static_cast<u64>(first_row_block(args, task)) * depth + k) * mma::kMoeBlockBytes;
        if (k >= depth) k -= depth, ++tile;
        float feature_scale = 0.f;
        auto load = [&] {
            decoder.load(block, thread);
            if (k == 0) {
                const u32 row = (first_row_block(args, task) + tile - tiles) * mma::kMoeBlockRows + thread;
                feature_scale = __ldg((task.phase == Phase::l1 ? args.w13_scale : args.w2_scale) + row);
            }
        };
        if (n < end) load();
        bool has_rows = true;
        if (thread == 0) has_rows = wait_rows(c, task);
        while (n < end) {
            const u32 stage = n % L2::kStages;
            if (schedules) {
                if (lane == 0) {
                    step_pull(c, staging);
                    for (u32 spin = 1; !ptx::mbarrier_try_wait(ring.empty(stage), n / L2::kStages & 1 ^ 1); ++spin) {
                        step_pull(c, staging);
                        if (spin % 64 == 0 && c.aborted()) break;
                    }
                }
                __syncwarp();
            } else {
                c.wait_barrier(ring.empty(stage), n / L2::kStages & 1 ^ 1);
            }
            if (thread == 0 && has_rows) load_x(c, ring, task, stage, k);
            __syncwarp();
            decoder.store(ring.w(stage), thread);
            if (k == 0) ptx::store_shared_f32(ring.feature_scales(tile) + thread * 4, feature_scale);
            ptx::fence_proxy_async_shared();  // pairs with the wgmma of the math warps behind full[stage]
            __syncwarp();
            if (ptx::elect_one()) ptx::mbarrier_arrive(ring.full(stage));
            n += 2;
            k += 2;
            block += 2 * mma::kMoeBlockBytes;
            while (k >= depth) k -= depth, ++tile;
            if (n < end) load();
        }
        steps = end;
        tiles = end_tiles;
        tasks.release(c);
    }
}

// h of one tile from its sums: value (u, half, jj, i) of a thread is column 64 tile + 16 (lane % 4) + 4 jj + i of row
// (2 wg + u) * 64 + 16 (warp % 4) + lane / 4 + 8 half. Calls use(u, half, jj, h[4]).
template <class Use>
__device__ __forceinline__ void each_h(const Context& c, const float (&acc)[2][64], const float (&scale)[2][2],
                                       const float (&weight)[2][2], uint32_t feature_scales, const float* bias, Use&& use) {
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
        for (int u = 0; u < 2; ++u)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float h[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* a = &acc[u][4 * (4 * jj + i) + 2 * half];
                    const float gate = l1_value(a[0], scale[u][half], w[2 * i], b[2 * i]);
                    const float up = l1_value(a[1], scale[u][half], w[2 * i + 1], b[2 * i + 1]);
                    h[i] = __fmul_rn(activate(c.args, gate, up), weight[u][half]);
                }
                use(u, half, jj, h);
            }
    }
}

__device__ __forceinline__ float amax4(const float (&h)[4]) {
    return fmaxf(fmaxf(fabsf(h[0]), fabsf(h[1])), fmaxf(fabsf(h[2]), fabsf(h[3])));
}

__device__ __forceinline__ void math_l1(const Context& c, const Ring& ring, const TaskRecord& task,
                                        mma::PipelineState<L2::kStages>& state, u32& tiles, u32 wg, u32 thread) {
    const MegaMoeArgs& args = c.args;
    const u32 depth = l1_steps(args), lane = thread % 32;
    float4* stash = reinterpret_cast<float4*>(args.stash) + static_cast<u64>(blockIdx.x) * (kStashFloats / 4) + wg * 128 + thread;
    mma::NoWeightScale none;
#pragma unroll 1
    for (u32 tile = 0; tile < 2; ++tile) {
        float acc[2][64];
        mma::ss_multiply<L1>(acc, state, ring, depth, wg, thread, 0, none);
        const u32 row = wg * 128 + thread / 32 * 16 + lane / 4;
        float scale[2][2], weight[2][2];
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const RowFacts facts = row_facts(c, task.meta_row + row + u * 64 + half * 8);
                scale[u][half] = facts.scale;
                weight[u][half] = args.weight_before ? facts.weight : 1.f;
            }
        const uint32_t scales = ring.feature_scales(tiles) + lane % 4 * 32;
        const u32 first_row = (task.expert * 2 * l2_steps(args) + 2 * task.index + tile) * mma::kMoeBlockRows;
        const float* bias = args.b13 ? args.b13 + first_row + lane % 4 * 8 : nullptr;
        ++tiles;
        float amax[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
        if (tile == 0) {
            each_h(c, acc, scale, weight, scales, bias, [&](int u, int half, int jj, const float (&h)[4]) {
                amax[u][half] = fmaxf(amax[u][half], amax4(h));
                __stcg(stash + ((u * 2 + half) * 4 + jj) * kMathThreads, make_float4(h[0], h[1], h[2], h[3]));
            });
            __stcg(stash + 16 * kMathThreads, make_float4(amax[0][0], amax[0][1], amax[1][0], amax[1][1]));
            continue;
        }
        const float4 before = __ldcg(stash + 16 * kMathThreads);
        amax[0][0] = before.x, amax[0][1] = before.y, amax[1][0] = before.z, amax[1][1] = before.w;
        // h takes the place of the sums it came from
        each_h(c, acc, scale, weight, scales, bias, [&](int u, int half, int jj, const float (&h)[4]) {
            amax[u][half] = fmaxf(amax[u][half], amax4(h));
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[u][4 * (4 * jj + i) + 2 * half] = h[i];
        });
        const u64 columns = align_up(args.shape.intermediate, 128);
        u8* h_rows = reinterpret_cast<u8*>(c.base + c.s.at.ring2) + (task.ring2_row + row) * columns + task.index * 128 + lane % 4 * 16;
        float* h_scales = reinterpret_cast<float*>(c.base + c.s.at.ring2_scales) +
                          static_cast<u64>(task.ring2_row) * l2_steps(args) + task.index * kBlockRows + row;
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float m = amax[u][half];
                m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
                m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
                const float row_scale = e4m3_scale(m), inverse = __fdiv_rn(1.0f, row_scale);
                const u32 at = u * 64 + half * 8;
                u32 now[4], then[4];
#pragma unroll
                for (int jj = 0; jj < 4; ++jj) {
                    const float4 v = __ldcg(stash + ((u * 2 + half) * 4 + jj) * kMathThreads);
                    then[jj] = quantize4(v.x, v.y, v.z, v.w, inverse);
                    const float* a = &acc[u][16 * jj + 2 * half];
                    now[jj] = quantize4(a[0], a[4], a[8], a[12], inverse);
                }
                if (row + at < task.num_rows) {
                    ptx::store_global_v4(h_rows + at * columns, then[0], then[1], then[2], then[3]);
                    ptx::store_global_v4(h_rows + at * columns + 64, now[0], now[1], now[2], now[3]);
                    if (lane % 4 == 0) h_scales[at] = row_scale;
                }
            }
    }
}

__device__ __forceinline__ void math_l2(const Context& c, const Ring& ring, const TaskRecord& task,
                                        mma::PipelineState<L2::kStages>& state, u32& tiles, u32 wg, u32 thread) {
    const MegaMoeArgs& args = c.args;
    const u32 lane = thread % 32;
    mma::NoWeightScale none;
    float acc[2][64];
    mma::ss_multiply<L2>(acc, state, ring, l2_steps(args), wg, thread, 0, none);
    const u32 row = wg * 128 + thread / 32 * 16 + lane / 4, column = task.index * 128 + lane % 4 * 8;
    u64 to[2][2];
    float weight[2][2];
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 r = row + u * 64 + half * 8;
            to[u][half] = 0;
            weight[u][half] = 1.f;
            if (r < task.num_rows) {
                const RowFacts facts = row_facts(c, task.meta_row + r);
                to[u][half] = slot_address(c, facts) + column * 2;
                weight[u][half] = facts.weight;
            }
        }
    const uint32_t scales = ring.feature_scales(tiles) + lane % 4 * 32;
    const float* bias = args.b2 ? args.b2 + (task.expert * ceil_div(args.shape.hidden, 128) * 128) + column : nullptr;
    ++tiles;
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
        for (int u = 0; u < 2; ++u)
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

__device__ __forceinline__ void math_role(const Context& c, const Ring& ring, u32 wg, u32 thread) {
    TaskReader tasks;
    mma::PipelineState<L2::kStages> state;
    u32 tiles = 0;
    for (;;) {
        const TaskRecord& task = tasks.next(c);
        const Phase phase = task.phase;
        if (phase == Phase::end) return;
        const u32 all = wg * 128 + thread;
        const TraceScope trace(c, TraceRole::math, static_cast<u32>(phase), task.expert, task.row_block, task.index, all == 0);
        if (phase == Phase::l1) {
            math_l1(c, ring, task, state, tiles, wg, thread);
            finish_l1<kMathThreads>(c, task.row_block, task.unit, all);
        } else if (phase == Phase::l2) {
            math_l2(c, ring, task, state, tiles, wg, thread);
            finish_l2<kMathThreads>(c, task.row_block, task.unit, task.meta_row, task.num_rows, ceil_div(c.args.shape.hidden, c.args.tile.l2_columns), all);
        } else if (phase == Phase::publish) {
            publish<kMathThreads>(c, task.index, publish_chunks(c.args), all);
        } else {
            combine(c, task.index, all / 32, kMathThreads / 32, all % 32);
        }
        tasks.release(c);
    }
}

}  // namespace prefill

// Launch: kFixedBytes + 4 * (3 * local experts + 2) bytes of dynamic shared memory, 512 threads, any number of CTAs.
__device__ __forceinline__ void sm90_mega_moe_prefill(const MegaMoeArgs& args, uint8_t* smem) {
    using namespace prefill;
    SharedState& s = *reinterpret_cast<SharedState*>(smem + kRingBytes + kStagingBytes);
    u32* sums = reinterpret_cast<u32*>(smem + kFixedBytes);
    const u64 base = __ldg(args.bases + args.rank);
    const Context c{args, s, base};
    const Ring ring(ptx::smem_address(smem), c);
    enter(c, kThreads / 32);
    if (threadIdx.x == 32) ring.init();
    __syncthreads();
    const u32 wg = threadIdx.x / 128, thread = threadIdx.x % 128;
    if (wg < 2) {
        ptx::setmaxnreg_inc<kMathRegisters>();
        math_role(c, ring, wg, thread);
    } else {
        ptx::setmaxnreg_dec<kDecodeRegisters>();
        decode_role(c, ring, sums, ptx::smem_address(smem) + kRingBytes, wg - 2, thread);
    }
    leave(c, sums, kThreads);
}

}  // namespace megamoe::impls
