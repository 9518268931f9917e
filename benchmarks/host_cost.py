"""Host cost of GEMMs and of the MoE op: the Python part alone, without a GPU, and the whole where there is one.

    python benchmarks/host_cost.py [gemm] [moe]

The Python part ends right before the driver call: a function of libc that takes an address and does nothing with it
stands for cuLaunchKernelEx. 1000 calls without synchronisation; the best of ten such series, and the median. The MoE op
is measured from the inside out: what each step adds is the difference of two lines.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]

from helpers_gemm import FakeDriver, Problem, problem, without_gpu  # noqa: E402
from helpers_mega import mega_spec, on_the_host  # noqa: E402
from helpers_moe import make_problem, make_tokens  # noqa: E402

from megamoe.functional import MoEContext, mega_moe  # noqa: E402
from megamoe.kernels import gemm  # noqa: E402

CALLS, SERIES = 1000, 10
PARTS = ("gemm", "moe")


def microseconds(call: Callable[[], object], between: Callable[[], None], calls: int = CALLS) -> tuple[float, float]:
    """Return (best, median) time of a call over series of `calls`; `between` is called untimed before each series."""
    for _ in range(20):
        call()
    times = []
    for _ in range(SERIES):
        between()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(1e6 * (time.perf_counter() - start) / calls)
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


def measure_gemm(no_op: Callable[..., int], has_gpu: bool) -> None:
    """Print a line for each function of the GEMM tier."""
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


def moe_calls(context: MoEContext, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the calls to time, from the launch alone to the public op."""
    spec = context.spec
    experts = make_problem(spec).weights
    for name in ("w13", "w2", "w13_scale", "w2_scale"):
        setattr(experts, name, getattr(experts, name).to(device))
    x, ids, weights = (t.to(device) for t in make_tokens(spec, 8, dtype=torch.bfloat16))
    out = torch.empty_like(x)
    backend: Any = context.backend
    backend.forward(x, ids, weights, experts)
    plan, workspace = backend._ready(experts).plan, backend.workspace
    stream = workspace._gpu.stream()
    return {
        "plan.launch": lambda: plan.launch(x, ids, weights, out, stream),
        "workspace.launch": lambda: workspace.launch(plan, x, ids, weights, out),
        "backend.forward_into": lambda: backend.forward_into(x, ids, weights, experts, out),
        "backend.forward": lambda: backend.forward(x, ids, weights, experts),
        "mega_moe, out given": lambda: mega_moe(x, ids, weights, experts, context, out=out),
        "mega_moe": lambda: mega_moe(x, ids, weights, experts, context),
    }


def measure_moe(no_op: Callable[..., int], has_gpu: bool) -> None:
    """Print a line for each step of the MoE op."""
    spec = mega_spec()
    with on_the_host(FakeDriver(no_op)), torch.no_grad():
        cpu = torch.device("cpu")
        calls = moe_calls(MoEContext(spec, None, "sm90", device=cpu, max_tokens_per_rank=64), cpu)
        lines = {name: microseconds(call, nothing) for name, call in calls.items()}
    on_device: dict[str, tuple[float, float]] = {}
    if has_gpu:
        gpu = torch.device("cuda", torch.cuda.current_device())
        with torch.no_grad():
            calls = moe_calls(MoEContext(spec, None, "sm90", device=gpu, max_tokens_per_rank=64), gpu)
            # launches wait in a queue of about a thousand, and the kernel takes longer than the host
            on_device = {name: microseconds(call, torch.cuda.synchronize, calls=100) for name, call in calls.items()}
    for name, (best, median) in lines.items():
        line = f"{name:40} | Python part {best:.2f} {median:.2f}"
        if name in on_device:
            line += " | with the launch {:.2f} {:.2f}".format(*on_device[name])
        print(line, flush=True)


def main() -> None:
    """Print a line for each call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"what to measure: {' or '.join(PARTS)}; all by default"
    )
    parts = parser.parse_args().parts or list(PARTS)
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        parser.error(f"unknown {', '.join(unknown)}; choose among {', '.join(PARTS)}")
    no_op = ctypes.CDLL(None).pthread_condattr_destroy  # returns 0
    no_op.argtypes = [ctypes.c_void_p] * 4
    print(f"Python {platform.python_version()}, torch {torch.__version__}, us a call: best, median")
    has_gpu = torch.cuda.is_available()
    if "gemm" in parts:
        measure_gemm(no_op, has_gpu)
    if "moe" in parts:
        measure_moe(no_op, has_gpu)


if __name__ == "__main__":
    main()
