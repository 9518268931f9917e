"""The mega-kernel: chilled and sustained kernel times of one rank's share of EP8, or of real expert parallelism.

    python benchmarks/mega_moe.py [--out benchmarks/results/mega_moe-h200.json] [--only flash] [--tokens 8,128]
        [--scale token,block128]
    torchrun --nproc-per-node 2 benchmarks/mega_moe.py --only flash

One GPU: "rank share, no NVLink": the experts that one of eight ranks holds, every token choosing top-k of them, T rows
of N(0, 1), uniform routing. The peer beside it is our own GEMM tier: the two grouped GEMMs of the same rows alone,
without quantiser, activation, dispatch and combine. Under torchrun every rank brings T tokens and holds its part of the
experts; the time is that of calls back to back, the largest of all ranks. A sample of every output is held against the
float64 oracle; `benchmarks/notes/mega-moe.md` tells what was tried.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import result_file
import torch
import torch.distributed as dist
from gpu_timing import timed, wait
from torch import Tensor

from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import resolve_group
from megamoe.config import MoESpec
from megamoe.device_workspace import DeviceWorkspace
from megamoe.kernels import formats, gemm
from megamoe.kernels.mega_moe import ACT_SCALES, MegaMoePlan
from megamoe.kernels.packing import pack_mxfp4
from megamoe.kernels.packing.moe import pack_moe_experts
from megamoe.testing.numeric import Comparison, compare
from megamoe.testing.oracle import moe_oracle

# hidden, intermediate, experts of a rank, top-k, activation: shares of EP8
MODELS = {
    "flash": (4096, 2048, 32, 6, "swiglu_clamp"),
    "pro": (7168, 3072, 48, 6, "swiglu_clamp"),
    "v3": (7168, 2048, 32, 8, "silu"),
    "qwen3_235b": (4096, 1536, 16, 8, "silu"),
    "gpt_oss": (2880, 2880, 16, 4, "swiglu_oai"),
}
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
COPY_GBPS, MMA_TFLOPS = 4300.0, 1480.0  # of the floor: pure reads, and the best FP8 rate seen
SAMPLE = 128  # tokens held against the oracle
PEER_TOKENS = 512  # from here on the grouped GEMMs are timed as well
CALLS = 20  # back to back, with several ranks


@dataclass
class Weights:
    """Canonical MXFP4 experts `first` .. `last` of a layer; an expert is the same on whichever rank it is drawn."""

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    b13: Tensor | None
    b2: Tensor | None

    @classmethod
    def draw(cls, spec: MoESpec, first: int, last: int) -> Weights:
        """Draw random codes, with scales that keep the results near 1."""
        hidden, intermediate = spec.hidden, spec.intermediate
        parts: list[list[Tensor]] = [[] for _ in range(6)]
        for expert in range(first, last):
            g = torch.Generator("cuda").manual_seed(expert)

            def codes(*shape: int, g: torch.Generator = g) -> Tensor:
                return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=g)

            def scales(rows: int, k: int, g: torch.Generator = g) -> Tensor:
                low = 118 - k // 2048
                return torch.randint(low, low + 4, (rows, k // 32), dtype=torch.uint8, device="cuda", generator=g)

            parts[0].append(codes(2 * intermediate, hidden // 2))
            parts[1].append(scales(2 * intermediate, hidden))
            parts[2].append(codes(hidden, intermediate // 2))
            parts[3].append(scales(hidden, intermediate))
            parts[4].append(torch.randn(2 * intermediate, device="cuda", generator=g))
            parts[5].append(torch.randn(hidden, device="cuda", generator=g))
        w13, w13_scale, w2, w2_scale, b13, b2 = (torch.stack(part) for part in parts)
        return cls(w13, w13_scale, w2, w2_scale, *((b13, b2) if spec.expert_bias else (None, None)))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """In the order of `pack_moe_experts`."""
        return self.w13, self.w13_scale, self.w2, self.w2_scale, self.b13, self.b2


def spec_of(model: str, world_size: int, act_scale: str) -> MoESpec:
    """Return the layer; several ranks hold as many times the share."""
    hidden, intermediate, experts, top_k, activation = MODELS[model]
    oai = activation == "swiglu_oai"
    return MoESpec(
        hidden=hidden,
        intermediate=intermediate,
        num_experts=experts * world_size,
        top_k=top_k,
        activation=activation,
        swiglu_limit=10.0 if activation == "swiglu_clamp" else 7.0 if oai else None,
        swiglu_alpha=1.702 if oai else None,
        expert_bias=oai,
        weight_format="mxfp4",
        act_scale=act_scale,
    )


def draw_tokens(spec: MoESpec, num_tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw BF16 x, the ids of the top-k of random scores, and weights that sum to 1."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(num_tokens, spec.hidden, device="cuda", generator=g).to(torch.bfloat16)
    scores = torch.rand(num_tokens, spec.num_experts, device="cuda", generator=g)
    weights, ids = scores.topk(spec.top_k, dim=-1)
    return x, ids, weights / weights.sum(-1, keepdim=True)


def check(spec: MoESpec, weights: Weights, tokens: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Comparison:
    """Compare a sample of the output with the oracle."""
    x, ids, topk_weights = tokens
    sample = torch.arange(0, x.shape[0], max(1, x.shape[0] // SAMPLE), device="cuda")[:SAMPLE]
    used = ids[sample].unique()
    renamed = torch.full((spec.num_experts,), -1, dtype=torch.int64, device="cuda")
    renamed[used] = torch.arange(used.numel(), device="cuda")
    w13 = torch.stack([formats.dequantize_mxfp4(weights.w13[e], weights.w13_scale[e]).float() for e in used.tolist()])
    w2 = torch.stack([formats.dequantize_mxfp4(weights.w2[e], weights.w2_scale[e]).float() for e in used.tolist()])
    expected = moe_oracle(
        x[sample],
        renamed[ids[sample]],
        topk_weights[sample],
        w13,
        w2,
        b13=None if weights.b13 is None else weights.b13[used],
        b2=None if weights.b2 is None else weights.b2[used],
        activation=spec.activation,
        limit=spec.swiglu_limit,
        alpha=spec.swiglu_alpha,
        weight_format="mxfp4",
        act_scale=spec.act_scale,
    )
    return compare(y[sample], expected, "quantised")


def work(spec: MoESpec, ids: Tensor, num_local: int) -> tuple[float, float]:
    """Return (FLOP, microseconds at least) of a share: the weights in use read once, or the products at best."""
    rows, used = ids.numel(), ids.unique().numel()
    flop = 6.0 * rows * spec.hidden * spec.intermediate
    weight_bytes = used * 3 * spec.hidden * spec.intermediate * (0.5 + 1 / 32)
    assert used <= num_local
    return flop, max(weight_bytes / COPY_GBPS * 1e-3, flop / MMA_TFLOPS * 1e-6)


class GroupedGemms:
    """The two products of the same rows through `m_grouped_fp8_fp4_gemm_nt_contiguous`."""

    def __init__(self, weights: Weights) -> None:
        self.w13 = pack_mxfp4(weights.w13, weights.w13_scale, "sm90_ss")
        self.w2 = pack_mxfp4(weights.w2, weights.w2_scale, "sm90_ss")

    def chilled_us(self, spec: MoESpec, ids: Tensor) -> float:
        """Return the sum of the two calls' chilled times."""
        groups = ids.flatten().sort().values.to(torch.int32)
        total = 0.0
        for packed, scale in ((self.w13, spec.act_scale), (self.w2, "block128")):
            x = torch.randn(groups.numel(), packed.columns, device="cuda", dtype=torch.bfloat16)
            lhs = formats.quantize_e4m3(x, scale)
            out = torch.empty(groups.numel(), packed.rows, device="cuda", dtype=torch.bfloat16)

            def call(lhs: tuple[Tensor, Tensor] = lhs, packed: object = packed, out: Tensor = out) -> None:
                gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(lhs, packed, out, groups)

            total += timed(call)[0]
        return total


def back_to_back(call: object, collectives: Collectives) -> float:
    """Return microseconds of a call among many, the largest of all ranks."""
    assert callable(call)
    for _ in range(3):
        call()
    wait(30.0)
    collectives.gather_objects(None, phase="before the timing")
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(CALLS):
        call()
    last.record()
    wait(30.0)
    times = collectives.gather_objects(1e3 * first.elapsed_time(last) / CALLS, phase="after the timing")
    return float(max(times))


def start_ranks() -> Collectives:
    """Join the process group that torchrun has prepared, or stay alone."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        return Collectives(resolve_group(dist.group.WORLD), device, 30.0)
    return Collectives(resolve_group(None), device, 30.0)


def run_model(
    model: str, act_scale: str, token_counts: list[int], collectives: Collectives, comm: str, skew: bool
) -> list[dict[str, object]]:
    """Measure one model with scales of one granularity; every rank gets the rows."""
    rank, world_size = collectives.rank, collectives.world_size
    spec, num_local = spec_of(model, world_size, act_scale), MODELS[model][2]
    all_weights = Weights.draw(spec, 0, spec.num_experts)
    local = slice(rank * num_local, (rank + 1) * num_local)
    own = Weights(*(None if t is None else t[local] for t in all_weights.tensors))  # type: ignore[arg-type]
    workspace = DeviceWorkspace([spec], collectives, max_tokens_per_rank=max(TOKENS), comm=comm)
    plan: MegaMoePlan = workspace.plan(spec, pack_moe_experts(*own.tensors))
    peer = GroupedGemms(own) if world_size == 1 and max(token_counts) >= PEER_TOKENS else None
    rows: list[dict[str, object]] = []
    for num_tokens in token_counts:
        x, ids, weights = draw_tokens(spec, num_tokens, seed=1000 * num_tokens + rank)
        if skew:  # every second choice goes to the first rank's experts
            ids[:, ::2] %= num_local
        y = torch.full_like(x, float("nan"))

        def call(x: Tensor = x, ids: Tensor = ids, weights: Tensor = weights, y: Tensor = y) -> None:
            workspace.launch(plan, x, ids, weights, y)

        call()
        wait(30.0)
        workspace.check()
        compared = check(spec, all_weights, (x, ids, weights), y)
        error = (2 * compared.diff) ** 0.5  # relative L2: `diff` is half its square
        ranks = f" ranks={world_size} comm={comm}{' skew=1' if skew else ''}" if world_size > 1 else ""
        case = f"model={model} weights=mxfp4 scale={spec.act_scale} T={num_tokens}{ranks}"
        flop, floor_us = work(spec, ids, num_local) if world_size == 1 else (0.0, 0.0)
        common = {"case": case, "gbps": None, "floor_us": floor_us or None, "error": error}
        if world_size == 1:
            peer_us = peer.chilled_us(spec, ids) if peer and num_tokens >= PEER_TOKENS else None
            name = "two grouped GEMMs" if peer_us else None
            for method, us in zip(("chilled", "sustained"), timed(call), strict=True):
                rows.append(
                    {**common, "method": method, "us": us, "tflops": flop / us * 1e-6, "peer": name, "peer_us": peer_us}
                )
            beside = f", two grouped GEMMs alone {peer_us:.1f} us" if peer_us else ""
            times = (
                f"chilled {rows[-2]['us']:.1f} us, sustained {rows[-1]['us']:.1f} us, floor {floor_us:.0f} us{beside}"
            )
        else:
            us = back_to_back(call, collectives)
            rows.append({**common, "method": "back to back", "us": us, "tflops": None, "peer": None, "peer_us": None})
            times = f"back to back {us:.1f} us"
        if rank == 0:
            verdict = "ok" if compared.ok else f"WRONG: {compared.text}"
            print(f"{case}: {times}, {workspace.nbytes / 2**20:.0f} MiB, {verdict}, error {error:.5f}", flush=True)
        if not compared.ok:
            raise SystemExit(f"{case}: {compared.text}")
    workspace.close()
    return rows


def main() -> None:
    """Measure what is asked for, and write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--only", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--scale", default=",".join(ACT_SCALES), help="scales of x, separated by commas")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="tokens a rank, separated by commas")
    parser.add_argument("--comm", default="auto", help="symmetric memory, with several ranks")
    parser.add_argument("--skew", action="store_true", help="half of the choices go to the first rank's experts")
    options = parser.parse_args()
    unknown = sorted(set(options.only.split(",")) - set(MODELS))
    if unknown:
        parser.error(f"--only: unknown {', '.join(unknown)}; choose among {', '.join(MODELS)}")
    scales = options.scale.split(",")
    if not set(scales) <= set(ACT_SCALES):
        parser.error(f"--scale: must be of {', '.join(ACT_SCALES)}, got {options.scale}")
    if not torch.cuda.is_available():
        parser.error("needs a Hopper GPU, torch finds no CUDA device")
    collectives = start_ranks()
    rows = []
    counts = [int(count) for count in options.tokens.split(",")]
    for model, scale in product(options.only.split(","), scales):
        rows += run_model(model, scale, counts, collectives, options.comm, options.skew)
        torch.cuda.empty_cache()
        if options.out and collectives.rank == 0:  # after each, so that a run that is cut short leaves what it has
            result_file.write(options.out, rows)
    if collectives.world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
