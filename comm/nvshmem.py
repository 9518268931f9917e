"""Symmetric memory of GPUs of one host through NVSHMEM (the package nvshmem4py).

NVSHMEM runs once per process, over the ranks of the first group that asks for it. Its allocations are collective over
all of them, so later groups must hold the same ranks, in any order. NVLink multicast is switched off before it starts.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.comm.base import SymmetricMemory
from megamoe.comm.collectives import Collectives
from megamoe.comm.topology import Place, check_peer_access
from megamoe.errors import BackendUnavailable, MegaMoeError

__all__ = ["NvshmemMemory", "finalize"]

_PHASE = "NVSHMEM"
_NO_MULTICAST = "NVSHMEM_DISABLE_NVLS"
_UID_BYTES = 128  # sizeof(nvshmemx_uniqueid_v1_t), NVSHMEM 3: a 32-bit version and 124 opaque bytes
_RUNNING = 2  # the least nvshmemx_init_status() of a process in which NVSHMEM runs
_ALIGNMENT = 64
# how long a process that ends waits for its peers, seconds
_FAREWELL_S = 10.0


class NvshmemMemory(SymmetricMemory):
    """Memory of the ranks' GPUs from NVSHMEM's heap. Construction and `close` are collective.

    Args:
        nbytes: size of each rank's buffer; the same on every rank.
        collectives: exchanges over the group; their device is this rank's GPU.
        preflight: returns the place of every rank or refuses the group (tests).

    Raises:
        BackendUnavailable: the package is missing, or the group cannot share memory this way; the message says why.
        MegaMoeError: the memory cannot be had.
    """

    name = "nvshmem"

    def __init__(
        self,
        nbytes: int,
        collectives: Collectives,
        *,
        preflight: Callable[[str, Collectives], list[Place]] = check_peer_access,
    ) -> None:
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self.nbytes = nbytes
        self._collectives = collectives
        self._core = collectives.run_together(_load, phase=_PHASE)
        preflight(self.name, collectives)
        with _current(collectives.device):
            _start(self._core, collectives)
            pes = _pes(self._core, collectives)
            # everybody is known to be here: NVSHMEM's own waits have no bound
            tensor = collectives.run_together(self._allocate, phase=_PHASE)
            try:
                self._pointers = collectives.run_together(lambda: self._map(tensor, pes), phase=_PHASE)
            except BackendUnavailable:
                # every rank has heard of it and frees as well
                self._core.free_tensor(tensor)
                raise
        counts = collectives.gather_objects(_Runtime.allocations, phase=_PHASE)
        _Runtime.allocations = self._serial = max(counts) + 1
        self.tensor = tensor

    def _allocate(self) -> Tensor:
        try:
            tensor: Tensor = self._core.tensor((self.nbytes,), dtype=torch.uint8)
        except Exception as error:  # nvshmem4py's own error types have no common base
            raise MegaMoeError(
                f"NVSHMEM's heap has no {-(-self.nbytes >> 20)} MiB ({_line(error)}); set NVSHMEM_SYMMETRIC_SIZE to "
                "more, in bytes per rank, or lower parallel.max_tokens_per_rank"
            ) from None
        tensor.zero_()
        # the zeros must be there before a peer has the address
        _synchronize(tensor.device)
        return tensor

    def _map(self, tensor: Tensor, pes: list[int]) -> list[int]:
        pointers = []
        for rank, pe in enumerate(pes):
            if rank == self.rank:
                pointers.append(tensor.data_ptr())
                continue
            try:
                pointers.append(int(self._core.get_peer_tensor(tensor, pe).data_ptr()))
            except Exception as error:
                raise BackendUnavailable(
                    f"parallel.comm: NVSHMEM has no address for the memory of {self._collectives.group.describe(rank)} "
                    f"({_line(error)}); the kernels need peer access, take a group whose GPUs share NVLink"
                ) from None
        assert all(pointer % _ALIGNMENT == 0 for pointer in pointers), "NVSHMEM's allocations are aligned"
        return pointers

    @property
    def peer_pointers(self) -> list[int]:
        return list(self._pointers)

    def barrier(self, timeout_s: float) -> None:
        self._collectives.barrier(timeout_s)

    def close(self) -> None:
        """Give the memory back. Collective; idempotent. Waits for the work of this rank's GPU.

        NVSHMEM frees on all ranks together. Where a rank does not come in time the memory stays taken, with a warning.
        """
        tensor, self.tensor = self.tensor, None
        if tensor is None:
            return
        try:
            serials = self._collectives.gather_objects(self._serial, phase="close of NVSHMEM memory")
            if len(set(serials)) > 1:
                raise MegaMoeError(f"the ranks close different memory (serials {serials})")
        except (RuntimeError, ValueError) as error:  # torch raises both once a group is destroyed
            warnings.warn(
                f"nvshmem: {self.nbytes} bytes stay taken until the process ends: {error}", RuntimeWarning, stacklevel=2
            )
            return
        with _current(self._collectives.device):
            _synchronize(tensor.device)
            self._core.free_tensor(tensor)


class _Runtime:
    """What this process knows of the NVSHMEM it started."""

    job = ""  # the unique id of the start, so that ranks see whether they belong together; "" when others started it
    ended = False
    allocations = 0  # so far


def finalize(collectives: Collectives, timeout_s: float | None = None) -> None:
    """End NVSHMEM, for good: it starts once per process. Collective over the ranks among which it runs.

    Runs by itself at the end of a process whose process group still exists; call it before `destroy_process_group`.
    It does nothing where this module has not started NVSHMEM.

    Args:
        collectives: exchanges over the group that started it.
        timeout_s: seconds to wait for its ranks; None = that of the group.

    Raises:
        MegaMoeError: a rank did not come; NVSHMEM then ends with the process.
    """
    if not _Runtime.job or _Runtime.ended:
        return
    _Runtime.ended = True
    collectives.barrier(timeout_s)
    with _current(collectives.device):
        _synchronize(collectives.device)
        _load().finalize()


def _load() -> Any:
    """Return the module nvshmem.core with its library loaded."""
    try:
        core = importlib.import_module("nvshmem.core")
        core.get_version()
    except Exception as error:  # a package without its library raises whatever it likes
        extra = "nvshmem12" if (torch.version.cuda or "13").startswith("12.") else "nvshmem13"
        raise BackendUnavailable(
            f"parallel.comm: nvshmem needs the package nvshmem4py ({_line(error)}); pip install 'megamoe[{extra}]'"
        ) from None
    return core


def _line(error: Exception) -> str:
    """Return an error of foreign code on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _start(core: Any, collectives: Collectives) -> None:
    """Start NVSHMEM over this group unless it runs."""
    group = collectives.group
    running = collectives.gather_objects(int(core.init_status()) >= _RUNNING, phase=_PHASE)
    if all(running):
        if not _Runtime.job and os.environ.get(_NO_MULTICAST) != "1":
            raise BackendUnavailable(
                f"parallel.comm: NVSHMEM was started by other code without {_NO_MULTICAST}=1; set it for every rank, "
                "NVLink multicast is not used here"
            )
        return
    if any(running):
        a, b = running.index(True), running.index(False)
        raise BackendUnavailable(
            f"parallel.comm: NVSHMEM runs on {group.describe(a)} and not on {group.describe(b)}; it starts once per "
            "process, over the ranks of the first group, so every group must hold the same ranks; or use symm_mem"
        )
    ended = collectives.gather_objects(_Runtime.ended, phase=_PHASE)
    if any(ended):
        raise BackendUnavailable(
            f"parallel.comm: NVSHMEM has ended on {group.describe(ended.index(True))} and starts once per process"
        )
    os.environ[_NO_MULTICAST] = "1"

    def identify() -> tuple[Any, str]:
        uid = core.get_unique_id(empty=collectives.rank != 0)
        return _device(collectives.device), ctypes.string_at(uid.ptr, _UID_BYTES).hex() if collectives.rank == 0 else ""

    device, own = collectives.run_together(identify, phase=_PHASE)
    job = collectives.gather_objects(own, phase=_PHASE)[0]

    def start() -> None:
        uid = core.get_unique_id(empty=True)
        ctypes.memmove(uid.ptr, bytes.fromhex(job), _UID_BYTES)
        core.init(
            device=device, uid=uid, rank=collectives.rank, nranks=collectives.world_size, initializer_method="uid"
        )

    collectives.run_together(start, phase=_PHASE)
    _Runtime.job = job
    atexit.register(_end_with_process, collectives)


def _end_with_process(collectives: Collectives) -> None:
    if dist.is_initialized():
        # a rank that has died does not come; the others end without NVSHMEM's leave
        with suppress(RuntimeError, ValueError):
            finalize(collectives, _FAREWELL_S)


def _pes(core: Any, collectives: Collectives) -> list[int]:
    """Return NVSHMEM's number of each rank of the group, which must hold all of its ranks."""
    own = [int(core.my_pe()), int(core.n_pes()), _Runtime.job]
    reports = collectives.gather_objects(own, phase=_PHASE)
    pes = [report[0] for report in reports]
    if sorted(pes) != list(range(reports[0][1])) or any(report[1:] != reports[0][1:] for report in reports):
        raise BackendUnavailable(
            f"parallel.comm: nvshmem allocates on all ranks among which it was started, here {reports[0][1]}, and this "
            f"group holds {collectives.world_size}, numbers {pes}; use symm_mem for groups of other ranks"
        )
    return pes


def _device(device: torch.device) -> Any:
    """Return the device as nvshmem4py takes it."""
    if device.type != "cuda":
        return None
    from cuda.core import Device

    found = Device(torch.cuda.current_device())
    found.set_current()
    return found


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
