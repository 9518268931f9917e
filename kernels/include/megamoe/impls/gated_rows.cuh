// BF16 rows [gate | up] -> BF16 rows of the activated product, by the arithmetic of kernels/activation.py in FP32.
#pragma once
#include "megamoe/impls/quantize_e4m3.cuh"
#include "megamoe/ptx/memory.cuh"

namespace megamoe::impls {

enum class GatedKind : unsigned int { silu = 0, swiglu_clamp = 1, swiglu_oai = 2 };

struct GatedRowsArgs {
    const Bf16x8* x;   // [rows, 2 * vectors]
    Bf16x8* out;       // [rows, vectors]
    long long vectors; // of 8 columns, in a row of out
    long long count;   // rows * vectors
    float limit;       // +inf for no clamp
    float alpha;
};

// Comparisons, so that NaN stays.
template <GatedKind kKind>
__device__ __forceinline__ float activated(float g, float u, const GatedRowsArgs& args) {
    if constexpr (kKind != GatedKind::silu) {
        g = g > args.limit ? args.limit : g;
        u = u > args.limit ? args.limit : u < -args.limit ? -args.limit : u;
    }
    if constexpr (kKind == GatedKind::swiglu_oai) {
        const float share = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-__fmul_rn(args.alpha, g))));
        return __fmul_rn(__fmul_rn(g, share), __fadd_rn(u, 1.0f));
    }
    return __fmul_rn(__fdiv_rn(g, __fadd_rn(1.0f, expf(-g))), u);
}

template <GatedKind kKind>
__device__ __forceinline__ void gated_rows(const GatedRowsArgs& args) {
    const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= args.count) return;
    const long long row = at / args.vectors;
    const Bf16x8 gate = args.x[at + row * args.vectors], up = args.x[at + (row + 1) * args.vectors];
    Bf16x8 out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out.word[i] = ptx::pack_bf16x2(activated<kKind>(bf16_low(gate.word[i]), bf16_low(up.word[i]), args),
                                 activated<kKind>(bf16_high(gate.word[i]), bf16_high(up.word[i]), args));
    }
    args.out[at] = out;
}

}  // namespace megamoe::impls
