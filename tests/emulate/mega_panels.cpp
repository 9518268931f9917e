// The expansion of weights on a CPU: math warps and loaders of `expanded`, and a thread that hands the tasks on.
#include "mega_context.h"
#include "megamoe/impls/mega_moe/expanded.cuh"

using namespace megamoe;
using namespace megamoe::impls;

constexpr u32 kRingAt = (sizeof(SharedState) + 1023) / 1024 * 1024;
constexpr u32 kBeside = kRingAt - sizeof(SharedState) + expanded::kRingBytes;

extern "C" const char* places(const MegaMoeArgs* args, u64* found) {
    return with_context(args, 0, [&](const Context& c) {
        if (threadIdx.x == 0) found[0] = c.s.at.expanded, found[1] = c.s.at.panel_used;
    });
}

// Words of a task: weights, expert, index, panel, part.
extern "C" const char* expand_tasks(const MegaMoeArgs* args, const u32* tasks, u32 count, u32 seed) {
    using namespace expanded;
    return with_context(args, seed, [&](const Context& c) {
        const Ring ring(kRingAt, nullptr, c);
        const u32 warp = threadIdx.x / 32;
        if (threadIdx.x == 0) {
            emulated::block().named[1].threads = kMathThreads;
            for (u32 i = 0; i < kTaskSlots; ++i) {
                ptx::mbarrier_init(ptx::smem_address(&c.s.task_full[i]), 1);
                ptx::mbarrier_init(ptx::smem_address(&c.s.task_empty[i]), kMathThreads / 32 + kLoadWarps);
            }
            ring.init();
        }
        __syncthreads();
        if (warp < kMathThreads / 32) return math_role<Instance>(c, ring);
        if (threadIdx.x % 32 != 0) return;
        if (warp == kMathThreads / 32) return load_role<false>(c, ring);
        if (warp == kMathThreads / 32 + 1) return load_role<true>(c, ring);
        if (warp != kThreads / 32 - 1) return;
        for (u32 n = 0; n <= count; ++n) {
            ptx::mbarrier_wait(ptx::smem_address(&c.s.task_empty[n % kTaskSlots]), (n / kTaskSlots & 1) ^ 1);
            TaskRecord& record = c.s.tasks[n % kTaskSlots] = TaskRecord{};
            record.phase = n == count ? Phase::end : Phase::expand;
            if (n != count) {
                const u32* words = tasks + 5 * n;
                record.weights = static_cast<Phase>(words[0]);
                record.expert = words[1], record.index = words[2], record.panel = words[3], record.part = words[4];
            }
            ptx::mbarrier_arrive(ptx::smem_address(&c.s.task_full[n % kTaskSlots]));
        }
    }, kBeside);
}
