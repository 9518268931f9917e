"""The canonical expert weights of one rank, in three number formats.

Shape letters: E local experts, I intermediate, H hidden.

| tensor | none | fp8_block | mxfp4 |
|---|---|---|---|
| w13 | BF16 or FP32 `[E, 2I, H]` | float8_e4m3fn `[E, 2I, H]` | uint8 `[E, 2I, H/2]` |
| w13_scale | - | FP32 `[E, 2 ceil(I/128), ceil(H/128)]` | uint8 `[E, 2I, H/32]` |
| w2 | as w13, `[E, H, I]` | float8_e4m3fn `[E, H, I]` | uint8 `[E, H, I/2]` |
| w2_scale | - | FP32 `[E, ceil(H/128), ceil(I/128)]` | uint8 `[E, H, I/32]` |

Rows of w13: all of gate, then all of up. The scale blocks of fp8_block start anew with up, so that no block spans both
halves where I is no multiple of 128. Biases, where there are any: b13 `[E, 2I]` and b2 `[E, H]`, BF16 or FP32.

A backend may read w13, w2 and their scales in an order of its own, an `ExpertLayout`: two-dimensional tensors, one row
of the same bytes and dtype per expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megamoe.config import MoESpec
from megamoe.config_sections import WEIGHT_FORMATS
from megamoe.errors import ConfigError
from megamoe.kernels.formats import (
    BLOCK,
    MXFP4_GROUP,
    dequantize_e4m3_weight,
    dequantize_mxfp4,
    quantize_e4m3_weight,
    quantize_mxfp4,
)

__all__ = ["WEIGHT_FORMATS", "ExpertLayout", "ExpertWeights", "Progress", "quantize_experts"]

Progress = Callable[[int, int], None]  # called with (matrices done, matrices in all)

_PLAIN = (torch.bfloat16, torch.float32)
_FP32 = (torch.float32,)
_UINT8 = (torch.uint8,)
_E4M3 = (torch.float8_e4m3fn,)


@dataclass
class ExpertWeights:
    """The experts of one rank in the canonical layout (see the table above); nothing is copied or checked here.

    Attributes:
        w13: gate and up projections, `[E, 2I, H]` or codes.
        w2: down projections, `[E, H, I]` or codes.
        w13_scale, w2_scale: scales of a quantised format, else None.
        b13, b2: biases `[E, 2I]` and `[E, H]`, or None.
        format: "none", "fp8_block" or "mxfp4".
    """

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    b13: Tensor | None = None
    b2: Tensor | None = None
    format: str = "none"

    @property
    def num_experts(self) -> int:
        """Local experts, E."""
        return self.w13.shape[0]

    @property
    def packed(self) -> bool:
        """Whether the matrices are in some backend's layout instead of the canonical one."""
        return self.w13.dim() == 2

    def require_canonical(self, reader: str) -> None:
        """Raise `ValueError` when the matrices are packed; `reader` is who cannot read them."""
        if self.packed:
            raise ValueError(
                f"weights: packed for another backend, {reader} reads the canonical layout; pass a layer's "
                "experts.weights(), or call its unpack_()"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for _, tensor in self._tensors())

    def select(self, first: int, last: int) -> ExpertWeights:
        """Return the experts `first` to `last`, the last one excluded, as views.

        Raises:
            ValueError: not a range within this rank's experts.
        """
        if not 0 <= first <= last <= self.num_experts:
            raise ValueError(f"first, last: expected a range within 0..{self.num_experts}, got {first}..{last}")
        return ExpertWeights(format=self.format, **{name: tensor[first:last] for name, tensor in self._tensors()})

    def dequantize(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return (w13 `[E, 2I, H]`, w2 `[E, H, I]`) as values; biases are values already.

        Raises:
            ConfigError: an unknown format.
            ValueError, TypeError: codes and scales that don't fit together.
        """
        _check_format(self.format)
        self.require_canonical("dequantize")
        if self.format == "none":
            return self.w13.to(dtype), self.w2.to(dtype)
        if self.w13_scale is None or self.w2_scale is None:
            raise ValueError(f"w13_scale, w2_scale: the format {self.format} needs both, got None")
        if self.format == "mxfp4":
            w13 = dequantize_mxfp4(self.w13, self.w13_scale)
            return w13.to(dtype), dequantize_mxfp4(self.w2, self.w2_scale).to(dtype)
        halves = zip(_halves(self.w13), _halves(self.w13_scale), strict=True)
        w13 = torch.cat([dequantize_e4m3_weight(codes, scale) for codes, scale in halves], dim=-2)
        return w13.to(dtype), dequantize_e4m3_weight(self.w2, self.w2_scale).to(dtype)

    def validate(self, spec: MoESpec, num_local: int) -> None:
        """Check format, shapes, dtypes, strides and devices against what an op was built for.

        Args:
            spec: the numbers of the op.
            num_local: experts that this rank owns.

        Raises:
            ValueError: one sentence: which tensor, what is expected, what came.
        """
        if self.format != spec.weight_format:
            raise ValueError(f"format: expected {spec.weight_format}, got {self.format}")
        self.require_canonical("the check of shapes")
        expected = _expected(spec, num_local)
        for name in ("w13", "w2", "w13_scale", "w2_scale", "b13", "b2"):
            tensor = getattr(self, name)
            if name not in expected:
                if tensor is not None:
                    why = f"expert_bias={spec.expert_bias}" if name in ("b13", "b2") else f"the format {self.format}"
                    raise ValueError(f"{name}: expected None with {why}, got {_show(tensor)}")
                continue
            shape, dtypes = expected[name]
            names = " or ".join(_dtype_name(dtype) for dtype in dtypes)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
                raise ValueError(f"{name}: expected {names} {list(shape)}, got {_show(tensor)}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: must be contiguous, got the strides {list(tensor.stride())}")
            if tensor.device != self.w13.device:
                raise ValueError(f"{name}: must be on {self.w13.device} as w13 is, got {tensor.device}")
        if self.w13.dtype != self.w2.dtype:
            raise ValueError(f"w2: expected {_dtype_name(self.w13.dtype)} as w13 is, got {_dtype_name(self.w2.dtype)}")

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in ("w13", "w2", "w13_scale", "w2_scale", "b13", "b2"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor


class ExpertLayout(ABC):
    """A packed order of the expert matrices. Stateless; matrices are packed one by one, so that each canonical tensor
    can go before the next is packed.

    Attributes:
        layout_id, version: what a reader compares with its own.
    """

    layout_id: ClassVar[str]

    @property
    @abstractmethod
    def version(self) -> int: ...

    @abstractmethod
    def pack(
        self, name: str, codes: Tensor, scale: Tensor | None, spec: MoESpec, *, progress: Progress | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return canonical `name` ("w13" or "w2") and its scales packed, in new memory: `[E, n]` of the same dtypes."""

    @abstractmethod
    def unpack(
        self, name: str, packed: Tensor, scale: Tensor | None, spec: MoESpec, *, progress: Progress | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Undo `pack`, byte for byte, in new memory."""


def quantize_experts(w13: Tensor, w2: Tensor, b13: Tensor | None, b2: Tensor | None, format: str) -> ExpertWeights:
    """Bring experts into a number format, one expert at a time so that temporaries stay small.

    Args:
        w13: `[E, 2I, H]`, gate rows first, FP32, BF16 or FP16.
        w2: `[E, H, I]`.
        b13, b2: biases `[E, 2I]`, `[E, H]`, or None; FP32 in a quantised format.
        format: "none" (the tensors are taken as they are), "fp8_block" or "mxfp4" (H and I multiples of 32).

    Raises:
        ConfigError: an unknown format.
        ValueError, TypeError: shapes or dtypes that don't fit.
    """
    _check_format(format)
    experts, rows, hidden = _dims("w13", w13)
    if rows % 2 or tuple(w2.shape) != (experts, hidden, rows // 2):
        raise ValueError(f"w13, w2: expected [E, 2I, H] and [E, H, I], got {list(w13.shape)} and {list(w2.shape)}")
    if format == "none":
        return ExpertWeights(w13, w2, b13=b13, b2=b2, format=format)
    matrix_w13, matrix_w2 = (_fp8_w13, quantize_e4m3_weight) if format == "fp8_block" else (quantize_mxfp4,) * 2
    q13, s13 = _each(matrix_w13, w13)
    q2, s2 = _each(matrix_w2, w2)
    bias13, bias2 = (None if bias is None else bias.detach().float() for bias in (b13, b2))
    return ExpertWeights(q13, q2, s13, s2, bias13, bias2, format)


def _fp8_w13(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise one `[2I, H]` matrix, gate and up each in blocks of their own."""
    (gate, gate_scale), (up, up_scale) = (quantize_e4m3_weight(half) for half in _halves(w))
    return torch.cat([gate, up]), torch.cat([gate_scale, up_scale])


def _each(quantize: Callable[[Tensor], tuple[Tensor, Tensor]], w: Tensor) -> tuple[Tensor, Tensor]:
    """Apply `quantize` to each matrix of `[E, N, K]` and stack codes and scales."""
    if w.shape[0] == 0:
        codes, scale = quantize(w.new_zeros(w.shape[1:]))
        return codes.new_empty((0, *codes.shape)), scale.new_empty((0, *scale.shape))
    pairs = [quantize(matrix) for matrix in w]
    return torch.stack([codes for codes, _ in pairs]), torch.stack([scale for _, scale in pairs])


def _halves(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of gate and of up, or their scales."""
    half = w.shape[-2] // 2
    return w[..., :half, :], w[..., half:, :]


def _expected(spec: MoESpec, num_local: int) -> dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]:
    """Return name -> (shape, dtypes) of the tensors that must be there."""
    e, i, h = num_local, spec.intermediate, spec.hidden
    result: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]
    if spec.weight_format == "mxfp4":
        result = {
            "w13": ((e, 2 * i, h // 2), _UINT8),
            "w2": ((e, h, i // 2), _UINT8),
            "w13_scale": ((e, 2 * i, h // MXFP4_GROUP), _UINT8),
            "w2_scale": ((e, h, i // MXFP4_GROUP), _UINT8),
        }
    elif spec.weight_format == "fp8_block":
        i_blocks, h_blocks = -(-i // BLOCK), -(-h // BLOCK)
        result = {
            "w13": ((e, 2 * i, h), _E4M3),
            "w2": ((e, h, i), _E4M3),
            "w13_scale": ((e, 2 * i_blocks, h_blocks), _FP32),
            "w2_scale": ((e, h_blocks, i_blocks), _FP32),
        }
    else:
        result = {"w13": ((e, 2 * i, h), _PLAIN), "w2": ((e, h, i), _PLAIN)}
    if spec.expert_bias:
        result |= {"b13": ((e, 2 * i), _PLAIN), "b2": ((e, h), _PLAIN)}
    return result


def _dims(name: str, w: Tensor) -> tuple[int, int, int]:
    if w.dim() != 3:
        raise ValueError(f"{name}: expected three dimensions, got {list(w.shape)}")
    return w.shape[0], w.shape[1], w.shape[2]


def _check_format(format: str) -> None:
    if format not in WEIGHT_FORMATS:
        raise ConfigError(f"format: must be one of {', '.join(WEIGHT_FORMATS)}, got {format!r}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _show(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{_dtype_name(tensor.dtype)} {list(tensor.shape)}"
