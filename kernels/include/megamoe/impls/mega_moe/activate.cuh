// From the sums of linear 1 to h, and from FP32 h to E4M3: the same arithmetic in every instance of the mega-kernel.
#pragma once
#include "megamoe/impls/mega_moe/shared.cuh"
#include "megamoe/impls/quantize_e4m3.cuh"

namespace megamoe::impls {

// kernels/activation.py, in FP32. A NaN passes through the clamps.
__device__ __forceinline__ float activate(const MegaMoeArgs& args, float gate, float up) {
    const float limit = args.limit;
    gate = ptx::min_nan(gate, limit);
    up = ptx::min_nan(ptx::max_nan(up, -limit), limit);
    // a huge exponent makes the quotient 0, never infinity times 0
    const float share = ptx::reciprocal_approx(1.f + ptx::exp2_approx(__fmul_rn(gate, args.steepness)));
    return __fmul_rn(__fmul_rn(gate, share), __fadd_rn(up, args.shift));
}

// Sum -> value of linear 1; of linear 2. Written out, so that every instance rounds alike. "before": the routing weight is in
// h already (`outer` = 1) and the bias has its own (`inner`).
__device__ __forceinline__ float l1_value(float sum, float row_scale, float feature_scale, float bias) {
    return __fmaf_rn(__fmul_rn(sum, row_scale), feature_scale, bias);
}
__device__ __forceinline__ float l2_value(float sum, float feature_scale, float bias, float inner, float outer) {
    return __fmul_rn(__fmaf_rn(sum, feature_scale, __fmul_rn(bias, inner)), outer);
}

// Four FP32 -> four E4M3, the first in the low byte.
__device__ __forceinline__ u32 quantize4(float a, float b, float c, float d, float inverse) {
    return ptx::cvt_e4m3x2(__fmul_rn(a, inverse), __fmul_rn(b, inverse)) |
           ptx::cvt_e4m3x2(__fmul_rn(c, inverse), __fmul_rn(d, inverse)) << 16;
}

// What a row of a block brings to the epilogues.
struct RowFacts {
    u32 source, slot;
    float weight, scale;
};
__device__ __forceinline__ RowFacts row_facts(const Context& c, u32 meta_row) {
    const uint4 v = __ldcg(reinterpret_cast<const uint4*>(c.base() + c.s.at.meta) + meta_row);
    return RowFacts{v.x, v.y, __uint_as_float(v.z), __uint_as_float(v.w)};
}

// Where the result of a choice goes, on its source.
__device__ __forceinline__ u64 slot_address(const Context& c, const RowFacts& row) {
    const u32 token = row.slot / c.args.shape.top_k, k = row.slot % c.args.shape.top_k;
    const u64 at = static_cast<u64>(k) * c.args.limits.max_tokens + token;
    return c.peer(row.source) + c.s.at.slots + at * c.args.shape.hidden * 2;
}

}  // namespace megamoe::impls
