"""FP8 experts with a scale per 128 x 128 for the Hopper kernel that loads them by TMA: canonical rows.

`sm90_ss_fp8`: E4M3 `[E, N, K]` row-major and FP32 scales `[E, ceil(N / 128), ceil(K / 128)]`. TMA swizzles the rows on
their way into shared memory, permutes them in groups of 32 and puts zeros past the end of K, so there is nothing to
reorder: where N is a multiple of 32 and K of 16 (its pitch in bytes) a weight is packed as it stands, without a copy.
Other weights are padded with zeros, and so is each of several sections to whole blocks of 128 rows, because a tile has
one row of scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megamoe.kernels.formats import BLOCK

__all__ = ["FP8_LAYOUT", "FP8_VERSION", "PackedFp8Weight", "pack_fp8_block"]

FP8_LAYOUT = "sm90_ss_fp8"
FP8_VERSION = 1

_TMA_ROWS = 32  # permuted together
_TMA_PITCH = 16  # bytes; the rows of a tensor map lie at multiples of it


@dataclass
class PackedFp8Weight:
    """The FP8 experts of one projection.

    Attributes:
        layout, version: "sm90_ss_fp8" and the version of its bytes.
        data: float8_e4m3fn `[E, N padded, K padded]`, contiguous.
        block_scale: FP32 `[E, ceil(N padded / 128), ceil(K padded / 128)]`, contiguous; the scales that came in.
        rows, columns: N and K of the canonical weight.
        sections: parts of N that were padded each by itself.
    """

    layout: str
    version: int
    data: Tensor
    block_scale: Tensor
    rows: int
    columns: int
    sections: int

    @property
    def num_experts(self) -> int:
        """Experts, E."""
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors together."""
        return self.data.nbytes + self.block_scale.nbytes

    def require(self, name: str, layout: str, *, rows: int | None = None, columns: int | None = None) -> None:
        """Refuse a weight that the caller can't read.

        Args:
            name: of the weight, for the message.
            layout: that the caller reads, in its current version.
            rows, columns: N and K that the caller expects, or None.

        Raises:
            ValueError: packed for another layout or version, or another shape.
        """
        if self.layout != layout or self.version != FP8_VERSION:
            wanted = f"{layout} version {FP8_VERSION}" if layout == FP8_LAYOUT else layout
            raise ValueError(f"{name}: packed for {self.layout} version {self.version}, but this kernel reads {wanted}")
        for what, expected, got in (("rows", rows, self.rows), ("columns", columns, self.columns)):
            if expected is not None and expected != got:
                raise ValueError(f"{name}: expected {expected} {what}, got a weight packed with {got}")

    def unpack(self) -> tuple[Tensor, Tensor]:
        """Return the canonical (weights `[E, N, K]`, scales), byte for byte; views where nothing was padded."""
        by_section = self.data.view(torch.uint8).unflatten(1, (self.sections, -1))
        rows = self.rows // self.sections
        q = by_section[:, :, :rows, : self.columns].reshape(self.num_experts, self.rows, self.columns)
        return q.view(torch.float8_e4m3fn), self.block_scale


def pack_fp8_block(q: Tensor, scale: Tensor, *, sections: int = 1) -> PackedFp8Weight:
    """Pack the FP8 experts of one projection; `data` is `q` itself where nothing is padded.

    Args:
        q: float8_e4m3fn `[E, N, K]`.
        scale: FP32 `[E, sections * ceil(N / sections / 128), ceil(K / 128)]`.
        sections: equal parts of N whose scale blocks start anew: 2 for gate and up in one tensor, else 1.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that don't fit together.
    """
    if q.dtype != torch.float8_e4m3fn:
        raise TypeError(f"q: expected torch.float8_e4m3fn, got {q.dtype}")
    if scale.dtype != torch.float32:
        raise TypeError(f"scale: expected torch.float32, got {scale.dtype}")
    if q.dim() != 3 or 0 in q.shape[1:]:
        raise ValueError(f"q: expected [experts, N, K], got {list(q.shape)}")
    num_experts, rows, columns = q.shape
    if sections < 1 or rows % sections:
        raise ValueError(f"sections: must divide N = {rows}, got {sections}")
    section_rows = rows // sections
    expected = (num_experts, sections * -(-section_rows // BLOCK), -(-columns // BLOCK))
    if tuple(scale.shape) != expected:
        raise ValueError(f"scale: expected the shape {list(expected)}, got {list(scale.shape)}")
    data = q.contiguous()
    row_unit = BLOCK if sections > 1 else _TMA_ROWS
    if section_rows % row_unit or columns % _TMA_PITCH:
        by_section = data.view(torch.uint8).unflatten(1, (sections, -1))
        padded = F.pad(by_section, (0, -columns % _TMA_PITCH, 0, -section_rows % row_unit))
        data = padded.flatten(1, 2).view(torch.float8_e4m3fn)
    return PackedFp8Weight(FP8_LAYOUT, FP8_VERSION, data, scale.contiguous(), rows, columns, sections)
