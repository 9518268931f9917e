// Group index per row (-1: padding) -> first and end row of each group, for GroupedRows.
#pragma once
#include "megamoe/ptx/types.cuh"

namespace megamoe::impls {

// `starts`, `ends` [num_groups] zeroed before; rows of a group are neighbours; an index outside [0, num_groups) is padding.
__device__ __forceinline__ void sm90_row_ranges(const int* row_groups, int num_rows, int num_groups, int* starts, int* ends) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < num_rows; i += gridDim.x * blockDim.x) {
        const int g = row_groups[i];
        if (g < 0 || g >= num_groups) continue;
        if (i == 0 || row_groups[i - 1] != g) starts[g] = i;
        if (i + 1 == num_rows || row_groups[i + 1] != g) ends[g] = i + 1;
    }
}

}  // namespace megamoe::impls
