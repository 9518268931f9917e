// The mega-kernel with weights on M from registers and tokens on N (RS), in two shapes.
//
// | decode: row blocks of up to 40, 640 threads | wide: up to 128, 384 threads (MEGAMOE_WIDE) | role |
// | warps 0 - 15, 104 registers | warps 0 - 7, 216 | math: 64 rows of a weight tile a warpgroup, activation; publish, combine, pulls |
// | 16, 64 | 8, 72 | one thread loads weights, as soon as a task is known |
// | 17 | 9 | scheduler: tickets and pulls |
// | 18 | 10 | loads X and what is known of its rows, when they have arrived |
// | 19 | 11 | finisher: results to where they belong, signals, while the math warps go on with the next task |
// Register sum: (4 * 104 + 64) * 128 = 640 * 96; (2 * 216 + 72) * 128 = 384 * 168. Barriers: full[s]: two arrivals, by the
// two loaders with the bytes of their copies; empty[s]: one by each math warp; results: full by each math warp, empty by the
// finisher; the tasks' and the pulls' (shared.cuh); named barrier 1: the math warps.
//
// A task is two blocks of 128 rows of weights: 128 intermediate columns (L1) or 256 hidden columns (L2); four warpgroups
// take both at once, two one after the other. Results pass through shared memory: a scale belongs to 128 columns of a token,
// which several warpgroups hold, and rows go out whole.
#pragma once
#include "megamoe/impls/mega_moe/call.cuh"
#include "megamoe/impls/mega_moe/finish.cuh"
#include "megamoe/mma/moe_block.cuh"
#include "megamoe/mma/rs_mainloop.cuh"

namespace megamoe::impls {

namespace decode {

#ifdef MEGAMOE_WIDE
constexpr bool kWide = true;
#else
constexpr bool kWide = false;
#endif
constexpr u32 kWarpgroups = kWide ? 2 : 4, kBlockRows = kWide ? 128 : 40, kBoxRows = kWide ? 128 : 8;
constexpr u32 kStages = kWide ? 5 : 4, kSteps = kWide ? 1 : 2;  // slots of the ring, K steps in each
constexpr u32 kMathThreads = kWarpgroups * 128, kThreads = kMathThreads + 128, kConsumers = kMathThreads / 32 + 3;
constexpr int kMathRegisters = kWide ? 216 : 104, kOtherRegisters = kWide ? 72 : 64;
constexpr u32 kBlocks = kWarpgroups / 2, kPasses = 2 / kBlocks;  // blocks of weight rows at once, and how often in a task

template <bool kScaled_>
struct Policy {
    static constexpr bool kScaled = kScaled_;
    static constexpr mma::ScaleLoad kScaleLoad = mma::ScaleLoad::kLate;
    static constexpr int kStages = decode::kStages, kStepsPerStage = kSteps;
};
constexpr u32 kXBytes = kBlockRows * mma::kBlockK, kScaleBytes = kBlockRows * 4;
constexpr u32 kSlotBytes = (kSteps * (kXBytes + kBlocks * mma::kMoeBlockBytes + kScaleBytes) + 1023) / 1024 * 1024;
constexpr u32 kRingBytes = kStages * (kSlotBytes + 16) + 16;
constexpr u32 kStagingBytes = kPullSlots * kPullBytes;
using Finish = FinishShape<kWide, kBlockRows>;
constexpr u32 kResultStride = Finish::kResultStride, kResultBytes = kBlockRows * kResultStride * 4;
constexpr u32 kFactBytes = kTaskSlots * kBlockRows * sizeof(RowFacts);
constexpr u32 kStateBytes = (sizeof(SharedState) + 15) / 16 * 16;
// ring, staging, results, facts, state; then the schedule's sums
constexpr u32 kFixedBytes = (kRingBytes + 127) / 128 * 128 + kStagingBytes + kResultBytes + kFactBytes + kStateBytes;

struct Ring {
    uint32_t base;
    const Context& c;
    __device__ __forceinline__ uint32_t x(int s, int step) const { return base + s * kSlotBytes + step * kXBytes; }
    __device__ __forceinline__ uint32_t w(int s, int block, int step) const {
        return base + s * kSlotBytes + kSteps * kXBytes + (block * kSteps + step) * mma::kMoeBlockBytes;
    }
    __device__ __forceinline__ uint32_t scales(int s, int step) const {
        return base + s * kSlotBytes + kSteps * (kXBytes + kBlocks * mma::kMoeBlockBytes) + step * kScaleBytes;
    }
    __device__ __forceinline__ uint32_t full(int s) const { return base + kStages * kSlotBytes + s * 8; }
    __device__ __forceinline__ uint32_t empty(int s) const { return full(kStages) + s * 8; }
    __device__ __forceinline__ uint32_t results_full() const { return empty(kStages); }
    __device__ __forceinline__ uint32_t results_empty() const { return results_full() + 8; }
    __device__ __forceinline__ void wait(uint32_t bar, uint32_t parity) const { c.wait_barrier(bar, parity); }
    __device__ __forceinline__ void fragments(uint32_t (&a)[4][4], int s, int wg, int step, int thread) const {
        mma::load_moe_fragments(a, w(s, wg / 2, step), wg % 2 * 4 + thread / 32, thread % 32);
    }
    __device__ __forceinline__ void init() const {
        for (u32 s = 0; s < kStages; ++s) {
            ptx::mbarrier_init(full(s), 2);
            ptx::mbarrier_init(empty(s), kMathThreads / 32);
        }
        ptx::mbarrier_init(results_full(), kMathThreads / 32);
        ptx::mbarrier_init(results_empty(), 1);
        ptx::fence_mbarrier_init();
    }
};

__device__ __forceinline__ u32 l1_steps(const MegaMoeArgs& args) { return ceil_div(args.shape.hidden, mma::kBlockK); }
__device__ __forceinline__ u32 l2_steps(const MegaMoeArgs& args) { return ceil_div(args.shape.intermediate, mma::kBlockK); }
__device__ __forceinline__ u32 l2_row_blocks(const MegaMoeArgs& args) { return ceil_div(args.shape.hidden, mma::kMoeBlockRows); }

// Waits for a slot to be free, unless everything ends.
__device__ __forceinline__ void wait_empty(const Context& c, const Ring& ring, u32 slots) {
    c.wait_barrier(ring.empty(slots % kStages), slots / kStages & 1 ^ 1);
}

// What the publish tasks will read first, into L2: every CTA's share.
__device__ __forceinline__ void prefetch_inputs(const MegaMoeArgs& args, u32 lane) {
    constexpr u32 kChunk = 2048;
    const u32 first = blockIdx.x * 32 + lane, all = gridDim.x * 32;
    const u32 tokens = min_of(args.num_tokens, args.limits.max_tokens);  // of the first chunk
    const u32 row_bytes = tokens * args.shape.hidden * 2, entries = tokens * args.shape.top_k;
    if (args.x)
        for (u32 at = first * kChunk; at < row_bytes; at += all * kChunk)
            ptx::prefetch_l2(static_cast<const u8*>(args.x) + at, min_of(kChunk, row_bytes - at) / 16 * 16);
    if (first < 2) {  // these may start anywhere
        const u64 address = reinterpret_cast<u64>(first == 0 ? args.ids : args.weights), from = align_up(address, 16);
        const u64 to = (address + entries * (first == 0 ? args.id_bytes : 4)) / 16 * 16;
        if (to > from) ptx::prefetch_l2(reinterpret_cast<const void*>(from), static_cast<u32>(to - from));
    }
}

__device__ __forceinline__ void weight_role(const Context& c, const Ring& ring, u32 lane) {
    const MegaMoeArgs& args = c.args;
    TaskReader tasks;
    u32 slots = 0;
    for (;;) {
        const TaskRecord& task = tasks.next(c);
        const Phase phase = task.phase;
        if (phase == Phase::end) return;
        if (lane == 0 && (phase == Phase::l1 || phase == Phase::l2)) {
            const bool first = phase == Phase::l1;
            const u32 depth = first ? l1_steps(args) : l2_steps(args);
            const u32 row_blocks = first ? 2 * l2_steps(args) : l2_row_blocks(args);
            const u32 second = min_of(2 * task.index + 1, row_blocks - 1);  // past the end: the last again, never stored
            const u8* w = (first ? args.w13 : args.w2) + static_cast<u64>(task.expert) * row_blocks * depth * mma::kMoeBlockBytes;
            const u8* blocks[2] = {w + static_cast<u64>(2 * task.index) * depth * mma::kMoeBlockBytes,
                                   w + static_cast<u64>(second) * depth * mma::kMoeBlockBytes};
#pragma unroll
            for (u32 pass = 0; pass < kPasses; ++pass)
                for (u32 k = 0; k < depth; k += kSteps, ++slots) {
                    const u32 stage = slots % kStages, bytes = min_of(kSteps, depth - k) * mma::kMoeBlockBytes;
                    wait_empty(c, ring, slots);
                    ptx::mbarrier_arrive_expect_tx(ring.full(stage), kBlocks * bytes);
#pragma unroll
                    for (u32 b = 0; b < kBlocks; ++b)
                        ptx::bulk_load(ring.w(stage, b, 0), blocks[pass * kBlocks + b] + static_cast<u64>(k) * mma::kMoeBlockBytes, bytes,
                                       ring.full(stage));
                }
        }
        tasks.release(c);
    }
}

__device__ __forceinline__ void row_role(const Context& c, const Ring& ring, RowFacts* facts, u32 lane) {
    const MegaMoeArgs& args = c.args;
    TaskReader tasks;
    u32 slots = 0;
    for (u32 n = 0;; ++n) {
        const TaskRecord& task = tasks.next(c);
        const Phase phase = task.phase;
        if (phase == Phase::end) return;
        if (phase == Phase::l1 || phase == Phase::l2) {
            const bool first = phase == Phase::l1;
            const u32 depth = first ? l1_steps(args) : l2_steps(args), row = first ? task.ring1_row : task.ring2_row;
            bool has_rows = true;
            if (lane == 0) {
                has_rows = wait_rows(c, task);
                ptx::store_shared_volatile(ptx::smem_address(&c.s.started), n + 1);
            }
            __syncwarp();
            const u32 boxes = ceil_div(task.num_rows, kBoxRows), end = kPasses * depth;
            const ptx::TensorMap* map = first ? &args.ring1 : &args.ring2;
            const u64 scales_at = first && kBlockScales ? c.s.at.ring1_scales : c.s.at.ring2_scales;
            const float* scales = reinterpret_cast<const float*>(c.base() + scales_at) + static_cast<u64>(row) * depth;
            u32 step = 0;  // of all passes
            auto load_until = [&](u32 last) {
#pragma unroll 1
                for (; step < last; step += kSteps, ++slots) {
                    const u32 k = kPasses == 1 || step < depth ? step : step - depth;
                    const u32 stage = slots % kStages, steps = min_of(kSteps, depth - k), bar = ring.full(stage);
                    wait_empty(c, ring, slots);
                    if (!has_rows) continue;
                    ptx::mbarrier_arrive_expect_tx(bar, steps * (boxes * kBoxRows * mma::kBlockK + (first && !kBlockScales ? 0 : kScaleBytes)));
                    for (u32 i = 0; i < steps; ++i) {
                        for (u32 b = 0; b < boxes; ++b)
                            ptx::tensor_load_2d(ring.x(stage, i) + b * kBoxRows * mma::kBlockK, map, bar, (k + i) * mma::kBlockK,
                                                row + b * kBoxRows);
                        if (!first || kBlockScales) ptx::bulk_load(ring.scales(stage, i), scales + (k + i) * kBlockRows, kScaleBytes, bar);
                    }
                }
            };
            // Rows first, what is known of them behind: but before the last arrival of the first pass, after which the math
            // warps read it.
            const u32 early = min_of((ceil_div(depth, kSteps) - 1) * kSteps, (kStages - 1) * kSteps);
            if (lane == 0) load_until(early);
            __syncwarp();
            for (u32 i = lane; i < task.num_rows; i += 32) {
                RowFacts known = row_facts(c, task.meta_row + i);
                // What the epilogue multiplies with is chosen once a row. L1: `weight` is h's factor. L2: the result's, and `scale`
                // the bias's: "before", the weight is in h already, and the bias has its own.
                const float before = args.weight_before ? known.weight : 1.f;
                if (!first) known.weight = args.weight_before ? 1.f : known.weight, known.scale = before;
                else known.weight = before;
                facts[n % kTaskSlots * kBlockRows + i] = known;
            }
            __syncwarp();
            if (lane == 0) load_until(end);
        } else if (lane == 0) {
            ptx::store_shared_volatile(ptx::smem_address(&c.s.started), n + 1);
        }
        tasks.release(c);
    }
}

// Which features a thread holds: the pair of rows 2p, 2p + 1 of a block (mma/moe_block.cuh) is the pair `feature`, + 1 of W2,
// and gate and up of `column` of W13's 64.
struct Pair {
    u32 block, feature, column;
    __device__ __forceinline__ Pair(u32 wg, u32 thread, u32 pass) {
        const u32 g = thread % 32 / 4, strip = wg % 2 * 4 + thread / 32;
        const u32 j = 2 * strip + g / 4, c = g % 4;
        block = pass * kBlocks + wg / 2;
        feature = 2 * (16 * (j / 4) + 4 * c + j % 4);
        column = 16 * c + j;
    }
};

// The products of one tile; `tasks` waits in shared memory: its register would be spilled in every K step.
template <bool kScaled, int N>
__device__ __forceinline__ void multiply(float (&acc)[N / 2], const Context& c, const Ring& ring, u32 depth, TaskReader& tasks,
                                         mma::PipelineState<kStages>& state) {
    tasks.put_aside(ptx::smem_address(&c.s.aside[ptx::thread_index() / 32][0]));
    mma::rs_multiply<Policy<kScaled>, N>(acc, state, ring, depth, ptx::thread_index() / 128, ptx::thread_index() % 128, 0);
    tasks.take_up(ptx::smem_address(&c.s.aside[ptx::thread_index() / 32][0]));
}

// By the math warps: the finisher has read the results of the task before. How many tasks there were waits in shared memory,
// as the task reader does.
__device__ __forceinline__ uint32_t results_aside(const Context& c) { return ptx::smem_address(&c.s.aside[ptx::thread_index() / 32][1]); }
__device__ __forceinline__ void wait_results_empty(const Context& c, const Ring& ring) {
    c.wait_barrier(ring.results_empty(), ptx::load_shared_volatile(results_aside(c)) & 1 ^ 1);
}
// By the math warps, each when its results of a task are written.
__device__ __forceinline__ void hand_results(const Context& c, const Ring& ring) {
    const u32 before = ptx::load_shared_volatile(results_aside(c));
    __syncwarp();
    if (ptx::elect_one()) {
        ptx::store_shared_volatile(results_aside(c), before + 1);
        ptx::mbarrier_arrive(ring.results_full());
    }
}

template <int N>
__device__ __forceinline__ void math_l1(const Context& c, const Ring& ring, TaskReader& tasks, const RowFacts* all_facts,
                                        float* result, mma::PipelineState<kStages>& state) {
    const MegaMoeArgs& args = c.args;
    const TaskRecord& task = tasks.task(c);
    const u32 wg = ptx::thread_index() / 128, thread = ptx::thread_index() % 128;
    const u32 lane = thread % 32;
#pragma unroll 1
    for (u32 pass = 0; pass < kPasses; ++pass) {
        const Pair pair(wg, thread, pass);
        const u32 index = (task.expert * 2 * l2_steps(args) + 2 * task.index + pair.block) * mma::kMoeBlockRows + pair.feature;
        const float2 w = __ldg(reinterpret_cast<const float2*>(args.w13_scale + index));
        float acc[N / 2];
        multiply<kBlockScales, N>(acc, c, ring, l1_steps(args), tasks, state);
        if (pass == 0) wait_results_empty(c, ring);
        const float2 b = args.b13 ? __ldg(reinterpret_cast<const float2*>(args.b13 + index)) : make_float2(0.f, 0.f);
        const RowFacts* facts = all_facts + tasks.slot() * kBlockRows;
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 token = 8 * j + 2 * (lane % 4) + i;
                const RowFacts row = facts[token];
                const float h = activate(args, l1_value(acc[4 * j + i], row.scale, w.x, b.x), l1_value(acc[4 * j + 2 + i], row.scale, w.y, b.y));
                result[token * kResultStride + 64 * pair.block + pair.column] = __fmul_rn(h, row.weight);
            }
    }
}

template <int N>
__device__ __forceinline__ void math_l2(const Context& c, const Ring& ring, TaskReader& tasks, const RowFacts* all_facts,
                                        float* result, mma::PipelineState<kStages>& state) {
    const MegaMoeArgs& args = c.args;
    const TaskRecord& task = tasks.task(c);
    const u32 wg = ptx::thread_index() / 128, thread = ptx::thread_index() % 128;
    const u32 lane = thread % 32;
    u32* words = reinterpret_cast<u32*>(result);
#pragma unroll 1
    for (u32 pass = 0; pass < kPasses; ++pass) {
        const Pair pair(wg, thread, pass);
        const u32 row_blocks = l2_row_blocks(args), block = min_of(2 * task.index + pair.block, row_blocks - 1);
        const u32 index = (task.expert * row_blocks + block) * mma::kMoeBlockRows + pair.feature;
        const float2 w = __ldg(reinterpret_cast<const float2*>(args.w2_scale + index));
        float acc[N / 2];
        multiply<true, N>(acc, c, ring, l2_steps(args), tasks, state);
        if (pass == 0) wait_results_empty(c, ring);
        const float2 b = args.b2 ? __ldg(reinterpret_cast<const float2*>(args.b2 + index)) : make_float2(0.f, 0.f);
        const RowFacts* facts = all_facts + tasks.slot() * kBlockRows;
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 token = 8 * j + 2 * (lane % 4) + i;
                const float inner = facts[token].scale, outer = facts[token].weight;
                words[token * kResultStride + 64 * pair.block + pair.feature / 2] =
                    ptx::pack_bf16x2(l2_value(acc[4 * j + i], w.x, b.x, inner, outer), l2_value(acc[4 * j + 2 + i], w.y, b.y, inner, outer));
            }
    }
}

// The math warpgroups' part of a task, with the narrowest compiled token width that holds its rows.
struct Math {
    const Context& c;
    const Ring& ring;
    TaskReader& tasks;
    const RowFacts* facts;
    float* result;
    mma::PipelineState<kStages>& state;

    template <Phase kPhase, int N>
    __device__ __forceinline__ void run() const {
        if constexpr (kPhase == Phase::l1) math_l1<N>(c, ring, tasks, facts, result, state);
        else math_l2<N>(c, ring, tasks, facts, result, state);
    }
    template <Phase kPhase>
    __device__ __forceinline__ void run(u32 rows) const {
        if constexpr (kWide) {
            if (rows <= 16) run<kPhase, 16>();
            else if (rows <= 48) run<kPhase, 48>();
            else if (rows <= 64) run<kPhase, 64>();
            else if (rows <= 80) run<kPhase, 80>();
            else if (rows <= 96) run<kPhase, 96>();
            else if (rows <= 112) run<kPhase, 112>();
            else run<kPhase, 128>();
        } else {
            if (rows <= 8) run<kPhase, 8>();
            else if (rows <= 16) run<kPhase, 16>();
            else if (rows <= 24) run<kPhase, 24>();
            else if (rows <= 32) run<kPhase, 32>();
            else run<kPhase, 40>();
        }
    }
};

__device__ __forceinline__ void math_role(const Context& c, const Ring& ring, const RowFacts* facts, float* result) {
    TaskReader tasks;
    mma::PipelineState<kStages> state;
    const Math math{c, ring, tasks, facts, result, state};
    ptx::store_shared_volatile(results_aside(c), 0);
    __syncwarp();
    for (;;) {
        const TaskRecord& task = tasks.next(c);
        const Phase phase = task.phase;
        if (phase == Phase::end) return;
        const u32 all = ptx::thread_index();
        const TraceScope trace(c, TraceRole::math, static_cast<u32>(phase), task.expert, task.row_block, task.index, all == 0);
        if (phase == Phase::l1) {
            math.run<Phase::l1>(task.num_rows);
            hand_results(c, ring);
        } else if (phase == Phase::l2) {
            math.run<Phase::l2>(task.num_rows);
            ptx::fence_proxy_async_shared();  // the finisher's bulk copies read what these threads stored
            hand_results(c, ring);
        } else if (phase == Phase::publish) {
            publish<kMathThreads>(c, task.index, all);
        } else if (phase == Phase::pull) {
            pull_by_all<kMathThreads>(c, task, all);
        } else {
            combine<kWide ? 4 : 2, kWide ? 6 : 4>(c, task.index, all / 32, kMathThreads / 32, all % 32);
        }
        tasks.release(c);
    }
}

// The finisher's warp. What it stores and signals costs as much as several K steps: latencies, for which no product waits here.
__device__ __forceinline__ void finish_role(const Context& c, const Ring& ring, const RowFacts* facts, const float* result, u32 lane) {
    TaskReader tasks;
    u32 round = 0;
    for (;;) {
        const TaskRecord& task = tasks.next(c);
        const Phase phase = task.phase;
        if (phase == Phase::end) return;
        if (phase == Phase::l1 || phase == Phase::l2) {
            c.wait_barrier(ring.results_full(), round++ & 1);
            if (phase == Phase::l1) store_h<Finish>(c, task, result, lane);
            else store_slots<Finish>(c, task, facts + tasks.slot() * kBlockRows, result, lane);
            __syncwarp();
            if (ptx::elect_one()) ptx::mbarrier_arrive(ring.results_empty());
            if (phase == Phase::l1) {
                signal_l1(c, task, lane);
            } else {
                await_slots();
                signal_l2(c, task, lane);
            }
        }
        tasks.release(c);
    }
}

}  // namespace decode

// Launch: kFixedBytes + 4 * (3 * local experts + 2) bytes of dynamic shared memory, kThreads threads, any number of CTAs.
__device__ __forceinline__ void sm90_mega_moe_decode(const MegaMoeArgs& args, uint8_t* smem) {
    using namespace decode;
    uint8_t* staging = smem + (kRingBytes + 127) / 128 * 128;
    float* result = reinterpret_cast<float*>(staging + kStagingBytes);
    RowFacts* facts = reinterpret_cast<RowFacts*>(staging + kStagingBytes + kResultBytes);
    SharedState& s = *reinterpret_cast<SharedState*>(staging + kStagingBytes + kResultBytes + kFactBytes);
    u32* sums = reinterpret_cast<u32*>(smem + kFixedBytes);
    const Context c{args, s};
    const Ring ring{ptx::smem_address(smem), c};
    enter(c, kConsumers, kMathThreads / 32);
    if (threadIdx.x == 32) ring.init();
    __syncthreads();
    const u32 wg = threadIdx.x / 128, thread = threadIdx.x % 128;
    if (wg < kWarpgroups) {
        ptx::setmaxnreg_inc<kMathRegisters>();
        math_role(c, ring, facts, result);
    } else {
        ptx::setmaxnreg_dec<kOtherRegisters>();
        if (thread < 32) {
            weight_role(c, ring, thread);
        } else if (thread < 64) {
            while (!s.scheduler.ended || s.pull.total != 0) {
                turn_scheduler(c, sums, ptx::smem_address(staging), thread - 32,
                               __shfl_sync(0xffffffffu, ptx::load_shared_volatile(ptx::smem_address(&s.started)), 0), s.scheduler.pushed);
                if (__any_sync(0xffffffffu, s.scheduler.ended && c.aborted())) break;  // all lanes, whenever each has looked
            }
        } else if (thread < 96) {
            row_role(c, ring, facts, thread - 64);
        } else {
            prefetch_inputs(args, thread - 96);
            finish_role(c, ring, facts, result, thread - 96);
        }
    }
    leave(c, sums, kThreads);
}

}  // namespace megamoe::impls
