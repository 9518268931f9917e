"""Symmetric memory: one buffer per rank, of one size, that every rank of a group can address.

A kernel takes plain addresses from here and knows nothing else of communication. Backends: `local` (one rank, or ranks
that are threads of one process; host or GPU), `shm` (host memory of processes of one host), `symm_mem` and `nvshmem`
(memory of GPUs that have peer access). `megamoe.comm.choice` picks one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

__all__ = ["SymmetricMemory"]


class SymmetricMemory(ABC):
    """A symmetric buffer of `nbytes` on each of `world_size` ranks. Construction and `barrier` are collective.

    Attributes:
        name: of the backend.
        rank, world_size: within the group.
        nbytes: size of each rank's buffer, bytes.
        tensor: on a GPU this rank's own buffer, `[nbytes]` uint8; None on the host, and once it is closed.
    """

    name: ClassVar[str]
    rank: int
    world_size: int
    nbytes: int
    tensor: Tensor | None = None

    @property
    @abstractmethod
    def peer_pointers(self) -> list[int]:
        """Address of every rank's buffer in this process, in rank order: fixed, 64-byte aligned, zeroed at first."""

    @property
    def pointer(self) -> int:
        """Address of this rank's own buffer."""
        return self.peer_pointers[self.rank]

    @abstractmethod
    def barrier(self, timeout_s: float) -> None:
        """Wait for every rank on the host. Work that runs on a GPU is not waited for.

        Raises:
            MegaMoETimeout: a rank did not come within `timeout_s` seconds; the message names it where that is known.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Idempotent. Peers that still use it keep theirs."""
