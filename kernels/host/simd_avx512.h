// Sixteen floats in an AVX-512 register: what tiles need. Only isa_avx512.cpp includes this, under its target pragma.
#pragma once

#include <immintrin.h>

#include "megamoe/common/types.h"

namespace megamoe::host::avx512 {

struct V {
    __m512 v;
};
inline constexpr u32 kLanes = 16;

inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline V broadcast(float a) { return {_mm512_set1_ps(a)}; }
inline V zero() { return {_mm512_setzero_ps()}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

inline __m512i bytes_to_dwords(const u8* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline V load_bf16(const u16* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}

// 64 E4M3 codes.
template <typename Use>
inline __attribute__((always_inline)) void decode_e4m3_chunk(const u8* codes, Use use) {
    const __m256i nan_low = _mm256_set1_epi16(0x7f);
    for (int i = 0; i < 4; ++i) {
        const __m256i word = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * i)));
        const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(word, _mm256_set1_epi16(0x80)), 8);
        const __m256i low = _mm256_and_si256(word, nan_low);
        const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(low, nan_low), _mm256_set1_epi16(0x7e00));
        const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(low, 7), sign), nan);
        // FP16 keeps the code's fields with an exponent that is 8 too small.
        use(i, V{_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f))});
    }
}

// One k of a packed MXFP4 tile: 64 columns in 32 bytes. A permutation of bytes undoes the weaving and spreads 16 bytes over
// 16 lanes; their low nibbles, and shifted down their high ones, look FP32 values up, since that looks at four bits only.
template <int kChunk, typename Use>
inline __attribute__((always_inline)) void decode_e2m1_chunk(const u8* codes, Use use) {
    static_assert(kChunk == 0, "one chunk holds all columns");
    const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                                        -3.0f, -4.0f, -6.0f);
    // woven_byte() of the columns 0..15, and 16..31: the other bytes of a lane do not matter.
    const __m512i first = _mm512_setr_epi32(0, 2, 4, 6, 16, 18, 20, 22, 1, 3, 5, 7, 17, 19, 21, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const __m512i raw =
        _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    const __m512i a = _mm512_permutexvar_epi8(first, raw), b = _mm512_permutexvar_epi8(second, raw);
    use(0, V{_mm512_permutexvar_ps(a, table)});
    use(1, V{_mm512_permutexvar_ps(b, table)});
    use(2, V{_mm512_permutexvar_ps(_mm512_srli_epi32(a, 4), table)});
    use(3, V{_mm512_permutexvar_ps(_mm512_srli_epi32(b, 4), table)});
}

// Whether all of 64 UE8M0 codes are plain powers of two, not 0 (a subnormal) or 255 (NaN).
inline bool plain_ue8m0_64(const u8* codes) {
    const __m512i all = _mm512_loadu_si512(codes);
    // code - 1 wraps 0 to 255 and leaves 255 at 254
    return _mm512_cmpge_epu8_mask(_mm512_sub_epi8(all, _mm512_set1_epi8(1)), _mm512_set1_epi8(-2)) == 0;
}
inline V decode_plain_ue8m0(const u8* codes) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(bytes_to_dwords(codes), 23))};
}
// Sixteen UE8M0 codes.
inline V decode_ue8m0(const u8* codes) {
    const __m512i code = bytes_to_dwords(codes);
    __m512i value = _mm512_slli_epi32(code, 23);
    value = _mm512_mask_mov_epi32(value, _mm512_cmpeq_epi32_mask(code, _mm512_setzero_si512()),
                                  _mm512_set1_epi32(0x00400000));
    value = _mm512_mask_mov_epi32(value, _mm512_cmpeq_epi32_mask(code, _mm512_set1_epi32(255)),
                                  _mm512_set1_epi32(0x7fc00000));
    return {_mm512_castsi512_ps(value)};
}

}  // namespace megamoe::host::avx512
