"""What the grouped GEMM refuses, in the first call and after a call that was accepted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from helpers_gemm import FakeDriver, without_gpu  # noqa: E402
from helpers_packing import random_experts  # noqa: E402

from megamoe.kernels import gemm  # noqa: E402
from megamoe.kernels.packing import pack_mxfp4  # noqa: E402

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn


def operands() -> dict[str, Tensor]:
    return {
        "x": torch.zeros(4, 128).to(E4M3), "sx": torch.ones(4, 1), "w": torch.zeros(2, 64, 128).to(E4M3),
        "sw": torch.ones(2, 1, 1), "out": torch.zeros(4, 64, dtype=torch.bfloat16),
        "m": torch.zeros(4, dtype=torch.int32),
    }  # fmt: skip


REFUSALS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "dtype of x": (lambda p: p.update(x=p["x"].float()), "lhs: values must be float8_e4m3fn"),
    "dims of x": (lambda p: p.update(x=p["x"][0]), "lhs: values must be"),
    "dtype of w": (lambda p: p.update(w=p["w"].float()), "rhs: values must be float8_e4m3fn"),
    "dtype of sx": (lambda p: p.update(sx=p["sx"].double()), "lhs: scales must be float32"),
    "shape of sx": (lambda p: p.update(sx=torch.ones(4, 2)), "lhs: scales must be float32"),
    "shape of sw": (lambda p: p.update(sw=torch.ones(2, 1, 2)), "rhs: scales must be float32"),
    "strides of w": (lambda p: p.update(w=torch.zeros(2, 128, 64).to(E4M3).transpose(1, 2)), "rhs: .* contiguous"),
    "K differs": (lambda p: p.update(w=torch.zeros(2, 64, 112).to(E4M3)), "K must be the same"),
    "K": (
        lambda p: p.update(x=torch.zeros(4, 120).to(E4M3), w=torch.zeros(2, 64, 120).to(E4M3)),
        "K must be a positive multiple of 16",
    ),
    "N": (
        lambda p: p.update(w=torch.zeros(2, 48, 128).to(E4M3), out=torch.zeros(4, 48).bfloat16()),
        "N must be a positive multiple of 32",
    ),
    "groups": (
        lambda p: p.update(w=torch.zeros(1025, 32, 16).to(E4M3), sw=torch.ones(1025, 1, 1), x=p["x"][:, :16]),
        "1 to 1024 groups",
    ),
    "dtype of out": (lambda p: p.update(out=p["out"].float()), "out: must be bfloat16"),
    "shape of out": (lambda p: p.update(out=p["out"][:3]), "out: must be bfloat16"),
    "strides of x": (lambda p: p.update(x=torch.zeros(4, 136).to(E4M3)[:, :128]), "lhs: needs unit stride"),
    "strides of out": (lambda p: p.update(out=torch.zeros(4, 68).bfloat16()[:, :64]), "out: needs unit stride"),
    "alignment of out": (lambda p: p.update(out=torch.zeros(4, 72).bfloat16()[:, 4:68]), "out: needs unit stride"),
    "overlap": (lambda p: p.update(out=p["out"][:1].expand(4, 64)), "out: rows must not overlap"),
    "dtype of m": (lambda p: p.update(m=p["m"].long()), "m_indices: must be contiguous int32"),
    "length of m": (lambda p: p.update(m=p["m"][:3]), "m_indices: must be contiguous int32"),
    "scattered rows": (lambda p: p.update(m=torch.tensor([0, 1, 0, 1]).int()), "rows of a group must be neighbours"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_rule(name: str) -> None:
    change, words = REFUSALS[name]
    p = operands()
    change(p)
    with pytest.raises(ValueError, match=words):
        gemm.m_grouped_fp8_gemm_nt_contiguous((p["x"], p["sx"]), (p["w"], p["sw"]), p["out"], p["m"])


@pytest.mark.parametrize("name", [name for name in REFUSALS if name != "scattered rows"])
def test_a_call_that_was_accepted_does_not_open_the_door(name: str) -> None:
    change, words = REFUSALS[name]
    p, fake = operands(), FakeDriver()
    with without_gpu(fake):
        for _ in range(2):
            gemm.m_grouped_fp8_gemm_nt_contiguous((p["x"], p["sx"]), (p["w"], p["sw"]), p["out"], p["m"])
        change(p)
        with pytest.raises(ValueError, match=words):
            gemm.m_grouped_fp8_gemm_nt_contiguous((p["x"], p["sx"]), (p["w"], p["sw"]), p["out"], p["m"])
    assert len(fake.launches) == 2


def test_refusals_of_the_other_entries() -> None:
    p = operands()
    x, w = (p["x"], p["sx"]), (p["w"], p["sw"])
    with pytest.raises(ValueError, match="lhs: must be a pair"):
        gemm.m_grouped_fp8_gemm_nt_contiguous(p["x"], w, p["out"], p["m"])
    with pytest.raises(ValueError, match="rhs: must be a pair"):
        gemm.m_grouped_fp8_gemm_nt_contiguous(x, p["w"], p["out"], p["m"])
    with pytest.raises(ValueError, match="b: must be"):
        gemm.fp8_gemm_nt(x, w, p["out"])
    packed = pack_mxfp4(*random_experts(2, 64, 128), "sm90_ss")
    with pytest.raises(ValueError, match="weight of one expert"):
        gemm.fp8_fp4_gemm_nt(x, packed, p["out"])
    packed.version += 1
    with pytest.raises(ValueError, match="packed for sm90_ss version"):
        gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(x, packed, p["out"], p["m"])
    masked = (p["x"].expand(2, 4, 128).contiguous(), torch.ones(2, 4))
    out = torch.zeros(2, 8, 64).bfloat16()
    counts = torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="without a gap"):
        gemm.m_grouped_fp8_gemm_nt_masked(masked, w, out[:, :4], counts, 1)
    with pytest.raises(ValueError, match="expected_m"):
        gemm.m_grouped_fp8_gemm_nt_masked(masked, w, out[:, :4].contiguous(), counts, -1)
    with pytest.raises(ValueError, match="the 2 groups of rhs"):
        gemm.m_grouped_fp8_gemm_nt_masked((masked[0][:1], masked[1][:1]), w, out[:1, :4], counts, 1)
