// Chunks: a call with more tokens than the workspace holds runs as several generations in one launch.
//
// Every header says how many chunks its source wants; all ranks run the largest of these numbers, and a rank that has no
// token left takes part without any. A chunk opens on a rank when all tasks of the one before have ended there, so that x,
// slots and counters are at rest, as between two calls: the CTA that got the first ticket behind the last task counts them,
// clears the counters and opens the next chunk. It waits for lower tickets only, and nobody waits for CTAs: one that starts
// late, or finds its ticket to be of a chunk that is over, goes on with the chunk at work.
#pragma once
#include "megamoe/impls/mega_moe/watch.cuh"

namespace megamoe::impls {

// What the line of the generation holds: generation and chunk change together.
__device__ __forceinline__ u64 chunk_word(u32 generation, u32 chunk) { return static_cast<u64>(chunk) << 32 | generation; }
__device__ __forceinline__ u32 chunk_of(u64 word) { return static_cast<u32>(word >> 32); }

// By one thread, when no role of this CTA is at work: its numbers become those of the chunk. `generation` is the caller's.
__device__ __forceinline__ void begin_chunk(const Context& c, u32 chunk) {
    const MegaMoeArgs& args = c.args;
    const u64 first = static_cast<u64>(chunk) * args.limits.max_tokens;
    c.s.chunk = chunk;
    c.s.first_token = static_cast<u32>(first);
    c.s.num_tokens = first >= args.num_tokens ? 0 : min_of(args.limits.max_tokens, args.num_tokens - static_cast<u32>(first));
    c.s.deadline = ptx::global_timer() + args.timeout_ns;
}

// By a converged warp whose task has ended, all its signals behind it; each math warp its part of a combine task.
__device__ __forceinline__ void count_ended(const Context& c, u32 lane) {
    if (c.s.num_chunks == 1) return;
    __syncwarp();
    if (lane == 0) ptx::add_release_gpu(reinterpret_cast<void*>(c.word(c.s.at.exited, 1)), 1);
}

// By `threads` threads, when nobody looks at a counter any more: all of them but `exited`.
__device__ __forceinline__ void clear_counters(const Context& c, const u32* sums, u32 thread, u32 threads) {
    const u32 blocks = sums[2 * c.args.num_local_experts + 1 + c.args.num_local_experts];
    for (u32 i = thread; i < blocks; i += threads) {
        *reinterpret_cast<u32*>(c.word(c.s.at.arrived, i)) = 0;
        *reinterpret_cast<u32*>(c.word(c.s.at.l1_done, i)) = 0;
        *reinterpret_cast<u32*>(c.word(c.s.at.l2_done, i)) = 0;
        *reinterpret_cast<u32*>(c.word(c.s.at.unit_l1_done, i)) = 0;
        *reinterpret_cast<u32*>(c.word(c.s.at.unit_l2_done, i)) = 0;
    }
    for (u32 i = thread; i < c.args.panel_slots; i += threads) {
        *reinterpret_cast<u32*>(c.word(c.s.at.expanded, i)) = 0;
        *reinterpret_cast<u32*>(c.word(c.s.at.panel_used, i)) = 0;
    }
    for (u32 i = thread; i < c.args.shape.num_experts; i += threads) *reinterpret_cast<u32*>(c.word(c.s.at.cursors, i)) = 0;
    if (thread == 0) {
        *reinterpret_cast<u32*>(c.word(c.s.at.published, 0)) = 0;
        *reinterpret_cast<u32*>(c.word(c.s.at.exited, 1)) = 0;
    }
}

// By the scheduler's warp with the first ticket behind the last task: what the experts got.
__device__ __forceinline__ void add_received(const Context& c, const u32* sums, u32 lane) {
    if (c.args.received == nullptr) return;
    for (u32 e = lane; e < c.args.num_local_experts; e += 32) c.args.received[e] += sums[e];
}

// Has every consumer let go of all tasks that were handed on?
__device__ __forceinline__ bool all_released(const Context& c, u32 finished) {
    const u32 pushed = c.s.scheduler.pushed;
    if (finished != pushed) return false;
    for (u32 n = pushed - min_of(pushed, kTaskSlots); n < pushed; ++n)
        if (!ptx::mbarrier_test(ptx::smem_address(&c.s.task_empty[n % kTaskSlots]), n / kTaskSlots & 1)) return false;
    return true;
}

// A look of the scheduler's warp between two chunks, when all tasks that it handed on have their rows: opens the next chunk
// if that is this CTA's part and everything has ended. True: this CTA is at a later chunk now.
__device__ __forceinline__ bool pass_chunk(const Context& c, const u32* sums, u32 lane, u32 finished) {
    SchedulerState& state = c.s.scheduler;
    const u64 word_at = c.word(c.s.at.generation, 0);
    if (state.between == Between::opens) {
        const ScheduleShape shape = schedule_shape(c.args.shape, c.args.num_local_experts, c.s.num_tokens, c.args.tile);
        const u32 blocks = sums[3 * c.args.num_local_experts + 1];
        const u32 tasks = blocks * (shape.l1_tiles + shape.l2_tiles) + shape.combine_tasks * c.s.math_warps;
        const bool ended = ptx::load_acquire_gpu(reinterpret_cast<const void*>(c.word(c.s.at.exited, 1))) >= tasks;
        if (__all_sync(0xffffffffu, ended)) {
            clear_counters(c, sums, lane, 32);
            ptx::fence_gpu();  // pairs with the fence of whoever sees the words
            __syncwarp();
            if (lane == 0) {
                ptx::fence_gpu();
                ptx::store_relaxed_gpu(reinterpret_cast<void*>(word_at), chunk_word(c.s.generation + 1, c.s.chunk + 1));
                ptx::store_relaxed_gpu(reinterpret_cast<void*>(c.word(c.s.at.ticket, 0)), static_cast<u64>(c.s.chunk + 1) << 32);
                state.between = Between::waits;
            }
            __syncwarp();
        }
    }
    bool passes = false;
    if (lane == 0) {
        const u32 next = state.claimed != 0 ? static_cast<u32>(state.claimed >> 32)
                                            : chunk_of(ptx::load_relaxed_gpu(reinterpret_cast<const void*>(word_at)));
        passes = next != c.s.chunk && all_released(c, finished);
        if (passes) {
            ptx::fence_gpu();
            c.s.generation += next - c.s.chunk;
            begin_chunk(c, next);
            state.has_schedule = 0;
            state.cursor = CallSchedule::Cursor{};
            state.between = Between::none;
        } else {
            const u32 looks = ++c.s.looks;
            if (looks % kLooksPerCheck == 0)
                must_stop(c, looks / kLooksPerCheck, static_cast<u32>(Phase::end), c.args.rank, c.s.chunk, next, kGraceNs);
        }
    }
    __syncwarp();  // all lanes read the numbers of the chunk
    return __any_sync(0xffffffffu, passes);
}

}  // namespace megamoe::impls
