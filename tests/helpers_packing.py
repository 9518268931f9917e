"""What the packing tests share: random MXFP4 bytes, their values in float64, the round trip."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamoe.kernels.packing import LAYOUTS, PackedWeight, tile_layout

LAYOUT_NAMES = sorted(LAYOUTS)
MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)

each_layout = pytest.mark.parametrize("layout", LAYOUT_NAMES)


def random_experts(
    num_experts: int, rows: int, columns: int, *, low: int = 118, high: int = 125, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return random codes and scale codes in [low, high)."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (num_experts, rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(low, high, (num_experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
    return codes, scales


def values64(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values of MXFP4 in float64, by arithmetic; NaN for scale code 255."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    sign = 1 - 2 * (nibbles >> 3)
    scale = torch.exp2(scales.double() - 127).masked_fill(scales == 255, float("nan"))
    return MAGNITUDES.to(codes.device)[nibbles & 7] * sign * scale.repeat_interleave(32, dim=-1)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Compare FP32 bit by bit (so that -0 isn't 0), NaN being NaN."""
    nan = expected.isnan()
    return torch.equal(actual.isnan(), nan) and torch.equal(
        actual.view(torch.int32).masked_fill(nan, 0), expected.view(torch.int32).masked_fill(nan, 0)
    )


def check_round_trip(packed: PackedWeight, codes: Tensor, scales: Tensor) -> None:
    """The original bytes come back, the packed exponents are legal, the row scales normal."""
    new_codes, new_scales = packed.unpack()
    assert torch.equal(new_codes, codes) and torch.equal(new_scales, scales)
    layout = tile_layout(packed.layout)
    nibbles = packed.data[..., layout.code_bytes :]
    assert int((nibbles & 15).max()) <= 11 and int((nibbles >> 4).max()) <= 11
    magnitude = packed.row_scale[~packed.row_scale.isnan()]
    assert bool((magnitude >= 2.0**-126).all()) and bool(magnitude.isfinite().all())
