"""Weight packing on a GPU gives the bytes that the CPU gives, in place too, and the original bytes come back."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from helpers_packing import each_layout, random_experts, same_bits

from megamoe.kernels.packing import (
    PackedWeight,
    canonical_buffer,
    pack_fp8_block,
    pack_mxfp4,
    pack_mxfp4_experts,
    simulate_decode,
)

pytestmark = pytest.mark.gpu

# (experts, rows, columns, lowest scale code, one above the highest): ordinary, wide rows, NaN scales, padding, large
CASES = [
    (2, 128, 256, 118, 125),
    (3, 600, 320, 100, 125),
    (2, 130, 96, 0, 256),
    (1, 65, 32, 250, 256),
    (2, 2880, 2880, 110, 124),
    (2, 4096, 7168, 118, 130),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}x{case[2]}-{case[3]}-{case[4]}")


def experts(case: tuple[int, int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random codes and scales, every third group of them zeros."""
    codes, scales = random_experts(*case[:3], low=case[3], high=case[4])
    codes.view(*scales.shape, 16)[:, :, ::3] &= 0x88
    return codes, scales


def same(there: PackedWeight, here: PackedWeight) -> None:
    assert there.data.is_cuda and torch.equal(there.data.cpu(), here.data)
    assert same_bits(there.row_scale.cpu(), here.row_scale)
    assert there.reports == here.reports
    for mine, other in zip(there.side, here.side, strict=True):
        for a, b in zip(astuple(mine), astuple(other), strict=True):
            assert a.device == b.device and torch.equal(a, b)


@each_layout
@each_case
def test_same_bytes(case: tuple[int, int, int, int, int], layout: str) -> None:
    codes, scales = experts(case)
    here = pack_mxfp4(codes, scales, layout)
    there = pack_mxfp4(codes.cuda(), scales.cuda(), layout)
    same(there, here)
    back = there.unpack()
    assert torch.equal(back[0].cpu(), codes) and torch.equal(back[1].cpu(), scales)
    assert same_bits(simulate_decode(there).cpu(), simulate_decode(here))


@each_layout
@each_case
def test_same_bytes_in_place_and_expert_by_expert(case: tuple[int, int, int, int, int], layout: str) -> None:
    codes, scales = experts(case)
    here = pack_mxfp4(codes, scales, layout)
    buffer = canonical_buffer(*case[:3], layout, device="cuda")
    buffer[0].copy_(codes)
    buffer[1].copy_(scales)
    there = pack_mxfp4(*buffer, layout, in_place=True)
    assert there.data.data_ptr() == buffer[0].data_ptr()
    same(there, here)
    pairs = zip(codes, scales, strict=True)
    size = {"num_experts": case[0], "rows": case[1], "columns": case[2]}
    same(pack_mxfp4_experts(pairs, layout, **size, device="cuda"), here)


@each_layout
def test_strict_refuses_the_same_row(layout: str) -> None:
    codes, scales = experts((2, 300, 128, 118, 125))
    scales[1, 277, 1], codes[1, 277] = 90, 0x11
    said = []
    for device in ("cpu", "cuda"):
        with pytest.raises(ValueError, match="strict: the scale exponents of expert 1, row 277 span") as caught:
            pack_mxfp4(codes.to(device), scales.to(device), layout, strict=True)
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("sections", [1, 2])
def test_fp8_blocks(sections: int) -> None:
    q = torch.randint(0, 127, (2, 320, 2880), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.rand(2, sections * -(-320 // sections // 128), 23)
    here, there = pack_fp8_block(q, scale, sections=sections), pack_fp8_block(q.cuda(), scale.cuda(), sections=sections)
    assert there.data.is_cuda and torch.equal(there.data.view(torch.uint8).cpu(), here.data.view(torch.uint8))
    for mine, other in zip(there.unpack(), here.unpack(), strict=True):
        assert torch.equal(mine.view(torch.uint8).cpu(), other.view(torch.uint8))
