"""Job `infer`: a text through MoE layers on all ranks, timed, and every token checked against the float64 oracle.

With an indexer in the configuration an attention layer comes before each MoE layer; a rank's slice is one sequence.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megamoe.config import MoEConfig
from megamoe.errors import MegaMoeError
from megamoe.launch.attention_check import AttentionCheck, check_attention, describe_attention_bounds
from megamoe.launch.check import LayerCheck, Truth, check_layer, describe_tolerances, find_culprit
from megamoe.launch.fault import column_reach, scale_one_weight
from megamoe.launch.plot import save_expert_load
from megamoe.launch.report import console, print_load, summary_table
from megamoe.launch.runtime import Runtime
from megamoe.launch.text import slice_bounds
from megamoe.layers.attention import make_attention
from megamoe.layers.compressed_attention import CompressedAttention
from megamoe.layers.indexer_attention import IndexerAttention, attention_sections
from megamoe.layers.moe import MoELayer

__all__ = ["embed_bytes", "run_infer"]

_NUM_BYTES = 256
# weight of a byte, of the one before it, and of the one before that
_CONTEXT = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class _Trace:
    """One layer's call on this rank: input, routing, output, milliseconds."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    y: Tensor
    milliseconds: float


Attention = IndexerAttention | CompressedAttention


@dataclass(frozen=True)
class _AttentionTrace:
    """One attention layer's call on this rank: input, output, kept keys, milliseconds."""

    x: Tensor
    y: Tensor
    indices: Tensor
    milliseconds: float


def embed_bytes(text: bytes, first: int, end: int, hidden: int, seed: int) -> Tensor:
    """Embed bytes by a fixed random table; each byte is blended with the two before it, so that few rows are alike.

    Args:
        text: the whole text.
        first, end: the slice to embed.
        hidden: width.
        seed: of the table, the same on every rank.

    Returns:
        `[end - first, hidden]` FP32 on the CPU, root mean square 1 per row.
    """
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(len(_CONTEXT), _NUM_BYTES, hidden, generator=generator)
    start = max(0, first - len(_CONTEXT) + 1)
    values = torch.tensor(list(text[start:end]), dtype=torch.int64)
    rows = torch.zeros(end - first, hidden)
    for distance, weight in enumerate(_CONTEXT):
        place = torch.arange(first, end) - distance
        known = place >= 0  # the first bytes of the text have nothing before them
        rows[known] += weight * table[distance, values[place[known] - start]]
    return F.rms_norm(rows, (hidden,))


def _run_layers(
    layers: list[MoELayer], attentions: list[Attention], hidden: Tensor, input_ids: Tensor, runtime: Runtime
) -> tuple[list[_Trace], list[_AttentionTrace]]:
    """Send this rank's tokens through all layers, each on a residual."""
    traces, attended = [], []
    for index, layer in enumerate(layers):
        x = F.rms_norm(hidden, (hidden.shape[-1],))
        if attentions:
            runtime.synchronize()
            started = time.perf_counter()
            y, indices = attentions[index](x.unsqueeze(0), return_indices=True)
            runtime.synchronize()
            elapsed = 1e3 * (time.perf_counter() - started)
            attended.append(_AttentionTrace(x, y[0], indices[0], elapsed))
            hidden = hidden + y[0]
            x = F.rms_norm(hidden, (hidden.shape[-1],))
        dist.barrier()  # so that a layer's time is its own
        runtime.synchronize()
        started = time.perf_counter()
        y = layer(x, input_ids=input_ids)
        runtime.synchronize()
        elapsed = 1e3 * (time.perf_counter() - started)
        assert layer.last_routing is not None, "the layers record their routing"
        traces.append(_Trace(x, layer.last_routing.ids, layer.last_routing.weights, y, elapsed))
        hidden = hidden + y
    return traces, attended


def _inject(layer: MoELayer, trace: _Trace, runtime: Runtime, faulty_rank: int) -> None:
    """Corrupt one weight of the busiest expert of a rank. Collective over each expert-parallel group."""
    x, ids, weights = (torch.cat(runtime.gather_rows(rows)) for rows in (trace.x, trace.ids, trace.weights))
    if runtime.rank != faulty_rank:
        return
    first, count = layer.experts.first_expert, layer.experts.num_local_experts
    load = torch.bincount(ids[ids >= 0], minlength=first + count)[first : first + count]
    if int(load.max()) == 0:
        raise MegaMoeError(f"--inject-fault {faulty_rank}: no token goes to this rank's experts; take another rank")
    expert = first + int(load.argmax())
    token, k_idx = (ids == expert).nonzero(as_tuple=True)
    reach = column_reach(layer.experts, expert, x[token], weights[token, k_idx])
    done = scale_one_weight(layer.experts, expert, reach)
    print(f"fault injected in layer 0, rank {faulty_rank}, {done}", flush=True)


@torch.inference_mode()
def run_infer(
    config: MoEConfig, runtime: Runtime, text: bytes, *, plot: str | None = None, faulty_rank: int | None = None
) -> bool:
    """Run, print the tables on rank 0, and tell whether every token is within tolerance.

    Args:
        config: the checked configuration.
        runtime: this rank's place.
        text: the first `launch.batch_tokens` bytes per rank are used.
        plot: where rank 0 draws the experts' load.
        faulty_rank: corrupt one weight of this rank after the oracle has taken its copy.

    Returns:
        True when all layers agree with the oracle on all ranks.
    """
    bounds = slice_bounds(text, runtime.world_size, config.launch.batch_tokens)
    first, end = bounds[runtime.rank]
    torch.manual_seed(config.launch.seed)  # the replicated parameters of all replicas are drawn alike
    layers = [MoELayer(config, runtime.group, device=runtime.device) for _ in range(config.launch.layers)]
    for layer in layers:
        layer.record_routing = True
    truths = [Truth.of(layer) for layer in layers]
    attentions: list[Attention] = []
    if config.attention is not None:
        attentions = [make_attention(config, device=runtime.device).eval() for _ in layers]

    dtype = getattr(torch, config.model.dtype)
    hidden = embed_bytes(text, first, end, config.model.hidden, config.launch.seed).to(runtime.device, dtype)
    input_ids = torch.tensor(list(text[first:end]), dtype=torch.int64, device=runtime.device)
    # the first call compiles and allocates
    traces, attended = _run_layers(layers, attentions, hidden, input_ids, runtime)
    if faulty_rank is not None:
        _inject(layers[0], traces[0], runtime, faulty_rank)
    traces, attended = _run_layers(layers, attentions, hidden, input_ids, runtime)

    checks = [
        check_layer(config, runtime, truth, trace.x, trace.ids, trace.weights, trace.y, input_ids)
        for truth, trace in zip(truths, traces, strict=True)
    ]
    load = _total_load(config, runtime, traces)
    passed = _report(config, runtime, text, bounds, traces, checks, load)
    if attentions:
        attention_checks = [
            check_attention(config, layer, trace.x, trace.y, trace.indices)
            for layer, trace in zip(attentions, attended, strict=True)
        ]
        passed = _report_attention(config, runtime, attended, attention_checks) and passed
    if plot is not None and runtime.rank == 0:
        title = f"expert load, {len(layers)} layers, {sum(b - a for a, b in bounds)} tokens"
        save_expert_load(plot, load.tolist(), config.model.num_experts // runtime.group_size, title)
        console().print(f"plot written to {plot}", markup=False)
    if any(check.failure for rank in runtime.all_gather(checks) for check in rank):
        _explain(config, runtime, text, bounds, layers, truths, traces, checks)
    return passed


def _total_load(config: MoEConfig, runtime: Runtime, traces: list[_Trace]) -> Tensor:
    """Return the assignments per expert over all layers, ranks and replicas, `[E]` int64."""
    load = torch.zeros(config.model.num_experts, dtype=torch.int64)
    for trace in traces:
        load += torch.bincount(trace.ids[trace.ids >= 0].flatten().cpu(), minlength=len(load))
    dist.all_reduce(load)
    return load


def _report(
    config: MoEConfig,
    runtime: Runtime,
    text: bytes,
    bounds: list[tuple[int, int]],
    traces: list[_Trace],
    checks: list[LayerCheck],
    load: Tensor,
) -> bool:
    """Print what happened on rank 0; return the verdict on every rank."""
    mine = {
        "tokens": traces[0].x.shape[0],
        "ms": sum(trace.milliseconds for trace in traces) / len(traces),
        "row": max(check.worst_row for check in checks),
        "element": max(check.worst_element for check in checks),
        "exact": max(check.worst_exact_row for check in checks),
        "failed": [check.failure for check in checks],
    }
    ranks: list[dict[str, Any]] = runtime.all_gather(mine)
    # A rank's experts receive what the ranks of its own group send, so replicas are counted apart.
    received = torch.zeros(runtime.world_size, dtype=torch.int64)
    per_rank = config.model.num_experts // runtime.group_size
    for trace in traces:
        owners = trace.ids[trace.ids >= 0].flatten().cpu() // per_rank + runtime.group_index * runtime.group_size
        received += torch.bincount(owners, minlength=runtime.world_size)
    dist.all_reduce(received)
    passed = not any(failure for rank in ranks for failure in rank["failed"])
    if runtime.rank != 0:
        return passed

    out = console()
    spec = config.spec
    used = bounds[-1][1]
    out.print(
        f"{config.launch.layers} layers of {spec.num_experts} experts, top {spec.top_k}, hidden {spec.hidden}, "
        f"intermediate {spec.intermediate}, weights {spec.weight_format}; {runtime.world_size} ranks on "
        f"{runtime.device.type}, groups of {runtime.group_size}; {used} of {len(text)} bytes of text",
        markup=False,
    )
    rows = [
        (
            str(rank),
            str(values["tokens"]),
            str(int(received[rank])),
            f"{values['ms']:.2f}",
            f"{values['row']:.1e}",
            f"{values['element']:.3f}",
            f"{values['exact']:.1e}",
            "FAILED" if any(values["failed"]) else "ok",
        )
        for rank, values in enumerate(ranks)
    ]
    headings = ("rank", "tokens", "received", "ms/layer", "max error", "element/rms", "exact maths", "check")
    out.print(summary_table("infer", headings, rows))
    out.print("expert load, all layers and ranks")
    print_load(out, load.tolist(), per_rank)
    worst = max(values["row"] for values in ranks)
    verdict = "within tolerance" if passed else "OUT OF TOLERANCE"
    out.print(f"max error {worst:.1e} {verdict} ({describe_tolerances(config)})", markup=False)
    return passed


def _report_attention(
    config: MoEConfig, runtime: Runtime, traces: list[_AttentionTrace], checks: list[AttentionCheck]
) -> bool:
    """Print what the attention layers did on rank 0; return the verdict on every rank. Collective."""
    mine = (sum(trace.milliseconds for trace in traces) / len(traces), checks)
    ranks: list[tuple[float, list[AttentionCheck]]] = runtime.all_gather(mine)
    failures = [
        f"infer: FAILED in attention layer {layer} on rank {rank}: {check.failure}"
        for rank, (_, found) in enumerate(ranks)
        for layer, check in enumerate(found)
        if check.failure
    ]
    if runtime.rank == 0:
        worst = [check for _, found in ranks for check in found]
        row, choice = (max(getattr(check, name) for check in worst) for name in ("worst_row", "worst_choice"))
        attention, indexer = attention_sections(config)
        verdict = "OUT OF TOLERANCE" if failures else "within tolerance"
        console().print(
            f"{len(traces)} attention layers ({attention.kind}, {attention.heads} heads, top {indexer.top_k}, indexer "
            f"{indexer.quantization}), {max(ms for ms, _ in ranks):.2f} ms/layer; max error {row:.1e}, worst choice "
            f"{choice:.1e} sizes {verdict} ({describe_attention_bounds(config)})",
            markup=False,
            soft_wrap=True,
        )
        for failure in failures:
            console().print(failure, markup=False, soft_wrap=True)
    return not failures


def _explain(
    config: MoEConfig,
    runtime: Runtime,
    text: bytes,
    bounds: list[tuple[int, int]],
    layers: list[MoELayer],
    truths: list[Truth],
    traces: list[_Trace],
    checks: list[LayerCheck],
) -> None:
    """Name, for each layer that failed, its worst token and the expert behind it. Collective."""
    for index, (layer, truth, trace, check) in enumerate(zip(layers, truths, traces, checks, strict=True)):
        reports: list[tuple[float, int, str | None]] = runtime.all_gather(
            (check.severity if check.failure else -1.0, check.worst_token, check.failure)
        )
        rank = max(range(len(reports)), key=lambda r: reports[r][0])
        severity, token, failure = reports[rank]
        if severity < 0:
            continue
        culprit = find_culprit(config, runtime, layer, truth, trace.x, trace.ids, trace.weights, rank, token)
        answers: list[str | None] = runtime.all_gather(culprit)
        if runtime.rank == 0:
            place = bounds[rank][0] + token
            console().print(
                f"infer: FAILED in layer {index}: token {token} of rank {rank} (byte {place}, {chr(text[place])!r}): "
                f"{failure}; {answers[rank]}",
                markup=False,
                soft_wrap=True,
            )
