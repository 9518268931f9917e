// What the kernels share whose tokens lie on M (SS): the ring, the scheduler's warp, the math warps' way through the tasks, what
// epilogues need of the rows, and where the roles keep what waits while they multiply.
#pragma once
#include "megamoe/impls/mega_moe/call.cuh"
#include "megamoe/impls/mega_moe/combine.cuh"
#include "megamoe/impls/mega_moe/frontend.cuh"
#include "megamoe/mma/ss_mainloop.cuh"

namespace megamoe::impls::ss {

__device__ __forceinline__ u32 l1_steps(const MegaMoeArgs& args) { return ceil_div(args.shape.hidden, mma::kBlockK); }
__device__ __forceinline__ u32 l2_steps(const MegaMoeArgs& args) { return ceil_div(args.shape.intermediate, mma::kBlockK); }

// What the epilogue needs of a row: of L1 {scale of x, factor of h}, of L2 {routing weight, row of the slots and source}.
struct Fact {
    float value;
    u32 other;
};
constexpr u32 kSlotRowBits = 22;

// The main loop's ring, whose waits end where the call is lost.
template <class P>
struct TaskRing : mma::SsRing<P> {
    static constexpr u32 kSlots = P::kStages;
    Fact* facts;  // [kTaskSlots][rows of a block]
    const Context& c;
    __device__ __forceinline__ TaskRing(uint32_t base, Fact* f, const Context& context)
        : mma::SsRing<P>{base}, facts(f), c(context) {}
    __device__ __forceinline__ void wait(uint32_t bar, uint32_t parity) const {
        const CycleScope cycles(c, 0, ptx::thread_index() == 0);
        c.wait_barrier(bar, parity);
    }
};

// By the scheduler: what the epilogues need of the rows.
__device__ __forceinline__ void note_facts(const Context& c, const TaskRecord& task, Fact* facts, u32 lane) {
    const u32 k = c.args.shape.top_k;
    for (u32 row = lane; row < task.num_rows; row += 32) {
        const RowFacts known = row_facts(c, task.meta_row + row);
        Fact fact{known.scale, __float_as_uint(c.args.weight_before ? known.weight : 1.f)};
        if (task.phase == Phase::l2) fact = Fact{known.weight, known.source << kSlotRowBits | (known.slot % k * c.args.limits.max_tokens + known.slot / k)};
        facts[row] = fact;
    }
    __syncwarp();
}

// The scheduler's warp. Nothing here waits, so that pulls go on whatever else is late. By one thread: Instance::end_tiles, before
// the end of a task with tiles is signalled; Instance::prefetch, when a task has been handed on.
template <class Instance>
__device__ __forceinline__ void schedule_role(const Context& c, Fact* facts, u32* sums, uint32_t staging, u32 lane) {
    SchedulerState& state = c.s.scheduler;
    for (;;) {
        turn_scheduler(c, sums, staging, lane, state.started, state.finished);
        if (state.finished != state.started) {
            const u32 slot = state.finished % kTaskSlots;
            const TaskRecord& task = c.s.tasks[slot];
            const bool tiles = task.phase == Phase::l1 || task.phase == Phase::l2;
            bool done = true;  // barriers of other tasks stay at their phase
            if (tiles && lane == 0) done = ptx::mbarrier_test(ptx::smem_address(&c.s.tile_done[slot]), c.s.done_rounds[slot] & 1);
            if (__all_sync(0xffffffffu, done)) {
                if (tiles && lane == 0) Instance::end_tiles(c, task);
                if (task.phase == Phase::l1) signal_l1(c, task, lane);
                if (task.phase == Phase::l2) signal_l2(c, task, lane);
                __syncwarp();
                if (lane == 0) {
                    if (tiles) ++c.s.done_rounds[slot];
                    ++state.finished;
                }
                __syncwarp();
            }
        }
        if (state.prefetched != state.pushed) {
            const TaskRecord& task = c.s.tasks[state.prefetched % kTaskSlots];
            if (lane == 0) Instance::prefetch(c, task);
            __syncwarp();
            if (lane == 0) ++state.prefetched;
            __syncwarp();
        }
        if (state.started != state.pushed) {
            const u32 slot = state.started % kTaskSlots;
            const TaskRecord& task = c.s.tasks[slot];
            bool ready = true;
            if (lane == 0) {
                for (u32 i = 0; i < task.num_waits && ready; ++i)
                    ready = ptx::load_acquire_gpu(reinterpret_cast<const void*>(task.counters[i])) >= task.targets[i];
                if (!ready) {
                    const u32 looks = ++c.s.looks;
                    if (looks % kLooksPerCheck == 0)
                        ready = must_stop(c, looks / kLooksPerCheck, static_cast<u32>(task.phase), c.args.rank, 0, 0, kGraceNs);
                }
            }
            if (__all_sync(0xffffffffu, ready)) {
                const bool tiles = task.phase == Phase::l1 || task.phase == Phase::l2;  // others have nobody who waits
                if (tiles) note_facts(c, task, facts + slot * Instance::kBlockRows, lane);
                if (lane == 0) {
                    ptx::fence_proxy_async();  // rows and h were stored by other CTAs; now TMA reads them
                    if (tiles) ptx::mbarrier_arrive(ptx::smem_address(&c.s.rows_ready[slot]));
                    ++state.started;
                }
                __syncwarp();
            }
        }
        const bool leaves = state.ended && state.started == state.pushed && (c.aborted() || (!pull_in_flight(c) && state.finished == state.pushed));
        if (__any_sync(0xffffffffu, leaves)) return;  // all lanes, whenever each has looked
    }
}

// A word of shared memory of this warp, where something waits whose register would be spilled in K loop or epilogues.
__device__ __forceinline__ uint32_t aside(const Context& c, u32 i) { return ptx::smem_address(&c.s.aside[ptx::thread_index() / 32][i]); }
__device__ __forceinline__ TaskReader reader_aside(const Context& c) {
    TaskReader tasks;
    tasks.take_up(aside(c, 0));
    return tasks;
}

// By a math warpgroup whose part of a task is stored: the scheduler signals when it has heard both.
__device__ __forceinline__ void finish(const Context& c) {
    ptx::named_barrier_sync(2 + ptx::thread_index() / 128, 128);
    if (ptx::thread_index() % 128 == 0) ptx::mbarrier_arrive(ptx::smem_address(&c.s.tile_done[reader_aside(c).slot()]));
}

// The products of one tile; returns the number of the tile, of all tasks.
template <class P, class Ring>
__device__ __forceinline__ u32 multiply(float (&acc)[P::kUnits][64], const Context& c, const Ring& ring, u32 depth) {
    mma::NoWeightScale none;
    mma::PackedPipelineState<Ring::kSlots> state;
    state.set_word(ptx::load_shared_volatile(aside(c, 1)));
    mma::ss_multiply<P>(acc, state, ring, depth, ptx::thread_index() / 128, ptx::thread_index() % 128, 0, none);
    ptx::store_shared_volatile(aside(c, 1), state.word());
    const u32 tile = ptx::load_shared_volatile(aside(c, 2));
    __syncwarp();
    ptx::store_shared_volatile(aside(c, 2), tile + 1);
    return tile;
}

constexpr u32 kMathThreads = 256;

// The math warps. Instance::l1, l2: tiles of a task; Instance::expand: a part of a panel.
template <class Instance, class Ring>
__device__ __forceinline__ void math_role(const Context& c, const Ring& ring) {
    TaskReader tasks;
    for (u32 i = 1; i < 3; ++i) ptx::store_shared_volatile(aside(c, i), 0);
    __syncwarp();
    for (;;) {
        const TaskRecord& task = tasks.next(c);
        const Phase phase = task.phase;
        if (phase == Phase::end) return;
        tasks.put_aside(aside(c, 0));
        const u32 all = ptx::thread_index();
        const TraceScope trace(c, TraceRole::math, static_cast<u32>(phase), task.expert, task.row_block, task.index, all == 0);
        if (phase == Phase::l1) {
            Instance::l1(c, ring, task);
            ptx::fence_proxy_async();  // h, stored by threads, is read by TMA of other CTAs
            finish(c);
        } else if (phase == Phase::l2) {
            Instance::l2(c, ring, task);
            finish(c);
        } else if (phase == Phase::publish) {
            publish<kMathThreads>(c, task.index, all);
        } else if (phase == Phase::pull) {
            pull_by_all<kMathThreads>(c, task, all);
        } else if (kExpandParts != 0 && phase == Phase::expand) {
            Instance::expand(c, ring, task, all);
        } else {
            combine<4, 6>(c, task.index, all / 32, kMathThreads / 32, all % 32);
        }
        tasks.take_up(aside(c, 0));
        tasks.release(c);
    }
}

}  // namespace megamoe::impls::ss
