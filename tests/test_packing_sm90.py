"""Packed SM90 layouts: bytes come back, and the device's decode arithmetic gives the exact values."""

from __future__ import annotations

import pytest
import torch

from megamoe.kernels.packing_sm90 import LAYOUTS, _weave, pack_mxfp4, unpack_mxfp4

MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def _values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    sign = 1 - 2 * (wide >> 3).double()
    factor = torch.exp2(scales.double() - 127)
    return MAGNITUDES[wide & 7] * sign * factor.repeat_interleave(32, -1)


def _byte_permute(low: int, high: int, selectors: int) -> int:
    table = (low | high << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(table[(selectors >> (4 * i)) & 7] for i in range(4)), "little")


def _decode_word(word: int, exponent: int) -> list[int]:
    """mma/decode_fp4.cuh in integers: 8 E4M3 bytes."""
    low = (0x14100800 + exponent * 0x08080800) & 0xFFFFFFFF
    high = (0x24201C18 + exponent * 0x08080808) & 0xFFFFFFFF
    magnitudes = word & 0x77777777
    first = _byte_permute(low, high, magnitudes & 0xFFFF) | (word & 0x80808080)
    second = _byte_permute(low, high, magnitudes >> 16) | ((word << 4) & 0x80808080)
    return list(first.to_bytes(4, "little")) + list(second.to_bytes(4, "little"))


@pytest.mark.parametrize("exponent", range(12))
def test_decode_is_exact_for_every_code_and_exponent(exponent: int) -> None:
    for start in (0, 8):
        codes = torch.arange(start, start + 8, dtype=torch.uint8)
        word = int(_weave(codes)) & 0xFFFFFFFF
        got = torch.tensor(_decode_word(word, exponent), dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        want = MAGNITUDES[(codes & 7).long()] * (1 - 2 * (codes >> 3).double()) * 2.0 ** (exponent - 5)
        assert torch.equal(got, want)
        assert torch.equal(torch.signbit(got), (codes >> 3).bool())


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("rows, k", [(128, 128), (320, 320), (64, 2880), (96, 32)])
def test_bytes_come_back(layout: str, rows: int, k: int) -> None:
    generator = torch.Generator().manual_seed(rows * k)
    codes = torch.randint(0, 256, (2, rows, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, (2, rows, k // 32), dtype=torch.uint8, generator=generator)
    codes[0, : rows // 2, :16] = 0x80  # zero groups, one of them negative, with any scale code
    codes[1] = 0  # an all-zero expert
    packed = pack_mxfp4(codes, scales, layout)
    got_codes, got_scales = unpack_mxfp4(packed)
    assert torch.equal(got_codes, codes)
    assert torch.equal(got_scales, scales)
    assert bool(packed.row_scales[scales.eq(255).any(-1)].isnan().all())
    normal = packed.row_scales[~packed.row_scales.isnan()]
    assert bool((normal >= torch.finfo(torch.float32).tiny).all())


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("span", [0, 11, 12, 14, 15])
def test_span_is_exact_up_to_eleven_and_counted_beyond(layout: str, span: int) -> None:
    generator = torch.Generator().manual_seed(span)
    codes = torch.randint(0, 256, (1, 128, 128), dtype=torch.uint8, generator=generator) | 0x11  # no zero group
    scales = torch.randint(100, 101 + span, (1, 128, 8), dtype=torch.uint8, generator=generator)
    scales[..., 0], scales[..., 1] = 100, 100 + span
    packed = pack_mxfp4(codes, scales, layout)
    assert packed.num_inexact == (0 if span <= 11 else 128)
    if span > 11:
        with pytest.raises(ValueError, match="strict: 128 of 128 rows"):
            pack_mxfp4(codes, scales, layout, strict=True)
        return
    assert packed.kept_rows.numel() == 0
    assert torch.equal(_emulate(packed.blocks[0], packed.row_scales[0], layout, 128, 256), _values(codes, scales)[0])


def _emulate(blocks: torch.Tensor, row_scales: torch.Tensor, layout: str, rows: int, k: int) -> torch.Tensor:
    """Walks the packed bytes as the kernels do: block, thread, register; written from policy.cuh alone."""
    out = torch.full((rows, k), float("nan"), dtype=torch.float64)
    decoded = {}
    for rb in range(blocks.shape[0]):
        for kb in range(blocks.shape[1]):
            raw = blocks[rb, kb].tolist()
            for thread in range(128):
                if layout == "sm90_ss":
                    j, c, b = thread // 8, thread % 8 // 2, thread % 2
                    row = rb * 128 + 32 * (j // 4) + 8 * c + 2 * (j % 4) + b
                    exponents = raw[8192 + 2 * thread] | raw[8192 + 2 * thread + 1] << 8
                    items = [
                        (row, 32 * q + 8 * i, 4, q * 2048 + thread * 16 + 4 * i, (exponents >> (4 * q)) & 15)
                        for q in range(4)
                        for i in range(4)
                    ]
                else:
                    warp, g, c = thread // 32, thread % 32 // 4, thread % 4
                    items = []
                    for step in range(4):
                        for hi in range(2):
                            row = rb * 64 + warp * 16 + 2 * g + hi
                            e = 4096 + (thread // 4) * 4 + 2 * hi
                            exponents = raw[e] | raw[e + 1] << 8
                            offset = (step // 2) * 2048 + thread * 16 + (2 * (step % 2) + hi) * 4
                            items.append((row, 32 * step + 4 * c, 16, offset, (exponents >> (4 * step)) & 15))
                for row, col, second, offset, exponent in items:
                    word = int.from_bytes(bytes(raw[offset : offset + 4]), "little")
                    key = (word, exponent)
                    if key not in decoded:
                        raw8 = torch.tensor(_decode_word(*key), dtype=torch.uint8)
                        decoded[key] = raw8.view(torch.float8_e4m3fn).double()
                    at = kb * 128 + col
                    out[row, at : at + 4] = decoded[key][:4]
                    out[row, at + second : at + second + 4] = decoded[key][4:]
    return out[: row_scales.numel()] * row_scales.double()[:, None]


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_rounds_to_nearest_even_when_the_span_is_too_wide(layout: str) -> None:
    codes = torch.zeros(1, 64, 32, dtype=torch.uint8)
    codes[..., :16] = 0x21  # 0.5, 1
    codes[..., 16:] = 0x53  # 1.5, 3
    scales = torch.tensor([[100 + 13, 100]], dtype=torch.uint8).expand(1, 64, 2).contiguous()
    packed = pack_mxfp4(codes, scales, layout)
    # base = 102, two steps above the second group: 1.5 / 4 = 0.375 -> 0.5; 3 / 4 = 0.75, a tie -> even code, 1
    rows = packed.blocks.shape[1] * (128 if layout == "sm90_ss" else 64)
    values = _emulate(packed.blocks[0], packed.row_scales[0], layout, rows, 128)[:, 32:64]
    want = torch.tensor([0.5, 1.0], dtype=torch.float64) * 2.0 ** (102 - 127)
    assert torch.equal(values, want.repeat(16).expand(64, 32))


def test_refuses_what_does_not_belong_together() -> None:
    with pytest.raises(ValueError, match="layout: must be one of"):
        pack_mxfp4(torch.zeros(1, 64, 64, dtype=torch.uint8), torch.zeros(1, 64, 4, dtype=torch.uint8), "sm100")
    with pytest.raises(ValueError, match="must agree"):
        pack_mxfp4(torch.zeros(1, 64, 64, dtype=torch.uint8), torch.zeros(1, 64, 5, dtype=torch.uint8), "sm90_ss")
