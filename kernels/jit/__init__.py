"""Just-in-time compilation of the CUDA kernels: NVRTC through `cuda.core`, a shared cache, and launching.

    settings.py   the MEGAMOE_JIT_* switches as one value
    source.py     kernel source text, its own headers, and the key of a compilation
    compiler.py   NVRTC (or nvcc on request) -> cubin and its resource usage
    cache.py      cubins on disk: many readers and writers, damaged entries, read-only folders
    build.py      source -> cubin, through the cache, once per key and process
    kernel.py     a loaded kernel and its launch
    driver.py     libcuda: launches at low host cost, tensor maps

Importing this package needs no GPU, no CUDA and no `cuda.core`; they are looked for when something is compiled.
"""

from __future__ import annotations

from megamoe.kernels.jit.build import Artifact, build
from megamoe.kernels.jit.compiler import JitError, Usage
from megamoe.kernels.jit.kernel import LoadedKernel, load
from megamoe.kernels.jit.settings import JitSettings
from megamoe.kernels.jit.source import KernelSource

__all__ = ["Artifact", "JitError", "JitSettings", "KernelSource", "LoadedKernel", "Usage", "build", "load"]
