"""Symmetric memory within one process: one rank, or several ranks that are threads; of the host or of one GPU."""

from __future__ import annotations

import ctypes
import mmap
import threading

import torch
from torch import Tensor

from megamoe.comm.base import SymmetricMemory
from megamoe.errors import MegaMoETimeout

__all__ = ["LocalMemory"]

_CPU = torch.device("cpu")


class LocalMemory(SymmetricMemory):
    """See `allocate` and `allocate_threads`."""

    name = "local"

    def __init__(
        self, rank: int, buffers: list[mmap.mmap] | list[Tensor], barrier: threading.Barrier, nbytes: int
    ) -> None:
        self.rank = rank
        self.world_size = len(buffers)
        self.nbytes = nbytes
        self._buffers = buffers
        self._pointers = [address_of(buffer) for buffer in buffers]
        self._barrier = barrier
        own = buffers[rank]
        self.tensor = own if isinstance(own, Tensor) else None

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device = _CPU) -> LocalMemory:
        """Return zeroed memory of one rank.

        Args:
            nbytes: its size.
            device: the CPU or a GPU.
        """
        return cls.allocate_threads(nbytes, 1, device)[0]

    @classmethod
    def allocate_threads(cls, nbytes: int, world_size: int, device: torch.device = _CPU) -> list[LocalMemory]:
        """Return the memory of `world_size` ranks that are threads of this process, one object for each."""
        barrier = threading.Barrier(world_size)
        if device.type == "cpu":
            maps = [mmap.mmap(-1, max(nbytes, 1)) for _ in range(world_size)]
            return [cls(rank, maps, barrier, nbytes) for rank in range(world_size)]
        tensors = [torch.zeros(max(nbytes, 1), dtype=torch.uint8, device=device) for _ in range(world_size)]
        # kernels on other streams must find the zeros
        torch.cuda.synchronize(device)
        return [cls(rank, tensors, barrier, nbytes) for rank in range(world_size)]

    @property
    def peer_pointers(self) -> list[int]:
        return list(self._pointers)

    def barrier(self, timeout_s: float) -> None:
        try:
            self._barrier.wait(timeout_s)
        except threading.BrokenBarrierError:
            raise MegaMoETimeout(
                f"barrier: rank {self.rank} waited {timeout_s:g} s for the other threads of its group"
            ) from None

    def close(self) -> None:
        """See the base class. On a GPU it waits for the GPU's work first."""
        if self.tensor is not None:
            # torch hands freed memory to the next tensor at once, on whatever stream
            torch.cuda.synchronize(self.tensor.device)
        # the memory goes with its last owner: other threads may still use it
        self.tensor = None
        self._buffers = []


def address_of(buffer: mmap.mmap | Tensor) -> int:
    """Return the address of a mapping or of a tensor's first element."""
    if isinstance(buffer, Tensor):
        return buffer.data_ptr()
    view = ctypes.c_char.from_buffer(buffer)
    address = ctypes.addressof(view)
    del view  # an exported buffer would keep the mapping from being closed
    return address
