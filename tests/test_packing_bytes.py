"""Weight packing: the original bytes come back, every way of packing gives the same bytes, others are refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers_packing import LAYOUT_NAMES, check_round_trip, each_layout, random_experts, same_bits, values64
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.kernels.formats import dequantize_mxfp4, quantize_e4m3_weight
from megamoe.kernels.packing import (
    PackedWeight,
    canonical_buffer,
    pack_fp8_block,
    pack_mxfp4,
    pack_mxfp4_experts,
    simulate_decode,
    tile_layout,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- bytes ---


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUT_NAMES),
    shape=st.tuples(st.integers(0, 3), st.integers(1, 140), st.integers(1, 9)),
    scale_range=st.sampled_from([(0, 256), (0, 12), (120, 126), (110, 124), (240, 255), (250, 256)]),
    zeros=st.sampled_from([0.0, 0.3, 1.0]),
    in_place=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_bytes_come_back(
    layout: str,
    shape: tuple[int, int, int],
    scale_range: tuple[int, int],
    zeros: float,
    in_place: bool,
    seed: int,
) -> None:
    num_experts, rows, groups = shape
    codes, scales = random_experts(num_experts, rows, 32 * groups, low=scale_range[0], high=scale_range[1], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    zero = torch.rand(scales.shape, generator=generator) < zeros
    codes[zero.repeat_interleave(16, -1)] &= 0x88
    source = canonical_buffer(num_experts, rows, 32 * groups, layout) if in_place else (codes, scales)
    source[0].copy_(codes)
    source[1].copy_(scales)
    packed = pack_mxfp4(*source, layout, in_place=in_place)
    if num_experts:
        check_round_trip(packed, codes, scales)
        decoded, expected = simulate_decode(packed), values64(codes, scales)
        exact = torch.ones(num_experts, rows, dtype=torch.bool)
        for expert, side in enumerate(packed.side):
            exact[expert, side.row_index] = False
        assert torch.equal(decoded[exact], expected.float()[exact])
        assert int((~exact).sum()) == packed.report.inexact_rows + packed.report.nan_rows


@each_layout
@pytest.mark.parametrize("rows,columns", [(2880, 320), (320, 2880), (64, 32), (65, 128), (129, 160)])
def test_padding(layout: str, rows: int, columns: int) -> None:
    codes, scales = random_experts(2, rows, columns)
    packed = pack_mxfp4(codes, scales, layout, strict=True)
    tiles = tile_layout(layout)
    row_blocks, k_blocks = -(-rows // tiles.block_rows), -(-columns // 128)
    assert packed.data.shape == (2, row_blocks, k_blocks, {"sm90_ss": 8448, "sm90_rs": 4224, "sm90_moe": 8448}[layout])
    assert packed.row_scale.shape == (2, rows)
    assert same_bits(simulate_decode(packed), dequantize_mxfp4(codes, scales))
    check_round_trip(packed, codes, scales)
    # the padding itself decodes to zero
    all_rows, all_columns = row_blocks * tiles.block_rows, k_blocks * 128
    whole = replace(packed, rows=all_rows, columns=all_columns, row_scale=torch.ones(2, all_rows))
    padded = simulate_decode(whole)
    assert padded[:, rows:].count_nonzero() == 0 and padded[:, :, columns:].count_nonzero() == 0


@pytest.mark.parametrize("layout,block_rows", [("sm90_ss", 128), ("sm90_rs", 64), ("sm90_moe", 128)])
def test_places_of_single_codes(layout: str, block_rows: int) -> None:
    """One nonzero code in a block, found where the table of the layout says."""
    for row, k in ((0, 0), (1, 5), (37, 20), (block_rows - 1, 127), (9, 66), (34, 48)):
        for code in (3, 8 + 5):
            codes = torch.zeros((1, block_rows, 64), dtype=torch.uint8)
            codes[0, row, k // 2] = code << (4 * (k % 2))
            packed = pack_mxfp4(codes, torch.full((1, block_rows, 4), 127, dtype=torch.uint8), layout)
            block = packed.data[0, 0, 0, : block_rows * 64].view(torch.int32)
            (index,) = block.nonzero().flatten().tolist()
            if layout == "sm90_ss":
                j4, c, jl, b = row // 32, row // 8 % 4, row // 2 % 4, row % 2
                place = 32 * j4 + 8 * jl + 2 * c + b
                assert index == (k // 32) * 512 + place * 4 + k % 32 // 8
                i = k % 8
            elif layout == "sm90_moe":
                n = 32 * (row // 32) + 8 * (row // 2 % 4) + 2 * (row // 8 % 4) + row % 2
                place = n ^ (n // 8 % 2)
                assert index == (k // 32) * 512 + place * 4 + k % 16 // 4
                i = 4 * (k % 32 // 16) + k % 4
            else:
                warp, g, upper, group = row // 16, row % 16 // 2, row % 2, k // 32
                c, half = k % 16 // 4, k % 32 // 16
                thread = 32 * warp + 4 * g + c
                assert index == (group // 2) * 512 + thread * 4 + (group % 2) * 2 + upper
                i = 4 * half + k % 4
            sign = (1 << (8 * i + 7 if i < 4 else 8 * (i - 4) + 3)) if code & 8 else 0
            assert int(block[index]) & 0xFFFFFFFF == (code & 7) << (4 * i) | sign


@each_layout
def test_every_way_of_packing_gives_the_same_bytes(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scales = random_experts(3, 600, 320, low=100, high=125)
    whole = pack_mxfp4(codes, scales, layout)
    seen: list[tuple[int, int]] = []

    def same(other: PackedWeight) -> None:
        assert torch.equal(other.data, whole.data) and torch.equal(other.row_scale, whole.row_scale)
        assert other.reports == whole.reports
        check_round_trip(other, codes, scales)

    monkeypatch.setattr("megamoe.kernels.packing.packed._CPU_CHUNK", 20_000)
    same(pack_mxfp4(codes, scales, layout, progress=lambda done, total: seen.append((done, total))))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    pairs = ((codes[expert], scales[expert]) for expert in range(3))
    same(pack_mxfp4_experts(pairs, layout, num_experts=3, rows=600, columns=320))
    # strides, and an offset that is no multiple of 8
    strided = codes.transpose(0, 1).contiguous().transpose(0, 1)
    same(pack_mxfp4(strided, scales.transpose(1, 2).contiguous().transpose(1, 2), layout))
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), codes.flatten()))[1:].view(codes.shape)
    same(pack_mxfp4(shifted, scales, layout))
    buffer = canonical_buffer(3, 600, 320, layout)
    buffer[0].copy_(codes)
    buffer[1].copy_(scales)
    in_place = pack_mxfp4(*buffer, layout, in_place=True, strict=False)
    same(in_place)
    assert in_place.data.data_ptr() == buffer[0].data_ptr()


@each_layout
def test_in_place_needs_room_and_refuses_before_it_writes(layout: str) -> None:
    codes, scales = random_experts(2, 128, 256)
    with pytest.raises(
        ValueError, match=r"in_place: the packed weights take 33792 bytes, but the storage of codes has 32768;"
    ):
        pack_mxfp4(codes, scales, layout, in_place=True)
    with pytest.raises(ValueError, match="in_place: codes must be contiguous"):
        pack_mxfp4(codes.transpose(0, 1), scales.transpose(0, 1), layout, in_place=True)
    buffer = canonical_buffer(2, 128, 256, layout)
    scales[0, 5] = torch.tensor([100, 126, 126, 126, 126, 126, 126, 126], dtype=torch.uint8)
    buffer[0].copy_(codes)
    buffer[1].copy_(scales)
    with pytest.raises(ValueError, match="strict: the scale exponents of expert 0, row 5 span 26"):
        pack_mxfp4(*buffer, layout, in_place=True, strict=True)
    assert torch.equal(buffer[0], codes) and torch.equal(buffer[1], scales)


@each_layout
def test_load_expert_keeps_the_addresses(layout: str) -> None:
    codes, scales = random_experts(3, 200, 256, low=100, high=125)
    packed = pack_mxfp4(codes, scales, layout)
    addresses = packed.data.data_ptr(), packed.row_scale.data_ptr()
    new_codes, new_scales = random_experts(1, 200, 256, seed=1)
    packed.load_expert(1, new_codes[0], new_scales[0], strict=True)
    codes[1], scales[1] = new_codes[0], new_scales[0]
    check_round_trip(packed, codes, scales)
    assert packed.reports[1].exact and not packed.report.exact
    wide = random_experts(1, 200, 256, low=90, high=125)
    with pytest.raises(ValueError, match="strict: the scale exponents of expert 1, row"):
        packed.load_expert(1, wide[0][0], wide[1][0], strict=True)
    check_round_trip(packed, codes, scales)
    assert addresses == (packed.data.data_ptr(), packed.row_scale.data_ptr())


# --- refusals ---


def test_a_weight_of_another_layout_is_refused_by_name() -> None:
    packed = pack_mxfp4(*random_experts(1, 64, 128), "sm90_rs")
    packed.require("w13", "sm90_rs", rows=64, columns=128)
    with pytest.raises(ValueError, match="w13: packed for sm90_rs version 1, but this kernel reads sm90_ss version 1;"):
        packed.require("w13", "sm90_ss")
    with pytest.raises(ValueError, match="w2: expected 128 rows, got a weight packed with 64"):
        packed.require("w2", "sm90_rs", rows=128)
    with pytest.raises(ValueError, match="layout: must be one of sm90_ss, sm90_rs, sm90_moe, got 'cpu'"):
        packed.require("w2", "cpu")
    packed.version = 0
    with pytest.raises(ValueError, match="w13: packed for sm90_rs version 0, but this kernel reads sm90_rs version 1"):
        packed.require("w13", "sm90_rs")


def test_bad_arguments_are_named() -> None:
    codes, scales = random_experts(2, 8, 64)
    with pytest.raises(TypeError, match=r"codes: expected torch.uint8, got torch.int64"):
        pack_mxfp4(codes.long(), scales, "sm90_ss")
    with pytest.raises(ValueError, match=r"codes: expected \[experts, N, K / 2\]"):
        pack_mxfp4(codes[0], scales[0], "sm90_ss")
    with pytest.raises(ValueError, match=r"scales: expected the shape \[2, 8, 2\], got \[2, 8, 1\]"):
        pack_mxfp4(codes, scales[..., :1], "sm90_ss")
    with pytest.raises(ValueError, match="positive multiple of 16 bytes"):
        pack_mxfp4(codes[..., :24], scales, "sm90_ss")
    with pytest.raises(ValueError, match="layout: must be one of"):
        pack_mxfp4(codes, scales, "sm100")
    with pytest.raises(ValueError, match="experts: expected 3, got 2"):
        pack_mxfp4_experts(zip(codes, scales, strict=True), "sm90_ss", num_experts=3, rows=8, columns=64)
    with pytest.raises(ValueError, match="experts: expected 1, got more"):
        pack_mxfp4_experts(zip(codes, scales, strict=True), "sm90_ss", num_experts=1, rows=8, columns=64)
    with pytest.raises(ValueError, match=r"codes: expected the shape \[8, 48\], got \[8, 32\]"):
        pack_mxfp4_experts(zip(codes, scales, strict=True), "sm90_ss", num_experts=2, rows=8, columns=96)


# --- FP8 ---


@pytest.mark.parametrize("rows,columns", [(256, 384), (2880, 320), (32, 16)])
def test_fp8_is_packed_as_it_stands(rows: int, columns: int) -> None:
    q, scale = quantize_e4m3_weight(torch.randn(2, rows, columns))
    packed = pack_fp8_block(q, scale)
    assert packed.data.data_ptr() == q.data_ptr() and packed.block_scale.data_ptr() == scale.data_ptr()
    packed.require("w2", "sm90_ss_fp8", rows=rows, columns=columns)
    with pytest.raises(ValueError, match="w2: packed for sm90_ss_fp8 version 1, but this kernel reads sm90_rs"):
        packed.require("w2", "sm90_rs")
    with pytest.raises(ValueError, match=r"scale: expected the shape \[2, \d+, \d+\], got"):
        pack_fp8_block(q, scale[:, :, :0])


def test_fp8_of_an_odd_shape_is_padded() -> None:
    q, scale = quantize_e4m3_weight(torch.randn(2, 40, 150))
    packed = pack_fp8_block(q, scale)
    assert packed.data.shape == (2, 64, 160)
    assert torch.equal(packed.data.float()[:, :40, :150], q.float())
    assert packed.data.float().count_nonzero() == q.float().count_nonzero()
    assert torch.equal(packed.unpack()[0].view(torch.uint8), q.view(torch.uint8))


def test_fp8_padding_starts_anew_with_each_section() -> None:
    gate, gate_scale = quantize_e4m3_weight(torch.randn(2, 320, 200))
    up, up_scale = quantize_e4m3_weight(torch.randn(2, 320, 200))
    q = torch.cat((gate.view(torch.uint8), up.view(torch.uint8)), dim=1).view(torch.float8_e4m3fn)
    packed = pack_fp8_block(q, torch.cat((gate_scale, up_scale), dim=1), sections=2)
    assert packed.data.shape == (2, 768, 208) and packed.block_scale.shape == (2, 6, 2)
    halves = packed.data.float()
    assert torch.equal(halves[:, :320, :200], gate.float()) and torch.equal(halves[:, 384:704, :200], up.float())
    assert halves.count_nonzero() == gate.float().count_nonzero() + up.float().count_nonzero()
    restored, scale = packed.unpack()
    assert torch.equal(restored.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(scale, torch.cat((gate_scale, up_scale), dim=1))


# --- speed, device ---


@each_layout
def test_speed_is_printed(layout: str) -> None:
    codes, scales = random_experts(8, 4096, 4096)
    start = time.perf_counter()
    packed = pack_mxfp4(codes, scales, layout, strict=False)
    middle = time.perf_counter()
    new_codes, new_scales = packed.unpack()
    end = time.perf_counter()
    megabytes = codes.nbytes / 1e6
    print(
        f"{layout}: [8, 4096, 4096] packed at {megabytes / (middle - start):.0f}, unpacked at "
        f"{megabytes / (end - middle):.0f} MB of codes a second, {torch.get_num_threads()} thread"
    )
    assert torch.equal(new_codes, codes) and torch.equal(new_scales, scales)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_layout
def test_the_gpu_gives_the_same_bytes(layout: str) -> None:
    codes, scales = random_experts(3, 700, 320, low=100, high=125)
    codes[0, :100] &= 0x88
    scales[1, 5, 2] = 255
    expected = pack_mxfp4(codes, scales, layout)
    actual = pack_mxfp4(codes.cuda(), scales.cuda(), layout)
    assert torch.equal(actual.data.cpu(), expected.data)
    assert torch.equal(actual.row_scale.cpu().view(torch.int32), expected.row_scale.view(torch.int32))
    assert actual.reports == expected.reports
    check_round_trip(actual, codes.cuda(), scales.cuda())
