// Packed MXFP4 weights `sm90_moe`: one layout that both mainloops read, so that decode and prefill share a copy.
//
// Blocks of 128 rows x 128 of K, block (row block, k) at row block * num_k_blocks + k:
//   codes [4 groups of 32 of K][128 places][4 words], relative exponents [128 places] uint16, 4 bits a group.
// Word w of a group holds k = 4w + 0..3 in its first four codes and k = 16 + 4w + 0..3 in its last four.
// Place t holds row n = t ^ (t / 8 % 2): so both readers touch different banks, SS as row n of its tile, RS as the rows
// 2g and 2g + 1 of a strip of 16, which become rows g and g + 8 of its fragment.
// Rows 2p and 2p + 1 of a block belong together: neighbouring features (W2), gate and up of a column (W13).
#pragma once
#include "megamoe/mma/decode_fp4.cuh"
#include "megamoe/mma/policy.cuh"
#include "megamoe/ptx/memory.cuh"

namespace megamoe::mma {

constexpr int kMoeBlockRows = 128, kMoeGroupBytes = 128 * 16, kMoeCodeBytes = 4 * kMoeGroupBytes;
constexpr int kMoeBlockBytes = kMoeCodeBytes + 128 * 2;

__host__ __device__ constexpr int moe_row_of_place(int t) { return t ^ (t / 8 % 2); }

// SS: thread t holds the codes of place t and writes row n of the K-major, 128B-swizzled tile at `w`.
// NOTES: the proxy fence after the stores compiles to a full memory barrier, which waits for every load in flight; so
// the codes of the next step are asked for after it, and other warps hide their latency.
struct MoeDecoder {
    uint4 codes[4];
    uint32_t exponents;

    __device__ __forceinline__ void load(const uint8_t* block, int thread) {
#pragma unroll
        for (int q = 0; q < 4; ++q) codes[q] = ptx::load_global_v4_no_allocate(block + q * kMoeGroupBytes + thread * 16);
        exponents = ptx::load_global_u16_no_allocate(block + kMoeCodeBytes + thread * 2);
    }
    __device__ __forceinline__ void store(uint32_t w, int thread) const {
        const int n = moe_row_of_place(thread);
        const uint32_t row = w + n * kSwizzleRowBytes + ((n & 7) << 4);  // the swizzle is an exclusive or from here
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const Fp4Table table((exponents >> (4 * q)) & 15);
            const uint32_t word[4] = {codes[q].x, codes[q].y, codes[q].z, codes[q].w};
            uint32_t low[4], high[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) decode_fp4(word[i], table, low[i], high[i]);
            ptx::store_shared_v4(row ^ (32 * q), low[0], low[1], low[2], low[3]);
            ptx::store_shared_v4(row ^ (32 * q + 16), high[0], high[1], high[2], high[3]);
        }
    }
};

// RS: fragments of strip `strip` (16 rows) of a block in shared memory; lane 4g + c gets rows 2g and 2g + 1 of the strip.
__device__ __forceinline__ void load_moe_fragments(uint32_t (&a)[4][4], uint32_t block, int strip, int lane) {
    const int g = lane / 4, t = strip * 16 + ((2 * g) ^ (g / 4)), u = strip * 16 + ((2 * g + 1) ^ (g / 4));
    const uint32_t first = block + t * 16 + lane % 4 * 4, second = block + u * 16 + lane % 4 * 4;
    uint32_t word[8];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        word[2 * q] = ptx::load_shared_u32(first + q * kMoeGroupBytes);
        word[2 * q + 1] = ptx::load_shared_u32(second + q * kMoeGroupBytes);
    }
    // The exponents of places t and u = t ^ 1 are the halves of one word: that of row 2g into the low one; then nibbles ->
    // bytes, of even groups and of odd ones, so that each takes one byte-permute.
    const uint32_t pair = ptx::load_shared_u32(block + kMoeCodeBytes + (t & ~1) * 2);
    const uint32_t exponents = __byte_perm(pair, 0, g / 4 ? 0x1032 : 0x3210);
    const uint32_t even = exponents & 0x0f0f0f0fu, odd = (exponents >> 4) & 0x0f0f0f0fu;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const uint32_t bytes = q % 2 ? odd : even;
        decode_fp4(word[2 * q], Fp4Table(__byte_perm(bytes, 0, 0x4440 + q / 2)), a[q][0], a[q][2]);
        decode_fp4(word[2 * q + 1], Fp4Table(__byte_perm(bytes, 0, 0x4442 + q / 2)), a[q][1], a[q][3]);
    }
}

}  // namespace megamoe::mma
