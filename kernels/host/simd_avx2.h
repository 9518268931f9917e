// Eight floats in an AVX2 register. Only isa_avx2.cpp includes this, under its target pragma.
#pragma once

#include <immintrin.h>

#include "megamoe/common/types.h"

namespace megamoe::host::avx2 {

struct F8 {
    __m256 v;
};
using V = F8;  // of tile_body.h
inline constexpr u32 kLanes = 8;

inline F8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, F8 a) { _mm256_storeu_ps(p, a.v); }
inline F8 broadcast(float a) { return {_mm256_set1_ps(a)}; }
inline F8 zero() { return {_mm256_setzero_ps()}; }
inline F8 operator+(F8 a, F8 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F8 operator-(F8 a, F8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F8 operator*(F8 a, F8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F8 operator/(F8 a, F8 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F8 fma(F8 a, F8 b, F8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// A NaN in the second operand wins.
inline F8 min2(F8 a, F8 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F8 max2(F8 a, F8 b) { return {_mm256_max_ps(a.v, b.v)}; }

inline __m256i bits(F8 a) { return _mm256_castps_si256(a.v); }
inline F8 from_bits(__m256i a) { return {_mm256_castsi256_ps(a)}; }
inline F8 magnitude(F8 a) { return from_bits(_mm256_and_si256(bits(a), _mm256_set1_epi32(0x7fffffff))); }
inline F8 is_nan_mask(F8 a) { return {_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)}; }
// Elements of `a` where the mask is clear, of `b` where it is set.
inline F8 select(F8 a, F8 b, F8 mask) { return {_mm256_blendv_ps(a.v, b.v, mask.v)}; }

inline float max_of_all(F8 a) {
    float values[8];
    store(values, a);
    float result = values[0];
    for (int i = 1; i < 8; ++i) result = values[i] > result ? values[i] : result;
    return result;
}

// 2^n as a float, for n in -126..127 held as whole numbers.
inline F8 power_of_two(F8 n) {
    const __m256i whole = _mm256_cvtps_epi32(n.v);
    return from_bits(_mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(127)), 23));
}

// Nearest E4M3 value of each element, saturating; NaN stays.
inline F8 round_e4m3(F8 a) {
    const F8 sign = from_bits(_mm256_and_si256(bits(a), _mm256_set1_epi32(static_cast<int>(0x80000000u))));
    const F8 low = min2(broadcast(448.0f), magnitude(a));
    const __m256i raw = bits(low);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(raw, 20), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(raw, _mm256_set1_epi32(0x7ffff)), odd);
    const F8 normal = from_bits(_mm256_and_si256(sum, _mm256_set1_epi32(static_cast<int>(0xfff00000u))));
    const F8 small = (low + broadcast(16384.0f)) - broadcast(16384.0f);
    const F8 is_small = {_mm256_cmp_ps(low.v, _mm256_set1_ps(0.015625f), _CMP_LT_OQ)};
    F8 value = select(normal, small, is_small);
    value = select(value, low, is_nan_mask(low));
    return {_mm256_or_ps(value.v, sign.v)};
}

// BF16 <-> FP32, eight at a time.
inline F8 load_bf16(const u16* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return from_bits(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
inline void store_bf16(u16* p, F8 a) {
    const __m256i raw = bits(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(raw, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(raw, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(raw, _mm256_set1_epi32(0x400000));
    const __m256i rounded = _mm256_blendv_epi8(sum, quiet, _mm256_castps_si256(is_nan_mask(a).v));
    const __m256i high = _mm256_srli_epi32(rounded, 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

// Sixteen E4M3 codes, natural order.
inline void decode_e4m3_16(const u8* codes, F8& first, F8& second) {
    const __m256i word = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(word, _mm256_set1_epi16(0x80)), 8);
    const __m256i low = _mm256_and_si256(word, _mm256_set1_epi16(0x7f));
    const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(low, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7e00));
    const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(low, 7), sign), nan);
    const F8 factor = broadcast(256.0f);  // FP16 keeps the code's fields with an exponent that is 8 too small
    first = F8{_mm256_cvtph_ps(_mm256_castsi256_si128(half))} * factor;
    second = F8{_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))} * factor;
}

// 32 E4M3 codes.
template <typename Use>
inline __attribute__((always_inline)) void decode_e4m3_chunk(const u8* codes, Use use) {
    for (int i = 0; i < 2; ++i) {
        F8 first, second;
        decode_e4m3_16(codes + 16 * i, first, second);
        use(2 * i, first);
        use(2 * i + 1, second);
    }
}

// One half of one k of a packed MXFP4 tile: of 32 bytes, that hold 64 columns, the low (0) or high (1) nibbles, which are
// the columns 32 * half .. + 31 in four vectors. The codes are woven so that no lane is crossed (packed_layout.h).
template <int kChunk, typename Use>
inline __attribute__((always_inline)) void decode_e2m1_chunk(const u8* codes, Use use) {
    const __m256i table_high = _mm256_setr_epi8(0, 63, 63, 63, 64, 64, 64, 64, -128, -65, -65, -65, -64, -64, -64, -64, 0,
                                                63, 63, 63, 64, 64, 64, 64, -128, -65, -65, -65, -64, -64, -64, -64);
    const __m256i table_low = _mm256_setr_epi8(0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64, 0, 0,
                                               -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64);
    const __m256i nibble = _mm256_set1_epi8(0x0f);
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    // The multiplication shifts by 4 on a port that the shuffles leave free: 8% faster on Zen 3.
    const __m256i moved = kChunk == 0 ? raw : _mm256_mulhi_epu16(raw, _mm256_set1_epi16(1 << 12));
    const __m256i index = _mm256_and_si256(moved, nibble);
    const __m256i high = _mm256_shuffle_epi8(table_high, index);
    const __m256i low = _mm256_shuffle_epi8(table_low, index);
    const __m256i first = _mm256_unpacklo_epi8(low, high);
    use(0, from_bits(_mm256_slli_epi32(first, 16)));
    use(1, from_bits(_mm256_and_si256(first, upper)));
    const __m256i second = _mm256_unpackhi_epi8(low, high);
    use(2, from_bits(_mm256_slli_epi32(second, 16)));
    use(3, from_bits(_mm256_and_si256(second, upper)));
}

// Whether all of 64 UE8M0 codes are plain powers of two, not 0 (a subnormal) or 255 (NaN).
inline bool plain_ue8m0_64(const u8* codes) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32));
    const __m256i last = _mm256_set1_epi8(-1), none = _mm256_setzero_si256();
    const __m256i top = _mm256_cmpeq_epi8(_mm256_max_epu8(a, b), last);
    const __m256i bottom = _mm256_cmpeq_epi8(_mm256_min_epu8(a, b), none);
    return _mm256_movemask_epi8(_mm256_or_si256(top, bottom)) == 0;
}
inline F8 decode_plain_ue8m0(const u8* codes) {
    return from_bits(_mm256_slli_epi32(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))), 23));
}

// Eight UE8M0 codes.
inline F8 decode_ue8m0(const u8* codes) {
    const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    const __m256i is_zero = _mm256_cmpeq_epi32(code, _mm256_setzero_si256());
    const __m256i is_last = _mm256_cmpeq_epi32(code, _mm256_set1_epi32(255));
    __m256i value = _mm256_slli_epi32(code, 23);
    value = _mm256_or_si256(value, _mm256_and_si256(is_zero, _mm256_set1_epi32(0x00400000)));
    value = _mm256_or_si256(value, _mm256_and_si256(is_last, _mm256_set1_epi32(0x7fc00000)));
    return from_bits(value);
}

}  // namespace megamoe::host::avx2
