"""The lines that the GEMM's figures are held against, and the verdict on each.

A rate was stated for a GPU whose cuBLASLt gives 1408 TFLOPS (FP8 8192^3, chilled), the time of a case that streams
weights for one that copies 4257 GB/s. Each run measures both and scales its lines by them, by at most 5% either way.
"""

from __future__ import annotations

from dataclasses import dataclass

CUBLASLT_TFLOPS, COPY_GBPS, LARGEST_SCALING = 1408.0, 4257.0, 0.05
GROUPED = "groups=32 rows=1536 n=4096"
ANY = ""


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        case: the case's name.
        bound: TFLOPS at least, microseconds at most (`quantity` "us"), or, with `of`, a ratio of rates at least.
        quantity: "tflops" or "us".
        method: of the row.
        of: the case that a ratio compares with.
    """

    case: str
    bound: float
    quantity: str = "tflops"
    method: str = "chilled"
    of: str = ""


_FP4, _FP8 = "kernel=m_grouped_fp8_fp4", "kernel=m_grouped_fp8"
_UNEVEN = "groups=32 rows=multinomial-49152 n=4096 k=4096 scale=block128"
LINES = (
    Line(f"{_FP4} {GROUPED} k=4096 scale=token", 1150),
    Line(f"{_FP4} {GROUPED} k=4096 scale=block128", 1050),
    Line(f"{_FP4} {GROUPED} k=2048 scale=block128", 1050),
    Line(f"{_FP4} {_UNEVEN}", 0.9, of=f"{_FP4} {GROUPED} k=4096 scale=block128"),
    Line(f"{_FP8} {_UNEVEN}", 0.9, of=f"{_FP8} {GROUPED} k=4096 scale=block128"),
    Line(f"{_FP8} {GROUPED} k=4096 scale=block128", 0.95 * 1382),
    Line(f"{_FP8} groups=4 rows=8192 n=4096 k=7168 scale=block128", 0.95 * 1426),
    Line("kernel=fp8_gemm_nt m=8192 n=8192 k=8192 scale=block128", 1400),
    *(
        Line(f"{_FP4} {shape} scale={scale} masked=1", bound, "us")
        for shape, bound in (("groups=32 rows=24 n=4096 k=4096", 90), ("groups=8 rows=48 n=4096 k=7168", 45))
        for scale in ("block128", "token")
    ),
    Line(ANY, 10, "us", "host"),
)


def scaling(measured: float, stated: float) -> float:
    """Return measured / stated, within 5% of 1."""
    return min(max(measured / stated, 1 - LARGEST_SCALING), 1 + LARGEST_SCALING)


def verdicts(
    rows: list[dict[str, object]], cublaslt_tflops: float, copy_gbps: float, lines: tuple[Line, ...] = LINES
) -> list[dict[str, object]]:
    """Hold the rows of a run against lines.

    Args:
        rows: as in the result file.
        cublaslt_tflops, copy_gbps: measured by the same run.
        lines: those of the GEMM, or another benchmark's.

    Returns:
        For each line whose rows are there: line, measured, needed, met.
    """
    measured: dict[tuple[object, object], dict[str, object]] = {(row["case"], row["method"]): row for row in rows}
    found: list[dict[str, object]] = []
    for line in lines:
        if line.case == ANY:
            values = [float(str(row[line.quantity])) for (_, method), row in measured.items() if method == line.method]
            if not values:
                continue
            value, needed, name = max(values), line.bound, "host cost of a call, the largest of all cases, us"
        else:
            row, other = measured.get((line.case, line.method)), measured.get((line.of, line.method))
            if row is None or (line.of and other is None):
                continue
            value, needed, name = float(str(row[line.quantity])), line.bound, f"{line.case}, {line.quantity}"
            if line.of and other is not None:
                value /= float(str(other[line.quantity]))
                name = f"{line.case}, rate of that of even rows"
            elif line.quantity == "us":
                needed /= scaling(copy_gbps, COPY_GBPS)
            else:
                needed *= scaling(cublaslt_tflops, CUBLASLT_TFLOPS)
        met = value <= needed if line.quantity == "us" and not line.of else value >= needed
        found.append({"line": name, "measured": value, "needed": needed, "met": met})
    return found


def say(held: list[dict[str, object]]) -> None:
    """Print verdicts, a line each."""
    for verdict in held:
        word = "met" if verdict["met"] else "MISSED"
        print(f"{word:6} {verdict['line']}: {verdict['measured']:.4g}, needed {verdict['needed']:.4g}")
