"""Top-k on one GPU through the public functions: alone, behind the indexer's logits, and the memory of the pair.

    python benchmarks/topk.py [--out benchmarks/results/topk-h200.json] [--only TEXT]

Every run first measures copy bandwidth and cuBLASLt FP8 8192^3, of which a case's floor is made (the logits' bytes; for
a pair the products), and ends with the verdict on each line. Beside a top-k stands torch.topk; beside a pair our logits
and torch.topk. A case's values are compared with torch.topk's before it is timed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import result_file
import torch
from gemm import ceilings
from gemm_lines import Line, say, verdicts
from gpu_timing import host_cost, timed
from mqa_logits import HEAD_DIM, HEADS, dense_case, paged_case

from megamoe.kernels.mqa_logits import fp8_mqa_logits
from megamoe.kernels.mqa_topk import MAX_LOGITS_BYTES, fp8_mqa_topk, fp8_paged_mqa_topk
from megamoe.kernels.topk import topk_indices

K = 2048
ROWS, KEYS = 2048, 32768
LARGE_ROWS, LARGE_KEYS = 8192, 262144
Row = dict[str, object]


def topk_name(rows: int, columns: int, kind: str, ordered: bool) -> str:
    """Return the name of a top-k in the result file; arguments as of `CASES`."""
    return f"kernel=topk rows={rows} columns={columns} k={K} logits={kind}{' ordered=1' if ordered else ''}"


def pair_name(what: str) -> str:
    """Return the name of a pair in the result file; `what` has its sizes."""
    return f"kernel=mqa_topk {what} heads={HEADS} d={HEAD_DIM} k={K}"


PAIRS = [(ROWS, KEYS), (ROWS, 8192)]
PAGED = [(256, 8192, 1), (64, 32768, 1)]
CASES = [
    *((ROWS, columns, "normal", False) for columns in (8192, KEYS, 131072)),
    (ROWS, KEYS, "normal", True),
    *((ROWS, KEYS, kind, False) for kind in ("bf16", "equal", "two", "relu", "masked")),
    *((rows, columns, "normal", False) for rows, columns in ((256, 8192), (64, KEYS), (8, 131072), (1, 1 << 20))),
]
LINES = (
    Line(topk_name(ROWS, KEYS, "normal", False), 150, "us"),
    Line(pair_name(f"rows={ROWS} keys={KEYS}"), 1080, "us"),
)
MEMORY = pair_name(f"rows={LARGE_ROWS} keys={LARGE_KEYS} budget={MAX_LOGITS_BYTES}")
MOST_GIB = 1.1


def logits_of(rows: int, columns: int, kind: str) -> torch.Tensor:
    """Return logits on the GPU: "normal", "bf16", or what a selection may stumble over."""
    torch.manual_seed(1)
    x = torch.randn(rows, columns, device="cuda")
    if kind == "bf16":
        return x.bfloat16()
    if kind == "equal":
        return x.fill_(1.0)
    if kind == "two":
        return (x > 0).float()
    if kind == "relu":
        return x.sub_(1.7).relu_()  # fewer than k above 0
    if kind == "masked":
        return x.masked_fill_(torch.arange(columns, device="cuda") >= columns // 10, -torch.inf)
    return x


def check(found: torch.Tensor, logits: torch.Tensor, name: str) -> None:
    """End the program if the chosen values aren't those of torch.topk."""
    for first in range(0, logits.shape[0], 256):
        rows = slice(first, first + 256)
        expected = logits[rows].topk(found.shape[1], sorted=False).values.sort(dim=1).values
        index = found[rows].long()
        values = logits[rows].gather(1, index.clamp(min=0)).masked_fill(index < 0, -torch.inf).sort(dim=1).values
        if not torch.equal(values, expected):
            sys.exit(f"{name}: not the values of torch.topk")


def measure(
    name: str, call: Callable[[], object], peer: str, peer_call: Callable[[], object], floor: float
) -> list[Row]:
    """Time a case and its peer; print and return its rows."""
    times, peer_times, host = timed(call), timed(peer_call), host_cost(call)
    print(
        f"{name}: chilled {times[0]:.1f} us, sustained {times[1]:.1f} us, floor {floor:.1f} us, {peer} "
        f"{peer_times[0]:.1f} / {peer_times[1]:.1f} us, host {host:.2f} us",
        flush=True,
    )
    rows: list[Row] = [
        {"case": name, "method": method, "us": us, "peer": peer, "peer_us": peer_us, "floor_us": floor}
        for method, us, peer_us in zip(("chilled", "sustained"), times, peer_times, strict=True)
    ]
    return [*rows, {"case": name, "method": "host", "us": host}]


def alone(bandwidth: float, only: str) -> list[Row]:
    """Measure top-k over logits that are there; bandwidth in GB/s."""
    found: list[Row] = []
    for rows, columns, kind, ordered in CASES:
        name = topk_name(rows, columns, kind, ordered)
        if only not in name:
            continue
        logits = logits_of(rows, columns, kind)
        out = torch.full((rows, K), -7, dtype=torch.int32, device="cuda")
        call = functools.partial(topk_indices, logits, K, deterministic=ordered, out=out)
        call()
        check(out, logits, name)
        peer = functools.partial(torch.topk, logits, K, sorted=False)
        found += measure(name, call, "torch.topk", peer, logits.nbytes / bandwidth / 1e3)
    return found


def pairs(peak: float, bandwidth: float, only: str) -> list[Row]:
    """Measure logits and top-k; peak in TFLOPS, bandwidth in GB/s."""
    found: list[Row] = []
    for sizes in (*PAIRS, *PAGED):
        is_paged = len(sizes) == 3
        what = "batches={} length={} next_n={}" if is_paged else "rows={} keys={}"
        name = pair_name(what.format(*sizes))
        if only not in name:
            continue
        case = paged_case(False, *sizes) if is_paged else dense_case(False, *sizes, "whole")
        arguments = case.call.args  # type: ignore[attr-defined]
        out = torch.full((case.out.shape[0], K), -7, dtype=torch.int32, device="cuda")
        if is_paged:
            q, cache, weights, lengths, table, schedule, longest, _ = arguments
            call = functools.partial(
                fp8_paged_mqa_topk, q, cache, weights, lengths, table, schedule, longest, K, out=out
            )
        else:
            call = functools.partial(fp8_mqa_topk, *arguments, K, out=out)
        call()
        check(out, case.call(), name)  # type: ignore[arg-type]

        def both(case: object = case) -> None:
            torch.topk(case.call(), K, sorted=False)  # type: ignore[attr-defined]

        floor = max(case.flop / peak / 1e6, (case.bytes - case.out.nbytes) / bandwidth / 1e3)
        found += measure(name, call, "own logits, torch.topk", both, floor)
    return found


def memory(only: str) -> list[Row]:
    """Measure what the pair allocates beside its operands; end the program if the two steps choose otherwise."""
    if only not in MEMORY:
        return []
    torch.cuda.empty_cache()
    torch.manual_seed(1)
    e4m3 = torch.float8_e4m3fn
    q = torch.randn(LARGE_ROWS, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16).to(e4m3)
    kv = (torch.randn(LARGE_KEYS, HEAD_DIM, device="cuda").to(e4m3), torch.ones(LARGE_KEYS, device="cuda"))
    weights = torch.randn(LARGE_ROWS, HEADS, device="cuda")
    starts = torch.zeros(LARGE_ROWS, dtype=torch.int32, device="cuda")
    ends = torch.full_like(starts, LARGE_KEYS)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = fp8_mqa_topk(q, kv, weights, starts, ends, K)
    torch.cuda.synchronize()
    gib = (torch.cuda.max_memory_allocated() - before) / 2**30
    expected = topk_indices(fp8_mqa_logits(q, kv, weights, starts, ends, False), K, deterministic=True)
    if not torch.equal(out.sort(dim=1).values, expected):
        sys.exit(f"{MEMORY}: not the indices of all logits and their top-k")
    print(
        f"{MEMORY}: {gib:.4f} GiB beside the operands, {out.nbytes / 2**30:.4f} of them the result; the indices of the "
        f"two steps",
        flush=True,
    )
    return [{"case": MEMORY, "method": "memory", "gib": gib}]


def main() -> None:
    """Run the cases, print a line each and the verdicts, and write the results."""
    arguments = result_file.case_options(__doc__)
    peak, bandwidth, rows = ceilings()
    held: list[Row] = []
    for part in (functools.partial(alone, bandwidth), functools.partial(pairs, peak, bandwidth), memory):
        rows += part(arguments.only)
        held = verdicts(rows, peak, bandwidth, LINES)
        for row in rows:
            if row["case"] == MEMORY:
                gib = float(str(row["gib"]))
                held.append({"line": f"{MEMORY}, GiB", "measured": gib, "needed": MOST_GIB, "met": gib <= MOST_GIB})
        if arguments.out:
            result_file.write(arguments.out, rows, lines=held)
    say(held)


if __name__ == "__main__":
    main()
