"""Experts in the packed layout `cpu`: what the C++ engine multiplies with.

A packed matrix holds the bytes of the canonical one in another order, in tiles of 64 weight rows and 32 columns; where
a dimension is no multiple of these, zeros are added. The FP32 scales of `fp8_block` stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.config import MoESpec
from megamoe.kernels.cpu_engine import load, weight_format
from megamoe.kernels.weights import ExpertWeights

__all__ = ["LAYOUT_ID", "PackedExperts", "can_pack_in_place", "pack_experts", "unpack_experts"]

LAYOUT_ID = "cpu"

Progress = Callable[[int, int], None]


@dataclass
class PackedExperts:
    """One rank's experts, packed.

    Attributes:
        layout_id, version: of the layout; an engine refuses any other than its own.
        spec: the numbers of the op that they were packed for.
        num_experts: experts of this rank.
        param_dtype: of weights that are not quantised.
        w13, w2: packed codes or values, uint8, flat.
        w13_scale, w2_scale: packed (MXFP4) or canonical (fp8_block) scales, or None.
        b13, b2: FP32 `[E, 2I]`, `[E, H]`, or None.
    """

    layout_id: str
    version: int
    spec: MoESpec
    num_experts: int
    param_dtype: torch.dtype
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None
    w2_scale: Tensor | None
    b13: Tensor | None
    b2: Tensor | None

    def addresses(self) -> list[int]:
        """Return the addresses that the engine takes: w13, its scales, w2, its scales, b13, b2; 0 for None."""
        tensors = (self.w13, self.w13_scale, self.w2, self.w2_scale, self.b13, self.b2)
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _shapes(spec: MoESpec, param_dtype: torch.dtype) -> tuple[Any, Any]:
    host, form = load(), weight_format(spec, param_dtype)
    return host.PackedShape(2, spec.intermediate, spec.hidden, form), host.PackedShape(
        1, spec.hidden, spec.intermediate, form
    )


def can_pack_in_place(spec: MoESpec, param_dtype: torch.dtype) -> bool:
    """Return whether packed and canonical tensors have the same sizes: H and I multiples of 64."""
    return all(shape.fits_in_place for shape in _shapes(spec, param_dtype))


def pack_experts(
    experts: ExpertWeights,
    spec: MoESpec,
    *,
    in_place: bool = False,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> PackedExperts:
    """Pack canonical experts.

    Args:
        experts: contiguous CPU tensors.
        spec: the op's numbers.
        in_place: overwrite the tensors' own memory; the canonical values are then gone until `unpack_experts`.
        num_threads: threads that share the work; None = all cores.
        progress: called with (matrices done, matrices in all).

    Raises:
        ValueError: in place, with sizes that need padding.
    """
    host = load()
    num = experts.num_experts
    experts.validate(spec, num)
    dtype = experts.w13.dtype
    if in_place and not can_pack_in_place(spec, dtype):
        raise ValueError(
            f"in_place: hidden and intermediate must be multiples of 64, got {spec.hidden} and {spec.intermediate}"
        )
    out: dict[str, Tensor | None] = {}
    total, done = 2 * num, 0
    for name, shape in zip(("w13", "w2"), _shapes(spec, dtype), strict=True):
        codes, scale = getattr(experts, name), getattr(experts, f"{name}_scale")
        packed = _bytes(codes) if in_place else torch.empty(num * shape.code_bytes, dtype=torch.uint8)
        packed_scale = scale
        if scale is not None and spec.weight_format == "mxfp4" and not in_place:
            packed_scale = torch.empty(num * shape.scale_bytes, dtype=torch.uint8)
        _convert(host.pack, shape, num, (codes, scale), (packed, packed_scale), num_threads, done, total, progress)
        out[name], out[f"{name}_scale"] = packed, packed_scale
        done += num
    b13, b2 = (None if b is None else b.detach().float().contiguous() for b in (experts.b13, experts.b2))
    return PackedExperts(
        LAYOUT_ID,
        host.PACKED_VERSION,
        spec,
        num,
        dtype,
        b13=b13,
        b2=b2,
        **out,  # type: ignore[arg-type]
    )


def unpack_experts(
    packed: PackedExperts, *, num_threads: int | None = None, progress: Progress | None = None
) -> ExpertWeights:
    """Return the canonical experts in new memory, byte for byte; biases are those given, in FP32."""
    host = load()
    refuse_other_layout(packed)
    spec, num = packed.spec, packed.num_experts
    out: dict[str, Tensor | None] = {}
    done = 0
    for name, shape in zip(("w13", "w2"), _shapes(spec, packed.param_dtype), strict=True):
        rows, columns = (2 * spec.intermediate, spec.hidden) if name == "w13" else (spec.hidden, spec.intermediate)
        width = columns // 2 if spec.weight_format == "mxfp4" else columns
        codes = torch.empty(num, rows, width, dtype=packed.param_dtype)
        scale = getattr(packed, f"{name}_scale")
        if spec.weight_format == "mxfp4":
            scale = torch.empty(num, rows, columns // 32, dtype=torch.uint8)
        source = (getattr(packed, name), getattr(packed, f"{name}_scale"))
        _convert(host.unpack, shape, num, source, (codes, scale), num_threads, done, 2 * num, progress)
        out[name], out[f"{name}_scale"] = codes, scale
        done += num
    return ExpertWeights(**out, b13=packed.b13, b2=packed.b2, format=spec.weight_format)  # type: ignore[arg-type]


def refuse_other_layout(packed: PackedExperts) -> None:
    """Raise `ValueError` unless experts are packed for this engine."""
    if (packed.layout_id, packed.version) != (LAYOUT_ID, load().PACKED_VERSION):
        raise ValueError(
            f"experts: packed for the layout {packed.layout_id} version {packed.version}, this engine reads "
            f"{LAYOUT_ID} version {load().PACKED_VERSION}; pack the canonical weights again"
        )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.uint8).reshape(-1)


def _convert(
    convert: Callable[..., None],
    shape: Any,
    num: int,
    source: tuple[Tensor, Tensor | None],
    target: tuple[Tensor, Tensor | None],
    num_threads: int | None,
    done: int,
    total: int,
    progress: Progress | None,
) -> None:
    """Convert matrix by matrix, a few at a time so that `progress` hears of them."""
    threads = num_threads or os.cpu_count() or 1
    pairs = [None if tensor is None else _bytes(tensor) for tensor in (*source, *target)]
    strides = [0 if flat is None else flat.numel() // max(num, 1) for flat in pairs]
    step = num if progress is None else threads
    for first in range(0, num, max(step, 1)):
        count = min(step, num - first)
        addresses = [0 if p is None else p.data_ptr() + first * s for p, s in zip(pairs, strides, strict=True)]
        convert(shape, count, *addresses, threads)
        if progress is not None:
            progress(done + first + count, total)
