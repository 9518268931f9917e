// What the finisher's warp of `decode` and `wide` does with the results of a tile: quantised h into ring 2, rows of linear 2
// into the slots on their sources. Of h up to 31 rows behind the last are read and dropped, within the block.
#pragma once
#include "megamoe/impls/mega_moe/activate.cuh"
#include "megamoe/impls/mega_moe/throttle.cuh"

namespace megamoe::impls {

template <bool kWide, u32 kBlockRows_>
struct FinishShape {
    static constexpr u32 kBlockRows = kBlockRows_;
    static constexpr u32 kResultStride = 132;  // words of a row in shared memory: 128 FP32 or 256 BF16, and 4 against bank conflicts
    static constexpr u32 kQuantizedAtOnce = kWide ? 4 : 2;  // rows at once, to hide what each waits for
    static constexpr u32 kLanesPerRow = kWide ? 1 : 4;  // that look for a row's largest value
};

// h of an L1 task: a scale for the 128 columns of each row, and E4M3.
template <class Shape>
__device__ __forceinline__ void store_h(const Context& c, const TaskRecord& task, const float* result, u32 lane) {
    const u64 columns = align_up(c.args.shape.intermediate, 128);
    u8* h = reinterpret_cast<u8*>(c.base() + c.s.at.ring2) + task.ring2_row * columns + task.index * 128 + lane * 4;
    float* scales = reinterpret_cast<float*>(c.base() + c.s.at.ring2_scales) + static_cast<u64>(task.ring2_row) * ceil_div(c.args.shape.intermediate, 128) + task.index * Shape::kBlockRows;
    const u32 num_rows = task.num_rows;
    constexpr u32 kChunk = 32 / Shape::kLanesPerRow;
#pragma unroll 1
    for (u32 first = 0; first < num_rows; first += kChunk) {
        const float* mine = result + (first + lane / Shape::kLanesPerRow) * Shape::kResultStride;  // rows past the last are read, and dropped
        float amax = 0.f;  // NaN is no magnitude: fmaxf drops it
#pragma unroll 4
        for (u32 j = lane % Shape::kLanesPerRow; j < 32; j += Shape::kLanesPerRow) {
            const float4 v = *reinterpret_cast<const float4*>(mine + 4 * j);
            amax = fmaxf(amax, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
        }
#pragma unroll
        for (u32 d = 1; d < Shape::kLanesPerRow; d *= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, d));
        const float scale = e4m3_scale(amax), my_inverse = __fdiv_rn(1.0f, scale);
        if (lane % Shape::kLanesPerRow == 0 && first + lane / Shape::kLanesPerRow < num_rows) scales[first + lane / Shape::kLanesPerRow] = scale;
#pragma unroll 1
        for (u32 row = 0; row < kChunk && first + row < num_rows; row += Shape::kQuantizedAtOnce) {
            float4 v[Shape::kQuantizedAtOnce];
#pragma unroll
            for (u32 i = 0; i < Shape::kQuantizedAtOnce; ++i)
                v[i] = *reinterpret_cast<const float4*>(result + (first + row + i) * Shape::kResultStride + 4 * lane);
#pragma unroll
            for (u32 i = 0; i < Shape::kQuantizedAtOnce; ++i) {
                const float inverse = __shfl_sync(0xffffffffu, my_inverse, (row + i) * Shape::kLanesPerRow);
                const u32 bytes = quantize4(v[i].x, v[i].y, v[i].z, v[i].w, inverse);
                if (first + row + i < num_rows) ptx::store_global_u32(h + (first + row + i) * columns, bytes);
            }
        }
    }
    ptx::fence_proxy_async();  // h, stored by threads, is read by TMA of other CTAs
}

// Rows of an L2 task, 256 columns of each, into the slots on their sources: bulk copies, each lane asks for those of its rows.
// They have read the results at the end, but need not have arrived: see await_slots.
template <class Shape>
__device__ __forceinline__ void store_slots(const Context& c, const TaskRecord& task, const RowFacts* facts, const float* result, u32 lane) {
    if (__any_sync(0xffffffffu, c.aborted())) return;  // then the facts may be of nothing, and lead anywhere
    const u32 column = task.index * 256, bytes = 2 * min_of(256u, c.args.shape.hidden - column);
#pragma unroll 1
    for (u32 first = 0; first < task.num_rows; first += 32) {
        const u32 row = first + lane;
        wait_for_link(c, min_of(32u, task.num_rows - first) * 512);
        if (row >= task.num_rows) continue;
        const u64 to = slot_address(c, facts[row]) + column * 2;
        ptx::bulk_store(reinterpret_cast<void*>(to), ptx::smem_address(result + row * Shape::kResultStride), bytes);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read_all();
}

// By the warp of store_slots: waits until its rows are where they belong.
__device__ __forceinline__ void await_slots() {
    ptx::bulk_wait_all();
    ptx::fence_proxy_async();  // the tags follow by the ordinary path
    __syncwarp();
}

}  // namespace megamoe::impls
