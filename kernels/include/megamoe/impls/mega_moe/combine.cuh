// Combine: the source sums the slots of a token in the order of its choices, in FP32, as soon as all are tagged.
#pragma once
#include "megamoe/impls/mega_moe/publish.cuh"

namespace megamoe::impls {

__device__ __forceinline__ void add_slot(float (&sum)[8], const uint4& v) {
    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        sum[2 * i] += bf16_low(word[i]);
        sum[2 * i + 1] += bf16_high(word[i]);
    }
}

// Sums kCount vectors of 8 columns that lie 32 vectors apart, over the choices in `valid`; the loads of kAhead choices are
// in flight together.
template <u32 kCount, u32 kAhead>
__device__ __forceinline__ void combine_vectors(const Context& c, u32 token, u32 first, u32 vectors, u32 valid) {
    const MegaMoeArgs& args = c.args;
    const u64 row_bytes = static_cast<u64>(args.shape.hidden) * 2;
    const u64 slots = c.base() + c.s.at.slots + token * row_bytes + first * 16;
    float sum[kCount][8];
#pragma unroll
    for (u32 i = 0; i < kCount; ++i)
#pragma unroll
        for (u32 j = 0; j < 8; ++j) sum[i][j] = 0.f;
    for (u32 k = 0; k < args.shape.top_k; k += kAhead) {
        uint4 v[kAhead][kCount];
#pragma unroll
        for (u32 a = 0; a < kAhead; ++a)
#pragma unroll
            for (u32 i = 0; i < kCount; ++i) {
                v[a][i] = make_uint4(0, 0, 0, 0);
                if ((valid >> (k + a)) & 1 && first + i * 32 < vectors)
                    v[a][i] = ptx::load_relaxed_sys_v4(slots + (k + a) * (row_bytes * args.limits.max_tokens) + i * 512);
            }
#pragma unroll
        for (u32 a = 0; a < kAhead; ++a)
            if ((valid >> (k + a)) & 1)
#pragma unroll
                for (u32 i = 0; i < kCount; ++i) add_slot(sum[i], v[a][i]);
    }
    char* out = reinterpret_cast<char*>(args.out) + (c.s.first_token + token) * row_bytes + first * 16;
#pragma unroll
    for (u32 i = 0; i < kCount; ++i)
        if (first + i * 32 < vectors)
            ptx::store_global_v4(out + i * 512, ptx::pack_bf16x2(sum[i][0], sum[i][1]), ptx::pack_bf16x2(sum[i][2], sum[i][3]),
                                 ptx::pack_bf16x2(sum[i][4], sum[i][5]), ptx::pack_bf16x2(sum[i][6], sum[i][7]));
}

// By `warps` warps: a token each, or slices of its columns where there are fewer tokens than warps.
template <u32 kCount, u32 kAhead>
__device__ __forceinline__ void combine(const Context& c, u32 index, u32 warp, u32 warps, u32 lane) {
    const MegaMoeArgs& args = c.args;
    const u32 first = index * args.tile.combine_rows, rows = min_of(c.s.num_tokens, first + args.tile.combine_rows) - first;
    const u32 vectors = args.shape.hidden / 8, slices = ceil_div(vectors, 32 * kCount), parts = rows < warps ? slices : 1;
    const u32 k = args.shape.top_k;
    for (u32 item = warp; item < rows * parts; item += warps) {
        const u32 token = first + item / parts;
        bool counts = false;
        if (lane < k) {
            const i32 expert = choice_of(c, token * k + lane);
            counts = expert >= 0;
            if (counts)
                wait_word(c, c.base() + c.s.at.tags + (token * k + lane) * sizeof(u64), control_word(c.s.generation, kSlotReady),
                          Phase::combine, static_cast<u32>(expert) / args.num_local_experts);
        }
        const u32 valid = __ballot_sync(0xffffffffu, counts);
        __syncwarp();  // what a lane acquired, all read
        for (u32 slice = item % parts; slice < slices; slice += parts)
            combine_vectors<kCount, kAhead>(c, token, slice * (32 * kCount) + lane, vectors, valid);
    }
    count_ended(c, lane);
}

// What a failed call returns.
__device__ __forceinline__ void fill_nan(const MegaMoeArgs& args, u32 thread, u32 threads) {
    u16* out = args.out;
    const u64 n = static_cast<u64>(args.num_tokens) * args.shape.hidden;
    for (u64 i = thread; i < n; i += threads) out[i] = 0x7fc0;
}

}  // namespace megamoe::impls
