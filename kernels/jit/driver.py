"""libcuda through `ctypes`: the launch whose host cost counts, and tensor maps.

A launch with everything prepared takes four addresses; the bindings of `cuda.core` convert a dozen arguments each time.
"""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from typing import Any

from megamoe.kernels.jit.compiler import JitError

__all__ = ["TENSOR_MAP_BYTES", "Driver", "PreparedLaunch", "get_driver"]

TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64
# of cuda.h: CU_TENSOR_MAP_DATA_TYPE_UINT8, _UINT32, _INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_L2_256B,
# _FLOAT_OOB_FILL_NONE
_UINT8, _UINT32, _NO_INTERLEAVE, _SWIZZLE_128B, _L2_256B, _NO_FILL = 0, 2, 0, 3, 3, 0


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class Driver:
    """The functions of libcuda that are called here.

    Attributes:
        launch: cuLaunchKernelEx(config, function, parameters, extra) -> status, addresses all.

    Raises:
        JitError: there is no libcuda, or it is older than CUDA 12.
    """

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self.launch: Any = library.cuLaunchKernelEx
            self._encode: Any = library.cuTensorMapEncodeTiled
            self._replace: Any = library.cuTensorMapReplaceAddress
            self._name: Any = library.cuGetErrorName
        except (OSError, AttributeError) as error:
            raise JitError(f"no NVIDIA driver of CUDA 12 or newer was found: {error}") from None
        address, number = ctypes.c_void_p, ctypes.c_int
        self.launch.argtypes = [address] * 4
        self._encode.argtypes = [address, number, ctypes.c_uint, address, *[address] * 4, *[number] * 4]
        self._replace.argtypes = [address, address]
        self._name.argtypes = [number, address]

    def error_name(self, status: int) -> str:
        """Return the name of a status, such as CUDA_ERROR_INVALID_VALUE."""
        name = ctypes.c_char_p()
        self._name(status, ctypes.addressof(name))
        return (name.value or str(status).encode()).decode()

    def encode_tensor_map(
        self,
        target: int,
        address: int,
        dims: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        *,
        words: bool = False,
        swizzled: bool = True,
    ) -> None:
        """Write a map of bytes or of 4-byte words.

        Args:
            target: address of the 128 bytes, a multiple of 64.
            address: of the matrix on the device, a multiple of 16.
            dims: innermost first.
            strides: bytes, of dims 1 and up.
            box: what one copy brings.
            words: elements of 4 bytes.
            swizzled: rows of 128 bytes come 128-byte swizzled into shared memory; otherwise they come as they are.

        Raises:
            JitError: the driver refuses it.
        """
        rank = len(dims)
        status = self._encode(
            *(target, _UINT32 if words else _UINT8, rank, address),
            (ctypes.c_uint64 * rank)(*dims),
            (ctypes.c_uint64 * rank)(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            *(_NO_INTERLEAVE, _SWIZZLE_128B if swizzled else 0, _L2_256B, _NO_FILL),
        )
        if status:
            name = self.error_name(status)
            raise JitError(f"the driver refused the tensor map of dims {dims}, strides {strides}, box {box}: {name}")

    def replace_address(self, target: int, address: int) -> None:
        """Let an encoded map speak of another address.

        Raises:
            JitError: the driver refuses it.
        """
        status = self._replace(target, address)
        if status:
            raise JitError(f"the driver refused address {address:#x} for a tensor map: {self.error_name(status)}")


_lock = threading.Lock()
_driver: Driver | None = None


def get_driver() -> Driver:
    """Return the driver, looked for once per process.

    Raises:
        JitError: as `Driver`.
    """
    global _driver
    with _lock:
        if _driver is None:
            _driver = Driver()
        return _driver


class PreparedLaunch:
    """A kernel with a fixed grid and one parameter, a block of bytes that may be rewritten between launches.

    Not for several threads at once: they would share these bytes.

    Args:
        name: of the kernel, for messages.
        function: address of the loaded kernel.
        grid, block: blocks, and threads of each.
        shared_bytes: dynamic shared memory.
        num_bytes: of the parameter; `address` is a multiple of 64, as tensor maps need.
    """

    def __init__(self, name: str, function: int, grid: int, block: int, shared_bytes: int, num_bytes: int) -> None:
        self.name, self.grid = name, grid
        room = ctypes.create_string_buffer(num_bytes + _TENSOR_MAP_ALIGNMENT)
        skipped = -ctypes.addressof(room) % _TENSOR_MAP_ALIGNMENT
        self.bytes = (ctypes.c_char * num_bytes).from_buffer(room, skipped)
        self.address = ctypes.addressof(self.bytes)
        self._stream = 0
        self._config = _Config(grid, 1, 1, block, 1, 1, shared_bytes, None, None, 0)
        self._parameters = (ctypes.c_void_p * 1)(self.address)
        addresses = (ctypes.addressof(self._config), function, ctypes.addressof(self._parameters))
        self._run = partial(get_driver().launch, *map(ctypes.c_void_p, addresses), None)

    def __call__(self, stream: int) -> None:
        """Launch on a raw stream of the current device; the bytes are read before the call returns.

        Raises:
            JitError: the driver refused the launch.
        """
        if stream != self._stream:
            self._config.stream = self._stream = stream
        status = self._run()
        if status:
            raise JitError(f"launch of kernel '{self.name}' failed: {get_driver().error_name(status)}")
