"""Symmetric memory within one process: one rank, or several ranks that are threads."""

from __future__ import annotations

import ctypes
import mmap
import threading

from megamoe.comm.base import SymmetricMemory
from megamoe.errors import MegaMoETimeout

__all__ = ["LocalMemory"]


class LocalMemory(SymmetricMemory):
    """See `allocate` and `allocate_threads`."""

    name = "local"

    def __init__(self, rank: int, buffers: list[mmap.mmap], barrier: threading.Barrier, nbytes: int) -> None:
        self.rank = rank
        self.world_size = len(buffers)
        self.nbytes = nbytes
        self._buffers = buffers
        self._pointers = [address_of(buffer) for buffer in buffers]
        self._barrier = barrier

    @classmethod
    def allocate(cls, nbytes: int) -> LocalMemory:
        """Return zeroed memory of one rank."""
        return cls.allocate_threads(nbytes, 1)[0]

    @classmethod
    def allocate_threads(cls, nbytes: int, world_size: int) -> list[LocalMemory]:
        """Return the memory of `world_size` ranks that are threads of this process, one object for each."""
        buffers = [mmap.mmap(-1, max(nbytes, 1)) for _ in range(world_size)]
        barrier = threading.Barrier(world_size)
        return [cls(rank, buffers, barrier, nbytes) for rank in range(world_size)]

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
        # the mapping goes with its last owner: other threads may still use it
        self._buffers = []


def address_of(buffer: mmap.mmap) -> int:
    """Return the address of a mapping."""
    view = ctypes.c_char.from_buffer(buffer)
    address = ctypes.addressof(view)
    del view  # an exported buffer would keep the mapping from being closed
    return address
