// The k largest of each row's window, as column indices: one block, or one cluster of blocks, a row.
//
// 1. A sample of the row says above which value somewhat more than k elements lie.
// 2. One pass over the row collects these into shared memory (kCapacity of them fit).
// 3. Histograms over the collected find the exact cut; what lies above it is written.
// Where the sample was wrong (fewer than k, or too many), histograms over the row itself find the threshold, and where
// too many elements equal it, the row is read once more and written directly. Nothing depends on the sample but time.
#pragma once
#include "megamoe/impls/topk/select.cuh"
#include "megamoe/ptx/barrier.cuh"
#include "megamoe/ptx/cluster.cuh"

namespace megamoe::impls {

struct TopkArgs {
    const void* logits;
    int* out;           // [rows, k]
    const int* starts;  // [rows] or null: 0
    const int* ends;    // [rows] or null: num_columns
    const int* shifts;  // [rows] or null: added to every index
    int64_t row_stride, out_stride;  // elements
    int num_columns, k;
};

template <int kCapacity>
struct TopkShared {
    uint2 candidates[kCapacity];  // bits of the value, column
    SelectShared select;
    uint32_t count, written, top;
};

template <typename Value, int kThreads, int kVectors, int kCapacity, int kCluster, bool kOrdered>
struct Topk {
    static_assert(kThreads % 32 == 0 && kThreads <= 1024, "a block is whole warps");
    static constexpr int kWidth = Unpack<Value>::kWidth;
    static constexpr int kFewVectors = sizeof(Value) == 4 ? 2 : 1;  // where speed isn't everything
    using Keys = Order<Value>;
    using Shared = TopkShared<kCapacity>;
    using List = Cursor<kThreads, kOrdered>;

    Shared& shared;
    const TopkArgs& args;
    Piece<Value> window;
    int* out;
    int shift;

    // Returns a value above which somewhat more than k elements of the window lie, judging by a part of them.
    __device__ __forceinline__ float guess_threshold() {
        const int head = head_of(window), num_vectors = (window.length - head) / kWidth;
        const uint4* vectors = reinterpret_cast<const uint4*>(window.data + head);
        // of about 32 elements one
        const int rounds = (window.length + 32 * kWidth * kThreads - 1) / (32 * kWidth * kThreads);
        const float step = static_cast<float>(num_vectors) / static_cast<float>(rounds * kThreads);
        const float scale = static_cast<float>(window.length) / static_cast<float>(rounds * kThreads * kWidth);
        const float expected = static_cast<float>(args.k) / scale;
        const uint32_t rank = static_cast<uint32_t>(expected + 5.0f * __fsqrt_rn(expected) + 3.0f);
        const Place place = narrow<kThreads>(
            shared.select,
            [&](const Counter& counter) {
                constexpr int kBatch = 4;  // loads in flight
                for (int i = 0; i < rounds; i += kBatch) {
                    uint4 loaded[kBatch];
#pragma unroll
                    for (int b = 0; b < kBatch; ++b) {
                        const float at = static_cast<float>((i + b) * kThreads + threadIdx.x) * step;
                        if (i + b < rounds) loaded[b] = __ldg(vectors + min(static_cast<int>(at), num_vectors - 1));
                    }
#pragma unroll
                    for (int b = 0; b < kBatch; ++b) {
                        if (i + b >= rounds) break;
                        float values[kWidth];
                        Unpack<Value>::run(loaded[b], values);
#pragma unroll
                        for (int j = 0; j < kWidth; ++j) {
                            const uint32_t key = Keys::key(values[j]);
                            counter(key > Keys::kNever, key);
                        }
                    }
                }
            },
            0, Keys::kBits, rank, [=](const Place& p) {
                // all of the bin comes with it: that costs little, a round costs more
                return static_cast<float>(p.above + p.count) * scale <= 0.75f * kCapacity;
            });
        return place.is_found ? threshold_at(place.low) : Keys::value(Keys::kLowest);
    }
    __device__ __forceinline__ static float threshold_at(uint32_t key) {
        return Keys::value(min(max(key, Keys::kLowest), Keys::kInfinity));
    }

    template <class Chunk>
    struct NotBelow {
        const Chunk& chunk;
        float threshold;
        __device__ __forceinline__ bool takes(int i) const { return !(chunk.value[i] < threshold); }
        // By the signs of differences, one shift each: that of NaN is positive, and of 0 the threshold is -0 here, so
        // that -0 isn't below it.
        __device__ __forceinline__ uint32_t dropped() const {
            const float negated = threshold == 0.0f ? 0.0f : -threshold;
            uint32_t signs = 0;
#pragma unroll
            for (int i = Chunk::kLength - 1; i >= 0; --i) {
                signs = __funnelshift_l(__float_as_uint(__fadd_rn(chunk.value[i], negated)), signs, 1);
            }
            return signs;
        }
    };
    struct Collect {
        uint32_t candidates;  // address
        List& list;
        float threshold;
        template <class Chunk>
        __device__ __forceinline__ void operator()(const Chunk& chunk) const {
            append<sizeof(uint2)>(
                candidates, chunk, list, NotBelow<Chunk>{chunk, threshold}, kCapacity, [&](int i, uint32_t place) {
                    ptx::store_shared_v2(place, __float_as_uint(chunk.value[i]), chunk.column_of(i));
                });
        }
    };
    // Collects what isn't below the threshold, as far as it fits; returns how many there are.
    __device__ __forceinline__ uint32_t collect(const Piece<Value>& piece, float threshold) {
        List list{ptx::smem_address(&shared.count), shared.select.warp_sums};
        for_each_chunk<kThreads, kVectors>(piece, Collect{ptx::smem_address(shared.candidates), list, threshold});
        return list.finish();
    }

    // Brings the candidates of all blocks of the cluster to the first one; returns how many there are.
    __device__ __forceinline__ uint32_t gather(uint32_t own, uint32_t rank) {
        if (kOrdered && threadIdx.x == 0) shared.count = own;
        __syncwarp();  // a warp arrives as one
        ptx::cluster_arrive_release();
        ptx::cluster_wait_acquire();
        uint32_t before = 0, total = 0;
#pragma unroll
        for (uint32_t r = 0; r < kCluster; ++r) {
            const uint32_t count = ptx::load_cluster_u32(ptx::map_to_rank(ptx::smem_address(&shared.count), r));
            before += r < rank ? count : 0;
            total += count;
        }
        if (total <= kCapacity && rank > 0) {
            const uint32_t target = ptx::map_to_rank(ptx::smem_address(shared.candidates + before), 0);
            for (uint32_t i = threadIdx.x; i < own; i += kThreads) {
                const uint2 candidate = shared.candidates[i];
                ptx::store_cluster_v2(target + i * sizeof(uint2), candidate.x, candidate.y);
            }
        }
        __syncwarp();
        ptx::cluster_arrive_release();  // after it no block reads another's memory
        ptx::cluster_wait_acquire();
        return total;
    }

    // Each calls visit(is_valid, key, column): over the window, and over `total` candidates.
    template <class Visit>
    struct Keyed {
        const Visit& visit;
        template <class Chunk>
        __device__ __forceinline__ void operator()(const Chunk& chunk) const {
#pragma unroll
            for (int i = 0; i < Chunk::kLength; ++i) {
                const uint32_t key = Keys::key(chunk.value[i]);
                visit(key > Keys::kNever, key, chunk.column_of(i));
            }
        }
    };
    struct WindowWalk {
        const Piece<Value>& window;
        template <class Visit>
        __device__ __forceinline__ void operator()(const Visit& visit) const {
            for_each_chunk<kThreads, kFewVectors>(window, Keyed<Visit>{visit});
        }
    };
    struct CandidateWalk {
        const Shared& shared;
        uint32_t total;
        template <class Visit>
        __device__ __forceinline__ void operator()(const Visit& visit) const {
            for (uint32_t i = threadIdx.x; i < total; i += kThreads) {
                const uint2 candidate = shared.candidates[i];
                visit(true, Keys::key(__uint_as_float(candidate.x)), static_cast<int>(candidate.y));
            }
        }
    };
    // Finds the place of the k-th largest key.
    template <class Walk, class Stop>
    __device__ __forceinline__ Place narrow_keys(const Walk& walk, uint32_t low, int bits, Stop stop) {
        return narrow<kThreads>(
            shared.select,
            [&](const Counter& counter) {
                walk([&](bool is_valid, uint32_t key, int) { counter(is_valid, key); });
            },
            low, bits, args.k, stop);
    }

    // Writes what the cut takes of `total` candidates; returns how many those are.
    __device__ __forceinline__ uint32_t write_candidates(uint32_t total, const Cut& cut) {
        List list{ptx::smem_address(&shared.written), shared.select.warp_sums};
        constexpr int kGroups = 4;
        for (uint32_t first = 0; first < total; first += kThreads * kGroups) {
            const uint32_t mine = first + threadIdx.x / 32 * 32 * kGroups + threadIdx.x % 32;
            Chunk<kGroups, 1> columns;
            TakenBits taken{0};
#pragma unroll
            for (int i = 0; i < kGroups; ++i) {
                const uint32_t at = mine + 32 * i;
                const uint2 candidate = at < total ? shared.candidates[at] : make_uint2(0, 0);
                columns.value[i] = __uint_as_float(candidate.y);
                const uint32_t key = Keys::key(__uint_as_float(candidate.x));
                if (at < total && cut.takes(key, static_cast<int>(candidate.y))) taken.bits |= 1u << i;
            }
            append<1>(0u, columns, list, taken, args.k, [&](int i, uint32_t place) {
                out[place] = __float_as_int(columns.value[i]) + shift;
            });
        }
        return list.finish();
    }
    struct TakenBits {
        uint32_t bits;
        __device__ __forceinline__ bool takes(int i) const { return (bits >> i & 1) != 0; }
        __device__ __forceinline__ uint32_t dropped() const { return ~bits; }
    };
    template <class Chunk>
    struct Taken {
        const Chunk& chunk;
        const Cut& cut;
        __device__ __forceinline__ bool takes(int i) const {
            return cut.takes(Keys::key(chunk.value[i]), chunk.column_of(i));
        }
        __device__ __forceinline__ uint32_t dropped() const {
            uint32_t bits = 0;
#pragma unroll
            for (int i = 0; i < Chunk::kLength; ++i) bits |= takes(i) ? 0u : 1u << i;
            return bits;
        }
    };
    struct Write {
        int *out, shift;
        List& list;
        const Cut& cut;
        const TopkArgs& args;
        template <class Chunk>
        __device__ __forceinline__ void operator()(const Chunk& chunk) const {
            append<1>(0u, chunk, list, Taken<Chunk>{chunk, cut}, args.k,
                      [&](int i, uint32_t place) { out[place] = chunk.column_of(i) + shift; });
        }
    };
    // Writes what the cut takes of the window.
    __device__ __forceinline__ void write_window(const Cut& cut) {
        List list{ptx::smem_address(&shared.written), shared.select.warp_sums};
        for_each_chunk<kThreads, kFewVectors>(window, Write{out, shift, list, cut, args});
    }

    // Finds the cut among the candidates, which are all that isn't below the threshold, and writes the row.
    __device__ __forceinline__ void finish(uint32_t total, float threshold) {
        const uint32_t k = args.k;
        Cut cut{0, -1};
        if (total > k) {
            const CandidateWalk walk{shared, total};
            uint32_t top = 0;
            walk([&](bool is_valid, uint32_t key, int) { top = max(top, is_valid ? key : 0); });
            top = __reduce_max_sync(kAllLanes, top);
            if (threadIdx.x % 32 == 0) atomicMax(&shared.top, top);
            __syncthreads();
            const uint32_t low = Keys::key(threshold);
            const Place place = narrow_keys(walk, low, 32 - __clz(max(shared.top - low, 1u)),
                                            [](const Place&) { return false; });
            cut = make_cut<kThreads>(shared.select, walk, place, window.column, window.length);
        }
        const uint32_t written = write_candidates(total, cut);
        for (uint32_t i = written + threadIdx.x; i < k; i += kThreads) out[i] = -1;
    }

    // Where the sample was wrong: returns true with a threshold that lets all that is wanted fit, or writes the row.
    __device__ __forceinline__ bool repair(float& threshold) {
        const WindowWalk walk{window};
        const Place place =
            narrow_keys(walk, 0, Keys::kBits, [](const Place& p) { return p.above + p.count <= kCapacity; });
        if (!place.is_found || place.above + place.count <= kCapacity) {
            threshold = place.is_found ? threshold_at(place.low) : Keys::value(Keys::kLowest);
            return true;
        }
        write_window(make_cut<kThreads>(shared.select, walk, place, window.column, window.length));
        return false;
    }

    __device__ __forceinline__ void run(uint32_t rank) {
        for (int i = threadIdx.x; i < kBins; i += kThreads) shared.select.histogram[i] = 0;
        if (threadIdx.x == 0) shared.count = shared.written = shared.top = 0;
        __syncthreads();
        const float lowest = Keys::value(Keys::kLowest);
        float threshold = lowest;
        if (window.length > kCapacity) threshold = guess_threshold();
        Piece<Value> piece = window;
        if constexpr (kCluster > 1) {
            const int share = ((window.length + kCluster - 1) / kCluster + 255) / 256 * 256;
            const int first = min(static_cast<int>(rank) * share, window.length);
            piece = Piece<Value>{window.data + first, window.column + first, min(share, window.length - first)};
        }
        uint32_t total = collect(piece, threshold);
        if constexpr (kCluster > 1) {
            total = gather(total, rank);
            if (rank != 0) return;
        }
        if (total > kCapacity || (total < static_cast<uint32_t>(args.k) && threshold != lowest)) {
            if (!repair(threshold)) return;
            if (threadIdx.x == 0) shared.count = 0;
            __syncthreads();
            total = collect(window, threshold);
        }
        finish(total, threshold);
    }
};

template <typename Value, int kThreads, int kVectors, int kCapacity, int kCluster, bool kOrdered>
__device__ __forceinline__ void sm90_topk(const TopkArgs& args, void* storage) {
    using Kernel = Topk<Value, kThreads, kVectors, kCapacity, kCluster, kOrdered>;
    const int row = static_cast<int>(blockIdx.x / kCluster);
    const int begin = args.starts == nullptr ? 0 : min(max(args.starts[row], 0), args.num_columns);
    const int end = args.ends == nullptr ? args.num_columns : min(max(args.ends[row], 0), args.num_columns);
    const Value* data = static_cast<const Value*>(args.logits) + row * args.row_stride + begin;
    Kernel{*static_cast<typename Kernel::Shared*>(storage),
           args,
           Piece<Value>{data, begin, max(end - begin, 0)},
           args.out + row * args.out_stride,
           args.shifts == nullptr ? 0 : args.shifts[row]}
        .run(kCluster > 1 ? ptx::cluster_rank() : 0);
}

}  // namespace megamoe::impls
