"""Launching the grouped GEMM kernels: tensor maps, the bytes of the arguments, and one prepared plan per problem."""

from __future__ import annotations

import ctypes
import struct
import threading

import torch
from torch import Tensor

from megamoe.kernels.gemm_instances import (
    ROW_RANGES_BLOCK,
    ROW_RANGES_CLUSTER,
    GemmInstance,
    row_ranges_source,
)
from megamoe.kernels.jit import JitError, load

__all__ = ["Plan", "current_stream", "plan_launch"]

_BLOCK_K = 128
# GroupedGemmArgs (impls/sm90_grouped_gemm_args.cuh): two tensor maps, then the fields
_MAP_BYTES = 128
_FIELDS = struct.Struct("<4Q2q2Q4i")
_ARGS_BYTES = 384
_X_SCALES = 2 * _MAP_BYTES + 2 * 8  # offsets of what changes from call to call
_STARTS = 2 * _MAP_BYTES + 6 * 8
_UNBOUNDED_ROWS = 2**30  # max_rows of contiguous groups: their ends are known


def current_stream(device: int) -> int:
    """Return the address of torch's current stream on a device."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def _tensor_map(address: int, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
    """Encode a map of bytes, 128-byte swizzled; dims innermost first, strides in bytes of dims 1 and up."""
    from cuda.bindings import driver

    status, tensor_map = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        len(dims),
        address,
        [driver.cuuint64_t(d) for d in dims],
        [driver.cuuint64_t(s) for s in strides],
        [driver.cuuint32_t(b) for b in box],
        [driver.cuuint32_t(1)] * len(dims),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status) != 0:
        raise JitError(f"the driver refused the tensor map of dims {dims}, strides {strides}: {status}")
    return ctypes.string_at(tensor_map.getPtr(), _MAP_BYTES)


class Plan:
    """A checked problem whose launch only needs the pointers that change.

    Args:
        instance: the kernel.
        arguments: bytes of GroupedGemmArgs.
        device: CUDA device index.
        grid: blocks.
        num_groups, num_rows: of the problem.
        masked: whether counts are given rather than a group per row.
        per_token: one scale per row.
        copies_scales: whether the scales must be brought into the kernel's order in every call.
    """

    def __init__(
        self,
        instance: GemmInstance,
        arguments: bytes,
        device: int,
        grid: int,
        num_groups: int,
        num_rows: int,
        *,
        masked: bool,
        per_token: bool,
        copies_scales: bool,
    ) -> None:
        self.device, self.grid, self.masked = device, grid, masked
        self.per_token, self.copies_scales = per_token, copies_scales
        self.is_empty = num_rows == 0
        if self.is_empty:
            return
        self._num_groups, self._num_rows, self._threads = num_groups, num_rows, instance.threads
        self._shared_bytes = instance.shared_bytes(num_groups)
        self._kernel = load(instance.source(), device)
        self._ranges = None if masked else load(row_ranges_source(), device)
        self._rooms: dict[int, Tensor] = {}
        self._lock = threading.Lock()  # the bytes below are written by every call
        self._bytes = ctypes.create_string_buffer(arguments, _ARGS_BYTES)
        address = ctypes.addressof(self._bytes)
        self._parameters = (ctypes.c_void_p * 1)(address)
        self._x_scales = ctypes.c_uint64.from_buffer(self._bytes, _X_SCALES)
        self._starts = ctypes.c_uint64.from_buffer(self._bytes, _STARTS)
        self._ends = ctypes.c_uint64.from_buffer(self._bytes, _STARTS + 8)
        # of the kernel that finds the groups' rows: indices, rows, groups, ranges
        self._indices, self._ranges_out = ctypes.c_uint64(), ctypes.c_uint64()
        rows, groups = ctypes.c_int(num_rows), ctypes.c_int(num_groups)
        self._constants = (rows, groups)
        fields = (self._indices, rows, groups, self._ranges_out)
        self._range_parameters = (ctypes.c_void_p * 4)(*map(ctypes.addressof, fields))

    def launch(self, scales: Tensor, groups: Tensor, stream: int) -> None:
        """Launch on a stream.

        Args:
            scales: of the activations, in the kernel's order.
            groups: masked_m or m_indices.
            stream: address of the stream.
        """
        if torch._C._cuda_getDevice() != self.device:
            with torch.cuda.device(self.device):
                self.launch(scales, groups, stream)
            return
        with self._lock:
            if self._ranges is not None:
                ranges = self._room(groups, stream)
                address = ranges.data_ptr()
                self._starts.value, self._ends.value = address, address + 4 * self._num_groups
                self._indices.value, self._ranges_out.value = groups.data_ptr(), address
                self._ranges.launch_raw(stream, ROW_RANGES_CLUSTER, ROW_RANGES_BLOCK, 0, self._range_parameters)
            self._x_scales.value = scales.data_ptr()
            self._kernel.launch_raw(stream, self.grid, self._threads, self._shared_bytes, self._parameters)

    def _room(self, groups: Tensor, stream: int) -> Tensor:
        """Return room for the rows of the groups: one for each stream, whose calls follow each other.

        A captured graph gets its own, since its replays may run beside later calls.
        """
        room = self._rooms.get(stream)
        capturing = torch.cuda.is_current_stream_capturing()
        if room is None or capturing:
            room = torch.empty(2 * self._num_groups, dtype=torch.int32, device=groups.device)
            if not capturing:
                self._rooms[stream] = room
        return room


def plan_launch(
    instance: GemmInstance,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    scales_in_order: bool,
    masked: bool,
    k: int,
    num_sms: int | None,
) -> Plan:
    """Prepare the launch of a checked problem.

    Args:
        instance: the kernel.
        tensors: lhs values, lhs scales, rhs values, rhs scales, out, and masked_m or m_indices.
        scales_in_order: whether the scales per 128 of K lie as the kernel reads them.
        masked: whether the last tensor is masked_m.
        k: columns of lhs.
        num_sms: blocks to launch; None is one per SM.

    Raises:
        JitError: the kernel can't be compiled or loaded, or the driver refuses a tensor map.
    """
    x, scales, w, w_scales, out, groups = tensors
    device = out.get_device()
    num_groups, n, num_rows = w.shape[0], out.shape[-1], out.shape[:-1].numel()
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    grid = min(num_sms or sms, sms)
    arguments = b""
    per_token = instance.granularity == "token"
    # rows of one element need no stride of their own
    in_order = scales.reshape(-1).data_ptr() == scales.data_ptr() if per_token else scales_in_order
    if num_rows:
        # with a single row its stride means nothing and may be anything
        x_stride = x.stride(-2) if x.shape[-2] > 1 else -(-k // 16) * 16
        d_stride = out.stride(-2) if out.shape[-2] > 1 else n
        x_map = _tensor_map(x.data_ptr(), (k, num_rows), (x_stride,), (_BLOCK_K, instance.tile_rows))
        w_map = bytes(_MAP_BYTES)
        if instance.format == "fp8":
            # rows permuted in groups of 32 (epilogue/store_rows.cuh): feature = 32 w + 8 c + 2 j + b
            dims, strides = (k, 2, 4, 4, num_groups * n // 32), (k, 8 * k, 2 * k, 32 * k)
            w_map = _tensor_map(w.data_ptr(), dims, strides, (_BLOCK_K, 2, 4, 4, instance.tile_features // 32))
        scale_stride = scales.stride(-1) if in_order and not per_token else -(-num_rows // 4) * 4
        fields = _FIELDS.pack(
            w.data_ptr() if instance.format == "fp4" else 0,
            w_scales.data_ptr(),
            0,
            out.data_ptr(),
            d_stride,
            scale_stride,
            0,
            groups.data_ptr() if masked else 0,
            num_groups,
            out.shape[-2] if masked else _UNBOUNDED_ROWS,
            n,
            -(-k // _BLOCK_K),
        )
        arguments = x_map + w_map + fields
    return Plan(
        instance,
        arguments,
        device,
        grid,
        num_groups,
        num_rows,
        masked=masked,
        per_token=per_token,
        copies_scales=not in_order,
    )
