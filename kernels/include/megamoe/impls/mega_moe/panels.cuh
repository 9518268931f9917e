// Weights of a column block, FP4 -> E4M3, once for all row blocks of a unit: a panel in global memory, of this device alone.
//
// A panel holds two blocks of 128 rows: of W13 gate and up of 128 intermediate columns, of W2 256 columns of hidden. K step k
// of it is [256 rows][128] E4M3 in the order in which the main loop wants it in shared memory (128B swizzle): one bulk copy.
#pragma once
#include "megamoe/impls/mega_moe/ss_roles.cuh"
#include "megamoe/mma/moe_block.cuh"

namespace megamoe::impls {

constexpr u32 kPanelRows = 256, kPanelStepBytes = kPanelRows * mma::kBlockK;

// Where its packed weights lie.
struct Panel {
    u32 first_block, blocks, depth;  // blocks of 128 rows, of all experts; K steps
    __device__ __forceinline__ Panel(const Context& c, Phase weights, u32 expert, u32 index) {
        const MegaMoeArgs& args = c.args;
        const bool first = weights == Phase::l1;
        const u32 all = first ? 2 * ss::l2_steps(args) : ceil_div(args.shape.hidden, mma::kMoeBlockRows);  // of an expert
        first_block = expert * all + 2 * index;
        blocks = min_of(2u, all - 2 * index);
        depth = first ? ss::l1_steps(args) : ss::l2_steps(args);
    }
    __device__ __forceinline__ const u8* packed(const MegaMoeArgs& args, Phase weights, u32 block, u32 k) const {
        const u8* w = weights == Phase::l1 ? args.w13 : args.w2;
        return w + (static_cast<u64>(first_block + block) * depth + k) * mma::kMoeBlockBytes;
    }
};
__device__ __forceinline__ u8* panel_at(const Context& c, u32 slot) {
    const u32 depth = max_of(ss::l1_steps(c.args), ss::l2_steps(c.args));
    return c.args.panels + static_cast<u64>(slot) * depth * kPanelStepBytes;
}
// K steps of a part.
__device__ __forceinline__ u32 part_begin(u32 depth, u32 part) { return depth * part / kExpandParts; }

// By one thread: the packed weights of a part that is next, into L2.
__device__ __forceinline__ void prefetch_packed(const Context& c, const TaskRecord& task) {
    if (task.weights == Phase::end) return;
    const Panel panel(c, task.weights, task.expert, task.index);
    const u32 begin = part_begin(panel.depth, task.part), steps = part_begin(panel.depth, task.part + 1) - begin;
    if (steps == 0) return;
    for (u32 block = 0; block < panel.blocks; ++block)
        ptx::prefetch_l2(panel.packed(c.args, task.weights, block, begin), steps * mma::kMoeBlockBytes);
}

// A slot of the ring takes this many packed blocks, of one block of rows and successive K steps.
constexpr u32 kExpandBlocks = 4;
static_assert(mma::kMoeBlockBytes % 16 == 0, "bulk copies");

// By all math threads, from the ring that the weights' loader fills. A row of a block belongs to four lanes, a group of 32
// weights each: a lane gets both halves of a sector of 32 bytes, and two lanes exchange one, so that a store of the warp writes
// whole sectors. `slots`: of the ring, so far.
template <u32 kMathThreads, class Ring>
__device__ __forceinline__ u32 expand(const Context& c, const Ring& ring, const TaskRecord& task, u32 slots, u32 thread) {
    constexpr u32 kWarps = kMathThreads / 32, kJobs = kExpandBlocks * (mma::kMoeBlockRows / 8) / kWarps;  // of a warp and slot
    static_assert(kWarps == 8, "two jobs a block and warp");
    if (task.weights != Phase::end) {
        const Panel panel(c, task.weights, task.expert, task.index);
        const u32 begin = part_begin(panel.depth, task.part), end = part_begin(panel.depth, task.part + 1);
        const u32 lane = thread % 32, q = lane / 8, first_row = thread / 32 * 8 + lane % 8;
        const bool odd = q % 2;
        u8* target = panel_at(c, task.panel);
        for (u32 block = 0; block < panel.blocks; ++block)
#pragma unroll 1
            for (u32 k = begin; k < end; k += kExpandBlocks, ++slots) {
                const u32 stage = slots % Ring::kSlots, count = min_of(kExpandBlocks, end - k);
                ring.wait(ring.full(stage), slots / Ring::kSlots & 1);
                uint4 codes[kJobs];
                u32 exponents[kJobs];
#pragma unroll
                for (u32 i = 0; i < kJobs; ++i) {  // beyond the last block: what the slot held before
                    const uint32_t at = ring.x(stage) + i / 2 * mma::kMoeBlockBytes;
                    const u32 t = first_row + i % 2 * 64;
                    codes[i] = ptx::load_shared_v4(at + q * mma::kMoeGroupBytes + t * 16);
                    exponents[i] = ptx::load_shared_u32(at + mma::kMoeCodeBytes + t / 2 * 4) >> (t % 2 * 16 + 4 * q) & 15;
                }
                __syncwarp();
                if (ptx::elect_one()) ptx::mbarrier_arrive(ring.empty(stage));
                u8* to = target + static_cast<u64>(k) * kPanelStepBytes + block * (kPanelStepBytes / 2);
#pragma unroll
                for (u32 i = 0; i < kJobs; ++i) {
                    if (i / 2 >= count) break;
                    const u32 row = mma::moe_row_of_place(first_row + i % 2 * 64);
                    const mma::Fp4Table table(exponents[i]);
                    const u32 word[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
                    u32 first[4], second[4];  // of the sector of the even lane, of the odd one's
#pragma unroll
                    for (u32 j = 0; j < 4; ++j) {
                        u32 low, high;
                        mma::decode_fp4(word[j], table, low, high);
                        const u32 other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 8);
                        first[j] = odd ? other : low;
                        second[j] = odd ? high : other;
                    }
                    // the pieces of 16 bytes lie at their places xor (row % 8): an even lane has the lower half of both sectors
                    u8* at = to + i / 2 * kPanelStepBytes + row * mma::kSwizzleRowBytes;
                    const u32 piece = (4 * (q / 2) + odd) ^ row % 8;
                    ptx::store_global_v4(at + piece * 16, first[0], first[1], first[2], first[3]);
                    ptx::store_global_v4(at + (piece ^ 2) * 16, second[0], second[1], second[2], second[3]);
                }
            }
    }
    ptx::fence_proxy_async();  // stored by threads, read by bulk copies of the CTAs that multiply
    ptx::named_barrier_sync(1, kMathThreads);
    if (thread == 0 && task.weights != Phase::end)
        ptx::add_release_gpu(reinterpret_cast<void*>(c.word(c.s.at.expanded, task.panel)), 1);  // pairs with whoever waits for the panel
    return slots;
}

}  // namespace megamoe::impls
