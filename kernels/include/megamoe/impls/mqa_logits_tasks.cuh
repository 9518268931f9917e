// Which keys belong to a row, and which blocks of rows x slots of keys a CTA works on.
#pragma once
#include "megamoe/impls/mqa_logits_args.cuh"

namespace megamoe::impls {

struct KeyWindow {
    int start, length;
};

// Keys of a row; rows past the end have none. Windows and lengths may be any numbers: nothing here may wrap.
template <class P>
__device__ __forceinline__ KeyWindow mqa_window(const MqaArgs& args, int batch, int row) {
    KeyWindow w{0, 0};
    if constexpr (P::kPaged) {
        if (row >= args.next_n) return w;
        w.length = args.lengths_of_rows ? __ldg(args.ends + batch * args.next_n + row)
                                        : max(__ldg(args.ends + batch), 0) - args.next_n + row + 1;
        w.length = min(max(w.length, 0), min(args.num_columns, args.num_keys));
    } else {
        if (row >= args.num_rows) return w;
        w.start = min(max(__ldg(args.starts + row), 0), args.num_keys);
        w.length = max(min(__ldg(args.ends + row), args.num_keys), w.start) - w.start;
        if (args.compressed) w.length = min(w.length, args.num_columns);
    }
    return w;
}

// A block of rows and the slots of keys that a CTA multiplies with it.
struct MqaTask {
    int batch, row;       // paged: batch, and row 0 of it; otherwise the first row
    int position, slots;  // first key, slots of kKeys from it on; none ends the CTA's work
    int end;              // behind the last key that there is
};

// The slots of a block of rows: from the first key of any of its rows, rounded down to 64, to the last.
template <class P>
__device__ __forceinline__ MqaTask mqa_block(const MqaArgs& args, int block) {
    int low = args.num_keys, high = 0;
#pragma unroll
    for (int i = 0; i < P::kRows; ++i) {
        const KeyWindow w = mqa_window<P>(args, 0, block * P::kRows + i);
        if (w.length > 0) {
            low = min(low, w.start);
            high = max(high, w.start + w.length);
        }
    }
    low &= ~63;
    return {0, block * P::kRows, low, high > low ? (high - low + P::kKeys - 1) / P::kKeys : 0, high};
}

// Keys of a batch.
template <class P>
__device__ __forceinline__ int mqa_batch_keys(const MqaArgs& args, int batch) {
    int high = 0;
#pragma unroll
    for (int i = 0; i < P::kRows; ++i) high = max(high, mqa_window<P>(args, batch, i).length);
    return high;
}

// Share of this CTA in a problem that is not paged: `num_slots` from slot `skip` of block `block` on.
struct MqaShare {
    int block, skip;
    int64_t num_slots;
};

// By all threads: the slots of all blocks in order, divided evenly among the CTAs. `scratch`: one int64 for each warp.
template <class P>
__device__ __forceinline__ void mqa_divide(const MqaArgs& args, int64_t* scratch, MqaShare* share) {
    constexpr int kWarps = P::kThreads / 32;
    const int num_blocks = (args.num_rows + P::kRows - 1) / P::kRows;
    const int each = (num_blocks + P::kThreads - 1) / P::kThreads;
    const int begin = min(static_cast<int>(threadIdx.x) * each, num_blocks), end = min(begin + each, num_blocks);
    int64_t mine = 0;
    for (int b = begin; b < end; ++b) mine += mqa_block<P>(args, b).slots;
    int64_t upto = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int64_t other = __shfl_up_sync(0xffffffffu, upto, d);
        if (static_cast<int>(threadIdx.x % 32) >= d) upto += other;
    }
    if (threadIdx.x % 32 == 31) scratch[threadIdx.x / 32] = upto;
    if (threadIdx.x == 0) *share = {0, 0, 0};
    __syncthreads();
    int64_t before = upto - mine, total = 0;
    for (int i = 0; i < kWarps; ++i) {
        if (i < static_cast<int>(threadIdx.x / 32)) before += scratch[i];
        total += scratch[i];
    }
    const int64_t first = total * blockIdx.x / gridDim.x, last = total * (blockIdx.x + 1) / gridDim.x;
    if (first < last && before <= first && first < before + mine) {
        for (int b = begin; b < end; ++b) {
            const int slots = mqa_block<P>(args, b).slots;
            if (first < before + slots) {
                *share = {b, static_cast<int>(first - before), last - first};
                break;
            }
            before += slots;
        }
    }
    __syncthreads();
}

// Walks the tasks of this CTA; every role has its own.
template <class P>
class MqaTasks {
public:
    __device__ __forceinline__ MqaTasks(const MqaArgs& args, const MqaShare* share) : args_(args) {
        if constexpr (P::kPaged) {
            const int* at = args.schedule + 2 * blockIdx.x;
            block_ = max(__ldg(at), 0);
            skip_ = max(__ldg(at + 1), 0) * kSlotsPerSplit;
            last_ = min(__ldg(at + 2), args.num_rows);
            last_slots_ = max(__ldg(at + 3), 0) * kSlotsPerSplit;
        } else {
            block_ = share->block;
            skip_ = share->skip;
            left_ = share->num_slots;
        }
    }
    __device__ __forceinline__ MqaTask next() {
        if constexpr (P::kPaged) {
            while (block_ < last_ || (block_ == last_ && skip_ < last_slots_ && block_ < args_.num_rows)) {
                const int keys = mqa_batch_keys<P>(args_, block_);
                int slots = (keys + P::kKeys - 1) / P::kKeys;
                if (block_ == last_) slots = min(slots, last_slots_);
                const MqaTask t{block_, 0, skip_ * P::kKeys, slots - skip_, keys};
                ++block_;
                skip_ = 0;
                if (t.slots > 0) return t;
            }
        } else {
            while (left_ > 0) {
                MqaTask t = mqa_block<P>(args_, block_);
                t.position += skip_ * P::kKeys;
                t.slots = static_cast<int>(min(static_cast<int64_t>(t.slots - skip_), left_));
                ++block_;
                skip_ = 0;
                left_ -= t.slots;
                if (t.slots > 0) return t;
            }
        }
        return {0, 0, 0, 0, 0};
    }

private:
    static constexpr int kSlotsPerSplit = 256 / P::kKeys;
    const MqaArgs& args_;
    int block_, skip_, last_ = 0, last_slots_ = 0;
    int64_t left_ = 0;
};

}  // namespace megamoe::impls
