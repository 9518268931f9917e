// The tasks themselves: publish, pull, L1, L2, combine.
#include <cstring>

#include "engine.h"
#include "megamoe/common/codes.h"

namespace megamoe::host {

i32 Engine::id_at(u64 index) const {
    if (current_->call.id_bytes == 4) return static_cast<const i32*>(current_->call.ids)[index];
    const long long id = static_cast<const long long*>(current_->call.ids)[index];
    return id < 0 ? -1 : id > 0x7fffffff ? 0x7fffffff : static_cast<i32>(id);
}

void Engine::publish(const Task& task) {
    const Generation& g = *current_;
    const Layer& layer = *g.layer;
    const u32 hidden = layer.shape.hidden;
    const u32 first = task.index * layer.tile.publish_rows;
    const u32 last = min_of(g.call.num_tokens, first + layer.tile.publish_rows);
    const u64 base = bases_[rank_];
    std::vector<float> wide(layer.quantized() && layer.config.input == Scalar::bf16 ? hidden : 0);
    for (u32 token = first; token < last; ++token) {
        u8* to = pointer_at<u8>(base + g.data.input.address + static_cast<u64>(token) * layer.shape.input_row_bytes);
        const u64 offset = static_cast<u64>(token) * hidden;
        if (!layer.quantized()) {
            const u64 element = layer.config.input == Scalar::bf16 ? 2 : 4;
            std::memcpy(to, static_cast<const u8*>(g.call.x) + offset * element, hidden * element);
            continue;
        }
        const float* row = static_cast<const float*>(g.call.x) + offset;
        if (layer.config.input == Scalar::bf16) {
            isa_->bf16_to_float(static_cast<const u16*>(g.call.x) + offset, hidden, wide.data());
            row = wide.data();
        }
        float* scales = pointer_at<float>(base + g.data.scales.address +
                                          static_cast<u64>(token) * layer.shape.scale_row_bytes);
        const u32 width = layer.config.act_scale == ActScale::token ? hidden : kBlock128;
        for (u32 column = 0, block = 0; column < hidden; column += width, ++block) {
            const u32 n = min_of(width, hidden - column);
            const float scale = e4m3_scale(isa_->amax(row + column, n));
            scales[block] = scale;
            isa_->quantize_e4m3(row + column, n, 1.0f / scale, to + column);
        }
    }
    auto arrived = word_at<u32>(base + offsets_.published.address);
    const u32 done = arrived.fetch_add(1, acquire_release_of(Edge::publish_arrive)) + 1;
    if (done == g.shape.publish_tasks) publish_lists();
}

void Engine::publish_lists() {
    const Generation& g = *current_;
    const Layer& layer = *g.layer;
    const u32 num_experts = layer.shape.num_experts, local = layer.num_local_experts, top_k = layer.shape.top_k;
    const u64 num_slots = static_cast<u64>(g.call.num_tokens) * top_k;
    list_offsets_.assign(num_experts + 2, 0);
    u32* offsets = list_offsets_.data();
    u32 num_bad_ids = 0;
    for (u64 slot = 0; slot < num_slots; ++slot) {
        const i32 id = id_at(slot);
        if (id >= 0 && static_cast<u32>(id) < num_experts) ++offsets[id + 2];
        else num_bad_ids += id >= 0 ? 1 : 0;
    }
    for (u32 expert = 0; expert < num_experts; ++expert) offsets[expert + 2] += offsets[expert + 1];
    ListEntry* list = pointer_at<ListEntry>(bases_[rank_] + offsets_.list(g.bank, limits_));
    for (u64 slot = 0; slot < num_slots; ++slot) {  // afterwards offsets[e] is where the entries of e begin
        const i32 id = id_at(slot);
        if (id < 0 || static_cast<u32>(id) >= num_experts) continue;
        list[offsets[id + 1]++] = ListEntry{static_cast<u32>(slot), g.call.weights[slot]};
    }
    for (u32 step = 0; step < limits_.num_ranks; ++step) {
        const u32 owner = (rank_ + step) % limits_.num_ranks;
        ExpertCount* counts = pointer_at<ExpertCount>(bases_[owner] + offsets_.count_row(g.bank, rank_, limits_));
        for (u32 expert = 0; expert < local; ++expert) {
            const u32 first = offsets[owner * local + expert];
            counts[expert] = ExpertCount{offsets[owner * local + expert + 1] - first, first};
        }
        const u64 address = bases_[owner] + offsets_.header(g.bank, rank_, limits_.num_ranks);
        CountHeader& header = *pointer_at<CountHeader>(address);
        header.shape_hash = layer.hash;
        header.num_tokens = g.call.num_tokens;
        header.total_tokens = g.total_tokens;
        header.num_chunks = g.num_chunks;
        header.num_bad_ids = num_bad_ids;
        header.shape[0] = layer.shape.hidden;
        header.shape[1] = layer.shape.intermediate;
        header.shape[2] = num_experts;
        header.shape[3] = top_k;
        header.shape[4] = static_cast<u32>(layer.config.format);
        // Pairs with the acquire in build_schedule() of every worker of the owner.
        word_at<u64>(address + __builtin_offsetof(CountHeader, flag))
            .store(control_word(g.number, kPublished), release_of(Edge::publish));
    }
}

bool Engine::build_schedule(Worker& worker) {
    const Generation& g = *current_;
    const u32 local = g.layer->num_local_experts;
    worker.rows.assign(local, 0);
    worker.first_unit.assign(local + 1, 0);
    worker.first_block.assign(local + 1, 0);
    for (u32 source = 0; source < limits_.num_ranks; ++source) {
        const u64 address = bases_[rank_] + offsets_.header(g.bank, source, limits_.num_ranks);
        const u64 flag = address + __builtin_offsetof(CountHeader, flag);
        if (!wait_word(flag, control_word(g.number, kPublished), Phase::publish, source)) return false;
        const CountHeader& header = *pointer_at<CountHeader>(address);
        if (header.shape_hash != g.layer->hash) {
            if (fail(Status::shape_mismatch, Phase::publish, source, header.shape_hash, g.layer->hash)) {
                std::memcpy(outcome_.seen_shape, header.shape, sizeof(header.shape));
            }
            return false;
        }
        const ExpertCount* counts = pointer_at<ExpertCount>(bases_[rank_] + offsets_.count_row(g.bank, source, limits_));
        for (u32 expert = 0; expert < local; ++expert) worker.rows[expert] += counts[expert].rows;
    }
    worker.schedule = Schedule(
        g.shape, ScheduleStorage{worker.rows.data(), worker.first_unit.data(), worker.first_block.data()});
    worker.has_schedule = true;
    return true;
}

u64 Engine::ring1_row(const Task& task) const {
    const u64 row = static_cast<u64>(task.unit % current_->layer->tile.ring1_units) * current_->data.unit_rows +
                    task.block_in_unit * current_->layer->tile.block_rows;
    return bases_[rank_] + current_->data.ring1.address + row * current_->layer->shape.ring1_row_bytes;
}

u64 Engine::ring2_row(const Task& task) const {
    const u64 row = static_cast<u64>(task.unit % current_->layer->tile.ring2_units) * current_->data.unit_rows +
                    task.block_in_unit * current_->layer->tile.block_rows;
    return bases_[rank_] + current_->data.ring2.address + row * current_->layer->shape.ring2_row_bytes;
}

// Meta lives from the pull to the tags: longer than a row in either ring, never longer than in both together.
RowMeta* Engine::meta_rows(const Task& task) const {
    const TileShape& tile = current_->layer->tile;
    const u64 row = static_cast<u64>(task.unit % (tile.ring1_units + tile.ring2_units)) * current_->data.unit_rows +
                    task.block_in_unit * tile.block_rows;
    return pointer_at<RowMeta>(bases_[rank_] + current_->data.meta.address) + row;
}

void Engine::pull(const Task& task) {
    const Generation& g = *current_;
    const Layer& layer = *g.layer;
    const u32 hidden = layer.shape.hidden;
    const u32 padded = layer.w13.groups() * kGroupDepth;
    RowMeta* meta = meta_rows(task);
    float* ring = pointer_at<float>(ring1_row(task));
    const u32 part = ceil_div(layer.tile.block_rows, layer.tile.pulls_per_block);
    const u32 begin = min_of(task.num_rows, task.index * part), end = min_of(task.num_rows, begin + part);
    u32 source = 0, before = 0;  // rows of sources before this one
    for (u32 i = begin; i < end; ++i) {
        const u32 row = task.first_row + i;
        const ExpertCount* counts = pointer_at<ExpertCount>(bases_[rank_] + offsets_.count_row(g.bank, source, limits_));
        while (row >= before + counts[task.expert].rows) {
            before += counts[task.expert].rows;
            counts = pointer_at<ExpertCount>(bases_[rank_] + offsets_.count_row(g.bank, ++source, limits_));
        }
        const u32 entry = counts[task.expert].first + row - before;
        const u64 base = bases_[source];
        const ListEntry item = pointer_at<ListEntry>(base + offsets_.list(g.bank, limits_))[entry];
        meta[i] = RowMeta{source, item.slot, item.weight, 0};
        const u64 token = item.slot / layer.shape.top_k;
        const u8* from = pointer_at<u8>(base + g.data.input.address + token * layer.shape.input_row_bytes);
        float* to = ring + i * layer.ring1_stride();
        if (layer.quantized()) {
            const float* scales = pointer_at<float>(base + g.data.scales.address + token * layer.shape.scale_row_bytes);
            const u32 width = layer.config.act_scale == ActScale::token ? hidden : kBlock128;
            for (u32 column = 0, block = 0; column < hidden; column += width, ++block) {
                isa_->dequantize_e4m3(from + column, min_of(width, hidden - column), scales[block], to + column);
            }
        } else if (layer.config.input == Scalar::bf16) {
            isa_->bf16_to_float(reinterpret_cast<const u16*>(from), hidden, to);
        } else {
            std::memcpy(to, from, hidden * sizeof(float));
        }
        for (u32 column = hidden; column < padded; ++column) to[column] = 0.0f;
    }
}

namespace {

// Scales of a tile: MXFP4 has them per tile, fp8_block per 128 weight rows of a part.
const u8* tile_scales(const PackedShape& shape, const u8* scales, u32 part, u32 tile) {
    if (shape.format == WeightFormat::mxfp4) {
        return scales + (static_cast<u64>(part) * shape.tiles() + tile) * shape.groups() * kTileColumns;
    }
    if (shape.format == WeightFormat::fp8_block) {
        const u64 row = static_cast<u64>(part) * ceil_div(shape.part_rows, kBlock128) + tile * kTileColumns / kBlock128;
        return scales + row * ceil_div(shape.depth, kBlock128) * sizeof(float);
    }
    return nullptr;
}

void load_bias(const float* bias, u32 first, u32 limit, u32 n, float* out) {
    for (u32 i = 0; i < n; ++i) out[i] = bias != nullptr && first + i < limit ? bias[first + i] : 0.0f;
}

}  // namespace

void Engine::l1(Worker& worker, const Task& task) {
    const Layer& layer = *current_->layer;
    const LayerConfig& config = layer.config;
    const PackedShape& shape = layer.w13;
    const u32 width = layer.tile.l1_columns;
    const u32 first_tile = task.index * width / kTileColumns;
    const u32 num_tiles = min_of(width / kTileColumns, shape.tiles() - first_tile);
    const u32 columns = num_tiles * kTileColumns;
    const u64 buffer = static_cast<u64>(layer.tile.block_rows) * width;
    if (worker.gate.size() < buffer) worker.gate.resize(buffer);
    if (worker.up.size() < buffer) worker.up.resize(buffer);
    if (worker.bias.size() < 2u * width) worker.bias.resize(2u * width);

    const u8* codes = current_->experts->w13 + task.expert * shape.code_bytes();
    const u8* scales = current_->experts->w13_scale + task.expert * shape.scale_bytes();
    for (u32 part = 0; part < 2; ++part) {
        float* out = part == 0 ? worker.gate.data() : worker.up.data();
        for (u32 i = 0; i < num_tiles; ++i) {
            const u32 tile = first_tile + i;
            const u8* tile_codes = codes + (static_cast<u64>(part) * shape.tiles() + tile) * shape.tile_bytes();
            isa_->tile[static_cast<u32>(config.format)](
                TileArguments{pointer_at<float>(ring1_row(task)), layer.ring1_stride(), task.num_rows, shape.groups(),
                              tile_codes, tile_scales(shape, scales, part, tile), out + i * kTileColumns, width});
        }
        if (config.bias) {
            float* bias = worker.bias.data() + part * width;
            const u64 first = (static_cast<u64>(task.expert) * 2 + part) * config.intermediate;
            load_bias(current_->experts->b13 + first, task.index * width, config.intermediate, columns, bias);
            for (u32 row = 0; row < task.num_rows; ++row) isa_->add_float(out + row * width, bias, columns);
        }
    }
    using Round = ActivationArguments::Round;
    const Round round = layer.quantized() ? Round::e4m3 : config.format == WeightFormat::bf16 ? Round::bf16 : Round::none;
    const RowMeta* meta = meta_rows(task);
    for (u32 row = 0; row < task.num_rows; ++row) {
        float* h = pointer_at<float>(ring2_row(task)) + row * layer.ring2_stride() + task.index * width;
        isa_->activate(ActivationArguments{worker.gate.data() + row * width, worker.up.data() + row * width, h, columns,
                                           config.activation, config.has_limit, config.limit, config.alpha,
                                           meta[row].weight, config.weight_before, round});
    }
}

void Engine::l2(Worker& worker, const Task& task) {
    const Layer& layer = *current_->layer;
    const LayerConfig& config = layer.config;
    const PackedShape& shape = layer.w2;
    const u32 width = layer.tile.l2_columns;
    const u32 first_tile = task.index * width / kTileColumns;
    const u32 num_tiles = min_of(width / kTileColumns, shape.tiles() - first_tile);
    const u32 columns = num_tiles * kTileColumns;
    const u32 valid = min_of(columns, config.hidden - task.index * width);
    const u64 buffer = static_cast<u64>(layer.tile.block_rows) * width;
    if (worker.gate.size() < buffer) worker.gate.resize(buffer);
    if (worker.bias.size() < width) worker.bias.resize(width);

    const u8* codes = current_->experts->w2 + task.expert * shape.code_bytes();
    const u8* scales = current_->experts->w2_scale + task.expert * shape.scale_bytes();
    for (u32 i = 0; i < num_tiles; ++i) {
        const u32 tile = first_tile + i;
        isa_->tile[static_cast<u32>(config.format)](
            TileArguments{pointer_at<float>(ring2_row(task)), layer.ring2_stride(), task.num_rows, shape.groups(),
                          codes + tile * shape.tile_bytes(), tile_scales(shape, scales, 0, tile),
                          worker.gate.data() + i * kTileColumns, width});
    }
    const float* b2 = config.bias ? current_->experts->b2 + static_cast<u64>(task.expert) * config.hidden : nullptr;
    load_bias(b2, task.index * width, config.hidden, columns, worker.bias.data());
    const RowMeta* meta = meta_rows(task);
    for (u32 row = 0; row < task.num_rows; ++row) {
        float* values = worker.gate.data() + row * width;
        const RowMeta item = meta[row];
        const float factor = config.weight_before && !config.bias ? 0.0f : item.weight;
        isa_->scale_row(values, worker.bias.data(), columns, factor, config.weight_before, values);
        const u32 token = item.slot / layer.shape.top_k, k = item.slot % layer.shape.top_k;
        const u64 slot = bases_[item.source] + current_->data.slot_row(token, k, limits_.max_tokens, layer.shape);
        if (layer.shape.slot_bytes == 2) {
            isa_->float_to_bf16(values, valid, pointer_at<u16>(slot) + task.index * width);
        } else {
            std::memcpy(pointer_at<float>(slot) + task.index * width, values, valid * sizeof(float));
        }
    }
}

void Engine::tag_block(const Task& task) {
    const RowMeta* meta = meta_rows(task);
    const u64 word = control_word(current_->number, kSlotReady);
    for (u32 row = 0; row < task.num_rows; ++row) {
        // Pairs with the acquire in combine() on the source rank.
        word_at<u64>(bases_[meta[row].source] + offsets_.tags.address + meta[row].slot * sizeof(u64))
            .store(word, release_of(Edge::tag));
    }
}

bool Engine::combine(Worker& worker, const Task& task) {
    const Generation& g = *current_;
    const Layer& layer = *g.layer;
    const u32 hidden = layer.shape.hidden, top_k = layer.shape.top_k;
    const u32 first = task.index * layer.tile.combine_rows;
    const u32 last = min_of(g.call.num_tokens, first + layer.tile.combine_rows);
    const u64 word = control_word(g.number, kSlotReady);
    if (worker.sum.size() < hidden) worker.sum.resize(hidden);
    float* sum = worker.sum.data();
    for (u32 token = first; token < last; ++token) {
        for (u32 column = 0; column < hidden; ++column) sum[column] = 0.0f;
        for (u32 k = 0; k < top_k; ++k) {
            const u64 slot = static_cast<u64>(token) * top_k + k;
            const i32 id = id_at(slot);
            if (id < 0 || static_cast<u32>(id) >= layer.shape.num_experts) continue;
            const u64 tag = bases_[rank_] + offsets_.tags.address + slot * sizeof(u64);
            if (!wait_word(tag, word, Phase::combine, static_cast<u32>(id) / layer.num_local_experts)) return false;
            const u64 row = bases_[rank_] + g.data.slot_row(token, k, limits_.max_tokens, layer.shape);
            if (layer.shape.slot_bytes == 2) isa_->add_bf16(sum, pointer_at<u16>(row), hidden);
            else isa_->add_float(sum, pointer_at<float>(row), hidden);
        }
        const u64 offset = static_cast<u64>(token) * hidden;
        if (layer.config.input == Scalar::bf16) isa_->float_to_bf16(sum, hidden, static_cast<u16*>(g.call.out) + offset);
        else std::memcpy(static_cast<float*>(g.call.out) + offset, sum, hidden * sizeof(float));
    }
    return true;
}

}  // namespace megamoe::host
