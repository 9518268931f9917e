// Codes of E2M1, E4M3 and UE8M0, and the rule by which values become E4M3 with an FP32 scale.
// The Python twins are in kernels/formats.py; a test compares both over every code and over random bits.
#pragma once

#include "megamoe/common/types.h"

namespace megamoe {

inline constexpr float kE4M3Max = 448.0f;
inline constexpr float kE2M1Max = 6.0f;
// Smallest amax that a scale is made of: 448 * 2^-126, so that amax / 448 is a normal number.
inline constexpr float kAmaxFloor = 448.0f * 1.17549435082228750797e-38f;
inline constexpr float kFloatMax = 3.40282346638528859812e+38f;
inline constexpr u8 kE4M3Nan = 0x7f;
inline constexpr u32 kFloatNan = 0x7fc00000u;

MEGAMOE_HOST_DEVICE u32 float_bits(float value) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(value);
#else
    return __builtin_bit_cast(u32, value);
#endif
}

MEGAMOE_HOST_DEVICE float bits_float(u32 bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    return __builtin_bit_cast(float, bits);
#endif
}

// IEEE division even where the compiler is told to be fast.
MEGAMOE_HOST_DEVICE float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}

MEGAMOE_HOST_DEVICE u32 magnitude_bits(float value) { return float_bits(value) & 0x7fffffffu; }
MEGAMOE_HOST_DEVICE bool is_nan(float value) { return magnitude_bits(value) > 0x7f800000u; }

// ---- E4M3 (fn: no infinity, one NaN per sign) --------------------------------------------------------------------

// Round to nearest even, saturating at 448; NaN becomes 0x7f.
MEGAMOE_HOST_DEVICE u8 e4m3_encode(float value) {
    const u32 bits = float_bits(value);
    const u32 magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return kE4M3Nan;
    const u32 sign = (bits >> 24) & 0x80u;
    if (magnitude >= 0x43e00000u) return static_cast<u8>(sign | 0x7eu);  // 448 and above
    u32 code;
    if (magnitude >= 0x3c800000u) {  // 2^-6 and above: three bits of mantissa stay
        code = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
    } else {  // multiples of 2^-9: the addition rounds, because an ulp of 2^14 is 2^-9
        code = float_bits(bits_float(magnitude) + 16384.0f) - float_bits(16384.0f);
    }
    return static_cast<u8>(sign | code);
}

MEGAMOE_HOST_DEVICE float e4m3_decode(u8 code) {
    const u32 sign = static_cast<u32>(code & 0x80u) << 24;
    const u32 magnitude = code & 0x7fu;
    if (magnitude == 0x7fu) return bits_float(sign | kFloatNan);
    if (magnitude < 8u) {
        const float value = static_cast<float>(magnitude) * 0.001953125f;  // 2^-9
        return bits_float(sign | float_bits(value));
    }
    return bits_float(sign | ((magnitude << 20) + (120u << 23)));
}

// Scale of a group from the largest magnitude of its finite-or-infinite elements (NaN elements left out).
MEGAMOE_HOST_DEVICE float e4m3_scale(float amax) {
    const float low = amax > kAmaxFloor ? amax : kAmaxFloor;
    return divide(low < kFloatMax ? low : kFloatMax, kE4M3Max);
}

// One element under the reciprocal of its group's scale.
MEGAMOE_HOST_DEVICE u8 e4m3_quantize(float value, float inverse_scale) { return e4m3_encode(value * inverse_scale); }

// ---- E2M1 --------------------------------------------------------------------------------------------------------

// Round to nearest even, saturating at 6. NaN has no code and becomes 6 with its sign.
MEGAMOE_HOST_DEVICE u8 e2m1_encode(float value) {
    const u32 bits = float_bits(value);
    const u32 magnitude = bits & 0x7fffffffu;
    const u32 sign = (bits >> 28) & 0x8u;
    if (magnitude >= 0x40c00000u) return static_cast<u8>(sign | 7u);  // 6 and above
    u32 code;
    if (magnitude >= 0x3f800000u) {  // 1 and above: one bit of mantissa stays
        code = ((magnitude + 0x1fffffu + ((magnitude >> 22) & 1u)) >> 22) - (126u << 1);
    } else {  // multiples of 0.5: an ulp of 2^22 is 0.5
        code = float_bits(bits_float(magnitude) + 4194304.0f) - float_bits(4194304.0f);
    }
    return static_cast<u8>(sign | code);
}

MEGAMOE_HOST_DEVICE float e2m1_decode(u8 code) {
    const u32 sign = static_cast<u32>(code & 0x8u) << 28;
    const u32 magnitude = code & 0x7u;
    if (magnitude < 2u) return bits_float(sign | (magnitude != 0u ? 0x3f000000u : 0u));
    return bits_float(sign | ((magnitude << 22) + (126u << 23)));
}

// ---- UE8M0 -------------------------------------------------------------------------------------------------------

// The smallest power of two that is not below value (value >= 0), as its code; NaN becomes 255.
MEGAMOE_HOST_DEVICE u8 ue8m0_encode(float value) {
    const u32 bits = float_bits(value);
    if (is_nan(value)) return 255;
    if ((bits >> 31) != 0u) return 0;
    if (bits <= 0x00400000u) return 0;  // 2^-127 and below
    const u32 code = (bits >> 23) + ((bits & 0x7fffffu) != 0u ? 1u : 0u);
    return static_cast<u8>(code < 254u ? code : 254u);
}

MEGAMOE_HOST_DEVICE float ue8m0_decode(u8 code) {
    if (code == 0) return bits_float(0x00400000u);
    if (code == 255) return bits_float(kFloatNan);
    return bits_float(static_cast<u32>(code) << 23);
}

// ---- BF16 --------------------------------------------------------------------------------------------------------

MEGAMOE_HOST_DEVICE u16 bf16_encode(float value) {
    const u32 bits = float_bits(value);
    if (is_nan(value)) return static_cast<u16>((bits >> 16) | 0x40u);
    return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

MEGAMOE_HOST_DEVICE float bf16_decode(u16 code) { return bits_float(static_cast<u32>(code) << 16); }

}  // namespace megamoe
