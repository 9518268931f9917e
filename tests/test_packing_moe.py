"""The experts of a rank packed for the mega-kernel: bytes come back, rows and columns lie where its threads look."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers_packing import random_experts, same_bits
from torch import Tensor

from megamoe.kernels.formats import dequantize_mxfp4
from megamoe.kernels.packing import simulate_decode
from megamoe.kernels.packing.decode import decode_words
from megamoe.kernels.packing.moe import PackedMoeExperts, gate_up_order, pack_moe_experts, packed_moe_bytes

# (experts, H, I): whole blocks, halves of a block of columns, and gpt-oss, whose rows end in the middle of a block
SHAPES = [(3, 256, 256), (2, 128, 320), (2, 320, 96), (1, 2880, 2880)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def canonical(num_experts: int, hidden: int, intermediate: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        *random_experts(num_experts, 2 * intermediate, hidden, seed=seed),
        *random_experts(num_experts, hidden, intermediate, seed=seed + 1),
    )


def biases(num_experts: int, hidden: int, intermediate: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    b13 = torch.randn(num_experts, 2 * intermediate, generator=generator, dtype=torch.float64)
    return b13.to(torch.bfloat16), torch.randn(num_experts, hidden, generator=generator)


def kernel_columns(intermediate: int) -> Iterator[tuple[int, int]]:
    """Yield (first of a pair of packed rows of w13, column of h) as the decode instance's math threads count them."""
    for task in range(-(-intermediate // 128)):
        for warpgroup in range(4):
            for warp in range(4):
                for g in range(8):
                    j, c = 2 * (warpgroup % 2 * 4 + warp) + g // 4, g % 4
                    block = 2 * task + warpgroup // 2
                    feature = 2 * (16 * (j // 4) + 4 * c + j % 4)
                    yield 128 * block + feature, 128 * task + 64 * (warpgroup // 2) + 16 * c + j


def read_pair(packed: PackedMoeExperts, which: str, expert: int, row: int, k: int) -> list[float]:
    """Return 4 neighbouring values from k of each of two packed rows (an even one and the next), as the register
    mainloop addresses them: strip, lane, word."""
    weight = packed.w13 if which == "w13" else packed.w2
    block = weight.data[expert, row // 128, k // 128].long()
    pair = row % 128 // 2  # the strip and lane that hold the features 2 pair and 2 pair + 1
    j, c = 4 * (pair // 16) + pair % 4, pair % 16 // 4
    strip, g = j // 2, 4 * (j % 2) + c
    group, half, word = k % 128 // 32, k % 32 // 16, k % 16 // 4
    values = []
    for upper in (0, 1):
        place = strip * 16 + ((2 * g + upper) ^ (g // 4))
        at = group * 2048 + place * 16 + 4 * word
        bits = sum(int(block[at + i]) << (8 * i) for i in range(4))
        exponents = int(block[8192 + 2 * place]) | int(block[8192 + 2 * place + 1]) << 8
        registers = decode_words(torch.tensor(bits), torch.tensor(exponents >> (4 * group) & 15))
        codes = torch.stack([(registers[half] >> (8 * i)) & 0xFF for i in range(4)]).to(torch.uint8)
        scale = weight.row_scale[expert, row + upper]
        values += (codes.view(torch.float8_e4m3fn).float() * scale).tolist()
    return values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bytes_come_back(shape: tuple[int, int, int]) -> None:
    tensors = canonical(*shape)
    packed = pack_moe_experts(*tensors, strict=True)
    for name, back, original in zip(("w13", "w13_scale", "w2", "w2_scale"), packed.unpack(), tensors, strict=True):
        assert torch.equal(back, original), name
    assert packed.num_experts == shape[0] and (packed.hidden, packed.intermediate) == shape[1:]
    parts = [packed.w13.data, packed.w2.data, packed.w13.row_scale, packed.w2.row_scale]
    assert packed.nbytes == sum(part.nbytes for part in parts) == shape[0] * packed_moe_bytes(*shape[1:])


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_decoded_rows_are_the_layers_in_the_kernels_order(shape: tuple[int, int, int]) -> None:
    num_experts, hidden, intermediate = shape
    w13, w13_scale, w2, w2_scale = canonical(*shape)
    packed = pack_moe_experts(w13, w13_scale, w2, w2_scale)
    decoded = simulate_decode(packed.w13)
    expected = dequantize_mxfp4(w13, w13_scale)
    seen = set()
    for row, column in kernel_columns(intermediate):
        for upper in (0, 1):
            seen.add(row + upper)
            values = decoded[:, row + upper]
            if column < intermediate:
                assert same_bits(values, expected[:, column + upper * intermediate]), (row + upper, column)
            else:
                assert not values.any(), (row + upper, column)
    assert seen == set(range(packed.w13.rows)), "every row of the packed weight is somebody's"
    assert packed.w13.rows % 256 == 0 and packed.w2.rows % 128 == 0
    decoded2 = simulate_decode(packed.w2)
    assert same_bits(decoded2[:, :hidden], dequantize_mxfp4(w2, w2_scale))
    assert not decoded2[:, hidden:].any()


def test_the_register_mainloop_reads_the_same_values() -> None:
    shape = (2, 256, 320)
    w13, w13_scale, w2, w2_scale = canonical(*shape)
    packed = pack_moe_experts(w13, w13_scale, w2, w2_scale)
    exact = {"w13": simulate_decode(packed.w13), "w2": dequantize_mxfp4(w2, w2_scale)}
    generator = torch.Generator().manual_seed(3)
    for which, values in exact.items():
        for _ in range(60):
            expert = int(torch.randint(2, (), generator=generator))
            row = 2 * int(torch.randint(values.shape[1] // 2, (), generator=generator))
            k = 4 * int(torch.randint(values.shape[2] // 4, (), generator=generator))
            assert (
                read_pair(packed, which, expert, row, k) == values[expert, row : row + 2, k : k + 4].flatten().tolist()
            )


def test_order_is_a_permutation_with_padding() -> None:
    for intermediate in (32, 128, 320, 2880):
        order = gate_up_order(intermediate)
        assert order.numel() == 256 * -(-intermediate // 128)
        rows = order[order >= 0]
        assert torch.equal(rows.sort().values, torch.arange(2 * intermediate))
        for row, column in kernel_columns(intermediate):
            wanted = [column, column + intermediate] if column < intermediate else [-1, -1]
            assert order[row : row + 2].tolist() == wanted


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_biases_follow_their_rows(shape: tuple[int, int, int]) -> None:
    num_experts, hidden, intermediate = shape
    b13, b2 = biases(*shape)
    packed = pack_moe_experts(*canonical(*shape), b13, b2)
    assert packed.b13 is not None and packed.b2 is not None
    assert packed.b13.dtype == packed.b2.dtype == torch.float32
    assert packed.b13.shape == packed.w13.row_scale.shape and packed.b2.shape == packed.w2.row_scale.shape
    for row, column in kernel_columns(intermediate):
        for upper in (0, 1):
            wanted = (
                b13[:, column + upper * intermediate].float() if column < intermediate else torch.zeros(num_experts)
            )
            assert torch.equal(packed.b13[:, row + upper], wanted)
    assert torch.equal(packed.b2[:, :hidden], b2.float()) and not packed.b2[:, hidden:].any()


def test_one_expert_is_replaced_in_place() -> None:
    shape = (3, 160, 192)
    old, new = canonical(*shape, seed=1), canonical(*shape, seed=5)
    old_biases, new_biases = biases(*shape, seed=1), biases(*shape, seed=5)
    packed = pack_moe_experts(*old, *old_biases)
    tensors = (packed.w13.data, packed.w13.row_scale, packed.w2.data, packed.w2.row_scale, packed.b13, packed.b2)
    addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
    packed.load_expert(1, *(tensor[1] for tensor in (*new, *new_biases)))
    assert [tensor.data_ptr() for tensor in tensors if tensor is not None] == addresses
    mixed = [torch.stack((a[0], b[1], a[2])) for a, b in zip((*old, *old_biases), (*new, *new_biases), strict=True)]
    expected = pack_moe_experts(*mixed)
    assert torch.equal(packed.w13.data, expected.w13.data) and torch.equal(packed.w2.data, expected.w2.data)
    assert torch.equal(packed.w13.row_scale, expected.w13.row_scale)
    assert packed.b13 is not None and expected.b13 is not None and torch.equal(packed.b13, expected.b13)
    assert packed.b2 is not None and expected.b2 is not None and torch.equal(packed.b2, expected.b2)


def test_refusals() -> None:
    w13, w13_scale, w2, w2_scale = canonical(2, 160, 192)
    with pytest.raises(ValueError, match=r"w13, w2: expected \[E, 2I, H / 2\]"):
        pack_moe_experts(w13, w13_scale, w2[:, :128], w2_scale[:, :128])
    with pytest.raises(TypeError, match="codes: expected torch.uint8"):
        pack_moe_experts(w13.short(), w13_scale, w2, w2_scale)
    packed = pack_moe_experts(w13, w13_scale, w2, w2_scale)
    with pytest.raises(ValueError, match="biases must be given where the layer has them"):
        packed.load_expert(0, w13[0], w13_scale[0], w2[0], w2_scale[0], torch.zeros(384), torch.zeros(160))
    wide = w2_scale.clone()
    wide[1, 7] = torch.tensor([100, 120, 100, 120, 100, 120], dtype=torch.uint8)
    codes = w2.clone()
    codes[1, 7] = 0x33
    with pytest.raises(ValueError, match="strict: the scale exponents of expert 1, row 7 span 20"):
        pack_moe_experts(w13, w13_scale, codes, wide, strict=True)


def test_progress_counts_both_linears() -> None:
    calls: list[tuple[int, int]] = []
    pack_moe_experts(*canonical(2, 128, 128), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
