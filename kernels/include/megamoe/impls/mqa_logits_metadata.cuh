// Schedule of the paged MQA logits: where in the batches each CTA begins, in splits of 256 keys, evenly divided.
#pragma once
#include "megamoe/ptx/types.cuh"

namespace megamoe::impls {

constexpr int kMqaSplit = 256;

struct MqaMetadataArgs {
    const int* lengths;  // [batches, next_n]: the longest of a batch counts
    int* schedule;       // [num_shares + 1][2]: batch and split; shares without work begin behind the last batch
    int num_batches, next_n, num_shares;
};

// One block of kThreads.
template <int kThreads>
__device__ __forceinline__ void mqa_logits_metadata(const MqaMetadataArgs& args) {
    const int* const lengths = args.lengths;
    int* const schedule = args.schedule;
    const int num_batches = args.num_batches, next_n = args.next_n, num_shares = args.num_shares;
    __shared__ int64_t sums[kThreads / 32];
    const int each = (num_batches + kThreads - 1) / kThreads;
    const int begin = min(static_cast<int>(threadIdx.x) * each, num_batches), end = min(begin + each, num_batches);
    auto splits = [&](int b) {
        int longest = 0;
        for (int i = 0; i < next_n; ++i) longest = max(longest, __ldg(lengths + static_cast<int64_t>(b) * next_n + i));
        return static_cast<int>((static_cast<int64_t>(longest) + kMqaSplit - 1) / kMqaSplit);
    };
    int64_t mine = 0;
    for (int b = begin; b < end; ++b) mine += splits(b);
    int64_t upto = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int64_t other = __shfl_up_sync(0xffffffffu, upto, d);
        if (static_cast<int>(threadIdx.x % 32) >= d) upto += other;
    }
    if (threadIdx.x % 32 == 31) sums[threadIdx.x / 32] = upto;
    __syncthreads();
    int64_t before = upto - mine, total = 0;
    for (int i = 0; i < kThreads / 32; ++i) {
        if (i < static_cast<int>(threadIdx.x / 32)) before += sums[i];
        total += sums[i];
    }
    for (int i = threadIdx.x; i <= num_shares; i += kThreads)
        if (total == 0 || i == num_shares) schedule[2 * i] = num_batches, schedule[2 * i + 1] = 0;
    if (total == 0) return;
    // share i begins at split total * i / num_shares
    int64_t share = (before * num_shares + total - 1) / total;
    for (int b = begin; b < end; ++b) {
        const int count = splits(b);
        for (; share < num_shares && total * share / num_shares < before + count; ++share) {
            schedule[2 * share] = b;
            schedule[2 * share + 1] = static_cast<int>(total * share / num_shares - before);
        }
        before += count;
    }
}

}  // namespace megamoe::impls
