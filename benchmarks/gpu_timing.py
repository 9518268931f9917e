"""Timing on one GPU: chilled, sustained, host cost; every wait is bounded.

Chilled: the chip rests, then an 8 GB memset before each call, CUDA events, median of 9. Sustained: back to back for
0.25 s.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import torch

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


def host_cost(call: Callable[[], object]) -> float:
    """Return microseconds of host time per call, over 1000 calls.

    The launch queue of the driver holds about as many launches; a full one would be timed as well, so calls of kernels
    that take long are taken in parts of 100 with a synchronisation between them that is not timed.
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
