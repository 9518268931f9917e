// Arguments of the grouped GEMM kernels, one block passed by value; the host builds the same bytes.
#pragma once
#include "megamoe/ptx/memory.cuh"
#include "megamoe/scheduler/grouped_rows.cuh"

namespace megamoe::impls {

// D[rows, n] = (X scaled) (W of the row's group)^T, BF16, row-major.
struct GroupedGemmArgs {
    ptx::TensorMap x;         // E4M3 [rows, k]
    ptx::TensorMap w;         // FP8 weights [groups * n, k] as five dimensions (rows permuted in groups of 32), else unused
    const uint8_t* packed;    // FP4 weights, `sm90_ss` or `sm90_rs`
    const float* w_scales;    // FP4: [groups, n]; FP8: [groups, ceil(n / 128), ceil(k / 128)]
    const float* x_scales;    // block128: [ceil(k / 128), x_scales_stride], 16-byte aligned; token: [rows]
    uint16_t* d;              // BF16, rows d_stride elements apart
    int64_t d_stride;
    int64_t x_scales_stride;  // a multiple of 4
    scheduler::GroupedRows rows;
    int n, num_k_blocks;
    int num_x_scales;  // rows rounded up to a multiple of 4
};

// Bytes of the scales of `rows` rows from the 16-byte boundary before `row` on, cut behind the last row's 16 bytes.
__device__ __forceinline__ uint32_t scale_bytes(const GroupedGemmArgs& args, int row, int rows) {
    const int left = args.num_x_scales - (row & ~3);
    const int wanted = ((row & 3) + rows + 3) & ~3;
    return (left < wanted ? left : wanted) * 4;
}
// Starts the copy of these scales for K step k.
__device__ __forceinline__ void load_scales(const GroupedGemmArgs& args, uint32_t dst, int row, int k, uint32_t bytes,
                                            uint32_t bar) {
    ptx::bulk_load(dst, args.x_scales + k * args.x_scales_stride + (row & ~3), bytes, bar);
}

}  // namespace megamoe::impls
