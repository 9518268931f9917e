"""Queries and keys of the indexer in a number format: made, stored in pages, read back.

Shape letters: D row width, P pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megamoe.kernels import formats
from megamoe.kernels.indexer_quantize import hadamard_transform, quantize_indexer, write_indexer_cache

__all__ = ["IndexRows", "decode_rows", "encode_rows", "pool_of_rows", "read_rows", "write_rows"]

_WORD = 4  # bytes of a row's scales


class IndexRows(NamedTuple):
    """Rows of one format.

    Attributes:
        values: "none": `[..., D]` floating; "fp8": `[..., D]` E4M3; "mxfp4": `[..., D / 2]` uint8, two codes a byte.
        scales: "none": None; "fp8": `[...]` FP32; "mxfp4": `[...]` int32, one UE8M0 a byte.
    """

    values: Tensor
    scales: Tensor | None

    def part(self, at: slice) -> IndexRows:
        """Return some of the rows along the first dimension."""
        return IndexRows(self.values[at], None if self.scales is None else self.scales[at])


def encode_rows(x: Tensor, format: str, *, hadamard: bool) -> IndexRows:
    """Bring `[..., D]` floating to a format ("none", "fp8", "mxfp4"), turned by the Hadamard matrix first or not.

    Only "none" has a gradient.
    """
    if format == "none":
        return IndexRows(hadamard_transform(x).to(x.dtype) if hadamard else x, None)
    return IndexRows(*quantize_indexer(_quantisable(x), format, hadamard=hadamard))


def _quantisable(x: Tensor) -> Tensor:
    """Return rows as the quantisers take them: FP16, which they do not, is exact in FP32."""
    x = x.detach().contiguous()
    return x if x.dtype in (torch.float32, torch.bfloat16) else x.float()


def decode_rows(rows: IndexRows) -> Tensor:
    """Return `[..., D]`: FP32 for a quantised format, the values themselves otherwise."""
    values, scales = rows
    if scales is None:
        return values
    if values.dtype == torch.float8_e4m3fn:
        return values.float() * scales.unsqueeze(-1)
    exponents = scales.contiguous().view(torch.uint8).view(*scales.shape, _WORD)
    return formats.dequantize_mxfp4(values, exponents[..., : values.shape[-1] // 16].contiguous())


def pool_of_rows(format: str, width: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Return width and dtype of a cache's rows that hold index rows of `width` elements."""
    if format == "none":
        return width, dtype
    return (width if format == "fp8" else width // 2) + _WORD, torch.uint8


def write_rows(pool: Tensor, slots: Tensor, x: Tensor, format: str, *, hadamard: bool) -> None:
    """Encode rows `[N, D]` into a pool `[P, page, width]` at `slots` `[N]`: page number * page + place in it."""
    if format == "none":
        rows = encode_rows(x, format, hadamard=hadamard).values
        pool.flatten(0, 1).index_copy_(0, slots, rows.detach().to(pool.dtype))
    else:
        write_indexer_cache(_quantisable(x), pool.unsqueeze(2), slots, format, hadamard=hadamard)


def read_rows(pool: Tensor, slots: Tensor, format: str) -> IndexRows:
    """Return the rows at `slots` `[N]` of what `write_rows` wrote."""
    if format == "none":
        return IndexRows(pool.flatten(0, 1).index_select(0, slots), None)
    pages, page, width = pool.shape
    flat, split = pool.view(pages, page * width), page * (width - _WORD)
    which, place = slots // page, slots % page
    values = flat[:, :split].unflatten(1, (page, width - _WORD))[which, place]
    words = flat[:, split:].unflatten(1, (page, _WORD))[which, place]
    if format == "fp8":
        return IndexRows(values.view(torch.float8_e4m3fn), words.view(torch.float32).squeeze(-1))
    return IndexRows(values, words.view(torch.int32).squeeze(-1))
