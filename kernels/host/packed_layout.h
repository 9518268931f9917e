// The packed weight layout `cpu`: tiles of 64 weight rows, stored k by k, so that 64 outputs advance together.
//
// A matrix [N, K] of `parts` parts (w13: gate and up; w2: one) becomes [parts][tiles][groups][32 k][64 rows] codes, with
// tiles = ceil(N / parts / 64) and groups = ceil(K / 32). Missing rows and columns are zeros. MXFP4 weaves the 64 codes of
// one k into 32 bytes so that AVX2 unpacks them without crossing lanes; its scales become [parts][tiles][groups][64].
// The FP32 scales of fp8_block stay where they are.
#pragma once

#include "megamoe/common/types.h"

namespace megamoe::host {

inline constexpr u32 kPackedVersion = 1;
inline constexpr u32 kTileColumns = 64;
inline constexpr u32 kGroupDepth = 32;
inline constexpr u32 kBlock128 = 128;

enum class WeightFormat : u32 { fp32 = 0, bf16 = 1, fp8_block = 2, mxfp4 = 3 };

inline constexpr u32 code_bits(WeightFormat format) {
    switch (format) {
        case WeightFormat::fp32: return 32;
        case WeightFormat::bf16: return 16;
        case WeightFormat::fp8_block: return 8;
        default: return 4;
    }
}

// Where the code of a column stands within the 32 bytes of one k.
inline constexpr u32 woven_byte(u32 column) {
    const u32 vector = (column / 8) & 3u, lane = column % 8;
    return (lane < 4 ? 0u : 16u) + (vector >> 1) * 8 + 2 * (lane & 3u) + (vector & 1u);
}
inline constexpr u32 woven_shift(u32 column) { return column < 32 ? 0u : 4u; }

struct PackedShape {
    u32 parts;
    u32 part_rows;  // rows of a part, without padding
    u32 depth;      // K, without padding
    WeightFormat format;

    constexpr u32 tiles() const { return ceil_div(part_rows, kTileColumns); }
    constexpr u32 groups() const { return ceil_div(depth, kGroupDepth); }
    constexpr u64 group_bytes() const { return static_cast<u64>(kGroupDepth) * kTileColumns * code_bits(format) / 8; }
    constexpr u64 tile_bytes() const { return groups() * group_bytes(); }
    constexpr u64 code_bytes() const { return static_cast<u64>(parts) * tiles() * tile_bytes(); }
    constexpr u64 scale_bytes() const {
        if (format == WeightFormat::mxfp4) return static_cast<u64>(parts) * tiles() * groups() * kTileColumns;
        if (format == WeightFormat::fp8_block) {
            return static_cast<u64>(parts) * ceil_div(part_rows, kBlock128) * ceil_div(depth, kBlock128) * sizeof(float);
        }
        return 0;
    }
    constexpr u64 canonical_code_bytes() const {
        return static_cast<u64>(parts) * part_rows * ((static_cast<u64>(depth) * code_bits(format) + 7) / 8);
    }
};

}  // namespace megamoe::host
