#include "pack.h"

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

namespace megamoe::host {
namespace {

// Calls visit(canonical row or none, part, tile, column) for every row of the packed matrix.
template <typename Visit>
void for_rows(const PackedShape& shape, Visit visit) {
    for (u32 part = 0; part < shape.parts; ++part) {
        for (u32 tile = 0; tile < shape.tiles(); ++tile) {
            const u32 columns = min_of(kTileColumns, shape.part_rows - tile * kTileColumns);
            for (u32 column = 0; column < columns; ++column) {
                visit(static_cast<u64>(part) * shape.part_rows + tile * kTileColumns + column,
                      static_cast<u64>(part) * shape.tiles() + tile, column);
            }
        }
    }
}

template <typename Element, bool kPack>
void copy_elements(const PackedShape& shape, const u8* from, u8* to) {
    for_rows(shape, [&](u64 row, u64 tile, u32 column) {
        const u64 first = row * shape.depth, packed = tile * shape.tile_bytes() + column * sizeof(Element);
        for (u32 k = 0; k < shape.depth; ++k) {
            const u64 canonical_at = (first + k) * sizeof(Element);
            const u64 packed_at = packed + static_cast<u64>(k) * kTileColumns * sizeof(Element);
            std::memcpy(to + (kPack ? packed_at : canonical_at), from + (kPack ? canonical_at : packed_at), sizeof(Element));
        }
    });
}

void pack_nibbles(const PackedShape& shape, const u8* from, u8* to) {
    const u32 row_bytes = shape.depth / 2;
    for_rows(shape, [&](u64 row, u64 tile, u32 column) {
        const u8* codes = from + row * row_bytes;
        u8* out = to + tile * shape.tile_bytes() + woven_byte(column);
        const u32 shift = woven_shift(column);
        for (u32 i = 0; i < row_bytes; ++i, out += kTileColumns) {  // two k of 32 bytes each
            out[0] = static_cast<u8>(out[0] | ((codes[i] & 0xfu) << shift));
            out[kTileColumns / 2] = static_cast<u8>(out[kTileColumns / 2] | ((codes[i] >> 4) << shift));
        }
    });
}

void unpack_nibbles(const PackedShape& shape, const u8* from, u8* to) {
    const u32 row_bytes = shape.depth / 2;
    for_rows(shape, [&](u64 row, u64 tile, u32 column) {
        u8* codes = to + row * row_bytes;
        const u8* in = from + tile * shape.tile_bytes() + woven_byte(column);
        const u32 shift = woven_shift(column);
        for (u32 i = 0; i < row_bytes; ++i, in += kTileColumns) {
            codes[i] = static_cast<u8>(((in[0] >> shift) & 0xfu) | (((in[kTileColumns / 2] >> shift) & 0xfu) << 4));
        }
    });
}

template <bool kPack>
void copy_scales(const PackedShape& shape, const u8* from, u8* to) {
    const u32 groups = shape.groups();
    for_rows(shape, [&](u64 row, u64 tile, u32 column) {
        for (u32 group = 0; group < groups; ++group) {
            const u64 canonical_at = row * groups + group, packed_at = (tile * groups + group) * kTileColumns + column;
            to[kPack ? packed_at : canonical_at] = from[kPack ? canonical_at : packed_at];
        }
    });
}

template <bool kPack>
void copy_codes(const PackedShape& shape, const u8* from, u8* to) {
    switch (shape.format) {
        case WeightFormat::fp32: return copy_elements<u32, kPack>(shape, from, to);
        case WeightFormat::bf16: return copy_elements<u16, kPack>(shape, from, to);
        case WeightFormat::fp8_block: return copy_elements<u8, kPack>(shape, from, to);
        default: return kPack ? pack_nibbles(shape, from, to) : unpack_nibbles(shape, from, to);
    }
}

template <bool kPack>
void convert(const PackJob& job, u32 num_threads) {
    const PackedShape& shape = job.shape;
    const u64 packed = shape.code_bytes(), canonical = shape.canonical_code_bytes();
    const u64 packed_scales = shape.scale_bytes();
    const u64 canonical_scales = static_cast<u64>(shape.parts) * shape.part_rows * shape.groups();
    const u64 in_size = kPack ? canonical : packed, out_size = kPack ? packed : canonical;
    const u64 in_scales = kPack ? canonical_scales : packed_scales, out_scales = kPack ? packed_scales : canonical_scales;
    const bool scales = shape.format == WeightFormat::mxfp4 && job.scales != nullptr;
    std::atomic<u32> next{0};
    const auto work = [&] {
        for (;;) {
            const u32 matrix = next.fetch_add(1, std::memory_order_relaxed);
            if (matrix >= job.num_matrices) return;
            u8* codes = job.out_codes + matrix * out_size;
            std::memset(codes, 0, out_size);
            copy_codes<kPack>(shape, job.codes + matrix * in_size, codes);
            if (!scales) continue;
            u8* to = job.out_scales + matrix * out_scales;
            std::memset(to, 0, out_scales);
            copy_scales<kPack>(shape, job.scales + matrix * in_scales, to);
        }
    };
    std::vector<std::thread> threads;
    for (u32 i = 1; i < num_threads && i < job.num_matrices; ++i) threads.emplace_back(work);
    work();
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

void pack(const PackJob& job, u32 num_threads) { convert<true>(job, num_threads); }
void unpack(const PackJob& job, u32 num_threads) { convert<false>(job, num_threads); }

}  // namespace megamoe::host
