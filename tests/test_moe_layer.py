"""MoELayer on one rank: what it computes, its parameters, what it refuses."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_dist import run_ranks
from helpers_moe import check, make_problem, make_tokens
from torch import Tensor

from megamoe.backends import context
from megamoe.config import MoEConfig, MoESpec
from megamoe.errors import ConfigError
from megamoe.functional import MoEContext, mega_moe
from megamoe.kernels.weights import quantize_experts
from megamoe.layers.experts import Experts, is_expert_parallel
from megamoe.layers.moe import MoELayer
from megamoe.testing.numeric import compare

BASE: dict[str, dict[str, Any]] = {
    "model": {"hidden": 64, "intermediate": 64, "num_experts": 8, "top_k": 2, "dtype": "float32"},
    "router": {"score": "softmax"},
}


def config_with(**sections: dict[str, Any]) -> MoEConfig:
    data = {name: dict(values) for name, values in BASE.items()}
    for name, values in sections.items():
        data.setdefault(name, {}).update(values)
    return MoEConfig.from_dict(data)


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 0, 3), (1, 2, 2, 2)], ids=str)
def test_any_leading_shape(leading: tuple[int, ...]) -> None:
    layer = MoELayer(config_with())
    x = torch.randn(*leading, 64)
    with torch.no_grad():
        y = layer(x)
        assert y.shape == x.shape and y.dtype == x.dtype
        flat = torch.stack([layer(row) for row in x.reshape(-1, 64)]) if x.numel() else x.reshape(-1, 64)
    torch.testing.assert_close(y.reshape(-1, 64), flat, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", ["none", "fp8_block", "mxfp4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_equals_router_oracle_and_shared_experts(weights: str, dtype: str) -> None:
    layer = MoELayer(
        config_with(
            model={"shared_experts": 1, "shared_gate": True, "dtype": dtype, "expert_bias": True},
            quantization={"weights": weights},
        )
    )
    problem = make_problem(layer.spec, dtype=getattr(torch, dtype))
    for expert in range(8):
        parts = {name: getattr(problem, name)[expert] for name in ("w13", "w2", "b13", "b2")}
        layer.load_expert(expert, **parts)
    for name in ("w13", "w2", "w13_scale", "w2_scale"):
        # quantised one by one or all at once: the same bits
        mine, theirs = getattr(layer.experts, name), getattr(problem.weights, name)
        assert (mine is None and theirs is None) or torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), name
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    layer.record_routing = True
    with torch.no_grad():
        y = layer(x)
        assert layer.last_routing is not None and layer.shared_experts is not None
        ids, routed = layer.last_routing
        assert ids.shape == routed.shape == (33, 2) and ids.dtype == torch.int64 and routed.dtype == torch.float32
        shared = layer.shared_experts
        gate, up = (x.double() @ shared.w13.double().T).chunk(2, -1)
        dense = (gate * torch.sigmoid(gate) * up) @ shared.w2.double().T
        dense = dense * torch.sigmoid(x.double() @ shared.gate.double().T)  # type: ignore[union-attr]
        if dtype == "float32":
            check(problem, (y.double() - dense).float(), x, ids, routed)
        else:
            # what is added is rounded to BF16 before and after
            alone = mega_moe(x, ids, routed, layer.experts.weights(), MoEContext(layer.spec, device="cpu"))
            check(problem, alone, x, ids, routed)
            verdict = compare(y, alone.double() + dense, "bf16")
            print(verdict.text)
            assert verdict.ok, verdict.text


@pytest.mark.parametrize("limit", [10.0, None], ids=str)
@pytest.mark.parametrize("activation", ["silu", "swiglu_clamp", "swiglu_oai"])
def test_c11_activation_menu(activation: str, limit: float | None) -> None:
    """Gate -50, 9.99, 10, 50 against up -50, 0.5, 50, in routed and shared experts: both clamp alike."""
    if activation == "silu":
        limit = None
    points = [(g, u) for g in (-50.0, 9.99, 10.0, 50.0) for u in (-50.0, 0.5, 50.0)]
    model = {"hidden": 16, "intermediate": 4, "num_experts": 1, "top_k": 1, "activation": activation}
    layer = MoELayer(config_with(model={**model, "swiglu_limit": limit, "shared_experts": 1}))
    w13 = torch.zeros(8, 16)
    for token, (gate, up) in enumerate(points):
        w13[:4, token], w13[4:, token] = gate, up
    w2 = torch.full((16, 4), 0.25)
    assert layer.shared_experts is not None
    with torch.no_grad():
        layer.load_expert(0, w13=w13, w2=w2)
        layer.shared_experts.w13.copy_(w13)
        layer.shared_experts.w2.copy_(w2)
        x = torch.eye(16)[: len(points)]
        both = layer(x)
        shared = layer.shared_experts(x)
    for token, (gate, up) in enumerate(points):
        g = gate if limit is None else min(gate, limit)
        u = up if limit is None else max(-limit, min(up, limit))
        if activation == "swiglu_oai":
            truth = g / (1 + math.exp(-1.702 * g)) * (u + 1)
        else:
            truth = g / (1 + math.exp(-g)) * u
        assert both[token].tolist() == pytest.approx([2 * truth] * 16, rel=1e-5, abs=1e-9), (gate, up)
        assert shared[token].tolist() == pytest.approx([truth] * 16, rel=1e-5, abs=1e-9), (gate, up)


def test_c11_gpt_oss_interleaved_with_biases() -> None:
    """gpt-oss as its checkpoint holds it: `[E, H, 2I]`, columns g0 u0 g1 u1 ..., biases, alpha 1.702, limit 7."""
    generator = torch.Generator().manual_seed(0)
    gate_up, down = torch.randn(4, 180, 360, generator=generator), torch.randn(4, 180, 180, generator=generator)
    gate_up_bias, down_bias = torch.randn(4, 360, generator=generator), torch.randn(4, 180, generator=generator)
    model = {"hidden": 180, "intermediate": 180, "num_experts": 4, "top_k": 4, "activation": "swiglu_oai"}
    layer = MoELayer(config_with(model={**model, "swiglu_limit": 7.0, "expert_bias": True}))
    order = torch.cat([torch.arange(0, 360, 2), torch.arange(1, 360, 2)])
    for expert in range(4):
        layer.load_expert(
            expert,
            w13=gate_up[expert][:, order].T,
            w2=down[expert].T,
            b13=gate_up_bias[expert][order],
            b2=down_bias[expert],
        )
    x = torch.randn(20, 180, generator=generator) * 0.3
    layer.record_routing = True
    with torch.no_grad():
        y = layer(x)
    assert layer.last_routing is not None
    ids, weights = layer.last_routing
    truth = torch.zeros(20, 180, dtype=torch.float64)
    for expert in range(4):
        columns = x.double() @ gate_up[expert].double() + gate_up_bias[expert].double()
        gate, up = columns[:, ::2].clamp(max=7.0), columns[:, 1::2].clamp(-7.0, 7.0)
        assert (columns.abs() > 7).any()
        out = ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ down[expert].double() + down_bias[expert].double()
        truth += torch.where(ids == expert, weights, 0.0).sum(-1, keepdim=True) * out
    verdict = compare(y, truth, "fp32")
    print(verdict.text)
    assert verdict.ok, verdict.text


def test_c11_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="situ"):
        config_with(model={"activation": "situ"})
    with pytest.raises(ConfigError, match="situ"):
        MoESpec(hidden=64, intermediate=64, num_experts=4, top_k=2, activation="situ")


# (H, I) of C14 and the sizes at 1/16; a format that cannot hold a size names the rule
C14_SHAPES = [(2880, 2880), (8192, 2048), (4096, 6144), (3072, 1536), (2048, 320)]
C14_FULL = list(zip(C14_SHAPES, ("mxfp4", "fp8_block", "none", "fp8_block", "mxfp4"), strict=True))


@pytest.mark.parametrize("weights", ["none", "fp8_block", "mxfp4"])
@pytest.mark.parametrize("shape", C14_SHAPES, ids=str)
def test_c14_shapes(shape: tuple[int, int], weights: str) -> None:
    hidden, intermediate = shape[0] // 16, shape[1] // 16
    sizes = {"hidden": hidden, "intermediate": intermediate, "num_experts": 4, "top_k": 2}
    if weights == "mxfp4" and (hidden % 32 or intermediate % 32):
        with pytest.raises(ConfigError, match="must be divisible by 32 with quantization.weights=mxfp4"):
            MoELayer(config_with(model=sizes, quantization={"weights": weights}))
        return
    run_shape(sizes, weights, tokens=11)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "weights"), C14_FULL, ids=str)
def test_c14_full_sizes(shape: tuple[int, int], weights: str) -> None:
    run_shape({"hidden": shape[0], "intermediate": shape[1], "num_experts": 1, "top_k": 1}, weights, tokens=3)


def run_shape(sizes: dict[str, int], weights: str, tokens: int) -> None:
    spec = MoESpec(**sizes, weight_format=weights)  # type: ignore[arg-type]
    problem = make_problem(spec)
    context = MoEContext(spec, None, "reference", device="cpu")
    x, ids, routed = make_tokens(spec, tokens)
    check(problem, mega_moe(x, ids, routed, problem.weights, context), x, ids, routed)


@pytest.mark.parametrize(("experts", "ranks"), [(128, 6), (10, 4)])
def test_c14_experts_that_the_ranks_cannot_share(experts: int, ranks: int) -> None:
    with pytest.raises(
        ConfigError, match=f"model.num_experts={experts} is not divisible by .*={ranks}; valid sizes are"
    ):
        config_with(model={"num_experts": experts}, parallel={"expert_parallel_size": ranks})


def test_canonical_names_and_marks() -> None:
    layer = MoELayer(
        config_with(
            model={"shared_experts": 2, "shared_gate": True, "expert_bias": True},
            router={"logit_bias": True, "bias": True, "score": "sigmoid"},
            quantization={"weights": "mxfp4"},
        )
    )
    shapes = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in layer.state_dict().items()}
    assert shapes == {
        "router.weight": ((8, 64), "float32"),
        "router.bias": ((8,), "float32"),
        "router.e_score_correction_bias": ((8,), "float32"),
        "experts.w13": ((8, 128, 32), "uint8"),
        "experts.w13_scale": ((8, 128, 2), "uint8"),
        "experts.w2": ((8, 64, 32), "uint8"),
        "experts.w2_scale": ((8, 64, 2), "uint8"),
        "experts.b13": ((8, 128), "float32"),
        "experts.b2": ((8, 64), "float32"),
        "shared_experts.w13": ((256, 64), "float32"),
        "shared_experts.w2": ((64, 128), "float32"),
        "shared_experts.gate": ((1, 64), "float32"),
    }
    for name, param in layer.named_parameters():
        assert is_expert_parallel(param) == name.startswith("experts."), name
        assert param.requires_grad != name.startswith("experts."), name
    for name, param in MoELayer(config_with(model={"expert_bias": True})).named_parameters():
        assert param.requires_grad, name


def test_the_layer_says_what_it_is() -> None:
    layer = MoELayer(
        config_with(
            model={"activation": "swiglu_clamp", "swiglu_limit": 10.0, "shared_experts": 1},
            quantization={"weights": "mxfp4"},
            kernel={"backend": "reference"},
        )
    )
    text = repr(layer)
    assert (
        "hidden=64, intermediate=64, experts=8 (8 here), top_k=2, activation=swiglu_clamp(10), weights=mxfp4, "
        "act_scale=token, backend=reference, rank 0 of 1"
    ) in text
    assert "experts 0..7 of 8" in text


@pytest.mark.parametrize("weights", ["none", "fp8_block", "mxfp4"])
def test_load_expert_keeps_addresses(weights: str) -> None:
    layer = MoELayer(config_with(quantization={"weights": weights}, model={"expert_bias": True}))
    before = {name: (t.data_ptr(), t.clone()) for name, t in layer.experts.state_dict().items()}
    new = {name: torch.randn(shape) for name, shape in {"w13": (128, 64), "w2": (64, 64), "b13": 128, "b2": 64}.items()}
    layer.load_expert(3, **new)
    canonical = quantize_experts(*(new[n][None] for n in ("w13", "w2", "b13", "b2")), weights)
    for name, (address, old) in before.items():
        now = getattr(layer.experts, name)
        assert now.data_ptr() == address
        assert torch.equal(now[3].view(torch.uint8), getattr(canonical, name)[0].view(torch.uint8)), name
        others = [expert for expert in range(8) if expert != 3]
        assert torch.equal(now.view(torch.uint8)[others], old.view(torch.uint8)[others])
    if weights != "none":
        parts = {n: getattr(canonical, n)[0] for n in ("w13", "w13_scale", "w2", "w2_scale")}
        layer.load_expert(5, **parts)
        for name, part in parts.items():
            assert torch.equal(getattr(layer.experts, name)[5].view(torch.uint8), part.view(torch.uint8))
        with pytest.raises(ValueError, match="w13: codes in .* need w13_scale"):
            layer.load_expert(5, w13=parts["w13"])
        with pytest.raises(ValueError, match="w2_scale: scales go with their codes"):
            layer.load_expert(5, w2_scale=parts["w2_scale"])
        with pytest.raises(
            ValueError, match="w2: expected floating values, or .* codes with w2_scale, got torch.int32"
        ):
            layer.load_expert(5, w2=torch.zeros(64, 64, dtype=torch.int32))
    with pytest.raises(ValueError, match="expert_id: this rank holds experts 0 to 7, got 8"):
        layer.load_expert(8, w13=new["w13"])
    # refused as a whole: the good part is not written either
    old = layer.experts.b13.clone()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"w2: expected \[64, 64\], got \[63, 64\]"):
        layer.load_expert(2, b13=torch.ones(128), w2=torch.zeros(63, 64))
    assert torch.equal(layer.experts.b13, old)  # type: ignore[arg-type]


def test_initial_values_depend_on_the_seed_alone() -> None:
    torch.manual_seed(4)
    one, two = MoELayer(config_with(model={"shared_experts": 1})), MoELayer(config_with(model={"shared_experts": 1}))
    torch.manual_seed(4)
    again = MoELayer(config_with(model={"shared_experts": 1}))
    for name, value in one.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
        assert not torch.equal(value, two.state_dict()[name]), name
    # an expert's values do not depend on which rank draws them
    last = Experts(one.spec, 2, torch.float32, first_expert=6)
    last.reset_parameters(11)
    whole = Experts(one.spec, 8, torch.float32)
    whole.reset_parameters(11)
    assert torch.equal(last.w13, whole.w13[6:]) and torch.equal(last.w2, whole.w2[6:])
    assert whole.w13.std().item() == pytest.approx(1 / 8, rel=0.02)
    assert not torch.equal(whole.w13[0], whole.w13[1])


@pytest.mark.parametrize("weights", ["fp8_block", "mxfp4"])
def test_casting_the_module_leaves_codes_alone(weights: str) -> None:
    layer = MoELayer(config_with(quantization={"weights": weights}, model={"shared_experts": 1}))
    before = copy.deepcopy(layer.experts.state_dict())
    layer.to(torch.bfloat16)
    for name, value in layer.experts.state_dict().items():
        assert value.dtype == before[name].dtype and torch.equal(
            value.view(torch.uint8), before[name].view(torch.uint8)
        )
    assert all(is_expert_parallel(p) for p in layer.experts.parameters())
    assert layer.shared_experts is not None and layer.shared_experts.w13.dtype == torch.bfloat16
    with torch.no_grad():
        assert layer(torch.randn(3, 64, dtype=torch.bfloat16)).isfinite().all()


def test_meta_device_then_to_empty() -> None:
    reference = MoELayer(config_with())
    layer = MoELayer(config_with(), device="meta")
    with pytest.raises(ConfigError, match="meta device; call to_empty"):
        layer(torch.randn(3, 64))
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(reference.state_dict())
    layer.router.reset_load()
    assert all(is_expert_parallel(p) for p in layer.experts.parameters())
    x = torch.randn(3, 64)
    assert torch.equal(layer(x), reference(x))


def test_a_copied_layer_works_and_a_pickled_one_is_refused() -> None:
    layer = MoELayer(config_with(router={"aux_loss": 0.01}))
    layer(torch.randn(4, 64))  # leaves an auxiliary loss behind, which is part of a graph
    twin = copy.deepcopy(layer)
    assert twin.aux_loss is None and all(is_expert_parallel(p) for p in twin.experts.parameters())
    assigned = MoELayer(config_with())
    assigned.load_state_dict(layer.state_dict(), assign=True)
    assert all(is_expert_parallel(p) for p in assigned.experts.parameters())
    x = torch.randn(4, 64)
    assert torch.equal(layer(x), twin(x))
    with torch.no_grad():
        twin.experts.w2.zero_()
    assert not torch.equal(layer(x), twin(x))
    with pytest.raises(TypeError, match="save the layer's state_dict instead of the layer"):
        pickle.dumps(layer)


def copies_on_this_rank(rank: int, world_size: int, arguments: Any) -> list[float]:
    """Return how far the expert gradients of a copied and of an assigned layer are from the original's."""
    torch.manual_seed(7)
    layer = MoELayer(config_with(parallel={"expert_parallel_size": 2}), dist.group.WORLD)
    assigned = MoELayer(config_with(parallel={"expert_parallel_size": 2}), dist.group.WORLD)
    assigned.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True)
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(rank))
    gradients = []
    for module in (layer, copy.deepcopy(layer), assigned):
        module(x).square().sum().backward()
        module.sync_replicated_grads()
        assert module.experts.w2.grad is not None and module.router.weight.grad is not None
        gradients.append(torch.cat([module.experts.w2.grad.flatten(), module.router.weight.grad.flatten()]))
    return [float((g - gradients[0]).abs().max() / gradients[0].abs().max()) for g in gradients[1:]]


def test_copies_of_a_distributed_layer_have_the_same_gradients() -> None:
    for apart in run_ranks(2, "test_moe_layer:copies_on_this_rank"):
        print(apart)
        assert max(apart) < 1e-5


def test_hash_routing_takes_input_ids() -> None:
    layer = MoELayer(config_with(router={"select": "hash"}, model={"vocab_size": 50}))
    layer.record_routing = True
    tokens = torch.randint(0, 50, (2, 5))
    layer(torch.randn(2, 5, 64), input_ids=tokens)
    assert layer.last_routing is not None
    assert torch.equal(layer.last_routing.ids, layer.router.tid2eid[tokens.flatten()])  # type: ignore[index]
    with pytest.raises(ValueError, match="input_ids"):
        layer(torch.randn(2, 5, 64))


def test_aux_loss_reaches_the_router() -> None:
    layer = MoELayer(config_with(router={"aux_loss": 0.1}))
    layer(torch.randn(16, 64))
    assert layer.aux_loss is not None
    layer.aux_loss.backward()
    assert layer.router.weight.grad is not None and layer.router.weight.grad.abs().sum() > 0
    assert MoELayer(config_with()).aux_loss is None


def test_fifty_layers_leave_nothing_behind() -> None:
    gc.collect()
    before = set(context._contexts)
    x: Tensor = torch.randn(4, 64)
    for _ in range(50):
        MoELayer(config_with())(x).sum().backward()
    gc.collect()
    assert set(context._contexts) <= before


def test_layers_of_one_model_share_a_context() -> None:
    one, two, other = MoELayer(config_with()), MoELayer(config_with()), MoELayer(config_with(kernel={"check": True}))
    assert one.context is two.context and one.context is not other.context
    assert one.context is not None
    one.context.close()
    assert MoELayer(config_with()).context is not one.context, "a closed context is not handed out"
