"""Cubins on disk, shared by processes, users and machines.

One file per key: a line of JSON (key, bytes and SHA-256 of the payload, resource usage), then the cubin. A file is
published by rename and verified when it is read, so that a reader sees a whole entry or none. Writers of one key take
turns on a lock file; the kernel drops the lock of a process that dies. Folders are searched in order, and a miss is
written to the first folder that takes it; if none does, the process keeps the cubin in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megamoe.kernels.jit.compiler import Usage

__all__ = ["CubinCache"]

_POLL_S = 0.02


class CubinCache:
    """The search path of cache folders.

    Args:
        folders: searched in this order; a later one may be read-only or missing.
        lock_timeout_s: how long to wait for another process that compiles the same kernel, seconds; after that the
            kernel is compiled here as well, with a warning that names the lock.
    """

    def __init__(self, folders: tuple[Path, ...], lock_timeout_s: float = 600.0) -> None:
        self.folders = folders
        self.lock_timeout_s = lock_timeout_s

    @staticmethod
    def _file(folder: Path, name: str, key: str) -> Path:
        return folder / key[:2] / f"{name}-{key}.cubin"

    @staticmethod
    def _read(path: Path, key: str) -> tuple[bytes, Usage] | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        head, newline, payload = data.partition(b"\n")
        try:
            entry = json.loads(head)
            whole = (
                newline == b"\n"
                and entry["key"] == key
                and entry["bytes"] == len(payload)
                and entry["sha256"] == hashlib.sha256(payload).hexdigest()
            )
            return (payload, Usage(**entry["usage"])) if whole else None
        except (ValueError, KeyError, TypeError):
            return None

    def get(self, name: str, key: str) -> tuple[bytes, Usage] | None:
        """Return (cubin, usage) from the first folder with a whole entry, or None; damaged entries count as missing."""
        for folder in self.folders:
            found = self._read(self._file(folder, name, key), key)
            if found is not None:
                return found
        return None

    def path(self, name: str, key: str) -> Path | None:
        """Return the file of the first whole entry, or None."""
        files = (self._file(folder, name, key) for folder in self.folders)
        return next((path for path in files if self._read(path, key) is not None), None)

    def put(self, name: str, key: str, cubin: bytes, usage: Usage) -> Path | None:
        """Publish an entry in the first folder that can be written; return its path, or None if there is none."""
        entry = {
            "key": key,
            "bytes": len(cubin),
            "sha256": hashlib.sha256(cubin).hexdigest(),
            "usage": usage.to_dict(),
        }
        data = json.dumps(entry).encode() + b"\n" + cubin
        for folder in self.folders:
            path = self._file(folder, name, key)
            temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_bytes(data)
                os.replace(temporary, path)
                return path
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                # A file system that refuses to replace may already hold the entry of another process.
                if self._read(path, key) is not None:
                    return path
        return None

    def can_write(self) -> bool:
        """Return whether `put` finds a folder that takes an entry now."""
        for folder in self.folders:
            probe = folder / f".probe.{os.getpid()}.{time.monotonic_ns()}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                probe.write_bytes(b"")
                probe.unlink()
                return True
            except OSError:
                continue
        return False

    @contextlib.contextmanager
    def lock(self, name: str, key: str) -> Iterator[bool]:
        """Hold the lock of one key; yields False when no folder offers one or the wait ran out."""
        handle = None
        path = None
        for folder in self.folders:
            path = folder / "locks" / f"{name}-{key}.lock"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                handle = open(path, "a")  # noqa: SIM115 - closed below
                break
            except OSError:
                continue
        if handle is None:
            yield False
            return
        try:
            yield self._acquire(handle.fileno(), path)
        finally:
            handle.close()  # closing drops the lock

    def _acquire(self, descriptor: int, path: Path | None) -> bool:
        deadline = time.monotonic() + self.lock_timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    print(
                        f"megamoe: another process has held {path} for {self.lock_timeout_s:.0f} s; compiling here too",
                        file=sys.stderr,
                    )
                    return False
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks
                return False
