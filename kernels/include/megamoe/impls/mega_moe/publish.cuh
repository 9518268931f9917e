// Publish: quantise this rank's tokens into the workspace, sort their choices by expert, tell every owner.
//
// Tasks 0 .. P-1 quantise a chunk of tokens and give each choice its place within its expert; the last one to finish
// turns the counts into first entries. Tasks P .. 2P-1 write the list; the last one publishes. With P = 1 one task does
// it all. The order of a list's entries is not fixed: a row's result does not depend on its place.
#pragma once
#include "megamoe/impls/mega_moe/watch.cuh"
#include "megamoe/impls/quantize_e4m3.cuh"

namespace megamoe::impls {

// Expert of a choice, or -1: none.
__device__ __forceinline__ i32 choice_of(const MegaMoeArgs& args, u32 entry) {
    const i32 id = args.id_bytes == 8 ? static_cast<i32>(__ldg(static_cast<const long long*>(args.ids) + entry))
                                      : __ldg(static_cast<const i32*>(args.ids) + entry);
    return id >= 0 && static_cast<u32>(id) < args.shape.num_experts ? id : -1;
}

// One warp: BF16 row -> E4M3 row and its scale per token, or per 128 columns.
__device__ __forceinline__ void quantize_row(const Context& c, u32 token, u32 lane) {
    const u32 hidden = c.args.shape.hidden;
    const Bf16x8* x = static_cast<const Bf16x8*>(c.args.x) + static_cast<u64>(token) * (hidden / 8);
    uint2* q = reinterpret_cast<uint2*>(c.base + c.s.at.input + static_cast<u64>(token) * c.args.shape.input_row_bytes);
    float* scale = reinterpret_cast<float*>(c.base + c.s.at.scales + static_cast<u64>(token) * c.args.shape.scale_row_bytes);
    const u32 vectors = hidden / 8;
    if (c.args.shape.scale_row_bytes == sizeof(float)) {
        float amax = 0.f;
        for (u32 v = lane; v < vectors; v += 4 * 32) {  // four loads in flight
            Bf16x8 value[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) value[i] = v + i * 32 < vectors ? x[v + i * 32] : Bf16x8{{0u, 0u, 0u, 0u}};
#pragma unroll
            for (u32 i = 0; i < 4; ++i) amax = fmaxf(amax, amax_of(value[i]));
        }
#pragma unroll
        for (u32 d = 16; d > 0; d /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, d));
        const float row_scale = e4m3_scale(amax), inverse = __fdiv_rn(1.0f, row_scale);
        if (lane == 0) *scale = row_scale;
        for (u32 v = lane; v < vectors; v += 4 * 32) {
            Bf16x8 value[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) value[i] = v + i * 32 < vectors ? x[v + i * 32] : Bf16x8{{0u, 0u, 0u, 0u}};
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                if (v + i * 32 < vectors) q[v + i * 32] = quantize_vector(value[i], inverse);
        }
    } else {
        for (u32 first = 0; first < vectors; first += 32) {  // 16 lanes to a block of 128 columns
            const u32 v = first + lane;
            const Bf16x8 value = v < vectors ? x[v] : Bf16x8{{0u, 0u, 0u, 0u}};
            float amax = amax_of(value);
#pragma unroll
            for (u32 d = 8; d > 0; d /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, d));
            const float block_scale = e4m3_scale(amax);
            if (v < vectors) {
                if (v % 16 == 0) scale[v / 16] = block_scale;
                q[v] = quantize_vector(value, __fdiv_rn(1.0f, block_scale));
            }
        }
    }
}

// One warp: first entries of all experts from their counts.
__device__ __forceinline__ void sum_counts(const Context& c, u32 lane) {
    const u32* cursors = reinterpret_cast<const u32*>(c.base + c.s.at.cursors);
    u32* starts = reinterpret_cast<u32*>(c.base + c.s.at.starts);
    u32 total = 0;
    for (u32 first = 0; first < c.args.shape.num_experts; first += 32) {
        const u32 e = first + lane;
        const u32 count = e < c.args.shape.num_experts ? __ldcg(cursors + e) : 0;
        u32 sum = count;
#pragma unroll
        for (u32 d = 1; d < 32; d *= 2) {
            const u32 other = __shfl_up_sync(0xffffffffu, sum, d);
            if (lane >= d) sum += other;
        }
        if (e < c.args.shape.num_experts) starts[e] = total + sum - count;
        total += __shfl_sync(0xffffffffu, sum, 31);
    }
}

// The threads of the math warpgroups: counts and headers to every owner of experts.
template <u32 kThreads>
__device__ __forceinline__ void tell_owners(const Context& c, u32 thread) {
    const MegaMoeArgs& args = c.args;
    const u32* cursors = reinterpret_cast<const u32*>(c.base + c.s.at.cursors);
    for (u32 e = thread; e < args.shape.num_experts; e += kThreads) {
        const u32 owner = e / args.num_local_experts, local = e % args.num_local_experts;
        const u64 row = static_cast<u64>(c.bank()) * args.limits.num_ranks + args.rank;
        const u64 to = c.peer(owner) + c.s.at.counts + (row * args.limits.max_local_experts + local) * sizeof(u32);
        *reinterpret_cast<u32*>(to) = __ldcg(cursors + e);
    }
    ptx::named_barrier_sync(1, kThreads);
    for (u32 owner = thread; owner < args.limits.num_ranks; owner += kThreads) {
        const u64 to = c.peer(owner) + c.s.at.headers + (static_cast<u64>(c.bank()) * args.limits.num_ranks + args.rank) * kLine;
        CountHeader* header = reinterpret_cast<CountHeader*>(to);
        header->shape_hash = args.shape_hash;
        header->num_tokens = args.num_tokens;
        header->total_tokens = args.num_tokens;
        header->num_chunks = 1;
        header->shape[0] = args.shape.hidden;
        header->shape[1] = args.shape.intermediate;
        header->shape[2] = args.shape.num_experts;
        header->shape[3] = args.shape.top_k;
        header->shape[4] = args.formats;
        ptx::fence_sys();  // what the other threads stored came here by the barrier; pairs with wait_word()
        ptx::store_release_sys(&header->flag, control_word(c.s.generation, kPublished));
    }
}

// By the kThreads threads of the math warpgroups.
template <u32 kThreads>
__device__ __forceinline__ void publish(const Context& c, u32 index, u32 tasks, u32 thread) {
    const MegaMoeArgs& args = c.args;
    const u32 k = args.shape.top_k, rows = args.tile.publish_rows;
    const bool alone = tasks == 1, listing = index >= tasks;
    const u32 chunk = listing ? index - tasks : index;
    const u32 first = min_of(args.num_tokens, chunk * rows), last = min_of(args.num_tokens, first + rows);
    u32* cursors = reinterpret_cast<u32*>(c.base + c.s.at.cursors);
    u32* places = reinterpret_cast<u32*>(c.base + c.s.at.places);
    const u64 published = c.word(c.s.at.published, 0);
    bool finished = false;
    if (!listing) {
        for (u32 n = first * k + thread; n < last * k; n += kThreads) {
            const i32 expert = choice_of(args, n);
            if (expert >= 0) places[n] = ptx::add_relaxed_gpu(cursors + expert, 1);
        }
        if (args.x)
            for (u32 token = first + thread / 32; token < last; token += kThreads / 32) quantize_row(c, token, thread % 32);
        ptx::named_barrier_sync(1, kThreads);
        if (thread < 32) {
            u32 before = 0;
            if (thread == 0) before = ptx::add_acquire_release_gpu(reinterpret_cast<void*>(published), 1);
            before = __shfl_sync(0xffffffffu, before, 0);
            if (before + 1 == tasks) {
                sum_counts(c, thread);
                __syncwarp();
                if (thread == 0) ptx::add_acquire_release_gpu(reinterpret_cast<void*>(published), 1);
            }
        }
        if (!alone) return;
        ptx::named_barrier_sync(1, kThreads);
    } else {
        if (thread == 0) wait_counter(c, published, tasks + 1, Phase::publish, [] {});
        ptx::named_barrier_sync(1, kThreads);
    }
    const u32* starts = reinterpret_cast<const u32*>(c.base + c.s.at.starts);
    ListEntry* list = reinterpret_cast<ListEntry*>(
        c.base + c.s.at.lists + static_cast<u64>(c.bank()) * args.limits.max_tokens * args.limits.max_top_k * sizeof(ListEntry));
    for (u32 n = first * k + thread; n < last * k; n += kThreads) {
        const i32 expert = choice_of(args, n);
        if (expert >= 0) list[__ldcg(starts + expert) + __ldcg(places + n)] = ListEntry{n, __ldg(args.weights + n)};
    }
    ptx::named_barrier_sync(1, kThreads);
    if (!alone) {
        if (thread == 0) {
            const u32 before = ptx::add_acquire_release_gpu(reinterpret_cast<void*>(published), 1);
            ptx::store_shared_volatile(ptx::smem_address(&c.s.flag), before == 2 * tasks);
        }
        ptx::named_barrier_sync(1, kThreads);
        finished = ptx::load_shared_volatile(ptx::smem_address(&c.s.flag)) != 0;
    }
    if (alone || finished) tell_owners<kThreads>(c, thread);
}

}  // namespace megamoe::impls
