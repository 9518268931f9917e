"""Random MoE problems for tests: whole-layer weights, routed tokens, one rank's share, and what the oracle says.

Everything is a function of its arguments and a seed: ranks and the test that started them agree without talking.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megamoe.config import MoESpec, local_expert_range
from megamoe.kernels.weights import ExpertWeights, quantize_experts
from megamoe.testing.numeric import compare, diff
from megamoe.testing.oracle import moe_oracle, moe_oracle_exact

__all__ = [
    "GRID",
    "Case",
    "Problem",
    "check",
    "expected",
    "local_weights",
    "make_problem",
    "make_tokens",
    "tolerance",
    "unquantised",
]


# The problems are small and the machine may be busy: threads would wait for each other more than they work.
torch.set_num_threads(1)


@dataclass
class Problem:
    """The experts of a whole layer: as floats, and in the format of the spec."""

    spec: MoESpec
    w13: Tensor
    w2: Tensor
    b13: Tensor | None
    b2: Tensor | None
    weights: ExpertWeights


def make_problem(spec: MoESpec, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Problem:
    """Draw the experts of a layer; `dtype` is that of parameters that are not quantised."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    w13 = normal(spec.num_experts, 2 * spec.intermediate, spec.hidden, scale=2 * spec.hidden**-0.5)
    w2 = normal(spec.num_experts, spec.hidden, spec.intermediate, scale=spec.intermediate**-0.5)
    b13 = normal(spec.num_experts, 2 * spec.intermediate, scale=0.5) if spec.expert_bias else None
    b2 = normal(spec.num_experts, spec.hidden, scale=0.5) if spec.expert_bias else None
    if spec.weight_format == "none":
        w13, w2 = w13.to(dtype), w2.to(dtype)
        b13, b2 = (None if b is None else b.to(dtype) for b in (b13, b2))
    return Problem(spec, w13, w2, b13, b2, quantize_experts(w13, w2, b13, b2, spec.weight_format))


def make_tokens(
    spec: MoESpec, num_tokens: int, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw x `[T, H]`, distinct ids `[T, K]` int64 and weights `[T, K]` FP32."""
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(num_tokens, spec.hidden, generator=generator).to(dtype)
    ids = torch.rand(num_tokens, spec.num_experts, generator=generator).argsort(dim=-1)[:, : spec.top_k].contiguous()
    weights = torch.rand(num_tokens, spec.top_k, generator=generator) + 0.1
    return x, ids, weights / weights.sum(-1, keepdim=True)


def local_weights(problem: Problem, rank: int, world_size: int) -> ExpertWeights:
    """Return copies of one rank's experts."""
    first, last = local_expert_range(problem.spec.num_experts, rank, world_size)
    whole = problem.weights
    parts = {
        name: None if getattr(whole, name) is None else getattr(whole, name)[first:last].clone()
        for name in ("w13", "w2", "w13_scale", "w2_scale", "b13", "b2")
    }
    return ExpertWeights(**parts, format=whole.format)


def expected(problem: Problem, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return what the oracle says, with the quantisation points of the spec."""
    spec = problem.spec
    plain = spec.weight_format == "none"
    w13, w2 = (problem.w13, problem.w2) if plain else problem.weights.dequantize()
    return moe_oracle(
        x,
        ids,
        weights,
        w13,
        w2,
        b13=problem.b13,
        b2=problem.b2,
        activation=spec.activation,
        limit=spec.swiglu_limit,
        alpha=spec.swiglu_alpha,
        weight_position=spec.weight_position,
        weight_format=spec.weight_format,
        act_scale=spec.act_scale,
    )


def unquantised(problem: Problem, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the same without any quantisation, in float64."""
    spec = problem.spec
    return moe_oracle_exact(
        x,
        ids,
        weights,
        problem.w13,
        problem.w2,
        b13=problem.b13,
        b2=problem.b2,
        activation=spec.activation,
        limit=spec.swiglu_limit,
        alpha=spec.swiglu_alpha,
    )


def tolerance(spec: MoESpec, dtype: torch.dtype) -> str:
    """Return which row of the table of tolerances a result is held to."""
    if spec.weight_format != "none":
        return "quantised"
    return "fp32" if dtype == torch.float32 else "bf16"


def check(problem: Problem, y: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
    """Fail unless y is the oracle's answer; print the error, and the one against unquantised maths beside it."""
    truth = expected(problem, x, ids, weights)
    assert y.shape == truth.shape and y.dtype == x.dtype
    verdict = compare(y, truth, tolerance(problem.spec, problem.w13.dtype))
    exact = diff(y, unquantised(problem, x, ids, weights)) if y.numel() else 0.0
    print(f"{verdict.text}; against unquantised maths {exact:.1e}")
    assert verdict.ok, verdict.text


@dataclass(frozen=True)
class Case:
    """One point of the grid: an op and the dtype of x and of parameters that are not quantised."""

    spec: MoESpec
    dtype: torch.dtype


_FORMATS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "fp32": ({"weight_format": "none"}, torch.float32),
    "bf16": ({"weight_format": "none"}, torch.bfloat16),
    "fp8-token": ({"weight_format": "fp8_block", "act_scale": "token"}, torch.bfloat16),
    "fp8-block128": ({"weight_format": "fp8_block", "act_scale": "block128"}, torch.bfloat16),
    "mxfp4-token": ({"weight_format": "mxfp4", "act_scale": "token"}, torch.bfloat16),
    "mxfp4-block128": ({"weight_format": "mxfp4", "act_scale": "block128"}, torch.float32),
}
_ACTIVATIONS: dict[str, dict[str, Any]] = {
    "silu": {"activation": "silu"},
    "clamp": {"activation": "swiglu_clamp", "swiglu_limit": 1.0},
    "unclamped": {"activation": "swiglu_clamp"},
    "oai": {"activation": "swiglu_oai", "swiglu_limit": 1.5},
}
# the sizes put short blocks of 128 at the edge of both H and I
GRID: dict[str, Case] = {
    f"{f}-{a}-{position}{'-bias' if bias else ''}": Case(
        MoESpec(
            hidden=160,
            intermediate=192,
            num_experts=8,
            top_k=3,
            expert_bias=bias,
            weight_position=position,
            **_FORMATS[f][0],
            **_ACTIVATIONS[a],
        ),
        _FORMATS[f][1],
    )
    for f, a, position, bias in product(_FORMATS, _ACTIVATIONS, ("after", "before"), (False, True))
}
