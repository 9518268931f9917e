"""Experts in the packed layout `cpu`: what the C++ engine multiplies with.

A packed matrix holds the bytes of the canonical one in another order, in tiles of 64 weight rows and 32 columns; where
a dimension is no multiple of these, zeros are added. The FP32 scales of `fp8_block` stay as they are.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.config import MoESpec
from megamoe.kernels.cpu_engine import load, weight_format
from megamoe.kernels.weights import ExpertLayout, ExpertWeights, Progress

__all__ = ["CpuLayout", "PackedExperts", "pack_experts", "unpack_experts"]


class CpuLayout(ExpertLayout):
    """The layout `cpu`. FP32 scales of `fp8_block` keep their canonical shape."""

    layout_id = "cpu"

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or os.cpu_count() or 1

    @property
    def version(self) -> int:
        version: int = load().PACKED_VERSION
        return version

    def pack(
        self, name: str, codes: Tensor, scale: Tensor | None, spec: MoESpec, *, progress: Progress | None = None
    ) -> tuple[Tensor, Tensor | None]:
        shape, num = _shape(name, spec, codes.dtype), codes.shape[0]
        packed = _new(num, shape.code_bytes // codes.itemsize, dtype=codes.dtype)
        packed_scale = None if scale is None else scale.detach()
        if spec.weight_format == "mxfp4":
            packed_scale = _new(num, shape.scale_bytes, dtype=torch.uint8)
        self._convert(load().pack, shape, (codes, scale), (packed, packed_scale), progress)
        return packed, packed_scale

    def unpack(
        self, name: str, packed: Tensor, scale: Tensor | None, spec: MoESpec, *, progress: Progress | None = None
    ) -> tuple[Tensor, Tensor | None]:
        shape, num = _shape(name, spec, packed.dtype), packed.shape[0]
        rows, columns = (2 * spec.intermediate, spec.hidden) if name == "w13" else (spec.hidden, spec.intermediate)
        mxfp4 = spec.weight_format == "mxfp4"
        codes = _new(num, rows, columns // 2 if mxfp4 else columns, dtype=packed.dtype)
        canonical_scale = None if scale is None else scale.detach()
        if mxfp4:
            canonical_scale = _new(num, rows, columns // 32, dtype=torch.uint8)
        self._convert(load().unpack, shape, (packed, scale), (codes, canonical_scale), progress)
        return codes, canonical_scale

    def _convert(
        self,
        convert: Callable[..., None],
        shape: Any,
        source: tuple[Tensor, Tensor | None],
        target: tuple[Tensor, Tensor | None],
        progress: Progress | None,
    ) -> None:
        """Convert matrix by matrix, a few at a time so that `progress` hears of them."""
        for tensor in source:
            if tensor is not None and tensor.numel() and (tensor.device.type != "cpu" or not tensor.data_ptr()):
                raise ValueError(
                    f"experts: the layout cpu is made of plain CPU tensors, got {type(tensor).__name__} on "
                    f"{tensor.device}; call unpack_() before sharding or moving a layer"
                )
        num = source[0].shape[0]
        flat = [None if tensor is None else _bytes(tensor) for tensor in (*source, *target)]
        strides = [0 if f is None else f.numel() // max(num, 1) for f in flat]
        step = max(num, 1) if progress is None else self.num_threads
        for first in range(0, num, step):
            count = min(step, num - first)
            addresses = [0 if f is None else f.data_ptr() + first * s for f, s in zip(flat, strides, strict=True)]
            convert(shape, count, *addresses, self.num_threads)
            if progress is not None:
                progress(first + count, num)


@dataclass
class PackedExperts:
    """One rank's experts as the engine takes them.

    Attributes:
        layout_id, version: of the layout; an engine refuses any other than its own.
        spec: the numbers of the op that they were packed for.
        num_experts: experts of this rank.
        param_dtype: of weights that are not quantised.
        w13, w2: packed codes or values, `[E, n]`.
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


def pack_experts(experts: ExpertWeights, spec: MoESpec, *, num_threads: int | None = None) -> PackedExperts:
    """Return canonical experts packed, in new memory.

    Args:
        experts: CPU tensors.
        spec: the op's numbers.
        num_threads: threads that share the work; None = all cores.

    Raises:
        ValueError: tensors that do not fit the op.
    """
    experts.validate(spec, experts.num_experts)
    layout = CpuLayout(num_threads)
    w13, w13_scale = layout.pack("w13", experts.w13, experts.w13_scale, spec)
    w2, w2_scale = layout.pack("w2", experts.w2, experts.w2_scale, spec)
    b13, b2 = (None if b is None else b.detach().float().contiguous() for b in (experts.b13, experts.b2))
    return as_packed(ExpertWeights(w13, w2, w13_scale, w2_scale, b13, b2, experts.format), spec)


def as_packed(experts: ExpertWeights, spec: MoESpec) -> PackedExperts:
    """Return matrices that are packed already, and FP32 biases, as the engine takes them; nothing is copied.

    Raises:
        ValueError: sizes that are not those of the layout `cpu`.
    """
    for name in ("w13", "w2"):
        codes, scale = getattr(experts, name), getattr(experts, f"{name}_scale")
        shape, num = _shape(name, spec, codes.dtype), experts.num_experts
        scale_bytes = 0 if scale is None else scale.nbytes
        if not codes.is_contiguous() or (codes.nbytes, scale_bytes) != (
            num * shape.code_bytes,
            num * shape.scale_bytes,
        ):
            raise ValueError(
                f"{name}: {num} experts in the layout {CpuLayout.layout_id} are {num * shape.code_bytes} bytes and "
                f"{num * shape.scale_bytes} of scales, got {codes.nbytes} and {scale_bytes}; they were packed for "
                "another layout or op"
            )
    return PackedExperts(
        CpuLayout.layout_id,
        load().PACKED_VERSION,
        spec,
        experts.num_experts,
        experts.w13.dtype,
        experts.w13,
        experts.w2,
        experts.w13_scale,
        experts.w2_scale,
        experts.b13,
        experts.b2,
    )


def unpack_experts(packed: PackedExperts, *, num_threads: int | None = None) -> ExpertWeights:
    """Return the canonical experts in new memory, byte for byte; biases are those given, in FP32."""
    refuse_other_layout(packed)
    layout, spec = CpuLayout(num_threads), packed.spec
    w13, w13_scale = layout.unpack("w13", packed.w13, packed.w13_scale, spec)
    w2, w2_scale = layout.unpack("w2", packed.w2, packed.w2_scale, spec)
    return ExpertWeights(w13, w2, w13_scale, w2_scale, packed.b13, packed.b2, spec.weight_format)


def refuse_other_layout(packed: PackedExperts) -> None:
    """Raise `ValueError` unless experts are packed for this engine."""
    if (packed.layout_id, packed.version) != (CpuLayout.layout_id, load().PACKED_VERSION):
        raise ValueError(
            f"experts: packed for the layout {packed.layout_id} version {packed.version}, this engine reads "
            f"{CpuLayout.layout_id} version {load().PACKED_VERSION}; pack the canonical weights again"
        )


@functools.lru_cache(maxsize=256)
def _shape(name: str, spec: MoESpec, param_dtype: torch.dtype) -> Any:
    form = weight_format(spec, param_dtype)
    parts, rows, depth = (2, spec.intermediate, spec.hidden) if name == "w13" else (1, spec.hidden, spec.intermediate)
    return load().PackedShape(parts, rows, depth, form)


def _new(*shape: int, dtype: torch.dtype) -> Tensor:
    # an ordinary tensor even under inference_mode: it may become a parameter
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype)


def _bytes(tensor: Tensor) -> Tensor:
    # a copy where the tensor is not contiguous, the tensor itself where it is
    return tensor.detach().contiguous().view(torch.uint8).reshape(-1)
