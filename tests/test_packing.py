"""Weight packing: what a kernel decodes is exact, or rounded and counted, or refused (case C10)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers_packing import (
    LAYOUT_NAMES,
    MAGNITUDES,
    check_round_trip,
    each_layout,
    random_experts,
    same_bits,
    values64,
)
from torch import Tensor

import megamoe.kernels
from megamoe.kernels.formats import dequantize_mxfp4, quantize_mxfp4
from megamoe.kernels.packing import pack_mxfp4, simulate_decode
from megamoe.kernels.packing.decode import decode_words

ALL_CODES = torch.tensor([low | (low + 1) << 4 for low in range(0, 16, 2)] * 2, dtype=torch.uint8)  # a group of 32
C10_SCALES = (0, 1, 103, 127, 128, 254, 255)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- decoding ---


def test_every_code_at_every_exponent_decodes_exactly() -> None:
    word = torch.tensor([0, 0])
    for first, start in ((0, 0), (1, 8)):  # codes 0..7 and 8..15, woven by the rule
        for i in range(8):
            code = start + i
            word[first] |= (code & 7) << (4 * i) | (code >> 3) << (8 * i + 7 if i < 4 else 8 * (i - 4) + 3)
    for exponent in range(12):
        registers = torch.stack(decode_words(word, torch.tensor(exponent)), dim=-1).flatten()
        decoded = torch.stack([registers >> (8 * i) & 255 for i in range(4)], dim=-1).flatten()
        actual = decoded.to(torch.uint8).view(torch.float8_e4m3fn).double()
        expected = torch.cat((MAGNITUDES, -MAGNITUDES)) * 2.0 ** (exponent - 5)
        assert torch.equal(actual, expected) and torch.equal(actual.signbit(), expected.signbit()), exponent


@each_layout
@pytest.mark.parametrize("top", [0, 1, 7, 11, 12, 103, 127, 128, 253, 254])
def test_a_row_of_every_exponent_is_exact(layout: str, top: int) -> None:
    scales = torch.arange(max(top - 11, 0), top + 1, dtype=torch.uint8).view(1, 1, -1)
    codes = ALL_CODES.repeat(scales.shape[-1]).view(1, 1, -1)
    packed = pack_mxfp4(codes, scales, layout, strict=True)
    assert same_bits(simulate_decode(packed), dequantize_mxfp4(codes, scales))
    assert packed.report.max_span == min(top, 11) and packed.side[0].nbytes == 0
    check_round_trip(packed, codes, scales)


@each_layout
def test_scale_codes_of_case_c10(layout: str) -> None:
    scales = torch.tensor(C10_SCALES, dtype=torch.uint8).view(1, -1, 1).repeat(1, 1, 4)
    codes = ALL_CODES.repeat(4).expand(1, len(C10_SCALES), -1)
    packed = pack_mxfp4(codes, scales, layout, strict=True)
    decoded = simulate_decode(packed)
    assert same_bits(decoded, dequantize_mxfp4(codes, scales))
    assert packed.report.nan_rows == 1 and packed.report.exact
    assert packed.row_scale[0, : len(C10_SCALES)].isnan().tolist() == [code == 255 for code in C10_SCALES]
    check_round_trip(packed, codes, scales)


@each_layout
def test_one_nan_scale_makes_its_whole_row_nan(layout: str) -> None:
    codes, scales = random_experts(2, 70, 160)
    scales[1, 3, 2] = 255
    codes[1, 3, 32:48] = 0  # 0 * NaN is NaN too
    packed = pack_mxfp4(codes, scales, layout, strict=True)
    decoded = simulate_decode(packed)
    nan_rows = torch.zeros(2, 70, dtype=torch.bool)
    nan_rows[1, 3] = True
    assert torch.equal(decoded.isnan().all(-1), nan_rows) and torch.equal(decoded.isnan().any(-1), nan_rows)
    assert same_bits(decoded[~nan_rows], dequantize_mxfp4(codes, scales)[~nan_rows])
    check_round_trip(packed, codes, scales)


# --- rows that span too much ---


def wide_rows(span: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return one expert of 40 rows, some of which span `span` exponents and the others at most 5."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (1, 40, 128), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 126, (1, 40, 8), dtype=torch.uint8, generator=generator)
    for row in range(0, 40, 3):
        scales[0, row] = torch.randint(120 - span, 121, (8,), dtype=torch.uint8, generator=generator)
        scales[0, row, row % 8] = 120
        scales[0, row, (row + 3) % 8] = 120 - span
        codes[0, row, 16 * ((row + 5) % 8) :][:16] &= 0x88  # a group of zeros
    return codes, scales


@each_layout
@pytest.mark.parametrize("span", [11, 12, 14, 15, 40])
def test_wide_rows_are_rounded_and_counted(layout: str, span: int) -> None:
    codes, scales = wide_rows(span, seed=span)
    packed = pack_mxfp4(codes, scales, layout)
    decoded = simulate_decode(packed).double()[0]
    original, codes_used = values64(codes, scales)[0], scales[0].long()

    # independent count: the grid of a group is that of its own scale or, if larger, of the largest minus 11
    used = (original.view(40, 8, 32) != 0).any(-1)
    top = torch.where(used, codes_used, -1).amax(-1, keepdim=True)
    bottom = torch.where(used, codes_used, 999).amin(-1, keepdim=True)
    too_small = used & (codes_used < top - 11)
    unit = torch.exp2(torch.maximum(codes_used, top - 11).double() - 127).repeat_interleave(32, -1)
    nearest = (original.abs() / unit)[..., None].sub(MAGNITUDES).abs()
    tied = nearest == nearest.amin(-1, keepdim=True)
    choice = torch.where(tied, torch.tensor([0, 10, 1, 11, 2, 12, 3, 13]), 99).argmin(-1)  # even codes first
    expected = MAGNITUDES[choice] * unit * original.sign()

    assert torch.equal(decoded, expected)
    report = packed.report
    assert report.inexact_rows == int((top - bottom > 11).sum()) == (0 if span == 11 else 14)
    assert report.inexact_groups == int(too_small.sum())
    assert report.changed_elements == int((expected != original).sum())
    assert report.max_span == int((top - bottom).max()) == span
    assert (report.changed_elements > 0) == (span > 11)
    kept = ~too_small.repeat_interleave(32, -1)
    assert torch.equal(decoded[kept], original[kept])
    nibbles = torch.stack((codes & 8, codes >> 4 & 8), dim=-1).flatten(-2)[0]
    assert torch.equal(decoded.signbit(), nibbles != 0)  # never a flipped sign, not even of a zero
    check_round_trip(packed, codes, scales)


@each_layout
@pytest.mark.parametrize("span", [12, 14, 15])
def test_strict_refuses_wide_rows_by_name(layout: str, span: int) -> None:
    codes, scales = random_experts(3, 300, 128)
    scales[2, 277, 0] = 125
    scales[2, 277, 3] = 125 - span
    codes[2, 277] = 0x11
    text = (
        f"strict: the scale exponents of expert 2, row 277 span {span}, and a packed row is exact up to a span of 11; "
        "without strict its smallest groups are rounded and counted"
    )
    with pytest.raises(ValueError) as caught:
        pack_mxfp4(codes, scales, layout, strict=True)
    assert str(caught.value) == text
    report = pack_mxfp4(codes, scales, layout).report
    assert str(report).startswith(f"1 rows span more than 11 exponents (at most {span}): ")
    codes[2, 277, 48:64] = 0x80  # what is zero doesn't count
    assert str(pack_mxfp4(codes, scales, layout, strict=True).report).startswith("exact: ")


# --- zeros ---


@each_layout
def test_zero_groups_may_have_any_scale_code(layout: str) -> None:
    codes, scales = random_experts(1, 255, 96, low=120, high=124)
    codes[0, :, 16:32] &= 0x88  # zeros of either sign
    scales[0, :, 1] = torch.arange(255, dtype=torch.uint8)
    packed = pack_mxfp4(codes, scales, layout, strict=True)
    decoded, expected = simulate_decode(packed), values64(codes, scales)
    assert torch.equal(decoded.double(), expected) and torch.equal(decoded.signbit(), expected.signbit())
    assert packed.side[0].row_index.numel() == 0
    assert 200 < packed.side[0].group_index.numel() <= 255  # a few codes are within reach of s
    check_round_trip(packed, codes, scales)


@each_layout
@pytest.mark.parametrize("low,high,remembered", [(0, 1, False), (90, 102, False), (254, 255, False), (0, 255, True)])
def test_an_expert_of_zeros(layout: str, low: int, high: int, remembered: bool) -> None:
    codes, scales = random_experts(3, 130, 256, low=low, high=high)
    codes[1] &= 0x88
    packed = pack_mxfp4(codes, scales, layout)
    assert simulate_decode(packed)[1].count_nonzero() == 0
    assert (packed.side[1].nbytes > 0) == remembered
    assert packed.reports[1].exact and packed.reports[1].max_span == 0
    check_round_trip(packed, codes, scales)


def test_quantised_weights_are_exact() -> None:
    weight = torch.randn(2, 256, 512)
    codes, scales = quantize_mxfp4(weight)
    for layout in LAYOUT_NAMES:
        packed = pack_mxfp4(codes, scales, layout, strict=True)
        assert same_bits(simulate_decode(packed), dequantize_mxfp4(codes, scales))
        assert packed.nbytes == packed.data.nbytes + packed.row_scale.nbytes


# --- against the device's own header, on the host ---

HEADERS = Path(megamoe.kernels.__file__).parent / "include"

_HOST_DECODER = r"""
#include <cstdint>
#define __device__
#define __forceinline__ inline
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selectors) {
    const uint64_t bytes = (static_cast<uint64_t>(b) << 32) | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t selector = (selectors >> (4 * i)) & 15, byte = (bytes >> (8 * (selector & 7))) & 255;
        result |= (selector & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return result;
}
#include "megamoe/mma/decode_fp4.cuh"
extern "C" void decode(const uint32_t* words, const uint32_t* exponents, uint32_t* out, int count) {
    for (int i = 0; i < count; ++i)
        megamoe::mma::decode_fp4(words[i], megamoe::mma::Fp4Table(exponents[i]), out[2 * i], out[2 * i + 1]);
}
"""


@pytest.mark.skipif(not (HEADERS / "megamoe/mma/decode_fp4.cuh").exists(), reason="no mma/decode_fp4.cuh")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_emulation_equals_the_device_header(tmp_path: Path) -> None:
    source, library = tmp_path / "decode.cpp", tmp_path / "decode.so"
    source.write_text(_HOST_DECODER)
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{HEADERS}", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=120)
    words = torch.randint(-(2**31), 2**31, (10_000,)).to(torch.int32)
    exponents = torch.randint(0, 16, (10_000,), dtype=torch.int32)
    out = torch.empty((10_000, 2), dtype=torch.int32)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (words, exponents, out)]
    ctypes.CDLL(str(library)).decode(*pointers, ctypes.c_int(10_000))
    emulated = torch.stack(decode_words(words.long() & 0xFFFFFFFF, exponents.long()), dim=-1)
    assert torch.equal(emulated, out.long() & 0xFFFFFFFF)
