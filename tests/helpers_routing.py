"""A float64 router in plain Python loops, and the menu of routers that the tests go through."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.config import RouterConfig
from megamoe.layers.router import Router, RouterOutput


def extreme_operands(experts: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return 40 BF16 tokens and a router's weight of 1032 columns with infinities, NaN and the largest numbers."""
    x = torch.randn(40, 1032, device=device).bfloat16()
    weight = torch.randn(experts, 1032, device=device).to(dtype)
    weight[:, 100], weight[3, 5] = 1.0, 0.0  # powers of two have no smaller parts
    x[1, 100], x[2, 100], x[3, 7], x[4, 5] = math.inf, -math.inf, math.nan, math.inf
    x[5, 100], x[5, 101] = math.inf, -math.inf
    weight[10, 0], weight[11, 1031], weight[12, 3] = math.inf, -math.inf, math.nan
    if dtype == torch.float32:
        weight[13, 8] = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # a NaN of low bits alone
        weight[14, 8] = 3.4028234e38
    x[6, 0] = 0.0
    return x, weight


# (experts, top_k, router section); the model that routes like this is the id of the case
MENU: dict[str, tuple[int, int, dict[str, Any]]] = {
    "mixtral": (8, 2, {"score": "softmax"}),
    "olmoe": (64, 8, {"score": "softmax", "renormalize": False}),
    "qwen3_next": (512, 10, {"score": "softmax"}),
    "ernie": (64, 6, {"score": "softmax", "bias": True}),
    "deepseek_v2": (
        160,
        6,
        {"score": "softmax", "groups": 8, "topk_groups": 3, "group_reduce": "max", "renormalize": False, "scale": 16.0},
    ),
    "mistral": (128, 4, {"score": "softmax", "groups": 4, "topk_groups": 2}),
    "gpt_oss": (128, 4, {"score": "topk_softmax", "logit_bias": True}),
    "topk_softmax_bias_groups": (64, 4, {"score": "topk_softmax", "bias": True, "groups": 8, "topk_groups": 2}),
    "sigmoid": (32, 3, {"score": "sigmoid", "renormalize": False, "scale": 2.0}),
    "minimax_m2": (256, 8, {"score": "sigmoid", "bias": True}),
    "deepseek_v3": (256, 8, {"score": "sigmoid", "bias": True, "groups": 8, "topk_groups": 4, "scale": 2.5}),
    "deepseek_v4": (384, 6, {"score": "sqrtsoftplus", "bias": True, "scale": 1.5}),
    "sqrtsoftplus_plain": (48, 5, {"score": "sqrtsoftplus", "renormalize": False}),
    "largest": (1024, 16, {"score": "sqrtsoftplus", "bias": True, "groups": 8, "topk_groups": 4, "scale": 2.5}),
}
menu = pytest.mark.parametrize("name", MENU)
DECISIVE = 1e-6  # relative gap between two keys that FP32 rounding (6e-8 each) can't turn around


def reference_scores(row: list[float], score: str) -> list[float]:
    if score == "softmax":
        top = max(row)
        exps = [math.exp(z - top) for z in row]
        return [e / math.fsum(exps) for e in exps]
    if score == "sigmoid":
        return [1 / (1 + math.exp(-z)) for z in row]
    if score == "sqrtsoftplus":
        return [math.sqrt(max(z, 0.0) + math.log1p(math.exp(-abs(z)))) for z in row]
    return list(row)


def reference_weights(row: list[float], ids: list[int], config: RouterConfig) -> list[float]:
    scores = reference_scores(row, config.score)
    if config.score == "topk_softmax":
        top = max(row[e] for e in ids)
        chosen = [math.exp(row[e] - top) for e in ids]
    else:
        chosen = [scores[e] for e in ids]
    divide = config.renormalize or config.score == "topk_softmax"
    total = math.fsum(chosen) if divide else 1.0
    return [value / total * config.scale for value in chosen]


def reference_choice(row: list[float], bias: list[float], config: RouterConfig, top_k: int) -> tuple[list[int], float]:
    """Return the ids, and the smallest relative gap between keys (and group scores) that decided them."""

    def relative(a: float, b: float) -> float:
        return (a - b) / max(abs(a), abs(b), 1e-300)

    keys = [s + b for s, b in zip(reference_scores(row, config.score), bias, strict=True)]
    size = len(row) // config.groups
    candidates, gap = list(range(len(row))), math.inf
    if config.groups > 1:
        best = [sorted(keys[g * size : (g + 1) * size], reverse=True) for g in range(config.groups)]
        totals = [b[0] + b[1] if config.group_reduce == "top2" else b[0] for b in best]
        order = sorted(range(config.groups), key=lambda g: (-totals[g], g))
        kept = order[: config.topk_groups]
        if config.topk_groups < config.groups:
            gap = relative(totals[order[config.topk_groups - 1]], totals[order[config.topk_groups]])
        candidates = [e for e in candidates if e // size in kept]
    candidates.sort(key=lambda e: (-keys[e], e))
    front = candidates[: top_k + 1]
    gap = min([gap] + [relative(keys[a], keys[b]) for a, b in zip(front, front[1:], strict=False)])
    return candidates[:top_k], gap


def make(name: str, *, seed: int = 0, hidden: int | None = None, **changes: Any) -> Router:
    """Build a router of the menu with random biases; without `hidden` its weight is the identity: x is the logits."""
    num_experts, top_k, section = MENU[name]
    torch.manual_seed(seed)
    router = Router(RouterConfig(**{**section, **changes}), hidden or num_experts, num_experts, top_k)
    with torch.no_grad():
        if hidden is None:
            router.weight.copy_(torch.eye(num_experts))
        for bias in (router.bias, router.e_score_correction_bias):
            if bias is not None:
                bias.copy_(torch.randn(num_experts) * 0.2)
    return router


def check_against_reference(router: Router, out: RouterOutput) -> None:
    """Compare ids with float64 where the keys leave no doubt (nearly everywhere), and all weights for these ids."""
    correction = router.e_score_correction_bias
    bias = [0.0] * router.num_experts if correction is None else correction.double().tolist()
    # without bias and groups the key is the logit itself, and only the reference rounds
    by_logit = correction is None and router.config.groups == 1
    decisive, worst = 0, 0.0
    for row, ids, weights in zip(
        out.logits.double().tolist(), out.topk_ids.tolist(), out.topk_weights.double().tolist(), strict=True
    ):
        expected, gap = reference_choice(row, bias, router.config, router.top_k)
        if gap > (1e-14 if by_logit else DECISIVE):
            decisive += 1
            assert ids == expected
        exact = reference_weights(row, ids, router.config)
        worst = max([worst] + [abs(w - e) / e for w, e in zip(weights, exact, strict=True)])
    print(f"{decisive} of {len(out.logits)} rows decisive, worst relative error of a weight {worst:.2e}")
    assert decisive >= 0.9 * len(out.logits)
    assert worst <= 1e-6


def check_ids(ids: Tensor, num_experts: int) -> None:
    assert ids.dtype == torch.int64
    assert ids.numel() == 0 or (0 <= int(ids.min()) and int(ids.max()) < num_experts)
    assert all(len(set(row)) == len(row) for row in ids.tolist()), f"an expert twice in {ids.tolist()}"


def hash_router(**changes: Any) -> Router:
    section = {"score": "sqrtsoftplus", "select": "hash", "bias": True, "scale": 1.5, **changes}
    return Router(RouterConfig(**section), 24, 32, 6, vocab_size=100)
