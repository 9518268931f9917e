// Accumulators of the SS mainloop -> BF16 rows in global memory, 16 bytes a store.
#pragma once
#include "megamoe/ptx/barrier.cuh"
#include "megamoe/ptx/memory.cuh"

namespace megamoe::epilogue {

// The rows of W lie in shared memory permuted within groups of 32, so that the thread that holds accumulator columns
// 8j + 2c + b (c = lane % 4) owns 8 neighbouring features: feature = 32 (j / 4) + 8c + 2 (j % 4) + b.
constexpr int feature_of_column(int n) {
    const int j = n / 8, c = n % 8 / 2, b = n % 2;
    return 32 * (j / 4) + 8 * c + 2 * (j % 4) + b;
}

// Writes the two rows (g, g + 8 of a 64-row block) that this thread holds a part of. `out0`, `out1`: row starts at the
// unit's first feature, already advanced by 8 * (lane % 4); null: not written. `num_features` left from there.
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

// The same through shared memory: the warp's 16 rows, kChunk columns at a time, one bulk store a row, so that the stores
// drain behind the next tile. `staging`: kBuffers * 16 * kChunk * 2 bytes of this warp, used in turn; `out`: row start at the unit's first
// feature for row lane % 16 of the warp, null: not written. N / kChunk is a multiple of kBuffers.
template <int N, int kChunk, int kBuffers, class Scale>
__device__ __forceinline__ void store_rows_staged(const float (&acc)[N / 2], uint32_t staging, uint16_t* out, float s0,
                                                  float s1, int num_features, const Scale& feature_scale, int lane) {
    static_assert(N / kChunk % kBuffers == 0);
#pragma unroll
    for (int first = 0; first < N; first += kChunk) {
        const uint32_t chunk = staging + (first / kChunk % kBuffers) * 16 * kChunk * 2;
        const uint32_t row0 = chunk + (lane / 4) * kChunk * 2 + 16 * (lane % 4), row1 = row0 + 8 * kChunk * 2;
        ptx::bulk_wait_read<kBuffers - 1>();
        __syncwarp();
#pragma unroll
        for (int jj = first / 32; jj < (first + kChunk) / 32; ++jj) {
            float w[8];
            feature_scale(32 * jj, w);
            uint32_t r0[4], r1[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* a = &acc[4 * (4 * jj + i)];
                r0[i] = ptx::pack_bf16x2(a[0] * s0 * w[2 * i], a[1] * s0 * w[2 * i + 1]);
                r1[i] = ptx::pack_bf16x2(a[2] * s1 * w[2 * i], a[3] * s1 * w[2 * i + 1]);
            }
            ptx::store_shared_v4(row0 + 64 * jj - 2 * first, r0[0], r0[1], r0[2], r0[3]);
            ptx::store_shared_v4(row1 + 64 * jj - 2 * first, r1[0], r1[1], r1[2], r1[3]);
        }
        ptx::fence_proxy_async_shared();
        __syncwarp();
        const int left = num_features - first;
        if (lane < 16 && out && left > 0)
            ptx::bulk_store(out + first, chunk + lane * kChunk * 2, (left < kChunk ? left : kChunk) * 2);
        ptx::bulk_commit();
    }
}

}  // namespace megamoe::epilogue
