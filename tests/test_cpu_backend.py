"""The C++ engine behind the op: the default, packs on sight, notices changed weights, agrees with the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_dist import run_ranks
from helpers_moe import check, local_weights, make_problem, make_tokens

pytest.importorskip("megamoe._host", reason="the C++ engine is not built")

from helpers_engine import make_spec  # noqa: E402

from megamoe.config import MoEConfig  # noqa: E402
from megamoe.errors import ConfigError, MegaMoeError  # noqa: E402
from megamoe.functional import MoEContext, mega_moe  # noqa: E402
from megamoe.layers.moe import MoELayer  # noqa: E402
from megamoe.testing.numeric import compare  # noqa: E402


def context(spec: Any, backend: str = "auto", **options: Any) -> MoEContext:
    return MoEContext(spec, None, backend, device="cpu", max_tokens_per_rank=64, **options)


def test_auto_is_the_engine_on_a_cpu() -> None:
    spec = make_spec()
    own = context(spec)
    assert own.backend_name == "cpu" and not own.differentiable  # a quantised format
    problem, tokens = make_problem(spec), make_tokens(spec, 9)
    check(problem, mega_moe(*tokens, problem.weights, own), *tokens)


def test_gradients_are_those_of_the_reference() -> None:
    spec = make_spec(weight_format="none")
    problem = make_problem(spec)
    gradients = []
    for backend in ("cpu", "reference"):
        x, ids, weights = make_tokens(spec, 30)
        x.requires_grad_()
        experts = local_weights(problem, 0, 1)
        experts.w13.requires_grad_()
        mega_moe(x, ids, weights, experts, context(spec, backend)).square().sum().backward()
        gradients.append((x.grad, experts.w13.grad))
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
    quantised = make_spec()
    x, ids, weights = make_tokens(quantised, 3)
    with pytest.raises(MegaMoeError, match="experts in the format mxfp4 have none"):
        mega_moe(x.requires_grad_(), ids, weights, make_problem(quantised).weights, context(quantised))


def test_unknown_communication_is_refused() -> None:
    with pytest.raises(ConfigError, match="parallel.comm"):
        context(make_spec(), "cpu", comm="nvshmem")


@pytest.mark.parametrize("form", ["none", "mxfp4", "fp8_block"])
def test_same_answer_by_every_path(form: str) -> None:
    """Case C21: the engine and the reference, decode then long prefill in one process; all dtypes of x."""
    spec = make_spec(weight_format=form, intermediate=192)
    experts = make_problem(spec).weights
    contexts = context(spec, "cpu"), context(spec, "reference")
    for count, dtype in ((1, torch.float32), (200, torch.float32), (2, torch.bfloat16), (70, torch.float16)):
        tokens = make_tokens(spec, count, dtype=dtype, seed=count)
        own, other = (mega_moe(*tokens, experts, c) for c in contexts)
        verdict = compare(own, other, "quantised" if form != "none" or dtype != torch.float32 else "fp32")
        print(verdict.text)
        assert verdict.ok and own.dtype == dtype, verdict.text


def test_changed_weights_are_packed_anew() -> None:
    spec = make_spec()
    own, tokens = context(spec, "cpu"), make_tokens(spec, 9)
    first, second = make_problem(spec, seed=1), make_problem(spec, seed=2)
    experts = local_weights(first, 0, 1)
    check(first, mega_moe(*tokens, experts, own), *tokens)
    packed = own.backend.packed(experts)  # type: ignore[attr-defined]
    assert own.backend.packed(experts) is packed  # type: ignore[attr-defined]
    for name in ("w13", "w2", "w13_scale", "w2_scale"):
        getattr(experts, name).copy_(getattr(second.weights, name))
    check(second, mega_moe(*tokens, experts, own), *tokens)
    # new tensors, perhaps where the old ones were
    for seed in range(3, 8):
        problem = make_problem(spec, seed=seed)
        check(problem, mega_moe(*tokens, local_weights(problem, 0, 1), own), *tokens)
    assert len(own.backend._cache) <= 2  # type: ignore[attr-defined]


def test_layers_share_a_workspace() -> None:
    spec = make_spec()
    first, second = context(spec, "cpu"), context(spec, "cpu")
    assert first.backend.workspace is second.backend.workspace  # type: ignore[attr-defined]
    larger = context(make_spec(hidden=512), "cpu")
    assert larger.backend.workspace is not first.backend.workspace  # type: ignore[attr-defined]


def run_op(rank: int, world_size: int, arguments: Any) -> list[str]:
    import torch.distributed as dist

    spec = make_spec()
    problem, tokens = make_problem(spec), make_tokens(spec, 5 + 60 * rank, seed=rank)
    experts = local_weights(problem, rank, world_size)
    results, names = [], []
    for backend in ("auto", "reference"):
        own = MoEContext(spec, dist.group.WORLD, backend, device="cpu", max_tokens_per_rank=32)
        names.append(own.backend_name)
        results.append(mega_moe(*tokens, experts, own))
        check(problem, results[-1], *tokens)
    assert compare(*results, "quantised").ok
    return names


def test_the_op_on_two_processes() -> None:
    assert run_ranks(2, "test_cpu_backend:run_op") == [["cpu", "reference"]] * 2


def test_weights_made_under_inference_mode_are_never_stale() -> None:
    """They do not tell when they change, so they are packed again; a layer's own parameters always tell."""
    spec = make_spec()
    own = context(spec)
    with torch.inference_mode():
        problem = make_problem(spec)
        tokens = make_tokens(spec, 9)
        first = mega_moe(*tokens, problem.weights, own)
        problem.weights.w2.bitwise_xor_(0x88)  # every sign
        with pytest.warns(RuntimeWarning, match="packs these weights again"):
            second = mega_moe(*tokens, problem.weights, own)
        assert torch.equal(second, -first) and bool(first.any())

        layer = MoELayer(MoEConfig.from_yaml("quickstart", ["parallel.expert_parallel_size=1", "launch.nproc=1"]))
        assert layer.context is not None and layer.context.backend_name == "cpu"
        x = torch.randn(20, layer.spec.hidden, dtype=torch.bfloat16)
        y = layer(x)
        before = layer.experts.weights()
        for expert in range(layer.spec.num_experts):
            layer.load_expert(expert, w2=before.w2[expert] ^ 0x88, w2_scale=before.w2_scale[expert])
        shared = layer.shared_experts(x).float()
        check_flipped = compare(layer(x).float() - shared, -(y.float() - shared), "quantised")
        assert check_flipped.diff < 1e-3, check_flipped.text
