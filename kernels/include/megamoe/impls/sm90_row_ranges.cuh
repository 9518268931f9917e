// Group index per row (-1: padding) -> first and end row of each group, for GroupedRows.
#pragma once
#include "megamoe/ptx/barrier.cuh"

namespace megamoe::impls {

// By one cluster, which is the whole grid. Rows of a group are neighbours; an index outside [0, num_groups) is padding;
// a group without rows gets 0 .. 0.
__device__ __forceinline__ void sm90_row_ranges(const int* row_groups, int num_rows, int num_groups, int* starts, int* ends) {
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (int g = first; g < num_groups; g += step) starts[g] = ends[g] = 0;
    ptx::cluster_sync();  // the zeros are older than what other CTAs of the cluster write from here on
    for (int i = first; i < num_rows; i += step) {
        const int g = row_groups[i];
        if (g < 0 || g >= num_groups) continue;
        if (i == 0 || row_groups[i - 1] != g) starts[g] = i;
        if (i + 1 == num_rows || row_groups[i + 1] != g) ends[g] = i + 1;
    }
}

}  // namespace megamoe::impls
