"""NVRTC (through `cuda.core`) or, on request, nvcc: source text -> cubin and what it uses."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megamoe.errors import MegaMoeError
from megamoe.kernels.jit.settings import JitSettings
from megamoe.kernels.jit.source import KernelSource, include_root

__all__ = ["Compiler", "JitError", "Usage", "cuda_core", "find_compiler"]


class JitError(MegaMoeError):
    """A kernel could not be compiled, loaded or launched."""


@dataclass(frozen=True)
class Usage:
    """What ptxas says of a kernel: registers per thread; bytes per thread or (shared) per block.

    `serialized` is 1 where ptxas waits for each asynchronous product (wgmma) before it issues the next: right, but
    slow.
    """

    registers: int
    static_shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    serialized: int = 0

    @property
    def is_clean(self) -> bool:
        """True without spills and without local memory."""
        return not (self.stack_bytes or self.spill_store_bytes or self.spill_load_bytes)

    def to_dict(self) -> dict[str, int]:
        """Return the fields by name."""
        return asdict(self)


_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def parse_usage(log: str, entry: str) -> Usage:
    """Read the verbose output of ptxas for one entry function.

    Raises:
        JitError: the log does not speak of the entry.
    """
    blocks = re.split(r"Compiling entry function ", log)
    for block in blocks[1:]:
        if not block.startswith(f"'{entry}'"):
            continue
        registers, shared, stack = _REGISTERS.search(block), _SHARED.search(block), _STACK.search(block)
        if registers is None or stack is None:
            break
        serialized = re.search(rf"wgmma\.mma_async instructions are serialized.*'{re.escape(entry)}'", log) is not None
        frame, stores, loads = (int(stack[i]) for i in (1, 2, 3))
        return Usage(int(registers[1]), int(shared[1]) if shared else 0, frame, stores, loads, int(serialized))
    raise JitError(f"the compiler's log names no resources for kernel '{entry}':\n{log[-2000:]}")


class Compiler:
    """Interface: `identity` enters the cache key, `flags` too, `compile` returns (cubin, usage)."""

    identity: str

    def flags(self, settings: JitSettings) -> tuple[str, ...]:
        """Return the flags that change the cubin."""
        flags = [f"-std=c++{settings.cpp_standard}"]
        return tuple(flags + (["-lineinfo"] if settings.lineinfo else []))

    def compile(self, source: KernelSource, settings: JitSettings) -> tuple[bytes, Usage]:
        """Compile one kernel.

        Raises:
            JitError: the compiler refused the source; the message holds its log.
        """
        raise NotImplementedError

    def ptx(self, source: KernelSource, settings: JitSettings) -> str:
        """Return the PTX text of a kernel."""
        raise NotImplementedError


class NvrtcCompiler(Compiler):
    """NVRTC as `cuda.core` finds it: in the pip packages of the extras, in a toolkit, or beside torch."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import nvrtc

            core = cuda_core()
            self._program, self._options = core.Program, core.ProgramOptions
        except (ImportError, AttributeError) as error:
            raise JitError(
                f"cuda.core is needed to compile kernels ({error}); install megamoe[cuda13] or megamoe[cuda12]"
            ) from None
        try:
            status, major, minor = nvrtc.nvrtcVersion()
        except Exception as error:
            raise JitError(f"NVRTC was not found ({error}); install megamoe[cuda13] or megamoe[cuda12]") from None
        if int(status) != 0:
            raise JitError(f"NVRTC does not answer ({status}); install megamoe[cuda13] or megamoe[cuda12]")
        self.version = (int(major), int(minor))
        self.identity = f"nvrtc-{major}.{minor}"

    def _include_paths(self) -> list[str]:
        paths = [str(include_root())]
        try:
            from cuda.pathfinder import find_nvidia_header_directory
        except ImportError:
            return paths
        for library in ("cudart", "cccl"):
            try:
                folder = find_nvidia_header_directory(library)
            except Exception:  # a library that this pathfinder does not know is no reason to fail
                folder = None
            if folder is not None and str(folder) not in paths:
                paths.append(str(folder))
        return paths

    def _compile(self, source: KernelSource, settings: JitSettings, kind: str) -> tuple[Any, str]:
        options = self._options(
            name=f"{source.name}.cu",
            arch=source.arch,
            std=f"c++{settings.cpp_standard}",
            lineinfo=settings.lineinfo or None,
            include_path=self._include_paths(),
            ptxas_options=["-v"] if kind == "cubin" else None,
        )
        if settings.print_command:
            print(f"megamoe jit: {self.identity} {source.name} {options}", file=sys.stderr)
        log = io.StringIO()
        try:
            result = self._program(source.code, "c++", options).compile(kind, logs=log)
        except Exception as error:
            raise JitError(f"NVRTC refused kernel '{source.name}': {error}\n{log.getvalue()}") from None
        return result, log.getvalue()

    def compile(self, source: KernelSource, settings: JitSettings) -> tuple[bytes, Usage]:
        result, log = self._compile(source, settings, "cubin")
        if settings.ptxas_verbose:
            print(log, file=sys.stderr)
        return bytes(result.code), parse_usage(log, source.entry)

    def ptx(self, source: KernelSource, settings: JitSettings) -> str:
        result, _ = self._compile(source, settings, "ptx")
        return bytes(result.code).decode()


class NvccCompiler(Compiler):
    """An nvcc on PATH or at a given place; for debugging, never needed."""

    def __init__(self, path: str) -> None:
        found = shutil.which(path)
        if found is None:
            raise JitError(f"MEGAMOE_JIT_COMPILER: no compiler '{path}' found; unset it to use NVRTC")
        self.path = found
        done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60)
        match = re.search(r"release ([\d.]+), V([\d.]+)", done.stdout)
        if match is None:
            raise JitError(f"MEGAMOE_JIT_COMPILER: '{found}' does not answer like nvcc")
        self.identity = f"nvcc-{match[2]}"

    def _run(self, source: KernelSource, settings: JitSettings, kind: str) -> tuple[bytes, str]:
        with tempfile.TemporaryDirectory(prefix="megamoe-nvcc-") as folder:
            code, out = Path(folder) / "kernel.cu", Path(folder) / f"kernel.{kind}"
            code.write_text(source.code)
            compute = source.arch.replace("sm_", "compute_")
            target = f"arch={compute},code={source.arch if kind == 'cubin' else compute}"
            command = [self.path, f"-std=c++{settings.cpp_standard}", "-gencode", target, f"-{kind}"]
            command += ["-O3", "-Xptxas", "-v", "-I", str(include_root())]
            command += ["-lineinfo"] if settings.lineinfo else []
            command += ["-o", str(out), str(code)]
            if settings.print_command:
                print("megamoe jit: " + " ".join(command), file=sys.stderr)
            done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
            if done.returncode != 0:
                raise JitError(f"nvcc refused kernel '{source.name}':\n{done.stderr[-8000:]}")
            return out.read_bytes(), done.stderr

    def compile(self, source: KernelSource, settings: JitSettings) -> tuple[bytes, Usage]:
        data, log = self._run(source, settings, "cubin")
        if settings.ptxas_verbose:
            print(log, file=sys.stderr)
        return data, parse_usage(log, source.entry)

    def ptx(self, source: KernelSource, settings: JitSettings) -> str:
        return self._run(source, settings, "ptx")[0].decode()


_found: dict[str, Compiler] = {}
_find_lock = threading.Lock()
_import_lock = threading.Lock()


def cuda_core() -> Any:
    """Return the module `cuda.core`, whole: its import puts a package of one CUDA version in its place and is not made for
    two threads, of which the second can see names missing.

    Raises:
        ImportError: it is not installed.
    """
    with _import_lock:
        import cuda.core

        return cuda.core


def find_compiler(settings: JitSettings) -> Compiler:
    """Return the compiler that the settings name, looked for once per process.

    Raises:
        JitError: it is not there; the message says what to install.
    """
    with _find_lock:
        if settings.compiler not in _found:
            _found[settings.compiler] = (
                NvrtcCompiler() if settings.compiler == "nvrtc" else NvccCompiler(settings.compiler)
            )
        return _found[settings.compiler]
