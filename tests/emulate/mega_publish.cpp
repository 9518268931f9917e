// Publish and pull of the mega-kernel on a CPU: the threads of one CTA, a task a call, any number of ranks in one process.
#include "mega_context.h"
#include "megamoe/impls/mega_moe/frontend.cuh"

using namespace megamoe;
using namespace megamoe::impls;

// Of a chunk {publish tasks, 0: one does it all, 1: one sorts, 2: two rounds}, then where things lie in a workspace.
extern "C" const char* describe(const MegaMoeArgs* args, u32 chunk, u64* found) {
    return with_context(args, 0, [&](const Context& c) {
        if (emulated::current->index != 0) return;
        begin_chunk(c, chunk);
        const bool all = publishes_alone(c), sorts = sorts_alone(c);
        const Offsets& at = c.s.at;
        const u64 list = static_cast<u64>(c.bank()) * args->limits.max_tokens * args->limits.max_top_k * sizeof(ListEntry);
        const u64 sources = static_cast<u64>(c.bank()) * args->limits.num_ranks;
        const u64 values[] = {publish_tasks(c), all ? 0u : sorts ? 1u : 2u, at.lists + list,
                              at.counts + sources * args->limits.max_local_experts * sizeof(ExpertCount), at.headers + sources * kLine,
                              at.arrived, at.ring1, at.ring1_scales, at.meta, at.unit_rows};
        std::copy(std::begin(values), std::end(values), found);
    });
}

extern "C" const char* publish_task(const MegaMoeArgs* args, u32 chunk, u32 index, u32 seed) {
    return with_context(args, seed, [&](const Context& c) {
        if (threadIdx.x == 0) begin_chunk(c, chunk);
        __syncthreads();
        publish<THREADS>(c, index, ptx::thread_index());
    });
}

// Part `index` of a row block; the block lies at its number in the rings.
extern "C" const char* pull_task(const MegaMoeArgs* args, u32 expert, u32 row_block, u32 first_row, u32 num_rows, u32 index, u32 seed) {
    return with_context(args, seed, [&](const Context& c) {
        TaskRecord task{};
        task.phase = Phase::pull;
        task.index = index, task.expert = expert, task.row_block = row_block, task.first_row = first_row, task.num_rows = num_rows;
        task.ring1_row = task.meta_row = row_block * c.s.at.unit_rows;
        pull_by_all<THREADS>(c, task, ptx::thread_index());
    });
}

// The parts of a row block one after the other, by bulk copies: warp 0 looks up the rows, as the scheduler's does; it moves
// them too, or where there is one the pulling warp does, here warp 1.
extern "C" const char* pull_by_copies(const MegaMoeArgs* args, u32 expert, u32 row_block, u32 first_row, u32 num_rows, u32 parts, u32 seed) {
    constexpr u32 kStaging = (sizeof(SharedState) + 127) / 128 * 128;
    return with_context(args, seed, [&](const Context& c) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (threadIdx.x == 0) {
            for (u32 i = 0; i < kPullSlots; ++i) ptx::mbarrier_init(ptx::smem_address(&c.s.pull_full[i]), 1);
            init_scheduler(c);
        }
        __syncthreads();
        if (kHasPuller && warp == 1 && lane == 0) return pull_role(c, kStaging);
        if (warp != 0) return;
        Task task{};
        task.phase = Phase::pull;
        task.expert = expert, task.row_block = row_block, task.first_row = first_row, task.num_rows = num_rows;
        const u64 row = row_block * c.s.at.unit_rows;
        for (task.index = 0; task.index < parts; ++task.index) {
            start_pull(c, task, kStaging, row, row);
            for (u32 looks = 0; __any_sync(0xffffffffu, pull_in_flight(c)); ++looks) {
                if (looks == 10000) emulated::fail("a pull that never ends");
                if (!kHasPuller && lane == 0) step_pull(c, kStaging);
                __nanosleep(100);
            }
        }
        if (lane == 0) ptx::store_shared_volatile(ptx::smem_address(&c.s.scheduler.ended), 1);
    }, kStaging - sizeof(SharedState) + kPullSlots * kPullBytes);
}

// The schedule from the counts of all ranks, by warp 0: {how it ended, chunks of the call, a rank that brought too much plus
// 1, status and rank of a fault}, then rows of the local experts, and their first units and row blocks.
extern "C" const char* schedule(const MegaMoeArgs* args, u32* found, u32* sums, u32 seed) {
    return with_context(args, seed, [&](const Context& c) {
        if (threadIdx.x == 0) {
            c.s.crowd = 0;
            c.s.deadline = 0;  // a wait ends at the first look at the clock
            c.s.fault.status = FaultStatus::none;
        }
        __syncthreads();
        if (threadIdx.x >= 32) return;
        const ScheduleStorage storage = schedule_storage(c.s.scheduler, sums, args->num_local_experts);
        const Counts counts = build_schedule(c, storage, threadIdx.x);
        if (threadIdx.x != 0) return;
        const u32 values[] = {static_cast<u32>(counts), c.s.num_chunks, c.s.crowd, static_cast<u32>(c.s.fault.status), c.s.fault.whom};
        std::copy(std::begin(values), std::end(values), found);
    });
}
