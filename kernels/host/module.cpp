// megamoe._host: layout, schedule, codes and the engine for Python. Tensors come as addresses and sizes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>

#include "engine.h"
#include "megamoe/common/codes.h"
#include "megamoe/layout/offsets.h"
#include "pack.h"

namespace py = pybind11;
using namespace megamoe;
using namespace megamoe::host;

namespace {

py::dict regions(const WorkspaceLimits& limits, const Layer& layer) {
    py::dict result;
    const ControlLayout control(0, limits);
    const DataLayout data(control.end, limits, layer.shape, layer.tile);
    const auto put = [&](const char* name, const Region& region) {
        result[name] = py::make_tuple(region.address, region.bytes);
    };
    put("generation", control.generation);
    put("ticket", control.ticket);
    put("published", control.published);
    put("exited", control.exited);
    put("aborts", control.aborts);
    put("headers", control.headers);
    put("counts", control.counts);
    put("tags", control.tags);
    put("arrived", control.arrived);
    put("l1_done", control.l1_done);
    put("l2_done", control.l2_done);
    put("unit_l1_done", control.unit_l1_done);
    put("unit_l2_done", control.unit_l2_done);
    put("lists", control.lists);
    put("input", data.input);
    put("scales", data.scales);
    put("ring1", data.ring1);
    put("ring2", data.ring2);
    put("meta", data.meta);
    put("slots", data.slots);
    return result;
}

u64 workspace_bytes(const WorkspaceLimits& limits, const Layer& layer) {
    return DataLayout(ControlLayout(0, limits).end, limits, layer.shape, layer.tile).end;
}

// Limits, shape and tile as plain numbers, for callers that run another engine over the same layout: as the structs of
// layout/workspace.h list them.
using LimitNumbers = std::array<u32, 6>;
using ShapeNumbers = std::array<u32, 9>;
using TileNumbers = std::array<u32, 11>;
WorkspaceLimits to_limits(const LimitNumbers& l) { return {l[0], l[1], l[2], l[3], l[4], l[5]}; }
LayerShape to_shape(const ShapeNumbers& s) { return {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8]}; }
TileShape to_tile(const TileNumbers& t) { return {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10]}; }

// Sizes of a workspace.
py::dict layout_from_numbers(const LimitNumbers& limits, const ShapeNumbers& shape, const TileNumbers& tile) {
    const ControlLayout control(0, to_limits(limits));
    const Offsets at = workspace_offsets(to_limits(limits), to_shape(shape), to_tile(tile));
    py::dict result;
    result["control_bytes"] = control.end;
    result["aborts"] = at.aborts;
    result["generation"] = at.generation;
    result["input"] = at.input;
    result["scales"] = at.scales;
    result["ring1"] = at.ring1;
    result["ring2"] = at.ring2;
    result["unit_rows"] = at.unit_rows;
    result["bytes"] = DataLayout(control.end, to_limits(limits), to_shape(shape), to_tile(tile)).end;
    return result;
}

// Where its parts begin: the bytes of an Offsets.
py::bytes offsets_from_numbers(const LimitNumbers& limits, const ShapeNumbers& shape, const TileNumbers& tile) {
    const Offsets at = workspace_offsets(to_limits(limits), to_shape(shape), to_tile(tile));
    return py::bytes(reinterpret_cast<const char*>(&at), sizeof(at));
}

// A schedule with its own memory.
class OwnedSchedule {
public:
    OwnedSchedule(const std::vector<u32>& rows, u32 l1_tiles, u32 l2_tiles, u32 publish_tasks, u32 combine_tasks,
                  const TileShape& tile, u32 num_workers, u32 expand_parts, u32 expand_ahead, u32 expand_slots)
        : rows_(rows), first_unit_(rows.size() + 1), first_block_(rows.size() + 1) {
        if (tile.ring1_units < min_ring1_units(tile.group)) throw std::invalid_argument("ring1_units: below the minimum");
        if (tile.ring2_units < min_ring2_units(tile.lag, tile.group, num_workers, l1_tiles)) {
            throw std::invalid_argument("ring2_units: below the minimum");
        }
        if (expand_parts != 0) {
            if (expand_slots <= expand_ahead) throw std::invalid_argument("expand_slots: at least one more than expand_ahead");
            if (tile.unit_blocks > kMaxExpandedBlocks) throw std::invalid_argument("unit_blocks: at most 16 where weights are expanded");
        }
        const ScheduleShape shape{static_cast<u32>(rows.size()), l1_tiles,     l2_tiles,     publish_tasks, combine_tasks, tile,
                                  expand_parts,                  expand_ahead, expand_slots};
        schedule_ = Schedule(shape, ScheduleStorage{rows_.data(), first_unit_.data(), first_block_.data()});
        for (u32 unit = 0; unit < schedule_.num_units(); ++unit) {
            const u32 expert = static_cast<u32>(std::upper_bound(first_unit_.begin(), first_unit_.end() - 1, unit) -
                                                first_unit_.begin()) - 1;
            unit_expert_.push_back(static_cast<u16>(expert));
            unit_block_.push_back(first_block_[expert] + (unit - first_unit_[expert]) * tile.unit_blocks);
        }
        unit_block_.push_back(schedule_.num_row_blocks());
        looked_up_ = Schedule(shape, ScheduleStorage{rows_.data(), first_unit_.data(), first_block_.data(),
                                                     unit_block_.data(), unit_expert_.data()},
                              Schedule::Filled{});
    }
    // The tasks of a worker that gets every stride-th ticket, the way the GPU finds them: with a table of the units and a
    // cursor.
    std::vector<Task> walk(u32 first, u32 stride) const {
        std::vector<Task> tasks;
        Schedule::Cursor cursor;
        for (u32 ticket = first; ticket < schedule_.num_tickets(); ticket += stride) {
            tasks.push_back(looked_up_.task(ticket, cursor));
        }
        tasks.push_back(looked_up_.task(schedule_.num_tickets() + first, cursor));
        return tasks;
    }
    OwnedSchedule(const OwnedSchedule&) = delete;
    OwnedSchedule& operator=(const OwnedSchedule&) = delete;
    const Schedule& get() const { return schedule_; }

private:
    std::vector<u32> rows_, first_unit_, first_block_, unit_block_;
    std::vector<u16> unit_expert_;
    Schedule schedule_, looked_up_;
};

py::tuple wait_tuple(const Wait& wait) { return py::make_tuple(static_cast<u32>(wait.counter), wait.index, wait.target); }

py::dict task_dict(const Task& t) {
    py::dict d;
    d["phase"] = static_cast<u32>(t.phase);
    d["index"] = t.index;
    d["expert"] = t.expert;
    d["unit"] = t.unit;
    d["row_block"] = t.row_block;
    d["block_in_unit"] = t.block_in_unit;
    d["first_row"] = t.first_row;
    d["num_rows"] = t.num_rows;
    d["weights"] = static_cast<u32>(t.weights);
    d["panel"] = t.panel;
    d["part"] = t.part;
    py::list waits, signals;
    for (u32 i = 0; i < t.num_waits; ++i) waits.append(wait_tuple(t.waits[i]));
    for (u32 i = 0; i < t.num_signals; ++i) signals.append(wait_tuple(t.signals[i]));
    d["waits"] = waits;
    d["signals"] = signals;
    return d;
}

PackJob pack_job(const PackedShape& shape, u32 num, u64 codes, u64 scales, u64 out_codes, u64 out_scales) {
    return PackJob{shape, num, pointer_at<u8>(codes), pointer_at<u8>(scales), pointer_at<u8>(out_codes),
                   pointer_at<u8>(out_scales)};
}

const Isa* isa_by_name(const std::string& name) {
    const Isa* isa = find_isa(name.c_str());
    if (isa == nullptr) throw std::invalid_argument("isa: " + name + " cannot run on this CPU");
    return isa;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
    m.doc() = "Host engine of megamoe: layout, schedule, packed weights and worker threads.";
    m.attr("PACKED_LAYOUT") = "cpu";
    m.attr("PACKED_VERSION") = kPackedVersion;
    m.attr("PHASES") = py::make_tuple("publish", "pull", "l1", "l2", "combine", "end", "expand");
    m.attr("PANEL_USES") = kPanelUses;
    m.attr("COUNTERS") =
        py::make_tuple("none", "peers", "arrived", "l1_done", "l2_done", "unit_l1_done", "unit_l2_done", "tags",
                       "expanded", "panel_used");
    m.attr("STATUSES") = py::make_tuple("ok", "timeout", "aborted", "shape_mismatch", "overflow", "bad_ids", "gone",
                                        "interrupted");

    py::enum_<WeightFormat>(m, "WeightFormat")
        .value("fp32", WeightFormat::fp32)
        .value("bf16", WeightFormat::bf16)
        .value("fp8_block", WeightFormat::fp8_block)
        .value("mxfp4", WeightFormat::mxfp4);
    py::enum_<ActScale>(m, "ActScale")
        .value("none", ActScale::none)
        .value("token", ActScale::token)
        .value("block128", ActScale::block128);
    py::enum_<Activation>(m, "Activation")
        .value("silu", Activation::silu)
        .value("swiglu_clamp", Activation::swiglu_clamp)
        .value("swiglu_oai", Activation::swiglu_oai);
    py::enum_<Scalar>(m, "Scalar").value("fp32", Scalar::fp32).value("bf16", Scalar::bf16);

    py::class_<TileShape>(m, "TileShape")
        .def(py::init([] { return kCpuTile; }))
        .def_readwrite("block_rows", &TileShape::block_rows)
        .def_readwrite("unit_blocks", &TileShape::unit_blocks)
        .def_readwrite("l1_columns", &TileShape::l1_columns)
        .def_readwrite("l2_columns", &TileShape::l2_columns)
        .def_readwrite("pulls_per_block", &TileShape::pulls_per_block)
        .def_readwrite("publish_rows", &TileShape::publish_rows)
        .def_readwrite("combine_rows", &TileShape::combine_rows)
        .def_readwrite("group", &TileShape::group)
        .def_readwrite("lag", &TileShape::lag)
        .def_readwrite("ring1_units", &TileShape::ring1_units)
        .def_readwrite("ring2_units", &TileShape::ring2_units);

    py::class_<LayerConfig>(m, "LayerConfig")
        .def(py::init<>())
        .def_readwrite("hidden", &LayerConfig::hidden)
        .def_readwrite("intermediate", &LayerConfig::intermediate)
        .def_readwrite("num_experts", &LayerConfig::num_experts)
        .def_readwrite("top_k", &LayerConfig::top_k)
        .def_readwrite("format", &LayerConfig::format)
        .def_readwrite("act_scale", &LayerConfig::act_scale)
        .def_readwrite("activation", &LayerConfig::activation)
        .def_readwrite("has_limit", &LayerConfig::has_limit)
        .def_readwrite("limit", &LayerConfig::limit)
        .def_readwrite("alpha", &LayerConfig::alpha)
        .def_readwrite("bias", &LayerConfig::bias)
        .def_readwrite("weight_before", &LayerConfig::weight_before)
        .def_readwrite("input", &LayerConfig::input);

    py::class_<Layer>(m, "Layer")
        .def(py::init([](const LayerConfig& config, u32 num_ranks, u32 num_workers, const TileShape& tile) {
                 if (num_ranks == 0 || config.num_experts % num_ranks != 0) {
                     throw std::invalid_argument("num_experts: must be a multiple of the number of ranks");
                 }
                 return make_layer(config, num_ranks, with_rings(tile, config, num_workers));
             }),
             py::arg("config"), py::arg("num_ranks"), py::arg("num_workers"), py::arg("tile"))
        .def_readonly("tile", &Layer::tile)
        .def_readonly("num_local_experts", &Layer::num_local_experts)
        .def_readonly("w13", &Layer::w13)
        .def_readonly("w2", &Layer::w2);

    py::class_<PackedShape>(m, "PackedShape")
        .def(py::init([](u32 parts, u32 part_rows, u32 depth, WeightFormat format) {
                 return PackedShape{parts, part_rows, depth, format};
             }),
             py::arg("parts"), py::arg("part_rows"), py::arg("depth"), py::arg("format"))
        .def_property_readonly("code_bytes", &PackedShape::code_bytes)
        .def_property_readonly("scale_bytes", &PackedShape::scale_bytes);

    py::class_<WorkspaceLimits>(m, "WorkspaceLimits")
        .def(py::init([](const Layer& layer, u32 num_ranks, u32 max_tokens) {
                 return limits_of(layer.config, num_ranks, max_tokens, layer.tile);
             }),
             py::arg("layer"), py::arg("num_ranks"), py::arg("max_tokens"))
        .def("include",
             [](WorkspaceLimits& a, const WorkspaceLimits& b) {
                 a.max_top_k = max_of(a.max_top_k, b.max_top_k);
                 a.max_experts = max_of(a.max_experts, b.max_experts);
                 a.max_local_experts = max_of(a.max_local_experts, b.max_local_experts);
                 a.max_row_blocks = max_of(a.max_row_blocks, b.max_row_blocks);
             })
        .def_property_readonly("numbers", [](const WorkspaceLimits& l) {
            return py::make_tuple(l.num_ranks, l.max_tokens, l.max_top_k, l.max_experts, l.max_local_experts,
                                  l.max_row_blocks);
        });

    m.def("regions", &regions, py::arg("limits"), py::arg("layer"));
    m.def("workspace_bytes", &workspace_bytes, py::arg("limits"), py::arg("layer"));
    m.def("layout_from_numbers", &layout_from_numbers, py::arg("limits"), py::arg("shape"), py::arg("tile"));
    m.def("offsets_from_numbers", &offsets_from_numbers, py::arg("limits"), py::arg("shape"), py::arg("tile"));
    m.def("row_block_bound", [](u32 ranks, u32 tokens, u32 top_k, u32 local, u32 rows) {
        return row_block_bound(ranks, tokens, top_k, local, rows);
    });
    m.def("min_ring1_units", [](u32 group) { return min_ring1_units(group); });
    m.def("min_ring2_units", [](u32 lag, u32 group, u32 workers, u32 tiles) {
        return min_ring2_units(lag, group, workers, tiles);
    });

    py::class_<OwnedSchedule>(m, "Schedule")
        .def(py::init<const std::vector<u32>&, u32, u32, u32, u32, const TileShape&, u32, u32, u32, u32>(), py::arg("rows"),
             py::arg("l1_tiles"), py::arg("l2_tiles"), py::arg("publish_tasks"), py::arg("combine_tasks"),
             py::arg("tile"), py::arg("num_workers"), py::arg("expand_parts") = 0, py::arg("expand_ahead") = 0,
             py::arg("expand_slots") = 0)
        .def_property_readonly("num_tickets", [](const OwnedSchedule& s) { return s.get().num_tickets(); })
        .def_property_readonly("num_units", [](const OwnedSchedule& s) { return s.get().num_units(); })
        .def_property_readonly("num_row_blocks", [](const OwnedSchedule& s) { return s.get().num_row_blocks(); })
        .def("task", [](const OwnedSchedule& s, u32 ticket) { return task_dict(s.get().task(ticket)); })
        .def("walk", [](const OwnedSchedule& s, u32 first, u32 stride) {
            py::list tasks;
            for (const Task& task : s.walk(first, stride)) tasks.append(task_dict(task));
            return tasks;
        });

    m.def("pack", [](const PackedShape& shape, u32 num, u64 codes, u64 scales, u64 out_codes, u64 out_scales, u32 threads) {
        const PackJob job = pack_job(shape, num, codes, scales, out_codes, out_scales);
        py::gil_scoped_release release;
        pack(job, threads);
    }, py::arg("shape"), py::arg("num_matrices"), py::arg("codes"), py::arg("scales"), py::arg("out_codes"),
       py::arg("out_scales"), py::arg("num_threads"));
    m.def("unpack", [](const PackedShape& shape, u32 num, u64 codes, u64 scales, u64 out_codes, u64 out_scales, u32 threads) {
        const PackJob job = pack_job(shape, num, codes, scales, out_codes, out_scales);
        py::gil_scoped_release release;
        unpack(job, threads);
    }, py::arg("shape"), py::arg("num_matrices"), py::arg("codes"), py::arg("scales"), py::arg("out_codes"),
       py::arg("out_scales"), py::arg("num_threads"));

    // Codes over arrays, for the tests that compare them with kernels/formats.py.
    m.def("e4m3_encode", [](u64 from, u64 n, u64 to) {
        for (u64 i = 0; i < n; ++i) pointer_at<u8>(to)[i] = e4m3_encode(pointer_at<float>(from)[i]);
    });
    m.def("e4m3_decode", [](u64 from, u64 n, u64 to) {
        for (u64 i = 0; i < n; ++i) pointer_at<float>(to)[i] = e4m3_decode(pointer_at<u8>(from)[i]);
    });
    m.def("e4m3_scale", [](u64 from, u64 n, u64 to) {
        for (u64 i = 0; i < n; ++i) pointer_at<float>(to)[i] = e4m3_scale(pointer_at<float>(from)[i]);
    });
    m.def("e2m1_encode", [](u64 from, u64 n, u64 to) {
        for (u64 i = 0; i < n; ++i) pointer_at<u8>(to)[i] = e2m1_encode(pointer_at<float>(from)[i]);
    });
    m.def("e2m1_decode", [](u64 from, u64 n, u64 to) {
        for (u64 i = 0; i < n; ++i) pointer_at<float>(to)[i] = e2m1_decode(pointer_at<u8>(from)[i]);
    });
    m.def("ue8m0_encode", [](u64 from, u64 n, u64 to) {
        for (u64 i = 0; i < n; ++i) pointer_at<u8>(to)[i] = ue8m0_encode(pointer_at<float>(from)[i]);
    });
    m.def("ue8m0_decode", [](u64 from, u64 n, u64 to) {
        for (u64 i = 0; i < n; ++i) pointer_at<float>(to)[i] = ue8m0_decode(pointer_at<u8>(from)[i]);
    });
    m.def("bf16_encode", [](u64 from, u64 n, u64 to) {
        for (u64 i = 0; i < n; ++i) pointer_at<u16>(to)[i] = bf16_encode(pointer_at<float>(from)[i]);
    });
    // The vector code that the engine runs.
    m.def("quantize_rows", [](const std::string& isa, u64 from, u32 rows, u32 n, u64 codes, u64 scales) {
        const Isa* table = isa_by_name(isa);
        for (u32 row = 0; row < rows; ++row) {
            const float* values = pointer_at<float>(from) + static_cast<u64>(row) * n;
            const float scale = e4m3_scale(table->amax(values, n));
            pointer_at<float>(scales)[row] = scale;
            table->quantize_e4m3(values, n, 1.0f / scale, pointer_at<u8>(codes) + static_cast<u64>(row) * n);
        }
    });
    m.def("activate_rows", [](const std::string& isa, u64 gate, u64 up, u64 out, u32 rows, u32 n, Activation activation,
                              bool has_limit, float limit, float alpha, u32 round) {
        const Isa* table = isa_by_name(isa);
        for (u32 row = 0; row < rows; ++row) {
            const u64 offset = static_cast<u64>(row) * n * sizeof(float);
            table->activate(ActivationArguments{pointer_at<float>(gate + offset), pointer_at<float>(up + offset),
                                                pointer_at<float>(out + offset), n, activation, has_limit, limit, alpha,
                                                1.0f, false, static_cast<ActivationArguments::Round>(round)});
        }
    });
    m.def("isa_name", [](const std::string& name) { return std::string(isa_by_name(name)->name); }, py::arg("name") = "");

    py::class_<Engine>(m, "Engine")
        .def(py::init([](u32 rank, const std::vector<u64>& bases, u64 bytes, const WorkspaceLimits& limits, u32 workers,
                         const std::string& isa, const std::vector<i32>& pids) {
                 return std::make_unique<Engine>(rank, bases, bytes, limits, workers, isa_by_name(isa), pids);
             }),
             py::arg("rank"), py::arg("bases"), py::arg("workspace_bytes"), py::arg("limits"), py::arg("num_workers"),
             py::arg("isa") = "", py::arg("pids") = std::vector<i32>{})
        .def("run",
             [](Engine& engine, const Layer& layer, const std::vector<u64>& experts, u64 x, u64 ids, u32 id_bytes,
                u64 weights, u64 out, u32 num_tokens, double timeout_s, bool overflow_error, bool check, bool trace) {
                 if (experts.size() != 6) throw std::invalid_argument("experts: six addresses");
                 const ExpertPointers pointers{pointer_at<u8>(experts[0]),    pointer_at<u8>(experts[1]),
                                               pointer_at<u8>(experts[2]),    pointer_at<u8>(experts[3]),
                                               pointer_at<float>(experts[4]), pointer_at<float>(experts[5])};
                 CallArguments call;
                 call.x = pointer_at<void>(x);
                 call.ids = pointer_at<void>(ids);
                 call.id_bytes = id_bytes;
                 call.weights = pointer_at<float>(weights);
                 call.out = pointer_at<void>(out);
                 call.num_tokens = num_tokens;
                 call.timeout_s = timeout_s;
                 call.overflow_error = overflow_error;
                 call.check = check;
                 call.trace = trace;
                 call.interrupted = [] {
                     const py::gil_scoped_acquire acquire;
                     return PyErr_CheckSignals() != 0;
                 };
                 Outcome outcome;
                 {
                     const py::gil_scoped_release release;
                     outcome = engine.run(layer, pointers, call);
                 }
                 if (PyErr_Occurred() != nullptr) throw py::error_already_set();  // what a signal's handler raised
                 return outcome;
             },
             py::arg("layer"), py::arg("experts"), py::arg("x"), py::arg("ids"), py::arg("id_bytes"), py::arg("weights"),
             py::arg("out"), py::arg("num_tokens"), py::arg("timeout_s"), py::arg("overflow_error") = false,
             py::arg("check") = false, py::arg("trace") = false)
        .def("check", &Engine::check)
        .def("reset", &Engine::reset, py::arg("generation"))
        .def_property_readonly("generation", &Engine::generation)
        .def_property_readonly("num_workers", &Engine::num_workers)
        .def("trace", [](const Engine& engine) {
            py::list events;
            for (const TraceEvent& e : engine.trace()) {
                events.append(py::make_tuple(e.worker, e.generation, e.ticket, e.phase, e.expert, e.row_block, e.index,
                                             e.start_ns, e.end_ns));
            }
            return events;
        });

    py::class_<Outcome>(m, "Outcome")
        .def_property_readonly("status", [](const Outcome& o) { return static_cast<u32>(o.status); })
        .def_property_readonly("phase", [](const Outcome& o) { return static_cast<u32>(o.phase); })
        .def_readonly("rank", &Outcome::rank)
        .def_readonly("whom", &Outcome::whom)
        .def_readonly("seen", &Outcome::seen)
        .def_readonly("expected", &Outcome::expected)
        .def_readonly("generation", &Outcome::generation)
        .def_property_readonly("seen_shape", [](const Outcome& o) {
            return std::vector<u32>(o.seen_shape, o.seen_shape + 5);
        });
}
