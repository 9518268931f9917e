"""The C++ codes are the twins of kernels/formats.py, and the vector code is the twin of the scalar code: same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megamoe.kernels.activation import activate
from megamoe.kernels.formats import (
    dequantize_mxfp4,
    quantize_e4m3,
    quantize_mxfp4,
    ue8m0_decode,
    ue8m0_encode,
)

host = pytest.importorskip("megamoe._host", reason="the C++ engine is not built")


def apply(function: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    out = (
        torch.full(values.shape, 77, dtype=torch.uint8).to(dtype)
        if dtype == torch.uint8
        else torch.empty(values.shape, dtype=dtype)
    )
    getattr(host, function)(values.data_ptr(), values.numel(), out.data_ptr())
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    nan = a.isnan() & b.isnan() if a.is_floating_point() else torch.zeros_like(a, dtype=torch.bool)
    same = a.view(torch.int32) == b.view(torch.int32) if a.dtype == torch.float32 else a == b
    return bool((same | nan).all())


def random_bits(n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (n,), generator=generator, dtype=torch.int64).to(torch.int32)
    return bits.view(torch.float32)


def near_codes() -> Tensor:
    """Every E4M3 value, every midpoint, and the FP32 numbers beside them."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[~values.isnan()].sort().values
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    return torch.cat([points, *(torch.nextafter(points, torch.tensor(s * 1e9)) for s in (-1.0, 1.0))])


def test_e4m3_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert same_bits(apply("e4m3_decode", codes, torch.float32), codes.view(torch.float8_e4m3fn).float())
    values = torch.cat([near_codes(), random_bits(200_000, 1), torch.tensor([float("inf"), -float("inf"), 0.0, -0.0])])
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    expected[values.isnan()] = 0x7F
    assert torch.equal(apply("e4m3_encode", values, torch.uint8), expected)


def test_ue8m0_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert same_bits(apply("ue8m0_decode", codes, torch.float32), ue8m0_decode(codes))
    powers = 2.0 ** torch.arange(-126, 127).double()
    above = torch.nextafter(powers.float(), torch.tensor(1e38))
    values = torch.cat([powers.float(), above, random_bits(100_000, 2).abs()])
    values = values[values.isfinite() & (values <= 2.0**127)]
    assert torch.equal(apply("ue8m0_encode", values, torch.uint8), ue8m0_encode(values))


def test_e2m1_codes() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes | (codes << 4)).repeat_interleave(16).view(16, 16)
    values = dequantize_mxfp4(packed, torch.full((16, 1), 127, dtype=torch.uint8))[:, 0].contiguous()
    assert same_bits(apply("e2m1_decode", codes, torch.float32), values)
    x = torch.linspace(-6, 6, 4801).view(-1)
    x = torch.cat([x, torch.zeros(-x.numel() % 31)])
    groups = torch.cat([x.view(-1, 31), torch.full((x.numel() // 31, 1), 6.0)], dim=1)  # amax 6: scale 1
    quantised, scales = quantize_mxfp4(groups)
    assert bool((scales == 127).all())
    nibbles = torch.stack([quantised & 15, quantised >> 4], dim=-1).flatten(1).contiguous()
    assert torch.equal(apply("e2m1_encode", groups.contiguous(), torch.uint8), nibbles)


def test_bf16_codes() -> None:
    values = random_bits(200_000, 3)
    values = values[~values.isnan()]
    expected = values.bfloat16().view(torch.int16)
    assert torch.equal(apply("bf16_encode", values, torch.int16), expected)


@pytest.mark.parametrize("isa", ["", "scalar"], ids=["best", "scalar"])
@pytest.mark.parametrize("columns", [1, 7, 8, 100, 128, 384])
def test_quantised_rows_are_those_of_formats(isa: str, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(40, columns, generator=generator)
    x[0] = 0.0
    x[1:8] *= torch.tensor([6.3e-38, 1e-36, 1.4e-36, 3e38, 1e-45, 1e30, 1e-30])[:, None]
    x[8, 0], x[9, columns // 2], x[10] = float("nan"), float("inf"), float("nan")
    codes, scales = torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x))
    host.quantize_rows(isa, x.data_ptr(), len(x), columns, codes.data_ptr(), scales.data_ptr())
    q, scale = quantize_e4m3(x, "token")
    assert same_bits(scales, scale)
    assert torch.equal(codes, q.view(torch.uint8))
    assert bool(scales.isfinite().all()) and bool((scales > 0).all())


@pytest.mark.parametrize("round_to", [0, 1, 2], ids=["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize(
    ("name", "limit", "alpha"),
    [("silu", None, None), ("swiglu_clamp", 10.0, None), ("swiglu_clamp", None, None), ("swiglu_oai", 7.0, 1.702)],
)
def test_activation(name: str, limit: float | None, alpha: float | None, round_to: int) -> None:
    generator = torch.Generator().manual_seed(4)
    gate, up = torch.randn(64, 128, generator=generator) * 8, torch.randn(64, 128, generator=generator) * 8
    gate[0, :8] = torch.tensor([-50.0, 9.99, 10.0, 50.0, -200.0, 1000.0, -1000.0, 0.0])
    up[0, :8] = torch.tensor([-50.0, 50.0, -50.0, 50.0, 1.0, 1.0, 1.0, 50.0])
    results = []
    for isa in ("", "scalar"):
        out = torch.full_like(gate, float("nan"))
        host.activate_rows(
            isa,
            *(t.data_ptr() for t in (gate, up, out)),
            64,
            128,
            getattr(host.Activation, name),
            limit is not None,
            limit or 0.0,
            alpha or 0.0,
            round_to,
        )
        results.append(out)
    assert same_bits(*results), "vector and scalar code differ"
    if round_to == 0:
        exact = activate(gate.double(), up.double(), activation=name, limit=limit, alpha=alpha)
        small = exact.abs() < 1e-30
        error = ((results[0] - exact).abs() / exact.abs().clamp_min(1e-30))[~small].max().item()
        print(f"largest relative error {error:.1e}")
        assert error < 1e-6
        assert bool((results[0][small].abs() <= 1e-29).all())
