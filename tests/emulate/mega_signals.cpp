// The start of a CTA on a CPU, and signals of finished tiles: one warp, a task a call.
#include "mega_context.h"
#include "megamoe/impls/mega_moe/call.cuh"

using namespace megamoe;
using namespace megamoe::impls;

extern "C" const char* places(const MegaMoeArgs* args, u64* found) {
    return with_context(args, 0, [&](const Context& c) {
        if (emulated::current->index != 0) return;
        const Offsets& at = c.s.at;
        const u64 values[] = {at.l1_done, at.l2_done, at.unit_l1_done, at.unit_l2_done, at.tags, at.meta};
        std::copy(std::begin(values), std::end(values), found);
    });
}

// `second`: of linear 2. `given_up`: this CTA has stopped waiting.
extern "C" const char* signal(const MegaMoeArgs* args, bool second, bool given_up, u32 row_block, u32 unit, u32 meta_row, u32 num_rows, u32 seed) {
    TaskRecord task{};
    task.row_block = row_block, task.unit = unit, task.meta_row = meta_row, task.num_rows = num_rows;
    return with_context(args, seed, [&](const Context& c) {
        if (threadIdx.x == 0) c.s.aborted = given_up;
        __syncthreads();
        if (second) signal_l2(c, task, threadIdx.x);
        else signal_l1(c, task, threadIdx.x);
    });
}

// What every thread finds when a CTA has started: {base, whether the offsets are those of the arguments, generation, chunk,
// first token and tokens of the chunk, whether the call is lost, barriers that are as they must be, whether nothing else is
// under way}.
extern "C" const char* start(const MegaMoeArgs* args, u32 consumers, u64* found, u32 seed) {
    return with_context(args, seed, [&](const Context& c) {
        SharedState& s = c.s;
        if (threadIdx.x == 0) std::memset(&s, 0xa5, sizeof(s));
        __syncthreads();
        enter(c, consumers, 2);
        __syncthreads();
        if (threadIdx.x != THREADS - 1) return;
        auto is = [&](const u64& barrier, u32 count) {
            const emulated::Barrier* made = ptx::barrier_at(ptx::smem_address(&barrier));
            return made != nullptr && made->count == count;
        };
        u64 good = 0;
        for (u32 i = 0; i < kTaskSlots; ++i)
            good += is(s.task_full[i], 1) + is(s.task_empty[i], consumers) + is(s.rows_ready[i], 1) + is(s.tile_done[i], 2) + (s.done_rounds[i] == 0);
        for (u32 i = 0; i < kPullSlots; ++i) good += is(s.pull_full[i], 1);
        const bool idle = s.num_chunks == 1 && s.crowd == 0 && s.started == 0 && s.scheduler.pushed == 0 && s.pull.total == 0;
        const u64 values[] = {c.base(), std::memcmp(&s.at, &args->at, sizeof(Offsets)) == 0, s.generation, s.chunk,
                              s.first_token, s.num_tokens, c.aborted(), good, idle};
        std::copy(std::begin(values), std::end(values), found);
    });
}
