// Publish: quantise this rank's tokens into the workspace, sort their choices by expert, tell every owner.
//
// Of the tokens in P parts there are three forms:
// - very few choices: one task does it all;
// - so many choices as one task can sort: task 0 does, tasks 1 .. P quantise a part each, and whichever ends last publishes;
// - more: tasks 0 .. P-1 quantise a part and give each choice its place within its expert, the last one to finish turns the
//   counts into first entries; tasks P .. 2P-1, which wait for that, write the list, and the last one publishes.
// The order of a list's entries is not fixed: a row's result does not depend on its place.
#pragma once
#include "megamoe/impls/mega_moe/chunks.cuh"
#include "megamoe/impls/quantize_e4m3.cuh"

namespace megamoe::impls {

// Choices of the call before this chunk's.
__device__ __forceinline__ u64 first_entry(const Context& c) { return static_cast<u64>(c.s.first_token) * c.args.shape.top_k; }
// The id of a choice of the chunk, as the caller has written it; nothing here waits for it.
__device__ __forceinline__ u64 load_id(const Context& c, u32 entry) {
    const MegaMoeArgs& args = c.args;
    const u64 at = first_entry(c) + entry;
    return args.id_bytes == 8 ? __ldg(static_cast<const u64*>(args.ids) + at) : __ldg(static_cast<const u32*>(args.ids) + at);
}
// Its expert, or -1: none. Of 64 bits all count: the low half may name an expert.
__device__ __forceinline__ i32 expert_of(const MegaMoeArgs& args, u64 id) {
    const u32 high = static_cast<u32>(id >> 32), low = static_cast<u32>(id);
    return high == 0 && low < args.shape.num_experts ? static_cast<i32>(low) : -1;
}
__device__ __forceinline__ i32 choice_of(const Context& c, u32 entry) { return expert_of(c.args, load_id(c, entry)); }

// The BF16 rows first .. last -> E4M3 rows and their scales per token, or per 128 columns, by all kThreads threads: a team of
// warps takes a row and keeps it in registers between the search for the largest value and the rounding.
template <u32 kThreads>
__device__ __forceinline__ void quantize_rows(const Context& c, u32 first, u32 last, u32 thread) {
    constexpr u32 kWarps = kThreads / 32, kVectors = kThreads < 512 ? 16 : 4;  // vectors of 8 columns a lane: what its registers hold
    const u32 vectors = c.args.shape.hidden / 8, lane = thread % 32, warp = thread / 32;
    u32 team = 1;
    while (team < kWarps && (team * (32 * kVectors) < vectors || 2 * team * (last - first) <= kWarps)) team *= 2;
    const u32 teams = kWarps / team, member = warp % team;
    const u32 rounds = ceil_div(last - first, teams);
    for (u32 round = 0; round < rounds; ++round) {
        const u32 token = first + round * teams + warp / team;
        const bool has_row = token < last;
        const Bf16x8* x = static_cast<const Bf16x8*>(c.args.x) + static_cast<u64>(c.s.first_token + token) * vectors;
        uint2* q = reinterpret_cast<uint2*>(c.base() + c.s.at.input + static_cast<u64>(token) * c.args.shape.input_row_bytes);
        float* scale = reinterpret_cast<float*>(c.base() + c.s.at.scales + static_cast<u64>(token) * c.args.shape.scale_row_bytes);
        float* shared_amax = c.s.amax[round % 2];
        const u32 end = has_row ? vectors : 0;
        for (u32 from = 0;; from += team * (32 * kVectors)) {  // more than once only where a team of all warps is too small
            Bf16x8 value[kVectors];
            float amax = 0.f;
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
                const u32 v = from + (i * team + member) * 32 + lane;
                value[i] = v < end ? x[v] : Bf16x8{{0u, 0u, 0u, 0u}};
            }
            if constexpr (!kBlockScales) {
#pragma unroll
                for (u32 i = 0; i < kVectors; ++i) amax = fmaxf(amax, amax_of(value[i]));
                for (u32 far = from + team * (32 * kVectors) + member * 32 + lane; far < end; far += team * 32)
                    amax = fmaxf(amax, amax_of(x[far]));
                for (u32 near = member * 32 + lane; near < min_of(from, end); near += team * 32) amax = fmaxf(amax, amax_of(x[near]));
#pragma unroll
                for (u32 d = 16; d > 0; d /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, d));
                if (team > 1) {
                    if (lane == 0) shared_amax[warp] = amax;
                    ptx::named_barrier_sync(1, kThreads);
                    for (u32 i = 0; i < team; ++i) amax = fmaxf(amax, shared_amax[warp - member + i]);
                }
                const float row_scale = e4m3_scale(amax), inverse = __fdiv_rn(1.0f, row_scale);
                if (has_row && member == 0 && lane == 0) *scale = row_scale;
#pragma unroll
                for (u32 i = 0; i < kVectors; ++i) {
                    const u32 v = from + (i * team + member) * 32 + lane;
                    if (v < end) q[v] = quantize_vector(value[i], inverse);
                }
            } else {
#pragma unroll
                for (u32 i = 0; i < kVectors; ++i) {  // 16 lanes hold a block of 128 columns
                    const u32 v = from + (i * team + member) * 32 + lane;
                    amax = amax_of(value[i]);
#pragma unroll
                    for (u32 d = 8; d > 0; d /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, d));
                    const float block_scale = e4m3_scale(amax);
                    if (v < end) {
                        if (v % 16 == 0) scale[v / 16] = block_scale;
                        q[v] = quantize_vector(value[i], __fdiv_rn(1.0f, block_scale));
                    }
                }
            }
            if (from + team * (32 * kVectors) >= vectors) break;
        }
    }
}

// By a converged warp: a value of each lane -> the sum of its own and those of the lanes before.
__device__ __forceinline__ u32 running_sum(u32 value, u32 lane) {
#pragma unroll
    for (u32 d = 1; d < 32; d *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, value, d);
        if (lane >= d) value += other;
    }
    return value;
}

// One warp: first entries of all experts from their counts.
__device__ __forceinline__ void sum_counts(const Context& c, u32 lane) {
    const u32* cursors = reinterpret_cast<const u32*>(c.base() + c.s.at.cursors);
    u32* starts = reinterpret_cast<u32*>(c.base() + c.s.at.starts);
    u32 total = 0;
    for (u32 first = 0; first < c.args.shape.num_experts; first += 32) {
        const u32 e = first + lane;
        const u32 count = e < c.args.shape.num_experts ? __ldcg(cursors + e) : 0, sum = running_sum(count, lane);
        if (e < c.args.shape.num_experts) starts[e] = total + sum - count;
        total += __shfl_sync(0xffffffffu, sum, 31);
    }
}

// Does one publish task sort all choices?
__device__ __forceinline__ bool sorts_alone(const Context& c) {
    return c.s.num_tokens * c.args.shape.top_k <= kMaxSortedEntries && c.args.shape.num_experts <= kSmallExperts;
}
// Does it do all else as well?
__device__ __forceinline__ bool publishes_alone(const Context& c) {
    return c.s.num_tokens <= c.args.tile.publish_rows && c.s.num_tokens * c.args.shape.top_k <= kMaxAloneEntries && sorts_alone(c);
}
// Parts of the tokens, each quantised by one task.
__device__ __forceinline__ u32 publish_parts(const Context& c) {
    return max_of(1u, ceil_div(c.s.num_tokens, c.args.tile.publish_rows));
}
__device__ __forceinline__ u32 publish_tasks(const Context& c) {
    return publishes_alone(c) ? 1 : sorts_alone(c) ? 1 + publish_parts(c) : 2 * publish_parts(c);
}

__device__ __forceinline__ ListEntry* own_list(const Context& c) {
    const u64 slots = static_cast<u64>(c.args.limits.max_tokens) * c.args.limits.max_top_k;
    return reinterpret_cast<ListEntry*>(c.base() + c.s.at.lists + c.bank() * slots * sizeof(ListEntry));
}

// What the owner of an expert is told of it.
__device__ __forceinline__ void tell_count(const Context& c, u32 expert, const ExpertCount& count) {
    const MegaMoeArgs& args = c.args;
    const u32 owner = expert / args.num_local_experts, local = expert % args.num_local_experts;
    const u64 row = static_cast<u64>(c.bank()) * args.limits.num_ranks + args.rank;
    const u64 to = c.peer(owner) + c.s.at.counts + (row * args.limits.max_local_experts + local) * sizeof(ExpertCount);
    *reinterpret_cast<uint2*>(to) = make_uint2(count.rows, count.first);
}

// By all kThreads threads, when lists and counts are stored: the headers, their flags last.
template <u32 kThreads>
__device__ __forceinline__ void tell_owners(const Context& c, u32 thread) {
    const MegaMoeArgs& args = c.args;
    const u64 first_owner = c.peer(min_of(thread, args.limits.num_ranks - 1));  // it comes while all wait for each other
    ptx::named_barrier_sync(1, kThreads);
    for (u32 owner = thread; owner < args.limits.num_ranks; owner += kThreads) {
        const u64 to = c.s.at.headers + (static_cast<u64>(c.bank()) * args.limits.num_ranks + args.rank) * kLine;
        CountHeader* header = reinterpret_cast<CountHeader*>((owner == thread ? first_owner : c.peer(owner)) + to);
        header->shape_hash = args.shape_hash;
        header->num_tokens = c.s.num_tokens;
        header->total_tokens = max_of(args.num_tokens, args.refused);
        header->num_chunks = max_of(1u, ceil_div(args.num_tokens, args.limits.max_tokens));
        header->shape[0] = args.shape.hidden;
        header->shape[1] = args.shape.intermediate;
        header->shape[2] = args.shape.num_experts;
        header->shape[3] = args.shape.top_k;
        header->shape[4] = args.formats;
        ptx::fence_sys();  // what the other threads stored came here by the barrier; pairs with wait_word()
        ptx::store_relaxed_sys(&header->flag, control_word(c.s.generation, kPublished));
    }
}

// All choices in one task: they are counted in shared memory. `kAll`: it quantises as well and tells the owners the counts,
// and a thread has one choice at most; else the counts go where the task that publishes looks for them.
template <u32 kThreads, bool kAll>
__device__ __forceinline__ void sort_choices(const Context& c, u32 thread) {
    const MegaMoeArgs& args = c.args;
    static_assert(kMaxAloneEntries <= kThreads, "one choice a thread");
    constexpr bool kRowsFirst = kThreads >= 512;  // while choices are on their way; few threads have no registers for both
    const u32 entries = c.s.num_tokens * args.shape.top_k, experts = args.shape.num_experts;
    u32* counts = c.s.counts;
    u32* places = reinterpret_cast<u32*>(c.base() + c.s.at.places);  // of later choices, each written and read by the same thread
    u64 id = ~0ull;  // of the first one, which stays in registers: asked for beside x
    float weight = 0.f;
    if (thread < entries) {
        id = load_id(c, thread);
        weight = __ldg(args.weights + first_entry(c) + thread);
    }
    for (u32 e = thread; e < experts; e += kThreads) counts[e] = 0;
    if (kAll && kRowsFirst && args.x) quantize_rows<kThreads>(c, 0, c.s.num_tokens, thread);
    ptx::named_barrier_sync(1, kThreads);
    const i32 first_expert = expert_of(args, id);
    const u32 place = first_expert < 0 ? 0 : atomicAdd(counts + first_expert, 1u);
    if constexpr (!kAll) {
#pragma unroll 2
        for (u32 n = thread + kThreads; n < entries; n += kThreads) {
            const i32 expert = choice_of(c, n);
            if (expert >= 0) places[n] = atomicAdd(counts + expert, 1u);
        }
    }
    if (kAll && !kRowsFirst && args.x) quantize_rows<kThreads>(c, 0, c.s.num_tokens, thread);
    ptx::named_barrier_sync(1, kThreads);
    if (thread < 32) {  // counts -> first entries, in place, and behind them all entries
        u32 total = 0;
        for (u32 first = 0; first < experts; first += 32) {
            const u32 e = first + thread, count = e < experts ? counts[e] : 0, sum = running_sum(count, thread);
            if (e < experts) counts[e] = total + sum - count;
            total += __shfl_sync(0xffffffffu, sum, 31);
        }
        if (thread == 0) counts[experts] = total;
    }
    ptx::named_barrier_sync(1, kThreads);
    for (u32 e = thread; e < experts; e += kThreads) {
        const ExpertCount count{counts[e + 1] - counts[e], counts[e]};
        if constexpr (kAll) {
            tell_count(c, e, count);
        } else {
            __stcg(reinterpret_cast<u32*>(c.base() + c.s.at.cursors) + e, count.rows);
            __stcg(reinterpret_cast<u32*>(c.base() + c.s.at.starts) + e, count.first);
        }
    }
    ListEntry* list = own_list(c);
    if (first_expert >= 0) list[counts[first_expert] + place] = ListEntry{thread, weight};
    if constexpr (!kAll) {
#pragma unroll 2
        for (u32 n = thread + kThreads; n < entries; n += kThreads) {
            const i32 expert = choice_of(c, n);
            if (expert >= 0) list[counts[expert] + places[n]] = ListEntry{n, __ldg(args.weights + first_entry(c) + n)};
        }
    }
}

// By all kThreads threads at the end of a task: if `before` others have ended before it, all have, and it publishes. What
// they stored came here by the chain of adds to `published`, and from its thread to the others by the barrier.
template <u32 kThreads>
__device__ __forceinline__ void publish_last(const Context& c, u32 before, u32 thread) {
    ptx::named_barrier_sync(1, kThreads);
    if (thread == 0) {
        const u32 ended = ptx::add_acquire_release_gpu(reinterpret_cast<void*>(c.word(c.s.at.published, 0)), 1);
        ptx::store_shared_volatile(ptx::smem_address(&c.s.flag), ended == before);
    }
    ptx::named_barrier_sync(1, kThreads);
    if (ptx::load_shared_volatile(ptx::smem_address(&c.s.flag)) == 0) return;
    const u32* cursors = reinterpret_cast<const u32*>(c.base() + c.s.at.cursors);
    const u32* starts = reinterpret_cast<const u32*>(c.base() + c.s.at.starts);
    for (u32 e = thread; e < c.args.shape.num_experts; e += kThreads)
        tell_count(c, e, ExpertCount{__ldcg(cursors + e), __ldcg(starts + e)});
    tell_owners<kThreads>(c, thread);
}

// By the kThreads threads of the math warpgroups.
template <u32 kThreads>
__device__ __forceinline__ void publish(const Context& c, u32 index, u32 thread) {
    const MegaMoeArgs& args = c.args;
    if (publishes_alone(c)) {
        sort_choices<kThreads, true>(c, thread);
        tell_owners<kThreads>(c, thread);
        return;
    }
    const u32 k = args.shape.top_k, rows = args.tile.publish_rows, tasks = publish_parts(c);
    if (sorts_alone(c)) {
        const u32 begin = (index - 1) * rows;
        if (index == 0) sort_choices<kThreads, false>(c, thread);
        else if (args.x) quantize_rows<kThreads>(c, begin, min_of(c.s.num_tokens, begin + rows), thread);
        publish_last<kThreads>(c, tasks, thread);
        return;
    }
    const bool listing = index >= tasks;
    const u32 first = min_of(c.s.num_tokens, (listing ? index - tasks : index) * rows), last = min_of(c.s.num_tokens, first + rows);
    u32* cursors = reinterpret_cast<u32*>(c.base() + c.s.at.cursors);
    u32* places = reinterpret_cast<u32*>(c.base() + c.s.at.places);
    const u64 published = c.word(c.s.at.published, 0);
    if (!listing) {
        for (u32 n = first * k + thread; n < last * k; n += kThreads) {
            const i32 expert = choice_of(c, n);
            if (expert >= 0) places[n] = ptx::add_relaxed_gpu(cursors + expert, 1);
        }
        if (args.x) quantize_rows<kThreads>(c, first, last, thread);
        ptx::named_barrier_sync(1, kThreads);
        if (thread >= 32) return;
        u32 before = 0;
        if (thread == 0) before = ptx::add_acquire_release_gpu(reinterpret_cast<void*>(published), 1);
        before = __shfl_sync(0xffffffffu, before, 0);
        if (before + 1 != tasks) return;
        sum_counts(c, thread);
        __syncwarp();
        if (thread == 0) ptx::add_acquire_release_gpu(reinterpret_cast<void*>(published), 1);
        return;
    }
    const uint32_t flag = ptx::smem_address(&c.s.flag);
    if (thread == 0) ptx::store_shared_volatile(flag, wait_counter(c, published, tasks + 1, Phase::publish));
    ptx::named_barrier_sync(1, kThreads);
    if (ptx::load_shared_volatile(flag) == 0) return;  // given up: starts and places may be those of another call
    const u32* starts = reinterpret_cast<const u32*>(c.base() + c.s.at.starts);
    ListEntry* list = own_list(c);
    for (u32 n = first * k + thread; n < last * k; n += kThreads) {
        const i32 expert = choice_of(c, n);
        if (expert >= 0) list[__ldcg(starts + expert) + __ldcg(places + n)] = ListEntry{n, __ldg(args.weights + first_entry(c) + n)};
    }
    publish_last<kThreads>(c, 2 * tasks, thread);
}

}  // namespace megamoe::impls
