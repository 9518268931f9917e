"""Kernel source text, the own headers it pulls in, and the key under which its cubin is cached."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = ["KernelSource", "include_root", "own_headers"]

FORMAT_VERSION = 1
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_OWN = re.compile(r'^"(megamoe/[\w./-]+)"(?:[ \t]*//.*)?$')


def include_root() -> Path:
    """Return the folder to pass as include path; own headers are written `#include "megamoe/..."`."""
    # Through the link inside the package when run from the checkout; the compiler gets the real place.
    return (Path(__file__).resolve().parent.parent / "include").resolve()


@lru_cache(maxsize=512)
def _header_text(path: str, stamp: tuple[int, int]) -> str:
    return Path(path).read_text()


def _read(root: Path, name: str) -> str:
    path = root / name
    try:
        status = path.stat()
    except OSError:
        raise ValueError(f"own header '{name}' does not exist under {root}") from None
    return _header_text(str(path), (status.st_mtime_ns, status.st_size))


def own_headers(code: str, root: Path | None = None) -> dict[str, str]:
    """Return every own header that `code` includes, directly or not, as {name: text} in the order of discovery.

    Raises:
        ValueError: an include that mentions megamoe is not written `#include "megamoe/..."`, or a header is missing.
    """
    root = include_root() if root is None else root
    found: dict[str, str] = {}
    pending = [("kernel source", code)]
    while pending:
        where, text = pending.pop()
        for target in _INCLUDE.findall(text):
            match = _OWN.match(target)
            if match is None:
                if "megamoe" in target or not target.startswith(("<", '"')):
                    raise ValueError(f'{where}: own headers are included as #include "megamoe/...", got {target}')
                continue
            name = match.group(1)
            if name not in found:
                found[name] = _read(root, name)
                pending.append((name, found[name]))
    return found


@dataclass(frozen=True)
class KernelSource:
    """One kernel to compile.

    Attributes:
        name: a readable name; part of file names and messages, not of the key.
        code: the source text: includes and one `extern "C"` instantiation.
        entry: the name of the `extern "C" __global__` function.
        arch: the real architecture, such as `sm_90a`.
        dynamic_shared_bytes: shared memory that a launch needs, bytes; reported beside the static one.
    """

    name: str
    code: str
    entry: str
    arch: str = "sm_90a"
    dynamic_shared_bytes: int = 0

    def key(self, flags: tuple[str, ...], compiler: str) -> str:
        """Return the cache key: contents, flags and compiler; no path and no time enters it.

        Args:
            flags: compiler flags that change the cubin.
            compiler: name and version of the compiler.
        """
        digest = hashlib.sha256()
        headers = own_headers(self.code)
        parts = [str(FORMAT_VERSION), self.code, self.entry, self.arch, compiler, *flags]
        for name in sorted(headers):
            parts += [name, headers[name]]
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.hexdigest()[:40]
