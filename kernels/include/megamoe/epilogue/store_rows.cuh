// Accumulators -> BF16 rows in global memory.
#pragma once
#include "megamoe/ptx/memory.cuh"

namespace megamoe::epilogue {

// SS: the rows of W lie in shared memory permuted within groups of 32, so that the thread that holds accumulator
// columns 8j + 2c + b (c = lane % 4) owns 8 neighbouring features: feature = 32 (j / 4) + 8c + 2 (j % 4) + b.
__host__ __device__ constexpr int ss_feature_of_column(int n) {
    const int j = n / 8, c = n % 8 / 2, b = n % 2;
    return 32 * (j / 4) + 8 * c + 2 * (j % 4) + b;
}

// Writes the two rows (g, g + 8 of a 64-row block) that this thread holds a part of, 16 bytes a store. `out0`, `out1`:
// row starts at the unit's first feature, advanced by 8 * (lane % 4); null: not written. `num_features` are left from
// the unit's first. `feature_scale(f, w)` fills w[8] for features f.. of the advanced start.
// NOTES: bulk stores through shared memory were slower here (their proxy fence is a full memory barrier).
template <int N, class Scale>
__device__ __forceinline__ void store_rows(const float (&acc)[N / 2], uint16_t* out0, uint16_t* out1, float s0, float s1,
                                           int num_features, const Scale& feature_scale) {
#pragma unroll
    for (int jj = 0; jj < N / 32; ++jj) {
        if (32 * jj < num_features) {
            float w[8];
            feature_scale(32 * jj, w);
            uint32_t r0[4], r1[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* a = &acc[4 * (4 * jj + i)];
                r0[i] = ptx::pack_bf16x2(a[0] * s0 * w[2 * i], a[1] * s0 * w[2 * i + 1]);
                r1[i] = ptx::pack_bf16x2(a[2] * s1 * w[2 * i], a[3] * s1 * w[2 * i + 1]);
            }
            if (out0) ptx::store_global_v4(out0 + 32 * jj, r0[0], r0[1], r0[2], r0[3]);
            if (out1) ptx::store_global_v4(out1 + 32 * jj, r1[0], r1[1], r1[2], r1[3]);
        }
    }
}

// RS: rows g and g + 8 of 16 accumulator rows are features 2g and 2g + 1, so a thread's pair is 4 neighbouring bytes.
// `out(token)`: the token's row at this thread's features, null: not written; `token_scale(token)`: its scale.
template <int N, class Out, class Scale>
__device__ __forceinline__ void store_columns(const float (&acc)[N / 2], int lane, float w0, float w1, const Out& out,
                                              const Scale& token_scale) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const int token = 8 * j + 2 * (lane % 4) + b;
            uint16_t* p = out(token);
            if (p) {
                const float s = token_scale(token);
                ptx::store_global_u32(p, ptx::pack_bf16x2(acc[4 * j + b] * s * w0, acc[4 * j + 2 + b] * s * w1));
            }
        }
}

}  // namespace megamoe::epilogue
