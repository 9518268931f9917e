// Tiles of a grouped GEMM from the row counts of the groups, read on the device: any sizes, empty groups included.
#pragma once
#include "megamoe/ptx/types.cuh"

namespace megamoe::scheduler {

constexpr int kMaxGroups = 1024;

// Rows of group g in the operands (fewer than 2^31 rows in all): contiguous: starts[g] .. ends[g] of one matrix; masked: the first counts[g] of
// max_rows rows. `starts` null: masked, with `ends` as counts.
struct GroupedRows {
    const int* starts;
    const int* ends;
    int num_groups, max_rows;

    __device__ __forceinline__ int first(int g) const {
        return starts ? __ldg(starts + g) : g * max_rows;
    }
    __device__ __forceinline__ int count(int g) const {
        const int n = starts ? __ldg(ends + g) - __ldg(starts + g) : __ldg(ends + g);
        return n > 0 ? (n < max_rows ? n : max_rows) : 0;
    }
};

struct Tile {
    int group, m, n;  // row tile, column tile
    int first_row;    // of the tile in the operand
    int rows;         // left in the group from there
};

// Walks the tiles of one CTA in rising order: groups in order, within a group the row tiles of one column tile first,
// so that neighbouring CTAs share weights. `table`: shared memory, 3 ints a group and 1: first tiles (and their total),
// first rows, row counts.
template <int kTileM>
class GroupedTiles {
public:
    // By all threads of the CTA; the caller's next barrier publishes the table.
    static __device__ __forceinline__ void build(int* table, const GroupedRows& rows, int num_n_tiles) {
        if (threadIdx.x >= 32) return;
        int total = 0;
        for (int base = 0; base < rows.num_groups; base += 32) {
            const int g = base + static_cast<int>(threadIdx.x);
            const int count = g < rows.num_groups ? rows.count(g) : 0;
            int sum = (count + kTileM - 1) / kTileM * num_n_tiles;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, sum, d);
                if (threadIdx.x >= d) sum += other;
            }
            if (g < rows.num_groups) {
                table[g + 1] = total + sum;
                table[rows.num_groups + 1 + g] = rows.first(g);
                table[2 * rows.num_groups + 1 + g] = count;
            }
            total += __shfl_sync(0xffffffffu, sum, 31);
        }
        if (threadIdx.x == 0) table[0] = 0;
    }

    __device__ __forceinline__ GroupedTiles(const int* table, const GroupedRows& rows)
        : table_(table), rows_(rows), index_(blockIdx.x) {
        find();
    }
    __device__ __forceinline__ bool valid() const { return group_ < rows_.num_groups; }
    __device__ __forceinline__ void advance() {
        index_ += gridDim.x;
        find();
    }
    __device__ __forceinline__ int group() const { return group_; }
    // How many tiles this CTA has had before; divided out again to save a register.
    __device__ __forceinline__ uint32_t number() const { return static_cast<uint32_t>(index_) / gridDim.x; }
    __device__ __forceinline__ int first_row_of_group() const { return table_[rows_.num_groups + 1 + group_]; }
    __device__ __forceinline__ Tile tile() const {
        const int within = index_ - table_[group_];
        const int rows = table_[2 * rows_.num_groups + 1 + group_];
        const int num_m_tiles = (rows + kTileM - 1) / kTileM;
        Tile t;
        t.group = group_;
        t.n = within / num_m_tiles;
        t.m = within - t.n * num_m_tiles;
        t.first_row = table_[rows_.num_groups + 1 + group_] + t.m * kTileM;
        t.rows = rows - t.m * kTileM;
        return t;
    }

    // Between the two the group takes no register; it is found again by halving.
    __device__ __forceinline__ void put_aside() { group_ = 0; }
    __device__ __forceinline__ void take_up() {
        int last = rows_.num_groups - 1;
        while (group_ < last) {
            const int middle = (group_ + last) / 2;
            if (index_ < table_[middle + 1]) {
                last = middle;
            } else {
                group_ = middle + 1;
            }
        }
    }

private:
    __device__ __forceinline__ void find() {
        while (group_ < rows_.num_groups && index_ >= table_[group_ + 1]) ++group_;
    }

    const int* table_;
    const GroupedRows& rows_;
    int index_, group_ = 0;
};

}  // namespace megamoe::scheduler
