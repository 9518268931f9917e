"""The activations against float64, at the values where a wrong clamp or an overflow would show."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megamoe.config import ModelConfig, MoESpec
from megamoe.errors import ConfigError
from megamoe.kernels.activation import ACTIVATIONS, activate, check_activation

# case C11, and beyond
GATES = [-1e5, -200.0, -104.0, -88.8, -50.0, -10.0, -1.0, -0.0, 0.0, 1e-30, 1.0, 9.99, 10.0, 10.01, 50.0, 1e5]
UPS = [-50.0, -10.0, -7.01, -1.0, 0.0, 1.0, 7.0, 9.99, 50.0]
VARIANTS: list[tuple[str, float | None, float | None]] = [
    ("silu", None, None),
    ("swiglu_clamp", 10.0, None),
    ("swiglu_clamp", None, None),
    ("swiglu_oai", 7.0, 1.702),
    ("swiglu_oai", None, 1.702),
    ("swiglu_oai", 7.0, 1.0),
]


def by_definition(gate: float, up: float, activation: str, limit: float | None, alpha: float | None) -> float:
    """Return the activation of two numbers, evaluated in float64."""
    if limit is not None:
        gate, up = min(gate, limit), max(-limit, min(up, limit))
    factor = 1.0 if alpha is None else alpha
    exponent = factor * gate
    sigmoid = 1 / (1 + math.exp(-exponent)) if exponent > -700 else 0.0
    return gate * sigmoid * (up + 1 if activation == "swiglu_oai" else up)


@pytest.mark.parametrize(("activation", "limit", "alpha"), VARIANTS)
def test_gates_of_any_size_give_no_nan(activation: str, limit: float | None, alpha: float | None) -> None:
    gate = torch.tensor([-3.4e38, -2e38, -1e30, -1e10])
    for up in (-50.0, 0.0, 50.0, 1e30):
        got = activate(gate, torch.full_like(gate, up), activation=activation, limit=limit, alpha=alpha)
        assert (got == 0).all(), got


def grid() -> tuple[Tensor, Tensor]:
    gate, up = torch.meshgrid(torch.tensor(GATES), torch.tensor(UPS), indexing="ij")
    return gate.clone(), up.clone()


@pytest.mark.parametrize(("activation", "limit", "alpha"), VARIANTS)
def test_values(activation: str, limit: float | None, alpha: float | None) -> None:
    gate, up = grid()
    got = activate(gate, up, activation=activation, limit=limit, alpha=alpha)
    assert got.dtype == torch.float32
    assert torch.isfinite(got).all()
    for i in range(len(GATES)):
        for j in range(len(UPS)):
            wanted = by_definition(float(gate[i, j]), float(up[i, j]), activation, limit, alpha)
            # below 2^-100 the sigmoid is near the end of FP32's range
            assert float(got[i, j]) == pytest.approx(wanted, rel=3e-6, abs=1e-30), (GATES[i], UPS[j])


@pytest.mark.parametrize(("activation", "limit", "alpha"), VARIANTS)
def test_gradients(activation: str, limit: float | None, alpha: float | None) -> None:
    gate, up = grid()
    gate.requires_grad_()
    up.requires_grad_()
    activate(gate, up, activation=activation, limit=limit, alpha=alpha).sum().backward()
    assert gate.grad is not None and up.grad is not None
    assert torch.isfinite(gate.grad).all() and torch.isfinite(up.grad).all()
    if limit is not None:
        assert (gate.grad[gate > limit] == 0).all()
        assert (up.grad[up.abs() > limit] == 0).all()
        assert (gate.grad[(gate > 0) & (gate < limit) & (up == 1)] != 0).all()
    # central differences in float64, away from the kinks
    step = 1e-5
    for i, g in enumerate(GATES):
        for j, u in enumerate(UPS):
            if abs(g) > 1e4 or (limit is not None and (abs(g - limit) < 0.02 or abs(abs(u) - limit) < 0.02)):
                continue
            args = (activation, limit, alpha)
            wanted_gate = (by_definition(g + step, u, *args) - by_definition(g - step, u, *args)) / (2 * step)
            wanted_up = (by_definition(g, u + step, *args) - by_definition(g, u - step, *args)) / (2 * step)
            assert float(gate.grad[i, j]) == pytest.approx(wanted_gate, rel=1e-4, abs=1e-5), (g, u)
            assert float(up.grad[i, j]) == pytest.approx(wanted_up, rel=1e-4, abs=1e-5), (g, u)


def test_gate_is_clamped_from_above_only_and_up_on_both_sides() -> None:
    """Case C11: gate -50, 9.99, 10, 50; up -50, 50; limit 10."""

    def clamped(gate: float, up: float) -> float:
        return float(activate(torch.tensor(gate), torch.tensor(up), activation="swiglu_clamp", limit=10.0, alpha=None))

    assert clamped(50.0, 1.0) == clamped(10.0, 1.0)
    assert clamped(9.99, 1.0) < clamped(10.0, 1.0)
    assert clamped(3.0, 50.0) == clamped(3.0, 10.0) == -clamped(3.0, -50.0)
    # -50 * sigmoid(-50) is -9.6e-21; a gate clamped to -10 would give -4.5e-4
    assert clamped(-50.0, 1.0) == pytest.approx(-50 * math.exp(-50), rel=1e-5)


def test_the_offset_and_alpha_of_gpt_oss() -> None:
    def oai(gate: float, up: float, alpha: float = 1.702) -> float:
        return float(activate(torch.tensor(gate), torch.tensor(up), activation="swiglu_oai", limit=7.0, alpha=alpha))

    assert oai(2.0, 0.0) == pytest.approx(2 / (1 + math.exp(-3.404)), rel=1e-6)
    assert oai(2.0, -1.0) == 0.0
    assert oai(100.0, 100.0) == pytest.approx(7 / (1 + math.exp(-7 * 1.702)) * 8, rel=1e-6)
    assert oai(2.0, 0.0, alpha=1.0) != oai(2.0, 0.0)


def test_nan_goes_through_and_stays() -> None:
    for activation, limit, alpha in VARIANTS:
        gate, up = torch.tensor([math.nan, 1.0, 1.0]), torch.tensor([1.0, math.nan, 1.0])
        got = activate(gate, up, activation=activation, limit=limit, alpha=alpha)
        assert got.isnan().tolist() == [True, True, False]


def test_low_precision_inputs_are_evaluated_in_fp32() -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(64, 32).bfloat16(), torch.randn(64, 32).bfloat16()
    for activation, limit, alpha in VARIANTS:
        low = activate(gate, up, activation=activation, limit=limit, alpha=alpha)
        high = activate(gate.float(), up.float(), activation=activation, limit=limit, alpha=alpha)
        assert low.dtype == torch.float32 and torch.equal(low, high)
    assert activate(gate[:0], up[:0], activation="silu", limit=None, alpha=None).shape == (0, 32)


@pytest.mark.parametrize(
    ("activation", "limit", "alpha", "message"),
    [
        ("situ", None, None, "activation: must be one of silu, swiglu_clamp, swiglu_oai, got 'situ'"),
        ("silu", 10.0, None, "silu does not clamp, got 10.0; use swiglu_clamp"),
        ("silu", None, 1.702, "alpha: silu has none"),
        ("swiglu_clamp", 10.0, 1.702, "alpha: swiglu_clamp has none, got 1.702"),
        ("swiglu_clamp", 0.0, None, "limit: must be positive"),
        ("swiglu_clamp", -7.0, None, "limit: must be positive"),
        ("swiglu_clamp", math.nan, None, "limit: must be positive"),
        ("swiglu_oai", math.inf, 1.702, "limit: must be positive and finite"),
        ("swiglu_oai", 7.0, None, "alpha: swiglu_oai needs a finite factor"),
        ("swiglu_oai", 7.0, math.nan, "alpha: swiglu_oai needs a finite factor"),
    ],
)
def test_refusals(activation: str, limit: float | None, alpha: float | None, message: str) -> None:
    """Case C11: an unknown activation raises at construction, by the same check that the call makes."""
    with pytest.raises(ConfigError, match=message):
        check_activation(activation, limit, alpha)
    with pytest.raises(ConfigError, match=message):
        activate(torch.ones(2), torch.ones(2), activation=activation, limit=limit, alpha=alpha)


def test_the_choices_are_those_of_the_configuration() -> None:
    numbers = {"hidden": 32, "intermediate": 32, "num_experts": 2, "top_k": 1}
    for name in ACTIVATIONS:
        spec = MoESpec(**numbers, activation=name)
        check_activation(spec.activation, spec.swiglu_limit, spec.swiglu_alpha)
    for build in (MoESpec, ModelConfig):
        with pytest.raises(ConfigError, match=", ".join(ACTIVATIONS)):
            build(**numbers, activation="situ")
