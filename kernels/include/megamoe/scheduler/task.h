// A unit of work as data: what it is, what it waits for, what it signals.
#pragma once

#include "megamoe/common/types.h"

namespace megamoe {

enum class Phase : u32 { publish = 0, pull = 1, l1 = 2, l2 = 3, combine = 4, end = 5, expand = 6 };

// Counters that tasks wait for and add to. All but `peers` and `tags` are local to the rank.
enum class Counter : u32 {
    none = 0,
    peers = 1,         // the counts of every peer: what a schedule is made of
    arrived = 2,       // [row block]
    l1_done = 3,       // [row block]
    l2_done = 4,       // [row block]; the last L2 task of a row block stores the tags
    unit_l1_done = 5,  // [unit]
    unit_l2_done = 6,  // [unit]
    tags = 7,          // [token, k] of this rank, stored by the owners of the experts
    expanded = 8,      // [panel slot], parts that are there, of all panels so far
    panel_used = 9,    // [panel slot], kPanelUses for each panel that has been multiplied
};

// What the tasks that read a panel add to `panel_used` together: a multiple of every number of row blocks that a unit can
// have where weights are expanded.
inline constexpr u32 kMaxExpandedBlocks = 16, kPanelUses = 720720;

struct Wait {
    Counter counter;
    u32 index;
    u32 target;
};

struct Task {
    Phase phase;
    u32 index;           // publish and combine: chunk of tokens; pull: part of the row block; L1, L2, expand: column block
    u32 expert;          // local
    u32 unit;
    u32 row_block;       // of the rank, over all experts
    u32 block_in_unit;
    u32 first_row;       // of the expert
    u32 num_rows;        // valid rows of the row block
    Phase weights;       // expand: whose panel, `end`: none, beyond the last one
    u32 panel;           // L1, L2, expand: slot of the panel, where weights are expanded
    u32 part;            // expand: part of the panel
    u32 uses;            // L1, L2: what the task adds to `panel_used`
    u32 num_waits;
    u32 num_signals;
    Wait waits[3];       // target: the value that must have been reached
    Wait signals[3];     // target: the value that is added
};

}  // namespace megamoe
