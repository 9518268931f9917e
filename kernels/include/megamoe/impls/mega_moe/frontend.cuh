// The scheduler of a CTA: claims tickets in order, one ahead, and hands the tasks to the roles.
#pragma once
#include "megamoe/impls/mega_moe/publish.cuh"
#include "megamoe/impls/mega_moe/pull.cuh"

namespace megamoe::impls {

// Sums of the schedule, in shared memory: 3 * local experts + 2 words.
__device__ __forceinline__ ScheduleStorage schedule_storage(SchedulerState& state, u32* sums, u32 num_local_experts) {
    return ScheduleStorage{sums, sums + num_local_experts, sums + 2 * num_local_experts + 1, state.unit_block, state.unit_expert};
}

// Is the chunk that this CTA is at behind the rank?
__device__ __forceinline__ bool is_over(const Context& c) {
    return chunk_of(ptx::load_relaxed_gpu(reinterpret_cast<const void*>(c.word(c.s.at.generation, 0)))) != c.s.chunk;
}

enum class Counts : u32 { summed, lost, late };

// By a converged warp: waits for the counts of every source, then sums them. Lost: the call is. Late: the rank has done the
// chunk without this CTA, and peers may have written over its counts.
__device__ __forceinline__ Counts build_schedule(const Context& c, const ScheduleStorage& sums, u32 lane) {
    const MegaMoeArgs& args = c.args;
    const u32 ranks = args.limits.num_ranks, local = args.num_local_experts;
    const u64 expected = control_word(c.s.generation, kPublished);
    bool good = true, late = false;
    u32 chunks = 1;
    // What a header says is asked for when its flag is seen, and looked at when that costs no time: while the flag of another
    // source is missing, or behind the counts, which are on their way then.
    u32 unread = ~0u;  // its source; ~0: there is none
    u64 hash = 0;
    u32 wanted_chunks = 0, tokens = 0;
    auto read_header = [&] {
        if (unread == ~0u) return;
        chunks = max_of(chunks, wanted_chunks);
        if (args.refuses && unread != args.rank && tokens > args.limits.max_tokens) c.s.crowd = unread + 1;  // this rank's host knows
        if (hash != args.shape_hash) {
            ptx::fence_gpu();
            late = is_over(c);  // then the header may be that of a later call
            if (!late) note_fault(c, FaultStatus::shape, static_cast<u32>(Phase::publish), unread, hash, args.shape_hash);
            good = false;
        }
        unread = ~0u;
    };
    for (u32 first = 0; first < ranks; first += 32) {
        const u32 source = first + lane;
        const u64 at = c.base() + c.s.at.headers + (static_cast<u64>(c.bank()) * ranks + source) * kLine;
        bool is_here = source >= ranks;
        for (u32 look = 1;; ++look) {
            read_header();
            if (!is_here) {
                const u64 seen = ptx::load_acquire_sys(reinterpret_cast<const void*>(at));
                is_here = seen == expected;
                if (is_here) {
                    const CountHeader* header = reinterpret_cast<const CountHeader*>(at);
                    unread = source;
                    hash = __ldcg(&header->shape_hash);
                    wanted_chunks = __ldcg(&header->num_chunks);
                    tokens = __ldcg(&header->total_tokens);
                } else if (look % kLooksPerCheck == 0) {
                    late = is_over(c);
                    if (late || must_stop(c, look / kLooksPerCheck, static_cast<u32>(Phase::publish), source, seen, expected, 0)) good = false;
                }
            }
            if (__any_sync(0xffffffffu, late)) return Counts::late;
            if (!__all_sync(0xffffffffu, good)) return Counts::lost;
            if (__all_sync(0xffffffffu, is_here)) break;
        }
    }
    __syncwarp();  // counts of every source are read behind the look of one lane at its flag
    const ExpertCount* counts = counts_of(c);
    u32 units = 0, blocks = 0;
    for (u32 first = 0; first < local; first += 32) {
        const u32 e = first + lane;
        u32 rows = 0;
        if (e < local)
            for (u32 source = 0; source < ranks; ++source) rows += __ldcg(&counts[source * args.limits.max_local_experts + e].rows);
        read_header();
        if (__any_sync(0xffffffffu, late)) return Counts::late;
        if (!__all_sync(0xffffffffu, good)) return Counts::lost;
        const u32 my_blocks = ceil_div(rows, args.tile.block_rows), my_units = ceil_div(my_blocks, args.tile.unit_blocks);
        u32 sum_blocks = my_blocks, sum_units = my_units;
#pragma unroll
        for (u32 d = 1; d < 32; d *= 2) {
            const u32 other_blocks = __shfl_up_sync(0xffffffffu, sum_blocks, d);
            const u32 other_units = __shfl_up_sync(0xffffffffu, sum_units, d);
            if (lane >= d) sum_blocks += other_blocks, sum_units += other_units;
        }
        if (e < local) {
            sums.rows[e] = rows;
            sums.first_block[e] = blocks + sum_blocks - my_blocks;
            sums.first_unit[e] = units + sum_units - my_units;
            for (u32 i = 0; i < my_units; ++i) {
                const u32 unit = sums.first_unit[e] + i;
                if (unit >= kUnitTable) break;
                sums.unit_block[unit] = sums.first_block[e] + i * args.tile.unit_blocks;
                sums.unit_expert[unit] = static_cast<u16>(e);
            }
        }
        blocks += __shfl_sync(0xffffffffu, sum_blocks, 31);
        units += __shfl_sync(0xffffffffu, sum_units, 31);
    }
    if (lane == 0) {
        sums.first_block[local] = blocks;
        sums.first_unit[local] = units;
    }
    chunks = __reduce_max_sync(0xffffffffu, chunks);
    if (lane == 0) c.s.num_chunks = chunks;
    __syncwarp();
    if (chunks == 1) return Counts::summed;
    ptx::fence_gpu();  // a count of a later chunk was stored after that chunk began, which is seen then
    return __any_sync(0xffffffffu, is_over(c)) ? Counts::late : Counts::summed;
}

// The schedule of host and device, but for publish: its tasks on the GPU are those of publish.cuh.
__device__ __forceinline__ ScheduleShape device_schedule_shape(const Context& c) {
    ScheduleShape shape = schedule_shape(c.args.shape, c.args.num_local_experts, c.s.num_tokens, c.args.tile);
    shape.publish_tasks = publish_tasks(c);
    shape.expand_parts = kExpandParts;
    shape.expand_ahead = c.args.panels_ahead;
    shape.expand_slots = c.args.panel_slots;
    return shape;
}

// {chunk 32, ticket 32}. Orders nothing, the counters do.
__device__ __forceinline__ u64 claim(const Context& c) {
    return ptx::add_relaxed_gpu_u64(reinterpret_cast<void*>(c.word(c.s.at.ticket, 0)), 1);
}

__device__ __forceinline__ u64 counter_address(const Context& c, const Wait& wait) {
    const Offsets& at = c.s.at;
    const u64 offset = wait.counter == Counter::arrived        ? at.arrived
                       : wait.counter == Counter::l1_done      ? at.l1_done
                       : wait.counter == Counter::l2_done      ? at.l2_done
                       : wait.counter == Counter::unit_l1_done ? at.unit_l1_done
                       : wait.counter == Counter::expanded     ? at.expanded
                       : wait.counter == Counter::panel_used   ? at.panel_used
                                                               : at.unit_l2_done;
    return c.word(offset, wait.index);
}

// By one thread: has what the task waits for come? Counts and tags are the roles' own matter.
__device__ __forceinline__ bool is_due(const Context& c, const Task& task) {
    for (u32 i = 0; i < task.num_waits; ++i) {
        const Wait& need = task.waits[i];
        if (need.counter == Counter::peers || need.counter == Counter::tags) continue;
        const u32 seen = ptx::load_acquire_gpu(reinterpret_cast<const void*>(counter_address(c, need)));
        if (static_cast<i32>(seen - need.target) < 0) return false;  // uses of panels may run over 32 bits
    }
    return true;
}

__device__ __forceinline__ void fill_record(const Context& c, const Task& task, TaskRecord& record) {
    const TileShape& tile = c.args.tile;
    const u32 within = task.block_in_unit * tile.block_rows, rows = c.s.at.unit_rows;
    record.phase = task.phase;
    record.index = task.index;
    record.expert = task.expert;
    record.row_block = task.row_block;
    record.first_row = task.first_row;
    record.num_rows = task.num_rows;
    record.unit = task.unit;
    record.ring1_row = task.unit % tile.ring1_units * rows + within;
    record.ring2_row = task.unit % tile.ring2_units * rows + within;
    // meta lives from the pull to the tags: longer than a row in either ring, never longer than in both together
    record.meta_row = task.unit % (tile.ring1_units + tile.ring2_units) * rows + within;
    record.panel = task.panel;
    record.part = task.part;
    record.uses = task.uses;
    record.weights = task.weights;
    record.num_waits = task.phase == Phase::l1 || task.phase == Phase::l2 ? task.num_waits : 0;
    for (u32 i = 0; i < record.num_waits; ++i) {
        record.counters[i] = counter_address(c, task.waits[i]);
        record.targets[i] = task.waits[i].target;
    }
}

// By one thread: have all consumers, the math warps among them, let go of every task handed on?
__device__ __forceinline__ bool math_is_idle(const Context& c) {
    const u32 n = c.s.scheduler.pushed - 1;  // the last one: they take tasks in order
    return n == ~0u || ptx::mbarrier_test(ptx::smem_address(&c.s.task_empty[n % kTaskSlots]), n / kTaskSlots & 1);
}

// By the thread that loads rows: waits for them. False: the call is lost.
__device__ __forceinline__ bool wait_rows(const Context& c, const TaskRecord& record) {
    const TraceScope trace(c, TraceRole::rows, static_cast<u32>(record.phase), record.expert, record.row_block, record.index, true);
    for (u32 i = 0; i < record.num_waits; ++i)
        if (!wait_counter(c, record.counters[i], record.targets[i], record.phase)) return false;
    ptx::fence_proxy_async();  // rows and h were stored by other CTAs; now TMA reads them
    return true;
}

// By one thread before the roles start.
__device__ __forceinline__ void init_scheduler(const Context& c) {
    SchedulerState& state = c.s.scheduler;
    state.cursor = CallSchedule::Cursor{};
    state.has_schedule = state.has_task = state.pushed = state.ended = state.started = state.finished = state.prefetched = 0;
    state.between = Between::none;
    state.claimed = 0;
    c.s.pull.total = c.s.pull.serial = 0;
#ifdef MEGAMOE_THROTTLE_GBPS
    c.s.pull.start = 0;
#endif
}

// One turn of the scheduler, by its converged warp: moves its pull, and hands on at most one task. A pull that is due goes
// to the math warps where they are idle, also beside one in flight here; else this warp starts it when it has none. It waits
// for nothing but the counts of the peers, before which this CTA has no tiles to work on: a pull in flight must go on.
// `started`: how many of the tasks handed on have their rows; a ticket is claimed when all have. So a CTA holds one task
// more than it works on, and none while it waits: another one would be free for it. `finished`: how many records are not
// needed any more.
__device__ __forceinline__ void turn_scheduler(const Context& c, u32* sums_memory, uint32_t staging, u32 lane, u32 started,
                                               u32 finished) {
    SchedulerState& state = c.s.scheduler;
    if (!kHasPuller && lane == 0) step_pull(c, staging);
    if (state.ended) return;
    auto lost = [&] { return __any_sync(0xffffffffu, c.aborted()); };  // anew each time: its register would be spilled
    if (!state.has_task && started == state.pushed && !lost()) {
        if (state.between != Between::none && !pass_chunk(c, sums_memory, lane, finished)) return;
        const TraceScope trace(c, TraceRole::scheduler, 0, 0, 0, state.pushed, lane == 0);
        u64 claimed = 0;
        if (lane == 0) {
            claimed = state.claimed != 0 ? state.claimed : claim(c);
            state.claimed = 0;
        }
        claimed = __shfl_sync(0xffffffffu, claimed, 0);
        const u32 ticket = static_cast<u32>(claimed), chunk = static_cast<u32>(claimed >> 32);
        if (chunk != c.s.chunk) {  // of a chunk that is over: void; of a later one: kept until this CTA is there
            if (lane == 0 && chunk > c.s.chunk) {
                state.claimed = claimed;
                state.between = Between::waits;
            }
            __syncwarp();
            return;
        }
        bool good = true;
        if (!state.has_schedule && ticket >= publish_tasks(c)) {
            ScheduleStorage sums = schedule_storage(state, sums_memory, c.args.num_local_experts);
            const Counts counts = build_schedule(c, sums, lane);
            good = counts == Counts::summed;
            if (counts == Counts::late && lane == 0) state.between = Between::waits;  // and the ticket is void
            if (good && lane == 0) {
                if (sums.first_unit[c.args.num_local_experts] > kUnitTable) {
                    sums.unit_block = nullptr;
                    sums.unit_expert = nullptr;
                }
                state.schedule = CallSchedule(device_schedule_shape(c), sums, CallSchedule::Filled{});
                state.has_schedule = 1;
            }
            __syncwarp();
        }
        if (lane == 0 && good) {
            state.task = state.has_schedule ? state.schedule.task(ticket, state.cursor) : CallSchedule::publish_task(ticket);
            state.has_task = 1;
        }
        __syncwarp();
        if (good && state.task.phase == Phase::end) {
            const bool first = state.task.index == device_schedule_shape(c).combine_tasks;  // of the tickets behind the last task
            if (first) add_received(c, sums_memory, lane);
            __syncwarp();
            if (lane == 0 && c.s.chunk + 1 < c.s.num_chunks) {
                state.has_task = 0;
                state.between = first ? Between::opens : Between::waits;
            }
            __syncwarp();
        }
    }
    if (state.has_task && (state.task.phase == Phase::pull || state.task.phase == Phase::expand) && !lost()) {
        bool by_math = false, due = false;
        if (lane == 0) {
            if (is_due(c, state.task)) {
                by_math = state.task.phase == Phase::expand || (!kThrottled && math_is_idle(c));
                due = by_math || !pull_in_flight(c);
            } else {  // no other role of this CTA need be waiting: the only look at the clock and at the peers
                const u32 looks = ++c.s.looks;
                if (looks % kLooksPerCheck == 0)
                    must_stop(c, looks / kLooksPerCheck, static_cast<u32>(state.task.phase), c.args.rank, 0, 0, kGraceNs);
            }
        }
        if (!__any_sync(0xffffffffu, due)) return;
        if (!__any_sync(0xffffffffu, by_math)) {
            const TileShape& tile = c.args.tile;
            const u32 within = state.task.block_in_unit * tile.block_rows, rows = c.s.at.unit_rows, unit = state.task.unit;
            start_pull(c, state.task, staging, unit % tile.ring1_units * rows + within,
                       unit % (tile.ring1_units + tile.ring2_units) * rows + within);
            if (lane == 0) state.has_task = 0;
            __syncwarp();
            return;
        }
    }
    if (lane == 0) {
        const u32 n = state.pushed;
        const bool ends = c.aborted() || (state.has_task && state.task.phase == Phase::end && !pull_in_flight(c));
        const bool gives = ends || (state.has_task && state.task.phase != Phase::end);
        if (gives && n - finished < kTaskSlots && ptx::mbarrier_test(ptx::smem_address(&c.s.task_empty[n % kTaskSlots]), (n / kTaskSlots & 1) ^ 1)) {
            if (ends) {
                c.s.tasks[n % kTaskSlots].phase = Phase::end;
                c.s.tasks[n % kTaskSlots].num_waits = 0;
                state.ended = 1;
            } else {
                fill_record(c, state.task, c.s.tasks[n % kTaskSlots]);
                state.has_task = 0;
            }
            ptx::mbarrier_arrive(ptx::smem_address(&c.s.task_full[n % kTaskSlots]));
            state.pushed = n + 1;
        }
    }
    __syncwarp();
}

}  // namespace megamoe::impls
