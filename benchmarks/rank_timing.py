"""Timing of a collective call on several ranks, one GPU each: back to back and chilled, the largest of all ranks.

Back to back: 20 calls behind each other after 3 to warm up. Chilled: an 8 GB memset before each call, then an
all-reduce of NCCL that lets all ranks begin together, CUDA events around the call alone; of each of 9 calls the largest
time of all ranks, and the median of these. Every wait is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from gpu_timing import wait

from megamoe.comm.collectives import Collectives

CALLS, CHILLED_CALLS = 20, 9
_LIMIT_S = 30.0
_BIG = 8_000_000_000


def nccl_group() -> dist.ProcessGroup:
    """Return a new group of all ranks over NCCL. Collective; every rank needs a GPU of its own."""
    return dist.new_group(backend="nccl", timeout=timedelta(seconds=_LIMIT_S))


def back_to_back(call: Callable[[], object], collectives: Collectives) -> float:
    """Return microseconds of a call among many, the largest of all ranks."""
    for _ in range(3):
        call()
    wait(_LIMIT_S)
    collectives.gather_objects(None, phase="before the timing")
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(CALLS):
        call()
    last.record()
    wait(_LIMIT_S)
    times = collectives.gather_objects(1e3 * first.elapsed_time(last) / CALLS, phase="after the timing")
    return float(max(times))


def chilled(call: Callable[[], object], collectives: Collectives, nccl: dist.ProcessGroup) -> float:
    """Return microseconds of a call with cold caches, the median over calls of the largest of all ranks."""
    big = torch.empty(_BIG, dtype=torch.uint8, device="cuda")
    word = torch.zeros(1, device="cuda")
    for _ in range(2):
        call()
        dist.all_reduce(word, group=nccl)
    wait(_LIMIT_S)
    time.sleep(0.3)
    times = []
    for _ in range(CHILLED_CALLS):
        big.zero_()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # the host gets ahead, so that only the device is timed
        dist.all_reduce(word, group=nccl)
        first.record()
        call()
        last.record()
        wait(_LIMIT_S)
        times.append(1e3 * first.elapsed_time(last))
    every = collectives.gather_objects(times, phase="after the timing")
    return float(median(max(column) for column in zip(*every, strict=True)))
