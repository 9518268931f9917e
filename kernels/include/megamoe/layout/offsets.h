// Where the parts of a workspace begin: worked out once for a launch, by the host, and the same on every rank.
#pragma once

#include "megamoe/layout/workspace.h"

namespace megamoe {

// From the start of a workspace. The mega-kernel gets it among its arguments.
struct Offsets {
    u64 input, scales, slots, ring1, ring1_scales, ring2, ring2_scales, meta;
    u64 generation, ticket, published, exited, aborts, headers, counts, tags;
    u64 arrived, l1_done, l2_done, unit_l1_done, unit_l2_done;
    u64 expanded, panel_used, lists, cursors, starts, places;
    u64 unit_rows;  // of a unit in the rings
};
static_assert(sizeof(Offsets) == 28 * sizeof(u64), "Offsets has no padding");

MEGAMOE_HOST_DEVICE Offsets workspace_offsets(const WorkspaceLimits& limits, const LayerShape& shape, const TileShape& tile) {
    const ControlLayout control(0, limits);
    const DataLayout data(control.end, limits, shape, tile);
    Offsets at{};
    at.input = data.input.address;
    at.scales = data.scales.address;
    at.slots = data.slots.address;
    at.ring1 = data.ring1.address;
    at.ring1_scales = data.ring1.address + static_cast<u64>(tile.ring1_units) * data.unit_rows * shape.hidden;
    at.ring2 = data.ring2.address;
    const u64 columns = align_up(shape.intermediate, 128);
    at.ring2_scales = data.ring2.address + static_cast<u64>(tile.ring2_units) * data.unit_rows * columns;
    at.meta = data.meta.address;
    at.generation = control.generation.address;
    at.ticket = control.ticket.address;
    at.published = control.published.address;
    at.exited = control.exited.address;
    at.aborts = control.aborts.address;
    at.headers = control.headers.address;
    at.counts = control.counts.address;
    at.tags = control.tags.address;
    at.arrived = control.arrived.address;
    at.l1_done = control.l1_done.address;
    at.l2_done = control.l2_done.address;
    at.unit_l1_done = control.unit_l1_done.address;
    at.unit_l2_done = control.unit_l2_done.address;
    at.expanded = control.expanded.address;
    at.panel_used = control.panel_used.address;
    at.lists = control.lists.address;
    at.cursors = control.cursors.address;
    at.starts = control.starts.address;
    at.places = control.places.address;
    at.unit_rows = data.unit_rows;
    return at;
}

}  // namespace megamoe
