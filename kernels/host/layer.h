// One MoE layer as the engine runs it: numbers, derived sizes, and the pointers of one call.
#pragma once

#include "isa.h"
#include "megamoe/layout/workspace.h"
#include "megamoe/scheduler/schedule.h"
#include "packed_layout.h"

namespace megamoe::host {

enum class ActScale : u32 { none = 0, token = 1, block128 = 2 };
enum class Scalar : u32 { fp32 = 0, bf16 = 1 };

struct LayerConfig {
    u32 hidden = 0, intermediate = 0, num_experts = 0, top_k = 0;
    WeightFormat format = WeightFormat::fp32;
    ActScale act_scale = ActScale::none;
    Activation activation = Activation::silu;
    bool has_limit = false;
    float limit = 0.0f;
    float alpha = 0.0f;
    bool bias = false;
    bool weight_before = false;
    Scalar input = Scalar::fp32;  // dtype of x and of the output
};

// Sizes that follow from a layer. The CPU keeps ring rows as FP32, decoded once on arrival; 16 floats more than a row
// keep rows of a power-of-two length out of the same cache sets.
struct Layer {
    LayerConfig config;
    LayerShape shape{};
    TileShape tile{};
    u32 num_local_experts = 0;
    PackedShape w13{}, w2{};
    u64 hash = 0;

    bool quantized() const { return config.act_scale != ActScale::none; }
    u32 num_scales() const {
        return !quantized() ? 0 : config.act_scale == ActScale::token ? 1 : ceil_div(config.hidden, kBlock128);
    }
    u32 l1_tiles() const { return ceil_div(shape.intermediate, tile.l1_columns); }
    u64 ring1_stride() const { return shape.ring1_row_bytes / sizeof(float); }
    u64 ring2_stride() const { return shape.ring2_row_bytes / sizeof(float); }
};

inline constexpr TileShape kCpuTile{.block_rows = 64,
                                    .unit_blocks = 8,
                                    .l1_columns = 128,
                                    .l2_columns = 128,
                                    .pulls_per_block = 1,
                                    .publish_rows = 32,
                                    .combine_rows = 16,
                                    .group = 1,
                                    .lag = 1,
                                    .ring1_units = 0,
                                    .ring2_units = 0};

// Fills in ring sizes for a number of workers where they are 0, and keeps the given ones.
inline TileShape with_rings(TileShape tile, const LayerConfig& config, u32 num_workers) {
    const u32 tiles = ceil_div(config.intermediate, tile.l1_columns);
    if (tile.ring1_units == 0) tile.ring1_units = min_ring1_units(tile.group) + 1;
    if (tile.ring2_units == 0) tile.ring2_units = min_ring2_units(tile.lag, tile.group, num_workers, tiles);
    return tile;
}

inline Layer make_layer(const LayerConfig& config, u32 num_ranks, const TileShape& tile) {
    Layer layer;
    layer.config = config;
    layer.tile = tile;
    layer.num_local_experts = config.num_experts / num_ranks;
    layer.w13 = PackedShape{2, config.intermediate, config.hidden, config.format};
    layer.w2 = PackedShape{1, config.hidden, config.intermediate, config.format};
    LayerShape& shape = layer.shape;
    shape.hidden = config.hidden;
    shape.intermediate = config.intermediate;
    shape.num_experts = config.num_experts;
    shape.top_k = config.top_k;
    const u32 element = layer.quantized() ? 1 : config.input == Scalar::bf16 ? 2 : 4;
    shape.input_row_bytes = static_cast<u32>(align_up(static_cast<u64>(config.hidden) * element, kLine));
    shape.scale_row_bytes = layer.num_scales() * static_cast<u32>(sizeof(float));
    const u32 pad = 16;
    shape.ring1_row_bytes = (layer.w13.groups() * kGroupDepth + pad) * static_cast<u32>(sizeof(float));
    shape.ring2_row_bytes = (layer.w13.tiles() * kTileColumns + pad) * static_cast<u32>(sizeof(float));
    shape.slot_bytes = config.format == WeightFormat::fp32 ? 4 : 2;
    u64 hash = kHashSeed;
    const u32 numbers[] = {config.hidden,     config.intermediate,
                           config.num_experts, config.top_k,
                           static_cast<u32>(config.format), static_cast<u32>(config.act_scale),
                           static_cast<u32>(config.activation), config.has_limit ? 1u : 0u,
                           __builtin_bit_cast(u32, config.limit), __builtin_bit_cast(u32, config.alpha),
                           config.bias ? 1u : 0u, config.weight_before ? 1u : 0u,
                           static_cast<u32>(config.input)};
    for (const u32 number : numbers) hash = hash_step(hash, number);
    layer.hash = hash;
    return layer;
}

// The limits of a workspace that serves one layer; the caller takes the maxima over several.
inline WorkspaceLimits limits_of(const LayerConfig& config, u32 num_ranks, u32 max_tokens, const TileShape& tile) {
    const u32 local = config.num_experts / num_ranks;
    return WorkspaceLimits{num_ranks,      max_tokens,
                           config.top_k,   config.num_experts,
                           local,          row_block_bound(num_ranks, max_tokens, config.top_k, local, tile.block_rows)};
}

// Pointers of the experts of this rank, packed.
struct ExpertPointers {
    const u8* w13 = nullptr;
    const u8* w13_scale = nullptr;
    const u8* w2 = nullptr;
    const u8* w2_scale = nullptr;
    const float* b13 = nullptr;
    const float* b2 = nullptr;
};

struct CallArguments {
    const void* x = nullptr;        // [num_tokens, hidden], config.input
    const void* ids = nullptr;      // [num_tokens, top_k]
    u32 id_bytes = 8;
    const float* weights = nullptr; // [num_tokens, top_k]
    void* out = nullptr;            // [num_tokens, hidden], config.input
    u32 num_tokens = 0;
    double timeout_s = 600.0;
    bool overflow_error = false;
    bool check = false;
    bool trace = false;
    // Asked now and then on the calling thread while it waits: true = give up. May be null.
    bool (*interrupted)() = nullptr;
};

}  // namespace megamoe::host
