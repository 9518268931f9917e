// Walking over a piece of a row by 16-byte loads, and appending what is kept to a list: in order of columns, or as it
// comes.
#pragma once
#include "megamoe/ptx/memory.cuh"
#include "megamoe/ptx/sync.cuh"

namespace megamoe::impls {

inline constexpr uint32_t kAllLanes = 0xffffffffu;

struct Bf16 {
    uint16_t bits;
};

// What stands where a row has nothing: it is never chosen.
__device__ __forceinline__ float nothing() { return __uint_as_float(0xff800000u); }

__device__ __forceinline__ float load_value(const float* p) { return *p; }
__device__ __forceinline__ float load_value(const Bf16* p) {
    return __uint_as_float(static_cast<uint32_t>(p->bits) << 16);
}

// The values of 16 bytes.
template <typename Value>
struct Unpack;
template <>
struct Unpack<float> {
    static constexpr int kWidth = 4;
    __device__ static void run(const uint4& v, float* out) {
        out[0] = __uint_as_float(v.x), out[1] = __uint_as_float(v.y);
        out[2] = __uint_as_float(v.z), out[3] = __uint_as_float(v.w);
    }
};
template <>
struct Unpack<Bf16> {
    static constexpr int kWidth = 8;
    __device__ static void run(const uint4& v, float* out) {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[2 * i] = __uint_as_float(words[i] << 16);
            out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
};

// Neighbouring columns of a row.
template <typename Value>
struct Piece {
    const Value* data;
    int column;  // of data[0]
    int length;
};

// What one thread sees at a time: kGroups groups of kWidth neighbours, the groups 32 * kWidth columns apart. Across a
// block, columns ascend with warp, group, lane and place in the group.
template <int kGroups, int kWidth>
struct Chunk {
    static constexpr int kLength = kGroups * kWidth;
    float value[kLength];
    int column;
    __device__ __forceinline__ int column_of(int i) const {
        return column + i / kWidth * 32 * kWidth + i % kWidth;
    }
};

// Elements of a piece before its first 16-byte boundary.
template <typename Value>
__device__ __forceinline__ int head_of(const Piece<Value>& piece) {
    const int bytes = static_cast<int>(-reinterpret_cast<uintptr_t>(piece.data) & 15u);
    return min(piece.length, bytes / static_cast<int>(sizeof(Value)));
}

// A few elements, at most one a thread.
template <typename Value, class Visit>
__device__ __forceinline__ void visit_edge(const Piece<Value>& piece, int first, int length, Visit visit) {
    if (length == 0) return;
    const int i = threadIdx.x;
    Chunk<1, 1> chunk;
    chunk.value[0] = i < length ? load_value(piece.data + first + i) : nothing();
    chunk.column = piece.column + first + i;
    visit(chunk);
}

// Calls visit(chunk) over the whole piece; all threads of the block make the same calls.
template <int kThreads, int kVectors, typename Value, class Visit>
__device__ __forceinline__ void for_each_chunk(const Piece<Value>& piece, Visit visit) {
    constexpr int kWidth = Unpack<Value>::kWidth;
    const int head = head_of(piece), num_vectors = (piece.length - head) / kWidth;
    const int mine = threadIdx.x / 32 * 32 * kVectors + threadIdx.x % 32;
    visit_edge(piece, 0, head, visit);
    const uint4* vectors = reinterpret_cast<const uint4*>(piece.data + head) + mine;
    Chunk<kVectors, kWidth> chunk;
    chunk.column = piece.column + head + mine * kWidth;
#pragma unroll 1
    for (int left = num_vectors; left > 0; left -= kThreads * kVectors) {
        uint4 loaded[kVectors];
        if (left >= kThreads * kVectors) {
#pragma unroll
            for (int u = 0; u < kVectors; ++u) loaded[u] = ptx::load_global_v4_no_allocate(vectors + 32 * u);
        } else {
            const uint32_t none = sizeof(Value) == 4 ? 0xff800000u : 0xff80ff80u;
#pragma unroll
            for (int u = 0; u < kVectors; ++u) {
                loaded[u] = make_uint4(none, none, none, none);
                if (mine + 32 * u < left) loaded[u] = ptx::load_global_v4_no_allocate(vectors + 32 * u);
            }
        }
#pragma unroll
        for (int u = 0; u < kVectors; ++u) Unpack<Value>::run(loaded[u], chunk.value + u * kWidth);
        visit(chunk);
        vectors += kThreads * kVectors;
        chunk.column += kThreads * kVectors * kWidth;
    }
    visit_edge(piece, head + num_vectors * kWidth, piece.length - head - num_vectors * kWidth, visit);
}

// Where the next element of a list goes.
template <int kThreads, bool kOrdered>
struct Cursor {
    uint32_t count;       // address in shared memory, not ordered: elements so far
    uint32_t* warp_sums;  // in shared memory, ordered: two rows of 32
    uint32_t total = 0;   // ordered: elements so far
    uint32_t phase = 0;

    // Returns the place of this warp's first element; all threads of the block call it.
    __device__ __forceinline__ uint32_t advance(uint32_t of_warp) {
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if constexpr (kOrdered) {
            uint32_t* sums = warp_sums + phase;
            if (lane == 0) sums[warp] = of_warp;
            __syncthreads();
            const uint32_t sum = lane < kThreads / 32 ? sums[lane] : 0;
            const uint32_t first = total + __reduce_add_sync(kAllLanes, lane < warp ? sum : 0);
            total += __reduce_add_sync(kAllLanes, sum);
            phase ^= 32;  // the next call writes the other row: who is late may still read this one
            return first;
        } else {
            uint32_t first = 0;
            if (of_warp != 0) {
                if (lane == 0) first = ptx::add_shared_u32(count, of_warp);
                first = __shfl_sync(kAllLanes, first, 0);
            }
            return first;
        }
    }
    // Returns how many elements there are, after the last call of all threads.
    __device__ __forceinline__ uint32_t finish() {
        __syncthreads();
        return kOrdered ? total : ptx::load_shared_u32(count);
    }
};

// Calls emit(i, base + kStep * place) for each element i of the chunk that keep.takes(i); bit i of keep.dropped() says
// the opposite, in fewer instructions. What a warp has beyond `capacity` is counted and not emitted.
template <uint32_t kStep, int kThreads, bool kOrdered, int kGroups, int kWidth, class Keep, class Emit>
__device__ __forceinline__ void append(uint32_t base, const Chunk<kGroups, kWidth>&,
                                       Cursor<kThreads, kOrdered>& cursor, const Keep& keep, uint32_t capacity,
                                       Emit emit) {
    // 16 bits a group; without an order a thread's elements are all one group
    constexpr int kCounted = kOrdered ? kGroups : 1, kWords = (kCounted + 1) / 2, kPerGroup = kGroups * kWidth / kCounted;
    static_assert(kGroups * kWidth <= 32, "a bit for each element");
    const uint32_t lane = threadIdx.x % 32, dropped = keep.dropped();
    uint32_t own[kWords] = {}, scanned[kWords], totals[kWords] = {}, has_any = 0;
#pragma unroll
    for (int group = 0; group < kCounted; ++group) {
        const uint32_t bits = (1u << (kPerGroup - 1)) * 2 - 1;
        own[group / 2] += __popc(~(dropped >> group * kPerGroup) & bits) << 16 * (group % 2);
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        has_any |= own[w];
        scanned[w] = own[w];
    }
    uint32_t of_warp = 0;
    if (__any_sync(kAllLanes, has_any != 0)) {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
                const uint32_t below = __shfl_up_sync(kAllLanes, scanned[w], step);
                scanned[w] += lane >= step ? below : 0;
            }
        }
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            totals[w] = __shfl_sync(kAllLanes, scanned[w], 31);
            of_warp += (totals[w] & 0xffff) + (totals[w] >> 16);
        }
    }
    uint32_t first = cursor.advance(of_warp);
    if (has_any == 0 || first + of_warp > capacity) return;
#pragma unroll
    for (int group = 0; group < kCounted; ++group) {
        const uint32_t before = (scanned[group / 2] - own[group / 2]) >> 16 * (group % 2) & 0xffff;
        uint32_t place = base + kStep * (first + before);
#pragma unroll
        for (int i = group * kPerGroup; i < (group + 1) * kPerGroup; ++i) {
            const bool is_taken = keep.takes(i);
            if (is_taken) emit(i, place);
            place += is_taken ? kStep : 0;
        }
        first += totals[group / 2] >> 16 * (group % 2) & 0xffff;
    }
}

}  // namespace megamoe::impls
