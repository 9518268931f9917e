"""torch.compile sees one operator forward and one backward, and gives what eager gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers_moe import make_problem, make_tokens
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megamoe.config import MoEConfig, MoESpec
from megamoe.errors import MegaMoeError
from megamoe.functional import MoEContext, mega_moe
from megamoe.layers.moe import MoELayer


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layer_with(**sections: dict[str, Any]) -> MoELayer:
    data: dict[str, dict[str, Any]] = {
        "model": {"hidden": 64, "intermediate": 32, "num_experts": 8, "top_k": 2, "dtype": "float32"},
        "router": {"score": "softmax"},
    }
    for name, values in sections.items():
        data.setdefault(name, {}).update(values)
    return MoELayer(MoEConfig.from_dict(data))


def step(layer: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    """Return the output and every gradient of one training step."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    assert x.grad is not None
    grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    assert len(grads) == len(list(layer.parameters()))
    return [y.detach(), x.grad, *grads]


def assert_close(compiled: list[Tensor], eager: list[Tensor]) -> None:
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


LAYERS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "shared": {"model": {"shared_experts": 1, "shared_gate": True}, "router": {"aux_loss": 0.1}},
    "oai": {
        "model": {"activation": "swiglu_oai", "swiglu_limit": 7.0, "expert_bias": True},
        "router": {"score": "topk_softmax", "logit_bias": True},
    },
}


@pytest.mark.parametrize("name", LAYERS)
def test_fullgraph_equals_eager_forward_and_backward(name: str) -> None:
    layer = layer_with(**LAYERS[name])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (9, 4, 33):
        x = torch.randn(tokens, 64)
        assert_close(step(layer, compiled, x), step(layer, layer, x))
        with torch.no_grad():
            assert_close([compiled(x)], [layer(x)])


def test_inductor_equals_eager_forward_and_backward() -> None:
    layer = layer_with(**LAYERS["shared"])
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(2, 9, 64)
    assert_close(step(layer, compiled, x), step(layer, layer, x))


@pytest.mark.parametrize("weights", ["fp8_block", "mxfp4"])
def test_quantised_layer_compiles_for_inference(weights: str) -> None:
    layer = layer_with(quantization={"weights": weights})
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, 64)
    with torch.no_grad():
        assert_close([compiled(x)], [layer(x)])


def test_many_layers_share_few_graphs() -> None:
    """Layers share the handle, which is a constant of the graph: compiling layer by layer compiles once."""
    layers = [layer_with() for _ in range(12)]
    x = torch.randn(5, 64)
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    with torch.no_grad():
        for layer in layers:
            compiled = torch.compile(layer, fullgraph=True, backend=count)
            assert_close([compiled(x)], [layer(x)])
    print(f"{graphs} graphs for 12 layers")
    assert graphs == 1


def test_calls_stay_in_order_and_in_number() -> None:
    """Two equal calls are two calls, a call whose result nobody reads is one, and none overtakes another."""
    spec = MoESpec(hidden=32, intermediate=32, num_experts=4, top_k=2)
    weights = make_problem(spec).weights
    x, ids, routed = make_tokens(spec, 5)
    context = MoEContext(spec, None, "reference", device="cpu")
    calls: list[float] = []
    forward = context.backend.forward

    def spy(x: Tensor, *rest: Any) -> Tensor:
        calls.append(float(x.sum()))
        return forward(x, *rest)

    context.backend.forward = spy  # type: ignore[method-assign]

    def program(x: Tensor) -> Tensor:
        first = mega_moe(x, ids, routed, weights, context)
        same = mega_moe(x, ids, routed, weights, context)
        mega_moe(x * 3, ids, routed, weights, context)
        mega_moe(x * 2, ids, routed, weights, context)
        return first + same

    eager = program(x)
    expected, calls[:] = list(calls), []
    compiled = torch.compile(program, fullgraph=True)(x)
    torch.testing.assert_close(compiled, eager)
    assert calls == pytest.approx(expected) and len(calls) == 4


def test_fake_tensors_and_schema() -> None:
    spec = MoESpec(hidden=32, intermediate=32, num_experts=4, top_k=2, expert_bias=True)
    weights = make_problem(spec).weights
    x, ids, routed = make_tokens(spec, 5)
    context = MoEContext(spec, None, "reference", device="cpu")
    args = (x, ids, routed, weights.w13, None, weights.b13, weights.w2, None, weights.b2, context.order, context.handle)
    torch.library.opcheck(
        torch.ops.megamoe.mega_moe.default,
        args,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    real = torch.ops.megamoe.mega_moe_backward.default(
        x, x, ids, routed, weights.w13, weights.b13, weights.w2, weights.b2, context.order, context.handle, [True] * 6
    )
    with FakeTensorMode() as mode:
        fake = [None if t is None else mode.from_tensor(t) for t in (x, x, ids, routed, weights.w13, weights.b13)]
        rest = [mode.from_tensor(t) for t in (weights.w2, weights.b2, context.order)]  # type: ignore[arg-type]
        seen = torch.ops.megamoe.mega_moe_backward.default(*fake, *rest, context.handle, [True] * 6)
    for a, b in zip(seen, real, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_a_missing_gradient_is_told_while_compiling() -> None:
    layer = layer_with(quantization={"weights": "mxfp4"})
    with pytest.raises(Exception, match="experts in the format mxfp4 have none") as raised:
        torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.randn(3, 64))
    print(type(raised.value))
    with pytest.raises(MegaMoeError, match="experts in the format mxfp4 have none"):
        layer(torch.randn(3, 64))
