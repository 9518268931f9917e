// RS mainloop for FP4 weights and few tokens: D^T[features, tokens] = W X^T, weights decoded into the A registers,
// promoted with a scale per token every 128 of K.
//
// Ring of kStages slots: X [steps][kTokens, 128] E4M3 (128B swizzle), packed W [warpgroups][steps] blocks, scales [steps].
//   full[s]:  1 arrival by the loading thread (with the bytes of its copies)
//   empty[s]: one arrival by each math warp when it has read the slot
#pragma once
#include "megamoe/mma/decode_fp4.cuh"
#include "megamoe/mma/operand.cuh"
#include "megamoe/mma/policy.cuh"

namespace megamoe::mma {

// Where the ring lies; `base` 1024-byte aligned, P::kSmemBytes long.
template <class P>
struct RsRing {
    uint32_t base;
    __device__ __forceinline__ uint32_t x(int s, int step) const { return base + s * P::kStageBytes + step * P::kXBytes; }
    __device__ __forceinline__ uint32_t w(int s, int wg, int step) const {
        return base + s * P::kStageBytes + P::kStepsPerStage * P::kXBytes + (wg * P::kStepsPerStage + step) * kRsBlockBytes;
    }
    __device__ __forceinline__ uint32_t scales(int s, int step) const {
        return base + s * P::kStageBytes + P::kStepsPerStage * (P::kXBytes + P::kWBytes) + step * P::kScaleBytes;
    }
    __device__ __forceinline__ uint32_t full(int s) const { return base + P::kStages * P::kStageBytes + s * 8; }
    __device__ __forceinline__ uint32_t empty(int s) const { return full(P::kStages) + s * 8; }

    // The math warps' wait for a slot, and their fragments; a ring of another kernel may have others.
    __device__ __forceinline__ void wait(uint32_t bar, uint32_t parity) const { ptx::mbarrier_wait(bar, parity); }
    __device__ __forceinline__ void fragments(uint32_t (&a)[4][4], int s, int wg, int step, int thread) const;

    // By one thread, before the CTA's first barrier.
    __device__ __forceinline__ void init() const {
        for (int s = 0; s < P::kStages; ++s) {
            ptx::mbarrier_init(full(s), 1);
            ptx::mbarrier_init(empty(s), 4 * P::kWarpgroups);
        }
        ptx::fence_mbarrier_init();
    }
};

// A fragments of a 64 x 128 block: per 32 of K the words of row g and row g + 8, each 8 codes (k 4c.. and 16 + 4c..).
__device__ __forceinline__ void load_rs_fragments(uint32_t (&a)[4][4], uint32_t block, int thread) {
    const uint4 v0 = ptx::load_shared_v4(block + thread * 16), v1 = ptx::load_shared_v4(block + 2048 + thread * 16);
    const uint32_t exponents = ptx::load_shared_u32(block + kRsBlockCodeBytes + (thread / 4) * 4);
    const uint32_t word[8] = {v0.x, v0.y, v0.z, v0.w, v1.x, v1.y, v1.z, v1.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        decode_fp4(word[2 * k], Fp4Table((exponents >> (4 * k)) & 15), a[k][0], a[k][2]);
        decode_fp4(word[2 * k + 1], Fp4Table((exponents >> (16 + 4 * k)) & 15), a[k][1], a[k][3]);
    }
}

template <class P>
__device__ __forceinline__ void RsRing<P>::fragments(uint32_t (&a)[4][4], int s, int wg, int step, int thread) const {
    load_rs_fragments(a, w(s, wg, step), thread);
}

// Two neighbouring floats at any 4-byte address.
__device__ __forceinline__ float2 load_pair(uint32_t p) {
    return make_float2(ptx::load_shared_f32(p), ptx::load_shared_f32(p + 4));
}

// Math warpgroup `wg`: acc = its 64 features x the slot's first N tokens, summed over K. Thread: features g, g + 8; tokens
// 8j + 2c, + 1. `scale_shift`: place of the tile's first token in the slot's scales. `ring`: RsRing<P>, or one with the
// same members.
template <class P, int N, class Ring>
__device__ __forceinline__ void rs_multiply(float (&acc)[N / 2], PipelineState<P::kStages>& state, const Ring& ring,
                                            int num_k_blocks, int wg, int thread, int scale_shift) {
    constexpr int S = P::kStepsPerStage;
    float part[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[i] = 0.f;
    uint32_t a0[4][4], a1[4][4];
    int sub = 0;  // K step within the slot
    ring.wait(ring.full(state.stage()), state.parity());
    ring.fragments(a0, state.stage(), wg, 0, thread);

    auto step = [&](uint32_t (&now)[4][4], uint32_t (&next)[4][4], bool more) {
        const int stage = state.stage(), this_sub = sub;
        issue_unit<N>(part, now, swizzled_descriptor(ring.x(stage, this_sub)));
        const bool leave = this_sub + 1 == S || !more;
        sub = leave ? 0 : this_sub + 1;
        if (leave) state.advance();
        if (more) {
            if (leave) ring.wait(ring.full(state.stage()), state.parity());
            ring.fragments(next, state.stage(), wg, sub, thread);
        }
        auto load_scale = [&](int j) {
            return load_pair(ring.scales(stage, this_sub) + (8 * j + 2 * (thread % 4) + scale_shift) * 4);
        };
        auto promote = [&](int j, float2 s) {
            acc[4 * j + 0] += part[4 * j + 0] * s.x;
            acc[4 * j + 1] += part[4 * j + 1] * s.y;
            acc[4 * j + 2] += part[4 * j + 2] * s.x;
            acc[4 * j + 3] += part[4 * j + 3] * s.y;
        };
        float2 scale[N / 8];
        auto load_scales = [&] {
#pragma unroll
            for (int j = 0; j < N / 8; ++j) scale[j] = load_scale(j);
        };
        if constexpr (P::kScaled && P::kScaleLoad == ScaleLoad::kEarly) load_scales();
        ptx::wgmma_wait<0>();
        pin(part);
        if constexpr (P::kScaled && P::kScaleLoad == ScaleLoad::kLate) load_scales();
        __syncwarp();  // weights and scales are in the registers of every lane
        if (leave && ptx::elect_one()) ptx::mbarrier_arrive(ring.empty(stage));
#pragma unroll
        for (int j = 0; j < N / 8; ++j) promote(j, P::kScaled ? scale[j] : make_float2(1.f, 1.f));
    };
    int k = 0;
    for (; k + 1 < num_k_blocks; k += 2) {
        step(a0, a1, true);
        step(a1, a0, k + 2 < num_k_blocks);
    }
    if (k < num_k_blocks) step(a0, a1, false);
}

}  // namespace megamoe::mma
