"""Symmetric memory of GPUs of one host through torch.distributed._symmetric_memory.

Each rank allocates, the ranks exchange handles, and every rank maps the memory of all. NVLink multicast, which torch
would bind to each allocation, is switched off for the duration of the exchange: nothing here uses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megamoe.comm.base import SymmetricMemory
from megamoe.comm.collectives import Collectives
from megamoe.comm.topology import Place, check_peer_access, shared_gpus
from megamoe.errors import BackendUnavailable, MegaMoeError

__all__ = ["TorchApi", "TorchSymmetricMemory"]

# variables that torch reads at each exchange of handles
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_PHASE = "symmetric memory"
_ALIGNMENT = 64


class TorchApi:
    """What this backend asks of torch. torch 2.11 and 2.13 have these calls in one form."""

    def backend(self, device: torch.device) -> str | None:
        """Return the name of torch's own backend for symmetric memory of a device."""
        import torch.distributed._symmetric_memory as symm_mem

        found: str | None = symm_mem.get_backend(device)
        return found

    def has_multicast(self, device: torch.device) -> bool:
        """Return whether torch would bind multicast to an allocation now."""
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory

        return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index))

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return `[nbytes]` uint8 that can be shared, an allocation of its own."""
        from torch._C._distributed_c10d import _SymmetricMemory

        # not symm_mem.empty: it takes from a pool, which never gives memory back
        return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)

    def rendezvous(self, tensor: Tensor, group: Any) -> Any:
        """Exchange handles over a process group; return an object with `buffer_ptrs` and `multicast_ptr`."""
        import torch.distributed._symmetric_memory as symm_mem

        return symm_mem.rendezvous(tensor, group)

    def synchronize(self, device: torch.device) -> None:
        """Wait for all work on a device."""
        torch.cuda.synchronize(device)


class TorchSymmetricMemory(SymmetricMemory):
    """Memory of the ranks' GPUs, mapped by all of them. Construction is collective.

    Args:
        nbytes: size of each rank's buffer; the same on every rank.
        collectives: exchanges over the group; their device is this rank's GPU.
        api: the calls of torch (tests).
        preflight: returns the place of every rank or refuses the group (tests).

    Raises:
        BackendUnavailable: the group cannot share memory this way; the message says why, the same on every rank.
        MegaMoeError: the memory cannot be had.
    """

    name = "symm_mem"

    def __init__(
        self,
        nbytes: int,
        collectives: Collectives,
        *,
        api: TorchApi | None = None,
        preflight: Callable[[str, Collectives], list[Place]] = check_peer_access,
    ) -> None:
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self.nbytes = nbytes
        self._collectives = collectives
        self._api = api or TorchApi()
        self._handle: Any = None
        device = collectives.device
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        places = preflight(self.name, collectives)
        with _environment(_NO_MULTICAST, "1"):
            tensor = collectives.run_together(lambda: self._allocate(device, places), phase=_PHASE)
            # everybody is known to be here, so the exchange does not wait for a rank that never comes
            self._handle = collectives.run_together(lambda: self._exchange(tensor), phase=_PHASE)
        self.tensor = tensor
        self._pointers = [int(pointer) for pointer in self._handle.buffer_ptrs]
        assert all(pointer % _ALIGNMENT == 0 for pointer in self._pointers), "torch's allocations are aligned"

    def _allocate(self, device: torch.device, places: list[Place]) -> Tensor:
        backend = self._api.backend(device)
        if backend != "CUDA":
            raise BackendUnavailable(
                f"parallel.comm: symm_mem needs torch's symmetric memory backend CUDA, and this process has {backend}; "
                "unset TORCH_SYMMMEM and do not call set_backend"
            )
        if self._api.has_multicast(device):
            raise BackendUnavailable(
                f"parallel.comm: symm_mem does not use NVLink multicast, and torch {torch.__version__} binds it in "
                f"spite of {_NO_MULTICAST}=1; use parallel.comm: nvshmem"
            )
        shared = shared_gpus(places)
        if shared and os.environ.get(_SHARED_GPU) != "1":
            a, b = (self._collectives.group.describe(rank) for rank in shared[0])
            raise BackendUnavailable(
                f"parallel.comm: symm_mem found {a} and {b} both on cuda:{places[shared[0][0]].index}; give each rank "
                f"a GPU of its own with an index of its own, or, to share one on purpose, set {_SHARED_GPU}=1 for "
                "every rank and use a gloo group"
            )
        tensor = self._api.empty(self.nbytes, device)
        tensor.zero_()
        # the zeros must be there before a peer can map the memory
        self._api.synchronize(device)
        return tensor

    def _exchange(self, tensor: Tensor) -> Any:
        handle = self._api.rendezvous(tensor, self._collectives.group.process_group)
        if handle.multicast_ptr:
            raise MegaMoeError("symmetric memory: torch bound NVLink multicast to the allocation, which is not wanted")
        return handle

    @property
    def peer_pointers(self) -> list[int]:
        return list(self._pointers)

    def barrier(self, timeout_s: float) -> None:
        self._collectives.barrier(timeout_s)

    def close(self) -> None:
        """See the base class. Waits for the work of this rank's GPU."""
        # torch unmaps the peers' memory with the handle and frees its own with the last owner
        self._handle = None
        self.tensor = None


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for a while; what the rest of the process asked of torch comes back afterwards."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
