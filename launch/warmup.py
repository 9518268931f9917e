"""`megamoe warmup`: compile every kernel of a configuration into the cache, on all cores; needs no GPU."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megamoe.config import MoEConfig
from megamoe.kernels.jit import JitError, JitSettings, KernelSource, Usage, build
from megamoe.kernels.jit.cache import CubinCache
from megamoe.kernels.jit.compiler import find_compiler
from megamoe.launch.report import console, summary_table

__all__ = ["Compiled", "compile_all", "run_warmup"]

_HEADINGS = ("kernel", "registers", "shared memory", "spills", "local memory", "compiled")


@dataclass(frozen=True)
class Compiled:
    """A kernel in the cache.

    Attributes:
        source: what was compiled.
        usage: what it takes.
        seconds: that compiling took; None if the cache held it.
        folder: the cache folder, or None if none could be written.
    """

    source: KernelSource
    usage: Usage
    seconds: float | None
    folder: Path | None


def _compile(source: KernelSource, settings: JitSettings) -> Compiled:
    """Compile one kernel; runs in a process of its own, which imports no torch."""
    artifact = build(source, settings)
    path = CubinCache(settings.cache_dirs).path(source.name, artifact.key)
    folder = None if path is None else path.parent.parent
    return Compiled(source, artifact.usage, artifact.seconds if artifact.was_compiled else None, folder)


def compile_all(sources: Sequence[KernelSource], settings: JitSettings) -> Iterator[Compiled]:
    """Compile kernels on all cores that this process may use; yield them as they are done.

    Raises:
        JitError: no compiler, or it refused a kernel, or a compiling process died.
    """
    find_compiler(settings)  # says what is missing before any process starts
    workers = min(len(os.sched_getaffinity(0)), len(sources))
    # a fork would copy the threads' locks of whatever this process has loaded
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_compile, source, settings) for source in sources]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise JitError(
                "a compiling process was killed, perhaps for want of memory; run the command again"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _row(kernel: Compiled) -> tuple[str, ...]:
    usage = kernel.usage
    return (
        kernel.source.name,
        str(usage.registers),
        f"{usage.static_shared_bytes + kernel.source.dynamic_shared_bytes} B",
        f"{usage.spill_store_bytes + usage.spill_load_bytes} B",
        f"{usage.stack_bytes} B",
        "cached" if kernel.seconds is None else f"{kernel.seconds:.1f} s",
    )


def run_warmup(config: str, overrides: Sequence[str], arch: str) -> int:
    """Compile the kernels of a configuration and print what each takes.

    Args:
        config: YAML file or preset.
        overrides: `section.key=value` assignments.
        arch: the real architecture.

    Returns:
        0; 1 if a kernel spills or uses local memory, or could not be kept.

    Raises:
        ConfigError: the configuration cannot work.
        JitError: as `compile_all`.
    """
    from megamoe.kernels.warmup import warmup_sources

    resolved = MoEConfig.from_yaml(config, overrides)
    sources = warmup_sources(resolved, arch)
    if not sources:
        print(f"{config}: needs no kernels of ours")
        return 0
    settings = replace(JitSettings.from_env(), check=False)  # the table says it of every kernel at once
    cache, compiler = CubinCache(settings.cache_dirs), find_compiler(settings)
    flags = compiler.flags(settings)
    if not cache.can_write() and any(
        cache.path(source.name, source.key(flags, compiler.identity)) is None for source in sources
    ):
        return _refuse_unwritable(settings)  # before minutes of work that nobody could keep
    start = time.perf_counter()
    done: dict[str, Compiled] = {}
    bar = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    name = TextColumn("{task.fields[name]}")
    with Progress(*bar, name, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(sources), name="")
        for kernel in compile_all(sources, settings):
            done[kernel.source.name] = kernel
            progress.update(task, advance=1, name=kernel.source.name)
    kernels = [done[source.name] for source in sources]
    seconds = time.perf_counter() - start
    title = f"{len(kernels)} kernels of {config} for {arch}, {compiler.identity}, {seconds:.1f} s"
    console().print(summary_table(title, _HEADINGS, [_row(kernel) for kernel in kernels]))
    unclean = [kernel.source.name for kernel in kernels if not kernel.usage.is_clean]
    if unclean:
        print(f"megamoe warmup: spills or local memory in {', '.join(unclean)}", file=sys.stderr)
    folders = {kernel.folder for kernel in kernels}
    if None in folders:
        return _refuse_unwritable(settings)
    print(f"cache: {', '.join(sorted(map(str, folders)))}")
    return int(bool(unclean))


def _refuse_unwritable(settings: JitSettings) -> int:
    tried = ":".join(map(str, settings.cache_dirs))
    print(f"megamoe warmup: no cache folder of {tried} can be written; set MEGAMOE_CACHE_DIR", file=sys.stderr)
    return 1
