// What all instances of the mega-kernel do alike: the start and the end of a CTA, the signals of finished tiles.
#pragma once
#include "megamoe/impls/mega_moe/activate.cuh"
#include "megamoe/impls/mega_moe/combine.cuh"
#include "megamoe/impls/mega_moe/frontend.cuh"

namespace megamoe::impls {

// Signals of a finished task. By a warp that has seen that every thread's stores are behind it.
__device__ __forceinline__ void signal_l1(const Context& c, const TaskRecord& task, u32 lane) {
    if (__any_sync(0xffffffffu, c.aborted())) return;  // whoever gave up a wait went on with what it found: nobody may take that for a result
    if (lane == 0) {
        ptx::fence_gpu();
        ptx::add_relaxed_gpu_void(reinterpret_cast<void*>(c.word(c.s.at.l1_done, task.row_block)), 1);
        ptx::add_relaxed_gpu_void(reinterpret_cast<void*>(c.word(c.s.at.unit_l1_done, task.unit)), 1);
    }
    count_ended(c, lane);
}
// The last tile of a row block stores the tags.
__device__ __forceinline__ void signal_l2(const Context& c, const TaskRecord& task, u32 lane) {
    if (__any_sync(0xffffffffu, c.aborted())) return;
    u32 before = 0;
    if (lane == 0) before = ptx::add_acquire_release_gpu(reinterpret_cast<void*>(c.word(c.s.at.l2_done, task.row_block)), 1);
    before = __shfl_sync(0xffffffffu, before, 0);
    if (before + 1 == ceil_div(c.args.shape.hidden, c.args.tile.l2_columns)) {
        __syncwarp();
        ptx::fence_sys();  // the slots of all finishers are older than the tags
        for (u32 row = lane; row < task.num_rows; row += 32) {
            const RowFacts facts = row_facts(c, task.meta_row + row);
            const u64 tag = c.peer(facts.source) + c.s.at.tags + facts.slot * sizeof(u64);
            ptx::store_relaxed_sys(reinterpret_cast<void*>(tag), control_word(c.s.generation, kSlotReady));
        }
        __syncwarp();
    }
    // last: when all tiles of the unit have said so, what is known of its rows may be written over
    if (lane == 0) ptx::add_release_gpu(reinterpret_cast<void*>(c.word(c.s.at.unit_l2_done, task.unit)), 1);
    count_ended(c, lane);
}

// What this rank has told its peers, 0: nothing.
__device__ __forceinline__ u64 own_abort_word(const MegaMoeArgs& args) {
    return ptx::load_relaxed_sys(reinterpret_cast<const void*>(args.base + args.at.aborts + args.rank * sizeof(u64)));
}

// The CTA's last act, by all threads: the last CTA to leave clears the counters and opens the next generation.
__device__ __forceinline__ void leave(const Context& c, u32* sums, u32 threads) {
    __syncthreads();
#ifdef MEGAMOE_TRACE
    if (threadIdx.x < kTraceSums) {  // behind all events, where there is always room; `index`: how many these were
        const u64 start = c.s.began;
        c.args.trace[(blockIdx.x + 1) * kTraceEvents - kTraceSums + threadIdx.x] =
            TraceEvent{TraceRole::cycles, threadIdx.x, 0, 0, c.s.events, 0, start, start + c.s.cycles[threadIdx.x]};
    }
#endif
    if (threadIdx.x == 0) {
        if (c.aborted()) {
            if (c.s.fault.status != FaultStatus::none) report_fault(c);
            __nanosleep(100000);  // copies in flight end before the shared memory is someone else's
        }
        const u32 before = ptx::add_acquire_release_gpu(reinterpret_cast<void*>(c.word(c.s.at.exited, 0)), 1);
        c.s.flag = before + 1 == gridDim.x;
        // another CTA of this rank may have given up when this one had all that it needed
        if (c.s.flag && own_abort_word(c.args) != 0) ptx::store_shared_volatile(ptx::smem_address(&c.s.aborted), 1);
    }
    __syncthreads();
    if (!c.s.flag) return;
    if (c.aborted()) {  // reset() clears up; until then every call ends here
        fill_nan(c.args, threadIdx.x, threads);
        if (threadIdx.x == 0) *reinterpret_cast<u32*>(c.word(c.s.at.exited, 0)) = 0;
        return;
    }
    clear_counters(c, sums, threadIdx.x, threads);
    if (threadIdx.x == 0) {
        *reinterpret_cast<u32*>(c.word(c.s.at.exited, 0)) = 0;
        *reinterpret_cast<u64*>(c.word(c.s.at.ticket, 0)) = 0;
        *reinterpret_cast<u64*>(c.word(c.s.at.generation, 0)) = chunk_word(c.s.generation + 1, 0);
    }
    if (c.s.crowd == 0) return;
    fill_nan(c.args, threadIdx.x, threads);
    if (threadIdx.x == 0) report_crowd(c, c.s.crowd - 1);
}

// The start of a CTA, by all threads; `consumers`: warps that take tasks, `math_warps` of them do the work. What memory is
// asked for here is cold, and everyone waits for it: one thread asks for all of it at once, others do the rest meanwhile.
__device__ __forceinline__ void enter(const Context& c, u32 consumers, u32 math_warps) {
    SharedState& s = c.s;
    const MegaMoeArgs& args = c.args;
    if (threadIdx.x == 0) {
        const u64 word = ptx::load_relaxed_gpu(reinterpret_cast<const void*>(args.base + args.at.generation));
        const u64 told = own_abort_word(args);
        const u64 base = c.peer(args.rank);  // args.base: its line, with the peers', is what publish and pulls read next
        s.num_chunks = 1;
        s.crowd = 0;
        s.math_warps = math_warps;
        s.fault.status = FaultStatus::none;
        s.flag = s.looks = s.events = s.started = 0;
#ifdef MEGAMOE_TRACE
        for (u32 i = 0; i < kTraceSums; ++i) s.cycles[i] = 0;
        s.began = ptx::global_timer();
#endif
        init_scheduler(c);
        const u32 generation = static_cast<u32>(word);
        s.generation = generation == 0 ? kFirstGeneration : generation;
        begin_chunk(c, chunk_of(word));  // not the first one where others have been here long ago
        s.aborted = told != 0;           // the call before this one failed, and its record stays
        s.base = base;
    }
    constexpr u32 kWords = sizeof(Offsets) / sizeof(u64);
    static_assert(kWords <= 32, "one warp copies them");
    if (threadIdx.x / 32 == 1 && threadIdx.x % 32 < kWords)
        reinterpret_cast<u64*>(&s.at)[threadIdx.x % 32] = reinterpret_cast<const u64*>(&args.at)[threadIdx.x % 32];
    if (threadIdx.x == 64) {
        for (u32 i = 0; i < kTaskSlots; ++i) {
            ptx::mbarrier_init(ptx::smem_address(&s.task_full[i]), 1);
            ptx::mbarrier_init(ptx::smem_address(&s.task_empty[i]), consumers);
            ptx::mbarrier_init(ptx::smem_address(&s.rows_ready[i]), 1);
            ptx::mbarrier_init(ptx::smem_address(&s.tile_done[i]), 2);
            s.done_rounds[i] = 0;
        }
        for (u32 i = 0; i < kPullSlots; ++i) ptx::mbarrier_init(ptx::smem_address(&s.pull_full[i]), 1);
        ptx::fence_mbarrier_init();
    }
}

}  // namespace megamoe::impls
