"""Top-k on one GPU through the public functions: alone, and behind the indexer's logits; torch.topk beside it.

    python benchmarks/topk.py [--out benchmarks/results/topk-h200.json] [--only TEXT]

Every row names its floor: the bytes of the logits at the copy bandwidth that the run measures first, and for the pair
none. Each case's values are compared with torch.topk's before it is timed. The last part measures the memory that the
fused path takes beside its inputs, at [8192, 262144] with a budget of 1 GiB.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import result_file
import torch
from gpu_timing import copy_bandwidth, host_cost, timed

from megamoe.kernels.topk import topk_indices

K = 2048
Row = dict[str, object]


def row_kinds(rows: int, columns: int, kind: str) -> torch.Tensor:
    """Return logits on the GPU: "normal", "bf16", or what a selection may stumble over."""
    x = torch.randn(rows, columns, device="cuda")
    if kind == "bf16":
        return x.bfloat16()
    if kind == "equal":
        return x.fill_(1.0)
    if kind == "two":
        return (x > 0).float()
    if kind == "relu":
        return x.sub_(1.7).relu_()
    if kind == "masked":
        return x.masked_fill_(torch.arange(columns, device="cuda") >= columns // 10, -torch.inf)
    return x


def check(found: torch.Tensor, logits: torch.Tensor, name: str) -> None:
    """The chosen values are those of torch.topk; ends the program where they aren't."""
    for first in range(0, logits.shape[0], 256):
        rows = slice(first, first + 256)
        expected = logits[rows].topk(found.shape[1], sorted=False).values.sort(dim=1).values
        is_none = expected == -torch.inf
        index = found[rows].long()
        values = logits[rows].gather(1, index.clamp(min=0)).masked_fill(index < 0, -torch.inf).sort(dim=1).values
        if not torch.equal(values, expected) or not torch.equal(is_none.sum(1), (index < 0).sum(1)):
            sys.exit(f"{name}: not the values of torch.topk")


def measure(
    name: str, call: Callable[[], object], peer: Callable[[], object], num_bytes: int, gbps: float
) -> list[Row]:
    """Time a case and torch beside it; print and return its rows."""
    times, peer_times, host = timed(call), timed(peer), host_cost(call)
    floor = num_bytes / gbps / 1e3
    print(
        f"{name}: chilled {times[0]:.1f} us, sustained {times[1]:.1f} us; torch {peer_times[0]:.1f} / "
        f"{peer_times[1]:.1f} us; the bytes {floor:.1f} us; host {host:.2f} us",
        flush=True,
    )
    rows: list[Row] = [
        {"case": name, "method": method, "us": us, "gbps": num_bytes / us / 1e3, "peer": "torch.topk",
         "peer_us": peer_us, "floor_us": floor}
        for method, us, peer_us in zip(("chilled", "sustained"), times, peer_times, strict=True)
    ]  # fmt: skip
    return [*rows, {"case": name, "method": "host", "us": host}]


def alone(gbps: float, only: str) -> list[Row]:
    """Top-k over logits that are there."""
    found: list[Row] = []
    cases = [(2048, columns, "normal", False) for columns in (8192, 32768, 131072)]
    cases += [(2048, 32768, "normal", True)]
    cases += [(2048, 32768, kind, False) for kind in ("bf16", "equal", "two", "relu", "masked")]
    cases += [
        (rows, columns, "normal", False) for rows, columns in ((256, 8192), (64, 32768), (8, 131072), (1, 1 << 20))
    ]
    for rows, columns, kind, deterministic in cases:
        name = f"kernel=topk rows={rows} columns={columns} k={K} logits={kind}{' ordered=1' if deterministic else ''}"
        if only not in name:
            continue
        torch.manual_seed(1)
        logits = row_kinds(rows, columns, kind)
        out = torch.full((rows, K), -7, dtype=torch.int32, device="cuda")
        call = functools.partial(topk_indices, logits, K, deterministic=deterministic, out=out)
        call()
        check(out, logits, name)
        peer = functools.partial(torch.topk, logits, K, sorted=False)
        found += measure(name, call, peer, logits.nbytes, gbps)
        del logits
    return found


def main() -> None:
    """Run the cases, print a line each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--only", default="", help="only cases whose name has this text")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a Hopper GPU, torch finds no CUDA device")
    if arguments.out:
        result_file.commit()
    gbps = copy_bandwidth()
    print(f"copy: {gbps:.0f} GB/s", flush=True)
    rows = alone(gbps, arguments.only)
    if arguments.out:
        result_file.write(arguments.out, rows, copy_gbps=gbps)


if __name__ == "__main__":
    main()
