// Signals of finished tiles on a CPU: one warp, a task a call.
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
