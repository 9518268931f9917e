"""`MoELayer.forward` beside its own mega-kernel: router, quantiser, kernel, shared expert, eager and in a CUDA graph.

    python benchmarks/moe_layer.py [--out benchmarks/results/moe_layer-h200.json] [--tokens 1,8,32,128]

One GPU, DeepSeek-V4-Flash with one rank's share of EP8 (32 experts, "rank share, no NVLink"), random weights. All times
are chilled (gpu_timing.py). "kernel" is the mega-kernel alone on the ids that the layer's router chose; "router" (of
the share's experts), "whole router" (of all experts of the model), "router logits" of it and "shared expert" are graphs
of these parts; "host" is the time of an eager call on the CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import result_file
import torch
from gpu_timing import host_cost, timed, wait
from torch import Tensor

from megamoe.config import MoEConfig
from megamoe.kernels.router_logits import router_logits
from megamoe.layers.moe import MoELayer
from megamoe.layers.router import Router

PRESET = "deepseek_v4_flash"
SHARE = 32  # experts of one rank of eight
TOKENS = (1, 8, 32, 128)
LIMIT_US = 60.0  # that the layer may take beyond its kernel, in a graph


def make_layer() -> MoELayer:
    """Return one rank's share of the layer; the same weights, and so the same choices, in every run."""
    torch.manual_seed(0)
    overrides = [f"model.num_experts={SHARE}", "parallel.expert_parallel_size=1", "kernel.backend=sm90"]
    overrides += ["parallel.max_tokens_per_rank=1024", "launch.nproc=1"]
    return MoELayer(MoEConfig.from_yaml(PRESET, overrides), device="cuda")


def make_router() -> Router:
    """Return the router of the whole model."""
    config = MoEConfig.from_yaml(PRESET)
    spec = config.spec
    return Router(config.router, spec.hidden, spec.num_experts, spec.top_k, device="cuda")


def graph_of(call: Callable[[], object]) -> Callable[[], None]:
    """Capture a call that has run before, and return the replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(layer: MoELayer, router: Router, num_tokens: int) -> dict[str, float]:
    """Return microseconds by what was timed."""
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    x = torch.randn(num_tokens, layer.spec.hidden, device="cuda", generator=generator).to(torch.bfloat16)
    assert layer.context is not None and layer.shared_experts is not None
    backend: Any = layer.context.backend
    eager = layer(x)
    routing = layer.router(x)
    plan, y = backend._ready(layer.experts.operands()).plan, torch.empty_like(x)

    def kernel() -> None:
        backend.workspace.launch(plan, x, routing.topk_ids, routing.topk_weights, y)

    replay = graph_of(lambda: layer(x))
    found = {"kernel": timed(kernel)[0], "graph": timed(replay)[0], "eager": timed(lambda: layer(x))[0]}
    found["router"] = timed(graph_of(lambda: layer.router(x)))[0]
    found["whole router"] = timed(graph_of(lambda: router(x)))[0]
    found["router logits"] = timed(graph_of(lambda: router_logits(x, router.weight)))[0]
    found["shared expert"] = timed(graph_of(lambda: layer.shared_experts(x)))[0]  # type: ignore[misc]
    found["host"] = host_cost(lambda: layer(x))
    wait()
    backend.workspace.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again: Tensor = layer(x)
    graph.replay()
    wait()
    if not torch.equal(again, eager):
        raise SystemExit(f"T={num_tokens}: the graph's output is not the eager one's")
    return found


def main() -> None:
    """Measure what is asked for, and write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="tokens of a call, separated by commas")
    options = parser.parse_args()
    if not all(count.isdecimal() for count in options.tokens.split(",")):
        parser.error(f"--tokens: must be numbers separated by commas, got {options.tokens!r}")
    if not torch.cuda.is_available():
        parser.error("needs a Hopper GPU, torch finds no CUDA device")
    rows: list[dict[str, object]] = []
    with torch.no_grad():
        layer, router = make_layer(), make_router()
        for num_tokens in map(int, options.tokens.split(",")):
            found = measure(layer, router, num_tokens)
            beyond = found["graph"] - found["kernel"]
            parts = ", ".join(f"{name} {us:.1f}" for name, us in found.items())
            verdict = (
                "" if num_tokens > max(TOKENS) else f" ({'within' if beyond <= LIMIT_US else 'ABOVE'} {LIMIT_US:.0f})"
            )
            print(f"T={num_tokens}: {parts} us; the graph is {beyond:.1f} us beyond the kernel{verdict}", flush=True)
            case = f"layer={PRESET} experts={SHARE} T={num_tokens}"
            rows += [{"case": case, "method": method, "us": us} for method, us in found.items()]
    if options.out:
        result_file.write(options.out, rows)


if __name__ == "__main__":
    main()
