"""GEMM on one GPU through the public functions: chilled and sustained times, peers, host cost, output checked.

    python benchmarks/gemm.py [--out benchmarks/results/gemm-h200.json] [--plot gemm.png] [--only TEXT]

Every run first measures copy bandwidth and cuBLASLt FP8 8192^3, and ends with the verdict on each line
(`gemm_lines.py`). Peers: cuBLASLt (`torch._scaled_mm`, one scale a tensor) for a dense problem; DeepGEMM's public
functions, with FP8 weights, where it can be imported. A case without a peer that runs has none in its row.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gemm_plot
import result_file
import torch
from gemm_lines import say, verdicts
from gpu_timing import host_cost, timed

from megamoe.kernels import formats, gemm
from megamoe.kernels.packing import pack_mxfp4

BFLOAT16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
UNIFORM = [1536] * 32
LIMIT = 2.5e-3


def case_name(kind: str, rows: list[int], n: int, k: int, scale: str, padded: int = 0) -> str:
    """Return the name of a case in the result file; arguments as of `Case`."""
    name = "fp8_fp4" if kind.startswith("sm90") else "fp8"
    if len(rows) == 1 and not padded:
        return f"kernel={name}_gemm_nt m={rows[0]} n={n} k={k} scale={scale}"
    mean = rows[0] if len(set(rows)) == 1 else f"multinomial-{sum(rows)}"
    masked = " masked=1" if padded else ""
    return f"kernel=m_grouped_{name} groups={len(rows)} rows={mean} n={n} k={k} scale={scale}{masked}"


class Case:
    """One problem: operands, the call, its peers, and the error of a sample of its output.

    Args:
        kind: "fp8", "sm90_ss" or "sm90_rs".
        rows: of each group; one group is dense unless padded.
        n, k: sizes.
        scale: "token" or "block128".
        padded: rows of a group's matrix, masked; 0 for contiguous.
    """

    def __init__(self, kind: str, rows: list[int], n: int, k: int, scale: str, padded: int = 0) -> None:
        groups, self.rows, self.n, self.k, self.padded = len(rows), rows, n, k, padded
        self.scale, self.fp4, self.dense = scale, kind.startswith("sm90"), groups == 1 and not padded
        self.name = case_name(kind, rows, n, k, scale, padded)
        torch.manual_seed(1)
        shape = (groups, padded, k) if padded else (sum(rows), k)
        x, scales = formats.quantize_e4m3(torch.randn(*shape, device="cuda", dtype=BFLOAT16), scale)
        if scale == "block128":
            scales = gemm.get_mn_major_tma_aligned_tensor(scales)
        self.lhs = (x, scales)
        self.out = torch.full((*shape[:-1], n), float("nan"), device="cuda", dtype=BFLOAT16)
        self.rhs: Any
        if self.fp4:
            codes = torch.randint(0, 256, (groups, n, k // 2), dtype=torch.uint8, device="cuda")
            exponents = torch.randint(118, 125, (groups, n, k // 32), dtype=torch.uint8, device="cuda")
            self.rhs = pack_mxfp4(codes, exponents, kind)
            self.last = formats.dequantize_mxfp4(codes[-1], exponents[-1]).double()
            self.bytes = self.rhs.data.nbytes
        else:
            self.rhs = self._fp8_weights()
            self.last = formats.dequantize_e4m3_weight(self.rhs[0][-1], self.rhs[1][-1]).double()
            self.bytes = self.rhs[0].nbytes
        if padded:
            self.groups = torch.tensor(rows, dtype=torch.int32, device="cuda")
        else:
            index = [torch.full((count,), g, dtype=torch.int32) for g, count in enumerate(rows)]
            self.groups = torch.cat(index).cuda()
        name = "fp8_fp4" if self.fp4 else "fp8"
        if self.dense:
            call = getattr(gemm, f"{name}_gemm_nt")
            rhs = self.rhs if self.fp4 else (self.rhs[0][0], self.rhs[1][0])
            self.call: Callable[[], None] = functools.partial(call, self.lhs, rhs, self.out)
            return
        call = getattr(gemm, f"m_grouped_{name}_gemm_nt_{'masked' if padded else 'contiguous'}")
        expected = (max(rows),) if padded else ()
        self.call = functools.partial(call, self.lhs, self.rhs, self.out, self.groups, *expected)

    def _fp8_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        groups = len(self.rows)
        weight = torch.randn(groups, self.n, self.k, device="cuda", dtype=BFLOAT16).to(E4M3)
        return weight, torch.rand(groups, -(-self.n // 128), -(-self.k // 128), device="cuda") + 0.5

    @property
    def flop(self) -> int:
        """Floating-point operations, 2 a multiply-add."""
        return 2 * sum(self.rows) * self.n * self.k

    def error(self) -> float:
        """Return the relative L2 of up to 128 rows of the last group against FP64."""
        count = min(128, self.rows[-1])
        x, scales = self.lhs
        if self.padded:
            x, scales, out = x[-1, :count], scales[-1, :count], self.out[-1, :count]
        else:
            x, scales, out = x[-count:], scales[-count:], self.out[-count:]
        exact = formats.dequantize_e4m3(x, scales.contiguous(), self.scale).double() @ self.last.t()
        return float((out.double() - exact).norm() / exact.norm())

    def peers(self, deep_gemm: Any) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield (name, call) of what else computes this shape; the peers' outputs are theirs."""
        x = self.lhs[0]
        if self.dense:
            one = torch.ones(1, device="cuda")
            w = self.rhs[0][0] if not self.fp4 else self._fp8_weights()[0][0]
            yield "cublaslt", lambda: torch._scaled_mm(x, w.t(), one, one, out_dtype=BFLOAT16)
        if deep_gemm is None or (not self.padded and any(count % 128 for count in self.rows)):
            return  # its contiguous groups are multiples of 128 rows
        blocks = torch.rand(*x.shape[:-1], -(-self.k // 128), device="cuda") + 0.5
        lhs = (x, gemm.get_mn_major_tma_aligned_tensor(blocks))
        rhs = self._fp8_weights() if self.fp4 else self.rhs
        out = torch.empty_like(self.out)
        if self.dense:
            dense = (rhs[0][0], rhs[1][0])
            yield "deep_gemm", lambda: deep_gemm.fp8_gemm_nt(lhs, dense, out)
        elif self.padded:
            most = max(self.rows)
            yield "deep_gemm", lambda: deep_gemm.m_grouped_fp8_gemm_nt_masked(lhs, rhs, out, self.groups, most)
        else:
            yield "deep_gemm", lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(lhs, rhs, out, self.groups)


def fastest_peer(case: Case, deep_gemm: Any) -> tuple[str | None, tuple[float, float] | None]:
    """Return the name and the times of the peer with the best chilled time, or None where none runs."""
    best: tuple[str | None, tuple[float, float] | None] = (None, None)
    for name, call in case.peers(deep_gemm):
        try:
            times = timed(call)
        except Exception as error:  # another library's: it may refuse what it likes
            print(f"  peer {name} does not run this: {type(error).__name__}: {str(error).splitlines()[:1]}")
            continue
        if best[1] is None or times[0] < best[1][0]:
            best = (name, times)
    return best


def cases() -> list[tuple[str, list[int], int, int, str, int]]:
    """Return the arguments of every case."""
    generator = torch.Generator().manual_seed(0)
    uneven = torch.bincount(torch.randint(0, 32, (49152,), generator=generator), minlength=32).tolist()
    found: list[tuple[str, list[int], int, int, str, int]] = []
    for kind in ("sm90_ss", "fp8"):
        for k in (4096, 2048):
            found += [(kind, UNIFORM, 4096, k, scale, 0) for scale in ("block128", "token")]
    for scale in ("block128", "token"):
        found += [("sm90_rs", [24] * 32, 4096, 4096, scale, 64), ("sm90_rs", [48] * 8, 4096, 7168, scale, 64)]
    found += [(kind, uneven, 4096, 4096, "block128", 0) for kind in ("sm90_ss", "fp8")]
    found.append(("fp8", [8192] * 4, 4096, 7168, "block128", 0))
    found += [(kind, [8192], 8192, 8192, "block128", 0) for kind in ("fp8", "sm90_ss")]
    return found


def ceilings() -> tuple[float, float, list[dict[str, object]]]:
    """Measure and print cuBLASLt FP8 8192^3 (TFLOPS, chilled) and copy bandwidth (GB/s); return them and their rows."""
    one = torch.ones(1, device="cuda")
    a = torch.randn(8192, 8192, device="cuda").to(E4M3)
    times = timed(lambda: torch._scaled_mm(a, a.t(), one, one, out_dtype=BFLOAT16))
    rates = [2 * 8192**3 / us / 1e6 for us in times]
    print(f"cuBLASLt FP8 8192^3: chilled {rates[0]:.0f}, sustained {rates[1]:.0f} TFLOPS")
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_us, _ = timed(functools.partial(target.copy_, source))
    bandwidth = 2 * source.nbytes / copy_us / 1e3
    print(f"copy: {bandwidth:.0f} GB/s", flush=True)
    rows: list[dict[str, object]] = [
        {"case": "kernel=cublaslt_fp8 m=8192 n=8192 k=8192", "method": method, "us": us, "tflops": rate}
        for method, us, rate in zip(("chilled", "sustained"), times, rates, strict=True)
    ]
    rows.append({"case": "kernel=copy bytes=2147483648", "method": "chilled", "us": copy_us, "gbps": bandwidth})
    return rates[0], bandwidth, rows


def measure(case: Case, peak: float, bandwidth: float, deep_gemm: Any) -> list[dict[str, object]]:
    """Measure and print one case; return its rows."""
    floor = max(case.flop / peak / 1e6, case.bytes / bandwidth / 1e3)
    times = timed(case.call)
    host = host_cost(case.call)
    error = case.error()
    peer, peer_times = fastest_peer(case, deep_gemm)
    beside = f", {peer} {peer_times[0]:.1f} / {peer_times[1]:.1f} us" if peer_times else ""
    print(
        f"{case.name}: chilled {times[0]:.1f} us {case.flop / times[0] / 1e6:.0f} TFLOPS "
        f"{case.bytes / times[0] / 1e3:.0f} GB/s, sustained {times[1]:.1f} us {case.flop / times[1] / 1e6:.0f} TFLOPS"
        f"{beside}, host {host:.2f} us, error {error:.5f}",
        flush=True,
    )
    if not error <= LIMIT:
        sys.exit(f"{case.name}: relative L2 {error:.5f} is above {LIMIT}")
    rows: list[dict[str, object]] = [
        {"case": case.name, "method": method, "us": us, "tflops": case.flop / us / 1e6, "gbps": case.bytes / us / 1e3,
         "peer": peer, "peer_us": peer_times[i] if peer_times else None, "floor_us": floor, "error": error}
        for i, (method, us) in enumerate(zip(("chilled", "sustained"), times, strict=True))
    ]  # fmt: skip
    return [*rows, {"case": case.name, "method": "host", "us": host}]


def main() -> None:
    """Run the cases, print a line each and the verdicts, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the results; needs --out")
    parser.add_argument("--only", default="", help="only cases whose name has this text")
    arguments = parser.parse_args()
    if not any(arguments.only in case_name(*parts) for parts in cases()):
        parser.error(f"--only: no case has {arguments.only!r} in its name")
    if not torch.cuda.is_available():
        parser.error("needs a Hopper GPU, torch finds no CUDA device")
    if arguments.plot and not arguments.out:
        parser.error("--plot needs --out")
    if arguments.plot:
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError:
            parser.error("--plot needs matplotlib: pip install 'megamoe[plot]'")
    if arguments.out:
        result_file.commit()
    deep_gemm: Any
    try:
        import deep_gemm
    except ImportError:
        deep_gemm = None
    print(f"peers: cuBLASLt (dense){', DeepGEMM' if deep_gemm else '; DeepGEMM cannot be imported'}")
    peak, bandwidth, rows = ceilings()
    for parts in cases():
        case = Case(*parts)
        if arguments.only in case.name:
            rows += measure(case, peak, bandwidth, deep_gemm)
        del case
        if arguments.out:
            result_file.write(arguments.out, rows, lines=verdicts(rows, peak, bandwidth))
    say(verdicts(rows, peak, bandwidth))
    if arguments.plot:
        gemm_plot.save(arguments.out, arguments.plot)


if __name__ == "__main__":
    main()
