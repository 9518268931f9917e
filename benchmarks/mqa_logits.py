"""MQA logits on one GPU through the public functions: chilled and sustained times, peer, output checked.

    python benchmarks/mqa_logits.py [--out benchmarks/results/mqa_logits-h200.json] [--only TEXT]

Every run first measures copy bandwidth and cuBLASLt FP8 8192^3, of which a case's floor is made, and ends with the
verdict on each line. The peer is DeepGEMM's function of the same name where it can be imported and takes the case.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import result_file
import torch
from gemm import ceilings
from gemm_lines import Line, say, verdicts
from gpu_timing import host_cost, timed

from megamoe.kernels import formats, mqa_logits
from megamoe.kernels.gemm import get_num_sms

E4M3 = torch.float8_e4m3fn
HEADS, HEAD_DIM, PAGE = 64, 128, 64
DEVICE = "cuda"
LIMIT = 1e-3  # relative L2 of the sampled rows: what the tensor core's sums of E4M3 products leave


def dense_name(fp4: bool, rows: int, num_keys: int, window: str) -> str:
    """Return the name of a case over neighbouring keys; arguments as of `dense_case`."""
    kernel = "fp8_fp4_mqa_logits" if fp4 else "fp8_mqa_logits"
    return f"kernel={kernel} rows={rows} keys={num_keys} heads={HEADS} d={HEAD_DIM} window={window}"


def paged_name(fp4: bool, batches: int, length: int, next_n: int) -> str:
    """Return the name of a case over paged keys; arguments as of `paged_case`."""
    kernel = "fp8_fp4_paged_mqa_logits" if fp4 else "fp8_paged_mqa_logits"
    return f"kernel={kernel} batches={batches} length={length} next_n={next_n} heads={HEADS} d={HEAD_DIM} page={PAGE}"


DENSE = [
    *((False, 2048, keys, "whole") for keys in (4096, 8192, 16384, 32768, 65536)),
    *((False, 2048, keys, "causal") for keys in (8192, 32768)),
    (False, 8192, 8192, "causal"),
    (True, 2048, 32768, "whole"),
]
PAGED = [
    *((False, 256, 8192, next_n) for next_n in (1, 2, 3, 4)),
    (False, 64, 32768, 1),
    *((True, 256, 8192, next_n) for next_n in (1, 2)),
]
LINES = (
    Line(dense_name(False, 2048, 8192, "whole"), 1040),
    Line(dense_name(False, 2048, 32768, "whole"), 1125),
    Line(paged_name(False, 256, 8192, 1), 85, "us"),
)


class Case:
    """One problem.

    Args:
        name: in the result file.
        call: the function, writing to `out`.
        out: the logits.
        peer: of the DeepGEMM module, the same call.
        scores: pairs of a row and a key that the result needs, of HEADS products each.
        num_bytes: least bytes of memory to read and write.
        sample: pairs of a row of `out` and its exact FP64 logits over the columns that the row sees.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[], object],
        out: torch.Tensor,
        peer: Callable[[Any], Callable[[], object]],
        scores: int,
        num_bytes: int,
        sample: list[tuple[int, torch.Tensor]],
    ) -> None:
        self.name, self.call, self.out, self.peer = name, call, out, peer
        self.flop, self.bytes, self.sample = 2 * scores * HEADS * HEAD_DIM, num_bytes, sample

    def error(self) -> float:
        """Return the relative L2 of the sampled rows, infinite where a column that a row does not see was written."""
        off = on = 0.0
        for row, exact in self.sample:
            seen = self.out[row, : len(exact)].double()
            off += float((seen - exact).square().sum())
            on += float(exact.square().sum())
            if not bool((self.out[row, len(exact) :] == float("-inf")).all()):
                return float("inf")
        return (off / on) ** 0.5


def exact_logits(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return FP64 logits of one row: q `[heads, head_dim]`, keys `[num_keys, head_dim]`, weights `[heads]`."""
    return (weights.double() @ (q.double() @ keys.double().t()).clamp(min=0)).flatten()


def fp4_operands(*shape: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return random MXFP4 codes and words of scales, and what they stand for."""
    codes, scales = formats.quantize_mxfp4(torch.randn(*shape, device=DEVICE))
    return (codes, scales.view(torch.int32).squeeze(-1)), formats.dequantize_mxfp4(codes, scales)


def dense_case(fp4: bool, rows: int, num_keys: int, window: str) -> Case:
    """Return a case over neighbouring keys; window: "whole", or "causal", the last row seeing all keys."""
    torch.manual_seed(1)
    weights = torch.randn(rows, HEADS, device=DEVICE)
    starts = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    ends = torch.full_like(starts, num_keys)
    if window == "causal":
        ends -= torch.arange(rows - 1, -1, -1, dtype=torch.int32, device=DEVICE)
    q: Any
    kv: Any
    if fp4:
        (q, exact_q), (kv, exact_keys) = fp4_operands(rows, HEADS, HEAD_DIM), fp4_operands(num_keys, HEAD_DIM)
    else:
        q = torch.randn(rows, HEADS, HEAD_DIM, device=DEVICE).to(E4M3)
        kv = formats.quantize_e4m3(torch.randn(num_keys, HEAD_DIM, device=DEVICE), "token")
        exact_q, exact_keys = q, kv[0].double() * kv[1][:, None]
    out = torch.full((rows, num_keys), float("nan"), device=DEVICE)
    function = mqa_logits.fp8_fp4_mqa_logits if fp4 else mqa_logits.fp8_mqa_logits
    call = functools.partial(function, q, kv, weights, starts, ends, out=out)
    sample = [
        (row, exact_logits(exact_q[row], exact_keys[: int(ends[row])], weights[row]))
        for row in (0, 1, rows // 3, rows - 2, rows - 1)
    ]
    operands = sum(t.nbytes for pair in (q if fp4 else (q,), kv) for t in pair) + weights.nbytes
    return Case(
        dense_name(fp4, rows, num_keys, window),
        call,
        out,
        lambda library: lambda: library.fp8_mqa_logits(q, kv, weights, starts, ends),
        int(ends.sum()),
        operands + out.nbytes,
        sample,
    )


def paged_case(fp4: bool, batches: int, length: int, next_n: int) -> Case:
    """Return a case of `batches` times `next_n` rows over `length` keys each, pages in a random order."""
    torch.manual_seed(1)
    blocks = length // PAGE
    pages = batches * blocks
    exact_q: Any
    q: Any
    if fp4:
        (codes, words), exact_keys = fp4_operands(pages * PAGE, HEAD_DIM)
        q, exact_q = fp4_operands(batches, next_n, HEADS, HEAD_DIM)
    else:
        codes, words = formats.quantize_e4m3(torch.randn(pages * PAGE, HEAD_DIM, device=DEVICE), "token")
        exact_keys = codes.float() * words[:, None]
        q = exact_q = torch.randn(batches, next_n, HEADS, HEAD_DIM, device=DEVICE).to(E4M3)
    parts = [codes.view(torch.uint8).view(pages, -1), words.view(torch.uint8).view(pages, -1)]
    cache = torch.cat(parts, dim=1).view(pages, PAGE, 1, -1)
    table = torch.randperm(pages, device=DEVICE).int().view(batches, blocks)
    weights = torch.randn(batches * next_n, HEADS, device=DEVICE)
    lengths = torch.full((batches, next_n), length, dtype=torch.int32, device=DEVICE)
    lengths -= torch.arange(next_n - 1, -1, -1, dtype=torch.int32, device=DEVICE)
    schedule = mqa_logits.get_paged_mqa_logits_metadata(lengths, PAGE, get_num_sms())
    out = torch.full((batches * next_n, length), float("nan"), device=DEVICE)
    function = mqa_logits.fp8_fp4_paged_mqa_logits if fp4 else mqa_logits.fp8_paged_mqa_logits
    given = weights, lengths, table, schedule, length
    call = functools.partial(function, q, cache, *given, True, out=out)
    by_page = exact_keys.view(pages, PAGE, HEAD_DIM)
    sample = []
    for batch in (0, batches // 3, batches - 1):
        keys = by_page[table[batch].long()].flatten(0, 1)
        for i in range(next_n):
            row = batch * next_n + i
            sample.append((row, exact_logits(exact_q[batch, i], keys[: int(lengths[batch, i])], weights[row])))
    operands = cache.nbytes + weights.nbytes + (sum(t.nbytes for t in q) if fp4 else q.nbytes)
    return Case(
        paged_name(fp4, batches, length, next_n),
        call,
        out,
        lambda library: lambda: library.fp8_paged_mqa_logits(q, cache, *given),
        int(lengths.sum()),
        operands + out.nbytes,
        sample,
    )


def peer_times(case: Case, deep_gemm: Any) -> tuple[float, float] | None:
    """Return the peer's times, or None where it does not run the case."""
    if deep_gemm is None or "fp4" in case.name:
        return None
    try:
        return timed(case.peer(deep_gemm))
    except Exception as error:  # another library's: it may refuse what it likes
        print(f"  deep_gemm does not run this: {type(error).__name__}: {str(error).splitlines()[:1]}")
        return None


def measure(case: Case, peak: float, bandwidth: float, deep_gemm: Any) -> list[dict[str, object]]:
    """Measure and print one case; return its rows."""
    floor = max(case.flop / peak / 1e6, case.bytes / bandwidth / 1e3)
    times = timed(case.call)
    host = host_cost(case.call)
    error = case.error()
    peer = peer_times(case, deep_gemm)
    beside = f", deep_gemm {peer[0]:.1f} / {peer[1]:.1f} us" if peer else ""
    print(
        f"{case.name}: chilled {times[0]:.1f} us {case.flop / times[0] / 1e6:.0f} TFLOPS "
        f"{case.bytes / times[0] / 1e3:.0f} GB/s, sustained {times[1]:.1f} us {case.flop / times[1] / 1e6:.0f} TFLOPS, "
        f"floor {floor:.1f} us{beside}, host {host:.2f} us, error {error:.6f}",
        flush=True,
    )
    if not error <= LIMIT:
        sys.exit(f"{case.name}: relative L2 {error:.6f} is above {LIMIT}")
    rows: list[dict[str, object]] = [
        {"case": case.name, "method": method, "us": us, "tflops": case.flop / us / 1e6, "gbps": case.bytes / us / 1e3,
         "peer": "deep_gemm" if peer else None, "peer_us": peer[i] if peer else None, "floor_us": floor, "error": error}
        for i, (method, us) in enumerate(zip(("chilled", "sustained"), times, strict=True))
    ]  # fmt: skip
    return [*rows, {"case": case.name, "method": "host", "us": host}]


def main() -> None:
    """Run the cases, print a line each and the verdicts, and write the results."""
    arguments = result_file.case_options(__doc__)
    deep_gemm: Any
    try:
        import deep_gemm
    except ImportError:
        deep_gemm = None
    print(f"peer: {'DeepGEMM' if deep_gemm else 'none, DeepGEMM cannot be imported'}")
    peak, bandwidth, rows = ceilings()
    cases = [(dense_name(*parts), functools.partial(dense_case, *parts)) for parts in DENSE]
    cases += [(paged_name(*parts), functools.partial(paged_case, *parts)) for parts in PAGED]
    for name, make in cases:
        if arguments.only not in name:
            continue
        case = make()
        rows += measure(case, peak, bandwidth, deep_gemm)
        del case
        if arguments.out:
            result_file.write(arguments.out, rows, lines=verdicts(rows, peak, bandwidth, LINES))
    say(verdicts(rows, peak, bandwidth, LINES))


if __name__ == "__main__":
    main()
