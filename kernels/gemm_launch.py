"""Launching the grouped GEMM kernels: one prepared plan per problem, whose launch only needs the pointers."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from megamoe.kernels.gemm_instances import GemmInstance
from megamoe.kernels.jit import load
from megamoe.kernels.jit.driver import TENSOR_MAP_BYTES, PreparedLaunch, get_driver

__all__ = ["Plan"]

_BLOCK_K = 128
# GroupedGemmArgs (impls/sm90_grouped_gemm_args.cuh): maps of x and w, these pointers and sizes, the groups, n, K steps
_POINTERS = struct.Struct("<4Q")  # packed, w_scales, x_scales, d
_SIZES = struct.Struct("<2q")  # d_stride, x_scales_stride
_GROUPS = struct.Struct("<2Q2i")  # row_groups, counts, num_groups, max_rows
_REST = struct.Struct("<3i")  # n, num_k_blocks, num_x_scales
_X_MAP, _W_MAP, _POINTERS_AT = 0, TENSOR_MAP_BYTES, 2 * TENSOR_MAP_BYTES
_SIZES_AT = _POINTERS_AT + _POINTERS.size
_GROUPS_AT = _SIZES_AT + _SIZES.size
_REST_AT = _GROUPS_AT + _GROUPS.size
_ARGS_BYTES = 384
_ROW_POINTERS = struct.Struct("<2Q")


class Plan(PreparedLaunch):
    """A checked problem, ready to launch.

    Args:
        instance: the kernel.
        tensors: lhs values, lhs scales, rhs values, rhs scales, out, and masked_m, m_indices, or None: all rows count.
        masked: whether the last tensor is not m_indices.
        k: columns of lhs.
        num_sms: blocks to launch; None is one per SM.
        scales_in_order: whether the scales per 128 of K lie as the kernel reads them.

    Attributes:
        pointers: addresses of the tensors that the next launch reads and writes; `point` sets them.
        device: CUDA device index.
        is_alone: whether this process has no other device.
        copies_scales: whether the scales must be brought into the kernel's order in every call.
        per_token: one scale per row.

    Raises:
        JitError: the kernel can't be compiled or loaded, or the driver refuses a tensor map.
    """

    def __init__(
        self,
        instance: GemmInstance,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None],
        masked: bool,
        k: int,
        num_sms: int | None,
        scales_in_order: bool,
    ) -> None:
        x, scales, w, _, out, _ = tensors
        self.device, self.is_alone = out.get_device(), torch.cuda.device_count() <= 1
        num_groups, n, num_rows = w.shape[0], out.shape[-1], out.shape[:-1].numel()
        self.per_token = instance.granularity == "token"
        flat = scales.reshape(-1)  # of one column: its stride doesn't matter
        in_order = flat.is_contiguous() and flat.data_ptr() == scales.data_ptr() if self.per_token else scales_in_order
        self.copies_scales = not in_order
        self._masked, self._packed = masked, instance.format == "fp4"
        self._aligns_scales = not self.per_token and in_order
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        super().__init__(
            instance.name,
            load(instance.source(), self.device).address,
            min(num_sms or sms, sms),
            instance.threads,
            instance.shared_bytes(num_groups),
            _ARGS_BYTES,
        )
        # with a single row its stride means nothing and may be anything
        x_stride = x.stride(-2) if x.shape[-2] > 1 else -(-k // 16) * 16
        d_stride = out.stride(-2) if out.shape[-2] > 1 else n
        encode = get_driver().encode_tensor_map
        encode(self.address + _X_MAP, x.data_ptr(), (k, num_rows), (x_stride,), (_BLOCK_K, instance.tile_rows))
        if not self._packed:
            # rows permuted in groups of 32 (epilogue/store_rows.cuh): feature = 32 w + 8 c + 2 j + b
            dims, strides = (k, 2, 4, 4, num_groups * n // 32), (k, 8 * k, 2 * k, 32 * k)
            encode(
                self.address + _W_MAP, w.data_ptr(), dims, strides, (_BLOCK_K, 2, 4, 4, instance.tile_features // 32)
            )
        num_scales = -(-num_rows // 4) * 4
        scale_stride = scales.stride(-1) if self._aligns_scales else num_scales
        _SIZES.pack_into(self.bytes, _SIZES_AT, d_stride, scale_stride)
        _GROUPS.pack_into(self.bytes, _GROUPS_AT, 0, 0, num_groups, out.shape[-2])
        _REST.pack_into(self.bytes, _REST_AT, n, -(-k // _BLOCK_K), num_scales)
        self.pointers: tuple[int, ...] = (x.data_ptr(), 0, w.data_ptr(), 0, 0, 0)

    def point(self, pointers: tuple[int, ...]) -> bool:
        """Let the next launches take tensors at other addresses; False, and nothing done, if these aren't aligned.

        Args:
            pointers: of the six tensors, in order; 0 for None.
        """
        x, scales, w, w_scales, out, groups = pointers
        if (x | w | out | (scales if self._aligns_scales else 0)) % 16:
            return False
        before = self.pointers
        if x != before[0]:
            get_driver().replace_address(self.address + _X_MAP, x)
        if w != before[2] and not self._packed:
            get_driver().replace_address(self.address + _W_MAP, w)
        _POINTERS.pack_into(self.bytes, _POINTERS_AT, w if self._packed else 0, w_scales, scales, out)
        rows = (0, groups) if self._masked else (groups, 0)
        _ROW_POINTERS.pack_into(self.bytes, _GROUPS_AT, *rows)
        self.pointers = pointers
        return True
