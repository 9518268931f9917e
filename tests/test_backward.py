"""Gradients: every one against float64 autograd on one rank, and against one process on two ranks (C13)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers_dist import run_ranks
from helpers_moe import local_weights, make_problem, make_tokens
from torch import Tensor

from megamoe.config import MoEConfig, MoESpec, preset_names
from megamoe.errors import MegaMoeError
from megamoe.functional import MoEContext, mega_moe
from megamoe.kernels.weights import ExpertWeights
from megamoe.layers.moe import MoELayer, sync_replicated_grads

# FP32 against FP32: what two orders of summation may differ by, relative to the largest gradient of the tensor
TOLERANCE = 1e-5

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "silu": {"activation": "silu"},
    "clamp": {"activation": "swiglu_clamp", "swiglu_limit": 0.7},
    "no-limit": {"activation": "swiglu_clamp"},
    "oai": {"activation": "swiglu_oai", "swiglu_limit": 0.7, "swiglu_alpha": 1.3},
}


def fill_memory_with_nan() -> None:
    """Leave NaN in the memory that the allocator hands out next: whoever forgets to write it is found out."""
    held = [torch.full((1 << bits,), float("nan")) for bits in (20, 18, 16, 14, 12, 10, 8) for _ in range(4)]
    del held


def gap(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value; infinite where there is a NaN."""
    difference = (actual.double() - expected.double()).abs().max().item() if actual.numel() else 0.0
    scale = expected.double().abs().max().item() if expected.numel() else 1.0
    return difference / max(scale, 1e-30) if difference == difference else float("inf")


def dense(
    spec: MoESpec,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
) -> Tensor:
    """Every token through every expert, masked: nothing in common with the backend but the formula."""
    y = torch.zeros_like(x)
    for expert in range(spec.num_experts):
        acc = x @ w13[expert].T + (0 if b13 is None else b13[expert])
        gate, up = acc[:, : spec.intermediate], acc[:, spec.intermediate :]
        if spec.swiglu_limit is not None:
            gate, up = gate.clamp(max=spec.swiglu_limit), up.clamp(-spec.swiglu_limit, spec.swiglu_limit)
        if spec.activation == "swiglu_oai":
            h = gate * torch.sigmoid((spec.swiglu_alpha or 0.0) * gate) * (up + 1)
        else:
            h = gate * torch.sigmoid(gate) * up
        out = h @ w2[expert].T + (0 if b2 is None else b2[expert])
        # a masked weight may be NaN: choose before multiplying
        mine = torch.where(ids == expert, weights, 0.0).sum(-1, keepdim=True)
        y = y + mine * out
    return y


@pytest.mark.parametrize("weight_position", ["after", "before"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_equal_float64_autograd(activation: str, bias: bool, weight_position: str) -> None:
    spec = MoESpec(
        hidden=32,
        intermediate=48,
        num_experts=8,
        top_k=3,
        expert_bias=bias,
        weight_position=weight_position,
        **ACTIVATIONS[activation],
    )
    problem = make_problem(spec)
    x, ids, weights = make_tokens(spec, 29)
    ids[ids == 5] = -1  # an expert without tokens, and tokens with fewer experts
    ids[3], ids[4] = -1, torch.tensor([2, 2, 7])
    weights = weights.masked_fill(ids < 0, float("nan"))
    names = ("x", "topk_weights", "w13", "w2", "b13", "b2")
    inputs = (x, weights, problem.w13, problem.w2, problem.b13, problem.b2)

    def leaves(dtype: torch.dtype) -> list[Tensor | None]:
        return [None if t is None else t.to(dtype).clone().requires_grad_() for t in inputs]

    mine, truth = leaves(torch.float32), leaves(torch.float64)
    seed = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    fill_memory_with_nan()
    context = MoEContext(spec, None, "reference", device="cpu")
    y = mega_moe(
        mine[0], ids, mine[1], ExpertWeights(mine[2], mine[3], b13=mine[4], b2=mine[5], format="none"), context
    )
    y.backward(seed)
    z = dense(spec, truth[0], ids, *truth[1:])
    z.backward(seed.double())
    gaps = {"y": gap(y.detach(), z.detach())}
    for name, a, b in zip(names, mine, truth, strict=True):
        if a is not None and b is not None:
            assert a.grad is not None and b.grad is not None and a.grad.dtype == a.dtype, name
            gaps[name] = gap(a.grad, b.grad)
    print({name: f"{value:.1e}" for name, value in gaps.items()})
    assert max(gaps.values()) <= TOLERANCE, gaps
    for tensor in mine[2:]:
        if tensor is not None:
            assert tensor.grad is not None and torch.equal(tensor.grad[5], torch.zeros_like(tensor.grad[5]))
    assert mine[1].grad is not None and torch.equal(mine[1].grad[ids < 0], torch.zeros(int((ids < 0).sum())))


def test_gradients_in_bfloat16() -> None:
    """The same formula in BF16: gradients within BF16 rounding of FP32's, accumulated in FP32."""
    spec = MoESpec(hidden=64, intermediate=64, num_experts=4, top_k=2)
    grads = {}
    for dtype in (torch.float32, torch.bfloat16):
        problem = make_problem(spec, dtype=torch.bfloat16)
        x, ids, weights = make_tokens(spec, 200, dtype=torch.bfloat16)
        tensors = [t.to(dtype).requires_grad_() for t in (x, problem.w13, problem.w2)]
        y = mega_moe(
            tensors[0],
            ids,
            weights.requires_grad_(),
            ExpertWeights(tensors[1], tensors[2], format="none"),
            MoEContext(spec, None, "reference", device="cpu"),
        )
        y.float().square().sum().backward()
        grads[dtype] = [*(t.grad for t in tensors), weights.grad]
    for a, b in zip(grads[torch.bfloat16], grads[torch.float32], strict=True):
        assert a is not None and b is not None
        assert (a.float() - b).norm() / b.norm() < 1e-2


def test_only_the_needed_gradients() -> None:
    spec = MoESpec(hidden=32, intermediate=32, num_experts=4, top_k=2)
    problem = make_problem(spec)
    x, ids, weights = make_tokens(spec, 5)
    context = MoEContext(spec, None, "reference", device="cpu")
    w13 = problem.w13.clone().requires_grad_()
    mega_moe(x, ids, weights, ExpertWeights(w13, problem.w2, format="none"), context).sum().backward()
    assert w13.grad is not None and x.grad is None and problem.w2.grad is None


@pytest.mark.parametrize("linear", [True, False])
def test_second_derivative_is_refused(linear: bool) -> None:
    spec = MoESpec(hidden=32, intermediate=32, num_experts=4, top_k=2)
    problem = make_problem(spec)
    x, ids, weights = make_tokens(spec, 5)
    x.requires_grad_()
    y = mega_moe(x, ids, weights, problem.weights, MoEContext(spec, None, "reference", device="cpu"))
    with pytest.raises(MegaMoeError, match="second derivative"):
        torch.autograd.grad(y.sum() if linear else y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("weight_format", ["fp8_block", "mxfp4"])
def test_c13_quantised_experts_refuse_a_gradient(weight_format: str) -> None:
    spec = MoESpec(hidden=64, intermediate=64, num_experts=4, top_k=2, weight_format=weight_format)
    problem = make_problem(spec)
    x, ids, weights = make_tokens(spec, 5)
    context = MoEContext(spec, None, "reference", device="cpu")
    for tensor in (x, weights):
        tensor.requires_grad_()
        with pytest.raises(MegaMoeError, match=f"gradient was asked for, and experts in the format {weight_format}"):
            mega_moe(x, ids, weights, problem.weights, context)
        with torch.no_grad():
            mega_moe(x, ids, weights, problem.weights, context)
        tensor.requires_grad_(False)


def test_c13_a_backend_without_backward_refuses_a_gradient() -> None:
    spec = MoESpec(hidden=32, intermediate=32, num_experts=4, top_k=2)
    problem = make_problem(spec)
    x, ids, weights = make_tokens(spec, 5)
    context = MoEContext(spec, None, "reference", device="cpu")
    context.differentiable, context.backend_name = False, "cpu"
    problem.weights.w2.requires_grad_()
    with pytest.raises(MegaMoeError, match="gradient was asked for, and the backend cpu has no backward"):
        mega_moe(x, ids, weights, problem.weights, context)
    with torch.no_grad():
        assert mega_moe(x, ids, weights, problem.weights, context).shape == x.shape


# ---- two ranks ------------------------------------------------------------------------------------------------------

# rows of each expert that has some: sums to 3268
C13_SPLITS = {0: 162, 1: 0, 70: 2577, 3: 446, 64: 0, 127: 83}
C13_TOKENS = (300, 109)


def c13_ids(top_k: int) -> Tensor:
    """Return ids `[409, 8]` with exactly the row counts of C13; what is left over is -1."""
    flat = torch.cat([torch.full((rows,), expert) for expert, rows in C13_SPLITS.items()])
    flat = torch.cat([flat, torch.full((sum(C13_TOKENS) * top_k - len(flat),), -1)])
    return flat[torch.randperm(len(flat), generator=torch.Generator().manual_seed(1))].view(-1, top_k)


def c13_steps(rank: int, world_size: int, _: Any = None) -> list[dict[str, Tensor]]:
    """Two steps of SGD on Qwen3 at 1/16; return all gradients and the outputs of this rank."""
    from torch.distributed import group

    spec = MoESpec(hidden=256, intermediate=96, num_experts=128, top_k=8)
    problem = make_problem(spec)
    local = local_weights(problem, rank, world_size)
    context = MoEContext(spec, group.WORLD if world_size > 1 else None, "reference", device="cpu", timeout_s=60)
    router = (torch.randn(128, 256, generator=torch.Generator().manual_seed(2)) / 16).requires_grad_()
    first, last = (0, 409) if world_size == 1 else (rank * 300, 300 + rank * 109)
    ids = c13_ids(8)[first:last]
    params = {"w13": local.w13.requires_grad_(), "w2": local.w2.requires_grad_(), "router": router}
    steps = []
    for step in range(2):
        x, _, _ = make_tokens(spec, 409, seed=step)
        x = x[first:last].requires_grad_()
        fill_memory_with_nan()
        weights = torch.softmax(x @ router.T, dim=-1).gather(1, ids.clamp(min=0))
        y = mega_moe(x, ids, weights.masked_fill(ids < 0, float("nan")), local, context)
        fill_memory_with_nan()
        y.square().sum().backward()
        grads = {name: p.grad.clone() for name, p in params.items() if p.grad is not None}
        steps.append({"y": y.detach(), "x": x.grad, **grads})
        with torch.no_grad():
            # experts learn; the router's gradient is summed by the caller's optimizer, here only compared
            for name in ("w13", "w2"):
                params[name] -= 1e-3 * grads[name]
        for param in params.values():
            param.grad = None
    return steps


def test_c13_two_ranks_equal_one_process() -> None:
    ranks = [rank["c13"] for rank in two_ranks()]
    alone = c13_steps(0, 1)
    for step in range(2):
        for name in ("y", "x", "w13", "w2"):
            together = torch.cat([rank[step][name] for rank in ranks])
            assert torch.isfinite(together).all(), name
            error = gap(together, alone[step][name])
            print(f"step {step} {name}: {error:.1e}")
            assert error <= TOLERANCE, (step, name)
        router = gap(ranks[0][step]["router"] + ranks[1][step]["router"], alone[step]["router"])
        print(f"step {step} router: {router:.1e}")
        assert router <= TOLERANCE
        for name in ("w13", "w2"):
            together = torch.cat([rank[step][name] for rank in ranks])
            idle = [expert for expert in range(128) if not C13_SPLITS.get(expert)]
            assert torch.count_nonzero(together[idle]) == 0, name
            assert all(torch.count_nonzero(together[expert]) > 0 for expert, rows in C13_SPLITS.items() if rows)


# ---- whole layers ---------------------------------------------------------------------------------------------------

SHRUNK = ["hidden=64", "intermediate=32", "num_experts=16", "dtype=float32"]
# every preset, and what no preset has; each is a preset with overrides
LAYERS: dict[str, tuple[str, list[str]]] = {
    **{name: (name, []) for name in preset_names()},
    "tight-clamp-before": ("deepseek_v4_flash", ["model.swiglu_limit=0.8", "model.weight_position=before"]),
    "tight-oai": ("gpt_oss_120b", ["model.swiglu_limit=0.9"]),
    "groups": ("deepseek_v3", ["router.groups=4", "router.topk_groups=2"]),
    "gated": ("mixtral_8x7b", ["model.shared_experts=2", "model.shared_gate=true", "router.aux_loss=0.01"]),
    "replicated": ("quickstart", ["parallel.replicated_input=true"]),
}
# tokens of each rank in each step; a rank without tokens takes part
LAYER_TOKENS = ((3, 0), (0, 40))


def layer_config(name: str, ranks: int) -> MoEConfig:
    preset, overrides = LAYERS[name]
    return MoEConfig.from_yaml(
        preset,
        [
            *(f"model.{item}" for item in SHRUNK),
            f"parallel.expert_parallel_size={ranks}",
            "parallel.timeout_s=60",
            "launch.nproc=null",
            "launch.job=train",
            "quantization.weights=none",
            *overrides,
        ],
    )


def layer_steps(rank: int, world_size: int, _: Any = None) -> dict[str, list[dict[str, Tensor]]]:
    """Two training steps of every layer; return the gradients and parameters after each."""
    results = {}
    for name in LAYERS:
        config = layer_config(name, world_size)
        replicated = config.parallel.replicated_input
        torch.manual_seed(5)  # rank 0's seed is everybody's; the others may differ
        if rank:
            torch.manual_seed(99 + rank)
        layer = MoELayer(config)
        steps = []
        for step, tokens in enumerate(LAYER_TOKENS):
            x = torch.randn(sum(tokens), 64, generator=torch.Generator().manual_seed(step))
            if not replicated and world_size > 1:
                x = x.split(list(tokens))[rank]
            x = x.clone().requires_grad_()
            fill_memory_with_nan()
            y = layer(x)
            loss = y.square().sum()
            if layer.aux_loss is not None and world_size == 1:
                loss = loss + 0 * layer.aux_loss  # the ranks' losses are means over other tokens: not comparable
            fill_memory_with_nan()
            loss.backward()
            layer.sync_replicated_grads()
            grads = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
            assert set(grads) == {n for n, _ in layer.named_parameters()}, "a parameter without gradient"
            steps.append({"y": y.detach(), "x": x.grad, **grads})
            with torch.no_grad():
                for param in layer.parameters():
                    param -= 1e-2 * param.grad
            layer.zero_grad()
        results[name] = steps
    return results


@cache
def one_process() -> dict[str, list[dict[str, Tensor]]]:
    return layer_steps(0, 1)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_trains_alike_on_one_and_two_ranks(name: str) -> None:
    replicated = layer_config(name, 1).parallel.replicated_input
    idle_experts = 0
    for step in range(len(LAYER_TOKENS)):
        alone, ranks = one_process()[name][step], [rank["layers"][name][step] for rank in two_ranks()]
        errors = {}
        for key, truth in alone.items():
            shares = [rank[key] for rank in ranks]
            if key.startswith("experts.") or (key in ("x", "y") and not replicated):
                errors[key] = gap(torch.cat(shares), truth)
            else:
                assert torch.equal(shares[0], shares[1]), f"{key} differs between the ranks"
                errors[key] = gap(shares[0], truth)
        for key in ("experts.w13", "experts.w2"):
            idle = alone[key].flatten(1).count_nonzero(1) == 0
            together = torch.cat([rank[key] for rank in ranks])
            assert torch.equal(together.flatten(1).count_nonzero(1) == 0, idle), "zeros elsewhere than in one process"
            idle_experts += int(idle.sum())
        print(step, {key: f"{value:.1e}" for key, value in errors.items()})
        assert max(errors.values()) <= TOLERANCE, errors
    assert idle_experts or layer_config(name, 1).model.top_k > 4, "the first step must leave experts without tokens"


def test_mean_reduction_is_the_sum_over_ranks() -> None:
    """`reduction="mean"` divides every gradient, the experts' too, so that they are those of the mean loss."""
    first, second = two_ranks()
    for name in ("router.weight", "shared_experts.w13", "shared_experts.gate"):
        assert torch.equal(first["sum"][name], second["sum"][name]) and first["sum"][name].count_nonzero() > 0
    for rank in two_ranks():
        assert set(rank["sum"]) == set(rank["mean"]) and "shared_experts.w2" not in rank["sum"]
        for name, value in rank["sum"].items():
            torch.testing.assert_close(rank["mean"][name], value / 2, rtol=0, atol=0)


def reduced(world_size: int, rank: int, reduction: str) -> dict[str, Tensor]:
    """Gradients of a layer with one frozen parameter, reduced."""
    layer = MoELayer(layer_config("gated", world_size))
    assert layer.shared_experts is not None
    layer.shared_experts.w2.requires_grad_(False)
    layer.reset_parameters(7)
    x = torch.randn(3 + rank, 64, generator=torch.Generator().manual_seed(rank))
    layer(x).sum().backward()
    with pytest.raises(ValueError, match="reduction: expected sum or mean, got 'max'"):
        layer.sync_replicated_grads(reduction="max")
    # the function finds the group in the layers of the module
    sync_replicated_grads(torch.nn.Sequential(layer), reduction=reduction)
    return {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}


def all_of_two_ranks(rank: int, world_size: int, _: Any = None) -> dict[str, Any]:
    return {
        "c13": c13_steps(rank, world_size),
        "layers": layer_steps(rank, world_size),
        "sum": reduced(world_size, rank, "sum"),
        "mean": reduced(world_size, rank, "mean"),
    }


@cache
def two_ranks() -> list[dict[str, Any]]:
    """One job for every test of this file: starting processes is most of the time."""
    return run_ranks(2, "test_backward:all_of_two_ranks", timeout_s=200)
