// Layout of the symmetric workspace: one allocation per rank, the same on every rank.
//
// The control region has a fixed offset (0) and a size that depends on the workspace's limits alone, so that layers of
// different shapes share it; peers write only here and into the combine slots of a generation that the owner has
// published. The data region depends on the layer. Sizes come from building a layout at address zero.
#pragma once

#include "megamoe/common/types.h"
#include "megamoe/layout/control.h"

namespace megamoe {

inline constexpr u64 kLine = 64;  // regions and hot words keep to their own cache line
inline constexpr u32 kBanks = 2;  // counts and lists, by parity of the generation
inline constexpr u32 kMaxRanks = 1024;
inline constexpr u32 kMaxPanelSlots = 256;  // panels of expanded weights that there are counters for

// Rows and columns of the tasks, and how far the phases run apart. Sizes differ between the CPU and the GPU; the
// arithmetic does not.
struct TileShape {
    u32 block_rows;        // rows of one expert in a row block
    u32 unit_blocks;       // row blocks of a unit, walked weight-major
    u32 l1_columns;        // intermediate columns of an L1 task (gate and up rows both belong to it)
    u32 l2_columns;        // hidden columns of an L2 task
    u32 pulls_per_block;   // pull tasks of a row block
    u32 publish_rows;      // tokens of a publish task
    u32 combine_rows;      // tokens of a combine task
    u32 group;             // units of a step
    u32 lag;               // units that L2 is held behind L1
    u32 ring1_units;       // L1 input rows
    u32 ring2_units;       // L2 input rows
};

// One MoE layer as the layout sees it.
struct LayerShape {
    u32 hidden;
    u32 intermediate;
    u32 num_experts;
    u32 top_k;
    u32 input_row_bytes;   // a row of x as published
    u32 scale_row_bytes;   // its scales (0: none)
    u32 ring1_row_bytes;   // a row of L1 input
    u32 ring2_row_bytes;   // a row of L2 input
    u32 slot_bytes;        // an element of a combine slot: 2 (BF16) or 4 (FP32)
};

// Limits that a workspace fixes for all its layers.
struct WorkspaceLimits {
    u32 num_ranks;
    u32 max_tokens;         // per rank and generation
    u32 max_top_k;
    u32 max_experts;        // of all ranks
    u32 max_local_experts;
    u32 max_row_blocks;     // of one rank: row_block_bound() of its largest layer
};

// Largest number of row blocks that one rank can get: every expert but one may end in a part of a block.
MEGAMOE_HOST_DEVICE constexpr u32 row_block_bound(u32 num_ranks, u32 max_tokens, u32 top_k, u32 num_local_experts,
                                                  u32 block_rows) {
    const u64 rows = static_cast<u64>(num_ranks) * max_tokens * top_k;
    return static_cast<u32>(rows / block_rows) + num_local_experts;
}

// Row blocks that a unit needs room for: fewer than unit_blocks where an expert cannot get so many rows.
MEGAMOE_HOST_DEVICE constexpr u32 unit_block_bound(u32 num_ranks, u32 max_tokens, u32 top_k, const TileShape& tile) {
    const u64 rows = static_cast<u64>(num_ranks) * max_tokens * top_k;
    const u64 blocks = (rows + tile.block_rows - 1) / tile.block_rows;
    return blocks < 1 ? 1 : blocks < tile.unit_blocks ? static_cast<u32>(blocks) : tile.unit_blocks;
}

// Legal minima of the rings. R1: the group that is pulled and the group that is multiplied. R2: the lag, the group that
// is written, and the units in which the other workers may still hold tickets.
MEGAMOE_HOST_DEVICE constexpr u32 min_ring1_units(u32 group) { return 2 * group; }
MEGAMOE_HOST_DEVICE constexpr u32 min_ring2_units(u32 lag, u32 group, u32 num_workers, u32 tiles_per_unit) {
    return lag + group + ceil_div(num_workers, tiles_per_unit) + 1;
}

// A stretch of memory; address zero is a valid base.
struct Region {
    u64 address;
    u64 bytes;
};

// Hands out regions one after the other.
class RegionBuilder {
public:
    MEGAMOE_HOST_DEVICE explicit RegionBuilder(u64 base) : next_(base) {}
    MEGAMOE_HOST_DEVICE Region take(u64 bytes) {
        const Region region{next_, align_up(bytes, kLine)};
        next_ += region.bytes;
        return region;
    }
    MEGAMOE_HOST_DEVICE u64 next() const { return next_; }

private:
    u64 next_;
};

// Words that only this rank's workers touch share nothing with words that peers write.
struct ControlLayout {
    Region generation;     // u32, of the chunk in flight or the next call; on the GPU behind it u32, chunk of the call
    Region ticket;         // u32, next ticket; on the GPU behind it u32, the chunk that it belongs to
    Region published;      // u32, publish tasks done
    Region exited;         // u32, workers that left; on the GPU behind it u32, tasks of the chunk that have ended
    Region aborts;         // [num_ranks] words by source, written by peers and by the rank itself
    Region headers;        // [banks][num_ranks] CountHeader, one line each, written by the source
    Region counts;         // [banks][num_ranks][max_local_experts] ExpertCount, written by the source
    Region tags;           // [max_tokens * max_top_k] words, written by the owners of the experts
    Region arrived;        // [max_row_blocks] u32, pull tasks done
    Region l1_done;        // [max_row_blocks] u32, L1 tasks done
    Region l2_done;        // [max_row_blocks] u32, L2 tasks done
    Region unit_l1_done;   // [max_row_blocks] u32, L1 tasks done of a unit: frees its slot of ring 1
    Region unit_l2_done;   // [max_row_blocks] u32, L2 tasks done of a unit: frees its slot of ring 2
    Region expanded;       // [kMaxPanelSlots] u32, parts of panels that are there; the GPU's
    Region panel_used;     // [kMaxPanelSlots] u32, uses of panels: frees their slot; the GPU's
    Region lists;          // [banks][max_tokens * max_top_k] ListEntry, read by the owners
    Region cursors;        // [max_experts] u32, entries of an expert met so far; the GPU's publish tasks
    Region starts;         // [max_experts] u32, first list entry of an expert; the GPU's publish tasks
    Region places;         // [max_tokens * max_top_k] u32, place of an entry within its expert; the GPU's publish tasks
    u64 end;

    MEGAMOE_HOST_DEVICE ControlLayout(u64 base, const WorkspaceLimits& limits) {
        RegionBuilder build(base);
        const u64 slots = static_cast<u64>(limits.max_tokens) * limits.max_top_k;
        const u64 blocks = static_cast<u64>(limits.max_row_blocks) * sizeof(u32);
        generation = build.take(sizeof(u32));
        ticket = build.take(sizeof(u32));
        published = build.take(sizeof(u32));
        exited = build.take(sizeof(u32));
        aborts = build.take(static_cast<u64>(limits.num_ranks) * sizeof(u64));
        headers = build.take(static_cast<u64>(kBanks) * limits.num_ranks * kLine);
        counts = build.take(static_cast<u64>(kBanks) * limits.num_ranks * limits.max_local_experts * sizeof(ExpertCount));
        tags = build.take(slots * sizeof(u64));
        arrived = build.take(blocks);
        l1_done = build.take(blocks);
        l2_done = build.take(blocks);
        unit_l1_done = build.take(blocks);
        unit_l2_done = build.take(blocks);
        expanded = build.take(kMaxPanelSlots * sizeof(u32));
        panel_used = build.take(kMaxPanelSlots * sizeof(u32));
        lists = build.take(static_cast<u64>(kBanks) * slots * sizeof(ListEntry));
        cursors = build.take(static_cast<u64>(limits.max_experts) * sizeof(u32));
        starts = build.take(static_cast<u64>(limits.max_experts) * sizeof(u32));
        places = build.take(slots * sizeof(u32));
        end = align_up(build.next(), 4096);
    }

    MEGAMOE_HOST_DEVICE u64 header(u32 bank, u32 source, u32 num_ranks) const {
        return headers.address + (static_cast<u64>(bank) * num_ranks + source) * kLine;
    }
    MEGAMOE_HOST_DEVICE u64 count_row(u32 bank, u32 source, const WorkspaceLimits& limits) const {
        const u64 row = static_cast<u64>(bank) * limits.num_ranks + source;
        return counts.address + row * limits.max_local_experts * sizeof(ExpertCount);
    }
    MEGAMOE_HOST_DEVICE u64 list(u32 bank, const WorkspaceLimits& limits) const {
        const u64 slots = static_cast<u64>(limits.max_tokens) * limits.max_top_k;
        return lists.address + bank * slots * sizeof(ListEntry);
    }
};

// Everything whose place depends on the layer. Only x and the scales are read by peers, only slots are written by them,
// and both are at rest between two calls of a rank: its call ends when all of its slots have arrived. What peers touch
// comes first, so that its place does not depend on ring sizes, which a rank may choose for itself.
struct DataLayout {
    Region input;    // [max_tokens] rows of x
    Region scales;   // [max_tokens] rows of its scales
    Region slots;    // [top_k][max_tokens][hidden] results
    Region ring1;    // [ring1_units][unit rows] rows of L1 input
    Region ring2;    // [ring2_units][unit rows] rows of L2 input
    Region meta;     // [ring1_units + ring2_units][unit rows] RowMeta
    u64 end;
    u32 unit_rows;

    MEGAMOE_HOST_DEVICE DataLayout(u64 base, const WorkspaceLimits& limits, const LayerShape& shape,
                                   const TileShape& tile) {
        RegionBuilder build(base);
        unit_rows = unit_block_bound(limits.num_ranks, limits.max_tokens, shape.top_k, tile) * tile.block_rows;
        const u64 rows = unit_rows;
        input = build.take(static_cast<u64>(limits.max_tokens) * shape.input_row_bytes);
        scales = build.take(static_cast<u64>(limits.max_tokens) * shape.scale_row_bytes);
        slots = build.take(static_cast<u64>(shape.top_k) * limits.max_tokens * shape.hidden * shape.slot_bytes);
        ring1 = build.take(tile.ring1_units * rows * shape.ring1_row_bytes);
        ring2 = build.take(tile.ring2_units * rows * shape.ring2_row_bytes);
        meta = build.take((static_cast<u64>(tile.ring1_units) + tile.ring2_units) * rows * sizeof(RowMeta));
        end = align_up(build.next(), 4096);
    }

    MEGAMOE_HOST_DEVICE u64 slot_row(u32 token, u32 k, u32 max_tokens, const LayerShape& shape) const {
        const u64 row = static_cast<u64>(k) * max_tokens + token;
        return slots.address + row * shape.hidden * shape.slot_bytes;
    }
};

// FNV-1a over the numbers that all ranks must share for a call.
MEGAMOE_HOST_DEVICE constexpr u64 hash_step(u64 hash, u64 value) {
    for (u32 i = 0; i < 8; ++i) hash = (hash ^ ((value >> (8 * i)) & 0xffu)) * 0x100000001b3ull;
    return hash;
}
inline constexpr u64 kHashSeed = 0xcbf29ce484222325ull;

}  // namespace megamoe
