// Pull: rows of the sources' workspaces -> this rank's ring of L1 input, by bulk copies through shared memory.
//
// A warp looks up the rows of a task together; from then on one thread moves them, a look at a time, so that it can do
// other work in between: a copy in, when it has landed a copy out, kPullSlots pieces in flight.
#pragma once
#include "megamoe/impls/mega_moe/watch.cuh"

namespace megamoe::impls {

// By a converged warp, when none is in flight: where the rows of the task lie, and what is known of each for later.
__device__ __forceinline__ void start_pull(const Context& c, const Task& task, u32 lane, u64 ring_row, u64 meta_row) {
    const MegaMoeArgs& args = c.args;
    const u32 part = ceil_div(args.tile.block_rows, args.tile.pulls_per_block);
    const u32 begin = min_of(task.num_rows, task.index * part), rows = min_of(task.num_rows, begin + part) - begin;
    if (lane < rows) {  // at most kPullRows
        const u64 counts = c.base + c.s.at.counts +
                           static_cast<u64>(c.bank()) * args.limits.num_ranks * args.limits.max_local_experts * sizeof(u32);
        u32 row = task.first_row + begin + lane, source = 0;
        for (;; ++source) {  // the sources' rows follow each other
            const u64 at = counts + (static_cast<u64>(source) * args.limits.max_local_experts + task.expert) * sizeof(u32);
            const u32 count = __ldcg(reinterpret_cast<const u32*>(at));
            if (row < count || source + 1 == args.limits.num_ranks) break;
            row -= count;
        }
        const u64 from = c.peer(source);
        const u32 expert = args.rank * args.num_local_experts + task.expert;
        const u32 entry = __ldcg(reinterpret_cast<const u32*>(from + c.s.at.starts) + expert) + row;
        const u64 list = from + c.s.at.lists +
                         static_cast<u64>(c.bank()) * args.limits.max_tokens * args.limits.max_top_k * sizeof(ListEntry);
        const uint2 item = __ldcg(reinterpret_cast<const uint2*>(list) + entry);
        const u32 token = item.x / args.shape.top_k;
        const u64 scales = from + c.s.at.scales + static_cast<u64>(token) * args.shape.scale_row_bytes;
        uint4* meta = reinterpret_cast<uint4*>(c.base + c.s.at.meta) + meta_row + begin + lane;
        __stcg(meta, make_uint4(source, item.x, item.y, __ldcg(reinterpret_cast<const u32*>(scales))));
        c.s.pull.from[lane] = from + c.s.at.input + static_cast<u64>(token) * args.shape.input_row_bytes;
    }
    __syncwarp();  // the meta rows of all lanes are older than the release of the thread that moves the rows
    if (lane != 0) return;
    PullState& pull = c.s.pull;
    pull.to = c.base + c.s.at.ring1 + (ring_row + begin) * args.shape.ring1_row_bytes;
    pull.arrived = c.word(c.s.at.arrived, task.row_block);
    pull.total = rows * ceil_div(args.shape.hidden, kPullBytes);
    pull.loaded = pull.stored = 0;
    if (rows == 0) {  // a part of the row block without rows
        ptx::add_release_gpu(reinterpret_cast<void*>(pull.arrived), 1);
    } else {
        ptx::fence_proxy_async();  // sources published their rows by the ordinary path
    }
}

// By the moving thread, as often as it likes. `staging`: kPullSlots * kPullBytes of shared memory.
__device__ __forceinline__ void step_pull(const Context& c, uint32_t staging) {
    PullState& pull = c.s.pull;
    const u32 total = pull.total;
    if (total == 0) return;
    const u32 pieces = ceil_div(c.args.shape.hidden, kPullBytes), serial = pull.serial;
    u32 loaded = pull.loaded, stored = pull.stored;
    auto slot = [&](u32 n) { return staging + (serial + n) % kPullSlots * kPullBytes; };
    auto full = [&](u32 n) { return ptx::smem_address(&c.s.pull_full[(serial + n) % kPullSlots]); };
    auto bytes_of = [&](u32 n) { return min_of(kPullBytes, c.args.shape.hidden - n % pieces * kPullBytes); };
    while (stored < loaded && ptx::mbarrier_try_wait(full(stored), (serial + stored) / kPullSlots & 1)) {
        const u64 to = pull.to + static_cast<u64>(stored / pieces) * c.args.shape.ring1_row_bytes + stored % pieces * kPullBytes;
        ptx::bulk_store(reinterpret_cast<void*>(to), slot(stored), bytes_of(stored));
        ptx::bulk_commit();
        ++stored;
    }
    while (loaded < total && loaded - stored < kPullSlots - 1) {
        ptx::bulk_wait_read<1>();  // the last piece of the slot was stored, and not as the newest one
        const u32 bytes = bytes_of(loaded);
        ptx::mbarrier_arrive_expect_tx(full(loaded), bytes);
        ptx::bulk_load(slot(loaded), reinterpret_cast<const void*>(pull.from[loaded / pieces] + loaded % pieces * kPullBytes), bytes,
                       full(loaded));
        ++loaded;
    }
    pull.loaded = loaded;
    pull.stored = stored;
    if (stored == total) {
        ptx::bulk_wait_all();
        ptx::fence_proxy_async();
        ptx::add_release_gpu(reinterpret_cast<void*>(pull.arrived), 1);  // pairs with the X loader's wait
        pull.serial = serial + total;
        pull.total = 0;
    }
}

}  // namespace megamoe::impls
