"""`megamoe doctor`: one table of what this machine can run, what is missing, and the command that mends it.

Nothing here may fail because something is missing: every import is tried, and torch may be absent.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

__all__ = ["Check", "collect", "run_doctor"]

OK, INFO, MISSING = "ok", "-", "MISSING"
_MIN_TORCH = (2, 9)
_MIN_SHM_BYTES = 1 << 30


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        name: what was looked at.
        status: `ok`, `-` (absent, and not needed here) or `MISSING`.
        detail: what was found.
        remedy: the command that mends it; empty when nothing is to be done.
        required: whether its absence makes megamoe unusable here.
    """

    name: str
    status: str
    detail: str
    remedy: str = ""
    required: bool = False


def _version(*packages: str) -> str | None:
    """Return "name version" of the first installed distribution."""
    for package in packages:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def _import(name: str) -> tuple[Any, str]:
    """Import a module; return it and an empty text, or None and the reason."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # a broken binary raises whatever it likes
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _python() -> Check:
    # An older Python cannot even read this file; the installer refuses it.
    return Check("Python", OK, f"{platform.python_version()} ({sys.executable})")


def _packages() -> list[Check]:
    checks = []
    for module, package in (("numpy", "numpy"), ("yaml", "pyyaml"), ("rich", "rich")):
        found, reason = _import(module)
        status = OK if found is not None else MISSING
        remedy = "" if found is not None else f"pip install {package}"
        checks.append(Check(package, status, _version(package) or reason, remedy, True))
    plot = _version("matplotlib")
    checks.append(Check("matplotlib (--plot)", OK if plot else INFO, plot or "absent", "" if plot else _extra("plot")))
    return checks


def _extra(name: str) -> str:
    return f"pip install 'megamoe[{name}]'"


def _torch(torch: Any, reason: str) -> Check:
    remedy = "pip install 'torch>=2.9'"
    if torch is None:
        return Check("torch", MISSING, reason, remedy, True)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    found = f"{torch.__version__}, {build}"
    numbers = re.findall(r"\d+", torch.__version__)[:2]
    if tuple(int(number) for number in numbers) < _MIN_TORCH:
        return Check("torch", MISSING, f"{found}; older than 2.9", f"{remedy} --upgrade", True)
    return Check("torch", OK, found)


def _driver() -> tuple[str | None, tuple[int, int] | None]:
    """Return the NVIDIA driver's version and the newest CUDA version it serves."""
    version = None
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
        version = match.group(1) if match else None
    except OSError:
        pass
    try:
        number = ctypes.c_int(0)
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value:
            return version, (number.value // 1000, number.value % 1000 // 10)
    except (OSError, AttributeError):
        pass
    return version, None


def _gpus(torch: Any) -> list[Check]:
    version, cuda = _driver()
    if cuda is None and version is None:
        return [Check("GPU", INFO, "none; the CPU backends run")]
    served = f"serves CUDA {cuda[0]}.{cuda[1]}" if cuda else "libcuda.so.1 cannot be loaded"
    checks = [Check("driver", OK if cuda else MISSING, f"{version or 'unknown version'}, {served}")]
    if torch is None:
        return checks
    if not torch.version.cuda:
        remedy = "install the CUDA build: pip install --force-reinstall 'torch>=2.9'"
        return [*checks, Check("GPU", MISSING, "a GPU is here, but torch is a CPU build", remedy)]
    if not torch.cuda.is_available():
        remedy = f"install a torch built for CUDA <= {cuda[0]}.{cuda[1]}, or update the driver" if cuda else ""
        return [*checks, Check("GPU", MISSING, "torch cannot use it", remedy or "reinstall the NVIDIA driver")]
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        arch = f"sm_{properties.major}{properties.minor}"
        gib = properties.total_memory / 2**30
        detail = f"{properties.name}, {arch}, {properties.multi_processor_count} SMs, {gib:.0f} GiB"
        hopper = (properties.major, properties.minor) == (9, 0)
        checks.append(Check(f"GPU {index}", OK if hopper else INFO, detail if hopper else f"{detail}; not Hopper"))
    if count > 1:
        checks.append(_peers(torch, count))
    return checks


def _peers(torch: Any, count: int) -> Check:
    rows = [
        "".join("." if a == b else "x" if torch.cuda.can_device_access_peer(a, b) else "0" for b in range(count))
        for a in range(count)
    ]
    whole = not any("0" in row for row in rows)
    detail = f"{' '.join(rows)} (x: row reaches column)"
    return Check("peer access", OK if whole else MISSING, detail, "" if whole else "see `nvidia-smi topo -p2p r`")


def _jit(has_gpu: bool, cuda: tuple[int, int] | None) -> list[Check]:
    """cuda-core and NVRTC, which compile the kernels: present, and not of a newer CUDA than the driver serves."""
    extra = _extra("cuda12" if cuda is not None and cuda[0] == 12 else "cuda13")
    absent = MISSING if has_gpu else INFO
    remedy = extra if has_gpu else ""
    core = _version("cuda-core")
    checks = [Check("cuda-core", OK if core else absent, core or "absent", "" if core else remedy)]
    nvrtc, reason = _import("cuda.bindings.nvrtc")
    number: tuple[int, int] | None = None
    if nvrtc is not None:
        try:
            _, major, minor = nvrtc.nvrtcVersion()
            number = (int(major), int(minor))
        except Exception as error:  # the bindings are there, the library is not
            reason = str(error).splitlines()[0]
    if number is None:
        checks.append(Check("NVRTC", absent, reason or "absent", remedy))
    elif cuda is not None and number[0] > cuda[0]:
        detail = f"{number[0]}.{number[1]} is newer than the driver's CUDA {cuda[0]}.{cuda[1]}"
        checks.append(Check("NVRTC", MISSING, detail, extra))
    else:
        checks.append(Check("NVRTC", OK, f"{number[0]}.{number[1]}"))
    return checks


def _symm_mem(torch: Any, has_gpu: bool) -> Check:
    """parallel.comm=symm_mem, which auto takes for several ranks with GPUs."""
    name = "comm symm_mem"
    if not has_gpu:
        return Check(name, INFO, "needs a GPU")
    module, reason = _import("torch.distributed._symmetric_memory")
    try:
        backend = module.get_backend(torch.device("cuda", 0)) if module is not None else None
    except Exception as error:  # a part of torch that may change with any version
        backend, reason = None, f"{type(error).__name__}: {error}"
    if backend != "CUDA":
        remedy = "unset TORCH_SYMMMEM" if backend else "pip install --upgrade 'torch>=2.9'"
        return Check(name, MISSING, reason or f"torch's backend is {backend}, CUDA is needed", remedy)
    variable = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
    shared = "allowed" if os.environ.get(variable) == "1" else f"need {variable}=1"
    return Check(name, OK, f"torch's backend CUDA, without multicast; several ranks on one GPU: {shared}")


def _nvshmem(torch: Any, has_gpu: bool) -> Check:
    """parallel.comm=nvshmem: the package, and the library that it loads."""
    name = "comm nvshmem"
    major = ((torch.version.cuda if torch is not None else None) or "13").split(".")[0]
    remedy = _extra(f"nvshmem{major}") if has_gpu else ""
    package = _version("nvshmem4py-cu13", "nvshmem4py-cu12")
    if package is None:
        return Check(name, INFO, "nvshmem4py is absent; parallel.comm=nvshmem needs it", remedy)
    module, reason = _import("nvshmem.core")
    try:
        library = module.get_version().libnvshmem_version if module is not None else None
    except Exception as error:  # the package is there, its library is not
        library, reason = None, f"{type(error).__name__}: {' '.join(str(error).split())}"
    if library is None:
        return Check(name, MISSING if has_gpu else INFO, f"{package}: {reason}", remedy)
    return Check(name, OK if has_gpu else INFO, f"{package}, libnvshmem {library}{'' if has_gpu else '; needs a GPU'}")


def _transport(torch: Any, has_gpu: bool) -> list[Check]:
    checks = [_symm_mem(torch, has_gpu)] if torch is not None else []
    checks.append(_nvshmem(torch, has_gpu))
    try:
        stat = os.statvfs("/dev/shm")
        size = stat.f_frsize * stat.f_blocks
        enough = size >= _MIN_SHM_BYTES and os.access("/dev/shm", os.W_OK)
        detail = f"{size / 2**30:.1f} GiB, {stat.f_frsize * stat.f_bavail / 2**30:.1f} GiB free"
    except OSError as error:
        enough, detail = False, str(error)
    remedy = "" if enough else "mount -o remount,size=8G /dev/shm (in a container: --shm-size=8g)"
    checks.append(Check("/dev/shm", OK if enough else MISSING, detail, remedy))
    return checks


def _host_engine() -> list[Check]:
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    detail = "no C++ compiler"
    if compiler:
        try:
            done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20)
            detail = (done.stdout.splitlines() or [compiler])[0]
        except (OSError, subprocess.SubprocessError) as error:
            compiler, detail = None, str(error)
    remedy = "" if compiler else "apt-get install g++ (or your system's C++20 compiler)"
    host, reason = _import("megamoe._host")
    built = host is not None
    needed = INFO if built else MISSING  # a compiler is of use only to build the engine
    checks = [Check("C++ compiler", OK if compiler else needed, detail, "" if compiler or built else remedy)]
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists() and not built:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        checks.append(Check("Python.h", MISSING, "absent", f"apt-get install {package}"))
    if not (files("megamoe") / "backends" / "cpu.py").is_file():
        return checks  # this version has no engine to build
    mend = "" if built else "pip install --force-reinstall --no-deps megamoe (in a checkout: pip install -e .)"
    checks.append(Check("C++ engine", OK if built else MISSING, "megamoe._host" if built else reason, mend))
    return checks


def _backends(torch: Any) -> list[Check]:
    """Ask each backend whether it runs the quickstart's layer here; one has to."""
    registry, reason = _import("megamoe.backends")
    config, config_reason = _import("megamoe.config")
    if registry is None or config is None:
        return [Check("backends", MISSING, reason or config_reason, "reinstall megamoe", True)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checks, chosen = [], None
    for name in registry.BACKENDS:
        try:
            spec = config.MoEConfig.from_yaml("quickstart").spec
            why = registry.unavailable(name, spec, device, 1)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        chosen = chosen or (name if why is None else None)
        detail = why or ("runs; kernel.backend=auto takes it" if chosen == name else "runs")
        checks.append(Check(f"backend {name}", OK if why is None else INFO, f"{detail} [{device.type}]"))
    if chosen is None:
        checks.append(Check("backends", MISSING, "none can run here", "mend what is missing above", True))
    return checks


def collect(backends: Callable[[Any], list[Check]] | None = None) -> list[Check]:
    """Look at the machine and return the rows of the table.

    Args:
        backends: stands in for the look at the op's backends (tests).
    """
    torch, reason = _import("torch")
    has_gpu = bool(torch is not None and torch.cuda.is_available())
    _, cuda = _driver()
    checks = [_python(), _torch(torch, reason), *_packages(), *_gpus(torch), *_jit(has_gpu, cuda)]
    checks += [*_transport(torch, has_gpu), *_host_engine()]
    if torch is not None:
        checks += (backends or _backends)(torch)
    return checks


def run_doctor() -> int:
    """Print the table; return 0 when megamoe can run here, else 1."""
    checks = collect()
    broken = [check for check in checks if check.required and check.status == MISSING]
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        for check in checks:
            print(f"{check.name}: {check.status} {check.detail} {check.remedy}".rstrip())
        return 1
    console = Console() if sys.stdout.isatty() else Console(width=160)
    table = Table(title="megamoe doctor", title_justify="left")
    for heading in ("what", "state", "found", "to mend it"):
        table.add_column(heading, overflow="fold")
    styles = {OK: "green", INFO: "dim", MISSING: "bold red"}
    for check in checks:
        state = f"[{styles[check.status]}]{check.status}[/]"
        table.add_row(check.name, state, escape(check.detail), escape(check.remedy))
    console.print(table)
    for check in broken:
        print(f"megamoe doctor: {check.name} is missing ({check.detail}): {check.remedy}", file=sys.stderr)
    return 1 if broken else 0
