"""Source -> cubin through the cache, once per key and process."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from megamoe.kernels.jit.cache import CubinCache
from megamoe.kernels.jit.compiler import JitError, Usage, find_compiler
from megamoe.kernels.jit.settings import JitSettings
from megamoe.kernels.jit.source import KernelSource

__all__ = ["Artifact", "build"]


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel.

    Attributes:
        source: what was compiled.
        key: the cache key.
        cubin: machine code of `source.arch`.
        usage: registers, shared memory, stack and spills.
        was_compiled: True when this call compiled it, False when a cache held it.
        seconds: time this call took, seconds.
    """

    source: KernelSource
    key: str
    cubin: bytes
    usage: Usage
    was_compiled: bool
    seconds: float


_lock = threading.Lock()  # of the two dictionaries
_key_locks: dict[str, threading.Lock] = {}  # kernels are compiled side by side, each by one thread
_in_memory: dict[str, tuple[bytes, Usage]] = {}


def build(source: KernelSource, settings: JitSettings | None = None) -> Artifact:
    """Return the compiled kernel: from memory, from the cache, or compiled now and published.

    Args:
        source: the kernel.
        settings: how to compile; None reads the environment.

    Raises:
        JitError: no compiler, a refused source, or (with `settings.check`) spills or local memory.
    """
    settings = JitSettings.from_env() if settings is None else settings
    compiler = find_compiler(settings)
    key = source.key(compiler.flags(settings), compiler.identity)
    start = time.perf_counter()
    with _lock:
        key_lock = _key_locks.setdefault(key, threading.Lock())
    with key_lock:
        found = _in_memory.get(key)
        was_compiled = False
        if found is None:
            found, was_compiled = _through_cache(source, settings, key)
            with _lock:
                _in_memory[key] = found
    artifact = Artifact(source, key, *found, was_compiled, time.perf_counter() - start)
    if settings.debug and was_compiled:
        print(f"megamoe jit: compiled {source.name} ({key}) in {artifact.seconds:.2f} s", file=sys.stderr)
    if settings.check and not artifact.usage.is_clean:
        raise JitError(f"kernel '{source.name}' spills or uses local memory: {artifact.usage.to_dict()}")
    if was_compiled and (settings.dump_ptx or settings.dump_sass):
        _dump(artifact, settings)
    return artifact


def _through_cache(source: KernelSource, settings: JitSettings, key: str) -> tuple[tuple[bytes, Usage], bool]:
    cache = CubinCache(settings.cache_dirs, settings.lock_timeout_s)
    found = cache.get(source.name, key)
    if found is not None:
        return found, False
    with cache.lock(source.name, key):
        found = cache.get(source.name, key)  # another process may have been faster
        if found is not None:
            return found, False
        found = find_compiler(settings).compile(source, settings)
        if cache.put(source.name, key, *found) is None and settings.debug:
            print(f"megamoe jit: no cache folder can be written; {source.name} stays in memory", file=sys.stderr)
    return found, True


def _dump(artifact: Artifact, settings: JitSettings) -> None:
    """Write PTX and SASS beside the cache; say where."""
    name = f"{artifact.source.name}-{artifact.key}"
    for folder in (*settings.cache_dirs, Path(tempfile.gettempdir())):
        try:
            (folder / "dump").mkdir(parents=True, exist_ok=True)
            target = folder / "dump" / name
            target.with_suffix(".cu").write_text(artifact.source.code)
            break
        except OSError:
            continue
    else:
        raise JitError("no folder can be written for the dump; set MEGAMOE_CACHE_DIR")
    if settings.dump_ptx:
        target.with_suffix(".ptx").write_text(find_compiler(settings).ptx(artifact.source, settings))
        print(f"megamoe jit: wrote {target.with_suffix('.ptx')}", file=sys.stderr)
    if settings.dump_sass:
        tool = shutil.which("cuobjdump")
        if tool is None:
            raise JitError("MEGAMOE_JIT_DUMP_SASS needs cuobjdump on PATH; it comes with the CUDA toolkit")
        cubin = target.with_suffix(".cubin")
        cubin.write_bytes(artifact.cubin)
        done = subprocess.run([tool, "--dump-sass", str(cubin)], capture_output=True, text=True, timeout=300)
        target.with_suffix(".sass").write_text(done.stdout)
        print(f"megamoe jit: wrote {target.with_suffix('.sass')}", file=sys.stderr)
