"""FP8 experts with a scale per 128 x 128 for the Hopper kernel that loads them by TMA: canonical rows, whole blocks.

`sm90_ss_fp8`: E4M3 `[E, N, K]` row-major and FP32 scales `[E, N / 128, K / 128]`, N and K multiples of 128. TMA
swizzles and permutes the rows on the way into shared memory, so there is nothing to reorder: a weight of whole blocks
is packed as it stands, without a copy, and others are padded with zeros.
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


@dataclass
class PackedFp8Weight:
    """The FP8 experts of one projection.

    Attributes:
        layout, version: "sm90_ss_fp8" and the version of its bytes.
        data: float8_e4m3fn `[E, N padded, K padded]`, contiguous.
        block_scale: FP32 `[E, N padded / 128, K padded / 128]`, contiguous; the scales that came in.
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
    """Pack the FP8 experts of one projection; `data` is `q` itself where its blocks are whole.

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
    if section_rows % BLOCK or columns % BLOCK:
        by_section = data.view(torch.uint8).unflatten(1, (sections, -1))
        padded = F.pad(by_section, (0, -columns % BLOCK, 0, -section_rows % BLOCK))
        data = padded.flatten(1, 2).view(torch.float8_e4m3fn)
    return PackedFp8Weight(FP8_LAYOUT, FP8_VERSION, data, scale.contiguous(), rows, columns, sections)
