"""The mega-kernel on Hopper: its instances, the sizes of its workspace, and its launch.

    plan = MegaMoePlan(spec, experts, limits, rank=0, bases=bases, base=base, record=record, timeout_s=600.0)
    plan.launch(x, topk_ids, topk_weights, out, stream)

One launch per rank runs the whole layer (docs/mega-moe.md). Which instance runs decides speed, never the result.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megamoe.config import MoESpec
from megamoe.kernels.cpu_engine import load as load_host
from megamoe.kernels.jit import KernelSource, load
from megamoe.kernels.jit.driver import PreparedLaunch, get_driver
from megamoe.kernels.mega_trace import EVENTS_PER_CTA, TRACE_EVENT
from megamoe.kernels.packing.moe import PackedMoeExperts

__all__ = [
    "ACT_SCALES",
    "INSTANCES",
    "FaultRecord",
    "MegaMoeInstance",
    "MegaMoePlan",
    "Prepared",
    "mega_moe_sources",
    "published_row_bytes",
    "scratch_bytes",
    "select_instance",
    "workspace_limits",
    "workspace_numbers",
]

# granularities of the scales of x
ACT_SCALES = ("token", "block128")

_BLOCK_K = 128
_SMALLEST_BLOCK_ROWS = 32  # of all instances: how many row blocks the counters must hold
_STASH_BYTES = 256 * (64 + 4) * 4  # of a CTA: kStashFloats of impls/mega_moe/prefill.cuh
_PANEL_STEP_BYTES = 256 * 128  # kPanelStepBytes of impls/mega_moe/panels.cuh
# panels that are kept, how far ahead they are expanded, and in how many tasks each (benchmarks/notes/mega-moe.md)
_PANEL_SLOTS, _PANELS_AHEAD, _EXPAND_PARTS = 112, 40, 2
_OFFSET_WORDS = 28  # Offsets of layout/offsets.h
_SLOT_ROW_BITS = 22  # kSlotRowBits of impls/mega_moe/ss_roles.cuh; the other bits name the source
_NUM_SMS = 132  # what the rings are sized for; fewer or more work as well


@dataclass(frozen=True)
class MegaMoeInstance:
    """One compiled form of the mega-kernel.

    Attributes:
        name: by the rows that an expert gets: "decode" (few), "wide", "prefill" or "expanded" (very many).
        header: where its kernel is, of impls/mega_moe/.
        threads: of a CTA.
        block_rows: rows of one expert in a row block.
        l2_columns: hidden columns of an L2 task.
        pulls_per_block: pull tasks of a row block, of at most 32 rows.
        box_rows: rows that one TMA copy brings.
        unit_blocks: row blocks of an expert, at most, that a tile of weights is multiplied with in a row.
        pulls_ahead: tasks of every CTA, about, that pulls are handed out before their rows are needed; 0: all first.
    """

    name: str
    header: str
    threads: int
    block_rows: int
    l2_columns: int
    pulls_per_block: int
    box_rows: int
    unit_blocks: int
    pulls_ahead: int

    def source(
        self, arch: str = "sm_90a", *, act_scale: str = "token", traced: bool = False, throttle_gbps: int | None = None
    ) -> KernelSource:
        """Return the kernel to compile.

        Args:
            arch: the real architecture.
            act_scale: granularity of the scales of x, "token" or "block128"; each has its own kernel.
            traced: the kernel that records events, another one again.
            throttle_gbps: the kernel whose pulls and scatters stay below a rate, another one for each; None = none.
        """
        return _source(self, arch, act_scale, traced, throttle_gbps)

    def tile(self, spec: MoESpec, rows_hint: int, num_tokens: int) -> tuple[int, ...]:
        """Return the TileShape (layout/workspace.h).

        Args:
            spec: the layer.
            rows_hint: rows that an expert gets, about.
            num_tokens: of this rank.
        """
        l1_tiles = -(-spec.intermediate // 128)
        publish_rows = max(2, -(-num_tokens // 128))  # a part of the tokens for every CTA, where there are so many
        combine_rows = max(2 if self.name == "decode" else 1, min(16, num_tokens // (2 * _NUM_SMS)))
        if self.pulls_ahead == 0:  # rows are few: all pulls first, then all of L1, then all of L2
            unit_blocks, group, lag, ring1 = 2, 64, 0, 129
        else:
            blocks = max(1, min(self.unit_blocks, -(-rows_hint // self.block_rows)))
            unit_blocks = min(self.unit_blocks, 2 if blocks == 1 else 4 if blocks <= 3 else 8 if blocks <= 7 else 16)
            tasks = blocks * (l1_tiles - (-spec.hidden // self.l2_columns))
            group = -(-self.pulls_ahead * _NUM_SMS // tasks)
            in_work = -(-_NUM_SMS // (blocks * l1_tiles))  # units whose L1 tasks the CTAs hold, when all work on L1
            lag = in_work + 1  # L2 of a unit follows when its L1 tasks have been handed out long ago
            ring1 = 3 * group + 2  # the legal minimum leaves no time between the last L1 of a unit and the pull
        return (
            self.block_rows,
            unit_blocks,
            128,
            self.l2_columns,
            self.pulls_per_block,
            publish_rows,
            combine_rows,
            group,
            lag,
            ring1,
            lag + group + -(-_NUM_SMS // l1_tiles) + 1,
        )


INSTANCES = {
    "expanded": MegaMoeInstance("expanded", "expanded", 384, 128, 256, 4, 128, 16, 2),
    "prefill": MegaMoeInstance("prefill", "prefill", 512, 256, 128, 8, 128, 8, 4),
    "wide": MegaMoeInstance("wide", "decode", 384, 128, 256, 4, 128, 8, 8),
    "decode": MegaMoeInstance("decode", "decode", 640, 40, 256, 2, 8, 2, 0),
}
# rows of an expert up to which an instance is the faster one (benchmarks/notes/mega-moe.md)
_DECODE_ROWS, _WIDE_ROWS, _PREFILL_ROWS = 40, 150, 640


def select_instance(spec: MoESpec, num_tokens: int, world_size: int) -> MegaMoeInstance:
    """Choose the instance by the rows that an expert gets when every rank brings as many tokens as this one."""
    return INSTANCES[_usable(spec, num_tokens, world_size)[-1]]


def _usable(spec: MoESpec, max_tokens: int, world_size: int) -> list[str]:
    """Return the instances that calls of up to so many tokens a rank choose, in the order of their tokens."""
    rows = max_tokens * world_size * spec.top_k / spec.num_experts
    bounds = {"decode": 0, "wide": _DECODE_ROWS, "prefill": _WIDE_ROWS, "expanded": _PREFILL_ROWS}
    return [name for name, least in bounds.items() if rows > least or least == 0]


# what an instance and its host must agree about
_SLOT_CHECK = f"""static_assert(megamoe::impls::ss::kSlotRowBits == {_SLOT_ROW_BITS}, "the host bounds both");"""
_CHECKS = {
    "prefill": f"""{_SLOT_CHECK}
static_assert(megamoe::impls::prefill::kStashFloats * sizeof(float) == {_STASH_BYTES}, "the host's stash");""",
    "expanded": f"""{_SLOT_CHECK}
static_assert(megamoe::impls::kPanelStepBytes == {_PANEL_STEP_BYTES}, "the host's bytes of a panel");
static_assert(megamoe::kMaxPanelSlots >= {_PANEL_SLOTS}, "counters for every panel that is kept");""",
}


@lru_cache(maxsize=64)
def _source(
    instance: MegaMoeInstance, arch: str, act_scale: str, traced: bool, throttle_gbps: int | None
) -> KernelSource:
    function = f"sm90_mega_moe_{instance.header}"
    forms = "_block128" if act_scale == "block128" else ""
    forms += ("" if throttle_gbps is None else f"_{throttle_gbps}gbps") + ("_trace" if traced else "")
    name = f"sm90_mega_moe_{instance.name}{forms}"
    code = f"""#include "megamoe/impls/mega_moe/{instance.header}.cuh"
static_assert(megamoe::impls::{instance.header}::kThreads == {instance.threads}, "the host's threads");
static_assert(megamoe::impls::{instance.header}::kBlockRows == {instance.block_rows}, "the host's row blocks");
static_assert(megamoe::impls::{instance.header}::kBoxRows == {instance.box_rows}, "the host's tensor maps");
static_assert(sizeof(megamoe::impls::MegaMoeArgs) == {ctypes.sizeof(_Args)}, "the host's bytes of the arguments");
static_assert(sizeof(megamoe::Offsets) == {8 * _OFFSET_WORDS}, "the host's offsets");
constexpr int kThreads = {instance.threads};
{_CHECKS.get(instance.name, "")}
extern "C" __global__ void __launch_bounds__(kThreads, 1)
{name}(const __grid_constant__ megamoe::impls::MegaMoeArgs args) {{
    extern __shared__ __align__(1024) uint8_t smem[];
    megamoe::impls::{function}(args, smem);
}}
"""
    if instance.name == "wide":
        code = f"#define MEGAMOE_WIDE\n{code}"
    if instance.name == "expanded":
        code = f"#define MEGAMOE_EXPAND {_EXPAND_PARTS}\n{code}"
    if act_scale == "block128":
        code = f"#define MEGAMOE_BLOCK128\n{code}"
    if traced:
        code = f"""#define MEGAMOE_TRACE
{code}static_assert(sizeof(megamoe::impls::TraceEvent) == {TRACE_EVENT.itemsize}, "the host's bytes of an event");
static_assert(megamoe::impls::kTraceEvents == {EVENTS_PER_CTA}, "the host's events of a CTA");
"""
    if throttle_gbps is not None:
        code = f"#define MEGAMOE_THROTTLE_GBPS {throttle_gbps}\n{code}"
    return KernelSource(name=name, code=code, entry=name, arch=arch, dynamic_shared_bytes=_SHARED_BYTES)


def mega_moe_sources(
    arch: str = "sm_90a",
    *,
    act_scales: Collection[str] = ACT_SCALES,
    traced: bool = False,
    throttle_gbps: int | None = None,
) -> list[KernelSource]:
    """Return every mega-kernel that can be launched for scales of these granularities, without a trace or with one, at
    the link's rate or a lower one.
    """
    chosen = [act_scale for act_scale in ACT_SCALES if act_scale in act_scales]
    return [
        instance.source(arch, act_scale=act_scale, traced=traced, throttle_gbps=throttle_gbps)
        for act_scale in chosen
        for instance in INSTANCES.values()
    ]


_SHARED_BYTES = 227 * 1024  # all that a CTA can have: no other CTA of this kernel fits beside it anyway


class FaultRecord(ctypes.Structure):
    """FaultRecord of impls/mega_moe/args.cuh."""

    _fields_ = [
        ("status", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("phase", ctypes.c_uint32),
        ("whom", ctypes.c_uint32),
        ("generation", ctypes.c_uint32),
        ("seen_shape", ctypes.c_uint32 * 5),
        ("own_shape", ctypes.c_uint32 * 4),
        ("seen", ctypes.c_uint64),
        ("expected", ctypes.c_uint64),
    ]


class _Args(ctypes.Structure):
    """MegaMoeArgs of impls/mega_moe/args.cuh; its maps are aligned to 64 bytes, and so is its size."""

    _fields_ = [
        ("ring1", ctypes.c_uint8 * 128),
        ("ring2", ctypes.c_uint8 * 128),
        ("bases", ctypes.c_uint64),
        ("record", ctypes.c_uint64),
        ("stash", ctypes.c_uint64),
        ("panels", ctypes.c_uint64),
        ("x", ctypes.c_uint64),
        ("ids", ctypes.c_uint64),
        ("weights", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("w13", ctypes.c_uint64),
        ("w2", ctypes.c_uint64),
        ("w13_scale", ctypes.c_uint64),
        ("w2_scale", ctypes.c_uint64),
        ("b13", ctypes.c_uint64),
        ("b2", ctypes.c_uint64),
        ("received", ctypes.c_uint64),
        ("trace", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("shape_hash", ctypes.c_uint64),
        ("base", ctypes.c_uint64),
        ("at", ctypes.c_uint64 * _OFFSET_WORDS),
        ("limits", ctypes.c_uint32 * 6),
        ("shape", ctypes.c_uint32 * 9),
        ("tile", ctypes.c_uint32 * 11),
        ("rank", ctypes.c_uint32),
        ("num_local_experts", ctypes.c_uint32),
        ("num_tokens", ctypes.c_uint32),
        ("id_bytes", ctypes.c_uint32),
        ("formats", ctypes.c_uint32),
        ("limit", ctypes.c_float),
        ("steepness", ctypes.c_float),
        ("shift", ctypes.c_float),
        ("weight_before", ctypes.c_uint32),
        ("refused", ctypes.c_uint32),
        ("panel_slots", ctypes.c_uint32),
        ("panels_ahead", ctypes.c_uint32),
        ("refuses", ctypes.c_uint32),
        ("padding", ctypes.c_uint32 * 11),
    ]

    def lay_out(self, limits: tuple[int, ...], shape: tuple[int, ...], tile: tuple[int, ...]) -> None:
        """Set the sizes, and where parts of a workspace of these sizes begin."""
        self.limits = (ctypes.c_uint32 * 6)(*limits)
        self.shape = (ctypes.c_uint32 * 9)(*shape)
        self.tile = (ctypes.c_uint32 * 11)(*tile)
        at = load_host().offsets_from_numbers(limits, shape, tile)
        self.at = (ctypes.c_uint64 * _OFFSET_WORDS).from_buffer_copy(at)


# what changes from call to call
_POINTERS, _POINTERS_AT = struct.Struct("<4Q"), _Args.x.offset  # x, ids, weights, out
_COUNTS, _COUNTS_AT = struct.Struct("<2I"), _Args.num_tokens.offset  # num_tokens, id_bytes
assert (_Args.out.offset, _Args.id_bytes.offset) == (_POINTERS_AT + 24, _COUNTS_AT + 4)


def scratch_bytes(spec: MoESpec, num_ctas: int, instances: Collection[str]) -> int:
    """Return the bytes of a plan's scratch memory for launches of that many CTAs of these instances (their names)."""
    depth = max(-(-spec.hidden // 128), -(-spec.intermediate // 128))
    return max(
        num_ctas * _STASH_BYTES if "prefill" in instances else 0,
        _PANEL_SLOTS * depth * _PANEL_STEP_BYTES if "expanded" in instances else 0,
    )


def workspace_limits(spec: MoESpec, world_size: int, max_tokens: int) -> tuple[int, ...]:
    """Return the WorkspaceLimits (layout/workspace.h) of one layer; several layers take the maxima.

    Raises:
        ValueError: more tokens or ranks than a row's 32 bits can name.
    """
    if max_tokens * spec.top_k >= 2**_SLOT_ROW_BITS:
        raise ValueError(
            f"max_tokens_per_rank: {max_tokens} tokens of top-{spec.top_k} are too many for the mega-kernel; at most "
            f"{(2**_SLOT_ROW_BITS - 1) // spec.top_k}"
        )
    if world_size > 2 ** (32 - _SLOT_ROW_BITS):
        raise ValueError(f"the mega-kernel serves at most {2 ** (32 - _SLOT_ROW_BITS)} ranks, got {world_size}")
    local = spec.num_experts // world_size
    blocks = load_host().row_block_bound(world_size, max_tokens, spec.top_k, local, _SMALLEST_BLOCK_ROWS)
    return (world_size, max_tokens, spec.top_k, spec.num_experts, local, blocks)


def published_row_bytes(spec: MoESpec) -> tuple[int, int]:
    """Return the bytes of a token's row of x in the workspace, and of its scales.

    Scales per 128 columns are padded to whole vectors of 16 bytes, in which they are pulled.
    """
    scales = -(-spec.hidden // _BLOCK_K)
    return spec.hidden, 4 if spec.act_scale == "token" else -(-scales // 4) * 16


def layer_shape(spec: MoESpec) -> tuple[int, ...]:
    """Return the LayerShape (layout/workspace.h) of an MXFP4 layer."""
    input_bytes, scale_bytes = published_row_bytes(spec)
    ring1_scales = -(-spec.hidden // _BLOCK_K) if spec.act_scale == "block128" else 0
    columns = -(-spec.intermediate // 128) * 128
    return (
        spec.hidden,
        spec.intermediate,
        spec.num_experts,
        spec.top_k,
        input_bytes,
        scale_bytes,
        input_bytes + 4 * ring1_scales,
        columns + columns // 128 * 4,
        2,
    )


def workspace_numbers(spec: MoESpec, limits: tuple[int, ...]) -> dict[str, int]:
    """Return sizes and offsets of the workspace that serves every call of a layer; "bytes" is the allocation."""
    host = load_host()
    shape = layer_shape(spec)
    found: dict[str, int] = {}
    for instance in INSTANCES.values():
        for blocks in range(instance.unit_blocks):  # of an expert: the rings differ
            rows_hint = blocks * instance.block_rows + 1
            numbers = host.layout_from_numbers(limits, shape, instance.tile(spec, rows_hint, 1))
            if numbers["bytes"] > found.get("bytes", 0):
                found = dict(numbers)
    return found


def shape_hash(spec: MoESpec) -> int:
    """Return the number that ranks compare in every call."""
    return int.from_bytes(hashlib.sha256(repr(spec).encode()).digest()[:8], "little")


class Prepared:
    """A launch whose arguments are in place, but for those that change from call to call.

    Attributes:
        args: the arguments, by name; `bytes` are the same.
        run: launches on a stream.
    """

    def __init__(self, args: _Args, run: PreparedLaunch) -> None:
        self.args, self.run, self.bytes = args, run, run.bytes
        self._is_plain = False  # nothing was counted and nothing refused by the last launch

    def point(self, x: int, ids: int, weights: int, out: int, sizes: tuple[int, int]) -> None:
        """Let the next launch take tensors at these addresses; `sizes`: number of tokens, and bytes of an id."""
        # by their places in the bytes: a field of ctypes costs as much as all of these together
        _POINTERS.pack_into(self.bytes, _POINTERS_AT, x, ids, weights, out)
        _COUNTS.pack_into(self.bytes, _COUNTS_AT, *sizes)

    def again(self, x: int, ids: int, weights: int, out: int, sizes: tuple[int, int], stream: int) -> None:
        """Launch with tensors at these addresses, nothing counted and nothing refused."""
        self.point(x, ids, weights, out, sizes)
        if not self._is_plain:
            self.args.received = self.args.refused = 0
            self._is_plain = True
        self.run(stream)

    def launch(self, received: int, refused: int, stream: int) -> None:
        """Launch with the tensors pointed at."""
        self.args.received, self.args.refused = received, refused
        self._is_plain = False
        self.run(stream)


class MegaMoePlan:
    """A layer on one workspace, ready to launch.

    Args:
        spec: the layer.
        experts: this rank's, packed.
        limits: of the workspace.
        rank: of this process in the group.
        bases: int64 `[num_ranks]` on the device, addresses of the workspaces as mapped here.
        base: address of this rank's workspace.
        record: address of a FaultRecord in mapped host memory.
        timeout_s: bound of every wait, seconds.
        num_sms: CTAs to launch; None = one an SM.
        scratch: uint8, room for intermediate results that plans of one device may share when their calls follow each
            other; None, or too small for this layer = its own.
        trace: uint8, zeroed before every launch, where the traced instances record (`mega_trace`); None = the normal
            ones run.
        refuses: fail calls to which a rank wanted to bring more tokens than the workspace holds, instead of running
            them in chunks.
        throttle_gbps: run the instances whose pulls and scatters together stay below this rate; None = the normal ones.
    """

    def __init__(
        self,
        spec: MoESpec,
        experts: PackedMoeExperts,
        limits: tuple[int, ...],
        *,
        rank: int,
        bases: Tensor,
        base: int,
        record: int,
        timeout_s: float,
        num_sms: int | None = None,
        scratch: Tensor | None = None,
        trace: Tensor | None = None,
        refuses: bool = False,
        throttle_gbps: int | None = None,
    ) -> None:
        self.spec, self.experts, self.limits, self.rank = spec, experts, limits, rank
        self._bases, self._base, self._record = bases, base, record
        self._timeout_ns = int(timeout_s * 1e9)
        self.device = bases.get_device()
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._grid = min(num_sms or sms, sms)
        self.scratch = torch.empty(0, dtype=torch.uint8, device=bases.device) if scratch is None else scratch
        self._outgrown: list[Tensor] = []  # scratch memory that prepared launches point at
        self._trace = trace
        self._refuses, self._throttle_gbps = refuses, throttle_gbps
        self._prepared: dict[tuple[MegaMoeInstance, tuple[int, ...]], Prepared] = {}
        self._by_tokens: dict[int | tuple[int, MegaMoeInstance], Prepared] = {}
        self._provide(_usable(spec, limits[1], limits[0]))

    def launch(
        self,
        x: Tensor | None,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor,
        stream: int,
        *,
        instance: MegaMoeInstance | None = None,
        received: Tensor | None = None,
        refused: int = 0,
    ) -> None:
        """Launch one call on a stream; nothing is synchronised and nothing allocated once a shape has been seen.

        More tokens than the workspace holds go through it in chunks, within this launch; ranks may differ in theirs.

        Args:
            x: BF16 `[num_tokens, hidden]`, contiguous; None: the workspace holds E4M3 rows and scales already, of one
                chunk.
            topk_ids: int32 or int64 `[num_tokens, top_k]`, contiguous.
            topk_weights: FP32 `[num_tokens, top_k]`, contiguous.
            out: BF16 `[num_tokens, hidden]`, contiguous.
            stream: address of the stream.
            instance: None = the one for this number of tokens.
            received: int32 `[local experts]`; rows that the experts got are added; None = not counted.
            refused: tokens that this rank wanted to bring and does not, more than the workspace holds: the call fails
                on every rank whose plan refuses them.
        """
        num_tokens = topk_ids.shape[0]
        prepared = self.prepared(num_tokens, instance)
        prepared.point(
            0 if x is None else x.data_ptr(),
            topk_ids.data_ptr(),
            topk_weights.data_ptr(),
            out.data_ptr(),
            (num_tokens, topk_ids.element_size()),
        )
        prepared.launch(0 if received is None else received.data_ptr(), refused, stream)

    def prepared(self, num_tokens: int, instance: MegaMoeInstance | None = None) -> Prepared:
        """Return the launch for a number of tokens; those that are alike share one."""
        key = num_tokens if instance is None else (num_tokens, instance)
        found = self._by_tokens.get(key)
        if found is None:
            found = self._by_tokens[key] = self._find(num_tokens, instance)
        return found

    def _find(self, num_tokens: int, instance: MegaMoeInstance | None) -> Prepared:
        chunk = min(num_tokens, self.limits[1])
        instance = instance or select_instance(self.spec, chunk, self.limits[0])
        rows = chunk * self.limits[0] * self.spec.top_k // self.spec.num_experts
        key = (instance, instance.tile(self.spec, rows, chunk))
        prepared = self._prepared.get(key)  # by all of the instance: one of the same name may be another kernel
        if prepared is None:
            prepared = self._prepared[key] = self._prepare(instance, key[1])
        return prepared

    def _provide(self, instances: Collection[str]) -> None:
        """Make the scratch memory large enough for these instances."""
        need = scratch_bytes(self.spec, self._grid, instances)
        if self.scratch.numel() < need:
            if self._prepared:
                self._outgrown.append(self.scratch)
            self.scratch = torch.empty(need, dtype=torch.uint8, device=self.scratch.device)

    def _prepare(self, instance: MegaMoeInstance, tile: tuple[int, ...]) -> Prepared:
        spec, experts = self.spec, self.experts
        shape = layer_shape(spec)
        numbers = load_host().layout_from_numbers(self.limits, shape, tile)
        columns = -(-spec.intermediate // 128) * 128
        source = instance.source(
            act_scale=spec.act_scale, traced=self._trace is not None, throttle_gbps=self._throttle_gbps
        )
        function = load(source, self.device).address
        run = PreparedLaunch(source.name, function, self._grid, instance.threads, _SHARED_BYTES, ctypes.sizeof(_Args))
        args = _Args.from_buffer(run.bytes)  # what is written here is what the next launch reads
        for name, width, units in (("ring1", spec.hidden, tile[9]), ("ring2", columns, tile[10])):
            dims, box = (width, units * numbers["unit_rows"]), (_BLOCK_K, instance.box_rows)
            target = run.address + getattr(_Args, name).offset
            get_driver().encode_tensor_map(target, self._base + numbers[name], dims, (width,), box)
        args.bases, args.base = self._bases.data_ptr(), self._base
        args.record = self._record
        self._provide([instance.name])
        if instance.name == "prefill":
            args.stash = self.scratch.data_ptr()
        elif instance.name == "expanded":
            args.panels = self.scratch.data_ptr()
            args.panel_slots, args.panels_ahead = _PANEL_SLOTS, _PANELS_AHEAD
        args.trace = 0 if self._trace is None else self._trace.data_ptr()
        args.w13, args.w2 = experts.w13.data.data_ptr(), experts.w2.data.data_ptr()
        args.w13_scale, args.w2_scale = experts.w13.row_scale.data_ptr(), experts.w2.row_scale.data_ptr()
        args.b13 = 0 if experts.b13 is None else experts.b13.data_ptr()
        args.b2 = 0 if experts.b2 is None else experts.b2.data_ptr()
        args.timeout_ns, args.shape_hash = self._timeout_ns, shape_hash(spec)
        args.lay_out(self.limits, shape, tile)
        args.rank, args.num_local_experts = self.rank, experts.num_experts
        args.limit = math.inf if spec.swiglu_limit is None else spec.swiglu_limit
        oai = spec.activation == "swiglu_oai"
        args.steepness = -math.log2(math.e) * (spec.swiglu_alpha if oai and spec.swiglu_alpha is not None else 1.0)
        args.shift = 1.0 if oai else 0.0
        args.weight_before = spec.weight_position == "before"
        args.refuses = self._refuses
        return Prepared(args, run)
