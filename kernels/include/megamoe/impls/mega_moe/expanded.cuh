// The mega-kernel for very many rows an expert: tokens on M, row blocks of 128, E4M3 weights from shared memory (SS).
//
// | warps   | role | registers |
// | 0 - 7   | math: products, epilogues; publish, combine, pulls, expansion of weights | 216 |
// | 8, 9    | load: X and scales; weights | 72 |
// | 10      | pull: moves rows that the scheduler has looked up | 72 |
// | 11      | scheduler: tickets, pulls, the wait for rows and what is known of them | 72 |
// Register sum: (2 * 216 + 72) * 128 = 504 * 128. Beyond 512 * 128 setmaxnreg hangs.
// Barriers: the ring's (mma/ss_mainloop.cuh), the tasks' and the pulls' (shared.cuh); named barrier 1: the math warps;
// 2, 3: a math warpgroup. The two go on alone from tile to tile, so that one multiplies while the other stores.
//
// A tile is 128 rows times 256 rows of weights: of W13 gate and up of 128 intermediate columns in turn, so that a warpgroup
// has all columns that share a scale of h. Weights are decoded once for all row blocks of a unit, into a panel in global
// memory that the tasks of the column block then read (panels.cuh).
#pragma once
#include "megamoe/impls/mega_moe/combine.cuh"
#include "megamoe/impls/mega_moe/panels.cuh"
#include "megamoe/mma/ss_mainloop.cuh"

namespace megamoe::impls {

namespace expanded {

using namespace ss;

using L1 = mma::SsPolicy<mma::WeightFormat::kFp8, kBlockScales ? mma::ScaleGranularity::kBlock128 : mma::ScaleGranularity::kToken, 1, 2, 4>;
using L2 = mma::SsPolicy<mma::WeightFormat::kFp8, mma::ScaleGranularity::kBlock128, 1, 2, 4>;
constexpr u32 kThreads = 384, kBlockRows = L2::kTileM, kBoxRows = 128, kLoadWarps = 2;
constexpr int kMathRegisters = 216, kOtherRegisters = 72;
constexpr u32 kRingBytes = (L2::kSmemBytes + 127) / 128 * 128;
constexpr u32 kStagingBytes = kPullSlots * kPullBytes;
// Scales of the weights of a tile, by number of the tile: more than kStages + 2 are never open.
constexpr u32 kFeatureScaleSets = 8, kFeatureScaleBytes = kFeatureScaleSets * L2::kTileN * 4;
constexpr u32 kFactBytes = kTaskSlots * kBlockRows * 8;
constexpr u32 kStateBytes = (sizeof(SharedState) + 15) / 16 * 16;
// ring, staging, scales of weights, facts, state; then the schedule's sums
constexpr u32 kFixedBytes = kRingBytes + kStagingBytes + kFeatureScaleBytes + kFactBytes + kStateBytes;
static_assert(kExpandBlocks * mma::kMoeBlockBytes <= L2::kStageBytes, "packed blocks in a slot of the ring");
static_assert(L2::kTileN == kPanelRows && L2::kWBytes == kPanelStepBytes, "a panel is what a tile multiplies with");

struct Ring : TaskRing<L2> {
    using TaskRing<L2>::TaskRing;
    __device__ __forceinline__ uint32_t feature_scales(u32 tile) const {
        return base + kRingBytes + kStagingBytes + tile % kFeatureScaleSets * (L2::kTileN * 4);
    }
    // By one thread, before the CTA's first barrier.
    __device__ __forceinline__ void init() const {
        for (int s = 0; s < L2::kStages; ++s) {
            ptx::mbarrier_init(full(s), kLoadWarps);
            ptx::mbarrier_init(empty(s), kMathThreads / 32);
        }
        ptx::fence_mbarrier_init();
    }
};

// The loaders' wait for slot n % kStages. False: the call is lost, and nothing is loaded any more.
__device__ __forceinline__ bool wait_for_slot(const Context& c, const Ring& ring, u32 n) {
    c.wait_barrier(ring.empty(n % L2::kStages), n / L2::kStages & 1 ^ 1);
    return !c.aborted();
}

// By one thread of each of two warps, since an operation on a barrier or a copy costs its thread 100 to 400 cycles: X and its
// scales; the weights and theirs.
template <bool kWeights>
__device__ __forceinline__ void load_role(const Context& c, const Ring& ring) {
    const MegaMoeArgs& args = c.args;
    TaskReader tasks;
    u32 n = 0, tiles = 0;  // K steps and tiles so far
    for (;;) {
        const TaskRecord& task = tasks.next(c);
        const Phase phase = task.phase;
        if (phase == Phase::end) return;
        if (phase == Phase::l1 || phase == Phase::l2) {
            const bool first = phase == Phase::l1;
            const u32 depth = first ? l1_steps(args) : l2_steps(args), slot = tasks.slot();
            c.wait_barrier(ptx::smem_address(&c.s.rows_ready[slot]), ptx::load_shared_volatile(ptx::smem_address(&c.s.done_rounds[slot])) & 1);
            if (!c.aborted()) {
                if constexpr (kWeights) {
                    const Panel panel(c, phase, task.expert, task.index);
                    const u8* w = panel_at(c, task.panel);
                    const float* w_scale = (first ? args.w13_scale : args.w2_scale) + static_cast<u64>(panel.first_block) * mma::kMoeBlockRows;
                    const u32 scale_bytes = panel.blocks * (mma::kMoeBlockRows * 4);
                    for (u32 k = 0; k < depth; ++k, ++n) {
                        const u32 stage = n % L2::kStages;
                        const uint32_t bar = ring.full(stage);
                        if (!wait_for_slot(c, ring, n)) continue;
                        ptx::mbarrier_arrive_expect_tx(bar, L2::kWBytes + (k == 0 ? scale_bytes : 0));
                        ptx::bulk_load(ring.w(stage), w + static_cast<u64>(k) * L2::kWBytes, L2::kWBytes, bar);
                        if (k == 0) ptx::bulk_load(ring.feature_scales(tiles), w_scale, scale_bytes, bar);
                    }
                } else {
                    const ptx::TensorMap* map = first ? &args.ring1 : &args.ring2;
                    const u32 row = first ? task.ring1_row : task.ring2_row;
                    const bool scaled = !first || kBlockScales;
                    const float* scales = reinterpret_cast<const float*>(c.base() + (first ? c.s.at.ring1_scales : c.s.at.ring2_scales)) +
                                          static_cast<u64>(row) * depth;
                    for (u32 k = 0; k < depth; ++k, ++n) {
                        const u32 stage = n % L2::kStages;
                        const uint32_t bar = ring.full(stage);
                        if (!wait_for_slot(c, ring, n)) continue;
                        ptx::mbarrier_arrive_expect_tx(bar, L2::kXBytes + (scaled ? kBlockRows * 4 : 0));
                        ptx::tensor_load_2d(ring.x(stage), map, bar, k * mma::kBlockK, row);
                        if (scaled) ptx::bulk_load(ring.scales(stage), scales + k * kBlockRows, kBlockRows * 4, bar);
                    }
                }
            } else {
                n += depth;
            }
            ++tiles;
        } else if (phase == Phase::expand && task.weights != Phase::end) {
            const Panel panel(c, task.weights, task.expert, task.index);
            const u32 begin = part_begin(panel.depth, task.part), end = part_begin(panel.depth, task.part + 1);
            for (u32 block = 0; block < panel.blocks; ++block)
                for (u32 k = begin; k < end; k += kExpandBlocks, ++n) {
                    const u32 stage = n % L2::kStages;
                    const uint32_t bar = ring.full(stage);
                    if (!wait_for_slot(c, ring, n)) continue;
                    if constexpr (kWeights) {
                        const u32 bytes = min_of(kExpandBlocks, end - k) * mma::kMoeBlockBytes;
                        ptx::mbarrier_arrive_expect_tx(bar, bytes);
                        ptx::bulk_load(ring.x(stage), panel.packed(args, task.weights, block, k), bytes, bar);
                    } else {
                        ptx::mbarrier_arrive(bar);
                    }
                }
        }
        tasks.release_by_one(c);
    }
}

// Of the 64 rows of a warpgroup a thread has the sums of two, `first_row` and 8 further.
__device__ __forceinline__ u32 first_row(u32 all) { return all / 32 * 16 + all % 32 / 4; }

// Eight numbers that belong to eight neighbouring rows of weights: of scales in shared memory, of a bias in global memory.
struct Eight {
    float v[8];
    __device__ __forceinline__ void load_shared(uint32_t at) {
        const uint4 a = ptx::load_shared_v4(at), b = ptx::load_shared_v4(at + 16);
        v[0] = __uint_as_float(a.x), v[1] = __uint_as_float(a.y), v[2] = __uint_as_float(a.z), v[3] = __uint_as_float(a.w);
        v[4] = __uint_as_float(b.x), v[5] = __uint_as_float(b.y), v[6] = __uint_as_float(b.z), v[7] = __uint_as_float(b.w);
    }
    // Null: zeros.
    __device__ __forceinline__ void load_global(const float* at) {
        float4 a = make_float4(0.f, 0.f, 0.f, 0.f), b = a;
        if (at != nullptr) a = __ldg(reinterpret_cast<const float4*>(at)), b = __ldg(reinterpret_cast<const float4*>(at + 4));
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
};

// Value (n, half, jj, i) of a thread is column 64 n + 16 (lane % 4) + 4 jj + i of row first_row + 8 half: its sums of gate and
// up are acc[n][4 (4 jj + i) + 2 half] and the next. h takes the place of the first.
__device__ __forceinline__ void math_l1(const Context& c, const Ring& ring) {
    const MegaMoeArgs& args = c.args;
    float acc[2][64];
    const u32 number = multiply<L1>(acc, c, ring, l1_steps(args));
    const CycleScope cycles(c, 6, ptx::thread_index() == 0);
    const TaskReader tasks = reader_aside(c);
    const TaskRecord& task = tasks.task(c);
    const u32 all = ptx::thread_index(), lane = all % 32, row = first_row(all);
    const Fact* block_facts = ring.facts + tasks.slot() * kBlockRows;
    const Fact facts[2] = {block_facts[row], block_facts[row + 8]};
    const uint32_t scales = ring.feature_scales(number) + lane % 4 * 32;
    const float* bias = args.b13;
    if (bias != nullptr) bias += Panel(c, Phase::l1, task.expert, task.index).first_block * mma::kMoeBlockRows + lane % 4 * 8;
    float amax[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int jj = 0; jj < 4; ++jj) {
            Eight w, b;
            w.load_shared(scales + n * 512 + jj * 128);
            b.load_global(bias == nullptr ? nullptr : bias + n * 128 + jj * 32);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float weight = __uint_as_float(facts[half].other), row_scale = kBlockScales ? 1.f : facts[half].value;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float* a = &acc[n][4 * (4 * jj + i) + 2 * half];
                    const float gate = l1_value(a[0], row_scale, w.v[2 * i], b.v[2 * i]);
                    const float up = l1_value(a[1], row_scale, w.v[2 * i + 1], b.v[2 * i + 1]);
                    a[0] = __fmul_rn(activate(args, gate, up), weight);
                    amax[half] = fmaxf(amax[half], fabsf(a[0]));
                }
            }
        }
    const u64 columns = align_up(args.shape.intermediate, 128);
    u8* h_rows = reinterpret_cast<u8*>(c.base() + c.s.at.ring2) + (task.ring2_row + row) * columns + task.index * 128 + lane % 4 * 16;
    float* h_scales = reinterpret_cast<float*>(c.base() + c.s.at.ring2_scales) +
                      static_cast<u64>(task.ring2_row) * l2_steps(args) + task.index * kBlockRows + row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float m = amax[half];
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        const float h_scale = e4m3_scale(m), inverse = __fdiv_rn(1.0f, h_scale);
        if (row + half * 8 >= task.num_rows) continue;
        if (lane % 4 == 0) h_scales[half * 8] = h_scale;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            u32 h[4];
#pragma unroll
            for (int jj = 0; jj < 4; ++jj) {
                const float* a = &acc[n][16 * jj + 2 * half];
                h[jj] = quantize4(a[0], a[4], a[8], a[12], inverse);
            }
            ptx::store_global_v4(h_rows + half * 8 * columns + n * 64, h[0], h[1], h[2], h[3]);
        }
    }
}

__device__ __forceinline__ void math_l2(const Context& c, const Ring& ring) {
    const MegaMoeArgs& args = c.args;
    float acc[2][64];
    const u32 number = multiply<L2>(acc, c, ring, l2_steps(args));
    const CycleScope cycles(c, 6, ptx::thread_index() == 0);
    const TaskReader tasks = reader_aside(c);
    const TaskRecord& task = tasks.task(c);
    const u32 all = ptx::thread_index(), lane = all % 32, row = first_row(all), column = task.index * 256 + lane % 4 * 8;
    const Fact* block_facts = ring.facts + tasks.slot() * kBlockRows;
    const bool lost = c.aborted();  // then the facts may be of nothing, and lead anywhere
    u64 to[2];
    float weight[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Fact fact = block_facts[row + half * 8];
        weight[half] = fact.value;
        to[half] = 0;
        if (row + half * 8 < task.num_rows && !lost)
            to[half] = c.peer(fact.other >> kSlotRowBits) + c.s.at.slots +
                       (static_cast<u64>(fact.other & ((1u << kSlotRowBits) - 1)) * args.shape.hidden + column) * 2;
    }
    wait_for_link(c, 2 * 16 * 256);  // 16 rows of 256 columns
    const uint32_t scales = ring.feature_scales(number) + lane % 4 * 32;
    const float* bias = args.b2;
    if (bias != nullptr) bias += task.expert * ceil_div(args.shape.hidden, 128) * 128 + column;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int jj = 0; jj < 4; ++jj) {
            if (column + n * 128 + jj * 32 >= args.shape.hidden) break;
            Eight w, b;
            w.load_shared(scales + n * 512 + jj * 128);
            b.load_global(bias == nullptr ? nullptr : bias + n * 128 + jj * 32);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (to[half] == 0) continue;
                // "before": the weight is in h already, and the bias has its own
                const float outer = args.weight_before ? 1.f : weight[half], inner = args.weight_before ? weight[half] : 1.f;
                u32 y[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* a = &acc[n][4 * (4 * jj + i) + 2 * half];
                    y[i] = ptx::pack_bf16x2(l2_value(a[0], w.v[2 * i], b.v[2 * i], inner, outer), l2_value(a[1], w.v[2 * i + 1], b.v[2 * i + 1], inner, outer));
                }
                ptx::store_global_v4(reinterpret_cast<void*>(to[half] + n * 256 + jj * 64), y[0], y[1], y[2], y[3]);
            }
        }
}

// What the shared roles do here besides, or in a way of this kernel.
struct Instance {
    static constexpr u32 kBlockRows = expanded::kBlockRows;
    static __device__ __forceinline__ void end_tiles(const Context& c, const TaskRecord& task) {
        if (!c.aborted())  // the panel has been read: pairs with whoever expands another one into its slot
            ptx::add_release_gpu(reinterpret_cast<void*>(c.word(c.s.at.panel_used, task.panel)), task.uses);
    }
    static __device__ __forceinline__ void prefetch(const Context& c, const TaskRecord& task) {
        if (task.phase == Phase::expand) prefetch_packed(c, task);
    }
    static __device__ __forceinline__ void l1(const Context& c, const Ring& ring, const TaskRecord&) { math_l1(c, ring); }
    static __device__ __forceinline__ void l2(const Context& c, const Ring& ring, const TaskRecord&) { math_l2(c, ring); }
    static __device__ __forceinline__ void expand(const Context& c, const Ring& ring, const TaskRecord& task, u32 thread) {
        const u32 slots = impls::expand<kMathThreads>(c, ring, task, ptx::load_shared_volatile(aside(c, 1)), thread);
        __syncwarp();
        ptx::store_shared_volatile(aside(c, 1), slots);
    }
};

}  // namespace expanded

// Launch: kFixedBytes + 4 * (3 * local experts + 2) bytes of dynamic shared memory, kThreads threads, any number of CTAs.
__device__ __forceinline__ void sm90_mega_moe_expanded(const MegaMoeArgs& args, uint8_t* smem) {
    using namespace expanded;
    Fact* facts = reinterpret_cast<Fact*>(smem + kRingBytes + kStagingBytes + kFeatureScaleBytes);
    SharedState& s = *reinterpret_cast<SharedState*>(smem + kFixedBytes - kStateBytes);
    u32* sums = reinterpret_cast<u32*>(smem + kFixedBytes);
    const Context c{args, s};
    const Ring ring(ptx::smem_address(smem), facts, c);
    enter(c, kMathThreads / 32 + kLoadWarps, kMathThreads / 32);
    if (threadIdx.x == 32) ring.init();
    __syncthreads();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < kMathThreads / 32) {
        ptx::setmaxnreg_inc<kMathRegisters>();
        math_role<Instance>(c, ring);
    } else {
        ptx::setmaxnreg_dec<kOtherRegisters>();
        if (warp == kThreads / 32 - 1) {
            schedule_role<Instance>(c, facts, sums, ptx::smem_address(smem) + kRingBytes, lane);
        } else if (warp == kMathThreads / 32) {
            if (lane == 0) load_role<false>(c, ring);
        } else if (warp == kMathThreads / 32 + 1) {
            if (lane == 0) load_role<true>(c, ring);
        } else {
            if (lane == 0) pull_role(c, ptx::smem_address(smem) + kRingBytes);
        }
    }
    leave(c, sums, kThreads);
}

}  // namespace megamoe::impls
