"""The layer around the mega-kernel on a GPU: shared experts on their own stream, graphs, memory that is used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.config import MoEConfig
from megamoe.functional import mega_moe
from megamoe.layers.moe import MoELayer

pytestmark = pytest.mark.gpu
HIDDEN = 1024


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "gated"])
def layer(request: Any) -> MoELayer:
    config = MoEConfig.from_dict(
        {
            "model": {
                "hidden": HIDDEN,
                "intermediate": 512,
                "num_experts": 16,
                "top_k": 4,
                "shared_experts": 2,
                "shared_gate": request.param,
            },
            "router": {"score": "sqrtsoftplus", "bias": True, "scale": 1.5},
            "quantization": {"weights": "mxfp4"},
            "kernel": {"backend": "sm90"},
            "parallel": {"max_tokens_per_rank": 512},
        }
    )
    return MoELayer(config, device="cuda")


def tokens(count: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(count, HIDDEN, device="cuda", generator=generator).bfloat16()


def one_after_the_other(layer: MoELayer, x: Tensor) -> Tensor:
    assert layer.context is not None and layer.shared_experts is not None
    routing = layer.router(x)
    y = mega_moe(x, routing.topk_ids, routing.topk_weights, layer.experts.operands(), layer.context)
    return y + layer.shared_experts(x)


@pytest.mark.parametrize("count", [0, 1, 9, 128, 500])
def test_the_parts_in_turn_give_the_same_bits(layer: MoELayer, count: int) -> None:
    with torch.no_grad():
        x = tokens(count, 0)
        for _ in range(3):
            assert torch.equal(layer(x), one_after_the_other(layer, x))


def test_calls_that_follow_each_other_at_once(layer: MoELayer) -> None:
    """Memory of one call is free for the next before the device has run it."""
    with torch.no_grad():
        inputs = [tokens(100, seed) for seed in range(40)]
        expected = [one_after_the_other(layer, x) for x in inputs]
        other = torch.cuda.Stream()
        torch.cuda.synchronize()
        found = []
        for i, x in enumerate(inputs):
            copy = x.clone()
            with torch.cuda.stream(other if i % 3 == 0 else torch.cuda.current_stream()):
                if i % 3 == 0:
                    other.wait_stream(torch.cuda.default_stream())
                found.append(layer(copy))
                copy.record_stream(torch.cuda.current_stream())
            torch.cuda.default_stream().wait_stream(other)
            del copy
            torch.empty(100, HIDDEN, device="cuda", dtype=torch.bfloat16).fill_(float("nan"))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("count", [1, 128])
def test_a_graph_of_layers(layer: MoELayer, count: int) -> None:
    with torch.no_grad():
        x = tokens(count, 0)
        layer(layer(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(layer(x))
        for seed in range(5):
            x.copy_(tokens(count, seed))
            graph.replay()
            assert torch.equal(y, one_after_the_other(layer, one_after_the_other(layer, x)))


def test_a_gradient_takes_the_parts_in_turn(layer: MoELayer) -> None:
    assert layer.shared_experts is not None
    x = tokens(8, 0)
    with torch.no_grad():
        expected = layer.shared_experts(x)
    found = layer.shared_experts(x)
    assert found.requires_grad
    torch.testing.assert_close(found.detach(), expected, rtol=1e-2, atol=1e-2)
