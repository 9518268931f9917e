"""Launching a kernel whose one parameter is a struct: what is loaded once is found again by instance and grid."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from megamoe.kernels.jit import KernelSource, load
from megamoe.kernels.jit.driver import PreparedLaunch

__all__ = ["launch_packed"]

_MAX_KNOWN = 1024
_known = threading.local()  # a prepared launch is not for several threads
# a build of torch without CUDA lacks it, and needs it not
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def launch_packed(
    instance: Hashable,
    source: Callable[[], KernelSource],
    device: int,
    grid: int,
    threads: int,
    layout: struct.Struct,
    values: tuple[float, ...],
) -> None:
    """Launch on the current stream of a device.

    Args:
        instance: what tells the kernel from all others.
        source: makes it; called the first time.
        device: CUDA device index.
        grid, threads: blocks, and threads of each.
        layout, values: the struct and its fields.

    Raises:
        JitError: the kernel can't be compiled or loaded, or the driver refuses the launch.
    """
    known: dict[tuple[Hashable, int, int], PreparedLaunch] = _known.__dict__.setdefault("launches", {})
    launch = known.get((instance, device, grid))
    if launch is None:
        if len(known) >= _MAX_KNOWN:
            known.clear()
        with torch.cuda.device(device):
            kernel = load(source(), device)
        shared_bytes = kernel.source.dynamic_shared_bytes
        launch = PreparedLaunch(kernel.source.name, kernel.address, grid, threads, shared_bytes, layout.size)
        known[instance, device, grid] = launch
    layout.pack_into(launch.bytes, 0, *values)
    if torch.cuda.current_device() == device:
        launch(_current_stream(device))
    else:
        with torch.cuda.device(device):
            launch(_current_stream(device))
