// Attention of each query to the rows that its index list names; a row is the key, its first kValue elements the value.
//
// A block works for 64 heads of one query. A producer warpgroup gathers 64 rows at a time into one of two stages; two
// consumer warpgroups both compute the 64 x 64 logits and the softmax weights, and each half of the value columns: logits
// twice is dearer than once by a third of the products, and saves handing weights from one warpgroup to the other.
// A row lies as chunks of 64 elements, chunk after chunk, each chunk of all 64 rows with 128B swizzle: for the logits
// these are rows along K, for the values rows along N.
#pragma once
#include "megamoe/mma/operand.cuh"
#include "megamoe/ptx/copy_async.cuh"
#include "megamoe/ptx/wgmma_bf16.cuh"

namespace megamoe::impls {

struct SparseAttentionArgs {
    const void* q;       // BF16 [queries, heads, kWidth]
    const void* rows;    // BF16 [rows, kWidth]
    const int* index;    // [queries, count]; below 0 = no row
    const float* sinks;  // [heads] or null
    void* out;           // BF16 [queries, heads, kValue]
    int heads, count;
    float scale;  // of the logits, times log2(e)
};

constexpr int kSparseTile = 64, kSparseChunkBytes = kSparseTile * 128, kSparseThreads = 384;

template <int kWidth>
struct SparseShared {
    static constexpr int kTileBytes = kWidth / 64 * kSparseChunkBytes;
    alignas(1024) unsigned char q[kTileBytes];
    alignas(1024) unsigned char rows[2][kTileBytes];
    float bias[2][kSparseTile];  // 0, or -inf for a key that is none
    uint64_t full[2], empty[2];
    int last;
};

// Descriptor of the value columns that begin with a chunk: 64 columns a chunk, 8 rows every 1024 bytes.
__device__ __forceinline__ uint64_t sparse_value_descriptor(uint32_t address) {
    constexpr uint64_t kAlongN = kSparseChunkBytes >> 4, kAlongK = 1024 >> 4;
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | (kAlongN << 16) | (kAlongK << 32) | (1ull << 62);
}

template <int kWidth, int kValue>
struct SparseAttention {
    static_assert(kWidth % 64 == 0 && kValue == 512 && kValue <= kWidth, "two warpgroups of 256 value columns");
    using Shared = SparseShared<kWidth>;
    static constexpr int kChunks = kWidth / 64;
    static constexpr float kLowest = -1e30f;  // finite, so that differences are

    // Place of 16 bytes in a tile of 64 rows.
    static __device__ __forceinline__ uint32_t place(int row, int chunk, int piece) {
        return chunk * kSparseChunkBytes + row * 128 + ((piece ^ (row & 7)) << 4);
    }

    static __device__ __forceinline__ void produce(const SparseAttentionArgs& args, Shared& shared, const int* index, int tiles) {
        const int thread = threadIdx.x % 128, group = thread / 8, piece = thread % 8;
        const uint32_t stages = ptx::smem_address(shared.rows), full = ptx::smem_address(shared.full);
        const uint32_t empty = ptx::smem_address(shared.empty);
        int row[4];
        auto look_up = [&](int tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = tile * kSparseTile + group + 16 * i;
                row[i] = key < args.count ? index[key] : -1;
            }
        };
        look_up(0);
        for (int tile = 0; tile < tiles; ++tile) {
            const int stage = tile & 1;
            if (tile >= 2) ptx::mbarrier_wait(empty + 8 * stage, (tile / 2 - 1) & 1);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int place_of_key = group + 16 * i, known = row[i] >= 0;
                const char* source = static_cast<const char*>(args.rows) + piece * 16;
                source += static_cast<int64_t>(known ? row[i] : 0) * (kWidth * 2);
                const uint32_t target = stages + stage * Shared::kTileBytes + place(place_of_key, 0, piece);
#pragma unroll
                for (int chunk = 0; chunk < kChunks; ++chunk)
                    ptx::copy_async_16(target + chunk * kSparseChunkBytes, source + chunk * 128, known ? 16 : 0);
                if (piece == 0) shared.bias[stage][place_of_key] = known ? 0.f : -__int_as_float(0x7f800000);
            }
            if (tile + 1 < tiles) look_up(tile + 1);
            ptx::copy_async_wait_all();
            ptx::fence_proxy_async_shared();
            ptx::mbarrier_arrive(full + 8 * stage);
        }
    }

    static __device__ __forceinline__ void load_queries(const SparseAttentionArgs& args, Shared& shared, int64_t first) {
        const uint4* source = static_cast<const uint4*>(args.q) + first * (kWidth / 8);
        const uint32_t target = ptx::smem_address(shared.q);
        constexpr int kPieces = kWidth / 8;
#pragma unroll 4
        for (int i = threadIdx.x; i < 64 * kPieces; i += 256) {
            const int row = i / kPieces, at = i % kPieces;
            const uint4 v = source[i];
            ptx::store_shared_v4(target + place(row, at / 8, at % 8), v.x, v.y, v.z, v.w);
        }
        ptx::fence_proxy_async_shared();
        ptx::named_barrier_sync(1, 256);
    }

    static __device__ __forceinline__ void consume(const SparseAttentionArgs& args, Shared& shared, int64_t first, int head, int tiles) {
        const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
        load_queries(args, shared, first);
        const uint32_t stages = ptx::smem_address(shared.rows), full = ptx::smem_address(shared.full);
        const uint32_t empty = ptx::smem_address(shared.empty);
        const uint64_t queries = mma::swizzled_descriptor(ptx::smem_address(shared.q));
        float out[128], top[2] = {kLowest, kLowest}, total[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 128; ++i) out[i] = 0.f;
        for (int tile = 0; tile < tiles; ++tile) {
            const int stage = tile & 1;
            const uint32_t rows = stages + stage * Shared::kTileBytes;
            ptx::mbarrier_wait(full + 8 * stage, tile / 2 & 1);
            float logits[32];
            const uint64_t keys = mma::swizzled_descriptor(rows);
            mma::pin(logits);
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < kWidth / 16; ++k) {
                const int at = k / 4 * (kSparseChunkBytes >> 4) + k % 4 * 2;
                ptx::WgmmaBf16<64, false>::ss(logits, queries + at, keys + at, k != 0);
            }
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            mma::pin(logits);

            const float2* bias = reinterpret_cast<const float2*>(shared.bias[stage]) + lane % 4;
            float best[2] = {top[0], top[1]};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 b = bias[4 * j];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float* two = logits + 4 * j + 2 * half;
                    two[0] = two[0] * args.scale + b.x;
                    two[1] = two[1] * args.scale + b.y;
                    best[half] = fmaxf(best[half], fmaxf(two[0], two[1]));
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                best[half] = fmaxf(best[half], __shfl_xor_sync(0xffffffff, best[half], 1));
                best[half] = fmaxf(best[half], __shfl_xor_sync(0xffffffff, best[half], 2));
            }
            if (__any_sync(0xffffffff, best[0] > top[0] || best[1] > top[1])) {
                const float factor[2] = {exp2f(top[0] - best[0]), exp2f(top[1] - best[1])};
#pragma unroll
                for (int i = 0; i < 128; ++i) out[i] *= factor[i / 2 % 2];
#pragma unroll
                for (int half = 0; half < 2; ++half) total[half] *= factor[half], top[half] = best[half];
            }
            uint32_t weights[4][4];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float* two = logits + 4 * j + 2 * half;
                    const float x = exp2f(two[0] - top[half]), y = exp2f(two[1] - top[half]);
                    total[half] += x + y;
                    weights[j / 2][j % 2 * 2 + half] = ptx::pack_bf16x2(x, y);
                }
            }
            const uint64_t values = sparse_value_descriptor(rows + warpgroup * 4 * kSparseChunkBytes);
            mma::pin(out);
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) ptx::WgmmaBf16<256, true>::rs(out, weights[k], values + k * (16 * 128 >> 4), 1);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            mma::pin(out);
            if (lane == 0) ptx::mbarrier_arrive(empty + 8 * stage);
        }

#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp * 16 + lane / 4 + 8 * half;
            total[half] += __shfl_xor_sync(0xffffffff, total[half], 1);
            total[half] += __shfl_xor_sync(0xffffffff, total[half], 2);
            float factor = 1.f;
            if (args.sinks != nullptr) {
                const float sink = args.sinks[head + row] * 1.4426950408889634f, best = fmaxf(top[half], sink);
                factor = exp2f(top[half] - best);
                total[half] = total[half] * factor + exp2f(sink - best);
            }
            factor = total[half] > 0.f ? factor / total[half] : total[half];  // no rows: 0; NaN stays
            uint32_t* target = static_cast<uint32_t*>(args.out) + (first + row) * (kValue / 2) + warpgroup * 128 + lane % 4;
#pragma unroll
            for (int j = 0; j < 32; ++j)
                target[4 * j] = ptx::pack_bf16x2(out[4 * j + 2 * half] * factor, out[4 * j + 2 * half + 1] * factor);
        }
    }

    static __device__ __forceinline__ void run(const SparseAttentionArgs& args, unsigned char* storage) {
        const uint32_t unaligned = ptx::smem_address(storage);
        Shared& shared = *reinterpret_cast<Shared*>(storage + ((1024 - unaligned % 1024) % 1024));
        const int parts = args.heads / 64;
        const int query = blockIdx.x / parts, head = blockIdx.x % parts * 64;
        const int* index = args.index + static_cast<int64_t>(query) * args.count;
        if (threadIdx.x == 0) {
            shared.last = -1;
            for (int stage = 0; stage < 2; ++stage) {
                ptx::mbarrier_init(ptx::smem_address(&shared.full[stage]), 128);
                ptx::mbarrier_init(ptx::smem_address(&shared.empty[stage]), 8);
            }
            ptx::fence_mbarrier_init();
        }
        __syncthreads();
        int last = -1;
        for (int i = threadIdx.x; i < args.count; i += kSparseThreads) last = index[i] >= 0 ? i : last;
        last = __reduce_max_sync(0xffffffff, last);
        if (threadIdx.x % 32 == 0) atomicMax(&shared.last, last);
        __syncthreads();
        const int tiles = (shared.last + kSparseTile) / kSparseTile;
        if (threadIdx.x >= 256) {
            ptx::setmaxnreg_dec<56>();
            produce(args, shared, index, tiles);
        } else {
            ptx::setmaxnreg_inc<224>();
            consume(args, shared, static_cast<int64_t>(query) * args.heads + head, head, tiles);
        }
    }
};

}  // namespace megamoe::impls
