"""The Router module: every entry of the menu against float64, case C12, gradients, load, dtypes, torch.compile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers_routing import (
    MENU,
    check_against_reference,
    check_ids,
    hash_router,
    make,
    menu,
    reference_choice,
    reference_scores,
    reference_weights,
)
from torch import nn

from megamoe.config import RouterConfig
from megamoe.errors import ConfigError
from megamoe.kernels import routing
from megamoe.layers.router import Router


@menu
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_menu_against_float64(name: str, spread: float) -> None:
    router = make(name, hidden=40)
    x = torch.randn(48, 40) * spread
    out = router(x)
    exact = x.double() @ router.weight.double().T
    if router.bias is not None:
        exact += router.bias.double()
    assert (out.logits - exact).abs().max() <= 1e-6 * x.abs().max() * 40
    assert out.topk_weights.dtype == out.logits.dtype == torch.float32
    assert out.aux_loss is None
    check_ids(out.topk_ids, router.num_experts)
    check_against_reference(router, out)


@pytest.mark.parametrize("name", ["deepseek_v4", "sqrtsoftplus_plain", "largest"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_sqrtsoftplus_from_minus_104_to_200(name: str, renormalize: bool) -> None:
    router = make(name, renormalize=renormalize, bias=False)
    logits = torch.linspace(-104, 200, router.num_experts)
    rows = torch.stack([logits[torch.randperm(router.num_experts)] for _ in range(8)])
    check_against_reference(router, router(rows))


@menu
@pytest.mark.parametrize("offset", [0.0, 1e-4])
def test_all_logits_at_minus_200(name: str, offset: float) -> None:
    """No 0/0: equal logits share the weight equally, and close ones keep their ratio, however small the scores are."""
    router = make(name, bias=False, renormalize=True, logit_bias=False)
    x = torch.full((3, router.num_experts), -200.0) + offset * torch.randn(3, router.num_experts)
    out = router(x)
    scale = router.config.scale
    for row, ids, weights in zip(
        out.logits.double().tolist(), out.topk_ids.tolist(), out.topk_weights.double().tolist(), strict=True
    ):
        # far below zero sigmoid is exp(z) and sqrtsoftplus exp(z / 2)
        power = 0.5 if router.config.score == "sqrtsoftplus" else 1.0
        terms = [math.exp(power * (row[e] - row[ids[0]])) for e in ids]
        exact = [scale * term / math.fsum(terms) for term in terms]
        assert max(abs(w - e) / e for w, e in zip(weights, exact, strict=True)) <= 1e-6
        if offset == 0 and router.config.groups == 1:
            assert ids == list(range(router.top_k))


@pytest.mark.parametrize("name", ["qwen3_next", "largest"])
def test_winners_above_index_255(name: str) -> None:
    router = make(name, bias=False)
    num_experts, top_k = router.num_experts, router.top_k
    x = torch.randn(16, num_experts)
    size = min(256, num_experts // router.config.groups)  # all in the last group
    planted = torch.stack([num_experts - size + torch.randperm(size)[:top_k] for _ in range(16)])
    x.scatter_(1, planted, 10 + torch.arange(top_k, 0, -1.0).expand(16, -1))
    assert int(planted.min()) > 255
    assert torch.equal(router(x).topk_ids, planted)


@menu
def test_nan_row(name: str) -> None:
    router = make(name)
    x = torch.randn(5, router.num_experts)
    x[2] = math.nan
    out = router(x)
    check_ids(out.topk_ids, router.num_experts)
    assert out.topk_weights[2].isnan().all()
    assert out.topk_weights[[0, 1, 3, 4]].isfinite().all()
    assert int(router.load.sum()) == 5 * router.top_k
    clean = router(x[[0, 1, 3, 4]])
    assert torch.equal(out.topk_ids[[0, 1, 3, 4]], clean.topk_ids)


@menu
def test_a_nan_expert_is_the_last_choice(name: str) -> None:
    router = make(name)
    with torch.no_grad():
        router.weight[::2] = math.nan
    out = router(torch.rand(7, router.num_experts) + 0.1)
    check_ids(out.topk_ids, router.num_experts)
    assert (out.topk_ids % 2 == 1).all()
    whole_row_counts = router.config.score == "softmax" and not router.config.renormalize
    assert bool(out.topk_weights.isnan().all()) == whole_row_counts
    assert bool(out.topk_weights.isfinite().all()) != whole_row_counts


@menu
def test_equal_logits_go_to_the_lowest_experts(name: str) -> None:
    router = make(name, bias=False, logit_bias=False)
    out = router(torch.full((4, router.num_experts), 0.75))
    assert out.topk_ids.tolist() == [list(range(router.top_k))] * 4


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3", "deepseek_v4", "gpt_oss"])
def test_partial_ties_go_to_the_lower_index(name: str) -> None:
    """Few distinct logits, so that ties straddle the last place; and keys that tie only through the bias."""
    router = make(name, bias=False, logit_bias=False)
    x = torch.randint(-1, 2, (32, router.num_experts)).float()
    x[x == 0] = torch.where(torch.rand(int((x == 0).sum())) < 0.5, 0.0, -0.0)  # equal zeros of either sign
    for row, ids in zip(x.tolist(), router(x).topk_ids.tolist(), strict=True):
        assert ids == reference_choice(row, [0.0] * len(row), router.config, router.top_k)[0]
    # sigmoid(0) = 0.5: 0.5 + 0.25 ties with 0.75 made of another bias
    bias = torch.tensor([0.0, 0.25, 0.25, 0.125, 0.25])
    ids = routing.choose_experts(torch.zeros(1, 5), score="sigmoid", top_k=4, correction_bias_E=bias)
    assert ids.tolist() == [[1, 2, 4, 3]]


def test_bias_is_for_the_choice_only() -> None:
    router = make("deepseek_v3", groups=1, topk_groups=1)
    x = torch.randn(6, 256)
    assert router.e_score_correction_bias is not None
    router.e_score_correction_bias.zero_()
    router.e_score_correction_bias[[7, 250]] = 5.0
    out = router(x)
    assert all({7, 250} <= set(row) for row in out.topk_ids.tolist())
    scores = torch.sigmoid(x.double()).gather(1, out.topk_ids)
    assert torch.allclose(out.topk_weights.double(), 2.5 * scores / scores.sum(1, keepdim=True), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1.5, 2.5])
def test_scale(scale: float) -> None:
    x = torch.randn(9, 256)
    plain, scaled = make("deepseek_v3", scale=1.0)(x), make("deepseek_v3", scale=scale)(x)
    assert torch.equal(plain.topk_ids, scaled.topk_ids)
    assert torch.allclose(scaled.topk_weights, plain.topk_weights * scale, rtol=2e-7, atol=0)
    assert torch.allclose(scaled.topk_weights.sum(1), torch.full((9,), scale), rtol=1e-6, atol=0)


@pytest.mark.parametrize("reduce", ["top2", "max"])
@pytest.mark.parametrize("num_experts", [256, 512, 1024])
def test_eight_groups_best_four(num_experts: int, reduce: str) -> None:
    config = RouterConfig(score="sigmoid", bias=True, groups=8, topk_groups=4, group_reduce=reduce, scale=2.5)
    router = Router(config, num_experts, num_experts, 8)
    with torch.no_grad():
        router.weight.copy_(torch.eye(num_experts))
    torch.manual_seed(num_experts)
    router.e_score_correction_bias = torch.randn(num_experts) * 0.2
    out = router(torch.randn(40, num_experts))
    check_against_reference(router, out)
    groups = out.topk_ids // (num_experts // 8)
    assert max(len(set(row)) for row in groups.tolist()) <= 4


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hash_takes_ids_from_the_table_and_weights_from_the_scores(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    router = hash_router()
    assert router.tid2eid is not None and router.e_score_correction_bias is None
    router.tid2eid.copy_(torch.stack([torch.randperm(32)[:6] for _ in range(100)]))
    tokens = torch.randint(0, 100, (20,), dtype=dtype)
    out = router(torch.randn(20, 24), tokens)
    assert out.topk_ids.tolist() == [router.tid2eid[token].tolist() for token in tokens.tolist()]
    for row, ids, weights in zip(
        out.logits.double().tolist(), out.topk_ids.tolist(), out.topk_weights.tolist(), strict=True
    ):
        assert weights == pytest.approx(reference_weights(row, ids, router.config), rel=1e-6)
    out.topk_weights[:, 0].sum().backward()
    assert router.weight.grad is not None and float(router.weight.grad.abs().sum()) > 0
    assert set(router.state_dict()) == {"weight", "tid2eid"}


def test_hash_without_expert() -> None:
    """-1 in the table is no expert: weight 0, no share in the sum, not counted; a negative token id has no expert."""
    router = hash_router()
    assert router.tid2eid is not None
    router.tid2eid[5] = torch.tensor([3, -1, 8, -1, -1, 9])
    out = router(torch.randn(3, 24), torch.tensor([5, -1, 6]))
    assert out.topk_ids[0].tolist() == [3, -1, 8, -1, -1, 9]
    assert out.topk_ids[1].tolist() == [-1] * 6
    assert out.topk_weights[0, [1, 3, 4]].tolist() == [0.0] * 3
    assert out.topk_weights[1].tolist() == [0.0] * 6
    assert out.topk_weights[0].sum().item() == pytest.approx(1.5, rel=1e-6)
    assert int(router.load.sum()) == 3 + 6
    assert torch.equal(router.load, torch.bincount(out.topk_ids[out.topk_ids >= 0], minlength=32))
    out.topk_weights.square().sum().backward()
    assert router.weight.grad is not None and router.weight.grad.isfinite().all()


@pytest.mark.parametrize(("num_experts", "top_k"), [(32, 6), (10, 6), (7, 7), (256, 1)])
def test_the_first_hash_table_is_distinct_and_balanced(num_experts: int, top_k: int) -> None:
    router = Router(RouterConfig(score="softmax", select="hash"), 8, num_experts, top_k, vocab_size=num_experts * 3)
    assert router.tid2eid is not None
    check_ids(router.tid2eid, num_experts)
    assert set(torch.bincount(router.tid2eid.flatten()).tolist()) == {3 * top_k}


@menu
def test_gradient_reaches_the_router_weight(name: str) -> None:
    """Against central differences of the float64 reference with the choice held."""
    router = make(name, hidden=10)
    x = torch.randn(4, 10)
    out = router(x)
    factor = torch.randn_like(out.topk_weights)
    (out.topk_weights * factor).sum().backward()
    step = 1e-5
    by_logit = torch.zeros(out.logits.shape, dtype=torch.float64)
    rows = out.logits.double().tolist()
    whole_row = router.config.score == "softmax" and not router.config.renormalize
    for t, (row, ids) in enumerate(zip(rows, out.topk_ids.tolist(), strict=True)):
        for e in range(len(row)) if whole_row else ids:
            ends = []
            for sign in (1, -1):
                moved = [*row[:e], row[e] + sign * step, *row[e + 1 :]]
                weights = reference_weights(moved, ids, router.config)
                ends.append(math.fsum(w * f for w, f in zip(weights, factor[t].tolist(), strict=True)))
            by_logit[t, e] = (ends[0] - ends[1]) / (2 * step)
    expected = by_logit.T @ x.double()
    assert router.weight.grad is not None
    error = (router.weight.grad.double() - expected).abs().max() / expected.abs().max()
    print(f"relative error of the weight's gradient {error:.2e}")
    assert error <= 1e-5
    if router.bias is not None:
        assert router.bias.grad is not None
        assert torch.allclose(router.bias.grad.double(), by_logit.sum(0), rtol=1e-4, atol=1e-7)


def test_the_correction_bias_takes_no_gradient() -> None:
    router = make("deepseek_v3", aux_loss=0.1)
    assert [name for name, _ in router.named_parameters()] == ["weight"]
    out = router(torch.randn(4, 256))
    (out.topk_weights.sum() + out.aux_loss).backward()
    bias = router.e_score_correction_bias
    assert bias is not None and not bias.requires_grad and bias.grad is None
    assert not out.topk_ids.requires_grad


@menu
def test_balance_loss_against_loops(name: str) -> None:
    router = make(name, hidden=16, aux_loss=0.01)
    out = router(torch.randn(20, 16))
    num_experts = router.num_experts
    share, mean = [0.0] * num_experts, [0.0] * num_experts
    for row, ids in zip(out.logits.double().tolist(), out.topk_ids.tolist(), strict=True):
        score = "softmax" if router.config.score == "topk_softmax" else router.config.score
        scores = reference_scores(row, score)
        for e in range(num_experts):
            mean[e] += scores[e] / math.fsum(scores) / 20
        for e in ids:
            share[e] += 1 / (20 * router.top_k)
    expected = 0.01 * num_experts * math.fsum(f * p for f, p in zip(share, mean, strict=True))
    assert out.aux_loss is not None and out.aux_loss.shape == ()
    assert out.aux_loss.item() == pytest.approx(expected, rel=1e-5)


@menu
def test_zero_tokens(name: str) -> None:
    router = make(name, hidden=16, aux_loss=0.5)
    out = router(torch.empty(0, 16))
    assert out.topk_ids.shape == out.topk_weights.shape == (0, router.top_k)
    assert out.logits.shape == (0, router.num_experts)
    assert out.aux_loss is not None and out.aux_loss.item() == 0
    assert int(router.load.sum()) == 0
    (out.topk_weights.sum() + out.aux_loss).backward()
    assert router.weight.grad is not None and float(router.weight.grad.abs().sum()) == 0


def test_load_counts_until_reset() -> None:
    router = make("deepseek_v4", hidden=16)
    expected = torch.zeros(384, dtype=torch.int64)
    for tokens in (5, 0, 33):
        for e in router(torch.randn(tokens, 16)).topk_ids.flatten().tolist():
            expected[e] += 1
    assert router.load.dtype == torch.int64
    assert torch.equal(router.load, expected)
    assert "load" not in router.state_dict()
    router.reset_load()
    assert int(router.load.abs().sum()) == 0
    counted = routing.expert_counts(torch.tensor([[0, -1], [3, 7], [3, 4]], dtype=torch.int32), 4)
    assert counted.tolist() == [1, 0, 0, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_fp32_whatever_the_tokens_are(dtype: torch.dtype) -> None:
    router = make("gpt_oss", hidden=64).to(dtype)
    x = torch.randn(8, 64).to(dtype)
    assert router.bias is not None
    exact = x.double() @ router.weight.double().T + router.bias.double()
    out = router(x)
    assert out.logits.dtype == out.topk_weights.dtype == torch.float32
    assert (out.logits - exact).abs().max() < 1e-5  # rounding to bfloat16 would be off by 1e-2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router(x).logits, out.logits)
    out.topk_weights[:, 0].sum().backward()
    assert router.weight.grad is not None and router.weight.grad.dtype == dtype


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()])
def test_the_correction_bias_stays_fp32(cast: Any) -> None:
    router = make("deepseek_v3")
    bias = router.e_score_correction_bias
    assert bias is not None
    bias.fill_(1 / 3)
    before = bias.clone()
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"gate": router}))
    cast(model)
    after = router.e_score_correction_bias
    assert router.weight.dtype != torch.float32 and after is not None
    assert after.dtype == torch.float32 and torch.equal(after, before)
    saved = model.state_dict()["1.gate.e_score_correction_bias"]
    assert saved.dtype == torch.float32 and torch.equal(saved, before)
    assert router.load.dtype == torch.int64


def test_the_correction_bias_follows_to_another_device_and_back_from_meta() -> None:
    router = Router(RouterConfig(**MENU["deepseek_v3"][2]), 16, 256, 8, device="meta")
    router.to(torch.bfloat16)
    bias = router.e_score_correction_bias
    assert bias is not None and bias.is_meta and bias.dtype == torch.float32
    router.to_empty(device="cpu")
    router.reset_parameters()
    bias = router.e_score_correction_bias
    assert bias is not None and bias.dtype == torch.float32 and float(bias.abs().sum()) == 0
    assert router.weight.dtype == torch.bfloat16 and int(router.load.sum()) == 0
    assert 0.2 < float(router.weight.detach().float().std()) < 0.3  # hidden**-0.5 = 0.25
    other = make("deepseek_v3", hidden=16)
    router.load_state_dict(other.state_dict())
    assert torch.equal(router.e_score_correction_bias, other.e_score_correction_bias)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v2", "gpt_oss", "deepseek_v4", "largest"])
def test_compiles_as_one_graph(name: str) -> None:
    torch.compiler.reset()
    router = make(name, hidden=24, aux_loss=0.1)
    check_compiled(router, torch.compile(router, fullgraph=True, backend="aot_eager"))


def test_hash_routing_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    router = hash_router()
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    x, tokens = torch.randn(9, 24), torch.tensor([3, 99, -1, 0, 5, 5, 5, 42, 7])
    eager, traced = router(x, tokens), compiled(x, tokens)
    assert torch.equal(eager.topk_ids, traced.topk_ids)
    assert torch.allclose(eager.topk_weights, traced.topk_weights, rtol=1e-6, atol=0)
    assert int(router.load.sum()) == 2 * 8 * 6


def test_compiles_with_inductor() -> None:
    torch.compiler.reset()
    router = make("deepseek_v3", hidden=24, aux_loss=0.1)
    check_compiled(router, torch.compile(router, fullgraph=True))


def check_compiled(router: Router, compiled: Any) -> None:
    for tokens in (16, 33):
        x = torch.randn(tokens, 24)
        results = []
        for forward in (router, compiled):
            router.reset_load()
            router.zero_grad()
            out = forward(x)
            (out.topk_weights.square().sum() + out.aux_loss).backward()
            assert router.weight.grad is not None
            results.append((out, router.load.clone(), router.weight.grad.clone()))
        (eager, load, grad), (traced, traced_load, traced_grad) = results
        check_against_reference(router, traced)
        assert torch.equal(eager.topk_ids, traced.topk_ids)
        assert torch.equal(load, traced_load) and int(load.sum()) == tokens * router.top_k
        assert torch.allclose(eager.topk_weights, traced.topk_weights, rtol=1e-6, atol=0)
        assert torch.allclose(eager.aux_loss, traced.aux_loss, rtol=1e-5, atol=0)
        assert torch.allclose(grad, traced_grad, rtol=1e-4, atol=1e-6)


def test_extra_repr_tells_what_it_is() -> None:
    text = repr(make("deepseek_v3", hidden=64, aux_loss=0.001))
    for part in ("hidden=64", "num_experts=256", "top_k=8", "sigmoid", "best 4 of 8 groups by top2", "scale=2.5"):
        assert part in text, text
    for part in ("correction bias", "renormalized", "aux_loss=0.001"):
        assert part in text, text
    assert "logit bias" in repr(make("gpt_oss")) and "hash of 100 token ids" in repr(hash_router())


@pytest.mark.parametrize(
    ("section", "num_experts", "top_k", "message"),
    [
        ({"score": "softmax"}, 4, 5, r"top_k: must be in 1\.\.num_experts=4, got 5"),
        ({"score": "softmax", "groups": 3}, 8, 2, "groups: must divide num_experts=8, got 3"),
        ({"score": "softmax", "groups": 8, "topk_groups": 2}, 64, 17, "topk_groups: must be at least 3"),
        ({"score": "softmax", "groups": 8, "topk_groups": 2}, 8, 2, "'top2' needs groups of 2 or more"),
        ({"score": "softmax", "select": "hash"}, 8, 2, "vocab_size"),
    ],
)
def test_impossible_routers_are_refused(section: dict[str, Any], num_experts: int, top_k: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Router(RouterConfig(**section), 16, num_experts, top_k)


def test_wrong_arguments_are_refused() -> None:
    router = make("mixtral", hidden=16)
    with pytest.raises(ValueError, match=r"x: must be \[num_tokens, 16\], got \[3, 15\]"):
        router(torch.randn(3, 15))
    with pytest.raises(ValueError, match="hash routing needs the token ids"):
        hash_router()(torch.randn(3, 24))
    with pytest.raises(ValueError, match=r"hash routing needs the token ids \[3\] of x, got \[4\]"):
        hash_router()(torch.randn(3, 24), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="k must be in 1..4 columns"):
        routing.stable_topk(torch.randn(2, 4), 5)
    with pytest.raises(ValueError, match="score: must be one of softmax, topk_softmax, sigmoid, sqrtsoftplus"):
        routing.routing_scores(torch.randn(2, 4), "tanh")


@pytest.mark.parametrize("built", [lambda: make("deepseek_v3"), hash_router], ids=["scores", "hash"])
def test_built_under_inference_mode(built: Any) -> None:
    """It routes outside of it, and its gradient exists there."""
    with torch.inference_mode():
        router = built()
    x = torch.randn(7, router.hidden)
    out = router(x, torch.arange(7))
    assert int(router.load.sum()) == 7 * router.top_k
    out.topk_weights.square().sum().backward()
    assert router.weight.grad is not None and bool(router.weight.grad.any())


@pytest.mark.gpu
@menu
def test_gpu_chooses_as_the_cpu_does(name: str) -> None:
    """Many ties, all of them to the lower index, in every run; NaN rows stay in range."""
    router = make(name, bias=False, logit_bias=False)
    x = torch.randint(-1, 2, (257, router.num_experts)).float()
    x[100] = math.nan
    expected = router(x)
    router.cuda()
    for _ in range(3):
        out = router(x.cuda())
        assert torch.equal(out.topk_ids.cpu(), expected.topk_ids)
        assert torch.allclose(out.topk_weights.cpu(), expected.topk_weights, rtol=1e-6, atol=0, equal_nan=True)
    random = make(name, hidden=64).cuda()
    check_against_reference(random, random(torch.randn(64, 64, device="cuda")))
