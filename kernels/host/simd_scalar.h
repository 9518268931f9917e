// The scalar twin of simd_avx2.h: the same results, bit for bit, on any machine.
#pragma once

#include "megamoe/common/codes.h"
#include "packed_layout.h"

namespace megamoe::host::scalar {

struct F8 {
    float v[8];
};
using V = F8;  // of tile_body.h
inline constexpr u32 kLanes = 8;

template <typename Function>
inline F8 each(Function function) {
    F8 result;
    for (int i = 0; i < 8; ++i) result.v[i] = function(i);
    return result;
}

inline F8 load(const float* p) { return each([&](int i) { return p[i]; }); }
inline void store(float* p, F8 a) {
    for (int i = 0; i < 8; ++i) p[i] = a.v[i];
}
inline F8 broadcast(float a) { return each([&](int) { return a; }); }
inline F8 zero() { return broadcast(0.0f); }
inline F8 operator+(F8 a, F8 b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline F8 operator-(F8 a, F8 b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline F8 operator*(F8 a, F8 b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline F8 operator/(F8 a, F8 b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline F8 fma(F8 a, F8 b, F8 c) { return each([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); }); }
inline F8 min2(F8 a, F8 b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline F8 max2(F8 a, F8 b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F8 magnitude(F8 a) { return each([&](int i) { return bits_float(magnitude_bits(a.v[i])); }); }
inline F8 is_nan_mask(F8 a) { return each([&](int i) { return bits_float(is_nan(a.v[i]) ? 0xffffffffu : 0u); }); }
inline F8 select(F8 a, F8 b, F8 mask) {
    return each([&](int i) { return (float_bits(mask.v[i]) >> 31) != 0u ? b.v[i] : a.v[i]; });
}
inline float max_of_all(F8 a) {
    float result = a.v[0];
    for (int i = 1; i < 8; ++i) result = a.v[i] > result ? a.v[i] : result;
    return result;
}
inline F8 power_of_two(F8 n) {
    return each([&](int i) {
        const i32 whole = n.v[i] == n.v[i] ? static_cast<i32>(n.v[i]) : static_cast<i32>(0x80000000u);
        return bits_float(static_cast<u32>(whole + 127) << 23);
    });
}
inline F8 round_e4m3(F8 a) {
    return each([&](int i) { return is_nan(a.v[i]) ? a.v[i] : e4m3_decode(e4m3_encode(a.v[i])); });
}
inline F8 load_bf16(const u16* p) {
    return each([&](int i) { return bf16_decode(p[i]); });
}
inline void store_bf16(u16* p, F8 a) {
    for (int i = 0; i < 8; ++i) p[i] = bf16_encode(a.v[i]);
}
inline void decode_e4m3_16(const u8* codes, F8& first, F8& second) {
    first = each([&](int i) { return e4m3_decode(codes[i]); });
    second = each([&](int i) { return e4m3_decode(codes[8 + i]); });
}
// 32 E4M3 codes.
template <typename Use>
inline void decode_e4m3_chunk(const u8* codes, Use use) {
    for (int i = 0; i < 2; ++i) {
        F8 first, second;
        decode_e4m3_16(codes + 16 * i, first, second);
        use(2 * i, first);
        use(2 * i + 1, second);
    }
}
template <int kChunk, typename Use>
inline void decode_e2m1_chunk(const u8* codes, Use use) {
    for (u32 vector = 0; vector < 4; ++vector) {
        use(static_cast<int>(vector), each([&](int i) {
                const u32 column = 32 * kChunk + 8 * vector + static_cast<u32>(i);
                return e2m1_decode(static_cast<u8>((codes[woven_byte(column)] >> woven_shift(column)) & 0xf));
            }));
    }
}
inline bool plain_ue8m0_64(const u8*) { return false; }
inline F8 decode_ue8m0(const u8* codes) {
    return each([&](int i) { return ue8m0_decode(codes[i]); });
}

inline F8 decode_plain_ue8m0(const u8* codes) { return decode_ue8m0(codes); }

}  // namespace megamoe::host::scalar
