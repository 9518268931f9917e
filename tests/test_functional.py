"""The op on one rank: against the oracle over its whole menu, its checks, its errors, its cost."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import time
import warnings
from collections.abc import Callable

import pytest
import torch
from helpers_moe import GRID, check, make_problem, make_tokens
from torch import Tensor

from megamoe import backends
from megamoe.backends import choose_backend, unavailable
from megamoe.config import MoESpec
from megamoe.errors import BackendUnavailable, ConfigError, MegaMoeError
from megamoe.functional import MoEContext, mega_moe, token_range
from megamoe.kernels.weights import ExpertWeights

SMALL = MoESpec(hidden=32, intermediate=32, num_experts=8, top_k=2)


def context_for(spec: MoESpec, **options: object) -> MoEContext:
    return MoEContext(spec, None, "reference", device="cpu", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", GRID)
def test_op_equals_the_oracle(name: str) -> None:
    case = GRID[name]
    problem = make_problem(case.spec, dtype=case.dtype)
    x, ids, weights = make_tokens(case.spec, 37, dtype=case.dtype)
    ids[1, 0], ids[2], ids[3] = -1, -1, 4
    out = torch.full_like(x, float("nan"))
    y = mega_moe(x, ids, weights.masked_fill(ids < 0, float("nan")), problem.weights, context_for(case.spec), out=out)
    assert y is out
    check(problem, y, x, ids, weights)
    assert torch.equal(y[2], torch.zeros_like(y[2]))


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_few_tokens(tokens: int) -> None:
    problem = make_problem(SMALL)
    x, ids, weights = make_tokens(SMALL, tokens)
    check(problem, mega_moe(x, ids, weights, problem.weights, context_for(SMALL)), x, ids, weights)


def test_one_expert_that_everyone_chooses() -> None:
    spec = MoESpec(hidden=32, intermediate=32, num_experts=1, top_k=1)
    problem = make_problem(spec)
    x, ids, weights = make_tokens(spec, 65)
    check(problem, mega_moe(x, ids, weights, problem.weights, context_for(spec)), x, ids, weights)


@pytest.mark.parametrize("weight_format", ["none", "mxfp4"])
def test_c3_ids(weight_format: str) -> None:
    """Qwen3 at 1/16, T=257: 30% of ids -1 with weight NaN, 10% of rows all -1, duplicates, both integer types."""
    spec = MoESpec(hidden=256, intermediate=96, num_experts=128, top_k=8, weight_format=weight_format)
    problem = make_problem(spec)
    x, ids, weights = make_tokens(spec, 257)
    chance = torch.rand(257, 9, generator=torch.Generator().manual_seed(7))
    ids[chance[:, :8] < 0.3] = -1
    ids[chance[:, 8] < 0.1] = -1
    ids[100] = torch.tensor([5, 5, 5, 5, 9, 9, -1, 0])
    weights = weights.masked_fill(ids < 0, float("nan"))
    context = context_for(spec)
    y = mega_moe(x, ids, weights, problem.weights, context)
    check(problem, y, x, ids, weights)
    empty = (ids < 0).all(1)
    assert empty.sum() > 10 and torch.count_nonzero(y[empty]) == 0
    assert torch.equal(y, mega_moe(x, ids.int(), weights, problem.weights, context))
    assert torch.equal(y, mega_moe(x, ids, weights, problem.weights, context)), "the same call, other bits"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_c3_id_above_the_last_expert(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(SMALL)
    x, ids, weights = make_tokens(SMALL, 9)
    wrong = ids.clone()
    wrong[4, 1] = SMALL.num_experts
    wrong[5, 0] = torch.iinfo(torch.int32).max
    wrong[6, 0] = torch.iinfo(torch.int32).min
    message = r"topk_ids: rank 0 has 2 ids above the last expert, the largest is 2147483647; valid are 0 to 7"
    with pytest.raises(MegaMoeError, match=message):
        mega_moe(x, wrong.to(dtype), weights, problem.weights, context_for(SMALL, check=True))
    monkeypatch.setenv("MEGAMOE_CHECK", "1")
    with pytest.raises(MegaMoeError, match=message):
        mega_moe(x, wrong.to(dtype), weights, problem.weights, context_for(SMALL))
    monkeypatch.delenv("MEGAMOE_CHECK")
    y = mega_moe(x, wrong.to(dtype), weights, problem.weights, context_for(SMALL))
    check(problem, y, x, torch.where((wrong < 0) | (wrong >= 8), -1, wrong), weights)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_c3_id_whose_low_half_names_an_expert(backend: str) -> None:
    if backend == "cpu":
        pytest.importorskip("megamoe._host", reason="the host library is not built")
    spec = dataclasses.replace(SMALL, weight_format="mxfp4", act_scale="token")
    problem = make_problem(spec)
    x, ids, weights = make_tokens(spec, 9)
    wrong, none = ids.clone(), ids.clone()
    wrong[4, 1], wrong[5, 0] = (1 << 32) + 3, -(1 << 32) + 3
    none[4, 1] = none[5, 0] = -1
    context = MoEContext(spec, None, backend, device="cpu")
    y = mega_moe(x, wrong, weights, problem.weights, context)
    assert torch.equal(y, mega_moe(x, none, weights, problem.weights, context))
    check(problem, y, x, none, weights)


def test_token_bound() -> None:
    problem = make_problem(SMALL)
    x, ids, weights = make_tokens(SMALL, 17)
    refused = context_for(SMALL, max_tokens_per_rank=16, overflow="error")
    with pytest.raises(MegaMoeError, match="max_tokens_per_rank: rank 0 brought 17 tokens, the bound is 16"):
        mega_moe(x, ids, weights, problem.weights, refused)
    mega_moe(x[:16], ids[:16], weights[:16], problem.weights, refused)
    chunked = context_for(SMALL, max_tokens_per_rank=16)
    check(problem, mega_moe(x, ids, weights, problem.weights, chunked), x, ids, weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(x=a["x"][:, :31]), r"x: expected \[num_tokens, 32\], got \[9, 31\]"),
        (lambda a: a.update(x=a["x"][0]), r"x: expected \[num_tokens, 32\], got \[32\]"),
        (lambda a: a.update(ids=a["ids"][:8]), r"topk_ids and topk_weights: expected \[9, 2\], got \[8, 2\]"),
        (lambda a: a.update(weights=a["weights"].bfloat16()), "topk_weights: expected float32, got torch.bfloat16"),
        (lambda a: a.update(ids=a["ids"].float()), "topk_ids: expected int32 or int64, got torch.float32"),
        (
            lambda a: a.update(experts=a["experts"].select(0, 4)),
            "weights: expected 8 experts in the format none, got 4",
        ),
        (lambda a: a.update(out=a["x"].bfloat16()), r"out: expected \[9, 32\] torch.float32"),
    ],
)
def test_wrong_arguments(change: Callable[[dict[str, object]], None], message: str) -> None:
    x, ids, weights = make_tokens(SMALL, 9)
    arguments = {"x": x, "ids": ids, "weights": weights, "experts": make_problem(SMALL).weights, "out": None}
    change(arguments)
    out = arguments.pop("out")
    with pytest.raises(ValueError, match=message):
        mega_moe(*arguments.values(), context_for(SMALL), out=out)  # type: ignore[arg-type]


def test_checked_mode_validates_the_experts() -> None:
    x, ids, weights = make_tokens(SMALL, 9)
    experts = make_problem(SMALL).weights
    experts.w2 = experts.w2[:, :16]
    with pytest.raises(ValueError, match="w2"):
        mega_moe(x, ids, weights, experts, context_for(SMALL, check=True))


def test_out_is_refused_with_a_gradient() -> None:
    x, ids, weights = make_tokens(SMALL, 9)
    experts = make_problem(SMALL).weights
    with pytest.raises(ValueError, match="out: not while a gradient is asked for"):
        mega_moe(x.requires_grad_(), ids, weights, experts, context_for(SMALL), out=torch.empty(9, 32))


def test_strided_inputs() -> None:
    problem = make_problem(SMALL)
    x, ids, weights = make_tokens(SMALL, 18)
    y = mega_moe(x[::2], ids[::2], weights[::2], problem.weights, context_for(SMALL))
    check(problem, y, x[::2], ids[::2], weights[::2])
    wide = torch.cat([x, x], dim=1)[:, 32:]
    assert torch.equal(y, mega_moe(wide[::2], ids[::2], weights[::2], problem.weights, context_for(SMALL)))


def test_construction_errors() -> None:
    with pytest.raises(BackendUnavailable, match="kernel.backend: sm90 cannot run here: "):
        MoEContext(SMALL, None, "sm90", device="cpu")
    with pytest.raises(ValueError, match="backend: 'cuda' is not a backend; choose auto, sm90, cpu, reference"):
        MoEContext(SMALL, None, "cuda", device="cpu")
    with pytest.raises(ConfigError, match="overflow must be chunk or error, got 'wrap'"):
        context_for(SMALL, overflow="wrap")
    with pytest.raises(ConfigError, match="max_tokens_per_rank must be at least 1, got 0"):
        context_for(SMALL, max_tokens_per_rank=0)
    with pytest.raises(TypeError, match="group: expected a ProcessGroup, a DeviceMesh or None, got int"):
        MoEContext(SMALL, 4, "reference", device="cpu")  # type: ignore[arg-type]


def test_auto_on_a_gpu_without_kernel_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where auto falls to reference on a GPU one warning names the backend and the reason."""
    monkeypatch.setattr(backends, "_load", lambda name: None if name != "reference" else REFERENCE)
    monkeypatch.setattr(backends, "_warned", set())
    gpu = torch.device("cuda", 0)
    with pytest.warns(RuntimeWarning, match="fell to the reference backend on cuda:0.*sm90: it is not part of"):
        assert choose_backend("auto", SMALL, gpu, 1) is REFERENCE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend("auto", SMALL, gpu, 1) is REFERENCE
        assert choose_backend("reference", SMALL, gpu, 1) is REFERENCE
        assert choose_backend("auto", SMALL, torch.device("cpu"), 1) is REFERENCE
    assert unavailable("reference", SMALL, gpu, 8) is None


REFERENCE = choose_backend("reference", SMALL, torch.device("cpu"), 1)


def test_a_context_lives_as_long_as_its_users() -> None:
    problem = make_problem(SMALL)
    x, ids, weights = make_tokens(SMALL, 9)
    # only the graph holds the context between forward and backward
    y = mega_moe(x.requires_grad_(), ids, weights, problem.weights, context_for(SMALL))
    y.sum().backward()
    assert x.grad is not None
    context = context_for(SMALL)
    handle = context.handle
    assert copy.deepcopy(context) is context
    with pytest.raises(TypeError, match="belongs to its process"):
        pickle.dumps(context)
    del context, y
    gc.collect()
    with pytest.raises(MegaMoeError, match=f"context with handle {handle} has been closed or was dropped"):
        call_op(handle, x.detach(), ids, weights, problem.weights)
    closed = context_for(SMALL)
    closed.close()
    closed.close()
    with pytest.raises(MegaMoeError, match="closed or was dropped"):
        mega_moe(x.detach(), ids, weights, problem.weights, closed)


def call_op(handle: int, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
    result: Tensor = torch.ops.megamoe.mega_moe.default(
        x, ids, weights, experts.w13, None, None, experts.w2, None, None, torch.zeros(1, dtype=torch.int64), handle
    )
    return result


def test_token_ranges_cover_every_token_once() -> None:
    for world_size in (1, 2, 3, 8):
        for num_tokens in (0, 1, 7, 64, 65):
            ranges = [token_range(num_tokens, rank, world_size) for rank in range(world_size)]
            covered = [token for first, last in ranges for token in range(first, last)]
            assert covered == list(range(num_tokens))
            sizes = [last - first for first, last in ranges]
            assert max(sizes) - min(sizes) <= 1


# what one call may cost beyond its backend, microseconds; the dispatcher alone takes about 3
OVERHEAD_US = 5.0


def test_the_op_costs_few_microseconds(capsys: pytest.CaptureFixture[str]) -> None:
    """Time the op with a backend that does nothing, as the fastest of many short rounds: other work only adds."""
    problem = make_problem(SMALL)
    x, ids, weights = make_tokens(SMALL, 9)
    context = context_for(SMALL)
    ready = torch.empty_like(x)
    context.backend.forward = lambda *_: ready  # type: ignore[method-assign]

    def fastest(call: Callable[[], Tensor]) -> float:
        best = float("inf")
        for _ in range(200):
            start = time.perf_counter()
            for _ in range(100):
                call()
            best = min(best, (time.perf_counter() - start) / 100)
        return best * 1e6

    with torch.inference_mode():
        w13, w2 = problem.weights.w13, problem.weights.w2
        call, order, handle = torch.ops.megamoe.mega_moe.default, context.order, context.handle
        op = fastest(lambda: call(x, ids, weights, w13, None, None, w2, None, None, order, handle))
        function = fastest(lambda: mega_moe(x, ids, weights, problem.weights, context))
    problem.weights.w13.requires_grad_()
    with torch.no_grad():
        no_grad = fastest(lambda: mega_moe(x, ids, weights, problem.weights, context))
    trained = fastest(lambda: mega_moe(x, ids, weights, problem.weights, context))
    with capsys.disabled():
        print(
            f"\none call beyond its backend: op {op:.1f} us, mega_moe {function:.1f} us in inference mode, "
            f"{no_grad:.1f} us under no_grad, {trained:.1f} us with a gradient"
        )
    assert function <= 2 * OVERHEAD_US, "twice the aim: the machine is shared"
