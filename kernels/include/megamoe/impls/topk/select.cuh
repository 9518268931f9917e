// Finding the rank-th largest of many words by histograms of 2048 bins.
#pragma once
#include "megamoe/impls/topk/stream.cuh"

namespace megamoe::impls {

inline constexpr int kBinBits = 11, kBins = 1 << kBinBits;

// The values that are compared, as unsigned words of the same order: 0 of either sign is one value, NaN of either sign
// is the largest, and what isn't above kNever (-inf, or nothing) is never chosen.
template <typename Value>
struct Order;
template <>
struct Order<float> {
    static constexpr int kBits = 32;
    static constexpr uint32_t kNever = 0x007fffffu, kLowest = 0x00800000u, kInfinity = 0xff800000u;
    __device__ __forceinline__ static uint32_t key(float x) {
        const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));  // -0 becomes 0, NaN the canonical 0x7fffffff
        return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
    // The smallest value that a key stands for.
    __device__ __forceinline__ static float value(uint32_t key) {
        return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
    }
};
template <>
struct Order<Bf16> {
    static constexpr int kBits = 16;
    static constexpr uint32_t kNever = 0x007fu, kLowest = 0x0080u, kInfinity = 0xff80u;
    __device__ __forceinline__ static uint32_t key(float x) { return Order<float>::key(x) >> 16; }
    __device__ __forceinline__ static float value(uint32_t key) {
        return __uint_as_float((key & 0x8000u ? key ^ 0x8000u : ~key & 0xffffu) << 16);
    }
};

struct Bin {
    uint32_t index;  // the bin of the rank-th largest
    uint32_t above;  // elements in higher bins
    uint32_t count;  // elements in the bin; 0: there are fewer than rank in all
};

struct SelectShared {
    uint32_t histogram[kBins];  // zero between uses
    uint32_t warp_sums[2 * 32];
    Bin bin;
};

// Returns the bin of the rank-th largest and zeroes the histogram; begins and ends with a barrier of the block.
template <int kThreads>
__device__ __forceinline__ Bin take_bin(SelectShared& shared, uint32_t rank) {
    constexpr int kOwn = kBins / kThreads;
    static_assert(kOwn * kThreads == kBins && kOwn >= 2, "every thread owns the same number of bins");
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t* own = shared.histogram + kBins - kOwn * (threadIdx.x + 1);  // descending with the thread
    __syncthreads();
    if (threadIdx.x == 0) shared.bin.count = 0;
    uint32_t counts[kOwn], sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
        const uint2 two = *reinterpret_cast<uint2*>(own + i);
        *reinterpret_cast<uint2*>(own + i) = make_uint2(0, 0);
        counts[i] = two.x, counts[i + 1] = two.y;
        sum += two.x + two.y;
    }
    uint32_t scanned = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t below = __shfl_up_sync(kAllLanes, scanned, step);
        scanned += lane >= step ? below : 0;
    }
    if (lane == 31) shared.warp_sums[warp] = scanned;
    __syncthreads();
    const uint32_t other = lane < warp ? shared.warp_sums[lane] : 0;
    uint32_t above = scanned - sum + __reduce_add_sync(kAllLanes, other);
    if (above < rank && rank <= above + sum) {
#pragma unroll
        for (int i = kOwn - 1; i >= 0; --i) {
            if (above < rank && rank <= above + counts[i]) {
                shared.bin = Bin{static_cast<uint32_t>(kBins - kOwn * (threadIdx.x + 1) + i), above, counts[i]};
            }
            above += counts[i];
        }
    }
    __syncthreads();
    return shared.bin;
}

// Counts words by bin, for a round of `narrow`. (No generic lambdas here: the NVRTC of CUDA 13.0 takes them for host
// functions.)
struct Counter {
    uint32_t *histogram, base, num_bins;
    int shift;
    __device__ __forceinline__ void operator()(bool is_valid, uint32_t word) const {
        const uint32_t bin = (word - base) >> shift;
        if (is_valid && word >= base && bin < num_bins) atomicAdd(histogram + bin, 1u);
    }
};

// Where the rank-th largest lies: of the words >= low, `count` lie in its bin and `above` above that.
struct Place {
    uint32_t low, rank, above, count;  // rank: within the bin
    bool is_found;                     // there are rank words at all
};

// Narrows down where the rank-th largest word lies, round by round, until its bin holds nothing that isn't chosen, holds
// one word, or stop(place) is satisfied.
//
// walk(counter) calls counter(is_valid, word) for every element; all words lie in [low, low + 2^bits).
template <int kThreads, class Walk, class Stop>
__device__ __forceinline__ Place narrow(SelectShared& shared, Walk walk, uint32_t low, int bits, uint32_t rank,
                                        Stop stop) {
    int shift = max(0, bits - kBinBits);
    uint32_t num_bins = 1u << (bits - shift);
    Place place{low, rank, 0, 0, true};
#pragma unroll 1
    for (;;) {
        const uint32_t base = place.low;
        walk(Counter{shared.histogram, base, num_bins, shift});
        const Bin bin = take_bin<kThreads>(shared, place.rank);
        place.is_found = bin.count != 0;
        if (!place.is_found) return place;
        place.low = base + (bin.index << shift);
        place.rank -= bin.above, place.above += bin.above, place.count = bin.count;
        if (bin.count == place.rank || shift == 0 || stop(place)) return place;
        const int next = max(0, shift - kBinBits);
        num_bins = 1u << (shift - next);
        shift = next;
    }
}

// What is chosen: keys above `key`, and those equal to it up to column `column`.
struct Cut {
    uint32_t key;
    int column;
    __device__ __forceinline__ bool takes(uint32_t other, int at) const {
        return other > key || (other == key && at <= column);
    }
};

// Makes the cut at a place that `narrow` found among keys; walk(visit) calls visit(is_valid, key, column) as above.
template <int kThreads, class Walk>
__device__ __forceinline__ Cut make_cut(SelectShared& shared, Walk walk, const Place& place, int first_column,
                                        int length) {
    if (place.count == place.rank) return Cut{place.low == 0 ? 0 : place.low - 1, -1};
    // more equal keys than wanted: the lower columns, that is the largest distances from the end
    const int last = first_column + length - 1;
    const Place among = narrow<kThreads>(
        shared,
        [&](const Counter& counter) {
            walk([&](bool is_valid, uint32_t key, int column) {
                counter(is_valid && key == place.low, static_cast<uint32_t>(last - column));
            });
        },
        0, 32 - __clz(length), place.rank, [](const Place&) { return false; });
    return Cut{place.low, last - static_cast<int>(among.low)};
}

}  // namespace megamoe::impls
