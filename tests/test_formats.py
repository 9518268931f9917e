"""Number formats against independent definitions: all codes where they can be listed, random values elsewhere."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megamoe.kernels.formats import (
    AMAX_FLOOR,
    BLOCK,
    E2M1_MAX,
    E4M3_MAX,
    GRANULARITIES,
    dequantize_e4m3,
    dequantize_e4m3_weight,
    dequantize_mxfp4,
    quantize_e4m3,
    quantize_e4m3_weight,
    quantize_mxfp4,
    ue8m0_decode,
    ue8m0_encode,
)

FLT_MAX = torch.finfo(torch.float32).max
SHAPES = [(0, 256), (1, 1), (3, 127), (4, 128), (5, 129), (2, 3, 320), (7, 0, 128), (256,)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


# --- independent definitions, in exact rational arithmetic ---


def e4m3_value(code: int) -> Fraction:
    """Return the value of an E4M3 code that is not NaN (OCP FP8 specification: bias 7, no infinity)."""
    exponent, mantissa = code >> 3 & 15, code & 7
    value = Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7) if exponent else Fraction(mantissa, 8 * 64)
    return -value if code & 0x80 else value


def nearest_even(value: Fraction, magnitudes: list[Fraction]) -> int:
    """Return the code of the nearest magnitude, ties to even, saturating."""
    return min(range(len(magnitudes)), key=lambda code: (abs(magnitudes[code] - value), code & 1))


E4M3_MAGNITUDES = [e4m3_value(code) for code in range(0x7F)]
E2M1_MAGNITUDES = [Fraction(value) for value in E2M1]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()])


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(bits(x), bits(y))


def bits_of(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


def next_above(value: float) -> float:
    return struct.unpack("<f", struct.pack("<i", bits_of(value) + 1))[0]


def next_below(value: float) -> float:
    return struct.unpack("<f", struct.pack("<i", bits_of(value) - 1))[0]


@pytest.fixture
def flush_denormal() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-denormal mode")
    yield
    torch.set_flush_denormal(False)


# --- E4M3 ---


def test_e4m3_decodes_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = dequantize_e4m3(codes.view(torch.float8_e4m3fn)[:, None], torch.ones(256), "token").flatten().tolist()
    for code, value in enumerate(values):
        if code & 0x7F == 0x7F:
            assert math.isnan(value), code
        else:
            assert Fraction(value) == e4m3_value(code), code
            assert math.copysign(1, value) == (-1 if code & 0x80 else 1), code


def test_e4m3_encodes_every_code_midpoint_and_neighbour() -> None:
    wanted, given_values = [], []
    for low, high in zip(E4M3_MAGNITUDES, E4M3_MAGNITUDES[1:], strict=False):
        middle = float((low + high) / 2)
        given_values += [float(low), next_below(middle), middle, next_above(middle)]
    given_values.append(E4M3_MAX)
    wanted = [nearest_even(Fraction(value), E4M3_MAGNITUDES) for value in given_values]
    # one row whose amax is 448, so that the scale is exactly 1
    row = torch.tensor(given_values + [-value for value in given_values] + [0.0, -0.0])
    q, scale = quantize_e4m3(row, "token")
    assert scale.item() == 1.0
    assert bits(q).tolist() == wanted + [0x80 | code for code in wanted] + [0, 0x80]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_e4m3_follows_the_rule_bit_by_bit(granularity: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 300) * torch.logspace(-30, 30, 4)[:, None]
    q, scale = quantize_e4m3(x, granularity)
    width = 300 if granularity == "token" else BLOCK
    scales = scale[:, None] if granularity == "token" else scale

    def fp32(value: Fraction | float) -> float:
        return struct.unpack("<f", struct.pack("<f", float(value)))[0]

    for row in range(4):
        for block in range(-(-300 // width)):
            group = x[row, block * width : (block + 1) * width].tolist()
            expected_scale = fp32(Fraction(max(map(abs, group))) / 448)
            assert scales[row, block].item() == expected_scale
            inverse = fp32(1 / Fraction(expected_scale))
            for column, value in enumerate(group):
                scaled = Fraction(fp32(Fraction(value) * Fraction(inverse)))
                code = nearest_even(abs(scaled), E4M3_MAGNITUDES) | (0x80 if value < 0 else 0)
                assert bits(q)[row, block * width + column] == code


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_e4m3_shapes(shape: tuple[int, ...], granularity: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x = torch.randn(shape).to(dtype)
    q, scale = quantize_e4m3(x, granularity)
    assert q.shape == x.shape and q.dtype == torch.float8_e4m3fn and q.is_contiguous()
    assert scale.dtype == torch.float32
    assert scale.shape == (x.shape[:-1] if granularity == "token" else (*x.shape[:-1], -(-x.shape[-1] // BLOCK)))
    back = dequantize_e4m3(q, scale, granularity)
    assert back.dtype == torch.float32 and back.shape == x.shape
    # half a step of three mantissa bits, relative to the element, or half the smallest step
    per_element = scale[..., None] if granularity == "token" else scale.repeat_interleave(BLOCK, -1)[..., : shape[-1]]
    bound = torch.maximum(x.float().abs() / 16, per_element * 2**-10) * (1 + 1e-5)
    assert ((back - x.float()).abs() <= bound).all()
    assert same_bits(quantize_e4m3(x.float(), granularity)[0], q), "the input dtype must not matter"


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_e4m3_zero_and_tiny_rows(granularity: str) -> None:
    """Case C8: zeros, and amax 6.3e-38, 1e-36, 1.4e-36, denormal."""
    torch.manual_seed(3)
    amax = torch.tensor([0.0, 1e-45, 1.1e-38, 6.3e-38, 1e-36, 1.4e-36, AMAX_FLOOR, next_above(AMAX_FLOOR)])
    x = (torch.rand(8, 256) * 2 - 1) * amax[:, None]
    x[:, 5], x[:, 200] = amax, -amax
    q, scale = quantize_e4m3(x, granularity)
    assert torch.isfinite(scale).all() and (scale >= 2.0**-126).all()
    assert (bits(q)[0] & 0x7F == 0).all(), "a row of zeros has zero codes"
    back = dequantize_e4m3(q, scale, granularity)
    assert torch.isfinite(back).all()
    step = scale.amax(-1) if granularity == "block128" else scale
    error = (back - x).abs().amax(-1)
    assert (error <= torch.maximum(amax / 16, step * 2**-10) * (1 + 1e-5)).all(), error


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_e4m3_huge_rows_saturate(granularity: str) -> None:
    """Case C8: amax 3e38, FLT_MAX, an infinity of either sign."""
    torch.manual_seed(4)
    x = torch.randn(4, 128)
    x[0, 3], x[1, 3], x[2, 3], x[3, 3] = 3e38, -FLT_MAX, math.inf, -math.inf
    q, scale = quantize_e4m3(x, granularity)
    assert torch.isfinite(scale).all() and (scale > 0).all()
    assert bits(q)[:, 3].tolist() == [0x7E, 0xFE, 0x7E, 0xFE]
    back = dequantize_e4m3(q, scale, granularity)
    assert torch.isfinite(back).all()
    assert (back[:, 3].abs() >= 2.9e38).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("filler", [math.nan, 3e38, math.inf])
def test_e4m3_a_bad_element_or_row_spoils_nothing_else(granularity: str, filler: float) -> None:
    """Case C8: NaN stays where it is, also as padding rows around good ones."""
    torch.manual_seed(5)
    x = torch.randn(5, 256)
    clean_q, clean_scale = quantize_e4m3(x, granularity)
    dirty = x.clone()
    dirty[0], dirty[4] = filler, filler
    dirty[2, 7] = math.nan
    q, scale = quantize_e4m3(dirty, granularity)
    assert torch.isfinite(scale).all() and (scale > 0).all()
    assert same_bits(q[[1, 3]], clean_q[[1, 3]]) and torch.equal(scale[[1, 3]], clean_scale[[1, 3]])
    assert bits(q)[2, 7] == 0x7F
    others = torch.arange(256) != 7
    assert torch.equal(bits(q)[2, others], bits(clean_q)[2, others])
    assert torch.equal(scale[2], clean_scale[2])
    wanted = 0x7F if math.isnan(filler) else 0x7E
    assert (bits(q)[[0, 4]] == wanted).all()


def test_e4m3_every_nan_becomes_one_code() -> None:
    patterns = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -0x400000, -1], dtype=torch.int32)
    x = patterns.view(torch.float32)
    assert x.isnan().all()
    q, scale = quantize_e4m3(x, "token")
    assert bits(q).tolist() == [0x7F] * 5
    assert scale == 2.0**-126


def test_e4m3_noncontiguous_input() -> None:
    torch.manual_seed(6)
    base = torch.randn(260, 520)
    for view in (base[:, ::2], base.t(), base[3::7, 1:257], base[:, :1].expand(260, 300)):
        for granularity in GRANULARITIES:
            q, scale = quantize_e4m3(view, granularity)
            q2, scale2 = quantize_e4m3(view.contiguous(), granularity)
            assert same_bits(q, q2) and same_bits(scale, scale2)
        q, scale = quantize_e4m3_weight(view)
        q2, scale2 = quantize_e4m3_weight(view.contiguous())
        assert same_bits(q, q2) and same_bits(scale, scale2)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_e4m3_input_is_not_written(granularity: str) -> None:
    x = torch.tensor([[1.0, math.nan, math.inf, -0.0] * 32])
    before = bits(x).clone()
    quantize_e4m3(x, granularity)
    quantize_e4m3_weight(x)
    quantize_mxfp4(x)
    assert torch.equal(bits(x), before)


def test_e4m3_quantising_twice_changes_nothing() -> None:
    torch.manual_seed(7)
    q, scale = quantize_e4m3(torch.randn(64, 512), "block128")
    # with power-of-two scales the products are exact, so the codes must come back byte for byte
    power = ue8m0_decode(ue8m0_encode(scale))
    again, scale2 = quantize_e4m3(dequantize_e4m3(q, power, "block128"), "block128")
    full = bits(q).view(64, 4, 128).bitwise_and(0x7F).amax(-1) == 0x7E
    assert full.all(), "the amax of every block is the code of 448"
    assert same_bits(again, q) and torch.equal(scale2, power)


# --- E4M3 weights ---


@pytest.mark.parametrize(
    "shape", [(128, 128), (1, 1), (130, 257), (2, 3, 320, 64), (0, 128, 128), (2880, 320)], ids=str
)
def test_e4m3_weight_blocks(shape: tuple[int, ...]) -> None:
    torch.manual_seed(8)
    w = torch.randn(shape)
    q, scale = quantize_e4m3_weight(w)
    n_blocks, k_blocks = -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK)
    assert q.shape == w.shape and scale.shape == (*shape[:-2], n_blocks, k_blocks)
    back = dequantize_e4m3_weight(q, scale)
    for n in range(n_blocks):
        for k in range(k_blocks):
            part = (..., slice(n * BLOCK, (n + 1) * BLOCK), slice(k * BLOCK, (k + 1) * BLOCK))
            # a block is one row of the token rule
            block = w[part].flatten(-2)
            wanted_q, wanted_scale = quantize_e4m3(block, "token")
            assert same_bits(q[part].reshape(block.shape), wanted_q)
            assert torch.equal(scale[..., n, k], wanted_scale)
            assert torch.equal(back[part].flatten(-2), dequantize_e4m3(wanted_q, wanted_scale, "token"))


# --- UE8M0 ---


def test_ue8m0_every_code_both_ways() -> None:
    """Case C9: all 256 codes; 0 is 2^-127, 255 NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = ue8m0_decode(codes)
    for code, value in enumerate(values.tolist()):
        if code == 255:
            assert math.isnan(value)
        else:
            assert Fraction(value) == Fraction(2) ** (code - 127)
    for exact in (False, True):
        assert torch.equal(ue8m0_encode(values, exact=exact), codes)


@pytest.mark.parametrize("exponent", range(-126, 128))
def test_ue8m0_rounds_up(exponent: int) -> None:
    """Case C9: 2^e stays, the next float above rounds up, the next below rounds up to it."""
    power = 2.0**exponent
    code = exponent + 127
    got = ue8m0_encode(torch.tensor([power, next_above(power), next_below(power)])).tolist()
    assert got == [code, min(code + 1, 254), code]


def test_ue8m0_edges() -> None:
    # 2^-127 and its neighbours are denormals
    tiny = [0.0, -0.0, 1e-45, next_below(2.0**-127), 2.0**-127, next_above(2.0**-127), next_below(2.0**-126)]
    assert ue8m0_encode(torch.tensor(tiny)).tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert ue8m0_encode(torch.tensor([1.5 * 2.0**127, FLT_MAX, math.inf])).tolist() == [254, 254, 254]
    assert ue8m0_encode(torch.tensor([math.nan, -1.0, -1e-45, -math.inf])).tolist() == [255, 255, 255, 255]
    assert ue8m0_encode(torch.empty(0, 3)).shape == (0, 3)
    assert ue8m0_encode(torch.tensor(3.0)).item() == 129
    assert ue8m0_encode(torch.tensor([3.0, 0.25], dtype=torch.bfloat16)).tolist() == [129, 125]
    assert ue8m0_encode(torch.tensor([2.0**-24, 65504.0], dtype=torch.float16)).tolist() == [103, 143]


@pytest.mark.parametrize("bad", [1.3, 0.0, -1.0, math.inf, 2.0**-128, next_above(1.0), next_below(1.0), 1e-45])
def test_ue8m0_exact_refuses(bad: float) -> None:
    """Case C9: an FP32 scale of 1.3 handed to an entry that needs UE8M0."""
    x = torch.ones(2, 3)
    x[1, 2] = bad
    with pytest.raises(ValueError, match=r"power of two.*got .* at \[1, 2\]"):
        ue8m0_encode(x, exact=True)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 0x7F000000))
def test_ue8m0_is_the_smallest_power_not_below(pattern: int) -> None:
    x = torch.tensor([pattern], dtype=torch.int32).view(torch.float32)
    code = int(ue8m0_encode(x).item())
    value = Fraction(x.item())
    assert Fraction(2) ** (code - 127) >= value
    assert code == 0 or Fraction(2) ** (code - 128) < value


@pytest.mark.parametrize("limit", [E4M3_MAX, E2M1_MAX])
def test_ue8m0_nothing_exceeds_the_limit_after_division(limit: float) -> None:
    """Case C9 on N(0, 1): amax / limit rounded up to a power of two."""
    torch.manual_seed(9)
    amax = torch.randn(4096, 7168).view(-1, 32).abs().amax(-1)
    # and the amaxes where the quotient is as close to a power of two as FP32 comes
    edges = torch.tensor([limit * 2.0**e for e in range(-100, 100)])
    amax = torch.cat([amax, edges, torch.nextafter(edges, edges * 2), torch.nextafter(edges, edges * 0)])
    scale = ue8m0_decode(ue8m0_encode(amax / torch.full_like(amax, limit)))
    quotient = amax.double() / scale.double()
    assert (quotient <= limit).all() and (quotient > limit / 2).all()


# --- MXFP4 ---


def mxfp4_group(codes: list[int]) -> Tensor:
    assert len(codes) == 32
    return torch.tensor([low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)], dtype=torch.uint8)


def test_mxfp4_decodes_every_code_under_every_scale() -> None:
    """Case C10, the part of the format: exact in FP32, with denormals; what exceeds FP32 is an infinity."""
    codes = mxfp4_group(list(range(16)) * 2).expand(256, 16)
    values = dequantize_mxfp4(codes, torch.arange(256, dtype=torch.uint8)[:, None])
    assert values.shape == (256, 32) and values.dtype == torch.float32
    for scale, row in enumerate(values.tolist()):
        for k, value in enumerate(row):
            magnitude, negative = E2M1_MAGNITUDES[k & 7], bool(k & 8)
            if scale == 255:
                assert math.isnan(value)
                continue
            exact = magnitude * Fraction(2) ** (scale - 127)
            if exact >= 2**128:
                assert value == (-math.inf if negative else math.inf), (scale, k)
            else:
                assert Fraction(abs(value)) == exact, (scale, k)
            assert math.copysign(1, value) == (-1 if negative else 1), (scale, k)


def test_mxfp4_decoding_ignores_flush_denormal(flush_denormal: None) -> None:
    codes = mxfp4_group([1, 2, 3, 9] * 8)[None]
    values = dequantize_mxfp4(codes, torch.zeros(1, 1, dtype=torch.uint8))
    # 2^-127 * 0.5, * 1, * 1.5, * -0.5 in units of 2^-149
    assert bits(values)[0, :4].tolist() == [1 << 21, 1 << 22, 3 << 21, (1 << 21) - (1 << 31)]
    assert bits(ue8m0_decode(torch.tensor([0], dtype=torch.uint8))).item() == 1 << 22
    assert ue8m0_encode(torch.tensor([1 << 22, (1 << 22) + 1], dtype=torch.int32).view(torch.float32)).tolist() == [
        0,
        1,
    ]


def test_flush_denormal_changes_nothing_for_normal_values(flush_denormal: None) -> None:
    torch.manual_seed(10)
    x = torch.randn(16, 256) * torch.logspace(-37, 37, 16)[:, None]
    x = torch.where(x.abs() < 2.0**-126, 2.0**-126, x)
    flushed = (*quantize_e4m3(x, "token"), *quantize_e4m3(x, "block128"), *quantize_mxfp4(x))
    torch.set_flush_denormal(False)
    exact = (*quantize_e4m3(x, "token"), *quantize_e4m3(x, "block128"), *quantize_mxfp4(x))
    assert all(same_bits(a, b) for a, b in zip(flushed, exact, strict=True))


def test_mxfp4_low_nibble_is_the_even_k() -> None:
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 1] = 6.0, -0.5
    codes, scales = quantize_mxfp4(w)
    assert codes[0, 0] == 0x97 and scales[0, 0] == 127
    assert dequantize_mxfp4(codes, scales)[0, :3].tolist() == [6.0, -0.5, 0.0]


@pytest.mark.parametrize("exponent", [-100, -1, 0, 5, 100])
def test_mxfp4_rounds_to_nearest_even(exponent: int) -> None:
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    points = [*E2M1, *middles, *map(next_below, middles), *map(next_above, middles)]
    points += [0.0] * (31 - len(points)) + [6.0]
    wanted = [nearest_even(Fraction(point), E2M1_MAGNITUDES) for point in points]
    w = torch.tensor([points, [-point for point in points]]) * 2.0**exponent
    codes, scales = quantize_mxfp4(w)
    assert scales.flatten().tolist() == [127 + exponent] * 2
    assert torch.equal(codes[0], mxfp4_group(wanted))
    assert torch.equal(codes[1], mxfp4_group([code | 8 for code in wanted]))


def test_mxfp4_every_group_with_a_full_amax_survives_a_round_trip() -> None:
    """Byte for byte wherever the scale is determined: the largest magnitude is 4 or 6, or the scale is the smallest."""
    torch.manual_seed(11)
    nibbles = torch.randint(0, 16, (253, 64, 32), dtype=torch.uint8)
    nibbles[1:, 0::2, 17] = 6  # 4.0
    nibbles[1:, 1::2, 17] = 15  # -6.0
    scales = torch.arange(253, dtype=torch.uint8)[:, None, None].expand(253, 64, 1)
    codes = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    again, scales2 = quantize_mxfp4(dequantize_mxfp4(codes, scales))
    assert torch.equal(scales2, scales)
    assert torch.equal(again, codes)


def test_mxfp4_zeros_tiny_huge_and_nan() -> None:
    """Case C8 for MXFP4."""
    torch.manual_seed(12)
    w = torch.randn(9, 32)
    w[0] = 0.0
    for row, amax in enumerate([1e-45, 6.3e-38, 1e-36, 3e38, FLT_MAX], start=1):
        w[row] = w[row] / w[row].abs().amax() * amax
    w[6, 3], w[7, 4], w[8, 5] = math.nan, math.inf, -math.inf
    codes, scales = quantize_mxfp4(w)
    assert codes[0].tolist() == [0] * 16 and scales[0] == 0
    assert scales[6] == 255 and codes[6].tolist() == [0] * 16
    values = dequantize_mxfp4(codes, scales)
    assert values[6].isnan().all()
    others = [0, 1, 2, 3, 4, 5, 7, 8]
    assert torch.isfinite(values[others]).all()
    assert values[7, 4] == 3 * 2.0**126 and values[8, 5] == -3 * 2.0**126
    assert (values[4].abs().amax(), values[5].abs().amax()) == (3 * 2.0**126, 3 * 2.0**126)
    for row in (2, 3):
        assert (values[row] - w[row]).abs().max() <= w[row].abs().max() / 5


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(-126, 120), st.sampled_from([torch.float32, torch.bfloat16]))
def test_mxfp4_property(seed: int, exponent: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = (torch.randn(3, 96, generator=generator) * 2.0**exponent).to(dtype)
    codes, scales = quantize_mxfp4(w)
    values = dequantize_mxfp4(codes, scales)
    for group in range(9):
        row, part = group // 3, slice(group % 3 * 32, group % 3 * 32 + 32)
        amax = Fraction(w[row, part].abs().max().item())
        code = int(scales[row, group % 3])
        scale = Fraction(2) ** (code - 127)
        assert amax <= 6 * scale and (code == 0 or amax > 3 * scale), "the smallest scale that holds the group"
        for value, back in zip(w[row, part].tolist(), values[row, part].tolist(), strict=True):
            wanted = E2M1_MAGNITUDES[nearest_even(abs(Fraction(value)) / scale, E2M1_MAGNITUDES)] * scale
            assert Fraction(back) == (-wanted if value < 0 else wanted)


@pytest.mark.parametrize("shape", [(32,), (0, 64), (3, 0, 32), (2, 3, 2880), (9000, 32)], ids=str)
def test_mxfp4_shapes(shape: tuple[int, ...]) -> None:
    torch.manual_seed(13)
    w = torch.randn(shape)
    codes, scales = quantize_mxfp4(w)
    assert codes.shape == (*shape[:-1], shape[-1] // 2) and scales.shape == (*shape[:-1], shape[-1] // 32)
    assert codes.dtype == scales.dtype == torch.uint8
    back = dequantize_mxfp4(codes, scales)
    assert back.shape == w.shape
    amax = w.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    # at most half of the step from 4 to 6, which only an amax of 5 and more reaches
    assert ((back - w).unflatten(-1, (-1, 32)).abs() <= amax / 5 * (1 + 1e-6)).all()


def test_mxfp4_noncontiguous_input() -> None:
    torch.manual_seed(14)
    base = torch.randn(64, 128)
    for view in (base[:, ::2], base.t(), base[::3, 32:96], base[:, :1].expand(64, 96), torch.zeros(1).expand(4, 32)):
        wanted = quantize_mxfp4(view.contiguous())
        for got, want in zip(quantize_mxfp4(view), wanted, strict=True):
            assert same_bits(got, want)
        codes, scales = (t.repeat_interleave(2, -1)[..., ::2] for t in wanted)
        assert not codes.is_contiguous() or codes.numel() == 0
        assert same_bits(dequantize_mxfp4(codes, scales), dequantize_mxfp4(*wanted))


def test_mxfp4_is_fast_enough_for_a_checkpoint() -> None:
    w = torch.randn(4096, 7168)
    start = time.perf_counter()
    codes, scales = quantize_mxfp4(w)
    middle = time.perf_counter()
    back = dequantize_mxfp4(codes, scales)
    end = time.perf_counter()
    error = float((back - w).norm() / w.norm())
    print(f"\nquantize_mxfp4 {middle - start:.2f} s, dequantize_mxfp4 {end - middle:.2f} s, relative error {error:.4f}")
    assert 0.05 < error < 0.13
    assert end - start < 20, "an order of magnitude above an idle core"


# --- refusals ---


def test_wrong_arguments_are_refused_by_name() -> None:
    x = torch.randn(4, 128)
    q, scale = quantize_e4m3(x, "token")
    codes, scales = quantize_mxfp4(x)
    with pytest.raises(ValueError, match="granularity: must be one of token, block128, got 'row'"):
        quantize_e4m3(x, "row")
    with pytest.raises(ValueError, match="granularity"):
        dequantize_e4m3(q, scale, "none")
    with pytest.raises(TypeError, match="x: expected float32, bfloat16 or float16, got torch.float64"):
        quantize_e4m3(x.double(), "token")
    with pytest.raises(TypeError, match="w: expected"):
        quantize_mxfp4(torch.ones(1, 32, dtype=torch.int32))
    with pytest.raises(TypeError, match="x: expected"):
        ue8m0_encode(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="one column"):
        quantize_e4m3(torch.empty(3, 0), "token")
    with pytest.raises(ValueError, match="2 dimensions"):
        quantize_e4m3_weight(torch.ones(128))
    with pytest.raises(ValueError, match=r"scale: expected the shape \[4, 1\], got \[4\]"):
        dequantize_e4m3(q, scale, "block128")
    with pytest.raises(ValueError, match=r"scale: expected the shape \[1, 1\]"):
        dequantize_e4m3_weight(q, scale)
    with pytest.raises(TypeError, match="q: expected torch.float8_e4m3fn"):
        dequantize_e4m3(x, scale, "token")
    with pytest.raises(TypeError, match="scale: expected torch.float32"):
        dequantize_e4m3(q, scale.double(), "token")
    with pytest.raises(ValueError, match=r"w: the last dimension must be a positive multiple of 32, got \[4, 48\]"):
        quantize_mxfp4(torch.ones(4, 48))
    with pytest.raises(ValueError, match=r"scales: expected the shape \[4, 4\], got \[4, 3\]"):
        dequantize_mxfp4(codes, scales[:, :3])
    with pytest.raises(ValueError, match="codes: the last dimension"):
        dequantize_mxfp4(codes[:, :10], scales)
    with pytest.raises(TypeError, match="codes: expected torch.uint8"):
        ue8m0_decode(torch.zeros(3, dtype=torch.int64))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(15)
    x = torch.randn(512, 1000) * torch.logspace(-44, 38, 512, dtype=torch.float64)[:, None].float()
    x[3, 5], x[4, 6], x[5, 7], x[6] = math.nan, math.inf, -math.inf, 0.0
    for dtype in (torch.float32, torch.bfloat16):
        cpu = x.to(dtype)
        gpu = cpu.cuda()
        for granularity in GRANULARITIES:
            here, there = quantize_e4m3(cpu, granularity), quantize_e4m3(gpu, granularity)
            assert all(same_bits(a, b.cpu()) for a, b in zip(here, there, strict=True)), granularity
            assert same_bits(
                torch.nan_to_num(dequantize_e4m3(*here, granularity)),
                torch.nan_to_num(dequantize_e4m3(*there, granularity)).cpu(),
            )
        here, there = quantize_e4m3_weight(cpu), quantize_e4m3_weight(gpu)
        assert all(same_bits(a, b.cpu()) for a, b in zip(here, there, strict=True))
        here, there = quantize_mxfp4(cpu[:, :992]), quantize_mxfp4(gpu[:, :992])
        assert all(same_bits(a, b.cpu()) for a, b in zip(here, there, strict=True))
        assert same_bits(dequantize_mxfp4(*here), dequantize_mxfp4(*there).cpu())
        assert same_bits(ue8m0_encode(cpu), ue8m0_encode(gpu).cpu())
    codes = torch.arange(256, dtype=torch.uint8)
    assert same_bits(ue8m0_decode(codes), ue8m0_decode(codes.cuda()).cpu())
