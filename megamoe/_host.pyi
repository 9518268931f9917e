"""Types of the C++ engine; addresses are integers, sizes are in bytes unless named otherwise."""

from collections.abc import Sequence
from typing import Any

PACKED_LAYOUT: str
PACKED_VERSION: int
PHASES: tuple[str, ...]
PANEL_USES: int
COUNTERS: tuple[str, ...]
STATUSES: tuple[str, ...]

class WeightFormat:
    fp32: WeightFormat
    bf16: WeightFormat
    fp8_block: WeightFormat
    mxfp4: WeightFormat

class ActScale:
    none: ActScale
    token: ActScale
    block128: ActScale

class Activation:
    silu: Activation
    swiglu_clamp: Activation
    swiglu_oai: Activation

class Scalar:
    fp32: Scalar
    bf16: Scalar

class TileShape:
    block_rows: int
    unit_blocks: int
    l1_columns: int
    l2_columns: int
    pulls_per_block: int
    publish_rows: int
    combine_rows: int
    group: int
    lag: int
    ring1_units: int
    ring2_units: int

class LayerConfig:
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    format: WeightFormat
    act_scale: ActScale
    activation: Activation
    has_limit: bool
    limit: float
    alpha: float
    bias: bool
    weight_before: bool
    input: Scalar

class PackedShape:
    def __init__(self, parts: int, part_rows: int, depth: int, format: WeightFormat) -> None: ...
    @property
    def code_bytes(self) -> int: ...
    @property
    def scale_bytes(self) -> int: ...

class Layer:
    def __init__(self, config: LayerConfig, num_ranks: int, num_workers: int, tile: TileShape) -> None: ...
    @property
    def tile(self) -> TileShape: ...
    @property
    def num_local_experts(self) -> int: ...
    @property
    def w13(self) -> PackedShape: ...
    @property
    def w2(self) -> PackedShape: ...

class WorkspaceLimits:
    def __init__(self, layer: Layer, num_ranks: int, max_tokens: int) -> None: ...
    def include(self, other: WorkspaceLimits) -> None: ...
    @property
    def numbers(self) -> tuple[int, ...]: ...

class Schedule:
    def __init__(
        self,
        rows: Sequence[int],
        l1_tiles: int,
        l2_tiles: int,
        publish_tasks: int,
        combine_tasks: int,
        tile: TileShape,
        num_workers: int,
        expand_parts: int = 0,
        expand_ahead: int = 0,
        expand_slots: int = 0,
    ) -> None: ...
    @property
    def num_tickets(self) -> int: ...
    @property
    def num_units(self) -> int: ...
    @property
    def num_row_blocks(self) -> int: ...
    def task(self, ticket: int) -> dict[str, Any]: ...
    def walk(self, first: int, stride: int) -> list[dict[str, Any]]: ...

class Outcome:
    @property
    def status(self) -> int: ...
    @property
    def phase(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def whom(self) -> int: ...
    @property
    def seen(self) -> int: ...
    @property
    def expected(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def seen_shape(self) -> list[int]: ...

class Engine:
    def __init__(
        self,
        rank: int,
        bases: Sequence[int],
        workspace_bytes: int,
        limits: WorkspaceLimits,
        num_workers: int,
        isa: str = "",
        pids: Sequence[int] = ...,
    ) -> None: ...
    def run(
        self,
        layer: Layer,
        experts: Sequence[int],
        x: int,
        ids: int,
        id_bytes: int,
        weights: int,
        out: int,
        num_tokens: int,
        timeout_s: float,
        overflow_error: bool = False,
        check: bool = False,
        trace: bool = False,
    ) -> Outcome: ...
    def check(self) -> Outcome: ...
    def reset(self, generation: int) -> None: ...
    @property
    def generation(self) -> int: ...
    @property
    def num_workers(self) -> int: ...
    def trace(self) -> list[tuple[int, ...]]: ...

def regions(limits: WorkspaceLimits, layer: Layer) -> dict[str, tuple[int, int]]: ...
def workspace_bytes(limits: WorkspaceLimits, layer: Layer) -> int: ...
def min_ring1_units(group: int) -> int: ...
def min_ring2_units(lag: int, group: int, num_workers: int, tiles_per_unit: int) -> int: ...
def pack(
    shape: PackedShape, num_matrices: int, codes: int, scales: int, out_codes: int, out_scales: int, num_threads: int
) -> None: ...
def unpack(
    shape: PackedShape, num_matrices: int, codes: int, scales: int, out_codes: int, out_scales: int, num_threads: int
) -> None: ...
def e4m3_encode(values: int, count: int, out: int) -> None: ...
def e4m3_decode(values: int, count: int, out: int) -> None: ...
def e4m3_scale(values: int, count: int, out: int) -> None: ...
def e2m1_encode(values: int, count: int, out: int) -> None: ...
def e2m1_decode(values: int, count: int, out: int) -> None: ...
def ue8m0_encode(values: int, count: int, out: int) -> None: ...
def ue8m0_decode(values: int, count: int, out: int) -> None: ...
def bf16_encode(values: int, count: int, out: int) -> None: ...
def quantize_rows(isa: str, values: int, rows: int, columns: int, codes: int, scales: int) -> None: ...
def activate_rows(
    isa: str,
    gate: int,
    up: int,
    out: int,
    rows: int,
    columns: int,
    activation: Activation,
    has_limit: bool,
    limit: float,
    alpha: float,
    round: int,
) -> None: ...
def isa_name(name: str = "") -> str: ...
