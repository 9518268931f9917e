// E2M1 codes with a relative exponent -> E4M3 bytes, 8 codes at a time.
#pragma once
#include "megamoe/ptx/types.cuh"

namespace megamoe::mma {

// The 8 magnitudes of E2M1 as E4M3 bytes, times 2^(exponent - 5); exact for exponent 0..11 (6 * 2^6 = 384 <= 448).
// One exponent step adds 0x08 to each byte; zero (byte 0) stays.
struct Fp4Table {
    uint32_t low, high;
    __device__ __forceinline__ explicit Fp4Table(uint32_t exponent)
        : low(0x14100800u + exponent * 0x08080800u), high(0x24201c18u + exponent * 0x08080808u) {}
};

// `word` holds 8 codes: magnitudes in nibbles 0..7 (3 bits each: byte-permute selectors), the signs of codes 0..3 at
// bits 8k + 7 and of codes 4..7 at bits 8k + 3, so that each sign is one shift away from its byte.
__device__ __forceinline__ void decode_fp4(uint32_t word, const Fp4Table& table, uint32_t& first, uint32_t& second) {
    const uint32_t magnitudes = word & 0x77777777u;
    first = __byte_perm(table.low, table.high, magnitudes) | (word & 0x80808080u);
    second = __byte_perm(table.low, table.high, magnitudes >> 16) | ((word << 4) & 0x80808080u);
}

}  // namespace megamoe::mma
