"""The router's kernels on a GPU against torch: choices, weights, logits, what goes through torch instead, graphs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers_routing import MENU, check_against_reference, check_ids, extreme_operands, hash_router, make, menu
from torch import Tensor

from megamoe.kernels import routing
from megamoe.kernels.router_logits import MAX_TOKENS, router_logits, takes_logits
from megamoe.layers.router import Router, RouterOutput

pytestmark = pytest.mark.gpu


def both_ways(router: Router, *inputs: Tensor) -> tuple[RouterOutput, RouterOutput]:
    """Return what the kernels say and what torch says, and compare how often experts were counted."""
    with torch.no_grad():
        assert router._has_kernels(inputs[0], inputs[1] if len(inputs) > 1 else None)
        router.reset_load()
        ours = router(*inputs)
        load = router.load.clone()
    router.reset_load()
    theirs = router(*inputs)  # with a gradient
    assert theirs.topk_weights.requires_grad
    assert int(load.sum()) == int((ours.topk_ids >= 0).sum())
    if torch.equal(ours.topk_ids, theirs.topk_ids):
        assert torch.equal(load, router.load)
    return ours, RouterOutput(*(None if t is None else t.detach() for t in theirs))


def check_same(ours: RouterOutput, theirs: RouterOutput) -> None:
    assert ours.topk_ids.dtype == torch.int64 and ours.topk_weights.dtype == torch.float32
    assert torch.equal(ours.topk_ids, theirs.topk_ids)
    assert torch.allclose(ours.topk_weights, theirs.topk_weights, rtol=1e-6, atol=0, equal_nan=True)


def strange_rows(columns: int) -> Tensor:
    """Rows with many ties, then with NaN and infinities: the logits of routers whose weight is the identity."""
    x = torch.randint(-1, 2, (257, columns)).float()
    x[x == 0] = torch.where(torch.rand(int((x == 0).sum())) < 0.5, 0.0, -0.0)
    x[3], x[5], x[6] = math.nan, -200.0, 60.0
    return x


@menu
@pytest.mark.parametrize("correction", [False, True])
def test_ties_and_nan_rows(name: str, correction: bool) -> None:
    """Of equal keys the lower expert comes first, as in torch."""
    router = make(name, logit_bias=False, bias=correction).cuda()
    x = strange_rows(router.num_experts).cuda()
    for rows in (x, x[:0], x[:1], x[3:7]):
        ours, theirs = both_ways(router, rows)
        check_ids(ours.topk_ids, router.num_experts)
        assert torch.equal(ours.logits.view(torch.int32), theirs.logits.view(torch.int32))
        check_same(ours, theirs)


@menu
@pytest.mark.parametrize("correction", [False, True])
def test_logits_that_are_not_finite(name: str, correction: bool) -> None:
    """Through the layer's own functions: no product makes such rows."""
    from megamoe.kernels.route import route

    router = make(name, logit_bias=False, bias=correction).cuda()
    columns, config = router.num_experts, router.config
    z = torch.randint(-3, 4, (64, columns), device="cuda").float()
    z[0], z[1], z[2], z[3] = math.nan, -math.inf, math.inf, -104.0
    z[4, ::3], z[5, 1], z[6, 2], z[7, : columns // 2] = math.nan, math.inf, -math.inf, -math.inf
    z[8, ::2], z[9] = math.nan, torch.linspace(-104, 200, columns)
    z[10:20].masked_fill_(torch.rand(10, columns, device="cuda") < 0.5, math.nan)
    z[20:30].masked_fill_(torch.rand(10, columns, device="cuda") < 0.5, -math.inf)
    ids, weights = route(router._shape, z, router.e_score_correction_bias, config.scale, router.load)
    expected = routing.choose_experts(
        z,
        score=config.score,
        top_k=router.top_k,
        correction_bias_E=router.e_score_correction_bias,
        groups=config.groups,
        topk_groups=config.topk_groups,
        group_reduce=config.group_reduce,
    )
    check_ids(ids, columns)
    assert torch.equal(ids, expected)
    exact = routing.routing_weights(z, ids, score=config.score, renormalize=config.renormalize, scale=config.scale)
    assert torch.allclose(weights, exact, rtol=1e-6, atol=0, equal_nan=True)


@menu
@pytest.mark.parametrize("spread", [1.0, 10.0])
@pytest.mark.parametrize("tokens", [1, 8, 64, 600])
def test_random_tokens(name: str, spread: float, tokens: int) -> None:
    router = make(name, hidden=64).cuda()
    x = torch.randn(tokens, 64, device="cuda") * spread
    with torch.no_grad():
        for rows in (x, x.bfloat16(), x.half()):
            assert router._has_kernels(rows, None)
            out = router(rows)
            exact = rows.double() @ router.weight.double().T
            if router.bias is not None:
                exact += router.bias.double()
            assert (out.logits - exact).abs().max() <= 1e-6 * x.abs().max() * 64
            check_ids(out.topk_ids, router.num_experts)
            if tokens >= 64 and rows.dtype == torch.bfloat16:  # the reference is Python loops
                check_against_reference(router, RouterOutput(*(t[-24:] for t in out[:3]), None))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hash_routing(dtype: torch.dtype) -> None:
    router = hash_router().cuda()
    assert router.tid2eid is not None
    router.tid2eid[5] = torch.tensor([3, -1, 8, -1, -1, 9])
    tokens = torch.tensor([5, -1, 6, 99, 5, -7, 0], dtype=dtype, device="cuda")
    for x in (torch.randn(7, 24, device="cuda"), torch.randn(7, 24, device="cuda").bfloat16()):
        ours, theirs = both_ways(router, x, tokens)
        check_same(ours, theirs)
        assert ours.topk_ids[1].tolist() == [-1] * 6 and ours.topk_weights[1].tolist() == [0.0] * 6


def exact_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return float64 logits and the sums of absolute products."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    return exact, x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("experts", "hidden"), [(8, 8), (32, 4096), (33, 520), (256, 4096), (160, 2048), (384, 7168), (128, 16384)]
)
def test_logits_are_as_accurate_as_fp32(experts: int, hidden: int, dtype: torch.dtype) -> None:
    """And those of a token have the same bits whatever comes with it."""
    generator = torch.Generator("cuda").manual_seed(hidden)
    x = torch.randn(MAX_TOKENS, hidden, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(experts, hidden, device="cuda", generator=generator) * hidden**-0.5).to(dtype)
    for bias in (None, torch.randn(experts, device="cuda", generator=generator).to(dtype)):
        assert takes_logits(x, weight, bias)
        found = router_logits(x, weight, bias)
        exact, size = exact_logits(x, weight, bias)
        torch_error = (routing.router_logits(x, weight, bias) - exact).square().mean().sqrt().item()
        error = (found - exact).abs()
        rms = error.square().mean().sqrt().item()
        worst = (error / size).max().item() * 2**24
        print(f"rms error {rms:.2e}, of torch's FP32 {torch_error:.2e}; worst {worst:.2f} * 2^-24 of |x||w|")
        assert worst <= 8
        assert hidden < 2048 or rms <= 1.1 * torch_error  # of fewer products both are little but the last rounding
        for first, count in ((0, 1), (3, 1), (5, 8), (7, 9), (100, 32), (64, 33), (0, 128), (56, 200)):
            part = router_logits(x[first : first + count], weight, bias)
            assert torch.equal(part, found[first : first + count]), (first, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinities_and_nan_in_tokens_and_weights(dtype: torch.dtype) -> None:
    x, weight = extreme_operands(48, dtype, "cuda")
    for count in (7, 40):
        found, expected = router_logits(x[:count], weight), routing.router_logits(x[:count], weight)
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found == math.inf, expected == math.inf)
        assert torch.equal(found == -math.inf, expected == -math.inf)
        finite = expected.isfinite()
        assert torch.allclose(found[finite], expected[finite], rtol=1e-4, atol=1e-4)


def test_tokens_that_torch_multiplies() -> None:
    """Strides, addresses and sizes that the kernel does not take; the routing is the kernel's all the same."""
    router = make("minimax_m2", hidden=64).cuda()
    big = torch.randn(2 * MAX_TOKENS, 130, device="cuda").bfloat16()
    strided, odd, many = big[:50, :128:2], big[:50, 1:65], big[:, :64]
    with torch.no_grad():
        assert not any(takes_logits(x, router.weight, None) for x in (strided, odd, many, strided.float()))
        assert takes_logits(torch.empty(4, 64, device="cuda").bfloat16(), router.weight, None)
        for x in (strided, odd, many, strided.float()):
            out = router(x)
            assert torch.allclose(out.logits, x.float() @ router.weight.T, rtol=1e-5, atol=1e-5)
            check_against_reference(router, RouterOutput(*(t[:24] for t in out[:3]), None))


def test_rows_apart() -> None:
    router = make("minimax_m2", hidden=64).cuda()
    wide = torch.randn(50, 256, device="cuda").bfloat16()
    x = wide[:, 64:128]
    with torch.no_grad():
        assert takes_logits(x, router.weight, None)
        apart, together = router(x), router(x.contiguous())
    assert torch.equal(apart.logits, together.logits) and torch.equal(apart.topk_ids, together.topk_ids)


def test_what_needs_torch_goes_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    router = make("deepseek_v3", hidden=64).cuda()
    x = torch.randn(5, 64, device="cuda")

    def refuse(*_: Any) -> None:
        raise AssertionError("kernels of ours")

    with torch.no_grad():
        expected = router(x)
    monkeypatch.setattr(router, "_route_by_kernels", refuse)
    router(x).topk_weights.sum().backward()  # a gradient
    with torch.no_grad():
        compiled = torch.compile(router, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(compiled.topk_ids, expected.topk_ids)
        with pytest.raises(AssertionError, match="kernels of ours"):
            router(x)
        router.cpu()(x.cpu())


def test_the_loss_is_torchs() -> None:
    router = make("deepseek_v3", hidden=64, aux_loss=0.1).cuda()
    ours, theirs = both_ways(router, torch.randn(50, 64, device="cuda"))
    assert ours.aux_loss is not None and theirs.aux_loss is not None
    torch.testing.assert_close(ours.aux_loss, theirs.aux_loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v3", "gpt_oss"])
def test_a_graph_routes_what_comes_into_its_tokens(name: str) -> None:
    router = make(name, hidden=MENU[name][0] * 16).cuda()
    x = torch.randn(20, router.hidden, device="cuda").bfloat16()
    with torch.no_grad():
        router(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = router(x)
        for seed in range(5):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            router.reset_load()
            graph.replay()
            assert int(router.load.sum()) == out.topk_ids.numel()
            again = router(x)
            assert torch.equal(out.topk_ids, again.topk_ids) and torch.equal(out.logits, again.logits)
            assert torch.equal(out.topk_weights, again.topk_weights)
