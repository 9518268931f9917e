// The finisher of `decode` and `wide` on a CPU: one warp, a task a call.
#include "mega_context.h"
#include "megamoe/impls/mega_moe/finish.cuh"

using namespace megamoe;
using namespace megamoe::impls;

using Shape = FinishShape<WIDE, BLOCK_ROWS>;

// Words of a row of results.
extern "C" u32 result_stride() { return Shape::kResultStride; }

static TaskRecord task_of(u32 index, u32 row, u32 num_rows) {
    TaskRecord task{};
    task.index = index, task.ring2_row = row, task.num_rows = num_rows;
    return task;
}

extern "C" const char* places(const MegaMoeArgs* args, u64* found) {
    return with_context(args, 0, [&](const Context& c) {
        if (emulated::current->index != 0) return;
        const u64 values[] = {c.s.at.ring2, c.s.at.ring2_scales, c.s.at.slots};
        std::copy(std::begin(values), std::end(values), found);
    });
}

extern "C" const char* finish_l1(const MegaMoeArgs* args, const float* result, u32 index, u32 row, u32 num_rows, u32 seed) {
    const TaskRecord task = task_of(index, row, num_rows);
    return with_context(args, seed, [&](const Context& c) { store_h<Shape>(c, task, result, threadIdx.x); });
}

// `given_up`: this CTA has stopped waiting.
extern "C" const char* finish_l2(const MegaMoeArgs* args, bool given_up, const RowFacts* facts, const float* result, u32 index, u32 num_rows, u32 seed) {
    const TaskRecord task = task_of(index, 0, num_rows);
    constexpr u32 kAt = (sizeof(SharedState) + 15) / 16 * 16, kBytes = Shape::kBlockRows * Shape::kResultStride * 4;
    return with_context(args, seed, [&](const Context& c) {
        float* shared = reinterpret_cast<float*>(emulated::block().shared + kAt);
        if (threadIdx.x == 0) {
            c.s.aborted = given_up;
            std::memcpy(shared, result, kBytes);
        }
        __syncwarp();
        store_slots<Shape>(c, task, facts, shared, threadIdx.x);
        __syncwarp();
        if (threadIdx.x == 0) std::memset(shared, 0x5a, kBytes);  // the next task may store its results
        await_slots();
    }, kAt + kBytes - sizeof(SharedState));
}
