// Tiles of a grouped GEMM from the row counts of the groups, read on the device: any sizes, empty groups included.
#pragma once
#include "megamoe/ptx/types.cuh"

namespace megamoe::scheduler {

constexpr int kMaxGroups = 1024;

// Rows of group g in the operands: contiguous: starts[g] .. ends[g] of one matrix; masked: the first counts[g] of
// max_rows rows. `starts` null: masked, with `ends` as counts.
struct GroupedRows {
    const int* starts;
    const int* ends;
    int num_groups, max_rows;

    __device__ __forceinline__ int64_t first(int g) const {
        return starts ? static_cast<int64_t>(__ldg(starts + g)) : static_cast<int64_t>(g) * max_rows;
    }
    __device__ __forceinline__ int count(int g) const {
        const int n = starts ? __ldg(ends + g) - __ldg(starts + g) : __ldg(ends + g);
        return n > 0 ? (n < max_rows ? n : max_rows) : 0;
    }
};

struct Tile {
    int group, m, n;    // row tile, column tile
    int64_t first_row;  // of the tile in the operand
    int rows;           // left in the group from there
};

// Walks the tiles of one CTA in rising order: groups in order, within a group the row tiles of one column tile first,
// so that neighbouring CTAs share weights. `offsets`: shared memory, first tile of each group and the total.
template <int kTileM>
class GroupedTiles {
public:
    // By all threads of the CTA; the caller's next barrier publishes the table.
    static __device__ __forceinline__ void build(int* offsets, const GroupedRows& rows, int num_n_tiles) {
        if (threadIdx.x >= 32) return;
        int total = 0;
        for (int base = 0; base < rows.num_groups; base += 32) {
            const int g = base + static_cast<int>(threadIdx.x);
            int sum = g < rows.num_groups ? (rows.count(g) + kTileM - 1) / kTileM * num_n_tiles : 0;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, sum, d);
                if (threadIdx.x >= d) sum += other;
            }
            if (g < rows.num_groups) offsets[g + 1] = total + sum;
            total += __shfl_sync(0xffffffffu, sum, 31);
        }
        if (threadIdx.x == 0) offsets[0] = 0;
    }

    __device__ __forceinline__ GroupedTiles(const int* offsets, const GroupedRows& rows, int num_n_tiles)
        : offsets_(offsets), rows_(rows), num_n_tiles_(num_n_tiles), index_(blockIdx.x) {
        find();
    }
    __device__ __forceinline__ bool valid() const { return group_ < rows_.num_groups; }
    __device__ __forceinline__ void advance() {
        index_ += gridDim.x;
        find();
    }
    __device__ __forceinline__ int group() const { return group_; }
    __device__ __forceinline__ Tile tile() const {
        const int within = index_ - offsets_[group_];
        const int num_m_tiles = (offsets_[group_ + 1] - offsets_[group_]) / num_n_tiles_;
        Tile t;
        t.group = group_;
        t.n = within / num_m_tiles;
        t.m = within - t.n * num_m_tiles;
        t.first_row = rows_.first(group_) + static_cast<int64_t>(t.m) * kTileM;
        t.rows = rows_.count(group_) - t.m * kTileM;
        return t;
    }

private:
    __device__ __forceinline__ void find() {
        while (group_ < rows_.num_groups && index_ >= offsets_[group_ + 1]) ++group_;
    }

    const int* offsets_;
    const GroupedRows& rows_;
    int num_n_tiles_, index_, group_ = 0;
};

}  // namespace megamoe::scheduler
