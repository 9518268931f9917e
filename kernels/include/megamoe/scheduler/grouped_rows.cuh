// Tiles of a grouped GEMM from the row counts of the groups, read on the device: any sizes, empty groups included.
#pragma once
#include "megamoe/ptx/memory.cuh"

namespace megamoe::scheduler {

constexpr int kMaxGroups = 1024;

// Rows of the groups in the operands (fewer than 2^31 - 1024 in all). Contiguous: one matrix of max_rows rows whose
// groups row_groups names. Masked (row_groups null): the first counts[g] of the max_rows rows of matrix g, all without
// counts.
struct GroupedRows {
    const int* row_groups;
    const int* counts;
    int num_groups, max_rows;
};

// Group index per row -> first and end row of each group, in shared memory; by all threads of the CTA, whole warps.
// Rows of a group are neighbours, an index outside [0, num_groups) is no group, a group without rows gets 0 .. 0.
// Every CTA finds them by itself, so most rows are left unread: a segment lies within a group when the rows at its two
// ends do; a warp reads the others whole. Segments of a warp are far apart, so that a tail of no group is shared out.
__device__ __forceinline__ void find_group_rows(const GroupedRows& rows, int* first, int* end) {
    constexpr int kSegment = 128;
    const int warps = static_cast<int>(blockDim.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    auto group_at = [&](int row) {
        if (row < 0 || row >= rows.max_rows) return -1;
        const int g = __ldg(rows.row_groups + row);
        return static_cast<uint32_t>(g) < static_cast<uint32_t>(rows.num_groups) ? g : -1;
    };
    for (int g = threadIdx.x; g < rows.num_groups; g += blockDim.x) first[g] = end[g] = 0;
    __syncthreads();
    // Segment s: is row i in another group than row i - 1, for i in 128 s .. 128 s + 127; the end counts as a row.
    const int num_segments = rows.max_rows / kSegment + 1;
    for (int base = 0; base < num_segments; base += static_cast<int>(blockDim.x)) {
        const int mine = base + lane * warps + warp;
        bool open = false;
        if (mine < num_segments) {
            const int left = group_at(kSegment * mine - 1);
            open = left < 0 || left != group_at(kSegment * mine + kSegment - 1);
        }
        for (uint32_t left = __ballot_sync(0xffffffffu, open); left != 0; left &= left - 1) {
            const int begin = kSegment * (base + (__ffs(static_cast<int>(left)) - 1) * warps + warp) + lane;
            int before[kSegment / 32], here[kSegment / 32];
#pragma unroll
            for (int j = 0; j < kSegment / 32; ++j) {
                before[j] = group_at(begin + 32 * j - 1);
                here[j] = group_at(begin + 32 * j);
            }
#pragma unroll
            for (int j = 0; j < kSegment / 32; ++j) {
                if (before[j] == here[j]) continue;
                if (before[j] >= 0) end[before[j]] = begin + 32 * j;
                if (here[j] >= 0) first[here[j]] = begin + 32 * j;
            }
        }
    }
    __syncthreads();
}

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
    // By all threads of the CTA, whole warps; the caller's next barrier publishes the table.
    static __device__ __forceinline__ void build(int* table, const GroupedRows& rows, int num_n_tiles) {
        int* first = table + rows.num_groups + 1;
        int* counts = first + rows.num_groups;
        if (rows.row_groups) find_group_rows(rows, first, counts);
        if (threadIdx.x >= 32) return;
        int total = 0;
        for (int base = 0; base < rows.num_groups; base += 32) {
            const int g = base + static_cast<int>(threadIdx.x);
            int count = 0;
            if (g < rows.num_groups) {
                if (rows.row_groups) {
                    count = counts[g] - first[g];
                } else {
                    const int wanted = rows.counts ? __ldg(rows.counts + g) : rows.max_rows;
                    count = wanted < rows.max_rows ? wanted : rows.max_rows;
                    first[g] = g * rows.max_rows;
                }
                count = count > 0 ? count : 0;
                counts[g] = count;
            }
            int sum = (count + kTileM - 1) / kTileM * num_n_tiles;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, sum, d);
                if (threadIdx.x >= d) sum += other;
            }
            if (g < rows.num_groups) table[g + 1] = total + sum;
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
    // The same with the place, which lies in 4 bytes of shared memory at `word`, one for each warp; by whole warps.
    __device__ __forceinline__ void put_aside(uint32_t word) {
        if (threadIdx.x % 32 == 0) ptx::store_shared_u32(word, static_cast<uint32_t>(index_));
        index_ = group_ = 0;
    }
    __device__ __forceinline__ void take_up(uint32_t word) {
        if (threadIdx.x % 32 == 0) index_ = static_cast<int>(ptx::load_shared_u32(word));
        index_ = __shfl_sync(0xffffffffu, index_, 0);
        take_up();
    }
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
