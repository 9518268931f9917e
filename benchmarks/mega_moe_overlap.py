"""NVLink traffic of the mega-kernel under its tensor work: traced calls of several ranks, summed up (`trace_overlap`).

    torchrun --nproc-per-node 2 benchmarks/mega_moe_overlap.py --trace trace.json [--only flash] [--tokens 2048,8192]

Every case runs three traced calls and reports the last; the trace files (`trace.json`, `trace.1.json`, ...) open in
ui.perfetto.dev as well. Case names and routing are those of `mega_moe.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

import link_traffic
import result_file
import torch
import torch.distributed as dist
from mega_moe import TOKENS, Layer, add_options, check, skews_of, start_ranks
from trace_overlap import Overlap, calls_of, overlap, table

from megamoe.kernels.mega_moe import select_instance

CALLS = 3


def main() -> None:
    """Trace what is asked for, print the sums, and write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "flash", (2048, 8192))
    parser.add_argument("--skew", type=skews_of, default="none", help="routing, with commas, as in mega_moe.py")
    parser.add_argument("--trace", type=Path, required=True, help="file of rank 0; the others write beside it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs Hopper GPUs, torch finds no CUDA device")
    os.environ["MEGAMOE_TRACE"] = str(options.trace)
    collectives = start_ranks()
    rank = collectives.rank
    # case, ranks' counts, rows and pulls of a row block, hidden
    cases: list[tuple[str, list[list[int]], int, int, int]] = []
    for model in options.only:
        layer = Layer(model, collectives, options.comm, max(TOKENS))
        for num_tokens in options.tokens:
            for skew in options.skew:
                tokens = layer.tokens(num_tokens, skew)
                y = torch.full_like(tokens[0], float("nan"))
                for _ in range(CALLS):
                    layer.workspace.launch(layer.plan, *tokens, y)
                layer.finish()
                compared = check(layer.spec, layer.weights, tokens, y)
                if not compared.ok:
                    raise SystemExit(f"{layer.case(num_tokens, skew)}: rank {rank}: {compared.text}")
                instance = select_instance(layer.spec, num_tokens, layer.world_size)
                shape = (instance.block_rows, instance.pulls_per_block, layer.spec.hidden)
                cases.append((layer.case(num_tokens, skew), layer.counts(tokens[1]), *shape))
        trace = layer.workspace._trace
        layer.workspace.close()
        torch.cuda.empty_cache()
    assert trace is not None
    trace.write()
    calls = calls_of(trace.path)
    num_ctas = torch.cuda.get_device_properties(0).multi_processor_count
    rows: list[dict[str, object]] = []
    for number, (case, counts, block_rows, pulls, hidden) in enumerate(cases):
        parts = link_traffic.pull_parts(counts, rank, block_rows, pulls)
        own = overlap(calls[CALLS * (number + 1) - 1], num_ctas, parts, hidden)
        found: list[dict[str, Any]] = collectives.gather_objects(dataclasses.asdict(own), phase="sums of the trace")
        moved = link_traffic.traffic(counts, hidden)
        common = {"case": case, "method": "trace", "link_us": link_traffic.link_us(moved)}
        for peer, values in enumerate(found):
            rows.append({**common, "rank": peer, **dataclasses.asdict(moved[peer]), **values})
        if rank == 0:
            print(f"{case}: rows alone need {common['link_us']:.1f} us of NVLink")
            print(table([(f"rank {peer}", Overlap(**values)) for peer, values in enumerate(found)]), flush=True)
    if options.out and rank == 0:
        result_file.write(options.out, rows)
    if collectives.world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
