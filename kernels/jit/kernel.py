"""A loaded kernel and its launch through `cuda.core`."""

from __future__ import annotations

import sys
import time
from typing import Any

from megamoe.kernels.jit.build import build
from megamoe.kernels.jit.compiler import JitError, cuda_core
from megamoe.kernels.jit.settings import JitSettings
from megamoe.kernels.jit.source import KernelSource

__all__ = ["LoadedKernel", "launched_kernels", "load"]

# names of every kernel that this process launched; a test holds it against the list of known instances
launched_kernels: set[str] = set()


class _Stream:
    """A raw CUDA stream address in the form that `cuda.core` takes."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._address)


class LoadedKernel:
    """A kernel on the current device, ready to launch.

    Args:
        source: what it was compiled from.
        kernel: the `cuda.core.Kernel`.
        settings: the switches in force.
        device: CUDA device index.
    """

    def __init__(self, source: KernelSource, kernel: Any, settings: JitSettings, device: int) -> None:
        core = cuda_core()
        self.source = source
        self._kernel = kernel
        self._launch = core.launch
        self._config_type = core.LaunchConfig
        self._configs: dict[tuple[int, int], Any] = {}
        self._streams: dict[int, Any] = {}
        if source.dynamic_shared_bytes > 48 * 1024:
            _allow_shared(kernel, source.dynamic_shared_bytes, source.name, device)

    def __call__(self, stream: int, grid: int, block: int, *arguments: Any) -> None:
        """Launch on a raw stream.

        Args:
            stream: address of the CUDA stream (`torch.cuda.current_stream().cuda_stream`).
            grid: number of blocks.
            block: threads per block.
            arguments: kernel arguments: int (64-bit pointer or `ctypes`/numpy scalar), float by `ctypes`.

        Raises:
            JitError: the driver refused the launch.
        """
        config = self._configs.get((grid, block))
        if config is None:
            config = self._config_type(grid=grid, block=block, shmem_size=self.source.dynamic_shared_bytes)
            self._configs[(grid, block)] = config
            launched_kernels.add(self.source.name)
        wrapped = self._streams.get(stream)
        if wrapped is None:
            wrapped = self._streams[stream] = cuda_core().Device().create_stream(_Stream(stream))
        try:
            self._launch(wrapped, config, self._kernel, *arguments)
        except Exception as error:
            raise JitError(f"launch of kernel '{self.source.name}' failed: {error}") from None

    @property
    def address(self) -> int:
        """Address of the kernel, for a `PreparedLaunch`; who asks for it counts as having launched it."""
        launched_kernels.add(self.source.name)
        return int(self._kernel.handle)


def _allow_shared(kernel: Any, num_bytes: int, name: str, device: int) -> None:
    """A block gets more than 48 KB of dynamic shared memory only after this opt-in, which belongs to one device."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, num_bytes, driver.CUkernel(int(kernel.handle)), device)
    if int(status) != 0:
        raise JitError(f"kernel '{name}' needs {num_bytes} bytes of shared memory, the driver says {status}")


_loaded: dict[tuple[str, int], LoadedKernel] = {}


def load(source: KernelSource, device: int, settings: JitSettings | None = None) -> LoadedKernel:
    """Return the kernel, compiled if need be and loaded on a device.

    Args:
        source: the kernel.
        device: CUDA device index; it must be the current device of the caller's torch context.
        settings: how to compile; None reads the environment.

    Raises:
        JitError: as `build`, or the driver refuses the cubin.
    """
    settings = JitSettings.from_env() if settings is None else settings
    artifact = build(source, settings)
    cached = _loaded.get((artifact.key, device))
    if cached is not None:
        return cached
    core = cuda_core()
    start = time.perf_counter()
    try:
        core.Device(device).set_current()
        kernel = core.ObjectCode.from_cubin(artifact.cubin).get_kernel(source.entry)
        loaded = LoadedKernel(source, kernel, settings, device)
    except JitError:
        raise
    except Exception as error:
        raise JitError(f"kernel '{source.name}' could not be loaded on device {device}: {error}") from None
    if settings.print_load_time:
        print(f"megamoe jit: loaded {source.name} in {1e3 * (time.perf_counter() - start):.1f} ms", file=sys.stderr)
    _loaded[(artifact.key, device)] = loaded
    return loaded
