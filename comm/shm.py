"""Symmetric memory of processes on one host: POSIX shared memory.

Each rank creates one object under /dev/shm, tells its peers the name, maps theirs, and unlinks its own once all have
mapped it; from then on the kernel frees it with the last process, however that ends. A process that dies in between
leaves a name behind that carries its pid: the next run removes it.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from pathlib import Path

from megamoe.comm.base import SymmetricMemory
from megamoe.comm.collectives import Collectives
from megamoe.comm.local import address_of
from megamoe.comm.topology import check_peer_access
from megamoe.errors import MegaMoeError

__all__ = ["ShmMemory"]

_FOLDER = Path("/dev/shm")
_PREFIX = "megamoe-"


class ShmMemory(SymmetricMemory):
    """Shared memory of a group whose ranks are processes of one host. Construction is collective.

    Args:
        nbytes: size of each rank's buffer; the same on every rank.
        collectives: exchanges over the group.
        folder: where the objects are created.

    Raises:
        MegaMoeError: the memory cannot be had; every rank raises, naming the rank and the reason.
        BackendUnavailable: the ranks are on different hosts.
    """

    name = "shm"

    def __init__(self, nbytes: int, collectives: Collectives, folder: Path = _FOLDER) -> None:
        self.rank = collectives.rank
        self.world_size = collectives.world_size
        self.nbytes = nbytes
        self._collectives = collectives
        self._buffers: list[mmap.mmap] = []
        own: list[tuple[Path, int]] = []  # kept here: a peer's failure must not hide what this rank has made
        try:
            check_peer_access(self.name, collectives)
            collectives.run_together(lambda: own.append(_create(folder, nbytes)), phase="shared memory")
            path, fd = own[0]
            names = collectives.gather_objects(path.name, phase="shared memory")
            self._buffers = collectives.run_together(
                lambda: [_map(folder / name, fd if r == self.rank else None, nbytes) for r, name in enumerate(names)],
                phase="shared memory",
            )
        finally:
            for path, fd in own:
                os.close(fd)
                path.unlink(missing_ok=True)
        self._pointers = [address_of(buffer) for buffer in self._buffers]

    @property
    def peer_pointers(self) -> list[int]:
        return list(self._pointers)

    def barrier(self, timeout_s: float) -> None:
        self._collectives.barrier(timeout_s)

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []


def _create(folder: Path, nbytes: int) -> tuple[Path, int]:
    """Return the path and the descriptor of a new object whose every page is reserved."""
    _sweep(folder)
    path = folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # without this a full folder shows itself as SIGBUS at the first write
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        path.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        free = os.statvfs(folder)
        raise MegaMoeError(
            f"shared memory: {folder} has {free.f_bavail * free.f_frsize >> 20} MiB free and the workspace needs "
            f"{-(-nbytes >> 20)} MiB per rank; enlarge it (docker run --shm-size=...) or lower "
            "parallel.max_tokens_per_rank"
        ) from None
    return path, fd


def _map(path: Path, fd: int | None, nbytes: int) -> mmap.mmap:
    own = fd is not None
    opened = fd if fd is not None else os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(opened, nbytes)
    finally:
        if not own:
            os.close(opened)


def _sweep(folder: Path) -> None:
    """Remove objects of processes that no longer live."""
    for path in folder.glob(f"{_PREFIX}*"):
        pid = path.name[len(_PREFIX) :].split("-")[0]
        try:
            if pid.isdigit() and path.stat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
                path.unlink(missing_ok=True)
        except OSError:
            continue
