"""The C++ engine on this CPU: memory bandwidth at T=1, rate at T=256, and the reference backend beside it.

    python benchmarks/cpu.py [--hidden 1024 --intermediate 512 --experts 32 --top-k 4 --format mxfp4]

Every output is compared with the reference before it is timed. Several copies of the layer are cycled through so that
weights come from memory and not from the cache. Times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from megamoe.config import MoESpec
from megamoe.functional import MoEContext, mega_moe
from megamoe.kernels.weights import ExpertWeights, quantize_experts
from megamoe.testing.numeric import compare


def median_s(function: Callable[[int], object], repeats: int) -> float:
    """Return the median time of `function(i)`, seconds."""
    times = []
    for index in range(repeats):
        start = time.perf_counter()
        function(index)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def memory_bandwidth() -> float:
    """Return bytes per second that all threads read together: the sum of 256 MB of FP32."""
    values = torch.ones(1 << 26)
    values.sum()
    return values.nbytes / min(median_s(lambda _: values.sum(), 3) for _ in range(3))


def expert_mm_rate(w13: Tensor, w2: Tensor, rows: int) -> float:
    """Return FLOP/s of FP32 torch.mm over all experts, `rows` rows each, weights dequantised beforehand."""
    x, h = torch.randn(rows, w13.shape[2]), torch.randn(rows, w2.shape[2])
    flops = 2 * rows * (w13[0].numel() + w2[0].numel()) * len(w13)

    def all_experts(_: int) -> None:
        for first, second in zip(w13, w2, strict=True):
            torch.mm(x, first.t())
            torch.mm(h, second.t())

    all_experts(0)
    return flops / median_s(all_experts, 7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--format", default="mxfp4", choices=("none", "fp8_block", "mxfp4"))
    parser.add_argument("--layers", type=int, default=4, help="copies of the layer that are cycled through")
    arguments = parser.parse_args()
    for name in ("hidden", "intermediate", "experts", "top_k", "layers"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be 1 or more, got {getattr(arguments, name)}")
    for name in ("hidden", "intermediate"):
        if arguments.format == "mxfp4" and getattr(arguments, name) % 32:
            parser.error(f"--{name}: must be a multiple of 32 with --format mxfp4, got {getattr(arguments, name)}")
    if arguments.top_k > min(16, arguments.experts):
        parser.error(f"--top-k: must be at most {min(16, arguments.experts)}, got {arguments.top_k}")
    spec = MoESpec(
        hidden=arguments.hidden,
        intermediate=arguments.intermediate,
        num_experts=arguments.experts,
        top_k=arguments.top_k,
        weight_format=arguments.format,
    )
    generator = torch.Generator().manual_seed(0)
    layers: list[ExpertWeights] = []
    for _ in range(arguments.layers):
        w13 = torch.randn(spec.num_experts, 2 * spec.intermediate, spec.hidden, generator=generator)
        w2 = torch.randn(spec.num_experts, spec.hidden, spec.intermediate, generator=generator)
        layers.append(
            quantize_experts(w13 * spec.hidden**-0.5, w2 * spec.intermediate**-0.5, None, None, spec.weight_format)
        )
    engine = MoEContext(spec, None, "cpu", device="cpu", max_tokens_per_rank=256)
    reference = MoEContext(spec, None, "reference", device="cpu", max_tokens_per_rank=256)
    expert_bytes = sum(t.nbytes for t in (layers[0].w13, layers[0].w2)) / spec.num_experts
    if layers[0].w13_scale is not None and layers[0].w2_scale is not None:
        expert_bytes += (layers[0].w13_scale.nbytes + layers[0].w2_scale.nbytes) / spec.num_experts

    bandwidth = memory_bandwidth()
    print(f"H={spec.hidden} I={spec.intermediate} E={spec.num_experts} top-{spec.top_k} {spec.weight_format}, one rank")
    print(f"{torch.get_num_threads()} threads, memory {bandwidth / 1e9:.1f} GB/s")
    for num_tokens in (1, 16, 256):
        batches = []
        for _ in range(8):
            x = torch.randn(num_tokens, spec.hidden, generator=generator)
            ids = (
                torch.rand(num_tokens, spec.num_experts, generator=generator).argsort(-1)[:, : spec.top_k].contiguous()
            )
            batches.append((x, ids, torch.rand(num_tokens, spec.top_k, generator=generator)))
        for index, layer in enumerate(layers):
            verdict = compare(
                mega_moe(*batches[index], layer, engine), mega_moe(*batches[index], layer, reference), "quantised"
            )
            assert verdict.ok, verdict.text

        def run(index: int, context: MoEContext, batches: list[tuple[Tensor, ...]] = batches) -> Tensor:
            return mega_moe(*batches[index % 8], layers[index % len(layers)], context)

        repeats = {1: 400, 16: 60, 256: 20}[num_tokens]
        own = median_s(lambda i: run(i, engine), repeats)
        other = median_s(lambda i: run(i, reference), max(4, repeats // 20))
        line = (
            f"T={num_tokens:4d}: engine {own * 1e6:9.0f} us, reference {other * 1e6:9.0f} us, ratio {other / own:6.1f}"
        )
        if num_tokens == 1:
            rate = spec.top_k * expert_bytes / own
            line += f"; weights {rate / 1e9:.1f} GB/s = {rate / bandwidth:.2f} of memory (aim 0.50)"
        if num_tokens == 256:
            flops = 2 * num_tokens * spec.top_k * 3 * spec.hidden * spec.intermediate
            mm = expert_mm_rate(*layers[0].dequantize(), num_tokens * spec.top_k // spec.num_experts)
            line += (
                f"; {flops / own / 1e9:.1f} GFLOP/s = {flops / own / mm:.2f} of torch.mm at {mm / 1e9:.1f} (aim 0.70)"
            )
        print(f"{line}; {verdict.text}")


if __name__ == "__main__":
    main()
