// The task order of one rank: arithmetic over the rows of its experts, the same on host and device.
//
// Tickets: publish | pulls of group 0 | step 0 | step 1 | ... | combine. Step s holds, in this order,
//   pulls of the units of group s + 1, L1 of the units of group s, L2 of the units that start `lag` behind group s.
// A unit is up to `unit_blocks` row blocks of one expert. Within a unit L1 and L2 go column block by column block, all
// row blocks of one weight tile in a row (weight-major).
//
// Where weights are expanded (FP4 to E4M3, once for all row blocks of a unit), a panel is what a column block of L1 or L2 of
// a unit multiplies with. Panels are counted in the order in which they are multiplied; in front of the tasks that multiply
// panel p stand those that expand panel p + `expand_ahead`, and behind the pulls of group 0 those of the first ones:
//   expand(p) overwrites the slot of panel p - `expand_slots`, whose readers have lower tickets if slots > ahead.
//
// Progress: a task waits only for tasks with lower tickets of the same rank, or for what a peer publishes:
//   pull(u) overwrites ring 1 of unit u - R1, whose L1 belongs to a step before the one that pulls u if R1 >= 2 group;
//   L1(u) overwrites ring 2 of unit u - R2, whose L2 belongs to an earlier step if R2 >= lag + group.
// The legal minima (layout/workspace.h) are not below these.
#pragma once

#include "megamoe/common/types.h"
#include "megamoe/layout/workspace.h"
#include "megamoe/scheduler/task.h"

namespace megamoe {

struct ScheduleShape {
    u32 num_experts;     // local
    u32 l1_tiles;        // column blocks of L1
    u32 l2_tiles;        // column blocks of L2
    u32 publish_tasks;
    u32 combine_tasks;
    TileShape tile;
    // Not of the CPU, which reads weights as they are.
    u32 expand_parts;    // tasks that expand a panel, 0: none
    u32 expand_ahead;    // panels
    u32 expand_slots;    // panels that are kept
};

MEGAMOE_HOST_DEVICE ScheduleShape schedule_shape(const LayerShape& layer, u32 num_local_experts, u32 num_tokens,
                                                 const TileShape& tile) {
    ScheduleShape shape{};
    shape.num_experts = num_local_experts;
    shape.l1_tiles = ceil_div(layer.intermediate, tile.l1_columns);
    shape.l2_tiles = ceil_div(layer.hidden, tile.l2_columns);
    shape.publish_tasks = max_of(1u, ceil_div(num_tokens, tile.publish_rows));  // no token: the counts still go out
    shape.combine_tasks = ceil_div(num_tokens, tile.combine_rows);
    shape.tile = tile;
    return shape;
}

// Where the caller keeps the sums: num_experts + 1 numbers each (registers, shared memory or the heap). A table of the
// units is optional: with it a unit is looked up, without it its expert is searched.
struct ScheduleStorage {
    u32* rows;          // [num_experts] rows of an expert
    u32* first_unit;    // [num_experts + 1]
    u32* first_block;   // [num_experts + 1]
    u32* unit_block = nullptr;   // [units + 1] first row block of a unit
    u16* unit_expert = nullptr;  // [units]
};

// kExpands: whether there can be tasks that expand weights.
template <bool kExpands>
class BasicSchedule {
public:
    BasicSchedule() = default;

    // `storage.rows` is filled by the caller.
    MEGAMOE_HOST_DEVICE BasicSchedule(const ScheduleShape& shape, const ScheduleStorage& storage)
        : shape_(shape), storage_(storage) {
        u32 units = 0, blocks = 0;
        for (u32 expert = 0; expert < shape.num_experts; ++expert) {
            storage.first_unit[expert] = units;
            storage.first_block[expert] = blocks;
            const u32 expert_blocks = ceil_div(storage.rows[expert], shape.tile.block_rows);
            blocks += expert_blocks;
            units += ceil_div(expert_blocks, shape.tile.unit_blocks);
        }
        storage.first_unit[shape.num_experts] = units;
        storage.first_block[shape.num_experts] = blocks;
        count_steps();
    }

    // The same over sums that the caller has filled already, as threads do together.
    struct Filled {};
    MEGAMOE_HOST_DEVICE BasicSchedule(const ScheduleShape& shape, const ScheduleStorage& storage, Filled)
        : shape_(shape), storage_(storage) {
        count_steps();
    }

    MEGAMOE_HOST_DEVICE u32 num_units() const { return storage_.first_unit[shape_.num_experts]; }
    MEGAMOE_HOST_DEVICE u32 num_row_blocks() const { return storage_.first_block[shape_.num_experts]; }
    MEGAMOE_HOST_DEVICE u32 num_tickets() const {
        return shape_.publish_tasks + before_step(num_steps_) + shape_.combine_tasks;
    }

    // Tickets before publish_tasks need no schedule: publish_task() serves them.
    MEGAMOE_HOST_DEVICE static Task publish_task(u32 ticket) {
        Task task{};
        task.phase = Phase::publish;
        task.index = ticket;
        return task;
    }

    MEGAMOE_HOST_DEVICE Task task(u32 ticket) const {
        if (ticket < shape_.publish_tasks) return publish_task(ticket);
        u32 rest = ticket - shape_.publish_tasks;
        const u32 body = before_step(num_steps_);
        if (rest >= body) {
            Task task{};
            task.index = rest - body;
            task.phase = task.index < shape_.combine_tasks ? Phase::combine : Phase::end;
            if (task.phase == Phase::combine) wait_for(task, Counter::tags, task.index, 1);
            return task;
        }
        if (rest < prologue_) return prologue_task(rest);
        u32 low = 0, high = num_steps_;  // the last step that begins at or before `rest`
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (before_step(middle) <= rest) low = middle; else high = middle;
        }
        return task_of_step(low, rest - before_step(low));
    }

    // Where a worker is: its tickets rise, so the step of the next one is at or behind the last one's.
    struct Cursor {
        u32 step = 0;
        u32 begin = 0;  // tickets of the body before the step, and before the next
        u32 end = 0;
    };
    MEGAMOE_HOST_DEVICE Task task(u32 ticket, Cursor& cursor) const {
        if (ticket < shape_.publish_tasks) return publish_task(ticket);
        const u32 rest = ticket - shape_.publish_tasks;
        if (rest < prologue_) return prologue_task(rest);
        if (cursor.end == 0) {
            cursor.begin = prologue_;
            cursor.end = num_steps_ == 0 ? 0 : before_step(1);
        }
        while (rest >= cursor.end && cursor.step + 1 < num_steps_) {
            ++cursor.step;
            cursor.begin = cursor.end;
            cursor.end = before_step(cursor.step + 1);
        }
        if (rest >= cursor.end) return task(ticket);  // combine or the end
        return task_of_step(cursor.step, rest - cursor.begin);
    }

    MEGAMOE_HOST_DEVICE u32 blocks_of_unit(u32 unit) const { return blocks_before(unit + 1) - blocks_before(unit); }

private:
    MEGAMOE_HOST_DEVICE void count_steps() {
        const u32 units = num_units();
        num_steps_ = units == 0 ? 0 : ceil_div(units + shape_.tile.lag, shape_.tile.group);
        prologue_ = pulls_before(shape_.tile.group) + first_expands();
    }

    MEGAMOE_HOST_DEVICE Task prologue_task(u32 rest) const {
        const u32 pulls = pulls_before(shape_.tile.group);
        if (!kExpands || rest < pulls) return pull_task(0, rest);
        rest -= pulls;
        return expand_task(0, rest / parts(), rest % parts());
    }

    MEGAMOE_HOST_DEVICE Task task_of_step(u32 step, u32 rest) const {
        const u32 group = shape_.tile.group;
        const u32 unit = step * group;
        const u32 pulls = pulls_before(unit + 2 * group) - pulls_before(unit + group);
        if (rest < pulls) return pull_task(unit + group, rest);
        rest -= pulls;
        const u32 parts = this->parts(), panel = panels_before(step);
        const u32 l1_panels = kExpands ? (units_before(unit + group) - units_before(unit)) * shape_.l1_tiles : 0;
        const u32 l1 = (blocks_before(unit + group) - blocks_before(unit)) * shape_.l1_tiles + l1_panels * parts;
        if (rest < l1) return tile_task(Phase::l1, step, unit, rest, panel);
        rest -= l1;
        return tile_task(Phase::l2, step, behind(unit), rest, panel + l1_panels);
    }

    MEGAMOE_HOST_DEVICE u32 behind(u32 unit) const { return unit > shape_.tile.lag ? unit - shape_.tile.lag : 0; }

    // The expert of a unit: the last one whose first unit is not above it and that has units at all.
    MEGAMOE_HOST_DEVICE u32 expert_of_unit(u32 unit) const {
        return storage_.unit_expert ? storage_.unit_expert[unit] : last_not_above(storage_.first_unit, unit);
    }
    MEGAMOE_HOST_DEVICE u32 last_not_above(const u32* sums, u32 value) const {
        u32 low = 0, high = shape_.num_experts;
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (sums[middle] <= value) low = middle; else high = middle;
        }
        return low;
    }

    // Row blocks of all units before `unit` (beyond the last unit: all).
    MEGAMOE_HOST_DEVICE u32 blocks_before(u32 unit) const {
        if (unit >= num_units()) return num_row_blocks();
        if (storage_.unit_block) return storage_.unit_block[unit];
        const u32 expert = expert_of_unit(unit);
        return storage_.first_block[expert] + (unit - storage_.first_unit[expert]) * shape_.tile.unit_blocks;
    }
    MEGAMOE_HOST_DEVICE u32 pulls_before(u32 unit) const {
        return num_units() == 0 ? 0 : blocks_before(unit) * shape_.tile.pulls_per_block;
    }
    MEGAMOE_HOST_DEVICE u32 before_step(u32 step) const {
        if (step == 0 || num_steps_ == 0) return num_steps_ == 0 ? 0 : prologue_;
        const u32 unit = step * shape_.tile.group;
        return pulls_before(unit + shape_.tile.group) + blocks_before(unit) * shape_.l1_tiles +
               blocks_before(behind(unit)) * shape_.l2_tiles + first_expands() + panels_before(step) * parts();
    }

    MEGAMOE_HOST_DEVICE u32 parts() const { return kExpands ? shape_.expand_parts : 0; }
    // Panels, in the order in which they are multiplied.
    MEGAMOE_HOST_DEVICE u32 units_before(u32 unit) const { return min_of(unit, num_units()); }
    MEGAMOE_HOST_DEVICE u32 panels_before(u32 step) const {
        if (!kExpands) return 0;
        const u32 unit = step * shape_.tile.group;
        return units_before(unit) * shape_.l1_tiles + units_before(behind(unit)) * shape_.l2_tiles;
    }
    MEGAMOE_HOST_DEVICE u32 num_panels() const { return num_units() * (shape_.l1_tiles + shape_.l2_tiles); }
    MEGAMOE_HOST_DEVICE u32 first_expands() const { return min_of(shape_.expand_ahead, num_panels()) * parts(); }

    // No index that is not known when compiled: the GPU would keep the task in local memory.
    MEGAMOE_HOST_DEVICE static void append(Wait (&all)[3], u32& count, const Wait& one) {
        for (u32 i = 0; i < 3; ++i)
            if (i == count) all[i] = one;
        ++count;
    }
    MEGAMOE_HOST_DEVICE static void wait_for(Task& task, Counter counter, u32 index, u32 target) {
        append(task.waits, task.num_waits, Wait{counter, index, target});
    }
    MEGAMOE_HOST_DEVICE static void signal(Task& task, Counter counter, u32 index, u32 value = 1) {
        append(task.signals, task.num_signals, Wait{counter, index, value});
    }

    MEGAMOE_HOST_DEVICE Task block_task(Phase phase, u32 unit, u32 block_in_unit, u32 index) const {
        Task task{};
        task.phase = phase;
        task.index = index;
        task.unit = unit;
        task.block_in_unit = block_in_unit;
        task.expert = expert_of_unit(unit);
        task.row_block = blocks_before(unit) + block_in_unit;
        task.first_row = (task.row_block - storage_.first_block[task.expert]) * shape_.tile.block_rows;
        task.num_rows = min_of(shape_.tile.block_rows, storage_.rows[task.expert] - task.first_row);
        return task;
    }

    // The n-th task of a phase from `unit` on, whose panels begin at `panel`: weight-major within a unit, the tasks that
    // expand a later panel in front of those that multiply one.
    MEGAMOE_HOST_DEVICE Task tile_task(Phase phase, u32 step, u32 unit, u32 n, u32 panel) const {
        const u32 tiles = phase == Phase::l1 ? shape_.l1_tiles : shape_.l2_tiles, parts = this->parts();
        u32 blocks = blocks_of_unit(unit);
        while (n >= (blocks + parts) * tiles) {
            n -= (blocks + parts) * tiles;
            panel += tiles;
            blocks = blocks_of_unit(++unit);
        }
        const u32 index = n / (blocks + parts), within = n % (blocks + parts);
        panel += index;
        if (kExpands && within < parts) return expand_task(step, panel + shape_.expand_ahead, within);
        Task task = block_task(phase, unit, within - parts, index);
        if (phase == Phase::l1) add_l1(task); else add_l2(task);
        if (kExpands && parts != 0) {
            task.panel = panel % shape_.expand_slots;
            task.uses = kPanelUses / blocks;
            wait_for(task, Counter::expanded, task.panel, (panel / shape_.expand_slots + 1) * parts);
            signal(task, Counter::panel_used, task.panel, task.uses);
        }
        return task;
    }

    // A part of a panel, which belongs to `step` or a later one; beyond the last panel there is nothing to do.
    MEGAMOE_HOST_DEVICE Task expand_task(u32 step, u32 panel, u32 part) const {
        Task task{};
        task.phase = Phase::expand;
        task.part = part;
        if (panel >= num_panels()) {
            task.weights = Phase::end;
            return task;
        }
        while (panels_before(step + 1) <= panel) ++step;
        const u32 group = shape_.tile.group;
        u32 unit = step * group, rest = panel - panels_before(step), tiles = shape_.l1_tiles;
        const u32 l1_panels = (units_before(unit + group) - units_before(unit)) * tiles;
        task.weights = Phase::l1;
        if (rest >= l1_panels) {
            rest -= l1_panels;
            unit = behind(unit);
            tiles = shape_.l2_tiles;
            task.weights = Phase::l2;
        }
        task.unit = unit + rest / tiles;
        task.index = rest % tiles;
        task.expert = expert_of_unit(task.unit);
        task.panel = panel % shape_.expand_slots;
        const u32 round = panel / shape_.expand_slots;
        if (round != 0) wait_for(task, Counter::panel_used, task.panel, round * kPanelUses);
        signal(task, Counter::expanded, task.panel);
        return task;
    }

    // The n-th pull from `unit` on.
    MEGAMOE_HOST_DEVICE Task pull_task(u32 unit, u32 n) const {
        const u32 pulls = shape_.tile.pulls_per_block;
        u32 all = blocks_of_unit(unit) * pulls;
        while (n >= all) {
            n -= all;
            all = blocks_of_unit(++unit) * pulls;
        }
        Task task = block_task(Phase::pull, unit, n / pulls, n % pulls);
        wait_for(task, Counter::peers, 0, 1);
        if (task.unit >= shape_.tile.ring1_units) {
            const u32 before = task.unit - shape_.tile.ring1_units;
            wait_for(task, Counter::unit_l1_done, before, blocks_of_unit(before) * shape_.l1_tiles);
        }
        signal(task, Counter::arrived, task.row_block);
        return task;
    }

    MEGAMOE_HOST_DEVICE void add_l1(Task& task) const {
        wait_for(task, Counter::arrived, task.row_block, shape_.tile.pulls_per_block);
        if (task.unit >= shape_.tile.ring2_units) {
            const u32 before = task.unit - shape_.tile.ring2_units;
            wait_for(task, Counter::unit_l2_done, before, blocks_of_unit(before) * shape_.l2_tiles);
        }
        signal(task, Counter::l1_done, task.row_block);
        signal(task, Counter::unit_l1_done, task.unit);
    }

    MEGAMOE_HOST_DEVICE void add_l2(Task& task) const {
        wait_for(task, Counter::l1_done, task.row_block, shape_.l1_tiles);
        signal(task, Counter::l2_done, task.row_block);
        signal(task, Counter::unit_l2_done, task.unit);
    }

    ScheduleShape shape_{};
    ScheduleStorage storage_{};
    u32 num_steps_ = 0;
    u32 prologue_ = 0;
};

using Schedule = BasicSchedule<true>;

}  // namespace megamoe
