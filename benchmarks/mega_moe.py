"""The mega-kernel: chilled and sustained kernel times of one rank's share of EP8, or of real expert parallelism.

    python benchmarks/mega_moe.py [--out benchmarks/results/mega_moe-h200.json] [--only flash] [--tokens 8,128]
        [--scale token,block128]
    python benchmarks/mega_moe.py --only flash --scale token --tokens 8192 --throttle 400
    torchrun --nproc-per-node 2 benchmarks/mega_moe.py --only flash [--skew none,zipf,hot_expert,hot_rank]

One GPU: "rank share, no NVLink": the experts that one of eight ranks holds, every token choosing top-k of them, T rows
of N(0, 1), uniform routing. The peer beside it is our own GEMM tier: the two grouped GEMMs of the same rows alone,
without quantiser, activation, dispatch and combine. Under torchrun every rank brings T tokens and holds its part of the
experts; the time is that of calls back to back and of chilled calls (`rank_timing.py`), the largest of all ranks;
beside it stands what moves over NVLink and how long that takes alone (`link_traffic.py`). A sample of the first output
is held against the float64 oracle, and the last output of the timing against the first, bit by bit;
`benchmarks/notes/mega-moe.md` tells what was tried, docs/expert-parallel.md what several ranks add.

--throttle times an instance beside the normal one whose pulls and scatters together stay below a rate, by the chip's
clock, as if each row came and went over a link that slow: the difference is what the kernel does not hide. --once runs
each case three times without timing, for MEGAMOE_TRACE; with --throttle by the throttled instance.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path

import link_traffic
import rank_timing
import result_file
import torch
import torch.distributed as dist
from gpu_timing import timed, wait
from moe_routing import SKEWS, draw_ids, imbalance
from torch import Tensor

from megamoe.comm.choice import allocate
from megamoe.comm.collectives import Collectives
from megamoe.comm.groups import resolve_group
from megamoe.config import MoESpec
from megamoe.device_workspace import DeviceWorkspace
from megamoe.kernels import formats, gemm
from megamoe.kernels.mega_moe import ACT_SCALES, MegaMoePlan
from megamoe.kernels.packing import PackedWeight, pack_mxfp4
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
ORACLE_EXPERTS = 96  # dequantised at a time

Tokens = tuple[Tensor, Tensor, Tensor]


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


def draw_tokens(spec: MoESpec, num_tokens: int, seed: int, skew: str = "none", world_size: int = 1) -> Tokens:
    """Draw BF16 x, the ids of its experts, and weights that sum to 1."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(num_tokens, spec.hidden, device="cuda", generator=g).to(torch.bfloat16)
    experts = spec.num_experts
    return x, *draw_ids(skew, num_tokens, experts, spec.top_k, experts // world_size, g)


def oracle(spec: MoESpec, weights: Weights, tokens: Tokens) -> Tensor:
    """Return what the oracle says, for so few tokens at a time that their experts fit, dequantised."""
    x, ids, topk_weights = tokens
    step = max(1, ORACLE_EXPERTS // spec.top_k)
    if x.shape[0] > step and ids.unique().numel() > ORACLE_EXPERTS:
        parts = zip(*(t.split(step) for t in tokens), strict=True)
        return torch.cat([oracle(spec, weights, (x, ids, topk_weights)) for x, ids, topk_weights in parts])
    used = ids.unique()
    renamed = torch.full((spec.num_experts,), -1, dtype=torch.int64, device="cuda")
    renamed[used] = torch.arange(used.numel(), device="cuda")
    w13 = torch.stack([formats.dequantize_mxfp4(weights.w13[e], weights.w13_scale[e]).float() for e in used.tolist()])
    w2 = torch.stack([formats.dequantize_mxfp4(weights.w2[e], weights.w2_scale[e]).float() for e in used.tolist()])
    return moe_oracle(
        x,
        renamed[ids],
        topk_weights,
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


def sample_of(num_tokens: int) -> Tensor:
    """Return the tokens that are held against the oracle."""
    return torch.arange(0, num_tokens, max(1, num_tokens // SAMPLE), device="cuda")[:SAMPLE]


def check(spec: MoESpec, weights: Weights, tokens: Tokens, y: Tensor) -> Comparison:
    """Compare a sample of the output with the oracle."""
    sample = sample_of(y.shape[0])
    x, ids, topk_weights = (t[sample] for t in tokens)
    return compare(y[sample], oracle(spec, weights, (x, ids, topk_weights)), "quantised")


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

            def call(lhs: tuple[Tensor, Tensor] = lhs, packed: PackedWeight = packed, out: Tensor = out) -> None:
                gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(lhs, packed, out, groups)

            total += timed(call)[0]
        return total


def start_ranks() -> Collectives:
    """Join the process group that torchrun has prepared, or stay alone."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        return Collectives(resolve_group(dist.group.WORLD), device, 30.0)
    return Collectives(resolve_group(None), device, 30.0)


def start_several_ranks(parser: argparse.ArgumentParser) -> tuple[Collectives, dist.ProcessGroup]:
    """Join the process group of several ranks with a GPU each, also as a group of NCCL; else end with a sentence."""
    if not torch.cuda.is_available():
        parser.error("needs Hopper GPUs, torch finds no CUDA device")
    collectives = start_ranks()
    if not 1 < collectives.world_size <= torch.cuda.device_count():
        parser.error(f"needs torchrun with 2 ranks or more and a GPU for each, got {collectives.world_size} ranks")
    return collectives, rank_timing.nccl_group()


class Layer:
    """A layer on this rank: experts, workspace, plan. Construction is collective.

    Args:
        model: a key of `MODELS`.
        collectives: of all ranks.
        comm: where symmetric memory comes from.
        max_tokens: that a rank may bring.
        spare_bytes: of symmetric memory beyond what the workspace asks for.
        act_scale: granularity of the scales of x.

    Attributes:
        memory_bytes: of the workspace's memory.
    """

    def __init__(
        self,
        model: str,
        collectives: Collectives,
        comm: str,
        max_tokens: int,
        spare_bytes: int = 0,
        act_scale: str = "token",
    ) -> None:
        self.model, self.collectives, self.comm = model, collectives, comm
        self.rank, self.world_size = collectives.rank, collectives.world_size
        self.spec, self.num_local = spec_of(model, self.world_size, act_scale), MODELS[model][2]
        self.weights = Weights.draw(self.spec, 0, self.spec.num_experts)
        local = slice(self.rank * self.num_local, (self.rank + 1) * self.num_local)
        self.own = Weights(*(None if t is None else t[local] for t in self.weights.tensors))  # type: ignore[arg-type]
        self.memory_bytes = spare_bytes + DeviceWorkspace.bytes_for(
            [self.spec], world_size=self.world_size, max_tokens_per_rank=max_tokens
        )
        self.workspace = DeviceWorkspace(
            [self.spec],
            collectives,
            max_tokens_per_rank=max_tokens,
            memory=allocate(comm, self.memory_bytes, collectives),
        )
        self.plan: MegaMoePlan = self.workspace.plan(self.spec, pack_moe_experts(*self.own.tensors))

    def case(self, num_tokens: int, skew: str = "none") -> str:
        """Return the case's name in the result file."""
        ranks = f" ranks={self.world_size} comm={self.comm}" if self.world_size > 1 else ""
        words = f"model={self.model} weights=mxfp4 scale={self.spec.act_scale} T={num_tokens}{ranks}"
        return words if skew == "none" else f"{words} skew={skew}"

    def tokens(self, num_tokens: int, skew: str = "none") -> Tokens:
        """Draw this rank's tokens."""
        return draw_tokens(self.spec, num_tokens, 1000 * num_tokens + self.rank, skew, self.world_size)

    def counts(self, ids: Tensor) -> list[list[int]]:
        """Return the choices of all ranks, `[source rank][expert]`. Collective."""
        own = torch.bincount(ids.flatten(), minlength=self.spec.num_experts).tolist()
        return self.collectives.gather_objects(own, phase="counts of the routing")

    def finish(self) -> None:
        """Wait for the calls so far, and raise what went wrong in them."""
        wait(30.0)
        self.workspace.check()


def measure_ranks(
    layer: Layer, num_tokens: int, skew: str, nccl: dist.ProcessGroup | None
) -> tuple[list[dict[str, object]], Tokens, Tensor]:
    """Measure one case on several ranks; return its rows, the same on every rank, this rank's tokens and its output."""
    tokens = layer.tokens(num_tokens, skew)
    y = torch.full_like(tokens[0], float("nan"))

    def call() -> None:
        layer.workspace.launch(layer.plan, *tokens, y)

    call()
    layer.finish()
    case = layer.case(num_tokens, skew)
    compared = check(layer.spec, layer.weights, tokens, y)
    first = y.clone()
    counts = layer.counts(tokens[1])
    moved = link_traffic.traffic(counts, layer.spec.hidden)
    fullest_rank, fullest_expert = imbalance(counts, layer.num_local)
    times = {"back to back": rank_timing.back_to_back(call, layer.collectives)}
    if nccl is not None:
        times["chilled"] = rank_timing.chilled(call, layer.collectives, nccl)
    layer.finish()
    # every rank must leave together, so all tell
    wrong = "" if compared.ok else compared.text
    if not torch.equal(y.view(torch.int16), first.view(torch.int16)):
        wrong = wrong or "the last output differs from the first"
    reports = layer.collectives.gather_objects(wrong, phase="verdict")
    error = (2 * compared.diff) ** 0.5  # relative L2: `diff` is half its square
    common = {
        "case": case,
        "gbps": None,
        "floor_us": None,
        "error": error,
        "tflops": None,
        "peer": None,
        "peer_us": None,
        "dispatch_bytes": max(rank.dispatch_in for rank in moved),
        "combine_bytes": max(rank.combine_out for rank in moved),
        "link_us": link_traffic.link_us(moved),
        "fullest_rank": fullest_rank,
        "fullest_expert": fullest_expert,
    }
    if layer.rank == 0:
        said = ", ".join(f"{method} {us:.1f} us" for method, us in times.items())
        print(
            f"{case}: {said}, {layer.workspace.nbytes / 2**20:.0f} MiB, fullest rank {fullest_rank:.2f} and expert "
            f"{fullest_expert:.2f} of the mean, over NVLink at most {common['dispatch_bytes'] / 1e6:.2f} MB in and "
            f"{common['combine_bytes'] / 1e6:.2f} MB out a rank, alone {common['link_us']:.1f} us, "
            f"{'ok' if not any(reports) else 'WRONG'}, error {error:.5f}",
            flush=True,
        )
    for rank, report in enumerate(reports):
        if report:
            raise SystemExit(f"{case}: rank {rank}: {report}")
    return [{**common, "method": method, "us": us} for method, us in times.items()], tokens, first


class Throttled:
    """The same layer by the instances whose traffic stays below a rate."""

    def __init__(self, layer: Layer, gbps: int) -> None:
        self.gbps, self.hidden = gbps, layer.spec.hidden
        self.workspace = DeviceWorkspace(
            [layer.spec], layer.collectives, max_tokens_per_rank=max(TOKENS), comm="local", throttle_gbps=gbps
        )
        self.plan = self.workspace.plan(layer.spec, pack_moe_experts(*layer.own.tensors))

    def traffic_us(self, ids: Tensor) -> float:
        """Return the time of the traffic alone: a row comes as E4M3 and goes as BF16."""
        return 3e-3 * ids.numel() * self.hidden / self.gbps


def run_once(layer: Layer, num_tokens: int, skew: str, slow: Throttled | None) -> None:
    """Run a case for a trace, by the throttled instance where there is one: the last of three calls is warm."""
    tokens, used = layer.tokens(num_tokens, skew), slow or layer
    y = torch.full_like(tokens[0], float("nan"))
    for _ in range(3):
        used.workspace.launch(used.plan, *tokens, y)
        wait(30.0)
    used.workspace.check()


def measure_share(
    layer: Layer, num_tokens: int, peer: GroupedGemms | None, slow: Throttled | None
) -> list[dict[str, object]]:
    """Measure one case on one rank; return its rows."""
    spec, tokens = layer.spec, layer.tokens(num_tokens)
    y = torch.full_like(tokens[0], float("nan"))

    def call() -> None:
        layer.workspace.launch(layer.plan, *tokens, y)

    call()
    layer.finish()
    compared = check(spec, layer.weights, tokens, y)
    error = (2 * compared.diff) ** 0.5  # relative L2: `diff` is half its square
    case = layer.case(num_tokens)
    flop, floor_us = work(spec, tokens[1], layer.num_local)
    peer_us = peer.chilled_us(spec, tokens[1]) if peer and num_tokens >= PEER_TOKENS else None
    common = {"case": case, "gbps": None, "floor_us": floor_us, "error": error}
    common |= {"peer": "two grouped GEMMs" if peer_us else None, "peer_us": peer_us}
    rows = [
        {**common, "method": method, "us": us, "tflops": flop / us * 1e-6}
        for method, us in zip(("chilled", "sustained"), timed(call), strict=True)
    ]
    beside = f", two grouped GEMMs alone {peer_us:.1f} us" if peer_us else ""
    chilled, sustained = (float(str(row["us"])) for row in rows)
    if slow:
        row, text = measure_throttled(slow, tokens, y, chilled, case)
        rows.append({**common, **row, "tflops": flop / float(str(row["us"])) * 1e-6})
        beside += text
    verdict = "ok" if compared.ok else f"WRONG: {compared.text}"
    print(
        f"{case}: chilled {chilled:.1f} us, sustained {sustained:.1f} us, floor {floor_us:.0f} us{beside}, "
        f"{layer.workspace.nbytes / 2**20:.0f} MiB, {verdict}, error {error:.5f}",
        flush=True,
    )
    if not compared.ok:
        raise SystemExit(f"{case}: {compared.text}")
    return rows


def measure_throttled(
    slow: Throttled, tokens: Tokens, normal: Tensor, chilled_us: float, case: str
) -> tuple[dict[str, object], str]:
    """Measure a case by the throttled instance, whose output must be the normal one's; return its row and words."""
    y = torch.full_like(normal, float("nan"))
    us = timed(lambda: slow.workspace.launch(slow.plan, *tokens, y))[0]
    slow.workspace.check()
    if not torch.equal(y.view(torch.int16), normal.view(torch.int16)):
        raise SystemExit(f"{case}: the throttled instance gives other bits")
    row = {"method": f"chilled, {slow.gbps} GB/s", "us": us, "peer": None, "peer_us": None}
    times, alone = us / chilled_us, slow.traffic_us(tokens[1])
    return row, f", at {slow.gbps} GB/s {us:.1f} us ({times:.3f} times; its traffic alone {alone:.0f} us)"


def run_model(
    model: str,
    act_scale: str,
    token_counts: list[int],
    collectives: Collectives,
    comm: str,
    skews: list[str],
    nccl: dist.ProcessGroup | None,
    throttle_gbps: int | None = None,
    once: bool = False,
) -> list[dict[str, object]]:
    """Measure one model with scales of one granularity; every rank gets the rows."""
    layer = Layer(model, collectives, comm, max(TOKENS), act_scale=act_scale)
    rows: list[dict[str, object]] = []
    slow = None if throttle_gbps is None else Throttled(layer, throttle_gbps)
    peer = None
    if layer.world_size == 1 and max(token_counts) >= PEER_TOKENS and not once and not slow:
        peer = GroupedGemms(layer.own)
    for num_tokens, skew in product(token_counts, skews):
        if once:
            run_once(layer, num_tokens, skew, slow)
        elif layer.world_size == 1:
            rows += measure_share(layer, num_tokens, peer, slow)
        else:
            rows += measure_ranks(layer, num_tokens, skew, nccl)[0]
    layer.workspace.close()
    if slow:
        slow.workspace.close()
    return rows


def add_options(parser: argparse.ArgumentParser, models: str, tokens: tuple[int, ...] = TOKENS) -> None:
    """Add what the benchmarks of the mega-kernel have in common."""
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--only", type=models_of, default=models, help="models, separated by commas")
    text = ",".join(map(str, tokens))
    parser.add_argument("--tokens", type=token_counts_of, default=text, help="tokens a rank, separated by commas")
    parser.add_argument("--comm", default="auto", help="symmetric memory, with several ranks")


def models_of(text: str) -> list[str]:
    """Return the models of an option."""
    return words_of(text, MODELS)


def words_of(text: str, known: Collection[str]) -> list[str]:
    """Return the words of an option, all of them known.

    Raises:
        ArgumentTypeError: one is not; names those that are.
    """
    words = text.split(",")
    unknown = sorted(set(words) - set(known))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(map(repr, unknown))}; choose among {', '.join(known)}")
    return words


def token_counts_of(text: str) -> list[int]:
    """Return the numbers of tokens of an option.

    Raises:
        ArgumentTypeError: not positive whole numbers of which the largest fits the workspace.
    """
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1 or max(counts) > max(TOKENS):
        raise argparse.ArgumentTypeError(f"must be whole numbers from 1 to {max(TOKENS)} with commas, got {text!r}")
    return counts


def skews_of(text: str) -> list[str]:
    """Return the skews of an option."""
    return words_of(text, SKEWS)


def scales_of(text: str) -> list[str]:
    """Return the granularities of an option."""
    return words_of(text, ACT_SCALES)


def main() -> None:
    """Measure what is asked for, and write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, ",".join(MODELS))
    parser.add_argument("--scale", type=scales_of, default=",".join(ACT_SCALES), help="scales of x, with commas")
    about = "; ".join(f"{name}: {text}" for name, text in SKEWS.items())
    parser.add_argument("--skew", type=skews_of, default="none", help=f"routing on several ranks, with commas. {about}")
    parser.add_argument("--throttle", type=int, metavar="GBPS", help="time a throttled instance as well, on one rank")
    parser.add_argument("--once", action="store_true", help="run each case, and measure nothing: for MEGAMOE_TRACE")
    options = parser.parse_args()
    if options.throttle is not None and (options.throttle < 1 or "WORLD_SIZE" in os.environ):
        parser.error(f"--throttle: must be 1 GB/s or more, and without torchrun, got {options.throttle}")
    if options.once and options.out:
        parser.error("--once: measures nothing, so there is nothing to write with --out; leave one of the two out")
    if not torch.cuda.is_available():
        parser.error("needs a Hopper GPU, torch finds no CUDA device")
    collectives = start_ranks()
    if collectives.world_size == 1 and options.skew != ["none"]:
        parser.error("--skew: needs several ranks (torchrun); a rank's share is measured with even routing")
    nccl = None
    if 1 < collectives.world_size <= torch.cuda.device_count():
        nccl = rank_timing.nccl_group()
    rows = []
    for model, scale in product(options.only, options.scale):
        rows += run_model(
            model,
            scale,
            options.tokens,
            collectives,
            options.comm,
            options.skew,
            nccl,
            options.throttle,
            once=options.once,
        )
        torch.cuda.empty_cache()
        if options.out and collectives.rank == 0:  # after each, so that a run that is cut short leaves what it has
            result_file.write(options.out, rows)
    if collectives.world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
