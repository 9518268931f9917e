// Pull: rows of the sources' workspaces -> this rank's ring of L1 input.
//
// By bulk copies through shared memory while the math warps are at work: the scheduler's warp looks up the rows of a task
// together; from then on one thread moves them, a look at a time: a copy in, when it has landed a copy out, kPullSlots pieces
// in flight. It is one of the scheduler's warp, which does other work in between, or of a warp of its own (kHasPuller). By the
// math warps while they have nothing else to do, through registers. The scheduler decides which for each task
// (turn_scheduler); one of either kind can be in flight in a CTA.
#pragma once
#include "megamoe/impls/mega_moe/throttle.cuh"
#include "megamoe/impls/mega_moe/watch.cuh"

namespace megamoe::impls {

struct PullPieces {
    const Context& c;
    uint32_t staging;
    u32 serial, pieces;
    __device__ __forceinline__ PullPieces(const Context& context, uint32_t at)
        : c(context), staging(at), serial(context.s.pull.serial), pieces(ceil_div(context.args.shape.hidden, kPullBytes)) {}
    __device__ __forceinline__ uint32_t slot(u32 n) const { return staging + (serial + n) % kPullSlots * kPullBytes; }
    __device__ __forceinline__ uint32_t full(u32 n) const { return ptx::smem_address(&c.s.pull_full[(serial + n) % kPullSlots]); }
    __device__ __forceinline__ u32 parity(u32 n) const { return (serial + n) / kPullSlots & 1; }
    __device__ __forceinline__ u32 offset(u32 n) const { return n % pieces * kPullBytes; }
    __device__ __forceinline__ u32 bytes(u32 n) const { return min_of(kPullBytes, c.args.shape.hidden - offset(n)); }
};

__device__ __forceinline__ bool pull_in_flight(const Context& c) {
    return ptx::load_shared_volatile(ptx::smem_address(&c.s.pull.total)) != 0;
}

// Copies in, into the slots whose last piece has been copied out in an earlier turn: nothing to wait for.
__device__ __forceinline__ void load_pieces(const Context& c, const PullPieces& pieces) {
    PullState& pull = c.s.pull;
    u32 loaded = pull.loaded;
    const u32 end = min_of(pull.total, pull.stored + kPullSlots);
    if (loaded >= end) return;
#ifdef MEGAMOE_THROTTLE_GBPS
    if (pull.start == 0) pull.start = claim_link(c, (end - loaded) * (c.args.shape.hidden / pieces.pieces));
    if (ptx::global_timer() < pull.start) return;
    pull.start = 0;
#endif
    ptx::bulk_wait_read_all();
    for (; loaded < end; ++loaded) {
        const u32 bytes = pieces.bytes(loaded);
        ptx::mbarrier_arrive_expect_tx(pieces.full(loaded), bytes);
        ptx::bulk_load(pieces.slot(loaded), reinterpret_cast<const void*>(pull.from[loaded / pieces.pieces] + pieces.offset(loaded)),
                       bytes, pieces.full(loaded));
    }
    pull.loaded = loaded;
}

// By the moving thread, as often as it likes. `staging`: kPullSlots * kPullBytes of shared memory.
__device__ __forceinline__ void step_pull(const Context& c, uint32_t staging) {
    PullState& pull = c.s.pull;
    const u32 total = pull.total;
    if (total == 0) return;
    const PullPieces pieces(c, staging);
    load_pieces(c, pieces);
    u32 stored = pull.stored;
    const u32 loaded = pull.loaded;
    while (stored < loaded && ptx::mbarrier_test(pieces.full(stored), pieces.parity(stored))) {
        const u64 to = pull.to + static_cast<u64>(stored / pieces.pieces) * c.args.shape.input_row_bytes + pieces.offset(stored);
        ptx::bulk_store(reinterpret_cast<void*>(to), pieces.slot(stored), pieces.bytes(stored));
        ptx::bulk_commit();
        ++stored;
    }
    pull.stored = stored;
    if (stored == total) {
        ptx::bulk_wait_all();
        ptx::fence_proxy_async();
        ptx::add_release_gpu(reinterpret_cast<void*>(pull.arrived), 1);  // pairs with whoever waits for the rows
        pull.serial = pieces.serial + total;
        end_pull_event(c);
        __threadfence_block();
        ptx::store_shared_volatile(ptx::smem_address(&pull.total), 0);
    }
}

// Which rows of its row block a task (Task, or TaskRecord) brings: at most kPullRows, none where the block ends before them.
struct PullPart {
    u32 begin, rows;
    template <class T>
    __device__ __forceinline__ PullPart(const TileShape& tile, const T& task) {
        const u32 part = ceil_div(tile.block_rows, tile.pulls_per_block);
        begin = min_of(task.num_rows, task.index * part);
        rows = min_of(task.num_rows, begin + part) - begin;
    }
};

// Where a row of a local expert lies, and what is known of it.
struct PulledRow {
    u64 from = 0;  // its source's workspace
    u32 source = 0, token = 0;
    uint2 item{0, 0};

    __device__ __forceinline__ u64 input(const Context& c) const {
        return from + c.s.at.input + static_cast<u64>(token) * c.args.shape.input_row_bytes;
    }
    __device__ __forceinline__ u64 scales(const Context& c) const {
        return from + c.s.at.scales + static_cast<u64>(token) * c.args.shape.scale_row_bytes;
    }
    // Keeps it for the epilogues and for linear 2.
    __device__ __forceinline__ void keep(const Context& c, u64 meta_row) const {
        u32 row_scale = __float_as_uint(1.f);  // what the sums of linear 1 are multiplied with at the end
        if constexpr (!kBlockScales) row_scale = __ldcg(reinterpret_cast<const u32*>(scales(c)));
        uint4* meta = reinterpret_cast<uint4*>(c.base() + c.s.at.meta) + meta_row;
        __stcg(meta, make_uint4(source, item.x, item.y, row_scale));
    }
};
__device__ __forceinline__ PulledRow find_row(const Context& c, u32 local_expert, u32 row) {
    const MegaMoeArgs& args = c.args;
    PulledRow found;
    const uint2* counts = reinterpret_cast<const uint2*>(counts_of(c)) + local_expert;
    u32 first;
    for (;; ++found.source) {  // the sources' rows follow each other
        const uint2 told = __ldcg(counts + found.source * args.limits.max_local_experts);  // an ExpertCount
        first = told.y;
        if (row < told.x || found.source + 1 == args.limits.num_ranks) break;
        row -= told.x;
    }
    found.from = c.peer(found.source);
    const u64 list = found.from + c.s.at.lists +
                     static_cast<u64>(c.bank()) * args.limits.max_tokens * args.limits.max_top_k * sizeof(ListEntry);
    found.item = __ldcg(reinterpret_cast<const uint2*>(list) + first + row);
    found.token = found.item.x / args.shape.top_k;
    return found;
}

// By a converged warp: the scales of the task's rows, lane i knows where those of row i lie on their source, into ring 1:
// [128 columns of hidden][row of the block], so that what a K step of the block needs is one piece. `block`: first row of
// the block in the ring, `begin`: first of the task in the block.
__device__ __forceinline__ void pull_scales(const Context& c, u64 from, u32 rows, u32 lane, u64 block, u32 begin) {
    constexpr u32 kAhead = 4;  // loads in flight a lane
    const MegaMoeArgs& args = c.args;
    u32 lanes = 1;  // of a row
    while (2 * lanes * rows <= 32) lanes *= 2;
    const u32 row = lane / lanes, blocks = ceil_div(args.shape.hidden, 128);
    const float4* source = reinterpret_cast<const float4*>(__shfl_sync(0xffffffffu, from, row));
    const u32 end = row < rows ? ceil_div(blocks, 4) : 0;  // vectors of four
    float* to = reinterpret_cast<float*>(c.base() + c.s.at.ring1_scales) + block * blocks + begin + row;
    for (u32 first = lane % lanes; first < end; first += kAhead * lanes) {
        float4 v[kAhead];
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i)
            v[i] = __ldcg(source + min_of(first + i * lanes, end - 1));
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) {
            const float scale[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 k = 4 * (first + i * lanes) + j;
                if (k < blocks) __stcg(to + k * args.tile.block_rows, scale[j]);
            }
        }
    }
    ptx::fence_proxy_async();  // stored by threads, read by bulk copies of the CTAs that multiply
}

// By the scheduler's converged warp, when it has none in flight: where the rows of the task lie, and what is known of each
// for later.
__device__ __forceinline__ void start_pull(const Context& c, const Task& task, uint32_t staging, u64 ring_row, u64 meta_row) {
    const MegaMoeArgs& args = c.args;
    const u32 lane = ptx::thread_index() % 32;  // anew: the scheduler's warp has few registers
    if (lane == 0) begin_pull_event(c, task);
    const auto [begin, rows] = PullPart(args.tile, task);
    const u64 arrived = c.word(c.s.at.arrived, task.row_block);
    if (rows == 0) {  // a part of the row block without rows
        if (lane == 0) {
            ptx::add_release_gpu(reinterpret_cast<void*>(arrived), 1);
            end_pull_event(c);
        }
        return;
    }
    PulledRow found;
    if (lane < rows) {
        found = find_row(c, task.expert, task.first_row + begin + lane);
        c.s.pull.from[lane] = found.input(c);
    }
    __syncwarp();
    if (lane == 0) {
        PullState& pull = c.s.pull;
        pull.to = c.base() + c.s.at.ring1 + (ring_row + begin) * args.shape.input_row_bytes;
        pull.arrived = arrived;
        pull.loaded = pull.stored = 0;
        if constexpr (!kHasPuller) {
            pull.total = rows * ceil_div(args.shape.hidden, kPullBytes);
            ptx::fence_proxy_async();  // sources published their rows by the ordinary path
            load_pieces(c, PullPieces(c, staging));
        }
    }
    if (lane < rows) found.keep(c, meta_row + begin + lane);
    if constexpr (kBlockScales) pull_scales(c, found.scales(c), rows, lane, ring_row, begin);
    __syncwarp();  // the meta rows of all lanes are older than the release of the thread that moves the rows
    if constexpr (kHasPuller) {
        if (lane == 0) {
            __threadfence_block();  // pairs with the puller's
            ptx::store_shared_volatile(ptx::smem_address(&c.s.pull.total), rows * ceil_div(args.shape.hidden, kPullBytes));
        }
        __syncwarp();
    }
}

// By one thread of a warp of its own: moves what the scheduler starts, until it has ended or the call is lost.
__device__ __forceinline__ void pull_role(const Context& c, uint32_t staging) {
    for (;;) {
        if (c.aborted()) return;
        if (!pull_in_flight(c)) {
            const bool ended = ptx::load_shared_volatile(ptx::smem_address(&c.s.scheduler.ended)) != 0;
            if (ended && !pull_in_flight(c)) return;
            __nanosleep(100);
            continue;
        }
        __threadfence_block();     // pairs with the scheduler's
        ptx::fence_proxy_async();  // sources published their rows by the ordinary path
        while (pull_in_flight(c) && !c.aborted()) step_pull(c, staging);
    }
}

// A pull by all math threads, which have nothing else to do: at the start of a call rows are what everyone waits for, and
// the scheduler's warp, which moves them a few pieces at a time between its tickets, takes several times as long. What the
// sources published, and that the ring's slot is free, the scheduler has acquired; the task came by a barrier.
template <u32 kThreads>
__device__ __forceinline__ void pull_by_all(const Context& c, const TaskRecord& task, u32 thread) {
    constexpr u32 kAhead = 8, kUnit = 512;  // loads in flight a lane; bytes that a warp moves at once
    const MegaMoeArgs& args = c.args;
    const auto [begin, rows] = PullPart(args.tile, task);
    if (thread < 32 && rows != 0) {
        PulledRow found;
        if (thread < rows) {
            found = find_row(c, task.expert, task.first_row + begin + thread);
            c.s.pulled_from[thread] = found.input(c);
            found.keep(c, task.meta_row + begin + thread);
        }
        if constexpr (kBlockScales) pull_scales(c, found.scales(c), rows, thread, task.ring1_row, begin);
    }
    ptx::named_barrier_sync(1, kThreads);
    constexpr u32 kWarps = kThreads / 32;
    const u32 share = rows == 0 ? 1 : kWarps > rows ? kWarps / rows : 1;  // warps that divide a row
    const u32 warp = thread / 32, step = share * kUnit, bytes = args.shape.hidden;
    u8* to = reinterpret_cast<u8*>(c.base() + c.s.at.ring1) + static_cast<u64>(task.ring1_row + begin) * args.shape.input_row_bytes;
#pragma unroll 1
    for (u32 row = warp / share; row < rows; row += kWarps / share) {
        const u8* from = reinterpret_cast<const u8*>(c.s.pulled_from[row]);
        u8* target = to + static_cast<u64>(row) * args.shape.input_row_bytes;
#pragma unroll 1
        for (u32 first = warp % share * kUnit + thread % 32 * 16; first < bytes; first += kAhead * step) {
            uint4 v[kAhead];
#pragma unroll
            for (u32 i = 0; i < kAhead; ++i) v[i] = __ldcg(reinterpret_cast<const uint4*>(from + min_of(first + i * step, bytes - 16)));
#pragma unroll
            for (u32 i = 0; i < kAhead; ++i)
                if (first + i * step < bytes) ptx::store_global_v4(target + first + i * step, v[i].x, v[i].y, v[i].z, v[i].w);
        }
    }
    ptx::fence_proxy_async();  // stored by threads, read by TMA of the CTAs that multiply
    ptx::named_barrier_sync(1, kThreads);
    if (thread == 0)
        ptx::add_release_gpu(reinterpret_cast<void*>(c.word(c.s.at.arrived, task.row_block)), 1);  // pairs with whoever waits for the rows
}

}  // namespace megamoe::impls
