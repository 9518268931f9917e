"""The pure functions of routing: stable top-k, choice, weights and balance loss, at extremes and on random input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers_routing import check_ids, reference_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megamoe.config import RouterConfig
from megamoe.kernels import routing


@pytest.mark.parametrize("renormalize", [True, False])
def test_sqrtsoftplus_from_minus_104_to_200_in_one_token(renormalize: bool) -> None:
    """Case C12: FP32 softplus is 0 at -104, loses all digits of log(1 + exp) below -16.6 and overflows above 88.7."""
    ends = torch.tensor([-104.0, -60.0, -41.0, -39.0, -16.7, 0.0, 88.8, 200.0])
    ids = torch.arange(len(ends)).unsqueeze(0)
    got = routing.routing_weights(ends.unsqueeze(0), ids, score="sqrtsoftplus", renormalize=renormalize, scale=1.5)
    config = RouterConfig(score="sqrtsoftplus", renormalize=renormalize, scale=1.5)
    exact = torch.tensor(reference_weights(ends.tolist(), ids[0].tolist(), config), dtype=torch.float64)
    error = ((got[0].double() - exact) / exact).abs().max()
    print(f"worst relative error {error:.2e}")
    assert error <= 1e-6
    keys = routing.routing_scores(ends, "sqrtsoftplus").double()
    assert ((keys * 1.5 / keys.sum() if renormalize else keys * 1.5) - exact).abs().max() <= 1e-6 * exact.max()
    assert (keys.diff() > 0).all()


@pytest.mark.parametrize("score", routing.SCORES)
def test_logits_that_leave_no_score_at_all(score: str) -> None:
    logits = torch.full((2, 8), -math.inf)
    ids = routing.choose_experts(logits, score=score, top_k=3)
    assert ids.tolist() == [[0, 1, 2]] * 2
    for renormalize in (True, False):
        weights = routing.routing_weights(logits, ids, score=score, renormalize=renormalize)
        assert torch.equal(weights, torch.zeros(2, 3))
    far = torch.tensor([[-3e38, -1e30, -1e5, -1e4]])
    far_weights = routing.routing_weights(far, torch.tensor([[3, 2, 1, 0]]), score=score, renormalize=True)
    assert far_weights.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_a_masked_group_is_never_entered() -> None:
    """The best group holds one NaN expert: it is still preferred to any expert of a group that was not kept."""
    logits = torch.tensor([[1.0, 2.0, 9.0, math.nan, 3.0, 4.0, -math.inf, 8.0]])
    args: dict[str, Any] = {"score": "sigmoid", "groups": 4, "group_reduce": "max"}
    assert routing.choose_experts(logits, top_k=2, topk_groups=1, **args).tolist() == [[2, 3]]
    assert routing.choose_experts(logits, top_k=4, topk_groups=2, **args).tolist() == [[2, 7, 6, 3]]


any_float = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_stable_topk_sorts_like_python(data: st.DataObject) -> None:
    keys = data.draw(st.lists(any_float, min_size=1, max_size=40))
    allowed = data.draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys)))
    k = data.draw(st.integers(1, len(keys)))

    def order(column: int) -> tuple[bool, bool, float, int]:
        value = keys[column]
        if not allowed[column]:
            return (True, False, 0.0, column)
        return (False, math.isnan(value), 0.0 if math.isnan(value) else -value, column)

    got = routing.stable_topk(torch.tensor([keys]), k, allowed=torch.tensor([allowed]))
    assert got.tolist() == [sorted(range(len(keys)), key=order)[:k]]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_properties_of_any_router(data: st.DataObject) -> None:
    """Distinct, in range, sorted by key, inside the kept groups; renormalised weights sum to the scale."""
    groups = data.draw(st.sampled_from([1, 2, 4]))
    num_experts = groups * data.draw(st.integers(2, 6))
    topk_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, topk_groups * num_experts // groups))
    config = RouterConfig(
        score=data.draw(st.sampled_from(routing.SCORES)),
        groups=groups,
        topk_groups=topk_groups,
        group_reduce=data.draw(st.sampled_from(["top2", "max"])),
        renormalize=data.draw(st.booleans()),
        scale=data.draw(st.sampled_from([1.0, 1.5, 2.5])),
    )
    logits = torch.tensor([data.draw(st.lists(any_float, min_size=num_experts, max_size=num_experts))])
    use_bias = data.draw(st.booleans())
    bias = torch.tensor(data.draw(st.lists(st.floats(-1, 1, width=32), min_size=num_experts, max_size=num_experts)))
    ids = routing.choose_experts(
        logits,
        score=config.score,
        top_k=top_k,
        correction_bias_E=bias if use_bias else None,
        groups=groups,
        topk_groups=topk_groups,
        group_reduce=config.group_reduce,
    )
    check_ids(ids, num_experts)
    assert len(set((ids // (num_experts // groups))[0].tolist())) <= topk_groups
    keys = routing.routing_scores(logits, config.score) + bias if use_bias else logits
    chosen = torch.where(keys.isnan(), -math.inf, keys)[0, ids[0]]
    assert (chosen[:-1] >= chosen[1:]).all()

    weights = routing.routing_weights(
        logits, ids, score=config.score, renormalize=config.renormalize, scale=config.scale
    )[0]
    picked = logits[0, ids[0]]
    if logits.isfinite().all():
        assert weights.isfinite().all() and (weights >= 0).all()
    if picked.isfinite().all() and (config.renormalize or config.score == "topk_softmax"):
        assert abs(float(weights.double().sum()) - config.scale) <= 1e-6 * config.scale


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("centre", [0.0, -50.0, 60.0])
@pytest.mark.parametrize("score", routing.SCORES)
def test_gradcheck_of_the_weights(score: str, centre: float, renormalize: bool) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(4, 12, dtype=torch.float64) + centre).requires_grad_()
    ids = routing.choose_experts(logits, score=score, top_k=3)
    ids[1, 2] = -1

    def weights(z: Tensor) -> Tensor:
        return routing.routing_weights(z, ids, score=score, renormalize=renormalize, scale=1.5)

    assert torch.autograd.gradcheck(weights, (logits,), eps=1e-5, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("score", routing.SCORES)
def test_gradcheck_of_the_balance_loss(score: str) -> None:
    torch.manual_seed(2)
    logits = (3 * torch.randn(5, 9, dtype=torch.float64)).requires_grad_()
    counts = routing.expert_counts(routing.choose_experts(logits, score=score, top_k=2), 9)
    assert torch.autograd.gradcheck(lambda z: routing.load_balancing_loss(z, counts, score=score), (logits,))


@pytest.mark.parametrize("score", routing.SCORES)
def test_gradients_stay_finite_at_extreme_logits(score: str) -> None:
    logits = torch.tensor([[-104.0, -1e4, 200.0, -41.0, 3e4, 0.0, -39.0, 88.8]] * 3)
    logits[1:] = -200.0
    logits[2] = -math.inf
    logits.requires_grad_()
    ids = torch.arange(8).expand(3, 8)
    counts = routing.expert_counts(ids, 8)
    for renormalize in (True, False):
        weights = routing.routing_weights(logits, ids, score=score, renormalize=renormalize)
        loss = weights.square().sum() + routing.load_balancing_loss(logits, counts, score=score)
        (grad,) = torch.autograd.grad(loss, logits)
        assert weights.isfinite().all() and grad.isfinite().all(), grad


@pytest.mark.parametrize("score", routing.SCORES)
def test_balance_loss_is_1_when_balanced_and_grows_to_the_number_of_experts(score: str) -> None:
    balanced = routing.load_balancing_loss(torch.zeros(6, 4), torch.tensor([3, 3, 3, 3]), score=score)
    assert balanced.item() == pytest.approx(1.0, rel=1e-6)
    logits = torch.full((6, 4), -200.0)
    logits[:, 2] = 50.0
    collapsed = routing.load_balancing_loss(logits, torch.tensor([0, 0, 12, 0]), score=score)
    assert collapsed.item() == pytest.approx(4.0, rel=1e-6)
