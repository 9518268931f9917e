"""Host cost of a public GEMM call: the Python part alone, without a GPU, and the whole where there is one.

    python benchmarks/host_cost.py

The Python part ends right before the driver call: a function of libc that takes an address and does nothing with it
stands for cuLaunchKernelEx. 1000 calls without synchronisation; the best of ten such series, and the median.
"""

from __future__ import annotations

import ctypes
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]

from helpers_gemm import FakeDriver, Problem, problem, without_gpu  # noqa: E402

from megamoe.kernels import gemm  # noqa: E402

CALLS, SERIES = 1000, 10


def microseconds(call: Callable[[], None], between: Callable[[], None]) -> tuple[float, float]:
    """Return (best, median) time of a call over series of 1000; `between` is called untimed before each series."""
    for _ in range(20):
        call()
    times = []
    for _ in range(SERIES):
        between()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append(1e6 * (time.perf_counter() - start) / CALLS)
    return min(times), statistics.median(times)


def plain_comparer(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    """The comparison of a torch without the guard."""
    seen = gemm._seen(tensors)
    return lambda *others: gemm._seen(others) == seen


def two_outputs(case: Problem) -> Callable[[], None]:
    """Return a call that writes to two tensors in turn, so that the launch's pointers change every time."""
    outputs = [case.out, torch.empty_like(case.out)]

    def call() -> None:
        outputs.reverse()
        case.out = outputs[0]
        case()

    return call


def on_gpu(case: Problem) -> Problem:
    """Move the operands to the GPU."""
    case.lhs = (case.lhs[0].cuda(), case.lhs[1].cuda())
    if len(case.lhs[1].shape) > 1:
        case.lhs = (case.lhs[0], gemm.get_mn_major_tma_aligned_tensor(case.lhs[1]))
    if isinstance(case.rhs, tuple):
        case.rhs = tuple(t.cuda() for t in case.rhs)
    else:
        case.rhs.data, case.rhs.row_scale = case.rhs.data.cuda(), case.rhs.row_scale.cuda()
    case.out = case.out.cuda()
    case.groups = None if case.groups is None else case.groups.cuda()
    return case


def nothing() -> None:
    """Nothing to wait for."""


def main() -> None:
    """Print a line for each function."""
    no_op = ctypes.CDLL(None).pthread_condattr_destroy  # returns 0
    no_op.argtypes = [ctypes.c_void_p] * 4
    print(f"Python {platform.python_version()}, torch {torch.__version__}, us a call: best, median")
    has_gpu = torch.cuda.is_available()
    for kind in ("fp8", "sm90_ss"):
        for form in ("contiguous", "masked", "dense"):
            case = problem(kind, form, "block128")
            line = f"{case.call.__name__:40}"
            fake = FakeDriver(no_op)
            for what, comparer, wrap in (
                ("Python part", None, None),
                ("new output each call", None, two_outputs),
                ("without torch's guard", plain_comparer, None),
            ):
                with without_gpu(fake, comparer):
                    best, median = microseconds(wrap(case) if wrap else case, nothing)
                line += f" | {what} {best:.2f} {median:.2f}"
            if has_gpu:
                best, median = microseconds(on_gpu(case), torch.cuda.synchronize)
                line += f" | with the launch {best:.2f} {median:.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
