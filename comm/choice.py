"""Which symmetric memory a group gets: `parallel.comm` and the device decide."""

from __future__ import annotations

import torch

from megamoe.comm.base import SymmetricMemory
from megamoe.comm.collectives import Collectives
from megamoe.errors import ConfigError, MegaMoeError

__all__ = ["allocate", "choose"]

# by device type: the backend of several ranks that "auto" takes, and those that may be asked for
_DEFAULT = {"cpu": "shm", "cuda": "symm_mem"}
_CHOICES = {"cpu": ("auto", "local", "shm"), "cuda": ("auto", "local", "symm_mem", "nvshmem")}
_WHERE = {"cpu": "a CPU", "cuda": "a GPU"}


def choose(comm: str, device: torch.device, world_size: int) -> str:
    """Return the name of the backend that serves a group.

    One rank needs no peer: it gets `local` memory whatever was asked for.

    Args:
        comm: as `parallel.comm` spells it.
        device: where the memory is to be.
        world_size: ranks of the group.

    Raises:
        ConfigError: the backend does not serve this device, or not so many ranks.
    """
    if device.type not in _CHOICES:
        raise ConfigError(f"parallel.comm: no symmetric memory on {device}; use a CPU or an NVIDIA GPU")
    choices = _CHOICES[device.type]
    if comm not in choices:
        raise ConfigError(f"parallel.comm: on {_WHERE[device.type]} choose {', '.join(choices)}, got {comm}")
    if world_size == 1:
        return "local"
    if comm == "local":
        raise ConfigError(
            f"parallel.comm: local serves one rank, this group has {world_size}; use {_DEFAULT[device.type]}"
        )
    return _DEFAULT[device.type] if comm == "auto" else comm


def allocate(comm: str, nbytes: int, collectives: Collectives) -> SymmetricMemory:
    """Return zeroed symmetric memory on the device of `collectives`. Collective.

    Args:
        comm: as `parallel.comm` spells it.
        nbytes: size of each rank's buffer; the same on every rank.
        collectives: exchanges over the group.

    Raises:
        ConfigError: as `choose` says.
        BackendUnavailable: the ranks cannot address each other's memory; the message names the pairs or hosts.
        MegaMoeError: the memory cannot be had, or the ranks ask for different sizes.
    """
    name = choose(comm, collectives.device, collectives.world_size)
    sizes = collectives.gather_objects(nbytes, phase="symmetric memory")
    for rank, size in enumerate(sizes):
        if size != sizes[0]:
            describe = collectives.group.describe
            raise MegaMoeError(
                f"symmetric memory: every rank must ask for the same size, got {sizes[0]} bytes on {describe(0)} and "
                f"{size} on {describe(rank)}"
            )
    if name == "local":
        from megamoe.comm.local import LocalMemory

        return LocalMemory.allocate(nbytes, collectives.device)
    if name == "shm":
        from megamoe.comm.shm import ShmMemory

        return ShmMemory(nbytes, collectives)
    if name == "symm_mem":
        from megamoe.comm.symm_mem import TorchSymmetricMemory

        return TorchSymmetricMemory(nbytes, collectives)
    from megamoe.comm.nvshmem import NvshmemMemory

    return NvshmemMemory(nbytes, collectives)
