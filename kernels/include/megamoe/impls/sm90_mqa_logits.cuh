// MQA logits of the lightning indexer: out[row, key] = scale[key] * sum over heads of max(q . k, 0) * weight, inside of
// the row's window of keys; persistent, one CTA per SM.
//
// Keys stream through a ring in shared memory, queries stay; keys are M of the products, (queries x heads) N, so that
// the sum over heads is within a thread and its quad.
//
// | warps | role | registers |
// | 4 of each math warpgroup | products, sums over heads, logits | P::kMathRegisters |
// | 0 of the last warpgroup | keys, their scales, E4M3 queries -> shared memory | P::kOtherRegisters |
// | 1, 2 of it | weights and windows of a block of rows, MXFP4 queries -> shared memory | same |
// | 3 of it | -inf outside of the windows | same |
//
// Barriers, all within the CTA:
// | keys_full[s]    | 1 arrival by the lane that announces the copies' bytes | math warps wait |
// | keys_empty[s]   | one arrival by each math warp, its products of the slot being done | warp 0 waits |
// | queries_full[2] | warp 0, with the bytes of its copies, and warps 1, 2 | math warps wait |
// | queries_empty[2]| one arrival by each math warp, the block of rows being done | warps 0, 1, 2 wait |
#pragma once
#include "megamoe/impls/mqa_logits_tasks.cuh"
#include "megamoe/mma/mqa_unit.cuh"

namespace megamoe::impls {

// Places in dynamic shared memory, 1024-byte aligned.
template <class P>
struct MqaMemory {
    static constexpr int kKeysAt = 2 * P::kQueryBytes;
    static constexpr int kScalesAt = kKeysAt + P::kStages * P::kKeyBytes;
    static constexpr int kWeightBytes = P::kRows * P::kHeads * 4;
    static constexpr int kWeightsAt = kScalesAt + P::kStages * P::kScaleBytes;
    static constexpr int kRowsAt = kWeightsAt + 2 * kWeightBytes;
    static constexpr int kTasksAt = kRowsAt + 2 * P::kRows * 16;
    static constexpr int kBarriersAt = kTasksAt + 2 * 8;
    static constexpr int kShareAt = kBarriersAt + (2 * P::kStages + 4) * 8;
    static constexpr int kScratchAt = kShareAt + static_cast<int>(sizeof(MqaShare));
    static constexpr int kBytes = kScratchAt + P::kThreads / 32 * 8;
    static_assert(kBytes <= 227 * 1024, "shared memory of one CTA");

    uint8_t* base;
    uint32_t address;
    __device__ __forceinline__ explicit MqaMemory(uint8_t* smem) : base(smem), address(ptx::smem_address(smem)) {}
    __device__ __forceinline__ uint32_t queries(int slot) const { return address + slot * P::kQueryBytes; }
    __device__ __forceinline__ uint32_t keys(int stage) const { return address + kKeysAt + stage * P::kKeyBytes; }
    __device__ __forceinline__ uint32_t scales(int stage) const { return address + kScalesAt + stage * P::kScaleBytes; }
    __device__ __forceinline__ uint32_t weights(int slot) const { return address + kWeightsAt + slot * kWeightBytes; }
    // 16 bytes for each row of a block: first key, number of keys, address of the logit of key 0, which need not exist.
    __device__ __forceinline__ uint32_t rows(int slot) const { return address + kRowsAt + slot * P::kRows * 16; }
    // Position and slots of the block's task.
    __device__ __forceinline__ int* task(int slot) const { return reinterpret_cast<int*>(base + kTasksAt) + 2 * slot; }
    __device__ __forceinline__ uint32_t keys_full(int stage) const { return address + kBarriersAt + stage * 8; }
    __device__ __forceinline__ uint32_t keys_empty(int stage) const { return keys_full(P::kStages + stage); }
    __device__ __forceinline__ uint32_t queries_full(int slot) const { return keys_full(2 * P::kStages + slot); }
    __device__ __forceinline__ uint32_t queries_empty(int slot) const { return queries_full(2 + slot); }
    __device__ __forceinline__ MqaShare* share() const { return reinterpret_cast<MqaShare*>(base + kShareAt); }
    __device__ __forceinline__ int64_t* scratch() const { return reinterpret_cast<int64_t*>(base + kScratchAt); }

    __device__ __forceinline__ void init() const {
        for (int s = 0; s < P::kStages; ++s) {
            ptx::mbarrier_init(keys_full(s), 1);
            ptx::mbarrier_init(keys_empty(s), 4 * P::kWarpgroups);
        }
        for (int s = 0; s < 2; ++s) {
            ptx::mbarrier_init(queries_full(s), 3);
            ptx::mbarrier_init(queries_empty(s), 4 * P::kWarpgroups);
        }
        ptx::fence_mbarrier_init();
    }
};

// Warp 0. Paged: a lane for each piece (a page, or as much of it as a slot holds) of a slot; not all free slots are asked
// for at once, because more requests make memory slower (benchmarks/notes/mqa-logits.md).
template <class P>
__device__ __forceinline__ void mqa_load(const MqaArgs& args, const MqaMemory<P>& memory, MqaTasks<P> tasks, int lane) {
    mma::PipelineState<P::kStages> state, arriving;
    mma::PipelineState<2> slot;
    int in_flight = 0;
    const int piece = P::kPaged ? min(args.page, P::kKeys) : P::kKeys;
    const int in_slot = lane * piece;  // this lane's first key in a slot
    const uint64_t policy = ptx::evict_first_policy();  // a cache is larger than L2, neighbouring keys are smaller
    for (;;) {
        const MqaTask t = tasks.next();
        ptx::mbarrier_wait(memory.queries_empty(slot.stage()), slot.parity() ^ 1);
        if (lane == 0) {
            const uint32_t bar = memory.queries_full(slot.stage());
            if (P::kFp4 || t.slots == 0) {
                ptx::mbarrier_arrive(bar);
            } else {
                ptx::mbarrier_arrive_expect_tx(bar, P::kQueryBytes);
                const int row = P::kPaged ? t.batch * args.next_n : t.row;
#pragma unroll
                for (int set = 0; set < P::kQuerySets; ++set)
                    ptx::tensor_load_2d(memory.queries(slot.stage()) + set * P::kN * 128, &args.q, bar, 0,
                                        (row + set * P::kQueries) * P::kHeads);
            }
        }
        slot.advance();
        if (t.slots == 0) return;
        int key = t.position + in_slot;
        auto find_page = [&] {
            if constexpr (!P::kPaged) return 0;
            const bool mine = in_slot < P::kKeys && key < t.end;
            return mine ? __ldg(args.block_table + static_cast<int64_t>(t.batch) * args.block_table_stride +
                                (key >> args.page_shift))
                        : 0;
        };
        int page = find_page();
        for (int i = 0; i < t.slots; ++i, state.advance()) {
            const uint32_t bar = memory.keys_full(state.stage());
            ptx::mbarrier_wait(memory.keys_empty(state.stage()), state.parity() ^ 1);
            if constexpr (P::kInFlight < P::kStages) {
                if (in_flight == P::kInFlight) {
                    ptx::mbarrier_wait(memory.keys_full(arriving.stage()), arriving.parity());
                    arriving.advance();
                } else {
                    ++in_flight;
                }
            }
            const bool mine = in_slot < P::kKeys && (!P::kPaged || key < t.end);
            if (lane == 0) {
                int keys = P::kKeys;
                if constexpr (P::kPaged) keys = min(P::kKeys, (t.end - key + piece - 1) / piece * piece);
                ptx::mbarrier_arrive_expect_tx(bar, keys * (P::kRowBytes + 4));
            }
            __syncwarp();
            if (mine) {
                const int in_page = P::kPaged ? key & (args.page - 1) : key;
                const uint32_t keys = memory.keys(state.stage()) + in_slot * P::kRowBytes;
                const uint32_t scales = memory.scales(state.stage()) + in_slot * 4;
                if constexpr (P::kPaged) {
                    ptx::tensor_load_3d(keys, &args.keys, bar, 0, in_page, page, policy);
                    // a number that names no page reads zeros above, and must not lead outside of the cache here
                    const int known = page < 0 || page >= args.num_pages ? 0 : page;
                    ptx::bulk_load(scales, args.page_scales + known * args.page_bytes + in_page * 4, piece * 4, bar);
                } else {
                    ptx::tensor_load_3d(keys, &args.keys, bar, 0, in_page, 0);
                    ptx::tensor_load_2d(scales, &args.scales, bar, in_page, 0);
                }
            }
            key += P::kKeys;
            if (i + 1 < t.slots) page = find_page();
        }
    }
}

// MXFP4 queries of a block -> E4M3 rows as the products read them. 64 threads.
template <class P>
__device__ __forceinline__ void mqa_decode_queries(const MqaArgs& args, uint32_t target, int64_t first, int num_vectors,
                                                   int thread) {
    constexpr int kChunks = P::kHeadDim / 32, kWords = P::kHeadDim / 32;  // 16 bytes each; words of a lane
    for (int i = thread; i < num_vectors * kChunks; i += 64) {
        const int n = i / kChunks, chunk = i % kChunks;
        const uint4 v = ptx::load_global_v4_no_allocate(args.q_codes + (first + n) * (P::kHeadDim / 2) + chunk * 16);
        const uint32_t scales = __ldg(args.q_exponents + first + n);
        uint32_t largest;
        mma::largest_scale<P::kHeadDim>(scales, largest);
        const uint32_t below = largest - (scales >> (8 * chunk) & 255);
        const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            uint32_t a, b;
            mma::decode_mx(word[w], below, a, b);
            const int m = 4 * chunk + w, c = m / kWords, j = m % kWords;
            const uint32_t row = target + n * 128 + 4 * c;
            ptx::store_shared_u32(row + (((2 * j) ^ (n & 7)) << 4), a);
            ptx::store_shared_u32(row + (((2 * j + 1) ^ (n & 7)) << 4), b);
        }
    }
}

// Warps 1 and 2: what belongs to a block of rows, and the task; the last is empty.
template <class P>
__device__ __forceinline__ void mqa_prepare(const MqaArgs& args, const MqaMemory<P>& memory, MqaTasks<P> tasks,
                                            int thread) {
    constexpr int kElement = P::kBf16 ? 2 : 4;
    mma::PipelineState<2> slot;
    for (;;) {
        const MqaTask t = tasks.next();
        ptx::mbarrier_wait(memory.queries_empty(slot.stage()), slot.parity() ^ 1);
        if (t.slots > 0) {
            const int64_t first = P::kPaged ? static_cast<int64_t>(t.batch) * args.next_n : t.row;
            const int num_rows = P::kPaged ? args.next_n : min(args.num_rows - t.row, P::kRows);
            for (int i = thread; i < P::kRows * P::kHeads; i += 64) {
                const int row = i / P::kHeads, head = i % P::kHeads;
                float w = 0.f;
                if (row < num_rows) {
                    w = __ldg(args.weights + (first + row) * args.weights_stride + head);
                    if constexpr (P::kFp4) {
                        uint32_t largest;
                        const uint32_t scales = __ldg(args.q_exponents + (first + row) * P::kHeads + head);
                        w *= mma::largest_scale<P::kHeadDim>(scales, largest);
                    }
                }
                ptx::store_shared_f32(memory.weights(slot.stage()) + i * 4, w);
            }
            if (thread < P::kRows) {
                const KeyWindow w = mqa_window<P>(args, t.batch, t.row + thread);
                const int64_t at = (first + thread) * args.out_stride - (args.compressed ? w.start : 0);
                const uint64_t logits = reinterpret_cast<uint64_t>(args.out) + at * kElement;
                ptx::store_shared_v4(memory.rows(slot.stage()) + thread * 16, w.start, w.length,
                                     static_cast<uint32_t>(logits), static_cast<uint32_t>(logits >> 32));
            }
            if constexpr (P::kFp4) {
                mqa_decode_queries<P>(args, memory.queries(slot.stage()), first * P::kHeads, num_rows * P::kHeads,
                                      thread);
                ptx::fence_proxy_async_shared();  // pairs with the wgmma of the math warps behind queries_full
            }
        }
        if (thread == 0) {
            memory.task(slot.stage())[0] = t.position;
            memory.task(slot.stage())[1] = t.slots;
        }
        __syncwarp();
        if (ptx::elect_one()) ptx::mbarrier_arrive(memory.queries_full(slot.stage()));
        slot.advance();
        if (t.slots == 0) return;
    }
}

// Writes -inf to columns [begin, end) of the row at `row`; one warp.
template <bool kBf16>
__device__ __forceinline__ void fill_columns(uint8_t* row, int begin, int end, int lane) {
    constexpr int kElement = kBf16 ? 2 : 4, kVector = 16 / kElement;
    constexpr uint32_t kWord = kBf16 ? 0xff80ff80u : 0xff800000u;
    if (begin >= end) return;
    auto fill_one = [&](int i) {
        uint8_t* p = row + static_cast<int64_t>(i) * kElement;
        if constexpr (kBf16) {
            ptx::store_global_u16(p, 0xff80);
        } else {
            ptx::store_global_u32(p, kWord);
        }
    };
    const uint64_t first = reinterpret_cast<uint64_t>(row) + static_cast<int64_t>(begin) * kElement;
    const int head = min(static_cast<int>((16 - first % 16) % 16 / kElement), end - begin);
    const int num_vectors = (end - begin - head) / kVector;
    if (lane < head) fill_one(begin + lane);
    uint8_t* aligned = row + static_cast<int64_t>(begin + head) * kElement;
    for (int i = lane; i < num_vectors; i += 32)
        ptx::store_global_v4(aligned + static_cast<int64_t>(i) * 16, kWord, kWord, kWord, kWord);
    const int tail = begin + head + num_vectors * kVector;
    if (lane < end - tail) fill_one(tail + lane);
}

// Warp 3: rows in turn among the CTAs.
template <class P>
__device__ __forceinline__ void mqa_fill(const MqaArgs& args, int lane) {
    const int num_rows = P::kPaged ? args.num_rows * args.next_n : args.num_rows;
    for (int r = blockIdx.x; r < num_rows; r += gridDim.x) {
        const int batch = P::kPaged ? r / args.next_n : 0;
        const KeyWindow w = mqa_window<P>(args, batch, P::kPaged ? r % args.next_n : r);
        uint8_t* row = args.out + r * args.out_stride * (P::kBf16 ? 2 : 4);
        const int start = args.compressed ? 0 : w.start;
        fill_columns<P::kBf16>(row, 0, start, lane);
        fill_columns<P::kBf16>(row, start + w.length, args.num_columns, lane);
    }
}

// A math warpgroup; everything in it lies in registers.
template <class P>
class MqaMath {
public:
    __device__ __forceinline__ MqaMath(const MqaMemory<P>& memory, int wg, int thread)
        : memory_(memory),
          lane_(thread % 32),
          fragment_row_(thread / 32 * 16 + thread % 32 / 4),
          own_row_(fragment_row_ + 8 * (thread % 2)),
          first_set_(P::kShared ? wg * P::kGroups : 0),
          first_tile_(P::kShared ? 0 : wg) {}

    __device__ __forceinline__ void run() {
        mma::PipelineState<2> slot;
        for (;; slot.advance()) {
            ptx::mbarrier_wait(memory_.queries_full(slot.stage()), slot.parity());
            position_ = memory_.task(slot.stage())[0];
            const int num_slots = memory_.task(slot.stage())[1];
            if (num_slots == 0) return;
            load_block(slot.stage());
            ptx::mbarrier_wait(memory_.keys_full(state_.stage()), state_.parity());
            issue<0>(state_.stage());
            for (int i = 1; i < num_slots; ++i) multiply_slot<false>();
            multiply_slot<true>();
            __syncwarp();
            if (ptx::elect_one()) ptx::mbarrier_arrive(memory_.queries_empty(slot.stage()));
        }
    }

private:
    static constexpr int kQ = P::kQueries, kPairs = (kQ + 1) / 2, kSteps = P::kHeadDim / 32;
    static constexpr int kTileStride = P::kShared ? 1 : P::kWarpgroups;  // from one of its tiles in a slot to the next

    // Weights of this thread's columns, and where the block's queries and rows lie.
    __device__ __forceinline__ void load_block(int slot) {
#pragma unroll
        for (int g = 0; g < P::kGroups; ++g)
#pragma unroll
            for (int j = 0; j < P::kN / 8; ++j) {
                const int column = (first_set_ + g) * P::kN + 8 * j + 2 * (lane_ % 4);
                const uint2 v = ptx::load_shared_v2(memory_.weights(slot) + column * 4);
                weights_[g][2 * j] = __uint_as_float(v.x);
                weights_[g][2 * j + 1] = __uint_as_float(v.y);
            }
        rows_ = memory_.rows(slot) + (first_set_ * kQ + lane_ % 4 / 2) * 16;
        queries_ = mma::swizzled_descriptor(memory_.queries(slot)) + first_set_ * (P::kN * 128 / 16);
    }
    // The tile in its slot of unit u: tile u / kGroups of this warpgroup, with set u % kGroups of queries.
    template <int u>
    __device__ __forceinline__ int tile() const {
        return first_tile_ + u / P::kGroups * kTileStride;
    }
    // Starts the products of unit u.
    template <int u>
    __device__ __forceinline__ void issue(int stage) {
        constexpr int a = u % P::kAccumulators;
        const uint64_t set = queries_ + u % P::kGroups * (P::kN * 128 / 16);
        if constexpr (P::kFp4) {
            const int c = lane_ % 4;
            const uint32_t row = memory_.keys(stage) + (tile<u>() * 64 + fragment_row_) * P::kRowBytes;
            const uint32_t scales = memory_.scales(stage) + (tile<u>() * 64 + fragment_row_) * 4;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                uint32_t words[kSteps], largest;
                mma::load_words<P::kHeadDim>(words, row + r * 8 * P::kRowBytes, c);
                const uint32_t codes = ptx::load_shared_u32(scales + r * 32);
                const float f = mma::largest_scale<P::kHeadDim>(codes, largest);
                if (r == c % 2) factor_[a] = f;
#pragma unroll
                for (int j = 0; j < kSteps; ++j) {
                    const uint32_t below = largest - (codes >> (8 * mma::group_of_word<P::kHeadDim>(c, j)) & 255);
                    mma::decode_mx(words[j], below, fragment_[a][j][r], fragment_[a][j][2 + r]);
                }
            }
            mma::issue_scores<P::kN, P::kHeadDim>(acc_[a], fragment_[a], set);
        } else {
            const uint64_t keys = mma::swizzled_descriptor(memory_.keys(stage)) + tile<u>() * (64 * 128 / 16);
            mma::issue_scores<P::kN, P::kHeadDim>(acc_[a], keys, set);
            factor_[a] = ptx::load_shared_f32(memory_.scales(stage) + (tile<u>() * 64 + own_row_) * 4);
        }
    }
    // Sums unit u up over this thread's heads.
    template <int u>
    __device__ __forceinline__ void sum_unit(float (&sum)[2][kQ]) {
        mma::sum_heads<P::kHeads, kQ>(sum, acc_[u % P::kAccumulators], weights_[u % P::kGroups]);
    }
    // Writes the logits of unit u.
    template <int u>
    __device__ __forceinline__ void store(const float (&sum)[2][kQ], float factor) {
        constexpr int g = u % P::kGroups;
        float total[kPairs];
        mma::sum_quad<kQ>(total, sum, lane_);
        const int key = position_ + tile<u>() * 64 + own_row_;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (kQ % 2 && i == kQ / 2 && lane_ % 4 / 2) continue;
            // registers for what is read once in a unit would be spilled
            const uint4 row = ptx::load_shared_v4(rows_ + (g * kQ + 2 * i) * 16);
            if (static_cast<uint32_t>(key) - row.x >= row.y) continue;
            const float logit = total[i] * factor;
            const uint64_t logits = static_cast<uint64_t>(row.w) << 32 | row.z;
            if constexpr (P::kBf16) {
                ptx::store_global_u16(reinterpret_cast<uint16_t*>(logits) + key,
                                      static_cast<uint16_t>(ptx::pack_bf16x2(logit, 0.f)));
            } else {
                ptx::store_global_f32(reinterpret_cast<float*>(logits) + key, logit);
            }
        }
    }
    // The slot at hand, whose unit 0 was issued. kLast: of the block.
    // NOTES: a unit is issued when all before it are complete (wait_group 0, not 1): across the loop's back edge the
    // compiler would not let products run on otherwise. The other warpgroups' products fill the gap. The block's last
    // slot has code of its own for the same reason.
    template <bool kLast>
    __device__ __forceinline__ void multiply_slot() {
        const int stage = state_.stage();
        state_.advance();
        multiply_units<kLast, 0>(stage);
        position_ += P::kKeys;
    }
    template <bool kLast, int u>
    __device__ __forceinline__ void multiply_units(int stage) {
        constexpr bool kSlotEnds = u == P::kUnits - 1;
        const float factor = factor_[u % P::kAccumulators];
        float sum[2][kQ];
        if constexpr (P::kAccumulators == 1) {
            ptx::wgmma_wait<0>();
            if constexpr (kSlotEnds) release(stage);
            sum_unit<u>(sum);
            issue_next<kLast, u>(stage);
        } else {
            if constexpr (kSlotEnds && !kLast) ptx::mbarrier_wait(memory_.keys_full(state_.stage()), state_.parity());
            ptx::wgmma_wait<0>();
            issue_next<kLast, u>(stage);
            if constexpr (kSlotEnds) release(stage);
            sum_unit<u>(sum);
        }
        store<u>(sum, factor);
        if constexpr (!kSlotEnds) multiply_units<kLast, u + 1>(stage);
    }
    // The unit after u.
    template <bool kLast, int u>
    __device__ __forceinline__ void issue_next(int stage) {
        if constexpr (u + 1 < P::kUnits) {
            issue<u + 1>(stage);
        } else if constexpr (!kLast) {
            if constexpr (P::kAccumulators == 1) ptx::mbarrier_wait(memory_.keys_full(state_.stage()), state_.parity());
            issue<0>(state_.stage());
        }
    }
    // This warp is done with the slot.
    __device__ __forceinline__ void release(int stage) {
        __syncwarp();  // the scales are in the registers of every lane
        if (ptx::elect_one()) ptx::mbarrier_arrive(memory_.keys_empty(stage));
    }

    const MqaMemory<P>& memory_;
    const int lane_, fragment_row_, own_row_, first_set_, first_tile_;
    mma::PipelineState<P::kStages> state_;
    int position_ = 0;
    uint32_t rows_ = 0;
    uint64_t queries_ = 0;
    float weights_[P::kGroups][P::kN / 4];
    float acc_[P::kAccumulators][P::kN / 2];
    uint32_t fragment_[P::kAccumulators][kSteps][4];  // FP4
    float factor_[P::kAccumulators];                  // of the logits of own_row_
};

// Launch: MqaMemory<P>::kBytes of dynamic shared memory, P::kThreads threads, any number of CTAs.
template <class P>
__device__ __forceinline__ void sm90_mqa_logits(const MqaArgs& args, uint8_t* smem) {
    const MqaMemory<P> memory(smem);
    if (threadIdx.x == 0) memory.init();
    if (threadIdx.x == 32) {
        ptx::prefetch_tensor_map(&args.keys);
        if constexpr (!P::kFp4) ptx::prefetch_tensor_map(&args.q);
        if constexpr (!P::kPaged) ptx::prefetch_tensor_map(&args.scales);
    }
    if constexpr (P::kPaged) {
        __syncthreads();
    } else {
        mqa_divide<P>(args, memory.scratch(), memory.share());
    }
    const int wg = ptx::thread_index() / 128, thread = ptx::thread_index() % 128;
    if (wg == P::kWarpgroups) {
        ptx::setmaxnreg_dec<P::kOtherRegisters>();
        const int warp = thread / 32;
        if (warp == 0) {
            mqa_load<P>(args, memory, MqaTasks<P>(args, memory.share()), thread);
        } else if (warp < 3) {
            mqa_prepare<P>(args, memory, MqaTasks<P>(args, memory.share()), thread - 32);
        } else if (args.clean) {
            mqa_fill<P>(args, thread - 96);
        }
    } else {
        ptx::setmaxnreg_inc<P::kMathRegisters>();
        MqaMath<P>(memory, wg, thread).run();
    }
}

}  // namespace megamoe::impls
