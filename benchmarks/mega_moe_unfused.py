"""The mega-kernel and the same layer without fusion, on several ranks, same inputs, in one run.

    torchrun --nproc-per-node 2 benchmarks/mega_moe_unfused.py [--only flash] [--tokens 8,128] [--graph] [--out FILE]

Unfused is `unfused_layer.py`: NCCL's all-to-all around our own grouped GEMMs. It is timed with its counts exchanged and
waited for (`counts=host_sync`) and with counts known beforehand (`counts=known`): the difference is what the wait of
the host costs. With --graph also as a CUDA graph of the latter (`counts=graph`), without any work of the host. What its
two all-to-alls take alone stands beside it (`counts=exchange`). Its weights are packed as the grouped GEMM wants them
for that many rows an expert. Times as in `rank_timing.py`; rows of the fused kernel are those of `mega_moe.py`. A
sample of the output is held against float64 maths with the same rounding points, all of it against the mega-kernel's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import rank_timing
import result_file
import torch
import torch.distributed as dist
from gpu_timing import wait
from mega_moe import MODELS, Layer, Tokens, add_options, measure_ranks, sample_of, start_several_ranks
from torch import Tensor
from unfused_layer import COUNTS, UnfusedLayer, chain, differs

from megamoe.kernels import formats
from megamoe.kernels.packing import pack_mxfp4
from megamoe.testing.numeric import compare

TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192)
RS_ROWS = 48  # mean rows an expert up to which weights come from registers (`sm90_rs`)


def exact(layer: Layer, tokens: Tokens) -> Tensor:
    """Return what the unfused layer must give for a few tokens."""
    x, ids, weights = tokens
    used = ids.unique()
    renamed = torch.full((layer.spec.num_experts,), -1, dtype=torch.int64, device="cuda")
    renamed[used] = torch.arange(used.numel(), device="cuda")
    all_weights = layer.weights
    w13 = [formats.dequantize_mxfp4(all_weights.w13[e], all_weights.w13_scale[e]).float() for e in used.tolist()]
    w2 = [formats.dequantize_mxfp4(all_weights.w2[e], all_weights.w2_scale[e]).float() for e in used.tolist()]
    return chain(x, renamed[ids], weights, torch.stack(w13), torch.stack(w2), layer.spec.swiglu_limit)


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return a graph of a call that has run before, and where it puts its output."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own threads ask for events meanwhile
        y = call()
    return graph, y


def measure_unfused(
    layer: Layer,
    unfused: UnfusedLayer,
    tokens: Tokens,
    fused: dict[str, float],
    fused_y: Tensor,
    *,
    nccl: dist.ProcessGroup,
    graph: bool,
) -> list[dict[str, object]]:
    """Measure one case; return its rows, the same on every rank.

    Args:
        layer: the same layer, fused.
        unfused: the layer.
        tokens: of this rank.
        fused, fused_y: times of the mega-kernel by method, and its output.
        nccl: the ranks.
        graph: whether to capture it as well.
    """
    num_tokens = tokens[0].shape[0]
    splits = unfused.splits(tokens[1])
    sample = sample_of(num_tokens)[:16]
    x, ids, weights = (t[sample] for t in tokens)
    expected = exact(layer, (x, ids, weights))
    name = f"{layer.case(num_tokens).replace(f'comm={layer.comm}', 'comm=nccl')} impl=unfused"
    rows: list[dict[str, object]] = []
    for counts in (*COUNTS, "graph") if graph else COUNTS:
        given = None if counts == "host_sync" else splits

        def call(given: object = given) -> Tensor:
            return unfused(*tokens, given)  # type: ignore[arg-type]

        y = call()
        held = None
        if counts == "graph":
            wait(30.0)
            held, y = captured(call)
            held.replay()
        wait(30.0)
        run = call if held is None else held.replay
        compared = compare(y[sample], expected, "quantised")
        wrong = ("" if compared.ok else compared.text) or differs(y, fused_y)
        reports = layer.collectives.gather_objects(wrong, phase="verdict")
        case = f"{name} counts={counts}"
        for rank, report in enumerate(reports):
            if report:
                raise SystemExit(f"{case}: rank {rank}: {report}")
        rows += timed_rows(case, run, (2 * compared.diff) ** 0.5, layer, fused, nccl)
    case = f"{name} counts=exchange"
    rows += timed_rows(case, unfused.exchange(layer.spec.hidden, splits, tokens[0].device), None, layer, fused, nccl)
    return rows


def timed_rows(
    case: str,
    run: Callable[[], object],
    error: float | None,
    layer: Layer,
    fused: dict[str, float],
    nccl: dist.ProcessGroup,
) -> list[dict[str, object]]:
    """Time a call beside the mega-kernel; return its rows."""
    times = {
        "back to back": rank_timing.back_to_back(run, layer.collectives),
        "chilled": rank_timing.chilled(run, layer.collectives, nccl),
    }
    if layer.rank == 0:
        said = ", ".join(f"{method} {us:.1f} us ({us / fused[method]:.2f}x)" for method, us in times.items())
        print(f"{case}: {said}{'' if error is None else f', error {error:.5f}'}", flush=True)
    common = {"case": case, "gbps": None, "floor_us": None, "error": error, "tflops": None, "peer": "mega-kernel"}
    return [{**common, "method": method, "us": us, "peer_us": fused[method]} for method, us in times.items()]


def run_layer(layer: Layer, options: argparse.Namespace, nccl: dist.ProcessGroup) -> Iterator[list[dict[str, object]]]:
    """Measure one model; yield the rows of each number of tokens, the same on every rank."""
    packed: dict[str, UnfusedLayer] = {}
    own = layer.own
    for num_tokens in options.tokens:
        rows, tokens, y = measure_ranks(layer, num_tokens, "none", nccl)
        layout = "sm90_rs" if num_tokens * layer.spec.top_k <= RS_ROWS * layer.num_local else "sm90_ss"
        if layout not in packed:
            packed.clear()
            w13, w2 = pack_mxfp4(own.w13, own.w13_scale, layout), pack_mxfp4(own.w2, own.w2_scale, layout)
            packed[layout] = UnfusedLayer(w13, w2, layer.spec.swiglu_limit, nccl)
        fused = {str(row["method"]): float(str(row["us"])) for row in rows}
        yield rows + measure_unfused(layer, packed[layout], tokens, fused, y, nccl=nccl, graph=options.graph)
    layer.workspace.close()


def main() -> None:
    """Measure what is asked for, and write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "flash,pro", TOKENS)
    parser.add_argument("--graph", action="store_true", help="the unfused layer as a CUDA graph as well")
    options = parser.parse_args()
    with_bias = [model for model in options.only if MODELS[model][4] == "swiglu_oai" or MODELS[model][1] % 128]
    if with_bias:
        parser.error(f"--only: the unfused layer has no biases, which {', '.join(with_bias)} has; leave it out")
    collectives, nccl = start_several_ranks(parser)
    rows: list[dict[str, object]] = []
    for model in options.only:
        for found in run_layer(Layer(model, collectives, options.comm, max(TOKENS)), options, nccl):
            rows += found
            if options.out and collectives.rank == 0:  # after each, so that a run that is cut short leaves what it has
                result_file.write(options.out, rows)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
