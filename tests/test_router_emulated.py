"""The router's kernels themselves, thread by thread on a CPU: logits and choices of torch, loads within the tensors."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers_emulated import NO_COMPILER, SOURCES, compile_emulated  # noqa: E402
from helpers_routing import MENU, check_ids, extreme_operands, hash_router, make, menu  # noqa: E402

from megamoe.kernels import route as route_module  # noqa: E402
from megamoe.kernels import router_logits as logits_module  # noqa: E402
from megamoe.kernels import routing  # noqa: E402
from megamoe.kernels.route import RouteShape, route  # noqa: E402
from megamoe.kernels.router_logits import RouterLogitsInstance, router_logits  # noqa: E402
from megamoe.layers.router import Router  # noqa: E402

pytestmark = NO_COMPILER
STEPS = ((1, 1), (1, 4), (4, 1), (4, 2))  # tiles, steps
INSTANCES = [RouterLogitsInstance(fp32, *sizes) for fp32 in (True, False) for sizes in STEPS]


@lru_cache
def routers() -> dict[RouteShape, str]:
    """Return a name for each shape under test."""
    built = [make(name, bias=bias) for name in MENU for bias in (False, True)]
    built += [hash_router(), hash_router(score="softmax", renormalize=False)]
    built += [hash_router(score="sigmoid")]
    return {router._shape: f"route_{i}" for i, router in enumerate(built)}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("emulated")
    logits = [f"X({i.name}, {str(i.fp32).lower()}, {i.tiles}, {i.steps})" for i in INSTANCES]
    shapes = [f"X({name}, {shape.threads}, {shape.constants})" for shape, name in routers().items()]
    text = [
        f"#define WARPS {logits_module._WARPS}",
        f"#define CLUSTER {logits_module._CLUSTER}",
        f"#define LOGITS_INSTANCES {' '.join(logits)}",
        f"#define ROUTE_SHAPES {' '.join(shapes)}",
        f'#include "{SOURCES / "router.cpp"}"',
    ]
    (folder / "all.cpp").write_text("\n".join(text) + "\n")
    return compile_emulated(folder, folder / "all.cpp")


@pytest.fixture(autouse=True)
def emulate(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU run what is launched."""

    def launch(instance: Any, _source: object, _device: object, grid: int, *rest: Any) -> None:
        _, layout, values = rest
        name, cluster = (
            (instance.name, logits_module._CLUSTER)
            if isinstance(instance, RouterLogitsInstance)
            else (routers()[instance], 1)
        )
        run = getattr(library, name)
        run.restype = ctypes.c_char_p
        assert grid % cluster == 0
        for row in range(grid // cluster):
            failure = run(layout.pack(*values), row, row % 3)
            assert failure is None, failure

    monkeypatch.setattr(route_module, "launch_packed", launch)
    monkeypatch.setattr(logits_module, "launch_packed", launch)


def run_route(router: Router, logits: Any, input_ids: Any = None) -> tuple[Any, Any]:
    """Return ids and weights, after a look at the counts."""
    router.reset_load()
    correction, scale = router.e_score_correction_bias, router.config.scale
    ids, weights = route(
        router._shape, logits, correction, scale, router.load, table=router.tid2eid, input_ids=input_ids
    )
    assert torch.equal(router.load, routing.expert_counts(ids, router.num_experts))
    return ids, weights


def strange_logits(columns: int) -> Any:
    z = torch.randint(-3, 4, (40, columns)).float()
    z[z == 0] = torch.where(torch.rand(int((z == 0).sum())) < 0.5, 0.0, -0.0)
    z[0], z[1], z[2], z[3] = math.nan, -math.inf, math.inf, -104.0
    z[4, ::3], z[5, 1], z[6, 2], z[7, : columns // 2] = math.nan, math.inf, -math.inf, -math.inf
    z[8, ::2], z[9] = math.nan, torch.linspace(-104, 200, columns)
    z[10:14].masked_fill_(torch.rand(4, columns) < 0.5, math.nan)
    z[14:18].masked_fill_(torch.rand(4, columns) < 0.5, -math.inf)
    z[30:] = torch.randn(10, columns) * 3
    return z


@menu
@pytest.mark.parametrize("correction", [False, True])
def test_choice_and_weights_are_torchs(name: str, correction: bool) -> None:
    router = make(name, bias=correction)
    config, logits = router.config, strange_logits(router.num_experts)
    expected = routing.choose_experts(
        logits,
        score=config.score,
        top_k=router.top_k,
        correction_bias_E=router.e_score_correction_bias,
        groups=config.groups,
        topk_groups=config.topk_groups,
        group_reduce=config.group_reduce,
    )
    ids, weights = run_route(router, logits)
    check_ids(ids, router.num_experts)
    assert torch.equal(ids, expected)
    exact = routing.routing_weights(logits, ids, score=config.score, renormalize=config.renormalize, scale=config.scale)
    assert torch.allclose(weights, exact, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("changes", [{}, {"score": "softmax", "renormalize": False}, {"score": "sigmoid"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hash_routing(changes: dict[str, Any], dtype: torch.dtype) -> None:
    built = hash_router(**changes)
    assert built.tid2eid is not None
    built.tid2eid[5] = torch.tensor([3, -1, 8, -1, 32, 9])  # 32: no expert either
    logits, tokens = torch.randn(7, 32), torch.tensor([5, -1, 6, 99, 5, -7, 0], dtype=dtype)
    ids, weights = run_route(built, logits, tokens)
    assert torch.equal(ids, routing.lookup_experts(built.tid2eid, tokens))
    config = built.config
    exact = routing.routing_weights(logits, ids, score=config.score, renormalize=config.renormalize, scale=config.scale)
    assert torch.allclose(weights, exact, rtol=1e-6, atol=0)
    assert weights[1].tolist() == [0.0] * 6


def test_a_token_beyond_the_table_ends_the_kernel() -> None:
    with pytest.raises(AssertionError, match="trap"):
        run_route(hash_router(), torch.randn(2, 32), torch.tensor([5, 100]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(1, 16, 520), (9, 33, 8), (40, 24, 4096), (5, 17, 7168)])
def test_logits(tokens: int, experts: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(hidden)
    room = torch.randn(tokens, hidden + 24).bfloat16()
    x = room[:, 8 : 8 + hidden]
    weight, bias = (torch.randn(experts, hidden) * hidden**-0.5).to(dtype), torch.randn(experts).to(dtype)
    for given in (None, bias):
        found = router_logits(x, weight, given)
        exact = x.double() @ weight.double().T + (0 if given is None else given.double())
        size = x.double().abs() @ weight.double().abs().T + 1
        assert ((found - exact).abs() / size).max() <= 3 * 2**-24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [7, 40])
def test_infinities_and_nan(dtype: torch.dtype, tokens: int) -> None:
    x, weight = extreme_operands(16, dtype, "cpu")
    found, expected = router_logits(x[:tokens], weight), routing.router_logits(x[:tokens], weight)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found == math.inf, expected == math.inf)
    assert torch.equal(found == -math.inf, expected == -math.inf)
    finite = expected.isfinite()
    assert torch.allclose(found[finite], expected[finite], rtol=1e-4, atol=1e-4)
