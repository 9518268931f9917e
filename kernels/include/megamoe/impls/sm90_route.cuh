// Routing: logits -> the experts of each token, their weights, and how often each was chosen. A block takes a token: all
// its warps make keys, the first one chooses.
//
// The arithmetic is that of kernels/routing.py, to which the names refer: keys in FP32, weights as logarithms in FP64,
// rounded once.
#pragma once
#include "megamoe/common/types.h"
#include "megamoe/ptx/types.cuh"

namespace megamoe::impls {

enum class RouteScore : u32 { softmax = 0, topk_softmax = 1, sigmoid = 2, sqrtsoftplus = 3 };

struct RouteArgs {
    const float* logits;        // [num_tokens, num_experts]
    const float* correction;    // [num_experts], with kCorrection
    const int64_t* table;       // [vocab_size, top_k], with kHash
    const void* input_ids;      // [num_tokens] int64 or int32, with kHash
    int64_t* ids;               // [num_tokens, top_k]
    float* weights;             // [num_tokens, top_k]
    unsigned long long* load;   // [num_experts]; added to
    double scale;
    int64_t vocab_size;
    int num_tokens;
    int are_input_ids_short;    // int32
};

namespace route {

constexpr u32 kAllLanes = 0xffffffffu, kNoColumn = 0xffffffffu;
constexpr int kRankExcluded = -0x7fffffff - 1, kRankNan = kRankExcluded + 1;
constexpr double kLargest = 1.7976931348623157e308, kTiny = 2.2250738585072014e-308;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Integers that order as the floats do; both zeros are 0, NaN is below all.
__device__ __forceinline__ int rank_of(float key) {
    const int bits = __float_as_int(key);
    return key != key ? kRankNan : bits < 0 ? kRankExcluded - bits : bits;
}
// The lowest column of those with the largest rank in the warp; lanes without a candidate give kNoColumn.
__device__ __forceinline__ u32 best_column(int rank, u32 column) {
    const int best = __reduce_max_sync(kAllLanes, column == kNoColumn ? kRankExcluded : rank);
    return __reduce_min_sync(kAllLanes, rank == best ? column : kNoColumn);
}

template <class T>
__device__ __forceinline__ T sum_of_lanes(T v) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(kAllLanes, v, d);
    return v;
}
// NaN where a lane has it.
template <class T>
__device__ __forceinline__ T max_of_lanes(T v) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        const T other = __shfl_xor_sync(kAllLanes, v, d);
        v = other > v || other != other ? other : v;
    }
    return v;
}

// routing_scores() of one logit, but for softmax, whose row the caller has summed.
template <RouteScore kScore>
__device__ __forceinline__ float score_of(float z) {
    if constexpr (kScore == RouteScore::sigmoid) return 1.f / (1.f + expf(-z));
    if constexpr (kScore == RouteScore::sqrtsoftplus) {
        return z < -40.f ? expf(fminf(z, 0.f) / 2.f) : sqrtf(log1pf(expf(-fabsf(z))) - fminf(0.f, -z));
    }
    return z;
}

// log_scores() of one logit.
template <RouteScore kScore>
__device__ __forceinline__ double log_score(double z) {
    if constexpr (kScore == RouteScore::sigmoid) return fmin(0., z) - log1p(exp(-fabs(z)));
    if constexpr (kScore == RouteScore::sqrtsoftplus) {
        return (z < -40. ? z : log(log1p(exp(-fabs(z))) - fmin(0., -z))) / 2;
    }
    return z;
}

// The lanes' candidates of a row: lane l has columns l, l + 32, ...
template <u32 kColumns>
struct Candidates {
    static constexpr u32 kPerLane = (kColumns + 31) / 32;
    int rank[kPerLane];
    u32 left = 0;  // bit i: column 32 * i + lane is there and not taken

    // Takes the best one out; the lower column of equal ones.
    __device__ __forceinline__ u32 take() {
        const u32 lane = threadIdx.x % 32;
        int best = kRankExcluded;
        u32 column = kNoColumn;
#pragma unroll
        for (u32 i = 0; i < kPerLane; ++i) {
            const bool is_better = (left >> i & 1) != 0 && (column == kNoColumn || rank[i] > best);
            best = is_better ? rank[i] : best;
            column = is_better ? 32 * i + lane : column;
        }
        const u32 taken = best_column(best, column);
        if (taken == column) left &= ~(1u << taken / 32);
        return taken;
    }
};

// Bit g: group g is one of the kept ones. `scores`: of the row, -inf where excluded; in shared memory.
template <u32 kGroups, u32 kGroupSize, u32 kKept, bool kTop2>
__device__ __forceinline__ u32 choose_groups(const float* scores) {
    constexpr u32 kLanes = kGroups > 16 ? 1 : kGroups > 8 ? 2 : kGroups > 4 ? 4 : kGroups > 2 ? 8 : 16;  // of a group
    const u32 lane = threadIdx.x % 32, group = lane / kLanes;
    float first = -infinity(), second = -infinity();
    if (group < kGroups) {
        for (u32 i = lane % kLanes; i < kGroupSize; i += kLanes) {
            const float v = scores[group * kGroupSize + i];
            second = fmaxf(second, fminf(first, v));
            first = fmaxf(first, v);
        }
    }
#pragma unroll
    for (u32 d = 1; d < kLanes; d *= 2) {
        const float a = __shfl_xor_sync(kAllLanes, first, d), b = __shfl_xor_sync(kAllLanes, second, d);
        second = fmaxf(fmaxf(second, b), fminf(first, a));
        first = fmaxf(first, a);
    }
    const int rank = rank_of(kTop2 ? first + second : first);
    u32 kept = 0, column = group < kGroups ? group : kNoColumn;
#pragma unroll 1
    for (u32 j = 0; j < kKept; ++j) {
        const u32 best = best_column(rank, column);
        kept |= 1u << best;
        if (column == best) column = kNoColumn;
    }
    return kept;
}

// What the warps of a block tell the first one about a token.
template <u32 kWarps, u32 kExperts>
struct RouteShared {
    float scores[kExperts];  // that groups are chosen by: -inf for NaN
    int ranks[kExperts];     // of the keys
    float of_warp[2][kWarps];
};

// A value of all warps, of each one's by `combine`.
template <u32 kWarps, class Combine>
__device__ __forceinline__ float over_warps(float (&of_warp)[kWarps], float own, Combine combine) {
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = own;
    __syncthreads();
    float all = of_warp[0];
#pragma unroll
    for (u32 w = 1; w < kWarps; ++w) all = combine(all, of_warp[w]);
    return all;
}

// Makes scores and ranks of a row; called by all threads of the block.
template <u32 kWarps, u32 kExperts, RouteScore kScore, bool kCorrection, u32 kGroups>
__device__ __forceinline__ void make_keys(const float* row, const float* correction, RouteShared<kWarps, kExperts>& shared) {
    constexpr u32 kThreads = 32 * kWarps, kPerThread = (kExperts + kThreads - 1) / kThreads;
    float z[kPerThread], bias[kPerThread];
#pragma unroll
    for (u32 i = 0; i < kPerThread; ++i) {
        const u32 e = i * kThreads + threadIdx.x;
        z[i] = e < kExperts ? row[e] : -infinity();
        bias[i] = kCorrection && e < kExperts ? correction[e] : 0.f;
    }
    float shift = 0.f, total = 1.f;
    if constexpr (kScore == RouteScore::softmax && (kCorrection || kGroups > 1)) {  // a NaN logit counts as -inf
        float largest = -infinity();
#pragma unroll
        for (u32 i = 0; i < kPerThread; ++i) largest = fmaxf(largest, z[i]);
#pragma unroll
        for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, d));
        shift = over_warps(shared.of_warp[0], largest, [](float a, float b) { return fmaxf(a, b); });
        float sum = 0.f;
#pragma unroll
        for (u32 i = 0; i < kPerThread; ++i) {
            sum += i * kThreads + threadIdx.x < kExperts && z[i] == z[i] ? expf(z[i] - shift) : 0.f;
        }
        total = over_warps(shared.of_warp[1], sum_of_lanes(sum), [](float a, float b) { return a + b; });
    }
#pragma unroll
    for (u32 i = 0; i < kPerThread; ++i) {
        const u32 e = i * kThreads + threadIdx.x;
        float key = z[i];
        if constexpr (kCorrection || kGroups > 1) {
            const float known = z[i] == z[i] ? z[i] : -infinity();
            float score = kScore == RouteScore::softmax ? expf(known - shift) / total : score_of<kScore>(known);
            if constexpr (kCorrection) {
                score += bias[i];
                key = z[i] == z[i] ? score : z[i];
            }
            if (kGroups > 1 && e < kExperts) shared.scores[e] = z[i] != z[i] || score != score ? -infinity() : score;
        }
        if (e < kExperts) shared.ranks[e] = rank_of(key);
    }
}

// choose_experts(): lane k returns the k-th expert of the token; called by one warp.
template <u32 kWarps, u32 kExperts, u32 kTopK, u32 kGroups, u32 kTopkGroups, bool kTop2>
__device__ __forceinline__ u32 choose_experts(const RouteShared<kWarps, kExperts>& shared) {
    constexpr u32 kPerLane = (kExperts + 31) / 32, kGroupSize = kExperts / kGroups;
    const u32 lane = threadIdx.x % 32;
    u32 kept = kAllLanes;
    if constexpr (kGroups > 1) kept = choose_groups<kGroups, kGroupSize, kTopkGroups, kTop2>(shared.scores);
    Candidates<kExperts> candidates;
#pragma unroll
    for (u32 i = 0; i < kPerLane; ++i) {
        const u32 e = i * 32 + lane;
        if (e < kExperts) candidates.left |= 1u << i;
        candidates.rank[i] = e < kExperts && (kGroups == 1 || (kept >> e / kGroupSize & 1) != 0) ? shared.ranks[e] : kRankExcluded;
    }
    u32 mine = 0;
#pragma unroll 1
    for (u32 k = 0; k < kTopK; ++k) {
        const u32 chosen = candidates.take();
        if (lane == k) mine = chosen;
    }
    return mine;
}

// lookup_experts(): lane k returns the k-th expert of the token, anything out of range for none.
template <u32 kTopK>
__device__ __forceinline__ int64_t look_up_expert(const RouteArgs& args, u32 token) {
    const u32 lane = threadIdx.x % 32;
    const int64_t id = args.are_input_ids_short != 0 ? static_cast<const int*>(args.input_ids)[token]
                                                     : static_cast<const int64_t*>(args.input_ids)[token];
    if (id >= args.vocab_size) __trap();  // as an index of torch out of bounds
    return id < 0 || lane >= kTopK ? -1 : args.table[id * kTopK + lane];
}

}  // namespace route

// kExperts at most 1024, kTopK and kGroups at most 32.
template <u32 kWarps, u32 kExperts, u32 kTopK, RouteScore kScore, bool kCorrection, bool kHash, u32 kGroups, u32 kTopkGroups,
          bool kTop2, bool kRenormalize>
__device__ __forceinline__ void sm90_route(const RouteArgs& args) {
    using namespace route;
    constexpr u32 kPerLane = (kExperts + 31) / 32;
    constexpr bool kOverChosen = kRenormalize || kScore == RouteScore::topk_softmax;  // what weights are shares of
    constexpr bool kOverRow = !kOverChosen && kScore == RouteScore::softmax;
    static_assert(kExperts <= 1024 && kTopK <= 32 && kTopK <= kExperts && kGroups <= 32, "what a warp holds");
    static_assert(kGroups * (kExperts / kGroups) == kExperts && kTopkGroups <= kGroups, "equal groups");
    const u32 lane = threadIdx.x % 32, token = blockIdx.x;
    const float* row = args.logits + static_cast<int64_t>(token) * kExperts;
    int64_t mine;
    if constexpr (kHash) {
        mine = look_up_expert<kTopK>(args, token);
    } else {
        __shared__ RouteShared<kWarps, kExperts> shared;
        make_keys<kWarps, kExperts, kScore, kCorrection, kGroups>(row, args.correction, shared);
        __syncthreads();
        if (threadIdx.x >= 32) return;
        mine = choose_experts<kWarps, kExperts, kTopK, kGroups, kTopkGroups, kTop2>(shared);
    }

    const bool is_expert = lane < kTopK && mine >= 0 && mine < kExperts;
    const double own = is_expert ? log_score<kScore>(static_cast<double>(row[mine])) : -static_cast<double>(infinity());
    double weight;
    if constexpr (kOverChosen || kOverRow) {
        double z[kOverRow ? kPerLane : 1], largest = own;
        if constexpr (kOverRow) {
#pragma unroll
            for (u32 i = 0; i < kPerLane; ++i) {
                z[i] = i * 32 + lane < kExperts ? row[i * 32 + lane] : -infinity();
                largest = z[i] > largest || z[i] != z[i] ? z[i] : largest;
            }
        }
        largest = max_of_lanes(largest);
        if (largest < -kLargest) largest = -kLargest;
        double sum = is_expert ? exp(own - largest) : 0.;
        if constexpr (kOverRow) {
            sum = 0.;
#pragma unroll
            for (u32 i = 0; i < kPerLane; ++i) {
                if (i * 32 + lane < kExperts) sum += exp(z[i] - largest);
            }
        }
        const double total = sum_of_lanes(sum);
        weight = exp(own - largest) / (total < kTiny ? kTiny : total);
    } else {
        weight = exp(own);
    }
    if (lane >= kTopK) return;
    const int64_t at = static_cast<int64_t>(token) * kTopK + lane;
    args.ids[at] = mine;
    args.weights[at] = static_cast<float>(weight * args.scale);
    if (is_expert) atomicAdd(args.load + mine, 1ull);
}

}  // namespace megamoe::impls
