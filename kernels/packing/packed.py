"""MXFP4 experts packed for a Hopper kernel, and back byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.kernels.formats import MXFP4_GROUP
from megamoe.kernels.packing.exponents import (
    GROUP_BYTES,
    MAX_EXPONENT,
    ExponentReport,
    RelativeExponents,
    SideTable,
    canonical_rows,
    relative_exponents,
)
from megamoe.kernels.packing.tiles import TileLayout, tile_layout

__all__ = ["PackedWeight", "canonical_buffer", "pack_mxfp4", "pack_mxfp4_experts"]

# called after each expert with (experts done, experts in all)
Progress = Callable[[int, int], None]

# Work on about 1 MB of codes at a time on a CPU (stays in cache), and on 32 MB elsewhere (bounds the temporaries).
_CPU_CHUNK = 1 << 20
_DEVICE_CHUNK = 1 << 25
# What the kernels' 16-byte accesses and bulk copies need.
_ALIGNMENT = 16


@dataclass
class PackedWeight:
    """The MXFP4 experts of one projection, packed.

    Attributes:
        layout: "sm90_ss" or "sm90_rs".
        version: of the layout's bytes.
        data: uint8 `[E, row blocks, k blocks, block bytes]`, contiguous; `tiles` says what the bytes are.
        row_scale: FP32 `[E, N]`, contiguous, in the order of the features; NaN for a row with the scale code 255.
        rows, columns: N and K of the canonical weight.
        side: per expert, what restores the original bytes.
        reports: per expert, what is not exact.
    """

    layout: str
    version: int
    data: Tensor
    row_scale: Tensor
    rows: int
    columns: int
    side: list[SideTable]
    reports: list[ExponentReport]

    @property
    def num_experts(self) -> int:
        """Experts, E."""
        return self.data.shape[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K) of the canonical weight."""
        return self.num_experts, self.rows, self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return self.data.nbytes + self.row_scale.nbytes + sum(table.nbytes for table in self.side)

    @property
    def report(self) -> ExponentReport:
        """What is not exact, over all experts."""
        return ExponentReport.total(self.reports)

    def require(self, name: str, layout: str, *, rows: int | None = None, columns: int | None = None) -> None:
        """Refuse a weight that the caller can't read.

        Args:
            name: of the weight, for the message.
            layout: that the caller reads, in its current version.
            rows, columns: N and K that the caller expects, or None.

        Raises:
            ValueError: packed for another layout or version, or another shape.
        """
        wanted = tile_layout(layout)
        if (self.layout, self.version) != (wanted.name, wanted.version):
            raise ValueError(
                f"{name}: packed for {self.layout} version {self.version}, but this kernel reads {wanted.name} version "
                f"{wanted.version}; unpack() it and pack it for {wanted.name}"
            )
        for what, expected, got in (("rows", rows, self.rows), ("columns", columns, self.columns)):
            if expected is not None and expected != got:
                raise ValueError(f"{name}: expected {expected} {what}, got a weight packed with {got}")

    def unpack(self) -> tuple[Tensor, Tensor]:
        """Return the canonical (codes uint8 `[E, N, K / 2]`, scales uint8 `[E, N, K / 32]`), byte for byte."""
        codes = self.data.new_empty((self.num_experts, self.rows, self.columns // 2))
        scales = self.data.new_empty((self.num_experts, self.rows, self.columns // MXFP4_GROUP))
        for expert in range(self.num_experts):
            codes[expert], scales[expert] = self.unpack_expert(expert)
        return codes, scales

    def unpack_expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return the canonical (codes `[N, K / 2]`, scales `[N, K / 32]`) of one expert, byte for byte."""
        layout = tile_layout(self.layout)
        codes = self.data.new_empty((self.rows, self.columns // 2))
        exponents = self.data.new_empty((self.rows, self.columns // MXFP4_GROUP))
        for first, last in _row_chunks(layout, self.rows, self.columns, self.data.device):
            part = self.data[expert, first // layout.block_rows : -(-last // layout.block_rows)]
            codes[first:last], exponents[first:last] = layout.read(part, last - first, self.columns)
        return canonical_rows(codes, exponents, self.row_scale[expert], self.side[expert])

    def load_expert(self, expert: int, codes: Tensor, scales: Tensor, *, strict: bool = False) -> None:
        """Replace one expert; the addresses of `data` and `row_scale` stay.

        Args:
            expert: which.
            codes: uint8 `[N, K / 2]`.
            scales: uint8 `[N, K / 32]`.
            strict: refuse rows that are not exact; the old expert stays.

        Raises:
            TypeError: a wrong dtype.
            ValueError: a wrong shape or layout version, or a row refused under `strict`.
        """
        self.require("packed weight", self.layout)
        _check_mxfp4(codes, scales, (self.rows, self.columns // 2))
        if strict:
            _refuse_inexact(expert, codes, scales, tile_layout(self.layout))
        _write_expert(self, expert, codes, scales)


def pack_mxfp4(
    codes: Tensor,
    scales: Tensor,
    layout: str,
    *,
    strict: bool = False,
    in_place: bool = False,
    progress: Progress | None = None,
) -> PackedWeight:
    """Pack the MXFP4 experts of one projection; on any device, with the same bytes.

    `megamoe.kernels.packing.exponents` says what the packed form holds exactly; the result's `report` counts what it
    doesn't. Work is done a part of an expert at a time, so that temporaries stay small.

    In place: packed weights take the bytes of the codes and half those of the scales (plus padding), so they fit into a
    storage that holds both, but not into the storage of the codes alone. With `in_place` the storage behind `codes` is
    overwritten from the last expert to the first, and `data` lies in it; extra memory is a copy of the codes of one
    expert, and of all scales if they lie in the same storage. `canonical_buffer` makes such a storage. Both arguments
    are consumed. Where codes and scales are separate tensors nothing can be overwritten; `pack_mxfp4_experts` then
    takes one expert after the other, so that each can be freed when it is packed.

    Args:
        codes: uint8 `[E, N, K / 2]`, the low nibble of a byte being the even k; K a multiple of 32.
        scales: uint8 `[E, N, K / 32]`, UE8M0.
        layout: "sm90_ss" or "sm90_rs".
        strict: refuse rows that are not exact. With `in_place` all rows are looked at before anything is overwritten.
        in_place: put the packed weights where the codes are.
        progress: called after each expert with (experts done, experts in all).

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape or layout, a row refused under `strict`, or no room for `in_place`.
    """
    tiles = tile_layout(layout)
    if codes.dim() != 3:
        raise ValueError(f"codes: expected [experts, N, K / 2], got {list(codes.shape)}")
    _check_mxfp4(codes, scales, None)
    num_experts, rows, columns = codes.shape[0], codes.shape[1], codes.shape[2] * 2
    data = _storage_as_packed(codes, tiles) if in_place else None
    if strict:
        for expert in range(num_experts):
            _refuse_inexact(expert, codes[expert], scales[expert], tiles)
    if in_place and _same_storage(codes, scales):
        scales = scales.clone()
    packed = _empty(num_experts, rows, columns, tiles, codes.device, data)
    # An expert is at least as large packed as canonical: from the last one down, what is overwritten has been read.
    order = range(num_experts - 1, -1, -1) if in_place else range(num_experts)
    for done, expert in enumerate(order, start=1):
        # the packed expert overlaps its own codes
        expert_codes = codes[expert].clone() if in_place else codes[expert]
        _write_expert(packed, expert, expert_codes, scales[expert])
        if progress:
            progress(done, num_experts)
    return packed


def pack_mxfp4_experts(
    experts: Iterable[tuple[Tensor, Tensor]],
    layout: str,
    *,
    num_experts: int,
    rows: int,
    columns: int,
    device: torch.device | str | None = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> PackedWeight:
    """Pack experts one by one, as a loader brings them: beside the result only one canonical expert need exist.

    Args:
        experts: (codes uint8 `[N, K / 2]`, scales uint8 `[N, K / 32]`) of each expert in turn, on any device; no
            reference is kept, so a generator that gives its tensors away frees them as it goes.
        layout: "sm90_ss" or "sm90_rs".
        num_experts: experts that `experts` yields.
        rows, columns: N and K.
        device: of the result; None is PyTorch's default.
        strict, progress: as for `pack_mxfp4`.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, layout or number of experts, or a row refused under `strict`.
    """
    tiles = tile_layout(layout)
    packed = _empty(num_experts, rows, columns, tiles, torch.empty(0, device=device).device, None)
    iterator = iter(experts)
    for expert in range(num_experts):
        pair = next(iterator, None)
        if pair is None:
            raise ValueError(f"experts: expected {num_experts}, got {expert}")
        packed.load_expert(expert, pair[0].to(packed.data.device), pair[1].to(packed.data.device), strict=strict)
        del pair
        if progress:
            progress(expert + 1, num_experts)
    if next(iterator, None) is not None:
        raise ValueError(f"experts: expected {num_experts}, got more")
    return packed


def canonical_buffer(
    num_experts: int, rows: int, columns: int, layout: str, *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Return uninitialised (codes, scales) in one storage that `pack_mxfp4(..., in_place=True)` can overwrite.

    Args:
        num_experts, rows, columns: E, N and K; K a multiple of 32.
        layout: that it will be packed for.
        device: None is PyTorch's default.
    """
    code_bytes = num_experts * rows * columns // 2
    scale_bytes = num_experts * rows * columns // MXFP4_GROUP
    size = max(code_bytes + scale_bytes, num_experts * tile_layout(layout).nbytes(rows, columns))
    storage = torch.empty(size, dtype=torch.uint8, device=device)
    codes = storage[:code_bytes].view(num_experts, rows, columns // 2)
    return codes, storage[code_bytes : code_bytes + scale_bytes].view(num_experts, rows, columns // MXFP4_GROUP)


def _empty(
    num_experts: int, rows: int, columns: int, layout: TileLayout, device: torch.device, data: Tensor | None
) -> PackedWeight:
    """Return a packed weight to be filled, over `data` if there is any."""
    row_blocks, k_blocks = layout.grid(rows, columns)
    shape = (num_experts, row_blocks, k_blocks, layout.block_bytes)
    none = torch.empty(0, dtype=torch.int64)
    table = SideTable(
        group_index=none,
        group_scales=none.to(torch.uint8),
        row_index=none,
        row_codes=torch.empty((0, columns // 2), dtype=torch.uint8),
        row_scales=torch.empty((0, columns // MXFP4_GROUP), dtype=torch.uint8),
    )
    return PackedWeight(
        layout=layout.name,
        version=layout.version,
        data=torch.empty(shape, dtype=torch.uint8, device=device) if data is None else data.view(shape),
        row_scale=torch.empty((num_experts, rows), device=device),
        rows=rows,
        columns=columns,
        side=[table] * num_experts,
        reports=[ExponentReport()] * num_experts,
    )


def _write_expert(packed: PackedWeight, expert: int, codes: Tensor, scales: Tensor) -> None:
    """Pack one expert, a chunk of rows at a time."""
    layout = tile_layout(packed.layout)
    sides, reports = [], []
    for first, last, part in _analysed(codes, scales, layout):
        blocks = packed.data[expert, first // layout.block_rows : -(-last // layout.block_rows)]
        layout.write(part.codes, part.exponents, blocks)
        packed.row_scale[expert, first:last] = part.row_scale
        sides.append((first, part.side))
        reports.append(part.report)
    packed.side[expert] = SideTable.concatenate(sides)
    packed.reports[expert] = ExponentReport.total(reports)


def _analysed(codes: Tensor, scales: Tensor, layout: TileLayout) -> Iterator[tuple[int, int, RelativeExponents]]:
    """Yield (first row, last row, relative exponents) of the chunks of one expert."""
    for first, last in _row_chunks(layout, codes.shape[0], codes.shape[1] * 2, codes.device):
        part = codes[first:last].contiguous()
        if part.data_ptr() % 8:
            part = part.clone()
        yield first, last, relative_exponents(part, scales[first:last].contiguous())


def _refuse_inexact(expert: int, codes: Tensor, scales: Tensor, layout: TileLayout) -> None:
    for first, _, part in _analysed(codes, scales, layout):
        if not part.report.exact:
            raise ValueError(
                f"strict: the scale exponents of expert {expert}, row {first + part.widest_row} span "
                f"{part.report.max_span}, and a packed row is exact up to a span of {MAX_EXPONENT}; "
                f"without strict its smallest groups are rounded and counted"
            )


def _row_chunks(layout: TileLayout, rows: int, columns: int, device: torch.device) -> list[tuple[int, int]]:
    """Return (first, last) rows of the parts to work on, whole blocks but for the end."""
    size = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, size // (layout.block_rows * columns // 2)) * layout.block_rows
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _check_mxfp4(codes: Tensor, scales: Tensor, shape: tuple[int, ...] | None) -> None:
    for name, tensor in (("codes", codes), ("scales", scales)):
        if tensor.dtype != torch.uint8:
            raise TypeError(f"{name}: expected torch.uint8, got {tensor.dtype}")
    if shape is not None and tuple(codes.shape) != shape:
        raise ValueError(f"codes: expected the shape {list(shape)}, got {list(codes.shape)}")
    *lead, rows, code_bytes = codes.shape
    if rows == 0 or code_bytes == 0 or code_bytes % GROUP_BYTES:
        raise ValueError(
            f"codes: expected rows of a positive multiple of {GROUP_BYTES} bytes ({MXFP4_GROUP} codes), "
            f"got {list(codes.shape)}"
        )
    expected = [*lead, rows, code_bytes // GROUP_BYTES]
    if list(scales.shape) != expected:
        raise ValueError(f"scales: expected the shape {expected}, got {list(scales.shape)}")
    if scales.device != codes.device:
        raise ValueError(f"scales: must be on {codes.device} as the codes are, got {scales.device}")


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _storage_as_packed(codes: Tensor, layout: TileLayout) -> Tensor:
    """Return the bytes of the storage of `codes` that the packed weight will take.

    Raises:
        ValueError: the codes are not contiguous or not aligned, or the storage ends too early.
    """
    if not codes.is_contiguous() or codes.data_ptr() % _ALIGNMENT:
        raise ValueError(f"in_place: codes must be contiguous and aligned to {_ALIGNMENT} bytes")
    needed = codes.shape[0] * layout.nbytes(codes.shape[1], codes.shape[2] * 2)
    room = codes.untyped_storage().nbytes() - codes.storage_offset()
    if room < needed:
        raise ValueError(
            f"in_place: the packed weights take {needed} bytes, but the storage of codes has {room}; allocate codes "
            f"and scales with canonical_buffer(), or hand over the experts one by one with pack_mxfp4_experts()"
        )
    return torch.empty(0, dtype=torch.uint8, device=codes.device).set_(
        codes.untyped_storage(), codes.storage_offset(), (needed,), (1,)
    )
