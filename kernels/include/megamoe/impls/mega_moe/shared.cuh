// Shared memory of a CTA of the mega-kernel beside the mainloop's ring: tasks on their way from the scheduler to the
// other roles, the schedule's sums, the pulls in flight, and the flag that everyone watches.
#pragma once
#include "megamoe/impls/mega_moe/args.cuh"
#include "megamoe/ptx/barrier.cuh"
#include "megamoe/ptx/sync.cuh"
#include "megamoe/scheduler/schedule.h"

namespace megamoe::impls {

constexpr u32 kTaskSlots = 2;  // the one at work, the next; or, with a finisher, the one it finishes and the one at work
constexpr u32 kPullBytes = 4096;  // of one copy in flight; longer rows go in pieces
constexpr u32 kPullSlots = 3;     // copies in flight
constexpr u32 kPullRows = 32;     // rows of a pull task, one a lane

// One task as the roles see it.
struct TaskRecord {
    Phase phase;
    u32 index, expert, row_block, first_row, num_rows, unit;
    u32 ring1_row, ring2_row, meta_row;  // first rows of the block in the rings
    u32 num_waits, targets[3];
    u32 panel, part, uses;               // of L1, L2 and expand: see Task
    Phase weights;
    u64 counters[3];                     // what L1 and L2 wait for before they read rows: addresses
};

// Of a call whose choices one publish task sorts: experts whose counts fit here, and choices; fewer where it does it all.
constexpr u32 kSmallExperts = 512, kMaxSortedEntries = 4096, kMaxAloneEntries = 256;

// The pull in flight that one thread moves by bulk copies. With a puller the scheduler fills it and sets `total` last.
struct PullState {
    u64 to;               // row 0 of the task in the ring
    u64 arrived;          // counter to add to at the end
    u32 total;            // pieces of the task, 0: none in flight
    u32 loaded, stored;   // pieces so far
    u32 serial;           // pieces of earlier tasks: slots and parities go on
    u64 from[kPullRows];  // rows on their sources
#ifdef MEGAMOE_TRACE
    TraceEvent event;     // of the task in flight
#endif
#ifdef MEGAMOE_THROTTLE_GBPS
    u64 start;            // when the next pieces may be asked for, 0: not claimed yet
#endif
};

// Where the scheduler stands when it has no ticket of the chunk at work.
enum class Between : u32 {
    none = 0,
    waits = 1,  // for the next chunk
    opens = 2,  // the same, and it opens the next chunk when all tasks of this one have ended
};

using CallSchedule = BasicSchedule<kExpandParts != 0>;

// The scheduler's own: kept here, because its warp has other work in its registers.
constexpr u32 kUnitTable = 320;  // units that are looked up; where there are more, all are searched
struct SchedulerState {
    u32 unit_block[kUnitTable + 1];
    u16 unit_expert[kUnitTable];
    CallSchedule schedule;
    CallSchedule::Cursor cursor;
    Task task;            // decoded, not yet handed on
    u32 has_schedule, has_task, pushed, ended;
    Between between;
    u64 claimed;          // a ticket of a later chunk, for when this CTA is there; 0: none
    u32 started;          // tasks whose rows have come, or that have none; of an instance without a row loader
    u32 prefetched;       // tasks whose first weights were asked for
    u32 finished;         // tasks whose end has been signalled, or that have none to signal
};

// Why the CTA stops.
enum class FaultStatus : u32 { none = 0, timeout = 1, aborted = 2, shape = 3, overflow = 4 };
struct Fault {
    FaultStatus status;
    u32 phase, whom;
    u64 seen, expected;
};

struct alignas(16) SharedState {
    u64 task_full[kTaskSlots], task_empty[kTaskSlots];  // barriers
    u64 pull_full[kPullSlots];                          // barriers
    u64 rows_ready[kTaskSlots], tile_done[kTaskSlots];  // barriers, of an instance whose scheduler waits for rows and signals
    TaskRecord tasks[kTaskSlots];
    PullState pull;
    SchedulerState scheduler;
    Offsets at;
    u32 counts[kSmallExperts + 1];
    float amax[2][16];
    u32 aside[16][4];  // by warp: one address, so that ptxas keeps none of them in a register
    Fault fault;
    u64 base;  // of this rank's workspace
    u64 pulled_from[kPullRows];  // rows on their sources, of a pull by the math warps: the scheduler's may go on beside it
    u64 deadline;
    u32 started;  // tasks that the row loader has got the rows of; of an instance with one
    u32 done_rounds[kTaskSlots];  // tasks of tiles that ended in a slot: rounds of tile_done, and of rows_ready for the next
    u32 generation, aborted, flag, looks;
    u32 chunk, num_chunks;        // of the call: the one at work; all of them, once the counts are there
    u32 first_token, num_tokens;  // of this rank in the chunk at work
    u32 math_warps;
    u32 crowd;                    // a rank that wanted to bring more than the bound, plus 1; 0: none
    u32 events;  // so far, those that found no room among them
#ifdef MEGAMOE_TRACE
    u64 cycles[kTraceSums];
    u64 began;
#endif
};

// What every role carries: arguments in constant memory, state and sums in shared memory.
struct Context {
    const MegaMoeArgs& args;
    SharedState& s;

    __device__ __forceinline__ u64 base() const { return s.base; }
    __device__ __forceinline__ u32 bank() const { return s.generation % kBanks; }
    __device__ __forceinline__ u64 peer(u32 rank) const { return __ldg(args.bases + rank); }
    __device__ __forceinline__ bool aborted() const {
        return ptx::load_shared_volatile(ptx::smem_address(&s.aborted)) != 0;
    }
    // Waits for a barrier of this CTA, or for the end of all waiting. Whoever returns early goes on with what it finds:
    // the tasks run to their end, so that no barrier misses a warp, and their results are thrown away.
    __device__ __forceinline__ void wait_barrier(uint32_t bar, uint32_t parity) const {
        while (!ptx::mbarrier_try_wait(bar, parity))  // a try takes a while
            if (aborted()) return;
    }
    __device__ __forceinline__ u64 word(u64 offset, u32 index) const { return base() + offset + index * sizeof(u32); }
};

// What the sources told of this rank's experts: [num_ranks][max_local_experts].
__device__ __forceinline__ const ExpertCount* counts_of(const Context& c) {
    return reinterpret_cast<const ExpertCount*>(c.base() + c.s.at.counts) +
           static_cast<u64>(c.bank()) * c.args.limits.num_ranks * c.args.limits.max_local_experts;
}

// From here to the end of the scope, as an event of the trace; nothing unless compiled with MEGAMOE_TRACE.
class TraceScope {
public:
#ifdef MEGAMOE_TRACE
    __device__ __forceinline__ TraceScope(const Context& c, TraceRole role, u32 phase, u32 expert, u32 row_block, u32 index, bool on)
        : c_(c), event_{role, phase, expert, row_block, index, c.s.generation, ptx::global_timer(), 0}, on_(on) {}
    __device__ __forceinline__ ~TraceScope() {
        if (on_) record(c_, event_);
    }
    // Ends an event, wherever it began.
    __device__ __forceinline__ static void record(const Context& c, TraceEvent& event) {
        event.end = ptx::global_timer();
        const u32 n = atomicAdd(&c.s.events, 1);
        if (n < kTraceEvents - kTraceSums) c.args.trace[blockIdx.x * kTraceEvents + n] = event;
    }

private:
    const Context& c_;
    TraceEvent event_;
    bool on_;
#else
    __device__ __forceinline__ TraceScope(const Context&, TraceRole, u32, u32, u32, u32, bool) {}
#endif
};

// The scheduler's pull as an event of the trace, from the look-up of its rows to their arrival, by the thread that moves
// them; nothing unless compiled with MEGAMOE_TRACE.
__device__ __forceinline__ void begin_pull_event(const Context& c, const Task& task) {
#ifdef MEGAMOE_TRACE
    c.s.pull.event = TraceEvent{TraceRole::pull, static_cast<u32>(Phase::pull), task.expert, task.row_block, task.index,
                                c.s.generation, ptx::global_timer(), 0};
#endif
}
__device__ __forceinline__ void end_pull_event(const Context& c) {
#ifdef MEGAMOE_TRACE
    TraceScope::record(c, c.s.pull.event);
#endif
}

// Cycles from here to the end of the scope, added to one of the CTA's sums; nothing unless compiled with MEGAMOE_TRACE.
class CycleScope {
public:
#ifdef MEGAMOE_TRACE
    __device__ __forceinline__ CycleScope(const Context& c, u32 index, bool on) : c_(c), index_(index), on_(on), start_(ptx::cycle_counter()) {}
    __device__ __forceinline__ ~CycleScope() {
        if (on_) c_.s.cycles[index_] += ptx::cycle_counter() - start_;
    }

private:
    const Context& c_;
    u32 index_;
    bool on_;
    u64 start_;
#else
    __device__ __forceinline__ CycleScope(const Context&, u32, bool) {}
#endif
};

// Consumers of tasks: they never leave before the record of the end, which always comes.
class TaskReader {
public:
    __device__ __forceinline__ const TaskRecord& next(const Context& c) const {
        ptx::mbarrier_wait(ptx::smem_address(&c.s.task_full[count_ % kTaskSlots]), count_ / kTaskSlots & 1);
        return c.s.tasks[count_ % kTaskSlots];
    }
    __device__ __forceinline__ u32 slot() const { return count_ % kTaskSlots; }
    __device__ __forceinline__ const TaskRecord& task(const Context& c) const { return c.s.tasks[slot()]; }
    // Between the two it takes no register. `at`: a word of shared memory of this warp.
    __device__ __forceinline__ void put_aside(uint32_t at) const { ptx::store_shared_volatile(at, count_); }
    __device__ __forceinline__ void take_up(uint32_t at) { count_ = ptx::load_shared_volatile(at); }
    // By every lane of every consuming warp, after its last look at the record.
    __device__ __forceinline__ void release(const Context& c) {
        __syncwarp();
        if (ptx::elect_one()) ptx::mbarrier_arrive(ptx::smem_address(&c.s.task_empty[count_ % kTaskSlots]));
        ++count_;
    }
    // By the only thread of a consuming warp.
    __device__ __forceinline__ void release_by_one(const Context& c) {
        ptx::mbarrier_arrive(ptx::smem_address(&c.s.task_empty[count_ % kTaskSlots]));
        ++count_;
    }

private:
    u32 count_ = 0;
};

}  // namespace megamoe::impls
