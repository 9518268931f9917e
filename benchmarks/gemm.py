"""Grouped GEMM on one GPU through the public functions: chilled and sustained times, host cost, output checked.

    python benchmarks/gemm.py [--out benchmarks/results/gemm-h200.json] [--only TEXT]

Chilled: the chip rests, then an 8 GB memset before each call, CUDA events, median of 9. Sustained: back to back for
0.25 s. Every run first measures copy bandwidth and cuBLASLt FP8 8192^3.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from megamoe.kernels import formats, gemm
from megamoe.kernels.packing import pack_mxfp4

BFLOAT16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
UNIFORM = [1536] * 32
CALLS = 1000


def wait(limit_s: float = 5.0) -> None:
    """Synchronise, or end the process when the device doesn't answer."""
    event = torch.cuda.Event()
    event.record()
    start = time.monotonic()
    while not event.query():
        if time.monotonic() - start > limit_s:
            sys.exit(f"the device did not answer for {limit_s} s")


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return (chilled, sustained) microseconds."""
    big = torch.empty(8_000_000_000, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        call()
    wait()
    time.sleep(0.3)
    times = []
    for _ in range(9):
        big.zero_()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # the host gets ahead, so that only the device is timed
        first.record()
        call()
        last.record()
        wait()
        times.append(1e3 * first.elapsed_time(last))
    chilled = median(times)
    repeats = max(10, int(0.25e6 / chilled))
    for _ in range(repeats // 3):
        call()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        call()
    last.record()
    wait()
    return chilled, 1e3 * first.elapsed_time(last) / repeats


def host_cost(call: Callable[[], None]) -> float:
    """Return microseconds of host time per call, over 1000 calls without synchronisation.

    The launch queue of the driver holds about as many launches; a full one would be timed as well, so the calls are
    taken in parts of 100 with a synchronisation between them that is not timed.
    """
    for _ in range(10):
        call()
    total = 0.0
    for _ in range(CALLS // 100):
        wait()
        start = time.perf_counter()
        for _ in range(100):
            call()
        total += time.perf_counter() - start
    wait()
    return 1e6 * total / CALLS


class Case:
    """One problem: operands, the call, and the error of a sample of its output."""

    def __init__(self, kind: str, rows: list[int], n: int, k: int, scale: str, padded: int = 0) -> None:
        groups, self.rows, self.n, self.k, self.padded = len(rows), rows, n, k, padded
        self.scale = scale
        torch.manual_seed(1)
        shape = (groups, padded, k) if padded else (sum(rows), k)
        x, scales = formats.quantize_e4m3(torch.randn(*shape, device="cuda", dtype=BFLOAT16), scale)
        if scale == "block128":
            scales = gemm.get_mn_major_tma_aligned_tensor(scales)
        self.x, self.scales = x, scales
        self.out = torch.full((*shape[:-1], n), float("nan"), device="cuda", dtype=BFLOAT16)
        self.fp4 = kind.startswith("sm90")
        if self.fp4:
            codes = torch.randint(0, 256, (groups, n, k // 2), dtype=torch.uint8, device="cuda")
            exponents = torch.randint(118, 125, (groups, n, k // 32), dtype=torch.uint8, device="cuda")
            self.weight = pack_mxfp4(codes, exponents, kind)
            self.last = formats.dequantize_mxfp4(codes[-1], exponents[-1]).double()
            self.bytes = self.weight.data.nbytes
        else:
            weight = torch.randn(groups, n, k, device="cuda", dtype=BFLOAT16).to(E4M3)
            block = torch.rand(groups, -(-n // 128), -(-k // 128), device="cuda") + 0.5
            self.weight = (weight, block)
            self.last = formats.dequantize_e4m3_weight(weight[-1], block[-1]).double()
            self.bytes = weight.nbytes
        name = "fp8_fp4" if self.fp4 else "fp8"
        if padded:
            self.groups = torch.tensor(rows, dtype=torch.int32, device="cuda")
        else:
            index = [torch.full((count,), g, dtype=torch.int32) for g, count in enumerate(rows)]
            self.groups = torch.cat(index).cuda()
        self.call = getattr(gemm, f"m_grouped_{name}_gemm_nt_{'masked' if padded else 'contiguous'}")
        mean = f"rows={rows[0]}" if len(set(rows)) == 1 else f"rows=multinomial-{sum(rows)}"
        masked = " masked=1" if padded else ""
        self.name = f"kernel=m_grouped_{name} groups={groups} {mean} n={n} k={k} scale={scale}{masked}"
        self.expected = (max(rows),) if padded else ()

    def __call__(self) -> None:
        self.call((self.x, self.scales), self.weight, self.out, self.groups, *self.expected)

    def error(self) -> float:
        """Return the relative L2 of up to 128 rows of the last group against FP64."""
        count = min(128, self.rows[-1])
        if self.padded:
            x, scales, out = self.x[-1, :count], self.scales[-1, :count], self.out[-1, :count]
        else:
            x, scales, out = self.x[-count:], self.scales[-count:], self.out[-count:]
        exact = formats.dequantize_e4m3(x, scales.contiguous(), self.scale).double() @ self.last.t()
        return float((out.double() - exact).norm() / exact.norm())


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
    found += [("fp8", [8192] * 4, 4096, 7168, "block128", 0), ("fp8", [8192], 8192, 8192, "block128", 0)]
    return found


def main() -> None:
    """Run the cases, print a line each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="only cases whose name has this text")
    arguments = parser.parse_args()
    one = torch.ones(1, device="cuda")
    a = torch.randn(8192, 8192, device="cuda").to(E4M3)
    chilled, sustained = timed(lambda: torch._scaled_mm(a, a.t(), one, one, out_dtype=BFLOAT16))
    flop = 2 * 8192**3
    print(f"cuBLASLt FP8 8192^3: chilled {flop / chilled / 1e6:.0f}, sustained {flop / sustained / 1e6:.0f} TFLOPS")
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_us, _ = timed(functools.partial(target.copy_, source))
    bandwidth = 2 * source.nbytes / copy_us / 1e3
    print(f"copy: {bandwidth:.0f} GB/s", flush=True)
    peak = flop / chilled / 1e6
    rows: list[dict[str, object]] = [
        {"case": "kernel=cublaslt_fp8 m=8192 n=8192 k=8192", "method": "chilled", "us": chilled, "tflops": peak},
        {"case": "kernel=cublaslt_fp8 m=8192 n=8192 k=8192", "method": "sustained", "us": sustained,
         "tflops": flop / sustained / 1e6},
        {"case": "kernel=copy bytes=2147483648", "method": "chilled", "us": copy_us, "gbps": bandwidth},
    ]  # fmt: skip
    for parts in cases():
        kind, counts, n, k, scale, padded = parts
        case = Case(kind, counts, n, k, scale, padded)
        if arguments.only not in case.name:
            continue
        work = 2 * sum(counts) * n * k
        floor = max(work / peak / 1e6, case.bytes / bandwidth / 1e3)
        times = timed(case)
        host = host_cost(case)
        error = case.error()
        print(
            f"{case.name}: chilled {times[0]:.1f} us {work / times[0] / 1e6:.0f} TFLOPS "
            f"{case.bytes / times[0] / 1e3:.0f} GB/s, sustained {times[1]:.1f} us {work / times[1] / 1e6:.0f} TFLOPS, "
            f"host {host:.2f} us, error {error:.5f}",
            flush=True,
        )
        if not error <= 2.5e-3:
            sys.exit(f"{case.name}: relative L2 {error:.5f} is above 0.0025")
        for method, us in zip(("chilled", "sustained"), times, strict=True):
            rows.append(
                {"case": case.name, "method": method, "us": us, "tflops": work / us / 1e6,
                 "gbps": case.bytes / us / 1e3, "peer": None, "peer_us": None, "floor_us": floor, "error": error}
            )  # fmt: skip
        rows.append({"case": case.name, "method": "host", "us": host})
        del case
        if arguments.out:
            write(arguments.out, rows)


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write the results so far."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.splitlines()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        driver = ""
    try:
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    result = {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/gemm.py",
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
