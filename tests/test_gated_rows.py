"""The activation of the shared experts in one kernel: no spills, bit-equal to `activation.activate` on a GPU."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from megamoe.kernels.activation import ACTIVATIONS, activate  # noqa: E402
from megamoe.kernels.gated import gated_rows, gated_rows_source, takes_rows  # noqa: E402
from megamoe.kernels.jit import JitSettings, build  # noqa: E402

FORMULAS = [
    ("silu", None, None),
    ("swiglu_clamp", 10.0, None),
    ("swiglu_clamp", None, None),
    ("swiglu_oai", 7.0, 1.702),
]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compiles_without_spills(activation: str, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda.core with NVRTC is not installed (megamoe[cuda13])")
    assert build(gated_rows_source(activation), JitSettings(cache_dirs=(tmp_path,))).usage.is_clean


def test_a_cpu_has_no_kernel() -> None:
    assert not takes_rows(torch.zeros(4, 32, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize(("activation", "limit", "alpha"), FORMULAS)
@pytest.mark.parametrize("shape", [(1, 16), (3, 4096), (130, 96), (0, 64)])
def test_as_torch_does(activation: str, limit: float | None, alpha: float | None, shape: tuple[int, int]) -> None:
    x = (torch.randn(shape, device="cuda") * 6).bfloat16()
    if shape[0] > 1:
        for column, value in enumerate((math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e-38)):
            x[0, column], x[1, shape[1] // 2 + column] = value, value
    assert takes_rows(x)
    gate, up = x.chunk(2, dim=-1)
    expected = activate(gate, up, activation=activation, limit=limit, alpha=alpha).bfloat16()
    found = gated_rows(x, activation=activation, limit=limit, alpha=alpha)
    same = (found.view(torch.int16) == expected.view(torch.int16)) | (found.isnan() & expected.isnan())
    assert found.shape == expected.shape and bool(same.all()), f"{int((~same).sum())} values differ"


@pytest.mark.gpu
def test_what_the_kernel_does_not_take() -> None:
    x = torch.zeros(4, 48, device="cuda", dtype=torch.bfloat16)
    assert takes_rows(x[:, :].contiguous())
    for other in (x.float(), x.half(), x[:, :32], x[:, :40].contiguous(), x.flatten()[1:97].view(2, 48)):
        assert not takes_rows(other)
