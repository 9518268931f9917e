// Arguments of the grouped GEMM kernels, one block passed by value; the host builds the same bytes.
#pragma once
#include "megamoe/ptx/memory.cuh"
#include "megamoe/scheduler/grouped_rows.cuh"

namespace megamoe::impls {

// D[rows, n] = (X scaled) (W of the row's group)^T, BF16, row-major.
struct GroupedGemmArgs {
    ptx::TensorMap x;         // E4M3 [rows, k]
    ptx::TensorMap x_scales;  // FP32 [ceil(k / 128), rows rounded up to 4], block128 scales only
    ptx::TensorMap w;         // FP8 weights [groups * n, k] as five dimensions (rows permuted in groups of 32), else unused
    const uint8_t* packed;    // FP4 weights, `sm90_ss` or `sm90_rs`
    const float* w_scales;    // FP4: [groups, n]; FP8: [groups, ceil(n / 128), ceil(k / 128)]
    const float* token_scales;  // [rows], token scales only
    uint16_t* d;                // BF16, rows d_stride elements apart
    int64_t d_stride;
    scheduler::GroupedRows rows;
    int n, num_k_blocks;
};

}  // namespace megamoe::impls
